"""Where clients come in: the paths of OpenAI's API, as vLLM serves it.

Answers itself what needs no engine, and refuses what none would take; every other request is read
whole, parsed, and served by `serve`.
"""

import math
import random
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from multidict import CIMultiDict

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import FrontConfig
from vllm_kvpool.router.dataplane.downstream import JSON_HEADERS, SERVER, Downstream
from vllm_kvpool.router.dataplane.headers import (
    REQUEST_ID,
    Headers,
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
from vllm_kvpool.router.dataplane.request_body import (
    ApiPath,
    BadRequest,
    ClientRequest,
    error_body,
    named_model,
    parse_request,
)
from vllm_kvpool.router.dataplane.upstream import EngineResponse
from vllm_kvpool.router.ops.request_log import access_log
from vllm_kvpool.router.ops.tenants import Denied, Tenants

Serve = Callable[[ClientRequest, CIMultiDict[str], Downstream], Awaitable[None]]
Relay = Callable[[str, bytes | None, str, CIMultiDict[str], str], Awaitable[EngineResponse | None]]
"""Path, body of a POST, model, headers and the tenant whose limits count, or empty; the answer of
an engine that serves the model. Raises `Denied` if there is none."""
ListModels = Callable[[CIMultiDict[str]], Awaitable[EngineResponse | list[dict[str, Any]]]]

_ERRORS = {
    400: "BadRequestError",
    401: "Unauthorized",
    403: "PermissionDenied",
    404: "NotFoundError",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    429: "RateLimitExceeded",
    500: "InternalServerError",
    503: "ServiceUnavailable",
}
_KINDS = {kind.value: kind for kind in ApiPath}
_RELAYED = {
    "/version": ("GET",),
    **dict.fromkeys(("/tokenize", "/detokenize", "/v1/embeddings"), ("POST",)),
}
"""An engine of the model answers these as they come, without admission: nothing is decoded."""
_METHODS = {
    **dict.fromkeys(_KINDS, ("POST",)),
    **_RELAYED,
    "/ping": ("GET", "POST"),
    **dict.fromkeys(("/v1/models", "/health", "/metrics"), ("GET", "HEAD")),
}


class Server:
    """Owned by the router's loop."""

    def __init__(
        self,
        config: FrontConfig,
        serve: Serve,
        *,
        relay: Relay,
        models: ListModels,
        health: Callable[[], Awaitable[tuple[int, bytes]]],
        metrics: Callable[[], Awaitable[tuple[str, bytes]]],
        tenants: Tenants | None = None,
        api_key: str = "",
    ) -> None:
        """`tenants`: who may send requests; engines are sent `api_key` then instead of theirs."""
        self._config = config
        self._serve = serve
        self._relay = relay
        self._models = models
        self._health = health
        self._metrics = metrics
        self._tenants = tenants
        self._api_key = api_key
        self._tls: ssl.SSLContext | None = None
        limits = ServerLimits(
            max_body_bytes=config.max_body_bytes,
            max_bodies_bytes=config.max_bodies_bytes,
            max_connections=config.max_connections,
            read_timeout_s=config.read_timeout_s,
        )
        self._http = HttpServer(limits, self._handle, check=self._check, refuse=_error)

    @property
    def held_bytes(self) -> int:
        """Of bodies that are being read or served."""
        return self._http.held_bytes

    async def start(self, host: str, port: int, sockets: Sequence[socket.socket] = ()) -> int:
        """Listen, there or at sockets that are bound; the port that it is.

        OSError if it cannot be had, ConfigError without its TLS.
        """
        if self._config.tls_certificate:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self.load_certificate()
        return await self._http.start(host or None, port, tls=self._tls, sockets=sockets)

    def load_certificate(self) -> None:
        """Read the certificate, for connections from now on; ConfigError if it cannot be."""
        if self._tls is None:
            return
        files = self._config.tls_certificate, self._config.tls_key
        try:
            # A context that is given a certificate without its key has neither after that.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files)
            self._tls.load_cert_chain(*files)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"[front] tls_certificate and tls_key: {error}") from None

    async def stop(self) -> None:
        """Listen no more; requests have `shutdown_timeout_s` to end, and are cut off then."""
        await self._http.stop(self._config.shutdown_timeout_s)

    def _check(self, http: HttpRequest) -> Response | None:
        """The answer to a request that is not served whatever its body is."""
        refusal = self._refusal(http)
        if refusal is None:
            return None
        shown = shown_to(http.headers, self._config.allowed_origins)
        return refusal._replace(headers=with_headers(refusal.headers, shown))

    def _refusal(self, http: HttpRequest) -> Response | None:
        allowed = _METHODS.get(http.path)
        if allowed is None:
            return _error(404, f"There is no {http.path} here.", http.path)
        if http.method not in allowed:
            if http.method == "OPTIONS":
                granted = preflight(http.headers, self._config.allowed_origins, allowed)
                if granted is not None:
                    return Response(200, {"Server": SERVER} | granted)
            refusal = _error(405, f"{http.path} takes {allowed[0]}.", http.path)
            allow = {"Allow": ", ".join(allowed)}
            return refusal._replace(headers=with_headers(refusal.headers, allow))
        if http.headers.get("Content-Encoding", "identity").lower() != "identity":
            # They unpack to any size; vLLM takes none either.
            return _error(415, "Bodies with a Content-Encoding are not taken.", http.path)
        if self._tenants is not None and (http.path.startswith("/v1/") or http.path in _RELAYED):
            try:
                self._tenants.of(http.headers.get("Authorization"))
            except Denied as denied:
                return self._deny(http, denied)
        return None

    async def _handle(self, http: HttpRequest) -> None:
        shown = shown_to(http.headers, self._config.allowed_origins)
        try:
            kind = _KINDS.get(http.path)
            if kind is not None:
                await self._generate(http, kind, shown)
                return
            response = await self._answer(http)
        except BadRequest as error:
            response = _own(400, error.body(http.path))
        except Denied as denied:
            response = self._deny(http, denied)
        http.respond(response._replace(headers=with_headers(response.headers, shown)))

    async def _answer(self, http: HttpRequest) -> Response:
        """To what is neither admitted nor placed."""
        if http.path in _RELAYED:
            return await self._relayed(http)
        if http.path == "/v1/models":
            return await self._list_models(http)
        if http.path in ("/health", "/ping"):
            return _own(*await self._health())
        content_type, body = await self._metrics()
        return Response(200, {"Server": SERVER, "Content-Type": content_type}, body)

    async def _generate(self, http: HttpRequest, kind: ApiPath, shown: dict[str, str]) -> None:
        request = parse_request(
            kind, http.body, is_trusted=self._config.trust_clients, tenant=self._tenant_of(http)
        )
        headers = self._engine_headers(http)
        if not headers.get(REQUEST_ID):
            headers[REQUEST_ID] = f"{random.getrandbits(128):032x}"
        await self._serve(request, headers, Downstream(http, self._config.client_timeout_s, shown))

    def _tenant_of(self, http: HttpRequest) -> str:
        """Whose key it has; Denied. Empty where engines judge keys."""
        if self._tenants is None:
            return ""
        return self._tenants.of(http.headers.get("Authorization")).config.name

    def _deny(self, http: HttpRequest, denied: Denied) -> Response:
        """The answer to a request that its key does not allow, and its line in the access log."""
        if self._config.access_log:
            line = "client=%s method=%s path=%s status=%d why=%r"
            access_log.info(line, http.client, http.method, http.path, denied.status, str(denied))
        response = _error(denied.status, str(denied), http.path)
        more = {"WWW-Authenticate": "Bearer"} if denied.status == 401 else {}
        if denied.retry_after_s:
            more["Retry-After"] = str(math.ceil(denied.retry_after_s))
        return response._replace(headers=with_headers(response.headers, more))

    def _engine_headers(self, http: HttpRequest) -> CIMultiDict[str]:
        """What an engine is sent of a client's headers."""
        headers = request_headers(http.headers, is_trusted=self._config.trust_clients)
        if self._tenants is not None:
            # The router has judged the key; engines know its own.
            headers.popall("Authorization", None)
            if self._api_key:
                headers["Authorization"] = f"Bearer {self._api_key}"
        return headers

    async def _relayed(self, http: HttpRequest) -> Response:
        is_post = http.method == "POST"
        model = named_model(http.body) if is_post else ""
        body = http.body if is_post else None
        tenant = self._tenant_of(http) if is_post else ""
        found = await self._relay(http.path, body, model, self._engine_headers(http), tenant)
        if found is None:
            why = f"No engine that serves {model or 'a model'} has answered."
            return _error(503, why, http.path)
        return Response(found.status, answer_headers(found.headers), found.body)

    async def _list_models(self, http: HttpRequest) -> Response:
        found = await self._models(self._engine_headers(http))
        if isinstance(found, EngineResponse):
            return Response(found.status, answer_headers(found.headers), found.body)
        if not found:
            return _error(503, "No engine is up yet.", http.path)
        if (tenants := self._tenants) is not None:
            tenant = tenants.of(http.headers.get("Authorization"))
            found = [each for each in found if tenants.may_use(tenant, str(each.get("id")))]
        return _own(200, msgspec.json.encode({"object": "list", "data": found}))


