"""An HTTP/1.1 server over `httptools`: connections, framing, limits of size and time.

A message has one reading or none: llhttp's strict mode refuses conflicting lengths, folded headers
and malformed chunks, and `_Connection` what that lets pass (other codings, versions, two hosts).
Such a request is answered with 400 and its connection closed. Requests of one connection are served
one after the other, in their order; a client that closes its connection cancels its request.

Everything is owned by the loop of `HttpServer.start`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple, cast

import httptools
from multidict import CIMultiDict

from vllm_kvpool.router.dataplane.headers import (
    MAX_HEAD_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    encode_headers,
)

log = logging.getLogger(__name__)

MAX_FRAMING_BYTES = 1 << 20
MAX_FRAMING_RATIO = 8
"""Limit of chunk sizes, extensions and trailers beside a body: a chunk of one byte takes 6."""
MAX_PIPELINED = 16
"""Requests that wait behind the one that is served; further ones are not read meanwhile."""
KEEPALIVE_S = 75.0
LINGER_S = 2.0
"""A client that was refused may send the rest of its body for so long, to read the answer."""
MIN_SWEEP_S, MAX_SWEEP_S = 0.02, 1.0
BACKLOG = 2048
WARN_EVERY_S = 10.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_REASONS = {each.value: each.phrase for each in HTTPStatus}


class Response(NamedTuple):
    """An answer in one piece. `closes`: the connection ends with it."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    closes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of connections, bodies and times."""

    max_body_bytes: int
    max_bodies_bytes: int
    """Limit of the bodies of all requests that are read or served."""
    max_connections: int
    read_timeout_s: float
    """For a head, and then for its body."""
    write_timeout_s: float
    """For a client to take what it was sent."""
    connections_option: str = ""
    """The option that sets `max_connections`, as " (front.max_connections)"; empty without one."""


class ClientGone(Exception):
    """A client has closed its connection, or has taken nothing for too long."""


