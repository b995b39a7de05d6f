"""Cells from the tiers: the next one, another try, and tiers that are left alone."""

from dataclasses import replace

import pytest

from tests.transfer.engine_bench import (
    CORRUPT,
    DISK,
    DONE,
    FAILED,
    FAR,
    MEMORY,
    MISSING,
    SINGLE,
    TIMEOUT_S,
    UNREACHABLE,
    Bench,
)
from vllm_kvpool.storage.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S
from vllm_kvpool.transfer.context import MAX_TRIES, Tier
from vllm_kvpool.transfer.ops import CellOutcome

LONG_S = 1.0  # after it every retry is due


# The next tier


@pytest.mark.parametrize("outcome", [MISSING, CORRUPT, FAILED, UNREACHABLE])
def test_what_a_tier_cannot_give_is_asked_of_the_next(outcome: CellOutcome) -> None:
    bench = Bench(MEMORY, DISK)
    assert bench.load(1, "a b") == ["0 get-0 a b"]
    told = bench.ends(0, DONE, outcome)
    removes = {"remove-0 b"} if outcome is CORRUPT else set()
    assert {line.lstrip("0123456789 ") for line in told} == {"check a", "get-1 b"} | removes
    assert bench.run()[-1] == "loaded 1 to 2 done"
    assert bench.is_clean


def test_a_cell_that_turns_out_bad_is_asked_of_the_next() -> None:
    bench = Bench(MEMORY, DISK, slots=1, reserve=0)
    bench.load(1, "a")
    bench.ends(0)
    told = bench.ends(1, CORRUPT)
    assert sorted(line.lstrip("0123456789 ") for line in told) == ["get-1 a", "remove-0 a"]
    assert "loaded 1 to 1 done" in bench.run()


def met_a_bad_cell(*tiers: Tier) -> tuple[Bench, int]:
    """A bench whose load has met the bad cell `a` in the first tier, and that cell's removal."""
    bench = Bench(*tiers)
    bench.load(1, "a")
    bench.ends(0)
    bench.ends(1, CORRUPT)
    [removal] = [n for n, batch in bench.running.items() if str(batch.lane) == "remove-0"]
    return bench, removal


@pytest.mark.parametrize("outcome", [DONE, FAILED, UNREACHABLE])
def test_a_bad_cell_is_not_asked_for_while_it_is_being_removed(outcome: CellOutcome) -> None:
    bench, removal = met_a_bad_cell(DISK)
    assert bench.load(2, "a b") == []
    told = bench.ends(removal, outcome)
    assert sorted(told) == ["loaded 1 to 0 corrupt", "loaded 2 to 0 missing"]
    [begun] = bench.load(3, "a")
    assert begun.endswith("get-0 a")
    bench.run()
    assert bench.is_clean


def test_a_bad_cell_is_asked_of_the_next_tier_while_it_is_being_removed() -> None:
    bench, removal = met_a_bad_cell(MEMORY, DISK)
    bench.ends(next(n for n in bench.running if n != removal), MISSING)
    [told] = bench.load(2, "a")
    assert told.endswith("get-1 a")
    bench.run()
    assert bench.is_clean


def test_a_bad_cell_of_a_further_tier_is_not_asked_for_while_it_is_being_removed() -> None:
    bench = Bench(MEMORY, DISK)
    bench.load(1, "a")
    bench.ends(0, MISSING)
    bench.ends(1)
    told = bench.ends(2, CORRUPT)
    assert told == ["3 remove-1 a"]
    assert bench.load(2, "a") == ["4 get-0 a"]
    assert bench.ends(4, MISSING) == []
    assert sorted(bench.ends(3)) == ["loaded 1 to 0 corrupt", "loaded 2 to 0 missing"]
    bench.run()
    assert bench.is_clean


def test_a_removal_that_hangs_does_not_hide_what_comes_back() -> None:
    bench, removal = met_a_bad_cell(DISK)
    bench.hangs(removal)
    bench.after(FIRST_PAUSE_S)
    [told] = bench.load(2, "a")
    assert told.endswith("get-0 a")
    bench.late(removal)
    bench.run()
    assert bench.is_clean


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (MISSING, MISSING, MISSING),
        (MISSING, FAILED, FAILED),
        (CORRUPT, MISSING, CORRUPT),
        (UNREACHABLE, CORRUPT, CORRUPT),
    ],
)
def test_a_load_says_the_most_telling_trouble(
    first: CellOutcome, second: CellOutcome, reason: CellOutcome
) -> None:
    bench = Bench(MEMORY, DISK)
    bench.load(1, "a")
    told = bench.run(lambda lane, key: (first, second)[lane.tier])
    assert f"loaded 1 to 0 {reason.value}" in told
    assert bench.is_clean


