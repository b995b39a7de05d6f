"""Sockets that one thread owns."""

import contextlib
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq
import zmq.auth

from tests.embeds.engines import wait_for
from tests.embeds.strangers import GREETING, RawStranger, large, ready
from vllm_kvpool.embeds.protocol.messages import (
    MAX_FRAME_BYTES,
)
from vllm_kvpool.network import transport_zmq
from vllm_kvpool.network.transport_zmq import (
    BYTES_AT_ONCE,
    FRAMES_AT_ONCE,
    NO_KEY,
    NOT_LISTED,
    Link,
    RefusedHandshake,
    ZmqTransport,
    read_keys,
)

HOST = "tcp://127.0.0.1:0"
CALLERS = 3
STEPS = 1500
BURST = 4
MAX_RECEIVE_QUEUE_BYTES = transport_zmq.RECEIVE_QUEUE_FRAMES * MAX_FRAME_BYTES
LOST_S = 5.0  # a frame that is not heard by then has been missed
SOON_S = 1.0
JUDGING_POLLS = 50


@pytest.fixture
def listener() -> Iterator[ZmqTransport]:
    with closing(ZmqTransport(HOST, MAX_FRAME_BYTES)) as sockets:
        yield sockets


@pytest.fixture
def callers(listener: ZmqTransport) -> Iterator[list[ZmqTransport]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(ZmqTransport(None, MAX_FRAME_BYTES)))
            for _ in range(CALLERS)
        ]


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
    most = 2 * FRAMES_AT_ONCE - 1
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


# Who may connect, and how much of it is kept

FAR = "127.0.0.3"
KERNEL_BYTES = 24 << 20  # the most that both ends' socket buffers hold
FLOOD_BYTES = 1200 << 20


def resident_bytes() -> int:
    """Memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def judge_handshakes(listener: ZmqTransport) -> None:
    """Poll until handshakes that have begun are judged. A raw caller cannot see its admission."""
    for _ in range(JUDGING_POLLS):
        assert not listener.poll(0.01)


def refused_by(listener: ZmqTransport) -> list[RefusedHandshake]:
    """The handshakes that wait, and that the listener refuses."""
    deadline = time.monotonic() + LOST_S
    refused: list[RefusedHandshake] = []
    while not refused and time.monotonic() < deadline:
        assert not listener.poll(0.01)
        refused += listener.take_refused()
    return refused


@pytest.fixture
def guarded() -> Iterator[ZmqTransport]:
    """A listener that admits every host but FAR."""
    with closing(
        ZmqTransport(HOST, MAX_FRAME_BYTES, admits=lambda address: address != FAR)
    ) as sockets:
        yield sockets


@pytest.mark.parametrize(
    ("nbytes", "is_command"),
    [(MAX_FRAME_BYTES, False), (8 << 20, False), (8 << 20, True)],
    ids=["frames", "large frames", "handshakes"],
)
def test_host_that_is_not_admitted_fills_no_memory_of_a_busy_thread(
    guarded: ZmqTransport, nbytes: int, is_command: bool
) -> None:
    """The address is judged before anything is kept, even by the thread that reads late.

    libzmq may close a connection for the size of a frame before it asks about the address.
    """
    frame = large(nbytes, is_command=is_command)
    before = resident_bytes()
    stranger = RawStranger(guarded.endpoint, FAR)
    try:
        stranger.send(GREETING + (b"" if is_command else ready()))
        assert not stranger.send(frame, FLOOD_BYTES // nbytes)
        assert stranger.num_sent < KERNEL_BYTES
        # The sender and earlier tests have some of this process's memory.
        assert resident_bytes() - before < 4 * KERNEL_BYTES
        if nbytes == MAX_FRAME_BYTES:
            assert refused_by(guarded) == [RefusedHandshake(FAR, NOT_LISTED)]
    finally:
        stranger.close()


@pytest.mark.parametrize("source", [FAR, "127.0.0.2"])
def test_handshake_that_does_not_end_is_closed_after_its_time(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By libzmq, whatever the control thread does; so is the part of a frame that was held."""
    monkeypatch.setattr(transport_zmq, "HANDSHAKE_S", 0.2)
    with closing(
        ZmqTransport(HOST, MAX_FRAME_BYTES, admits=lambda address: address != FAR)
    ) as listener:
        stranger = RawStranger(listener.endpoint, source)
        stranger.socket.settimeout(LOST_S)
        stranger.send(GREETING + large(MAX_FRAME_BYTES, is_command=True)[:-1])
        with contextlib.suppress(ConnectionResetError):
            while stranger.socket.recv(4096):
                pass
        stranger.close()


