"""The scheduler's channel against a port that plays a worker."""

import os
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from tests.embeds.engines import Engine, wait_for
from tests.embeds.sessions import frame
from vllm_kvpool.embeds.machines.session import HeartbeatPolicy
from vllm_kvpool.embeds.protocol.messages import (
    MAX_FRAME_BYTES,
    OLDEST_VERSION,
    VERSION,
    Envelope,
    Expect,
    Forget,
    Goodbye,
    Heartbeat,
    HeldBytes,
    Message,
    PeerHello,
    PeerRole,
    Push,
    Taken,
    decode,
    decode_body,
    encode,
    encode_body,
)
from vllm_kvpool.embeds.protocol.outbox import LATEST_S
from vllm_kvpool.embeds.worker_channel import WorkerCard, WorkerChannel, tokens_of
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.network.transport_zmq import Link, ZmqTransport

PATIENCE_S = 10.0
TOKEN = b"token"


def greeting(stranger: ZmqTransport, links: WorkerChannel, deadline: float) -> Link:
    """The link over which the links have greeted."""
    greeted: list[Link] = []
    while not greeted and time.monotonic() < deadline:
        links.poll()
        greeted = [frame.link for frame in stranger.poll(0.01)]
    return greeted[0]


def test_who_wakes_sockets_that_have_closed_wakes_nobody() -> None:
    """Their number may be another file's by then; stopping a worker met that now and then."""
    sockets = ZmqTransport(None, MAX_FRAME_BYTES)
    sockets.wake()
    before = set(os.listdir("/proc/self/fd"))
    sockets.close()
    freed = before - set(os.listdir("/proc/self/fd"))
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(len(freed) + 1)]
    try:
        assert freed & {str(fd) for fd in others}, "no number was given again"
        sockets.wake()
        for fd in others:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(fd)
    finally:
        for fd in others:
            os.close(fd)


def contexts(monkeypatch: pytest.MonkeyPatch) -> list[zmq.Context[zmq.Socket[bytes]]]:
    """Return a list that collects every ZMQ context made from now on."""
    made: list[zmq.Context[zmq.Socket[bytes]]] = []
    new = zmq.Context

    def note() -> zmq.Context[zmq.Socket[bytes]]:
        made.append(new())
        return made[-1]

    monkeypatch.setattr(zmq, "Context", note)
    return made


def test_links_that_cannot_be_made_leave_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    made = contexts(monkeypatch)
    with pytest.raises(ConfigError, match="cannot be connected to"):
        WorkerChannel(("tcp://127.0.0.1:1", "nothing://here"), [TOKEN] * 2)
    assert [each.closed for each in made] == [True]


def test_workers_of_one_host_give_their_tokens_by_rank() -> None:
    """Workers without a control port, as those of later pipeline stages, count as none."""
    cards = [WorkerCard(1, b"one", "here"), None, WorkerCard(0, b"zero", "here"), None]
    assert tokens_of(cards, 2, "here") == [b"zero", b"one"]
    assert tokens_of(cards, 1, "here") == [b"zero"]


def test_rank_on_another_host_ends_the_start_with_an_error() -> None:
    cards = [WorkerCard(0, b"zero", "here"), WorkerCard(1, b"one", "there")]
    with pytest.raises(ConfigError, match=r"rank 1 .*--tensor-parallel-size"):
        tokens_of(cards, 2, "here")
    assert tokens_of(cards, 1, "here") == [b"zero"], "an encoder of many ranks sends from the first"


def frames_until(stranger: ZmqTransport, last: Message) -> list[list[Message]]:
    """Return the messages of each frame received, up to the frame that ends with `last`."""
    deadline = time.monotonic() + PATIENCE_S
    frames: list[list[Message]] = []
    while not (frames and frames[-1][-1] == last):
        assert time.monotonic() < deadline, frames
        for arrived in stranger.poll(0.01):
            envelope = decode(arrived.data)
            frames.append([*map(decode_body, envelope.bodies)])
    return frames


@pytest.mark.parametrize("way", ["flush", "wait", "urgent", "late"])
def test_what_a_steps_requests_need_is_said_in_one_frame(way: str) -> None:
    now = [0.0]
    worker = ZmqTransport("tcp://127.0.0.1:*", MAX_FRAME_BYTES)
    links = WorkerChannel((worker.endpoint,), [TOKEN], clock=lambda: now[0])
    try:
        deadline = time.monotonic() + PATIENCE_S
        link = greeting(worker, links, deadline)
        answer = PeerHello((OLDEST_VERSION, VERSION), "w", PeerRole.CONSUMER, "", 1.0, answer=True)
        assert worker.send(link, frame("w", answer))
        while not links.are_up:
            assert time.monotonic() < deadline
            links.poll()
        needs: list[Message] = [Expect("a", 0, (), 4, 1.0), Push("b", ("tcp://c:1",))]
        for body in needs:
            links.send(body)
            links.poll()  # as each request of a step does
        assert not worker.poll(0.05), "the step has not been planned"
        if way == "flush":
            links.flush()
        elif way == "wait":
            links.poll(0.001)
        elif way == "late":
            now[0] += LATEST_S
            links.poll()
        else:
            needs.append(Forget("c"))
            links.send(Forget("c"))
        assert frames_until(worker, needs[-1]) == [needs]
        links.flush()
        assert not worker.poll(0.05), "nothing is said twice"
    finally:
        links.close()
        worker.close()


