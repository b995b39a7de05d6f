"""The part that serves clients: paths of OpenAI's API as vLLM serves it, and requests' way.

Answers itself what needs no engine, and refuses what none would take; every other request is read
whole, parsed, and performed by a `RequestHandler`. Decides nothing: that is `ControlPlane`'s.
"""

import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import msgspec
from multidict import CIMultiDict

from vllm_kvpool.router.config import BODY_COPIES, RouterConfig, listen_address, read_salt
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.dataplane.calls import ClientExchange
from vllm_kvpool.router.dataplane.control_plane import ControlPlane
from vllm_kvpool.router.dataplane.headers import (
    JSON_HEADERS,
    REQUEST_ID,
    SERVER,
    answer_headers,
    request_headers,
    with_headers,
)
from vllm_kvpool.router.dataplane.http_server import (
    HttpRequest,
    HttpServer,
    Response,
    ServerLimits,
)
from vllm_kvpool.router.dataplane.origins import Origins
from vllm_kvpool.router.dataplane.request_body import (
    MAX_ANSWER_BYTES,
    ApiPath,
    BadRequest,
    ClientRequest,
    Salt,
    error_body,
    most_forwarded_bytes,
    parse_forwarded,
    parse_request,
)
from vllm_kvpool.router.dataplane.request_handler import RequestHandler
from vllm_kvpool.router.dataplane.responses import OK, EngineLost, is_answer, without_reserved
from vllm_kvpool.router.dataplane.resume.policy import goes_on_elsewhere
from vllm_kvpool.router.dataplane.upstream import EngineResponse, EngineUnreached, Upstream
from vllm_kvpool.router.ops.request_log import access_log
from vllm_kvpool.router.ops.tenants import Denied, Tenant, Tenants, TenantSalts
from vllm_kvpool.router.ops.tracing import Tracing

log = logging.getLogger(__name__)

MAX_PRIORITY = 1 << 62
_KINDS = {kind.value: kind for kind in ApiPath}
POOLING, EMBED = "/pooling", "/v2/embed"
COUNT_TOKENS = f"{ApiPath.MESSAGES.value}/count_tokens"
_SALTED = frozenset(
    {
        *("/v1/embeddings", EMBED, POOLING, "/classify", "/score", "/v1/score"),
        *("/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring"),
    }
)
"""Forwarded paths whose prompts engines cache. vLLM 0.32 reads a salt on all but `EMBED`."""
_FORWARDED = {
    "/version": ("GET",),
    **dict.fromkeys(("/tokenize", "/detokenize", COUNT_TOKENS, *_SALTED), ("POST",)),
}
"""An engine of the model answers these as they come, without admission: nothing is decoded."""
METHODS = {
    **dict.fromkeys(_KINDS, ("POST",)),
    **_FORWARDED,
    "/ping": ("GET", "POST"),
    **dict.fromkeys(("/v1/models", "/health", "/metrics"), ("GET", "HEAD")),
}


def upstream_of(config: RouterConfig) -> Upstream:
    """Return the connections to engines as the configuration says."""
    return Upstream(
        silence_timeout_s=config.front.engine_timeout_s,
        answer_timeout_s=config.front.answer_timeout_s,
        api_key=config.api_key,
    )


def ask_of(
    request_id: RequestId, request: ClientRequest, tokens_per_byte: float, deadline: float
) -> RequestSpec:
    """Return the controller's form of a request. Numbers are cut to 64 bits; engines judge them."""
    return RequestSpec(
        request_id=request_id,
        prompt_tokens=max(1, request.prompt_tokens(tokens_per_byte)),
        prompt_bytes=request.prompt_bytes,
        max_output_tokens=request.most_tokens,
        num_sequences=request.num_sequences,
        model=request.model,
        prefix=request.prefix,
        prefix_tokens=request.prefix_tokens(tokens_per_byte),
        hands_over=request.wants_handoff,
        goes_on_elsewhere=partial(goes_on_elsewhere, request),
        priority=min(max(-MAX_PRIORITY, request.priority), MAX_PRIORITY),
        deadline=deadline,
    )


