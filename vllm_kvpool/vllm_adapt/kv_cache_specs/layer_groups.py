"""Layer groups of a model, from vLLM's KV cache groups; which of them can be shared.

The same model has other KV cache groups in another release or pipeline, and one may hold layers of
several forms. A layer group is the same in all engines: the layers that look equally far back and
have rows of one form, or recurrent states of one form. Keys count layers within their group.
"""

import functools
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)

from vllm_kvpool.config import Drafts, KVPoolConfig
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.weights import tensor_shapes
from vllm_kvpool.layout.states import StateForm
from vllm_kvpool.layout.topology import (
    FULL_ATTENTION,
    AttentionWindow,
    Context,
    KVCacheGroup,
    LayerGroup,
    Topology,
    default_layer_span,
)
from vllm_kvpool.vllm_adapt import ascend, compat
from vllm_kvpool.vllm_adapt.kv_cache_specs import deepseek_v4, page_specs, state_specs
from vllm_kvpool.vllm_adapt.weight_sources import local_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SHAREABLE_SPECS = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
)
# Hugging Face's `layer_types` -> how names of groups begin.
_LAYER_TYPES = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "local",
    "attention": "full",
    "conv": "state",
    "linear_attention": "state",
    "mamba": "state",
}
# vLLM's `kv_cache_dtype` of latents -> bytes of a packed row.
_LATENTS_OF_SPARSE_ATTENTION = {
    "auto": None,
    "fp8": None,
    "fp8_ds_mla": 656,
    "nvfp4_ds_mla": 352,
}
# Methods of speculation without a draft model.
_DRAFTS_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
# Parts of the names of a draft model's layers where these are counted from 0, as in
# `mtp.layers.0.self_attn.attn` (Qwen 3.5, Nemotron-H, MiMo V2), not on from the model's layers.
_NAMES_OF_DRAFTS = frozenset(("draft_model", "mtp"))
# Ends of the names under which configurations have numbers of KV heads, of all or some layers.
_NAMES_OF_HEADS = ("key_value_heads", "kv_heads", "attention_groups")
_NAMES_OF_GROUPS = ("heads_in_group",)  # and of how many query heads share one


@dataclass(frozen=True, slots=True)
class RankLayerGroup:
    """A rank's part of a layer group. `spec`: vLLM's, of one rank; `groups`: KV cache groups.

    `num_heads`: of the whole model, or the units of a state. `layers`: this rank's names and KV
    cache groups, in model order. `state`: the form of layers with a recurrent state; None for
    attention. `is_draft`, `lookahead`: see `LayerGroup`. `last_stage`: the places of a drafter's
    layers, all of which lie in the last pipeline stage; empty in an engine of one stage.
    """

    name: str
    spec: Any
    window: AttentionWindow
    num_heads: int
    groups: tuple[int, ...] = ()
    layers: tuple[tuple[str, int], ...] = ()
    state: StateForm | None = None
    is_draft: bool = False
    lookahead: int = 0
    last_stage: tuple[tuple[int, ...], ...] = ()

    @property
    def is_latent(self) -> bool:
        """True if a row is an MLA latent, which all heads share."""
        return compat.is_latent(self.spec)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token and head, or of a state's unit, in one layer."""
        return self.state.row_bytes if self.state is not None else compat.row_bytes(self.spec)

    @property
    def tokens_per_row(self) -> int:
        """Tokens that share one row; one for states."""
        return 1 if self.state is not None else compat.tokens_per_state(self.spec)

    @property
    def key_bytes(self) -> int:
        """Bytes of K in a row; all of it where K and V cannot be told apart."""
        if self.is_latent or compat.has_own_content(self.spec):
            return self.row_bytes
        item = torch.empty((), dtype=self.spec.dtype).element_size()
        return int(self.spec.head_size) * item


