"""An engine's pool metrics, in vLLM's format, without an engine."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.support.http_answers import http_server
from vllm_kvpool.cli.common.engine_metrics import Samples, parse_metrics
from vllm_kvpool.metrics import METRICS, PREFIX, MetricKind

CLASSES = {
    MetricKind.COUNTER: Counter,
    MetricKind.GAUGE: Gauge,
    MetricKind.HISTOGRAM: Histogram,
}


class Engine:
    """The pool's metrics of one engine, as vLLM exposes them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = {
            name: CLASSES[metric.kind](
                PREFIX + name, metric.help, ["engine", *metric.labels], registry=self.registry
            )
            for name, metric in METRICS.items()
        }

    def series(self, name: str, rank: str = "0", **labels: str) -> Any:
        return self.metrics[name].labels(engine=rank, **labels)

    def samples(self) -> Samples:
        return parse_metrics(self.text())

    def text(self) -> str:
        return generate_latest(self.registry).decode()


@contextlib.contextmanager
def served(engine: Engine, on_scrape: Callable[[Engine], None] = lambda _: None) -> Iterator[str]:
    """Yield the URL of an engine's metrics; `on_scrape` is called after each answer."""

    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        content = engine.text().encode()
        on_scrape(engine)
        return 200, content

    with http_server(answer) as url:
        yield url
