"""The scheduler side: what is asked, offered, loaded and saved for each request."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.buffers import make_buffer
from tests.support.fakes import FakeClock, FakePins, FakeRequest, PatientLookups
from tests.support.faults import Fault, FaultyStore
from tests.support.invariants import check
from tests.support.memory_store import MemoryStore
from vllm_kvpool.cli.explain import RequestReport, reports
from vllm_kvpool.config import KVPoolConfig, KVRole, LoadPolicy, RequestOptions
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler import pool_scheduler as scheduler_module
from vllm_kvpool.scheduler.aliases import Aliases
from vllm_kvpool.scheduler.blocks import GroupTables, all_blocks
from vllm_kvpool.scheduler.loads import IDLE_WAIT_MAX_S
from vllm_kvpool.scheduler.lookup import Lookup, LookupOutcome, LookupResult
from vllm_kvpool.scheduler.lookup_service import LOOKUP_TIMEOUT_S, LookupService
from vllm_kvpool.scheduler.messages import Loaded, StepPlan, StepReport, Stored
from vllm_kvpool.scheduler.pool_scheduler import (
    FETCH_S,
    FETCH_WAIT_S,
    STREAM_WAIT_S,
    WATCHED_WAIT_S,
    PoolScheduler,
)
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.request import (
    OwnKV,
    PoolShape,
    RequestLookup,
    RequestState,
    ScheduledStep,
)
from vllm_kvpool.scheduler.states import AdmissionState
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.transfer.ops import (
    NULL_BLOCK,
    HandOverEnd,
    HostCacheChange,
    JobId,
    JobPages,
    Landed,
    LoadPlan,
    PrefetchPlan,
    SavePlan,
)

CHUNK = 32
LAYER_GROUPS = (LayerGroup(Topology(1, 1, ((0, 1),), 1), row_bytes=16),)
NAMES = CellNames(make_namespace("model", "0" * 12), LAYER_GROUPS)
LIMIT_S = 30.0
PENDING, NOTHING = (None, False), (0, False)
View = FakeRequest[RequestOptions, RequestIdentity]


def hashes_of(tokens: Sequence[int]) -> list[bytes]:
    chain = ChunkChain(CHUNK, RequestIdentity())
    chain.extend(tokens)
    return chain.hashes


class Bench:
    """A scheduler over a real lookup service and a store of the test's. Time stands still."""

    def __init__(
        self,
        block: int = 16,
        role: KVRole = KVRole.BOTH,
        num_ranks: int = 1,
        max_pinned: int = 1000,
        config: KVPoolConfig | None = None,
        host_tier: bool = False,
        stops_at_first: bool = False,
        in_lockstep: bool = False,
        num_replicas: int = 1,
        can_save: Callable[[], bool] = lambda: True,
        names: CellNames = NAMES,
        has_ends: bool = False,
        alias_step: int = 0,
    ) -> None:
        self.block = block
        self.names = names
        self.num_replicas, self.num_ranks = num_replicas, num_ranks
        self.memory = MemoryStore("", 1 << 24)
        self.store = FaultyStore(self.memory)
        self.aliases = None
        if alias_step:
            self.aliases = Aliases((self.store,), (0,), names, CHUNK, alias_step, answer_s=LIMIT_S)
            for writer in self.aliases._writers:  # at once, so that a run can be repeated
                writer.post = writer._perform  # type: ignore[method-assign]
        host_ranks = num_ranks if host_tier else 0
        self.lookups = PatientLookups((self.store,), names, CHUNK, host_ranks, aliases=self.aliases)
        self.clock = FakeClock(time.monotonic())
        self.registry = MetricsRegistry()
        self.pins = FakePins()
        self.scheduler = PoolScheduler(
            config or KVPoolConfig(),
            role,
            PoolShape(
                CHUNK,
                (KVCacheGroup(block),),
                num_ranks,
                max_pinned,
                num_replicas,
                prefetches=host_tier,
                stops_at_first=stops_at_first,
                in_lockstep=in_lockstep,
                has_ends=has_ends or alias_step > 0,
                alias_step=alias_step,
            ),
            self.lookups,
            self.registry,
            self.pins,
            self.clock,
            can_save,
        )
        self.views: dict[str, View] = {}
        self.tables: dict[str, list[int]] = {}
        self.next_block = 1
        self.preempted: Sequence[str] = ()

    # The store

    def hold(self, tokens: Sequence[int], chunks: range) -> None:
        buffer = make_buffer(1)
        for chunk in chunks:
            keys = self.names.of_chunk(hashes_of(tokens)[chunk])
            self.memory.put(keys, [buffer] * len(keys), [ChunkRef("")] * len(keys))

    # The engine

    def add(
        self,
        request_id: str = "a",
        num_tokens: int = 100,
        options: RequestOptions | None = None,
        shared: int = 1 << 30,
        **traits: Any,
    ) -> View:
        """A request whose prompt is 0, 1, 2, …, with other tokens behind the first `shared`."""
        view: View = FakeRequest(
            request_id,
            [token if token < shared else 1000 + token for token in range(num_tokens)],
            options or RequestOptions(),
            RequestIdentity(),
            **traits,
        )
        self.views[request_id] = view
        self.tables[request_id] = []
        self.scheduler.add(view)
        check(self.scheduler)
        return view

    def match(self, request_id: str = "a", num_computed: int = 0) -> tuple[int | None, bool]:
        """The answer to come; the lookup is waited for."""
        while (offer := self.scheduler.match(request_id, num_computed)) == PENDING:
            answered = len(self.lookups._results)
            self.lookups.wait(LIMIT_S)
            assert self.lookups._results or answered, "no answer"
        check(self.scheduler)
        return offer

    def grow(self, request_id: str, num_tokens: int) -> None:
        table = self.tables[request_id]
        while len(table) * self.block < num_tokens:
            table.append(self.next_block)
            self.next_block += 1

    def allocate(self, request_id: str, computed: int, external: int) -> None:
        self.grow(request_id, computed + external)
        tables = (self.tables[request_id],) if external else ()
        self.scheduler.allocated(request_id, tables, external)
        self.views[request_id].num_computed_tokens = computed + external
        check(self.scheduler)

    def step(self, **scheduled: int) -> StepPlan:
        """An engine step that computes so many tokens of each request."""
        for request_id, count in scheduled.items():
            self.grow(request_id, self.views[request_id].num_computed_tokens + count)
        step = ScheduledStep(scheduled, lambda name: (self.tables[name],), self.preempted)
        plan = self.scheduler.plan_step(step)
        for request_id, count in scheduled.items():
            self.views[request_id].num_computed_tokens += count
        check(self.scheduler)
        self.pins.check()
        return plan

    def admit(self, request_id: str = "a") -> tuple[int | None, bool]:
        """Match and allocate; what is offered is not yet loaded."""
        offer = self.match(request_id)
        self.allocate(request_id, 0, offer[0] or 0)
        return offer

    def loading(self, stored: int, **traits: Any) -> View:
        """A request whose load of so many stored chunks has been planned."""
        self.hold(range(1000), range(stored))
        view = self.add(**traits)
        self.admit(view.request_id)
        self.step()
        return view

    def block_lookup(self, request_id: str = "a") -> View:
        """A request whose lookup hangs in the store."""
        self.store.inject(Fault.BLOCKED, "exists")
        view = self.add(request_id)
        assert self.store.entered.wait(LIMIT_S)
        return view

    def gather(self, plan: StepPlan, ranks: int = 1) -> None:
        self.scheduler.apply(StepReport(gathered={s.job_id: ranks for s in plan.saves}))
        check(self.scheduler)

    def stored(self, *saves: SavePlan) -> None:
        """Every rank says that a store has all cells of the saves."""
        how = Stored(self.num_ranks, frozenset({0}))
        self.scheduler.apply(StepReport(stored={save.job_id: how for save in saves}))

    def load_stops(self, request_id: str, tokens: int, seconds: float = 0.0) -> None:
        self.scheduler.apply(StepReport(loads={request_id: Loaded(tokens, seconds)}))
        self.scheduler.load_ended(request_id)
        self.views[request_id].num_computed_tokens = tokens // self.block * self.block
        check(self.scheduler)

    def finish(self, request_id: str = "a") -> dict[str, dict[str, Any]] | None:
        answer = self.scheduler.finish(request_id, (self.tables[request_id],))
        check(self.scheduler)
        return answer

    def settle(self) -> StepPlan:
        """Let the lookup service answer what it has been asked, and take it."""
        self.lookups.wait(LIMIT_S)
        assert self.lookups._results, "no answer"
        return self.step()

    def take_answers(self) -> None:
        """Have every lookup answered without a step: another request's `match` takes them."""
        while self.scheduler._lookups._open:
            self.lookups.wait(LIMIT_S)
            assert self.lookups._results, "no answer"
            self.scheduler._take_answers()

    def end_reset(self) -> None:
        """A rank says that it knows, and the namespace is removed once more."""
        self.scheduler.apply(StepReport(dropped={self.scheduler._validity.reset.generation: 1}))
        self.lookups.submit(Lookup(-1, RequestIdentity, range(CHUNK), True, 0, 0.0, 0.0))
        self.settle()

    def counts(self, name: str) -> dict[str, float]:
        return {
            k.removeprefix(name): v
            for k, v in self.registry.snapshot().items()
            if k.startswith(name)
        }

    def save(self, job: int, chunks: range, request_id: str = "a") -> SavePlan:
        """The save of those chunks, as it should be planned."""
        start, stop = chunks.start * CHUNK // self.block, -(-chunks.stop * CHUNK // self.block)
        hashes = hashes_of(self.views[request_id].tokens())
        return SavePlan(
            JobId(job),
            request_id,
            chunks.start,
            tuple(hashes[chunks.start : chunks.stop]),
            (
                JobPages(
                    tuple(self.tables[request_id][start:stop]),
                    start * self.block,
                    chunks.start * CHUNK,
                    chunks.stop * CHUNK,
                ),
            ),
            before=tuple(hashes[max(0, chunks.start - self.num_replicas) : chunks.start]),
        )


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.store.heal()
        assert bench.lookups.close()


