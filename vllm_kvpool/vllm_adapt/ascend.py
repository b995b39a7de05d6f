"""Ascend: pages that vLLM-Ascend registers, and the Mooncake engine that it shares with the pool.

vLLM's own layers are one `[B, H, N, C]` tensor; vLLM-Ascend's are several tensors, or one of five
dimensions. Shapes and sizes must be what the engine's configuration implies; any other layout is
refused at the start, by the layer's name, rather than guessed. Only this module imports
`vllm_ascend`, lazily.

Legend: B kernel blocks, N tokens per kernel block, H KV heads, D key row, E value row.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout import page_formats
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.staging.devices import Device
from vllm_kvpool.storage.mooncake_engine import NativeEngine, use_engine_of
from vllm_kvpool.vllm_adapt import compat


def share_engine() -> None:
    """Use the process's one Mooncake engine that vLLM-Ascend's connectors use too, on NPUs."""
    if compat.device_type() == "npu":
        use_engine_of("ascend", _engine_of_vllm_ascend)


def _engine_of_vllm_ascend(host: str) -> NativeEngine:
    from vllm_ascend.distributed.kv_transfer.utils import mooncake_transfer_engine

    shared: Any = mooncake_transfer_engine.global_te
    # Its `register_buffer` works once in a process, for the first caller: we register ourselves.
    return cast("NativeEngine", shared.get_transfer_engine(host, device_name=None))


def environment_variables() -> Mapping[str, Callable[[], Any]]:
    """Return vLLM-Ascend's readers of its environment variables, by name.

    The result is empty on other devices.
    """
    if compat.device_type() != "npu":
        return {}
    try:
        from vllm_ascend import envs
    except ImportError:  # another plugin runs the device
        return {}
    return cast("Mapping[str, Callable[[], Any]]", envs.env_variables)


def generation() -> str:
    """Return the generation of NPUs that vLLM-Ascend is built for ("A2"); "" on other devices."""
    if compat.device_type() != "npu":
        return ""
    try:
        from vllm_ascend.utils import get_ascend_device_type
    except ImportError:  # another plugin runs the device
        return ""
    return str(get_ascend_device_type().name)


NZ_COLUMNS = 16  # FRACTAL_NZ cuts rows into pieces of so many elements
_OF_OTHER_LATENTS = (
    *("cache_sparse_li_c8", "cache_sparse_sfa_c8", "scale_dim"),
    "sparse_head_dim",  # in 0.23.0 alone
    "store_on_host",  # since 0.26.0rc1
)
"""Fields of vLLM-Ascend's spec that are set where more or less than a latent is in a page."""
_REMEDY = "this layer cannot be shared; run it without KVPoolConnector"


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected form of this rank's layers. Bytes are of one token's row of one head."""

    num_blocks: int  # the scheduler's
    block_size: int
    num_heads: int
    key_bytes: int
    value_bytes: int
    is_latent: bool  # K and V are two parts of one latent, cut where the backend chooses


def is_vllm_tensor(value: Any) -> bool:
    """Return True if a value is vLLM's own form, one `[B, H, N, C]` tensor.

    NPU backends have none: their four-dimensional tensors have other orders.
    """
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.device.type != "npu"


def tensors_of(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a registered value."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(part for part in value if isinstance(part, torch.Tensor))
    return ()


def from_registered(name: str, value: Any, expected: Expected, device: Device) -> LayerPages:
    """Return the pages of a layer that is not in vLLM's own form.

    Raises ConfigError if they cannot be shared.
    """
    for tensor in tensors_of(value):
        device.check_format(name, tensor)
    key, value_part = _key_and_value(name, value, expected)
    _check_pair(name, key, value_part, expected)
    ratio = expected.block_size // key.shape[1]
    return page_formats.from_pair(key, value_part, blocks_per_id=ratio)


def refuse_options(additional_config: Any) -> None:
    """Raise ConfigError for options of vLLM-Ascend that change pages but not their shape."""
    if isinstance(additional_config, Mapping) and additional_config.get("enable_kv_nz"):
        raise ConfigError(
            "enable_kv_nz keeps the latent in Ascend's NZ order inside plain tensors, which "
            "engines without it cannot read; take enable_kv_nz out of additional_config"
        )


def refuse_repeated(names: Iterable[str], kv_caches: Mapping[str, Any]) -> None:
    """Raise ConfigError if two layers of one group are the same memory.

    Layers that share another's KV are registered under names that no group has, and are saved and
    loaded with the layer that owns the KV.
    """
    owners: dict[tuple[int, ...], str] = {}
    for name in names:
        place = tuple(tensor.data_ptr() for tensor in tensors_of(kv_caches[name]))
        other = owners.setdefault(place, name)
        if place and other != name:
            raise ConfigError(
                f"{name} and {other} are in one KV cache group and have the same memory, so they "
                "cannot be told apart; run this model without KVPoolConnector"
            )


def is_plain_latent(spec: Any) -> bool:
    """Return True for vLLM-Ascend's spec of an MLA latent without scales or an index."""
    return type(spec).__name__ == "AscendMLAAttentionSpec" and not any(
        getattr(spec, name, None) for name in _OF_OTHER_LATENTS
    )


