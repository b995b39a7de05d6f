"""When a replica that keeps failing is left alone."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.breaker import TABLE, Breaker, BreakerLimits, Event, Trust

LIMITS = BreakerLimits(
    failures=3,
    window_s=30.0,
    first_quarantine_s=5.0,
    longest_quarantine_s=60.0,
    jitter=0.1,
    probation_s=10.0,
)


def flapping(at: float = 0.0) -> Breaker:
    """In its first quarantine, since `at`."""
    breaker = Breaker(LIMITS)
    for _ in range(LIMITS.failures):
        breaker.failed(at)
    return breaker


def test_so_many_failures_within_the_window_are_too_many() -> None:
    breaker = Breaker(LIMITS)
    assert [breaker.failed(now) for now in (0.0, 15.0, 29.9)] == [
        *(Trust.WELL, Trust.WELL, Trust.QUARANTINED)
    ]
    assert breaker.until == 34.9


def test_failures_that_have_left_the_window_do_not_count() -> None:
    breaker = Breaker(LIMITS)
    assert {breaker.failed(16.0 * number) for number in range(100)} == {Trust.WELL}


def test_successes_between_failures_do_not_hide_that_it_flaps() -> None:
    breaker = Breaker(LIMITS)
    for now in (1.0, 2.0):
        breaker.failed(now)
        assert breaker.succeeded(now) is Trust.WELL
    assert breaker.failed(3.0) is Trust.QUARANTINED


def test_quarantine_ends_in_probation() -> None:
    breaker = flapping()
    assert breaker.trust(4.9) is Trust.QUARANTINED
    assert breaker.trust(5.0) is Trust.PROBATION


def test_what_comes_late_changes_nothing() -> None:
    breaker = flapping()
    assert breaker.failed(4.0) is Trust.QUARANTINED
    assert breaker.succeeded(4.5) is Trust.QUARANTINED
    assert breaker.until == 5.0
    assert breaker.rounds == 1


def test_one_failure_on_probation_is_enough_and_each_round_is_longer_up_to_a_bound() -> None:
    breaker, pauses = flapping(), []
    for _ in range(100):
        now = breaker.until
        assert breaker.trust(now) is Trust.PROBATION
        assert breaker.failed(now) is Trust.QUARANTINED
        pauses.append(breaker.until - now)
    assert pauses[:5] == [10.0, 20.0, 40.0, 60.0, 60.0]
    assert set(pauses[3:]) == {60.0}


def test_a_success_at_the_end_of_probation_forgets_all_rounds() -> None:
    breaker = flapping()
    assert breaker.succeeded(6.0) is Trust.PROBATION  # begun when it was asked, at 6
    assert breaker.succeeded(15.9) is Trust.PROBATION
    assert breaker.succeeded(16.0) is Trust.WELL
    assert [breaker.failed(20.0) for _ in range(3)][-1] is Trust.QUARANTINED
    assert breaker.until == 25.0


def test_jitter_takes_off_a_share_of_the_time_and_is_told_the_round() -> None:
    breaker = Breaker(LIMITS, jitter=lambda number: [1.0, 0.5][number])
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.until == pytest.approx(4.5)
    breaker.failed(100.0)
    assert breaker.until == pytest.approx(109.5)


def test_the_table_has_no_way_out_of_quarantine_but_time() -> None:
    assert {event for (trust, event), to in TABLE.items() if trust is not to} == {
        *(Event.FAILED, Event.FAILED_TOO_OFTEN, Event.PROVED, Event.TIME_UP)
    }
    ways = {event for (trust, event), to in TABLE.items() if trust is Trust.QUARANTINED is not to}
    assert ways == {Event.TIME_UP}


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
def test_any_history_keeps_to_the_table_and_ends_in_trust(
    history: list[tuple[float, str]], share: float
) -> None:
    breaker, now, seen = Breaker(LIMITS, jitter=lambda _: share), 0.0, [Trust.WELL]
    for pause_s, what in history:
        now += pause_s
        seen.append(breaker.trust(now))
        if what == "failed":
            seen.append(breaker.failed(now))
        elif what == "ok":
            seen.append(breaker.succeeded(now))
        if seen[-1] is Trust.QUARANTINED:
            assert 0.0 < breaker.until - now <= LIMITS.longest_quarantine_s
        assert len(breaker._failed_at) < LIMITS.failures
    steps = {(one, to) for (one, _), to in TABLE.items()}
    assert set(itertools.pairwise(seen)) <= steps | {(trust, trust) for trust in Trust}
    now += LIMITS.longest_quarantine_s
    assert breaker.trust(now) is not Trust.QUARANTINED
    breaker.succeeded(now + LIMITS.probation_s)
    assert breaker.trust(now + LIMITS.probation_s) is Trust.WELL
