"""When a replica that keeps failing is left alone."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.router.control.health import (
    HALF_OPEN_S,
    LONGEST_QUARANTINE_S,
    WINDOW_S,
    ReplicaBreaker,
)
from vllm_kvpool.router.control.settings import HealthConfig

LIMITS = HealthConfig(max_failures=3, quarantine_s=5.0)


def flapping(at: float = 0.0) -> ReplicaBreaker:
    """Return a breaker whose first quarantine began at `at`."""
    breaker = ReplicaBreaker(LIMITS)
    for _ in range(LIMITS.max_failures):
        breaker.failed(at)
    return breaker


def test_so_many_failures_within_the_window_are_too_many() -> None:
    breaker = ReplicaBreaker(LIMITS)
    assert [breaker.failed(now) for now in (0.0, 15.0, WINDOW_S - 0.1)] == [False, False, True]
    assert breaker.until == WINDOW_S - 0.1 + 5.0


def test_failures_that_have_left_the_window_do_not_count() -> None:
    breaker = ReplicaBreaker(LIMITS)
    assert not any(breaker.failed(0.5 * WINDOW_S * number + number) for number in range(100))


def test_successes_between_failures_do_not_hide_that_it_flaps() -> None:
    breaker = ReplicaBreaker(LIMITS)
    for now in (1.0, 2.0):
        assert not breaker.failed(now)
        breaker.succeeded(now)
    assert breaker.failed(3.0)


def test_what_comes_late_changes_nothing() -> None:
    breaker = flapping()
    assert breaker.failed(4.0)
    breaker.succeeded(4.5)
    assert (breaker.until, breaker.rounds) == (5.0, 1)


def test_half_open_one_failure_is_enough_and_each_round_is_longer_up_to_a_bound() -> None:
    breaker, pauses = flapping(), []
    for _ in range(100):
        now = breaker.until
        breaker.succeeded(now)
        assert breaker.failed(now)
        pauses.append(breaker.until - now)
    assert pauses[:8] == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0]
    assert set(pauses[6:]) == {LONGEST_QUARANTINE_S}


def test_a_first_quarantine_above_the_bound_is_that_long_each_time() -> None:
    breaker = ReplicaBreaker(HealthConfig(max_failures=1, quarantine_s=2 * LONGEST_QUARANTINE_S))
    for _ in range(3):
        now = breaker.until
        assert breaker.failed(now)
        assert breaker.until - now == 2 * LONGEST_QUARANTINE_S


def test_a_success_at_the_end_of_the_half_open_time_forgets_all_rounds() -> None:
    breaker = flapping()
    breaker.succeeded(6.0)  # probation begins
    breaker.succeeded(15.9)
    assert breaker.rounds == 1
    breaker.succeeded(16.0)
    assert breaker.rounds == 0
    assert [breaker.failed(20.0) for _ in range(3)] == [False, False, True]
    assert breaker.until == 25.0


@given(st.lists(st.tuples(st.floats(0.0, 40.0), st.booleans())))
def test_any_history_keeps_to_the_bounds_and_ends_closed(history: list[tuple[float, bool]]) -> None:
    breaker, now = ReplicaBreaker(LIMITS), 0.0
    for pause_s, is_failure in history:
        now += pause_s
        was_open = now < breaker.until
        if is_failure and breaker.failed(now):
            assert 0.0 < breaker.until - now <= LONGEST_QUARANTINE_S
        elif not is_failure:
            breaker.succeeded(now)
        assert not was_open or breaker.rounds
        assert len(breaker._failed_at) < LIMITS.max_failures
    now = max(now, breaker.until)
    breaker.succeeded(now)
    breaker.succeeded(now + HALF_OPEN_S)
    assert breaker.rounds == 0
