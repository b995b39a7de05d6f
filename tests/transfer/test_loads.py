"""Loads over host memory: what they find there, share with others, and leave behind."""

import pytest

from tests.transfer.engine_bench import (
    CORRUPT,
    DISK,
    DONE,
    FAILED,
    MISSING,
    SINGLE,
    TIMEOUT_S,
    Bench,
    load_job,
    words,
)
from vllm_kvpool.transfer.graph import LaneLimits
from vllm_kvpool.transfer.loads import URGENT_S, Priority
from vllm_kvpool.transfer.ops import CellOutcome, LaneName, OpKind

ONE = LaneLimits(batches=1, batch_ops=1, batch_bytes=1 << 20, budget_bytes=1 << 20)


def hosted(*, slots: int = 8, keep: int = 4, limits: LaneLimits = SINGLE) -> Bench:
    return Bench(DISK, slots=slots, keep=keep, limits=limits)


def test_a_saved_cell_is_found_by_the_next_load_without_a_get() -> None:
    bench = hosted()
    bench.save(1, "a")
    bench.run()
    assert bench.load(2, "a") == ["3 scatter a"]
    assert bench.ends(3) == ["loaded 2 to 1 done"]
    assert bench.counted("kvpool_hit_cells", tier="host") == 1


def test_a_loaded_cell_is_found_by_the_next_load() -> None:
    bench = hosted()
    bench.load(1, "a")
    bench.run()
    assert bench.load(2, "a") == ["3 scatter a"]


def test_without_a_host_tier_nothing_stays() -> None:
    bench = Bench(DISK)
    bench.save(1, "a")
    assert "host +a" not in bench.run()
    assert bench.cells() == ""
    assert bench.load(2, "a") == ["3 get-0 a"]


# Sharing


@pytest.mark.parametrize("keep", [0, 4])
def test_two_loads_of_one_cell_share_a_fetch(keep: int) -> None:
    bench = Bench(DISK, keep=keep, slots=8)
    assert bench.load(1, "a b") == ["0 get-0 a b"]
    assert bench.load(2, "b c") == ["1 get-0 c"]
    bench.ends(0)
    told = bench.ends(2)
    assert "3 scatter a b b" in told
    assert bench.slots() == "5 3 0"
    told = bench.run()
    assert {"loaded 1 to 2 done", "loaded 2 to 2 done"} < set(told)
    assert bench.is_clean


def test_a_load_waits_for_the_gather_of_a_save() -> None:
    bench = Bench(DISK)
    bench.save(1, "a")
    assert bench.load(2, "a") == []
    told = bench.ends(0)
    assert told[0] == "gathered 1"
    assert {line.lstrip("0123456789 ") for line in told[1:]} == {"seal a", "scatter a"}
    assert "loaded 2 to 1 done" in bench.run()


def test_a_load_of_a_cell_whose_gather_fails_stops() -> None:
    bench = Bench(DISK)
    bench.save(1, "a")
    bench.load(2, "a")
    assert bench.ends(0, FAILED) == ["loaded 2 to 0 failed", "gathered 1", "saved 1: 1 failed"]
    assert bench.is_clean


def test_a_cell_that_cannot_be_had_stops_all_who_wait_for_it() -> None:
    bench = Bench(DISK)
    bench.load(1, "a b")
    bench.load(2, "a c", first_chunk=5)
    told = bench.ends(0, MISSING, DONE)
    assert sorted(told) == ["loaded 1 to 0 missing", "loaded 2 to 5 missing"]
    bench.run()
    assert bench.is_clean


def test_cancelling_one_of_two_loads_leaves_the_other() -> None:
    bench = hosted(limits=ONE)
    bench.load(1, "x a")
    bench.load(2, "a")
    assert bench.cancel(1) == ["loaded 1 to 0 cancelled"]
    assert "loaded 2 to 1 done" in bench.run()


