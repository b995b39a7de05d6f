"""A slab is one op of each lane; tiers may have a part of it; plans move before they are named."""

from collections.abc import Callable

import pytest

from tests.transfer.engine_bench import (
    CORRUPT,
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
    WIDE,
    Bench,
    load_job,
    save_job,
    words,
)
from vllm_kvpool.transfer.context import Tier
from vllm_kvpool.transfer.graph import Batch, LaneLimits
from vllm_kvpool.transfer.ops import (
    CellOutcome,
    DropSaves,
    LaneName,
    LoadJob,
    OpKind,
    SaveJob,
    TimePassed,
)
from vllm_kvpool.transfer.saves import SAVE_STALL_S

CELLS = "a0 a1 b0 b1"


def bench(*tiers: Tier, slots: int = 16, keep: int = 8, limits: LaneLimits = WIDE) -> Bench:
    return Bench(*tiers, slots=slots, keep=keep, limits=limits)


def filled(*tiers: Tier) -> Bench:
    made = bench(*tiers)
    made.save(9, CELLS)
    made.run()
    return made


def sizes(batch: Batch) -> list[int]:
    return [op.size for op in batch.ops]


def in_two(job: LoadJob) -> LoadJob:
    """The first slab, and another that is named later."""
    return job._replace(slabs=job.slabs[:1], rest=iter([job.slabs[1:]]))


def answers(**lanes: dict[str, CellOutcome]) -> Callable[[LaneName, str], CellOutcome]:
    """Outcomes of cells by lane, such as `get_0`; the others are done."""
    return lambda lane, key: lanes.get(str(lane).replace("-", "_"), {}).get(key, DONE)


def test_slab_in_host_memory_is_one_scatter() -> None:
    rig = filled()
    assert words(rig.load(1, CELLS)) == [f"scatter {CELLS}"]
    assert sizes(rig.running[max(rig.running)]) == [2, 2]
    assert rig.run() == ["loaded 1 to 2 done"]


@pytest.mark.parametrize("lane", ["gather", "seal", "put-0"])
def test_slab_of_a_save_is_one_op_of_each_lane(lane: str) -> None:
    rig = bench(DISK)
    rig.save(1, CELLS)
    rig.run_but(lane)
    assert sizes(rig.running[max(rig.running)]) == [2, 2]
    assert "saved 1: 4 done" in rig.run()


@pytest.mark.parametrize("lane", ["get-0", "check", "scatter"])
def test_slab_of_a_fetch_is_one_op_of_each_lane(lane: str) -> None:
    rig = bench(DISK, keep=0)
    rig.load(1, CELLS)
    rig.run_but(lane)
    assert sizes(rig.running[max(rig.running)]) == [2, 2]
    assert rig.run()[-1] == "loaded 1 to 2 done"


def test_gather_waits_until_all_cells_have_a_slot() -> None:
    rig = bench(DISK, slots=9, keep=0)
    rig.save(1, f"{CELLS} c0 c1 d0 d1")
    assert sizes(rig.running[0]) == [2, 2, 2, 2]
    assert rig.slots() == "1 8 0"
    assert rig.save(2, "e0 e1") == []
    assert "saved 2: 2 done" in rig.run()
    assert rig.is_clean


def two_saves() -> Bench:
    """The second needs four slots, of which puts of the first, which end one by one, free two."""
    rig = Bench(DISK, slots=9, lanes={OpKind.PUT: SINGLE})
    rig.save(1, f"{CELLS} c0 c1 d0 d1")
    rig.ends(0)
    rig.ends(1)
    assert rig.save(2, "e0 e1 e2 e3") == []
    return rig


def test_gather_that_waits_while_slots_become_free_is_not_dropped() -> None:
    rig = two_saves()
    rig.clock.advance(SAVE_STALL_S * 0.9)
    rig.ends(min(rig.running))
    assert rig.after(SAVE_STALL_S * 0.9) == []
    assert "gather e0 e1 e2 e3" in words(rig.ends(min(rig.running)))
    assert "saved 2: 4 done" in rig.run()
    assert rig.is_clean


