"""Calls to engines over HTTP/1.1: the only place that knows their connections.

A connection serves one call at a time and is kept for the next one. A POST is sent once: an engine
whose connection ends before it has answered may have executed it. What goes wrong raises
`EngineLost`; what an engine answers with a status is an answer. Owned by the router's loop.
"""

import asyncio
import errno
import ssl
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Self, cast
from urllib.parse import urlsplit

import httptools
from multidict import CIMultiDict

from vllm_kvpool.router.control.events import Outcome
from vllm_kvpool.router.dataplane.headers import (
    MAX_HEAD_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    Headers,
    encode_headers,
)
from vllm_kvpool.router.dataplane.request_body import SMALL_ANSWER_BYTES
from vllm_kvpool.router.dataplane.responses import FIRST_STATUS, LAST_STATUS, EngineLost

MAX_UNREAD_BYTES = 256 << 10
"""Limit of the unread bytes of an answer; the engine waits beyond that."""
END_TIMEOUT_S = 0.1
"""A stream that has said all may take so long to end, for its connection to be kept."""
CONNECT_TIMEOUT_S = 3.0
KEEP_ALIVE_S = 4.0  # less than the 5 s after which vLLM closes a connection that nobody uses


class EngineUnreached(EngineLost):
    """There is no connection to it, so it has been sent nothing."""

    outcome = Outcome.UNREACHED

    def __init__(self, why: str, *, is_refused: bool) -> None:
        super().__init__(why)
        self.is_refused = is_refused
        """The host refused the connection."""


class EngineBroke(EngineLost):
    """An engine was sent a request; then its connection ended, or was silent for too long."""

    outcome = Outcome.LOST


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes


_Origin = tuple[str, str, int]
"""Scheme, host, port."""


