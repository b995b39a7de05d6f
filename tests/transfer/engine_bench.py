"""An engine on a bench: letters name cells, and the engine's actions read as words.

`"a b"` are two slabs of one cell, each of a chunk; `"a0 a1 b0 b1"` two slabs of two cells: the
letter is the chunk. `"a?"` is an optional slab of chunk `a`. Batch 3, of the lane GET of tier 0 and
with two cells, reads `"3 get-0 a b"`. Reports read `"loaded 1 to 2 missing"`, `"gathered 1"`,
`"saved 1: 2 done"` and `"host +a -b"`. Messages to other ranks read `"asks 1: a"`, `"returns 1: 7"`
and (loans by id) `"lends 1: 7 yes, 8 no"`. Fences read by name, `"0 fence one"`.
"""

from collections.abc import Callable, Container
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from tests.support.fakes import FakeClock
from tests.support.invariants import check, is_naming
from vllm_kvpool.identity.keys import HeadShard, LayerSpan
from vllm_kvpool.layout.topology import AttentionWindow, LocalCell
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.staging.slots import Slot, SlotPool
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.storage.health import CallKind, StoreAccess, StoreHealth
from vllm_kvpool.transfer.context import TRANSIENT, Tier
from vllm_kvpool.transfer.engine import Action, Engine, Event, Message, lane_names
from vllm_kvpool.transfer.graph import Batch, BatchDone, BatchHung, LaneLimits
from vllm_kvpool.transfer.host_cache import HostCache
from vllm_kvpool.transfer.loans import ReplicaSet
from vllm_kvpool.transfer.ops import (
    REPLICA,
    Ask,
    CancelRequest,
    CellOutcome,
    DropSaves,
    Flush,
    HandOverProgress,
    HostCacheChange,
    JobId,
    JobPages,
    Landed,
    LaneName,
    Lent,
    LoadDone,
    LoadJob,
    LoadPlan,
    OpKind,
    Outcome,
    PrefetchJob,
    PrefetchPlan,
    Returned,
    SaveDone,
    SaveGathered,
    SaveJob,
    SavePlan,
    SavesDropped,
    SavesStalled,
    Slab,
    SlabKind,
    SpanLoaded,
    TierHealth,
    TimePassed,
    each_of,
    outcome_of,
)

DONE, EXISTED, MISSING = CellOutcome.DONE, CellOutcome.EXISTED, CellOutcome.MISSING
CORRUPT, FULL, FAILED = CellOutcome.CORRUPT, CellOutcome.FULL, CellOutcome.FAILED
UNREACHABLE, TIMED_OUT = CellOutcome.UNREACHABLE, CellOutcome.TIMED_OUT
CANCELLED = CellOutcome.CANCELLED

CELL_BYTES = 100
TIMEOUT_S = 10.0
PLACE = LocalCell(HeadShard(0), LayerSpan(0, 1), 0, 1, 0, 1)
PLACES = {
    "?": replace(PLACE, is_draft=True, is_optional=True),
    "w": replace(PLACE, window=AttentionWindow(sliding=8)),
}

WIDE = LaneLimits(batches=2, batch_ops=64, batch_bytes=1 << 30, budget_bytes=1 << 30)
SINGLE = LaneLimits(batches=2, batch_ops=1, batch_bytes=1 << 30, budget_bytes=1 << 30)
ASKS = LaneLimits(batches=64, batch_ops=1, batch_bytes=1, budget_bytes=1 << 30)

MOST_LINES = 100_000  # of a run; more lines mean a loop

DISK = Tier("disk", durable=True, remote=False)
MEMORY = Tier("memory", durable=False, remote=False)
FAR = Tier("far", durable=True, remote=True)
SECOND = 1  # a member of the set of replicas
REPLICAS = ReplicaSet(("",), ask_s=5.0, loan_s=8.0, max_retained=2)


class NamedFence(NamedTuple):
    """A fence that a test ends by ending its batch."""

    name: str

    def synchronize(self) -> None:
        raise AssertionError("the engine waits for nothing")


def slab_of(keys: str, chunk: ChunkRef | None = None, part: str = "") -> Slab:
    """Return a slab of these cells. A numeric part is a layer."""
    names = tuple(keys.split())
    place = PLACES.get(part, PLACE)
    if part.isdecimal():
        place = replace(place, layer_start=int(part), layer_stop=int(part) + 1)
    kind = SlabKind(names, (CELL_BYTES,) * len(names), (place,) * len(names), part)
    return Slab.of(kind, chunk or ChunkRef(keys[0]), "")


