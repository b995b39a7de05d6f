"""`Streams` without a device: work runs on the host, as late as streams and events permit.

Work of a stream waits until a thread waits for an event. It then runs in random order, within the
order of each stream and of the events. A missing event, a buffer reused too early, or a host buffer
overwritten before it was read therefore gives wrong bytes.
"""

import ctypes
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm_kvpool.layout.pages import Int64s
    from vllm_kvpool.staging.copy_triton import DeviceEvent
    from vllm_kvpool.staging.triton_tables import RunTable

CHANGE_OF_ORDER = 0.1  # per piece of work


class LateEvent:
    """An event recorded in a `LateStream`."""

    def __init__(self, streams: "LateStreams") -> None:
        self._streams = streams
        self.reached = False

    def synchronize(self) -> None:
        self._streams.run_until(self)


class LateStream:
    """Work that has not run yet, in order. An event in `waiting` delays the work behind it."""

    def __init__(self, streams: "LateStreams") -> None:
        self._streams = streams
        self.waiting: deque[LateEvent | Callable[[], None]] = deque()

    def record(self) -> LateEvent:
        event = LateEvent(self._streams)
        self.do(lambda: setattr(event, "reached", True))
        return event

    def wait(self, event: "DeviceEvent") -> None:
        assert isinstance(event, LateEvent)
        self.waiting.append(event)

    def copy(self, copies: "Int64s") -> None:
        for target, source, nbytes in copies.tolist():
            self.do(partial(ctypes.memmove, target, source, nbytes))

    def launch(self, runs: "RunTable", num_programs: int, *args: Any, is_gather: bool) -> None:
        from vllm_kvpool.staging.triton_kernel import kernel_constants, move_fragments

        assert num_programs > 0
        constants = kernel_constants(runs, is_gather=is_gather)
        self.do(lambda: move_fragments[(num_programs,)](*args, **constants))

    def do(self, work: Callable[[], Any]) -> None:
        """Add any other work, such as a model's computation."""
        self.waiting.append(work)

    def step(self) -> bool:
        """Run the next piece of work. Return False if there is none, or an event blocks it."""
        while self.waiting and isinstance(self.waiting[0], LateEvent):
            if not self.waiting[0].reached:
                return False
            self.waiting.popleft()
        if not self.waiting:
            return False
        work = self.waiting.popleft()
        assert not isinstance(work, LateEvent)
        work()
        return True


class LateStreams:
    """A host in place of a device; `model` is the stream of the model's work."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: list[LateStream] = []
        self.model = self.new_stream()

    def enter_thread(self) -> None:
        """Do nothing: host memory has no device context."""

    def new_stream(self) -> LateStream:
        stream = LateStream(self)
        self._streams.insert(self._random.randint(0, len(self._streams)), stream)
        return stream

    def model_event(self) -> LateEvent:
        return self.model.record()

    def never(self) -> LateEvent:
        """Return an event that is never reached."""
        return LateEvent(self)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return self._random_memory(nbytes)

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        return self._random_memory(nbytes)

    def _random_memory(self, nbytes: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._random.getrandbits(32))
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)

    def run_until(self, event: LateEvent) -> None:
        """Run work in random order until the event is reached."""
        while not event.reached:
            # One stream keeps running for a while, so that some run far ahead of others.
            if self._random.random() < CHANGE_OF_ORDER:
                self._random.shuffle(self._streams)
            assert any(stream.step() for stream in self._streams), "streams wait for one another"
