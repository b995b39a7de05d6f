"""Saves through to tiers: when pages are free, when one is done, stores that take no puts."""

import pytest

from tests.transfer.engine_bench import (
    CANCELLED,
    DISK,
    DONE,
    EXISTED,
    FAILED,
    FAR,
    FULL,
    MEMORY,
    MISSING,
    SINGLE,
    UNREACHABLE,
    Bench,
    putting,
)
from vllm_kvpool.transfer.context import Tier
from vllm_kvpool.transfer.graph import LaneLimits
from vllm_kvpool.transfer.ops import HOST, CellOutcome, OpKind, TierHealth
from vllm_kvpool.transfer.saves import PATIENCE_LEFT_S, SAVE_STALL_S, STALL_REST_S


def test_a_save_gathers_seals_and_puts() -> None:
    bench = Bench(DISK)
    assert bench.save(1, "a b") == ["0 gather a b"]
    assert bench.engine.num_saves > 0
    assert bench.ends(0) == ["gathered 1", "1 seal a b"]
    assert bench.ends(1) == ["2 put-0 a b"]
    assert bench.slots() == "2 2 0"
    assert bench.ends(2, DONE, EXISTED) == ["saved 1: 1 done, 1 existed"]
    assert bench.engine.num_saves == 0
    assert bench.is_clean


def test_chunks_reach_a_store_in_their_order_and_a_later_save_behind_them() -> None:
    """So an engine that waits for a prompt can fetch its beginning while its end is put."""
    pairs = LaneLimits(batches=2, batch_ops=2, batch_bytes=1 << 30, budget_bytes=1 << 30)
    bench = Bench(DISK, slots=12, limits=pairs)
    bench.save(1, "a1 a2 b1 b2 c1 c2")
    bench.save(2, "d1 d2")
    puts = [line for line in bench.run() if line.startswith("put")]
    assert puts == ["put-0 a1 a2", "put-0 b1 b2", "put-0 c1 c2", "put-0 d1 d2"]


def test_a_save_without_cells_is_done_at_once() -> None:
    bench = Bench(DISK)
    assert bench.save(1, "") == ["gathered 1", "saved 1: nothing"]
    assert bench.is_clean


@pytest.mark.parametrize("kind", [OpKind.GATHER, OpKind.SEAL])
def test_a_cell_that_is_not_whole_in_its_slot_is_not_put(kind: OpKind) -> None:
    bench = Bench(DISK)
    bench.save(1, "a b")
    told = bench.run(lambda lane, key: FAILED if (lane.kind, key) == (kind, "a") else DONE)
    assert "put-0 b" in told
    assert told[-1] == "saved 1: 1 failed, 1 done"
    assert bench.is_clean


def test_pages_are_free_only_when_every_cell_is_gathered() -> None:
    bench = Bench(DISK, slots=3, reserve=1)
    assert bench.save(1, "a b c") == ["0 gather a b"]
    assert bench.ends(0) == ["1 seal a b"]
    bench.ends(1)
    assert bench.ends(2) == ["3 gather c"]
    assert bench.ends(3) == ["gathered 1", "4 seal c"]
    assert bench.run() == ["put-0 c", "saved 1: 3 done"]


def test_a_save_is_done_when_the_first_durable_tier_has_every_cell() -> None:
    bench = Bench(MEMORY, DISK, FAR, slots=6)
    bench.save(1, "a b")
    bench.ends(0)
    assert bench.ends(1) == ["2 put-0 a b", "3 put-1 a b", "4 put-2 a b"]
    assert bench.ends(2) == []  # memory does not count
    assert bench.ends(3, DONE, EXISTED) == ["saved 1: 1 done, 1 existed"]
    assert bench.engine.num_saves == 2  # copies that go on
    assert not bench.engine.idle
    assert bench.slots() == "4 2 0"  # and hold their slots
    assert bench.ends(4, FULL) == []
    assert bench.engine.num_saves == 0
    assert bench.is_clean


