"""The executor: real threads from plan to report, an end within its time, and lanes that die."""

import ctypes
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from tests.support.fakes import FakeCopier, FakeTrace, FaultyPerform
from tests.support.faults import Fault, FaultyStore
from tests.support.invariants import check
from tests.support.memory_store import MemoryStore
from tests.support.threads import NewThreads
from tests.transfer.barrier import has_taken_all
from vllm_kvpool.identity.keys import ContextRank, KeyMaker, chunk_id_of, make_namespace
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.topology import LayerGroup, Topology, cells_of_rank
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.staging.arena import SLOT_ALIGNMENT, Arena
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.staging.slots import SlotPool
from vllm_kvpool.storage.eviction import Lru
from vllm_kvpool.transfer import lane_pool
from vllm_kvpool.transfer.context import Tier
from vllm_kvpool.transfer.engine import Engine, lane_names
from vllm_kvpool.transfer.executor import CALL_TIMEOUT_S, Close, Executor
from vllm_kvpool.transfer.graph import Batch, BatchDone, LaneLimits
from vllm_kvpool.transfer.host_cache import HostCache
from vllm_kvpool.transfer.lane_pool import LANE_JOIN_S, Perform
from vllm_kvpool.transfer.lanes import BatchRunner
from vllm_kvpool.transfer.ops import (
    CancelRequest,
    CellOutcome,
    DropSaves,
    HostCacheChange,
    JobId,
    JobPages,
    LaneName,
    LoadDone,
    LoadPlan,
    OpKind,
    PrefetchPlan,
    Report,
    SaveDone,
    SaveGathered,
    SavePlan,
    SavesStalled,
    TierHealth,
)
from vllm_kvpool.transfer.planner import Planner
from vllm_kvpool.transfer.trace import Instant, Level

# Legend: L layers, B blocks, H heads, N tokens per block, C row elements.
LAYERS, BLOCKS, HEADS, BLOCK, ROW = 4, 13, 2, 16, 8
CHUNK = 32
CELLS_PER_CHUNK = HEADS * 2
LANES = dict.fromkeys(lane_names(1), 1) | {LaneName(OpKind.GET, 0): 2}
LIMITS = LaneLimits(batches=3, batch_ops=4, batch_bytes=1 << 20, budget_bytes=1 << 22)
LIMIT_S = 60.0
SLACK_S = 5.0  # on a busy machine
MODEL = make_namespace("model", "0" * 12)
HASHES = (b"\x01" * 20, b"\x02" * 20, b"\x03" * 20)
DONE, EXISTED = CellOutcome.DONE, CellOutcome.EXISTED
FAILED, UNREACHABLE = CellOutcome.FAILED, CellOutcome.UNREACHABLE
EXECUTOR_LOG = "vllm_kvpool.transfer.executor"


def of_jobs(reports: Sequence[Report]) -> list[Report]:
    """Return the reports of jobs, without `SavesStalled`, which a slow machine may add."""
    return [each for each in reports if not isinstance(each, SavesStalled)]


