"""Run tests on code with one deliberate error at a time, and count the errors they notice.

    python -m tests.mutations.run [--json PATH] [NAME ...]

`mutations.toml` lists each error: a file, a piece of code that occurs there once, its replacement,
and the tests to run. Errors by which the router ignores an option of its file follow the table's. A
copy of the tree gets the replacement. The tests first run without an error: if they fail or do not
end in time, they prove nothing, and their errors are void. Otherwise an error is caught if a test
fails or does not end in time, and survives if all pass. Without names all run. The exit status is 1
unless all are caught.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import fields

from tests.router.test_option_effects import SHOWN, options

ROOT = Path(__file__).parent.parent.parent
TABLE = Path(__file__).parent / "mutations.toml"
COPIED = ("vllm_kvpool", "tests", "benchmarks", "docs", "examples", "configs", "pyproject.toml")
TIMEOUT_S = 300.0
CAUGHT, SURVIVED, NO_TESTS = "caught", "SURVIVED", "no tests ran"
VOID = "VOID"  # the tests fail without the error, too


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


def copy_tree(root: Path) -> None:
    """Copy what tests need of the tree into an empty directory."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, root / name)


def passes(root: Path, tests: str) -> bool | None:
    """Run tests in a copy of the tree.

    Returns:
        True if all pass, False if one fails or the time ends, None if pytest found none to run.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *shlex.split(tests)],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return {0: True, 1: False}.get(done.returncode)


def outcomes(
    root: Path,
    mutations: Sequence[Mutation],
    run: Callable[[Path, str], bool | None] = passes,
) -> Iterator[tuple[Mutation, str]]:
    """Make each error in a copy of the tree and yield what its tests say.

    `run` runs tests like `passes`. Each command of tests runs once without an error before.
    """
    without: dict[str, bool | None] = {}
    for each in mutations:
        if each.tests not in without:
            without[each.tests] = run(root, each.tests)
        if not without[each.tests]:
            yield each, NO_TESTS if without[each.tests] is None else VOID
            continue
        each.apply(root)
        is_passed = run(root, each.tests)
        shutil.copy2(ROOT / each.file, root / each.file)
        yield each, {True: SURVIVED, False: CAUGHT, None: NO_TESTS}[is_passed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where each outcome is kept")
    parser.add_argument("names", nargs="*", help="run these alone")
    args = parser.parse_args()
    found: dict[str, str] = {}
    if args.json and args.json.exists() and args.names:
        found |= json.loads(args.json.read_text())["each"]
    table = read_mutations()
    chosen = [each for each in table if not args.names or each.name in args.names]
    with tempfile.TemporaryDirectory(prefix="mutation") as directory:
        copy_tree(Path(directory))
        for mutation, outcome in outcomes(Path(directory), chosen):
            found[mutation.name] = outcome
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
