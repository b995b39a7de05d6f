"""Load shedding: admission of single requests, and under twice the sustainable load."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_kvpool.router.control.overload import (
    MAX_RETRY_AFTER_S,
    Pressure,
    Rejection,
    RejectionReason,
    Shedder,
    decode_wait_s,
    prefill_wait_s,
    start_wait_s,
)
from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.control.requests import Request, RequestId, RequestSpec
from vllm_kvpool.router.control.settings import OverloadConfig

RATES = Rates(
    prefill_tokens_per_s=10_000.0,
    step_base_s=1 / 300,  # 3 replicas with 10 requests: 3000 tokens/s
    handoff_overhead_s=0.5,
    handoff_s_per_token=0.0005,
    local_prefill_s_per_token=0.0002,
    output_tokens_per_request=100.0,
)
CALM = Pressure(
    queued_requests=0,
    queued_tokens=0.0,
    prefill_replicas=2,
    decode_replicas=3,
    reserved_tokens=0.0,
    room_tokens=16_000.0,
    committed_tokens=12_800.0,
    committed_requests=10,
    is_saturated=False,
    rates=RATES,
)
# The hand-over takes 0.5 s + 1000 * 0.5 ms = 1 s: 4 s are left, of which normal requests may use
# 0.8. Up to 1.6 s all are let in, at 3.2 s none, at 2.4 s every second.
LIMITS = OverloadConfig(ttft_target_s=5.0, max_queue=100)


def asking(
    prompt_tokens: int = 1000,
    uncached: int = 1000,
    tokens: int = 1280,
    priority: int = 0,
    deadline_s: float | None = None,
) -> Request:
    """A request that has just arrived, at the time 0."""
    ask = RequestSpec(
        request_id=RequestId("r"),
        prompt_tokens=prompt_tokens,
        max_output_tokens=tokens,
        priority=priority,
        deadline=math.inf if deadline_s is None else deadline_s,
    )
    return Request(ask, 0.0, 1, tokens, uncached=uncached)


ASK = asking()
EMPTY = {"room_tokens": 0.0, "committed_requests": 0}


def own_decode_wait_s(pressure: Pressure) -> float:
    return decode_wait_s(pressure, ASK.tokens)


def let_in(answers: Sequence[Rejection | None]) -> float:
    return sum(answer is None for answer in answers) / len(answers)


def answers(pressure: Pressure, ask: Request = ASK, times: int = 100) -> list[Rejection | None]:
    shedder = Shedder(LIMITS)
    return [shedder.decide(pressure, ask) for _ in range(times)]


def only(pressure: Pressure, ask: Request = ASK) -> Rejection | None:
    return answers(pressure, ask, times=1)[0]


WAITING = {"queued_requests": 6, "starts_per_s": 5.0, "is_waiting_for_decoder": True}


@pytest.mark.parametrize(
    ("wait_s", "given_load", "expected"),
    [
        (prefill_wait_s, {}, 0.0),
        (prefill_wait_s, {"queued_tokens": 30_000.0}, 1.5),  # by 2 * 10,000 tokens/s
        # Without prefill replicas three decode replicas compute 5,000 tokens/s each.
        (prefill_wait_s, {"queued_tokens": 30_000.0, "prefill_replicas": 0}, 2.0),
        (own_decode_wait_s, {}, 0.0),
        (own_decode_wait_s, {"reserved_tokens": 14_720.0}, 0.0),  # and its own 1,280: just the room
        # 3 * 1000 tokens/s end 30 requests of 1,280 tokens each second: 38,400 tokens/s.
        (own_decode_wait_s, {"reserved_tokens": 91_520.0}, 2.0),
        (own_decode_wait_s, {"room_tokens": 0.0}, 1280 / 38_400),
        # Nothing will end; but one that has nothing takes what is next, however large it is.
        (own_decode_wait_s, EMPTY, 0.0),
        (own_decode_wait_s, EMPTY | {"queued_requests": 1}, math.inf),
        (own_decode_wait_s, {"room_tokens": 0.0, "committed_tokens": 0.0}, math.inf),
        # No request waits for a decoder.
        (start_wait_s, WAITING | {"starting_requests": 4, "is_waiting_for_decoder": False}, 0.0),
        (start_wait_s, WAITING | {"starting_requests": 4}, 2.0),
        (start_wait_s, WAITING | {"starts_per_s": math.inf}, 0.0),
    ],
)
def test_wait_is_work_by_what_is_done_in_a_second(
    wait_s: Callable[[Pressure], float], given_load: dict[str, Any], expected: float
) -> None:
    assert wait_s(replace(CALM, **given_load)) == pytest.approx(expected)


def test_what_is_only_assumed_delays_nobody() -> None:
    rates = replace(RATES, unmeasured=frozenset({"prefill_tokens_per_s", "step_base_s"}))
    full = replace(CALM, queued_tokens=1e6, reserved_tokens=1e6, room_tokens=0.0, rates=rates)
    assert only(full) is None


def test_a_burst_after_a_calm_is_let_in_whole_while_the_wait_stays_in_bounds() -> None:
    shedder = Shedder(LIMITS)
    waiting = replace(CALM, queued_tokens=56_000.0)  # of four one would be let in
    for _ in range(60):
        assert shedder.decide(CALM, ASK) is None
    burst = [shedder.decide(waiting, ASK) for _ in range(160)]
    assert let_in(burst[:80]) == 1.0
    assert let_in(burst[80:]) == pytest.approx(0.25)
    for _ in range(60):
        shedder.decide(CALM, ASK)
    assert let_in([shedder.decide(replace(CALM, queued_tokens=64_000.0), ASK)]) == 0.0


def test_a_refusal_has_its_numbers() -> None:
    refused = only(replace(CALM, queued_tokens=1e6))
    assert isinstance(refused, Rejection)
    assert re.search(
        r"estimated wait 50.0 s, [\d.]+ s are left of overload.ttft_target_s=", refused.why
    )


@pytest.mark.parametrize(
    ("queued_tokens", "share"),
    [(0.0, 1.0), (32_000.0, 1.0), (40_000.0, 0.75), (48_000.0, 0.5), (64_000.0, 0.0), (1e9, 0.0)],
)
def test_the_longer_the_wait_the_fewer_are_let_in(queued_tokens: float, share: float) -> None:
    assert let_in(answers(replace(CALM, queued_tokens=queued_tokens))) == pytest.approx(share)


def test_those_let_in_are_spread_evenly() -> None:
    given_answers = answers(replace(CALM, queued_tokens=48_000.0), times=10)
    assert [answer is None for answer in given_answers] == [False, True] * 5


def test_a_long_hand_over_does_not_shut_an_idle_deployment() -> None:
    slow = replace(CALM, rates=replace(RATES, handoff_overhead_s=100.0))
    assert let_in(answers(slow)) == 1.0
    assert let_in(answers(replace(slow, queued_tokens=64_000.0))) == 0.0


@pytest.mark.parametrize(
    ("given_load", "status", "reason"),
    [
        ({"queued_tokens": 1e6}, 429, RejectionReason.PREFILL_WAIT),
        ({"queued_requests": 80}, 429, RejectionReason.QUEUE_FULL),
        ({"reserved_tokens": 1e5}, 503, RejectionReason.DECODE_WAIT),
        (WAITING | {"queued_requests": 50}, 429, RejectionReason.START_WAIT),
        ({"queued_tokens": 1e6, "is_saturated": True}, 503, RejectionReason.DECODE_WAIT),
        (EMPTY | {"queued_requests": 1}, 503, RejectionReason.DECODE_WAIT),
        ({"decode_replicas": 0}, 503, RejectionReason.NO_REPLICA),
    ],
)
def test_a_refusal_says_whether_to_ask_less_or_that_nothing_can_take_it(
    given_load: dict[str, Any], status: int, reason: RejectionReason
) -> None:
    answer = only(replace(CALM, **given_load))
    assert isinstance(answer, Rejection)
    assert (answer.status, answer.reason) == (status, reason)
    assert 1 <= answer.retry_after_s <= MAX_RETRY_AFTER_S


@pytest.mark.parametrize(
    ("deadline_s", "queued_tokens", "expected"),
    [
        (None, 30_000.0, None),
        (2.7, 30_000.0, None),  # 1.5 s of waiting, 0.1 s of its own, 1 s of hand-over
        (2.5, 30_000.0, (429, RejectionReason.DEADLINE)),
        (1.0, 0.0, (503, RejectionReason.DEADLINE)),  # not even when nothing waits
    ],
)
def test_what_would_miss_its_deadline_is_refused_at_once(
    deadline_s: float | None, queued_tokens: float, expected: tuple[int, RejectionReason] | None
) -> None:
    answer = only(replace(CALM, queued_tokens=queued_tokens), asking(deadline_s=deadline_s))
    if expected is None:
        assert answer is None
    else:
        assert isinstance(answer, Rejection)
        assert (answer.status, answer.reason) == expected


@pytest.mark.parametrize(
    ("priority", "most_wait_s", "most_queued"), [(-5, 4.0, 100), (0, 3.2, 80), (1, 2.4, 60)]
)
def test_a_reserve_is_kept_for_what_comes_first(
    priority: int, most_wait_s: float, most_queued: int
) -> None:
    ask = asking(priority=priority)
    below, above = (replace(CALM, queued_tokens=20_000 * most_wait_s * x) for x in (0.95, 1.0))
    assert 0.0 < let_in(answers(below, ask)) < 1.0
    assert let_in(answers(above, ask)) == 0.0
    assert let_in(answers(replace(CALM, queued_requests=most_queued - 1), ask)) == 1.0
    assert let_in(answers(replace(CALM, queued_requests=most_queued), ask)) == 0.0


def test_requests_that_find_the_queue_full_come_back_when_half_of_it_is_computed() -> None:
    """19.6 s of waiting are allowed to all; 20 s of prompts wait."""
    shedder = Shedder(OverloadConfig(ttft_target_s=50.0, max_queue=100))
    full = replace(CALM, queued_requests=80, queued_tokens=400_000.0)
    refused = [shedder.decide(full, ASK) for _ in range(20)]
    assert {each.reason for each in refused if each} == {RejectionReason.QUEUE_FULL}
    assert min(each.retry_after_s for each in refused if each) == 10


def test_those_refused_come_back_when_the_queue_is_shorter_and_not_all_at_once() -> None:
    # 20 s of waiting, of which 1.6 s may stay
    after = [
        answer.retry_after_s
        for answer in answers(replace(CALM, queued_tokens=400_000.0))
        if isinstance(answer, Rejection)
    ]
    assert min(after) == 19
    assert max(after) == 38
    assert len(set(after)) == 20


amounts = st.one_of(st.just(0.0), st.floats(0.0, 1e9))
pressures = st.builds(
    Pressure,
    st.integers(0, 200),
    amounts,
    st.integers(0, 4),
    st.integers(0, 4),
    amounts,
    amounts,
    amounts,
    st.integers(0, 100),
    st.booleans(),
    st.just(RATES),
)
asks = st.builds(
    asking,
    st.integers(1, 1_000_000),
    st.integers(0, 1_000_000),
    st.integers(16, 1_600_000),
    st.integers(-2, 2),
    st.one_of(st.none(), st.floats(0.0, 100.0)),
)


@given(st.lists(st.tuples(pressures, asks), max_size=30))
def test_every_answer_is_one_a_client_can_use(given_load: list[tuple[Pressure, Request]]) -> None:
    shedder = Shedder(LIMITS)
    for pressure, ask in given_load:
        answer = shedder.decide(pressure, ask)
        if isinstance(answer, Rejection):
            assert answer.status in (429, 503)
            assert 1 <= answer.retry_after_s <= MAX_RETRY_AFTER_S
        else:
            assert pressure.queued_requests < LIMITS.max_queue
            assert pressure.decode_replicas > 0


@given(pressures, asks, st.floats(0.0, 1e6))
def test_more_in_the_queue_lets_in_no_more(pressure: Pressure, ask: Request, more: float) -> None:
    longer = replace(pressure, queued_tokens=pressure.queued_tokens + more)
    assert let_in(answers(longer, ask, 40)) <= let_in(answers(pressure, ask, 40)) + 1e-9
