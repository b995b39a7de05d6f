"""Which of vLLM's page contents can be cut into rows, one for each token, head and layer.

A row must be complete: no scale of it may lie with other tokens or heads, since those are stored,
evicted and loaded apart. Layouts of a backend's own are accepted by name only, because a size does
not say where scales lie.

CPU attention has a form for each instruction set (vLLM's `csrc/cpu/cpu_attn_*.hpp`). In most, each
head of a block has K transposed and then V plain; those for matrix units interleave tokens.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, MLAAttentionSpec

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout import page_formats
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.vllm_adapt import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# MLA's packed latents that keep a token's scales beside the token.
_LATENTS_IN_ROWS = ("fp8_ds_mla", "nvfp4_ds_mla")
# Versions of MLA that keep the scales of a block's tokens after all of their values.
_LATENTS_IN_BLOCKS = ("deepseek_v4",)
# Quantisations whose scales, for each token and head, lie beside the values they belong to.
_PACKED_ROWS = ("PER_TOKEN_HEAD", "TURBOQUANT", "ULTRAQUANT")


def check_spec(spec: Any) -> None:
    """ConfigError, by name and with what to do, unless pages of this spec consist of rows."""
    if isinstance(spec, MambaSpec):
        raise ConfigError(
            "Mamba layers keep one state for all tokens before it, which cannot be cut by token; "
            "run this model without kvpool"
        )
    if not isinstance(spec, AttentionSpec):
        raise ConfigError(
            f"layers of this model keep KV of different forms in a group ({type(spec).__name__}), "
            "which cannot be shared yet; run this model without kvpool"
        )
    if getattr(spec, "non_causal", False):
        raise ConfigError(
            "tokens of a prompt attend to those behind them in this model, so what is computed of "
            "a prefix holds for no other prompt; run this model without kvpool"
        )
    if spec.kv_quant_mode.is_nvfp4:
        raise ConfigError(
            "NVFP4 pages hold the data of all heads before their scales, so they cannot be cut by "
            "head; choose another kv_cache_dtype, such as fp8"
        )
    if compat.packs_heads(spec):
        raise ConfigError(
            f"this attention backend keeps {spec.num_kv_heads} KV heads in {spec.num_head_slots} "
            "planes, so its pages cannot be cut by head; choose another with --attention-backend, "
            "such as TRITON_ATTN"
        )
    if (tokens := compat.tokens_per_state(spec)) != 1:
        raise ConfigError(
            f"this model keeps one KV state for {tokens} tokens, which cannot be cut by token; it "
            "cannot be shared yet"
        )
    if isinstance(spec, MLAAttentionSpec):
        _check_latent(spec)
    elif compat.has_own_content(spec) and not _is_packed_in_rows(spec):
        raise ConfigError(
            f"this attention backend lays out its pages in a way of its own "
            f"({spec.kv_quant_mode.name}, {compat.row_bytes(spec)} bytes a token and head) that "
            "is not known here; choose another with --attention-backend or another kv_cache_dtype"
        )


def _check_latent(spec: MLAAttentionSpec) -> None:
    role = getattr(spec, "cache_role", None)
    if role is not None and role.name == "INDEXER":
        raise ConfigError(
            "the cache of a sparse-attention indexer keeps the scales of a block apart from its "
            "keys, so it cannot be cut by token; models with one cannot be shared yet"
        )
    if getattr(spec, "model_version", None) in _LATENTS_IN_BLOCKS:
        raise ConfigError(
            f"{spec.model_version} keeps the scales of a block apart from its latents, which "
            "cannot be cut by token; it cannot be shared yet"
        )
    if not compat.has_own_content(spec) or _is_packed_in_rows(spec):
        return
    if spec.cache_dtype_str not in _LATENTS_IN_ROWS:
        raise ConfigError(
            f"the latent form {spec.cache_dtype_str!r} is not known here; choose another "
            "kv_cache_dtype"
        )


def _is_packed_in_rows(spec: AttentionSpec) -> bool:
    return any(name in spec.kv_quant_mode.name for name in _PACKED_ROWS)


# Names of vLLM's `_get_attn_isa`: x86 and others without a kernel of their own (vec, vec16), ARM,
# RISC-V, POWER and IBM Z, whose bytes are in the other order (see `vllm_adapt/namespace.py`).
ISAS_WITH_PLAIN_PAGES = ("vec", "vec16", "neon", "rvv", "vsx", "vxe")


def cpu_layer_pages(
    tensor: torch.Tensor,
    key_bytes: int,
    value_bytes: int,
    vllm_config: "VllmConfig",
    *,
    blocks_per_id: int = 1,
) -> LayerPages:
    """The pages of one layer, `[B, H, N, C]`; a row is `key_bytes` of K and `value_bytes` of V.

    ConfigError where the form is not known to be the plain one.
    """
    # Not at the top of the module: builds for other devices need not have it.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        vllm_config.model_config.dtype,
        tensor.shape[2],
        key_bytes // tensor.element_size(),
        vllm_config.cache_config.cache_dtype,
    )
    check_isa(isa, vllm_config.model_config.dtype)
    if key_bytes != value_bytes:
        raise ConfigError(
            f"CPU attention halves its pages into K and V, but this model has {key_bytes} bytes of "
            f"K and {value_bytes} of V a token and head; it cannot be shared from a CPU"
        )
    item = tensor.element_size()
    return page_formats.from_cpu_attention(
        tensor, key_bytes // item, value_bytes // item, blocks_per_id=blocks_per_id
    )


def check_isa(isa: str, dtype: torch.dtype) -> None:
    """ConfigError for forms that interleave tokens, and for unknown names."""
    # Builds for ARM with matrix instructions use them for bf16, and look like others.
    is_tiled = isa == "amx" or (isa == "neon" and dtype == torch.bfloat16)
    if is_tiled or isa not in ISAS_WITH_PLAIN_PAGES:
        raise ConfigError(
            f"CPU attention keeps {dtype} pages in the {isa!r} form on this machine, which cannot "
            "be cut by token yet; run with --dtype float32 or --dtype float16"
        )
