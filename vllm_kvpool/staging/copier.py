"""The interface of copiers, which move cells between pages and staging memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from vllm_kvpool.layout.pages import Int64s, LayerPages, SlabMove

MAX_TEMPLATES = 1024  # that are remembered; those of a model are far fewer


class Copier(Protocol):
    """Moves cells of one rank's pages; blocks without the GIL.

    At most `num_threads` lane threads call it at once. It orders nothing against the model's
    stream: who calls it has waited for the plan's fence (`devices.py: Fence`).
    """

    num_threads: int
    """The number of batches in progress: the device copies one while the next is started."""

    def gather(self, moves: Sequence[SlabMove]) -> None:
        """Copy pages into slots; when it returns the pages may be overwritten."""

    def scatter(self, moves: Sequence[SlabMove]) -> None:
        """Copy slots into pages; when it returns the slots may be overwritten."""


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The `places` of slabs, checked against a rank's pages. Its identity is a key of caches."""

    array: Int64s  # keeps its id valid
    places: tuple[tuple[int, int, int, int], ...]
    id_tokens: int  # of a manager block
    num_ids: int  # all block ids are below it


class Shape(NamedTuple):
    """The common part of the moves of `Slabs`. Tokens count from the chunk's start."""

    chunk_tokens: int
    token_start: int
    token_stop: int
    first_token: int  # of the first block that is touched; may be before the chunk


class Slabs(NamedTuple):
    """Moves that differ only in their addresses and block ids."""

    template: Template
    shape: Shape
    addresses: Int64s  # [moves, pieces]
    block_ids: Int64s  # [moves, blocks that are touched]


class MoveChecker:
    """Checks the moves of one rank's copier. Any number of threads may call it at once.

    Kernels check nothing, and a wrong number would corrupt memory. So a wrong move raises
    AssertionError.
    """

    def __init__(self, layers: Sequence[LayerPages]) -> None:
        self._layers = tuple(layers)
        self._templates: dict[int, Template] = {}  # by the ids of arrays

    def check(self, moves: Sequence[SlabMove]) -> list[Slabs]:
        """Check all moves and join those of one template and shape.

        The cost does not depend on the length of block tables, which may be a whole request's.
        """
        joined: dict[tuple[int, ...], tuple[Template, list[Int64s], list[int]]] = {}
        for move in moves:
            addresses, places, block_ids, table_start, chunk_start, chunk_tokens, start, stop = move
            template = self._templates.get(id(places)) or self._remember(places)
            assert len(addresses) == len(places), move
            assert chunk_start <= start <= stop <= chunk_start + chunk_tokens, move
            assert table_start <= start, move
            id_tokens = template.id_tokens
            first = (start - table_start) // id_tokens
            last = -((table_start - stop) // id_tokens)
            first_token = table_start + first * id_tokens - chunk_start
            kind = id(places), chunk_tokens, start - chunk_start, stop - chunk_start, first_token
            if (found := joined.get(kind)) is None:
                found = joined[kind] = template, [], []
            found[1].append(addresses)
            before = len(found[2])
            found[2].extend(block_ids[first:last])
            assert len(found[2]) - before == last - first, move
        slabs = []
        for numbers, (template, some, ids) in joined.items():
            count = len(some)
            table = np.array(ids, np.int64).reshape(count, len(ids) // count)
            # As an unsigned number, a negative id is larger than all others.
            largest = table.view(np.uint64).max(initial=0)
            assert not ids or largest < template.num_ids, f"no pages have block {largest}"
            shape, addresses = Shape._make(numbers[1:]), np.concatenate(some).reshape(count, -1)
            slabs.append(Slabs(template, shape, addresses, table))
        return slabs

    def _remember(self, array: Int64s) -> Template:
        """Check a template, once for all moves that have it."""
        places = tuple(map(tuple, array.tolist()))
        sizes: set[int] = set()
        num_ids = [1 << 62]
        for place in places:
            layer_start, layer_stop, head_start, head_stop = place
            assert 0 <= layer_start <= layer_stop <= len(self._layers), place
            assert 0 <= head_start <= head_stop, place
            for pages in self._layers[layer_start:layer_stop]:
                assert head_stop <= pages.num_heads, place
                sizes.add(pages.tokens_per_block * pages.blocks_per_id)
                num_ids.append(pages.owner[0].shape[0] // pages.blocks_per_id)
        assert len(sizes) <= 1, f"layers {places} have blocks of different sizes"
        if len(self._templates) >= MAX_TEMPLATES:
            self._templates.clear()
        template = Template(array, places, max(sizes, default=1), min(num_ids))
        self._templates[id(array)] = template
        return template
