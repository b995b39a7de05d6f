"""Which cells are in host memory, where, and how long they stay (pure; owned by the engine thread).

A `CacheEntry` is one cell in one slot of the arena, on its way in or present. Whoever moves its
bytes holds a pin; without pins it stays as long as the host tier has room for it (`keep` slots;
none without a host tier), and then the chunk with the lowest score leaves first
(storage/eviction.py), a prompt's end before its beginning: no chunk scores less than one that comes
after it. A dirty cell is in no lower tier yet: it is copied there before it leaves.

Cells that nobody holds stand in two lines, the clean ones and the dirty ones, each a heap by rank.
Scores only rise. A cell whose chunk is used again keeps its place, and takes one further back when
its turn comes. A place that its cell has left (held then, or gone) is stale, and skipped.

Invariants (`check`): a slot belongs to at most one entry; an entry that is not pinned is present,
and there are at most `keep` of those but for dirty ones on their way out; `index` holds each key
once, and an entry that was forgotten (a reset, a stuck transfer) is held by its transfers alone;
`_chunks` holds the chunks of present cells, and their parents, whether or not those are here.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING

from vllm_kvpool.identity.keys import layer_group_of
from vllm_kvpool.staging.slots import Slot, SlotPool, SlotUse
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.eviction import EvictedScores, EvictionPolicy
from vllm_kvpool.transfer.ops import HostCacheChange

if TYPE_CHECKING:
    from vllm_kvpool.transfer.graph import Op

STALE_PLACES = 64  # in a line, beyond as many as there are cells


Rank = tuple[int, int, str]
"""Score and negative position of its chunk, and its key: the lowest leaves first."""


class CacheEntryState(Enum):
    ARRIVING = "arriving"
    PRESENT = "present"
    GONE = "gone"


class CacheEntry:
    """One cell in host memory. `op` brings it in, while it arrives."""

    __slots__ = (
        "chunk",
        "dirty",
        "indexed",
        "key",
        "nbytes",
        "op",
        "pins",
        "place",
        "prefetched",
        "slot",
        "state",
    )

    def __init__(self, key: str, chunk: ChunkRef, nbytes: int) -> None:
        self.key = key
        self.chunk = chunk
        self.nbytes = nbytes
        self.slot: Slot | None = None
        self.pins = 1  # of the transfer that brings it in
        self.state = CacheEntryState.ARRIVING
        self.op: Op | None = None
        self.dirty = False
        self.prefetched = False  # brought in for nobody, and not used yet
        self.indexed = True  # in the index: whoever asks for the key gets this entry
        self.place: tuple[bool, Rank] | None = None  # in line: dirty or not, and where


class _Chunk:
    """A chunk some of whose cells are here, or that a chunk here comes after."""

    __slots__ = ("chunk_id", "num_cells", "num_children", "parent", "score")

    def __init__(self, chunk_id: str) -> None:
        self.chunk_id = chunk_id
        self.parent: _Chunk | None = None
        self.num_children = 0
        self.num_cells = 0  # that are present
        self.score = 0  # never less than a child's


class HostCache:
    """See the module docstring.

    `cells_per_chunk`: how many of this rank's cells make a chunk, for each layer group.
    """

    def __init__(
        self,
        slots: SlotPool,
        capacity: int,
        policy: EvictionPolicy,
        cells_per_chunk: Mapping[str, int],
    ) -> None:
        self.slots = slots
        self.capacity = capacity
        self._policy = policy
        self._cells_per_chunk = cells_per_chunk
        self._index: dict[str, CacheEntry] = {}
        self._chunks: dict[str, _Chunk] = {}
        num_chunks = capacity // min(cells_per_chunk.values(), default=1)
        self._evicted = EvictedScores(policy.remembered * num_chunks)
        self._changes: dict[str, bool] = {}  # chunk -> whether all of it is here now
        self._lines: tuple[list[Rank], list[Rank]] = ([], [])  # clean, dirty
        self.num_idle = 0  # present, in the index, without a pin
        self.num_dirty = 0  # of those
        self.unused_prefetches = 0  # dropped without having been used; the owner resets it
        self.num_dropped = 0  # the same

    def get(self, key: str) -> CacheEntry | None:
        return self._index.get(key)

    def begin(self, key: str, chunk: ChunkRef, nbytes: int) -> CacheEntry:
        """A cell is about to come in; the caller holds its first pin."""
        entry = self._index[key] = CacheEntry(key, chunk, nbytes)
        return entry

    def assign_slot(self, entry: CacheEntry, use: SlotUse) -> bool:
        """Late binding: a slot for a cell that starts to come in; False if there is none now."""
        if entry.slot is None and self.has_room(use):
            if not self.slots.num_free:
                self._drop_one()
            entry.slot = self.slots.take(use, self.num_idle - self.num_dirty)
        return entry.slot is not None

    def has_room(self, use: SlotUse) -> bool:
        """Whether there is a slot now, free or of a clean cell that nobody holds."""
        return self.slots.has_room(use, self.num_idle - self.num_dirty)

    def release_slot(self, entry: CacheEntry) -> None:
        """Nothing is to be kept of the cell: others may have its slot."""
        if entry.slot is not None:
            self.slots.give_back(entry.slot)
            entry.slot = None

    def arrived(self, entry: CacheEntry, now_ns: int, *, dirty: bool = False) -> None:
        """The bytes are there; the transfer's pin stays until `unpin`."""
        entry.state = CacheEntryState.PRESENT
        entry.op = None
        entry.dirty = dirty
        if entry.indexed and self.capacity:
            chunk = self._chunk(entry.chunk.id)
            chunk.num_cells += 1
            if chunk.num_cells == 1:
                self._put(chunk, entry.chunk.parent_in_host or entry.chunk.parent, now_ns)
            if self._is_whole(chunk):
                self._changes[chunk.chunk_id] = True

    def _chunk(self, chunk_id: str) -> _Chunk:
        chunk = self._chunks.get(chunk_id)
        if chunk is None:
            chunk = self._chunks[chunk_id] = _Chunk(chunk_id)
        return chunk

    def _put(self, chunk: _Chunk, parent_id: str, now_ns: int) -> None:
        """The first cell of a chunk has come."""
        if chunk.parent is None and parent_id:
            chunk.parent = self._chunk(parent_id)
            chunk.parent.num_children += 1
        known = self._evicted.take(chunk.chunk_id)
        policy = self._policy
        score = policy.on_put(now_ns) if known is None else policy.on_hit(known, now_ns)
        self._raise(chunk, score)
        self._raise(chunk.parent, chunk.score)  # of what comes after it, if that was here before

    def hit(self, chunk_id: str, now_ns: int) -> None:
        """A request has asked for a chunk, or saved it, which may be here."""
        chunk = self._chunks.get(chunk_id)
        if chunk is not None and chunk.num_cells:
            self._raise(chunk, self._policy.on_hit(chunk.score, now_ns))

    @staticmethod
    def _raise(chunk: _Chunk | None, score: int) -> None:
        """Give a chunk a score, and those before it at least as much."""
        while chunk is not None and chunk.score < score:
            chunk.score = score
            chunk = chunk.parent

    def _is_whole(self, chunk: _Chunk) -> bool:
        return chunk.num_cells == self._cells_per_chunk.get(layer_group_of(chunk.chunk_id))

    def pin(self, entry: CacheEntry) -> None:
        """Hold the entry for another transfer."""
        if not entry.pins:
            self.num_idle -= 1
            self.num_dirty -= entry.dirty
        entry.pins += 1

    def unpin(self, entry: CacheEntry) -> None:
        """A transfer is done with the entry; the last one decides whether it stays."""
        entry.pins -= 1
        if entry.pins:
            return
        if entry.state is CacheEntryState.PRESENT and entry.indexed and self.capacity:
            self.num_idle += 1
            self.num_dirty += entry.dirty
            self._take_place(entry)
            while self.num_idle > self.capacity and self._drop_one():
                pass
        else:
            self.forget(entry)
            self._release(entry)

    def cleaned(self, entry: CacheEntry) -> None:
        """A lower tier has the cell, or it was given up; the entry is pinned."""
        assert entry.pins, entry.key
        entry.dirty = False

    def abandon(self, entry: CacheEntry) -> None:
        """A transfer into the slot may never end: whoever asks for the key starts afresh."""
        self.forget(entry)
        if entry.slot is not None:
            self.slots.quarantine(entry.slot)

    def part_with_slot(self, entry: CacheEntry) -> None:
        """A transfer that does not end may still write to the slot: it is not the entry's any
        more, and out of use until `slots.give_back`."""
        slot, entry.slot = entry.slot, None
        assert slot is not None, entry.key
        if not self.slots.is_quarantined(slot):  # its load may have given up before
            self.slots.quarantine(slot)

    def clear(self) -> None:
        """Forget every cell; those in transfers are held until they end."""
        for entry in list(self._index.values()):
            self.forget(entry)
            if not entry.pins:
                self.num_idle -= 1
                self.num_dirty -= entry.dirty
                self._release(entry)

    def coldest_dirty(self, count: int) -> list[CacheEntry]:
        """Dirty cells that nobody holds, coldest first; the caller copies all of them down."""
        found: list[CacheEntry] = []
        while len(found) < count and (entry := self._next_in_line(dirty=True)) is not None:
            found.append(entry)
        return found

    def take_change(self) -> HostCacheChange | None:
        """Chunks that have become whole, and that are whole no more, since the last call."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        return HostCacheChange.of(changes)

    def _rank(self, entry: CacheEntry) -> Rank:
        return self._chunks[entry.chunk.id].score, -entry.chunk.position, entry.key

    def _take_place(self, entry: CacheEntry) -> None:
        """Give a cell that nobody holds a place in line, unless it has one already."""
        dirty, place = entry.dirty, entry.place
        if place is not None and place[0] == dirty:
            return
        rank = self._rank(entry)
        entry.place = (dirty, rank)
        line = self._lines[dirty]
        heapq.heappush(line, rank)
        if len(line) > 2 * len(self._index) + STALE_PLACES:
            line[:] = [each for each in line if self._stands(each, dirty)]
            heapq.heapify(line)

    def _stands(self, rank: Rank, dirty: bool) -> bool:
        """Whether the place is not stale."""
        entry = self._index.get(rank[2])
        return entry is not None and entry.place == (dirty, rank)

    def _next_in_line(self, *, dirty: bool) -> CacheEntry | None:
        """The clean or dirty cell of the lowest rank that nobody holds; it is in line no more."""
        line = self._lines[dirty]
        while line:
            rank = heapq.heappop(line)
            if self._stands(rank, dirty):
                entry = self._index[rank[2]]
                entry.place = None
                if entry.pins:
                    continue
                if rank == self._rank(entry):
                    return entry
                self._take_place(entry)  # its chunk has been used since it got that place
        return None

    def _drop_one(self) -> bool:
        """Drop the coldest clean cell that nobody holds, if there is one."""
        entry = self._next_in_line(dirty=False)
        if entry is None:
            return False
        self.num_idle -= 1
        self.num_dropped += 1
        self.unused_prefetches += entry.prefetched
        self.forget(entry)
        self._release(entry)
        return True

    def forget(self, entry: CacheEntry) -> None:
        """Nobody who asks for the key gets this entry any more; it goes with its last pin."""
        if not entry.indexed:
            return
        entry.indexed = False
        del self._index[entry.key]
        if entry.state is CacheEntryState.PRESENT and self.capacity:
            chunk = self._chunks[entry.chunk.id]
            if self._is_whole(chunk):
                self._changes[chunk.chunk_id] = False
            chunk.num_cells -= 1
            if not chunk.num_cells:
                self._evicted.remember(chunk.chunk_id, chunk.score)
                self._leave(chunk)

    def _leave(self, chunk: _Chunk | None) -> None:
        """Forget a chunk without cells that no chunk comes after, and such chunks before it."""
        while chunk is not None and not (chunk.num_cells or chunk.num_children):
            del self._chunks[chunk.chunk_id]
            chunk = chunk.parent
            if chunk is not None:
                chunk.num_children -= 1

    def _release(self, entry: CacheEntry) -> None:
        self.release_slot(entry)
        entry.state = CacheEntryState.GONE

    def num_slots(self) -> tuple[int, int, int]:
        """Slots of cells: clean and dirty ones that nobody holds, and held ones."""
        held = self.slots.num_held - self.num_idle
        return self.num_idle - self.num_dirty, self.num_dirty, held

    def __iter__(self) -> Iterator[CacheEntry]:
        return iter(self._index.values())

    def check(self) -> None:
        """The invariants of the module docstring."""
        self.slots.check()
        slots = [entry.slot for entry in self if entry.slot is not None]
        assert len(set(slots)) == len(slots)
        idle = [entry for entry in self if not entry.pins]
        assert all(e.state is CacheEntryState.PRESENT and e.slot is not None for e in idle)
        assert len(idle) == self.num_idle
        assert sum(e.dirty for e in idle) == self.num_dirty
        assert self.num_idle - self.num_dirty <= self.capacity
        if self.capacity:
            present = [e for e in self if e.state is CacheEntryState.PRESENT]
            cells = Counter(e.chunk.id for e in present)
            children = Counter(c.parent.chunk_id for c in self._chunks.values() if c.parent)
            for chunk_id, chunk in self._chunks.items():
                assert chunk.num_cells == cells[chunk_id]
                assert chunk.num_children == children[chunk_id]
                assert chunk.num_cells or chunk.num_children
                assert chunk.parent is None or chunk.parent.score >= chunk.score
            assert cells.keys() | children.keys() == self._chunks.keys()
            places = [(d, p) for d in (False, True) for p in self._lines[d] if self._stands(p, d)]
            in_line = {rank[2]: (dirty, rank) for dirty, rank in places}
            assert all(in_line[e.key][0] == e.dirty for e in idle)
            assert all(in_line[e.key][1] <= self._rank(e) for e in idle)
