"""The namespace of an engine's cells, and the values whose digest it is.

The values are the weights, the model's files, vLLM's configuration and environment (`factors.py`)
and the content of pages. Everything counts except what a table leaves out with a reason. Engines
that differ in a value have different namespaces, so they get misses, never wrong bytes.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvpool.config import KVPoolConfig
from vllm_kvpool.identity.chunk_hash import SCHEME
from vllm_kvpool.identity.keys import Namespace, make_namespace, name_of_model
from vllm_kvpool.identity.weights import FOLDERS_OF_TASKS, folders_in
from vllm_kvpool.layout.states import StateForm
from vllm_kvpool.layout.topology import LayerGroup
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.storage.contents.cell_format import FORMAT_VERSION
from vllm_kvpool.vllm_adapt import ascend, compat
from vllm_kvpool.vllm_adapt.identity import model_code
from vllm_kvpool.vllm_adapt.identity.factors import (
    LEFT_OUT_OF_KV,
    Table,
    UnstableValueError,
    canonical,
    digest_of,
    encoded,
    environment_factors,
    factors,
    without,
)
from vllm_kvpool.vllm_adapt.kv_cache_specs import state_specs
from vllm_kvpool.vllm_adapt.weight_sources import (
    local_directory,
    local_weights,
    other_models,
    sample_at_start,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

FORMAT_DIGEST_BYTES = 16
DRAFTER_BYTES = 6  # of a drafter's identity

# Values of a model's configuration that count even with `weights_id`, and with defaults that its
# files leave out.
_ARCHITECTURE_FIELDS = (
    *("model_type", "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"),
    *("num_kv_shared_layers", "attention_k_eq_v", "qk_rope_head_dim", "qk_nope_head_dim"),
    *("kv_lora_rank", "q_lora_rank", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    *("hidden_act", "activation_function", "attention_bias", "attention_multiplier"),
    *("embedding_multiplier", "residual_multiplier", "use_qk_norm", "qk_layernorm"),
    *("sliding_window", "use_sliding_window", "layer_types", "no_rope_layers"),
    *("attn_logit_softcapping", "query_pre_attn_scalar", "position_embedding_type", "alibi"),
    *("partial_rotary_factor", "rotary_pct", "rotary_dim", "rope_local_base_freq", "num_experts"),
    *("num_experts_per_tok", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("moe_intermediate_size", "original_max_position_embeddings"),
)

# The files of a model's configuration; they do not count with `weights_id`.
_CONFIG_FILES = frozenset(("config.json", "params.json"))

# Names in those files that change no KV; all others may.
_NAMES_LEFT_OUT = {
    "transformers_version": "of the library that wrote the file",
    "_name_or_path": "a name or path",
    "dtype": "the engine's own counts",
    "torch_dtype": "the engine's own counts",
    "use_cache": "of another library's engine",
    "initializer_range": "of weights before training",
}

_TOKENIZER_CONFIG = "tokenizer_config.json"  # may name processors

# Other JSON files of a model that change no KV. Any other counts: processors of media, scales and
# options of quantisation, and files not known here.
FILES_LEFT_OUT = {
    "generation_config.json": "says how tokens are chosen",
    "tokenizer.json": "prompts are compared by their tokens",
    _TOKENIZER_CONFIG: "prompts are compared by their tokens",
    "special_tokens_map.json": "prompts are compared by their tokens",
    "added_tokens.json": "prompts are compared by their tokens",
    "vocab.json": "prompts are compared by their tokens",
    "tekken.json": "prompts are compared by their tokens; what it says of media counts",
    "chat_template.json": "prompts are compared by their tokens",
    "model.safetensors.index.json": "says which file holds which weights, which are sampled",
    "pytorch_model.bin.index.json": "says which file holds which weights, which are sampled",
    "consolidated.safetensors.index.json": "the same",
}

# Sections of Mistral's tokenizers that change no KV; those of images and audio do.
_TEKKEN_LEFT_OUT = {
    "vocab": "prompts are compared by their tokens",
    "special_tokens": "prompts are compared by their tokens",
    "config": "prompts are compared by their tokens",
    "version": "of the file's format",
    "type": "of the file's format",
}

# Folders of a model's directory whose files count as the directory's own: models of vLLM read
# encoders of media, and adapters that they merge, from them.
FOLDERS_OF_FILES = (*FOLDERS_OF_TASKS, "audio_tokenizer", "speech_tokenizer", "whisper-large-v3")

# Types of rope that name an original length and are the same in engines of any `max_model_len`.
_ROPES_OF_ANY_LENGTH = frozenset(("deepseek_llama_scaling", "deepseek_yarn", "llama3", "yarn"))
# Models with MLA, whose rope is not DeepSeek's.
_LATENT_WITH_OWN_ROPE = frozenset(("bailing_moe_linear", "minicpm3"))
# Models that build their rope for `max_model_len` tokens, and types that have other angles then.
_MODELS_BUILT_TO_LENGTH = frozenset(
    (
        *("cohere_compass_text", "minimax_m2", "minimax_text_01", "muse_spark", "plamo2"),
        *("plamo3", "step5"),
    )
)
_ROPES_BUILT_TO_LENGTH = frozenset(("dynamic", "fope"))
_LLAMA4_LONG_TOKENS = 32768  # above it vLLM turns temperature tuning on
# Methods of quantisation with which GPUs round weights alone, whichever kernel vLLM chooses.
_ROUND_WEIGHTS_ALONE = frozenset(
    ("auto_awq", "auto_gptq", "awq", "awq_marlin", "gptq", "gptq_marlin")
)
# Methods of quantisation whose random weights are all drawn. Weights in whole numbers are whatever
# was in memory.
_DRAWN_WHOLE = frozenset((None, "fp8"))
_MOST_SHOWN_BYTES = 1 << 20  # a longer file counts by a digest


class Identity(NamedTuple):
    """A namespace, and the values whose digest is in its name."""

    namespace: Namespace
    values: Mapping[str, Any]


UNNAMED = Identity(Namespace(""), {})
"""A rank's identity before the scheduler sends it the namespace."""