@pytest.mark.parametrize("keep", [0, 4])
def test_cancelling_the_only_load_cancels_a_fetch_that_has_not_started(keep: int) -> None:
    bench = Bench(DISK, keep=keep, slots=8, limits=ONE)
    bench.load(1, "a b")
    bench.cancel(1)
    assert not any("b" in line.split() for line in bench.run())
    assert bench.cells() == ("a" if keep else "")  # what ran has ended, and is kept
    assert bench.is_clean


def test_a_cancelled_fetch_that_waits_for_its_check_frees_its_slot() -> None:
    bench = Bench(DISK, slots=8, limits=ONE)
    bench.load(1, "a b")
    assert bench.ends(0) == ["1 get-0 b", "2 check a"]
    assert bench.ends(1) == []
    bench.cancel(1)
    assert bench.slots() == "7 1 0"


def test_a_late_load_leaves_the_fetch_to_others_who_wait_for_it() -> None:
    bench = Bench(DISK)
    bench.load(1, "a")
    bench.clock.advance(TIMEOUT_S / 2)
    bench.load(2, "a")
    assert bench.after(TIMEOUT_S / 2) == ["loaded 1 to 0 timed_out"]
    assert bench.slots() == "3 1 0"
    bench.ends(0)
    assert "loaded 2 to 1 done" in bench.run()


def test_each_load_stops_at_its_own_deadline_and_once() -> None:
    bench = Bench(DISK, slots=8, reserve=0)
    for job, timeout_s in enumerate((3, 1, 2, 4)):
        bench.load(job, "abcd"[job], timeout_s=timeout_s)
    assert bench.engine.next_deadline() == 1.0
    assert bench.cancel(1) == ["loaded 1 to 0 cancelled"]
    assert bench.engine.next_deadline() == 2.0
    assert bench.after(1.0) == []
    assert bench.after(1.0) == ["loaded 2 to 0 timed_out"]
    assert bench.after(2.0) == ["loaded 0 to 0 timed_out", "loaded 3 to 0 timed_out"]
    assert bench.engine.next_deadline() is None


# Streams: chunks that another engine stores while the load is under way


def test_chunks_of_a_stream_are_fetched_as_they_land() -> None:
    bench = Bench(DISK, slots=8, reserve=0)
    assert bench.load(1, "a b c", landed=1) == ["0 get-0 a"]
    bench.ends(0)
    assert bench.land(1, 2) == ["2 get-0 b"]
    bench.run()
    assert bench.land(1, 3, final=True)[0].endswith("get-0 c")
    assert bench.run()[-1] == "loaded 1 to 3 done"


def test_stream_that_ends_early_keeps_what_has_landed() -> None:
    bench = Bench(DISK, slots=8, reserve=0)
    bench.load(1, "a b c", landed=1)
    assert bench.run() == ["check a", "scatter a"]
    assert bench.land(1, 1, final=True) == ["loaded 1 to 1 missing"]
    assert bench.land(1, 3, final=True) == []


def test_stream_waits_for_chunks_beyond_its_deadline() -> None:
    bench = Bench(DISK, slots=8, reserve=0)
    bench.load(1, "a b", landed=1)
    bench.run()
    assert bench.after(2 * TIMEOUT_S) == []
    bench.land(1, 2)
    assert bench.engine.next_deadline() == 3 * TIMEOUT_S
    assert bench.after(TIMEOUT_S) == ["loaded 1 to 1 timed_out"]


def test_stream_waits_beyond_its_deadline_for_chunks_that_are_not_named_yet() -> None:
    bench = Bench(DISK, slots=8, reserve=0)
    job = load_job(1, "a b c", landed=0)
    bench.step(job._replace(slabs=job.slabs[:2], rest=iter([job.slabs[2:]])))
    assert bench.after(2 * TIMEOUT_S) == []
    bench.land(1, 3, final=True)
    assert bench.run()[-1] == "loaded 1 to 3 done"