def slabs_of(
    job: int, cells: str, first_chunk: int = 0, *, stored: bool = True, apart: bool = False
) -> tuple[Slab, ...]:
    """Return the slabs of a job, whose number is its only page.

    `apart`: each cell is a slab, and its number a layer.
    """
    pages = (JobPages((job,), 0, 0, 0),)
    slabs: dict[tuple[str, str], list[str]] = {}
    for key in cells.split():
        slabs.setdefault((key[0], key[1:] if apart or key[1:] in PLACES else ""), []).append(key)
    chunks: dict[str, ChunkRef] = {}
    before = ""
    for i, chunk_id in enumerate(dict.fromkeys(chunk_id for chunk_id, _ in slabs)):
        parent = before if before < chunk_id else ""  # so that no chunk is its own ancestor
        chunks[chunk_id] = ChunkRef(chunk_id, parent, first_chunk + i)
        before = chunk_id
    return tuple(
        slab_of(" ".join(keys), chunks[chunk_id], part)._replace(pages=pages, stored=stored)
        for (chunk_id, part), keys in slabs.items()
    )


def load_job(
    job: int,
    cells: str,
    first_chunk: int = 0,
    stop: int | None = None,
    timeout_s: float = TIMEOUT_S,
    landed: int | None = None,
    *,
    apart: bool = False,
) -> LoadJob:
    planned = slabs_of(job, cells, first_chunk, apart=apart)
    if stop is None:
        stop = max((slab.chunk.position + 1 for slab in planned), default=first_chunk)
    hashes = (b"",) * (stop - first_chunk)
    plan = LoadPlan(
        JobId(job),
        f"r{job}",
        first_chunk,
        hashes,
        (),
        token_start=0,
        token_stop=0,
        landed_stop=landed,
    )
    return LoadJob(plan, planned, timeout_s)


def save_job(
    job: int, cells: str, *, stored: bool = True, apart: bool = False, topic: bytes = b""
) -> SaveJob:
    slabs = slabs_of(job, cells, stored=stored, apart=apart)
    hashes = (b"",) * len({slab.chunk.id for slab in slabs}) if topic else ()
    plan = SavePlan(JobId(job), f"r{job}", 0, hashes, (), topic=topic)
    return SaveJob(plan, slabs)


def from_host(save: SaveJob, chunk_ids: Container[str]) -> SaveJob:
    """Return the save without pages of these chunks."""
    slabs = (s._replace(pages=()) if s.chunk.id in chunk_ids else s for s in save.slabs)
    return save._replace(slabs=tuple(slabs))


def keys_of(batch: Batch) -> list[str]:
    return [key for part in batch.parts for key in part.cell_keys()]


def slots_of(batch: Batch) -> list[Slot]:
    return [slot for part in batch.parts for slot in part.slots]


def counts_of(outcomes: tuple[tuple[CellOutcome, int], ...]) -> str:
    return ", ".join(f"{count} {outcome.value}" for outcome, count in outcomes) or "nothing"


def in_words(action: Action) -> str:
    """Return an action in words; see the module docstring."""
    match action:
        case Batch():
            fences = (each.name for each in action.fences if isinstance(each, NamedFence))
            return f"{action.lane} {' '.join([*keys_of(action), *fences])}"
        case LoadDone(job, request, stop, reason):
            assert request == f"r{job}"
            return f"loaded {job} to {stop} {reason.value}"
        case SpanLoaded(job, layer):
            return f"span {layer} of {job}"
        case SaveGathered(job, request):
            assert request == f"r{job}"
            return f"gathered {job}"
        case SaveDone(job, request, outcomes):
            assert request == f"r{job}"
            return f"saved {job}: {counts_of(outcomes)}"
        case HostCacheChange(added, removed):
            return " ".join(["host", *(f"+{g}" for g in added), *(f"-{g}" for g in removed)])
        case Ask(member, loans):
            cells = (key for _, slab in loans for key in slab.cell_keys())
            return f"asks {member}: {' '.join(cells)}"
        case Lent(member, loans):
            told = (f"{loan} {'yes' if slots else 'no'}" for loan, slots in loans)
            return f"lends {member}: {', '.join(told)}"
        case Returned(member, loans):
            return f"returns {member}: {' '.join(map(str, loans))}"
        case SavesDropped(generation):
            return f"dropped {generation}"
        case HandOverProgress(topic, stored, ended):
            return f"told {topic.decode()}: {stored} {ended}"


