"""The scheduler side: lookups, offers, loads and saves of each request."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduler.conftest import Make
from tests.scheduler.scheduler_bench import (
    CHUNK,
    LIMIT_S,
    NAMES,
    NOTHING,
    PENDING,
    Bench,
    View,
    has_none,
    hashes_of,
    put_cells,
)
from tests.scheduler.scripts import Example, examples, in_words
from tests.support.fakes import FakeRequest
from tests.support.faults import Fault
from tests.support.invariants import check
from vllm_kvpool.cli.explain import RequestReport, reports
from vllm_kvpool.config import KVPoolConfig, KVRole, RequestOptions
from vllm_kvpool.identity.chunk_hash import RequestIdentity
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.scheduler import pool_scheduler as scheduler_module
from vllm_kvpool.scheduler.blocks import GroupTables, all_blocks
from vllm_kvpool.scheduler.loads import IDLE_WAIT_MAX_S
from vllm_kvpool.scheduler.lookup import LookupOutcome, LookupResult
from vllm_kvpool.scheduler.messages import Loaded, StepReport
from vllm_kvpool.scheduler.pool_scheduler import PoolScheduler
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.request import OwnKV, RequestLookup, RequestState
from vllm_kvpool.transfer.ops import HandOverEnd, HostCacheChange, SavePlan

# Lookups and offers


@examples(
    """
a lookup is pending until the store answers, and asked again the answer is at hand
    engine; stored 3; add a; block exists b; poll b -> pending; poll b -> pending; release
    match b -> 96; match b -> 96; asked 4
last save of a hand-over that is dropped ends it where the save begins
    # The workers hear of the end that was planned, and of the earlier one that holds.
    engine; add a hand_over=True; admit a -> nothing; step a=32 -> save a 0-1; grow a 96
    computed a 96; finish a; drop_late; step -> handed over 0 3 | handed over 1 1
    step -> nothing
what was offered becomes a load when it is allocated
    engine; stored 3; add a; match a 32 -> 64; match a 48 -> 48; step -> no load
    allocate a 48 48; step -> load a 48-96; step -> no load
an offer that vLLM cuts is loaded up to the cut {80|16}
    # vLLM 0.33 cuts hits to whole blocks where it computes the end of a prefix again.
    engine; stored 3; add a 96; match a -> 95; allocate a 0 {}; step -> load a 0-{}; loaded a
    count hit_tokens {}
an offer that vLLM does not take loads nothing
    # vLLM 0.33 may find that it lacks other outputs of the prefix.
    engine; stored 3; add a; match a -> 96; allocate a 0 0; step a=100 -> nothing
    finish a -> 96 tokens; step -> no load
a lookup that takes too long is a miss
    engine; stored 3; block exists a; wait 0.49; poll a -> pending; wait 0.01; poll a -> nothing
    count lookups timed_out:1
an answer that is just too late says what to save
    engine; block exists a; wait 1; poll a -> nothing; allocate a 0 0; release; settle
    step a=100 -> only save a 0-3
a request whose lookup was too late is saved
    engine; block exists a; add b; wait 1; poll a -> nothing; poll b -> nothing; allocate b 0 0
    release; answers; step b=100 -> only save b 0-3
expected tokens are offered before they are stored
    engine; stored 1; add a expect_tokens=69; admit a -> 64; step; told_load a 0-64
    count promised_blocks 4; stored 1-2; landed -> last landed 2 final; count promised_blocks 0
expected tokens of a request that has ended are promised no more
    engine; stored 1; add a expect_tokens=64; admit a; step; count promised_blocks 4; finish a
    count promised_blocks 0
expected tokens that do not come end the stream where they stop
    # The lookup service ends it, by its own clock; the scheduler would wait for longer.
    engine; stored 1; add a expect_tokens=64 expect_timeout_ms=30; admit a -> 64
    landed -> last landed 1 final
