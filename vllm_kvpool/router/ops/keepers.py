"""What an engine has on the router's machine: its keeper, its log, and here its port.

Short calls of the operating system, which the router's loop can afford. What a keeper is stands in
processes.py.
"""

import contextlib
import logging
import os
import shutil
import signal
from functools import cache
from pathlib import Path
from typing import IO

from vllm_kvpool.router.ops.ledger import EngineRecord
from vllm_kvpool.router.ops.processes import BOOT_ID_PATH, is_there

log = logging.getLogger(__name__)

LOG_BYTES = 64 << 10  # read of a log, at its begin or end
MAX_LOG_BYTES = 64 << 20  # of an engine's log, until it is rotated


def open_log(path: Path) -> IO[bytes]:
    """A new log, readable by its owner alone; a former one is kept as `.1`. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(f"{path.name}.1"))
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600), "ab")


def rotate_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Copy a log that has grown too large to `.1`, and begin it anew.

    The engine has it open and appends, so it is truncated in place: what comes between copy and
    truncation is lost. Takes as long as the copy.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
    except OSError as error:
        log.warning("log %s cannot be rotated at %d bytes: %s", path, max_bytes, error)


@cache
def _boot_id() -> str:
    return Path(BOOT_ID_PATH).read_text().strip()


def keeper_lives(record: EngineRecord) -> bool:
    """Whether the keeper is there, and so the engine, or the connection to it."""
    if record.keeper is None:
        return False
    try:
        line = Path(f"/proc/{record.keeper.pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    if is_there(record.keeper, _boot_id(), line):
        return True
    # Where the router is pid 1 of a container, orphans become its children, to be reaped.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(record.keeper.pid, os.WNOHANG)
    return False


def end_keeper(record: EngineRecord) -> None:
    """Kill the keeper, and the connection to an engine elsewhere, if they are still there."""
    if record.keeper is not None and keeper_lives(record):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(record.keeper.pid, signal.SIGKILL)


def log_text(record: EngineRecord, *, from_end: bool = False) -> str:
    """The first or the last of what an engine has printed."""
    try:
        with open(record.log_path, "rb") as file:
            if from_end:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - LOG_BYTES, 0))
            return file.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""
