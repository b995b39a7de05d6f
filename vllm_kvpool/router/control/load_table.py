"""Sums over replicas, and which of them have least to do, kept up to date as they change (pure).

A replica that changes adds itself to `Fleet.changed`; only those are looked at again. So an event
costs about the same with any number of replicas.
"""

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass

from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.placement import Budgets
from vllm_kvpool.router.control.states import TAKES_DECODE, TAKES_PREFILL, ReplicaId

MAX_TRIED = 32
"""Of a ranking, when nothing suitable is found: replicas are about equally large."""

Key = tuple[float, int, ReplicaId]


class Rankings:
    """Replicas by a key, the smallest first, for each model."""

    def __init__(self) -> None:
        self._by_models: dict[frozenset[str], Ranking] = {}
        self._models: dict[ReplicaId, frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, replica: Replica) -> bool:
        return replica.replica_id in self._models

    def set(self, replica: Replica, key: Key | None) -> None:
        """None: it is not ranked."""
        before = self._models.pop(replica.replica_id, None)
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
        self._entries: dict[ReplicaId, tuple[Key, Replica]] = {}
        # Entries that do not hold any more stay until they come up, or are too many.
        self._heap: list[tuple[Key, int, tuple[Key, Replica]]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, replica: Replica) -> Key:
        return self._entries[replica.replica_id][0]

    def set(self, replica: Replica, key: Key | None) -> None:
        """None: it is not ranked."""
        entry = self._entries.get(replica.replica_id)
        if key is None:
            self._entries.pop(replica.replica_id, None)
        elif entry is None or entry[0] != key or entry[1] is not replica:
            entry = self._entries[replica.replica_id] = key, replica
            self._push(entry)
            if len(self._heap) > 4 * len(self._entries) + 64:
                self._heap = []
                for each in self._entries.values():
                    self._push(each)

    def first(self, number: int, accepts: Callable[[Replica], bool]) -> list[Replica]:
        """So many that are accepted, those with the smallest keys."""
        found: list[Replica] = []
        tried: list[tuple[Key, int, tuple[Key, Replica]]] = []
        while self._heap and len(found) < number and len(tried) < MAX_TRIED:
            pushed = heapq.heappop(self._heap)
            replica = pushed[2][1]
            if self._entries.get(replica.replica_id) is not pushed[2]:
                continue
            tried.append(pushed)
            if accepts(replica):
                found.append(replica)
        for each in tried:
            heapq.heappush(self._heap, each)
        return found

    def _push(self, entry: tuple[Key, Replica]) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (entry[0], self._pushed, entry))


@dataclass(slots=True)
class Totals:
    """Sums over replicas: over all for prefill, for the rest over those that decode."""

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
        self.prefill_tokens += sign * part.prefill_tokens
        self.committed_blocks += sign * part.committed_blocks
        self.committed_requests += sign * part.committed_requests
        self.starting_requests += sign * part.starting_requests
        self.computing_requests += sign * part.computing_requests
        self.room_blocks += sign * part.room_blocks
        self.num_unsized += sign * part.num_unsized


NOTHING = Totals()


class LoadTable:
    """Owned by the controller. `refresh` comes before anything is asked after a change."""

    def __init__(self, fleet: Fleet, budgets: Budgets) -> None:
        self._fleet = fleet
        self._budgets = budgets
        self._parts: dict[ReplicaId, Totals] = {}
        self._locked: Collection[ReplicaId] = frozenset()
        self._is_collapsed = False
        self._paused: set[ReplicaId] = set()
        self._totals = Totals()
        self.prefillers = Rankings()
        """Those that may be given one more prompt, by the tokens that they have to compute."""
        self.decoders = Rankings()
        """Those that may be given one more request, by the share of their blocks in use."""
        self.block_size = 0
        """The largest of all engines so far."""

    def refresh(self, locked: frozenset[ReplicaId], *, is_collapsed: bool) -> Totals:
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
        return self._totals

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
        self._totals.add(self._parts.pop(replica_id, NOTHING), -1)
        if self._fleet.get(replica_id) is not replica:
            if replica_id not in self._fleet:
                self.prefillers.set(replica, None)
                self.decoders.set(replica, None)
            return
        part = self._parts[replica_id] = self._part(replica)
        self._totals.add(part, 1)
        self.block_size = max(self.block_size, replica.sample.block_size)
        if replica.busy_until > 0.0:
            self._paused.add(replica_id)
        budgets = self._budgets
        takes_prefill = replica.state in TAKES_PREFILL
        takes_prefill = takes_prefill and len(replica.prefills) < budgets.prefill_requests
        key = float(replica.prefill_tokens), 0, replica_id
        self.prefillers.set(replica, key if takes_prefill else None)
        is_open = (
            self._decodes(replica)
            and replica_id not in self._locked
            and replica.num_starting < budgets.permits
            and len(replica.stays) < budgets.decode_requests
        )
        work = len(replica.stays) + len(replica.prefills)
        self.decoders.set(replica, (replica.used_share, work, replica_id) if is_open else None)

    def _decodes(self, replica: Replica) -> bool:
        state = replica.state
        return state in TAKES_DECODE or (self._is_collapsed and state in TAKES_PREFILL)

    def _part(self, replica: Replica) -> Totals:
        part = Totals(prefill_tokens=replica.prefill_tokens)
        if not self._decodes(replica):
            return part
        part.committed_blocks = replica.committed_blocks
        part.committed_requests = len(replica.stays)
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
        total = Totals()
        for replica in self._fleet:
            part = self._part(replica)
            assert part == self._parts[replica.replica_id], replica
            total.add(part, 1)
        assert total == self._totals
        assert self._parts.keys() == {each.replica_id for each in self._fleet}
