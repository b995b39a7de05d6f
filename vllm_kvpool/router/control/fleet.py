"""The replicas as the controller knows them (pure).

`Fleet.move` is the only place where a replica changes its state; each transition is kept with its
cause and the reason, and counted.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from vllm_kvpool.router.control.events import ReplicaSpec, Sample
from vllm_kvpool.router.control.handovers import Handovers
from vllm_kvpool.router.control.health import Health, ReplicaBreaker
from vllm_kvpool.router.control.prefix_index import Holder, PrefixIndex, spans_of
from vllm_kvpool.router.control.rates import CounterRate
from vllm_kvpool.router.control.requests import Request, RequestSpec
from vllm_kvpool.router.control.settings import HealthConfig
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
from vllm_kvpool.router.control.work import Work

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


@dataclass(slots=True, eq=False)
class Replica:
    """An engine process as the controller knows it. Owned by the controller."""

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
    work: Work = field(init=False)
    meters: dict[str, CounterRate] = field(
        default_factory=lambda: {name: CounterRate() for name in METERED}
    )
    """By the names in METERED."""
    health: Health = field(default_factory=Health)
    last_work: float = 0.0
    num_forwarded: int = 0
    """Requests that its engine answers without admission, beside `work`."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Numbers of first samples, by rate, that are not counted: a new engine is slower."""
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    """The fleet's index of prompts."""
    changed: set["Replica"] = field(default_factory=set)
    """The fleet's set of changed replicas."""
    cache: Holder = field(init=False)
    """The prompts in its engine's cache, as an entry of `prefixes`."""

    def __post_init__(self) -> None:
        self.replica_id = self.spec.replica_id
        self.cache = Holder(self)
        self.work = Work(partial(self.changed.add, self))

    def measured(self, sample: Sample, now: float) -> None:
        """Take in its engine's metrics."""
        self.changed.add(self)
        self.sample, self.sampled_at = sample, now
        self.work.measured(sample)
        for name, meter in self.meters.items():
            meter.read(now, getattr(sample, name))

    @property
    def is_idle(self) -> bool:
        """True if it has no work and answers nothing that is only forwarded."""
        return not (self.work or self.num_forwarded)

    @property
    def is_retried(self) -> bool:
        """True while a failed engine is being started, or asked whether it is back."""
        return self.state is State.FAILED and self.health.retry_at == math.inf

    def remember(self, prefix: Sequence[int]) -> None:
        """Note that its cache has a prompt."""
        self.prefixes.add(prefix, self.cache)

    def serves(self, model: str) -> bool:
        """Return True if the replica lists a model, or has not listed its models yet."""
        return not model or not self.models or model in self.models

    def used_share(self, more_blocks: int = 0) -> float:
        """Return the share of the replica's blocks in use once `more_blocks` are taken."""
        return (self.work.used_blocks + more_blocks) / (self.sample.total_blocks or 1 << 30)

    def forget_engine(self) -> None:
        """Forget what was known of its engine, which has ended."""
        self.changed.add(self)
        self.cache.is_gone, self.cache = True, Holder(self)
        self.left_out.clear()
        self.sampled_at = None
        self.sample = replace(self.sample, running=0, waiting=0, used_blocks=0, notices=None)
        self.work.forget_engine()

    def pause(self, until: float) -> None:
        """Give it no work until then."""
        self.changed.add(self)
        self.health.busy_until = until


NO_MODELS: frozenset[str] = frozenset()


