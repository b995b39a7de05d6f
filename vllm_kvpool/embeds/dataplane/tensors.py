"""Items as tensors: their shape, their host memory, and their bytes for the data plane.

An item is one tensor of embeddings, [rows, ...], and any number of others with the same rows.
Encoders leave them on a device, maybe not computed yet: the model's thread starts their copy to
the host, and a writer waits for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvpool.embeds.dataplane.host_memory import MemoryPool
from vllm_kvpool.embeds.dataplane.row_bytes import Bytes
from vllm_kvpool.embeds.protocol.rows import DTYPE_BYTES, ItemShape, Plane, known_shape
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.staging.devices import Device, device_for, pinned_bytes

Tensor = torch.Tensor
EMBEDDING = "embedding"
"""The name of the first plane."""


def shape_of(tensor: torch.Tensor, aux: Mapping[str, torch.Tensor] | None = None) -> ItemShape:
    """The shape of an item: its embeddings, then the other planes. ConfigError if it cannot be
    sent.
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


def allocate(shape: ItemShape, memory: MemoryPool) -> list[Bytes]:
    """Undefined host memory for an item: an array [rows, row_bytes] for each plane."""
    return [
        memory.take(shape.rows * size).reshape(shape.rows, size) for size in shape.plane_row_bytes
    ]


def tensors_of(shape: ItemShape, planes: Sequence[Bytes]) -> list[torch.Tensor]:
    """The tensors in the memory that `allocate` returned; they keep it alive."""
    return [
        torch.frombuffer(array, dtype=getattr(torch, plane.dtype)).view(-1, *plane.row_shape)
        for array, plane in zip(planes, shape.planes, strict=True)
    ]


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """A contiguous host tensor's memory as uint8 [rows, row_bytes]; the array keeps it alive."""
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
    _event: Any  # set when the copy is complete; None: it is

    def wait(self) -> torch.Tensor:
        """The contiguous tensor, once it is complete. Blocks; any thread, any number of times."""
        if self._event is not None:
            self._device.enter_thread()
            self._event.synchronize()
        return self._tensor


def to_host(tensor: torch.Tensor, device: Device | None = None) -> HostCopy:
    """Start to copy a tensor to the host, after all work of the calling thread's stream.

    Call it on the thread that computes the tensor; it does not block there. A contiguous host
    tensor is used as it is and must not change; a device's may be overwritten by later work of
    that stream.
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
