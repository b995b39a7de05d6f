"""The engine under events in any order, observed from outside: slots, pages and reports."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.fakes import FakeClock
from tests.support.invariants import check, is_fetched, is_naming, num_slots_written
from tests.transfer.engine_bench import (
    CELL_BYTES,
    CORRUPT,
    DONE,
    EXISTED,
    FAILED,
    FULL,
    MISSING,
    UNREACHABLE,
    from_host,
    load_job,
    save_job,
    slabs_of,
    slots_of,
)
from vllm_kvpool.staging.slots import Slot, SlotPool
from vllm_kvpool.storage.breaker import LONGEST_PAUSE_S
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.transfer.context import Tier
from vllm_kvpool.transfer.engine import Engine, Event, lane_names
from vllm_kvpool.transfer.graph import Batch, BatchDone, BatchHung, LaneLimits
from vllm_kvpool.transfer.host_cache import CacheEntryState, HostCache
from vllm_kvpool.transfer.loads import URGENT_S
from vllm_kvpool.transfer.ops import (
    WRITES,
    CancelRequest,
    CellOutcome,
    DropSaves,
    Flush,
    HostCacheChange,
    Landed,
    LoadDone,
    LoadJob,
    OpKind,
    Outcome,
    Part,
    PrefetchJob,
    PrefetchPlan,
    SaveDone,
    SaveGathered,
    SaveJob,
    TierHealth,
    TimePassed,
    each_of,
    outcome_of,
)
from vllm_kvpool.transfer.saves import SAVE_STALL_S

GATHER, SEAL, CHECK, SCATTER = OpKind.GATHER, OpKind.SEAL, OpKind.CHECK, OpKind.SCATTER
GET, PUT, REMOVE = OpKind.GET, OpKind.PUT, OpKind.REMOVE

J = TypeVar("J", LoadJob, SaveJob)
CHUNKS = "abcdef"
PASSING = (FAILED, UNREACHABLE)
OUTCOMES = {
    GET: (DONE, DONE, DONE, MISSING, CORRUPT, FAILED, UNREACHABLE),
    CHECK: (DONE, DONE, DONE, CORRUPT),
    SCATTER: (DONE, DONE, DONE, FAILED),
    GATHER: (DONE, DONE, DONE, FAILED),
    SEAL: (DONE, DONE, DONE, FAILED),
    PUT: (DONE, DONE, EXISTED, FULL, FAILED, UNREACHABLE),
    REMOVE: (DONE, FAILED),
    OpKind.FENCE: (DONE, DONE, DONE, FAILED),
}
FENCE = OpKind.FENCE
PARTS = st.one_of(st.none(), st.lists(st.integers(0, 8), max_size=3))
"""Positions at which a plan's slabs are cut into parts, which the engine names one by one."""
TIERS = st.builds(Tier, st.just("tier"), durable=st.booleans(), remote=st.booleans())


@dataclass
class Told:
    """The engine's observed actions for one job, which has all slabs of its plan."""

    job: LoadJob | SaveJob
    weights_version: int  # number of earlier resets
    deadline: float
    in_pages: set[str] = field(default_factory=set)
    is_gathered: bool = False
    is_reported: bool = False
    landed: int | None = None
    """The first chunk that is not stored yet, for a load whose producer has not ended."""


class Reached:
    """A fence, with a flag that the model has reached it."""

    is_reached = False

    def synchronize(self) -> None:
        raise AssertionError("the engine waits for nothing")


def in_parts(job: J, cuts: list[int] | None) -> J:
    """Return the job with its slabs cut into parts. Only the first part comes with the job."""
    if cuts is None:
        return job
    ends = [0, *sorted(cuts), len(job.slabs)]
    first, *rest = (job.slabs[a:b] for a, b in pairwise(ends))
    return job._replace(slabs=first, rest=iter(rest))


@dataclass
class Content:
    """The content of a slot, which is undefined while a write is in progress."""

    key: str
    weights_version: int  # when the write began
    good: bool = False  # gathered or checked
    sealed: bool = False


