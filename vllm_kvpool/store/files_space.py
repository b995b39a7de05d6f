"""The space of a `file://` store: who may write how much, shared by every process on a directory.

Owns `{root}/v1`: `usage` (bytes charged, a flock around each change), `evict.lock` (held by
whoever deletes objects or counts them), `writers/{id}/` (one per open store: `lock`, held while it
lives, and its unpublished files) and `objects/`, whose names files.py makes.

Invariants: bytes are charged before they are written, so what lies on the disk never exceeds what
is charged; a count that is wrong is too high, and the next eviction counts afresh; a kill at any
point leaves no lock and only files that the next eviction or opener removes.
Any thread of any process may call. Each lock is a file opened anew, so threads exclude each other.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import count
from typing import NamedTuple

from vllm_kvpool.errors import StoreError

FORMAT_DIR = "v1"
DIR_MODE = 0o700
FILE_MODE = 0o600

LOW_WATERMARK = 0.9  # an eviction goes on until this part of the size is in use
RESERVE_ATTEMPTS = 4  # others may take the room that an eviction made
PUBLISH_ATTEMPTS = 4  # others may remove the directory that was made for an object
USAGE_WAIT_S = 10.0  # the usage lock is held for microseconds
EVICT_WAIT_S = 10.0
LOCK_POLL_MIN_S = 50e-6
LOCK_POLL_MAX_S = 5e-3

_CREATE = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


class LockTimeout(StoreError):
    """Another process kept a lock of the directory for too long."""


class Temp(NamedTuple):
    """A file that is charged but not published; whoever holds it publishes or releases it."""

    fd: int
    path: str
    charge_bytes: int


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


_USAGE = struct.Struct("<qq")


class _Object(NamedTuple):
    mtime_ns: int
    charge_bytes: int
    directory: str
    name: str


def make_directory(path: str) -> None:
    """Make one directory that only we may enter, whatever the umask; it may exist already."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, DIR_MODE)
        os.chmod(path, DIR_MODE)


@contextlib.contextmanager
def locked(path: str, wait_s: float) -> Iterator[int]:
    """Hold the flock of `path`, made if absent; LockTimeout after `wait_s`. Yields its fd."""
    fd = os.open(path, os.O_RDWR | _CREATE, FILE_MODE)
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


def read_usage(fd: int) -> Usage | None:
    """None if nobody has counted yet."""
    data = os.pread(fd, _USAGE.size, 0)
    return Usage(*_USAGE.unpack(data)) if len(data) == _USAGE.size else None


def write_usage(fd: int, usage: Usage) -> None:
    os.pwrite(fd, _USAGE.pack(*usage), 0)


def entries(directory: str) -> list[os.DirEntry[str]]:
    """What a directory holds; nothing if it is gone."""
    try:
        with os.scandir(directory) as listing:
            return list(listing)
    except FileNotFoundError:
        return []


