"""Scores of chunks: the orders that policies give, their bounds, and what a flood does to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.storage.eviction import (
    HALF_LIFE_NS,
    MAX_HALF_LIVES,
    MAX_SKEW_NS,
    POLICIES,
    EvictedScores,
    EvictionPolicy,
    Lrfu,
    Lru,
    highest_score,
)

MINUTE = 60 * 10**9
NOW = 1_800_000_000 * 10**9  # of a wall clock, in 2027

policies = st.sampled_from(sorted(POLICIES)).map(POLICIES.__getitem__)
times = st.integers(0, 2**62)


def score_of(policy: EvictionPolicy, *minutes: float) -> int:
    """Return the score of a chunk that was used at these times."""
    first, *later = (NOW + round(each * MINUTE) for each in minutes)
    score = policy.on_put(first)
    for now_ns in later:
        score = policy.on_hit(score, now_ns)
    return score


def leaving(policy: EvictionPolicy, chunks: dict[str, tuple[float, ...]]) -> str:
    return "".join(sorted(chunks, key=lambda name: score_of(policy, *chunks[name])))


@pytest.mark.parametrize(
    ("chunks", "lru", "lrfu"),
    [
        ({"a": (0,), "b": (1,), "c": (2,)}, "abc", "abc"),
        ({"a": (0, 3), "b": (1,), "c": (2,)}, "bca", "bca"),
        # Two uses at once are worth five minutes,
        ({"a": (0, 0), "b": (4,)}, "ab", "ba"),
        ({"a": (0, 0), "b": (6,)}, "ab", "ab"),
        # four are worth ten,
        ({"a": (0, 0, 0, 0), "b": (9,)}, "ab", "ba"),
        ({"a": (0, 0, 0, 0), "b": (11,)}, "ab", "ab"),
        # and one of five minutes ago is worth half of one now, which is worth 2.9 minutes.
        ({"a": (0, 5), "b": (7.9,), "c": (7.95,)}, "abc", "bac"),
        # Use of long ago is forgotten.
        ({"a": (0,) * 1000 + (600,), "b": (601,)}, "ab", "ab"),
    ],
)
def test_the_order_of_leaving(chunks: dict[str, tuple[float, ...]], lru: str, lrfu: str) -> None:
    assert leaving(Lrfu(), chunks) == lrfu
    assert leaving(Lru(), chunks) == lru


@given(policies, times, st.integers(-(2**62), 2**62))
def test_a_score_fits_a_signed_integer_of_64_bits_and_has_a_bound(
    policy: EvictionPolicy, now_ns: int, score: int
) -> None:
    """The bounds hold for any stored score and after any change of the clock."""
    for each in (policy.on_put(now_ns), policy.on_hit(score, now_ns)):
        assert now_ns <= each <= now_ns + MAX_HALF_LIVES * HALF_LIFE_NS
        assert each < highest_score(now_ns) < 2**63


@given(policies, times, times, times)
def test_a_higher_score_never_gives_a_lower_one(
    policy: EvictionPolicy, one: int, other: int, now_ns: int
) -> None:
    """So a prompt's beginning, hit whenever its end is, never scores less."""
    low, high = sorted((one, other))
    assert policy.on_hit(low, now_ns) <= policy.on_hit(high, now_ns)


@given(policies, times, times, times)
def test_a_hit_never_costs_and_a_later_one_gives_no_less(
    policy: EvictionPolicy, put_ns: int, one: int, other: int
) -> None:
    sooner, later = sorted((max(one, put_ns), max(other, put_ns)))
    score = policy.on_put(put_ns)
    assert score <= policy.on_hit(score, sooner) <= policy.on_hit(score, later)


def test_many_uses_at_once_have_a_bound() -> None:
    policy = Lrfu()
    score = policy.on_put(NOW)
    for _ in range(1000):
        score = policy.on_hit(score, NOW)
    assert NOW + 9 * HALF_LIFE_NS < score < NOW + 10 * HALF_LIFE_NS


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_after_a_clock_was_set_back_a_hit_gives_a_score_of_the_new_time(
    policy: EvictionPolicy,
) -> None:
    years_ahead = policy.on_put(NOW + 10**18)
    assert years_ahead > highest_score(NOW)  # which is how an owner tells
    assert policy.on_hit(years_ahead, NOW) <= highest_score(NOW) - MAX_SKEW_NS


def test_evicted_scores_are_remembered_up_to_a_bound_and_once() -> None:
    evicted = EvictedScores(2)
    for score, chunk_id in enumerate("abca"):
        evicted.remember(chunk_id, score)
    assert len(evicted) == 2
    assert [evicted.take(chunk_id) for chunk_id in "abc"] == [3, None, 2]
    assert evicted.take("a") is None


def test_nothing_is_remembered_without_room() -> None:
    evicted = EvictedScores(0)
    evicted.remember("a", 1)
    assert evicted.take("a") is None
