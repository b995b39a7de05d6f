"""The threads of all lanes, and those that a store call holds up.

A store call past its time limit is left behind with its thread: it counts as failed, and its memory
is out of use until it returns (`engine.py: HungCalls`). Another thread takes the thread's place
while no more than `MAX_HUNG` of its lane hang. Batches of a lane without a thread fail at once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import islice, repeat, starmap
from queue import SimpleQueue
from typing import Any

from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.transfer.graph import Batch, BatchDone
from vllm_kvpool.transfer.ops import CellOutcome, LaneName, OpKind, Outcome

logger = logging.getLogger(__name__)

LANE_JOIN_S = 0.5
COPY_JOIN_S = 5.0  # for a batch of copies, which takes milliseconds
MAX_HUNG = 2  # threads of a lane that are replaced while they hang in a store
CALLS_OF = {OpKind.PUT: 2}  # store calls of one batch, where not 1

Perform = Callable[[Batch], Sequence[Outcome]]


class LaneThread:
    """Performs the batches of its inbox one by one.

    Whatever exception ends a batch, its cells have failed and the thread goes on: a SystemExit,
    too, or an exception that was thrown into the thread from outside. It calls `on_start` first; if
    that fails, so does each batch until it succeeds. A thread that is abandoned ends after it has
    reported its batch.
    """

    def __init__(
        self,
        lane: LaneName,
        name: str,
        perform: Perform,
        inbox: SimpleQueue[Batch | None],
        outbox: SimpleQueue[Any],
        registry: MetricsRegistry,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.lane = lane
        self._lock = threading.Lock()  # held to end a batch and to abandon the thread
        self._abandoned = False
        self._since: float | None = None  # when the present batch began
        self._taken: deque[Batch | None] = deque()  # the present batch
        self._inbox = starmap(inbox.get, repeat(()))
        self._perform = perform
        self._outbox = outbox
        self._registry = registry
        self._on_start: Callable[[], None] | None = on_start
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def busy_since(self) -> tuple[Batch, float] | None:
        """Return the present batch and when it began (monotonic seconds); any thread may call."""
        with self._lock:
            batch, since = self._taken[0] if self._taken else None, self._since
        return None if batch is None or since is None else (batch, since)

    def abandon(self, batch: Batch) -> bool:
        """End the thread after this batch; False if it has already done it."""
        with self._lock:
            if not self._taken or self._taken[0] is not batch:
                return False
            self._abandoned = True
        return True

    def _run(self) -> None:
        while True:
            try:
                self._serve()
                return
            except BaseException:
                self._registry.add("kvpool_failures", kind="lane")
                logger.exception("kvpool: lane %s: a batch failed; the lane goes on", self.lane)
                if (batch := self._take()) is None:
                    return
                self._end(batch, [CellOutcome.FAILED] * len(batch.ops))

    def _serve(self) -> None:
        if self._on_start is not None:
            self._on_start()
            self._on_start = None
        while not self._abandoned and (batch := self._take()) is not None:
            self._since = time.monotonic()
            self._end(batch, self._perform(batch))

    def _take(self) -> Batch | None:
        """Return the present batch, or else the next one; None to end."""
        if not self._taken:
            # One call into C: an exception thrown into this thread comes before or after it, so a
            # batch is in the inbox or in `_taken`.
            self._taken.extend(islice(self._inbox, 1))
        return self._taken[0]

    def _end(self, batch: Batch, outcomes: Sequence[Outcome]) -> None:
        self._outbox.put(BatchDone(batch, outcomes))
        with self._lock:
            self._since = None
            self._taken.clear()


class LanePool:
    """Starts batches on the threads of their lanes, and replaces threads that hang.

    The engine thread owns it. `lanes` is the number of threads of each lane; each calls
    `on_lane_start` first. Answers go to `outbox`. `on_hung` is called with the lane of a store call
    that runs for more than `call_timeout_s`.
    """

    def __init__(
        self,
        lanes: Mapping[LaneName, int],
        perform: Perform,
        outbox: SimpleQueue[Any],
        registry: MetricsRegistry,
        call_timeout_s: float,
        on_hung: Callable[[LaneName], None],
        on_lane_start: Callable[[], None],
    ) -> None:
        self.call_timeout_s = call_timeout_s
        self.threads: list[LaneThread] = []
        self.hung: dict[Batch, LaneThread] = {}
        """Threads left behind, by the batch that each performs."""
        self._counts = lanes
        self._perform = perform
        self._outbox = outbox
        self._registry = registry
        self._on_hung = on_hung
        self._on_lane_start = on_lane_start
        self._inboxes: dict[LaneName, SimpleQueue[Batch | None]] = {}
        self._dead: set[LaneName] = set()  # lanes without a thread
        for lane, count in lanes.items():
            self._inboxes[lane] = SimpleQueue()
            for _ in range(count):
                self._add_thread(lane)

    def start(self, batch: Batch) -> None:
        """Give a batch to its lane; `BatchDone` follows."""
        if batch.lane in self._dead:
            self._fail(batch)
        else:
            self._inboxes[batch.lane].put(batch)

    def leave_hung(self, running: Container[Batch], now: float) -> list[Batch]:
        """Leave threads behind that hang in a store call; returns their batches.

        Args:
            running: the batches whose end the engine waits for.
            now: monotonic seconds.
        """
        stores = [thread for thread in self.threads if thread.lane.tier >= 0]
        return [batch for each in stores if (batch := self._leave_if_hung(each, running, now))]

    def _leave_if_hung(
        self, thread: LaneThread, running: Container[Batch], now: float
    ) -> Batch | None:
        busy, lane = thread.busy_since(), thread.lane
        limit_s = self.call_timeout_s * CALLS_OF.get(lane.kind, 1)
        if busy is None or now - busy[1] <= limit_s:
            return None
        batch, began = busy
        if batch not in running or not thread.abandon(batch):
            return None
        self.threads.remove(thread)
        self.hung[batch] = thread
        self._registry.add("kvpool_failures", kind="store_stuck")
        logger.warning(
            "kvpool: lane %s: a store call runs for %.1f s, past call_timeout_s=%g; its cells "
            "count as failed, its memory stays reserved until it returns",
            lane,
            now - began,
            self.call_timeout_s,
        )
        self._on_hung(lane)
        if sum(other.lane == lane for other in self.hung.values()) <= MAX_HUNG:
            self._replace_thread(lane)
        if not any(other.lane == lane for other in self.threads):
            self._close_lane(lane)
        return batch

    def take_back(self, batch: Batch) -> bool:
        """Take back the thread of a call that has returned; False if the call had not hung."""
        thread = self.hung.pop(batch, None)
        if thread is None:
            return False
        lane = thread.lane
        logger.info(
            "kvpool: lane %s: a call past call_timeout_s=%g has returned", lane, self.call_timeout_s
        )
        if sum(other.lane == lane for other in self.threads) < self._counts[lane]:
            self._replace_thread(lane)
        if any(other.lane == lane for other in self.threads):
            self._dead.discard(lane)
        return True

    def end(self) -> None:
        """Let each thread end after the batches that it has."""
        for thread in self.threads:
            self._inboxes[thread.lane].put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of all threads; False if one still runs. Any thread may call."""
        deadline = time.monotonic() + timeout_s
        threads = [each.thread for each in (*self.threads, *self.hung.values())]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def leave_copies(self) -> dict[LaneThread, Batch]:
        """Wait `COPY_JOIN_S` for copies into pages; returns those that have not ended.

        Their threads take no other batch.
        """
        hanging: dict[LaneThread, Batch] = {}
        deadline = time.monotonic() + COPY_JOIN_S
        for lane in [lane for lane in self.threads if lane.lane.kind is OpKind.SCATTER]:
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

    def _add_thread(self, lane: LaneName) -> None:
        name = f"kvpool-{lane}-{sum(other.lane == lane for other in self.threads)}"
        queues = self._inboxes[lane], self._outbox
        self.threads.append(
            LaneThread(lane, name, self._perform, *queues, self._registry, self._on_lane_start)
        )

    def _replace_thread(self, lane: LaneName) -> None:
        """Add a thread to a lane, unless the process may have no more threads."""
        try:
            self._add_thread(lane)
        except RuntimeError as error:
            logger.warning("kvpool: lane %s: a hung thread is not replaced: %s", lane, error)

    def _close_lane(self, lane: LaneName) -> None:
        """Fail the batches that wait for a lane without a thread."""
        self._dead.add(lane)
        inbox = self._inboxes[lane]
        while not inbox.empty():
            batch = inbox.get()
            if batch is not None:
                self._fail(batch)

    def _fail(self, batch: Batch) -> None:
        """Answer a batch that no lane will."""
        self._outbox.put(BatchDone(batch, [CellOutcome.FAILED] * len(batch.ops)))
