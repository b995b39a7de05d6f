"""The pool's way between host memory and a GPU's pages, over a device that is simulated.

    python benchmarks/bench_device.py --json device.json

Planner, engine, executor, lanes and the copier of GPUs are the real ones; no byte moves. The device
has a link of 54.5 GB/s in each direction, on which each copy loses what an H200 loses at the
copier's way of starting copies, and keeps the order of streams and events. Cells are those of
Llama 3 8B: 32 layers, 8 heads of 128, 16 bits, chunks of 256 tokens; one of 1 MiB.

* Time of a load and of a save, beside that of the link alone, with the pool alone; beside a thread
  that holds the interpreter's lock for most of the time, as a model does that launches layers; and
  while a step of 50 ms is fenced every 50 ms (`steps`), with what it waits for the step before its
  plan left out.
* Processor time of Python for each MiB, by threads, over a device that takes no time and does no
  work, so that the simulation is not counted; beside a store too, whose calls and checksums see 64
  bytes a cell.
* Time from a plan to its first copy, and the batches of a GiB.

Neighbours of the machine take processor time and caches for seconds at a time. So all rows take
turns, over the whole run, and targets judge the smallest of their values. Two yardsticks run in the
same turns, to compare machines: `bare thread` keeps the link busy in rounds of 16 MiB and does
nothing else, in each situation; `yardstick` is a fixed loop of Python with an object, an entry of
a dictionary and a small array for each MiB.
"""

import contextlib
import os
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from benchmarks.common import DidNotFinish, Result, Row, Target, run_script
from vllm_kvpool.identity.keys import ContextRank, KeyMaker, make_namespace
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.topology import LayerGroup, Topology, cells_of_rank
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.staging.arena import SLOT_ALIGNMENT, Arena
from vllm_kvpool.staging.copy_triton import Streams, TritonCopier
from vllm_kvpool.staging.devices import DEVICE_COPY_BATCH_BYTES, Device
from vllm_kvpool.staging.slots import Slot, SlotPool
from vllm_kvpool.staging.triton_tables import RunTable
from vllm_kvpool.storage.base import (
    Buffer,
    Capabilities,
    ChunkRef,
    GetOutcome,
    PutOutcome,
    map_buffer,
)
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES
from vllm_kvpool.storage.eviction import Lru
from vllm_kvpool.storage.open_tiers import OpenTiers
from vllm_kvpool.transfer.context import Tier
from vllm_kvpool.transfer.engine import Engine
from vllm_kvpool.transfer.executor import Executor, Fenced
from vllm_kvpool.transfer.graph import Batch
from vllm_kvpool.transfer.host_cache import HostCache
from vllm_kvpool.transfer.lanes import BatchRunner
from vllm_kvpool.transfer.ops import (
    CellOutcome,
    JobId,
    JobPages,
    LoadDone,
    LoadPlan,
    OpKind,
    Outcome,
    Report,
    SaveDone,
    SaveGathered,
    SavePlan,
)
from vllm_kvpool.transfer.planner import Planner
from vllm_kvpool.worker.lane_limits import copy_batch_bytes, lanes_of, with_slab_limits
from vllm_kvpool.worker.worker_part import LOAD_RESERVE

NUM_LAYERS, LAYER_SPAN, NUM_HEADS, HEAD_DIM, BLOCK, CHUNK = 32, 8, 8, 128, 16, 256
ROW_BYTES = 2 * HEAD_DIM * 2
TOKEN_BYTES = NUM_LAYERS * NUM_HEADS * ROW_BYTES
BLOCK_BYTES = NUM_HEADS * BLOCK * ROW_BYTES  # of one layer
CELLS_PER_CHUNK = NUM_HEADS * NUM_LAYERS // LAYER_SPAN
Int64s = np.ndarray[Any, np.dtype[np.int64]]
SIZES, QUICK_SIZES = (2048, 8192, 32768), (2048,)
COST_TOKENS = 8192  # 1 GiB
STAGING_CELLS, KEPT_CELLS = 1024, 8192
NUM_BLOCKS = 2 * max(SIZES) // BLOCK
PAGES_SHAPE = (NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK, 2 * HEAD_DIM)
SLOT_BYTES = (1 << 20) + SLOT_ALIGNMENT
TURNS, QUICK_TURNS = 12, 1
COSTS_PER_TURN = 4
ROUND_BYTES = 16 << 20  # of a bare thread, as of the copier

