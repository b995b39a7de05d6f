"""What the end of an op costs: the scheduler of dependency graphs beside FlexKV's own.

    FLEXKV_SRC=CHECKOUT python benchmarks/bench_scheduler.py --json scheduler.json

`FLEXKV_SRC` names a checkout of FlexKV (nothing of it has to be built); its scheduler and its own
microbenchmark are imported from there. Without it only ours is measured. Both sides take turns in
one process, and the best of all repeats counts: the machine may be busy with other things.
Microseconds for each op that ended:

* S1, FlexKV's microbenchmark: one op of one graph ends in each tick while others are in flight.
  `full sweep` visits all graphs in each tick, `dirty set` is FlexKV's scheduler;
* S2: one graph, a head, then n ops, then a sink; one op ends in each tick. `ours without gc`: no
  garbage collector, which otherwise visits all that the end of the head has started;
* S3: long chains, and random graphs with virtual ops inside; several ops end in each tick. Before,
  both sides must start the same ops, and end the same graphs, in each tick.

Our tick is all that an engine does when a batch of one op ends: free the lane, finish the op, cut
new batches within the limits, take markers that are done and graphs that ended.
"""

import gc
import importlib.util
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.common import Result, Row, Target, interleaved, run_script
from vllm_kvpool.transfer.graph import OVER, Batch, LaneLimits, Op, Owner, Priority, Scheduler

VARIABLE = "FLEXKV_SRC"
UNBOUNDED = 1 << 40
EACH_ALONE = LaneLimits(UNBOUNDED, batch_ops=1, batch_bytes=UNBOUNDED, budget_bytes=UNBOUNDED)

CHAIN_OPS = 16
IN_FLIGHT = (1, 8, 32, 128, 512, 1024, 2048)
WIDTHS, OUR_WIDTHS = (8, 64, 512, 2048), (16_384, 65_536)
QUICK_IN_FLIGHT, QUICK_WIDTHS = (1, 128, 2048), (64, 2048)
FLAT_FROM, FLAT_TO = 64, 65_536
AT = 2048  # where the targets are
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


class Side(Protocol):
    """A scheduler that holds the graphs. Ops are numbered over all of them."""

    def tick(self, ended: Sequence[Any]) -> list[Any]:
        """These have ended; what starts."""

    def number(self, running: Any) -> int: ...

    def markers(self) -> list[int]:
        """The virtual ops that the last tick ended."""

    def graphs(self) -> list[int]:
        """The graphs that the last tick ended."""


class Ours:
    def __init__(self, specs: Sequence[GraphSpec]) -> None:
        self.scheduler = Scheduler({"lane": EACH_ALONE})
        lane = self.scheduler.lanes["lane"]
        self._reached: list[Op] = []
        self._open: dict[int, list[Op]] = {}
        count = 0
        for tag, spec in enumerate(specs):
            owner = Owner(Priority.LOAD, job_id=tag)
            ops: list[Op] = []
            self._open[tag] = ops
            for op in spec:
                where = None if op.virtual else lane
                before = [ops[i] for i in op.before]
                ops.append(self.scheduler.add(owner, where, count, 0, before))
                count += 1

    def tick(self, ended: Sequence[Batch]) -> list[Batch]:
        scheduler = self.scheduler
        for batch in ended:
            scheduler.batch_ended(batch)
            scheduler.finish(batch.ops[0])
        started = scheduler.take(0.0)
        self._reached = scheduler.take_reached()
        return started

    def number(self, running: Batch) -> int:
        (op,) = running.ops
        return int(op.what)

    def markers(self) -> list[int]:
        return [op.what for op in self._reached]

    def graphs(self) -> list[int]:
        ended = [tag for tag, ops in self._open.items() if all(op.state in OVER for op in ops)]
        for tag in ended:
            del self._open[tag]
        return ended


