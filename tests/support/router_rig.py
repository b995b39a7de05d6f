"""Scripted engines and a real router in front of them, in one event loop, for end-to-end tests.

    async with RouterRig(prefill=1, decode=2) as rig:
        reply = await rig.stream({"prompt": "hello", "max_tokens": 8})

All servers listen at free ports. Each wait has a limit; TimeoutError names the awaited condition.
Leaving the rig checks that no request, call or block is left behind.
"""

import asyncio
import contextlib
import re
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
import uvloop
from multidict import CIMultiDictProxy

from tests.support.player import Answer, Heard, player
from tests.support.raw_client import RawClient
from tests.support.router_invariants import check_controller
from tests.support.scripted_batch import ScriptedPool
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_spec import Fault, FaultKind, ScriptedSpec
from vllm_kvpool.router.config import RouterConfig, read_config
from vllm_kvpool.router.control.states import ReplicaId, State
from vllm_kvpool.router.dataplane.data_plane import DataPlane
from vllm_kvpool.router.dataplane.sse import Events
from vllm_kvpool.router.dataplane.upstream import _target_of
from vllm_kvpool.router.run import Router

T = TypeVar("T")

LIMIT_S = 20.0
POLL_S = 0.002
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DONE = b"[DONE]"
SERVING = (State.PREFILL, State.DECODE)

FAST = ScriptedSpec(step_base_s=0.001, put_s=0.005)
"""An engine that generates a thousand tokens per second for one request."""

QUICK: Mapping[str, Mapping[str, Any]] = {
    "front": {
        **{"listen": "127.0.0.1:0", "read_timeout_s": 5.0, "shutdown_timeout_s": 0.2},
        **{"engine_timeout_s": 5.0, "hosts": ["x"]},
    },
    "admin": {"listen": "127.0.0.1:0"},
    "health": {
        **{"every_s": 0.05, "timeout_s": 1.0, "failures": 2},
        **{"max_failures": 100, "quarantine_s": 0.5},
    },
}
"""Configuration that detects failures soon and makes the choice of the prefill replica certain."""


def quick_router(config: RouterConfig) -> Router:
    """Return a router with short pauses for replicas that have failed or refused work."""
    router = Router(config)
    state = router.controller.state
    state.settings = msgspec.structs.replace(state.settings, busy_pause_s=0.05, retry_pause_s=0.01)
    return router


def run(main: Callable[[], Coroutine[Any, Any, T]], limit_s: float = 60.0) -> T:
    """Run `main` in a loop like the router's own. A handle that `main` leaves open is an error."""

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await main()

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        result = runner.run(limited())
    finally:
        # uvloop warns of an open handle before it closes the handle. A warning that is raised keeps
        # the handle open, and uvloop waits for its end.
        with warnings.catch_warnings(record=True, action="always") as unclosed:
            runner.close()
    assert not unclosed, [str(each.message) for each in unclosed]
    return result