def test_a_cell_that_a_durable_tier_did_not_take_waits_for_the_next_one() -> None:
    bench = putting(DISK, FAR, cells="a b", slots=6)
    assert bench.ends(2, FULL, DONE) == []
    assert bench.ends(3) == ["saved 1: 2 done"]


def test_a_cell_that_no_durable_tier_took_has_the_last_failure() -> None:
    bench = Bench(MEMORY, DISK)
    bench.save(1, "a")
    told = bench.run(lambda lane, key: FULL if lane.tier == 1 else DONE)
    assert told[-1] == "saved 1: 1 full"


def test_without_a_durable_tier_a_save_is_done_when_all_have_it() -> None:
    bench = putting(MEMORY, MEMORY)
    assert bench.ends(2) == []
    assert bench.ends(3) == ["saved 1: 1 done"]


def test_a_cell_that_is_on_its_way_already_is_not_saved_again() -> None:
    bench = Bench(DISK)
    bench.save(1, "a")
    assert bench.save(2, "a b") == ["1 gather b"]
    assert bench.ends(1) == ["gathered 2", "2 seal b"]
    bench.ends(2)
    assert bench.ends(3) == ["saved 2: 1 existed, 1 done"]
    assert bench.run() == ["gathered 1", "seal a", "put-0 a", "saved 1: 1 done"]
    assert bench.is_clean


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("outcome", [DONE, FAILED])
def test_a_cell_that_is_being_fetched_is_saved_from_its_pages(
    keep: int, outcome: CellOutcome
) -> None:
    bench = Bench(DISK, keep=keep, slots=6)
    bench.load(1, "a")
    assert bench.save(2, "a") == ["1 gather a"]
    bench.ends(0, outcome)
    told = bench.run()
    assert "put-0 a" in told
    assert "saved 2: 1 done" in told
    assert bench.cells() == ("a" if keep and outcome is DONE else "")
    assert bench.is_clean


def test_what_another_rank_stores_is_kept_in_host_memory_alone() -> None:
    bench = Bench(DISK, keep=2, slots=4)
    bench.save(1, "a", stored=False)
    assert bench.run() == ["gathered 1", "saved 1: 1 done", "host +a"]
    assert bench.cells() == "a"


# Retries


def test_a_put_into_a_remote_tier_is_tried_again() -> None:
    bench = putting(FAR, cells="a b")
    assert bench.ends(2, DONE, UNREACHABLE) == ["3 put-0 b"]
    assert bench.engine.num_saves > 0
    assert bench.ends(3) == ["saved 1: 2 done"]


@pytest.mark.parametrize(
    ("tier", "outcome"), [(FAR, FULL), (FAR, MISSING), (FAR, CANCELLED), (DISK, FAILED)]
)
def test_a_put_that_would_fail_again_or_is_local_is_not_tried_again(
    tier: Tier, outcome: CellOutcome
) -> None:
    assert putting(tier).ends(2, outcome) == [f"saved 1: 1 {outcome.value}"]


# Stores that take no puts


def stuck() -> Bench:
    """Three cells are in a put that does not end; two wait for slots since time 0."""
    bench = Bench(DISK, slots=4, reserve=1)
    bench.save(1, "a b c")
    bench.ends(0)
    assert bench.ends(1) == ["2 put-0 a b c"]
    assert bench.engine.next_deadline() is None
    assert bench.save(2, "d e") == []
    assert bench.engine.next_deadline() == SAVE_STALL_S - PATIENCE_LEFT_S
    return bench


def test_a_step_that_waits_for_gathers_hears_of_a_stall_once() -> None:
    bench = stuck()
    assert bench.stalls == []
    bench.after(SAVE_STALL_S - PATIENCE_LEFT_S)
    bench.after(SAVE_STALL_S / 4)
    assert bench.stalls == [SAVE_STALL_S - PATIENCE_LEFT_S]
    bench.save(3, "f")  # its step does not wait anew
    assert len(bench.stalls) == 2
    assert bench.engine.next_deadline() == SAVE_STALL_S
    # A stall that ends sooner is none.
    bench = stuck()
    bench.ends(2)
    bench.after(SAVE_STALL_S / 4)
    assert bench.stalls == []


