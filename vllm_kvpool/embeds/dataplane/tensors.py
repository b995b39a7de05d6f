"""Items as tensors: their shape, their host memory, and their bytes for the data plane.

An item is one tensor, [rows, ...]. Encoders leave it on a device, maybe not computed yet: the
model's thread starts its copy to the host, and a writer waits for it.
"""

import contextlib
import mmap
import queue
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_kvpool.embeds.dataplane.row_bytes import Bytes
from vllm_kvpool.embeds.protocol.rows import DTYPE_BYTES, ItemShape, known_shape
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.staging.devices import Device, device_for, pinned_bytes

Tensor = torch.Tensor


def shape_of(tensor: torch.Tensor) -> ItemShape:
    """Return the shape of an encoder's output, [rows, ...]. ConfigError if it cannot be sent."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not tensor.ndim or not tensor.numel():
        raise ConfigError(f"the output has shape {tuple(tensor.shape)}, not [rows, ...]")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"the output has dtype {dtype}; only real numbers can be sent")
    return known_shape(ItemShape(tensor.shape[0], dtype, tuple(tensor.shape[1:])))


PAGES = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
HUGE_PAGE_BYTES = 2 << 20
MIN_HUGE_BYTES = 8 << 20
"""Smaller items use the heap, whose pages are often committed already."""
MOST_KEPT_BYTES = 256 << 20
MOST_SLACK = 2  # kept memory larger than n times the need waits for a larger item


class MemoryPool:
    """Memory of large items, kept for the next ones once the engine has freed a tensor.

    Committing pages costs from half a copy to many times that. At most `most_bytes` are kept; of
    what fits, the smallest is used. One thread calls `take`; memory returns on any thread that
    drops the last tensor, even during garbage collection, so `_returned` is a queue without a
    lock.
    """

    def __init__(self, most_bytes: int = 0) -> None:
        self._most_bytes = min(most_bytes, MOST_KEPT_BYTES)
        self._kept: list[mmap.mmap] = []  # oldest first
        self._returned: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()

    @property
    def kept_bytes(self) -> int:
        """Kept bytes, as far as `take` has noticed."""
        return sum(map(len, self._kept))

    def take(self, nbytes: int) -> Bytes:
        """Return so many undefined bytes; they go back to the pool when nothing refers to them."""
        if nbytes < MIN_HUGE_BYTES:
            return np.empty(nbytes, np.uint8)
        wanted = nbytes + HUGE_PAGE_BYTES
        memory = self._reused(wanted)
        is_new = memory is None
        if memory is None:
            memory = mmap.mmap(-1, wanted, PAGES)
        start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE_BYTES
        if is_new:
            # Pages are committed when touched; huge ones are few.
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                memory.madvise(
                    mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
                )
        # An array of its own, so that it does not count as a part of something larger.
        array: Bytes = np.frombuffer(memory, np.uint8, nbytes, start)
        if len(memory) <= self._most_bytes:
            weakref.finalize(array, self._returned.put, memory).atexit = False
        return array

    def _reused(self, nbytes: int) -> mmap.mmap | None:
        while not self._returned.empty():
            self._kept.append(self._returned.get_nowait())
        fitting = [each for each in self._kept if nbytes <= len(each) <= MOST_SLACK * nbytes]
        found = min(fitting, key=len, default=None)
        if found is not None:
            self._kept.remove(found)
        while self.kept_bytes > self._most_bytes:
            del self._kept[0]
        return found


def allocate(shape: ItemShape, memory: MemoryPool) -> Bytes:
    """Return undefined host memory for an item: an array [rows, row_bytes]."""
    return memory.take(shape.nbytes).reshape(shape.rows, shape.row_bytes)


def tensor_of(shape: ItemShape, data: Bytes) -> torch.Tensor:
    """Return the tensor in the memory that `allocate` returned; it keeps the memory alive."""
    flat = torch.frombuffer(data, dtype=getattr(torch, shape.dtype))
    return flat.view(-1, *shape.row_shape)


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """Return a contiguous host tensor's memory as uint8 [rows, row_bytes].

    The array keeps it alive.
    """
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
        """Return the contiguous tensor, once it is complete. Blocks.

        Any thread, any number of times.
        """
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
