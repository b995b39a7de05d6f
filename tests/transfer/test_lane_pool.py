"""A lane's thread: it performs batches, and takes no more of them once it is abandoned."""

import time
from queue import SimpleQueue

import pytest

from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.transfer import lane_pool
from vllm_kvpool.transfer.graph import Batch, BatchDone
from vllm_kvpool.transfer.lane_pool import LaneThread
from vllm_kvpool.transfer.ops import CellOutcome, LaneName, OpKind

GET = LaneName(OpKind.GET, 0)
LIMIT_S = 10.0


class Deed:
    """A lane function that keeps each batch until the test lets it end."""

    def __init__(self) -> None:
        self.entered: SimpleQueue[Batch] = SimpleQueue()
        self.may_end: SimpleQueue[None] = SimpleQueue()

    def __call__(self, batch: Batch) -> tuple[CellOutcome, ...]:
        self.entered.put(batch)
        self.may_end.get(timeout=LIMIT_S)
        return ()


BATCHES = [Batch(GET, (), 0) for _ in range(4)]


def test_a_thread_tells_what_it_is_doing_and_takes_nothing_else_when_it_is_abandoned() -> None:
    deed = Deed()
    inbox: SimpleQueue[Batch | None] = SimpleQueue()
    outbox: SimpleQueue[object] = SimpleQueue()
    lane = LaneThread(GET, "kvpool-test", deed, inbox, outbox, MetricsRegistry())
    assert lane.busy_since() is None
    for number in range(3):
        before = time.monotonic()
        inbox.put(BATCHES[number])
        assert deed.entered.get(timeout=LIMIT_S) is BATCHES[number]
        busy = lane.busy_since()
        assert busy is not None
        assert busy[0] is BATCHES[number]
        assert before <= busy[1] <= time.monotonic()
        if number == 1:
            assert not lane.abandon(BATCHES[0])  # the thread is past that point
        if number == 2:
            assert lane.abandon(busy[0])
            inbox.put(BATCHES[3])
        deed.may_end.put(None)
        assert outbox.get(timeout=LIMIT_S) == BatchDone(BATCHES[number], ())
    lane.thread.join(LIMIT_S)
    assert not lane.thread.is_alive()
    assert lane.busy_since() is None
    assert inbox.get_nowait() is BATCHES[3]


def test_a_batch_that_has_only_just_been_taken_has_not_lasted_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time of the previous batch does not count for it."""
    looks: list[tuple[Batch, float] | None] = []

    class Clock:
        def monotonic(self) -> float:
            looks.append(lane.busy_since())
            return 7.0

    monkeypatch.setattr(lane_pool, "time", Clock())
    inbox: SimpleQueue[Batch | None] = SimpleQueue()
    outbox: SimpleQueue[object] = SimpleQueue()
    lane = LaneThread(GET, "kvpool-test", lambda batch: (), inbox, outbox, MetricsRegistry())
    for number in range(3):
        inbox.put(BATCHES[number])
        assert outbox.get(timeout=LIMIT_S) == BatchDone(BATCHES[number], ())
    inbox.put(None)
    lane.thread.join(LIMIT_S)
    assert not lane.thread.is_alive()
    assert looks == [None] * 3
