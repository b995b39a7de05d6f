"""KV events of the pool: which of the engine's blocks are stored in which medium (pure).

Scheduler's thread. A block is announced in a medium once all chunks that it overlaps are there, and
removed when one of them has left host memory; once per medium, however often it is saved. Stores do
not report what they evict, so a block that is announced in a store may be gone.

At most `MAX_CHUNKS` chunks are known, the newest; after older ones were forgotten, `clear` removes
everything. At most `MAX_WAITING` events wait; if there are more, `take` returns one `Cleared` in
their place.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from vllm_kvpool.scheduler.messages import Stored
from vllm_kvpool.transfer.ops import JobId

MAX_CHUNKS = 16_384
MAX_WAITING = 65_536


class Medium(NamedTuple):
    """Places of stored KV, in the words of KV events."""

    name: str
    locality: str | None = None


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """The engine's blocks that end in a chunk. `payload`: what events say besides their hashes.

    The first block may begin in earlier chunks, `needs`, nearest last.
    """

    chunk: str
    blocks: tuple[Hashable, ...]
    needs: tuple[str, ...]
    payload: Any


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks [start, stop) of a chunk are in the medium."""

    medium: Medium
    of: ChunkBlocks
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that have left a medium."""

    medium: Medium
    blocks: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Every announced block has left every medium."""


Announcement = BlocksStored | BlocksRemoved | Cleared


@dataclass(slots=True)
class _Content:
    """The chunks and blocks of a medium."""

    chunks: dict[str, None] = field(default_factory=dict)
    """In the order in which they were stored."""
    counts: dict[Hashable, int] = field(default_factory=dict)
    """Announced block -> how many chunks have it: chunks that differ after it share it."""

    def start_of(self, blocks: ChunkBlocks) -> int:
        """Return the first of a chunk's blocks that is there with it."""
        return 0 if all(need in self.chunks for need in blocks.needs) else 1

    def count_in(self, block: Hashable) -> bool:
        """Count another chunk with the block, and return True if it is the first."""
        self.counts[block] = self.counts.get(block, 0) + 1
        return self.counts[block] == 1

    def count_out(self, block: Hashable) -> bool:
        """Count a removed chunk with the block, and return True if it was the last."""
        self.counts[block] -= 1
        if self.counts[block]:
            return False
        del self.counts[block]
        return True


