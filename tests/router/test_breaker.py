"""When a replica that keeps failing is left alone."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.lifecycle import (
    BREAKER_EDGES,
    BreakerEvent,
    BreakerLimits,
    BreakerState,
    ReplicaBreaker,
)

LIMITS = BreakerLimits(
    failures=3,
    window_s=30.0,
    first_quarantine_s=5.0,
    longest_quarantine_s=60.0,
    jitter=0.1,
    probation_s=10.0,
)


def flapping(at: float = 0.0) -> ReplicaBreaker:
    """In its first quarantine, since `at`."""
    breaker = ReplicaBreaker(LIMITS)
    for _ in range(LIMITS.failures):
        breaker.failed(at)
    return breaker


def test_so_many_failures_within_the_window_are_too_many() -> None:
    breaker = ReplicaBreaker(LIMITS)
    assert [breaker.failed(now) for now in (0.0, 15.0, 29.9)] == [
        *(BreakerState.CLOSED, BreakerState.CLOSED, BreakerState.OPEN)
    ]
    assert breaker.until == 34.9


def test_failures_that_have_left_the_window_do_not_count() -> None:
    breaker = ReplicaBreaker(LIMITS)
    assert {breaker.failed(16.0 * number) for number in range(100)} == {BreakerState.CLOSED}


def test_successes_between_failures_do_not_hide_that_it_flaps() -> None:
    breaker = ReplicaBreaker(LIMITS)
    for now in (1.0, 2.0):
        breaker.failed(now)
        assert breaker.succeeded(now) is BreakerState.CLOSED
    assert breaker.failed(3.0) is BreakerState.OPEN


def test_quarantine_ends_in_probation() -> None:
    breaker = flapping()
    assert breaker.state(4.9) is BreakerState.OPEN
    assert breaker.state(5.0) is BreakerState.HALF_OPEN


def test_what_comes_late_changes_nothing() -> None:
    breaker = flapping()
    assert breaker.failed(4.0) is BreakerState.OPEN
    assert breaker.succeeded(4.5) is BreakerState.OPEN
    assert breaker.until == 5.0
    assert breaker.rounds == 1


def test_one_failure_on_probation_is_enough_and_each_round_is_longer_up_to_a_bound() -> None:
    breaker, pauses = flapping(), []
    for _ in range(100):
        now = breaker.until
        assert breaker.state(now) is BreakerState.HALF_OPEN
        assert breaker.failed(now) is BreakerState.OPEN
        pauses.append(breaker.until - now)
    assert pauses[:5] == [10.0, 20.0, 40.0, 60.0, 60.0]
    assert set(pauses[3:]) == {60.0}


def test_a_success_at_the_end_of_probation_forgets_all_rounds() -> None:
    breaker = flapping()
    assert breaker.succeeded(6.0) is BreakerState.HALF_OPEN  # begun when it was asked, at 6
    assert breaker.succeeded(15.9) is BreakerState.HALF_OPEN
    assert breaker.succeeded(16.0) is BreakerState.CLOSED
    assert [breaker.failed(20.0) for _ in range(3)][-1] is BreakerState.OPEN
    assert breaker.until == 25.0


def test_jitter_takes_off_a_share_of_the_time_and_is_told_the_round() -> None:
    breaker = ReplicaBreaker(LIMITS, jitter=lambda number: [1.0, 0.5][number])
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.until == pytest.approx(4.5)
    breaker.failed(100.0)
    assert breaker.until == pytest.approx(109.5)


def test_the_table_has_no_way_out_of_quarantine_but_time() -> None:
    assert {event for (state, event), to in BREAKER_EDGES.items() if state is not to} == {
        *(
            BreakerEvent.FAILED,
            BreakerEvent.FAILED_TOO_OFTEN,
            BreakerEvent.PROVED,
            BreakerEvent.TIME_UP,
        )
    }
    ways = {
        event
        for (state, event), to in BREAKER_EDGES.items()
        if state is BreakerState.OPEN is not to
    }
    assert ways == {BreakerEvent.TIME_UP}


@pytest.mark.parametrize(
    "wrong",
    [
        {"failures": 0},
        {"first_quarantine_s": 0.0},
        {"first_quarantine_s": 9.0, "longest_quarantine_s": 8.0},
    ],
)
def test_limits_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        BreakerLimits(**wrong)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.floats(0.0, 40.0), st.sampled_from(["failed", "ok", "ask"]))),
    st.floats(0.0, 1.0),
)
def test_any_history_keeps_to_the_table_and_ends_closed(
    history: list[tuple[float, str]], share: float
) -> None:
    breaker, now, seen = ReplicaBreaker(LIMITS, jitter=lambda _: share), 0.0, [BreakerState.CLOSED]
    for pause_s, what in history:
        now += pause_s
        seen.append(breaker.state(now))
        if what == "failed":
            seen.append(breaker.failed(now))
        elif what == "ok":
            seen.append(breaker.succeeded(now))
        if seen[-1] is BreakerState.OPEN:
            assert 0.0 < breaker.until - now <= LIMITS.longest_quarantine_s
        assert len(breaker._failed_at) < LIMITS.failures
    steps = {(one, to) for (one, _), to in BREAKER_EDGES.items()}
    assert set(itertools.pairwise(seen)) <= steps | {(state, state) for state in BreakerState}
    now += LIMITS.longest_quarantine_s
    assert breaker.state(now) is not BreakerState.OPEN
    breaker.succeeded(now + LIMITS.probation_s)
    assert breaker.state(now + LIMITS.probation_s) is BreakerState.CLOSED
