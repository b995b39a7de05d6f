"""Graphs of ops, lanes, and the scheduler that says which op may start next.

Pure; the engine thread's. An op moves cells of one slab; nothing here looks at them. Its edges go
to the ops that wait for it, whatever jobs they are for. An op without a lane is a marker: it is
done as soon as all its predecessors are over. Only the `Scheduler` changes ops and lanes.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm_kvpool.staging.devices import Fence
    from vllm_kvpool.transfer.ops import Outcome, Part

FAIR_EVERY = 8  # batches of other priorities, after which a waiting one goes first


class Priority(IntEnum):
    """Priorities of a lane's ops; the lowest go first."""

    LOAD = 0  # a request waits for it
    SAVE = 1
    PREFETCH = 2  # a request may want it
    COPY = 3  # of a slab in host memory into tiers


class Owner(NamedTuple):
    """The job that an op is for; without a request it is a copy between tiers, or for replicas."""

    priority: Priority
    request_id: str = ""
    job_id: int = -1


class OpState(Enum):
    """The state of an op; done, failed and cancelled are final."""

    WAITING = "waiting"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # Enum's own is written in Python


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """Limits of a lane: its batches in flight, and their size.

    A batch has at most `batch_ops` cells, and ends with the op that reaches `batch_bytes`.
    `budget_bytes` bounds the bytes of all batches in flight; an op that is larger runs alone.
    """

    batches: int
    batch_ops: int
    batch_bytes: int
    budget_bytes: int


@dataclass(slots=True, eq=False, repr=False)
class Op:
    """A move of cells, or a marker; `what` is the owner's."""

    owner: Owner
    lane: "Lane | None"
    what: Any
    nbytes: int
    always: bool
    priority: int
    size: int  # cells
    state: OpState = OpState.WAITING
    pending: int = 0  # predecessors that it waits for
    attempts: int = 0
    ready_at: float = 0.0
    successors: "list[Op]" = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Batch:
    """Ops of one lane that run together, in the order in which they became ready.

    The scheduler makes it, and the engine says of each op which cells it moves, and their slots.
    The lane reads that, from its own thread, and never the ops.
    """

    lane: Any  # its key
    ops: Sequence[Op]
    nbytes: int
    parts: Sequence["Part"] = ()  # one for each op
    fences: Sequence["Fence"] = ()  # of a lane that waits for the model, in place of parts
    ready_at: float = 0.0  # since when the first of them could have started
    owners: Sequence[Owner] = ()  # the first few jobs it is for
    attempt: int = 1  # of the op that was tried most often

    @property
    def num_cells(self) -> int:
        """Number of cells of all parts."""
        return sum([part.num_cells for part in self.parts])


class BatchDone(NamedTuple):
    """A lane's report: one outcome per op, in order."""

    batch: Batch
    outcomes: Sequence["Outcome"]


class BatchHung(NamedTuple):
    """A store call has not returned in time. Its `BatchDone` may still come, or never."""

    batch: Batch


@dataclass(slots=True, eq=False, repr=False)
class Lane:
    """The queues of ready ops that run in one place; `key` and `admit` are the owner's."""

    key: Any
    limits: LaneLimits
    admit: Callable[[Op], bool] | None
    queues: tuple[OrderedDict[Op, None], ...] = field(
        default_factory=lambda: tuple(OrderedDict() for _ in Priority)
    )
    passed_over: list[int] = field(default_factory=lambda: [0] * len(Priority))
    num_ready: int = 0  # cells
    num_batches: int = 0  # in flight
    running_bytes: int = 0

    def turns(self) -> Sequence[int]:
        """Return the priorities in the order in which they may start a batch."""
        starved = [p for p in IN_ORDER if self.passed_over[p] >= FAIR_EVERY]
        return (*starved, *IN_ORDER)


IN_ORDER = tuple(int(p) for p in Priority)


_WAITING, _READY, _RUNNING = OpState.WAITING, OpState.READY, OpState.RUNNING
_DONE, _FAILED, _CANCELLED = OpState.DONE, OpState.FAILED, OpState.CANCELLED
_NOT_STARTED = frozenset({_WAITING, _READY})
OVER = frozenset({_DONE, _FAILED, _CANCELLED})
NO_CONDITIONS: Mapping[Any, Callable[[Op], bool]] = MappingProxyType({})


