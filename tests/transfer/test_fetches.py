"""Fetches of cells: the next tier, retries, and tiers that are left alone."""

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
    UNREACHABLE,
    Bench,
)
from tests.transfer.scripts import Example, examples
from vllm_kvpool.transfer.context import MAX_TRIES
from vllm_kvpool.transfer.ops import CellOutcome

# The next tier


@examples(
    """
what a tier {lacks: missing|fails at: failed|cannot give: unreachable} is asked of the next
    on memory disk; load 1 a b -> 0 get-0 a b; ends 0 done {} -> any order check a | get-1 b
    run -> last loaded 1 to 2 done; clean
a cell that a tier has damaged is removed and asked of the next
    on memory disk; load 1 a b -> 0 get-0 a b
    ends 0 done corrupt -> any order check a | get-1 b | remove-0 b
    run -> last loaded 1 to 2 done; clean
a cell that turns out bad is asked of the next
    on memory disk slots=1 reserve=0; load 1 a; ends 0
    ends 1 corrupt -> any order get-1 a | remove-0 a; run -> ... loaded 1 to 1 done
a bad cell is not asked for while it is being removed {done|failed|unreachable}
    on disk; load 1 a; ends 0; ends 1 corrupt; load 2 a b -> nothing
    ends remove-0 {} -> any order loaded 1 to 0 corrupt | loaded 2 to 0 missing
    load 3 a -> get-0 a; run; clean
a bad cell is asked of the next tier while it is being removed
    on memory disk; load 1 a; ends 0; ends 1 corrupt; ends get-1 missing; load 2 a -> get-1 a
    run; clean
a bad cell of a further tier is not asked for while it is being removed
    on memory disk; load 1 a; ends 0 missing; ends 1; ends 2 corrupt -> 3 remove-1 a
    load 2 a -> 4 get-0 a; ends 4 missing -> nothing
    ends 3 -> any order loaded 1 to 0 corrupt | loaded 2 to 0 missing; run; clean
a removal that hangs does not hide what comes back
    on disk; load 1 a; ends 0; ends 1 corrupt; hangs remove-0; after FIRST_PAUSE_S
    load 2 a -> get-0 a; late remove-0; run; clean
a load of a cell that both tiers {lack: missing} says missing
    on memory disk; load 1 a; run get-0 a {}, get-1 a {} -> ... loaded 1 to 0 missing; clean
a load says that a tier failed rather than that another lacks the cell
    on memory disk; load 1 a; run get-0 a missing, get-1 a failed -> ... loaded 1 to 0 failed
    clean
a load says that a tier had a damaged cell rather than that another lacks it
    on memory disk; load 1 a; run get-0 a corrupt, get-1 a missing
    told ... loaded 1 to 0 corrupt; clean
a load says that a tier had a damaged cell rather than that another was unreachable
    on memory disk; load 1 a; run get-0 a unreachable, get-1 a corrupt
    told ... loaded 1 to 0 corrupt; clean
hits are counted by the tier they came from
    on memory disk keep=4 slots=8; load 1 a b; run get-0 b missing; load 2 a b; run
    count hit_cells 1 tier=memory; count hit_cells 1 tier=disk; count hit_cells 2 tier=host
"""
)
def test_the_next_tier(example: Example) -> None:
    example.play()


# Another try


@examples(
    """
what would fail again is not tried again
    on far; load 1 a; ends 0 missing -> loaded 1 to 0 missing
what is damaged is not tried again
    on far; load 1 a; ends 0 corrupt -> remove-0 a; run -> loaded 1 to 0 corrupt
a load that met a bad cell is reported when that has left its tier
    # Or the request that comes next would find it there again, and fail as well.
    on disk; load 1 a b c; ends 0 done corrupt corrupt; run_but remove-0 -> no loaded
    run -> ... loaded 1 to 1 corrupt; clean
a load does not wait for a removal beyond its deadline
    on disk; load 1 a; ends 0; ends 1 corrupt; after TIMEOUT_S -> loaded 1 to 0 corrupt
    ends remove-0; clean
a load that comes when the removal runs does not wait for it beyond its deadline
    on disk; load 1 a; ends 0; ends 1 corrupt; load 2 a -> nothing
    after TIMEOUT_S -> any order loaded 1 to 0 corrupt | loaded 2 to 0 missing
    ends remove-0; clean
a load that is late in the next tier does not wait for a removal in the first
    # Its time is over when the removal is looked at for the first time.
    on memory disk; load 1 a; ends 0; ends 1 corrupt
    after TIMEOUT_S -> ... loaded 1 to 0 timed_out; ends remove-0; run; clean
a load does not wait for a removal that hangs
    on disk; load 1 a; ends 0; ends 1 corrupt; hangs remove-0 -> loaded 1 to 0 corrupt
    late remove-0; clean
a cell that nobody wants is not tried again
    on far; load 1 a; cancel 1; ends 0 failed -> nothing; after 1.0 -> nothing; clean
a cell that could not be checked is fetched again
    on far; load 1 a; ends 0; ends 1 failed -> 2 get-0 a
"""
)
def test_another_try(example: Example) -> None:
    example.play()


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
        # Other reads succeed, so the tier is not left alone.
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


