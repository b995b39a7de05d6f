"""The transfer engine without any data: the end of an op in its graphs, and its threads.

    python benchmarks/bench_engine.py engine|scheduler [--json FILE] [--quick]

Nothing is copied and nothing is stored.
"""

import ctypes
import gc
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from benchmarks.common import (
    LIMITED_BY,
    DidNotFinish,
    Result,
    Row,
    Target,
    interleaved,
    percentile,
    run_script,
    spread,
)
from benchmarks.limits import Meter
from vllm_kvpool.identity.keys import ContextRank, KeyMaker, make_namespace
from vllm_kvpool.layout.topology import LayerGroup, Topology, cells_of_rank
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.staging.slots import SlotPool
from vllm_kvpool.storage.eviction import Lru
from vllm_kvpool.transfer.context import Tier
from vllm_kvpool.transfer.engine import Engine, lane_names
from vllm_kvpool.transfer.executor import Executor
from vllm_kvpool.transfer.graph import Batch, LaneLimits, Op, Owner, Priority, Scheduler
from vllm_kvpool.transfer.host_cache import HostCache
from vllm_kvpool.transfer.lane_pool import Perform
from vllm_kvpool.transfer.ops import (
    CellOutcome,
    JobId,
    JobPages,
    LoadDone,
    LoadPlan,
    OpKind,
    Report,
    SaveDone,
    SavePlan,
)
from vllm_kvpool.transfer.planner import Planner

ROUNDS, QUICK_ROUNDS = 4000, 400
WARM_UP = 100
CHUNK = 16
PAGES = (JobPages((1,), 0, 0, CHUNK),)
GRAPHS = 1000
PUT_S = 0.0005  # what a put takes while its lane is killed
LIMIT_S = 30.0
KEEP, STAGING = 64, 64

MAX_ROUND_TRIP_US = 100.0
MAX_REPORT_S = 1.0


def done(batch: Batch) -> tuple[CellOutcome, ...]:
    return (CellOutcome.DONE,) * len(batch.ops)


@dataclass
class Bench:
    """An executor whose plans are one cell each."""

    executor: Executor
    next_job: int = 0

    def save(self) -> JobId:
        self.next_job += 1
        job = JobId(self.next_job)
        self.executor.post(SavePlan(job, f"r{job}", 0, (os.urandom(16),), PAGES))
        return job

    def wait(self, kind: type[Report], count: int) -> int:
        """Until so many reports of the kind have come; how many more came with them."""
        deadline = time.perf_counter() + LIMIT_S
        while count > 0:

            def ready(reports: Sequence[Report]) -> bool:
                return any(isinstance(report, kind) for report in reports)

            if not self.executor.wait(ready, deadline - time.perf_counter()):
                raise DidNotFinish(f"{count} reports are missing after {LIMIT_S:g} s")
            count -= sum(isinstance(report, kind) for report in self.executor.drain())
        return -count


def make(perform: Perform = done, tiers: int = 0, keep: int = KEEP) -> Bench:
    topology = Topology(num_heads=1, tp_size=1, stages=((0, 1),), layer_span=1)
    namespace = make_namespace("bench", "0" * 12)
    planner = Planner(
        cells=cells_of_rank([LayerGroup(topology, row_bytes=64)], 0, 0),
        keys=KeyMaker(namespace, ContextRank()),
        chunk_tokens=CHUNK,
        load_timeout_s=LIMIT_S,
        block_sizes=(CHUNK,),
    )
    lanes = dict.fromkeys(lane_names(tiers), 1)
    limits = dict.fromkeys(lanes, LaneLimits(2, 64, 1 << 30, 1 << 40))
    host_cache = HostCache(SlotPool(STAGING + keep, 16), keep, Lru(), {"": 1})
    engine = Engine(host_cache, tuple(Tier(f"t{i}", True, False) for i in range(tiers)), limits)
    return Bench(Executor(engine, planner, perform, lanes, MetricsRegistry()))


