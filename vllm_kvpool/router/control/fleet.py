"""The replicas as the controller knows them (pure).

`Fleet.move` is the only place where a replica changes its state; each transition is kept with its
cause and the reason, and counted.
"""

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from vllm_kvpool.router.control.events import ReplicaSpec, Sample
from vllm_kvpool.router.control.handovers import Handovers
from vllm_kvpool.router.control.prefix_index import Holder, PrefixIndex, spans_of
from vllm_kvpool.router.control.rates import CounterRate
from vllm_kvpool.router.control.requests import Ask, Request, RequestId
from vllm_kvpool.router.control.states import (
    ROLE_OF,
    TAKES_DECODE,
    TAKES_PREFILL,
    Cause,
    Goal,
    ReplicaId,
    Role,
    State,
    follow,
)

METERED = ("bytes_in", "bytes_out", "prompt_tokens", "generated_tokens")
"""Counters of `Sample` whose rates are shown; bytes are those from and to the pool."""
MAX_KEPT_TRANSITIONS = 1000


@dataclass(frozen=True, slots=True)
class Transition:
    """A replica has changed its state."""

    at: float
    replica: ReplicaId
    before: State
    cause: Cause
    after: State
    why: str


class ActiveRequest(msgspec.Struct, eq=False, gc=False):
    """A request at the replica that decodes it."""

    blocks: int
    """Committed for it."""
    is_handed: bool
    """Whether another replica has computed its prompt."""
    has_first_token: bool = False
    """Whether its first token has come."""
    flows_since: float = 0.0
    decoded_before: float = 0.0
    """The replica's `decoded_s` then."""
    is_sent_away: bool = False
    """Whether it has been aborted, to go on elsewhere."""
    num_sequences: int = 1
    awaits_prompt: bool = False
    """True while it has no token and another replica computes its prompt."""


@dataclass(slots=True)
class Shared:
    """State that all replicas of a fleet refer to."""

    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    changed: set["Replica"] = field(default_factory=set)
    """Since that was last looked at."""