def _own(status: int, body: bytes) -> Response:
    """An answer of the router's own."""
    return Response(status, JSON_HEADERS, body)


def _error(status: int, why: str, path: str) -> Response:
    response = _own(status, error_body(why, kind=_ERRORS[status], code=status, path=path))
    if status == 503:
        return response._replace(headers=with_headers(response.headers, {"Retry-After": "1"}))
    return response


ANY = "*"
MAX_AGE_S = 600


def shown_to(headers: Headers, allowed: Sequence[str]) -> dict[str, str]:
    """Headers with which the page that has sent a request with `headers` may read the answer."""
    origin = headers.get("Origin")
    if origin is None or not allowed:
        return {}
    if ANY in allowed:
        return {"Access-Control-Allow-Origin": ANY}
    vary = {"Vary": "Origin"}
    return {"Access-Control-Allow-Origin": origin, **vary} if origin in allowed else vary


def preflight(
    headers: Headers, allowed: Sequence[str], methods: Sequence[str]
) -> dict[str, str] | None:
    """Headers of the answer to a browser that asks before a request; None if it may not send it."""
    shown = shown_to(headers, allowed)
    if (
        "Access-Control-Allow-Origin" not in shown
        or headers.get("Access-Control-Request-Method") not in methods
    ):
        return None
    wanted = headers.get("Access-Control-Request-Headers")
    return {
        **shown,
        "Access-Control-Allow-Methods": ", ".join(methods),
        "Access-Control-Max-Age": str(MAX_AGE_S),
        **({"Access-Control-Allow-Headers": wanted} if wanted else {}),
    }
