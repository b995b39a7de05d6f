"""Saves through to tiers: release of pages, ends of saves, and stores that take no puts."""

import pytest

from tests.transfer.engine_bench import DISK, FAR, MEMORY, MISSING, Bench
from tests.transfer.scripts import Example, examples, outcomes, play
from vllm_kvpool.transfer.context import Tier
from vllm_kvpool.transfer.saves import SAVE_STALL_S


@examples(
    """
a save gathers seals and puts
    on disk; save 1 a b -> 0 gather a b; saves 3; ends 0 -> gathered 1 | 1 seal a b
    ends 1 -> 2 put-0 a b; slots 2 2 0; ends 2 done existed -> saved 1: 1 done, 1 existed
    saves 0; clean
chunks reach a store in their order and a later save behind them
    # So an engine that waits for a prompt can fetch its beginning while its end is put.
    on disk slots=12 limits=2x2; save 1 a1 a2 b1 b2 c1 c2; save 2 d1 d2
    run -> only put-0 a1 a2 | put-0 b1 b2 | put-0 c1 c2 | put-0 d1 d2
a save without cells is done at once
    on disk; save 1 -> gathered 1 | saved 1: nothing; clean
a cell whose {gather|seal} fails is not put
    on disk; save 1 a b; run {} a failed -> only put-0 b
    told last saved 1: 1 failed, 1 done; clean
pages are free only when every cell is gathered
    on disk slots=3 reserve=1; save 1 a b c -> 0 gather a b; ends 0 -> 1 seal a b; ends 1
    ends 2 -> 3 gather c; ends 3 -> gathered 1 | 4 seal c; run -> put-0 c | saved 1: 3 done
a save is done when the first durable tier has every cell
    on memory disk far slots=6; save 1 a b; ends 0
    ends 1 -> 2 put-0 a b | 3 put-1 a b | 4 put-2 a b; ends 2 -> nothing
    ends 3 done existed -> saved 1: 1 done, 1 existed; saves 2; busy; slots 4 2 0
    ends 4 full -> nothing; saves 0; clean
a cell that a durable tier did not take waits for the next one
    on disk far slots=6; save 1 a b; ends 0; ends 1; ends 2 full done -> nothing
    ends 3 -> saved 1: 2 done
a cell that no durable tier took has the last failure
    on memory disk; save 1 a; run tier-1 any full -> last saved 1: 1 full
without a durable tier a save is done when all have it
    on memory memory; save 1 a; ends 0; ends 1; ends 2 -> nothing; ends 3 -> saved 1: 1 done
a cell that is on its way already is not saved again
    on disk; save 1 a; save 2 a b -> 1 gather b; ends 1 -> gathered 2 | 2 seal b; ends 2
    ends 3 -> saved 2: 1 existed, 1 done; run -> gathered 1 | seal a | put-0 a | saved 1: 1 done
    clean
a cell that is being fetched is saved from its pages without a host tier {done|failed}
    on disk slots=6; load 1 a; save 2 a -> 1 gather a; ends 0 {}
    run -> ... put-0 a | saved 2: 1 done; host; clean
a cell that is being fetched into host memory is saved from its pages
    on disk keep=4 slots=6; load 1 a; save 2 a -> 1 gather a; ends 0
    run -> ... put-0 a | saved 2: 1 done; host a; clean
a cell whose fetch into host memory fails is saved from its pages
    on disk keep=4 slots=6; load 1 a; save 2 a -> 1 gather a; ends 0 failed
    run -> ... put-0 a | saved 2: 1 done; host; clean
what another rank stores is kept in host memory alone
    on disk keep=2 slots=4; save 1 a stored=False; run -> gathered 1 | saved 1: 1 done | host +a
    host a
"""
)
def test_saves(example: Example) -> None:
    example.play()


# Retries


@examples(
    """
a put into a remote tier is tried again
    on far; save 1 a b; ends 0; ends 1; ends 2 done unreachable -> 3 put-0 b; saves 2
    ends 3 -> saved 1: 2 done
a put into a remote tier that would fail again is not tried again {full|missing|cancelled}
    on far; save 1 a; ends 0; ends 1; ends 2 {} -> saved 1: 1 {}
a put into a local tier is not tried again
    on disk; save 1 a; ends 0; ends 1; ends 2 failed -> saved 1: 1 failed
"""
)
def test_retries(example: Example) -> None:
    example.play()


# Stores that take no puts


