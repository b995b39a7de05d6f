"""Which replica computes a prompt, and which one decodes (pure).

A prompt goes where it is computed soonest, by the tokens that the replica has been given and those
that it has not cached. A request goes to the decoder that has most of its prompt, of those with at
most LOAD_BOUND times the mean load and LOAD_SLACK requests more (consistent hashing with bounded
loads), else to the one with most room. `LoadTable` finds candidates without a look at all replicas.
A loading replica is bound to a few requests, which replicas that serve may take from it.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.requests import Request
from vllm_kvpool.router.control.states import (
    HAS_BOUND,
    NEW,
    OLD,
    TAKES_DECODE,
    TAKES_PREFILL,
    Cause,
    ReplicaId,
    State,
)

DEFAULT_BLOCK_SIZE = 16
LOAD_BOUND, LOAD_SLACK = 1.25, 4.0
NONE_HELD: Mapping[Replica, int] = {}
MISSING_STEPS = 8
"""Eighths of a prompt: smaller differences in what decoders have of it do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How much a replica is given at a time."""

    prefill_tokens: int = 16_384
    """Uncached prompt tokens in flight at one replica, unless it is a single prompt."""
    prefill_requests: int = 16
    max_pending_handoffs: int = 16
    """Requests being handed over to one decoder, until each has brought its first token."""
    decode_requests: int = 256
    headroom: float = 0.95
    """Share of a decoder's blocks that may be committed."""


class PrefillChoice(NamedTuple):
    replica: Replica
    uncached_tokens: int


def blocks_for(tokens: int, replica: Replica) -> int:
    """Blocks that so many tokens take at a replica."""
    return -(-tokens // (replica.sample.block_size or DEFAULT_BLOCK_SIZE))


def choose_prefill(
    request: Request,
    replicas: Iterable[Replica],
    budgets: Budgets,
    now: float,
    held: Mapping[Replica, int] = NONE_HELD,
) -> PrefillChoice | None:
    """Where the prompt is computed soonest; None while every replica has enough to do.

    `held`: tokens of the prompt that replicas have.
    """
    best: tuple[tuple[bool, int, str], PrefillChoice] | None = None
    for replica in replicas:
        load = replica.prefill_tokens
        if (
            not replica.serves(request.ask.model)
            or not replica.is_open(now)
            or len(replica.prefills) >= budgets.prefill_requests
        ):
            continue
        uncached = max(1, request.ask.prompt_tokens - held.get(replica, 0))
        if load and load + uncached > budgets.prefill_tokens:
            continue
        # A replica that has failed it is chosen only if there is no other.
        rank = (replica.replica_id in request.avoid, load + uncached, replica.replica_id)
        if best is None or rank < best[0]:
            best = rank, PrefillChoice(replica, uncached)
    return best[1] if best else None


def fits(replica: Replica, blocks: int, budgets: Budgets) -> bool:
    """Whether a decoder has room for so many blocks more.

    One that has nothing takes whatever fits into it at all: what is larger than that is for the
    engine to refuse.
    """
    if not replica.active:
        return True
    total = replica.sample.total_blocks
    return total == 0 or replica.used_blocks + blocks <= total * budgets.headroom


def choose_decode(
    request: Request,
    tokens: int,
    gates: Iterable[Replica],
    budgets: Budgets,
    held: Mapping[Replica, int] = NONE_HELD,
    mean_requests: float = 0.0,
) -> Replica | None:
    """The gate for so many tokens, answer included; None if all are too full.

    `held`: tokens of the prompt that replicas have. `mean_requests`: of all decoders.
    """
    ask = request.ask
    bound = LOAD_SLACK + LOAD_BOUND * mean_requests
    best: tuple[tuple[bool, int, float, int, str], Replica] | None = None
    for replica in gates:
        blocks = blocks_for(tokens, replica)
        if not fits(replica, blocks, budgets):
            continue
        missing, known = MISSING_STEPS, held.get(replica, 0)
        if known and len(replica.active) < bound:
            missing = MISSING_STEPS * max(1, ask.prompt_tokens - known) // ask.prompt_tokens
        rank = (
            *(replica.replica_id in request.avoid, missing, _share(replica, blocks)),
            *(len(replica.active) + len(replica.prefills), replica.replica_id),
        )
        if best is None or rank < best[0]:
            best = rank, replica
    return best[1] if best else None


def choose_to_clear(tokens: int, gates: Collection[Replica], budgets: Budgets) -> Replica:
    """Who is to get nothing else until so many tokens, too many for all of them now, fit."""
    large_enough = [
        each
        for each in gates
        if blocks_for(tokens, each) <= each.sample.total_blocks * budgets.headroom
    ]
    return min(large_enough or gates, key=lambda each: (_share(each, 0), each.replica_id))


def _share(replica: Replica, blocks: int) -> float:
    """Of its blocks, in use with so many more."""
    return (replica.used_blocks + blocks) / (replica.sample.total_blocks or 1 << 30)


MAX_TRIED = 32
"""Of a ranking, when nothing suitable is found: replicas are about equally large."""

Key = tuple[float, int, ReplicaId]


class Rankings:
    """Replicas by a key, the smallest first, for each model."""

    def __init__(self) -> None:
        self._by_models: dict[frozenset[str], Ranking] = {}
        self._models: dict[ReplicaId, frozenset[str]] = {}
        self.num_gains = 0
        """Replicas that have been ranked anew or moved up; what fitted nowhere may fit there."""

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, replica: Replica) -> bool:
        return replica.replica_id in self._models

    def set(self, replica: Replica, key: Key | None) -> None:
        """None: it is not ranked."""
        before = self._models.pop(replica.replica_id, None)
        if key is not None and (
            before != replica.models or key < self._by_models[before].key(replica)
        ):
            self.num_gains += 1
        if before is not None and (key is None or before != replica.models):
            self._by_models[before].set(replica, None)
            if not len(self._by_models[before]):
                del self._by_models[before]
        if key is not None:
            self._models[replica.replica_id] = replica.models
            self._by_models.setdefault(replica.models, Ranking()).set(replica, key)

    def first(self, number: int, accepts: Callable[[Replica], bool], model: str) -> list[Replica]:
        """So many that serve a model and are accepted, those with the smallest keys."""
        rankings = [
            ranking
            for models, ranking in self._by_models.items()
            if not model or not models or model in models
        ]
        if len(rankings) == 1:
            return rankings[0].first(number, accepts)
        found = [
            (ranking.key(each), each)
            for ranking in rankings
            for each in ranking.first(number, accepts)
        ]
        return [each for _, each in sorted(found, key=lambda pair: pair[0])[:number]]


