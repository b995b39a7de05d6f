"""The executor: real threads from plan to report, and an end within its time."""

import logging
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from vllm_kvpool.keys import ContextRank, KeyMaker, make_namespace
from vllm_kvpool.layout.formats import from_token_content
from vllm_kvpool.layout.topology import Topology
from vllm_kvpool.metrics import Tally
from vllm_kvpool.staging.arena import SLOT_ALIGNMENT, Arena
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.staging.slots import SlotPool
from vllm_kvpool.store.memory import MemoryStore
from vllm_kvpool.testing.fakes import FakeCopier, Fault, FaultyStore
from vllm_kvpool.transfer.engine import Engine, Limits
from vllm_kvpool.transfer.executor import LANE_JOIN_S, Executor
from vllm_kvpool.transfer.lanes import LaneWork
from vllm_kvpool.transfer.ops import (
    CancelRequest,
    CellOutcome,
    DropSaves,
    JobId,
    LoadDone,
    LoadPlan,
    Op,
    OpKind,
    Report,
    SaveDone,
    SaveGathered,
    SavePlan,
)
from vllm_kvpool.transfer.planner import Planner

# Legend: L layers, B blocks, H heads, N tokens per block, C row elements.
LAYERS, BLOCKS, HEADS, BLOCK, ROW = 4, 12, 2, 16, 8
CHUNK = 32
ROW_BYTES = ROW * 2
LANES = {OpKind.GET: 2, OpKind.SCATTER: 1, OpKind.GATHER: 1, OpKind.PUT: 1, OpKind.REMOVE: 1}
LIMIT_S = 30.0
SLACK_S = 5.0  # of a machine with other things to do
HASHES = (b"\x01" * 20, b"\x02" * 20, b"\x03" * 20)
DONE = CellOutcome.DONE


class Rank:
    """One worker's executor over a store that may be shared."""

    def __init__(self, store: FaultyStore, *, copies: bool = False, num_slots: int = 16) -> None:
        self.store = store
        topology = Topology(HEADS, 1, ((0, LAYERS),), layer_span=2)
        namespace = make_namespace("model", "0" * 12)
        self.planner = Planner(
            topology,
            0,
            topology.local_cells(0, 0),
            KeyMaker(namespace, ContextRank()),
            CHUNK,
            ROW_BYTES,
            LIMIT_S,
        )
        self.pages_lbhnc = torch.zeros((LAYERS, BLOCKS, HEADS, BLOCK, ROW), dtype=torch.int16)
        self.tally = Tally()
        self.copier = FakeCopier()
        real = CpuCopier([from_token_content(layer) for layer in self.pages_lbhnc])
        copier = real if copies else self.copier
        self.work = LaneWork(
            store,
            Arena(num_slots * SLOT_ALIGNMENT, self.planner.max_cell_bytes()),
            copier,
            copier,
            CHUNK,
            True,
            self.tally,
        )
        self.engine = Engine(
            SlotPool(num_slots, 4), Limits(dict.fromkeys(OpKind, 2), op_bytes=1 << 20, op_cells=4)
        )
        self.lane_threads: set[threading.Thread] = set()
        self.executor = Executor(self.engine, self.planner, self._perform, LANES, self.tally)

    def _perform(self, op: Op) -> tuple[CellOutcome, ...]:
        self.lane_threads.add(threading.current_thread())
        return self.work.perform(op)

    def fill(self) -> None:
        self.pages_lbhnc.copy_(torch.arange(self.pages_lbhnc.numel()).view_as(self.pages_lbhnc))

    def tokens_lhtc(self, blocks: tuple[int, ...]) -> torch.Tensor:
        return self.pages_lbhnc[:, list(blocks)].transpose(1, 2).flatten(2, 3)

    def reports(self, count: int) -> list[Report]:
        assert self.executor.wait(lambda reports: len(reports) >= count, LIMIT_S)
        return self.executor.drain()


def save_plan(job: int, chunks: int, blocks: tuple[int, ...]) -> SavePlan:
    return SavePlan(JobId(job), f"r{job}", 0, HASHES[:chunks], blocks, 0)


def load_plan(job: int, blocks: tuple[int, ...], start: int, stop: int) -> LoadPlan:
    first, last = start // CHUNK, -(-stop // CHUNK)
    return LoadPlan(JobId(job), f"r{job}", first, HASHES[first:last], blocks, start, start, stop)


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    store = FaultyStore(MemoryStore("", 1 << 24))
    yield store
    store.heal()


