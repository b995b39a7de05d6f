"""The executor with a hung store call: its lane, its cells and its memory.

The tests do not depend on the machine's speed: `give_up` decides that a call has lasted too long.
"""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from tests.support.faults import Fault, FaultyStore
from tests.support.memory_store import MemoryStore
from tests.support.threads import NewThreads, few_threads
from tests.support.waiting import wait_until
from tests.transfer.barrier import has_taken_all
from tests.transfer.test_executor import (
    CELLS_PER_CHUNK,
    CHUNK,
    DONE,
    EXECUTOR_LOG,
    FAILED,
    LIMIT_S,
    SLACK_S,
    Rank,
    all_done,
    load_plan,
    one_cell_plan,
    save_plan,
    throw_into,
)
from vllm_kvpool.storage import breaker
from vllm_kvpool.transfer import executor, lane_pool
from vllm_kvpool.transfer.engine import lane_names
from vllm_kvpool.transfer.graph import Batch
from vllm_kvpool.transfer.lane_pool import LANE_JOIN_S, MAX_HUNG
from vllm_kvpool.transfer.ops import (
    CellOutcome,
    JobId,
    LaneName,
    LoadDone,
    LoadPlan,
    OpKind,
    SaveDone,
    SaveGathered,
    SavePlan,
    TierHealth,
)

NEVER_S = 1000.0
GET, PUT = LaneName(OpKind.GET, 0), LaneName(OpKind.PUT, 0)
SINGLE = dict.fromkeys(lane_names(1), 1)
TIMED_OUT, UNREACHABLE = CellOutcome.TIMED_OUT, CellOutcome.UNREACHABLE


class Gates:
    """A lane function that does nothing; calls of lanes in `hangs` each wait at a new gate."""

    def __init__(self) -> None:
        self.hangs: set[LaneName] = set()
        self.dies = False
        self.calls = 0
        self.entered: SimpleQueue[threading.Event] = SimpleQueue()
        self._gates: list[threading.Event] = []

    def __call__(self, batch: Batch) -> tuple[CellOutcome, ...]:
        self.calls += 1
        if batch.lane in self.hangs:
            gate = threading.Event()
            self._gates.append(gate)
            self.entered.put(gate)
            assert gate.wait(LIMIT_S), "never released"
            if self.dies:
                raise SystemExit("dies")
        return all_done(batch)

    def next_gate(self) -> threading.Event:
        return self.entered.get(timeout=LIMIT_S)

    def open_all(self) -> None:
        self.hangs.clear()
        for gate in self._gates:
            gate.set()


class Ward:
    """A rank whose calls are given up when the test says so."""

    def __init__(self, store: FaultyStore, gates: Gates) -> None:
        self.store, self.gates = store, gates
        self.given_up: SimpleQueue[LaneName] = SimpleQueue()
        self._ranks: list[Rank] = []

    def rank(self, *, gated: bool = False, get_lanes: int = 1, keep: int = 0) -> Rank:
        rank = Rank(
            self.store,
            keep=keep,
            perform=self.gates if gated else None,
            one_cell=gated,
            lanes=SINGLE | {GET: get_lanes},
            call_timeout_s=NEVER_S,
            on_hung=self._hung,
        )
        self._ranks.append(rank)
        return rank

    def _hung(self, lane: LaneName) -> None:
        """Disable the timeout, so that only this lane is given up.

        Called in the engine's thread, in the middle of its check of the calls.
        """
        for rank in self._ranks:
            rank.executor._lanes.call_timeout_s = NEVER_S
        self.given_up.put(lane)

    def give_up(self, rank: Rank) -> LaneName:
        """Give up the first call that is in progress, and return its lane."""
        rank.executor._lanes.call_timeout_s = -1.0
        return self.given_up.get(timeout=LIMIT_S)

    def hang(self, rank: Rank, plan: LoadPlan | SavePlan) -> threading.Event:
        """Make a call hang, give it up, and return its gate."""
        rank.executor.post(plan)
        gate = self.gates.next_gate()
        self.give_up(rank)
        return gate

    def end(self) -> None:
        self.store.heal()
        self.gates.open_all()
        for rank in self._ranks:
            rank.close()


@pytest.fixture
def ward(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Ward]:
    """Yield a ward. Calls are checked often, and failed tiers are tried again at once."""
    monkeypatch.setattr(executor, "WATCH_S", 0.005)
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    ward = Ward(FaultyStore(MemoryStore("", 1 << 24)), Gates())
    with caplog.at_level(logging.CRITICAL, EXECUTOR_LOG):
        yield ward
        ward.end()


