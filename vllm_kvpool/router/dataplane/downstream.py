"""The client's end of a request: what it is sent, and what becomes of one that takes nothing.

A client that has gone raises `ClientGone`, wherever it is noticed, and is never mistaken for an
engine that has.
"""

from collections.abc import Mapping

from vllm_kvpool.router.dataplane.headers import with_headers
from vllm_kvpool.router.dataplane.http_server import HttpRequest, Response
from vllm_kvpool.router.dataplane.request_body import error_body, is_anthropic
from vllm_kvpool.router.dataplane.responses import OK
from vllm_kvpool.router.dataplane.resume.chunks import DONE
from vllm_kvpool.router.dataplane.sse import frame

JSON = "application/json"
SERVER = "kvpool"
"""Of answers that are the router's own."""
EVENT_STREAM = "text/event-stream"
STREAM_HEADERS = {"Content-Type": EVENT_STREAM, "Server": SERVER}
JSON_HEADERS = {"Content-Type": JSON, "Server": SERVER}


class ClientGone(Exception):
    """It has closed its connection, or has taken nothing for too long."""


class Downstream:
    """One request's client. Owned by its task; what waits here may be cancelled and called again.

    `own_headers` are added to its answer, whoever it is from.
    """

    def __init__(
        self, request: HttpRequest, patience_s: float, own_headers: Mapping[str, str]
    ) -> None:
        self._request = request
        self._own_headers = own_headers
        self._patience_s = patience_s
        self.status = 0
        """Of its answer, once that has begun."""

    @property
    def client(self) -> str:
        """Its address; empty where it is not known."""
        return self._request.client

    @property
    def has_status(self) -> bool:
        """Whether its answer has begun."""
        return self._request.has_status

    def put(self, data: bytes, headers: Mapping[str, str]) -> bool:
        """A part of a stream, which begins with `headers`; False: `drain` before the next one."""
        request = self._request
        try:
            if request.has_status:
                request.write(data)
            else:
                self.status = OK
                request.begin_stream(OK, with_headers(headers, self._own_headers), data)
        except ConnectionError as error:
            raise ClientGone(str(error)) from None
        return not request.writing_paused

    async def end(self, data: bytes, headers: Mapping[str, str]) -> None:
        """The last part of a stream, which may be its first."""
        if not self.has_status:
            self.put(b"", headers)
        try:
            self._request.end_stream(data)
        except ConnectionError as error:
            raise ClientGone(str(error)) from None
        if self._request.writing_paused:
            await self.drain()

    async def end_with(self, *payloads: bytes) -> None:
        """The last events of a stream."""
        await self.end(b"".join(map(frame, payloads)), STREAM_HEADERS)

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """An answer in one piece."""
        self.status = status
        headers = with_headers(headers, self._own_headers)
        try:
            self._request.respond(Response(status, headers, body))
        except ConnectionError as error:
            raise ClientGone(str(error)) from None
        if self._request.writing_paused:
            await self.drain()

    async def tell(
        self, status: int, why: str, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """An error of the router's own, within the stream if that has begun and not ended."""
        path = self._request.path
        body = error_body(why, kind=kind, code=status, path=path)
        if self._request.is_answered:
            return
        if self.has_status and is_anthropic(path):
            await self.end(b"event: error\n" + frame(body), STREAM_HEADERS)
        elif self.has_status:
            await self.end_with(body, DONE)
        else:
            await self.send(status, {**JSON_HEADERS, **(headers or {})}, body)

    def cut(self) -> None:
        """Close its connection: what it has is not the whole answer."""
        self._request.abort()

    async def drain(self) -> None:
        """Wait until it has taken most of what it was sent."""
        try:
            await self._request.drain(self._patience_s)
        except ConnectionError as error:
            raise ClientGone(str(error)) from None
        except TimeoutError:
            self._request.abort()
            raise ClientGone(
                f"has taken nothing for {self._patience_s:g} s (front.client_timeout_s)"
            ) from None
