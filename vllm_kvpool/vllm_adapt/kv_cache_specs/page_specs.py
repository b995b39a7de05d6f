"""vLLM's page contents that can be cut into rows, one for each token, head and layer.

A row must be complete: no scale of it may lie with other tokens or heads, since those are stored,
evicted and loaded apart. Layouts of a backend's own are accepted by name only, because a size does
not say where scales lie.

CPU attention has a form for each instruction set (vLLM's `csrc/cpu/cpu_attn_*.hpp`): its kernel is
tried at start.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout import page_formats
from vllm_kvpool.layout.pages import LayerPages, SlabMove
from vllm_kvpool.vllm_adapt import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# MLA's packed latents that keep a token's scales beside the token.
_LATENTS_IN_ROWS = ("fp8_ds_mla", "nvfp4_ds_mla")
# DeepSeek V4's latents: 448 numbers in fp8, 64 in bfloat16, and scales behind those of the block.
_COMPRESSED_BYTES, _COMPRESSED_SCALES = 584, 8
_FP8_TYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# An indexer's keys have one float32 for so many numbers of one byte.
INDEXER_GROUP, INDEXER_SCALE_BYTES = 128, 4
# Backends with planes -> bytes of K's elements that lie together; 0: rows as everywhere.
_PLANES = {"B12X": 0, "ROCM_ATTN": 16}
# Quantisations whose scales, for each token and head, lie beside the values they belong to.
_PACKED_ROWS = ("PER_TOKEN_HEAD", "TURBOQUANT", "ULTRAQUANT")


def check_spec(spec: Any) -> None:
    """Raise ConfigError, by name and with what to do, unless pages of this spec consist of rows."""
    if not isinstance(spec, AttentionSpec):
        raise ConfigError(
            f"layers of this model keep KV of different forms in a group ({type(spec).__name__}), "
            "which cannot be shared yet; run this model without kvpool"
        )
    if version := getattr(spec, "model_version", None):
        raise ConfigError(
            f"this model keeps compressed latents in {version}'s form and is another one, so what "
            "else it keeps is not known; run it without kvpool"
        )
    if getattr(spec, "non_causal", False):
        raise ConfigError(
            "tokens of a prompt attend to those behind them in this model, so what is computed of "
            "a prefix holds for no other prompt; run this model without kvpool"
        )
    if compat.packs_heads(spec) and not (_is_nvfp4(spec) or _has_planes(spec)):
        raise ConfigError(
            f"this attention backend keeps {spec.num_kv_heads} KV heads "
            f"({spec.kv_quant_mode.name}) in a form that is not known here, so its pages cannot be "
            "cut by head; choose another with --attention-backend, such as TRITON_ATTN, or another "
            "--kv-cache-dtype, such as fp8"
        )
    if (tokens := compat.tokens_per_state(spec)) != 1 and not compat.is_indexer(spec):
        raise ConfigError(
            f"this model keeps one KV state for {tokens} tokens, which cannot be cut by token yet; "
            "run this model without kvpool"
        )
    if isinstance(spec, MLAAttentionSpec):
        _check_latent(spec)
    elif (
        compat.has_own_content(spec)
        and not compat.packs_heads(spec)
        and not _is_packed_in_rows(spec)
    ):
        raise ConfigError(
            f"this attention backend lays out its pages in a way of its own "
            f"({spec.kv_quant_mode.name}, {compat.row_bytes(spec)} bytes a token and head) that "
            "is not known here; choose another with --attention-backend or another kv_cache_dtype"
        )


def _check_latent(spec: MLAAttentionSpec) -> None:
    if compat.is_indexer(spec) and (compat.has_own_content(spec) or _scale_bytes(spec) is None):
        raise ConfigError(
            f"the keys of a sparse-attention indexer have {compat.row_bytes(spec)} bytes a token "
            "here, which is not known; run this model without kvpool"
        )
    if not compat.has_own_content(spec) or _is_packed_in_rows(spec):
        return
    if spec.cache_dtype_str not in _LATENTS_IN_ROWS:
        raise ConfigError(
            f"the latent form {spec.cache_dtype_str!r} is not known here; choose another "
            "kv_cache_dtype"
        )


def check_compressed(spec: Any) -> None:
    """Raise ConfigError unless the form of DeepSeek V4's latents of this spec is known."""
    if compat.has_own_content(spec) and compat.row_bytes(spec) != _COMPRESSED_BYTES:
        raise ConfigError(
            f"DeepSeek V4's latents have {compat.row_bytes(spec)} bytes here, whose form is not "
            "known; choose another --kv-cache-dtype"
        )


