"""Layer groups of drafters: how they are told, what is left out, and what tells drafters apart."""

import copy
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig, SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

from tests.support.drafters import (
    AttentiveShape,
    EvenShape,
    MimoShape,
    make_eagle,
    make_eagle3,
    make_mimo,
    speculation,
)
from tests.support.models import LlamaShape, make_model
from tests.vllm_adapt.kv_cache_specs.test_layer_groups import FULL, WINDOW, by_hand, name_of
from vllm_kvpool.config import read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout.topology import LayerGroup
from vllm_kvpool.vllm_adapt import compat, engine_config
from vllm_kvpool.vllm_adapt.kv_cache_specs import drafters

SHAPE = EvenShape(layers=2)
OWN = [name_of(layer) for layer in range(SHAPE.layers)]
LAYERS = {
    "draft_model": "draft_model.model.layers.0.self_attn.attn",
    "eagle": name_of(SHAPE.layers),
    "mtp": name_of(1),
}
Make = Callable[..., VllmConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(method, drafter)`: an engine's configuration; `drafter` is the drafter's directory."""

    def build(
        method: str = "", drafter: Path | None = None, layers: int = 1, **more: Any
    ) -> VllmConfig:
        mimo = MimoShape(layers=layers)
        model = make_mimo(tmp_path, mimo) if method == "mtp" else make_model(tmp_path, SHAPE)
        drafts = {}
        if method:
            one = AttentiveShape()
            made = {
                "eagle": lambda: make_eagle(tmp_path, SHAPE),
                "eagle3": lambda: make_eagle3(tmp_path, one),
                "draft_model": lambda: make_model(tmp_path, one),
            }
            named = drafter or (made[method]() if method in made else model)
            drafts = {"speculative_config": {**speculation(method, named, 1), **more}}
        config = EngineArgs(
            model=str(model), block_size=16, dtype="float32", skip_tokenizer_init=True, **drafts
        ).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"
        return config

    return build


def cached(config: VllmConfig, **specs: Any) -> tuple[KVCacheConfig, KVCacheConfig]:
    """Return vLLM's KV cache configurations of these layers: (a worker's, the scheduler's)."""
    groups = get_kv_cache_groups(config, specs)
    of_worker = get_kv_cache_config_from_groups(config, groups, available_memory=64 << 20)
    return of_worker, generate_scheduler_kv_cache_config([of_worker])


def read(config: VllmConfig, cache: KVCacheConfig, **options: Any) -> engine_config.EngineFacts:
    return engine_config.read_engine(config, cache, read_config(options, env={}))


def drafts_of(facts: engine_config.EngineFacts) -> list[LayerGroup]:
    return [each for each in facts.shape.layer_groups if each.is_draft]


@pytest.mark.parametrize(("method", "lookahead"), [("draft_model", 0), ("eagle", 1), ("mtp", 1)])
def test_layers_of_a_drafter_are_a_group_of_their_own_in_the_models_namespace(
    make: Make, method: str, lookahead: int
) -> None:
    """The drafter's layers are in the same KV cache group as the model's layers."""
    config = make(method)
    own = OWN[: 1 if method == "mtp" else 2]
    plain = make()
    if method == "mtp":
        plain = make(method)
        plain.speculative_config = None
    names = [*own, LAYERS[method]]
    for cache in cached(config, **dict.fromkeys(names, FULL)):
        facts = read(config, cache)
        without = read(plain, by_hand((own, FULL)))
        assert facts.shape.namespace == without.shape.namespace
        assert facts.shape.layer_groups[:1] == without.shape.layer_groups
        [drafts] = drafts_of(facts)
        assert drafts.name == f"draft-full-4x256-{facts.drafter}"
        assert (drafts.lookahead, drafts.is_optional) == (lookahead, True)
        assert facts.layer_groups[-1].layers == ((LAYERS[method], 0),)
        assert [group.lookahead for group in facts.shape.groups] == [lookahead]
        assert facts.reference_group.name == ""


def test_a_drafter_with_other_heads_is_known_to_the_scheduler(make: Make, tmp_path: Path) -> None:
    """vLLM tells its scheduler only the form of the group's first layer.

    The drafter's rows differ in bytes, because vLLM 0.23.0 tells its workers no other difference.
    """
    small = LlamaShape(layers=1, kv_heads=2, head_dim=128)
    config = make("draft_model", make_model(tmp_path, small))
    other = replace(FULL, num_kv_heads=2, head_size=128, head_size_v=128)
    specs = dict.fromkeys(OWN, FULL) | {LAYERS["draft_model"]: other}
    found = [drafts_of(read(config, cache)) for cache in cached(config, **specs)]
    assert found[0] == found[1]
    assert found[0][0].name.startswith("draft-full-2x1024-")
    wrong = specs | {LAYERS["draft_model"]: replace(other, num_kv_heads=4)}
    with pytest.raises(ConfigError, match="in another form than its configuration says"):
        read(config, cached(config, **wrong)[0])


def test_a_group_of_a_drafters_layers_alone_is_stored(make: Make) -> None:
    facts = read(make("eagle"), by_hand((OWN, WINDOW), ([LAYERS["eagle"]], FULL)))
    [drafts] = drafts_of(facts)
    assert drafts.window.is_full
    assert [(group.shared, group.lookahead) for group in facts.shape.groups] == [
        (True, 0),
        (True, 1),
    ]
    assert not facts.reference_group.is_draft


def test_drafters_differ_by_method_weights_configuration_and_form(
    make: Make, tmp_path: Path
) -> None:
    def drafter(method: str, path: Path | None = None, spec: FullAttentionSpec = FULL) -> str:
        config = make(method, path)
        names = dict.fromkeys([*OWN, LAYERS[method]], spec)
        return read(config, cached(config, **names)[1]).drafter

    def configured(**values: Any) -> Path:
        path = make_eagle(tmp_path / "-".join(values), SHAPE)
        config = path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | values))
        return path

    others = [
        drafter("eagle", make_eagle(tmp_path, SHAPE, version=1)),
        drafter("draft_model"),
        drafter("eagle", configured(rms_norm_eps=0.125)),
        drafter("eagle", configured(eagle_aux_hidden_state_layer_ids=[0, 1])),
        drafter("eagle", spec=replace(FULL, dtype=torch.float16)),
    ]
    assert len({drafter("eagle"), *others}) == 1 + len(others)
    assert drafter("eagle", make_eagle(tmp_path / "elsewhere", SHAPE)) == drafter("eagle")


# Modules, indexers, pipeline stages


def with_modules(config: VllmConfig, modules: int, tokens: int, runner: int) -> None:
    """Give the MTP drafter so many modules; vLLM runs them for `tokens` drafts by this runner."""
    speculation = config.speculative_config
    assert speculation is not None
    speculation.num_speculative_tokens = tokens
    speculation.draft_model_config.hf_config.num_nextn_predict_layers = modules
    config.runner = runner


@pytest.fixture
def by_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `with_modules` choose vLLM's runner; the second one needs Triton."""
    is_second = property(lambda config: getattr(config, "runner", 1) == 2)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", is_second)


chains_modules = pytest.mark.skipif(
    not hasattr(SpeculativeConfig, "use_multi_module_mtp"),
    reason="this release runs the first module alone",
)


@pytest.mark.usefixtures("by_runner")
@pytest.mark.parametrize(
    ("tokens", "runner", "used"),
    [
        (3, 1, 1),
        (1, 2, 1),
        pytest.param(2, 2, 2, marks=chains_modules),
        pytest.param(3, 2, 3, marks=chains_modules),
    ],
)
def test_each_module_that_vllm_runs_over_a_prompt_reads_one_token_more(
    make: Make, tokens: int, runner: int, used: int
) -> None:
    """The first runner runs the first module for every draft, the second one a module for each."""
    config = make("mtp")
    with_modules(config, 3, tokens, runner)
    modules = [name_of(1 + i) for i in range(3)]
    for cache in cached(config, **dict.fromkeys([*OWN[:1], *modules], FULL)):
        facts = read(config, cache)
        ends = ["", "-ahead2", "-ahead3"][:used]
        assert [(each.name, each.lookahead, each.layers) for each in drafts_of(facts)] == [
            (f"draft-full-4x256{end}-{facts.drafter}", 1 + i, ((1 + i,),))
            for i, end in enumerate(ends)
        ]
        assert [group.lookahead for group in facts.shape.groups] == [used]
        assert facts.shape.lookahead == used


def latents(config: VllmConfig, names: Sequence[str]) -> dict[str, Any]:
    """Return vLLM's specs of sparse attention: an indexer's keys beside the latents of a layer."""
    from vllm.v1.kv_cache_interface import SparseCacheRole

    config.model_config.hf_text_config.update(
        {"index_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    )
    config.cache_config.kv_cache_layout = "BLHNC"
    base: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1}
    keys = MLAAttentionSpec(
        **base, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
    )
    latent = MLAAttentionSpec(
        **base,
        head_size=576,
        dtype=torch.float32,
        cache_dtype_str="auto",
        cache_role=SparseCacheRole.SPARSE,
    )
    return {name: keys if ".indexer." in name else latent for name in names}


@pytest.mark.skipif(
    "cache_role" not in {field.name for field in fields(MLAAttentionSpec)},
    reason="this release does not say which layers are an indexer's",
)
def test_the_keys_of_a_drafters_indexer_are_a_layer_group_beside_its_latents(make: Make) -> None:
    """As in DeepSeek V3.2 and GLM 5: the MTP layer has an indexer, as the model's layers do."""
    config = make("mtp")
    names = [f"model.layers.{i}.self_attn.{e}" for i in (0, 1) for e in ("indexer.k_cache", "attn")]
    found = []
    for cache in cached(config, **latents(config, names)):
        facts = read(config, cache)
        assert [(each.name, each.row_bytes, each.lookahead) for each in drafts_of(facts)] == [
            (f"draft-full-1x2304-{facts.drafter}", 2304, 1),
            (f"draft-indexer-1x132-{facts.drafter}", 132, 1),
        ]
        own = [each for each in facts.layer_groups if not each.is_draft]
        assert [each.name for each in own] == ["full-1x2304", "indexer-1x132"]
        found.append(facts)
    assert found[0] == found[1]


def stages(
    config: VllmConfig,
    *names: Sequence[str],
    spec: FullAttentionSpec = FULL,
    of: FullAttentionSpec = FULL,
) -> list[tuple[VllmConfig, KVCacheConfig]]:
    """Return vLLM's configurations of the scheduler part, and of a worker of each pipeline stage.

    `spec`: of the last stage's last layer; `of`: of all others.
    """
    specs = [dict.fromkeys(stage, of) for stage in names]
    specs[-1][names[-1][-1]] = spec
    config.parallel_config.pipeline_parallel_size = len(names)
    caches = get_kv_cache_configs(config, specs, [64 << 20] * len(names))
    told = [(config, generate_scheduler_kv_cache_config(caches))]
    for rank, cache in enumerate(caches):
        mine = copy.copy(config)
        mine.parallel_config = copy.copy(config.parallel_config)
        mine.parallel_config.rank = rank
        told.append((mine, cache))
    return told


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_drafter_on_the_last_pipeline_stage_is_the_same_to_all_parts(
    make: Make, method: str
) -> None:
    """Only the last stage has its pages, and engines of one stage share its cells."""
    config, drafts = make(method, layers=2), name_of(2)
    whole = by_hand(([*OWN, drafts], FULL))
    single = drafts_of(read(config, whole))
    told = stages(config, OWN[:1], [OWN[1], drafts])
    found = [read(each, cache) for each, cache in told]
    for facts in found:
        assert facts.shape == found[0].shape
        [drafter] = drafts_of(facts)
        assert drafter.topology.stages == ((0, 0), (0, 1))
        assert replace(drafter, topology=single[0].topology) == single[0]
        assert [group.lookahead for group in facts.shape.groups] == [single[0].lookahead]
    held = [[name for each in facts.layer_groups for name, _ in each.layers] for facts in found]
    assert held == [OWN[:1], OWN[:1], [OWN[1], drafts]]
    for facts, pages in pairwise(found):
        assert facts.drafter == pages.drafter


def read_stage(config: VllmConfig, cache: KVCacheConfig) -> engine_config.EngineFacts:
    """Return what a worker of this stage reads."""
    options = read_config({}, env={})
    return engine_config.read_engine(config, cache, options, with_namespace=False)


@pytest.mark.parametrize("has_layers", [True, False], ids=["other layers", "no layers"])
def test_a_last_stage_with_another_drafter_than_configured_leaves_it_out(
    make: Make, has_layers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Only that stage can tell, and its first rank does. With `drafts: require`, the engine's start
    is refused."""
    config = make("eagle3")
    config.parallel_config.tensor_parallel_size = 2
    half = replace(FULL, num_kv_heads=FULL.num_kv_heads // 2)
    names = [OWN[1], name_of(2)] if has_layers else [OWN[1]]
    *_, (last, cache) = stages(
        config, OWN[:1], names, spec=replace(half, num_kv_heads=1) if has_layers else half, of=half
    )
    told = []
    for last.parallel_config.rank in (2, 3):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            facts = read_stage(last, cache)
        assert not drafts_of(facts)
        told.append("KV of this drafter is not stored" in caplog.text)
        with pytest.raises(ConfigError, match="set drafts to prefer"):
            read(last, cache, drafts="require")
    assert told == [True, False]


def test_a_last_stage_leaves_out_eagles_layers_that_have_other_stages_numbers(make: Make) -> None:
    """vLLM numbers them on from that stage's number of layers: here 2 of 5."""
    names = [name_of(layer) for layer in range(5)]
    config = make("eagle")
    object.__setattr__(config.model_config.model_arch_config, "total_num_hidden_layers", 5)
    told = stages(config, names[:3], [*names[3:], names[2]])
    *_, (last, cache) = told
    facts = read_stage(last, cache)
    assert [name for each in facts.layer_groups for name, _ in each.layers] == names[3:]
    assert facts.shape.layer_groups == read(*told[0]).shape.layer_groups


def test_a_drafter_that_attends_to_the_models_kv_is_no_drafter_here(make: Make) -> None:
    """Gemma 4's assistant: nothing is missing, also with `drafts: require` and a pipeline."""
    config = make("mtp", layers=2)
    assert config.speculative_config is not None
    config.speculative_config.draft_model_config.hf_config.model_type = "gemma4_mtp"
    for each, cache in stages(config, OWN[:1], OWN[1:]):
        assert not drafts_of(read(each, cache, drafts="require"))


def test_a_drafter_of_a_model_with_media_is_not_stored_with_a_pipeline(make: Make) -> None:
    """vLLM's last stage has no embeddings of media, so the rows are not those of one stage."""
    config = make("eagle3")
    config.model_config.multimodal_config = MultiModalConfig()
    [_, (first, cache), (last, end)] = stages(config, OWN[:1], [OWN[1], name_of(2)])
    for each in ((first, cache), (last, end)):
        with pytest.raises(drafters.UnsharedDrafterError, match="no embeddings of media"):
            drafters.draft_layer_groups(*each, read_config({}, env={}))


GLM = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "qk_nope_head_dim": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "num_nextn_predict_layers": 1,
}
HY = {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "num_nextn_predict_layers": 1,
}


@pytest.mark.parametrize(("values", "counted"), [(GLM, 0), (HY, 2)], ids=["glm4_moe_lite", "hy_v3"])
def test_mtp_on_the_last_pipeline_stage_has_as_many_layers_as_modules(
    tmp_path: Path, values: dict[str, Any], counted: int
) -> None:
    """vLLM counts other layers of the drafter in these families."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = EngineArgs(
        model=str(tmp_path),
        block_size=16,
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ).create_engine_config()
    assert config.speculative_config is not None
    layers = config.speculative_config.draft_model_config.get_total_num_hidden_layers()
    assert layers == counted
    is_latent = values is GLM
    config.cache_config.kv_cache_layout = "BLHNC" if is_latent else "LBHNC"
    spec = (
        MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
        if is_latent
        else FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=16, dtype=torch.float32)
    )
    told = stages(config, OWN[:1], [OWN[1], name_of(2)], spec=spec, of=spec)
    found = [read(each, cache) for each, cache in told]
    for facts in found:
        assert [each.layers for each in drafts_of(facts)] == [((2,),)]
        assert facts.shape == found[0].shape


def test_a_drafter_beside_latents_is_named_in_place_of_the_model(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    config = make("eagle3")
    config.cache_config.kv_cache_layout = "BLHNC"
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    _, cache = cached(config, **dict.fromkeys(OWN, latent), **{name_of(2): FULL})
    with caplog.at_level(logging.WARNING):
        assert not drafts_of(read(config, cache))
    assert "another form than the model's latents" in caplog.text


def _staged(config: VllmConfig) -> None:
    config.parallel_config.pipeline_parallel_size = 2


def _draft_model(config: VllmConfig) -> None:
    assert config.speculative_config is not None
    config.speculative_config.method = "draft_model"
    _staged(config)


def _context(config: VllmConfig) -> None:
    config.parallel_config.prefill_context_parallel_size = 2


def _drafting(config: VllmConfig) -> None:
    assert config.speculative_config is not None
    config.speculative_config.parallel_drafting = True


def _nothing(config: VllmConfig) -> None:
    pass


def _method(config: VllmConfig) -> None:
    assert config.speculative_config is not None
    config.speculative_config.method = "dflash"


def _modules(config: VllmConfig) -> None:
    assert config.speculative_config is not None
    config.speculative_config.method = "mtp"
    with_modules(config, 2, 4, runner=2)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (_method, {}, "not known of 'dflash'"),
        pytest.param(_modules, {}, "4 times over a prompt", marks=chains_modules),
        (_drafting, {}, "parallel_drafting"),
        (_staged, {}, "numbers of the model's own"),
        (_draft_model, {}, "cuts its layers over the stages"),
        (_context, {}, "context parallelism"),
        pytest.param(
            _nothing,
            {"layerwise": True},
            "layerwise",
            marks=pytest.mark.skipif(
                not compat.has_loads_within_steps(), reason="loads layer by layer are refused here"
            ),
        ),
    ],
    ids=[
        "method",
        "modules",
        "drafting",
        "pipeline",
        "draft model",
        "context",
        "layerwise",
    ],
)
@pytest.mark.usefixtures("by_runner")
def test_a_drafter_that_is_not_stored_is_said_at_start(
    make: Make,
    change: Callable[[VllmConfig], None],
    options: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With `drafts: require`, the engine's start is refused."""
    config = make("eagle")
    _, cache = cached(config, **dict.fromkeys([*OWN, LAYERS["eagle"]], FULL))
    change(config)
    with caplog.at_level(logging.WARNING):
        facts = read(config, cache, **options)
    assert not drafts_of(facts)
    assert facts.drafter == ""
    assert reason in caplog.text
    with pytest.raises(ConfigError, match="set drafts to prefer"):
        read(config, cache, drafts="require", **options)
