"""The table of metrics, and the registry that has their values.

Names are those of vLLM's `/metrics` (prefix `vllm:`) and of `stats_file`. Between processes go
`Samples`, which add up over ranks and intervals. `stats_file` has a number for each sample:
`name{label=value,…}`, labels in the table's order; in values `,`, `=`, `{`, `}` and `%` are written
as in URLs. A histogram has two for each bucket that a value fell into, `name{…,le=bound}.count` and
`.sum`, which are not cumulative.

A registry may be used from any thread. `StatsFile` writes one to a file on a thread of its own.
"""

import logging
import stat
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from pathlib import Path

import msgspec

from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.private_files import replace_file

logger = logging.getLogger(__name__)

PREFIX = "vllm:"
POOL_PREFIX = "kvpool_"
EMBEDS_PREFIX = "kvpool_ec_"  # names of the embedding connector's rows
SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
STATS_EVERY_S = 1.0
STATS_CLOSE_S = 1.0
MAX_STATS_BYTES = 16 << 20
_ESCAPES = str.maketrans({char: f"%{ord(char):02X}" for char in "%,={}"})


class MetricKind(Enum):
    """The kinds of Prometheus metrics that the pool has."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()  # of a histogram: the highest value of each bucket but the last
    lowest: bool = False  # a gauge of which the lowest rank's value counts, not the highest


Buckets = dict[int, tuple[int, float]]
"""Number and sum of the values in each bucket of a histogram, by the index of the bucket's bound.
The bucket above the last bound has the number of bounds as index. Empty buckets are left out."""
Samples = dict[str, dict[tuple[str, ...], float | Buckets]]
"""Values by metric, then by its labels' values in the table's order."""


MAX_TENANTS = 64  # with a label of their own
MAX_SOURCES = 256  # likewise of engines that requests name
OTHER_NAMES = "others"
NO_NAME = "-"

_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
METRICS = {
    m.name: m
    for m in (
        Metric(
            "kvpool_info",
            _G,
            ("namespace", "chunk_tokens"),
            "1 for the current namespace; engines share if labels and layer_span are equal.",
        ),
        Metric("kvpool_hit_tokens", _C, (), "Prompt tokens taken from the pool."),
        Metric("kvpool_miss_tokens", _C, ("reason",), "Prompt tokens not taken from the pool."),
        Metric(
            "kvpool_draft_tokens",
            _C,
            ("outcome",),
            "Loaded prompt tokens with and without the drafter's KV.",
        ),
        Metric(
            "kvpool_tenant_tokens",
            _C,
            ("tenant", "direction"),
            "Tokens of requests that name a tenant or a salt, loaded and saved.",
        ),
        Metric("kvpool_lookups", _C, ("outcome",), "Lookups of prompts, by outcome."),
        Metric(
            "kvpool_lookup_seconds",
            _C,
            (),
            "Seconds from a request's arrival to its lookup's answer, summed.",
        ),
        Metric(
            "kvpool_expected_prompts",
            _C,
            ("source", "outcome"),
            "Prompts with `expect_tokens`, by `expect_from` and whether those tokens were found.",
        ),
        Metric(
            "kvpool_notices_info",
            _G,
            ("rank", "endpoint"),
            "1 for each rank that tells how far prompts are stored that are handed over.",
        ),
        Metric(
            "kvpool_notices",
            _C,
            ("side", "event"),
            "Notices of how far prompts are stored that are handed over, by side and event.",
        ),
        Metric(
            "kvpool_cells",
            _C,
            ("direction", "store", "outcome"),
            "Cells moved to or from a store, by outcome.",
        ),
        Metric("kvpool_bytes", _C, ("direction", "store"), "Bytes moved to or from a store."),
        Metric(
            "kvpool_seconds",
            _C,
            ("direction", "store"),
            "Seconds in store calls, summed over lanes.",
        ),
        Metric("kvpool_copy_bytes", _C, ("direction",), "Bytes gathered or scattered."),
        Metric("kvpool_copy_seconds", _C, ("direction",), "Seconds gathering or scattering."),
        Metric("kvpool_failures", _C, ("kind",), "Failures, by kind."),
        Metric(
            "kvpool_saved_tokens",
            _C,
            (),
            "Tokens of chunks that a store has, as all ranks have confirmed.",
        ),
        Metric(
            "kvpool_host_saved_tokens",
            _C,
            (),
            "Tokens of chunks saved in host memory alone: no store has confirmed them.",
        ),
        Metric(
            "kvpool_unsaved_tokens",
            _C,
            ("reason",),
            "Tokens of chunks that were to be saved and were not, by reason.",
        ),
        Metric(
            "kvpool_saved_states",
            _C,
            (),
            "Boundaries whose recurrent states a store or host memory has.",
        ),
        Metric(
            "kvpool_pending_save_tokens",
            _G,
            (),
            "Tokens of planned saves whose end some rank has not reported.",
        ),
        Metric(
            "kvpool_pinned_blocks",
            _G,
            (),
            "Blocks of the engine that saves pin until they are gathered.",
        ),
        Metric(
            "kvpool_promised_blocks",
            _G,
            (),
            "Blocks allocated to loads whose last chunks another engine has not stored yet.",
        ),
        Metric("kvpool_slots", _G, ("state",), "Staging slots, by state."),
        Metric(
            "kvpool_page_locked_share",
            _G,
            (),
            "Share of staging memory and host tier that is page-locked for a GPU; copies of the "
            "rest are slow. It grows to 1 in the first minute.",
            lowest=True,
        ),
        Metric(
            "kvpool_op_seconds",
            _H,
            ("lane", "tier"),
            "Seconds that a lane took for a batch.",
            SECONDS,
        ),
        Metric(
            "kvpool_op_wait_seconds",
            _H,
            ("lane", "tier"),
            "Seconds that a batch's first cell waited for the lane.",
            SECONDS,
        ),
        Metric("kvpool_queue_cells", _G, ("lane", "tier"), "Cells that wait for the lane."),
        Metric("kvpool_hit_cells", _C, ("tier",), "Loaded cells, by the tier that they came from."),
        Metric(
            "kvpool_tier_up",
            _G,
            ("tier",),
            "1, or 0 while the tier is not used after failures.",
            lowest=True,
        ),
        Metric(
            "kvpool_lookup_tier_up",
            _G,
            ("tier",),
            "1, or 0 while lookups leave the tier out because it answers too late.",
            lowest=True,
        ),
        Metric(
            "kvpool_tier_writable",
            _G,
            ("tier",),
            "1, or 0 while the tier is read-only or its writes are paused.",
            lowest=True,
        ),
        Metric("kvpool_host_bytes", _G, ("state",), "Bytes in the host tier, by state."),
        Metric(
            "kvpool_tenant_host_bytes",
            _G,
            ("tenant",),
            "Bytes in the host tier of each tenant, where tenants share it.",
        ),
        Metric(
            "kvpool_evicted_cells",
            _C,
            ("tier", "fate"),
            "Cells that left host memory, by fate: dropped, stored, lost.",
        ),
        Metric("kvpool_prefetched_cells", _C, ("outcome",), "Prefetched cells, by outcome."),
        Metric(
            "kvpool_retries",
            _C,
            ("lane", "tier"),
            "Batches with cells that were tried again after a failure.",
        ),
        Metric(
            "kvpool_save_seconds",
            _H,
            (),
            "Seconds from the step that computed a chunk until a durable tier, or with write-back "
            "host memory, has it; without dropped saves.",
            SECONDS,
        ),
        Metric("kvpool_load_seconds", _H, (), "Seconds from a load's plan to its end.", SECONDS),
        Metric("kvpool_trace_dropped", _C, (), "Trace events that were dropped."),
        Metric(
            "kvpool_ec_events",
            _C,
            ("side", "event"),
            "Events of embedding transfers, by kind.",
        ),
        Metric(
            "kvpool_ec_levels", _G, ("side", "level"), "Levels of embedding transfers, by kind."
        ),
        Metric("kvpool_ec_items", _G, ("state",), "Items of a consumer, by state."),
        Metric("kvpool_ec_peers", _G, ("state",), "Sessions with peers, by state."),
    )
}


def named_values(samples: Samples) -> Iterator[tuple[str, float]]:
    """Yield each sample under its name in `stats_file`.

    Samples are ordered by name and labels, from the lowest bucket on.
    """
    for name in sorted(samples):
        metric = METRICS[name]
        for labels, value in sorted(samples[name].items(), key=itemgetter(0)):
            pairs = [
                f"{label}={text.translate(_ESCAPES)}"
                for label, text in zip(metric.labels, labels, strict=True)
            ]
            if not isinstance(value, dict):
                yield _named(name, pairs), value
                continue
            for number, (count, total) in sorted(value.items()):
                series = _named(name, [*pairs, f"le={_bound_name(metric.bounds, number)}"])
                yield f"{series}.count", count
                yield f"{series}.sum", total


def _named(name: str, pairs: list[str]) -> str:
    return f"{name}{{{','.join(pairs)}}}" if pairs else name


def _bound_name(bounds: tuple[float, ...], index: int) -> str:
    """Return decimal seconds without an exponent."""
    return f"{bounds[index]:.9f}".rstrip("0").rstrip(".") if index < len(bounds) else "inf"


class MetricSeries:
    """A metric under one set of labels. Counters and buckets only grow, gauges are set.

    Any thread may call; `MetricsRegistry.series` makes it.
    """

    __slots__ = ("_changed", "_lock", "labels", "metric", "reported", "value")

    def __init__(
        self,
        metric: Metric,
        labels: tuple[str, ...],
        lock: threading.Lock,
        changed: dict["MetricSeries", None],
    ) -> None:
        self.metric = metric
        self.labels = labels
        self.value: float | Buckets = {} if metric.kind is MetricKind.HISTOGRAM else 0
        self.reported: float | Buckets | None = None
        self._lock = lock
        self._changed = changed

    def add(self, amount: float = 1) -> None:
        """Grow a counter."""
        assert self.metric.kind is _C, self.metric.name
        with self._lock:
            assert not isinstance(self.value, dict)
            self.value += amount
            self._changed[self] = None

    def set(self, value: float) -> None:
        """Set a gauge."""
        assert self.metric.kind is _G, self.metric.name
        with self._lock:
            self.value = value
            self._changed[self] = None

    def observe(self, value: float) -> None:
        """Put a value, not negative, into its bucket of a histogram."""
        assert value >= 0, (self.metric.name, value)
        number = bisect_left(self.metric.bounds, value)
        with self._lock:
            buckets = self.value
            assert isinstance(buckets, dict), self.metric.name
            count, total = buckets.get(number, _EMPTY)
            buckets[number] = count + 1, total + value
            self._changed[self] = None


_EMPTY = (0, 0.0)


class MetricsRegistry:
    """Values of metrics under their labels, which must be exactly the table's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[tuple[object, ...], MetricSeries] = {}  # labels in any order
        self._changed: dict[MetricSeries, None] = {}  # since the last `take_changes`, in order

    def series(self, name: str, **labels: str) -> MetricSeries:
        """Return the series of a metric under these labels; for what is counted often."""
        series = self._series.get((name, *labels.items()))
        return series or self._new_series(METRICS[name], labels)

    def _new_series(self, metric: Metric, labels: Mapping[str, str]) -> MetricSeries:
        assert set(labels) == set(metric.labels), (metric.name, labels)
        in_order = {label: labels[label] for label in metric.labels}
        with self._lock:
            key = (metric.name, *in_order.items())
            series = self._series.get(key)
            if series is None:
                values = tuple(in_order.values())
                series = MetricSeries(metric, values, self._lock, self._changed)
                self._series[key] = series
            self._series[metric.name, *labels.items()] = series
        return series

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Grow a counter."""
        self.series(name, **labels).add(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self.series(name, **labels).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put a value, not negative, into its bucket of a histogram."""
        self.series(name, **labels).observe(value)

    def snapshot(self) -> dict[str, float]:
        """Return every value since the start, by its name in `stats_file`."""
        return dict(named_values(self.samples()))

    def samples(self) -> Samples:
        """Return every value since the start."""
        samples: Samples = {}
        with self._lock:
            for each in self._series.values():
                samples.setdefault(each.metric.name, {})[each.labels] = _copy_of(each.value)
        return samples

    def take_changes(self) -> Samples:
        """Return the changes since the last call: growth of counters and buckets, values of gauges.

        Called in every step, by one thread; its cost is that of the changes.
        """
        if not self._changed:  # read without the lock: what comes now is of the next step
            return {}
        with self._lock:
            changed = [(each, _copy_of(each.value)) for each in self._changed]
            self._changed.clear()
        samples: Samples = {}
        for series, value in changed:
            growth = _growth(series, value)
            series.reported = value
            if growth is not None:
                samples.setdefault(series.metric.name, {})[series.labels] = growth
        return samples


