"""The engine's decisions: `step(event, now) -> actions` (pure; owned by the engine thread).

A load's cell goes GET -> SCATTER, a save's GATHER -> PUT; each holds one staging slot from its
first op to its last. The engine hands slots to waiting cells (loads first), packs cells into ops
of bounded size, keeps a bounded number of ops of each kind in flight, and reports every job once.

Invariants (`check`):
* a slot is free, or held by one cell in one op or queue, or quarantined with its op in flight;
* a load that stops at chunk k has its chunks before k in the pages and starts nothing after k;
* a load is reported only when none of its scatters is in flight: pages are never written behind
  the scheduler's back. A GET in flight keeps its slot, which after a timeout counts as
  quarantined, until the lane answers;
* a save that finds no slot for `SAVE_STALL_S` while none is given back is dropped, and so are
  later ones until a slot is given back: a store that takes no puts costs one such wait.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from vllm_kvpool.staging.slots import SlotPool, SlotUse
from vllm_kvpool.transfer.ops import (
    CancelRequest,
    CellOutcome,
    CellTask,
    DropSaves,
    JobId,
    LoadDone,
    LoadJob,
    Op,
    OpCell,
    OpDone,
    OpId,
    OpKind,
    Report,
    SaveDone,
    SaveGathered,
    SaveJob,
    Start,
    Tick,
)

SAVE_STALL_S = 1.0
MAX_WAITING_REMOVES = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Ops in flight per kind, and the size of an op."""

    in_flight: dict[OpKind, int]
    op_bytes: int
    op_cells: int


Event = LoadJob | SaveJob | OpDone | CancelRequest | DropSaves | Tick


Action = Start | Report


@dataclass(slots=True)
class _Load:
    job: LoadJob
    deadline: float
    stop_chunk: int  # cells at or after this chunk are no longer wanted
    left: Counter[int] = field(default_factory=Counter)  # chunk -> cells not yet in the pages
    scattering: int = 0
    expired: bool = False
    outcome: CellOutcome = CellOutcome.DONE


@dataclass(slots=True)
class _Save:
    job: SaveJob
    to_gather: int
    to_store: int
    dropped: bool = False
    outcomes: Counter[CellOutcome] = field(default_factory=Counter)


