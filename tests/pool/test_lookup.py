"""The search for a stored prefix: right for every length, in few rounds; and what ranks hold."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.keys import (
    CellKey,
    ContextRank,
    HeadPart,
    ParsedKey,
    RankPart,
    group_of_key,
    in_epoch,
    make_namespace,
)
from vllm_kvpool.layout.topology import Topology
from vllm_kvpool.pool.lookup import FANOUT, CellNames, HostMirror, PrefixSearch
from vllm_kvpool.transfer.ops import HostChange

MAX_CHUNKS = 600
NAMESPACE = make_namespace("model", "0" * 12)


def search(present: list[bool]) -> tuple[int, int]:
    """What is found, and in how many rounds."""
    state = PrefixSearch(len(present))
    asked: set[int] = set()
    rounds = 0
    while not state.done:
        questions = state.questions()
        assert questions
        assert list(questions) == sorted(set(questions) - asked)
        assert len(questions) <= FANOUT
        asked.update(questions)
        before = state.found
        state.tell(questions, [present[q] for q in questions])
        assert state.found >= before
        rounds += 1
    assert state.questions() == ()
    return state.found, rounds


def max_rounds(num_chunks: int) -> int:
    """The two ends first, then 1 / (FANOUT + 1) of what is left each round."""
    return 2 + math.ceil(math.log(max(1, num_chunks), FANOUT + 1))


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 3, 4, 5, 6, 7, 63, 64, 65, MAX_CHUNKS])
def test_every_stored_length_is_found(num_chunks: int) -> None:
    for stored in range(num_chunks + 1):
        found, rounds = search([True] * stored + [False] * (num_chunks - stored))
        assert found == stored
        assert rounds <= max_rounds(num_chunks)


def test_lengths_up_to_the_longest_are_found() -> None:
    for num_chunks in range(0, MAX_CHUNKS + 1, 7):
        for stored in {0, 1, num_chunks // 3, num_chunks // 2, num_chunks - 1, num_chunks}:
            if 0 <= stored <= num_chunks:
                found, rounds = search([True] * stored + [False] * (num_chunks - stored))
                assert found == stored
                assert rounds <= max_rounds(num_chunks)


def test_all_and_nothing_take_one_round() -> None:
    for num_chunks in range(1, 100):
        assert search([True] * num_chunks) == (num_chunks, 1)
        assert search([False] * num_chunks) == (0, 1)
    assert search([]) == (0, 0)


def test_the_first_round_asks_for_both_ends() -> None:
    assert PrefixSearch(10).questions() == (0, 9)
    assert PrefixSearch(1).questions() == (0,)
    state = PrefixSearch(18)
    state.tell((0, 17), (True, False))
    assert state.questions() == (3, 5, 7, 9, 11, 13, 15)


@given(st.lists(st.booleans(), max_size=80))
def test_holes_still_end_at_a_chunk_that_is_there(present: list[bool]) -> None:
    found, rounds = search(present)
    assert rounds <= max_rounds(len(present))
    assert found == 0 or (present[0] and present[found - 1])
    assert found == len(present) or not present[found]


@pytest.mark.parametrize("per_head", [True, False])
def test_a_chunk_is_every_head_span_and_context_rank(per_head: bool) -> None:
    topology = Topology(4, 2, ((0, 3), (3, 5)), 2, per_head)
    names = CellNames(NAMESPACE, topology, ContextRank(0, 2, 1, 3))
    keys = [ParsedKey.parse(key) for key in names.of_chunk(b"\xaa")]
    parts = [HeadPart(h) for h in range(4)] if per_head else [RankPart(r, 2) for r in range(2)]
    contexts = [ContextRank(p, 2, d, 3) for p in range(2) for d in range(3)]
    expected = {
        ParsedKey(NAMESPACE, context, part, span, b"\xaa")
        for context in contexts
        for span in topology.all_spans()
        for part in parts
    }
    assert set(keys) == expected
    assert len(keys) == len(expected)


def test_an_epoch_has_the_same_cells_by_other_names() -> None:
    topology = Topology(4, 2, ((0, 3), (3, 5)), 2)
    names = CellNames(NAMESPACE, topology, ContextRank(0, 2, 1, 3))
    assert names.in_epoch("") is names
    other = names.in_epoch("a")
    assert other.namespace == in_epoch(NAMESPACE, "a")
    assert other.per_chunk == names.per_chunk
    expected = [replace(ParsedKey.parse(key), namespace=other.namespace) for key in of(names)]
    assert [ParsedKey.parse(key) for key in of(other)] == expected
    assert {group_of_key(key) for key in of(other)} == {other.group(b"\xaa")}
    assert other.group(b"\xaa") != names.group(b"\xaa")
    assert of(names.in_epoch("a")) == of(other) != of(names.in_epoch("b"))


def of(names: CellNames) -> list[CellKey]:
    return names.of_chunk(b"\xaa")


# Host memory of the ranks

CHUNKS = ["a", "b", "c", "d", "e"]


def change(added: str = "", removed: str = "") -> HostChange:
    """Of chunks by their digits."""
    groups = [tuple(CHUNKS[int(digit)] for digit in digits) for digits in (added, removed)]
    return HostChange(*groups)


def test_a_chunk_is_here_once_every_rank_has_it() -> None:
    mirror = HostMirror(3)
    for rank in (0, 1, 1, 2):
        assert not mirror.has(CHUNKS[1])
        mirror.apply(rank, change("1"))
    assert mirror.has(CHUNKS[1])
    assert not mirror.has(CHUNKS[2])
    mirror.apply(1, change(removed="1"))
    assert not mirror.has(CHUNKS[1])
    mirror.apply(1, change("1"))
    assert mirror.has(CHUNKS[1])
    mirror.clear()
    assert not mirror.has(CHUNKS[1])


def test_removing_what_is_not_there_is_nothing() -> None:
    mirror = HostMirror(2)
    mirror.apply(0, change("1"))
    mirror.apply(1, change(removed="1"))
    mirror.apply(0, change(removed="2"))
    mirror.apply(1, change("1"))
    assert mirror.has(CHUNKS[1])


def test_a_chunk_that_nobody_has_leaves_nothing_behind() -> None:
    mirror = HostMirror(2)
    for rank in (0, 1):
        mirror.apply(rank, change("01234"))
        mirror.apply(rank, change(removed="01234"))
    assert mirror._ranks_of == {}


def test_without_host_memory_nothing_is_here() -> None:
    assert not HostMirror(0).has(CHUNKS[1])