def _copy_of(value: float | Buckets) -> float | Buckets:
    return dict(value) if isinstance(value, dict) else value


def _growth(series: MetricSeries, value: float | Buckets) -> float | Buckets | None:
    """Return the change of a series since its last report; None if it has not changed."""
    before = series.reported
    if isinstance(value, dict):
        was: Buckets = before if isinstance(before, dict) else {}
        return {
            number: (count - was.get(number, _EMPTY)[0], total - was.get(number, _EMPTY)[1])
            for number, (count, total) in value.items()
            if was.get(number) != (count, total)
        }
    if value == before:
        return None
    is_gauge = series.metric.kind is MetricKind.GAUGE
    return value if is_gauge or not isinstance(before, int | float) else value - before


def merge_samples(into: Samples, more: Samples) -> None:
    """Add another process's or interval's samples to `into`.

    Counters and buckets are summed. Of a gauge's values the highest counts, or the lowest
    (`Metric.lowest`).
    """
    for name, series in more.items():
        metric, known = METRICS[name], into.setdefault(name, {})
        for labels, value in series.items():
            before = known.get(labels)
            if before is None:
                known[labels] = _copy_of(value)
            elif isinstance(before, dict):
                assert isinstance(value, dict), name
                for number, (count, total) in value.items():
                    counted, summed = before.get(number, _EMPTY)
                    before[number] = counted + count, summed + total
            else:
                assert not isinstance(value, dict), name
                if metric.kind is not MetricKind.GAUGE:
                    known[labels] = before + value
                else:
                    known[labels] = (min if metric.lowest else max)(before, value)


