"""Store calls that do not return: their cells go on without them, their memory waits for them."""

import pytest

from tests.support.invariants import num_slots_written
from tests.transfer.engine_bench import (
    DISK,
    DONE,
    FAILED,
    FAR,
    MEMORY,
    MISSING,
    SINGLE,
    UNREACHABLE,
    Bench,
    putting,
    slots_of,
    two_batches,
    words,
)
from vllm_kvpool.storage.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S
from vllm_kvpool.transfer.ops import CellOutcome, OpKind

LATE = pytest.mark.parametrize("late", [DONE, FAILED, MISSING, UNREACHABLE])


# GET


@LATE
def test_cells_of_a_get_that_hangs_are_asked_of_the_next_tier_in_new_slots(
    late: CellOutcome,
) -> None:
    bench = Bench(MEMORY, DISK)
    bench.load(1, "a b")
    old = set(slots_of(bench.running[0]))
    assert bench.hangs(0) == ["1 get-1 a b"]
    assert not old & set(slots_of(bench.running[1]))
    assert bench.slots() == "0 2 2"
    assert bench.run() == ["check a b", "scatter a b", "loaded 1 to 2 done"]
    assert bench.engine.idle
    assert bench.slots() == "2 0 2"
    assert bench.late(0, late) == []
    assert bench.is_clean


@LATE
def test_with_one_tier_the_load_stops_in_time_and_nothing_is_scattered_late(
    late: CellOutcome,
) -> None:
    bench = Bench(DISK)
    bench.load(1, "a b")
    assert bench.hangs(0) == ["loaded 1 to 0 timed_out"]
    assert bench.slots() == "2 0 2"
    assert bench.late(0, late) == []
    assert bench.is_clean


def test_chunks_before_the_one_that_hangs_are_loaded() -> None:
    bench = two_batches(DISK)
    bench.load(1, "a b")
    assert bench.hangs(1) == []
    assert bench.ends(0) == ["2 check a"]
    assert bench.run() == ["scatter a", "loaded 1 to 1 timed_out"]
    bench.late(1)
    assert bench.is_clean


def test_who_wants_the_cell_again_gets_it_from_elsewhere() -> None:
    bench = Bench(MEMORY, DISK)
    bench.load(1, "a")
    bench.hangs(0)
    assert bench.load(2, "a") == []  # it shares the fetch from the next tier
    assert bench.run()[-2:] == ["loaded 1 to 1 done", "loaded 2 to 1 done"]
    assert bench.load(3, "a") == ["4 get-1 a"]  # the first tier is left alone
    bench.late(0)
    bench.run()
    assert bench.is_clean


def test_a_prefetch_that_hangs_goes_on_in_the_next_tier() -> None:
    bench = Bench(MEMORY, DISK, slots=6, keep=3)
    bench.prefetch(1, "a b")
    assert bench.hangs(0) == ["1 get-1 a b"]
    bench.run()
    assert bench.cells() == "a b"
    bench.late(0)
    assert bench.is_clean


def test_what_waits_behind_a_batch_that_hangs_goes_elsewhere_at_once() -> None:
    limits = {OpKind.GET: SINGLE}
    bench = Bench(MEMORY, DISK, slots=8, lanes=limits)
    bench.load(1, "a b c d")
    assert words(bench.hangs(0)) == ["get-1 c", "get-1 d"]
    assert bench.counted("kvpool_tier_up", tier="memory") == 0
    bench.ends(1)
    assert bench.run()[-1] == "loaded 1 to 4 done"
    bench.late(0)
    assert bench.is_clean


def test_a_tier_with_a_call_that_was_stuck_is_asked_again_after_a_pause() -> None:
    bench = Bench(DISK)
    bench.load(1, "a")
    bench.hangs(0)
    assert bench.load(2, "a") == ["loaded 2 to 0 unreachable"]
    bench.after(FIRST_PAUSE_S)
    assert bench.load(3, "a") == ["1 get-0 a"]
    bench.late(0)
    assert bench.run()[-1] == "loaded 3 to 1 done"
    assert bench.is_clean


def test_a_late_answer_says_nothing_about_the_tier() -> None:
    bench = Bench(DISK)
    bench.load(1, "a")
    bench.hangs(0)
    bench.late(0, DONE)
    assert bench.counted("kvpool_tier_up", tier="disk") == 0
    assert bench.counted("kvpool_hit_cells", tier="disk") == 0


