"""When a place that fails is asked again."""

from vllm_kvpool.storage.breaker import (
    FAILURES_TO_OPEN,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Breaker,
)


def fails(breaker: Breaker, now: float, times: int = FAILURES_TO_OPEN) -> list[bool]:
    return [breaker.failed(now) for _ in range(times)]


def test_a_breaker_opens_after_so_many_failures_in_a_row() -> None:
    breaker = Breaker()
    assert fails(breaker, 0.0) == [False] * (FAILURES_TO_OPEN - 1) + [True]
    assert breaker.is_open(0.0)
    assert breaker.is_open(FIRST_PAUSE_S - 0.01)
    assert not breaker.is_open(FIRST_PAUSE_S)


def test_a_success_starts_the_count_anew() -> None:
    breaker = Breaker()
    fails(breaker, 0.0, FAILURES_TO_OPEN - 1)
    breaker.succeeded()
    assert not any(fails(breaker, 0.0, FAILURES_TO_OPEN - 1))
    assert not breaker.is_open(0.0)


def test_late_failures_of_an_open_breaker_do_not_prolong_the_pause() -> None:
    breaker = Breaker()
    fails(breaker, 0.0)
    assert not any(fails(breaker, FIRST_PAUSE_S / 2, 10))
    assert not breaker.is_open(FIRST_PAUSE_S)


def test_the_pause_doubles_with_each_further_failure_up_to_the_longest() -> None:
    breaker = Breaker()
    fails(breaker, 0.0)
    pauses = []
    for _ in range(10):
        now = breaker.closed_at
        assert breaker.failed(now)  # one is enough now
        pauses.append(breaker.closed_at - now)
    assert pauses[:3] == [2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-2:] == [LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_after_a_success_all_is_forgotten() -> None:
    breaker = Breaker()
    fails(breaker, 0.0)
    now = breaker.closed_at
    breaker.succeeded()
    assert fails(breaker, now) == [False] * (FAILURES_TO_OPEN - 1) + [True]
    assert breaker.closed_at == now + FIRST_PAUSE_S


def test_one_bad_failure_is_enough() -> None:
    breaker = Breaker()
    assert breaker.tripped(1.0)
    assert breaker.closed_at == 1.0 + FIRST_PAUSE_S
    assert not breaker.tripped(1.0 + FIRST_PAUSE_S / 2)
    assert breaker.tripped(2.0)
    assert breaker.closed_at == 2.0 + 2 * FIRST_PAUSE_S


def test_jitter_lengthens_the_pause_by_a_share() -> None:
    breaker = Breaker()
    breaker.tripped(1.0, 0.25)
    assert breaker.closed_at == 1.0 + 1.25 * FIRST_PAUSE_S
    breaker.tripped(2.0)
    assert breaker.closed_at == 2.0 + 2 * FIRST_PAUSE_S


def test_a_breaker_that_is_half_open_opens_after_one_failure() -> None:
    breaker = Breaker()
    breaker.tripped(0.0)
    breaker.half_open()
    assert not breaker.is_open(0.0)
    assert breaker.failed(0.0)
    assert breaker.closed_at == 2 * FIRST_PAUSE_S