lookup that ends before its promise is allocated ends the stream
    engine; stored 1; add a expect_tokens=64 expect_timeout_ms=30; match a -> 64; answers
    allocate a 0 64; step -> load a 0-64 landed 1 | landed 1 final
prompt's end is expected of {all: 1073741824|more tokens: 101|its tokens: 100 expect_end=True}
    engine has_ends=True; stored 1; add a expect_tokens={}; admit a -> 99; step
    told_load a 0-99 end 4 of another
prompt's end is not expected of {its tokens alone: 100|fewer tokens: 99 expect_end=True}
    engine has_ends=True; stored 1; add a expect_tokens={}; admit a -> 96; step; told_load a 0-96
prompt's end is not expected of an engine that stores none
    engine; stored 1; add a expect_tokens=1073741824; admit a -> 96; step; told_load a 0-96
prompt in the engine's own cache is not waited for
    engine; add a expect_tokens=96; match a 96 -> nothing; lookups 0
expected prompt that comes is counted by its source
    # A router learns from it which engines share a store, whatever a client asks to be told.
    engine; stored 2; add a expect_tokens=64 expect_timeout_ms=30 expect_from=10.0.0.1:8000
    admit a; step; answers; count expected_prompts 10.0.0.1:8000/found:1
expected prompt of which {a chunk: 1|nothing: 0} comes is counted as missing by its source
    engine; stored {}; add a expect_tokens=64 expect_timeout_ms=30 expect_from=10.0.0.1:8000
    admit a; step; answers; count expected_prompts 10.0.0.1:8000/missing:1
expected prompt whose lookup hangs is counted as missing
    engine layerwise=True; block exists a expect_tokens=32 expect_timeout_ms=30; wait 0.6
    poll a -> nothing; count expected_prompts -/missing:1
expected prompt that is not loaded is not counted
    engine; add a expect_tokens=32 load=False; match a; count expected_prompts
preempted request does not wait again for missing tokens
    # Layered loads do not stream.
    engine layerwise=True; block exists a expect_tokens=32 expect_timeout_ms=30000; wait 30.6
    poll a -> nothing; preempt a; poll a -> pending; wait 0.6; poll a -> nothing
    count expected_prompts -/missing:1
"""
)
def test_lookups_and_offers(example: Example) -> None:
    example.play().close()


@examples(
    """
engine that sees arrivals waits for them as well
    # Nothing is held up by the wait, so it lasts until the first request's lookup times out.
    engine; watch; sees_arrivals; block exists; add a; poll a -> pending; wait 0.125; add b
    poll b -> pending; wait 0.125; step; waited half_a_lookup
idle step waits on if vLLM does not ask for a request in time
    # Steps that wait no time at all would spin.
    engine; watch; sees_arrivals; block exists; add a; poll a -> pending; wait 0.5; step
    waited watched
stream is followed the less, the longer its chunks are fetched
    # A load may end early, which the engine hears of in a step.
    engine; stored 1; add a expect_tokens=64 expect_timeout_ms=60000; admit a -> 64
    step -> load a 0-64 landed 1; watch; sees_arrivals; step; wait 0.8; step; wait 60; step
    waited stream_min 0.2 stream
first step without work waits
    engine; block exists; add a; worked; watch; sees_arrivals; poll a -> pending; step
    waited lookup
first step without work does not wait for a preempted request
    # Its results of the step before may be under way.
    engine; add a save=False; admit a -> nothing; step a=100; preempt a; block exists; worked
    watch; sees_arrivals; poll a -> pending; step; waited
request that has its answer keeps waits short
    # A step of it may be under way, or another connector loads it.
    engine; watch; sees_arrivals; add a load=False save=False; poll a -> nothing; block exists
    add b; poll b -> pending; step; waited short; finish a; step; waited short lookup
save whose end is awaited keeps waits short
    # Its blocks are freed, and its outcome is counted, in a later step.
    engine; add a; admit a; step a=100; finish a; watch; sees_arrivals; block exists; add b
    poll b -> pending; step; step; waited short; gather; confirm; step
    waited short lookup
