"""Rates learned while serving."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.router.control.rates import (
    COLD_SAMPLES,
    FORGET_STARTS_S,
    HALF_LIFE_S,
    MAX_READINGS,
    MAX_STARTS,
    MIN_SAMPLES,
    MIN_STARTS,
    OUTLIER_FACTOR,
    RATES,
    CounterRate,
    Line,
    Rate,
    RateEstimator,
    Rates,
    StartRate,
)

PRIOR = Rates()
ALL_RATES = set(RATES)


def warm() -> Counter[str]:
    """Return sample counts of an engine that is past the cold phase of every rate."""
    return Counter(dict.fromkeys(("prefill", "transfer", "handoff", "local", "step"), COLD_SAMPLES))


def settled(value: float, now: float = 0.0) -> Rate:
    """A rate that has seen this value only."""
    rate = Rate(prior=1.0)
    for _ in range(MIN_SAMPLES):
        rate.add(now, value, 1.0)
    return rate


def test_before_the_first_sample_the_prior_holds() -> None:
    assert Rate(prior=123.0).value == 123.0


def test_the_prior_counts_less_with_each_sample_and_nothing_after_enough() -> None:
    rate, values = Rate(prior=100.0), []
    for _ in range(MIN_SAMPLES):
        rate.add(0.0, 900.0, 1.0)
        values.append(rate.value)
    assert values[0] == pytest.approx(100.0 + 800.0 / MIN_SAMPLES)
    assert values == sorted(values)
    assert values[-1] == 900.0


def test_a_rate_is_work_by_time_and_no_mean_of_rates() -> None:
    rate = Rate(prior=1.0)
    for _ in range(MIN_SAMPLES):
        rate.add(0.0, 1000.0, 1.0)  # 1000/s
        rate.add(0.0, 1000.0, 4.0)  # 250/s; the mean of both rates would be 625
    assert rate.value == pytest.approx(2000.0 / 5.0)


def test_an_idle_night_does_not_pull_a_rate_down() -> None:
    rate = settled(5000.0)
    assert rate.value == 5000.0
    rate.add(1e7, 5000.0, 1.0)
    assert rate.value == pytest.approx(5000.0)
    assert math.isfinite(rate.value)


def test_after_a_half_life_what_was_counts_half() -> None:
    rate = settled(100.0)  # MIN_SAMPLES seconds of work
    rate.add(HALF_LIFE_S, 400.0 * MIN_SAMPLES / 2, MIN_SAMPLES / 2)
    assert rate.value == pytest.approx((100.0 + 400.0) / 2)


@pytest.mark.parametrize(
    ("amount", "took"),
    [
        (1000.0, 1e6),  # stood still
        (1e12, 1.0),  # answered from a cache nobody knew of
    ],
)
def test_an_outlier_moves_a_rate_little(amount: float, took: float) -> None:
    rate = settled(1000.0)
    rate.add(0.0, amount, took)
    # At most one sample's weight more, at the bound.
    highest = (MIN_SAMPLES + OUTLIER_FACTOR) / (MIN_SAMPLES + 1) * 1000.0
    lowest = (MIN_SAMPLES + 1) / (MIN_SAMPLES + OUTLIER_FACTOR) * 1000.0
    assert lowest <= rate.value <= highest * (1 + 1e-9)


@pytest.mark.parametrize("factor", [1 / 100, 100.0])
def test_a_change_beyond_the_outlier_bound_is_followed_all_the_same(factor: float) -> None:
    rate = settled(1000.0)
    for second in range(10 * int(HALF_LIFE_S)):
        rate.add(float(second), 1000.0 * factor, 1.0)
    assert rate.value == pytest.approx(1000.0 * factor, rel=0.1)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 1e6), st.floats(1e-3, 1e6), st.floats(1e-6, 1e4)), max_size=40
    ),
    st.floats(1e-3, 1e3),
)
def test_a_rate_lies_between_what_it_saw_whatever_the_unit(
    samples: list[tuple[float, float, float]], unit: float
) -> None:
    rate, other = Rate(prior=7.0), Rate(prior=7.0 * unit)
    for now, amount, took in samples:
        rate.add(now, amount, took)
        other.add(now, amount * unit, took)
    seen = [7.0, *(amount / took for _, amount, took in samples)]
    assert min(seen) * (1 - 1e-6) <= rate.value <= max(seen) * (1 + 1e-6)
    assert other.value == pytest.approx(rate.value * unit, rel=1e-6)


def test_a_line_tells_overhead_from_slope() -> None:
    line = Line(prior_overhead_s=1.0, prior_s_per_token=1.0)
    for tokens in (100, 1000, 4000, 200, 8000, 100, 3000, 500):
        line.add(0.0, tokens, 0.050 + tokens * 0.00002)
    assert line.value == (pytest.approx(0.050), pytest.approx(0.00002))


def test_hand_overs_of_one_length_keep_the_slope_they_were_given() -> None:
    line = Line(prior_overhead_s=0.0, prior_s_per_token=0.0001)
    for _ in range(MIN_SAMPLES):
        line.add(0.0, 1000, 0.3)
    assert line.value == (pytest.approx(0.2), pytest.approx(0.0001))


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(1e-4, 1e3)), min_size=1, max_size=40))
def test_overhead_and_slope_are_never_negative(samples: list[tuple[int, float]]) -> None:
    line = Line(prior_overhead_s=0.01, prior_s_per_token=0.001)
    for at, (tokens, seconds) in enumerate(samples):
        line.add(float(at), tokens, seconds)
    overhead_s, s_per_token = line.value
    assert overhead_s >= 0.0
    assert s_per_token >= 0.0


@pytest.mark.parametrize(
    ("readings", "now", "expected"),
    [
        ([], 5.0, 0.0),
        ([(0, 100)], 0.0, 0.0),
        ([(0, 100), (1, 150)], 1.0, 50.0),
        ([(0, 100), (0.001, 150)], 0.001, 50.0),  # two readings at almost one moment
        ([(0, 100), (1, 150), (2, 170)], 2.0, 35.0),
        ([(0, 100), (1, 150), (2, 20)], 2.0, 35.0),  # began again: 20 have come since
        ([(0, 100), (1, 150), (1, 170), (2, 170)], 2.0, 35.0),  # two readings at once
        ([(0, 0), (20, 200)], 20.0, 10.0),  # a gap longer than the window
        ([(0, 0), (10, 1000), (20, 1000)], 20.0, 0.0),  # out of the window
        ([(0, 0), (5, 1000), (15, 1000)], 15.0, 0.0),
        ([(0, 0), (10, 1000), (15, 1000)], 15.0, 1000 / 15),  # a gap that began before it
        ([(0, 0), (1, 50)], 10.9, 50.0),  # not read since, but not for long
        ([(0, 0), (1, 50)], 11.0, 0.0),  # nobody reads it any more
    ],
)
def test_a_flow_is_the_gain_over_its_window(
    readings: list[tuple[float, float]], now: float, expected: float
) -> None:
    flow = CounterRate(window_s=10.0)
    for at, counter in readings:
        flow.read(at, counter)
    assert flow.per_second(now) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 10**12)), max_size=60))
def test_a_flow_is_never_negative_and_ends_when_nobody_reads(
    readings: list[tuple[float, int]],
) -> None:
    flow, now, gained, last = CounterRate(window_s=10.0), 0.0, 0, None
    for pause_s, counter in readings:
        now += pause_s
        flow.read(now, counter)
        if last is not None:
            gained += counter - last if counter >= last else counter
        last = counter
        assert flow.per_second(now) >= 0.0
    seconds = sum(pause_s for pause_s, _ in readings[1:])
    assert flow.per_second(now) * min(seconds, 10.0) <= gained * 1.001
    assert flow.per_second(now + 10.001) == 0.0


def test_a_flow_keeps_a_bounded_number_of_readings_and_loses_nothing() -> None:
    flow = CounterRate(window_s=1e6)
    for second in range(10 * MAX_READINGS):
        flow.read(float(second), 7.0 * second)
    assert len(flow._readings) <= 2 * MAX_READINGS
    assert flow.per_second(10.0 * MAX_READINGS) == pytest.approx(7.0)


@pytest.mark.parametrize("stage", ["prefill", "transfer"])
def test_a_stages_rate_is_tokens_by_busy_seconds(stage: str) -> None:
    measured = RateEstimator(PRIOR)
    learn = measured.prefilled if stage == "prefill" else measured.transferred
    for _ in range(MIN_SAMPLES):
        learn(warm(), 0.0, 1000, 2.0)
    name = f"{stage}_tokens_per_s"
    rates = measured.snapshot(0.0)
    others = ALL_RATES - {name}
    assert rates == Rates(**{name: pytest.approx(500.0)}, unmeasured=others)


def test_the_first_samples_of_an_engine_are_left_out() -> None:
    measured, left_out = RateEstimator(PRIOR), Counter[str]()
    for _ in range(COLD_SAMPLES):
        measured.prefilled(left_out, 0.0, 10, 1.0)
        measured.handed_over(left_out, 0.0, 1000, 0.9)
        assert measured.snapshot(0.0).unmeasured == ALL_RATES
    measured.prefilled(left_out, 0.0, 250, 1.0)
    assert measured.snapshot(0.0).prefill_tokens_per_s == pytest.approx(250.0)


def test_costs_of_hand_overs_and_local_prefills_are_learned() -> None:
    measured = RateEstimator(PRIOR)
    for sample in range(COLD_SAMPLES + MIN_SAMPLES):
        tokens = 100 * (sample + 1)
        measured.handed_over(warm(), 0.0, tokens, 0.1 + tokens * 0.001)
        measured.prefilled_locally(warm(), 0.0, tokens, tokens * 0.002)
    rates = measured.snapshot(0.0)
    assert rates.handoff_overhead_s == pytest.approx(0.1)
    assert rates.handoff_s_per_token == pytest.approx(0.001)
    assert rates.handoff_s(500) == pytest.approx(0.6)
    assert rates.local_prefill_s_per_token == pytest.approx(0.002)


def learned(*samples: tuple[int, float]) -> Rates:
    """Return rates learned from prompts that decoders computed: (tokens, seconds) of each."""
    measured = RateEstimator(Rates())
    for _ in range(COLD_SAMPLES + MIN_SAMPLES):
        for tokens, seconds in samples:
            measured.prefilled_locally(warm(), 0.0, tokens, seconds)
    return measured.snapshot(0.0)


@pytest.mark.parametrize(
    ("samples", "tokens", "seconds"),
    [
        # A step takes 20 ms, however little is computed: that is no measure of tokens.
        ([(2, 0.02)], 2, 0.0002),
        ([(2, 0.02)], 1000, 0.1),
        # Prompts of all lengths: a token takes a millisecond.
        ([(100, 0.12), (200, 0.22), (1000, 1.02)], 10, 0.01),
        ([(100, 0.12), (200, 0.22), (1000, 1.02)], 1000, 1.0),
        # Long prompts of one length: all but a step is theirs.
        ([(2000, 1.0)], 2000, 0.98),
    ],
)
def test_what_prompts_take_from_those_who_decode(
    samples: list[tuple[int, float]], tokens: int, seconds: float
) -> None:
    assert learned(*samples).local_prefill_s(tokens) == pytest.approx(seconds, rel=0.02)


def test_lengths_are_means_that_no_bound_of_outliers_bends() -> None:
    measured = RateEstimator(PRIOR)
    for _ in range(MIN_SAMPLES):
        for _ in range(99):
            measured.answered(0.0, 1)
        measured.answered(0.0, 9901)
        measured.counted(0.0, 100, 1000)
        measured.counted(0.0, 1000, 1000)
    rates = measured.snapshot(0.0)
    assert rates.output_tokens_per_request == pytest.approx(100.0)
    assert rates.tokens_per_byte == pytest.approx(1100 / 2000)


def test_a_hand_over_that_was_slow_once_is_tried_again() -> None:
    measured, left_out = RateEstimator(PRIOR), Counter[str]()
    for number in range(20):
        measured.handed_over(left_out, float(number), 1000, 0.92)
    learned = measured.snapshot(19.0).handoff_s(1000)
    assert learned == pytest.approx(0.92, rel=0.1)
    prior = PRIOR.handoff_s(1000)
    later = measured.snapshot(19.0 + 120.0).handoff_s(1000)
    assert later == pytest.approx((learned + prior) / 2)
    assert measured.snapshot(19.0 + 3600.0).handoff_s(1000) == pytest.approx(prior, rel=0.01)
    measured.handed_over(left_out, 3600.0, 1000, 0.9)
    assert measured.snapshot(3600.0).handoff_s(1000) == pytest.approx(0.9, rel=0.1)


def test_a_steps_time_is_told_by_how_many_are_decoded() -> None:
    measured = RateEstimator(PRIOR)
    for requests in (1, 1, 1, 2, 1, 1, 64):
        measured.decoded(warm(), 0.0, requests, 0.010 + 0.0001 * requests)
    rates = measured.snapshot(0.0)
    assert rates.step_s(256) == pytest.approx(0.010 + 0.0256)
    assert not {"step_base_s", "step_s_per_request"} & rates.unmeasured


def test_of_single_requests_it_follows_that_more_at_a_time_cost_nothing() -> None:
    measured = RateEstimator(PRIOR)
    for _ in range(20):
        measured.decoded(warm(), 0.0, 1.0, 0.010)
    assert measured.snapshot(0.0).step_s(256) == pytest.approx(0.010)


def test_a_light_load_takes_nothing_from_the_rate_of_starts() -> None:
    starts = StartRate()
    starts.watch(0.0, is_waiting=True)
    for number in range(1, 21):
        starts.started(0.5 * number)
    starts.watch(10.0, is_waiting=False)
    for second in range(11, 30):
        starts.started(float(second))
    assert starts.per_second(30.0) == pytest.approx(2.0)
    starts.watch(30.0, is_waiting=True)
    assert starts.per_second(40.0) == pytest.approx(1.0)  # nobody was started for ten seconds


def test_few_starts_say_nothing_and_old_ones_do_not_either() -> None:
    starts = StartRate()
    starts.watch(0.0, is_waiting=True)
    for number in range(1, MIN_STARTS):
        starts.started(float(number))
        assert starts.per_second(float(number)) == math.inf
    starts.started(8.0)
    assert starts.per_second(8.0) == pytest.approx(1.0)
    starts.watch(8.0, is_waiting=False)
    later = 8.1 + FORGET_STARTS_S
    starts.watch(later, is_waiting=True)
    assert starts.per_second(later) == math.inf


def test_the_last_starts_count() -> None:
    starts = StartRate()
    starts.watch(0.0, is_waiting=True)
    for number in range(1, 1000):
        starts.started(float(number))
    for number in range(1, MAX_STARTS + 1):
        starts.started(999.0 + number / 10)
    assert starts.per_second(999.0 + MAX_STARTS / 10) == pytest.approx(10.0)
