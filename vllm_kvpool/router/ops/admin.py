"""The address for those who run the deployment: status page, state, metrics and orders.

Owned by the router's loop. It reads the controller and posts events; `post` carries an event out
before it returns, so that the answer can say what follows. Without the token nothing is answered
but the page's own files.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import Event
from vllm_kvpool.router.ops import orders
from vllm_kvpool.router.ops.access import Access, Denial
from vllm_kvpool.router.ops.orders import OrderError
from vllm_kvpool.router.ops.shown import RouterView
from vllm_kvpool.router.ops.telemetry import Telemetry
from vllm_kvpool.router.ops.view import plan_now, plan_of, state_of

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 10
READ_TIMEOUT_S = 10.0
ROUTES = {
    ("GET", "/"): "The status page. It asks for the token.",
    ("GET", "/state"): "Everything the page shows, as JSON.",
    ("GET", "/metrics"): "Metrics for Prometheus.",
    ("GET", "/replicas"): "The replicas alone.",
    ("GET", "/plan"): "What the plan would be now, and its steps. Nothing follows.",
    ("POST", "/planner/mode"): "`mode`: `manual`, `dry_run` or `automatic`.",
    ("POST", "/replicas"): (
        "Add an engine that runs: `url`, `role`; `id` and `host` may be left out. "
        "It gets requests once it is healthy and has answered one."
    ),
    ("POST", "/replicas/spawn"): "Start an engine: `role`; without `host` where it is best.",
    ("DELETE", "/replicas/{id}"): "Drain it, then forget it. One of ours is stopped.",
    ("POST", "/replicas/{id}/drain"): "Let its work end; then it is a warm standby.",
    ("POST", "/replicas/{id}/role"): "`role`: what it is to serve, once it has ended what it does.",
    ("POST", "/instances/add"): "`type` and `instances` (`host:port`), as of vLLM-Ascend's proxy.",
    ("POST", "/instances/remove"): "The same. They are drained first, whatever their role is now.",
}
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
    "Content-Security-Policy": "; ".join(
        (
            *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'"),
            *("connect-src 'self'", "base-uri 'none'", "form-action 'none'"),
            *(
                "frame-ancestors 'none'",
                "require-trusted-types-for 'script'",
                "trusted-types 'none'",
            ),
        )
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Admin:
    """`app()` is to be served by the router's loop."""

    def __init__(
        self,
        controller: Controller,
        post: Callable[[Event], None],
        telemetry: Telemetry,
        token: str,
        *,
        hosts: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hosts`: names that the address goes by. `clock` is that of the controller's events."""
        self._controller = controller
        self._post = post
        self._telemetry = telemetry
        self._access = Access(token, hosts)
        self._clock = clock
        page = Path(__file__).with_name("page")
        self._page = {path: (page / name).read_bytes() for path, (name, _) in PAGE.items()}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._middleware()])
        handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/"): self._file,
            ("GET", "/state"): self._state,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/replicas"): self._replicas,
            ("GET", "/plan"): self._plan,
            ("POST", "/planner/mode"): self._set_mode,
            ("POST", "/replicas"): self._add,
            ("POST", "/replicas/spawn"): self._spawn,
            ("DELETE", "/replicas/{id}"): self._remove,
            ("POST", "/replicas/{id}/drain"): self._drain,
            ("POST", "/replicas/{id}/role"): self._set_role,
            ("POST", "/instances/add"): self._add_instances,
            ("POST", "/instances/remove"): self._remove_instances,
        }
        assert handlers.keys() == ROUTES.keys()
        for (method, path), handler in handlers.items():
            app.router.add_route(method, path, handler)
        for path in PAGE.keys() - {"/"}:
            app.router.add_get(path, self._file, allow_head=False)
        return app

    def _middleware(self) -> Middleware:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await self._answer(request, handler)
            response.headers.update(HEADERS)
            return response

        return guarded

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A handler's answer; whatever goes wrong is said in JSON."""
        if (denial := self._denial(request)) is not None:
            return _error(denial.status, denial.error)
        try:
            return await handler(request)
        except OrderError as error:
            return _error(error.status, str(error))
        except ConfigError as error:
            return _error(409, str(error))
        except web.HTTPNotFound:
            known = ", ".join(sorted({path for _, path in ROUTES}))
            return _error(404, f"no {request.path!r} here; there are {known}")
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            return _error(405, f"{request.method} is not for {request.path}; use {allowed}")
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is too large; send at most {MAX_BODY_BYTES} bytes")

    def _denial(self, request: web.Request) -> Denial | None:
        headers = request.headers
        denial = self._access.check_place(headers.get("Host"), headers.get("Origin"))
        if denial is not None or (request.method == "GET" and request.path in PAGE):
            return denial
        return self._access.check_token(headers.get("Authorization"))

    # To be read

    async def _file(self, request: web.Request) -> web.Response:
        content_type = PAGE[request.path][1]
        return web.Response(
            body=self._page[request.path], content_type=content_type, charset="utf-8"
        )

    async def _state(self, _request: web.Request) -> web.Response:
        return _json(self._view())

    async def _replicas(self, _request: web.Request) -> web.Response:
        return _json({"replicas": self._view().replicas})

    async def _metrics(self, _request: web.Request) -> web.Response:
        content_type, body = self._telemetry.expose()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _plan(self, _request: web.Request) -> web.Response:
        return _json(plan_now(self._controller))

    # Orders

    async def _set_mode(self, request: web.Request) -> web.Response:
        self._carry_out(orders.set_mode(await _body(request)))
        return _json({"mode": plan_of(self._controller).mode})

    async def _add(self, request: web.Request) -> web.Response:
        event = orders.add(self._view(), await _body(request))
        self._carry_out(event)
        return self._following(event.spec.replica_id)

    async def _spawn(self, request: web.Request) -> web.Response:
        event = orders.spawn(await _body(request))
        before = {each.id for each in self._view().replicas}
        self._carry_out(event)
        (started,) = [each.id for each in self._view().replicas if each.id not in before]
        return self._following(started)

    async def _remove(self, request: web.Request) -> web.Response:
        replica_id = request.match_info["id"]
        self._carry_out(orders.remove(self._view(), replica_id, force=_is_forced(request)))
        return self._following(replica_id)

    async def _drain(self, request: web.Request) -> web.Response:
        replica_id = request.match_info["id"]
        self._carry_out(orders.drain(self._view(), replica_id, force=_is_forced(request)))
        return self._following(replica_id)

    async def _set_role(self, request: web.Request) -> web.Response:
        replica_id, body = request.match_info["id"], await _body(request)
        force = _is_forced(request)
        self._carry_out(orders.set_role(self._view(), replica_id, body, force=force))
        return self._following(replica_id)

    async def _add_instances(self, request: web.Request) -> web.Response:
        events = orders.add_instances(self._view(), await _body(request))
        for event in events:
            self._carry_out(event)
        names = [event.spec.replica_id for event in events]
        message = f"Instances {names} are waiting to be added." if names else "Nothing to add."
        return _json(orders.instances_answer(self._view(), message))

    async def _remove_instances(self, request: web.Request) -> web.Response:
        body, view, force = await _body(request), self._view(), _is_forced(request)
        events = orders.remove_instances(view, body, force=force)
        for event in events:
            self._carry_out(event)
        names = orders.addresses(view, [event.replica for event in events])
        message = f"Instances {names} are isolated and waiting to be removed."
        return _json(orders.instances_answer(self._view(), message))

    def _view(self) -> RouterView:
        return state_of(self._controller, self._clock())

    def _carry_out(self, event: Event) -> None:
        log.info("an administrator asks: %s", event)
        self._post(event)

    def _following(self, replica_id: str) -> web.Response:
        found = [each for each in self._view().replicas if each.id == replica_id]
        return _json(orders.follows(replica_id, found[0] if found else None), 202)


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise OrderError(408, f"the body has not come within {READ_TIMEOUT_S:g} s") from None


def _is_forced(request: web.Request) -> bool:
    return request.query.get("force") in ("1", "true")


def _json(value: object, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value) + b"\n"
    return web.Response(body=body, status=status, content_type="application/json")


def _error(status: int, error: str) -> web.Response:
    response = _json({"error": error}, status)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