def round_trips(rounds: int) -> list[float]:
    """A load of a cell that is in host memory: one SCATTER."""
    bench = make()
    chunk = os.urandom(16)
    bench.executor.post(SavePlan(JobId(-1), "w", 0, (chunk,), PAGES))
    bench.wait(SaveDone, 1)
    times = []
    for number in range(rounds + WARM_UP):
        plan = LoadPlan(JobId(number), "r", 0, (chunk,), PAGES, 0, CHUNK)
        start = time.perf_counter()
        bench.executor.post(plan)
        bench.wait(LoadDone, 1)
        times.append(time.perf_counter() - start)
    bench.executor.close(1.0)
    return times[WARM_UP:]


def lane_death() -> tuple[float, int]:
    """Seconds from the death to the last report, and how many saves were under way at death."""
    putting = threading.Event()
    thread_of: list[int] = []

    def perform(batch: Batch) -> tuple[CellOutcome, ...]:
        if batch.lane.kind is OpKind.PUT:
            if not thread_of:
                thread_of.append(threading.get_ident())
                putting.set()
            for _ in range(len(batch.ops)):
                time.sleep(PUT_S)
        return done(batch)

    bench = make(perform, tiers=1, keep=0)
    for _ in range(GRAPHS):
        bench.save()
    putting.wait(LIMIT_S)
    left = GRAPHS - GRAPHS // 2 - bench.wait(SaveDone, GRAPHS // 2)
    start = time.perf_counter()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_of[0]), ctypes.py_object(SystemExit)
    )
    bench.wait(SaveDone, left)
    seconds = time.perf_counter() - start
    bench.executor.close(1.0)
    return seconds, left


def bench_engine(quick: bool) -> Result:
    """The transfer engine without any data: round trips through its threads, and a lane that dies.

    Round trip: a plan of one op (a scatter of a cell that is in host memory, which moves nothing)
    from the model's thread to the engine thread, to a lane, back, and to the model's thread.

    Death of a lane: 1,000 saves of one cell each are under way when the thread that puts them is
    ended from outside; measured is the time until every one of them has been reported.
    """
    result = Result()
    rounds = QUICK_ROUNDS if quick else ROUNDS
    meter = Meter()
    with meter.of("one op"):
        one = round_trips(rounds)
    with meter.of("death"):
        seconds, left = lane_death()
    times = spread("", "us", [1e6 * each for each in one])
    result.rows.append({"graph": "one op", **times, LIMITED_BY: meter.limited_by("one op")})
    row: Row = {"graph": f"{GRAPHS} saves, lane killed", "seconds to the last": seconds}
    result.rows.append(row | {LIMITED_BY: meter.limited_by("death")})
    result.targets += [
        Target(
            "round trip of one op, p50", 1e6 * percentile(one, 0.5), MAX_ROUND_TRIP_US, False, "us"
        ),
        Target(f"all {left} saves reported after the death", seconds, MAX_REPORT_S, False, "s"),
    ]
    return result


# Graphs

UNBOUNDED = 1 << 40
EACH_ALONE = LaneLimits(UNBOUNDED, batch_ops=1, batch_bytes=UNBOUNDED, budget_bytes=UNBOUNDED)

CHAIN_OPS = 16
IN_FLIGHT = (1, 8, 32, 128, 512, 1024, 2048)
WIDTHS = (8, 64, 512, 2048, 16_384, 65_536)
QUICK_IN_FLIGHT, QUICK_WIDTHS = (1, 128, 2048), (64, 2048, 65_536)
FLAT_FROM, FLAT_TO = 64, 65_536
REPEATS, QUICK_REPEATS = 3, 1
SMALL_WORK = 512  # below so many graphs or ops, repeat until this many were had

Best = Callable[[], float]


class OpSpec(NamedTuple):
    """An op and the numbers of what stands before it, in the same graph."""

    before: tuple[int, ...] = ()
    virtual: bool = False


GraphSpec = Sequence[OpSpec]


def chains(count: int, length: int) -> list[GraphSpec]:
    chain = [OpSpec((i - 1,) if i else ()) for i in range(length)]
    return [chain] * count


def wide(width: int) -> list[GraphSpec]:
    middle = [OpSpec((0,))] * width
    return [[OpSpec(), *middle, OpSpec(tuple(range(1, width + 1)), virtual=True)]]


