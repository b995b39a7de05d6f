"""References on blocks whose pages are still to be gathered: bounded, released once (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_kvpool.transfer.ops import JobId


class BlockPins(Protocol):
    """References on the engine's blocks."""

    def pin(self, block_ids: Sequence[int]) -> None: ...
    def unpin(self, block_ids: Sequence[int]) -> None: ...


@dataclass(slots=True)
class _Pinned:
    block_ids: tuple[int, ...]
    ranks_left: int


class PinLedger:
    """Which save holds which blocks. Scheduler's thread; `pins` is bound before the first save."""

    def __init__(self, max_blocks: int, num_ranks: int) -> None:
        self.pins: BlockPins | None = None
        self._max_blocks = max_blocks
        self._num_ranks = num_ranks
        self._pinned: dict[JobId, _Pinned] = {}
        self.num_blocks = 0

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return self._max_blocks - self.num_blocks

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

    def check(self) -> None:
        assert self.num_blocks == sum(len(p.block_ids) for p in self._pinned.values())
        assert 0 <= self.num_blocks <= self._max_blocks
        assert all(p.ranks_left > 0 for p in self._pinned.values())