a busy engine does not wait for lookups
    # What it computes may still be under way in the step after it.
    engine; watch; block exists; add b; add a load=False save=False; step a=1; step; waited
    step; waited short
while a request loads the workers wait alone
    engine; stored 2; add a; match a -> 64; watch; allocate a 0 64; block exists; add b
    step; workers_wait True; step; workers_wait True; step; workers_wait True; waited
an engine that steps with others never waits
    # Data-parallel engines step together: one that waits, on either side, holds up all.
    engine in_lockstep=True; watch; block exists; add a
    each 0-2: poll a -> pending; step; workers_wait False
    waited
"""
)
def test_waits_of_an_idle_engine(example: Example) -> None:
    example.play().close()


# `b` has loaded and not run yet; there were no blocks for `a`, which was asked before it


@examples(
    """
a request without blocks gives way to one that has loaded
    poll a -> pending; poll a -> pending; allocate b 96 0; step b=4; match a -> 96
    allocate a 0 96
nobody passes a request that gives way but who has loaded
    # `c` stands before it, then behind it; at last nobody that has loaded is left.
    match c -> 96; poll a -> pending; queue c; poll c -> pending; allocate b 96 0; match c -> 96
    step b=4; match a -> 96
nobody gives way where something runs
    add other load=False save=False; step other=1; match a -> 96
nobody gives way where what has loaded {ends: finish|comes to nothing: match} b
    {} b; match a -> 96
""",
    given="engine stops_at_first=True; stored 3; add a; add b; match a -> 96; match b -> 96"
    "; allocate b 0 96; step; match a -> 96; add c; match c; queue c; loaded b",
)
def test_requests_without_blocks(example: Example) -> None:
    example.play().close()


@examples(
    """
nobody gives way where those that have loaded have their own line
    engine; stored 3; add a; add b; match a -> 96; match b -> 96; allocate b 0 96; step
    match a -> 96; add c; match c; queue c; loaded b; match a -> 96
a request that ends while loading saves nothing
    engine; stored 2; add a; admit a; step; finish a -> 64 tokens; late_load a; step -> nothing
a prefetch whose answer is known is forgotten with its request and at a reset {finish a|reset}
    engine host_tier=True; stored 3; add a; answers; {}; step -> no prefetch
a prefetch whose answer is on its way is forgotten with its request and at a reset {finish a|reset}
    engine host_tier=True; stored 3; add a; answer_comes; {}; step -> no prefetch
an answer of before a reset is not used
    engine; stored 3; add a; answer_comes; reset; match a -> nothing
