"""Extents of the landing window: taken, freed and quarantined in any order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from vllm_kvpool.embeds.machines.window import ExtentAllocator
from vllm_kvpool.embeds.protocol.rows import Extent

Extents = tuple[Extent, ...]


class ArenaMachine(RuleBasedStateMachine):
    """Beside the arena, a byte map: free, taken or in quarantine until some time."""

    lent = Bundle("lent")
    doubtful = Bundle("doubtful")

    @initialize(nbytes=st.integers(1, 200))
    def open(self, nbytes: int) -> None:
        self.arena = ExtentAllocator(nbytes)
        self.map: list[float | None] = [None] * nbytes  # None free, inf taken, else until when
        self.now = 0.0
        self.taken: set[Extents] = set()

    @rule(
        target=lent, granules=st.integers(0, 12), granule=st.integers(1, 30), most=st.integers(1, 6)
    )
    def take(self, granules: int, granule: int, most: int) -> object:
        longest, run = 0, 0
        for state in self.map:
            run = run + 1 if state is None else 0
            longest = max(longest, run)
        extents = self.arena.take(granules * granule, granule, most)
        assert len(extents) <= most
        got = sum(extent.nbytes for extent in extents)
        assert got <= granules * granule
        assert all(extent.nbytes > 0 and extent.nbytes % granule == 0 for extent in extents)
        if longest >= granules * granule:
            assert got == granules * granule, "one extent had all of it"
        if longest >= granule and granules:
            assert got, "there was room for a row"
        for extent in extents:
            assert set(self.map[extent.offset : extent.end]) == {None}, "lent twice"
            self.map[extent.offset : extent.end] = [float("inf")] * extent.nbytes
        if not extents:
            return multiple()
        self.taken.add(extents)
        return extents

    @rule(extents=consumes(lent))
    def free(self, extents: Extents) -> None:
        self.arena.free(extents)
        self.taken.remove(extents)
        for extent in extents:
            self.map[extent.offset : extent.end] = [None] * extent.nbytes

    @rule(target=doubtful, extents=consumes(lent), lasting=st.integers(0, 20))
    def quarantine(self, extents: Extents, lasting: int) -> tuple[Extents, float]:
        self.arena.quarantine(extents, self.now + lasting)
        self.taken.remove(extents)
        for extent in extents:
            self.map[extent.offset : extent.end] = [self.now + lasting] * extent.nbytes
        return extents, self.now + lasting

    @rule(entry=consumes(doubtful))
    def release(self, entry: tuple[Extents, float]) -> None:
        extents, until = entry
        if until < self.now:
            return  # it is over already
        self.arena.release(extents)
        for extent in extents:
            self.map[extent.offset : extent.end] = [None] * extent.nbytes

    @rule(seconds=st.integers(0, 8))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        over = [until for until in self.map if until is not None and until < self.now]
        assert self.arena.tick(self.now) == bool(over)
        for at, until in enumerate(self.map):
            if until is not None and until < self.now:
                self.map[at] = None

    @invariant()
    def every_byte_is_in_one_place(self) -> None:
        self.arena.check(extent for extents in self.taken for extent in extents)
        waiting = [until for until in self.map if until not in (None, float("inf"))]
        assert self.arena.free_bytes == self.map.count(None)
        assert self.arena.quarantined_bytes == len(waiting)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(stateful_step_count=40)


def test_all_of_the_window_comes_back_in_one_piece() -> None:
    arena = ExtentAllocator(100)
    pieces = [arena.take(10, 10, 1) for _ in range(10)]
    for number in (3, 0, 9, 1, 2, 8, 4, 6, 5, 7):
        arena.free(pieces[number])
    assert arena.take(100, 100, 1) == (Extent(0, 100),)


def test_a_quarantine_is_not_over_at_its_last_moment() -> None:
    arena = ExtentAllocator(8)
    arena.quarantine(arena.take(8, 8, 1), 5.0)
    assert not arena.tick(5.0)
    assert arena.take(8, 8, 1) == ()
    assert arena.tick(5.1)
    assert arena.take(8, 8, 1) == (Extent(0, 8),)


@pytest.mark.parametrize("granted", [[Extent(0, 4), Extent(3, 5)], [Extent(0, 3)], [Extent(0, 9)]])
def test_check_sees_what_is_wrong(granted: list[Extent]) -> None:
    arena = ExtentAllocator(8)
    arena.take(4, 4, 1)
    with pytest.raises(AssertionError):
        arena.check(granted)