def test_gather_that_gets_no_further_slot_is_dropped() -> None:
    rig = two_saves()
    rig.ends(min(rig.running))
    assert rig.after(SAVE_STALL_S) == ["gathered 2", "saved 2: 4 full"]
    rig.run()
    assert rig.is_clean


def test_gather_whose_slots_loads_take_and_give_back_is_dropped_in_time() -> None:
    """Room that comes and goes is no progress."""
    rig, told = two_saves(), list[str]()
    rig.load(3, "x0")
    for _ in range(3):
        rig.clock.advance(SAVE_STALL_S * 0.4)
        for number, batch in list(rig.running.items()):
            if batch.lane.kind is not OpKind.PUT:
                told += rig.ends(number)
    assert "loaded 3 to 1 done" in told
    assert "saved 2: 4 full" in [*told, *rig.after(0.0)]
    rig.run()
    assert rig.is_clean


@pytest.mark.parametrize("kind", [OpKind.GATHER, OpKind.SEAL])
def test_slab_that_one_op_moves_fails_whole(kind: OpKind) -> None:
    rig = bench(DISK)
    rig.save(1, "a0 a1")
    told = rig.run(lambda lane, key: FAILED if lane.kind is kind else DONE)
    assert "saved 1: 2 failed" in told
    assert rig.is_clean


def test_slab_whose_seal_fails_stays_in_host_memory() -> None:
    """Its payload is whole; the header alone is not."""
    rig = bench(DISK)
    rig.save(1, "a0 a1")
    rig.run(lambda lane, key: FAILED if lane.kind is OpKind.SEAL else DONE)
    assert words(rig.load(2, "a0 a1")) == ["scatter a0 a1"]


def test_prefetch_brings_no_more_cells_than_the_host_tier_has_room_for() -> None:
    rig = bench(DISK, keep=3)
    assert words(rig.prefetch(1, CELLS)) == ["get-0 a0 a1"]
    rig.run()


# Tiers that have a part of a slab


def test_cells_that_a_tier_lacks_are_asked_of_the_next_and_the_others_checked() -> None:
    rig = bench(MEMORY, DISK, keep=0)
    rig.load(1, "a0 a1 a2")
    told = rig.run(answers(get_0={"a1": MISSING}))
    assert told[:3] == ["check a0 a2", "get-1 a1", "check a1"]
    assert "scatter a0 a1 a2" in told
    assert "loaded 1 to 1 done" in told
    assert rig.is_clean


def test_bad_cell_is_removed_and_asked_of_the_next_tier() -> None:
    rig = bench(MEMORY, DISK, keep=0)
    rig.load(1, "a0 a1 a2")
    told = rig.run(answers(check={"a1": CORRUPT}))
    assert "remove-0 a1" in told
    assert "get-1 a1" in told
    assert rig.is_clean


def test_cells_that_were_missing_and_bad_are_asked_for_together() -> None:
    rig = bench(MEMORY, DISK, keep=0)
    rig.load(1, "a0 a1 a2")
    told: list[str] = []
    for number, outcomes in ((0, (DONE, MISSING, DONE)), (1, (DONE, CORRUPT))):
        told = rig.ends(number, *outcomes)
    assert {line for line in words(told) if "get" in line} == {"get-1 a1 a2"}
    assert "loaded 1 to 1 done" in rig.run()
    assert rig.is_clean


def test_cell_that_no_tier_has_ends_the_load_and_frees_the_slots() -> None:
    rig = bench(MEMORY, DISK, keep=0)
    rig.load(1, "a0 a1")
    told = rig.run(answers(get_0={"a1": MISSING}, get_1={"a1": MISSING}))
    assert told[-1] == "loaded 1 to 0 missing"
    assert rig.is_clean


def test_part_of_a_slab_is_not_checked_where_no_tier_is_left_for_the_rest() -> None:
    rig = bench(DISK, keep=0)
    rig.load(1, "a0 a1")
    assert rig.run(answers(get_0={"a1": MISSING})) == ["loaded 1 to 0 missing"]
    assert rig.is_clean


