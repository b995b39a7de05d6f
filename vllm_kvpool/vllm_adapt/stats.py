"""The pool's samples in vLLM's statistics, log line and Prometheus metrics; hits by source.

vLLM's stat loggers call the statistics once a step, on their thread; `HitSources` belongs to the
scheduler's.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
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
    Buckets,
    MetricKind,
    MetricsRegistry,
    Samples,
    merge_samples,
)
from vllm_kvpool.transfer.ops import LoadPlan
from vllm_kvpool.vllm_adapt import compat

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


def log_values(samples: Samples) -> dict[str, int | float]:
    """Return an interval's log line: sums over stores and ranks, mean times, tiers down.

    Misses that the engine's own prefix cache made up for do not count. Zeros are left out. All
    samples are in `/metrics` and `stats_file`.
    """
    sums: dict[str, float] = defaultdict(float)
    lookup_s = load_s = loads = 0.0
    for name, labels, value in sorted(_rows(samples), key=itemgetter(0, 1)):
        if isinstance(value, dict):
            if name == "kvpool_load_seconds":
                loads += sum(count for count, _ in value.values())
                load_s += sum(total for _, total in value.values())
        elif name == "kvpool_miss_tokens" and labels == ("not_needed",):
            continue
        elif name in _LOGGED:
            logged, unit = _LOGGED[name]
            sums[logged.format(*labels)] += value / unit
        elif name == "kvpool_lookup_seconds":
            lookup_s += value
        elif name == "kvpool_tier_up" and not value:
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


def _rows(samples: Samples) -> Iterator[tuple[str, tuple[str, ...], float | Buckets]]:
    for name, series in samples.items():
        for labels, value in series.items():
            yield name, labels, value


class TableStats:
    """Statistics of either connector; a subclass inherits from vLLM's class, too."""

    data: Samples

    def reset(self) -> None:
        """Forget all samples; vLLM calls it after each log line."""
        self.data = {}

    def is_empty(self) -> bool:
        """Return True if no sample was added since the last reset."""
        return not self.data

    def aggregate(self, other: Any) -> Self:
        """Add another rank's or interval's numbers."""
        merge_samples(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values of the log line."""
        return log_values(self.data)


@dataclass
class KVPoolStats(TableStats, KVConnectorStats):
    """`data` is `Samples`; counters and buckets hold growth since the last report."""

    @classmethod
    def since_last(cls, registry: MetricsRegistry) -> "KVPoolStats | None":
        """Return the changes in a side's registry since the last call; None if there are none."""
        changes = registry.take_changes()
        return cls(changes) if changes else None

    def __getitem__(self, name: str) -> Samples:
        """Return the samples by the key of vLLM 0.27.1's MultiConnector, `stats["data"]`.

        That connector reads an object where the engine's scheduler and client are one process.
        """
        assert name == "data", name
        return self.data


def _replay(bounds: Sequence[float], growth: Buckets, observe: Callable[[float], None]) -> None:
    """Put the growth of our buckets into one of Prometheus's histograms.

    It takes one value at a time, about 2 us each, so each bucket's mean is observed as often as the
    bucket was counted: counts are exact, sums to the last digits.
    """
    edges = (0.0, *bounds, math.inf)
    for number, (count, total) in growth.items():
        # Rounding may carry the mean of equal values over the bound that they lie on.
        least = math.nextafter(edges[number], math.inf)
        mean = min(max(total / count, least), edges[number + 1])
        for _ in range(count):
            observe(mean)


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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's numbers."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labels, value in _rows(transfer_stats_data):
            metric, child = METRICS[name], self._metrics[name].labels(*engine, *labels)
            if isinstance(value, dict):
                _replay(metric.bounds, value, child.observe)
            elif metric.kind is MetricKind.COUNTER:
                child.inc(value)
            else:
                child.set(value)


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
        """Return the tokens of the hit by source.

        `in_host` says of a chunk's hash whether all ranks have it.
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
