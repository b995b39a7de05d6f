"""The cache in host memory: pins, slots, the heaps of cells that may leave, complete chunks."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support import scripts
from tests.support.fakes import FakeClock
from tests.support.invariants import check
from tests.support.scripts import Example
from tests.transfer.engine_bench import DISK, Bench
from vllm_kvpool.staging.slots import SlotPool, SlotUse
from vllm_kvpool.storage.base import ChunkRef, Retention
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.transfer.host_cache import STALE_PLACES, CacheEntry, HostCache
from vllm_kvpool.transfer.ops import Slab, SlabKind

LOAD, SAVE = SlotUse.LOAD, SlotUse.SAVE
SECOND = 10**9

clock = FakeClock()


def now_ns() -> int:
    """Advance the clock by a second, and return its time."""
    clock.advance(1.0)
    return int(clock() * SECOND)


def host(
    keep: int = 2, slots: int = 4, reserve: int = 0, policy: str = "lru", **more: Any
) -> HostCache:
    """Return a cache with `clock` as its wall clock. `parts`: slabs of a chunk."""
    parts, pool = more.pop("parts", 1), SlotPool(slots, reserve)
    return HostCache(pool, keep, POLICIES[policy], {"": parts}, wall_ns, **more)


def wall_ns() -> int:
    return int(clock() * SECOND)


def in_s(pin_s: float = 0, ttl_s: float = 0) -> Retention:
    now = wall_ns()
    return Retention(
        now + int(pin_s * SECOND) if pin_s else 0, now + int(ttl_s * SECOND) if ttl_s else 0
    )


def bring(host_cache: HostCache, keys: str, *, dirty: bool = False) -> None:
    """Add cells one after the other, each of the chunk that its first letter names."""
    for key in keys.split():
        come(host_cache, key, ChunkRef(key[0]), dirty=dirty)


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
    """Return the chunks "a", "ab", "abc" of a prompt "abc"."""
    ids = [chunks[: i + 1] for i in range(len(chunks))]
    return [ChunkRef(each, each[:-1], i) for i, each in enumerate(ids)]


def keys(host_cache: HostCache) -> str:
    return " ".join(sorted(entry.slab.id for entry in host_cache))


def entry(host_cache: HostCache, key: str) -> CacheEntry:
    found = host_cache.get(key)
    assert found is not None
    return found


# Examples


class Scene:
    """A host cache, and entries that a script holds. Pins outlive forgotten names."""

    def __init__(self, verb: str, **options: Any) -> None:
        assert verb == "host"
        self.cache = host(**options)
        self.held: dict[str, CacheEntry] = {}

    def come(self, *names: str, hold: bool = False, dirty: bool = False, **more: Any) -> None:
        """Add slabs of one cell, each of the chunk that its first letter names.

        `chunk=abc`: of the last chunk of this prompt. `pin_s`, `ttl_s`, `tenant`: of the chunk.
        """
        for name in names:
            chunk = prompt(more["chunk"])[-1] if "chunk" in more else ChunkRef(name[0])
            retention = in_s(more.get("pin_s", 0), more.get("ttl_s", 0))
            chunk = chunk._replace(retention=retention, tenant=more.get("tenant", ""))
            come(self.cache, name, chunk, dirty=dirty, hold=hold)
            if hold:
                self.held[name] = entry(self.cache, name)

    def come_prompt(self, chunks: str, **more: Any) -> None:
        """Add the chunks `a`, `ab`, `abc` of a prompt `abc`."""
        for chunk in prompt(chunks):
            self.come(chunk.id, chunk=chunk.id, **more)

    def hold(self, name: str) -> None:
        self.held[name] = entry(self.cache, name)
        self.cache.pin(self.held[name])

    def let_go(self, name: str) -> None:
        self.cache.unpin(self.held.pop(name))

    def forget(self, name: str = "") -> None:
        """Forget the name of a held cell, or all cells."""
        if name:
            self.cache.unindex(self.held[name])
        else:
            self.cache.clear()
        check(self.cache)

    def coldest_dirty(self, count: str) -> list[str]:
        return [each.slab.id for each in self.cache.coldest_dirty(int(count))]

    def pin(self, name: str, seconds: str) -> None:
        self.cache.pin_until(entry(self.cache, name), in_s(float(seconds)).pinned_until_ns)

    def changes(self) -> list[str]:
        change = self.cache.take_change()
        if change is None:
            return []
        return [f"+{each}" for each in change.added] + [f"-{each}" for each in change.removed]

    def room(self, use: str, name: str, cells: str = "1") -> list[str]:
        """Add the slab if it is new, and return whether it gets slots: "given" or "refused" (in a
        list)."""
        wanted = self.cache.get(name) or self.cache.add(slab(name, num_cells=int(cells)))
        before = len(wanted.slots)
        has_slots = self.cache.assign_slots(wanted, SlotUse[use.upper()])
        assert len(wanted.slots) == (int(cells) if has_slots else before)
        return ["given" if has_slots else "refused"]

    def here(self, *names: str) -> None:
        assert keys(self.cache) == " ".join(names)

    def free(self, number: str) -> None:
        assert self.cache.slots.num_free == int(number)
        check(self.cache)

    def dropped(self, number: str) -> None:
        assert self.cache.num_dropped == int(number)

    def slots(self, *counts: str) -> None:
        """Assert the numbers of slots that are idle and clean, dirty, and pinned."""
        assert self.cache.num_slots() == tuple(map(int, counts))

    def absent(self, *names: str) -> None:
        """Assert that the cache has none of these slabs."""
        assert not any(self.cache.get(each) for each in names)
        check(self.cache)


VERBS: dict[str, Callable[..., Any]] = {
    **{name: each for name, each in vars(Scene).items() if not name.startswith("_")},
    "clean": lambda scene, name: scene.cache.cleaned(scene.held[name]),
    "use": lambda scene, name: scene.cache.hit(name, now_ns()),
    "wait": lambda scene, seconds: clock.advance(float(seconds)),
}


@scripts.examples(
    """
