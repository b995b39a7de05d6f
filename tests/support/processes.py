"""Processes of this machine, as /proc has them."""

import contextlib
import os
from pathlib import Path


def _stat(path: Path) -> tuple[str, int]:
    """State and session. OSError where the process is gone."""
    state, _, _, session, *_ = path.read_text().rpartition(") ")[2].split()
    return state, int(session)


def is_alive(pid: int) -> bool:
    """Whether it exists and is no zombie."""
    try:
        return _stat(Path(f"/proc/{pid}/stat"))[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
        return False


def session(pid: int) -> list[int]:
    """The live processes of the session that a process leads."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, leader = _stat(path)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if leader == pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def open_files(root: Path) -> list[str]:
    """What this process has open below a directory; other files may come and go."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in found if path.startswith(str(root)))
