"""What is counted: one table of names, and the registry that holds the values.

The same names appear in vLLM's `/metrics` (with the prefix `vllm:`), in its log line and in the
`stats_file`. A sample's name is `name` or `name{label=value,…}`, labels in the table's order; in a
value, `,`, `=`, `{`, `}` and `%` are written `%2C` and so on. A histogram is two samples for each
bucket that something fell into, `name{label=value,…,le=bound}.count` and `.sum`: how many values
lay above the bound before and not above this one, and their sum. Not cumulative, so that samples
of ranks and intervals add up like counters and an interval holds only the buckets it touched.

A registry may be used from any thread; its lock guards numbers only. `StatsFile` writes one to a
file, on a thread of its own: a disk that hangs must hold up no step.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote

import msgspec

logger = logging.getLogger(__name__)

PREFIX = "vllm:"
EMBEDS_PREFIX = "kvpool_ec_"  # names of the embedding connector's rows
SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
CACHED_NAMES = 4096  # more than all samples of a process; beyond it names are only built anew
STATS_EVERY_S = 1.0
STATS_CLOSE_S = 1.0
_ESCAPES = str.maketrans({char: f"%{ord(char):02X}" for char in "%,={}"})


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()  # of a histogram: highest value of each bucket but the last
    lowest: bool = False  # a gauge of which the lowest rank counts, not the highest


class Bucket(NamedTuple):
    """Which of a histogram's numbers a sample is."""

    number: int  # which of `bounds` is its highest value; their count for what is above the last
    part: Literal["count", "sum"]


class ParsedSample(NamedTuple):
    """A sample's name, taken apart."""

    metric: Metric
    labels: tuple[str, ...]  # values, in the table's order
    bucket: Bucket | None = None


_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
METRICS = {
    m.name: m
    for m in (
        Metric(
            "kvpool_info",
            _G,
            ("namespace", "chunk_tokens"),
            "1 for what cells are called now; engines share cells if both labels are equal.",
        ),
        Metric("kvpool_hit_tokens", _C, (), "Prompt tokens taken from the pool."),
        Metric("kvpool_miss_tokens", _C, ("reason",), "Prompt tokens not taken from the pool."),
        Metric("kvpool_lookups", _C, ("outcome",), "Lookups of a request's prefix."),
        Metric("kvpool_lookup_seconds", _C, (), "Time from a request's arrival to its answer."),
        Metric(
            "kvpool_cells", _C, ("direction", "store", "outcome"), "Cells by what became of them."
        ),
        Metric("kvpool_bytes", _C, ("direction", "store"), "Bytes moved to or from the store."),
        Metric(
            "kvpool_seconds", _C, ("direction", "store"), "Time in store calls, summed over lanes."
        ),
        Metric("kvpool_copy_bytes", _C, ("direction",), "Bytes gathered or scattered."),
        Metric("kvpool_copy_seconds", _C, ("direction",), "Time gathering or scattering."),
        Metric("kvpool_failures", _C, ("kind",), "Failures by kind."),
        Metric("kvpool_saved_tokens", _C, (), "Tokens handed to the pool by the scheduler."),
        Metric("kvpool_pinned_blocks", _G, (), "Blocks kept from reuse until they are gathered."),
        Metric("kvpool_slots", _G, ("state",), "Staging slots by state."),
        Metric("kvpool_op_seconds", _H, ("lane", "tier"), "Time a lane took for a batch.", SECONDS),
        Metric(
            "kvpool_op_wait_seconds",
            _H,
            ("lane", "tier"),
            "Time a batch's first cell waited until the lane took it.",
            SECONDS,
        ),
        Metric("kvpool_queue_cells", _G, ("lane", "tier"), "Cells waiting for the lane."),
        Metric("kvpool_hit_cells", _C, ("tier",), "Loaded cells by the tier they came from."),
        Metric(
            "kvpool_tier_up",
            _G,
            ("tier",),
            "1, or 0 while the tier is left alone after failures.",
            lowest=True,
        ),
        Metric(
            "kvpool_lookup_tier_up",
            _G,
            ("tier",),
            "1, or 0 while lookups go on without the tier because its answers come too late.",
            lowest=True,
        ),
        Metric(
            "kvpool_tier_writable",
            _G,
            ("tier",),
            "1, or 0 while cells of the tier are read and nothing is saved there.",
            lowest=True,
        ),
        Metric("kvpool_host_bytes", _G, ("state",), "Bytes in the host tier by state."),
        Metric(
            "kvpool_evicted_cells",
            _C,
            ("tier", "fate"),
            "Cells that left a tier: dropped, demoted, lost.",
        ),
        Metric("kvpool_prefetched_cells", _C, ("outcome",), "Cells fetched before they were due."),
        Metric("kvpool_retries", _C, ("lane", "tier"), "Cells tried again after a failure."),
        Metric(
            "kvpool_save_seconds",
            _H,
            (),
            "Time from the step that computed a chunk until the first durable tier has it.",
            SECONDS,
        ),
        Metric("kvpool_load_seconds", _H, (), "Time from a load's plan to its report.", SECONDS),
        Metric("kvpool_trace_dropped", _C, (), "Trace events that were not written."),
        Metric(
            "kvpool_ec_events",
            _C,
            ("side", "event"),
            "What happened to embeddings: rounds, rows, resumed rows, failed writes and others.",
        ),
        Metric("kvpool_ec_levels", _G, ("side", "level"), "Levels of embedding transfers."),
        Metric("kvpool_ec_peers", _G, ("state",), "Sessions with peers by state."),
    )
}


