"""Blocks of the engine: which of them a load or save is about, and which saves hold (pure).

For layers that read only the last tokens the engine frees blocks while a request runs. Their place
in the block table is then empty or, in some releases, names a block that another request has by
now. So entries before `AttentionWindow.first_read` count only if the block is held.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vllm_kvpool.layout.topology import KVCacheGroup
from vllm_kvpool.scheduler.request import Gap, StateOffer
from vllm_kvpool.transfer.ops import NULL_BLOCK, JobId, JobPages

HELD_SHARE = 2  # half of the blocks that may be pinned may be held for saves not due yet


class BlockPins(Protocol):
    """References on the engine's blocks."""

    def pin(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, so that the engine cannot reuse it."""

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Drop a reference of each block; the last one frees the block."""

    def evict(self, block_ids: Sequence[int]) -> None:
        """Take them out of the engine's own prefix cache."""

    def num_if_all_free(self) -> int:
        """Return the number of the engine's blocks if all of them are free; else 0."""


class Place(NamedTuple):
    """The place of a block in a request's tables: KV cache group and index."""

    group: int
    block: int


@dataclass(slots=True)
class _Pinned:
    block_ids: tuple[int, ...]
    ranks_left: int


class PinLedger:
    """The blocks that saves hold. Scheduler's thread."""

    def __init__(self, max_blocks: int, num_ranks: int, pins: BlockPins) -> None:
        self._pins = pins
        self._max_blocks = max_blocks
        self._max_held = max_blocks // HELD_SHARE
        self._num_ranks = num_ranks
        self._pinned: dict[JobId, _Pinned] = {}
        self._held: dict[str, dict[Place, int]] = {}  # request -> where in its tables -> block
        self.num_blocks = 0  # pinned for a job
        self.num_held = 0

    @property
    def room(self) -> int:
        """The number of blocks that may be pinned besides."""
        return self._max_blocks - self.num_blocks - self.num_held

    def pin(self, job_id: JobId, block_ids: tuple[int, ...]) -> None:
        """Hold the blocks until every rank has gathered the job."""
        assert len(block_ids) <= self.room
        self._pins.pin(block_ids)
        self._pinned[job_id] = _Pinned(block_ids, self._num_ranks)
        self.num_blocks += len(block_ids)

    def release(self, job_id: JobId, ranks: int) -> None:
        """Count `ranks` more ranks that have gathered the job; the last one releases its blocks."""
        pinned = self._pinned[job_id]
        pinned.ranks_left -= ranks
        assert pinned.ranks_left >= 0, f"save {job_id} reported by too many ranks"
        if pinned.ranks_left == 0:
            del self._pinned[job_id]
            self.num_blocks -= len(pinned.block_ids)
            self._pins.unpin(pinned.block_ids)

    def hold(self, request_id: str, place: Place, block_id: int) -> bool:
        """Keep a block of an incomplete chunk that the engine is about to free.

        False if `max_blocks / HELD_SHARE` blocks are held already: saves need the rest.
        """
        held = self._held.setdefault(request_id, {})
        if place in held:
            return True
        if self.room < 1 or self.num_held >= self._max_held:
            return False
        self._pins.pin((block_id,))
        held[place] = block_id
        self.num_held += 1
        return True

    def held(self, request_id: str) -> Mapping[Place, int]:
        """Return the blocks held for a request."""
        return self._held.get(request_id, {})

    def release_held(self, request_id: str, places: Iterable[Place]) -> None:
        """Release blocks that are held for a request."""
        held = self._held.get(request_id)
        if held is None:
            return
        block_ids = [held.pop(place) for place in places]
        if not held:
            del self._held[request_id]
        self.num_held -= len(block_ids)
        if block_ids:
            self._pins.unpin(block_ids)

    def release_all_held(self, request_id: str | None = None) -> None:
        """Release all blocks that are held for a request, or for all requests."""
        for each in list(self._held) if request_id is None else [request_id]:
            self.release_held(each, list(self.held(each)))


BlockTable = Sequence[int]
NO_PAGES = JobPages((), 0, 0, 0)


class GroupTables:
    """The engine's KV cache groups, in its order; `tables` below has one block table for each.

    `chunk_tokens` counts only where the engine frees blocks while a request runs.
    """

    def __init__(self, groups: Sequence[KVCacheGroup], chunk_tokens: int = 0) -> None:
        self._groups = tuple(groups)
        self._chunk_tokens = chunk_tokens
        shared = [(i, group) for i, group in enumerate(groups) if group.shared]
        self._attention = [(i, group) for i, group in shared if not group.is_state]
        self._windows = [(i, group) for i, group in self._attention if not group.window.is_full]
        self._states = {i: group for i, group in shared if group.is_state}
        self.block_size = math.lcm(*(group.block_size for group in groups))
        """Hits are aligned to it."""

    @property
    def resumes(self) -> bool:
        """True if vLLM resumes a request whose load stopped at the first block not loaded.

        It does so with a single KV cache group whose layers read the whole prompt.
        """
        return len(self._groups) == 1 and self._groups[0].window.is_full and not self._states

    @property
    def has_states(self) -> bool:
        """True if layers keep recurrent states, so that hits end at boundaries."""
        return bool(self._states)

    @property
    def has_attention(self) -> bool:
        """True if layers keep rows of tokens."""
        return bool(self._attention)

    @property
    def forgets(self) -> bool:
        """True if the engine frees blocks while their request runs."""
        return bool(self._windows)

    def num_blocks(self, start: int, stop: int) -> int:
        """Return how many blocks a save of tokens [start, stop) pins, if none is freed."""
        return sum(
            (stop - start) // self._chunk_tokens * (group.tail_tokens // group.block_size)
            if group.tail_tokens
            else -(-stop // group.block_size) - max(0, start - group.lookahead) // group.block_size
            for _, group in self._attention
        )

    def _is_stored(self, group: KVCacheGroup, block: int) -> bool:
        """Return True if a chunk has tokens of the block, counted from the request's start."""
        if not group.tail_tokens:
            return True
        left = self._chunk_tokens - block * group.block_size % self._chunk_tokens
        return left <= group.tail_tokens

    def of_load(self, tables: Sequence[BlockTable], start: int, stop: int) -> tuple[JobPages, ...]:
        """Return the pages of a load of tokens [start, stop).

        Blocks are filled whole, since another request may find one by its hash and read more of
        it. Where the engine keeps fewer tokens than `AttentionWindow` says, its table decides. Of
        recurrent states the one after `stop` is loaded, into the block that computing goes on in.
        """
        pages = [NO_PAGES] * len(self._groups)
        for i, group in self._states.items():
            block = tables[i][-(-stop // group.block_size) - 1]
            assert block != NULL_BLOCK, (i, start, stop)
            pages[i] = state_page(block, stop)
        for i, group in self._attention:
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
        """Return the pages of a save of tokens [start, stop); None if full attention's are missing.

        Of a group with `lookahead`, rows before `start` are of the first chunk, too.
        `computed` tokens had been computed when the engine last freed blocks.
        """
        pages = [NO_PAGES] * len(self._groups)
        for i, group in self._attention:
            size, begin = group.block_size, max(0, start - group.lookahead)
            first, last = begin // size, -(-stop // size)
            ids = tuple(tables[i][first:last])
            if len(ids) < last - first:
                return None
            if group.window.is_full:
                if NULL_BLOCK in ids:
                    return None
            else:
                valid = group.window.first_read(computed) // size
                ids = tuple(
                    NULL_BLOCK
                    if not self._is_stored(group, index)
                    else block
                    if index >= valid and block != NULL_BLOCK
                    else held.get(Place(i, index), NULL_BLOCK)
                    for index, block in enumerate(ids, first)
                )
            pages[i] = JobPages(ids, first * size, begin, stop)
        return tuple(pages)

    def gaps(self, pages: Sequence[JobPages], chunks: range, found: int) -> set[Gap]:
        """Return the chunks of a save that lack blocks of a window.

        Chunks that a hit of the first `found` chunks needs are left out: the pool has them.
        """
        gaps: set[Gap] = set()
        stop = found * self._chunk_tokens
        for i, group in self._windows:
            known = self._needed(group, stop)
            for index, block in enumerate(
                pages[i].block_ids, pages[i].table_start // group.block_size
            ):
                if block != NULL_BLOCK or not self._is_stored(group, index):
                    continue
                start = index * group.block_size + group.lookahead
                last = (start + group.block_size - 1) // self._chunk_tokens
                lacking = range(start // self._chunk_tokens, last + 1)
                gaps.update((i, each) for each in lacking if each in chunks and each not in known)
        return gaps

    def loadable(self, tokens: int, gaps: Collection[Gap]) -> int:
        """Return how many of the first `tokens` tokens a hit can bring without these chunks."""
        while lost := [
            chunk
            for i, group in self._windows
            for chunk in self._needed(group, tokens)
            if (i, chunk) in gaps
        ]:
            tokens = min(lost) * self._chunk_tokens
        return tokens

    def _needed(self, group: KVCacheGroup, tokens: int) -> range:
        """Return the chunks of a window that a hit of so many tokens needs (see `HitSearch`)."""
        read = max(0, tokens - self.block_size)
        first = group.window.first_read(read) // self.block_size * self.block_size
        if group.tail_tokens:
            first = max(0, tokens - 1)
        return range(first // self._chunk_tokens, -(-tokens // self._chunk_tokens))

    def of_states(self, blocks: Mapping[int, int], boundary: int) -> tuple[JobPages, ...]:
        """Return the pages of the recurrent states after `boundary` tokens.

        `blocks` maps KV cache groups to blocks. A group without a block has no pages.
        """
        return tuple(
            state_page(blocks[i], boundary) if i in self._states and i in blocks else NO_PAGES
            for i in range(len(self._groups))
        )

    def of_own_states(self, tables: Sequence[BlockTable], boundary: int) -> Iterator[StateOffer]:
        """Yield the recurrent states after `boundary` tokens, in blocks of the prefix cache."""
        for i, group in self._states.items():
            index, rest = divmod(boundary, group.block_size)
            if index and not rest and tables[i][index - 1] != NULL_BLOCK:
                yield StateOffer(i, tables[i][index - 1], boundary)

    def of_incomplete(
        self, tables: Sequence[BlockTable], start: int, stop: int, computed: int
    ) -> Iterator[tuple[Place, int]]:
        """Yield the blocks of tokens [start, stop) that the engine may free after this step."""
        for i, group in self._windows:
            size = group.block_size
            first = max(start, group.window.first_read(computed)) // size
            for index, block in enumerate(tables[i][first : -(-stop // size)], first):
                if block != NULL_BLOCK and self._is_stored(group, index):
                    yield Place(i, index), block


def state_page(block: int, boundary: int) -> JobPages:
    """Return the page of the recurrent state after `boundary` tokens."""
    return JobPages((block,), boundary - 1, boundary - 1, boundary)


def all_blocks(pages: Sequence[JobPages]) -> tuple[int, ...]:
    """Return all blocks of a plan."""
    return tuple([block for each in pages for block in each.block_ids if block != NULL_BLOCK])
