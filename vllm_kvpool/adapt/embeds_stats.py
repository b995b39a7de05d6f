"""The embedding connector's samples as vLLM's statistics and Prometheus metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)

from vllm_kvpool.adapt.stats import TableProm
from vllm_kvpool.metrics import merge_samples, summarize


@dataclass
class EmbedsStats(ECConnectorStats):
    """`data` is sample name -> value, as of the KV connector."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: ECConnectorStats) -> "EmbedsStats":
        """Another interval's numbers join these."""
        merge_samples(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line; to the microsecond."""
        return {name: round(value, 6) for name, value in summarize(self.data).items()}


class EmbedsProm(TableProm, ECConnectorPromMetrics):
    """The embedding connector's rows."""

    of_embeds = True

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._make(metric_types, labelnames)