class KVEventTracker:
    """The announced chunks and the waiting events. `media`: the medium of each tier."""

    def __init__(self, media: Sequence[Medium]) -> None:
        self._tiers = tuple(media)
        self._chunks: OrderedDict[str, ChunkBlocks] = OrderedDict()
        # Chunk -> known chunks whose first block begins in it.
        self._followers: dict[str, set[str]] = {}
        self._media: dict[Medium, _Content] = {}
        self._last_job = self._last_before_clear = -1
        self._waiting: list[Announcement] = []
        self._has_forgotten = False
        self._has_dropped = False  # events, since the last `take`

    # What is known of chunks

    def knows(self, chunk: str) -> bool:
        """Return True if the chunk is known; otherwise call `learn`."""
        if chunk not in self._chunks:
            return False
        self._chunks.move_to_end(chunk)
        return True

    def learn(self, blocks: ChunkBlocks) -> None:
        """Keep a chunk's blocks: it is about to be stored or fetched."""
        self._chunks[blocks.chunk] = blocks
        for need in blocks.needs:
            self._followers.setdefault(need, set()).add(blocks.chunk)
        while len(self._chunks) > MAX_CHUNKS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        chunk = next(iter(self._chunks))
        for content in self._media.values():
            if chunk in content.chunks:
                self._has_forgotten = True
                self._take_out(content, chunk)
        for need in self._chunks.pop(chunk).needs:
            self._followers[need].discard(chunk)
            if not self._followers[need]:
                del self._followers[need]

    def _followers_in(self, content: _Content, chunk: str) -> list[ChunkBlocks]:
        """Return the chunks of a medium that go on where `chunk` ends.

        The first block of each is there, and begins in a chunk that is.
        """
        followers = [self._chunks[each] for each in sorted(self._followers.get(chunk, ()))]
        return [
            each
            for each in followers
            if each.chunk in content.chunks and not content.start_of(each)
        ]

    def _take_out(self, content: _Content, chunk: str) -> tuple[Hashable, ...]:
        """Remove a chunk from a medium; the blocks that have left it."""
        blocks = self._chunks[chunk]
        left = list(blocks.blocks[content.start_of(blocks) :])
        for follower in self._followers_in(content, chunk):
            left += follower.blocks[:1]
        del content.chunks[chunk]
        return tuple(block for block in left if content.count_out(block))

    # Saves

    def planned(self, job_id: JobId) -> None:
        """Count a planned save; `saved` follows."""
        self._last_job = max(self._last_job, job_id)

    def saved(self, job_id: JobId, first_chunk: int, chunks: Sequence[str], how: Stored) -> None:
        """Announce the chunks of a save that has ended in every rank."""
        if job_id <= self._last_before_clear or not how.tiers:
            return
        medium = self._tiers[max(how.tiers)]  # the nearest medium that may hold all cells
        for index, chunk in enumerate(chunks, first_chunk):
            if index not in how.missed:
                self.stored(chunk, medium)

    # Media

    def stored(self, chunk: str, medium: Medium) -> None:
        """Note that a medium has all cells of a chunk."""
        blocks = self._chunks.get(chunk)
        content = self._media.setdefault(medium, _Content())
        if blocks is None or chunk in content.chunks:
            return
        content.chunks[chunk] = None
        self._count_in(medium, content, blocks, content.start_of(blocks), len(blocks.blocks))
        for follower in self._followers_in(content, chunk):
            self._count_in(medium, content, follower, 0, 1)

    def _count_in(
        self, medium: Medium, content: _Content, blocks: ChunkBlocks, start: int, stop: int
    ) -> None:
        new = [content.count_in(block) for block in blocks.blocks[start:stop]]
        self._emit_runs(medium, blocks, start, new)

    def _emit_runs(
        self, medium: Medium, blocks: ChunkBlocks, start: int, new: Sequence[bool]
    ) -> None:
        """Announce the new blocks from `start` on, adjacent ones together."""
        for is_new, run in groupby(enumerate(new, start), lambda each: each[1]):
            places = [place for place, _ in run]
            if is_new:
                self._emit(BlocksStored(medium, blocks, places[0], places[-1] + 1))

    def gone(self, chunk: str, medium: Medium) -> None:
        """Announce that a chunk has left the medium, as one of its cells has."""
        content = self._media.get(medium)
        if content is None or chunk not in content.chunks:
            return
        removed = self._take_out(content, chunk)
        if removed:
            self._emit(BlocksRemoved(medium, removed))

    def clear(self) -> None:
        """Announce that everything stored is removed. Saves in progress do not count."""
        self._last_before_clear = self._last_job
        media, self._media = self._media, {}
        for medium, content in media.items():
            if content.counts and not self._has_forgotten:
                self._emit(BlocksRemoved(medium, tuple(content.counts)))
        if self._has_forgotten:
            self._emit(Cleared())
        self._chunks.clear()
        self._followers.clear()
        self._has_forgotten = False

    def repeat(self) -> None:
        """Announce everything again, as receivers have dropped all blocks of this engine."""
        for medium, content in list(self._media.items()):
            announced: set[Hashable] = set()
            for chunk in list(content.chunks):
                blocks = self._chunks[chunk]
                start = content.start_of(blocks)
                own = blocks.blocks[start:]
                self._emit_runs(medium, blocks, start, [block not in announced for block in own])
                announced.update(own)

    # Events that wait for `take`

    def _emit(self, announcement: Announcement) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(announcement)
        else:
            self._has_dropped = True

    @property
    def num_waiting(self) -> int:
        """Number of events that the engine has not taken yet."""
        return len(self._waiting)

    def take(self) -> list[Announcement]:
        """Return the events since the last call, in order.

        After an overflow all is cleared: what was stored before this call is announced when it is
        stored again.
        """
        waiting, self._waiting = self._waiting, []
        if self._has_dropped:
            self._has_dropped = False
            self._media.clear()
            return [Cleared()]
        return waiting
