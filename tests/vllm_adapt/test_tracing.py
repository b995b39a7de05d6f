"""Spans of the pool in the traces that vLLM has of requests."""

import time

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from vllm_kvpool.vllm_adapt.tracing import record_span

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


def test_spans_are_below_the_request_s_and_end_now() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)  # as vLLM does in the engine's process
    attributes = {"kvpool.found_tokens": 64, "kvpool.outcome": "answered"}
    before = time.time_ns()
    for headers in (HEADERS, None, {}):
        record_span(headers, "kvpool.lookup", 2.0, attributes)
    [span] = exporter.get_finished_spans()
    assert span.name == "kvpool.lookup"
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (int(TRACE_ID, 16), int(PARENT_ID, 16))
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time - span.start_time == 2_000_000_000
    assert before <= span.end_time <= time.time_ns()
    assert dict(span.attributes or {}) == attributes
    provider.shutdown()
