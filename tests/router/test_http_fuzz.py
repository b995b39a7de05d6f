"""Mutated requests and responses: no crash, and one reading of each message or none.

An accepted message must have the same reading for every division into reads. `h11`, an independent
parser, must agree unless it refuses the message. `HTTP_FUZZ` is the number of mutated inputs for
requests and again for responses; `HTTP_FUZZ_SEED` is their random seed (`make fuzz`).
"""

import asyncio
import os
import random
import re
from collections.abc import Sequence
from itertools import pairwise

import h11
import pytest

from tests.support.transport import FakeTransport
from tests.support.upstreams import quick_upstream
from tests.support.waiting import turns
from vllm_kvpool.router.dataplane.http_server import HttpRequest, HttpServer, Response, ServerLimits
from vllm_kvpool.router.dataplane.responses import EngineLost
from vllm_kvpool.router.dataplane.upstream import UpstreamConnection

RUNS = int(os.environ.get("HTTP_FUZZ", "3000"))
SEED = int(os.environ.get("HTTP_FUZZ_SEED", "7"))
LIMIT_S = 300 + RUNS // 500

pytestmark = pytest.mark.timeout(LIMIT_S)
LIMITS = ServerLimits(
    **{"max_body_bytes": 2000, "max_bodies_bytes": 1 << 20, "max_connections": 10},
    **{"read_timeout_s": 60.0, "write_timeout_s": 5.0},
)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"model":"m","prompt":"hello"}'
REQUESTS = (
    HEAD + b"Content-Length: 30\r\n\r\n" + BODY,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n1e\r\n" + BODY + b"\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n5;x=y\r\ndefgh\r\n0\r\nT: v\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /v1/models?a=b HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET http://x/health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 300 + b"\r\n\r\n",
    HEAD + b"Expect: 100-continue\r\nContent-Length: 30\r\n\r\n" + BODY,
)
RESPONSE = b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nContent-Type: text/event-stream\r\n"
RESPONSES = (
    RESPONSE + b"Content-Length: 8\r\n\r\ndata: 1\n",
    RESPONSE + b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n2\r\nab\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + RESPONSE + b"Content-Length: 2\r\n\r\nok",
    b"HTTP/1.1 204 No Content\r\nX: y\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
    b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbusy",
)
PIECES = (
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b"\0", b":", b";", b",", b"0", b"\xff"),
    *(b"-1", b"+", b"0x"),
    *(b"Content-Length: 5\r\n", b"Content-Length: 30\r\n", b"content-length:0\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n"),
    *(b"Transfer-Encoding: identity\r\n", b"Transfer-Encoding:\x0bchunked\r\n", b"Host: y\r\n"),
    *(b" folded\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\nConnection: upgrade\r\n"),
    *(b"0\r\n\r\n", b"5\r\nhello\r\n", b"ffffffffffffffff\r\n"),
    *(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0"),
    b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
)

Reading = tuple[tuple[str, str, tuple[tuple[str, str], ...], bytes], ...]


def mutated(chance: random.Random, messages: Sequence[bytes]) -> bytes:
    """Return one to three concatenated messages with up to six mutations."""
    data = bytearray(b"".join(chance.choices(messages, k=chance.choice((1, 1, 1, 2, 3)))))
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3, 6))):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0:
                data[at:at] = chance.choice(PIECES)
            case 1:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 2:
                del data[at : at + chance.choice((1, 1, 2, 5, 20))]
            case 3:  # where lines begin, a piece does most
                ends = [i + 2 for i in range(len(data) - 1) if data[i : i + 2] == b"\r\n"]
                place = chance.choice(ends) if ends else at
                data[place:place] = chance.choice(PIECES)
            case 4:
                other = chance.choice(messages)
                begin = chance.randrange(len(other))
                data[at:at] = other[begin : begin + chance.randrange(1, 40)]
            case 5:
                data[at : at + 1] = bytes(data[at : at + 1]).swapcase()
    return bytes(data)


def cut(chance: random.Random, data: bytes) -> list[bytes]:
    """Split the bytes into several reads."""
    if chance.random() < 0.1:
        return [data[i : i + 1] for i in range(len(data))]
    places = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(1, 6)))
    ends = [0, *places, len(data)]
    return [data[a:b] for a, b in pairwise(ends) if a < b]


# Requests


class Bench:
    """A server whose requests are noted and answered."""

    def __init__(self) -> None:
        self.read: list[tuple[str, str, tuple[tuple[str, str], ...], bytes]] = []
        self.server = HttpServer(
            LIMITS,
            self._handle,
            check=lambda http: None,
            refuse=lambda status, why, path: Response(status, {}, why.encode()),
        )

    async def _handle(self, http: HttpRequest) -> None:
        headers = tuple((name.lower(), value) for name, value in http.headers.items())
        self.read.append((http.method, http.path, headers, http.body))
        http.respond(Response(200, {}, b"ok"))

    async def reading(self, pieces: Sequence[bytes]) -> tuple[Reading, bytes]:
        """Feed the pieces to a new connection; return the requests read and the bytes answered."""
        self.read.clear()
        protocol = self.server.connection()
        transport = FakeTransport(protocol)
        protocol.connection_made(transport)
        for piece in pieces:
            if transport.closed:
                break
            protocol.data_received(piece)
            await asyncio.sleep(0)
        await turns(24)
        transport.close()
        await turns(3)
        assert self.server.held_bytes == 0
        assert not self.server.connections
        return tuple(self.read), transport.written


def statuses(answers: bytes) -> list[bytes]:
    """Return the status of each answer, without 100 (Continue).

    Whether 100 is sent depends on how much of the body has arrived.
    """
    return [each for each in re.findall(rb"HTTP/1\.[01] (\d+)", answers) if each != b"100"]


