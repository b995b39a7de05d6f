"""Spans of the pool in the traces that vLLM has of requests."""

import time

from tests.support.spans import HEADERS, PARENT_ID, TRACE_ID, exported
from vllm_kvpool.vllm_adapt.tracing import record_span


def test_spans_are_below_the_request_s_and_end_now() -> None:
    attributes = {"kvpool.found_tokens": 64, "kvpool.outcome": "answered"}
    before = time.time_ns()
    with exported() as exporter:
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
