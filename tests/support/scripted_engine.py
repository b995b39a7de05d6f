"""A vLLM engine that computes nothing: its OpenAI server, its timing and its ways to fail.

For tests, benchmarks and demos of routers and other clients of engines. One event loop can run many
engines. `python -m tests.support.scripted_engine --port 8000 --count 4` runs four in a process.
`scripted_words` generates the text, `scripted_batch` the timing, `scripted_protocol` the bodies.

An engine keeps its port from `start` to `stop`. While it does not listen, connections are refused.
Owned by one event loop; no call here blocks.
"""

import argparse
import asyncio
import signal
import socket
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import uvloop
from aiohttp import web

from tests.support.scripted_batch import DirectoryPool, ScriptedPool
from tests.support.scripted_core import EngineCore, EngineCounts
from tests.support.scripted_http import Api, Handler, Request
from tests.support.scripted_spec import Fault, FaultBoard, FaultKind, ScriptedSpec

HOST = "127.0.0.1"
BACKLOG = 2048
MAX_BODY_BYTES = 1 << 30
SHUTDOWN_S = 1.0
ABORT_AFTER_S = 0.1  # time for pending output before the connection is aborted


def _make_request(
    message: Any, payload: Any, protocol: Any, writer: Any, task: "asyncio.Task[None]"
) -> Request:
    loop = asyncio.get_running_loop()
    return Request(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)


