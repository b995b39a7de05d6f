"""Kinds of layers from vLLM's own groups, and how far each looks back in vLLM's own managers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.cache_tensors import tensors_of
from tests.support.models import GemmaShape, LlamaShape, UnevenShape, make_model
from vllm_kvpool.config import read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout.topology import FULL_ATTENTION, AttentionWindow, KVCacheGroup
from vllm_kvpool.vllm_adapt import compat, engine_config
from vllm_kvpool.vllm_adapt.kv_cache_specs import layer_groups
from vllm_kvpool.vllm_adapt.kv_cache_specs.layer_groups import context_of, rank_layer_groups

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

needs_states = pytest.mark.skipif(
    not compat.offers_states(), reason="this release does not say when states are complete"
)

LAYERS = 12
SHAPE = LlamaShape(kv_heads=4, layers=LAYERS)
BASE: dict[str, Any] = {"block_size": 16, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**BASE, num_kv_heads=4)
WINDOW = SlidingWindowSpec(**BASE, num_kv_heads=4, sliding_window=64)
LOCAL = ChunkedLocalAttentionSpec(**BASE, num_kv_heads=4, attention_chunk_size=128)
# Five windows, then full attention, as in Gemma 3.
GEMMA = [FULL if layer % 6 == 5 else WINDOW for layer in range(LAYERS)]
GEMMA_TYPES = [
    "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(LAYERS)
]


@pytest.fixture(scope="module")
def make_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VllmConfig]:
    """`make_config(tp, pp)`, of a model whose configuration names its layers' types."""
    directory = tmp_path_factory.mktemp("models")

    def build(tp: int = 1, pp: int = 1, **parallel: int) -> VllmConfig:
        model = str(make_model(directory, SHAPE))
        arguments: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
        config = EngineArgs(model=model, block_size=16, **arguments).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"
        config.parallel_config.tensor_parallel_size = tp
        config.parallel_config.pipeline_parallel_size = pp
        for name, value in parallel.items():
            setattr(config.parallel_config, name, value)
        return config

    return build


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def grouped(config: VllmConfig, specs: Sequence[KVCacheSpec], first: int = 0) -> KVCacheConfig:
    """Return vLLM's KV cache configuration of layers that are numbered from `first` on."""
    named = {name_of(first + i): spec for i, spec in enumerate(specs)}
    groups = get_kv_cache_groups(config, named)
    return get_kv_cache_config_from_groups(config, groups, available_memory=64 << 20)


def by_hand(*groups: tuple[Sequence[str], KVCacheSpec]) -> KVCacheConfig:
    made = [KVCacheGroupSpec(list(names), spec) for names, spec in groups]
    tensors = tensors_of([name for names, _ in groups for name in names])
    return KVCacheConfig(num_blocks=100, kv_cache_tensors=tensors, kv_cache_groups=made)


def drafting(method: str) -> Any:
    return SimpleNamespace(method=method)


def read(config: VllmConfig, cache: KVCacheConfig, **options: Any) -> engine_config.EngineFacts:
    return engine_config.read_engine(config, cache, read_config(options, env={}))


# Layer groups that can be shared


def test_windows_in_several_groups_are_one_kind(make_config: Callable[..., VllmConfig]) -> None:
    config = make_config()
    cache = grouped(config, GEMMA)
    facts = read(config, cache)
    groups = cache.kv_cache_groups
    assert len(groups) == 6
    full, window = facts.shape.layer_groups
    assert (full.name, window.name) == ("full-4x256", "window64-4x256")
    assert (full.window, window.window) == (FULL_ATTENTION, AttentionWindow(sliding=64))
    assert (full.topology.stages, window.topology.stages) == (((0, 2),), ((0, 10),))
    assert facts.shape.groups == tuple(
        KVCacheGroup(
            16,
            FULL_ATTENTION
            if isinstance(group.kv_cache_spec, FullAttentionSpec)
            else AttentionWindow(64),
        )
        for group in groups
    )
    local = [layer_group.layers for layer_group in facts.layer_groups]
    assert [[name for name, _ in layers] for layers in local] == [
        [name_of(i) for i in range(LAYERS) if GEMMA[i] is spec] for spec in (FULL, WINDOW)
    ]
    assert all(name in groups[group].layer_names for layers in local for name, group in layers)


