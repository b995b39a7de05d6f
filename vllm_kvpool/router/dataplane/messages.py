"""What a worker and the controller's process say to each other, over a local stream socket.

A frame is its length in four bytes and a list of messages in MessagePack. Events and actions of
requests are sent as they are; a worker numbers its queries.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Literal, cast

import msgspec

from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.router.control.events import (
    Abort,
    Adopted,
    Cancelled,
    Decode,
    DecodeBegan,
    DecodeEnded,
    Prefill,
    PrefillEnded,
    Refuse,
)
from vllm_kvpool.router.control.requests import Ask, RequestId
from vllm_kvpool.router.ops.request_log import Observation

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
_LENGTH = 4


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# From workers


class Hello(_Message, frozen=True):
    """The first message. All that is open follows."""

    worker: str


class RequestOpen(_Message, frozen=True):
    """A request is open; with `waits` it wants to be told what to do, else it is `running`, the
    client is being sent its answer, or it is only passed on.

    `is_let_in`: a controller before this one has had it.
    """

    ask: Ask
    """Its times are on the monotonic clock, which all processes of a host share."""
    tenant: str
    waits: bool = True
    is_let_in: bool = False
    running: Adopted | None = None


class Over(_Message, frozen=True):
    """Nothing more comes of a request."""

    request_id: RequestId
    observed: list[Observation] = []


Question = Literal["others", "relay_to", "models", "health", "metrics"]
"""What a data plane may ask: a method of `Router`."""


class Query(_Message, frozen=True):
    """A question, answered by a `Reply` of the same number."""

    number: int
    question: Question
    args: tuple[str, ...] = ()


# To workers


Directive = Prefill | Decode | Refuse
"""What the controller wants of a request's handler."""


class Do(_Message, frozen=True):
    """An action for a request; `url` is its replica's."""

    action: Directive
    url: str = ""


class Bug(_Message, frozen=True):
    """The controller has failed with a request."""

    request_id: RequestId


class TokensPerByte(_Message, frozen=True):
    """What the rate is now."""

    value: float


class Reply(_Message, frozen=True):
    """The result of a query."""

    number: int
    value: Any


RequestEvent = Cancelled | PrefillEnded | DecodeBegan | DecodeEnded
FromWorker = Hello | RequestOpen | Over | RequestEvent | Query
ToWorker = Do | Abort | Bug | TokensPerByte | Reply

_encoder = msgspec.msgpack.Encoder()


def encode_frame(messages: list[Any]) -> bytes:
    """One frame."""
    body = _encoder.encode(messages)
    return len(body).to_bytes(_LENGTH, "little") + body


class Frames:
    """Messages out of the bytes of one direction of a connection; `kind` is a union of them."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[kind])
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Those that are complete now; ValueError where the bytes are none of ours."""
        unread = self._unread
        unread += data
        found: list[Any] = []
        begin = 0
        while len(unread) - begin >= _LENGTH:
            size = int.from_bytes(unread[begin : begin + _LENGTH], "little")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
            end = begin + _LENGTH + size
            if len(unread) < end:
                break
            found += self._decoder.decode(memoryview(unread)[begin + _LENGTH : end])
            begin = end
        del unread[:begin]
        return found


class MessageConnection(asyncio.Protocol):
    """`kind` is a union of what comes. What is sent in two turns of the loop goes out together."""

    def __init__(self, kind: Any, receive: Callable[[Any], None]) -> None:
        self._frames = Frames(kind)
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[Any] = []
        self._is_closed = False
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done once the connection has ended."""

    def send(self, message: Any) -> None:
        """Send a message, without waiting; one that is sent after the end is lost."""
        if not self._unsent:
            # A turn later: tasks that have been woken in this one often have more to say.
            self._loop.call_soon(self._loop.call_soon, self._flush)
        self._unsent.append(message)

    def close(self) -> None:
        """Send what is left, and close; one that is not made yet has ended with that."""
        self._flush()
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()
        else:
            self._end()

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if not messages or self._transport is None or self._transport.is_closing():
            return
        self._transport.write(encode_frame(messages))
        if self._transport.get_write_buffer_size() > MAX_FRAME_BYTES:
            log.error(
                "another process of the router leaves more than %d bytes unread: closed",
                MAX_FRAME_BYTES,
            )
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._is_closed:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._frames.feed(data)
        except UNREADABLE:
            log.exception("a frame of another process of the router cannot be decoded: closed")
            assert self._transport is not None
            self._transport.abort()
            return
        for message in messages:
            try:
                self._receive(message)
            except Exception:
                # The top of a message's lane: a bug costs one request, and no other.
                log.exception("a message of another process of the router has failed: %s", message)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