class EngineMachine(RuleBasedStateMachine):
    """Batches succeed or fail, late or never; tiers come and go; time passes in any steps."""

    @initialize(
        tiers=st.lists(TIERS, max_size=3),
        keep=st.sampled_from((0, 0, 1, 2, 4, 6)),
        staging=st.integers(1, 6),
        reserve=st.integers(0, 3),
        policy=st.sampled_from(sorted(POLICIES)),
        write_back=st.booleans(),
        cells=st.integers(1, 3),
        apart=st.booleans(),
        limits=st.builds(
            LaneLimits,
            batches=st.integers(1, 3),
            batch_ops=st.integers(1, 4),
            batch_bytes=st.just(3 * CELL_BYTES),
            budget_bytes=st.integers(1, 8 * CELL_BYTES),
        ),
    )
    def begin(
        self,
        tiers: list[Tier],
        keep: int,
        staging: int,
        reserve: int,
        policy: str,
        write_back: bool,
        cells: int,
        apart: bool,
        limits: LaneLimits,
    ) -> None:
        staging = max(staging, cells)  # a slab fits, for loads and for saves
        slots = SlotPool(keep + staging, min(reserve, staging - cells))
        slabs = cells if apart else 1
        self.host_cache = HostCache(slots, keep, POLICIES[policy], {"": slabs})
        self.apart, self.slabs_per_chunk = apart, slabs
        named = tuple(Tier(f"t{i}", t.durable, t.remote) for i, t in enumerate(tiers))
        lanes = dict.fromkeys(lane_names(len(tiers)), limits)
        self.engine = Engine(self.host_cache, named, lanes, write_back=write_back)
        self.cells = cells
        self.clock = FakeClock()
        self.weights_version = 0
        self.told: dict[int, Told] = {}
        self.flying: list[Batch] = []
        self.hanging: list[Batch] = []  # given up, without an answer yet
        self.away: set[int] = set()  # tiers, as reported to the engine
        self.unwritable: set[int] = set()  # likewise
        self.contents: dict[Slot, Content] = {}
        self.whole: set[str] = set()  # groups, as reported
        self.is_ending = False

    # Events

    @rule(
        first=st.integers(0, len(CHUNKS)),
        chunks=st.integers(1, 4),
        timeout_s=st.sampled_from((0.5, 2.0, 5.0)),
        landed=st.one_of(st.none(), st.integers(0, 4)),
        cuts=PARTS,
        fence=st.booleans(),
    )
    def submit_load(
        self,
        first: int,
        chunks: int,
        timeout_s: float,
        landed: int | None,
        cuts: list[int] | None,
        fence: bool,
    ) -> None:
        job = len(self.told)
        stop = None if landed is None else first + min(landed, chunks)
        keys = self.keys(first, chunks)
        event = load_job(job, keys, first, first + chunks, timeout_s, landed=stop, apart=self.apart)
        deadline = self.clock() + timeout_s
        event = event._replace(fence=Reached() if fence else None)
        self.told[job] = Told(event, self.weights_version, deadline, landed=stop)
        self.step(in_parts(event, cuts))

    @precondition(lambda self: self.streams())
    @rule(data=st.data(), more=st.integers(0, 3), final=st.booleans(), urgent=st.booleans())
    def land(self, data: st.DataObject, more: int, final: bool, urgent: bool) -> None:
        job = data.draw(st.sampled_from(self.streams()))
        self.land_chunks(job, more, final=final, urgent=urgent)

    @rule(
        first=st.integers(0, len(CHUNKS)),
        chunks=st.integers(1, 4),
        stored=st.booleans(),
        cuts=PARTS,
        fence=st.booleans(),
        hands_over=st.booleans(),
        without_pages=st.sets(st.sampled_from(CHUNKS)),
    )
    def submit_save(
        self,
        first: int,
        chunks: int,
        stored: bool,
        cuts: list[int] | None,
        fence: bool,
        hands_over: bool,
        without_pages: set[str],
    ) -> None:
        job = len(self.told)
        topic = b"%d" % job if hands_over else b""
        event = save_job(
            job, self.keys(first, chunks), stored=stored, apart=self.apart, topic=topic
        )
        event = event._replace(fence=Reached() if fence else None)
        event = from_host(event, without_pages if hands_over else ())
        self.told[job] = Told(event, self.weights_version, float("inf"))
        # A prompt's progress counts all slabs at once.
        self.step(event if hands_over else in_parts(event, cuts))

    @precondition(lambda self: self.fetched_chunks())
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        """Hand over a chunk without pages while it is being fetched."""
        job, chunk = len(self.told), data.draw(st.sampled_from(self.fetched_chunks()))
        keys = self.keys(CHUNKS.index(chunk), 1)
        event = from_host(save_job(job, keys, apart=self.apart, topic=b"%d" % job), chunk)
        self.told[job] = Told(event, self.weights_version, float("inf"))
        self.step(event)

    def fetched_chunks(self) -> list[str]:
        return sorted({each.slab.chunk.id for each in self.host_cache if is_fetched(each)})

    @precondition(lambda self: self.is_naming)
    @rule()
    def name_slabs(self) -> None:
        """Step without news, as the engine's thread does while slabs are still to be named."""
        self.step(TimePassed())

    @precondition(lambda self: self.host_cache.capacity)
    @rule(first=st.integers(0, len(CHUNKS)), chunks=st.integers(1, 4))
    def prefetch(self, first: int, chunks: int) -> None:
        slabs = slabs_of(0, self.keys(first, chunks), apart=self.apart)
        named = tuple(slab._replace(pages=()) for slab in slabs)
        self.step(PrefetchJob(PrefetchPlan("prefetch", ()), named))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.flying))
        kinds = OUTCOMES[batch.lane.kind]
        self.finish(batch, self.draw_outcomes(data, batch, kinds))

    def draw_outcomes(
        self, data: st.DataObject, batch: Batch, kinds: tuple[CellOutcome, ...]
    ) -> list[Outcome]:
        """Draw an outcome of each op. Cells of stores and checks have their own outcomes."""
        one = st.sampled_from(kinds)
        if batch.lane.kind not in (GET, PUT, CHECK):
            return [data.draw(one) for _ in batch.ops]
        return [outcome_of([data.draw(one) for _ in range(part.num_cells)]) for part in batch.parts]

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def complete_well(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.flying))
        self.finish(batch, [DONE] * len(batch.ops))

    @precondition(lambda self: self.flying)
    @rule(rounds=st.integers(1, 3))
    def complete_all_well(self, rounds: int) -> None:
        for _ in range(rounds):
            for batch in list(self.flying):
                self.finish(batch, [DONE] * len(batch.ops))

    @precondition(lambda self: any(batch.lane.tier >= 0 for batch in self.flying))
    @rule(data=st.data(), outcome=st.sampled_from(PASSING))
    def tier_fails(self, data: st.DataObject, outcome: CellOutcome) -> None:
        batches = [w for w in self.flying if w.lane.tier >= 0]
        tier = data.draw(st.sampled_from(sorted({batch.lane.tier for batch in batches})))
        for batch in batches:
            if batch.lane.tier == tier:
                self.finish(batch, [outcome] * len(batch.ops))

    @precondition(lambda self: any(batch.lane.tier >= 0 for batch in self.flying))
    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        batches = [batch for batch in self.flying if batch.lane.tier >= 0]
        batch = data.draw(st.sampled_from(batches))
        self.flying.remove(batch)
        self.hanging.append(batch)
        self.step(BatchHung(batch))

    @precondition(lambda self: self.hanging)
    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.hanging))
        kinds = OUTCOMES[batch.lane.kind]
        self.come_back(batch, self.draw_outcomes(data, batch, kinds))

    @precondition(lambda self: self.engine.context.tiers)
    @rule(data=st.data(), up=st.booleans(), writable=st.booleans())
    def tier_changes(self, data: st.DataObject, up: bool, writable: bool) -> None:
        tier = data.draw(st.integers(0, len(self.engine.context.tiers) - 1))
        (self.away.discard if up else self.away.add)(tier)
        (self.unwritable.discard if writable else self.unwritable.add)(tier)
        self.step(TierHealth(tier, up, writable))

    @rule(seconds=st.sampled_from((0.03, 0.1, 1.0, 3.0, LONGEST_PAUSE_S)))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.step(TimePassed())

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.step(CancelRequest(f"r{data.draw(st.sampled_from(sorted(self.told)))}"))

    @rule(forget=st.booleans())
    def drop_saves(self, forget: bool) -> None:
        self.weights_version += forget
        self.step(DropSaves(forget))
        assert not forget or not list(self.host_cache)

    @precondition(lambda self: len(self.told) > 4 and not self.is_ending)
    @rule()
    def flush(self) -> None:
        """Flush, as the process does before it ends."""
        self.is_ending = True
        self.step(Flush())

    # Observations

    @property
    def is_naming(self) -> bool:
        """True if a job has slabs that the engine has not been told yet."""
        return is_naming(self.engine)

    def streams(self) -> list[int]:
        """Return the loads whose producer has not ended."""
        return [job for job, told in self.told.items() if told.landed is not None]

    def land_chunks(self, job: int, more: int, *, final: bool, urgent: bool = False) -> None:
        told = self.told[job]
        assert isinstance(told.job, LoadJob)
        assert told.landed is not None
        stop = min(told.landed + more, told.job.plan.stop_chunk)
        told.landed = None if final else stop
        told.deadline = self.clock() + (URGENT_S if urgent else told.job.timeout_s)
        self.step(Landed(told.job.plan.job_id, stop, final, urgent))

    def keys(self, first: int, chunks: int) -> str:
        groups = (CHUNKS * 2)[first : first + chunks]
        return " ".join(f"{group}{i}" for group in groups for i in range(self.cells))

    def step(self, event: Event) -> None:
        for action in self.engine.step(event, self.clock()):
            match action:
                case Batch():
                    self.started(action)
                case LoadDone():
                    self.load_reported(action)
                case SaveGathered():
                    self.gather_reported(action)
                case SaveDone():
                    self.save_reported(action)
                case HostCacheChange():
                    assert not set(action.added) & set(action.removed)
                    self.whole = (self.whole | set(action.added)) - set(action.removed)

    def started(self, batch: Batch) -> None:
        lane = batch.lane
        limits = self.engine.context.lane(lane.kind, lane.tier).limits
        assert batch not in [*self.flying, *self.hanging]
        size = batch.num_cells + len(batch.fences)
        assert 0 < size <= limits.batch_ops or len(batch.ops) == 1
        assert lane.tier not in self.away
        assert lane.kind not in WRITES or lane.tier not in self.unwritable
        users = defaultdict(set)
        for other in [*self.flying, *self.hanging]:
            for slot in slots_of(other):
                users[slot].add(other.lane.kind)
        for part in batch.parts:
            assert len(part.slots) == (0 if lane.kind is REMOVE else part.num_cells)
            if lane.kind is REMOVE:
                continue
            for key, slot in zip(part.cell_keys(), part.slots, strict=True):
                self.slot_used(lane.kind, slot, key, users[slot])
            if lane.kind in (GATHER, SCATTER):
                self.pages_used(lane.kind, part)
        self.flying.append(batch)
        together = [w for w in self.flying if w.lane == lane]
        assert len(together) <= limits.batches

    def slot_used(self, kind: OpKind, slot: Slot, key: str, users: set[OpKind]) -> None:
        if kind in (GET, GATHER):
            assert not users
            self.contents[slot] = Content(key, self.weights_version)
            return
        content = self.contents[slot]
        assert content.key == key
        assert not users & {GET, GATHER, CHECK}
        assert content.good or kind is CHECK
        assert content.sealed or kind is not PUT
        assert kind is not SEAL or content.sealed or PUT not in users, "a seal adds no new bytes"

    def pages_used(self, kind: OpKind, part: Part) -> None:
        told = self.told[part.slab.pages[0].block_ids[0]]
        assert part.slab in told.job.slabs
        assert part.cells is None
        assert told.job.fence is None or told.job.fence.is_reached  # type: ignore[attr-defined]
        if kind is SCATTER:
            assert not told.is_reported
            for slot in part.slots:
                assert self.contents[slot].weights_version >= told.weights_version
        else:
            assert not told.is_gathered

    def finish(self, batch: Batch, outcomes: list[Outcome]) -> None:
        self.flying.remove(batch)
        if batch.lane.kind is FENCE:
            for fence, outcome in zip(batch.fences, outcomes, strict=True):
                fence.is_reached = outcome is DONE  # type: ignore[attr-defined]
            self.step(BatchDone(batch, tuple(outcomes)))
            return
        for part, outcome in zip(batch.parts, outcomes, strict=True):
            for slot, each in zip(part.slots, each_of(outcome, part.num_cells), strict=False):
                if each is DONE and batch.lane.kind in (GATHER, CHECK):
                    self.contents[slot].good = True
                elif each is DONE and batch.lane.kind is SEAL:
                    self.contents[slot].sealed = True
            if outcome is DONE and batch.lane.kind is SCATTER:
                self.told[part.slab.pages[0].block_ids[0]].in_pages.update(part.cell_keys())
        self.step(BatchDone(batch, tuple(outcomes)))

    def come_back(self, batch: Batch, outcomes: list[Outcome]) -> None:
        self.hanging.remove(batch)
        self.step(BatchDone(batch, tuple(outcomes)))

    def in_flight(self, job: int, kind: OpKind) -> bool:
        slabs = [part.slab for w in self.flying if w.lane.kind is kind for part in w.parts]
        return any(slab.pages and slab.pages[0].block_ids == (job,) for slab in slabs)

    def load_reported(self, report: LoadDone) -> None:
        told = self.told[report.job_id]
        assert isinstance(told.job, LoadJob)
        assert not told.is_reported
        told.is_reported = True
        assert told.job.plan.first_chunk <= report.ok_stop_chunk <= told.job.plan.stop_chunk
        assert not self.in_flight(report.job_id, SCATTER)
        loaded = (s for s in told.job.slabs if s.chunk.position < report.ok_stop_chunk)
        before = {key for slab in loaded for key in slab.cell_keys()}
        assert before <= told.in_pages
        assert (report.reason is DONE) == (report.ok_stop_chunk == told.job.plan.stop_chunk)

    def gather_reported(self, report: SaveGathered) -> None:
        told = self.told[report.job_id]
        assert isinstance(told.job, SaveJob)
        assert not told.is_gathered
        told.is_gathered = True
        assert not self.in_flight(report.job_id, GATHER)

    def save_reported(self, report: SaveDone) -> None:
        told = self.told[report.job_id]
        assert told.is_gathered
        assert not told.is_reported
        told.is_reported = True
        num_cells = sum(slab.num_cells for slab in told.job.slabs)
        assert sum(count for _, count in report.outcomes) == num_cells

    @invariant()
    def holds(self) -> None:
        check(self.engine)
        self.lent_memory_is_kept()
        now, due = self.clock(), self.engine.next_deadline()
        assert due is None or due > now or self.is_naming
        waiting = {job: told for job, told in self.told.items() if not told.is_reported}
        for job, told in waiting.items():
            is_waiting = told.landed is not None
            assert told.deadline > now or is_waiting or self.in_flight(job, SCATTER)
        # Each open job has an event ahead that will move it on.
        assert self.engine.idle or self.flying or due is not None or self.streams()
        assert not self.engine.idle or not (waiting or self.flying)
        assert self.whole == self.whole_groups()
        assert self.host_cache.capacity or not self.whole

    def lent_memory_is_kept(self) -> None:
        """Assert that slots which a hung call may write are quarantined, and slots which it reads
        stay as they are."""
        slots = self.host_cache.slots
        written = set()
        for batch in self.hanging:
            for part in batch.parts:
                for key, slot in zip(part.cell_keys(), part.slots, strict=False):
                    if batch.lane.kind is GET:
                        assert slot in slots._quarantined
                        written.add(slot)
                    elif batch.lane.kind is PUT:
                        assert slot not in slots._quarantined
                        content = self.contents[slot]
                        assert (content.key, content.good) == (key, True)
        # A slab's slots are given up whole, with the cells that it already had.
        assert len(written) <= num_slots_written(self.engine.hung_calls)
        assert slots.num_quarantined == num_slots_written(self.engine.hung_calls)
        assert not written & {slot for entry in self.host_cache for slot in entry.slots}

    def whole_groups(self) -> set[str]:
        """Return the chunks that host memory has whole."""
        present = CacheEntryState.PRESENT
        groups = [e.slab.chunk.id for e in self.host_cache if e.state is present]
        kept = self.host_cache.capacity > 0
        return {group for group in groups if kept and groups.count(group) == self.slabs_per_chunk}

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for job in self.streams():
            self.land_chunks(job, 0, final=True)
            self.holds()
        # No job waits for hung calls.
        self.run_dry()
        assert all(told.is_reported for told in self.told.values())
        assert self.engine.idle
        for batch in list(self.hanging):
            self.come_back(batch, [DONE] * len(batch.ops))
            self.holds()
        self.run_dry()
        assert self.engine.idle
        assert not any(entry.pins for entry in self.host_cache)
        assert self.host_cache.capacity or not list(self.host_cache)
        slots = self.host_cache.slots
        assert slots.num_held == sum(entry.num_cells for entry in self.host_cache)
        assert slots.num_free == slots.count - slots.num_held

    def run_dry(self) -> None:
        while self.flying or self.engine.next_deadline() is not None:
            for batch in list(self.flying):
                self.finish(batch, [DONE] * len(batch.ops))
                self.holds()
            self.clock.advance(SAVE_STALL_S)
            self.step(TimePassed())


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(stateful_step_count=40)
