"""`Streams` without a device: all is done on the host, as late as streams and events permit.

What is given to a stream waits until somebody waits for an event, and is then done in an order
drawn at random among those that the order within streams and the events allow. So a missing event,
a buffer used again too early, or a host buffer written over before it was read, gives wrong bytes.
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
    """A point in a `LateStream`."""

    def __init__(self, streams: "LateStreams") -> None:
        self._streams = streams
        self.reached = False

    def synchronize(self) -> None:
        self._streams.run_until(self)


class LateStream:
    """Work that has not been done yet, in order; an event among it is one to be waited for."""

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
        """Anything else, such as what a model computes."""
        self.waiting.append(work)

    def step(self) -> bool:
        """Do the next piece of work; False where there is none, or an event is not reached yet."""
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
    """`model` is the stream that the model's work is given to."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: list[LateStream] = []
        self.model = self.new_stream()

    def enter_thread(self) -> None:
        """Nothing: the host is everybody's."""

    def new_stream(self) -> LateStream:
        stream = LateStream(self)
        self._streams.insert(self._random.randint(0, len(self._streams)), stream)
        return stream

    def model_event(self) -> LateEvent:
        return self.model.record()

    def never(self) -> LateEvent:
        """An event that nothing leads to."""
        return LateEvent(self)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return self._random_memory(nbytes)

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        return self._random_memory(nbytes)

    def _random_memory(self, nbytes: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._random.getrandbits(32))
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)

    def run_until(self, event: LateEvent) -> None:
        """Do work in random order until the event is reached, and no more than that."""
        while not event.reached:
            # The first that can go on does, for a while: some run far ahead of others.
            if self._random.random() < CHANGE_OF_ORDER:
                self._random.shuffle(self._streams)
            assert any(stream.step() for stream in self._streams), "streams wait for one another"
