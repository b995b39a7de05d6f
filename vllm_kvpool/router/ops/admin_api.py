"""The address for those who run the deployment: status page, state, metrics and orders.

Owned by the router's loop. It reads the controller and posts events; `post` carries an event out
before it returns, so that the answer shows its effect. Without the token nothing is answered
but the page's own files. Orders that cannot be carried out are refused before the controller sees
them.
"""

import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qs, unquote

import msgspec

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.router.config import url_error
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import (
    Added,
    Drain,
    Event,
    Mode,
    Remove,
    ReplicaSpec,
    SetMode,
    SetRole,
)
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.states import MAX_REPLICAS, ReplicaId, Role
from vllm_kvpool.router.dataplane.headers import bearer_token
from vllm_kvpool.router.dataplane.http_server import (
    HttpRequest,
    HttpServer,
    Response,
    ServerLimits,
)
from vllm_kvpool.router.dataplane.origins import Origins
from vllm_kvpool.router.ops.metrics import Telemetry
from vllm_kvpool.router.ops.snapshot import RouterView, plan_of, state_of
from vllm_kvpool.router.ops.tenants import Denied

log = logging.getLogger(__name__)

_ID = re.compile(r"[!-~]{1,128}")


def token_error(authorization: str | None, token: str) -> str | None:
    """Return why a request is refused for its `Authorization`; None if it has the token."""
    if authorization is None:
        return "the token is missing; send 'Authorization: Bearer TOKEN'"
    given = bearer_token(authorization) or ""
    # Whatever bytes a client has sent: they are only compared.
    if hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode()):
        return None
    return "the token is wrong; it is token of [admin], or in the router's log"


