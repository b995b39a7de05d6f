"""The slabs in host memory, their slots and their lifetimes (pure; the engine thread's).

A `CacheEntry` is one slab, arriving or present, with a slot of the arena for each of its cells. A
transfer of its bytes pins it. Unpinned, it stays while the host tier has room (`capacity` slots; 0
without a host tier); then the chunk with the lowest score leaves first (`storage/eviction.py`). No
chunk scores less than one that comes after it, so a prompt loses its end before its beginning. A
dirty slab is in no store yet and is put into one before it leaves. Slabs of chunks that are pinned
for a time leave after all others; those whose time to live has ended are dropped when any slab is
asked for.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from vllm_kvpool.identity.keys import layer_group_of
from vllm_kvpool.staging.slots import Slot, SlotPool, SlotUse
from vllm_kvpool.storage.base import NO_RETENTION, Retention
from vllm_kvpool.storage.eviction import EvictedScores, EvictionPolicy
from vllm_kvpool.transfer.ops import HostCacheChange, Loan, Slab

if TYPE_CHECKING:
    from vllm_kvpool.transfer.graph import Op

STALE_PLACES = 64  # a heap may hold beside twice the number of slabs
EXPIRE_AGAIN_NS = 10**9  # a slab that is in use when its time to live ends


EvictionRank = tuple[int, int, str]
"""Score and negative position of the chunk, and the slab's id: the lowest leaves first."""


