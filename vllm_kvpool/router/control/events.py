"""Events that the controller takes, and actions that it returns (values only).

`Controller.step(event) -> actions`: the router's loop performs actions and posts what comes of them
as events. Every `Prefill` and `Decode` is answered by exactly one `PrefillEnded` or `DecodeEnded`,
also when it was cancelled or its replica is gone. A request has one of each at a time, at two
replicas. Every `Load` is answered by `ReplicaLoaded` or `Failed`, unless another `Load` or a
`Retire` of that replica comes before. Actions of a replica may come while it is dead. Two `Failed`
for one end of an engine do no harm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec

from vllm_kvpool.router.control.handovers import ExpectedPrompts
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.states import ReplicaId, Role


class Outcome(Enum):
    """The end of a call to an engine."""

    OK = "ok"
    BUSY = "busy"  # it refuses work now (429, 503)
    REJECTED = "rejected"  # it does not want this request (another 4xx)
    FAILED = "failed"  # an answer that is not one of an engine, or of one that has failed
    UNREACHED = "unreached"  # there is no connection to it
    LOST = "lost"  # it had the request, and then said nothing more
    CANCELLED = "cancelled"  # because the client has gone
    HOPELESS = "hopeless"  # failed, and no other engine can go on with it


ANSWERED = (Outcome.OK, Outcome.REJECTED, Outcome.HOPELESS)
"""Ends of a call that decodes after which the client has all that it will get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """An engine that the router may use."""

    replica_id: ReplicaId
    url: str
    start: tuple[str, ...] = ()
    """The operator's command that starts its engine; empty: others start it."""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A reading of an engine's metrics. Counters grow until the engine restarts."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    pool_is_up: bool = True
    has_connector: bool = True
    """True if KVPoolConnector runs in the engine."""
    namespace: str = ""
    """Namespace of the engine's cells; empty until the engine has reported it."""
    chunk_tokens: int = 0
    pending_save_tokens: int | None = None
    """Tokens of unfinished saves; None if the engine's release does not count them."""
    expected: Mapping[str, ExpectedPrompts] | None = None
    """Prompts that it was to find in the pool, by the replica that saved them; None: its release
    does not count them."""
    notices: tuple[str, ...] | None = None
    """Endpoints at which its ranks tell what they have stored of a prompt; empty: none that are
    known to be of all its requests; None: its release has no notices."""


# Of requests


class RequestMessage(msgspec.Struct, frozen=True, gc=False):
    """An event or an action of a request that has arrived."""

    request_id: RequestId


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A client's request arrived and was accepted by the HTTP server."""

    ask: RequestSpec


class Cancelled(RequestMessage, frozen=True):
    """The client has gone."""


class PrefillEnded(RequestMessage, frozen=True, kw_only=True):
    """A prefill call to an engine ended, well or not."""

    replica: ReplicaId
    outcome: Outcome
    prompt_tokens: int = 0
    saved_tokens: int = 0
    """Prompt tokens that the engine saves, by its answer."""
    cached_tokens: int = 0


class DecodeBegan(RequestMessage, frozen=True):
    """The first token has come; or, not `is_seen`, an answer in one piece has been asked for."""

    is_seen: bool = True


class DecodeEnded(RequestMessage, frozen=True, kw_only=True):
    """A decode call to an engine ended, well or not."""

    replica: ReplicaId
    outcome: Outcome
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Tokens of this call alone."""
    began: bool = False
    """True if the first token came with the end, so that no `DecodeBegan` was sent."""


# Of replicas


class ReplicaEvent(msgspec.Struct, frozen=True):
    """An event of a replica, without effect once the replica has been removed."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A replica is there to be used; with a role it is loaded for it at once.

    ConfigError where there is one of that id or address already.
    """

    spec: ReplicaSpec
    role: Role | None = None


class ReplicaLoaded(ReplicaEvent, frozen=True):
    """A loading replica passed its health check and answered a test request."""


class Failed(ReplicaEvent, frozen=True):
    """A replica does not answer, has exited, or could not be loaded."""

    why: str


class Measured(ReplicaEvent, frozen=True):
    """The monitor read a replica's metrics."""

    sample: Sample


class ModelsListed(ReplicaEvent, frozen=True):
    """The names that an engine serves, adapters among them, have changed."""

    models: frozenset[str]


class SleepFailed(ReplicaEvent, frozen=True):
    """A replica was ordered to sleep, and did not release its memory."""

    why: str


class Warmed(ReplicaEvent, frozen=True):
    """A standby has answered the request that `Warm` has asked for."""


# Of people


class Drain(ReplicaEvent, frozen=True):
    """Let it end up without work, and leave it alone until it is given a role."""


class Remove(ReplicaEvent, frozen=True):
    """Drain it, then forget it."""


class SetRole(ReplicaEvent, frozen=True):
    """Give a replica a role, whatever state it is in; without effect while it is being removed."""

    role: Role


ASKED_BY_ADMIN = "asked for by the administrator"


class Mode(Enum):
    """Mode of the planner: manual and dry run make plans and do not carry them out."""

    MANUAL = "manual"
    DRY_RUN = "dry_run"
    AUTOMATIC = "automatic"


@dataclass(frozen=True, slots=True)
class SetMode:
    """An operator chose who plans the roles of replicas."""

    mode: Mode


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


RequestEvent = Cancelled | PrefillEnded | DecodeBegan | DecodeEnded
Event = Arrived | RequestEvent | Added | ReplicaEvent | SetMode | Tick


# Actions


class Prefill(RequestMessage, frozen=True):
    """Compute the prompt at a replica. A `Decode` may follow while it does."""

    replica: ReplicaId
    hands_over: bool = False
    """Tell the engine that another one goes on with the prompt; its release knows of that."""


EVERYTHING = 1 << 30
"""`expect_tokens` of a prompt that is still being computed: all of it, however long it is."""


class Decode(RequestMessage, frozen=True):
    """Have a replica answer, or go on answering; it finds `expect_tokens` of it in the pool."""

    replica: ReplicaId
    expect_tokens: int
    waited_s: float = 0.0
    """In the router's queues, so far."""
    source: ReplicaId | None = None
    """The replica that saves the prompt; None if the engine does not count by source."""
    notices: tuple[str, ...] | None = None
    """Endpoints of the replica that computes the prompt; empty once it is computed; None: the
    engine's release knows neither notices nor ends of prompts."""


REFUSALS = (429, 502, 503)
"""HTTP statuses of requests that are refused."""


class Refuse(RequestMessage, frozen=True):
    """Tell the client that the request will not be served."""

    status: int
    retry_after_s: int
    why: str


class Abort(RequestMessage, frozen=True):
    """Stop what a replica does for a request; it is not wanted any more."""

    replica: ReplicaId


class ReplicaAction(msgspec.Struct, frozen=True):
    """An action on a replica's engine."""

    replica: ReplicaId


class Load(ReplicaAction, frozen=True):
    """Start, wake or just await an engine, until it answers."""

    role: Role


class Warm(ReplicaAction, frozen=True):
    """Send a standby a request of one token, so that it is known to answer."""


class Probe(ReplicaAction, frozen=True):
    """A call to it has failed: see at once whether it is alive."""


class Retire(ReplicaAction, frozen=True):
    """A standby has expired, or is not wanted: put it to sleep, or end its process."""

    forget: bool = False


Directive = Prefill | Decode | Refuse
"""An order of the controller to a request's handler."""
Action = Directive | Abort | ReplicaAction
Emit = Callable[[Action], None]
"""Adds an action to those of the controller's present step."""
