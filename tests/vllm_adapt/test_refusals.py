"""Setups that cannot be shared correctly are refused at start: each such row of docs/support.md.

Specs are vLLM's own, changed by its own backends wherever these can be imported without a GPU.
"""

import re
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import _custom_ops
from vllm.config import KVTransferConfig, VllmConfig, cache, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from tests.support.models import LlamaShape, make_model
from vllm_kvpool.config import read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.vllm_adapt import engine_config
from vllm_kvpool.vllm_adapt.kv_cache_specs import page_specs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
SPEC = FullAttentionSpec(block_size=64, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
LATENT = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
# As of a model with a convolution of 64 channels alone.
STATE = MambaSpec(
    block_size=256,
    shapes=((2, 64),),
    dtypes=(torch.float32,),
    mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
    mamba_cache_mode="align",
)
INDEXER = replace(LATENT, dtype=torch.uint8, head_size=132, cache_role=SparseCacheRole.INDEXER)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), LlamaShape(kv_heads=4, layers=4))


@pytest.fixture
def config(model: Path) -> VllmConfig:
    arguments = EngineArgs(model=str(model), dtype="float32", skip_tokenizer_init=True)
    return arguments.create_engine_config()


def cache_config(spec: KVCacheSpec, names: list[str] = LAYERS) -> KVCacheConfig:
    tensors = [KVCacheTensor(size=0, layers=names, layer_stride=0, block_stride=0)]
    groups = [KVCacheGroupSpec([*LAYERS], spec)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=tensors, kv_cache_groups=groups)


def start(spec: KVCacheSpec) -> Callable[[VllmConfig], object]:
    """Return the first act of both sides: reading the engine's configuration."""
    return lambda config: engine_config.read_engine(
        config, cache_config(spec), read_config({}, env={})
    )


def scales_at_run_time(config: VllmConfig) -> None:
    # A field of older releases only.
    object.__setattr__(config.cache_config, "calculate_kv_scales", True)
    start(SPEC)(config)


def dtype_of_a_plugin(config: VllmConfig) -> None:
    """Register a dtype as vLLM 0.33 lets plugins do."""
    handlers = {"rotated_int8": object()}
    config.cache_config.cache_dtype = "rotated_int8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "get_kv_cache_dtype_handler", handlers.get, raising=False)
        start(replace(SPEC, dtype=torch.int8))(config)


def ranks_that_plan_by_themselves(config: VllmConfig) -> None:
    config.parallel_config.distributed_executor_backend = "external_launcher"
    start(replace(SPEC, dtype=torch.float32))(config)  # one rank is as any engine
    config.parallel_config.tensor_parallel_size = 2
    start(SPEC)(config)


def sharing_over_stages(config: VllmConfig) -> None:
    """Return the worker of the first of two stages; one of its layers has no pages."""
    config.parallel_config.pipeline_parallel_size = 2
    plain = replace(SPEC, dtype=torch.float32)
    kv_cache_config = cache_config(plain, LAYERS[:1])
    facts = engine_config.read_engine(config, kv_cache_config, read_config({}, env={}))
    engine_config.layer_pages({LAYERS[0]: torch.zeros(8, 4, 64, 128)}, facts, config)


def skipped_layers_over_stages(config: VllmConfig) -> None:
    config.parallel_config.pipeline_parallel_size = 2
    config.cache_config.cache_dtype = "fp8"
    config.cache_config.kv_cache_dtype_skip_layers = ["0"]
    start(SPEC)(config)


def unequal_halves(config: VllmConfig) -> None:
    page_specs.cpu_layer_pages(torch.zeros(8, 4, 64, 48), 128, 64, config)


def planes_of_another_backend(config: VllmConfig) -> None:
    spec = B12xPagedAttentionBackend.customize_spec(SPEC)
    page_specs.device_layer_pages(torch.zeros(8, 2, 64, 256), spec, "ROCM_AITER_FA")


def indexer_in_four_bits(config: VllmConfig) -> None:
    config.attention_config.indexer_kv_dtype = "mxfp4"
    start(SPEC)(config)


def indexer_on_a_host(config: VllmConfig) -> None:
    facts = engine_config.read_engine(config, cache_config(INDEXER), read_config({}, env={}))
    pages = {name: torch.zeros(8, 1, 64, 132, dtype=torch.uint8) for name in LAYERS}
    engine_config.layer_pages(pages, facts, config)