def engine_namespace(
    vllm_config: "VllmConfig",
    config: KVPoolConfig,
    specs: Sequence[Any],
    layer_groups: Sequence[LayerGroup],
) -> Identity:
    """Return the namespace of an engine's cells. `specs`: vLLM's, of each layer group.

    Reads the model's files; raises OSError.
    """
    model = vllm_config.model_config
    values: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "scheme": SCHEME.decode(),
        "chunk_tokens": config.chunk_tokens,
        "kinds": [
            _state_values(state_specs.state_form(spec, vllm_config), spec, layer_group)
            if layer_group.is_state
            else _group_values(spec, layer_group)
            for spec, layer_group in zip(specs, layer_groups, strict=True)
        ],
        # Numbers are stored as this machine has them.
        "byte_order": sys.byteorder,
        "rope": _rope(
            compat.text_part(compat.configuration(model)), compat.built_max_model_len(model)
        ),
        **model_values(vllm_config, config.weights_id, config.namespace, LEFT_OUT_OF_KV),
    }
    if compat.ignores_spans_of_media(model):
        values["media_attention"] = "causal"
    if _rounds_by_device(model.quantization) or any(_is_quantised(spec) for spec in specs):
        # Embeddings do without: their encoders are meant to run on other devices.
        values["device"] = f"{compat.quantising_device()} {ascend.generation()}".rstrip()
    if not config.per_head_storage:
        values["rank_cells_of_tp"] = vllm_config.parallel_config.tensor_parallel_size
    if config.encrypts_cells:
        values["encrypted_cells"] = True
    digest = hashlib.blake2b(encoded(values), digest_size=FORMAT_DIGEST_BYTES).hexdigest()
    name = name_of_model(str(model.model))
    return Identity(make_namespace(name, digest), values)


