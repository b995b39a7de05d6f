"""Memory of large items: used again once nobody refers to it, and bounded."""

import threading

import numpy as np
import pytest
import torch

from vllm_kvpool.embeds.dataplane.tensors import (
    HUGE_PAGE_BYTES,
    MIN_HUGE_BYTES,
    MOST_KEPT_BYTES,
    MemoryPool,
    Tensor,
    allocate,
    tensors_of,
)
from vllm_kvpool.embeds.protocol.rows import ItemShape, Plane

NBYTES = MIN_HUGE_BYTES + 2
ROOM = 4 * (NBYTES + HUGE_PAGE_BYTES)


def item(memory: MemoryPool, nbytes: int = NBYTES) -> Tensor:
    shape = ItemShape(nbytes // 2, (Plane("embedding", "bfloat16", ()),))
    (tensor,) = tensors_of(shape, allocate(shape, memory))
    return tensor


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