a cell stays until there are too many
    host; come a b; here a b; come c; here b c; dropped 1; free 2
without a host tier a cell stays while it is held
    host keep=0; come a hold=True; here a; let_go a; here; free 4; changes -> nothing
a cell that was read leaves later
    host; come a b; use a; come c; here a c
a chunk that was used twice stays longer than those used once
    host keep=3 slots=8 policy=lrfu; come a b c; use a; come d e f; here a e f
a chunk that comes back soon after it left was used twice
    host slots=8 policy=lrfu; come a b c a d e; here a e; come v w x y z; here a z
what left long ago is not remembered
    host slots=8 policy=lrfu; come a b c d e f g h i j k a y z; here y z
a prompt that goes on keeps its beginning
    # Whoever saves what comes after a chunk has used the chunk, wherever it was read from.
    host keep=4 slots=8; come_prompt ab; come x y; come abc chunk=abc; come z; here a ab abc z
a chunk is known to come after one that is not there yet
    host keep=3 slots=8; come abc chunk=abc; come a chunk=a; come ab chunk=ab; come x
    here a ab x
a cell that was held keeps its place
    host; come a b; hold a; let_go a; come c; here b c
a cell that was read while it was held has its new place
    host; come a b; hold a; use a; let_go a; come c; here a c
a hit of what is not here says nothing
    host; come a hold=True; forget a; use a; come a b c; here b c
neither held nor dirty cells leave
    host slots=6; come a hold=True; come b dirty=True; come c d e; here a b e; slots 1 1 1
a dirty cell that was cleaned leaves in its old turn
    host slots=6; come a dirty=True; come b; coldest_dirty 8 -> a; hold a; clean a; let_go a
    come c; here b c
the coldest dirty cells come in order and no more than asked
    host keep=8 slots=8; come a b c d dirty=True; come e; use a; hold b; coldest_dirty 2 -> c | d
a slot is made free by dropping the coldest
    host keep=3 slots=3; come a b c; come d hold=True; here b c d
no slot is given when all are held
    host slots=2; come a b hold=True; room load c -> refused
a save may not have the last slots that are free or could be
    host keep=4 reserve=2; come a b hold=True; come c d; room save e -> refused; here a b c d e
    let_go a; room save e -> given; here b c d e
