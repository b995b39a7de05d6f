"""The choice of a replica for a prompt, and for a request to decode (pure).

A prompt goes to the replica that computes it soonest, by the tokens that are queued there and the
prompt's tokens that its cache lacks. A request goes to the decoder that has most of its prompt,
as in consistent hashing with bounded loads: the decoder's load must not exceed LOAD_BOUND times the
mean plus LOAD_SLACK requests. Otherwise the decoder with most room gets it. `LoadTable` finds
candidates without a look at all replicas. A loading replica is bound to a few requests; serving
replicas may take these over.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.requests import DEFAULT_BLOCK_SIZE, Request
from vllm_kvpool.router.control.settings import Settings
from vllm_kvpool.router.control.states import (
    HAS_BOUND,
    TAKES_DECODE,
    TAKES_PREFILL,
    Cause,
    ReplicaId,
    State,
)

LOAD_BOUND, LOAD_SLACK = 1.25, 4.0
NONE_HELD: Mapping[Replica, int] = {}
MISSING_STEPS = 8
"""Eighths of a prompt: smaller differences in what decoders have of it do not count."""


class PrefillChoice(NamedTuple):
    """The replica to compute a prompt, and the prompt tokens that it has not cached."""

    replica: Replica
    uncached_tokens: int


def blocks_for(tokens: int, replica: Replica) -> int:
    """Return the number of blocks that so many tokens take at a replica."""
    return -(-tokens // (replica.sample.block_size or DEFAULT_BLOCK_SIZE))


def choose_prefill(
    request: Request,
    replicas: Iterable[Replica],
    settings: Settings,
    now: float,
    held: Mapping[Replica, int] = NONE_HELD,
) -> PrefillChoice | None:
    """Return the replica that computes the prompt soonest; None while every replica is full.

    `held`: tokens of the prompt that replicas have.
    """
    best: tuple[tuple[bool, int, str], PrefillChoice] | None = None
    for replica in replicas:
        load = replica.work.prefill_tokens
        if (
            not replica.serves(request.ask.model)
            or not replica.health.is_open(now)
            or len(replica.work.prefills) >= settings.prefill_requests
        ):
            continue
        uncached = max(1, request.ask.prompt_tokens - held.get(replica, 0))
        if load and load + uncached > settings.prefill_tokens:
            continue
        # A replica that has failed it is chosen only if there is no other.
        rank = (replica.replica_id in request.avoid, load + uncached, replica.replica_id)
        if best is None or rank < best[0]:
            best = rank, PrefillChoice(replica, uncached)
    return best[1] if best else None


def room_of(replica: Replica, settings: Settings) -> float:
    """Return the most tokens, answer included, that a decoder may be given now.

    One that has nothing takes whatever fits into it at all: what is larger than that is for the
    engine to refuse.
    """
    total = replica.sample.total_blocks
    if not replica.work.active or not total:
        return math.inf
    blocks = math.floor(total * settings.headroom) - replica.work.used_blocks
    return blocks * (replica.sample.block_size or DEFAULT_BLOCK_SIZE)


def choose_decode(
    request: Request,
    decoders: Iterable[Replica],
    held: Mapping[Replica, int] = NONE_HELD,
    mean_requests: float = 0.0,
) -> Replica | None:
    """Return the decoder for a request, of those with room for it; None if there is none.

    `held`: tokens of the prompt that replicas have. `mean_requests`: of all decoders.
    """
    ask, tokens = request.ask, request.tokens
    bound = LOAD_SLACK + LOAD_BOUND * mean_requests
    best: tuple[tuple[bool, int, float, int, str], Replica] | None = None
    for replica in decoders:
        missing, known = MISSING_STEPS, held.get(replica, 0)
        if known and len(replica.work.active) < bound:
            missing = MISSING_STEPS * max(1, ask.prompt_tokens - known) // ask.prompt_tokens
        rank = (
            replica.replica_id in request.avoid,
            missing,
            replica.used_share(blocks_for(tokens, replica)),
            len(replica.work.active) + len(replica.work.prefills),
            replica.replica_id,
        )
        if best is None or rank < best[0]:
            best = rank, replica
    return best[1] if best else None


def choose_to_clear(tokens: int, decoders: Sequence[Replica], settings: Settings) -> Replica:
    """Return the decoder that gets nothing else until a request fits for which none has room.

    The first of them that is large enough.
    """
    for each in decoders:
        if blocks_for(tokens, each) <= each.sample.total_blocks * settings.headroom:
            return each
    return decoders[0]


MAX_TRIED = 32
"""Entries of a ranking that are looked at: replicas are about equally large."""

Key = tuple[float, int, ReplicaId]


class Ranking:
    """Replicas by a key, the smallest first. Keys end with the replica's id."""

    def __init__(self) -> None:
        self._keys: dict[ReplicaId, Key] = {}
        self._sorted: list[tuple[Key, Replica]] = []
        self.num_gains = 0
        """Number of times that a replica was new or has moved up, so that it may have room."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, replica: Replica) -> bool:
        return replica.replica_id in self._keys

    def set(self, replica: Replica, key: Key | None) -> None:
        """Rank a replica by a key, or remove it if that is None."""
        before = self._keys.get(replica.replica_id)
        if key == before:
            return
        if before is not None:
            del self._keys[replica.replica_id]
            del self._sorted[bisect_left(self._sorted, (before,))]
        if key is not None:
            self._keys[replica.replica_id] = key
            insort(self._sorted, (key, replica))
            self.num_gains += before is None or key < before

    def first(self, number: int, accepts: Callable[[Replica], bool], model: str) -> list[Replica]:
        """Return the `number` accepted replicas with the smallest keys that serve a model."""
        serving = (each for _, each in self._sorted if each.serves(model))
        return list(islice(filter(accepts, islice(serving, MAX_TRIED)), number))


class Totals(msgspec.Struct, gc=False):
    """Sums over replicas: over all for prefill, for the rest over those that decode."""

    replicas: int = 0
    prefill_replicas: int = 0
    """Replicas that take prompts."""
    decode_replicas: int = 0
    """Replicas that take requests whole or to decode, locked decoders included."""
    prefill_tokens: int = 0
    committed_tokens: int = 0
    """Committed blocks of decoders, in tokens."""
    committed_requests: int = 0
    starting_requests: int = 0
    """Requests without a token that wait for no prefill replica."""
    room_tokens: int = 0
    """Free blocks of decoders that are not locked, up to the headroom, in tokens."""
    num_unsized: int = 0
    """Decoders that are not locked and whose capacity is not known."""
    num_behind: int = 0
    """Decoders in whose engines requests wait; their queue alone may have been emptied since."""

    def move(self, before: "Totals", after: "Totals") -> None:
        """Replace a replica's part in the sums."""
        self.replicas += after.replicas - before.replicas
        self.prefill_replicas += after.prefill_replicas - before.prefill_replicas
        self.decode_replicas += after.decode_replicas - before.decode_replicas
        self.prefill_tokens += after.prefill_tokens - before.prefill_tokens
        self.committed_tokens += after.committed_tokens - before.committed_tokens
        self.committed_requests += after.committed_requests - before.committed_requests
        self.starting_requests += after.starting_requests - before.starting_requests
        self.room_tokens += after.room_tokens - before.room_tokens
        self.num_unsized += after.num_unsized - before.num_unsized
        self.num_behind += after.num_behind - before.num_behind