def drafter_identity(
    vllm_config: "VllmConfig", specs: Sequence[Any], layer_groups: Sequence[LayerGroup]
) -> str:
    """Return a drafter's identity among those of the same model, in hexadecimal; "" without layers.

    `specs`: vLLM's, of each layer group. What the model itself decides is in the namespace. Reads
    the drafter's files; raises OSError.
    """
    if not layer_groups:
        return ""
    speculation = vllm_config.speculative_config
    assert speculation is not None
    draft = speculation.draft_model_config
    values: dict[str, Any] = {
        "method": speculation.method,
        "kinds": [
            {**_group_values(spec, layer_group), "lookahead": layer_group.lookahead}
            for spec, layer_group in zip(specs, layer_groups, strict=True)
        ],
        "weights": weights_identity(vllm_config, draft),
        "files": configuration_files(draft),
        "architecture": canonical(_architecture(draft.hf_text_config)),
        "quantization": draft.quantization,
        "rope": _rope(draft.hf_text_config, int(draft.max_model_len)),
        "maps_tokens": bool(getattr(speculation, "use_heterogeneous_vocab", False)),
    }
    if _rounds_by_device(draft.quantization):
        values["device"] = f"{compat.quantising_device()} {ascend.generation()}".rstrip()
    try:
        if _CONFIG_FILES.isdisjoint(values["files"]):
            values["configuration"] = without(canonical(draft.hf_config.to_dict()), _NAMES_LEFT_OUT)
    except UnstableValueError as error:
        logger.warning("kvpool: this engine shares no KV of its drafter: %s", error)
        values["alone"] = _name_of_engine(vllm_config)
    return hashlib.blake2b(encoded(values), digest_size=DRAFTER_BYTES).hexdigest()


def model_values(
    vllm_config: "VllmConfig", weights_id: str, namespace: str, left_out: Table
) -> dict[str, Any]:
    """Return all that decides a model's values: weights, files, configuration, environment.

    An engine with a value that cannot be compared shares with no other; a warning says so. Raises
    OSError.
    """
    model = vllm_config.model_config
    read = compat.configuration(model)
    text = compat.text_part(read)
    values: dict[str, Any] = {
        "namespace": namespace,
        "weights": weights_id or weights_identity(vllm_config),
        "architecture": canonical(_architecture(text)),
        "files": configuration_files(model, with_config=not weights_id),
    }
    if release := compat.release_apart():
        values["release"] = release
    if not weights_id and (others := other_models(model)):
        values["parts"] = {
            name: _part(other, vllm_config.load_config.download_dir)
            for name, other in others.items()
        }
    if media := _media_of_tokenizer(model):
        values["tokenizer"] = media
    known = {**compat.environment_variables(), **ascend.environment_variables()}
    if variables := environment_factors(known):
        values["environment"] = variables
    if model.hf_text_config.model_type.startswith("llama4"):
        values["attn_temperature_tuning"] = _llama4_temperature(model)
    try:
        if code := model_code.code_outside_vllm(model, vllm_config.parallel_config):
            values["code"] = code
        if model.trust_remote_code and (remote := _remote_code(model, read)):
            values["remote_code"] = remote
        values["engine"] = factors(vllm_config, left_out)
        if not weights_id and _CONFIG_FILES.isdisjoint(values["files"]):
            whole = canonical(read.to_dict())
            values["configuration"] = without(whole, _NAMES_LEFT_OUT)
    except UnstableValueError as error:
        logger.warning(
            "kvpool: this engine shares nothing with others: %s",
            error,
        )
        values["alone"] = _name_of_engine(vllm_config)
    return values


def _name_of_engine(vllm_config: "VllmConfig") -> list[str]:
    """Return this engine's name: a part that data-parallel ranks share, and the rank's own."""
    transfer = vllm_config.kv_transfer_config or vllm_config.ec_transfer_config
    return [vllm_config.instance_id, transfer.engine_id if transfer else ""]


