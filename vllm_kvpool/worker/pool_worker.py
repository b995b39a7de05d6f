"""Hands a step's plan to the executor, and the executor's reports to vLLM.

Owned by the model's thread; nothing here calls a store. On a CPU the gather of a step's saves ends
inside the step (`finish_in_step`). So it does in an in-process engine, which may make no later step
to release blocks in. A gather that waits until a store has taken earlier cells goes on after the
step. Layered
loads end in their own step: each layer waits for its span (`wait_for_layer`), the end of the step
for the rest, and only invalid blocks are reported to vLLM.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from vllm_kvpool.identity.keys import layer_group_of
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.loads import idle_wait_s
from vllm_kvpool.scheduler.messages import Loaded, StepPlan, StepReport, Stored
from vllm_kvpool.staging.devices import Fence
from vllm_kvpool.transfer.executor import Executor, Fenced
from vllm_kvpool.transfer.ops import (
    CancelRequest,
    CellOutcome,
    DropSaves,
    HostCacheChange,
    JobId,
    LoadDone,
    LoadPlan,
    Report,
    SaveDone,
    SaveGathered,
    SavePlan,
    SavesDropped,
    SavesStalled,
    given_up,
)
from vllm_kvpool.worker.layer_waits import LayerWaits

logger = logging.getLogger(__name__)

GATHER_WAIT_S = 5.0
LATE_S = 30.0  # past its deadline a load only waits for copies in memory


@dataclass(frozen=True, slots=True)
class StepResults:
    """The results of a step, for vLLM.

    `loaded`: requests whose load has ended. What was not loaded is in `invalid_blocks`, or in
    `failed` where vLLM cannot resume from a block (`GroupTables.resumes`).
    """

    loaded: frozenset[str] = frozenset()
    invalid_blocks: frozenset[int] = frozenset()
    failed: frozenset[str] = frozenset()


NOTHING_ENDED = StepResults()


class PoolWorker:
    """The loads and saves of one rank, step by step.

    Args:
        ranks_served: by layer group, the ranks that load from this one's host memory, itself
            included; empty if no other rank does.
    """

    def __init__(
        self,
        executor: Executor,
        chunk_tokens: int,
        block_size: int,
        finish_in_step: bool,
        registry: MetricsRegistry,
        new_fence: Callable[[], Fence | None] = lambda: None,
        rank: int = 0,
        ranks_served: Mapping[str, Sequence[int]] = MappingProxyType({}),
        resumes: bool = True,
        layer_spans: Mapping[str, int] | None = None,
        load_timeout_s: float = 30.0,
        notices: str = "",
        has_drafts: bool = False,
        lookahead: int = 0,
    ) -> None:
        self.has_drafts = has_drafts
        """A drafter's layers are saved: its pages are not final before the model's results."""
        self.lacks_drafts = False
        """The scheduler part counts on a drafter's layers that this rank does not store."""
        self._lookahead = lookahead
        self._waits = LayerWaits(layer_spans or {})
        self._load_timeout_s = load_timeout_s
        self._early: list[Report] = []  # drained before the end of the step
        self._layer_wait_s = 0.0  # of the step, for layered loads
        self._resumes = resumes
        self._executor = executor
        self._new_fence = new_fence
        self._chunk_tokens = chunk_tokens
        self._block_size = block_size
        self._finish_in_step = finish_in_step
        self._registry = registry
        self._rank = rank
        self._ranks_served = ranks_served
        self._generation = 0
        self._loads: dict[JobId, tuple[LoadPlan, float]] = {}
        self._saves: dict[JobId, float] = {}  # in progress, since when
        self._gathering: set[JobId] = set()
        self._loads_posted: StepPlan | None = None  # the plan of this step
        self._saves_posted: StepPlan | None = None
        self._step_ended: StepPlan | None = None  # the last plan whose forward pass has ended
        self._has_failed = False  # a forward pass has: later ones read what it has not computed
        # Since the last `take_report`; the first says where this rank tells of hand-overs.
        self._reports = [StepReport(notices={rank: notices})] if notices else []

    def start_loads(self, plan: StepPlan) -> None:
        """Post the step's loads; once for a plan."""
        if plan is self._loads_posted:
            return
        if self._loads_posted is not None:
            ends = self._step_ended, self._saves_posted
            if not any(self._loads_posted is end for end in ends):
                self.fail_step()  # vLLM's second runner says no more of a step that fails
            self.start_saves(self._loads_posted)  # the end of its step may have told nothing
        self._loads_posted = plan
        self._layer_wait_s = 0.0
        if plan.generation > self._generation:
            self._generation = plan.generation
            self._executor.post(DropSaves(forget=True, generation=plan.generation))
        self._post_fenced(plan.loads)  # scatters wait for what still reads or writes the pages
        for load in plan.loads:
            self._loads[load.job_id] = (load, time.monotonic())
            if load.layered:
                self._waits.start_load(load.job_id)
        for landed in plan.landed:
            self._executor.post(landed)
        for prefetch in plan.prefetches:
            self._executor.post(prefetch)

    def wait_for_layer(self, layer_name: str) -> None:
        """Wait until the step's loads have filled a layer's pages, or have failed.

        RuntimeError if a load has not ended `LATE_S` after its deadline.
        """
        if self._waits.loading:
            self._wait_until(lambda: self._waits.ready(layer_name))
        self._waits.note_asked(layer_name)

    def wait_for_copies(self) -> None:
        """Wait until no load or save uses pages: vLLM is about to take their memory away.

        RuntimeError as of `wait_for_layer`.
        """
        self._wait_until(lambda: not (self._gathering or self._loads.keys() - self._ended_early))

    @property
    def _ended_early(self) -> set[JobId]:
        return {report.job_id for report in self._early if isinstance(report, LoadDone)}

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        start = time.monotonic()
        self._take_early()
        while not is_over():
            began = max([began for _, began in self._loads.values()] or [start])
            left = began + self._load_timeout_s + LATE_S - time.monotonic()
            if left <= 0 or not self._executor.wait(bool, left):
                # Going on would let late copies write into blocks of other requests.
                raise RuntimeError(
                    f"kvpool: a load or save has not ended {LATE_S:g} s after its deadline "
                    f"(load_timeout_s={self._load_timeout_s:g}); restart the engine"
                )
            self._take_early()
        self._layer_wait_s += time.monotonic() - start

    def _take_early(self) -> None:
        reports = self._drain()
        self._waits.note_reports(reports)
        self._early += reports

    def _drain(self) -> list[Report]:
        reports = self._executor.drain()
        self._gathering.difference_update(_gathered(reports))
        return reports

    def start_saves(self, plan: StepPlan) -> None:
        """Post the step's saves, after the forward pass; once for a plan."""
        if plan is self._saves_posted:
            return
        self._saves_posted = plan
        saves = () if self._has_failed else plan.saves
        self._post_fenced(saves)
        for save in saves:
            self._saves[save.job_id] = time.monotonic()
            self._gathering.add(save.job_id)
        for end in plan.hand_over_ends:
            self._executor.post(end)
        if self._has_failed:
            for save in plan.saves:
                self._early += given_up(save, CellOutcome.FAILED)
        elif saves and self._finish_in_step:
            mine = {save.job_id for save in saves}
            self._executor.wait(
                lambda reports: mine <= _gathered(reports) or SavesStalled() in reports,
                GATHER_WAIT_S,
            )

    def fail_step(self) -> None:
        """Save nothing of this step, whose forward pass has failed, nor of later ones.

        A program that goes on with an engine in its process computes from pages that were not
        written. What has ended is reported with the next step: vLLM drops the reports of this one.
        """
        if not self._has_failed:
            self._has_failed = True
            self._registry.add("kvpool_failures", kind="step")
            logger.error(
                "kvpool: a step of the model has failed, so its KV is not known to be right; this "
                "engine saves nothing until it restarts"
            )

    @property
    def awaits_saves(self) -> bool:
        """True if saves of the present step have yet to start: its drafter still computes."""
        plan = self._loads_posted
        return plan is not None and plan is not self._saves_posted and bool(plan.saves)

    def take_gathered(self) -> StepReport | None:
        """Return the saves that have been gathered since the results of the step; None if none."""
        self._take_early()
        gathered = {each.job_id: 1 for each in self._early if isinstance(each, SaveGathered)}
        self._early = [each for each in self._early if not isinstance(each, SaveGathered)]
        return StepReport(gathered=gathered) if gathered else None

    def finish_step(self, plan: StepPlan | None, finished_requests: set[str]) -> StepResults:
        """Collect what has ended since the last step."""
        self._step_ended = self._loads_posted
        if plan is not None and plan.idle:
            self._wait_idle()
        for load, _ in self._loads.values():
            if load.request_id in finished_requests:
                self._executor.post(CancelRequest(load.request_id))
        unasked: frozenset[str] = frozenset()
        if self._waits.loading or self._early:
            self._wait_until(lambda: not self._waits.loading)
            unasked = self._waits.unasked
        reports, self._early = [*self._early, *self._drain()], []
        if not reports:
            return NOTHING_ENDED
        layered = [load for load, _ in self._loads.values() if load.layered]  # all have ended
        token_s = self._layer_wait_s / max(
            1, sum(load.token_stop - load.token_start for load in layered)
        )
        loaded: set[str] = set()
        failed: set[str] = set()
        invalid: set[int] = set()
        for report in reports:
            if isinstance(report, SaveGathered):
                self._reports.append(StepReport(gathered={report.job_id: 1}))
            elif isinstance(report, SavesDropped):
                self._reports.append(StepReport(dropped={report.generation: 1}))
            elif isinstance(report, SaveDone):
                self._saves.pop(report.job_id, None)
                lost = {chunk: reason.value for chunk, reason in report.lost}
                how = Stored(1, frozenset(report.tiers), frozenset(report.missed), lost)
                self._reports.append(StepReport(stored={report.job_id: how}))
            elif isinstance(report, HostCacheChange):
                self._reports.append(StepReport(host=self._host_of_ranks(report)))
            elif isinstance(report, LoadDone):
                load, kept = self._load_ended(report, unasked, token_s)
                if not load.layered:
                    loaded.add(report.request_id)
                if kept == load.token_stop:
                    continue
                if not self._resumes:
                    failed.add(report.request_id)
                else:
                    # From the block of the first row not loaded; earlier ones may be shared.
                    block_ids, table_start, *_ = load.pages[0]
                    first = max(load.token_start, kept - self._lookahead)
                    invalid.update(block_ids[(first - table_start) // self._block_size :])
        return StepResults(frozenset(loaded), frozenset(invalid), frozenset(failed))

    def _host_of_ranks(self, change: HostCacheChange) -> dict[int, HostCacheChange]:
        """Return the change for each rank that loads from this host memory."""
        if not self._ranks_served:
            return {self._rank: change}
        complete: dict[int, dict[str, bool]] = {}
        for chunk_ids, is_complete in ((change.added, True), (change.removed, False)):
            for chunk_id in chunk_ids:
                for rank in self._ranks_served.get(layer_group_of(chunk_id), (self._rank,)):
                    complete.setdefault(rank, {})[chunk_id] = is_complete
        return {rank: HostCacheChange.of(chunks) for rank, chunks in complete.items()}

    def _post_fenced(self, plans: Sequence[LoadPlan | SavePlan]) -> None:
        """Post a step's loads or saves with one fence: what the model's stream has now."""
        fence = self._new_fence() if plans else None
        for plan in plans:
            self._executor.post(plan if fence is None else Fenced(plan, fence))

    def _wait_idle(self) -> None:
        """Leave the cores to the lanes for a moment, if a load or a save is in progress."""
        began = [since for _, since in self._loads.values()] or list(self._saves.values())
        if began:
            self._executor.wait(bool, idle_wait_s(time.monotonic() - max(began)))

    def _load_ended(
        self, done: LoadDone, unasked: frozenset[str], token_s: float
    ) -> tuple[LoadPlan, int]:
        """Return the load's plan, and the token up to which its pages are filled.

        `token_s`: seconds that the step has waited for each token of its layered loads.
        """
        plan, began = self._loads.pop(done.job_id)
        kept = max(plan.token_start, min(plan.token_stop, done.ok_stop_chunk * self._chunk_tokens))
        if plan.layered and unasked:
            kept = plan.token_start
            self._registry.add("kvpool_failures", kind="layer_not_asked")
            logger.error(
                "kvpool: %d layers, such as %s, were computed without waiting for their load; its "
                "tokens are computed again. Remove layerwise from this engine's configuration",
                len(unasked),
                min(unasked),
            )
        elif kept < plan.token_stop:
            self._registry.add("kvpool_failures", kind=f"load_{done.reason.value}")
        tokens = plan.token_stop - plan.token_start
        seconds = tokens * token_s if plan.layered else time.monotonic() - began
        chunks = range(plan.first_chunk, plan.stop_chunk)
        cleared = frozenset(chunks) if self.lacks_drafts else done.cleared
        end = Loaded(kept, seconds, cleared)
        self._reports.append(StepReport(loads={plan.request_id: end}))
        return plan, kept

    def take_report(self) -> StepReport | None:
        """Return the report of all events since the last call; None if there were none."""
        if not self._reports:
            return None
        reports, self._reports = self._reports, []
        return StepReport.merge(reports)


def _gathered(reports: Sequence[Report]) -> set[JobId]:
    return {r.job_id for r in reports if isinstance(r, SaveGathered)}
