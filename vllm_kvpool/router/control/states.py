"""The states of a replica, and the edges between them (pure).

Everything that changes a replica's state goes through `EDGES`; what is not in it is illegal, raises
and changes nothing. States and edges are those of BlitzScale's replicas (OSDI 2025) as far as stock
engines can be in them, with quarantine and failure added.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NewType

MAX_REPLICAS = 1024
"""Limit of one router."""
ReplicaId = NewType("ReplicaId", str)


class Role(Enum):
    """The work that a replica is for. The router alone chooses it: the engine does not know."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> "Role":
        """The other role."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


class Goal(Enum):
    """The wish of people or of the plan for a replica, whatever its state."""

    __hash__ = object.__hash__  # much faster than Enum's, which is Python

    PREFILL = "prefill"
    DECODE = "decode"
    STANDBY = "standby"  # without work; plans may use it
    HOLD = "hold"  # without work by a person's order; plans leave it alone
    REMOVE = "remove"  # without work, then forgotten

    @staticmethod
    def serve(role: Role) -> "Goal":
        """Return the goal to serve in `role`."""
        return Goal.PREFILL if role is Role.PREFILL else Goal.DECODE

    @property
    def role(self) -> Role | None:
        """The role to serve; None if the replica is to have no work."""
        return _ROLES.get(self)

    @property
    def is_final(self) -> bool:
        """True if a person's order may end the engine as soon as it has no work."""
        return self in (Goal.HOLD, Goal.REMOVE)


_ROLES = {Goal.PREFILL: Role.PREFILL, Goal.DECODE: Role.DECODE}


class State(Enum):
    """States of a replica: BlitzScale's name, and the word for people.

    The log, the status page, the administration's routes and the metrics use the word.
    """

    __hash__ = object.__hash__  # much faster than Enum's, which is Python

    INACTIVE = "inactive"  # no process, or one that sleeps
    LOADING_PREFILL = "loading_prefill"
    LOADING_DECODE = "loading_decode"
    NEW_PREFILL = "loading_prefill_assigned"  # loading, and requests are assigned to it already
    REFRACTORY_PREFILL = "prefill_assigned"  # loaded; still computes the assigned requests
    PREFILL = "prefill"
    OLD_PREFILL = "prefill_stealing"  # serving, and may steal from a new one
    AUS_PREFILL = "warming_prefill"  # the step between standby and prefill
    DECODE = "decode"
    AUS_DECODE = "warming_decode"  # the step between standby and decode
    MUTATING_TO_DECODE = "prefill_to_decode"
    SHUTTING_PREFILL = "draining_prefill"
    SHUTTING_DECODE = "draining_decode"
    SHUTTING_NULL = "standby"  # loaded, without work
    FAILED = "failed"  # until it has answered again
    QUARANTINED = "quarantined"  # has failed too often


class Cause(Enum):
    """A cause for which a replica changes its state."""

    LOAD_PREFILL = "load_prefill"
    LOAD_DECODE = "load_decode"
    TAKE_OVER = "take_over"
    LOADED = "loaded"
    GIVE_UP = "give_up"  # loading is not wanted any more
    RELAYED = "relayed"  # what it was bound to is done or has been stolen
    PAIR = "pair"
    UNPAIR = "unpair"
    MUTATE = "mutate"
    FLUSHED = "flushed"
    DEACTIVATE = "deactivate"
    REVIVE = "revive"
    DRAINED = "drained"
    USE_PREFILL = "use_prefill"
    USE_DECODE = "use_decode"
    READY = "ready"
    EXPIRE = "expire"
    FAIL = "fail"
    QUARANTINE = "quarantine"
    RETRY = "retry"  # the quarantine is over
    RESET = "reset"


class IllegalEdge(Exception):
    """A cause that the state does not know; a bug of the router."""


_S, _C = State, Cause

