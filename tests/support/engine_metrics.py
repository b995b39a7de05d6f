"""The pool's metrics of an engine, as vLLM exposes them, without the engine."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_kvpool.cli.engine_metrics import Samples, parse_metrics
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
    """The URL at which an engine's metrics are; `on_scrape` is called after each answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = engine.text().encode()
            on_scrape(engine)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
