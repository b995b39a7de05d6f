"""The client's end: what is sent, and who has gone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from multidict import CIMultiDict

from tests.support.router_rig import run
from vllm_kvpool.router.dataplane.downstream import ClientGone, Downstream
from vllm_kvpool.router.dataplane.http_server import (
    HttpRequest,
    HttpServer,
    Response,
    ServerLimits,
)

Handle = Callable[[Downstream, HttpRequest], Awaitable[None]]
HEADERS = CIMultiDict({"Content-Type": "text/event-stream", "X-Mine": "1"})
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LIMITS = ServerLimits(
    max_body_bytes=1000, max_bodies_bytes=1000, max_connections=10, read_timeout_s=5.0
)


@asynccontextmanager
async def served(
    handle: Handle, patience_s: float = 5.0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server that answers with `handle`; errors in it come out at the end."""
    errors: list[Exception] = []

    async def answer(http: HttpRequest) -> None:
        try:
            await handle(Downstream(http, patience_s, {}), http)
        except Exception as error:
            errors.append(error)

    server = HttpServer(
        LIMITS,
        answer,
        check=lambda http: None,
        refuse=lambda status, why, path: Response(status, {}),
    )
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await server.stop(1.0)
    if errors:
        raise errors[0]


async def write(client: Downstream, data: bytes) -> None:
    if not client.put(data, HEADERS):
        await client.drain()


async def _whole(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of a chunked answer."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    return head, await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5)


def test_a_stream() -> None:
    async def handle(client: Downstream, http: HttpRequest) -> None:
        assert not client.has_status
        await write(client, b"one")
        assert client.has_status
        await write(client, b"two")
        await client.end(b"three", HEADERS)

    async def main() -> None:
        async with served(handle) as (reader, writer):
            for _ in range(2):  # the connection stays
                writer.write(GET)
                head, body = await _whole(reader)
                assert head.startswith(b"HTTP/1.1 200 OK\r\n")
                assert head.count(b"X-Mine: 1") == 1
                assert head.count(b"Content-Type:") == 1
                assert body == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"

    run(main)


@pytest.mark.parametrize("size", [0, 1, 40_000, 3_000_000])
def test_a_stream_of_one_part(size: int) -> None:
    async def handle(client: Downstream, http: HttpRequest) -> None:
        await client.end(b"x" * size, HEADERS)

    async def main() -> None:
        async with served(handle) as (reader, writer):
            writer.write(GET.replace(b"1.1", b"1.0"))
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.split(b"\r\n\r\n", 1)[1] == b"x" * size

    run(main)


def test_an_answer_in_one_piece() -> None:
    async def handle(client: Downstream, http: HttpRequest) -> None:
        await client.send(418, CIMultiDict({"A": "b"}), b"body")
        await client.tell(500, "too late", "InternalServerError")

    async def main() -> None:
        async with served(handle) as (reader, writer):
            for _ in range(2):
                writer.write(GET)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
                assert head.startswith(b"HTTP/1.1 418 ")
                assert b"Content-Length: 4\r\n" in head
                assert await asyncio.wait_for(reader.readexactly(4), 5) == b"body"

    run(main)


def test_an_error_is_told_once_and_where_the_client_is() -> None:
    async def before(client: Downstream, http: HttpRequest) -> None:
        await client.tell(503, "no", "ServiceUnavailable", {"Retry-After": "7"})

    async def within(client: Downstream, http: HttpRequest) -> None:
        await write(client, b"data: 1\n\n")
        await client.tell(503, "no", "ServiceUnavailable")

    async def after(client: Downstream, http: HttpRequest) -> None:
        await client.end(b"data: 1\n\n", HEADERS)
        await client.tell(503, "no", "ServiceUnavailable")

    async def main() -> None:
        async with served(before) as (reader, writer):
            writer.write(GET)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: 7\r\n" in head
        async with served(within) as (reader, writer):
            writer.write(GET)
            head, body = await _whole(reader)
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b'"code":503' in body
            assert b"data: [DONE]\n\n\r\n0\r\n\r\n" in body
        async with served(within) as (reader, writer):
            writer.write(GET.replace(b"/", b"/v1/messages", 1))
            _, body = await _whole(reader)
            said = b'{"type":"error","error":{"type":"ServiceUnavailable","message":"no"}}'
            assert b"event: error\ndata: %b\n\n\r\n0\r\n\r\n" % said in body
        async with served(after) as (reader, writer):
            writer.write(GET)
            _, body = await _whole(reader)
            assert body == b"9\r\ndata: 1\n\n\r\n0\r\n\r\n"

    run(main)


def test_a_client_that_has_gone_is_gone_wherever_it_is_noticed() -> None:
    async def main() -> None:
        async def begin(client: Downstream) -> None:
            await write(client, b"x")

        async def send(client: Downstream) -> None:
            await client.send(200, HEADERS, b"x")

        async def end(client: Downstream) -> None:
            await client.end(b"x", HEADERS)

        for act in (begin, send, end):
            for has_begun, version in ((False, b"1.1"), (False, b"1.0"), (True, b"1.1")):
                if has_begun and act is send:
                    continue
                seen: list[str] = []

                async def handle(client: Downstream, http: HttpRequest) -> None:
                    if has_begun:  # noqa: B023
                        await write(client, b"before")
                    http.abort()
                    try:
                        await act(client)  # noqa: B023
                    except ClientGone as error:
                        seen.append(str(error))  # noqa: B023

                async with served(handle) as (_, writer):
                    writer.write(GET.replace(b"1.1", version))
                    end_s = asyncio.get_running_loop().time() + 5
                    while not seen and asyncio.get_running_loop().time() < end_s:
                        await asyncio.sleep(0.002)
                assert seen, (act, has_begun)

    run(main)


def test_a_client_that_takes_nothing_is_let_go() -> None:
    async def main() -> None:
        seen: list[str] = []

        async def handle(client: Downstream, http: HttpRequest) -> None:
            try:
                while True:
                    await write(client, b"x" * 100_000)
            except ClientGone as error:
                seen.append(str(error))

        async with served(handle, patience_s=0.2) as (_, writer):
            writer.write(GET)
            end = asyncio.get_running_loop().time() + 5
            while not seen and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.01)
            assert seen == ["has taken nothing for 0.2 s (front.client_timeout_s)"]

    run(main)


def test_what_waits_may_be_cancelled_and_goes_on() -> None:
    """The engine is lost while the client is slow; the next engine's part comes behind."""
    parts = [b"%07d" % number * 10_000 for number in range(100)]

    async def main() -> None:
        cancelled: list[int] = []

        async def handle(client: Downstream, http: HttpRequest) -> None:
            for number, part in enumerate(parts):
                try:
                    async with asyncio.timeout(0.01):
                        await write(client, part)
                except TimeoutError:
                    cancelled.append(number)
            await client.end(b"", HEADERS)

        async with served(handle) as (reader, writer):
            writer.write(GET.replace(b"1.1", b"1.0"))
            await asyncio.sleep(0.3)
            answer = await asyncio.wait_for(reader.read(), 10)
            assert cancelled
            assert answer.split(b"\r\n\r\n", 1)[1] == b"".join(parts)

    run(main)
