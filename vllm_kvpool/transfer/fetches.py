"""Fetches: slabs on their way from a tier into host memory (pure; the engine thread's).

A fetch is one op that moves from lane to lane: GET from the nearest tier, then CHECK. Cells that
are missing, bad or out of reach there are asked of the next tier. A slab that a replica fetches is
asked of that rank first (`REPLICA`); it has been checked there, and this rank's host tier does not
keep it. All loads that want a slab share its fetch. A fetch that no load wants any more is
cancelled if it has not started. Saves follow fetches with slots or readers, and keep none going.

A bad cell is removed from its tier; until then no load of this engine asks that tier for its slab.
Slabs with cells that were found further away are copied into nearer tiers (`copy_up`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from vllm_kvpool.transfer.context import SlabOp, TransferContext, tier_of
from vllm_kvpool.transfer.graph import Op, OpState, Owner
from vllm_kvpool.transfer.host_cache import CacheEntry
from vllm_kvpool.transfer.ops import (
    REPLICA,
    CellOutcome,
    OpKind,
    Outcome,
    Slab,
    each_of,
)

MAX_WAITING_REMOVES = 1024  # beyond it bad cells stay in their tier


@dataclass(slots=True, eq=False)
class Fetch(SlabOp):
    """A slab whose `cells` are being fetched from `tier`, or checked; the others are here."""

    entry: CacheEntry
    tier: int = 0
    refused: list[int] = field(default_factory=list)
    """Cells that the tier did not give, while those that it gave are checked."""
    reason: CellOutcome = CellOutcome.MISSING  # of the last of them that is not missing
    trouble: CellOutcome = CellOutcome.MISSING  # what a load that it fails reports

    @property
    def failure(self) -> CellOutcome:
        """The outcome that loads report if they fail with this fetch."""
        return self.trouble


class Fetches:
    """The fetches, and removals of bad cells. `copy_up(entry, tiers)` copies into nearer tiers.

    Ops that wait for a slab which no tier has are cancelled with the fetch as the cause
    (`Scheduler.take_lost`).
    """

    def __init__(
        self, context: TransferContext, copy_up: Callable[[CacheEntry, list[int]], None]
    ) -> None:
        self._context = context
        self._copy_up = copy_up
        self._removing: dict[tuple[int, str], Op] = {}  # bad cells, by tier and key

    def start_fetch(self, slab: Slab, owner: Owner) -> CacheEntry | None:
        """Start to fetch a slab that is not in host memory; None if no tier can be asked."""
        context = self._context
        lender = None if slab.fetcher is None else context.lenders[slab.fetcher]
        may_ask = lender is not None and not lender.is_open(context.now)
        tier = REPLICA if may_ask else self._next_tier(slab)
        if tier is None:
            return None
        entry = context.host_cache.add(slab)
        lane, fetch = context.lane(OpKind.GET, tier), Fetch(slab, entry, tier=tier)
        entry.op = context.scheduler.add(owner, lane, fetch, slab.nbytes, size=slab.num_cells)
        return entry

    def cancel_if_unwanted(self, entry: CacheEntry) -> None:
        """Cancel the fetch of a slab whose last reader has unpinned it."""
        op = entry.op
        if op is None or not isinstance(op.what, Fetch) or entry.is_awaited:
            return
        if entry.slots and entry.num_followers:
            return  # it needs no more slots
        if entry.prefetched:
            self._context.scheduler.cancel_successors(op)  # saves
        elif self._context.scheduler.cancel(op):
            self._context.host_cache.failed(entry)
            self._context.host_cache.unpin(entry)

    def cancel_waiting(self) -> None:
        """Cancel the fetches that do not run, after a reset."""
        for entry in list(self._context.host_cache):
            op = entry.op
            if op is not None and isinstance(op.what, Fetch) and op.state is not OpState.RUNNING:
                self._fail(op, CellOutcome.CANCELLED)

    def got(self, op: Op, outcome: Outcome) -> None:
        """Check the cells that a tier gave: the GET has ended."""
        fetch: Fetch = op.what
        if not fetch.entry.indexed:  # before a reset
            self._fail(op, CellOutcome.CANCELLED)
            return
        given = self._refuse(op, outcome)
        if fetch.refused and given and self._next_tier(fetch.slab, fetch.tier + 1) is None:
            fetch.refused += given  # the slab will not be whole, unless this tier is asked again
            self._try_elsewhere(op)
        elif fetch.tier != REPLICA and given:
            _narrow(op, given)
            self._context.scheduler.move(op, self._context.lane(OpKind.CHECK))
        elif fetch.refused:
            self._try_elsewhere(op)
        else:
            self._arrived(op)

    def checked(self, op: Op, outcome: Outcome) -> None:
        """Ask the next tier for cells that this one lacked or that are bad: the CHECK has ended."""
        fetch: Fetch = op.what
        self._refuse(op, outcome)
        if fetch.refused:
            self._try_elsewhere(op)
        elif not fetch.entry.indexed:  # before a reset
            self._fail(op, CellOutcome.CANCELLED)
        else:
            self._arrived(op)

    def _arrived(self, op: Op) -> None:
        fetch, host_cache = op.what, self._context.host_cache
        entry = fetch.entry
        if fetch.slab.fetcher is not None:
            host_cache.unindex(entry)  # the other rank keeps it
        host_cache.arrived(entry, self._context.now_ns)
        if fetch.tier > 0:
            nearer = [t for t in range(fetch.tier) if self._context.is_writable(t)]
            if nearer:
                self._copy_up(entry, nearer)
        self._context.scheduler.finish(op)
        host_cache.unpin(entry)

    def tier_down(self, tier: int) -> None:
        """Move on the waiting fetches of a tier that is not asked any more."""
        for op in self._context.scheduler.waiting_in(self._context.lane(OpKind.GET, tier)):
            self.skip_tier(op)

    def skip_tier(self, op: Op) -> None:
        """Ask the next tier for a slab that waits for one which cannot be reached."""
        self._try_next_tier(op, CellOutcome.UNREACHABLE)

    def writes_down(self, tier: int) -> None:
        """Give up the waiting removals of a tier that takes no writes for now."""
        for op in self._context.scheduler.waiting_in(self._context.lane(OpKind.REMOVE, tier)):
            self.removed(op, CellOutcome.UNREACHABLE)

    def remove(self, slab: Slab, cell: int, tier: int, owner: Owner) -> None:
        """Remove a bad cell from a tier, so that no reader meets it again."""
        [key] = slab.cell_keys((cell,))
        lane = self._context.lane(OpKind.REMOVE, tier)
        is_down = not self._context.is_writable(tier)
        is_leaving = (tier, key) in self._removing
        if lane.num_ready < MAX_WAITING_REMOVES and not is_down and not is_leaving:
            removal = self._context.scheduler.add(owner, lane, SlabOp(slab, None, (cell,)))
            self._removing[tier, key] = removal

    def removed(self, op: Op, outcome: Outcome) -> None:
        """Take the end of the REMOVE of a bad cell."""
        [key] = op.what.part.cell_keys()
        del self._removing[tier_of(op), key]
        if outcome is CellOutcome.DONE:
            self._context.scheduler.finish(op)
        else:
            self._context.scheduler.fail(op)

    def removals(self, slabs: Iterable[Slab]) -> list[Op]:
        """Return the removals of cells of these slabs from any tier."""
        if not self._removing:  # as nearly always
            return []
        wanted = {key for slab in slabs for key in slab.cell_keys()}
        return [op for (_, key), op in self._removing.items() if key in wanted]

    def _next_tier(self, slab: Slab, first: int = 0) -> int | None:
        """Return the nearest tier from `first` on that can be asked for a slab."""
        up = self._context.tiers_up(max(0, first))  # the first after a replica is the nearest
        if not self._removing:
            return up[0] if up else None
        keys = slab.cell_keys()
        for tier in up:
            if not any((tier, key) in self._removing for key in keys):
                return tier
        return None

    def _refuse(self, op: Op, outcome: Outcome) -> Sequence[int]:
        """Note the cells that a tier did not give, and remove bad ones; returns the others.

        Bad are cells of a wrong size, which GET tells, and damaged ones.
        """
        fetch: Fetch = op.what
        cells = range(fetch.slab.num_cells) if fetch.cells is None else fetch.cells
        if outcome is CellOutcome.DONE:
            return cells
        given = []
        for cell, each in zip(cells, each_of(outcome, len(cells)), strict=True):
            if each is CellOutcome.DONE:
                given.append(cell)
                continue
            fetch.refused.append(cell)
            if each is not CellOutcome.MISSING:
                fetch.reason = each
            if each is CellOutcome.CORRUPT:
                self.remove(fetch.slab, cell, fetch.tier, op.owner)
        return given

    def _try_elsewhere(self, op: Op) -> None:
        """Fetch again, or from the next tier, what a tier did not give; or fail."""
        fetch: Fetch = op.what
        context, entry, outcome = self._context, fetch.entry, fetch.reason
        if outcome is not CellOutcome.MISSING and fetch.tier != REPLICA:
            fetch.trouble = outcome
        if not (entry.is_awaited or entry.prefetched) or not entry.indexed:
            self._fail(op, CellOutcome.CANCELLED)
            return
        _narrow(op, sorted(fetch.refused))
        fetch.refused, fetch.reason = [], CellOutcome.MISSING
        if fetch.cells is None or not entry.slots:
            # Others may be before it in the queue: it must not hold slots that they wait for.
            context.host_cache.release_slots(entry)
            _narrow(op, range(fetch.slab.num_cells))
            if not entry.is_awaited:
                context.scheduler.cancel_successors(op)  # saves
        if context.may_retry(op, fetch.tier, outcome, writes=False):
            op.attempts += 1
            self._move_to_tier(op)
        else:
            self._try_next_tier(op, outcome)

    def _try_next_tier(self, op: Op, outcome: CellOutcome) -> None:
        fetch: Fetch = op.what
        if fetch.trouble is CellOutcome.MISSING and fetch.tier != REPLICA:
            fetch.trouble = outcome
        further = self._next_tier(fetch.slab, fetch.tier + 1)
        if further is None:
            self._fail(op, fetch.trouble)
            return
        fetch.tier = further
        op.attempts = 0
        self._move_to_tier(op)

    def _move_to_tier(self, op: Op) -> None:
        """Ask the fetch's tier for its cells.

        A fetch with slots waits for none, and those before it in the lane may wait for its own.
        """
        fetch: Fetch = op.what
        get = self._context.lane(OpKind.GET, fetch.tier)
        self._context.scheduler.move(op, get, first=bool(fetch.entry.slots))

    def _fail(self, op: Op, outcome: CellOutcome) -> None:
        entry = op.what.entry
        op.what.trouble = outcome
        if entry.prefetched:
            self._context.count("kvpool_prefetched_cells", entry.num_cells, outcome="failed")
        self._context.scheduler.fail(op)
        self._context.host_cache.failed(entry)
        self._context.host_cache.unpin(entry)


def _narrow(op: Op, cells: Sequence[int]) -> None:
    """Let a fetch move these cells of its slab alone."""
    fetch: Fetch = op.what
    slab = fetch.slab
    is_whole = len(cells) == slab.num_cells
    fetch.cells, op.size = None if is_whole else cells, len(cells)
    op.nbytes = slab.nbytes if is_whole else sum([slab.sizes[cell] for cell in cells])
