"""A request as the controller knows it, and where it waits (pure).

`PromptQueue` holds prompts to be computed, `MigrationQueue` requests to be decoded, whose prompts
are in the pool or need not be; `Deadlines` says until when.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NewType

import msgspec

from vllm_kvpool.router.control.states import ReplicaId

RequestId = NewType("RequestId", str)


class PoolLookupOutcome(Enum):
    """How asking the pool about a prompt has ended."""

    __hash__ = object.__hash__  # much faster than Enum's, which is Python

    COVERED = "covered"  # it has some of the prompt
    ABSENT = "absent"
    UNKNOWN_MODEL = "unknown_model"  # it has no namespace of the model
    LATE = "late"
    FAILED = "failed"
    SKIPPED = "skipped"  # not asked: it has failed lately, or too many asked


class Ask(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One request of a client."""

    request_id: RequestId
    prompt_tokens: int
    """Exact, or estimated from the prompt's bytes."""
    prompt_bytes: int = 0
    """JSON bytes of what is rendered into the prompt; 0 where they say nothing of its tokens."""
    max_output_tokens: int
    """`max_tokens` of the client, for each choice."""
    model: str = ""
    """The name that replicas list it by, or an adapter's; empty: whichever they serve."""
    num_choices: int = 1
    prefix: tuple[int, ...] = ()
    """Hashes of ever longer beginnings of the prompt, shortest first."""
    prefix_tokens: int = 0
    """Tokens that one entry of `prefix` stands for."""
    hands_over: bool = True
    """Whether one replica may compute its prompt and another one decode."""
    priority: int = 0
    """Lower goes first, as in vLLM."""
    deadline: float = float("inf")
    """On the controller's clock: when it is not worth starting any more."""
    lookup: PoolLookupOutcome | None = None
    """How the lookup of its prompt in the pool ended; None: there was none."""
    pooled_tokens: int = 0
    """Tokens of its prompt that this lookup found in the pool."""


class PromptPath(Enum):
    """Where a prompt is computed, and why there."""

    __hash__ = object.__hash__  # much faster than Enum's, which is Python

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
    """Phases of a request."""

    __hash__ = object.__hash__  # much faster than Enum's, which is Python

    QUEUED = "queued"  # waits for a replica that computes its prompt
    BOUND = "bound"  # waits for one that is loading
    PREFILLING = "prefilling"
    HANDING = "handing"  # its prompt is in the pool; waits for a replica that decodes
    DECODING = "decoding"  # a replica has all of it: decodes, or does both
    DONE = "done"
    REFUSED = "refused"
    CANCELLED = "cancelled"


class PhaseChange(Enum):
    """Causes of a change of phase."""

    __hash__ = object.__hash__  # much faster than Enum's, which is Python

    BIND = "bind"
    UNBIND = "unbind"
    PREFILL = "prefill"
    HAND = "hand"
    REQUEUE = "requeue"
    DECODE = "decode"
    FINISH = "finish"
    REFUSE = "refuse"
    CANCEL = "cancel"


_P, _T = Phase, PhaseChange