def _architecture(text: Any) -> dict[str, Any]:
    """Return the values of `_ARCHITECTURE_FIELDS`.

    A value is one for each layer where a model's layers differ.
    Such a model's configuration raises an error if it is asked for a value that differs.
    """
    if not getattr(text, "is_heterogeneous", False):
        return {f: getattr(text, f) for f in _ARCHITECTURE_FIELDS if hasattr(text, f)}
    layers = list(text.per_layer_config)
    return {f: [getattr(each, f, None) for each in layers] for f in _ARCHITECTURE_FIELDS}


def _group_values(spec: Any, layer_group: LayerGroup) -> dict[str, Any]:
    topology, window = layer_group.topology, getattr(spec, "sliding_window", None)
    is_latent = compat.is_latent(spec)
    return {
        "kind": layer_group.name,
        "heads": topology.num_heads,
        # Keys count layers within their group.
        "layers": layer_group.layers,
        "row_bytes": layer_group.row_bytes,
        "head_sizes": (spec.head_size, compat.value_head_size(spec)),
        "kv_dtype": (str(spec.dtype), spec.kv_quant_mode.name),
        "latent": is_latent,
        # Of layers with a window that are kept with those that have none: of Cohere 2, vLLM 0.32
        # takes a token more than older releases.
        **({"window": window} if window is not None and layer_group.window.is_full else {}),
        # vLLM-Ascend's kernel takes a token more into a window than other devices' do, and its rope
        # stores a latent's numbers in another order (even places first).
        **({"window_of": "NPU"} if window is not None and compat.device_type() == "npu" else {}),
        **({"latent_of": "NPU"} if is_latent and compat.device_type() == "npu" else {}),
        **({"row_tokens": n} if (n := layer_group.tokens_per_row) > 1 else {}),
        # Tokens are dealt out in other rounds: the cells of a rank hold others.
        "interleave": topology.context.interleave if topology.context.dcp_size > 1 else 0,
        **device_values(spec),
    }


def _state_values(form: StateForm, spec: Any, layer_group: LayerGroup) -> dict[str, Any]:
    return {
        "kind": layer_group.name,
        "units": form.num_units,
        "layers": layer_group.layers,
        "row_bytes": form.row_bytes,
        **state_specs.content_of(spec, form),
    }


def _rounds_by_device(quantization: str | None) -> bool:
    """Return True if the device decides what such weights are multiplied with."""
    if quantization is None:
        return False
    return quantization not in _ROUND_WEIGHTS_ALONE or compat.device_type() != "cuda"


def _is_quantised(spec: Any) -> bool:
    """Return True if vLLM may quantise queries, too, as it reads such pages."""
    mode = getattr(spec, "kv_quant_mode", None)  # recurrent states have none
    return mode is not None and mode.name != "NONE"


def device_values(spec: Any) -> dict[str, str]:
    """Return the values that tell devices apart on which a spec's bytes mean different things."""
    values = {}
    is_fp8 = spec.kv_quant_mode.name.startswith("FP8") or compat.is_indexer(spec)
    if is_fp8 and spec.dtype.itemsize == 1 and compat.fp8_name() != "float8_e4m3fn":
        values["fp8"] = compat.fp8_name()
    if spec.kv_quant_mode.is_nvfp4:
        values["nvfp4_kernels"] = "trtllm" if compat.mixes_nvfp4_scales() else "fa2"
    return values


def configuration_files(model: Any, *, with_config: bool = True) -> dict[str, Any]:
    """Return the content of a model's local files, except weights and code; raises OSError."""
    revision = model.revision
    paths = _files_of(local_directory(str(model.model), revision))
    if model.hf_config_path:
        elsewhere = _files_of(local_directory(model.hf_config_path, revision))
        paths = {name: path for name, path in paths.items() if name not in _CONFIG_FILES}
        paths |= {name: path for name, path in elsewhere.items() if name in _CONFIG_FILES}
    return {
        name: _content_of(path)
        for name, path in sorted(paths.items())
        if with_config or name not in _CONFIG_FILES
    }


