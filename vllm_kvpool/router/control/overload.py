"""Locks of full decoders, and refusals of requests at their arrival (pure).

`Overload` locks act on hand-overs, `Shedder` refuses requests that would wait too long. What counts
as used of a decoder is the greater of what the engine says and what the router has committed: the
one is late, the other does not know what the engine keeps.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import msgspec

from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.control.requests import QUEUED_PATHS, Request
from vllm_kvpool.router.control.settings import OverloadConfig
from vllm_kvpool.router.control.states import ReplicaId

MEAN_RULE_FROM = 3  # replicas
LOCK_AT, LOCK_HYSTERESIS = 0.98, 0.05
LOCK_MEAN, RELEASE_MEAN = 2.0, 1.6  # times the mean
LOCK_SHARE, RELEASE_SHARE = 0.5, 0.4  # of the capacity, for the mean's rule
MIN_HOLD_S = 1.0  # of a lock
SWAP_MARGIN = 0.05  # of the capacity: how much emptier the next last open one must be


class BlockLoad(NamedTuple):
    """Blocks of one decode replica."""

    used: int
    capacity: int  # positive

    @property
    def share(self) -> float:
        """Used blocks as a share of the capacity, 1.0 if full."""
        return self.used / self.capacity


class LockReason(Enum):
    """A reason for which a decoder is full: it is locked then, unless it is its group's last."""

    WATERMARK = "over the watermark"
    MEAN = "over twice the mean"


class _Full(NamedTuple):
    """The lock of a full replica."""

    why: LockReason
    since: float


class Overload:
    """The locks of all decode replicas. Full replicas are locked, but never the last of a group.

    A replica is full by one of two rules, and stays so for MIN_HOLD_S at least.

    - Watermark: full from 0.98 of its capacity in use, calm again from 0.93 down.
    - Mean: full above twice the mean of its group and half of its capacity. Calm again from 1.6
      times the mean, or 0.4 of its capacity, down.

    The mean counts from three replicas on: of two, neither can hold more than twice the mean. The
    watermark lies above the share up to which decoders are filled (`headroom`, 0.95): below it,
    ordinary work would lock the decoders of a busy deployment in turn (a tenth of the throughput).
    When all replicas are full, the replica with the smallest share in use stays open. Another
    replica takes its place once that is clearly emptier.
    """

    def __init__(self, lock_at: float = LOCK_AT) -> None:
        self._lock_at = lock_at
        self._full: dict[ReplicaId, _Full] = {}
        self.locked: frozenset[ReplicaId] = frozenset()
        """Decoders that get nothing new until they have less to do."""

    @property
    def full(self) -> Collection[ReplicaId]:
        """The full decoders, locked or not."""
        return self._full.keys()

    def why(self, replica: ReplicaId) -> LockReason | None:
        """Return why a replica is locked; None if it is not."""
        return self._full[replica].why if replica in self.locked else None

    def step(self, now: float, *groups: Mapping[ReplicaId, BlockLoad]) -> Set[ReplicaId]:
        """Lock by the loads of all decode replicas there are; those whose lock has changed.

        Replicas of different groups cannot take each other's work.
        """
        full: dict[ReplicaId, _Full] = {}
        still_open: set[ReplicaId] = set()  # full, and open all the same: one a group
        for loads in groups:
            mean = math.inf
            if len(loads) >= MEAN_RULE_FROM:
                mean = sum([used for used, _ in loads.values()]) / len(loads)
            fewer = len(full)
            # Of hundreds of replicas, ten times a second: most are neither full nor were.
            share_from = min(LOCK_SHARE, self._lock_at)
            for replica, load in loads.items():
                used, capacity = load
                if used < share_from * capacity and replica not in self._full:
                    continue
                one = self._fullness(now, self._full.get(replica), load, mean)
                if one is not None:
                    full[replica] = one
            if loads and len(full) - fewer == len(loads):
                still_open.add(self._last_open(loads))
        self._full = full
        before, self.locked = self.locked, frozenset(full) - still_open
        return before ^ self.locked

    def _fullness(
        self, now: float, was: _Full | None, load: BlockLoad, mean: float
    ) -> _Full | None:
        lock_at = self._lock_at

        def is_over_mean(times: float, share: float) -> bool:
            return load.used > times * mean and load.share > share

        if load.share >= lock_at:
            why = LockReason.WATERMARK
        elif is_over_mean(LOCK_MEAN, LOCK_SHARE):
            why = LockReason.MEAN
        elif was is None:
            return None
        else:
            why = was.why
            if why is LockReason.WATERMARK:
                is_calm = load.share <= lock_at - LOCK_HYSTERESIS
            else:
                is_calm = not is_over_mean(RELEASE_MEAN, RELEASE_SHARE)
            if is_calm and now - was.since >= MIN_HOLD_S:
                return None
        return _Full(why, was.since if was is not None else now)

    def _last_open(self, loads: Mapping[ReplicaId, BlockLoad]) -> ReplicaId:
        """Return the decoder that stays open where all are full."""

        def emptiest(replicas: Iterable[ReplicaId]) -> ReplicaId:
            return min(replicas, key=lambda replica: (loads[replica].share, replica))

        # One that is open already, unless that is clearly fuller: else equals would take turns.
        current = emptiest(set(loads) - self.locked or loads)
        best = emptiest(loads)
        gap = loads[current].share - loads[best].share
        return best if gap > SWAP_MARGIN else current