def test_saves_that_find_no_slot_are_dropped_once_and_then_at_once() -> None:
    bench = stuck()
    assert bench.after(SAVE_STALL_S / 2) == []
    assert bench.after(SAVE_STALL_S / 2) == ["gathered 2", "saved 2: 2 full"]
    assert bench.engine.next_deadline() is None
    assert bench.after(SAVE_STALL_S) == []
    assert bench.save(3, "f") == ["gathered 3", "saved 3: 1 full"]
    # The store takes puts again.
    assert bench.ends(2) == ["saved 1: 3 done"]
    assert bench.save(4, "g") == ["3 gather g"]


def test_for_a_while_after_a_drop_no_save_waits_however_slots_come_and_go() -> None:
    bench = stuck()
    bench.after(SAVE_STALL_S)
    assert bench.ends(2) == ["saved 1: 3 done"]  # at last; then it hangs again
    bench.save(3, "f g h")
    bench.ends(3)
    assert bench.ends(4) == ["5 put-0 f g h"]
    assert bench.save(4, "i") == ["gathered 4", "saved 4: 1 full"]
    bench.clock.advance(STALL_REST_S)
    assert bench.save(5, "j") == ["gathered 5", "saved 5: 1 full"]  # nothing has come back yet
    assert bench.ends(5) == ["saved 3: 3 done"]
    bench.save(6, "k l m")
    bench.ends(6)
    bench.ends(7)
    assert bench.save(7, "n") == []  # patience again
    assert bench.after(SAVE_STALL_S) == ["gathered 7", "saved 7: 1 full"]


def test_a_gather_that_starts_renews_the_patience() -> None:
    bench = stuck()
    bench.clock.advance(SAVE_STALL_S * 0.9)
    assert bench.ends(2, FAILED) == ["saved 1: 3 failed", "3 gather d e"]
    assert bench.after(SAVE_STALL_S) == []


def test_saves_that_still_wait_have_new_patience_once_one_of_them_starts() -> None:
    bench = Bench(DISK, slots=3, reserve=1, limits=SINGLE)
    bench.save(1, "a b")
    for batch in range(4):
        bench.ends(batch)
    assert sorted(str(batch.lane) for batch in bench.running.values()) == ["put-0", "put-0"]
    bench.save(2, "c d")
    bench.clock.advance(SAVE_STALL_S * 0.9)
    assert bench.ends(min(bench.running))[-1].endswith("gather c")
    assert bench.after(SAVE_STALL_S / 2) == []
    assert bench.ends(max(bench.running))[0].endswith("seal c")
    assert bench.after(SAVE_STALL_S / 2) == []
    assert bench.after(SAVE_STALL_S / 2) == ["gathered 2"]
    assert bench.run()[-1] == "saved 2: 1 full, 1 done"


def test_loads_go_on_while_puts_hang() -> None:
    bench = stuck()
    assert bench.load(3, "f") == ["3 get-0 f"]
    bench.ends(3)
    bench.ends(4)
    assert bench.ends(5) == ["loaded 3 to 1 done"]


def test_loads_through_the_reserve_do_not_renew_the_patience() -> None:
    bench = stuck()
    for job in range(3, 8):
        first = 3 * (job - 2)
        bench.clock.advance(SAVE_STALL_S / 4)
        bench.load(job, "f")
        for batch in range(first, first + 3):
            bench.ends(batch)
    assert bench.engine.saves.num_open == 1


def test_copies_into_nearer_tiers_do_not_take_the_slots_of_loads() -> None:
    """Tier 0 lacks every cell and takes no puts; each cell that comes from tier 1 is for it."""
    bench = Bench(DISK, FAR, slots=4, reserve=1)
    for job, key in enumerate("abcdefgh"):
        bench.load(job, key)
        told = bench.ends(max(bench.running), MISSING)
        assert told[0].endswith(f"get-1 {key}")
        assert f"loaded {job} to 1 done" in bench.run_but("put-0")


