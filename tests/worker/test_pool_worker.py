"""The worker side: the engine gets each result of loads and saves once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes import FakeExecutor
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.loads import IDLE_WAIT_MAX_S
from vllm_kvpool.scheduler.messages import StepPlan, StepReport, Stored
from vllm_kvpool.transfer.ops import (
    CancelRequest,
    CellOutcome,
    DropSaves,
    HandOverEnd,
    HostCacheChange,
    JobId,
    JobPages,
    LoadDone,
    LoadPlan,
    PrefetchPlan,
    SaveDone,
    SaveGathered,
    SavePlan,
    SavesDropped,
)
from vllm_kvpool.worker.pool_worker import GATHER_WAIT_S, PoolWorker, StepResults

CHUNK = 32
MISSING, DONE = CellOutcome.MISSING, CellOutcome.DONE
NOTHING = StepResults()


class Bench:
    def __init__(
        self, block: int = 16, *, in_step: bool = False, rank: int = 0, resumes: bool = True
    ) -> None:
        self.executor = FakeExecutor()
        self.registry = MetricsRegistry()
        self.worker = PoolWorker(
            self.executor, CHUNK, block, in_step, self.registry, rank=rank, resumes=resumes
        )

    def step(self, plan: StepPlan | None, *finished: str) -> StepResults:
        """Run one engine step. Each hook is called as often as in the release that calls it
        most."""
        if plan is not None:
            self.worker.start_loads(plan)
            self.worker.start_loads(plan)
            self.worker.start_saves(plan)
            self.worker.start_saves(plan)
        return self.worker.finish_step(plan, set(finished))


def load_plan(
    start: int = 0, stop: int = 4 * CHUNK, block: int = 16, job: int = 1, request: str = "a"
) -> LoadPlan:
    """Return a load of tokens [start, stop), with a table whose block ids begin at 100."""
    first, last = start // CHUNK, -(-stop // CHUNK)
    hashes = tuple(bytes([i]) for i in range(first, last))
    blocks = tuple(range(100 + start // block, 100 - (-stop // block)))
    table_start = start // block * block
    pages = JobPages(blocks, table_start, start, stop)
    return LoadPlan(JobId(job), request, first, hashes, (pages,), start, stop)


def save_plan(job: int = 1, request: str = "a") -> SavePlan:
    return SavePlan(JobId(job), request, 0, (b"x",), (JobPages((5, 6), 0, 0, CHUNK),))


def loaded(plan: LoadPlan, ok_stop_chunk: int, reason: CellOutcome = MISSING) -> LoadDone:
    return LoadDone(plan.job_id, plan.request_id, ok_stop_chunk, reason)


# Loads


@given(st.integers(1, 80), st.integers(0, 5), st.integers(1, 400), st.integers(0, 20))
def test_a_load_that_stops_invalidates_every_block_not_filled(
    block: int, first_block: int, length: int, ok_chunks: int
) -> None:
    """Blocks before the load are no part of it, and never invalid."""
    start = first_block * block
    plan = load_plan(start, start + length, block)
    bench = Bench(block)
    assert bench.step(StepPlan(loads=(plan,))) == NOTHING
    ok_stop = min(plan.first_chunk + ok_chunks, plan.first_chunk + len(plan.hashes))
    bench.executor.reports.append(loaded(plan, ok_stop))
    kept = min(start + length, max(start, ok_stop * CHUNK))
    missing = {100 + token // block for token in range(kept, start + length)}
    assert bench.step(None) == StepResults(frozenset({"a"}), frozenset(missing))
    report = bench.worker.take_report()
    assert report is not None
    assert report.loads["a"].tokens == kept


@pytest.mark.parametrize("ok_stop", range(5))
def test_where_nothing_goes_on_from_a_block_the_request_has_failed(ok_stop: int) -> None:
    """A group that reads only the last tokens has pages that begin after the point where the load
    may stop."""
    plan = load_plan()
    window = JobPages((107,), 7 * 16, 7 * 16, plan.token_stop)
    plan = replace(plan, pages=(window,))
    bench = Bench(resumes=False)
    bench.step(StepPlan(loads=(plan,)))
    bench.executor.reports.append(loaded(plan, ok_stop))
    failed = {"a"} if ok_stop < 4 else set()
    assert bench.step(None) == StepResults(frozenset({"a"}), failed=frozenset(failed))
    report = bench.worker.take_report()
    assert report is not None
    assert report.loads["a"].tokens == ok_stop * CHUNK


def test_a_load_is_posted_once_and_reported_once() -> None:
    bench = Bench()
    plan = load_plan()
    assert bench.step(StepPlan(loads=(plan,))) == NOTHING
    assert bench.executor.posted == [plan]
    bench.executor.reports.append(loaded(plan, 4, DONE))
    assert bench.step(None) == StepResults(frozenset({"a"}), frozenset())
    assert bench.step(None) == NOTHING


def test_a_failed_load_is_counted_by_its_reason() -> None:
    bench = Bench()
    plan = load_plan()
    bench.step(StepPlan(loads=(plan,)))
    bench.executor.reports.append(loaded(plan, 2, CellOutcome.TIMED_OUT))
    bench.step(None)
    assert bench.registry.snapshot() == {"kvpool_failures{kind=load_timed_out}": 1}


def test_the_load_of_a_request_that_has_ended_is_cancelled() -> None:
    bench = Bench()
    plan, other = load_plan(), load_plan(job=2, request="b")
    bench.step(StepPlan(loads=(plan, other)))
    assert bench.step(None, "a", "c") == NOTHING
    assert bench.executor.posted == [plan, other, CancelRequest("a")]
    bench.executor.reports.append(loaded(plan, 0, CellOutcome.CANCELLED))
    # vLLM frees the request's blocks after the report; until then no other request gets them.
    assert bench.step(None).loaded == {"a"}


def test_an_idle_step_waits_a_moment_for_a_load() -> None:
    bench = Bench()
    plan = load_plan()
    bench.executor.on_wait = lambda: bench.executor.reports.append(loaded(plan, 4, DONE))
    assert bench.step(StepPlan(loads=(plan,), idle=True)).loaded == {"a"}
    assert bench.step(StepPlan(idle=True)) == NOTHING
    bench.step(StepPlan(loads=(load_plan(job=2),)))
    [waited_s] = bench.executor.waited
    assert 0 < waited_s <= IDLE_WAIT_MAX_S


# Saves


def test_a_save_is_posted_once_and_its_gather_reported_once() -> None:
    bench = Bench()
    plan = save_plan()
    assert bench.step(StepPlan(saves=(plan,))) == NOTHING
    assert bench.executor.posted == [plan]
    assert bench.executor.waited == []
    assert bench.worker.take_report() is None
    bench.executor.reports += [
        SaveGathered(JobId(1), "a"),
        SaveDone(JobId(1), "a", ((DONE, 1),)),
    ]
    assert bench.step(None) == NOTHING
    assert bench.worker.take_report() == StepReport(
        gathered={JobId(1): 1}, stored={JobId(1): Stored()}
    )
    assert bench.worker.take_report() is None


def test_an_idle_step_waits_a_moment_for_a_save() -> None:
    bench = Bench()
    bench.step(StepPlan(saves=(save_plan(),)))
    bench.step(StepPlan(idle=True))
    [waited_s] = bench.executor.waited
    assert 0 < waited_s <= IDLE_WAIT_MAX_S
    bench.executor.reports.append(SaveDone(JobId(1), "a", ((DONE, 1),), (0,)))
    bench.step(StepPlan())
    bench.step(StepPlan(idle=True))
    assert len(bench.executor.waited) == 1


def test_on_the_cpu_the_gather_ends_within_the_step() -> None:
    bench = Bench(in_step=True)
    plans = (save_plan(1), save_plan(2, "b"))
    bench.executor.on_wait = lambda: bench.executor.reports.extend(
        SaveGathered(plan.job_id, plan.request_id) for plan in plans
    )
    bench.step(StepPlan(saves=plans))
    assert bench.executor.waited == [GATHER_WAIT_S]
    assert bench.worker.take_report() == StepReport(gathered={JobId(1): 1, JobId(2): 1})
    bench.step(StepPlan())
    assert bench.executor.waited == [GATHER_WAIT_S]


def test_a_step_waits_for_its_own_gathers() -> None:
    bench = Bench(in_step=True)
    others = [SaveGathered(JobId(9), "z"), SaveGathered(JobId(1), "a")]
    bench.executor.on_wait = lambda: bench.executor.reports.extend(others)
    bench.step(StepPlan(saves=(save_plan(1),)))
    bench.step(StepPlan(saves=(save_plan(1), save_plan(2))))
    assert bench.executor.ready == [True, False]


def test_reports_of_a_step_are_merged() -> None:
    bench = Bench()
    plan, other = load_plan(), load_plan(0, CHUNK, job=2, request="b")
    bench.step(StepPlan(loads=(plan, other), saves=(save_plan(3),)))
    bench.executor.reports += [
        loaded(plan, 1),
        SaveGathered(JobId(3), "a"),
        loaded(other, 1, DONE),
    ]
    assert bench.step(None).loaded == {"a", "b"}
    report = bench.worker.take_report()
    assert report is not None
    assert {each: load.tokens for each, load in report.loads.items()} == {"a": CHUNK, "b": CHUNK}
    assert all(load.seconds > 0 for load in report.loads.values())
    assert report.gathered == {JobId(3): 1}


# The host tier


def test_what_host_memory_holds_is_told_with_the_rank() -> None:
    bench = Bench(rank=3)
    bench.executor.reports += [HostCacheChange(("x", "y"), ()), SaveGathered(JobId(1), "a")]
    assert bench.step(StepPlan()) == NOTHING
    bench.executor.reports.append(HostCacheChange(("z",), ("x",)))
    bench.step(StepPlan())
    assert bench.worker.take_report() == StepReport(
        gathered={JobId(1): 1}, host={3: HostCacheChange(("y", "z"), ("x",))}
    )
    assert bench.worker.take_report() is None


def test_prefetches_are_posted_once_and_nobody_waits_for_them() -> None:
    bench = Bench()
    prefetches = (PrefetchPlan("a", (b"x", b"y")), PrefetchPlan("b", (b"z",)))
    assert bench.step(StepPlan(prefetches=prefetches, idle=True)) == NOTHING
    assert bench.executor.posted == list(prefetches)
    assert bench.executor.waited == []
    assert bench.worker.take_report() is None


def test_a_reset_comes_before_the_loads_and_prefetches_of_its_step() -> None:
    bench = Bench()
    prefetch, load = PrefetchPlan("b", (b"z",)), load_plan()
    bench.step(StepPlan(loads=(load,), prefetches=(prefetch,), generation=1))
    assert bench.executor.posted == [DropSaves(forget=True, generation=1), load, prefetch]


# Resets, and no store


def test_a_new_generation_drops_saves_before_its_own() -> None:
    bench = Bench()
    bench.step(StepPlan(saves=(save_plan(1),)))
    plan = StepPlan(saves=(save_plan(2),), generation=1)
    bench.step(plan)
    bench.step(StepPlan(saves=(save_plan(3),), generation=1))
    assert bench.executor.posted == [
        save_plan(1),
        DropSaves(forget=True, generation=1),
        save_plan(2),
        save_plan(3),
    ]
    assert bench.worker.take_report() is None  # earlier transfers may still be in flight
    bench.executor.reports.append(SavesDropped(1))
    bench.step(None)
    assert bench.worker.take_report() == StepReport(dropped={1: 1})


def test_a_save_that_has_ended_is_told_with_what_was_lost_of_it() -> None:
    bench = Bench()
    full = ((8, CellOutcome.FULL),)
    bench.executor.reports.append(SaveDone(JobId(1), "a", ((DONE, 2),), (1,), (7, 8), full))
    bench.step(None)
    stored = {JobId(1): Stored(1, frozenset({1}), frozenset({7, 8}), {8: "full"})}
    assert bench.worker.take_report() == StepReport(stored=stored)


# Drafters


def with_drafts() -> Bench:
    bench = Bench(in_step=True)
    bench.worker = PoolWorker(
        bench.executor, CHUNK, 16, True, bench.registry, has_drafts=True, lookahead=1
    )
    return bench


def test_saves_that_a_drafter_delays_are_reported_with_their_own_step() -> None:
    """vLLM's first runner asks for results and report, then drafts, then waits for the saves. An
    in-process engine may run no further step."""
    bench, save = with_drafts(), save_plan()
    plan = StepPlan(saves=(save,))
    bench.worker.start_loads(plan)
    bench.worker.finish_step(plan, set())
    assert bench.executor.posted == []
    assert bench.worker.take_report() is None
    assert bench.worker.awaits_saves
    bench.worker.start_saves(plan)
    assert not bench.worker.awaits_saves
    done = loaded(load_plan(job=3, request="b"), 4, DONE)
    bench.executor.reports += [SaveGathered(save.job_id, "a"), HostCacheChange(("x",), ())]
    report = bench.worker.take_gathered()
    assert report is not None
    assert report.gathered == {save.job_id: 1}
    assert bench.worker.take_gathered() is None
    # No other chunk is lost.
    bench.step(StepPlan(loads=(load_plan(job=3, request="b"),)))
    later = bench.worker.take_report()
    assert later is not None
    assert later.host[0].added == ("x",)
    bench.executor.reports.append(done)
    assert bench.worker.take_gathered() is None
    assert bench.step(None).loaded == {"b"}


def test_saves_of_a_step_that_told_no_end_start_with_the_next() -> None:
    """Some releases do not wait for saves in steps without tokens."""
    bench, save = with_drafts(), save_plan()
    bench.worker.start_loads(StepPlan(saves=(save,)))
    bench.worker.finish_step(None, set())
    bench.worker.start_loads(StepPlan())
    assert bench.executor.posted == [save]
    assert not bench.worker.awaits_saves


def test_saves_of_steps_after_one_without_results_are_lost() -> None:
    """vLLM's second runner does not end a step whose forward pass has failed."""
    bench, end = Bench(in_step=True), HandOverEnd("a", b"t" * 20, 0, 0)
    bench.worker.start_loads(StepPlan(saves=(save_plan(),), hand_over_ends=(end,)))
    bench.step(StepPlan(saves=(save_plan(2, "b"),)))
    assert bench.executor.posted == [end]
    report = bench.worker.take_report()
    assert report is not None
    assert report.gathered == {JobId(1): 1, JobId(2): 1}
    lost = {0: CellOutcome.FAILED.value}
    assert {job: how.lost for job, how in report.stored.items()} == {JobId(1): lost, JobId(2): lost}
    assert bench.registry.snapshot() == {"kvpool_failures{kind=step}": 1}