def test_frames_of_an_admitted_host_are_bounded_in_bytes(guarded: ZmqTransport) -> None:
    stranger = RawStranger(guarded.endpoint, "127.0.0.2")
    before = resident_bytes()
    try:
        stranger.send(GREETING + ready())
        judge_handshakes(guarded)
        frame = large(MAX_FRAME_BYTES)
        assert not stranger.send(frame, 4 * MAX_RECEIVE_QUEUE_BYTES // MAX_FRAME_BYTES)
        assert stranger.num_sent < MAX_RECEIVE_QUEUE_BYTES + KERNEL_BYTES
        assert resident_bytes() - before < MAX_RECEIVE_QUEUE_BYTES + KERNEL_BYTES
        read = guarded.poll(0.0)
        assert sum(len(each.data) for each in read) < BYTES_AT_ONCE + MAX_FRAME_BYTES
        assert guarded.poll(0.0), "the rest is read in the next turn"
    finally:
        stranger.close()


def test_frame_over_the_limit_ends_its_connection_alone(
    guarded: ZmqTransport, callers: list[ZmqTransport]
) -> None:
    link = callers[0].connect(guarded.endpoint)
    stranger = RawStranger(guarded.endpoint, "127.0.0.2")
    try:
        stranger.send(GREETING + ready())
        judge_handshakes(guarded)
        assert not stranger.send(large(MAX_FRAME_BYTES + 1), FLOOD_BYTES // MAX_FRAME_BYTES)
        assert callers[0].send(link, b"kept")
        assert [data for _, data in heard(guarded, 1)] == [b"kept"]
    finally:
        stranger.close()


def test_caller_that_is_refused_sees_its_link_broken_and_gets_through_when_admitted() -> None:
    """libzmq itself does not try again once it has read a refusal."""
    admitted: set[str] = set()
    with (
        closing(ZmqTransport(HOST, MAX_FRAME_BYTES, admits=admitted.__contains__)) as listener,
        closing(ZmqTransport(None, MAX_FRAME_BYTES)) as caller,
    ):
        link = caller.connect(listener.endpoint)
        wait_for(lambda: not (listener.poll(0.01), caller.send(link, b"lost"))[1])
        # Twice where libzmq lost the connection before the refusal came.
        assert set(listener.take_refused()) == {RefusedHandshake("127.0.0.1", NOT_LISTED)}
        admitted.add("127.0.0.1")
        assert caller.disconnect(link)
        caller.connect(listener.endpoint)
        assert caller.send(link, b"heard")
        assert [data for _, data in heard(listener, 1)] == [b"heard"]


def test_caller_with_another_curve_key_is_refused_by_its_key(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("ours", "theirs")]
    for directory in directories:
        directory.mkdir()
        zmq.auth.create_certificates(directory, "cluster")
        (directory / "cluster.key_secret").chmod(0o600)
    ours, theirs = (read_keys(str(directory)) for directory in directories)
    assert ours is not None
    assert theirs is not None
    with (
        closing(ZmqTransport(HOST, MAX_FRAME_BYTES, ours)) as listener,
        closing(ZmqTransport(None, MAX_FRAME_BYTES, ours)) as caller,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as other,
    ):
        other.curve_publickey, other.curve_secretkey = theirs.public, theirs.secret
        other.curve_serverkey = ours.public  # which is no secret
        other.set(zmq.LINGER, 0)
        other.connect(listener.endpoint)
        other.send(b"never heard")
        link = caller.connect(listener.endpoint)
        assert caller.send(link, b"heard")
        assert [data for _, data in heard(listener, 1)] == [b"heard"]
        assert refused_by(listener) == [RefusedHandshake("127.0.0.1", NO_KEY)]
