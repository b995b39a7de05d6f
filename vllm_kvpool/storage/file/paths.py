"""Safe access to the directory of a `file://` store, which may hold files of others.

A backup tool, a person or a damaged file system may have left symbolic links, FIFOs and directories
there. Nothing behind a link is read, written or deleted, nothing blocks on a FIFO, and a file with
a second name is not written over. What another user owns is neither read nor changed.

The store changes only its own files: below `FORMAT_DIR`, under a name that it gives, of its user.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_kvpool.errors import ConfigError, StoreError

DIR_MODE = 0o700
FILE_MODE = 0o600

MOUNTS = "/proc/self/mountinfo"
SET_ASIDE = 3  # files of one name that are kept

OnUnlisted = Callable[[OSError], None]
# Another user's or a damaged directory: trying again does not help.
UNLISTABLE = frozenset({errno.EACCES, errno.EPERM, errno.EIO, errno.EUCLEAN, errno.EBADMSG})

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # not in every libc


def is_own(status: os.stat_result) -> bool:
    """Return True if this user owns a file or directory."""
    return status.st_uid == os.geteuid()


def make_directory(path: str) -> None:
    """Create a directory with `DIR_MODE` whatever the umask, unless it exists.

    OSError if something else is there, including a symbolic link and another user's directory.
    """
    try:
        os.mkdir(path, DIR_MODE)
    except FileExistsError:
        _check_directory(path)
    else:
        os.chmod(path, DIR_MODE)


def entries(directory: str, on_unlisted: OnUnlisted | None = None) -> list[os.DirEntry[str]]:
    """Return the entries of a directory; none if it is missing or a symbolic link.

    A directory that cannot be listed has none if `on_unlisted` is given, which gets the OSError.
    """
    if os.path.islink(directory):
        return []
    try:
        with os.scandir(directory) as listing:
            return list(listing)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if on_unlisted is None or error.errno not in UNLISTABLE:
            raise
        on_unlisted(error)
        return []


def directories(directory: str, on_unlisted: OnUnlisted | None = None) -> list[os.DirEntry[str]]:
    """Return the directories in a directory, without symbolic links; as `entries`."""
    found = entries(directory, on_unlisted)
    return [entry for entry in found if entry.is_dir(follow_symlinks=False)]


def _check_directory(path: str) -> None:
    """Raise OSError if a path is no directory, a symbolic link, or another user's."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "refused, as it is a symbolic link", path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if not is_own(status):
        text = f"refused, as it belongs to uid {status.st_uid}, we are uid {os.geteuid()}"
        raise NotADirectoryError(errno.ENOTDIR, text, path)


class DirectoryGuard:
    """A check of paths below the root, which refuses directories that others could have placed.

    A symbolic link could lead out of the store, and another user's directory could have been put in
    its place. The guard checks each directory once, so every batch makes a new one.
    """

    def __init__(self, root: str) -> None:
        self._checked = {root.rpartition("/")[0]}

    def check(self, path: str) -> None:
        """Raise OSError if a directory on the way is refused; missing ones are not."""
        self._check(path.rpartition("/")[0])

    def _check(self, directory: str) -> None:
        if directory not in self._checked:
            self._check(directory.rpartition("/")[0])
            with contextlib.suppress(FileNotFoundError):
                _check_directory(directory)
            self._checked.add(directory)


def check_root(root: str) -> None:
    """Raise StoreError if the store's directory is missing, or another one stands in its place."""
    try:
        _check_directory(root)
    except NotADirectoryError as error:
        raise StoreError(f"file store {root} is gone: {error.strerror}; restore it") from error
    except OSError:
        raise StoreError(f"file store {root} is gone; restore it or restart without it") from None


def is_there(path: str) -> bool:
    """Return True if an object's name exists. A symbolic link counts, as it must be removed."""
    return os.access(path, os.F_OK, follow_symlinks=False)


def may_be_there(path: str) -> bool:
    """Return False only if the file system says that nothing has this name."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def is_foreign(path: str) -> bool:
    """Return True if an object's name is no regular file that its owner can read."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) or not mode & stat.S_IRUSR


def rename_new(path: str, new_path: str) -> None:
    """Rename a file atomically to a name that must be free.

    OSError: EEXIST if it is taken, EINVAL or ENOSYS where this is not supported.
    """
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), new_path)
    names = os.fsencode(path), os.fsencode(new_path)
    if _renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new_path)


