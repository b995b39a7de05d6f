"""The contract of a store: a shared place that holds cells by key.

Every call is batched and blocking, and is made from a lane or a thread of the lookup service,
never from the engine's threads. A store knows bytes and keys, not layers, heads or engines.

What an implementor owes:
* one result per key, in order; a problem with one key is that key's outcome, never an exception;
* `StoreError` only when nothing can be said about any key (connection lost, directory gone);
* when a call returns or raises, nothing touches its buffers any more, unless it is `BuffersInUse`;
* an object becomes visible whole or not at all, and the first writer of a key wins;
* `get` fills a buffer only when the object has exactly the buffer's size;
* methods may be called from several threads at once; `close` is called last and once.
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
        return self.view.nbytes

    def part(self, start: int, stop: int) -> "Buffer":
        """Its bytes `[start, stop)`, in the same memory."""
        return Buffer(self.address + start, self.view[start:stop])


def map_buffer(nbytes: int) -> Buffer:
    """Fresh memory, zeroed, from the start of a page on; it lives as long as a view of it."""
    view = memoryview(mmap.mmap(-1, nbytes))
    return Buffer(int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]), view)


class ChunkRef(NamedTuple):
    """The chunk that a cell belongs to, as far as eviction has to know it.

    All cells of a chunk and layer group have one `id` (`keys.chunk_id_of_key` of any of their
    keys). Without `parent`, the chunk before it in its prompt, a chunk is worth nothing. "" is
    none, or unknown.
    `parent_in_host` is the nearest chunk before it that the same rank's host memory keeps, where
    ranks keep different chunks of a prompt; "" is `parent`.
    """

    id: str
    parent: str = ""
    position: int = 0  # how many chunks of the prompt come before it
    parent_in_host: str = ""


class PutOutcome(Enum):
    """What became of one key of a `put`.

    After STORED or EXISTED a get may still say MISSING while another writer, who was first with
    this key, is not done: Mooncake answers the second one at once.
    """

    STORED = "stored"
    EXISTED = "existed"  # stored before, those bytes stay; some stores cannot tell, say STORED
    FULL = "full"  # no room now; a later put may succeed
    FAILED = "failed"


class GetOutcome(Enum):
    """What became of one key of a `get`."""

    OK = "ok"
    MISSING = "missing"
    WRONG_SIZE = "wrong_size"  # the object's size differs from the buffer's
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do, asked once after opening; an ability is a field, not a method."""

    name: str  # label in metrics: "file", "memory", "mooncake", "s3"
    durable: bool  # objects outlive the process that wrote them
    remote: bool  # calls cross a network: a failure may pass, so it is worth a retry
    parallel_gets: int  # calls of `get` at a time that together are the fastest
    parallel_puts: int
    batches_per_put: int = 1  # of the usual size, taken together: a long put may overlap its parts
    sheds: bool = False  # it is `Shedding` too
    writable: bool = True  # False: it is read, and nothing is saved there
    free_exists: bool = False  # it takes microseconds and changes nothing, not what goes first


class Store(Protocol):
    """See the module docstring for the rules."""

    @property
    def capabilities(self) -> Capabilities: ...

    def register(self, buffer: Buffer) -> None:
        """Prepare memory for transfers; once per arena, before its first put or get."""

    def unregister(self, buffer: Buffer) -> None:
        """Undo `register`, after the last transfer and before `close`."""

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key can be read now. Raises StoreError when that cannot be known."""

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        """Store each buffer's bytes under its key.

        `chunks` has the chunk of each key. A bounded store of ours evicts whole chunks, none
        before those that come after it in their prompts; others do what they can. Buffers stay
        unchanged and owned by the caller.
        """

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        """Fill each buffer with its key's object. A buffer's bytes are undefined unless OK."""

    def remove(self, keys: Sequence[str]) -> int:
        """Remove keys; absent ones are no error. Returns how many were removed."""

    def remove_namespace(self, namespace: str) -> int:
        """Remove every key that begins with `{namespace}@`. Returns how many were removed.

        `namespace` is one that keys.py made; keys outside every namespace are removed by name.
        """

    def close(self) -> None:
        """Release everything; no call may follow."""


class EvictionCandidate(NamedTuple):
    """A cell that would be evicted next."""

    key: str
    chunk: ChunkRef
    nbytes: int


@runtime_checkable
class Shedding(Protocol):
    """A store that names what it would evict next, so that it can be kept elsewhere before."""

    def surplus(self, max_keys: int) -> list[EvictionCandidate]:
        """Cells, coldest first, of what is beyond a watermark; may be empty.

        The caller copies and then removes them, or the next call names the same ones. After an
        answer that is not empty no other process that shares the store gets one, until
        `surplus_done` or the end of this process.
        """

    def surplus_done(self) -> None:
        """Let others have their turn; may be called without need."""