@dataclass(slots=True, eq=False)
class Replica:
    """One engine process. Owned by the controller."""

    spec: ReplicaSpec
    replica_id: ReplicaId = field(init=False)
    state: State = State.INACTIVE
    since: float = 0.0
    role: Role = Role.PREFILL
    """The role it has, or had last."""
    goal: Goal = Goal.STANDBY
    sample: Sample = field(default_factory=Sample)
    sampled_at: float | None = None
    models: frozenset[str] = frozenset()
    """Names in its /v1/models; empty until it has listed them."""
    meters: dict[str, CounterRate] = field(
        default_factory=lambda: {name: CounterRate() for name in METERED}
    )
    """By the names in METERED."""
    prefills: dict[RequestId, int] = field(default_factory=dict)
    """Prompts it is computing, with the tokens that are likely not cached there."""
    active: dict[RequestId, ActiveRequest] = field(default_factory=dict)
    """Requests it has been given whole or to decode."""
    num_sequences: int = 0
    """Sequences of all `active` requests."""
    prefill_tokens: int = 0
    """Tokens it has been asked to compute and has not yet."""
    committed_blocks: int = 0
    most_committed: int = 0
    """Blocks, since the sample before the last."""
    foreign_blocks: int = 0
    """In use by what the router has not given it, as of the last sample."""
    num_starting: int = 0
    """Of `active`, those that have not brought a token yet."""
    num_computing: int = 0
    """Of those, the ones whose prompts it computes itself."""
    num_awaiting: int = 0
    """Of those, the ones whose prompts other replicas are still computing."""
    most_awaiting: int = 0
    """Such requests, since the sample before the last."""
    num_waiting: int = 0
    """Requests that wait in its engine, as of the last sample, but for `most_awaiting`."""
    alone: ActiveRequest | None = None
    """The last one to begin, if no other was being started with it: its times are its own."""
    bound: list[Request] = field(default_factory=list)
    """Requests that wait for it to be loaded, in their order."""
    decoded_s: float = 0.0
    """Seconds of decoding, of all its requests together, up to `decoded_at`."""
    decoded_at: float = 0.0
    busy_until: float = 0.0
    """Until then it gets no work, as it has refused some."""
    is_doubted: bool = False
    """A call to it has broken off; none before it is known whether it lives."""
    last_work: float = 0.0
    sleep_error: str = ""
    """Error of the last order to sleep; empty if the replica sleeps or had no such order."""
    retry_at: float = math.inf
    """When to try again after a failure; infinite while it is tried."""
    prefill_since: float = 0.0
    """When it was last told to have computed a prompt, or began one after a pause."""
    transfer_since: float = 0.0
    """Likewise of prompts that it takes over."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Of what its engine did first, samples that the rates do without."""
    shared: Shared = field(default_factory=Shared)
    cache: Holder = field(init=False)
    """Its engine's, as `Shared.prefixes` has it."""

    def __post_init__(self) -> None:
        self.replica_id = self.spec.replica_id
        self.cache = Holder(self)

    @property
    def used_blocks(self) -> int:
        """Committed blocks, and those that the engine uses beside these.

        Its metrics are of a while ago: what has ended since does not count as in use.
        """
        return self.committed_blocks + self.foreign_blocks

    def measured(self, sample: Sample, now: float) -> None:
        """Take in its engine's metrics."""
        self.shared.changed.add(self)
        self.sample, self.sampled_at = sample, now
        self.foreign_blocks = max(0, sample.used_blocks - self.most_committed)
        self.most_committed = self.committed_blocks
        # What waits for a prompt waits in the engine, but not for it.
        self.num_waiting = max(0, sample.waiting - self.most_awaiting)
        self.most_awaiting = self.num_awaiting
        for name, meter in self.meters.items():
            meter.read(now, getattr(sample, name))

    @property
    def is_retried(self) -> bool:
        """True while a failed engine is being started, or asked whether it is back."""
        return self.state is State.FAILED and self.retry_at == math.inf

    def is_open(self, now: float) -> bool:
        """Whether it has neither refused work lately nor lost a call."""
        return now >= self.busy_until and not self.is_doubted

    def remember(self, prefix: Sequence[int]) -> None:
        """Note that its cache has a prompt."""
        self.shared.prefixes.add(prefix, self.cache)

    def serves(self, model: str) -> bool:
        """As far as is known: an engine that has not listed its models may."""
        return not model or not self.models or model in self.models

    @property
    def used_share(self) -> float:
        """Of its blocks."""
        return self.used_blocks / (self.sample.total_blocks or 1 << 30)

    @property
    def num_ready(self) -> int:
        """Requests without a token yet that wait for no other replica."""
        return self.num_starting - self.num_awaiting

    @property
    def has_work(self) -> bool:
        return bool(self.prefills or self.active or self.bound)

    def assign(self, request: Request) -> None:
        """Bind a request to it, to be computed once it is loaded."""
        insort(self.bound, request, key=lambda each: each.order)

    def begin_prefill(self, request_id: RequestId, uncached_tokens: int, now: float) -> None:
        self.shared.changed.add(self)
        if not self.prefills:
            self.prefill_since = now
        self.prefills[request_id] = uncached_tokens
        self.prefill_tokens += uncached_tokens

    def end_prefill(self, request_id: RequestId) -> int:
        """The tokens it was given with."""
        self.shared.changed.add(self)
        tokens = self.prefills.pop(request_id)
        self.prefill_tokens -= tokens
        return tokens

    def begin_decode(self, request_id: RequestId, active: ActiveRequest, now: float) -> None:
        self.shared.changed.add(self)
        if not active.awaits_prompt:
            self._begins(active, now)
        self.active[request_id] = active
        self.num_sequences += active.num_sequences
        self.committed_blocks += active.blocks
        self.most_committed = max(self.most_committed, self.committed_blocks)
        self.num_starting += 1
        self.num_computing += not active.is_handed
        self.num_awaiting += active.awaits_prompt
        self.most_awaiting = max(self.most_awaiting, self.num_awaiting)

    def prompt_came(self, request_id: RequestId, now: float) -> None:
        """Another replica has computed the prompt for which a request waits here."""
        active = self.active[request_id]
        if active.awaits_prompt:
            self.shared.changed.add(self)
            self._begins(active, now)
            self._awaits_no_more(active)

    def _begins(self, active: ActiveRequest, now: float) -> None:
        """Note that a request, which is not counted as ready yet, waits for this replica alone."""
        if active.is_handed and self.num_ready == self.num_computing:
            self.transfer_since = now
        self.alone = active if self.num_ready == 0 and self.num_waiting == 0 else None

    def _awaits_no_more(self, active: ActiveRequest) -> None:
        self.num_awaiting -= active.awaits_prompt
        active.awaits_prompt = False

    def flows(self, request_id: RequestId, now: float) -> None:
        """A request has brought its first token here."""
        self.shared.changed.add(self)
        active = self.active[request_id]
        self._decode_until(now)
        self._started(active)
        active.has_first_token = True
        active.flows_since, active.decoded_before = now, self.decoded_s

    def end_decode(self, request_id: RequestId, now: float) -> ActiveRequest:
        self.shared.changed.add(self)
        self._decode_until(now)
        active = self.active.pop(request_id)
        self.num_sequences -= active.num_sequences
        self.committed_blocks -= active.blocks
        self._started(active)
        return active

    def decoded_beside(self, active: ActiveRequest) -> float:
        """How many requests were decoded beside one that ends now, itself included; the mean."""
        seconds = self.decoded_at - active.flows_since
        return (self.decoded_s - active.decoded_before) / seconds if seconds > 0.0 else 0.0

    def _decode_until(self, now: float) -> None:
        flowing = len(self.active) - self.num_starting
        self.decoded_s += flowing * (now - self.decoded_at)
        self.decoded_at = now

    def _started(self, active: ActiveRequest) -> None:
        self.num_starting -= not active.has_first_token
        self.num_computing -= not (active.has_first_token or active.is_handed)
        self._awaits_no_more(active)

    def forget_engine(self) -> None:
        """Forget what was known of its engine, which has ended."""
        self.shared.changed.add(self)
        self.cache.is_gone, self.cache = True, Holder(self)
        self.left_out.clear()
        self.sampled_at = None
        self.sample = replace(self.sample, running=0, waiting=0, used_blocks=0, notices=None)
        self.foreign_blocks = self.num_waiting = 0

    def pause(self, until: float) -> None:
        """Give it no work until then."""
        self.shared.changed.add(self)
        self.busy_until = until


