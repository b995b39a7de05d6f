"""Layered loads on both sides: a step's waits, and the effects of a load that fails in a step."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.scheduler.scheduler_bench import CHUNK
from tests.scheduler.scripts import Example, examples, play
from tests.support.fakes import FakeClock, FakeExecutor
from tests.worker.test_pool_worker import DONE, load_plan, loaded, save_plan
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.messages import Loaded, StepPlan
from vllm_kvpool.transfer.ops import CellOutcome, LoadPlan, SaveGathered, SpanLoaded
from vllm_kvpool.worker import pool_worker
from vllm_kvpool.worker.pool_worker import LATE_S, NOTHING_ENDED, PoolWorker, StepResults

LAYERS = {"l0": 0, "l1": 0, "l2": 2, "l3": 2}
TIMEOUT_S = 7.0
BLOCK = 16


# The worker side


class WorkerBench:
    """A worker whose engine answers, wait by wait, what the test has laid out."""

    def __init__(self) -> None:
        self.executor = FakeExecutor()
        self.registry = MetricsRegistry()
        self.worker = PoolWorker(
            self.executor,  # type: ignore[arg-type]
            CHUNK,
            BLOCK,
            finish_in_step=False,
            registry=self.registry,
            layer_spans=LAYERS,
            load_timeout_s=TIMEOUT_S,
        )
        self.answers: list[list[object]] = []
        self.executor.on_wait = self._answer

    def _answer(self) -> None:
        if self.answers:
            self.executor.reports += self.answers.pop(0)

    @property
    def num_waits(self) -> int:
        return len(self.executor.waited)

    def begin(self, *loads: LoadPlan) -> StepPlan:
        plan = StepPlan(loads=loads)
        self.worker.start_loads(plan)
        return plan

    def forward(self, *names: str) -> None:
        for name in names or LAYERS:
            self.worker.wait_for_layer(name)


def layered(request: str = "a", job: int = 1, start: int = 0) -> LoadPlan:
    return replace(load_plan(start, job=job, request=request), layered=True)


def span(plan: LoadPlan, layer: int) -> SpanLoaded:
    return SpanLoaded(plan.job_id, layer)


def test_each_layer_waits_for_its_own_span_alone() -> None:
    bench, plan = WorkerBench(), layered()
    step = bench.begin(plan)
    bench.answers = [[span(plan, 0)], [span(plan, 2), loaded(plan, 4, DONE)]]
    bench.forward("l0")
    assert bench.num_waits == 1
    bench.forward("l1")
    assert bench.num_waits == 1
    bench.forward("l2", "l3")
    assert bench.num_waits == 2
    # The request was never waiting: its load is no news, and nothing is invalid.
    assert bench.worker.finish_step(step, set()) == NOTHING_ENDED
    report = bench.worker.take_report()
    assert report is not None
    assert report.loads["a"].tokens == plan.token_stop
    assert bench.worker.take_report() is None


def test_all_loads_of_the_step_are_waited_for() -> None:
    bench = WorkerBench()
    one, two = layered(), layered("b", 2)
    bench.begin(one, two)
    bench.answers = [[span(one, 0), span(one, 2)], [loaded(one, 4, DONE)], [span(two, 0)]]
    bench.forward("l0")
    assert bench.num_waits == 3


def test_what_a_load_costs_is_how_long_it_holds_the_step_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`load_policy: auto` compares this delay with computing.

    The step's whole time does not count.
    """
    clock = FakeClock(100.0)
    monkeypatch.setattr(pool_worker, "time", SimpleNamespace(monotonic=clock))
    bench = WorkerBench()
    one, two = layered(), layered("b", 2)
    step = bench.begin(one, two)
    bench.answers = [
        [span(x, y) for x in (one, two) for y in (0, 2)],
        [loaded(one, 4, DONE), loaded(two, 4, DONE)],
    ]
    answer = bench.executor.on_wait

    def after_a_second() -> None:
        clock.advance(1.0)
        answer()

    bench.executor.on_wait = after_a_second
    for name in LAYERS:
        bench.worker.wait_for_layer(name)
        clock.advance(1.5)  # it computes
    bench.worker.finish_step(step, set())
    report = bench.worker.take_report()
    assert report is not None
    assert report.loads == {"a": Loaded(4 * CHUNK, 1.0), "b": Loaded(4 * CHUNK, 1.0)}


