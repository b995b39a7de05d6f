"""An HTTP server on loopback that sends prepared bytes, whatever the request."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

PAUSE_S = 0.01
CUT = b"\0 the connection ends"
"""A piece of an answer that ends the connection."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
"""The head of a streamed answer."""
END = b"0\r\n\r\n"
"""The end of a streamed answer."""
Answer: TypeAlias = Sequence[bytes]
"""Pieces of bytes, sent one after the other."""


def chunk(data: bytes) -> bytes:
    """Return one chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def events(*payloads: bytes) -> bytes:
    """Return server-sent events in one HTTP chunk."""
    return chunk(b"".join(b"data: %b\n\n" % each for each in payloads))


def whole(body: bytes, status: str = "200 OK", *headers: str) -> Answer:
    """Return an answer in one piece."""
    lines = (f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", "")
    return ("\r\n".join(lines).encode() + body,)


@dataclass
class Heard:
    """The requests that the server has received."""

    num_connections: int = 0
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The bodies, read as JSON."""
        return [msgspec.json.decode(each) for each in self.bodies]


@asynccontextmanager
async def player(
    *answers: Answer, on_request: Callable[[int], None] = lambda number: None
) -> AsyncIterator[tuple[str, Heard]]:
    """Run the server; yield its URL and the requests that it has received.

    Requests get the answers in turn. The last answer repeats for all later requests. `on_request`
    is called before each answer, with the number of requests so far.
    """
    heard, left = Heard(), deque(answers)

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                heard.bodies.append(await reader.readexactly(int(length[1]) if length else 0))
                heard.heads.append(head)
                on_request(len(heard.bodies))
                for piece in left.popleft() if len(left) > 1 else left[0]:
                    if piece is CUT:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(PAUSE_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard
    finally:
        server.close()
