"""Saves, and every other copy of a slab into a tier (pure; the engine thread's).

A slab is one GATHER, one SEAL, and one PUT for each tier it goes to. `SaveGathered` frees the
pages. `SaveDone` follows when every slab is in the nearest durable tier that took all its cells, or
was given up; puts to tiers further away go on. Write-through puts into every tier that can be
asked. Write-back keeps slabs in host memory and puts them into every such tier before they leave it
(`store_dirty`); without a host tier it is write-through. Saves that find no slots for
`SAVE_STALL_S` are dropped.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_kvpool.staging.slots import SlotUse
from vllm_kvpool.transfer.context import (
    NAME_EVERY_S,
    Marker,
    SlabOp,
    TransferContext,
    tier_of,
)
from vllm_kvpool.transfer.graph import OVER, Lane, Op, OpState, Owner, Priority
from vllm_kvpool.transfer.host_cache import CacheEntry, CacheEntryState
from vllm_kvpool.transfer.ops import (
    HOST,
    NO_SLABS,
    STORED,
    CellOutcome,
    HandOverEnd,
    JobId,
    OpKind,
    Outcome,
    SaveDone,
    SaveGathered,
    SaveJob,
    SavePlan,
    SavesStalled,
    Slab,
    each_of,
    worst_of,
)
from vllm_kvpool.transfer.progress import SaveProgress

SAVE_STALL_S = 1.0
PATIENCE_LEFT_S = SAVE_STALL_S - 0.02  # a stall is reported 20 ms after it began
STALL_REST_S = 20.0  # after a stall no save waits: each would keep its blocks from requests
DIRTY_SHARE = 0.5  # of the host tier; beyond it slabs are put into a tier before room is needed
COPY_BATCH = 64  # cells a step


@dataclass(slots=True)
class _Save:
    job: SaveJob
    owner: Owner
    fence: tuple[Op, ...]  # what gathers wait for
    gathers: list[Op] = field(default_factory=list)
    num_open: int = 0  # slabs without an outcome
    gathered: bool = False
    dropped: bool = False
    outcomes: Counter[CellOutcome] = field(default_factory=Counter)
    tiers: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)
    lost: dict[int, CellOutcome] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Copy(SlabOp):
    """A slab on its way into tiers, for a save, or from host memory (`save` is None)."""

    entry: CacheEntry
    saves: "SaveManager" = field(kw_only=True)
    save: _Save | None = None
    dirty: bool = False  # write-back: it stays in host memory only
    ops: list[Op] = field(default_factory=list)
    outcome: Outcome | None = None  # of the last failure
    reported: bool = False

    @property
    def failure(self) -> CellOutcome:
        """The outcome of the copy's last failure; CANCELLED without one."""
        return CellOutcome.CANCELLED if self.outcome is None else worst_of(self.outcome)

    def lost(self, op: Op, failure: CellOutcome) -> None:
        """End the copy without its cells in the tier: a predecessor has failed."""
        self.saves.lost(self, failure)