"""
)
def test_requests_that_end(example: Example) -> None:
    example.play().close()


def test_an_idle_engine_waits_once_a_step_however_many_lookups_are_pending(bench: Bench) -> None:
    bench.watch_waits()
    bench.store.inject(Fault.BLOCKED, "exists")
    names = [f"r{number}" for number in range(64)]
    for name in names:
        bench.add(name)
    for number in range(1, 4):
        for name in names:
            assert bench.scheduler.match(name, 0) == PENDING
        assert len(bench.waits.seconds) == number - 1  # nobody waits in `match`
        bench.step()
    assert all(0 < seconds <= IDLE_WAIT_MAX_S for seconds in bench.waits.seconds)
    bench.clock.advance(1)
    assert all(bench.scheduler.match(name, 0) == NOTHING for name in names)
    bench.step()
    assert len(bench.waits.seconds) == 3


def test_idle_step_ends_in_time_for_a_lookup_that_is_not_opened_yet(bench: Bench) -> None:
    """An adapter that took longer to read than a lookup may last held its request for 30 s."""
    bench.watch_waits()
    may_end = threading.Event()

    def read_adapter() -> RequestIdentity:
        may_end.wait(LIMIT_S)
        return RequestIdentity()

    bench.scheduler._has_arrivals = has_none
    bench.add(reads_files=True, identify=read_adapter)
    assert bench.scheduler.match("a", 0) == PENDING
    bench.step()
    (waited,) = bench.waits.seconds
    bench.clock.advance(waited)
    assert bench.scheduler.match("a", 0) == NOTHING
    may_end.set()


def test_promise_is_offered_once_its_first_chunk_is_stored(bench: Bench) -> None:
    """Before the first chunk is stored, the request needs no blocks and no step."""
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


def test_request_that_is_not_handed_over_has_no_topic(bench: Bench) -> None:
    for is_handed_over in (False, True):
        bench.add(options=RequestOptions(hand_over=is_handed_over))
        bench.admit()
        (save, *_) = bench.step(a=100).saves
        assert bool(save.topic) is is_handed_over
        bench.finish()
        assert bool(bench.step().hand_over_ends) is is_handed_over


def test_end_of_a_hand_over_is_not_held_up_by_a_wait(bench: Bench) -> None:
    bench.watch_waits()
    bench.scheduler._has_arrivals = has_none
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add("b")
    assert bench.scheduler.match("b", 0) == PENDING
    bench.scheduler.saves._hand_over_ends.append(HandOverEnd("a", b"t" * 20, 0, 0))
    assert bench.step().hand_over_ends
    assert not bench.waits.seconds


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
    make: Make, block: int, prompt: int, stored: int, computed: int, offer: tuple[int, bool]
) -> None:
    bench = make(block=block)
    bench.hold(range(1000), range(stored))
    bench.add(num_tokens=prompt)
    assert bench.match(num_computed=computed) == offer


def test_a_store_that_fails_is_a_miss_and_the_request_is_saved(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.store.inject(Fault.UNREACHABLE, "exists", times=1)
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.scheduler.lookup_service"):
        bench.add()
        assert bench.admit() == NOTHING
    assert bench.step(a=100).saves == (bench.save(2, range(3)),)
    assert bench.counts("kvpool_miss_tokens") == {"{reason=store_error}": 100}


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


def test_layered_load_waits_for_all_expected_tokens(make: Make) -> None:
    bench = make(config=KVPoolConfig(layerwise=True))
    bench.hold(range(1000), range(1))
    bench.add(options=RequestOptions(expect_tokens=2 * CHUNK))
    bench.clock.advance(9)
    bench.lookups.wait(LIMIT_S)
    assert bench.scheduler.match("a", 0) == PENDING
    bench.hold(range(1000), range(1, 2))
    assert bench.match() == (64, False)


# Who loads and who saves


@examples(
    """
a request loads and saves
    engine; stored 1; add a; admit a -> 32; step; loaded a; step a=68 -> save a 1-3
    finish a -> 96 tokens; gather
a request that may not load saves
    engine; stored 1; add a load=False; admit a -> nothing; step a=100 -> save a 0-3
    finish a -> 96 tokens; gather
a request that may not save loads
    engine; stored 1; add a save=False; admit a -> 32; step; loaded a; step a=68 -> nothing
    finish a -> nothing
a request that {may not: load=False save=False|cannot be shared: shareable=False} takes no part
    engine; stored 1; add a {}; admit a -> nothing; step a=100 -> nothing; finish a -> nothing
a request that reads no cache saves
    engine; stored 1; add a reads_cache=False; admit a -> nothing; step a=100 -> save a 0-3
    finish a -> 96 tokens; gather
an engine that produces loads and saves {role=kv_producer|role=kv_both}
    engine {}; stored 1; add a; admit a -> 32; step; loaded a; step a=68 -> save a 1-3
an engine that consumes loads and does not save
    engine role=kv_consumer; stored 1; add a; admit a -> 32; step; loaded a; step a=68 -> nothing
an engine that consumes and is to save answers loads and saves
    engine role=kv_consumer save_decode=True; stored 1; add a; admit a -> 32; step; loaded a
    step a=68 -> save a 1-3
