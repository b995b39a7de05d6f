"""Loads over host memory: cells that they find, share with other jobs, and leave behind."""

from tests.transfer.engine_bench import DISK, SINGLE, Bench
from tests.transfer.scripts import Example, examples
from vllm_kvpool.transfer.loads import Priority


@examples(
    """
a saved cell is found by the next load without a get
    on disk slots=8 keep=4 limits=2x1; save 1 a; run; load 2 a -> 3 scatter a
    ends 3 -> loaded 2 to 1 done; count hit_cells 1 tier=host
a loaded cell is found by the next load
    on disk slots=8 keep=4 limits=2x1; load 1 a; run; load 2 a -> 3 scatter a
without a host tier nothing stays
    on disk; save 1 a; run -> no host; host; load 2 a -> 3 get-0 a
"""
)
def test_host_memory(example: Example) -> None:
    example.play()


# Sharing


@examples(
    """
two loads of one cell share a fetch {0|4}
    on disk keep={} slots=8; load 1 a b -> 0 get-0 a b; load 2 b c -> 1 get-0 c; ends 0
    ends 2 -> ... 3 scatter a b b; slots 5 3 0; run -> ... loaded 1 to 2 done | loaded 2 to 2 done
    clean
a load waits for the gather of a save
    on disk; save 1 a; load 2 a -> nothing; ends 0 -> any order gathered 1 | seal a | scatter a
    told first gathered 1; run -> ... loaded 2 to 1 done
a load of a cell whose gather fails stops
    on disk; save 1 a; load 2 a
    ends 0 failed -> loaded 2 to 0 failed | gathered 1 | saved 1: 1 failed; clean
a cell that cannot be had stops all who wait for it
    on disk; load 1 a b; load 2 a c after=5
    ends 0 missing done -> any order loaded 1 to 0 missing | loaded 2 to 5 missing; run; clean
cancelling one of two loads leaves the other
    on disk limits=1x1 slots=8 keep=4; load 1 x a; load 2 a; cancel 1 -> loaded 1 to 0 cancelled
    run -> ... loaded 2 to 1 done
cancelling the only load cancels a fetch that has not started
    on disk slots=8 limits=1x1; load 1 a b; cancel 1; run -> check a; host; clean
cancelling the only load leaves a fetch that has started to host memory
    on disk keep=4 slots=8 limits=1x1; load 1 a b; cancel 1
    run -> check a | host +a; host a; clean
a cancelled fetch that waits for its check frees its slot
    on disk slots=8 limits=1x1; load 1 a b; ends 0 -> 1 get-0 b | 2 check a; ends 1 -> nothing
    cancel 1; slots 7 1 0
a late load leaves the fetch to others who wait for it
    on disk; load 1 a; wait TIMEOUT_S/2; load 2 a; after TIMEOUT_S/2 -> loaded 1 to 0 timed_out
    slots 3 1 0; ends 0; run -> ... loaded 2 to 1 done
each load stops at its own deadline and once
    on disk slots=8 reserve=0; load 0 a timeout=3; load 1 b timeout=1; load 2 c timeout=2
    load 3 d timeout=4; due 1; cancel 1 -> loaded 1 to 0 cancelled; due 2; after 1 -> nothing
    after 1 -> loaded 2 to 0 timed_out
    after 2 -> loaded 0 to 0 timed_out | loaded 3 to 0 timed_out; due never
"""
)
def test_sharing(example: Example) -> None:
    example.play()


# Streams: another engine stores chunks while the load runs