def test_fetch_that_hangs_after_the_producer_has_gone_ends_the_load_soon() -> None:
    bench = Bench(DISK, slots=8, reserve=0)
    bench.load(1, "a b", landed=0)
    bench.land(1, 1)
    assert bench.land(1, 1, final=True, urgent=True) == []
    assert bench.after(URGENT_S) == ["loaded 1 to 0 timed_out"]


def test_stream_of_a_request_that_has_ended_is_given_up() -> None:
    bench = Bench(DISK, slots=8, reserve=0)
    bench.load(1, "a b", landed=0)
    assert bench.cancel(1) == ["loaded 1 to 0 cancelled"]


# Leaving


def test_the_coldest_cells_leave_for_what_comes_in() -> None:
    bench = hosted(slots=6, keep=3)
    for job, key in enumerate("abc"):
        bench.load(job, key)
        bench.run()
        bench.after(1.0)
    bench.load(3, "a")
    bench.run()
    bench.load(4, "d e")
    changes = [line for line in bench.run() if line.startswith("host")]
    assert changes == ["host +d", "host +e", "host -b", "host -c"]
    assert bench.cells() == "a d e"
    assert bench.counted("kvpool_evicted_cells", tier="host", fate="dropped") == 2


@pytest.mark.parametrize("job", ["load", "save"])
def test_the_end_of_a_prompt_leaves_before_its_beginning(job: str) -> None:
    bench = Bench(DISK, slots=8, keep=4)
    (bench.load if job == "load" else bench.save)(1, "a b c d")
    bench.run()
    bench.load(2, "x y")
    bench.run()
    assert bench.cells() == "a b x y"


def test_a_cell_that_is_held_does_not_leave() -> None:
    bench = Bench(DISK, slots=3, reserve=0, keep=1, limits=ONE)
    bench.save(1, "a")
    bench.run()
    bench.load(2, "a")
    bench.load(3, "b c d e")
    told = bench.run_but("scatter")
    assert "-a" not in " ".join(told).split()
    assert bench.slots() == "0 3 0"
    told = bench.run()
    assert "loaded 2 to 1 done" in told
    assert "loaded 3 to 4 done" in told


# What the scheduler is told


def test_chunk_is_here_when_all_its_slabs_are() -> None:
    bench = Bench(DISK, keep=4, slots=8, slabs_per_chunk=2, apart=True)
    bench.save(1, "a0")
    assert not any(line.startswith("host") for line in bench.run())
    bench.save(2, "a1")
    assert "host +a" in bench.run()


def test_chunk_is_gone_when_one_of_its_slabs_is() -> None:
    bench = Bench(DISK, keep=4, slots=8, slabs_per_chunk=2, apart=True)
    bench.load(1, "a0 a1 b0 b1")
    assert "host +a +b" in bench.run()
    bench.load(2, "c0")
    assert [line for line in bench.run() if line.startswith("host")] == ["host -b"]
    bench.load(3, "d0")
    assert not any(line.startswith("host") for line in bench.run())


# A reset


def test_a_reset_forgets_every_cell() -> None:
    bench = hosted()
    bench.save(1, "a b")
    bench.run()
    assert bench.drop_saves() == []
    assert bench.cells() == "a b"
    assert bench.drop_saves(forget=True) == ["host -a -b"]
    assert bench.slots() == "8 0 0"
    assert bench.load(2, "a")[0].endswith("get-0 a")


@pytest.mark.parametrize(("step", "outcome"), [("get-0", DONE), ("check", DONE), ("check", FAILED)])
def test_a_cell_that_is_fetched_during_a_reset_is_served_to_nobody(
    step: str, outcome: CellOutcome
) -> None:
    bench = hosted()
    bench.load(1, "a")
    while str(bench.running[max(bench.running)].lane) != step:
        bench.ends(max(bench.running))
    number = max(bench.running)
    assert bench.drop_saves(forget=True) == []
    told = bench.load(2, "a")
    assert told[0].endswith("get-0 a")
    assert bench.slots() == "6 2 0"
    assert bench.ends(number, outcome) == ["loaded 1 to 0 cancelled"]
    assert bench.slots() == "7 1 0"
    assert "loaded 2 to 1 done" in bench.run()