what is unknown is answered calmly
    engine; poll x -> nothing; unknown x; step -> nothing
auto loads only what loading brings sooner
    # As long as nothing is known what is found is loaded. Then 500 tokens a second are computed.
    engine load_policy=auto; stored 3; add a; add b; admit b -> 96; add c; admit c -> 96
    add busy 1000 load=False save=False; step busy=500; wait 1; step busy=500
    load_stops b 96 1.0; match a -> nothing; load_stops c 96 0.001; match a -> 96
"""
)
def test_who_loads_and_who_saves(example: Example) -> None:
    example.play().close()


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
    """A running request computes its rest with the new adapter, a waiting one perhaps all."""
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
    """The pool's own cells are still loaded for such a request."""
    bench.hold(range(1000), range(2))
    bench.add()
    bench.views["a"].own = own
    assert bench.match("a", local) == (64 - local, True)
    bench.allocate("a", local, 64 - local)
    bench.step()
    bench.scheduler.load_ended("a")
    assert bool(bench.step(a=36).saves) is saves


def test_a_request_is_noted_as_it_is_admitted_and_not_before(bench: Bench) -> None:
    """The identity of a request is read before its admission.

    Requests that are not shared count, too: vLLM finds their blocks.
    """
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


# Pins and times to live


@examples(
    """
a pinned request saves again what it has loaded
    engine; stored 2; add a pin_s=2.0; admit a -> 64; step; loaded a; step a=36 -> save a 0-3
"""
)
def test_pins_and_times_to_live(example: Example) -> None:
    example.play().close()


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


# Failed loads


@examples(
    """
what could not be loaded is computed and saved
    engine; stored 3; add a; admit a; step; load_stops a 40; step a=68 -> save a 1-3
a preempted request is offered all once more after a failed load
    # What was missing it has computed, and saved, by then. After a second one it is offered what
    # that has loaded.
    engine; stored 3; add a; admit a; step; load_stops a 32; step a=68; gather; preempt a
    admit a -> 96; step; load_stops a 64; step a=36; gather; preempt a; match a -> 64
    preempt a; match a -> 64
a full load counts as hit
    engine; stored 2; add a; admit a; step; loaded a; loaded a; count hit_tokens 64
    count miss_tokens absent:32 short:4
"""
)
def test_failed_loads(example: Example) -> None:
    example.play().close()


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
    assert view.spans == [("kvpool.lookup", pytest.approx(LIMIT_S), attributes)]
    bench.store.faults.heal()