@pytest.fixture
def heard_of() -> Iterator[Callable[..., list[Message | None]]]:
    """Return what the channel hears of a stranger at its worker's port that sends these frames."""
    stranger = ZmqTransport("tcp://127.0.0.1:*", MAX_FRAME_BYTES)
    links = WorkerChannel((stranger.endpoint,), [TOKEN])

    def heard_of(*frames: bytes) -> list[Message | None]:
        deadline = time.monotonic() + PATIENCE_S
        link = greeting(stranger, links, deadline)
        assert all(stranger.send(link, each) for each in frames)
        heard = links.poll(0.01)
        while not heard and time.monotonic() < deadline:
            heard = links.poll(0.01)
        assert not links.are_up
        return [said.body for said in heard]

    yield heard_of
    links.close()
    stranger.close()


def test_what_is_no_frame_is_ignored(heard_of: Callable[..., list[Message | None]]) -> None:
    last = frame("s", HeldBytes(1))
    bad = b"", b"garbage", b"\x94" * 9, frame("s", Heartbeat())[:-1]
    assert heard_of(*bad, last) == [HeldBytes(1)]


def test_a_word_that_is_not_known_costs_no_other_of_its_frame(
    heard_of: Callable[..., list[Message | None]],
) -> None:
    unknown = msgspec.Raw(msgspec.msgpack.encode({"type": "of_tomorrow"}))
    more = (encode_body(Taken("a")), unknown, encode_body(Taken("b")))
    whole = encode(Envelope("s", "", (encode_body(Heartbeat()), *more)))
    assert heard_of(whole) == [Taken("a"), Taken("b")]


# A worker that does not answer


class Watched:
    """Links in session with a worker that answers only when it is told to; time is given."""

    def __init__(self) -> None:
        self.now = 0.0
        self.worker = ZmqTransport("tcp://127.0.0.1:*", MAX_FRAME_BYTES)
        heartbeats = HeartbeatPolicy(heartbeat_s=4.0, max_failures=2)
        endpoints = (self.worker.endpoint,)
        self.links = WorkerChannel(endpoints, [TOKEN], None, heartbeats, lambda: self.now)
        self.link = greeting(self.worker, self.links, time.monotonic() + PATIENCE_S)
        hello = PeerHello((OLDEST_VERSION, VERSION), "w", PeerRole.CONSUMER, "", 4.0, answer=True)
        self.say(hello)
        assert self.links.are_up

    def say(self, body: Message) -> None:
        """The worker says something, and it is there when this returns."""
        assert self.worker.send(self.link, frame("w", body))
        self.links.poll(PATIENCE_S)

    def pass_time(self, seconds: float, looks: int = 1) -> None:
        """Time goes by, with so many looks, evenly."""
        for _ in range(looks):
            self.now += seconds / looks
            self.links.poll()

    def close(self) -> None:
        self.links.close()
        self.worker.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.close()


def test_time_in_which_a_worker_does_not_answer_counts(watched: Watched) -> None:
    watched.pass_time(1.0)  # it is asked
    watched.pass_time(7.9, looks=79)
    assert watched.links.silent_s == pytest.approx(7.9)
    watched.say(Taken("a"))
    assert watched.links.silent_s == 0
    assert watched.links.are_up


def test_a_worker_that_answers_is_never_silent(watched: Watched) -> None:
    for _ in range(20):
        watched.pass_time(1.0)
        watched.say(Heartbeat(answer=True))
    assert watched.links.are_up
    assert watched.links.silent_s == 0


def test_a_step_that_takes_an_hour_costs_no_worker(watched: Watched) -> None:
    """Neither did the scheduler look, nor had the worker a turn."""
    watched.pass_time(1.0)
    watched.pass_time(3600.0)
    assert watched.links.silent_s == 4.0, "half of two heartbeats"
    watched.say(Heartbeat(answer=True))
    watched.pass_time(3600.0)
    assert watched.links.silent_s == 0
    watched.pass_time(3600.0, looks=3)
    assert watched.links.silent_s == 12.0


def test_a_worker_that_says_that_it_ends_is_lost_at_once(watched: Watched) -> None:
    watched.say(Goodbye())
    assert not watched.links.are_up
    assert watched.links.silent_s == float("inf")


def test_orders_that_a_full_queue_refuses_are_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(PeerRole.CONSUMER) as engine:
        views = [engine.request(f"r{number}", (f"h{number}", 4)) for number in range(10)]
        engine.awaits(views[0])
        channel = engine.scheduler._channel
        with monkeypatch.context() as patch:
            patch.setattr(channel._sockets, "send", lambda link, data: False)
            engine.may_go(views[1])
        assert not channel.are_up
        for view in views:
            engine.awaits(view)
        consumer = engine.workers[0]._control._consumer
        assert consumer is not None
        wait_for(lambda: consumer.items.keys() == {f"h{number}" for number in range(10)})