def test_a_load_that_stops_invalidates_the_block_of_the_row_before_it() -> None:
    """The drafter's row before the missing chunk is stored in the missing chunk's cell."""
    bench, plan = with_drafts(), load_plan()
    bench.step(StepPlan(loads=(plan,)))
    bench.executor.reports.append(loaded(plan, 2))
    first = 100 + (2 * CHUNK - 1) // 16
    assert min(bench.step(None).invalid_blocks) == first


def test_cleared_chunks_are_reported_for_their_request() -> None:
    bench, plan = with_drafts(), load_plan()
    bench.step(StepPlan(loads=(plan,)))
    bench.executor.reports.append(loaded(plan, 4, DONE)._replace(cleared=frozenset({1, 3})))
    bench.step(None)
    report = bench.worker.take_report()
    assert report is not None
    assert report.loads["a"].cleared == {1, 3}


def test_a_rank_without_the_drafters_layers_reports_every_chunk_as_cleared() -> None:
    """The last pipeline stage alone sees that they are others than all parts have derived."""
    bench, plan = Bench(in_step=True), load_plan()
    bench.worker.lacks_drafts = True
    bench.step(StepPlan(loads=(plan,)))
    bench.executor.reports.append(loaded(plan, 4, DONE))
    bench.step(None)
    report = bench.worker.take_report()
    assert report is not None
    assert report.loads["a"].cleared == set(range(plan.first_chunk, plan.stop_chunk))


def test_pages_are_free_once_their_copies_have_ended() -> None:
    """vLLM 0.33 asks whether pages are free before it sleeps, even while aborted loads still
    run."""
    bench, load, save = Bench(), load_plan(), save_plan(2, "b")
    bench.step(StepPlan(loads=(load,), saves=(save,)))
    ends = [SaveGathered(save.job_id, "b"), loaded(load, 4, DONE)]
    bench.executor.on_wait = lambda: bench.executor.reports.append(ends.pop(0))
    bench.worker.wait_for_copies()
    assert not ends
    bench.worker.wait_for_copies()
    assert len(bench.executor.waited) == 2
    # The next step reports the ended jobs.
    assert bench.step(None).loaded == {"a"}
    report = bench.worker.take_report()
    assert report is not None
    assert report.gathered == {save.job_id: 1}


def test_copies_that_do_not_end_keep_an_engine_awake() -> None:
    bench = Bench()
    bench.step(StepPlan(saves=(save_plan(),)))
    with pytest.raises(RuntimeError, match="has not ended"):
        bench.worker.wait_for_copies()
