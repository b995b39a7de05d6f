"""Facts read from vLLM's configuration, with real configuration objects and no engine."""

import logging
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
)

from tests.cache_tensors import tensors_of
from tests.support.models import LlamaShape, make_model
from vllm_kvpool.config import read_config
from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.handover.producer import NoticePlace
from vllm_kvpool.identity import weights
from vllm_kvpool.layout.topology import FULL_ATTENTION, KVCacheGroup
from vllm_kvpool.staging.devices import HOST_DEVICE, Device
from vllm_kvpool.vllm_adapt import compat, engine_config
from vllm_kvpool.vllm_adapt.engine_config import EngineFacts
from vllm_kvpool.vllm_adapt.identity import weights_version
from vllm_kvpool.vllm_adapt.weight_sources import WeightSources

SHAPE = LlamaShape(kv_heads=4, layers=4)
SPEC = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)

# How backends say that they pack heads or tokens: since 0.32 in fields of every attention spec,
# before in the ratio of latent specs, tokens alone.
if "tokens_per_state" in {field.name for field in fields(FullAttentionSpec)}:
    PACKED: list[tuple[KVCacheSpec, str]] = [
        (replace(SPEC, num_head_slots=2), "cannot be cut"),
        (replace(SPEC, tokens_per_state=4), "4 tokens"),
    ]
else:
    LATENT = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    PACKED = [(replace(LATENT, compress_ratio=4), "4 tokens")]

NUM_TENSORS = 2_000

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VllmConfig]:
    """`vllm_config(shape, **engine arguments)`."""
    directory = tmp_path_factory.mktemp("models")

    def build(shape: LlamaShape = SHAPE, **arguments: Any) -> VllmConfig:
        values = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 32} | arguments
        return EngineArgs(model=str(make_model(directory, shape)), **values).create_engine_config()

    return build


def cache_config(*specs: KVCacheSpec, layers: int = 4) -> KVCacheConfig:
    names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
    groups = [KVCacheGroupSpec(names, spec) for spec in specs]
    return KVCacheConfig(num_blocks=100, kv_cache_tensors=tensors_of(names), kv_cache_groups=groups)


def facts(config: VllmConfig, spec: KVCacheSpec = SPEC, **options: Any) -> EngineFacts:
    return engine_config.read_engine(config, cache_config(spec), read_config(options, env={}))


def test_facts_of_a_plain_model(vllm_config: Callable[..., VllmConfig]) -> None:
    read = facts(vllm_config())
    [layer_group], [layers] = read.shape.layer_groups, read.layer_groups
    assert (layer_group.name, layer_group.window) == ("", FULL_ATTENTION)
    assert layer_group.topology.num_heads == 4
    assert layer_group.topology.stages == ((0, 4),)
    assert layer_group.row_bytes == layers.row_bytes == 2 * 32 * 4
    assert (layers.key_bytes, layers.groups) == (128, (0,))
    assert layer_group.topology.layer_span == 1
    assert read.shape.groups == (KVCacheGroup(32),)
    assert read.shape.loads
    assert not read.shape.in_lockstep


def test_data_parallel_engines_step_together(vllm_config: Callable[..., VllmConfig]) -> None:
    config = vllm_config()
    config.parallel_config.data_parallel_size = 2
    assert facts(config).shape.in_lockstep


def test_what_may_differ_between_engines_that_share(
    vllm_config: Callable[..., VllmConfig],
) -> None:
    expected = facts(vllm_config()).shape.namespace
    for config, spec in (
        (vllm_config(block_size=96), replace(SPEC, block_size=96)),
        (vllm_config(max_model_len=2048), SPEC),
        (vllm_config(prefix_caching_hash_algo="sha256_cbor"), SPEC),
        (vllm_config(enable_prefix_caching=False), SPEC),
        (vllm_config(seed=7), SPEC),
    ):
        assert facts(config, spec).shape.namespace == expected
    two = vllm_config()
    two.parallel_config.tensor_parallel_size = 2
    assert facts(two, replace(SPEC, num_kv_heads=2)).shape.namespace == expected
    assert facts(vllm_config(), layer_span=2).shape.namespace == expected


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"])
def test_where_the_bytes_lie_may_differ(
    vllm_config: Callable[..., VllmConfig], layout: str
) -> None:
    config = vllm_config()
    expected = facts(config).shape.namespace
    config.cache_config.kv_cache_layout = layout
    padded = replace(SPEC, page_size_padded=SPEC.page_size_bytes + 4096)
    if hasattr(SPEC, "block_stride_alignment"):  # since 0.31
        padded = replace(padded, block_stride_alignment=512)
    assert facts(config, padded).shape.namespace == expected


