"""Write-back: cells stay in host memory until room is needed, and every store gets them before."""

from tests.transfer.engine_bench import (
    DISK,
    DONE,
    EXISTED,
    FAILED,
    FAR,
    FULL,
    MEMORY,
    UNREACHABLE,
    Bench,
    words,
)
from vllm_kvpool.storage.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S
from vllm_kvpool.transfer.context import Tier
from vllm_kvpool.transfer.ops import CellOutcome, LaneName
from vllm_kvpool.transfer.saves import PATIENCE_LEFT_S, SAVE_STALL_S


def back(*tiers: Tier, slots: int = 6, keep: int = 4, reserve: int = 1) -> Bench:
    return Bench(*(tiers or (DISK,)), slots=slots, keep=keep, reserve=reserve, write_back=True)


def fate(bench: Bench, fate: str) -> int:
    return bench.counted("kvpool_evicted_cells", tier="host", fate=fate)


def take_down(bench: Bench) -> None:
    """Tier 0 fails as often as it takes."""
    for job in range(FAILURES_TO_OPEN):
        bench.load(100 + job, "z")
        bench.run(lambda lane, key: FAILED)


def test_a_save_ends_in_host_memory() -> None:
    bench = back()
    assert bench.save(1, "a b") == ["0 gather a b"]
    assert bench.ends(0) == ["gathered 1", "saved 1: 2 done", "host +a +b"]
    assert bench.cells() == "a* b*"
    assert bench.is_clean


def test_without_a_host_tier_every_tier_is_written_at_once() -> None:
    bench = Bench(DISK, FAR, write_back=True)
    bench.save(1, "a")
    told = bench.run()
    assert told == ["gathered 1", "seal a", "put-0 a", "put-1 a", "saved 1: 1 done"]


def test_without_any_tier_no_cell_is_dirty() -> None:
    bench = Bench(keep=2, slots=4, write_back=True)
    bench.save(1, "a")
    bench.run()
    assert bench.cells() == "a"


def test_what_another_rank_stores_is_not_dirty() -> None:
    bench = back()
    bench.save(1, "a", stored=False)
    bench.run()
    assert bench.cells() == "a"


def test_cells_are_copied_down_when_more_than_their_share_is_dirty() -> None:
    bench = back(DISK, FAR)
    bench.save(1, "a b")
    assert bench.run() == ["gathered 1", "saved 1: 2 done", "host +a +b"]
    bench.save(2, "c")
    assert bench.run() == [
        *("gathered 2", "saved 2: 1 done", "host +c"),
        *("seal b a c", "put-0 b a c", "put-1 b a c"),
    ]
    assert bench.cells() == "a b c"
    assert fate(bench, "stored") == 3
    assert bench.is_clean


def test_the_coldest_cells_are_copied_down_and_stay_the_coldest() -> None:
    bench = back(slots=8, keep=4)
    bench.save(1, "a")
    bench.run()
    bench.save(2, "b")
    bench.run()
    bench.load(3, "x")
    bench.run()
    bench.after(1.0)
    bench.save(4, "c")
    assert bench.run()[-2:] == ["seal a b c", "put-0 a b c"]
    bench.load(5, "y z")
    assert bench.run()[-1] == "host -a -b"
    assert bench.cells() == "c x y z"


def test_a_cell_that_is_copied_down_holds_its_slot_and_can_be_read() -> None:
    bench = back(slots=4, keep=2)
    bench.save(1, "a b")
    bench.ends(0)
    assert bench.load(2, "a") == ["2 scatter a"]
    bench.ends(1)
    assert bench.slots() == "2 2 0"
    assert bench.ends(2) == ["loaded 2 to 1 done"]
    assert bench.ends(3) == []
    assert bench.is_clean


def test_a_cell_that_could_not_be_copied_down_is_lost_once_it_leaves() -> None:
    bench = back(slots=4, keep=2)
    bench.save(1, "a b")
    puts = {"a": FULL, "b": EXISTED}
    bench.run(lambda lane, key: puts[key] if lane.tier == 0 else DONE)
    assert bench.cells() == "a b"
    assert fate(bench, "lost") == 1
    assert fate(bench, "stored") == 1
    assert bench.is_clean


def test_a_cell_that_one_of_two_tiers_took_is_not_lost() -> None:
    bench = back(DISK, FAR, slots=4, keep=2)
    bench.save(1, "a b")
    bench.run(lambda lane, key: FULL if lane.tier == 0 else DONE)
    assert fate(bench, "stored") == 2
    assert fate(bench, "lost") == 0
    assert bench.is_clean


