"""Which cells are in host memory, where, and how long they stay (pure; owned by the engine thread).

An `Entry` is one cell in one slot of the arena, on its way in or present. Whoever moves its bytes
holds a pin; without pins it stays as long as the host tier has room for it (`keep` slots; none
without a host tier), and then leaves in the policy's order. A dirty cell is in no lower tier yet:
it is copied there before it leaves.

Cells that nobody holds stand in two lines, the clean ones and the dirty ones, each a heap by rank.
A cell that is used again keeps its place, and takes one further back when its turn comes. A place
that its cell has left (held then, gone, or of a lower rank now) is stale, and skipped in its turn.

Invariants (`check`): a slot belongs to at most one entry; an entry that is not pinned is present,
and there are at most `keep` of those but for dirty ones on their way out; `index` holds each key
once, and an entry that was forgotten (a reset, a stuck transfer) is held by its transfers alone.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING

from vllm_kvpool.keys import kind_of_group
from vllm_kvpool.staging.slots import Slot, SlotPool, SlotUse
from vllm_kvpool.store.base import ChunkRef
from vllm_kvpool.transfer.ops import HostChange
from vllm_kvpool.transfer.policy import Policy, Rank

if TYPE_CHECKING:
    from vllm_kvpool.transfer.graph import Op

STALE_PLACES = 64  # in a line, beyond as many as there are cells


class EntryState(Enum):
    ARRIVING = "arriving"
    PRESENT = "present"
    GONE = "gone"


class Entry:
    """One cell in host memory. `op` brings it in, while it arrives."""

    __slots__ = (
        "chunk",
        "dirty",
        "key",
        "nbytes",
        "op",
        "pins",
        "place",
        "prefetched",
        "slot",
        "state",
        "wanted",
    )

    def __init__(self, key: str, chunk: ChunkRef, nbytes: int) -> None:
        self.key = key
        self.chunk = chunk
        self.nbytes = nbytes
        self.slot: Slot | None = None
        self.pins = 1  # of the transfer that brings it in
        self.state = EntryState.ARRIVING
        self.op: Op | None = None
        self.dirty = False
        self.prefetched = False  # brought in for nobody, and not used yet
        self.wanted = True  # in the index: whoever asks for the key gets this entry
        self.place: tuple[bool, Rank] | None = None  # in line: dirty or not, and where


_Place = tuple[Rank, str]


class Residency:
    """See the module docstring.

    `cells_per_chunk`: how many of this rank's cells make a chunk, for each kind of layers.
    """

    def __init__(
        self, slots: SlotPool, keep: int, policy: Policy, cells_per_chunk: Mapping[str, int]
    ) -> None:
        self.slots = slots
        self.keep = keep
        self._policy = policy
        self._cells_per_chunk = cells_per_chunk
        self._index: dict[str, Entry] = {}
        self._present_of: Counter[str] = Counter()  # chunk -> present cells
        self._changes: dict[str, bool] = {}  # chunk -> whether all of it is here now
        self._lines: tuple[list[_Place], list[_Place]] = ([], [])  # clean, dirty
        self.num_idle = 0  # present, in the index, without a pin
        self.num_dirty = 0  # of those
        self.unused_prefetches = 0  # dropped without having been used; the owner resets it
        self.num_dropped = 0  # the same

    def get(self, key: str) -> Entry | None:
        return self._index.get(key)

    def begin(self, key: str, chunk: ChunkRef, nbytes: int) -> Entry:
        """A cell is about to come in; the caller holds its first pin."""
        entry = self._index[key] = Entry(key, chunk, nbytes)
        return entry

    def give_slot(self, entry: Entry, use: SlotUse) -> bool:
        """Late binding: a slot for a cell that starts to come in; False if there is none now."""
        if entry.slot is None and self.has_room(use):
            if not self.slots.num_free:
                self._drop_one()
            entry.slot = self.slots.take(use, self.num_idle - self.num_dirty)
        return entry.slot is not None

    def has_room(self, use: SlotUse) -> bool:
        """Whether there is a slot now, free or of a clean cell that nobody holds."""
        return self.slots.has_room(use, self.num_idle - self.num_dirty)

    def take_slot(self, entry: Entry) -> None:
        """Nothing is to be kept of the cell: others may have its slot."""
        if entry.slot is not None:
            self.slots.give_back(entry.slot)
            entry.slot = None

    def arrived(self, entry: Entry, *, dirty: bool = False) -> None:
        """The bytes are there; the transfer's pin stays until `unpin`."""
        entry.state = EntryState.PRESENT
        entry.op = None
        entry.dirty = dirty
        if entry.wanted and self.keep:
            self._line_up(self._policy.add(entry.key))
            self._present_of[entry.chunk.id] += 1
            if self._is_whole(entry.chunk.id):
                self._changes[entry.chunk.id] = True

    def _is_whole(self, chunk_id: str) -> bool:
        return self._present_of[chunk_id] == self._cells_per_chunk.get(kind_of_group(chunk_id))

    def pin(self, entry: Entry) -> None:
        """Hold the entry for another transfer."""
        if not entry.pins:
            self.num_idle -= 1
            self.num_dirty -= entry.dirty
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """A transfer is done with the entry; the last one decides whether it stays."""
        entry.pins -= 1
        if entry.pins:
            return
        if entry.state is EntryState.PRESENT and entry.wanted and self.keep:
            self.num_idle += 1
            self.num_dirty += entry.dirty
            self._take_place(entry)
            while self.num_idle > self.keep and self._drop_one():
                pass
        else:
            self.forget(entry)
            self._release(entry)

    def cleaned(self, entry: Entry) -> None:
        """A lower tier has the cell, or it was given up; the entry is pinned."""
        assert entry.pins, entry.key
        entry.dirty = False

    def used(self, entry: Entry) -> None:
        """A request has read the cell."""
        if self.keep and entry.wanted and entry.state is EntryState.PRESENT:
            self._line_up(self._policy.use(entry.key))

    def refresh(self, entry: Entry) -> None:
        """A request has written the cell, or read it as soon as it had come."""
        if self.keep and entry.wanted and entry.state is EntryState.PRESENT:
            self._line_up(self._policy.refresh(entry.key))

    def abandon(self, entry: Entry) -> None:
        """A transfer into the slot may never end: whoever asks for the key starts afresh."""
        self.forget(entry)
        if entry.slot is not None:
            self.slots.quarantine(entry.slot)

    def part_with_slot(self, entry: Entry) -> Slot:
        """A transfer that does not end may still write to the slot: it is not the entry's any
        more, and nobody's until `slots.give_back`."""
        slot, entry.slot = entry.slot, None
        assert slot is not None, entry.key
        if not self.slots.is_quarantined(slot):  # if its load has given up before
            self.slots.quarantine(slot)
        return slot

    def clear(self) -> None:
        """Forget every cell; those in transfers are held until they end."""
        for entry in list(self._index.values()):
            self.forget(entry)
            if not entry.pins:
                self.num_idle -= 1
                self.num_dirty -= entry.dirty
                self._release(entry)

    def coldest_dirty(self, count: int) -> list[Entry]:
        """Dirty cells that nobody holds, coldest first; the caller copies all of them down."""
        found: list[Entry] = []
        while len(found) < count and (entry := self._next_in_line(dirty=True)) is not None:
            found.append(entry)
        return found

    def take_change(self) -> HostChange | None:
        """Chunks that have become whole, and that are whole no more, since the last call."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        added = tuple(group for group, whole in changes.items() if whole)
        removed = tuple(group for group, whole in changes.items() if not whole)
        return HostChange(added, removed)

    def _line_up(self, keys: Iterable[str]) -> None:
        """Cells have other ranks now."""
        for key in keys:
            entry = self._index[key]
            if not entry.pins:
                self._take_place(entry)

    def _take_place(self, entry: Entry) -> None:
        """Give a cell that nobody holds a place in line, unless it has one that is early enough."""
        dirty, rank = entry.dirty, self._policy.rank(entry.key)
        place = entry.place
        if place is not None and place[0] == dirty and place[1] <= rank:
            return
        entry.place = (dirty, rank)
        line = self._lines[dirty]
        heapq.heappush(line, (rank, entry.key))
        if len(line) > 2 * len(self._index) + STALE_PLACES:
            line[:] = [each for each in line if self._stands(each, dirty)]
            heapq.heapify(line)

    def _stands(self, place: _Place, dirty: bool) -> bool:
        """Whether the place is not stale."""
        rank, key = place
        entry = self._index.get(key)
        return entry is not None and entry.place == (dirty, rank)

    def _next_in_line(self, *, dirty: bool) -> Entry | None:
        """The coldest clean or dirty cell that nobody holds; it is in line no more."""
        line = self._lines[dirty]
        while line:
            place = heapq.heappop(line)
            if self._stands(place, dirty):
                entry = self._index[place[1]]
                entry.place = None
                if entry.pins:
                    continue
                if place[0] == self._policy.rank(entry.key):
                    return entry
                self._take_place(entry)  # used since it got that place
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

    def forget(self, entry: Entry) -> None:
        """Nobody who asks for the key gets this entry any more; it goes with its last pin."""
        if not entry.wanted:
            return
        entry.wanted = False
        del self._index[entry.key]
        if entry.state is EntryState.PRESENT and self.keep:
            self._policy.discard(entry.key)
            chunk_id = entry.chunk.id
            if self._is_whole(chunk_id):
                self._changes[chunk_id] = False
            self._present_of[chunk_id] -= 1
            if not self._present_of[chunk_id]:
                del self._present_of[chunk_id]

    def _release(self, entry: Entry) -> None:
        self.take_slot(entry)
        entry.state = EntryState.GONE

    def num_slots(self) -> tuple[int, int, int]:
        """Slots of cells: clean and dirty ones that nobody holds, and held ones."""
        held = self.slots.num_held - self.num_idle
        return self.num_idle - self.num_dirty, self.num_dirty, held

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._index.values())

    def check(self) -> None:
        """The invariants of the module docstring."""
        self.slots.check()
        slots = [entry.slot for entry in self if entry.slot is not None]
        assert len(set(slots)) == len(slots)
        idle = [entry for entry in self if not entry.pins]
        assert all(e.state is EntryState.PRESENT and e.slot is not None for e in idle)
        assert len(idle) == self.num_idle
        assert sum(e.dirty for e in idle) == self.num_dirty
        assert self.num_idle - self.num_dirty <= self.keep
        if self.keep:
            present = [e for e in self if e.state is EntryState.PRESENT]
            assert Counter(e.chunk.id for e in present) == self._present_of
            ranks = {e.key: self._policy.rank(e.key) for e in present}
            assert len(set(ranks.values())) == len(ranks)
            places = [(d, *p) for d in (False, True) for p in self._lines[d] if self._stands(p, d)]
            assert len(set(places)) == len(places)
            in_line = {key: (dirty, rank) for dirty, rank, key in places}
            assert all(in_line[e.key][0] == e.dirty for e in idle)
            assert all(in_line[e.key][1] <= ranks[e.key] for e in idle)
