"""The threads of the worker side: one engine thread that decides, lanes that perform.

    model thread --post--> inbox --> engine thread --op--> lane inbox --> lane
         ^------ reports (drain) ------'   ^------------ OpDone ----------'

The engine thread owns the engine and the planner; a lane owns the op it is performing. Bounds: the
engine keeps at most `Limits.in_flight` ops of a kind, so lane inboxes hold no more; the engine's
inbox holds those plus the plans of steps not yet taken. All threads are daemons and end by a
sentinel; a lane stuck in a store call is left behind at `close`, its memory kept alive.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from vllm_kvpool.metrics import Tally
from vllm_kvpool.transfer.engine import Engine, Event
from vllm_kvpool.transfer.ops import (
    CancelRequest,
    CellOutcome,
    DropSaves,
    JobId,
    LoadPlan,
    Op,
    OpDone,
    OpKind,
    Report,
    SaveDone,
    SavePlan,
    Start,
    Tick,
    given_up,
)
from vllm_kvpool.transfer.planner import Planner

logger = logging.getLogger(__name__)

IDLE_TICK_S = 0.5
LANE_JOIN_S = 0.5

Perform = Callable[[Op], tuple[CellOutcome, ...]]


@dataclass(frozen=True, slots=True)
class Close:
    """Finish what is running until `deadline` (monotonic seconds), then end."""

    deadline: float


Post = LoadPlan | SavePlan | CancelRequest | DropSaves | Close
_Message = Post | OpDone


class Lane:
    """One thread that performs the ops of its inbox, one after another, and never dies of one."""

    def __init__(
        self,
        name: str,
        perform: Perform,
        inbox: "SimpleQueue[Op | None]",
        outbox: "SimpleQueue[_Message]",
    ) -> None:
        self._inbox = inbox
        self._perform = perform
        self._outbox = outbox
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (op := self._inbox.get()) is not None:
            try:
                outcomes = self._perform(op)
            except Exception:
                logger.exception("kvpool: %s op failed", op.kind.value)
                outcomes = (CellOutcome.FAILED,) * len(op.cells)
            self._outbox.put(OpDone(op.op_id, outcomes))


class Executor:
    """Runs an engine. `post`, `drain` and `wait` are for the model's thread and do not block on
    the store; `close` is called once."""

    def __init__(
        self,
        engine: Engine,
        planner: Planner,
        perform: Perform,
        lanes: dict[OpKind, int],
        tally: Tally,
    ) -> None:
        self._engine = engine
        self._planner = planner
        self._tally = tally
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._open: dict[JobId, LoadPlan | SavePlan] = {}  # pages in use; engine thread
        self._changed = threading.Condition()
        self._reports: deque[Report] = deque()  # guarded by _changed
        self._lane_inboxes: dict[OpKind, SimpleQueue[Op | None]] = {}
        self._lanes: list[tuple[OpKind, Lane]] = []
        for kind, count in lanes.items():
            self._lane_inboxes[kind] = SimpleQueue()
            for i in range(count):
                name = f"kvpool-{kind.value}-{i}"
                lane = Lane(name, perform, self._lane_inboxes[kind], self._inbox)
                self._lanes.append((kind, lane))
        self._thread = threading.Thread(target=self._run, name="kvpool-engine", daemon=True)
        self._thread.start()

    def post(self, message: Post) -> None:
        """Hand a plan or a wish to the engine thread."""
        self._inbox.put(message)

    def drain(self) -> list[Report]:
        """All reports since the last call, in order."""
        if not self._reports:  # a length is read atomically; spares the lock in most steps
            return []
        with self._changed:
            reports = list(self._reports)
            self._reports.clear()
        return reports

    def wait(self, ready: Callable[[Sequence[Report]], bool], timeout_s: float) -> bool:
        """Block until `ready` holds of the reports not yet drained, at most `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: ready(self._reports), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Let saves finish for at most `timeout_s`, then end all threads.

        Returns whether every lane has ended, so that the memory they use may be released.
        """
        self._inbox.put(Close(time.monotonic() + timeout_s))
        self._thread.join(timeout_s + LANE_JOIN_S)
        deadline = time.monotonic() + LANE_JOIN_S
        for _, lane in self._lanes:
            lane.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(lane.thread.is_alive() for _, lane in self._lanes)

    # The engine thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("kvpool: the transfer engine has failed; going on without the pool")
            self._tally.add("kvpool_failures", kind="engine")
            self._end_lanes()
            self._serve_without_engine()
        else:
            self._end_lanes()

    def _serve(self) -> None:
        closing: float | None = None
        while closing is None or (time.monotonic() < closing and self._engine.num_saves):
            message = self._next_message(closing)
            if isinstance(message, Close):
                closing = message.deadline
            elif message is not None:
                self._step(self._as_event(message))
            else:
                self._step(Tick())
        self._step(DropSaves())

    def _end_lanes(self) -> None:
        for kind, _ in self._lanes:
            self._lane_inboxes[kind].put(None)

    def _serve_without_engine(self) -> None:
        """Every job ends as if the store had nothing, once no lane can touch its pages any more."""
        for kind, lane in self._lanes:
            if kind in (OpKind.SCATTER, OpKind.GATHER):
                lane.thread.join()
        self._publish([given_up(plan, CellOutcome.FAILED) for plan in self._open.values()])
        while not isinstance(message := self._inbox.get(), Close):
            if isinstance(message, LoadPlan | SavePlan):
                self._publish([given_up(message, CellOutcome.FAILED)])

    def _next_message(self, closing: float | None) -> _Message | None:
        deadline = self._engine.next_deadline()
        now = time.monotonic()
        times = [t - now for t in (deadline, closing) if t is not None]
        try:
            return self._inbox.get(timeout=max(0.0, min([IDLE_TICK_S, *times])))
        except Empty:
            return None

    def _as_event(
        self, message: "LoadPlan | SavePlan | CancelRequest | DropSaves | OpDone"
    ) -> Event:
        match message:
            case LoadPlan():
                self._open[message.job_id] = message
                return self._planner.load(message)
            case SavePlan():
                self._open[message.job_id] = message
                return self._planner.save(message)
            case _:
                return message

    def _step(self, event: Event) -> None:
        reports: list[Report] = []
        for action in self._engine.step(event, time.monotonic()):
            if isinstance(action, Start):
                self._lane_inboxes[action.op.kind].put(action.op)
                continue
            reports.append(action)
            if isinstance(action, SaveDone):
                self._count_save(action)
            else:
                del self._open[action.job_id]
        self._publish(reports)
        if not isinstance(event, Tick):
            self._gauge()

    def _publish(self, reports: Sequence[Report]) -> None:
        if reports:
            with self._changed:
                self._reports.extend(reports)
                self._changed.notify_all()

    def _count_save(self, done: SaveDone) -> None:
        for outcome, count in done.outcomes:
            if outcome in (CellOutcome.CANCELLED, CellOutcome.FULL):
                self._tally.add("kvpool_failures", count, kind=f"save_{outcome.value}")

    def _gauge(self) -> None:
        slots = self._engine.slots
        self._tally.set("kvpool_slots", slots.num_free, state="free")
        self._tally.set("kvpool_slots", slots.num_held, state="held")
        self._tally.set("kvpool_slots", slots.num_quarantined, state="quarantined")
