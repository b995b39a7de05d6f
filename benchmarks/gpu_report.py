"""All that a short time on an NVIDIA GPU can tell, in one file (`scripts/gpu-report.sh`).

Steps run one after another, in order of worth. Each is a process with a limit of its own. Rows that
a step has printed are kept whatever becomes of it, and the next step begins in any case. The report
is written anew after each step. Needs the standard library alone.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build"
WHEELS, SITE = BUILD / "gpu-wheels", BUILD / "gpu-site"
REQUIREMENTS = ROOT / "requirements" / "gpu.txt"
LOG_TAIL_BYTES = 3000
DONE = "done"


class Step(NamedTuple):
    """A command of this Python."""

    name: str
    limit_s: float
    command: tuple[str, ...]


def piece(name: str, limit_s: float) -> Step:
    return Step(name, limit_s, ("benchmarks/gpu_pieces.py", name))


TESTS = ("-m", "pytest", "-q", "-n", "4", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu")
STEPS = (
    piece("start", 60),
    piece("copies", 30),
    Step("tests", 90, TESTS),
    piece("replay", 90),
)
SIDES = ("nothing kept", "vllm-kvpool", "OffloadingConnector")
ENGINES = (
    Step("engines", 420, ("benchmarks/gpu_engines.py", "--quick")),
    Step("graphs", 300, ("benchmarks/gpu_engines.py", "--quick", "--graphs", "--sides", *SIDES)),
)


def set_up() -> None:
    """Install what this Python lacks of the requirements: from WHEELS, or else from its index."""
    lacking = []
    for line in REQUIREMENTS.read_text().splitlines():
        name = line.partition("==")[0]
        if name and not name.startswith("#"):
            try:
                importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                lacking.append(line)
    if lacking:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        command += ["--target", str(SITE)]
        if WHEELS.exists():
            command += ["--no-index", "--find-links", str(WHEELS)]
        subprocess.run([*command, *lacking], check=True)


def perform(step: Step, limit_s: float, log: Path) -> dict[str, Any]:
    """Run a step for at most `limit_s`; return its outcome and the rows that it printed."""
    paths = [str(ROOT), str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
            outcome = f"failed with exit status {status}" if status else DONE
        except subprocess.TimeoutExpired:
            outcome = f"not ended within {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # it or its children may run
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    printed = log.read_bytes()
    rows = []
    for line in printed.splitlines():
        if line.startswith(b"{"):
            with contextlib.suppress(ValueError):  # cut off, or no row
                rows.append(json.loads(line))
    tail = printed[-LOG_TAIL_BYTES:].decode(errors="replace")
    seconds = round(time.monotonic() - began, 1)
    found = {"step": step.name, "outcome": outcome, "seconds": seconds, "rows": rows}
    return found if outcome == DONE and rows else found | {"log": tail}


def perform_all(steps: Sequence[Step], total_s: float, report: Path) -> bool:
    """Run steps until `total_s` are over; return True if all were done."""
    deadline = time.monotonic() + total_s
    found: list[dict[str, Any]] = []
    for step in steps:
        left_s = deadline - time.monotonic()
        if left_s > 0:
            log = report.with_name(f"{report.stem}-{step.name}.log")
            found.append(perform(step, min(step.limit_s, left_s), log))
        else:
            outcome = f"not begun: {total_s:.0f} s were over (--seconds)"
            found.append({"step": step.name, "outcome": outcome, "rows": []})
        part = report.with_suffix(".part")
        part.write_text(json.dumps({"steps": found}, indent=1) + "\n")
        part.replace(report)
        print(f"{step.name}: {found[-1]['outcome']}", flush=True)
        for row in found[-1]["rows"]:
            if "target" in row:
                print(f"  {row['target']}", flush=True)
    return all(each["outcome"] == DONE for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", nargs="?", type=Path, default=BUILD / "gpu-report.json")
    parser.add_argument("--seconds", type=float, default=270, help="for all steps (270)")
    parser.add_argument("--engines", action="store_true", help="then engines; needs a CUDA vLLM")
    args = parser.parse_args()
    report = args.report.resolve()
    report.parent.mkdir(parents=True, exist_ok=True)
    set_up()
    are_done = perform_all(STEPS + ENGINES * args.engines, args.seconds, report)
    print(f"report: {report}")
    sys.exit(not are_done)


if __name__ == "__main__":
    main()
