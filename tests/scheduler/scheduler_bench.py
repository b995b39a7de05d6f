"""A scheduler over a real lookup service and a store, and an engine that a test plays."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.buffers import make_buffer
from tests.support.fakes import FakeClock, FakePins, FakeRequest, PatientLookups
from tests.support.faults import Fault, FaultyStore
from tests.support.invariants import check
from tests.support.memory_store import MemoryStore
from vllm_kvpool.config import KVPoolConfig, KVRole, RequestOptions
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.topology import (
    FULL_ATTENTION,
    AttentionWindow,
    KVCacheGroup,
    LayerGroup,
    Topology,
)
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.aliases import Aliases
from vllm_kvpool.scheduler.lookup import Lookup
from vllm_kvpool.scheduler.messages import Loaded, StepPlan, StepReport, Stored
from vllm_kvpool.scheduler.pool_scheduler import PoolScheduler
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.request import PoolShape, ScheduledStep, StateOffer
from vllm_kvpool.storage.base import ChunkRef, Store
from vllm_kvpool.transfer.ops import NULL_BLOCK, JobId, JobPages, SavePlan

CHUNK = 32


def layer_group(
    name: str = "",
    *,
    heads: int = 1,
    layers: int = 1,
    span: int = 0,
    row_bytes: int = 16,
    window: AttentionWindow = FULL_ATTENTION,
    **more: Any,
) -> LayerGroup:
    """Return layers of one rank, all of them in a span unless `span` is smaller."""
    topology = Topology(heads, 1, ((0, layers),), span or layers, layer_group=name)
    return LayerGroup(topology, row_bytes=row_bytes, window=window, **more)


LAYER_GROUPS = (layer_group(),)
NAMES = CellNames(make_namespace("model", "0" * 12), LAYER_GROUPS)
LIMIT_S = 30.0
PENDING, NOTHING = (None, False), (0, False)
View = FakeRequest[RequestOptions, RequestIdentity]


def chain_of(tokens: Sequence[int], chunk_tokens: int = CHUNK) -> ChunkChain:
    chain = ChunkChain(chunk_tokens, RequestIdentity())
    chain.extend(tokens)
    return chain


def hashes_of(tokens: Sequence[int]) -> list[bytes]:
    return chain_of(tokens).hashes


def put_cells(store: Store, keys: Sequence[str]) -> None:
    """Store these cells with arbitrary content."""
    store.put(keys, [make_buffer(1)] * len(keys), [ChunkRef("")] * len(keys))


@dataclass
class Waits:
    """The scheduler's waits for lookups: each timeout in seconds, and the last condition."""

    seconds: list[float] = field(default_factory=list)
    until: Callable[[], bool] | None = None

    def wait(self, timeout_s: float, until: Callable[[], bool] | None = None) -> bool:
        self.seconds.append(timeout_s)
        self.until = until
        return False


def has_none() -> bool:
    """Return False: no request has arrived. Stands for an engine that sees arrivals."""
    return False


