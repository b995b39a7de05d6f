"""`file://` where this process may not write: what is there is read, nothing is saved.

No index, lock, temporary file or writer's directory is made, and no use is marked. Any thread may
call. Bytes come through the page cache, as nobody can be asked to try O_DIRECT on the disk.
"""

import dataclasses
import errno
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence

from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome, Store
from vllm_kvpool.storage.eviction import EvictionPolicy
from vllm_kvpool.storage.file.format import PAGE_BYTES, file_bytes, is_of, read_footer
from vllm_kvpool.storage.file.paths import SymlinkGuard, is_there
from vllm_kvpool.storage.file.space import FORMAT_DIR, object_name
from vllm_kvpool.storage.file.store import CAPABILITIES, FileStore, claim_root

logger = logging.getLogger(__name__)

NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
MAX_REMOVED = 1 << 16
READ_ONLY = dataclasses.replace(CAPABILITIES, writable=False, sheds=False)

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_told_lock = threading.Lock()
_told: set[str] = set()  # directories of which this process has said that it saves nothing there


def open_file_store(path: str, size_bytes: int, io: str, policy: EvictionPolicy) -> Store:
    """The store of a directory, for reading alone if this process may not write there."""
    try:
        return FileStore(path, size_bytes, io, policy)
    except ConfigError as error:
        cause = error.__cause__
        is_refused = isinstance(cause, OSError) and cause.errno in NOT_WRITABLE
        if not is_refused or not os.path.isdir(path):
            raise
        assert isinstance(cause, OSError)
        with _told_lock:
            is_news = path not in _told
            _told.add(path)
        if is_news:
            logger.warning(
                "file store %s cannot be written (%s: %s): what is there is read, and nothing is "
                "saved there; to save, make it writable for uid %d and restart the engine",
                path,
                cause.strerror,
                cause.filename or path,
                os.geteuid(),
            )
        return ReadOnlyFileStore(path)


class ReadOnlyFileStore:
    """See the module docstring. Implements `Store`; ConfigError as of `FileStore`.

    A cell that is removed stays on the disk, and is not found any more by this process.
    """

    def __init__(self, path: str) -> None:
        claim_root(path)  # it exists: its owner and mode are checked, and nothing is made
        self._root = path
        self._objects = f"{path}/{FORMAT_DIR}/objects"
        self._lock = threading.Lock()  # guards what follows
        self._removed: OrderedDict[str, None] = OrderedDict()
        self._warned: set[int] = set()

    capabilities = READ_ONLY

    def register(self, buffer: Buffer) -> None:
        pass

    def unregister(self, buffer: Buffer) -> None:
        pass

    def exists(self, keys: Sequence[str]) -> list[bool]:
        found = [key not in self._removed and is_there(self._path(key)) for key in keys]
        if not all(found):
            self._check_root()
        return found

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        return [PutOutcome.FAILED] * len(keys)

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        guard = SymlinkGuard(self._root)
        outcomes = [self._get(guard, *each) for each in zip(keys, buffers, strict=True)]
        if GetOutcome.MISSING in outcomes:
            self._check_root()
        return outcomes

    def remove(self, keys: Sequence[str]) -> int:
        with self._lock:
            for key in keys:
                self._removed[key] = None
            while len(self._removed) > MAX_REMOVED:
                self._removed.popitem(last=False)
        return 0

    def remove_namespace(self, namespace: str) -> int:
        raise StoreError(f"file store {self._root} cannot be written: nothing of it is removed")

    def close(self) -> None:
        pass

    def _path(self, key: str) -> str:
        return f"{self._objects}/{object_name(key)}"

    def _check_root(self) -> None:
        if os.path.islink(self._root) or not os.path.isdir(self._root):
            raise StoreError(f"file store {self._root} is gone; restore it or restart without it")

    def _get(self, guard: SymlinkGuard, key: str, buffer: Buffer) -> GetOutcome:
        if key in self._removed:
            return GetOutcome.MISSING
        path = self._path(key)
        try:
            guard.check(path)
            fd = os.open(path, _OPEN)
        except FileNotFoundError:
            return GetOutcome.MISSING
        except OSError as error:
            return self._failed(error)
        try:
            status = os.fstat(fd)
            expected = file_bytes(buffer.nbytes, key)
            if status.st_size != expected or not stat.S_ISREG(status.st_mode):
                return GetOutcome.WRONG_SIZE
            return self._read(fd, key, buffer, expected)
        except OSError as error:
            return self._failed(error)
        finally:
            os.close(fd)

    def _read(self, fd: int, key: str, buffer: Buffer, nbytes: int) -> GetOutcome:
        page = os.pread(fd, PAGE_BYTES, nbytes - PAGE_BYTES)
        if not is_of(read_footer(page), key, buffer.nbytes):
            return GetOutcome.WRONG_SIZE
        at = 0
        while at < buffer.nbytes:
            got = os.preadv(fd, [buffer.view[at:]], at)
            if not got:
                return GetOutcome.WRONG_SIZE
            at += got
        return GetOutcome.OK

    def _failed(self, error: OSError) -> GetOutcome:
        with self._lock:
            is_news = error.errno not in self._warned
            self._warned.add(error.errno or 0)
        if is_news:
            logger.warning("file store %s: %s", self._root, error)
        foreign = (errno.ELOOP, errno.ENXIO, errno.ENOTDIR)
        return GetOutcome.WRONG_SIZE if error.errno in foreign else GetOutcome.FAILED