def rank_layer_groups(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig
) -> tuple[RankLayerGroup, ...]:
    """Return the layer groups of this model; ConfigError for what cannot be shared.

    Left out are layers of a drafter (`drafters.py`), inputs of rows that are not complete, and
    layers that attend to another layer's KV: these have no pages of their own.
    """
    total = num_own_layers(vllm_config)
    _check_skipped_layers(vllm_config)
    pages = compat.forms_of_layers(kv_cache_config)
    here = _numbers_here(vllm_config, total)
    found: dict[tuple[object, ...], RankLayerGroup] = {}
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        is_drafts = not any(is_own_layer(name, total) for name in group.layer_names)
        if (group.layer_names and is_drafts) or compat.is_ring(group.kv_cache_spec):
            continue
        own_names = [name for name in group.layer_names if is_own_layer(name, total)]
        named = [name for name in own_names if name in pages and place_of(name)[0] in here]
        for spec, names in by_form(vllm_config, kv_cache_config, i, named):
            for new, some in _new_groups(vllm_config, spec, names):
                own = ((name, i) for name in some)
                form = (*form_of(spec), new.num_heads)
                known = found.get(form, new)
                groups = tuple(dict.fromkeys((*known.groups, i)))
                layers = sorted((*known.layers, *own), key=lambda layer: place_of(layer[0]))
                found[form] = replace(known, spec=spec, groups=groups, layers=tuple(layers))
    if not found:
        raise ConfigError("this model has no attention layers whose KV could be shared")
    _check_rows(found.values())
    if len(found) == 1:
        [layer_group] = found.values()
        if layer_group.state is not None:  # named in keys, even if alone
            return (layer_group,)
        return (replace(layer_group, name=""),)
    return tuple(
        sorted(_told_apart(list(found.values())), key=lambda layer_group: layer_group.name)
    )


def _check_rows(layer_groups: Collection[RankLayerGroup]) -> None:
    """Raise ConfigError where a hit may end within a row of several tokens.

    What the hit's last tokens add to the row is not stored. With recurrent states hits end at
    boundaries, and DeepSeek V4 keeps what its tokens add.
    """
    tokens = max(layer_group.tokens_per_row for layer_group in layer_groups)
    is_stored = any(
        layer_group.state or deepseek_v4.keeps_ends(layer_group.spec)
        for layer_group in layer_groups
    )
    if tokens > 1 and not is_stored:
        raise ConfigError(
            f"this model keeps one KV state for {tokens} tokens, within which a hit may end; run "
            "it without kvpool"
        )


def _new_groups(
    vllm_config: "VllmConfig", spec: Any, names: Sequence[str]
) -> Iterator[tuple[RankLayerGroup, Sequence[str]]]:
    """Yield the groups of layers of one form on this rank, each with the names of its layers.

    The groups may differ in their numbers of heads.
    """
    if isinstance(spec, MambaSpec):
        form = state_specs.state_form(spec, vllm_config)
        name = f"state-{state_specs.kind_of(spec)}-{form.num_units}x{form.row_bytes}"
        yield RankLayerGroup(name, spec, FULL_ATTENTION, form.num_units, state=form), names
        return
    window = window_of(spec)
    by_heads: dict[int, list[str]] = {}
    for each in names:
        by_heads.setdefault(_num_heads(vllm_config, spec, each), []).append(each)
    for num_heads, some in by_heads.items():
        name = group_name(spec, window, num_heads)
        yield RankLayerGroup(name, spec, window, num_heads), some


def _told_apart(layer_groups: Sequence[RankLayerGroup]) -> Iterator[RankLayerGroup]:
    """Yield the groups with different names, also where rows of equal size have different forms."""
    names = Counter(layer_group.name for layer_group in layer_groups)
    for layer_group in layer_groups:
        spec = layer_group.spec
        if layer_group.state is not None:
            form = "-".join(map(str, spec.dtypes))
        else:
            form = f"{spec.head_size}x{spec.dtype}-{spec.kv_quant_mode.name}"
        form = form.replace("torch.", "")
        yield (
            layer_group
            if names[layer_group.name] == 1
            else replace(layer_group, name=f"{layer_group.name}-{form.lower()}")
        )


def form_of(spec: Any) -> tuple[object, ...]:
    """Return the common form of a group's layers."""
    if isinstance(spec, MambaSpec):
        return (type(spec), spec.mamba_type, spec.shapes, spec.dtypes, spec.tp_replicated)
    return (
        type(spec),
        window_of(spec),
        compat.row_bytes(spec),
        spec.num_kv_heads,
        (spec.head_size, compat.value_head_size(spec)),
        (spec.dtype, spec.kv_quant_mode),
        compat.has_own_content(spec),
        compat.is_indexer(spec),
        compat.tokens_per_state(spec),
    )


