"""The order of eviction: what a hit is worth, and which candidates are kept."""

from hypothesis import given
from hypothesis import strategies as st
from vllm_kvpool.store.files_order import (
    HIT_CREDIT_NS,
    MAX_CREDIT_NS,
    Candidate,
    Candidates,
    Policy,
    worth_until,
)

from vllm_kvpool.store import files_order

times = st.integers(0, 1 << 62)


@given(times, times)
def test_a_hit_is_worth_until_now_under_lru(worth_ns: int, now_ns: int) -> None:
    assert worth_until(Policy.LRU, worth_ns, now_ns) == now_ns


@given(times, times)
def test_credit_is_positive_and_bounded(worth_ns: int, now_ns: int) -> None:
    after = worth_until(Policy.FREQUENCY, worth_ns, now_ns)
    assert now_ns + HIT_CREDIT_NS <= after <= now_ns + MAX_CREDIT_NS
    assert after >= min(worth_ns + HIT_CREDIT_NS, now_ns + MAX_CREDIT_NS)


def test_two_hits_are_worth_more_than_one() -> None:
    once = worth_until(Policy.FREQUENCY, 0, 1000)
    twice = worth_until(Policy.FREQUENCY, once, 2000)
    assert (once, twice) == (1000 + HIT_CREDIT_NS, 1000 + 2 * HIT_CREDIT_NS)


def objects(*worth: int) -> list[Candidate]:
    return [Candidate(worth_ns, 1, str(worth_ns)) for worth_ns in worth]


def test_candidates_come_coldest_first_and_once() -> None:
    candidates = Candidates()
    assert candidates.take() is None
    candidates.refill(objects(1, 2, 3), scanned_ns=10)
    assert candidates.peek() == objects(1, 2, 3)
    assert [candidates.take() for _ in range(4)] == [*objects(1, 2, 3), None]


def test_what_is_worth_more_than_the_scans_time_is_no_candidate() -> None:
    candidates = Candidates()
    candidates.refill(objects(8, 9, 10, 11), scanned_ns=10)
    assert candidates.peek() == objects(8, 9)


def test_candidates_are_bounded() -> None:
    candidates = Candidates()
    candidates.refill(objects(*range(files_order.MAX_CANDIDATES + 5)), scanned_ns=1 << 60)
    assert len(candidates) == files_order.MAX_CANDIDATES
    assert candidates.take() == Candidate(0, 1, "0")