class Scheduler:
    """Cuts batches from the ready ops of all graphs.

    An op waits for its predecessors, is ready, runs as part of a batch, and ends once: done, failed
    or cancelled. Each op counts its open predecessors, so the end of an op costs the number of its
    successors and no more. A failed or cancelled op cancels its
    successors, but for those added with `always`, which only wait for its end.

    Ready ops of one lane and priority form one queue over all graphs. The lowest `Priority` goes
    first; a queue that was passed over `FAIR_EVERY` times in a row goes before it. Before an op
    starts, its lane's `admit` is asked; False leaves the op in its queue until the next `take`. So
    an op is given memory only when it starts.

    Running ops cannot be stopped: who cancels a job waits for them.

    Invariants (`check`): a waiting op has `pending` > 0; a lane runs no more batches or bytes than
    its limits, but for a single op that is larger.
    """

    def __init__(
        self,
        lanes: Mapping[Any, LaneLimits],
        admit: Mapping[Any, Callable[[Op], bool]] = NO_CONDITIONS,
    ) -> None:
        self.lanes = {key: Lane(key, limits, admit.get(key)) for key, limits in lanes.items()}
        self._active: dict[Lane, None] = {}  # lanes that may have a batch to start, in order
        self._reached: list[Op] = []  # markers that are done
        self._lost: list[tuple[Op, Op]] = []
        self.now = 0.0

    # Building

    def add(
        self,
        owner: Owner,
        lane: Lane | None,
        what: Any = None,
        nbytes: int = 0,
        after: Iterable[Op] = (),
        *,
        always: bool = False,
        size: int = 1,
    ) -> Op:
        """Add an op.

        Predecessors may belong to any job, and may have ended. After a failed or cancelled one the
        op is cancelled at once, unless `always`.
        """
        op = Op(owner, lane, what, nbytes, always, int(owner.priority), size)
        cause = None
        for before in after:
            state = before.state
            if state is _FAILED or state is _CANCELLED:
                cause = before
            elif state is not _DONE:
                before.successors.append(op)
                op.pending += 1
        if cause is not None and not always:
            self._lose([op], cause)
        elif not op.pending:
            self._make_ready(op)
        return op

    # Running

    def take(self, now: float) -> list[Batch]:
        """Return the batches that may start now; their ops count as running."""
        self.now = now
        batches: list[Batch] = []
        active, self._active = self._active, {}
        for lane in active:
            while lane.num_ready and lane.num_batches < lane.limits.batches:
                ops = self._next_ops(lane)
                if not ops:
                    self._active[lane] = None
                    break
                nbytes = 0
                for op in ops:
                    op.state = _RUNNING
                    nbytes += op.nbytes
                lane.num_batches += 1
                lane.running_bytes += nbytes
                batches.append(Batch(lane.key, ops, nbytes))
        return batches

    def batch_ended(self, batch: Batch) -> None:
        """Free a batch's place in its lane; its ops have yet to be finished, failed or retried."""
        lane = self.lanes[batch.lane]
        lane.num_batches -= 1
        lane.running_bytes -= batch.nbytes
        if lane.num_ready:
            self._active[lane] = None

    def finish(self, op: Op) -> None:
        """End an op as done, and make successors ready that waited for it alone."""
        op.state = _DONE
        for successor in op.successors:
            if successor.state is _WAITING:
                successor.pending -= 1
                if not successor.pending:
                    self._make_ready(successor)

    def fail(self, op: Op) -> None:
        """Fail an op for good, started or not, and cancel its successors."""
        self._leave_queue(op)
        self._lose(self._close_off(op, _FAILED), op)

    def move(self, op: Op, lane: Lane, *, first: bool = False) -> None:
        """Make a running or ready op ready in another lane; its successors wait on.

        It stands behind all others there, or is the `first`.
        """
        self._leave_queue(op)
        op.lane = lane
        self._make_ready(op)
        if first:
            lane.queues[op.priority].move_to_end(op, last=False)

    def cancel(self, op: Op) -> bool:
        """Cancel an op that has not started, and its successors; False if it runs or has ended."""
        if op.state not in _NOT_STARTED:
            return False
        self._leave_queue(op)
        self._lose(self._close_off(op, _CANCELLED), op)
        return True

    def cancel_successors(self, op: Op) -> None:
        """Cancel the ops that wait for an op, which goes on, and their successors."""
        self._lose([each for each in op.successors if not each.always], op)

    def raise_priority(self, op: Op, priority: Priority) -> None:
        """Let an op go before others; one that runs, in the lanes that it moves on to."""
        if priority < op.priority and (op.state in _NOT_STARTED or op.state is _RUNNING):
            if op.state is _READY and op.lane is not None:
                del op.lane.queues[op.priority][op]
                op.lane.queues[priority][op] = None
            op.priority = priority

    def first_ready(self, lane: Lane) -> Op | None:
        """Return a lane's ready op of the lowest priority, of these the longest waiting."""
        return next((op for queue in lane.queues for op in queue), None)

    def waiting_in(self, lane: Lane) -> list[Op]:
        """Return the ready ops of a lane, the lowest priority first."""
        return [op for queue in lane.queues for op in queue]

    @property
    def has_news(self) -> bool:
        """True if `take`, `take_lost` or `take_reached` may return something."""
        return bool(self._lost or self._reached or self._active)

    @property
    def has_consequences(self) -> bool:
        """True if `take_lost` or `take_reached` returns something."""
        return bool(self._lost or self._reached)

    def take_reached(self) -> list[Op]:
        """Return the markers that were done since the last call, in order."""
        reached, self._reached = self._reached, []
        return reached

    def take_lost(self) -> list[tuple[Op, Op]]:
        """Return the ops cancelled since the last call because another failed, and that other."""
        lost, self._lost = self._lost, []
        return lost

    # Inside

    @staticmethod
    def _leave_queue(op: Op) -> None:
        """Take an op out of its queue if it is ready: it is about to change."""
        if op.lane is not None and op.state is _READY:
            del op.lane.queues[op.priority][op]
            op.lane.num_ready -= op.size

    def _make_ready(self, op: Op) -> None:
        lane = op.lane
        if lane is not None:
            op.state = _READY
            op.ready_at = self.now
            lane.queues[op.priority][op] = None
            lane.num_ready += op.size
            self._active[lane] = None
            return
        # A loop: chains of markers may be longer than the call stack.
        markers = [op]
        while markers:
            marker = markers.pop()
            marker.state = _DONE
            self._reached.append(marker)
            for successor in marker.successors:
                if successor.state is _WAITING:
                    successor.pending -= 1
                    if not successor.pending:
                        if successor.lane is None:
                            markers.append(successor)
                        else:
                            self._make_ready(successor)

    def _next_ops(self, lane: Lane) -> list[Op]:
        """Return a batch from the first queue that an op may start from, in the order of turns."""
        for priority in lane.turns() if any(lane.passed_over) else IN_ORDER:
            if not lane.queues[priority]:
                continue
            ops = self._cut(lane, lane.queues[priority])
            if ops:
                if lane.num_ready or any(lane.passed_over):
                    self._count_passed_over(lane, priority)
                return ops
            queue = lane.queues[priority]
            room = lane.limits.budget_bytes - lane.running_bytes
            if lane.num_batches and next(iter(queue)).nbytes > room:
                break  # the first op waits for room, which those behind it must not take
        return []

    def _count_passed_over(self, lane: Lane, taken: int) -> None:
        passed_over = lane.passed_over
        passed_over[taken] = 0
        for priority in range(taken + 1, len(passed_over)):
            passed_over[priority] = passed_over[priority] + 1 if lane.queues[priority] else 0

    def _cut(self, lane: Lane, queue: OrderedDict[Op, None]) -> list[Op]:
        limits, admit = lane.limits, lane.admit
        room = limits.budget_bytes - lane.running_bytes
        most_ops, most_bytes = limits.batch_ops, limits.batch_bytes
        ops: list[Op] = []
        nbytes = size = 0
        for op in queue:
            if nbytes >= most_bytes or (size + op.size > most_ops and ops):
                break
            if nbytes + op.nbytes > room and (ops or lane.num_batches):
                break
            if admit is not None and not admit(op):
                break
            ops.append(op)
            nbytes += op.nbytes
            size += op.size
        for op in ops:
            del queue[op]
        lane.num_ready -= size
        return ops

    def _lose(self, ops: list[Op], cause: Op) -> None:
        """Cancel ops and all their successors (a loop: chains may be long)."""
        while ops:
            op = ops.pop()
            if op.state in _NOT_STARTED:
                self._lost.append((op, cause))
                ops += self._close_off(op, _CANCELLED)

    def _close_off(self, op: Op, state: OpState) -> list[Op]:
        """End an op as failed or cancelled; the successors that must not run."""
        op.state = state
        lost: list[Op] = []
        for successor in op.successors:
            if successor.state is not _WAITING:
                continue
            if successor.always:
                successor.pending -= 1
                if not successor.pending:
                    self._make_ready(successor)
            else:
                lost.append(successor)
        return lost
