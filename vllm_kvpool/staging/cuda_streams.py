"""The streams of an NVIDIA GPU, as `copy_triton.py` uses them."""

from typing import Any

import numpy as np
import torch

from vllm_kvpool.layout.pages import Int64s
from vllm_kvpool.staging.copy_triton import DeviceEvent
from vllm_kvpool.staging.driver_copies import driver_copies
from vllm_kvpool.staging.triton_kernel import NUM_WARPS, kernel_constants, move_fragments
from vllm_kvpool.staging.triton_tables import RunTable


class CudaStreams:
    """An NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda", device
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def enter_thread(self) -> None:
        """Choose the GPU for the calling thread."""
        # A new thread begins on device 0 and would allocate memory there.
        torch.cuda.set_device(self._device)

    def new_stream(self) -> "CudaStream":
        """Return a stream of this GPU."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return CudaStream(stream)

    def model_event(self) -> DeviceEvent:
        """Return an event behind the present work of the calling thread's stream."""
        return _record(torch.cuda.current_stream(self._device))

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised uint8 on the GPU, by torch's allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised page-locked uint8 in host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class CudaStream:
    """A stream of `CudaStreams`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def record(self) -> DeviceEvent:
        """Return an event behind the present work of the stream."""
        return _record(self._stream)

    def wait(self, event: DeviceEvent) -> None:
        """Let later work of the stream wait for `event`; the caller does not wait."""
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def copy(self, copies: Int64s) -> None:
        """Queue copies between host and GPU by one call of the driver; RuntimeError if refused."""
        stream = int(self._stream.cuda_stream)
        error = driver_copies()(copies.view(np.uint64), stream)
        if error:
            raise RuntimeError(f"copies between host and GPU failed (CUDA driver error {error})")

    def launch(self, runs: RunTable, num_programs: int, *args: Any, is_gather: bool) -> None:
        """Queue the kernel that moves `runs`; the first call of a kind compiles it."""
        # Triton takes 60 us to find a compiled kernel by its arguments; of ours, only the constants
        # decide.
        constants = kernel_constants(runs, is_gather=is_gather)
        key = tuple(constants.values())
        if (compiled := self._compiled.get(key)) is None:
            with torch.cuda.stream(self._stream):
                launch = move_fragments[(num_programs,)]
                self._compiled[key] = launch(*args, num_warps=NUM_WARPS, **constants)
            return
        stream = int(self._stream.cuda_stream)
        compiled[num_programs, 1, 1](*args, *key, stream=stream)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: a thread that spins during a copy takes a core from the model.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
