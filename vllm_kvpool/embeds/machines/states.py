"""Transition tables: an item's transfer at its consumer and at its producer, and a grant (pure).

An event that a state does not know raises IllegalEvent and changes nothing.
"""

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


class TransferState(IdentityEnum):
    """States of an item's transfer; docs/embeddings.md names them."""

    BOOTSTRAPPING = "bootstrapping"
    """Requested and not offered; at the producer: no session yet."""
    WAITING = "waiting"
    """Offered, no rows granted."""
    TRANSFERRING = "transferring"
    """Rows are granted or being drained; at the producer: a write is due or under way."""
    PARTIAL = "partial"
    """Rows are missing and none are granted; at the producer: all that was granted is written."""
    SUSPENDED = "suspended"
    """The other side is lost; rows received stay."""
    SUCCESS = "success"
    """The consumer has every row, verified."""
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset((TransferState.SUCCESS, TransferState.FAILED, TransferState.CANCELLED))


class ItemEvent(IdentityEnum):
    """Events of an item at its consumer."""

    OFFERED = "offered"
    GRANTED = "granted"
    LANDED = "landed"
    IDLE = "idle"
    """The last grant has ended and rows are missing."""
    FILLED = "filled"
    LOST = "lost"
    """No producer that offered it is reachable."""
    FAIL = "fail"
    CANCEL = "cancel"


class TransferEvent(IdentityEnum):
    """Events of a transfer at its producer."""

    OFFER = "offer"
    GRANTED = "granted"
    WRITTEN = "written"
    """All that was granted is written."""
    TAKEN = "taken"
    """The consumer has every row."""
    LOST = "lost"
    FAIL = "fail"
    CANCEL = "cancel"


class GrantState(IdentityEnum):
    """States of a part of the window that is granted to a producer."""

    GRANTED = "granted"
    REVOKED = "revoked"
    """Revoked; the producer may still use it until it answers."""
    DRAINING = "draining"
    RELEASED = "released"
    QUARANTINED = "quarantined"
    """May still be written to, so it is not reused for `quarantine_s`."""


class GrantEvent(IdentityEnum):
    """Events of a grant."""

    REVOKE = "revoke"
    WROTE = "wrote"
    DRAINED = "drained"
    CORRUPT = "corrupt"
    QUIESCED = "quiesced"
    """Nothing writes to it, now or later."""
    UNKNOWN = "unknown"
    """It is not known whether something still writes to it."""


_B, _W, _T, _P = (
    TransferState.BOOTSTRAPPING,
    TransferState.WAITING,
    TransferState.TRANSFERRING,
    TransferState.PARTIAL,
)
_S, _OK, _F, _C = (
    TransferState.SUSPENDED,
    TransferState.SUCCESS,
    TransferState.FAILED,
    TransferState.CANCELLED,
)
_I, _O, _G = ItemEvent, TransferEvent, GrantEvent

CONSUMER_TABLE = TransitionTable(
    "item",
    {
        _B: {_I.OFFERED: _W, _I.FAIL: _F, _I.CANCEL: _C},
        _W: {_I.GRANTED: _T, _I.LOST: _S, _I.FAIL: _F, _I.CANCEL: _C},
        _T: {
            **{_I.GRANTED: _T, _I.LANDED: _T, _I.IDLE: _P},
            **{_I.LOST: _S, _I.FAIL: _F, _I.CANCEL: _C},
        },
        _P: {_I.GRANTED: _T, _I.FILLED: _OK, _I.LOST: _S, _I.FAIL: _F, _I.CANCEL: _C},
        # Rows that had landed before the sender was lost are still drained.
        _S: {_I.OFFERED: _P, _I.LANDED: _S, _I.FILLED: _OK, _I.FAIL: _F, _I.CANCEL: _C},
        _OK: {_I.CANCEL: _C, _I.FAIL: _F},
        _F: {},
        _C: {},
    },
)
PRODUCER_TABLE = TransitionTable(
    "transfer",
    {
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
    },
)
_GG, _GR, _GD = GrantState.GRANTED, GrantState.REVOKED, GrantState.DRAINING
_GX, _GQ = GrantState.RELEASED, GrantState.QUARANTINED
GRANT_TABLE = TransitionTable(
    "grant",
    {
        _GG: {_G.REVOKE: _GR, _G.WROTE: _GD, _G.QUIESCED: _GX, _G.UNKNOWN: _GQ},
        # Rows that were written before the producer heard of the revocation are not used.
        _GR: {_G.QUIESCED: _GX, _G.UNKNOWN: _GQ},
        # Its write has ended, so the loss of the peer changes nothing.
        _GD: {_G.DRAINED: _GX, _G.CORRUPT: _GQ},
        _GX: {},
        # The lost producer came back and reported the end of its write.
        _GQ: {_G.QUIESCED: _GX},
    },
)