class Ranking:
    """Replicas by a key, the smallest first."""

    def __init__(self) -> None:
        self._keys: dict[ReplicaId, Key] = {}
        self._sorted: list[tuple[Key, Replica]] = []
        """Keys differ, since each ends with the replica's id."""

    def __len__(self) -> int:
        return len(self._sorted)

    def key(self, replica: Replica) -> Key:
        return self._keys[replica.replica_id]

    def set(self, replica: Replica, key: Key | None) -> None:
        """None: it is not ranked."""
        before = self._keys.pop(replica.replica_id, None)
        if before is not None:
            del self._sorted[bisect_left(self._sorted, (before,))]
        if key is not None:
            self._keys[replica.replica_id] = key
            insort(self._sorted, (key, replica))

    def first(self, number: int, accepts: Callable[[Replica], bool]) -> list[Replica]:
        """So many that are accepted, those with the smallest keys."""
        found: list[Replica] = []
        for _, replica in islice(self._sorted, MAX_TRIED):
            if accepts(replica):
                found.append(replica)
                if len(found) == number:
                    break
        return found


@dataclass(slots=True)
class Totals:
    """Sums over replicas: over all for prefill, for the rest over those that decode."""

    replicas: int = 0
    prefill_replicas: int = 0
    """Of them, those that take prompts."""
    decode_replicas: int = 0
    """Of them, those that take requests whole or to decode, locked ones too."""
    prefill_tokens: int = 0
    committed_blocks: int = 0
    committed_requests: int = 0
    starting_requests: int = 0
    computing_requests: int = 0
    """Of those, the ones whose prompts decoders compute."""
    room_blocks: int = 0
    """Of decoders that are not locked, up to the headroom."""
    num_unsized: int = 0
    """Of these, those that have not said how large they are."""

    def add(self, part: "Totals", sign: int) -> None:
        self.replicas += sign * part.replicas
        self.prefill_replicas += sign * part.prefill_replicas
        self.decode_replicas += sign * part.decode_replicas
        self.prefill_tokens += sign * part.prefill_tokens
        self.committed_blocks += sign * part.committed_blocks
        self.committed_requests += sign * part.committed_requests
        self.starting_requests += sign * part.starting_requests
        self.computing_requests += sign * part.computing_requests
        self.room_blocks += sign * part.room_blocks
        self.num_unsized += sign * part.num_unsized