class CacheEntryState(Enum):
    """The state of a slab in host memory."""

    ARRIVING = "arriving"
    PRESENT = "present"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class CacheEntry:
    """A slab in host memory; `op` brings it in while it arrives."""

    slab: Slab  # without pages, whose block tables it would keep alive
    slots: list[Slot] = field(default_factory=list)  # one for each cell, or none
    loan: Loan | None = None  # its slots are another rank's
    pins: int = 1  # the first is that of the transfer that brings it in
    num_followers: int = 0  # while a fetch brings it: the pins of saves that wait for the fetch
    state: CacheEntryState = CacheEntryState.ARRIVING
    op: "Op | None" = None
    dirty: bool = False
    prefetched: bool = False  # by a prefetch, and not used yet
    indexed: bool = True  # `get` finds it
    place: tuple[bool, EvictionRank] | None = None  # in the heap of dirty slabs or not; its rank

    @property
    def num_cells(self) -> int:
        """Number of the slab's cells, each in one slot."""
        return len(self.slab.sizes)

    @property
    def is_awaited(self) -> bool:
        """True if a load or loan waits for the slab, which is being fetched."""
        return self.pins - 1 > self.num_followers


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk that has slabs here, or is the parent of one that has."""

    chunk_id: str
    parent: "_Chunk | None" = None
    num_children: int = 0
    num_slabs: int = 0  # that are present
    score: int = 0  # at least its children's
    pinned_until_ns: int = 0  # of the wall clock; at least its children's


class HostCache:
    """The slabs in host memory; `slabs_per_chunk` of this rank make a chunk of a layer group.

    Unpinned slabs wait in heaps, dirty ones and clean ones of each tenant, by rank. Scores only
    rise, so a place in a heap may be out of date. If the slab's chunk was used since, the slab is
    pushed again. If the slab was pinned or has gone, its place is skipped.

    Invariants (`check`): a slot belongs to at most one entry; an unpinned entry is present, and
    clean ones have at most `capacity` slots; only the newest entry of a slab is indexed, and is
    present or has an op that brings it; `_chunks` holds the chunks of present slabs and their
    parents.
    """

    def __init__(
        self,
        slots: SlotPool,
        capacity: int,
        policy: EvictionPolicy,
        slabs_per_chunk: Mapping[str, int],
        wall_ns: Callable[[], int] = time.time_ns,
        *,
        has_shares: bool = False,
        least_cells: int = 1,
    ) -> None:
        """Begin empty; `has_shares`: what leaves belongs to the tenant that has the most cells.

        A chunk of a layer group has at least `least_cells` cells.
        """
        self.slots = slots
        self.capacity = capacity
        self._policy = policy
        self._slabs_per_chunk = slabs_per_chunk
        self._index: dict[str, CacheEntry] = {}
        self._chunks: dict[str, _Chunk] = {}
        self._evicted = EvictedScores(policy.remembered * (capacity // least_cells))
        self._changes: dict[str, bool] = {}  # chunk id -> whether it is complete now
        self.has_shares = has_shares
        self._clean: dict[str, list[EvictionRank]] = {}  # heaps, by tenant; one, "", without shares
        self._dirty: list[EvictionRank] = []  # a heap
        self.num_cells: Counter[str] = Counter()  # present and indexed, by tenant
        self._wall_ns = wall_ns
        # Heaps by times of the wall clock; entries that have gone are skipped. Of a prompt that is
        # pinned the end leaves first: time, negative position, id.
        self._kept: list[tuple[int, int, str]] = []  # clean, not in their heap until their pin ends
        self._expiring: list[tuple[int, str]] = []
        self._has_pins = False  # a chunk has been pinned for a time
        self.num_idle = 0  # slots of slabs that are present, indexed and unpinned
        self.num_dirty = 0  # of those
        self._ended_loans: list[Loan] = []
        # Since the engine last reset them:
        self.num_dropped = 0  # cells
        self.unused_prefetches = 0  # of those

    def get(self, slab_id: str) -> CacheEntry | None:
        """Return the slab's entry, arriving or present, or None; evict expired slabs first."""
        if self._expiring:
            self._expire()
        return self._index.get(slab_id)

    def add(self, slab: Slab, *, indexed: bool = True) -> CacheEntry:
        """Add an entry for a slab that will arrive, and return it; the caller holds its first pin.

        One that is not indexed is freed with its last pin.
        """
        entry = CacheEntry(slab._replace(pages=()) if slab.pages else slab, indexed=indexed)
        if indexed:
            self._index[slab.id] = entry
        return entry

    def assign_slots(self, entry: CacheEntry, use: SlotUse) -> bool:
        """Give the entry its slots if it has none; False if there are not enough now."""
        num_cells = entry.num_cells
        if not entry.slots and self.has_room(use, num_cells):
            while self.slots.num_free < num_cells and self._drop_one():
                pass
            entry.slots = self.slots.take(num_cells)
        return bool(entry.slots)

    def has_room(self, use: SlotUse, num_slots: int = 1) -> bool:
        """Return True if there are slots now: free ones, or those of unpinned clean slabs."""
        return self.slots.has_room(use, num_slots, self.num_idle - self.num_dirty)

    @property
    def room(self) -> int:
        """Slots that are free, or of unpinned clean slabs."""
        return self.slots.num_free + self.num_idle - self.num_dirty

    def release_slots(self, entry: CacheEntry) -> None:
        """Free the slots; the slab's bytes are lost."""
        if entry.loan is None:
            self.slots.give_back(entry.slots)
        else:
            self.end_loan(entry.loan)
        entry.slots, entry.loan = [], None

    def arrived(self, entry: CacheEntry, now_ns: int, *, dirty: bool = False) -> None:
        """Note that the slab's bytes are in its slots; the transfer still holds its pin."""
        entry.state = CacheEntryState.PRESENT
        entry.op = None
        entry.dirty = dirty
        if entry.indexed and self.capacity:
            ref = entry.slab.chunk
            self.num_cells[self._tenant_of(entry)] += entry.num_cells
            chunk = self._chunk(ref.id)
            chunk.num_slabs += 1
            if chunk.num_slabs == 1:
                self._put(chunk, ref.parent_in_host or ref.parent, now_ns)
            if self._is_complete(chunk):
                self._changes[chunk.chunk_id] = True
            if ref.retention != NO_RETENTION:
                self.pin_until(entry, ref.retention.pinned_until_ns)
                if expires_ns := ref.retention.expires_ns:
                    heapq.heappush(self._expiring, (expires_ns, entry.slab.id))

    def pin_until(self, entry: CacheEntry, until_ns: int) -> None:
        """Pin the chunk of a slab until a time of the wall clock.

        Its time to live stays that of the first writer.
        """
        chunk = entry.slab.chunk
        retention = Retention(until_ns, chunk.retention.expires_ns)
        entry.slab = entry.slab._replace(chunk=chunk._replace(retention=retention))
        self._has_pins |= until_ns > 0
        self._pin_chunk_until(self._chunks.get(chunk.id), until_ns)

    @staticmethod
    def _pin_chunk_until(chunk: _Chunk | None, until_ns: int) -> None:
        """Pin a chunk, and those before it, at least until a time."""
        while chunk is not None and chunk.pinned_until_ns < until_ns:
            chunk.pinned_until_ns = until_ns
            chunk = chunk.parent

    def _expire(self) -> None:
        """Drop the slabs whose time to live has ended, but those in use or pinned for a time."""
        now_ns = self._wall_ns()
        while self._expiring and self._expiring[0][0] <= now_ns:
            _, slab_id = heapq.heappop(self._expiring)
            entry = self._index.get(slab_id)
            if entry is None or not 0 < entry.slab.chunk.retention.expires_ns <= now_ns:
                continue
            again_ns = now_ns + EXPIRE_AGAIN_NS if entry.pins else 0
            if (chunk := self._chunks.get(entry.slab.chunk.id)) is not None:
                again_ns = max(again_ns, chunk.pinned_until_ns)
            if again_ns > now_ns:
                heapq.heappush(self._expiring, (again_ns, slab_id))
            else:
                self._drop(entry)

    def _chunk(self, chunk_id: str) -> _Chunk:
        chunk = self._chunks.get(chunk_id)
        if chunk is None:
            chunk = self._chunks[chunk_id] = _Chunk(chunk_id)
        return chunk

    def _put(self, chunk: _Chunk, parent_id: str, now_ns: int) -> None:
        """Score a chunk whose first slab has arrived."""
        if chunk.parent is None and parent_id:
            chunk.parent = self._chunk(parent_id)
            chunk.parent.num_children += 1
            self._pin_chunk_until(chunk.parent, chunk.pinned_until_ns)
        known = self._evicted.take(chunk.chunk_id)
        policy = self._policy
        score = policy.on_put(now_ns) if known is None else policy.on_hit(known, now_ns)
        self._raise(chunk, score)
        self._raise(chunk.parent, chunk.score)  # it may have a child's score already

    def hit(self, chunk_id: str, now_ns: int) -> None:
        """Count a use of a chunk, which may be here, by a load or save."""
        chunk = self._chunks.get(chunk_id)
        if chunk is not None and chunk.num_slabs:
            self._raise(chunk, self._policy.on_hit(chunk.score, now_ns))

    @staticmethod
    def _raise(chunk: _Chunk | None, score: int) -> None:
        """Raise the score of a chunk, and of those before it, to at least `score`."""
        while chunk is not None and chunk.score < score:
            chunk.score = score
            chunk = chunk.parent

    def _is_complete(self, chunk: _Chunk) -> bool:
        return chunk.num_slabs == self._slabs_per_chunk.get(layer_group_of(chunk.chunk_id))

    def failed(self, entry: CacheEntry) -> None:
        """Remove an entry from the index after its transfer has failed; its pins stay."""
        entry.op = None
        self.unindex(entry)

    def pin(self, entry: CacheEntry) -> None:
        """Pin the entry for another transfer."""
        if not entry.pins:
            self._count_idle(entry, -entry.num_cells)
        entry.pins += 1

    def unpin(self, entry: CacheEntry) -> None:
        """Drop a transfer's pin of the entry, which is freed or evictable after the last."""
        entry.pins -= 1
        if entry.pins:
            return
        if entry.state is CacheEntryState.PRESENT and entry.indexed and self.capacity:
            self._count_idle(entry, entry.num_cells)
            self._push(entry)
            while self.num_idle > self.capacity and self._drop_one():
                pass
        else:
            self.unindex(entry)
            self._free(entry)

    def _count_idle(self, entry: CacheEntry, num_slots: int) -> None:
        self.num_idle += num_slots
        if entry.dirty:
            self.num_dirty += num_slots

    def cleaned(self, entry: CacheEntry) -> None:
        """Mark a pinned entry as clean: a tier has the slab now, or it was given up."""
        assert entry.pins, entry.slab.id
        entry.dirty = False

    def quarantine_slots(self, entry: CacheEntry) -> list[Slot]:
        """Quarantine slots to which a hung call may still write, until `slots.give_back`."""
        slots, entry.slots = entry.slots, []
        assert slots, entry.slab.id
        self.slots.quarantine(slots)
        return slots

    def clear(self) -> None:
        """Forget every slab; pinned ones are freed with their last pin."""
        for entry in list(self._index.values()):
            if entry.pins:
                self.unindex(entry)
            else:
                self._drop(entry)

    def coldest_dirty(self, num_cells: int) -> list[CacheEntry]:
        """Return unpinned dirty slabs of at least `num_cells` cells, the lowest rank first.

        The caller must put or drop all of them.
        """
        found: list[CacheEntry] = []
        while num_cells > 0 and (entry := self._pop(self._dirty, dirty=True)) is not None:
            found.append(entry)
            num_cells -= entry.num_cells
        return found

    def take_change(self) -> HostCacheChange | None:
        """Return the chunks that have become complete or incomplete since the last call."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        return HostCacheChange.of(changes)

    def _eviction_rank(self, entry: CacheEntry) -> EvictionRank:
        slab_id, _, chunk, *_ = entry.slab
        return self._chunks[chunk.id].score, -chunk.position, slab_id

    def _push(self, entry: CacheEntry) -> None:
        """Push an unpinned slab onto its heap, unless it is there."""
        dirty, place = entry.dirty, entry.place
        if place is not None and place[0] == dirty:
            return
        rank = self._eviction_rank(entry)
        entry.place = (dirty, rank)
        heap = self._dirty if dirty else self._clean.setdefault(self._tenant_of(entry), [])
        heapq.heappush(heap, rank)
        if len(heap) > 2 * len(self._index) + STALE_PLACES:
            heap[:] = [each for each in heap if self._is_current(each, dirty)]
            heapq.heapify(heap)

    def _is_current(self, rank: EvictionRank, dirty: bool) -> bool:
        """Return True if a place in a heap is still a slab's."""
        entry = self._index.get(rank[2])
        return entry is not None and entry.place == (dirty, rank)

    def _tenant_of(self, entry: CacheEntry) -> str:
        return entry.slab.chunk.tenant if self.has_shares else ""

    def _pop_clean(self) -> CacheEntry | None:
        """Pop the unpinned clean slab of the lowest rank.

        It is the slab of the tenant with the most cells among those with such slabs.
        """
        while self._clean:
            tenant = max(self._clean, key=self.num_cells.__getitem__)
            if (entry := self._pop(self._clean[tenant], dirty=False)) is not None:
                return entry
            del self._clean[tenant]
        return None

    def _pop(self, heap: list[EvictionRank], *, dirty: bool) -> CacheEntry | None:
        """Pop the unpinned clean or dirty slab of the lowest rank."""
        while heap:
            rank = heapq.heappop(heap)
            if self._is_current(rank, dirty):
                entry = self._index[rank[2]]
                entry.place = None
                if entry.pins:
                    continue
                if rank == self._eviction_rank(entry):
                    return entry
                self._push(entry)  # its chunk has been used since
        return None

    def _drop_one(self) -> bool:
        """Drop the unpinned clean slab of the lowest rank; False if there is none."""
        now_ns = self._wall_ns() if self._has_pins else 0
        while self._kept and self._kept[0][0] <= now_ns:
            if (kept := self._pop_kept()) is not None:
                self._push(kept)
        while (entry := self._pop_clean()) is not None:
            slab = entry.slab
            until_ns = self._chunks[slab.chunk.id].pinned_until_ns
            if until_ns <= now_ns:
                break
            heapq.heappush(self._kept, (until_ns, -slab.chunk.position, slab.id))
        while entry is None and self._kept:
            entry = self._pop_kept()
        if entry is None:
            return False
        self.num_dropped += entry.num_cells
        self.unused_prefetches += entry.num_cells * entry.prefetched
        self._drop(entry)
        return True

    def _pop_kept(self) -> CacheEntry | None:
        """Pop the pinned slab whose pin ends first; None if it has gone or is in its heap."""
        *_, slab_id = heapq.heappop(self._kept)
        entry = self._index.get(slab_id)
        is_idle = entry is not None and not entry.pins and not entry.dirty
        return entry if is_idle and entry is not None and entry.place is None else None

    def _drop(self, entry: CacheEntry) -> None:
        self._count_idle(entry, -entry.num_cells)
        self.unindex(entry)
        self._free(entry)

    def unindex(self, entry: CacheEntry) -> None:
        """Hide an entry from `get`; it is freed with its last pin."""
        if not entry.indexed:
            return
        entry.indexed = False
        del self._index[entry.slab.id]
        if entry.state is CacheEntryState.PRESENT and self.capacity:
            chunk = self._chunks[entry.slab.chunk.id]
            tenant = self._tenant_of(entry)
            self.num_cells[tenant] -= entry.num_cells
            if not self.num_cells[tenant]:
                del self.num_cells[tenant]
            if self._is_complete(chunk):
                self._changes[chunk.chunk_id] = False
            chunk.num_slabs -= 1
            if not chunk.num_slabs:
                self._evicted.remember(chunk.chunk_id, chunk.score)
                self._forget_chunk(chunk)

    def _forget_chunk(self, chunk: _Chunk | None) -> None:
        """Forget a chunk without slabs and children, and then such parents."""
        while chunk is not None and not (chunk.num_slabs or chunk.num_children):
            del self._chunks[chunk.chunk_id]
            chunk = chunk.parent
            if chunk is not None:
                chunk.num_children -= 1

    def _free(self, entry: CacheEntry) -> None:
        self.release_slots(entry)
        entry.state = CacheEntryState.GONE

    def end_loan(self, loan: Loan) -> None:
        """Note that this rank reads the slots of a loan no more."""
        self._ended_loans.append(loan)

    def take_ended_loans(self) -> list[Loan]:
        """Remove and return the loans whose slots this rank reads no more."""
        loans, self._ended_loans = self._ended_loans, []
        return loans

    def num_slots(self) -> tuple[int, int, int]:
        """Return the numbers of slots of clean unpinned slabs, of dirty ones and of pinned ones."""
        held = self.slots.num_held - self.num_idle
        return self.num_idle - self.num_dirty, self.num_dirty, held

    def __iter__(self) -> Iterator[CacheEntry]:
        return iter(self._index.values())