def test_contents_keep_engines_apart(vllm_config: Callable[..., VllmConfig]) -> None:
    """Every content that gives the same KV other bytes counts, even with rows of equal size."""
    config = vllm_config()
    mode = KVQuantMode
    contents = [
        ("auto", SPEC),
        ("float16", replace(SPEC, dtype=torch.float16)),
        ("bfloat16", replace(SPEC, dtype=torch.bfloat16)),
        ("fp8_e4m3", replace(SPEC, dtype=torch.uint8, kv_quant_mode=mode.FP8_PER_TENSOR)),
        ("fp8_e5m2", replace(SPEC, dtype=torch.uint8, kv_quant_mode=mode.FP8_PER_TENSOR)),
        ("auto", replace(SPEC, dtype=torch.int8)),
        ("auto", replace(SPEC, head_size=48, head_size_v=16)),
        *(
            (m.name.lower(), replace(SPEC, dtype=d, kv_quant_mode=m, state_content_bytes=72))
            for m, d in (
                (mode.INT8_PER_TOKEN_HEAD, torch.int8),
                (mode.FP8_PER_TOKEN_HEAD, torch.uint8),
                (mode.INT4_PER_TOKEN_HEAD, torch.uint8),
                (mode.TURBOQUANT_K8V4, torch.uint8),
                (mode.TURBOQUANT_4BIT_NC, torch.uint8),
                *((m, torch.uint8) for m in mode if m.name == "ULTRAQUANT_4BIT"),  # since 0.32
            )
        ),
    ]
    namespaces = []
    for cache_dtype, spec in contents:
        config.cache_config.cache_dtype = cast("Any", cache_dtype)
        namespaces.append(facts(config, spec).shape.namespace)
    assert len(set(namespaces)) == len(namespaces)