def test_a_fetch_that_has_not_started_is_not_made_after_a_reset() -> None:
    bench = Bench(DISK, keep=4, slots=8, limits=LaneLimits(1, 1, 1 << 20, 1 << 20))
    assert bench.prefetch(1, "a b") == ["0 get-0 a"]
    bench.drop_saves(forget=True)
    assert bench.ends(0) == []
    assert bench.slots() == "8 0 0"


# Prefetching


def prefetched(bench: Bench, outcome: str) -> int:
    return bench.counted("kvpool_prefetched_cells", outcome=outcome)


def test_a_prefetch_brings_cells_into_host_memory() -> None:
    bench = hosted()
    bench.prefetch(1, "a b")
    assert bench.run() == ["check a", "check b", "host +a", "host +b"]
    assert bench.is_clean
    assert bench.counted("kvpool_hit_cells", tier="disk") == 0  # of no load
    bench.load(2, "a b")
    assert bench.run()[-1] == "loaded 2 to 2 done"
    assert bench.counted("kvpool_hit_cells", tier="host") == 2
    assert prefetched(bench, "used") == 2
    bench.load(3, "a b")
    bench.run()
    assert prefetched(bench, "used") == 2  # each once


@pytest.mark.parametrize(("num_loads", "leaves"), [(1, "a"), (2, "b")])
def test_only_the_second_load_of_a_prefetched_cell_counts_as_another_use(
    num_loads: int, leaves: str
) -> None:
    bench = Bench(DISK, slots=8, keep=3, policy="lrfu")
    bench.prefetch(1, "a")
    bench.run()
    for job in range(num_loads):
        bench.load(2 + job, "a")
        bench.run()
    for job, cell in enumerate("bcd"):
        bench.load(5 + job, cell)
        words = bench.run()
    assert f"host -{leaves}" in words


def test_a_prefetch_takes_no_more_than_host_memory_holds() -> None:
    bench = Bench(DISK, keep=2, slots=8)
    assert bench.prefetch(1, "a b c") == ["0 get-0 a b"]
    assert Bench(DISK, slots=8).prefetch(1, "a b c") == []


def test_a_prefetch_leaves_the_reserve_to_loads() -> None:
    bench = Bench(DISK, keep=4, slots=5, reserve=2)
    assert bench.prefetch(1, "a b c d") == ["0 get-0 a b c"]
    assert bench.load(2, "x y") == ["1 get-0 x y"]


def test_a_prefetched_cell_that_leaves_unread_was_of_no_use() -> None:
    bench = hosted(keep=2)
    bench.prefetch(1, "a")
    bench.run()
    bench.after(1.0)
    bench.load(2, "x y")
    bench.run()
    assert (prefetched(bench, "used"), prefetched(bench, "unused")) == (0, 1)


def test_a_load_that_joins_a_prefetch_raises_its_priority() -> None:
    bench = hosted(slots=12, keep=8, limits=ONE)
    bench.prefetch(1, "a b c d")
    bench.load(2, "x")
    bench.load(3, "d")
    gets = [line for line in bench.run() if line.startswith("get")]
    assert gets == ["get-0 x", "get-0 d", "get-0 b", "get-0 c"]
    assert prefetched(bench, "used") == 1


def test_a_prefetch_goes_on_without_the_load_that_joined_it() -> None:
    bench = hosted(limits=ONE)
    bench.prefetch(1, "a b")
    bench.load(2, "b")
    assert bench.cancel(2) == ["loaded 2 to 0 cancelled"]
    bench.run()
    assert bench.cells() == "a b"
    assert prefetched(bench, "used") == 0


