"""DeepSeek V4's caches: latents for one, 4 or 128 tokens, an indexer, inputs of compressors.

A compressor makes one latent of 4 or 128 tokens. vLLM keeps the compressor's inputs, a row for each
token, in a sliding window of as many tokens (`CompressorStateCache`). So at the end of a chunk all
latents before it are whole, and so are the windows that later latents begin with.

vLLM's scheduler knows the spec of one layer of each KV cache group; those of the others follow from
the model's configuration.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.kv_cache_specs import page_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_VERSION = "deepseek_v4"
_OVERLAPS = 4  # compressors of so many tokens read those of the latent before, too


def is_model(vllm_config: "VllmConfig") -> bool:
    """Return True if the engine's model is DeepSeek V4."""
    return getattr(vllm_config.model_config.hf_text_config, "model_type", "") == _VERSION


def keeps_ends(spec: Any) -> bool:
    """Return True if a cell of these layers holds only its chunk's last tokens (windows)."""
    return type(spec).__name__ == "SlidingWindowMLASpec"


def check_engine(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError, with what helps, if this engine's caches cannot be shared."""
    if not compat.offers_states():
        raise ConfigError(
            "this release of vLLM has another form of DeepSeek V4's caches; use vLLM 0.32, or run "
            "this model without kvpool"
        )
    if getattr(vllm_config.model_config.hf_text_config, "vision_n_layers", 0):
        raise ConfigError(
            "tokens of an image attend to those behind them in DeepSeek V4, so a prefix that ends "
            "within an image holds for no other prompt; run this model without kvpool"
        )
    for name in (
        *("pipeline_parallel_size", "decode_context_parallel_size"),
        "prefill_context_parallel_size",
    ):
        if getattr(vllm_config.parallel_config, name) > 1:
            raise ConfigError(f"DeepSeek V4 is shared with {name}=1 alone yet; set {name} to 1")
    if compat.device_type() != "cuda" or compat.is_rocm():
        raise ConfigError(
            "DeepSeek V4's caches are known on NVIDIA GPUs alone; run this model without kvpool"
        )


def check_chunks(block_size: int, chunk_tokens: int) -> None:
    """Raise ConfigError if a hit, which ends with a block, may end within a chunk."""
    if chunk_tokens % block_size:
        raise ConfigError(
            f"of DeepSeek V4 hits end with blocks of {block_size} tokens, of which chunks hold "
            f"whole ones; set chunk_tokens to a multiple of {block_size}"
        )


def by_form(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, told: Any, names: Sequence[str]
) -> list[tuple[Any, list[str]]]:
    """Return the layers `names` of a KV cache group whose spec is `told`, by spec.

    Raises ConfigError if a layer is not as the model's configuration says.
    """
    check_engine(vllm_config)
    latents = _latents(kv_cache_config)
    each = told.kv_cache_specs if isinstance(told, UniformTypeKVCacheSpecs) else None
    found: dict[Any, list[str]] = {}
    for name in names:
        first = told if each is None else each[name]
        spec = _derived(vllm_config, latents, first, name)
        if each is not None and _form(each[name]) != _form(spec):
            raise ConfigError(
                f"layer {name!r} of DeepSeek V4 has another form than the model's configuration "
                "says; run this model without kvpool"
            )
        found.setdefault(spec, []).append(name)
    return [*found.items()]


def _form(spec: Any) -> tuple[object, ...]:
    return (
        *(keeps_ends(spec), compat.row_bytes(spec), compat.tokens_per_state(spec)),
        *(spec.dtype, spec.block_size, compat.has_own_content(spec)),
    )


def _latents(kv_cache_config: KVCacheConfig) -> Any:
    """Return the spec of any latents.

    Those of the window, and the compressed ones, have equal rows.
    """
    for group in kv_cache_config.kv_cache_groups:
        told: Any = group.kv_cache_spec
        for spec in getattr(told, "kv_cache_specs", {"": told}).values():
            if getattr(spec, "model_version", None) == _VERSION:
                page_specs.check_compressed(spec)
                return spec
    raise ConfigError(
        "no KV cache group of this engine begins with DeepSeek V4's latents, so their form cannot "
        "be told; run this model without kvpool"
    )


def _derived(vllm_config: "VllmConfig", latents: Any, first: Any, name: str) -> Any:
    """Return the spec of layer `name`, where `first` is that of any layer of its group.

    Names end as vLLM's modules do: `swa_cache`, `state_cache` of a compressor, `k_cache` of an
    indexer; the others are compressed latents.
    """
    text = vllm_config.model_config.hf_text_config
    if name.endswith(".swa_cache"):
        return first
    is_indexers = ".indexer." in name
    ratio = _ratio(text, name)
    if name.endswith(".state_cache"):
        dim = int(text.index_head_dim if is_indexers else text.head_dim)
        values = 2 if ratio == _OVERLAPS else 1
        # A value and its weight.
        return replace(first, head_size=2 * values * dim, page_size_padded=None)
    if is_indexers:
        groups = int(text.index_head_dim) // page_specs.INDEXER_GROUP
        return MLAAttentionSpec(
            block_size=first.block_size,
            num_kv_heads=1,
            tokens_per_state=ratio,
            head_size=int(text.index_head_dim) + groups * page_specs.INDEXER_SCALE_BYTES,
            dtype=torch.uint8,
            cache_role=type(first.cache_role).INDEXER,
        )
    return MLAAttentionSpec(
        block_size=first.block_size,
        num_kv_heads=1,
        tokens_per_state=ratio,
        head_size=latents.head_size,
        dtype=latents.dtype,
        kv_quant_mode=latents.kv_quant_mode,
        cache_dtype_str=latents.cache_dtype_str,
        state_content_bytes=latents.state_content_bytes,
        model_version=_VERSION,
    )


def _ratio(text: Any, name: str) -> int:
    """Return the number of tokens in a latent of this layer."""
    ratios = list(getattr(text, "compress_ratios", None) or ())
    layer = next((int(part) for part in name.split(".") if part.isdecimal()), len(ratios))
    if layer >= len(ratios):
        raise ConfigError(
            f"DeepSeek V4's compress_ratios say nothing of layer {name!r}; run this model without "
            "kvpool"
        )
    return max(1, int(ratios[layer]))