def test_machines_of_other_byte_order_do_not_share(
    vllm_config: Callable[..., VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config()
    here = facts(config).shape.namespace
    other = "big" if sys.byteorder == "little" else "little"
    monkeypatch.setattr(sys, "byteorder", other)
    assert facts(config).shape.namespace != here


def test_what_keeps_engines_apart(vllm_config: Callable[..., VllmConfig]) -> None:
    plain = vllm_config()
    half = replace(SPEC, dtype=torch.bfloat16)
    one_per_rank = {"per_head_storage": False}
    two = vllm_config()
    two.parallel_config.tensor_parallel_size = 2
    namespaces = [
        facts(plain).shape.namespace,
        facts(plain, chunk_tokens=128).shape.namespace,
        facts(plain, namespace="tenant").shape.namespace,
        facts(plain, half).shape.namespace,
        facts(plain, **one_per_rank).shape.namespace,
        facts(plain, encryption_key_file="/keys").shape.namespace,
        facts(two, replace(SPEC, num_kv_heads=2), **one_per_rank).shape.namespace,
        facts(vllm_config(replace(SHAPE, seed=1))).shape.namespace,
        facts(vllm_config(dtype="bfloat16")).shape.namespace,
        facts(vllm_config(hf_overrides={"rope_theta": 5000.0})).shape.namespace,
        facts(vllm_config(load_format="dummy")).shape.namespace,
    ]
    assert len(set(namespaces)) == len(namespaces)


def test_an_engine_of_random_weights_says_what_it_shares_with(
    vllm_config: Callable[..., VllmConfig], caplog: pytest.LogCaptureFixture
) -> None:
    facts(vllm_config())
    assert "load_format dummy" not in caplog.text
    facts(vllm_config(load_format="dummy"))
    assert "of the same seed (0), tensor_parallel_size (1), releases and kind" in caplog.text


@pytest.mark.parametrize("weights_id", ["", "v1"])
def test_what_a_model_writes_into_its_configuration_keeps_no_engines_apart(
    vllm_config: Callable[..., VllmConfig], weights_id: str
) -> None:
    """The scheduler sees such a write only at TP 1, in one process with the model."""
    config = vllm_config()
    before = facts(config, weights_id=weights_id).shape.namespace
    text = config.model_config.hf_text_config
    text.rope_parameters = {**text.rope_parameters, "partial_rotary_factor": 0.5}
    text.hidden_act = "gelu"
    assert facts(config, weights_id=weights_id).shape.namespace == before


def test_weights_id_says_that_weights_are_the_same(
    vllm_config: Callable[..., VllmConfig],
) -> None:
    one, two = vllm_config(SHAPE), vllm_config(replace(SHAPE, seed=1))
    digests = {facts(c, weights_id="v1").shape.namespace.partition("@")[2] for c in (one, two)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(SPEC, kv_quant_mode=KVQuantMode.NVFP4), "cannot be cut by head"),
        *PACKED,
    ],
)
def test_formats_that_cannot_be_cut_are_refused_by_name(
    vllm_config: Callable[..., VllmConfig], spec: KVCacheSpec, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        facts(vllm_config(), spec)


def test_layers_may_have_other_heads_than_the_model_says(
    vllm_config: Callable[..., VllmConfig],
) -> None:
    """Some layers have fewer heads. With one head on each rank, the number is unknown."""
    config = vllm_config()
    assert (
        facts(config, replace(SPEC, num_kv_heads=2)).shape.layer_groups[0].topology.num_heads == 2
    )
    config.parallel_config.tensor_parallel_size = 2
    assert (
        facts(config, replace(SPEC, num_kv_heads=2)).shape.layer_groups[0].topology.num_heads == 4
    )
    assert (
        facts(config, replace(SPEC, num_kv_heads=4)).shape.layer_groups[0].topology.num_heads == 8
    )
    with pytest.raises(ConfigError, match=r"one KV head on each rank, .* lower tensor_parallel"):
        facts(config, replace(SPEC, num_kv_heads=1))


@pytest.mark.parametrize(
    ("heads", "tp_size", "dcp_size", "interleave", "chunk_tokens", "words"),
    [
        (4, 4, 2, 1, 256, "over 2 ranks .* here 1 do"),
        (4, 8, 4, 1, 256, "over 4 ranks .* here 2 do"),
        (2, 4, 2, 16, 48, "48, .* rounds of 32"),
        (4, 1, 2, 1, 256, "over 2 ranks .* here 1 do"),
    ],
)
def test_tokens_that_cannot_be_dealt_out_are_refused(
    vllm_config: Callable[..., VllmConfig],
    heads: int,
    tp_size: int,
    dcp_size: int,
    interleave: int,
    chunk_tokens: int,
    words: str,
) -> None:
    config = vllm_config(replace(SHAPE, kv_heads=heads))
    config.parallel_config.tensor_parallel_size = tp_size
    config.parallel_config.decode_context_parallel_size = dcp_size
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    spec = replace(SPEC, num_kv_heads=max(1, heads // tp_size))
    with pytest.raises(ConfigError, match=words):
        facts(config, spec, chunk_tokens=chunk_tokens)


def test_both_options_of_interleaving_mean_the_same_on_either_side(
    vllm_config: Callable[..., VllmConfig],
) -> None:
    """vLLM 0.32 applies the older option in its workers, when they make their connector."""
    cache = cache_config(replace(SPEC, num_kv_heads=1))
    interleaves = []
    for older, newer, in_worker in ((1, 1, False), (16, 1, False), (16, 1, True), (1, 16, False)):
        config = vllm_config(replace(SHAPE, kv_heads=2))
        parallel = config.parallel_config
        parallel.tensor_parallel_size, parallel.decode_context_parallel_size = 4, 2
        parallel.dcp_kv_cache_interleave_size = older
        parallel.cp_kv_cache_interleave_size = newer
        if in_worker and (settle := getattr(config, "adjust_dcp_kv_cache_interleave_size", None)):
            settle(cache)
        read = engine_config.read_engine(config, cache, read_config({}, env={}))
        interleaves.append(read.shape.layer_groups[0].topology.context.interleave)
    assert interleaves == [1, 16, 16, 16]


@pytest.mark.skipif(
    not hasattr(VllmConfig, "adjust_dcp_kv_cache_interleave_size"),
    reason="this release of vLLM deals out as it was told",
)
@pytest.mark.parametrize("is_told", [True, False])
def test_beside_nixl_tokens_are_dealt_out_as_was_told(
    vllm_config: Callable[..., VllmConfig], is_told: bool
) -> None:
    config = vllm_config(replace(SHAPE, kv_heads=2))
    parallel = config.parallel_config
    parallel.tensor_parallel_size, parallel.decode_context_parallel_size = 4, 2
    parallel._allow_auto_resolve_cp_interleave_size = not is_told
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [{"kv_connector": "NixlConnector"}]},
    )
    refused = pytest.raises(ConfigError, match="--cp-kv-cache-interleave-size")
    with set_current_vllm_config(config), nullcontext() if is_told else refused:
        engine_config.refuse_options(config)


def test_pipeline_stages_are_known_to_the_scheduler(
    vllm_config: Callable[..., VllmConfig],
) -> None:
    """The scheduler's KV cache configuration has the layer names of one stage only."""
    config = vllm_config()
    config.parallel_config.pipeline_parallel_size = 2
    read = engine_config.read_engine(config, cache_config(SPEC, layers=2), read_config({}, env={}))
    assert read.shape.layer_groups[0].topology.stages == ((0, 2), (2, 4))
    assert read.shape.num_ranks == 2


def test_draft_layers_are_left_out(vllm_config: Callable[..., VllmConfig]) -> None:
    names = [f"model.layers.{i}.self_attn.attn" for i in (10, 2, 0, 1, 3)]
    group = KVCacheGroupSpec([*names, "draft_model.layers.0.self_attn.attn"], SPEC)
    cache = KVCacheConfig(
        num_blocks=1, kv_cache_tensors=tensors_of(group.layer_names), kv_cache_groups=[group]
    )
    config = vllm_config()
    config.speculative_config = cast("Any", SimpleNamespace(method="eagle"))
    options = read_config({"drafts": "off"}, env={})
    [layer_group] = engine_config.read_engine(config, cache, options).layer_groups
    assert layer_group.layers == tuple((f"model.layers.{i}.self_attn.attn", 0) for i in range(4))


def test_pages_of_cpu_attention(vllm_config: Callable[..., VllmConfig]) -> None:
    config = vllm_config()
    read = facts(config)
    caches = {f"model.layers.{i}.self_attn.attn": torch.zeros(10, 4, 32, 64) for i in (3, 1, 0, 2)}
    pages = engine_config.layer_pages(caches, read, config)
    assert [p.owner[0] is caches[f"model.layers.{i}.self_attn.attn"] for i, p in enumerate(pages)]
    assert [len(p.runs) for p in pages] == [2] * 4  # transposed K, plain V
    assert {p.row_bytes for p in pages} == {256}


@pytest.mark.parametrize(
    ("written", "asked", "policy", "is_told"),
    [
        ({}, {}, "recompute", True),
        ({"kv_load_failure_policy": "fail"}, {}, "recompute", True),
        ({"kv_load_failure_policy": "recompute"}, {}, "recompute", False),
        ({}, {"load_failure": "fail"}, "fail", False),
        ({}, {"load_failure": "recompute"}, "recompute", False),
        ({"kv_load_failure_policy": "recompute"}, {"load_failure": "fail"}, "fail", False),
        ({"kv_load_failure_policy": "fail"}, {"load_failure": "recompute"}, "recompute", False),
    ],
)
def test_failed_loads_are_computed_unless_asked_otherwise(
    vllm_config: Callable[..., VllmConfig],
    caplog: pytest.LogCaptureFixture,
    written: dict[str, str],
    asked: dict[str, str],
    policy: str,
    is_told: bool,
) -> None:
    """A user's value cannot be told from vLLM's default, so the log says which option to set."""
    transfer = {"kv_connector": "KVPoolConnector", "kv_role": "kv_both", **written}
    config = vllm_config(kv_transfer_config=transfer)
    assert config.kv_transfer_config is not None
    caplog.clear()
    with caplog.at_level(logging.INFO, "vllm_kvpool"):
        engine_config.prefer_recompute(config, read_config(asked, env={}))
    assert config.kv_transfer_config.kv_load_failure_policy == policy
    assert [record.levelname for record in caplog.records] == ["INFO"] * is_told
    assert ("set load_failure to fail in kv_connector_extra_config" in caplog.text) == is_told


# The prefix cache of the engine


class FakeBlockPool:
    """A block pool whose resets give the answers that the test sets."""

    def __init__(self) -> None:
        self.answers: list[bool] = []

    def reset_prefix_cache(self) -> bool:
        """As vLLM's."""
        return self.answers.pop(0)


def test_a_reset_of_the_prefix_cache_is_told_whether_it_succeeds_or_not() -> None:
    block_pool, told = FakeBlockPool(), list[bool]()
    engine_config.PoolPins(told.append).use_pool(cast("Any", block_pool))
    block_pool.answers = [True, False, True]
    assert [block_pool.reset_prefix_cache() for _ in range(3)] == [True, False, True] == told
    assert block_pool.reset_prefix_cache.__doc__ == "As vLLM's."


BY_LAYER = pytest.mark.skipif(
    not compat.has_loads_within_steps(), reason="loads layer by layer are refused here"
)


@BY_LAYER
def test_blocks_that_are_forgotten_are_found_no_more_and_stay_their_requests() -> None:
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
    blocks = pool.get_new_blocks(3)
    for number, block in enumerate(blocks):
        name = make_block_hash_with_group_id(BlockHash(bytes([number])), 0)
        block.set_block_hash(name)
        pool.cached_block_hash_to_block.insert(name, block)
    pins = engine_config.PoolPins([].append)
    pins.use_pool(pool)
    pins.evict([block.block_id for block in blocks[1:]])
    found = [pool.get_cached_block(BlockHash(bytes([i])), [0]) for i in range(3)]
    assert found == [[blocks[0]], None, None]
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    pins.evict([blocks[1].block_id])  # again, or of one that never was to be found


# Loads layer by layer


@BY_LAYER
def test_a_layer_is_known_by_the_first_layer_of_its_cells(
    vllm_config: Callable[..., VllmConfig],
) -> None:
    config = vllm_config(async_scheduling=False)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    for options, first in (({}, [0, 1, 2, 3]), ({"layer_span": 3}, [0, 0, 0, 3])):
        read = facts(config, layerwise=True, **options)
        spans = engine_config.layer_spans(read, config)
        assert spans == dict(zip(names, first, strict=True))


def test_layers_ask_outside_of_cuda_graphs_where_they_have_to() -> None:
    assert KVPoolConnector.requires_piecewise_for_cudagraph({"layerwise": True})
    assert not KVPoolConnector.requires_piecewise_for_cudagraph({})


# Weights


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_first_epoch_is_what_a_reload_of_the_same_files_is_called(
    vllm_config: Callable[..., VllmConfig], load_format: str
) -> None:
    config = vllm_config(load_format=load_format)
    expected = (
        "" if load_format == "dummy" else weights_version.version_of_files(WeightSources.of(config))
    )
    assert engine_config.first_weights_version(config) == expected
    assert expected != engine_config.first_weights_version(vllm_config(replace(SHAPE, seed=1)))


def reads() -> int:
    """Return the number of this process's read calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("syscr")).split()[1])


class Watcher:
    """A watcher that ignores every report."""

    def weights_changed(self, weights_version: str) -> None:
        raise AssertionError(weights_version)


def test_an_engine_reads_its_weights_once_and_its_ranks_never(
    vllm_config: Callable[..., VllmConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The namespace, the first epoch and the watchers of weights share one process's reads."""
    monkeypatch.setattr(weights, "SETTLED_NS", -(10**12))  # as if written long ago
    config = vllm_config()
    copy = shutil.copytree(config.model_config.model, tmp_path / "model")
    tensors = {f"experts.{i}": np.zeros(96, np.uint8) for i in range(NUM_TENSORS)}
    save_file(tensors, copy / "more.safetensors")
    config.model_config.model = str(copy)
    caches, options = cache_config(SPEC), read_config({}, env={})
    before = reads()
    on_rank = engine_config.read_engine(config, caches, options, with_namespace=False)
    assert reads() - before < 50
    before = reads()
    on_scheduler = engine_config.read_engine(config, caches, options)
    engine_config.first_weights_version(config)
    weights_version.watch(Watcher(), config)
    assert 3 * NUM_TENSORS < reads() - before < 4 * NUM_TENSORS
    assert on_rank == replace(
        on_scheduler, shape=replace(on_scheduler.shape, namespace=""), values={}
    )


def test_weights_that_are_not_in_files_are_taken_by_name(tmp_path: Path) -> None:
    assert adapt_directory("no/such-model-anywhere") is None
    assert adapt_directory(str(tmp_path)) == tmp_path


def adapt_directory(name: str) -> Path | None:
    from vllm_kvpool.vllm_adapt.weight_sources import local_directory

    return local_directory(name, None)


def test_without_triton_there_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Triton is never installed beside vLLM's CPU build: vLLM would then assume a GPU."""
    engine_config.triton_is_here.cache_clear()
    assert not engine_config.triton_is_here()
    assert not engine_config.triton_is_here()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_workers_of_data_parallel_engines_are_numbered_through(
    vllm_config: Callable[..., VllmConfig],
) -> None:
    """vLLM numbers ranks within each engine.

    Without experts, every engine calls itself the first.
    """
    config = vllm_config()
    parallel = config.parallel_config
    parallel.tensor_parallel_size = 2
    numbers = []
    for parallel.data_parallel_index in range(3):
        for parallel.rank in range(2):
            numbers.append(engine_config.rank_place(config).number(2))
    assert parallel.data_parallel_rank == 0
    assert numbers == list(range(6))


@pytest.mark.parametrize(
    ("backend", "engines_here", "expected"),
    [("mp", 1, 4), ("mp", 2, 8), ("uni", 0, 4), ("ray", 2, 1), ("external_launcher", 1, 1)],
)
def test_ranks_on_a_host_are_those_that_vllm_starts_there(
    vllm_config: Callable[..., VllmConfig], backend: str, engines_here: int, expected: int
) -> None:
    config = vllm_config()
    parallel = config.parallel_config
    parallel.world_size = 4
    parallel.distributed_executor_backend = backend
    parallel.data_parallel_size_local = engines_here
    assert engine_config.rank_place(config).ranks_on_host == expected


def place_of(
    config: VllmConfig, role: str = "kv_both", num_ranks: int = 2, **options: Any
) -> NoticePlace | None:
    config.kv_transfer_config = KVTransferConfig(kv_connector="KVPoolConnector", kv_role=role)
    return engine_config.notice_place(config, read_config(options, {}), num_ranks)


@pytest.mark.parametrize(
    ("listen", "address", "expected"),
    [
        ("", "10.0.0.7", NoticePlace("tcp://10.0.0.7:*", "10.0.0.7", False)),
        ("", "fd00::7", NoticePlace("tcp://[fd00::7]:*", "[fd00::7]", False)),
        ("", "0.0.0.0", NoticePlace("tcp://127.0.0.1:*", "127.0.0.1", False)),
        ("tcp://10.0.0.1:7000", "10.0.0.7", NoticePlace("tcp://10.0.0.1:7003", "10.0.0.1", True)),
        ("tcp://*:7000", "10.0.0.7", NoticePlace("tcp://*:7003", "10.0.0.7", True)),
        ("tcp://[::]:7000", "fd00::7", NoticePlace("tcp://[::]:7003", "[fd00::7]", True)),
        ("off", "10.0.0.7", None),
    ],
)
def test_rank_tells_notices_at_its_own_port_where_others_reach_the_host(
    vllm_config: Callable[..., VllmConfig],
    monkeypatch: pytest.MonkeyPatch,
    listen: str,
    address: str,
    expected: NoticePlace | None,
) -> None:
    """The rank is the second of the second data-parallel engine. Engines have two ranks."""
    monkeypatch.setenv("VLLM_HOST_IP", address)
    config = vllm_config()
    config.parallel_config.data_parallel_index = 1
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.rank = 1
    assert place_of(config, notice_listen=listen) == expected


@pytest.mark.parametrize(
    ("role", "options", "serves"),
    [
        ("kv_producer", {}, True),
        ("kv_both", {}, True),
        ("kv_consumer", {}, False),
        ("kv_consumer", {"save_decode": True}, True),
    ],
)
def test_engine_that_does_not_save_tells_no_notices(
    vllm_config: Callable[..., VllmConfig], role: str, options: dict[str, Any], serves: bool
) -> None:
    assert (place_of(vllm_config(), role, **options) is not None) is serves


def test_rank_beyond_the_last_port_is_refused(vllm_config: Callable[..., VllmConfig]) -> None:
    config = vllm_config()
    config.parallel_config.data_parallel_index = 1
    with pytest.raises(ConfigError, match=r"notice_listen: .* port 65537, and 65535 is the last"):
        place_of(config, notice_listen="tcp://*:65535")


def test_peers_that_cannot_be_hosts_are_refused_before_the_engine_starts(
    vllm_config: Callable[..., VllmConfig],
) -> None:
    config = vllm_config()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVPoolConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"allowed_peers": ["10.0.0.1/16"]},
    )
    with pytest.raises(ConfigError, match=r"allowed_peers: 10.0.0.1/16 is an address within"):
        KVPoolConnector(config, KVConnectorRole.WORKER, cache_config(SPEC))


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("device", [HOST_DEVICE, Device(torch.device("meta"))])
def test_an_engine_that_may_make_no_further_step_ends_gathers_in_theirs(
    monkeypatch: pytest.MonkeyPatch, device: Device, in_process: bool
) -> None:
    """Otherwise, `reset_prefix_cache` fails after the last answer, and `sleep` raises."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(not in_process)))
    assert engine_config.gathers_in_step(device) == (device.is_host or in_process)
