"""Run every benchmark, and keep its results beside the command and the machine.

    python benchmarks/run_all.py [--quick] [--only NAME ...]

Each script runs in a process of its own, one after another, on a machine that should do nothing
else.
`results/{name}.json` keeps what it measured, and on what; `results/SUMMARY.md` has all that is
kept: tables, what limits them, and each target with the ratio that was reached. A script that fails
or takes too long keeps its former results and makes the exit status 1; a missed target does not.
`CONVERSATION_TRACE` names a chat trace, `VLLM_ROUTER` the program of vllm-router in an environment;
`fio` is a program of the system. Without them rows are missing.
SmolLM2 (`requirements/demo.txt`) and NIXL (`requirements/nixl.txt`) are installed beside the
environment by the scripts that need them.
"""

import argparse
import ast
import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from benchmarks import figures, scale
from benchmarks.common import LIMITED_BY, Row, cell_text
from benchmarks.limits import RULE
from tests.support.orphans import ending_with_parent

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SUMMARY = RESULTS / "SUMMARY.md"
SCRIPT_TIMEOUT_S = 1800.0
PR_SET_CHILD_SUBREAPER = 36
END_ROUNDS, END_TIMEOUT_S = 3, 10.0
PACKAGES = ("torch", "vllm", "mooncake-transfer-engine", "numba", "numpy", "xxhash")
FLAVOURS = ("", "-cpu", "-non-cuda")  # of one package, under names of their own


def machine() -> dict[str, str]:
    """What the numbers depend on, without a name of the machine."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **dict(versions()),
    }


def versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for flavour in FLAVOURS:
            try:
                yield package + flavour, importlib.metadata.version(package + flavour)
            except importlib.metadata.PackageNotFoundError:
                continue
            break


class Benchmark(NamedTuple):
    """A script, the name of one of its benchmarks if it has several, and what it says of itself."""

    script: Path
    name: str
    doc: str


def benchmarks() -> dict[str, Benchmark]:
    """Return all benchmarks by name: a script's functions `bench_NAME`, or else the script."""
    found = {}
    for path in sorted(HERE.glob("bench_*.py")):
        tree = ast.parse(path.read_text())
        several = {
            each.name.removeprefix("bench_"): ast.get_docstring(each) or ""
            for each in tree.body
            if isinstance(each, ast.FunctionDef) and each.name.startswith("bench_")
        }
        whole = {path.stem.removeprefix("bench_"): ast.get_docstring(tree) or ""}
        for name, doc in (several or whole).items():
            found[name] = Benchmark(path, name if several else "", doc)
    return dict(sorted(found.items()))