NO_MODELS: frozenset[str] = frozenset()


def _groups_of(sets: Iterable[frozenset[str]]) -> dict[str, frozenset[str]]:
    """Each model's group: the models of all sets that overlap, directly or by others."""
    groups: list[frozenset[str]] = []
    for models in sets:
        near = [each for each in groups if not models.isdisjoint(each)]
        apart = [each for each in groups if models.isdisjoint(each)]
        groups = [*apart, models.union(*near)]
    return {model: group for group in groups for model in group}


class Fleet:
    """All replicas, in the order in which they were added."""

    def __init__(self) -> None:
        self._replicas: dict[ReplicaId, Replica] = {}
        self._shared = Shared()
        self.changed = self._shared.changed
        """Replicas that have changed since `LoadTable.refresh`, which empties it."""
        self.handovers = Handovers()
        # Asked for many times an event, changed rarely.
        self._in_states: dict[frozenset[State] | State, Sequence[Replica]] = {}
        self.transitions: deque[Transition] = deque(maxlen=MAX_KEPT_TRANSITIONS)
        self.counts: Counter[tuple[State, Cause]] = Counter()
        self.num_moves = 0
        self._listed: frozenset[str] | None = None
        self._is_of_one_model = True
        self._groups: dict[str, frozenset[str]] = {}
        self._shares: dict[tuple[str, str], float] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._replicas

    def __getitem__(self, replica_id: ReplicaId) -> Replica:
        return self._replicas[replica_id]

    def get(self, replica_id: ReplicaId) -> Replica | None:
        return self._replicas.get(replica_id)

    def add(self, spec: ReplicaSpec, now: float) -> Replica:
        assert spec.replica_id not in self._replicas
        replica = self._replicas[spec.replica_id] = Replica(
            spec, since=now, last_work=now, shared=self._shared
        )
        self._in_states.clear()
        self._listed = None
        self.changed.add(replica)
        return replica

    def forget(self, replica_id: ReplicaId) -> None:
        replica = self._replicas[replica_id]
        assert not replica.has_work
        del self._replicas[replica_id]
        self._listed = None
        replica.cache.is_gone = True
        self.handovers.forget(replica_id)
        self.changed.add(replica)
        self._in_states.clear()

    def move(self, replica: Replica, cause: Cause, why: str, now: float) -> None:
        """Follow an edge; IllegalEdge where there is none, and nothing is changed."""
        after = follow(replica.state, cause)
        record = Transition(now, replica.replica_id, replica.state, cause, after, why)
        self.transitions.append(record)
        self.counts[replica.state, cause] += 1
        self.num_moves += 1
        self.changed.add(replica)
        replica.state, replica.since = after, now
        replica.role = ROLE_OF[after] or replica.role
        self._in_states.clear()

    def in_states(self, states: frozenset[State] | State) -> Sequence[Replica]:
        """Those in one, or in one of several; what is moved meanwhile stays in the answer."""
        found = self._in_states.get(states)
        if found is None:
            wanted = (states,) if isinstance(states, State) else states
            found = self._in_states[states] = tuple(each for each in self if each.state in wanted)
        return found

    def list_models(self, replica: Replica, models: frozenset[str]) -> None:
        """Take in the names that a replica serves."""
        replica.models = models
        self.changed.add(replica)
        self._listed = None

    def listed(self, model: str) -> str:
        """The model if any replica lists it, else "": one engine will say that there is none."""
        return model if model in self._all_listed() else ""

    def is_of_one_model(self) -> bool:
        """Whether all replicas list the same names, as far as they have listed any."""
        self._all_listed()
        return self._is_of_one_model

    def group_of(self, models: Collection[str]) -> frozenset[str]:
        """All models that share replicas with these, directly or by others; empty for none."""
        if self._listed is None:
            self._all_listed()
        for each in models:
            if (group := self._groups.get(each)) is not None:
                return group
        return NO_MODELS

    def share_of(self, model: str, other: str) -> float:
        """Of the replicas that serve the other model, those that serve this one as well."""
        if model in ("", other) or self.is_of_one_model():
            return 1.0
        self._all_listed()
        share = self._shares.get((model, other))
        if share is None:
            serving = [each for each in self if each.serves(other)]
            number = sum(each.serves(model) for each in serving)
            share = self._shares[model, other] = number / len(serving) if serving else 0.0
        return share

    def _all_listed(self) -> frozenset[str]:
        if self._listed is None:
            self._listed = frozenset(name for each in self for name in each.models)
            sets = {each.models for each in self if each.models}
            self._is_of_one_model = len(sets) <= 1
            self._groups = _groups_of(sets)
            self._shares.clear()
        return self._listed

    def holders(self, ask: Ask, most: int) -> dict[Replica, int]:
        """Those with the longest beginnings of a prompt, by the tokens of these."""
        found = self._shared.prefixes.holders(ask.prefix, most) if ask.prefix else {}
        return {each.owner: spans_of(depth) * ask.prefix_tokens for each, depth in found.items()}

    def prefillers(self) -> Sequence[Replica]:
        """Those that may be given prompts."""
        return self.in_states(TAKES_PREFILL)

    def decoders(self) -> Sequence[Replica]:
        """Those that may be handed requests."""
        return self.in_states(TAKES_DECODE)
