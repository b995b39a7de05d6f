"""Connections of the HTTP server: what becomes of them when it stops, or a client goes."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.certificates import certificate
from tests.support.router_rig import run
from vllm_kvpool.router.dataplane.http_server import (
    HttpRequest,
    HttpServer,
    Response,
    ServerLimits,
)

LIMITS = ServerLimits(
    max_body_bytes=1000, max_bodies_bytes=1000, max_connections=10, read_timeout_s=5.0
)
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def echo(http: HttpRequest) -> None:
    http.respond(Response(200, {}, b"echo " + http.body))


@asynccontextmanager
async def served(
    handle: Callable[[HttpRequest], Awaitable[None]] = echo,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[HttpServer, asyncio.StreamReader, asyncio.StreamWriter]]:
    server = HttpServer(
        LIMITS,
        handle,
        check=lambda http: None,
        refuse=lambda status, why, path: Response(status, {}),
    )
    port = await server.start("127.0.0.1", 0, tls=tls)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield server, reader, writer
    finally:
        writer.close()
        await server.stop(0.0)


def test_an_address_of_ipv6_is_told_from_its_port() -> None:
    async def client_of(host: str) -> str:
        found = asyncio.get_running_loop().create_future()

        async def handle(http: HttpRequest) -> None:
            found.set_result(http.client)
            http.respond(Response(200, {}))

        server = HttpServer(
            LIMITS,
            handle,
            check=lambda http: None,
            refuse=lambda status, why, path: Response(status, {}),
        )
        port = await server.start(host, 0)
        _, writer = await asyncio.open_connection(host, port)
        writer.write(GET)
        client: str = await asyncio.wait_for(found, 5)
        writer.close()
        await server.stop(0.0)
        return client

    async def main() -> None:
        assert (await client_of("::1")).startswith("[::1]:")
        assert (await client_of("127.0.0.1")).startswith("127.0.0.1:")

    run(main)


def test_a_stop_waits_for_what_is_being_read_and_served() -> None:
    async def main() -> None:
        async with served() as (server, reader, writer):
            writer.write(POST + b"ab")
            while not server.held_bytes:
                await asyncio.sleep(0)
            stopping = asyncio.ensure_future(server.stop(5.0))
            await asyncio.sleep(0.02)
            assert not stopping.done()
            writer.write(b"cde")
            answer = await asyncio.wait_for(reader.read(), 5)
            assert b"Connection: close" in answer
            assert answer.endswith(b"echo abcde")
            await asyncio.wait_for(stopping, 5)
            assert not server.connections

    run(main)


def test_a_stop_cuts_off_what_does_not_end() -> None:
    async def main() -> None:
        cancelled: list[bool] = []

        async def never(http: HttpRequest) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        async with served(never) as (server, reader, writer):
            writer.write(GET)
            while not any(each.task for each in server.connections):
                await asyncio.sleep(0)
            await asyncio.wait_for(server.stop(0.05), 5)
            assert cancelled
            assert await asyncio.wait_for(reader.read(), 5) == b""

    run(main)


def test_an_idle_connection_is_closed_by_a_stop_at_once() -> None:
    async def main() -> None:
        async with served() as (server, reader, writer):
            writer.write(GET)
            await asyncio.wait_for(reader.readuntil(b"echo "), 5)
            await asyncio.wait_for(server.stop(60.0), 5)
            assert await asyncio.wait_for(reader.read(), 5) == b""

    run(main)


def test_a_client_that_has_gone_is_no_failure_of_the_router(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        done = asyncio.Event()

        async def late(http: HttpRequest) -> None:
            http.abort()
            try:
                http.respond(Response(200, {}, b"too late"))
            finally:
                done.set()

        async with served(late) as (server, _, writer):
            writer.write(GET)
            await asyncio.wait_for(done.wait(), 5)
            while server.connections:
                await asyncio.sleep(0)

    run(main)
    assert not caplog.records


def test_a_bug_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def bug(http: HttpRequest) -> None:
            raise KeyError("a bug")

        async with served(bug) as (_, reader, writer):
            writer.write(GET)
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 500 ")

    run(main)
    assert "a request has failed" in caplog.text


def test_a_request_that_asks_for_another_protocol_is_served_whole() -> None:
    """As clients of Java and curl send them; what follows on the connection is served, too."""

    async def main() -> None:
        upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
        async with served() as (_, reader, writer):
            head, end = POST[:-2], POST[-2:]
            writer.write(head + upgrade + end + b"abcde" + GET)
            await asyncio.wait_for(reader.readuntil(b"echo abcde"), 5)
            await asyncio.wait_for(reader.readuntil(b"echo "), 5)

    run(main)


def test_tls_handshakes_take_the_places_of_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate(tmp_path, "router")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))

    async def main() -> None:
        async with served(tls=tls) as (server, _, first):
            port = server.port
            silent = [first]
            while len(silent) < LIMITS.max_connections:
                silent.append((await asyncio.open_connection("127.0.0.1", port))[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(reader.read(), 5) == b"", "no place is left"
            writer.close()
            silent[-1].write(b"not TLS" * 100)
            silent[-2].close()

            async def ask() -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
                try:
                    writer.write(GET)
                    return await reader.readuntil(b"echo ")
                finally:
                    writer.close()

            async with asyncio.timeout(5):
                while True:
                    try:
                        assert (await ask()).startswith(b"HTTP/1.1 200 ")
                        break
                    except (OSError, asyncio.IncompleteReadError):
                        await asyncio.sleep(0.01)
            for each in silent:
                each.close()

    run(main)
    assert "more than 10 connections" in caplog.text