def test_a_cell_that_could_not_be_sealed_is_lost() -> None:
    bench = back(slots=4, keep=2)
    bench.save(1, "a b")
    bench.run(lambda lane, key: FAILED if str(lane) == "seal" else DONE)
    assert fate(bench, "lost") == 2
    assert bench.is_clean


def test_a_copy_into_a_remote_tier_is_tried_again() -> None:
    bench = back(FAR, slots=4, keep=2)
    bench.save(1, "a b")
    failed: set[str] = set()

    def fails_once(lane: LaneName, key: str) -> CellOutcome:
        if lane.tier < 0 or key in failed:
            return DONE
        failed.add(key)
        return UNREACHABLE

    assert bench.run(fails_once).count("put-0 b a") == 2
    assert fate(bench, "stored") == 2


def test_cells_are_copied_down_when_room_is_needed() -> None:
    bench = back(slots=4, keep=8, reserve=1)  # less than its share is dirty
    bench.save(1, "a b c")
    assert bench.run() == [
        *("gathered 1", "saved 1: 3 done", "host +a +b +c"),
        *("seal c b a", "put-0 c b a"),
    ]


def test_a_save_waits_for_room_rather_than_lose_a_cell() -> None:
    bench = back(slots=4, keep=3, reserve=1)
    bench.save(1, "a b c")
    bench.ends(0)
    assert bench.save(2, "d") == []
    assert bench.engine.next_deadline() == SAVE_STALL_S - PATIENCE_LEFT_S
    bench.ends(1)
    assert bench.ends(2) == ["3 gather d"]
    assert bench.run() == ["gathered 2", "saved 2: 1 done", "host +d -c"]


def test_with_no_tier_up_cells_are_lost_only_when_room_is_needed() -> None:
    bench = back(slots=4, keep=3, reserve=1)
    take_down(bench)
    bench.save(1, "a b c")
    assert bench.run() == ["gathered 1", "saved 1: 3 done", "host +a +b +c"]
    assert bench.cells() == "a* b* c*"
    bench.save(2, "d")
    bench.run()
    assert bench.cells() == "a* b* d*"
    assert fate(bench, "lost") == 1
    # When the tier is back what is left is copied down.
    bench.after(FIRST_PAUSE_S)
    bench.run()
    assert bench.cells() == "a b d"
    assert fate(bench, "stored") == 3


def test_a_flush_copies_down_all_that_is_in_host_memory_alone() -> None:
    bench = back()
    bench.save(1, "a b")
    bench.run()
    assert bench.flush() == ["1 seal b a"]
    assert bench.engine.num_saves == 2
    assert bench.run() == ["put-0 b a"]
    assert bench.cells() == "a b"
    assert bench.engine.num_saves == 0


def test_a_flush_copies_into_every_durable_tier() -> None:
    bench = back(MEMORY, DISK, FAR)
    bench.save(1, "a b")
    bench.run()
    bench.flush()
    assert bench.run() == ["put-1 b a", "put-2 b a"]
    assert bench.engine.num_saves == 0


def test_a_flush_does_not_wait_with_one_tier_for_another() -> None:
    """The end of the process is limited in time: a slow store costs its own copies alone."""
    bench = back(DISK, FAR)
    bench.save(1, "a b")
    bench.run()
    bench.flush()
    bench.run_but("put-1")
    assert bench.engine.num_saves == 2
    assert [str(batch.lane) for batch in bench.running.values()] == ["put-1"]


def test_a_flush_copies_down_what_was_still_to_come() -> None:
    bench = back()
    bench.save(1, "a")
    assert bench.flush() == []
    assert bench.run() == ["gathered 1", "saved 1: 1 done", "host +a", "seal a", "put-0 a"]


def test_a_flush_goes_on_for_what_comes_after_it() -> None:
    bench = back()
    bench.save(1, "a")
    bench.run()
    bench.save(2, "b")
    assert bench.flush() == ["2 seal a"]
    assert bench.run()[-2:] == ["put-0 a", "put-0 b"]


def test_a_flush_with_no_tier_up_loses_what_is_dirty() -> None:
    bench = back()
    take_down(bench)
    bench.save(1, "a")
    bench.run()
    assert bench.flush() == []
    assert bench.engine.idle
    assert fate(bench, "lost") == 1


def test_many_dirty_cells_do_not_keep_clean_ones_from_leaving() -> None:
    """However many cells that may not leave are colder than one that may."""
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


