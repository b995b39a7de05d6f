"""Slots: each is in one state at a time, and some are reserved for loads."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.invariants import check
from vllm_kvpool.staging.slots import Slot, SlotPool, SlotUse

LOAD, SAVE = SlotUse.LOAD, SlotUse.SAVE


@pytest.mark.parametrize("num_slots", [0, 3])
def test_slots_that_are_not_free_or_none_cannot_be_taken(num_slots: int) -> None:
    pool = SlotPool(4, 1)
    pool.take(2)
    with pytest.raises(AssertionError):
        pool.take(num_slots)
    check(pool)
    assert (pool.num_free, pool.num_held) == (2, 2)


def test_what_is_not_held_cannot_be_returned_or_quarantined() -> None:
    """A slot that is returned twice would get two users."""
    pool = SlotPool(3, 0)
    [slot, other] = pool.take(2)
    [free] = {Slot(0), Slot(1), Slot(2)} - {slot, other}
    for bad in ([free], [Slot(7)], [slot, free]):
        with pytest.raises(KeyError):
            pool.give_back(bad)
        with pytest.raises(KeyError):
            pool.quarantine(bad)
    assert (pool.num_free, pool.num_held, pool.num_quarantined) == (1, 2, 0)
    pool.quarantine([slot])
    for bad in ([slot], [slot, other]):
        with pytest.raises(KeyError):
            pool.quarantine(bad)
    for bad in ([slot, other], [slot, free]):
        with pytest.raises(KeyError):
            pool.give_back(bad)
    assert (pool.num_free, pool.num_held, pool.num_quarantined) == (1, 1, 1)
    check(pool)


@pytest.mark.parametrize(("count", "reserve"), [(0, 0), (2, 2), (2, -1)])
def test_a_pool_without_a_slot_for_saves_is_refused(count: int, reserve: int) -> None:
    with pytest.raises(AssertionError):
        SlotPool(count, reserve)


def some_of(slots: set[Slot]) -> st.SearchStrategy[list[Slot]]:
    return st.lists(st.sampled_from(sorted(slots)), min_size=1, unique=True)


class SlotMachine(RuleBasedStateMachine):
    """Calls in any order, compared with a model of three sets."""

    @initialize(count=st.integers(1, 6), data=st.data())
    def start(self, count: int, data: st.DataObject) -> None:
        self.reserve = data.draw(st.integers(0, count - 1))
        self.pool = SlotPool(count, self.reserve)
        self.free, self.held, self.quarantined = set(range(count)), set(), set()

    @rule(use=st.sampled_from(SlotUse), num_slots=st.integers(1, 4), more=st.integers(0, 2))
    def has_room(self, use: SlotUse, num_slots: int, more: int) -> None:
        allowed = len(self.free) + more - (self.reserve if use is SAVE else 0)
        assert self.pool.has_room(use, num_slots, more) == (allowed >= num_slots)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        slots = self.pool.take(data.draw(st.integers(1, len(self.free))))
        assert len(set(slots)) == len(slots)
        assert self.free.issuperset(slots)
        self.free.difference_update(slots)
        self.held.update(slots)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        slots = data.draw(some_of(self.held))
        self.pool.quarantine(slots)
        self.held.difference_update(slots)
        self.quarantined.update(slots)

    @precondition(lambda self: self.held or self.quarantined)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from([each for each in (self.held, self.quarantined) if each]))
        slots = data.draw(some_of(place))
        self.pool.give_back(slots)
        place.difference_update(slots)
        self.free.update(slots)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def end_what_is_free(self, data: st.DataObject) -> None:
        free = data.draw(some_of(self.free))
        others = data.draw(st.sampled_from([(), tuple(self.held), tuple(self.quarantined)]))
        for ends in (self.pool.give_back, self.pool.quarantine):
            with pytest.raises(KeyError):
                ends([*others, *free])

    @invariant()
    def agrees(self) -> None:
        check(self.pool)
        counts = (self.pool.num_free, self.pool.num_held, self.pool.num_quarantined)
        assert counts == (len(self.free), len(self.held), len(self.quarantined))
        assert sum(counts) == self.pool.count


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(stateful_step_count=30)
