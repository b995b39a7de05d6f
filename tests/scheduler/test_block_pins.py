"""Pins: bounded, released by the last rank, once."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fakes import FakePins
from tests.support.invariants import check
from vllm_kvpool.scheduler.blocks import HELD_SHARE, PinLedger, Place
from vllm_kvpool.transfer.ops import JobId


def ledger(max_blocks: int = 10, num_ranks: int = 2) -> tuple[PinLedger, FakePins]:
    pins = FakePins()
    made = PinLedger(max_blocks, num_ranks, pins)
    return made, pins


def test_the_last_rank_releases_the_blocks() -> None:
    made, pins = ledger()
    made.pin(JobId(1), (5, 6))
    assert (made.room, pins.references) == (8, {5: 1, 6: 1})
    made.release(JobId(1), 1)
    assert (made.room, pins.references) == (8, {5: 1, 6: 1})
    made.release(JobId(1), 1)
    assert (made.room, pins.references) == (10, {})
    with pytest.raises(KeyError):
        made.release(JobId(1), 1)
    check(made)


def test_all_ranks_may_report_at_once() -> None:
    made, pins = ledger(num_ranks=4)
    made.pin(JobId(1), (5,))
    made.release(JobId(1), 4)
    assert pins.references == {}


def test_two_saves_may_share_a_block() -> None:
    made, pins = ledger(num_ranks=1)
    made.pin(JobId(1), (5, 6))
    made.pin(JobId(2), (6, 7))
    made.release(JobId(1), 1)
    assert pins.references == {6: 1, 7: 1}
    check(made)


def test_bugs_trip_asserts() -> None:
    made, _ = ledger(max_blocks=2)
    with pytest.raises(AssertionError):
        made.pin(JobId(1), (5, 6, 7))
    made.pin(JobId(1), (5,))
    with pytest.raises(AssertionError, match="too many ranks"):
        made.release(JobId(1), 3)


def test_what_is_held_is_bounded_and_let_go_once() -> None:
    made, pins = ledger(max_blocks=5)
    assert made.hold("a", Place(0, 0), 5)
    assert made.hold("a", Place(0, 0), 5)  # it is held already
    assert made.hold("b", Place(0, 0), 6)
    assert not made.hold("b", Place(0, 1), 7)
    assert (made.room, pins.references) == (3, {5: 1, 6: 1})
    assert made.held("a") == {Place(0, 0): 5}
    made.release_held("b", [Place(0, 0)])
    with pytest.raises(KeyError):
        made.release_held("a", [Place(0, 1)])
    made.release_all_held("a")
    made.release_all_held("a")
    assert (made.room, pins.references, made.held("a")) == (5, {}, {})


def test_nothing_is_held_that_has_no_room() -> None:
    made, _ = ledger(max_blocks=4)
    made.pin(JobId(1), (5, 6, 7))
    assert made.hold("a", Place(0, 0), 8)
    assert not made.hold("a", Place(0, 1), 9)
    check(made)


PLACES = st.builds(Place, st.integers(0, 1), st.integers(0, 3))
REQUESTS = st.sampled_from("abc")


class PinMachine(RuleBasedStateMachine):
    @initialize(max_blocks=st.integers(0, 8), num_ranks=st.integers(1, 3))
    def begin(self, max_blocks: int, num_ranks: int) -> None:
        self.ledger, self.pins = ledger(max_blocks, num_ranks)
        self.num_ranks, self.max_blocks = num_ranks, max_blocks
        self.open: dict[int, tuple[tuple[int, ...], int]] = {}
        self.jobs = 0
        self.held: dict[tuple[str, Place], int] = {}

    @rule(blocks=st.lists(st.integers(1, 12), max_size=4, unique=True))
    def pin(self, blocks: list[int]) -> None:
        if len(blocks) <= self.ledger.room:
            self.jobs += 1
            self.open[self.jobs] = (tuple(blocks), self.num_ranks)
            self.ledger.pin(JobId(self.jobs), tuple(blocks))

    @rule(request=REQUESTS, place=PLACES, block=st.integers(1, 12))
    def hold(self, request: str, place: Place, block: int) -> None:
        is_new = (request, place) not in self.held
        has_room = self.ledger.room > 0 and len(self.held) < self.max_blocks // HELD_SHARE
        assert self.ledger.hold(request, place, block) == (has_room or not is_new)
        if is_new and has_room:
            self.held[request, place] = block

    @rule(request=REQUESTS, data=st.data())
    def let_go(self, request: str, data: st.DataObject) -> None:
        mine = [place for name, place in self.held if name == request]
        places = [place for place in mine if data.draw(st.booleans())]
        self.ledger.release_held(request, places)
        for place in places:
            del self.held[request, place]

    @rule(request=st.one_of(st.none(), REQUESTS))
    def release_all_held(self, request: str | None) -> None:
        self.ledger.release_all_held(request)
        self.held = {k: v for k, v in self.held.items() if request not in (None, k[0])}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def gathered(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.open)))
        blocks, left = self.open.pop(job)
        ranks = data.draw(st.integers(1, left))
        self.ledger.release(JobId(job), ranks)
        if left > ranks:
            self.open[job] = (blocks, left - ranks)

    @invariant()
    def agrees(self) -> None:
        check(self.ledger)
        self.pins.check()
        held = [block for blocks, _ in self.open.values() for block in blocks]
        held += self.held.values()
        for request in "abc":
            mine = {place: block for (name, place), block in self.held.items() if name == request}
            assert self.ledger.held(request) == mine
        assert sorted(self.pins.references.elements()) == sorted(held)
        assert self.ledger.room == self.max_blocks - len(held)


TestPinMachine = PinMachine.TestCase
TestPinMachine.settings = settings(max_examples=40, stateful_step_count=25)
