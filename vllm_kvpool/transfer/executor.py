"""The threads of the worker side: one engine thread that decides, and lanes that perform.

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
from vllm_kvpool.transfer.engine import Engine, Event, Message
from vllm_kvpool.transfer.graph import Batch, BatchDone, BatchHung
from vllm_kvpool.transfer.lanes import LaneThread, Perform
from vllm_kvpool.transfer.ops import (
    NO_STORE,
    STORED,
    Ask,
    BorrowerGone,
    CancelRequest,
    CellOutcome,
    DropSaves,
    Flush,
    HandOverEnd,
    HandOverProgress,
    HostCacheChange,
    JobId,
    Landed,
    LaneName,
    LenderGone,
    Lent,
    LoadDone,
    LoadJob,
    LoadPlan,
    OpKind,
    PrefetchPlan,
    Report,
    Returned,
    SaveDone,
    SaveGathered,
    SaveJob,
    SavePlan,
    SavesDropped,
    SavesStalled,
    SpanLoaded,
    TierHealth,
    TimePassed,
    given_up,
    lost_save,
)
from vllm_kvpool.transfer.planner import Planner
from vllm_kvpool.transfer.trace import NO_TRACE, Instant, Level, RecordSpan, Trace, no_span

logger = logging.getLogger(__name__)


class Gauges:
    """Sets the engine's levels and counts in the metrics; logs tiers that go down or up, and cells
    that tiers did not take."""

    def __init__(self, engine: Engine, registry: MetricsRegistry, trace: Trace) -> None:
        self._engine = engine
        self._registry = registry
        self._trace = trace
        self._up = [True] * len(engine.context.tiers)
        self._num_untraced = 0
        self._drop_log = DropLog([tier.name for tier in engine.context.tiers])

    def update(self, now: float) -> None:
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
        self._log_tier_changes(now)
        self._drop_log.tell(context.drops, now)
        dropped = trace.dropped
        if dropped > self._num_untraced:
            registry.add("kvpool_trace_dropped", dropped - self._num_untraced)
        self._num_untraced = dropped

    def _log_tier_changes(self, now: float) -> None:
        for place, tier in enumerate(self._engine.context.tiers):
            up = not self._engine.context.breakers[place].is_open(now)
            if up != self._up[place]:
                self._up[place] = up
                self._trace.add(Instant(now, "tier up" if up else "tier down", tier=tier.name))
                what = "available again" if up else "calls fail; it is skipped until it answers"
                logger.warning("kvpool: tier %s: %s", tier.name, what)


IDLE_TICK_S = 0.5
WATCH_S = 0.25
GAUGE_EVERY_S = 0.05
LANE_JOIN_S = 0.5
COPY_JOIN_S = 5.0  # for a batch of copies, which takes milliseconds
MAX_HUNG = 2  # threads of a lane that are replaced while they hang in a store
CALL_TIMEOUT_S = 10.0
NOT_SAVED = frozenset(CellOutcome) - STORED
CALLS_OF = {OpKind.PUT: 2}  # store calls of one batch, where not 1


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
Post = (
    Plan
    | Fenced
    | CancelRequest
    | Landed
    | DropSaves
    | HandOverEnd
    | TierHealth
    | Message
    | LenderGone
    | BorrowerGone
    | UseNamespace
    | Close
)


@dataclass(slots=True)
class _OpenJob:
    """A load or save without its last report."""

    plan: LoadPlan | SavePlan
    began: float
    uses_pages: bool = True  # a save does until it is gathered


class Exchange(Protocol):
    """Sends messages to ranks on this host that hold the same KV. Never blocks."""

    def send(self, message: Message) -> None:
        """Send a message; engine thread."""

    def close(self) -> None:
        """The engine has failed: neither lend nor borrow any more."""


class Notices(Protocol):
    """Tells other engines how far prompts are stored. Never blocks."""

    def tell(self, topic: bytes, stored: int, ended: int | None) -> None:
        """Tell a hand-over's progress; engine thread."""

    def close(self) -> None:
        """The engine has failed: nothing more is stored."""


