import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.router.load_stats import (
    Outcome,
    RequestResult,
    ended_since,
    per_second,
    percentile,
    summarize,
    ttft_by_window,
)


def result(
    at_s: float, end_s: float, outcome: Outcome = Outcome.COMPLETED, **more: object
) -> RequestResult:
    return RequestResult(at_s=at_s, end_s=end_s, outcome=outcome, prefix=0, **more)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[int], percent: float
) -> None:
    found = percentile(values, percent)
    assert found in values
    needed = percent / 100 * len(values)
    assert sum(value <= found for value in values) >= needed - 1e-9
    assert sum(value < found for value in values) < needed


@pytest.mark.parametrize(
    ("count", "percent", "expected"),
    [(100, 99, 99), (100, 50, 50), (101, 50, 51), (10, 99, 10), (1, 1, 1), (0, 50, None)],
)
def test_percentiles(count: int, percent: float, expected: int | None) -> None:
    assert percentile(range(count, 0, -1), percent) == expected


def test_a_load_in_numbers() -> None:
    results = [
        result(0.0, 1.0, ttft_s=0.2, gaps_s=(0.1, 0.3), output_tokens=3, prompt_tokens=10),
        result(1.0, 3.0, ttft_s=0.4, lag_s=0.01, output_tokens=1, cached_tokens=8),
        result(2.0, 2.5, Outcome.SHED),
        # Neither counts for latency, but what it has brought has been computed.
        result(2.0, 4.0, Outcome.FAILED, ttft_s=9.0, gaps_s=(9.0,), output_tokens=2),
    ]
    summary = summarize(results, 4.0)
    assert summary.requests == 4
    assert {name: n for name, n in summary.outcomes.items() if n} == {
        "completed": 2,
        "shed": 1,
        "failed": 1,
    }
    assert (summary.completed_per_s, summary.output_tokens_per_s) == (0.5, 1.5)
    assert (summary.prompt_tokens, summary.cached_tokens) == (10, 8)
    assert (summary.ttft_p50_s, summary.ttft_p99_s) == (0.2, 0.4)
    assert (summary.gap_p50_s, summary.gap_p99_s) == (0.1, 0.3)
    assert (summary.lag_p99_s, summary.shed_p99_s) == (0.01, 0.5)


def test_a_load_of_nothing() -> None:
    summary = summarize([], 1.0)
    assert (summary.requests, summary.completed_per_s, summary.ttft_p99_s) == (0, 0.0, None)


@given(st.lists(st.floats(0, 20)), st.floats(-1, 21))
def test_the_recent_ones_are_the_last(ends: list[float], begin_s: float) -> None:
    results = [result(0.0, end_s) for end_s in sorted(ends)]
    assert ended_since(results, begin_s) == [each for each in results if each.end_s >= begin_s]


def test_counts_by_second() -> None:
    results = [result(0, 0.5), result(0, 1.0), result(0, 1.9), result(0, 2.2, Outcome.SHED)]
    assert per_second(results, Outcome.COMPLETED, 2.5) == [1, 2, 0]
    assert per_second(results, Outcome.SHED, 2.5) == [0, 0, 1]
    # What ends after the last second is counted in it.
    assert per_second([result(0, 9.0)], Outcome.COMPLETED, 2.5) == [0, 0, 1]


def test_latency_along_the_time_of_arrival() -> None:
    results = [
        result(0.1, 9.0, ttft_s=1.0),
        result(1.9, 2.0, ttft_s=3.0),
        result(4.0, 5.0, ttft_s=2.0),
        result(4.5, 5.0, Outcome.SHED),
    ]
    assert ttft_by_window(results, 6.0, 2.0, 99) == [(1.0, 3.0), (5.0, 2.0)]
    assert ttft_by_window(results, 6.0, 2.0, 50) == [(1.0, 1.0), (5.0, 2.0)]
