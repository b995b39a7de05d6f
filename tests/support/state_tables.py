"""Tables of states: for each state, the states that may follow it."""

from collections.abc import Callable, Collection, Mapping
from enum import Enum

import pytest

Table = Mapping[Enum, Collection[Enum]]


def pairs_of(*firsts: Enum) -> list[tuple[Enum, Enum]]:
    """Return every pair of states of these states' enumerations."""
    return [(old, new) for first in firsts for old in type(first) for new in type(first)]


def assert_moves_along(
    table: Table, move: Callable[[Enum, Enum], Enum], old: Enum, new: Enum
) -> None:
    """Assert that a state moves to another if the table has it, and raises if not."""
    if old is new or new in table[old]:
        assert move(old, new) is new
        return
    with pytest.raises(AssertionError):
        move(old, new)


def reached_from(table: Table, first: Enum) -> set[Enum]:
    """Return the states that a table leads to from a state, and the state itself."""
    reached, left = {first}, [first]
    while left:
        new = set(table[left.pop()]) - reached
        reached |= new
        left += new
    return reached