class Rank:
    """The executor of one worker, over a store that may be shared. `keep`: cells in a host tier."""

    def __init__(
        self,
        store: FaultyStore,
        *,
        copies: bool = False,
        num_slots: int = 16,
        keep: int = 0,
        write_back: bool = False,
        one_cell: bool = False,
        slab_cells: int = 64,
        perform: Perform | None = None,
        lanes: dict[LaneName, int] = LANES,
        call_timeout_s: float = CALL_TIMEOUT_S,
        on_hung: Callable[[LaneName], None] = lambda lane: None,
    ) -> None:
        self.store = store
        heads, layers = (1, 2) if one_cell else (HEADS, LAYERS)
        topology = Topology(heads, 1, ((0, layers),), layer_span=2)
        self.planner = Planner(
            cells_of_rank([LayerGroup(topology, ROW * 2)], 0, 0),
            KeyMaker(MODEL, ContextRank()),
            CHUNK,
            load_timeout_s=LIMIT_S,
            keeps_all=keep > 0,
            block_sizes=(BLOCK,),
            slab_cells=slab_cells,
        )
        self.pages_lbhnc = torch.zeros((LAYERS, BLOCKS, HEADS, BLOCK, ROW), dtype=torch.int16)
        self.registry, self.trace = MetricsRegistry(), FakeTrace()
        self.copier = FakeCopier()
        real = CpuCopier([from_token_content(layer) for layer in self.pages_lbhnc])
        if copies:
            real.warm_up()  # a fresh checkout compiles first, outside of any time limit
        copier = real if copies else self.copier
        arena = Arena(
            num_slots * SLOT_ALIGNMENT, self.planner.max_cell_bytes(), keep * SLOT_ALIGNMENT
        )
        runner = BatchRunner(
            (store,), ("memory",), arena, copier, copier, CHUNK, True, self.registry
        )
        self.engine = Engine(
            HostCache(SlotPool(arena.num_slots, 4), keep, Lru(), self.planner.slabs_per_chunk),
            (Tier("memory", durable=True, remote=False),),
            dict.fromkeys(lane_names(1), LIMITS),
            write_back=write_back,
            slot_bytes=arena.slot_bytes,
        )
        self.perform = FaultyPerform(perform or runner.perform)
        threads = NewThreads()
        self.executor = Executor(
            self.engine,
            self.planner,
            self.perform,
            lanes,
            self.registry,
            self.trace,
            call_timeout_s,
            on_hung,
        )
        self.threads = threads.alive()

    def fill(self) -> None:
        self.pages_lbhnc.copy_(torch.arange(self.pages_lbhnc.numel()).view_as(self.pages_lbhnc))

    def tokens_lhtc(self, blocks: tuple[int, ...]) -> torch.Tensor:
        return self.pages_lbhnc[:, list(blocks)].transpose(1, 2).flatten(2, 3)

    def reports(self, count: int) -> list[Report]:
        """Wait for `count` reports of jobs, and return all that have arrived."""
        assert self.executor.wait(lambda reports: len(of_jobs(reports)) >= count, LIMIT_S)
        return of_jobs(self.executor.drain())

    def save(self, job: int, chunks: int = 1) -> dict[CellOutcome, int]:
        """Save chunks, wait for the end, and return the number of cells by outcome."""
        self.executor.post(save_plan(job, chunks))
        assert self.executor.wait(lambda reports: SaveDone in map(type, reports), LIMIT_S)
        [done] = [r for r in self.executor.drain() if isinstance(r, SaveDone)]
        assert done.job_id == job
        return dict(done.outcomes)

    def break_engine(self) -> None:
        def broken(event: object, now: float) -> list[object]:
            raise AssertionError("the engine is broken")

        self.engine.step = broken  # type: ignore[method-assign]

    def close(self, timeout_s: float = LIMIT_S) -> bool:
        self.perform.release()
        return self.executor.close(timeout_s)

    def check_is_idle(self) -> None:
        """Assert that the engine is idle, after the threads have ended."""
        check(self.engine)
        assert self.engine.idle


def save_plan(job: int, chunks: int, blocks: tuple[int, ...] = tuple(range(1, 7))) -> SavePlan:
    pages = JobPages(blocks[: 2 * chunks], 0, 0, chunks * CHUNK)
    return SavePlan(JobId(job), f"r{job}", 0, HASHES[:chunks], (pages,))


def load_plan(job: int, blocks: tuple[int, ...], start: int, stop: int) -> LoadPlan:
    first, last = start // CHUNK, -(-stop // CHUNK)
    pages = JobPages(blocks, start, start, stop)
    return LoadPlan(JobId(job), f"r{job}", first, HASHES[first:last], (pages,), start, stop)


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
    assert rank.close()
    rank.check_is_idle()
    assert not any(thread.is_alive() for thread in rank.threads)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, EXECUTOR_LOG):
        yield


# From plan to report


