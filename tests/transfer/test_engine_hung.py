"""Hung store calls: their cells continue without them, and their memory stays reserved."""

import pytest

from tests.support.invariants import num_slots_written
from tests.transfer.engine_bench import DISK, DONE, FAILED, MISSING, UNREACHABLE, Bench, slots_of
from tests.transfer.scripts import Example, examples, play
from vllm_kvpool.storage.breaker import FIRST_PAUSE_S
from vllm_kvpool.transfer.ops import CellOutcome

# GET


@examples(
    """
cells of a get that hangs are asked of the next tier in new slots {done|failed|missing|unreachable}
    on memory disk; load 1 a b; hangs 0 -> 1 get-1 a b; apart 0 1; slots 0 2 2
    run -> check a b | scatter a b | loaded 1 to 2 done; idle; slots 2 0 2
    late 0 {} -> nothing; clean
with one tier the load stops in time and nothing is scattered late {done|failed|missing|unreachable}
    on disk; load 1 a b; hangs 0 -> loaded 1 to 0 timed_out; slots 2 0 2; late 0 {} -> nothing
    clean
chunks before the one that hangs are loaded
    on disk tiers=2x1; load 1 a b; hangs 1 -> nothing; ends 0 -> 2 check a
    run -> scatter a | loaded 1 to 1 timed_out; late 1; clean
a load of a cell that hangs in a tier gets it from elsewhere
    on memory disk; load 1 a; hangs 0; load 2 a -> nothing
    # It shares the fetch from the next tier; after it the first tier is left alone.
    run -> check a | scatter a a | loaded 1 to 1 done | loaded 2 to 1 done
    load 3 a -> 4 get-1 a; late 0; run; clean
a prefetch that hangs goes on in the next tier
    on memory disk slots=6 keep=3; prefetch 1 a b; hangs 0 -> 1 get-1 a b; run; host a b; late 0
    clean
what waits behind a batch that hangs goes elsewhere at once
    on memory disk slots=8 gets=2x1; load 1 a b c d; hangs 0 -> get-1 c | get-1 d
    count tier_up 0 tier=memory; ends 1; run -> last loaded 1 to 4 done; late 0; clean
a tier with a call that was stuck is asked again after a pause
    on disk; load 1 a; hangs 0; load 2 a -> loaded 2 to 0 unreachable; after FIRST_PAUSE_S
    load 3 a -> 1 get-0 a; late 0; run -> last loaded 3 to 1 done; clean
a late answer says nothing about the tier
    on disk; load 1 a; hangs 0; late 0 done; count tier_up 0 tier=disk; count hit_cells 0 tier=disk
"""
)
def test_get(example: Example) -> None:
    example.play()


# PUT


@examples(
    """
loads go on while a put hangs and saves wait
    on disk; save 1 a; ends 0; ends 1; hangs 2; load 2 b -> 3 get-0 b; run
    save 3 c -> last saved 3: 1 unreachable; load 4 d -> get-0 d; run
a save that a durable tier has taken is saved though another hangs
    on memory disk; save 1 a; run_but put-0 put-1; lanes put-0 put-1; hangs put-0; saves 2
    ends put-1 -> saved 1: 1 done; slots 3 1 0; late put-0; clean
a put on a remote tier is not tried again while it hangs
    on far; save 1 a; run_but put-0; hangs 2 -> saved 1: 1 timed_out
    after LONGEST_PAUSE_S -> nothing; late 2; clean
"""
)
def test_put(example: Example) -> None:
    example.play()


@pytest.mark.parametrize("late", [DONE, FAILED, MISSING, UNREACHABLE])
@pytest.mark.parametrize("keep", [0, 4])
def test_a_save_whose_put_hangs_is_reported_and_its_slot_stays_out_of_use(
    keep: int, late: CellOutcome
) -> None:
    bench = play(f"on disk slots={2 + keep} keep={keep}; save 1 a; ends 0; ends 1")
    [lent] = slots_of(bench.running[2])
    told = bench.hangs(2)
    assert told[-1] == "saved 1: 1 timed_out"
    assert bench.engine.idle
    free = bench.host_cache.slots.num_free
    assert bench.slots() == f"{free} 1 0"
    # Later loads find the cell here, and no batch writes into its slot.
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


def test_a_dirty_cell_whose_put_hangs_is_held_until_the_answer() -> None:
    bench = Bench(DISK, slots=4, keep=2, write_back=True)
    bench.save(1, "a b")
    bench.run_but("put-0")
    put = next(iter(bench.running))
    lent = set(slots_of(bench.running[put]))
    assert len(lent) == 2
    bench.hangs(put)
    assert bench.cells() == "a b"  # no retry, as for a failed copy
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


@examples(
    """
the removal of a bad cell may hang
    on memory disk; load 1 a; ends 0 corrupt; hangs remove-0 -> nothing
    run -> last loaded 1 to 1 done; late remove-0 -> nothing; clean
"""
)
def test_remove(example: Example) -> None:
    example.play()


# From outside


def test_what_hangs_can_be_asked_for() -> None:
    bench = play("on memory disk tiers=2x1")
    bench.load(1, "a")
    bench.hangs(0)
    first, second = bench.hanging[0], bench.running[1]
    hung = bench.engine.hung_calls
    assert (len(hung), first in hung, second in hung) == (1, True, False)
    assert (num_slots_written(hung), hung.slots_read) == (1, set())
    bench.run()
    bench.late(0)
    assert (len(hung), first in hung, num_slots_written(hung)) == (0, False, 0)
