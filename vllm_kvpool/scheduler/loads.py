"""Loads on the scheduler's side: whether one pays, and those within a single step (pure).

A request runs in the step in which its layered load begins: vLLM counts its blocks as computed and
offers them to other requests. Until every rank has reported the load as whole nothing of the
request is saved, and no other that would read its blocks is scheduled (`LayeredLoads.would_share`).
If a load fails, its blocks leave the prefix cache and the request computes them again.
Scheduler's thread.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

WEIGHT = 0.3
MIN_PREFILL_TOKENS = 64
MAX_STEP_S = 30.0
RETRY_EVERY = 16
IDLE_WAIT_MIN_S = 0.001
IDLE_WAIT_MAX_S = 0.01
IDLE_WAIT_SHARE = 0.1


def idle_wait_s(waited_s: float) -> float:
    """Seconds that an engine with nothing to compute may wait in a step.

    Grows with the time waited so far: a request that arrives meanwhile is held up.
    """
    return min(IDLE_WAIT_MAX_S, max(IDLE_WAIT_MIN_S, waited_s * IDLE_WAIT_SHARE))


class LoadCostModel:
    """Measured rates of computing and loading (`load_policy: auto`). Scheduler's thread.

    A load that finds no KV of the drafter costs speculation as well: the longer time of an answer
    behind such a load, times the share of loaded tokens that lack it.
    """

    def __init__(self) -> None:
        self._missing = 0.0  # share of loaded tokens without the drafter's KV
        self._answer_tokens: float | None = None
        self._token_s: dict[bool, float | None] = {True: None, False: None}
        self._compute: float | None = None
        self._load: float | None = None
        self._last_step: tuple[float, int] | None = None
        self._refused = 0

    def step_planned(self, now: float, scheduled: Mapping[str, int]) -> None:
        """A step begins; the time since the one before gives that one's rate."""
        if self._last_step is not None:
            began, tokens = self._last_step
            if tokens >= MIN_PREFILL_TOKENS and 0 < now - began < MAX_STEP_S:
                self._compute = _mean(self._compute, tokens / (now - began))
        self._last_step = (now, sum(scheduled.values())) if scheduled else None

    def loaded(self, tokens: float, seconds: float) -> None:
        """A load has ended."""
        if seconds > 0 and tokens > 0:
            self._load = _mean(self._load, tokens / seconds)

    def drafts_loaded(self, tokens: int, missing: int) -> None:
        """A load of so many tokens has ended; `missing` of them lack the drafter's KV."""
        if tokens > 0:
            self._missing = _mean(self._missing, missing / tokens)

    def answered(self, tokens: int, seconds: float, *, has_drafts: bool) -> None:
        """An answer has ended; `has_drafts`: the drafter had all KV of its prompt."""
        if tokens > 0 and seconds > 0:
            self._answer_tokens = _mean(self._answer_tokens, tokens)
            self._token_s[has_drafts] = _mean(self._token_s[has_drafts], seconds / tokens)

    @property
    def _lost_speculation_s(self) -> float:
        """Seconds by which a load delays the end of an answer, as far as is known."""
        with_drafts, without = self._token_s[True], self._token_s[False]
        if self._answer_tokens is None or with_drafts is None or without is None:
            return 0.0
        return self._missing * self._answer_tokens * max(0.0, without - with_drafts)

    def loading_beats_computing(self, tokens: int) -> bool:
        """Return True if loading pays. Every `RETRY_EVERY`th answer is True, to measure anew."""
        if tokens <= 0 or self._compute is None or self._load is None:
            return True
        if tokens / self._load + self._lost_speculation_s <= tokens / self._compute:
            return True
        self._refused += 1
        return self._refused % RETRY_EVERY == 0


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)


@dataclass(slots=True)
class LayeredLoad:
    """A load of tokens [start, stop) into the request's only block table."""

    request_id: str
    tokens: Sequence[int]
    table: tuple[int, ...]
    start: int
    stop: int
    kept: int  # tokens that every rank has loaded

    def lost_blocks(self, block_size: int) -> tuple[int, ...]:
        """The blocks of tokens that were not loaded, or were computed after them."""
        return self.table[self.kept // block_size :] if self.kept < self.stop else ()


class LayeredLoads:
    """The layered loads of a step, from their allocation to the end of the step."""

    def __init__(self) -> None:
        self._loads: dict[str, LayeredLoad] = {}

    def begin(
        self, request_id: str, tokens: Sequence[int], table: Sequence[int], start: int, stop: int
    ) -> None:
        """Blocks are allocated; `table` has all of the request's."""
        load = LayeredLoad(request_id, tokens, tuple(table), start, stop, stop)
        self._loads[request_id] = load

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    def would_share(
        self, tokens: Callable[[], Sequence[int]], computed: int, block_size: int
    ) -> bool:
        """Return True if a request may read blocks that are being loaded.

        `computed`: its tokens in the engine's own cache. Only tokens are compared, so the answer
        may be True too often.
        """
        for load in self._loads.values():
            stop = load.start + block_size
            if computed > load.start and tokens()[:stop] == load.tokens[:stop]:
                return True
        return False

    def stopped(self, request_id: str, tokens: int) -> None:
        """A rank has loaded only the first `tokens` tokens of the request."""
        load = self._loads.get(request_id)
        if load is not None:
            load.kept = max(load.start, min(load.kept, tokens))

    def take(self) -> Collection[LayeredLoad]:
        """The loads of the step, which has ended; every rank has reported."""
        if not self._loads:
            return ()
        loads, self._loads = self._loads, {}
        return loads.values()