def write_stats(path: Path, samples: Mapping[str, float]) -> bool:
    """Replace the file by the samples as a JSON object, and return True.

    Returns False, with a warning, if the write fails or the file has something else.
    """
    try:
        _check_stats(path)
        replace_file(path, msgspec.json.format(msgspec.json.encode(samples)))
    except OSError as error:
        logger.warning("kvpool: stats_file %s: %s; it is not written any more", path, error)
        return False
    return True


def _check_stats(path: Path) -> None:
    """Raise OSError if something else than samples is there, which is somebody else's."""
    try:
        status = path.stat()
        is_ours = stat.S_ISREG(status.st_mode) and status.st_size <= MAX_STATS_BYTES
        text = path.read_bytes() if is_ours else b""
        values = msgspec.json.decode(text or b"{}", type=dict[str, float])
        is_ours = is_ours and all(sample.startswith(POOL_PREFIX) for sample in values)
    except FileNotFoundError:
        return
    except UNREADABLE:
        is_ours = False
    if not is_ours:
        raise FileExistsError("something other than the pool's counters is there, and stays")


class StatsFile:
    """Writes `stats_file` every `STATS_EVERY_S` while values change, and at the end.

    A daemon thread writes; it ends at the first failure.
    """

    def __init__(self, path: Path, registry: MetricsRegistry) -> None:
        self._path = path
        self._registry = registry
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-stats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last values; give up after `STATS_CLOSE_S` if the disk hangs."""
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


def open_stats_file(prefix: str, part: str, registry: MetricsRegistry) -> StatsFile | None:
    """Open `PREFIX.PART` for the counters of one process; None if `stats_file` is not set."""
    return StatsFile(Path(f"{prefix}.{part}"), registry) if prefix else None


class NameLabels:
    """Labels of names that requests choose.

    The first `most` names are their own labels, all later names share `OTHER_NAMES`.
    """

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        """Return the label of a name; "" is a name as well."""
        if name not in self._known and len(self._known) >= self._most:
            return OTHER_NAMES
        self._known.add(name)
        return name or NO_NAME
