"""Multimodal items as the scheduler's side knows them, and whether one holds a request back (pure).

An item has one record, by the engine's name of it. `availability` says what a request may do about
the item; `scheduler` does it.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from vllm_kvpool.embeds.params import Delivery
from vllm_kvpool.embeds.protocol.messages import Code, Expect

MAX_CHOICES = 4  # encodings of one item that are tried


class Feature(NamedTuple):
    """A multimodal item of a request, at [start, end) of its prompt."""

    mm_hash: str
    start: int
    end: int
    rows: int
    has_media: bool
    """True if this engine could encode the item."""
    is_named: bool = True
    """False where vLLM has numbered it: another engine gives that number to another item."""


class EmbedsRequest(NamedTuple):
    """The scheduler side's record of a request."""

    request_id: str
    features: tuple[Feature, ...]
    delivery: Delivery


@dataclass(slots=True)
class Encodings:
    """The encodings of an item at the ranks; if they differ, one is chosen for all."""

    by_rank: dict[int, str] = field(default_factory=dict)  # digests; there, or on their way
    ready: set[int] = field(default_factory=set)  # ranks that have their encoding whole
    chosen: str = ""  # empty: none had to be
    untried: dict[str, None] = field(default_factory=dict)
    num_choices: int = 0

    def add(self, rank: int, digest: str, *, is_ready: bool) -> str:
        """Note a rank's encoding. Return the encoding to choose now; empty for none."""
        if self.chosen not in ("", digest):
            return ""  # sent before the rank knew which one was chosen
        self.by_rank[rank] = digest
        if is_ready:
            self.ready.add(rank)
        if len(set(self.by_rank.values())) < 2:
            return ""
        # An encoding that a rank has already, else the lowest rank's.
        self.untried |= dict.fromkeys(self.by_rank.values())
        return self.by_rank[min(self.ready or self.by_rank)]

    def choose(self, digest: str) -> None:
        """Use one encoding for all ranks; each of them reports anew."""
        self.num_choices += 1
        self.chosen = digest
        self.untried.pop(digest, None)
        self.by_rank.clear()
        self.ready.clear()

    def remove(self, rank: int) -> None:
        """Forget a rank's encoding."""
        self.by_rank.pop(rank, None)
        self.ready.discard(rank)

    @property
    def next_choice(self) -> str:
        """The encoding to try when the chosen one fails; empty: none is left."""
        return next(iter(self.untried), "") if self.num_choices < MAX_CHOICES else ""


@dataclass(slots=True)
class ItemRecord:
    """An item that the engine has, that requests wait for, or that is being loaded."""

    mm_hash: str
    """The engine's name."""
    name: str = ""
    """The producer's name, while the item is requested or loaded."""
    is_resident: bool = False
    """True if it is in the engine's encoder cache, as far as known."""
    requests: dict[str, Expect] = field(default_factory=dict)
    """Requests that wait for it, and the message sent for each."""
    encodings: Encodings = field(default_factory=Encodings)
    failure: tuple[Code, str] | None = None
    """The reason why it cannot be received, for the requests that wait."""
    loading: set[int] = field(default_factory=set)
    """Ranks that have not confirmed its load."""
    loading_until: float = 0.0
    """Time after which a load is not waited for."""
    wait_id: int = 0
    """The number of the present wait."""

    @property
    def order(self) -> int:
        """The order of the oldest request that waits for it."""
        return min(each.order for each in self.requests.values())

    def is_ready(self, num_ranks: int) -> bool:
        """Return True if every rank has the item in one encoding."""
        return self.failure is None and len(self.encodings.ready) == num_ranks

    def is_loading(self, now: float) -> bool:
        """Return True if the workers may still be taking the item."""
        return bool(self.loading) and now < self.loading_until

    def end_requests(self) -> None:
        """Forget what concerned the requests that have waited."""
        self.requests.clear()
        self.encodings, self.failure = Encodings(), None


class Availability(Enum):
    """The next step of a request that needs an item."""

    AVAILABLE = auto()
    """The item does not hold the request back."""
    UNREQUESTED = auto()
    """The workers must be told first that this request waits."""
    PENDING = auto()
    """The request waits for a later step."""
    ENDANGERED = auto()
    """The engine may have evicted the item in this step: the request waits for the next one."""
    UNAVAILABLE = auto()
    """The item cannot be received: it is encoded here, or the request fails."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts of a step that `availability` reads beside an item's record."""

    num_ranks: int
    may_arrive: bool
    """True if a producer may offer the item."""
    makes_room: bool
    """True if the engine may make room for an item of the request before it reaches this one."""
    may_have_evicted: bool
    """True if the engine may have made room for another request's item in this step."""
    is_being_taken: bool
    """True if the workers may still take an item of this name."""
    are_workers_lost: bool


def availability(
    item: ItemRecord, request_id: str, has_media: bool, situation: Situation
) -> Availability:
    """Return what a request may do about an item. `has_media`: this engine could encode it."""
    if item.is_resident:
        # Without media: room for another item may evict this one, which is known only at the end of
        # the step; the engine would then encode an item that it does not have, and end.
        if not has_media and situation.may_have_evicted:
            return Availability.ENDANGERED
        if has_media or not situation.makes_room:
            return Availability.AVAILABLE
    if not item.requests and not situation.may_arrive:
        return Availability.UNAVAILABLE
    if situation.is_being_taken and not situation.are_workers_lost:
        return Availability.PENDING  # requested now, it would be reported ready and then be taken
    if request_id not in item.requests:
        return Availability.UNREQUESTED
    if item.failure is not None or situation.are_workers_lost:
        return Availability.UNAVAILABLE
    is_ready = item.is_ready(situation.num_ranks)
    return Availability.AVAILABLE if is_ready else Availability.PENDING
