"""A request as the controller knows it, and where it waits (pure).

One `RequestQueue` holds prompts to be computed, one requests to be decoded, whose prompts are in
the pool or need not be.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NewType

import msgspec

from vllm_kvpool.router.control.states import ReplicaId

DEFAULT_BLOCK_SIZE = 16
"""Tokens of a block, until an engine has told its own."""
MAX_WAITS = 1024
RequestId = NewType("RequestId", str)


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request as its client sent it."""

    request_id: RequestId
    prompt_tokens: int
    """Exact, or estimated from the prompt's bytes."""
    prompt_bytes: int = 0
    """JSON bytes of what is rendered into the prompt; 0 where they say nothing of its tokens."""
    max_output_tokens: int
    """`max_tokens` of the client, for each sequence."""
    model: str = ""
    """The name that replicas list it by, or an adapter's; empty: whichever they serve."""
    num_sequences: int = 1
    """Its prompts times its choices: an engine runs all at a time."""
    prefix: tuple[int, ...] = ()
    """Hashes of ever longer beginnings of the prompt, shortest first."""
    prefix_tokens: int = 0
    """Tokens that one entry of `prefix` stands for."""
    hands_over: bool = True
    """True if one replica may compute the prompt and another one decode."""
    goes_on_elsewhere: Callable[[], bool] = lambda: True
    """Returns True if another replica can go on with the answer, once it has begun.

    Costs a look at all messages, so that only a drain calls it.
    """
    priority: int = 0
    """Lower goes first, as in vLLM."""
    deadline: float = float("inf")
    """On the controller's clock: when it is not worth starting any more."""


class PromptPath(Enum):
    """The place where a prompt is computed, with the reason."""

    __hash__ = object.__hash__  # much faster than Enum's, which is Python

    HANDED_OVER = "handed_over"  # on a prefill replica, then handed over
    FASTER_LOCALLY = "faster_locally"  # by the estimates: it is short, say
    IN_POOL = "in_pool"  # as faster_locally, because the pool has most of it
    NOT_SPLITTABLE = "not_splittable"  # the request needs one engine for all of it
    NO_PREFILL_REPLICA = "no_prefill_replica"
    POOL_DOWN = "pool_down"
    NO_SHARED_STORE = "no_shared_store"  # decoders do not find what prefill replicas save
    SWITCHED_OFF = "switched_off"  # flow.hands_over is false
    REJECTED = "rejected"  # by the prefill replica; the client reads why in the answer


QUEUED_PATHS = frozenset(
    {
        PromptPath.HANDED_OVER,
        PromptPath.NO_PREFILL_REPLICA,
        PromptPath.POOL_DOWN,
        PromptPath.SWITCHED_OFF,
        PromptPath.NO_SHARED_STORE,
    }
)
"""Prompts that wait in the queue: for a prefill replica, or for a decoder while there is none."""


class Phase(Enum):
    """Phases of a request."""

    __hash__ = object.__hash__  # much faster than Enum's, which is Python

    ARRIVED = "arrived"  # whether it is let in is being decided
    QUEUED = "queued"  # waits for a replica that computes its prompt
    BOUND = "bound"  # waits for one that is loading
    PREFILLING = "prefilling"
    HANDING = "handing"  # waits for a replica that decodes, and computes what the pool lacks
    DECODING = "decoding"  # a replica has all of it: decodes, does both, or waits for the prompt
    ENDED = "ended"


WAITS = frozenset({Phase.QUEUED, Phase.BOUND, Phase.HANDING})


