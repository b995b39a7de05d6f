"""The pool's samples as vLLM's connector statistics and Prometheus metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_kvpool.metrics import METRICS, PREFIX, Kind, Tally, merge_samples, parse_sample


@dataclass
class KVPoolStats(KVConnectorStats):
    """`data` is sample name -> value; counters hold the growth since the last report."""

    @classmethod
    def since_last(cls, tally: Tally) -> "KVPoolStats | None":
        """What a side's tally has to report, or None."""
        changes = tally.take_changes()
        return cls(changes) if changes else None

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "KVPoolStats":
        """Another rank's or interval's numbers join these."""
        merge_samples(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return {name: round(value, 4) for name, value in sorted(self.data.items())}


class KVPoolProm(KVConnectorPromMetrics):
    """One Prometheus metric per row of the table, labelled with the engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        classes = {Kind.COUNTER: metric_types[Counter], Kind.GAUGE: metric_types[Gauge]}
        self._metrics = {
            metric.name: classes[metric.kind](
                name=PREFIX + metric.name,
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
            )
            for metric in METRICS.values()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's numbers."""
        engine = self.per_engine_labelvalues[engine_idx]
        for sample, value in transfer_stats_data.items():
            metric, labels = parse_sample(sample)
            child = self._metrics[metric.name].labels(*engine, *labels)
            if metric.kind is Kind.COUNTER:
                child.inc(value)
            else:
                child.set(value)