def _is_nvfp4(spec: AttentionSpec) -> bool:
    """Return True if K and V of each head are slots of their own, with data and scales apart."""
    slots = getattr(spec, "num_head_slots", None)
    return bool(spec.kv_quant_mode.is_nvfp4) and slots == 2 * spec.num_kv_heads


def _has_planes(spec: AttentionSpec) -> bool:
    """Return True if K of all heads is one slot and V the other."""
    plane = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    slots = getattr(spec, "num_head_slots", None)
    content = getattr(spec, "state_content_bytes", None)
    return not spec.kv_quant_mode.is_nvfp4 and slots == 2 and content == plane


def _scale_bytes(spec: MLAAttentionSpec) -> int | None:
    """Return the bytes of scales in an indexer's row; None if they cannot be told from the keys."""
    if spec.dtype.itemsize > 1:
        return 0
    groups, rest = divmod(int(spec.head_size), INDEXER_GROUP + INDEXER_SCALE_BYTES)
    return None if rest else groups * INDEXER_SCALE_BYTES


def _is_packed_in_rows(spec: AttentionSpec) -> bool:
    return any(name in spec.kv_quant_mode.name for name in _PACKED_ROWS)


def device_layer_pages(
    tensor: torch.Tensor,
    spec: AttentionSpec,
    backend: str,
    *,
    is_rocm: bool = False,
    blocks_per_id: int = 1,
) -> LayerPages:
    """Return the pages of one layer as its attention backend writes them on a GPU.

    ConfigError if it is not known in which form that is.
    """
    if _is_nvfp4(spec):
        return page_formats.from_nvfp4(
            tensor,
            spec.num_kv_heads,
            swizzled=compat.mixes_nvfp4_scales(),
            blocks_per_id=blocks_per_id,
        )
    if compat.packs_heads(spec):
        if backend not in _PLANES:
            raise ConfigError(
                f"the attention backend {backend or 'of this layer'} keeps K and V in planes in a "
                "form that is not known here; choose another with --attention-backend, such as "
                "TRITON_ATTN"
            )
        return page_formats.from_planes(
            tensor, spec.num_kv_heads, pack_bytes=_PLANES[backend], blocks_per_id=blocks_per_id
        )
    if getattr(spec, "model_version", None) and compat.has_own_content(spec):
        check_compressed(spec)
        return page_formats.from_values_and_scales(
            tensor, _COMPRESSED_SCALES, blocks_per_id=blocks_per_id
        )
    if compat.is_indexer(spec) and (scale_bytes := _scale_bytes(spec)):
        shuffled = is_rocm and tensor.shape[2] > 1
        return page_formats.from_values_and_scales(
            tensor, scale_bytes, shuffled=shuffled, blocks_per_id=blocks_per_id
        )
    return page_formats.from_token_content(tensor, blocks_per_id=blocks_per_id)


def needs_gpu(spec: AttentionSpec) -> bool:
    """Return True if the places of a row's bytes are known for GPUs alone."""
    has_scales_apart = compat.is_indexer(spec) and _scale_bytes(spec) != 0
    return bool(compat.packs_heads(spec) or has_scales_apart)


