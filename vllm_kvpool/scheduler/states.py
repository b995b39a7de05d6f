"""States of a request in the scheduler, and which of them may follow each (pure)."""

from enum import Enum

from vllm_kvpool.transitions import TransitionTable


class LookupState(Enum):
    """The state of a request's newest lookup."""

    PENDING = "pending"
    LATE = "late"
    """The request goes on without the answer, which still brings the hashes of its chunks."""
    UNNAMED = "unnamed"
    """The request has ended; its hand-over cannot end before its prompt is hashed."""
    ENDED = "ended"


class AdmissionState(Enum):
    """A request's way to its blocks and its first step, again after each preemption."""

    QUEUED = "queued"
    MATCHED = "matched"
    """vLLM knows how many tokens can be loaded, and has had no blocks since."""
    ALLOCATED = "allocated"
    """vLLM has allocated blocks since the last plan."""
    WAITING = "waiting"
    """A plan has left out the request, for which the pool or another connector loads."""
    LOADED = "loaded"
    """The pool's load has ended; vLLM has not taken up the request since."""
    RUNNING = "running"


class RetryState(Enum):
    """The state of a request's second try after a failed load."""

    NONE = "none"
    LIMITED = "limited"
    """A load has failed, and vLLM goes on from the first missing block."""
    DUE = "due"
    """A load has failed, and vLLM starts the request again: look anew."""
    DONE = "done"
    """The request was looked up anew, which happens once."""


_L, _A, _R = LookupState, AdmissionState, RetryState
TRANSITIONS = TransitionTable(
    {
        _L.PENDING: {_L.LATE, _L.UNNAMED, _L.ENDED},
        _L.LATE: {_L.UNNAMED, _L.ENDED},
        _L.UNNAMED: {_L.ENDED},
        _L.ENDED: {},
        _A.QUEUED: {_A.MATCHED, _A.ALLOCATED},
        _A.MATCHED: {_A.ALLOCATED},
        _A.ALLOCATED: {_A.WAITING, _A.RUNNING, _A.QUEUED},
        _A.WAITING: {_A.LOADED, _A.RUNNING, _A.QUEUED},
        _A.LOADED: {_A.WAITING, _A.RUNNING, _A.QUEUED},
        _A.RUNNING: {_A.QUEUED, _A.ALLOCATED},
        _R.NONE: {_R.LIMITED, _R.DUE},
        _R.LIMITED: {_R.DONE},
        _R.DUE: {_R.DONE},
        _R.DONE: {},
    }
)
moved = TRANSITIONS.moved
