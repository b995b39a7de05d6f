"""The transfer engine, step by step: what each event makes it start and report, compared whole."""

import pytest

from tests.transfer.engine_bench import (
    CORRUPT,
    DISK,
    DONE,
    FAILED,
    FAR,
    MISSING,
    SINGLE,
    TIMEOUT_S,
    UNREACHABLE,
    Bench,
    save_job,
    slots_of,
)
from vllm_kvpool.transfer.fetches import MAX_WAITING_REMOVES
from vllm_kvpool.transfer.graph import Batch, BatchDone, LaneLimits, Owner, Priority
from vllm_kvpool.transfer.ops import (
    HOST,
    LaneName,
    OpKind,
)
from vllm_kvpool.transfer.saves import PATIENCE_LEFT_S, SAVE_STALL_S

# Loads


def test_a_load_gets_checks_and_scatters() -> None:
    bench = Bench(DISK)
    assert bench.load(1, "a b", first_chunk=3) == ["0 get-0 a b"]
    assert not bench.engine.idle
    assert bench.ends(0) == ["1 check a b"]
    assert bench.ends(1) == ["2 scatter a b"]
    assert bench.slots() == "2 2 0"
    assert bench.ends(2) == ["loaded 1 to 5 done"]
    assert bench.is_clean


def test_a_load_of_no_cells_is_done_at_once() -> None:
    bench = Bench(DISK)
    assert bench.load(1, "", first_chunk=2, stop=4) == ["loaded 1 to 4 done"]
    assert bench.is_clean


def test_a_load_without_any_tier_finds_nothing() -> None:
    assert Bench().load(1, "a b", first_chunk=2) == ["loaded 1 to 2 missing"]


def test_a_load_stops_at_the_first_chunk_it_cannot_have() -> None:
    bench = Bench(DISK)
    bench.load(1, "a b c d")
    assert bench.ends(0, DONE, MISSING, DONE, FAILED) == ["1 check a"]
    assert bench.slots() == "3 1 0"
    assert bench.run() == ["scatter a", "loaded 1 to 1 missing"]
    assert bench.is_clean


def test_a_chunk_is_whole_or_not_loaded() -> None:
    bench = Bench(DISK)
    bench.load(1, "a0 a1 b0 b1")
    assert bench.ends(0, DONE, DONE, DONE, MISSING) == ["1 check a0 a1"]
    assert bench.run() == ["scatter a0 a1", "loaded 1 to 1 missing"]


def test_an_earlier_failure_moves_the_stop_back() -> None:
    bench = Bench(DISK, limits=SINGLE)
    assert bench.load(1, "a b c") == ["0 get-0 a", "1 get-0 b"]
    assert bench.ends(1, MISSING) == []  # c is not asked for any more
    assert bench.ends(0, UNREACHABLE) == ["loaded 1 to 0 unreachable"]
    assert bench.is_clean


def test_a_later_failure_does_not_move_the_stop() -> None:
    bench = Bench(DISK, limits=SINGLE)
    bench.load(1, "a b c")
    assert bench.ends(0) == ["2 get-0 c", "3 check a"]
    assert bench.ends(1, MISSING) == []
    assert bench.ends(2, FAILED) == []
    assert bench.run() == ["scatter a", "loaded 1 to 1 missing"]


def test_a_failed_scatter_stops_the_load_there() -> None:
    bench = Bench(DISK)
    bench.load(1, "a b c")
    bench.ends(0)
    bench.ends(1)
    assert bench.ends(2, DONE, FAILED, DONE) == ["loaded 1 to 1 failed"]
    assert bench.is_clean


@pytest.mark.parametrize("lane", ["get", "check"])
def test_a_corrupt_cell_is_removed_from_its_tier_once(lane: str) -> None:
    bench = Bench(DISK)
    bench.load(1, "a b")
    bench.load(2, "b")
    if lane == "get":
        told = bench.ends(0, DONE, CORRUPT)
    else:
        bench.ends(0)
        told = bench.ends(1, DONE, CORRUPT)
    going_on = "check a" if lane == "get" else "scatter a"
    assert {line.lstrip("0123456789 ") for line in told} == {going_on, "remove-0 b"}
    assert {"loaded 1 to 1 corrupt", "loaded 2 to 0 corrupt"} <= set(bench.run())
    assert bench.is_clean


def test_the_removes_that_wait_are_bounded() -> None:
    count = MAX_WAITING_REMOVES + 10
    limits = LaneLimits(1, count, 1 << 40, 1 << 40)
    bench = Bench(DISK, slots=count, reserve=0, limits=limits)
    bench.load(1, " ".join(f"a{i}" for i in range(count)))
    *_, remove = bench.ends(0, CORRUPT)
    assert len(remove.split()) == 2 + MAX_WAITING_REMOVES


# Deadlines


def test_what_a_late_get_brings_is_for_the_next_load() -> None:
    bench = Bench(DISK)
    bench.load(1, "a b")
    assert bench.engine.next_deadline() == TIMEOUT_S
    assert bench.after(TIMEOUT_S - 1) == []
    assert bench.after(1) == ["loaded 1 to 0 timed_out"]
    assert bench.engine.next_deadline() is None
    assert bench.slots() == "2 2 0"
    assert not bench.engine.idle
    assert bench.load(2, "a b") == []
    assert bench.ends(0) == ["1 check a b"]
    assert bench.run() == ["scatter a b", "loaded 2 to 2 done"]
    assert bench.is_clean


