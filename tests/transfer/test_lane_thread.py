"""A thread of a lane that is looked at while it works, and left with what it is doing."""

import logging
import random
import threading
import time
from collections import Counter
from queue import SimpleQueue

import pytest

from tests.support.faults import FaultyStore
from tests.transfer.test_executor import EXECUTOR_LOG, LIMIT_S, Rank, all_done, one_cell_plan
from tests.transfer.test_executor_stuck import (
    GET,
    NEVER_S,
    SINGLE,
    check_is_clean,
    ended,
    threads_of,
    wait_for,
)
from vllm_kvpool.storage import breaker
from vllm_kvpool.storage.memory import MemoryStore
from vllm_kvpool.transfer import executor, lanes
from vllm_kvpool.transfer.graph import Batch, BatchDone
from vllm_kvpool.transfer.lanes import LaneThread
from vllm_kvpool.transfer.ops import CellOutcome, LoadPlan


class Deed:
    """What a thread of a lane does: waits until it may end."""

    def __init__(self) -> None:
        self.entered: SimpleQueue[Batch] = SimpleQueue()
        self.may_end: SimpleQueue[None] = SimpleQueue()

    def __call__(self, batch: Batch) -> tuple[CellOutcome, ...]:
        self.entered.put(batch)
        self.may_end.get(timeout=LIMIT_S)
        return ()


BATCHES = [Batch(GET, (), 0) for _ in range(4)]


def test_a_thread_tells_what_it_is_doing_and_takes_nothing_else_when_it_is_left() -> None:
    deed = Deed()
    inbox: SimpleQueue[Batch | None] = SimpleQueue()
    outbox: SimpleQueue[object] = SimpleQueue()
    lane = LaneThread(GET, "kvpool-test", deed, inbox, outbox)
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
            assert not lane.abandon(BATCHES[0])  # it is past that
        if number == 2:
            assert lane.abandon(busy[0])
            inbox.put(BATCHES[3])
        deed.may_end.put(None)
        assert outbox.get(timeout=LIMIT_S) == BatchDone(BATCHES[number], ())
    assert ended([lane.thread])
    assert lane.has_ended
    assert lane.busy_since() is None
    assert inbox.get_nowait() is BATCHES[3]


def test_a_work_that_has_only_just_been_taken_has_not_lasted_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor as long as the one before it."""
    looks: list[tuple[Batch, float] | None] = []

    class Clock:
        def monotonic(self) -> float:
            looks.append(lane.busy_since())
            return 7.0

    monkeypatch.setattr(lanes, "time", Clock())
    inbox: SimpleQueue[Batch | None] = SimpleQueue()
    outbox: SimpleQueue[object] = SimpleQueue()
    lane = LaneThread(GET, "kvpool-test", lambda batch: (), inbox, outbox)
    for number in range(3):
        inbox.put(BATCHES[number])
        assert outbox.get(timeout=LIMIT_S) == BatchDone(BATCHES[number], ())
    inbox.put(None)
    assert ended([lane.thread])
    assert looks == [None] * 3


def test_looks_at_works_that_end_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load is reported once, however many calls are given up; no thread is lost."""
    num_loads = 1500
    monkeypatch.setattr(executor, "WATCH_S", 0.0)
    monkeypatch.setattr(executor, "MAX_HUNG", 50)
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE_S", 0.0)
    chance = random.Random(0)

    def perform(batch: Batch) -> tuple[CellOutcome, ...]:
        if batch.lane == GET:
            time.sleep(chance.choice((0.0, 0.0005, 0.001, 0.0015)))
        return all_done(batch)

    logging.getLogger(EXECUTOR_LOG).setLevel(logging.CRITICAL)
    rank = Rank(
        FaultyStore(MemoryStore("", 1 << 20)),
        num_slots=64,
        perform=perform,
        one_cell=True,
        lanes=SINGLE | {GET: 2},
        call_timeout_s=0.001,
    )
    try:
        for job in range(num_loads):
            rank.executor.post(one_cell_plan(LoadPlan, job))
        reports = rank.reports(num_loads)
        rank.executor._call_timeout_s = NEVER_S
        wait_for(lambda: not rank.executor._hung)
        assert len(threads_of(rank, GET)) == 2
        check_is_clean(rank)
    finally:
        logging.getLogger(EXECUTOR_LOG).setLevel(logging.NOTSET)
    reports += rank.executor.drain()
    assert Counter(report.job_id for report in reports) == dict.fromkeys(range(num_loads), 1)
    given_up = rank.registry.snapshot()["kvpool_failures{kind=store_stuck}"]
    assert 0 < given_up < num_loads
    assert not any(thread.name.startswith("kvpool-get") for thread in threading.enumerate())