def threads_of(rank: Rank, lane: LaneName) -> list[threading.Thread]:
    return [each.thread for each in rank.executor._lanes.threads if each.lane == lane]


def level(rank: Rank, name: str) -> float | None:
    """Return a gauge's value."""
    return rank.registry.snapshot().get(name)


def wait_for(condition: Callable[[], bool]) -> None:
    wait_until(condition, LIMIT_S)


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(LIMIT_S)
    return not any(thread.is_alive() for thread in threads)


def check_is_clean(rank: Rank) -> None:
    """Wait until all calls have returned, and assert that the closed rank holds nothing."""
    wait_for(lambda: not rank.executor._lanes.hung)
    assert rank.close()
    rank.check_is_idle()
    slots = rank.engine.context.host_cache.slots
    assert slots.num_free == slots.count
    assert len(rank.engine.hung_calls) == 0
    assert "kvpool_failures{kind=engine}" not in rank.registry.snapshot()


# A call that hangs


def test_the_lane_goes_on_in_another_thread(ward: Ward) -> None:
    rank = ward.rank()
    rank.save(1, 3)
    [first] = threads_of(rank, GET)
    ward.store.inject(Fault.BLOCKED, "get", times=1)
    rank.executor.post(load_plan(2, (3, 4), 0, CHUNK))
    assert ward.store.entered.wait(LIMIT_S)
    rank.executor.post(load_plan(3, (5, 6), CHUNK, 2 * CHUNK))
    assert has_taken_all(rank.executor)  # it waits in the lane behind the hung call
    assert rank.executor.drain() == []
    assert ward.give_up(rank) == GET
    reports = rank.reports(2)
    assert sorted(reports) == [
        LoadDone(JobId(2), "r2", 0, TIMED_OUT),
        LoadDone(JobId(3), "r3", 2, DONE),
    ]
    assert first.is_alive()
    assert threads_of(rank, GET) != [first]
    assert level(rank, "kvpool_failures{kind=store_stuck}") == 1
    quarantined = "kvpool_slots{state=quarantined}"
    wait_for(lambda: level(rank, quarantined) == CELLS_PER_CHUNK)
    scattered = len(rank.copier.scattered)
    ward.store.release()
    assert ended([first])  # without a close
    wait_for(lambda: level(rank, quarantined) == 0)
    check_is_clean(rank)
    assert rank.executor.drain() == []
    assert len(rank.copier.scattered) == scattered


def test_a_save_is_reported_and_its_cells_can_still_be_read(ward: Ward) -> None:
    rank = ward.rank()
    ward.store.inject(Fault.BLOCKED, "put", times=1)
    rank.executor.post(save_plan(1, 1))
    assert ward.store.entered.wait(LIMIT_S)
    assert ward.give_up(rank) == PUT
    lost = ((0, TIMED_OUT),)
    done = SaveDone(JobId(1), "r1", ((TIMED_OUT, CELLS_PER_CHUNK),), (), (0,), lost)
    assert rank.reports(2) == [SaveGathered(JobId(1), "r1"), done]
    assert level(rank, "kvpool_failures{kind=save_timed_out}") == CELLS_PER_CHUNK
    wait_for(lambda: level(rank, "kvpool_slots{state=quarantined}") == CELLS_PER_CHUNK)
    assert level(rank, "kvpool_slots{state=held}") == 0
    rank.executor.post(load_plan(2, (3, 4), 0, CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(2), "r2", 1, DONE)]
    assert ward.store.calls["get"] == 0
    ward.store.release()
    check_is_clean(rank)
    assert level(rank, "kvpool_slots{state=quarantined}") == 0


@pytest.mark.parametrize(("method", "least_s"), [("get", 0.2), ("put", 0.4)])
def test_a_call_has_so_much_time_and_a_put_is_two_calls(
    ward: Ward, method: str, least_s: float
) -> None:
    rank = ward.rank()
    ward.store.inject(Fault.BLOCKED, method)
    rank.executor._lanes.call_timeout_s = 0.2
    is_put = method == "put"
    began = time.monotonic()
    rank.executor.post(save_plan(1, 1) if is_put else load_plan(1, (3, 4), 0, CHUNK))
    ward.given_up.get(timeout=LIMIT_S)
    assert time.monotonic() - began >= least_s