class Request(msgspec.Struct, eq=False, gc=False):
    """Owned by the controller from arrival to end."""

    ask: RequestSpec
    arrived: float
    number: int
    """Order of arrival."""
    tokens: int
    """Tokens at a decoder: the prompt, and the expected answer."""
    phase: Phase = Phase.ARRIVED
    replica: ReplicaId | None = None
    """The replica that computes or decodes it, or will once it is loaded."""
    source: ReplicaId | None = None
    """The replica that computes or has computed its prompt; None: the one that decodes."""
    is_computing: bool = False
    """True while a prefill replica computes its prompt."""
    tries: ReplicaId | None = None
    """The decoder that is to try whether it finds the prompt, though it found none lately."""
    saved_tokens: int = 0
    """Prompt tokens that the pool has or will have; the decoding replica waits for them."""
    attempts: int = 0
    """Replicas that have been given it, for whatever, and have failed."""
    num_lost: int = 0
    """Attempts in which the replica was lost before the request had a token."""
    began: float = 0.0
    """When the present phase began."""
    deadline: float = float("inf")
    """Until when it may wait where it is."""
    waited_s: float = 0.0
    """In queues, for replicas."""
    path: PromptPath = PromptPath.HANDED_OVER
    """Meant, and final once it is being decoded."""
    first_token: float | None = None
    uncached: int = 0
    """Prompt tokens that neither the pool was known to have nor an engine has saved.

    As of when the request last began to wait or was given to be decoded.
    """
    output_tokens: int = 0
    """Tokens of answers that broke off."""
    avoid: frozenset[ReplicaId] = frozenset()
    """Replicas that have failed it."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of queues: priority, then arrival."""
        return (self.ask.priority, self.number)


@dataclass(slots=True)
class RequestCounts:
    """Counts of requests since the start, for the page and the metrics. Owned by the controller."""

    events: Counter[str] = field(default_factory=Counter)
    """By what has happened: the names in `snapshot.COUNTS`."""
    refusals: Counter[int] = field(default_factory=Counter)
    """Refused requests, by HTTP status."""
    prompts: Counter[PromptPath] = field(default_factory=Counter)
    """Prompts given to be decoded for the first time, by where they are computed."""
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_WAITS))
    """Seconds from arrival to first token, of the requests that began last."""


@dataclass(slots=True)
class Waiting:
    """Sums over waiting requests."""

    requests: float = 0
    prompt_tokens: float = 0
    uncached_tokens: float = 0
    """Prompt tokens to be computed."""

    def add(self, request: Request, times: float = 1) -> None:
        """Add a request `times` times; -1 removes it."""
        self.requests += times
        self.prompt_tokens += times * request.ask.prompt_tokens
        self.uncached_tokens += times * request.uncached

    def add_all(self, other: "Waiting", times: float) -> None:
        """Add the sums of `other`, weighted by `times`."""
        self.requests += times * other.requests
        self.prompt_tokens += times * other.prompt_tokens
        self.uncached_tokens += times * other.uncached_tokens


class RequestQueue:
    """Requests in the order of priority and arrival, by model. Owned by the controller."""

    def __init__(self) -> None:
        # By model: a model's requests do not wait for those of another.
        self._sorted: dict[str, list[tuple[tuple[int, int], Request]]] = {}
        self.by_model: dict[str, Waiting] = {}
        self.num_entered = 0
        """Number of requests that have ever entered."""

    @property
    def tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return int(sum(each.prompt_tokens for each in self.by_model.values()))

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens of all waiting requests that are to be computed."""
        return int(sum(each.uncached_tokens for each in self.by_model.values()))

    def __len__(self) -> int:
        return sum(map(len, self._sorted.values()))

    def __bool__(self) -> bool:
        return bool(self._sorted)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests, each model's in order."""
        for entries in self._sorted.values():
            for _, request in entries:
                yield request

    def append(self, request: Request) -> None:
        """Insert a request behind those of its priority that arrived before it."""
        model = request.ask.model
        insort(self._sorted.setdefault(model, []), (request.order, request))
        self.by_model.setdefault(model, Waiting()).add(request)
        self.num_entered += 1

    def remove(self, request: Request) -> None:
        """Take out one that waits, wherever it stands."""
        model = request.ask.model
        entries = self._sorted[model]
        del entries[bisect_left(entries, (request.order,))]
        self.by_model[model].add(request, -1)
        if not entries:
            del self._sorted[model], self.by_model[model]

    def head(self, without: Collection[str] = ()) -> Request | None:
        """Return the next request, of all models but some; None if there is none."""
        heads = [waiting[0] for model, waiting in self._sorted.items() if model not in without]
        return min(heads)[1] if heads else None

    def first(self, most: int | None = None) -> list[Request]:
        """Return all requests, or the first `most` of each model, in order."""
        groups = [entries[:most] for entries in self._sorted.values()]
        entries = groups[0] if len(groups) == 1 else sorted(chain.from_iterable(groups))
        return [request for _, request in entries]
