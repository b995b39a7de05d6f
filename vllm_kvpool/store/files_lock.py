"""What processes on a `file://` directory share: locks, the count of bytes, and writers' claims.

A lock is a flock on a file that is opened anew each time, so threads exclude each other too and a
kill releases it. `Usage` is the content of one such file.

A `Writer` is an open store's directory: its `lock` is held while the store lives, and holds the
claims: for each, the bytes that are charged and not published yet. A claim is lowered after its
object got its name, so whoever reads the claims first and looks for objects then misses neither.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from vllm_kvpool.errors import StoreError
from vllm_kvpool.store.files_entries import directories, entries, make_directory, open_spare

FILE_MODE = 0o600
LOCK_POLL_MIN_S = 50e-6
LOCK_POLL_MAX_S = 5e-3
OPENING_S = 60.0  # a writer's directory that is still without its name then is nobody's
MAX_USED_BYTES = 1 << 60  # beyond it, or below 0, a count is damaged
MAX_CLAIMS = 4096  # of a writer; more than its threads

_CREATE = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_USAGE = struct.Struct("<qq")
_CLAIM = struct.Struct("<q")


class LockTimeout(StoreError):
    """Another process kept a lock of the directory for too long."""


def open_lock(path: str) -> int:
    """Open a lock's file, made if absent; OSError if it has other names, or is no file."""
    fd = os.open(path, os.O_RDWR | _CREATE, FILE_MODE)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EMLINK, "not a file of its own", path)
    return fd


def create_file(path: str, flags: int) -> int:
    """Make a file that did not exist, writable by us alone, whatever the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_EXCL | _CREATE | flags, FILE_MODE)
    os.fchmod(fd, FILE_MODE)
    return fd


@contextlib.contextmanager
def locked(path: str, wait_s: float) -> Iterator[int]:
    """Hold the flock of `path`, made if absent; LockTimeout after `wait_s`. Yields its fd."""
    fd = open_lock(path)
    try:
        deadline = time.monotonic() + wait_s
        pause_s = LOCK_POLL_MIN_S
        while not try_flock(fd):
            if time.monotonic() > deadline:
                raise LockTimeout(f"{path} was locked by another process for {wait_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOCK_POLL_MAX_S)
        try:
            yield fd
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough where a fork copied the fd
    finally:
        os.close(fd)


def try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class HeldLock:
    """A lock that one process holds for as long as it likes; any of its threads may call."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._guard = threading.Lock()

    def take(self) -> bool:
        """Do not wait; True if it is ours, or was."""
        with self._guard:
            if self._fd < 0:
                fd = open_lock(self._path)
                if not try_flock(fd):
                    os.close(fd)
                    return False
                self._fd = fd
            return True

    def release(self) -> None:
        """It need not be ours."""
        with self._guard:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                os.close(self._fd)
                self._fd = -1


class Usage(NamedTuple):
    """Bytes charged and given back since the last count; the difference is in use.

    They are kept apart because a count takes time: charges made meanwhile are added to it, but
    what was given back meanwhile may already be missing from it.
    """

    charged_bytes: int
    returned_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.charged_bytes - self.returned_bytes


def read_usage(fd: int) -> Usage | None:
    """None if nobody has counted yet, or the count is damaged."""
    data = os.pread(fd, _USAGE.size, 0)
    if len(data) != _USAGE.size:
        return None
    usage = Usage(*_USAGE.unpack(data))
    sound = 0 <= usage.returned_bytes <= usage.charged_bytes <= MAX_USED_BYTES
    return usage if sound else None


def write_usage(fd: int, usage: Usage) -> None:
    os.pwrite(fd, _USAGE.pack(*usage), 0)


class Writer:
    """Our directory among the writers, until `close`."""

    def __init__(self, writers: str) -> None:
        # Its name begins with a dot until it is locked, or it would be taken for a dead writer's.
        name = secrets.token_hex(8)
        unlocked = os.path.join(writers, f".{name}")
        make_directory(unlocked)
        self.path = os.path.join(writers, name)
        with contextlib.ExitStack() as undo:
            undo.callback(_take_away, unlocked)
            self.lock_fd = open_lock(os.path.join(unlocked, "lock"))
            undo.callback(os.close, self.lock_fd)
            try_flock(self.lock_fd)
            os.rename(unlocked, self.path)
            undo.pop_all()
        self.lock_path = os.path.join(self.path, "lock")
        self._pid = os.getpid()
        self._free_slots: list[int] = []
        self._new_slots = count()
        self._names = count()

    @property
    def is_usable(self) -> bool:
        """False if the directory was taken away, or is that of the process which forked us."""
        return self._pid == os.getpid() and self._is_there() and os.path.exists(self.lock_path)

    def claim(self) -> "Claim":
        """A new claim, of nothing yet."""
        try:
            slot = self._free_slots.pop()
        except IndexError:
            slot = next(self._new_slots)  # as many as there were claims at a time
        return Claim(self, slot)

    def name_temp(self) -> str:
        return f"{self.path}/{next(self._names)}"

    def note(self, slot: int, outstanding_bytes: int) -> None:
        os.pwrite(self.lock_fd, _CLAIM.pack(outstanding_bytes), slot * _CLAIM.size)

    def free(self, slot: int) -> None:
        self._free_slots.append(slot)

    def _is_there(self) -> bool:
        return not os.path.islink(self.path)

    def close(self) -> None:
        """Take the directory away; every claim must have ended."""
        if self._pid == os.getpid() and self._is_there():
            _take_away(self.path)
        os.close(self.lock_fd)


