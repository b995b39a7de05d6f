"""Files that hold secrets, and files that are written under names that others can guess.

A secret is read from a file of our own, or of `root`, that others cannot read or replace. Writing
makes a new file or replaces one of our own; it never follows a link, and never opens a FIFO.
Between the check of a file and its use only the file's owner could change the file.
"""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from vllm_kvpool.errors import ConfigError

MAX_SECRET_BYTES = 16 << 20
_CREATE = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def read_secret(path: Path, option: str, *, is_secret: bool = True) -> bytes:
    """Read a file; ConfigError, which names `option`, if others may read or have written it.

    Not `is_secret`: others may read it, but not write it.
    """
    where = f"{option} {path}"
    try:
        # A FIFO would block the open.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if error := _error(os.lstat(path), os.fstat(fd), is_secret=is_secret):
                raise ConfigError(f"{where}: {error}")
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigError(f"{where} has more than {MAX_SECRET_BYTES} bytes")
    return content


def secret_error(path: Path) -> str:
    """Return what makes a file unfit for secrets, and what to do; "" if nothing does. OSError."""
    return _error(os.lstat(path), os.stat(path), is_secret=True)


def _error(link: os.stat_result, status: os.stat_result, *, is_secret: bool) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    if error := _owner_error(link, status):
        return error
    # Of root's files a group is root's choice: so service managers hand secrets to a user.
    is_handed = status.st_uid == 0 != os.geteuid()
    unreadable = stat.S_IRWXO | (0 if is_handed else stat.S_IRWXG)
    if is_secret and status.st_mode & unreadable:
        return "others can read it; chmod 600"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write it (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w"
    return ""


def _owner_error(link: os.stat_result, status: os.stat_result) -> str:
    for uid in (link.st_uid, status.st_uid):
        if uid not in (os.geteuid(), 0):
            return f"it belongs to uid {uid}, we are uid {os.geteuid()}; chown it, or name another"
    return ""


def create_secret(path: Path, text: str) -> bool:
    """Write a new file that its owner alone can read; False, and nothing is done, if one is there.

    OSError.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_EXCL | _CREATE, 0o600)
    except FileExistsError:
        return False
    with open(fd, "w") as file:
        file.write(text)
    return True


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Put a new file in the place of whatever has that name, all at once; of a link, of the link.

    OSError. `mode` is subject to the umask. The caller has seen that what is there is its own.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    fd = os.open(new, os.O_WRONLY | os.O_EXCL | _CREATE, mode)
    try:
        with open(fd, "wb") as file:
            file.write(content)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def open_to_write(path: Path, beginning: bytes) -> BinaryIO:
    """Create a file, or empty one of our own that is empty or has this beginning.

    OSError if another's file, or no plain one, or one with other content is there.
    """
    fd = os.open(path, os.O_RDWR | _CREATE | os.O_NONBLOCK, 0o666)
    try:
        status = os.fstat(fd)
        is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if not is_plain or status.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "not a plain file of our own with one name", str(path))
        if os.pread(fd, len(beginning), 0) not in (b"", beginning):
            raise FileExistsError(f"something else is in {path}, and stays")
        os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return open(fd, "wb")