@pytest.fixture
def rank(store: FaultyStore) -> Iterator[Rank]:
    rank = Rank(store)
    yield rank
    store.heal()
    rank.executor.close(LIMIT_S)


def test_what_one_worker_saves_another_loads(store: FaultyStore) -> None:
    writer, reader = Rank(store, copies=True), Rank(store, copies=True)
    writer.fill()
    blocks = (3, 1, 4, 0, 5, 9)
    writer.executor.post(save_plan(1, 3, blocks))
    assert writer.reports(2) == [
        SaveGathered(JobId(1), "r1"),
        SaveDone(JobId(1), "r1", ((DONE, 3 * HEADS * 2),)),
    ]
    others = (2, 7, 8, 6, 10, 11)
    reader.executor.post(load_plan(2, others[1:], BLOCK, 3 * CHUNK - 1))
    assert reader.reports(1) == [LoadDone(JobId(2), "r2", 3, DONE)]
    tokens = slice(BLOCK, 3 * CHUNK - 1)
    expected = writer.tokens_lhtc(blocks)[:, :, tokens]
    assert torch.equal(reader.tokens_lhtc(others)[:, :, tokens], expected)
    # Nothing outside the plan's tokens was written.
    assert not reader.pages_lbhnc[:, [0, 1, 2, 3, 4, 5, 9]].any()
    assert not reader.tokens_lhtc(others)[:, :, 3 * CHUNK - 1 :].any()
    for worker in (writer, reader):
        assert worker.executor.close(LIMIT_S)
        worker.engine.check()
        assert worker.engine.idle
        assert not any(thread.is_alive() for thread in worker.lane_threads)


def test_saving_again_sends_nothing(rank: Rank) -> None:
    rank.executor.post(save_plan(1, 2, (1, 2, 3, 4)))
    rank.reports(2)
    rank.executor.post(save_plan(2, 3, (1, 2, 3, 4, 5, 6)))
    outcomes = dict(rank.reports(2)[1].outcomes)
    assert outcomes == {CellOutcome.EXISTED: 8, DONE: 4}


def test_a_load_of_what_is_not_stored_stops_there(rank: Rank) -> None:
    rank.executor.post(save_plan(1, 1, (1, 2)))
    rank.reports(2)
    rank.executor.post(load_plan(2, (3, 4, 5, 6), 0, 2 * CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(2), "r2", 1, CellOutcome.MISSING)]


def test_a_lost_store_is_a_report(rank: Rank) -> None:
    rank.store.inject(Fault.UNREACHABLE)
    rank.executor.post(save_plan(1, 1, (1, 2)))
    rank.executor.post(load_plan(2, (3, 4), 0, CHUNK))
    reports = rank.reports(3)
    assert LoadDone(JobId(2), "r2", 0, CellOutcome.UNREACHABLE) in reports
    assert SaveDone(JobId(1), "r1", ((CellOutcome.UNREACHABLE, 4),)) in reports


