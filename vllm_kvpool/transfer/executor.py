"""The engine thread of the worker part; it decides, lanes perform.

    model thread ──post──▶ inbox ──▶ engine thread ──Batch──▶ lane inbox ──▶ lane
         ▲────── reports (drain) ──────┘   ▲──────────── BatchDone ───────────┘

The engine thread owns the engine and the planner. A lane inbox holds at most `LaneLimits.batches`;
the engine's inbox holds as many answers and the plans of steps not yet taken. All threads are
daemons.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from vllm_kvpool.identity.keys import Namespace
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.staging.devices import Fence
from vllm_kvpool.transfer.drop_log import DropLog
from vllm_kvpool.transfer.engine import Command, Engine, Event, Message
from vllm_kvpool.transfer.graph import Batch, BatchDone, BatchHung
from vllm_kvpool.transfer.lane_pool import LANE_JOIN_S, LanePool, Perform
from vllm_kvpool.transfer.open_jobs import OpenJobs
from vllm_kvpool.transfer.ops import (
    NO_STORE,
    Ask,
    BorrowerGone,
    DropSaves,
    Flush,
    HandOverProgress,
    LaneName,
    LenderGone,
    Lent,
    LoadJob,
    LoadPlan,
    PrefetchPlan,
    Report,
    Returned,
    SaveJob,
    SavePlan,
    SavesDropped,
    TierHealth,
    TimePassed,
)
from vllm_kvpool.transfer.planner import Planner
from vllm_kvpool.transfer.replicas import ReplicaExchange
from vllm_kvpool.transfer.trace import NO_TRACE, Instant, Level, RecordSpan, Trace, no_span

logger = logging.getLogger(__name__)


class Gauges:
    """Sets the engine's levels and counts in the metrics; logs cells that tiers did not take."""

    def __init__(self, engine: Engine, registry: MetricsRegistry, trace: Trace) -> None:
        self._engine = engine
        self._registry = registry
        self._trace = trace
        self._num_untraced = 0
        self._drop_log = DropLog([tier.name for tier in engine.context.tiers])

    def update(self, now: float) -> None:
        """Set the levels and add the counts since the last call."""
        context, registry, trace = self._engine.context, self._registry, self._trace
        slots = context.host_cache.slots
        registry.set("kvpool_slots", slots.num_free, state="free")
        read_by_hung = len(self._engine.hung_calls.slots_read)
        quarantined = slots.num_quarantined + read_by_hung
        registry.set("kvpool_slots", slots.num_held - read_by_hung, state="held")
        registry.set("kvpool_slots", quarantined, state="quarantined")
        trace.add(Level(now, "free slots", slots.num_free))
        for lane in context.scheduler.lanes.values():
            name = lane.key
            assert isinstance(name, LaneName)
            tier = NO_STORE.get(name.tier) or context.tiers[name.tier].name
            registry.set("kvpool_queue_cells", lane.num_ready, lane=name.kind.value, tier=tier)
            trace.add(Level(now, f"{name.kind.value} {tier}", lane.num_ready))
        context.fill(registry)
        self._drop_log.tell(context.drops, now)
        dropped = trace.dropped
        if dropped > self._num_untraced:
            registry.add("kvpool_trace_dropped", dropped - self._num_untraced)
        self._num_untraced = dropped

    def trace_tier(self, tier: int, *, is_up: bool) -> None:
        """Note in the trace that a tier goes down or comes up, before the engine hears of it."""
        context, what = self._engine.context, "tier up" if is_up else "tier down"
        if is_up != context.health[tier].is_up:
            self._trace.add(Instant(time.monotonic(), what, tier=context.tiers[tier].name))


IDLE_TICK_S = 0.5
WATCH_S = 0.25
GAUGE_EVERY_S = 0.05
CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Close:
    """Let saves finish until `deadline` (monotonic seconds), then end."""

    deadline: float


@dataclass(frozen=True, slots=True)
class UseNamespace:
    """Name the cells of later plans in this namespace, those of drafts by this drafter."""

    namespace: Namespace
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class Fenced:
    """A plan whose pages may be touched after its fence alone."""

    plan: LoadPlan | SavePlan
    fence: Fence