class Graphs:
    """A scheduler that holds graphs of ops, each a batch of its own."""

    def __init__(self, specs: Sequence[GraphSpec]) -> None:
        self.scheduler = Scheduler({"lane": EACH_ALONE})
        lane = self.scheduler.lanes["lane"]
        for tag, spec in enumerate(specs):
            owner = Owner(Priority.LOAD, job_id=tag)
            ops: list[Op] = []
            for op in spec:
                where = None if op.virtual else lane
                before = [ops[i] for i in op.before]
                ops.append(self.scheduler.add(owner, where, None, 0, before))

    def tick(self, ended: Sequence[Batch]) -> list[Batch]:
        """End these batches; return those that start."""
        scheduler = self.scheduler
        for batch in ended:
            scheduler.batch_ended(batch)
            scheduler.finish(batch.ops[0])
        started = scheduler.take(0.0)
        scheduler.take_reached()
        return started


def drain_s(specs: Sequence[GraphSpec], num_ops: int) -> float:
    """Seconds for each op; the ops that have run longest end first."""
    graphs = Graphs(specs)
    running = deque(graphs.tick([]))
    count = 0
    start = time.perf_counter()
    while running:
        running += graphs.tick([running.popleft()])
        count += 1
    spent = time.perf_counter() - start
    assert count == num_ops, f"{count} of {num_ops} ops ran"
    return spent / num_ops


def tick_s(num_graphs: int) -> float:
    """Seconds for each op; the first graph's ops end one by one."""
    graphs = Graphs(chains(num_graphs, CHAIN_OPS))
    batch = graphs.tick([])[0]
    start = time.perf_counter()
    for _ in range(CHAIN_OPS - 1):
        (batch,) = graphs.tick([batch])
    return (time.perf_counter() - start) / (CHAIN_OPS - 1)


def without_gc(measured: Best) -> Best:
    def run() -> float:
        gc.collect()
        gc.disable()
        try:
            return measured()
        finally:
            gc.enable()

    return run


def best_us(actions: dict[str, Best], repeats: int, size: int) -> Row:
    """The best of each, in microseconds; what takes no time is repeated more often."""
    times = interleaved(actions, max(repeats, SMALL_WORK // size))
    return {f"{name} us": 1e6 * min(values) for name, values in times.items()}


def in_flight_rows(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for count in QUICK_IN_FLIGHT if quick else IN_FLIGHT:
        row = best_us({"op": partial(tick_s, count)}, QUICK_REPEATS if quick else REPEATS, count)
        rows.append({"case": "S1 graphs in flight", "size": count, **row})
    return rows


def wide_rows(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for width in QUICK_WIDTHS if quick else WIDTHS:
        drain = partial(drain_s, wide(width), width + 1)
        actions: dict[str, Best] = {"op": drain, "op without gc": without_gc(drain)}
        row = best_us(actions, QUICK_REPEATS if quick else REPEATS, width)
        rows.append({"case": "S2 ops in one graph", "size": width, **row})
    return rows


def bench_scheduler(quick: bool) -> Result:
    """What the end of an op costs in graphs of transfers, alone and among many.

    The best of all repeats counts: the machine may be busy with other things. Microseconds for each
    op that ended:

    * S1: one op of one graph ends in each tick while other graphs are in flight;
    * S2: one graph, a head, then n ops, then a sink; one op ends in each tick. `without gc`: no
      garbage collector, which otherwise visits all that the end of the head has started.

    A tick is all that an engine does when a batch of one op ends: free the lane, finish the op, cut
    new batches within the limits, take markers that are done.
    """
    result = Result()
    ticks, widths = in_flight_rows(quick), wide_rows(quick)
    result.rows = [*ticks, *widths]
    for name, rows, column, small, large in (
        ("graphs in flight", ticks, "op us", 1, 2048),
        ("ops in one graph", widths, "op us", FLAT_FROM, FLAT_TO),
        ("ops in one graph, without gc", widths, "op without gc us", FLAT_FROM, FLAT_TO),
    ):
        few, many = (cast("float", row[column]) for row in rows if row["size"] in (small, large))
        target = Target(f"{large} {name} / {small}", many / few, 2.0, False)
        result.targets.append(target)
    return result


if __name__ == "__main__":
    run_script(__doc__)
