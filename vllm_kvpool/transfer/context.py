"""State that loads, saves, fetches and loans share (pure; the engine thread's).

Each of them owns its jobs and never touches another's. They meet in the slabs of host memory
(`host_cache.py`) and in the graphs of the scheduler.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_kvpool.metrics import MetricsRegistry, NameLabels
from vllm_kvpool.staging.devices import Fence
from vllm_kvpool.storage.breaker import Breaker
from vllm_kvpool.transfer.drop_log import Drops
from vllm_kvpool.transfer.graph import Lane, Op, Owner, Priority, Scheduler
from vllm_kvpool.transfer.host_cache import CacheEntry, HostCache
from vllm_kvpool.transfer.ops import (
    HOST,
    CellOutcome,
    Cells,
    HandOverProgress,
    OpKind,
    Outcome,
    Part,
    Report,
    Slab,
    TierHealth,
    worst_of,
)

NAME_EVERY_S = 0.0002  # between two parts of a plan: lanes that were given work need the GIL
MAX_TRIES = 3  # of an op on a remote tier, unless its store goes away before


@dataclass(frozen=True, slots=True)
class Tier:
    """A store as the engine knows it; `durable` and `remote` as in its `Capabilities`."""

    name: str  # label in metrics, unique
    durable: bool
    remote: bool


TRANSIENT = frozenset({CellOutcome.FAILED, CellOutcome.UNREACHABLE})  # worth another try


class OpContent:
    """The content of an op (`Op.what`)."""

    __slots__ = ()

    @property
    def failure(self) -> CellOutcome:
        """The outcome of ops that waited for this one, if it fails."""
        return CellOutcome.CANCELLED

    def lost(self, op: Op, failure: CellOutcome) -> None:
        """Handle the cancel of the op after an op before it has failed. By default nothing."""
        return None


@dataclass(slots=True, eq=False)
class SlabOp(OpContent):
    """The content of an op that moves cells of a slab; without an entry its pages are cleared."""

    slab: Slab
    entry: CacheEntry | None
    cells: Cells = None

    @property
    def part(self) -> Part:
        """The cells to move and their slots, for the op's lane."""
        slots = () if self.entry is None else self.entry.slots
        if self.cells is not None and slots:
            slots = [slots[cell] for cell in self.cells]
        return Part(self.slab, slots, self.cells)


@dataclass(slots=True)
class FenceOp(OpContent):
    """The content of an op of the fence lane: the fence that it waits for."""

    fence: Fence

    @property
    def failure(self) -> CellOutcome:
        """The outcome of cells whose fence was not reached."""
        return CellOutcome.FAILED


@dataclass(slots=True)
class Marker(OpContent):
    """The content of an op without a lane, which is done or was cancelled with a predecessor."""

    on_done: Callable[[], None]
    on_lost: Callable[[], None] = lambda: None

    def lost(self, op: Op, failure: CellOutcome) -> None:
        """Call `on_lost`: a predecessor has failed or was cancelled."""
        self.on_lost()


def tier_of(op: Op) -> int:
    """Return the tier whose lane the op is in."""
    assert op.lane is not None, op
    return int(op.lane.key.tier)


