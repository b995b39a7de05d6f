"""Server-sent events: whatever the pieces they come in."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.router.dataplane.responses import EngineLost
from vllm_kvpool.router.dataplane.sse import Events, frames

payload = st.binary(max_size=40).filter(lambda data: b"\n" not in data and b"\r" not in data)
noise = st.sampled_from(
    [b": keep-alive\n\n", b"event: x\n", b"id:7\n", b"retry: 5\n", b":\n", b"\n"]
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(bounds)]


@given(
    st.lists(st.tuples(st.lists(noise, max_size=2), payload)),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0)),
)
def test_events_do_not_depend_on_how_the_bytes_are_cut(
    parts: list[tuple[list[bytes], bytes]], end: bytes, places: list[int]
) -> None:
    stream = b"".join(b"".join(before) + frames((each,)) for before, each in parts)
    events = Events()
    pieces = cut(stream.replace(b"\n", end), places)
    # A comment or another field before a payload belongs to the same event, or to none.
    assert [each for piece in pieces for each in events.feed(piece)] == [each for _, each in parts]


@pytest.mark.parametrize(
    ("stream", "payloads"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\ndata: b\n\n", [b"\nb"]),
        (b"data:\n\n", [b""]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b": data: a\n\nxdata: b\n\n", []),
        (b"data: a\n", []),
        (b"data: \xc3\xa9\n\n", [b"\xc3\xa9"]),
    ],
)
def test_lines(stream: bytes, payloads: list[bytes]) -> None:
    assert Events().feed(stream) == payloads
    events = Events()
    assert [p for i in range(len(stream)) for p in events.feed(stream[i : i + 1])] == payloads


def test_comments_are_no_events_and_are_given_out_apart() -> None:
    events = Events()
    assert events.take_comment() == b""
    assert events.feed(b": one\n\n:two\r\ndata: a\n\n: thr") == [b"a"]
    assert (events.take_comment(), events.take_comment()) == (b":two\n\n", b"")
    assert events.feed(b"ee\n\n") == []
    assert events.take_comment() == b": three\n\n"


@pytest.mark.parametrize("line", [b"data: 0123456789", b"data: 0\n" * 2, b"data:\n" * 9, b":" * 13])
def test_an_event_that_does_not_end_is_an_error(line: bytes) -> None:
    events = Events(max_event_bytes=12)
    pieces = [line[i : i + 1] for i in range(len(line))]
    with pytest.raises(EngineLost):
        list(map(events.feed, pieces))


def test_the_bound_is_of_one_event() -> None:
    events = Events(max_event_bytes=12)
    pieces = [b"data: 01\n\nda", b"ta: 2\n\n"] * 10
    assert [p for piece in pieces for p in events.feed(piece)] == [b"01", b"2"] * 10
