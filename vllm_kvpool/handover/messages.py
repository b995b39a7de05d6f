"""The messages about hand-overs: decode watches a prompt, prefill says how far it is stored (pure).

A frame is the version and one message, in msgpack. Any message may be lost, doubled or late. A
notice is a hint to look at once: cells are verified whatever it says.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from vllm_kvpool.errors import ProtocolError
from vllm_kvpool.parsing import UNREADABLE

VERSION: Final = 1
TOPIC_BYTES = 20  # as the hashes of chunks
MAX_FRAME_BYTES = 256
MAX_CHUNKS = 1 << 32

Topic = Annotated[bytes, Meta(min_length=TOPIC_BYTES, max_length=TOPIC_BYTES)]
"""The hash of a prompt's end: equal at prefill and decode, and known to who has the prompt."""
Chunks = Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]


class Watch(msgspec.Struct, frozen=True, gc=False, tag="watch", array_like=True):
    """Decode to prefill: answer with a `Notice` as soon as the topic is known, and on each change.

    A second watch of a topic has it answered once more.
    """

    topic: Topic


class Unwatch(msgspec.Struct, frozen=True, gc=False, tag="unwatch", array_like=True):
    """Decode to prefill: send no more notices of the topic."""

    topic: Topic


class Notice(msgspec.Struct, frozen=True, gc=False, tag="notice", array_like=True):
    """Prefill to decode: how far this rank has stored a prompt."""

    topic: Topic
    stored: Chunks
    """A store has this rank's cells of all chunks before this index."""
    ended: Chunks | None
    """No chunk from this index on will come; None while more may."""


Message = Watch | Unwatch | Notice


class _Frame(msgspec.Struct, frozen=True, gc=False, array_like=True):
    version: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(_Frame)
_bodies: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the message as one frame."""
    return _encoder.encode(_Frame(VERSION, msgspec.Raw(_encoder.encode(message))))


def decode(frame: bytes) -> Message:
    """Return the message of a frame; ProtocolError if it is none of this version."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    try:
        read = _frames.decode(frame)
        if read.version != VERSION:
            raise ProtocolError(f"a message of version {read.version}; this one is {VERSION}")
        return _bodies.decode(read.body)
    except UNREADABLE as error:
        raise ProtocolError(f"not a message of version {VERSION}: {error}") from None
