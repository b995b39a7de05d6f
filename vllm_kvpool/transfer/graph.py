"""What the transfer engine runs: graphs of ops, and the lanes that ops wait for.

Values with behaviour of their own only where it is about themselves; scheduler.py alone changes
them. An op is one move of one cell between two places. An op without a lane is a marker: it is
done the moment nothing stands before it.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

FAIR_EVERY = 8


class Priority(IntEnum):
    """Which ops of a lane go first."""

    LOAD = 0  # a request waits for it
    SAVE = 1
    PREFETCH = 2  # a request may want it
    DEMOTE = 3  # moves between tiers


class OpState(Enum):
    WAITING = "waiting"
    READY = "ready"
    RUNNING = "running"
    DELAYED = "delayed"  # to be tried again later
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # Enum's own is written in Python


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """What a lane may have in flight, and how large a batch is.

    A batch ends with the op that reaches `batch_bytes`; `budget_bytes` bounds the bytes of all
    batches in flight, and a single larger op runs alone.
    """

    batches: int
    batch_ops: int
    batch_bytes: int
    budget_bytes: int


class Op:
    """One move of one cell, or a marker. Only the scheduler changes its state."""

    __slots__ = (
        "always",
        "attempts",
        "graph",
        "lane",
        "nbytes",
        "pending",
        "priority",
        "ready_at",
        "state",
        "successors",
        "what",
    )

    def __init__(
        self, graph: "Graph", lane: "Lane | None", what: Any, nbytes: int, always: bool
    ) -> None:
        self.graph = graph
        self.lane = lane
        self.what = what
        self.nbytes = nbytes
        self.priority = int(graph.priority)
        self.always = always
        self.state = OpState.WAITING
        self.pending = 0
        self.attempts = 0
        self.ready_at = 0.0
        self.successors: list[Op] = []


class Graph:
    """Ops that are submitted, cancelled and reported together. `tag` is the owner's."""

    __slots__ = ("closed", "deadline", "num_failed", "open_ops", "ops", "priority", "tag")

    def __init__(self, tag: Any, priority: Priority, deadline: float | None = None) -> None:
        self.tag = tag
        self.priority = priority
        self.deadline = deadline
        self.ops: list[Op] = []
        self.open_ops = 0
        self.num_failed = 0
        self.closed = False  # no op will be added any more

    @property
    def ended(self) -> bool:
        return self.closed and not self.open_ops


class Batch:
    """Ops of one lane that run together, in the order in which they became ready.

    Nothing changes it; a class with slots, since one is made for every batch.
    """

    __slots__ = ("lane", "nbytes", "ops")

    def __init__(self, lane: "Lane", ops: Sequence[Op], nbytes: int) -> None:
        self.lane = lane
        self.ops = ops
        self.nbytes = nbytes


class Lane:
    """The queues of one kind of work; `key` and `admit` are the owner's (see `Scheduler`).

    Only the scheduler changes it.
    """

    __slots__ = (
        "admit",
        "key",
        "limits",
        "num_batches",
        "num_passed_over",
        "num_ready",
        "passed_over",
        "queues",
        "running_bytes",
        "stirred",
    )

    def __init__(
        self, key: Hashable, limits: LaneLimits, admit: Callable[[Op], bool] | None
    ) -> None:
        self.key = key
        self.limits = limits
        self.admit = admit
        self.queues: tuple[deque[Op], ...] = tuple(deque() for _ in Priority)
        self.passed_over = [0] * len(Priority)
        self.num_passed_over = 0  # since all queues but the first were last empty
        self.num_ready = 0
        self.num_batches = 0  # in flight
        self.running_bytes = 0
        self.stirred = False  # listed among the lanes in which something may start

    def clear(self) -> None:
        """Forget what is left in the queues of ops that are over."""
        for queue in self.queues:
            queue.clear()

    def turns(self) -> Sequence[int]:
        """Priorities in the order in which they may start a batch."""
        starved = [p for p in IN_ORDER if self.passed_over[p] >= FAIR_EVERY]
        return (*starved, *IN_ORDER)


IN_ORDER = tuple(int(p) for p in Priority)