def _groups_of(sets: Iterable[frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return each model's group: the models of all sets that overlap, directly or by others."""
    groups: list[frozenset[str]] = []
    for models in sets:
        near = [each for each in groups if not models.isdisjoint(each)]
        apart = [each for each in groups if models.isdisjoint(each)]
        groups = [*apart, models.union(*near)]
    return {model: group for group in groups for model in group}


@dataclass(frozen=True, slots=True)
class ListedModels:
    """The models that the replicas of a fleet list."""

    groups: dict[str, frozenset[str]]
    """By model, the models that share replicas with it, directly or through other models."""
    is_single_set: bool
    """True if all replicas that have listed models list the same names."""
    shares: dict[tuple[str, str], float] = field(default_factory=dict, compare=False)
    """Answers of `Fleet.share_of`."""


class Fleet:
    """The replicas, in the order in which they were added.

    What is derived from their states, models and pairs is kept until one of these changes.
    """

    def __init__(self, health: HealthConfig | None = None) -> None:
        self._replicas: dict[ReplicaId, Replica] = {}
        self._health = health or HealthConfig()
        self._prefixes = PrefixIndex()
        self.changed: set[Replica] = set()
        """Replicas that have changed since `LoadTable.refresh`, which empties it."""
        self.version = 0
        """Number of changes of states, models, pairs and of the pool.

        Room that replicas gain beside these changes is counted by `Ranking.num_gains`.
        """
        self.handovers = Handovers(self._drop_derived)
        self._in_states: dict[frozenset[State] | State, Sequence[Replica]] = {}
        self._listed: ListedModels | None = None
        self._sharing: frozenset[ReplicaId] | None = None
        self.transitions: deque[Transition] = deque(maxlen=MAX_KEPT_TRANSITIONS)
        self.counts: Counter[tuple[State, Cause]] = Counter()

    def _drop_derived(self) -> None:
        """Note a change of a replica's state or models, or of a pair."""
        self.version += 1
        self._in_states.clear()
        self._listed = self._sharing = None

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._replicas

    def __getitem__(self, replica_id: ReplicaId) -> Replica:
        return self._replicas[replica_id]

    def get(self, replica_id: ReplicaId) -> Replica | None:
        """Return a replica, or None if it was never added or is gone."""
        return self._replicas.get(replica_id)

    def add(self, spec: ReplicaSpec, now: float) -> Replica:
        """Add a replica without state, load or health known, and return it."""
        assert spec.replica_id not in self._replicas
        replica = self._replicas[spec.replica_id] = Replica(
            spec,
            since=now,
            last_work=now,
            health=Health(ReplicaBreaker(self._health)),
            prefixes=self._prefixes,
            changed=self.changed,
        )
        self._drop_derived()
        self.changed.add(replica)
        return replica

    def forget(self, replica_id: ReplicaId) -> None:
        """Remove a replica that has no work left, and what others know of it."""
        replica = self._replicas[replica_id]
        assert not replica.work
        del self._replicas[replica_id]
        replica.cache.is_gone = True
        self.handovers.forget(replica_id)
        self.changed.add(replica)

    def move(self, replica: Replica, cause: Cause, why: str, now: float) -> None:
        """Follow an edge; IllegalEdge where there is none, and nothing is changed."""
        after = follow(replica.state, cause)
        record = Transition(now, replica.replica_id, replica.state, cause, after, why)
        self.transitions.append(record)
        self.counts[replica.state, cause] += 1
        self.changed.add(replica)
        replica.state, replica.since = after, now
        replica.role = ROLE_OF[after] or replica.role
        self._drop_derived()

    def in_states(self, states: frozenset[State] | State) -> Sequence[Replica]:
        """Return the replicas in one or several states; later moves do not change the answer."""
        found = self._in_states.get(states)
        if found is None:
            wanted = (states,) if isinstance(states, State) else states
            found = self._in_states[states] = tuple(each for each in self if each.state in wanted)
        return found

    def list_models(self, replica: Replica, models: frozenset[str]) -> None:
        """Take in the names that a replica serves."""
        replica.models = models
        self.changed.add(replica)
        self._drop_derived()

    @property
    def listed(self) -> ListedModels:
        """The models that the replicas list."""
        if self._listed is None:
            sets = {each.models for each in self if each.models}
            self._listed = ListedModels(_groups_of(sets), len(sets) <= 1)
        return self._listed

    def group_of(self, models: Collection[str]) -> frozenset[str]:
        """Return the models that share replicas with these, directly or through other models."""
        groups = self.listed.groups
        for each in models:
            if (group := groups.get(each)) is not None:
                return group
        return NO_MODELS

    def share_of(self, model: str, other: str) -> float:
        """Return the share of the other model's replicas that serve this model as well."""
        listed = self.listed
        if model in ("", other) or listed.is_single_set:
            return 1.0
        share = listed.shares.get((model, other))
        if share is None:
            serving = [each for each in self if each.serves(other)]
            number = sum(each.serves(model) for each in serving)
            share = listed.shares[model, other] = number / len(serving) if serving else 0.0
        return share

    def holders(self, ask: RequestSpec, most: int) -> dict[Replica, int]:
        """Return the replicas with the longest beginnings of a prompt, and the tokens of each."""
        found = self._prefixes.holders(ask.prefix, most) if ask.prefix else {}
        return {each.owner: spans_of(depth) * ask.prefix_tokens for each, depth in found.items()}

    def prefillers(self) -> Sequence[Replica]:
        """Return the replicas that may be given prompts."""
        return self.in_states(TAKES_PREFILL)

    def decoders(self) -> Sequence[Replica]:
        """Return the replicas that may be given requests to decode."""
        return self.in_states(TAKES_DECODE)

    # Pairs of a prefill replica and a decoder, by whether they share a store

    def sharing(self) -> frozenset[ReplicaId]:
        """Return the prefill replicas that are not apart from every decoder of their models."""
        if self._sharing is None:
            is_apart = self.handovers.is_apart
            self._sharing = frozenset(
                each.replica_id
                for each in self.prefillers()
                if any(
                    not is_apart(each.replica_id, to.replica_id) for to in self._decoders_of(each)
                )
            )
        return self._sharing

    def shares(self, replica: Replica) -> bool:
        """Return True unless a prefill replica is apart from every decoder of its models."""
        return not self.handovers.is_any_apart or replica.replica_id in self.sharing()

    def decoder_to_try(self, replica: Replica, now: float) -> ReplicaId | None:
        """Return the decoder with which an idle prefill replica may try to share a store."""
        if replica.work.prefills or not replica.health.is_open(now):
            return None
        for each in self._decoders_of(replica):
            if self.handovers.may_hand_over(replica.replica_id, each.replica_id, now):
                return each.replica_id
        return None

    def may_compute_apart(self, replica: Replica, now: float) -> bool:
        """Return True if a prefill replica may compute prompts for other decoders."""
        return self.shares(replica) or self.decoder_to_try(replica, now) is not None

    def may_take(self, request: Request, replica: Replica, now: float) -> bool:
        """Return True unless a replica is apart from the replica that saved a request's prompt."""
        source, taker = request.source, replica.replica_id
        if source is None or not self.handovers.is_any_apart:
            return True
        if request.tries is not None:
            return taker == request.tries
        return taker == source or self.handovers.may_hand_over(source, taker, now)

    def _decoders_of(self, replica: Replica) -> Iterator[Replica]:
        """Yield the decoders that serve a model of a prefill replica."""
        for each in self.decoders():
            if not each.models or not replica.models or each.models & replica.models:
                yield each