def test_hits_are_counted_by_the_tier_they_came_from() -> None:
    bench = Bench(MEMORY, DISK, keep=4, slots=8)
    bench.load(1, "a b")
    bench.run(lambda lane, key: MISSING if (lane.tier, key) == (0, "b") else DONE)
    bench.load(2, "a b")
    bench.run()
    hits = {tier: bench.counted("kvpool_hit_cells", tier=tier) for tier in ("memory", "disk")}
    assert hits == {"memory": 1, "disk": 1}
    assert bench.counted("kvpool_hit_cells", tier="host") == 2


# Another try


@pytest.mark.parametrize("outcome", [FAILED, UNREACHABLE])
def test_a_remote_tier_is_tried_so_often_and_passed_over(outcome: CellOutcome) -> None:
    bench = Bench(FAR, DISK)
    bench.load(1, "a b")
    told = bench.ends(0, outcome, MISSING)
    assert told == ["1 get-0 a", "2 get-1 b"]
    batch = 1
    for attempt in range(2, MAX_TRIES + 1):
        assert told[0] == f"{batch} get-0 a"
        assert bench.running[batch].attempt == attempt
        # Others get through, so the tier is not left alone.
        bench.gets_through(0)
        told = bench.ends(batch, outcome)
        batch = int(told[0].split()[0])
    assert told == [f"{batch} get-1 a"]


def test_every_remote_tier_is_tried_as_often() -> None:
    bench = Bench(FAR, replace(FAR, name="farther"))
    bench.load(1, "a")
    lanes = []
    while bench.running:
        lanes += [str(batch.lane) for batch in bench.running.values()]
        told = bench.ends(max(bench.running), FAILED)
        bench.gets_through(0)
        bench.gets_through(1)
    assert lanes == ["get-0"] * MAX_TRIES + ["get-1"] * MAX_TRIES
    assert told == ["loaded 1 to 0 failed"]


@pytest.mark.parametrize("outcome", [MISSING, CORRUPT])
def test_what_would_fail_again_is_not_tried_again(outcome: CellOutcome) -> None:
    bench = Bench(FAR)
    bench.load(1, "a")
    told = [*bench.ends(0, outcome), *bench.run()]
    assert f"loaded 1 to 0 {outcome.value}" in told
    assert not any("get" in line for line in told)


def test_a_load_that_met_a_bad_cell_is_reported_when_that_has_left_its_tier() -> None:
    """Or the request that comes next would find it there again, and fail as well."""
    bench = Bench(DISK)
    bench.load(1, "a b c")
    bench.ends(0, DONE, CORRUPT, CORRUPT)
    assert not any("loaded" in line for line in bench.run_but("remove-0"))
    assert "loaded 1 to 1 corrupt" in bench.run()
    assert bench.is_clean


@pytest.mark.parametrize("met_by", [1, 2])
def test_a_load_does_not_wait_for_a_removal_beyond_its_deadline(met_by: int) -> None:
    bench, removal = met_a_bad_cell(DISK)
    if met_by == 2:  # it comes when the removal runs already
        assert bench.load(2, "a") == []
    told = bench.after(TIMEOUT_S)
    assert "loaded 1 to 0 corrupt" in told
    assert ("loaded 2 to 0 missing" in told) == (met_by == 2)
    bench.ends(removal)
    assert bench.is_clean


def test_a_load_that_is_late_in_the_next_tier_does_not_wait_for_a_removal_in_the_first() -> None:
    """Its time is over when the removal is looked at for the first time."""
    bench, removal = met_a_bad_cell(MEMORY, DISK)
    assert "loaded 1 to 0 timed_out" in bench.after(TIMEOUT_S)
    bench.ends(removal)
    bench.run()
    assert bench.is_clean


def test_a_load_does_not_wait_for_a_removal_that_hangs() -> None:
    bench, removal = met_a_bad_cell(DISK)
    assert bench.hangs(removal) == ["loaded 1 to 0 corrupt"]
    bench.late(removal)
    assert bench.is_clean


