"""What host memory holds: pins, slots, the two lines of cells that may leave, and whole chunks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_kvpool.staging.slots import SlotPool, SlotUse
from vllm_kvpool.store.base import ChunkRef
from vllm_kvpool.transfer.ops import HostChange
from vllm_kvpool.transfer.policy import Frequency, Lru
from vllm_kvpool.transfer.residency import STALE_PLACES, Entry, EntryState, Residency

LOAD, SAVE = SlotUse.LOAD, SlotUse.SAVE


def host(
    keep: int = 2,
    slots: int = 4,
    reserve: int = 0,
    cells_per_chunk: int = 1,
    policy: type[Lru | Frequency] = Lru,
) -> Residency:
    return Residency(SlotPool(slots, reserve), keep, policy(keep), {"": cells_per_chunk})


def bring(residency: Residency, keys: str, *, dirty: bool = False, hold: bool = False) -> None:
    """Cells come in one after the other, their group is the first letter."""
    for key in keys.split():
        entry = residency.begin(key, ChunkRef(key[0]), 100)
        assert residency.give_slot(entry, LOAD)
        residency.arrived(entry, dirty=dirty)
        if not hold:
            residency.unpin(entry)
        residency.check()


def keys(residency: Residency) -> str:
    return " ".join(sorted(entry.key for entry in residency))


def entry(residency: Residency, key: str) -> Entry:
    found = residency.get(key)
    assert found is not None
    return found


def test_a_cell_stays_until_there_are_too_many() -> None:
    residency = host()
    bring(residency, "a b")
    assert keys(residency) == "a b"
    bring(residency, "c")
    assert keys(residency) == "b c"
    assert residency.num_dropped == 1
    assert residency.slots.num_free == 2


def test_without_a_host_tier_a_cell_stays_while_it_is_held() -> None:
    residency = host(keep=0)
    bring(residency, "a", hold=True)
    held = entry(residency, "a")
    assert held.state is EntryState.PRESENT
    residency.unpin(held)
    assert keys(residency) == ""
    assert held.state is EntryState.GONE
    assert residency.slots.num_free == 4
    assert residency.take_change() is None


def test_a_cell_that_was_read_leaves_later() -> None:
    residency = host()
    bring(residency, "a b")
    residency.used(entry(residency, "a"))
    bring(residency, "c")
    assert keys(residency) == "a c"


def test_a_cell_that_was_read_counts_for_more_than_one_that_was_written_again() -> None:
    residency = host(keep=3, slots=8, policy=Frequency)
    bring(residency, "a b c")
    residency.used(entry(residency, "a"))
    residency.refresh(entry(residency, "b"))
    bring(residency, "d e f")
    assert keys(residency) == "a e f"


def test_a_cell_whose_turn_another_one_changed_has_its_new_place() -> None:
    residency = host(keep=4, slots=8, policy=Frequency)
    bring(residency, "a b c d")
    for key in "abcd":  # all but one of them are protected: a is not any more
        residency.used(entry(residency, key))
    bring(residency, "e")
    assert keys(residency) == "b c d e"


def test_a_cell_that_others_put_back_on_probation_leaves_earlier() -> None:
    residency = host(keep=4, slots=8, policy=Frequency)
    bring(residency, "a b c d e")
    bring(residency, "a")  # remembered: protected, until three others are
    for key in "cde":
        residency.used(entry(residency, key))
    bring(residency, "f")
    assert keys(residency) == "c d e f"


def test_a_cell_that_was_held_keeps_its_place() -> None:
    residency = host()
    bring(residency, "a b")
    residency.pin(entry(residency, "a"))
    residency.unpin(entry(residency, "a"))
    bring(residency, "c")
    assert keys(residency) == "b c"


def test_a_cell_that_was_read_while_it_was_held_has_its_new_place() -> None:
    residency = host()
    bring(residency, "a b")
    residency.pin(entry(residency, "a"))
    residency.used(entry(residency, "a"))
    residency.unpin(entry(residency, "a"))
    bring(residency, "c")
    assert keys(residency) == "a c"


def test_a_use_of_a_cell_that_was_forgotten_says_nothing_of_its_successor() -> None:
    residency = host()
    bring(residency, "a", hold=True)
    old = entry(residency, "a")
    residency.forget(old)
    bring(residency, "a b")
    residency.used(old)
    bring(residency, "c")
    assert keys(residency) == "b c"


def test_neither_held_nor_dirty_cells_leave() -> None:
    residency = host(keep=2, slots=6)
    bring(residency, "a", hold=True)
    bring(residency, "b", dirty=True)
    bring(residency, "c d e")
    assert keys(residency) == "a b e"
    assert residency.num_slots() == (1, 1, 1)


def test_a_dirty_cell_that_was_cleaned_leaves_in_its_old_turn() -> None:
    residency = host(keep=2, slots=6)
    bring(residency, "a", dirty=True)
    bring(residency, "b")
    [cold] = residency.coldest_dirty(8)
    assert cold.key == "a"
    residency.pin(cold)
    residency.cleaned(cold)
    residency.unpin(cold)
    bring(residency, "c")
    assert keys(residency) == "b c"


def test_the_coldest_dirty_cells_come_in_order_and_no_more_than_asked() -> None:
    residency = host(keep=8, slots=8)
    bring(residency, "a b c d", dirty=True)
    bring(residency, "e")
    residency.used(entry(residency, "a"))
    residency.pin(entry(residency, "b"))
    assert [each.key for each in residency.coldest_dirty(2)] == ["c", "d"]


def test_a_slot_is_made_free_by_dropping_the_coldest() -> None:
    residency = host(keep=3, slots=3)
    bring(residency, "a b c")
    bring(residency, "d", hold=True)
    assert keys(residency) == "b c d"


def test_no_slot_is_given_when_all_are_held() -> None:
    residency = host(keep=2, slots=2)
    bring(residency, "a b", hold=True)
    assert not residency.give_slot(residency.begin("c", ChunkRef("c"), 100), LOAD)


def test_a_save_may_not_have_the_last_slots_that_are_free_or_could_be() -> None:
    residency = host(keep=4, slots=4, reserve=2)
    bring(residency, "a b", hold=True)
    bring(residency, "c d")
    assert not residency.has_room(SAVE)
    assert not residency.give_slot(residency.begin("e", ChunkRef("e"), 100), SAVE)
    assert keys(residency) == "a b c d e"
    residency.unpin(entry(residency, "a"))
    assert residency.give_slot(entry(residency, "e"), SAVE)
    assert keys(residency) == "b c d e"


def test_a_slot_once_given_is_kept() -> None:
    residency = host()
    arriving = residency.begin("a", ChunkRef("a"), 100)
    assert residency.give_slot(arriving, LOAD)
    slot = arriving.slot
    assert residency.give_slot(arriving, SAVE)
    assert arriving.slot == slot


def test_an_abandoned_cell_is_nobodys_and_its_slot_is_out_of_use() -> None:
    residency = host()
    late = residency.begin("a", ChunkRef("a"), 100)
    residency.give_slot(late, LOAD)
    residency.abandon(late)
    assert residency.get("a") is None
    assert residency.slots.num_quarantined == 1
    bring(residency, "a")
    residency.arrived(late)
    residency.unpin(late)
    assert residency.slots.num_quarantined == 0
    assert keys(residency) == "a"
    residency.check()


def test_what_is_held_when_all_is_forgotten_leaves_with_its_last_pin() -> None:
    residency = host()
    bring(residency, "a")
    bring(residency, "b", hold=True)
    held = entry(residency, "b")
    residency.clear()
    assert keys(residency) == ""
    assert residency.slots.num_free == 3
    residency.unpin(held)
    assert residency.slots.num_free == 4
    residency.check()


def test_whole_chunks_are_told_and_those_that_are_whole_no_more() -> None:
    residency = host(keep=4, slots=8, cells_per_chunk=2)
    bring(residency, "a0")
    assert residency.take_change() is None
    bring(residency, "a1 b0")
    assert residency.take_change() == HostChange(("a",), ())
    assert residency.take_change() is None
    bring(residency, "c0 d0")
    assert residency.take_change() == HostChange((), ("a",))
    residency.clear()
    assert residency.take_change() is None


def test_a_later_change_of_a_chunk_replaces_the_earlier_one() -> None:
    residency = host(keep=1)
    bring(residency, "a b a")
    assert residency.take_change() == HostChange(("a",), ("b",))


def test_the_lines_do_not_grow_with_use() -> None:
    residency = host(keep=4, slots=8)
    bring(residency, "a b", dirty=True)
    bring(residency, "c d")
    for number in range(10_000):
        key = "abcd"[number % 4]
        residency.used(entry(residency, key))
        residency.pin(entry(residency, key))
        residency.unpin(entry(residency, key))
    residency.check()
    assert sum(map(len, residency._lines)) == 4


def test_the_lines_do_not_grow_with_cells_that_come_and_are_forgotten() -> None:
    residency = host(keep=4, slots=8)
    bring(residency, "a b")
    for number in range(1_000):
        key = f"c{number}"
        bring(residency, key, dirty=number % 2 == 0)
        passing = entry(residency, key)
        residency.pin(passing)
        residency.forget(passing)
        residency.unpin(passing)
    residency.check()
    assert sum(map(len, residency._lines)) <= 2 * (2 * 3 + STALE_PLACES)


class ResidencyMachine(RuleBasedStateMachine):
    """Against a list of keys in order of leaving."""

    @initialize(keep=st.integers(1, 5))
    def begin(self, keep: int) -> None:
        self.residency = host(keep, slots=12)
        self.keep = keep
        self.order: list[str] = []
        self.dirty: set[str] = set()
        self.pinned: list[str] = []
        self.next = 0

    def idle(self) -> list[str]:
        return [key for key in self.order if key not in self.pinned]

    def overflow(self) -> None:
        """Clean cells leave while too many are idle."""
        while len(idle := self.idle()) > self.keep:
            clean = [key for key in idle if key not in self.dirty]
            if not clean:
                break
            self.order.remove(clean[0])

    @precondition(lambda self: self.residency.has_room(LOAD))
    @rule(dirty=st.booleans())
    def come(self, dirty: bool) -> None:
        if not self.residency.slots.num_free:
            clean = [key for key in self.idle() if key not in self.dirty]
            self.order.remove(clean[0])
        key = f"k{self.next}"
        self.next += 1
        bring(self.residency, key, dirty=dirty)
        self.order.append(key)
        if dirty:
            self.dirty.add(key)
        self.overflow()

    @precondition(lambda self: self.order)
    @rule(data=st.data(), refresh=st.booleans())
    def use(self, data: st.DataObject, refresh: bool) -> None:
        key = data.draw(st.sampled_from(self.order))
        use = self.residency.refresh if refresh else self.residency.used
        use(entry(self.residency, key))
        self.order.remove(key)
        self.order.append(key)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.order))
        self.residency.pin(entry(self.residency, key))
        self.pinned.append(key)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), clean=st.booleans())
    def let_go(self, data: st.DataObject, clean: bool) -> None:
        key = data.draw(st.sampled_from(self.pinned))
        if clean:
            self.residency.cleaned(entry(self.residency, key))
            self.dirty.discard(key)
        self.residency.unpin(entry(self.residency, key))
        self.pinned.remove(key)
        self.overflow()

    @rule(count=st.integers(0, 3))
    def copy_down(self, count: int) -> None:
        expected = [key for key in self.idle() if key in self.dirty][:count]
        found = self.residency.coldest_dirty(count)
        assert [each.key for each in found] == expected
        for each in found:
            self.residency.pin(each)
        for each in found:
            self.residency.cleaned(each)
            self.dirty.remove(each.key)
            self.residency.unpin(each)
            self.overflow()

    @invariant()
    def holds(self) -> None:
        self.residency.check()
        assert keys(self.residency) == " ".join(sorted(self.order))


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
