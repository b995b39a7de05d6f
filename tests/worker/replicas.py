"""Ranks of one engine on one host that hold the same KV, in threads or in separate processes.

The model has one KV head. Its prompts are three chunks of two cells.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from tests.support.copiers import warm_copier
from tests.support.worker_steps import prompt_hashes
from vllm_kvpool.config import read_config
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.staging.arena import SLOT_ALIGNMENT
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES
from vllm_kvpool.transfer.executor import IDLE_TICK_S
from vllm_kvpool.transfer.ops import (
    JobId,
    JobPages,
    LoadPlan,
    PrefetchPlan,
    SaveGathered,
    SavePlan,
)
from vllm_kvpool.transfer.replicas import Card
from vllm_kvpool.worker.pool_worker import StepResults
from vllm_kvpool.worker.worker_part import WorkerPart

# Legend: L layers, H heads, T tokens, C content.
LAYERS, SPAN, CONTENT, BLOCK, CHUNK, CHUNKS = 4, 2, 16, 16, 32, 6
TOKENS = CHUNKS * CHUNK
NUM_CELLS = CHUNKS * LAYERS // SPAN
MODEL = make_namespace("replicas", "0" * 12)
LIMIT_S = 30.0

Gather = Callable[[bytes], Sequence[bytes]]


def hashes_of(prompt: int) -> tuple[bytes, ...]:
    return prompt_hashes(range(prompt * TOKENS, (prompt + 1) * TOKENS), CHUNK)


def kv_of(prompt: int) -> torch.Tensor:
    """Return a prompt's KV, `[L, 1, T, C]`, which is equal in every process."""
    generator = torch.Generator().manual_seed(prompt)
    shape = (LAYERS, 1, TOKENS, CONTENT)
    return torch.randint(-30000, 30000, shape, dtype=torch.int16, generator=generator)


