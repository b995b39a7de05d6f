"""Layer groups of drafters: how they are told, what is left out, and what tells drafters apart."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from tests.support.drafters import EvenShape, MimoShape, make_eagle, make_mimo, speculation
from tests.support.models import LlamaShape, make_model
from tests.vllm_adapt.kv_cache_specs.test_layer_groups import FULL, WINDOW, by_hand, name_of
from vllm_kvpool.config import read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout.topology import LayerGroup
from vllm_kvpool.vllm_adapt import compat, engine_config

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

    def build(method: str = "", drafter: Path | None = None, **more: Any) -> VllmConfig:
        model = make_mimo(tmp_path, MimoShape()) if method == "mtp" else make_model(tmp_path, SHAPE)
        drafts = {}
        if method:
            named = drafter or (make_eagle(tmp_path, SHAPE) if method == "eagle" else model)
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


def _parallel(config: VllmConfig) -> None:
    config.parallel_config.pipeline_parallel_size = 2


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
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = 3


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (_method, {}, "not known of 'dflash'"),
        (_modules, {}, "3 modules"),
        (_drafting, {}, "parallel_drafting"),
        (_parallel, {}, "pipeline parallelism"),
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
    ids=["method", "modules", "drafting", "pipeline", "context", "layerwise"],
)
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
