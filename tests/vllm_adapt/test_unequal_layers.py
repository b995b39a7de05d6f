"""Kinds of layers: the layers that belong to a kind, and groups whose layers differ in form."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.cache_tensors import tensors_of
from tests.support.copiers import warm_copier
from tests.support.memory_store import MemoryStore
from tests.support.models import LlamaShape, make_model
from tests.support.worker_steps import load_all, prompt_hashes
from vllm_kvpool.config import read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout.engine_shape import RankPlace
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.transfer.ops import JobId, JobPages, LoadPlan, SavePlan
from vllm_kvpool.vllm_adapt import engine_config
from vllm_kvpool.worker.worker_part import WorkerPart

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LAYERS, HEADS, HEAD_SIZE = 4, 4, 32
CHUNK, TOKENS = 96, 2 * 96
BASE: dict[str, Any] = {"block_size": 32, "num_kv_heads": HEADS, "head_size": HEAD_SIZE}
FULL = FullAttentionSpec(**BASE, dtype=torch.float32)
WINDOW = SlidingWindowSpec(**BASE, dtype=torch.float32, sliding_window=64)
LOCAL = ChunkedLocalAttentionSpec(**BASE, dtype=torch.float32, attention_chunk_size=64)
STORES = itertools.count()
Make = Callable[..., VllmConfig]


@pytest.fixture(scope="module")
def make_config(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`make_config(*skipped, pp=1)`: a model in float32 whose other layers keep KV in fp8."""
    model = make_model(tmp_path_factory.mktemp("models"), LlamaShape(kv_heads=HEADS, layers=LAYERS))

    def build(*skipped: int, pp: int = 1) -> VllmConfig:
        arguments: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
        if skipped:
            arguments["kv_cache_dtype"] = "fp8"
            arguments["kv_cache_dtype_skip_layers"] = [str(layer) for layer in skipped]
        config = EngineArgs(model=str(model), block_size=32, **arguments).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"
        config.parallel_config.pipeline_parallel_size = pp
        return config

    return build


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def quantised(config: VllmConfig, spec: Any) -> Any:
    """Return the spec with fp8 KV, as vLLM's attention layers make it."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    dtype = kv_cache_dtype_str_to_dtype("fp8", config.model_config)
    return replace(spec, dtype=dtype, kv_quant_mode=get_kv_quant_mode("fp8"))


def specs_of(config: VllmConfig, block_size: int = 32) -> dict[str, KVCacheSpec]:
    skipped = config.cache_config.kv_cache_dtype_skip_layers
    plain = replace(FULL, block_size=block_size)
    fp8 = quantised(config, plain) if skipped else plain
    return {name_of(i): plain if str(i) in skipped else fp8 for i in range(LAYERS)}


def grouped(config: VllmConfig, block_size: int = 32) -> KVCacheConfig:
    """Return vLLM's KV cache configuration of the layers."""
    groups = get_kv_cache_groups(config, specs_of(config, block_size))
    return get_kv_cache_config_from_groups(config, groups, available_memory=64 << 20)


def by_hand(*groups: tuple[Sequence[int], KVCacheSpec]) -> KVCacheConfig:
    made = [KVCacheGroupSpec([name_of(i) for i in layers], spec) for layers, spec in groups]
    tensors = tensors_of([name for group in made for name in group.layer_names])
    return KVCacheConfig(num_blocks=100, kv_cache_tensors=tensors, kv_cache_groups=made)


def read(config: VllmConfig, cache: KVCacheConfig, **options: Any) -> engine_config.EngineFacts:
    return engine_config.read_engine(config, cache, read_config(options, env={}))


def namespace(config: VllmConfig, cache: KVCacheConfig) -> str:
    return read(config, cache).shape.namespace


# Layers of a kind


