"""All that serves clients: their server, the handlers of their requests, connections to engines.

Decides nothing: that is `ControlPlane`'s, in this process or, over a socket, in another.
"""

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from multidict import CIMultiDict

from vllm_kvpool.router.config import RouterConfig, listen_address
from vllm_kvpool.router.control.requests import Ask, RequestId
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.dataplane.control_client import Handler
from vllm_kvpool.router.dataplane.downstream import Downstream
from vllm_kvpool.router.dataplane.headers import REQUEST_ID
from vllm_kvpool.router.dataplane.messages import Opened, RequestEvent
from vllm_kvpool.router.dataplane.pool_lookup import LEAST_TOKENS, PoolLookup
from vllm_kvpool.router.dataplane.request_body import ClientRequest
from vllm_kvpool.router.dataplane.request_handler import RequestHandler, RouterHooks
from vllm_kvpool.router.dataplane.responses import OK
from vllm_kvpool.router.dataplane.server import Server
from vllm_kvpool.router.dataplane.upstream import (
    EngineLost,
    EngineResponse,
    EngineUnreached,
    Upstream,
)
from vllm_kvpool.router.ops.request_log import Observation, access_log
from vllm_kvpool.router.ops.tenants import Tenants
from vllm_kvpool.router.ops.tracing import Tracing

log = logging.getLogger(__name__)

MAX_OUTPUT_TOKENS = 1 << 20
MAX_PRIORITY = 1 << 62
MAX_CHOICES = 16_384
"""vLLM refuses more (`VLLM_MAX_N_SEQUENCES`)."""


class ControlPlane(Protocol):
    """What a data plane needs decided. Questions raise `Denied` where there is no answer."""

    @property
    def tokens_per_byte(self) -> float:
        """What was learned of prompts."""

    def unknown_tokens(self, ask: Ask) -> int:
        """Prompt tokens that are not known to be in the pool; all of them where nothing is."""

    def begin(self, opened: Opened, handler: Handler) -> None:
        """A request wants a directive; `over` follows."""

    def post(self, event: RequestEvent) -> None:
        """A call to an engine has begun or ended, or the client has gone."""

    def over(self, request_id: RequestId, observed: list[Observation]) -> None:
        """Nothing more comes of a request."""

    def url_of(self, replica: ReplicaId) -> str:
        """Of a replica that a directive has named."""

    async def others(self, replica: ReplicaId) -> list[str]:
        """URLs of engines that answer, that one's last."""

    async def relay_to(self, model: str, tenant: str) -> list[str]:
        """URLs of engines for a call that is only passed on, the least busy first.

        `relay_over` follows.
        """

    def relay_over(self, tenant: str) -> None:
        """Such a call has ended."""

    async def models(self) -> list[dict[str, Any]]:
        """What engines list."""

    async def health(self) -> tuple[int, bytes]:
        """Status and body for `/health`."""

    async def metrics(self) -> tuple[str, bytes]:
        """Content type and body for `/metrics`."""


def upstream_of(config: RouterConfig) -> Upstream:
    """Connections to engines as the configuration says."""
    return Upstream(
        silence_timeout_s=config.front.engine_timeout_s,
        answer_timeout_s=config.front.answer_timeout_s,
        api_key=config.api_key,
    )


def ask_of(
    request_id: RequestId, request: ClientRequest, tokens_per_byte: float, deadline: float
) -> Ask:
    """What the controller is told; numbers that only an engine can refuse are cut to 64 bits."""
    asked = request.max_output_tokens
    most_tokens = MAX_OUTPUT_TOKENS if asked is None else asked
    return Ask(
        request_id=request_id,
        prompt_tokens=max(1, request.prompt_tokens(tokens_per_byte)),
        prompt_bytes=request.prompt_bytes,
        max_output_tokens=min(max(1, most_tokens), MAX_OUTPUT_TOKENS),
        # What an engine will refuse needs no room: none is cleared, and it does not wait.
        num_choices=max(1, request.n) if request.n <= MAX_CHOICES else 1,
        model=request.model,
        prefix=request.prefix,
        prefix_tokens=request.prefix_tokens(tokens_per_byte),
        hands_over=request.wants_handoff,
        priority=min(max(-MAX_PRIORITY, request.priority), MAX_PRIORITY),
        deadline=deadline,
    )