@examples(
    """
a step that waits for gathers hears of a stall once, and of a later save at once
    on disk; save 1 a b c; ends 0; ends 1; save 2 d e; stalls 0
    after SAVE_STALL_S-PATIENCE_LEFT_S; stalls 1; after SAVE_STALL_S/4; stalls 1
    save 3 f; stalls 2; due SAVE_STALL_S
a stall that ends sooner is none
    on disk; save 1 a b c; ends 0; ends 1; save 2 d e; ends 2; after SAVE_STALL_S/4; stalls 0
saves that find no slot are dropped once and then at once
    on disk slots=4; save 1 a b c; ends 0; ends 1; save 2 d e; after SAVE_STALL_S/2 -> nothing
    after SAVE_STALL_S/2 -> gathered 2 | saved 2: 2 full; due never; after SAVE_STALL_S -> nothing
    save 3 f -> gathered 3 | saved 3: 1 full; ends 2 -> saved 1: 3 done; save 4 g -> 3 gather g
for a while after a drop no save waits however slots come and go
    on disk slots=4; save 1 a b c; ends 0; ends 1; save 2 d e; after SAVE_STALL_S
    ends 2 -> saved 1: 3 done; save 3 f g h; ends 3; ends 4 -> 5 put-0 f g h
    save 4 i -> gathered 4 | saved 4: 1 full; wait STALL_REST_S
    save 5 j -> gathered 5 | saved 5: 1 full; ends 5 -> saved 3: 3 done; save 6 k l m; ends 6
    ends 7; save 7 n -> nothing; after SAVE_STALL_S -> gathered 7 | saved 7: 1 full
a gather that starts renews the patience
    on disk slots=4; save 1 a b c; ends 0; ends 1; save 2 d e; wait SAVE_STALL_S*0.9
    ends 2 failed -> saved 1: 3 failed | 3 gather d e; after SAVE_STALL_S -> nothing
saves that still wait have new patience once one of them starts
    on disk slots=3 limits=2x1; save 1 a b; ends 0; ends 1; ends 2; ends 3; lanes put-0 put-0
    save 2 c d; wait SAVE_STALL_S*0.9; ends oldest -> last gather c
    after SAVE_STALL_S/2 -> nothing; ends newest -> first seal c
    after SAVE_STALL_S/2 -> nothing; after SAVE_STALL_S/2 -> gathered 2
    run -> last saved 2: 1 full, 1 done
loads go on while puts hang
    on disk slots=4; save 1 a b c; ends 0; ends 1; save 2 d e; load 3 f -> 3 get-0 f; ends 3
    ends 4; ends 5 -> loaded 3 to 1 done
a save drops no cell for a slot that it may not have
    on disk reserve=2 keep=2; save 1 a b; ends 0; ends 1; load 2 c; ends 3; ends 4; ends 5
    save 3 d -> nothing; after SAVE_STALL_S/2 -> nothing; host a b c d
    load 4 c -> 6 scatter c
cells that may leave count as slots for loads
    on disk slots=5 reserve=2 keep=3; load 1 a b c; run; load 2 d e -> 3 get-0 d e; slots 0 5 0
    save 3 f g -> host -c | 4 gather f; load 4 h i -> host -b -a | 5 get-0 h i
"""
)
def test_stores_that_take_no_puts(example: Example) -> None:
    example.play()


def test_loads_through_the_reserve_do_not_renew_the_patience() -> None:
    bench = play("on disk; save 1 a b c; ends 0; ends 1; save 2 d e")
    for job in range(3, 8):
        first = 3 * (job - 2)
        bench.clock.advance(SAVE_STALL_S / 4)
        bench.load(job, "f")
        for batch in range(first, first + 3):
            bench.ends(batch)
    assert bench.engine.saves.num_open == 1


def test_copies_into_nearer_tiers_do_not_take_the_slots_of_loads() -> None:
    """Tier 0 lacks every cell and takes no puts. Each cell from tier 1 is to be copied into it."""
    bench = Bench(DISK, FAR, slots=4, reserve=1)
    for job, key in enumerate("abcdefgh"):
        bench.load(job, key)
        told = bench.ends(max(bench.running), MISSING)
        assert told[0].endswith(f"get-1 {key}")
        assert f"loaded {job} to 1 done" in bench.run_but("put-0")


@pytest.mark.parametrize("policy", ["lru", "lrfu"])
def test_cells_that_puts_hold_do_not_keep_others_from_leaving(policy: str) -> None:
    """The number and the age of these cells do not matter."""
    count = 1000
    bench = Bench(DISK, slots=count + 4, keep=4, policy=policy)
    bench.save(1, " ".join(f"a{i}" for i in range(count)))
    bench.run_but("put-0")
    for job, group in enumerate("bcdefgh", 2):
        bench.load(job, group)
        assert f"loaded {job} to 1 done" in bench.run_but("put-0")


# Giving up