def test_a_model_of_windows_alone_is_one_kind(make_config: Callable[..., VllmConfig]) -> None:
    config = make_config()
    facts = read(config, grouped(config, [WINDOW] * LAYERS))
    [layer_group] = facts.shape.layer_groups
    assert (layer_group.name, layer_group.window) == ("", AttentionWindow(sliding=64))
    assert facts.shape.groups == (KVCacheGroup(16, AttentionWindow(sliding=64)),)


def test_what_is_kept_longer_for_drafts_is_read_longer(
    make_config: Callable[..., VllmConfig],
) -> None:
    spec = replace(WINDOW, extra_retained_tokens=3)
    [layer_group] = rank_layer_groups(make_config(), by_hand(([name_of(0)], spec)))
    for computed in (0, 66, 67, 68, 200):
        assert layer_group.window.first_read(computed) == skipped(
            SlidingWindowManager, spec, computed
        )


def test_local_pieces_are_a_kind(make_config: Callable[..., VllmConfig]) -> None:
    config = make_config()
    facts = read(config, grouped(config, [LOCAL, LOCAL, LOCAL, FULL] * 3))
    assert [(layer_group.name, layer_group.window) for layer_group in facts.shape.layer_groups] == [
        ("full-4x256", FULL_ATTENTION),
        ("local128-4x256", AttentionWindow(local=128)),
    ]


def test_pages_know_their_groups(make_config: Callable[..., VllmConfig]) -> None:
    config = make_config()
    cache = grouped(config, GEMMA)
    facts = read(config, cache)
    tensors = {name_of(i): torch.zeros(10, 4, 16, 64) for i in range(LAYERS)}
    pages = engine_config.layer_pages(tensors, facts, config)
    names = [name_of(i) for spec in (FULL, WINDOW) for i in range(LAYERS) if GEMMA[i] is spec]
    for layer, name in zip(pages, names, strict=True):
        assert layer.owner[0] is tensors[name]
        assert name in cache.kv_cache_groups[layer.group].layer_names


def test_namespaces_do_not_depend_on_the_grouping(make_config: Callable[..., VllmConfig]) -> None:
    config = make_config()
    expected = read(config, grouped(config, GEMMA)).shape.namespace
    names = [[name_of(i) for i in range(LAYERS) if GEMMA[i] is spec] for spec in (WINDOW, FULL)]
    other = by_hand((names[0], replace(WINDOW, block_size=32)), (names[1], FULL))
    assert read(config, other).shape.namespace == expected
    two = make_config(tp=2)
    half = [replace(spec, num_kv_heads=2) for spec in GEMMA]
    assert read(two, grouped(two, half)).shape.namespace == expected
    wider = [FULL if spec is FULL else replace(WINDOW, sliding_window=65) for spec in GEMMA]
    assert read(config, grouped(config, wider)).shape.namespace != expected


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_of_a_pipeline_are_told_by_layer_types(
    make_config: Callable[..., VllmConfig], stage: int
) -> None:
    """The result is the same for each stage whose layers the engine knows."""
    config = make_config(pp=2)
    config.model_config.hf_text_config.layer_types = GEMMA_TYPES
    cache = grouped(config, GEMMA[6 * stage : 6 * stage + 6], 6 * stage)
    full, window = read(config, cache).shape.layer_groups
    assert full.topology.stages == ((0, 1), (1, 2))
    assert window.topology.stages == ((0, 5), (5, 10))


def test_without_layer_types_a_pipeline_is_refused(make_config: Callable[..., VllmConfig]) -> None:
    config = make_config(pp=2)
    cache = grouped(config, GEMMA[:6])
    for types in (None, GEMMA_TYPES[:-1], ["linear_attention"] * LAYERS):
        config.model_config.hf_text_config.layer_types = types
        with pytest.raises(ConfigError, match=r"layer_types .* pipeline_parallel_size to 1"):
            read(config, cache)
    one = grouped(config, [FULL] * 6)
    assert read(config, one).shape.layer_groups[0].topology.stages == ((0, 6), (6, 12))


# Recurrent states

STATE = MambaSpec(
    block_size=256,
    shapes=((2, 64),),
    dtypes=(torch.float32,),
    mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
    mamba_cache_mode="align",
)
WIDE = replace(FULL, block_size=256)
LFM2_TYPES = ["full_attention" if layer % 3 == 2 else "conv" for layer in range(LAYERS)]