def two_fetches() -> Bench:
    """Two slabs of three cells in four slots: the second waits for slots of the first."""
    one = LaneLimits(batches=1, batch_ops=3, batch_bytes=1 << 30, budget_bytes=1 << 30)
    rig = bench(MEMORY, DISK, slots=4, keep=0, limits=one)
    rig.load(1, "a0 a1 a2")
    rig.load(2, "b0 b1 b2")
    return rig


def test_fetches_that_wait_for_slots_of_each_other_end() -> None:
    rig = two_fetches()
    lacks = {f"{chunk}1": MISSING for chunk in "ab"}
    told = rig.run(answers(get_0=lacks))
    assert {"loaded 1 to 1 done", "loaded 2 to 1 done"} <= set(told)
    assert rig.is_clean


def test_fetch_that_keeps_slots_goes_before_one_that_waits_for_them_there() -> None:
    """When a tier goes down, the fetch without slots moves to the next tier's lane, before the
    fetch whose first cells are still being checked."""
    rig = two_fetches()
    assert words(rig.ends(0, DONE, MISSING, DONE)) == ["check a0 a2"]
    assert rig.health(0, up=False) == []
    assert words(rig.ends(1)) == ["get-1 a1"]
    assert {"loaded 1 to 1 done", "loaded 2 to 1 done"} <= set(rig.run())
    assert rig.is_clean


def test_fetch_of_which_a_call_hangs_is_asked_for_whole_in_new_slots() -> None:
    rig = bench(MEMORY, DISK, FAR, keep=0)
    rig.load(1, "a0 a1")
    rig.ends(0, DONE, MISSING)
    rig.ends(1)
    assert words(rig.hangs(2)) == ["get-2 a0 a1"]
    assert rig.slots() == "12 2 2"
    assert "loaded 1 to 1 done" in rig.run()
    rig.late(2)
    assert rig.is_clean


def test_tier_that_fails_once_is_asked_for_the_rest_of_a_slab() -> None:
    rig = bench(FAR, keep=0)
    rig.load(1, "a0 a1")
    assert words(rig.ends(0, DONE, UNREACHABLE)) == ["get-0 a0 a1"]
    assert "loaded 1 to 1 done" in rig.run()


def test_tier_that_lacks_a_slab_after_a_failed_call_is_not_asked_again() -> None:
    rig = bench(FAR, DISK, keep=0)
    rig.load(1, "a0 a1")
    assert words(rig.ends(0, UNREACHABLE)) == ["get-0 a0 a1"]
    assert words(rig.ends(1, MISSING)) == ["get-1 a0 a1"]
    assert "loaded 1 to 1 done" in rig.run()


def test_hits_are_counted_by_cell_and_tier() -> None:
    rig = bench(MEMORY, DISK, keep=0)
    rig.load(1, "a0 a1 a2")
    rig.run(answers(get_0={"a1": MISSING}))
    counts = [rig.counted("kvpool_hit_cells", tier=tier) for tier in ("memory", "disk")]
    assert counts == [2, 1]


def test_put_of_a_part_of_a_slab_is_no_saved_chunk() -> None:
    rig = bench(DISK, keep=0)
    rig.save(1, "a0 a1")
    assert "saved 1: 1 done, 1 full" in rig.run(answers(put_0={"a1": FULL}))
    assert rig.saved[0].missed == (0,)
    assert rig.is_clean


def test_put_of_cells_some_of_which_exist_is_done() -> None:
    rig = bench(DISK, keep=0)
    rig.save(1, "a0 a1")
    assert "saved 1: 1 existed, 1 done" in rig.run(answers(put_0={"a0": EXISTED}))
    assert rig.saved[0].missed == ()


# Plans that are named part by part


def test_the_first_slabs_move_before_the_others_are_named() -> None:
    rig = filled()
    assert words(rig.step(in_two(load_job(1, CELLS)))) == ["scatter a0 a1"]
    assert words(rig.step(TimePassed())) == ["scatter b0 b1"]
    assert rig.step(TimePassed()) == []
    assert rig.run() == ["loaded 1 to 2 done"]


