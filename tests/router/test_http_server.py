"""Connections of the HTTP server: what is sent, and what becomes of it when a client goes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict

from tests.support.player import END, chunk
from tests.support.raw_client import LIMIT_S, RawClient
from tests.support.transport import FakeTransport
from tests.support.upstreams import quick_upstream
from tests.support.waiting import turns, until
from vllm_kvpool.router.config import FrontConfig
from vllm_kvpool.router.control.events import Refuse
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.dataplane.calls import ClientExchange
from vllm_kvpool.router.dataplane.http_server import (
    MAX_PIPELINED,
    ClientGone,
    HttpRequest,
    HttpServer,
    Response,
    ServerLimits,
)
from vllm_kvpool.router.dataplane.request_body import ApiPath, parse_request
from vllm_kvpool.router.dataplane.request_handler import RequestHandler

LIMITS = ServerLimits(
    **{"max_body_bytes": 1000, "max_bodies_bytes": 1000, "max_connections": 10},
    # Longer than a client waits.
    **{"read_timeout_s": 2 * LIMIT_S, "write_timeout_s": 2 * LIMIT_S},
)
IMPATIENT = replace(LIMITS, write_timeout_s=0.2)
Handle = Callable[[HttpRequest], Awaitable[None]]
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def echo(http: HttpRequest) -> None:
    http.respond(Response(200, {}, b"echo " + http.body))


async def forever(http: HttpRequest) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def served(
    handle: Handle = echo, limits: ServerLimits = LIMITS, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[HttpServer, RawClient]]:
    """A server and a client that is connected to it."""
    server = HttpServer(
        *(limits, handle),
        check=lambda http: None,
        refuse=lambda status, why, path: Response(status, {}),
    )
    client = await RawClient.connect(await server.start(host, 0), host)
    try:
        yield server, client
    finally:
        client.close()
        await server.stop(0.0)


@pytest.mark.parametrize(("host", "begin"), [("::1", b"[::1]:"), ("127.0.0.1", b"127.0.0.1:")])
async def test_an_address_of_ipv6_is_told_from_its_port(host: str, begin: bytes) -> None:
    async def handle(http: HttpRequest) -> None:
        http.respond(Response(200, {}, http.client.encode(), closes=True))

    async with served(handle, host=host) as (_, client):
        client.send(GET)
        await client.head()
        assert (await client.rest()).startswith(begin)


async def test_a_stop_waits_for_what_is_being_read_and_served() -> None:
    async with served() as (server, client):
        client.send(POST + b"ab")
        await until(lambda: server.held_bytes, pause_s=0)
        stopping = asyncio.ensure_future(server.stop(5.0))
        await asyncio.sleep(0.02)
        assert not stopping.done()
        client.send(b"cde")
        answer = await client.rest()
        assert b"Connection: close" in answer
        assert answer.endswith(b"echo abcde")
        assert await stopping == 0
        assert not server.connections


async def test_a_refused_body_is_not_kept_behind_a_request_that_is_served() -> None:
    """A refused body no longer counts as held: each connection could have kept one in memory."""
    async with served(forever) as (server, client):
        half = chunk(b"a" * 900)
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.send(GET + head + half)
        await until(lambda: server.held_bytes, pause_s=0)
        client.send(half)  # more than LIMITS.max_body_bytes
        await until(lambda: not server.held_bytes, pause_s=0)
        (connection,) = server.connections
        assert [len(request.received) for request, _ in connection._waiting] == [0]


async def test_a_stop_cuts_off_what_does_not_end() -> None:
    cancelled: list[bool] = []

    async def never(http: HttpRequest) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async with served(never) as (server, client):
        client.send(GET)
        await until(lambda: any(each.task for each in server.connections), pause_s=0)
        assert await server.stop(0.05) == 1
        assert cancelled
        assert await client.rest() == b""


async def test_an_idle_connection_is_closed_by_a_stop_at_once() -> None:
    async with served() as (server, client), asyncio.timeout(LIMIT_S):
        client.send(GET)
        await client.until(b"echo ")
        await server.stop(60.0)
        assert await client.rest() == b""


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_connection_that_comes_as_a_stop_does_keeps_it_from_nothing(num_turns: int) -> None:
    async with served() as (server, _), asyncio.timeout(LIMIT_S):
        late = [asyncio.ensure_future(RawClient.connect(server.port)) for _ in range(4)]
        await turns(num_turns)
        await server.stop(60.0)
        for each in await asyncio.gather(*late, return_exceptions=True):
            if isinstance(each, RawClient):
                with contextlib.suppress(OSError):
                    await each.rest()
                each.close()
        await until(lambda: not server.connections, pause_s=0)


async def test_a_request_that_waits_as_its_client_goes_is_counted_no_more() -> None:
    """Its task was cancelled before it began, and the router refused all bodies in the end."""
    ended = asyncio.Event()

    async def handle(http: HttpRequest) -> None:
        http.respond(Response(200, {}))
        await ended.wait()

    async with served(handle) as (server, _):
        connection = server.connection()
        transport = FakeTransport(connection)
        connection.connection_made(transport)
        connection.data_received(2 * (POST + b"abcde"))
        await asyncio.sleep(0)
        assert server.held_bytes == 10
        ended.set()
        transport.abort()  # in this turn, in which the first has ended
        await turns(5)
        assert server.held_bytes == 0


@pytest.mark.parametrize("closes", [False, True])
async def test_a_client_that_does_not_take_its_answer_is_let_go(closes: bool) -> None:
    async def handle(http: HttpRequest) -> None:
        http.respond(Response(200, {}, b"x" * (64 << 20), closes))

    async with served(handle, IMPATIENT) as (server, client):
        client.send(GET)
        await until(lambda: server.connections, pause_s=0)
        await until(lambda: not server.connections, LIMIT_S)


async def test_a_client_that_takes_no_answers_gets_no_more_of_them() -> None:
    """Pipelined requests wait while the client reads nothing: their answers fill no memory."""
    size, count = 1 << 20, 64
    num_served = 0

    async def handle(http: HttpRequest) -> None:
        nonlocal num_served
        num_served += 1
        http.respond(Response(200, {}, b"x" * size))

    async with served(handle) as (server, client):
        client.send(count * GET)
        await until(lambda: server.connections, pause_s=0)
        (connection,) = server.connections
        await until(lambda: connection.drained is not None, pause_s=0)
        begun = num_served
        await turns(20)
        assert num_served == begun < count
        assert connection._transport.get_write_buffer_size() < 2 * size
        got = 0
        async with asyncio.timeout(LIMIT_S):
            while got < count * size:
                got += len(await client.reader.read(size))
        assert num_served == count


async def test_refused_requests_wait_in_no_larger_number_than_others() -> None:
    async with served(forever) as (server, client), asyncio.timeout(LIMIT_S):
        server.check = lambda http: Response(404, {}) if http.method == "HEAD" else None
        refused = GET.replace(b"GET", b"HEAD")
        client.send(GET)
        await until(lambda: server.connections and next(iter(server.connections)).task, pause_s=0)
        (connection,) = server.connections
        while not connection._is_read_paused:
            client.send(refused)
            await asyncio.sleep(0.001)
        client.send(100 * refused)
        await turns(20)
        assert len(connection._waiting) < 3 * MAX_PIPELINED


async def test_a_client_that_has_gone_is_no_failure_of_the_router(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = asyncio.Event()

    async def late(http: HttpRequest) -> None:
        http.abort()
        try:
            http.respond(Response(200, {}, b"too late"))
        finally:
            done.set()

    async with served(late) as (server, client), asyncio.timeout(LIMIT_S):
        client.send(GET)
        await done.wait()
        await until(lambda: not server.connections, pause_s=0)
    assert not caplog.records


async def test_a_bug_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def bug(http: HttpRequest) -> None:
        raise KeyError("a bug")

    async with served(bug) as (_, client):
        client.send(GET)
        assert (await client.rest()).startswith(b"HTTP/1.1 500 ")
    assert "a request has failed" in caplog.text


async def test_a_request_that_asks_for_another_protocol_is_served_whole() -> None:
    """Java's clients and curl send such requests. The connection's next request is served, too."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    async with served() as (_, client):
        client.send(POST[:-2] + upgrade + POST[-2:] + b"abcde" + GET)
        await client.until(b"echo abcde")
        await client.until(b"echo ")


