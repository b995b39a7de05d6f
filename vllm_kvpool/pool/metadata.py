"""What the two sides of the connector tell each other once a step. Frozen, small, picklable."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_kvpool.transfer.ops import HostChange, JobId, LoadPlan, PrefetchPlan, SavePlan


@dataclass(frozen=True, slots=True)
class Stored:
    """How a save has ended in the stores, for `ranks` ranks together."""

    ranks: int = 1
    tiers: frozenset[int] = frozenset()
    """Where its cells are now; empty for ranks whose turn it was not."""
    missed: frozenset[int] = frozenset()
    """Chunks that are not known to be stored whole."""

    def merged(self, other: "Stored") -> "Stored":
        """Both sets of ranks together."""
        return Stored(
            self.ranks + other.ranks, self.tiers | other.tiers, self.missed | other.missed
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Scheduler -> every worker."""

    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    prefetches: tuple[PrefetchPlan, ...] = ()
    idle: bool = False
    """No tokens are scheduled, and no other engine steps along: the step may wait a moment for a
    load to end."""
    generation: int = 0
    """Grows with every reset; saves of an older generation are dropped."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Workers -> scheduler, merged over ranks by `merged`."""

    gathered: Mapping[JobId, int] = field(default_factory=dict)
    """How many ranks have gathered a save since their last report."""
    load_stops: Mapping[str, int] = field(default_factory=dict)
    """Request -> tokens that are in the pages of every reporting rank, for loads that stopped."""
    load_tokens: float = 0
    load_seconds: float = 0
    dropped: Mapping[int, int] = field(default_factory=dict)
    """Generation -> ranks in which nothing of those before it is being put any more."""
    host: Mapping[int, HostChange] = field(default_factory=dict)
    """Rank -> the chunks that have come into its host tier, or left it."""
    stored: Mapping[JobId, Stored] = field(default_factory=dict)
    """Saves that have ended in the stores; only where somebody wants to know."""

    def merged(self, other: "StepReport") -> "StepReport":
        """The report of both ranks together."""
        gathered = dict(self.gathered)
        for job, count in other.gathered.items():
            gathered[job] = gathered.get(job, 0) + count
        stops = dict(self.load_stops)
        for request_id, tokens in other.load_stops.items():
            stops[request_id] = min(tokens, stops.get(request_id, tokens))
        dropped = dict(self.dropped)
        for generation, ranks in other.dropped.items():
            dropped[generation] = dropped.get(generation, 0) + ranks
        host = dict(self.host)
        for rank, change in other.host.items():
            host[rank] = host[rank].then(change) if rank in host else change
        stored = dict(self.stored)
        for job, how in other.stored.items():
            stored[job] = stored[job].merged(how) if job in stored else how
        return StepReport(
            gathered,
            stops,
            self.load_tokens + other.load_tokens,
            self.load_seconds + other.load_seconds,
            dropped,
            host,
            stored,
        )

    @property
    def empty(self) -> bool:
        return not (
            self.gathered
            or self.load_stops
            or self.dropped
            or self.load_seconds
            or self.host
            or self.stored
        )
