"""Where clients come in: HTTP in the form of OpenAI's API, as vLLM speaks it.

Owns connections and what protects the router from clients: bounds on bodies, connections and on the
time that a request may take to arrive. What is asked for is served by an `Exchange` each.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict

from vllm_kvpool.router.config import FrontConfig
from vllm_kvpool.router.dataplane.bodies import (
    BadRequest,
    ClientRequest,
    Kind,
    error_body,
    parse_request,
)
from vllm_kvpool.router.dataplane.clients import JSON, SERVER, Client
from vllm_kvpool.router.dataplane.cors import preflight, shown_to
from vllm_kvpool.router.dataplane.engines import Answer
from vllm_kvpool.router.dataplane.headers import REQUEST_ID, answer_headers, request_headers

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 << 10
KEEPALIVE_S = 75.0
LINGER_S = 2.0
"""A client that was refused may send the rest of its body for so long, to read the answer."""
WARN_EVERY_S = 10.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BACKLOG = 2048

Serve = Callable[[ClientRequest, CIMultiDict[str], Client], Awaitable[web.StreamResponse]]
ListModels = Callable[[CIMultiDict[str]], Awaitable[Answer | list[dict[str, Any]]]]


class _Guarded(RequestHandler):
    """A connection whose requests must arrive in time, head and all."""

    def __init__(self, manager: web.Server, limit_s: float, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._limit_s = limit_s
        self._late: asyncio.TimerHandle | None = None
        self._is_serving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if not self._is_serving and self._late is None:
            self._await_head()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def head_arrived(self) -> None:
        self._is_serving = True
        self._stop_waiting()

    def answered(self) -> None:
        self._is_serving = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What cannot be read as HTTP, or was met by a bug."""
        self._is_serving = False
        if status < 500:
            log.debug("%s sends what is no HTTP: %r", request.remote, message)
            return _error(status, "The request is not HTTP.", "BadRequestError", closes=True)
        log.error("a request of %s has failed", request.remote, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("its answer has begun already")
        return _error(status, "The router has failed.", "InternalServerError", closes=True)

    def _await_head(self) -> None:
        self._late = asyncio.get_running_loop().call_later(self._limit_s, self.force_close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(web.Server):
    """Makes guarded connections, at most so many at a time."""

    def __init__(self, front: "Front", config: FrontConfig) -> None:
        super().__init__(front.handle, request_factory=self._request, handler_cancellation=True)
        self._config = config
        self._warned_at = float("-inf")

    def __call__(self) -> RequestHandler:
        loop = asyncio.get_running_loop()
        return _Guarded(
            self,
            self._config.read_timeout_s,
            loop=loop,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            access_log=None,
            max_field_size=MAX_HEADER_BYTES,
            max_line_size=MAX_HEADER_BYTES,
            # Bodies that unpack to any size are refused; vLLM takes none either.
            auto_decompress=False,
        )

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        most = self._config.max_connections
        if len(self.connections) > most:
            transport.abort()
            now = asyncio.get_running_loop().time()
            if now - self._warned_at > WARN_EVERY_S:
                self._warned_at = now
                log.warning("more than %d connections: new ones are closed", most)

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: Any,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        assert isinstance(protocol, _Guarded)
        protocol.head_arrived()
        return web.BaseRequest(
            *(message, payload, protocol, writer, task, asyncio.get_running_loop())
        )


class _Refused(Exception):
    """A request that is not served; `response` says why."""

    def __init__(self, response: web.Response) -> None:
        super().__init__(response.status)
        self.response = response


class Front:
    """Owned by the router's loop."""

    def __init__(
        self,
        config: FrontConfig,
        serve: Serve,
        *,
        models: ListModels,
        health: Callable[[], tuple[int, bytes]],
        metrics: Callable[[], tuple[str, bytes]],
    ) -> None:
        self._config = config
        self._serve = serve
        self._models = models
        self._health = health
        self._metrics = metrics
        self._runner: web.ServerRunner | None = None
        self.held_bytes = 0
        """Of bodies that are being read or served."""

    async def start(self, host: str, port: int) -> int:
        """Listen; the port that it is. OSError if it cannot be had."""
        self._runner = web.ServerRunner(
            _Server(self, self._config), shutdown_timeout=self._config.shutdown_timeout_s
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host or None, port, backlog=BACKLOG).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Listen no more; requests have `shutdown_timeout_s` to end, and are cut off then."""
        if self._runner is None:
            return
        # By itself aiohttp waits as long again for those that it has told to end.
        limit_s = self._config.shutdown_timeout_s
        cutting = asyncio.get_running_loop().call_later(limit_s, _cut_off, self._runner.server)
        try:
            await self._runner.cleanup()
        finally:
            cutting.cancel()

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """One request."""
        shown = shown_to(http.headers, self._config.allowed_origins)
        try:
            response = await self._route(http, shown)
        except _Refused as refused:
            response = refused.response
        finally:
            assert isinstance(http.protocol, _Guarded)
            http.protocol.answered()
        if not response.prepared and response.headers.get("Server") == SERVER:
            response.headers.update(shown)
        return response

    async def _route(self, http: web.BaseRequest, shown: dict[str, str]) -> web.StreamResponse:
        path = http.path
        kind = _KINDS.get(path)
        allowed = ("POST",) if kind is not None else _READABLE.get(path)
        if allowed is None:
            raise _Refused(_error(404, f"There is no {path} here.", "NotFoundError"))
        if http.method not in allowed:
            if http.method == "OPTIONS":
                granted = preflight(http.headers, self._config.allowed_origins, allowed)
                if granted is not None:
                    return web.Response(headers={"Server": SERVER} | granted)
            refusal = _error(405, f"{path} takes {allowed[0]}.", "MethodNotAllowed")
            refusal.headers["Allow"] = ", ".join(allowed)
            raise _Refused(refusal)
        if kind is not None:
            return await self._generate(http, kind, shown)
        if path == "/v1/models":
            return await self._list_models(http)
        if path == "/health":
            return _answer(*self._health())
        content_type, body = self._metrics()
        return _answer(200, body, content_type)

    async def _generate(
        self, http: web.BaseRequest, kind: Kind, shown: dict[str, str]
    ) -> web.StreamResponse:
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.read_timeout_s):
                await self._read(http, body)
        except TimeoutError:
            self.held_bytes -= len(body)
            late = "The request's body has not come in time."
            raise _Refused(_error(408, late, "RequestTimeout", closes=True)) from None
        except web.RequestPayloadError as error:
            self.held_bytes -= len(body)
            why = f"The request's body cannot be read: {error}"
            raise _Refused(_error(400, why, "BadRequestError", closes=True)) from None
        except BaseException:
            self.held_bytes -= len(body)
            raise
        try:
            raw = bytes(body)
            body.clear()
            try:
                request = parse_request(kind, raw, is_trusted=self._config.trust_clients)
            except BadRequest as error:
                return _answer(400, error.body())
            headers = request_headers(http.headers, is_trusted=self._config.trust_clients)
            if not headers.get(REQUEST_ID):
                headers[REQUEST_ID] = uuid.uuid4().hex
            client = Client(http, self._config.client_timeout_s, shown)
            return await self._serve(request, headers, client)
        finally:
            self.held_bytes -= len(raw)

    async def _read(self, http: web.BaseRequest, body: bytearray) -> None:
        """Take the body as it comes, all of it or none."""
        most = self._config.max_body_bytes
        if http.headers.get("Content-Encoding", "identity").lower() != "identity":
            why = "Bodies with a Content-Encoding are not taken."
            raise _Refused(_error(415, why, "UnsupportedMediaType", closes=True))
        if (http.content_length or 0) > most:
            raise _Refused(_too_large(most))
        if http.headers.get("Expect", "").lower() == "100-continue":
            await http.writer.write(CONTINUE)
            http.writer.output_size = 0  # the answer has not begun by that
        while chunk := await http.content.readany():
            body += chunk
            self.held_bytes += len(chunk)
            if len(body) > most:
                raise _Refused(_too_large(most))
            if self.held_bytes > self._config.max_bodies_bytes:
                why = "The router holds as many bytes of requests as it may."
                busy = _error(503, why, "ServiceUnavailable", closes=True)
                busy.headers["Retry-After"] = "1"
                raise _Refused(busy)

    async def _list_models(self, http: web.BaseRequest) -> web.StreamResponse:
        found = await self._models(request_headers(http.headers))
        if isinstance(found, Answer):
            headers = answer_headers(found.headers)
            return web.Response(status=found.status, body=found.body, headers=headers)
        if not found:
            return _error(503, "No engine is up yet.", "ServiceUnavailable")
        return _answer(200, msgspec.json.encode({"object": "list", "data": found}))


_KINDS = {kind.value: kind for kind in Kind}
_READABLE = dict.fromkeys(("/v1/models", "/health", "/metrics"), ("GET", "HEAD"))


def _cut_off(server: web.Server | None) -> None:
    for each in server.connections if server is not None else ():
        if each.transport is not None:
            each.transport.abort()


def _answer(status: int, body: bytes, content_type: str = JSON) -> web.Response:
    headers = {"Server": SERVER} | ({"Content-Type": content_type} if body else {})
    return web.Response(status=status, body=body, headers=headers)


def _error(status: int, message: str, kind: str, *, closes: bool = False) -> web.Response:
    response = _answer(status, error_body(message, kind=kind, code=status))
    if closes:
        response.force_close()
    return response


def _too_large(most: int) -> web.Response:
    why = f"The body is larger than {most} bytes."
    return _error(413, why, "RequestEntityTooLarge", closes=True)
