"""DeepSeek V4's groups by vLLM's own rules, and its rows through worker parts, in host memory.

Legend: B blocks, N rows per block, C bytes by size.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

import tests.support.memory_store  # noqa: F401  (its scheme)
from tests.support.models import DeepseekShape, make_model
from tests.support.worker_steps import load_all, prompt_hashes
from vllm_kvpool.config import read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout.description import described, from_description
from vllm_kvpool.layout.engine_shape import RankPlace
from vllm_kvpool.scheduler.blocks import GroupTables, all_blocks
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.staging.copy_torch import TorchCopier
from vllm_kvpool.transfer.ops import JobId, JobPages, LoadPlan, SavePlan
from vllm_kvpool.vllm_adapt import compat, engine_config
from vllm_kvpool.vllm_adapt.kv_cache_specs import page_specs
from vllm_kvpool.worker.worker_part import WorkerPart

# Compression ratio of each layer. The first layer has only a window.
RATIOS = (1, 4, 128, 4, 128)
ROWS = {"fp8_ds_mla": 584, "auto": 2 * 512, "fp8": 512}
STORES = itertools.count()
OPTIONS = read_config({}, env={})


@pytest.fixture
def config(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """Return a DeepSeek V2 with the sizes of V4, as on a GPU."""
    model = make_model(tmp_path, DeepseekShape(layers=len(RATIOS)))
    arguments = EngineArgs(model=str(model), dtype="bfloat16", skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    text = config.model_config.hf_text_config
    sizes = {"compress_ratios": RATIOS, "head_dim": 512, "index_head_dim": 128}
    for name, value in {"model_type": "deepseek_v4", **sizes}.items():
        monkeypatch.setattr(text, name, value, raising=False)
    config.cache_config.block_size = 256
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    monkeypatch.setattr(compat, "is_rocm", lambda: False)
    monkeypatch.setattr(page_specs, "needs_gpu", lambda spec: False)
    return config


def asked(layer: type[AttentionLayerBase], config: VllmConfig, **fields: Any) -> Any:
    """Return vLLM's own cache spec of a layer, without the layer's kernels and weights."""
    return layer.get_kv_cache_spec(SimpleNamespace(**fields), config)  # type: ignore[arg-type]


def specs_of(config: VllmConfig, cache_dtype: str) -> dict[str, KVCacheSpec]:
    """Return the specs in the order in which vLLM's layers register."""
    cache = config.cache_config
    cache.cache_dtype = cache_dtype  # type: ignore[assignment]
    dtype = {"fp8_ds_mla": torch.uint8, "auto": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    latents = dtype[cache_dtype]
    specs: dict[str, KVCacheSpec] = {}

    def compressor(prefix: str, dim: int, ratio: int) -> None:
        coff = 1 + (ratio == 4)
        specs[f"{prefix}.compressor.state_cache"] = asked(
            CompressorStateCache,
            config,
            state_dim=2 * coff * dim,
            dtype=torch.float32,
            sliding_window=coff * ratio,
            block_size=4 if ratio == 4 else 8,
        )

    for layer, ratio in enumerate(RATIOS):
        prefix = f"model.layers.{layer}.attn"
        if ratio == 4:
            specs[f"{prefix}.indexer.k_cache"] = asked(
                DeepseekV4IndexerCache,
                config,
                cache_config=cache,
                head_dim=132,
                dtype=torch.uint8,
                compress_ratio=ratio,
            )
            compressor(f"{prefix}.indexer", 128, ratio)
        specs[f"{prefix}.swa_cache"] = asked(
            DeepseekV4SWACache,
            config,
            cache_config=cache,
            bounded_replay=False,
            block_size=64,
            head_dim=512,
            dtype=latents,
            window_size=128,
            packed_bytes_per_token=584,
            packed_page_alignment=576,
        )
        if ratio > 1:
            specs[prefix] = asked(
                DeepseekV4Attention,
                config,
                compress_ratio=ratio,
                kv_cache_dtype=cache_dtype,
                kv_cache_torch_dtype=latents,
                head_dim=512,
            )
            compressor(prefix, 512, ratio)
    return specs


def groups_of(config: VllmConfig, cache_dtype: str, layout: str) -> KVCacheConfig:
    config.cache_config.kv_cache_layout = layout
    groups = get_kv_cache_groups(config, specs_of(config, cache_dtype))
    return get_kv_cache_config_from_groups(config, groups, available_memory=256 << 20)


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
@pytest.mark.parametrize("cache_dtype", ROWS)
def test_its_caches_are_layer_groups(config: VllmConfig, cache_dtype: str, layout: str) -> None:
    """The scheduler knows only the first layer's form, and finds the same layer groups."""
    cache = groups_of(config, cache_dtype, layout)
    facts = engine_config.read_engine(config, cache, OPTIONS)
    latent = ROWS[cache_dtype]
    c4, c128 = ((1,), (3,)), ((2,), (4,))
    assert {
        each.name: (each.layers, each.tokens_per_row, each.tail_tokens)
        for each in facts.shape.layer_groups
    } == {
        f"full-of-4-1x{latent}": (c4, 4, 0),
        f"full-of-128-1x{latent}": (c128, 128, 0),
        "indexer-of-4-1x132": (c4, 4, 0),
        f"window128-1x{latent}": (tuple((i,) for i in range(len(RATIOS))), 1, 128),
        "window8-1x8192": (c4, 1, 8),
        "window8-1x2048": (c4, 1, 8),
        "window128-1x4096": (c128, 1, 128),
    }
    assert {each.topology.num_heads for each in facts.shape.layer_groups} == {1}
    assert from_description(described(facts.shape.layer_groups)) == [
        replace(each, layers=()) for each in facts.shape.layer_groups
    ]
    assert all(group.shared for group in facts.shape.groups)
    for_scheduler = generate_scheduler_kv_cache_config([cache])
    assert engine_config.read_engine(config, for_scheduler, OPTIONS).shape == facts.shape


# Cells of one engine, loaded by another


CHUNK, TOKENS = 256, 1024


def random_rows(shape: tuple[int, ...]) -> torch.Tensor:
    """Return random bytes, drawn eight at a time."""
    words = torch.randint(-(2**63), 2**63 - 1, (prod(shape) // 8 + 1,))
    return words.view(torch.uint8)[: prod(shape)].view(shape)


class Engine:
    """An engine with all its ranks. Pages hold random bytes."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, tp_size: int, store: str) -> None:
        config.parallel_config.tensor_parallel_size = tp_size
        options = read_config(
            {"store": store, "staging_bytes": "16MiB", "chunk_tokens": CHUNK}, env={}
        )
        facts = engine_config.read_engine(config, cache, options)
        self.tables = GroupTables(facts.shape.groups, CHUNK)
        # A request's blocks, from behind.
        self.ids = [tuple(range(TOKENS // group.block_size, 0, -1)) for group in facts.shape.groups]
        self.shape = replace(facts.shape, num_blocks=max(map(len, self.ids)) + 1, num_ranks=tp_size)
        specs = specs_of(config, str(config.cache_config.cache_dtype))
        # All ranks hold the same rows.
        first = {
            name: random_rows(
                (self.shape.num_blocks, 1, spec.num_states, spec.state_content_size_bytes)
            )
            for name, spec in specs.items()
        }
        clones = [{name: first[name].clone() for name in first} for _ in range(1, tp_size)]
        self.memory = [first, *clones]
        self.groups = {name: i for each in facts.layer_groups for name, i in each.layers}
        self.sides = [
            WorkerPart(
                options,
                self.shape,
                RankPlace(rank, 0, rank),
                engine_config.layer_pages(
                    {name: pages.view(specs[name].dtype) for name, pages in of_rank.items()},
                    replace(facts, shape=self.shape),
                    config,
                ),
                lambda pages: TorchCopier(pages, torch.device("cpu")),
                finish_in_step=True,
            )
            for rank, of_rank in enumerate(self.memory)
        ]

    def save(self, hashes: Sequence[bytes]) -> None:
        pages = self.tables.of_save(self.ids, 0, TOKENS, 0, {})
        assert pages is not None
        assert len(all_blocks(pages)) == self.tables.num_blocks(0, TOKENS)
        for part in self.sides:
            plan = SavePlan(JobId(1), "r", 0, tuple(hashes), pages)
            part.worker.start_saves(StepPlan(saves=(plan,)))

    def load(self, hashes: Sequence[bytes], stop: int) -> list[JobPages]:
        pages = self.tables.of_load(self.ids, 0, stop)
        plan = LoadPlan(JobId(1), "r", 0, tuple(hashes), pages, 0, stop)
        assert not load_all(self.sides, plan)
        return list(pages)

    def close(self) -> None:
        for part in self.sides:
            part.close()


@pytest.mark.parametrize(
    ("wrote", "reads", "stop"),
    [(1, 2, TOKENS), (1, 2, TOKENS - 1), (1, 2, 2 * CHUNK), (2, 1, TOKENS - 1), (4, 2, TOKENS)],
)
@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "auto"])
def test_a_hit_brings_what_the_next_token_needs(
    config: VllmConfig, cache_dtype: str, wrote: int, reads: int, stop: int
) -> None:
    """The load brings all complete latents and the windows before the hit's end, byte for byte."""
    hashes = prompt_hashes(range(TOKENS), CHUNK)
    cache, store = groups_of(config, cache_dtype, "BLHNC"), f"memory://v4-{next(STORES)}"
    writer = Engine(config, cache, wrote, store)
    writer.save(hashes)
    writer.close()
    reader = Engine(config, cache, reads, store)
    loaded = reader.load(hashes[: -(-stop // CHUNK)], stop)
    reader.close()
    for name, group in reader.groups.items():
        pages, rows_per_block = loaded[group], reader.memory[0][name].shape[2]
        block_size = reader.shape.groups[group].block_size
        per_row = block_size // rows_per_block
        window = reader.shape.groups[group].window
        first = window.first_read(stop)
        assert pages.token_start <= first
        rows = slice(first // per_row, stop // per_row)  # the last one may not be complete
        wanted = writer.memory[0][name][list(writer.ids[group])].flatten(0, 2)[rows]
        assert wanted.numel(), name
        packed = cache_dtype == "fp8_ds_mla" and wanted.shape[-1] == 584
        for rank in reader.memory:
            found = rank[name][list(reader.ids[group])].flatten(0, 2)[rows]
            if packed or ".indexer.k_cache" in name:  # rows lie in two parts of a block
                whole = slice(-(-first // block_size), stop // block_size)
                ids = list(reader.ids[group])[whole]
                assert torch.equal(rank[name][ids], writer.memory[0][name][ids]), name
            else:
                assert torch.equal(found, wanted), name


def test_stored_bytes_are_near_those_that_a_hit_reads(config: VllmConfig) -> None:
    """A layer that compresses 4 tokens stores less than a twentieth of its compressors' inputs."""
    cache = groups_of(config, "fp8_ds_mla", "BLHNC")
    groups = engine_config.read_engine(config, cache, OPTIONS).shape.layer_groups
    stored = {
        each.name: each.payload_bytes(each.topology.all_spans()[0], CHUNK)
        // len(each.topology.all_spans()[0])
        for each in groups
    }
    inputs = stored["window8-1x8192"] + stored["window8-1x2048"]
    assert inputs == 8 * (8192 + 2048)
    assert inputs * 20 < CHUNK * (8192 + 2048)


# Refused


def refused(config: VllmConfig, cache: KVCacheConfig, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        engine_config.read_engine(config, cache, read_config(options, env={}))
    return str(error.value)


def test_what_cannot_be_shared_is_refused_with_what_helps(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, text = groups_of(config, "fp8_ds_mla", "BLHNC"), config.model_config.hf_text_config
    assert "set chunk_tokens to a multiple of 256" in refused(config, cache, chunk_tokens=128)
    for name, value, words in (
        ("vision_n_layers", 2, "tokens of an image attend to those behind them"),
        ("index_head_dim", 256, "another form than the model's configuration says"),
        ("compress_ratios", RATIOS[:2], "compress_ratios say nothing of layer"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(text, name, value, raising=False)
            assert words in refused(config, cache)
    monkeypatch.setattr(config.parallel_config, "decode_context_parallel_size", 2)
    assert "set decode_context_parallel_size to 1" in refused(config, cache)
    monkeypatch.setattr(compat, "is_rocm", lambda: True)
    monkeypatch.setattr(config.parallel_config, "decode_context_parallel_size", 1)
    assert "on NVIDIA GPUs alone" in refused(config, cache)


def test_its_kernels_write_where_the_pool_reads(config: VllmConfig) -> None:
    """The places are those that vLLM's kernel for latents computes.

    `fused_compress_quant_cache.py` writes values of 576 bytes for all rows of a block, then 8 bytes
    of scales for each row.
    """
    spec = specs_of(config, "fp8_ds_mla")["model.layers.0.attn.swa_cache"]
    memory = torch.arange(2 * 64 * 584, dtype=torch.int32).to(torch.uint8).view(2, 1, 64, 584)
    pages = page_specs.device_layer_pages(memory, spec, "")  # type: ignore[arg-type]
    values, scales = pages.runs
    assert (values.base, values.token_stride, values.nbytes) == (memory.data_ptr(), 576, 576)
    assert (scales.base, scales.token_stride, scales.nbytes) == (
        memory.data_ptr() + 64 * 576,
        8,
        8,
    )
    assert values.block_stride == scales.block_stride == 64 * 584
