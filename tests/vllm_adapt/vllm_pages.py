"""Pages of one rank as vLLM itself allocates and cuts them, with a worker side of the pool.

Every tensor comes from vLLM's own `get_kv_cache_config_from_groups` and `allocate_kv_cache`, every
K and V of CPU attention from its own kernel. Two engines may differ in their `PageFormat`. They
must agree in their `Content`. Legend: L layers, B blocks, H heads, T tokens, N tokens per block, R
bytes of a row.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tests.support.copiers import warm_copier
from tests.support.worker_steps import load_all, prompt_hashes
from vllm_kvpool.config import read_config
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.transfer.ops import JobId, JobPages, LoadPlan, SavePlan
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.kv_cache_specs import page_specs
from vllm_kvpool.worker.worker_part import WorkerPart

LAYERS, SPAN = 3, 2
CHUNK, TOKENS = 64, 192  # a block may be smaller than a chunk, larger, or neither
POISON = 0xA5
SPARE_BLOCKS = 3
MODEL = make_namespace("formats", "0" * 12)


@dataclass(frozen=True, kw_only=True)
class Content:
    """Meaning of the bytes of a row, equal for all engines that share."""

    dtype: torch.dtype
    key_dim: int = 32
    value_dim: int = 32
    heads: int = 2
    quant: KVQuantMode = KVQuantMode.NONE
    backend: type[AttentionBackend] | None = None  # that lays the content out in a way of its own
    latent: str = ""  # MLA's cache dtype
    slot_bytes: int | None = None  # of a packed row, where it is said by no backend

    @property
    def on_cpus(self) -> bool:
        """True if vLLM's CPU attention can hold the content."""
        is_packed = self.backend is not None or self.slot_bytes is not None
        return not is_packed and not self.latent and self.key_dim == self.value_dim

    def spec(self, page_format: "PageFormat") -> AttentionSpec:
        """Return vLLM's own spec, after the backend's changes."""
        if self.latent:
            return MLAAttentionSpec(
                block_size=page_format.block,
                num_kv_heads=1,
                head_size=self.key_dim,
                dtype=self.dtype,
                cache_dtype_str=self.latent,
                state_content_bytes=self.slot_bytes,
                max_tp_shards=1,
            )
        spec: AttentionSpec = FullAttentionSpec(
            block_size=page_format.block,
            num_kv_heads=self.heads,
            head_size=self.key_dim,
            head_size_v=self.value_dim,
            dtype=self.dtype,
            kv_quant_mode=self.quant,
            state_content_bytes=self.slot_bytes,
        )
        return spec if self.backend is None else self.backend.customize_spec(spec)


@dataclass(frozen=True, kw_only=True)
class PageFormat:
    """Placement of the bytes; each engine has its own."""

    layout: str = "LBHNC"
    block: int = 64
    kernel_block: int | None = None  # vLLM's finer cut of a block, for the attention kernel
    padding: int = 0  # bytes at the end of each page
    alignment: int | None = None  # of the step from block to block
    isa: str = ""  # of CPU attention; else pages of token content


FORMATS = {
    **{name: PageFormat(layout=name) for name in KVCacheLayout.__members__},
    "kernel blocks, head-major": PageFormat(block=96, kernel_block=32),
    "kernel blocks, token-major": PageFormat(layout="LBNHC", kernel_block=16),
    "padded": PageFormat(block=32, padding=4096),
    "padded, block-major": PageFormat(layout="BLNHC", block=48, padding=64),
    "aligned": PageFormat(layout="LBNHC", block=48, alignment=4096),
    "CPU vec": PageFormat(block=96, isa="vec"),
    "CPU vec16": PageFormat(block=48, isa="vec16"),
    "CPU amx": PageFormat(block=32, isa="amx"),
}