@pytest.mark.parametrize("slab_cells", [(64, 64), (3, 3), (64, 1), (1, 3)])
@pytest.mark.parametrize("part_bytes", [1, 64 << 20], ids=["chunk by chunk", "at once"])
def test_what_one_worker_saves_another_loads(
    store: FaultyStore,
    monkeypatch: pytest.MonkeyPatch,
    part_bytes: int,
    slab_cells: tuple[int, int],
) -> None:
    """Each worker may cut chunks into slabs in its own way."""
    monkeypatch.setattr("vllm_kvpool.transfer.planner.PART_BYTES", part_bytes)
    writer, reader = (Rank(store, copies=True, slab_cells=each) for each in slab_cells)
    writer.fill()
    blocks = (3, 1, 4, 12, 5, 9)
    writer.executor.post(save_plan(1, 3, blocks))
    assert writer.reports(2) == [
        SaveGathered(JobId(1), "r1"),
        SaveDone(JobId(1), "r1", ((DONE, 3 * CELLS_PER_CHUNK),), tiers=(0,)),
    ]
    others = (2, 7, 8, 6, 10, 11)
    reader.executor.post(load_plan(2, others[1:], BLOCK, 3 * CHUNK - 1))
    assert reader.reports(1) == [LoadDone(JobId(2), "r2", 3, DONE)]
    tokens = slice(BLOCK, 3 * CHUNK - 1)
    expected = writer.tokens_lhtc(blocks)[:, :, tokens]
    assert torch.equal(reader.tokens_lhtc(others)[:, :, tokens], expected)
    # No byte outside the plan's tokens was written.
    assert not reader.pages_lbhnc[:, [0, 1, 2, 3, 4, 5, 9, 12]].any()
    assert not reader.tokens_lhtc(others)[:, :, 3 * CHUNK - 1 :].any()
    for worker in (writer, reader):
        assert worker.close()
        worker.check_is_idle()


def test_saving_again_sends_nothing(rank: Rank) -> None:
    assert rank.save(1, 2) == {DONE: 8}
    assert rank.save(2, 3) == {EXISTED: 8, DONE: 4}


@pytest.mark.usefixtures("quiet")
def test_a_bug_in_a_lane_is_a_report_and_the_lane_goes_on(rank: Rank) -> None:
    rank.copier.broken = True
    rank.executor.post(save_plan(1, 1))
    assert rank.reports(2) == [
        SaveGathered(JobId(1), "r1"),
        SaveDone(JobId(1), "r1", ((FAILED, 4),), (), (0,), ((0, FAILED),)),
    ]
    rank.copier.broken = False
    assert rank.save(2) == {DONE: 4}
    assert "kvpool_failures{kind=lane}" not in rank.registry.snapshot()


def test_reports_are_drained_once_and_waited_for(rank: Rank) -> None:
    assert rank.executor.drain() == []
    assert not rank.executor.wait(bool, 0)
    assert rank.executor.wait(lambda reports: not reports, 0)
    rank.executor.post(save_plan(1, 1))
    assert rank.executor.wait(lambda reports: len(reports) == 2, LIMIT_S)
    assert rank.executor.wait(lambda reports: len(reports) == 2, 0)
    assert len(rank.executor.drain()) == 2
    assert rank.executor.drain() == []


def test_a_cancelled_load_is_reported_while_its_get_hangs(store: FaultyStore) -> None:
    rank = Rank(store)
    store.inject(Fault.BLOCKED, "get")
    rank.executor.post(load_plan(1, (1, 2), 0, CHUNK))
    assert store.entered.wait(LIMIT_S)
    rank.executor.post(CancelRequest("r1"))
    assert rank.reports(1) == [LoadDone(JobId(1), "r1", 0, CellOutcome.CANCELLED)]
    assert rank.copier.scattered == []
    store.release()
    assert rank.close()


def test_dropped_saves_are_reported_while_a_put_hangs(rank: Rank) -> None:
    rank.store.inject(Fault.BLOCKED, "put", times=1)
    rank.executor.post(save_plan(1, 1))
    assert rank.store.entered.wait(LIMIT_S)
    rank.executor.post(save_plan(2, 3))
    assert rank.executor.wait(lambda r: SaveGathered(JobId(1), "r1") in r, LIMIT_S)
    rank.executor.post(DropSaves())
    assert rank.executor.wait(lambda r: SaveGathered(JobId(2), "r2") in r, LIMIT_S)
    rank.store.release()
    assert rank.executor.wait(lambda r: sum(isinstance(x, SaveDone) for x in r) == 2, LIMIT_S)


