"""A request as the controller knows it: what it asks for, and where it stands (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from vllm_kvpool.router.control.states import ReplicaId

RequestId = NewType("RequestId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a client."""

    request_id: RequestId
    prompt_tokens: int
    """Exact, or estimated from the prompt's bytes."""
    max_output_tokens: int
    """What the client asks for at most, of each choice."""
    model: str = ""
    """The name that replicas list it by, or an adapter's; empty: whichever they serve."""
    num_choices: int = 1
    prefix: tuple[int, ...] = ()
    """Hashes of ever longer beginnings of the prompt, shortest first."""
    prefix_tokens: int = 0
    """Tokens that one entry of `prefix` stands for."""
    hands_over: bool = True
    """Whether it may be computed on one replica and decoded on another."""
    priority: int = 0
    """Lower goes first, as in vLLM."""
    deadline: float = float("inf")
    """On the controller's clock: when it is not worth starting any more."""


class PromptPath(Enum):
    """Where a prompt is computed, and why there."""

    HANDED_OVER = "handed_over"  # on a prefill replica, then handed over
    FASTER_LOCALLY = "faster_locally"  # by the estimates: it is short, say
    IN_POOL = "in_pool"  # as faster_locally, because the pool has most of it
    NOT_SPLITTABLE = "not_splittable"  # the request needs one engine for all of it
    NO_PREFILL_REPLICA = "no_prefill_replica"
    POOL_DOWN = "pool_down"
    SWITCHED_OFF = "switched_off"  # flow.hands_over is false
    SPILLED = "spilled"  # prefill replicas were behind
    REJECTED = "rejected"  # by the prefill replica; the client reads why in the answer


class Phase(Enum):
    """Where a request stands."""

    QUEUED = "queued"  # waits for a replica that computes its prompt
    BOUND = "bound"  # waits for one that is loading
    PREFILLING = "prefilling"
    HANDING = "handing"  # its prompt is in the pool; waits for a replica that decodes
    DECODING = "decoding"  # a replica has all of it: decodes, or does both
    DONE = "done"
    REFUSED = "refused"
    CANCELLED = "cancelled"


class Turn(Enum):
    """What moves a request on."""

    BIND = "bind"
    UNBIND = "unbind"
    PREFILL = "prefill"
    HAND = "hand"
    REQUEUE = "requeue"
    DECODE = "decode"
    FINISH = "finish"
    REFUSE = "refuse"
    CANCEL = "cancel"


_P, _T = Phase, Turn

PHASES: Mapping[tuple[Phase, Turn], Phase] = {
    (_P.QUEUED, _T.BIND): _P.BOUND,
    (_P.QUEUED, _T.PREFILL): _P.PREFILLING,
    (_P.QUEUED, _T.HAND): _P.HANDING,  # short, or known to be in the pool
    (_P.BOUND, _T.PREFILL): _P.PREFILLING,
    (_P.BOUND, _T.UNBIND): _P.QUEUED,
    (_P.PREFILLING, _T.HAND): _P.HANDING,
    (_P.PREFILLING, _T.REQUEUE): _P.QUEUED,
    (_P.HANDING, _T.DECODE): _P.DECODING,
    (_P.DECODING, _T.HAND): _P.HANDING,  # its replica is gone: another goes on
    (_P.DECODING, _T.FINISH): _P.DONE,
    **{
        (phase, turn): end
        for phase in (_P.QUEUED, _P.BOUND, _P.PREFILLING, _P.HANDING, _P.DECODING)
        for turn, end in ((_T.REFUSE, _P.REFUSED), (_T.CANCEL, _P.CANCELLED))
    },
}
WAITS = frozenset({Phase.QUEUED, Phase.BOUND, Phase.HANDING})
ENDS = frozenset({Phase.DONE, Phase.REFUSED, Phase.CANCELLED})


class IllegalTurn(Exception):
    """A turn that the phase does not know; a bug of the router."""


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the controller from arrival to end."""

    ask: Ask
    arrived: float
    number: int
    """Order of arrival."""
    phase: Phase = Phase.QUEUED
    replica: ReplicaId | None = None
    """Who computes or decodes it, or is to, once loaded."""
    source: ReplicaId | None = None
    """Who has computed its prompt, while it waits to be handed over or decodes."""
    saved_tokens: int = 0
    """What the pool has, or will have, of it; the decoding replica waits for them."""
    attempts: int = 0
    """Replicas that have been given it, for whatever, and have failed."""
    num_lost: int = 0
    """Those of them that were lost with it before it had a token."""
    began: float = 0.0
    """When the present phase began."""
    waited_s: float = 0.0
    """In queues, for replicas."""
    path: PromptPath = PromptPath.HANDED_OVER
    """Meant, and final once it is being decoded."""
    cached_tokens: int | None = None
    """Of its prompt, what its prefill replica had not to compute; None without such a replica."""
    first_token: float | None = None
    uncached: int = 0
    """Of its prompt, when it last began to wait or was given to be decoded, what neither the pool
    was known to have nor an engine has saved."""
    output_tokens: int = 0
    """What replicas have answered that could not go on."""
    avoid: set[ReplicaId] = field(default_factory=set)
    """Replicas that have failed it."""

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower first."""
        return (self.ask.priority, self.number)

    def turn(self, turn: Turn, now: float) -> None:
        """Follow an edge; IllegalTurn where there is none."""
        before = self.phase
        try:
            self.phase = PHASES[self.phase, turn]
        except KeyError:
            raise IllegalTurn(f"{self.phase.value} does not know {turn.value}") from None
        if before in WAITS:
            self.waited_s += now - self.began
        self.began = now