def _remote_code(model: Any, read: Any) -> dict[str, Any]:
    """Return the Python files of a model's directory and of its `auto_map`s' repositories.

    transformers loads a class and what its module imports from its own folder; vLLM's models load
    classes that no `auto_map` names. So all files count. Raises UnstableValueError for a repository
    that is not local, and OSError.
    """
    own = str(model.model)
    directory = local_directory(own, model.revision)
    paths = sorted(directory.glob("*.json")) if directory else []
    maps = [
        _json(path)
        for path in paths
        if path.name == _TOKENIZER_CONFIG or path.name not in FILES_LEFT_OUT
    ]
    named = {repository for each in (*maps, read.to_dict()) for repository in _repositories(each)}
    own_revision = model.code_revision or model.revision
    places = {"": local_directory(own, own_revision)}
    if model.hf_config_path:
        places["config"] = local_directory(model.hf_config_path, own_revision)
    others = named - {own, "", str(model.hf_config_path)}
    places |= {each: local_directory(each, model.code_revision) for each in others}
    found: dict[str, str] = {}
    for name, place in places.items():
        if place is None and (name or named):
            raise UnstableValueError(
                f"it may run code of {name or own}, which is not in local files; leave "
                "trust_remote_code out, or put the code into the model's directory"
            )
        files = model_code.source_files(place) if place is not None else {}
        found |= {f"{name}:{each}": digest_of(path.read_bytes()) for each, path in files.items()}
    return found


def _json(path: Path) -> Any:
    """Return a file's JSON; None if it has none. Raises OSError."""
    try:
        return json.loads(path.read_bytes())
    except UNREADABLE:
        return None


def _repositories(values: Any, *, is_map: bool = False) -> Iterator[str]:
    """Yield the repositories of the classes in every `auto_map`; "" is the one that has the map."""
    if isinstance(values, str) and is_map:
        yield values.rpartition("--")[0]
    elif isinstance(values, dict):
        for name, each in values.items():
            yield from _repositories(each, is_map=is_map or name == "auto_map")
    elif isinstance(values, list):
        for each in values:
            yield from _repositories(each, is_map=is_map)


def _files_of(directory: Path | None) -> dict[str, Path]:
    if directory is None:
        return {}
    return {
        str(path.relative_to(directory)): path
        for folder in (directory, *folders_in(directory, FOLDERS_OF_FILES))
        for path in folder.iterdir()
        if path.suffix == ".json" and path.name not in FILES_LEFT_OUT and path.is_file()
    }


def _content_of(path: Path) -> Any:
    content = path.read_bytes()
    if len(content) <= _MOST_SHOWN_BYTES:
        try:
            values = json.loads(content)
        except UNREADABLE:
            pass
        else:
            return without(values, _NAMES_LEFT_OUT) if path.name in _CONFIG_FILES else values
    return {"digest": digest_of(content)}


def _media_of_tokenizer(model: Any) -> Any:
    """Return the options about images and audio in a tokenizer of Mistral's form."""
    if model.multimodal_config is None or model.tokenizer_mode == "hf" or not model.tokenizer:
        return None
    directory = local_directory(str(model.tokenizer), model.tokenizer_revision)
    path = directory / "tekken.json" if directory is not None else None
    if path is None or not path.is_file():
        return None
    return without(_json(path), _TEKKEN_LEFT_OUT)


def _part(name: str, download_dir: str | None) -> dict[str, Any]:
    """Return the weights and files of another model that is loaded as a part of this one."""
    weights, directory = local_weights(name, None, download_dir), local_directory(name, None)
    sampled = sample_at_start(weights) if weights is not None else None
    files = _files_of(directory)
    return {
        "weights": f"sample:{sampled}" if sampled else f"name:{name}",
        "files": {each: _content_of(path) for each, path in sorted(files.items())},
    }