def test_a_bug_in_an_op_is_a_report_and_the_lane_goes_on(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.copier.broken = True
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.transfer.executor"):
        rank.executor.post(save_plan(1, 1, (1, 2)))
        assert rank.reports(2) == [
            SaveGathered(JobId(1), "r1"),
            SaveDone(JobId(1), "r1", ((CellOutcome.FAILED, 4),)),
        ]
    rank.copier.broken = False
    rank.executor.post(save_plan(2, 1, (1, 2)))
    assert rank.reports(2)[1] == SaveDone(JobId(2), "r2", ((DONE, 4),))


def test_reports_are_drained_once_and_waited_for(rank: Rank) -> None:
    assert rank.executor.drain() == []
    assert not rank.executor.wait(lambda reports: bool(reports), 0)
    assert rank.executor.wait(lambda reports: not reports, 0)
    rank.executor.post(save_plan(1, 1, (1, 2)))
    assert rank.executor.wait(lambda reports: len(reports) == 2, LIMIT_S)
    assert rank.executor.wait(lambda reports: len(reports) == 2, 0)
    assert len(rank.executor.drain()) == 2
    assert rank.executor.drain() == []


def test_a_cancelled_load_is_reported_while_its_get_hangs(rank: Rank) -> None:
    rank.store.inject(Fault.BLOCKED, "get")
    rank.executor.post(load_plan(1, (1, 2), 0, CHUNK))
    assert rank.store.entered.wait(LIMIT_S)
    rank.executor.post(CancelRequest("r1"))
    assert rank.reports(1) == [LoadDone(JobId(1), "r1", 0, CellOutcome.CANCELLED)]
    assert rank.copier.scattered == []


def test_dropped_saves_are_reported_while_a_put_hangs(rank: Rank) -> None:
    rank.store.inject(Fault.BLOCKED, "put", times=1)
    rank.executor.post(save_plan(1, 1, (1, 2)))
    assert rank.store.entered.wait(LIMIT_S)
    rank.executor.post(save_plan(2, 3, (3, 4, 5, 6, 7, 8)))
    assert rank.executor.wait(lambda r: SaveGathered(JobId(1), "r1") in r, LIMIT_S)
    rank.executor.post(DropSaves())
    assert rank.executor.wait(lambda r: SaveGathered(JobId(2), "r2") in r, LIMIT_S)
    rank.store.release()
    assert rank.executor.wait(lambda r: sum(isinstance(x, SaveDone) for x in r) == 2, LIMIT_S)
    assert rank.executor.close(LIMIT_S)
    assert rank.engine.idle


def test_closing_finishes_the_saves_first(store: FaultyStore) -> None:
    rank = Rank(store)
    store.inject(Fault.BLOCKED, "put", times=1)
    for job in range(1, 4):
        rank.executor.post(save_plan(job, 1 + job % 3, tuple(range(1, 7))))
    assert store.entered.wait(LIMIT_S)
    closing = threading.Thread(target=lambda: closed.append(rank.executor.close(LIMIT_S)))
    closed: list[bool] = []
    closing.start()
    store.release()
    closing.join(LIMIT_S)
    assert closed == [True]
    done = [r for r in rank.executor.drain() if isinstance(r, SaveDone)]
    assert [report.job_id for report in done] == [1, 2, 3]
    assert all(set(dict(r.outcomes)) <= {DONE, CellOutcome.EXISTED} for r in done)


def test_closing_an_idle_executor_ends_every_thread_at_once(store: FaultyStore) -> None:
    before = set(threading.enumerate())
    rank = Rank(store)
    assert len(set(threading.enumerate()) - before) == 1 + sum(LANES.values())
    began = time.monotonic()
    assert rank.executor.close(LIMIT_S)
    assert time.monotonic() - began < SLACK_S
    assert not set(threading.enumerate()) - before


def test_closing_with_a_stuck_store_is_bounded_and_says_so(store: FaultyStore) -> None:
    rank = Rank(store)
    store.inject(Fault.BLOCKED, "put")
    rank.executor.post(save_plan(1, 3, tuple(range(1, 7))))
    assert store.entered.wait(LIMIT_S)
    began = time.monotonic()
    assert not rank.executor.close(0.1)
    assert time.monotonic() - began < 0.1 + 2 * LANE_JOIN_S + SLACK_S
    assert rank.executor.drain()[0] == SaveGathered(JobId(1), "r1")
    store.release()
    for thread in rank.lane_threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_slots_are_gauged(rank: Rank) -> None:
    rank.executor.post(save_plan(1, 2, (1, 2, 3, 4)))
    rank.reports(2)
    assert rank.executor.close(LIMIT_S)
    slots = {k: v for k, v in rank.tally.snapshot().items() if k.startswith("kvpool_slots")}
    assert slots == {
        "kvpool_slots{state=free}": 16,
        "kvpool_slots{state=held}": 0,
        "kvpool_slots{state=quarantined}": 0,
    }


def test_an_engine_that_fails_leaves_no_request_waiting(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug of ours: what was open is given up, what comes later too, and the end is in time."""
    rank = Rank(store)
    store.inject(Fault.BLOCKED, "get")
    rank.executor.post(load_plan(1, (1, 2), 0, CHUNK))
    assert store.entered.wait(LIMIT_S)

    def broken(event: object, now: float) -> list[object]:
        raise AssertionError("the engine is broken")

    rank.engine.step = broken
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.transfer.executor"):
        rank.executor.post(save_plan(2, 1, (3, 4)))
        assert rank.reports(2) == [
            LoadDone(JobId(1), "r1", 0, CellOutcome.FAILED),
            SaveGathered(JobId(2), "r2"),
        ]
    rank.executor.post(load_plan(3, (5, 6), 0, CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(3), "r3", 0, CellOutcome.FAILED)]
    assert rank.tally.snapshot()["kvpool_failures{kind=engine}"] == 1
    store.release()
    assert rank.executor.close(1.0)
