"""An engine of the product's own two sides over pages in host memory, without vLLM.

`serve` takes requests through the steps that vLLM's scheduler and workers would: lookup, load,
computing what is not loaded (here: writing what must be there), save. It compares every loaded row
with what it must be. A scheduler's side and one worker's side for each rank live in one process and
are driven by one thread.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from tests.soak.content import (
    CHUNK,
    HEADS,
    LAYER_SPAN,
    LAYERS,
    MOST_TOKENS,
    ROW_BYTES,
    ROW_WORDS,
    Words,
    kv_lhtw,
    prompt,
)
from tests.support.fakes import NULL_BLOCK, FakePins, FakeRequest
from tests.support.invariants import check
from vllm_kvpool.config import KVPoolConfig, KVRole, RequestOptions, read_config
from vllm_kvpool.identity.chunk_hash import RequestIdentity
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.metrics import merge_samples, named_values
from vllm_kvpool.scheduler.messages import StepPlan, StepReport
from vllm_kvpool.scheduler.request import ScheduledStep
from vllm_kvpool.scheduler.scheduler_part import SchedulerPart
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.worker.worker_part import WorkerPart

NAMESPACE = make_namespace("soak", "0" * 12)
LOAD_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 2.0
STEP_TOKENS = 256  # what a step computes of a request
MOST_REQUESTS = 3  # at a time
PINS_LIMIT_S = 10.0
PAUSE_S = 0.001  # of a step that computes nothing, as vLLM's: others have the core meanwhile
POISON = np.uint64(0xDEADBEEFDEADBEEF)  # no row consists of it


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Configuration of an engine; picklable."""

    stores: tuple[str, ...]
    tp_size: int
    block_size: int
    role: KVRole = KVRole.BOTH
    write_policy: str = "through"
    lookup_timeout_s: float = 0.5
    environment: tuple[tuple[str, str], ...] = ()


class Served(NamedTuple):
    """Result of a request; tokens count from the start of the prompt."""

    number: int
    chunked_tokens: int  # those in full chunks, which could be a hit
    offered_tokens: int
    kept_tokens: int
    wrong: str  # "" unless pages did not hold what was reported as loaded, or changed later
    lookup_s: float
    load_s: float
    total_s: float


SERVED_TIMES = ("lookup_s", "load_s", "total_s")


@dataclass(slots=True, eq=False)
class _Running:
    view: FakeRequest[RequestOptions, RequestIdentity]
    number: int
    block_ids: list[int]
    began: float
    matched: float | None = None  # when the lookup was answered
    loaded: float | None = None  # when every rank had reported the load
    ended: float = 0.0
    loaded_ranks: int = 0
    offered: int = 0
    kept: int = 0
    wrong: str = ""
    invalid_blocks: set[int] = field(default_factory=set)

    @property
    def id(self) -> str:
        return self.view.request_id

    @property
    def is_ready(self) -> bool:
        """True if the lookup and load have ended, and the request can be computed."""
        return self.matched is not None and (self.offered == 0 or self.loaded is not None)


