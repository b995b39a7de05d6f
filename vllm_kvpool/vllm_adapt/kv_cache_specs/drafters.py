"""Layer groups of a drafter: EAGLE, MTP, or a draft model beside the model itself.

Its layers are told by name (`layer_groups.py`) and often lie in the same KV cache groups as the
model's own. They are layer groups of their own, whose cells no hit needs. EAGLE and MTP compute row
i from the model's hidden state there and token i+1 (`lookahead`); a draft model computes it from
the tokens up to i, as any model does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_kvpool.config import Drafts, KVPoolConfig
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import draft_group
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.kv_cache_specs import deepseek_v4, page_specs
from vllm_kvpool.vllm_adapt.kv_cache_specs.layer_groups import (
    RankLayerGroup,
    form_of,
    group_name,
    is_own_layer,
    num_own_layers,
    place_of,
    window_of,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM's methods whose layers are stored -> later tokens that a row depends on.
LOOKAHEADS: Mapping[str, int] = {"draft_model": 0, "eagle": 1, "eagle3": 1, "mtp": 1}
_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
# Names under which configurations have the number of modules that draft one token each.
_NUM_MODULES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict")


class UnsharedDrafterError(ConfigError):
    """The layers of this drafter cannot be stored."""


def draft_layer_groups(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, config: KVPoolConfig
) -> tuple[RankLayerGroup, ...]:
    """Return the layer groups of the drafter's layers; empty without a drafter that has any.

    Raises UnsharedDrafterError, with the reason, where its layers cannot be stored.
    """
    pages = compat.forms_of_layers(kv_cache_config)
    total = num_own_layers(vllm_config)
    found: dict[str, RankLayerGroup] = {}
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        names = [
            name for name in group.layer_names if name in pages and not is_own_layer(name, total)
        ]
        if not names or config.drafts is Drafts.OFF:
            continue
        _check_engine(vllm_config, config)
        spec = _spec_of(vllm_config, kv_cache_config, i, names)
        heads = _num_heads(vllm_config, spec)
        name = draft_group(group_name(spec, window_of(spec), heads))
        known = found.get(name, RankLayerGroup(name, spec, window_of(spec), heads))
        if form_of(known.spec) != form_of(spec):
            raise UnsharedDrafterError("its layers have rows of equal size and different forms")
        layers = sorted(
            (*known.layers, *((each, i) for each in names)), key=lambda each: place_of(each[0])
        )
        found[name] = replace(
            known,
            groups=(*known.groups, i),
            layers=tuple(layers),
            is_draft=True,
            lookahead=LOOKAHEADS[vllm_config.speculative_config.method],
        )
    return tuple(found[name] for name in sorted(found))


def max_drafted_tokens(vllm_config: "VllmConfig") -> int:
    """Return the most tokens of a request with which the drafter still computes a step.

    In a step in which any request comes to have more, vLLM's first runner drafts for none.
    """
    speculation = vllm_config.speculative_config
    assert speculation is not None
    draft = speculation.draft_model_config
    limit = draft.max_model_len or vllm_config.model_config.max_model_len
    return int(limit) - int(speculation.num_speculative_tokens)


def _check_engine(vllm_config: "VllmConfig", config: KVPoolConfig) -> None:
    """Raise UnsharedDrafterError, with the reason, for unknown methods and options."""
    speculation, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    assert speculation is not None
    method = str(speculation.method)
    if method not in LOOKAHEADS:
        raise UnsharedDrafterError(f"which tokens its rows depend on is not known of {method!r}")
    if getattr(speculation, "parallel_drafting", False):
        raise UnsharedDrafterError("it drafts in parallel (parallel_drafting)")
    modules = _num_modules(speculation.draft_model_config) if method == "mtp" else 1
    if modules > 1:
        raise UnsharedDrafterError(
            f"it has {modules} modules, each of which depends on one token more"
        )
    if deepseek_v4.is_model(vllm_config):
        raise UnsharedDrafterError("its latents are compressed")
    if parallel.pipeline_parallel_size > 1:
        raise UnsharedDrafterError(
            "with pipeline parallelism the scheduler does not see the last stage's layers"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise UnsharedDrafterError("context parallelism deals its tokens out")
    if compat.device_type() == "npu":
        raise UnsharedDrafterError("it has not been tried on Ascend NPUs")
    if config.layerwise:
        raise UnsharedDrafterError("layerwise loads layers of one form alone")


def _num_modules(draft: Any) -> int:
    named = (getattr(draft.hf_config, name, None) for name in _NUM_MODULES)
    return max((each for each in named if isinstance(each, int)), default=1)


def _spec_of(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, index: int, names: Sequence[str]
) -> Any:
    """Return the spec of a drafter's layers, equal on the scheduler part and the workers'.

    vLLM tells its scheduler the spec of the group's first layer alone.
    """
    group = kv_cache_config.kv_cache_groups[index]
    pages = compat.forms_of_layers(kv_cache_config)
    told: Any = group.kv_cache_spec
    each = told.kv_cache_specs if isinstance(told, UniformTypeKVCacheSpecs) else None
    first = told if each is None else next(iter(each.values()))
    if len({pages[name] for name in names}) > 1 or not isinstance(first, _SPECS):
        raise UnsharedDrafterError("its layers keep KV of several forms, or recurrent states")
    if compat.is_indexer(first) or compat.tokens_per_state(first) != 1:
        raise UnsharedDrafterError("its layers keep KV in a form that is not known here")
    spec = first
    if pages[names[0]] != pages[group.layer_names[0]]:
        spec = _derived(vllm_config, first)
    try:
        page_specs.check_spec(spec)
    except ConfigError as error:
        raise UnsharedDrafterError(str(error)) from error
    if each is not None and any(form_of(each[name]) != form_of(spec) for name in names):
        raise ConfigError(
            f"layers of the drafter ({names[0]}) keep KV in another form than its configuration "
            "says; set drafts to off"
        )
    return spec


def _derived(vllm_config: "VllmConfig", spec: Any) -> Any:
    """Return the spec of a drafter's layers.

    `spec` is that of the model's layers in the same group.
    """
    draft = vllm_config.speculative_config.draft_model_config
    if compat.is_latent(spec):
        raise UnsharedDrafterError("its latents have another form than the model's")
    head_size = int(draft.get_head_size())
    heads = int(draft.get_num_kv_heads(vllm_config.parallel_config))
    values = {"num_kv_heads": heads, "head_size": head_size}
    if hasattr(spec, "head_size_v"):
        values["head_size_v"] = head_size
    return replace(spec, **values)


def _num_heads(vllm_config: "VllmConfig", spec: Any) -> int:
    """Return the KV heads of the whole drafter."""
    if compat.is_latent(spec):
        return 1
    draft = vllm_config.speculative_config.draft_model_config
    total = int(draft.get_total_num_kv_heads())
    tp_size = int(vllm_config.parallel_config.tensor_parallel_size)
    if int(spec.num_kv_heads) != max(1, total // tp_size):
        raise UnsharedDrafterError(
            f"a rank holds {spec.num_kv_heads} of its {total} KV heads, with "
            f"tensor_parallel_size {tp_size}"
        )
    return total
