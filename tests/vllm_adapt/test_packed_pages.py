"""Packed GPU pages in worker parts, in host memory.

Engines of every tensor parallelism read, in their own form, the cells that another engine has
written. `tests/layout/test_packed_formats.py` tests where kernels write. Legend: L layers, B
blocks, H heads, N tokens per block, C bytes by size.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    get_kv_quant_mode,
)

from tests.support.memory_store import MemoryStore
from tests.support.models import DeepseekShape, make_model
from tests.support.worker_steps import load_all, prompt_hashes
from vllm_kvpool.config import read_config
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.description import described, from_description
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.staging.copy_torch import TorchCopier
from vllm_kvpool.transfer.ops import JobId, JobPages, LoadPlan, SavePlan
from vllm_kvpool.vllm_adapt import compat, engine_config
from vllm_kvpool.vllm_adapt.identity import namespace
from vllm_kvpool.vllm_adapt.kv_cache_specs import page_specs
from vllm_kvpool.worker.worker_part import WorkerPart

LAYERS, SPAN, HEADS, DIM = 2, 1, 4, 128
CHUNK, TOKENS = 64, 256
# Tensor parallelism of two engines. Each reads the cells that the other has written.
TP_SIZES = [(1, 2), (2, 4), (4, 1), (2, 2)]
MODEL = make_namespace("packed", "0" * 12)
STORES = itertools.count()
CPU = torch.device("cpu")
PLAIN = FullAttentionSpec(block_size=64, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
INDEXER = MLAAttentionSpec(
    block_size=64,
    num_kv_heads=1,
    head_size=132,
    dtype=torch.uint8,
    cache_role=SparseCacheRole.INDEXER,
)


@dataclass(frozen=True)
class Form:
    """A backend's form of a rank's pages: the spec by its own rule, blocks, placement of bytes."""

    name: str
    block: int = 64
    row_tokens: int = 1
    by_token: bool = False
    swizzled: bool = False

    def spec(self, heads: int) -> AttentionSpec:
        plain = replace(PLAIN, num_kv_heads=heads, block_size=self.block)
        if self.name == "B12X":
            return B12xPagedAttentionBackend.customize_spec(plain)
        if self.name == "ROCM_ATTN":
            return RocmAttentionBackend.customize_spec(plain)
        if self.name == "NVFP4":  # as vLLM's FlashInfer backend, which needs FlashInfer
            return replace(
                plain,
                dtype=torch.uint8,
                kv_quant_mode=KVQuantMode.NVFP4,
                num_head_slots=2 * heads,
                state_content_bytes=DIM // 2 + DIM // 16,
            )
        if self.name.startswith("indexer"):
            return replace(INDEXER, block_size=self.block, tokens_per_state=self.row_tokens)
        return plain

    def pages(self, tensor: torch.Tensor, spec: AttentionSpec) -> LayerPages:
        is_rocm = self.name == "indexer of ROCm"
        return page_specs.device_layer_pages(tensor, spec, self.name, is_rocm=is_rocm)


class Engine:
    """An engine with all its ranks."""

    def __init__(self, form: Form, tp_size: int, store: str, lookahead: int = 0) -> None:
        self.lookahead = lookahead
        is_indexer = form.name.startswith("indexer")
        self.heads = 1 if is_indexer else HEADS
        self.spec = form.spec(max(1, self.heads // tp_size))
        page_specs.check_spec(self.spec)
        self.blocks = TOKENS // form.block + 2
        self.ids = tuple(range(self.blocks - 1, 1, -1))
        shape = (LAYERS, self.blocks, self.spec.num_heads, self.spec.num_states)
        content = self.spec.state_content_size_bytes
        self.memory = torch.zeros(tp_size, *shape, content, dtype=torch.uint8)
        row_bytes = compat.row_bytes(self.spec)
        topology = Topology(self.heads, tp_size, ((0, LAYERS),), SPAN)
        model = ModelShape(
            namespace=MODEL,
            layer_groups=(
                LayerGroup(
                    topology,
                    row_bytes,
                    tokens_per_row=form.row_tokens,
                    is_draft=lookahead > 0,
                    lookahead=lookahead,
                ),
            ),
            groups=(KVCacheGroup(form.block, lookahead=lookahead),),
            num_blocks=self.blocks,
            num_ranks=tp_size,
        )
        options = {"store": store, "chunk_tokens": CHUNK, "staging_bytes": "2MiB"}
        self.sides = [
            WorkerPart(
                read_config(options, env={}),
                model,
                RankPlace(rank, 0, rank),
                [self._layer(form, layer) for layer in of_rank],
                lambda pages: TorchCopier(pages, CPU),
                finish_in_step=True,
            )
            for rank, of_rank in enumerate(self.memory)
        ]

    def _layer(self, form: Form, memory_bsnc: torch.Tensor) -> LayerPages:
        if form.by_token:  # [B, N, S, C]
            memory_bsnc = memory_bsnc.view(self.blocks, form.block, -1, memory_bsnc.shape[3])
            memory_bsnc = memory_bsnc.transpose(1, 2)
        return form.pages(memory_bsnc.view(self.spec.dtype), self.spec)

    @property
    def used(self) -> torch.Tensor:
        return self.memory[:, :, list(self.ids)]

    def save(self, hashes: Sequence[bytes]) -> None:
        pages = (JobPages(self.ids, 0, 0, TOKENS),)
        for part in self.sides:
            plan = SavePlan(JobId(1), "r", 0, tuple(hashes), pages)
            part.worker.start_saves(StepPlan(saves=(plan,)))

    def load(self, hashes: Sequence[bytes]) -> None:
        pages = (JobPages(self.ids, 0, 0, TOKENS),)
        plan = LoadPlan(JobId(1), "r", 0, tuple(hashes), pages, 0, TOKENS - self.lookahead)
        assert not load_all(self.sides, plan)

    def close(self) -> None:
        for part in self.sides:
            part.close()


ROWS_OF_BFLOAT16 = (
    Form("FLASH_ATTN"),
    Form("B12X"),
    Form("ROCM_ATTN", block=16),
    Form("B12X", block=32),
)
NVFP4 = (
    Form("NVFP4", swizzled=True),
    Form("NVFP4"),
    Form("NVFP4", by_token=True, block=32),
    Form("NVFP4", swizzled=True, block=16),
)
# One key for 16 tokens.
INDEXERS_OF_16 = (
    Form("indexer", row_tokens=16),
    Form("indexer of ROCm", row_tokens=16, block=256),
    Form("indexer", row_tokens=16, block=32),
    Form("indexer", row_tokens=16, block=128),
)
INDEXERS = (
    Form("indexer"),
    Form("indexer of ROCm"),
    Form("indexer of ROCm", block=16),
    Form("indexer", block=32),
)


@pytest.mark.parametrize(("writers_tp", "readers_tp"), TP_SIZES)
@pytest.mark.parametrize(
    ("forms", "lookahead"),
    [(ROWS_OF_BFLOAT16, 0), (NVFP4, 0), (INDEXERS, 0), (INDEXERS_OF_16, 0), (INDEXERS, 1)],
    ids=["bfloat16", "NVFP4", "indexer", "indexer of 16 tokens", "indexer of a drafter"],
)
def test_any_form_and_number_of_ranks_reads_what_any_has_written(
    forms: Sequence[Form],
    lookahead: int,
    writers_tp: int,
    readers_tp: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the way back, the first engine finds its own bytes, all of which are rows.

    The last rows of a drafter are not stored.
    """
    hashes = prompt_hashes(range(TOKENS), CHUNK)
    for written, read in zip(forms, (*forms[1:], forms[0]), strict=True):
        names = [f"packed{next(STORES)}" for _ in range(2)]
        kept = [MemoryStore(name, 1 << 30) for name in names]
        there, back = (f"memory://{name}" for name in names)

        def engine(form: Form, tp_size: int, store: str) -> Engine:
            monkeypatch.setattr(compat, "mixes_nvfp4_scales", lambda: form.swizzled)
            return Engine(form, tp_size, store, lookahead)

        writer = engine(written, writers_tp, there)
        if writer.heads == 1:  # latents: all ranks hold the same
            writer.memory[:] = torch.randint(0, 256, writer.memory.shape[1:], dtype=torch.uint8)
        else:
            writer.memory.random_(0, 256)
        writer.save(hashes)
        writer.close()
        cells = TOKENS // CHUNK * LAYERS // SPAN * writer.heads
        assert [each.num_cells for each in kept[0].usage()] == [cells], "replicas store a cell once"
        between = engine(read, readers_tp, there)
        between.load(hashes)
        saver = engine(read, readers_tp, back)
        saver.memory.copy_(between.memory)
        saver.save(hashes)
        for each in (between, saver):
            each.close()
        reader = engine(written, writers_tp, back)
        reader.load(hashes)
        differs = reader.used != writer.used
        last_rows = lookahead * LAYERS * writers_tp * compat.row_bytes(reader.spec)
        assert differs.sum() <= last_rows, f"{written} -> {read}"
        assert not reader.used[differs].any(), f"{written} -> {read}"
        reader.close()
        for store in kept:
            store.close()