ALL_UNTIL = 0.5  # of the wait that is allowed
LEAST_BUDGET = 0.25  # of the target, however long the hand-over takes
OVERDUE = 2.0  # times the target: who still waits then was let in by mistake
TOO_MANY_REQUESTS, UNAVAILABLE = 429, 503  # HTTP
TINY = 1e-9  # requests by second
BURST_CREDIT = 64.0
RESERVE = 0.2  # of queue and wait, kept from normal requests; twice that from those below
MAX_RETRY_AFTER_S = 60
ROUNDING = 1e-9  # of a credit: ten tenths are one


class Pressure(msgspec.Struct, frozen=True, gc=False):
    """The load that a request meets: what waits, who serves, at which rates."""

    queued_requests: float
    queued_tokens: float  # to be computed before it: in the router's queue and on replicas
    prefill_replicas: int  # serving; without any, decode replicas compute prompts
    decode_replicas: int  # serving, locked ones too
    reserved_tokens: float  # for requests let in that no decode replica has yet
    room_tokens: float  # of open decode replicas, up to `headroom`
    committed_tokens: float  # of requests on decode replicas
    committed_requests: int
    is_saturated: bool  # every decode replica is full
    rates: Rates
    now: float = 0.0  # on the controller's clock
    model: str = ""  # that these are of; empty: any
    starting_requests: int = 0  # on decode replicas, without a token yet
    starts_per_s: float = math.inf  # of all decode replicas, while requests wait for them
    is_waiting_for_decoder: bool = False  # some wait for one, or in its engine