def h11_requests(data: bytes) -> Reading:
    """Return the requests that h11 reads, up to the first that it refuses."""
    found: list[tuple[str, str, tuple[tuple[str, str], ...], bytes]] = []
    side = h11.Connection(h11.SERVER)
    try:
        side.receive_data(data)
        request: h11.Request | None = None
        body = b""
        while True:
            event = side.next_event()
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                headers = tuple((n.decode(), v.decode("latin-1")) for n, v in request.headers)
                target = request.target.partition(b"?")[0].decode("latin-1")
                found.append((request.method.decode(), target, headers, body))
                side.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                side.send(h11.EndOfMessage())
                side.start_next_cycle()
            else:
                return tuple(found)
    except (h11.ProtocolError, AssertionError):
        return tuple(found)


def test_a_request_has_one_reading_or_none() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.server.start("127.0.0.1", 0)
        chance = random.Random(SEED)
        served = 0
        for number in range(RUNS):
            data = mutated(chance, REQUESTS)
            whole, answers = await bench.reading([data])
            pieces, answers_to_pieces = await bench.reading(cut(chance, data))
            assert whole == pieces, (number, data)
            assert statuses(answers) == statuses(answers_to_pieces), (number, data)
            served += len(whole)
            for mine, other in zip(whole, h11_requests(data), strict=False):
                is_absolute = b"://" in data
                assert mine[0] == other[0], (number, data)
                assert is_absolute or mine[1] == other[1], (number, data)
                assert mine[3] == other[3], (number, data)
        await bench.server.stop(0.0)
        assert served > RUNS / 4, "most must still be requests"

    asyncio.run(main())


@pytest.mark.parametrize(
    "more",
    [
        b"Content-Length: 3\r\nContent-Length: 3\r\n",
        b"Content-Length: 3\r\nContent-Length: 4\r\n",
        *(b"Content-Length: 3, 3\r\n", b"Content-Length: +3\r\n", b"Content-Length: 0x3\r\n"),
        *(b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", b"Content-Length : 3\r\n"),
        *(b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", b"Content-Length: 3 4\r\n"),
        *(b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: identity\r\n"),
        *(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", b"Host: y\r\n"),
        *(b"Transfer-Encoding: xchunked\r\n", b"Transfer-Encoding:\x0bchunked\r\n"),
        *(b"A: b\r\n c\r\n", b"A: b\nContent-Length: 3\r\n", b"A: b\rContent-Length: 3\r\n"),
        b"A: \0\r\n",
    ],
)
async def test_what_could_be_read_in_two_ways_is_refused(more: bytes) -> None:
    smuggled = b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    for tail in (b"abc", b"3\r\nabc\r\n0\r\n\r\n", smuggled):
        assert b"Connection: close" in await refused(HEAD + more + b"\r\n" + tail)


@pytest.mark.parametrize(
    "size", [b"0x3", b"+3", b"3 ", b" 3", b"", b"-3", b"f" * 17, b"3\n", b"3\r"]
)
async def test_sizes_of_chunks_have_one_form(size: bytes) -> None:
    await refused(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\nabc\r\n0\r\n\r\n")


async def refused(data: bytes) -> bytes:
    """The answer to bytes of which no request is read."""
    bench = Bench()
    await bench.server.start("127.0.0.1", 0)
    read, answers = await bench.reading([data])
    await bench.server.stop(0.0)
    assert not read, read
    assert answers.startswith(b"HTTP/1.1 400 "), answers
    return answers


# Responses

Answered = tuple[int, bytes, bool]
"""Status (0: none), body, and whether it is whole."""


async def answered(pieces: Sequence[bytes]) -> Answered:
    upstream = quick_upstream()
    protocol = UpstreamConnection(upstream, ("http", "x", 80))
    transport = FakeTransport(protocol)
    protocol.connection_made(transport)
    calling = asyncio.ensure_future(protocol.call(b"POST / HTTP/1.1\r\n\r\n", b"", 60.0, 1 << 20))
    await asyncio.sleep(0)
    for piece in pieces:
        if transport.closed:
            break
        protocol.data_received(piece)
    transport.close()
    await upstream.close()
    body = bytearray()
    try:
        async with asyncio.timeout(10.0):
            response = await calling
            assert await response.pump(body.extend)
    except EngineLost:
        status = 0 if calling.exception() is not None else calling.result().status
        return (status, bytes(body), False)
    return (response.status, bytes(body), True)


def h11_response(data: bytes) -> Answered:
    """Return h11's reading of a response after which the connection ends."""
    side = h11.Connection(h11.CLIENT)
    side.send(h11.Request(method="POST", target="/", headers=[("Host", "x")]))
    side.send(h11.EndOfMessage())
    status, body = 0, b""
    try:
        side.receive_data(data)
        side.receive_data(b"")
        while True:
            event = side.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return (status, body, True)
            elif not isinstance(event, h11.InformationalResponse):
                return (status, body, False)
    except h11.ProtocolError:
        return (status, body, False)


def test_a_response_has_one_reading_or_none() -> None:
    async def main() -> None:
        chance = random.Random(SEED)
        complete = 0
        for number in range(RUNS):
            data = mutated(chance, RESPONSES)
            whole = await answered([data])
            pieces = await answered(cut(chance, data))
            assert whole[2] == pieces[2], (number, data, whole, pieces)
            assert not whole[2] or whole == pieces, (number, data, whole, pieces)
            other = h11_response(data)
            assert not (whole[2] and other[2]) or whole == other, (number, data, whole, other)
            complete += whole[2]
        assert complete > RUNS / 4, "most must still be responses"

    asyncio.run(main())