class LoadTable:
    """Owned by the controller. `refresh` comes before anything is asked after a change."""

    def __init__(self, fleet: Fleet, budgets: Budgets) -> None:
        self._fleet = fleet
        self._budgets = budgets
        self._parts: dict[ReplicaId, tuple[frozenset[str], Totals]] = {}
        self._totals: dict[frozenset[str], Totals] = {}
        """By the models that replicas list."""
        self._locked: Collection[ReplicaId] = frozenset()
        self._is_collapsed = False
        self._paused: set[ReplicaId] = set()
        self._behind: dict[frozenset[str], dict[ReplicaId, Replica]] = {}
        """Decoders in whose engines requests wait, by their models."""
        self.prefillers = Rankings()
        """Those that may be given one more prompt, by the tokens that they have to compute."""
        self.decoders = Rankings()
        """Those that may be given one more request, by the share of their blocks in use."""
        self.block_size = 0
        """The largest of all engines so far."""

    def refresh(self, locked: frozenset[ReplicaId], *, is_collapsed: bool) -> None:
        """Take in what has changed. While collapsed, prefill replicas decode as well."""
        fleet = self._fleet
        if is_collapsed is not self._is_collapsed:
            self._is_collapsed = is_collapsed
            fleet.changed.update(fleet)
        if locked is not self._locked:
            changed = locked.symmetric_difference(self._locked)
            fleet.changed.update(fleet[each] for each in changed if each in fleet)
            self._locked = locked
        for replica in fleet.changed:
            self._take_in(replica)
        fleet.changed.clear()

    def totals(self, model: str = "") -> Totals:
        """Over the replicas that serve a model, or all."""
        if len(self._totals) == 1:
            return next(iter(self._totals.values()))
        found = Totals()
        for models, each in self._totals.items():
            if not model or not models or model in models:
                found.add(each, 1)
        return found

    def models_behind(self, is_stale: Callable[[Replica], bool]) -> list[frozenset[str]]:
        """Models of decoders in whose engines requests wait, by a sample that is not stale."""
        return [
            models
            for models, replicas in self._behind.items()
            if any(not is_stale(each) for each in replicas.values())
        ]

    def next_open(self, now: float) -> float:
        """When the first replica that has refused work may be given some again."""
        pauses = [self._fleet[each].busy_until for each in self._paused if each in self._fleet]
        open_at = [at for at in pauses if at > now]
        if len(open_at) < len(self._paused):
            self._paused = {
                each
                for each in self._paused
                if each in self._fleet and self._fleet[each].busy_until > now
            }
        return min(open_at, default=float("inf"))

    def _take_in(self, replica: Replica) -> None:
        replica_id = replica.replica_id
        if (before := self._parts.pop(replica_id, None)) is not None:
            models, part = before
            self._totals[models].add(part, -1)
            if not self._totals[models].replicas:
                del self._totals[models]
        for each in self._behind.values():
            each.pop(replica_id, None)
        if self._fleet.get(replica_id) is not replica:
            if replica_id not in self._fleet:
                self.prefillers.set(replica, None)
                self.decoders.set(replica, None)
            return
        part = self._part(replica)
        self._parts[replica_id] = replica.models, part
        self._totals.setdefault(replica.models, Totals()).add(part, 1)
        self.block_size = max(self.block_size, replica.sample.block_size)
        if replica.busy_until > 0.0:
            self._paused.add(replica_id)
        if _is_behind(replica):
            self._behind.setdefault(replica.models, {})[replica_id] = replica
        budgets = self._budgets
        takes_prefill = replica.state in TAKES_PREFILL
        takes_prefill = takes_prefill and len(replica.prefills) < budgets.prefill_requests
        key = float(replica.prefill_tokens), 0, replica_id
        self.prefillers.set(replica, key if takes_prefill else None)
        is_open = (
            self._decodes(replica)
            and replica_id not in self._locked
            and replica.num_starting < budgets.max_pending_handoffs
            and len(replica.active) < budgets.decode_requests
        )
        work = len(replica.active) + len(replica.prefills)
        self.decoders.set(replica, (replica.used_share, work, replica_id) if is_open else None)

    def _decodes(self, replica: Replica) -> bool:
        state = replica.state
        return state in TAKES_DECODE or (self._is_collapsed and state in TAKES_PREFILL)

    def _part(self, replica: Replica) -> Totals:
        part = Totals(replicas=1, prefill_tokens=replica.prefill_tokens)
        part.prefill_replicas = replica.state in TAKES_PREFILL
        if not self._decodes(replica):
            return part
        part.decode_replicas = 1
        part.committed_blocks = replica.committed_blocks
        part.committed_requests = len(replica.active)
        part.starting_requests = replica.num_starting
        part.computing_requests = replica.num_computing
        if replica.replica_id not in self._locked:
            total = replica.sample.total_blocks
            part.num_unsized = total == 0
            part.room_blocks = max(0, int(total * self._budgets.headroom) - replica.used_blocks)
            if total == 0:
                part.room_blocks = 0
        return part

    def check(self) -> None:
        """What is kept is what a look at all replicas says."""
        assert not self._fleet.changed
        totals: dict[frozenset[str], Totals] = {}
        for replica in self._fleet:
            part = self._part(replica)
            assert (replica.models, part) == self._parts[replica.replica_id], replica
            totals.setdefault(replica.models, Totals()).add(part, 1)
        assert totals == self._totals
        behind = {each.replica_id for each in self._fleet if _is_behind(each)}
        assert behind == {each for group in self._behind.values() for each in group}
        assert self._parts.keys() == {each.replica_id for each in self._fleet}