def run(benchmark: Benchmark, quick: bool) -> dict[str, Any]:
    """What the script measured, with its command; `failed` says what went wrong."""
    options = [*([benchmark.name] if benchmark.name else []), *(["--quick"] if quick else [])]
    script = benchmark.script
    result: dict[str, Any] = {
        "command": " ".join(["python", f"benchmarks/{script.name}", *options])
    }
    print(f"== {result['command']}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result.json"
        command = ending_with_parent([sys.executable, str(script), *options, "--json", str(output)])
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = process.wait(SCRIPT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            result["failed"] = f"no end in {SCRIPT_TIMEOUT_S:g} s"
        else:
            if status or not output.exists():
                result["failed"] = f"exit status {status}"
            else:
                result |= json.loads(output.read_text())
        finally:
            end_descendants()
        result["seconds"] = round(time.monotonic() - start, 1)
    return result


def adopt_orphans() -> None:
    """Become the parent of what a script leaves behind, which is then seen and ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def end_descendants() -> None:
    """Kill what the script and its servers have started, so that nothing runs beside the next."""
    for _ in range(END_ROUNDS):  # what is killed may have started another meanwhile
        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, END_TIMEOUT_S)


def markdown(result: Mapping[str, Any], surroundings: Mapping[str, str]) -> Iterator[str]:
    """The section of one benchmark. A limit that all rows share stands once, above them."""
    seconds = f" ({result['seconds']} s)" if "seconds" in result else ""
    yield f"`{result['command']}`{seconds}"
    yield ""
    if "failed" in result:
        yield f"**Failed: {result['failed']}.**"
        yield ""
        return
    own = result.get("machine", surroundings)
    if others := [
        f"{name} {value}" for name, value in own.items() if surroundings.get(name) != value
    ]:
        yield f"Measured elsewhere: {', '.join(others)}."
    limits = {row.get(LIMITED_BY) for row in result["rows"]}
    is_one = len(limits) == 1 and None not in limits
    if is_one:
        yield f"All rows limited by {limits.pop()}."
    yield ""
    for rows in tables(result["rows"]):
        names = dict.fromkeys(name for row in rows for name in row)
        if is_one:
            del names[LIMITED_BY]
        yield f"| {' | '.join(names)} |"
        yield "|" + "---|" * len(names)
        for row in rows:
            yield f"| {' | '.join(cell_text(row.get(name, '')) for name in names)} |"
        yield ""
    notes = result.get("notes", [])
    yield from (f"* {note}" for note in notes)
    if notes:
        yield ""


def tables(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows that follow one another and share at least half of their columns are one table."""
    table: list[Row] = []
    names: set[str] = set()
    for row in rows:
        if 2 * len(names & row.keys()) < len(names | row.keys()) and table:
            yield table
            table, names = [], set()
        table.append(row)
        names |= row.keys()
    if table:
        yield table


def conditions(doc: str) -> Iterator[str]:
    """What a benchmark says of itself: what it measures, how, and what its columns mean."""
    first, _, rest = doc.partition("\n")
    # The command is shown with what it gave.
    about = "\n".join(line for line in rest.split("\n") if not line.startswith("    "))
    yield from (first, "", about.strip(), "")


def summary(results: Mapping[str, dict[str, Any]], surroundings: dict[str, str]) -> str:
    lines = ["# Benchmarks", "", "Ratios compare what ran side by side in one run.", ""]
    lines += [f"{RULE[0].upper()}{RULE[1:]}.", ""]
    minutes = sum(result.get("seconds", 0.0) for result in results.values()) / 60
    lines += [f"All sections together took {minutes:.0f} minutes.", ""]
    lines += [f"* {name}: {value}" for name, value in surroundings.items()]
    targets = [
        (each["reached"], f"* {name}: {each['text']}")
        for name, result in results.items()
        for each in result.get("targets", [])
    ]
    failed = [f"* {n}: failed, {r['failed']}" for n, r in results.items() if "failed" in r]
    missed = [text for reached, text in targets if not reached]
    lines += ["", "## Targets", "", f"Missed, {len(missed)} of {len(targets)}:", ""]
    lines += [*failed, *missed, "", "Reached:", ""]
    lines += [text for reached, text in targets if reached]
    docs = {name: each.doc for name, each in benchmarks().items()}
    for name, result in results.items():
        about = conditions(docs[name]) if name in docs else ()
        shown = "\n".join([*about, *markdown(result, surroundings)])
        lines += ["", f"## {name}", "", *shown.rstrip().split("\n")]
    return "\n".join(lines) + "\n"


def kept_summary() -> str:
    """Return the text of SUMMARY.md: the kept results, beside the machine that most came from."""
    kept = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    machines = Counter(tuple(result["machine"].items()) for result in kept.values())
    return summary(kept, dict(machines.most_common(1)[0][0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats; keeps no results")
    parser.add_argument("--only", nargs="*", default=[], help="names of benchmarks")
    args = parser.parse_args()
    known = benchmarks()
    unknown = set(args.only) - set(known)
    if unknown:
        parser.error(f"no benchmark {sorted(unknown)}; known are {', '.join(known)}")
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    results = {}
    for name, each in known.items():
        if not args.only or name in args.only:
            results[name] = run(each, args.quick)
            if not args.quick:
                keep(name, results[name])
    print(summary(results, machine()))
    if not args.quick:
        write_documents()
    return any("failed" in result for result in results.values())


def keep(name: str, result: dict[str, Any]) -> None:
    """Replace the kept result of a benchmark, unless it failed or had nothing to measure."""
    if "failed" not in result and result["rows"]:
        record = {"machine": machine(), **result}
        (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def write_documents() -> None:
    """Write what is made of the kept results: SUMMARY.md, docs/scale.md, the documents' tables."""
    SUMMARY.write_text(kept_summary())
    scale.main()
    figures.main()


if __name__ == "__main__":
    sys.exit(main())
