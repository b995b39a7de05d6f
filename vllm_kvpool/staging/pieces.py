"""Moves cut into pieces that are contiguous in their payload and no larger than a buffer (pure).

A payload is laid out `[heads][layers][tokens][row]`, so whole heads, whole layers of one head, and
tokens of one layer of one head are contiguous. A clipped move has only pieces of the last kind.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from vllm_kvpool.layout.pages import CellMove


class Piece(NamedTuple):
    """`nbytes` at `address`, laid out `[heads][layers][tokens][row]`; ranges are half open.

    Heads, layers and tokens are those of the move, and so are the block table and `table_start`.
    """

    address: int
    nbytes: int
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    token_start: int
    token_stop: int
    block_ids: Sequence[int]
    table_start: int


def cut(
    move: CellMove, row_bytes: Sequence[int], max_bytes: int, max_tokens: int
) -> Iterator[Piece]:
    """The pieces of what a move moves, in the order of the payload; `row_bytes` of every layer."""
    rows = row_bytes[move.layer_start : move.layer_stop]
    head_bytes = move.chunk_tokens * sum(rows)
    chunk = (move.chunk_start, move.chunk_start + move.chunk_tokens)
    is_whole = (move.token_start, move.token_stop) == chunk and move.chunk_tokens <= max_tokens
    if move.token_start == move.token_stop or not head_bytes:
        return
    if is_whole and head_bytes <= max_bytes:
        step = max_bytes // head_bytes
        for head in range(move.head_start, move.head_stop, step):
            heads = (head, min(head + step, move.head_stop))
            address = move.address + (head - move.head_start) * head_bytes
            layers = (move.layer_start, move.layer_stop)
            yield _piece(move, address, layers, heads, chunk, sum(rows))
        return
    for head in range(move.head_start, move.head_stop):
        address = move.address + (head - move.head_start) * head_bytes
        yield from _cut_head(move, head, address, rows, is_whole, max_bytes, max_tokens)


def _cut_head(
    move: CellMove,
    head: int,
    address: int,
    rows: Sequence[int],
    is_whole: bool,
    max_bytes: int,
    max_tokens: int,
) -> Iterator[Piece]:
    heads = (head, head + 1)
    chunk = (move.chunk_start, move.chunk_start + move.chunk_tokens)
    before = list(accumulate(rows, initial=0))
    index = 0
    while index < len(rows):
        stop = index
        if is_whole:
            limit = before[index] + max_bytes // move.chunk_tokens
            while stop < len(rows) and before[stop + 1] <= limit:
                stop += 1
        at = address + before[index] * move.chunk_tokens
        layer = move.layer_start + index
        if stop > index:
            layers = (layer, move.layer_start + stop)
            yield _piece(move, at, layers, heads, chunk, before[stop] - before[index])
            index = stop
            continue
        row = rows[index]
        step = min(max_bytes // row, max_tokens)
        assert step > 0, (row, max_bytes)
        for token in range(move.token_start, move.token_stop, step):
            tokens = (token, min(token + step, move.token_stop))
            first = at + (token - move.chunk_start) * row
            yield _piece(move, first, (layer, layer + 1), heads, tokens, row)
        index += 1


def _piece(
    move: CellMove,
    address: int,
    layers: tuple[int, int],
    heads: tuple[int, int],
    tokens: tuple[int, int],
    row_bytes: int,
) -> Piece:
    nbytes = (heads[1] - heads[0]) * (tokens[1] - tokens[0]) * row_bytes
    return Piece(address, nbytes, *layers, *heads, *tokens, move.block_ids, move.table_start)