@pytest.mark.parametrize("other", ["fp8", "window", "local"])
def test_equally_many_other_layers_are_another_namespace(make_config: Make, other: str) -> None:
    """Keys count layers within their kind, so equal keys would name different layers."""
    config = make_config()
    specs = {"fp8": quantised(config, FULL), "window": WINDOW, "local": LOCAL}
    found = set()
    for layers in itertools.combinations(range(LAYERS), 2):
        rest = [i for i in range(LAYERS) if i not in layers]
        facts = read(config, by_hand((layers, FULL), (rest, specs[other])))
        assert {layer_group.layers for layer_group in facts.shape.layer_groups} == {
            tuple((i,) for i in layers),
            tuple((i,) for i in rest),
        }
        found.add(facts.shape.namespace)
    assert len(found) == 6


def test_skipped_layers_are_in_the_namespace(make_config: Make) -> None:
    configs = [make_config(0, 1), make_config(2, 3), make_config(0, 2), make_config()]
    assert len({namespace(config, grouped(config)) for config in configs}) == len(configs)


def test_layers_of_all_stages_are_in_the_namespace(make_config: Make) -> None:
    """The scheduler sees the layers of one stage only. Stages do not change the namespace."""
    config, two = make_config(), make_config(pp=2)
    types = {"f": "full_attention", "w": "sliding_attention"}
    specs = {"f": FULL, "w": WINDOW}
    found = {}
    for order in ("fwfw", "fwwf", "wffw"):
        text = two.model_config.hf_text_config
        text.layer_types = [types[each] for each in order]
        config.model_config.hf_text_config.layer_types = text.layer_types
        for stage in (range(2), range(2, 4)):
            cache = by_hand(*(([i], specs[order[i]]) for i in stage))
            facts = read(two, cache)
            assert [layer_group.layers for layer_group in facts.shape.layer_groups] == [
                tuple((i,) for i in range(LAYERS) if order[i] == each) for each in "fw"
            ]
            found.setdefault(order, set()).add(facts.shape.namespace)
        whole = by_hand(*(([i for i in range(4) if order[i] == e], specs[e]) for e in "fw"))
        found[order].add(namespace(config, whole))
    assert [len(each) for each in found.values()] == [1] * 3
    assert len(set.union(*found.values())) == 3


def test_a_stage_with_other_layers_than_derived_is_refused(make_config: Make) -> None:
    config = make_config(pp=2)
    facts = read(config, by_hand(([1, 2], FULL)))
    tensors = {name_of(i): torch.zeros(8, HEADS, 32, 2 * HEAD_SIZE) for i in (1, 2)}
    with pytest.raises(ConfigError, match="set pipeline_parallel_size to"):
        engine_config.layer_pages(tensors, facts, config)


def test_rows_of_equal_size_and_other_form_are_kinds_of_their_own(make_config: Make) -> None:
    int8 = replace(FULL, dtype=torch.int8, kv_quant_mode=KVQuantMode.NONE)
    half = HEAD_SIZE // 2
    short = replace(FULL, dtype=torch.float16, head_size=half, head_size_v=half)
    cache = by_hand(([0, 1], int8), ([2, 3], short))
    layer_groups = read(make_config(), cache).shape.layer_groups
    assert [(layer_group.name, layer_group.layers) for layer_group in layer_groups] == [
        ("full-4x64-16xfloat16-none", ((2,), (3,))),
        ("full-4x64-32xint8-none", ((0,), (1,))),
    ]


# A group of layers of several forms


@pytest.mark.parametrize("skipped", [(0,), (3,), (0, 2), (1, 2, 3)])
def test_a_group_of_unequal_layers_is_split_into_kinds(
    make_config: Make, skipped: tuple[int, ...]
) -> None:
    """The scheduler knows only one layer's form, and splits the group alike."""
    config = make_config(*skipped)
    cache = grouped(config)
    [group] = cache.kv_cache_groups
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    facts = read(config, cache)
    rest = [i for i in range(LAYERS) if i not in skipped]
    assert [(layer_group.name, layer_group.layers) for layer_group in facts.shape.layer_groups] == [
        ("full-4x256", tuple((i,) for i in skipped)),
        ("full-4x64", tuple((i,) for i in rest)),
    ]
    assert [layer_group.layers for layer_group in facts.layer_groups] == [
        tuple((name_of(i), 0) for i in layers) for layers in (skipped, rest)
    ]
    assert len(facts.shape.groups) == 1
    assert read(config, generate_scheduler_kv_cache_config([cache])) == facts


