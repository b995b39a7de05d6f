"""Which blocks of a request a plan is about, in each of the engine's KV cache groups (pure).

Layers that read only the last tokens let blocks go while a request runs: their place in the table
is empty then, or, in some releases, still names a block that is someone else's by now. So what is
before `AttentionWindow.first_read` is not believed, unless it is held.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from vllm_kvpool.layout.topology import KVCacheGroup
from vllm_kvpool.scheduler.block_pins import Place
from vllm_kvpool.transfer.ops import NULL_BLOCK, JobPages

BlockTable = Sequence[int]
NO_PAGES = JobPages((), 0, 0, 0)


class GroupTables:
    """The groups of an engine, in its order; `tables` below has one block table for each."""

    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        self._groups = tuple(groups)
        self._shared = [(i, group) for i, group in enumerate(groups) if group.shared]
        self._windows = [(i, group) for i, group in self._shared if not group.window.is_full]
        self.block_size = math.lcm(*(group.block_size for group in groups))
        """What hits are aligned to."""

    @property
    def resumes(self) -> bool:
        """Whether a request whose load has stopped goes on from the first block not loaded.

        Blocks must tell which request they are of, as they do in a single group alone, and what is
        before them must be there: of layers that read only the last tokens it is not.
        """
        return len(self._groups) == 1 and self._groups[0].window.is_full

    @property
    def forgets(self) -> bool:
        """Whether blocks are let go while their request runs."""
        return bool(self._windows)

    def num_blocks(self, start: int, stop: int) -> int:
        """How many blocks tokens [start, stop) lie in, if none is gone."""
        return sum(
            -(-stop // group.block_size) - start // group.block_size for _, group in self._shared
        )

    def of_load(self, tables: Sequence[BlockTable], start: int, stop: int) -> tuple[JobPages, ...]:
        """Where a load of tokens [start, stop) goes.

        A block is filled whole: it may be found by its hash later, by a request that reads more
        of it. Where the engine keeps fewer tokens than `AttentionWindow` says, its table decides.
        """
        pages = [NO_PAGES] * len(self._groups)
        for i, group in self._shared:
            size = group.block_size
            read = group.window.first_read(stop)
            first = max(start, read - read % size)
            ids = tuple(tables[i][first // size : -(-stop // size)])
            if NULL_BLOCK in ids:
                assert not group.window.is_full, (i, start, stop, ids)
                gone = len(ids) - ids[::-1].index(NULL_BLOCK)
                first, ids = (first // size + gone) * size, ids[gone:]
            if ids:
                pages[i] = JobPages(ids, first - first % size, first, stop)
        return tuple(pages)

    def of_save(
        self,
        tables: Sequence[BlockTable],
        start: int,
        stop: int,
        computed: int,
        held: Mapping[Place, int],
    ) -> tuple[JobPages, ...] | None:
        """Where tokens [start, stop) are; None if blocks that are never let go are not there.

        `computed` tokens had been computed when the engine last let blocks go.
        """
        pages = [NO_PAGES] * len(self._groups)
        for i, group in self._shared:
            size = group.block_size
            first, last = start // size, -(-stop // size)
            ids = tuple(tables[i][first:last])
            if len(ids) < last - first:
                return None
            if group.window.is_full:
                if NULL_BLOCK in ids:
                    return None
            else:
                valid = group.window.first_read(computed) // size
                ids = tuple(
                    block
                    if index >= valid and block != NULL_BLOCK
                    else held.get(Place(i, index), NULL_BLOCK)
                    for index, block in enumerate(ids, first)
                )
            pages[i] = JobPages(ids, first * size, start, stop)
        return tuple(pages)

    def of_incomplete(
        self, tables: Sequence[BlockTable], start: int, stop: int, computed: int
    ) -> Iterator[tuple[Place, int]]:
        """The blocks of tokens [start, stop) that the engine may let go from the next step on."""
        for i, group in self._windows:
            size = group.block_size
            first = max(start, group.window.first_read(computed)) // size
            for index, block in enumerate(tables[i][first : -(-stop // size)], first):
                if block != NULL_BLOCK:
                    yield Place(i, index), block


def all_blocks(pages: Sequence[JobPages]) -> tuple[int, ...]:
    """Every block of a plan."""
    return tuple(block for each in pages for block in each.block_ids if block != NULL_BLOCK)
