"""Which decode replicas take nothing new, because they hold too much already (pure).

A replica is full when its blocks pass a watermark of its own capacity, or when it holds more than
twice the mean of all and more than half of its capacity (three replicas or more: of two, neither
can hold more than twice the mean). It is calm again below lower bounds, and not before
`min_hold_s`. What counts as used is the greater of what the engine says and what the router has
committed: the one is late, the other does not know what the engine keeps.

The watermark lies above the share up to which the router fills decoders (`headroom`, 0.95), so it
is passed where answers become longer than was expected. Below that share all decoders of a busy
deployment would be locked in turn by ordinary work, and their batches run half empty until they
are calm: a tenth of the throughput, measured.

    rule       full                        calm again
    watermark  used >= 0.98 capacity       used <= 0.93 capacity
    mean       used > 2 mean               used <= 1.6 mean
               and used > 0.5 capacity     or used <= 0.4 capacity

Full replicas are locked, any number of them, but never the last: when all are full, the one with
the smallest share of its capacity in use stays open (of equals, the first by name), until another
one is clearly emptier. All belongs to one thread.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.states import ReplicaId

MEAN_RULE_FROM = 3  # replicas


@dataclass(frozen=True, slots=True)
class OverloadLimits:
    """Bounds of the rules. `lock_*` is above `release_*`."""

    lock_watermark: float = 0.98
    release_watermark: float = 0.93
    lock_mean: float = 2.0  # times the mean
    release_mean: float = 1.6
    lock_share: float = 0.5  # of the capacity, for the mean's rule
    release_share: float = 0.4
    min_hold_s: float = 1.0
    swap_margin: float = 0.05  # of the capacity: how much emptier the next last open one must be

    def __post_init__(self) -> None:
        for name in ("watermark", "mean", "share"):
            lock, release = {
                "watermark": (self.lock_watermark, self.release_watermark),
                "mean": (self.lock_mean, self.release_mean),
                "share": (self.lock_share, self.release_share),
            }[name]
            if not 0 < release < lock:
                raise ConfigError(
                    f"lock_{name} is {lock}, release_{name} {release}: must be above it"
                )


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of one decode replica."""

    engine_blocks: int | None  # as the engine last said; `None`: nothing known
    committed_blocks: int  # of requests the router has given it, to their ends
    capacity_blocks: int  # positive

    @property
    def used(self) -> int:
        return max(self.engine_blocks or 0, self.committed_blocks)

    @property
    def share(self) -> float:
        return self.used / self.capacity_blocks


class Why(Enum):
    """Why a replica is locked or no longer is."""

    WATERMARK = "over the watermark"
    MEAN = "over twice the mean"
    CALM = "calm again"
    LAST_OPEN = "the emptiest where all are full"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Locked:
    """From now on it takes nothing new."""

    replica: ReplicaId
    why: Why
    share: float  # of its capacity in use


@dataclass(frozen=True, slots=True)
class Released:
    """It takes work again, or is gone."""

    replica: ReplicaId
    why: Why


@dataclass(frozen=True, slots=True)
class _Full:
    """One full replica."""

    why: Why
    since: float


class Overload:
    """The locks of all decode replicas."""

    def __init__(self, limits: OverloadLimits | None = None) -> None:
        self._limits = limits or OverloadLimits()
        self._known: set[ReplicaId] = set()
        self._full: dict[ReplicaId, _Full] = {}
        self._open: ReplicaId | None = None  # full, and open all the same
        self._locked: set[ReplicaId] = set()

    @property
    def locked(self) -> frozenset[ReplicaId]:
        return frozenset(self._locked)

    @property
    def is_saturated(self) -> bool:
        """Whether every replica is full, the open one too."""
        return bool(self._known) and len(self._full) == len(self._known)

    def why(self, replica: ReplicaId) -> Why | None:
        """Why it is locked; None if it is not."""
        return self._full[replica].why if replica in self._locked else None

    def step(self, now: float, loads: Mapping[ReplicaId, Load]) -> tuple[Locked | Released, ...]:
        """The locks by the loads of all decode replicas there are; what changed, by name."""
        self._known = set(loads)
        mean = sum(load.used for load in loads.values()) / max(1, len(loads))
        full = {
            replica: self._fullness(now, self._full.get(replica), load, mean)
            for replica, load in loads.items()
        }
        self._full = {replica: one for replica, one in full.items() if one is not None}
        self._open = self._last_open(loads)
        before, self._locked = self._locked, set(self._full) - {self._open}
        return tuple(self._change(replica, loads) for replica in sorted(before ^ self._locked))

    def check(self) -> None:
        """What always holds."""
        assert set(self._full) <= self._known
        assert self._locked == set(self._full) - {self._open}
        assert not self._known or self._known - self._locked, "the last one is locked"
        assert (self._open is not None) == self.is_saturated
        assert all(full.why in (Why.WATERMARK, Why.MEAN) for full in self._full.values())

    def _fullness(self, now: float, was: _Full | None, load: Load, mean: float) -> _Full | None:
        limits = self._limits

        def is_over_mean(times: float, share: float) -> bool:
            is_over = load.used > times * mean and load.share > share
            return len(self._known) >= MEAN_RULE_FROM and is_over

        if load.share >= limits.lock_watermark:
            why = Why.WATERMARK
        elif is_over_mean(limits.lock_mean, limits.lock_share):
            why = Why.MEAN
        elif was is None:
            return None
        else:
            why = was.why
            if why is Why.WATERMARK:
                is_calm = load.share <= limits.release_watermark
            else:
                is_calm = not is_over_mean(limits.release_mean, limits.release_share)
            if is_calm and now - was.since >= limits.min_hold_s:
                return None
        return _Full(why, was.since if was is not None else now)

    def _last_open(self, loads: Mapping[ReplicaId, Load]) -> ReplicaId | None:
        """The one that stays open, where all are full."""
        if not self.is_saturated:
            return None

        def emptiest(replicas: Iterable[ReplicaId]) -> ReplicaId:
            return min(replicas, key=lambda replica: (loads[replica].share, replica))

        # One that is open already, unless that is clearly fuller: else equals would take turns.
        current = emptiest(set(loads) - self._locked or loads)
        best = emptiest(loads)
        gap = loads[current].share - loads[best].share
        return best if gap > self._limits.swap_margin else current

    def _change(self, replica: ReplicaId, loads: Mapping[ReplicaId, Load]) -> Locked | Released:
        if replica in self._locked:
            return Locked(replica, self._full[replica].why, loads[replica].share)
        if replica not in loads:
            return Released(replica, Why.LEFT)
        return Released(replica, Why.LAST_OPEN if replica == self._open else Why.CALM)