def test_what_a_late_get_brings_for_nobody_frees_its_slot() -> None:
    bench = Bench(DISK)
    bench.load(1, "a b")
    bench.after(TIMEOUT_S)
    bench.ends(0, MISSING, DONE)
    bench.run()
    assert bench.is_clean


def test_a_late_load_keeps_the_chunks_it_has() -> None:
    bench = Bench(DISK, limits=SINGLE)
    bench.load(1, "a b c")
    bench.ends(0)
    assert bench.ends(3) == ["4 scatter a"]
    assert bench.ends(4) == []
    assert bench.after(TIMEOUT_S) == ["loaded 1 to 1 timed_out"]
    assert bench.slots() == "2 2 0"


def test_a_get_that_ends_at_its_deadline_may_not_scatter() -> None:
    bench = Bench(DISK)
    bench.load(1, "a")
    bench.clock.advance(TIMEOUT_S)
    assert bench.ends(0) == ["loaded 1 to 0 timed_out"]
    assert bench.is_clean


def test_a_load_that_waits_for_slots_also_times_out() -> None:
    bench = Bench(DISK, slots=2, reserve=0)
    bench.save(1, "a b")
    assert bench.load(2, "c") == []
    assert bench.after(TIMEOUT_S) == ["loaded 2 to 0 timed_out"]
    assert bench.run() == ["gathered 1", "seal a b", "put-0 a b", "saved 1: 2 done"]
    assert bench.is_clean


# Cancelling


def test_a_cancelled_load_is_reported_at_once_unless_it_scatters() -> None:
    bench = Bench(DISK)
    bench.load(1, "a b")
    assert bench.cancel(2) == []
    assert bench.cancel(1) == ["loaded 1 to 0 cancelled"]
    assert bench.cancel(1) == []
    assert bench.slots() == "2 2 0"
    bench.run()
    assert bench.is_clean


def test_cancelling_does_not_touch_the_requests_saves() -> None:
    bench = Bench(DISK)
    bench.save(1, "a")
    assert bench.cancel(1) == []
    assert bench.run() == ["gathered 1", "seal a", "put-0 a", "saved 1: 1 done"]


# Slots and lanes


def test_loads_go_first_and_have_a_reserve() -> None:
    bench = Bench(DISK, slots=3, reserve=1)
    assert bench.save(1, "a b c d") == ["0 gather a b"]
    assert bench.load(2, "e f") == ["1 get-0 e"]
    # A slot goes to the load, though the save has waited longer; the next stays for loads.
    assert bench.ends(0, DONE, FAILED) == ["2 get-0 f", "3 seal a"]
    assert bench.ends(1, MISSING) == ["loaded 2 to 0 missing"]
    assert bench.slots() == "1 2 0"


def test_a_batch_may_hold_cells_of_several_jobs() -> None:
    bench = Bench(DISK, slots=2, reserve=0)
    bench.load(1, "a b")
    assert bench.load(2, "c") == []
    assert bench.load(3, "d") == []
    assert bench.ends(0, MISSING) == ["loaded 1 to 0 missing", "1 get-0 c d"]


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


def test_a_fetch_that_is_tried_again_does_not_hold_a_slot_from_those_before_it() -> None:
    bench = Bench(FAR, slots=2, reserve=0)
    assert bench.load(1, "a b c d") == ["0 get-0 a b"]
    assert bench.ends(0, UNREACHABLE) == ["1 get-0 c d"]
    assert bench.after(1.0) == []
    assert bench.ends(1, DONE) == ["2 check c d"]
    assert bench.run()[-1] == "loaded 1 to 4 done"


def test_fetches_that_move_on_do_not_hold_slots_from_those_before_them() -> None:
    bench = Bench(DISK, FAR, slots=2, reserve=0)
    bench.load(1, "a b c d")
    bench.ends(0, DONE, FAILED)
    assert bench.run()[-1] == "loaded 1 to 4 done"
    assert bench.is_clean


def test_an_answer_to_no_question_is_a_bug() -> None:
    bench = Bench(DISK)
    with pytest.raises(KeyError):
        bench.engine.step(BatchDone(Batch(LaneName(OpKind.GET, 0), (), 0), (DONE,)), 0)
    bench.load(1, "a b")
    with pytest.raises(AssertionError):
        bench.engine.step(BatchDone(bench.running[0], (DONE,)), 0)


def test_a_deadline_makes_a_tick_due() -> None:
    bench = Bench(DISK, slots=2, reserve=1)
    assert bench.engine.next_deadline() is None
    bench.load(1, "a")
    assert bench.engine.next_deadline() == TIMEOUT_S
    assert bench.ends(0, FAILED) == ["loaded 1 to 0 failed"]
    assert bench.engine.next_deadline() is None
    bench.save(2, "b")
    assert bench.save(3, "c") == []
    bench.ends(1)
    assert bench.engine.next_deadline() == SAVE_STALL_S - PATIENCE_LEFT_S