def test_a_cell_that_nobody_wants_is_not_tried_again() -> None:
    bench = Bench(FAR)
    bench.load(1, "a")
    bench.cancel(1)
    assert bench.ends(0, FAILED) == []
    assert bench.after(LONG_S) == []
    assert bench.is_clean


def test_a_cell_that_could_not_be_checked_is_fetched_again() -> None:
    bench = Bench(FAR)
    bench.load(1, "a")
    bench.ends(0)
    assert bench.ends(1, FAILED) == ["2 get-0 a"]


# A tier that is left alone


def down(bench: Bench, *stuck: str) -> None:
    """Tier 0 fails, the others lack the cell, until tier 0 is left alone."""
    for job in range(FAILURES_TO_OPEN):
        bench.load(100 + job, "x")
        while free := [n for n, batch in bench.running.items() if str(batch.lane) not in stuck]:
            is_first = bench.running[free[0]].lane.tier == 0
            bench.ends(free[0], FAILED if is_first else MISSING)
    assert bench.counted("kvpool_tier_up", tier=bench.engine.context.tiers[0].name) == 0


def test_a_tier_that_is_down_is_not_asked_until_the_pause_is_over() -> None:
    bench = Bench(DISK, MEMORY)
    down(bench)
    bench.clock.advance(FIRST_PAUSE_S / 2)
    assert bench.load(1, "a")[0].endswith("get-1 a")
    bench.run()
    bench.clock.advance(FIRST_PAUSE_S)
    assert bench.load(2, "a")[0].endswith("get-0 a")


def test_a_tier_that_fails_again_is_left_alone_for_twice_as_long() -> None:
    bench = Bench(DISK, MEMORY)
    down(bench)
    bench.clock.advance(FIRST_PAUSE_S)
    bench.load(1, "a")
    bench.run(lambda lane, key: FAILED if lane.tier == 0 else DONE)
    bench.clock.advance(FIRST_PAUSE_S)
    assert bench.load(2, "a")[0].endswith("get-1 a")
    bench.clock.advance(FIRST_PAUSE_S)
    assert bench.load(3, "b")[0].endswith("get-0 b")


def test_a_batch_of_which_one_cell_is_known_is_no_failure_of_the_tier() -> None:
    bench = Bench(DISK, MEMORY)
    for job in range(2 * FAILURES_TO_OPEN):
        bench.load(job, "a b")
        bench.run(lambda lane, key: DONE if lane.tier else MISSING if key == "a" else FAILED)
    assert bench.counted("kvpool_tier_up", tier="disk") == 1


def test_gets_that_wait_for_a_tier_that_goes_down_move_on() -> None:
    bench = Bench(DISK, MEMORY, slots=8, limits=SINGLE)
    bench.load(1, "a b c d e f")
    bench.ends(0, FAILED)
    bench.ends(1, FAILED)
    assert bench.ends(2, FAILED) == []  # tier 1 has enough to do
    assert [str(w.lane) for w in bench.running.values()].count("get-0") == 1  # started before
    told = bench.run()
    assert not any(line.startswith("get-0") for line in told)
    assert told[-1] == "loaded 1 to 6 done"


def test_a_get_that_waits_for_another_try_moves_on_when_the_tier_goes_down() -> None:
    bench = Bench(FAR, MEMORY, slots=8, limits=SINGLE)
    bench.load(1, "a b c")
    bench.ends(0, FAILED)
    bench.ends(1, FAILED)
    told = bench.ends(2, FAILED)
    assert "get-1" in "".join(told)
    assert bench.run()[-1] == "loaded 1 to 3 done"
    assert bench.clock() == 0.0


def test_puts_that_wait_for_a_tier_that_goes_down_are_given_up() -> None:
    bench = Bench(DISK, limits=SINGLE, slots=8)
    bench.save(1, "a b c d e")
    told = bench.run(lambda lane, key: UNREACHABLE if lane.tier == 0 else DONE)
    assert sum(line.startswith("put") for line in told) < 5
    assert told[-1] == "saved 1: 5 unreachable"
    assert bench.is_clean


def test_a_save_skips_a_tier_that_is_down() -> None:
    bench = Bench(DISK, MEMORY)
    down(bench)
    bench.save(1, "a")
    assert bench.run() == ["gathered 1", "seal a", "put-1 a", "saved 1: 1 done"]