def sample_name(name: str, labels: Mapping[str, str], bucket: Bucket | None = None) -> str:
    """How a sample is called; the labels must be exactly the table's.

    A histogram's samples are those of its buckets; no other kind has any.
    """
    metric = METRICS[name]
    assert set(labels) == set(metric.labels), (name, labels)
    assert (bucket is None) == (metric.kind is not MetricKind.HISTOGRAM), (name, bucket)
    pairs = [(label, labels[label]) for label in metric.labels]
    if bucket is None:
        return _series(name, pairs)
    pairs.append(("le", _bound_name(metric.bounds, bucket.number)))
    return f"{_series(name, pairs)}.{bucket.part}"


def _series(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f"{label}={value.translate(_ESCAPES)}" for label, value in pairs)
    return f"{name}{{{inside}}}" if inside else name


def _bound_name(bounds: tuple[float, ...], index: int) -> str:
    """Decimal seconds without an exponent."""
    return f"{bounds[index]:.9f}".rstrip("0").rstrip(".") if index < len(bounds) else "inf"


@lru_cache(maxsize=CACHED_NAMES)
def parse_sample(sample: str) -> ParsedSample:
    """What `sample_name` made the name of."""
    name, _, rest = sample.partition("{")
    metric = METRICS[name]
    inside, _, part = rest.rpartition("}")
    values = [unquote(pair.partition("=")[2]) for pair in inside.split(",")] if inside else []
    if metric.kind is not MetricKind.HISTOGRAM:
        return ParsedSample(metric, tuple(values))
    index = bisect_left(metric.bounds, float(values.pop()))
    return ParsedSample(
        metric, tuple(values), Bucket(index, "count" if part == ".count" else "sum")
    )