class Bench:
    """An engine under test; see the module docstring. Each step checks the engine's invariants.

    `guards` report changes of the tiers, as guards of stores do: after ends of batches, with time,
    and before the event that causes the news.

    `keep` is the size of the host tier, `slots` that of the whole arena. `apart`: as in `slabs_of`.
    """

    def __init__(
        self,
        *tiers: Tier,
        slots: int = 4,
        reserve: int = 1,
        keep: int = 0,
        policy: str = "lru",
        slabs_per_chunk: int = 1,
        limits: LaneLimits = WIDE,
        write_back: bool = False,
        lanes: dict[OpKind, LaneLimits] | None = None,
        replicas: ReplicaSet | None = None,
        apart: bool = False,
    ) -> None:
        self.apart = apart
        names = lane_names(len(tiers), replicas=replicas is not None)
        own = lanes or {}
        self.host_cache = HostCache(
            SlotPool(slots, reserve), keep, POLICIES[policy], {"": slabs_per_chunk}
        )
        self.engine = Engine(
            self.host_cache,
            tiers,
            {name: ASKS if name.tier == REPLICA else own.get(name.kind, limits) for name in names},
            write_back=write_back,
            slot_bytes=CELL_BYTES,
            replicas=replicas,
        )
        self.clock = FakeClock()
        self.guards = [StoreHealth() for _ in tiers]
        for guard in self.guards:
            guard.recovered(self.clock())
        self.away: set[int] = set()  # tiers, by calls of `health`
        self.running: dict[int, Batch] = {}
        self.hanging: dict[int, Batch] = {}  # given up, without an answer yet
        self.num_batches = 0
        self.registry = MetricsRegistry()
        self.checks = True  # long runs skip the check
        self.stalls: list[float] = []
        self.fences: dict[str, NamedFence] = {}
        self.saved: list[SaveDone] = []
        self.loaded: list[LoadDone] = []
        self.sent: list[Message] = []

    # Events

    def load(
        self, job: int, cells: str, first_chunk: int = 0, fence: str = "", **more: int
    ) -> list[str]:
        made = load_job(job, cells, first_chunk, apart=self.apart, **more)
        return self.step(made._replace(fence=self.fence(fence)))

    def land(self, job: int, stop: int, *, final: bool = False, urgent: bool = False) -> list[str]:
        """Report that chunks of a load up to `stop` are stored."""
        return self.step(Landed(JobId(job), stop, final, urgent))

    def save(self, job: int, cells: str, *, stored: bool = True, fence: str = "") -> list[str]:
        made = save_job(job, cells, stored=stored, apart=self.apart)
        return self.step(made._replace(fence=self.fence(fence)))

    def hand_over(
        self, job: int, cells: str, without_pages: str = "", host_windows: str = ""
    ) -> list[str]:
        """Save a prompt that is handed over to another engine. Chunks `without_pages` come from
        host memory."""
        save = save_job(job, cells, apart=self.apart, topic=b"t%d" % job)
        plan = replace(save.plan, host_windows=frozenset(host_windows))
        return self.step(from_host(save._replace(plan=plan), without_pages))

    def fence(self, name: str) -> NamedFence | None:
        """Return the fence of this name, which all plans of a step share."""
        return self.fences.setdefault(name, NamedFence(name)) if name else None

    def prefetch(self, job: int, cells: str) -> list[str]:
        slabs = tuple(slab._replace(pages=()) for slab in slabs_of(job, cells, apart=self.apart))
        return self.step(PrefetchJob(PrefetchPlan(f"r{job}", ()), slabs))

    def ends(self, number: int, *outcomes: CellOutcome) -> list[str]:
        """End a batch. A single outcome stands for all its cells, none for DONE."""
        batch = self.running.pop(number)
        if len(outcomes) < 2:
            return self.step(BatchDone(batch, (outcomes or (DONE,)) * len(batch.ops)))
        left = iter(outcomes)
        parts = [outcome_of(list(islice(left, part.num_cells))) for part in batch.parts]
        return self.step(BatchDone(batch, parts))

    def hangs(self, number: int) -> list[str]:
        """Give a batch up, as its store does not answer."""
        batch = self.hanging[number] = self.running.pop(number)
        return self.step(BatchHung(batch))

    def late(self, number: int, outcome: CellOutcome = DONE) -> list[str]:
        """End a batch that was given up."""
        batch = self.hanging.pop(number)
        return self.step(BatchDone(batch, (outcome,) * len(batch.ops)))

    def health(self, tier: int, up: bool) -> list[str]:
        """Report the health of a tier. A store that is away stays away until the next report."""
        (self.away.discard if up else self.away.add)(tier)
        if up:
            self.guards[tier].recovered(self.clock())
        return self.step(TierHealth(tier, up))

    def gets_through(self, tier: int) -> None:
        """Record a successful read of the tier."""
        self.guards[tier].call_ended(CallKind.READ, self.clock(), self.clock(), failed=False)

    def after(self, seconds: float) -> list[str]:
        self.clock.advance(seconds)
        return self.step(TimePassed())

    def cancel(self, job: int) -> list[str]:
        return self.step(CancelRequest(f"r{job}"))

    def drop_saves(self, *, forget: bool = False) -> list[str]:
        return self.step(DropSaves(forget))

    def flush(self) -> list[str]:
        return self.step(Flush())

    def step(self, event: Event) -> list[str]:
        """Pass an event to the engine, after the tiers' news that it causes."""
        told = [line for news in self._news(event) for line in self._step(news)]
        return told + self._step(event)

    def _news(self, event: Event) -> list[TierHealth]:
        """Return the changes of the tiers' health that the stores' guards report after this
        event."""
        before, now = [guard.access for guard in self.guards], self.clock()
        for guard in self.guards:
            if guard.due <= now:
                guard.recovered(now)
        if isinstance(event, BatchDone | BatchHung) and event.batch in self.engine.running:
            kind, tier = event.batch.lane
            call = CallKind.READ if kind is OpKind.GET else CallKind.WRITE
            if tier >= 0 and isinstance(event, BatchHung):
                self.guards[tier].call_hung(call, now, TIMEOUT_S)
            elif tier >= 0:
                each = [
                    one
                    for op, out in zip(event.batch.ops, event.outcomes, strict=True)
                    for one in each_of(out, op.size)
                ]
                self.guards[tier].call_ended(call, now, now, failed=TRANSIENT.issuperset(each))
        return [
            TierHealth(tier, guard.access is not StoreAccess.NONE, guard.access is StoreAccess.FULL)
            for tier, guard in enumerate(self.guards)
            if guard.access is not before[tier] and tier not in self.away
        ]

    def _step(self, event: Event) -> list[str]:
        actions = self.engine.step(event, self.clock())
        if self.checks:
            check(self.engine)
        told = []
        for action in actions:
            if isinstance(action, SavesStalled):
                self.stalls.append(self.clock())
                continue
            line = in_words(action)
            if isinstance(action, Batch):
                line = f"{self.num_batches} {line}"
                self.running[self.num_batches] = action
                self.num_batches += 1
            elif isinstance(action, SaveDone):
                self.saved.append(action)
            elif isinstance(action, LoadDone):
                self.loaded.append(action)
            elif isinstance(action, Message):
                self.sent.append(action)
            told.append(line)
        due = self.engine.next_deadline()
        assert (
            due is None or due > self.clock() or is_naming(self.engine)
        )  # otherwise the thread would spin
        return told

    # Runs to the end

    def run(self, outcome: Callable[[LaneName, str], CellOutcome] | None = None) -> list[str]:
        """End all batches, the oldest first, until none runs. Return the actions, without numbers.

        `outcome(lane, key)` is a cell's outcome; without it all are DONE.
        """
        told: list[str] = []
        while self.running:
            assert len(told) < MOST_LINES, told[-8:]
            number, batch = next(iter(self.running.items()))
            outcomes: list[Outcome] = [DONE] * len(batch.ops)
            if outcome is not None and batch.parts:
                outcomes = [
                    outcome_of([outcome(batch.lane, key) for key in part.cell_keys()])
                    for part in batch.parts
                ]
            del self.running[number]
            told += self.step(BatchDone(batch, outcomes))
        return [line.lstrip("0123456789 ") for line in told]

    def run_but(self, *hung: str) -> list[str]:
        """End all batches but those of the hung lanes. Return the actions, without numbers."""
        told = []
        while free := [n for n, batch in self.running.items() if str(batch.lane) not in hung]:
            told += self.ends(free[0])
        return [line.lstrip("0123456789 ") for line in told]

    # Observed from outside

    def slots(self) -> str:
        """Return the numbers of free, held and quarantined slots."""
        slots = self.host_cache.slots
        return f"{slots.num_free} {slots.num_held} {slots.num_quarantined}"

    def cells(self) -> str:
        """Return the cells that are in host memory or on their way into it. Dirty cells have a
        star."""
        return " ".join(
            sorted(
                key + "*" * entry.dirty
                for entry in self.host_cache
                for key in entry.slab.cell_keys()
            )
        )

    def counted(self, name: str, **labels: str) -> int:
        self.engine.context.fill(self.registry)
        value = self.registry.samples().get(name, {}).get(tuple(labels.values()), 0)
        assert not isinstance(value, dict), name
        return int(value)

    @property
    def is_clean(self) -> bool:
        """True if the engine is idle, and only cells that stay in host memory hold slots."""
        slots = self.host_cache.slots
        held = sum(entry.num_cells for entry in self.host_cache)
        return self.engine.idle and slots.num_free == slots.count - held