@dataclass(slots=True)
class Reply:
    """A client's reply. A stream has payloads, with the time of arrival of each."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes = b""
    payloads: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    asked_s: float = 0.0

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """Decoded payloads without [DONE]; the decoded body if the answer is in one piece."""
        raw = [each for each in self.payloads if each != DONE] if self.payloads else [self.body]
        return [msgspec.json.decode(each) for each in raw]

    @property
    def json(self) -> Any:
        """The decoded body."""
        return msgspec.json.decode(self.body)

    @property
    def is_done(self) -> bool:
        """True if the stream has ended with [DONE]."""
        return bool(self.payloads) and self.payloads[-1] == DONE

    @property
    def text(self) -> str:
        """Text of choice 0."""
        return "".join(map(_text, self._choices()))

    @property
    def token_ids(self) -> list[int]:
        """Token ids of choice 0, if the client has asked for them."""
        return [each for choice in self._choices() for each in choice.get("token_ids") or ()]

    @property
    def finish_reason(self) -> str | None:
        reasons = [each.get("finish_reason") for each in self._choices()]
        return next((each for each in reasons if each), None)

    @property
    def usage(self) -> dict[str, Any] | None:
        return next((each["usage"] for each in self.chunks if each.get("usage")), None)

    @property
    def error(self) -> dict[str, Any] | None:
        """Error in the last chunk, if any."""
        found: dict[str, Any] | None = self.chunks[-1].get("error") if self.chunks else None
        return found

    @property
    def first_s(self) -> float:
        """Seconds from the request to the first chunk."""
        return self.times_s[0] - self.asked_s

    def plain(self) -> list[bytes]:
        """Return the payloads or the body, with ids and creation times masked."""
        said = self.payloads or [self.body]
        return [_OWN.sub(rb'\1"-"', _OWN_TIME.sub(rb"\g<1>0", each)) for each in said]

    def _choices(self) -> list[dict[str, Any]]:
        every = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return [each for each in every if each["index"] == 0]


def assert_whole(reply: Reply, direct: Reply, what: str = "") -> None:
    """Assert that a client has the answer that a single engine would have given."""
    assert reply.status == direct.status == 200, (what, reply.body)
    assert reply.error is None, (what, reply.error)
    for name in ("text", "token_ids", "finish_reason", "usage", "is_done"):
        assert getattr(reply, name) == getattr(direct, name), (what, name)
    assert len({chunk["id"] for chunk in reply.chunks}) == 1, what


_OWN = re.compile(rb'("id":|"request_id":)"[^"]*"')
_OWN_TIME = re.compile(rb'("created":)\d+')


def _text(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("delta") or choice.get("message") or {}).get("content") or "")


class RouterRig:
    """A router and its engines. `engines` lists prefill engines first, then decode engines."""

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 2,
        *,
        spec: ScriptedSpec = FAST,
        shares: bool = True,
        **config: Any,
    ) -> None:
        """`config`: the router's sections; values of QUICK apply where they are missing.

        `shares` False: each engine has a pool of its own.
        """
        self.pool = ScriptedPool()
        self.spec = spec
        self.engines = [
            ScriptedEngine(spec, self.pool if shares else ScriptedPool())
            for _ in range(prefill + decode)
        ]
        self.reference = ScriptedEngine(spec, None)
        """An engine without pool and faults, for reference answers."""
        self._roles = ["prefill"] * prefill + ["decode"] * decode
        self._config = config | {
            name: {**section, **config.get(name, {})} for name, section in QUICK.items()
        }
        self._routers: list[Router] = []
        self._clients: list[RawClient] = []
        self.ids = [f"r{number}" for number in range(prefill + decode)]

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=LIMIT_S)
        )
        try:
            await self.reference.start()
            for engine in self.engines:
                await engine.start()
            await self.start_router()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                await self.check_idle()
        finally:
            await self._close()

    async def _close(self) -> None:
        """Close everything, even if a close fails: `run` rejects handles that stay open."""
        async with contextlib.AsyncExitStack() as ends:  # in reverse order
            ends.push_async_callback(asyncio.sleep, 0)
            for engine in (self.reference, *self.engines):
                ends.push_async_callback(engine.stop)
            for router in self._routers:
                ends.push_async_callback(router.stop)
            ends.push_async_callback(self.session.close)
            for client in self._clients:
                ends.callback(client.close)

    # The router

    @property
    def router(self) -> Router:
        return self._routers[-1]

    @property
    def data_plane(self) -> DataPlane:
        """The router's data plane, which serves clients."""
        assert self.router.data_plane is not None
        return self.router.data_plane

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.front_port}"

    @property
    def counts(self) -> Mapping[str, int]:
        """The controller's counts of request events."""
        return self.router.controller.state.counts.events

    async def start_router(self, *, waits: bool = True) -> None:
        """Start another router; earlier routers keep running."""
        replicas = [
            {"id": name, "url": engine.url, "role": role}
            for name, engine, role in zip(self.ids, self.engines, self._roles, strict=True)
        ]
        self._routers.append(quick_router(read_config({**self._config, "replicas": replicas})))
        await self.router.start()
        if waits:
            await self.serving()

    def state(self, number: int) -> State | None:
        """Return the state of a replica, or None if the controller has forgotten it."""
        replica = self.router.controller.state.fleet.get(ReplicaId(self.ids[number]))
        return replica.state if replica is not None else None

    async def serving(self) -> None:
        """Wait until all replicas serve and the controller has their metrics."""
        state = self.router.controller.state
        await self.until(
            lambda: all(self.state(number) in SERVING for number in range(len(self.engines))),
            "all serve",
        )
        await self.until(
            lambda: all(each.sampled_at is not None for each in state.fleet), "metrics"
        )

    async def in_state(self, number: int, *states: State) -> None:
        await self.until(lambda: self.state(number) in states, f"{self.ids[number]} is {states}")

    async def until(self, is_so: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait for a condition. TimeoutError names `what`."""
        end = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {limit_s} s; {self.describe()}")
            await asyncio.sleep(POLL_S)

    def describe(self) -> str:
        """Return the states of replicas and requests, for error messages."""
        state = self.router.controller.state
        fleet = {each.replica_id: each.state.value for each in state.fleet}
        phases = {name: each.phase.value for name, each in state.requests.items()}
        return f"{fleet} {phases} {dict(state.counts.events)}"

    async def check_idle(self) -> None:
        """Assert that no request, call or block is left; wait for exchanges that are ending."""
        state = self.router.controller.state
        await self.until(lambda: not self.router._open, "no exchanges are left")
        check_controller(self.router.controller)
        assert not state.requests, self.describe()
        await self.until(lambda: all(each.is_idle for each in state.fleet), "replicas have no work")
        for engine in self.engines:
            core = engine.core
            if core is None:
                continue
            await self.until(lambda core=core: core.batch.is_empty, "engines are idle")  # type: ignore[misc]
            core.batch.check()
            assert core.batch.free_blocks == self.spec.kv_blocks

    # Engines

    def kill(self, number: int) -> None:
        """End an engine's process at once; its port then refuses connections."""
        self.engines[number].fail(Fault(kind=FaultKind.DIE))

    def restart(self, *numbers: int) -> None:
        """Clear the faults of engines and let them start again, without waiting for it."""
        for number in numbers:
            self.engines[number].recover()

    async def recovered(self, *numbers: int) -> None:
        """Restart engines, and wait until all serve."""
        self.restart(*numbers)
        await self.serving()

    def fail(self, numbers: int | Iterable[int], kind: FaultKind, **more: Any) -> None:
        for number in (numbers,) if isinstance(numbers, int) else numbers:
            self.engines[number].fail(Fault(kind=kind, **more))

    @contextlib.asynccontextmanager
    async def played(self, *answers: Answer, then_engines: bool = False) -> AsyncIterator[Heard]:
        """Let a player answer the requests to replicas; health checks still reach the engines.

        Yields the requests that the player received. `then_engines`: once each answer has been
        played, the engines answer again.
        """

        def count(number: int) -> None:
            if then_engines and number == len(answers):
                self._divert()

        async with player(*answers, on_request=count) as (url, heard):
            self._divert(url)
            yield heard
            self._divert()

    def _divert(self, url: str = "") -> None:
        for name, engine in zip(self.ids, self.engines, strict=True):
            replica = self.router.controller.state.fleet[ReplicaId(name)]
            replica.spec = replace(replica.spec, url=url or engine.url)

    async def kept(self, number: int) -> None:
        """Wait until the router keeps a connection to a replica for its next call."""
        url = self.router.controller.state.fleet[ReplicaId(self.ids[number])].spec.url
        origin, _ = _target_of(url)
        await self.until(lambda: self.data_plane._upstream._idle.get(origin), "a kept connection")

    def holders(self) -> list[int]:
        """Return the numbers of engines with unfinished requests."""
        return [
            number
            for number, engine in enumerate(self.engines)
            if engine.core is not None and not engine.core.batch.is_empty
        ]

    # Clients

    def body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request body with defaults for the model, temperature and length."""
        return {"model": self.spec.model, "temperature": 0, "max_tokens": 16, **body}

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        at: ScriptedEngine | None = None,
    ) -> Reply:
        """Send a request to the router, or to engine `at`. `body`: bytes, or a value for JSON."""
        url = (at.url if at is not None else self.url) + path
        given = {"data": body} if isinstance(body, bytes) else {"json": body}
        asked_s = time.monotonic()
        async with self.session.request(method, url, headers=headers, **given) as got:
            reply = Reply(got.status, got.headers, asked_s=asked_s)
            if not got.headers.get("Content-Type", "").startswith("text/event-stream"):
                return replace(reply, body=await got.read())
            events = Events()
            async for data in got.content.iter_any():
                for payload in events.feed(data):
                    reply.payloads.append(payload)
                    reply.times_s.append(time.monotonic())
            return reply

    async def complete(
        self,
        body: Mapping[str, Any],
        path: str = COMPLETIONS,
        headers: Mapping[str, str] | None = None,
        at: ScriptedEngine | None = None,
    ) -> Reply:
        """Request a completion, in one piece unless the body asks for a stream."""
        return await self.ask("POST", path, self.body(body), headers, at)

    async def direct(self, body: Mapping[str, Any], path: str = COMPLETIONS) -> Reply:
        """Return the reference engine's answer."""
        return await self.complete(body, path, at=self.reference)

    async def whole(
        self,
        body: Mapping[str, Any],
        path: str = COMPLETIONS,
        headers: Mapping[str, str] | None = None,
        what: str = "",
    ) -> Reply:
        """Request an answer, and assert that it equals a single engine's."""
        direct = await self.direct(body, path)
        reply = await self.complete(body, path, headers)
        assert_whole(reply, direct, what)
        return reply

    async def stream(
        self,
        body: Mapping[str, Any],
        path: str = COMPLETIONS,
        headers: Mapping[str, str] | None = None,
        at: ScriptedEngine | None = None,
    ) -> Reply:
        """Request a stream and read it to its end."""
        return await self.complete({"stream": True, **body}, path, headers, at)

    async def told(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Return the bytes of an answer, up to its end or the point where the connection breaks."""
        told = b""
        with contextlib.suppress(aiohttp.ClientPayloadError):
            async with self.session.post(self.url + path, json=self.body(body)) as got:
                async for piece in got.content.iter_any():
                    told += piece
        return told

    async def raw(self, data: bytes) -> bytes:
        """Send bytes to the router, and return all bytes until it closes the connection."""
        client = await self.connect()
        client.send(data)
        return await client.rest()

    async def connect(self) -> RawClient:
        """Open a connection for a client that violates HTTP. The rig closes it."""
        self._clients.append(await RawClient.connect(self.router.front_port))
        return self._clients[-1]
