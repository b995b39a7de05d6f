"""The pool's copier on the emulated device: it waits for what the model has launched."""

import threading
from collections.abc import Callable

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
    """Run it after the fence, in a thread that has entered the device."""

    def run() -> None:
        device.enter_thread()
        fence.synchronize()
        work()

    lane = threading.Thread(target=run)
    lane.start()
    lane.join()


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