def by_form(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, index: int, names: list[str]
) -> list[tuple[Any, list[str]]]:
    """Return the layers `names` of a KV cache group, by spec; ConfigError if it is not known.

    A group may hold layers with different rows. vLLM gives its workers the spec of each layer, and
    its scheduler only the first one's: what follows from that must be equal to the workers'.
    """
    group = kv_cache_config.kv_cache_groups[index]
    pages = compat.forms_of_layers(kv_cache_config)
    told: Any = group.kv_cache_spec
    if deepseek_v4.is_model(vllm_config):
        return deepseek_v4.by_form(vllm_config, kv_cache_config, told, names)
    each = told.kv_cache_specs if isinstance(told, UniformTypeKVCacheSpecs) else None
    first = told if each is None else next(iter(each.values()), told)
    _check_spec(vllm_config, first)
    if isinstance(first, MambaSpec) and each is not None:
        if len({form_of(each[name]) for name in names}) > 1:
            raise ConfigError(
                f"layers of this model keep recurrent states of different forms in a group "
                f"({names[0]} and others), which cannot be shared yet; run this model without "
                "kvpool"
            )
        return [(first, names)]
    if each is None and len({pages[name] for name in names}) <= 1:
        return [(told, names)]
    page_bytes = compat.page_bytes_of_layers(kv_cache_config)
    specs = {
        name: _derived(vllm_config, first, group.layer_names[0], name, page_bytes[name])
        for name in names
    }
    if each is not None:
        is_known = all(_same_form(each[name], specs[name]) for name in names)
    else:  # as many forms as there are, and those of the same layers
        forms = {name: form_of(specs[name]) for name in names}
        pairs = {(pages[name], forms[name]) for name in names}
        is_known = len(pairs) == len(set(forms.values())) == len({pages[name] for name in names})
    if not is_known:
        raise ConfigError(
            f"layers of this model keep KV of different forms in a group ({names[0]} and others), "
            "and not by kv_cache_dtype_skip_layers or a sparse-attention indexer alone, which "
            "cannot be shared yet; run this model without kvpool"
        )
    found: dict[tuple[object, ...], tuple[Any, list[str]]] = {}
    for name, spec in specs.items():
        _check_spec(vllm_config, spec)
        found.setdefault(form_of(spec), (spec, []))[1].append(name)
    return list(found.values())


def _same_form(spec: Any, other: Any) -> bool:
    return isinstance(spec, AttentionSpec) and form_of(spec) == form_of(other)


def _derived(vllm_config: "VllmConfig", spec: Any, of: str, name: str, page_bytes: int) -> Any:
    """Return the spec of layer `name`, where `spec` is that of layer `of`, by vLLM's rules.

    Layers that `kv_cache_dtype_skip_layers` names keep KV in the model's type. Sparse attention has
    an indexer beside its latents.
    """
    if _is_indexer(name) != _is_indexer(of):
        return _beside_indexer(vllm_config, spec, page_bytes)
    cache = vllm_config.cache_config
    skipped = [str(place_of(each)[0]) in cache.kv_cache_dtype_skip_layers for each in (of, name)]
    if skipped[0] == skipped[1]:
        return spec
    kept = "auto" if skipped[1] else cache.cache_dtype
    dtype = kv_cache_dtype_str_to_dtype(kept, vllm_config.model_config)
    return replace(spec, dtype=dtype, kv_quant_mode=get_kv_quant_mode(kept))


def _is_indexer(name: str) -> bool:
    return ".indexer." in name


