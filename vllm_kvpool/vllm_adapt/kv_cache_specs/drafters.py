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
    by_form,
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
_SPECS = (FullAttentionSpec, SlidingWindowSpec)
# Those of them that are not stored with pipeline parallelism -> what vLLM does there.
_UNSTAGED: Mapping[str, str] = {
    "draft_model": "vLLM cuts its layers over the stages, and cannot run it",
    "eagle": "vLLM gives its layers the numbers of the model's own",
}
# Names under which configurations have the number of modules that draft one token each.
_NUM_MODULES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict")

_OTHER_LATENTS = "it keeps KV of another form than the model's latents"


class UnsharedDrafterError(ConfigError):
    """The layers of this drafter cannot be stored."""


class OtherDrafterError(UnsharedDrafterError):
    """The last pipeline stage has other layers than all parts derive from the configuration."""


def draft_layer_groups(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, config: KVPoolConfig
) -> tuple[RankLayerGroup, ...]:
    """Return the layer groups of the drafter's layers; empty without a drafter that has any.

    Raises UnsharedDrafterError, with the reason, where its layers cannot be stored.
    """
    pages, total = compat.forms_of_layers(kv_cache_config), num_own_layers(vllm_config)
    named = [
        [name for name in group.layer_names if name in pages and not is_own_layer(name, total)]
        for group in kv_cache_config.kv_cache_groups
    ]
    is_staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    drafts = vllm_config.speculative_config
    has_layers = any(named) or (
        is_staged
        and drafts is not None
        and (drafts.use_eagle() or drafts.uses_draft_model())
        and not drafts.use_gemma4_mtp()  # attends to the model's own KV
    )
    if config.drafts is Drafts.OFF or not has_layers:
        return ()
    _check_engine(vllm_config, config)
    found = _of_last_stage if is_staged else _of_layers
    return found(vllm_config, kv_cache_config, named)


def _of_layers(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, named: Sequence[Sequence[str]]
) -> tuple[RankLayerGroup, ...]:
    """Return the layer groups of the layers `named` in each KV cache group."""
    lookaheads = _lookaheads(vllm_config, [place_of(each) for names in named for each in names])
    used = [[each for each in names if place_of(each) in lookaheads] for names in named]
    forms = [
        (i, spec, some)
        for i, names in enumerate(used)
        if names
        for spec, some in _specs_of(vllm_config, kv_cache_config, i, names)
    ]
    return _grouped(vllm_config, lookaheads, forms)


def _of_last_stage(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, named: Sequence[Sequence[str]]
) -> tuple[RankLayerGroup, ...]:
    """Return the layer groups of a drafter whose layers the last pipeline stage alone has.

    The scheduler part sees the first stage. All parts derive the layers from the drafter's
    configuration, and the last stage compares them with its own.
    """
    parallel = vllm_config.parallel_config
    derived = _derived_groups(vllm_config, kv_cache_config)
    here: list[tuple[tuple[str, int], ...]] = [()] * len(derived)
    stage = parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size
    if stage == parallel.pipeline_parallel_size - 1:
        try:
            own = _of_layers(vllm_config, kv_cache_config, named)
        except ConfigError as error:
            raise OtherDrafterError(str(error)) from error
        if [_told_by(each) for each in own] != [_told_by(each) for each in derived]:
            raise OtherDrafterError(
                "the last pipeline stage has other layers of it than its configuration says"
            )
        here = [each.layers for each in own]
    return tuple(
        replace(each, layers=layers, last_stage=tuple(place_of(name) for name, _ in each.layers))
        for each, layers in zip(derived, here, strict=True)
    )


def _derived_groups(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig
) -> tuple[RankLayerGroup, ...]:
    """Return the drafter's layer groups as its configuration and the model's first layer say.

    Raises UnsharedDrafterError for drafters and models whose layers cannot be derived.
    """
    speculation = vllm_config.speculative_config
    assert speculation is not None
    if speculation.method in _UNSTAGED:
        raise UnsharedDrafterError(f"with pipeline parallelism {_UNSTAGED[speculation.method]}")
    if vllm_config.model_config.multimodal_config is not None:
        raise UnsharedDrafterError(
            "with pipeline parallelism vLLM gives it no embeddings of media, so its rows are others"
        )
    if len(kv_cache_config.kv_cache_groups) > 1:
        raise UnsharedDrafterError(
            "with pipeline parallelism the scheduler does not see in which of several KV cache "
            "groups its layers are"
        )
    told: Any = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    is_uniform = isinstance(told, UniformTypeKVCacheSpecs)
    first = next(iter(told.kv_cache_specs.values())) if is_uniform else told
    draft = speculation.draft_model_config
    is_mtp = speculation.method == "mtp"
    spec = first if is_mtp and compat.is_latent(first) else _derived(vllm_config, first)
    # Of some MTP families vLLM counts the model's layers here, or none.
    num_layers = _num_modules(draft) if is_mtp else int(draft.get_total_num_hidden_layers())
    start = num_own_layers(vllm_config)
    lookaheads = _lookaheads(vllm_config, [(start + i,) for i in range(num_layers)])
    names = [f"layers.{number}" for (number,) in lookaheads]
    return _grouped(vllm_config, lookaheads, [(0, spec, names)])


def _told_by(layer_group: RankLayerGroup) -> tuple[object, ...]:
    places = [place_of(name) for name, _ in layer_group.layers]
    return layer_group.name, form_of(layer_group.spec), layer_group.groups, places