def test_hand_over_puts_a_dirty_cell_that_then_is_clean() -> None:
    bench = back(DISK, FAR)
    bench.save(1, "a b")
    bench.run()
    assert bench.cells() == "a* b*"
    told = [*words(bench.hand_over(2, "a b c")), *bench.run()]
    assert [each for each in told if each.startswith(("gather ", "put"))] == [
        *("gather c", "put-0 a b", "put-1 a b", "put-0 c", "put-1 c"),
    ]
    assert bench.cells() == "a b c"
    assert fate(bench, "stored") == 0, "it did not leave"
    assert bench.is_clean


def test_hand_over_is_told_once_of_all_chunks_of_a_put() -> None:
    bench = back()
    told = [*bench.hand_over(1, "a b c"), *bench.run()]
    assert "put-0 a b c" in told
    assert [each for each in told if each.startswith("told")] == [
        *("told t1: 0 None", "told t1: 3 None"),
    ]


def test_hand_over_whose_put_fails_leaves_the_cell_dirty() -> None:
    bench = back()
    bench.save(1, "a")
    bench.run()
    bench.hand_over(2, "a")
    told = bench.run(lambda lane, key: FULL if lane.tier == 0 else DONE)
    assert "told t2: 0 0" in told
    assert bench.cells() == "a*"
    assert fate(bench, "lost") == 0
    assert bench.is_clean


def test_hand_over_puts_a_cell_that_another_save_brings() -> None:
    bench = back()
    bench.save(1, "a")
    assert bench.hand_over(2, "a") == ["gathered 2", "told t2: 0 None"]
    assert bench.run() == [
        *("gathered 1", "saved 1: 1 done", "host +a", "seal a", "put-0 a"),
        *("saved 2: 1 done", "told t2: 1 None"),
    ]
    assert bench.cells() == "a"
    assert bench.is_clean


def test_hand_over_puts_cells_of_host_memory_without_pages() -> None:
    bench = back()
    bench.save(1, "a b")
    bench.run()
    told = [*words(bench.hand_over(2, "a b c", without_pages="ab")), *bench.run()]
    assert [each for each in told if each.startswith(("gather ", "put"))] == [
        *("gather c", "put-0 a b", "put-0 c"),
    ]
    assert "told t2: 3 None" in told
    assert bench.is_clean


def test_hand_over_without_pages_waits_for_a_fetch() -> None:
    bench = back()
    bench.load(1, "a")
    told = [*words(bench.hand_over(2, "a", without_pages="a")), *bench.run()]
    assert not [each for each in told if each.startswith("gather ")]
    assert "put-0 a" in told
    assert "told t2: 1 None" in told
    assert bench.is_clean


def test_hand_over_without_pages_ends_where_a_cell_has_left_host_memory() -> None:
    bench = back()
    bench.save(1, "a c")
    bench.run()
    told = [*bench.hand_over(2, "a b c", without_pages="abc"), *bench.run()]
    assert "told t2: 1 1" in told
    assert bench.saved[-1].missed == (1,)
    assert dict(bench.saved[-1].lost) == {1: CellOutcome.MISSING}
    assert bench.is_clean


def test_hand_over_without_pages_leaves_out_windows_that_host_memory_lacks() -> None:
    bench = back()
    bench.save(1, "a b bw")
    bench.run()
    told = [*bench.hand_over(2, "a aw b bw", without_pages="ab"), *bench.run()]
    assert "told t2: 2 None" in told
    assert bench.saved[-1].missed == ()
    assert bench.is_clean


def test_hand_over_ends_where_a_window_has_left_host_memory_since_the_lookup() -> None:
    bench = back()
    bench.save(1, "a b c cw")
    bench.run()
    told = bench.hand_over(2, "a aw b bw c cw", without_pages="abc", host_windows="bc")
    assert "told t2: 1 1" in [*told, *bench.run()]
    assert bench.saved[-1].missed == (1,)
    assert bench.is_clean


def test_hand_over_ends_where_the_save_that_brings_its_cell_fails() -> None:
    bench = back()
    bench.save(1, "a")
    bench.hand_over(2, "a")
    told = bench.run(lambda lane, key: FAILED)
    assert "told t2: 0 0" in told
    assert "saved 2: 1 failed" in told
    assert bench.cells() == ""
    assert bench.is_clean


def test_hand_over_without_a_tier_to_write_to_keeps_the_cell_and_ends() -> None:
    bench = back()
    bench.save(1, "a")
    bench.run()
    bench.health(0, up=False)
    told = ["gathered 2", "saved 2: 1 done", "told t2: 0 0"]
    assert bench.hand_over(2, "a") == told
    assert bench.cells() == "a*"
    assert bench.saved[-1].missed == (0,)
    assert bench.is_clean
