"""The transfer engine without any data: round trips through its threads, and a lane that dies.

    python benchmarks/bench_engine.py --json engine.json

Round trip: a plan of one op (a scatter of a cell that is in host memory, which moves nothing) from
the model's thread to the engine thread, to a lane, back, and to the model's thread; and one of
three ops, one after another.

Death of a lane: 1,000 saves of one cell each are under way when the thread that puts them is ended
from outside; measured is the time until every one of them has been reported.
"""

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common import (
    LIMITED_BY,
    DidNotFinish,
    Result,
    Row,
    Target,
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
from vllm_kvpool.transfer.graph import Batch, LaneLimits
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


def three_ops(rounds: int) -> list[float]:
    """A load of a cell that has to be fetched: GET, CHECK and SCATTER, one after another."""
    bench = make(tiers=1, keep=0)
    times = []
    for number in range(rounds + WARM_UP):
        start = time.perf_counter()
        plan = LoadPlan(JobId(number), "r", 0, (os.urandom(16),), PAGES, 0, CHUNK)
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


def measure(quick: bool) -> Result:
    result = Result()
    rounds = QUICK_ROUNDS if quick else ROUNDS
    meter = Meter()
    with meter.of("one op"):
        one = round_trips(rounds)
    with meter.of("three ops in a row"):
        more = three_ops(rounds)
    with meter.of("death"):
        seconds, left = lane_death()
    for name, times in (("one op", one), ("three ops in a row", more)):
        result.rows.append(
            {
                "graph": name,
                **spread("", "us", [1e6 * each for each in times]),
                LIMITED_BY: meter.limited_by(name),
            }
        )
    row: Row = {"graph": f"{GRAPHS} saves, lane killed", "seconds to the last": seconds}
    result.rows.append(row | {LIMITED_BY: meter.limited_by("death")})
    result.targets += [
        Target(
            "round trip of one op, p50", 1e6 * percentile(one, 0.5), MAX_ROUND_TRIP_US, False, "us"
        ),
        Target(f"all {left} saves reported after the death", seconds, MAX_REPORT_S, False, "s"),
    ]
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
