"""Processes of this machine, read from /proc."""

import contextlib
import os
from pathlib import Path


def _stat(path: Path) -> tuple[str, int]:
    """Return a process's state and session. Raises OSError if the process is gone."""
    state, _, _, session, *_ = path.read_text().rpartition(") ")[2].split()
    return state, int(session)


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return _stat(Path(f"/proc/{pid}/stat"))[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended during the read
        return False


def session(pid: int) -> list[int]:
    """Return the live processes of the session that a process leads."""
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
    """Return the files below a directory that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in found if path.startswith(str(root)))
