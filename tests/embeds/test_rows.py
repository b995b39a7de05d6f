"""Sets of rows against sets of numbers, and the runs of rows in extents of any size."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.embeds.protocol.messages import Offer, decode_body, encode_body
from vllm_kvpool.embeds.protocol.rows import (
    DTYPE_BYTES,
    Extent,
    Intervals,
    ItemShape,
    checked_shape,
    runs_of,
)
from vllm_kvpool.errors import ProtocolError

MOST = 40
spans = st.tuples(st.integers(0, MOST), st.integers(0, MOST))
sets = st.lists(spans, max_size=12)


def built(parts: list[tuple[int, int]]) -> tuple[Intervals, set[int]]:
    rows, numbers = Intervals(), set[int]()
    for first, end in parts:
        rows = rows.with_rows(first, end)
        numbers |= set(range(first, end))
    return rows, numbers


def numbers_of(parts: "tuple[tuple[int, int], ...] | list[tuple[int, int]]") -> set[int]:
    return {number for first, end in parts for number in range(first, end)}


@given(sets)
def test_rows_are_a_set(parts: list[tuple[int, int]]) -> None:
    rows, numbers = built(parts)
    assert numbers_of(rows.spans) == numbers
    assert len(rows) == len(numbers)
    for (_, end), (first, _) in pairwise(rows.spans):
        assert end < first, "spans touch"
    assert all(first < end for first, end in rows.spans)


@given(sets, st.randoms())
def test_order_and_repetition_do_not_matter(
    parts: list[tuple[int, int]], rng: random.Random
) -> None:
    again = [*parts, *parts]
    rng.shuffle(again)
    assert built(again)[0] == built(parts)[0]


@given(sets, st.integers(0, MOST))
def test_gaps_are_what_is_missing(parts: list[tuple[int, int]], rows: int) -> None:
    here, numbers = built(parts)
    gaps = list(here.gaps(rows))
    assert numbers_of(gaps) == set(range(rows)) - numbers
    assert gaps == sorted(gaps)
    assert all(first < end for first, end in gaps)


extents = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=8)


def laid(pieces: list[tuple[int, int]]) -> list[Extent]:
    """Extents behind one another with gaps, last first: order is not that of their offsets."""
    found, at = [], 0
    for gap, nbytes in pieces:
        found.append(Extent(at + gap, nbytes))
        at += gap + nbytes
    return found[::-1]


@given(st.integers(0, 10_000), st.integers(-5, 50), extents, st.integers(1, 17))
def test_whole_rows_fill_extents_in_order(
    row: int, rows: int, pieces: list[tuple[int, int]], row_bytes: int
) -> None:
    places = laid(pieces)
    runs, fitting = runs_of(row, rows, places, row_bytes)
    room = sum(extent.nbytes // row_bytes for extent in places)
    assert fitting == max(0, min(rows, room))
    assert [number for run in runs for number in range(run.row, run.row + run.rows)] == list(
        range(row, row + fitting)
    )
    for run in runs:
        assert run.rows > 0
        end = run.offset + run.rows * row_bytes
        assert any(each.offset == run.offset and end <= each.end for each in places)
    used = sorted((run.offset, run.offset + run.rows * row_bytes) for run in runs)
    assert all(low[1] <= high[0] for low, high in pairwise(used))


@given(st.integers(1, 50), extents, st.integers(1, 17))
def test_asking_for_fewer_rows_takes_the_beginning(
    rows: int, pieces: list[tuple[int, int]], row_bytes: int
) -> None:
    """A producer that writes less than it was granted finds the same places."""
    places = laid(pieces)
    most, fitting = runs_of(0, rows, places, row_bytes)
    for fewer in range(fitting + 1):
        runs, found = runs_of(0, fewer, places, row_bytes)
        assert found == fewer
        for mine, theirs in zip(runs, most, strict=False):
            assert (mine.row, mine.offset) == (theirs.row, theirs.offset)
            assert mine.rows <= theirs.rows


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_a_row_has_the_bytes_of_its_dtype(dtype: str) -> None:
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    shape = ItemShape(7, dtype, (3, 5))
    assert (shape.row_bytes, shape.nbytes) == (15 * size, 7 * 15 * size)
    assert ItemShape(7, dtype, ()).row_bytes == size


def received(shape: ItemShape) -> ItemShape:
    """The shape as a peer's offer brings it."""
    offer = decode_body(encode_body(Offer(1, "item", shape, "digest")))
    assert isinstance(offer, Offer)
    return checked_shape(offer.shape)


def test_a_shape_that_tensors_have_is_received_as_it_was_sent() -> None:
    shape = ItemShape(1 << 40, "int8", (1,) * 16)
    assert received(shape) == shape


IMPOSSIBLE = {
    "no rows": ItemShape(0, "uint8", (1,)),
    "fewer than none": ItemShape(-1, "uint8", (1,)),
    "more than any": ItemShape((1 << 40) + 1, "uint8", (1,)),
    "more dimensions than any": ItemShape(1, "uint8", (1,) * 17),
    "unknown dtype": ItemShape(1, "complex64", (1,)),
    "an empty row": ItemShape(1, "uint8", (4, 0)),
    "a negative row": ItemShape(1, "uint8", (-4, -4)),
    "a giant row": ItemShape(1, "uint8", (1 << 31,)),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_shape_that_no_tensors_have_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        received(IMPOSSIBLE[name])
