"""The router's process: one loop that feeds the controller and performs what it decides.

Owns the clock, the controller and both servers. Events are applied one after the other, in the
order in which they were posted; actions are performed right away and never wait: those of requests
by their `RequestHandler`, those of replicas by `Replicas`.
"""

import asyncio
import contextlib
import itertools
import logging
import resource
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from multidict import CIMultiDict

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import (
    RouterConfig,
    controller_of,
    launch_hosts,
    read_tenants,
    state_dir,
)
from vllm_kvpool.router.control.events import (
    Abort,
    Action,
    Arrived,
    Cancelled,
    Decode,
    DecodeBegan,
    DecodeEnded,
    Event,
    Load,
    Prefill,
    PrefillEnded,
    Probe,
    Refuse,
    Retire,
    Tick,
    Warm,
)
from vllm_kvpool.router.control.fleet import Transition
from vllm_kvpool.router.control.requests import Ask, RequestId
from vllm_kvpool.router.control.states import UP, ReplicaId
from vllm_kvpool.router.dataplane.downstream import Downstream
from vllm_kvpool.router.dataplane.headers import REQUEST_ID
from vllm_kvpool.router.dataplane.request_body import ClientRequest
from vllm_kvpool.router.dataplane.request_handler import RequestHandler, RouterHooks
from vllm_kvpool.router.dataplane.server import Server
from vllm_kvpool.router.dataplane.upstream import (
    EngineLost,
    EngineResponse,
    EngineUnreached,
    Upstream,
)
from vllm_kvpool.router.ops.admin_api import Admin
from vllm_kvpool.router.ops.discovery import Discovery
from vllm_kvpool.router.ops.metrics import Telemetry
from vllm_kvpool.router.ops.prefetches import Prefetches, prefetch_commands
from vllm_kvpool.router.ops.replicas import Replicas
from vllm_kvpool.router.ops.request_log import RequestLog, access_log
from vllm_kvpool.router.ops.snapshot import health_of
from vllm_kvpool.router.ops.tenants import Tenants
from vllm_kvpool.router.ops.tracing import Tracing

log = logging.getLogger(__name__)

TICK_S = 0.1
SPARE_FILES = 512
MAX_OUTPUT_TOKENS = 1 << 20
MAX_CHOICES = 16_384
"""vLLM refuses more (`VLLM_MAX_N_SEQUENCES`)."""
MAX_ASKED = 3
"""Engines that are asked, one after the other, whether a client's key is good."""
OK = 200