@examples(
    """
chunks of a stream are fetched as they land
    on disk slots=8 reserve=0; load 1 a b c landed=1 -> 0 get-0 a; ends 0; land 1 2 -> 2 get-0 b
    run; land 1 3 final=True -> first get-0 c; run -> last loaded 1 to 3 done
stream that ends early keeps what has landed
    on disk slots=8 reserve=0; load 1 a b c landed=1; run -> check a | scatter a
    land 1 1 final=True -> loaded 1 to 1 missing; land 1 3 final=True -> nothing
stream waits for chunks beyond its deadline
    on disk slots=8 reserve=0; load 1 a b landed=1; run; after 2*TIMEOUT_S -> nothing; land 1 2
    due 3*TIMEOUT_S; after TIMEOUT_S -> loaded 1 to 1 timed_out
stream waits beyond its deadline for chunks that are not named yet
    on disk slots=8 reserve=0; load_in_parts 1 a b / c landed=0; after 2*TIMEOUT_S -> nothing
    land 1 3 final=True; run -> last loaded 1 to 3 done
fetch that hangs after the producer has gone ends the load soon
    on disk slots=8 reserve=0; load 1 a b landed=0; land 1 1
    land 1 1 final=True urgent=True -> nothing; after URGENT_S -> loaded 1 to 0 timed_out
stream of a request that has ended is given up
    on disk slots=8 reserve=0; load 1 a b landed=0; cancel 1 -> loaded 1 to 0 cancelled
"""
)
def test_streams_chunks_that_another_engine_stores_while_the_load_is_under_way(
    example: Example,
) -> None:
    example.play()


# Leaving


@examples(
    """
the coldest cells leave for what comes in
    on disk slots=6 keep=3 limits=2x1; load 0 a; run; after 1; load 1 b; run; after 1
    load 2 c; run; after 1; load 3 a; run; load 4 d e
    run -> only host +d | host +e | host -b | host -c; host a d e
    count evicted_cells 2 tier=host fate=dropped
the end of a prompt that was {load|save}ed leaves before its beginning
    on disk slots=8 keep=4; {} 1 a b c d; run; load 2 x y; run; host a b x y
a cell that is held does not leave
    on disk slots=3 reserve=0 keep=1 limits=1x1; save 1 a; run; load 2 a; load 3 b c d e
    run_but scatter -> get-0 c | check b | host +b | check c | host +c
    slots 0 3 0; run -> ... loaded 2 to 1 done | loaded 3 to 4 done
"""
)
def test_leaving(example: Example) -> None:
    example.play()


# Reports to the scheduler


@examples(
    """
chunk is here when all its slabs are
    on disk keep=4 slots=8 slabs_per_chunk=2 apart=True; save 1 a0; run -> no host; save 2 a1
    run -> ... host +a
chunk is gone when one of its slabs is
    on disk keep=4 slots=8 slabs_per_chunk=2 apart=True; load 1 a0 a1 b0 b1
    run -> ... host +a +b; load 2 c0; run -> only host -b; load 3 d0; run -> no host
"""
)
def test_what_the_scheduler_is_told(example: Example) -> None:
    example.play()


# A reset


@examples(
    """
a reset forgets every cell
    on disk slots=8 keep=4 limits=2x1; save 1 a b; run; drop -> nothing; host a b
    reset -> host -a -b; slots 8 0 0; load 2 a -> first get-0 a
a cell that is in its get during a reset is served to nobody
    on disk slots=8 keep=4 limits=2x1; load 1 a; reset -> nothing; load 2 a -> first get-0 a
    slots 6 2 0; ends 0 -> loaded 1 to 0 cancelled; slots 7 1 0
    run -> ... loaded 2 to 1 done
a cell that is in its check during a reset is served to nobody {done|failed}
    on disk slots=8 keep=4 limits=2x1; load 1 a; ends 0; reset -> nothing
    load 2 a -> first get-0 a; slots 6 2 0; ends 1 {} -> loaded 1 to 0 cancelled; slots 7 1 0
    run -> ... loaded 2 to 1 done
a fetch that has not started is not made after a reset
    on disk keep=4 slots=8 limits=1x1; prefetch 1 a b -> 0 get-0 a; reset; ends 0 -> nothing
    slots 8 0 0
"""
)
def test_a_reset(example: Example) -> None:
    example.play()


