"""Which beginnings of prompts are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.router.control.prefixes import PrefixMemory


def chain(root: int, length: int) -> tuple[int, ...]:
    return tuple(root * 1000 + number for number in range(length))


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=30),
    st.integers(1, 20),
)
def test_what_is_kept_is_whole_beginnings(adds: list[tuple[int, int]], max_hashes: int) -> None:
    memory = PrefixMemory(max_hashes)
    for root, length in adds:
        memory.add(chain(root, length))
        assert len(memory) <= max_hashes
        assert memory.match(chain(root, length)) == min(length, max_hashes)
    for root in range(1, 5):
        known = [memory.match(chain(root, 12)[:length]) for length in range(13)]
        assert known == [min(length, known[-1]) for length in range(13)]


@pytest.mark.parametrize(
    ("prefix", "known"),
    [((), 0), ((1,), 1), ((1, 2, 3), 3), ((1, 2, 3, 4), 3), ((1, 9), 1), ((9, 2), 0)],
)
def test_the_longest_known_beginning_counts(prefix: tuple[int, ...], known: int) -> None:
    memory = PrefixMemory(100)
    memory.add((1, 2, 3))
    assert memory.match(prefix) == known


def test_what_was_not_seen_for_longest_is_forgotten_its_end_first() -> None:
    memory = PrefixMemory(4)
    memory.add(chain(1, 2))
    memory.add(chain(2, 2))
    memory.add(chain(1, 2))
    memory.add(chain(3, 1))
    assert [memory.match(chain(root, 2)) for root in (1, 2, 3)] == [2, 1, 1]


def test_nothing_is_known_once_it_is_cleared() -> None:
    memory = PrefixMemory(4)
    memory.add((1, 2))
    memory.clear()
    assert (len(memory), memory.match((1, 2))) == (0, 0)
