"""Rows of an item and the bytes they take (pure).

An item is one tensor, an encoder's output; a row is one position of it. Bounds in a type hold for
what a message brings: its decoder checks them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_kvpool.errors import ProtocolError

MAX_DIMENSIONS = 16  # of a row
MAX_ROWS = 1 << 40
MAX_ROW_BYTES = 1 << 30
KNOWN_SHAPES = 1024  # recent shapes, which are checked and measured once
DTYPE_BYTES = {
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("uint8", "int8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
"""Dtypes of items, by torch's names."""


class ItemShape(msgspec.Struct, frozen=True, dict=True):
    """The tensor of an item: [rows, *row_shape]."""

    rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    dtype: str
    row_shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=MAX_DIMENSIONS)]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return DTYPE_BYTES[self.dtype] * prod(self.row_shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes


@lru_cache(KNOWN_SHAPES)
def known_shape(shape: ItemShape) -> ItemShape:
    """Return the shape, or an equal one that was measured before. Any thread."""
    return shape


@lru_cache(KNOWN_SHAPES)
def checked_shape(shape: ItemShape) -> ItemShape:
    """Check a message's shape as `known_shape` does. Raises ProtocolError if no tensor has it."""
    if shape.dtype not in DTYPE_BYTES:
        raise ProtocolError(f"an item has the unknown dtype {shape.dtype!r}")
    if shape.row_bytes > MAX_ROW_BYTES:
        raise ProtocolError(f"an item has rows of shape {shape.row_shape}")
    return known_shape(shape)


class Extent(msgspec.Struct, frozen=True, order=True, gc=False):
    """Bytes [offset, offset + nbytes) of a landing window."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.offset + self.nbytes


class RowRun(msgspec.Struct, frozen=True, gc=False):
    """Rows [row, row + rows) of an item in one extent."""

    row: int
    rows: int
    offset: int


def runs_of(
    row: int, rows: int, extents: Sequence[Extent], row_bytes: int
) -> tuple[tuple[RowRun, ...], int]:
    """Return the place of up to `rows` rows from `row` on in the extents, and how many fit.

    Each extent takes as many whole rows as fit: no row is split. Both sides of a transfer use
    this, so a grant names only extents.
    """
    runs = []
    first, left = row, rows
    for extent in extents:
        fit = min(left, extent.nbytes // row_bytes)
        if fit > 0:
            runs.append(RowRun(first, fit, extent.offset))
            first, left = first + fit, left - fit
    return tuple(runs), first - row


Span = tuple[int, int]
"""Rows [first, end)."""


class Intervals(msgspec.Struct, frozen=True, gc=False):
    """A set of rows: disjoint spans, in order, that do not touch."""

    spans: tuple[Span, ...] = ()

    def __len__(self) -> int:
        rows = 0
        for first, end in self.spans:
            rows += end - first
        return rows

    def with_rows(self, first: int, end: int) -> "Intervals":
        """Return the set plus rows [first, end)."""
        if first >= end:
            return self
        if not self.spans:
            return Intervals(((first, end),))
        low = bisect_left(self.spans, first, key=lambda span: span[1])
        high = bisect_right(self.spans, end, key=lambda span: span[0])
        touched = self.spans[low:high]
        if touched:
            first, end = min(first, touched[0][0]), max(end, touched[-1][1])
        return Intervals((*self.spans[:low], (first, end), *self.spans[high:]))

    def gaps(self, rows: int) -> Iterator[Span]:
        """Yield the spans of [0, rows) that are missing, in order."""
        at = 0
        for first, end in self.spans:
            if first >= rows:
                break
            if at < first:
                yield at, first
            at = end
        if at < rows:
            yield at, rows
