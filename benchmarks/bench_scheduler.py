"""What the end of an op costs in graphs of transfers, alone and among many.

    python benchmarks/bench_scheduler.py --json scheduler.json

The best of all repeats counts: the machine may be busy with other things. Microseconds for each op
that ended:

* S1: one op of one graph ends in each tick while other graphs are in flight;
* S2: one graph, a head, then n ops, then a sink; one op ends in each tick. `without gc`: no garbage
  collector, which otherwise visits all that the end of the head has started;
* S3: long chains, and random graphs with virtual ops inside; several ops end in each tick.

A tick is all that an engine does when a batch of one op ends: free the lane, finish the op, cut new
batches within the limits, take markers that are done.
"""

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

from benchmarks.common import Result, Row, Target, interleaved, run_script
from vllm_kvpool.transfer.graph import Batch, LaneLimits, Op, Owner, Priority, Scheduler

UNBOUNDED = 1 << 40
EACH_ALONE = LaneLimits(UNBOUNDED, batch_ops=1, batch_bytes=UNBOUNDED, budget_bytes=UNBOUNDED)

CHAIN_OPS = 16
IN_FLIGHT = (1, 8, 32, 128, 512, 1024, 2048)
WIDTHS = (8, 64, 512, 2048, 16_384, 65_536)
QUICK_IN_FLIGHT, QUICK_WIDTHS = (1, 128, 2048), (64, 2048, 65_536)
FLAT_FROM, FLAT_TO = 64, 65_536
REPEATS, QUICK_REPEATS = 3, 1
SMALL_WORK = 512  # below so many graphs or ops, repeat until this many were had
PER_TICK = 4
SEED = 20

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


def random_graphs(count: int, size: int) -> list[GraphSpec]:
    """Each op comes after up to three of the thirty before it; one of ten is virtual."""
    rng = random.Random(SEED)
    graphs: list[GraphSpec] = []
    for _ in range(count):
        ops = [OpSpec()]
        for i in range(1, size):
            near = range(max(0, i - 30), i)
            before = rng.sample(near, min(len(near), rng.randrange(4)))
            ops.append(OpSpec(tuple(before), rng.random() < 0.1))
        graphs.append(ops)
    return graphs


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


def drain_s(specs: Sequence[GraphSpec], num_ops: int, per_tick: int) -> float:
    """Seconds for each op; the ops that have run longest end first."""
    graphs = Graphs(specs)
    running = deque(graphs.tick([]))
    count = 0
    start = time.perf_counter()
    while running:
        ended = [running.popleft()]
        while running and len(ended) < per_tick:
            ended.append(running.popleft())
        count += len(ended)
        running += graphs.tick(ended)
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
        drain = partial(drain_s, wide(width), width + 1, 1)
        actions: dict[str, Best] = {"op": drain, "op without gc": without_gc(drain)}
        row = best_us(actions, QUICK_REPEATS if quick else REPEATS, width)
        rows.append({"case": "S2 ops in one graph", "size": width, **row})
    return rows


def drain_rows(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for case, specs in (
        ("S3 chains of 256", chains(16, 256)),
        ("S3 chains of 2048", chains(2, 2048)),
        ("S3 random graphs of 64", random_graphs(64, 64)),
        ("S3 random graphs of 1024", random_graphs(4, 1024)),
    ):
        num_ops = sum(not op.virtual for spec in specs for op in spec)
        drain = partial(drain_s, specs, num_ops, PER_TICK)
        row = best_us({"op": drain}, QUICK_REPEATS if quick else REPEATS, num_ops)
        rows.append({"case": case, "size": num_ops, **row})
    return rows


def measure(quick: bool) -> Result:
    result = Result()
    ticks, widths = in_flight_rows(quick), wide_rows(quick)
    result.rows = [*ticks, *widths, *drain_rows(quick)]
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
    run_script(__doc__, measure)