class Bench:
    """A scheduler over a real lookup service and a store of the test's. Time stands still."""

    def __init__(
        self,
        block: int = 16,
        role: KVRole = KVRole.BOTH,
        num_ranks: int = 1,
        max_pinned: int = 1000,
        config: KVPoolConfig | None = None,
        host_tier: bool = False,
        can_save: Callable[[], bool] = lambda: True,
        names: CellNames = NAMES,
        groups: tuple[KVCacheGroup, ...] = (),
        has_ends: bool = False,
        alias_step: int = 0,
        **shape: Any,
    ) -> None:
        self.block, self.names, self.num_ranks = block, names, num_ranks
        self.num_replicas = shape.get("num_replicas", 1)
        self.memory = MemoryStore("", 1 << 24)
        self.store = FaultyStore(self.memory)
        self.aliases = None
        if alias_step:
            self.aliases = Aliases((self.store,), (0,), names, CHUNK, alias_step, answer_s=LIMIT_S)
            for writer in self.aliases._writers:  # at once, so that a run can be repeated
                writer.post = writer._perform  # type: ignore[method-assign]
        host_ranks = num_ranks if host_tier else 0
        search_block = block if any(each.is_state for each in groups) else 1
        self.lookups = PatientLookups(
            (self.store,), names, CHUNK, host_ranks, search_block, aliases=self.aliases
        )
        self.clock = FakeClock(time.monotonic())
        self.registry = MetricsRegistry()
        self.pins = FakePins()
        made = PoolShape(
            *(CHUNK, groups or (KVCacheGroup(block),), num_ranks, max_pinned),
            prefetches=host_tier,
            has_ends=has_ends or alias_step > 0,
            alias_step=alias_step,
            **shape,
        )
        self.scheduler = PoolScheduler(
            *(config or KVPoolConfig(), role, made, self.lookups, self.registry, self.pins),
            *(self.clock, can_save),
        )
        self.views: dict[str, View] = {}
        self.tables: dict[str, list[int]] = {}
        self.next_block = 1
        self.preempted: Sequence[str] = ()
        self.offers: dict[str, list[StateOffer]] = {}  # of the next step
        self.drafted: list[str] = []  # likewise
        self.waits = Waits()
        self.others: dict[bytes, Sequence[int]] = {}  # tokens before the end of a script's chunk
        self.plan = StepPlan()  # of the last step of a script
        self.gathering: list[SavePlan] = []  # saves of which its steps have told
        self.unconfirmed: list[SavePlan] = []  # likewise

    def close(self) -> None:
        self.store.heal()
        assert self.lookups.close()

    def watch_waits(self) -> Waits:
        """Record waits for lookups from now on, without waiting."""
        self.lookups.wait = self.waits.wait  # type: ignore[method-assign]
        return self.waits

    # The store

    def hold(self, tokens: Sequence[int], chunks: range) -> None:
        for chunk in chunks:
            put_cells(self.memory, self.names.of_chunk(hashes_of(tokens)[chunk]))

    # The engine

    def add(
        self,
        request_id: str = "a",
        num_tokens: int = 100,
        options: RequestOptions | None = None,
        shared: int = 1 << 30,
        **traits: Any,
    ) -> View:
        """Add a request with prompt 0, 1, 2, …, and other tokens behind the first `shared`."""
        view: View = FakeRequest(
            request_id,
            [token if token < shared else 1000 + token for token in range(num_tokens)],
            options or RequestOptions(),
            RequestIdentity(),
            **traits,
        )
        self.views[request_id] = view
        self.tables[request_id] = []
        self.scheduler.add(view)
        check(self.scheduler)
        return view

    def match(self, request_id: str = "a", num_computed: int = 0) -> tuple[int | None, bool]:
        """Wait for the lookup and return the scheduler's answer."""
        while (offer := self.scheduler.match(request_id, num_computed)) == PENDING:
            answered = len(self.lookups._results)
            self.lookups.wait(LIMIT_S)
            assert self.lookups._results or answered, "no answer"
        check(self.scheduler)
        return offer

    def grow(self, request_id: str, num_tokens: int) -> None:
        table = self.tables[request_id]
        while len(table) * self.block < num_tokens:
            table.append(self.next_block)
            self.next_block += 1

    def tables_of(self, request_id: str) -> Sequence[list[int]]:
        """Return a request's block table in each KV cache group."""
        return (self.tables[request_id],)

    def allocate(self, request_id: str, computed: int, external: int) -> None:
        self.grow(request_id, computed + external)
        tables = self.tables_of(request_id) if external else ()
        self.scheduler.allocated(request_id, tables, external)
        self.views[request_id].num_computed_tokens = computed + external
        check(self.scheduler)

    def step(self, **scheduled: int) -> StepPlan:
        """An engine step that computes so many tokens of each request."""
        for request_id, count in scheduled.items():
            self.grow(request_id, self.views[request_id].num_computed_tokens + count)
        plan = self.scheduler.plan_step(
            ScheduledStep(
                scheduled, self.tables_of, self.preempted, self.offers, tuple(self.drafted)
            )
        )
        self.offers, self.drafted = {}, []
        for request_id, count in scheduled.items():
            self.views[request_id].num_computed_tokens += count
        check(self.scheduler)
        self.pins.check()
        return plan

    def admit(self, request_id: str = "a") -> tuple[int | None, bool]:
        """Match and allocate a request. The offered tokens are not loaded yet."""
        offer = self.match(request_id)
        self.allocate(request_id, 0, offer[0] or 0)
        return offer

    def loading(self, stored: int, **traits: Any) -> View:
        """Add a request whose load of so many stored chunks has been planned."""
        self.hold(range(1000), range(stored))
        view = self.add(**traits)
        self.admit(view.request_id)
        self.step()
        return view

    def block_lookup(self, request_id: str = "a") -> View:
        """Add a request whose lookup hangs in the store."""
        self.store.inject(Fault.BLOCKED, "exists")
        view = self.add(request_id)
        assert self.store.entered.wait(LIMIT_S)
        return view

    def gather(self, plan: StepPlan, ranks: int = 1) -> None:
        self.scheduler.apply(StepReport(gathered={s.job_id: ranks for s in plan.saves}))
        check(self.scheduler)

    def stored(self, *saves: SavePlan) -> None:
        """Report from every rank that a store has all cells of the saves."""
        how = Stored(self.num_ranks, frozenset({0}))
        self.scheduler.apply(StepReport(stored={save.job_id: how for save in saves}))

    def load_stops(self, request_id: str, tokens: int, seconds: float = 0.0) -> None:
        self.scheduler.apply(StepReport(loads={request_id: Loaded(tokens, seconds)}))
        self.scheduler.load_ended(request_id)
        self.views[request_id].num_computed_tokens = tokens // self.block * self.block
        check(self.scheduler)

    def finish(self, request_id: str = "a") -> dict[str, dict[str, Any]] | None:
        answer = self.scheduler.finish(request_id, self.tables_of(request_id))
        check(self.scheduler)
        return answer

    def settle(self) -> StepPlan:
        """Let the lookup service answer all questions, and take the answers."""
        self.lookups.wait(LIMIT_S)
        assert self.lookups._results, "no answer"
        return self.step()

    def take_answers(self) -> None:
        """Take all answers without a step, as another request's `match` does."""
        while self.scheduler._lookups._open:
            self.lookups.wait(LIMIT_S)
            assert self.lookups._results, "no answer"
            self.scheduler._take_answers()

    def end_reset(self) -> None:
        """Report that one rank has dropped its saves; the namespace is then removed again."""
        self.scheduler.apply(StepReport(dropped={self.scheduler._validity.reset.generation: 1}))
        self.lookups.submit(Lookup(-1, RequestIdentity, range(CHUNK), True, 0, 0.0, 0.0))
        self.settle()

    def counts(self, name: str) -> dict[str, float]:
        return {
            k.removeprefix(name): v
            for k, v in self.registry.snapshot().items()
            if k.startswith(name)
        }

    def save(self, job: int, chunks: range, request_id: str = "a") -> SavePlan:
        """Return the save of these chunks as it should be planned."""
        start, stop = chunks.start * CHUNK // self.block, -(-chunks.stop * CHUNK // self.block)
        hashes = hashes_of(self.views[request_id].tokens())
        return SavePlan(
            JobId(job),
            request_id,
            chunks.start,
            tuple(hashes[chunks.start : chunks.stop]),
            (
                JobPages(
                    tuple(self.tables[request_id][start:stop]),
                    start * self.block,
                    chunks.start * CHUNK,
                    chunks.stop * CHUNK,
                ),
            ),
            before=tuple(hashes[max(0, chunks.start - self.num_replicas) : chunks.start]),
        )


STATE_NAMES = CellNames(
    make_namespace("model", "0" * 12),
    (
        layer_group("full", layers=2, span=1),
        layer_group("state", layers=2, span=1, row_bytes=64, is_state=True),
    ),
)


class StateBench(Bench):
    """A scheduler of a model with attention in group 0 and recurrent states in groups 1 and 2."""

    def __init__(self, block: int = CHUNK, state_stride: int = 0, **more: Any) -> None:
        state = KVCacheGroup(block, is_state=True)
        super().__init__(
            block,
            names=STATE_NAMES,
            groups=(KVCacheGroup(block), state, state),
            config=KVPoolConfig(save_decode=state_stride > 0),
            state_stride=state_stride,
            **more,
        )

    def tables_of(self, request_id: str) -> Sequence[list[int]]:
        """Return tables as vLLM makes them: a state group has only the last token's block."""
        attention = self.tables[request_id]
        before = [NULL_BLOCK] * (len(attention) - 1)
        return (attention, *([*before, base + len(attention)] for base in (100, 200)))

    def store_cells(self, layer_group: int, *chunks: int) -> None:
        for chunk in chunks:
            put_cells(self.memory, self.names.of_chunk(hashes_of(range(1000))[chunk], layer_group))
