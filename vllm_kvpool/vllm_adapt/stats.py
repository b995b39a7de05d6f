"""The pool's samples in vLLM's statistics, log line and Prometheus metrics; hits by source.

vLLM's stat loggers call the statistics once a step, on their thread; `HitSources` belongs to the
scheduler's.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_kvpool.metrics import (
    EMBEDS_PREFIX,
    METRICS,
    PREFIX,
    Bucket,
    Metric,
    MetricKind,
    MetricsRegistry,
    merge_samples,
    parse_sample,
)
from vllm_kvpool.transfer.ops import LoadPlan
from vllm_kvpool.vllm_adapt import compat

REPLAYS_PER_STEP = 1000  # about 2 ms; a step has tens of batches
MIB = 1 << 20

# Counters in the log line: by metric, what their samples are called there (with which label, if one
# tells them apart) and in which unit.
_LOGGED = {
    "kvpool_hit_tokens": ("hit_tokens", 1),
    "kvpool_miss_tokens": ("miss_tokens", 1),
    "kvpool_saved_tokens": ("saved_tokens", 1),
    "kvpool_host_saved_tokens": ("host_saved_tokens", 1),
    "kvpool_unsaved_tokens": ("unsaved_tokens", 1),
    "kvpool_lookups": ("lookups", 1),
    "kvpool_bytes": ("{0}_MiB", MIB),
    "kvpool_failures": ("failed_{0}", 1),
    "kvpool_ec_events": ("{0}_{1}", 1),
}


def log_values(samples: Mapping[str, float]) -> dict[str, int | float]:
    """Return an interval's log line: sums over stores and ranks, mean times, tiers down.

    Misses that the engine's own prefix cache made up for do not count. Zeros are left out. All
    samples are in `/metrics` and `stats_file`.
    """
    sums: dict[str, float] = defaultdict(float)
    lookup_s = load_s = loads = 0.0
    for sample in sorted(samples):
        metric, labels, bucket = parse_sample(sample)
        value = samples[sample]
        if metric.name == "kvpool_miss_tokens" and labels == ("not_needed",):
            continue
        if metric.name in _LOGGED:
            name, unit = _LOGGED[metric.name]
            sums[name.format(*labels)] += value / unit
        elif metric.name == "kvpool_lookup_seconds":
            lookup_s += value
        elif metric.name == "kvpool_load_seconds" and bucket is not None:
            loads += value if bucket.part == "count" else 0
            load_s += value if bucket.part == "sum" else 0
        elif metric.name == "kvpool_tier_up" and not value:
            sums[f"down_{labels[0]}"] = 1
    if needed := sums["hit_tokens"] + sums["miss_tokens"]:
        sums = {"hit_percent": 100 * sums["hit_tokens"] / needed, **sums}
    if sums.get("lookups"):
        sums["lookup_ms"] = 1000 * lookup_s / sums["lookups"]
    if loads:
        sums |= {"loads": loads, "load_ms": 1000 * load_s / loads}
    return {
        name: round(value) if value == round(value) else round(value, 2)
        for name, value in sums.items()
        if value
    }


class TableStats:
    """Statistics of either connector; a subclass inherits from vLLM's class, too."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: Any) -> Self:
        """Add another rank's or interval's numbers."""
        merge_samples(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values of the log line."""
        return log_values(self.data)


@dataclass
class KVPoolStats(TableStats, KVConnectorStats):
    """`data` is sample name -> value; counters and buckets hold growth since the last report."""

    @classmethod
    def since_last(cls, registry: MetricsRegistry) -> "KVPoolStats | None":
        """The changes in a side's registry since the last call; None if there are none."""
        changes = registry.take_changes()
        return cls(changes) if changes else None

    def __getitem__(self, name: str) -> dict[str, float]:
        """For MultiConnector of vLLM 0.27.1, which reads `stats["data"]` of what may be an object:
        in an engine whose scheduler and client are one process."""
        assert name == "data", name
        return self.data


@dataclass(slots=True)
class _Backlog:
    """Values of a bucket that Prometheus has not been given yet; above `low`, up to `high`."""

    observe: Callable[[float], None]
    low: float
    high: float
    count: int = 0
    total: float = 0.0


class BucketReplay:
    """Puts the counts of our buckets into Prometheus's histograms.

    These take one value at a time, so each bucket's mean is observed as often as the bucket was
    counted: counts are exact, sums to the last digits. A step observes a bounded number of values;
    the rest follows in later steps.
    """

    def __init__(self) -> None:
        self._backlogs: dict[tuple[Any, ...], _Backlog] = {}

    def add(
        self,
        series: tuple[Any, ...],
        metric: Metric,
        bucket: Bucket,
        value: float,
        observe: Callable[[float], None],
    ) -> None:
        """Add the growth of a bucket's count or sum; `series` names its histogram."""
        backlog = self._backlogs.get((*series, bucket.number))
        if backlog is None:
            bounds = (0.0, *metric.bounds, math.inf)
            backlog = _Backlog(observe, bounds[bucket.number], bounds[bucket.number + 1])
            self._backlogs[*series, bucket.number] = backlog
        if bucket.part == "count":
            backlog.count += round(value)
        else:
            backlog.total += value

    def replay(self, at_most: int) -> None:
        """Observe up to `at_most` values, the oldest first."""
        for key in list(self._backlogs):
            backlog = self._backlogs[key]
            now = min(backlog.count, at_most)
            if now == 0:
                continue
            # Rounding may carry the mean of equal values over the bound that they lie on.
            least = math.nextafter(backlog.low, math.inf)
            mean = min(max(backlog.total / backlog.count, least), backlog.high)
            for _ in range(now):
                backlog.observe(mean)
            at_most -= now
            backlog.count -= now
            backlog.total -= now * mean
            # The rest goes to the end, so that one series cannot hold up the others.
            del self._backlogs[key]
            if backlog.count:
                self._backlogs[key] = backlog


class TableProm:
    """Prometheus metrics of the table's rows, labelled with the engine."""

    of_embeds = False  # which of the table's rows
    per_engine_labelvalues: Mapping[int, list[object]]

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        # Of vLLM's class, which stands behind this one in a subclass's bases.
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)  # type: ignore[call-arg]
        classes = {
            MetricKind.COUNTER: metric_types[Counter],
            MetricKind.GAUGE: metric_types[Gauge],
            MetricKind.HISTOGRAM: metric_types[Histogram],
        }
        self._metrics = {
            metric.name: classes[metric.kind](
                name=PREFIX + metric.name,
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **({"buckets": list(metric.bounds)} if metric.bounds else {}),
            )
            for metric in METRICS.values()
            if metric.name.startswith(EMBEDS_PREFIX) == self.of_embeds
        }
        self._replay = BucketReplay()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's numbers."""
        engine = self.per_engine_labelvalues[engine_idx]
        for sample, value in transfer_stats_data.items():
            metric, labels, bucket = parse_sample(sample)
            child = self._metrics[metric.name].labels(*engine, *labels)
            if bucket is not None:
                series = (metric.name, engine_idx, labels)
                self._replay.add(series, metric, bucket, value, child.observe)
            elif metric.kind is MetricKind.COUNTER:
                child.inc(value)
            else:
                child.set(value)
        self._replay.replay(REPLAYS_PER_STEP)


