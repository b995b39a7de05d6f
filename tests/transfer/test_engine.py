"""The transfer engine, step by step: all actions and reports of each event are compared."""

import pytest

from tests.transfer.engine_bench import CORRUPT, DISK, DONE, FAILED, FAR, Bench, save_job, slots_of
from tests.transfer.scripts import Example, examples
from vllm_kvpool.transfer.fetches import MAX_WAITING_REMOVES
from vllm_kvpool.transfer.graph import Batch, BatchDone, LaneLimits, Owner, Priority
from vllm_kvpool.transfer.ops import HOST, LaneName, OpKind

# Loads


@examples(
    """
a load gets checks and scatters
    on disk; load 1 a b after=3 -> 0 get-0 a b; busy; ends 0 -> 1 check a b
    ends 1 -> 2 scatter a b; slots 2 2 0; ends 2 -> loaded 1 to 5 done; clean
a load of no cells is done at once
    on disk; load 1 after=2 stop=4 -> loaded 1 to 4 done; clean
a load without any tier finds nothing
    on; load 1 a b after=2 -> loaded 1 to 2 missing
a load stops at the first chunk it cannot have
    on disk; load 1 a b c d; ends 0 done missing done failed -> 1 check a; slots 3 1 0
    run -> scatter a | loaded 1 to 1 missing; clean
a chunk is whole or not loaded
    on disk; load 1 a0 a1 b0 b1; ends 0 done done done missing -> 1 check a0 a1
    run -> scatter a0 a1 | loaded 1 to 1 missing
an earlier failure moves the stop back
    on disk limits=2x1; load 1 a b c -> 0 get-0 a | 1 get-0 b; ends 1 missing -> nothing
    ends 0 unreachable -> loaded 1 to 0 unreachable; clean
a later failure does not move the stop
    on disk limits=2x1; load 1 a b c; ends 0 -> 2 get-0 c | 3 check a; ends 1 missing -> nothing
    ends 2 failed -> nothing; run -> scatter a | loaded 1 to 1 missing
a failed scatter stops the load there
    on disk; load 1 a b c; ends 0; ends 1; ends 2 done failed done -> loaded 1 to 1 failed; clean
a corrupt cell that its get notices is removed from its tier once
    on disk; load 1 a b; load 2 b; ends 0 done corrupt -> any order check a | remove-0 b
    run -> ... loaded 1 to 1 corrupt | loaded 2 to 0 corrupt; clean
a corrupt cell that its check notices is removed from its tier once
    on disk; load 1 a b; load 2 b; ends 0
    ends 1 done corrupt -> any order scatter a | remove-0 b
    run -> ... loaded 1 to 1 corrupt | loaded 2 to 0 corrupt; clean
"""
)
def test_loads(example: Example) -> None:
    example.play()


def test_the_removes_that_wait_are_bounded() -> None:
    count = MAX_WAITING_REMOVES + 10
    limits = LaneLimits(1, count, 1 << 40, 1 << 40)
    bench = Bench(DISK, slots=count, reserve=0, limits=limits)
    bench.load(1, " ".join(f"a{i}" for i in range(count)))
    *_, remove = bench.ends(0, CORRUPT)
    assert len(remove.split()) == 2 + MAX_WAITING_REMOVES


# Deadlines


