"""Fences: a batch waits for the model's work from before its plan, but not for later work."""

import threading

import pytest

from tests.support.fakes import FakeExecutor
from tests.transfer.engine_bench import NamedFence
from tests.transfer.scripts import Example, examples
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


class Held:
    """A fence that waits until the test marks it as reached."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def synchronize(self) -> None:
        assert self.reached.wait(LIMIT_S)


@examples(
    """
a load waits for its own fence and not for a later one
    load 1 a fence=one -> 1 fence one; load 2 b fence=two -> 2 fence two; ends 1 -> 3 scatter a
    ends 3 -> ... loaded 1 to 1 done; ends 2 -> scatter b
plans of one step wait once
    load 1 a fence=one -> fence one; load 2 b fence=one -> nothing
    run -> scatter a b | loaded 1 to 1 done | loaded 2 to 1 done
a load that is cancelled before its fence ends at once
    load 1 a fence=one; cancel 1 -> loaded 1 to 0 cancelled; run -> nothing
jobs of a fence that fails have failed
    # The device reports an error: no page may be touched.
    load 1 a fence=one; ends fence failed -> loaded 1 to 0 failed; save 2 c fence=two
    ends fence failed -> gathered 2 | saved 2: 1 failed; idle; load 3 a
    run -> last loaded 3 to 1 done
pages of a missing optional cell are cleared after the fence
    load 1 a x? fence=one -> fence one; run -> scatter a x? | loaded 1 to 2 done; cleared 1
pages of an optional cell are not cleared if the fence fails
    load 1 a? x? fence=one; ends fence failed -> loaded 1 to 0 failed; idle
""",
    given="on slots=8 keep=4 fences=2x1; save 9 a b; run",
)
def test_fences_of_host_memory(example: Example) -> None:
    example.play()


@examples(
    """
a cell that comes late waits for no later fence
    # A batch that had cells of both loads would wait for the later step.
    on disk slots=8 fences=2x1; load 1 a fence=one; ends fence; load 2 b fence=two
    run_but fence -> ... loaded 1 to 1 done; lanes fence
a save is gathered after its fence
    on slots=8 keep=4; save 1 a fence=one -> fence one; run -> first gather a
"""
)
def test_fences_of_tiers(example: Example) -> None:
    example.play()


def test_the_lane_takes_fences_one_by_one() -> None:
    """In one batch, the first fence would be reported with the last."""
    _, limits = lanes_of(OpenTiers((), (), (), ()), 1 << 20, 1)[LaneName(OpKind.FENCE, HOST)]
    assert limits.batch_ops == 1


def test_a_load_ends_while_the_fence_of_a_later_plan_is_not_reached(rank: Rank) -> None:
    """With real threads."""
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
        new_fence=lambda: NamedFence(next(taken)) if has_fences else None,
    )
    loads = load_plan(1, (3, 4), 0, 32), load_plan(2, (5, 6), 0, 32)
    saves = (save_plan(3, 1),)
    for plan in (StepPlan(), StepPlan(loads=loads, saves=saves)):
        worker.start_loads(plan)
        worker.start_saves(plan)
    if has_fences:
        a, b = NamedFence("a"), NamedFence("b")
        assert executor.posted == [*(Fenced(load, a) for load in loads), Fenced(saves[0], b)]
        assert next(taken) == "c"
    else:
        assert executor.posted == [*loads, *saves]
