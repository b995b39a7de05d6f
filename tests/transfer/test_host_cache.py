"""What host memory holds: pins, slots, the heaps of cells that may leave, complete chunks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fakes import FakeClock
from tests.support.invariants import check
from tests.transfer.engine_bench import DISK, Bench
from vllm_kvpool.staging.slots import SlotPool, SlotUse
from vllm_kvpool.storage.base import ChunkRef, Retention
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.transfer.host_cache import STALE_PLACES, CacheEntry, CacheEntryState, HostCache
from vllm_kvpool.transfer.ops import HostCacheChange, Slab, SlabKind

LOAD, SAVE = SlotUse.LOAD, SlotUse.SAVE
SECOND = 10**9

clock = FakeClock()


def now_ns() -> int:
    """Each time a second later."""
    clock.advance(1.0)
    return int(clock() * SECOND)


def host(
    keep: int = 2,
    slots: int = 4,
    reserve: int = 0,
    slabs_per_chunk: int = 1,
    policy: str = "lru",
    has_shares: bool = False,
) -> HostCache:
    """Its wall clock is `clock`."""
    return HostCache(
        *(SlotPool(slots, reserve), keep, POLICIES[policy], {"": slabs_per_chunk}, wall_ns),
        has_shares=has_shares,
    )


def wall_ns() -> int:
    return int(clock() * SECOND)


def in_s(pin_s: float = 0, ttl_s: float = 0) -> Retention:
    now = wall_ns()
    return Retention(
        now + int(pin_s * SECOND) if pin_s else 0, now + int(ttl_s * SECOND) if ttl_s else 0
    )


def bring(host_cache: HostCache, keys: str, *, dirty: bool = False, hold: bool = False) -> None:
    """Cells come in one after the other, each of the chunk that its first letter names."""
    for key in keys.split():
        come(host_cache, key, ChunkRef(key[0]), dirty=dirty, hold=hold)


def come(
    host_cache: HostCache, key: str, chunk: ChunkRef, *, dirty: bool = False, hold: bool = False
) -> None:
    entry = host_cache.add(slab(key, chunk))
    assert host_cache.assign_slots(entry, LOAD)
    host_cache.arrived(entry, now_ns(), dirty=dirty)
    if not hold:
        host_cache.unpin(entry)
    check(host_cache)


def slab(key: str, chunk: ChunkRef | None = None, num_cells: int = 1) -> Slab:
    kind = SlabKind((key,) * num_cells, (100,) * num_cells)
    return Slab.of(kind, chunk or ChunkRef(key[0]), "")._replace(id=key)


def prompt(chunks: str) -> list[ChunkRef]:
    """The chunks "a", "ab", "abc" of a prompt "abc"."""
    ids = [chunks[: i + 1] for i in range(len(chunks))]
    return [ChunkRef(each, each[:-1], i) for i, each in enumerate(ids)]


def keys(host_cache: HostCache) -> str:
    return " ".join(sorted(entry.slab.id for entry in host_cache))


def entry(host_cache: HostCache, key: str) -> CacheEntry:
    found = host_cache.get(key)
    assert found is not None
    return found


def test_a_cell_stays_until_there_are_too_many() -> None:
    host_cache = host()
    bring(host_cache, "a b")
    assert keys(host_cache) == "a b"
    bring(host_cache, "c")
    assert keys(host_cache) == "b c"
    assert host_cache.num_dropped == 1
    assert host_cache.slots.num_free == 2


def test_without_a_host_tier_a_cell_stays_while_it_is_held() -> None:
    host_cache = host(keep=0)
    bring(host_cache, "a", hold=True)
    held = entry(host_cache, "a")
    assert held.state is CacheEntryState.PRESENT
    host_cache.unpin(held)
    assert keys(host_cache) == ""
    assert held.state is CacheEntryState.GONE
    assert host_cache.slots.num_free == 4
    assert host_cache.take_change() is None


def test_a_cell_that_was_read_leaves_later() -> None:
    host_cache = host()
    bring(host_cache, "a b")
    host_cache.hit("a", now_ns())
    bring(host_cache, "c")
    assert keys(host_cache) == "a c"


def test_a_chunk_that_was_used_twice_stays_longer_than_those_used_once() -> None:
    host_cache = host(keep=3, slots=8, policy="lrfu")
    bring(host_cache, "a b c")
    host_cache.hit("a", now_ns())
    bring(host_cache, "d e f")
    assert keys(host_cache) == "a e f"


def test_a_chunk_that_comes_back_soon_after_it_left_was_used_twice() -> None:
    host_cache = host(keep=2, slots=8, policy="lrfu")
    bring(host_cache, "a b c a d e")
    assert keys(host_cache) == "a e"
    bring(host_cache, "v w x y z")
    assert keys(host_cache) == "a z"


def test_what_left_long_ago_is_not_remembered() -> None:
    host_cache = host(keep=2, slots=8, policy="lrfu")
    bring(host_cache, "a b c d e f g h i j k a y z")
    assert keys(host_cache) == "y z"


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("order", ["abc", "cba", "bac"])
def test_a_prompts_end_leaves_before_its_beginning(policy: str, order: str) -> None:
    """In whatever order its chunks came."""
    host_cache = host(keep=3, slots=8, policy=policy)
    chunks = dict(zip("abc", prompt("abc"), strict=True))
    for each in order:
        come(host_cache, chunks[each].id, chunks[each])
    left = []
    for each in "xyz":
        before = set(keys(host_cache).split())
        bring(host_cache, each)
        left += sorted(before - set(keys(host_cache).split()))
    assert left == ["abc", "ab", "a"]


def test_a_prompt_that_goes_on_keeps_its_beginning() -> None:
    """Whoever saves what comes after a chunk has used the chunk, wherever it was read from."""
    host_cache = host(keep=4, slots=8)
    for chunk in prompt("ab"):
        come(host_cache, chunk.id, chunk)
    bring(host_cache, "x y")
    come(host_cache, "abc", prompt("abc")[2])
    bring(host_cache, "z")
    assert keys(host_cache) == "a ab abc z"


def test_a_chunk_is_known_to_come_after_one_that_is_not_there_yet() -> None:
    host_cache = host(keep=3, slots=8)
    a, ab, abc = prompt("abc")
    come(host_cache, "abc", abc)
    come(host_cache, "a", a)
    come(host_cache, "ab", ab)
    bring(host_cache, "x")
    assert keys(host_cache) == "a ab x"


def test_nothing_is_left_of_chunks_that_are_forgotten() -> None:
    host_cache = host(keep=2, slots=8)
    come(host_cache, "abc", prompt("abc")[2])
    host_cache.clear()
    check(host_cache)
    assert not host_cache._chunks


def test_a_cell_that_was_held_keeps_its_place() -> None:
    host_cache = host()
    bring(host_cache, "a b")
    host_cache.pin(entry(host_cache, "a"))
    host_cache.unpin(entry(host_cache, "a"))
    bring(host_cache, "c")
    assert keys(host_cache) == "b c"


def test_a_cell_that_was_read_while_it_was_held_has_its_new_place() -> None:
    host_cache = host()
    bring(host_cache, "a b")
    host_cache.pin(entry(host_cache, "a"))
    host_cache.hit("a", now_ns())
    host_cache.unpin(entry(host_cache, "a"))
    bring(host_cache, "c")
    assert keys(host_cache) == "a c"


def test_a_hit_of_what_is_not_here_says_nothing() -> None:
    host_cache = host()
    bring(host_cache, "a", hold=True)
    old = entry(host_cache, "a")
    host_cache.unindex(old)
    host_cache.hit("a", now_ns())
    bring(host_cache, "a b c")
    assert keys(host_cache) == "b c"


def test_neither_held_nor_dirty_cells_leave() -> None:
    host_cache = host(keep=2, slots=6)
    bring(host_cache, "a", hold=True)
    bring(host_cache, "b", dirty=True)
    bring(host_cache, "c d e")
    assert keys(host_cache) == "a b e"
    assert host_cache.num_slots() == (1, 1, 1)


def test_a_dirty_cell_that_was_cleaned_leaves_in_its_old_turn() -> None:
    host_cache = host(keep=2, slots=6)
    bring(host_cache, "a", dirty=True)
    bring(host_cache, "b")
    [cold] = host_cache.coldest_dirty(8)
    assert cold.slab.id == "a"
    host_cache.pin(cold)
    host_cache.cleaned(cold)
    host_cache.unpin(cold)
    bring(host_cache, "c")
    assert keys(host_cache) == "b c"


def test_the_coldest_dirty_cells_come_in_order_and_no_more_than_asked() -> None:
    host_cache = host(keep=8, slots=8)
    bring(host_cache, "a b c d", dirty=True)
    bring(host_cache, "e")
    host_cache.hit("a", now_ns())
    host_cache.pin(entry(host_cache, "b"))
    assert [each.slab.id for each in host_cache.coldest_dirty(2)] == ["c", "d"]


def test_a_slot_is_made_free_by_dropping_the_coldest() -> None:
    host_cache = host(keep=3, slots=3)
    bring(host_cache, "a b c")
    bring(host_cache, "d", hold=True)
    assert keys(host_cache) == "b c d"


def test_no_slot_is_given_when_all_are_held() -> None:
    host_cache = host(keep=2, slots=2)
    bring(host_cache, "a b", hold=True)
    assert not host_cache.assign_slots(host_cache.add(slab("c")), LOAD)


def test_a_save_may_not_have_the_last_slots_that_are_free_or_could_be() -> None:
    host_cache = host(keep=4, slots=4, reserve=2)
    bring(host_cache, "a b", hold=True)
    bring(host_cache, "c d")
    assert not host_cache.has_room(SAVE)
    assert not host_cache.assign_slots(host_cache.add(slab("e")), SAVE)
    assert keys(host_cache) == "a b c d e"
    host_cache.unpin(entry(host_cache, "a"))
    assert host_cache.assign_slots(entry(host_cache, "e"), SAVE)
    assert keys(host_cache) == "b c d e"


def test_slots_once_given_are_kept() -> None:
    host_cache = host()
    arriving = host_cache.add(slab("a"))
    assert host_cache.assign_slots(arriving, LOAD)
    slots = arriving.slots
    assert host_cache.assign_slots(arriving, SAVE)
    assert arriving.slots == slots


def test_slab_has_a_slot_for_each_cell_or_none() -> None:
    host_cache = host(keep=3, slots=4)
    bring(host_cache, "a b")
    large = host_cache.add(slab("c", num_cells=3))
    assert host_cache.assign_slots(large, LOAD)
    assert len(large.slots) == 3
    assert keys(host_cache) == "b c"  # one slab left for it, and no more
    other = host_cache.add(slab("d", num_cells=2))
    assert not host_cache.assign_slots(other, LOAD)
    assert other.slots == []
    assert keys(host_cache) == "b c d"


def test_slabs_leave_until_the_room_of_a_large_one_is_enough() -> None:
    host_cache = host(keep=4, slots=8)
    for key in "ab":
        large = host_cache.add(slab(key, num_cells=2))
        assert host_cache.assign_slots(large, LOAD)
        host_cache.arrived(large, now_ns())
        host_cache.unpin(large)
    bring(host_cache, "c")
    assert keys(host_cache) == "b c"
    assert (host_cache.num_idle, host_cache.num_dropped) == (3, 2)
    assert host_cache.slots.num_free == 5


def test_what_is_held_when_all_is_forgotten_leaves_with_its_last_pin() -> None:
    host_cache = host()
    bring(host_cache, "a")
    bring(host_cache, "b", hold=True)
    held = entry(host_cache, "b")
    host_cache.clear()
    assert keys(host_cache) == ""
    assert host_cache.slots.num_free == 3
    host_cache.unpin(held)
    assert host_cache.slots.num_free == 4
    check(host_cache)


def test_whole_chunks_are_told_and_those_that_are_whole_no_more() -> None:
    host_cache = host(keep=4, slots=8, slabs_per_chunk=2)
    bring(host_cache, "a0")
    assert host_cache.take_change() is None
    bring(host_cache, "a1 b0")
    assert host_cache.take_change() == HostCacheChange(("a",), ())
    assert host_cache.take_change() is None
    bring(host_cache, "c0 d0")
    assert host_cache.take_change() == HostCacheChange((), ("a",))
    host_cache.clear()
    assert host_cache.take_change() is None


def test_a_later_change_of_a_chunk_replaces_the_earlier_one() -> None:
    host_cache = host(keep=1)
    bring(host_cache, "a b a")
    assert host_cache.take_change() == HostCacheChange(("a",), ("b",))


def test_the_heaps_do_not_grow_with_use() -> None:
    host_cache = host(keep=4, slots=8)
    bring(host_cache, "a b", dirty=True)
    bring(host_cache, "c d")
    for number in range(10_000):
        key = "abcd"[number % 4]
        host_cache.hit(key, now_ns())
        host_cache.pin(entry(host_cache, key))
        host_cache.unpin(entry(host_cache, key))
    check(host_cache)
    assert sum(map(len, [host_cache._dirty, *host_cache._clean.values()])) == 4


def test_the_heaps_do_not_grow_with_cells_that_come_and_are_forgotten() -> None:
    host_cache = host(keep=4, slots=8)
    bring(host_cache, "a b")
    for number in range(1_000):
        key = f"c{number}"
        bring(host_cache, key, dirty=number % 2 == 0)
        passing = entry(host_cache, key)
        host_cache.pin(passing)
        host_cache.unindex(passing)
        host_cache.unpin(passing)
    check(host_cache)
    assert sum(map(len, [host_cache._dirty, *host_cache._clean.values()])) <= 2 * (
        2 * 3 + STALE_PLACES
    )


class ResidencyMachine(RuleBasedStateMachine):
    """LRU of single chunks, against a list of keys in order of leaving."""

    @initialize(keep=st.integers(1, 5), spare=st.integers(0, 3))
    def begin(self, keep: int, spare: int) -> None:
        self.host_cache = host(keep, keep + spare)
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

    @precondition(lambda self: self.host_cache.has_room(LOAD))
    @rule(dirty=st.booleans())
    def come(self, dirty: bool) -> None:
        if not self.host_cache.slots.num_free:
            clean = [key for key in self.idle() if key not in self.dirty]
            self.order.remove(clean[0])
        key = f"k{self.next}"
        self.next += 1
        come(self.host_cache, key, ChunkRef(key), dirty=dirty)
        self.order.append(key)
        if dirty:
            self.dirty.add(key)
        self.overflow()

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.order))
        self.host_cache.hit(key, now_ns())
        self.order.remove(key)
        self.order.append(key)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.order))
        self.host_cache.pin(entry(self.host_cache, key))
        self.pinned.append(key)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), clean=st.booleans())
    def let_go(self, data: st.DataObject, clean: bool) -> None:
        key = data.draw(st.sampled_from(self.pinned))
        if clean:
            self.host_cache.cleaned(entry(self.host_cache, key))
            self.dirty.discard(key)
        self.host_cache.unpin(entry(self.host_cache, key))
        self.pinned.remove(key)
        self.overflow()

    @rule(count=st.integers(0, 3))
    def copy_down(self, count: int) -> None:
        expected = [key for key in self.idle() if key in self.dirty][:count]
        found = self.host_cache.coldest_dirty(count)
        assert [each.slab.id for each in found] == expected
        for each in found:
            self.host_cache.pin(each)
        for each in found:
            self.host_cache.cleaned(each)
            self.dirty.remove(each.slab.id)
            self.host_cache.unpin(each)
            self.overflow()

    @invariant()
    def holds(self) -> None:
        check(self.host_cache)
        assert keys(self.host_cache) == " ".join(sorted(self.order))


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(stateful_step_count=40)


class PromptMachine(RuleBasedStateMachine):
    """Prompts with common beginnings, put and hit in any order, held and let go."""

    @initialize(
        keep=st.integers(1, 6),
        policy=st.sampled_from(sorted(POLICIES)),
        slabs_per_chunk=st.integers(1, 2),
    )
    def begin(self, keep: int, policy: str, slabs_per_chunk: int) -> None:
        self.slabs = range(slabs_per_chunk)
        self.host_cache = host(keep, 24, slabs_per_chunk=slabs_per_chunk, policy=policy)
        self.before: set[str] = set()
        self.coming = ""  # the chunk that has come last, while all slots are taken

    def all_of(self, chunk_id: str) -> list[CacheEntry]:
        found = (self.host_cache.get(f"{chunk_id}.{i}") for i in self.slabs)
        return [each for each in found if each is not None]

    def may_leave(self, chunk_id: str) -> bool:
        return any(not (each.pins or each.dirty) for each in self.all_of(chunk_id))

    prompts = st.text("abc", min_size=1, max_size=5)

    @rule(chunks=prompts, data=st.data(), dirty=st.booleans(), hold=st.booleans())
    def put(self, chunks: str, data: st.DataObject, dirty: bool, hold: bool) -> None:
        refs = prompt(chunks)
        for ref in refs[data.draw(st.integers(0, len(refs) - 1)) :]:
            self.host_cache.hit(ref.id, now_ns())
            for i in self.slabs:
                key = f"{ref.id}.{i}"
                if self.host_cache.get(key) is None and self.host_cache.has_room(LOAD):
                    come(self.host_cache, key, ref, dirty=dirty, hold=hold)
                    self.coming = "" if self.host_cache.slots.num_free else ref.id
                    self.nothing_left_before_what_comes_after_it()

    @rule(chunks=prompts)
    def hit(self, chunks: str) -> None:
        for ref in prompt(chunks):
            self.host_cache.hit(ref.id, now_ns())

    @rule(chunks=prompts)
    def hit_the_end_alone(self, chunks: str) -> None:
        self.host_cache.hit(chunks, now_ns())

    @rule(chunks=prompts, pin_s=st.sampled_from([0, 60, 6000]))
    def pin_for_a_time(self, chunks: str, pin_s: int) -> None:
        retention = in_s(pin_s)
        for ref in prompt(chunks):
            for each in self.all_of(ref.id):
                self.host_cache.pin_until(each, retention.pinned_until_ns)

    @rule(minutes=st.integers(1, 120))
    def wait(self, minutes: int) -> None:
        clock.advance(60.0 * minutes)

    @rule()
    def let_go(self) -> None:
        for each in list(self.host_cache):
            if each.pins:
                self.host_cache.cleaned(each)
                self.host_cache.unpin(each)

    @invariant()
    def nothing_left_before_what_comes_after_it(self) -> None:
        """But where that was held, or in no lower tier yet, or came when all else was held."""
        check(self.host_cache)
        now = {each.slab.chunk.id for each in self.host_cache}
        for gone in self.before - now:
            after = [each for each in now if each[:-1] == gone and each != self.coming]
            assert not any(self.may_leave(each) for each in after), (gone, after)
        self.before = now


TestPromptMachine = PromptMachine.TestCase
TestPromptMachine.settings = settings(stateful_step_count=25)


# Pins and times to live


def test_a_pinned_chunk_leaves_after_all_others_until_its_pin_ends() -> None:
    host_cache = host(keep=3)
    come(host_cache, "a", ChunkRef("a", retention=in_s(pin_s=1000)))
    bring(host_cache, "b c d e f")
    assert keys(host_cache) == "a e f"
    clock.advance(1000.0)
    bring(host_cache, "g")
    assert keys(host_cache) == "e f g"


def test_a_chunk_that_is_there_is_pinned_and_pins_only_get_longer() -> None:
    host_cache = host(keep=2)
    bring(host_cache, "a b")
    host_cache.pin_until(entry(host_cache, "a"), in_s(pin_s=1000).pinned_until_ns)
    host_cache.pin_until(entry(host_cache, "a"), in_s(pin_s=1).pinned_until_ns)
    clock.advance(100.0)
    bring(host_cache, "c d")
    assert keys(host_cache) == "a d"


def test_with_nothing_else_to_leave_the_pin_that_ends_first_does() -> None:
    host_cache = host(keep=2, slots=3)
    for key, pin_s in (("a", 2000), ("b", 1000), ("c", 3000)):
        come(host_cache, key, ChunkRef(key, retention=in_s(pin_s=pin_s)))
    assert keys(host_cache) == "a c"


def test_of_a_pinned_prompt_the_end_leaves_before_the_beginning() -> None:
    host_cache, pinned = host(keep=2, slots=4), in_s(pin_s=1000)
    for ref in prompt("abc"):
        come(host_cache, ref.id, ref._replace(retention=pinned))
    assert keys(host_cache) == "a ab"


def test_what_comes_before_a_pinned_chunk_stays_as_long() -> None:
    host_cache = host(keep=2, slots=4)
    first, second = prompt("ab")
    come(host_cache, "ab", second._replace(retention=in_s(pin_s=1000)))
    come(host_cache, "a", first)
    bring(host_cache, "c d")
    assert keys(host_cache) == "a ab"


def test_a_cell_in_use_while_its_pin_ends_may_leave_again() -> None:
    host_cache = host(keep=2)
    come(host_cache, "a", ChunkRef("a", retention=in_s(pin_s=100)))
    bring(host_cache, "b c")  # "a" was the coldest, and is kept apart
    held = entry(host_cache, "a")
    host_cache.pin(held)
    clock.advance(200.0)
    bring(host_cache, "d")
    host_cache.unpin(held)
    check(host_cache)
    bring(host_cache, "e f")
    assert keys(host_cache) == "e f"


def test_a_cell_is_dropped_when_its_time_to_live_ends() -> None:
    host_cache = host(keep=4, slots=8)
    come(host_cache, "a", ChunkRef("a", retention=in_s(ttl_s=100)))
    come(host_cache, "b", ChunkRef("b", retention=in_s(ttl_s=100)), dirty=True)
    come(host_cache, "c", ChunkRef("c", retention=in_s(ttl_s=100)), hold=True)
    come(host_cache, "d", ChunkRef("d", retention=in_s(ttl_s=100, pin_s=500)))
    held = entry(host_cache, "c")
    clock.advance(100.0)
    assert [host_cache.get(each) is not None for each in "abcd"] == [False, False, True, True]
    check(host_cache)
    host_cache.unpin(held)
    clock.advance(2.0)
    assert host_cache.get("c") is None
    clock.advance(500.0)
    assert host_cache.get("d") is None
    check(host_cache)
    assert host_cache.slots.num_free == 8


def test_a_pin_does_not_change_the_time_to_live_of_the_first_writer() -> None:
    host_cache = host(keep=4)
    come(host_cache, "a", ChunkRef("a", retention=in_s(ttl_s=100)))
    host_cache.pin_until(entry(host_cache, "a"), in_s(pin_s=10).pinned_until_ns)
    clock.advance(101.0)
    assert host_cache.get("a") is None


# Shares


@pytest.mark.parametrize("has_shares", [False, True])
def test_a_tenant_that_floods_pushes_out_no_other_tenants_cells(has_shares: bool) -> None:
    host_cache = host(keep=6, slots=12, has_shares=has_shares)
    for number in range(3):
        come(host_cache, f"small{number}", ChunkRef(f"small{number}", tenant="small"))
    for number in range(30):
        come(host_cache, f"flood{number}", ChunkRef(f"flood{number}", tenant="flood"))
    left = [each.slab.chunk.tenant for each in host_cache]
    assert left.count("small") == (3 if has_shares else 0)
    assert len(left) == 6


def test_the_tenant_with_the_most_cells_makes_room_for_the_others() -> None:
    host_cache = host(keep=6, slots=12, has_shares=True)
    for number in range(6):
        come(host_cache, f"big{number}", ChunkRef(f"big{number}", tenant="big"))
    for number in range(9):
        tenant = "ab"[number % 2]
        come(host_cache, f"{tenant}{number}", ChunkRef(f"{tenant}{number}", tenant=tenant))
    assert host_cache.num_cells == {"big": 2, "a": 2, "b": 2}


def test_where_the_largest_tenants_cells_are_in_use_another_makes_room() -> None:
    host_cache = host(keep=4, slots=8, has_shares=True)
    for number in range(4):
        come(host_cache, f"big{number}", ChunkRef(f"big{number}", tenant="big"), hold=True)
    for number in range(5):
        come(host_cache, f"a{number}", ChunkRef(f"a{number}", tenant="a"))
    assert host_cache.num_cells == {"big": 4, "a": 4}


# Prompts with common beginnings

PROMPTS = ("a b c d", "a b e f", "a g h", "w x y z")
LONGEST = 4
PARENTS = {
    chunk: parent
    for prompt in PROMPTS
    for parent, chunk in zip(prompt.split(), prompt.split()[1:], strict=False)
}

requests = st.tuples(
    st.sampled_from(["load", "save", "prefetch"]),
    st.sampled_from(PROMPTS),
    st.integers(1, LONGEST),
    st.sampled_from([0.0, 1.0, 100.0, 2000.0]),
)


@given(
    st.lists(requests, max_size=20),
    st.sampled_from(sorted(POLICIES)),
    st.integers(LONGEST, 10),
)
def test_whenever_a_chunk_is_in_host_memory_so_are_those_before_it(
    asked: list[tuple[str, str, int, float]], policy: str, keep: int
) -> None:
    bench = Bench(DISK, slots=keep + 8, keep=keep, policy=policy)
    for job, (kind, prompt, length, pause_s) in enumerate(asked):
        cells = " ".join(prompt.split()[:length])
        {"load": bench.load, "save": bench.save, "prefetch": bench.prefetch}[kind](job, cells)
        bench.run()
        here = {entry.slab.id for entry in bench.host_cache}
        assert all(PARENTS.get(chunk, chunk) in here for chunk in here), here
        bench.after(pause_s)
        bench.run()
