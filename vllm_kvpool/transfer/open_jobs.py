"""The loads and saves whose last report is to come, and what metrics, trace and spans say of them.

The engine thread owns them.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.transfer.ops import (
    STORED,
    CellOutcome,
    JobId,
    LoadDone,
    LoadPlan,
    Report,
    SaveDone,
    SaveGathered,
    SavePlan,
    given_up,
    lost_save,
)
from vllm_kvpool.transfer.trace import Instant, RecordSpan, Trace

NOT_SAVED = frozenset(CellOutcome) - STORED


@dataclass(slots=True)
class _OpenJob:
    plan: LoadPlan | SavePlan
    began: float
    uses_pages: bool = True  # a save does until it is gathered


class OpenJobs:
    """Open jobs by number."""

    def __init__(
        self,
        registry: MetricsRegistry,
        trace: Trace,
        record_span: RecordSpan,
        chunk_tokens: int,
    ) -> None:
        self._registry = registry
        self._trace = trace
        self._record_span = record_span
        self._chunk_tokens = chunk_tokens
        self._jobs: dict[JobId, _OpenJob] = {}

    def open(self, plan: LoadPlan | SavePlan) -> None:
        """Note the start of a job, for its duration."""
        self._jobs[plan.job_id] = _OpenJob(plan, time.monotonic())

    def account(self, report: Report) -> None:
        """Count a report; the last one of a job closes it."""
        now = time.monotonic()
        match report:
            case SaveDone():
                job = self._jobs.pop(report.job_id)
                if report.outcomes and not report.lost:
                    self._registry.observe("kvpool_save_seconds", now - job.began)
                self._record_save(job, report, now)
                for outcome, count in report.outcomes:
                    if outcome in NOT_SAVED:
                        self._registry.add("kvpool_failures", count, kind=f"save_{outcome.value}")
                self._trace.add(Instant(now, "save done", report.job_id, report.request_id))
            case LoadDone():
                began = self._jobs.pop(report.job_id).began
                self._registry.observe("kvpool_load_seconds", now - began)
                name = f"load {report.reason.value}"
                self._trace.add(Instant(now, name, report.job_id, report.request_id))
            case SaveGathered():
                self._jobs[report.job_id].uses_pages = False
            case _:
                pass

    def _record_save(self, job: _OpenJob, done: SaveDone, now: float) -> None:
        if isinstance(job.plan, SavePlan) and job.plan.trace_headers and done.outcomes:
            attributes = {
                "kvpool.tokens": len(job.plan.hashes) * self._chunk_tokens,
                "kvpool.stored_cells": sum(n for each, n in done.outcomes if each in STORED),
                "kvpool.lost_cells": sum(n for each, n in done.outcomes if each in NOT_SAVED),
            }
            self._record_span(job.plan.trace_headers, "kvpool.save", now - job.began, attributes)

    def fail_gathered(self) -> Iterator[Report]:
        """Close the saves that use no pages any more; yields a report of each as lost."""
        for job in [job for job in self._jobs.values() if not job.uses_pages]:
            assert isinstance(job.plan, SavePlan), job
            del self._jobs[job.plan.job_id]
            yield lost_save(job.plan, CellOutcome.FAILED)

    def fail_without(self, blocks: set[int]) -> Iterator[Report]:
        """Close the jobs whose pages have none of these blocks; yields a report of each."""
        for job in list(self._jobs.values()):
            plan = job.plan
            if not any(blocks.intersection(pages.block_ids) for pages in plan.pages):
                del self._jobs[plan.job_id]
                yield from given_up(plan, CellOutcome.FAILED)