MAX_BODY_BYTES = 64 << 10
LIMITS = ServerLimits(
    max_body_bytes=MAX_BODY_BYTES,
    max_bodies_bytes=64 * MAX_BODY_BYTES,
    max_connections=128,
    read_timeout_s=10.0,
    write_timeout_s=10.0,
)
STOP_S = 1.0
PAGE = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/pieces.js": ("pieces.js", "text/javascript"),
    "/shown.js": ("shown.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class _Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of an order."""


class AddOrder(_Order, frozen=True, kw_only=True):
    """An order to add a replica."""

    url: str
    role: Role
    id: str = ""


class RoleOrder(_Order, frozen=True, kw_only=True):
    """An order to give a replica another role."""

    role: Role


class ModeOrder(_Order, frozen=True, kw_only=True):
    """An order to change who plans the roles."""

    mode: Mode


class Admin:
    """Served by the router's loop: `start`, then `stop`."""

    def __init__(
        self,
        controller: Controller,
        post: Callable[[Event], None],
        telemetry: Telemetry,
        token: str,
        *,
        hosts: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
        limits: ServerLimits = LIMITS,
    ) -> None:
        """Prepare to serve.

        `hosts` name the address, `clock` is that of the controller's events.
        """
        self._controller = controller
        self._post = post
        self._telemetry = telemetry
        assert token, "an empty token would let everybody in"
        self._token = token
        self._origins = Origins(tuple(hosts), option="hosts of [admin]")
        self._clock = clock
        page = Path(__file__).with_name("page")
        self._page = {path: (page / name).read_bytes() for path, (name, _) in PAGE.items()}
        self._http = HttpServer(limits, self._handle, check=self._check, refuse=_refuse)

    async def start(self, host: str, port: int) -> int:
        """Listen; the port that it is. OSError if it cannot be had."""
        return await self._http.start(host or None, port)

    async def stop(self) -> None:
        """Close the address; orders under way have STOP_S to end."""
        await self._http.stop(STOP_S)

    def _check(self, http: HttpRequest) -> Response | None:
        """Refuse a request that may not be made, before its body is read."""
        headers = http.headers
        why = self._origins.refusal(headers.get("Host"), headers.get("Origin"))
        if why is not None:
            return _error(403, why)
        if http.method == "GET" and http.path in PAGE:
            return None
        why = token_error(headers.get("Authorization"), self._token)
        return None if why is None else _error(401, why)

    async def _handle(self, http: HttpRequest) -> None:
        http.respond(self._answer(http))

    def _answer(self, http: HttpRequest) -> Response:
        """Return a handler's answer; errors too are JSON."""
        route, replica_id = _route_of(http.path)
        handler = _HANDLERS.get((http.method, route))
        if handler is None:
            allowed = ", ".join(sorted(m for m, path in _HANDLERS if path == route))
            if not allowed:
                known = ", ".join(sorted({path for _, path in ROUTES}))
                return _error(404, f"no {http.path!r} here; there are {known}")
            return _error(405, f"{http.method} is not for {http.path}; use {allowed}")
        try:
            return handler(self, http, replica_id)
        except Denied as error:
            return _error(error.status, str(error))
        except ConfigError as error:
            return _error(409, str(error))

    # To be read

    def _file(self, http: HttpRequest, _: str) -> Response:
        return _response(200, f"{PAGE[http.path][1]}; charset=utf-8", self._page[http.path])

    # Orders

    def _set_mode(self, http: HttpRequest, _: str) -> Response:
        order = _read(http.body, ModeOrder, '{"mode": "manual"}, "dry_run" or "automatic"')
        self._carry_out(SetMode(order.mode))
        return _json(order)

    def _add(self, http: HttpRequest, _: str) -> Response:
        example = '{"url": "http://host:8000", "role": "prefill"} or "decode"'
        order = _read(http.body, AddOrder, example)
        url = order.url.rstrip("/")
        if error := url_error(url):
            raise Denied(400, error)
        replica_id = order.id or url.partition("://")[2]
        if _ID.fullmatch(replica_id) is None:
            why = f"id is {replica_id!r}; choose up to 128 characters without spaces"
            raise Denied(400, why)
        for each in self._fleet:
            if replica_id == each.replica_id or url == each.spec.url:
                raise Denied(409, f"{each.replica_id!r} at {each.spec.url} is there already")
        if len(self._fleet) >= MAX_REPLICAS:
            raise Denied(409, f"there are {MAX_REPLICAS} replicas already; remove some first")
        spec = ReplicaSpec(replica_id=ReplicaId(replica_id), url=url)
        self._carry_out(Added(spec=spec, role=order.role))
        return self._replica(replica_id)

    def _set_role(self, http: HttpRequest, replica_id: ReplicaId) -> Response:
        role = _read(http.body, RoleOrder, '{"role": "prefill"} or "decode"').role
        return self._order(http, SetRole(replica_id, role))

    def _order(self, http: HttpRequest, order: Remove | Drain | SetRole) -> Response:
        """Post an order, and return the replica as it is then.

        Raises Denied if there is no such replica, or no other one serves a role that it ends.
        """
        fleet, replica_id = self._fleet, order.replica
        if replica_id not in fleet:
            known = ", ".join(each.replica_id for each in fleet) or "none"
            raise Denied(404, f"no replica {replica_id!r}; known are: {known}")
        is_forced = parse_qs(http.query).get("force", [""])[-1] in ("1", "true")
        kept = order.role if isinstance(order, SetRole) else None
        for role, serving in ((Role.PREFILL, fleet.prefillers()), (Role.DECODE, fleet.decoders())):
            is_last = [each.replica_id for each in serving] == [replica_id]
            if is_last and role is not kept and not is_forced:
                why = f"no other replica serves {role.value}; add one first, or repeat with "
                raise Denied(409, why + "?force=true")
        self._carry_out(order)
        return self._replica(replica_id)

    @property
    def _fleet(self) -> Fleet:
        return self._controller.state.fleet

    def _view(self) -> RouterView:
        return state_of(self._controller, self._clock())

    def _carry_out(self, event: Event) -> None:
        log.info("an administrator asks: %s", event)
        self._post(event)

    def _replica(self, replica_id: str) -> Response:
        """Return a replica as it is after an order, as `/replicas` shows it."""
        for each in self._view().replicas:
            if each.id == replica_id:
                return _json(each, 202)
        return _json({"id": replica_id, "state": None}, 202)


Handler = Callable[[Admin, HttpRequest, ReplicaId], Response]
"""Answers a request, given the `{id}` in its path."""
ROUTES: Mapping[tuple[str, str], Handler] = {
    ("GET", "/"): Admin._file,
    ("GET", "/state"): lambda admin, *_: _json(admin._view()),
    ("GET", "/metrics"): lambda admin, *_: _response(200, *admin._telemetry.expose()),
    ("GET", "/replicas"): lambda admin, *_: _json({"replicas": admin._view().replicas}),
    ("GET", "/plan"): lambda admin, *_: _json(plan_of(admin._controller)),
    ("POST", "/planner/mode"): Admin._set_mode,
    ("POST", "/replicas"): Admin._add,
    ("DELETE", "/replicas/{id}"): lambda admin, http, of: admin._order(http, Remove(of)),
    ("POST", "/replicas/{id}/drain"): lambda admin, http, of: admin._order(http, Drain(of)),
    ("POST", "/replicas/{id}/role"): Admin._set_role,
}
_HANDLERS = {**{("GET", path): Admin._file for path in PAGE}, **ROUTES}


_T = TypeVar("_T", bound=_Order)


def _read(body: bytes, kind: type[_T], example: str) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise Denied(400, f"{error}; send {example}") from None


def _route_of(path: str) -> tuple[str, ReplicaId]:
    """Return a path as `ROUTES` writes it, and the id in it."""
    match path.split("/"):
        case ["", "replicas", replica_id, *rest]:
            return "/".join(("", "replicas", "{id}", *rest)), ReplicaId(unquote(replica_id))
    return path, ReplicaId("")


def _json(value: object, status: int = 200) -> Response:
    return _response(status, "application/json", msgspec.json.encode(value) + b"\n")


def _error(status: int, error: str) -> Response:
    answer = _json({"error": error}, status)
    if status == 401:
        return answer._replace(headers={**answer.headers, "WWW-Authenticate": "Bearer"})
    return answer


def _refuse(status: int, why: str, _path: str) -> Response:
    """Answer a request that is no HTTP, or breaks a limit of this address."""
    own = {
        408: f"the body has not come within {LIMITS.read_timeout_s:g} s",
        413: f"the body is too large; send at most {MAX_BODY_BYTES} bytes",
    }
    return _error(status, own.get(status, why))


def _response(status: int, content_type: str, body: bytes) -> Response:
    return Response(status, {**HEADERS, "Content-Type": content_type}, body)