class Maker:
    def __init__(self, made: list[Bench]) -> None:
        self._made = made

    def __call__(self, **arguments: object) -> Bench:
        self._made.append(Bench(**arguments))  # type: ignore[arg-type]
        return self._made[-1]


@pytest.fixture
def make(benches: list[Bench]) -> Maker:
    return Maker(benches)


@pytest.fixture
def bench(make: Maker) -> Bench:
    return make()


# Lookups and offers


def test_a_lookup_is_pending_until_the_store_answers(bench: Bench) -> None:
    bench.hold(range(1000), range(3))
    bench.add()
    bench.block_lookup("b")
    assert bench.scheduler.match("b", 0) == PENDING
    assert bench.scheduler.match("b", 0) == PENDING
    bench.store.release()
    assert bench.match("b") == (96, True)
    assert bench.match("b") == (96, True)  # asked again, the answer is at hand
    assert bench.store.calls["exists"] <= 4


@dataclass
class Waits:
    """How often the scheduler's thread waits for lookups, and for how long at most."""

    seconds: list[float] = field(default_factory=list)
    until: Callable[[], bool] | None = None

    @classmethod
    def of(cls, bench: Bench) -> "Waits":
        """From now on, instead of the bench's own."""
        made = cls()
        bench.lookups.wait = made.wait  # type: ignore[method-assign]
        return made

    def wait(self, timeout_s: float, until: Callable[[], bool] | None = None) -> bool:
        self.seconds.append(timeout_s)
        self.until = until
        return False


@pytest.fixture
def waits(bench: Bench) -> Waits:
    return Waits.of(bench)


def test_an_idle_engine_waits_once_a_step_however_many_lookups_are_pending(
    bench: Bench, waits: Waits
) -> None:
    bench.store.inject(Fault.BLOCKED, "exists")
    names = [f"r{number}" for number in range(64)]
    for name in names:
        bench.add(name)
    for number in range(1, 4):
        for name in names:
            assert bench.scheduler.match(name, 0) == PENDING
        assert len(waits.seconds) == number - 1  # nobody waits in `match`
        bench.step()
    assert all(0 < seconds <= IDLE_WAIT_MAX_S for seconds in waits.seconds)
    bench.clock.advance(1)
    assert all(bench.scheduler.match(name, 0) == NOTHING for name in names)
    bench.step()
    assert len(waits.seconds) == 3


def has_none() -> bool:
    return False


def test_engine_that_sees_arrivals_waits_for_them_as_well(bench: Bench, waits: Waits) -> None:
    """Nothing is held up by the wait, so it lasts until the first request's lookup times out."""
    bench.scheduler._has_arrivals = has_none
    bench.store.inject(Fault.BLOCKED, "exists")
    for name in ("a", "b"):
        bench.add(name)
        assert bench.scheduler.match(name, 0) == PENDING
        bench.clock.advance(LOOKUP_TIMEOUT_S / 4)
    bench.step()
    assert waits.seconds == [pytest.approx(LOOKUP_TIMEOUT_S / 2)]
    assert waits.until is has_none


def test_idle_step_ends_in_time_for_a_lookup_that_is_not_opened_yet(
    bench: Bench, waits: Waits
) -> None:
    """An adapter that is read for longer than the lookup may take held its request for 30 s."""
    may_end = threading.Event()

    def read_adapter() -> RequestIdentity:
        may_end.wait(LIMIT_S)
        return RequestIdentity()

    bench.scheduler._has_arrivals = has_none
    bench.add(reads_files=True, identify=read_adapter)
    assert bench.scheduler.match("a", 0) == PENDING
    bench.step()
    (waited,) = waits.seconds
    bench.clock.advance(waited)
    assert bench.scheduler.match("a", 0) == NOTHING
    may_end.set()


def test_idle_step_waits_on_if_vllm_does_not_ask_for_a_request_in_time(
    bench: Bench, waits: Waits
) -> None:
    """Steps that wait no time at all would spin."""
    bench.scheduler._has_arrivals = has_none
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add()
    assert bench.scheduler.match("a", 0) == PENDING
    bench.clock.advance(LOOKUP_TIMEOUT_S)
    bench.step()
    assert waits.seconds == [WATCHED_WAIT_S]


