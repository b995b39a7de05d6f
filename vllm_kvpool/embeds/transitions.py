"""Transition tables of state machines (pure)."""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalEvent(Exception):
    """The state does not know this event: a bug of ours, never of a peer."""


class IdentityEnum(Enum):
    """An enum hashed by identity; Enum's own hash is a Python call, and an item would cost ten."""

    __hash__ = object.__hash__


class TransitionTable(Generic[S, E]):
    """For each state, the events that it knows and the state that follows."""

    def __init__(self, name: str, edges: Mapping[S, Mapping[E, S]]) -> None:
        self.name = name
        self.edges = edges

    def after(self, state: S, event: E) -> S:
        """The state that follows; IllegalEvent if there is none."""
        following = self.edges[state].get(event)
        if following is None:
            raise IllegalEvent(f"{self.name}: {event.value} while {state.value}")
        return following