def _bound(host: str, port: int, is_shared: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
    sock.setblocking(False)
    sock.bind((host, port))
    return sock


class Listener:
    """A reserved port, and a server that can open and close at this port.

    A second socket is bound to the port and never listens. No other process can take the port, and
    connections are refused while the server is closed. OSError if the port is in use.
    """

    def __init__(self, handler: Handler, host: str, port: int, keep_alive_s: float) -> None:
        self.host = host
        if port:
            _bound(host, port, is_shared=False).close()  # a shared socket would not be refused
        self._claim = _bound(host, port, is_shared=True)
        self.port: int = self._claim.getsockname()[1]
        self._web = web.Server(
            handler,
            request_factory=_make_request,
            handler_cancellation=True,
            keepalive_timeout=keep_alive_s,
            access_log=None,
        )
        self._server: asyncio.Server | None = None

    @property
    def is_open(self) -> bool:
        return self._server is not None

    async def open(self) -> None:
        """Listen, if the server does not listen yet."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            sock = _bound(self.host, self.port, is_shared=True)
            # Two steps: a call cancelled after asyncio began to listen would lose the server.
            self._server = await loop.create_server(
                self._web, sock=sock, backlog=BACKLOG, start_serving=False
            )
            await self._server.start_serving()

    def close(self) -> None:
        """Refuse new connections; open connections stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def drop(self) -> None:
        """Close all connections after their pending output."""
        loop = asyncio.get_running_loop()
        for connection in self._web.connections:
            if connection.transport is not None:
                connection.transport.close()
                loop.call_later(ABORT_AFTER_S, connection.transport.abort)

    async def give_up(self) -> None:
        """End all connections and release the port."""
        self.close()
        self.drop()
        await self._web.shutdown(SHUTDOWN_S)
        self._claim.close()


class ScriptedEngine:
    """`async with engine`, or `url = await engine.start()` … `await engine.stop()`."""

    def __init__(
        self,
        spec: ScriptedSpec | None = None,
        pool: ScriptedPool | None = None,
        *,
        host: str = HOST,
        port: int = 0,
    ) -> None:
        self.spec = spec or ScriptedSpec()
        self.pool = pool
        self.counts = EngineCounts()
        self.board = FaultBoard(self._befall)
        self._address = (host, port)
        self._api = Api(self.spec, self.board, self.counts)
        self._listener: Listener | None = None
        self._coming: asyncio.Task[None] | None = None
        self._is_ready = asyncio.Event()

    @property
    def url(self) -> str:
        """URL `http://host:port`, valid after `start`."""
        assert self._listener is not None
        return f"http://{self._listener.host}:{self._listener.port}"

    @property
    def core(self) -> EngineCore | None:
        """Running core, or None while no model is loaded."""
        return self._api.core

    @property
    def running(self) -> EngineCore:
        """Core of an engine with a loaded model."""
        assert self._api.core is not None
        return self._api.core

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> str:
        """Begin to load and return the URL. An engine without load time listens on return."""
        host, port = self._address
        self._listener = Listener(self._api.handle, host, port, self.spec.keep_alive_s)
        if self.spec.load_s:
            if self.spec.listens_while_loading:
                await self._listener.open()
            self._come(0)
        else:
            await self._live(0)
        return self.url

    async def ready(self) -> None:
        """Wait until the engine is loaded and listens."""
        await self._is_ready.wait()

    async def stop(self) -> None:
        """End the engine; requests in progress get no answer."""
        self._die()
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait([self._coming])
        if self._listener is not None:
            await self._listener.give_up()

    def fail(self, fault: Fault | FaultKind) -> None:
        """Set a fault. A fault of the whole engine happens before the call returns."""
        self.board.set(fault if isinstance(fault, Fault) else Fault(kind=fault))

    def recover(self) -> None:
        """Clear all faults and restart the engine if it is down, without waiting for it."""
        self.board.clear()
        self._come(0)

    def _befall(self, fault: Fault) -> None:
        assert self._listener is not None
        match fault.kind:
            case FaultKind.DIE:
                self.counts.deaths += 1
                self._die()
            case FaultKind.REFUSE:
                self._listener.close()
                self._is_ready.clear()
            case _:
                self._freeze(True)
        if fault.seconds:
            self._come(fault.seconds)

    def _die(self) -> None:
        """End the engine's process."""
        if self._coming is not None:
            self._coming.cancel()
        if self._listener is not None:
            self._listener.close()
        self._is_ready.clear()
        if self._api.core is not None:
            self._api.core.stop()
            self._api.core = None
        self._api.thawed.set()
        if self._listener is not None:
            self._listener.drop()

    def _freeze(self, frozen: bool) -> None:
        if self._api.core is not None:
            self._api.core.freeze(frozen)
        if frozen:
            self._api.thawed.clear()
        else:
            self._api.thawed.set()

    def _come(self, after_s: float) -> None:
        """Restart the engine after this many seconds, instead of an earlier planned restart."""
        if self._coming is not None:
            self._coming.cancel()
        self._coming = asyncio.get_running_loop().create_task(self._live(after_s))

    async def _live(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        assert self._listener is not None
        self._freeze(False)
        if self._api.core is None:
            if self.spec.listens_while_loading:
                await self._listener.open()
            await asyncio.sleep(self.spec.load_s)
            self._api.core = EngineCore(self.spec, self.pool, self.counts)
        await self._listener.open()
        self._is_ready.set()


async def _serve(engines: Sequence[ScriptedEngine]) -> None:
    """Run engines until SIGTERM or SIGINT."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    urls = [await engine.start() for engine in engines]
    await asyncio.gather(*(engine.ready() for engine in engines))
    print(*urls, sep="\n")
    print("ready", flush=True)
    await ended.wait()
    await asyncio.gather(*(engine.stop() for engine in engines))


def _arguments() -> argparse.ArgumentParser:
    """Return a parser with an option for each field of the spec."""
    parser = argparse.ArgumentParser(description="vLLM engines that compute nothing.")
    parser.add_argument("--host", default=HOST)
    parser.add_argument("--port", type=int, default=8000, help="of the first; 0: any free ones")
    parser.add_argument("--count", type=int, default=1, help="how many, on consecutive ports")
    parser.add_argument("--pool", default="memory", help="memory, none, or a directory")
    for option in fields(ScriptedSpec):
        name = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            action = argparse.BooleanOptionalAction
            parser.add_argument(name, action=action, default=option.default)
        else:
            parser.add_argument(name, type=type(option.default), default=option.default)
    return parser


def main() -> None:
    given = vars(_arguments().parse_args())
    host, port, count = given.pop("host"), given.pop("port"), given.pop("count")
    pool: ScriptedPool | None = None
    match given.pop("pool"):
        case "none":
            pass
        case "memory":
            pool = ScriptedPool()
        case directory:
            pool = DirectoryPool(Path(directory))
    spec = ScriptedSpec(**given)

    async def run() -> None:
        ports = [port + number if port else 0 for number in range(count)]
        await _serve([ScriptedEngine(spec, pool, host=host, port=each) for each in ports])

    uvloop.run(run())


if __name__ == "__main__":
    main()
