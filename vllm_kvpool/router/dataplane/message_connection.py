"""A local stream socket that carries messages, of either side."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from vllm_kvpool.router.dataplane.messages import MAX_FRAME_BYTES, Frames, encode_frame

log = logging.getLogger(__name__)


class MessageConnection(asyncio.Protocol):
    """`kind` is a union of what comes. What is sent in two turns of the loop goes out together."""

    def __init__(self, kind: Any, receive: Callable[[Any], None]) -> None:
        self._frames = Frames(kind)
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[Any] = []
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done once the connection has ended."""

    def send(self, message: Any) -> None:
        """Does not wait; what is sent after the end is lost."""
        if not self._unsent:
            # A turn later: tasks that have been woken in this one often have more to say.
            self._loop.call_soon(self._loop.call_soon, self._flush)
        self._unsent.append(message)

    def close(self) -> None:
        """Send what is left, and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if not messages or self._transport is None or self._transport.is_closing():
            return
        self._transport.write(encode_frame(messages))
        if self._transport.get_write_buffer_size() > MAX_FRAME_BYTES:
            log.error("the other process reads nothing: its connection is closed")
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._frames.feed(data)
        except ValueError:
            log.exception("what another process has sent is no message of the router")
            assert self._transport is not None
            self._transport.abort()
            return
        for message in messages:
            try:
                self._receive(message)
            except Exception:
                # The top of a message's lane: a bug costs one request, and no other.
                log.exception("%s cannot be applied", message)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        if not self.ended.done():
            self.ended.set_result(None)
