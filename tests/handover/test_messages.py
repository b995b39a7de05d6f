"""Frames of the notices' channel: bounded, versioned, typed."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.errors import ProtocolError
from vllm_kvpool.handover.messages import (
    MAX_CHUNKS,
    MAX_FRAME_BYTES,
    TOPIC_BYTES,
    VERSION,
    Message,
    Notice,
    Unwatch,
    Watch,
    decode,
    encode,
)

TOPIC = bytes(range(TOPIC_BYTES))
topics = st.binary(min_size=TOPIC_BYTES, max_size=TOPIC_BYTES)
chunks = st.integers(0, MAX_CHUNKS)


@given(
    st.one_of(
        st.builds(Watch, topics),
        st.builds(Unwatch, topics),
        st.builds(Notice, topics, chunks, st.none() | chunks),
    )
)
def test_message_that_is_sent_is_read(message: Message) -> None:
    frame = encode(message)
    assert len(frame) <= MAX_FRAME_BYTES
    assert decode(frame) == message


def packed(version: object, body: object) -> bytes:
    return msgspec.msgpack.encode([version, body])


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        packed(VERSION, ["watch", TOPIC]) + b"x",
        packed(VERSION + 1, ["watch", TOPIC]),
        packed("1", ["watch", TOPIC]),
        packed(VERSION, ["watch", TOPIC[1:]]),
        packed(VERSION, ["watch", TOPIC + b"x"]),
        packed(VERSION, ["watch"]),
        packed(VERSION, ["run", TOPIC]),
        packed(VERSION, ["notice", TOPIC, -1, None]),
        packed(VERSION, ["notice", TOPIC, MAX_CHUNKS + 1, None]),
        packed(VERSION, ["notice", TOPIC, 1, -1]),
        packed(VERSION, ["notice", TOPIC, 1.5, None]),
        packed(VERSION, ["notice", TOPIC, None, None]),
        packed(VERSION, ["notice", TOPIC, 1, None]) + bytes(MAX_FRAME_BYTES),
        packed(VERSION, [[[[[]]]]] * 40),
    ],
)
def test_frame_that_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


@given(st.binary(max_size=2 * MAX_FRAME_BYTES))
def test_any_bytes_are_a_message_or_refused(frame: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(frame)