def test_stream_is_followed_closely_until_its_chunks_are_fetched(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load may end early, which the engine hears of in a step: while chunks are fetched, soon."""
    bench.hold(range(1000), range(1))
    bench.add(options=RequestOptions(expect_tokens=2 * CHUNK, expect_timeout_ms=60_000))
    assert bench.admit() == (2 * CHUNK, True)
    (load,) = bench.step().loads
    assert load.landed_stop == 1
    waits = Waits.of(bench)
    bench.scheduler._has_arrivals = has_none
    bench.step()
    bench.clock.advance(2 * FETCH_S)
    bench.step()
    assert waits.seconds == [FETCH_WAIT_S, STREAM_WAIT_S]


def test_promise_is_offered_once_its_first_chunk_is_stored(bench: Bench) -> None:
    """Until then it needs no blocks, and no step."""
    bench.add(options=RequestOptions(expect_tokens=2 * CHUNK))
    while (state := bench.scheduler._requests["a"]).chain is None:
        bench.lookups.wait(LIMIT_S)
        bench.scheduler._take_answers()
    assert state.answer.expected_chunks == 2
    assert bench.scheduler.match("a", 0) == PENDING
    assert bench.counts("kvpool_promised_blocks") == {}
    bench.hold(range(1000), range(1))
    assert bench.match() == (2 * CHUNK, True)


def test_chunk_that_lands_in_a_waiting_step_is_in_its_plan(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.hold(range(1000), range(1))
    bench.add(options=RequestOptions(expect_tokens=2 * CHUNK))
    bench.admit()
    bench.scheduler._has_arrivals = has_none
    (load,) = bench.step().loads
    wait = bench.lookups.wait

    def wait_while_it_lands(timeout_s: float, until: Callable[[], bool]) -> bool:
        bench.hold(range(1000), range(1, 2))
        return wait(LIMIT_S, until)

    monkeypatch.setattr(bench.lookups, "wait", wait_while_it_lands)
    (landed,) = bench.step().landed
    assert landed[:2] == (load.job_id, 2)


def test_lookup_that_has_found_nothing_yet_ends_no_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add(options=RequestOptions(expect_tokens=2 * CHUNK))
    assert bench.scheduler.match("a", 0) == PENDING
    bench.scheduler._has_arrivals = has_none
    wait = bench.lookups.wait
    waited: list[float] = []

    def wait_for_chain(timeout_s: float, until: Callable[[], bool]) -> bool:
        waited.append(timeout_s)
        return len(waited) == 1 and wait(LIMIT_S, until)

    monkeypatch.setattr(bench.lookups, "wait", wait_for_chain)
    bench.step()
    assert len(waited) == 2


@pytest.mark.parametrize("is_preempted", [False, True])
def test_first_step_without_work_waits_unless_results_may_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_preempted: bool
) -> None:
    if is_preempted:  # its results of the step before may be under way
        view = bench.add(options=RequestOptions(save=False))
        assert bench.admit() == NOTHING
        bench.step(a=100)
        view.preempt()
    bench.store.inject(Fault.BLOCKED, "exists")
    if not is_preempted:
        bench.add()
    bench.scheduler._idle = False
    bench.scheduler._has_arrivals = has_none
    waits = Waits.of(bench)
    assert bench.scheduler.match("a", 0) == PENDING
    bench.step()
    assert waits.seconds == ([] if is_preempted else [pytest.approx(LOOKUP_TIMEOUT_S)])


def test_request_that_has_its_answer_keeps_waits_short(bench: Bench, waits: Waits) -> None:
    """A step of it may be under way, or another connector loads it."""
    bench.scheduler._has_arrivals = has_none
    bench.add("a", options=RequestOptions(load=False, save=False))
    assert bench.scheduler.match("a", 0) == NOTHING
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add("b")
    assert bench.scheduler.match("b", 0) == PENDING
    bench.step()
    assert len(waits.seconds) == 1
    assert waits.seconds[0] <= IDLE_WAIT_MAX_S
    bench.scheduler.finish("a", ([],))
    bench.step()
    assert waits.seconds[1:] == [pytest.approx(LOOKUP_TIMEOUT_S)]


def test_save_whose_end_is_awaited_keeps_waits_short(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are freed, and its outcome is counted, in a later step."""
    bench.scheduler._has_arrivals = has_none
    bench.add("a")
    bench.admit("a")
    (save,) = bench.step(a=100).saves
    bench.scheduler.finish("a", ([],))
    waits = Waits.of(bench)
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add("b")
    assert bench.scheduler.match("b", 0) == PENDING
    bench.step()
    bench.step()
    assert all(seconds <= IDLE_WAIT_MAX_S for seconds in waits.seconds)
    bench.scheduler.apply(
        StepReport(gathered={save.job_id: 1}, stored={save.job_id: Stored(1, frozenset({0}))})
    )
    bench.step()
    assert waits.seconds[-1] == pytest.approx(LOOKUP_TIMEOUT_S)


def test_last_save_of_a_hand_over_that_is_dropped_ends_it_where_the_save_begins(
    bench: Bench,
) -> None:
    """The workers hear of the end that was planned, and of the earlier one that holds."""
    view = bench.add(options=RequestOptions(hand_over=True))
    assert bench.admit() == NOTHING
    assert bench.step(a=CHUNK).saves
    bench.grow("a", 3 * CHUNK)
    view.num_computed_tokens = 3 * CHUNK
    bench.finish()
    bench.scheduler.saves.drop_late()
    plan = bench.step()
    assert not plan.saves
    assert [(end.found, end.chunks) for end in plan.hand_over_ends] == [(0, 3), (1, 1)]
    assert not bench.step().hand_over_ends


def test_request_that_is_not_handed_over_has_no_topic(bench: Bench) -> None:
    for is_handed_over in (False, True):
        bench.add(options=RequestOptions(hand_over=is_handed_over))
        bench.admit()
        (save, *_) = bench.step(a=100).saves
        assert bool(save.topic) is is_handed_over
        bench.finish()
        assert bool(bench.step().hand_over_ends) is is_handed_over


def test_end_of_a_hand_over_is_not_held_up_by_a_wait(bench: Bench, waits: Waits) -> None:
    bench.scheduler._has_arrivals = has_none
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add("b")
    assert bench.scheduler.match("b", 0) == PENDING
    bench.scheduler.saves._hand_over_ends.append(HandOverEnd("a", b"t" * 20, 0, 0))
    assert bench.step().hand_over_ends
    assert not waits.seconds


def test_a_busy_engine_does_not_wait_for_lookups(bench: Bench, waits: Waits) -> None:
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add("b")
    bench.add("a", options=RequestOptions(load=False, save=False))
    bench.step(a=1)
    bench.step()  # what it computes may still be under way
    assert waits.seconds == []
    bench.step()
    assert len(waits.seconds) == 1


def test_while_a_request_loads_the_workers_wait_alone(bench: Bench, waits: Waits) -> None:
    bench.hold(range(1000), range(2))
    bench.add("a")
    while bench.scheduler.match("a", 0) == PENDING:
        LookupService.wait(bench.lookups, LIMIT_S)
    bench.allocate("a", 0, 64)
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add("b")
    for _ in range(3):
        assert bench.step().idle
    assert waits.seconds == []


def test_an_engine_that_steps_with_others_never_waits(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data-parallel engines step together: one that waits, on either side, holds up all."""
    bench = make(in_lockstep=True)
    waits = Waits.of(bench)
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add()
    for _ in range(3):
        assert bench.scheduler.match("a", 0) == PENDING
        assert not bench.step().idle
    assert waits.seconds == []


@pytest.mark.parametrize(
    ("block", "prompt", "stored", "computed", "offer"),
    [
        (16, 100, 3, 0, (96, True)),
        (16, 100, 2, 0, (64, True)),
        (16, 100, 0, 0, NOTHING),
        (16, 100, 3, 32, (64, True)),
        (16, 100, 3, 48, (48, True)),
        (16, 100, 3, 80, (16, True)),
        (16, 100, 3, 96, NOTHING),  # the local prefix covers it
        (16, 100, 1, 64, NOTHING),
        (64, 100, 3, 0, (64, True)),  # floored to blocks
        (48, 100, 2, 0, (48, True)),
        (48, 100, 3, 48, (48, True)),
        (128, 200, 3, 0, NOTHING),
        (128, 200, 6, 0, (128, True)),
        (16, 96, 3, 0, (95, True)),  # a full hit computes its last token
        (16, 97, 3, 0, (96, True)),
        (16, 96, 3, 80, (15, True)),
        (32, 32, 1, 0, (31, True)),
        (16, 31, 0, 0, NOTHING),
        (16, 1, 0, 0, NOTHING),
    ],
)
def test_an_offer_is_whole_blocks_beyond_what_is_computed(
    make: Maker, block: int, prompt: int, stored: int, computed: int, offer: tuple[int, bool]
) -> None:
    bench = make(block=block)
    bench.hold(range(1000), range(stored))
    bench.add(num_tokens=prompt)
    assert bench.match(num_computed=computed) == offer


def test_what_was_offered_becomes_a_load_when_it_is_allocated(bench: Bench) -> None:
    bench.hold(range(1000), range(3))
    view = bench.add()
    assert bench.match(num_computed=32) == (64, True)
    assert bench.match(num_computed=48) == (48, True)
    assert bench.step().loads == ()
    bench.allocate("a", 48, 48)
    plan = bench.step()
    assert plan.loads == (
        LoadPlan(
            job_id=JobId(2),
            request_id="a",
            first_chunk=1,
            hashes=tuple(hashes_of(view.tokens())[1:3]),
            pages=(JobPages(tuple(bench.tables["a"][3:6]), 48, 48, 96),),
            token_start=48,
            token_stop=96,
            before=(hashes_of(view.tokens())[0],),
        ),
    )
    assert plan.idle
    assert bench.step().loads == ()


@pytest.mark.parametrize("external", [80, 16])
def test_an_offer_that_vllm_cuts_is_loaded_up_to_the_cut(bench: Bench, external: int) -> None:
    """vLLM 0.33 cuts hits to whole blocks where it computes the end of a prefix again."""
    bench.hold(range(1000), range(3))
    view = bench.add(num_tokens=96)
    assert bench.match() == (95, True)
    bench.allocate("a", 0, external)
    (load,) = bench.step().loads
    num_chunks = -(-external // CHUNK)
    assert (load.token_start, load.token_stop) == (0, external)
    assert load.hashes == tuple(hashes_of(view.tokens())[:num_chunks])
    assert load.pages == (JobPages(tuple(bench.tables["a"]), 0, 0, external),)
    bench.scheduler.load_ended("a")
    assert bench.counts("kvpool_hit_tokens") == {"": external}


def test_an_offer_that_vllm_does_not_take_loads_nothing(bench: Bench) -> None:
    """vLLM 0.33 may find that it lacks other outputs of the prefix."""
    bench.hold(range(1000), range(3))
    bench.add()
    assert bench.match() == (96, True)
    bench.allocate("a", 0, 0)
    plan = bench.step(a=100)
    assert (plan.loads, plan.saves) == ((), ())
    assert bench.finish() == {"kvpool": {"tokens": 96}}
    assert bench.step().loads == ()


def load_beside_one_without_blocks(make: Maker, *, stops_at_first: bool = True) -> Bench:
    """`b` has loaded and not run yet; there were no blocks for `a`, which was asked before it."""
    bench = make(stops_at_first=stops_at_first)
    bench.hold(range(1000), range(3))
    bench.add("a")
    bench.add("b")
    assert bench.match("a") == (96, True)
    assert bench.match("b") == (96, True)
    bench.allocate("b", 0, 96)
    bench.step()
    assert bench.match("a") == (96, True)  # as long as the load goes on nobody has to give way
    bench.add("c")
    bench.match("c")
    # It has not come so far in line.
    bench.scheduler._requests["c"].admission = AdmissionState.QUEUED
    bench.scheduler.load_ended("b")
    return bench


def test_a_request_without_blocks_gives_way_to_one_that_has_loaded(make: Maker) -> None:
    bench = load_beside_one_without_blocks(make)
    for _ in range(2):
        assert bench.scheduler.match("a", 0) == PENDING
    bench.allocate("b", 96, 0)
    bench.step(b=4)
    assert bench.match("a") == (96, True)
    bench.allocate("a", 0, 96)
    check(bench.scheduler)


def test_nobody_passes_a_request_that_gives_way_but_who_has_loaded(make: Maker) -> None:
    bench = load_beside_one_without_blocks(make)
    assert bench.match("c") == (96, True)  # it stands before it
    assert bench.scheduler.match("a", 0) == PENDING
    bench.scheduler._requests["c"].admission = AdmissionState.QUEUED
    assert bench.scheduler.match("c", 0) == PENDING
    bench.allocate("b", 96, 0)
    assert bench.match("c") == (96, True)  # nobody that has loaded is left
    bench.step(b=4)
    assert bench.match("a") == (96, True)


def test_nobody_gives_way_where_those_that_have_loaded_have_their_own_line(make: Maker) -> None:
    bench = load_beside_one_without_blocks(make, stops_at_first=False)
    assert bench.match("a") == (96, True)


@pytest.mark.parametrize("how", ["runs", "ends", "comes to nothing"])
def test_nobody_gives_way_where_something_runs_or_can(make: Maker, how: str) -> None:
    bench = load_beside_one_without_blocks(make)
    if how == "runs":
        bench.add("other", options=RequestOptions(load=False, save=False))
        bench.step(other=1)
    elif how == "ends":
        bench.finish("b")
    else:
        bench.match("b")
    assert bench.match("a") == (96, True)


def test_a_lookup_that_takes_too_long_is_a_miss(bench: Bench) -> None:
    bench.hold(range(1000), range(3))
    bench.block_lookup()
    bench.clock.advance(0.49)
    assert bench.scheduler.match("a", 0) == PENDING
    bench.clock.advance(0.01)
    assert bench.scheduler.match("a", 0) == NOTHING
    assert bench.counts("kvpool_lookups") == {"{outcome=timed_out}": 1}


def test_an_answer_that_is_just_too_late_says_what_to_save(bench: Bench) -> None:
    bench.block_lookup()
    bench.clock.advance(1)
    assert bench.scheduler.match("a", 0) == NOTHING
    bench.allocate("a", 0, 0)
    bench.store.release()
    bench.settle()
    assert bench.step(a=100).saves == (bench.save(2, range(3)),)


def test_a_request_whose_lookup_was_too_late_is_saved(bench: Bench) -> None:
    bench.block_lookup("a")
    bench.add("b")
    bench.clock.advance(1)
    assert bench.scheduler.match("a", 0) == bench.scheduler.match("b", 0) == NOTHING
    bench.allocate("b", 0, 0)
    bench.store.release()
    bench.settle()
    while "b" not in bench.scheduler.saves._until_due:
        bench.settle()
    assert len(bench.step(b=100).saves) == 1


def test_a_store_that_fails_is_a_miss_and_the_request_is_saved(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.store.inject(Fault.UNREACHABLE, "exists", times=1)
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.scheduler.lookup_service"):
        bench.add()
        assert bench.admit() == NOTHING
    assert bench.step(a=100).saves == (bench.save(2, range(3)),)
    assert bench.counts("kvpool_miss_tokens") == {"{reason=store_error}": 100}


def landed_in(bench: Bench) -> list[Landed]:
    """Let lookups end, and return what the next plans say of streams, up to the last chunk."""
    landed: list[Landed] = []
    while not (landed and landed[-1].is_final):
        bench.lookups.wait(LIMIT_S)
        landed += bench.step().landed
    return landed


def test_expected_tokens_are_offered_before_they_are_stored(bench: Bench) -> None:
    bench.hold(range(1000), range(1))
    bench.add(options=RequestOptions(expect_tokens=2 * CHUNK + 5))
    assert bench.admit() == (2 * CHUNK, True)
    (load,) = bench.step().loads
    assert (load.token_stop, load.stop_chunk, load.end_tokens) == (2 * CHUNK, 2, 0)
    assert load.landed_stop in (0, 1)
    assert bench.counts("kvpool_promised_blocks") == {"": 4}
    bench.hold(range(1000), range(1, 2))
    landed = landed_in(bench)
    assert landed[-1] == Landed(load.job_id, 2, True)
    assert [each.stop_chunk for each in landed] == sorted({each.stop_chunk for each in landed})
    assert bench.counts("kvpool_promised_blocks") == {"": 0}


def test_expected_tokens_that_do_not_come_end_the_stream_where_they_stop(bench: Bench) -> None:
    bench.hold(range(1000), range(1))
    # The lookup service ends it, by its own clock; the scheduler would wait for longer.
    bench.add(options=RequestOptions(expect_tokens=2 * CHUNK, expect_timeout_ms=30))
    assert bench.admit() == (2 * CHUNK, True)
    assert landed_in(bench)[-1][1:3] == (1, True)


def test_lookup_that_ends_before_its_promise_is_allocated_ends_the_stream(bench: Bench) -> None:
    bench.hold(range(1000), range(1))
    bench.add(options=RequestOptions(expect_tokens=2 * CHUNK, expect_timeout_ms=30))
    assert bench.match() == (2 * CHUNK, True)
    bench.take_answers()
    bench.allocate("a", 0, 2 * CHUNK)
    plan = bench.step()
    (load,) = plan.loads
    assert load.landed_stop == 1
    assert plan.landed == (Landed(load.job_id, 1, True),)


@pytest.mark.parametrize(
    ("has_ends", "options", "is_whole"),
    [
        (True, {"expect_tokens": 1 << 30}, True),
        (True, {"expect_tokens": 101}, True),
        (True, {"expect_tokens": 100, "expect_end": True}, True),
        (True, {"expect_tokens": 100}, False),
        (True, {"expect_tokens": 99, "expect_end": True}, False),
        (False, {"expect_tokens": 1 << 30}, False),
    ],
)
def test_prompt_end_is_expected_where_it_will_be_stored(
    make: Maker, has_ends: bool, options: dict[str, Any], is_whole: bool
) -> None:
    stop, end_tokens = (99, 100 % CHUNK) if is_whole else (96, 0)
    bench = make(has_ends=has_ends)
    bench.hold(range(1000), range(1))
    bench.add(options=RequestOptions(**options))
    assert bench.admit() == (stop, True)
    (load,) = bench.step().loads
    assert (load.token_stop, load.end_tokens) == (stop, end_tokens)
    assert len(load.hashes) == -(-stop // CHUNK)
    assert load.hashes[:3] == tuple(hashes_of(range(96)))


@pytest.mark.parametrize("event", [PoolScheduler.reset, lambda each: each.weights_changed("x")])
def test_reset_or_new_weights_end_every_stream(
    bench: Bench, event: Callable[[PoolScheduler], object]
) -> None:
    bench.hold(range(1000), range(1))
    bench.add(options=RequestOptions(expect_tokens=2 * CHUNK))
    bench.admit()
    (load,) = bench.step().loads
    event(bench.scheduler)
    ((job_id, stop, is_final, _),) = bench.step().landed[-1:]
    assert (job_id, stop <= 1, is_final) == (load.job_id, True, True)
    assert bench.counts("kvpool_promised_blocks") == {"": 0}


def test_layered_load_waits_for_all_expected_tokens(make: Maker) -> None:
    bench = make(config=KVPoolConfig(layerwise=True))
    bench.hold(range(1000), range(1))
    bench.add(options=RequestOptions(expect_tokens=2 * CHUNK))
    bench.clock.advance(9)
    bench.lookups.wait(LIMIT_S)
    assert bench.scheduler.match("a", 0) == PENDING
    bench.hold(range(1000), range(1, 2))
    assert bench.match() == (64, False)


def test_prompt_in_the_engine_own_cache_is_not_waited_for(bench: Bench) -> None:
    bench.add(options=RequestOptions(expect_tokens=3 * CHUNK))
    assert bench.match(num_computed=96) == NOTHING
    assert not bench.scheduler._lookups._open


@pytest.mark.parametrize(("stored", "outcome"), [(2, "found"), (1, "missing"), (0, "missing")])
def test_expected_prompt_is_counted_by_source_and_outcome(
    bench: Bench, stored: int, outcome: str
) -> None:
    """A router learns from it which engines share a store, whatever a client asks to be told."""
    bench.hold(range(1000), range(stored))
    options = RequestOptions(
        expect_tokens=2 * CHUNK, expect_timeout_ms=30, expect_from="10.0.0.1:8000"
    )
    bench.add(options=options)
    bench.admit()
    bench.step()
    bench.take_answers()
    assert bench.counts("kvpool_expected_prompts") == {
        f"{{source=10.0.0.1:8000,outcome={outcome}}}": 1
    }


def test_expected_prompt_whose_lookup_hangs_is_counted_as_missing(make: Maker) -> None:
    bench = make(config=KVPoolConfig(layerwise=True))  # which does not stream
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add(options=RequestOptions(expect_tokens=CHUNK, expect_timeout_ms=30))
    assert bench.store.entered.wait(LIMIT_S)
    bench.clock.advance(0.6)
    assert bench.scheduler.match("a", 0) == NOTHING
    assert bench.counts("kvpool_expected_prompts") == {"{source=-,outcome=missing}": 1}


def test_expected_prompt_that_is_not_loaded_is_not_counted(bench: Bench) -> None:
    bench.add(options=RequestOptions(expect_tokens=CHUNK, load=False))
    bench.match()
    assert bench.counts("kvpool_expected_prompts") == {}


def test_preempted_request_does_not_wait_again_for_missing_tokens(make: Maker) -> None:
    bench = make(config=KVPoolConfig(layerwise=True))  # which does not stream
    bench.store.inject(Fault.BLOCKED, "exists")
    view = bench.add(options=RequestOptions(expect_tokens=CHUNK, expect_timeout_ms=30_000))
    assert bench.store.entered.wait(LIMIT_S)
    bench.clock.advance(30.6)
    assert bench.scheduler.match("a", 0) == NOTHING
    view.num_preemptions += 1
    assert bench.scheduler.match("a", 0) == PENDING
    bench.clock.advance(0.6)
    assert bench.scheduler.match("a", 0) == NOTHING
    assert bench.counts("kvpool_expected_prompts") == {"{source=-,outcome=missing}": 1}


# Who loads and who saves


@pytest.mark.parametrize(
    ("traits", "options", "offer", "saves"),
    [
        ({}, RequestOptions(), (32, True), 1),
        ({}, RequestOptions(load=False), NOTHING, 1),
        ({}, RequestOptions(save=False), (32, True), 0),
        ({}, RequestOptions(load=False, save=False), NOTHING, 0),
        ({"shareable": False}, RequestOptions(), NOTHING, 0),
        ({"reads_cache": False}, RequestOptions(), NOTHING, 1),
    ],
)
def test_a_request_takes_part_as_it_wishes_and_may(
    bench: Bench, traits: dict[str, bool], options: RequestOptions, offer: object, saves: int
) -> None:
    bench.hold(range(1000), range(1))
    bench.add(options=options, **traits)
    assert bench.admit() == offer
    if offer != NOTHING:
        bench.step()
        bench.scheduler.load_ended("a")
    plan = bench.step(a=100 - bench.views["a"].num_computed_tokens)
    assert len(plan.saves) == saves
    assert (bench.finish() is None) == (saves == 0)
    bench.gather(plan)


@pytest.mark.parametrize(
    ("role", "save_decode", "saves"),
    [
        (KVRole.PRODUCER, False, True),
        (KVRole.BOTH, False, True),
        (KVRole.CONSUMER, False, False),
        (KVRole.CONSUMER, True, True),
    ],
)
def test_roles_load_and_producers_save(
    make: Maker, role: KVRole, save_decode: bool, saves: bool
) -> None:
    bench = make(role=role, config=KVPoolConfig(save_decode=save_decode))
    bench.hold(range(1000), range(1))
    bench.add()
    assert bench.admit() == (32, True)
    bench.step()
    bench.scheduler.load_ended("a")
    assert bool(bench.step(a=68).saves) == saves


def test_a_request_without_an_identity_stays_out(bench: Bench) -> None:
    bench.hold(range(1000), range(3))
    view: View = FakeRequest("a", list(range(100)), RequestOptions(), None)
    bench.views["a"], bench.tables["a"] = view, []
    bench.scheduler.add(view)
    assert bench.admit() == NOTHING
    assert bench.step(a=100).saves == ()
    assert bench.finish() is None
    assert bench.counts("kvpool_miss_tokens") == {"{reason=unshareable}": 100}


def test_requests_with_an_adapter_are_left_out_when_it_is_replaced(bench: Bench) -> None:
    """Of a running one the rest is computed with the new one, of a waiting one perhaps all."""
    bench.hold(range(1000), range(1))
    for request_id in ("a", "b", "c"):
        bench.add(request_id)
        bench.views[request_id].reads_files = request_id != "c"
    assert bench.admit("a") == bench.admit("c") == (32, True)
    bench.step()
    bench.scheduler.load_ended("a")
    bench.scheduler.load_ended("c")
    bench.scheduler.adapter_was_replaced()
    assert bench.admit("b") == NOTHING
    assert {save.request_id for save in bench.step(a=68, c=68).saves} == {"c"}
    assert bench.finish("a") is bench.finish("b") is None


@pytest.mark.parametrize(
    ("own", "local", "saves"),
    [
        (OwnKV(), 32, True),
        (OwnKV(blocks=False), 0, True),
        (OwnKV(blocks=False), 32, False),
        (OwnKV(embeddings=False), 0, False),
    ],
)
def test_what_the_engines_own_caches_may_have_of_others_is_not_saved(
    bench: Bench, own: OwnKV, local: int, saves: bool
) -> None:
    """What the pool has of such a request is loaded all the same."""
    bench.hold(range(1000), range(2))
    bench.add()
    bench.views["a"].own = own
    assert bench.match("a", local) == (64 - local, True)
    bench.allocate("a", local, 64 - local)
    bench.step()
    bench.scheduler.load_ended("a")
    assert bool(bench.step(a=36).saves) is saves


def test_a_request_is_noted_as_it_is_admitted_and_not_before(bench: Bench) -> None:
    """By then its identity is read. It is noted whether it is shared or not: its blocks are found
    either way."""
    release = threading.Event()

    def identify() -> RequestIdentity:
        assert release.wait(LIMIT_S)
        return RequestIdentity()

    shared = bench.add("a", identify=identify)
    alone = bench.add("b", options=RequestOptions(load=False, save=False))
    assert (bench.scheduler.match("a", 0), bench.scheduler.match("b", 0)) == (PENDING, NOTHING)
    assert (shared.admissions, alone.admissions) == (0, 1)
    release.set()
    assert bench.admit("a") == NOTHING
    assert shared.admissions == 1


def test_what_is_unknown_is_answered_calmly(bench: Bench) -> None:
    assert bench.scheduler.match("x", 0) == NOTHING
    bench.scheduler.allocated("x", ((1,),), 16)
    bench.scheduler.load_ended("x")
    bench.scheduler.apply(StepReport(loads={"x": Loaded(0)}))
    assert bench.scheduler.finish("x", ()) is None
    assert bench.step() == StepPlan(idle=True)


def test_auto_loads_only_what_loading_brings_sooner(make: Maker) -> None:
    bench = make(config=KVPoolConfig(load_policy=LoadPolicy.AUTO))
    bench.hold(range(1000), range(3))
    bench.add()
    for request_id in ("b", "c"):
        bench.add(request_id)
        assert bench.admit(request_id) == (96, True)  # nothing is known yet
    bench.add("busy", num_tokens=1000, options=RequestOptions(load=False, save=False))
    bench.step(busy=500)
    bench.clock.advance(1)
    bench.step(busy=500)  # 500 tokens a second are computed
    bench.load_stops("b", 96, seconds=1.0)
    assert bench.match() == NOTHING
    bench.load_stops("c", 96, seconds=0.001)
    assert bench.match() == (96, True)


# Pins and times to live


def test_a_save_says_how_long_its_chunks_are_kept(bench: Bench) -> None:
    bench.add(options=RequestOptions(pin_s=2.0, ttl_s=5.0))
    bench.admit()
    before = time.time_ns()
    [save] = bench.step(a=100).saves
    pinned, expires = save.retention
    assert expires - pinned == 3 * 10**9
    assert 0 <= before - (pinned - 2 * 10**9) < LIMIT_S * 10**9


def test_plans_and_counts_say_whose_chunks_they_are(bench: Bench) -> None:
    bench.hold(range(1000), range(2))
    bench.add(tenant="team")
    assert bench.admit() == (64, True)
    [load] = bench.step().loads
    bench.scheduler.load_ended("a")
    [save] = bench.step(a=100 - bench.views["a"].num_computed_tokens).saves
    assert (load.tenant, save.tenant) == ("team", "team")
    bench.stored(save)
    counts = bench.registry.snapshot()
    assert counts["kvpool_tenant_tokens{tenant=team,direction=load}"] == 64
    assert counts["kvpool_tenant_tokens{tenant=team,direction=save}"] == 32


def test_a_pinned_request_saves_again_what_it_has_loaded(bench: Bench) -> None:
    bench.hold(range(1000), range(2))
    bench.add(options=RequestOptions(pin_s=2.0))
    assert bench.admit() == (64, True)
    bench.step()
    bench.scheduler.load_ended("a")
    [save] = bench.step(a=100 - bench.views["a"].num_computed_tokens).saves
    assert (save.first_chunk, len(save.hashes)) == (0, 3)


# Failed loads


@pytest.mark.parametrize(
    ("kept", "offer"), [(0, NOTHING), (31, (16, True)), (32, (32, True)), (70, (64, True))]
)
def test_after_a_failed_load_no_more_is_asked_for_than_came(
    bench: Bench, kept: int, offer: tuple[int, bool]
) -> None:
    bench.hold(range(1000), range(3))
    bench.add()
    assert bench.admit() == (96, True)
    bench.step()
    bench.load_stops("a", kept)
    assert bench.match() == offer
    assert bench.counts("kvpool_hit_tokens") == {"": kept}
    assert bench.counts("kvpool_miss_tokens{reason=load_failed}") == {"": 96 - kept}


def test_lookup_and_load_are_spans_of_the_request_s_trace(bench: Bench) -> None:
    view = bench.loading(2)
    bench.load_stops("a", 32, seconds=0.5)
    assert view.spans == [
        ("kvpool.lookup", 0.0, {"kvpool.outcome": "answered", "kvpool.found_tokens": 64}),
        ("kvpool.load", 0.5, {"kvpool.loaded_tokens": 32, "kvpool.wanted_tokens": 64}),
    ]


def test_a_lookup_that_is_late_is_a_span_as_well(bench: Bench) -> None:
    bench.store.inject(Fault.BLOCKED)
    view = bench.add()
    bench.clock.advance(LIMIT_S)
    assert bench.scheduler.match("a", 0) == NOTHING
    attributes = {"kvpool.outcome": "timed_out", "kvpool.found_tokens": 0}
    assert view.spans == [("kvpool.lookup", LIMIT_S, attributes)]
    bench.store.faults.heal()


def test_a_request_s_tokens_are_logged_on_demand_for_explain(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    for wanted in (True, False):
        bench = make(config=KVPoolConfig(log_requests=wanted))
        bench.hold(range(1000), range(2))
        bench.add()
        with caplog.at_level(logging.INFO, scheduler_module.__name__):
            caplog.clear()
            bench.admit()
            bench.step()
            bench.load_stops("a", 32)
        lines = [each.getMessage() for each in caplog.records]
        if not wanted:
            assert lines == []
            continue
        assert lines[0] == "kvpool: request a: prompt=100 to_load=64 absent=32 short=4"
        assert reports(lines, "a") == [
            RequestReport("a", 100, 64, 32, {"absent": 32, "short": 4, "load_failed": 32})
        ]


def test_what_could_not_be_loaded_is_computed_and_saved(bench: Bench) -> None:
    bench.loading(3)
    bench.load_stops("a", 40)
    assert bench.views["a"].num_computed_tokens == 32
    assert bench.step(a=68).saves == (bench.save(3, range(1, 3)),)


def test_a_preempted_request_is_offered_all_once_more_after_a_failed_load(bench: Bench) -> None:
    """What was missing it has computed, and saved, by then. After a second one it is offered what
    that has loaded."""
    view = bench.loading(3)
    bench.load_stops("a", 32)
    bench.gather(bench.step(a=68))
    view.preempt()
    assert bench.admit() == (96, True)
    bench.step()
    bench.load_stops("a", 64)
    bench.gather(bench.step(a=36))
    for _ in range(2):
        view.preempt()
        assert bench.match() == (64, True)


@pytest.mark.parametrize("missing", [0, 3, 7, 13])
def test_after_a_failed_load_every_cell_is_asked_for(missing: int) -> None:
    """A cell that is missing in the middle costs one load that fails, not two."""
    heads, num_tokens = 16, 15 * CHUNK
    names = CellNames(
        make_namespace("model", "0" * 12), [LayerGroup(Topology(heads, 1, ((0, 1),), 1), 16)]
    )
    bench = Bench(names=names)
    bench.hold(range(1000), range(15))
    view = bench.add("a", num_tokens + 4)
    # Of the cells of a chunk a lookup that samples asks for its number's, modulo their count.
    bench.memory.remove(names.of_chunk(hashes_of(view.tokens())[missing])[missing - 1 :][:1])
    assert bench.admit() == (num_tokens, True)
    bench.step()
    bench.load_stops("a", missing * CHUNK)
    view.preempt()
    assert bench.match() == ((missing * CHUNK, True) if missing else NOTHING)
    assert bench.lookups.close()


def test_a_full_load_counts_as_hit(bench: Bench) -> None:
    bench.loading(2)
    bench.scheduler.load_ended("a")
    bench.scheduler.load_ended("a")
    assert bench.counts("kvpool_hit_tokens") == {"": 64}
    assert bench.counts("kvpool_miss_tokens") == {"{reason=absent}": 32, "{reason=short}": 4}


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        (LookupOutcome.ANSWERED, "absent"),
        (LookupOutcome.TIMED_OUT, "timed_out"),
        (LookupOutcome.STORE_ERROR, "store_error"),
    ],
)
def test_what_was_not_found_counts_by_why(rest: LookupOutcome, reason: str) -> None:
    view: View = FakeRequest("a", list(range(100)), RequestOptions(), RequestIdentity())
    answer = LookupResult(1, None, 2, LookupOutcome.ANSWERED, miss_reason=rest)
    state = RequestState(view, True, True, lookup=RequestLookup(answer))
    assert state.missed_tokens(64, CHUNK) == [(reason, 32), ("short", 4)]


# Saves


def test_where_no_tier_takes_saves_nothing_is_planned_or_promised(make: Maker) -> None:
    """A request that comes once a tier takes them is saved."""
    is_writable: list[bool] = []
    bench = make(can_save=lambda: bool(is_writable))
    bench.hold(range(1000), range(2))
    bench.add("a")
    assert bench.admit("a") == (64, True)
    bench.step()
    bench.scheduler.load_ended("a")
    assert bench.step(a=36).saves == ()
    assert bench.finish("a") is None
    is_writable.append(True)
    bench.add("b")
    bench.admit("b")
    assert len(bench.step(b=36).saves) == 1
    assert bench.finish("b") == {"kvpool": {"tokens": 96}}


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_save_names_as_many_chunks_before_it_as_there_are_replicas(
    make: Maker, num_replicas: int
) -> None:
    """So that each rank finds the one before that it keeps itself."""
    bench = make(num_replicas=num_replicas)
    bench.add()
    bench.admit()
    hashes = hashes_of(bench.views["a"].tokens())
    for chunk in range(3):
        [save] = bench.step(a=CHUNK).saves
        assert save.before == tuple(hashes[max(0, chunk - num_replicas) : chunk])


def test_a_chunk_is_saved_by_the_step_that_completes_it(bench: Bench) -> None:
    bench.add()
    bench.admit()
    assert bench.step(a=31).saves == ()
    first, *_ = bench.step(a=1).saves
    assert first == bench.save(2, range(1))
    assert bench.step(a=10).saves == ()
    rest, *_ = bench.step(a=57).saves
    assert rest == bench.save(3, range(1, 3))
    assert bench.step(a=1).saves == ()
    assert bench.counts("kvpool_saved_tokens") == {}
    bench.stored(first, rest)
    assert bench.counts("kvpool_saved_tokens") == {"": 96}
    assert bench.finish() == {"kvpool": {"tokens": 96}}


def test_what_is_stored_is_not_saved(bench: Bench) -> None:
    bench.loading(2)
    bench.scheduler.load_ended("a")
    assert bench.step(a=36).saves == (bench.save(3, range(2, 3)),)


def test_decoded_tokens_are_saved_only_if_asked(make: Maker) -> None:
    for save_decode in (False, True):
        bench = make(config=KVPoolConfig(save_decode=save_decode))
        view = bench.add(num_tokens=60)
        bench.admit()
        assert len(bench.step(a=60).saves) == 1
        for token in range(4):
            view.output.append(token)
            saves = bench.step(a=1).saves
            due = (bench.save(3, range(1, 2)),) if save_decode and token == 3 else ()
            assert saves == due
        view.output.append(9)
        assert bench.finish() == {"kvpool": {"tokens": 64 if save_decode else 32}}


def test_drafts_and_tokens_in_flight_are_not_saved(make: Maker) -> None:
    bench = make(config=KVPoolConfig(save_decode=True))
    view = bench.add(num_tokens=60)
    bench.admit()
    bench.step(a=60)
    view.output.append(1)
    assert bench.step(a=5).saves == ()  # four of them drafts: 65 tokens, 61 known
    view.output += [2, 3]
    view.num_computed_tokens = 63
    assert bench.step(a=1).saves == ()
    view.output.append(4)
    view.num_computed_tokens = 63
    assert len(bench.step(a=1).saves) == 1


def test_the_last_sampled_token_is_not_saved(make: Maker) -> None:
    bench = make(config=KVPoolConfig(save_decode=True), max_pinned=2)
    view = bench.add(num_tokens=63)
    bench.admit()
    plan = bench.step(a=63)
    bench.gather(plan)
    view.output.append(1)
    view.num_computed_tokens = 64  # an engine that counts what it has scheduled
    assert bench.finish() == {"kvpool": {"tokens": 32}}
    assert bench.step().saves == ()


def test_steps_without_room_look_at_nobody_and_then_at_whom_there_is_room_for(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one chunk may be pinned; 64 requests of 512 chunks each are due."""
    bench = make(max_pinned=CHUNK // 16)
    names = [f"r{number}" for number in range(64)]
    for name in names:
        bench.add(name, num_tokens=512 * CHUNK)
    for name in names:
        bench.admit(name)
    bench.step(**dict.fromkeys(names, 511 * CHUNK))
    [(job, pinned)] = bench.scheduler.saves.ledger._pinned.items()
    looks: list[int] = []
    num_blocks = GroupTables.num_blocks

    def counted(tables: GroupTables, start: int, stop: int) -> int:
        looks.append(stop)
        return num_blocks(tables, start, stop)

    monkeypatch.setattr(GroupTables, "num_blocks", counted)
    for _ in range(3):
        assert bench.step(**dict.fromkeys(names, 1)).saves == ()
    assert len(looks) <= 2 * len(names)  # each of them once
    saved = []
    for _ in range(len(names)):
        bench.scheduler.apply(StepReport(gathered={job: 1}))
        looks.clear()
        [save] = bench.step(**dict.fromkeys(names, 0)).saves
        assert len(looks) < 30
        job = save.job_id
        saved.append(save.request_id)
    assert sorted(saved) == sorted(names)  # in turn
    assert pinned.ranks_left == 0


def test_the_pinned_blocks_are_bounded_and_the_rest_waits(make: Maker) -> None:
    bench = make(max_pinned=3)
    view = bench.add(num_tokens=128)
    bench.admit()
    first = bench.step(a=128)
    assert first.saves == (bench.save(2, range(1)),)
    view.output.append(1)
    assert bench.step(a=1).saves == ()
    bench.gather(first)
    view.output.append(1)
    second = bench.step(a=1)
    assert second.saves == (bench.save(3, range(1, 2)),)
    bench.gather(second)
    assert bench.finish() == {"kvpool": {"tokens": 96}}
    assert bench.scheduler.saves.has_pending
    late = bench.step()
    assert [(s.first_chunk, len(s.hashes)) for s in late.saves] == [(2, 1)]
    bench.gather(late)
    assert not bench.scheduler.saves.has_pending
    assert bench.pins.references == {}


def test_blocks_that_are_gone_are_not_saved(bench: Bench) -> None:
    bench.add()
    bench.admit()
    bench.step(a=16)
    bench.tables["a"][0] = NULL_BLOCK
    assert bench.step(a=32).saves == ()


def test_a_preempted_request_asks_again_and_saves_on(bench: Bench) -> None:
    view = bench.add()
    bench.admit()
    bench.gather(bench.step(a=70))
    bench.hold(view.tokens(), range(2))
    view.preempt()
    bench.tables["a"] = []
    assert bench.admit() == (64, True)
    bench.step()
    bench.scheduler.load_ended("a")
    assert bench.step(a=36).saves == (bench.save(5, range(2, 3)),)


def test_a_preempted_request_that_cannot_be_shared_any_more_is_let_be(bench: Bench) -> None:
    """An adapter's files may be gone by then."""
    view = bench.add()
    bench.admit()
    bench.gather(bench.step(a=70))
    view.preempt()
    bench.tables["a"] = []
    view.identified = None
    assert bench.admit() == NOTHING
    assert bench.step(a=100).saves == ()
    assert bench.finish() is None


def test_a_preempted_request_without_its_cells_saves_on(bench: Bench) -> None:
    view = bench.add()
    bench.admit()
    bench.gather(bench.step(a=70))
    view.preempt()
    bench.tables["a"] = []
    assert bench.admit() == NOTHING
    assert bench.step(a=70).saves == ()
    assert bench.step(a=30).saves == (bench.save(4, range(2, 3)),)


def test_a_lookup_that_another_has_replaced_is_not_remembered(bench: Bench) -> None:
    view = bench.block_lookup()
    view.preempt()
    assert bench.scheduler.match("a", 0) == PENDING
    bench.finish()
    assert bench.scheduler._lookups._open == {}


def test_a_lookup_that_takes_too_long_after_a_preemption_is_a_miss(bench: Bench) -> None:
    bench.hold(range(1000), range(3))
    view = bench.add()
    assert bench.match() == (96, True)
    bench.block_lookup("b")
    view.preempt()
    assert bench.scheduler.match("a", 0) == PENDING
    bench.clock.advance(1)
    assert bench.scheduler.match("a", 0) == NOTHING


def test_a_request_that_ends_before_its_answer_leaves_nothing(bench: Bench) -> None:
    bench.block_lookup()
    assert bench.scheduler.match("a", 0) == PENDING
    assert bench.finish() == {"kvpool": {"tokens": 0}}
    bench.store.release()
    bench.step()
    assert not bench.scheduler.saves.has_pending


def test_a_request_that_ends_while_loading_saves_nothing(bench: Bench) -> None:
    bench.loading(2)
    assert bench.finish() == {"kvpool": {"tokens": 64}}
    bench.scheduler.apply(StepReport(loads={"a": Loaded(0)}))
    bench.scheduler.load_ended("a")
    assert bench.step() == StepPlan(idle=True)


# The host tier


@pytest.mark.parametrize(("num_tokens", "chunks"), [(100, 3), (96, 3), (64, 2)])
def test_what_a_waiting_request_will_load_is_fetched_before_its_turn(
    make: Maker, num_tokens: int, chunks: int
) -> None:
    bench = make(host_tier=True)
    bench.hold(range(1000), range(3))
    view = bench.add(num_tokens=num_tokens)
    assert bench.settle().prefetches == (
        PrefetchPlan("a", tuple(hashes_of(view.tokens())[:chunks])),
    )
    assert bench.step().prefetches == ()
    assert bench.match() != NOTHING
    assert bench.step().prefetches == ()


def test_a_request_whose_turn_has_come_is_not_fetched_for(make: Maker) -> None:
    bench = make(host_tier=True)
    bench.hold(range(1000), range(3))
    bench.add("a")
    bench.add("b")
    assert bench.match("a") == (96, True)
    bench.take_answers()
    assert [prefetch.request_id for prefetch in bench.step().prefetches] == ["b"]


@pytest.mark.parametrize(
    ("host_tier", "stored", "options"),
    [
        (False, 3, RequestOptions()),
        (True, 0, RequestOptions()),
        (True, 3, RequestOptions(load=False)),
    ],
    ids=["no host tier", "nothing stored", "may not load"],
)
def test_nothing_is_fetched_for_what_will_not_be_loaded(
    make: Maker, host_tier: bool, stored: int, options: RequestOptions
) -> None:
    bench = make(host_tier=host_tier)
    bench.hold(range(1000), range(stored))
    bench.add(options=options)
    assert bench.settle().prefetches == ()


@pytest.mark.parametrize("is_taken", [True, False], ids=["known", "on its way"])
@pytest.mark.parametrize("event", ["finish", "reset"])
def test_a_prefetch_is_forgotten_with_its_request_and_at_a_reset(
    make: Maker, event: str, is_taken: bool
) -> None:
    bench = make(host_tier=True)
    bench.hold(range(1000), range(3))
    bench.add()
    if is_taken:
        bench.take_answers()
    else:
        bench.lookups.wait(LIMIT_S)
    if event == "finish":
        bench.finish("a")
    else:
        assert bench.scheduler.reset()
    assert bench.step().prefetches == ()


def test_what_ranks_have_in_host_memory_is_offered(make: Maker) -> None:
    bench = make(host_tier=True, num_ranks=2)
    groups = tuple(NAMES.chunk_id(chunk_hash) for chunk_hash in hashes_of(range(100)))
    bench.scheduler.apply(StepReport(host={rank: HostCacheChange(groups, ()) for rank in (0, 1)}))
    bench.add()
    assert bench.match() == (96, True)
    assert bench.store.calls == {}
    bench.scheduler.apply(StepReport(host={1: HostCacheChange((), groups[2:])}))
    bench.add("b")
    assert bench.match("b") == (64, True)


# Resets


def test_a_reset_removes_what_is_stored_and_saves_anew(make: Maker) -> None:
    bench = make(num_ranks=2)
    bench.loading(3)
    bench.scheduler.load_ended("a")
    assert bench.scheduler.reset()
    check(bench.scheduler)
    assert bench.memory._table.list_keys() == []
    # Puts that were under way may land until every rank knows.
    bench.hold(range(1000), range(1))
    plan = bench.step(a=4)
    assert plan.generation == 1
    assert plan.saves == ()
    bench.scheduler.apply(StepReport(dropped={1: 1}))
    assert bench.store.calls["remove_namespace"] == 1
    bench.scheduler.apply(StepReport(dropped={1: 1}))
    bench.add("b")
    assert bench.match("b") == NOTHING
    assert bench.store.calls["remove_namespace"] == 2
    assert bench.memory._table.list_keys() == []
    # What was loaded before is of the weights before; what is computed from now on is not.
    bench.allocate("b", 0, 0)
    plan = bench.step(a=1, b=100)
    assert [save.request_id for save in plan.saves] == ["b"]
    bench.gather(plan, ranks=2)


def test_what_was_computed_before_a_reset_is_not_saved_after_it(bench: Bench) -> None:
    """The weights may have changed; only what is computed anew is of the new ones."""
    view = bench.add()
    bench.admit()
    bench.gather(bench.step(a=100))
    view.output += [1, 2, 3]
    assert bench.step(a=1).saves == ()
    assert bench.scheduler.reset()
    assert bench.step(a=1).saves == ()
    bench.end_reset()
    assert bench.step(a=1).saves == ()
    view.num_preemptions, view.num_computed_tokens = 1, 0
    bench.admit()
    [save] = bench.step(a=100).saves
    assert (save.first_chunk, len(save.hashes)) == (0, 3)
    bench.gather(StepPlan(saves=(save,)))


def test_a_request_that_ends_while_loading_saves_nothing_after_a_reset(bench: Bench) -> None:
    bench.loading(2)
    assert bench.scheduler.reset()
    bench.step()
    bench.end_reset()
    assert bench.finish() == {"kvpool": {"tokens": 0}}
    assert bench.step().saves == ()


def test_a_reset_that_the_store_does_not_confirm_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.store.inject(Fault.ERROR, "remove_namespace", times=1)
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.scheduler.lookup_service"):
        assert not bench.scheduler.reset()
    monkeypatch.setattr(scheduler_module, "RESET_WAIT_S", 0.01)
    bench.store.inject(Fault.BLOCKED, "remove_namespace")
    assert not bench.scheduler.reset()
    assert bench.step().generation == 2


def test_a_reset_drops_the_saves_of_requests_that_have_ended(make: Maker) -> None:
    bench = make(max_pinned=2)
    bench.add(num_tokens=100)
    bench.admit()
    bench.gather(bench.step(a=100))
    bench.finish()
    assert bench.scheduler.saves.has_pending
    assert bench.scheduler.reset()
    assert bench.step().saves == ()
    assert not bench.scheduler.saves.has_pending


def test_an_answer_of_before_a_reset_is_not_used(bench: Bench) -> None:
    bench.hold(range(1000), range(3))
    bench.add()
    bench.lookups.wait(LIMIT_S)
    assert bench.scheduler.reset()
    assert bench.match() == NOTHING


# Anything in any order


@dataclass
class Live:
    """A request as the engine's scheduler keeps it."""

    view: View
    state: str = "waiting"  # waiting, loading, running
    load: tuple[int, int] = (0, 0)
    limit: int = 1 << 30
    planned: set[int] = field(default_factory=set)  # chunks saved, and valid since


class SchedulerMachine(RuleBasedStateMachine):
    """Plays vLLM's scheduler and all ranks of workers; knows which tokens are computed."""

    @initialize(
        block=st.sampled_from((16, 32, 48, 64)),
        num_ranks=st.integers(1, 2),
        spare=st.integers(1, 8),
        save_decode=st.booleans(),
        role=st.sampled_from(KVRole),
        alias_step=st.sampled_from((0, 8)),
        stored=st.integers(0, 200),
    )
    def begin(
        self,
        block: int,
        num_ranks: int,
        spare: int,
        save_decode: bool,
        role: KVRole,
        alias_step: int,
        stored: int,
    ) -> None:
        self.bench = Bench(
            block,
            role,
            num_ranks,
            max_pinned=-(-CHUNK // block) + spare,
            config=KVPoolConfig(save_decode=save_decode),
            alias_step=alias_step,
        )
        self.tokens_of: dict[bytes, Sequence[int]] = {}  # of saved chunks and ends, from the start
        self.block, self.num_ranks = block, num_ranks
        self.saves_at_all = role is not KVRole.CONSUMER or save_decode
        self.live: dict[str, Live] = {}
        self.ended: dict[str, Live] = {}
        self.ended_loads: list[str] = []
        self.saves: dict[int, tuple[SavePlan, int]] = {}  # and ranks that have not gathered
        self.expected_loads: list[tuple[str, int, int]] = []
        self.arrived = 0
        if stored:
            self.serve(stored, 200)

    def with_state(self, *states: str) -> list[str]:
        return sorted(r for r, live in self.live.items() if live.state in states)

    @rule(
        length=st.integers(1, 200),
        load=st.booleans(),
        save=st.booleans(),
        reads_cache=st.sampled_from((True, True, True, False)),
        shared=st.sampled_from((200, 60, 30)),
    )
    def arrive(self, length: int, load: bool, save: bool, reads_cache: bool, shared: int) -> None:
        self.arrived += 1
        request_id = f"r{self.arrived}"
        options = RequestOptions(save=save, load=load)
        view = self.bench.add(request_id, length, options, shared, reads_cache=reads_cache)
        self.live[request_id] = Live(view)
        if (load and reads_cache) or (save and self.saves_at_all):
            self.bench.lookups.wait(LIMIT_S)
            self.plan()  # takes the answer, so that a run can be repeated

    @rule(length=st.integers(1, 200), shared=st.sampled_from((200, 60, 30)))
    def serve(self, length: int, shared: int) -> None:
        """A request comes, is computed, and its saves are stored."""
        self.arrive(length, load=True, save=True, reads_cache=True, shared=shared)
        request_id = f"r{self.arrived}"
        live = self.live[request_id]
        self.admit_at(request_id, 0, has_room=True)
        if live.state == "loading":
            self.stop_load(request_id, live.load[1])
        while left := max(0, length - live.view.num_computed_tokens):
            self.compute({request_id: min(left, 2 * CHUNK)})
            self.plan()  # late saves
            for job in sorted(self.saves):
                self.end_gather(job, self.saves[job][1], is_stored=True)
        self.end(request_id)

    @precondition(lambda self: self.live or self.saves or self.ended_loads)
    @rule(data=st.data(), is_good=st.booleans())
    def advance(self, data: st.DataObject, is_good: bool) -> None:
        """Something that has to come comes: an admission, a step, a load's end, a gather."""
        possible = {
            "admit": self.with_state("waiting"),
            "step": self.with_state("running"),
            "end_load": self.with_state("loading") + self.ended_loads,
            "gather": sorted(self.saves),
        }
        match data.draw(st.sampled_from([name for name, each in possible.items() if each])):
            case "admit":
                self.admit(data)
            case "step":
                self.step(data)
            case "end_load":
                self.end_load(data, is_full=is_good)
            case _:
                self.gather(data, is_stored=is_good)

    def admit(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.with_state("waiting")))
        most = (self.live[request_id].view.num_tokens - 1) // self.block
        local = data.draw(st.one_of(st.just(0), st.integers(0, most))) * self.block
        has_room = data.draw(st.sampled_from((True, True, True, False)))
        self.admit_at(request_id, local, has_room=has_room)

    def admit_at(self, request_id: str, local: int, *, has_room: bool) -> None:
        live = self.live[request_id]
        count, is_async = self.bench.match(request_id, local)
        assert count is not None
        assert is_async == (count > 0)
        stop = local + count
        if count:
            assert stop <= live.view.num_tokens - 1
            assert stop % self.block == 0 or stop == live.view.num_tokens - 1
            assert stop <= live.limit
            assert live.view.options.load
            assert live.view.reads_cache
        if has_room:
            self.bench.allocate(request_id, local, count)
            live.state = "loading" if count else "running"
            live.load = (local, stop)
            if count:
                self.expected_loads.append((request_id, local, stop))
            self.plan()

    def step(self, data: st.DataObject) -> None:
        drafts = data.draw(st.integers(0, 2))
        scheduled: dict[str, int] = {}
        for request_id in self.with_state("running"):
            view = self.live[request_id].view
            left = view.num_tokens - view.num_computed_tokens
            count = data.draw(st.integers(0, left))
            if count:
                scheduled[request_id] = count + (drafts if count == left else 0)
        self.compute(scheduled)

    def compute(self, scheduled: dict[str, int]) -> None:
        self.plan(scheduled)
        for request_id in scheduled:
            view = self.live[request_id].view
            if view.num_computed_tokens >= view.num_tokens:
                view.num_computed_tokens = view.num_tokens  # drafts were all wrong
                view.output.append(view.num_tokens % 5)

    def plan(self, scheduled: dict[str, int] | None = None) -> None:
        """One step of the engine: check all that the workers are told to do."""
        before = {r: live.view.num_computed_tokens for r, live in self.live.items()}
        plan = self.bench.step(**(scheduled or {}))
        assert [(p.request_id, p.token_start, p.token_stop) for p in plan.loads] == (
            self.expected_loads
        )
        self.expected_loads = []
        for load in plan.loads:
            live = self.live[load.request_id]
            first, last = load.token_start // CHUNK, -(-load.token_stop // CHUNK)
            hashes, tokens = list(load.hashes), live.view.tokens()
            if load.is_last_other:
                other = self.tokens_of[hashes.pop()]
                assert other[: load.token_stop] == tokens[: load.token_stop]
                assert load.end_tokens == len(other) % CHUNK
                last -= 1
            assert hashes == hashes_of(tokens)[first:last]
            start, stop = load.token_start // self.block, -(-load.token_stop // self.block)
            [pages] = load.pages
            assert (pages.token_start, pages.token_stop) == (load.token_start, load.token_stop)
            assert list(pages.block_ids) == self.bench.tables[load.request_id][start:stop]
        for save in plan.saves:
            self.note_tokens(save)
            self.check_save(save, before, scheduled or {})
            self.saves[save.job_id] = (save, self.num_ranks)

    def note_tokens(self, save: SavePlan) -> None:
        """Note by its hash what each chunk holds."""
        live = self.live.get(save.request_id) or self.ended[save.request_id]
        for chunk, chunk_hash in enumerate(save.hashes, save.first_chunk):
            stop = chunk * CHUNK + (save.end_tokens or CHUNK)
            self.tokens_of[chunk_hash] = live.view.tokens()[:stop]

    def check_save(self, save: SavePlan, before: dict[str, int], scheduled: dict[str, int]) -> None:
        chunks = range(save.first_chunk, save.first_chunk + len(save.hashes))
        assert chunks
        [pages] = save.pages
        assert all(self.bench.pins.references[block] for block in pages.block_ids)
        live = self.live.get(save.request_id)
        if live is None:
            return  # of a request that has ended; checked when it did
        assert live.view.options.save
        assert self.saves_at_all
        computed = before[save.request_id] + scheduled[save.request_id]
        if save.end_tokens:
            stop = chunks.start * CHUNK + save.end_tokens
            assert stop == live.view.num_prompt_tokens <= computed
            chain = ChunkChain(CHUNK, RequestIdentity())
            chain.extend(live.view.tokens()[:stop])
            assert list(save.hashes) == [chain.end(live.view.tokens()[:stop])]
            assert pages.token_stop == stop
            return
        assert chunks.stop * CHUNK <= min(computed, live.view.num_tokens)
        assert list(save.hashes) == hashes_of(live.view.tokens())[chunks.start : chunks.stop]
        start, stop = chunks.start * CHUNK // self.block, -(-chunks.stop * CHUNK // self.block)
        assert list(pages.block_ids) == self.bench.tables[save.request_id][start:stop]
        assert pages.table_start == start * self.block
        assert (pages.token_start, pages.token_stop) == (chunks.start * CHUNK, chunks.stop * CHUNK)
        assert not live.planned & set(chunks)
        live.planned |= set(chunks)

    def end_load(self, data: st.DataObject, *, is_full: bool) -> None:
        request_id = data.draw(st.sampled_from(self.with_state("loading") + self.ended_loads))
        if request_id in self.ended_loads:
            self.ended_loads.remove(request_id)
            self.bench.scheduler.apply(StepReport(loads={request_id: Loaded(0)}))
            self.bench.scheduler.load_ended(request_id)
            return
        start, stop = self.live[request_id].load
        self.stop_load(request_id, stop if is_full else data.draw(st.integers(start, stop)))

    def stop_load(self, request_id: str, kept: int) -> None:
        """End a load that has come so far."""
        live = self.live[request_id]
        stop = live.load[1]
        if kept == stop:
            self.bench.scheduler.load_ended(request_id)
        else:
            self.bench.load_stops(request_id, kept)
            live.limit = min(live.limit, kept)
            live.planned -= set(range(kept // CHUNK, 100))
        live.state = "running"
        if kept < stop and live.view.num_computed_tokens == 0:
            live.state = "waiting"
            self.bench.tables[request_id] = []

    def gather(self, data: st.DataObject, *, is_stored: bool) -> None:
        job = data.draw(st.sampled_from(sorted(self.saves)))
        self.end_gather(job, data.draw(st.integers(1, self.saves[job][1])), is_stored=is_stored)

    def end_gather(self, job: int, ranks: int, *, is_stored: bool) -> None:
        save, left = self.saves.pop(job)
        self.bench.scheduler.apply(StepReport(gathered={save.job_id: ranks}))
        if left > ranks:
            self.saves[job] = (save, left - ranks)
        elif is_stored:
            keys = [key for h in save.hashes for key in NAMES.of_chunk(h)]
            self.bench.memory.put(keys, [make_buffer(1)] * len(keys), [ChunkRef("")] * len(keys))
            self.bench.stored(save)

    @precondition(lambda self: self.with_state("running"))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.with_state("running")))
        self.live[request_id].view.preempt()
        self.live[request_id].state = "waiting"
        self.bench.tables[request_id] = []

    @precondition(lambda self: self.bench.memory._table.list_keys())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        keys = sorted(self.bench.memory._table.list_keys())
        self.bench.memory.remove([data.draw(st.sampled_from(keys))])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.live))))

    def end(self, request_id: str) -> None:
        live = self.ended[request_id] = self.live.pop(request_id)
        answer = self.bench.finish(request_id)
        if live.state == "loading":
            self.ended_loads.append(request_id)
        if live.view.options.save and self.saves_at_all:
            assert answer is not None
            tokens = answer["kvpool"]["tokens"]
            is_end = self.bench.aliases is not None and tokens == live.view.num_prompt_tokens
            assert tokens % CHUNK == 0 or is_end
            assert tokens <= live.view.num_tokens
        else:
            assert answer is None

    @precondition(lambda self: self.bench.memory._table.list_keys())
    @rule(is_known=st.booleans())
    def reset(self, is_known: bool) -> None:
        assert self.bench.scheduler.reset()
        for live in self.live.values():
            live.planned.clear()
        if is_known:
            self.end_reset()

    @precondition(lambda self: self.bench.scheduler._validity.reset.pending)
    @rule()
    def end_reset(self) -> None:
        self.plan()  # saves that are due are told to somebody
        self.bench.end_reset()  # so that a run can be repeated

    @invariant()
    def holds(self) -> None:
        check(self.bench.scheduler)
        self.bench.pins.check()
        held = [block for save, _ in self.saves.values() for block in all_blocks(save.pages)]
        late = [b for save in self.bench.scheduler.saves._late for b in all_blocks(save.pages)]
        assert sorted(self.bench.pins.references.elements()) == sorted(held + late)
        assert self.bench.scheduler.saves.has_pins == bool(held + late)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for request_id in sorted(self.live):
            self.end(request_id)
        for request_id in self.ended_loads:
            self.bench.scheduler.load_ended(request_id)
        self.plan()
        for save, left in self.saves.values():
            self.bench.scheduler.apply(StepReport(gathered={save.job_id: left}))
        self.saves.clear()
        self.holds()
        assert self.bench.pins.references == {}
        assert not self.bench.scheduler.saves.has_pending
        assert self.bench.scheduler.saves._until_due == self.bench.scheduler._requests == {}
        assert self.bench.lookups.close()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
