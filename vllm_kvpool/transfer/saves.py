"""Saves, and every other copy of a cell into a tier (pure; the engine thread's).

A chunk's cells are one GATHER, a batch of them one SEAL, and each one PUT for each tier it goes to.
`SaveGathered` frees the pages. `SaveDone` follows when every cell is in the nearest durable tier
that took it, or was given up; puts to tiers further away go on. Write-through puts into every tier
that can be asked. Write-back keeps cells in host memory and puts them into every such tier before
they leave it (`store_dirty`); without a host tier it is write-through. Saves that find no slot for
`SAVE_STALL_S` are dropped.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_kvpool.staging.slots import SlotUse
from vllm_kvpool.transfer.context import (
    NAME_EVERY_S,
    CellOp,
    Marker,
    Part,
    Slab,
    TransferContext,
    tier_of,
)
from vllm_kvpool.transfer.graph import OVER, Lane, Op, OpState, Owner, Priority
from vllm_kvpool.transfer.host_cache import CacheEntry, CacheEntryState
from vllm_kvpool.transfer.ops import (
    HOST,
    NO_PARTS,
    STORED,
    Cell,
    CellOutcome,
    HandOverEnd,
    JobId,
    OpKind,
    SaveDone,
    SaveGathered,
    SaveJob,
    SavePlan,
    SavesStalled,
)
from vllm_kvpool.transfer.progress import SaveProgress

SAVE_STALL_S = 1.0
PATIENCE_LEFT_S = SAVE_STALL_S - 0.02  # a stall is reported 20 ms after it began
STALL_REST_S = 20.0  # after a stall no save waits: each would keep its blocks from requests
DIRTY_SHARE = 0.5  # of the host tier; beyond it cells are put into a tier before room is needed
COPY_BATCH = 64  # cells a step
GATHER_SHARE = 4  # a gather has a quarter of the slots of saves at most


@dataclass(slots=True)
class _Save:
    job: SaveJob
    owner: Owner
    fence: tuple[Op, ...]  # what gathers wait for
    gathers: list[Op] = field(default_factory=list)
    num_open: int = 0  # cells without an outcome
    gathered: bool = False
    dropped: bool = False
    outcomes: Counter[CellOutcome] = field(default_factory=Counter)
    tiers: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)
    lost: dict[int, CellOutcome] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Copy(CellOp):
    """A cell on its way into tiers, for a save, or from host memory (`save` is None)."""

    entry: CacheEntry
    save: _Save | None
    dirty: bool = False  # write-back: it stays in host memory only
    ops: list[Op] = field(default_factory=list)
    outcome: CellOutcome | None = None  # of the last failure
    reported: bool = False


@dataclass(slots=True, eq=False)
class Copies:
    """Copies whose cells one op moves or seals: all are done, or none."""

    copies: Sequence[Copy]

    @property
    def parts(self) -> Sequence[Part]:
        return [(copy.cell, copy.entry) for copy in self.copies]

    @property
    def outcome(self) -> CellOutcome | None:
        return self.copies[0].outcome


class SaveManager:
    """The saves and copies in progress."""

    def __init__(self, context: TransferContext, *, write_back: bool) -> None:
        self._context = context
        self._write_back = write_back
        self._gathers = context.lane(OpKind.GATHER)
        # A gather waits until all its cells have a slot.
        self._most_cells = max(1, context.host_cache.slots.for_saves // GATHER_SHARE)
        self._growing: deque[_Save] = deque()  # saves whose cells are not all named yet
        self._seals = context.lane(OpKind.SEAL)
        self._saves: dict[JobId, _Save] = {}
        self.progress = SaveProgress()
        self._stall_ends: float | None = None  # while saves wait for a slot: when they are dropped
        self.has_gained_slot = False  # a gather that waits for several, since the last look
        self._stall_reported = False  # since the last save came
        self._may_stall = False  # the present stall is a full `SAVE_STALL_S`
        self._stalls_from = float("-inf")  # before that time no save waits
        self._flushing = False
        self._copies: dict[Copy, None] = {}  # in flight, those of saves too; in order

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    @property
    def num_open(self) -> int:
        return len(self._saves)

    # Saving

    def submit(self, job: SaveJob) -> None:
        context = self._context
        self._stall_reported = False
        plan = job.plan
        owner = Owner(Priority.SAVE, plan.request_id, plan.job_id)
        save = self._saves[plan.job_id] = _Save(job, owner, context.wait_for(job.fence))
        if plan.topic:
            context.progress += self.progress.planned(job)
        self._begin(save, job.cells)
        if job.rest is NO_PARTS:
            self._all_named(save)
        else:
            self._growing.append(save)

    @property
    def is_naming(self) -> bool:
        """True if cells of a save are not named yet: `go_on` is due."""
        return bool(self._growing)

    def go_on(self) -> None:
        """Name the next cells of a save; called in every step but those that bring a job."""
        if not self._growing:
            return
        save = self._growing[0]
        cells = next(save.job.rest, None)
        if cells is None:
            self._growing.popleft()
            self._all_named(save)
        elif save.dropped:
            save.num_open += len(cells)
            for cell in cells:
                self._record(save, cell, CellOutcome.CANCELLED)
        else:
            self._begin(save, cells)

    def _all_named(self, save: _Save) -> None:
        marker = Marker(partial(self._all_gathered, save))
        self._context.scheduler.add(save.owner, None, marker, after=save.gathers, always=True)

    def _begin(self, save: _Save, cells: Sequence[Cell]) -> None:
        """Gather, seal and put cells that are not in host memory."""
        context, plan = self._context, save.job.plan
        save.num_open += len(cells)
        up = context.tiers_writable()
        hits: dict[str, None] = {}  # chunks
        slab, begun = Slab(self._gathers.limits), list[tuple[Copy, Sequence[int]]]()
        for cell in cells:
            there = context.host_cache.get(cell.key)
            if there is not None:  # present or arriving
                hits[cell.chunk.id] = None
                if cell.chunk.retention.pinned_until_ns:
                    self._pin(there, cell, up)
                self._record(save, cell, CellOutcome.EXISTED)
                # An earlier save has put it, or is putting it.
                self._note_progress(save, cell, is_stored=True)
                continue
            is_dirty = self._stays_dirty(cell, plan)
            tiers = up if cell.stored and not is_dirty else ()
            if cell.stored and context.tiers and not (up or is_dirty):
                context.drops[HOST, CellOutcome.UNREACHABLE] += 1
            if not tiers and not context.host_cache.capacity:
                self._record(save, cell, CellOutcome.UNREACHABLE)
                self._note_progress(save, cell, is_stored=False)
                continue
            entry = context.host_cache.begin(cell.key, cell.chunk, cell.nbytes)
            copy = Copy(cell, entry, save, dirty=is_dirty)
            self._copies[copy] = None
            place = (cell.chunk.position,)
            if not slab.takes(place) or len(begun) == self._most_cells:
                self._gather(save, begun)
                slab, begun = Slab(self._gathers.limits, place), []
            slab.add(cell, entry)
            begun.append((copy, tiers))
        self._gather(save, begun)
        for chunk_id in hits:
            context.host_cache.hit(chunk_id, context.now_ns)

    def _gather(self, save: _Save, begun: Sequence[tuple[Copy, Sequence[int]]]) -> None:
        """Add the op that moves cells of one chunk out of the pages, and what comes after it."""
        if not begun:
            return
        op = self._add(save.owner, self._gathers, [copy for copy, _ in begun], save.fence)
        save.gathers.append(op)
        for copy, _ in begun:
            copy.entry.op = op
        self._add_puts(save.owner, begun, (op,))

    def _add(self, owner: Owner, lane: Lane, copies: Sequence[Copy], after: Sequence[Op]) -> Op:
        """Add an op that moves or seals the cells of copies."""
        nbytes, size = sum([copy.cell.nbytes for copy in copies]), len(copies)
        op = self._context.scheduler.add(owner, lane, Copies(copies), nbytes, after, size=size)
        for copy in copies:
            copy.ops.append(op)
        return op

    def _pin(self, entry: CacheEntry, cell: Cell, up: Sequence[int]) -> None:
        """Pin a cell that is in host memory there, and in tiers by putting it again."""
        self._context.host_cache.retain(entry, cell.chunk)
        if cell.stored and up and entry.state is CacheEntryState.PRESENT:
            self._copy(entry, up)

    def _stays_dirty(self, cell: Cell, plan: SavePlan) -> bool:
        """Return True if host memory alone has a cell for now. The stores get the cells of a prompt
        at once that another engine goes on with."""
        context = self._context
        back = self._write_back and context.host_cache.capacity > 0 and not plan.topic
        return back and cell.stored and bool(context.tiers)

    def _add_puts(
        self, owner: Owner, begun: Sequence[tuple[Copy, Sequence[int]]], after: Sequence[Op]
    ) -> None:
        """Add what seals cells, a batch by one op, and puts each into its tiers."""
        add, lane_of = self._context.scheduler.add, self._context.lane
        limits, stored = self._seals.limits, [each for each in begun if each[1]]
        while stored:
            most = min(limits.batch_ops, limits.batch_bytes // stored[0][0].cell.nbytes) or 1
            some, stored = stored[:most], stored[most:]
            seal = self._add(owner, self._seals, [copy for copy, _ in some], after)
            for copy, tiers in some:
                for tier in tiers:
                    lane = lane_of(OpKind.PUT, tier)
                    copy.ops.append(add(owner, lane, copy, copy.cell.nbytes, (seal,)))

    def gathered(self, op: Op, outcome: CellOutcome) -> None:
        copies, context = op.what.copies, self._context
        dropped = copies[0].save.dropped
        if outcome is CellOutcome.DONE and not dropped:
            for copy in copies:
                context.host_cache.arrived(copy.entry, context.now_ns, dirty=copy.dirty)
            context.scheduler.finish(op)
        else:
            for copy in copies:
                context.host_cache.failed(copy.entry)
                copy.outcome = CellOutcome.CANCELLED if dropped else outcome
            context.scheduler.fail(op)
        for copy in copies:
            self.settle(copy)

    def _all_gathered(self, save: _Save) -> None:
        """Note that all gathers of a save have ended: its pages may be reused."""
        save.gathered = True
        plan = save.job.plan
        self._context.reports.append(SaveGathered(plan.job_id, plan.request_id))
        self._finish(save)

    # Copies

    def sealed(self, op: Op, outcome: CellOutcome) -> None:
        copies, is_writable = op.what.copies, self._context.is_writable
        for copy in copies:
            for put in copy.ops:
                if put.state is OpState.WAITING and not is_writable(tier_of(put)):
                    self._end(put, copy, CellOutcome.UNREACHABLE)  # down since the start
        if outcome is CellOutcome.DONE:
            self._context.scheduler.finish(op)
        else:
            for copy in copies:
                copy.outcome = outcome
            self._context.scheduler.fail(op)
        for copy in copies:
            self.settle(copy)

    def put(self, op: Op, outcome: CellOutcome) -> None:
        copy, tier = op.what, tier_of(op)
        dropped = copy.save is not None and copy.save.dropped
        if not dropped and self._context.try_again(op, tier, outcome):
            return
        if outcome in STORED and self._context.tiers[tier].durable:
            self._report(copy, outcome, tier)
        self._end(op, copy, outcome)

    def tier_down(self, tier: int) -> None:
        """A tier takes no writes for now: give up puts that wait for it."""
        for op in self._context.scheduler.waiting_in(self._context.lane(OpKind.PUT, tier)):
            self._end(op, op.what, CellOutcome.UNREACHABLE)

    def copy_up(self, entry: CacheEntry, tiers: list[int]) -> None:
        """Promote a cell that was fetched from further away into nearer tiers, if loads do not
        need its slot."""
        if self._context.host_cache.has_room(SlotUse.SAVE):
            self._copy(entry, tiers)

    def store_dirty(self) -> bool:
        """Put dirty cells into every tier, so that they can leave at once when room is needed.

        Returns whether it put or dropped any. With no tier available, dirty cells are dropped only
        when their room is needed now.
        """
        host_cache = self._context.host_cache
        if not host_cache.num_dirty:
            return False
        short = not host_cache.has_room(SlotUse.SAVE)
        tiers = self._context.tiers_writable()
        if self._flushing:
            # Tiers that outlive the process, if there are any.
            tiers = [t for t in tiers if self._context.tiers[t].durable] or tiers
            count = host_cache.num_dirty
        elif not tiers:
            count = self._gathers.num_ready if short else 0
        elif short or host_cache.num_dirty > host_cache.capacity * DIRTY_SHARE:
            count = COPY_BATCH
        else:
            count = 0
        for entry in host_cache.coldest_dirty(count):
            self._copy(entry, tiers)
        return count > 0

    def flush(self) -> None:
        """The process is about to end: put all dirty cells, now and later ones, into every tier."""
        self._flushing = True

    def _copy(self, entry: CacheEntry, tiers: Sequence[int]) -> None:
        """Copy a cell for no save; the copy pins the entry until it is settled."""
        self._context.host_cache.pin(entry)
        copy = Copy(Cell(entry.key, entry.chunk, entry.nbytes), entry, None)
        self._copies[copy] = None
        self._add_puts(Owner(Priority.COPY), [(copy, tiers)], ())
        self.settle(copy)

    def _end(self, op: Op, copy: Copy, outcome: CellOutcome) -> None:
        if outcome in STORED:
            self._context.scheduler.finish(op)
        else:
            copy.outcome = outcome
            if (tier := tier_of(op)) != HOST and outcome is not CellOutcome.CANCELLED:
                self._context.drops[tier, outcome] += 1
            self._context.scheduler.fail(op)
        self.settle(copy)

    def lost(self, op: Op, outcome: CellOutcome) -> None:
        """A gather or seal was cancelled, since its fence or gather has failed."""
        for copy in op.what.copies:
            self._context.host_cache.failed(copy.entry)
            copy.outcome = copy.outcome or outcome
            self.settle(copy)

    def settle(self, copy: Copy) -> None:
        """If the last op of a copy has ended, unpin its entry."""
        if copy not in self._copies or not OVER.issuperset([op.state for op in copy.ops]):
            return
        del self._copies[copy]
        tier = _nearest_tier(copy)
        self._report(copy, copy.outcome or CellOutcome.DONE, tier)
        if copy.save is not None:
            self._note_progress(copy.save, copy.cell, is_stored=tier is not None)
        if copy.save is None and copy.entry.dirty:
            stored = any(op.state is OpState.DONE for op in copy.ops[1:])
            fate = "stored" if stored else "lost"
            if not copy.ops:
                self._context.drops[HOST, CellOutcome.UNREACHABLE] += 1
            self._context.count("kvpool_evicted_cells", tier="host", fate=fate)
            self._context.host_cache.cleaned(copy.entry)
        self._context.host_cache.unpin(copy.entry)

    # Ends

    def _report(self, copy: Copy, outcome: CellOutcome, tier: int | None) -> None:
        if not copy.reported and copy.save is not None:
            copy.reported = True
            has_room = self._context.host_cache.capacity > 0
            is_kept = has_room and copy.entry.state is CacheEntryState.PRESENT
            self._record(copy.save, copy.cell, outcome, tier, is_kept=is_kept)

    def _record(
        self,
        save: _Save,
        cell: Cell,
        outcome: CellOutcome,
        tier: int | None = None,
        *,
        is_kept: bool = False,
    ) -> None:
        """Note the end of a cell: the tier that has it, or whether host memory keeps it."""
        save.outcomes[outcome] += 1
        if tier is not None:
            save.tiers.add(tier)
        elif cell.stored and not cell.is_optional:  # without optional ones a chunk is whole
            save.missed.add(cell.chunk.position)
            if not is_kept and outcome not in STORED:
                save.lost.setdefault(cell.chunk.position, outcome)
        save.num_open -= 1
        self._finish(save)

    def _note_progress(self, save: _Save, cell: Cell, *, is_stored: bool) -> None:
        """Note that all puts of a cell have ended. Which stores others read is not known here."""
        if save.job.plan.topic:
            self._context.progress += self.progress.recorded(save.job, cell, is_stored=is_stored)

    def hand_over_ends(self, end: HandOverEnd) -> None:
        """A request that is handed over saves nothing more."""
        self._context.progress += self.progress.ends(end)

    def _finish(self, save: _Save) -> None:
        if save.num_open or not save.gathered:
            return
        plan = save.job.plan
        del self._saves[plan.job_id]
        done = SaveDone(
            plan.job_id,
            plan.request_id,
            tuple(save.outcomes.items()),
            tuple(sorted(save.tiers)),
            tuple(sorted(save.missed)),
            tuple(save.lost.items()),
        )
        self._context.reports.append(done)

    def drop(self) -> None:
        """Give up every save that is not stored yet."""
        for save in self._saves.values():
            save.dropped = True
        for copy in list(self._copies):
            if copy.save is not None and copy.save.dropped:
                self._drop_copy(copy, CellOutcome.CANCELLED)

    def drop_copies(self) -> list[Op]:
        """Give up all other copies too; returns the ops that still run."""
        for copy in list(self._copies):
            self._drop_copy(copy, CellOutcome.CANCELLED)
        return [op for copy in self._copies for op in copy.ops if op.state not in OVER]

    def _drop_copy(self, copy: Copy, outcome: CellOutcome) -> None:
        if copy not in self._copies:
            return
        copy.outcome = outcome
        for op in copy.ops:
            self._context.scheduler.cancel(op)
        is_arriving = copy.entry.state is CacheEntryState.ARRIVING
        if is_arriving and copy.ops[0].state is OpState.CANCELLED:
            self._context.host_cache.failed(copy.entry)
        self.settle(copy)

    def watch_stall(self) -> None:
        """Drop saves that have waited too long for a slot."""
        lane = self._gathers
        has_gained, self.has_gained_slot = self.has_gained_slot, False
        if self._stall_ends is None and not lane.num_ready:
            return
        has_room = self._context.host_cache.has_room(SlotUse.SAVE)
        if lane.num_batches or (has_room and not lane.num_ready):
            self._stall_ends = None
            return
        if not lane.num_ready:
            return  # the deadline stays, so that the next save does not wait anew
        now = self._context.now
        if self._stall_ends is None or has_gained:
            self._may_stall = now >= self._stalls_from
            self._stall_ends = now + SAVE_STALL_S if self._may_stall else now
        if now >= self._stall_ends:
            if self._may_stall:
                self._stalls_from, self._may_stall = now + STALL_REST_S, False
            for op in self._context.scheduler.waiting_in(lane):
                self._context.drops[HOST, CellOutcome.FULL] += op.size
                for copy in op.what.copies:
                    self._drop_copy(copy, CellOutcome.FULL)
        elif not self._stall_reported and now >= self._stall_ends - PATIENCE_LEFT_S:
            self._stall_reported = True
            self._context.reports.append(SavesStalled())

    def next_time(self) -> float | None:
        """When `watch_stall` is due, or the next cells are named."""
        if self._growing:
            return self._context.now + NAME_EVERY_S
        if not self._gathers.num_ready or self._stall_ends is None:
            return None
        return self._stall_ends - (0.0 if self._stall_reported else PATIENCE_LEFT_S)


def _nearest_tier(copy: Copy) -> int | None:
    """Return the nearest tier that has taken the cell."""
    for op in copy.ops:  # puts are in the order of tiers
        if op.state is OpState.DONE and (tier := tier_of(op)) != HOST:
            return tier
    return None
