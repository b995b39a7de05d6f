"""The interface of copiers, which move cells between pages and staging memory."""

from collections.abc import Sequence
from typing import Protocol

from vllm_kvpool.layout.pages import CellMove, LayerPages


class Copier(Protocol):
    """Moves cells of one rank's pages. One lane thread at a time; blocks without the GIL."""

    def fence(self) -> None:
        """Later moves wait for all that the model's stream has been given so far.

        Called on the model's thread; does not block it.
        """

    def gather(self, moves: Sequence[CellMove]) -> None:
        """Pages -> slots; when it returns the pages may be overwritten."""

    def scatter(self, moves: Sequence[CellMove]) -> None:
        """Slots -> pages; when it returns the slots may be overwritten."""


def check_move(move: CellMove, layers: Sequence[LayerPages]) -> tuple[int, Sequence[int]]:
    """Check a move; returns the ids of the blocks that it touches and the first one's first token.

    Kernels check nothing, and a wrong number would corrupt memory: so it raises AssertionError. Its
    cost does not depend on the length of the block table, which may be a whole request's.
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
    num_ids = max(ids, default=0) + 1
    for pages in span:
        assert pages.tokens_per_block * pages.blocks_per_id == id_tokens, move
        assert move.head_stop <= pages.num_heads, move
        assert num_ids * pages.blocks_per_id <= pages.owner[0].shape[0], move
    return move.table_start + first * id_tokens, ids