def _key_and_value(name: str, value: Any, expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return _halves(name, value, expected)
    if not isinstance(value, (tuple, list)) or len(tensors_of(value)) != len(value):
        raise ConfigError(f"{name} registers a {type(value).__name__} and no tensors; {_REMEDY}")
    if len(value) != 2:
        what = (
            "sparse attention's packed latent or index (SFA)"
            if len(value) == 1
            else "a packed cache with index and scales (DeepSeek V4, sparse attention)"
        )
        raise ConfigError(f"{name} registers {len(value)} tensors, {what}; {_REMEDY}")
    first, second = value
    if first.dim() != 4 or second.dim() != 4:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ConfigError(
            f"{name} registers tensors of shape {shapes}, which are states (Mamba, linear "
            f"attention) and no K and V; {_REMEDY}"
        )
    return first, second


def _halves(
    name: str, pages: torch.Tensor, expected: Expected
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `[2, B, N, H, D]` or `[B, 2, N, H, D]`."""
    shape = tuple(pages.shape)
    if pages.dim() != 5:
        raise ConfigError(
            f"{name} registers one tensor of shape {shape}, of which K and V cannot be told apart; "
            f"{_REMEDY}"
        )
    of_blocks = [dim for dim in (0, 1) if shape[dim] != 2 and shape[1 - dim] == 2]
    if not of_blocks:
        raise ConfigError(
            f"{name} registers one tensor of shape {shape}; one of its first two dimensions must "
            f"be 2, for K and V, and the other the blocks; {_REMEDY}"
        )
    key, value = pages.unbind(1 - of_blocks[0])
    return key, value


def _check_pair(name: str, key: torch.Tensor, value: torch.Tensor, expected: Expected) -> None:
    """Raise ConfigError for another order than `[B, N, H, D]`, or for unexpected sizes."""
    shape = tuple(key.shape)
    _refuse_nz(name, key, expected)
    tokens, heads = shape[1], shape[2]
    if heads != expected.num_heads or tokens < 1 or expected.block_size % tokens:
        raise ConfigError(
            f"{name} registers K of shape {shape}; expected were {expected.num_heads} heads in the "
            f"third dimension, and in the second a number of tokens that divides the block size "
            f"{expected.block_size}; {_REMEDY}"
        )
    least = expected.num_blocks * (expected.block_size // tokens)
    if shape[0] < least:
        raise ConfigError(
            f"{name} registers {shape[0]} blocks of {tokens} tokens, but the scheduler hands out "
            f"{least} of them; {_REMEDY}"
        )
    rows = tuple(part.shape[3] * part.element_size() for part in (key, value))
    wanted = (expected.key_bytes, expected.value_bytes)
    if sum(rows) != sum(wanted) or (rows != wanted and not expected.is_latent):
        raise ConfigError(
            f"{name} keeps K and V in rows of {rows[0]} and {rows[1]} bytes where the engine's "
            f"configuration says {wanted[0]} and {wanted[1]}: its KV cache is quantised by other "
            f"means than kv_cache_dtype, or scales lie beside it; {_REMEDY}"
        )


def _refuse_nz(name: str, key: torch.Tensor, expected: Expected) -> None:
    """Refuse pages of a 310P: `[B, H * D / 16, N, 16]`, row pieces before tokens."""
    _, pieces, tokens, columns = key.shape
    row = expected.num_heads * expected.key_bytes // key.element_size()
    is_nz = columns == NZ_COLUMNS and pieces == -(-row // NZ_COLUMNS)
    if is_nz and tokens and expected.block_size % tokens == 0 and tokens != expected.num_heads:
        raise ConfigError(
            f"{name} registers K of shape {tuple(key.shape)}, the NZ order of Ascend 310P, which "
            f"cuts rows into pieces of {NZ_COLUMNS} elements and cannot be cut by head; {_REMEDY}"
        )