def set_aside(path: str) -> str | None:
    """Rename what has the name of a file of the store, and keep the last `SET_ASIDE` of that name.

    Returns its new path, None if nothing is there. Only files of this user with one name make room
    for it; OSError if something else has all the names.
    """
    made: list[tuple[int, str]] = []
    for number in range(SET_ASIDE):
        kept = f"{path}.aside-{number}"
        try:
            status = os.lstat(kept)
        except FileNotFoundError:
            made.append((0, kept))
        else:
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and is_own(status):
                made.append((status.st_ctime_ns, kept))
    if not made:
        raise OSError(errno.EEXIST, "no name is free to keep it under", path)
    _, kept = min(made)
    try:
        os.rename(path, kept)
    except FileNotFoundError:
        return None
    return kept


def open_to_overwrite(path: str, nbytes: int, flags: int) -> int | None:
    """Open a file of `nbytes` to write over it.

    Returns None if the file is missing, of another size, or has a second name.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
        with closed_on_error(fd):
            status = os.fstat(fd)
    except OSError:
        return None
    # A backup may hold a hard link to it.
    is_one = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and is_own(status)
    if is_one and status.st_size == nbytes:
        return fd
    os.close(fd)
    return None


def take_away_foreign(path: str, mode: int) -> None:
    """Delete something with an object's name that is not a regular file; of a link, the link."""
    if stat.S_ISDIR(mode):
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(path)
    else:
        os.unlink(path)


_CREATE = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextlib.contextmanager
def closed_on_error(fd: int) -> Iterator[None]:
    """Close a descriptor if the block raises: a file system may refuse whatever is asked of it."""
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def is_volume(path: str) -> bool:
    """Return True if a directory is the root of a volume that is mounted into this container.

    Who starts the container chooses the volume. Its root often belongs to another user, and is
    writable by all in Kubernetes.
    """
    return os.path.ismount(path) and _is_container()


def _is_container() -> bool:
    """Return True if `/` is a container's: an overlay, or marked by Docker or Podman."""
    with contextlib.suppress(OSError), open(MOUNTS, "rb") as mounts:  # names may be any bytes
        for line in mounts:
            fields = line.split(b" ")
            if fields[4] == b"/" and fields[fields.index(b"-") + 1] == b"overlay":
                return True
    return os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv")


def check_parents(path: str) -> None:
    """Raise ConfigError if another user could put a directory of theirs in the place of a store's.

    `root`, and whoever owns `/`, could do so anyway. Directories of a group are trusted to it.
    """
    trusted = (os.geteuid(), 0, os.stat("/").st_uid)
    parent = os.path.dirname(path)
    ways = (Path(parent), Path(os.path.realpath(parent)))
    for each in dict.fromkeys(str(above) for way in ways for above in (way, *way.parents)):
        try:
            link, status = os.lstat(each), os.stat(each)
        except FileNotFoundError:  # to be made
            continue
        if is_volume(each):
            continue
        what = f"file store {path}: another user could replace it and so forge cached KV, since"
        for uid in (link.st_uid, status.st_uid):
            if uid not in trusted:
                raise ConfigError(
                    f"{what} {each} belongs to uid {uid}, we are uid {os.geteuid()}; name a "
                    "directory elsewhere"
                )
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise ConfigError(
                f"{what} {each} can be written by all users "
                f"(mode {stat.S_IMODE(status.st_mode):04o}); run: chmod +t {each}"
            )


def create_file(path: str, flags: int) -> int:
    """Create a new file with `FILE_MODE` whatever the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_EXCL | _CREATE | flags, FILE_MODE)
    with closed_on_error(fd):
        os.fchmod(fd, FILE_MODE)
    return fd


def open_lock(path: str) -> int:
    """Open or create the file of a lock; OSError if it is not a plain file with one name."""
    fd = os.open(path, os.O_RDWR | _CREATE, FILE_MODE)
    with closed_on_error(fd):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or not is_own(status):
            raise OSError(errno.EMLINK, "not a plain file of this user with one name", path)
    return fd


class HeldLock:
    """A lock between processes, taken without waiting; thread-safe.

    `kill -9` releases the lock. Two of these objects exclude each other in one process, too.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._guard = threading.Lock()

    def take(self) -> bool:
        """Return True if this process holds it now; OSError if the file system cannot tell."""
        with self._guard:
            if self._fd < 0:
                fd = open_lock(self._path)
                try:
                    with closed_on_error(fd):
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                self._fd = fd
            return True

    def release(self) -> None:
        """Release it if this process holds it."""
        with self._guard:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                os.close(self._fd)
                self._fd = -1