def test_wait_for_copies_between_steps_is_not_part_of_the_next_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM waits for copies before it sleeps."""
    clock = FakeClock(100.0)
    monkeypatch.setattr(pool_worker, "time", SimpleNamespace(monotonic=clock))
    bench, save = WorkerBench(), save_plan(3)
    bench.worker.start_saves(StepPlan(saves=(save,)))
    bench.answers = [[SaveGathered(save.job_id, save.request_id)]]
    answer = bench.executor.on_wait

    def after_a_second() -> None:
        clock.advance(1.0)
        answer()

    bench.executor.on_wait = after_a_second
    bench.worker.wait_for_copies()
    plan = layered()
    step = bench.begin(plan)
    bench.answers = [[span(plan, 0), span(plan, 2), loaded(plan, 4, DONE)]]
    bench.forward()
    bench.worker.finish_step(step, set())
    report = bench.worker.take_report()
    assert report is not None
    assert report.loads["a"].seconds == 1.0


def test_layers_without_pages_of_their_own_wait_for_nothing() -> None:
    """Such layers read the pages of an earlier layer, or pages that are not shared."""
    bench = WorkerBench()
    bench.begin(layered())
    bench.forward("draft.0")
    assert bench.num_waits == 0


def test_without_a_layered_load_nobody_waits() -> None:
    bench = WorkerBench()
    step = bench.begin(load_plan())
    bench.forward()
    assert bench.num_waits == 0
    assert bench.worker.finish_step(step, set()) == NOTHING_ENDED


@pytest.mark.parametrize("ok_stop", range(4))
def test_a_load_that_stops_in_mid_step_invalidates_blocks_in_the_same(ok_stop: int) -> None:
    bench, plan = WorkerBench(), layered()
    step = bench.begin(plan)
    bench.answers = [[span(plan, 0)], [loaded(plan, ok_stop, CellOutcome.CORRUPT)]]
    bench.forward()
    results = bench.worker.finish_step(step, set())
    lost = range(100 + ok_stop * CHUNK // BLOCK, 100 + 4 * CHUNK // BLOCK)
    assert results == StepResults(invalid_blocks=frozenset(lost))
    report = bench.worker.take_report()
    assert report is not None
    assert report.loads["a"].tokens == ok_stop * CHUNK
    assert bench.registry.snapshot() == {"kvpool_failures{kind=load_corrupt}": 1}


def test_the_step_ends_no_earlier_than_its_loads() -> None:
    """The last span is reported before the load as a whole."""
    bench, plan = WorkerBench(), layered()
    step = bench.begin(plan)
    bench.answers = [[span(plan, 0)], [span(plan, 2)], [loaded(plan, 2)]]
    bench.forward()
    assert bench.num_waits == 2
    results = bench.worker.finish_step(step, set())
    assert bench.num_waits == 3
    assert results.invalid_blocks == frozenset(range(104, 108))


def test_a_layer_that_has_not_asked_makes_the_load_a_failure() -> None:
    """The layer may have read unfilled blocks, as with a CUDA graph around all layers."""
    bench, plan = WorkerBench(), layered(start=BLOCK)
    step = bench.begin(plan)
    bench.answers = [[span(plan, 0), span(plan, 2), loaded(plan, 4, DONE)]]
    bench.forward("l0", "l1", "l3")
    results = bench.worker.finish_step(step, set())
    assert results == StepResults(invalid_blocks=frozenset(range(101, 108)))
    report = bench.worker.take_report()
    assert report is not None
    assert report.loads["a"].tokens == BLOCK
    assert bench.registry.snapshot() == {"kvpool_failures{kind=layer_not_asked}": 1}
    # The next step starts afresh.
    again = layered(job=2)
    step = bench.begin(again)
    bench.answers = [[span(again, 0), span(again, 2), loaded(again, 4, DONE)]]
    bench.forward()
    assert bench.worker.finish_step(step, set()) == NOTHING_ENDED


def test_an_engine_that_is_silent_beyond_the_deadline_ends_the_step() -> None:
    bench = WorkerBench()
    bench.begin(layered())
    with pytest.raises(RuntimeError, match="has not ended"):
        bench.forward()
    [waited_s] = bench.executor.waited
    assert TIMEOUT_S < waited_s <= TIMEOUT_S + LATE_S


def test_reports_of_others_that_come_meanwhile_are_not_lost() -> None:
    bench, plan = WorkerBench(), layered()
    other = load_plan(job=9, request="z")
    bench.begin(other)
    step = bench.begin(plan)
    bench.worker.start_saves(StepPlan(saves=(save_plan(3),)))
    bench.answers = [[loaded(other, 4, DONE), span(plan, 0)], [loaded(plan, 4, DONE)]]
    bench.forward()
    assert bench.worker.finish_step(step, set()) == StepResults(frozenset({"z"}))


# The scheduler side

ADMITTED = (
    "engine layerwise=True; stored 4; add a 192; match a -> 128 now; grow a 192; allocate a 0 128"
)


@examples(
    """
