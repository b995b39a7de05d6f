"""The states of a transfer, on both sides, as tables (pure).

Other designs know five of them by the same names: bootstrapping, waiting, transferring, success and
failed. Partial, suspended and cancelled stand beside them, and memory that may still be written to
is quarantined. An event that its state does not know raises and changes nothing.

| state | consumer | producer |
|---|---|---|
| bootstrapping | somebody waits for it, nobody has offered it | to be offered, no session yet |
| waiting | offered, no rows granted | offered, no rows granted |
| transferring | a grant is out, or its rows are being drained | a write is due or under way |
| partial | rows are missing and no grant is out | all that was granted is written |
| suspended | whoever sent it is lost; the rows that are here stay | the consumer is lost |
| success | every row is here and checked | the consumer has every row |
| failed, cancelled | told to whoever waits; the item is forgotten | the source is not kept for it |
"""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar


class IllegalEvent(Exception):
    """An event that cannot happen in this state: a bug of ours, never of a peer."""


class Named(Enum):
    """Members are looked up by identity: Enum's own hash is a call of Python, ten for an item."""

    __hash__ = object.__hash__


class State(Named):
    """Of a transfer."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING = "waiting"
    TRANSFERRING = "transferring"
    PARTIAL = "partial"
    SUSPENDED = "suspended"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset((State.SUCCESS, State.FAILED, State.CANCELLED))


class ItemEvent(Named):
    """What happens to an item at its consumer."""

    OFFERED = "offered"
    GRANTED = "granted"
    LANDED = "landed"
    DRY = "dry"
    """The last grant has ended and rows are missing."""
    FILLED = "filled"
    LOST = "lost"
    """Nobody who offered it is there."""
    FAIL = "fail"
    CANCEL = "cancel"


class SendEvent(Named):
    """What happens to a transfer at its producer."""

    OFFER = "offer"
    GRANTED = "granted"
    WRITTEN = "written"
    """All that was granted is written."""
    TAKEN = "taken"
    """The consumer has every row."""
    LOST = "lost"
    FAIL = "fail"
    CANCEL = "cancel"


class GrantState(Named):
    """Of memory granted to a producer."""

    GRANTED = "granted"
    REVOKED = "revoked"
    """Called back; the producer may still use it until it answers."""
    DRAINING = "draining"
    RELEASED = "released"
    QUARANTINED = "quarantined"
    """May still be written to; out of use for a time."""


class GrantEvent(Named):
    """What happens to a grant."""

    REVOKE = "revoke"
    WROTE = "wrote"
    DRAINED = "drained"
    CORRUPT = "corrupt"
    QUIET = "quiet"
    """Certainly nothing is, or will be, written."""
    UNSURE = "unsure"
    """Nobody can say."""


_B, _W, _T, _P = State.BOOTSTRAPPING, State.WAITING, State.TRANSFERRING, State.PARTIAL
_S, _OK, _F, _C = State.SUSPENDED, State.SUCCESS, State.FAILED, State.CANCELLED
_I, _O, _G = ItemEvent, SendEvent, GrantEvent

CONSUMER: Mapping[State, Mapping[ItemEvent, State]] = {
    _B: {_I.OFFERED: _W, _I.FAIL: _F, _I.CANCEL: _C},
    _W: {_I.GRANTED: _T, _I.LOST: _S, _I.FAIL: _F, _I.CANCEL: _C},
    _T: {
        **{_I.GRANTED: _T, _I.LANDED: _T, _I.DRY: _P, _I.FILLED: _OK},
        **{_I.LOST: _S, _I.FAIL: _F, _I.CANCEL: _C},
    },
    _P: {_I.GRANTED: _T, _I.FILLED: _OK, _I.LOST: _S, _I.FAIL: _F, _I.CANCEL: _C},
    # Rows that had landed before the sender was lost are still drained.
    _S: {_I.OFFERED: _P, _I.LANDED: _S, _I.FILLED: _OK, _I.FAIL: _F, _I.CANCEL: _C},
    _OK: {_I.CANCEL: _C, _I.FAIL: _F},
    _F: {},
    _C: {},
}
PRODUCER: Mapping[State, Mapping[SendEvent, State]] = {
    _B: {_O.OFFER: _W, _O.FAIL: _F, _O.CANCEL: _C},
    _W: {_O.GRANTED: _T, _O.TAKEN: _OK, _O.LOST: _S, _O.FAIL: _F, _O.CANCEL: _C},
    _T: {
        **{_O.GRANTED: _T, _O.WRITTEN: _P, _O.TAKEN: _OK},
        **{_O.LOST: _S, _O.FAIL: _F, _O.CANCEL: _C},
    },
    _P: {_O.GRANTED: _T, _O.TAKEN: _OK, _O.LOST: _S, _O.FAIL: _F, _O.CANCEL: _C},
    _S: {_O.OFFER: _W, _O.FAIL: _F, _O.CANCEL: _C},
    _OK: {},
    _F: {},
    _C: {},
}
_GG, _GR, _GD = GrantState.GRANTED, GrantState.REVOKED, GrantState.DRAINING
_GX, _GQ = GrantState.RELEASED, GrantState.QUARANTINED
GRANTS: Mapping[GrantState, Mapping[GrantEvent, GrantState]] = {
    _GG: {_G.REVOKE: _GR, _G.WROTE: _GD, _G.QUIET: _GX, _G.UNSURE: _GQ},
    # What has been written all the same is of no use to anybody.
    _GR: {_G.QUIET: _GX, _G.UNSURE: _GQ},
    # Its writer has ended: what becomes of the peer no longer matters.
    _GD: {_G.DRAINED: _GX, _G.CORRUPT: _GQ},
    _GX: {},
    # Its writer was lost, and has come back and said that it has ended.
    _GQ: {_G.QUIET: _GX},
}

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Table(Generic[S, E]):
    """A transition table under a name."""

    def __init__(self, name: str, edges: Mapping[S, Mapping[E, S]]) -> None:
        self.name = name
        self.edges = edges

    def after(self, state: S, event: E) -> S:
        """The state that follows; IllegalEvent if there is none."""
        following = self.edges[state].get(event)
        if following is None:
            raise IllegalEvent(f"{self.name}: {event.value} while {state.value}")
        return following


CONSUMER_TABLE = Table("item", CONSUMER)
PRODUCER_TABLE = Table("transfer", PRODUCER)
GRANT_TABLE = Table("grant", GRANTS)