def _is_behind(replica: Replica) -> bool:
    """Whether requests wait in a decoder's engine; its queue alone may have been emptied since."""
    is_decoder = replica.state in TAKES_DECODE
    return is_decoder and replica.sample.waiting > 0 and replica.num_starting > 0


FIRST_LIMIT = 4
LEAST_LIMIT = 2
LIMIT_FALLS_EVERY_S = 0.2
"""The longer it loads, the fewer it is given: what it is bound to should not wait long."""

_PREFILL = frozenset({State.PREFILL})


def limit(replica: Replica, now: float) -> int:
    """How many requests a loading replica may be bound to."""
    fallen = int((now - replica.since) / LIMIT_FALLS_EVERY_S)
    return max(LEAST_LIMIT, FIRST_LIMIT - fallen)


def choose_new(fleet: Fleet, now: float, model: str = "") -> Replica | None:
    """The loading replica that one more request may be bound to, the emptiest first."""
    open_ones = [
        each
        for each in fleet.in_states(NEW)
        if each.serves(model) and len(each.bound) < limit(each, now)
    ]
    return min(open_ones, key=lambda each: (len(each.bound), each.replica_id), default=None)


def next_bound(fleet: Fleet) -> tuple[Replica, Request] | None:
    """The bound request that an old replica may steal: the first in the order of the queue."""
    heads = [(each, each.bound[0]) for each in fleet.in_states(HAS_BOUND) if each.bound]
    return min(heads, key=lambda head: head[1].order, default=None)


def pair(fleet: Fleet, now: float) -> None:
    """As many old replicas as there are new ones, where there are so many."""
    wanted, old = len(fleet.in_states(HAS_BOUND)), fleet.in_states(OLD)
    for replica in fleet.in_states(_PREFILL)[: max(0, wanted - len(old))]:
        fleet.move(replica, Cause.PAIR, "a new replica is bound to requests", now)
    for replica in old[wanted:]:
        fleet.move(replica, Cause.UNPAIR, "no new replica is left", now)