a request runs in the step that loads it and is saved after it
    # What the step computes is wrong if the load fails in any rank, which nobody knows yet.
    step a=64 -> load a 0-128 layered; step_ended; count hit_tokens 128; step a=1 -> save a 4-6
after a load that failed what was computed from it is forgotten and not saved
    # vLLM steps back; its prefix cache must not show the blocks to others meanwhile.
    step a=64; fails a 32; step_ended; forgotten a 32; computed a 32; count hit_tokens 32
    step a=64 -> save a 1-3; step a=96 -> save a 3-6
the least of all ranks counts
    step a=32; fails a 64 32; step_ended; forgotten a 32; count hit_tokens 32
a request that ends with its step is saved if the load was good
    step a=64; finish a; step_ended; step -> save a 4-5; gather; pending False
    count hit_tokens 128
a request that ends with its step is not saved if the load was not good
    step a=64; finish a; fails a 32; step_ended; step -> nothing; pending False
    count hit_tokens 32
nobody is let in who would read blocks that are being loaded
    # Their first block is in vLLM's own cache: it is that of `a`.
    add b 160; add off 160 load=False save=False; add short 48; poll b 16 -> pending
    poll off 16 -> pending; poll short 32 -> pending; step a=64; poll off 16 -> pending
    step_ended; poll off 16 -> nothing; match b 128 -> nothing
""",
    given=ADMITTED,
)
def test_layered_loads(example: Example) -> None:
    example.play().close()


@examples(
    """
without the option loads are of whole requests
    engine; stored 4; add a 192; match a -> 128; allocate a 0 128; step -> load a 0-128
    add b 192; match b 16 -> 112
"""
)
def test_loads_that_are_not_layered(example: Example) -> None:
    example.play().close()


def test_requests_of_other_tokens_are_let_in_beside_a_load() -> None:
    bench = play(ADMITTED)
    other = bench.add("b", 5 * CHUNK)
    other.prompt[:] = [7, *other.prompt[1:]]
    assert bench.match("b", BLOCK) == (4 * CHUNK - BLOCK, False)
    # And those of the same that have not found anything there.
    bench.add("c", 5 * CHUNK)
    assert bench.match("c", 0) == (4 * CHUNK, False)
    bench.close()


def test_a_step_that_waits_for_a_load_says_nothing_of_how_fast_the_engine_computes() -> None:
    bench = play(ADMITTED.replace("layerwise=True", "layerwise=True load_policy=auto"))
    bench.step(a=2 * CHUNK)
    bench.clock.advance(1.0)
    bench.scheduler.step_ended()
    bench.step(a=1)
    assert bench.scheduler._load_costs._compute is None
    bench.clock.advance(1.0)
    bench.add("b", 100 * CHUNK)
    bench.match("b")
    bench.step(b=10 * CHUNK)
    bench.clock.advance(1.0)
    bench.step(b=1)
    assert bench.scheduler._load_costs._compute == 10 * CHUNK
    bench.close()
