"""Lookups' questions to tiers and the times of their answers, on a simulated clock."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.scheduler import scheduler_bench
from tests.scheduler.scheduler_bench import layer_group
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import CellKey, make_namespace
from vllm_kvpool.layout.topology import AttentionWindow
from vllm_kvpool.scheduler import lookup_core
from vllm_kvpool.scheduler.lookup import (
    NOTHING_STORED,
    Lookup,
    LookupOutcome,
    LookupResult,
    StoredChunks,
)
from vllm_kvpool.scheduler.lookup_core import POLL_MAX_S, QUICK_SHARE, LookupCore, Present, TierCall
from vllm_kvpool.scheduler.prefix_search import CellNames, HitSearch, HostCacheIndex, Tail
from vllm_kvpool.scheduler.tiered_search import TieredSearch
from vllm_kvpool.storage.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S
from vllm_kvpool.transfer.ops import HostCacheChange

CHUNK = 4
NAMESPACE = make_namespace("model", "0" * 12)
PLAIN = CellNames(NAMESPACE, [layer_group(heads=2, layers=4, span=2)])
WINDOW = layer_group("window", layers=2, window=AttentionWindow(sliding=6))
WINDOWED = CellNames(NAMESPACE, [layer_group("full", layers=2), WINDOW])
NUM_CHUNKS = 12
TOKENS = tuple(range(NUM_CHUNKS * CHUNK))
TIMEOUT_S = 0.5
FAST_S = 0.002
ANSWERED, STORE_ERROR = LookupOutcome.ANSWERED, LookupOutcome.STORE_ERROR
TIMED_OUT = LookupOutcome.TIMED_OUT


def chain_of(tokens: Sequence[int] = TOKENS) -> ChunkChain:
    return scheduler_bench.chain_of(tokens, CHUNK)


HASHES = chain_of().hashes


@dataclass
class Tier:
    """The cells of a store and the duration of each of its calls.

    Calls take the `delays` in turn; the last delay repeats. A call with delay None fails after
    `FAST_S`.
    """

    keys: set[CellKey] = field(default_factory=set)
    delays: list[float | None] = field(default_factory=lambda: [FAST_S])
    num_calls: int = 0
    num_keys: int = 0

    def take_delay(self) -> float | None:
        return self.delays.pop(0) if len(self.delays) > 1 else self.delays[0]


class World:
    """A core, its tiers and the time."""

    def __init__(
        self, tiers: Sequence[Tier], names: CellNames = PLAIN, host_ranks: int = 0
    ) -> None:
        self.names = names
        self.tiers = tiers
        self.now = 100.0
        self.pace: list[tuple[int, bool]] = []
        self.host = HostCacheIndex(host_ranks)
        self.core = LookupCore(
            len(tiers),
            names,
            CHUNK,
            self.host,
            1,
            TIMEOUT_S,
            lambda tier, is_left_alone: self.pace.append((tier, is_left_alone)),
        )
        self.results: dict[int, tuple[LookupResult, float]] = {}
        self.progress: list[tuple[int, int, float]] = []
        """Each progress of a lookup: its id, the chunks found, the time."""
        self.max_running: Counter[int] = Counter()
        self._running: list[tuple[float, int, TierCall, Present]] = []
        self._count = 0

    def hold(self, tier: int, chunks: Iterable[int], cells: slice = slice(None)) -> None:
        for chunk in chunks:
            for group in range(len(self.names.layer_groups)):
                self.tiers[tier].keys.update(self.names.of_chunk(HASHES[chunk], group)[cells])

    def ask(
        self,
        lookup_id: int = 1,
        *,
        expect: int = 0,
        expect_s: float = 0.0,
        seeks_stored: bool = False,
    ) -> None:
        until = self.now + expect_s
        times = until, until + 0.9 * TIMEOUT_S
        lookup = Lookup(
            *(lookup_id, RequestIdentity, TOKENS, True, expect * CHUNK, *times),
            seeks_stored=seeks_stored,
        )
        self.core.open(lookup, chain_of(), self.now)
        self.turn()

    def turn(self) -> None:
        for call in self.core.next_calls(self.now):
            tier = self.tiers[call.tier]
            assert all(other.tier != call.tier for _, _, other, _ in self._running), "two at a time"
            delay = tier.take_delay()
            tier.num_calls += 1
            tier.num_keys += len(call.keys)
            self._count += 1
            value: Present = None
            if delay is not None and call.namespaces is not None:
                tier.keys = {key for key in tier.keys if not key.startswith(tuple(call.namespaces))}
                value = []
            elif delay is not None:
                value = [key in tier.keys for key in call.keys]
            ends = self.now + (FAST_S if delay is None else delay)
            heapq.heappush(self._running, (ends, self._count, call, value))
        while self.core.results:
            result = self.core.results.popleft()
            if not result.is_final:
                self.progress.append((result.lookup_id, result.found_chunks, self.now))
                continue
            assert result.lookup_id not in self.results, "answered twice"
            self.results[result.lookup_id] = result, self.now

    def run(self, until: Callable[[], bool] = lambda: False, limit_s: float = 60.0) -> None:
        """Let time pass until no event is left."""
        stop = self.now + limit_s
        while not until():
            next_return = self._running[0][0] if self._running else math.inf
            then = min(next_return, self.core.next_due())
            if then > stop:
                self.now = stop if then < math.inf else self.now
                return
            self.now = max(self.now, then)
            if next_return <= self.now:
                _, _, call, value = heapq.heappop(self._running)
                self.core.returned(call, value, self.now)
            self.turn()

    def answer(self, lookup_id: int = 1) -> tuple[int, LookupOutcome, float]:
        """Start a lookup and return (found chunks, outcome, seconds until it ended)."""
        began = self.now
        self.ask(lookup_id)
        self.run(lambda: lookup_id in self.results)
        result, at = self.results[lookup_id]
        return result.found_chunks, result.outcome, at - began


def prefix(
    tiers: Iterable[Tier], names: CellNames, host: Iterable[int] = (), *, exact: bool = False
) -> int:
    """Return the chunks that one search over the cells of all tiers together finds."""
    keys = set().union(*(tier.keys for tier in tiers))
    in_host = set(host)
    search = HitSearch(NUM_CHUNKS, names.layer_groups, CHUNK, 1, NUM_CHUNKS if exact else 0)
    while not search.done:
        questions = search.questions()
        wanted = [names.of_questions([question], HASHES)[0] for question in questions]
        search.answer(
            questions,
            [
                question.chunk in in_host or keys.issuperset(cells)
                for question, cells in zip(questions, wanted, strict=True)
            ],
        )
    return search.found


# A slow tier delays only the chunks that it holds


def test_what_lies_near_is_answered_without_asking_far() -> None:
    world = World([Tier(), Tier(delays=[1.0])])
    world.hold(0, range(NUM_CHUNKS))
    for number in range(8):
        assert world.answer(number) == (NUM_CHUNKS, ANSWERED, pytest.approx(FAST_S))
    assert world.tiers[1].num_calls == 0


def test_what_lies_near_is_answered_at_the_deadline_while_a_far_tier_thinks() -> None:
    world = World([Tier(), Tier(delays=[1.0])])
    world.hold(0, range(5))
    world.hold(1, range(NUM_CHUNKS))
    assert world.answer() == (5, ANSWERED, pytest.approx(0.9 * TIMEOUT_S))


def test_hits_in_near_tiers_do_not_wait_for_lookups_of_far_ones() -> None:
    """A lookup that needs the far tier is under way. Later lookups do not need that tier."""
    world = World([Tier(), Tier(delays=[1.0])])
    world.ask(0)
    world.hold(0, range(NUM_CHUNKS))
    world.run(lambda: world.tiers[1].num_calls == 1)
    for number in range(1, 9):
        found, outcome, seconds = world.answer(number)
        assert (found, outcome) == (NUM_CHUNKS, ANSWERED)
        assert seconds <= 2 * FAST_S


def test_host_memory_waits_for_nobody() -> None:
    world = World([Tier(delays=[1.0]), Tier(delays=[1.0])], host_ranks=1)
    world.host.apply(0, HostCacheChange(tuple(PLAIN.chunk_id(each) for each in HASHES), ()))
    assert world.answer() == (NUM_CHUNKS, ANSWERED, 0)
    world.host.apply(0, HostCacheChange((), (PLAIN.chunk_id(HASHES[7]),)))
    assert world.answer(2) == (7, ANSWERED, pytest.approx(0.9 * TIMEOUT_S))


@pytest.mark.parametrize("seeks_stored", [False, True])
@pytest.mark.parametrize(
    ("in_host", "in_tiers", "stored"),
    [
        (NUM_CHUNKS, [], 0),
        (NUM_CHUNKS, [range(5)], 5),
        (NUM_CHUNKS, [range(5), range(3, NUM_CHUNKS)], NUM_CHUNKS),
        (NUM_CHUNKS, [[*range(4), *range(5, NUM_CHUNKS)]], 4),
        (3, [range(7)], 7),
        (0, [range(7)], 7),
        (None, [range(7)], 7),
    ],
)
def test_what_stores_have_is_told_apart_from_what_host_memory_has(
    seeks_stored: bool, in_host: int | None, in_tiers: list[Iterable[int]], stored: int
) -> None:
    world = World([Tier() for _ in in_tiers] or [Tier()], host_ranks=int(in_host is not None))
    added = tuple(PLAIN.chunk_id(each) for each in HASHES[: in_host or 0])
    if added:
        world.host.apply(0, HostCacheChange(added, ()))
    for tier, chunks in enumerate(in_tiers):
        world.hold(tier, chunks)
    world.ask(seeks_stored=seeks_stored)
    world.run(lambda: 1 in world.results)
    result, _ = world.results[1]
    assert result.found_chunks == max(in_host or 0, stored)
    chunks = StoredChunks(stored, stored, is_in_host=in_host is not None)
    assert result.stored == (chunks if seeks_stored else NOTHING_STORED)
    asks_nobody = in_host == NUM_CHUNKS and not seeks_stored
    assert asks_nobody is not any(tier.num_calls for tier in world.tiers)


def test_windows_that_no_store_was_asked_for_are_named_though_they_have_left_host_memory() -> None:
    world = World([Tier()], WINDOWED, host_ranks=1)
    window = [WINDOWED.chunk_id(each, 1) for each in HASHES]
    added = [*(WINDOWED.chunk_id(each) for each in HASHES), window[10]]
    world.host.apply(0, HostCacheChange(tuple(added), ()))
    world.tiers[0].keys.update(WINDOWED.of_chunk(HASHES[11], 1))
    world.ask(seeks_stored=True)
    world.host.apply(0, HostCacheChange((), (window[10],)))
    world.run(lambda: 1 in world.results)
    result, _ = world.results[1]
    assert result.found_chunks == NUM_CHUNKS
    assert result.stored == StoredChunks(is_in_host=True, host_windows=frozenset({window[10]}))


def test_windows_of_host_memory_are_not_named_after_a_reset() -> None:
    world = World([Tier()], WINDOWED, host_ranks=1)
    added = (WINDOWED.chunk_id(each, group) for each in HASHES for group in range(2))
    world.host.apply(0, HostCacheChange(tuple(added), ()))
    world.ask(seeks_stored=True)
    world.host.clear()
    world.core.remove_all(lambda removed: None, ("",), world.now)
    world.turn()
    world.run(lambda: 1 in world.results)
    result, _ = world.results[1]
    assert result.found_chunks == 0
    assert result.stored == StoredChunks(is_in_host=True)


def test_a_store_that_does_not_answer_in_time_has_nothing_of_what_host_memory_has() -> None:
    world = World([Tier(delays=[10.0])], host_ranks=1)
    world.host.apply(0, HostCacheChange(tuple(map(PLAIN.chunk_id, HASHES)), ()))
    world.hold(0, range(NUM_CHUNKS))
    world.ask(seeks_stored=True)
    began = world.now
    world.run(lambda: 1 in world.results)
    result, at = world.results[1]
    assert (result.found_chunks, result.stored) == (NUM_CHUNKS, StoredChunks(is_in_host=True))
    assert at - began == pytest.approx(0.9 * TIMEOUT_S)


def test_a_tier_behind_a_slow_one_is_asked_in_time() -> None:
    world = World([Tier(), Tier(delays=[9.0]), Tier()])
    world.hold(0, range(2))
    world.hold(1, range(5))
    world.hold(2, range(2, 8))
    assert world.answer() == (8, ANSWERED, pytest.approx(0.9 * TIMEOUT_S))


def test_when_nobody_answers_in_time_the_lookup_says_so() -> None:
    world = World([Tier(delays=[9.0])])
    world.hold(0, range(5))
    assert world.answer() == (0, TIMED_OUT, pytest.approx(0.9 * TIMEOUT_S))


@pytest.mark.parametrize(
    ("far", "found", "rest"),
    [
        (FAST_S, 3, ANSWERED),
        (9.0, 3, TIMED_OUT),
        (None, 3, LookupOutcome.STORE_ERROR),
        (FAST_S, NUM_CHUNKS, ANSWERED),
    ],
)
def test_an_answer_says_why_no_more_was_found(
    far: float | None, found: int, rest: LookupOutcome
) -> None:
    world = World([Tier(), Tier(delays=[far])])
    world.hold(0, range(3))
    world.hold(1, range(3 if found == 3 else NUM_CHUNKS))
    assert world.answer()[:2] == (found, ANSWERED)
    assert world.results[1][0].miss_reason is rest


def test_what_a_tier_that_is_left_alone_might_have_is_not_called_absent() -> None:
    world = World([Tier(), Tier(delays=[0.8 * TIMEOUT_S, 9.0])])
    world.hold(0, range(3))
    number = 0
    while not world.pace:
        number += 1
        world.answer(number)
        world.now += 20 * TIMEOUT_S
        world.run()
    number += 1
    world.tiers[1].delays = [9.0]
    assert world.answer(number)[:2] == (3, ANSWERED)
    assert world.results[number][0].miss_reason is TIMED_OUT


def test_a_call_that_hangs_is_not_waited_for_by_those_that_come_later() -> None:
    world = World([Tier(), Tier(delays=[9.0])])
    world.hold(0, range(3))
    world.answer()
    world.now += 2 * TIMEOUT_S
    for number in (2, 3):  # of the near tier two rounds
        assert world.answer(number) == (3, ANSWERED, pytest.approx(2 * FAST_S))


# A tier that keeps missing the deadline


def slow_far_tier(delay_s: float = 1.0) -> World:
    """Return a world whose far tier has just been paused after repeated timeouts."""
    world = World([Tier(), Tier(delays=[delay_s])])
    world.hold(0, range(3))
    world.hold(1, range(6))
    for number in range(FAILURES_TO_OPEN):
        assert world.answer(-number) == (3, ANSWERED, pytest.approx(0.9 * TIMEOUT_S))
        assert world.pace == ([(1, True)] if number == FAILURES_TO_OPEN - 1 else [])
        world.run()
    return world


@pytest.mark.parametrize("delay_s", [1.0, 0.3])  # of the latter each call is in time, two are not
def test_a_tier_that_keeps_missing_the_deadline_is_left_alone(delay_s: float) -> None:
    world = slow_far_tier(delay_s)
    calls = world.tiers[1].num_calls
    for number in range(1, 5):
        found, outcome, seconds = world.answer(number)
        assert (found, outcome) == (3, ANSWERED)
        assert seconds < 10 * FAST_S
    assert world.tiers[1].num_calls <= calls + 1  # one is a trial


def test_it_is_used_again_once_it_answers_quickly() -> None:
    world = slow_far_tier()
    world.now += FIRST_PAUSE_S
    assert world.answer(1)[0] == 3  # a trial, which is as slow as ever
    world.run()
    assert world.pace == [(1, True)]
    world.tiers[1].delays = [QUICK_SHARE * TIMEOUT_S / 2]
    world.now += 2 * FIRST_PAUSE_S
    assert world.answer(2)[0] == 3  # a trial, which nobody waits for
    world.run()
    assert world.pace == [(1, True), (1, False)]
    assert world.answer(3)[:2] == (6, ANSWERED)
    assert world.pace == [(1, True), (1, False)]


def test_after_a_return_one_miss_is_enough() -> None:
    world = slow_far_tier()
    world.tiers[1].delays = [FAST_S, 1.0]
    world.now += FIRST_PAUSE_S
    world.answer(1)
    world.run()
    assert world.pace == [(1, True), (1, False)]
    world.answer(2)
    assert world.pace == [(1, True), (1, False), (1, True)]


def test_lookups_of_one_call_count_once() -> None:
    world = World([Tier(), Tier(delays=[1.0])])
    for number in range(20):
        world.ask(number)
    world.run()
    assert len(world.results) == 20
    assert world.pace == []


def test_one_that_is_now_and_then_late_is_used() -> None:
    world = World([Tier(), Tier(delays=[1.0, FAST_S] * 9)])
    for number in range(9):
        world.answer(number)
        world.run()
    assert world.pace == []


# Where single cells leave a chunk


LARGE = CellNames(NAMESPACE, [layer_group(heads=32, layers=4, span=1)])
LONG = tuple(range(40 * CHUNK))


class LossyWorld(World):
    """40 chunks of 32 heads and 4 spans in a tier, which may lose single cells."""

    def __init__(self, *, loses_cells: bool) -> None:
        super().__init__([Tier()], LARGE)
        self.core = LookupCore(*(1, LARGE, CHUNK, self.host, 1, TIMEOUT_S), loses_cells=loses_cells)
        self.hashes = chain_of(LONG).hashes
        self.tiers[0].keys = {key for each in self.hashes for key in LARGE.of_chunk(each)}

    def look_up(self, lookup_id: int, *, exact: bool = False) -> int:
        lookup = Lookup(
            *(lookup_id, RequestIdentity, LONG, True, 0, self.now, self.now + TIMEOUT_S),
            exact=exact,
        )
        self.core.open(lookup, chain_of(LONG), self.now)
        self.turn()
        self.run(lambda: lookup_id in self.results)
        return self.results[lookup_id][0].found_chunks


@pytest.mark.parametrize("how", ["the tier loses cells", "a load has failed"])
def test_a_single_missing_cell_is_noticed_wherever_it_is(how: str) -> None:
    world = LossyWorld(loses_cells=how == "the tier loses cells")
    exact, random = how == "a load has failed", Random(1)
    (tier,) = world.tiers
    assert world.look_up(-1, exact=exact) == 40
    assert (tier.num_keys, tier.num_calls) == (39 + 128 + 39 * 128, 2)
    for chunk in range(40):
        key = random.choice(LARGE.of_chunk(world.hashes[chunk]))
        tier.keys.remove(key)
        assert world.look_up(chunk, exact=exact) == chunk
        tier.keys.add(key)


def test_a_lookup_samples_where_cells_leave_together() -> None:
    world = LossyWorld(loses_cells=False)
    assert world.look_up(1) == 40
    assert world.tiers[0].num_keys == 39 + 128


def test_of_a_long_prompt_the_first_chunks_are_asked_for_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup_core, "MAX_EXACT_KEYS", 10 * 128 + 1)
    world = LossyWorld(loses_cells=True)
    assert world.look_up(-1) == 40
    assert world.tiers[0].num_keys == 39 + 128 + 10 * 128
    for chunk, found in ((9, 9), (20, 40)):
        key = LARGE.of_chunk(world.hashes[chunk])[chunk - 1]
        world.tiers[0].keys.remove(key)
        assert world.look_up(chunk) == found
        world.tiers[0].keys.add(key)


# Whatever tiers do

DELAYS = st.lists(
    st.one_of(st.just(FAST_S), st.floats(0, 1.5), st.just(9.0), st.none()), min_size=1, max_size=4
)
CHUNKS = st.sets(st.integers(0, NUM_CHUNKS - 1))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[bool], set[int]]:
    """A world, which of its tiers always answer fast, and what is in host memory."""
    names = draw(st.sampled_from([PLAIN, WINDOWED]))
    is_fast = draw(st.lists(st.booleans(), min_size=0, max_size=3))
    tiers = [Tier(delays=[FAST_S] if fast else draw(DELAYS)) for fast in is_fast]
    host = draw(CHUNKS) if draw(st.booleans()) else set()
    world = World(tiers, names, host_ranks=1 if host else 0)
    for number in range(len(tiers)):
        world.hold(number, range(draw(st.integers(0, NUM_CHUNKS))))
        world.hold(
            number, draw(CHUNKS), draw(st.sampled_from([slice(None), slice(1), slice(1, 9)]))
        )
    layer_groups = range(len(names.layer_groups))
    groups = tuple(
        names.chunk_id(HASHES[chunk], layer_group) for chunk in host for layer_group in layer_groups
    )
    world.host.apply(0, HostCacheChange(groups, ()))
    return world, is_fast, host


@given(worlds(), st.lists(st.floats(0, 2), min_size=1, max_size=8), st.booleans())
def test_an_answer_is_what_those_have_that_answer_in_time_and_never_more_than_exists(
    given_world: tuple[World, list[bool], set[int]], pauses: list[float], expects: bool
) -> None:
    world, is_fast, host = given_world
    fast = [tier for tier, fast in zip(world.tiers, is_fast, strict=True) if fast]
    most = prefix(world.tiers, world.names, host)
    least = {exact: prefix(fast, world.names, host, exact=exact) for exact in (False, True)}
    began = {}
    are_exact: list[bool] = []
    for number, pause_s in enumerate(pauses):
        began[number] = world.now
        expect_s = 0.3 if expects and number % 2 else 0.0
        are_exact.append(expect_s > 0)
        world.ask(number, expect=NUM_CHUNKS if expect_s else 0, expect_s=expect_s)
        stop = world.now + pause_s
        world.run(lambda stop=stop: world.now >= stop, pause_s)  # type: ignore[misc]
        world.now = max(world.now, stop)
    world.run()
    assert len(world.results) == len(pauses)
    for number, (result, at) in world.results.items():
        assert least[are_exact[number]] <= result.found_chunks <= most
        assert at <= began[number] + 0.3 + 0.9 * TIMEOUT_S + 2.0  # pauses above are jumps


@given(worlds())
def test_where_all_tiers_answer_in_time_nothing_is_left_unfound(
    given_world: tuple[World, list[bool], set[int]],
) -> None:
    world, _, host = given_world
    for tier in world.tiers:
        tier.delays = [FAST_S]
    assert world.answer()[0] == prefix(world.tiers, world.names, host)


# Expectations, removals and checks, while a tier hangs


@pytest.mark.parametrize("delays", [(0.3, 0.3), (2.0, 0.6), (9.0, 9.0)])
def test_two_late_tiers_in_front_of_a_fast_one_do_not_hide_its_chunks(
    delays: tuple[float, float],
) -> None:
    world = World([*(Tier(delays=[delay]) for delay in delays), Tier()])
    world.hold(2, range(3))
    found, outcome, seconds = world.answer()
    assert (found, outcome) == (3, ANSWERED)
    assert seconds <= TIMEOUT_S


# Expected chunks


def test_lookup_that_expects_chunks_reports_each_that_lands() -> None:
    world = World([Tier()])
    world.ask(expect=3, expect_s=10.0)
    for chunk in range(3):
        world.run(lambda: False, 0.5)
        assert world.progress[-1][:2] == (1, chunk)
        world.hold(0, [chunk])
    world.run()
    result, _ = world.results[1]
    assert (result.found_chunks, result.lacks_expected) == (3, False)
    assert [found for _, found, _ in world.progress] == [0, 1, 2]


@pytest.mark.parametrize("waited_s", [0.05, 0.5, 2.0, 8.0])
def test_missing_chunk_is_asked_for_after_a_tenth_of_the_time_waited(waited_s: float) -> None:
    world = World([Tier()])
    began = world.now
    world.ask(expect=1, expect_s=10.0)
    world.run(lambda: False, waited_s)
    world.now = max(world.now, began + waited_s)
    world.hold(0, [0])
    world.run()
    _, at = world.results[1]
    assert at - began <= waited_s * 1.1 + 3 * FAST_S


@pytest.mark.parametrize(("expect", "hole"), [(3, 1), (NUM_CHUNKS, 6)])
def test_later_chunk_that_lands_first_is_not_reported(expect: int, hole: int) -> None:
    """Every cell of many chunks is asked for, too: no sample stands for a whole chunk."""
    world = World([Tier()])
    world.ask(expect=expect, expect_s=10.0)
    for number in range(len(PLAIN.of_chunk(HASHES[hole]))):  # each cell of the hole alone
        cells = slice(number, number + 1)
        world.hold(0, [chunk for chunk in range(expect) if chunk != hole])
        world.tiers[0].keys.difference_update(PLAIN.of_chunk(HASHES[hole]))
        world.hold(0, [hole], cells)
        world.run(lambda: False, 0.5)
    assert [found for _, found, _ in world.progress] == [0, hole]
    assert not world.results


@pytest.mark.parametrize("is_asking", [False, True])
@pytest.mark.parametrize(("stored", "ended"), [(2, 2), (2, None), (0, 0), (1, 5)])
def test_lookup_ends_once_its_producer_has_ended(
    is_asking: bool, stored: int, ended: int | None
) -> None:
    """The last stored chunks are found, even with a question under way when the producer ended."""
    world = World([Tier(delays=[0.02])])
    world.ask(expect=5, expect_s=10.0)
    world.run(lambda: bool(world._running) is is_asking and world.now > 100.1, 1.0)
    world.hold(0, range(stored))
    at = world.now
    world.core.produced(1, at, ended or 0, ended, is_lost=ended is None)
    world.turn()
    world.run()
    result, ended_at = world.results[1]
    assert (result.found_chunks, result.lacks_expected) == (stored, True)
    assert result.has_lost_producer is (ended is None)
    assert ended_at - at <= 0.1


def test_lookup_waits_for_chunks_that_its_producer_is_still_storing() -> None:
    """A request may end before its puts. The chunks of its planned saves are still to come."""
    world = World([Tier()])
    world.ask(expect=5, expect_s=10.0)
    world.core.produced(1, world.now, 0, 5)
    world.run(lambda: False, 1.0)
    assert not world.results
    world.hold(0, range(5))
    at = world.now
    world.core.produced(1, at, 5, 5)
    world.turn()
    world.run()
    result, ended_at = world.results[1]
    assert (result.found_chunks, result.lacks_expected) == (5, False)
    assert ended_at - at <= 0.1


def test_hint_of_the_producer_is_followed_at_once() -> None:
    world = World([Tier()])
    began = world.now
    world.ask(expect=2, expect_s=10.0)
    world.run(lambda: world.now > began + 5 and not world._running, 6.0)
    world.hold(0, range(2))
    at = world.now
    num_calls = world.tiers[0].num_calls
    world.core.produced(1, at)  # nothing new
    world.turn()
    assert world.tiers[0].num_calls == num_calls
    world.core.produced(1, at, 1)
    world.turn()
    world.run()
    assert world.results[1][1] - at <= 3 * FAST_S
    world.core.produced(1, world.now, 2)  # late
    world.core.produced(99, world.now, 3)  # of no lookup
    assert len(world.results) == 1


def test_store_is_asked_four_times_a_second_while_its_producer_tells_what_it_stores() -> None:
    world = World([Tier()])
    world.ask(expect=2, expect_s=10.0)
    world.core.produced(1, world.now)
    world.turn()
    num_calls = world.tiers[0].num_calls
    world.run(lambda: False, 1.0)
    assert world.tiers[0].num_calls - num_calls <= 4
    world.hold(0, range(2))
    at = world.now
    world.run()  # no notice comes
    assert world.results[1][1] - at <= POLL_MAX_S + 3 * FAST_S


def test_forged_end_of_the_producer_costs_what_is_not_stored_yet() -> None:
    world = World([Tier()])
    world.hold(0, range(1))
    world.ask(expect=3, expect_s=10.0)
    world.core.produced(1, world.now, 0, 0)
    world.turn()
    world.run()
    assert world.results[1][0].found_chunks == 1


def test_prompt_end_is_found_as_one_more_chunk() -> None:
    tokens = TOKENS[: 2 * CHUNK + 1]
    chain = chain_of(tokens)
    end = chain.end(tokens)
    assert end is not None
    world = World([Tier()])
    world.hold(0, range(2))
    lookup = Lookup(*(1, RequestIdentity, tokens, True, 1 << 30, 110.0, 110.45), seeks_end=True)
    world.core.open(lookup, chain, world.now, end)
    world.turn()
    world.run(lambda: False, 0.5)
    assert [found for _, found, _ in world.progress] == [0, 2]
    world.tiers[0].keys.update(PLAIN.of_chunk(end))
    world.run()
    result, _ = world.results[1]
    assert (result.found_chunks, result.expected_chunks) == (3, 3)
    assert result.tail == Tail(2, end, 1, 1)


def test_what_is_expected_is_found_in_a_near_tier_while_a_far_one_hangs() -> None:
    world = World([Tier(), Tier(delays=[9.0])])
    began = world.now
    world.ask(expect=5, expect_s=10.0)
    world.run(limit_s=1.0)
    assert not world.results
    world.hold(0, range(5))
    world.run(lambda: bool(world.results))
    assert world.results[1][0].found_chunks == 5
    assert world.now < began + 1.2


def test_what_is_expected_is_found_in_a_slow_tier() -> None:
    """Two rounds of the slow tier take longer than the interval of the near tier's polls."""
    world = World([Tier(), Tier(delays=[0.2])])
    world.ask(expect=10, expect_s=10.0)
    world.run(limit_s=1.0)
    world.hold(1, range(10))
    began = world.now
    world.run(lambda: bool(world.results))
    assert world.results[1][0].found_chunks == 10
    assert world.now - began < 1.0