Plan = LoadPlan | SavePlan | PrefetchPlan
Post = Plan | Fenced | Command | Message | LenderGone | BorrowerGone | UseNamespace | Close


class NoticeSender(Protocol):
    """Tells other engines how far prompts are stored. Never blocks."""

    def tell(self, topic: bytes, stored: int, ended: int | None) -> None:
        """Tell a hand-over's progress; engine thread."""

    def close(self) -> None:
        """Tell that nothing more is stored: the engine has failed."""


class Executor:
    """Runs an engine on a thread of its own, and its lanes.

    `post`, `drain` and `wait` are for the model's thread and never wait for a store; `close` is
    called once. `lanes` is the number of threads of each lane; each calls `on_lane_start` first.
    `on_hung` is called on the engine thread with the lane of a call past `call_timeout_s`.
    """

    def __init__(
        self,
        engine: Engine,
        planner: Planner,
        perform: Perform,
        lanes: dict[LaneName, int],
        registry: MetricsRegistry,
        trace: Trace = NO_TRACE,
        call_timeout_s: float = CALL_TIMEOUT_S,
        on_hung: Callable[[LaneName], None] = lambda lane: None,
        on_lane_start: Callable[[], None] = lambda: None,
        exchange: ReplicaExchange | None = None,
        notices: NoticeSender | None = None,
        record_span: RecordSpan = no_span,
    ) -> None:
        self._exchange = exchange
        self._notices = notices
        self._engine = engine
        self._planner = planner
        self._registry = registry
        self._inbox: SimpleQueue[Post | BatchDone] = SimpleQueue()
        # The engine thread appends, the model's takes, and is woken while it waits.
        self._reports: deque[Report] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._waiting = False
        self._started: list[Batch] = []
        self._unpublished: list[Report] = []
        self._jobs = OpenJobs(registry, trace, record_span, planner.chunk_tokens)
        self._gauges = Gauges(engine, registry, trace)
        self._next_watch = self._next_gauge = 0.0
        self._lanes = LanePool(
            lanes, perform, self._inbox, registry, call_timeout_s, on_hung, on_lane_start
        )
        self._thread = threading.Thread(target=self._run, name="kvpool-engine", daemon=True)
        self._thread.start()

    def post(self, message: Post) -> None:
        """Hand a plan or a command to the engine thread."""
        self._inbox.put(message)

    def drain(self) -> list[Report]:
        """Return the reports since the last call, in order."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def wait(self, ready: Callable[[Sequence[Report]], bool], timeout_s: float) -> bool:
        """Block until `ready` holds for the reports not yet drained, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._waiting = True  # before reports are read: `_publish` sees it
        try:
            while not ready(list(self._reports)):
                self._wake.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return ready(list(self._reports))
        finally:
            self._waiting = False
        return True

    def close(self, timeout_s: float) -> bool:
        """Let saves finish for at most `timeout_s`, then end all threads.

        Returns whether every lane has ended and no store call uses its memory: then it may be
        freed.
        """
        self._inbox.put(Close(time.monotonic() + timeout_s))
        self._thread.join(timeout_s + LANE_JOIN_S)
        return self._lanes.join(LANE_JOIN_S)

    # The engine thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            logger.exception(
                "kvpool: the transfer engine failed; this process loads and saves nothing until "
                "vLLM restarts"
            )
            self._registry.add("kvpool_failures", kind="engine")
            if self._exchange is not None:
                self._exchange.close()
            if self._notices is not None:
                self._notices.close()
            self._lanes.end()
            self._serve_without_engine()
        else:
            self._lanes.end()

    def _has_to_save(self) -> bool:
        """Return True if saves are in progress, or dirty cells are lent or being loaded."""
        return bool(self._engine.num_saves or self._engine.saves.num_cells)

    def _serve(self) -> None:
        closing: float | None = None
        while closing is None or (time.monotonic() < closing and self._has_to_save()):
            message = self._next_message(closing)
            match message:
                case BatchDone(batch):
                    if batch in self._engine.running or self._lanes.take_back(batch):
                        self._step(message)
                case LoadPlan() | SavePlan() | PrefetchPlan():
                    self._step(self._as_job(message))
                case Fenced():
                    job = self._as_job(message.plan)
                    assert isinstance(job, LoadJob | SaveJob), job
                    self._step(job._replace(fence=message.fence))
                case None:
                    self._step(TimePassed())
                case Close():
                    closing = message.deadline
                    self._step(Flush())
                case TierHealth(tier, is_up):
                    self._gauges.trace_tier(tier, is_up=is_up)
                    self._step(message)
                case UseNamespace():
                    self._planner = self._planner.named(message.namespace, message.drafter)
                case _:
                    self._step(message)
            self._watch()
        if num_cells := self._engine.saves.num_cells:
            logger.warning(
                "kvpool: %d cells had not reached every store before the process ended "
                "(shutdown_timeout_s)",
                num_cells,
            )
        self._step(DropSaves())
        self._dispatch()
        self._gauges.update(time.monotonic())

    def _serve_without_engine(self) -> None:
        """Report every job as failed once no lane can write its pages: the engine has failed.

        A copy that hangs delays the jobs of the blocks that it writes, and no others.
        """
        hanging = self._lanes.leave_copies()
        self._publish(self._unpublished)  # reports from before the failure hold
        self._publish(list(self._jobs.fail_gathered()))
        while True:
            hanging = {lane: batch for lane, batch in hanging.items() if lane.thread.is_alive()}
            written = {block for batch in hanging.values() for block in _blocks_of(batch)}
            self._publish(list(self._jobs.fail_without(written)))
            try:
                message = self._inbox.get(timeout=WATCH_S if hanging else None)
            except Empty:
                continue
            if isinstance(message, Close):
                return
            if isinstance(message, Fenced):
                message = message.plan
            if isinstance(message, LoadPlan | SavePlan):
                self._jobs.open(message)
            elif isinstance(message, DropSaves) and message.generation is not None:
                self._publish([SavesDropped(message.generation)])

    def _next_message(self, closing: float | None) -> Post | BatchDone | None:
        timeout_s = 0.0
        if self._inbox.empty():
            timeout_s = WATCH_S if self._engine.running else IDLE_TICK_S
            for due in (self._engine.next_deadline(), closing):
                if due is not None:
                    timeout_s = max(0.0, min(timeout_s, due - time.monotonic()))
        self._dispatch()
        try:
            return self._inbox.get(timeout=timeout_s)
        except Empty:
            return None

    def _dispatch(self) -> None:
        """Start batches and publish reports: last, since threads that wake need the GIL."""
        for batch in self._started:
            self._lanes.start(batch)
        self._started.clear()
        self._publish(self._unpublished)
        self._unpublished.clear()

    def _as_job(self, plan: Plan) -> Event:
        match plan:
            case LoadPlan():
                self._jobs.open(plan)
                return self._planner.begin_load(plan)
            case SavePlan():
                self._jobs.open(plan)
                return self._planner.begin_save(plan)
            case PrefetchPlan():
                return self._planner.prefetch(plan)

    def _step(self, event: Event) -> None:
        for action in self._engine.step(event, time.monotonic()):
            if isinstance(action, Batch):
                self._started.append(action)
            elif isinstance(action, Ask | Lent | Returned):
                if self._exchange is not None:
                    self._exchange.send(action)
            elif isinstance(action, HandOverProgress):
                if self._notices is not None:
                    self._notices.tell(*action)
            else:
                self._unpublished.append(action)
                self._jobs.account(action)

    def _publish(self, reports: Sequence[Report]) -> None:
        self._reports.extend(reports)
        if self._waiting and reports:
            self._wake.put(None)

    def _watch(self) -> None:
        """Find hanging lanes every `WATCH_S`, update gauges every `GAUGE_EVERY_S`."""
        now = time.monotonic()
        if now >= self._next_watch:
            self._next_watch = now + WATCH_S
            for batch in self._lanes.leave_hung(self._engine.running, now):
                self._step(BatchHung(batch))
        if now >= self._next_gauge:
            self._next_gauge = now + GAUGE_EVERY_S
            self._gauges.update(now)


def _blocks_of(batch: Batch) -> set[int]:
    """Return the blocks that a batch of copies may write."""
    every = (pages for part in batch.parts for pages in part.slab.pages)
    return {block for pages in every for block in pages.block_ids}