@pytest.mark.parametrize("policy", ["lru", "lrfu"])
def test_cells_that_puts_hold_do_not_keep_others_from_leaving(policy: str) -> None:
    """However many they are, and however cold."""
    count = 1000
    bench = Bench(DISK, slots=count + 4, keep=4, policy=policy)
    bench.save(1, " ".join(f"a{i}" for i in range(count)))
    bench.run_but("put-0")
    for job, group in enumerate("bcdefgh", 2):
        bench.load(job, group)
        assert f"loaded {job} to 1 done" in bench.run_but("put-0")


def test_a_save_drops_no_cell_for_a_slot_that_it_may_not_have() -> None:
    bench = Bench(DISK, slots=4, reserve=2, keep=2)
    bench.save(1, "a b")
    bench.ends(0)
    bench.ends(1)  # two slots are left for loads
    bench.load(2, "c")
    for batch in (3, 4, 5):
        bench.ends(batch)
    assert bench.save(3, "d") == []
    assert bench.after(SAVE_STALL_S / 2) == []
    assert bench.cells() == "a b c d"
    assert bench.load(4, "c") == ["6 scatter c"]


def test_cells_that_may_leave_count_as_slots_for_loads() -> None:
    bench = Bench(DISK, slots=5, reserve=2, keep=3)
    bench.load(1, "a b c")
    bench.run()
    assert bench.load(2, "d e") == ["3 get-0 d e"]
    assert bench.slots() == "0 5 0"
    assert bench.save(3, "f g") == ["host -c", "4 gather f"]
    assert bench.load(4, "h i") == ["host -b -a", "5 get-0 h i"]


# Giving up


def test_dropping_saves_ends_all_that_is_not_in_a_put() -> None:
    one = LaneLimits(1, 1, 1 << 20, 1 << 20)
    bench = putting(DISK, cells="a b c d", slots=5, reserve=0, limits=one)
    bench.ends(2)
    assert bench.ends(3) == ["6 gather d"]  # b is being sealed, a is being put
    assert bench.drop_saves() == []
    assert bench.run() == ["gathered 1", "saved 1: 3 cancelled, 1 done"]
    assert bench.is_clean
    assert bench.save(2, "a")[0].endswith("gather a")


def test_a_dropped_put_is_not_tried_again() -> None:
    bench = putting(FAR)
    assert bench.drop_saves() == []
    assert bench.ends(2, FAILED) == ["saved 1: 1 failed"]
    assert bench.is_clean


def test_dropping_saves_leaves_loads_alone() -> None:
    bench = Bench(DISK)
    bench.load(1, "a")
    assert bench.drop_saves() == []
    assert bench.run() == ["check a", "scatter a", "loaded 1 to 1 done"]


def test_a_load_that_waits_for_a_dropped_save_stops() -> None:
    bench = Bench(DISK)
    bench.save(1, "a b")
    assert bench.load(2, "a b") == []
    assert bench.drop_saves() == []
    assert bench.ends(0) == ["loaded 2 to 0 cancelled", "gathered 1", "saved 1: 2 cancelled"]
    assert bench.is_clean


# Where cells are, and are not


@pytest.mark.parametrize(
    ("tiers", "bad", "where", "missed"),
    [
        ((DISK,), "", (0,), ()),
        ((MEMORY, DISK), "", (1,), ()),  # the durable one counts
        ((MEMORY,), "", (0,), ()),
        ((DISK, FAR), "put-0 c", (0, 1), ()),
        ((DISK,), "put-0 c", (0,), (2,)),
        ((MEMORY, DISK), "put-1 c", (0, 1), ()),
        ((DISK,), "gather a", (0,), (0,)),
        ((DISK,), "put-0 a put-0 b put-0 c", (), (0, 1, 2)),
    ],
)
def test_a_save_says_in_which_tiers_it_is_and_of_which_chunks_it_is_not(
    tiers: tuple[Tier, ...], bad: str, where: tuple[int, ...], missed: tuple[int, ...]
) -> None:
    bench = Bench(*tiers, slots=8)
    bench.save(1, "a b c")
    words = bad.split()
    failing = set(zip(words[::2], words[1::2], strict=True))
    bench.run(lambda lane, key: FULL if (str(lane), key) in failing else DONE)
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