@lru_cache(4096)
def _target_of(url: str) -> tuple[_Origin, bytes]:
    """Return a URL's origin, and the rest of the request line with the Host header."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n".encode("latin-1")
    return (parts.scheme, parts.hostname or "", port), head


class Upstream:
    """Connections to all engines, kept and shared by all calls."""

    def __init__(
        self,
        *,
        silence_timeout_s: float,
        answer_timeout_s: float,
        api_key: str,
    ) -> None:
        """Set the time limits.

        `silence_timeout_s` of a stream, `answer_timeout_s` of a whole answer.
        """
        self._silence_timeout_s = silence_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._own_headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._idle: dict[_Origin, deque[UpstreamConnection]] = defaultdict(deque)
        """The longest unused first."""
        self._connections: set[UpstreamConnection] = set()
        self._tls: ssl.SSLContext | None = None
        self._is_closed = False

    async def close(self) -> None:
        """Close all connections; calls that run end as broken, and none can begin."""
        self._is_closed = True
        while self._connections:
            for each in tuple(self._connections):  # also those that are made meanwhile
                each.abort()
            await asyncio.sleep(0)

    async def open(
        self,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        most_bytes: int,
        silent_until: "SilentUntil | None" = None,
        *,
        silence_s: float | None = None,
    ) -> "UpstreamResponse":
        """Send a request, and return the response once its head is there; the caller closes it.

        Without a body it is a GET, else a POST. Reading raises EngineLost beyond `most_bytes`. The
        engine's silence does not count before the time that `silent_until` returns. Without
        `silence_s` the limit is that of streams.
        """
        origin, target = _target_of(url)
        while idle := self._idle.get(origin):
            connection = idle.pop()
            if connection.is_open and not connection.is_unused:
                break
            connection.abort()
        else:
            connection = await self._connect(origin)
        method, length = b"GET", b""
        if body is not None:
            method, length = b"POST", b"Content-Length: %d\r\n" % len(body)
        head = b"%b %b%b%b\r\n" % (method, target, encode_headers(headers), length)
        limit_s = self._silence_timeout_s if silence_s is None else silence_s
        return await connection.call(head, body or b"", limit_s, most_bytes, silent_until)

    async def ask(
        self,
        url: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        most_bytes: int = SMALL_ANSWER_BYTES,
    ) -> EngineResponse:
        """Send a POST, or a GET without a body, and read the whole answer.

        Without headers it is the router's own request.
        """
        if headers is None:
            content = {} if body is None else {"Content-Type": "application/json"}
            headers = self._own_headers | content
        limit_s = self._answer_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                with await self.open(
                    url, body, headers, most_bytes, silence_s=float("inf")
                ) as response:
                    return await response.read()
        except TimeoutError:
            raise EngineBroke(f"no answer within {limit_s:g} s") from None

    def keep(self, connection: "UpstreamConnection") -> None:
        """Keep a connection whose call has ended for the next one.

        It closes itself after KEEP_ALIVE_S: an engine whose machine is gone does not close its own,
        and may never be called again.
        """
        self._idle[connection.origin].append(connection)

    def lost(self, connection: "UpstreamConnection") -> None:
        """Forget a connection that has ended."""
        self._connections.discard(connection)
        idle = self._idle[connection.origin]
        if connection in idle:
            idle.remove(connection)
        if not idle:
            del self._idle[connection.origin]

    async def _connect(self, origin: _Origin) -> "UpstreamConnection":
        scheme, host, port = origin
        if scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self, origin),
                    host,
                    port,
                    ssl=self._tls if scheme == "https" else None,
                )
        except TimeoutError:
            why = f"no connection to {host}:{port} within {CONNECT_TIMEOUT_S:g} s"
            raise EngineUnreached(why, is_refused=False) from None
        except OSError as error:
            is_refused = error.errno == errno.ECONNREFUSED
            raise EngineUnreached(str(error), is_refused=is_refused) from error
        if self._is_closed:
            connection.abort()
            raise EngineUnreached("the router ends", is_refused=False)
        # Not in connection_made: uvloop says nothing of the loss of one whose maker was cancelled.
        if connection.is_open:
            self._connections.add(connection)
        return connection


SilentUntil = Callable[[], float]
"""Returns the last time of the loop, up to now, at which an engine has owed nothing."""
Take = Callable[[bytes], object]
"""Takes a part of a body; true if it is full for now. What it raises comes out of `pump`."""


class UpstreamResponse:
    """A response whose status and headers have arrived; one task reads its body, once.

    Leaving its `with` before the body's end closes the connection, which ends the engine's work.
    """

    def __init__(self, connection: "UpstreamConnection", most_bytes: int) -> None:
        self.connection = connection
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._parts: list[bytes] = []
        self.unread_bytes = 0
        self.is_complete = False
        self._has_left = False
        self._take: Take | None = None
        self._has_paused = False
        """True if `_take` is full."""
        self._lost: EngineLost | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_left:
            self._has_left = True
            self._give_up()

    async def head(self) -> None:
        """Wait until its head has come; EngineLost if it does not."""
        while not self.status:
            await self._more()

    async def pump(self, take: Take) -> bool:
        """Have `take` called with each part of the body, in the connection's callback.

        Returns True at the body's end, and False when `take` is full: then there is more, and
        `pump` is called again once it can be taken. EngineLost where the body breaks off.
        """
        while self._parts or not self.is_complete:
            if not self._parts:
                self._take, self._has_paused = take, False
                try:
                    await self._more()
                finally:
                    self._take = None
                if self._has_paused:
                    return False
            elif take(self._taken()):
                return False
        return True

    def _taken(self) -> bytes:
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self.unread_bytes = 0
        self.connection.resume()
        return data

    async def read(self) -> EngineResponse:
        """Return the whole answer; EngineLost if it is larger than it may be."""
        body = bytearray()
        await self.pump(body.extend)
        return EngineResponse(self.status, self.headers, bytes(body))

    def finish(self) -> None:
        """Read no further; keep the connection if the body ends within END_TIMEOUT_S."""
        self._has_left = True
        if not self.is_complete:
            asyncio.get_running_loop().call_later(END_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        if not self.is_complete:
            self.connection.abort()

    async def _more(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # Called by the connection

    def feed(self, data: bytes) -> None:
        """Add a part of the body; raises EngineLost beyond what it may have."""
        self._num_bytes += len(data)
        if self._num_bytes > self._most_bytes:
            raise EngineLost(f"answers more than {self._most_bytes} bytes")
        if not self._has_left:
            self._parts.append(data)
        self.unread_bytes += len(data)

    def lost(self, why: EngineLost) -> None:
        """Fail the answer: its rest will not come."""
        if not self.is_complete and self._lost is None:
            self._lost = why

    def wake(self) -> None:
        """Wake the reader: bytes have come, or the connection is lost."""
        waiter, take = self._waiter, self._take
        if waiter is None or waiter.done():
            return
        if take is not None and self._parts:
            try:
                self._has_paused = bool(take(self._taken()))
            except Exception as error:
                waiter.set_exception(error)
                return
            if not (self._has_paused or self.is_complete or self._lost):
                return
        waiter.set_result(None)


class UpstreamConnection(asyncio.Protocol):
    """A connection to an engine. `httptools` parses and calls the `on_...` methods."""

    def __init__(self, upstream: Upstream, origin: _Origin) -> None:
        self.origin = origin
        self._upstream = upstream
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._head_bytes = 0
        self._response: UpstreamResponse | None = None
        """The response of the present call; None while the connection is idle."""
        self._is_paused = False
        self._silence_s = float("inf")
        self._silent_until: SilentUntil | None = None
        self._last_s = 0.0
        """When something has last come."""
        self._timer: asyncio.TimerHandle | None = None
        self._unused: asyncio.TimerHandle | None = None
        """Closes the connection if it is idle for KEEP_ALIVE_S."""

    @property
    def is_unused(self) -> bool:
        """True if KEEP_ALIVE_S have passed without a call, even before the timer has run."""
        return self._unused is not None and self._unused.when() <= self._loop.time()

    @property
    def is_open(self) -> bool:
        """True if a request may be sent on the connection."""
        return self._transport is not None and not self._transport.is_closing()

    async def call(
        self,
        head: bytes,
        body: bytes,
        silence_s: float,
        most_bytes: int,
        silent_until: SilentUntil | None = None,
    ) -> UpstreamResponse:
        """Send a request; returns once the head of its answer has come."""
        if self._transport is None:
            raise EngineBroke("has closed its connection")
        if self._unused is not None:
            self._unused.cancel()
            self._unused = None
        response = self._response = UpstreamResponse(self, most_bytes)
        self._head_bytes = 0
        self._silence_s, self._last_s = silence_s, self._loop.time()
        self._silent_until = silent_until
        if self._timer is None:
            self._check_silence()
        # From Python 3.12 on, asyncio's transport never gets rid of an empty part.
        self._transport.writelines((head, body) if body else (head,))
        try:
            await response.head()
        except BaseException:
            self.abort()
            raise
        return response

    def resume(self) -> None:
        """Read on from the engine: the caller has taken all data so far."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._last_s = self._loop.time()
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection at once and drop unsent bytes."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; called once by the event loop."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of an answer; bytes that no request asked for end the connection."""
        response = self._response
        if response is None:
            self.abort()  # nothing was asked
            return
        self._last_s = self._loop.time()
        try:
            self._parser.feed_data(data)
            if not response.status:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    raise _huge_head()
        except httptools.HttpParserError as error:
            cause = error.__context__
            why = str(cause) if isinstance(cause, EngineLost) else f"is not HTTP/1.1: {error}"
            self._fail(response, EngineLost(why))
        except (EngineLost, httptools.HttpParserUpgrade) as error:
            self._fail(response, EngineLost(str(error)))
        if response.unread_bytes > MAX_UNREAD_BYTES and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()
        response.wake()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the open answer: complete if its end is the connection's, else failed."""
        self._transport = None
        self._upstream.lost(self)
        for timer in (self._timer, self._unused):
            if timer is not None:
                timer.cancel()
        response = self._response
        if response is None:
            return
        has_length = "Content-Length" in self._headers or "Transfer-Encoding" in self._headers
        if response.status and exc is None and not has_length:
            response.is_complete = True
        response.lost(EngineBroke(str(exc) if exc else "has closed its connection"))
        response.wake()

    def _check_silence(self) -> None:
        self._timer = None
        if self._silence_s == float("inf"):
            return
        now = self._loop.time()
        if self._is_paused or self._response is None:
            self._last_s = now
        elif self._silent_until is not None:
            self._last_s = max(self._last_s, self._silent_until())
        left_s = self._last_s + self._silence_s - now
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_silence)
        elif self._response is not None:
            why = f"has said nothing for {self._silence_s:g} s (front.engine_timeout_s)"
            self._fail(self._response, EngineBroke(why))
            self._response.wake()

    def _fail(self, response: UpstreamResponse, lost: EngineLost) -> None:
        response.lost(lost)
        self.abort()

    # httptools

    def on_message_begin(self) -> None:
        """Forget the headers of the last answer; EngineLost if no request is open."""
        if self._response is None or self._response.status:
            raise EngineLost("answers what it was not asked")
        self._headers = CIMultiDict()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header of the answer; EngineLost if there are too many or one is too long."""
        if len(self._headers) >= MAX_HEADERS or len(name) + len(value) > MAX_HEADER_BYTES:
            raise _huge_head()
        if self._response is not None and not self._response.status:
            self._headers.add(name.decode("latin-1"), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        """Give the open answer its status and headers; EngineLost if they make no sense."""
        status = self._parser.get_status_code()
        response = self._response
        if response is None or FIRST_STATUS <= status < 200:
            return
        if not FIRST_STATUS <= status <= LAST_STATUS:
            raise EngineLost(f"answers with status {status}")
        coding = self._headers.get("Transfer-Encoding", "chunked")
        if coding.lower() != "chunked":
            raise EngineLost(f"answers with Transfer-Encoding: {coding}")
        response.status, response.headers = status, self._headers

    def on_body(self, data: bytes) -> None:
        """Feed a part of the body to the open answer."""
        if self._response is not None:
            self._response.feed(data)

    def on_message_complete(self) -> None:
        """End the open answer, and keep the connection for the next request if allowed."""
        response = self._response
        if response is None or not response.status:
            return  # 100 Continue, and the like
        response.is_complete = True
        self._response = self._silent_until = None
        if self._parser.should_keep_alive() and not self._is_paused:
            self._unused = self._loop.call_later(KEEP_ALIVE_S, self.abort)
            self._upstream.keep(self)
        else:
            self.abort()


def _huge_head() -> EngineLost:
    return EngineLost(
        f"answers a head of more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers"
    )
