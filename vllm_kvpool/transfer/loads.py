"""Loads: slabs of the pool into a waiting request's pages (pure; the engine thread's).

Each slab is one SCATTER, after its fetch if it is not in host memory. A slab that no tier has ends
the load at its chunk; if it is optional, its pages, which hold bytes of other requests, are
cleared. A load is reported when none of its scatters is in flight, and after its bad cells have
been removed: pages never change after the scheduler part has freed them.

A layered load, whose request runs already, reports each span of layers that is loaded. A stream is
a load that begins before another engine has stored all of its chunks: slabs of later chunks wait
until a `Landed` names their chunk, from which the deadline counts anew.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_kvpool.transfer.context import NAME_EVERY_S, Marker, SlabOp, TransferContext
from vllm_kvpool.transfer.fetches import Fetches
from vllm_kvpool.transfer.graph import Op, OpState, Owner, Priority
from vllm_kvpool.transfer.host_cache import CacheEntry
from vllm_kvpool.transfer.ops import (
    HOST,
    NO_SLABS,
    CellOutcome,
    JobId,
    Landed,
    LoadDone,
    LoadJob,
    OpKind,
    Outcome,
    PrefetchJob,
    Slab,
    SpanLoaded,
    worst_of,
)

CLEAR_S = 1.0
"""Further time for a load that has had all but optional slabs by its deadline, to clear theirs."""
URGENT_S = 0.25
"""Time limit of a load whose slabs may have gone with the engine that stored them."""


@dataclass(slots=True, eq=False)
class Scatter(SlabOp):
    """A slab of a load. `over`: it is in the pages, or given up."""

    load: "_Load" = field(kw_only=True)
    loads: "Loads" = field(kw_only=True)
    op: Op | None = None
    over: bool = False

    @property
    def chunk(self) -> int:
        """The chunk's index in the prompt."""
        return self.slab.chunk.position

    @property
    def may_clear(self) -> bool:
        """True if its pages can be cleared in place of the slab."""
        return self.entry is not None and self.slab.kind.is_optional

    def lost(self, op: Op, failure: CellOutcome) -> None:
        """Give up the slab's chunk: its cells could not be fetched."""
        self.loads.lost(op, failure)


@dataclass(slots=True)
class _Load:
    """A load that has not been reported."""

    job: LoadJob
    owner: Owner
    deadline: float
    stop_chunk: int  # from this chunk on slabs are given up
    landed_stop: int  # chunks from this one on are not stored yet
    rest: Iterator[tuple[Slab, ...]] | None  # slabs that are not named yet
    outcome: CellOutcome = CellOutcome.DONE
    slabs: list[Slab] = field(default_factory=list)  # those that are named
    scatters: list[Scatter] = field(default_factory=list)  # by chunk, without those given up
    later: deque[Slab] = field(default_factory=deque)  # of chunks that are not stored yet, in order
    num_open: int = 0
    open_by_span: dict[int, int] = field(default_factory=dict)  # if layered; by first layer
    fence: tuple[Op, ...] = ()  # what scatters wait for besides their slabs
    removals: Op | None = None  # a marker after the removals of the bad cells that ended it
    cleared: set[int] = field(default_factory=set)  # chunks with optional slabs that it has not

    @property
    def first_unnamed(self) -> int:
        """The first chunk that may have slabs without a name, while there are any."""
        return self.slabs[-1].chunk.position if self.slabs else self.job.plan.first_chunk


