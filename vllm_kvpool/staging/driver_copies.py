"""Many copies between host and GPU by one call of the CUDA driver, or by a compiled loop.

Torch takes 10 us of Python for each copy and gives up the GIL each time; the thread then waits for
the GIL while the model's thread computes. One driver call a copy loses 4.8 us of a GPU's link, one
call for a list 0.5 (fits over rows that an H200 gave).
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.uint64]]
StartCopies = Callable[[Rows, int], int]
"""Starts rows of target, source and bytes on a stream; returns the driver's first error, or 0."""

_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read after the work before it


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`, of all copies of a call."""

    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


BATCH_ARGUMENTS = (
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p),
)
"""Arguments of `cuMemcpyBatchAsync` as CUDA 12.8 introduced it: targets, sources, sizes, their
number; attributes, the copies from which each holds, their number; the copy that failed; stream."""


@cache
def driver_copies() -> StartCopies:
    """Return the function that starts copies with this machine's driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    one_by_one = copy_loop(driver)
    batch = getattr(driver, "cuMemcpyBatchAsync", None)  # absent before CUDA 12.8
    if batch is None:
        return one_by_one
    batch.argtypes, batch.restype = BATCH_ARGUMENTS, ctypes.c_int
    return in_one_call(batch, one_by_one)


def in_one_call(batch: Callable[..., int], one_by_one: StartCopies) -> StartCopies:
    """Start lists by `batch`, which a ctypes call makes without the GIL.

    A list that the driver refuses, for memory that is not page-locked yet, is started again one by
    one: copies that had been started write the same bytes twice.
    """
    attributes = _Attributes(source_order=_STREAM_ORDER)
    first = ctypes.c_size_t(0)

    def start(copies: Rows, stream: int) -> int:
        count = len(copies)
        if count == 1:
            return one_by_one(copies, stream)
        columns = np.ascontiguousarray(copies.T)
        targets, sources, sizes = (int(columns[i].ctypes.data) for i in range(3))
        failed = ctypes.c_size_t(0)
        error = batch(
            *(targets, sources, sizes, count),
            *(ctypes.addressof(attributes), ctypes.addressof(first), 1),
            *(ctypes.addressof(failed), stream),
        )
        return one_by_one(copies, stream) if error else 0

    return start


def copy_loop(driver: ctypes.CDLL) -> StartCopies:
    """Return a function that makes a call for each copy, compiled and without the GIL."""
    from numba import njit

    copy = driver.cuMemcpyAsync
    copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
    copy.restype = ctypes.c_int

    @njit("int32(uint64[:, ::1], uint64)", nogil=True)  # type: ignore[untyped-decorator]
    def start_all(copies: Any, stream: int) -> int:
        for target, source, nbytes in copies:
            error = copy(target, source, nbytes, stream)
            if error:
                return error  # type: ignore[no-any-return]
        return 0

    started: StartCopies = start_all
    return started