def test_a_prefetch_needs_no_pages_and_a_reset_forgets_it(store: FaultyStore) -> None:
    rank = Rank(store, keep=8)
    rank.save(1, 2)
    rank.executor.post(DropSaves(forget=True))
    groups = tuple(chunk_id_of(MODEL, chunk_hash.hex()) for chunk_hash in HASHES[:2])
    gone = lambda reports: HostCacheChange((), groups) in reports  # noqa: E731
    assert rank.executor.wait(gone, LIMIT_S)
    rank.executor.drain()
    rank.executor.post(PrefetchPlan("r9", HASHES[:2]))
    here = lambda reports: {g for r in reports for g in r.added} == set(groups)  # noqa: E731
    assert rank.executor.wait(here, LIMIT_S)
    rank.executor.drain()
    gets = store.calls["get"]
    rank.executor.post(load_plan(2, (3, 4, 5, 6), 0, 2 * CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(2), "r2", 2, DONE)]
    assert store.calls["get"] == gets
    assert rank.close()


# Other outputs


def test_counts_gauges_and_marks_arrive(store: FaultyStore) -> None:
    rank = Rank(store, keep=8)
    rank.trace.dropped = 3
    rank.save(1, 2)
    rank.executor.post(load_plan(2, (3, 4, 5, 6), 0, 2 * CHUNK))
    assert rank.executor.wait(lambda reports: LoadDone in map(type, reports), LIMIT_S)
    rank.trace.dropped = 5
    assert rank.close()
    registry = rank.registry.snapshot()
    expected = {
        "kvpool_trace_dropped": 5,
        "kvpool_slots{state=free}": 16,
        "kvpool_slots{state=held}": 8,
        "kvpool_slots{state=quarantined}": 0,
        "kvpool_host_bytes{state=clean}": 8 * SLOT_ALIGNMENT,
        "kvpool_host_bytes{state=dirty}": 0,
        "kvpool_hit_cells{tier=host}": 8,
        "kvpool_tier_up{tier=memory}": 1,
        "kvpool_queue_cells{lane=put,tier=memory}": 0,
        "kvpool_queue_cells{lane=seal,tier=host}": 0,
    }
    assert {name: registry.get(name) for name in expected} == expected
    for name in ("kvpool_save_seconds", "kvpool_load_seconds"):
        counts = [v for k, v in registry.items() if k.startswith(name) and k.endswith(".count")]
        assert sum(counts) == 1
    marks = [(mark.name, mark.job) for mark in rank.trace.of(Instant)]
    assert marks == [("save done", 1), ("load done", 2)]
    assert {level.name for level in rank.trace.of(Level)} >= {
        "free slots",
        "put memory",
        "scatter host",
    }


def test_a_tier_that_goes_down_and_up_is_traced_once_each(store: FaultyStore) -> None:
    rank = Rank(store)
    for up, writable in ((True, True), (False, True), (False, False), (True, False), (True, True)):
        rank.executor.post(TierHealth(0, up, writable))
    assert rank.close()
    marks = [(mark.name, mark.tier) for mark in rank.trace.of(Instant)]
    assert marks == [("tier down", "memory"), ("tier up", "memory")]


# The end


def test_closing_finishes_the_saves_first(store: FaultyStore) -> None:
    rank = Rank(store)
    store.inject(Fault.BLOCKED, "put", times=1)
    for job in range(1, 4):
        rank.executor.post(save_plan(job, 1 + job % 3))
    assert store.entered.wait(LIMIT_S)
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(rank.close()))
    closing.start()
    store.release()
    closing.join(LIMIT_S)
    assert closed == [True]
    done = [r for r in rank.executor.drain() if isinstance(r, SaveDone)]
    assert sorted(report.job_id for report in done) == [1, 2, 3]
    assert all(set(dict(r.outcomes)) <= {DONE, EXISTED} for r in done)
    rank.check_is_idle()


