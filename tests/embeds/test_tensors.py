"""Tensors as items and back, their copies to the host, and memory kept for reuse."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.support.npu import POISON, FakeNpu
from vllm_kvpool.embeds.dataplane.tensors import (
    HUGE_PAGE_BYTES,
    MIN_HUGE_BYTES,
    MOST_KEPT_BYTES,
    MemoryPool,
    Tensor,
    allocate,
    as_bytes,
    shape_of,
    tensor_of,
    to_host,
)
from vllm_kvpool.embeds.protocol.rows import DTYPE_BYTES, ItemShape, checked_shape
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.staging.devices import NpuDevice


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 5)])
def test_the_bytes_of_a_tensor_of_any_dtype_are_its_own_memory(
    dtype: str, row_shape: tuple[int, ...]
) -> None:
    shape = ItemShape(7, dtype, row_shape)
    tensor = tensor_of(shape, allocate(shape, MemoryPool()))
    assert (tensor.shape, str(tensor.dtype)) == ((7, *row_shape), f"torch.{dtype}")
    array = as_bytes(tensor)
    assert (array.dtype, array.shape) == (np.uint8, (7, shape.row_bytes))
    assert array.ctypes.data == tensor.data_ptr()
    array[:] = 0
    array[4] = 1
    rows = tensor.reshape(7, -1).view(torch.uint8)
    assert rows[4].all()
    assert not rows[:4].any()
    assert not rows[5:].any()


def test_bytes_keep_their_memory_and_need_no_gradient() -> None:
    array = as_bytes(torch.ones(3, 2, requires_grad=True))
    assert bytes(array[2]) == np.ones(2, np.float32).tobytes()


def test_rows_that_do_not_follow_each_other_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        as_bytes(torch.zeros(4, 6)[:, :3])
    with pytest.raises(AssertionError):
        as_bytes(torch.zeros(4, 6).T)
    assert as_bytes(torch.zeros(9, 6)[2:5]).shape == (3, 24)


@pytest.mark.parametrize(
    ("dtype", "row_shape"), [("bfloat16", (16,)), ("int64", ()), ("float8_e4m3fn", (2, 8))]
)
def test_shape_of_an_encoders_output_is_received_and_allocated(
    dtype: str, row_shape: tuple[int, ...]
) -> None:
    output = torch.zeros(5, *row_shape, dtype=getattr(torch, dtype))
    shape = shape_of(output)
    assert shape == ItemShape(5, dtype, row_shape)
    assert checked_shape(shape) == shape
    data = allocate(shape, MemoryPool())
    assert data.shape == (5, shape.row_bytes)
    assert as_bytes(tensor_of(shape, data)).shape == data.shape


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(()), "shape"),
        (torch.zeros(0, 4), "shape"),
        (torch.zeros(4, 0), "shape"),
        (torch.zeros(4, 2, dtype=torch.complex64), "complex64"),
    ],
)
def test_tensors_that_are_no_item_are_refused(tensor: torch.Tensor, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        shape_of(tensor)


def test_a_tensor_on_the_host_is_taken_as_it_is() -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    assert to_host(tensor).wait().data_ptr() == tensor.data_ptr()
    strided = torch.arange(12.0).reshape(3, 4).T
    copied = to_host(strided).wait()
    assert copied.is_contiguous()
    assert torch.equal(copied, strided)


@pytest.fixture
def npu() -> FakeNpu:
    """A card that the test's own thread has entered, and on which nothing happens by itself."""
    fake = FakeNpu()
    fake.set_device("npu:0")
    return fake


def on_other_thread(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Like a writer's: it has not entered the device."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_what_comes_from_a_device_is_what_was_computed_before_and_not_after(
    npu: FakeNpu, is_contiguous: bool
) -> None:
    device = NpuDevice(torch.device("cpu"), npu, npu.pinned, lambda tensor: 2)
    with npu.stream(npu.model_stream):
        whole = torch.empty(6, 8, dtype=torch.bfloat16)
        embedding = whole if is_contiguous else whole[:, ::2]
        embedding.fill_(3)
        copy = to_host(embedding, device)
        embedding.fill_(4)
        whole.zero_()
    assert as_bytes(whole).reshape(-1)[0] == POISON  # none of it has happened
    arrived = on_other_thread(copy.wait)
    assert torch.equal(arrived, torch.full(embedding.shape, 3.0, dtype=torch.bfloat16))
    assert npu.knows(arrived.data_ptr(), arrived.nbytes)
    assert torch.equal(on_other_thread(copy.wait), arrived)


