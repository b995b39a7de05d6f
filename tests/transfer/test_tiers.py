"""The health of tiers: pauses before another try, and the breaker."""

from vllm_kvpool.transfer.tiers import (
    FAILURES_TO_OPEN,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    RETRY_FIRST_S,
    RETRY_JITTER,
    Breaker,
    retry_pause_s,
    tier_names,
)


def test_tiers_of_one_kind_are_told_apart_by_a_number() -> None:
    assert tier_names(["memory", "file", "file", "s3", "file"]) == (
        *("memory", "file", "file2", "s3", "file3"),
    )
    assert tier_names([]) == ()


def test_the_pause_before_a_retry_doubles_less_a_part_by_chance() -> None:
    assert retry_pause_s(1, 0.0) == RETRY_FIRST_S
    assert retry_pause_s(3, 0.0) == 4 * RETRY_FIRST_S
    assert retry_pause_s(1, 1.0) == RETRY_FIRST_S * (1 - RETRY_JITTER)


# The breaker


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
    assert not breaker.succeeded()
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
    assert breaker.succeeded()
    assert not breaker.suspect
    assert fails(breaker, now) == [False] * (FAILURES_TO_OPEN - 1) + [True]
    assert breaker.closed_at == now + FIRST_PAUSE_S
