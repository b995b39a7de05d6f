"""Tensors as items: shapes, bytes without a copy, and copies from a device that runs late."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.support.npu import POISON, FakeNpu
from vllm_kvpool.embeds.dataplane.tensors import (
    EMBEDDING,
    MIN_HUGE_BYTES,
    MemoryPool,
    allocate,
    as_bytes,
    shape_of,
    tensors_of,
    to_host,
)
from vllm_kvpool.embeds.protocol.rows import DTYPE_BYTES, ItemShape, Plane
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.staging.devices import NpuDevice


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 5)])
def test_the_bytes_of_a_tensor_of_any_dtype_are_its_own_memory(
    dtype: str, row_shape: tuple[int, ...]
) -> None:
    shape = ItemShape(7, (Plane("x", dtype, row_shape),))
    (tensor,) = tensors_of(shape, allocate(shape, MemoryPool()))
    assert (tensor.shape, str(tensor.dtype)) == ((7, *row_shape), f"torch.{dtype}")
    array = as_bytes(tensor)
    assert (array.dtype, array.shape) == (np.uint8, (7, shape.planes[0].row_bytes))
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


def test_an_items_shape_names_its_planes_in_order() -> None:
    embedding = torch.zeros(5, 16, dtype=torch.bfloat16)
    positions = torch.zeros(5, 3, dtype=torch.int64)
    layers = torch.zeros(5, 2, 8, dtype=torch.float8_e4m3fn)
    shape = shape_of(embedding, {"positions": positions, "layers": layers})
    assert shape == ItemShape(
        5,
        (
            Plane(EMBEDDING, "bfloat16", (16,)),
            Plane("positions", "int64", (3,)),
            Plane("layers", "float8_e4m3fn", (2, 8)),
        ),
    )
    shape.check()
    planes = allocate(shape, MemoryPool())
    assert [plane.shape for plane in planes] == [(5, 32), (5, 24), (5, 16)]
    assert [as_bytes(tensor).shape for tensor in tensors_of(shape, planes)] == [
        plane.shape for plane in planes
    ]
    assert shape_of(embedding) == ItemShape(5, shape.planes[:1])


@pytest.mark.parametrize(
    ("tensor", "aux", "text"),
    [
        (torch.zeros(()), {}, "shape"),
        (torch.zeros(0, 4), {}, "shape"),
        (torch.zeros(4, 0), {}, "shape"),
        (torch.zeros(4, 2), {"more": torch.zeros(3, 2)}, "'more' has shape"),
        (torch.zeros(4, 2), {"more": torch.zeros(())}, "'more' has shape"),
        (torch.zeros(4, 2), {EMBEDDING: torch.zeros(4, 2)}, "two planes"),
        (torch.zeros(4, 2, dtype=torch.complex64), {}, "complex64"),
    ],
)
def test_tensors_that_are_no_item_are_refused(
    tensor: torch.Tensor, aux: dict[str, torch.Tensor], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        shape_of(tensor, aux)


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
    shape = ItemShape(nbytes // 2, (Plane("embedding", "bfloat16", ()),))
    (plane,) = planes = allocate(shape, MemoryPool())
    (tensor,) = tensors_of(shape, planes)
    assert tensor.dtype is torch.bfloat16
    assert tensor.untyped_storage().nbytes() == tensor.nbytes == nbytes
    assert np.array_equal(as_bytes(tensor), plane)
    plane[:] = 7
    assert int(tensor.view(torch.uint8).min()) == int(tensor.view(torch.uint8).max()) == 7
