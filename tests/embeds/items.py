"""Items for tests: planes of random bytes, the same in every process, and where their runs go."""

from collections.abc import Sequence

import numpy as np
import xxhash

from vllm_kvpool.embeds.dataplane.row_bytes import Bytes, RowCopy
from vllm_kvpool.embeds.dataplane.transports import RowWriter
from vllm_kvpool.embeds.protocol.messages import Window
from vllm_kvpool.embeds.protocol.rows import ItemShape, Plane, RowRun


def shape_of_widths(rows: int, widths: Sequence[int]) -> ItemShape:
    """An item whose planes have rows of so many bytes."""
    planes = tuple(Plane(f"plane{i}", "uint8", (width,)) for i, width in enumerate(widths))
    return ItemShape(rows, planes)


def item_of(shape: ItemShape, seed: int) -> list[Bytes]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (shape.rows, plane.row_bytes), np.uint8) for plane in shape.planes]


def empty_item(shape: ItemShape) -> list[Bytes]:
    return [np.zeros((shape.rows, plane.row_bytes), np.uint8) for plane in shape.planes]


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


def expected(
    planes: Sequence[Bytes], shape: ItemShape, runs: Sequence[RowRun], nbytes: int
) -> Bytes:
    """The window, zero before, after a write."""
    window = np.zeros(nbytes, np.uint8)
    for run in runs:
        for array, (offset, size) in zip(planes, run.planes(shape), strict=True):
            window[offset : offset + size] = array[run.row : run.row + run.rows].reshape(-1)
    return window


def digest_of(planes: Sequence[Bytes], shape: ItemShape, run: RowRun, seed: int) -> int:
    """What a run's digest has to be."""
    digest = xxhash.xxh3_64(seed=seed % (1 << 64))
    for array in planes:
        digest.update(np.ascontiguousarray(array[run.row : run.row + run.rows]))
    return digest.intdigest()


def write_runs(
    writer: RowWriter,
    window: Window,
    planes: Sequence[Bytes],
    shape: ItemShape,
    runs: Sequence[RowRun],
    seed: int,
) -> tuple[int, ...]:
    """Write runs of one item; a digest for each, or WriteError."""
    (digests,) = writer.write(window, [RowCopy(planes, shape, runs, seed)])
    return digests
