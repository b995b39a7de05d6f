"""Engines on NPUs and on hosts share: whole worker sides, driven as vLLM-Ascend's runner does it.

Legend: L layers, B blocks, N tokens per block, H heads, D key row, T tokens. The head size differs
from the number of heads and of tokens, so that no two dimensions can stand for one another.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)

from tests.cache_tensors import tensors_of
from tests.support.copiers import warm_copier
from tests.support.memory_store import MemoryStore
from tests.support.npu import AscendRunner, FakeNpu, cut_pages
from tests.transfer.barrier import has_taken_all
from vllm_kvpool.connector import KVPoolConnector, KVPoolMetadata
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.layout import page_formats
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.sides import RankPlace, WorkerSide
from vllm_kvpool.staging.devices import NpuDevice
from vllm_kvpool.transfer.ops import JobId, JobPages, LoadPlan, SavePlan
from vllm_kvpool.vllm_adapt import ascend, engine_config

from .conftest import SHAPE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LAYERS, HEADS, DIM = SHAPE.layers, SHAPE.kv_heads, SHAPE.head_dim
BLOCK, CHUNK, TOKENS = 48, 32, 96
SPARE_BLOCKS = 3
LIMIT_S = 60.0
NAMES = itertools.count()
LANES = ("gather", "seal", "check", "scatter", "get", "put", "remove")
LAYER_NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]

KV = dict[str, torch.Tensor]  # "k" and "v", each [L, H, T, D]
Switch = Callable[[bool], None]
Config = Callable[..., VllmConfig]


def kv_of(seed: int) -> KV:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(LAYERS, HEADS, TOKENS, DIM, generator=generator) for n in "kv"}


def cache_config(heads: int, block: int) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=DIM, dtype=torch.float32
    )
    blocks = TOKENS // block + SPARE_BLOCKS
    group = KVCacheGroupSpec(list(LAYER_NAMES), spec)
    tensors = tensors_of(group.layer_names)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=[group])


def block_ids(block: int) -> tuple[int, ...]:
    """Not in order, and the first block is not used."""
    return tuple(reversed(range(2, 2 + TOKENS // block)))


def hashes_of(prompt: int) -> tuple[bytes, ...]:
    chain = ChunkChain(CHUNK, RequestIdentity())
    chain.extend(range(prompt * TOKENS, (prompt + 1) * TOKENS))
    return tuple(chain.hashes)


def save_plan(job: int, block: int, prompt: int = 0) -> StepPlan:
    ids = block_ids(block)
    return StepPlan(
        saves=(SavePlan(JobId(job), "r", 0, hashes_of(prompt), (JobPages(ids, 0, 0, TOKENS),)),)
    )


def load_plan(job: int, block: int, prompt: int = 0) -> StepPlan:
    ids = block_ids(block)
    pages = (JobPages(ids, 0, 0, TOKENS),)
    load = LoadPlan(JobId(job), "r", 0, hashes_of(prompt), pages, 0, TOKENS)
    return StepPlan(loads=(load,), idle=True)


# How pages are registered: `[B, N, H, D]` views of K and V, beside what is handed to a connector.

Registered = tuple[dict[str, Any], list[dict[str, torch.Tensor]]]


def pair(blocks: int, tokens: int, heads: int) -> tuple[Any, dict[str, torch.Tensor]]:
    parts = {n: cut_pages((blocks, tokens, heads, DIM), torch.float32) for n in "kv"}
    return (parts["k"], parts["v"]), parts


def listed(blocks: int, tokens: int, heads: int) -> tuple[Any, dict[str, torch.Tensor]]:
    value, parts = pair(blocks, tokens, heads)
    return list(value), parts


def fine(blocks: int, tokens: int, heads: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Kernel blocks of a third of the scheduler's."""
    return pair(blocks * 3, tokens // 3, heads)


def kv_first(blocks: int, tokens: int, heads: int) -> tuple[Any, dict[str, torch.Tensor]]:
    pages = cut_pages((2, blocks, tokens, heads, DIM), torch.float32)
    return pages, {"k": pages[0], "v": pages[1]}


def blocks_first(blocks: int, tokens: int, heads: int) -> tuple[Any, dict[str, torch.Tensor]]:
    pages = cut_pages((blocks, 2, tokens, heads, DIM), torch.float32)
    return pages, {"k": pages[:, 0], "v": pages[:, 1]}


FORMATS = {f.__name__: f for f in (pair, listed, fine, kv_first, blocks_first)}


class AscendRank:
    """One rank of an engine on NPUs, as vLLM-Ascend runs it."""

    block = BLOCK

    def __init__(
        self, npu: FakeNpu, config: VllmConfig, layout: Any = pair, shared_layer: bool = True
    ) -> None:
        self._npu = npu
        rank, tp_size = config.parallel_config.rank, config.parallel_config.tensor_parallel_size
        heads = HEADS // tp_size
        self.heads = slice(rank * heads, (rank + 1) * heads)
        caches = cache_config(heads, self.block)
        made = [layout(caches.num_blocks, self.block, heads) for _ in range(LAYERS)]
        registered = {name: value for name, (value, _) in zip(LAYER_NAMES, made, strict=True)}
        if shared_layer:  # one that reads another's KV is registered too, and a draft's
            registered["model.layers.9.self_attn.attn"] = registered[LAYER_NAMES[-1]]
            registered["draft_model.layers.0.self_attn.attn"] = layout(7, self.block, heads)[0]
        self.parts = [parts for _, parts in made]
        self.connector = KVPoolConnector(config, KVConnectorRole.WORKER, caches)
        read = engine_config.read_engine(config, caches, self.connector._config)
        self.namespace = read.shape.namespace
        self.runner = AscendRunner(npu, self.connector, registered)
        self._jobs = itertools.count(1)

    def write(self, kv: KV) -> None:
        """The forward pass: launches that fill the pages."""
        for layer, parts in enumerate(self.parts):
            for name, pages in parts.items():
                rows = kv[name][layer, self.heads].transpose(0, 1)  # [T, H, D]
                by_block = rows.unflatten(0, (-1, self.block))
                tokens = pages.shape[1]
                ratio = self.block // tokens
                for block_id, block_rows in zip(block_ids(self.block), by_block, strict=True):
                    for part in range(ratio):
                        piece = block_rows[part * tokens : (part + 1) * tokens]
                        pages[block_id * ratio + part].copy_(piece)

    def read(self) -> KV:
        """What lies in the pages once the device is idle."""
        self._npu.model_stream.synchronize()
        read = {}
        for name in "kv":
            layers = []
            for parts in self.parts:
                pages = parts[name].reshape(-1, self.block, *parts[name].shape[2:])
                layers.append(torch.cat([pages[i] for i in block_ids(self.block)]))
            read[name] = torch.stack(layers).transpose(1, 2)
        return read

    def save(self, kv: KV, prompt: int = 0) -> None:
        plan = KVPoolMetadata(save_plan(next(self._jobs), self.block, prompt), self.namespace)
        self.runner.step(plan, lambda: self.write(kv))
        side = self.connector._worker_side
        assert side is not None
        executor = side._executor
        assert has_taken_all(executor)
        while any(job.uses_pages for job in list(executor._open.values())):
            self.runner.empty_step(KVPoolMetadata(StepPlan(), self.namespace))
        # The blocks are free from here on: what another request writes there is not saved.
        with self._npu.stream(self._npu.model_stream):
            self.write(kv_of(99))

    def load(self, prompt: int = 0) -> KV:
        """What a load brings into pages that a step before is still writing to."""
        with self._npu.stream(self._npu.model_stream):
            self.write(kv_of(98))
        plan = KVPoolMetadata(load_plan(next(self._jobs), self.block, prompt), self.namespace)
        deadline = time.monotonic() + LIMIT_S
        while "r" not in self.runner.empty_step(plan):
            assert time.monotonic() < deadline, "the load did not end"
        assert not self.runner.invalid_blocks
        return self.read()

    def close(self) -> None:
        self.connector.shutdown()


class HostRank:
    """The one rank of an engine on a host. `transposed`: as CPU attention keeps its pages."""

    block = 32

    def __init__(self, config: VllmConfig, *, transposed: bool) -> None:
        caches = cache_config(HEADS, self.block)
        self._is_transposed = transposed
        self.pages = torch.full((LAYERS, caches.num_blocks, HEADS, self.block, 2 * DIM), -1.0)
        self.connector = KVPoolConnector(config, KVConnectorRole.WORKER, caches)
        if transposed:
            named = dict(zip(LAYER_NAMES, self.pages, strict=True))
            self.connector.register_kv_caches(named)
            side = self.connector._worker_side
            assert side is not None
        else:
            side = WorkerSide(
                self.connector._config,
                self.connector._facts.shape,
                RankPlace(0, 0, 0),
                [page_formats.from_token_content(layer) for layer in self.pages],
                warm_copier,
                finish_in_step=True,
            )
            self.connector._worker_side = side
        self.side = side
        side.use_namespace(
            engine_config.read_engine(config, caches, self.connector._config).shape.namespace
        )
        self._jobs = itertools.count(1)

    def views(self) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Layer, place in the prompt, and `[H, N, D]` views of K and V of every block."""
        for layer, (place, block_id) in itertools.product(
            range(LAYERS), enumerate(block_ids(self.block))
        ):
            page = self.pages[layer, block_id]  # [H, N, 2D]
            if self._is_transposed:
                flat = page.flatten(1)
                half = DIM * self.block
                key = flat[:, :half].view(HEADS, DIM, self.block).transpose(1, 2)
                value = flat[:, half:].view(HEADS, self.block, DIM)
            else:
                key, value = page[..., :DIM], page[..., DIM:]
            yield layer, place, key, value

    def save(self, kv: KV, prompt: int = 0) -> None:
        for layer, place, key, value in self.views():
            span = slice(place * self.block, (place + 1) * self.block)
            key.copy_(kv["k"][layer, :, span])
            value.copy_(kv["v"][layer, :, span])
        self.side.worker.start_saves(save_plan(next(self._jobs), self.block, prompt))
        self.pages.fill_(-1.0)

    def load(self, prompt: int = 0) -> KV:
        self.pages.fill_(-1.0)
        plan = load_plan(next(self._jobs), self.block, prompt)
        self.side.worker.start_loads(plan)
        deadline = time.monotonic() + LIMIT_S
        while "r" not in (results := self.side.worker.finish_step(plan, set())).loaded:
            assert time.monotonic() < deadline, "the load did not end"
        assert not results.invalid_blocks
        read = {n: torch.empty(LAYERS, HEADS, TOKENS, DIM) for n in "kv"}
        for layer, place, key, value in self.views():
            span = slice(place * self.block, (place + 1) * self.block)
            read["k"][layer, :, span], read["v"][layer, :, span] = key, value
        return read

    def close(self) -> None:
        self.connector.shutdown()


class Pool:
    """A memory store that outlives the engines on it."""

    def __init__(self) -> None:
        self.name = f"ascend{next(NAMES)}"
        self.url = f"memory://{self.name}"
        self.shared = MemoryStore(self.name, 1 << 30)

    @property
    def num_cells(self) -> int:
        return len(self.shared._table.list_keys())


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.shared.close()


def save_on_npus(
    npu: FakeNpu, pool: Pool, vllm_config: Config, kv: KV, layout: Any = pair, tp_size: int = 2
) -> None:
    for rank in range(tp_size):
        writer = AscendRank(npu, vllm_config(pool.url, BLOCK, tp_size, rank), layout)
        writer.save(kv)
        writer.close()


def read_on_host(pool: Pool, vllm_config: Config, *, transposed: bool) -> KV:
    reader = HostRank(vllm_config(pool.url, HostRank.block), transposed=transposed)
    read = reader.load()
    reader.close()
    return read


def is_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Bit by bit: poison is a number like any other."""
    return all(
        torch.equal(one[n].contiguous().view(torch.int32), other[n].contiguous().view(torch.int32))
        for n in "kv"
    )


@pytest.mark.parametrize("layout", FORMATS.values(), ids=FORMATS)
def test_npus_write_hosts_read_and_back(
    npu: FakeNpu, on_npu: Switch, vllm_config: Config, pool: Pool, layout: Any
) -> None:
    kv = kv_of(1)
    on_npu(True)
    save_on_npus(npu, pool, vllm_config, kv, layout)
    on_npu(False)
    for transposed in (True, False):
        assert is_same(read_on_host(pool, vllm_config, transposed=transposed), kv)
    back = Pool()
    writer = HostRank(vllm_config(back.url, HostRank.block), transposed=True)
    writer.save(kv)
    writer.close()
    on_npu(True)
    for rank in range(2):
        reader = AscendRank(npu, vllm_config(back.url, BLOCK, 2, rank), layout)
        part = {n: kv[n][:, reader.heads] for n in "kv"}
        assert is_same(reader.load(), part)
        reader.close()
    back.shared.close()


@pytest.mark.parametrize(("writer_tp", "reader_tp"), [(1, 4), (4, 2)])
def test_npus_share_whatever_their_parallelism(
    npu: FakeNpu, on_npu: Switch, vllm_config: Config, pool: Pool, writer_tp: int, reader_tp: int
) -> None:
    kv = kv_of(2)
    on_npu(True)
    save_on_npus(npu, pool, vllm_config, kv, tp_size=writer_tp)
    for rank in range(reader_tp):
        reader = AscendRank(npu, vllm_config(pool.url, BLOCK, reader_tp, rank), fine)
        assert is_same(reader.load(), {n: kv[n][:, reader.heads] for n in "kv"})
        reader.close()


def test_every_thread_that_moves_pages_enters_the_device(
    npu: FakeNpu, on_npu: Switch, vllm_config: Config, pool: Pool
) -> None:
    on_npu(True)
    rank = AscendRank(npu, vllm_config(pool.url, BLOCK))
    rank.save(kv_of(1))
    threads = [t for t in threading.enumerate() if t.name.startswith("kvpool-")]
    lanes = {t for t in threads if t.name.split("-")[1] in LANES}
    assert len(lanes) >= len(LANES)
    assert lanes <= set(npu.entered)
    rank.close()


# What the stand-in is for: faults that must not pass


def broken(on: pytest.MonkeyPatch, fault: str) -> None:
    """Plant a fault in the code under test."""
    pairs = ascend.page_formats.from_pair
    match fault:
        case "no set_device":
            on.setattr(NpuDevice, "enter_thread", lambda self: None)
        case "no fence":
            on.setattr(NpuDevice, "new_event", lambda self: self._npu.Event())  # never recorded
        case "k and v swapped":
            on.setattr(
                ascend.page_formats,
                "from_pair",
                lambda k, v, blocks_per_id: pairs(v, k, blocks_per_id=blocks_per_id),
            )
        case "heads before tokens":

            def other_order(k: torch.Tensor, v: torch.Tensor, blocks_per_id: int) -> Any:
                swapped = [
                    part.view(part.shape[0], part.shape[2], part.shape[1], DIM).transpose(1, 2)
                    for part in (k, v)
                ]
                return pairs(*swapped, blocks_per_id=blocks_per_id)

            on.setattr(ascend.page_formats, "from_pair", other_order)


@pytest.mark.parametrize(
    "fault", ["no set_device", "no fence", "k and v swapped", "heads before tokens"]
)
def test_a_planted_fault_of_a_writer_is_seen(
    npu: FakeNpu, on_npu: Switch, vllm_config: Config, pool: Pool, fault: str
) -> None:
    kv = kv_of(3)
    on_npu(True)
    with pytest.MonkeyPatch.context() as patch:
        broken(patch, fault)
        save_on_npus(npu, pool, vllm_config, kv)
    on_npu(False)
    if fault == "no set_device":  # no thread could work, so nothing wrong has been stored
        assert pool.num_cells == 0
        return
    assert pool.num_cells > 0
    assert not is_same(read_on_host(pool, vllm_config, transposed=True), kv)


def test_a_load_without_a_fence_is_seen(
    npu: FakeNpu, on_npu: Switch, vllm_config: Config, pool: Pool
) -> None:
    """What the model had still been writing comes after what was loaded, and destroys it."""
    kv = kv_of(4)
    on_npu(True)
    save_on_npus(npu, pool, vllm_config, kv, tp_size=1)
    with pytest.MonkeyPatch.context() as patch:
        broken(patch, "no fence")
        reader = AscendRank(npu, vllm_config(pool.url, BLOCK))
        assert not is_same(reader.load(), kv)
        reader.close()