LINK_BYTES_S = 54.5e9
LIST_COPY_LOSS_S, COPY_LOSS_S = 0.5e-6, 4.8e-6
"""Of each copy in one driver call for a list, and in a call of its own (`driver_copies.py`)."""
KERNEL_S = 20e-6
STEP_S = 0.05
HELD_S = 200e-6  # of the interpreter's lock, by the thread that stands for a model
LIMIT_S = 60.0

ALONE, BESIDE, STEPS = "alone", "beside a busy thread", "under steps"
WANTED_ALONE, WANTED_MIXED = 1.05, 1.10
LOAD_US, SAVE_US, STORE_US = 3.0, 4.0, 12.0
FIRST_MS, BATCHES = 1.0, 16


@dataclass
class Link:
    """One direction of the simulated link: until when it is busy, and its first copy."""

    free_at: float = 0.0
    first_at: float | None = None

    def restart(self) -> None:
        """The next copy is the first."""
        self.first_at = None

    def carry(self, start: float, copies: Int64s) -> float:
        """Copy after `start`; returns when that has ended."""
        now = time.perf_counter()
        if self.first_at is None:
            self.first_at = now
        nbytes = int(copies[:, 2].sum())
        loss_s = LIST_COPY_LOSS_S if len(copies) > 1 else COPY_LOSS_S
        seconds = nbytes / LINK_BYTES_S + len(copies) * loss_s
        self.free_at = max(now, start, self.free_at) + seconds
        return self.free_at


@dataclass(frozen=True)
class SimulatedEvent:
    """A point in time."""

    at: float

    def query(self) -> bool:
        return self.at <= time.perf_counter()

    def synchronize(self) -> None:
        left = self.at - time.perf_counter()
        if left > 0:
            time.sleep(left)


@dataclass
class SimulatedStream:
    """Work in order, each piece as soon as the link allows."""

    streams: "SimulatedStreams"
    ready_at: float = 0.0

    def record(self) -> SimulatedEvent:
        return SimulatedEvent(self.ready_at)

    def wait(self, event: Any) -> None:
        self.ready_at = max(self.ready_at, event.at)

    def copy(self, copies: Int64s) -> None:
        streams = self.streams
        if not streams.takes_time or copies[0, 2] < BLOCK_BYTES:
            return  # nothing to time, or a table, which shares the link and is not counted
        is_upload = copies[0, 0] in streams.device_addresses
        link = streams.to_device if is_upload else streams.to_host
        self.ready_at = link.carry(self.ready_at, copies)

    def launch(self, runs: RunTable, num_programs: int, *args: Any, is_gather: bool) -> None:
        if self.streams.takes_time:
            self.ready_at = max(self.ready_at, time.perf_counter()) + KERNEL_S