def test_a_load_that_misses_names_no_later_cells() -> None:
    rig = filled()
    rig.step(in_two(load_job(1, "x0 x1 b0 b1")))
    assert rig.run() == []
    assert rig.step(TimePassed()) == []
    assert rig.engine.idle


def test_a_load_that_is_cancelled_names_no_later_cells() -> None:
    rig = filled()
    rig.step(in_two(load_job(1, CELLS)))
    rig.cancel(1)
    assert rig.run() == ["loaded 1 to 0 cancelled"]
    assert rig.step(TimePassed()) == []


def test_a_stream_that_ends_early_loads_cells_that_are_not_named_yet() -> None:
    """The last chunks never come; those before them are stored, and count as loaded."""
    rig = filled()
    job = load_job(1, f"{CELLS} c0 c1", landed=0)
    rig.step(job._replace(slabs=job.slabs[:1], rest=iter([job.slabs[1:2], job.slabs[2:]])))
    assert words(rig.land(1, 2, final=True)) == [f"scatter {CELLS}"]
    assert rig.run() == []
    assert rig.step(TimePassed()) == ["loaded 1 to 2 missing"]


def test_a_cell_that_has_just_failed_is_not_found_by_cells_named_next() -> None:
    """Another load still waits for it: its entry has no bytes, and perhaps no slot."""
    rig = bench(DISK, slots=2, keep=0)
    assert words(rig.load(1, "a0 b0 c0")) == ["get-0 a0 b0"]
    named_later = load_job(2, "c0")
    assert rig.step(named_later._replace(slabs=(), rest=iter([named_later.slabs]))) == []
    assert rig.health(0, up=False) == ["loaded 2 to 0 unreachable"]


def test_nothing_is_fetched_after_a_reset_for_cells_that_are_named_next() -> None:
    rig = bench(DISK, keep=0)
    job = load_job(1, "a0 b0")
    rig.step(job._replace(slabs=(), rest=iter([job.slabs])))
    assert rig.drop_saves(forget=True) == ["loaded 1 to 0 cancelled"]
    assert rig.engine.idle


def test_a_save_is_gathered_when_all_its_cells_are_named() -> None:
    rig = bench()
    job = save_job(1, CELLS)
    rig.step(SaveJob(job.plan, job.slabs[:1], rest=iter([job.slabs[1:]])))
    assert "gathered 1" not in rig.ends(0)
    assert words(rig.step(TimePassed())) == []
    assert rig.step(TimePassed()) == []
    assert rig.run() == ["gathered 1", "saved 1: 4 done", "host +b"]


def test_a_dropped_save_reports_the_cells_that_were_not_named() -> None:
    rig = bench()
    job = save_job(1, CELLS)
    rig.step(SaveJob(job.plan, job.slabs[:1], rest=iter([job.slabs[1:]])))
    rig.step(DropSaves())
    rig.step(TimePassed())
    rig.step(TimePassed())
    assert "saved 1: 4 cancelled" in rig.run()
    assert rig.is_clean


def test_scatters_are_in_the_order_of_chunks() -> None:
    """A load that stops gives up those of later chunks, whatever waits for a fetch."""
    rig = bench(DISK)
    rig.save(9, "a0 a1 c0 c1")
    rig.run()
    rig.load(1, "a0 a1 b0 b1 c0 c1")
    load = rig.engine.loads._loads[1]  # type: ignore[index]
    assert [scatter.chunk for scatter in load.scatters] == [0, 1, 2]


def test_optional_cells_are_an_op_of_their_own() -> None:
    """They are cleared where they are late, and the chunk's other cells are not."""
    rig = bench()
    rig.save(9, "a0 a1 a? b?")
    rig.run()
    rig.load(1, "a0 a1 a? b?")
    assert sizes(rig.running[max(rig.running)]) == [2, 1, 1]
    assert rig.run() == ["loaded 1 to 2 done"]
