"""Layered loads on both sides: what a step waits for, and what a load that fails in it undoes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.scheduler.scheduler_bench import CHUNK, NOTHING, PENDING
from tests.scheduler.scheduler_bench import Bench as SchedulerBench
from tests.support.fakes import FakeClock, FakeExecutor
from tests.worker.test_pool_worker import DONE, load_plan, loaded, save_plan
from vllm_kvpool.config import KVPoolConfig, LoadPolicy, RequestOptions
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.messages import Loaded, StepPlan, StepReport
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
    """Not how long the step takes: `load_policy: auto` compares it with computing."""
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
    """They read those of a layer before them, or what is not shared."""
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
    """The last span is told of before the load as a whole."""
    bench, plan = WorkerBench(), layered()
    step = bench.begin(plan)
    bench.answers = [[span(plan, 0)], [span(plan, 2)], [loaded(plan, 2)]]
    bench.forward()
    assert bench.num_waits == 2
    results = bench.worker.finish_step(step, set())
    assert bench.num_waits == 3
    assert results.invalid_blocks == frozenset(range(104, 108))


def test_a_layer_that_has_not_asked_makes_the_load_a_failure() -> None:
    """It may have read what was not there: as with a CUDA graph around all layers."""
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


def bench_of(num_ranks: int = 1) -> SchedulerBench:
    return SchedulerBench(config=KVPoolConfig(layerwise=True), num_ranks=num_ranks)


def admitted(bench: SchedulerBench, request_id: str = "a", num_tokens: int = 6 * CHUNK) -> int:
    """Tokens that are loaded for a new request whose first four chunks are stored."""
    bench.hold(range(6 * CHUNK), range(4))
    bench.add(request_id, num_tokens)
    count, is_async = bench.match(request_id)
    assert count
    assert not is_async
    bench.grow(request_id, num_tokens)
    bench.allocate(request_id, 0, count)
    return count


def test_a_request_runs_in_the_step_that_loads_it_and_is_saved_after_it() -> None:
    bench = bench_of()
    assert admitted(bench) == 4 * CHUNK
    plan = bench.step(a=2 * CHUNK)
    [load] = plan.loads
    assert load.layered
    # What the step computes is wrong if the load fails in any rank, which nobody knows yet.
    assert plan.saves == ()
    bench.scheduler.step_ended()
    assert bench.counts("kvpool_hit_tokens") == {"": 4 * CHUNK}
    [save] = bench.step(a=1).saves
    assert (save.first_chunk, len(save.hashes)) == (4, 2)


def test_after_a_load_that_failed_what_was_computed_from_it_is_forgotten_and_not_saved() -> None:
    bench = bench_of()
    admitted(bench)
    bench.step(a=2 * CHUNK)
    bench.scheduler.apply(StepReport(loads={"a": Loaded(CHUNK)}))
    bench.scheduler.step_ended()
    # vLLM steps back; its prefix cache must not show the blocks to others meanwhile.
    assert bench.pins.forgotten == bench.tables["a"][CHUNK // BLOCK :]
    bench.views["a"].num_computed_tokens = CHUNK
    assert bench.counts("kvpool_hit_tokens") == {"": CHUNK}
    [save] = bench.step(a=2 * CHUNK).saves
    assert (save.first_chunk, len(save.hashes)) == (1, 2)
    [save] = bench.step(a=3 * CHUNK).saves
    assert (save.first_chunk, len(save.hashes)) == (3, 3)


def test_the_least_of_all_ranks_counts() -> None:
    bench = bench_of(num_ranks=2)
    admitted(bench)
    bench.step(a=CHUNK)
    report = StepReport.merge(StepReport(loads={"a": Loaded(n * CHUNK)}) for n in (2, 1))
    bench.scheduler.apply(report)
    bench.scheduler.step_ended()
    assert bench.pins.forgotten[0] == bench.tables["a"][CHUNK // BLOCK]
    assert bench.counts("kvpool_hit_tokens") == {"": CHUNK}


@pytest.mark.parametrize("failed", [False, True])
def test_a_request_that_ends_with_its_step_is_saved_if_the_load_was_good(failed: bool) -> None:
    bench = bench_of()
    admitted(bench)
    bench.step(a=2 * CHUNK)
    bench.finish()
    if failed:
        bench.scheduler.apply(StepReport(loads={"a": Loaded(CHUNK)}))
    bench.scheduler.step_ended()
    plan = bench.step()
    assert len(plan.saves) == (0 if failed else 1)
    bench.gather(plan)
    assert not bench.scheduler.saves.has_pending
    assert bench.counts("kvpool_hit_tokens") == {"": CHUNK if failed else 4 * CHUNK}


def test_nobody_is_let_in_who_would_read_blocks_that_are_being_loaded() -> None:
    bench = bench_of()
    admitted(bench)
    bench.add("b", 5 * CHUNK)
    bench.add("off", 5 * CHUNK, RequestOptions(load=False, save=False))
    bench.add("short", 3 * BLOCK)
    for other in ("b", "off"):  # their first block is in vLLM's own cache: it is that of "a"
        assert bench.scheduler.match(other, BLOCK) == PENDING
    assert bench.scheduler.match("short", 2 * BLOCK) == PENDING
    bench.step(a=2 * CHUNK)
    assert bench.scheduler.match("off", BLOCK) == PENDING
    bench.scheduler.step_ended()
    assert bench.scheduler.match("off", BLOCK) == NOTHING
    assert bench.match("b", 4 * CHUNK) == NOTHING


def test_requests_of_other_tokens_are_let_in_beside_a_load() -> None:
    bench = bench_of()
    admitted(bench)
    other = bench.add("b", 5 * CHUNK)
    other.prompt[:] = [7, *other.prompt[1:]]
    assert bench.match("b", BLOCK) == (4 * CHUNK - BLOCK, False)
    # And those of the same that have not found anything there.
    bench.add("c", 5 * CHUNK)
    assert bench.match("c", 0) == (4 * CHUNK, False)


def test_a_step_that_waits_for_a_load_says_nothing_of_how_fast_the_engine_computes() -> None:
    config = KVPoolConfig(layerwise=True, load_policy=LoadPolicy.AUTO)
    bench = SchedulerBench(config=config)
    admitted(bench)
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


def test_without_the_option_loads_are_of_whole_requests() -> None:
    bench = SchedulerBench()
    bench.hold(range(6 * CHUNK), range(4))
    bench.add("a", 6 * CHUNK)
    assert bench.match("a") == (4 * CHUNK, True)
    bench.allocate("a", 0, 4 * CHUNK)
    assert not bench.step().loads[0].layered
    bench.add("b", 6 * CHUNK)
    assert bench.match("b", BLOCK) == (4 * CHUNK - BLOCK, True)
