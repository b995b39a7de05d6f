"""Spans of requests, as a collector gets them from OpenTelemetry's own exporter."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from multidict import CIMultiDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.http_answers import http_server
from tests.support.router_rig import RouterRig
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.ops import tracing
from vllm_kvpool.router.ops.request_log import RequestLog
from vllm_kvpool.router.ops.tracing import Tracing

ASK = {"model": "scripted", "prompt": "tell me of the sea " * 200, "max_tokens": 4}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
AWAY = "http://127.0.0.1:9/v1/traces"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its URL, and the spans that have come."""
    spans: list[Any] = []

    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                spans.extend(scope.spans)
        return 200, b""

    with http_server(answer) as url:
        yield f"{url}/v1/traces", spans


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


async def test_a_request_is_a_span_between_its_client_and_its_engines() -> None:
    seen: list[str] = []
    with collector() as (url, spans):
        async with RouterRig(1, 1, front={"otlp_traces_endpoint": url}) as rig:
            given = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
            await rig.complete(ASK, headers=given)
            seen += [each.counts.last_headers["traceparent"] for each in rig.engines]
            await rig.complete({**ASK, "model": "another"})
    good, refused = spans
    assert good.trace_id.hex() == TRACE_ID
    assert good.parent_span_id.hex() == PARENT_ID
    # Engines of both roles are asked within the span.
    assert seen == [f"00-{TRACE_ID}-{good.span_id.hex()}-01"] * 2
    told = attributes(good)
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.usage.input_tokens"] > 10
    assert 0 < told["gen_ai.server.time_to_first_token"] < 20
    assert len(told["kvpool.replicas"].values) == 2
    assert good.end_time_unix_nano > good.start_time_unix_nano
    assert attributes(refused)["http.response.status_code"] == 404
    assert refused.trace_id != good.trace_id


async def test_a_collector_that_is_away_costs_spans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the end, with as many spans as are kept, each batch of which is tried for seconds."""
    monkeypatch.setattr(tracing, "CLOSE_S", 0.1)

    async with RouterRig(0, 1, front={"otlp_traces_endpoint": AWAY}) as rig:
        assert (await rig.complete({"prompt": "hello", "max_tokens": 2})).status == 200
    full = Tracing(AWAY)
    for _ in range(2048):
        full.end(full.begin("/v1/completions", CIMultiDict()), RequestLog(0.0), "m", 200)
    began = time.monotonic()
    await full.close()
    assert time.monotonic() - began < 10


def test_an_endpoint_is_a_url() -> None:
    replicas = [{"url": "http://a:1", "role": "both"}]
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        read_config({"replicas": replicas, "front": {"otlp_traces_endpoint": "collector"}}, "test")
