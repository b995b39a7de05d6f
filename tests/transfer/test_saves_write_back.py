"""Write-back: cells stay in host memory until room is needed, and reach every store before they
leave."""

from tests.transfer.engine_bench import DISK, DONE, FAR, UNREACHABLE, Bench
from tests.transfer.scripts import Example, examples
from vllm_kvpool.transfer.ops import CellOutcome, LaneName


@examples(
    """
a save ends in host memory
    on disk slots=6 keep=4 write_back=True; save 1 a b -> 0 gather a b
    ends 0 -> gathered 1 | saved 1: 2 done | host +a +b; host a* b*; clean
without a host tier every tier is written at once
    on disk far write_back=True; save 1 a
    run -> gathered 1 | seal a | put-0 a | put-1 a | saved 1: 1 done
without any tier no cell is dirty
    on keep=2 slots=4 write_back=True; save 1 a; run; host a
what another rank stores is not dirty
    on disk slots=6 keep=4 write_back=True; save 1 a stored=False; run; host a
cells are copied down when more than their share is dirty
    on disk far slots=6 keep=4 write_back=True; save 1 a b
    run -> gathered 1 | saved 1: 2 done | host +a +b; save 2 c
    run -> gathered 2 | saved 2: 1 done | host +c | seal b a c | put-0 b a c | put-1 b a c
    host a b c; count evicted_cells 3 tier=host fate=stored; clean
the coldest cells are copied down and stay the coldest
    on disk slots=8 keep=4 write_back=True; save 1 a; run; save 2 b; run; load 3 x; run
    after 1; save 4 c; run -> gathered 4 | saved 4: 1 done | host +c | seal a b c | put-0 a b c
    load 5 y z; run -> last host -a -b; host c x y z
a cell that is copied down holds its slot and can be read
    on disk slots=4 keep=2 write_back=True; save 1 a b; ends 0; load 2 a -> 2 scatter a; ends 1
    slots 2 2 0; ends 2 -> loaded 2 to 1 done; ends 3 -> nothing; clean
a cell that could not be copied down is lost once it leaves
    on disk keep=2 write_back=True; save 1 a b; run put a full, put b existed; host a b
    count evicted_cells 1 tier=host fate=lost; count evicted_cells 1 tier=host fate=stored
    clean
a cell that one of two tiers took is not lost
    on disk far slots=4 keep=2 write_back=True; save 1 a b; run tier-0 any full
    count evicted_cells 2 tier=host fate=stored; count evicted_cells 0 tier=host fate=lost; clean
a cell that could not be sealed is lost
    on disk slots=4 keep=2 write_back=True; save 1 a b; run seal any failed
    count evicted_cells 2 tier=host fate=lost; clean
cells are copied down when room is needed
    on disk slots=4 keep=8 reserve=1 write_back=True; save 1 a b c
    run -> gathered 1 | saved 1: 3 done | host +a +b +c | seal c b a | put-0 c b a
a save waits for room rather than lose a cell
    on disk slots=4 keep=3 reserve=1 write_back=True; save 1 a b c; ends 0; save 2 d -> nothing
    due SAVE_STALL_S-PATIENCE_LEFT_S; ends 1; ends 2 -> 3 gather d
    run -> gathered 2 | saved 2: 1 done | host +d -c
with no tier up cells are lost only when room is needed
    on disk slots=4 keep=3 reserve=1 write_back=True; take_down; save 1 a b c
    run -> gathered 1 | saved 1: 3 done | host +a +b +c; host a* b* c*; save 2 d; run
    host a* b* d*; count evicted_cells 1 tier=host fate=lost; after FIRST_PAUSE_S; run; host a b d
    count evicted_cells 3 tier=host fate=stored
a flush copies down all that is in host memory alone
    on disk slots=6 keep=4 write_back=True; save 1 a b; run; flush -> 1 seal b a; saves 2
    run -> put-0 b a; host a b; saves 0
a flush copies into every durable tier
    on memory disk far slots=6 keep=4 write_back=True; save 1 a b; run; flush
    run -> put-1 b a | put-2 b a; saves 0
a flush does not wait with one tier for another
    # The end of the process is limited in time: a slow store costs its own copies alone.
    on disk far slots=6 keep=4 write_back=True; save 1 a b; run; flush; run_but put-1; saves 2
    lanes put-1
a flush copies down what was still to come
    on disk slots=6 keep=4 write_back=True; save 1 a; flush -> nothing
    run -> gathered 1 | saved 1: 1 done | host +a | seal a | put-0 a
a flush goes on for what comes after it
    on disk slots=6 keep=4 write_back=True; save 1 a; run; save 2 b; flush -> 2 seal a
    run -> gathered 2 | saved 2: 1 done | host +b | seal b | put-0 a | put-0 b
a flush with no tier up loses what is dirty
    on disk slots=6 keep=4 write_back=True; take_down; save 1 a; run; flush -> nothing; idle
    count evicted_cells 1 tier=host fate=lost
"""
)
def test_write_back(example: Example) -> None:
    example.play()


def test_a_copy_into_a_remote_tier_is_tried_again() -> None:
    bench = Bench(FAR, keep=2, write_back=True)
    bench.save(1, "a b")
    failed: set[str] = set()

    def fails_once(lane: LaneName, key: str) -> CellOutcome:
        if lane.tier < 0 or key in failed:
            return DONE
        failed.add(key)
        return UNREACHABLE

    assert bench.run(fails_once).count("put-0 b a") == 2
    assert bench.counted("kvpool_evicted_cells", tier="host", fate="stored") == 2