def test_closing_an_idle_executor_ends_every_thread_at_once(store: FaultyStore) -> None:
    rank = Rank(store)
    assert len(rank.threads) == 1 + sum(LANES.values())
    began = time.monotonic()
    assert rank.close()
    assert time.monotonic() - began < SLACK_S
    assert not any(thread.is_alive() for thread in rank.threads)


def test_closing_with_a_stuck_store_is_bounded_and_says_so(store: FaultyStore) -> None:
    rank = Rank(store)
    store.inject(Fault.BLOCKED, "put")
    rank.executor.post(save_plan(1, 3))
    assert store.entered.wait(LIMIT_S)
    began = time.monotonic()
    assert not rank.close(0.1)
    assert time.monotonic() - began < 0.1 + 2 * LANE_JOIN_S + SLACK_S
    assert rank.executor.drain()[0] == SaveGathered(JobId(1), "r1")
    store.release()
    for thread in rank.threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("waits", [True, False], ids=["saved", "at once"])
def test_closing_copies_down_what_is_in_host_memory_alone(store: FaultyStore, waits: bool) -> None:
    """The copies include cells that were on their way into host memory at the close."""
    rank = Rank(store, keep=64, write_back=True)
    rank.perform.hold("gather")
    rank.executor.post(save_plan(1, 3))
    assert rank.perform.entered.wait(LIMIT_S)
    if waits:
        rank.perform.release()
        assert rank.executor.wait(lambda reports: SaveDone in map(type, reports), LIMIT_S)
    assert store.calls["put"] == 0
    rank.executor.post(Close(time.monotonic() + LIMIT_S))
    assert waits or has_taken_all(rank.executor)
    assert rank.close()
    slabs = rank.planner.prefetch(PrefetchPlan("", HASHES)).slabs
    keys = [key for slab in slabs for key in slab.cell_keys()]
    assert store.exists(keys) == [True] * 12
    rank.check_is_idle()


def test_closing_does_not_try_for_ever_to_copy_down(store: FaultyStore) -> None:
    rank = Rank(store, keep=64, write_back=True)
    rank.save(1, 3)
    store.inject(Fault.UNREACHABLE, "put")
    began = time.monotonic()
    assert rank.close()
    assert time.monotonic() - began < SLACK_S
    assert rank.registry.snapshot()["kvpool_evicted_cells{tier=host,fate=lost}"] == 12


# An engine that fails


@pytest.mark.usefixtures("quiet")
def test_an_engine_that_fails_leaves_no_request_waiting(store: FaultyStore) -> None:
    """A bug in the engine fails open jobs and later ones. The executor still closes in time."""
    rank = Rank(store)
    store.inject(Fault.BLOCKED, "get")
    rank.executor.post(load_plan(1, (1, 2), 0, CHUNK))
    assert store.entered.wait(LIMIT_S)
    rank.break_engine()
    rank.executor.post(save_plan(2, 1, (3, 4)))
    assert rank.reports(3) == [
        LoadDone(JobId(1), "r1", 0, FAILED),
        SaveGathered(JobId(2), "r2"),
        SaveDone(JobId(2), "r2", ((FAILED, 1),), (), (0,), ((0, FAILED),)),
    ]
    rank.executor.post(load_plan(3, (5, 6), 0, CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(3), "r3", 0, FAILED)]
    rank.executor.post(CancelRequest("r3"))
    rank.executor.post(PrefetchPlan("r4", HASHES))
    rank.executor.post(save_plan(4, 1, (3, 4)))
    assert [type(each) for each in rank.reports(2)] == [SaveGathered, SaveDone]
    assert rank.registry.snapshot()["kvpool_failures{kind=engine}"] == 1
    store.release()
    assert rank.close(1.0)


