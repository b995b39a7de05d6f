"""The least that a proxy in Python costs: it parses both sides' framing, and decides nothing.

    python -m benchmarks.bare_proxy PORT URL...

Requests go to the engines in turn, over kept connections, answers back as their bytes come, in the
callback of the engine's connection. No bodies are read, no headers judged, no failures handled.
"""

import asyncio
import itertools
import sys
from collections import deque
from typing import ClassVar, cast
from urllib.parse import urlsplit

import httptools
import uvloop


class Client(asyncio.Protocol):
    """A client's connection."""

    engines: ClassVar["itertools.cycle[Engine]"]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.parser = httptools.HttpRequestParser(self)
        self.parts: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        request = b"".join(self.parts)
        self.parts.clear()
        next(self.engines).send(request, self)


class Engine:
    """One engine's connections."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._tasks: set[asyncio.Task[None]] = set()
        self.idle: deque[Upstream] = deque()

    def send(self, request: bytes, client: Client) -> None:
        if self.idle:
            self.idle.pop().send(request, client)
            return
        task = asyncio.get_running_loop().create_task(self._connect(request, client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, request: bytes, client: Client) -> None:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda: Upstream(self.idle), *self._address)
        made.send(request, client)


class Upstream(asyncio.Protocol):
    """A connection to an engine."""

    def __init__(self, idle: "deque[Upstream]") -> None:
        self._idle = idle
        self._client: Client | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._is_complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def send(self, request: bytes, client: Client) -> None:
        self._client, self._is_complete = client, False
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        assert self._client is not None
        client = self._client
        if self._is_complete:
            self._idle.append(self)
        client.transport.write(data)

    def on_message_complete(self) -> None:
        self._is_complete = True


async def serve(port: int, urls: list[str]) -> None:
    """Until it is ended."""
    parts = [urlsplit(url) for url in urls]
    engines = [Engine(each.hostname or "", each.port or 80) for each in parts]
    Client.engines = itertools.cycle(engines)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Client, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2:]))
