"""The scheduler side of an engine whose sliding windows free blocks while requests run.

The test plays the engine with a pool of reused blocks and their contents. When a save is gathered,
each block must hold the tokens that the save names. Each step must find all tokens that it reads.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduler.scheduler_bench import CHUNK, LIMIT_S, View, hashes_of, layer_group, put_cells
from tests.support.fakes import FakeClock, FakeRequest, PatientLookups
from tests.support.invariants import check
from tests.support.memory_store import MemoryStore
from vllm_kvpool.config import KVPoolConfig, KVRole, RequestOptions
from vllm_kvpool.identity.chunk_hash import RequestIdentity
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.topology import FULL_ATTENTION, AttentionWindow, KVCacheGroup
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.blocks import HELD_SHARE, all_blocks
from vllm_kvpool.scheduler.messages import Loaded, StepPlan, StepReport
from vllm_kvpool.scheduler.pool_scheduler import PoolScheduler
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.request import PoolShape, ScheduledStep
from vllm_kvpool.transfer.ops import NULL_BLOCK, LoadPlan, SavePlan

PLENTY = 10_000
Content = tuple[int, tuple[int, ...]]  # KV cache group, and all tokens up to that one


class Pool:
    """Blocks with references and contents; the block that is free for longest is reused."""

    def __init__(self, num_blocks: int) -> None:
        self.free = deque(range(NULL_BLOCK + 1, num_blocks))
        self.references: Counter[int] = Counter()
        self.content: dict[int, dict[int, Content]] = {}

    def take(self) -> int:
        block = self.free.popleft()
        self.references[block] = 1
        self.content[block] = {}
        return block

    def pin(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert self.references[block] > 0, f"block {block} is nobody's"
            self.references[block] += 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert self.references[block] > 0, f"block {block} is released once too often"
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)

    def num_if_all_free(self) -> int:
        return 0 if +self.references else len(self.free)


@dataclass
class Request:
    view: View
    tables: list[list[int]]
    stale: list[list[int]]  # the tables as older releases tell them: what has gone stays in them
    state: str = "waiting"  # waiting, loading, running
    load: LoadPlan | None = None


@dataclass
class Gathering:
    plan: SavePlan
    tokens: list[int]
    ranks_left: int


class Engine:
    """vLLM's scheduler and all ranks, over a real lookup service and store."""

    def __init__(
        self,
        blocks: tuple[int, ...] = (16, 16),
        reaches: tuple[AttentionWindow, ...] = (FULL_ATTENTION, AttentionWindow(sliding=40)),
        *,
        marks_gone: bool = True,
        num_blocks: int = 200,
        max_held: int = PLENTY,
        num_ranks: int = 1,
        save_decode: bool = False,
    ) -> None:
        self.groups = tuple(KVCacheGroup(b, r) for b, r in zip(blocks, reaches, strict=True))
        self.layer_groups = tuple(
            layer_group(f"k{i}", row_bytes=8, window=group.window)
            for i, group in enumerate(self.groups)
        )
        self.names = CellNames(make_namespace("model", "0" * 12), self.layer_groups)
        self.marks_gone, self.num_ranks = marks_gone, num_ranks
        self.clock = FakeClock(time.monotonic())
        self.pool = Pool(num_blocks)
        self.memory = MemoryStore("", 1 << 24)
        shape = PoolShape(CHUNK, self.groups, num_ranks, max_held)
        block = 1
        while any(block % group.block_size for group in self.groups):
            block += 1
        self.lookups = PatientLookups((self.memory,), self.names, CHUNK, block=block)
        self.scheduler = PoolScheduler(
            KVPoolConfig(save_decode=save_decode),
            KVRole.BOTH,
            shape,
            self.lookups,
            MetricsRegistry(),
            self.pool,
            self.clock,
        )
        self.requests: dict[str, Request] = {}
        self.gathering: dict[int, Gathering] = {}
        self.tokens_of_save: dict[int, list[int]] = {}
        self.preempted: list[str] = []
        self.num_gaps = 0
        self.saved: set[tuple[str, int]] = set()  # request, chunk

    # Requests

    def add(self, request_id: str, tokens: Sequence[int]) -> Request:
        view: View = FakeRequest(request_id, list(tokens), RequestOptions(), RequestIdentity())
        empty: list[list[int]] = [[] for _ in self.groups]
        request = Request(view, [list(t) for t in empty], [list(t) for t in empty])
        self.requests[request_id] = request
        self.scheduler.add(view)
        self.answers()
        return request

    def answers(self) -> None:
        """Wait until every lookup is answered."""
        while self.scheduler._lookups._open:
            self.lookups.wait(LIMIT_S)
            self.scheduler._take_answers()

    def admit(self, request_id: str) -> int | None:
        """Admit a request and return the tokens to load; None without free blocks for them."""
        request = self.requests[request_id]
        self.scheduler.match(request_id, 0)
        self.answers()
        count, _ = self.scheduler.match(request_id, 0)
        assert count is not None
        if not self._room_for(request, 0, count):
            return None
        self._grow(request, count, count)
        self.scheduler.allocated(request_id, request.tables if count else (), count)
        request.view.num_computed_tokens = count
        request.state = "loading" if count else "running"
        return count

    def step(self, scheduled: dict[str, int]) -> StepPlan:
        """Run a step without the requests that have no room for their blocks."""
        fitting = {}
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            before = request.view.num_computed_tokens
            self._let_go(request, before)
            if self._room_for(request, before, before + count):
                self._grow(request, before, before + count)
                fitting[request_id] = count
        step = ScheduledStep(fitting, self._tables_of, tuple(self.preempted))
        self.preempted.clear()
        plan = self.scheduler.plan_step(step)
        for request_id, count in fitting.items():
            view = self.requests[request_id].view
            start = view.num_computed_tokens
            self._check_reads(request_id)
            self._write(self.requests[request_id], range(start, start + count))
            view.num_computed_tokens += count
            if view.num_computed_tokens >= view.num_tokens:
                view.num_computed_tokens = view.num_tokens
                view.output.append(7 * view.num_tokens % 11)
        self._take(plan)
        self.check()
        return plan

    def preempt(self, request_id: str) -> None:
        request = self.requests[request_id]
        request.view.preempt()
        self._free(request)
        request.state = "waiting"
        self.preempted.append(request_id)

    def finish(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        if request.state == "running":
            self._let_go(request, request.view.num_computed_tokens)
        self.tokens_of_save[-1] = list(request.view.tokens())
        late = len(self.scheduler.saves._late)
        self.scheduler.finish(request_id, request.tables)
        for plan in self.scheduler.saves._late[late:]:
            self.tokens_of_save[plan.job_id] = list(request.view.tokens())
        self._free(request)
        self.check()

    def end_load(self, request_id: str) -> bool:
        """Return True if all cells were there.

        Otherwise the request restarts, as in newer releases.
        """
        request = self.requests[request_id]
        assert request.load is not None
        load, request.load = request.load, None
        chunk = self._first_missing(load)
        if chunk is None:
            for group, pages in enumerate(load.pages):
                for token in range(pages.token_start, pages.token_stop):
                    self._put(request, group, token)
            request.state = "running"
        else:
            report = StepReport(loads={request_id: Loaded(chunk * CHUNK)})
            self.scheduler.apply(report)
            request.view.num_computed_tokens = 0
            self._free(request)
            request.state = "waiting"
        self.scheduler.load_ended(request_id)
        self.check()
        return chunk is None

    def gather(self, job: int, ranks: int = 1) -> None:
        """Gather a save on so many ranks, and check the content of its pages."""
        gathering = self.gathering[job]
        plan, tokens = gathering.plan, gathering.tokens
        for group, pages in enumerate(plan.pages):
            size = self.groups[group].block_size
            for token in range(pages.token_start, pages.token_stop):
                block = pages.block_ids[(token - pages.table_start) // size]
                if block != NULL_BLOCK:
                    held = self.pool.content[block].get(token % size)
                    assert held == (group, tuple(tokens[: token + 1])), (plan, group, token)
        self.scheduler.apply(StepReport(gathered={plan.job_id: ranks}))
        gathering.ranks_left -= ranks
        if not gathering.ranks_left:
            del self.gathering[job]
            self._store(plan)
        self.check()

    # Plans and effects of a step

    def _tables_of(self, request_id: str) -> list[list[int]]:
        request = self.requests[request_id]
        return request.tables if self.marks_gone else request.stale

    def _take(self, plan: StepPlan) -> None:
        for load in plan.loads:
            self.requests[load.request_id].load = load
        for save in plan.saves:
            request = self.requests.get(save.request_id)
            known = self.tokens_of_save.pop(save.job_id, None)
            tokens = known if request is None else list(request.view.tokens())
            assert tokens is not None
            assert list(save.hashes) == hashes_of(tokens)[save.first_chunk :][: len(save.hashes)]
            self.gathering[save.job_id] = Gathering(save, tokens, self.num_ranks)
            self.num_gaps += sum(NULL_BLOCK in pages.block_ids for pages in save.pages)
            for chunk in range(len(save.hashes)):
                self.saved.add((save.request_id, save.first_chunk + chunk))

    def _room_for(self, request: Request, computed: int, stop: int) -> bool:
        wanted = sum(
            -(-stop // group.block_size) - len(table)
            for group, table in zip(self.groups, request.tables, strict=True)
        )
        return wanted <= len(self.pool.free)

    def _grow(self, request: Request, computed: int, stop: int) -> None:
        """Allocate blocks for all tokens before `stop` that are still read."""
        for i, group in enumerate(self.groups):
            gone = group.window.first_read(computed) // group.block_size
            for index in range(len(request.tables[i]), -(-stop // group.block_size)):
                block = NULL_BLOCK if index < gone else self.pool.take()
                request.tables[i].append(block)
                request.stale[i].append(block)

    def _let_go(self, request: Request, computed: int) -> None:
        """Free the blocks before each window, as vLLM does before it allocates."""
        for i, group in enumerate(self.groups):
            table = request.tables[i]
            for index in range(
                min(len(table), group.window.first_read(computed) // group.block_size)
            ):
                if table[index] != NULL_BLOCK:
                    self.pool.unpin((table[index],))
                    table[index] = NULL_BLOCK

    def _free(self, request: Request) -> None:
        for table, stale in zip(request.tables, request.stale, strict=True):
            self.pool.unpin([block for block in table if block != NULL_BLOCK])
            table.clear()
            stale.clear()

    def _put(self, request: Request, group: int, token: int) -> None:
        size = self.groups[group].block_size
        block = request.tables[group][token // size]
        assert block != NULL_BLOCK
        tokens = tuple(request.view.tokens()[: token + 1])
        self.pool.content[block][token % size] = (group, tokens)

    def _write(self, request: Request, tokens: range) -> None:
        for group in range(len(self.groups)):
            for token in tokens:
                self._put(request, group, token)

    def _check_reads(self, request_id: str) -> None:
        """Assert that attention finds all computed tokens that it reads."""
        request = self.requests[request_id]
        computed = request.view.num_computed_tokens
        tokens = request.view.tokens()
        for i, group in enumerate(self.groups):
            for token in range(group.window.first_read(computed), computed):
                block = request.tables[i][token // group.block_size]
                found = self.pool.content.get(block, {}).get(token % group.block_size)
                assert found == (i, tuple(tokens[: token + 1])), (request_id, i, token)

    # The store

    def _store(self, plan: SavePlan) -> None:
        """Store a save as the planner would: cells with a freed block are left out."""
        for number, chunk_hash in enumerate(plan.hashes, plan.first_chunk):
            for i, pages in enumerate(plan.pages):
                size = self.groups[i].block_size
                first = (number * CHUNK - pages.table_start) // size
                stop = -(-((number + 1) * CHUNK - pages.table_start) // size)
                if NULL_BLOCK not in pages.block_ids[first:stop]:
                    put_cells(self.memory, self.names.of_chunk(chunk_hash, i))

    def _first_missing(self, load: LoadPlan) -> int | None:
        for number, chunk_hash in enumerate(load.hashes, load.first_chunk):
            for i, pages in enumerate(load.pages):
                start, stop = number * CHUNK, (number + 1) * CHUNK
                is_needed = start < pages.token_stop and stop > pages.token_start
                if is_needed and not all(self.memory.exists(self.names.of_chunk(chunk_hash, i))):
                    return number
        return None

    # What must hold

    def check(self) -> None:
        check(self.scheduler)
        ledger = self.scheduler.saves.ledger
        plans = [g.plan for g in self.gathering.values()] + list(self.scheduler.saves._late)
        owners = Counter(block for plan in plans for block in all_blocks(plan.pages))
        assert owners.total() == ledger.num_blocks
        for request_id in ledger._held:
            assert request_id in self.requests
            owners.update(ledger.held(request_id).values())
        for request in self.requests.values():
            owners.update(b for table in request.tables for b in table if b != NULL_BLOCK)
        assert owners == Counter({b: n for b, n in self.pool.references.items() if n})
        assert NULL_BLOCK not in owners
        assert set(self.pool.free).isdisjoint(owners)

    def close(self) -> None:
        """End everything and assert that nothing is left."""
        for request_id in list(self.requests):
            self.finish(request_id)
        self.step({})
        for job, gathering in list(self.gathering.items()):
            self.gather(job, gathering.ranks_left)
        assert self.scheduler.saves.ledger.num_held == self.scheduler.saves.ledger.num_blocks == 0
        assert not self.scheduler.saves.has_pending
        assert self.scheduler.saves.ledger._held == {}
        assert not any(self.pool.references.values())
        assert self.lookups.close()


def least_held(engine_blocks: Sequence[int]) -> int:
    """Return the smallest limit of pinned blocks that an engine may have."""
    return HELD_SHARE * sum(-(-CHUNK // block) + 1 for block in engine_blocks)


def run(engine: Engine, request_id: str, counts: Sequence[int]) -> None:
    """Compute a request in these steps. Every save is gathered before the next step."""
    for count in counts:
        engine.step({request_id: count})
        for job in list(engine.gathering):
            engine.gather(job, engine.num_ranks)


# Examples


@pytest.mark.parametrize("marks_gone", [True, False])
@pytest.mark.parametrize("window", [1, 8, 17, 40, 1000])
@pytest.mark.parametrize("count", [1, 5, 16, 31, 96])
def test_windows_of_chunks_that_span_steps_are_saved_whole(
    marks_gone: bool, window: int, count: int
) -> None:
    engine = Engine(
        reaches=(FULL_ATTENTION, AttentionWindow(sliding=window)), marks_gone=marks_gone
    )
    engine.add("a", range(100))
    assert engine.admit("a") == 0
    run(engine, "a", [count] * (100 // count))
    saved = 100 // count * count // CHUNK
    assert engine.num_gaps == 0
    assert engine.saved == {("a", chunk) for chunk in range(saved)}
    engine.finish("a")
    engine.add("b", range(100))
    assert engine.admit("b") == saved * CHUNK
    engine.step({})
    assert engine.end_load("b")
    engine.step({"b": 4})
    engine.close()


@pytest.mark.parametrize("blocks", [(16, 16), (32, 16), (16, 48), (64, 16), (16, 128)])
@pytest.mark.parametrize("marks_gone", [True, False])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_with_as_few_blocks_as_may_be_every_chunk_of_a_request_is_still_saved(
    blocks: tuple[int, int], marks_gone: bool, count: int
) -> None:
    """Blocks held for windows must not take the room of the save that they are held for."""
    engine = Engine(blocks, marks_gone=marks_gone, max_held=least_held(blocks))
    engine.add("a", range(200))
    engine.admit("a")
    for _ in range(200 // count):
        saved = len(engine.saved)
        is_due = engine.requests["a"].view.num_computed_tokens + count >= (saved + 1) * CHUNK
        run(engine, "a", [count])
        assert len(engine.saved) == saved + is_due or count > CHUNK
    engine.close()
    assert {chunk for _, chunk in engine.saved} == set(range(200 // count * count // CHUNK))


@pytest.mark.parametrize("marks_gone", [True, False])
def test_what_could_not_be_held_is_a_gap_and_not_what_lies_there_now(marks_gone: bool) -> None:
    engine = Engine(marks_gone=marks_gone, num_blocks=40, max_held=least_held((16, 16)))
    engine.add("a", range(350))
    engine.admit("a")
    saves = [save for _ in range(3) for save in engine.step({"a": 32}).saves]
    for _ in range(10):
        assert engine.step({"a": 16}).saves == ()
    assert engine.scheduler.saves.ledger.room == 0
    for save in saves:
        engine.gather(save.job_id)
    run(engine, "a", [1] * 10)
    assert {chunk for _, chunk in engine.saved} == set(range(8))
    assert engine.num_gaps > 0
    engine.close()


def test_several_requests_that_hold_blocks_do_not_keep_each_other_from_saving() -> None:
    engine = Engine(max_held=least_held((16, 16)))
    names = "abcdef"
    for name in names:
        engine.add(name, [ord(name), *range(199)])
        engine.admit(name)
    for step in range(1, 26):
        is_due = any((name, step * 8 // CHUNK - 1) not in engine.saved for name in names)
        saves = engine.step(dict.fromkeys(names, 8)).saves
        assert saves or not is_due or step * 8 < CHUNK
        for job in list(engine.gathering):
            engine.gather(job)
    for name in names:
        engine.finish(name)
    engine.close()


def test_what_is_held_of_a_preempted_request_is_let_go() -> None:
    engine = Engine()
    engine.add("a", range(100))
    engine.admit("a")
    run(engine, "a", [16])
    assert engine.scheduler.saves.ledger.num_held == 1
    engine.preempt("a")
    engine.step({})
    assert engine.scheduler.saves.ledger.num_held == 0
    engine.close()


def test_what_is_held_is_let_go_when_a_late_answer_forbids_to_save() -> None:
    engine = Engine()
    request = engine.add("a", range(100))
    engine.admit("a")
    run(engine, "a", [16])
    engine.preempt("a")
    engine.step({})
    gate = threading.Event()
    request.view.identify = lambda: None if gate.wait(LIMIT_S) else RequestIdentity()
    assert engine.scheduler.match("a", 0) == (None, False)
    engine.clock.advance(1)
    assert engine.scheduler.match("a", 0) == (0, False)
    engine.scheduler.allocated("a", (), 0)
    request.state = "running"
    engine.step({"a": 16})
    assert engine.scheduler.saves.ledger.num_held == 1
    gate.set()
    engine.answers()
    assert engine.step({"a": 84}).saves == ()
    engine.finish("a")
    engine.close()


def test_what_is_held_is_let_go_with_the_last_chunk() -> None:
    engine = Engine()
    engine.add("a", range(100))
    engine.admit("a")
    run(engine, "a", [40, 55])
    assert engine.scheduler.saves.ledger.num_held > 0
    run(engine, "a", [5])
    assert engine.scheduler.saves.ledger.num_held == 0
    engine.close()


@pytest.mark.parametrize("fails_again", [False, True])
def test_a_load_that_fails_starts_again_up_to_the_first_missing_chunk_once(
    fails_again: bool,
) -> None:
    engine = Engine()
    engine.add("a", range(100))
    engine.admit("a")
    run(engine, "a", [100])
    engine.finish("a")
    engine.add("b", range(100))
    assert engine.admit("b") == 96
    engine.step({})
    hashes = hashes_of(range(100))
    engine.memory.remove(engine.names.of_chunk(hashes[2], 1))
    assert not engine.end_load("b")
    assert engine.admit("b") == 64
    engine.step({})
    if fails_again:
        engine.memory.remove(engine.names.of_chunk(hashes[1], 0))
    assert engine.end_load("b") is not fails_again
    if fails_again:
        assert engine.admit("b") == 0
        run(engine, "b", [50, 50])
    else:
        run(engine, "b", [36])
    saved = {chunk for name, chunk in engine.saved if name == "b"}
    assert saved == ({0, 1, 2} if fails_again else {2})
    assert engine.num_gaps == 0
    engine.close()


# Anything in any order


class GroupsMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.tuples(st.sampled_from((16, 32)), st.sampled_from((8, 16, 48))),
        window=st.one_of(
            st.builds(AttentionWindow, sliding=st.integers(1, 70)),
            st.builds(AttentionWindow, local=st.integers(8, 70)),
        ),
        marks_gone=st.booleans(),
        num_blocks=st.sampled_from((60, 400)),
        spare=st.sampled_from((0, 3, PLENTY)),
        num_ranks=st.integers(1, 2),
        save_decode=st.booleans(),
    )
    def begin(
        self,
        blocks: tuple[int, int],
        window: AttentionWindow,
        marks_gone: bool,
        num_blocks: int,
        spare: int,
        num_ranks: int,
        save_decode: bool,
    ) -> None:
        self.engine = Engine(
            blocks,
            (FULL_ATTENTION, window),
            marks_gone=marks_gone,
            num_blocks=num_blocks,
            max_held=least_held(blocks) + spare,
            num_ranks=num_ranks,
            save_decode=save_decode,
        )
        self.arrived = 0

    def named(self, *states: str) -> list[str]:
        return sorted(r for r, x in self.engine.requests.items() if x.state in states)

    @rule(length=st.integers(1, 200), family=st.integers(0, 1))
    def arrive(self, length: int, family: int) -> None:
        if len(self.engine.requests) < 4:
            self.arrived += 1
            self.engine.add(f"r{self.arrived}", range(family * 1000, family * 1000 + length))

    @precondition(lambda self: len(self.engine.requests) < 4)
    @rule(
        length=st.integers(30, 200),
        family=st.integers(0, 1),
        gathers=st.sampled_from(("never", "at the end", "each step")),
    )
    def serve(self, length: int, family: int, gathers: str) -> None:
        """Admit a request, compute it as far as there is room, and end it."""
        self.arrive(length, family)
        request_id = f"r{self.arrived}"
        if self.engine.admit(request_id) is not None:
            self.engine.step({})
            if request_id in self.named("loading"):
                self.engine.end_load(request_id)
        view, computed = self.engine.requests[request_id].view, -1
        while request_id in self.named("running") and computed < view.num_computed_tokens < length:
            computed = view.num_computed_tokens
            self.engine.step({request_id: min(length - computed, 60)})
            if gathers == "each step":
                self.gather_all()
        if gathers == "at the end":
            self.gather_all()
        self.engine.finish(request_id)

    def gather_all(self) -> None:
        for job, gathering in list(self.engine.gathering.items()):
            self.engine.gather(job, gathering.ranks_left)

    @precondition(lambda self: self.named("waiting"))
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.named("waiting")))
        if self.engine.admit(request_id) is not None:
            self.engine.step({})  # a load is told at once

    @precondition(lambda self: self.named("running"))
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        scheduled = {}
        for request_id in self.named("running"):
            view = self.engine.requests[request_id].view
            left = view.num_tokens - view.num_computed_tokens
            count = data.draw(st.integers(0, min(left, 60)))
            if count:
                scheduled[request_id] = count
        self.engine.step(scheduled)

    @precondition(lambda self: self.named("loading"))
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        self.engine.end_load(data.draw(st.sampled_from(self.named("loading"))))

    @precondition(lambda self: self.engine.gathering)
    @rule(data=st.data())
    def gather(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.engine.gathering)))
        left = self.engine.gathering[job].ranks_left
        self.engine.gather(job, data.draw(st.integers(1, left)))

    @precondition(lambda self: self.named("running"))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.preempt(data.draw(st.sampled_from(self.named("running"))))

    @precondition(lambda self: self.named("running", "waiting"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.engine.finish(data.draw(st.sampled_from(self.named("running", "waiting"))))

    @precondition(lambda self: self.engine.memory._table.list_keys())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        keys = sorted(self.engine.memory._table.list_keys())
        self.engine.memory.remove([data.draw(st.sampled_from(keys))])

    @precondition(lambda self: self.engine.scheduler.saves._late)
    @rule()
    def drop_late_saves(self) -> None:
        """Drop late saves, as when the engine's own prefix cache is emptied."""
        self.engine.scheduler.saves.drop_late()
        self.engine.check()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for request_id in self.named("loading"):
                self.engine.end_load(request_id)
            self.engine.close()


TestGroupsMachine = GroupsMachine.TestCase
TestGroupsMachine.settings = settings(
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
