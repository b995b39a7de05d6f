"""Fetches: cells on their way from a tier into host memory (pure; the engine thread's).

A fetch is one op that moves from lane to lane: GET from the nearest tier, then CHECK. If the cell
is missing, bad or out of reach there, the op moves to the next tier's GET. A cell that a replica
fetches is asked of that rank first (`REPLICA`); it has been checked there, and this rank's host
tier does not keep it. All loads that want a cell share its fetch. A fetch that no load wants any
more is cancelled if it has not started.

A bad cell is removed from its tier; until then no load of this engine asks that tier for it. A cell
found further away is copied into nearer tiers (`copy_up`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_kvpool.transfer.context import CellOp, TransferContext, tier_of
from vllm_kvpool.transfer.graph import Op, OpState, Owner
from vllm_kvpool.transfer.host_cache import CacheEntry, CacheEntryState
from vllm_kvpool.transfer.ops import REPLICA, Cell, CellOutcome, OpKind

MAX_WAITING_REMOVES = 1024  # beyond it bad cells stay in their tier


@dataclass(slots=True, eq=False)
class Fetch(CellOp):
    """A cell that is being fetched from `tier`."""

    entry: CacheEntry
    tier: int
    trouble: CellOutcome = CellOutcome.MISSING  # what a load that it fails reports


class Fetches:
    """The fetches, and removals of bad cells. `copy_up(entry, tiers)` copies into nearer tiers.

    Ops that wait for a cell which no tier has are cancelled with the fetch as the cause
    (`Scheduler.take_lost`).
    """

    def __init__(
        self, context: TransferContext, copy_up: Callable[[CacheEntry, list[int]], None]
    ) -> None:
        self._context = context
        self._copy_up = copy_up
        self._removing: dict[tuple[int, str], Op] = {}  # bad cells, by tier and key

    def begin(self, cell: Cell, owner: Owner) -> CacheEntry | None:
        """Start to fetch a cell that is not in host memory; None if no tier can be asked."""
        context = self._context
        tier = REPLICA if cell.fetcher is not None else self._next_tier(cell)
        if tier is None:
            return None
        entry = context.host_cache.begin(cell.key, cell.chunk, cell.nbytes)
        lane = context.lane(OpKind.GET, tier)
        entry.op = context.scheduler.add(owner, lane, Fetch(cell, entry, tier), cell.nbytes)
        return entry

    def release(self, entry: CacheEntry) -> None:
        """A user of the cell has unpinned it: cancel the fetch if it was the last."""
        op = entry.op
        if entry.state is not CacheEntryState.ARRIVING or entry.pins != 1 or entry.prefetched:
            return
        if op is not None and isinstance(op.what, Fetch) and self._context.scheduler.cancel(op):
            self._context.host_cache.failed(entry)
            self._context.host_cache.unpin(entry)

    def forget(self) -> None:
        """A reset: give up fetches that do not run."""
        for entry in list(self._context.host_cache):
            op = entry.op
            if op is not None and isinstance(op.what, Fetch) and op.state is not OpState.RUNNING:
                self._fail(op, CellOutcome.CANCELLED)

    def got(self, op: Op, outcome: CellOutcome) -> None:
        entry = op.what.entry
        if not entry.indexed:  # before a reset
            self._fail(op, CellOutcome.CANCELLED)
        elif outcome is CellOutcome.DONE and op.what.tier == REPLICA:
            self._arrived(op)
        elif outcome is CellOutcome.DONE:
            self._context.scheduler.move(op, self._context.lane(OpKind.CHECK))
        else:
            self._try_elsewhere(op, outcome)

    def checked(self, op: Op, outcome: CellOutcome) -> None:
        if outcome is not CellOutcome.DONE:
            self._try_elsewhere(op, outcome)
        elif not op.what.entry.indexed:  # before a reset
            self._fail(op, CellOutcome.CANCELLED)
        else:
            self._arrived(op)

    def _arrived(self, op: Op) -> None:
        fetch, host_cache = op.what, self._context.host_cache
        entry = fetch.entry
        if fetch.cell.fetcher is not None and host_cache.capacity:
            host_cache.forget(entry)  # another rank's host tier keeps it
        host_cache.arrived(entry, self._context.now_ns)
        if fetch.tier > 0:
            nearer = [t for t in range(fetch.tier) if self._context.is_writable(t)]
            if nearer:
                self._copy_up(entry, nearer)
        self._context.scheduler.finish(op)
        host_cache.unpin(entry)

    def tier_down(self, tier: int) -> None:
        """A tier is not asked any more: move its waiting fetches on, leave its bad cells there."""
        self.writes_down(tier)
        for op in self._context.scheduler.waiting_in(self._context.lane(OpKind.GET, tier)):
            self._try_next_tier(op, CellOutcome.UNREACHABLE)

    def writes_down(self, tier: int) -> None:
        """A tier takes no writes for now: give up waiting removals."""
        for op in self._context.scheduler.waiting_in(self._context.lane(OpKind.REMOVE, tier)):
            self.removed(op, CellOutcome.UNREACHABLE)

    def remove(self, cell: Cell, tier: int, owner: Owner) -> None:
        """Remove a bad cell from a tier, so that no reader meets it again."""
        lane = self._context.lane(OpKind.REMOVE, tier)
        is_down = not self._context.is_writable(tier)
        is_leaving = (tier, cell.key) in self._removing
        if lane.num_ready < MAX_WAITING_REMOVES and not is_down and not is_leaving:
            removal = self._context.scheduler.add(owner, lane, CellOp(cell, None))
            self._removing[tier, cell.key] = removal

    def removed(self, op: Op, outcome: CellOutcome) -> None:
        """REMOVE of a bad cell has ended."""
        del self._removing[tier_of(op), op.what.cell.key]
        if outcome is CellOutcome.DONE:
            self._context.scheduler.finish(op)
        else:
            self._context.scheduler.fail(op)

    def removals(self, keys: Iterable[str]) -> list[Op]:
        """The removals of these cells from any tier."""
        if not self._removing:  # as nearly always
            return []
        wanted = set(keys)
        return [op for (_, key), op in self._removing.items() if key in wanted]

    def _next_tier(self, cell: Cell, first: int = 0) -> int | None:
        """Return the nearest tier from `first` on that can be asked for a cell."""
        for tier in self._context.tiers_up(first):
            if (tier, cell.key) not in self._removing:
                return tier
        return None

    def _try_elsewhere(self, op: Op, outcome: CellOutcome) -> None:
        """The tier did not give the cell: try again, or the next tier, or fail."""
        fetch = op.what
        if outcome is CellOutcome.CORRUPT:
            self.remove(fetch.cell, fetch.tier, op.owner)
        if outcome is not CellOutcome.MISSING and fetch.tier != REPLICA:
            fetch.trouble = outcome
        wanted = fetch.entry.pins > 1 or fetch.entry.prefetched
        if not wanted or not fetch.entry.indexed:
            self._fail(op, CellOutcome.CANCELLED)
            return
        # Others may be before it in the queue: it must not hold a slot that they wait for.
        self._context.host_cache.release_slot(fetch.entry)
        get = self._context.lane(OpKind.GET, fetch.tier)
        if not self._context.try_again(op, fetch.tier, outcome, get):
            self._try_next_tier(op, outcome)

    def _try_next_tier(self, op: Op, outcome: CellOutcome) -> None:
        context, fetch = self._context, op.what
        if fetch.trouble is CellOutcome.MISSING and fetch.tier != REPLICA:
            fetch.trouble = outcome
        further = self._next_tier(fetch.cell, max(0, fetch.tier + 1))
        if further is None:
            self._fail(op, fetch.trouble)
            return
        fetch.tier = further
        op.attempts = 0
        context.scheduler.move(op, context.lane(OpKind.GET, fetch.tier))

    def _fail(self, op: Op, outcome: CellOutcome) -> None:
        entry = op.what.entry
        op.what.trouble = outcome
        if entry.prefetched:
            self._context.count("kvpool_prefetched_cells", outcome="failed")
        self._context.scheduler.fail(op)
        self._context.host_cache.failed(entry)
        self._context.host_cache.unpin(entry)
