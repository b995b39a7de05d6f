"""Prometheus output after steps of the pool, through the classes that vLLM hands over."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from vllm_kvpool.metrics import EMBEDS_PREFIX, METRICS, PREFIX, SECONDS, MetricsRegistry
from vllm_kvpool.vllm_adapt.stats import KVPoolProm, KVPoolStats

ENGINES = {0: ["model", "0"], 1: ["model", "1"]}
LABELS = {"lane": "get", "tier": "file"}
OP = "vllm:kvpool_op_seconds"


class Bench:
    """Prometheus collectors, and a registry whose steps are reported to them."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        self.registry = MetricsRegistry()
        types = {kind: self._in(kind) for kind in (Counter, Gauge, Histogram)}
        config: Any = SimpleNamespace(kv_transfer_config=None)
        self.prom = KVPoolProm(config, types, ["model_name", "engine"], ENGINES)

    def _in(self, kind: Any) -> Any:
        return lambda **options: kind(**options, registry=self.collectors)

    def step(self, engine: int = 0) -> None:
        """Report a step's numbers as vLLM does."""
        stats = KVPoolStats.since_last(self.registry)
        self.prom.observe({} if stats is None else stats.data, engine)

    def samples(self, name: str) -> list[Sample]:
        return [s for m in self.collectors.collect() if m.name == name for s in m.samples]

    def value(self, name: str, **labels: str) -> float:
        value = self.collectors.get_sample_value(
            name, {"model_name": "model", "engine": "0", **labels}
        )
        return 0.0 if value is None else value

    def buckets(self, **labels: str) -> list[float]:
        """Return the count of each bucket, not cumulative."""
        bounds = [*map(str, SECONDS), "+Inf"]
        bounds[0] = "5e-05"
        reached = [self.value(f"{OP}_bucket", le=le, **labels) for le in bounds]
        return [b - a for a, b in zip([0.0, *reached], reached, strict=False)]


def test_every_row_of_the_table_is_registered_as_its_kind() -> None:
    bench = Bench()
    kinds = {m.name: m.type for m in bench.collectors.collect()}
    # Both connectors of an engine register theirs in one place.
    assert kinds == {
        PREFIX + name: metric.kind.value
        for name, metric in METRICS.items()
        if not name.startswith(EMBEDS_PREFIX)
    }


def test_counters_gauges_and_histograms_arrive_under_their_engine() -> None:
    bench = Bench()
    bench.registry.add("kvpool_retries", 3, **LABELS)
    bench.registry.set("kvpool_tier_up", 0, tier="a,b")
    bench.registry.observe("kvpool_op_seconds", 0.25, **LABELS)
    bench.step(engine=1)
    on = {"engine": "1"}
    assert bench.value("vllm:kvpool_retries_total", **LABELS, **on) == 3
    assert bench.value("vllm:kvpool_tier_up", tier="a,b", **on) == 0
    assert bench.value(f"{OP}_count", **LABELS, **on) == 1
    assert bench.value(f"{OP}_sum", **LABELS, **on) == 0.25
    assert {s.labels["engine"] for s in bench.samples(OP)} == {"1"}


def test_buckets_and_sum_are_those_of_the_values_themselves() -> None:
    bench = Bench()
    values = [0.0, 0.00004, *SECONDS, *SECONDS, 0.0007, 0.0008, 29.0, 31.0, 1000.0]
    plain = Histogram("plain", "", buckets=SECONDS, registry=CollectorRegistry())
    for i, value in enumerate(values):
        plain.observe(value)
        bench.registry.observe("kvpool_op_seconds", value, **LABELS)
        if i % 5 == 0:
            bench.step()
    bench.step()
    reached = [s.value for m in plain.collect() for s in m.samples if s.name == "plain_bucket"]
    expected = [b - a for a, b in zip([0.0, *reached], reached, strict=False)]
    assert bench.buckets(**LABELS) == expected
    assert bench.value(f"{OP}_count", **LABELS) == len(values)
    assert bench.value(f"{OP}_sum", **LABELS) == pytest.approx(sum(values))


@pytest.mark.parametrize("bound", [0.1, 0.0005, 2.5])
def test_the_mean_of_equal_values_stays_in_their_bucket(bound: float) -> None:
    """Three times 0.1 are 0.30000000000000004, a third of which is more than 0.1."""
    bench = Bench()
    for count in range(1, 12):
        for _ in range(count):
            bench.registry.observe("kvpool_op_seconds", bound, **LABELS)
        bench.step()
    expected = [0.0] * (len(SECONDS) + 1)
    expected[SECONDS.index(bound)] = sum(range(1, 12))
    assert bench.buckets(**LABELS) == expected


def test_the_log_line_has_a_few_sums_of_the_interval() -> None:
    registry = MetricsRegistry()
    registry.add("kvpool_hit_tokens", 5)
    registry.add("kvpool_miss_tokens", 15, reason="absent")
    registry.add("kvpool_miss_tokens", 100, reason="not_needed")
    registry.add("kvpool_lookups", 2, outcome="answered")
    registry.add("kvpool_lookup_seconds", 0.003)
    for value in (0.03, 0.04):
        registry.observe("kvpool_load_seconds", value)
    first = KVPoolStats.since_last(registry)
    assert first is not None
    registry.observe("kvpool_load_seconds", 0.05)
    for store, nbytes in (("file", 1 << 20), ("mooncake", 1 << 19)):
        registry.add("kvpool_bytes", nbytes, direction="load", store=store)
    registry.add("kvpool_failures", kind="store_error")
    registry.add("kvpool_failures", 0, kind="lane")
    registry.set("kvpool_tier_up", 0, tier="mooncake")
    registry.set("kvpool_tier_up", 1, tier="file")
    registry.observe("kvpool_op_seconds", 0.1, lane="get", tier="file")
    second = KVPoolStats.since_last(registry)
    assert second is not None
    assert first.aggregate(second).reduce() == {
        "hit_percent": 25,
        "hit_tokens": 5,
        "miss_tokens": 15,
        "lookups": 2,
        "lookup_ms": 1.5,
        "loads": 3,
        "load_ms": 40,
        "load_MiB": 1.5,
        "failed_store_error": 1,
        "down_mooncake": 1,
    }
