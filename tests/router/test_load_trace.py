import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.load_trace import LoadSpec, arrivals, bursts, read_load_spec

SPECS = st.builds(
    LoadSpec,
    seconds=st.floats(0.5, 60),
    rate=st.floats(0, 20),
    burst_rate=st.floats(0, 60),
    burst_every_s=st.floats(1, 30),
    burst_s=st.floats(0, 1),
    num_prefixes=st.integers(1, 5),
    prefix_words=st.integers(0, 5),
    prompt_words_min=st.integers(1, 4),
    prompt_words_max=st.integers(4, 20),
    output_tokens_min=st.integers(1, 4),
    output_tokens_max=st.integers(4, 20),
    seed=st.integers(0, 1000),
)


@given(SPECS)
def test_a_load_is_within_its_bounds_and_always_the_same(spec: LoadSpec) -> None:
    load = list(arrivals(spec))
    assert load == list(arrivals(spec))
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(load))
    for arrival in load:
        assert 0 <= arrival.at_s < spec.seconds
        assert spec.output_tokens_min <= arrival.output_tokens <= spec.output_tokens_max
        words = len(arrival.prompt.split()) - spec.prefix_words
        assert spec.prompt_words_min <= words <= spec.prompt_words_max


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("rate", "burst_rate", "burst_s"), [(5.0, 50.0, 2.0), (50.0, 0.0, 3.0), (0.0, 80.0, 0.5)]
)
def test_as_many_come_as_the_rates_say_in_bursts_and_between(
    rate: float, burst_rate: float, burst_s: float, seed: int
) -> None:
    spec = LoadSpec(
        seconds=210.0,
        rate=rate,
        burst_rate=burst_rate,
        burst_every_s=7.0,
        burst_s=burst_s,
        seed=seed,
        prefix_words=0,
        prompt_words_max=8,
    )
    in_burst = [any(a <= at.at_s < b for a, b in bursts(spec)) for at in arrivals(spec)]
    burst_seconds = sum(end - begin for begin, end in bursts(spec))
    for count, expected in (
        (sum(in_burst), burst_rate * burst_seconds),
        (len(in_burst) - sum(in_burst), rate * (spec.seconds - burst_seconds)),
    ):
        assert abs(count - expected) <= 5 * math.sqrt(expected)


def test_arrivals_know_nothing_of_each_other() -> None:
    spec = LoadSpec(seconds=2000.0, rate=10.0, burst_s=0.0, prefix_words=0, prompt_words_max=8)
    times = [arrival.at_s for arrival in arrivals(spec)]
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    # Of an exponential distribution: the share above its mean, and above three times that.
    for factor in (1.0, 3.0):
        share = sum(gap > factor / spec.rate for gap in gaps) / len(gaps)
        assert share == pytest.approx(math.exp(-factor), abs=0.01)


def test_nothing_is_lost_where_a_burst_begins_or_ends() -> None:
    steady = LoadSpec(seconds=100.0, rate=1.0, burst_rate=1.0, burst_every_s=1000.0, burst_s=0.0)
    cut = LoadSpec(seconds=100.0, rate=1.0, burst_rate=1.0, burst_every_s=0.25, burst_s=0.125)
    times = [arrival.at_s for arrival in arrivals(steady)]
    assert len(times) > 50
    assert [arrival.at_s for arrival in arrivals(cut)] == pytest.approx(times)


def test_bursts_end_each_period_and_the_load() -> None:
    spec = LoadSpec(seconds=18.0, burst_every_s=10.0, burst_s=3.0)
    assert list(bursts(spec)) == [(7.0, 10.0), (17.0, 18.0)]
    assert list(bursts(LoadSpec(seconds=7.0, burst_every_s=10.0, burst_s=3.0))) == []


def test_prompts_share_few_beginnings_and_the_first_most() -> None:
    spec = LoadSpec(seconds=200.0, num_prefixes=4, prefix_words=30)
    load = list(arrivals(spec))
    beginnings = {a.prefix: " ".join(a.prompt.split()[:30]) for a in load}
    assert len(set(beginnings.values())) == 4
    assert all(a.prompt.startswith(beginnings[a.prefix]) for a in load)
    ends = {" ".join(a.prompt.split()[30:]) for a in load}
    assert len(ends) == len(load)
    counts = Counter(a.prefix for a in load)
    assert counts[0] > 1.5 * counts[1] > 1.5 * counts[3]


def test_most_prompts_are_short_and_some_are_long() -> None:
    spec = LoadSpec(seconds=500.0, prefix_words=0, prompt_words_min=10, prompt_words_max=1000)
    lengths = sorted(len(a.prompt.split()) for a in arrivals(spec))
    assert 60 <= lengths[len(lengths) // 2] <= 160  # the middle on a scale of powers is 100
    assert lengths[0] <= 12
    assert lengths[-1] >= 900


def test_options_come_as_text_or_as_numbers() -> None:
    spec = read_load_spec({"rate": "3.5", "seed": 4, "endpoint": "chat", "ignore_eos": "false"})
    assert (spec.rate, spec.seed, spec.endpoint, spec.ignore_eos) == (3.5, 4, "chat", False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rates": 3}, "no option 'rates'; did you mean 'rate'"),
        ({"rate": "fast"}, "rate"),
        ({"endpoint": "embeddings"}, "endpoint"),
        ({"rate": -1}, "rate must not be below 0"),
        ({"seconds": 0}, "seconds must be above 0"),
        ({"burst_s": 30}, "burst_s must not exceed burst_every_s"),
        ({"num_prefixes": 0}, "num_prefixes must be above 0"),
        ({"prompt_words_min": 200}, "prompt_words_min <= prompt_words_max"),
        ({"output_tokens_min": 0}, "1 <= output_tokens_min"),
        ({"rate": 1e9}, "more than 1000000 requests"),
        ({"seconds": "nan"}, "seconds must be above 0"),
    ],
)
def test_mistakes_in_a_load_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_load_spec(options)