@pytest.mark.parametrize(("stored", "missed"), [(True, (0,)), (False, ())])
def test_host_memory_alone_is_no_store(stored: bool, missed: tuple[int, ...]) -> None:
    """What it is another rank's turn to store is not missed."""
    bench = Bench(DISK, keep=2, slots=4, write_back=True)
    bench.save(1, "a", stored=stored)
    bench.run()
    (done,) = bench.saved
    assert (done.tiers, done.missed) == ((), missed)


@pytest.mark.parametrize(
    ("keep", "bad", "lost"),
    [
        (0, "put-0 b", ((1, FULL),)),
        (0, "gather a put-0 b", ((0, FULL), (1, FULL))),
        (4, "put-0 b", ()),  # host memory keeps it
        (4, "gather a put-0 b", ((0, FULL),)),
    ],
)
def test_a_save_says_which_chunks_neither_a_store_nor_host_memory_has(
    keep: int, bad: str, lost: tuple[tuple[int, CellOutcome], ...]
) -> None:
    bench = Bench(DISK, slots=8, keep=keep)
    bench.save(1, "a b c")
    words = bad.split()
    failing = set(zip(words[::2], words[1::2], strict=True))
    bench.run(lambda lane, key: FULL if (str(lane), key) in failing else DONE)
    (done,) = bench.saved
    assert sorted(done.lost) == sorted(lost)


def test_what_another_rank_stores_is_not_lost_here() -> None:
    bench = Bench(DISK, slots=8)
    bench.save(1, "a", stored=False)
    bench.run(lambda lane, key: FAILED)
    (done,) = bench.saved
    assert done.lost == ()


# What the log is told of


def test_each_cell_that_a_tier_did_not_take_is_told_with_tier_and_outcome() -> None:
    bench = Bench(DISK, FAR, slots=8)
    bench.save(1, "a b c")
    bench.run(lambda lane, key: FULL if (str(lane), key) == ("put-1", "b") else DONE)
    assert bench.engine.context.drops == {(1, FULL): 1}  # although another tier has it


def test_a_save_without_a_tier_to_write_to_is_told_even_if_host_memory_keeps_it() -> None:
    for keep in (0, 4):
        bench = Bench(DISK, slots=8, keep=keep)
        bench.step(TierHealth(0, is_up=False))
        bench.save(1, "a b")
        bench.run()
        assert bench.engine.context.drops == {(HOST, UNREACHABLE): 2}


def test_saves_that_found_no_slot_are_told() -> None:
    bench = stuck()
    bench.after(SAVE_STALL_S)
    assert bench.engine.context.drops == {(HOST, FULL): 2}


def test_a_reset_and_a_host_tier_without_stores_are_no_drops() -> None:
    bench = Bench(slots=8, keep=4)
    bench.save(1, "a b")
    bench.run()
    assert not bench.engine.context.drops
    bench = Bench(DISK)
    bench.save(1, "a")
    bench.drop_saves()
    bench.run()
    assert not bench.engine.context.drops


def test_dirty_cells_that_no_tier_takes_are_told_when_their_room_is_needed() -> None:
    bench = Bench(DISK, keep=2, slots=4, write_back=True)
    bench.step(TierHealth(0, is_up=False))
    for job, key in enumerate("abcdef"):
        bench.save(job, key)
        bench.run()
    assert set(bench.engine.context.drops) == {(HOST, UNREACHABLE)}


def test_a_chunk_whose_optional_cell_is_not_stored_is_stored() -> None:
    bench = Bench(DISK)
    bench.save(1, "a a? b b?")
    bench.run(lambda lane, key: FAILED if lane.kind is OpKind.PUT and key in ("a?", "b") else DONE)
    [done] = bench.saved
    assert done.missed == (1,)
    assert [chunk for chunk, _ in done.lost] == [1]