def test_a_tier_that_hangs_does_not_keep_others_from_being_emptied() -> None:
    world = World([Tier(delays=[9.0]), Tier()])
    for tier in range(2):
        world.hold(tier, range(3))
    world.ask()
    removed: list[bool] = []
    world.core.remove_all(removed.append, ("",), world.now)
    world.turn()
    world.run(limit_s=1.0)
    assert not world.tiers[1].keys
    assert removed == []
    world.run()
    assert not world.tiers[0].keys
    assert removed == [True]


def test_what_was_known_before_a_removal_is_not_believed() -> None:
    world = World([Tier(), Tier(delays=[0.3])])
    world.hold(0, range(5))
    world.ask()
    world.run(lambda: world.tiers[1].num_calls == 1)
    world.core.remove_all(lambda removed: None, ("",), world.now)
    world.turn()
    world.run(lambda: bool(world.results))
    assert world.results[1][0].found_chunks == 0


@example([])
@given(st.lists(st.sampled_from(["ask", "forget", "remove", "wait", "host"]), max_size=12))
def test_whatever_comes_everybody_is_told_once(messages: list[str]) -> None:
    world = World([Tier(), Tier(delays=[0.3, 9.0, None, FAST_S])], host_ranks=1)
    world.hold(1, range(NUM_CHUNKS))
    removed: list[bool] = []
    for number, message in enumerate(messages):
        if message == "ask":
            world.ask(number, expect=number, expect_s=0.2 * (number % 2))
        elif message == "forget":
            world.core.cancel(number - 1)
        elif message == "remove":
            world.core.remove_all(removed.append, ("",), world.now)
        elif message == "host":
            world.host.apply(0, HostCacheChange((PLAIN.chunk_id(HASHES[0]),), ()))
        else:
            world.run(limit_s=0.4)
            world.now += 0.1
        world.turn()
    world.run()
    assert len(removed) == messages.count("remove")
    assert not world.core._open
    assert len(world.results) >= messages.count("ask") - messages.count("forget")


