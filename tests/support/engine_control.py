"""Start and stop commands of a deployment's engines, as an operator would write them.

    python engine_control.py start|stop FILE.json

The file has the engine's `command`; beside it are its log and the file with its process id. Runs
without this package.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STOP_S = 20.0
POLL_S = 0.05


def pid_of(path: Path) -> int:
    """Return the id of an engine's process, 0 if it has none; it may have ended."""
    try:
        return int(path.with_suffix(".pid").read_text())
    except (OSError, ValueError):
        return 0


def is_running(pid: int) -> bool:
    """Return True if a process is there, and is no zombie."""
    try:
        return (
            pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


def start(path: Path) -> None:
    """Leave an engine in the background."""
    with path.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            json.loads(path.read_text())["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    path.with_suffix(".pid").write_text(str(process.pid))


def stop(path: Path) -> None:
    """End an engine and all that it has started; kill what is left after STOP_S."""
    pid = pid_of(path)
    for number, limit_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        try:
            os.killpg(pid, number) if pid else None
        except ProcessLookupError:
            break
        end = time.monotonic() + limit_s
        while is_running(pid) and time.monotonic() < end:
            time.sleep(POLL_S)
    path.with_suffix(".pid").unlink(missing_ok=True)


if __name__ == "__main__":
    {"start": start, "stop": stop}[sys.argv[1]](Path(sys.argv[2]))