@dataclass(slots=True, eq=False, repr=False)
class HttpRequest:
    """A request with its whole body, and its answer. Used in its connection's loop.

    ClientGone from whatever writes or waits. What waits may be cancelled and called again.
    """

    _connection: "_Connection"
    method: str = ""
    path: str = ""
    """Without its query, as it came."""
    query: str = ""
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    body: bytes = b""
    is_http_1_1: bool = True
    keeps_alive: bool = True
    status: int = 0
    """Status of the answer; 0 until the answer has begun."""
    is_answered: bool = False
    # While it is read
    url: bytes = b""
    has_head: bool = False
    is_refused: bool = False
    is_left_off: bool = False
    """Its parser ends before its body."""
    received: bytearray = field(default_factory=bytearray)
    """Bytes of the body so far. A list of one-byte chunks would take 40 times the memory."""
    raw_bytes: int = 0
    """Bytes of it received after the first read, framing included."""

    @property
    def client(self) -> str:
        """The client's address; empty where it has none, or has gone."""
        return self._connection.client

    def abort(self) -> None:
        """Close the connection at once: what the client has is not the whole answer."""
        self._connection.abort()

    def respond(self, response: Response) -> None:
        """Answer in one piece, without waiting."""
        assert not self.status
        self.keeps_alive &= not response.closes
        length = b"Content-Length: %d\r\n" % len(response.body)
        head = self._begin(response.status, response.headers, length)
        self.is_answered = True
        self._connection.write(head if self.method == "HEAD" else head + response.body)

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer in one piece."""
        self.respond(Response(status, headers, body))
        await self.drain()

    def put(self, data: bytes, headers: Mapping[str, str]) -> bool:
        """Send a part of a stream, which begins with `headers`.

        Returns False if `drain` must come before the next part.
        """
        assert not self.is_answered
        self._connection.write(self._begin_stream(headers) + self._chunk(data))
        return self._connection.drained is None

    async def end(self, data: bytes, headers: Mapping[str, str]) -> None:
        """Send the last part of a stream in one piece with the body's end.

        It may be the first part, too.
        """
        assert not self.is_answered
        head = self._begin_stream(headers)
        self.is_answered = True
        last = _LAST_CHUNK if self.is_http_1_1 else b""
        self._connection.write(head + self._chunk(data) + last)
        await self.drain()

    async def drain(self) -> None:
        """Wait until the client has taken most of what it was sent."""
        connection = self._connection
        if (drained := connection.drained) is None:
            return
        limit_s = connection.server.limits.write_timeout_s
        await asyncio.wait((drained,), timeout=limit_s)
        if not drained.done():
            connection.abort()
            raise ClientGone(f"has taken nothing for {limit_s:g} s (front.client_timeout_s)")
        connection.check_open()

    def _begin_stream(self, headers: Mapping[str, str]) -> bytes:
        """Return the head of an answer of unknown length; empty where that has begun."""
        if self.status:
            return b""
        if not self.is_http_1_1:
            self.keeps_alive = False  # nothing else ends it, though such a client may ask for more
        return self._begin(200, headers, _CHUNKED if self.is_http_1_1 else b"")

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self.is_http_1_1 and data else data

    def _begin(self, status: int, headers: Mapping[str, str], more: bytes) -> bytes:
        self.keeps_alive &= not self._connection.server.is_stopping
        version = b"1.1" if self.is_http_1_1 else b"1.0"
        reason = _REASONS.get(status, "").encode()
        if not self.keeps_alive:
            more += b"Connection: close\r\n"
        elif not self.is_http_1_1:
            more += b"Connection: keep-alive\r\n"
        date = b"" if "Date" in headers else self._connection.server.date_header()
        lines = encode_headers(headers)
        self.status = status
        return b"HTTP/%b %d %b\r\n%b%b%b\r\n" % (version, status, reason, lines, date, more)


Handle = Callable[[HttpRequest], Awaitable[None]]
Check = Callable[[HttpRequest], Response | None]
Refuse = Callable[[int, str, str], Response]
"""Status, reason, and the path that was asked for, empty where it has not come."""


class HttpServer:
    """Accepts connections and handles each request in a task.

    `check` sees a request before its body has come and may refuse it; `refuse` makes the answer to
    what cannot be read or breaks a limit, of a status and its reason.
    """

    def __init__(
        self, limits: ServerLimits, handle: Handle, *, check: Check, refuse: Refuse
    ) -> None:
        self.limits = limits
        self.handle = handle
        self.check = check
        self.refuse = refuse
        self.connections: set[_Connection] = set()
        self.held_bytes = 0
        """Bytes of bodies that are read or served."""
        self.is_stopping = False
        self._all_closed: asyncio.Future[None] | None = None
        """Done once the last connection has ended; while `stop` waits."""
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._warned_at = float("-inf")
        self._date = (0, b"")

    async def start(self, host: str | None, port: int) -> int:
        """Listen and return the port. Raises OSError."""
        self.loop = asyncio.get_running_loop()
        self._server = await self.loop.create_server(self.connection, host, port, backlog=BACKLOG)
        self._sweep_s = min(max(self.limits.read_timeout_s / 10, MIN_SWEEP_S), MAX_SWEEP_S)
        self._look_at_deadlines()
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    def connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return _Connection(self)

    async def stop(self, limit_s: float) -> int:
        """Listen no more; requests have `limit_s` to end, and their connections are cut then.

        Returns the number of requests that were cut off.
        """
        if self._server is None:
            return 0
        self.is_stopping = True
        self._server.close()
        for each in tuple(self.connections):
            each.close_if_idle()
        if self.connections:
            self._all_closed = self.loop.create_future()
            await asyncio.wait((self._all_closed,), timeout=limit_s)
        tasks = {each.task for each in self.connections if each.task is not None}
        for each in tuple(self.connections):
            each.abort()
        if tasks:
            await asyncio.wait(tasks)
        if self._sweep is not None:
            self._sweep.cancel()
        return len(tasks)

    def closed(self, connection: "_Connection") -> None:
        """Forget a connection that has ended."""
        self.connections.discard(connection)
        waiting = self._all_closed
        if waiting is not None and not self.connections and not waiting.done():
            waiting.set_result(None)

    def date_header(self) -> bytes:
        """Return the header, made once a second."""
        now = int(self.loop.time())
        if now != self._date[0]:
            self._date = (now, f"Date: {formatdate(usegmt=True)}\r\n".encode())
        return self._date[1]

    def warn_full(self) -> None:
        """Log that a connection was closed for the limit, at most every WARN_EVERY_S."""
        now = self.loop.time()
        if now - self._warned_at > WARN_EVERY_S:
            self._warned_at = now
            limits = self.limits
            log.warning(
                "port %d: more than %d connections%s, new ones are closed",
                self.port,
                limits.max_connections,
                limits.connections_option,
            )

    def _look_at_deadlines(self) -> None:
        now = self.loop.time()
        for each in tuple(self.connections):
            if now >= each.deadline:
                each.timed_out()
        self._sweep = self.loop.call_later(self._sweep_s, self._look_at_deadlines)


class _Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Connection(asyncio.Protocol):
    """A client's. Parses with `httptools`, whose callbacks (`on_...`) it is itself."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.task: asyncio.Task[None] | None = None
        """Serves one request."""
        self.deadline = server.loop.time() + server.limits.read_timeout_s
        self.drained: asyncio.Future[None] | None = None
        """Set while the transport's buffer is full."""
        self.client = ""
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._message: HttpRequest | None = None
        self._waiting: deque[tuple[HttpRequest, Response | None]] = deque()
        """Requests that have come, with the refusal of those that are not served."""
        self._is_head_again = False
        """The parser is given the framing of a head that has been read."""
        self._is_deaf = False
        """True once further bytes of the client are dropped."""
        self._is_read_paused = False

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        server = self.server
        self._transport = made = cast("asyncio.Transport", transport)
        if server.is_stopping:  # it was accepted just before that
            made.abort()
            return
        if len(server.connections) >= server.limits.max_connections:
            server.warn_full()
            made.abort()
            return
        server.connections.add(self)
        match transport.get_extra_info("peername"):
            case (str(host), int(port), *_):
                self.client = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        before = self._message
        try:
            self._feed(data)
            if before is not None and before is self._message:
                before.raw_bytes += len(data)
                _check_framing(before)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, _Refused):
                self._refuse(cause)
            elif isinstance(error, httptools.HttpParserCallbackError):
                log.error("a request has failed while it was read", exc_info=cause)
                self._refuse(_Refused(500, "The router has failed."))
            else:
                log.debug("a client sends what is not HTTP: %s", error)
                self._refuse(_Refused(400, "The request is not HTTP/1.1."))
        except _Refused as refused:
            self._refuse(refused)
        self._serve_next()

    def _feed(self, data: bytes) -> None:
        """Parse it all, past requests that ask for another protocol, which is never granted.

        There httptools leaves off, before a body; a new parser goes on from the same framing.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as left_off:
                data = data[left_off.args[0] :]
            self._parser = httptools.HttpRequestParser(self)
            message = self._message
            if message is not None:
                self._is_head_again = True
                headers = message.headers
                name = "Transfer-Encoding" if "Transfer-Encoding" in headers else "Content-Length"
                head = f"POST / HTTP/1.1\r\n{name}: {headers[name]}\r\n\r\n"
                self._parser.feed_data(head.encode("latin-1"))
                self._is_head_again = False

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        self.server.closed(self)
        self._stop_reading()
        self._drop_waiting()
        self.resume_writing()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self.drained = self.server.loop.create_future()

    def resume_writing(self) -> None:
        drained, self.drained = self.drained, None
        if drained is not None:
            drained.set_result(None)
        if self.task is None and not self._is_deaf:
            self._expect_more()
        self._serve_next()

    # httptools

    def on_message_begin(self) -> None:
        if self._is_head_again:
            return
        self._message = HttpRequest(self)
        if self.task is None:
            # Not with each byte: empty lines before a request would keep a connection for ever.
            self.deadline = self.server.loop.time() + self.server.limits.read_timeout_s

    def on_url(self, url: bytes) -> None:
        message = self._message
        assert message is not None
        if self._is_head_again:
            return
        message.url += url
        if len(message.url) > MAX_HEADER_BYTES:
            raise _Refused(400, f"The request line is longer than {MAX_HEADER_BYTES} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        message = self._message
        assert message is not None
        if message.has_head:
            return  # a trailer, which nobody has asked for
        headers = message.headers
        if len(name) + len(value) > MAX_HEADER_BYTES:
            raise _Refused(400, f"A header is longer than {MAX_HEADER_BYTES} bytes.")
        if len(headers) >= MAX_HEADERS:
            raise _Refused(400, f"The request has more than {MAX_HEADERS} headers.")
        headers.add(name.decode("latin-1"), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        message = self._message
        assert message is not None
        if self._is_head_again:
            return
        parser, limits = self._parser, self.server.limits
        message.has_head = True
        headers, version = message.headers, parser.get_http_version()
        message.is_http_1_1 = version == "1.1"
        hosts = headers.getall("Host", ())
        coding = headers.get("Transfer-Encoding")
        if version not in ("1.0", "1.1"):
            raise _Refused(400, "The request is not HTTP/1.1.")
        if len(hosts) > 1 or (message.is_http_1_1 and not hosts):
            raise _Refused(400, "A request has one Host header.")
        if coding is not None and (coding.lower() != "chunked" or not message.is_http_1_1):
            raise _Refused(400, "The only Transfer-Encoding is chunked, of HTTP/1.1.")
        message.method = parser.get_method().decode()
        if message.method == "CONNECT":
            raise _Refused(400, "CONNECT is not served.")
        message.path = _path_of(message.url)
        message.query = message.url.partition(b"?")[2].decode("latin-1")
        message.keeps_alive = parser.should_keep_alive()
        length = int(headers.get("Content-Length", "0"))
        has_body = length > 0 or coding is not None
        message.is_left_off = has_body and parser.should_upgrade()
        refusal = self.server.check(message)
        if refusal is None and length > limits.max_body_bytes:
            refusal = self.server.refuse(413, _too_large(limits.max_body_bytes), message.path)
        if refusal is not None:
            message.is_refused = True
            self._waiting.append((message, refusal._replace(closes=has_body)))
        elif has_body:
            self.deadline = self.server.loop.time() + limits.read_timeout_s
            asks_first = headers.get("Expect", "").lower() == "100-continue"
            is_first = self.task is None and not self._waiting
            if asks_first and is_first and self._transport is not None:
                self._transport.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        message, server = self._message, self.server
        assert message is not None
        if message.is_refused:
            return
        message.received += data
        server.held_bytes += len(data)
        limits = server.limits
        if len(message.received) > limits.max_body_bytes:
            raise _Refused(413, _too_large(limits.max_body_bytes))
        if server.held_bytes > limits.max_bodies_bytes:
            why = f"The router is holding {limits.max_bodies_bytes} bytes of request bodies, "
            why += (
                "its limit with a copy of each (front.max_bodies_bytes). Retry later or raise it."
            )
            raise _Refused(503, why)

    def on_message_complete(self) -> None:
        message = self._message
        assert message is not None
        if message.is_left_off:
            message.is_left_off = False
            return
        self._message = None
        if not message.is_refused:
            message.body, message.received = bytes(message.received), bytearray()
            self._waiting.append((message, None))
        if len(self._waiting) > MAX_PIPELINED and self._transport is not None:
            self._is_read_paused = True
            self._transport.pause_reading()

    # Requests

    def write(self, data: bytes) -> None:
        """Write bytes of an answer. Raises ClientGone."""
        self.check_open()
        assert self._transport is not None
        self._transport.write(data)

    def check_open(self) -> None:
        """Raise ClientGone unless the connection is open."""
        if self._transport is None or self._transport.is_closing():
            raise ClientGone("has closed its connection")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self) -> None:
        """Close it unless a request is being read or served."""
        if self.task is None and self._message is None and self._transport is not None:
            self._transport.close()

    def timed_out(self) -> None:
        """Close the connection: `deadline` has passed."""
        self.deadline = float("inf")
        message = self._message
        takes_nothing = self.task is None and self.drained is not None
        is_body = message is not None and message.has_head and not message.is_refused
        if is_body and not takes_nothing:
            limit_s = self.server.limits.read_timeout_s
            why = f"The request's body has not come within {limit_s:g} s (front.read_timeout_s)."
            self._refuse(_Refused(408, why))
            self._serve_next()
        elif self.task is None:
            self.abort()

    def _refuse(self, refused: _Refused) -> None:
        """Answer what is being read with an error, in its turn, and read no more."""
        message = self._message
        if message is None or not message.is_refused:
            request = HttpRequest(self) if message is None else message
            path = request.url.partition(b"?")[0].decode("latin-1")
            refusal = self.server.refuse(refused.status, str(refused), path)
            self._waiting.append((request, refusal._replace(closes=True)))
        self._stop_reading()

    def _stop_reading(self) -> None:
        self._is_deaf = True
        message, self._message = self._message, None
        if message is not None:
            self.server.held_bytes -= len(message.received)
            message.received = bytearray()  # it may wait, to be refused

    def _serve_next(self) -> None:
        """Serve what waits, once the client has taken most of the answers before it."""
        while self._waiting and self.task is None and self.drained is None:
            # The end of a connection cancels its task, and one that has not begun has no `finally`.
            if self._transport is None or self._transport.is_closing():
                return
            request, refusal = self._waiting.popleft()
            if refusal is None:
                self.deadline = float("inf")
                self.task = self.server.loop.create_task(self._serve(request))
                return
            request.respond(refusal)
            self._answered(request)

    async def _serve(self, request: HttpRequest) -> None:
        try:
            await self.server.handle(request)
        except ClientGone:
            request.keeps_alive = False
        except Exception:
            # The top of the connection's lane: a bug costs this request, and no other.
            log.exception("a request has failed")
            request.keeps_alive = False
            if not request.status and self._transport and not self._transport.is_closing():
                request.respond(self.server.refuse(500, "The router has failed.", request.path))
        finally:
            self.server.held_bytes -= len(request.body)
            self.task = None
            self._answered(request)
            self._serve_next()

    def _answered(self, request: HttpRequest) -> None:
        transport = self._transport
        if transport is None:
            return
        if request.is_answered and request.keeps_alive and not self.server.is_stopping:
            if self._is_read_paused:
                self._is_read_paused = False
                transport.resume_reading()
            self._expect_more()
            return
        self._drop_waiting()
        if not request.is_answered:
            transport.abort()
        elif self._is_deaf or self._message is not None:
            # Closing over what has come unread would reset the connection, and the answer with it.
            self._stop_reading()
            self.deadline = self.server.loop.time() + LINGER_S
            if transport.can_write_eof():
                transport.write_eof()
        else:
            self._stop_reading()
            self.deadline = self.server.loop.time() + self.server.limits.write_timeout_s
            transport.close()

    def _expect_more(self) -> None:
        """Set until when the client has to take what it was sent, or to send its next request."""
        limits = self.server.limits
        limit_s = KEEPALIVE_S if self._message is None else limits.read_timeout_s
        if self.drained is not None:
            limit_s = limits.write_timeout_s
        self.deadline = self.server.loop.time() + limit_s

    def _drop_waiting(self) -> None:
        self.server.held_bytes -= sum(len(each.body) for each, _ in self._waiting)
        self._waiting.clear()


def _path_of(url: bytes) -> str:
    if not url.startswith(b"/"):
        try:
            url = httptools.parse_url(url).path or b"/"
        except httptools.HttpParserInvalidURLError:
            raise _Refused(400, "The request's target is not a URL.") from None
    return url.partition(b"?")[0].decode("latin-1")


def _too_large(limit: int) -> str:
    return f"The body is larger than {limit} bytes (front.max_body_bytes)."


def _check_framing(message: HttpRequest) -> None:
    if not message.has_head:
        if message.raw_bytes > MAX_HEAD_BYTES:
            raise _Refused(400, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")
        return
    body_bytes = len(message.received)
    if message.raw_bytes > MAX_FRAMING_BYTES + (1 + MAX_FRAMING_RATIO) * body_bytes:
        raise _Refused(400, "The request's chunks or trailers are larger than its body allows.")
