"""The file of the engines that a router has started, from which the next router finds them.

Owns the file and a lock on it, so that no two routers manage the same engines. It is replaced as a
whole at each change; a reader finds the old or the new one. A file that cannot be read is renamed
and logged; the engines in it are not found again. No file is renamed over another one.
"""

import fcntl
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.private_files import make_directory, read_secret, replace_file

log = logging.getLogger(__name__)

STATE_VERSION = 2
MAX_STATE_BYTES = 4 << 20
MAX_UNREADABLE = 3  # files that are kept


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that has been started; `log_path` names its process too (`launcher.py`)."""

    replica_id: str
    host: str
    port: int
    role: str
    log_path: str
    """On its host."""
    stop_timeout_s: float


class _StateContent(msgspec.Struct, frozen=True):
    version: int
    engines: tuple[EngineRecord, ...]


class StateFile:
    """The records of engines, in memory and in the file. Used by one thread."""

    def __init__(self, path: Path) -> None:
        """Take the file for this router; ConfigError if another one has it, or it cannot be had."""
        self._path = path
        self._lock = _lock(path.with_name(f"{path.name}.lock"))
        try:
            records = _read(path)
        except BaseException:
            self.close()
            raise
        self._records: dict[str, EngineRecord] = {record.replica_id: record for record in records}

    @property
    def records(self) -> Mapping[str, EngineRecord]:
        """By replica id."""
        return self._records

    def put(self, record: EngineRecord) -> None:
        """Add or change a record. A file that cannot be written is logged."""
        self._records[record.replica_id] = record
        self._write()

    def remove(self, replica_id: str) -> None:
        """The engine has ended."""
        del self._records[replica_id]
        self._write()

    def close(self) -> None:
        """Leave the file to the next router."""
        self._lock.close()

    def _write(self) -> None:
        content = _StateContent(STATE_VERSION, tuple(self._records.values()))
        try:
            replace_file(self._path, msgspec.json.format(msgspec.json.encode(content)), 0o600)
        except OSError as error:
            log.error(
                "%s is not up to date, a new router may not find all engines: %s", self._path, error
            )


def _lock(path: Path) -> IO[bytes]:
    make_directory(path.parent, "[launch] state_dir")
    try:
        file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb+")  # noqa: SIM115 - held for life
    except OSError as error:
        raise ConfigError(f"the router's state cannot be kept in {path.parent}: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"{path} is held by another router; each needs a state of its own"
        ) from None
    return file


def _read(path: Path) -> tuple[EngineRecord, ...]:
    if not os.path.lexists(path):
        return ()
    text = read_secret(path, "[launch] state_dir: the file", is_secret=False)
    try:
        content = msgspec.json.decode(text, type=_StateContent)
        if content.version == STATE_VERSION and len(text) <= MAX_STATE_BYTES:
            return content.engines
        why = f"version {content.version}, {len(text)} bytes"
    except UNREADABLE as error:
        why = str(error)
    names = [f"{path.name}.unreadable{number or ''}" for number in range(MAX_UNREADABLE)]
    aside = next(
        (path.with_name(name) for name in names if not os.path.lexists(path.parent / name)), None
    )
    if aside is None:
        raise ConfigError(
            f"{path} cannot be read ({why}), and {', '.join(names)} are kept from before; look at "
            "them and remove them"
        )
    path.rename(aside)
    log.error(
        "state file %s cannot be read (%s): engines that a former router started are not known; it "
        "is kept as %s",
        *(path, why, aside.name),
    )
    return ()
