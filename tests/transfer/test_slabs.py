"""Slabs: one op in each lane, tiers with a part of a slab, and plans named in parts."""

from tests.transfer.scripts import Example, examples, play
from vllm_kvpool.transfer.ops import JobId


@examples(
    """
slab in host memory is one scatter
    on slots=16 keep=8; save 9 a0 a1 b0 b1; run; load 1 a0 a1 b0 b1 -> scatter a0 a1 b0 b1
    sizes 2 2; run -> loaded 1 to 2 done
slab of a save is one op of the lane {gather|seal|put-0}
    on disk slots=16 keep=8; save 1 a0 a1 b0 b1; run_but {}; sizes 2 2
    run -> ... saved 1: 4 done
slab of a fetch is one op of the lane {get-0|check|scatter}
    on disk slots=16; load 1 a0 a1 b0 b1; run_but {}; sizes 2 2; run -> last loaded 1 to 2 done
gather waits until all cells have a slot
    on disk slots=9; save 1 a0 a1 b0 b1 c0 c1 d0 d1; sizes 2 2 2 2; slots 1 8 0
    save 2 e0 e1 -> nothing; run -> ... saved 2: 2 done; clean
gather that waits while slots become free is not dropped
    # Puts of the first save, which end one by one, free two of the four slots that it needs.
    on disk slots=9 puts=2x1; save 1 a0 a1 b0 b1 c0 c1 d0 d1; ends 0; ends 1
    save 2 e0 e1 e2 e3 -> nothing; wait SAVE_STALL_S*0.9; ends oldest
    after SAVE_STALL_S*0.9 -> nothing; ends oldest -> ... gather e0 e1 e2 e3
    run -> ... saved 2: 4 done; clean
gather that gets no further slot is dropped
    on disk slots=9 puts=2x1; save 1 a0 a1 b0 b1 c0 c1 d0 d1; ends 0; ends 1
    save 2 e0 e1 e2 e3 -> nothing; ends oldest
    after SAVE_STALL_S -> gathered 2 | saved 2: 4 full; run; clean
gather whose slots loads take and give back is dropped in time
    # Room that comes and goes is no progress.
    on disk slots=9 puts=2x1; save 1 a0 a1 b0 b1 c0 c1 d0 d1; ends 0; ends 1
    save 2 e0 e1 e2 e3 -> nothing; load 3 x0; wait SAVE_STALL_S*0.4; ends get-0
    wait SAVE_STALL_S*0.4; ends check; wait SAVE_STALL_S*0.4
    ends scatter -> loaded 3 to 1 done | gathered 2 | saved 2: 4 full; run; clean
slab that one op moves fails whole {gather|seal}
    on disk slots=16 keep=8; save 1 a0 a1; run {} any failed -> ... saved 1: 2 failed; clean
slab whose seal fails stays in host memory
    # Its payload is whole; the header alone is not.
    on disk slots=16 keep=8; save 1 a0 a1; run seal any failed; load 2 a0 a1 -> scatter a0 a1
prefetch brings no more cells than the host tier has room for
    on disk keep=3 slots=16; prefetch 1 a0 a1 b0 b1 -> get-0 a0 a1; run
"""
)
def test_slabs(example: Example) -> None:
    example.play()


# Tiers that have a part of a slab