def _beside_indexer(vllm_config: "VllmConfig", spec: Any, page_bytes: int) -> Any:
    """Return the spec of an indexer's keys beside latents, or of latents beside an indexer's keys.

    Latents have one of a few forms, which attention backends choose: the longest one that fits the
    page.
    """
    if not hasattr(spec, "cache_role"):
        raise ConfigError(
            "this release of vLLM does not say which pages are a sparse-attention indexer's; use "
            "vLLM 0.32 to share this model"
        )
    text, roles = vllm_config.model_config.hf_text_config, type(spec.cache_role)
    if not compat.is_indexer(spec):
        groups = int(text.index_head_dim) // page_specs.INDEXER_GROUP
        return replace(
            spec,
            head_size=text.index_head_dim + groups * page_specs.INDEXER_SCALE_BYTES,
            dtype=torch.uint8,
            kv_quant_mode=get_kv_quant_mode("auto"),
            cache_dtype_str=None,
            state_content_bytes=None,
            cache_role=roles.INDEXER,
            tokens_per_state=int(getattr(text, "index_kpool", None) or 1),
        )
    latents = [
        replace(
            spec,
            head_size=int(text.kv_lora_rank) + int(text.qk_rope_head_dim),
            dtype=kv_cache_dtype_str_to_dtype(cache_dtype, vllm_config.model_config),
            kv_quant_mode=get_kv_quant_mode(cache_dtype),
            cache_dtype_str=cache_dtype,
            state_content_bytes=content,
            cache_role=roles.SPARSE,
            tokens_per_state=1,
        )
        for cache_dtype, content in _LATENTS_OF_SPARSE_ATTENTION.items()
    ]
    fitting = [each for each in latents if each.page_size_bytes <= page_bytes]
    if not fitting:
        raise ConfigError(
            f"latents of sparse attention have pages of {page_bytes} bytes here, whose form is not "
            "known; choose another --kv-cache-dtype"
        )
    return max(fitting, key=lambda each: int(each.page_size_bytes))


