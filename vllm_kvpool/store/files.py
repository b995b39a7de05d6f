"""`file:///path?size=50GiB`: cells as files, shared by every process that opens the directory.

Owns the names: `{objects}/{namespace}/{2 hex}/{38 hex}`, the digits being a digest of the whole
key, so no key can leave the directory or meet another. Room, publishing and eviction are
files_space.py's.

Any thread may call; there is no lock here. A file is written apart, gets its name whole and is
never changed after; its mtime is its last use. Nothing is synced: after a power loss a file may
be short or hold zeros, which the size check and the cell's checksum find.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.keys import namespace_of
from vllm_kvpool.store.base import Buffer, Capabilities, GetOutcome, PutOutcome
from vllm_kvpool.store.files_space import LockTimeout, Space, Temp, entries, make_directory

logger = logging.getLogger(__name__)

NAME_DIGEST_BYTES = 20
FOREIGN = "foreign"  # keys outside every namespace; no namespace is spelt without an `@`
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

CAPABILITIES = Capabilities(
    name="file",
    durable=True,
    remote=False,
    parallel_gets=2,
    parallel_puts=1,
)


def claim_root(path: str) -> None:
    """Make the store's directory, or check that nobody else can have written in it."""
    if not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        make_directory(path)
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(
            f"file store {path} is a symbolic link; name the directory it points to, "
            f"{os.path.realpath(path)}, instead"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"file store {path} is not a directory; name another path")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"file store {path} belongs to uid {status.st_uid}, we are uid {os.geteuid()}; cached "
            f"KV must not be readable or replaceable by others: name a directory of your own"
        )
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise ConfigError(
            f"file store {path} can be written by group or others "
            f"(mode {stat.S_IMODE(status.st_mode):04o}); run: chmod 700 {path}"
        )


def object_name(key: str) -> str:
    """Where a key's object lies below the objects directory."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=NAME_DIGEST_BYTES)
    name = digest.hexdigest()
    return f"{namespace_of(key) or FOREIGN}/{name[:2]}/{name[2:]}"


def write_fully(fd: int, view: memoryview) -> None:
    """Write all of `view`; a call may take less than it is given."""
    done = 0
    while done < view.nbytes:
        done += os.writev(fd, [view[done:]])


def read_fully(fd: int, view: memoryview) -> bool:
    """Fill `view` from the start of the file; False if the file ends early."""
    done = 0
    while done < view.nbytes:
        got = os.preadv(fd, [view[done:]], done)
        if got == 0:
            return False
        done += got
    return True


class FileStore:
    """A directory of at most `size_bytes`, least recently used first out; implements `Store`."""

    def __init__(self, path: str, size_bytes: int) -> None:
        try:
            claim_root(path)
            self._space = Space(path, size_bytes)
        except OSError as error:
            raise ConfigError(
                f"file store {path} cannot be used: {error.strerror} ({error.filename}); "
                f"name a directory that this user can write"
            ) from error
        self._warned_errnos: set[int] = set()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def register(self, buffer: Buffer) -> None:
        pass

    def unregister(self, buffer: Buffer) -> None:
        pass

    def exists(self, keys: Sequence[str]) -> list[bool]:
        found = [os.access(self._path(key), os.F_OK) for key in keys]
        if not all(found):
            self._space.check_root()
        return found

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], groups: Sequence[str]
    ) -> list[PutOutcome]:
        assert len(keys) == len(buffers) == len(groups), (len(keys), len(buffers), len(groups))
        outcomes: list[PutOutcome] = []
        try:
            for key, buffer in zip(keys, buffers, strict=True):
                outcomes.append(self._put(self._path(key), buffer))
        except LockTimeout as error:  # the others would wait as long again, each of them
            logger.warning("%s; the rest of the batch is not stored", error)
            outcomes += [PutOutcome.FULL] * (len(keys) - len(outcomes))
        return outcomes

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        assert len(keys) == len(buffers), (len(keys), len(buffers))
        outcomes = [
            self._get(self._path(key), buffer) for key, buffer in zip(keys, buffers, strict=True)
        ]
        if GetOutcome.MISSING in outcomes:
            self._space.check_root()
        return outcomes

    def remove(self, keys: Sequence[str]) -> int:
        return self._drop(map(self._path, keys))

    def remove_namespace(self, namespace: str) -> int:
        if namespace_of(f"{namespace}@") != namespace:
            return 0
        directory = os.path.join(self._space.objects, namespace)
        num_removed = self._drop(
            entry.path for shard in entries(directory) for entry in entries(shard.path)
        )
        with contextlib.suppress(OSError):  # not empty: somebody is putting into it right now
            for shard in entries(directory):
                os.rmdir(shard.path)
            os.rmdir(directory)
        return num_removed

    def close(self) -> None:
        self._space.close()

    def _path(self, key: str) -> str:
        return f"{self._space.objects}/{object_name(key)}"

    def _drop(self, paths: Iterator[str]) -> int:
        try:
            return self._space.drop(paths)
        except FileNotFoundError:
            self._space.check_root()
            return 0
        except OSError as error:
            raise StoreError(f"file store {self._space.root} cannot remove: {error}") from error

    def _put(self, path: str, buffer: Buffer) -> PutOutcome:
        if os.access(path, os.F_OK):
            return PutOutcome.EXISTED
        try:
            temp = self._space.reserve(buffer.nbytes)
            return self._write(temp, path, buffer.view) if temp is not None else PutOutcome.FULL
        except OSError as error:
            self._space.check_root()
            if error.errno in _NO_ROOM:
                return PutOutcome.FULL
            self._warn(error)
            return PutOutcome.FAILED

    def _write(self, temp: Temp, path: str, view: memoryview) -> PutOutcome:
        try:
            write_fully(temp.fd, view)
            published = self._space.publish(temp, path)
        except OSError:
            self._space.release(temp)
            raise
        finally:
            os.close(temp.fd)
        return PutOutcome.STORED if published else PutOutcome.EXISTED

    def _get(self, path: str, buffer: Buffer) -> GetOutcome:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return GetOutcome.MISSING
        except OSError as error:
            self._warn(error)
            return GetOutcome.FAILED
        try:
            if os.fstat(fd).st_size != buffer.nbytes:
                return GetOutcome.WRONG_SIZE
            if not read_fully(fd, buffer.view):
                return GetOutcome.FAILED
            with contextlib.suppress(OSError):  # an unmarked use only makes it look older
                os.utime(fd)
            return GetOutcome.OK
        except OSError as error:
            self._warn(error)
            return GetOutcome.FAILED
        finally:
            os.close(fd)

    def _warn(self, error: OSError) -> None:
        """Say each kind of trouble once; a bad disk fails every call."""
        number = error.errno or 0
        if number not in self._warned_errnos:
            self._warned_errnos.add(number)
            logger.warning("file store %s: %s", self._space.root, error)
