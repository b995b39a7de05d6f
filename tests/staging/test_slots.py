"""Slots: each in one place at a time, some kept for loads."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.invariants import check
from vllm_kvpool.staging.slots import Slot, SlotPool, SlotUse

LOAD, SAVE = SlotUse.LOAD, SlotUse.SAVE


def test_saves_leave_the_reserve_to_loads() -> None:
    pool = SlotPool(3, 2)
    assert pool.take(SAVE) == 0
    assert pool.take(SAVE) is None
    assert [pool.take(LOAD) for _ in range(3)] == [1, 2, None]
    pool.give_back(Slot(1))
    pool.give_back(Slot(2))
    assert pool.take(SAVE) is None
    pool.give_back(Slot(0))
    assert pool.take(SAVE) == 0
    check(pool)


def test_a_quarantined_slot_comes_back_only_when_given_back() -> None:
    pool = SlotPool(1, 0)
    slot = pool.take(LOAD)
    assert slot is not None
    pool.quarantine(slot)
    assert (pool.num_free, pool.num_held, pool.num_quarantined) == (0, 0, 1)
    assert pool.take(LOAD) is None
    pool.give_back(slot)
    assert pool.take(LOAD) == slot


def test_what_is_not_held_cannot_be_returned_or_quarantined() -> None:
    pool = SlotPool(2, 0)
    slot = pool.take(LOAD)
    assert slot is not None
    for bad in (Slot(1 - slot), Slot(7)):
        with pytest.raises(KeyError):
            pool.give_back(bad)
        with pytest.raises(KeyError):
            pool.quarantine(bad)
    pool.quarantine(slot)
    with pytest.raises(KeyError):
        pool.quarantine(slot)
    assert (pool.num_free, pool.num_held, pool.num_quarantined) == (1, 0, 1)
    check(pool)


@pytest.mark.parametrize(("count", "reserve"), [(0, 0), (2, 2), (2, -1)])
def test_a_pool_without_a_slot_for_saves_is_refused(count: int, reserve: int) -> None:
    with pytest.raises(AssertionError):
        SlotPool(count, reserve)


class SlotMachine(RuleBasedStateMachine):
    """Any order of calls against three sets."""

    @initialize(count=st.integers(1, 6), data=st.data())
    def start(self, count: int, data: st.DataObject) -> None:
        self.reserve = data.draw(st.integers(0, count - 1))
        self.pool = SlotPool(count, self.reserve)
        self.free, self.held, self.quarantined = set(range(count)), set(), set()

    @rule(use=st.sampled_from(SlotUse))
    def take(self, use: SlotUse) -> None:
        has_room = self.pool.has_room(use)
        slot = self.pool.take(use)
        assert has_room == (slot is not None)
        allowed = len(self.free) - (self.reserve if use is SAVE else 0)
        assert (slot is not None) == (allowed > 0)
        if slot is not None:
            self.free.remove(slot)
            self.held.add(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.quarantine(slot)
        self.held.remove(slot)
        self.quarantined.add(slot)

    @precondition(lambda self: self.held | self.quarantined)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held | self.quarantined)))
        self.pool.give_back(slot)
        self.held.discard(slot)
        self.quarantined.discard(slot)
        self.free.add(slot)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def give_back_twice(self, data: st.DataObject) -> None:
        with pytest.raises(KeyError):
            self.pool.give_back(data.draw(st.sampled_from(sorted(self.free))))

    @invariant()
    def agrees(self) -> None:
        check(self.pool)
        counts = (self.pool.num_free, self.pool.num_held, self.pool.num_quarantined)
        assert counts == (len(self.free), len(self.held), len(self.quarantined))
        assert sum(counts) == self.pool.count


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(stateful_step_count=30)