# Prefetching


@examples(
    """
a prefetch brings cells into host memory
    on disk slots=8 keep=4 limits=2x1; prefetch 1 a b; run -> check a | check b | host +a | host +b
    clean; count hit_cells 0 tier=disk; load 2 a b; run -> last loaded 2 to 2 done
    count hit_cells 2 tier=host; count prefetched_cells 2 outcome=used; load 3 a b; run
    count prefetched_cells 2 outcome=used
the first load of a prefetched cell counts as no other use
    on disk slots=8 keep=3 policy=lrfu; prefetch 1 a; run; load 2 a; run; load 5 b; run
    load 6 c; run; load 7 d; run -> ... host -a
the second load of a prefetched cell counts as another use
    on disk slots=8 keep=3 policy=lrfu; prefetch 1 a; run; load 2 a; run; load 3 a; run
    load 5 b; run; load 6 c; run; load 7 d; run -> ... host -b
a prefetch takes no more than host memory holds
    on disk keep=2 slots=8; prefetch 1 a b c -> 0 get-0 a b
without a host tier nothing is prefetched
    on disk slots=8; prefetch 1 a b c -> nothing
a prefetch leaves the reserve to loads
    on disk keep=4 slots=5 reserve=2; prefetch 1 a b c d -> 0 get-0 a b c
    load 2 x y -> 1 get-0 x y
a prefetched cell that leaves unread was of no use
    on disk slots=8 keep=2 limits=2x1; prefetch 1 a; run; after 1; load 2 x y; run
    count prefetched_cells 0 outcome=used; count prefetched_cells 1 outcome=unused
a load that joins a prefetch raises its priority
    on disk slots=12 keep=8 limits=1x1; prefetch 1 a b c d; load 2 x; load 3 d
    run -> only get-0 x | get-0 d | get-0 b | get-0 c
    count prefetched_cells 1 outcome=used
a prefetch goes on without the load that joined it
    on disk limits=1x1 slots=8 keep=4; prefetch 1 a b; load 2 b
    cancel 2 -> loaded 2 to 0 cancelled; run; host a b; count prefetched_cells 0 outcome=used
a prefetched cell that is bad is removed and forgotten
    on disk slots=8 keep=4 limits=2x1; prefetch 1 a; run check any corrupt -> check a | remove-0 a
    clean; host
"""
)
def test_prefetching(example: Example) -> None:
    example.play()


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


@examples(
    """
a load clears the pages of an optional cell that no tier has
    on disk; load 1 a a? b b?; run get a? missing -> ... loaded 1 to 2 done
    told only scatter a? | scatter a b b?; cleared 0; clean
a damaged optional cell is removed and its pages are cleared
    on disk; load 1 a a?; run check a? corrupt -> ... remove-0 a? | loaded 1 to 1 done; cleared 0
optional cells are cleared where no tier can be asked
    on; load 1 a? b?; run -> ... loaded 1 to 2 done; cleared 0 1
a late optional cell is cleared at the deadline
    on disk slots=8 limits=2x1; load 1 a a?; ends 0; run_but get-0
    after TIMEOUT_S -> ... scatter a?; run_but get-0 -> ... loaded 1 to 1 done; cleared 0
    run; clean
a late cell ends the load though optional ones are late too
    on disk slots=8 limits=2x1; load 1 a? b; after TIMEOUT_S
    run -> ... loaded 1 to 1 timed_out
a cleared cell that cannot be written ends its load
    on disk; load 1 a a?; run get a? missing, scatter a? failed -> ... loaded 1 to 0 failed
a load that ends early gives up cleared cells in order
    # Pages of chunks behind the end are not written any more.
    on disk slots=8; load 1 a? b b? c c?
    run get a? missing, get b missing -> only scatter a? | loaded 1 to 1 missing
"""
)
def test_optional_cells(example: Example) -> None:
    example.play()
