"""The client's end of a request: what it is sent, and what becomes of one that takes nothing.

A client that has gone raises `ClientGone`, wherever it is noticed, and is never mistaken for an
engine that has.
"""

import asyncio
from collections.abc import Mapping

from aiohttp import web
from aiohttp.http import HttpVersion11, StreamWriter
from multidict import CIMultiDict

from vllm_kvpool.router.dataplane.bodies import error_body
from vllm_kvpool.router.dataplane.chunks import DONE
from vllm_kvpool.router.dataplane.headers import Headers
from vllm_kvpool.router.dataplane.sse import frame

JSON = "application/json"
SERVER = "kvpool"
"""Of answers that are the router's own."""
EVENT_STREAM = "text/event-stream"
STREAM_HEADERS = CIMultiDict({"Content-Type": EVENT_STREAM, "Server": SERVER})
MAX_LAST_BYTES = 32 << 10  # less than what makes a connection wait
CLIENT_CLOSED_REQUEST = 499  # nobody reads it


class ClientGone(Exception):
    """It has closed its connection, or has taken nothing for too long."""


class Client:
    """One request's. Owned by its task; what waits here may be cancelled and called again.

    `own_headers` are added to answers that are the router's own.
    """

    def __init__(
        self, http: web.BaseRequest, patience_s: float, own_headers: Mapping[str, str]
    ) -> None:
        self._http = http
        self._own_headers = own_headers
        self._patience_s = patience_s
        self._response: web.StreamResponse | None = None
        self._draining: asyncio.Task[None] | None = None
        self._is_complete = False

    @property
    def has_status(self) -> bool:
        """Whether its answer has begun."""
        return self._response is not None

    @property
    def response(self) -> web.StreamResponse:
        """What it has been answered."""
        return self._response or web.Response(status=CLIENT_CLOSED_REQUEST)

    async def write(self, data: bytes, headers: Headers) -> None:
        """A part of a stream, which begins with `headers`."""
        if self._response is None:
            await self._begin_stream(headers)
        await self._put(data)

    async def end(self, data: bytes, headers: Headers) -> None:
        """The last part of a stream, which may be its first."""
        if self._response is None:
            await self._begin_stream(headers)
        assert self._response is not None
        self._is_complete = True
        if len(data) > MAX_LAST_BYTES or self._http.protocol.writing_paused:
            await self._put(data)
            data = b""
        try:
            # In one piece with the end of the body. So little does not wait.
            await self._writer.write_eof(data)
            await self._response.write_eof()
        except ConnectionError as error:
            raise ClientGone(str(error)) from None

    async def end_with(self, *payloads: bytes) -> None:
        """The last events of a stream."""
        await self.end(b"".join(map(frame, payloads)), STREAM_HEADERS)

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        """An answer in one piece."""
        response = web.Response(status=status, headers=headers)
        response.headers["Content-Length"] = str(len(body))
        await self._begin(response)
        self._is_complete = True
        await self._put(body)

    async def tell(
        self, status: int, why: str, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """An error of the router's own, within the stream if that has begun and not ended."""
        body = error_body(why, kind=kind, code=status)
        if self._is_complete:
            return
        if self.has_status:
            await self.end_with(body, DONE)
        else:
            own = {"Content-Type": JSON, "Server": SERVER, **(headers or {})}
            await self.send(status, CIMultiDict(own), body)

    def leave(self) -> None:
        """Its request is over."""
        if self._draining is not None:
            self._draining.cancel()

    @property
    def _writer(self) -> StreamWriter:
        writer = self._http.writer
        assert isinstance(writer, StreamWriter)
        return writer

    async def _begin_stream(self, headers: Headers) -> None:
        response: web.StreamResponse
        if self._http.version < HttpVersion11:
            response = web.StreamResponse(headers=headers)
            response.force_close()  # nothing else ends it, though such a client may ask for more
        else:
            # Unlike the other it sends its head together with what comes first.
            response = web.Response(headers=headers)
            response.enable_chunked_encoding()
        await self._begin(response)

    async def _begin(self, response: web.StreamResponse) -> None:
        assert self._response is None
        self._response = response
        if response.headers.get("Server") == SERVER:
            response.headers.update(self._own_headers)
        try:
            await response.prepare(self._http)
        except ConnectionError as error:
            raise ClientGone(str(error)) from None

    async def _put(self, data: bytes) -> None:
        # Not by the response: it would wait by itself, and not survive being cancelled in it.
        try:
            await self._writer.write(data, drain=False)
        except ConnectionError as error:
            raise ClientGone(str(error)) from None
        if self._http.protocol.writing_paused:
            await self._drain()

    async def _drain(self) -> None:
        """Wait until the client has taken most of what it was sent; ClientGone if it does not."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._writer.drain())
        draining = self._draining
        await asyncio.wait({draining}, timeout=self._patience_s)
        if not draining.done():
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ClientGone(f"has taken nothing for {self._patience_s:g} s")
        self._draining = None
        if (error := draining.exception()) is not None:
            raise ClientGone(str(error))