def cpu_layer_pages(
    tensor: torch.Tensor,
    key_bytes: int,
    value_bytes: int,
    vllm_config: "VllmConfig",
    *,
    isa: str = "",
    blocks_per_id: int = 1,
) -> LayerPages:
    """Return the pages of one layer, `[B, H, N, C]`.

    A row is `key_bytes` of K and `value_bytes` of V.
    `isa` names a kernel of CPU attention; by default the one that vLLM chooses. ConfigError if the
    form that it writes is not known.
    """
    # Not at the top of the module: builds for other devices need not have it.
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    if key_bytes != value_bytes:
        raise ConfigError(
            f"CPU attention halves its pages into K and V, but this model has {key_bytes} bytes of "
            f"K and {value_bytes} of V a token and head; it cannot be shared from a CPU"
        )
    block, dim = tensor.shape[2], key_bytes // tensor.element_size()
    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    isa = isa or _get_attn_isa(dtype, block, dim, cache_dtype)
    if tensor.element_size() == dtype.itemsize:
        cache_dtype = "auto"
    form = _form_of_kernel(isa, (block, dim), dtype, tensor.dtype, cache_dtype)
    return page_formats.from_cpu_attention(tensor, dim, dim, form=form, blocks_per_id=blocks_per_id)


@functools.cache
def _form_of_kernel(
    isa: str, shape: tuple[int, int], dtype: torch.dtype, stored: torch.dtype, cache_dtype: str
) -> page_formats.CpuForm:
    from vllm import _custom_ops as ops

    def write(k_thd: torch.Tensor, v_thd: torch.Tensor, halves: Sequence[torch.Tensor]) -> None:
        slots, rows = torch.arange(len(k_thd)), (k_thd.to(dtype), v_thd.to(dtype))
        ops.cpu_attn_reshape_and_cache(*rows, *halves, slots, isa, kv_cache_dtype=cache_dtype)

    value_type = _FP8_TYPES.get(cache_dtype, stored)
    try:
        form = form_written_by(write, *shape, stored, value_type)
    except RuntimeError as error:
        raise ConfigError(
            f"vLLM's {isa!r} kernel of CPU attention refuses blocks of {shape[0]} tokens of "
            f"{shape[1]} numbers in {dtype} ({error}); choose another --block-size or --dtype"
        ) from error
    if form is None:
        raise ConfigError(
            f"CPU attention keeps {dtype} pages in the {isa!r} form on this machine, whose order "
            "of elements is not known here; run with --dtype float32"
        )
    return form


def form_written_by(
    write: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], None],
    block: int,
    dim: int,
    stored: torch.dtype,
    value_type: torch.dtype,
) -> page_formats.CpuForm | None:
    """Return the known form that `write` gives a block of one head; None if it is another.

    `write(k_thd, v_thd, halves)` puts rows into the two halves of the pages. A kernel is tried, as
    its name does not say: "neon" packs bfloat16 only in builds for ARM with matrix instructions.
    """
    from vllm_kvpool.staging.copy_cpu import CpuCopier  # it imports numba

    generator = torch.Generator().manual_seed(1)
    shape = (2, block, 1, dim)  # of K and V; values that eight bits hold exactly
    quarters, powers = (torch.randint(0, 4, shape, generator=generator) for _ in range(2))
    k_thd, v_thd = (1 + quarters / 4) / 2.0**powers
    pages_bhnc = torch.zeros(1, 1, block, 2 * dim, dtype=stored)
    write(k_thd, v_thd, pages_bhnc.view(1, 1, 2 * block, dim).chunk(2, dim=2))
    wanted = torch.cat([k_thd, v_thd], dim=-1).to(value_type).view(torch.uint8).flatten()
    found = torch.empty_like(wanted)
    address, place = np.array([found.data_ptr()]), np.array([(0, 1, 0, 1)])
    move = SlabMove(address, place, [0], 0, 0, block, 0, block)
    for form in page_formats.CPU_FORMS:
        if not form.fits(block, dim, dim, stored.itemsize):
            continue
        CpuCopier([page_formats.from_cpu_attention(pages_bhnc, dim, dim, form=form)]).gather([move])
        if torch.equal(found, wanted):
            return form
    return None
