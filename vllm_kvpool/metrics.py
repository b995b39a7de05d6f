"""The table of metrics, and the registry that has their values.

Names are those of vLLM's `/metrics` (prefix `vllm:`) and of `stats_file`. A sample is `name` or
`name{label=value,…}`, labels in the table's order; in values `,`, `=`, `{`, `}` and `%` are written
as in URLs. A histogram has two samples for each bucket that a value fell into,
`name{…,le=bound}.count` and `.sum`. They are not cumulative, so they add up over ranks and
intervals as counters do.

A registry may be used from any thread. `StatsFile` writes one to a file on a thread of its own.
"""

import logging
import stat
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote

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
CACHED_NAMES = 4096  # more than a process has samples
STATS_EVERY_S = 1.0
STATS_CLOSE_S = 1.0
MAX_STATS_BYTES = 16 << 20
_ESCAPES = str.maketrans({char: f"%{ord(char):02X}" for char in "%,={}"})


class MetricKind(Enum):
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


class Bucket(NamedTuple):
    """The bucket of a histogram's sample."""

    number: int  # index of its bound; the number of bounds for values above the last
    part: Literal["count", "sum"]


class ParsedSample(NamedTuple):
    """The parts of a sample's name."""

    metric: Metric
    labels: tuple[str, ...]  # values, in the table's order
    bucket: Bucket | None = None


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
        Metric("kvpool_ec_peers", _G, ("state",), "Sessions with peers, by state."),
    )
}


def sample_name(name: str, labels: Mapping[str, str], bucket: Bucket | None = None) -> str:
    """The name of a sample; the labels must be the table's. Only histograms have a bucket."""
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
    """The reverse of `sample_name`."""
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
    """A series' bounds, and the names of each bucket's count and sum."""
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
        # Samples changed since the last `take_changes`; whether there are any is read without lock.
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
        assert value >= 0, (name, value)
        bounds, names = _bucket_names(name, tuple(labels.items()))
        count, total = names[bisect_left(bounds, value)]
        with self._lock:
            self._values[count] = self._values.get(count, 0) + 1
            self._values[total] = self._values.get(total, 0) + value
            self._changed[count] = self._changed[total] = None

    def snapshot(self) -> dict[str, float]:
        """Return all values since the start."""
        with self._lock:
            return dict(self._values)

    def take_changes(self) -> dict[str, float]:
        """The changes since the last call: growth of counters and buckets, values of gauges.

        Called in every step; its cost is that of the changes.
        """
        if not self._changed:
            return {}
        with self._lock:
            changed, self._changed = self._changed, {}
            values = {sample: self._values[sample] for sample in changed}
        reported = self._reported  # only one thread calls this
        growth = {
            sample: value - reported.get(sample, 0) if adds_up(sample) else value
            for sample, value in values.items()
            if reported.get(sample) != value
        }
        reported.update(values)
        return growth


@lru_cache(maxsize=CACHED_NAMES)
def adds_up(sample: str) -> bool:
    """Return True if a sample is summed over ranks and intervals."""
    return METRICS[sample.partition("{")[0]].kind is not MetricKind.GAUGE


def merge_samples(into: dict[str, float], more: Mapping[str, float]) -> None:
    """Add another process's or interval's samples: counters and buckets are summed; of a gauge's
    values the highest counts, or the lowest (`Metric.lowest`)."""
    for sample, value in more.items():
        metric = METRICS[sample.partition("{")[0]]
        if metric.kind is not MetricKind.GAUGE:
            into[sample] = into.get(sample, 0) + value
        else:
            choose = min if metric.lowest else max
            into[sample] = choose(into.get(sample, value), value)


def _reading_order(sample: str) -> tuple[str, tuple[str, ...], Bucket]:
    """Sort key: by name and labels, buckets from the lowest bound on."""
    metric, labels, bucket = parse_sample(sample)
    return metric.name, labels, bucket or Bucket(0, "count")


def write_stats(path: Path, samples: Mapping[str, float]) -> bool:
    """Replace the file by the samples as a JSON object; False, with a warning, if it fails or if
    the file has something else."""
    ordered = {sample: samples[sample] for sample in sorted(samples, key=_reading_order)}
    try:
        _check_stats(path)
        replace_file(path, msgspec.json.format(msgspec.json.encode(ordered)))
    except OSError as error:
        logger.warning("kvpool: stats_file %s: %s; it is not written any more", path, error)
        return False
    return True


def _check_stats(path: Path) -> None:
    """OSError if something else than samples is there, which is somebody else's."""
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


class NameLabels:
    """Labels of names that requests choose: the first `most` names are their own labels, all later
    names share `OTHER_NAMES`."""

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        """Return the label of a name; "" is a name as well."""
        if name not in self._known and len(self._known) >= self._most:
            return OTHER_NAMES
        self._known.add(name)
        return name or NO_NAME
