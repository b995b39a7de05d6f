"""The bytes of a run of rows: where they lie, how they are copied, what their digest is (pure).

The planes of an item are uint8 arrays of shape [rows, row_bytes], C-contiguous; a window is one of
shape [nbytes]. In a window the planes of a run lie one behind the other, and the run's digest goes
over them in that order. It is xxh3_64, seeded, so that bytes which an earlier grant left in the
same place do not pass for those of this one.

Copies and digests release the interpreter's lock while they run. Each time they take it back they
may wait for another thread's turn, so steps are large.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from vllm_kvpool.embeds.rows import ItemShape, Run

Bytes = NDArray[np.uint8]

STEP_BYTES = 4 << 20  # of a copy and its digest, which then finds the bytes in the cache
SAMPLED_ROWS = 16  # of each plane, of which an item's name is made
_SEED_MASK = (1 << 64) - 1


class Segment(NamedTuple):
    """What a run has of one plane: bytes from `offset` of the window on."""

    offset: int
    data: Bytes


def segments(planes: Sequence[Bytes], shape: ItemShape, run: Run) -> list[Segment]:
    """A run's rows as views of the item's own planes, in the order in which they are digested."""
    first, end = run.row, run.row + run.rows
    return [
        Segment(offset, array[first:end].reshape(-1))
        for array, (offset, _) in zip(planes, run.planes(shape), strict=True)
    ]


def check_planes(planes: Sequence[Bytes], shape: ItemShape) -> None:
    """Arrays are what the shape says, so that a part of one is a view. Once for each item."""
    for array, row_bytes in zip(planes, shape.plane_row_bytes, strict=True):
        assert array.dtype == np.uint8, array.dtype
        assert array.shape == (shape.rows, row_bytes), (array.shape, shape)
        assert array.flags.c_contiguous, array.strides


def new_digest(seed: int) -> Any:
    """What the bytes of a run are to be given to."""
    return xxhash.xxh3_64(seed=seed & _SEED_MASK)


def copy_digested(target: Bytes, source: Bytes, digest: Any, *, of_target: bool = False) -> None:
    """Copy bytes and add the source's to a digest; or the target's, as they are after the copy."""
    if source.nbytes <= STEP_BYTES:
        target[...] = source
        digest.update(target if of_target else source)
        return
    for start in range(0, source.nbytes, STEP_BYTES):
        step = slice(start, start + STEP_BYTES)
        copy_digested(target[step], source[step], digest, of_target=of_target)


def digest_of(planes: Sequence[Bytes], shape: ItemShape, run: Run, seed: int) -> int:
    """The digest of a run's rows as they are in the item."""
    digest = new_digest(seed)
    for segment in segments(planes, shape, run):
        for start in range(0, segment.data.nbytes, STEP_BYTES):
            digest.update(segment.data[start : start + STEP_BYTES])
    return int(digest.intdigest())


def item_digest(planes: Sequence[Bytes]) -> str:
    """The digest of all rows of an item, plane after plane: xxh3_128, in hexadecimal digits."""
    digest: Any = xxhash.xxh3_128()
    for array in planes:
        flat = array.reshape(-1)
        for start in range(0, flat.nbytes, STEP_BYTES):
            digest.update(flat[start : start + STEP_BYTES])
    return str(digest.hexdigest())


def item_name(planes: Sequence[Bytes]) -> str:
    """What tells one encoding of an item from another: a digest of rows all over it.

    Of the same media under the same weights two encoders' rows are the same, or differ from the
    first row on, by the order in which a processor adds: a sample is enough, and an item of any
    size is offered at once. Whether rows arrive as they were is for their runs' digests to say.
    """
    digest: Any = xxhash.xxh3_128()
    for array in planes:
        stride = max(1, len(array) // SAMPLED_ROWS)
        digest.update(np.ascontiguousarray(array[::stride]))
        digest.update(np.ascontiguousarray(array[-1:]))
    return str(digest.hexdigest())


def sampled_bytes(shape: ItemShape) -> int:
    """As many an item's name is made of, at most."""
    return min(shape.rows, 2 * SAMPLED_ROWS) * shape.row_bytes


def drain(
    window: Bytes, planes: Sequence[Bytes], shape: ItemShape, runs: Sequence[Run], seed: int
) -> tuple[int, ...]:
    """Copy runs out of a window into the item, which the caller owns; a digest for each.

    The item's planes have been checked (`check_planes`).

    Of the bytes that have arrived in the item: whatever is written to the window later, or while
    they are copied, either shows in the digest or has changed nothing. Any thread; no two with
    the same rows.
    """
    digests = []
    for run in runs:
        end = run.offset + run.rows * shape.row_bytes
        assert 0 <= run.offset <= end <= window.nbytes, (run, window.nbytes)
        assert 0 <= run.row < run.row + run.rows <= shape.rows, (run, shape.rows)
        digest = new_digest(seed)
        for offset, data in segments(planes, shape, run):
            source = window[offset : offset + data.nbytes]
            copy_digested(data, source, digest, of_target=True)
        digests.append(int(digest.intdigest()))
    return tuple(digests)
