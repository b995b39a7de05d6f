"""`file:///path?size=50GiB`: cells as files, shared by every process that opens the directory.

Owns the names: `{objects}/{namespace}/{2 hex}/{38 hex}`, the digits being a digest of the whole
key, so no key can leave the directory or meet another. What is in a file is files_format.py's,
room, publishing and eviction are files_space.py's, moving bytes is disk.py's.

Any thread may call; there is no lock here. A file is written apart, gets its name whole and is
never changed after; its mtime says how long it is worth keeping. Nothing is synced: after a power
loss a file may be short or hold zeros, which its footer and the cell's checksum find.
"""

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

from vllm_kvpool.errors import BuffersInUse, ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.keys import namespace_of
from vllm_kvpool.store.base import Buffer, Capabilities, GetOutcome, PutOutcome
from vllm_kvpool.store.disk import choose_disk
from vllm_kvpool.store.files_batch import (
    NO_ROOM,
    Cell,
    ReadBatch,
    Surroundings,
    Tails,
    WriteBatch,
    parts_of,
)
from vllm_kvpool.store.files_entries import directories, entries, is_there, make_directory
from vllm_kvpool.store.files_format import PAGE_BYTES, Footer, file_bytes, read_footer
from vllm_kvpool.store.files_lock import (
    HeldLock,
    LockTimeout,
)
from vllm_kvpool.store.files_order import Candidate, Policy
from vllm_kvpool.store.files_space import Space

logger = logging.getLogger(__name__)

NAME_DIGEST_BYTES = 20
FOREIGN = "foreign"  # keys outside every namespace; no namespace is spelt without an `@`
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
CLAIMS_PER_SIZE = 8  # a put larger than this part of the size is made in several parts
HAND_DOWN_WATERMARK = 0.85  # below LOW_WATERMARK: what is handed down in time is not evicted
HAND_DOWN_SCAN_NS = 10 * 10**9  # between two scans for the same purpose