class Space:
    """One process's hand on the shared directory; closed by its owner."""

    def __init__(self, root: str, size_bytes: int) -> None:
        self.root = root
        self.size_bytes = size_bytes
        self.unit_bytes = os.statvfs(root).f_frsize
        self._base = os.path.join(root, FORMAT_DIR)
        self.objects = os.path.join(self._base, "objects")
        self._writers = os.path.join(self._base, "writers")
        self._usage = os.path.join(self._base, "usage")
        self._evict_lock = os.path.join(self._base, "evict.lock")
        self._temp_numbers = count()
        self._has_links = True
        self._restore_lock = threading.Lock()
        self._writer = ""
        self._writer_lock_fd = -1
        self.restore()

    def close(self) -> None:
        """Take our writer directory away; our temps must have been published or released."""
        with contextlib.suppress(OSError):  # gone with the root, or a killed child's temps in it
            os.unlink(os.path.join(self._writer, "lock"))
            os.rmdir(self._writer)
        os.close(self._writer_lock_fd)

    def check_root(self) -> None:
        """StoreError if the directory went away under us."""
        if not os.path.isdir(self.root):
            raise StoreError(f"file store {self.root} is gone; restore it or restart without it")

    def restore(self) -> None:
        """Make what is missing below the root, and clean up after killed writers."""
        self.check_root()
        with self._restore_lock:
            for directory in (self._base, self.objects, self._writers):
                make_directory(directory)
            with locked(self._evict_lock, EVICT_WAIT_S):
                left_over = self._reclaim()
                if not self._writer or not os.path.isdir(self._writer):
                    self._open_writer()
                if left_over or self._used_bytes() is None:
                    self._count_and_evict(goal_bytes=None)

    def charge_of(self, nbytes: int) -> int:
        """What an object occupies: whole blocks of the file system, at least one."""
        return max(-(-nbytes // self.unit_bytes), 1) * self.unit_bytes

    # Writing: reserve, write into the temp, publish or release.

    def reserve(self, nbytes: int) -> Temp | None:
        """Charge `nbytes` and open a file for them; evicts if needed; None if there is no room."""
        charge_bytes = self.charge_of(nbytes)
        if charge_bytes > self.size_bytes:
            return None
        for _ in range(RESERVE_ATTEMPTS):
            try:
                temp = self._try_reserve(charge_bytes)
                if temp is not None:
                    return temp
                self._make_room(charge_bytes)
            except FileNotFoundError:
                self.restore()
        return None

    def publish(self, temp: Temp, path: str) -> bool:
        """Give a temp its name; False, and the temp released, if the name is taken."""
        for _ in range(PUBLISH_ATTEMPTS):
            try:
                published = self._name(temp.path, path)
            except FileNotFoundError:
                self.check_root()
                shard = os.path.dirname(path)
                for directory in (self._base, self.objects, os.path.dirname(shard), shard):
                    make_directory(directory)
                continue
            if not published:
                self.release(temp)
            return published
        raise FileNotFoundError(errno.ENOENT, "removed while it was written", temp.path)

    def release(self, temp: Temp) -> None:
        """Give up a temp and its charge."""
        # Both under the lock: between them, a count would miss the file and then be reduced by it.
        with locked(self._usage, USAGE_WAIT_S) as fd, contextlib.suppress(FileNotFoundError):
            os.unlink(temp.path)
            self._give_back(fd, temp.charge_bytes)

    def drop(self, paths: Iterable[str]) -> int:
        """Delete published objects; absent ones are skipped. Returns how many there were."""
        num_dropped = freed_bytes = 0
        with locked(self._evict_lock, EVICT_WAIT_S):
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    nbytes = os.stat(path).st_size
                    os.unlink(path)
                    num_dropped += 1
                    freed_bytes += self.charge_of(nbytes)
            with locked(self._usage, USAGE_WAIT_S) as fd:
                self._give_back(fd, freed_bytes)
        return num_dropped

    # Below, "counting" marks what must hold evict.lock.

    def _try_reserve(self, charge_bytes: int) -> Temp | None:
        # The name tells the charge, so that a count sees it before the file has its length, and
        # the process, because a forked child counts from the same number.
        name = f"{os.getpid()}-{next(self._temp_numbers)}.{charge_bytes}"
        path = os.path.join(self._writer, name)
        with locked(self._usage, USAGE_WAIT_S) as usage_fd:
            usage = read_usage(usage_fd)
            if usage is None:
                raise FileNotFoundError(errno.ENOENT, "not counted yet", self._usage)
            if usage.used_bytes + charge_bytes > self.size_bytes:
                return None
            # Charged first: a kill between the two leaves a charge without a file, not the reverse.
            charged_bytes = usage.charged_bytes + charge_bytes
            write_usage(usage_fd, usage._replace(charged_bytes=charged_bytes))
            try:
                fd = os.open(path, os.O_WRONLY | os.O_EXCL | _CREATE, FILE_MODE)
            except OSError:
                write_usage(usage_fd, usage)
                raise
        os.fchmod(fd, FILE_MODE)
        return Temp(fd, path, charge_bytes)

    def _name(self, temp_path: str, path: str) -> bool:
        if self._has_links:
            try:
                os.link(temp_path, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._has_links = False
            else:
                os.unlink(temp_path)
                return True
        with locked(self._usage, USAGE_WAIT_S):  # one namer at a time: rename would replace
            if os.path.lexists(path):
                return False
            os.rename(temp_path, path)
            return True

    def _give_back(self, usage_fd: int, nbytes: int) -> None:
        usage = read_usage(usage_fd)
        if usage is not None:
            returned_bytes = usage.returned_bytes + nbytes
            write_usage(usage_fd, usage._replace(returned_bytes=returned_bytes))

    def _used_bytes(self) -> int | None:
        with locked(self._usage, USAGE_WAIT_S) as fd:
            usage = read_usage(fd)
        return usage.used_bytes if usage is not None else None

    def _make_room(self, charge_bytes: int) -> None:
        with locked(self._evict_lock, EVICT_WAIT_S):
            used_bytes = self._used_bytes()
            if used_bytes is not None and used_bytes + charge_bytes <= self.size_bytes:
                return  # somebody else made room while we waited
            self._reclaim()
            goal_bytes = int(self.size_bytes * LOW_WATERMARK) - charge_bytes
            self._count_and_evict(max(goal_bytes, 0))

    def _open_writer(self) -> None:
        """Counting: without its lock a new directory would be taken for a dead writer's."""
        writer = os.path.join(self._writers, secrets.token_hex(8))
        make_directory(writer)
        fd = os.open(os.path.join(writer, "lock"), os.O_RDWR | _CREATE, FILE_MODE)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if self._writer_lock_fd >= 0:
            os.close(self._writer_lock_fd)
        self._writer, self._writer_lock_fd = writer, fd

    def _reclaim(self) -> bool:
        """Counting: delete what killed writers left; True if there was a charge among it."""
        had_temps = False
        for writer in entries(self._writers):
            try:
                fd = os.open(os.path.join(writer.path, "lock"), os.O_RDWR | _CREATE, FILE_MODE)
            except OSError:
                continue  # its owner just closed it
            try:
                if try_flock(fd):
                    with contextlib.suppress(OSError):  # its owner is closing it, not dead
                        for entry in entries(writer.path):
                            had_temps |= entry.name != "lock"
                            os.unlink(entry.path)
                        os.rmdir(writer.path)
            finally:
                os.close(fd)
        return had_temps

    def _count_and_evict(self, goal_bytes: int | None) -> None:
        """Counting: set the charge to what is there, after deleting the oldest beyond the goal."""
        with locked(self._usage, USAGE_WAIT_S) as fd:
            before = read_usage(fd) or Usage(0, 0)
        used_bytes, objects = self._scan()
        if goal_bytes is not None:
            objects.sort()
            for item in objects:
                if used_bytes <= goal_bytes:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(item.directory, item.name))
                used_bytes -= item.charge_bytes
        with locked(self._usage, USAGE_WAIT_S) as fd:
            now = read_usage(fd) or Usage(0, 0)
            write_usage(fd, Usage(used_bytes + now.charged_bytes - before.charged_bytes, 0))

    def _scan(self) -> tuple[int, list[_Object]]:
        """Counting: the bytes of temps and objects, and the objects.

        Temps first: a file published meanwhile is then seen twice and known by its inode, while
        the other order could miss it.
        """
        used_bytes = 0
        temps: set[int] = set()
        for writer in entries(self._writers):
            for entry in entries(writer.path):
                charge = entry.name.rpartition(".")[2]
                if charge.isdecimal():
                    temps.add(entry.inode())
                    used_bytes += int(charge)
        objects: list[_Object] = []
        for namespace in entries(self.objects):
            for shard in entries(namespace.path):
                for entry in entries(shard.path):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        charge_bytes = self.charge_of(status.st_size)
                        objects.append(
                            _Object(status.st_mtime_ns, charge_bytes, shard.path, entry.name)
                        )
                        if status.st_ino not in temps:
                            used_bytes += charge_bytes
        return used_bytes, objects
