"""What is counted: one table of names, and the tally that holds the values.

The same names appear in vLLM's `/metrics` (with the prefix `vllm:`), in its log line and in the
`stats_file`. A sample's name is `name` or `name{label=value,…}`, labels in the table's order.
A tally may be used from any thread; its lock guards numbers only.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

PREFIX = "vllm:"


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


_C, _G = Kind.COUNTER, Kind.GAUGE
METRICS = {
    m.name: m
    for m in (
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
    )
}


def sample_name(name: str, labels: Mapping[str, str]) -> str:
    """`name{label=value,…}`; the labels must be exactly the table's."""
    metric = METRICS[name]
    assert set(labels) == set(metric.labels), (name, labels)
    if not metric.labels:
        return name
    return name + "{" + ",".join(f"{k}={labels[k]}" for k in metric.labels) + "}"


def parse_sample(sample: str) -> tuple[Metric, tuple[str, ...]]:
    """The metric and the label values of a sample name."""
    name, _, rest = sample.partition("{")
    metric = METRICS[name]
    values = (
        tuple(part.partition("=")[2] for part in rest.removesuffix("}").split(",")) if rest else ()
    )
    return metric, values


class Tally:
    """Values by sample name: counters only grow, gauges are set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._reported: dict[str, float] = {}
        self._changed = False  # since the last `take_changes`; read without the lock

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Grow a counter."""
        sample = sample_name(name, labels)
        with self._lock:
            self._values[sample] = self._values.get(sample, 0) + amount
            self._changed = True

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        sample = sample_name(name, labels)
        with self._lock:
            self._values[sample] = value
            self._changed = True

    def snapshot(self) -> dict[str, float]:
        """All values since the start."""
        with self._lock:
            return dict(self._values)

    def take_changes(self) -> dict[str, float]:
        """What changed since the last call: counters as growth, gauges as their value."""
        if not self._changed:
            return {}
        with self._lock:
            self._changed = False
            changed = {k: v for k, v in self._values.items() if self._reported.get(k) != v}
            growth = {
                k: v - self._reported.get(k, 0) if is_counter(k) else v for k, v in changed.items()
            }
            self._reported.update(changed)
            return growth


def is_counter(sample: str) -> bool:
    return METRICS[sample.partition("{")[0]].kind is Kind.COUNTER


def merge_samples(into: dict[str, float], more: Mapping[str, float]) -> None:
    """Add another process's or interval's samples: counters sum, of gauges the highest counts."""
    for sample, value in more.items():
        if is_counter(sample):
            into[sample] = into.get(sample, 0) + value
        else:
            into[sample] = max(into.get(sample, value), value)


def write_stats(path: Path, samples: Mapping[str, float]) -> None:
    """Publish the samples as one JSON object, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(dict(sorted(samples.items())))))
    temporary.replace(path)
