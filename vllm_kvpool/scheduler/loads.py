"""Loads in the scheduler part: whether one pays, and those in progress.

A request runs in the step in which its layered load begins: vLLM counts its blocks as computed and
offers them to other requests. Until every rank has reported the load as whole, the request is not
saved. A request that would read its blocks is not scheduled (`RequestLoads.would_share`). If a
load fails, its blocks leave the prefix cache and the request computes them again.
Scheduler's thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.messages import Loaded
from vllm_kvpool.transfer.ops import Landed, LoadPlan

WEIGHT = 0.3
MIN_PREFILL_TOKENS = 64
MAX_STEP_S = 30.0
RETRY_EVERY = 16
IDLE_WAIT_MIN_S = 0.001
IDLE_WAIT_MAX_S = 0.01
IDLE_WAIT_SHARE = 0.1


def idle_wait_s(waited_s: float) -> float:
    """Return the seconds that an engine with nothing to compute may wait in a step.

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
        """Begin a step; the time since the one before gives that one's rate."""
        if self._last_step is not None:
            began, tokens = self._last_step
            if tokens >= MIN_PREFILL_TOKENS and 0 < now - began < MAX_STEP_S:
                self._compute = _mean(self._compute, tokens / (now - began))
        self._last_step = (now, sum(scheduled.values())) if scheduled else None

    def loaded(self, tokens: float, seconds: float) -> None:
        """Count a load that has ended."""
        if seconds > 0 and tokens > 0:
            self._load = _mean(self._load, tokens / seconds)

    def drafts_loaded(self, tokens: int, missing: int) -> None:
        """Count a load of `tokens` that has ended; `missing` of them lack the drafter's KV."""
        if tokens > 0:
            self._missing = _mean(self._missing, missing / tokens)

    def answered(self, tokens: int, seconds: float, *, has_drafts: bool) -> None:
        """Count an answer that has ended; `has_drafts`: the drafter had all KV of its prompt."""
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
class RequestLoad:
    """A load, from the allocation of its blocks until every rank has reported its end.

    A load streams while the producer of its last chunks has not stored them.
    """

    plan: LoadPlan
    end: Loaded
    """The end in the ranks that have reported: a whole load as long as none has."""
    num_blocks: int
    landed_stop: int | None = None
    """Chunks before it are stored, as far as the workers know; None: the load does not stream."""
    tokens: Sequence[int] = ()
    table: tuple[int, ...] = ()
    """The request's only block table. Both it and `tokens` are empty unless the load is layered."""

    @property
    def is_whole(self) -> bool:
        """True if no rank has reported a token that is not loaded."""
        return self.end.tokens == self.plan.token_stop

    def lost_blocks(self, block_size: int) -> tuple[int, ...]:
        """Return the blocks of tokens that were not loaded, or were computed after them."""
        return () if self.is_whole else self.table[self.end.tokens // block_size :]


class RequestLoads:
    """The loads in progress, by request, and what the next plan tells the workers of them."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry
        self._loads: dict[str, RequestLoad] = {}
        self._unplanned: list[LoadPlan] = []
        self._landed: list[Landed] = []

    def start(self, load: RequestLoad) -> None:
        """Add a load whose blocks are allocated."""
        self._loads[load.plan.request_id] = load
        self._unplanned.append(load.plan)
        if load.landed_stop is not None:
            self._show_promised()

    def get(self, request_id: str) -> RequestLoad | None:
        """Return the request's load in progress, if any."""
        return self._loads.get(request_id)

    def is_layered(self, request_id: str) -> bool:
        """Return True if the request runs in the step that loads it."""
        load = self._loads.get(request_id)
        return load is not None and load.plan.layered

    def pop(self, request_id: str) -> None:
        """Remove a load that has ended, or whose request has."""
        if self._loads.pop(request_id).landed_stop is not None:
            self._show_promised()

    def pop_layered(self) -> list[RequestLoad]:
        """Remove and return the loads of the step, which has ended."""
        layered = [load for load in self._loads.values() if load.plan.layered]
        for load in layered:
            del self._loads[load.plan.request_id]
        return layered

    def would_share(
        self, tokens: Callable[[], Sequence[int]], computed: int, block_size: int
    ) -> bool:
        """Return True if a request may read blocks that a layered load is about to fill.

        `computed`: its tokens in the engine's own cache. Only tokens are compared, so the answer
        may be True too often.
        """
        for load in self._loads.values():
            start = load.plan.token_start
            stop = start + block_size
            if load.plan.layered and computed > start and tokens()[:stop] == load.tokens[:stop]:
                return True
        return False

    # Streams

    @property
    def streaming(self) -> list[RequestLoad]:
        """The loads that stream."""
        return [load for load in self._loads.values() if load.landed_stop is not None]

    @property
    def num_stored(self) -> int:
        """Loads that do not stream: all of their chunks are stored."""
        return len(self._loads) - len(self.streaming)

    @property
    def num_promised(self) -> int:
        """Blocks of loads that stream."""
        return sum(load.num_blocks for load in self.streaming)

    def land(
        self, load: RequestLoad, chunks: int, is_final: bool, *, is_urgent: bool = False
    ) -> None:
        """Tell the workers how many chunks of a load that streams are stored."""
        assert load.landed_stop is not None
        load.landed_stop = max(load.landed_stop, chunks)
        self._landed.append(Landed(load.plan.job_id, load.landed_stop, is_final, is_urgent))
        if is_final:
            load.landed_stop = None
            self._show_promised()

    def _show_promised(self) -> None:
        self._registry.set("kvpool_promised_blocks", self.num_promised)

    # The plan of a step

    @property
    def has_news(self) -> bool:
        """True if the next plan tells the workers of loads."""
        return bool(self._unplanned or self._landed)

    def take_news(self) -> tuple[tuple[LoadPlan, ...], tuple[Landed, ...]]:
        """Remove and return the loads and the progress that no plan has told the workers of."""
        news = tuple(self._unplanned), tuple(self._landed)
        self._unplanned.clear()
        self._landed.clear()
        return news