class Flexkv:
    """FlexKV's microbenchmark module, and with it its scheduler and its graphs."""

    def __init__(self, root: Path) -> None:
        sys.path.append(str(root))
        path = root / "benchmarks" / "microbenchmark_transfer_scheduler.py"
        spec = importlib.util.spec_from_file_location("flexkv_microbenchmark", path)
        assert spec is not None
        assert spec.loader is not None
        self.module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self._root = root

    def revision(self) -> str:
        command = ["git", "-C", str(self._root), "rev-parse", "--short", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        # A folder inside some other repository would name that one's.
        known = (self._root / ".git").exists() and not found.returncode
        return f"revision {found.stdout.strip()}" if known else "a copy without its revision"

    def tick_s(self, num_graphs: int, scheduler: str) -> float:
        """Its own measurement, once."""
        module = self.module
        return float(module.measure(num_graphs, CHAIN_OPS, getattr(module, scheduler), 1)) / 1e6


class Theirs:
    def __init__(self, flexkv: Flexkv, specs: Sequence[GraphSpec]) -> None:
        module = flexkv.module
        self._virtual = module.TransferType.VIRTUAL
        self._scheduler = module.TransferScheduler()
        self._numbers: dict[int, int] = {}
        self._tags: dict[int, int] = {}
        self._ended: list[int] = []
        self._markers: list[Any] = []
        for tag, spec in enumerate(specs):
            graph = module.TransferOpGraph.create_empty_graph()
            self._tags[graph.graph_id] = tag
            ops: list[Any] = []
            for op in spec:
                ids = module.np.arange(4, dtype=module.np.int64)
                kind = self._virtual if op.virtual else module.TransferType.H2D
                made = module.TransferOp(graph.graph_id, kind, ids, ids)
                (graph.add_virtual_op if op.virtual else graph.add_transfer_op)(made)
                self._numbers[made.op_id] = len(self._numbers)
                for i in op.before:
                    graph.add_dependency(made.op_id, ops[i].op_id)
                ops.append(made)
            self._scheduler.add_transfer_graph(graph)

    def tick(self, ended: Sequence[Any]) -> list[Any]:
        self._ended, started = self._scheduler.schedule(ended)
        virtual = self._virtual
        self._markers = [op for op in started if op.transfer_type is virtual]
        if not self._markers:
            return list(started)
        return [op for op in started if op.transfer_type is not virtual]

    def number(self, running: Any) -> int:
        return self._numbers[running.op_id]

    def markers(self) -> list[int]:
        return [self.number(op) for op in self._markers]

    def graphs(self) -> list[int]:
        return [self._tags[graph_id] for graph_id in self._ended]


def drain_s(make: Callable[[], Side], num_ops: int, per_tick: int) -> float:
    """Seconds for each op; those that have run longest end first."""
    side = make()
    running = deque(side.tick([]))
    count = 0
    start = time.perf_counter()
    while running:
        ended = [running.popleft()]
        while running and len(ended) < per_tick:
            ended.append(running.popleft())
        count += len(ended)
        running += side.tick(ended)
    spent = time.perf_counter() - start
    assert count == num_ops, f"{count} of {num_ops} ops ran"
    return spent / num_ops


def our_tick_s(num_graphs: int) -> float:
    """FlexKV's measurement, of ours: the first graph's ops end one by one."""
    side = Ours(chains(num_graphs, CHAIN_OPS))
    scheduler, batch = side.scheduler, side.tick([])[0]
    start = time.perf_counter()
    for _ in range(CHAIN_OPS - 1):
        scheduler.batch_ended(batch)
        scheduler.finish(batch.ops[0])
        (batch,) = scheduler.take(0.0)
        scheduler.take_reached()
    return (time.perf_counter() - start) / (CHAIN_OPS - 1)


def compare(one: Side, other: Side, num_ops: int) -> int:
    """Both start and end the same in each tick, whose number is returned."""
    running: list[dict[int, Any]] = [{}, {}]
    ended: list[int] = []
    ticks = count = 0
    while ended or not ticks:
        seen = []
        for side, held in zip((one, other), running, strict=True):
            started = {side.number(op): op for op in side.tick([held.pop(i) for i in ended])}
            held |= started
            seen.append((set(started), sorted(side.markers()), sorted(side.graphs())))
        assert seen[0] == seen[1], f"tick {ticks}: {seen}"
        # Not in the order of their start, which may differ.
        ended = sorted(running[0], key=lambda number: number * 7919 % 1009)[:PER_TICK]
        count += len(ended)
        ticks += 1
    assert count == num_ops, f"{count} of {num_ops} ops ran"
    return ticks


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


def ratio(row: Row) -> float | None:
    theirs, ours = row.get("dirty set us"), row["ours us"]
    assert isinstance(ours, float)
    return theirs / ours if isinstance(theirs, float) else None


def finished(case: str, size: int, row: Row) -> Row:
    found = ratio(row)
    return {"case": case, "size": size, **row, **({} if found is None else {"ratio": found})}


def in_flight_rows(flexkv: Flexkv | None, quick: bool) -> list[Row]:
    rows = []
    for count in QUICK_IN_FLIGHT if quick else IN_FLIGHT:
        actions: dict[str, Best] = {}
        if flexkv is not None:
            actions["full sweep"] = partial(flexkv.tick_s, count, "FullSweepScheduler")
            actions["dirty set"] = partial(flexkv.tick_s, count, "TransferScheduler")
        actions["ours"] = partial(our_tick_s, count)
        row = best_us(actions, QUICK_REPEATS if quick else REPEATS, count)
        rows.append(finished("S1 graphs in flight", count, row))
    return rows


def wide_rows(flexkv: Flexkv | None, quick: bool) -> list[Row]:
    rows = []
    both = QUICK_WIDTHS if quick else WIDTHS
    for width in (*both, *OUR_WIDTHS):
        specs, num_ops = wide(width), width + 1
        actions: dict[str, Best] = {}
        if flexkv is not None and width in both:
            actions["dirty set"] = partial(drain_s, partial(Theirs, flexkv, specs), num_ops, 1)
        actions["ours"] = partial(drain_s, partial(Ours, specs), num_ops, 1)
        actions["ours without gc"] = without_gc(actions["ours"])
        row = best_us(actions, QUICK_REPEATS if quick else REPEATS, width)
        rows.append(finished("S2 ops in one graph", width, row))
    return rows


def drain_rows(flexkv: Flexkv | None, quick: bool, notes: list[str]) -> list[Row]:
    rows = []
    for case, specs in (
        ("S3 chains of 256", chains(16, 256)),
        ("S3 chains of 2048", chains(2, 2048)),
        ("S3 random graphs of 64", random_graphs(64, 64)),
        ("S3 random graphs of 1024", random_graphs(4, 1024)),
    ):
        num_ops = sum(not op.virtual for spec in specs for op in spec)
        actions: dict[str, Best] = {}
        if flexkv is not None:
            ticks = compare(Ours(specs), Theirs(flexkv, specs), num_ops)
            notes.append(f"{case}: both started and ended the same in each of {ticks} ticks")
            theirs = partial(Theirs, flexkv, specs)
            actions["dirty set"] = partial(drain_s, theirs, num_ops, PER_TICK)
        actions["ours"] = partial(drain_s, partial(Ours, specs), num_ops, PER_TICK)
        row = best_us(actions, QUICK_REPEATS if quick else REPEATS, num_ops)
        rates: Row = {
            name.replace(" us", " ops/s"): round(1e6 / each)
            for name, each in row.items()
            if isinstance(each, float)
        }
        rows.append(finished(case, num_ops, row) | rates)
    return rows


def open_flexkv(notes: list[str]) -> Flexkv | None:
    root = os.environ.get(VARIABLE)
    if root:
        flexkv = Flexkv(Path(root))
        notes.append(f"FlexKV: {flexkv.revision()}")
        return flexkv
    skipped = (
        f"NOT COMPARED with FlexKV: set {VARIABLE} to a checkout of it; only ours was measured"
    )
    print(f"{'!' * 20} {skipped}", file=sys.stderr, flush=True)
    notes.append(skipped)
    return None


def measure(quick: bool) -> Result:
    result = Result()
    flexkv = open_flexkv(result.notes)
    ticks = in_flight_rows(flexkv, quick)
    widths = wide_rows(flexkv, quick)
    result.rows = [*ticks, *widths, *drain_rows(flexkv, quick, result.notes)]
    for what, rows, wanted in (
        ("graphs in flight", ticks, 2.0),
        ("ops in one graph", widths, 100.0),
    ):
        row = next(row for row in rows if row["size"] == AT)
        what = f"{AT} {what}, dirty set / ours"
        result.targets.append(Target(what, ratio(row), wanted, True))
    for column in ("ours", "ours without gc"):
        small, large = (
            next(row[f"{column} us"] for row in widths if row["size"] == size)
            for size in (FLAT_FROM, FLAT_TO)
        )
        assert isinstance(small, float)
        assert isinstance(large, float)
        what = f"{column}, {FLAT_TO} ops in one graph / {FLAT_FROM}"
        result.targets.append(Target(what, large / small, 2.0, False))
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