class SimulatedStreams:
    """A device that takes the time of its link, or none."""

    def __init__(self, *, takes_time: bool) -> None:
        self.to_device, self.to_host = Link(), Link()
        self.takes_time = takes_time
        self.model_until = 0.0  # when the model's stream has done what it was given
        self.device_addresses = DeviceAddresses()

    def enter_thread(self) -> None:
        """Nothing: there is no device."""

    def new_stream(self) -> SimulatedStream:
        return SimulatedStream(self)

    def model_event(self) -> SimulatedEvent:
        return SimulatedEvent(self.model_until)

    def device_memory(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.device_addresses.ranges.append(range(memory.data_ptr(), memory.data_ptr() + nbytes))
        return memory

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


@dataclass
class DeviceAddresses:
    """Which addresses stand for the device's memory."""

    ranges: list[range] = field(default_factory=list)

    def __contains__(self, address: int) -> bool:
        return any(int(address) in each for each in self.ranges)


class SimulatedDevice(Device):
    """What the worker asks of a device."""

    copy_batch_bytes = DEVICE_COPY_BATCH_BYTES

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__(torch.device("meta"))
        self._streams = streams

    def new_event(self) -> SimulatedEvent:
        return self._streams.model_event()


class HeadersOnly:
    """An arena without payloads: a cell's buffer is its header and 64 bytes more."""

    def __init__(self, num_slots: int) -> None:
        self._each = 2 * HEADER_BYTES
        self._memory = map_buffer(num_slots * self._each)

    def buffers(self, slots: Sequence[Slot], sizes: Sequence[int]) -> list[Buffer]:
        address, step, views = self._memory.address, self._each, self.views(slots, sizes)
        return [Buffer(address + s * step, view) for s, view in zip(slots, views, strict=True)]

    def views(self, slots: Sequence[Slot], sizes: Sequence[int]) -> list[memoryview]:
        view, step = self._memory.view, self._each
        return [view[s * step : (s + 1) * step] for s in slots]

    def payload_addresses(self, slots: Sequence[Slot]) -> Int64s:
        return np.array(slots, np.int64) * SLOT_BYTES + HEADER_BYTES


class PlainStore:
    """A store whose calls take next to no processor time."""

    capabilities = Capabilities("plain", True, False, 1, 1)

    def __init__(self) -> None:
        self._cells: dict[str, bytes] = {}

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [key in self._cells for key in keys]

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        for key, buffer in zip(keys, buffers, strict=True):
            self._cells[key] = bytes(buffer.view)
        return [PutOutcome.STORED] * len(keys)

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        for key, buffer in zip(keys, buffers, strict=True):
            buffer.view[:] = self._cells[key]
        return [GetOutcome.OK] * len(keys)


class Place(NamedTuple):
    """Where a worker runs: a device or a simulated one, the model's pages, staging memory."""

    device: Device
    streams: Streams
    pages: torch.Tensor  # PAGES_SHAPE
    make_arena: Callable[[int], Arena]  # from a number of slots


def simulated(streams: SimulatedStreams) -> Place:
    """Return a place in which no byte moves."""
    pages = torch.empty(PAGES_SHAPE, dtype=torch.bfloat16, device="meta")
    return Place(
        SimulatedDevice(streams), streams, pages, lambda slots: cast("Arena", HeadersOnly(slots))
    )


class Rig:
    """Engine and lanes of a worker, with host memory for 64k tokens, and a store or none."""

    def __init__(self, place: Place, *, stores: int = 0, kept: int = KEPT_CELLS) -> None:
        device = place.device
        pages = [from_token_content(layer) for layer in place.pages]
        copiers = [TritonCopier(pages, place.streams) for _ in range(2)]
        for copier in copiers:
            copier.warm_up()
        topology = Topology(NUM_HEADS, 1, ((0, NUM_LAYERS),), LAYER_SPAN)
        planner = Planner(
            cells=cells_of_rank([LayerGroup(topology, ROW_BYTES)], 0, 0),
            keys=KeyMaker(make_namespace("bench", "0" * 12), ContextRank()),
            chunk_tokens=CHUNK,
            load_timeout_s=LIMIT_S,
            keeps_all=kept > 0,
            block_sizes=(BLOCK,),
        )
        planner = with_slab_limits(planner, device, STAGING_CELLS * SLOT_BYTES, by_span=False)
        num_slots = STAGING_CELLS + kept
        plain = tuple(cast("Any", PlainStore()) for _ in range(stores))
        tiers = OpenTiers(plain, ("plain",) * stores, (1,) * stores, (1,) * stores)
        self.registry = MetricsRegistry()
        runner = BatchRunner(
            stores=plain,
            names=tiers.names,
            arena=place.make_arena(num_slots),
            gather_copier=copiers[0],
            scatter_copier=copiers[1],
            chunk_tokens=CHUNK,
            verify_checksum=True,
            registry=self.registry,
        )
        self.batches: Counter[OpKind] = Counter()
        copy_bytes = copy_batch_bytes(device, STAGING_CELLS * SLOT_BYTES)
        lanes = lanes_of(tiers, copy_bytes, copiers[0].num_threads)
        engine = Engine(
            HostCache(
                SlotPool(num_slots, STAGING_CELLS // LOAD_RESERVE),
                kept,
                Lru(),
                planner.slabs_per_chunk,
            ),
            tuple(Tier(f"t{i}", True, False) for i in range(stores)),
            {lane: limits for lane, (_, limits) in lanes.items()},
            slot_bytes=SLOT_BYTES,
        )

        def perform(batch: Batch) -> Sequence[Outcome]:
            self.batches[batch.lane.kind] += 1
            return runner.perform(batch)

        threads = {lane: threads for lane, (threads, _) in lanes.items()}
        others = set(threading.enumerate())
        self.executor = Executor(
            engine, planner, perform, threads, self.registry, on_lane_start=device.enter_thread
        )
        self._threads = set(threading.enumerate()) - others
        self._device = device
        self._next_job = 0

    def request(self, num_tokens: int, is_save: bool, hashes: tuple[bytes, ...]) -> StepPlan:
        """A step whose only work is one request's load or save."""
        self._next_job += 1
        job, name = JobId(self._next_job), f"r{self._next_job}"
        pages = (JobPages(tuple(range(1, num_tokens // BLOCK + 1)), 0, 0, num_tokens),)
        if is_save:
            return StepPlan(saves=(SavePlan(job, name, 0, hashes, pages),))
        return StepPlan(loads=(LoadPlan(job, name, 0, hashes, pages, 0, num_tokens),))

    def post(self, plan: StepPlan) -> None:
        """What a step of the model's thread does."""
        fence = self._device.new_event()
        assert fence is not None
        plans: list[LoadPlan | SavePlan] = [*plan.loads, *plan.saves]
        for each in plans:
            self.executor.post(Fenced(each, fence))

    def wait(self, job: JobId, kind: type[Report]) -> float:
        """Wait for a job's report; returns the time at which it came."""
        deadline = time.perf_counter() + LIMIT_S

        def is_over(reports: Sequence[Report]) -> bool:
            found = [r for r in reports if isinstance(r, kind) and getattr(r, "job_id", 0) == job]
            assert all(getattr(r, "reason", CellOutcome.DONE) is CellOutcome.DONE for r in found)
            return bool(found)

        while not self.executor.wait(is_over, min(0.5, LIMIT_S)):
            if time.perf_counter() > deadline:
                raise DidNotFinish(f"job {job} has not ended after {LIMIT_S:g} s")
        return time.perf_counter()

    def thread_seconds(self) -> dict[str, float]:
        """Processor time of the engine's thread and of lanes so far, by what they are."""
        seconds = {"engine": 0.0, "lanes": 0.0}
        for thread in self._threads:
            ran = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
            seconds["engine" if thread.name == "kvpool-engine" else "lanes"] += int(ran) / 1e9
        return seconds

    def drain(self) -> None:
        self.executor.drain()

    def close(self) -> None:
        self.executor.close(1.0)


def new_hashes(num_tokens: int) -> tuple[bytes, ...]:
    return tuple(os.urandom(16) for _ in range(num_tokens // CHUNK))


def save(rig: Rig, num_tokens: int) -> tuple[bytes, ...]:
    """Save a new prompt, whole, and return its hashes."""
    hashes = new_hashes(num_tokens)
    plan = rig.request(num_tokens, True, hashes)
    rig.post(plan)
    rig.wait(plan.saves[0].job_id, SaveDone)
    rig.drain()
    return hashes


@dataclass(frozen=True)
class Timed:
    """One load or save: from its plan, or from the end of the step before it, to its end."""

    seconds: float
    first_s: float


def perform(rig: Rig, plan: StepPlan) -> float:
    """Post a load or save and wait for its end; returns when its pages were filled or free."""
    rig.post(plan)
    if plan.saves:
        end = rig.wait(plan.saves[0].job_id, SaveGathered)
        rig.wait(plan.saves[0].job_id, SaveDone)
    else:
        end = rig.wait(plan.loads[0].job_id, LoadDone)
    rig.drain()
    return end


def timed(
    rig: Rig,
    streams: SimulatedStreams,
    num_tokens: int,
    hashes: tuple[bytes, ...],
    *,
    is_save: bool,
) -> Timed:
    link = streams.to_host if is_save else streams.to_device
    plan = rig.request(num_tokens, is_save, hashes)
    link.restart()
    start = time.perf_counter()
    fenced = streams.model_until
    end = perform(rig, plan)
    assert link.first_at is not None
    return Timed(end - max(start, fenced), link.first_at - start)


@contextmanager
def repeated(action: Callable[[], None], pause_s: float = 0.0) -> Iterator[None]:
    """A thread that calls `action` again and again, with a pause before each call."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(pause_s):
            action()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def hold_lock() -> None:
    """Hold the interpreter's lock for a while, as a thread does that launches layers."""
    until = time.perf_counter() + HELD_S
    while time.perf_counter() < until:
        pass
    time.sleep(0)


@contextmanager
def steps(rig: Rig, streams: SimulatedStreams) -> Iterator[None]:
    """A model that is always one step ahead of its device, and saves a chunk in each."""

    def step() -> None:
        streams.model_until = max(time.perf_counter(), streams.model_until) + STEP_S
        rig.post(rig.request(CHUNK, True, new_hashes(CHUNK)))

    with repeated(step, STEP_S):
        yield
    streams.model_until = 0.0
    rig.drain()


def bare_thread(streams: SimulatedStreams, num_tokens: int) -> float:
    """Return the seconds of rounds over the link, two of which are under way."""
    stream = streams.new_stream()
    copy = streams.device_addresses.ranges[0].start, 0, ROUND_BYTES // 2
    copies = np.array([copy, copy], np.int64)
    start = time.perf_counter()
    under_way = [stream.record()]
    for _ in range(num_tokens * TOKEN_BYTES // ROUND_BYTES):
        stream.copy(copies)
        under_way.append(stream.record())
        under_way.pop(0).synchronize()
    under_way.pop().synchronize()
    return time.perf_counter() - start


def yardstick() -> float:
    """Return the processor time of a fixed loop of Python."""
    start = time.thread_time()
    cells: dict[bytes, Timed] = {}
    for number in range(COST_TOKENS * TOKEN_BYTES >> 20):
        cells[number.to_bytes(16, "big")] = Timed(float(number), 0.0)
        np.array([number, number + 1], np.int64)
    assert all(cells.pop(key).first_s == 0.0 for key in list(cells))
    return time.thread_time() - start


class Times:
    """Loads and saves of all sizes in all situations, over a link that takes time."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._streams = SimulatedStreams(takes_time=True)
        self._rig = Rig(simulated(self._streams))
        self._found: defaultdict[tuple[str, int, bool], list[Timed]] = defaultdict(list)
        self._bare: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    def turn(self) -> None:
        """Time each load and save once, and a bare thread's."""
        around: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
            ALONE: contextlib.nullcontext,
            BESIDE: lambda: repeated(hold_lock),
            STEPS: lambda: steps(self._rig, self._streams),
        }
        for situation, context in around.items():
            stored = {num_tokens: save(self._rig, num_tokens) for num_tokens in self._sizes}
            with context():
                if situation != ALONE:
                    time.sleep(2.5 * STEP_S)  # until the model is ahead
                for num_tokens, hashes in stored.items():
                    self._bare[situation, num_tokens].append(bare_thread(self._streams, num_tokens))
                    for is_save in (False, True):
                        moved = new_hashes(num_tokens) if is_save else hashes
                        each = timed(self._rig, self._streams, num_tokens, moved, is_save=is_save)
                        self._found[situation, num_tokens, is_save].append(each)

    def rows(self) -> list[Row]:
        return [
            self._row(*each) for each in sorted(self._found, key=lambda each: (each[1], each[0]))
        ]

    def _row(self, situation: str, num_tokens: int, is_save: bool) -> Row:
        found = self._found[situation, num_tokens, is_save]
        ms = [1000 * each.seconds for each in found]
        link_ms = 1000 * num_tokens * TOKEN_BYTES / LINK_BYTES_S
        bare_ms = 1000 * min(self._bare[situation, num_tokens])
        return {
            "what": "save" if is_save else "load",
            "tokens": num_tokens,
            "situation": situation,
            "best ms": min(ms),
            "median ms": statistics.median(ms),
            "link ms": link_ms,
            "best / link": min(ms) / link_ms,
            "median / link": statistics.median(ms) / link_ms,
            "bare thread / link": bare_ms / link_ms,
            "first copy after, best ms": 1000 * min(each.first_s for each in found),
        }

    def close(self) -> None:
        self._rig.close()


class Costs:
    """Processor time over a device that takes none, for each MiB."""

    def __init__(self) -> None:
        self._rigs = {
            name: Rig(simulated(SimulatedStreams(takes_time=False)), stores=stores, kept=kept)
            for name, stores, kept in (("host memory", 0, KEPT_CELLS), ("a store", 1, 0))
        }
        self._stored = {name: save(rig, COST_TOKENS) for name, rig in self._rigs.items()}
        self._spent: defaultdict[tuple[str, bool], list[dict[str, float]]] = defaultdict(list)
        self._batches: dict[tuple[str, bool], int] = {}
        self._yardsticks: list[float] = []

    def turn(self) -> None:
        """Measure each load and save once, and the yardstick."""
        for name, rig in self._rigs.items():
            for is_save in (False, True):
                hashes = new_hashes(COST_TOKENS) if is_save else self._stored[name]
                plan = rig.request(COST_TOKENS, is_save, hashes)
                before, rig.batches = rig.thread_seconds(), Counter()
                perform(rig, plan)
                after = rig.thread_seconds()
                self._spent[name, is_save].append(
                    {each: after[each] - before[each] for each in after}
                )
                kind = OpKind.GATHER if is_save else OpKind.SCATTER
                self._batches[name, is_save] = rig.batches[kind]
        self._yardsticks.append(yardstick())

    def rows(self) -> list[Row]:
        us = 1e6 / (COST_TOKENS * TOKEN_BYTES >> 20)
        measure = us * min(self._yardsticks)
        rows: list[Row] = []
        for (name, is_save), spent in self._spent.items():
            best = min(spent, key=lambda each: sum(each.values()))
            together = us * sum(best.values())
            rows.append(
                {
                    "what": "save" if is_save else "load",
                    "through": name,
                    "engine us a MiB": us * best["engine"],
                    "lanes us a MiB": us * best["lanes"],
                    "together us a MiB": together,
                    "median us a MiB": us * statistics.median(sum(e.values()) for e in spent),
                    "yardstick us a MiB": measure,
                    "together / yardstick": together / measure,
                    "batches": self._batches[name, is_save],
                }
            )
        return rows

    def close(self) -> None:
        for rig in self._rigs.values():
            rig.close()


def measure(quick: bool) -> Result:
    result = Result()
    times, costs = Times(QUICK_SIZES if quick else SIZES), Costs()
    for _ in range(QUICK_TURNS if quick else TURNS):
        times.turn()
        for _ in range(COSTS_PER_TURN):
            costs.turn()
    time_rows, cost_rows = times.rows(), costs.rows()
    times.close()
    costs.close()
    result.rows = [*time_rows, *cost_rows]
    limits = {
        ("load", "host memory"): LOAD_US,
        ("save", "host memory"): SAVE_US,
        ("load", "a store"): STORE_US,
        ("save", "a store"): STORE_US,
    }
    for row in cost_rows:
        what, through = str(row["what"]), str(row["through"])
        result.targets.append(
            Target(
                f"processor time of a {what}, {through}",
                cast("float", row["together us a MiB"]),
                limits[what, through],
                False,
                "us a MiB",
            )
        )
    result.targets.append(
        Target("batches of a GiB", cast("float", cost_rows[0]["batches"]), BATCHES, False, "")
    )
    largest = max(cast("int", row["tokens"]) for row in time_rows)
    for row in time_rows:
        if row["what"] == "load" and row["tokens"] == largest:
            is_alone = row["situation"] == ALONE
            name = f"load of {largest} tokens, {row['situation']}, beside the link"
            wanted = WANTED_ALONE if is_alone else WANTED_MIXED
            result.targets.append(Target(name, cast("float", row["best / link"]), wanted, False))
            if is_alone:
                first = cast("float", row["first copy after, best ms"])
                name = f"plan of {largest} tokens to its first copy"
                result.targets.append(Target(name, first, FIRST_MS, False, "ms"))
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
