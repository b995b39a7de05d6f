"""The index of known prompt prefixes and of the replicas that hold them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.router_invariants import check_prefixes
from tests.support.router_steps import ask
from vllm_kvpool.router.control.prefix_index import (
    GROWTH,
    LINEAR_SPANS,
    MAX_HOLDERS,
    MAX_SPANS,
    SEGMENT_ENDS,
    Holder,
    PoolIndex,
    PrefixIndex,
    spans_of,
)


def chain(root: int, length: int) -> tuple[int, ...]:
    return tuple(root * 1000 + number for number in range(length))


def test_a_prompt_of_any_length_has_few_beginnings_near_to_each_other() -> None:
    assert SEGMENT_ENDS[:LINEAR_SPANS] == tuple(range(1, LINEAR_SPANS + 1))
    assert SEGMENT_ENDS[-1] >= MAX_SPANS
    assert len(SEGMENT_ENDS) < 200
    steps = pairwise(SEGMENT_ENDS)
    assert all(0 < later - end <= max(1, GROWTH * end) for end, later in steps)
    assert [spans_of(depth) for depth in (0, 1, LINEAR_SPANS)] == [0, 1, LINEAR_SPANS]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12), st.integers(1, 3)), max_size=30),
    st.integers(1, 20),
)
def test_what_is_kept_is_whole_beginnings(adds: list[tuple[int, int, int]], most: int) -> None:
    index, caches = PrefixIndex(most), [Holder() for _ in range(3)]
    for root, length, number in adds:
        holder = caches[number - 1]
        index.add(chain(root, length), holder)
        check_prefixes(index)
        depths = index.holders(chain(root, length), most)
        assert depths.get(holder, 0) == min(length, most)
    for root in range(1, 5):
        known = [index.depth(chain(root, 12)[:length]) for length in range(13)]
        assert known == [min(length, known[-1]) for length in range(13)]
        for holder in caches:
            held = [index.holders(chain(root, 12)[:end], 3).get(holder, 0) for end in range(13)]
            assert held == [min(length, held[-1]) for length in range(13)]


@pytest.mark.parametrize(
    ("prefix", "known"),
    [((), 0), ((1,), 1), ((1, 2, 3), 3), ((1, 2, 3, 4), 3), ((1, 9), 1), ((9, 2), 0)],
)
def test_the_longest_known_beginning_counts(prefix: tuple[int, ...], known: int) -> None:
    index, holder = PrefixIndex(), Holder()
    index.add((1, 2, 3), holder)
    assert index.depth(prefix) == known
    assert index.holders(prefix, 4) == ({holder: known} if known else {})


def test_those_with_the_longest_beginnings_are_found_first() -> None:
    index = PrefixIndex()
    for owner, length in ((1, 2), (2, 5), (3, 4), (4, 5), (5, 1)):
        index.add(chain(1, length), Holder(owner))

    def found(most: int) -> dict[int, int]:
        return {each.owner: depth for each, depth in index.holders(chain(1, 8), most).items()}

    assert found(3) == {4: 5, 2: 5, 3: 4}
    assert found(9) == {4: 5, 2: 5, 3: 4, 1: 2, 5: 1}


def test_what_was_not_seen_for_longest_is_forgotten_its_end_first() -> None:
    index, holder = PrefixIndex(4), Holder()
    for root, length in ((1, 2), (2, 2), (1, 2), (3, 1)):
        index.add(chain(root, length), holder)
    assert [index.depth(chain(root, 2)) for root in (1, 2, 3)] == [2, 1, 1]
    assert holder.num_held == 4


def test_of_what_many_have_the_last_ones_are_known() -> None:
    index = PrefixIndex()
    for owner in range(MAX_HOLDERS + 3):
        index.add((1,), Holder(owner))
    found = sorted(each.owner for each in index.holders((1,), 100))
    assert found == list(range(3, MAX_HOLDERS + 3))
    check_prefixes(index)


def test_nothing_is_known_of_a_cache_that_is_gone() -> None:
    index = PrefixIndex()
    one, other = Holder(), Holder()
    index.add((1, 2), one)
    index.add((1,), other)
    one.is_gone = True
    assert index.holders((1, 2), 4) == {other: 1}


def test_pool_index_that_was_down_knows_no_prompt() -> None:
    pool, prompt = PoolIndex(), ask("r", 1000, prefix=(1, 2), prefix_tokens=300)
    pool.add(prompt.prefix)
    assert pool.unknown_tokens(prompt) == 400
    assert [pool.set_up(is_up=is_up) for is_up in (False, False, True)] == [True, False, True]
    assert pool.unknown_tokens(prompt) == 1000


def test_pool_index_that_is_down_learns_no_prompt() -> None:
    pool, prompt = PoolIndex(), ask("r", 1000, prefix=(1, 2), prefix_tokens=300)
    pool.set_up(is_up=False)
    pool.add(prompt.prefix)
    pool.set_up(is_up=True)
    assert pool.unknown_tokens(prompt) == 1000
