"""Whole worker sides over one store: ranks of any TP and PP write, ranks of any other read.

Everything is the package's own but the engine: topology, planner, keys, lanes, copiers, store.
"""

import itertools
import time
from collections.abc import Iterator

import pytest
import torch

from vllm_kvpool.config import read_config
from vllm_kvpool.hashing import ChunkChain, RequestIdentity
from vllm_kvpool.keys import make_namespace
from vllm_kvpool.layout.formats import from_token_content
from vllm_kvpool.layout.topology import Topology
from vllm_kvpool.pool.metadata import StepPlan
from vllm_kvpool.pool.sides import ModelShape, RankPlace, WorkerSide
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.store.memory import MemoryStore
from vllm_kvpool.transfer.ops import JobId, LoadPlan, SavePlan

# Legend: L layers, B blocks, H heads, N tokens per block, C content, T tokens.
LAYERS, CONTENT, CHUNK, TOKENS = 8, 16, 32, 96
LIMIT_S = 30.0
NAMES = itertools.count()
HASHES = ChunkChain(CHUNK, RequestIdentity())
HASHES.extend(range(TOKENS))


class Rank:
    """One rank of an engine: its side of the pool and its pages."""

    def __init__(self, store: str, topology: Topology, tp_rank: int, pp_rank: int, block: int):
        start, stop = topology.stages[pp_rank]
        first, heads = topology.first_head(tp_rank), topology.heads_per_rank
        self.part = (slice(start, stop), slice(first, first + heads))
        self.block = block
        shape = (stop - start, TOKENS // block, heads, block, CONTENT)
        self.pages_lbhnc = torch.full(shape, -1, dtype=torch.int16)
        model = ModelShape(
            namespace=make_namespace("model", "0" * 12),
            topology=topology,
            block_size=block,
            num_blocks=TOKENS // block,
            num_ranks=topology.tp_size * len(topology.stages),
            row_bytes=CONTENT * 2,
        )
        self.side = WorkerSide(
            read_config({"store": store, "chunk_tokens": CHUNK, "staging_bytes": "1MiB"}, env={}),
            model,
            RankPlace(tp_rank, pp_rank, pp_rank * topology.tp_size + tp_rank),
            [from_token_content(layer) for layer in self.pages_lbhnc],
            CpuCopier,
            finish_in_step=True,
        )

    def save(self, kv_lhtc: torch.Tensor) -> None:
        blocks = kv_lhtc[self.part].unflatten(2, (-1, self.block)).transpose(1, 2)
        self.pages_lbhnc.copy_(blocks)
        ids = tuple(range(TOKENS // self.block))
        plan = SavePlan(JobId(1), "r", 0, tuple(HASHES.hashes), ids, 0)
        self.side.worker.start_saves(StepPlan(saves=(plan,)))
        self.side.close()  # waits for the puts

    def load(self) -> torch.Tensor:
        """The loaded tokens, `[L, H, T, C]`."""
        ids = tuple(range(TOKENS // self.block))
        load = LoadPlan(JobId(1), "r", 0, tuple(HASHES.hashes), ids, 0, 0, TOKENS)
        plan = StepPlan(loads=(load,), idle=True)
        self.side.worker.start_loads(plan)
        deadline = time.monotonic() + LIMIT_S
        while "r" not in (results := self.side.worker.finish_step(plan, set())).loaded:
            assert time.monotonic() < deadline, "the load did not end"
        assert not results.invalid_blocks
        self.side.close()
        return self.pages_lbhnc.transpose(1, 2).flatten(2, 3)


def stages(pp_size: int) -> tuple[tuple[int, int], ...]:
    cut = LAYERS // pp_size
    return tuple((i * cut, (i + 1) * cut) for i in range(pp_size))


def ranks(
    store: str, num_heads: int, shape: tuple[int, int, int], *, per_head: bool = True
) -> Iterator[Rank]:
    tp_size, pp_size, block = shape
    topology = Topology(num_heads, tp_size, stages(pp_size), 2, per_head)
    for tp_rank, pp_rank in itertools.product(range(tp_size), range(pp_size)):
        yield Rank(store, topology, tp_rank, pp_rank, block)


def random_kv(num_heads: int) -> torch.Tensor:
    return torch.randint(0, 2**15, (LAYERS, num_heads, TOKENS, CONTENT), dtype=torch.int16)


@pytest.mark.parametrize("num_heads", [1, 2, 8])
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        # (TP, PP, block)
        ((1, 1, 16), (2, 2, 32)),
        ((2, 4, 32), (1, 1, 48)),
        ((4, 2, 16), (8, 1, 96)),
        ((8, 1, 96), (4, 4, 16)),
        ((16, 1, 32), (2, 1, 16)),
        ((1, 4, 48), (16, 2, 32)),
    ],
)
def test_any_parallelism_reads_any_other(
    num_heads: int, writer: tuple[int, int, int], reader: tuple[int, int, int]
) -> None:
    store = f"memory://sides{next(NAMES)}"
    shared = MemoryStore(store.removeprefix("memory://"), 1 << 30)  # keeps what writers leave
    kv = random_kv(num_heads)
    for rank in ranks(store, num_heads, writer):
        rank.save(kv)
    # Nothing is missing, and replicas have stored nothing twice.
    assert len(shared._shelf.list_keys()) == num_heads * (LAYERS // 2) * (TOKENS // CHUNK)
    for rank in ranks(store, num_heads, reader):
        assert torch.equal(rank.load(), kv[rank.part])
    shared.close()


@pytest.mark.parametrize(("tp_size", "num_heads"), [(1, 2), (2, 8), (4, 2)])
def test_cells_per_rank_at_equal_parallelism(tp_size: int, num_heads: int) -> None:
    store = f"memory://sides{next(NAMES)}"
    shared = MemoryStore(store.removeprefix("memory://"), 1 << 30)
    kv = random_kv(num_heads)
    for rank in ranks(store, num_heads, (tp_size, 2, 16), per_head=False):
        rank.save(kv)
    distinct = min(tp_size, num_heads)
    assert len(shared._shelf.list_keys()) == distinct * (LAYERS // 2) * (TOKENS // CHUNK)
    for rank in ranks(store, num_heads, (tp_size, 1, 32), per_head=False):
        assert torch.equal(rank.load(), kv[rank.part])
    shared.close()