@dataclass(slots=True)
class TransferContext:
    """The scheduler, host memory, the tiers' health, and reports and counts not yet handed over.

    `now` is the time of the current step.
    """

    scheduler: Scheduler
    host_cache: HostCache
    tiers: tuple[Tier, ...]
    slot_bytes: int
    health: list[TierHealth] = field(init=False)
    """The last news of each tier's store; its guard alone decides."""
    lenders: defaultdict[int, Breaker] = field(default_factory=lambda: defaultdict(Breaker))
    """Breakers of the ranks on this host that lend slabs (`loans.py`), by number."""
    reports: list[Report] = field(default_factory=list)
    progress: list[HandOverProgress] = field(default_factory=list)
    counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = field(default_factory=Counter)
    drops: Drops = field(default_factory=Counter)
    """Cells that were to be saved and that a tier did not take, not logged yet."""
    hits: list[int] = field(init=False)  # loaded cells by tier; last REPLICA and HOST
    now: float = 0.0
    generation: int = 0  # of the last reset
    tenant_labels: NameLabels = field(default_factory=NameLabels)
    tenants_shown: set[str] = field(default_factory=set)  # labels in the metrics
    _fence_op: Op | None = None  # of the last plan

    def __post_init__(self) -> None:
        self.health = [TierHealth(tier, is_up=True) for tier in range(len(self.tiers))]
        self.hits = [0] * (len(self.tiers) + 2)

    @property
    def now_ns(self) -> int:
        """`now` in nanoseconds, as host memory's scores count it."""
        return int(self.now * 1e9)

    def lane(self, kind: OpKind, tier: int = HOST) -> Lane:
        """Return the lane of a kind of op, on `tier` if the kind has one."""
        return self.scheduler.lanes[kind, tier]  # equal to a `LaneName`

    def wait_for(self, fence: Fence | None) -> tuple[Op, ...]:
        """Return the op after which a job may touch pages; empty without a fence.

        Jobs of one step have one fence, which is waited for once. Fences are reached in the order
        of plans, whether of loads or of saves.
        """
        if fence is None:
            return ()
        op = self._fence_op
        if op is None or op.what.fence is not fence:
            op = self.scheduler.add(Owner(Priority.LOAD), self.lane(OpKind.FENCE), FenceOp(fence))
            self._fence_op = op
        return (op,)

    def fence_reached(self, op: Op, outcome: Outcome) -> None:
        """Start the ops that wait for the model's stream, or fail them if the device has failed."""
        (self.scheduler.finish if outcome is CellOutcome.DONE else self.scheduler.fail)(op)
        if op is self._fence_op:
            self._fence_op = None  # with all that waited for it

    def tiers_up(self, first: int = 0) -> list[int]:
        """Return the tiers from `first` on that are up, nearest first."""
        return [each.tier for each in self.health[first:] if each.is_up]

    def tiers_writable(self, first: int = 0) -> list[int]:
        """Return the tiers that may be written to, from tier `first` on."""
        return [each.tier for each in self.health[first:] if each.is_up and each.is_writable]

    def is_writable(self, tier: int) -> bool:
        """Return True if a tier may be written to now."""
        health = self.health[tier]
        return health.is_up and health.is_writable

    def may_retry(self, op: Op, tier: int, outcome: Outcome, *, writes: bool) -> bool:
        """Return True if another try of a failed op on its tier may help."""
        if worst_of(outcome) not in TRANSIENT or tier < 0 or not self.tiers[tier].remote:
            return False
        may_ask = self.tiers_writable if writes else self.tiers_up
        return op.attempts + 1 < MAX_TRIES and tier in may_ask(tier)[:1]

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Increase a counter of the metrics registry at the next `fill`."""
        if amount:
            self.counts[name, tuple(labels.items())] += amount

    def fill(self, registry: MetricsRegistry) -> None:
        """Add what was counted since the last call, and set the levels of tiers and host memory."""
        for (name, labels), amount in self.counts.items():
            registry.add(name, amount, **dict(labels))
        self.counts.clear()
        tier_names = [*(tier.name for tier in self.tiers), "replica", "host"]
        for name, hits in zip(tier_names, self.hits, strict=True):
            if hits:
                registry.add("kvpool_hit_cells", hits, tier=name)
        self.hits = [0] * len(self.hits)
        for tier, health in zip(self.tiers, self.health, strict=True):
            registry.set("kvpool_tier_up", int(health.is_up), tier=tier.name)
            registry.set("kvpool_tier_writable", int(health.is_writable), tier=tier.name)
        if self.host_cache.capacity:
            clean, dirty, pinned = self.host_cache.num_slots()
            slot_bytes = self.slot_bytes
            registry.set("kvpool_host_bytes", clean * slot_bytes, state="clean")
            registry.set("kvpool_host_bytes", dirty * slot_bytes, state="dirty")
            registry.set("kvpool_host_bytes", pinned * slot_bytes, state="pinned")
            if self.host_cache.has_shares:
                self._fill_tenants(registry)

    def _fill_tenants(self, registry: MetricsRegistry) -> None:
        cells: Counter[str] = Counter(dict.fromkeys(self.tenants_shown, 0))
        for tenant, count in self.host_cache.num_cells.items():
            cells[self.tenant_labels.of(tenant)] += count
        self.tenants_shown = set(cells)
        for label, count in cells.items():
            registry.set("kvpool_tenant_host_bytes", count * self.slot_bytes, tenant=label)