def _take_away(writer: str) -> None:
    """As far as it is there; it may be gone with the root."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(writer, "lock"))
    with contextlib.suppress(OSError):
        os.rmdir(writer)


def dead_writers(writers: str) -> Iterator[str]:
    """The directories of writers that were killed."""
    for writer in directories(writers):
        if writer.name.startswith(".") and _age_s(writer) < OPENING_S:
            continue
        try:
            fd = open_lock(os.path.join(writer.path, "lock"))
        except OSError:
            continue  # its owner just closed it
        try:
            if try_flock(fd):
                yield writer.path
        finally:
            os.close(fd)


def reclaim(writers: str) -> bool:
    """Delete what killed writers left; True if there were any: the charge is off.

    To be called by whoever holds evict.lock.
    """
    had_any = False
    for writer in dead_writers(writers):
        with contextlib.suppress(OSError):  # its owner is closing it, not dead; or it is not ours
            for entry in entries(writer):
                os.unlink(entry.path)
            os.rmdir(writer)
            had_any = True
    return had_any


def _age_s(entry: os.DirEntry[str]) -> float:
    try:
        return time.time() - entry.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0


class Claim:
    """Bytes charged together, those of one batch, and its spare files. Used by one thread."""

    def __init__(self, writer: Writer, slot: int) -> None:
        self.writer = writer
        self.outstanding_bytes = 0
        self.spares: dict[int, list[str]] = {}  # paths by bytes, in the writer's directory
        self._slot = slot

    def change(self, charge_bytes: int) -> None:
        """Add what is about to be written, or take off (negative) what was published."""
        self.outstanding_bytes += charge_bytes
        assert self.outstanding_bytes >= 0, self.outstanding_bytes
        self.writer.note(self._slot, self.outstanding_bytes)

    def num_spares(self, nbytes: int) -> int:
        return len(self.spares.get(nbytes, []))

    def new_spare(self, nbytes: int) -> str:
        """Where to move a spare."""
        path = self.writer.name_temp()
        self.spares.setdefault(nbytes, []).append(path)
        return path

    def forget_spare(self, nbytes: int) -> None:
        """The last one was not moved."""
        self.spares[nbytes].pop()

    def open_temp(self, nbytes: int, flags: int) -> tuple[int, str]:
        """A file for an object's `nbytes`: a spare or a new one; its fd and path."""
        with contextlib.suppress(IndexError, KeyError):
            path = self.spares[nbytes].pop()
            fd = open_spare(path, nbytes, flags)
            if fd is not None:
                return fd, path
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        path = self.writer.name_temp()
        return create_file(path, flags), path

    def end(self) -> None:
        """Nothing is written any more, and the charge was given back."""
        for paths in self.spares.values():
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        self.outstanding_bytes = 0
        try:
            self.writer.note(self._slot, 0)
        finally:  # a full disk may have had no room for the note before either
            self.writer.free(self._slot)


def claimed_bytes(writer: str, unit_bytes: int) -> int:
    """What is claimed in a writer's directory; 0 if it is gone.

    Claims are whole units: what is not one, or more than any store, is damage.
    """
    try:
        fd = os.open(os.path.join(writer, "lock"), _READ)
    except OSError:
        return 0
    try:
        size = min(os.fstat(fd).st_size // _CLAIM.size, MAX_CLAIMS) * _CLAIM.size
        data = os.pread(fd, size, 0)
    except OSError:
        return 0
    finally:
        os.close(fd)
    claims = (nbytes for (nbytes,) in _CLAIM.iter_unpack(data[: len(data) // 8 * 8]))
    return sum(n for n in claims if n % unit_bytes == 0 and 0 < n <= MAX_USED_BYTES)
