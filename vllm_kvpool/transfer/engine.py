"""The engine's decisions: `step(event, now) -> actions` (pure; the engine thread's).

Jobs become graphs of ops over lanes (`graph.py`) that move slabs between pages, host memory and
tiers: `loads.py` and `fetches.py` bring them in, `saves.py` takes them out, `host_cache.py` knows
what host memory holds. The engine gives an op its slots when it starts, hands batches to lanes,
takes outcomes back, and watches deadlines and the health of tiers.

Invariants (`check`): those of the parts; every batch is answered once; an idle engine holds no pin
but those of calls that hang.
"""

from collections.abc import Callable, Mapping

from vllm_kvpool.staging.slots import Slot, SlotUse
from vllm_kvpool.transfer.context import Marker, Tier, TransferContext
from vllm_kvpool.transfer.fetches import Fetches
from vllm_kvpool.transfer.graph import (
    Batch,
    BatchDone,
    BatchHung,
    LaneLimits,
    Op,
    Owner,
    Priority,
    Scheduler,
)
from vllm_kvpool.transfer.host_cache import CacheEntry, HostCache
from vllm_kvpool.transfer.loads import Loads
from vllm_kvpool.transfer.loans import Loans, ReplicaSet
from vllm_kvpool.transfer.ops import (
    HOST,
    REPLICA,
    Ask,
    BorrowerGone,
    CancelRequest,
    CellOutcome,
    DropSaves,
    Flush,
    HandOverEnd,
    HandOverProgress,
    Landed,
    LaneName,
    LenderGone,
    Lent,
    LoadJob,
    OpKind,
    Outcome,
    PrefetchJob,
    Report,
    Returned,
    SaveJob,
    SavesDropped,
    TierHealth,
    TimePassed,
    each_of,
)
from vllm_kvpool.transfer.progress import newest
from vllm_kvpool.transfer.saves import SaveManager


class HungCalls:
    """Store calls past `call_timeout_s`, and the memory that they may still read or write.

    The slabs of such a batch go on without it. Its slots stay out of use until the call returns:
    slots that a GET may write are quarantined, those that a PUT may read stay with their slab,
    which is pinned.
    """

    def __init__(self, host_cache: HostCache) -> None:
        self._host_cache = host_cache
        self._batches: dict[Batch, list[Slot]] = {}  # with the slots that are quarantined

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, batch: Batch) -> bool:
        return batch in self._batches

    def reserve_memory(self, batch: Batch) -> None:
        """Keep the memory of a call that is given up. Its ops have yet to be failed."""
        written = self._batches[batch] = []
        for entry in _entries_of(batch):
            if batch.lane.kind is OpKind.GET:
                written += self._host_cache.quarantine_slots(entry)
            else:
                self._host_cache.pin(entry)

    def free_memory(self, batch: Batch) -> None:
        """Free the memory of a call that has returned."""
        self._host_cache.slots.give_back(self._batches.pop(batch))
        if batch.lane.kind is not OpKind.GET:
            for entry in _entries_of(batch):
                self._host_cache.unpin(entry)

    @property
    def slots_read(self) -> set[Slot]:
        """Slots that hung calls may read."""
        readers = (batch for batch in self._batches if batch.lane.kind is not OpKind.GET)
        parts = (part for batch in readers for part in batch.parts)
        return {slot for part in parts for slot in part.slots}


def _entries_of(batch: Batch) -> list[CacheEntry]:
    return [op.what.entry for op in batch.ops if op.what.entry is not None]


OWNERS_SHOWN = 4  # jobs named in a batch

Job = LoadJob | SaveJob | PrefetchJob
Command = CancelRequest | DropSaves | Flush | HandOverEnd | Landed | TierHealth
Message = Ask | Lent | Returned
"""To and from the ranks on this host that hold the same KV."""
Event = Job | BatchDone | BatchHung | Command | Message | LenderGone | BorrowerGone | TimePassed
Action = Batch | Report | HandOverProgress | Message


def lane_names(num_tiers: int, *, replicas: bool = False) -> list[LaneName]:
    """Return all lanes of an engine. `replicas`: other ranks on this host hold the same KV."""
    host = [OpKind.FENCE, OpKind.GATHER, OpKind.SEAL, OpKind.CHECK, OpKind.SCATTER]
    tier = [OpKind.GET, OpKind.PUT, OpKind.REMOVE]
    return [
        *(LaneName(kind, HOST) for kind in host),
        *(LaneName(kind, i) for i in range(num_tiers) for kind in tier),
        *([LaneName(OpKind.GET, REPLICA)] if replicas else []),
    ]