@pytest.mark.usefixtures("quiet")
def test_a_save_that_is_in_a_put_when_the_engine_fails_is_reported_as_lost(
    store: FaultyStore,
) -> None:
    rank = Rank(store)
    store.inject(Fault.BLOCKED, "put")
    rank.executor.post(save_plan(1, 1))
    assert store.entered.wait(LIMIT_S)
    assert rank.reports(1) == [SaveGathered(JobId(1), "r1")]
    rank.break_engine()
    [done] = rank.reports(1)
    assert isinstance(done, SaveDone)
    assert done.lost == ((0, FAILED),)
    store.release()
    assert rank.close(1.0)


@pytest.mark.usefixtures("quiet")
def test_a_copy_that_hangs_while_the_engine_fails_keeps_its_own_blocks_alone(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_pool, "COPY_JOIN_S", 0.05)
    rank = Rank(store)
    rank.save(1)
    rank.perform.hold("scatter")
    rank.executor.post(load_plan(2, (1, 2), 0, CHUNK))
    assert rank.perform.entered.wait(LIMIT_S)
    rank.break_engine()
    rank.executor.post(load_plan(3, (3, 4), 0, CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(3), "r3", 0, FAILED)]
    rank.executor.post(load_plan(4, (5, 2), 0, CHUNK))
    rank.executor.post(load_plan(5, (5, 6), 0, CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(5), "r5", 0, FAILED)]
    rank.perform.release()
    ended = rank.reports(2)
    assert {report.job_id for report in ended if isinstance(report, LoadDone)} == {2, 4}
    assert rank.close(1.0)


@pytest.mark.usefixtures("quiet")
def test_what_has_ended_is_told_though_the_engine_fails_right_after(store: FaultyStore) -> None:
    rank = Rank(store)

    def broken() -> float | None:
        if not rank.engine.loads.num_open:
            raise AssertionError("the engine is broken")
        return None

    store.inject(Fault.BLOCKED, "get")
    rank.executor.post(load_plan(1, (1, 2), 0, CHUNK))
    assert store.entered.wait(LIMIT_S)
    rank.engine.next_deadline = broken
    store.release()
    assert rank.reports(1) == [LoadDone(JobId(1), "r1", 0, CellOutcome.MISSING)]
    assert rank.close(1.0)
    assert rank.registry.snapshot()["kvpool_failures{kind=engine}"] == 1


# Lanes whose threads would die


def throw_into(thread: threading.Thread) -> None:
    """End a thread from outside, as a debugger may. The error is raised when the thread runs."""
    assert thread.ident is not None
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc
    assert throw(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)) == 1


def lane_thread(rank: Rank, name: str) -> threading.Thread:
    [thread] = [lane.thread for lane in rank.executor._lanes.threads if str(lane.lane) == name]
    return thread


@pytest.mark.parametrize("lane", ["gather", "seal", "put-0"])
@pytest.mark.usefixtures("quiet")
def test_what_would_end_a_lane_fails_its_batch_and_the_lane_goes_on(rank: Rank, lane: str) -> None:
    rank.perform.kill(lane)
    assert rank.save(1) == {FAILED: 4}
    assert rank.save(2) == {DONE: 4}
    assert rank.close()
    assert rank.registry.snapshot()["kvpool_failures{kind=lane}"] == 1


