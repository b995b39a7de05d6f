"""Items for tests: rows of random bytes, the same in every process, and where their runs go."""

from collections.abc import Sequence

import numpy as np
import xxhash

from vllm_kvpool.embeds.dataplane.row_bytes import Bytes, RowCopy
from vllm_kvpool.embeds.dataplane.transports import RowWriter
from vllm_kvpool.embeds.protocol.messages import Window
from vllm_kvpool.embeds.protocol.rows import ItemShape, RowRun


def shape_of_width(rows: int, width: int) -> ItemShape:
    """An item with rows of so many bytes."""
    return ItemShape(rows, "uint8", (width,))


def item_of(shape: ItemShape, seed: int) -> Bytes:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (shape.rows, shape.row_bytes), np.uint8)


def empty_item(shape: ItemShape) -> Bytes:
    return np.zeros((shape.rows, shape.row_bytes), np.uint8)


def scattered(
    shape: ItemShape, rows_of_runs: Sequence[int], gap: int, row: int = 0
) -> list[RowRun]:
    """Runs of so many rows each from `row` on, from the last of the window's extents to the first,
    with `gap` bytes between them."""
    runs: list[RowRun] = []
    offset = sum(rows_of_runs) * shape.row_bytes + gap * len(rows_of_runs)
    for rows in rows_of_runs:
        offset -= rows * shape.row_bytes + gap
        runs.append(RowRun(row, rows, offset))
        row += rows
    return runs


def expected(data: Bytes, runs: Sequence[RowRun], nbytes: int) -> Bytes:
    """The window, zero before, after a write."""
    window = np.zeros(nbytes, np.uint8)
    for run in runs:
        rows = data[run.row : run.row + run.rows].reshape(-1)
        window[run.offset : run.offset + rows.nbytes] = rows
    return window


def digest_of(data: Bytes, run: RowRun, seed: int) -> int:
    """Return the expected digest of a run of rows."""
    rows = np.ascontiguousarray(data[run.row : run.row + run.rows])
    return xxhash.xxh3_64(rows, seed=seed % (1 << 64)).intdigest()


def write_runs(
    writer: RowWriter,
    window: Window,
    data: Bytes,
    shape: ItemShape,
    runs: Sequence[RowRun],
    seed: int,
) -> tuple[int, ...]:
    """Write runs of one item; a digest for each, or WriteError."""
    (digests,) = writer.write(window, [RowCopy(data, shape, runs, seed)])
    return digests