def test_many_dirty_cells_do_not_keep_clean_ones_from_leaving() -> None:
    """Dirty cells may be many and colder than the clean ones."""
    count = 1000
    bench = Bench(DISK, slots=4 * count, keep=3 * count, write_back=True, policy="lrfu")
    bench.save(1, " ".join(f"a{i}" for i in range(count)))
    bench.run()
    for job, group in enumerate("bcd", 2):
        bench.load(job, " ".join(f"{group}{i}" for i in range(count)))
        bench.run()
    assert bench.host_cache.num_dirty == count
    assert bench.host_cache.num_idle == 3 * count


# Prompts that are handed over


@examples(
    """
hand over puts a dirty cell that then is clean
    # It did not leave.
    on disk far slots=6 keep=4 write_back=True; save 1 a b; run; host a* b*
    hand_over 2 a b c -> told t2: 0 None | seal a b | gather c
    run -> only put-0 a b | put-1 a b | put-0 c | put-1 c; host a b c
    count evicted_cells 0 tier=host fate=stored; clean
hand over is told once of all chunks of a put
    on disk slots=6 keep=4 write_back=True; hand_over 1 a b c -> told t1: 0 None | gather a b c
    run -> ... put-0 a b c; told only told t1: 3 None
hand over whose put fails leaves the cell dirty
    on disk slots=6 keep=4 write_back=True; save 1 a; run; hand_over 2 a
    run tier-0 any full -> ... told t2: 0 0; host a*; count evicted_cells 0 tier=host fate=lost
    clean
hand over puts a cell that another save brings
    on disk slots=6 keep=4 write_back=True; save 1 a; hand_over 2 a -> gathered 2 | told t2: 0 None
    run -> gathered 1 | saved 1: 1 done | host +a | seal a | put-0 a | saved 2: 1 done | told t2: 1
      None
    host a; clean
hand over puts cells of host memory without pages
    on disk slots=6 keep=4 write_back=True; save 1 a b; run; hand_over 2 a b c without=ab
    told told t2: 0 None | seal a b | gather c; run -> only put-0 a b | put-0 c
    told last told t2: 3 None; clean
hand over without pages waits for a fetch
    on disk slots=6 keep=4 write_back=True; load 1 a; hand_over 2 a without=a -> no gather a
    run -> ... put-0 a | told t2: 1 None; told no gather a; clean
hand over without pages ends with the load {that times out: after TIMEOUT_S|that ends: cancel 2}
    # The load's fetch finds no slots: a store call that hangs has them.
    on disk far slots=2 keep=1 write_back=True; load 1 a b; hangs 0; slots 0 0 2
    load 2 c; hand_over 3 c without=c -> gathered 3 | told t3: 0 None; {}
    told ... saved 3: 1 missing | told t3: 0 0; saves 0; late 0; run; clean
hand over without pages does not follow a prefetch that finds no slots
    on disk far slots=2 keep=1 write_back=True; load 1 a b; hangs 0; prefetch 2 c
    hand_over 3 c without=c -> gathered 3 | saved 3: 1 missing | told t3: 0 0; saves 0
    late 0; run; host c
hand over without pages follows a prefetch that has its slots
    on disk slots=6 keep=4 write_back=True; prefetch 1 a; hand_over 2 a without=a
    run -> ... put-0 a | saved 2: 1 done | told t2: 1 None; clean
hand over without pages follows a checked fetch whose load has ended
    on disk limits=1x1 slots=6 keep=4 write_back=True; load 1 a; load 2 b; hand_over 3 b without=b
    ends get-0 -> get-0 b | check a; ends get-0; cancel 2
    run -> ... put-0 b | saved 3: 1 done | told t3: 1 None; host a b; clean
hand over without pages leaves a prefetch going that the first tier lacks
    on disk far slots=6 keep=4 write_back=True; prefetch 1 a; hand_over 2 a without=a
    ends get-0 missing -> ... get-1 a | saved 2: 1 missing | told t2: 0 0; saves 0; run; host a
hand over without pages leaves a prefetch going whose load has ended
    on disk far slots=2 keep=1 write_back=True; load 1 a b; hangs 0; prefetch 2 c; load 3 c
    hand_over 4 c without=c -> gathered 4 | told t4: 0 None; cancel 3
    told ... saved 4: 1 missing | told t4: 0 0; saves 0; late 0; run; host c
hand over without pages ends with a fetch that fails once no load wants it
    on disk far slots=6 keep=4 write_back=True; load 1 a; hand_over 2 a without=a; cancel 1
    run get-0 any missing -> saved 2: 1 cancelled | told t2: 0 0; clean
hand over without pages ends where a cell has left host memory
    on disk slots=6 keep=4 write_back=True; save 1 a c; run; hand_over 2 a b c without=abc
    run -> ... told t2: 1 1; saved missed=(1,) lost=1:missing; clean
hand over without pages leaves out windows that host memory lacks
    on disk slots=6 keep=4 write_back=True; save 1 a b bw; run; hand_over 2 a aw b bw without=ab
    run -> ... told t2: 2 None; saved missed=(); clean
hand over ends where a window has left host memory since the lookup
    on disk slots=6 keep=4 write_back=True; save 1 a b c cw; run
    hand_over 2 a aw b bw c cw without=abc windows=bc; run -> ... told t2: 1 1
    saved missed=(1,); clean
hand over ends where the save that brings its cell fails
    on disk slots=6 keep=4 write_back=True; save 1 a; hand_over 2 a
    run any any failed -> ... told t2: 0 0; told ... saved 2: 1 failed; host; clean
hand over without a tier to write to keeps the cell and ends
    on disk slots=6 keep=4 write_back=True; save 1 a; run; tier_down 0
    hand_over 2 a -> gathered 2 | saved 2: 1 done | told t2: 0 0; host a*
    saved missed=(0,); clean
"""
)
def test_prompts_that_are_handed_over(example: Example) -> None:
    example.play()
