"""Fences: pages are touched after what the model was given before their plan, and wait for nothing
that it was given later."""

import threading
from typing import NamedTuple

import pytest

from tests.support.fakes import FakeExecutor
from tests.transfer.engine_bench import DISK, FAILED, SINGLE, Bench, load_job, save_job
from tests.transfer.test_executor import LIMIT_S, Rank, load_plan, rank, save_plan, store
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.storage.open_tiers import OpenTiers
from vllm_kvpool.transfer.executor import Fenced
from vllm_kvpool.transfer.ops import (
    HOST,
    CellOutcome,
    JobId,
    LaneName,
    LoadDone,
    OpKind,
    SaveGathered,
)
from vllm_kvpool.worker.lane_limits import lanes_of
from vllm_kvpool.worker.pool_worker import PoolWorker

__all__ = ["rank", "store"]


class Named(NamedTuple):
    """A fence that the test ends by ending its batch."""

    name: str

    def synchronize(self) -> None:
        raise AssertionError("the engine waits for nothing")


class Held:
    """A fence that a test reaches."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def synchronize(self) -> None:
        assert self.reached.wait(LIMIT_S)


ONE, TWO = Named("one"), Named("two")


def bench(*tiers: object, keep: int = 4) -> Bench:
    lanes = {OpKind.FENCE: SINGLE}
    return Bench(*tiers, slots=8, keep=keep, lanes=lanes)  # type: ignore[arg-type]


def filled(*tiers: object) -> Bench:
    """Cells a and b are in host memory."""
    made = bench(*tiers)
    made.save(9, "a b")
    made.run()
    return made


def fenced_load(rig: Bench, job: int, cells: str, fence: Named) -> list[str]:
    return rig.step(load_job(job, cells)._replace(fence=fence))


def fences(rig: Bench) -> list[str]:
    """The fences that the lane has, with the numbers of their batches."""
    return [
        f"{number} {fence.name}"  # type: ignore[attr-defined]
        for number, batch in rig.running.items()
        for fence in batch.fences
    ]


def test_a_load_waits_for_its_own_fence_and_not_for_a_later_one() -> None:
    rig = filled()
    fenced_load(rig, 1, "a", ONE)
    fenced_load(rig, 2, "b", TWO)
    (first, _), (second, _) = (each.split() for each in fences(rig))
    assert not any(batch.parts for batch in rig.running.values())
    assert [line.split()[1:] for line in rig.ends(int(first))] == [["scatter", "a"]]
    assert "loaded 1 to 1 done" in rig.ends(max(rig.running))
    assert [line.split()[1:] for line in rig.ends(int(second))] == [["scatter", "b"]]


def test_a_cell_that_comes_late_waits_for_no_later_fence() -> None:
    """A batch that had cells of both loads would wait for the later step."""
    rig = bench(DISK, keep=0)
    fenced_load(rig, 1, "a", ONE)
    rig.ends(int(fences(rig)[0].split()[0]))
    fenced_load(rig, 2, "b", TWO)
    assert "loaded 1 to 1 done" in rig.run_but("fence")
    assert [each.split()[1] for each in fences(rig)] == ["two"]


def test_plans_of_one_step_wait_once() -> None:
    rig = filled()
    fenced_load(rig, 1, "a", ONE)
    fenced_load(rig, 2, "b", ONE)
    assert len(fences(rig)) == 1
    assert rig.run() == ["scatter a b", "loaded 1 to 1 done", "loaded 2 to 1 done"]


def test_a_save_is_gathered_after_its_fence() -> None:
    rig = bench()
    rig.step(save_job(1, "a")._replace(fence=ONE))
    assert not any(batch.parts for batch in rig.running.values())
    assert rig.run()[0] == "gather a"


def test_a_load_that_is_cancelled_before_its_fence_ends_at_once() -> None:
    rig = filled()
    fenced_load(rig, 1, "a", ONE)
    assert rig.cancel(1) == ["loaded 1 to 0 cancelled"]
    assert rig.run() == []


def test_jobs_of_a_fence_that_fails_have_failed() -> None:
    """The device reports an error: no page may be touched."""
    rig = filled()
    fenced_load(rig, 1, "a", ONE)
    assert rig.ends(int(fences(rig)[0].split()[0]), FAILED) == ["loaded 1 to 0 failed"]
    rig.step(save_job(2, "c")._replace(fence=TWO))
    told = rig.ends(int(fences(rig)[0].split()[0]), FAILED)
    assert told == ["gathered 2", "saved 2: 1 failed"]
    assert rig.engine.idle
    rig.load(3, "a")
    assert rig.run()[-1] == "loaded 3 to 1 done"


def test_pages_of_a_missing_optional_cell_are_cleared_after_the_fence() -> None:
    rig = filled()
    fenced_load(rig, 1, "a x?", ONE)
    assert not any(batch.parts for batch in rig.running.values())
    assert rig.run() == ["scatter a x?", "loaded 1 to 2 done"]
    assert rig.loaded[0].cleared == {1}


def test_pages_of_an_optional_cell_are_not_cleared_if_the_fence_fails() -> None:
    rig = filled()
    fenced_load(rig, 1, "a? x?", ONE)
    assert rig.ends(int(fences(rig)[0].split()[0]), FAILED) == ["loaded 1 to 0 failed"]
    assert rig.engine.idle


def test_the_lane_takes_fences_one_by_one() -> None:
    """In one batch the first would be reported with the last."""
    _, limits = lanes_of(OpenTiers((), (), (), ()), 1 << 20, 1)[LaneName(OpKind.FENCE, HOST)]
    assert limits.batch_ops == 1


def test_a_load_ends_while_the_fence_of_a_later_plan_is_not_reached(rank: Rank) -> None:
    """Over the real threads."""
    rank.save(1, 2)
    reached, held = Held(), Held()
    reached.reached.set()
    rank.executor.post(Fenced(load_plan(2, (3, 4), 0, 32), reached))
    rank.executor.post(Fenced(save_plan(3, 3), held))
    loaded, gathered = (LoadDone(JobId(2), "r2", 1, CellOutcome.DONE), SaveGathered(JobId(3), "r3"))
    assert rank.executor.wait(lambda reports: loaded in reports, LIMIT_S)
    assert sum(len(move.addresses) for move in rank.copier.gathered) == 8
    assert gathered not in rank.executor.drain()
    held.reached.set()
    assert rank.executor.wait(lambda reports: gathered in reports, LIMIT_S)


def test_pages_are_touched_after_their_fence(rank: Rank) -> None:
    held = Held()
    rank.executor.post(Fenced(save_plan(1, 1), held))
    rank.executor.post(save_plan(2, 3))
    first, second = SaveGathered(JobId(1), "r1"), SaveGathered(JobId(2), "r2")
    assert rank.executor.wait(lambda reports: second in reports, LIMIT_S)
    assert first not in rank.executor.drain()
    held.reached.set()
    assert rank.executor.wait(lambda reports: first in reports, LIMIT_S)


@pytest.mark.parametrize("has_fences", [True, False])
def test_a_step_takes_one_fence_for_its_loads_and_one_for_its_saves(has_fences: bool) -> None:
    taken = iter("abc")
    executor = FakeExecutor()
    worker = PoolWorker(
        executor,  # type: ignore[arg-type]
        32,
        16,
        False,
        MetricsRegistry(),
        new_fence=lambda: Named(next(taken)) if has_fences else None,
    )
    loads = load_plan(1, (3, 4), 0, 32), load_plan(2, (5, 6), 0, 32)
    saves = (save_plan(3, 1),)
    for plan in (StepPlan(), StepPlan(loads=loads, saves=saves)):
        worker.start_loads(plan)
        worker.start_saves(plan)
    if has_fences:
        a, b = Named("a"), Named("b")
        assert executor.posted == [*(Fenced(load, a) for load in loads), Fenced(saves[0], b)]
        assert next(taken) == "c"
    else:
        assert executor.posted == [*loads, *saves]
