"""A chunk's cells in host memory are one op of a copy; a plan moves before it is named whole."""

from tests.transfer.engine_bench import (
    DISK,
    FAILED,
    SINGLE,
    Bench,
    load_job,
    save_job,
    words,
)
from vllm_kvpool.transfer.graph import Batch
from vllm_kvpool.transfer.ops import DropSaves, LoadJob, OpKind, SaveJob, TimePassed
from vllm_kvpool.transfer.saves import SAVE_STALL_S

CELLS = "a0 a1 b0 b1"


def bench(*tiers: object, slots: int = 16, keep: int = 8) -> Bench:
    """A gather has up to a quarter of the slots of saves: here three, so both cells of a chunk."""
    return Bench(*tiers, slots=slots, keep=keep, cells_per_chunk=2)  # type: ignore[arg-type]


def filled(*tiers: object) -> Bench:
    made = bench(*tiers)
    made.save(9, CELLS)
    made.run()
    return made


def sizes(batch: Batch) -> list[int]:
    return [op.size for op in batch.ops]


def in_two(job: LoadJob) -> LoadJob:
    """The first two cells, and two more that are named later."""
    return job._replace(cells=job.cells[:2], rest=iter([job.cells[2:]]))


def test_cells_of_a_chunk_that_are_here_are_one_scatter() -> None:
    rig = filled()
    assert words(rig.load(1, CELLS)) == [f"scatter {CELLS}"]
    assert sizes(rig.running[max(rig.running)]) == [2, 2]
    assert rig.run() == ["loaded 1 to 2 done"]


def test_cells_of_a_chunk_are_one_gather() -> None:
    rig = bench()
    assert words(rig.save(1, CELLS)) == [f"gather {CELLS}"]
    assert sizes(rig.running[0]) == [2, 2]
    assert "saved 1: 4 done" in rig.run()


def test_a_cell_that_is_fetched_is_scattered_by_itself() -> None:
    """It waits for no other cell of its chunk."""
    rig = bench(DISK, keep=0)
    rig.load(1, "a0 a1")
    rig.run_but("scatter")
    assert sizes(rig.running[max(rig.running)]) == [1, 1]


def test_a_gather_waits_until_all_its_cells_have_a_slot() -> None:
    rig = bench(DISK, slots=9, keep=0)
    rig.save(1, "a0 a1 b0 b1 c0 c1 d0 d1")
    assert sizes(rig.running[0]) == [2, 2, 2, 2]
    assert rig.slots() == "1 8 0"
    assert rig.save(2, "e0 e1") == []
    assert "saved 2: 2 done" in rig.run()
    assert rig.is_clean


def test_a_gather_that_gets_its_slots_one_by_one_is_not_dropped() -> None:
    """A store takes puts slowly; each frees a slot, and none of them all that the gather needs."""
    rig = Bench(DISK, slots=9, cells_per_chunk=2, lanes={OpKind.PUT: SINGLE})
    rig.save(1, "a0 a1 b0 b1 c0 c1 d0 d1")
    rig.ends(0)
    rig.ends(1)
    assert rig.save(2, "e0 e1") == []
    rig.clock.advance(SAVE_STALL_S * 0.9)
    rig.ends(min(rig.running))
    assert rig.after(SAVE_STALL_S * 0.9) == []
    assert "gather e0 e1" in words(rig.ends(min(rig.running)))
    assert "saved 2: 2 done" in rig.run()
    assert rig.is_clean


def test_a_gather_that_gets_no_further_slot_is_dropped() -> None:
    rig = Bench(DISK, slots=9, cells_per_chunk=2, lanes={OpKind.PUT: SINGLE})
    rig.save(1, "a0 a1 b0 b1 c0 c1 d0 d1")
    rig.ends(0)
    rig.ends(1)
    rig.save(2, "e0 e1")
    rig.ends(min(rig.running))
    assert rig.after(SAVE_STALL_S) == ["gathered 2", "saved 2: 2 full"]
    rig.run()
    assert rig.is_clean