slab has a slot for each cell or none
    # Of slabs one leaves for the first, and no more.
    host keep=3; come a b; room load c 3 -> given; here b c; room load d 2 -> refused; here b c d
what is held when all is forgotten leaves with its last pin
    host; come a; come b hold=True; forget; here; free 3; let_go b; free 4
whole chunks are told and those that are whole no more
    host keep=4 slots=8 parts=2; come a0; changes -> nothing; come a1 b0; changes -> +a
    changes -> nothing; come c0 d0; changes -> -a; forget; changes -> nothing
a later change of a chunk replaces the earlier one
    host keep=1; come a b a; changes -> +a | -b
a pinned chunk leaves after all others until its pin ends
    host keep=3; come a pin_s=1000; come b c d e f; here a e f; wait 1000; come g; here e f g
a chunk that is there is pinned and pins only get longer
    host; come a b; pin a 1000; pin a 1; wait 100; come c d; here a d
with nothing else to leave the pin that ends first does
    host slots=3; come a pin_s=2000; come b pin_s=1000; come c pin_s=3000; here a c
of a pinned prompt the end leaves before the beginning
    host; come_prompt abc pin_s=1000; here a ab
what comes before a pinned chunk stays as long
    host; come ab chunk=ab pin_s=1000; come a; come c d; here a ab
a cell in use while its pin ends may leave again
    # It was the coldest, and is kept apart.
    host; come a pin_s=100; come b c; hold a; wait 200; come d; let_go a; come e f; here e f
a cell is dropped when its time to live ends, and what is held or pinned later
    host keep=4 slots=8; come a ttl_s=100; come b ttl_s=100 dirty=True
    come c ttl_s=100 hold=True; come d ttl_s=100 pin_s=500; wait 100; absent a b; here c d
    let_go c; wait 2; absent c; wait 500; absent d; free 8
a pin does not change the time to live of the first writer
    host keep=4; come a ttl_s=100; pin a 10; wait 101; absent a
where the largest tenant's cells are in use another makes room
    host keep=4 slots=8 has_shares=True; come w x y z tenant=big hold=True
    come a b c d e tenant=small; here b c d e w x y z
""",
    Scene,
    VERBS,
)
def test_cells_of_host_memory(example: Example) -> None:
    example.play()


def test_nothing_is_left_of_chunks_that_are_forgotten() -> None:
    host_cache = host(keep=2, slots=8)
    come(host_cache, "abc", prompt("abc")[2])
    host_cache.clear()
    check(host_cache)
    assert not host_cache._chunks


def test_slots_once_given_are_kept() -> None:
    host_cache = host()
    arriving = host_cache.add(slab("a"))
    assert host_cache.assign_slots(arriving, LOAD)
    slots = arriving.slots
    assert host_cache.assign_slots(arriving, SAVE)
    assert arriving.slots == slots


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
    """LRU of single chunks, compared with a list of keys in eviction order."""

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
        """Remove clean cells while too many are idle."""
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
    """Prompts with common beginnings are put and hit in any order, held and released."""

    @initialize(
        keep=st.integers(1, 6),
        policy=st.sampled_from(sorted(POLICIES)),
        slabs_per_chunk=st.integers(1, 2),
    )
    def begin(self, keep: int, policy: str, slabs_per_chunk: int) -> None:
        self.slabs = range(slabs_per_chunk)
        self.host_cache = host(keep, 24, parts=slabs_per_chunk, policy=policy)
        self.before: set[str] = set()
        self.coming = ""  # the latest chunk, while all slots are taken

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
        """Assert that chunks do not leave before their successors.

        Exceptions: the successor was held, was in no lower tier yet, or came when all else was
        held.
        """
        check(self.host_cache)
        now = {each.slab.chunk.id for each in self.host_cache}
        for gone in self.before - now:
            after = [each for each in now if each[:-1] == gone and each != self.coming]
            assert not any(self.may_leave(each) for each in after), (gone, after)
        self.before = now


TestPromptMachine = PromptMachine.TestCase
TestPromptMachine.settings = settings(stateful_step_count=25)


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


@given(st.lists(requests, max_size=20), st.sampled_from(sorted(POLICIES)), st.integers(LONGEST, 10))
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