class KVPoolProm(TableProm, KVConnectorPromMetrics):
    """The KV connector's rows."""


class HitSources:
    """Divides a hit between host memory and the stores. Scheduler's thread.

    `kinds`: those of the stores. Which store has a chunk is not known, so stores of different kinds
    are "unspecified".
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._host = compat.hit_source(["host"])
        self._stores = compat.hit_source(kinds) if kinds else self._host

    def of(
        self,
        load: LoadPlan | None,
        num_tokens: int,
        chunk_tokens: int,
        in_host: Callable[[bytes], bool],
    ) -> dict[Any, int]:
        """Tokens of the hit by source; `in_host` says of a chunk's hash whether all ranks have it.

        A cell may leave host memory before it is loaded, or come into it.
        """
        from_host = 0
        if load is not None:
            for chunk, chunk_hash in enumerate(load.hashes, load.first_chunk):
                start = max(load.token_start, chunk * chunk_tokens)
                stop = min(load.token_stop, (chunk + 1) * chunk_tokens)
                if in_host(chunk_hash):
                    from_host += stop - start
        sources: dict[Any, int] = {}
        for source, tokens in ((self._host, from_host), (self._stores, num_tokens - from_host)):
            if tokens:
                sources[source] = sources.get(source, 0) + tokens
        return sources