def test_lanes_of_host_memory_are_waited_for(ward: Ward) -> None:
    """Lanes of host memory call no store, so the timeout of store calls does not apply to them."""
    rank = ward.rank()
    rank.perform.hold("gather")
    rank.executor.post(save_plan(1, 1))
    assert rank.perform.entered.wait(LIMIT_S)
    [gather] = threads_of(rank, LaneName(OpKind.GATHER, -1))
    looks = rank.executor._next_watch
    rank.executor._lanes.call_timeout_s = -1.0
    wait_for(lambda: rank.executor._next_watch > looks + 5 * executor.WATCH_S)
    rank.executor._lanes.call_timeout_s = NEVER_S
    rank.perform.release()
    assert SaveDone(JobId(1), "r1", ((DONE, CELLS_PER_CHUNK),), tiers=(0,)) in rank.reports(2)
    assert threads_of(rank, LaneName(OpKind.GATHER, -1)) == [gather]
    assert "kvpool_failures{kind=store_stuck}" not in rank.registry.snapshot()


def test_a_tier_that_is_away_is_not_asked_until_it_is_there(ward: Ward) -> None:
    rank = ward.rank()
    rank.save(1, 1)
    rank.executor.post(TierHealth(0, False))
    rank.executor.post(load_plan(2, (3, 4), 0, CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(2), "r2", 0, UNREACHABLE)]
    rank.executor.post(TierHealth(0, True))
    rank.executor.post(load_plan(3, (3, 4), 0, CHUNK))
    assert rank.reports(1) == [LoadDone(JobId(3), "r3", 1, DONE)]
    assert ward.store.calls["get"] == 1


# Many that hang


def test_a_lane_in_which_too_many_hang_refuses_at_once_until_one_returns(ward: Ward) -> None:
    rank = ward.rank(gated=True)
    ward.gates.hangs.add(GET)
    gates = [ward.hang(rank, one_cell_plan(LoadPlan, job)) for job in range(MAX_HUNG + 1)]
    reports = rank.reports(MAX_HUNG + 1)
    assert reports == [LoadDone(JobId(i), f"r{i}", 0, TIMED_OUT) for i in range(MAX_HUNG + 1)]
    assert threads_of(rank, GET) == []
    before = ward.gates.calls
    rank.executor.post(one_cell_plan(LoadPlan, 10))
    assert rank.reports(1) == [LoadDone(JobId(10), "r10", 0, FAILED)]
    assert ward.gates.calls == before
    ward.gates.hangs.clear()
    gates[1].set()
    wait_for(lambda: len(threads_of(rank, GET)) == 1)
    rank.executor.post(one_cell_plan(LoadPlan, 11))
    assert rank.reports(1) == [LoadDone(JobId(11), "r11", 1, DONE)]
    ward.gates.open_all()
    check_is_clean(rank)


def test_what_waits_for_a_lane_that_refuses_fails(ward: Ward) -> None:
    rank = ward.rank(gated=True)
    ward.gates.hangs.add(GET)
    for job in range(MAX_HUNG):
        ward.hang(rank, one_cell_plan(LoadPlan, job))
    rank.executor.post(one_cell_plan(LoadPlan, MAX_HUNG))
    ward.gates.next_gate()
    rank.executor.post(one_cell_plan(LoadPlan, 10))
    assert has_taken_all(rank.executor)  # it waits in the lane
    ward.give_up(rank)
    reports = rank.reports(MAX_HUNG + 2)
    assert LoadDone(JobId(10), "r10", 0, FAILED) in reports
    ward.gates.open_all()
    check_is_clean(rank)


@pytest.mark.parametrize("get_lanes", [1, 2, 3])
def test_a_lane_has_all_its_threads_again_when_its_calls_have_returned(
    ward: Ward, get_lanes: int
) -> None:
    rank = ward.rank(gated=True, get_lanes=get_lanes)
    assert len(threads_of(rank, GET)) == get_lanes
    ward.gates.hangs.add(GET)
    for turn in range(2):
        for count in range(MAX_HUNG + get_lanes):
            ward.hang(rank, one_cell_plan(LoadPlan, 10 * turn + count))
        assert len(rank.reports(MAX_HUNG + get_lanes)) == MAX_HUNG + get_lanes
        assert threads_of(rank, GET) == []
        ward.gates.open_all()
        ward.gates.hangs.add(GET)
        wait_for(lambda: len(threads_of(rank, GET)) == get_lanes)
    ward.gates.open_all()
    check_is_clean(rank)


def test_hung_call_of_a_process_without_more_threads_closes_its_lane_alone(ward: Ward) -> None:
    rank = ward.rank(gated=True)
    ward.gates.hangs.add(GET)
    with few_threads():
        gate = ward.hang(rank, one_cell_plan(LoadPlan, 1))
        rank.executor.post(one_cell_plan(LoadPlan, 2))
        ends = [LoadDone(JobId(1), "r1", 0, TIMED_OUT), LoadDone(JobId(2), "r2", 0, FAILED)]
        assert rank.reports(2) == ends
        rank.executor.post(one_cell_plan(SavePlan, 3))
        done = SaveDone(JobId(3), "r3", ((DONE, 1),), tiers=(0,))
        assert done in rank.reports(2)
    ward.gates.hangs.clear()
    gate.set()
    wait_for(lambda: len(threads_of(rank, GET)) == 1)
    check_is_clean(rank)