def test_a_request_s_tokens_are_logged_on_demand_for_explain(
    make: Make, caplog: pytest.LogCaptureFixture
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


@pytest.mark.parametrize(
    ("all_blocks", "again"), [(0, (96, True)), (14, (96, True)), (13, NOTHING)]
)
@pytest.mark.parametrize("fails", [False, True])
def test_offer_not_taken_is_made_again_unless_the_engine_may_lack_blocks_for_it(
    bench: Bench, all_blocks: int, again: tuple[int, bool], fails: bool
) -> None:
    """vLLM takes no offer before a request's embeddings are there, however many blocks it has.

    A request here needs seven blocks, and vLLM may keep as many more free.
    """
    view = bench.loading(3)
    if fails:
        bench.load_stops("a", 0)
    else:
        bench.load_stops("a", 96)
    bench.gather(bench.step(a=100 - view.num_computed_tokens))
    view.preempt()
    bench.add("queued")  # vLLM keeps no blocks free for it
    bench.pins.all_blocks = all_blocks  # 0: other requests have some
    assert bench.match() == (96, True)
    bench.step()
    assert bench.match() == again


@pytest.mark.parametrize("missing", [0, 3, 7, 13])
def test_after_a_failed_load_every_cell_is_asked_for(missing: int) -> None:
    """A missing cell in the middle costs one failed load, not two."""
    heads, num_tokens = 16, 15 * CHUNK
    names = CellNames(
        make_namespace("model", "0" * 12), [LayerGroup(Topology(heads, 1, ((0, 1),), 1), 16)]
    )
    bench = Bench(names=names)
    bench.hold(range(1000), range(15))
    view = bench.add("a", num_tokens + 4)
    # A sampling lookup asks for one cell of a chunk: the chunk's number modulo the cell count.
    bench.memory.remove(names.of_chunk(hashes_of(view.tokens())[missing])[missing - 1 :][:1])
    assert bench.admit() == (num_tokens, True)
    bench.step()
    bench.load_stops("a", missing * CHUNK)
    view.preempt()
    assert bench.match() == ((missing * CHUNK, True) if missing else NOTHING)
    assert bench.lookups.close()


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


@examples(
    """
a save names as many chunks before it as there are replicas {1|2|3}
    # So that each rank finds the one before that it keeps itself.
    engine num_replicas={}; add a; admit a; step a=32 -> save a 0-1; step a=32 -> save a 1-2
    step a=32 -> save a 2-3
a chunk is saved by the step that completes it
    engine; add a; admit a; step a=31 -> nothing; step a=1 -> save a 0-1; confirm
    step a=10 -> nothing; step a=57 -> save a 1-3; step a=1 -> nothing; finish a -> 96 tokens
what is saved is counted when a store has it
    engine; add a; admit a; step a=100; count saved_tokens; confirm; count saved_tokens 96
what is stored is not saved
    engine; stored 2; add a; admit a; step; loaded a; step a=36 -> only save a 2-3
decoded tokens are not saved
    engine; add a 60; admit a; step a=60 -> save a 0-1
    each 0-3: decode a $; step a=1 -> nothing
    decode a 9; finish a -> 32 tokens
decoded tokens are saved if asked
    engine save_decode=True; add a 60; admit a; step a=60 -> save a 0-1
    each 0-2: decode a $; step a=1 -> nothing
    decode a 3; step a=1 -> save a 1-2; decode a 9; finish a -> 64 tokens
drafts and tokens in flight are not saved
    # Of five tokens four are drafts: 65 tokens, 61 known.
    engine save_decode=True; add a 60; admit a; step a=60; decode a 1; step a=5 -> nothing
    decode a 2 3; computed a 63; step a=1 -> nothing; decode a 4; computed a 63
    step a=1 -> save a 1-2
the last sampled token is not saved
    engine save_decode=True max_pinned=2; add a 63; admit a; step a=63; gather; decode a 1
    computed a 64; finish a -> 32 tokens; step -> no save
the pinned blocks are bounded and the rest waits
    engine max_pinned=3; add a 128; admit a; step a=128 -> save a 0-1; decode a 1
    step a=1 -> nothing; gather; decode a 1; step a=1 -> save a 1-2; gather
    finish a -> 96 tokens; pending True; step -> save a 2-3; gather; pending False; pins 0
blocks that are gone are not saved
    engine; add a; admit a; step a=16; lose_block a 0; step a=32 -> nothing
a preempted request asks again and saves on
    engine; add a; admit a; step a=70; gather; stored 2; preempt a; admit a -> 64; step; loaded a
    step a=36 -> only save a 2-3
a preempted request that cannot be shared any more is let be
    # An adapter's files may be gone by then.
    engine; add a; admit a; step a=70; gather; preempt a; unname a; admit a -> nothing
    step a=100 -> nothing; finish a -> nothing
a preempted request without its cells saves on
    engine; add a; admit a; step a=70; gather; preempt a; admit a -> nothing; step a=70 -> no save
    step a=30 -> only save a 2-3
a lookup that another has replaced is not remembered
    engine; block exists a; preempt a; poll a -> pending; finish a; lookups 0
a lookup that takes too long after a preemption is a miss
    engine; stored 3; add a; match a -> 96; block exists b; preempt a; poll a -> pending; wait 1
    poll a -> nothing
a request that ends before its answer leaves nothing
    engine; block exists a; poll a -> pending; finish a -> 0 tokens; release; step; pending False
"""
)
def test_saves(example: Example) -> None:
    example.play().close()


def test_where_no_tier_takes_saves_nothing_is_planned_or_promised(make: Make) -> None:
    """A request that comes after a tier takes saves again is saved."""
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


def test_steps_without_room_look_at_nobody_and_then_at_whom_there_is_room_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
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


# The host tier


@examples(
    """
what a waiting request will load is fetched before its turn, with {100|96} tokens
    engine host_tier=True; stored 3; add a {}; settle -> prefetch a 3; step -> nothing
    match a; step -> nothing
what a waiting request will load of a short prompt is fetched before its turn
    engine host_tier=True; stored 3; add a 64; settle -> prefetch a 2; step -> nothing
    match a -> 63; step -> nothing
a request whose turn has come is not fetched for
    engine host_tier=True; stored 3; add a; add b; match a -> 96; answers
    step -> only prefetch b 3
nothing is fetched without a host tier
    engine; stored 3; add a; settle -> nothing
nothing is fetched of what is not stored
    engine host_tier=True; add a; settle -> nothing
nothing is fetched for a request that may not load
    engine host_tier=True; stored 3; add a load=False; settle -> nothing
"""
)
def test_the_host_tier(example: Example) -> None:
    example.play().close()


def test_what_ranks_have_in_host_memory_is_offered(make: Make) -> None:
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


@examples(
    """
what was computed before a reset is not saved after it
    # The weights may have changed; only what is computed anew is of the new ones.
    engine; add a; admit a; step a=100; gather; decode a 1 2 3; step a=1 -> nothing; reset
    step a=1 -> nothing; end_reset; step a=1 -> nothing; preempt a; admit a
    step a=100 -> save a 0-3; gather
a request that ends while loading saves nothing after a reset
    engine; stored 2; add a; admit a; step; reset; step; end_reset; finish a -> 0 tokens
    step -> no save
a reset drops the saves of requests that have ended
    engine max_pinned=2; add a 100; admit a; step a=100; gather; finish a; pending True; reset
    step -> no save; pending False
"""
)
def test_resets(example: Example) -> None:
    example.play().close()


def test_a_reset_removes_what_is_stored_and_saves_anew(make: Make) -> None:
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
    # Loaded tokens are of the weights before. Tokens computed from now on are not.
    bench.allocate("b", 0, 0)
    plan = bench.step(a=1, b=100)
    assert [save.request_id for save in plan.saves] == ["b"]
    bench.gather(plan, ranks=2)


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
    """Plays vLLM's scheduler and all ranks of workers, and knows the computed tokens."""

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
        """Admit a request, compute it, and store its saves."""
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
        """Let one pending event happen: an admission, a step, a load's end or a gather."""
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
        """Run one engine step and check all plans that the workers get."""
        before = {r: live.view.num_computed_tokens for r, live in self.live.items()}
        plan = self.bench.step(**(scheduled or {}))
        assert [(p.request_id, p.token_start, p.token_stop) for p in plan.loads] == (
            self.expected_loads
        )
        self.expected_loads = []
        in_words(self.bench, plan)  # checks the hashes and blocks of all plans
        for save in plan.saves:
            self.note_tokens(save)
            self.check_save(save, before, scheduled or {})
            self.saves[save.job_id] = (save, self.num_ranks)

    def note_tokens(self, save: SavePlan) -> None:
        """Record by its hash what each chunk holds."""
        tokens = self.bench.views[save.request_id].tokens()
        for chunk, chunk_hash in enumerate(save.hashes, save.first_chunk):
            self.bench.others[chunk_hash] = tokens[: chunk * CHUNK + (save.end_tokens or CHUNK)]

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
            return
        assert chunks.stop * CHUNK <= min(computed, live.view.num_tokens)
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
            put_cells(self.bench.memory, [key for h in save.hashes for key in NAMES.of_chunk(h)])
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
