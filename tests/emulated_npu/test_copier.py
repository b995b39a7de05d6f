"""The pool's copier on the emulated device: it waits for what the model has launched.

Each rule of the device that the copier must keep is broken once here, and the break is seen.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.staging.page_bench import CHUNK, Cell, Pages, block_table
from vllm_kvpool.staging.copy_torch import TorchCopier
from vllm_kvpool.staging.devices import Fence, NpuDevice

pytestmark = pytest.mark.ascend

TIMES = 8  # the order of streams is drawn anew each time


@pytest.fixture
def device() -> NpuDevice:
    device = NpuDevice(torch.device("npu", 0))
    device.enter_thread()
    return device


@pytest.fixture
def pages(device: NpuDevice) -> Pages:
    return Pages("pair", num_heads=2, device=device.torch_device)


def cell_of(pages: Pages) -> Cell:
    return Cell(
        pages,
        block_table(pages, CHUNK),
        chunk_start=0,
        clip=(0, CHUNK),
        heads=(0, pages.num_heads),
        layers=(0, pages.num_layers),
    )


def in_a_lane(device: NpuDevice, fence: Fence, work: Callable[[], None]) -> None:
    """Run `work` after the fence, in a new thread that has entered the device. Raise its error."""

    def run() -> None:
        device.enter_thread()
        fence.synchronize()
        work()

    with ThreadPoolExecutor(1) as lane:
        lane.submit(run).result()


def test_a_gather_reads_what_was_launched_before_its_fence(device: NpuDevice, pages: Pages) -> None:
    copier, cell = TorchCopier(pages.layers, device), cell_of(pages)
    for number in range(TIMES):
        pages.memory.fill_(number)
        in_a_lane(device, device.new_event(), lambda: copier.gather([cell.move()]))
        np.testing.assert_array_equal(cell.payload, np.full_like(cell.payload, number))


def test_a_scatter_overwrites_what_was_launched_before_its_fence(
    device: NpuDevice, pages: Pages
) -> None:
    """vLLM zeroes blocks before a step's loads."""
    copier, cell = TorchCopier(pages.layers, device), cell_of(pages)
    where = pages.indices(cell.ids, 0, CHUNK)
    for number in range(1, TIMES):
        cell.payload[:] = number
        pages.memory.fill_(0)
        in_a_lane(device, device.new_event(), lambda: copier.scatter([cell.move()]))
        torch.npu.synchronize()  # type: ignore[attr-defined]
        assert set(pages.read()[where].flatten().tolist()) == {number}


# Faults planted in the product. Payloads lie in page-locked memory, as those of a worker whose
# store takes them there.


def no_wait_for_the_event(on: pytest.MonkeyPatch) -> None:
    on.setattr(npu().Event, "synchronize", lambda _: None)


def no_synchronize(on: pytest.MonkeyPatch) -> None:
    on.setattr(npu().Stream, "synchronize", lambda _: None)


def no_set_device(on: pytest.MonkeyPatch) -> None:
    on.setattr(NpuDevice, "enter_thread", lambda _: None)


def threads_of_another_device(on: pytest.MonkeyPatch) -> None:
    on.setattr(NpuDevice, "enter_thread", lambda _: npu().set_device(1))


def streams_of_another_device(on: pytest.MonkeyPatch) -> None:
    on.setattr(NpuDevice, "new_stream", lambda _: npu().Stream("npu:1"))


def npu() -> Any:
    return torch.npu  # type: ignore[attr-defined]


def round_trips(device: NpuDevice, pages: Pages) -> None:
    """Gather and scatter beside the model's stream. Raise AssertionError on wrong bytes."""
    copier, cell = TorchCopier(pages.layers, device), cell_of(pages)
    memory = device.host_memory(cell.slot.nbytes)
    assert memory is not None
    cell.slot = np.frombuffer(memory, np.uint8)
    where = pages.indices(cell.ids, 0, CHUNK)
    for number in range(1, TIMES):
        pages.memory.fill_(number)
        in_a_lane(device, device.new_event(), lambda: copier.gather([cell.move()]))
        assert set(cell.payload.flatten().tolist()) == {number}
        pages.memory.fill_(0)
        in_a_lane(device, device.new_event(), lambda: copier.scatter([cell.move()]))
        npu().synchronize()
        assert set(pages.read()[where].flatten().tolist()) == {number}


def test_round_trips_without_a_fault_are_right(device: NpuDevice, pages: Pages) -> None:
    round_trips(device, pages)


@pytest.mark.parametrize(
    ("plant", "error", "words"),
    [
        (no_wait_for_the_event, AssertionError, None),
        (no_synchronize, AssertionError, None),
        (no_set_device, RuntimeError, "has not called torch.npu.set_device"),
        (threads_of_another_device, RuntimeError, "this process is of npu:0"),
        (streams_of_another_device, RuntimeError, "a tensor of npu:0 is used on npu:1"),
    ],
)
def test_a_planted_fault_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    device: NpuDevice,
    pages: Pages,
    plant: Callable[[pytest.MonkeyPatch], None],
    error: type[Exception],
    words: str | None,
) -> None:
    plant(monkeypatch)
    with pytest.raises(error, match=words):
        round_trips(device, pages)
