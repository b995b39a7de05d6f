"""Fragments cover exactly what a move moves, each contiguous in the payload and in bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.layout.pages import CellMove
from vllm_kvpool.staging.copier import Group, Shape
from vllm_kvpool.staging.triton_tables import Fragment, cut

ROWS = (3, 5, 2, 7)  # bytes of a row in each layer
BYTES_BEFORE = (0, 3, 8, 10, 17)


def index_map(move: CellMove) -> dict[tuple[int, int, int], range]:
    """Where each row of the payload lies, by head, layer and token."""
    places, at = {}, move.address
    for head in range(move.head_start, move.head_stop):
        for layer in range(move.layer_start, move.layer_stop):
            for token in range(move.chunk_start, move.chunk_start + move.chunk_tokens):
                places[head, layer, token] = range(at, at + ROWS[layer])
                at += ROWS[layer]
    return places


def rows_of(fragment: Fragment) -> dict[tuple[int, int, int], range]:
    part = fragment.part
    assert part.row_bytes == sum(ROWS[part.layer_start : part.layer_stop])
    whole = CellMove(
        address=fragment.address,
        layer_start=part.layer_start,
        layer_stop=part.layer_stop,
        head_start=fragment.head_start,
        head_stop=fragment.head_stop,
        block_ids=(),
        table_start=0,
        chunk_start=part.token_start,
        chunk_tokens=part.token_stop - part.token_start,
        token_start=part.token_start,
        token_stop=part.token_stop,
    )
    rows = index_map(whole)
    assert sum(map(len, rows.values())) == fragment.nbytes
    return rows


def alone(move: CellMove) -> Group:
    layers, tokens = (move.layer_start, move.layer_stop), (move.token_start, move.token_stop)
    shape = Shape(*layers, move.chunk_start, move.chunk_tokens, *tokens, first_token=0)
    return Group(shape, move.block_ids, [move])


@st.composite
def moves(draw: st.DrawFn) -> CellMove:
    def half_open(stop: int, start: int = 0) -> tuple[int, int]:
        first = draw(st.integers(start, stop))
        return first, draw(st.integers(first, stop))

    layers, heads = half_open(len(ROWS)), half_open(4)
    chunk_start, chunk_tokens = draw(st.integers(0, 9)), draw(st.integers(1, 12))
    chunk = (chunk_start, chunk_start + chunk_tokens)
    clip = draw(st.one_of(st.just(chunk), st.just(half_open(chunk[1], chunk[0]))))
    return CellMove(1000, *layers, *heads, (4, 2), 0, chunk_start, chunk_tokens, *clip)


@given(moves(), st.integers(max(ROWS), 300), st.integers(1, 15))
def test_fragments_cover_the_clip_once(move: CellMove, max_bytes: int, max_tokens: int) -> None:
    expected = {
        (head, layer, token): place
        for (head, layer, token), place in index_map(move).items()
        if move.token_start <= token < move.token_stop
    }
    found: dict[tuple[int, int, int], range] = {}
    for fragment in cut(alone(move), BYTES_BEFORE, max_bytes, max_tokens):
        assert 0 < fragment.nbytes <= max_bytes
        assert fragment.part.token_stop - fragment.part.token_start <= max_tokens
        rows = rows_of(fragment)
        assert not found.keys() & rows.keys()
        found |= rows
    assert found == expected


@pytest.mark.parametrize(
    ("max_bytes", "num_fragments"), [(10_000, 1), (2 * 170, 2), (170, 4), (100, 8), (29, 32)]
)
def test_no_more_fragments_than_the_bound_asks_for(max_bytes: int, num_fragments: int) -> None:
    move = CellMove(0, 0, 4, 0, 4, (0,), 0, 0, 10, 0, 10)
    fragments = list(cut(alone(move), BYTES_BEFORE, max_bytes, 100))
    assert len(fragments) == num_fragments
    assert np.sum([fragment.nbytes for fragment in fragments]) == 4 * 10 * sum(ROWS)
