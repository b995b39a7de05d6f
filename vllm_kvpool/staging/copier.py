"""The interface of copiers, which move cells between pages and staging memory."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from vllm_kvpool.layout.pages import CellMove, LayerPages


class Copier(Protocol):
    """Moves cells of one rank's pages; blocks without the GIL.

    At most `num_threads` lane threads call it at once. It orders nothing against the model's
    stream: who calls it has waited for the plan's fence (`devices.py: Fence`).
    """

    num_threads: int
    """The number of batches in progress: the device copies one while the next is started."""

    def gather(self, moves: Sequence[CellMove]) -> None:
        """Pages -> slots; when it returns the pages may be overwritten."""

    def scatter(self, moves: Sequence[CellMove]) -> None:
        """Slots -> pages; when it returns the slots may be overwritten."""


class Shape(NamedTuple):
    """The common part of a `Group`'s cells; tokens as in `CellMove`."""

    layer_start: int
    layer_stop: int
    chunk_start: int
    chunk_tokens: int
    token_start: int
    token_stop: int
    first_token: int  # of the first block that is touched


class Group(NamedTuple):
    """Moves that differ only in their heads and addresses."""

    shape: Shape
    block_ids: Sequence[int]  # those that are touched
    moves: list[CellMove]


_same: Callable[[CellMove], tuple[int, ...]] = attrgetter(
    "layer_start", "layer_stop", "chunk_start", "chunk_tokens", "token_start", "token_stop",
    "table_start",
)  # fmt: skip


def group_moves(moves: Sequence[CellMove], layers: Sequence[LayerPages]) -> list[Group]:
    """Check all moves and group those that differ only in their heads and addresses.

    Kernels check nothing, and a wrong number would corrupt memory: so it raises AssertionError. Its
    cost does not depend on the length of block tables, which may be a whole request's.
    """
    alike: dict[tuple[tuple[int, ...], int], list[CellMove]] = {}
    for move in moves:  # those of a request have one table, which is not read for each of them
        alike.setdefault((_same(move), id(move.block_ids)), []).append(move)
    groups: dict[tuple[Shape, tuple[int, ...]], Group] = {}
    for some in alike.values():
        group = _checked(some, layers)
        known = groups.setdefault((group.shape, tuple(group.block_ids)), group)
        if known is not group:
            known.moves.extend(some)
    return list(groups.values())


def _checked(moves: list[CellMove], layers: Sequence[LayerPages]) -> Group:
    move = moves[0]
    assert 0 <= move.layer_start <= move.layer_stop <= len(layers), move
    assert move.chunk_start <= move.token_start <= move.token_stop, move
    assert move.token_stop <= move.chunk_start + move.chunk_tokens, move
    assert move.table_start <= move.token_start, move
    span = layers[move.layer_start : move.layer_stop]
    first_token, ids = move.table_start, move.block_ids[:0]
    if span:
        id_tokens = span[0].tokens_per_block * span[0].blocks_per_id
        first = (move.token_start - move.table_start) // id_tokens
        last = -(-(move.token_stop - move.table_start) // id_tokens)
        first_token, ids = move.table_start + first * id_tokens, move.block_ids[first:last]
        assert len(ids) == last - first, move
        assert min(ids, default=0) >= 0, move
        num_ids = max(ids, default=0) + 1
        for pages in span:
            assert pages.tokens_per_block * pages.blocks_per_id == id_tokens, move
            assert num_ids * pages.blocks_per_id <= pages.owner[0].shape[0], move
    num_heads = min((pages.num_heads for pages in span), default=None)
    for move in moves:
        assert 0 <= move.head_start <= move.head_stop, move
        assert num_heads is None or move.head_stop <= num_heads, move
    return Group(Shape._make((*_same(move)[:-1], first_token)), ids, moves)