@examples(
    """
what a late get brings is for the next load
    on disk; load 1 a b; due TIMEOUT_S; after TIMEOUT_S-1 -> nothing
    after 1 -> loaded 1 to 0 timed_out; due never; slots 2 2 0; busy; load 2 a b -> nothing
    ends 0 -> 1 check a b; run -> scatter a b | loaded 2 to 2 done; clean
what a late get brings for nobody frees its slot
    on disk; load 1 a b; after TIMEOUT_S; ends 0 missing done; run; clean
a late load keeps the chunks it has
    on disk limits=2x1; load 1 a b c; ends 0; ends 3 -> 4 scatter a; ends 4 -> nothing
    after TIMEOUT_S -> loaded 1 to 1 timed_out; slots 2 2 0
a get that ends at its deadline may not scatter
    on disk; load 1 a; wait TIMEOUT_S; ends 0 -> loaded 1 to 0 timed_out; clean
a load that waits for slots also times out
    on disk slots=2 reserve=0; save 1 a b; load 2 c -> nothing
    after TIMEOUT_S -> loaded 2 to 0 timed_out
    run -> gathered 1 | seal a b | put-0 a b | saved 1: 2 done; clean
"""
)
def test_deadlines(example: Example) -> None:
    example.play()


# Cancelling


@examples(
    """
a cancelled load is reported at once unless it scatters
    on disk; load 1 a b; cancel 2 -> nothing; cancel 1 -> loaded 1 to 0 cancelled
    cancel 1 -> nothing; slots 2 2 0; run; clean
cancelling does not touch the requests saves
    on disk; save 1 a; cancel 1 -> nothing; run -> gathered 1 | seal a | put-0 a | saved 1: 1 done
"""
)
def test_cancelling(example: Example) -> None:
    example.play()


# Slots and lanes


@examples(
    """
loads go first and have a reserve
    on disk slots=3 reserve=1; save 1 a b c d -> 0 gather a b; load 2 e f -> 1 get-0 e
    ends 0 done failed -> 2 get-0 f | 3 seal a; ends 1 missing -> loaded 2 to 0 missing
    slots 1 2 0
a batch may hold cells of several jobs
    on disk slots=2 reserve=0; load 1 a b; load 2 c -> nothing; load 3 d -> nothing
    ends 0 missing -> loaded 1 to 0 missing | 1 get-0 c d
a fetch that is tried again does not hold a slot from those before it
    on far slots=2 reserve=0; load 1 a b c d -> 0 get-0 a b; ends 0 unreachable -> 1 get-0 c d
    after 1.0 -> nothing; ends 1 done -> 2 check c d; run -> last loaded 1 to 4 done
fetches that move on do not hold slots from those before them
    on disk far slots=2 reserve=0; load 1 a b c d; ends 0 done failed
    run -> last loaded 1 to 4 done; clean
a deadline makes a tick due
    on disk slots=2 reserve=1; due never; load 1 a; due TIMEOUT_S
    ends 0 failed -> loaded 1 to 0 failed; due never; save 2 b; save 3 c -> nothing; ends 1
    due SAVE_STALL_S-PATIENCE_LEFT_S
"""
)
def test_slots_and_lanes(example: Example) -> None:
    example.play()


def test_a_batch_says_for_whom_since_when_and_how_often() -> None:
    bench = Bench(FAR)
    bench.load(1, "a")
    bench.clock.advance(1.0)
    bench.ends(0, FAILED)
    batch = bench.running[1]
    assert batch.lane == LaneName(OpKind.GET, 0)
    assert batch.owners == (Owner(Priority.LOAD, "r1", 1),)
    assert (batch.ready_at, batch.attempt) == (1.0, 2)


def test_parts_of_a_gather_say_where_the_pages_are() -> None:
    bench = Bench(DISK)
    job = save_job(1, "a b")
    [batch] = bench.engine.step(job, 0.0)
    assert isinstance(batch, Batch)
    assert batch.lane == LaneName(OpKind.GATHER, HOST)
    assert tuple(part.slab for part in batch.parts) == job.slabs
    assert len(set(slots_of(batch))) == 2


def test_an_answer_to_no_question_is_a_bug() -> None:
    bench = Bench(DISK)
    with pytest.raises(KeyError):
        bench.engine.step(BatchDone(Batch(LaneName(OpKind.GET, 0), (), 0), (DONE,)), 0)
    bench.load(1, "a b")
    with pytest.raises(AssertionError):
        bench.engine.step(BatchDone(bench.running[0], (DONE,)), 0)