def _check_skipped_layers(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError with pipeline stages: the scheduler part knows the layers of one alone."""
    cache, stages = vllm_config.cache_config, vllm_config.parallel_config.pipeline_parallel_size
    named = [name for name in cache.kv_cache_dtype_skip_layers if name.isdecimal()]
    if stages > 1 and named and cache.cache_dtype != "auto":
        raise ConfigError(
            "kv_cache_dtype_skip_layers names layers, whose KV is shared without pipeline "
            "parallelism only; set pipeline_parallel_size to 1"
        )


def group_name(spec: Any, window: AttentionWindow, num_heads: int) -> str:
    """Return the name of a group, the same for the same layers in every engine."""
    if window.sliding:
        name = f"window{spec.sliding_window}"
    elif window.local:
        name = f"local{window.local}"
    else:
        name = "indexer" if compat.is_indexer(spec) else "full"
    if (tokens := compat.tokens_per_state(spec)) > 1:
        name += f"-of-{tokens}"
    return f"{name}-{num_heads}x{compat.row_bytes(spec)}"


def window_of(spec: Any) -> AttentionWindow:
    """Return the attention window of a spec of vLLM's."""
    if isinstance(spec, SlidingWindowSpec):
        # A drafting model may have the engine keep a few tokens more.
        return AttentionWindow(
            sliding=spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
        )
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return AttentionWindow(local=spec.attention_chunk_size)
    return FULL_ATTENTION


def _check_spec(vllm_config: "VllmConfig", spec: Any) -> None:
    """Refuse, by name, what cannot be cut by token and head, or by unit."""
    if isinstance(spec, MambaSpec):
        state_specs.check_engine(vllm_config)
        return
    page_specs.check_spec(spec)
    if type(spec) not in SHAREABLE_SPECS and not ascend.is_plain_latent(spec):
        raise ConfigError(
            f"KV cache format {type(spec).__name__} cannot be shared yet; run this model without "
            "kvpool"
        )


def num_own_layers(vllm_config: "VllmConfig") -> int:
    """Return the index from which on layers are a draft model's; ConfigError if it cannot be told.

    Without drafts all are the model's own: a model that runs through its layers several times
    numbers the KV of each time on.
    """
    drafts = vllm_config.speculative_config
    if drafts is None or drafts.method in _DRAFTS_WITHOUT_LAYERS:
        return sys.maxsize
    if (getattr(vllm_config.model_config.hf_text_config, "loop_num", None) or 1) > 1:
        raise ConfigError(
            "this model runs through its layers several times, and those of a draft model cannot "
            "be told from them; run it without drafts, or without kvpool"
        )
    return int(vllm_config.model_config.get_total_num_hidden_layers())


def _numbers_here(vllm_config: "VllmConfig", total_layers: int) -> range:
    """Return the numbers that the model's own layers may have on this rank.

    With pipeline parallelism vLLM numbers EAGLE's layers on from the last stage's number of layers,
    as layers of another stage.
    """
    parallel, drafts = vllm_config.parallel_config, vllm_config.speculative_config
    pp_size = parallel.pipeline_parallel_size
    if drafts is None or drafts.method != "eagle" or pp_size == 1:
        return range(total_layers)
    ranks = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    return range(*get_pp_indices(total_layers, parallel.rank // ranks % pp_size, pp_size))


def is_own_layer(name: str, total_layers: int) -> bool:
    """Return True if a layer is one of the model's, not a draft model's."""
    return _NAMES_OF_DRAFTS.isdisjoint(name.split(".")) and place_of(name)[0] < total_layers


def place_of(name: str) -> tuple[int, ...]:
    """Return a layer's place in its model: its number, and its attention's if it has several."""
    place = tuple(int(part) for part in name.split(".") if part.isdecimal())
    if not place:
        raise ConfigError(f"layer {name!r} of this model has no number, so it cannot be shared")
    return place


def shared_layer_groups(
    vllm_config: "VllmConfig",
    layer_groups: Sequence[RankLayerGroup],
    config: KVPoolConfig,
) -> tuple[LayerGroup, ...]:
    """Return the cells of each layer group."""
    context = context_of(vllm_config, layer_groups, config)
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    shared = []
    for layer_group, (layers, stages) in zip(
        layer_groups, _layers_and_stages(vllm_config, layer_groups), strict=True
    ):
        state = layer_group.state
        tokens_per_row = layer_group.tokens_per_row
        if config.chunk_tokens % tokens_per_row:
            raise ConfigError(
                f"chunk_tokens is {config.chunk_tokens}, but this model keeps one KV state for "
                f"{tokens_per_row} tokens; set chunk_tokens to a multiple of it"
            )
        tail_tokens = _tail_tokens(layer_group, config)
        rows = (tail_tokens or config.chunk_tokens) // tokens_per_row if state is None else 1
        topology = Topology(
            num_heads=layer_group.num_heads,
            tp_size=tp_size,
            stages=stages,
            layer_span=config.layer_span
            or default_layer_span(len(layers), layer_group.row_bytes, rows),
            per_head=config.per_head_storage,
            layer_group=layer_group.name,
            context=context,
        )
        if state is None and layer_group.spec.num_kv_heads != topology.heads_per_rank:
            raise ConfigError(
                f"a rank holds {layer_group.spec.num_kv_heads} KV heads where "
                f"{topology.heads_per_rank} were expected; this model's heads cannot be shared"
            )
        shared.append(
            LayerGroup(
                *(topology, layer_group.row_bytes, layer_group.window, layers),
                is_state=state is not None,
                tokens_per_row=tokens_per_row,
                tail_tokens=tail_tokens,
                is_draft=layer_group.is_draft,
                lookahead=layer_group.lookahead,
                is_optional=layer_group.is_draft and config.drafts is Drafts.PREFER,
            )
        )
    return tuple(shared)


def _tail_tokens(layer_group: RankLayerGroup, config: KVPoolConfig) -> int:
    """Return the number of tokens of a chunk's end that cells hold; 0: all.

    Raises ConfigError if hits may end within a chunk.
    """
    spec = layer_group.spec
    if not deepseek_v4.keeps_ends(spec) or spec.sliding_window >= config.chunk_tokens:
        return 0
    if spec.sliding_window % spec.block_size:
        raise ConfigError(
            f"this model keeps windows of {spec.sliding_window} tokens in blocks of "
            f"{spec.block_size}, which cannot be shared yet; run it without kvpool"
        )
    return int(spec.sliding_window)


def _num_heads(vllm_config: "VllmConfig", spec: Any, layer_name: str) -> int:
    """Return the KV heads of the whole model in a layer; layers may differ."""
    if compat.is_latent(spec):
        return 1
    model = vllm_config.model_config
    tp_size = int(vllm_config.parallel_config.tensor_parallel_size)
    local = int(spec.num_kv_heads)
    own = compat.kv_heads_of_layer(model, place_of(layer_name)[0])
    if own and local == max(1, own // tp_size):
        return own
    total = int(model.get_total_num_kv_heads())
    if local == 1 and (known := _heads_in_weights(vllm_config, spec, layer_name)):
        return known
    if local == 1 and total < tp_size and tp_size % total == 0:
        return _heads_of_ranks_of_one(vllm_config, total, tp_size)
    if local == max(1, total // tp_size):
        return total
    if local > 1 or tp_size == 1:
        return local * tp_size
    raise ConfigError(
        "some layers of this model have one KV head on each rank, and whether ranks share it "
        "cannot be told; lower tensor_parallel_size"
    )


def _heads_in_weights(vllm_config: "VllmConfig", spec: Any, layer_name: str) -> int:
    """Return the KV heads of a layer with one head on each rank, by the shape of its weights.

    Returns 0 if it cannot be told, or need not: all layers have equally many, or not all of them
    are known here.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.tensor_parallel_size == 1 or parallel.pipeline_parallel_size > 1:
        return 0
    named = {int(model.get_total_num_kv_heads()), *_numbers_of_heads(vllm_config)}
    if len(named) == 1:
        return 0
    download_dir = vllm_config.load_config.download_dir
    weights = local_weights(str(model.model), model.revision, download_dir)
    shapes = _shapes_in(weights) if weights is not None else {}
    rows, *_ = shapes.get(f"{layer_name.removesuffix('.attn')}.k_proj.weight") or (0,)
    heads, rest = divmod(rows, int(spec.head_size))
    # Rows that vLLM pads would give another number than the configuration names.
    is_one_a_rank = heads in named - {0} and parallel.tensor_parallel_size % heads == 0
    return heads if is_one_a_rank and not rest else 0


@functools.cache
def _shapes_in(weights: Path) -> Mapping[str, tuple[int, ...]]:
    return tensor_shapes(weights)


def _heads_of_ranks_of_one(vllm_config: "VllmConfig", total: int, tp_size: int) -> int:
    """Return the number of heads to count, where each rank has one head and there are more ranks.

    Some layers may have more heads than the model's total, and with one head on each rank it cannot
    be told which. A common multiple of all numbers in the configuration is right for each layer: at
    worst a head is stored several times, and not shared with engines of fewer ranks.
    """
    named = _numbers_of_heads(vllm_config)
    return math.lcm(total, *(n for n in named if 0 < n <= tp_size and tp_size % n == 0))


def _numbers_of_heads(vllm_config: "VllmConfig") -> Iterator[int]:
    values = vllm_config.model_config.hf_text_config.to_dict()
    return _named_heads(values, int(values.get("num_attention_heads") or 0))


def _named_heads(values: Mapping[str, Any], num_query_heads: int) -> Iterator[int]:
    """Yield all numbers of KV heads in a model's configuration."""
    for name, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield from _named_heads(each, num_query_heads)
            elif is_dataclass(each):
                yield from _named_heads(vars(each), num_query_heads)
            elif isinstance(each, int) and name.endswith(_NAMES_OF_HEADS):
                yield each
            elif isinstance(each, int) and name.endswith(_NAMES_OF_GROUPS) and each > 0:
                yield num_query_heads // each


_Layers = tuple[tuple[int, ...], ...]
_Stages = tuple[tuple[int, int], ...]


def _layers_and_stages(
    vllm_config: "VllmConfig", layer_groups: Sequence[RankLayerGroup]
) -> list[tuple[_Layers, _Stages]]:
    """Return each group's layers over all pipeline ranks, and those of each rank.

    The scheduler knows one stage's layers, so the others' are derived; every rank checks its own
    (`engine_config.layer_pages`).
    """
    total = vllm_config.model_config.get_total_num_hidden_layers()
    pp_size = vllm_config.parallel_config.pipeline_parallel_size
    here = [tuple(place_of(name) for name, _ in layer_group.layers) for layer_group in layer_groups]
    if pp_size == 1:
        return [(layers, ((0, len(layers)),)) for layers in here]
    drafts = [each.last_stage for each in layer_groups if each.is_draft]
    layer_groups = [each for each in layer_groups if not each.is_draft]
    here = here[: len(layer_groups)]
    if any(len(place) > 1 or place[0] >= total for layers in here for place in layers):
        raise ConfigError(
            "layers of this model have KV several times, which is shared without pipeline "
            "parallelism only; set pipeline_parallel_size to 1"
        )
    bounds = [get_pp_indices(total, rank, pp_size) for rank in range(pp_size)]
    of_layer = (
        [0] * total if len(layer_groups) == 1 else _group_of_each_layer(vllm_config, layer_groups)
    )
    found: list[tuple[_Layers, _Stages]] = []
    for i in range(len(layer_groups)):
        layers = tuple((layer,) for layer in range(total) if of_layer[layer] == i)
        counts = [of_layer[start:stop].count(i) for start, stop in bounds]
        found.append((layers, tuple(pairwise(accumulate(counts, initial=0)))))
    return [*found, *((each, ((0, 0),) * (pp_size - 1) + ((0, len(each)),)) for each in drafts)]


def _group_of_each_layer(
    vllm_config: "VllmConfig", layer_groups: Sequence[RankLayerGroup]
) -> list[int]:
    """Return the group of every layer of the whole model, by its configuration."""
    types = getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ()
    of_type = {}
    for layer_type, prefix in _LAYER_TYPES.items():
        fitting = [
            i for i, layer_group in enumerate(layer_groups) if layer_group.name.startswith(prefix)
        ]
        if len(fitting) == 1:
            of_type[layer_type] = fitting[0]
    if len(types) != vllm_config.model_config.get_total_num_hidden_layers() or not all(
        layer_type in of_type for layer_type in types
    ):
        raise ConfigError(
            "this model has several kinds of attention, and its configuration does not say by "
            "layer_types which layer is of which; set pipeline_parallel_size to 1"
        )
    return [of_type[layer_type] for layer_type in types]


def context_of(
    vllm_config: "VllmConfig", layer_groups: Sequence[RankLayerGroup], config: KVPoolConfig
) -> Context:
    """Return context parallelism; ConfigError if it is not known which tokens a rank holds."""
    parallel = vllm_config.parallel_config
    context = Context(
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
        compat.interleave(parallel),
    )
    if context.pcp_size > 1 and compat.device_type() == "npu":
        raise ConfigError(
            "on Ascend, which tokens a rank of prefill context parallelism holds is not known to "
            "the pool yet; set prefill_context_parallel_size to 1"
        )
    if context.dcp_size == 1:
        return context
    if not all(getattr(layer_group.spec, "dcp_sharded", True) for layer_group in layer_groups):
        raise ConfigError(
            "this model keeps layers that decode context parallelism deals out beside others that "
            "it does not; set decode_context_parallel_size to 1"
        )
    dealt = context.interleave * context.dcp_size
    if config.chunk_tokens % dealt:
        raise ConfigError(
            f"chunk_tokens is {config.chunk_tokens}, but decode context parallelism deals tokens "
            f"out in rounds of {dealt}; set chunk_tokens to a multiple of it"
        )
    return context


def groups_of(
    kv_cache_config: KVCacheConfig,
    layer_groups: Sequence[RankLayerGroup],
    shared: Sequence[LayerGroup],
) -> tuple[KVCacheGroup, ...]:
    """Return vLLM's KV cache groups in its order.

    `shared` are the layer groups in the same order.
    """
    held: dict[int, LayerGroup] = {}
    lookaheads: dict[int, int] = {}
    for layer_group, each in zip(layer_groups, shared, strict=True):
        for i in layer_group.groups:
            held.setdefault(i, each)
            lookaheads[i] = max(lookaheads.get(i, 0), each.lookahead)
    dcp_size = shared[0].topology.context.dcp_size
    found = []
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        block_size = group.kv_cache_spec.block_size * dcp_size
        if i not in held:
            found.append(KVCacheGroup(block_size, shared=False))
        else:
            found.append(
                KVCacheGroup(
                    block_size,
                    held[i].window,
                    is_state=held[i].is_state,
                    tail_tokens=held[i].tail_tokens,
                    lookahead=lookaheads[i],
                )
            )
    return tuple(found)
