"""The engine in the long run: ended jobs leave nothing behind, and work grows with cells only."""

import gc
import random
from collections.abc import Callable, Iterator

import pytest

from tests.support.invariants import check
from tests.transfer.engine_bench import (
    CORRUPT,
    DISK,
    DONE,
    EXISTED,
    FAILED,
    FAR,
    FULL,
    MISSING,
    TIMEOUT_S,
    UNREACHABLE,
    Bench,
)
from tests.transfer.lines import PACKAGE, counted_lines
from vllm_kvpool.transfer.graph import LaneLimits, Op
from vllm_kvpool.transfer.host_cache import CacheEntry
from vllm_kvpool.transfer.ops import CellOutcome, LaneName, OpKind

pytestmark = pytest.mark.slow

NUM_JOBS = 5_000
GROUPS = "abcdefghijklmnopqrstuvwxyz"
LIMITS = LaneLimits(batches=2, batch_ops=8, batch_bytes=1 << 20, budget_bytes=1 << 20)
BAD = {
    OpKind.GET: (MISSING, CORRUPT, FAILED, UNREACHABLE),
    OpKind.PUT: (EXISTED, FULL, FAILED, UNREACHABLE),
    OpKind.CHECK: (CORRUPT,),
}


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


def prompts(dice: random.Random) -> Iterator[str]:
    """Yield prompts: cells of consecutive chunks, two each. Some prompts come again and again."""
    while True:
        first = min(dice.randrange(len(GROUPS)), dice.randrange(len(GROUPS)))
        groups = GROUPS[first : first + dice.randrange(1, 5)]
        yield " ".join(f"{group}{i}" for group in groups for i in range(2))


@pytest.mark.parametrize(("policy", "write_back"), [("lru", False), ("lrfu", True)])
def test_nothing_is_left_of_jobs_that_are_over(policy: str, write_back: bool) -> None:
    dice = random.Random(0)
    bench = Bench(
        DISK, FAR, slots=24, reserve=4, keep=12, policy=policy, limits=LIMITS, write_back=write_back
    )
    bench.checks = False
    before = alive(Op), alive(CacheEntry)

    def outcome(lane: LaneName, key: str) -> CellOutcome:
        return dice.choice(BAD[lane.kind]) if lane.kind in BAD and dice.random() < 0.05 else DONE

    for job, cells in zip(range(NUM_JOBS), prompts(dice), strict=False):
        match dice.randrange(8):
            case 0 | 1 | 2:
                bench.load(job, cells)
            case 3 | 4 | 5:
                bench.save(job, cells)
            case 6:
                bench.prefetch(job, cells)
            case 7:
                bench.cancel(job - dice.randrange(3))
        bench.clock.advance(0.001)
        if dice.random() < 0.2:
            bench.run(outcome)
    while bench.running or bench.engine.next_deadline() is not None:
        bench.run()
        bench.after(1.0)
    check(bench.engine)
    assert bench.engine.idle
    assert bench.host_cache.num_idle <= 12
    assert bench.host_cache.slots.num_held == sum(each.num_cells for each in bench.host_cache)
    assert alive(Op) == before[0]
    assert alive(CacheEntry) == before[1] + len(list(bench.host_cache))
    assert all(not any(lane.queues) for lane in bench.engine.context.scheduler.lanes.values())


def test_a_load_that_is_over_holds_nothing_until_its_deadline() -> None:
    bench = Bench(DISK, keep=4, slots=8)
    before = alive(Op)
    bench.load(0, "a b")  # the first in the heap of deadlines
    bench.running.clear()
    for job in range(1, 50):
        bench.load(job, "c d e f")
        bench.run()
    assert alive(Op) - before <= 4 + 2


def lines_run(act: Callable[[], object]) -> int:
    """Return the number of the package's lines that an action runs."""
    with counted_lines(PACKAGE) as count:
        act()
    return count[0]


def many(count: int, group: str = "a") -> str:
    return " ".join(f"{group}{i}" for i in range(count))


def load_all(bench: Bench, count: int) -> None:
    bench.load(1, many(count))
    bench.run()


def save_all(bench: Bench, count: int) -> None:
    bench.save(1, many(count))
    bench.run()


def load_again(bench: Bench, count: int) -> None:
    load_all(bench, count)
    bench.load(2, many(count))
    bench.run()


def push_out(bench: Bench, count: int) -> None:
    load_all(bench, count)
    bench.load(2, many(count, "b"))
    bench.run()


def fail_late(bench: Bench, count: int) -> None:
    bench.load(1, many(count))
    bench.run(lambda lane, key: FAILED if key == f"a{count - 1}" else DONE)


def fail_all(bench: Bench, count: int) -> None:
    bench.load(1, many(count))
    bench.save(2, many(count, "b"))
    bench.run(lambda lane, key: DONE if lane.tier < 0 else UNREACHABLE)


def cancel_all(bench: Bench, count: int) -> None:
    bench.load(1, many(count))
    bench.cancel(1)
    bench.run()


def time_out(bench: Bench, count: int) -> None:
    bench.load(1, many(count))
    bench.after(TIMEOUT_S)
    bench.run()


def drop(bench: Bench, count: int) -> None:
    bench.save(1, many(count))
    bench.drop_saves(forget=True)
    bench.run()


STORIES = [
    *(load_all, save_all, load_again, push_out, fail_late, fail_all),
    *(cancel_all, time_out, drop),
]


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("story", STORIES)
def test_work_grows_with_the_number_of_cells_and_no_faster(
    story: Callable[[Bench, int], None], write_back: bool
) -> None:
    def cost(count: int) -> int:
        bench = Bench(
            DISK, slots=count + 16, keep=count, policy="lrfu", limits=LIMITS, write_back=write_back
        )
        bench.checks = False
        return lines_run(lambda: story(bench, count))

    assert cost(800) < 2.4 * cost(400)
