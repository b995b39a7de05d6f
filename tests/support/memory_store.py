"""`memory://name?size=1GiB`: cells in this process's heap. Importing it makes the scheme known.

Bounded tables of immutable objects evict whole chunks, a prompt's end first. Stores opened with
one name share one table, which lives as long as the process; a store without a name has its own.
Any thread may call; bytes are copied outside a table's lock, and a reader keeps the object it has.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import chunk_id_of_key, is_manifest, namespace_of
from vllm_kvpool.storage.backends import BACKENDS, Backend
from vllm_kvpool.storage.base import (
    Buffer,
    Capabilities,
    ChunkRef,
    GetOutcome,
    NamespaceUsage,
    PutOutcome,
    Store,
)
from vllm_kvpool.storage.tiers import DISTANCE
from vllm_kvpool.storage.url import MIN_STORE_BYTES, PARSERS, UrlOptions

CAPABILITIES = Capabilities(
    name="memory",
    durable=False,
    remote=False,
    parallel_gets=1,
    parallel_puts=1,
)


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """The options of a `memory://` URL."""

    name: str
    size_bytes: int


def _parse(parts: Any, query: UrlOptions, outside: object) -> Any:
    return MemoryOptions(parts.netloc, query.size("size", 1 << 30, least=MIN_STORE_BYTES))


def _backend(options: MemoryOptions, segment: bool) -> Backend:
    return CAPABILITIES, lambda: MemoryStore(options.name, options.size_bytes)


PARSERS["memory"] = _parse
DISTANCE["memory"] = -1
BACKENDS[MemoryOptions] = _backend


@dataclass(eq=False, slots=True)
class _StoredChunk:
    """The objects of one chunk. There is at least one."""

    parent: str
    position: int
    objects: dict[str, bytes] = field(default_factory=dict)


class LruTable:
    """At most `size_bytes` of objects; evicts whole chunks.

    Of the leaves, the chunk least recently read or written is evicted first. An eviction looks at
    every chunk, which suits the thousands that fit into a process's heap.
    """

    def __init__(self, size_bytes: int) -> None:
        assert size_bytes > 0, size_bytes
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        self._chunks: OrderedDict[str, _StoredChunk] = OrderedDict()  # least recently used first
        self._used_bytes = 0

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._objects_of(key)

    def add(self, cells: Sequence[tuple[str, bytes, ChunkRef]]) -> list[PutOutcome]:
        """Store each key that is absent, evicting other chunks to make room.

        The parents of these chunks are not evicted for them.
        """
        with self._lock:
            parents = {ref.parent for _, _, ref in cells}
            return [self._add(*cell, parents) for cell in cells]

    def _add(self, key: str, data: bytes, ref: ChunkRef, parents: set[str]) -> PutOutcome:
        chunk_id = chunk_id_of_key(key)
        if key in self._objects_of(key):
            return PutOutcome.EXISTED
        if len(data) > self.size_bytes or not self._make_room(len(data), {chunk_id, *parents}):
            return PutOutcome.FULL
        chunk = self._chunks.setdefault(chunk_id, _StoredChunk(ref.parent, ref.position))
        chunk.objects[key] = data
        self._used_bytes += len(data)
        self._chunks.move_to_end(chunk_id)
        return PutOutcome.STORED

    def take(self, key: str) -> bytes | None:
        """Return an object and mark its chunk as used; None if the object is absent."""
        with self._lock:
            data = self._objects_of(key).get(key)
            if data is not None:
                self._chunks.move_to_end(chunk_id_of_key(key))
            return data

    def drop(self, key: str) -> bool:
        """Remove one key. Return False if it is absent."""
        with self._lock:
            objects = self._objects_of(key)
            data = objects.pop(key, None)
            if data is None:
                return False
            self._used_bytes -= len(data)
            if not objects:
                del self._chunks[chunk_id_of_key(key)]
            return True

    def _objects_of(self, key: str) -> dict[str, bytes]:
        chunk = self._chunks.get(chunk_id_of_key(key))
        return {} if chunk is None else chunk.objects

    def _make_room(self, nbytes: int, kept: set[str]) -> bool:
        """Evict leaves outside `kept`. Return False if there are too few."""
        while self._used_bytes + nbytes > self.size_bytes:
            # Positions grow from parent to child, so there are no cycles.
            inner = {
                each.parent
                for each in self._chunks.values()
                if (parent := self._chunks.get(each.parent)) and parent.position < each.position
            }
            leaves = (each for each in self._chunks if each not in inner and each not in kept)
            coldest = next(leaves, None)
            if coldest is None:
                return False
            self._used_bytes -= sum(map(len, self._chunks.pop(coldest).objects.values()))
        return True

    def list_keys(self) -> list[str]:
        """Return the keys by chunk, least recently used first."""
        return [key for key, _ in self.list_sizes()]

    def list_sizes(self) -> list[tuple[str, int]]:
        """Return (key, size of the object) by chunk, least recently used first."""
        with self._lock:
            chunks = self._chunks.values()
            return [(key, len(data)) for chunk in chunks for key, data in chunk.objects.items()]

    def check(self) -> None:
        """Assert the invariants of the counts."""
        with self._lock:
            assert all(each.objects for each in self._chunks.values())
            objects = [data for each in self._chunks.values() for data in each.objects.values()]
            held_bytes = sum(map(len, objects))
            assert self._used_bytes == held_bytes <= self.size_bytes, (self._used_bytes, held_bytes)


_named: dict[str, LruTable] = {}
_named_lock = threading.Lock()


def open_table(name: str, size_bytes: int) -> LruTable:
    """Return the table of a name, created if it is missing; without a name, a new table."""
    if not name:
        return LruTable(size_bytes)
    with _named_lock:
        table = _named.setdefault(name, LruTable(size_bytes))
    if table.size_bytes != size_bytes:
        raise ConfigError(
            f"memory://{name} is already open in this process with size={table.size_bytes}; "
            f"use that size instead of {size_bytes}, or another name"
        )
    return table


class MemoryStore(Store):
    """A view of one table; implements `Listing`, too."""

    capabilities = CAPABILITIES

    def __init__(self, name: str, size_bytes: int) -> None:
        self._table = open_table(name, size_bytes)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [key in self._table for key in keys]

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        assert len(keys) == len(buffers) == len(chunks), (len(keys), len(buffers), len(chunks))
        outcomes = [PutOutcome.EXISTED] * len(keys)
        absent = [i for i, key in enumerate(keys) if key not in self._table]  # avoids copies
        cells = [(keys[i], buffers[i].view.tobytes(), chunks[i]) for i in absent]
        for i, outcome in zip(absent, self._table.add(cells), strict=True):
            outcomes[i] = outcome
        return outcomes

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        assert len(keys) == len(buffers), (len(keys), len(buffers))
        return [self._get(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def remove(self, keys: Sequence[str]) -> int:
        return sum(self._table.drop(key) for key in keys)

    def remove_namespace(self, namespace: str) -> int:
        prefix = f"{namespace}@"
        return self.remove([key for key in self._table.list_keys() if key.startswith(prefix)])

    def namespaces(self) -> list[str]:
        return [usage.namespace for usage in self.usage()]

    def usage(self) -> list[NamespaceUsage]:
        chunks: dict[str, Counter[str]] = {}
        nbytes: Counter[str] = Counter()
        for key, size in self._table.list_sizes():
            if (namespace := namespace_of(key)) is not None:
                cells = chunks.setdefault(namespace, Counter())
                nbytes[namespace] += size
                if not is_manifest(key):
                    cells[chunk_id_of_key(key)] += 1
        return [
            NamespaceUsage(name, len(cells), cells.total(), nbytes[name])
            for name, cells in chunks.items()
        ]

    def _get(self, key: str, buffer: Buffer) -> GetOutcome:
        data = self._table.take(key)
        if data is None:
            return GetOutcome.MISSING
        if len(data) != buffer.nbytes:
            return GetOutcome.WRONG_SIZE
        buffer.view[:] = data
        return GetOutcome.OK
