"""Scores of chunks."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.store.eviction import MAX_CREDIT_NS, POLICIES, highest_score

times = st.integers(0, 1 << 60)


@given(score=times, now=times, uses=st.integers(0, 1000), position=st.integers(0, 1000))
def test_a_hit_lengthens_a_life_and_within_a_bound(
    score: int, now: int, uses: int, position: int
) -> None:
    for policy in POLICIES.values():
        put, hit = policy.on_put(now, position), policy.on_hit(score, uses, now, position)
        assert now <= put <= hit <= now + MAX_CREDIT_NS < highest_score(now)


def test_what_is_hit_often_outlives_what_is_hit_once() -> None:
    lru, frequency = POLICIES["lru"], POLICIES["frequency"]
    once, often = frequency.on_hit(0, 0, 100, 0), 0
    for uses in range(5):
        often = frequency.on_hit(often, uses, 100, 0)
    assert often > once
    assert lru.on_hit(1 << 60, 5, 100, 0) == 100
