"""A transport without a socket, for tests that call protocols directly."""

import asyncio
from collections.abc import Iterable


class FakeTransport(asyncio.Transport):
    """A transport that keeps written bytes and closes at once; `extra` is for `get_extra_info`."""

    def __init__(self, protocol: asyncio.Protocol, **extra: object) -> None:
        super().__init__(extra)
        self.written = b""
        self.parts: list[bytes] = []
        """Buffers that `writelines` was given."""
        self.closed = False
        self._is_reading = True
        self._protocol = protocol

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert not self.closed
        self.written += data

    def writelines(self, list_of_data: Iterable[bytes]) -> None:  # type: ignore[override]
        parts = list(list_of_data)
        self.parts += parts
        self.write(b"".join(parts))

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.closed

    def is_reading(self) -> bool:
        return self._is_reading and not self.closed

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close
