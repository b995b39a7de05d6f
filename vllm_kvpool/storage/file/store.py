"""`file:///path?size=50GiB`: cells as files, shared by every process that opens the directory.

Owns the names: `{objects}/{namespace}/{2 hex}/{38 hex}`, the digits being a digest of the whole
key, so no key can leave the directory or meet another. What is in a file is format.py's,
which chunks there are and what goes next index.py's, room and publishing space.py's, one call
batch.py's, moving bytes io.py's.

Any thread may call; there is no lock here. A file is written apart, gets its name whole and is
never changed after. Nothing is synced: after a power
loss a file may be short or hold zeros, which its footer and the cell's checksum find.
"""

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence

from vllm_kvpool.errors import BuffersInUse, ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.identity.keys import chunk_id_of_key, namespace_of
from vllm_kvpool.storage.base import (
    Buffer,
    Capabilities,
    ChunkRef,
    EvictionCandidate,
    GetOutcome,
    PutOutcome,
)
from vllm_kvpool.storage.eviction import DEFAULT_POLICY, POLICIES, EvictionPolicy
from vllm_kvpool.storage.file.batch import (
    NO_ROOM,
    ROUND_BYTES,
    ROUND_CELLS,
    Cell,
    FileStoreContext,
    ReadBatch,
    Tails,
    WriteBatch,
    parts_of,
)
from vllm_kvpool.storage.file.index import IndexBusy
from vllm_kvpool.storage.file.io_choice import choose_disk
from vllm_kvpool.storage.file.paths import (
    HeldLock,
    directories,
    entries,
    is_there,
    make_directory,
)
from vllm_kvpool.storage.file.space import FileSpace, object_name, read_file_footer, row_of

logger = logging.getLogger(__name__)

UNKNOWN_CHUNK = ChunkRef("")
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
PARTS_PER_SIZE = 8  # a put larger than this part of the size is made in several parts
HAND_DOWN_WATERMARK = 0.85  # of the size: what is handed down in time is not evicted

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
        policy: EvictionPolicy = POLICIES[DEFAULT_POLICY],
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        try:
            claim_root(path)
            self._space = FileSpace(path, size_bytes, policy, clock_ns)
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
        self._context = FileStoreContext(self._space, Tails(), choice.direct, self._warn)
        self._hand_down = HeldLock(self._space.hand_down_lock)
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
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        assert len(keys) == len(buffers) == len(chunks), (len(keys), len(buffers), len(chunks))
        outcomes = [PutOutcome.EXISTED] * len(keys)
        absent: dict[int, Cell] = {}
        first_of: dict[str, int] = {}
        twice: list[int] = []  # writes end in any order, but the first of a key's bytes stay
        for i, (key, buffer, chunk) in enumerate(zip(keys, buffers, chunks, strict=True)):
            if key in first_of:
                twice.append(i)
            elif not is_there(self._path(key)):
                first_of[key] = i
                absent[i] = Cell.of(key, buffer, chunk, self._space)
                outcomes[i] = PutOutcome.FULL
        # What is charged but not published cannot be evicted: a small store takes it in parts.
        most_bytes = self._space.size_bytes // PARTS_PER_SIZE
        parts = list(parts_of(absent, most_bytes, len(absent)))
        lost: set[str] = set()
        try:
            with self._holding(list(absent.values()), len(parts)):
                for cells in parts:
                    batch = WriteBatch(self._context, cells, outcomes, lost)
                    self._perform(batch)
                    if batch.timeout is not None:
                        raise batch.timeout
        except IndexBusy as error:  # the others would wait as long again, each of them
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
            Cell.of(key, buffer, UNKNOWN_CHUNK, self._space)
            for key, buffer in zip(keys, buffers, strict=True)
        ]
        batch = ReadBatch(self._context, cells)
        self._perform(batch)
        self._space.index.note_hits(
            cell.row.chunk_name
            for cell, outcome in zip(cells, batch.outcomes, strict=True)
            if outcome is GetOutcome.OK
        )
        if GetOutcome.MISSING in batch.outcomes:
            self._space.check_root()
        return batch.outcomes

    def remove(self, keys: Sequence[str]) -> int:
        rows = (row_of(key, UNKNOWN_CHUNK, 0) for key in keys)
        return self._drop(
            (row.chunk_name, row.name, self._space.path_of(row.namespace, row.name)) for row in rows
        )

    def remove_namespace(self, namespace: str) -> int:
        if namespace_of(f"{namespace}@") != namespace:
            return 0
        directory = os.path.join(self._space.objects, namespace)
        num_removed = self._drop((b"", b"", path) for path in self._below(directory))
        with contextlib.suppress(OSError):  # not empty: somebody is putting into it right now
            for shard in directories(directory):
                os.rmdir(shard.path)
            os.rmdir(directory)
        with self._telling("cannot remove"):
            self._space.index.remove_namespace(namespace)
        return num_removed

    def surplus(self, max_keys: int) -> list[EvictionCandidate]:
        """See `Shedding`; one process of a directory at a time gets an answer that is not empty."""
        found: list[EvictionCandidate] = []
        with self._telling("cannot be read"):
            found = self._surplus(max_keys)
        if not found:
            self._hand_down.release()
        return found

    def _surplus(self, max_keys: int) -> list[EvictionCandidate]:
        index = self._space.index
        index.write_hits()
        excess_bytes = index.used_bytes() - int(HAND_DOWN_WATERMARK * self._space.size_bytes)
        if excess_bytes <= 0 or not self._hand_down.take():
            return []
        found: list[EvictionCandidate] = []
        for cells in index.coldest(max_keys):  # what is left of a chunk would be worth nothing
            for _, namespace, name, nbytes in cells:
                path = self._space.path_of(namespace, name)
                footer = read_file_footer(path)
                if footer is not None and footer.key is not None and self._path(footer.key) == path:
                    chunk = ChunkRef(chunk_id_of_key(footer.key), footer.parent, footer.position)
                    found.append(EvictionCandidate(footer.key, chunk, footer.object_bytes))
                excess_bytes -= nbytes
            if excess_bytes <= 0:
                break
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
        self._space.guard().check(f"{directory}/")
        for shard in directories(directory):
            yield from (entry.path for entry in entries(shard.path))

    def _drop(self, cells: Iterator[tuple[bytes, bytes, str]]) -> int:
        num_dropped = 0
        with self._telling("cannot remove"):
            num_dropped = self._space.drop(cells)
        return num_dropped

    @contextlib.contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """StoreError for an OSError; one that says something is gone ends the block."""
        try:
            yield
        except FileNotFoundError:
            self._space.check_root()
        except OSError as error:
            raise StoreError(f"file store {self._space.root} {what}: {error}") from error

    def _holding(
        self, cells: Sequence[Cell], num_parts: int
    ) -> contextlib.AbstractContextManager[None]:
        """A put in several parts must not evict for one what the next comes after."""
        nbytes = sum(cell.file_bytes for cell in cells)
        if num_parts < 2 and nbytes <= ROUND_BYTES and len(cells) <= ROUND_CELLS:
            return contextlib.nullcontext()
        return self._space.holding(cell.row.parent_name for cell in cells)

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

    def _warn(self, error: OSError) -> None:
        """Say each kind of trouble once; a bad disk fails every call."""
        number = error.errno or 0
        if number not in self._warned_errnos:
            self._warned_errnos.add(number)
            logger.warning("file store %s: %s", self._space.root, error)
