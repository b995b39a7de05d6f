"""Embeddings from encoders to a language engine, over loopback, between processes.

    python benchmarks/bench_embeds.py --json embeds.json

Everything but the model and the engine is real: workers, control ports, windows, digests. Each
figure is a median of runs in which all its sides took turns, from "the encoder's output is there,
and who gets it is known" to "the tensor can be used".

* `window`: a large item through a window of an eighth of its size, and in one grant, judged by the
  CPU seconds a GB of all processes, with those of the plain copies in and out of such a window;
* `rounds`: what a round costs, where bytes do not matter: all rows in one grant, two rounds in
  flight, and one after the other;
* `many`: 1,000 items in flight from four encoders, and one large item from one of them, judged by
  CPU seconds a GB; with the consumer's memory against what its configuration allows;
* `in-tree`: the worker of vLLM's Mooncake connector on host memory, its specs given and its events
  read as its scheduler does; with Mooncake's pool of connections, which it does not ask for, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import median
from typing import Any

from benchmarks.common import LIMITED_BY, Child, Result, Target, children, interleaved, run_script
from benchmarks.embeds_sides import (
    HOST,
    IN_TREE_IMPORTED,
    Batch,
    InTreeReceiver,
    InTreeSender,
    Received,
    Receiver,
    Sender,
)
from benchmarks.limits import Meter
from tests.support.server_process import free_ports

MIB = 1 << 20
TRANSPORTS = ("mooncake", "local")
REPEATS, QUICK_REPEATS = 3, 1
LIMIT_S = 60.0
GRACE_S = 5.0

WINDOW_MIB = (64, 256)
WINDOW_ROW_BYTES = 8 << 10
WINDOW_PARTS = 8
MAX_CPU_RATIO = 1.5  # two noisy cores cannot hold a rate

ROUNDS = 128
ROUND_ROW_BYTES = 64
MAX_ROUND_MS = 1.0

ENCODERS = 4
MANY_ITEMS, MANY_ROWS = 1000, 256
MANY_ROW_BYTES = (2 << 10, 8 << 10)  # of models of 1,024 and of 4,096 values a row
MANY_ARENA_MIB = MANY_LANDING_MIB = 64
BESIDES_MIB = 16  # what a process may grow by for a thousand items, and gaps in its heap
STREAM_MIB = 64  # the most that there is memory for
MANY_REPEATS, STREAMS = 2, 5

INTREE_POOL_MIB = 512
INTREE_BATCHES = ((1, 1), (1, 16), (1, 64), (200, 1))  # items, MiB
MIN_INTREE_RATIO = 1.0

_names = count()


@dataclass(frozen=True)
class Cost:
    """Of a batch: its seconds, and those of all cores for each GB."""

    seconds: float
    cpu_s_gb: float
    received: Received


@dataclass(frozen=True)
class Side:
    """Who sends, and who receives."""

    senders: tuple[Child, ...]
    receiver: Child
    endpoint: str
    meter: Meter = field(default_factory=Meter)

    def run(self, batch: Batch) -> Cost:
        """What a batch takes, split among the senders; to make its bytes is no part of it."""
        parts = [
            Batch(f"{next(_names)}", batch.items // len(self.senders), batch.rows, batch.row_bytes)
            for _ in self.senders
        ]
        for sender, part in zip(self.senders, parts, strict=True):
            sender.begin("prepare", part)
        for sender in self.senders:
            sender.finish(LIMIT_S)
        before = self.cpu_s()
        with self.meter.of(_shape(batch)):
            self.receiver.begin("receive", parts, LIMIT_S)
            for sender, part in zip(self.senders, parts, strict=True):
                sender.begin("send", part, self.endpoint)
            start = min(sender.finish() for sender in self.senders)
            received: Received = self.receiver.finish(LIMIT_S + GRACE_S)
        cpu_s = self.cpu_s() - before
        return Cost(received.at - start, cpu_s / batch.nbytes * 1e9, received)

    def seconds(self, batch: Batch) -> float:
        return self.run(batch).seconds

    def limited_by(self, batch: Batch) -> dict[str, str]:
        """The column of a row about such batches."""
        return {LIMITED_BY: self.meter.limited_by(_shape(batch))}

    def cpu_s(self) -> float:
        """Of all its processes, since they were started."""
        return sum(child.call("cpu_s") for child in (*self.senders, self.receiver))

    def check(self, batch: Batch) -> None:
        """The bytes of an item arrive as they were; warms up."""
        for sender in self.senders:
            named = Batch(f"{next(_names)}", 1, batch.rows, batch.row_bytes)
            digest = sender.call("prepare", named)
            self.receiver.begin("digest", named, LIMIT_S)
            sender.call("send", named, self.endpoint)
            arrived = self.receiver.finish(LIMIT_S + GRACE_S)
            assert arrived == digest, "other bytes arrive than were sent"


def _shape(batch: Batch) -> str:
    return f"{batch.items} x {batch.rows} x {batch.row_bytes}"


class Sides:
    """Child processes, ended together."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def start(self, make: Callable[..., Any], *args: Any) -> tuple[Child, str]:
        """A child and the endpoint that it listens at."""
        (port,) = free_ports(1)
        child = Child(make, port, *args)
        self._children.append(child)
        return child, f"tcp://{HOST}:{port}"

    def __enter__(self) -> "Sides":
        return self

    def __exit__(self, *exc: object) -> None:
        with children(*self._children):
            pass


