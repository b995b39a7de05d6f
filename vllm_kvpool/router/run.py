"""The router's process: one loop that feeds the controller and performs what it decides.

Owns the clock, the controller and both servers. Events are applied one after the other, in the
order in which they were posted; actions are performed right away and never wait: those of requests
by their `RequestHandler`, those of replicas by `Replicas`.
"""

import asyncio
import gc
import logging
import platform
import random
import resource
import secrets
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.private_files import create_secret, read_secret
from vllm_kvpool.router.config import (
    RouterConfig,
    controller_of,
    listen_address,
    read_tenants,
)
from vllm_kvpool.router.control.events import (
    Abort,
    Action,
    Arrived,
    Decode,
    Event,
    Prefill,
    Refuse,
    ReplicaAction,
    RequestMessage,
    Tick,
)
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.states import TAKES_DECODE, TAKES_PREFILL, UP, ReplicaId
from vllm_kvpool.router.dataplane.data_plane import DataPlane, upstream_of
from vllm_kvpool.router.dataplane.request_body import MAX_MODEL_TOKENS
from vllm_kvpool.router.dataplane.request_handler import RequestHandler
from vllm_kvpool.router.ops.admin_api import Admin
from vllm_kvpool.router.ops.discovery import Discovery
from vllm_kvpool.router.ops.metrics import Telemetry
from vllm_kvpool.router.ops.replicas import Replicas
from vllm_kvpool.router.ops.request_log import RequestLog
from vllm_kvpool.router.ops.snapshot import health_of
from vllm_kvpool.router.ops.tenants import Tenants

if TYPE_CHECKING:
    from vllm_kvpool.router.control.fleet import Replica, Transition

log = logging.getLogger(__name__)

TICK_S = 0.1
LENGTHS_EVERY_S = 1.0
REFUSALS_LOGGED_EVERY_S = 10.0
MAX_ASKED = 3
"""Engines that are asked, one after the other, for what is only passed on."""
SPARE_FILES = 512
GC_THRESHOLD = 10_000
"""New objects until the youngest are searched for cycles; Python's 700 are those of one request."""


