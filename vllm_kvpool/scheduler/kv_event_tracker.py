"""KV events of the pool: which of the engine's blocks are stored in which medium (pure).

Scheduler's thread. A block is announced in a medium once all chunks that it overlaps are there, and
removed when one of them has left; once per medium, however often it is saved. Stores do not report
what they evict: `next_to_check` names chunks to check, and `found_missing` takes those that are
gone.

At most `MAX_CHUNKS` chunks are known, the newest; after older ones were forgotten, `clear` removes
everything. At most `MAX_WAITING` events wait; one `Cleared` replaces them when there are more.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, NamedTuple

from vllm_kvpool.scheduler.messages import Stored
from vllm_kvpool.transfer.ops import JobId

MAX_CHUNKS = 16_384
MAX_JOBS = 4_096
MAX_WAITING = 65_536


class Medium(NamedTuple):
    """Where KV is stored, in the words of KV events."""

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
    """These blocks have left the medium."""

    medium: Medium
    blocks: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """All announced blocks are removed, in all media."""


Announcement = BlocksStored | BlocksRemoved | Cleared


@dataclass(slots=True)
class _Job:
    chunks: tuple[str, ...]
    first_chunk: int
    how: Stored | None = None


@dataclass(slots=True)
class _Content:
    """The announced chunks and blocks of a medium."""

    announced: OrderedDict[str, tuple[int, int]] = field(default_factory=OrderedDict)
    """Chunk -> the range of its blocks that is announced; the next to check comes first."""
    renewed: set[str] | None = None
    """Chunks stored since the presence check began; None while none is under way."""
    followers: dict[str, set[str]] = field(default_factory=dict)
    """Chunk -> announced chunks whose first block overlaps it."""
    counts: dict[Hashable, int] = field(default_factory=dict)
    """Block -> how many chunks it is announced for: chunks that differ after it share it."""

    def renew(self, chunk: str) -> None:
        """The chunk has been stored: a presence check that began before does not count."""
        if self.renewed is not None:
            self.renewed.add(chunk)
            if len(self.renewed) > MAX_CHUNKS:  # the check takes too long: ignore it
                self.renewed = None

    def has_all(self, chunks: Sequence[str]) -> bool:
        return all(chunk in self.announced for chunk in chunks)

    def link(self, blocks: ChunkBlocks) -> None:
        """Add a chunk."""
        count = len(blocks.blocks)
        self.announced[blocks.chunk] = (0 if self.has_all(blocks.needs) else min(1, count), count)
        for need in blocks.needs:
            self.followers.setdefault(need, set()).add(blocks.chunk)

    def unlink(self, blocks: ChunkBlocks) -> None:
        """Remove a chunk."""
        del self.announced[blocks.chunk]
        for need in blocks.needs:
            followers = self.followers[need]
            followers.discard(blocks.chunk)
            if not followers:
                del self.followers[need]

    def count_in(self, block: Hashable) -> bool:
        """Another chunk has the block; whether it is the first."""
        self.counts[block] = self.counts.get(block, 0) + 1
        return self.counts[block] == 1

    def count_out(self, block: Hashable) -> bool:
        """A chunk with the block was removed; whether it was the last."""
        self.counts[block] -= 1
        if self.counts[block]:
            return False
        del self.counts[block]
        return True


class KVEventTracker:
    """What has been announced, and the events that wait. `media`: the medium of each tier."""

    def __init__(self, media: Sequence[Medium], num_ranks: int) -> None:
        self._tiers = tuple(media)
        self._num_ranks = num_ranks
        self._chunks: OrderedDict[str, ChunkBlocks] = OrderedDict()
        self._media: dict[Medium, _Content] = {}
        self._jobs: OrderedDict[JobId, _Job] = OrderedDict()
        self._waiting: list[Announcement] = []
        self._has_forgotten = False

    # What is known of chunks

    def knows(self, chunk: str) -> bool:
        """Whether the chunk is known; otherwise call `learn`."""
        if chunk not in self._chunks:
            return False
        self._chunks.move_to_end(chunk)
        return True

    def learn(self, blocks: ChunkBlocks) -> None:
        """A chunk is about to be stored or fetched."""
        self._chunks[blocks.chunk] = blocks
        while len(self._chunks) > MAX_CHUNKS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        chunk, blocks = self._chunks.popitem(last=False)
        for content in self._media.values():
            if chunk in content.announced:
                self._has_forgotten = True
                for block in blocks.blocks[slice(*content.announced[chunk])]:
                    content.count_out(block)
                content.unlink(blocks)

    # Saves

    def planned(self, job: JobId, first_chunk: int, chunks: Sequence[str]) -> None:
        """A save has been planned; `ended` follows for every rank."""
        self._jobs[job] = _Job(tuple(chunks), first_chunk)
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)

    def ended(self, job_id: JobId, how: Stored) -> None:
        """The save has ended in `how.ranks` more ranks; after the last its chunks are stored."""
        job = self._jobs.get(job_id)
        if job is None:  # of before a reset
            return
        how = how if job.how is None else job.how.merged(how)
        job.how = how
        if how.ranks < self._num_ranks:
            return
        del self._jobs[job_id]
        if not how.tiers:
            return
        medium = self._tiers[max(how.tiers)]  # the nearest medium that may hold all cells
        for index, chunk in enumerate(job.chunks, job.first_chunk):
            if index not in how.missed:
                self.stored(chunk, medium)

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    # Media

    def stored(self, chunk: str, medium: Medium) -> None:
        """All cells of the chunk are in the medium."""
        blocks = self._chunks.get(chunk)
        content = self._media.setdefault(medium, _Content())
        content.renew(chunk)
        if blocks is None or chunk in content.announced:
            return
        content.link(blocks)
        self._count_in(medium, content, blocks, *content.announced[chunk])
        for follower in sorted(content.followers.get(chunk, ())):
            behind = self._chunks[follower]
            first, stop = content.announced[follower]
            if first == 1 and content.has_all(behind.needs):
                content.announced[follower] = (0, stop)
                self._count_in(medium, content, behind, 0, 1)

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
        """A cell of the chunk has left the medium."""
        content = self._media.get(medium)
        if content is None or chunk not in content.announced:
            return
        blocks = self._chunks[chunk]
        start, stop = content.announced[chunk]
        left = list(blocks.blocks[start:stop])
        for follower in sorted(content.followers.get(chunk, ())):
            first, last = content.announced[follower]
            if first == 0 and last:
                left.append(self._chunks[follower].blocks[0])
                content.announced[follower] = (1, last)
        content.unlink(blocks)
        removed = tuple(block for block in left if content.count_out(block))
        if removed:
            self._emit(BlocksRemoved(medium, removed))

    def next_to_check(self, medium: Medium, most: int) -> tuple[str, ...]:
        """Up to `most` announced chunks of the medium, the longest unchecked first."""
        content = self._media.get(medium)
        if content is None or not content.announced:
            return ()
        chunks = tuple(islice(content.announced, most))
        for chunk in chunks:
            content.announced.move_to_end(chunk)
        content.renewed = set()
        return chunks

    def found_missing(self, chunks: Sequence[str], medium: Medium) -> None:
        """The last presence check found that these chunks are no longer stored."""
        content = self._media.get(medium)
        if content is None or content.renewed is None:  # all was forgotten meanwhile
            return
        renewed, content.renewed = content.renewed, None
        for chunk in chunks:
            if chunk not in renewed:
                self.gone(chunk, medium)

    def clear(self) -> None:
        """All that was stored is removed, and saves that are under way do not count."""
        self._jobs.clear()
        media, self._media = self._media, {}
        for medium, content in media.items():
            if content.counts and not self._has_forgotten:
                self._emit(BlocksRemoved(medium, tuple(content.counts)))
        if self._has_forgotten:
            self._emit(Cleared())
        self._chunks.clear()
        self._has_forgotten = False

    def repeat(self) -> None:
        """Receivers have dropped all blocks of this engine: announce everything again."""
        for medium, content in list(self._media.items()):
            announced: set[Hashable] = set()
            for chunk, (start, stop) in list(content.announced.items()):
                blocks = self._chunks[chunk]
                own = blocks.blocks[start:stop]
                self._emit_runs(medium, blocks, start, [block not in announced for block in own])
                announced.update(own)

    # Events that wait for `take`

    def _emit(self, announcement: Announcement) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting = [Cleared()]
            self._media.clear()
            self._jobs.clear()
            return
        self._waiting.append(announcement)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take(self) -> list[Announcement]:
        """The events since the last call, in order."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def check(self) -> None:
        """What must hold between calls; tests call it after each."""
        assert len(self._chunks) <= MAX_CHUNKS
        assert len(self._jobs) <= MAX_JOBS
        assert len(self._waiting) <= MAX_WAITING
        for content in self._media.values():
            assert len(content.renewed or ()) <= MAX_CHUNKS
            for chunk, (start, stop) in content.announced.items():
                blocks = self._chunks[chunk]
                assert stop == len(blocks.blocks)
                assert start == (0 if content.has_all(blocks.needs) else min(1, stop))
                assert all(chunk in content.followers[need] for need in blocks.needs)
                assert all(block in content.counts for block in blocks.blocks[start:stop])
            total = sum(stop - start for start, stop in content.announced.values())
            assert total == sum(content.counts.values())
            for followers in content.followers.values():
                assert followers
                assert followers <= content.announced.keys()
