"""Policies: who leaves first, against a model, and under a flood of cells used once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.transfer.policy import POLICIES, Frequency, Lru, Policy

CAPACITY = 4


def play(policy: Policy, script: str) -> set[str]:
    """`"+a a ~a -a"`: a comes, is used, is refreshed, leaves; the keys that are left."""
    present: set[str] = set()
    for word in script.split():
        key = word[-1]
        match word[:-1]:
            case "+":
                policy.add(key)
                present.add(key)
            case "~":
                policy.refresh(key)
            case "-":
                policy.discard(key)
                present.remove(key)
            case _:
                policy.use(key)
    return present


def coldest_first(policy: Policy, keys: set[str]) -> str:
    return "".join(sorted(keys, key=policy.rank))


@pytest.mark.parametrize(
    ("script", "order"),
    [
        ("+a +b +c", "abc"),
        ("+a +b +c a", "bca"),
        ("+a +b +c ~a", "bca"),
        ("+a +b +c -a", "bc"),
        ("+a +b -a +a", "ba"),
        ("+a +b +c c b a", "cba"),  # a prompt used from its end on: the end leaves first
    ],
)
def test_lru_drops_what_was_used_longest_ago(script: str, order: str) -> None:
    policy = Lru(CAPACITY)
    assert coldest_first(policy, play(policy, script)) == order


@pytest.mark.parametrize(
    ("script", "order"),
    [
        ("+a +b +c", "abc"),
        ("+a +b +c a", "bca"),  # a is protected
        ("+a +b a +c", "bca"),  # from what comes later too
        ("+a +b +c ~a", "bca"),  # counted as now,
        ("+a +b ~a +c", "bac"),  # but not as another use
        ("+a +b a b ~a", "ba"),  # among the protected as well
        ("+a +b +c +d +e a b c d", "eabcd"),  # three of four are protected
        ("+a +b +c +d +e a b c d +f", "eafbcd"),  # what overflows is back on probation
        ("+a -a +b +a +c", "bca"),  # soon again after it was dropped
        ("+a -a +b -b +c -c +d -d +e -e +x +a", "xa"),  # not so soon: forgotten
    ],
)
def test_frequency_protects_what_is_used_again(script: str, order: str) -> None:
    policy = Frequency(CAPACITY)
    assert coldest_first(policy, play(policy, script)) == order


def test_what_was_dropped_is_not_remembered_without_bound() -> None:
    policy = Frequency(CAPACITY)
    for number in range(1000):
        policy.add(str(number))
        policy.discard(str(number))
    policy.add("0")
    policy.add("999")
    assert policy.rank("0")[0] < policy.rank("999")[0]


def flood(policy: Policy, capacity: int) -> set[str]:
    """What is left of 20 keys used twice after 500 that are used once."""
    present = {f"twice{i}" for i in range(20)}
    for key in sorted(present):
        policy.add(key)
    for key in sorted(present):
        policy.use(key)
    for number in range(500):
        while len(present) >= capacity:
            coldest = min(present, key=policy.rank)
            policy.discard(coldest)
            present.remove(coldest)
        policy.add(f"once{number}")
        present.add(f"once{number}")
    return {key for key in present if key.startswith("twice")}


def test_a_flood_of_keys_used_once_does_not_push_out_what_was_used_twice() -> None:
    assert len(flood(Frequency(40), 40)) == 20
    assert not flood(Lru(40), 40)  # for comparison


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(
    words=st.lists(
        st.tuples(st.sampled_from(["", "~", "+", "-"]), st.sampled_from("abcdefgh")), max_size=60
    ),
    capacity=st.integers(1, 5),
)
def test_ranks_are_unique_and_every_change_is_told(
    name: str, words: list[tuple[str, str]], capacity: int
) -> None:
    policy: Policy = POLICIES[name](capacity)
    present: list[str] = []  # for Lru: in order of leaving
    ranks: dict[str, tuple[int, int]] = {}
    given_once: set[tuple[int, int]] = set()
    for sign, key in words:
        if (sign == "+") == (key in present):
            continue
        if sign == "-":
            policy.discard(key)
            del ranks[key]
        else:
            call = {"": policy.use, "~": policy.refresh, "+": policy.add}[sign]
            changed = call(key)
            assert key in changed
            for each in set(changed):
                ranks[each] = policy.rank(each)
                assert ranks[each] not in given_once
                given_once.add(ranks[each])
        present = [each for each in present if each != key] + [key] * (sign != "-")
        assert {each: policy.rank(each) for each in present} == ranks
        assert name != "lru" or sorted(present, key=policy.rank) == present
