"""Differences between the devices that pages lie on, and page-locked staging memory.

A `Device` knows how a thread enters its device, how streams order work, and which memory transfers
need. Ascend's runtime keeps its context per thread: **every** thread that touches pages, or lends
memory to a store that transfers for the device, calls `enter_thread` first.

NPUs are used through `torch.npu`, in the calls that vLLM-Ascend makes, not through torch's generic
streams and events: only newer releases of `torch_npu` have those, and none documents that both
kinds may be mixed. `torch_npu` is imported when the first NPU is met.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.storage.base import Buffer

logger = logging.getLogger(__name__)

HOST_ALIGNMENT = 64 << 10  # of host memory that Ascend's runtime maps for a device
HCCS_ALIGNMENT = 2 << 20  # of HCCS's page tables
DEVICE_COPY_BATCH_BYTES = 64 << 20  # 1.2 ms of PCIe; to start and end a call takes 0.2
PLAIN_NPU_FORMATS = frozenset({-1, 0, 2})  # undefined, NCHW, ND: addressed by strides


class Fence(Protocol):
    """The work of the model's stream at the time when a plan was posted."""

    def synchronize(self) -> None:
        """Block until the stream has done it, without the GIL."""


class Device:
    """The device of one rank's pages; what is not overridden is the host's behaviour.

    Streams and events are the device's own objects; a stream has `wait_event` and `synchronize`.
    """

    is_host = False
    shares_memory = True  # staging memory may be a memory file that other processes map
    memory_alignment = HOST_ALIGNMENT  # of the staging arena, in bytes
    copy_batch_bytes = 8 << 20  # of a copy: the first put, and after the last get the end, wait

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def enter_thread(self) -> None:
        """Prepare the calling thread for the device."""

    def new_stream(self) -> Any:
        """Return a stream beside the model's; None on the host."""
        return None

    def new_event(self) -> Fence | None:
        """Return an event after all work so far of the calling thread's stream.

        The result is None on the host.
        """
        return None

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which this thread launches on `stream`."""
        raise AssertionError("the host has no streams")

    def host_memory(self, nbytes: int) -> memoryview | None:
        """Return page-locked host memory from the device's runtime; None if any memory serves."""
        return None

    def check_format(self, name: str, pages: torch.Tensor) -> None:
        """Raise ConfigError, naming `name`, if the bytes of `pages` are not where strides say."""


class HostDevice(Device):
    """Pages in host memory: a computation has ended when its call returns."""

    is_host = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))


HOST_DEVICE: Device = HostDevice()


class AcceleratorDevice(Device):
    """NVIDIA GPUs, and other devices that torch's generic streams and events serve."""

    copy_batch_bytes = DEVICE_COPY_BATCH_BYTES

    def enter_thread(self) -> None:
        """Choose the device for the thread: threads begin with the first device of the process."""
        if self.torch_device.index is not None:
            torch.accelerator.set_device_index(self.torch_device.index)

    def new_stream(self) -> torch.Stream:
        """Return a stream of torch's generic kind."""
        return torch.Stream(self.torch_device)

    def new_event(self) -> torch.Event:
        """Return an event behind the calling thread's stream; waits for it sleep."""
        # A thread that spins until it is reached takes a core from the model.
        event = torch.Event(self.torch_device, blocking=True)
        event.record()
        return event

    def on_stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread's work goes to `stream`."""
        return stream


def pinned_bytes(nbytes: int) -> torch.Tensor:
    """Return page-locked host memory from the runtime of the process's accelerator, uint8."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def npu_format(pages: torch.Tensor) -> int:
    """Return Ascend's number for how the bytes of a tensor are arranged."""
    import torch_npu

    return int(torch_npu.get_npu_format(pages))


