"""Tables of states: for each state, the states that may follow it (pure)."""

from collections.abc import Collection
from enum import Enum
from typing import TypeVar

State = TypeVar("State", bound=Enum)


class TransitionTable(dict[Enum, Collection[Enum]]):
    """The states that may follow each. A state may always be set again."""

    def moved(self, old: State, new: State) -> State:
        """Return the new state; AssertionError if it may not follow the old one."""
        assert new is old or new in self[old], (old, new)
        return new