EDGES: Mapping[tuple[State, Cause], State] = {
    (_S.INACTIVE, _C.LOAD_PREFILL): _S.LOADING_PREFILL,
    (_S.INACTIVE, _C.LOAD_DECODE): _S.LOADING_DECODE,
    (_S.INACTIVE, _C.TAKE_OVER): _S.NEW_PREFILL,
    (_S.LOADING_PREFILL, _C.LOADED): _S.PREFILL,
    (_S.LOADING_PREFILL, _C.GIVE_UP): _S.INACTIVE,
    (_S.LOADING_DECODE, _C.LOADED): _S.AUS_DECODE,
    (_S.LOADING_DECODE, _C.GIVE_UP): _S.INACTIVE,
    (_S.NEW_PREFILL, _C.LOADED): _S.REFRACTORY_PREFILL,
    (_S.NEW_PREFILL, _C.GIVE_UP): _S.INACTIVE,
    (_S.REFRACTORY_PREFILL, _C.RELAYED): _S.PREFILL,
    (_S.PREFILL, _C.PAIR): _S.OLD_PREFILL,
    (_S.OLD_PREFILL, _C.UNPAIR): _S.PREFILL,
    (_S.PREFILL, _C.MUTATE): _S.MUTATING_TO_DECODE,
    (_S.MUTATING_TO_DECODE, _C.FLUSHED): _S.DECODE,
    (_S.PREFILL, _C.DEACTIVATE): _S.SHUTTING_PREFILL,
    (_S.SHUTTING_PREFILL, _C.REVIVE): _S.PREFILL,
    (_S.SHUTTING_PREFILL, _C.DRAINED): _S.SHUTTING_NULL,
    (_S.DECODE, _C.DEACTIVATE): _S.SHUTTING_DECODE,
    (_S.SHUTTING_DECODE, _C.REVIVE): _S.AUS_DECODE,
    (_S.SHUTTING_DECODE, _C.DRAINED): _S.SHUTTING_NULL,
    (_S.SHUTTING_NULL, _C.USE_PREFILL): _S.AUS_PREFILL,
    (_S.SHUTTING_NULL, _C.USE_DECODE): _S.AUS_DECODE,
    (_S.SHUTTING_NULL, _C.EXPIRE): _S.INACTIVE,
    (_S.AUS_PREFILL, _C.READY): _S.PREFILL,
    (_S.AUS_DECODE, _C.READY): _S.DECODE,
    (_S.FAILED, _C.QUARANTINE): _S.QUARANTINED,
    (_S.FAILED, _C.USE_PREFILL): _S.AUS_PREFILL,
    (_S.FAILED, _C.USE_DECODE): _S.AUS_DECODE,
    (_S.FAILED, _C.RESET): _S.INACTIVE,
    (_S.QUARANTINED, _C.RETRY): _S.FAILED,
    (_S.QUARANTINED, _C.RESET): _S.INACTIVE,
    **{
        (state, _C.FAIL): _S.FAILED for state in State if state not in (_S.INACTIVE, _S.QUARANTINED)
    },
}


def follow(state: State, cause: Cause) -> State:
    """Return the state that `cause` leads to; IllegalEdge where there is no such edge."""
    try:
        return EDGES[state, cause]
    except KeyError:
        raise IllegalEdge(f"{state.value} does not know {cause.value}") from None


LOADING = frozenset({State.LOADING_PREFILL, State.LOADING_DECODE, State.NEW_PREFILL})
TAKES_PREFILL = frozenset({State.PREFILL, State.OLD_PREFILL})
"""States whose replicas may be given prompts from the common queue."""
TAKES_DECODE = frozenset({State.DECODE})
"""States whose replicas may be given requests to decode."""
DRAINING = frozenset({State.SHUTTING_PREFILL, State.SHUTTING_DECODE, State.MUTATING_TO_DECODE})
HAS_BOUND = frozenset({State.NEW_PREFILL, State.REFRACTORY_PREFILL})
"""States whose replicas may have requests bound to them."""
BROKEN = frozenset({State.FAILED, State.QUARANTINED})
MAY_WORK = frozenset(State) - LOADING - BROKEN - {State.INACTIVE, State.SHUTTING_NULL}
"""States whose replicas may have work, new or old."""
UP = frozenset(State) - LOADING - BROKEN - {State.INACTIVE}
"""States in which the engine answers, as far as the router knows."""

ROLE_OF: Mapping[State, Role | None] = {
    **dict.fromkeys(State, None),
    **dict.fromkeys(
        (
            *(State.LOADING_PREFILL, State.NEW_PREFILL, State.REFRACTORY_PREFILL, State.PREFILL),
            *(State.OLD_PREFILL, State.AUS_PREFILL, State.SHUTTING_PREFILL),
        ),
        Role.PREFILL,
    ),
    **dict.fromkeys(
        (
            *(State.LOADING_DECODE, State.AUS_DECODE, State.DECODE, State.SHUTTING_DECODE),
            State.MUTATING_TO_DECODE,
        ),
        Role.DECODE,
    ),
}
