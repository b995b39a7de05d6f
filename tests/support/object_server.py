"""A real S3 server on loopback, and a front that injects faults into its traffic.

`ObjectServer` is moto's server as a child process, with its objects in memory.

`FaultyFront` owns a listening socket and a thread per connection. It forwards whole requests to a
server, records them, and applies the fault that its `rule` returns. The front calls the rule under
its lock, in the order of arrival.
"""

import contextlib
import http.client
import re
import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote

from tests.support.server_process import HOST, POLL_S, STOP_TIMEOUT_S, ServerProcess

REQUEST_TIMEOUT_S = 30.0
MAX_HEAD_BYTES = 64 << 10
SIGNATURE = (  # the server requires a signature, and does not check it
    "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=0"
)


class ObjectServer(ServerProcess):
    """`with ObjectServer() as server:` runs one; it listens at `server.endpoint`."""

    program = "moto_server"
    start_timeout_s = 30.0

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def arguments(self) -> list[str]:
        return ["-H", HOST, "-p", str(self.port)]

    def make_bucket(self, name: str) -> str:
        """Make a bucket and return its name."""
        self.request("PUT", f"/{name}")
        return name

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Send one request without a client library. Return the body; RuntimeError if it fails."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=REQUEST_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Authorization": SIGNATURE})
            answer = connection.getresponse()
            said = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {said[:500]!r}")
        return said


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that arrived at the front."""

    method: str
    path: str  # with the query, nothing escaped
    headers: dict[str, str]  # names in lower case
    body_bytes: int

    @property
    def range(self) -> tuple[int, int]:
        """The half-open byte range that the request asks for."""
        start, _, last = self.headers["range"].removeprefix("bytes=").partition("-")
        return int(start), int(last) + 1


@dataclass(frozen=True, slots=True)
class Cut:
    """End the connection after this many bytes of the answer's body."""

    body_bytes: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Send this many bytes of the answer's body, and never send the rest."""

    body_bytes: int


@dataclass(frozen=True, slots=True)
class Shrink:
    """Send this many bytes of the answer's body, and declare them as the whole body."""

    body_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer in the server's place."""

    status: int
    code: str = ""

    @property
    def message(self) -> bytes:
        text = f"<Error><Code>{self.code}</Code><AWSAccessKeyId>SHOWN</AWSAccessKeyId></Error>"
        body = text.encode() if self.code else b""
        head = f"HTTP/1.1 {self.status} Planned\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"Connection: close\r\n\r\n" + body


@dataclass(frozen=True, slots=True)
class Lose:
    """Let the server perform the request, and end the connection instead of answering."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Answer nothing until the front is closed."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Take a header off the request before the server sees it."""

    header: str


Fault = Cut | Stall | Shrink | Answer | Lose | Hang | Strip
Rule = Callable[[Seen], Fault | None]


def in_turn(method: str, *faults: Fault | None) -> Rule:
    """Return a rule: the first requests of a method meet these faults in turn, later ones none."""
    left = list(faults)
    return lambda seen: left.pop(0) if seen.method == method and left else None


class FaultyFront:
    """`with FaultyFront(server.port) as front:` listens at `front.endpoint`."""

    def __init__(self, server_port: int) -> None:
        self.seen: list[Seen] = []
        self.rule: Rule = lambda seen: None
        self._server_port = server_port
        self._lock = threading.Lock()  # guards `seen` and calls of `rule`
        self._closed = threading.Event()
        front = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):
                    front._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

        self._server = Server((HOST, 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="faulty-front", daemon=True
        )

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(STOP_TIMEOUT_S)

    def reset(self, rule: Rule = lambda seen: None) -> None:
        """Forget the recorded requests, and take a new rule."""
        with self._lock:
            self.seen.clear()
            self.rule = rule

    def count(self, method: str) -> int:
        """Return the number of requests of a method so far."""
        with self._lock:
            return sum(seen.method == method for seen in self.seen)

    def _serve(self, client: socket.socket) -> None:
        """Serve one request, and tell the client to open a new connection for the next request."""
        client.settimeout(REQUEST_TIMEOUT_S)
        head, body = _receive(client)
        if not head:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        seen = Seen(method, unquote(path), headers, len(body))
        with self._lock:
            self.seen.append(seen)
            fault = self.rule(seen)
        if isinstance(fault, Hang):
            self._closed.wait()
            return
        if isinstance(fault, Answer):
            client.sendall(fault.message)
            return
        dropped = fault.header if isinstance(fault, Strip) else "connection"
        lines = [line for line in lines if line.partition(":")[0].lower() != dropped]
        request = "\r\n".join([first, *lines, "Connection: close", "", ""]).encode("latin-1")
        answer_head, answer = self._ask(request + body)
        match fault:
            case Lose():
                pass
            case Cut(body_bytes):
                client.sendall(answer_head + b"\r\n\r\n" + answer[:body_bytes])
            case Stall(body_bytes):
                client.sendall(answer_head + b"\r\n\r\n" + answer[:body_bytes])
                self._closed.wait()
            case Shrink(body_bytes):
                length = f"Content-Length: {body_bytes}".encode()
                answer_head = re.sub(rb"(?i)content-length: \d+", length, answer_head)
                client.sendall(answer_head + b"\r\n\r\n" + answer[:body_bytes])
            case _:
                client.sendall(answer_head + b"\r\n\r\n" + answer)

    def _ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Return head and body of the server's answer. The connection ends with the answer."""
        address = (HOST, self._server_port)
        with socket.create_connection(address, timeout=REQUEST_TIMEOUT_S) as server:
            server.sendall(request)
            said = bytearray()
            while piece := server.recv(1 << 20):
                said += piece
        head, _, body = bytes(said).partition(b"\r\n\r\n")
        if b"connection: close" not in head.lower():
            head += b"\r\nConnection: close"
        return head, body


def _receive(client: socket.socket) -> tuple[bytes, bytes]:
    """Return head and body of a request; both empty if the client closes the connection."""
    said = bytearray()
    while b"\r\n\r\n" not in said:
        piece = client.recv(1 << 16)
        if not piece or len(said) > MAX_HEAD_BYTES:
            return b"", b""
        said += piece
    head, _, body = bytes(said).partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    rest = bytearray(body)
    while len(rest) < length:
        piece = client.recv(1 << 20)
        if not piece:
            return b"", b""
        rest += piece
    return head, bytes(rest)