def unknown_form(config: VllmConfig) -> None:
    """A kernel that writes the tokens of a block backwards."""

    def write(k: torch.Tensor, v: torch.Tensor, *halves: Any, **_: Any) -> None:
        for half, rows in zip(halves, (k, v), strict=False):
            half[0, 0] = rows[:, 0].flip(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", write)
        pages = torch.zeros(8, 4, 64, 64, dtype=config.model_config.dtype)
        half = 32 * pages.element_size()
        page_specs.cpu_layer_pages(pages, half, half, config, isa="new")


def layer_by_layer(config: VllmConfig, *groups: KVCacheGroupSpec) -> None:
    plain = replace(SPEC, dtype=torch.float32)
    kv_cache_config = cache_config(plain)
    kv_cache_config.kv_cache_groups = list(groups) or [KVCacheGroupSpec([*LAYERS], plain)]
    engine_config.read_engine(config, kv_cache_config, read_config({"layerwise": True}, env={}))


def layers_of_a_window(config: VllmConfig) -> None:
    window = SlidingWindowSpec(
        block_size=64, num_kv_heads=4, head_size=64, dtype=torch.float32, sliding_window=128
    )
    layer_by_layer(config, KVCacheGroupSpec([*LAYERS], window))


def layers_in_steps_planned_ahead(config: VllmConfig) -> None:
    config.scheduler_config.async_scheduling = True
    layer_by_layer(config)


def layers_beside_failed_steps(config: VllmConfig) -> None:
    config.parallel_config.enable_fault_tolerance = True
    layer_by_layer(config)


def layers_over_stages(config: VllmConfig) -> None:
    config.parallel_config.pipeline_parallel_size = 2
    layer_by_layer(config)


def layers_beside_another_connector(config: VllmConfig) -> None:
    own = copy(config)
    own.kv_transfer_config = KVTransferConfig(kv_connector="KVPoolConnector", kv_role="kv_both")
    config.kv_transfer_config = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both")
    with set_current_vllm_config(config):
        layer_by_layer(own)


def layers_by_the_second_runner(config: VllmConfig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        layer_by_layer(config)


def with_states(
    spec: KVCacheSpec = STATE, *, layerwise: bool = False, **parallel: int
) -> Callable[[VllmConfig], object]:
    """Start an engine that keeps recurrent states at the ends of blocks."""

    def begin(config: VllmConfig) -> object:
        config.cache_config.mamba_cache_mode = "align"
        for name, size in parallel.items():
            setattr(config.parallel_config, name, size)
        options = {"layerwise": layerwise}
        return engine_config.read_engine(config, cache_config(spec), read_config(options, env={}))

    return begin


START: dict[str, Callable[[VllmConfig], Any]] = {
    "heads packed otherwise": start(replace(SPEC, num_head_slots=1, state_content_bytes=1024)),
    "planes of another backend": planes_of_another_backend,
    "indexer in four bits": indexer_in_four_bits,
    "indexer on a host": indexer_on_a_host,
    "unknown content": start(replace(SPEC, state_content_bytes=300)),
    "unknown latent": start(replace(LATENT, cache_dtype_str="new_ds_mla", state_content_bytes=400)),
    "DeepSeek V4.1": start(
        replace(
            LATENT,
            dtype=torch.uint8,
            head_size=512,
            cache_dtype_str="fp8_ds_mla",
            state_content_bytes=584,
            model_version="deepseek_v4",
        )
    ),
    "compressed": start(replace(LATENT, tokens_per_state=4)),
    "indexer": start(replace(INDEXER, head_size=100)),
    "pooled indexer": start(replace(INDEXER, tokens_per_state=16)),
    "states without prefix caching": start(STATE),
    "states, decode context": with_states(decode_context_parallel_size=2),
    "states, prefill context": with_states(prefill_context_parallel_size=2),
    "states between chunks": with_states(replace(STATE, block_size=784)),
    "states, layer by layer": with_states(layerwise=True),
    "states with rings": with_states(
        replace(STATE, shapes=((2, 64), (4, 2)), dtypes=(torch.float32, torch.float32))
    ),
    "unknown states": with_states(replace(STATE, mamba_type=MambaAttentionBackendEnum.CUSTOM)),
    "prefix LM": start(replace(SPEC, non_causal=True)),
    "cross attention": start(
        CrossAttentionSpec(block_size=64, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    ),
    "unequal layers": start(
        UniformTypeKVCacheSpecs(
            block_size=64,
            kv_cache_specs={name: replace(SPEC, head_size=64 + i) for i, name in enumerate(LAYERS)},
        )
    ),
    "scales at run time": scales_at_run_time,
    "dtype of a plugin": dtype_of_a_plugin,
    "ranks that plan by themselves": ranks_that_plan_by_themselves,
    "KV sharing over stages": sharing_over_stages,
    "skipped layers over stages": skipped_layers_over_stages,
    "layer by layer, window": layers_of_a_window,
    "layer by layer, asynchronous": layers_in_steps_planned_ahead,
    "layer by layer, fault tolerance": layers_beside_failed_steps,
    "layer by layer, stages": layers_over_stages,
    "layer by layer, beside others": layers_beside_another_connector,
    "layer by layer, second model runner": layers_by_the_second_runner,
    "unknown CPU form": unknown_form,
    "halves of CPU pages": unequal_halves,
}


DOCUMENT = Path(__file__).parents[2] / "docs" / "support.md"
WORDS = {
    name: words
    for words, name in re.findall(r"… (.+) … \| `.+::test_refused\[(.+)\]`", DOCUMENT.read_text())
}


@pytest.mark.parametrize("name", START)
def test_refused(name: str, config: VllmConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        START[name](config)
    assert WORDS[name] in str(caught.value)


def test_every_refusal_stands_in_the_document() -> None:
    assert set(WORDS) == set(START)
