"""Items as tensors: what shape they have, and their bytes as the data plane wants them.

An item is one tensor of embeddings, [rows, ...], and any number of others that have the same rows.
Encoders leave them on a device, behind work that has not been done yet; the model's thread starts
their copy to the host, and whoever writes them waits for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvpool.embeds.kept_memory import KeptMemory
from vllm_kvpool.embeds.rows import DTYPE_BYTES, ItemShape, Plane, known_shape
from vllm_kvpool.embeds.run_bytes import Bytes
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.staging.devices import Device, device_for, pinned_bytes

Tensor = torch.Tensor
EMBEDDING = "embedding"
"""The name of the first plane."""


def shape_of(tensor: torch.Tensor, aux: Mapping[str, torch.Tensor] | None = None) -> ItemShape:
    """The shape of an item: its embeddings, [rows, ...], then the other planes in their order.

    ConfigError for tensors that cannot be sent.
    """
    others = aux or {}
    if EMBEDDING in others:
        raise ConfigError(f"two planes of an item are named {EMBEDDING!r}")
    rows = tensor.shape[0] if tensor.ndim else 0
    named = {EMBEDDING: tensor, **others}
    planes = tuple(_plane(name, each, rows) for name, each in named.items())
    return known_shape(ItemShape(rows, planes))


def _plane(name: str, tensor: torch.Tensor, rows: int) -> Plane:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.shape[:1] != (rows,) or not tensor.numel():
        raise ConfigError(f"plane {name!r} has shape {tuple(tensor.shape)}, not [{rows}, ...]")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"plane {name!r} has dtype {dtype}; only real numbers can be sent")
    return Plane(name, dtype, tuple(tensor.shape[1:]))


def allocate(shape: ItemShape, memory: KeptMemory) -> list[Bytes]:
    """Host memory for an item, undefined bytes: for each plane what `as_bytes` says of a tensor."""
    return [
        memory.take(shape.rows * size).reshape(shape.rows, size) for size in shape.plane_row_bytes
    ]


def tensors_of(shape: ItemShape, planes: Sequence[Bytes]) -> list[torch.Tensor]:
    """The tensors whose bytes `allocate` has made; they keep the memory alive."""
    return [
        torch.frombuffer(array, dtype=getattr(torch, plane.dtype)).view(-1, *plane.row_shape)
        for array, plane in zip(planes, shape.planes, strict=True)
    ]


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor on the host, [rows, ...] of any dtype, as uint8 of shape
    [rows, row_bytes]. The array keeps the memory alive."""
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.is_contiguous(), tensor.stride()
    flat: Any = tensor.detach().view(-1).view(torch.uint8)
    array: Bytes = flat.view(tensor.shape[0], -1).numpy()
    return array


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor that is, or soon will be, on the host."""

    _tensor: torch.Tensor
    _device: Device
    _event: Any  # after which the bytes are there; None if they are

    def wait(self) -> torch.Tensor:
        """The contiguous tensor, once its bytes are there. Blocks; any thread, any number of
        times."""
        if self._event is not None:
            self._device.enter_thread()
            self._event.synchronize()
        return self._tensor


def to_host(tensor: torch.Tensor, device: Device | None = None) -> HostCopy:
    """Start to bring a tensor to the host, behind all that the calling thread's stream was given.

    To be called on the thread that computes it, where it does not block. A contiguous tensor on the
    host is taken as it is, and must stay so; what is on a device may be let go of and overwritten
    by work of that stream. `device` is the tensor's unless given.
    """
    device = device_for(tensor.device) if device is None else device
    source = tensor.detach().contiguous()
    if device.is_host:
        return HostCopy(source, device, None)
    memory = device.host_memory(source.nbytes)
    if memory is None:
        raw = pinned_bytes(source.nbytes)
    else:
        raw = torch.frombuffer(memory, dtype=torch.uint8)
    target = raw.view(source.dtype).view(source.shape)
    target.copy_(source, non_blocking=True)
    return HostCopy(target, device, device.new_event())