CAPABILITIES = Capabilities(
    name="file",
    durable=True,
    remote=False,
    parallel_gets=2,
    parallel_puts=1,  # it makes room and publishes while the disk writes; two would only take turns
    batches_per_put=2,  # at its ends it does wait for the disk
    sheds=True,
    free_exists=True,
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


class FileStore:
    """A directory of at most `size_bytes`, coldest first out; implements `Store` and `Shedding`.

    `io` is `auto`, `uring` or `threads`; ConfigError if it was `uring` and that does not work, or
    if the directory cannot be used. StoreUnreachable if there is no room for a new one: others may
    make some.
    """

    def __init__(
        self,
        path: str,
        size_bytes: int,
        io: str = "auto",
        policy: Policy = Policy.LRU,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        try:
            claim_root(path)
            self._space = Space(path, size_bytes, clock_ns)
        except OSError as error:
            text = f"file store {path} cannot be used: {error.strerror} ({error.filename or path})"
            if error.errno in NO_ROOM:
                raise StoreUnreachable(
                    f"{text}; make room on its disk, or name a directory on another"
                ) from error
            raise ConfigError(f"{text}; name a directory that this user can write") from error
        try:
            choice = choose_disk(io, self._space.own_directory)
        except ConfigError as error:
            self._space.close()
            raise ConfigError(f"file store {path}: {error}") from None
        logger.info("file store %s: %s", path, choice.reason)
        self._disk = choice.disk
        self._clock_ns = clock_ns
        self._around = Surroundings(
            self._space, Tails(), choice.direct, policy, clock_ns, self._warn
        )
        self._hand_down = HeldLock(self._space.hand_down_lock)
        self._hand_down_scan_ns: int | None = None
        self._warned_errnos: set[int] = set()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def register(self, buffer: Buffer) -> None:
        pass

    def unregister(self, buffer: Buffer) -> None:
        pass

    def exists(self, keys: Sequence[str]) -> list[bool]:
        found = [is_there(self._path(key)) for key in keys]
        if not all(found):
            self._space.check_root()
        return found

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], groups: Sequence[str]
    ) -> list[PutOutcome]:
        assert len(keys) == len(buffers) == len(groups), (len(keys), len(buffers), len(groups))
        outcomes = [PutOutcome.EXISTED] * len(keys)
        absent: dict[int, Cell] = {}
        first_of: dict[str, int] = {}
        twice: list[int] = []  # writes end in any order, but the first of a key's bytes stay
        for i, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            path = self._path(key)
            if key in first_of:
                twice.append(i)
            elif not is_there(path):
                first_of[key] = i
                absent[i] = Cell.of(key, buffer, path)
                outcomes[i] = PutOutcome.FULL
        # What is charged but not published cannot be evicted: a small store takes it in parts.
        most_bytes = self._space.size_bytes // CLAIMS_PER_SIZE
        try:
            for cells in parts_of(absent, most_bytes):
                batch = WriteBatch(self._around, cells, outcomes)
                self._perform(batch)
                if batch.timeout is not None:
                    raise batch.timeout
        except LockTimeout as error:  # the others would wait as long again, each of them
            logger.warning("%s; the rest of the batch is not stored", error)
        if PutOutcome.FAILED in outcomes:
            self._space.check_root()
        for i in twice:
            first = outcomes[first_of[keys[i]]]
            outcomes[i] = PutOutcome.EXISTED if first is PutOutcome.STORED else first
        return outcomes

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        assert len(keys) == len(buffers), (len(keys), len(buffers))
        cells = [
            Cell.of(key, buffer, self._path(key)) for key, buffer in zip(keys, buffers, strict=True)
        ]
        batch = ReadBatch(self._around, cells)
        self._perform(batch)
        if GetOutcome.MISSING in batch.outcomes:
            self._space.check_root()
        return batch.outcomes

    def remove(self, keys: Sequence[str]) -> int:
        return self._drop(map(self._path, keys))

    def remove_namespace(self, namespace: str) -> int:
        if namespace_of(f"{namespace}@") != namespace:
            return 0
        directory = os.path.join(self._space.objects, namespace)
        num_removed = self._drop(self._below(directory))
        with contextlib.suppress(OSError):  # not empty: somebody is putting into it right now
            for shard in directories(directory):
                os.rmdir(shard.path)
            os.rmdir(directory)
        return num_removed

    def surplus(self, max_keys: int) -> list[tuple[str, int]]:
        """See `Shedding`; one process of a directory at a time gets an answer that is not empty."""
        try:
            return self._surplus(max_keys)
        except OSError as error:
            self._hand_down.release()
            raise StoreError(f"file store {self._space.root} cannot be read: {error}") from error

    def _surplus(self, max_keys: int) -> list[tuple[str, int]]:
        excess_bytes = self._space.excess_bytes(HAND_DOWN_WATERMARK)
        if excess_bytes <= 0 or not self._hand_down.take():
            return []
        found = self._read_keys(self._space.coldest(scan=False), excess_bytes, max_keys)
        now_ns = self._clock_ns()
        last_ns = self._hand_down_scan_ns
        # A clock that was set back must not stop scans until it is there again.
        if not found and (last_ns is None or not 0 <= now_ns - last_ns < HAND_DOWN_SCAN_NS):
            self._hand_down_scan_ns = now_ns
            with contextlib.suppress(LockTimeout):
                found = self._read_keys(self._space.coldest(scan=True), excess_bytes, max_keys)
        if not found:
            self._hand_down.release()
        return found

    def surplus_done(self) -> None:
        self._hand_down.release()

    def close(self) -> None:
        self._hand_down.release()
        self._disk.close()
        self._space.close()

    def _path(self, key: str) -> str:
        return f"{self._space.objects}/{object_name(key)}"

    def _below(self, directory: str) -> Iterator[str]:
        """The paths of a namespace's objects; OSError if they may be outside of the store."""
        self._space.ways().check(f"{directory}/")
        for shard in directories(directory):
            yield from (entry.path for entry in entries(shard.path))

    def _drop(self, paths: Iterator[str]) -> int:
        try:
            return self._space.drop(paths)
        except FileNotFoundError:
            self._space.check_root()
            return 0
        except OSError as error:
            raise StoreError(f"file store {self._space.root} cannot remove: {error}") from error

    def _perform(self, batch: ReadBatch | WriteBatch) -> None:
        with contextlib.closing(batch):
            try:
                with contextlib.closing(self._disk.run(batch.transfers())) as run:
                    for done in run:
                        batch.finish(done)
            except BuffersInUse:
                batch.in_use = True
            finally:  # whatever else has failed says less
                if batch.in_use:
                    raise BuffersInUse(f"the disk of {self._space.root} does not answer")

    def _read_keys(
        self, coldest_first: Sequence[Candidate], excess_bytes: int, max_keys: int
    ) -> list[tuple[str, int]]:
        """Keys and object bytes of what was not used since it was seen, up to an excess."""
        found: list[tuple[str, int]] = []
        for item in coldest_first:
            if excess_bytes <= 0 or len(found) == max_keys:
                break
            footer = read_file_footer(item)
            if footer is not None:
                excess_bytes -= item.charge_bytes
                if footer.key is not None and self._path(footer.key) == item.path:
                    found.append((footer.key, footer.object_bytes))
        return found

    def _warn(self, error: OSError) -> None:
        """Say each kind of trouble once; a bad disk fails every call."""
        number = error.errno or 0
        if number not in self._warned_errnos:
            self._warned_errnos.add(number)
            logger.warning("file store %s: %s", self._space.root, error)


def read_file_footer(item: Candidate) -> Footer | None:
    """What a file says it holds; None if it is gone, damaged or was used since it was seen."""
    try:
        fd = os.open(item.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if status.st_mtime_ns != item.worth_ns or status.st_size < PAGE_BYTES:
            return None
        footer = read_footer(os.pread(fd, PAGE_BYTES, status.st_size - PAGE_BYTES))
        # Who asks for this object will take memory for as many bytes as it is said to have.
        if footer and file_bytes(footer.object_bytes, footer.key or "") != status.st_size:
            return None
        return footer
    except OSError:
        return None
    finally:
        os.close(fd)
