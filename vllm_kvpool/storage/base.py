"""The contract of a store, a shared place that holds cells by key.

tests/support/store_contract.py tests it.

Calls are batched and blocking, from several threads at once; `close` comes last and once.
* One result per key, in order. A problem with one key is that key's outcome, not an exception.
* `StoreError` only if nothing is known about any key (connection lost, directory gone).
* When a call returns or raises, nothing accesses its buffers any more.
* An object becomes visible whole or not at all, and the first writer of a key wins.
* `get` fills a buffer only if the object has exactly the buffer's size.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np


class Buffer(NamedTuple):
    """Bytes in memory that outlive the call: `view` (uint8, contiguous) starts at `address`."""

    address: int
    view: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of `view`."""
        return self.view.nbytes

    def part(self, start: int, stop: int) -> "Buffer":
        """Return the bytes `[start, stop)`, in the same memory."""
        return Buffer(self.address + start, self.view[start:stop])


def map_buffer(nbytes: int) -> Buffer:
    """Return fresh memory, zeroed, from the start of a page on.

    It lives as long as a view of it.
    """
    view = memoryview(mmap.mmap(-1, nbytes))
    return Buffer(int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]), view)


class Retention(NamedTuple):
    """Wishes for how long to keep a chunk, in nanoseconds of the wall clock; 0 is no wish."""

    pinned_until_ns: int = 0
    """Before that time it is not evicted."""
    expires_ns: int = 0
    """After that time it is removed, unless it is pinned or a stored chunk comes after it."""


NO_RETENTION = Retention()


class ChunkRef(NamedTuple):
    """The chunk that a cell belongs to, for eviction.

    All cells of a chunk and layer group have one `id` (`keys.chunk_id_of_key` of any of their
    keys). A chunk is useless without `parent`, the chunk before it in its prompt; "" is none or
    unknown. `parent_in_host` is the nearest chunk before it in the same rank's host memory, if
    ranks keep different chunks of a prompt; "" is `parent`.
    """

    id: str
    parent: str = ""
    position: int = 0  # the number of chunks before it in its prompt
    parent_in_host: str = ""
    retention: Retention = NO_RETENTION
    tenant: str = ""  # a name or a digest; "" for none


class PutOutcome(Enum):
    """The outcome of one key of a `put`.

    After STORED or EXISTED a get may still say MISSING until another writer of the key, who was
    first, is done: Mooncake answers the second writer at once.
    """

    STORED = "stored"
    EXISTED = "existed"  # kept the bytes stored before; stores that cannot tell say STORED
    FULL = "full"  # no room now; a later put may succeed
    FAILED = "failed"


class GetOutcome(Enum):
    """The outcome of one key of a `get`."""

    OK = "ok"
    MISSING = "missing"
    WRONG_SIZE = "wrong_size"  # the object's size differs from the buffer's
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a store; constant while it is open."""

    name: str  # label in metrics: "file", "mooncake", "s3"
    durable: bool  # objects outlive the process that wrote them
    remote: bool  # calls cross a network, so a failure may be temporary
    parallel_gets: int  # concurrent calls of `get` that give the best throughput
    parallel_puts: int
    batches_per_put: int = 1  # of the usual size, in one call: a long put may overlap its parts
    writable: bool = True  # False: cells are read, none are saved
    loses_cells: bool = False  # it evicts cells of a chunk one by one; one `exists` asks thousands
    pins: bool = False  # `pin` pins, and puts honour `ChunkRef.retention`


class Store(Protocol):
    """A place that holds cells by key, under the rules at the top of this module."""

    @property
    def capabilities(self) -> Capabilities:
        """The store's name in metrics, its best concurrency, and its optional features."""

    def register(self, buffer: Buffer) -> None:
        """Prepare memory for transfers, before its first put or get. By default nothing."""
        return None

    def unregister(self, buffer: Buffer) -> None:
        """Undo `register`, after the last transfer and before `close`. By default nothing."""
        return None

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether it can be read now."""

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        """Store each buffer's bytes under its key.

        `chunks` has the chunk of each key. `file://` evicts whole chunks, none before those
        that come after it in its prompt; other stores do what they can. Buffers stay
        unchanged and owned by the caller.
        """

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        """Fill each buffer with its key's object; a buffer's bytes are undefined unless OK."""

    def remove(self, keys: Sequence[str]) -> int:
        """Remove keys; returns the number removed. Absent keys are no error."""

    def remove_namespace(self, namespace: str) -> int:
        """Remove every key that begins with `{namespace}@`; returns the number removed.

        `namespace` is one that keys.py made.
        """

    def pin(self, keys: Sequence[str], until_ns: int) -> int:
        """Pin the stored chunks of keys until a time of the wall clock; 0 ends their pins.

        Returns the number of chunks pinned (or unpinned): chunks that are not stored, or beyond the
        share of the size that may be pinned, are not. By default none.
        """
        return 0

    def close(self) -> None:
        """Release everything; no call may follow. By default nothing."""
        return None


class OwnerUsage(NamedTuple):
    """The part of a store's room that a tenant or namespace takes."""

    owner: str
    num_cells: int
    nbytes: int


class ChunkUsage(NamedTuple):
    """A stored chunk in one layer group. Times are of the wall clock, in nanoseconds."""

    namespace: str
    id: int
    parent: int | None
    """The `id` of the chunk before it in its prompt, if that is stored."""
    position: int
    """The number of chunks before it in its prompt, stored or not."""
    num_cells: int
    nbytes: int
    num_hits: int
    """Cells that were read from it since it was written."""
    pinned_until_ns: int
    written_ns: int
    key: str
    """The key of one of its cells."""


class NamespaceUsage(NamedTuple):
    """The contents of a namespace in a store. A chunk counts once for each layer group.

    The namespace's manifest counts in `nbytes` alone: it is no cell.
    """

    namespace: str
    num_chunks: int
    num_cells: int
    nbytes: int
    num_hits: int | None = None
    """Cells that were read of what is stored; None if the store does not count them."""
    num_single: int = 0
    """Chunks of one cell: aliases, and all where a chunk has one cell."""


@runtime_checkable
class Listing(Protocol):
    """A store that can say which namespaces it holds, for operators."""

    def namespaces(self) -> list[str]:
        """Return the namespaces that have objects, in no order. Cheap: it lists no objects."""

    def usage(self) -> list[NamespaceUsage]:
        """Return the usage of each namespace. May take seconds for a large store."""


def namespaces_of(store: Store) -> list[str]:
    """Return the namespaces of a store; none if it cannot list them."""
    return store.namespaces() if isinstance(store, Listing) else []
