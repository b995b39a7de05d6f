"""What has come of the requests of a load (pure).

Latencies count from the moment at which a request was due, not from when it was sent: a load
generator that is late itself must not hide that.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from vllm_kvpool.router.load_trace import LoadSpec


class Outcome(Enum):
    """How a request has ended."""

    COMPLETED = "completed"
    SHED = "shed"  # 429 or 503: the server does not want more work
    FAILED = "failed"  # another status, or a stream that broke
    TIMED_OUT = "timed_out"
    UNFINISHED = "unfinished"  # the load ended before it
    NOT_SENT = "not_sent"  # too many were under way


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """One request. Times in seconds; `at_s` and `end_s` from the begin of the load."""

    at_s: float
    end_s: float
    outcome: Outcome
    prefix: int
    lag_s: float = 0.0
    """How late it was sent."""
    status: int = 0
    """Of HTTP; 0 without an answer."""
    ttft_s: float | None = None
    """Time to the first token."""
    gaps_s: tuple[float, ...] = ()
    """Between one piece of the answer and the next."""
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    why: str = ""


class ReplicaView(msgspec.Struct, frozen=True):
    """A replica as the router's admin API tells."""

    id: str
    url: str = ""
    state: str = ""
    role: str = ""
    locked: bool = False
    used_blocks: int = 0
    total_blocks: int = 0
    running: int = 0
    waiting: int = 0


class BacklogView(msgspec.Struct, frozen=True):
    """Requests that wait, and their tokens."""

    requests: int = 0
    tokens: int = 0


class WantedView(msgspec.Struct, frozen=True):
    """Replicas of one role."""

    wanted: int = 0


class PlanView(msgspec.Struct, frozen=True):
    """Replicas the planner wants, and why."""

    prefill: WantedView = WantedView()
    decode: WantedView = WantedView()
    why: str = ""


class RouterView(msgspec.Struct, frozen=True):
    """The answer of `GET /state`. What it has beyond this is not read."""

    now: float = 0.0
    replicas: tuple[ReplicaView, ...] = ()
    queue: BacklogView = BacklogView()
    migration: BacklogView = BacklogView()
    plan: PlanView | None = None


@dataclass(frozen=True, slots=True)
class StateSample:
    """The router at one moment of the load."""

    at_s: float
    router: RouterView


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A load, or a part of it, in numbers. None where there is nothing to count."""

    requests: int
    outcomes: dict[str, int]
    seconds: float
    completed_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    lag_p99_s: float | None
    shed_p99_s: float | None
    """How long it takes to be told that there is no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """All that a load has brought."""

    spec: LoadSpec
    url: str
    model: str
    began_at: float
    """Seconds since 1970."""
    seconds: float
    """Until its last request had ended."""
    requests: tuple[RequestResult, ...]
    states: tuple[StateSample, ...] = ()

    def summary(self) -> Summary:
        """Rates are over the time in which requests were sent or answered."""
        return summarize(self.requests, self.seconds)


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The smallest value that so many percent do not exceed; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(math.ceil(percent / 100 * len(ordered)), 1) - 1]


def summarize(results: Sequence[RequestResult], seconds: float) -> Summary:
    """The numbers of these requests, with rates over so many seconds."""
    completed = [result for result in results if result.outcome is Outcome.COMPLETED]
    ttfts = [result.ttft_s for result in completed if result.ttft_s is not None]
    gaps = [gap for result in completed for gap in result.gaps_s]
    lags = [result.lag_s for result in results]
    shed = [r.end_s - r.at_s for r in results if r.outcome is Outcome.SHED]
    return Summary(
        requests=len(results),
        outcomes={o.value: sum(r.outcome is o for r in results) for o in Outcome},
        seconds=seconds,
        completed_per_s=len(completed) / seconds,
        output_tokens_per_s=sum(result.output_tokens for result in results) / seconds,
        prompt_tokens=sum(result.prompt_tokens for result in results),
        cached_tokens=sum(result.cached_tokens for result in results),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        gap_p50_s=percentile(gaps, 50),
        gap_p99_s=percentile(gaps, 99),
        lag_p99_s=percentile(lags, 99),
        shed_p99_s=percentile(shed, 99),
    )


def ended_since(results: Sequence[RequestResult], begin_s: float) -> list[RequestResult]:
    """Those that ended at `begin_s` or later, of results in the order of their ends."""
    for place in range(len(results) - 1, -1, -1):
        if results[place].end_s < begin_s:
            return list(results[place + 1 :])
    return list(results)


def per_second(results: Sequence[RequestResult], outcome: Outcome, seconds: float) -> list[int]:
    """How many ended so in each second of the load."""
    counts = [0] * max(math.ceil(seconds), 1)
    for result in results:
        if result.outcome is outcome:
            counts[min(int(result.end_s), len(counts) - 1)] += 1
    return counts


def ttft_by_window(
    results: Sequence[RequestResult], seconds: float, window_s: float, percent: float
) -> list[tuple[float, float]]:
    """Middle of each window of arrivals, and the percentile in it; empty windows are left out."""
    points = []
    for number in range(max(math.ceil(seconds / window_s), 1)):
        begin_s = number * window_s
        values = [
            result.ttft_s
            for result in results
            if result.ttft_s is not None and begin_s <= result.at_s < begin_s + window_s
        ]
        value = percentile(values, percent)
        if value is not None:
            points.append((begin_s + window_s / 2, value))
    return points