def medians(sides: Mapping[str, Side], batch: Batch, repeats: int) -> dict[str, float]:
    """Seconds of each side, in turn, after a first batch that warms up."""
    for side in sides.values():
        side.check(batch)
        side.run(batch)
    actions = {name: lambda side=side: side.seconds(batch) for name, side in sides.items()}
    return {name: median(each) for name, each in interleaved(actions, repeats).items()}


def plain_copy(result: Result, what: str, child: Child, nbytes: int, piece_bytes: int) -> None:
    """A row of what the copies alone cost: into a window, and out of it."""
    meter = Meter()
    with meter.of("copy"):
        spent = min(child.call("plain_copy_cpu_s", nbytes, piece_bytes) for _ in range(3))
    cost = {"cpu_s_gb": spent / nbytes * 1e9, "mib": nbytes / MIB}
    row = {"what": what, "transport": "-", "side": "plain copy", **cost}
    result.rows.append(row | {LIMITED_BY: meter.limited_by("copy")})


def measure_window(transport: str, quick: bool, result: Result) -> None:
    repeats = QUICK_REPEATS if quick else REPEATS
    for mib in WINDOW_MIB[: 1 if quick else None]:
        batch = Batch("", 1, mib * MIB // WINDOW_ROW_BYTES, WINDOW_ROW_BYTES)
        whole = {"arena_bytes": 2 * batch.nbytes, "default_allocate_tokens": batch.rows}
        part = {"arena_bytes": batch.nbytes // WINDOW_PARTS}
        with Sides() as started:
            sender, _ = started.start(Sender, transport, {})
            sides = {
                name: Side((sender,), *started.start(Receiver, transport, options))
                for name, options in (("one grant", whole), ("an eighth", part))
            }
            for side in sides.values():
                side.check(batch)
                side.run(batch)
            actions = {name: partial(side.run, batch) for name, side in sides.items()}
            costs = interleaved(actions, repeats)
            rounds = {name: side.receiver.call("rounds") for name, side in sides.items()}
            plain_copy(result, "window", sender, batch.nbytes, batch.nbytes // WINDOW_PARTS)
        spent = {name: median(run.seconds for run in each) for name, each in costs.items()}
        cpu = {name: median(run.cpu_s_gb for run in each) for name, each in costs.items()}
        for name, each in spent.items():
            result.rows.append(
                {
                    "what": "window",
                    "transport": transport,
                    "side": name,
                    "mib": mib,
                    "ms": each * 1e3,
                    "gbs": batch.nbytes / each / 1e9,
                    "cpu_s_gb": cpu[name],
                    "rounds": rounds[name] / (repeats + 2),
                    **sides[name].limited_by(batch),
                }
            )
        result.targets.append(
            Target(
                f"{transport}, {mib} MiB, CPU seconds a GB through a window of 1/{WINDOW_PARTS} "
                "over one grant",
                cpu["an eighth"] / cpu["one grant"],
                MAX_CPU_RATIO,
                False,
            )
        )


def measure_rounds(transport: str, quick: bool, result: Result) -> None:
    batch = Batch("", 1, ROUNDS, ROUND_ROW_BYTES)
    options: dict[str, dict[str, Any]] = {
        "one round": {},
        "two in flight": {"default_allocate_tokens": 1},
        "one after the other": {"arena_bytes": ROUND_ROW_BYTES},
    }
    with Sides() as started:
        sender, _ = started.start(Sender, transport, {})
        sides = {
            name: Side((sender,), *started.start(Receiver, transport, each))
            for name, each in options.items()
        }
        spent = medians(sides, batch, QUICK_REPEATS if quick else REPEATS)
    least = spent["one round"]
    for name, each in spent.items():
        row = {"what": "rounds", "transport": transport, "side": name, "ms": each * 1e3}
        row |= sides[name].limited_by(batch)
        result.rows.append(row)
        if name != "one round":
            row["ms_a_round"] = cost = (each - least) / (ROUNDS - 1) * 1e3
            what = f"{transport}, one extra round, {name}"
            result.targets.append(Target(what, cost, MAX_ROUND_MS, False, "ms"))


def measure_many(transport: str, row_bytes: int, quick: bool, result: Result) -> None:
    options = {
        "arena_bytes": MANY_ARENA_MIB * MIB,
        "max_landing_bytes": MANY_LANDING_MIB * MIB,
    }
    many = Batch("", MANY_ITEMS, MANY_ROWS, row_bytes)
    stream = Batch("", 1, STREAM_MIB * MIB // row_bytes, row_bytes)
    with Sides() as started:
        receiver, endpoint = started.start(Receiver, transport, options)
        senders = tuple(started.start(Sender, transport, {})[0] for _ in range(ENCODERS))
        single = Side(senders[:1], receiver, endpoint)
        all_at_once = Side(senders, receiver, endpoint)
        all_at_once.check(Batch("", 1, MANY_ROWS, row_bytes))
        single.run(stream)
        rates: dict[str, list[float]] = {"single stream": [], "many": []}
        cpu: dict[str, list[float]] = {name: [] for name in rates}
        peaks: list[Received] = []
        for _ in range(QUICK_REPEATS if quick else MANY_REPEATS):
            # Short beside the other: the median of several, as new pages now and then take long.
            streams = [single.run(stream) for _ in range(STREAMS)]
            rates["single stream"].append(stream.nbytes / median(run.seconds for run in streams))
            cpu["single stream"].append(median(run.cpu_s_gb for run in streams))
            run = all_at_once.run(many)
            cpu["many"].append(run.cpu_s_gb)
            rates["many"].append(many.nbytes / run.seconds)
            peaks.append(run.received)
        plain_copy(result, "many", receiver, stream.nbytes, MANY_ROWS * row_bytes)
    for name, each in rates.items():
        row = {"what": "many", "transport": transport, "side": name, "row_bytes": row_bytes}
        row |= {"gbs": median(each) / 1e9, "cpu_s_gb": median(cpu[name])}
        side, batch = (single, stream) if name == "single stream" else (all_at_once, many)
        result.rows.append({**row, **side.limited_by(batch)})
    ratio = median(cpu["many"]) / median(cpu["single stream"])
    label = (
        f"{transport}, {MANY_ITEMS} items of {MANY_ROWS} rows of {row_bytes >> 10} KiB "
        f"from {ENCODERS} encoders"
    )
    what = f"{label}, CPU seconds a GB over those of one stream"
    result.targets.append(Target(what, ratio, MAX_CPU_RATIO, False))
    landing = max(each.peak_landing_bytes for each in peaks) / (MANY_LANDING_MIB * MIB)
    growth = max(each.rss_growth_bytes for each in peaks)
    growth_ratio = growth / ((MANY_LANDING_MIB + MANY_ARENA_MIB + BESIDES_MIB) * MIB)
    bound = f"max_landing_bytes + arena_bytes + {BESIDES_MIB} MiB"
    result.targets += [
        Target(f"{label}: landing memory over max_landing_bytes", landing, 1.0, False),
        Target(f"{label}: growth of the process over {bound}", growth_ratio, 1.0, False),
    ]


def measure_intree(transport: str, quick: bool, result: Result) -> None:
    pool_bytes = INTREE_POOL_MIB * MIB
    with Sides() as started:
        sides = {"kvpool": _pair(started, Sender, Receiver, transport, {})}
        for name, is_pooled in (("in-tree", False), ("in-tree, connections kept", True)):
            sides[name] = _pair(started, InTreeSender, InTreeReceiver, pool_bytes, is_pooled)
        for items, mib in INTREE_BATCHES:
            batch = Batch("", items, mib * MIB // WINDOW_ROW_BYTES, WINDOW_ROW_BYTES)
            spent = medians(sides, batch, QUICK_REPEATS if quick else REPEATS)
            label = f"{items} x {mib} MiB"
            for name, each in spent.items():
                result.rows.append(
                    {
                        "what": "in-tree",
                        "transport": transport,
                        "side": name,
                        "items": items,
                        "mib": mib,
                        "ms": each * 1e3,
                        "gbs": batch.nbytes / each / 1e9,
                        **sides[name].limited_by(batch),
                    }
                )
                if name != "kvpool":
                    ratio = each / spent["kvpool"]
                    what = f"{label} over {name}"
                    result.targets.append(Target(what, ratio, MIN_INTREE_RATIO, True))


def _pair(started: Sides, sender: type, receiver: type, *args: Any) -> Side:
    sends, _ = started.start(sender, *args)
    return Side((sends,), *started.start(receiver, *args))


def measure(quick: bool) -> Result:
    result = Result()
    for transport in TRANSPORTS[: 1 if quick else None]:
        measure_window(transport, quick, result)
        measure_rounds(transport, quick, result)
        for row_bytes in MANY_ROW_BYTES[: 1 if quick else None]:
            measure_many(transport, row_bytes, quick, result)
    measure_intree("mooncake", quick, result)
    result.notes += [
        "times include the digests of all that is written, and of a sample of the item, which the "
        "in-tree connector does without; it hands out its receive buffer itself, of a fixed size, "
        "where ours copies rows out of the window into memory of the item's own",
        f"in-tree: a registered buffer of {INTREE_POOL_MIB} MiB on each side, which all items fit "
        "into",
    ]
    return result


if __name__ == "__main__":
    run_script(__doc__, measure, IN_TREE_IMPORTED)