NOTHING = Totals()


class LoadTable:
    """Owned by the controller. `refresh` comes before anything is asked after a change."""

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._parts: dict[ReplicaId, tuple[frozenset[str], Totals]] = {}
        self._totals: dict[frozenset[str], Totals] = {}
        """By the models that replicas list."""
        self._locked: Collection[ReplicaId] = frozenset()
        self._is_collapsed = False
        self.prefillers = Ranking()
        """Replicas that may be given one more prompt, by the tokens that they have to compute."""
        self.decoders = Ranking()
        """Replicas that may be given one more request, by the share of their blocks in use."""

    def refresh(self, locked: frozenset[ReplicaId], *, is_collapsed: bool) -> None:
        """Take in what has changed. While collapsed, prefill replicas decode as well."""
        changed = self._fleet.changed
        if is_collapsed is not self._is_collapsed:
            self._is_collapsed = is_collapsed
            changed.update(self._fleet)
        self._locked = locked
        for replica in changed:
            self._take_in(replica)
        changed.clear()

    def totals(self, model: str = "") -> Totals:
        """Return the totals over the replicas that serve a model, or all."""
        if len(self._totals) == 1:
            return next(iter(self._totals.values()))
        found = Totals()
        for models, each in self._totals.items():
            if not model or not models or model in models:
                found.move(NOTHING, each)
        return found

    def models_behind(self) -> list[frozenset[str]]:
        """Return the models of decoders in whose engines requests wait."""
        return [models for models, each in self._totals.items() if each.num_behind]

    def _take_in(self, replica: Replica) -> None:
        replica_id, models = replica.replica_id, replica.models
        if self._fleet.get(replica_id) is not replica:
            self._drop(replica)
            return
        part, before = self._part(replica), self._parts.get(replica_id)
        if before is None or before[0] is not models:
            if before is not None:
                self._leave(replica_id, *before)
            before = models, NOTHING
            self._totals.setdefault(models, Totals())
        self._totals[models].move(before[1], part)
        self._parts[replica_id] = models, part
        settings = self._settings
        key: Key | None = None
        if part.prefill_replicas and len(replica.work.prefills) < settings.prefill_requests:
            key = float(replica.work.prefill_tokens), 0, replica_id
        self.prefillers.set(replica, key)
        key, num_active = None, len(replica.work.active)
        if (
            part.decode_replicas
            and replica.work.num_starting < settings.max_pending_handoffs
            and replica.work.num_sequences < settings.decode_requests
            and replica_id not in self._locked
        ):
            key = replica.used_share(), num_active + len(replica.work.prefills), replica_id
        self.decoders.set(replica, key)

    def _drop(self, replica: Replica) -> None:
        """Drop a replica that is not in the fleet any more; another may have its name and place."""
        replica_id = replica.replica_id
        if replica_id in self._fleet:
            return
        if (before := self._parts.get(replica_id)) is not None:
            self._leave(replica_id, *before)
        self.prefillers.set(replica, None)
        self.decoders.set(replica, None)

    def _leave(self, replica_id: ReplicaId, models: frozenset[str], part: Totals) -> None:
        """Take a replica's part out of its models' sums."""
        del self._parts[replica_id]
        self._totals[models].move(part, NOTHING)
        if not self._totals[models].replicas:
            del self._totals[models]

    def _part(self, replica: Replica) -> Totals:
        takes_prefill = int(replica.state in TAKES_PREFILL)
        if not (replica.state in TAKES_DECODE or (self._is_collapsed and takes_prefill)):
            return Totals(1, takes_prefill, 0, replica.work.prefill_tokens)
        total, room, is_sized = replica.sample.total_blocks, 0, True
        size = replica.sample.block_size or DEFAULT_BLOCK_SIZE
        if replica.replica_id not in self._locked:
            room = max(0, int(total * self._settings.headroom) - replica.work.used_blocks)
            is_sized = total > 0
        return Totals(
            replicas=1,
            prefill_replicas=takes_prefill,
            decode_replicas=1,
            prefill_tokens=replica.work.prefill_tokens,
            committed_tokens=replica.work.committed_blocks * size,
            committed_requests=len(replica.work.active),
            starting_requests=replica.work.num_ready,
            room_tokens=room * size if is_sized else 0,
            num_unsized=int(not is_sized),
            num_behind=int(replica.work.num_waiting > 0 and replica.work.num_ready > 0),
        )


