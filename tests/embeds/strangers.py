"""Processes that are no engine: they speak ZeroMQ's wire protocol from an address of their own."""

import socket
from contextlib import suppress

GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes((3, 0)) + b"NULL".ljust(20, b"\0") + bytes(32)
QUIET_S = 1.0  # the other end reads nothing more


def ready(socket_type: bytes = b"DEALER") -> bytes:
    """The last command of a client's handshake."""
    body = b"\x05READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    return b"\x04" + bytes((len(body),)) + body


def large(nbytes: int, *, is_command: bool = False, has_more: bool = False) -> bytes:
    """A frame of so many bytes, with its header."""
    flags = 0x02 | (0x04 if is_command else 0) | (0x01 if has_more else 0)
    return bytes((flags,)) + nbytes.to_bytes(8, "big") + bytes(nbytes)


class RawStranger:
    """A TCP connection to an endpoint; it has no queue, so what it sends the other end has."""

    def __init__(self, endpoint: str, source: str = "127.0.0.3") -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 5.0, (source, 0))
        self.socket.settimeout(QUIET_S)
        self.num_sent = 0

    def send(self, data: bytes, times: int = 1) -> bool:
        """Send until the other end reads nothing or has closed; whether all was sent."""
        with suppress(OSError):
            for _ in range(times):
                view = memoryview(data)
                while view:
                    sent = self.socket.send(view)
                    self.num_sent += sent
                    view = view[sent:]
            return True
        return False

    def close(self) -> None:
        self.socket.close()