def test_planes_are_read_as_plain_rows() -> None:
    """Engines with planes share with engines that keep K and V of a head side by side."""
    hashes, name = prompt_hashes(range(TOKENS), CHUNK), f"packed{next(STORES)}"
    store = MemoryStore(name, 1 << 30)
    writer = Engine(Form("B12X"), 2, f"memory://{name}")
    writer.memory.random_(0, 256)
    writer.save(hashes)
    writer.close()
    reader = Engine(Form("FLASH_ATTN"), 1, f"memory://{name}")
    reader.load(hashes)
    # Written: [TP, L, B, K and V, N, H of a rank, row of K or V].
    # Read: [1, L, B, H, N, K and V, row of K or V].
    written = writer.used.unflatten(-1, (HEADS // 2, -1)).permute(1, 2, 0, 5, 4, 3, 6)
    read = reader.used[0].unflatten(-1, (2, -1)).unflatten(2, (2, HEADS // 2))
    assert torch.equal(read, written)
    reader.close()
    store.close()


# Sparse attention: an indexer's keys beside latents, in one KV cache group.

LATENTS = {"auto": (torch.bfloat16, None), "fp8": (torch.uint8, None)}
LATENTS |= {"fp8_ds_mla": (torch.uint8, 656), "nvfp4_ds_mla": (torch.uint8, 352)}


@pytest.fixture(scope="module")
def sparse_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Return a DeepSeek V2 with the sizes of V3.2's indexer."""
    model = make_model(tmp_path_factory.mktemp("models"), DeepseekShape())
    arguments = EngineArgs(model=str(model), dtype="bfloat16", skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    config.model_config.hf_text_config.index_head_dim = 128
    return config


def sparse_groups(
    config: VllmConfig, latents: str, layout: str, indexers: Sequence[int] = (0, 1, 2)
) -> KVCacheConfig:
    """Return groups by vLLM's own rules. In each layer, the indexer comes before the latents."""
    dtype, content = LATENTS[latents]
    latent = replace(
        INDEXER,
        head_size=576,
        dtype=dtype,
        cache_dtype_str=latents,
        kv_quant_mode=get_kv_quant_mode(latents),
        state_content_bytes=content,
        cache_role=SparseCacheRole.SPARSE,
    )
    specs = {}
    for layer in range(3):
        if layer in indexers:
            specs[f"model.layers.{layer}.self_attn.indexer.k_cache"] = INDEXER
        specs[f"model.layers.{layer}.self_attn.attn"] = latent
    config.cache_config.kv_cache_layout = layout
    groups = get_kv_cache_groups(config, specs)
    return get_kv_cache_config_from_groups(config, groups, available_memory=64 << 20)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("indexers", [(0, 1, 2), (0, 2), (1,)])
@pytest.mark.parametrize("latents", LATENTS)
def test_an_indexer_beside_latents_is_a_layer_group(
    sparse_config: VllmConfig, latents: str, indexers: Sequence[int], layout: str
) -> None:
    """The scheduler knows only the first layer's form, and finds the same layer groups."""
    cache = sparse_groups(sparse_config, latents, layout, indexers)
    facts = engine_config.read_engine(sparse_config, cache, read_config({}, env={}))
    dtype, content = LATENTS[latents]
    row_bytes = content or 576 * dtype.itemsize
    assert [(each.name, each.row_bytes, each.layers) for each in facts.shape.layer_groups] == [
        (f"full-1x{row_bytes}", row_bytes, ((0,), (1,), (2,))),
        ("indexer-1x132", 132, tuple((layer,) for layer in indexers)),
    ]
    assert {each.topology.num_heads for each in facts.shape.layer_groups} == {1}
    for_scheduler = generate_scheduler_kv_cache_config([cache])
    assert engine_config.read_engine(sparse_config, for_scheduler, read_config({}, env={})) == facts


def test_the_form_that_a_backend_chooses_for_sparse_latents_counts_with_their_rows(
    sparse_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's layer writes the form into the configuration when it is built.

    The scheduler sees this at TP 1 only. There, the same KV had another namespace.
    """
    monkeypatch.setattr(sparse_config.cache_config, "kv_cache_layout", "LBHNC")

    def namespaces(latents: str, *cache_dtypes: str) -> set[str]:
        cache, found = sparse_groups(sparse_config, latents, "LBHNC"), set()
        for cache_dtype in cache_dtypes:
            monkeypatch.setattr(sparse_config.cache_config, "cache_dtype", cache_dtype)
            facts = engine_config.read_engine(sparse_config, cache, read_config({}, env={}))
            found.add(facts.shape.namespace)
        return found

    told = ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla")
    # For other models the cache dtype counts. "fp8" and "fp8_e4m3" are equal.
    assert len(namespaces("fp8_ds_mla", *told)) == len(told) - 1
    text = sparse_config.model_config.hf_text_config
    monkeypatch.setattr(text, "index_topk", 2048, raising=False)
    assert [len(namespaces(latents, *told)) for latents in LATENTS] == [1] * len(LATENTS)
    assert len(set.union(*(namespaces(latents, "fp8") for latents in LATENTS))) == len(LATENTS)
    assert len(namespaces("auto", "fp8", "fp8_e5m2", "nvfp4_ds_mla")) == 3


KPOOL = 16
# Kimi delta attention in heads of 128: three rows of Q, K and V, and a matrix for each head.
DELTAS = MambaSpec(
    block_size=128,
    shapes=((3, 4 * 3 * 128), (4, 128, 128)),
    dtypes=(torch.bfloat16, torch.float32),
    mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
    mamba_cache_mode="align",
)
# The keys of tokens that are not pooled yet, for one request.
RING = CircularBufferSpec(
    block_size=KPOOL,
    num_kv_heads=2,
    head_size=128,
    head_size_v=0,
    dtype=torch.bfloat16,
    dcp_sharded=False,
)


def test_an_indexer_with_one_key_for_several_tokens_beside_states(
    sparse_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM 5 Next has such layers. A cache that vLLM keeps for one request alone is not shared."""
    text, cache_config = sparse_config.model_config.hf_text_config, sparse_config.cache_config
    monkeypatch.setattr(text, "index_kpool", KPOOL, raising=False)
    monkeypatch.setattr(text, "num_attention_heads", 4)
    monkeypatch.setattr(cache_config, "mamba_cache_mode", "align")
    latent = replace(
        INDEXER, head_size=576, dtype=torch.bfloat16, cache_role=SparseCacheRole.SPARSE
    )
    page = latent.page_size_bytes * 8
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(4):
        prefix = f"model.layers.{layer}.self_attn"
        if layer == 3:
            specs[f"{prefix}.attn"] = replace(latent, block_size=512)
            specs[f"{prefix}.indexer.k_cache"] = replace(
                INDEXER, block_size=512, tokens_per_state=KPOOL
            )
            specs[f"{prefix}.indexer.tail_cache"] = RING
        else:
            specs[prefix] = replace(DELTAS, block_size=512, page_size_padded=page)
    groups = get_kv_cache_groups(sparse_config, specs)
    cache = get_kv_cache_config_from_groups(sparse_config, groups, available_memory=256 << 20)
    for_scheduler = generate_scheduler_kv_cache_config([cache])
    options = read_config({}, env={})
    facts = engine_config.read_engine(sparse_config, for_scheduler, options)
    assert [
        (each.name.partition("-1x")[0].partition("-4x")[0], each.tokens_per_row, each.layers)
        for each in facts.shape.layer_groups
    ] == [
        ("full", 1, ((3,),)),
        ("indexer-of-16", KPOOL, ((3,),)),
        ("state-gdn", 1, ((0,), (1,), (2,))),
    ]
    assert from_description(described(facts.shape.layer_groups)) == [
        replace(each, layers=()) for each in facts.shape.layer_groups
    ]
    shared = [group.shared for group in facts.shape.groups]
    assert shared == [not compat.is_ring(each.kv_cache_spec) for each in cache.kv_cache_groups]
    assert shared.count(False) == 1
    assert engine_config.read_engine(sparse_config, cache, options).shape == facts.shape


def test_bytes_that_mean_other_numbers_are_in_the_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fp8 = replace(PLAIN, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    nvfp4 = Form("NVFP4").spec(HEADS)
    assert [namespace.device_values(each) for each in (PLAIN, fp8, INDEXER)] == [{}] * 3
    assert namespace.device_values(nvfp4) == {
        "nvfp4_kernels": "trtllm" if compat.mixes_nvfp4_scales() else "fa2"
    }
    monkeypatch.setattr(compat, "fp8_name", lambda: "float8_e4m3fnuz")
    assert namespace.device_values(PLAIN) == {}
    for spec in (fp8, INDEXER):
        assert namespace.device_values(spec) == {"fp8": "float8_e4m3fnuz"}