@examples(
    """
cells that a tier lacks are asked of the next and the others checked
    on memory disk slots=16; load 1 a0 a1 a2; run get-0 a1 missing
    told check a0 a2 | get-1 a1 | check a1 | seal a0 a1 a2 | scatter a0 a1 a2 | put-0 a0 a1 a2 |
      loaded 1 to 1 done; clean
bad cell is removed and asked of the next tier
    on memory disk keep=0 slots=16; load 1 a0 a1 a2; run check a1 corrupt -> ... remove-0 a1
    told ... get-1 a1; clean
cells that were missing and bad are asked for together
    on memory disk slots=16; load 1 a0 a1 a2; ends 0 done missing done
    ends 1 done corrupt -> ... get-1 a1 a2; run -> ... loaded 1 to 1 done; clean
cell that no tier has ends the load and frees the slots
    on memory disk keep=0 slots=16; load 1 a0 a1
    run get-0 a1 missing, get-1 a1 missing -> last loaded 1 to 0 missing; clean
part of a slab is not checked where no tier is left for the rest
    on disk keep=0 slots=16; load 1 a0 a1; run get-0 a1 missing -> loaded 1 to 0 missing; clean
fetches that wait for slots of each other end
    on memory disk limits=1x3; load 1 a0 a1 a2; load 2 b0 b1 b2
    run get-0 a1 missing, get-0 b1 missing -> ... loaded 1 to 1 done | loaded 2 to 1 done
    clean
fetch that keeps slots goes before one that waits for them there
    # When a tier goes down, the fetch without slots moves to the next tier's lane, before the
    # fetch whose first cells are still being checked.
    on memory disk limits=1x3; load 1 a0 a1 a2; load 2 b0 b1 b2
    ends 0 done missing done -> check a0 a2; tier_down 0 -> nothing; ends 1 -> get-1 a1
    run -> ... loaded 1 to 1 done | loaded 2 to 1 done; clean
fetch of which a call hangs is asked for whole in new slots
    on memory disk far keep=0 slots=16; load 1 a0 a1; ends 0 done missing; ends 1
    hangs 2 -> get-2 a0 a1; slots 12 2 2; run -> ... loaded 1 to 1 done; late 2; clean
tier that fails once is asked for the rest of a slab
    on far keep=0 slots=16; load 1 a0 a1; ends 0 done unreachable -> get-0 a0 a1
    run -> ... loaded 1 to 1 done
tier that lacks a slab after a failed call is not asked again
    on far disk keep=0 slots=16; load 1 a0 a1; ends 0 unreachable -> get-0 a0 a1
    ends 1 missing -> get-1 a0 a1; run -> ... loaded 1 to 1 done
hits are counted by cell and tier
    on memory disk slots=16; load 1 a0 a1 a2; run get-0 a1 missing
    count hit_cells 2 tier=memory; count hit_cells 1 tier=disk
put of a part of a slab is no saved chunk
    on disk slots=16; save 1 a0 a1; run put-0 a1 full -> ... saved 1: 1 done, 1 full
    saved missed=(0,); clean
put of cells some of which exist is done
    on disk slots=16; save 1 a0 a1; run put-0 a0 existed -> ... saved 1: 1 existed, 1 done
    saved missed=()
"""
)
def test_tiers_that_have_a_part_of_a_slab(example: Example) -> None:
    example.play()


# Plans that are named part by part


@examples(
    """
the first slabs move before the others are named
    on slots=16 keep=8; save 9 a0 a1 b0 b1; run; load_in_parts 1 a0 a1 / b0 b1 -> scatter a0 a1
    after 0 -> scatter b0 b1; after 0 -> nothing; run -> loaded 1 to 2 done
a load that misses names no later cells
    on slots=16 keep=8; save 9 a0 a1 b0 b1; run; load_in_parts 1 x0 x1 / b0 b1; run -> nothing
    after 0 -> nothing; idle
a load that is cancelled names no later cells
    on slots=16 keep=8; save 9 a0 a1 b0 b1; run; load_in_parts 1 a0 a1 / b0 b1; cancel 1
    run -> loaded 1 to 0 cancelled; after 0 -> nothing
a stream that ends early loads cells that are not named yet
    # The last chunks never come; those before them are stored, and count as loaded.
    on slots=16 keep=8; save 9 a0 a1 b0 b1; run
    load_in_parts 1 a0 a1 / b0 b1 / c0 c1 landed=0
    land 1 2 final=True -> scatter a0 a1 b0 b1; run -> nothing
    after 0 -> loaded 1 to 2 missing
a cell that has just failed is not found by cells named next
    # Another load still waits for it: its entry has no bytes, and perhaps no slot.
    on disk slots=2; load 1 a0 b0 c0 -> get-0 a0 b0; load_in_parts 2 / c0 -> nothing
    tier_down 0 -> loaded 2 to 0 unreachable
nothing is fetched after a reset for cells that are named next
    on disk slots=16; load_in_parts 1 / a0 b0; reset -> loaded 1 to 0 cancelled; idle
a save is gathered when all its cells are named
    on slots=16 keep=8; save_in_parts 1 a0 a1 / b0 b1; ends 0 -> no gathered; after 0 -> nothing
    after 0 -> nothing; run -> gathered 1 | saved 1: 4 done | host +b
a dropped save reports the cells that were not named
    on slots=16 keep=8; save_in_parts 1 a0 a1 / b0 b1; drop; after 0; after 0
    run -> ... saved 1: 4 cancelled; clean
optional cells are an op of their own
    # They are cleared where they are late, and the chunk's other cells are not.
    on slots=16 keep=8; save 9 a0 a1 a? b?; run; load 1 a0 a1 a? b?; sizes 2 1 1
    run -> loaded 1 to 2 done
"""
)
def test_plans_that_are_named_part_by_part(example: Example) -> None:
    example.play()


def test_scatters_are_in_the_order_of_chunks() -> None:
    """A load that stops early gives up its later chunks, even if a fetch still waits."""
    bench = play("on disk slots=16 keep=8; save 9 a0 a1 c0 c1; run; load 1 a0 a1 b0 b1 c0 c1")
    load = bench.engine.loads._loads[JobId(1)]
    assert [scatter.chunk for scatter in load.scatters] == [0, 1, 2]