def test_a_group_that_is_unequal_otherwise_is_refused_on_both_sides(make_config: Make) -> None:
    """Workers know each layer's form and refuse.

    The scheduler refuses where it can see the form.
    """
    config = make_config()
    wide = replace(FULL, head_size=2 * HEAD_SIZE, head_size_v=2 * HEAD_SIZE)
    specs = {name_of(i): wide if i == 2 else FULL for i in range(LAYERS)}
    groups = get_kv_cache_groups(config, specs)
    cache = get_kv_cache_config_from_groups(config, groups, available_memory=64 << 20)
    for seen in (cache, generate_scheduler_kv_cache_config([cache])):
        with pytest.raises(ConfigError, match="KV of different forms in a group"):
            read(config, seen)


def test_unequal_layers_are_not_loaded_one_by_one(make_config: Make) -> None:
    config = make_config(0)
    with pytest.raises(ConfigError, match="have one form"):
        read(config, grouped(config), layerwise=True)


HASHES = prompt_hashes(range(TOKENS), CHUNK)


class Rank:
    """An engine's pages, by vLLM's own configuration, and its worker side."""

    def __init__(self, config: VllmConfig, block_size: int) -> None:
        self.block_size = block_size
        self.ids = tuple(reversed(range(1, 1 + TOKENS // block_size)))
        cache = grouped(config, block_size)
        self.facts = read(config, cache, chunk_tokens=CHUNK)
        self.config = config
        blocks = self.facts.shape.num_blocks
        self.caches = {
            name: torch.zeros(blocks, HEADS, block_size, 2 * HEAD_SIZE, dtype=spec.dtype)
            for name, spec in specs_of(config, block_size).items()
        }

    @property
    def used(self) -> list[torch.Tensor]:
        """Return the bytes of the request's blocks, layer by layer."""
        return [cache.view(torch.uint8)[list(self.ids)] for cache in self.caches.values()]

    def fill(self) -> None:
        for cache in self.caches.values():
            cache.view(torch.uint8).random_(0, 256)

    def side(self, store: str) -> WorkerPart:
        return WorkerPart(
            read_config({"store": store, "chunk_tokens": CHUNK, "staging_bytes": "2MiB"}, env={}),
            self.facts.shape,
            RankPlace(0, 0, 0),
            engine_config.layer_pages(self.caches, self.facts, self.config),
            warm_copier,
            finish_in_step=True,
        )

    def save(self, store: str) -> None:
        pages = (JobPages(self.ids, 0, 0, TOKENS),)
        side = self.side(store)
        plan = SavePlan(JobId(1), "r", 0, HASHES, pages)
        side.worker.start_saves(StepPlan(saves=(plan,)))
        side.close()

    def load(self, store: str) -> None:
        pages = (JobPages(self.ids, 0, 0, TOKENS),)
        load = LoadPlan(JobId(1), "r", 0, HASHES, pages, 0, TOKENS)
        side = self.side(store)
        assert not load_all([side], load)
        side.close()


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's kernels of fp8 need AVX-512 on x86"
)
def test_unequal_layers_pass_through_pages_of_another_block_size(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's fp8 kernels for CPUs run on this instruction set.
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "vec")
    names = [f"unequal{next(STORES)}" for _ in range(2)]
    kept = [MemoryStore(name, 1 << 30) for name in names]
    first, second = (f"memory://{name}" for name in names)
    config = make_config(0, 2)
    writer, between, reader = Rank(config, 32), Rank(config, 96), Rank(config, 32)
    assert writer.facts.shape.namespace == between.facts.shape.namespace
    writer.fill()
    writer.save(first)
    between.load(first)
    between.save(second)
    reader.load(second)
    assert all(map(torch.equal, writer.used, reader.used))
    assert any(bool(layer.any()) for layer in reader.used)
    for store in kept:
        store.close()
