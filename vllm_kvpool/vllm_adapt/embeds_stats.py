"""The embedding connector's samples as vLLM's statistics and Prometheus metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)

from vllm_kvpool.vllm_adapt.stats import TableProm, TableStats


@dataclass
class EmbedsStats(TableStats, ECConnectorStats):
    """`data` is sample name -> value, as of the KV connector."""


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
