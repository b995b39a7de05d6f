"""Messages between the two parts of the connector, once a step. Frozen, small, picklable."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from vllm_kvpool.transfer.ops import (
    HandOverEnd,
    HostCacheChange,
    JobId,
    Landed,
    LoadPlan,
    PrefetchPlan,
    SavePlan,
)


@dataclass(frozen=True, slots=True)
class Stored:
    """The end of a save in the stores, for `ranks` ranks together."""

    ranks: int = 1
    tiers: frozenset[int] = frozenset()
    """Tiers that have its cells; empty for ranks that had none to write."""
    missed: frozenset[int] = frozenset()
    """Chunks that may not be stored whole."""
    lost: Mapping[int, str] = field(default_factory=dict)
    """The missed chunks that host memory does not hold whole either: index -> reason."""

    def merged(self, other: "Stored") -> "Stored":
        """Return both sets of ranks together."""
        return Stored(
            self.ranks + other.ranks,
            self.tiers | other.tiers,
            self.missed | other.missed,
            {**self.lost, **other.lost},
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a request's load, for all reporting ranks together."""

    tokens: int
    """Tokens of the request before which all are loaded."""
    seconds: float = 0.0
    """Seconds that the load took in the slowest rank: of a layered load, those that its step
    waited."""
    cleared: frozenset[int] = frozenset()
    """Chunks with pages of optional cells that the load has filled with zeros."""

    def merged(self, other: "Loaded") -> "Loaded":
        """Return both sets of ranks together."""
        return Loaded(
            min(self.tokens, other.tokens),
            max(self.seconds, other.seconds),
            self.cleared | other.cleared,
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Scheduler to every worker."""

    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    prefetches: tuple[PrefetchPlan, ...] = ()
    idle: bool = False
    """The step has nothing to compute and may wait for a load (`idle_wait_s`)."""
    landed: tuple[Landed, ...] = ()
    """Progress of loads of earlier plans, or of this one."""
    hand_over_ends: tuple[HandOverEnd, ...] = ()
    """Requests that save nothing more, beyond the saves of this plan."""
    generation: int = 0
    """Grows with every reset; saves of an older generation are dropped."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Workers to scheduler; `merge` makes one of several ranks' and steps'."""

    gathered: Mapping[JobId, int] = field(default_factory=dict)
    """The number of ranks that have gathered a save since their last report."""
    loads: Mapping[str, Loaded] = field(default_factory=dict)
    """Request -> its load, which has ended in the reporting ranks."""
    dropped: Mapping[int, int] = field(default_factory=dict)
    """Generation -> ranks that have dropped all saves of those before it."""
    host: Mapping[int, HostCacheChange] = field(default_factory=dict)
    """Rank -> changes of its host memory."""
    stored: Mapping[JobId, Stored] = field(default_factory=dict)
    """Saves that have ended in the stores."""
    notices: Mapping[int, str] = field(default_factory=dict)
    """Rank -> endpoint where it tells how far prompts are stored; in its first report."""

    @classmethod
    def merge(cls, reports: Iterable["StepReport"]) -> Self:
        """Merge the reports of ranks or steps, each rank's in order; linear in their size."""
        gathered: dict[JobId, int] = {}
        dropped: dict[int, int] = {}
        loads: dict[str, Loaded] = {}
        hosts: defaultdict[int, list[HostCacheChange]] = defaultdict(list)
        stored: dict[JobId, Stored] = {}
        notices: dict[int, str] = {}
        for report in reports:
            for job, ranks in report.gathered.items():
                gathered[job] = gathered.get(job, 0) + ranks
            for generation, ranks in report.dropped.items():
                dropped[generation] = dropped.get(generation, 0) + ranks
            for request_id, end in report.loads.items():
                known = loads.get(request_id)
                loads[request_id] = end if known is None else known.merged(end)
            for rank, change in report.host.items():
                hosts[rank].append(change)
            for job, how in report.stored.items():
                stored[job] = stored[job].merged(how) if job in stored else how
            notices |= report.notices
        host = {rank: HostCacheChange.merge(changes) for rank, changes in hosts.items()}
        return cls(gathered, loads, dropped, host, stored, notices)
