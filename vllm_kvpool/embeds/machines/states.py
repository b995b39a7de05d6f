"""States of an item's transfer and of a grant, and which of them may follow each (pure)."""

from enum import Enum

from vllm_kvpool.transitions import TransitionTable


class TransferState(Enum):
    """States of an item at one rank of a consumer; docs/embeddings.md has the diagram.

    Of SGLang's KVPoll, Bootstrapping, WaitingForInput, Success and Failed are the states
    BOOTSTRAPPING, WAITING, SUCCESS and FAILED; Transferring is TRANSFERRING, PARTIAL or SUSPENDED.
    """

    BOOTSTRAPPING = "bootstrapping"
    """No producer has offered the item."""
    WAITING = "waiting"
    """Offered; no row is received or granted."""
    TRANSFERRING = "transferring"
    """Rows are granted, written, or being copied out."""
    PARTIAL = "partial"
    """Some rows are received, and none of the missing rows is granted."""
    SUSPENDED = "suspended"
    """The sender is lost; the rows received are kept."""
    SUCCESS = "success"
    """Every row is received and verified."""
    FAILED = "failed"
    """The item cannot be received; reported to the own scheduler."""
    CANCELLED = "cancelled"
    """No request waits for the item any more, or another encoding of it is asked for."""


class GrantState(Enum):
    """States of a part of the window that is granted to a producer."""

    GRANTED = "granted"
    REVOKED = "revoked"
    """Revoked; the producer may still use it until it answers."""
    DRAINING = "draining"
    """Its write has ended, so the loss of the peer changes nothing."""
    UNRESOLVED = "unresolved"
    """In quarantine, and its producer may still report the end of the write."""
    QUARANTINED = "quarantined"
    """Out of use until any write to it has been given up."""
    FREE = "free"


_T, _G = TransferState, GrantState
_ENDS = {_T.FAILED, _T.CANCELLED}
_NO_WRITER = {_G.UNRESOLVED, _G.QUARANTINED, _G.FREE}
TRANSITIONS = TransitionTable(
    {
        _T.BOOTSTRAPPING: {_T.WAITING, *_ENDS},
        _T.WAITING: {_T.TRANSFERRING, _T.SUSPENDED, *_ENDS},
        _T.TRANSFERRING: {_T.WAITING, _T.PARTIAL, _T.SUSPENDED, _T.SUCCESS, *_ENDS},
        _T.PARTIAL: {_T.WAITING, _T.TRANSFERRING, _T.SUSPENDED, *_ENDS},
        _T.SUSPENDED: {_T.WAITING, _T.PARTIAL, _T.SUCCESS, *_ENDS},
        _T.SUCCESS: _ENDS,
        _T.FAILED: {},
        _T.CANCELLED: {},
        _G.GRANTED: {_G.REVOKED, _G.DRAINING, *_NO_WRITER},
        _G.REVOKED: _NO_WRITER,
        _G.DRAINING: {_G.QUARANTINED, _G.FREE},
        _G.UNRESOLVED: {_G.QUARANTINED, _G.FREE},
        _G.QUARANTINED: {_G.FREE},
        _G.FREE: {},
    }
)
moved = TRANSITIONS.moved
