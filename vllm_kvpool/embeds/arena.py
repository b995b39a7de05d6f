"""The landing window: which bytes are free, granted or in quarantine (pure).

Extents of any size at any offset: a window may be smaller than an item, an item's rows may lie
scattered. Owned by the control thread.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

from vllm_kvpool.embeds.rows import Extent

_offset_of = attrgetter("offset")


class Arena:
    """See the module docstring. `nbytes` is the window's size."""

    def __init__(self, nbytes: int) -> None:
        assert nbytes > 0
        self.nbytes = nbytes
        self._free = [Extent(0, nbytes)]  # by offset, none touching the next
        self._quarantine: list[tuple[float, Extent]] = []  # by time
        self.free_bytes = nbytes
        self.quarantined_bytes = 0

    def take(self, nbytes: int, granule: int, most_extents: int) -> tuple[Extent, ...]:
        """Whole granules (rows), `nbytes` in all or as many as there are; may be none.

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
            self._remove(extent)
        return tuple(taken)

    def free(self, extents: Iterable[Extent]) -> None:
        """Certainly nobody writes to them any more."""
        for extent in extents:
            self._insert(extent)

    def quarantine(self, extents: Iterable[Extent], until: float) -> None:
        """Somebody may; they come back at `until`, when whoever does has long given up."""
        for extent in extents:
            insort(self._quarantine, (until, extent))
            self.quarantined_bytes += extent.nbytes

    def release(self, extents: Iterable[Extent]) -> None:
        """End the quarantine of these: who might have written to them has said that it is over."""
        for extent in extents:
            at = next(at for at, (_, each) in enumerate(self._quarantine) if each == extent)
            del self._quarantine[at]
            self.quarantined_bytes -= extent.nbytes
            self._insert(extent)

    def tick(self, now: float) -> bool:
        """End quarantines that are over; whether any was."""
        over = bisect_left(self._quarantine, now, key=lambda entry: entry[0])
        for _, extent in self._quarantine[:over]:
            self.quarantined_bytes -= extent.nbytes
            self._insert(extent)
        del self._quarantine[:over]
        return over > 0

    def next_end(self) -> float:
        """When the next quarantine is over."""
        return self._quarantine[0][0] if self._quarantine else float("inf")

    def check(self, granted: Iterable[Extent]) -> None:
        """Every byte is in one place; `granted` is everything taken and not given back."""
        pieces = sorted((*self._free, *granted, *(each for _, each in self._quarantine)))
        at = 0
        for piece in pieces:
            assert piece.offset == at, f"{piece} where {at} is next"
            assert piece.nbytes > 0
            at = piece.end
        assert at == self.nbytes
        assert self.free_bytes == sum(each.nbytes for each in self._free)
        for low, high in zip(self._free, self._free[1:], strict=False):
            assert low.end < high.offset, "free extents are not merged"

    def _remove(self, extent: Extent) -> None:
        """Take the beginning of a free extent."""
        self._cut(bisect_left(self._free, extent.offset, key=_offset_of), extent.nbytes)

    def _cut(self, at: int, nbytes: int) -> Extent:
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