@pytest.mark.parametrize("nbytes", [1 << 10, MIN_HUGE_BYTES - 2, MIN_HUGE_BYTES, (9 << 20) + 6])
def test_a_tensor_of_any_size_is_all_of_its_memory_and_can_be_filled(nbytes: int) -> None:
    shape = ItemShape(nbytes // 2, "bfloat16", ())
    data = allocate(shape, MemoryPool())
    tensor = tensor_of(shape, data)
    assert tensor.dtype is torch.bfloat16
    assert tensor.untyped_storage().nbytes() == tensor.nbytes == nbytes
    assert np.array_equal(as_bytes(tensor), data)
    data[:] = 7
    assert int(tensor.view(torch.uint8).min()) == int(tensor.view(torch.uint8).max()) == 7


NBYTES = MIN_HUGE_BYTES + 2
ROOM = 4 * (NBYTES + HUGE_PAGE_BYTES)


def item(memory: MemoryPool, nbytes: int = NBYTES) -> Tensor:
    shape = ItemShape(nbytes // 2, "bfloat16", ())
    return tensor_of(shape, allocate(shape, memory))


def test_memory_is_used_again_when_the_last_tensor_has_gone() -> None:
    memory = MemoryPool(ROOM)
    whole = item(memory)
    address, part = whole.data_ptr(), whole[5:]
    del whole
    other = item(memory)
    assert other.data_ptr() != address, "a part of it is still in use"
    del part
    assert item(memory).data_ptr() == address


def test_memory_that_another_thread_lets_go_of_is_used_again() -> None:
    memory = MemoryPool(ROOM)
    held = [item(memory)]
    address = held[0].data_ptr()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(5.0)
    assert item(memory).data_ptr() == address


def test_what_is_used_again_is_all_of_the_item_and_no_more() -> None:
    memory = MemoryPool(ROOM)
    del (first := [item(memory, 2 * NBYTES)])[0]
    smaller = item(memory, NBYTES)
    assert not first
    assert memory.kept_bytes == 0
    assert smaller.untyped_storage().nbytes() == NBYTES
    assert smaller.data_ptr() % HUGE_PAGE_BYTES == 0
    smaller.view(torch.uint8).fill_(7)


def test_of_what_is_kept_the_smallest_that_fits_is_used() -> None:
    memory = MemoryPool(ROOM)
    sizes = (3 * NBYTES // 2, NBYTES)
    tensors = [item(memory, nbytes) for nbytes in sizes]
    addresses = [tensor.data_ptr() for tensor in tensors]
    tensors.clear()
    assert item(memory, NBYTES).data_ptr() == addresses[1]


def test_a_small_item_does_not_take_what_a_large_one_needs() -> None:
    memory = MemoryPool(ROOM)
    address = item(memory, 3 * NBYTES).data_ptr()
    small = item(memory, MIN_HUGE_BYTES)
    assert small.data_ptr() != address
    assert item(memory, 3 * NBYTES).data_ptr() == address


@pytest.mark.parametrize("most_bytes", [0, NBYTES, 2 * (NBYTES + HUGE_PAGE_BYTES), ROOM])
def test_no_more_is_kept_than_may_be(most_bytes: int) -> None:
    memory = MemoryPool(most_bytes)
    tensors = [item(memory) for _ in range(6)]
    tensors.clear()
    small = item(memory, MIN_HUGE_BYTES // 2)
    assert small.nbytes == MIN_HUGE_BYTES // 2
    one = NBYTES + HUGE_PAGE_BYTES
    kept = item(memory, 8 * NBYTES)  # looks at what has come back, and uses none of it
    assert kept.nbytes == 8 * NBYTES
    assert memory.kept_bytes == most_bytes // one * one


def test_the_bound_has_a_bound() -> None:
    memory = MemoryPool(1 << 40)
    assert memory._most_bytes == MOST_KEPT_BYTES


def test_small_items_come_from_the_heap() -> None:
    array = MemoryPool(ROOM).take(64)
    assert (array.dtype, array.nbytes) == (np.uint8, 64)