@pytest.mark.usefixtures("quiet")
def test_of_two_answers_for_a_batch_the_first_counts(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane that is hit after its answer answers a second time."""
    batches: list[Batch] = []
    perform = rank.perform._perform
    monkeypatch.setattr(
        rank.perform, "_perform", lambda batch: (batches.append(batch), perform(batch))[1]
    )
    assert rank.save(1) == {DONE: 4}
    for batch in batches:  # gather, seal, put
        rank.executor._inbox.put(BatchDone(batch, (FAILED,) * len(batch.ops)))
    assert rank.save(2) == {EXISTED: 4}
    assert "kvpool_failures{kind=engine}" not in rank.registry.snapshot()


@pytest.mark.parametrize("lane", ["get-0", "check", "scatter"])
@pytest.mark.usefixtures("quiet")
def test_a_load_through_a_dying_lane_stops(rank: Rank, lane: str) -> None:
    rank.save(1)
    rank.perform.kill(lane)
    rank.executor.post(load_plan(2, (3, 4), 0, CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(2), "r2", 0, FAILED)]
    rank.executor.post(load_plan(3, (3, 4), 0, CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(3), "r3", 1, DONE)]


@pytest.mark.usefixtures("quiet")
def test_an_idle_lane_that_is_hit_from_outside_loses_no_batch(rank: Rank) -> None:
    """The error is raised when the thread takes the next batch, which no other thread has."""
    for job in range(1, 20, 2):
        throw_into(lane_thread(rank, "gather"))
        assert rank.save(job) == {FAILED: 4}
        assert rank.save(job + 1) in ({DONE: 4}, {EXISTED: 4})
    assert rank.registry.snapshot()["kvpool_failures{kind=lane}"] == 10


@pytest.mark.usefixtures("quiet")
def test_a_busy_lane_that_is_hit_from_outside_goes_on(rank: Rank) -> None:
    rank.perform.hold("put-0")
    rank.executor.post(save_plan(1, 1))
    assert rank.perform.entered.wait(LIMIT_S)
    throw_into(lane_thread(rank, "put-0"))
    rank.perform.release()
    reports = rank.reports(2)
    assert SaveDone(JobId(1), "r1", ((FAILED, 4),), (), (0,), ((0, FAILED),)) in reports
    assert rank.save(2) == {DONE: 4}


@pytest.mark.usefixtures("quiet")
def test_a_lane_that_always_fails_holds_nothing_up(rank: Rank) -> None:
    rank.perform.kill("gather", times=1000)
    for job in range(20):
        assert rank.save(job) == {FAILED: 4}
    assert rank.registry.snapshot()["kvpool_failures{kind=lane}"] == 20
    rank.executor.post(load_plan(100, (3, 4), 0, CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(100), "r100", 0, CellOutcome.MISSING)]


NUM_GRAPHS = 1000


def all_done(batch: Batch) -> tuple[CellOutcome, ...]:
    return (DONE,) * len(batch.ops)


def one_cell_plan(kind: type, job: int) -> SavePlan | LoadPlan:
    hashes = (job.to_bytes(20, "big"),)
    pages = (JobPages((1, 2), 0, 0, CHUNK),)
    if kind is SavePlan:
        return SavePlan(JobId(job), f"r{job}", 0, hashes, pages)
    return LoadPlan(JobId(job), f"r{job}", 0, hashes, pages, 0, CHUNK)


@pytest.mark.alone
@pytest.mark.parametrize("thrown", [False, True], ids=["raises", "is thrown"])
@pytest.mark.parametrize(
    ("kind", "lane"),
    [
        *((SavePlan, lane) for lane in ("gather", "seal", "put-0")),
        *((LoadPlan, lane) for lane in ("check", "scatter")),
    ],
)
@pytest.mark.usefixtures("quiet")
def test_a_lane_that_is_hit_among_many_graphs_holds_up_none(
    store: FaultyStore, kind: type, lane: str, thrown: bool
) -> None:
    """Each load is reported once."""
    rank = Rank(store, one_cell=True, num_slots=64, perform=all_done)
    plans = [one_cell_plan(kind, job) for job in range(NUM_GRAPHS)]
    per_plan = 2 if kind is SavePlan else 1
    if not thrown:
        rank.perform.kill(lane, after=NUM_GRAPHS // LIMITS.batch_ops // 4)
    victim = lane_thread(rank, lane)
    for plan in plans:
        rank.executor.post(plan)
    if thrown:
        quarter = per_plan * NUM_GRAPHS // 4
        assert rank.executor.wait(lambda reports: len(reports) > quarter, LIMIT_S)
        throw_into(victim)
    reports = rank.reports(per_plan * NUM_GRAPHS)
    assert rank.close()
    reports += of_jobs(rank.executor.drain())
    counts = Counter((type(report), report.job_id) for report in reports)
    types = (SaveGathered, SaveDone) if kind is SavePlan else (LoadDone,)
    assert counts == {(t, job): 1 for t in types for job in range(NUM_GRAPHS)}
    rank.check_is_idle()
    registry = rank.registry.snapshot()
    assert registry["kvpool_failures{kind=lane}"] == 1