class Executor:
    """Runs an engine on a thread of its own, and its lanes.

    A lane thread that hangs in a store call past `call_timeout_s` is left behind, and replaced
    while no more than `MAX_HUNG` of its lane hang. Batches of a lane without a thread fail at once.
    The memory of a call that hangs is out of use until it returns (`engine.py: HungCalls`).

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
        exchange: Exchange | None = None,
        notices: Notices | None = None,
        record_span: RecordSpan = no_span,
    ) -> None:
        self._exchange = exchange
        self._notices = notices
        self._record_span = record_span
        self._on_lane_start = on_lane_start
        self._call_timeout_s = call_timeout_s
        self._on_hung = on_hung
        self._engine = engine
        self._planner = planner
        self._perform = perform
        self._registry = registry
        self._trace = trace
        self._inbox: SimpleQueue[Post | BatchDone] = SimpleQueue()
        self._open: dict[JobId, _OpenJob] = {}  # not reported yet; engine thread
        self._hung: dict[Batch, LaneThread] = {}  # threads left behind
        # The engine thread appends, the model's takes, and is woken while it waits.
        self._reports: deque[Report] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._waiting = False
        self._started: list[Batch] = []
        self._unpublished: list[Report] = []
        self._gauges = Gauges(engine, registry, trace)
        self._dead_lanes: set[LaneName] = set()  # without a thread
        self._next_watch = self._next_gauge = 0.0
        self._lane_counts = lanes
        self._lane_inboxes: dict[LaneName, SimpleQueue[Batch | None]] = {}
        self._lanes: list[LaneThread] = []
        for lane, count in lanes.items():
            self._lane_inboxes[lane] = SimpleQueue()
            for _ in range(count):
                self._add_lane(lane)
        self._thread = threading.Thread(target=self._run, name="kvpool-engine", daemon=True)
        self._thread.start()

    def post(self, message: Post) -> None:
        """Hand a plan or a command to the engine thread."""
        self._inbox.put(message)

    def drain(self) -> list[Report]:
        """The reports since the last call, in order."""
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
        deadline = time.monotonic() + LANE_JOIN_S
        lanes = [*self._lanes, *self._hung.values()]
        for lane in lanes:
            lane.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(lane.thread.is_alive() for lane in lanes)

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
            self._end_lanes()
            self._serve_without_engine()
        else:
            self._end_lanes()

    def _serve(self) -> None:
        closing: float | None = None
        while closing is None or (time.monotonic() < closing and self._engine.num_saves):
            message = self._next_message(closing)
            match message:
                case BatchDone(batch):
                    if batch in self._engine.running:
                        self._step(message)
                    elif batch in self._hung:
                        self._on_late_return(message)
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

    def _end_lanes(self) -> None:
        for lane in self._lanes:
            self._lane_inboxes[lane.lane].put(None)

    def _serve_without_engine(self) -> None:
        """The engine has failed: report every job as failed, when no lane can write its pages.

        A copy that hangs delays the jobs of the blocks that it writes, and no others.
        """
        hanging = self._leave_hanging_copies()
        self._publish(self._unpublished)  # reports from before the failure hold
        for job in [job for job in self._open.values() if not job.uses_pages]:
            assert isinstance(job.plan, SavePlan), job
            del self._open[job.plan.job_id]
            self._publish([lost_save(job.plan, CellOutcome.FAILED)])
        while True:
            hanging = {lane: batch for lane, batch in hanging.items() if lane.thread.is_alive()}
            written = {block for batch in hanging.values() for block in _blocks_of(batch)}
            for job in list(self._open.values()):
                plan = job.plan
                if not any(written.intersection(pages.block_ids) for pages in plan.pages):
                    del self._open[plan.job_id]
                    self._publish(given_up(plan, CellOutcome.FAILED))
            try:
                message = self._inbox.get(timeout=WATCH_S if hanging else None)
            except Empty:
                continue
            if isinstance(message, Close):
                return
            if isinstance(message, Fenced):
                message = message.plan
            if isinstance(message, LoadPlan | SavePlan):
                self._open[message.job_id] = _OpenJob(message, time.monotonic())
            elif isinstance(message, DropSaves) and message.generation is not None:
                self._publish([SavesDropped(message.generation)])

    def _leave_hanging_copies(self) -> dict[LaneThread, Batch]:
        """Wait `COPY_JOIN_S` for copies into pages; returns those that have not ended.

        Their threads take no other batch.
        """
        hanging: dict[LaneThread, Batch] = {}
        deadline = time.monotonic() + COPY_JOIN_S
        for lane in [lane for lane in self._lanes if lane.lane.kind is OpKind.SCATTER]:
            lane.thread.join(max(0.0, deadline - time.monotonic()))
            while lane.thread.is_alive() and lane not in hanging:
                busy = lane.busy_since()
                if busy is not None and lane.abandon(busy[0]):
                    hanging[lane] = busy[0]
                    logger.error(
                        "kvpool: lane %s: a copy into pages has not ended within %g s; its blocks "
                        "stay in use until it does",
                        lane.lane,
                        COPY_JOIN_S,
                    )
                else:
                    lane.thread.join(LANE_JOIN_S)  # it takes the next batch, or ends
        return hanging

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
            if batch.lane in self._dead_lanes:
                self._fail(batch)
            else:
                self._lane_inboxes[batch.lane].put(batch)
        self._started.clear()
        if self._unpublished:
            self._publish(self._unpublished)
            self._unpublished = []

    def _as_job(self, plan: Plan) -> Event:
        match plan:
            case LoadPlan():
                self._open[plan.job_id] = _OpenJob(plan, time.monotonic())
                return self._planner.begin_load(plan)
            case SavePlan():
                self._open[plan.job_id] = _OpenJob(plan, time.monotonic())
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
                self._account(action)

    def _account(self, report: Report) -> None:
        match report:
            case SaveDone():
                now, job = time.monotonic(), self._open.pop(report.job_id)
                if report.outcomes and not report.lost:
                    self._registry.observe("kvpool_save_seconds", now - job.began)
                self._span_of_save(job, report, now)
                for outcome, count in report.outcomes:
                    if outcome in NOT_SAVED:
                        self._registry.add("kvpool_failures", count, kind=f"save_{outcome.value}")
                self._trace.add(Instant(now, "save done", report.job_id, report.request_id))
            case LoadDone():
                now = time.monotonic()
                began = self._open.pop(report.job_id).began
                self._registry.observe("kvpool_load_seconds", now - began)
                name = f"load {report.reason.value}"
                self._trace.add(Instant(now, name, report.job_id, report.request_id))
            case SaveGathered():
                self._open[report.job_id].uses_pages = False
            case HostCacheChange() | SavesDropped() | SavesStalled() | SpanLoaded():
                pass

    def _span_of_save(self, job: _OpenJob, done: SaveDone, now: float) -> None:
        if isinstance(job.plan, SavePlan) and job.plan.trace_headers and done.outcomes:
            attributes = {
                "kvpool.tokens": len(job.plan.hashes) * self._planner.chunk_tokens,
                "kvpool.stored_cells": sum(n for each, n in done.outcomes if each in STORED),
                "kvpool.lost_cells": sum(n for each, n in done.outcomes if each in NOT_SAVED),
            }
            self._record_span(job.plan.trace_headers, "kvpool.save", now - job.began, attributes)

    def _publish(self, reports: Sequence[Report]) -> None:
        self._reports.extend(reports)
        if self._waiting:
            self._wake.put(None)

    # Lanes

    def _add_lane(self, lane: LaneName) -> None:
        name = f"kvpool-{lane}-{sum(other.lane == lane for other in self._lanes)}"
        queues = self._lane_inboxes[lane], self._inbox
        self._lanes.append(
            LaneThread(lane, name, self._perform, *queues, self._registry, self._on_lane_start)
        )

    def _watch(self) -> None:
        """Find hanging lanes every `WATCH_S`, update gauges every `GAUGE_EVERY_S`."""
        now = time.monotonic()
        if now >= self._next_watch:
            self._next_watch = now + WATCH_S
            for lane in [x for x in self._lanes if x.lane.tier >= 0]:
                self._check_timeouts(lane, now)
        if now >= self._next_gauge:
            self._next_gauge = now + GAUGE_EVERY_S
            self._gauges.update(now)

    def _check_timeouts(self, lane: LaneThread, now: float) -> None:
        """Leave a thread behind that hangs in a store call."""
        busy = lane.busy_since()
        limit_s = self._call_timeout_s * CALLS_OF.get(lane.lane.kind, 1)
        if busy is None or now - busy[1] <= limit_s:
            return
        batch, began = busy
        if batch not in self._engine.running or not lane.abandon(batch):
            return
        self._lanes.remove(lane)
        self._hung[batch] = lane
        self._registry.add("kvpool_failures", kind="store_stuck")
        logger.warning(
            "kvpool: lane %s: a store call runs for %.1f s, past call_timeout_s=%g; its cells "
            "count as failed, its memory stays reserved until it returns",
            lane.lane,
            now - began,
            self._call_timeout_s,
        )
        self._on_hung(lane.lane)
        if sum(other.lane == lane.lane for other in self._hung.values()) <= MAX_HUNG:
            self._add_lane(lane.lane)
        else:
            self._close_if_empty(lane.lane)
        self._step(BatchHung(batch))

    def _on_late_return(self, done: BatchDone) -> None:
        """A call that hung has returned."""
        lane = self._hung.pop(done.batch).lane
        logger.info(
            "kvpool: lane %s: a call past call_timeout_s=%g has returned",
            lane,
            self._call_timeout_s,
        )
        if sum(other.lane == lane for other in self._lanes) < self._lane_counts[lane]:
            self._dead_lanes.discard(lane)
            self._add_lane(lane)
        self._step(done)

    def _close_if_empty(self, name: LaneName) -> None:
        """If a lane has no thread left, fail the batches that wait for one."""
        if any(lane.lane == name for lane in self._lanes):
            return
        self._dead_lanes.add(name)
        inbox = self._lane_inboxes[name]
        while not inbox.empty():
            batch = inbox.get()
            if batch is not None:
                self._fail(batch)

    def _fail(self, batch: Batch) -> None:
        """Answer a batch that no lane will."""
        self._inbox.put(BatchDone(batch, [CellOutcome.FAILED] * len(batch.ops)))


def _blocks_of(batch: Batch) -> set[int]:
    """The blocks that a batch of copies may write."""
    every = (pages for part in batch.parts for pages in part.slab.pages)
    return {block for pages in every for block in pages.block_ids}
