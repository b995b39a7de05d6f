"""What a copier needs of a device: streams, events, memory. The seam between copiers and CUDA.

`CudaStreams` is the real one. `tests/support/late_streams.py` has one that runs on the host and
does everything as late, and in as odd an order, as streams and events permit.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block until it is reached, with the GIL released."""


class Stream(Protocol):
    """Work that a device does in the order in which it was given. No method blocks."""

    def record(self) -> Event:
        """The point after all that was given so far."""

    def wait(self, event: Event) -> None:
        """What is given from now on comes after the event."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies of contiguous bytes, `(target, source)`, between host and device."""

    def launch(self, kernel: Any, num_programs: int, *args: Any, **constants: Any) -> None:
        """A Triton kernel."""


class Streams(Protocol):
    """One device."""

    def enter_thread(self) -> None:
        """To be called by every thread before it uses streams."""

    def new_stream(self) -> Stream:
        """A stream of the caller's own."""

    def model_event(self) -> Event:
        """Where the calling thread's current stream, the model's, is now."""

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 on the device, for use after what the model's stream has been given:
        the allocator hands out memory that such work may still use."""

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 on the host that the device reads without a detour."""


class CudaStreams:
    """An NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda", device
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def enter_thread(self) -> None:
        # A new thread begins on device 0, and would claim memory there.
        torch.cuda.set_device(self._device)

    def new_stream(self) -> "CudaStream":
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return CudaStream(stream)

    def model_event(self) -> Event:
        return _record(torch.cuda.current_stream(self._device))

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class CudaStream:
    """A stream of `CudaStreams`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self) -> Event:
        return _record(self._stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def launch(self, kernel: Any, num_programs: int, *args: Any, **constants: Any) -> None:
        with torch.cuda.stream(self._stream):
            kernel[(num_programs,)](*args, **constants)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: a thread that spins for the length of a copy takes a core from the model's.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