class ReplicaRank:
    """A rank of `size` ranks. Without `gather` it knows of no other rank."""

    def __init__(
        self, rank: int, size: int, store: object, gather: Gather | None, **options: object
    ) -> None:
        self.rank = rank
        shape = (LAYERS, 1 + TOKENS // BLOCK, 1, BLOCK, CONTENT)
        every = torch.full(shape, -1, dtype=torch.int16)
        self.pages = every[:, 1:]
        model = ModelShape(
            namespace=MODEL,
            layer_groups=(LayerGroup(Topology(1, size, ((0, LAYERS),), SPAN), CONTENT * 2),),
            groups=(KVCacheGroup(BLOCK),),
            num_blocks=1 + TOKENS // BLOCK,
            num_ranks=size,
        )
        extra = {"store": store, "chunk_tokens": CHUNK, "staging_bytes": "1MiB", **options}
        self.part = WorkerPart(
            read_config(extra, env={}),
            model,
            RankPlace(rank, 0, rank),
            [from_token_content(layer) for layer in every],
            warm_copier,
            finish_in_step=True,
            gather=gather,
        )
        self.blocks = (JobPages(tuple(range(1, 1 + TOKENS // BLOCK)), 0, 0, TOKENS),)
        self.jobs = itertools.count(1)
        self.plan = StepPlan()
        self.closed = False

    def save(self, prompt: int) -> None:
        blocks = kv_of(prompt).unflatten(2, (-1, BLOCK)).transpose(1, 2)
        self.pages.copy_(blocks)
        plan = SavePlan(JobId(next(self.jobs)), f"s{prompt}", 0, hashes_of(prompt), self.blocks)
        self.part.worker.start_saves(StepPlan(saves=(plan,)))
        # A step ends after GATHER_WAIT_S, and the next load writes the pages.
        gathered = SaveGathered(plan.job_id, plan.request_id)
        assert self.part._executor.wait(lambda reports: gathered in reports, LIMIT_S)

    def prefetch(self, prompt: int) -> None:
        plan = PrefetchPlan(f"p{prompt}", hashes_of(prompt))
        self.part.worker.start_loads(StepPlan(prefetches=(plan,)))

    def reset(self, generation: int) -> None:
        self.part.worker.start_loads(StepPlan(generation=generation))

    def start_load(self, prompt: int, generation: int = 0) -> None:
        self.pages.fill_(-1)
        job = JobId(next(self.jobs))
        load = LoadPlan(job, f"r{prompt}", 0, hashes_of(prompt), self.blocks, 0, TOKENS)
        self.plan = StepPlan(loads=(load,), idle=True, generation=generation)
        self.part.worker.start_loads(self.plan)

    def finish_load(self) -> StepResults:
        """Wait for the load's end, and return its results. Loaded tokens must lie in the pages."""
        deadline = time.monotonic() + LIMIT_S
        while not (results := self.part.worker.finish_step(self.plan, set())).loaded:
            assert time.monotonic() < deadline, "the load did not end"
        return results

    def has_loaded(self, prompt: int) -> bool:
        """Finish the load, and return True if the pages hold the prompt's whole KV."""
        results = self.finish_load()
        loaded = self.pages.transpose(1, 2).flatten(2, 3)
        return not results.invalid_blocks and torch.equal(loaded, kv_of(prompt))

    def count(self, name: str, **labels: str) -> float:
        """Return a counter's sum over the labels that are not given."""
        samples = self.part.registry.snapshot()
        return sum(
            value
            for sample, value in samples.items()
            if sample.split("{")[0] == name
            and all(f"{key}={label}" in sample for key, label in labels.items())
        )

    @property
    def gets(self) -> float:
        """Number of cells that came from a store."""
        return self.count("kvpool_cells", direction="load", store="file")

    def borrowed(self, outcome: str = "done") -> float:
        """Return the number of cells asked of a replica that ended with `outcome`."""
        deadline = time.monotonic() + LIMIT_S
        while self.part._executor._engine.context.counts:  # not in the registry yet
            assert time.monotonic() < deadline, "the engine thread does not wake"
            time.sleep(IDLE_TICK_S / 10)
        return self.count("kvpool_cells", direction="load", store="replica", outcome=outcome)

    @property
    def num_kept(self) -> int:
        """Close the rank, and return the number of cells in its host tier."""
        self.close()  # updates the metrics
        cell = HEADER_BYTES + SPAN * CHUNK * CONTENT * 2
        slot_bytes = -(-cell // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        return round(self.count("kvpool_host_bytes") / slot_bytes)

    def host_told(self) -> dict[int, set[str]]:
        """Take the next report, and return the chunks that it adds to host memory, by rank."""
        report = self.part.worker.take_report()
        host = {} if report is None else report.host
        return {rank: set(change.added) - set(change.removed) for rank, change in host.items()}

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.part.close()


@dataclass
class Meeting:
    """`gather` for ranks in threads: each rank waits for all. Ranks of one host have consecutive
    numbers."""

    size: int
    per_host: int

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=LIMIT_S)
        self.said: dict[int, bytes] = {}

    def gather_of(self, rank: int) -> Gather:
        def gather(data: bytes) -> list[bytes]:
            self.said[rank] = data
            self.barrier.wait()
            cards = [Card.unpack(self.said[each]) for each in range(self.size)]
            return [
                (card if n // self.per_host == rank // self.per_host else elsewhere(card)).pack()
                for n, card in enumerate(cards)
            ]

        return gather


def elsewhere(card: Card) -> Card:
    """Return the card as if its rank were on another host."""
    return msgspec.structs.replace(card, host=bytes(len(card.host)))


def ranks_in_threads(
    size: int, store: object, *, per_host: int = 0, **options: object
) -> list[ReplicaRank]:
    """Return ranks that have exchanged their cards. Each has an engine of its own."""
    meeting = Meeting(size, per_host or size)
    made: dict[int, ReplicaRank] = {}

    def make(rank: int) -> None:
        made[rank] = ReplicaRank(rank, size, store, meeting.gather_of(rank), **options)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(made) == size, "a rank has not started"
    return [made[rank] for rank in range(size)]
