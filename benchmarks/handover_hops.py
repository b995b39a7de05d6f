"""The pool's hand-over without models: two engines' real schedulers and workers, hop by hop.

Each engine is a `ModelFreeEngine` in a process of its own; a forward pass of prefill sleeps for
50 us a token. Moments are `time.monotonic()`, which all processes of a machine share.
"""

import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common import DidNotFinish, late
from benchmarks.model_free_engine import ModelFreeEngine
from vllm_kvpool.transfer.ops import CellOutcome, LoadDone, SaveDone, SaveGathered

LIMIT_S = 60.0
TOKEN_S = 50e-6  # of a forward pass
LOOK_S = 0.001  # an engine with nothing to compute looks again after as long


@dataclass(frozen=True)
class Answered:
    """Of prefill."""

    ended: float
    """The end of the last forward pass."""
    gathered: float
    """All of the prompt's saves have left the pages; `ended` if they had before."""


@dataclass(frozen=True)
class Taken:
    """Of decode."""

    known: float
    """The scheduler has an answer about the prompt."""
    loaded: float
    """The pages of all that was promised are filled; `known` where nothing was."""
    found: int
    """Tokens that were promised."""


def prompt(seed: int, tokens: int, vocab: int) -> list[int]:
    return random.Random(seed).choices(range(3, vocab), k=tokens)


class HopEngine(ModelFreeEngine):
    """Notes when the worker's executor has reported what."""

    def __init__(self, core: int, *args: Any) -> None:
        os.sched_setaffinity(0, {core})  # with all threads that it starts
        super().__init__(*args)
        from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

        self._worker = get_kv_transfer_group()._worker_part.worker
        self._executor = self._worker._executor
        self._noted: dict[type, tuple[float, Any]] = {}  # the last report of each kind
        self._saves = 0  # posted and not stored
        self._table: list[int] = []  # of the last request
        self._watch()

    def _watch(self) -> None:
        drain, start_saves = self._executor.drain, self._worker.start_saves

        def noted_drain() -> list[Any]:
            reports = list(drain())
            for report in reports:
                self._noted[type(report)] = time.monotonic(), report
                if isinstance(report, SaveDone):
                    self._saves -= 1
                    if report.missed:
                        raise DidNotFinish(f"{len(report.missed)} chunks were not stored")
                if isinstance(report, LoadDone) and report.reason is not CellOutcome.DONE:
                    raise DidNotFinish(f"a load stopped: {report.reason.value}")
            return reports

        def counted_saves(plan: Any) -> None:
            if plan is not self._worker._saves_posted:  # vLLM calls twice in some steps
                self._saves += len(plan.saves)
            start_saves(plan)

        self._executor.drain, self._worker.start_saves = noted_drain, counted_saves

    def fill(self) -> None:
        """Give every page a content of its own."""
        import torch

        for number, pages in enumerate(self.pages.values()):
            pages.uniform_(generator=torch.Generator().manual_seed(number))

    def content(self, tokens: int) -> float:
        """A sum over the pages of the last request's first tokens; equal for equal bytes."""
        count = tokens // self._shape.block
        return sum(float(each[self._table[:count]].double().sum()) for each in self.pages.values())

    def compute(self, seed: int, tokens: int) -> Answered:
        """Compute a new prompt until its token is there."""
        ended = 0.0

        def forward(scheduled: Mapping[str, int]) -> None:
            nonlocal ended
            time.sleep(TOKEN_S * sum(scheduled.values()))
            ended = time.monotonic()

        self._run(seed, tokens, forward)
        return Answered(ended, max(ended, self._noted[SaveGathered][0]))

    def stored(self) -> float:
        """When all saves were in the stores; waits for it."""
        deadline = time.monotonic() + LIMIT_S
        while self._saves:
            if time.monotonic() > deadline:
                raise late(LIMIT_S)
            self._executor.wait(bool, LIMIT_S)
            self._worker.finish_step(None, set())
        return self._noted[SaveDone][0]

    def take(self, seed: int, tokens: int) -> Taken:
        """Ask the pool for a prompt and load what it has."""
        connector = self.scheduler.connector
        match = connector.get_num_new_matched_tokens
        answers: list[tuple[float, int]] = []

        def timed_match(request: Any, num_computed: int) -> Any:
            answer = match(request, num_computed)
            if answer[0] is not None:
                answers.append((time.monotonic(), answer[0]))
            return answer

        def forward(scheduled: Mapping[str, int]) -> None:
            if not scheduled:
                time.sleep(LOOK_S)

        connector.get_num_new_matched_tokens = timed_match
        self._run(seed, tokens, forward)
        connector.get_num_new_matched_tokens = match
        known, found = answers[0]
        return Taken(known, self._noted[LoadDone][0] if found else known, found)

    def _run(self, seed: int, tokens: int, forward: Callable[[Mapping[str, int]], None]) -> None:
        request_id = self.add(prompt(seed, tokens, self._shape.model.vocab), 1)

        def watched(scheduled: Mapping[str, int]) -> None:
            if request_id in scheduled:
                (self._table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            forward(scheduled)

        deadline = time.monotonic() + LIMIT_S
        while request_id in self.scheduler.requests:
            if time.monotonic() > deadline:
                raise late(LIMIT_S)
            self.step(watched)
