"""The landing window: extents taken and freed, grants that end or may still be written to."""

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
    precondition,
    rule,
)

from tests.embeds.invariants import check_arena, check_window
from vllm_kvpool.embeds.machines.window import (
    LEAST_QUARANTINE_S,
    ExtentAllocator,
    GrantRecord,
    WindowLedger,
)
from vllm_kvpool.embeds.protocol.rows import Extent

Extents = tuple[Extent, ...]


class ArenaMachine(RuleBasedStateMachine):
    """Beside the arena, a byte map: free or taken."""

    lent = Bundle("lent")

    @initialize(nbytes=st.integers(1, 40))
    def open(self, nbytes: int) -> None:
        self.arena = ExtentAllocator(nbytes)
        self.is_free = [True] * nbytes
        self.taken: set[Extents] = set()

    @precondition(lambda self: any(self.is_free))
    @rule(
        target=lent, granules=st.integers(0, 6), granule=st.integers(1, 4), most=st.integers(1, 3)
    )
    def take(self, granules: int, granule: int, most: int) -> object:
        longest, run = 0, 0
        for is_free in self.is_free:
            run = run + 1 if is_free else 0
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
            assert all(self.is_free[extent.offset : extent.end]), "lent twice"
            self.is_free[extent.offset : extent.end] = [False] * extent.nbytes
        if not extents:
            return multiple()
        self.taken.add(extents)
        return extents

    @rule(extents=consumes(lent))
    def free(self, extents: Extents) -> None:
        self.arena.free(extents)
        self.taken.remove(extents)
        for extent in extents:
            self.is_free[extent.offset : extent.end] = [True] * extent.nbytes

    @invariant()
    def every_byte_is_in_one_place(self) -> None:
        check_arena(self.arena, (extent for extents in self.taken for extent in extents))
        assert self.arena.free_bytes == sum(self.is_free)


class LedgerMachine(RuleBasedStateMachine):
    """Beside the window, of each grant that ended how many bytes are kept back, and until when."""

    lent = Bundle("lent")
    doubtful = Bundle("doubtful")

    @initialize(nbytes=st.integers(1, 40))
    def open(self, nbytes: int) -> None:
        self.window = WindowLedger(nbytes, quarantine_s=10.0, ended=lambda *_: None)
        self.now = 0.0
        self.live: dict[int, int] = {}  # grant -> bytes
        self.kept: dict[int, tuple[int, float]] = {}

    @rule(target=lent, rows=st.integers(1, 6), row_bytes=st.integers(1, 9), tid=st.integers(0, 1))
    def grant(self, rows: int, row_bytes: int, tid: int) -> object:
        extents = self.window.take(rows, row_bytes)
        if not extents:
            return multiple()
        granted = GrantRecord("i", ("p", tid), 0, rows, extents, (), self.now, self.now)
        self.window.add(granted)
        self.live[granted.gid] = granted.nbytes
        return granted

    @rule(target=doubtful, granted=consumes(lent), quiesced=st.booleans(), is_known=st.booleans())
    def end(self, granted: GrantRecord, quiesced: bool, is_known: bool) -> object:
        nbytes = self.live.pop(granted.gid)
        if quiesced:
            self.window.end(granted, self.now, quiesced=True)
            return multiple()
        self.kept[granted.gid] = nbytes, self.now + 10.0
        if is_known:
            self.window.end(granted, self.now, quiesced=False)
            return multiple()
        self.window.end_unresolved(granted, self.now)
        return granted

    @rule(granted=doubtful, is_its_own=st.booleans())
    def resolve(self, granted: GrantRecord, is_its_own: bool) -> None:
        """A producer reports the end: the own one, again, too late, or another one."""
        self.window.resolve(granted.ref if is_its_own else ("q", 1), granted.gid)
        if is_its_own and granted.ref[1]:
            self.kept.pop(granted.gid, None)

    @rule(granted=consumes(doubtful))
    def drop_unresolved(self, granted: GrantRecord) -> None:
        """Let a producer not know the end of its write: a later report has no effect."""
        self.window.drop_unresolved(granted.ref, granted.gid)
        self.window.resolve(granted.ref, granted.gid)

    @rule(seconds=st.integers(0, 8))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.window.tick(self.now)
        self.kept = {gid: each for gid, each in self.kept.items() if each[1] >= self.now}

    @rule()
    def end_early(self) -> None:
        """The oldest, of a window that lends nothing."""
        oldest = next(iter(self.kept), None)
        is_due = oldest is not None and self.now >= self.kept[oldest][1] - 10.0 + LEAST_QUARANTINE_S
        assert self.window.end_early(self.now) == (is_due and not self.live)
        if is_due and not self.live:
            del self.kept[oldest]

    @invariant()
    def what_may_be_written_to_is_not_free(self) -> None:
        check_window(self.window)
        gauges = self.window.gauges()
        assert gauges["granted_bytes"] == sum(self.live.values())
        assert gauges["quarantined_bytes"] == sum(nbytes for nbytes, _ in self.kept.values())


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(stateful_step_count=40)
TestArena = ArenaMachine.TestCase
TestArena.settings = settings(stateful_step_count=40)


def test_one_piece_is_better_than_several_and_of_those_the_lowest_are_taken() -> None:
    arena = ExtentAllocator(100)
    pieces = [arena.take(10, 10, 1) for _ in range(10)]
    for number in (1, 3, 4, 6, 8):
        arena.free(pieces[number])
    assert arena.take(20, 5, 4) == (Extent(30, 20),)
    assert arena.take(24, 4, 2) == (Extent(10, 8), Extent(60, 8)), "whole rows"
    assert arena.take(12, 2, 4) == (Extent(18, 2), Extent(68, 2), Extent(80, 8))


def test_all_of_the_window_comes_back_in_one_piece() -> None:
    arena = ExtentAllocator(100)
    pieces = [arena.take(10, 10, 1) for _ in range(10)]
    for number in (3, 0, 9, 1, 2, 8, 4, 6, 5, 7):
        arena.free(pieces[number])
    assert arena.take(100, 100, 1) == (Extent(0, 100),)


@pytest.mark.parametrize("granted", [[Extent(0, 4), Extent(3, 5)], [Extent(0, 3)], [Extent(0, 9)]])
def test_check_sees_what_is_wrong(granted: list[Extent]) -> None:
    arena = ExtentAllocator(8)
    arena.take(4, 4, 1)
    with pytest.raises(AssertionError):
        check_arena(arena, granted)