def test_a_prefetched_cell_that_is_bad_is_removed_and_forgotten() -> None:
    bench = hosted()
    bench.prefetch(1, "a")
    told = bench.run(lambda lane, key: CORRUPT if lane.kind is OpKind.CHECK else DONE)
    assert told == ["check a", "remove-0 a"]
    assert bench.is_clean
    assert bench.cells() == ""


def test_a_load_that_joins_a_prefetch_under_way_hurries_what_is_left_of_it() -> None:
    bench = Bench(DISK, slots=8, keep=4, limits=SINGLE)
    bench.prefetch(1, "a")
    bench.load(2, "a")
    assert bench.ends(0) == ["1 check a"]
    entry = bench.host_cache.get("a")
    assert entry is not None
    assert entry.op is not None
    assert entry.op.priority == Priority.LOAD
    bench.run()
    assert bench.is_clean


# Optional cells


def lacking(lane: LaneName, key: str) -> CellOutcome:
    """The tier lacks optional cells of the first chunk."""
    return MISSING if lane.kind is OpKind.GET and key == "a?" else DONE


def test_a_load_clears_the_pages_of_an_optional_cell_that_no_tier_has() -> None:
    bench = Bench(DISK)
    bench.load(1, "a a? b b?")
    told = bench.run(lacking)
    assert "loaded 1 to 2 done" in told
    assert sorted(" ".join(line for line in told if "scatter" in line).split()) == sorted(
        ["a", "a?", "b", "b?", *["scatter"] * sum("scatter" in line for line in told)]
    )
    assert bench.loaded[0].cleared == {0}
    assert bench.is_clean


def test_a_damaged_optional_cell_is_removed_and_its_pages_are_cleared() -> None:
    bench = Bench(DISK)
    bench.load(1, "a a?")
    told = bench.run(
        lambda lane, key: CORRUPT if lane.kind is OpKind.CHECK and key == "a?" else DONE
    )
    assert {"remove-0 a?", "loaded 1 to 1 done"} <= set(told)
    assert bench.loaded[0].cleared == {0}


def test_optional_cells_are_cleared_where_no_tier_can_be_asked() -> None:
    bench = Bench()
    told = bench.load(1, "a? b?") + bench.run()
    assert "loaded 1 to 2 done" in told
    assert bench.loaded[0].cleared == {0, 1}


def test_a_late_optional_cell_is_cleared_at_the_deadline() -> None:
    bench = Bench(DISK, slots=8, limits=SINGLE)
    bench.load(1, "a a?")
    bench.ends(0)
    told = words(bench.run_but("get-0")) + words(bench.after(TIMEOUT_S))
    assert "scatter a?" in told
    told += bench.run_but("get-0")
    assert "loaded 1 to 1 done" in told
    assert bench.loaded[0].cleared == {0}
    bench.run()
    assert bench.is_clean


def test_a_late_cell_ends_the_load_though_optional_ones_are_late_too() -> None:
    bench = Bench(DISK, slots=8, limits=SINGLE)
    bench.load(1, "a? b")
    told = bench.after(TIMEOUT_S) + bench.run()
    assert "loaded 1 to 1 timed_out" in told


def test_a_cleared_cell_that_cannot_be_written_ends_its_load() -> None:
    bench = Bench(DISK)
    bench.load(1, "a a?")
    told = bench.run(
        lambda lane, key: (
            FAILED if lane.kind is OpKind.SCATTER and key == "a?" else lacking(lane, key)
        )
    )
    assert "loaded 1 to 0 failed" in told


def test_a_load_that_ends_early_gives_up_cleared_cells_in_order() -> None:
    """Pages of chunks behind the end are not written any more."""
    bench = Bench(DISK, slots=8)
    bench.load(1, "a? b b? c c?")

    def outcome(lane: LaneName, key: str) -> CellOutcome:
        is_lost = lane.kind is OpKind.GET and key in ("a?", "b")
        return MISSING if is_lost else DONE

    told = bench.run(outcome)
    assert "loaded 1 to 1 missing" in told
    assert {line.partition(" ")[2] for line in told if line.startswith("scatter")} == {"a?"}
