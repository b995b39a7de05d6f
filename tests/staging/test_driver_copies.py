"""Lists of copies for the CUDA driver, with a stand-in function that copies on the host."""

import ctypes

import numpy as np
import pytest

from vllm_kvpool.staging.driver_copies import BATCH_ARGUMENTS, StartCopies, in_one_call

STREAM = 7
NOT_SUPPORTED = 801


class Driver:
    """A driver that copies at once. With `error` it refuses each list after the list's first
    copy."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.lists: list[int] = []
        self.single: list[int] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *BATCH_ARGUMENTS)
        self.batch = kind(self._batch)

    def _batch(self, targets, sources, sizes, count, attributes, of, num, failed, stream):  # type: ignore[no-untyped-def]
        assert stream == STREAM
        assert num == 1
        assert (ctypes.c_uint * 6).from_address(attributes)[:] == [1, 0, 0, 0, 0, 0]
        assert ctypes.c_size_t.from_address(of).value == 0
        addresses = targets, sources, sizes
        columns = [(ctypes.c_uint64 * count).from_address(at)[:] for at in addresses]
        self.lists.append(count)
        for row in list(zip(*columns, strict=True))[: 1 if self.error else count]:
            ctypes.memmove(*row)
        ctypes.c_size_t.from_address(failed).value = 1 if self.error else 0
        return self.error

    @property
    def one_by_one(self) -> StartCopies:
        def start(copies: "np.ndarray[tuple[int, int], np.dtype[np.uint64]]", stream: int) -> int:
            assert stream == STREAM
            self.single.append(len(copies))
            for target, source, nbytes in copies.tolist():
                ctypes.memmove(target, source, nbytes)
            return 0

        return start


@pytest.mark.parametrize(
    ("count", "error", "lists", "single"),
    [(5, 0, [5], []), (1, 0, [], [1]), (5, NOT_SUPPORTED, [5], [5])],
    ids=["a list", "one copy", "a list that is refused"],
)
def test_every_copy_is_made(count: int, error: int, lists: list[int], single: list[int]) -> None:
    """A list is one call. If the driver refuses it, each copy is a call."""
    source = np.random.default_rng(count).integers(0, 256, (count, 100), np.uint8)
    target = np.zeros_like(source)
    sizes = [100 - i for i in range(count)]
    rows = [
        (target[i].ctypes.data, source[i].ctypes.data, nbytes) for i, nbytes in enumerate(sizes)
    ]
    driver = Driver(error)
    start = in_one_call(driver.batch, driver.one_by_one)
    assert start(np.array(rows, np.uint64), STREAM) == 0
    for i, nbytes in enumerate(sizes):
        np.testing.assert_array_equal(target[i, :nbytes], source[i, :nbytes])
        assert not target[i, nbytes:].any()
    assert (driver.lists, driver.single) == (lists, single)


def test_an_error_of_single_copies_is_the_answer() -> None:
    driver = Driver(NOT_SUPPORTED)
    start = in_one_call(driver.batch, lambda copies, stream: 700)
    rows = np.array([(0, 0, 0), (0, 0, 0)], np.uint64)
    assert start(rows, STREAM) == 700
