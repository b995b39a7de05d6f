"""Which way of moving bytes works in a directory: tried, not guessed."""

import contextlib
import errno
import mmap
import os
import secrets
from typing import NamedTuple

import numpy as np

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.base import Buffer
from vllm_kvpool.storage.file.io import DiskIO, ThreadDisk, Transfer
from vllm_kvpool.storage.file.uring import UringDisk

_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_FAULT = frozenset({0, errno.ENOSPC, errno.EDQUOT})  # a full disk says nothing of the way to it


class Choice(NamedTuple):
    """How a store moves bytes, and why."""

    disk: DiskIO
    direct: bool  # O_DIRECT works
    reason: str


def choose_disk(io: str, directory: str) -> Choice:
    """Try in `directory`, on its file system, what works; `io` is one of `IO_CHOICES`.

    ConfigError if it is `uring` and that does not work.
    """
    threads = ThreadDisk()
    direct = probe(threads, directory, os.O_DIRECT) not in _NO_DIRECT
    how = "O_DIRECT" if direct else "the page cache, as O_DIRECT is refused"
    if io == "threads":
        return Choice(threads, direct, f"threads, as configured, and {how}")
    try:
        uring = UringDisk()
    except OSError as error:
        trouble = error.errno or errno.EIO
    else:
        trouble = probe(uring, directory, os.O_DIRECT if direct else 0)
        uring.close()  # this thread is not one that will move data
        if trouble in _NO_FAULT:
            return Choice(uring, direct, f"io_uring and {how}")
    reason = os.strerror(trouble)
    if io == "uring":
        raise ConfigError(f"io=uring does not work here: {reason}; write io=auto")
    return Choice(threads, direct, f"threads, as io_uring does not work ({reason}), and {how}")


def probe(disk: DiskIO, directory: str, flags: int) -> int:
    """Write a page to a new file and read it back; 0, or the errno of what failed."""
    memory = memoryview(mmap.mmap(-1, 2 * mmap.PAGESIZE))
    address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
    written = Buffer(address, memory[: mmap.PAGESIZE])
    read = Buffer(address + mmap.PAGESIZE, memory[mmap.PAGESIZE :])
    written.view[:] = secrets.token_bytes(mmap.PAGESIZE)
    path = os.path.join(directory, f"probe-{secrets.token_hex(8)}")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        return error.errno or errno.EIO
    in_use = False
    try:
        os.unlink(path)
        for part, writes in ((written, True), (read, False)):
            with contextlib.closing(disk.run([Transfer(0, fd, (part,), writes)])) as run:
                for done in run:
                    in_use |= done.in_use
                    if done.error:
                        return done.error
    except OSError as error:
        return error.errno or errno.EIO
    finally:
        if not in_use:
            os.close(fd)
    return 0 if written.view == read.view else errno.EIO