class Router:
    """Owned by its loop; `start`, then `stop`."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.controller = controller_of(config)
        self.prefetches = Prefetches(
            prefetch_commands(config, launch_hosts(config)),
            # Only engines of hosts have logs, and a user without a home may have none.
            state_dir(config) / "logs" if config.hosts else Path(),
        )
        endpoint = config.front.otlp_traces_endpoint
        self._tracing = Tracing(endpoint) if endpoint else None
        self.telemetry = Telemetry(self.controller, self.prefetches.counts, clock=clock)
        self._clock = clock
        self._events: deque[Event] = deque()
        self._is_stepping = False
        self._handlers: dict[RequestId, RequestHandler] = {}
        self._logs: dict[RequestId | None, RequestLog] = {}
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._admin = Admin(
            self.controller,
            self.post,
            self.telemetry,
            admin_token(config),
            hosts=config.admin.hosts,
            clock=clock,
        )
        self._upstream = Upstream(
            connect_timeout_s=config.front.connect_timeout_s,
            silence_timeout_s=config.front.engine_timeout_s,
            answer_timeout_s=config.front.answer_timeout_s,
            api_key=config.api_key,
        )
        fleet = self.controller.state.fleet
        self.replicas = Replicas(config, fleet, self._upstream, self.post)
        self.discovery = Discovery(config, self.post)
        self._hooks = RouterHooks(
            upstream=self._upstream,
            post=self.post,
            url_of=lambda replica: fleet[replica].spec.url,
            learn=self._learn,
            others=self._others,
            expect_timeout_ms=config.front.expect_timeout_ms,
            prefill_timeout_s=config.front.answer_timeout_s,
            named=self.prefetches.learn if self.prefetches.is_on else None,
        )
        keys = config.front.keys_file
        self.tenants = Tenants(read_tenants(Path(keys)), clock) if keys else None
        self.server = Server(
            config.front,
            self._serve,
            relay=self._relay,
            models=self._list_models,
            health=self._health,
            # Clients need not know who serves them.
            metrics=partial(self.telemetry.expose, with_replicas=False),
            tenants=self.tenants,
            api_key=config.api_key,
        )
        self.front_port = 0
        self.admin_port = 0

    @property
    def num_requests(self) -> int:
        """Requests of clients that are not over."""
        return len(self._handlers)

    async def start(self) -> None:
        """Listen, find engines again, and begin to watch and to load them.

        OSError where an address cannot be had, ConfigError where what is left of a former router
        cannot be read; `stop` all the same.
        """
        config = self.config
        self.front_port = await self.server.start(*_address(config.front.listen))
        self.admin_port = await self._admin.start(*_address(config.admin.listen))
        self._tick()
        self.discovery.start()
        await self.replicas.find()

    async def stop(self) -> None:
        """Refuse what comes, let end what runs, for a while; engines of ours end, too, unless they
        are to be kept."""
        await self.server.stop()
        await self._admin.stop()
        # From here on nobody asks the controller: it would start engines anew that end now.
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self.discovery.stop()
            await asyncio.gather(self.replicas.stop(), self.prefetches.close())
        finally:
            await self._upstream.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    # Events and actions

    def post(self, event: Event) -> None:
        """Apply an event, after those that are being applied.

        ConfigError where it is what a person asks for, and cannot be.
        """
        self._events.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        refused: ConfigError | None = None
        try:
            while self._events:
                refused = self._step(self._events.popleft()) or refused
        finally:
            self._is_stepping = False
        if refused is not None:
            raise refused

    def _step(self, event: Event) -> ConfigError | None:
        """The top of the router's lane: a bug in a decision costs that request, and no other."""
        refused: ConfigError | None = None
        request_log = self._logs.get(getattr(event, "request_id", None))
        if request_log is not None:
            request_log.note(event, self._clock(), self.telemetry)
        fleet = self.controller.state.fleet
        num_moves = fleet.num_moves
        try:
            self.controller.step(event, self._clock())
        except ConfigError as error:
            refused = error
        except Exception:
            log.exception("the controller has failed with %s", event)
            self._fail(event)
        if fleet.num_moves > num_moves:
            _log_transitions(list(fleet.transitions)[num_moves - fleet.num_moves :])
        # Also where it has failed: it counts as done what it has decided before.
        for action in list(self.controller.state.actions):
            try:
                self._perform(action)
            except Exception:
                log.exception("%s cannot be performed", action)
                self._fail(action)
        return refused

    def _fail(self, told: Event | Action) -> None:
        """A bug has met a request, if `told` is of one."""
        match told:
            case (
                Cancelled()
                | PrefillEnded()
                | DecodeBegan()
                | DecodeEnded()
                | Prefill()
                | Decode()
                | Refuse()
                | Abort()
            ):
                request_id = told.request_id
            case Arrived(ask):
                request_id = ask.request_id
            case _:
                return
        if request_id in self._handlers:
            self._handlers[request_id].fail()

    def _perform(self, action: Action) -> None:
        match action:
            case Prefill() | Decode() | Refuse():
                self._logs[action.request_id].perform(action, self._clock())
                self._handlers[action.request_id].enqueue(action)
            case Abort(request_id):
                handler = self._handlers.get(request_id)
                if handler is not None:
                    handler.abort()
            case Load() | Warm() | Probe() | Retire():
                self.replicas.perform(action)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self.post(Tick())
        self.prefetches.look(self.controller.state.fleet)

    # Requests

    async def _serve(
        self, request: ClientRequest, headers: CIMultiDict[str], downstream: Downstream
    ) -> None:
        rates = self.controller.state.snapshot()
        now = self._clock()
        request_id = RequestId(f"{next(self._numbers)}:{headers[REQUEST_ID]}")
        tokens = max(1, request.prompt_tokens(rates.tokens_per_byte))
        ask = Ask(
            request_id=request_id,
            prompt_tokens=tokens,
            max_output_tokens=max(1, request.max_output_tokens or MAX_OUTPUT_TOKENS),
            # What an engine will refuse needs no room: none is cleared, and it does not wait.
            num_choices=max(1, request.n) if request.n <= MAX_CHOICES else 1,
            model=request.model,
            prefix=request.prefix,
            prefix_tokens=request.prefix_tokens(rates.tokens_per_byte),
            # Whether a model that no engine has listed is there after all, one engine says.
            hands_over=request.wants_handoff and self.replicas.lists(request.model),
            priority=request.priority,
            deadline=now + self.config.front.max_wait_s,
        )
        handler = RequestHandler(request_id, request, headers, downstream, self._hooks)
        self._handlers[request_id] = handler
        request_log = self._logs[request_id] = RequestLog(now, now)
        tracing, path = self._tracing, request.api_path.value
        span = None if tracing is None else tracing.begin(path, headers)
        try:
            self.post(Arrived(ask))
            await handler.run()
        finally:
            del self._handlers[request_id]
            del self._logs[request_id]
            ended = self._clock()
            self.telemetry.request(ended - now)
            if tracing is not None and span is not None:
                tracing.end(span, request_log, request.model, downstream.status)
            if self.config.front.access_log:
                of_client = (downstream.client, path, request.model)
                line = request_log.line(headers[REQUEST_ID], *of_client, downstream.status, ended)
                access_log.info("%s", line)

    def _learn(self, prompt_tokens: int, prompt_bytes: int) -> None:
        if prompt_tokens and prompt_bytes:
            self.controller.state.rates.counted(self._clock(), prompt_tokens, prompt_bytes)

    def _others(self, replica_id: ReplicaId) -> list[str]:
        up = self.controller.state.fleet.in_states(UP)
        return [
            each.spec.url for each in sorted(up, key=lambda each: each.replica_id == replica_id)
        ]

    async def _relay(
        self, path: str, body: bytes | None, model: str, headers: CIMultiDict[str]
    ) -> EngineResponse | None:
        """The answer of an engine that serves a model; None where none has answered."""
        fleet = self.controller.state.fleet
        model = fleet.listed(model)
        serving = [each for each in fleet.in_states(UP) if each.serves(model)]
        serving.sort(key=lambda each: len(each.active) + len(each.prefills))
        for each in serving[:MAX_ASKED]:
            url = each.spec.url + path
            try:
                if body is None:
                    return await self._upstream.get(url, self.config.health.timeout_s, headers)
                limit_s = self.config.front.engine_timeout_s
                return await self._upstream.post(url, body, headers, limit_s)
            except EngineUnreached:
                continue
            except EngineLost as error:
                log.info("%s: %s is lost: %s", path, each.replica_id, error)
                return None
        return None

    async def _list_models(
        self, headers: CIMultiDict[str]
    ) -> EngineResponse | list[dict[str, Any]]:
        """All that engines list; or what an engine says to a client without a good key."""
        up = self.controller.state.fleet.in_states(UP)
        if self.config.api_key:
            for each in up[:MAX_ASKED]:
                with contextlib.suppress(EngineLost):
                    url, timeout_s = f"{each.spec.url}/v1/models", self.config.health.timeout_s
                    answer = await self._upstream.get(url, timeout_s, headers)
                    if answer.status != OK:
                        return answer
                    break
        found: dict[str, dict[str, Any]] = {}
        for each in up:
            found = {**self.replicas.monitors[each.replica_id].models, **found}
        return list(found.values())

    def _health(self) -> tuple[int, bytes]:
        health = health_of(self.controller.state.fleet)
        return 503 if health.status == "unavailable" else OK, msgspec.json.encode(health)