class Rank:
    """A rank's poisoned pages, and its side of the pool over `store`."""

    def __init__(
        self, store: str, content: Content, page_format: PageFormat, vllm_config: VllmConfig
    ) -> None:
        self.content, self.format, self._config = content, page_format, vllm_config
        self.spec = content.spec(page_format)
        page_specs.check_spec(self.spec)
        if page_format.padding:
            padded = self.spec.page_size_bytes + page_format.padding
            self.spec = replace(self.spec, page_size_padded=padded)
        if page_format.alignment:
            self.spec = replace(self.spec, block_stride_alignment=page_format.alignment)
        self.num_blocks = TOKENS // page_format.block + SPARE_BLOCKS
        self.names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
        self.caches, self.memory = self._allocate()
        self.row_bytes = compat.row_bytes(self.spec)
        # Not in order, not from zero.
        self.ids = tuple(reversed(range(2, 2 + TOKENS // page_format.block)))
        self.jobs = itertools.count(1)
        self.part = self._open(store)

    def _allocate(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        self._config.cache_config.kv_cache_layout = self.format.layout
        groups = [KVCacheGroupSpec(self.names, self.spec)]
        most = 4 * LAYERS * self.num_blocks * (self.spec.page_size_bytes + 8192)
        self._config.cache_config.num_gpu_blocks_override = self.num_blocks
        config = get_kv_cache_config_from_groups(self._config, groups, most)
        kernel_block = self.format.kernel_block
        caches = allocate_kv_cache(
            config,
            torch.device("cpu"),
            KVCacheLayout[self.format.layout],
            None if kernel_block is None else [kernel_block],
        )
        storage = next(iter(caches.values())).untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        memory.fill_(POISON)
        return caches, memory

    def _open(self, store: str) -> WorkerPart:
        topology = Topology(self.spec.num_kv_heads, 1, ((0, LAYERS),), SPAN)
        shape = ModelShape(
            namespace=MODEL,
            layer_groups=(LayerGroup(topology, self.row_bytes),),
            groups=(KVCacheGroup(self.format.block),),
            num_blocks=self.num_blocks,
            num_ranks=1,
        )
        ratio = self.format.block // (self.format.kernel_block or self.format.block)
        pages = [
            page_specs.cpu_layer_pages(
                cache, *self._halves, self._config, isa=self.format.isa, blocks_per_id=ratio
            )
            if self.format.isa
            else from_token_content(cache, blocks_per_id=ratio)
            for cache in self.caches.values()
        ]
        extra = {"store": store, "chunk_tokens": CHUNK, "staging_bytes": "2MiB"}
        return WorkerPart(
            read_config(extra, env={}),
            shape,
            RankPlace(0, 0, 0),
            pages,
            warm_copier,
            finish_in_step=True,
        )

    @property
    def _halves(self) -> tuple[int, int]:
        key_bytes = self.spec.head_size * self.spec.dtype.itemsize
        return key_bytes, self.row_bytes - key_bytes

    def fill(self, rows_lhtr: torch.Tensor) -> None:
        """Put all rows into the pages, as the model would."""
        fill = self._fill_by_kernel if self.format.isa else self._fill_by_index
        for cache, rows_htr in zip(self.caches.values(), rows_lhtr, strict=True):
            fill(cache, rows_htr)

    def _fill_by_index(self, cache: torch.Tensor, rows_htr: torch.Tensor) -> None:
        # [blocks, kernel blocks of a block, H, N, R]
        blocks = group_kernel_blocks(cache.view(torch.uint8), self.num_blocks)
        if blocks.dim() == 4:
            blocks = blocks.unsqueeze(1)
        rows = rows_htr.unflatten(1, (len(self.ids), blocks.shape[1], blocks.shape[3]))
        blocks[list(self.ids)] = rows.permute(1, 2, 0, 3, 4)

    def _fill_by_kernel(self, cache: torch.Tensor, rows_htr: torch.Tensor) -> None:
        dtype, block = self.content.dtype, self.format.block
        key_bytes, _ = self._halves
        k, v = (x.contiguous().view(dtype) for x in rows_htr.transpose(0, 1).split(key_bytes, 2))
        # As in vLLM's CPU attention.
        halves = cache.view(*cache.shape[:2], 2 * block, -1).chunk(2, dim=2)
        tokens = torch.arange(TOKENS)
        slots = torch.tensor(self.ids)[tokens // block] * block + tokens % block
        ops.cpu_attn_reshape_and_cache(k, v, *halves, slots, self.format.isa)

    def save(self, hashes: tuple[bytes, ...]) -> None:
        """Save, and return when the pages are free, as at the end of a step."""
        plan = SavePlan(JobId(next(self.jobs)), "r", 0, hashes, (JobPages(self.ids, 0, 0, TOKENS),))
        self.part.worker.start_saves(StepPlan(saves=(plan,)))

    def load(self, hashes: tuple[bytes, ...]) -> None:
        """Load into poisoned pages."""
        self.memory.fill_(POISON)
        pages = (JobPages(self.ids, 0, 0, TOKENS),)
        load = LoadPlan(JobId(next(self.jobs)), "r", 0, hashes, pages, 0, TOKENS)
        assert not load_all([self.part], load)

    def bytes_after(self, rows_lhtr: torch.Tensor) -> torch.Tensor:
        """Return this rank's memory as it is after the rank has computed the rows itself."""
        self.memory.fill_(POISON)
        self.fill(rows_lhtr)
        return self.memory.clone()

    def random_rows(self, seed: int) -> torch.Tensor:
        shape = (LAYERS, self.spec.num_kv_heads, TOKENS, self.row_bytes)
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def hashes_of(prompt: int) -> tuple[bytes, ...]:
    return prompt_hashes(range(prompt * TOKENS, (prompt + 1) * TOKENS), CHUNK)