class Engine:
    """See the module docstring."""

    def __init__(self, slots: SlotPool, limits: Limits) -> None:
        self.slots = slots
        self._limits = limits
        self._loads: dict[JobId, _Load] = {}
        self._saves: dict[JobId, _Save] = {}
        self._waiting_loads: deque[tuple[JobId, CellTask]] = deque()
        self._waiting_saves: deque[tuple[JobId, CellTask]] = deque()
        self._ready: dict[OpKind, deque[OpCell]] = {
            kind: deque() for kind in (OpKind.SCATTER, OpKind.PUT, OpKind.REMOVE)
        }
        self._ops: dict[OpId, Op] = {}
        self._in_flight: Counter[OpKind] = Counter()
        self._next_op = 0
        self._patience_ends: float | None = None  # set while saves wait in vain for a slot
        self._actions: list[Action] = []

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event; return what is to be started and reported, in order."""
        match event:
            case LoadJob():
                self._submit_load(event, now)
            case SaveJob():
                self._submit_save(event)
            case OpDone():
                self._op_done(event)
            case CancelRequest():
                for load in [
                    x for x in self._loads.values() if x.job.request_id == event.request_id
                ]:
                    self._stop_load(load, load.job.first_chunk, CellOutcome.CANCELLED)
            case DropSaves():
                self._drop_saves(CellOutcome.CANCELLED)
            case Tick():
                pass
        self._expire(now)
        self._fill(now)
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float | None:
        """When a `Tick` is due, or None."""
        times = [load.deadline for load in self._loads.values() if not load.expired]
        if self._patience_ends is not None and self._waiting_saves:
            times.append(self._patience_ends)
        return min(times, default=None)

    @property
    def idle(self) -> bool:
        return not self._loads and not self._saves and not self._ops

    @property
    def num_saves(self) -> int:
        return len(self._saves)

    # Submission

    def _submit_load(self, job: LoadJob, now: float) -> None:
        load = _Load(job, now + job.timeout_s, job.stop_chunk)
        load.left.update(task.chunk for task in job.tasks)
        self._loads[job.job_id] = load
        self._waiting_loads.extend((job.job_id, task) for task in job.tasks)
        self._finish_load(load)

    def _submit_save(self, job: SaveJob) -> None:
        save = _Save(job, to_gather=len(job.tasks), to_store=len(job.tasks))
        self._saves[job.job_id] = save
        self._waiting_saves.extend((job.job_id, task) for task in job.tasks)
        self._finish_gather(save)

    # Starting ops

    def _fill(self, now: float) -> None:
        """Start whatever may start: what frees slots first, then loads, then saves."""
        for kind in (OpKind.SCATTER, OpKind.PUT, OpKind.REMOVE):
            queue = self._ready[kind]
            while queue and self._may_start(kind):
                self._start(kind, self._pack(queue))
        while self._may_start(OpKind.GET):
            batch = self._take_slots(self._waiting_loads, SlotUse.LOAD)
            if not batch:
                break
            self._start(OpKind.GET, batch)
        while self._may_start(OpKind.GATHER):
            batch = self._take_slots(self._waiting_saves, SlotUse.SAVE)
            if not batch:
                break
            self._start(OpKind.GATHER, batch)
        self._watch_stall(now)

    def _may_start(self, kind: OpKind) -> bool:
        return self._in_flight[kind] < self._limits.in_flight[kind]

    def _pack(self, queue: deque[OpCell]) -> list[OpCell]:
        batch: list[OpCell] = []
        nbytes = 0
        while queue and len(batch) < self._limits.op_cells and nbytes < self._limits.op_bytes:
            batch.append(queue.popleft())
            nbytes += batch[-1].task.nbytes
        return batch

    def _take_slots(self, waiting: deque[tuple[JobId, CellTask]], use: SlotUse) -> list[OpCell]:
        batch: list[OpCell] = []
        nbytes = 0
        while waiting and len(batch) < self._limits.op_cells and nbytes < self._limits.op_bytes:
            job_id, task = waiting[0]
            if use is SlotUse.LOAD and not self._wanted(job_id, task):
                waiting.popleft()
                continue
            slot = self.slots.take(use)
            if slot is None:
                break
            waiting.popleft()
            batch.append(OpCell(task, job_id, slot))
            nbytes += task.nbytes
        return batch

    def _wanted(self, job_id: JobId, task: CellTask) -> bool:
        load = self._loads.get(job_id)
        return load is not None and task.chunk < load.stop_chunk

    def _start(self, kind: OpKind, cells: list[OpCell]) -> None:
        op = Op(OpId(self._next_op), kind, tuple(cells))
        self._next_op += 1
        self._ops[op.op_id] = op
        self._in_flight[kind] += 1
        if kind is OpKind.SCATTER:
            for cell in cells:
                self._loads[cell.job_id].scattering += 1
        self._actions.append(Start(op))

    def _watch_stall(self, now: float) -> None:
        # With nothing waiting the mark stays, so that the next save does not wait again.
        if self._in_flight[OpKind.GATHER]:
            self._patience_ends = None
        elif not self._waiting_saves:
            pass
        elif self._patience_ends is None:
            self._patience_ends = now + SAVE_STALL_S
        elif now >= self._patience_ends:
            self._drop_waiting_saves(CellOutcome.FULL)

    # Ops that ended

    def _op_done(self, done: OpDone) -> None:
        op = self._ops.pop(done.op_id)
        self._in_flight[op.kind] -= 1
        assert len(done.outcomes) == len(op.cells), done
        handle = {
            OpKind.GET: self._got,
            OpKind.SCATTER: self._scattered,
            OpKind.GATHER: self._gathered,
            OpKind.PUT: self._put,
            OpKind.REMOVE: self._removed,
        }[op.kind]
        for cell, outcome in zip(op.cells, done.outcomes, strict=True):
            handle(cell, outcome)

    def _free(self, cell: OpCell) -> None:
        assert cell.slot is not None
        self.slots.give_back(cell.slot)
        if self.slots.has_room(SlotUse.SAVE):
            self._patience_ends = None

    def _got(self, cell: OpCell, outcome: CellOutcome) -> None:
        if outcome is CellOutcome.CORRUPT:
            # The next reader must not meet it again.
            removes = self._ready[OpKind.REMOVE]
            if len(removes) < MAX_WAITING_REMOVES:
                removes.append(OpCell(cell.task, cell.job_id, None))
        load = self._loads.get(cell.job_id)
        if load is not None and outcome is not CellOutcome.DONE:
            self._stop_load(load, cell.task.chunk, outcome)
            load = self._loads.get(cell.job_id)
        if load is not None and cell.task.chunk < load.stop_chunk:
            self._ready[OpKind.SCATTER].append(cell)
        else:
            self._free(cell)

    def _scattered(self, cell: OpCell, outcome: CellOutcome) -> None:
        self._free(cell)
        load = self._loads[cell.job_id]  # a load outlives its scatters
        load.scattering -= 1
        if outcome is CellOutcome.DONE:
            load.left[cell.task.chunk] -= 1
        else:
            self._stop_load(load, cell.task.chunk, outcome)
        self._finish_load(load)

    def _gathered(self, cell: OpCell, outcome: CellOutcome) -> None:
        save = self._saves[cell.job_id]
        if outcome is CellOutcome.DONE and not save.dropped:
            self._ready[OpKind.PUT].append(cell)
        else:
            self._free(cell)
            self._stored(save, CellOutcome.CANCELLED if save.dropped else outcome)
        save.to_gather -= 1
        self._finish_gather(save)

    def _put(self, cell: OpCell, outcome: CellOutcome) -> None:
        self._free(cell)
        self._stored(self._saves[cell.job_id], outcome)

    def _removed(self, cell: OpCell, outcome: CellOutcome) -> None:
        pass

    # Loads

    def _stop_load(self, load: _Load, chunk: int, outcome: CellOutcome) -> None:
        """Nothing at or after `chunk` is wanted any more."""
        if chunk < load.stop_chunk:
            load.stop_chunk = chunk
            load.outcome = outcome
            scatter = self._ready[OpKind.SCATTER]
            for cell in [
                c for c in scatter if c.job_id == load.job.job_id and c.task.chunk >= chunk
            ]:
                scatter.remove(cell)
                self._free(cell)
        self._finish_load(load)

    def _finish_load(self, load: _Load) -> None:
        """Report the load if all that is wanted is in the pages and no scatter is in flight."""
        if load.scattering or load.job.job_id not in self._loads:
            return
        if any(left and chunk < load.stop_chunk for chunk, left in load.left.items()):
            return
        del self._loads[load.job.job_id]
        job = load.job
        self._actions.append(LoadDone(job.job_id, job.request_id, load.stop_chunk, load.outcome))

    def _expire(self, now: float) -> None:
        for load in [x for x in self._loads.values() if now >= x.deadline and not x.expired]:
            load.expired = True
            unfinished = [chunk for chunk, left in load.left.items() if left]
            self._quarantine(load)
            self._stop_load(load, min(unfinished, default=load.stop_chunk), CellOutcome.TIMED_OUT)

    def _quarantine(self, load: _Load) -> None:
        for op in self._ops.values():
            if op.kind is OpKind.GET:
                for cell in op.cells:
                    if cell.job_id == load.job.job_id and cell.slot is not None:
                        self.slots.quarantine(cell.slot)

    # Saves

    def _finish_gather(self, save: _Save) -> None:
        if save.to_gather == 0:
            save.to_gather = -1  # reported
            self._actions.append(SaveGathered(save.job.job_id, save.job.request_id))
            self._finish_save(save)

    def _stored(self, save: _Save, outcome: CellOutcome) -> None:
        save.outcomes[outcome] += 1
        save.to_store -= 1
        self._finish_save(save)

    def _finish_save(self, save: _Save) -> None:
        if save.to_store == 0 and save.to_gather < 0:
            del self._saves[save.job.job_id]
            job = save.job
            self._actions.append(SaveDone(job.job_id, job.request_id, tuple(save.outcomes.items())))

    def _drop_waiting_saves(self, outcome: CellOutcome) -> None:
        waiting, self._waiting_saves = self._waiting_saves, deque()
        for job_id, _ in waiting:
            save = self._saves[job_id]
            self._stored(save, outcome)
            save.to_gather -= 1
            self._finish_gather(save)

    def _drop_saves(self, outcome: CellOutcome) -> None:
        for save in self._saves.values():
            save.dropped = True
        self._drop_waiting_saves(outcome)
        puts = self._ready[OpKind.PUT]
        while puts:
            cell = puts.popleft()
            self._free(cell)
            self._stored(self._saves[cell.job_id], outcome)

    def check(self) -> None:
        """The invariants of the module docstring; tests call it after every step."""
        self.slots.check()
        queued = [c.slot for kind in (OpKind.SCATTER, OpKind.PUT) for c in self._ready[kind]]
        flying = [
            c.slot for op in self._ops.values() if op.kind is not OpKind.REMOVE for c in op.cells
        ]
        held = [slot for slot in queued + flying if slot is not None]
        assert len(set(held)) == len(held), "a slot is held twice"
        assert len(held) == self.slots.num_held + self.slots.num_quarantined
        assert self._in_flight == Counter(op.kind for op in self._ops.values())
        for load in self._loads.values():
            scattering = sum(
                cell.job_id == load.job.job_id
                for op in self._ops.values()
                if op.kind is OpKind.SCATTER
                for cell in op.cells
            )
            assert scattering == load.scattering
        if self.idle:
            assert not self._waiting_saves
            assert self.slots.num_quarantined == 0
