"""What host memory holds: pins, slots, the two lines of cells that may leave, and whole chunks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fakes import FakeClock
from vllm_kvpool.staging.slots import SlotPool, SlotUse
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.transfer.host_cache import STALE_PLACES, Entry, EntryState, Residency
from vllm_kvpool.transfer.ops import HostChange

LOAD, SAVE = SlotUse.LOAD, SlotUse.SAVE
SECOND = 10**9

clock = FakeClock()


def now_ns() -> int:
    """Each time a second later."""
    clock.advance(1.0)
    return int(clock() * SECOND)


def host(
    keep: int = 2, slots: int = 4, reserve: int = 0, cells_per_chunk: int = 1, policy: str = "lru"
) -> Residency:
    return Residency(SlotPool(slots, reserve), keep, POLICIES[policy], {"": cells_per_chunk})


def bring(residency: Residency, keys: str, *, dirty: bool = False, hold: bool = False) -> None:
    """Cells come in one after the other, each of the chunk that its first letter names."""
    for key in keys.split():
        come(residency, key, ChunkRef(key[0]), dirty=dirty, hold=hold)


def come(
    residency: Residency, key: str, chunk: ChunkRef, *, dirty: bool = False, hold: bool = False
) -> None:
    entry = residency.begin(key, chunk, 100)
    assert residency.give_slot(entry, LOAD)
    residency.arrived(entry, now_ns(), dirty=dirty)
    if not hold:
        residency.unpin(entry)
    residency.check()


def prompt(chunks: str) -> list[ChunkRef]:
    """The chunks "a", "ab", "abc" of a prompt "abc"."""
    ids = [chunks[: i + 1] for i in range(len(chunks))]
    return [ChunkRef(each, each[:-1], i) for i, each in enumerate(ids)]


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
    residency.hit("a", now_ns())
    bring(residency, "c")
    assert keys(residency) == "a c"


def test_a_chunk_that_was_used_twice_stays_longer_than_those_used_once() -> None:
    residency = host(keep=3, slots=8, policy="lrfu")
    bring(residency, "a b c")
    residency.hit("a", now_ns())
    bring(residency, "d e f")
    assert keys(residency) == "a e f"


def test_a_chunk_that_comes_back_soon_after_it_left_was_used_twice() -> None:
    residency = host(keep=2, slots=8, policy="lrfu")
    bring(residency, "a b c a d e")
    assert keys(residency) == "a e"
    bring(residency, "v w x y z")
    assert keys(residency) == "a z"


def test_what_left_long_ago_is_not_remembered() -> None:
    residency = host(keep=2, slots=8, policy="lrfu")
    bring(residency, "a b c d e f g h i j k a y z")
    assert keys(residency) == "y z"


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("order", ["abc", "cba", "bac"])
def test_a_prompts_end_leaves_before_its_beginning(policy: str, order: str) -> None:
    """In whatever order its chunks came."""
    residency = host(keep=3, slots=8, policy=policy)
    chunks = dict(zip("abc", prompt("abc"), strict=True))
    for each in order:
        come(residency, chunks[each].id, chunks[each])
    left = []
    for each in "xyz":
        before = set(keys(residency).split())
        bring(residency, each)
        left += sorted(before - set(keys(residency).split()))
    assert left == ["abc", "ab", "a"]


def test_a_prompt_that_goes_on_keeps_its_beginning() -> None:
    """Whoever saves what comes after a chunk has used the chunk, wherever it was read from."""
    residency = host(keep=4, slots=8)
    for chunk in prompt("ab"):
        come(residency, chunk.id, chunk)
    bring(residency, "x y")
    come(residency, "abc", prompt("abc")[2])
    bring(residency, "z")
    assert keys(residency) == "a ab abc z"


def test_a_chunk_is_known_to_come_after_one_that_is_not_there_yet() -> None:
    residency = host(keep=3, slots=8)
    a, ab, abc = prompt("abc")
    come(residency, "abc", abc)
    come(residency, "a", a)
    come(residency, "ab", ab)
    bring(residency, "x")
    assert keys(residency) == "a ab x"


def test_nothing_is_left_of_chunks_that_are_forgotten() -> None:
    residency = host(keep=2, slots=8)
    come(residency, "abc", prompt("abc")[2])
    residency.clear()
    residency.check()
    assert not residency._chunks


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
    residency.hit("a", now_ns())
    residency.unpin(entry(residency, "a"))
    bring(residency, "c")
    assert keys(residency) == "a c"


def test_a_hit_of_what_is_not_here_says_nothing() -> None:
    residency = host()
    bring(residency, "a", hold=True)
    old = entry(residency, "a")
    residency.forget(old)
    residency.hit("a", now_ns())
    bring(residency, "a b c")
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
    residency.hit("a", now_ns())
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
    residency.arrived(late, now_ns())
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
        residency.hit(key, now_ns())
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
    """LRU of single chunks, against a list of keys in order of leaving."""

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
        come(self.residency, key, ChunkRef(key), dirty=dirty)
        self.order.append(key)
        if dirty:
            self.dirty.add(key)
        self.overflow()

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.order))
        self.residency.hit(key, now_ns())
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


class PromptMachine(RuleBasedStateMachine):
    """Prompts with common beginnings, put and hit in any order, held and let go."""

    @initialize(
        keep=st.integers(1, 6),
        policy=st.sampled_from(sorted(POLICIES)),
        cells_per_chunk=st.integers(1, 2),
    )
    def begin(self, keep: int, policy: str, cells_per_chunk: int) -> None:
        self.cells = range(cells_per_chunk)
        self.residency = host(keep, 24, cells_per_chunk=cells_per_chunk, policy=policy)
        self.before: set[str] = set()

    def all_of(self, chunk_id: str) -> list[Entry]:
        found = (self.residency.get(f"{chunk_id}.{i}") for i in self.cells)
        return [each for each in found if each is not None]

    def may_leave(self, chunk_id: str) -> bool:
        return any(not (each.pins or each.dirty) for each in self.all_of(chunk_id))

    prompts = st.text("abc", min_size=1, max_size=5)

    @rule(chunks=prompts, data=st.data(), dirty=st.booleans(), hold=st.booleans())
    def put(self, chunks: str, data: st.DataObject, dirty: bool, hold: bool) -> None:
        refs = prompt(chunks)
        for ref in refs[data.draw(st.integers(0, len(refs) - 1)) :]:
            self.residency.hit(ref.id, now_ns())
            for i in self.cells:
                key = f"{ref.id}.{i}"
                if self.residency.get(key) is None and self.residency.has_room(LOAD):
                    come(self.residency, key, ref, dirty=dirty, hold=hold)
                    self.nothing_left_before_what_comes_after_it()

    @rule(chunks=prompts)
    def hit(self, chunks: str) -> None:
        for ref in prompt(chunks):
            self.residency.hit(ref.id, now_ns())

    @rule(chunks=prompts)
    def hit_the_end_alone(self, chunks: str) -> None:
        self.residency.hit(chunks, now_ns())

    @rule(minutes=st.integers(1, 120))
    def wait(self, minutes: int) -> None:
        clock.advance(60.0 * minutes)

    @rule()
    def let_go(self) -> None:
        for each in list(self.residency):
            if each.pins:
                self.residency.cleaned(each)
                self.residency.unpin(each)

    @invariant()
    def nothing_left_before_what_comes_after_it(self) -> None:
        """But where that was held, or in no lower tier yet."""
        self.residency.check()
        now = {each.chunk.id for each in self.residency}
        for gone in self.before - now:
            after = [each for each in now if each[:-1] == gone]
            assert not any(self.may_leave(each) for each in after), (gone, after)
        self.before = now


TestPromptMachine = PromptMachine.TestCase
TestPromptMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
