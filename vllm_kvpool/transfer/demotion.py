"""Demotion of cells that a store would evict next, into the tier after it.

With write-back only: with write-through that tier was given the cell when it was saved. A cell is
fetched, checked, put into the next tier and removed where it was; host memory does not keep it.
What cannot be put stays until the store evicts it.

`DemotionThread` asks the stores, which read from disks, and waits for the end of each demotion
before the next; `Demotions` is the engine thread's.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from vllm_kvpool.errors import StoreError, StoreUnreachable
from vllm_kvpool.storage.base import DemotionSource
from vllm_kvpool.transfer.context import CellOp, Marker, TransferContext
from vllm_kvpool.transfer.fetches import Fetches
from vllm_kvpool.transfer.graph import Op, OpState, Owner, Priority
from vllm_kvpool.transfer.host_cache import CacheEntryState
from vllm_kvpool.transfer.ops import Cell, DemotionDone, DemotionJob, OpKind
from vllm_kvpool.transfer.saves import Copy, SaveManager

logger = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
MAX_CELLS = 32  # of one demotion: they take slots that saves could use
WAIT_S = 60.0  # for the end of a demotion
JOIN_S = 0.5


class Demotions:
    """The engine thread's part."""

    def __init__(self, context: TransferContext, fetches: Fetches, saves: SaveManager) -> None:
        self._context = context
        self._fetches = fetches
        self._saves = saves

    def submit(self, job: DemotionJob) -> None:
        """Start to move the cells; ends at once if no later tier can be written to."""
        context = self._context
        owner = Owner(Priority.DEMOTE)
        removes: list[Op] = []
        further = context.tiers_writable(job.tier + 1)
        for cell in job.cells if further else ():
            if cell.nbytes > context.slot_bytes:  # of another model
                continue
            if self._fetches.is_leaving(job.tier, cell.key):
                continue
            entry = context.host_cache.get(cell.key)
            is_here = entry is not None
            if entry is None:
                entry = self._fetches.begin_at(job.tier, cell, owner)
            elif entry.state is not CacheEntryState.PRESENT or entry.dirty:
                continue
            copy = self._saves.begin_copy(entry)
            copy.transient = not is_here
            removes.append(self._move(copy, owner, job.tier, further[0]))
        marker = Marker(partial(self._ended, job, removes))
        context.scheduler.add(owner, None, marker, after=removes, always=True)

    def _move(self, copy: Copy, owner: Owner, tier: int, target: int) -> Op:
        """Put a cell into another tier, then remove it; returns the last op."""
        context, cell = self._context, copy.cell
        before = () if copy.entry.op is None else (copy.entry.op,)
        # A cell that a gather brought may have no header yet.
        seal = context.scheduler.add(owner, context.lane(OpKind.SEAL), copy, cell.nbytes, before)
        lane = context.lane(OpKind.PUT, target)
        put = context.scheduler.add(owner, lane, copy, cell.nbytes, (seal,))
        copy.ops += (seal, put)
        lane = context.lane(OpKind.REMOVE, tier)
        return context.scheduler.add(owner, lane, CellOp(cell, None), 0, (put,))

    def _ended(self, job: DemotionJob, removes: Sequence[Op]) -> None:
        """All removals have ended: report the demotion."""
        moved = sum(op.state is OpState.DONE for op in removes)
        tier = self._context.tiers[job.tier].name
        self._context.count("kvpool_evicted_cells", moved, tier=tier, fate="demoted")
        self._context.reports.append(DemotionDone(job, moved))


class DemotionThread:
    """Asks stores what they would evict next, and posts it to the engine."""

    def __init__(
        self, stores: Mapping[int, DemotionSource], post: Callable[[DemotionJob], None]
    ) -> None:
        self._stores = stores
        self._post = post
        self._closing = threading.Event()
        self._answer: SimpleQueue[int] = SimpleQueue()  # of the present or the last job
        self._thread = threading.Thread(target=self._run, name="kvpool-demotion", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """End the thread; the engine goes on with a demotion in progress.

        Returns whether it has ended: then the stores may be closed.
        """
        self._closing.set()
        self._answer.put(0)  # the engine may end before the demotion, without an answer
        self._thread.join(JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = ASK_EVERY_S
        while not self._closing.wait(pause):
            # No pause while cells move.
            moved = [self._demote(tier, store) for tier, store in self._stores.items()]
            pause = 0.0 if any(moved) else ASK_EVERY_S

    def _demote(self, tier: int, store: DemotionSource) -> int:
        try:
            found = store.eviction_candidates(MAX_CELLS)
            if not found:
                return 0
            job = DemotionJob(tier, tuple(Cell(*each) for each in found))
            self._answer = job.answer  # before `is_set`: `close` puts into the newest
            try:
                if self._closing.is_set():
                    return 0
                self._post(job)
                return job.answer.get(timeout=WAIT_S)
            except Empty:
                return 0
            finally:
                store.release_candidates()
        except StoreUnreachable:
            return 0  # its guard has logged it
        except (StoreError, OSError) as error:
            logger.warning(
                "kvpool: demotion out of tier %d failed and is tried again in %g s: %s",
                tier,
                ASK_EVERY_S,
                error,
            )
            return 0
