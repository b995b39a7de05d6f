"""Layers that attend to another layer's KV: stored once, counted once, on both sides alike."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import add_kv_sharing_layers_to_kv_cache_groups, allocate_kv_cache

from tests.support.models import LlamaShape, make_model
from vllm_kvpool.config import read_config
from vllm_kvpool.vllm_adapt import engine_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
OWNERS = [0, 1, 3, 11]  # not in one piece, nor in alphabetical order
SHARERS = {2: 1, 12: 3, 13: 11}


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def test_layers_without_pages_are_not_counted(tmp_path: Path) -> None:
    model = make_model(tmp_path, LlamaShape(kv_heads=4, layers=14))
    arguments = EngineArgs(model=str(model), dtype="float32", skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    specs = {name_of(i): replace(SPEC) for i in reversed(OWNERS)}
    groups = get_kv_cache_groups(config, specs)
    kv_cache_config = get_kv_cache_config_from_groups(config, groups, 16 << 20)
    on_scheduler = generate_scheduler_kv_cache_config([kv_cache_config])
    on_worker = copy.deepcopy(kv_cache_config)
    caches = allocate_kv_cache(on_worker, torch.device("cpu"), KVCacheLayout.LBHNC)
    # As vLLM's runner does.
    shared = {name_of(i): name_of(target) for i, target in SHARERS.items()}
    add_kv_sharing_layers_to_kv_cache_groups(shared, on_worker.kv_cache_groups)
    assert set(shared) < set(on_worker.kv_cache_groups[0].layer_names)
    caches |= {name: caches[target] for name, target in shared.items()}
    pool = read_config({"layer_span": 1}, env={})
    facts = engine_config.read_engine(config, on_worker, pool)
    assert facts == engine_config.read_engine(config, on_scheduler, pool)
    assert facts.shape.layer_groups[0].topology.stages == ((0, len(OWNERS)),)
    assert facts.shape.layer_groups[0].layers == tuple((i,) for i in OWNERS)
    pages = engine_config.layer_pages(caches, facts, config)
    assert [p.owner[0].data_ptr() for p in pages] == [caches[name_of(i)].data_ptr() for i in OWNERS]