# The end


def test_closing_does_not_wait_for_a_call_that_hangs_and_says_so(ward: Ward) -> None:
    rank = ward.rank(gated=True)
    ward.gates.hangs.add(GET)
    gate = ward.hang(rank, one_cell_plan(LoadPlan, 1))
    [left] = [lane.thread for lane in rank.executor._lanes.hung.values()]
    began = time.monotonic()
    assert not rank.close(0.1)
    assert time.monotonic() - began < 0.1 + 2 * LANE_JOIN_S + SLACK_S
    gate.set()
    assert ended([left])


def test_closing_after_a_call_has_returned_is_as_if_it_had_never_hung(ward: Ward) -> None:
    threads = NewThreads()
    rank = ward.rank(gated=True)
    ward.gates.hangs.add(GET)
    gate = ward.hang(rank, one_cell_plan(LoadPlan, 1))
    [left] = [lane.thread for lane in rank.executor._lanes.hung.values()]
    gate.set()
    assert ended([left])
    check_is_clean(rank)
    assert not threads.alive("kvpool-get")


# Threads that would die


@pytest.mark.parametrize("is_thrown", [False, True])
def test_a_thread_that_is_hit_after_it_was_left_answers_and_ends(
    ward: Ward, is_thrown: bool
) -> None:
    rank = ward.rank(gated=True)
    ward.gates.hangs.add(GET)
    gate = ward.hang(rank, one_cell_plan(LoadPlan, 1))
    [left] = rank.executor._lanes.hung.values()
    assert rank.reports(1) == [LoadDone(JobId(1), "r1", 0, TIMED_OUT)]
    if is_thrown:
        throw_into(left.thread)
    else:
        ward.gates.dies = True
    ward.gates.hangs.clear()
    gate.set()
    assert ended([left.thread])
    wait_for(lambda: not rank.executor._lanes.hung)
    rank.executor.post(one_cell_plan(LoadPlan, 2))
    assert rank.reports(1) == [LoadDone(JobId(2), "r2", 1, DONE)]
    check_is_clean(rank)
    assert rank.registry.snapshot()["kvpool_failures{kind=lane}"] == 1


# A call that returns at the very moment


def test_a_call_that_returns_while_it_is_looked_at_is_not_given_up(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its thread would take further batches unseen."""
    rank = ward.rank(gated=True)
    [lane] = [each for each in rank.executor._lanes.threads if each.lane == GET]
    ward.gates.hangs.add(GET)
    rank.executor.post(one_cell_plan(LoadPlan, 1))
    gate = ward.gates.next_gate()
    busy_since = lane.busy_since
    looked = threading.Event()

    def returns_now() -> tuple[Batch, float] | None:
        busy = busy_since()
        if busy is not None and not looked.is_set():
            gate.set()
            wait_for(lambda: not lane._taken)
            looked.set()
            rank.executor._lanes.call_timeout_s = -1.0
        return busy

    monkeypatch.setattr(lane, "busy_since", returns_now)
    assert looked.wait(LIMIT_S)
    rank.executor._lanes.call_timeout_s = NEVER_S
    assert rank.reports(1) == [LoadDone(JobId(1), "r1", 1, DONE)]
    rank.executor.post(one_cell_plan(LoadPlan, 2))  # hangs
    gate = ward.gates.next_gate()
    assert lane in rank.executor._lanes.threads
    assert not rank.close(0.0)  # a hung call is known
    gate.set()
    assert ended([lane.thread])


def test_calls_may_end_while_they_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load is reported once, however many calls are given up; no thread is lost."""
    threads = NewThreads()
    num_loads = 1500
    monkeypatch.setattr(executor, "WATCH_S", 0.0)
    monkeypatch.setattr(lane_pool, "MAX_HUNG", 50)
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
        rank.executor._lanes.call_timeout_s = NEVER_S
        wait_for(lambda: not rank.executor._lanes.hung)
        assert len(threads_of(rank, GET)) == 2
        check_is_clean(rank)
    finally:
        logging.getLogger(EXECUTOR_LOG).setLevel(logging.NOTSET)
    reports += rank.executor.drain()
    assert Counter(report.job_id for report in reports) == dict.fromkeys(range(num_loads), 1)
    given_up = rank.registry.snapshot()["kvpool_failures{kind=store_stuck}"]
    assert 0 < given_up < num_loads
    assert not threads.alive("kvpool-get")