class Engine:
    """Decides; `limits` has every lane of `lane_names`."""

    def __init__(
        self,
        host_cache: HostCache,
        tiers: tuple[Tier, ...],
        limits: Mapping[LaneName, LaneLimits],
        *,
        write_back: bool = False,
        slot_bytes: int = 0,
        replicas: ReplicaSet | None = None,
    ) -> None:
        bind = {OpKind.GET: self._bind_get, OpKind.GATHER: self._bind_gather}
        scheduler = Scheduler(
            limits, {lane: bind[lane.kind] for lane in limits if lane.kind in bind}
        )
        self.context = TransferContext(scheduler, host_cache, tiers, slot_bytes)
        self.saves = SaveManager(self.context, write_back=write_back)
        self._fetches = Fetches(self.context, self.saves.copy_up)
        self.loans = Loans(self.context, self._fetches, replicas)
        self.loads = Loads(self.context, self._fetches)
        self.hung_calls = HungCalls(host_cache)
        self.running: set[Batch] = set()
        """Batches that lanes have, but for those that hang."""
        self._handlers: dict[OpKind, Callable[[Op, Outcome], None]] = {
            OpKind.FENCE: self.context.fence_reached,
            OpKind.GATHER: self.saves.gathered,
            OpKind.SEAL: self.saves.sealed,
            OpKind.PUT: self.saves.put,
            OpKind.GET: self._fetches.got,
            OpKind.CHECK: self._checked,
            OpKind.SCATTER: self.loads.scattered,
            OpKind.REMOVE: self._fetches.removed,
        }

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event; returns reports and batches to start, in order."""
        context = self.context
        context.now = context.scheduler.now = now
        self._take(event)
        if not isinstance(event, LoadJob | SaveJob):
            self.loads.go_on()
            self.saves.go_on()
        self.loads.expire()
        self.loans.expire()
        self._take_consequences()
        started = self._start()
        self.saves.watch_stall()
        if self.saves.store_dirty() or context.scheduler.has_news:
            self._take_consequences()
            started += self._start()
        if context.host_cache.capacity:
            self._report_host_cache()
        reports, context.reports = context.reports, []
        progress, context.progress = newest(context.progress), []
        return [*reports, *progress, *self.loans.take_messages(), *started]

    def _take(self, event: Event) -> None:
        match event:
            case BatchDone():
                self._batch_done(event)
            case LoadJob():
                self.loads.submit(event)
            case SaveJob():
                self.saves.submit(event)
            case BatchHung():
                self._batch_hung(event.batch)
            case TierHealth():
                self._tier_changed(event)
            case PrefetchJob():
                self.loads.prefetch(event)
            case CancelRequest():
                self.loads.cancel(event.request_id)
            case Landed():
                self.loads.landed(event)
            case DropSaves():
                self.saves.drop()
                if event.forget:
                    self._reset(event.generation)
            case HandOverEnd():
                self.saves.hand_over_ends(event)
            case Flush():
                self.saves.flush()
            case Ask():
                self.loans.lend(event)
            case Lent():
                self.loans.lent(event)
            case Returned():
                self.loans.returned(event)
            case LenderGone():
                self.loans.lender_gone(event.member)
            case BorrowerGone():
                self.loans.borrower_gone(event.member)
            case TimePassed():
                pass

    def next_deadline(self) -> float | None:
        """Return the time at which a `TimePassed` is due, or None."""
        parts = (self.loads, self.saves, self.loans)
        return min((due for part in parts if (due := part.next_time()) is not None), default=None)

    @property
    def idle(self) -> bool:
        """True if no op runs, and no load, save or loan is open."""
        return not (self.running or self.loads.num_open or self.num_saves or self.loans.num_open)

    @property
    def num_saves(self) -> int:
        """Saves, and copies into tiers, that are in progress."""
        return self.saves.num_open + self.saves.num_copies

    # Starting batches; a slab gets its slots only now

    def _bind_get(self, op: Op) -> bool:
        use = SlotUse.LOAD if op.priority == Priority.LOAD else SlotUse.SAVE
        is_borrowed = op.what.tier == REPLICA
        return is_borrowed or self.context.host_cache.assign_slots(op.what.entry, use)

    def _bind_gather(self, op: Op) -> bool:
        return self.context.host_cache.assign_slots(op.what.entry, SlotUse.SAVE)

    def _start(self) -> list[Action]:
        started: list[Action] = []
        for batch in self.context.scheduler.take(self.context.now):
            if batch.lane.tier == REPLICA:
                self.loans.ask(batch)
                continue
            self._describe(batch)
            self.running.add(batch)
            started.append(batch)
        return started

    def _describe(self, batch: Batch) -> None:
        """Fill in what the lane reads."""
        if batch.lane.kind is OpKind.FENCE:
            batch.fences, batch.ready_at = [op.what.fence for op in batch.ops], self.context.now
            return
        owners: dict[Owner, None] = {}
        ready_at, attempts = self.context.now, 0
        for op in batch.ops:
            if op.owner.request_id and len(owners) < OWNERS_SHOWN:
                owners[op.owner] = None
            if op.ready_at < ready_at:
                ready_at = op.ready_at
            if op.attempts > attempts:
                attempts = op.attempts
        batch.parts = [op.what.part for op in batch.ops]
        batch.owners, batch.ready_at, batch.attempt = tuple(owners), ready_at, 1 + attempts

    # Batches that ended

    def _batch_done(self, done: BatchDone) -> None:
        batch, outcomes = done.batch, done.outcomes
        if batch not in self.running:
            self.hung_calls.free_memory(batch)
            return
        assert len(outcomes) == len(batch.ops), done
        self.running.remove(batch)
        lane: LaneName = batch.lane
        self.context.scheduler.batch_ended(batch)
        if lane.kind is OpKind.GET:
            for op, outcome in zip(batch.ops, outcomes, strict=True):
                if op.priority == Priority.LOAD:
                    found = each_of(outcome, op.size).count(CellOutcome.DONE)
                    self.context.hits[lane.tier] += found
        handle = self._handlers[lane.kind]
        for op, outcome in zip(batch.ops, outcomes, strict=True):
            handle(op, outcome)

    def _checked(self, op: Op, outcome: Outcome) -> None:
        self._fetches.checked(op, outcome)
        self.loans.retain(op.what.entry)

    def _reset(self, generation: int | None) -> None:
        """Reset, so that no cell from before is found afterwards."""
        context = self.context
        still = self.saves.drop_copies()
        self._fetches.cancel_waiting()
        self.loads.cancel_unfetched()
        self.loans.drop_retained()
        context.host_cache.clear()
        if generation is not None:
            context.generation = generation
            marker = Marker(lambda: context.reports.append(SavesDropped(generation)))
            context.scheduler.add(Owner(Priority.SAVE), None, marker, after=still, always=True)

    def _batch_hung(self, batch: Batch) -> None:
        """Leave behind a store call that is past its limit."""
        self.running.remove(batch)
        self.context.scheduler.batch_ended(batch)
        self.hung_calls.reserve_memory(batch)
        for op in batch.ops:
            self._handlers[batch.lane.kind](op, CellOutcome.TIMED_OUT)

    def _tier_changed(self, event: TierHealth) -> None:
        """Move the ops that wait for a tier elsewhere, as far as its store takes none."""
        self.context.health[event.tier] = event
        if not (event.is_up and event.is_writable):
            self._fetches.writes_down(event.tier)
            self.saves.writes_down(event.tier)
        if not event.is_up:
            self._fetches.tier_down(event.tier)

    def _report_host_cache(self) -> None:
        """Report and count what host memory has gained and lost."""
        context, host_cache = self.context, self.context.host_cache
        change = host_cache.take_change()
        if change is not None:
            context.reports.append(change)
        if host_cache.num_dropped:
            context.count(
                "kvpool_evicted_cells", host_cache.num_dropped, tier="host", fate="dropped"
            )
            context.count("kvpool_prefetched_cells", host_cache.unused_prefetches, outcome="unused")
            host_cache.num_dropped = host_cache.unused_prefetches = 0

    def _take_consequences(self) -> None:
        """Handle ops that the scheduler cancelled, and markers, until none is left."""
        scheduler = self.context.scheduler
        while scheduler.has_consequences:
            lost, reached = scheduler.take_lost(), scheduler.take_reached()
            for op, cause in lost:
                op.what.lost(op, cause.what.failure)
            for marker in reached:
                marker.what.on_done()
