"""OpenTelemetry: a span for each request, from its arrival to its end.

The span continues the client's trace (`traceparent`), and engines are sent it as their parent.
Spans are exported over OTLP/HTTP by a thread of OpenTelemetry's; a collector that is away costs
spans and nothing else.
"""

import asyncio
from typing import TYPE_CHECKING

from multidict import CIMultiDict

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.dataplane.responses import SERVER_ERROR
from vllm_kvpool.router.ops.request_log import RequestLog

if TYPE_CHECKING:
    from opentelemetry.trace import Span

CLOSE_S = 2.0
"""After which a collector that is away is given up, with the spans that are left."""
TRACE_HEADERS = ("traceparent", "tracestate")


class Tracing:
    """Owned by the router's loop; `endpoint` is the collector's URL."""

    def __init__(self, endpoint: str) -> None:
        """Start the exporter; ConfigError without OpenTelemetry's packages."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "[front] otlp_traces_endpoint needs OpenTelemetry; install vllm-kvpool[otel]"
            ) from None
        resource = Resource.create({"service.name": "kvpool-router"})
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("vllm_kvpool.router")

    def begin(self, path: str, headers: CIMultiDict[str]) -> "Span":
        """Begin a request's span; its `headers`, as engines get them, name the new span."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        given = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        span = self._tracer.start_span(
            f"POST {path}", context=propagator.extract(given), kind=SpanKind.SERVER
        )
        made: dict[str, str] = {}
        propagator.inject(made, context=set_span_in_context(span))
        for name in TRACE_HEADERS:
            headers.popall(name, None)
        headers.update(made)
        return span

    def end(self, span: "Span", log: RequestLog, model: str, status: int) -> None:
        """End the span of a request that is over; `status` 0: it has had no answer."""
        from opentelemetry.trace import StatusCode

        span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": log.prompt_tokens,
                "gen_ai.usage.output_tokens": log.output_tokens,
                "http.response.status_code": status,
                "kvpool.replicas": tuple(log.replicas),
                "kvpool.waited_s": log.waited_s,
                "kvpool.prefill_s": log.engine_s,
            }
        )
        if log.first_token is not None:
            span.set_attribute("gen_ai.server.time_to_first_token", log.first_token - log.began)
        if not status:
            span.set_status(StatusCode.ERROR, "the client has gone")
        elif status >= SERVER_ERROR:
            span.set_status(StatusCode.ERROR)
        span.end()

    async def close(self) -> None:
        """Export the remaining spans, for at most `CLOSE_S`.

        A request that the collector leaves unanswered then still takes its time limit.
        """
        # The exporter alone would try each batch for seconds, up to half a minute.
        late = asyncio.get_running_loop().call_later(CLOSE_S, self._exporter.shutdown)
        await asyncio.to_thread(self._provider.shutdown)
        late.cancel()
