"""Behaviour that only a GPU shows: real streams, page-locked memory, concurrent copiers."""

import logging
import mmap
import threading

import numpy as np
import pytest
import torch

from tests.gpu.conftest import Gpu
from tests.staging.page_bench import Cell, Pages, block_table, random_rows
from vllm_kvpool.staging.devices import CudaLocker, PageLock
from vllm_kvpool.storage.base import Buffer

pytestmark = pytest.mark.gpu

CHUNK = 256
JOIN_S = 120.0
MATRIX = 8192
BUSY_PRODUCTS = 200  # of matrices: a quarter of a second and more on any GPU of today


def host_memory(nbytes: int) -> tuple[Buffer, torch.Tensor]:
    """Return fresh pages of the system, as the arena has them."""
    memory = mmap.mmap(-1, nbytes)
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return Buffer(int(address), memoryview(memory)), torch.frombuffer(memory, dtype=torch.uint8)


def keep_busy() -> torch.cuda.Event:
    """Give the current stream work that takes long, and return the event after it."""
    matrix = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    for _ in range(BUSY_PRODUCTS):
        matrix = (matrix @ matrix) * 1e-3
    event = torch.cuda.Event()
    event.record()
    return event


def filled(pages: Pages, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return random rows of a request, and the memory of the pages that hold the rows."""
    rows = random_rows(pages, len(ids) * pages.id_tokens)
    image = pages.read()
    image[pages.indices(ids, 0, rows.shape[2])] = rows
    return rows, image


def whole(pages: Pages, ids: list[int]) -> Cell:
    span = {"heads": (0, pages.num_heads), "layers": (0, pages.num_layers)}
    return Cell(pages, ids, 0, (0, CHUNK), **span)


def test_memory_is_page_locked_until_it_is_unlocked() -> None:
    buffer, memory = host_memory(1 << 20)
    page_lock = PageLock(CudaLocker(0))
    assert not memory.is_pinned()
    page_lock.lock(buffer)
    assert memory.is_pinned()
    page_lock.close()
    assert not memory.is_pinned()


def test_memory_that_cannot_be_locked_costs_a_warning(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    buffer, _ = host_memory(1 << 20)
    first, second = PageLock(CudaLocker(0)), PageLock(CudaLocker(0))
    # On a thread as the arena's, since CUDA keeps the last error of each thread.
    thread = threading.Thread(target=lambda: (first.lock(buffer), second.lock(buffer)))
    thread.start()
    thread.join(JOIN_S)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    first.close()
    pages = Pages(device=gpu.device)
    cell = whole(pages, block_table(pages, CHUNK))
    rows, image = filled(pages, cell.ids)
    pages.write(image)
    copier = gpu.copier(pages.layers)
    gpu.wait_for_model()
    copier.gather([cell.move()])
    np.testing.assert_array_equal(cell.payload, cell.part_of(rows))


def test_a_gather_waits_for_what_the_model_computes(gpu: Gpu) -> None:
    pages = Pages(device=gpu.device)
    cell = whole(pages, block_table(pages, CHUNK))
    rows, image = filled(pages, cell.ids)
    ready = torch.from_numpy(image).to(gpu.device)
    copier = gpu.copier(pages.layers)
    copier.warm_up()
    torch.cuda.synchronize()
    keep_busy()
    pages.memory.copy_(ready)
    gpu.wait_for_model()
    copier.gather([cell.move()])
    np.testing.assert_array_equal(cell.payload, cell.part_of(rows))


def test_a_gather_waits_for_nothing_that_comes_after_the_fence(gpu: Gpu) -> None:
    pages = Pages(device=gpu.device)
    cell = whole(pages, block_table(pages, CHUNK))
    rows, image = filled(pages, cell.ids)
    pages.write(image)
    copier = gpu.copier(pages.layers)
    copier.warm_up()
    fence = gpu.fence()
    busy = keep_busy()
    fence.synchronize()
    copier.gather([cell.move()])
    assert not busy.query()
    np.testing.assert_array_equal(cell.payload, cell.part_of(rows))
    torch.cuda.synchronize()


def test_gather_and_scatter_at_the_same_time_on_threads_of_their_own(gpu: Gpu) -> None:
    pages = Pages(num_layers=8, num_heads=4, key_dim=128, value_dim=128, device=gpu.device)
    ids = block_table(pages, 2 * CHUNK)
    half = len(ids) // 2
    saved, loaded = whole(pages, ids[:half]), whole(pages, ids[half:])
    rows, image = filled(pages, ids)
    pages.write(image)
    loaded.payload[:] = loaded.part_of(rows[:, :, CHUNK:])
    failures: list[BaseException] = []

    def gather() -> None:
        try:
            for _ in range(50):
                saved.slot[:] = 0
                gatherer.gather([saved.move()])
                np.testing.assert_array_equal(saved.payload, saved.part_of(rows))
        except BaseException as failure:
            failures.append(failure)

    def scatter() -> None:
        try:
            for _ in range(50):
                scatterer.scatter([loaded.move()])
        except BaseException as failure:
            failures.append(failure)

    gatherer, scatterer = gpu.copier(pages.layers), gpu.copier(pages.layers)
    threads = [threading.Thread(target=work) for work in (gather, scatter)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    assert failures == []
    np.testing.assert_array_equal(pages.read(), image)
