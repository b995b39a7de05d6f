"""The forms in which vLLM's CPU attention keeps its pages, one for each instruction set it uses.

Established from the kernels that fill the pages (vLLM's `csrc/cpu/cpu_attn_*.hpp`): in most forms
each head of a block holds K transposed and then V plainly, whatever the instruction set. Kernels
for matrix units interleave neighbouring tokens instead.
"""

from typing import TYPE_CHECKING

import torch

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout import page_formats
from vllm_kvpool.layout.pages import LayerPages

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Names of vLLM's `_get_attn_isa`: x86 and others without a kernel of their own (vec, vec16), ARM,
# RISC-V, POWER and IBM Z, whose bytes are in the other order (see `vllm_adapt/namespace.py`).
ISAS_WITH_PLAIN_PAGES = ("vec", "vec16", "neon", "rvv", "vsx", "vxe")


def layer_pages(
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
    """ConfigError for the forms that interleave tokens, and for names not known here."""
    # Builds for ARM with matrix instructions, which are not told from others, use them for bf16.
    is_tiled = isa == "amx" or (isa == "neon" and dtype == torch.bfloat16)
    if is_tiled or isa not in ISAS_WITH_PLAIN_PAGES:
        raise ConfigError(
            f"CPU attention keeps {dtype} pages in the {isa!r} form on this machine, which cannot "
            "be cut by token yet; run with --dtype float32 or --dtype float16"
        )