@lru_cache(maxsize=CACHED_NAMES)
def _sample_name(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    return sample_name(name, dict(labels))


@lru_cache(maxsize=CACHED_NAMES)
def _bucket_names(
    name: str, labels: tuple[tuple[str, str], ...]
) -> tuple[tuple[float, ...], tuple[tuple[str, str], ...]]:
    """A series' bounds, and the names of the count and the sum of each of its buckets."""
    metric = METRICS[name]
    assert metric.kind is MetricKind.HISTOGRAM, name
    given = dict(labels)
    return metric.bounds, tuple(
        (sample_name(name, given, Bucket(i, "count")), sample_name(name, given, Bucket(i, "sum")))
        for i in range(len(metric.bounds) + 1)
    )


class MetricsRegistry:
    """Values by sample name: counters and buckets only grow, gauges are set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._reported: dict[str, float] = {}
        # Since the last `take_changes`, in order; whether any, is looked at without the lock.
        self._changed: dict[str, None] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Grow a counter."""
        sample = _sample_name(name, tuple(labels.items()))
        with self._lock:
            self._values[sample] = self._values.get(sample, 0) + amount
            self._changed[sample] = None

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        sample = _sample_name(name, tuple(labels.items()))
        with self._lock:
            self._values[sample] = value
            self._changed[sample] = None

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put a value, not negative, into its bucket of a histogram."""
        self._observe(*_bucket_names(name, tuple(labels.items())), value)

    def histogram(self, name: str, **labels: str) -> Callable[[float], None]:
        """`observe` of one series, which is looked up once: for what is measured often."""
        return partial(self._observe, *_bucket_names(name, tuple(labels.items())))

    def _observe(
        self, bounds: tuple[float, ...], names: tuple[tuple[str, str], ...], value: float
    ) -> None:
        assert value >= 0, (names[0], value)
        count, total = names[bisect_left(bounds, value)]
        with self._lock:
            self._values[count] = self._values.get(count, 0) + 1
            self._values[total] = self._values.get(total, 0) + value
            self._changed[count] = self._changed[total] = None

    def snapshot(self) -> dict[str, float]:
        """All values since the start."""
        with self._lock:
            return dict(self._values)

    def take_changes(self) -> dict[str, float]:
        """What changed since the last call: counters and buckets as growth, gauges as they are.

        Called in every step: costs what has changed, however many samples there are.
        """
        if not self._changed:
            return {}
        with self._lock:
            changed, self._changed = self._changed, {}
            values = {sample: self._values[sample] for sample in changed}
        reported = self._reported  # one thread reports
        growth = {
            sample: value - reported.get(sample, 0) if adds_up(sample) else value
            for sample, value in values.items()
            if reported.get(sample) != value
        }
        reported.update(values)
        return growth


@lru_cache(maxsize=CACHED_NAMES)
def adds_up(sample: str) -> bool:
    """Whether samples of this name are summed over ranks and intervals."""
    return METRICS[sample.partition("{")[0]].kind is not MetricKind.GAUGE


def merge_samples(into: dict[str, float], more: Mapping[str, float]) -> None:
    """Add another process's or interval's samples: counters and buckets sum; of a gauge's values
    the highest counts, or the lowest where the table says so."""
    for sample, value in more.items():
        metric = METRICS[sample.partition("{")[0]]
        if metric.kind is not MetricKind.GAUGE:
            into[sample] = into.get(sample, 0) + value
        else:
            choose = min if metric.lowest else max
            into[sample] = choose(into.get(sample, value), value)


def _reading_order(sample: str) -> tuple[str, tuple[str, ...], Bucket]:
    """By name and labels, buckets from the lowest bound to the highest."""
    metric, labels, bucket = parse_sample(sample)
    return metric.name, labels, bucket or Bucket(0, "count")


def write_stats(path: Path, samples: Mapping[str, float]) -> bool:
    """Publish the samples as one JSON object, whole or not at all.

    Never raises: a disk that is full must not stop an engine. Whether they were written.
    """
    ordered = {sample: samples[sample] for sample in sorted(samples, key=_reading_order)}
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(ordered)))
        temporary.replace(path)
    except OSError as error:
        logger.warning("kvpool: stats_file %s: %s", path, error)
        return False
    return True


class StatsFile:
    """Keeps `stats_file` up to date: every `STATS_EVERY_S` while values change, and at the end.

    Not only at the end, because a process may be killed before it. A thread of its own, a daemon,
    writes what the values are by then; it gives up for good if it cannot.
    """

    def __init__(self, path: Path, registry: MetricsRegistry) -> None:
        self._path = path
        self._registry = registry
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-stats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last values; a disk that hangs is left behind after `STATS_CLOSE_S`."""
        self._is_closing.set()
        self._thread.join(STATS_CLOSE_S)
        if self._thread.is_alive():
            logger.warning(
                "kvpool: stats_file %s: the last values were not written within %g s",
                self._path,
                STATS_CLOSE_S,
            )

    def _run(self) -> None:
        written: dict[str, float] | None = None
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(STATS_EVERY_S)
            samples = self._registry.snapshot()
            if samples != written and not write_stats(self._path, samples):
                return
            written = samples
