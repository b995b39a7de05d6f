"""Sockets that one thread owns, and the frames of a turn's messages."""

import contextlib
import random
import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq
import zmq.auth

from tests.embeds.engines import wait_for
from tests.embeds.strangers import GREETING, RawStranger, large, ready
from vllm_kvpool.embeds.protocol import transport_zmq
from vllm_kvpool.embeds.protocol.messages import (
    FULL_FRAME_BYTES,
    MAX_FRAME_BYTES,
    MAX_MESSAGES,
    CancelAck,
    Complete,
    HeldBytes,
    Message,
    Requested,
    decode,
    decode_body,
)
from vllm_kvpool.embeds.protocol.transport_zmq import (
    BYTES_AT_ONCE,
    FRAMES_AT_ONCE,
    LATEST_S,
    MAX_RECEIVE_QUEUE_BYTES,
    NO_KEY,
    NOT_LISTED,
    Link,
    Outbox,
    RefusedHandshake,
    ZmqTransport,
    read_keys,
)

HOST = "tcp://127.0.0.1:0"
CALLERS = 3
STEPS = 1500
BURST = 4
LOST_S = 5.0  # a frame that is not heard by then has been missed
SOON_S = 1.0
JUDGING_POLLS = 50


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
    with closing(ZmqTransport(HOST, admits=lambda address: address != FAR)) as sockets:
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
    with closing(ZmqTransport(HOST, admits=lambda address: address != FAR)) as listener:
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
        closing(ZmqTransport(HOST, admits=admitted.__contains__)) as listener,
        closing(ZmqTransport(None)) as caller,
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
        closing(ZmqTransport(HOST, ours)) as listener,
        closing(ZmqTransport(None, ours)) as caller,
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


A, B = Link("tcp://a:1"), Link(identity=b"b")


def frames_of(outbox: Outbox, now: float) -> dict[Link, list[tuple[str, list[Message]]]]:
    """The frames of each link: to whom, and what is in it."""
    return {
        link: [unpacked(frame) for frame in outbox.frames(said)] for link, said in outbox.take(now)
    }


def unpacked(frame: bytes) -> tuple[str, list[Message]]:
    assert len(frame) <= MAX_FRAME_BYTES
    envelope = decode(frame)
    assert envelope.source == "own"
    return envelope.target, [*map(decode_body, envelope.bodies)]


def filled(link: Link, bodies: Iterable[Message], target: str = "peer") -> Outbox:
    outbox = Outbox("own")
    for body in bodies:
        outbox.add(link, target, body, 0.0)
    return outbox


def test_a_turns_messages_to_a_peer_are_one_frame_in_order() -> None:
    outbox = filled(A, map(CancelAck, range(5)))
    outbox.add(B, "other", CancelAck(9), 0.0)
    assert frames_of(outbox, 0.0) == {
        A: [("peer", [CancelAck(tid) for tid in range(5)])],
        B: [("other", [CancelAck(9)])],
    }
    assert not frames_of(outbox, 0.0), "nothing is said twice"


def test_a_frame_is_for_one_incarnation() -> None:
    outbox = Outbox("own")
    for tid, target in enumerate(("", "old", "old", "new", "old")):
        outbox.add(A, target, CancelAck(tid), 0.0)
    assert frames_of(outbox, 0.0)[A] == [
        ("", [CancelAck(0)]),
        ("old", [CancelAck(1), CancelAck(2)]),
        ("new", [CancelAck(3)]),
        ("old", [CancelAck(4)]),
    ]


def test_frames_are_bounded() -> None:
    outbox = filled(A, map(CancelAck, range(2 * MAX_MESSAGES + 1)))
    sizes = [len(bodies) for _, bodies in frames_of(outbox, 0.0)[A]]
    assert sizes == [MAX_MESSAGES, MAX_MESSAGES, 1]
    long = [Requested(("x" * (FULL_FRAME_BYTES // 3 - 100),), part) for part in range(6)]
    frames = frames_of(filled(A, long), 0.0)[A]
    assert [body for _, bodies in frames for body in bodies] == long
    assert [len(bodies) for _, bodies in frames] == [3, 3]


@pytest.mark.parametrize("body", [Complete(1), HeldBytes(5)])
def test_what_nobody_waits_for_goes_with_what_somebody_does(body: Message) -> None:
    outbox = filled(A, [body])
    assert not frames_of(outbox, LATEST_S / 2)
    outbox.add(B, "other", CancelAck(1), LATEST_S / 2)
    assert A not in frames_of(outbox, LATEST_S / 2), "another link's frame is no reason"
    outbox.add(A, "peer", CancelAck(2), LATEST_S / 2)
    assert frames_of(outbox, LATEST_S / 2) == {A: [("peer", [body, CancelAck(2)])]}
    assert outbox.next_at() == float("inf")


def test_what_nobody_waits_for_goes_all_the_same() -> None:
    outbox = filled(A, [Complete(1)])
    assert outbox.next_at() == LATEST_S
    outbox.add(A, "peer", Complete(2), LATEST_S / 2)
    assert outbox.next_at() == LATEST_S, "later ones do not put it off"
    assert frames_of(outbox, LATEST_S) == {A: [("peer", [Complete(1), Complete(2)])]}


def test_what_was_for_who_is_gone_is_not_for_who_comes() -> None:
    outbox = filled(A, [Complete(1), CancelAck(1)])
    outbox.drop(A)
    assert not frames_of(outbox, 1.0)
    assert outbox.next_at() == float("inf")
