"""A client that says bytes of HTTP, well or badly; each of its waits has a limit of time."""

import asyncio
from typing import Self

LIMIT_S = 20.0


class RawClient:
    """One connection to a server on this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, host: str = "127.0.0.1") -> Self:
        return cls(*await asyncio.open_connection(host, port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def until(self, end: bytes) -> bytes:
        """What comes up to `end`. asyncio.IncompleteReadError if the connection ends before."""
        async with asyncio.timeout(LIMIT_S):
            return await self.reader.readuntil(end)

    async def head(self) -> bytes:
        return await self.until(b"\r\n\r\n")

    async def exactly(self, size: int) -> bytes:
        async with asyncio.timeout(LIMIT_S):
            return await self.reader.readexactly(size)

    async def rest(self) -> bytes:
        """What comes until the server closes the connection."""
        async with asyncio.timeout(LIMIT_S):
            return await self.reader.read()

    def close(self) -> None:
        self.writer.close()
