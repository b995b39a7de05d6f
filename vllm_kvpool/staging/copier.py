"""The function pair that moves cells between pages and staging memory, whatever the format."""

from collections.abc import Sequence
from typing import Protocol

from vllm_kvpool.layout.pages import CellMove, LayerPages


class Copier(Protocol):
    """Knows the pages of one rank. Moves are made by one lane thread at a time, blocking, with the
    GIL released."""

    def fence(self) -> None:
        """Moves that begin from now on come after what the model has been told to compute so far.

        Called on the model's thread, which it does not hold up.
        """

    def gather(self, moves: Sequence[CellMove]) -> None:
        """Pages -> slots. On return the slots are filled and the pages may be overwritten."""

    def scatter(self, moves: Sequence[CellMove]) -> None:
        """Slots -> pages. On return the pages are filled and the slots may be overwritten."""


def check_move(move: CellMove, layers: Sequence[LayerPages]) -> tuple[int, Sequence[int]]:
    """Check a move, and cut its block table to the blocks that it touches.

    Returns the token that the first of those blocks begins with, and their ids. Kernels believe
    what they are given; a wrong number would corrupt memory, so it raises AssertionError. The cost
    does not depend on the length of the table, which may be that of a whole request.
    """
    assert 0 <= move.layer_start <= move.layer_stop <= len(layers), move
    assert move.chunk_start <= move.token_start <= move.token_stop, move
    assert move.token_stop <= move.chunk_start + move.chunk_tokens, move
    assert 0 <= move.head_start <= move.head_stop, move
    assert move.table_start <= move.token_start, move
    span = layers[move.layer_start : move.layer_stop]
    if not span:
        return move.table_start, ()
    id_tokens = span[0].tokens_per_block * span[0].blocks_per_id
    first = (move.token_start - move.table_start) // id_tokens
    last = -(-(move.token_stop - move.table_start) // id_tokens)
    ids = move.block_ids[first:last]
    assert len(ids) == last - first, move
    assert min(ids, default=0) >= 0, move
    for pages in span:
        assert pages.tokens_per_block * pages.blocks_per_id == id_tokens, move
        assert move.head_stop <= pages.num_heads, move
        assert (max(ids, default=0) + 1) * pages.blocks_per_id <= pages.owner[0].shape[0], move
    return move.table_start + first * id_tokens, ids