def _grouped(
    vllm_config: "VllmConfig",
    lookaheads: Mapping[tuple[int, ...], int],
    forms: Sequence[tuple[int, Any, Sequence[str]]],
) -> tuple[RankLayerGroup, ...]:
    """Return layer groups by name. `forms`: (KV cache group, spec, names of layers)."""
    found: dict[str, RankLayerGroup] = {}
    least = min(lookaheads.values())
    for i, spec, names in forms:
        heads = _num_heads(vllm_config, spec)
        for each in names:
            lookahead = lookaheads[place_of(each)]
            form = group_name(spec, window_of(spec), heads)
            # Modules behind the first one have layer groups of their own.
            name = draft_group(form if lookahead == least else f"{form}-ahead{lookahead}")
            new = RankLayerGroup(name, spec, window_of(spec), heads)
            known = found.get(name, replace(new, is_draft=True, lookahead=lookahead))
            if form_of(known.spec) != form_of(spec):
                raise UnsharedDrafterError("its layers have rows of equal size and different forms")
            found[name] = replace(
                known,
                groups=tuple(dict.fromkeys((*known.groups, i))),
                layers=tuple(
                    sorted((*known.layers, (each, i)), key=lambda layer: place_of(layer[0]))
                ),
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
    if deepseek_v4.is_model(vllm_config):
        raise UnsharedDrafterError("its latents are compressed")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise UnsharedDrafterError("context parallelism deals its tokens out")
    if compat.device_type() == "npu":
        raise UnsharedDrafterError("it has not been tried on Ascend NPUs")
    if config.layerwise:
        raise UnsharedDrafterError("layerwise loads layers of one form alone")


def _lookaheads(
    vllm_config: "VllmConfig", places: Sequence[tuple[int, ...]]
) -> Mapping[tuple[int, ...], int]:
    """Return the look-ahead of the layers that compute rows of a prompt, by their places.

    A module behind another one reads one token more. Modules that vLLM does not run over a prompt
    are left out.
    """
    speculation = vllm_config.speculative_config
    assert speculation is not None
    method = str(speculation.method)
    ahead, layers = LOOKAHEADS[method], sorted(set(places))
    if not layers:
        raise UnsharedDrafterError("no layers of it are known here")
    modules = _num_modules(speculation.draft_model_config) if method == "mtp" else 1
    if modules == 1:
        return dict.fromkeys(layers, ahead)
    passes = compat.passes_of_modules(vllm_config)
    if passes > modules or len(layers) not in (passes, modules):
        raise UnsharedDrafterError(
            f"vLLM runs modules of it {passes} times over a prompt, and it has {modules} modules "
            f"in {len(layers)} layers"
        )
    return {place: ahead + i for i, place in enumerate(layers[:passes])}


def _num_modules(draft: Any) -> int:
    named = (getattr(draft.hf_config, name, None) for name in _NUM_MODULES)
    return max((each for each in named if isinstance(each, int)), default=1)


def _specs_of(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, index: int, names: Sequence[str]
) -> list[tuple[Any, Sequence[str]]]:
    """Return a drafter's layers by spec, equal on the scheduler part and the workers'.

    vLLM tells its scheduler the spec of the group's first layer alone. Latents, and an indexer's
    keys beside them, have the forms of the model's own.
    """
    group = kv_cache_config.kv_cache_groups[index]
    pages = compat.forms_of_layers(kv_cache_config)
    told: Any = group.kv_cache_spec
    each = told.kv_cache_specs if isinstance(told, UniformTypeKVCacheSpecs) else None
    first = told if each is None else next(iter(each.values()))
    specs: list[tuple[Any, Sequence[str]]]
    if compat.is_latent(first):
        stored = [name for name in group.layer_names if name in pages]
        try:
            forms = by_form(vllm_config, kv_cache_config, index, stored)
        except ConfigError as error:
            raise UnsharedDrafterError(_OTHER_LATENTS) from error
        specs = [(spec, [name for name in some if name in names]) for spec, some in forms]
        specs = [(spec, some) for spec, some in specs if some]
    else:
        specs = [(_spec_of(vllm_config, pages, group.layer_names[0], first, names), names)]
    for spec, some in specs:
        if compat.tokens_per_state(spec) != 1:
            raise UnsharedDrafterError("its layers keep one key for several tokens")
        try:
            page_specs.check_spec(spec)
        except ConfigError as error:
            raise UnsharedDrafterError(str(error)) from error
        if each is not None and any(form_of(each[name]) != form_of(spec) for name in some):
            raise ConfigError(
                f"layers of the drafter ({some[0]}) keep KV in another form than its "
                "configuration says; set drafts to off"
            )
    return specs


def _spec_of(
    vllm_config: "VllmConfig", pages: Mapping[str, int], of: str, first: Any, names: Sequence[str]
) -> Any:
    """Return the spec of layers beside layer `of`, whose spec is `first`."""
    if len({pages[name] for name in names}) > 1 or not isinstance(first, _SPECS):
        raise UnsharedDrafterError("its layers keep KV of several forms, or recurrent states")
    return first if pages[names[0]] == pages[of] else _derived(vllm_config, first)


def _derived(vllm_config: "VllmConfig", spec: Any) -> Any:
    """Return the spec of a drafter's layers.

    `spec` is that of the model's layers in the same group.
    """
    draft = vllm_config.speculative_config.draft_model_config
    if compat.is_latent(spec):
        raise UnsharedDrafterError(_OTHER_LATENTS)
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
