"""The stored part of prompts that are handed over (pure; the engine thread's).

A chunk is stored once the puts of its slabs have ended, of each slab that is not optional one well.
A save that fails ends a hand-over there, and so does the request's end once its saves are planned.
Several requests may have one prompt: the best of them counts.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_kvpool.transfer.ops import HandOverEnd, HandOverProgress, SaveJob, Slab


@dataclass(slots=True)
class _Request:
    """A request's chunks. Those before `planned` are stored, but for `open` and lost ones."""

    planned: int = 0
    later: dict[int, int] = field(default_factory=dict)  # planned behind a gap: first -> stop
    open: dict[int, int] = field(default_factory=dict)  # chunk -> slabs on their way; ascending
    lost: int | None = None  # the first chunk that will not be stored
    stop: int | None = None  # no chunk from here on is saved

    def plan(self, first: int, stop: int) -> None:
        """Plan chunks [first, stop), or take them as found with all before them (first == stop)."""
        if first == stop:
            self.planned = max(self.planned, stop)
        else:
            self.later[first] = max(stop, self.later.get(first, 0))
        while reached := [each for each in self.later if each <= self.planned]:
            for each in reached:
                self.planned = max(self.planned, self.later.pop(each))

    @property
    def stored(self) -> int:
        first_open = next(iter(self.open), self.planned)
        first_lost = self.planned if self.lost is None else self.lost  # perhaps behind a gap
        return min(self.planned, first_open, first_lost)

    @property
    def ended(self) -> int | None:
        return min((each for each in (self.lost, self.stop) if each is not None), default=None)

    @property
    def is_over(self) -> bool:
        """True if the stored part can grow no more."""
        return self.stop is not None and self.planned >= self.stop and not self.open


@dataclass(slots=True)
class _HandOver:
    requests: dict[str, _Request] = field(default_factory=dict)  # that are not over
    stored: int = 0
    ended: int = 0  # the best of those that are over
    told: tuple[int, int | None] | None = None


class SaveProgress:
    """The hand-overs of this rank whose saves are in progress."""

    def __init__(self) -> None:
        self._hand_overs: dict[bytes, _HandOver] = {}

    def planned(self, job: SaveJob) -> list[HandOverProgress]:
        """Take the begin of a save of a request that is handed over."""
        plan = job.plan
        request = self._request(plan.topic, plan.request_id)
        planned = Counter(slab.chunk.position for slab in job.slabs if slab.stored)
        for position, slabs in planned.items():
            request.open[position] = request.open.get(position, 0) + slabs
        request.open = dict(sorted(request.open.items()))
        if not plan.is_state:  # a state says nothing of the chunks before its own
            request.plan(plan.found, plan.found)
            request.plan(plan.first_chunk, plan.first_chunk + len(plan.hashes))
        return self._changes(plan.topic)

    def recorded(self, job: SaveJob, slab: Slab, *, is_stored: bool) -> list[HandOverProgress]:
        """Take a slab of a save that is in a store, or was given up."""
        plan, position = job.plan, slab.chunk.position
        hand_over = self._hand_overs.get(plan.topic)
        request = None if hand_over is None else hand_over.requests.get(plan.request_id)
        if request is None or not slab.stored:
            return []
        request.open[position] -= 1
        if not request.open[position]:
            del request.open[position]
        if not is_stored and not slab.kind.is_optional:
            request.lost = position if request.lost is None else min(request.lost, position)
        return self._changes(plan.topic)

    def ends(self, end: HandOverEnd) -> list[HandOverProgress]:
        """Take a request's last event: it saves no more than it has planned."""
        request = self._request(end.topic, end.request_id)
        request.plan(end.found, end.found)
        request.stop = end.chunks if request.stop is None else min(request.stop, end.chunks)
        return self._changes(end.topic)

    def _request(self, topic: bytes, request_id: str) -> _Request:
        requests = self._hand_overs.setdefault(topic, _HandOver()).requests
        return requests.setdefault(request_id, _Request())

    def _changes(self, name: bytes) -> list[HandOverProgress]:
        hand_over = self._hand_overs[name]
        for request_id, request in list(hand_over.requests.items()):
            hand_over.stored = max(hand_over.stored, request.stored)
            if request.is_over:
                assert request.ended is not None
                hand_over.ended = max(hand_over.ended, request.ended)
                del hand_over.requests[request_id]
        ended = _latest(request.ended for request in hand_over.requests.values())
        if ended is not None:
            ended = max(ended, hand_over.ended, hand_over.stored)
        if not hand_over.requests:
            del self._hand_overs[name]
        now = hand_over.stored, ended
        if now == hand_over.told:
            return []
        hand_over.told = now
        return [HandOverProgress(name, *now)]


def _latest(ends: Iterable[int | None]) -> int | None:
    """Return the last of all ends; None if one is open."""
    latest = 0
    for end in ends:
        if end is None:
            return None
        latest = max(latest, end)
    return latest


def newest(progress: Iterable[HandOverProgress]) -> list[HandOverProgress]:
    """Return the newest progress of each prompt, and its newest end if another request follows."""
    kept: dict[tuple[bytes, bool], HandOverProgress] = {}
    for each in progress:
        has_ended = each.ended is not None
        for key in {(each.topic, False), (each.topic, has_ended)}:
            kept.pop(key, None)
        kept[each.topic, has_ended] = each
    return list(kept.values())