def _rope(text: Any, max_model_len: int) -> dict[str, Any]:
    """Return the rotary embedding in one form, whatever fields transformers keeps it in."""
    rope = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    rope.setdefault("rope_theta", getattr(text, "rope_theta", None))
    original = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    # Long-rope models have other factors in engines that allow long prompts.
    kind = rope.get("rope_type") or rope.get("type")
    depends_on_length = kind not in _ROPES_OF_ANY_LENGTH
    rope["long"] = depends_on_length and original is not None and max_model_len > original
    rope |= _yarn_reading(rope, text)
    rope |= {
        name: {**each, **_yarn_reading(each, text)}
        for name, each in rope.items()  # some models have one for each type of layers
        if isinstance(each, Mapping)
    }
    if kind in _ROPES_BUILT_TO_LENGTH and text.model_type in _MODELS_BUILT_TO_LENGTH:
        rope["max_model_len"] = max_model_len
    return rope


def _yarn_reading(rope: Mapping[str, Any], text: Any) -> dict[str, float]:
    is_latent = getattr(text, "kv_lora_rank", None) and text.model_type not in _LATENT_WITH_OWN_ROPE
    return compat.yarn_reading(rope, is_latent=bool(is_latent))


def _llama4_temperature(model: Any) -> Any:
    """Return whether queries of Llama 4 are scaled by position, by vLLM's rule, as configured."""
    generation = model.try_get_generation_config() | (model.override_generation_config or {})
    is_long = compat.built_max_model_len(model) > _LLAMA4_LONG_TOKENS
    return generation.get("attn_temperature_tuning", is_long)


def weights_identity(vllm_config: "VllmConfig", model: Any = None) -> str:
    """Return the identity of a model's weights: a sample of their files, or else their name.

    The model is by default the engine's.
    """
    model = vllm_config.model_config if model is None else model
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return _random_weights(vllm_config)
    download_dir = vllm_config.load_config.download_dir
    weights = local_weights(str(model.model), model.revision, download_dir)
    if weights is not None and (sampled := sample_at_start(weights)) is not None:
        # Where a model has weights in two forms, only these load Mistral's own.
        takes_mistrals = load_format in ("auto", "mistral")
        has_mistrals = weights.is_dir() and any(weights.glob("consolidated*.safetensors"))
        suffix = ":not-consolidated" if has_mistrals and not takes_mistrals else ""
        return f"sample:{sampled}{suffix}"
    logger.warning(
        "kvpool: the weights of %s are not in local files: engines count as having the same "
        "weights if name and revision are equal; set weights_id to tell other weights apart",
        model.model,
    )
    return f"name:{getattr(model, 'model_weights', '') or model.model}@{model.revision}"


def _random_weights(vllm_config: "VllmConfig") -> str:
    """Return all that decides random weights: each rank draws its part of a tensor by size."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tp = parallel.tensor_parallel_size
    logger.warning(
        "kvpool: weights are random (load_format dummy), and each rank draws its own: only "
        "engines of the same seed (%s), tensor_parallel_size (%d), releases and kind of device "
        "share KV, and none with weights in whole numbers; load real weights to share between "
        "others",
        *(model.seed, tp),
    )
    drawn = f"dummy:{model.seed}:tp{tp}"
    if model.is_moe:  # data parallelism divides experts, too
        ranks = parallel.data_parallel_size * parallel.prefill_context_parallel_size
        redundant = parallel.eplb_config.num_redundant_experts
        is_divided = "ep" if parallel.enable_expert_parallel else "tp"
        drawn += f":experts {is_divided}{tp * ranks}+{redundant}"
    drawn += f":{compat.source_of_random_weights()}"
    if model.quantization not in _DRAWN_WHOLE:
        drawn += f":{':'.join(_name_of_engine(vllm_config))}"
    return drawn