FIRST_LIMIT = 4
LEAST_LIMIT = 2
LIMIT_FALLS_EVERY_S = 0.2
"""The longer it loads, the fewer it is given: what it is bound to should not wait long."""


def limit(replica: Replica, now: float) -> int:
    """Return the number of requests that a loading replica may be bound to."""
    fallen = int((now - replica.since) / LIMIT_FALLS_EVERY_S)
    return max(LEAST_LIMIT, FIRST_LIMIT - fallen)


def choose_new(fleet: Fleet, now: float, model: str = "") -> Replica | None:
    """Return the loading replica that one more request may be bound to, the emptiest first."""
    open_ones = [
        each
        for each in fleet.in_states(State.NEW_PREFILL)
        if each.serves(model) and len(each.work.bound) < limit(each, now)
    ]
    return min(open_ones, key=lambda each: (len(each.work.bound), each.replica_id), default=None)


def next_bound(fleet: Fleet) -> tuple[Replica, Request] | None:
    """Return the bound request that an old replica may steal.

    It is the first in the order of the queue.
    """
    if not (loading := fleet.in_states(HAS_BOUND)):
        return None
    heads = [(each, each.work.bound[0]) for each in loading if each.work.bound]
    return min(heads, key=lambda head: head[1].order, default=None)


def pair(fleet: Fleet, now: float) -> None:
    """Pair each new replica with an old one, as far as prefill replicas suffice."""
    wanted, old = len(fleet.in_states(HAS_BOUND)), fleet.in_states(State.OLD_PREFILL)
    for replica in fleet.in_states(State.PREFILL)[: max(0, wanted - len(old))]:
        fleet.move(replica, Cause.PAIR, "a new replica is bound to requests", now)
    for replica in old[wanted:]:
        fleet.move(replica, Cause.UNPAIR, "no new replica is left", now)