class SaveManager:
    """The saves and copies in progress."""

    def __init__(self, context: TransferContext, *, write_back: bool) -> None:
        self._context = context
        self._write_back = write_back
        self._gathers = context.lane(OpKind.GATHER)
        self._growing: deque[_Save] = deque()  # saves whose slabs are not all named yet
        self._seals = context.lane(OpKind.SEAL)
        self._saves: dict[JobId, _Save] = {}
        self.progress = SaveProgress()
        self._stall_ends: float | None = None  # while saves wait for slots: when they are dropped
        self._most_room = 0  # slots that there were at once since the stall began
        self._stall_reported = False  # since the last save came
        self._may_stall = False  # the present stall is a full `SAVE_STALL_S`
        self._stalls_from = float("-inf")  # before that time no save waits
        self._flushing = False
        self._copies: dict[Copy, None] = {}  # in flight, those of saves too; in order

    @property
    def num_copies(self) -> int:
        """Number of copies whose last op has not ended."""
        return len(self._copies)

    @property
    def num_cells(self) -> int:
        """The number of cells that are on their way into tiers, or that host memory has alone."""
        dirty = (entry for entry in self._context.host_cache if entry.dirty)
        entries = {copy.entry for copy in self._copies}.union(dirty)
        return sum(entry.num_cells for entry in entries)

    @property
    def num_open(self) -> int:
        """Number of saves whose last report is to come."""
        return len(self._saves)

    # Saving

    def submit(self, job: SaveJob) -> None:
        """Start a save: a gather of each slab as slots become free, then its puts."""
        context = self._context
        self._stall_reported = False
        plan = job.plan
        owner = Owner(Priority.SAVE, plan.request_id, plan.job_id)
        save = self._saves[plan.job_id] = _Save(job, owner, context.wait_for(job.fence))
        if plan.topic:
            expected = tuple(slab for slab in job.slabs if self._is_expected(plan, slab))
            job = save.job = job._replace(slabs=expected)
            context.progress += self.progress.planned(job)
        self._gather(save, job.slabs)
        if job.rest is NO_SLABS:
            self._all_named(save)
        else:
            self._growing.append(save)

    def _is_expected(self, plan: SavePlan, slab: Slab) -> bool:
        """Return False for a slab of a window that neither pages nor host memory have.

        Most windows of a prompt are read by no later token. A window that has left host memory
        since the lookup is expected, so that it ends the hand-over.
        """
        is_read = slab.kind.cells[0].window.is_full or slab.chunk.id in plan.host_windows
        return bool(slab.pages) or is_read or self._in_host(slab) is not None

    def _in_host(self, slab: Slab) -> CacheEntry | None:
        """Return the slab's entry in host memory, present or on its way.

        A save that can gather no pages does not follow a fetch that a prefetch alone wants and that
        waits for slots: they may never come.
        """
        entry = self._context.host_cache.get(slab.id)
        if entry is None or slab.pages or entry.is_awaited or entry.slots or not _is_fetched(entry):
            return entry
        return None

    def go_on(self) -> None:
        """Name the next slabs of a save; called in every step but those that bring a job."""
        if not self._growing:
            return
        save = self._growing[0]
        slabs = next(save.job.rest, None)
        if slabs is None:
            self._growing.popleft()
            self._all_named(save)
        elif save.dropped:
            save.num_open += len(slabs)
            for slab in slabs:
                self._record(save, slab, CellOutcome.CANCELLED)
        else:
            self._gather(save, slabs)

    def _all_named(self, save: _Save) -> None:
        marker = Marker(partial(self._all_gathered, save))
        self._context.scheduler.add(save.owner, None, marker, after=save.gathers, always=True)

    def _gather(self, save: _Save, slabs: Sequence[Slab]) -> None:
        """Gather, seal and put slabs that are not in host memory.

        Slabs there are sealed and put as well if another engine goes on with the prompt: that a
        slab is in host memory says nothing of stores.
        """
        context, plan = self._context, save.job.plan
        save.num_open += len(slabs)
        up = context.tiers_writable()
        hits: dict[str, None] = {}  # chunks
        for slab in slabs:
            there = self._in_host(slab)
            # A fetch may fail, and the slab is in the pages now: it is gathered into other slots.
            may_gather = bool(slab.stored and slab.pages and up)
            is_apart = may_gather and there is not None and _is_fetched(there)
            if there is not None and not is_apart:  # present, or a save brings it
                hits[slab.chunk.id] = None
                is_put = bool(plan.topic) and slab.stored
                if slab.chunk.retention.pinned_until_ns:
                    self._pin(there, slab, () if is_put else up)
                if is_put:
                    self._put_there(save, slab, there, up)
                else:
                    self._record(save, slab, CellOutcome.EXISTED)
                continue
            if not slab.pages:  # it has left host memory since the save was planned
                self._record(save, slab, CellOutcome.MISSING)
                self._note_progress(save, slab, None)
                continue
            is_dirty = not is_apart and self._stays_dirty(slab, plan)
            tiers = up if slab.stored and not is_dirty else ()
            if slab.stored and context.tiers and not (up or is_dirty):
                context.drops[HOST, CellOutcome.UNREACHABLE] += slab.num_cells
            if not tiers and not context.host_cache.capacity:
                self._record(save, slab, CellOutcome.UNREACHABLE)
                self._note_progress(save, slab, None)
                continue
            entry = context.host_cache.add(slab, indexed=not is_apart)
            copy = Copy(slab, entry, saves=self, save=save, dirty=is_dirty)
            self._copies[copy] = None
            gather = entry.op = self._add(save.owner, self._gathers, copy, save.fence)
            save.gathers.append(gather)
            self._add_puts(save.owner, copy, tiers, (gather,))
        for chunk_id in hits:
            context.host_cache.hit(chunk_id, context.now_ns)

    def _put_there(self, save: _Save, slab: Slab, entry: CacheEntry, tiers: Sequence[int]) -> None:
        """Put a slab that is in host memory, or on its way there, for a save.

        Its pages are not read. Another copy of the slab may be sealed or put at the same time: a
        seal writes the bytes that are there.
        """
        self._context.host_cache.pin(entry)
        entry.num_followers += _is_fetched(entry)
        copy = Copy(slab._replace(pages=()), entry, saves=self, save=save)
        self._copies[copy] = None
        self._add_puts(save.owner, copy, tiers, () if entry.op is None else (entry.op,))
        self.finish_if_done(copy)

    def _add(self, owner: Owner, lane: Lane, copy: Copy, after: Sequence[Op]) -> Op:
        """Add an op of a copy."""
        slab, add = copy.slab, self._context.scheduler.add
        op = add(owner, lane, copy, slab.nbytes, after, size=slab.num_cells)
        copy.ops.append(op)
        return op

    def _pin(self, entry: CacheEntry, slab: Slab, up: Sequence[int]) -> None:
        """Pin a slab that is in host memory there, and in tiers by putting it again."""
        self._context.host_cache.pin_until(entry, slab.chunk.retention.pinned_until_ns)
        if slab.stored and up and entry.state is CacheEntryState.PRESENT:
            self._copy(entry, up)

    def _stays_dirty(self, slab: Slab, plan: SavePlan) -> bool:
        """Return True if host memory alone has a slab for now.

        A prompt that another engine goes on with is put into stores at once.
        """
        context = self._context
        back = self._write_back and context.host_cache.capacity > 0 and not plan.topic
        return back and slab.stored and bool(context.tiers)

    def _add_puts(
        self, owner: Owner, copy: Copy, tiers: Sequence[int], after: Sequence[Op]
    ) -> None:
        """Add what seals a slab and puts it into its tiers."""
        if not tiers:
            return
        seal = self._add(owner, self._seals, copy, after)
        for tier in tiers:
            self._add(owner, self._context.lane(OpKind.PUT, tier), copy, (seal,))

    def gathered(self, op: Op, outcome: Outcome) -> None:
        """Take the end of a gather: the slab is in host memory, or its copy has failed."""
        copy, context = op.what, self._context
        if outcome is CellOutcome.DONE and not copy.save.dropped:
            context.host_cache.arrived(copy.entry, context.now_ns, dirty=copy.dirty)
            context.scheduler.finish(op)
        else:
            context.host_cache.failed(copy.entry)
            copy.outcome = CellOutcome.CANCELLED if copy.save.dropped else outcome
            context.scheduler.fail(op)
        self.finish_if_done(copy)

    def _all_gathered(self, save: _Save) -> None:
        """Note that all gathers of a save have ended: its pages may be reused."""
        save.gathered = True
        plan = save.job.plan
        self._context.reports.append(SaveGathered(plan.job_id, plan.request_id))
        self._finish(save)

    # Copies

    def sealed(self, op: Op, outcome: Outcome) -> None:
        """Take the end of a seal; puts into tiers that take no writes end as unreachable."""
        copy, is_writable = op.what, self._context.is_writable
        for put in copy.ops:
            if put.state is OpState.WAITING and not is_writable(tier_of(put)):
                self._end_put(put, copy, CellOutcome.UNREACHABLE)  # down since the start
        if outcome is CellOutcome.DONE:
            self._context.scheduler.finish(op)
        else:
            copy.outcome = outcome
            self._context.scheduler.fail(op)
        self.finish_if_done(copy)

    def put(self, op: Op, outcome: Outcome) -> None:
        """Take the end of a put: retry it, or record what became of each cell."""
        copy, tier = op.what, tier_of(op)
        dropped = copy.save is not None and copy.save.dropped
        if not dropped and self._context.may_retry(op, tier, outcome, writes=True):
            op.attempts += 1
            self._context.scheduler.move(op, self._context.lane(OpKind.PUT, tier))
            return
        if worst_of(outcome) in STORED and self._context.tiers[tier].durable:
            self._report(copy, outcome, tier)
        self._end_put(op, copy, outcome)

    def writes_down(self, tier: int) -> None:
        """Give up the waiting puts of a tier that takes no writes for now."""
        for op in self._context.scheduler.waiting_in(self._context.lane(OpKind.PUT, tier)):
            self._end_put(op, op.what, CellOutcome.UNREACHABLE)

    def copy_up(self, entry: CacheEntry, tiers: list[int]) -> None:
        """Promote a slab that was fetched from further away into nearer tiers.

        Nothing is promoted if loads need the slots.
        """
        if self._context.host_cache.has_room(SlotUse.SAVE, entry.num_cells):
            self._copy(entry, tiers)

    def store_dirty(self) -> bool:
        """Put dirty slabs into every tier, so that they can leave at once when room is needed.

        Returns whether it put or dropped any. With no tier available, dirty slabs are dropped only
        when their room is needed now.
        """
        host_cache = self._context.host_cache
        if not host_cache.num_dirty:
            return False
        gather = self._context.scheduler.first_ready(self._gathers)
        short = not host_cache.has_room(SlotUse.SAVE, 1 if gather is None else gather.size)
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
        """Put all dirty slabs, now and later ones, into every tier: the process is about to end."""
        self._flushing = True

    def _copy(self, entry: CacheEntry, tiers: Sequence[int]) -> None:
        """Copy a slab for no save; the copy pins the entry until its last op has ended."""
        self._context.host_cache.pin(entry)
        copy = Copy(entry.slab, entry, saves=self)
        self._copies[copy] = None
        self._add_puts(Owner(Priority.COPY), copy, tiers, ())
        self.finish_if_done(copy)

    def _end_put(self, op: Op, copy: Copy, outcome: Outcome) -> None:
        if worst_of(outcome) in STORED:
            self._context.scheduler.finish(op)
        else:
            copy.outcome = outcome
            if outcome is not CellOutcome.CANCELLED:
                for each in each_of(outcome, copy.slab.num_cells):
                    if each not in STORED:
                        self._context.drops[tier_of(op), each] += 1
            self._context.scheduler.fail(op)
        self.finish_if_done(copy)

    def lost(self, copy: Copy, outcome: CellOutcome) -> None:
        """Take an op that was cancelled, since an op before it or a gather's fence has failed.

        Later ops of a copy end with the failure of the op before them, which finishes the copy.
        """
        if copy in self._copies:
            if not _is_fetched(copy.entry):  # else the fetch goes on
                self._context.host_cache.failed(copy.entry)
            copy.outcome = outcome
            self.finish_if_done(copy)

    def finish_if_done(self, copy: Copy) -> None:
        """Unpin a copy's entry if its last op has ended."""
        if copy not in self._copies or not OVER.issuperset([op.state for op in copy.ops]):
            return
        del self._copies[copy]
        tier = _nearest_tier(copy)
        self._report(copy, copy.outcome or CellOutcome.DONE, tier)
        if copy.save is not None:
            self._note_progress(copy.save, copy.slab, tier)
        if copy.save is None and copy.entry.dirty:
            fate = "lost" if tier is None else "stored"
            num_cells = copy.slab.num_cells
            if not copy.ops:
                self._context.drops[HOST, CellOutcome.UNREACHABLE] += num_cells
            self._context.count("kvpool_evicted_cells", num_cells, tier="host", fate=fate)
        if copy.save is None or tier is not None:
            self._context.host_cache.cleaned(copy.entry)
        copy.entry.num_followers -= _is_fetched(copy.entry)
        self._context.host_cache.unpin(copy.entry)

    # Ends

    def _report(self, copy: Copy, outcome: Outcome, tier: int | None) -> None:
        if not copy.reported and copy.save is not None:
            copy.reported = True
            has_room = self._context.host_cache.capacity > 0
            is_kept = has_room and copy.entry.state is CacheEntryState.PRESENT
            is_kept &= copy.entry.indexed
            self._record(copy.save, copy.slab, outcome, tier, is_kept=is_kept)

    def _record(
        self,
        save: _Save,
        slab: Slab,
        outcome: Outcome,
        tier: int | None = None,
        *,
        is_kept: bool = False,
    ) -> None:
        """Note the end of a slab: the tier that has it, or whether host memory keeps it."""
        save.outcomes.update(each_of(outcome, slab.num_cells))
        if tier is not None:
            save.tiers.add(tier)
        elif slab.stored and not slab.kind.is_optional:  # without optional ones a chunk is whole
            save.missed.add(slab.chunk.position)
            if not is_kept and (worst := worst_of(outcome)) not in STORED:
                save.lost.setdefault(slab.chunk.position, worst)
        save.num_open -= 1
        self._finish(save)

    def _note_progress(self, save: _Save, slab: Slab, tier: int | None) -> None:
        """Note that all puts of a slab have ended, and the nearest tier whose store has it.

        Which stores others read is not known here.
        """
        if save.job.plan.topic:
            is_stored = tier is not None
            self._context.progress += self.progress.recorded(save.job, slab, is_stored=is_stored)

    def hand_over_ends(self, end: HandOverEnd) -> None:
        """Note that a request that is handed over saves nothing more."""
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
        gather = copy.entry.op  # perhaps another copy's
        if gather is copy.ops[0] and gather.state is OpState.CANCELLED:
            self._context.host_cache.failed(copy.entry)
        self.finish_if_done(copy)

    def watch_stall(self) -> None:
        """Drop saves that have waited too long for slots."""
        lane, host_cache = self._gathers, self._context.host_cache
        if self._stall_ends is None and not lane.num_ready:
            return
        if lane.num_batches or (not lane.num_ready and host_cache.has_room(SlotUse.SAVE)):
            self._stall_ends = None
            return
        if not lane.num_ready:
            return  # the deadline stays, so that the next save does not wait anew
        now, room = self._context.now, host_cache.room
        if self._stall_ends is None or room > self._most_room:
            self._most_room = room
            self._may_stall = now >= self._stalls_from
            self._stall_ends = now + SAVE_STALL_S if self._may_stall else now
        if now >= self._stall_ends:
            if self._may_stall:
                self._stalls_from, self._may_stall = now + STALL_REST_S, False
            for op in self._context.scheduler.waiting_in(lane):
                self._context.drops[HOST, CellOutcome.FULL] += op.size
                self._drop_copy(op.what, CellOutcome.FULL)
        elif not self._stall_reported and now >= self._stall_ends - PATIENCE_LEFT_S:
            self._stall_reported = True
            self._context.reports.append(SavesStalled())

    def next_time(self) -> float | None:
        """Return when `watch_stall` is due, or the next slabs are named."""
        if self._growing:
            return self._context.now + NAME_EVERY_S
        if not self._gathers.num_ready or self._stall_ends is None:
            return None
        return self._stall_ends - (0.0 if self._stall_reported else PATIENCE_LEFT_S)


def _is_fetched(entry: CacheEntry) -> bool:
    """Return True if a fetch is bringing the slab."""
    return entry.op is not None and not isinstance(entry.op.what, Copy)


def _nearest_tier(copy: Copy) -> int | None:
    """Return the nearest tier that has taken the slab."""
    for op in copy.ops:  # puts are in the order of tiers
        if op.state is OpState.DONE and (tier := tier_of(op)) != HOST:
            return tier
    return None
