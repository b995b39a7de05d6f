"""Moves of one cell, and what a move says as plain numbers."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from vllm_kvpool.layout.pages import SlabMove

Place = tuple[int, int, int, int]
"""Layers and heads, half open."""


@cache
def template(*places: Place) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """The one array of these places, as all moves of a rank have it."""
    array = np.array(places, np.int64)
    array.flags.writeable = False
    return array


def slab(addresses: Sequence[int], places: Sequence[Place], *rows: Any) -> SlabMove:
    """The move of several pieces; `rows` are the fields that follow."""
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
    """The move of one piece: of its whole chunk, unless `clip` says which tokens."""
    start, stop = clip or (chunk_start, chunk_start + chunk_tokens)
    return slab([address], [place], block_ids, table_start, chunk_start, chunk_tokens, start, stop)


def plain(move: SlabMove) -> tuple[object, ...]:
    """The fields of a move, with lists for arrays: equal for equal moves."""
    return (move.addresses.tolist(), move.places.tolist(), *move[2:])
