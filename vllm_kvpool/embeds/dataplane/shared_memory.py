"""Landing windows that processes of one host share: files in `/dev/shm`.

The owner holds a lock on its file for as long as it lives, in any container; a file that can be
locked belongs to a dead process, and the next process that opens a window removes it. Writers
map a file once, and only such files of their own user: a peer's word must not make them write
elsewhere.
"""

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_kvpool.embeds.dataplane.row_bytes import (
    Bytes,
    RowCopy,
    WriteError,
    other_transport,
    write,
)
from vllm_kvpool.embeds.protocol.messages import SharedWindow, Window
from vllm_kvpool.errors import ConfigError

DIRECTORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PREFIX = "kvpool-ec-"
NAME = re.compile(re.escape(PREFIX) + r"\d{1,20}-[0-9a-f]{32}")
CREATE_ATTEMPTS = 8
MAX_MAPPED = 64  # mapped windows of peers; the least recently used is unmapped


def host_identity() -> str:
    """Return an identity that two processes share if and only if they see the same `/dev/shm`."""
    try:
        # Containers share the boot id; two mounts have different device numbers, and two
        # directories of one mount have different inodes.
        root = os.stat(DIRECTORY)
        return f"{BOOT_ID.read_text().strip()}/{root.st_dev:x}/{root.st_ino:x}"
    except OSError as error:
        raise ConfigError(
            f"transport=local needs {DIRECTORY} and {BOOT_ID} ({error}); use transport=mooncake"
        ) from error


def remove_leftovers() -> int:
    """Remove the windows of dead processes of this user; how many there were."""
    return sum(_removed(path) for path in DIRECTORY.glob(f"{PREFIX}*") if NAME.fullmatch(path.name))


def _removed(path: Path) -> bool:
    with contextlib.suppress(OSError), _opened(path) as (fd, status):
        if status.st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
    return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file and yield its descriptor and status.

    Follows no link and does not wait for a pipe.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        yield fd, status
    finally:
        os.close(fd)


def _create_locked() -> tuple[Path, int]:
    """Create a file, and return its path and its locked descriptor."""
    for _ in range(CREATE_ATTEMPTS):
        path = DIRECTORY / f"{PREFIX}{os.getpid()}-{secrets.token_hex(16)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Before it was locked, another process may have removed it as a leftover.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(fd).st_ino:
                return path, fd
        os.close(fd)
    raise ConfigError(
        f"{CREATE_ATTEMPTS} new files in {DIRECTORY} were removed at once by another program"
    )


class SharedLandingWindow:
    """A window in `/dev/shm`."""

    def __init__(self, nbytes: int) -> None:
        host = host_identity()
        remove_leftovers()
        space = os.statvfs(DIRECTORY)
        if nbytes > space.f_bavail * space.f_frsize:
            raise ConfigError(_no_room(nbytes))
        path, self._lock_fd = _create_locked()
        self._path: Path | None = path
        self.nbytes = nbytes
        try:
            # Reserve all pages now: touching one that finds no room would end the process.
            os.posix_fallocate(self._lock_fd, 0, nbytes)
            memory = mmap.mmap(self._lock_fd, nbytes)
        except OSError as error:
            self.close()
            raise ConfigError(f"{_no_room(nbytes)} ({error})") from error
        self.array: Bytes = np.frombuffer(memory, np.uint8)
        self.window = SharedWindow(host, str(path), nbytes)

    def close(self) -> None:
        """Remove the file; what is still written to it is never read."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._path = None


def _no_room(nbytes: int) -> str:
    space = os.statvfs(DIRECTORY)
    free, whole = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    return (
        f"arena_bytes={nbytes} does not fit into {DIRECTORY}, which has {free} of {whole} bytes "
        "free; lower arena_bytes, or give the container more (docker run --shm-size, in Kubernetes "
        "an emptyDir of medium Memory there)"
    )


class _Mapped(NamedTuple):
    array: Bytes
    inode: int


class SharedWriter:
    """Writes to windows of processes of this host. Any thread; a write runs in its caller's."""

    def __init__(self) -> None:
        self._host = host_identity()
        self._lock = threading.Lock()  # guards what follows
        self._mapped: OrderedDict[str, _Mapped] = OrderedDict()

    def write(self, window: Window, writes: Sequence[RowCopy]) -> list[tuple[int, ...]]:
        """Write, and return a digest for each run.

        Raises WriteError, always quiesced, if the window is gone.
        """
        if not isinstance(window, SharedWindow):
            raise other_transport("local")
        if window.host != self._host:
            raise WriteError(
                f"the window is on host {window.host}, this is {self._host}: processes share "
                f"windows only if they see the same {DIRECTORY} (containers: one IPC namespace, or "
                "the same volume there); otherwise use the mooncake transport",
                quiesced=True,
            )
        target = self._array(window)
        for rows in writes:
            rows.check(window.nbytes)
        return [write(target, rows) for rows in writes]

    def close(self) -> None:
        """Unmap all windows; a write under way keeps its own."""
        with self._lock:
            self._mapped.clear()

    def _array(self, window: SharedWindow) -> Bytes:
        with self._lock:
            mapped = self._mapped.get(window.path)
        try:
            if mapped is None or mapped.inode != os.lstat(window.path).st_ino:
                mapped = _mapped(_checked(window.path), window.nbytes)
        except OSError as error:
            with self._lock:
                self._mapped.pop(window.path, None)
            raise WriteError(f"the window is gone: {error}", quiesced=True) from error
        with self._lock:
            self._mapped[window.path] = mapped
            self._mapped.move_to_end(window.path)
            while len(self._mapped) > MAX_MAPPED:
                self._mapped.popitem(last=False)
        if mapped.array.nbytes < window.nbytes:
            raise WriteError(
                f"the window has {mapped.array.nbytes} bytes, not {window.nbytes}", quiesced=True
            )
        return mapped.array


def _checked(name: str) -> Path:
    path = Path(name)
    if path.parent != DIRECTORY or not NAME.fullmatch(path.name):
        raise WriteError(f"{name!r} is not the file of a landing window", quiesced=True)
    return path


def _mapped(path: Path, nbytes: int) -> _Mapped:
    with _opened(path) as (fd, status):
        if status.st_uid != os.geteuid():
            raise OSError(f"{path} is another user's")
        if status.st_size < nbytes:
            raise OSError(f"{path} has {status.st_size} bytes, not {nbytes}")
        memory = mmap.mmap(fd, status.st_size)
    return _Mapped(np.frombuffer(memory, np.uint8), status.st_ino)