PHASES: Mapping[tuple[Phase, PhaseChange], Phase] = {
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


class IllegalPhaseChange(Exception):
    """A turn that the phase does not know; a bug of the router."""


class Request(msgspec.Struct, eq=False, gc=False):
    """Owned by the controller from arrival to end."""

    ask: Ask
    arrived: float
    number: int
    """Order of arrival."""
    phase: Phase = Phase.QUEUED
    replica: ReplicaId | None = None
    """The replica that computes or decodes it, or will once it is loaded."""
    source: ReplicaId | None = None
    """The replica that has computed its prompt; None where that is the one that decodes."""
    saved_tokens: int = 0
    """Prompt tokens that the pool has or will have; the decoding replica waits for them."""
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
    """Tokens of answers that broke off."""
    avoid: frozenset[ReplicaId] = frozenset()
    """Replicas that have failed it."""

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of queues: priority, then arrival."""
        return (self.ask.priority, self.number)

    def advance(self, change: PhaseChange, now: float) -> None:
        """Follow an edge; IllegalPhaseChange where there is none."""
        before = self.phase
        try:
            self.phase = PHASES[self.phase, change]
        except KeyError:
            raise IllegalPhaseChange(f"{self.phase.value} does not know {change.value}") from None
        if before in WAITS:
            self.waited_s += now - self.began
        self.began = now


SLACK = 64  # entries of requests that have left, before they are cleared away


@dataclass(slots=True)
class Waiting:
    """What requests that wait ask for, in sum."""

    requests: float = 0
    prompt_tokens: float = 0
    uncached_tokens: float = 0
    """Prompt tokens to be computed."""

    def add(self, request: Request, times: float = 1) -> None:
        self.requests += times
        self.prompt_tokens += times * request.ask.prompt_tokens
        self.uncached_tokens += times * request.uncached

    def add_all(self, other: "Waiting", times: float) -> None:
        self.requests += times * other.requests
        self.prompt_tokens += times * other.prompt_tokens
        self.uncached_tokens += times * other.uncached_tokens


class WaitingByModel(dict[str, Waiting]):
    """Sums of the requests in a queue, by model."""

    def enter(self, request: Request) -> None:
        self.setdefault(request.ask.model, Waiting()).add(request)

    def leave(self, request: Request) -> None:
        waiting = self[request.ask.model]
        waiting.add(request, -1)
        if not waiting.requests:
            del self[request.ask.model]

    def check(self, requests: Iterable[Request]) -> None:
        """The sums are those of these requests."""
        found = WaitingByModel()
        for each in requests:
            found.enter(each)
        assert found == self


class PromptQueue:
    """Owned by the controller. Operations cost about the logarithm of its length."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, Request] = {}
        # By model: a model's requests do not wait for those of another. Entries whose request has
        # left stay until they come up, or are too many.
        self._heaps: dict[str, list[tuple[tuple[int, int], RequestId]]] = {}
        self.by_model = WaitingByModel()

    @property
    def tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return int(sum(each.prompt_tokens for each in self.by_model.values()))

    @property
    def uncached_tokens(self) -> int:
        """Those of them to be computed."""
        return int(sum(each.uncached_tokens for each in self.by_model.values()))

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    def append(self, request: Request) -> None:
        request_id = request.ask.request_id
        assert request_id not in self._waiting
        self._waiting[request_id] = request
        heap = self._heaps.setdefault(request.ask.model, [])
        heapq.heappush(heap, (request.order, request_id))
        self.by_model.enter(request)

    def head(self, without: Collection[str] = ()) -> Request | None:
        """The next request, of all models but some; None if there is none."""
        heads = [self._head(model) for model in list(self._heaps) if model not in without]
        return min((each for each in heads if each), key=lambda each: each.order, default=None)

    def _head(self, model: str) -> Request | None:
        heap = self._heaps[model]
        while heap:
            request = self._waiting.get(heap[0][1])
            if request is not None:
                return request
            heapq.heappop(heap)
        del self._heaps[model]
        return None

    def remove(self, request_id: RequestId) -> Request | None:
        """Take a request out, wherever it stands; None if it does not wait here."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self.by_model.leave(request)
            if sum(map(len, self._heaps.values())) > 2 * len(self._waiting) + SLACK:
                self._heaps.clear()
                for key, each in self._waiting.items():
                    self._heaps.setdefault(each.ask.model, []).append((each.order, key))
                for heap in self._heaps.values():
                    heapq.heapify(heap)
        return request

    def check(self) -> None:
        """The counts are those of what waits, and little else is kept."""
        self.by_model.check(self._waiting.values())
        entries = [key for heap in self._heaps.values() for _, key in heap]
        assert set(entries) >= self._waiting.keys()
        assert len(entries) <= 2 * len(self._waiting) + SLACK + 1


class MigrationQueue:
    """Owned by the controller."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, Request] = {}
        self._ready: list[tuple[tuple[int, int], Request]] = []  # in order, which differs
        self._sources: Counter[ReplicaId | None] = Counter()
        self.num_entered = 0
        """Requests so far."""
        self.by_model = WaitingByModel()

    @property
    def tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return int(sum(each.prompt_tokens for each in self.by_model.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def append(self, request: Request) -> None:
        """Its prompt is in the pool, or need not be; `source` stays the same meanwhile."""
        request_id = request.ask.request_id
        assert request_id not in self._entries
        self._entries[request_id] = request
        self.by_model.enter(request)
        self._sources[request.source] += 1
        self.num_entered += 1
        insort(self._ready, (request.order, request))

    def ready(self, most: int | None = None) -> Iterator[Request]:
        """The first `most` requests, in the order of priority and arrival, as they are now."""
        return (request for _, request in self._ready[:most])

    def remove(self, request_id: RequestId) -> bool:
        """Take a request out; False if it does not wait here."""
        request = self._entries.pop(request_id, None)
        if request is None:
            return False
        self.by_model.leave(request)
        del self._ready[bisect_left(self._ready, (request.order,))]
        self._sources[request.source] -= 1
        if not self._sources[request.source]:
            del self._sources[request.source]
        return True

    def num_from(self, source: ReplicaId | None) -> int:
        """Requests whose prompts this replica has computed; with None those not computed yet."""
        return self._sources[source]

    def check(self) -> None:
        """The counts are those of the entries."""
        entries = self._entries.values()
        self.by_model.check(entries)
        assert self._ready == sorted((each.order, each) for each in entries)
        sources = Counter(each.source for each in entries)
        assert self._sources == sources
        assert len(self._sources) == len(sources)


SLACK = 64  # entries of requests that wait no more, before they are cleared away


class Deadlines:
    """At most one for each request that waits. Owned by the controller."""

    def __init__(self) -> None:
        self._at: dict[RequestId, float] = {}
        # Entries that do not hold any more stay until they come up, or are too many.
        self._heap: list[tuple[float, RequestId]] = []

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._at

    def set(self, request_id: RequestId, at: float) -> None:
        """Set or replace the deadline of a request; infinity removes it."""
        self.clear(request_id)
        if at < float("inf"):
            self._at[request_id] = at
            heapq.heappush(self._heap, (at, request_id))

    def clear(self, request_id: RequestId) -> None:
        """Remove the deadline of a request, if it has one."""
        self._at.pop(request_id, None)
        if len(self._heap) > 2 * len(self._at) + SLACK:
            self._heap = [(at, request_id) for request_id, at in self._at.items()]
            heapq.heapify(self._heap)

    def next(self) -> float:
        """When the first one passes."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

    def take(self, now: float) -> Iterator[RequestId]:
        """Those that have passed, the first one first."""
        while self.next() <= now:
            request_id = self._heap[0][1]
            self.clear(request_id)
            yield request_id

    def check(self) -> None:
        """Each deadline will come up, and little else is kept."""
        assert {(at, request_id) for request_id, at in self._at.items()} <= set(self._heap)
        assert len(self._heap) <= 2 * len(self._at) + SLACK + 1
