"""Run every benchmark, and keep its results beside the command and the machine.

    python benchmarks/run_all.py [--quick] [--only NAME ...]

Each script runs in a process of its own, one after another, on a machine that should do nothing
else. `results/{name}.json` keeps what it measured, and on what; `results/SUMMARY.md` has all that
is kept: tables, and each target with the ratio that was reached. A script that fails or takes too
long keeps its former results and makes the exit status 1; a target that was missed does not.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import cell_text

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SCRIPT_TIMEOUT_S = 900.0
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


def run(script: Path, quick: bool) -> dict[str, Any]:
    """What the script measured, with its command; `failed` says what went wrong."""
    options = ["--quick"] if quick and script.stem != "bench_gather" else []
    command = ["python", f"benchmarks/{script.name}", *options]
    result: dict[str, Any] = {"command": " ".join(command)}
    print(f"== {result['command']}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result.json"
        try:
            process = subprocess.run(
                [sys.executable, str(script), *options, "--json", str(output)],
                timeout=SCRIPT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            result["failed"] = f"no end in {SCRIPT_TIMEOUT_S:g} s"
        else:
            if process.returncode or not output.exists():
                result["failed"] = f"exit status {process.returncode}"
            else:
                measured = json.loads(output.read_text())
                result |= measured if isinstance(measured, dict) else {"rows": measured}
    result["seconds"] = round(time.monotonic() - start, 1)
    return result


def markdown(result: dict[str, Any]) -> Iterator[str]:
    """The section of one benchmark."""
    seconds = f" ({result['seconds']} s)" if "seconds" in result else ""
    yield f"`{result['command']}`{seconds}"
    yield ""
    if "failed" in result:
        yield f"**Failed: {result['failed']}.**"
        yield ""
        return
    names = list(dict.fromkeys(name for row in result["rows"] for name in row))
    yield f"| {' | '.join(names)} |"
    yield "|" + "---|" * len(names)
    for row in result["rows"]:
        yield f"| {' | '.join(cell_text(row.get(name, '')) for name in names)} |"
    yield ""
    notes = result.get("notes", [])
    yield from (f"* {note}" for note in notes)
    if notes:
        yield ""


def summary(results: dict[str, dict[str, Any]], surroundings: dict[str, str]) -> str:
    lines = ["# Benchmarks", "", "Ratios compare what ran side by side in one run.", ""]
    lines += [f"* {name}: {value}" for name, value in surroundings.items()]
    lines += ["", "## Targets", ""]
    for name, result in results.items():
        for target in result.get("targets", []):
            lines.append(f"* {name}: {target['text']}")
        if "failed" in result:
            lines.append(f"* {name}: failed, {result['failed']}")
    for name, result in results.items():
        lines += ["", f"## {name}", "", *"\n".join(markdown(result)).rstrip().split("\n")]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats; keeps no results")
    parser.add_argument("--only", nargs="*", default=[], help="names without bench_ and .py")
    args = parser.parse_args()
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(HERE.glob("bench_*.py"))}
    unknown = set(args.only) - set(scripts)
    if unknown:
        parser.error(f"no benchmark {sorted(unknown)}; known are {', '.join(scripts)}")
    results = {
        name: run(path, args.quick)
        for name, path in scripts.items()
        if not args.only or name in args.only
    }
    print(summary(results, machine()))
    if not args.quick:
        keep(results)
    return any("failed" in result for result in results.values())


def keep(results: dict[str, dict[str, Any]]) -> None:
    """Replace the kept results of these benchmarks, but of those that failed."""
    RESULTS.mkdir(exist_ok=True)
    for name, result in results.items():
        if "failed" in result:
            continue
        record = {"machine": machine(), **result}
        (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    kept = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    (RESULTS / "SUMMARY.md").write_text(summary(kept, machine()))


if __name__ == "__main__":
    sys.exit(main())