@pytest.mark.parametrize("lane", ["gather", "seal"])
def test_a_put_is_not_made_into_a_tier_that_has_gone_down_since_the_save_began(lane: str) -> None:
    bench = Bench(DISK, MEMORY, slots=8)
    bench.save(1, "a")
    if lane == "seal":
        bench.ends(0)
    down(bench, lane)
    told = bench.run()
    assert [line for line in told if "put" in line] == ["put-1 a"]
    assert told[-1] == "saved 1: 1 unreachable"
    assert bench.is_clean


def test_removes_are_not_made_in_a_tier_that_is_down() -> None:
    bench = Bench(DISK, MEMORY, slots=8, limits=SINGLE)
    bench.load(1, "a b c d e f")
    while any(str(batch.lane) == "get-0" for batch in bench.running.values()):
        number = next(n for n, w in bench.running.items() if str(w.lane) == "get-0")
        bench.ends(number, CORRUPT)
    removes = [n for n, batch in bench.running.items() if str(batch.lane) == "remove-0"]
    assert len(removes) == 2
    for number in removes:
        bench.ends(number, FAILED)
    number = next(n for n, batch in bench.running.items() if str(batch.lane) == "remove-0")
    told = bench.ends(number, UNREACHABLE)
    assert not any("remove" in line for line in told)
    assert not any(line.startswith("remove") for line in bench.run())
    assert bench.is_clean


def test_a_bad_cell_that_is_noticed_when_its_tier_is_down_stays_there() -> None:
    bench = Bench(DISK, MEMORY, slots=8)
    bench.load(1, "a")
    bench.ends(0)
    down(bench, "check")
    [told] = bench.ends(1, CORRUPT)
    assert told.endswith("get-1 a")


def test_with_no_tier_up_a_load_stops_at_once() -> None:
    bench = Bench(DISK)
    down(bench)
    assert bench.load(1, "a b", first_chunk=2) == ["loaded 1 to 2 unreachable"]
    assert bench.is_clean


def test_with_no_tier_up_a_load_has_what_is_in_host_memory() -> None:
    bench = Bench(DISK, keep=4, slots=8)
    bench.save(1, "a b")
    bench.run()
    down(bench)
    bench.load(2, "a b c d")
    assert bench.run() == ["loaded 2 to 2 unreachable"]


def test_with_no_tier_up_and_no_host_tier_a_save_is_not_even_gathered() -> None:
    bench = Bench(DISK)
    down(bench)
    assert bench.save(1, "a b") == ["gathered 1", "saved 1: 2 unreachable"]
    assert bench.is_clean


def test_with_no_tier_up_a_save_stays_in_host_memory() -> None:
    bench = Bench(DISK, keep=2, slots=4)
    down(bench)
    bench.save(1, "a")
    assert bench.run() == ["gathered 1", "saved 1: 1 done", "host +a"]


# Copies into nearer tiers


def test_a_cell_that_is_found_further_away_is_copied_into_nearer_tiers() -> None:
    bench = Bench(MEMORY, DISK, FAR)
    bench.load(1, "a")
    bench.ends(0, MISSING)
    bench.ends(1, MISSING)
    bench.ends(2)
    told = bench.ends(3)
    assert sorted(line.lstrip("0123456789 ") for line in told) == ["scatter a", "seal a"]
    assert bench.engine.num_saves == 1
    assert "loaded 1 to 1 done" in (told := bench.run())
    assert {"put-0 a", "put-1 a"} <= set(told)
    assert bench.is_clean


def test_the_slot_of_a_copied_cell_is_held_until_the_last_copy_is_over() -> None:
    bench = Bench(MEMORY, DISK)
    bench.load(1, "a")
    bench.ends(0, MISSING)
    bench.run_but("put-0")
    assert bench.slots() == "3 1 0"
    assert bench.run() == []
    assert bench.is_clean


def test_copies_go_after_saves() -> None:
    bench = Bench(MEMORY, DISK, slots=8, limits=SINGLE)
    bench.load(1, "a b c d")
    bench.save(2, "x")
    told = bench.run(lambda lane, key: MISSING if str(lane) == "get-0" else DONE)
    puts = [line for line in told if line.startswith("put-0")]
    assert len(puts) == 5
    assert puts.index("put-0 x") < 3  # two had started