class DataPlane:
    """Owned by its loop; `start`, then `stop`. `name` is part of its requests' ids."""

    def __init__(
        self,
        config: RouterConfig,
        control: ControlPlane,
        upstream: Upstream,
        tenants: Tenants | None,
        *,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._control = control
        self._upstream = upstream
        self._clock = clock
        self._name = name
        self._numbers = itertools.count(1)
        endpoint = config.front.otlp_traces_endpoint
        self._tracing = Tracing(endpoint) if endpoint else None
        url = config.flow.lookup_url
        self._pool_lookup = PoolLookup(url, upstream, clock) if url else None
        self._hooks = RouterHooks(
            upstream=upstream,
            post=control.post,
            url_of=control.url_of,
            others=control.others,
            expect_timeout_ms=config.front.expect_timeout_ms,
            prefill_timeout_s=config.front.answer_timeout_s,
            clock=clock,
        )
        self.server = Server(
            config.front,
            self._serve,
            relay=self._relay,
            models=self._list_models,
            health=control.health,
            metrics=control.metrics,
            tenants=tenants,
            api_key=config.api_key,
        )

    async def start(self, sockets: Sequence[socket.socket] = ()) -> int:
        """Listen, at the configuration's address or at sockets that do; the port. OSError."""
        return await self.server.start(*listen_address(self._config.front.listen), sockets)

    async def stop(self) -> None:
        """Refuse what comes, let end what runs, for a while."""
        await self.server.stop()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _serve(
        self, request: ClientRequest, headers: CIMultiDict[str], downstream: Downstream
    ) -> None:
        control, now = self._control, self._clock()
        request_id = RequestId(f"{self._name}{next(self._numbers)}:{headers[REQUEST_ID]}")
        deadline = now + self._config.front.max_wait_s
        ask = ask_of(request_id, request, control.tokens_per_byte, deadline)
        tracing, path = self._tracing, request.api_path.value
        span = None if tracing is None else tracing.begin(path, headers)
        handler = RequestHandler(request_id, request, headers, downstream, self._hooks)
        if (
            self._pool_lookup is not None
            and ask.prompt_tokens >= LEAST_TOKENS
            and control.unknown_tokens(ask) >= LEAST_TOKENS
        ):
            ask = await self._pool_lookup.ask(request, ask)
        try:
            control.begin(Opened(ask=ask, tenant=request.tenant), handler)
            await handler.run()
        finally:
            ended = self._clock()
            handler.log.end(ended)
            control.over(request_id, handler.log.observed)
            if tracing is not None and span is not None:
                tracing.end(span, handler.log, request.model, downstream.status)
            if self._config.front.access_log:
                of_client = (downstream.client, path, request.model)
                line = handler.log.line(headers[REQUEST_ID], *of_client, downstream.status, ended)
                access_log.info("%s", line)

    async def _relay(
        self, path: str, body: bytes | None, model: str, headers: CIMultiDict[str], tenant: str
    ) -> EngineResponse | None:
        """The answer of an engine that serves a model; None where none has answered."""
        urls = await self._control.relay_to(model, tenant)
        try:
            for url in urls:
                try:
                    if body is None:
                        limit_s = self._config.health.timeout_s
                        return await self._upstream.get(url + path, limit_s, headers)
                    limit_s = self._config.front.engine_timeout_s
                    return await self._upstream.post(url + path, body, headers, limit_s)
                except EngineUnreached:
                    continue
                except EngineLost as error:
                    log.info("%s: %s is lost: %s", path, url, error)
                    return None
            return None
        finally:
            self._control.relay_over(tenant)

    async def _list_models(
        self, headers: CIMultiDict[str]
    ) -> EngineResponse | list[dict[str, Any]]:
        """All that engines list; or what an engine says to a client without a good key."""
        if self._config.api_key:
            answer = await self._relay("/v1/models", None, "", headers, "")
            if answer is not None and answer.status != OK:
                return answer
        return await self._control.models()
