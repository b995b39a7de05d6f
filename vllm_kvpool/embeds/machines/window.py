"""The landing window: which bytes are free, granted or in quarantine (pure; control thread).

A grant's memory is reused once nothing can write to it any more; where that is unknown, it is
quarantined until any transfer has been given up. A window that lends nothing else ends a quarantine
earlier: digests of rows show late bytes, and a stall would fail requests. Extents have any size and
offset: an item's rows may lie scattered, and a window may be smaller than an item.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from vllm_kvpool.embeds.machines.states import GrantState, moved
from vllm_kvpool.embeds.protocol.messages import MAX_EXTENTS, Grant
from vllm_kvpool.embeds.protocol.rows import Extent, RowRun

_offset_of = attrgetter("offset")


WINDOWS_IN_FLIGHT = 2  # grants of an item: one is drained while the other is written
MOST_SHARES = 8  # active items that the window is divided among, at most
SMALLEST_SHARE = 16  # a grant of less than 1/n of the window waits for more, unless it is the last
MOST_WINDOW_BYTES = 32 << 20  # longer grants overlap less and put more into quarantine
LEAST_QUARANTINE_S = 5.0  # though nothing else is free


def window_bytes(arena_bytes: int, active: int) -> int:
    """Return the most bytes of one grant while so many items are active."""
    share = arena_bytes // (WINDOWS_IN_FLIGHT * max(1, min(active, MOST_SHARES)))
    return min(share, MOST_WINDOW_BYTES)


def is_worth_it(nbytes: int, wanted: int, arena_bytes: int, window_is_idle: bool) -> bool:
    """Return True if a grant of `nbytes` is large enough now. An idle window grants any size."""
    return nbytes >= wanted or window_is_idle or nbytes * SMALLEST_SHARE >= arena_bytes


class ExtentAllocator:
    """Free extents of `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        assert nbytes > 0
        self.nbytes = nbytes
        self._free = [Extent(0, nbytes)]  # by offset, none touching the next
        self.free_bytes = nbytes

    def take(self, nbytes: int, granule: int, most_extents: int) -> tuple[Extent, ...]:
        """Return whole granules (rows): `nbytes` in all, or as many as are free, maybe none.

        The lowest extent that holds everything, else the lowest ones.
        """
        assert granule > 0
        assert nbytes % granule == 0
        for at, extent in enumerate(self._free):
            if extent.nbytes >= nbytes > 0:
                return (self._cut(at, nbytes),)
        taken: list[Extent] = []
        left = nbytes
        for extent in self._free:
            fit = min(left, extent.nbytes // granule * granule)
            if fit and len(taken) < most_extents:
                taken.append(Extent(extent.offset, fit))
                left -= fit
        for extent in taken:
            self._cut(bisect_left(self._free, extent.offset, key=_offset_of), extent.nbytes)
        return tuple(taken)

    def free(self, extents: Iterable[Extent]) -> None:
        """Free extents that have no writer any more."""
        for extent in extents:
            self._insert(extent)

    def _cut(self, at: int, nbytes: int) -> Extent:
        """Take the beginning of a free extent."""
        old = self._free[at]
        taken = Extent(old.offset, nbytes)
        if nbytes == old.nbytes:
            del self._free[at]
        else:
            self._free[at] = Extent(old.offset + nbytes, old.nbytes - nbytes)
        self.free_bytes -= nbytes
        return taken

    def _insert(self, extent: Extent) -> None:
        self.free_bytes += extent.nbytes
        at = bisect_left(self._free, extent.offset, key=_offset_of)
        low, high = at, at
        first, end = extent.offset, extent.end
        if at and self._free[at - 1].end == first:
            low, first = at - 1, self._free[at - 1].offset
        if at < len(self._free) and self._free[at].offset == end:
            high, end = at + 1, self._free[at].end
        self._free[low:high] = [Extent(first, end - first)]


TransferRef = tuple[str, int]
"""A producer's incarnation and its transfer id; the id is 0 before there is an offer."""


@dataclass(slots=True)
class GrantRecord:
    """A part of the window that a producer may write to."""

    mm_hash: str
    ref: TransferRef
    row: int
    rows: int
    extents: tuple[Extent, ...]
    runs: tuple[RowRun, ...]  # where its rows go
    at: float
    sent_at: float
    gid: int = 0
    state: GrantState = GrantState.GRANTED
    quarantined_until: float = 0.0

    def move(self, state: GrantState) -> None:
        """Set the state; AssertionError if it may not follow the present one."""
        self.state = moved(self.state, state)

    @property
    def nbytes(self) -> int:
        """Bytes of all extents."""
        return sum(extent.nbytes for extent in self.extents)

    @property
    def message(self) -> Grant:
        """The grant as the producer receives it."""
        return Grant(self.ref[1], self.gid, self.row, self.rows, self.extents)


class WindowLedger:
    """The grants of a window and their memory.

    `ended(grant, now)` is called for each grant that ends, after its memory is free.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        quarantine_s: float,
        ended: Callable[[GrantRecord, float], None],
    ) -> None:
        self._allocator = ExtentAllocator(nbytes)
        self._quarantine_s = quarantine_s
        self._on_end = ended
        self._live: dict[int, GrantRecord] = {}  # granted, revoked or draining
        self._quarantined: dict[int, GrantRecord] = {}  # by the end of their quarantine
        self._next_gid = 1

    def __iter__(self) -> Iterator[GrantRecord]:
        return iter(tuple(self._live.values()))

    def __getitem__(self, gid: int) -> GrantRecord:
        return self._live[gid]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole window."""
        return self._allocator.nbytes

    @property
    def may_grant(self) -> bool:
        """False while all of it is lent; then the end of a grant makes room."""
        return self._allocator.free_bytes > 0 or not self._live

    def of(self, ref: TransferRef, gid: int) -> GrantRecord | None:
        """Return the grant `gid`, if it was given to this transfer."""
        granted = self._live.get(gid)
        return granted if granted is not None and granted.ref == ref else None

    def take(self, rows: int, row_bytes: int) -> tuple[Extent, ...]:
        """Return memory for `rows` rows or fewer; empty if that is too little (`is_worth_it`)."""
        wanted = rows * row_bytes
        extents = self._allocator.take(wanted, row_bytes, MAX_EXTENTS)
        if len(extents) == 1 and extents[0].nbytes == wanted:
            return extents
        got = sum(extent.nbytes for extent in extents)
        is_idle = not self._live
        if extents and not is_worth_it(got, wanted, self.nbytes, is_idle):
            self._allocator.free(extents)
            return ()
        return extents

    def add(self, granted: GrantRecord) -> None:
        """Give a number to a grant of memory that `take` returned."""
        granted.gid, self._next_gid = self._next_gid, self._next_gid + 1
        self._live[granted.gid] = granted

    def end(self, granted: GrantRecord, now: float, *, quiesced: bool) -> None:
        """End a grant: its memory is free if nothing writes to it, else quarantined."""
        self._end(granted, GrantState.FREE if quiesced else GrantState.QUARANTINED, now)

    def end_unresolved(self, granted: GrantRecord, now: float) -> None:
        """Quarantine a grant whose end is unknown; its producer may still report it."""
        is_known = granted.ref[1] != 0  # to the producer, as a grant of a transfer
        self._end(granted, GrantState.UNRESOLVED if is_known else GrantState.QUARANTINED, now)

    def _end(self, granted: GrantRecord, state: GrantState, now: float) -> None:
        granted.move(state)
        del self._live[granted.gid]
        if state is GrantState.FREE:
            self._allocator.free(granted.extents)
        else:
            granted.quarantined_until = now + self._quarantine_s
            self._quarantined[granted.gid] = granted
        self._on_end(granted, now)

    def end_all(self, ref: TransferRef, now: float) -> None:
        """End the writes of a transfer. Rows that are being drained stay until they are copied."""
        for granted in self:
            if granted.ref == ref and granted.state is not GrantState.DRAINING:
                self.end(granted, now, quiesced=True)
        for gid in tuple(self._quarantined):
            self.resolve(ref, gid)

    def end_all_of(self, peer: str, now: float, *, quiesced: bool) -> None:
        """End a lost peer's grants, except those being drained."""
        for granted in self:
            if granted.ref[0] == peer and granted.state is not GrantState.DRAINING:
                if quiesced:
                    self.end(granted, now, quiesced=True)
                else:
                    self.end_unresolved(granted, now)

    def unresolved(self) -> list[GrantRecord]:
        """Return the quarantined grants whose producers may still report the end."""
        return [each for each in self._quarantined.values() if each.state is GrantState.UNRESOLVED]

    def _unresolved_of(self, ref: TransferRef, gid: int) -> GrantRecord | None:
        granted = self._quarantined.get(gid)
        if granted is None or granted.ref != ref or granted.state is not GrantState.UNRESOLVED:
            return None
        return granted

    def drop_unresolved(self, ref: TransferRef, gid: int) -> None:
        """Wait for the end of a quarantine, as the producer does not know its write's end."""
        granted = self._unresolved_of(ref, gid)
        if granted is not None:
            granted.move(GrantState.QUARANTINED)

    def resolve(self, ref: TransferRef, gid: int) -> None:
        """End a grant's quarantine, if there is one: its producer reported the end of the write."""
        granted = self._unresolved_of(ref, gid)
        if granted is not None:
            self._end_quarantine(granted)

    def _end_quarantine(self, granted: GrantRecord) -> None:
        granted.move(GrantState.FREE)
        del self._quarantined[granted.gid]
        self._allocator.free(granted.extents)

    def end_early(self, now: float) -> bool:
        """End the oldest quarantine if no grant is out and it is old enough; whether it was."""
        first = next(iter(self._quarantined.values()), None)
        if self._live or first is None:
            return False
        if now < first.quarantined_until - self._quarantine_s + LEAST_QUARANTINE_S:
            return False
        self._end_quarantine(first)
        return True

    def tick(self, now: float) -> None:
        """Free what was quarantined until now."""
        while self._quarantined:
            first = next(iter(self._quarantined.values()))
            if first.quarantined_until >= now:
                return
            self._end_quarantine(first)

    def gauges(self) -> dict[str, float]:
        """Return the levels for the metrics, by name."""
        quarantined = sum(each.nbytes for each in self._quarantined.values())
        return {
            "granted_bytes": self.nbytes - self._allocator.free_bytes - quarantined,
            "quarantined_bytes": quarantined,
        }