class Rank:
    """A worker's side and its pages."""

    def __init__(self, config: KVPoolConfig, model: ModelShape, rank: int) -> None:
        topology = model.layer_groups[0].topology
        first = topology.first_head(rank)
        self._heads = slice(first, first + topology.heads_per_rank)
        self._block_size = block = model.groups[0].block_size
        shape = (LAYERS, model.num_blocks, topology.heads_per_rank, block, ROW_WORDS)
        pages = torch.zeros(shape, dtype=torch.int64)
        self.pages_lbhnw: Words = pages.numpy().view(np.uint64)
        layers = [from_token_content(layer) for layer in pages]
        self.part = WorkerPart(
            config, model, RankPlace(rank, 0, rank), layers, CpuCopier, finish_in_step=True
        )

    def poison(self, block_ids: Sequence[int]) -> None:
        """Put what is never right into blocks that are about to be loaded."""
        self.pages_lbhnw[:, block_ids] = POISON

    def compute(self, number: int, block_ids: Sequence[int], start: int, stop: int) -> None:
        """Write the KV of tokens `[start, stop)` into the pages, as a forward pass does."""
        kv = kv_lhtw(number)[:, self._heads]
        for block, tokens, inside in self._pieces(block_ids, start, stop):
            self.pages_lbhnw[:, block, :, inside] = kv[:, :, tokens]

    def difference(self, number: int, block_ids: Sequence[int], stop: int) -> str:
        """Describe where the KV of tokens `[0, stop)` is wrong; "" if it is right."""
        kv = kv_lhtw(number)[:, self._heads]
        for block, tokens, inside in self._pieces(block_ids, 0, stop):
            same = self.pages_lbhnw[:, block, :, inside] == kv[:, :, tokens]
            if not same.all():
                layer, head, token, word = np.argwhere(~same)[0].tolist()
                found = int(self.pages_lbhnw[layer, block, head, token + inside.start, word])
                return (
                    f"prompt {number}: {int((~same).any(-1).sum())} rows of block {block} differ, "
                    f"the first at layer {layer}, head {self._heads.start + head}, token "
                    f"{tokens.start + token}, word {word}: {found:#018x}"
                )
        return ""

    def digest(self) -> int:
        """Return a digest of all pages."""
        return xxhash.xxh3_64_intdigest(self.pages_lbhnw.data)

    def _pieces(
        self, block_ids: Sequence[int], start: int, stop: int
    ) -> Iterator[tuple[int, slice, slice]]:
        """Block id, tokens of the request, tokens of the block."""
        size = self._block_size
        for index in range(start // size, -(-stop // size)):
            first, last = max(start, index * size), min(stop, (index + 1) * size)
            inside = slice(first - index * size, last - index * size)
            yield block_ids[index], slice(first, last), inside


class Engine:
    """See the module docstring."""

    def __init__(self, spec: EngineSpec) -> None:
        per_request = -(-MOST_TOKENS // spec.block_size)
        topology = Topology(HEADS, spec.tp_size, ((0, LAYERS),), LAYER_SPAN)
        model = ModelShape(
            namespace=NAMESPACE,
            layer_groups=(LayerGroup(topology, ROW_BYTES),),
            groups=(KVCacheGroup(spec.block_size),),
            # As many again, since pinned blocks cannot be given to the next requests.
            num_blocks=1 + 2 * MOST_REQUESTS * per_request,
            num_ranks=spec.tp_size,
        )
        config = soak_config(spec)
        self._pins = FakePins()
        self._scheduler_part = SchedulerPart(config, spec.role, model, self._pins)
        self._scheduler = self._scheduler_part.scheduler
        self._ranks = [Rank(config, model, rank) for rank in range(spec.tp_size)]
        self._block_size = spec.block_size
        self._free = list(range(NULL_BLOCK + 1, model.num_blocks))
        self._names = itertools.count()
        self._chance = np.random.default_rng(0)
        self._digests: list[int] = []

    def serve(self, numbers: Sequence[int]) -> list[Served]:
        """Run requests for these prompts side by side to their end."""
        assert len(numbers) <= MOST_REQUESTS, numbers
        late = [rank.digest() for rank in self._ranks] != self._digests and bool(self._digests)
        running = [self._arrive(number) for number in numbers]
        left, done = list(running), []
        while left:
            done += self._step(left)
            left = [request for request in left if request not in done]
        self._release_pins()
        served = [self._judge(request) for request in running]
        if late:
            served[0] = served[0]._replace(wrong="pages changed while no request was there")
        self._digests = [rank.digest() for rank in self._ranks]
        return served

    def counted(self) -> dict[str, float]:
        """Return the metrics of the scheduler's side and the workers since the start."""
        total = self._scheduler_part.registry.samples()
        for rank in self._ranks:
            merge_samples(total, rank.part.registry.samples())
        return dict(named_values(total))

    def close(self) -> None:
        """End both sides."""
        for rank in self._ranks:
            rank.part.close()
        self._scheduler_part.close()

    def _arrive(self, number: int) -> _Running:
        tokens = prompt(number)
        name = f"r{next(self._names)}"
        view = FakeRequest(name, tokens, RequestOptions(), RequestIdentity())
        unpinned = [block for block in self._free if not self._pins.references[block]]
        count = -(-len(tokens) // self._block_size)
        block_ids = self._chance.permutation(unpinned)[:count].tolist()
        self._free = [block for block in self._free if block not in block_ids]
        self._scheduler.add(view)
        return _Running(view, number, block_ids, time.monotonic())

    def _step(self, requests: Sequence[_Running]) -> list[_Running]:
        """Run one engine step and return the requests that ended in it."""
        for request in requests:
            if request.matched is None:
                self._match(request)
        ready = {request.id: request for request in requests if request.is_ready}
        if not ready:
            time.sleep(PAUSE_S)
        plan = self._plan(ready)
        for rank in self._ranks:
            rank.part.worker.start_loads(plan)
        for request_id, count in self._tokens_of(ready).items():
            request = ready[request_id]
            start = request.view.num_computed_tokens
            for rank in self._ranks:
                rank.compute(request.number, request.block_ids, start, start + count)
            request.view.num_computed_tokens = start + count
        self._after_forward(plan, requests)
        ended = [r for r in ready.values() if r.view.num_computed_tokens == len(r.view.prompt)]
        for request in ended:
            request.ended = time.monotonic()
            request.view.output.append(0)
            self._scheduler.finish(request.id, (request.block_ids,))
        return ended

    def _match(self, request: _Running) -> None:
        offered, _ = self._scheduler.match(request.id, 0)
        if offered is None:
            return
        request.matched, request.offered = time.monotonic(), offered
        for rank in self._ranks:
            rank.poison(request.block_ids)
        self._scheduler.allocated(request.id, (request.block_ids,) if offered else (), offered)

    def _tokens_of(self, ready: dict[str, _Running]) -> dict[str, int]:
        return {
            request_id: min(STEP_TOKENS, len(r.view.prompt) - r.view.num_computed_tokens)
            for request_id, r in ready.items()
        }

    def _plan(self, ready: dict[str, _Running]) -> StepPlan:
        scheduled = self._tokens_of(ready)
        return self._scheduler.plan_step(
            ScheduledStep(scheduled, lambda name: (ready[name].block_ids,))
        )

    def _after_forward(self, plan: StepPlan, requests: Sequence[_Running]) -> None:
        """Save, collect what has ended in each rank, tell the scheduler's side."""
        reports = []
        for rank in self._ranks:
            rank.part.worker.start_saves(plan)
            results = rank.part.worker.finish_step(plan, set())
            for request in requests:
                request.loaded_ranks += request.id in results.loaded
                request.invalid_blocks |= results.invalid_blocks & set(request.block_ids)
            report = rank.part.worker.take_report()
            if report is not None:
                reports.append(report)
        self._scheduler.apply(StepReport.merge(reports))
        for request in requests:
            if request.loaded is None and request.loaded_ranks == len(self._ranks):
                self._load_ended(request)
        check(self._scheduler)

    def _load_ended(self, request: _Running) -> None:
        """Every rank has reported: what is before the first invalid block is as if computed."""
        self._scheduler.load_ended(request.id)
        request.loaded = time.monotonic()
        valid = itertools.takewhile(lambda b: b not in request.invalid_blocks, request.block_ids)
        request.view.num_computed_tokens = min(
            request.offered, sum(1 for _ in valid) * self._block_size
        )
        request.wrong = self._difference(request, request.view.num_computed_tokens)
        request.kept = request.view.num_computed_tokens

    def _difference(self, request: _Running, stop: int) -> str:
        found = (r.difference(request.number, request.block_ids, stop) for r in self._ranks)
        return next(filter(None, found), "")

    def _release_pins(self) -> None:
        """Steps without requests, until no block waits for its gather any more."""
        deadline = time.monotonic() + PINS_LIMIT_S
        while self._scheduler.saves.has_pending:
            assert time.monotonic() < deadline, "blocks stay pinned"
            time.sleep(PAUSE_S)
            self._after_forward(self._plan_idle(), ())

    def _plan_idle(self) -> StepPlan:
        plan = self._scheduler.plan_step(ScheduledStep({}, lambda name: ()))
        for rank in self._ranks:
            rank.part.worker.start_loads(plan)
        return plan

    def _judge(self, request: _Running) -> Served:
        """At the very end all pages must hold what was loaded or computed."""
        tokens = len(request.view.prompt)
        changed = self._difference(request, tokens)
        self._free += request.block_ids
        assert request.matched is not None
        return Served(
            number=request.number,
            chunked_tokens=tokens // CHUNK * CHUNK,
            offered_tokens=request.offered,
            kept_tokens=request.kept,
            wrong=request.wrong or (changed and f"changed after it was loaded: {changed}"),
            lookup_s=request.matched - request.began,
            load_s=(request.loaded or request.matched) - request.matched,
            total_s=request.ended - request.began,
        )


def soak_config(spec: EngineSpec) -> KVPoolConfig:
    """Short time limits, so that a fault's end is seen soon."""
    options: dict[str, object] = {
        "store": list(spec.stores),
        "write_policy": spec.write_policy,
        "chunk_tokens": CHUNK,
        "staging_bytes": "16MiB",
        "lookup_timeout_ms": int(spec.lookup_timeout_s * 1000),
        "load_timeout_s": LOAD_TIMEOUT_S,
        "shutdown_timeout_s": 2.0,
    }
    if "call_timeout_s" in {f.name for f in fields(KVPoolConfig)}:
        options["call_timeout_s"] = CALL_TIMEOUT_S
    return read_config(options, env={})