def _log_transitions(transitions: Iterable[Transition]) -> None:
    for each in transitions:
        before, after, cause = each.before.value, each.after.value, each.cause.value
        log.info("%s: %s -> %s (%s): %s", each.replica, before, after, cause, each.why)


def admin_token(config: RouterConfig) -> str:
    """The token of the configuration, made where there is none; ConfigError if it cannot be."""
    given = config.admin
    if given.token:
        return given.token
    if not given.token_file:
        made = secrets.token_urlsafe(24)
        log.warning("the administration's token, until the router ends: %s", made)
        return made
    path = Path(given.token_file)
    try:
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_urlsafe(24))
            log.info("a token for the administration has been written to %s", path)
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"[admin] token_file cannot be read or written: {error}") from None
    if not token:
        raise ConfigError(f"[admin] token_file {given.token_file} is empty; write a token into it")
    return token


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def allow_connections(max_connections: int) -> int:
    """Let the process have so many of clients, and as many to engines; how many files it may have.

    What the system does not allow is said in the log: further connections will then be refused.
    """
    wanted = 2 * max_connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "%d open files are allowed, %d connections may need %d; raise the limit (ulimit -n)",
            *(allowed, max_connections, wanted),
        )
    return allowed


def serve(config: RouterConfig, read: Callable[[], RouterConfig]) -> None:
    """Run a router until SIGINT or SIGTERM; ConfigError if it cannot listen.

    On SIGHUP replicas (by `read`), keys and the certificate are read again.
    """
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(_serve(config, read))


async def _serve(config: RouterConfig, read: Callable[[], RouterConfig]) -> None:
    allow_connections(config.front.max_connections)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    router = Router(config)

    def reload() -> None:
        changed = read()
        router.discovery.reload(changed)
        if router.tenants is not None:
            router.tenants.replace(read_tenants(Path(config.front.keys_file)))
        router.server.load_certificate()
        if replace(changed, replicas=config.replicas) != config:
            log.warning("SIGHUP: [[replicas]] have been read; other changes need a restart")

    def hang_up() -> None:
        try:
            reload()
        except ConfigError as error:
            log.error("SIGHUP: what could not be read stays as it was: %s", error)

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        await router.start()
    except (OSError, ConfigError) as error:
        await router.stop()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot listen: {error}") from None
    log.info("clients: port %d; administration: port %d", router.front_port, router.admin_port)
    await stopped.wait()
    await router.stop()
