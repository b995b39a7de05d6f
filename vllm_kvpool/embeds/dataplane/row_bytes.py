"""The bytes of a run of rows: where they are, how they are copied and digested (pure).

An item is a uint8 array [rows, row_bytes], C-contiguous; a window is one of shape [nbytes]. A run's
digest is xxh3_64 over its bytes, seeded, so that bytes that an earlier grant left in the same place
do not match.
Copies and digests release the interpreter's lock; their steps are large, since each return to it
may wait.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from vllm_kvpool.embeds.protocol.rows import ItemShape, RowRun

Bytes = NDArray[np.uint8]

STEP_BYTES = 4 << 20  # copied, then digested while they are in the cache
SAMPLED_ROWS = 16  # of an item, digested for the name of its encoding
_SEED_MASK = (1 << 64) - 1


def check_data(data: Bytes, shape: ItemShape) -> None:
    """Assert that an item's memory has this shape, once for each item."""
    assert data.dtype == np.uint8, data.dtype
    assert data.shape == (shape.rows, shape.row_bytes), (data.shape, shape)
    assert data.flags.c_contiguous, data.strides


def copy_digested(target: Bytes, source: Bytes, digest: Any, *, of_target: bool = False) -> None:
    """Copy bytes and digest the source, or the target after the copy."""
    if source.nbytes <= STEP_BYTES:
        target[...] = source
        digest.update(target if of_target else source)
        return
    for start in range(0, source.nbytes, STEP_BYTES):
        step = slice(start, start + STEP_BYTES)
        copy_digested(target[step], source[step], digest, of_target=of_target)


def item_name(data: Bytes) -> str:
    """Return the name of an encoding: a digest of rows all over the item.

    Two encoders' rows of the same media and weights are equal, or the order in which a processor
    adds makes them differ from the first row on. So a sample is enough, and an item of any size is
    offered at once. The runs' digests verify that the rows arrive unchanged.
    """
    digest: Any = xxhash.xxh3_128()
    digest.update(np.ascontiguousarray(data[:: max(1, len(data) // SAMPLED_ROWS)]))
    digest.update(np.ascontiguousarray(data[-1:]))
    return str(digest.hexdigest())


def sampled_bytes(shape: ItemShape) -> int:
    """Return the most bytes that an encoding's name is made of."""
    return min(shape.rows, 2 * SAMPLED_ROWS) * shape.row_bytes


class WriteError(Exception):
    """The rows are not all in the window. Unless `quiesced`, some may still arrive."""

    def __init__(self, text: str, *, quiesced: bool) -> None:
        super().__init__(text)
        self.quiesced = quiesced


def other_transport(transport: str) -> WriteError:
    """Return the error for a window that is not of this transport."""
    return WriteError(
        f"the window is of another transport than {transport}: set the same transport on both "
        "sides",
        quiesced=True,
    )


class RowCopy(msgspec.Struct, frozen=True, gc=False):
    """Runs of an item's rows to copy into a window or out of it.

    `data` is the item's own memory, [rows, row_bytes], unchanged while it is copied into a window.
    """

    data: Bytes
    shape: ItemShape
    runs: Sequence[RowRun]
    seed: int

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of all runs."""
        rows = 0
        for run in self.runs:
            rows += run.rows
        return rows * self.shape.row_bytes

    def check(self, window_nbytes: int) -> None:
        """Assert that each run is of the item and of the window."""
        for run in self.runs:
            end = run.offset + run.rows * self.shape.row_bytes
            assert 0 <= run.offset < end <= window_nbytes, (run, window_nbytes)
            assert 0 <= run.row < run.row + run.rows <= self.shape.rows, (run, self.shape.rows)

    def copy(self, copy: Callable[[int, Bytes, Any], None]) -> tuple[int, ...]:
        """Copy run after run; a digest for each.

        `copy(offset, data, digest)` copies a run, a view of the item, from or to this offset of the
        window.
        """
        digests = []
        for run in self.runs:
            digest: Any = xxhash.xxh3_64(seed=self.seed & _SEED_MASK)
            copy(run.offset, self.data[run.row : run.row + run.rows].reshape(-1), digest)
            digests.append(int(digest.intdigest()))
        return tuple(digests)


def write(window: Bytes, rows: RowCopy) -> tuple[int, ...]:
    """Copy runs into a window that is mapped here; a digest for each run."""

    def copy(offset: int, data: Bytes, digest: Any) -> None:
        copy_digested(window[offset : offset + data.nbytes], data, digest)

    return rows.copy(copy)


def drain(window: Bytes, rows: RowCopy) -> tuple[int, ...]:
    """Copy runs out of a window into the item, and return a digest for each run.

    The digest is of the item's bytes after the copy. A write to the window during or after the copy
    shows in the digest or changed nothing. The item's memory is checked. Any thread; no two with
    the same rows.
    """
    rows.check(window.nbytes)

    def copy(offset: int, data: Bytes, digest: Any) -> None:
        copy_digested(data, window[offset : offset + data.nbytes], digest, of_target=True)

    return rows.copy(copy)
