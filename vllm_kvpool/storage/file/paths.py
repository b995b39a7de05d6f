"""What lies in the directory of a `file://` store, of which not all need be ours.

A backup tool, a hand or a damaged file system may have put links, FIFOs and directories there.
Nothing that a link leads to is read, written or deleted, nothing else is waited for, and a file
that has a second name is not written over. Who can write in the directory can still change what
we look at the moment after: that is its owner alone, who is trusted.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import threading

from vllm_kvpool.errors import StoreError

DIR_MODE = 0o700
FILE_MODE = 0o600

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # not in every libc


def make_directory(path: str) -> None:
    """Make one directory that only we may enter, whatever the umask; it may exist already.

    OSError if something else is there, a symbolic link included.
    """
    try:
        os.mkdir(path, DIR_MODE)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    else:
        os.chmod(path, DIR_MODE)


def entries(directory: str) -> list[os.DirEntry[str]]:
    """What a directory holds; nothing if it is gone, or is a symbolic link."""
    if os.path.islink(directory):
        return []
    try:
        with os.scandir(directory) as listing:
            return list(listing)
    except (FileNotFoundError, NotADirectoryError):
        return []


def directories(directory: str) -> list[os.DirEntry[str]]:
    """The directories in a directory; what only leads to one is left alone."""
    return [entry for entry in entries(directory) if entry.is_dir(follow_symlinks=False)]


class SymlinkGuard:
    """Whether a path below the root passes a symbolic link, which could lead out of the store.

    Each directory is looked at once: to be made anew for every batch.
    """

    def __init__(self, root: str) -> None:
        self._are_plain = {os.path.dirname(root): True}

    def check(self, path: str) -> None:
        """OSError unless every directory above it is one itself, or missing."""
        if not self._is_plain(path.rpartition("/")[0]):
            raise OSError(errno.ENOTDIR, "refused, as a symbolic link is on the way", path)

    def _is_plain(self, directory: str) -> bool:
        known = self._are_plain.get(directory)
        if known is None:
            known = self._is_plain(directory.rpartition("/")[0]) and not os.path.islink(directory)
            self._are_plain[directory] = known
        return known


def check_root(root: str) -> None:
    """StoreError if a store's directory went away under us."""
    if os.path.islink(root) or not os.path.isdir(root):
        raise StoreError(f"file store {root} is gone; restore it or restart without it")


def is_there(path: str) -> bool:
    """Whether an object has its name; a link in its place counts, as it must be removed."""
    return os.access(path, os.F_OK, follow_symlinks=False)


def is_foreign(path: str) -> bool:
    """Whether what bears an object's name is no file, or one that its owner may not read."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) or not mode & stat.S_IRUSR


def rename_new(path: str, new_path: str) -> None:
    """Rename a file to a name that must be free, in one step.

    OSError: EEXIST if it is taken, EINVAL or ENOSYS if this file system or system cannot.
    """
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), new_path)
    names = os.fsencode(path), os.fsencode(new_path)
    if _renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new_path)


def open_to_overwrite(path: str, nbytes: int, flags: int) -> int | None:
    """Open a file to write over it; None if it is gone, is longer, or it has a second name."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    except OSError:
        return None
    status = os.fstat(fd)
    # A backup by hard links must not change with us.
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size == nbytes:
        return fd
    os.close(fd)
    return None


def take_away_foreign(path: str, mode: int) -> None:
    """Delete what bears an object's name and is no file; not what a link leads to."""
    if stat.S_ISDIR(mode):
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(path)
    else:
        os.unlink(path)


_CREATE = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
LOCAL_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"})


def is_local(path: str) -> bool:
    """Whether a path is on a file system whose names change for all its readers at once."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1] in LOCAL_FILE_SYSTEMS
    return False


def create_file(path: str, flags: int) -> int:
    """Make a file that did not exist, writable by us alone, whatever the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_EXCL | _CREATE | flags, FILE_MODE)
    os.fchmod(fd, FILE_MODE)
    return fd


def open_lock(path: str) -> int:
    """Open a lock's file, made if absent; OSError if it has other names, or is no file."""
    fd = os.open(path, os.O_RDWR | _CREATE, FILE_MODE)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EMLINK, "not a plain file with one name", path)
    return fd


def try_flock(fd: int) -> bool:
    """A kill releases it; threads exclude each other too, as each opens the file."""
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
