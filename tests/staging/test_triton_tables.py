"""Fragments cover exactly the bytes of a move; each is contiguous in the payload and in bounds."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.staging.page_bench import Pages
from tests.support.moves import template
from vllm_kvpool.staging import triton_tables
from vllm_kvpool.staging.copier import Shape, Template
from vllm_kvpool.staging.triton_tables import FRAGMENT_ENTRIES, Fragment, RoundCutter, cut

ROWS = (3, 5, 2, 7)  # bytes of a row in each layer
BYTES_BEFORE = (0, 3, 8, 10, 17)
ID_TOKENS = 4
Box = tuple[range, range, range]
"""Heads, layers, tokens."""


class Move(NamedTuple):
    """A move of one piece of a cell."""

    template: Template
    shape: Shape

    @property
    def box(self) -> Box:
        [(first_layer, last_layer, first_head, last_head)] = self.template.places
        tokens = range(self.shape.chunk_tokens)
        return range(first_head, last_head), range(first_layer, last_layer), tokens


def move_of(place: tuple[int, int, int, int], shape: Shape) -> Move:
    return Move(Template(template(place), (place,), ID_TOKENS, 100), shape)


def fragments_of(move: Move, max_bytes: int, max_tokens: int) -> list[Fragment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_tables, "MAX_FRAGMENT_TOKENS", max_tokens)
        rows = cut.__wrapped__(*move, BYTES_BEFORE, max_bytes)
    return [Fragment(*row) for row in rows.tolist()]


def index_map(address: int, box: Box) -> dict[tuple[int, int, int], range]:
    """Return the address range of each row of a payload, by head, layer and token."""
    places, at = {}, address
    for head in box[0]:
        for layer in box[1]:
            for token in box[2]:
                places[head, layer, token] = range(at, at + ROWS[layer])
                at += ROWS[layer]
    return places


def rows_of(fragment: Fragment, shape: Shape) -> dict[tuple[int, int, int], range]:
    heads = range(fragment.head_start, fragment.head_start + fragment.num_heads)
    layers = range(fragment.layer_start, fragment.layer_start + fragment.num_layers)
    first = shape.first_token + fragment.first_id * ID_TOKENS + fragment.first_token
    tokens = range(first, first + fragment.num_tokens)
    assert fragment.first_token < ID_TOKENS
    assert fragment.last_id == -((shape.first_token - tokens.stop) // ID_TOKENS)
    assert fragment.span_bytes == sum(ROWS[layer] for layer in layers)
    rows = index_map(fragment.address, (heads, layers, tokens))
    assert sum(map(len, rows.values())) == fragment.nbytes
    return rows


@st.composite
def moves(draw: st.DrawFn) -> Move:
    def half_open(stop: int) -> tuple[int, int]:
        first = draw(st.integers(0, stop))
        return first, draw(st.integers(first, stop))

    place = (*half_open(len(ROWS)), *half_open(4))
    chunk_tokens = draw(st.integers(1, 12))
    clip = draw(st.one_of(st.just((0, chunk_tokens)), st.just(half_open(chunk_tokens))))
    first_token = clip[0] - draw(st.integers(0, ID_TOKENS - 1))
    return move_of(place, Shape(chunk_tokens, *clip, first_token))


@given(moves(), st.integers(max(ROWS), 300), st.integers(1, 15))
def test_fragments_cover_the_clip_once(move: Move, max_bytes: int, max_tokens: int) -> None:
    expected = {
        (head, layer, token): place
        for (head, layer, token), place in index_map(0, move.box).items()
        if move.shape.token_start <= token < move.shape.token_stop
    }
    found: dict[tuple[int, int, int], range] = {}
    for fragment in fragments_of(move, max_bytes, max_tokens):
        assert 0 < fragment.nbytes <= max_bytes
        assert fragment.num_tokens <= max_tokens
        rows = rows_of(fragment, move.shape)
        assert not found.keys() & rows.keys()
        found |= rows
    assert found == expected


@pytest.mark.parametrize(
    ("max_bytes", "num_fragments"), [(10_000, 1), (2 * 170, 2), (170, 4), (100, 8), (29, 32)]
)
def test_no_more_fragments_than_the_bound_asks_for(max_bytes: int, num_fragments: int) -> None:
    move = move_of((0, 4, 0, 4), Shape(10, 0, 10, 0))
    fragments = fragments_of(move, max_bytes, 100)
    assert len(fragments) == num_fragments
    assert np.sum([fragment.nbytes for fragment in fragments]) == 4 * 10 * sum(ROWS)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=4),
    st.sampled_from((256, 1024, 4096, 1 << 20)),
    st.sampled_from((30, 60, 1000)),
    st.booleans(),
)
def test_rounds_take_all_fragments_in_order_and_fit_their_limits(
    kinds: list[tuple[int, int]], buffer_bytes: int, table_entries: int, is_gather: bool
) -> None:
    """In a round's table, the block ids that it needs follow its fragments."""
    pages = Pages(num_heads=4, key_dim=4, value_dim=4, num_ids=8)
    shapes = [Shape(48, 0, 48, 0), Shape(48, 5, 40, 0), Shape(32, 0, 32, -16), Shape(16, 9, 9, 0)]
    places = ((0, 2, 0, 2), (0, 2, 2, 4), (1, 2, 0, 1))
    slab = Template(template(*places), places, 16, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_tables, "TABLE_ENTRIES", table_entries)
        cutter = RoundCutter(pages.layers, buffer_bytes)
        rounds = cutter.rounds(is_gather, *[(slab, shapes[i], count) for i, count in kinds])
    expected, num_ids, num_pieces = [], 0, 0
    for i, count in kinds:
        shape = shapes[i]
        rows = cut(slab, shape, (0, 16, 32), buffer_bytes).tolist()
        for _ in range(count):
            for each in map(Fragment._make, rows):
                ids = range(num_ids + each.first_id, num_ids + each.last_id)
                expected.append((each, ids, num_pieces + each.piece))
            num_ids += -((shape.first_token - shape.token_stop) // 16)
            num_pieces += len(places)
    assert rounds.pieces.tolist() == [piece for _, _, piece in expected]
    stop = 0
    for part in rounds.parts:
        assert part.fragments.start == stop
        stop = part.fragments.stop
        used = 0
        rows, copies = rounds.rows[part.fragments], rounds.copies[part.fragments]
        some = expected[part.fragments]
        ids_at = len(cutter.runs) + FRAGMENT_ENTRIES * len(some) - part.block_ids.start
        for (fragment, ids, _), row, copy in zip(some, rows.tolist(), copies.tolist(), strict=True):
            in_buffer = row[0]
            assert copy[0 if is_gather else 1] == fragment.address
            assert copy[1 if is_gather else 0] == in_buffer == -(-used // 256) * 256
            assert copy[2] == fragment.nbytes
            assert row[1:] == [*fragment[1:7], ids_at + ids.start, fragment.span_bytes]
            assert part.block_ids.start <= ids.start
            assert ids.stop <= part.block_ids.stop
            used = in_buffer + fragment.nbytes
        assert used <= buffer_bytes
        num_round_ids = part.block_ids.stop - part.block_ids.start
        fits = FRAGMENT_ENTRIES * len(some) + num_round_ids <= table_entries
        assert fits or len(some) == 1
    assert stop == len(expected)
