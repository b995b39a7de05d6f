"""A client that sends raw bytes, valid HTTP or not. Each wait has a time limit."""

import asyncio
from typing import Self

LIMIT_S = 20.0


class RawClient:
    """A connection to a server on this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, host: str = "127.0.0.1") -> Self:
        return cls(*await asyncio.open_connection(host, port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def until(self, end: bytes) -> bytes:
        """Return the bytes up to and including `end`.

        Raises:
            asyncio.IncompleteReadError: The connection ends before `end`.
        """
        async with asyncio.timeout(LIMIT_S):
            return await self.reader.readuntil(end)

    async def head(self) -> bytes:
        return await self.until(b"\r\n\r\n")

    async def exactly(self, size: int) -> bytes:
        async with asyncio.timeout(LIMIT_S):
            return await self.reader.readexactly(size)

    async def rest(self) -> bytes:
        """Return all bytes until the server closes the connection."""
        async with asyncio.timeout(LIMIT_S):
            return await self.reader.read()

    def close(self) -> None:
        self.writer.close()