# Streams

HEADERS = CIMultiDict({"Content-Type": "text/event-stream", "X-Mine": "1"})


async def write(http: HttpRequest, data: bytes) -> None:
    if not http.put(data, HEADERS):
        await http.drain()


async def test_a_stream() -> None:
    async def handle(http: HttpRequest) -> None:
        assert not http.status
        await write(http, b"one")
        assert http.status
        await write(http, b"two")
        await http.end(b"three", HEADERS)

    async with served(handle) as (_, client):
        for _ in range(2):  # the connection stays
            client.send(GET)
            head = await client.head()
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert head.count(b"X-Mine: 1") == 1
            assert head.count(b"Content-Type:") == 1
            assert await client.until(END) == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n" + END


@pytest.mark.parametrize("size", [0, 1, 40_000, 3_000_000])
async def test_a_stream_of_one_part(size: int) -> None:
    async def handle(http: HttpRequest) -> None:
        await http.end(b"x" * size, HEADERS)

    assert await _read_to_its_end(handle) == b"x" * size


async def _read_to_its_end(handle: Handle) -> bytes:
    """The body that a client of HTTP/1.0 gets."""
    async with served(handle) as (_, client):
        client.send(GET.replace(b"1.1", b"1.0"))
        await client.head()
        return await client.rest()


