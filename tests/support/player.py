"""An HTTP server on loopback that sends prepared bytes, whatever it is asked."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

PAUSE_S = 0.01
Answer: TypeAlias = Sequence[bytes] | None
"""Pieces that are sent one after the other, or the end of the connection without an answer."""


@dataclass
class Heard:
    """What the server has received."""

    num_connections: int = 0
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@asynccontextmanager
async def player(
    *answers: Answer, closes: bool = False, on_request: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[str, Heard]]:
    """The server's URL and what it has received.

    Requests get the answers in turn, and the last answer from then on. `closes`: the connection
    ends after each. `on_request` is called before an answer.
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
                on_request()
                answer = left.popleft() if len(left) > 1 else left[0]
                if answer is None:
                    break
                for piece in answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(PAUSE_S)
                if closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard
    finally:
        server.close()