def test_a_gather_has_a_quarter_of_the_slots_at_most() -> None:
    """Else it would wait for slots that are never free together."""
    rig = bench(DISK, slots=5, keep=0)
    rig.save(1, CELLS)
    assert sizes(rig.running[0]) == [1, 1, 1, 1]
    assert "saved 1: 4 done" in rig.run()


def test_cells_that_one_gather_moves_fail_together() -> None:
    rig = bench()
    rig.save(1, "a0 a1")
    assert "saved 1: 2 failed" in rig.ends(0, FAILED)
    assert rig.is_clean


def test_cells_of_a_gather_are_sealed_by_one_op_and_put_one_by_one() -> None:
    rig = bench(DISK)
    rig.save(1, CELLS)
    assert f"seal {CELLS}" in words(rig.ends(0))
    assert sizes(rig.running[1]) == [2, 2]
    rig.ends(1)
    assert sizes(rig.running[2]) == [1, 1, 1, 1]
    assert "saved 1: 4 done" in rig.run()


def test_cells_that_one_op_seals_fail_together() -> None:
    rig = bench(DISK)
    rig.save(1, "a0 a1")
    rig.ends(0)
    assert "saved 1: 2 failed" in rig.ends(1, FAILED)
    assert rig.is_clean


def test_the_first_cells_move_before_the_others_are_named() -> None:
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
    rig.step(job._replace(cells=job.cells[:2], rest=iter([job.cells[2:4], job.cells[4:]])))
    assert words(rig.land(1, 2, final=True)) == [f"scatter {CELLS}"]
    assert rig.run() == []
    assert rig.step(TimePassed()) == ["loaded 1 to 2 missing"]


def test_a_cell_that_has_just_failed_is_not_found_by_cells_named_next() -> None:
    """Another load still waits for it: its entry has no bytes, and perhaps no slot."""
    rig = bench(DISK, slots=2, keep=0)
    assert words(rig.load(1, "a0 b0 c0")) == ["get-0 a0 b0"]
    named_later = load_job(2, "c0")
    assert rig.step(named_later._replace(cells=(), rest=iter([named_later.cells]))) == []
    assert rig.health(0, up=False) == ["loaded 2 to 0 unreachable"]


def test_nothing_is_fetched_after_a_reset_for_cells_that_are_named_next() -> None:
    rig = bench(DISK, keep=0)
    job = load_job(1, "a0 b0")
    rig.step(job._replace(cells=(), rest=iter([job.cells])))
    assert rig.drop_saves(forget=True) == ["loaded 1 to 0 cancelled"]
    assert rig.engine.idle


def test_a_save_is_gathered_when_all_its_cells_are_named() -> None:
    rig = bench()
    job = save_job(1, CELLS)
    rig.step(SaveJob(job.plan, job.cells[:2], rest=iter([job.cells[2:]])))
    assert "gathered 1" not in rig.ends(0)
    assert words(rig.step(TimePassed())) == []
    assert rig.step(TimePassed()) == []
    assert rig.run() == ["gathered 1", "saved 1: 4 done", "host +b"]


def test_a_dropped_save_reports_the_cells_that_were_not_named() -> None:
    rig = bench()
    job = save_job(1, CELLS)
    rig.step(SaveJob(job.plan, job.cells[:2], rest=iter([job.cells[2:]])))
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
    assert [scatter.chunk for scatter in load.scatters] == [0, 1, 1, 2]


def test_optional_cells_are_an_op_of_their_own() -> None:
    """They are cleared where they are late, and the chunk's other cells are not."""
    rig = bench()
    rig.save(9, "a0 a1 a? b?")
    rig.run()
    rig.load(1, "a0 a1 a? b?")
    assert sizes(rig.running[max(rig.running)]) == [2, 1, 1]
    assert rig.run() == ["loaded 1 to 2 done"]