class Loads:
    """The loads in progress."""

    def __init__(self, context: TransferContext, fetches: Fetches) -> None:
        self._context = context
        self._fetches = fetches
        self._scatters = context.lane(OpKind.SCATTER)
        self._loads: dict[JobId, _Load] = {}
        self._growing: deque[_Load] = deque()  # loads whose slabs are not all named yet
        self._deadlines: list[tuple[float, JobId]] = []  # a heap; those of ended loads are skipped

    @property
    def num_open(self) -> int:
        """Number of loads whose last report is to come."""
        return len(self._loads)

    def submit(self, job: LoadJob) -> None:
        """Start a load: its fetches and scatters, and its deadline."""
        plan = job.plan
        owner = Owner(Priority.LOAD, plan.request_id, plan.job_id)
        landed_stop = plan.stop_chunk if plan.landed_stop is None else plan.landed_stop
        load = _Load(job, owner, 0.0, plan.stop_chunk, landed_stop, job.rest)
        self._loads[plan.job_id] = load
        load.fence = self._context.wait_for(job.fence)
        self._set_deadline(load, job.timeout_s)
        if job.rest is NO_SLABS:
            load.rest = None
        else:
            self._growing.append(load)
        self._grow(load, job.slabs)

    def _grow(self, load: _Load, slabs: Sequence[Slab]) -> None:
        # Others would wait for a `Landed` that does not come.
        wanted = [slab for slab in slabs if slab.chunk.position < load.stop_chunk]
        load.slabs += wanted
        load.later += wanted
        self._start_stored(load)

    def go_on(self) -> None:
        """Name the next slabs of a load; called in every step but those that bring a job."""
        if not self._growing:
            return
        load = self._growing[0]
        slabs = None if load.rest is None else next(load.rest, None)
        if slabs is not None:
            self._grow(load, slabs)
            return
        load.rest = None
        self._growing.popleft()
        self._finish_if_done(load)

    def landed(self, news: Landed) -> None:
        """Fetch the chunks of a load that are stored now; give up later ones after the last."""
        load = self._loads.get(news.job_id)
        if load is None:
            return
        self._set_deadline(load, URGENT_S if news.is_urgent else load.job.timeout_s)
        load.landed_stop = news.stop_chunk
        self._start_stored(load)
        if news.is_final:
            self._stop(load, news.stop_chunk, CellOutcome.MISSING)

    def _set_deadline(self, load: _Load, seconds: float) -> None:
        """Set the deadline of a load to `seconds` from now."""
        load.deadline = self._context.now + seconds
        heapq.heappush(self._deadlines, (load.deadline, load.job.plan.job_id))

    def _start_stored(self, load: _Load) -> None:
        """Fetch and scatter the waiting slabs of chunks that are stored."""
        context, host_cache = self._context, self._context.host_cache
        plan, owner, landed_stop = load.job.plan, load.owner, load.landed_stop
        stop = load.stop_chunk
        hits: dict[str, None] = {}  # chunks, a prompt's beginning first
        while load.later and (plan.layered or load.later[0].chunk.position < landed_stop):
            slab = load.later.popleft()
            if slab.chunk.position >= stop:
                continue
            entry = host_cache.get(slab.id)
            if entry is None:
                entry = self._fetches.start_fetch(slab, owner)
                if entry is None:
                    if slab.kind.is_optional:
                        load.cleared.add(slab.chunk.position)
                        self._scatter(load, slab, None, load.fence)
                    else:  # then later chunks are useless
                        stop = slab.chunk.position
                    continue
            elif entry.op is not None:
                context.scheduler.raise_priority(entry.op, Priority.LOAD)
            host_cache.pin(entry)
            if entry.op is not None:
                self._scatter(load, slab, entry, (*load.fence, entry.op))
                continue
            context.hits[HOST] += slab.num_cells
            if not entry.prefetched:
                hits[slab.chunk.id] = None
            self._scatter(load, slab, entry, load.fence)
        for chunk_id in hits:
            host_cache.hit(chunk_id, context.now_ns)
        if plan.layered:  # its slabs are in the order of layers
            load.scatters.sort(key=lambda scatter: scatter.chunk)
        if stop < load.stop_chunk:
            self._stop(load, stop, self._why_none())
        else:
            self._finish_if_done(load)

    def _scatter(
        self, load: _Load, slab: Slab, entry: CacheEntry | None, after: Sequence[Op]
    ) -> None:
        """Add the op that moves a slab into the pages, or clears them."""
        scatter = Scatter(slab, entry, load=load, loads=self)
        load.scatters.append(scatter)
        load.num_open += 1
        if load.job.plan.layered:
            span = slab.kind.first_layer
            load.open_by_span[span] = load.open_by_span.get(span, 0) + 1
        self._add_op(scatter, after)

    def _add_op(self, scatter: Scatter, after: Sequence[Op]) -> None:
        slab, add = scatter.slab, self._context.scheduler.add
        scatter.op = add(
            *(scatter.load.owner, self._scatters, scatter, slab.nbytes, after), size=slab.num_cells
        )

    def prefetch(self, job: PrefetchJob) -> None:
        """Fetch slabs into the host tier for a request that will probably load them."""
        host_cache = self._context.host_cache
        owner = Owner(Priority.PREFETCH, job.plan.request_id)
        room = host_cache.capacity
        for slab in job.slabs:
            room -= slab.num_cells
            if room < 0:
                break
            if host_cache.get(slab.id) is None:
                entry = self._fetches.start_fetch(slab, owner)
                if entry is None:
                    break
                entry.prefetched = True

    def cancel(self, request_id: str) -> None:
        """Stop the loads of a request that has ended."""
        for load in list(self._loads.values()):
            if load.job.plan.request_id == request_id:
                self._stop(load, load.job.plan.first_chunk, CellOutcome.CANCELLED)

    def cancel_unfetched(self) -> None:
        """Fetch nothing more for the loads so far, after a reset."""
        for load in list(self._loads.values()):
            if load.rest is not None or load.later:
                first = load.later[0].chunk.position if load.later else load.first_unnamed
                self._stop(load, first, CellOutcome.CANCELLED)

    def expire(self) -> None:
        """Stop the loads whose deadline has passed.

        A load that only waits for chunks to be stored goes on: the scheduler part ends that wait.
        """
        now = self._context.now
        while self._deadlines and self._deadlines[0][0] <= now:
            load = self._loads.get(heapq.heappop(self._deadlines)[1])
            if load is not None and load.deadline <= now and (load.num_open or not load.later):
                self._expire(load)

    def _expire(self, load: _Load) -> None:
        open_now = [scatter for scatter in load.scatters if not scatter.over]
        late = [scatter for scatter in open_now if scatter.may_clear and self._cancel(scatter)]
        for scatter in late:
            self._clear(scatter)
        needed = [scatter.chunk for scatter in open_now if scatter not in late]
        if load.rest is not None:
            needed.append(load.first_unnamed)
        if needed or not late:
            self._stop(load, min(needed, default=load.stop_chunk), CellOutcome.TIMED_OUT)
        else:
            self._set_deadline(load, CLEAR_S)

    def next_time(self) -> float | None:
        """Return when the next deadline passes, or the next slabs are named."""
        if self._growing:
            return self._context.now + NAME_EVERY_S
        while self._deadlines and self._deadlines[0][1] not in self._loads:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def scattered(self, op: Op, outcome: Outcome) -> None:
        """Take the end of a scatter, and report the chunks that are in the pages."""
        scatter: Scatter = op.what
        entry = scatter.entry
        if entry is not None and entry.loan is not None and entry.loan.until <= self._context.now:
            outcome = CellOutcome.TIMED_OUT  # the lender may have reused the slots meanwhile
        if outcome is CellOutcome.DONE:
            self._context.scheduler.finish(op)
            if entry is not None and entry.prefetched:
                entry.prefetched = False
                self._context.count("kvpool_prefetched_cells", entry.num_cells, outcome="used")
        else:
            self._context.scheduler.fail(op)
        self._end_scatter(scatter)
        if outcome is not CellOutcome.DONE:
            self._stop(scatter.load, scatter.chunk, worst_of(outcome))
        self._finish_if_done(scatter.load)

    def lost(self, op: Op, outcome: CellOutcome) -> None:
        """Give up a scatter, cancelled because the fetch or gather of its slab has failed."""
        scatter: Scatter = op.what
        if scatter.over or op is not scatter.op:
            return
        if scatter.may_clear:
            self._clear(scatter)
            return
        self._end_scatter(scatter)
        self._stop(scatter.load, scatter.chunk, outcome)

    def _cancel(self, scatter: Scatter) -> bool:
        """Cancel a scatter that has not started; False if it has."""
        assert scatter.op is not None, scatter
        return self._context.scheduler.cancel(scatter.op)

    def _clear(self, scatter: Scatter) -> None:
        """Fill the pages of an optional slab with zeros: no tier has it, or it is late."""
        self._unpin(scatter)
        scatter.load.cleared.add(scatter.chunk)
        self._add_op(scatter, scatter.load.fence)

    def _unpin(self, scatter: Scatter) -> None:
        entry, scatter.entry = scatter.entry, None
        if entry is not None:
            self._context.host_cache.unpin(entry)
            if entry.op is not None:  # it is still being fetched
                self._fetches.cancel_if_unwanted(entry)

    def _why_none(self) -> CellOutcome:
        context = self._context
        is_cut_off = bool(context.tiers) and not context.tiers_up()
        return CellOutcome.UNREACHABLE if is_cut_off else CellOutcome.MISSING

    def _stop(self, load: _Load, chunk: int, outcome: CellOutcome) -> None:
        """Give up all slabs from `chunk` on."""
        context = self._context
        if chunk < load.stop_chunk:
            load.stop_chunk = chunk
            load.outcome = outcome
            running: list[Scatter] = []
            while load.scatters and load.scatters[-1].chunk >= chunk:
                scatter = load.scatters.pop()
                if scatter.over or scatter.op is None:
                    continue
                if context.scheduler.cancel(scatter.op):
                    self._end_scatter(scatter)
                else:
                    running.append(scatter)
            load.scatters.extend(reversed(running))
            while load.later and load.later[-1].chunk.position >= chunk:
                load.later.pop()
            if chunk <= load.first_unnamed:  # else slabs before it are still to be named
                load.rest = None
        self._finish_if_done(load)

    def _end_scatter(self, scatter: Scatter) -> None:
        scatter.over = True
        load = scatter.load
        load.num_open -= 1
        if load.job.plan.layered:
            span = scatter.slab.kind.first_layer
            load.open_by_span[span] -= 1
            if not load.open_by_span[span]:
                self._context.reports.append(SpanLoaded(load.job.plan.job_id, span))
        self._unpin(scatter)

    def _finish_if_done(self, load: _Load) -> None:
        """Report the load if no slab is left and no bad cell is being removed."""
        plan = load.job.plan
        is_named = load.rest is None
        if load.num_open or load.later or not is_named or plan.job_id not in self._loads:
            return
        if self._is_removing(load):
            return
        del self._loads[plan.job_id]
        cleared = frozenset(load.cleared)
        done = LoadDone(plan.job_id, plan.request_id, load.stop_chunk, load.outcome, cleared)
        self._context.reports.append(done)

    def _is_removing(self, load: _Load) -> bool:
        """Return True if the load waits for the removal of bad cells of the chunk that ended it."""
        job = load.job
        if load.deadline <= self._context.now:
            return False
        if load.removals is None and load.stop_chunk < job.plan.stop_chunk:
            removals = self._fetches.removals(
                slab for slab in load.slabs if slab.chunk.position == load.stop_chunk
            )
            if removals:
                add = self._context.scheduler.add
                marker = Marker(partial(self._finish_if_done, load))
                load.removals = add(load.owner, None, marker, after=removals, always=True)
        return load.removals is not None and load.removals.state is OpState.WAITING