@examples(
    """
dropping saves ends all that is not in a put
    # At the drop b is being sealed, and a is being put.
    on disk slots=5 reserve=0 limits=1x1; save 1 a b c d; ends 0; ends 1; ends 2
    ends 3 -> 6 gather d; drop -> nothing; run -> gathered 1 | saved 1: 3 cancelled, 1 done
    clean; save 2 a -> first gather a
a dropped save's cell that is gathered stays in host memory
    on disk keep=4 slots=8; save 1 a; ends 0; drop; run; host a; load 2 a -> scatter a
a dropped put is not tried again
    on far; save 1 a; ends 0; ends 1; drop -> nothing; ends 2 failed -> saved 1: 1 failed; clean
dropping saves leaves loads alone
    on disk; load 1 a; drop -> nothing; run -> check a | scatter a | loaded 1 to 1 done
a load that waits for a dropped save stops
    on disk; save 1 a b; load 2 a b -> nothing; drop -> nothing
    ends 0 -> loaded 2 to 0 cancelled | gathered 1 | saved 1: 2 cancelled; clean
"""
)
def test_giving_up(example: Example) -> None:
    example.play()


# Presence of cells


@examples(
    """
host memory alone is no store
    on disk keep=2 write_back=True; save 1 a; run; saved tiers=() missed=(0,)
what it is another rank's turn to store is not missed
    on disk keep=2 write_back=True; save 1 a stored=False; run; saved tiers=() missed=()
a save says which chunks the store has not taken
    on disk slots=8; save 1 a b c; run put-0 b full; saved lost=1:full
a save says which chunks were not gathered
    on disk slots=8; save 1 a b c; run gather a full, put-0 b full; saved lost=0:full,1:full
a chunk that host memory keeps is not lost
    on disk slots=8 keep=4; save 1 a b c; run put-0 b full; saved lost=nothing
a chunk that neither a store nor host memory has is lost
    on disk slots=8 keep=4; save 1 a b c; run gather a full, put-0 b full; saved lost=0:full
what another rank stores is not lost here
    on disk slots=8; save 1 a stored=False; run any any failed; saved lost=nothing
"""
)
def test_where_cells_are_and_are_not(example: Example) -> None:
    example.play()


@pytest.mark.parametrize(
    ("tiers", "bad", "where", "missed"),
    [
        ((DISK,), "", (0,), ()),
        ((MEMORY, DISK), "", (1,), ()),  # the durable one counts
        ((MEMORY,), "", (0,), ()),
        ((DISK, FAR), "put-0 c full", (0, 1), ()),
        ((DISK,), "put-0 c full", (0,), (2,)),
        ((MEMORY, DISK), "put-1 c full", (0, 1), ()),
        ((DISK,), "gather a full", (0,), (0,)),
        ((DISK,), "put-0 a full, put-0 b full, put-0 c full", (), (0, 1, 2)),
    ],
)
def test_a_save_says_in_which_tiers_it_is_and_of_which_chunks_it_is_not(
    tiers: tuple[Tier, ...], bad: str, where: tuple[int, ...], missed: tuple[int, ...]
) -> None:
    bench = Bench(*tiers, slots=8)
    bench.save(1, "a b c")
    bench.run(outcomes(bad) if bad else None)
    (done,) = bench.saved
    assert (done.tiers, done.missed) == (where, missed)


def test_a_cell_that_is_known_already_is_for_its_own_save_to_tell_of() -> None:
    bench = Bench(DISK, slots=8)
    bench.save(1, "a")
    bench.save(2, "a b")
    bench.run()
    assert [(d.job_id, d.tiers, d.missed) for d in sorted(bench.saved)] == [
        (1, (0,), ()),
        (2, (0,), (0,)),
    ]


# Log lines


@examples(
    """
each cell that a tier did not take is told with tier and outcome, although another has it
    on disk far slots=8; save 1 a b c; run put-1 b full; drops 1 full 1
a save without a tier to write to is told, of which host memory keeps {none: 0|all: 4}
    on disk slots=8 keep={}; tier_down 0; save 1 a b; run; drops host unreachable 2
saves that found no slot are told
    on disk; save 1 a b c; ends 0; ends 1; save 2 d e; after SAVE_STALL_S; drops host full 2
a host tier without stores is no drop
    on slots=8 keep=4; save 1 a b; run; drops
a reset is no drop
    on disk; save 1 a; drop; run; drops
dirty cells that no tier takes are told when their room is needed
    on disk keep=2 write_back=True; tier_down 0; save 0 a; run; save 1 b; run; save 2 c; run
    save 3 d; run; save 4 e; run; save 5 f; run; drops host unreachable 3
a chunk whose optional cell is not stored is stored
    on disk; save 1 a a? b b?; run put a? failed, put b failed; saved missed=(1,) lost=1:failed
"""
)
def test_what_the_log_is_told_of(example: Example) -> None:
    example.play()
