"""Sockets of the control channel: what arrives is heard at once, whatever was said before."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import zmq

from vllm_kvpool.embeds.protocol.transport_zmq import FRAMES_AT_ONCE, Link, ZmqTransport

HOST = "tcp://127.0.0.1:0"
CALLERS = 3
STEPS = 1500
BURST = 4
LOST_S = 5.0  # a frame that is not heard by then has been missed
SOON_S = 1.0


@pytest.fixture
def listener() -> Iterator[ZmqTransport]:
    with closing(ZmqTransport(HOST)) as sockets:
        yield sockets


@pytest.fixture
def callers(listener: ZmqTransport) -> Iterator[list[ZmqTransport]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(ZmqTransport(None))) for _ in range(CALLERS)]


def heard(sockets: ZmqTransport, frames: int) -> list[tuple[Link, bytes]]:
    """So many frames, however often they are asked for; none takes long."""
    found: list[tuple[Link, bytes]] = []
    while len(found) < frames:
        requested = time.monotonic()
        found += [(frame.link, frame.data) for frame in sockets.poll(LOST_S)]
        assert time.monotonic() - requested < LOST_S / 2, f"{len(found)} of {frames} were heard"
    return found


def test_no_frame_is_missed_whatever_is_said_in_between(
    listener: ZmqTransport, callers: list[ZmqTransport]
) -> None:
    """To speak to somebody takes the news of what has come from there off its descriptor."""
    rng = random.Random(7)
    link = Link(endpoint=listener.endpoint)
    names: list[Link] = []
    for number, caller in enumerate(callers):
        caller.connect(listener.endpoint)
        caller.send(link, b"%d" % number)
        ((name, data),) = heard(listener, 1)
        assert data == b"%d" % number
        names.append(name)
    to_listener: Counter[int] = Counter()
    to_callers: Counter[int] = Counter()
    for _ in range(STEPS):
        number = rng.randrange(CALLERS)
        for _ in range(rng.randrange(1, BURST)):
            if rng.random() < 0.5:
                assert callers[number].send(link, b"up")
                to_listener[number] += 1
            else:
                assert listener.send(names[number], b"down")
                to_callers[number] += 1
        if rng.random() < 0.3 and to_listener.total():
            came = heard(listener, 1)
            to_listener.subtract(names.index(name) for name, _ in came)
        if rng.random() < 0.3 and to_callers[number]:
            to_callers[number] -= len(heard(callers[number], 1))
    heard(listener, to_listener.total())
    for number, caller in enumerate(callers):
        heard(caller, to_callers[number])


def test_more_frames_than_are_read_at_once_are_all_read(
    listener: ZmqTransport, callers: list[ZmqTransport]
) -> None:
    link = callers[0].connect(listener.endpoint)
    most = 2 * FRAMES_AT_ONCE + 1
    for number in range(most):
        assert callers[0].send(link, b"%d" % number)
    assert [int(data) for _, data in heard(listener, most)] == list(range(most))


def test_messages_of_several_parts_are_no_frames(listener: ZmqTransport) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(listener.endpoint)
        dealer.send_multipart([b"", b"a", b"b"])
        dealer.send(b"frame")
        assert [data for _, data in heard(listener, 1)] == [b"frame"]


def test_a_link_that_was_forgotten_hears_and_says_nothing(
    listener: ZmqTransport, callers: list[ZmqTransport]
) -> None:
    caller = callers[0]
    link = caller.connect(listener.endpoint)
    caller.send(link, b"once")
    ((name, _),) = heard(listener, 1)
    caller.disconnect(link)
    assert not caller.send(link, b"again")
    listener.send(name, b"late")
    caller.wake()
    assert caller.poll(SOON_S) == []
    again = caller.connect(listener.endpoint)
    assert caller.send(again, b"anew")
    assert [data for _, data in heard(listener, 1)] == [b"anew"]


def test_a_wait_ends_when_it_is_woken_and_when_its_time_is_over(listener: ZmqTransport) -> None:
    listener.wake()
    requested = time.monotonic()
    assert listener.poll(LOST_S) == []
    assert listener.poll(0.01) == []
    assert time.monotonic() - requested < LOST_S / 2