class DataPlane:
    """Owned by its loop; `start`, then `stop`.

    With `tenants` clients need one's key; engines are sent the router's own instead of theirs.
    """

    def __init__(
        self,
        config: RouterConfig,
        control: ControlPlane,
        upstream: Upstream,
        tenants: Tenants | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._front = front = config.front
        self._control = control
        self._upstream = upstream
        self._tenants = tenants
        self._salts = TenantSalts(read_salt(Path(front.salt_file))) if front.salt_file else None
        self._clock = clock
        self._numbers = itertools.count(1)
        endpoint = front.otlp_traces_endpoint
        self._tracing = Tracing(endpoint) if endpoint else None
        self._origins = Origins(
            front.hosts,
            option="hosts of [front]",
            listens_at=listen_address(front.listen)[0],
        )
        limits = ServerLimits(
            max_body_bytes=front.max_body_bytes,
            max_bodies_bytes=front.max_bodies_bytes // BODY_COPIES,
            max_connections=front.max_connections,
            connections_option=" (front.max_connections)",
            read_timeout_s=front.read_timeout_s,
            write_timeout_s=front.client_timeout_s,
        )
        self.server = HttpServer(limits, self._handle, check=self._check, refuse=_error)

    async def start(self) -> int:
        """Listen at the configuration's address and return the port. Raises OSError."""
        host, port = listen_address(self._front.listen)
        return await self.server.start(host or None, port)

    async def stop(self) -> int:
        """Listen no more; requests have `shutdown_timeout_s` to end, and are cut off then.

        Returns the number of requests that were cut off.
        """
        num_cut = await self.server.stop(self._front.shutdown_timeout_s)
        if self._tracing is not None:
            await self._tracing.close()
        return num_cut

    def _check(self, http: HttpRequest) -> Response | None:
        """Return the answer to a request that is refused whatever its body is, else None."""
        # vLLM's server decodes paths, and redirects from "/v1/models/" to "/v1/models".
        http.path = unquote(http.path).rstrip("/") or "/"
        allowed = METHODS.get(http.path)
        if allowed is None:
            return _error(404, f"There is no {http.path} here.", http.path)
        if http.method not in allowed:
            refusal = _error(405, f"{http.path} takes {allowed[0]}.", http.path)
            allow = {"Allow": ", ".join(allowed)}
            return refusal._replace(headers=with_headers(refusal.headers, allow))
        if self._tenants is None:
            # No page that a user happens to open has one of the router's keys.
            why = self._origins.refusal(http.headers.get("Host"), http.headers.get("Origin"))
            if why is not None:
                return _error(403, why, http.path)
        if http.headers.get("Content-Encoding", "identity").lower() != "identity":
            # They unpack to any size; vLLM takes none either.
            return _error(415, "Bodies with a Content-Encoding are not taken.", http.path)
        if self._tenants is not None and (http.path.startswith("/v1/") or http.path in _FORWARDED):
            try:
                self._tenants.of(http.headers.get("Authorization"))
            except Denied as denied:
                return self._deny(http, denied)
        return None

    async def _handle(self, http: HttpRequest) -> None:
        try:
            response = await self._answer(http)
        except BadRequest as error:
            response = _own(400, error.body(http.path))
        except Denied as denied:
            self._control.note_refusal(denied.status, str(denied))
            response = self._deny(http, denied)
        if response is not None:
            http.respond(response)

    async def _answer(self, http: HttpRequest) -> Response | None:
        """Answer what is neither admitted nor placed.

        Return None where `_generate` has answered.
        """
        kind = _KINDS.get(http.path)
        if kind is not None:
            await self._generate(http, kind)
            return None
        if http.path in _FORWARDED:
            return await self._forwarded(http)
        if http.path == "/v1/models":
            return await self._list_models(http)
        if http.path in ("/health", "/ping"):
            return _own(*self._control.health())
        content_type, body = self._control.metrics()
        return Response(200, {"Server": SERVER, "Content-Type": content_type}, body)

    async def _generate(self, http: HttpRequest, kind: ApiPath) -> None:
        front = self._front
        tenant = self._tenant_of(http)
        request = parse_request(
            kind,
            http.body,
            is_trusted=front.trust_clients,
            tenant="" if tenant is None else tenant.config.name,
            salt=self._salt_of(tenant),
        )
        length = self._control.model_length(request.model)
        if length is not None:
            request = msgspec.structs.replace(request, model_length=length)
        most = self._config.flow.decode_requests
        if request.num_sequences > most:
            why = f"The request has {request.num_sequences} sequences (prompts times `n`), more "
            raise BadRequest(why + f"than a decoder's {most} (flow.decode_requests).", "n")
        with self._running(tenant, request.model, request.num_sequences):
            await self._serve(http, request)

    async def _serve(self, http: HttpRequest, request: ClientRequest) -> None:
        front = self._front
        headers = self._engine_headers(http)
        if not headers.get(REQUEST_ID):
            headers[REQUEST_ID] = request.own_id or f"{random.getrandbits(128):032x}"
        control, now, tracing = self._control, self._clock(), self._tracing
        request_id = RequestId(f"{next(self._numbers)}:{headers[REQUEST_ID]}")
        ask = ask_of(request_id, request, control.tokens_per_byte, now + front.max_wait_s)
        span = None if tracing is None else tracing.begin(http.path, headers)
        exchange = ClientExchange(
            request_id, request, headers, http, control, self._upstream, front, self._clock
        )
        handler = RequestHandler(exchange)
        try:
            control.begin(ask, handler)
            await handler.run()
        finally:
            ended = self._clock()
            exchange.log.end(ended)
            control.over(request_id, exchange.log)
            if tracing is not None and span is not None:
                tracing.end(span, exchange.log, request.model, http.status)
            if front.access_log:
                line = exchange.log.line(
                    headers[REQUEST_ID],
                    client=http.client,
                    path=http.path,
                    model=request.model,
                    status=http.status,
                    now=ended,
                )
                access_log.info("%s", line)

    def _tenant_of(self, http: HttpRequest) -> Tenant | None:
        """Return the tenant by the request's key; None where engines judge keys. Raises Denied."""
        if self._tenants is None:
            return None
        return self._tenants.of(http.headers.get("Authorization"))

    @contextmanager
    def _running(self, tenant: Tenant | None, model: str, num_sequences: int) -> Iterator[None]:
        """Count a request of a tenant while it runs. Raises Denied."""
        if self._tenants is None or tenant is None:
            yield
            return
        self._tenants.enter(tenant, model, num_sequences)
        try:
            yield
        finally:
            tenant.leave(num_sequences)

    def _salt_of(self, tenant: Tenant | None) -> Salt | None:
        """Return the function that makes a tenant's `cache_salt`; None without `salt_file`."""
        if self._salts is None or tenant is None:
            return None
        return partial(self._salts.of, tenant.config.name)

    def _deny(self, http: HttpRequest, denied: Denied) -> Response:
        """Log a request that its key does not allow, and return the answer."""
        if self._front.access_log:
            line = "client=%s method=%s path=%s status=%d why=%r"
            access_log.info(line, http.client, http.method, http.path, denied.status, str(denied))
        response = _error(denied.status, str(denied), http.path)
        more = {"WWW-Authenticate": "Bearer"} if denied.status == 401 else {}
        if denied.retry_after_s:
            more["Retry-After"] = str(math.ceil(denied.retry_after_s))
        return response._replace(headers=with_headers(response.headers, more))

    def _engine_headers(self, http: HttpRequest) -> CIMultiDict[str]:
        """Return the headers of a client's request that an engine is sent."""
        headers = request_headers(http.headers, is_trusted=self._front.trust_clients)
        if self._tenants is not None:
            # The router has judged the key; engines know its own.
            headers.popall("Authorization", None)
            if self._config.api_key:
                headers["Authorization"] = f"Bearer {self._config.api_key}"
        return headers

    async def _forwarded(self, http: HttpRequest) -> Response:
        body: bytes | None = None
        model, tenant, num_sequences = "", None, 1
        if http.method == "POST":
            tenant = self._tenant_of(http)
            salt = self._salt_of(tenant) if http.path in _SALTED else None
            trusts = self._front.trust_clients
            body, model, num_sequences = parse_forwarded(http.body, is_trusted=trusts, salt=salt)
        with self._running(tenant, model, num_sequences):
            found = await self._forward(http, model, body, num_sequences)
        if found is None:
            why = f"No engine that serves {model or 'a model'} has answered."
            return _error(503, why, http.path)
        return self._of_engine(found, http.path)

    async def _forward(
        self, http: HttpRequest, model: str, body: bytes | None = None, num_sequences: int = 1
    ) -> EngineResponse | None:
        """Return the answer of an engine that serves a model; None where none has answered."""
        path, headers = http.path, self._engine_headers(http)
        limit_s = self._config.health.timeout_s if body is None else None
        most_bytes = most_forwarded_bytes(body or b"", num_sequences)
        if path in (POOLING, EMBED):
            most_bytes = MAX_ANSWER_BYTES  # embeddings of each token, or of objects
        for engine in self._control.forward_to(model):
            with engine as url:
                try:
                    return await self._upstream.ask(url + path, body, headers, limit_s, most_bytes)
                except EngineUnreached:
                    continue
                except EngineLost as error:
                    log.info("%s: %s is lost: %s", path, url, error)
                    return None
        return None

    def _of_engine(self, answer: EngineResponse, path: str) -> Response:
        if not is_answer(answer.status):
            # A redirect leads past the router, and some statuses end an answer before its body.
            return _error(502, f"The engine has answered with status {answer.status}.", path)
        body = answer.body if self._front.trust_clients else without_reserved(answer.body)
        return Response(answer.status, answer_headers(answer.headers), body)

    async def _list_models(self, http: HttpRequest) -> Response:
        """Return the models that engines list, or an engine's refusal of a client's key."""
        if self._config.api_key:
            answer = await self._forward(http, "")
            if answer is not None and answer.status != OK:
                return self._of_engine(answer, http.path)
        found = self._control.models()
        if not found:
            return _error(503, "No engine is up yet.", http.path)
        if (tenants := self._tenants) is not None:
            tenant = tenants.of(http.headers.get("Authorization"))
            found = [each for each in found if tenants.may_use(tenant, str(each.get("id")))]
        return _own(200, msgspec.json.encode({"object": "list", "data": found}))


def _own(status: int, body: bytes) -> Response:
    """Return an answer of the router's own."""
    return Response(status, JSON_HEADERS, body)


def _error(status: int, why: str, path: str) -> Response:
    response = _own(status, error_body(status, why, path))
    if status == 503:
        return response._replace(headers=with_headers(response.headers, {"Retry-After": "1"}))
    return response