class Router:
    """The control plane (`ControlPlane`). Owned by its loop; `start`, then `stop`."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.controller = controller_of(config)
        self.telemetry = Telemetry(self.controller, clock=clock)
        self._clock = clock
        self._events: deque[Event] = deque()
        self._is_stepping = False
        self._open: dict[RequestId, RequestHandler] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._unlogged: Counter[int] = Counter()
        """Refusals since the last line of the log, by status."""
        self._last_refusal = ""
        self._lengths: dict[str, int] = {}
        """Lengths of models that `model_length` has read."""
        self._lengths_until = float("-inf")
        self._logged: Transition | None = None
        """The last transition in the log."""
        self._refusals_due = 0.0
        """When refusals may be logged again."""
        self._admin = Admin(
            self.controller,
            self.post,
            self.telemetry,
            admin_token(config),
            hosts=config.admin.hosts,
            clock=clock,
        )
        self._upstream = upstream_of(config)
        fleet = self.controller.state.fleet
        self.replicas = Replicas(config, fleet, self._upstream, self.post)
        self.discovery = Discovery(config, fleet, self.post)
        keys = config.front.keys_file
        self._tenants = Tenants(partial(read_tenants, Path(keys)), clock) if keys else None
        self.data_plane = DataPlane(config, self, self._upstream, self._tenants, clock=clock)
        self.front_port = 0
        self.admin_port = 0

    async def start(self) -> None:
        """Listen, and begin to watch and to load engines.

        OSError where an address cannot be had; `stop` all the same.
        """
        self.front_port = await self.data_plane.start()
        self.admin_port = await self._admin.start(*listen_address(self.config.admin.listen))
        self._tick()
        self.discovery.start()
        self.replicas.start()
        front, admin = self.config.front, self.config.admin
        log.info("clients: %s", _url(front.listen, self.front_port))
        log.info("administration and status page: %s", _url(admin.listen, self.admin_port))

    def reloads(self, read: Callable[[], RouterConfig]) -> Sequence[Callable[[], None]]:
        """Return what SIGHUP does: read replicas (by `read`) and keys again. Raise ConfigError."""
        of_keys = () if self._tenants is None else (self._tenants.reload,)
        return (lambda: self._take_replicas(read()), *of_keys)

    def _take_replicas(self, config: RouterConfig) -> None:
        """Take those of a configuration that has changed."""
        self.discovery.reload(config)
        if replace(config, replicas=self.config.replicas) != self.config:
            log.warning("SIGHUP: [[replicas]] have been read; other changes need a restart")

    async def stop(self) -> None:
        """Refuse what comes, let end what runs, for a while; engines go on."""
        log.info(
            "stopping: no new requests; %d running requests have %g s (front.shutdown_timeout_s)",
            len(self._open),
            self.config.front.shutdown_timeout_s,
        )
        num_cut = await self.data_plane.stop()
        await self._admin.stop()
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self.discovery.stop()
            await self.replicas.stop()
        finally:
            await self._upstream.close()
        log.info("stopped: %d requests were cut off; engines go on", num_cut)

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
        """Perform an event at the top of the router's lane.

        A bug in a decision costs that request, and no other.
        """
        refused: ConfigError | None = None
        try:
            self.controller.step(event, self._clock())
        except ConfigError as error:
            refused = error
        except Exception:
            log.exception("the controller has failed with %s", event)
            self._fail(event)
        self._log_transitions()
        # Also where it has failed: it counts as done what it has decided before.
        for action in list(self.controller.actions):
            try:
                self._perform(action)
            except Exception:
                log.exception("%s cannot be performed", action)
                self._fail(action)
        self._log_refusals()
        return refused

    def note_refusal(self, status: int, why: str) -> None:
        """Count a refused request for the log."""
        self._unlogged[status] += 1
        self._last_refusal = why

    def _log_transitions(self) -> None:
        """Log the replicas' transitions since the last one that was logged."""
        transitions = self.controller.state.fleet.transitions
        last, self._logged = self._logged, transitions[-1] if transitions else None
        new = takewhile(lambda each: each is not last, reversed(transitions))
        for each in reversed(tuple(new)):
            before, after, cause = each.before.value, each.after.value, each.cause.value
            log.info("%s: %s -> %s (%s): %s", each.replica, before, after, cause, each.why)

    def _log_refusals(self) -> None:
        """Log one line for all refusals since the last line: under overload they are many."""
        if not self._unlogged or self._clock() < self._refusals_due:
            return
        counts = sorted(self._unlogged.items())
        numbers = ", ".join(f"{many} with {status}" for status, many in counts)
        log.warning("refused requests: %s; last %s", numbers, self._last_refusal)
        self._unlogged.clear()
        self._refusals_due = self._clock() + REFUSALS_LOGGED_EVERY_S

    def _fail(self, told: Event | Action) -> None:
        """Fail the request that `told` is of, if any: it has met a bug."""
        of_request = told.ask if isinstance(told, Arrived) else told
        if not isinstance(of_request, RequestSpec | RequestMessage):
            return
        if of_request.request_id in self._open:
            self._open[of_request.request_id].fail()

    def _perform(self, action: Action) -> None:
        match action:
            case Prefill() | Decode() | Refuse():
                if isinstance(action, Refuse):
                    self.note_refusal(action.status, f"{action.request_id}: {action.why}")
                self._open[action.request_id].enqueue(action)
            case Abort(request_id, replica):
                if request_id in self._open:
                    self._open[request_id].abort(replica)
            case ReplicaAction():
                self.replicas.perform(action)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self.post(Tick())

    # Requests

    @property
    def tokens_per_byte(self) -> float:
        """Prompt tokens by byte of a request's body, as learned."""
        state = self.controller.state
        return state.rates.current(state.now).tokens_per_byte

    def begin(self, ask: RequestSpec, handler: RequestHandler) -> None:
        """Take a request that waits for a directive; `over` follows."""
        self._open[ask.request_id] = handler
        self.post(Arrived(ask))

    def over(self, request_id: RequestId, course: RequestLog) -> None:
        """Forget an ended request, and count it in the metrics."""
        del self._open[request_id]
        self.telemetry.count_request(course)

    def url_of(self, replica: ReplicaId) -> str:
        """Return the URL of a replica of the fleet."""
        return self.controller.state.fleet[replica].spec.url

    def others(self, replica: ReplicaId) -> list[str]:
        """Return the URLs of engines that answer, that of `replica` last."""
        up = self.controller.state.fleet.in_states(UP)
        return [each.spec.url for each in sorted(up, key=lambda each: each.replica_id == replica)]

    def forward_to(self, model: str) -> list[AbstractContextManager[str]]:
        """Return engines for what is only passed on, the least busy first.

        Each is entered while it is asked, and gives its URL.
        """
        fleet = self.controller.state.fleet
        model = model if model in fleet.listed.groups else ""
        up = fleet.in_states(UP)
        serving = [each for each in up if each.serves(model) and not each.goal.is_final]
        random.shuffle(serving)  # of equally busy ones, not always the first
        serving.sort(
            key=lambda each: (
                each.state not in TAKES_PREFILL | TAKES_DECODE,  # its drain or end would wait
                len(each.work.active) + len(each.work.prefills) + each.num_forwarded,
            )
        )
        return [_forwarding(each) for each in serving[:MAX_ASKED]]

    def model_length(self, model: str) -> int | None:
        """Return the longest `max_model_len` with which engines list a model; "" is any."""
        if (now := self._clock()) >= self._lengths_until:
            self._lengths_until = now + LENGTHS_EVERY_S
            self._lengths = {}
            for each in self.controller.state.fleet.in_states(UP):
                for name, card in self.replicas.monitors[each.replica_id].models.items():
                    length = card.get("max_model_len")
                    if type(length) is int and 0 < length <= MAX_MODEL_TOKENS:
                        self._lengths[name] = max(length, self._lengths.get(name, 0))
            if self._lengths:
                self._lengths[""] = max(self._lengths.values())
        return self._lengths.get(model)

    def models(self) -> list[dict[str, Any]]:
        """Return the models that engines list."""
        found: dict[str, dict[str, Any]] = {}
        for each in self.controller.state.fleet.in_states(UP):
            found = {**self.replicas.monitors[each.replica_id].models, **found}
        return list(found.values())

    def health(self) -> tuple[int, bytes]:
        """Return the status and body for `/health`."""
        health = health_of(self.controller.state.fleet)
        return 503 if health.status == "unavailable" else 200, msgspec.json.encode(health)

    def metrics(self) -> tuple[str, bytes]:
        """Return the content type and body for `/metrics`.

        Clients need not know replicas and tenants.
        """
        return self.telemetry.expose(with_names=False)


