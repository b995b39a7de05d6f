"""Run tests on code with one deliberate error at a time, and count the errors they notice.

    python -m tests.mutations.run [--json PATH] [NAME ...]

`mutations.toml` lists each error: a file, a piece of code that occurs there once, its replacement,
and the tests to run. Errors by which the router ignores an option of its file follow the table's. A
copy of the tree gets the replacement. An error is caught if a test fails or does not end in time,
and survives if all pass. Without names all run. The exit status is 1 unless all are caught.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import fields

from tests.router.test_option_effects import SHOWN, options

ROOT = Path(__file__).parent.parent.parent
TABLE = Path(__file__).parent / "mutations.toml"
COPIED = ("vllm_kvpool", "tests", "benchmarks", "docs", "examples", "configs", "pyproject.toml")
TIMEOUT_S = 300.0
CAUGHT, SURVIVED, NO_TESTS = "caught", "SURVIVED", "no tests ran"


class Mutation(NamedTuple):
    """A deliberate error and the tests that should notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def apply(self, root: Path) -> None:
        """Make the error in a tree. ValueError unless the code occurs exactly once."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {self.old!r} {text.count(self.old)} times"
            )
        path.write_text(text.replace(self.old, self.new))


def read_mutations() -> list[Mutation]:
    """Return the table's mutations, in its order, and one for each option of the router's file."""
    table = tomllib.loads(TABLE.read_text())
    return [*(Mutation(**each) for each in table["mutation"]), *_ignored_options()]


def _ignored_options() -> Iterator[Mutation]:
    """Yield errors by which an option of the router's file has no effect but its default."""
    line = "    return kind(**found) if found.keys() >= set(required) else None"
    for option, kind, name in options():
        is_required = any(each.name == name and each.required for each in fields(kind))
        if option in SHOWN and not is_required:
            dropped = (
                f'    if kind.__name__ == "{kind.__name__}":\n        found.pop("{name}", None)\n'
            )
            title = f"the router's option {option} has no effect"
            file = "vllm_kvpool/router/config.py"
            yield Mutation(title, file, line, dropped + line, SHOWN[option])


def outcome_of(mutation: Mutation) -> str:
    """Run the tests of a mutation in a copy of the tree."""
    with tempfile.TemporaryDirectory(prefix="mutation") as directory:
        root = Path(directory)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        mutation.apply(root)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": directory, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [*command, *shlex.split(mutation.tests)],
                cwd=root,
                env=environment,
                capture_output=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return CAUGHT
    if done.returncode == 0:
        return SURVIVED
    return CAUGHT if done.returncode == 1 else NO_TESTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where each outcome is kept")
    parser.add_argument("names", nargs="*", help="run these alone")
    args = parser.parse_args()
    found: dict[str, str] = {}
    if args.json and args.json.exists() and args.names:
        found |= json.loads(args.json.read_text())["each"]
    table = read_mutations()
    for mutation in table:
        if not args.names or mutation.name in args.names:
            outcome = found[mutation.name] = outcome_of(mutation)
            print(f"{outcome:<12}  {mutation.name}", flush=True)
    found = {each.name: found[each.name] for each in table if each.name in found}
    count = sum(outcome == CAUGHT for outcome in found.values())
    print(f"{count} of {len(found)} caught")
    if args.json:
        score = {"caught": count, "of": len(found), "each": found}
        args.json.write_text(json.dumps(score, indent=1) + "\n")
    sys.exit(count < len(found) or not found)


if __name__ == "__main__":
    main()