# A tier that is left alone


@examples(
    """
a tier that is down is not asked until the pause is over
    on disk memory; take_down; wait FIRST_PAUSE_S/2; load 1 a -> first get-1 a; run
    wait FIRST_PAUSE_S; load 2 a -> first get-0 a
a tier that fails again is left alone for twice as long
    on disk memory; take_down; wait FIRST_PAUSE_S; load 1 a; run tier-0 any failed
    wait FIRST_PAUSE_S; load 2 a -> first get-1 a; wait FIRST_PAUSE_S; load 3 b -> first get-0 b
a batch of which one cell is known is no failure of the tier
    on disk memory
    each 0-5: load $ a b; run tier-0 a missing, tier-0 b failed
    count tier_up 1 tier=disk
gets that wait for a tier that goes down move on
    # Tier 1 has enough to do; of tier 0 a get runs that had started before.
    on disk memory slots=8 limits=2x1; load 1 a b c d e f; ends 0 failed; ends 1 failed
    ends 2 failed -> nothing; lanes get-0 get-1 get-1
    run -> no get-0; told last loaded 1 to 6 done
a get that waits for another try moves on when the tier goes down
    on far memory slots=8 limits=2x1; load 1 a b c; ends 0 failed; ends 1 failed
    ends 2 failed -> get-1 b | get-1 c; run -> last loaded 1 to 3 done
a save skips a tier that is down
    on disk memory; take_down; save 1 a; run -> gathered 1 | seal a | put-1 a | saved 1: 1 done
a put is not made into a tier that has gone down since the gather began
    on disk memory slots=8; save 1 a; take_down gather; run -> only put-1 a
    told last saved 1: 1 unreachable; clean
a put is not made into a tier that has gone down since the seal began
    on disk memory slots=8; save 1 a; ends 0; take_down seal; run -> only put-1 a
    told last saved 1: 1 unreachable; clean
a bad cell that is noticed when its tier is down stays there
    on disk memory slots=8; load 1 a; ends 0; take_down check; ends 1 corrupt -> get-1 a
with no tier up a load stops at once
    on disk; take_down; load 1 a b after=2 -> loaded 1 to 2 unreachable; clean
with no tier up a load has what is in host memory
    on disk keep=4 slots=8; save 1 a b; run; take_down; load 2 a b c d
    run -> loaded 2 to 2 unreachable
with no tier up and no host tier a save is not even gathered
    on disk; take_down; save 1 a b -> gathered 1 | saved 1: 2 unreachable; clean
with no tier up a save stays in host memory
    on disk keep=2 slots=4; take_down; save 1 a; run -> gathered 1 | saved 1: 1 done | host +a
"""
)
def test_a_tier_that_is_left_alone(example: Example) -> None:
    example.play()


def test_puts_that_wait_for_a_tier_that_goes_down_are_given_up() -> None:
    bench = Bench(DISK, limits=SINGLE, slots=8)
    bench.save(1, "a b c d e")
    told = bench.run(lambda lane, key: UNREACHABLE if lane.tier == 0 else DONE)
    assert sum(line.startswith("put") for line in told) < 5
    assert told[-1] == "saved 1: 5 unreachable"
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


# Copies into nearer tiers


@examples(
    """
a cell that is found further away is copied into nearer tiers
    on memory disk far; load 1 a; ends 0 missing; ends 1 missing; ends 2
    ends 3 -> any order scatter a | seal a; saves 1
    run -> ... loaded 1 to 1 done | put-0 a | put-1 a; clean
the slot of a copied cell is held until the last copy is over
    on memory disk; load 1 a; ends 0 missing; run_but put-0; slots 3 1 0; run -> nothing; clean
"""
)
def test_copies_into_nearer_tiers(example: Example) -> None:
    example.play()


def test_copies_go_after_saves() -> None:
    bench = Bench(MEMORY, DISK, slots=8, limits=SINGLE)
    bench.load(1, "a b c d")
    bench.save(2, "x")
    told = bench.run(lambda lane, key: MISSING if str(lane) == "get-0" else DONE)
    puts = [line for line in told if line.startswith("put-0")]
    assert len(puts) == 5
    assert puts.index("put-0 x") < 3  # two had started