class NpuDevice(Device):
    """An Ascend NPU. `npu` is `torch.npu`; `pinned` and `format_of` call `torch_npu`."""

    shares_memory = False
    memory_alignment = HCCS_ALIGNMENT
    copy_batch_bytes = DEVICE_COPY_BATCH_BYTES

    def __init__(
        self,
        device: torch.device,
        npu: Any = None,
        pinned: Callable[[int], torch.Tensor] = pinned_bytes,
        format_of: Callable[[torch.Tensor], int] = npu_format,
    ) -> None:
        super().__init__(device)
        self._npu = _torch_npu() if npu is None else npu
        self._pinned = pinned
        self._format_of = format_of

    def enter_thread(self) -> None:
        """Choose the card for the thread; its work would go to the first card, or fail."""
        self._npu.set_device(self.torch_device)

    def new_stream(self) -> Any:
        """Return a stream of `torch.npu`."""
        return self._npu.Stream(self.torch_device)

    def new_event(self) -> Fence:
        """Return an event behind the calling thread's stream."""
        event = self._npu.Event()
        event.record()
        fence: Fence = event
        return fence

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread's work goes to `stream`."""
        context: AbstractContextManager[Any] = self._npu.stream(stream)
        return context

    def host_memory(self, nbytes: int) -> memoryview | None:
        """Return memory of Ascend's runtime.

        Mooncake's `ascend` transport refuses host memory that the runtime does not know.
        """
        pinned: Any = self._pinned(nbytes).numpy()  # numpy's stubs do not say that it is a buffer
        return memoryview(pinned)

    def check_format(self, name: str, pages: torch.Tensor) -> None:
        """Raise ConfigError if pages are in one of Ascend's private formats, such as FRACTAL_NZ."""
        number = self._format_of(pages)
        if number not in PLAIN_NPU_FORMATS:
            raise ConfigError(
                f"{name} keeps its KV cache in one of Ascend's private formats (number {number}, "
                "29 being FRACTAL_NZ), whose bytes other engines cannot read; run on a device and "
                "with options that keep KV caches in the ND format"
            )


def _torch_npu() -> Any:
    try:
        import torch_npu  # noqa: F401 - adds `torch.npu`
    except ImportError as error:
        raise ConfigError(
            f"pages on an NPU need torch_npu ({error}); install vllm-ascend with its requirements"
        ) from error
    npu: Any = getattr(torch, "npu")  # noqa: B009 - torch itself does not declare it
    return npu


_MAKERS: dict[str, Callable[[torch.device], Device]] = {
    "cpu": lambda device: HostDevice(),
    "npu": NpuDevice,
}


def device_for(device: torch.device) -> Device:
    """Return the `Device` of a torch device."""
    return _MAKERS.get(device.type, AcceleratorDevice)(device)


# Page-locked staging memory, for NVIDIA GPUs

# Flags of cudaHostRegister: for all contexts, and at the same address on the device.
_PORTABLE, _MAPPED = 1, 2


class CudaLocker:
    """Page-locks memory for one NVIDIA GPU. Used by one thread at a time."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index

    def lock(self, address: int, nbytes: int) -> str:
        """Page-lock memory for the GPU, and return the error's text, or ""."""
        # A new thread begins on device 0, and would claim memory there.
        torch.cuda.set_device(self._device_index)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = runtime.cudaHostRegister(address, nbytes, _PORTABLE | _MAPPED)
        return str(runtime.cudaGetErrorString(result)) if int(result) else ""

    def unlock(self, address: int) -> None:
        """Unlock memory that no copy uses; an error is logged, and the memory stays locked."""
        torch.cuda.set_device(self._device_index)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = int(runtime.cudaHostUnregister(address))
        if result:
            logger.warning("kvpool: staging memory stays page-locked (CUDA error %d)", result)


class PageLock:
    """The page-locked parts of the arena, and of those of other ranks that it has mapped.

    A refusal is a warning: copies then are correct but slow, and not asynchronous.
    """

    def __init__(self, locker: CudaLocker) -> None:
        self._locker = locker
        self._locked: list[int] = []
        self._refused = False
        self.num_bytes = 0  # locked

    def lock(self, part: Buffer) -> None:
        """Lock a part of whole slots: no copy may cross from one part to another."""
        if self._refused:
            return
        reason = self._locker.lock(part.address, part.nbytes)
        if reason:
            self._refused = True
            logger.warning(
                "kvpool: staging memory cannot be page-locked (%s); copies between it and the GPU "
                "are slow. Raise the limit of locked memory (ulimit -l)",
                reason,
            )
        else:
            self._locked.append(part.address)
            self.num_bytes += part.nbytes

    def close(self) -> None:
        """Unlock everything."""
        while self._locked:
            self._locker.unlock(self._locked.pop())


def page_lock_for(pages: Sequence[LayerPages]) -> PageLock | None:
    """Return the page lock for the device of these pages; None if it needs none."""
    device = pages[0].owner[0].device
    if device.type != "cuda":
        return None
    assert device.index is not None, device
    return PageLock(CudaLocker(device.index))
