"""Calls of the GPU copier, over streams that stop until a test releases them."""

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.staging.page_bench import CHUNK, Cell, Pages, block_table
from vllm_kvpool.staging.copy_triton import TritonCopier
from vllm_kvpool.staging.triton_tables import RunTable

LIMIT_S = 10.0


class HeldEvent:
    """An event of a device stream that a test lets happen."""

    def __init__(self, streams: "HeldStreams") -> None:
        self._streams = streams

    def synchronize(self) -> None:
        streams = self._streams
        streams.waiting.release()
        assert streams.go_on.wait(LIMIT_S)


@dataclass
class HeldStream:
    streams: "HeldStreams"

    def record(self) -> HeldEvent:
        return HeldEvent(self.streams)

    def wait(self, event: Any) -> None:
        """Do nothing: `HeldEvent.synchronize` does all the waiting."""

    def copy(self, copies: np.ndarray) -> None:
        """Do nothing: no byte moves."""

    def launch(self, runs: RunTable, num_programs: int, *args: Any, is_gather: bool) -> None:
        self.streams.launched.append(is_gather)


@dataclass
class HeldStreams:
    launched: list[bool] = field(default_factory=list)
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go_on: threading.Event = field(default_factory=threading.Event)

    def enter_thread(self) -> None:
        """Do nothing: there is no device."""

    def new_stream(self) -> HeldStream:
        return HeldStream(self)

    def model_event(self) -> HeldEvent:
        return HeldEvent(self)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


def test_a_call_starts_its_copies_while_another_waits_for_its_own() -> None:
    """Otherwise the link would idle between two batches."""
    streams, pages = HeldStreams(), Pages(num_layers=1, num_heads=1)
    copier = TritonCopier(pages.layers, streams)
    cell = Cell(pages, block_table(pages, CHUNK), 0, (0, CHUNK), (0, 1), (0, 1), CHUNK)
    calls = [
        threading.Thread(target=copier.scatter, args=([cell.move()],))
        for _ in range(copier.num_threads)
    ]
    for number, call in enumerate(calls, 1):
        call.start()
        assert streams.waiting.acquire(timeout=LIMIT_S)
        assert streams.launched == [False] * number
    assert copier.num_threads == 2
    assert all(call.is_alive() for call in calls)
    streams.go_on.set()
    for call in calls:
        call.join(LIMIT_S)
        assert not call.is_alive()