def lfm2(config: VllmConfig, *, tp: int = 1, first: int = 0, stop: int = LAYERS) -> KVCacheConfig:
    """Return two groups of states and one of attention, for the layers [first, stop)."""
    config.cache_config.mamba_cache_mode = "align"
    config.model_config.hf_text_config.layer_types = LFM2_TYPES
    state = replace(STATE, shapes=((2, 64 // tp),))
    kinds = {
        i: [name_of(layer) for layer in range(first, stop) if layer % 3 == i] for i in range(3)
    }
    return by_hand(
        (kinds[0], state), (kinds[2], replace(WIDE, num_kv_heads=4 // tp)), (kinds[1], state)
    )


@needs_states
@pytest.mark.parametrize("tp", [1, 2])
def test_states_of_several_groups_are_one_kind(
    make_config: Callable[..., VllmConfig], tp: int
) -> None:
    config = make_config(tp=tp)
    facts = read(config, lfm2(config, tp=tp))
    full, state = facts.shape.layer_groups
    # 64 channels of 8 query heads, each unit with 2 rows of 8 channels.
    assert (full.name, state.name) == ("full-4x256", "state-short_conv-8x64")
    assert (full.is_state, state.is_state) == (False, True)
    assert (state.topology.num_heads, state.topology.heads_per_rank) == (8, 8 // tp)
    assert state.row_bytes == 64
    assert facts.shape.groups == (
        KVCacheGroup(256, is_state=True),
        KVCacheGroup(256),
        KVCacheGroup(256, is_state=True),
    )
    assert facts.layer_groups[1].groups == (0, 2)
    assert facts.reference_group is facts.layer_groups[0]
    assert [layer for layer in range(LAYERS) if layer % 3 != 2] == [i for (i,) in state.layers]


@needs_states
def test_engines_that_share_states_have_one_namespace(
    make_config: Callable[..., VllmConfig],
) -> None:
    names = set()
    for tp in (1, 2):
        config = make_config(tp=tp)
        names.add(read(config, lfm2(config, tp=tp)).shape.namespace)
    assert len(names) == 1
    config = make_config()
    cache = lfm2(config)
    for group in cache.kv_cache_groups[::2]:
        group.kv_cache_spec = replace(STATE, dtypes=(torch.float16,))
    names.add(read(config, cache).shape.namespace)
    assert len(names) == 2


@needs_states
def test_states_in_pipeline_stages(make_config: Callable[..., VllmConfig]) -> None:
    config = make_config(pp=2)
    full, state = read(config, lfm2(config, stop=LAYERS // 2)).shape.layer_groups
    assert (full.topology.stages, state.topology.stages) == (((0, 2), (2, 4)), ((0, 4), (4, 8)))


@needs_states
def test_states_alone_are_named_in_keys(make_config: Callable[..., VllmConfig]) -> None:
    config = make_config()
    config.cache_config.mamba_cache_mode = "align"
    facts = read(config, by_hand(([name_of(i) for i in range(LAYERS)], STATE)))
    assert [group.name for group in facts.shape.layer_groups] == ["state-short_conv-8x64"]


@needs_states
def test_states_of_different_forms_in_a_group_are_refused(
    make_config: Callable[..., VllmConfig],
) -> None:
    config = make_config()
    config.cache_config.mamba_cache_mode = "align"
    names = [name_of(i) for i in range(2)]
    other = replace(STATE, shapes=((4, 32),))
    specs = UniformTypeKVCacheSpecs(
        block_size=256, kv_cache_specs=dict(zip(names, (STATE, other), strict=True))
    )
    with pytest.raises(ConfigError, match="states of different forms in a group"):
        read(config, by_hand((names, specs)))


# What cannot


def test_older_releases_refuse_recurrent_states(
    make_config: Callable[..., VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "offers_states", lambda: False)
    mamba = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
    cache = by_hand(([name_of(0)], FULL), ([name_of(1)], mamba))
    with pytest.raises(ConfigError, match=r"use vLLM 0\.32"):
        read(make_config(), cache)


def test_a_group_of_drafts_alone_is_left_out(make_config: Callable[..., VllmConfig]) -> None:
    config = make_config()
    config.speculative_config = drafting("eagle")
    own = [name_of(i) for i in range(LAYERS)]
    drafts = [name_of(LAYERS), "draft_model.layers.0.self_attn.attn"]
    facts = read(config, by_hand((drafts, WINDOW), (own, FULL)), drafts="off")
    [layer_group] = facts.layer_groups
    assert (layer_group.name, layer_group.groups) == ("", (1,))
    assert facts.shape.groups == (KVCacheGroup(16, shared=False), KVCacheGroup(16))
    assert layer_group.layers == tuple((name, 1) for name in own)
    with pytest.raises(ConfigError, match="no attention layers"):
        rank_layer_groups(config, by_hand((drafts, WINDOW)))


@pytest.mark.parametrize("head_size", [32, 64])
@pytest.mark.parametrize(
    "draft",
    [
        name_of(LAYERS),  # EAGLE, DeepSeek's MTP
        "draft_model.model.layers.0.self_attn.attn",
        "mtp.layers.0.self_attn.attn",  # Qwen 3.5, Nemotron-H
        "model.mtp.layers.0.self_attn.attn",  # MiMo V2
    ],
)
def test_a_draft_among_the_models_layers_changes_nothing(
    make_config: Callable[..., VllmConfig], draft: str, head_size: int
) -> None:
    config, own = make_config(), [name_of(layer) for layer in range(LAYERS)]
    plain = read(config, by_hand((own, FULL)))
    specs = dict.fromkeys(own, FULL) | {draft: replace(FULL, head_size=head_size)}
    groups = get_kv_cache_groups(config, specs)
    of_worker = get_kv_cache_config_from_groups(config, groups, available_memory=64 << 20)
    config.speculative_config = drafting("mtp")
    for cache in (of_worker, generate_scheduler_kv_cache_config([of_worker])):
        drafted = read(config, cache, drafts="off")
        assert drafted.shape.namespace == plain.shape.namespace
        assert drafted.shape.layer_groups == plain.shape.layer_groups
        assert drafted.layer_groups == plain.layer_groups


@pytest.mark.parametrize("method", [None, "ngram"])
def test_layers_that_are_run_through_again_are_no_drafts(
    make_config: Callable[..., VllmConfig], method: str | None
) -> None:
    """Repeated layers are numbered behind the model's layers. Here the repetition sees a window."""
    config = make_config()
    config.speculative_config = method and drafting(method)
    first, again = ([name_of(start + i) for i in range(LAYERS)] for start in (0, LAYERS))
    facts = read(config, by_hand((first, FULL), (again, WINDOW)))
    assert [layer_group.topology.stages for layer_group in facts.shape.layer_groups] == [
        ((0, LAYERS),)
    ] * 2
    assert facts.shape.groups == (KVCacheGroup(16), KVCacheGroup(16, AttentionWindow(sliding=64)))


def test_a_model_that_loops_is_refused_with_drafts(
    make_config: Callable[..., VllmConfig],
) -> None:
    config = make_config()
    config.model_config.hf_text_config.loop_num = 2
    cache = by_hand(([name_of(i) for i in range(2 * LAYERS)], FULL))
    assert read(config, cache).shape.layer_groups[0].topology.stages == ((0, 2 * LAYERS),)
    config.speculative_config = drafting("eagle")
    with pytest.raises(ConfigError, match="run it without drafts"):
        read(config, cache)


def test_several_attentions_of_a_layer_are_layers_of_their_own(
    make_config: Callable[..., VllmConfig],
) -> None:
    """LongCat Flash has two attentions in each layer."""
    names = [f"model.layers.{i}.self_attn.{j}.attn" for i in range(11) for j in range(2)]
    cache = by_hand((sorted(names), FULL))
    facts = read(make_config(), cache)
    assert [layer_group.topology.stages for layer_group in facts.shape.layer_groups] == [((0, 22),)]
    [layer_group] = facts.layer_groups
    assert [name for name, _ in layer_group.layers] == names
    [shared] = facts.shape.layer_groups
    assert shared.layers == tuple((i, j) for i in range(11) for j in range(2))


@pytest.mark.parametrize(
    "again", ["model.layers.0.self_attn.1.attn", f"model.layers.{LAYERS}.self_attn.attn"]
)
def test_layers_with_kv_several_times_are_not_cut_into_stages(
    make_config: Callable[..., VllmConfig], again: str
) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size to 1"):
        read(make_config(pp=2), by_hand(([name_of(0), again], FULL)))


def test_a_layer_without_a_number_is_refused(make_config: Callable[..., VllmConfig]) -> None:
    with pytest.raises(ConfigError, match="'attn' of this model has no number"):
        read(make_config(), by_hand((["attn"], FULL)))


def test_one_head_on_each_rank_of_some_layers_is_refused(
    make_config: Callable[..., VllmConfig],
) -> None:
    """The head may be the rank's own, or one head that several ranks share."""
    config = make_config(tp=2)
    window = replace(WINDOW, num_kv_heads=1)
    cache = by_hand(
        ([name_of(0)], replace(FULL, num_kv_heads=2)), ([name_of(i) for i in range(1, 12)], window)
    )
    with pytest.raises(ConfigError, match="whether ranks share it cannot be told"):
        read(config, cache)
    known = [name_of(i) for i in range(1, 12)], replace(WINDOW, num_kv_heads=4)
    facts = read(config, by_hand(([name_of(0)], replace(FULL, num_kv_heads=2)), known))
    assert [layer_group.topology.num_heads for layer_group in facts.shape.layer_groups] == [4, 8]


@dataclass
class Block:
    """A layer's configuration, as a model's own code builds it."""

    n_heads_in_group: int | None


@pytest.mark.parametrize(("tp", "counted"), [(1, [4, 8]), (4, [4, 8]), (8, [8, 8]), (16, [8, 8])])
@pytest.mark.parametrize(
    "named",
    [
        {"swa_num_key_value_heads": 8},  # MiMo V2
        {"attention_other_setting": {"num_attention_groups": 8}},  # Step 3.5
        {"num_kv_heads_of_layers": None, "layers": [{"kv_heads": 8}, {"kv_heads": 3}]},
        {"num_attention_heads": 32, "block_configs": [{"attention": {"n_heads_in_group": 4}}]},
        {"num_attention_heads": 32, "block_configs": [Block(4), Block(None)]},  # Nemotron-NAS
    ],
    ids=str,
)
def test_ranks_that_hold_different_heads_are_not_taken_for_replicas(
    make_config: Callable[..., VllmConfig],
    named: dict[str, Any],
    tp: int,
    counted: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model says 4 heads, but its windows have 8.

    From TP 8 on, each rank holds one head of each layer, and every layer counts 8 heads.
    """
    monkeypatch.setattr(layer_groups, "local_weights", lambda *_: None)
    config = make_config(tp=tp)
    for name, value in named.items():
        setattr(config.model_config.hf_text_config, name, value)
    full, window = (
        replace(spec, num_kv_heads=max(1, heads // tp)) for spec, heads in ((FULL, 4), (WINDOW, 8))
    )
    cache = by_hand(([name_of(0)], full), ([name_of(i) for i in range(1, 12)], window))
    facts = read(config, cache)
    assert [layer_group.topology.num_heads for layer_group in facts.shape.layer_groups] == counted


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_weights_say_how_many_heads_each_layer_has(
    make_config: Callable[..., VllmConfig], tmp_path: Path, tp: int
) -> None:
    """Engines with one head of every layer on a rank can then share with engines of fewer ranks."""
    shape = UnevenShape(heads=16, kv_heads=4, window_kv_heads=8)
    model = str(make_model(tmp_path, shape))
    names = {
        kind: [name_of(i) for i, each in enumerate(shape.layer_types()) if each == kind]
        for kind in ("full_attention", "sliding_attention")
    }
    found = []
    for size in (1, tp):
        arguments: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
        config = EngineArgs(model=model, block_size=16, **arguments).create_engine_config()
        config.parallel_config.tensor_parallel_size = size
        specs = [
            replace(spec, num_kv_heads=max(1, heads // size))
            for spec, heads in ((FULL, 4), (WINDOW, 8))
        ]
        cache = by_hand(*zip(names.values(), specs, strict=True))
        found.append(read(config, cache).shape)
    assert [each.topology.num_heads for each in found[1].layer_groups] == [4, 8]
    assert found[0].namespace == found[1].namespace
    assert [each.topology.replicas for each in found[1].layer_groups] == [
        max(1, tp // heads) for heads in (4, 8)
    ]


@pytest.mark.skipif(
    not compat.offers_states(), reason="vLLM 0.27.1 does not read configurations by layers"
)
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_a_configuration_by_layers_says_how_many_heads_each_has(
    tmp_path: Path, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of image models have other names than their layers, or are not on this host."""
    monkeypatch.setattr(layer_groups, "local_weights", lambda *_: None)
    shape = GemmaShape(heads=16, kv_heads=8, global_kv_heads=2, sharing_layers=0)
    config = EngineArgs(
        model=str(make_model(tmp_path, shape)), dtype="float32", skip_tokenizer_init=True
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = tp
    types = shape.layer_types()
    cache = by_hand(
        *(
            (
                [name_of(i) for i, each in enumerate(types) if each == kind],
                replace(spec, num_kv_heads=max(1, heads // tp)),
            )
            for kind, spec, heads in (("full_attention", FULL, 2), ("sliding_attention", WINDOW, 8))
        )
    )
    facts = read(config, cache)
    assert [each.topology.num_heads for each in facts.shape.layer_groups] == [2, 8]


# Tokens dealt out


def test_blocks_are_those_of_all_ranks_that_tokens_are_dealt_to(
    make_config: Callable[..., VllmConfig],
) -> None:
    config = make_config(tp=8, decode_context_parallel_size=2, cp_kv_cache_interleave_size=16)
    facts = read(config, grouped(config, [replace(FULL, num_kv_heads=1)] * LAYERS))
    assert facts.shape.groups == (KVCacheGroup(32),)
    assert facts.shape.context.dcp_size == 2
    assert facts.shape.num_ranks == 8
    plain = make_config(tp=8)
    other = read(plain, grouped(plain, [replace(FULL, num_kv_heads=1)] * LAYERS))
    assert other.shape.num_ranks == 8


def test_on_ascend_prefill_context_parallelism_is_refused(
    make_config: Callable[..., VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(prefill_context_parallel_size=2)
    layer_groups = rank_layer_groups(config, grouped(make_config(), GEMMA))
    assert context_of(config, layer_groups, read_config({}, env={})).pcp_size == 2
    monkeypatch.setattr(compat, "device_type", lambda: "npu")
    with pytest.raises(ConfigError, match="Ascend"):
        context_of(config, layer_groups, read_config({}, env={}))


# Loads that fail


@pytest.mark.parametrize(
    ("specs", "tells", "loads"),
    [
        ([FULL] * LAYERS, False, True),
        (GEMMA, True, True),
        (GEMMA, False, False),
        ([WINDOW] * LAYERS, True, True),
        ([WINDOW] * LAYERS, False, False),
    ],
    ids=["full", "hybrid", "hybrid, older", "windows", "windows, older"],
)
def test_nothing_is_loaded_where_a_load_that_fails_is_not_survived(
    make_config: Callable[..., VllmConfig],
    monkeypatch: pytest.MonkeyPatch,
    specs: list[KVCacheSpec],
    tells: bool,
    loads: bool,
) -> None:
    monkeypatch.setattr(compat, "reports_failed_loads_by_request", lambda: tells)
    config = make_config()
    assert read(config, grouped(config, specs)).shape.loads == loads


# How far layers look back


def skipped(manager: type[SingleTypeKVCacheManager], spec: Any, computed: int) -> int:
    """Return the number of tokens whose blocks vLLM frees."""
    made = manager(
        kv_cache_spec=spec,
        block_pool=BlockPool(4, enable_caching=False, hash_block_size=16),
        enable_caching=False,
        kv_cache_group_id=0,
        scheduler_block_size=16,
    )
    return made.get_num_skipped_tokens(computed)


@given(st.integers(1, 300), st.integers(0, 1000))
def test_a_window_reaches_as_far_as_the_engine_keeps_it(window: int, computed: int) -> None:
    spec = SlidingWindowSpec(**BASE, num_kv_heads=1, sliding_window=window)
    expected = skipped(SlidingWindowManager, spec, computed)
    assert AttentionWindow(sliding=window).first_read(computed) == expected


@given(st.integers(1, 300), st.integers(0, 1000))
def test_a_local_piece_reaches_as_far_as_the_engine_keeps_it(size: int, computed: int) -> None:
    spec = ChunkedLocalAttentionSpec(**BASE, num_kv_heads=1, attention_chunk_size=size)
    expected = skipped(ChunkedLocalAttentionManager, spec, computed)
    assert AttentionWindow(local=size).first_read(computed) == expected
