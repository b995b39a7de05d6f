"""Moves of one cell, and a move's fields as plain numbers."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from vllm_kvpool.layout.pages import SlabMove

Place = tuple[int, int, int, int]
"""Half-open ranges of layers and heads."""


@cache
def template(*places: Place) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """Return the read-only array of these places; equal places share one array."""
    array = np.array(places, np.int64)
    array.flags.writeable = False
    return array


def slab(addresses: Sequence[int], places: Sequence[Place], *rows: Any) -> SlabMove:
    """Return the move of several pieces; `rows` are the remaining fields."""
    return SlabMove(np.array(addresses, np.int64), template(*places), *rows)


def cell_move(
    address: int,
    place: Place,
    block_ids: Sequence[int],
    *,
    table_start: int = 0,
    chunk_start: int = 0,
    chunk_tokens: int,
    clip: tuple[int, int] | None = None,
) -> SlabMove:
    """Return the move of one piece: its whole chunk, or the tokens of `clip`."""
    start, stop = clip or (chunk_start, chunk_start + chunk_tokens)
    return slab([address], [place], block_ids, table_start, chunk_start, chunk_tokens, start, stop)


def plain(move: SlabMove) -> tuple[object, ...]:
    """Return the fields of a move, with lists for arrays, for comparisons."""
    return (move.addresses.tolist(), move.places.tolist(), *move[2:])
