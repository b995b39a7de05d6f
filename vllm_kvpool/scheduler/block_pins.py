"""References on blocks whose pages are still to be gathered: bounded, released once (pure)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vllm_kvpool.transfer.ops import JobId

HELD_SHARE = 2  # of the blocks that may be pinned, half may be held for saves not due yet


class BlockPins(Protocol):
    """References on the engine's blocks."""

    def pin(self, block_ids: Sequence[int]) -> None: ...
    def unpin(self, block_ids: Sequence[int]) -> None: ...
    def forget(self, block_ids: Sequence[int]) -> None:
        """Let no further request find them in the engine's own cache."""


class Place(NamedTuple):
    """A block of a request: in the block table of which KV cache group, at which index."""

    group: int
    block: int


@dataclass(slots=True)
class _Pinned:
    block_ids: tuple[int, ...]
    ranks_left: int


class PinLedger:
    """Which save holds which blocks. Scheduler's thread; `pins` is bound before the first save."""

    def __init__(self, max_blocks: int, num_ranks: int) -> None:
        self.pins: BlockPins | None = None
        self._max_blocks = max_blocks
        self._max_held = max_blocks // HELD_SHARE
        self._num_ranks = num_ranks
        self._pinned: dict[JobId, _Pinned] = {}
        self._held: dict[str, dict[Place, int]] = {}  # request -> where in its tables -> block
        self.num_blocks = 0  # pinned for a job
        self.num_held = 0

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return self._max_blocks - self.num_blocks - self.num_held

    def pin(self, job_id: JobId, block_ids: tuple[int, ...]) -> None:
        """Hold the blocks until every rank has gathered the job."""
        assert self.pins is not None, "blocks cannot be pinned before the block pool is bound"
        assert len(block_ids) <= self.room
        self.pins.pin(block_ids)
        self._pinned[job_id] = _Pinned(block_ids, self._num_ranks)
        self.num_blocks += len(block_ids)

    def gathered(self, job_id: JobId, ranks: int) -> None:
        """So many more ranks have gathered the job; the last one releases its blocks."""
        pinned = self._pinned[job_id]
        pinned.ranks_left -= ranks
        assert pinned.ranks_left >= 0, f"save {job_id} reported by too many ranks"
        if pinned.ranks_left == 0:
            del self._pinned[job_id]
            self.num_blocks -= len(pinned.block_ids)
            assert self.pins is not None
            self.pins.unpin(pinned.block_ids)

    def hold(self, request_id: str, place: Place, block_id: int) -> bool:
        """Keep a block of a chunk that is not complete, which the engine is about to let go.

        False if that would be one too many: what is held must leave room for saves to come through.
        """
        held = self._held.setdefault(request_id, {})
        if place in held:
            return True
        if self.room < 1 or self.num_held >= self._max_held or self.pins is None:
            return False
        self.pins.pin((block_id,))
        held[place] = block_id
        self.num_held += 1
        return True

    def held(self, request_id: str) -> Mapping[Place, int]:
        """The blocks held for a request."""
        return self._held.get(request_id, {})

    def let_go(self, request_id: str, places: Iterable[Place]) -> None:
        """Those held blocks are not needed any more."""
        held = self._held.get(request_id)
        if held is None:
            return
        block_ids = [held.pop(place) for place in places]
        if not held:
            del self._held[request_id]
        self.num_held -= len(block_ids)
        if block_ids:
            assert self.pins is not None
            self.pins.unpin(block_ids)

    def let_go_all(self, request_id: str | None = None) -> None:
        """Nothing is held for a request any more, or for any."""
        for each in list(self._held) if request_id is None else [request_id]:
            self.let_go(each, list(self.held(each)))

    def check(self) -> None:
        assert self.num_blocks == sum(len(p.block_ids) for p in self._pinned.values())
        assert self.num_held == sum(len(held) for held in self._held.values())
        assert 0 <= self.num_blocks + self.num_held <= self._max_blocks
        assert 0 <= self.num_held <= self._max_held
        assert all(p.ranks_left > 0 for p in self._pinned.values())
