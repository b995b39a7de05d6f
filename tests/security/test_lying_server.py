"""An S3 server that lies about sizes: a reader uses the memory it has given, and no more."""

import re
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum

import pytest

from tests.support.buffers import make_buffer
from vllm_kvpool.storage.base import GetOutcome
from vllm_kvpool.storage.s3 import S3Store
from vllm_kvpool.storage.url import S3Options

pytestmark = pytest.mark.s3

HOST = "127.0.0.1"
PIECE = bytes(1 << 20)
GROWTH_LIMIT_BYTES = 64 << 20  # a client's windows and ours, a few MiB each
LIMIT_S = 30.0


class Lie(Enum):
    """The header of a response that describes its body. The body never ends."""

    TOO_LONG = b"Content-Length: 1099511627776"
    CHUNKED = b"Transfer-Encoding: chunked"
    CHUNKED_BUT_SIZED = b"Content-Length: %d\r\nTransfer-Encoding: chunked"
    UNSAID = b"X-Nothing: 1"


class EndlessServer:
    """A server on which every object exists, has the expected size, and never ends."""

    def __init__(self, lie: Lie) -> None:
        self.lie = lie
        self.sent_bytes = 0
        self._socket = socket.create_server((HOST, 0))
        self.endpoint = f"http://{HOST}:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait for the next client
        self._thread.join(LIMIT_S)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                client.settimeout(LIMIT_S)
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            head = b""
            while b"\r\n\r\n" not in head:
                piece = client.recv(1 << 16)
                if not piece:
                    return
                head += piece
            asked = re.search(rb"(?i)range: bytes=(\d+)-(\d+)", head)
            if head.startswith(b"PUT"):
                client.sendall(b"HTTP/1.1 412 Exists\r\nContent-Length: 0\r\n\r\n")
            elif b"?list-type" in head.split(b"\r\n")[0]:
                body = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            elif asked is None or b"/absent" in head.split(b"\r\n")[0]:
                client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            else:
                self._send_without_end(client, int(asked[1]), int(asked[2]))

    def _send_without_end(self, client: socket.socket, first: int, last: int) -> None:
        nbytes = last - first + 1
        size = b"Content-Range: bytes %d-%d/%d" % (first, last, nbytes)
        lie = self.lie.value % nbytes if b"%d" in self.lie.value else self.lie.value
        lines = (b"HTTP/1.1 206 Partial Content", b'ETag: "x"', TIME, size, lie, b"", b"")
        client.sendall(b"\r\n".join(lines))
        piece = b"100000\r\n" + PIECE + b"\r\n" if b"chunked" in lie else PIECE
        while True:
            client.sendall(piece)
            self.sent_bytes += len(PIECE)


TIME = b"Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT"
LARGE = 5 << 20


@pytest.fixture(params=[*Lie])
def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EndlessServer]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    server = EndlessServer(request.param)
    yield server
    server.close()


@pytest.mark.parametrize("nbytes", [1000, LARGE])
def test_a_body_without_end_takes_no_memory_and_is_never_ok(
    server: EndlessServer, nbytes: int
) -> None:
    store = S3Store(S3Options("bucket", "p", "us-east-1", server.endpoint, True, False))
    guard = make_buffer(nbytes + 4096)
    buffer = type(guard)(guard.address, guard.view[:nbytes])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert store.get(["key"], [buffer]) == [GetOutcome.FAILED]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    store.close()
    assert grown < GROWTH_LIMIT_BYTES
    assert server.sent_bytes < GROWTH_LIMIT_BYTES
    assert bytes(guard.view[nbytes:]) == bytes(4096)