GOES: dict[str, Handle] = {
    "begin": lambda http: write(http, b"x"),
    "send": lambda http: http.send(200, HEADERS, b"x"),
    "end": lambda http: http.end(b"x", HEADERS),
}


@pytest.mark.parametrize(
    ("act", "has_begun", "version"),
    [
        *((act, False, version) for act in GOES for version in (b"1.0", b"1.1")),
        *(("begin", True, b"1.1"), ("end", True, b"1.1")),
    ],
)
async def test_a_client_that_has_gone_is_gone_wherever_it_is_noticed(
    act: str, has_begun: bool, version: bytes
) -> None:
    seen = asyncio.Event()

    async def handle(http: HttpRequest) -> None:
        if has_begun:
            await write(http, b"before")
        http.abort()
        with pytest.raises(ClientGone):
            await GOES[act](http)
        seen.set()

    async with served(handle) as (_, client), asyncio.timeout(LIMIT_S):
        client.send(GET.replace(b"1.1", version))
        await seen.wait()


async def test_a_client_that_takes_nothing_is_let_go() -> None:
    seen: list[str] = []

    async def handle(http: HttpRequest) -> None:
        try:
            while True:
                await write(http, b"x" * 100_000)
        except ClientGone as error:
            seen.append(str(error))

    async with served(handle, IMPATIENT) as (_, client):
        client.send(GET)
        await until(lambda: seen)
        assert seen == ["has taken nothing for 0.2 s (front.client_timeout_s)"]


async def test_what_waits_may_be_cancelled_and_goes_on() -> None:
    """The engine is lost while the client is slow; the next engine's part comes behind."""
    parts = [b"%07d" % number * 10_000 for number in range(100)]
    cancelled: list[int] = []

    async def handle(http: HttpRequest) -> None:
        for number, part in enumerate(parts):
            try:
                async with asyncio.timeout(0.01):
                    await write(http, part)
            except TimeoutError:
                cancelled.append(number)
        await http.end(b"", HEADERS)

    async with served(handle) as (_, client):
        client.send(GET.replace(b"1.1", b"1.0"))
        await until(lambda: len(cancelled) >= 5)
        await client.head()
        assert await client.rest() == b"".join(parts)


async def refuse(http: HttpRequest) -> None:
    """Refuse the request with 503, on the controller's order."""
    one = RequestId("1")
    body = b'{"model":"m","prompt":"x","messages":[]}'
    request = parse_request(ApiPath(http.path), body)
    control: Any = SimpleNamespace(post=lambda event: None)
    headers = CIMultiDict({"X-Request-Id": "1"})
    exchange = ClientExchange(one, request, headers, http, control, quick_upstream(), FrontConfig())
    handler = RequestHandler(exchange)
    handler.enqueue(Refuse(one, 503, 7, "no"))
    await handler.run()


async def test_an_error_is_told_once_and_where_the_client_is() -> None:
    async def within(http: HttpRequest) -> None:
        await write(http, b"data: 1\n\n")
        await refuse(http)

    async def after(http: HttpRequest) -> None:
        await http.end(b"data: 1\n\n", HEADERS)
        await refuse(http)

    paths = (ApiPath.COMPLETION, ApiPath.MESSAGES)
    plain, anthropic = (GET.replace(b"/", each.value.encode(), 1) for each in paths)
    async with served(refuse) as (_, client):
        client.send(plain)
        head = await client.head()
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 7\r\n" in head
    async with served(within) as (_, client):
        client.send(plain)
        assert (await client.head()).startswith(b"HTTP/1.1 200 ")
        body = await client.until(b"\r\n" + END)
        assert b'"code":503' in body
        assert body.endswith(b"data: [DONE]\n\n\r\n" + END)
        client.send(anthropic)
        said = b'{"type":"error","error":{"type":"ServiceUnavailable","message":"no"}}'
        body = await client.until(b"\r\n" + END)
        assert body.endswith(b"event: error\ndata: %b\n\n\r\n" % said + END)
    async with served(after) as (_, client):
        client.send(plain)
        await client.head()
        assert await client.until(END) == chunk(b"data: 1\n\n") + END


async def test_repr_of_a_request_shows_no_key_and_no_body() -> None:
    seen: list[str] = []

    async def handle(http: HttpRequest) -> None:
        seen.append(repr(http))
        http.respond(Response(200, {}))

    async with served(handle) as (_, client):
        client.send(POST.replace(b"Host", b"Authorization: Bearer secret\r\nHost") + b"hello")
        await client.head()
    assert "HttpRequest" in seen[0]
    assert not [each for each in ("secret", "hello") if each in seen[0]]
