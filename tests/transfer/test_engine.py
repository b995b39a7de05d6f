"""The transfer engine: events in, actions out, compared whole; and any order of anything."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_kvpool.keys import HeadPart, LayerSpan
from vllm_kvpool.layout.topology import LocalCell
from vllm_kvpool.staging.slots import Slot, SlotPool
from vllm_kvpool.testing.fakes import FakeClock
from vllm_kvpool.transfer.engine import (
    MAX_WAITING_REMOVES,
    SAVE_STALL_S,
    Action,
    CancelRequest,
    DropSaves,
    Engine,
    Event,
    Limits,
    Start,
    Tick,
)
from vllm_kvpool.transfer.ops import (
    CellOutcome,
    CellTask,
    JobId,
    JobPages,
    LoadDone,
    LoadJob,
    Op,
    OpCell,
    OpDone,
    OpId,
    OpKind,
    SaveDone,
    SaveGathered,
    SaveJob,
)

GET, SCATTER, GATHER = OpKind.GET, OpKind.SCATTER, OpKind.GATHER
PUT, REMOVE = OpKind.PUT, OpKind.REMOVE
DONE, EXISTED, MISSING = CellOutcome.DONE, CellOutcome.EXISTED, CellOutcome.MISSING
CORRUPT, FULL, FAILED = CellOutcome.CORRUPT, CellOutcome.FULL, CellOutcome.FAILED
TIMED_OUT, CANCELLED = CellOutcome.TIMED_OUT, CellOutcome.CANCELLED

CELL = LocalCell(HeadPart(0), LayerSpan(0, 1), 0, 1, 0, 1)
PAGES = JobPages((), 0, 0, 0)
CELL_BYTES = 100
TIMEOUT_S = 10.0
WIDE = Limits(dict.fromkeys(OpKind, 2), op_bytes=1 << 20, op_cells=64)


def task(job: int, chunk: int, number: int = 0) -> CellTask:
    return CellTask(f"{job}/{chunk}/{number}", "group", chunk, CELL, PAGES, CELL_BYTES)


def tasks(job: int, chunks: range, cells: int) -> tuple[CellTask, ...]:
    return tuple(task(job, chunk, number) for chunk in chunks for number in range(cells))


def load(job: int, chunks: range, cells: int = 1, timeout_s: float = TIMEOUT_S) -> LoadJob:
    every = tasks(job, chunks, cells)
    return LoadJob(JobId(job), f"r{job}", chunks.start, chunks.stop, every, timeout_s)


def save(job: int, chunks: range, cells: int = 1) -> SaveJob:
    return SaveJob(JobId(job), f"r{job}", tasks(job, chunks, cells))


def start(op_id: int, kind: OpKind, *cells: tuple[int, int, int | None]) -> Start:
    """The start of an op of cells (job, chunk, slot)."""
    return Start(
        Op(
            OpId(op_id),
            kind,
            tuple(
                OpCell(task(job, chunk), JobId(job), None if slot is None else Slot(slot))
                for job, chunk, slot in cells
            ),
        )
    )


def done(op_id: int, *outcomes: CellOutcome) -> OpDone:
    return OpDone(OpId(op_id), outcomes)


def loaded(job: int, ok_stop_chunk: int, reason: CellOutcome = DONE) -> LoadDone:
    return LoadDone(JobId(job), f"r{job}", ok_stop_chunk, reason)


def gathered(job: int) -> SaveGathered:
    return SaveGathered(JobId(job), f"r{job}")


def saved(job: int, *outcomes: tuple[CellOutcome, int]) -> SaveDone:
    return SaveDone(JobId(job), f"r{job}", outcomes)


class Bench:
    """An engine whose invariants are checked after every step."""

    def __init__(self, slots: int = 4, reserve: int = 1, limits: Limits = WIDE) -> None:
        self.engine = Engine(SlotPool(slots, reserve), limits)
        self.clock = FakeClock()

    def step(self, event: Event) -> list[Action]:
        actions = self.engine.step(event, self.clock())
        self.engine.check()
        return actions

    def after(self, seconds: float) -> list[Action]:
        self.clock.advance(seconds)
        return self.step(Tick())

    def is_clean(self) -> bool:
        slots = self.engine.slots
        return self.engine.idle and slots.num_free == slots.count


# Loads


def test_a_load_gets_then_scatters() -> None:
    bench = Bench()
    assert bench.step(load(1, range(3, 5))) == [start(0, GET, (1, 3, 0), (1, 4, 1))]
    assert not bench.engine.idle
    assert bench.step(done(0, DONE, DONE)) == [start(1, SCATTER, (1, 3, 0), (1, 4, 1))]
    assert bench.step(done(1, DONE, DONE)) == [loaded(1, 5)]
    assert bench.is_clean()


def test_a_load_of_no_cells_is_done_at_once() -> None:
    bench = Bench()
    assert bench.step(load(1, range(2, 4), cells=0)) == [loaded(1, 4)]
    assert bench.is_clean()


def test_a_load_stops_at_the_first_chunk_it_cannot_have() -> None:
    bench = Bench()
    bench.step(load(1, range(4)))
    assert bench.step(done(0, DONE, MISSING, DONE, FAILED)) == [start(1, SCATTER, (1, 0, 0))]
    assert bench.engine.slots.num_free == 3
    assert bench.step(done(1, DONE)) == [loaded(1, 1, MISSING)]
    assert bench.is_clean()


def test_a_chunk_is_whole_or_not_loaded() -> None:
    bench = Bench(slots=8)
    [get] = bench.step(load(1, range(2), cells=2))
    assert isinstance(get, Start)
    [scatter] = bench.step(done(0, DONE, DONE, DONE, MISSING))
    assert isinstance(scatter, Start)
    assert [cell.task for cell in scatter.op.cells] == [task(1, 0, 0), task(1, 0, 1)]
    assert bench.step(done(1, DONE, DONE)) == [loaded(1, 1, MISSING)]


def test_an_earlier_failure_moves_the_stop_back() -> None:
    bench = Bench(limits=Limits(dict.fromkeys(OpKind, 2), 1 << 20, op_cells=1))
    assert bench.step(load(1, range(3))) == [start(0, GET, (1, 0, 0)), start(1, GET, (1, 1, 1))]
    assert bench.step(done(1, MISSING)) == []  # chunk 2 is not asked for any more
    assert bench.step(done(0, CellOutcome.UNREACHABLE)) == [
        loaded(1, 0, CellOutcome.UNREACHABLE),
    ]
    assert bench.is_clean()


def test_what_is_scattered_before_the_stop_counts() -> None:
    bench = Bench(limits=Limits(dict.fromkeys(OpKind, 2), 1 << 20, op_cells=1))
    bench.step(load(1, range(2)))
    assert bench.step(done(0, DONE)) == [start(2, SCATTER, (1, 0, 0))]
    assert bench.step(done(2, DONE)) == []
    assert bench.step(done(1, MISSING)) == [loaded(1, 1, MISSING)]


def test_a_failed_scatter_stops_the_load_there() -> None:
    bench = Bench()
    bench.step(load(1, range(3)))
    bench.step(done(0, DONE, DONE, DONE))
    assert bench.step(done(1, DONE, FAILED, DONE)) == [loaded(1, 1, FAILED)]
    assert bench.is_clean()


def test_a_corrupt_cell_is_removed_from_the_store() -> None:
    bench = Bench()
    bench.step(load(1, range(3)))
    assert bench.step(done(0, DONE, CORRUPT, CORRUPT)) == [
        start(1, SCATTER, (1, 0, 0)),
        start(2, REMOVE, (1, 1, None), (1, 2, None)),
    ]
    assert bench.step(done(1, DONE)) == [loaded(1, 1, CORRUPT)]
    assert not bench.engine.idle
    assert bench.step(done(2, FAILED, FAILED)) == []
    assert bench.is_clean()


def test_the_removes_that_wait_are_bounded() -> None:
    count = MAX_WAITING_REMOVES + 10
    limits = Limits(dict.fromkeys(OpKind, 1), 1 << 40, op_cells=count)
    bench = Bench(slots=count, reserve=0, limits=limits)
    bench.step(load(1, range(count)))
    _, remove = bench.step(done(0, *[CORRUPT] * count))
    assert isinstance(remove, Start)
    assert len(remove.op.cells) == MAX_WAITING_REMOVES


def test_a_late_get_leaves_its_slot_in_quarantine_until_it_ends() -> None:
    bench = Bench()
    bench.step(load(1, range(2)))
    assert bench.engine.next_deadline() == TIMEOUT_S
    assert bench.after(TIMEOUT_S - 1) == []
    assert bench.after(1) == [loaded(1, 0, TIMED_OUT)]
    assert bench.engine.next_deadline() is None
    slots = bench.engine.slots
    assert (slots.num_free, slots.num_held, slots.num_quarantined) == (2, 0, 2)
    assert not bench.engine.idle
    # Another load gets other slots.
    assert bench.step(load(2, range(2))) == [start(1, GET, (2, 0, 2), (2, 1, 3))]
    assert bench.step(done(0, DONE, CORRUPT)) == [start(2, REMOVE, (1, 1, None))]
    assert (slots.num_free, slots.num_held, slots.num_quarantined) == (2, 2, 0)


def test_a_late_load_is_reported_only_after_its_scatter() -> None:
    bench = Bench(limits=Limits(dict.fromkeys(OpKind, 2), 1 << 20, op_cells=1))
    bench.step(load(1, range(2)))
    assert bench.step(done(0, DONE)) == [start(2, SCATTER, (1, 0, 0))]
    assert bench.after(TIMEOUT_S) == []
    assert bench.engine.slots.num_quarantined == 1
    assert bench.engine.next_deadline() is None  # else the thread would spin
    assert bench.step(done(2, DONE)) == [loaded(1, 0, TIMED_OUT)]
    assert bench.step(done(1, DONE)) == []
    assert bench.is_clean()


def test_a_late_load_keeps_the_chunks_it_has() -> None:
    bench = Bench(limits=Limits(dict.fromkeys(OpKind, 2), 1 << 20, op_cells=1))
    bench.step(load(1, range(3)))
    bench.step(done(0, DONE))
    bench.step(done(2, DONE))
    assert bench.after(TIMEOUT_S) == [loaded(1, 1, TIMED_OUT)]


def test_a_get_that_ends_at_its_deadline_may_not_scatter() -> None:
    bench = Bench()
    bench.step(load(1, range(1)))
    bench.clock.advance(TIMEOUT_S)
    assert bench.step(done(0, DONE)) == [loaded(1, 0, TIMED_OUT)]
    assert bench.is_clean()


def test_a_load_that_waits_for_slots_also_times_out() -> None:
    bench = Bench(slots=2, reserve=0)
    bench.step(save(1, range(2)))
    assert bench.step(load(2, range(1))) == []
    assert bench.after(TIMEOUT_S) == [loaded(2, 0, TIMED_OUT)]
    assert bench.step(done(0, DONE, DONE)) == [gathered(1), start(1, PUT, (1, 0, 0), (1, 1, 1))]
    assert bench.step(done(1, DONE, DONE)) == [saved(1, (DONE, 2))]
    assert bench.is_clean()


def test_a_cancelled_load_is_reported_at_once_unless_it_scatters() -> None:
    bench = Bench()
    bench.step(load(1, range(2)))
    assert bench.step(CancelRequest("r2")) == []
    assert bench.step(CancelRequest("r1")) == [loaded(1, 0, CANCELLED)]
    assert bench.step(CancelRequest("r1")) == []
    assert bench.engine.slots.num_free == 2
    assert bench.step(done(0, DONE, DONE)) == []
    assert bench.is_clean()


def test_a_cancelled_load_is_reported_after_its_scatter() -> None:
    bench = Bench(limits=Limits(dict.fromkeys(OpKind, 2), 1 << 20, op_cells=1))
    bench.step(load(1, range(3)))
    assert bench.step(done(0, DONE)) == [start(2, SCATTER, (1, 0, 0)), start(3, GET, (1, 2, 2))]
    assert bench.step(done(1, DONE)) == [start(4, SCATTER, (1, 1, 1))]
    assert bench.step(CancelRequest("r1")) == []
    assert bench.step(done(3, DONE)) == []
    assert bench.step(done(2, DONE)) == []
    assert bench.step(done(4, DONE)) == [loaded(1, 0, CANCELLED)]
    assert bench.is_clean()


def test_cancelling_does_not_touch_the_requests_saves() -> None:
    bench = Bench()
    bench.step(save(1, range(1)))
    assert bench.step(CancelRequest("r1")) == []
    assert bench.step(done(0, DONE)) == [gathered(1), start(1, PUT, (1, 0, 0))]


# Saves


def test_a_save_gathers_then_puts() -> None:
    bench = Bench()
    assert bench.step(save(1, range(2))) == [start(0, GATHER, (1, 0, 0), (1, 1, 1))]
    assert bench.engine.num_saves == 1
    assert bench.step(done(0, DONE, DONE)) == [gathered(1), start(1, PUT, (1, 0, 0), (1, 1, 1))]
    assert bench.step(done(1, DONE, EXISTED)) == [saved(1, (DONE, 1), (EXISTED, 1))]
    assert bench.engine.num_saves == 0
    assert bench.is_clean()


def test_a_save_without_cells_is_done_at_once() -> None:
    bench = Bench()
    assert bench.step(save(1, range(0))) == [gathered(1), saved(1)]


def test_a_failed_gather_is_not_put() -> None:
    bench = Bench()
    bench.step(save(1, range(2)))
    assert bench.step(done(0, FAILED, DONE)) == [gathered(1), start(1, PUT, (1, 1, 1))]
    assert bench.step(done(1, FULL)) == [saved(1, (FAILED, 1), (FULL, 1))]
    assert bench.is_clean()


def test_pages_are_free_only_when_every_cell_is_gathered() -> None:
    bench = Bench(slots=3, reserve=1)
    assert bench.step(save(1, range(3))) == [start(0, GATHER, (1, 0, 0), (1, 1, 1))]
    assert bench.step(done(0, DONE, DONE)) == [start(1, PUT, (1, 0, 0), (1, 1, 1))]
    assert bench.step(done(1, DONE, DONE)) == [start(2, GATHER, (1, 2, 1))]
    assert bench.step(done(2, DONE)) == [gathered(1), start(3, PUT, (1, 2, 1))]
    assert bench.step(done(3, DONE)) == [saved(1, (DONE, 3))]


def test_loads_go_first_and_have_a_reserve() -> None:
    bench = Bench(slots=3, reserve=1)
    assert bench.step(save(1, range(4))) == [start(0, GATHER, (1, 0, 0), (1, 1, 1))]
    assert bench.step(load(2, range(2))) == [start(1, GET, (2, 0, 2))]
    bench.step(done(0, DONE, FAILED))  # slot 1 goes to the load, though the save has waited longer
    assert bench.engine.slots.num_free == 0
    assert bench.step(done(2, DONE)) == []  # slot 0 stays for loads
    assert bench.engine.slots.num_free == 1


def test_ops_are_bounded_in_cells_bytes_and_number() -> None:
    limits = Limits(dict.fromkeys(OpKind, 2), op_bytes=CELL_BYTES + 1, op_cells=8)
    bench = Bench(slots=8, reserve=0, limits=limits)
    assert bench.step(load(1, range(6))) == [
        start(0, GET, (1, 0, 0), (1, 1, 1)),
        start(1, GET, (1, 2, 2), (1, 3, 3)),
    ]
    assert bench.step(done(0, DONE, DONE)) == [
        start(2, SCATTER, (1, 0, 0), (1, 1, 1)),
        start(3, GET, (1, 4, 4), (1, 5, 5)),
    ]


def test_an_op_may_hold_cells_of_several_jobs() -> None:
    bench = Bench(slots=2, reserve=0)
    bench.step(load(1, range(2)))
    assert bench.step(load(2, range(1))) == []
    assert bench.step(load(3, range(1))) == []
    assert bench.step(done(0, MISSING, MISSING)) == [
        loaded(1, 0, MISSING),
        start(1, GET, (2, 0, 1), (3, 0, 0)),
    ]


# Stores that take no puts


def stuck() -> Bench:
    """Three cells are in a put that does not end; two wait for slots since time 0."""
    bench = Bench(slots=4, reserve=1)
    bench.step(save(1, range(3)))
    assert bench.step(done(0, DONE, DONE, DONE)) == [
        gathered(1),
        start(1, PUT, (1, 0, 0), (1, 1, 1), (1, 2, 2)),
    ]
    assert bench.engine.next_deadline() is None
    assert bench.step(save(2, range(2))) == []
    assert bench.engine.next_deadline() == SAVE_STALL_S
    return bench


def test_saves_that_find_no_slot_are_dropped_once_and_then_at_once() -> None:
    bench = stuck()
    assert bench.after(SAVE_STALL_S / 2) == []
    assert bench.after(SAVE_STALL_S / 2) == [gathered(2), saved(2, (FULL, 2))]
    assert bench.engine.next_deadline() is None
    assert bench.after(SAVE_STALL_S) == []
    assert bench.step(save(3, range(1))) == [gathered(3), saved(3, (FULL, 1))]
    # The store takes puts again.
    assert bench.step(done(1, DONE, DONE, DONE)) == [saved(1, (DONE, 3))]
    assert bench.step(save(4, range(1))) == [start(2, GATHER, (4, 0, 2))]


def test_a_slot_that_is_given_back_renews_the_patience() -> None:
    bench = stuck()
    bench.clock.advance(SAVE_STALL_S * 0.9)
    actions = bench.step(done(1, FAILED, FAILED, FAILED))
    assert actions == [saved(1, (FAILED, 3)), start(2, GATHER, (2, 0, 2), (2, 1, 1))]
    assert bench.after(SAVE_STALL_S) == []


def test_loads_go_on_while_puts_are_stuck() -> None:
    bench = stuck()
    assert bench.step(load(3, range(1))) == [start(2, GET, (3, 0, 3))]
    assert bench.step(done(2, DONE)) == [start(3, SCATTER, (3, 0, 3))]
    assert bench.step(done(3, DONE)) == [loaded(3, 1)]


def test_loads_through_the_reserve_do_not_renew_the_patience() -> None:
    bench = stuck()
    for job in range(3, 8):
        op = 2 * job - 4
        bench.clock.advance(SAVE_STALL_S / 4)
        bench.step(load(job, range(1)))
        bench.step(done(op, DONE))
        bench.step(done(op + 1, DONE))
    assert bench.engine.num_saves == 1


def test_dropping_saves_ends_all_that_is_not_in_a_put() -> None:
    bench = Bench(slots=5, reserve=0, limits=Limits(dict.fromkeys(OpKind, 1), 1 << 20, op_cells=1))
    bench.step(save(1, range(4)))
    assert bench.step(done(0, DONE)) == [start(1, PUT, (1, 0, 0)), start(2, GATHER, (1, 1, 1))]
    assert bench.step(done(2, DONE)) == [start(3, GATHER, (1, 2, 2))]
    # Chunk 0 is being put, 1 waits for its put, 2 is being gathered, 3 waits.
    assert bench.step(DropSaves()) == []
    assert bench.engine.slots.num_free == 3
    assert bench.step(done(3, DONE)) == [gathered(1)]
    assert bench.step(done(1, DONE)) == [saved(1, (CANCELLED, 3), (DONE, 1))]
    assert bench.is_clean()
    assert bench.step(save(2, range(1))) == [start(4, GATHER, (2, 0, 0))]


def test_dropping_saves_leaves_loads_alone() -> None:
    bench = Bench()
    bench.step(load(1, range(1)))
    assert bench.step(DropSaves()) == []
    assert bench.step(done(0, DONE)) == [start(1, SCATTER, (1, 0, 0))]


def test_an_answer_to_no_question_is_a_bug() -> None:
    bench = Bench()
    with pytest.raises(KeyError):
        bench.engine.step(done(0, DONE), 0)
    bench.step(load(1, range(2)))
    with pytest.raises(AssertionError):
        bench.engine.step(done(0, DONE), 0)


# Anything in any order

OUTCOMES = {
    GET: (DONE, DONE, DONE, MISSING, CORRUPT, FAILED, CellOutcome.UNREACHABLE),
    SCATTER: (DONE, DONE, DONE, FAILED),
    GATHER: (DONE, DONE, DONE, FAILED),
    PUT: (DONE, EXISTED, FULL, FAILED, CellOutcome.UNREACHABLE),
    REMOVE: (DONE, FAILED),
}


@dataclass
class Told:
    """What the engine has been seen to do for one job."""

    job: LoadJob | SaveJob
    in_pages: set[str] = field(default_factory=set)
    is_gathered: bool = False
    is_reported: bool = False


class EngineMachine(RuleBasedStateMachine):
    """Watches slots, pages and reports from outside."""

    @initialize(
        slots=st.integers(1, 6),
        reserve=st.integers(0, 5),
        in_flight=st.integers(1, 3),
        op_cells=st.integers(1, 4),
        op_bytes=st.integers(1, 4 * CELL_BYTES),
    )
    def begin(self, slots: int, reserve: int, in_flight: int, op_cells: int, op_bytes: int) -> None:
        self.limits = Limits(dict.fromkeys(OpKind, in_flight), op_bytes, op_cells)
        self.engine = Engine(SlotPool(slots, min(reserve, slots - 1)), self.limits)
        self.clock = FakeClock()
        self.told: dict[int, Told] = {}
        self.flying: dict[int, Op] = {}

    @rule(
        first=st.integers(0, 3),
        chunks=st.integers(1, 5),
        cells=st.integers(0, 3),
        timeout_s=st.sampled_from((0.5, 2.0, 5.0)),
    )
    def submit_load(self, first: int, chunks: int, cells: int, timeout_s: float) -> None:
        job = len(self.told)
        event = load(job, range(first, first + chunks), cells, timeout_s)
        self.told[job] = Told(event)
        self.step(event)

    @rule(first=st.integers(0, 3), chunks=st.integers(0, 5), cells=st.integers(0, 3))
    def submit_save(self, first: int, chunks: int, cells: int) -> None:
        job = len(self.told)
        event = save(job, range(first, first + chunks), cells)
        self.told[job] = Told(event)
        self.step(event)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        op = self.flying[data.draw(st.sampled_from(sorted(self.flying)))]
        self.finish_op(op, [data.draw(st.sampled_from(OUTCOMES[op.kind])) for _ in op.cells])

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def complete_well(self, data: st.DataObject) -> None:
        op = self.flying[data.draw(st.sampled_from(sorted(self.flying)))]
        self.finish_op(op, [DONE] * len(op.cells))

    @rule(seconds=st.sampled_from((0.1, 1.0, 3.0)))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.step(Tick())

    @rule(job=st.integers(0, 10))
    def cancel(self, job: int) -> None:
        self.step(CancelRequest(f"r{job}"))

    @rule()
    def drop_saves(self) -> None:
        self.step(DropSaves())
        assert not any(op.kind is GATHER for op in self.flying.values()) or self.engine.num_saves

    def finish_op(self, op: Op, outcomes: list[CellOutcome]) -> None:
        del self.flying[op.op_id]
        for cell, outcome in zip(op.cells, outcomes, strict=True):
            if op.kind is SCATTER and outcome is DONE:
                self.told[cell.job_id].in_pages.add(cell.task.key)
        self.step(OpDone(op.op_id, tuple(outcomes)))

    def step(self, event: Event) -> None:
        for action in self.engine.step(event, self.clock()):
            match action:
                case Start():
                    self.started(action.op)
                case LoadDone():
                    self.load_reported(action)
                case SaveGathered():
                    self.gather_reported(action)
                case SaveDone():
                    self.save_reported(action)

    def started(self, op: Op) -> None:
        assert op.op_id not in self.flying
        assert 0 < len(op.cells) <= self.limits.op_cells
        assert sum(c.task.nbytes for c in op.cells[:-1]) < self.limits.op_bytes
        busy = {cell.slot for other in self.flying.values() for cell in other.cells}
        for cell in op.cells:
            told = self.told[cell.job_id]
            assert cell.task in told.job.tasks
            assert (cell.slot is None) == (op.kind is REMOVE)
            assert cell.slot is None or cell.slot not in busy
            if op.kind in (GET, SCATTER):
                assert not told.is_reported
            if op.kind is GATHER:
                assert not told.is_gathered
        self.flying[op.op_id] = op
        assert (
            Counter(o.kind for o in self.flying.values())[op.kind]
            <= (self.limits.in_flight[op.kind])
        )

    def in_flight(self, job: int, kind: OpKind) -> bool:
        cells = [c for op in self.flying.values() if op.kind is kind for c in op.cells]
        return any(cell.job_id == job for cell in cells)

    def load_reported(self, report: LoadDone) -> None:
        told = self.told[report.job_id]
        assert isinstance(told.job, LoadJob)
        assert not told.is_reported
        told.is_reported = True
        assert told.job.first_chunk <= report.ok_stop_chunk <= told.job.stop_chunk
        assert not self.in_flight(report.job_id, SCATTER)
        before = {t.key for t in told.job.tasks if t.chunk < report.ok_stop_chunk}
        assert before <= told.in_pages
        assert (report.reason is DONE) == (report.ok_stop_chunk == told.job.stop_chunk)

    def gather_reported(self, report: SaveGathered) -> None:
        told = self.told[report.job_id]
        assert isinstance(told.job, SaveJob)
        assert not told.is_gathered
        told.is_gathered = True
        assert not self.in_flight(report.job_id, GATHER)

    def save_reported(self, report: SaveDone) -> None:
        told = self.told[report.job_id]
        assert told.is_gathered
        assert not told.is_reported
        told.is_reported = True
        assert not self.in_flight(report.job_id, PUT)
        assert sum(count for _, count in report.outcomes) == len(told.job.tasks)

    @invariant()
    def holds(self) -> None:
        self.engine.check()
        due = self.engine.next_deadline()
        assert due is None or due > self.clock()
        waiting = [t for t in self.told.values() if not t.is_reported]
        assert self.engine.idle == (not waiting and not self.flying)
        # Whatever is not over has something that will move it on.
        assert not waiting or self.flying or due is not None

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.flying or self.engine.next_deadline() is not None:
            for op in list(self.flying.values()):
                self.finish_op(op, [DONE] * len(op.cells))
                self.holds()
            self.clock.advance(SAVE_STALL_S)
            self.step(Tick())
        assert all(told.is_reported for told in self.told.values())
        assert self.engine.idle
        assert self.engine.slots.num_free == self.engine.slots.count


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
