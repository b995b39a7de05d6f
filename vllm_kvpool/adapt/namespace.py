"""What makes two engines' KV bytes the same: the digest behind a namespace.

A whitelist of values, everything else being the weights' identity. Two engines that differ in any
of them have different namespaces, and a mismatch is a miss.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MLAAttentionSpec

from vllm_kvpool.adapt import releases
from vllm_kvpool.cells import FORMAT_VERSION
from vllm_kvpool.config import KVPoolConfig
from vllm_kvpool.hashing import SCHEME
from vllm_kvpool.keys import Namespace, make_namespace
from vllm_kvpool.layout.topology import Kind
from vllm_kvpool.weights import sample_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

FORMAT_DIGEST_BYTES = 16

# Values of a model's configuration that change its KV. Not `to_dict()`: that carries the version
# of the library that wrote it, which differs between environments.
_ARCHITECTURE_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "num_kv_shared_layers",
    "attention_k_eq_v",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "kv_lora_rank",
    "q_lora_rank",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "hidden_act",
    "activation_function",
    "attention_bias",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "use_qk_norm",
    "qk_layernorm",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "no_rope_layers",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "position_embedding_type",
    "alibi",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_dim",
    "rope_local_base_freq",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "original_max_position_embeddings",
)

# Those are as vLLM has them, with defaults that a file leaves out. What else a file says may change
# KV too, in ways that only the model's code knows; these say nothing of it.
_CONFIG_FILES = ("config.json", "params.json")
_NOT_OF_KV = (
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def engine_namespace(
    vllm_config: "VllmConfig",
    config: KVPoolConfig,
    specs: Sequence[Any],
    kinds: Sequence[Kind],
) -> Namespace:
    """The namespace of an engine's cells. `specs` are vLLM's, of each kind of layers."""
    model = vllm_config.model_config
    text = model.hf_text_config
    values = {
        "format": FORMAT_VERSION,
        "scheme": SCHEME.decode(),
        "chunk_tokens": config.chunk_tokens,
        "namespace": config.namespace,
        "weights": config.weights_id or weights_identity(vllm_config),
        "architecture": {f: getattr(text, f) for f in _ARCHITECTURE_FIELDS if hasattr(text, f)},
        "configuration": {} if config.weights_id else configuration_files(model),
        "rope": _rope(text, model.max_model_len),
        "overrides": model.hf_overrides if isinstance(model.hf_overrides, dict) else "",
        "kinds": [_kind_values(*each) for each in zip(specs, kinds, strict=True)],
        "kv_dtype": vllm_config.cache_config.cache_dtype,
        # Numbers are stored as this machine has them.
        "byte_order": sys.byteorder,
        "dtype": str(model.dtype),
        "quantization": model.quantization or "",
    }
    if not config.per_head_storage:
        values["rank_cells_of_tp"] = vllm_config.parallel_config.tensor_parallel_size
    encoded = json.dumps(values, sort_keys=True, default=str).encode()
    digest = hashlib.blake2b(encoded, digest_size=FORMAT_DIGEST_BYTES).hexdigest()
    name = str(model.served_model_name or model.model)
    logger.debug("kvpool: format of %s: %s", name, encoded.decode())
    return make_namespace(Path(str(model.model)).name or name, digest)


def _kind_values(spec: Any, kind: Kind) -> dict[str, Any]:
    topology = kind.topology
    return {
        "kind": kind.name,
        "heads": topology.num_heads,
        # Keys count layers within their kind.
        "layers": kind.layers,
        "row_bytes": kind.row_bytes,
        "head_sizes": (spec.head_size, releases.value_head_size(spec)),
        "kv_dtype": (str(spec.dtype), spec.kv_quant_mode.name),
        "latent": isinstance(spec, MLAAttentionSpec),
        # Tokens are dealt out in other rounds: the cells of a rank hold others.
        "interleave": topology.context.interleave if topology.context.dcp_size > 1 else 0,
    }


def configuration_files(model: Any) -> dict[str, Any]:
    """What the files that a model's configuration was read from say, as far as they are here."""
    directory = local_directory(model.hf_config_path or str(model.model), model.revision)
    said: dict[str, Any] = {}
    for path in () if directory is None else map(directory.joinpath, _CONFIG_FILES):
        if path.is_file():
            said[path.name] = _what_may_change_kv(path.read_bytes())
    return said


def _what_may_change_kv(content: bytes) -> Any:
    try:
        values = json.loads(content)
    except ValueError:
        return content.hex()
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if name not in _NOT_OF_KV}


def _rope(text: Any, max_model_len: int) -> dict[str, Any]:
    """Rotary embedding in one form, whichever fields the library's release keeps it in."""
    rope = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    rope.setdefault("rope_theta", getattr(text, "rope_theta", None))
    original = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    # Long-rope models choose their factors by whether the engine allows long prompts.
    rope["long"] = original is not None and max_model_len > original
    return rope


def weights_identity(vllm_config: "VllmConfig") -> str:
    """The weights' identity: a sample of their files, or the next best thing that is known."""
    model = vllm_config.model_config
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        # Random weights are drawn per rank.
        tp = vllm_config.parallel_config.tensor_parallel_size
        return f"dummy:{model.seed}:tp{tp}"
    directory = local_directory(str(model.model), model.revision)
    sampled = sample_weights(directory) if directory is not None else None
    if sampled is not None:
        return f"sample:{sampled}"
    logger.warning(
        "kvpool: the weights of %s are not in local files, so engines are taken to have the same "
        "weights if name and revision are the same; set weights_id to say what they are",
        model.model,
    )
    return f"name:{model.model}@{model.revision}"


def local_directory(name: str, revision: str | None) -> Path | None:
    """Where the files of a model or an adapter lie, without asking any network."""
    path = Path(name)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
