"""A TCP relay on loopback: a link between two processes that a test can cut and restore.

Owns one thread that accepts connections and two threads for each connection. All threads end with
the `with`.
"""

import contextlib
import socket
import threading
from typing import Self

HOST = "127.0.0.1"
CHUNK_BYTES = 64 << 10
ACCEPT_EVERY_S = 0.05
JOIN_S = 5.0


class Relay:
    """Forwards connections at `port` to `target_port`. Any thread may call `cut` and `restore`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server = socket.create_server((HOST, 0))
        self._server.settimeout(ACCEPT_EVERY_S)
        self.port: int = self._server.getsockname()[1]
        self._lock = threading.Lock()  # guards the fields below
        self._is_cut = False
        self._is_closed = False
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="relay", daemon=True)]
        self._threads[0].start()

    @property
    def endpoint(self) -> str:
        """The relay's address in ZMQ's form."""
        return f"tcp://{HOST}:{self.port}"

    def cut(self) -> None:
        """End all connections, drop their bytes in transit, and refuse new connections."""
        with self._lock:
            self._is_cut = True
            self._end_all()

    def restore(self) -> None:
        """Let connections through again."""
        with self._lock:
            self._is_cut = False

    def _end_all(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(TimeoutError, OSError):
                client, _ = self._server.accept()
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        with self._lock:
            if self._is_cut or self._is_closed:
                client.close()
                return
            try:
                target = socket.create_connection((HOST, self._target_port))
            except OSError:
                client.close()
                return
            client.settimeout(None)
            for each in (client, target):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open += (client, target)
            for pair in ((client, target), (target, client)):
                thread = threading.Thread(target=_forward, args=pair, name="relay", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """End the relay with its connections and threads."""
        with self._lock:
            self._is_closed = True
            self._end_all()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _forward(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes until one side ends, then end both sides."""
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
    source.close()