# The search of one lookup


@given(st.integers(0, 1 << 32))
def test_what_tiers_have_together_is_found_whichever_answers_fails_or_is_put_off(seed: int) -> None:
    random = Random(seed)
    hashes = [bytes([chunk]) * 20 for chunk in range(200)]
    stored = random.randint(0, len(hashes))
    tiers: list[set[CellKey]] = [set() for _ in range(random.randint(1, 3))]
    for key in (key for chunk in hashes[:stored] for key in PLAIN.of_chunk(chunk)):
        having = [tier for tier in tiers[:-1] if random.random() < 0.9]
        for tier in having or tiers[-1:]:
            tier.add(key)
    search = TieredSearch(
        len(hashes),
        lambda: HitSearch(len(hashes), PLAIN.layer_groups, CHUNK, CHUNK),
        lambda questions: PLAIN.of_questions(questions, hashes),
        range(len(tiers)),
    )
    mishaps = random.randint(0, 4)
    calls: dict[int, list[CellKey]] = {}  # under way
    while not search.done or search.has_failed:
        if search.done or (mishaps and random.random() < 0.05):
            search.restart(range(len(tiers)))
            continue
        # Mostly far ones: then near ones are asked several rounds in a call.
        tier = max(random.choices(search.waits_for, k=4))
        if tier not in calls:
            calls[tier] = search.take_wanted(tier)
        elif mishaps and random.random() < 0.3:
            mishaps -= 1
            del calls[tier]
            search.failed(tier)
        elif mishaps and random.random() < 0.2:
            mishaps -= 1
            search.defer()
        else:
            search.take_answer(tier, [key in tiers[tier] for key in calls.pop(tier)])
    assert search.found == stored