@contextmanager
def _forwarding(replica: "Replica") -> Iterator[str]:
    """Count a request that is only passed on, so that its engine is not ended meanwhile."""
    replica.num_forwarded += 1
    try:
        yield replica.spec.url
    finally:
        replica.num_forwarded -= 1


def _url(listen: str, port: int) -> str:
    """Return the URL of an address to listen at; of all addresses, that of this host."""
    host = listen_address(listen)[0]
    if host in ("", "0.0.0.0", "::"):
        host = platform.node()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def admin_token(config: RouterConfig) -> str:
    """Return the token of the configuration, made where there is none.

    Raises ConfigError if it cannot be.
    """
    given = config.admin
    if given.token:
        return given.token
    if not given.token_file:
        made = secrets.token_urlsafe(24)
        log.warning("the administration's token, until the router ends: %s", made)
        return made
    path = Path(given.token_file)
    try:
        if create_secret(path, secrets.token_urlsafe(24)):
            log.info("a token for the administration has been written to %s", path)
    except OSError as error:
        raise ConfigError(
            f"[admin] token_file {path} cannot be written: {error.strerror}"
        ) from None
    token = read_secret(path, "[admin] token_file").decode(errors="replace").strip()
    if not token:
        raise ConfigError(f"[admin] token_file {given.token_file} is empty; write a token into it")
    return token


def read_again(reloads: Sequence[Callable[[], None]]) -> None:
    """Have everything read that can be; the log names the rest."""
    for each in reloads:
        try:
            each()
        except ConfigError as error:
            log.error("SIGHUP: what could not be read stays as it was: %s", error)


async def serve_router(config: RouterConfig, read: Callable[[], RouterConfig]) -> None:
    """Run a router until SIGINT or SIGTERM; ConfigError if it cannot listen.

    A signal that comes while it is made counts, too. On SIGHUP replicas (by `read`) and keys are
    read again.
    """
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    router = Router(config)
    loop.add_signal_handler(signal.SIGHUP, read_again, router.reloads(read))
    try:
        await router.start()
    except (OSError, ConfigError) as error:
        await router.stop()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot listen: {error}") from None
    await stopped.wait()
    await router.stop()


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
            allowed,
            max_connections,
            wanted,
        )
    return allowed


def serve(config: RouterConfig, read: Callable[[], RouterConfig]) -> None:
    """Run a router until SIGINT or SIGTERM; ConfigError if it cannot start.

    On SIGHUP replicas (by `read`) and keys are read again.
    """
    allow_connections(config.front.max_connections)
    new_loop = None
    with suppress(ImportError):
        import uvloop

        new_loop = uvloop.new_event_loop
    # A request makes a thousand objects: those there are from the start are not looked at again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve_router(config, read))
