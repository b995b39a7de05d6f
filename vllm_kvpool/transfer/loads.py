"""Loads: cells of the pool into a waiting request's pages (pure; the engine thread's).

Each cell is a SCATTER, after the cell's fetch if it is not in host memory. A cell that no tier has
ends the load at its chunk; if it is optional, its pages are cleared instead: they hold bytes of
other requests. A load is reported when none of its scatters is in flight, so pages never change
after the scheduler side has freed them, and after its bad cells have been removed.

A layered load, whose request runs already, reports each span of layers that is loaded. A stream is
a load that begins before another engine has stored all of its chunks: cells of later chunks wait
until a `Landed` names their chunk, from which the deadline counts anew.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from vllm_kvpool.transfer.context import CellOp, Marker, TransferContext
from vllm_kvpool.transfer.graph import Op, OpState, Owner, Priority
from vllm_kvpool.transfer.host_cache import CacheEntry
from vllm_kvpool.transfer.ops import (
    HOST,
    Cell,
    CellOutcome,
    JobId,
    Landed,
    LoadDone,
    LoadJob,
    OpKind,
    PrefetchJob,
    SpanLoaded,
)

if TYPE_CHECKING:
    from vllm_kvpool.transfer.fetches import Fetches

CLEAR_S = 1.0
"""Further time for a load that has had all but optional cells by its deadline, to clear theirs."""
URGENT_S = 0.25
"""Time limit of a load whose cells may have gone with the engine that stored them."""


@dataclass(slots=True, eq=False)
class Scatter(CellOp):
    """One cell of a load; without an entry its pages are cleared. `over`: it is in the pages, or
    given up."""

    load: "_Load"
    op: Op | None = None
    over: bool = False


@dataclass(slots=True)
class _Load:
    """A load that has not been reported."""

    job: LoadJob
    owner: Owner
    deadline: float
    stop_chunk: int  # from this chunk on cells are given up
    outcome: CellOutcome = CellOutcome.DONE
    scatters: list[Scatter] = field(default_factory=list)  # by chunk, without those given up
    later: deque[Cell] = field(default_factory=deque)  # of chunks that are not stored yet, in order
    num_open: int = 0
    open_by_span: dict[int, int] = field(default_factory=dict)  # if layered; by first layer
    fence: tuple[Op, ...] = ()  # what scatters wait for besides their cells
    removals: Op | None = None  # a marker after the removals of the bad cells that ended it
    cleared: set[int] = field(default_factory=set)  # chunks with optional cells that it has not


class Loads:
    """All loads. `on_wanted` is called for each cell that this rank fetches itself."""

    def __init__(
        self,
        context: TransferContext,
        fetches: "Fetches",
        on_wanted: Callable[[Cell, CacheEntry, Owner], None],
    ) -> None:
        self._context = context
        self._on_wanted = on_wanted
        self._fetches = fetches
        self._scatters = context.lane(OpKind.SCATTER)
        self._loads: dict[JobId, _Load] = {}
        self._deadlines: list[tuple[float, JobId]] = []  # a heap; those of ended loads are skipped

    @property
    def num_open(self) -> int:
        return len(self._loads)

    def submit(self, job: LoadJob) -> None:
        plan = job.plan
        owner = Owner(Priority.LOAD, plan.request_id, plan.job_id)
        load = self._loads[plan.job_id] = _Load(job, owner, 0.0, plan.stop_chunk)
        load.later.extend(job.cells)
        load.fence = self._context.wait_for(job.fence)
        self._limit(load, job.timeout_s)
        self._begin(load, plan.stop_chunk if plan.landed_stop is None else plan.landed_stop)

    def landed(self, news: Landed) -> None:
        """Fetch the chunks of a load that are stored now; give up later ones after the last."""
        load = self._loads.get(news.job_id)
        if load is None:
            return
        self._limit(load, URGENT_S if news.is_urgent else load.job.timeout_s)
        self._begin(load, news.stop_chunk)
        if news.is_final:
            self._stop(load, news.stop_chunk, CellOutcome.MISSING)

    def _limit(self, load: _Load, seconds: float) -> None:
        """Set the deadline of a load to `seconds` from now."""
        load.deadline = self._context.now + seconds
        heapq.heappush(self._deadlines, (load.deadline, load.job.plan.job_id))

    def _begin(self, load: _Load, landed_stop: int) -> None:
        """Fetch and scatter the waiting cells of chunks before `landed_stop`."""
        context, host_cache = self._context, self._context.host_cache
        plan, owner = load.job.plan, load.owner
        stop = plan.stop_chunk
        num_from_host = 0
        hits: dict[str, None] = {}  # chunks, a prompt's beginning first
        while load.later and (plan.layered or load.later[0].chunk.position < landed_stop):
            cell = load.later.popleft()
            if cell.chunk.position >= stop:
                continue
            entry = host_cache.get(cell.key)
            if entry is None:
                entry = self._fetches.begin(cell, owner)
                if entry is None and cell.is_optional:
                    scatter = Scatter(cell, None, load)
                    load.scatters.append(scatter)
                    load.num_open += 1
                    self._clear(scatter)
                    continue
                if entry is None:  # then later chunks are useless
                    stop = cell.chunk.position
                    continue
            elif entry.op is not None:
                context.scheduler.raise_priority(entry.op, Priority.LOAD)
            is_here = entry.op is None
            num_from_host += is_here
            host_cache.pin(entry)
            if cell.fetcher is None:
                self._on_wanted(cell, entry, owner)
            if is_here and not entry.prefetched:
                hits[cell.chunk.id] = None
            scatter = Scatter(cell, entry, load)
            after = load.fence if entry.op is None else (*load.fence, entry.op)
            scatter.op = context.scheduler.add(owner, self._scatters, scatter, cell.nbytes, after)
            load.scatters.append(scatter)
            load.num_open += 1
            if plan.layered:
                span = cell.first_layer
                load.open_by_span[span] = load.open_by_span.get(span, 0) + 1
        for chunk_id in hits:
            host_cache.hit(chunk_id, context.now_ns)
        context.hits[HOST] += num_from_host
        if plan.layered:  # its cells are in the order of layers
            load.scatters.sort(key=lambda scatter: scatter.cell.chunk.position)
        if stop < plan.stop_chunk:
            self._stop(load, stop, self._why_none())
        else:
            self._finish(load)

    def prefetch(self, job: PrefetchJob) -> None:
        """Fetch cells into the host tier for a request that will probably load them."""
        host_cache = self._context.host_cache
        owner = Owner(Priority.PREFETCH, job.plan.request_id)
        for cell in job.cells[: host_cache.capacity]:
            if host_cache.get(cell.key) is None:
                entry = self._fetches.begin(cell, owner)
                if entry is None:
                    break
                entry.prefetched = True

    def cancel(self, request_id: str) -> None:
        """Stop the loads of a request that has ended."""
        for load in list(self._loads.values()):
            if load.job.plan.request_id == request_id:
                self._stop(load, load.job.plan.first_chunk, CellOutcome.CANCELLED)

    def expire(self) -> None:
        """Stop the loads whose deadline has passed.

        A load that only waits for chunks to be stored goes on: the scheduler side ends that wait.
        """
        now = self._context.now
        while self._deadlines and self._deadlines[0][0] <= now:
            load = self._loads.get(heapq.heappop(self._deadlines)[1])
            if load is not None and load.deadline <= now and (load.num_open or not load.later):
                self._expire(load)

    def _expire(self, load: _Load) -> None:
        open_now = [scatter for scatter in load.scatters if not scatter.over]
        late = [
            scatter
            for scatter in open_now
            if scatter.cell.is_optional and scatter.entry is not None and self._cancel(scatter)
        ]
        for scatter in late:
            self._clear(scatter)
        needed = [scatter.cell.chunk.position for scatter in open_now if scatter not in late]
        if needed or not late:
            self._stop(load, min(needed, default=load.stop_chunk), CellOutcome.TIMED_OUT)
        else:
            self._limit(load, CLEAR_S)

    def next_time(self) -> float | None:
        """When the next deadline passes."""
        while self._deadlines and self._deadlines[0][1] not in self._loads:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def scattered(self, op: Op, outcome: CellOutcome) -> None:
        scatter = op.what
        if outcome is CellOutcome.DONE:
            self._context.scheduler.finish(op)
            if scatter.entry is not None and scatter.entry.prefetched:
                scatter.entry.prefetched = False
                self._context.count("kvpool_prefetched_cells", outcome="used")
        else:
            self._context.scheduler.fail(op)
        self._over(scatter)
        if outcome is not CellOutcome.DONE:
            self._stop(scatter.load, scatter.cell.chunk.position, outcome)
        self._finish(scatter.load)

    def lost(self, op: Op, outcome: CellOutcome) -> None:
        """A scatter was cancelled because its cell cannot be had."""
        scatter = op.what
        if scatter.over or op is not scatter.op:
            return
        if scatter.cell.is_optional and scatter.entry is not None:
            self._clear(scatter)
            return
        self._over(scatter)
        self._stop(scatter.load, scatter.cell.chunk.position, outcome)

    def _cancel(self, scatter: Scatter) -> bool:
        """Cancel a scatter that has not started; False if it has."""
        assert scatter.op is not None, scatter
        return self._context.scheduler.cancel(scatter.op)

    def _clear(self, scatter: Scatter) -> None:
        """Fill the pages of a cell that cannot be had with zeros."""
        load, cell = scatter.load, scatter.cell
        self._release(scatter)
        load.cleared.add(cell.chunk.position)
        scatter.op = self._context.scheduler.add(
            load.owner, self._scatters, scatter, cell.nbytes, load.fence
        )

    def _release(self, scatter: Scatter) -> None:
        entry, scatter.entry = scatter.entry, None
        if entry is None:
            return
        self._context.host_cache.unpin(entry)
        if entry.op is not None:  # it is still being fetched
            self._fetches.release(entry)

    def _why_none(self) -> CellOutcome:
        context = self._context
        is_cut_off = bool(context.tiers) and not context.tiers_up()
        return CellOutcome.UNREACHABLE if is_cut_off else CellOutcome.MISSING

    def _stop(self, load: _Load, chunk: int, outcome: CellOutcome) -> None:
        """Give up all cells from `chunk` on."""
        context = self._context
        if chunk < load.stop_chunk:
            load.stop_chunk = chunk
            load.outcome = outcome
            running: list[Scatter] = []
            while load.scatters and load.scatters[-1].cell.chunk.position >= chunk:
                scatter = load.scatters.pop()
                if scatter.over or scatter.op is None:
                    continue
                if context.scheduler.cancel(scatter.op):
                    self._over(scatter)
                else:
                    running.append(scatter)
            load.scatters.extend(reversed(running))
            while load.later and load.later[-1].chunk.position >= chunk:
                load.later.pop()
        self._finish(load)

    def _over(self, scatter: Scatter) -> None:
        scatter.over = True
        load = scatter.load
        load.num_open -= 1
        if load.job.plan.layered:
            span = scatter.cell.first_layer
            load.open_by_span[span] -= 1
            if not load.open_by_span[span]:
                self._context.reports.append(SpanLoaded(load.job.plan.job_id, span))
        self._release(scatter)

    def _finish(self, load: _Load) -> None:
        """Report the load if no cell is left and no bad cell is being removed."""
        plan = load.job.plan
        if load.num_open or load.later or plan.job_id not in self._loads:
            return
        if self._is_removing(load):
            return
        del self._loads[plan.job_id]
        cleared = frozenset(load.cleared)
        done = LoadDone(plan.job_id, plan.request_id, load.stop_chunk, load.outcome, cleared)
        self._context.reports.append(done)

    def _is_removing(self, load: _Load) -> bool:
        """Whether the load waits for the removal of bad cells of the chunk that ended it."""
        job = load.job
        if load.deadline <= self._context.now:
            return False
        if load.removals is None and load.stop_chunk < job.plan.stop_chunk:
            keys = (cell.key for cell in job.cells if cell.chunk.position == load.stop_chunk)
            removals = self._fetches.removals(keys)
            if removals:
                add = self._context.scheduler.add
                marker = Marker(partial(self._finish, load))
                load.removals = add(load.owner, None, marker, after=removals, always=True)
        return load.removals is not None and load.removals.state is OpState.WAITING