# PUT


def test_loads_go_on_while_a_put_hangs_and_saves_wait() -> None:
    bench = putting(DISK, slots=4)
    bench.hangs(2)
    assert bench.load(2, "b") == ["3 get-0 b"]
    bench.run()
    assert bench.save(3, "c")[-1] == "saved 3: 1 unreachable"
    assert bench.load(4, "d") != []
    bench.run()


@LATE
@pytest.mark.parametrize("keep", [0, 4])
def test_a_save_whose_put_hangs_is_reported_and_its_slot_stays_out_of_use(
    keep: int, late: CellOutcome
) -> None:
    bench = putting(DISK, slots=2 + keep, keep=keep)
    [lent] = slots_of(bench.running[2])
    told = bench.hangs(2)
    assert told[-1] == "saved 1: 1 timed_out"
    assert bench.engine.idle
    free = bench.host_cache.slots.num_free
    assert bench.slots() == f"{free} 1 0"
    # Whoever wants the cell finds it here, and nobody writes into its slot.
    assert bench.load(2, "a") == ["3 scatter a"]
    assert slots_of(bench.running[3]) == [lent]
    assert bench.ends(3) == ["loaded 2 to 1 done"]
    bench.load(3, " ".join(f"{chunk}0" for chunk in "bcdefgh"))
    assert bench.engine.context.host_cache.get("a").slots == [lent]
    bench.run()
    # Loads went on meanwhile: they have filled the place that it would go back to, and what was
    # used once leaves.
    assert bench.late(2, late) == (["host -g"] if keep else [])
    assert bench.is_clean


def test_a_save_that_a_durable_tier_has_taken_is_saved_though_another_hangs() -> None:
    bench = Bench(MEMORY, DISK)
    bench.save(1, "a")
    bench.run_but("put-0", "put-1")
    assert sorted(bench.running) == [2, 3]
    bench.hangs(2)
    assert bench.engine.num_saves > 0
    assert bench.ends(3) == ["saved 1: 1 done"]
    assert bench.slots() == "3 1 0"
    bench.late(2)
    assert bench.is_clean


def test_a_put_on_a_remote_tier_is_not_tried_again_while_it_hangs() -> None:
    bench = Bench(FAR)
    bench.save(1, "a")
    bench.run_but("put-0")
    assert bench.hangs(2) == ["saved 1: 1 timed_out"]
    assert bench.after(LONGEST_PAUSE_S) == []
    bench.late(2)
    assert bench.is_clean


def test_a_dirty_cell_whose_put_hangs_is_held_until_the_answer() -> None:
    bench = Bench(DISK, slots=4, keep=2, write_back=True)
    bench.save(1, "a b")
    bench.run_but("put-0")
    put = next(iter(bench.running))
    lent = set(slots_of(bench.running[put]))
    assert len(lent) == 2
    bench.hangs(put)
    assert bench.cells() == "a b"  # no copy is tried again, as with one that fails
    assert bench.counted("kvpool_evicted_cells", tier="host", fate="lost") == 2
    bench.after(FIRST_PAUSE_S)
    bench.load(2, "c d")
    for batch in list(bench.running):
        assert not lent & set(slots_of(bench.running[batch]))
    bench.run()
    assert {"a", "b"} <= set(bench.cells().split())
    bench.late(put)
    assert bench.is_clean


# REMOVE


def test_the_removal_of_a_bad_cell_may_hang() -> None:
    bench = Bench(MEMORY, DISK)
    bench.load(1, "a")
    bench.ends(0, CellOutcome.CORRUPT)
    [batch] = [n for n, each in bench.running.items() if each.lane.kind is OpKind.REMOVE]
    assert bench.hangs(batch) == []
    assert bench.run()[-1] == "loaded 1 to 1 done"
    assert bench.late(batch) == []
    assert bench.is_clean


# From outside


def test_what_hangs_can_be_asked_for() -> None:
    bench = two_batches(MEMORY, DISK)
    bench.load(1, "a")
    bench.hangs(0)
    first, second = bench.hanging[0], bench.running[1]
    hung = bench.engine.hung_calls
    assert (len(hung), first in hung, second in hung) == (1, True, False)
    assert (num_slots_written(hung), hung.slots_read) == (1, set())
    bench.run()
    bench.late(0)
    assert (len(hung), first in hung, num_slots_written(hung)) == (0, False, 0)
