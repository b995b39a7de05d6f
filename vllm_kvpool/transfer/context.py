"""What the parts of the engine share: the scheduler, host memory, tiers, what is to be done.

Pure; owned by the engine thread. Loads, saves and fetches each own their jobs and never touch
another's; they meet in the cells in host memory (`host_cache`) and in the scheduler's graphs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.storage.breaker import Breaker
from vllm_kvpool.transfer.graph import Lane, Op, Scheduler
from vllm_kvpool.transfer.host_cache import CacheEntry, HostCache
from vllm_kvpool.transfer.ops import (
    HOST,
    Cell,
    CellOutcome,
    LaneName,
    Lent,
    LoanEnded,
    OpKind,
    Report,
)

MAX_TRIES = 3  # of an op on a remote tier
RETRY_FIRST_S = 0.05
RETRY_JITTER = 0.5  # part of the pause that is drawn by chance


@dataclass(frozen=True, slots=True)
class Tier:
    """One store as the engine sees it. `durable` and `remote` are those of its `Capabilities`."""

    name: str  # label in metrics, unique
    durable: bool
    remote: bool


def retry_pause_s(attempts: int, chance: float) -> float:
    """How long to wait before try `attempts + 1`; `chance` is drawn from [0, 1)."""
    pause = RETRY_FIRST_S * 2 ** (attempts - 1)
    return float(pause * (1 - RETRY_JITTER * chance))


def tier_names(kinds: Sequence[str]) -> tuple[str, ...]:
    """Names of the tiers, by kind of store, told apart by a number where a kind comes again."""
    seen: dict[str, int] = {}
    names = []
    for kind in kinds:
        seen[kind] = seen.get(kind, 0) + 1
        names.append(kind if seen[kind] == 1 else f"{kind}{seen[kind]}")
    return tuple(names)


PASSING = frozenset({CellOutcome.FAILED, CellOutcome.UNREACHABLE})  # worth another try


@dataclass(slots=True)
class CellOp:
    """What an op is about: a cell and its place in host memory (None: the op needs none)."""

    cell: Cell
    entry: CacheEntry | None


def tier_of(op: Op) -> int:
    """The tier whose lane the op is in."""
    assert op.lane is not None, op
    return int(op.lane.key.tier)


@dataclass(slots=True)
class TransferContext:
    """See the module docstring. `chance` draws from [0, 1)."""

    scheduler: Scheduler
    host_cache: HostCache
    tiers: tuple[Tier, ...]
    chance: Callable[[], float]
    slot_bytes: int
    breakers: list[Breaker] = field(default_factory=list)
    write_breakers: list[Breaker] = field(default_factory=list)
    """Of puts and removes alone; held where nothing may be written at all."""
    reports: list[Report | Lent | LoanEnded] = field(default_factory=list)
    counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = field(default_factory=Counter)
    # Loaded cells by their tier; `REPLICA` and `HOST` are the last.
    hits: list[int] = field(default_factory=list)
    now: float = 0.0
    generation: int = 0  # of the last reset

    def __post_init__(self) -> None:
        self.breakers = [Breaker() for _ in self.tiers]
        self.write_breakers = [Breaker() for _ in self.tiers]
        self.hits = [0] * (len(self.tiers) + 2)

    @property
    def now_ns(self) -> int:
        return int(self.now * 1e9)

    def lane(self, kind: OpKind, tier: int = HOST) -> Lane:
        return self.scheduler.lanes[LaneName(kind, tier)]

    def tiers_up(self, first: int = 0) -> list[int]:
        """The tiers from `first` on that may be asked now, nearest first."""
        now = self.now
        return [
            tier for tier in range(first, len(self.tiers)) if self.breakers[tier].closed_at <= now
        ]

    def tiers_writable(self, first: int = 0) -> list[int]:
        """Those of them that may be written to now."""
        now = self.now
        return [t for t in self.tiers_up(first) if self.write_breakers[t].closed_at <= now]

    def try_again(self, op: Op, tier: int, outcome: CellOutcome, lane: Lane | None = None) -> bool:
        """Run a failed op again after a pause, if that may help: a get in its lane, or a put."""
        if outcome not in PASSING or tier < 0 or not self.tiers[tier].remote:
            return False
        may_ask = self.tiers_up if lane is not None else self.tiers_writable
        if op.attempts + 1 >= MAX_TRIES or tier not in may_ask(tier)[:1]:
            return False
        self.scheduler.retry(op, self.now + retry_pause_s(op.attempts + 1, self.chance()), lane)
        return True

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Grow a counter of the metrics' table."""
        if amount:
            self.counts[name, tuple(labels.items())] += amount

    def fill(self, registry: MetricsRegistry) -> None:
        """Hand over what was counted since the last call, and how things stand."""
        for (name, labels), amount in self.counts.items():
            registry.add(name, amount, **dict(labels))
        self.counts.clear()
        tier_names = [*(tier.name for tier in self.tiers), "replica", "host"]
        for name, hits in zip(tier_names, self.hits, strict=True):
            if hits:
                registry.add("kvpool_hit_cells", hits, tier=name)
        self.hits = [0] * len(self.hits)
        for tier, breaker, writes in zip(
            self.tiers, self.breakers, self.write_breakers, strict=True
        ):
            registry.set("kvpool_tier_up", 0 if breaker.is_open(self.now) else 1, tier=tier.name)
            is_open = writes.is_open(self.now)
            registry.set("kvpool_tier_writable", 0 if is_open else 1, tier=tier.name)
        if self.host_cache.capacity:
            clean, dirty, pinned = self.host_cache.num_slots()
            slot_bytes = self.slot_bytes
            registry.set("kvpool_host_bytes", clean * slot_bytes, state="clean")
            registry.set("kvpool_host_bytes", dirty * slot_bytes, state="dirty")
            registry.set("kvpool_host_bytes", pinned * slot_bytes, state="pinned")
