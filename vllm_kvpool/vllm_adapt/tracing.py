"""OpenTelemetry spans of a request's lookup, load and saves, in the trace that vLLM has for it.

vLLM sets up the exporter (`--otlp-traces-endpoint`) in the processes of the engine and its workers;
without it there is none and spans go nowhere.
"""

import time
from collections.abc import Mapping


def record_span(
    headers: Mapping[str, str] | None,
    name: str,
    seconds: float,
    attributes: Mapping[str, int | str],
) -> None:
    """Record a span that ends now, below the one that a request's trace headers name. Any thread.

    Without headers, as of requests that are not traced, nothing happens.
    """
    if not headers:
        return
    # vLLM takes headers only where OpenTelemetry is installed.
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    ended_ns = time.time_ns()
    span = trace.get_tracer("vllm_kvpool").start_span(
        name,
        context=TraceContextTextMapPropagator().extract(headers),
        attributes=dict(attributes),
        start_time=ended_ns - int(1e9 * seconds),
    )
    span.end(ended_ns)