class RejectionReason(Enum):
    """A reason for which a request is refused."""

    QUEUE_FULL = "too many requests wait"
    PREFILL_WAIT = "prompts would wait too long to be computed"
    DECODE_WAIT = "decode replicas are full"
    START_WAIT = "requests would wait too long for a decode replica"
    DEADLINE = "its deadline cannot be met"
    NO_REPLICA = "no decode replica serves"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A refusal: its HTTP status, and the seconds after which to try again."""

    status: int  # 429: ask less often; 503: nothing can take it
    retry_after_s: int  # 1 or more
    reason: RejectionReason
    numbers: str = ""  # what was estimated, and which limit it passes

    @property
    def why(self) -> str:
        """The reason, with the measured number and its limit, for clients and the log."""
        return f"{self.reason.value}: {self.numbers}" if self.numbers else self.reason.value


class Shedder:
    """Lets requests in or not. The pressure must count every request as soon as it is let in.

    The longest of three waits counts.

    - Prefill wait: queued tokens / (prefill replicas * prefill rate).
    - Decode wait: (reserved tokens + the request's own - room) / tokens freed by second.
      Tokens freed by second: committed tokens / (tokens of an answer * time of a step).
    - Start wait, if requests wait for decoders: (waiting + starting requests) / starts by second.

    A rate that is only assumed counts as infinite. The time of a step is taken for the requests
    that are decoded now: when blocks are short, these are a full batch.

    The budget of a wait is `ttft_target_s` less the hand-over. Up to half of the budget all
    requests are admitted, from all of it on none. Between the two, the admitted share falls evenly:
    each request adds that share to a credit, and is admitted when the credit is full. So a steady
    overload sheds steadily. While all requests are admitted, credit is saved, up to BURST_CREDIT: a
    burst after a calm is admitted whole, as long as the wait stays within the budget. A request
    that still waits at twice the target is refused after all.

    Requests below normal priority are refused earlier. Requests above it may use a reserve, and all
    of them are admitted as long as any others are. As in vLLM the lower number comes first.
    """

    def __init__(self, config: OverloadConfig) -> None:
        self._config = config
        self._credit: dict[float, float] = {}  # by allowance, of which there are three
        self._refused = 0

    def decide(self, pressure: Pressure, request: Request) -> Rejection | None:
        """Return why a request is refused; None if it is admitted."""
        config, rates, ask = self._config, pressure.rates, request.ask
        if not pressure.decode_replicas:
            numbers = ""
            if pressure.model:
                num_prefill = pressure.prefill_replicas
                numbers = f"{pressure.model} has {num_prefill} prefill and no decode replicas"
            later_s = float(MAX_RETRY_AFTER_S)
            return self._refuse(UNAVAILABLE, later_s, RejectionReason.NO_REPLICA, numbers)
        prefill_s = prefill_wait_s(pressure) if request.path in QUEUED_PATHS else 0.0
        decode_s = decode_wait_s(pressure, request.tokens)
        start_s = start_wait_s(pressure)
        wait_s = max(prefill_s, decode_s, start_s)
        allowance, all_until = self._allowance(ask.priority)
        handoff_s = rates.handoff_s(ask.prompt_tokens)
        budget_s = max(config.ttft_target_s - handoff_s, LEAST_BUDGET * config.ttft_target_s)
        most_s, all_s = allowance * budget_s, all_until * budget_s
        later_s = wait_s - all_s  # then all would be let in again
        if pressure.queued_requests >= allowance * config.max_queue:
            most = f"{allowance * config.max_queue:.0f} of overload.max_queue may"
            numbers = f"{pressure.queued_requests:.0f} requests wait, {most}"
            later_s = max(later_s, prefill_s / 2)
            return self._refuse(TOO_MANY_REQUESTS, later_s, RejectionReason.QUEUE_FULL, numbers)
        if ask.deadline < math.inf:
            left_s = ask.deadline - pressure.now
            own_s = request.uncached / prefill_speed(pressure, replicas=1) + handoff_s
            late_s = wait_s + own_s - left_s
            if late_s > 0.0:
                numbers = (
                    f"estimated wait {wait_s:.1f} s and prefill {own_s:.1f} s, "
                    f"{left_s:.1f} s are left of front.max_wait_s"
                )
                # A request that is late without any wait gains nothing by coming again later.
                is_late_alone = own_s > left_s
                status = UNAVAILABLE if is_late_alone else TOO_MANY_REQUESTS
                later_s = 1.0 if is_late_alone else late_s
                return self._refuse(status, later_s, RejectionReason.DEADLINE, numbers)
        if self._admits(allowance, (most_s - wait_s) / (most_s - all_s)):
            return None
        numbers = (
            f"estimated wait {wait_s:.1f} s, {most_s:.1f} s are left "
            f"of overload.ttft_target_s={config.ttft_target_s:g}"
        )
        if decode_s == wait_s or pressure.is_saturated:
            return self._refuse(UNAVAILABLE, later_s, RejectionReason.DECODE_WAIT, numbers)
        reason = RejectionReason.START_WAIT if start_s == wait_s else RejectionReason.PREFILL_WAIT
        return self._refuse(TOO_MANY_REQUESTS, later_s, reason, numbers)

    def _allowance(self, priority: int) -> tuple[float, float]:
        """Return shares of the budget: up to which any are let in, and up to which all are."""
        if priority < 0:
            return 1.0, 1.0 - RESERVE  # all, as long as any of the rest are
        most = 1.0 - (2 if priority else 1) * RESERVE
        return most, ALL_UNTIL * most

    def _admits(self, allowance: float, share: float) -> bool:
        credit = self._credit.get(allowance, 0.0)
        if share >= 1.0:
            self._credit[allowance] = min(credit + 1.0, max(credit, BURST_CREDIT))
            return True
        if share <= 0.0:
            return False
        credit += share
        is_in = credit >= 1.0 - ROUNDING
        self._credit[allowance] = credit - 1.0 if is_in else credit
        return is_in

    def _refuse(
        self, status: int, later_s: float, reason: RejectionReason, numbers: str = ""
    ) -> Rejection:
        """Refuse a request. The pause varies up to twice, so that refused requests return apart."""
        self._refused += 1
        least_s = math.ceil(min(max(later_s, 1.0), MAX_RETRY_AFTER_S))
        retry_after_s = min(least_s + self._refused % (least_s + 1), MAX_RETRY_AFTER_S)
        return Rejection(status, retry_after_s, reason, numbers)


def prefill_speed(pressure: Pressure, replicas: int | None = None) -> float:
    """Return the prompt tokens by second, of all replicas or of so many.

    The result is infinite while nothing is measured.
    """
    rates = pressure.rates
    if not pressure.prefill_replicas:
        if "local_prefill_s_per_token" in rates.unmeasured:
            return math.inf
        return (replicas or pressure.decode_replicas) / rates.local_prefill_s_per_token
    if "prefill_tokens_per_s" in rates.unmeasured:
        return math.inf
    return (replicas or pressure.prefill_replicas) * rates.prefill_tokens_per_s


def prefill_wait_s(pressure: Pressure) -> float:
    """Return the seconds until what is queued is computed."""
    return pressure.queued_tokens / prefill_speed(pressure)


def start_wait_s(pressure: Pressure) -> float:
    """Return the seconds until decode replicas have started what is before a request.

    The result is 0 if none waits.
    """
    if not pressure.is_waiting_for_decoder:
        return 0.0
    before = pressure.queued_requests + pressure.starting_requests
    return before / max(pressure.starts_per_s, TINY)


def decode_wait_s(pressure: Pressure, tokens: int) -> float:
    """Return the seconds until so many tokens have room; infinite if no room is freed."""
    rates = pressure.rates
    short = pressure.reserved_tokens + tokens - pressure.room_tokens
    if short <= 0 or "step_base_s" in rates.unmeasured:
        return 0.0
    if not pressure.committed_requests:
        # Nothing will be freed; but who has nothing takes whatever is next, however large.
        return math.inf if pressure.queued_requests else 0.0
    step_s = rates.step_s(pressure.committed_requests / pressure.decode_replicas)
    answer_s = max(1.0, rates.output_tokens_per_request) * step_s
    return short * answer_s / pressure.committed_tokens if pressure.committed_tokens else math.inf
