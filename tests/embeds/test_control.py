"""The control thread's loop over a scripted socket: frames in, frames out, wake-ups."""

import contextlib
import itertools
import os
import resource
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import pytest

from tests.embeds.sessions import RHYTHM, hello
from tests.embeds.world import limits, shape_of
from tests.support.fakes import FakeClock
from vllm_kvpool.embeds.control import METRICS_EVERY_S, Control
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.effects import Allocate, Effect
from vllm_kvpool.embeds.machines.session import FIRST_GREETING_S
from vllm_kvpool.embeds.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_RANKS,
    Cancel,
    Code,
    Envelope,
    Expect,
    Goodbye,
    Grant,
    Message,
    Offer,
    OfferAck,
    PeerHello,
    PeerRole,
    Requested,
    decode,
    decode_body,
    encode,
    encode_body,
)
from vllm_kvpool.network.transport_zmq import Frame, Link, RefusedHandshake, ZmqTransport

PEER, HOST = Link(identity=b"peer"), "127.0.0.1"


class HeldTransport:
    """A transport to one peer: `poll` returns `arrives`; sent messages are in `sent`."""

    def __init__(self) -> None:
        self.arrives: list[Frame] = []
        self.sent: list[list[Message]] = []
        self.timeouts_s: list[float] = []
        self.wakes = 0
        self.while_asleep: list[Message] = []

    def poll(self, timeout_s: float) -> list[Frame]:
        self.timeouts_s.append(timeout_s)
        arrived, self.arrives = self.arrives, []
        return arrived

    def send(self, link: Link, data: bytes) -> bool:
        envelope = decode(data)
        self.sent.append([*map(decode_body, envelope.bodies)])
        return True

    def take_refused(self) -> list[RefusedHandshake]:
        return []

    def wake(self) -> None:
        self.wakes += 1


class IdleDataPlane:
    """Moves nothing."""

    def perform(self, effect: Effect) -> None: ...
    def begin(self) -> None: ...


def control_with(
    dataplane: IdleDataPlane | None = None, clock: FakeClock | None = None
) -> tuple[Control, HeldTransport]:
    """A consumer's, in session with a producer."""
    sockets = HeldTransport()
    machine = Consumer(1 << 20, limits())
    control = Control(
        hello("own"),
        cast("ZmqTransport", sockets),
        RHYTHM,
        dataplane or IdleDataPlane(),
        consumer=machine,
        producer=None,
        clock=clock or FakeClock(1.0),
    )
    for name in "abc":
        machine.expect(Expect(name, 0), 1.0)
    arrive(control, sockets, hello("peer", role=PeerRole.PRODUCER))
    sockets.sent.clear()
    return control, sockets


def arrive(
    control: Control, sockets: HeldTransport, body: Message, *more: msgspec.Raw, target: str = ""
) -> None:
    """A frame of the peer comes, and is dealt with."""
    frame = encode(Envelope("peer", target, (encode_body(body), *more)))
    sockets.arrives.append(Frame(PEER, frame, HOST))
    control.turn(0.0)


def offers() -> Sequence[Offer]:
    return [Offer(tid, name, shape_of(3), "digest") for tid, name in enumerate("abc", 1)]


def test_what_comes_in_one_frame_is_answered_in_one() -> None:
    control, sockets = control_with()
    first, *others = offers()
    arrive(control, sockets, first, *map(encode_body, others))
    (answers,) = sockets.sent
    assert [type(each) for each in answers].count(OfferAck) == 3
    assert [type(each) for each in answers].count(Grant) == 3


def test_items_are_counted_by_state() -> None:
    clock = FakeClock(1.0)
    control, sockets = control_with(clock=clock)
    arrive(control, sockets, offers()[0])
    clock.advance(METRICS_EVERY_S)
    control.turn(0.0)
    counted = {
        sample.removeprefix("kvpool_ec_items"): value
        for sample, value in control.registry.snapshot().items()
        if sample.startswith("kvpool_ec_items")
    }
    assert counted == {
        "{state=bootstrapping}": 2,
        "{state=waiting}": 0,
        "{state=transferring}": 1,
        "{state=partial}": 0,
        "{state=suspended}": 0,
        "{state=success}": 0,
    }


def too_large(tid: int) -> Offer:
    """An offer that is answered by `refusal`, whatever else is there."""
    return Offer(tid, f"large {tid}", shape_of(1 << 38), "digest")


def refusal(tid: int) -> OfferAck:
    return OfferAck(tid, Code.TOO_LARGE)


@pytest.mark.parametrize(
    "bad",
    [{"type": "of_tomorrow"}, {"type": "offer", "tid": "one"}, 7],
    ids=["unknown", "wrong", "none"],
)
def test_a_message_that_nobody_knows_costs_no_other_of_its_frame(bad: object) -> None:
    control, sockets = control_with()
    raw = msgspec.Raw(msgspec.msgpack.encode(bad))
    arrive(control, sockets, too_large(8), raw, encode_body(too_large(9)))
    assert sockets.sent == [[refusal(8), refusal(9)]]
    assert control.counts["bad_messages"] == 1


def test_nothing_of_a_frame_of_another_incarnation_is_heard() -> None:
    control, sockets = control_with()
    frame = encode(Envelope("other", "", (encode_body(too_large(8)), encode_body(too_large(9)))))
    sockets.arrives.append(Frame(PEER, frame, HOST))
    control.turn(0.0)
    assert control.counts["strays"] == 2
    assert not any(isinstance(body, OfferAck) for bodies in sockets.sent for body in bodies)


def test_messages_of_no_session_are_greeted_once_for_many() -> None:
    """Each greeting made a peer ask for all its items: hundreds of thousands of questions."""
    clock = FakeClock()
    control, sockets = control_with(clock=clock)
    frame = encode(Envelope("other", "", (encode_body(too_large(8)),)))

    def greetings(num_frames: int) -> int:
        sockets.sent.clear()
        sockets.arrives += [Frame(PEER, frame, HOST)] * num_frames
        control.turn(0.0)
        return sum(isinstance(body, PeerHello) for bodies in sockets.sent for body in bodies)

    assert greetings(900) == 1
    assert greetings(10) == 0
    clock.advance(2 * FIRST_GREETING_S)
    assert greetings(10) == 1


def test_nothing_behind_a_goodbye_is_heard() -> None:
    control, sockets = control_with()
    words = (too_large(8), Goodbye(), too_large(9))
    arrive(control, sockets, words[0], *map(encode_body, words[1:]))
    said = [body for bodies in sockets.sent for body in bodies]
    assert refusal(9) not in said


def test_who_posts_wakes_the_loop_only_where_it_sleeps() -> None:
    control, sockets = control_with()
    done: list[int] = []
    control.post(lambda now: done.append(0))
    assert sockets.wakes == 0, "the next turn looks before it sleeps"
    control.turn(5.0)
    assert sockets.timeouts_s[-1] == 0.0
    assert done == [0]

    def poll(timeout_s: float) -> list[Frame]:
        assert timeout_s == 5.0
        for number in (1, 2):
            control.post(lambda now, number=number: done.append(number))  # type: ignore[misc]
        return []

    sockets.poll = poll  # type: ignore[method-assign]
    control.turn(5.0)
    assert sockets.wakes == 1
    assert done == [0, 1, 2]


@pytest.mark.parametrize("is_bug", [False, True])
def test_nothing_is_kept_for_a_thread_that_has_ended(is_bug: bool) -> None:
    """Posted calls hold tensors, and the engine may run on after its control thread has ended."""
    control, _ = control_with()

    def end(now: float) -> None:
        if is_bug:
            raise SystemExit
        control.stop()

    def never(now: float) -> None:
        raise AssertionError

    control.post(end)
    control.run()
    control.post(never)
    assert control._inbox.empty()


BAD_HELLOS: dict[str, dict[str, Any]] = {
    "more ranks than engines have": {"endpoints": tuple(map(str, range(MAX_RANKS + 1)))},
    "a rank before the first": {"rank": -2, "endpoints": ("tcp://p:1",)},
    "a heart that never beats": {"heartbeat_s": float("inf")},
    "no number": {"heartbeat_s": float("nan")},
}


@pytest.mark.parametrize("name", BAD_HELLOS)
def test_who_cannot_be_is_not_welcome(name: str) -> None:
    control, sockets = control_with()
    known = control._peers._connections[PEER].session.peer
    arrive(control, sockets, hello("peer", role=PeerRole.PRODUCER, **BAD_HELLOS[name]))
    assert control.counts["bad_messages"] == 1
    assert control._peers._connections[PEER].session.peer == known
    assert sockets.sent == []


class PoorDataPlane(IdleDataPlane):
    """A data plane on a host without free memory."""

    def perform(self, effect: Effect) -> None:
        assert isinstance(effect, Allocate)
        raise MemoryError("none")


def test_an_item_that_the_host_has_no_memory_for_fails_alone() -> None:
    control, sockets = control_with(dataplane=PoorDataPlane())
    arrive(control, sockets, offers()[0])
    arrive(control, sockets, offers()[0])
    said = [body for frame in sockets.sent for body in frame]
    (cancel,) = {body for body in said if isinstance(body, Cancel)}
    assert (cancel.tid, cancel.code) == (1, Code.TOO_LARGE)


@contextlib.contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """So many files, at most, can be opened meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir("/proc/self/fd")))
    free = (fd for fd in range(soft) if fd not in used)
    last = next(itertools.islice(free, number, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (last, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_endpoints_than_descriptors_do_not_end_the_loop() -> None:
    """Requests name endpoints, and so do peers."""
    sockets, machine = (
        ZmqTransport("tcp://127.0.0.1:*", MAX_FRAME_BYTES),
        Consumer(1 << 20, limits()),
    )
    control = Control(
        hello("own"), sockets, RHYTHM, IdleDataPlane(), consumer=machine, producer=None
    )
    told = Expect("a", 0, tuple(f"tcp://127.0.0.1:{port}" for port in range(1, 65)))
    try:
        with descriptors_left(32):
            control.post(lambda now: machine.expect(told, now))
            control.turn(0.0)
        refused = control.counts["bad_endpoints"]
        assert 0 < refused < len(told.peers)
        control.post(lambda now: machine.expect(told, now))
        control.turn(0.0)
        assert control.counts["bad_endpoints"] == refused, "they are not tried again"
    finally:
        sockets.close()


def test_items_of_requests_that_come_in_parts_are_kept_only_when_all_parts_are_here() -> None:
    control, _ = control_with()
    consumer = control._consumer
    assert consumer is not None
    for part, names in enumerate((("a",), ("c",))):
        control._on_scheduler_message(Requested(names, part, 2), 1.0)
        assert {name for name, item in consumer.items.items() if item.requested} == (
            {"a", "c"} if part else {"a", "b", "c"}
        )
    control._on_scheduler_message(Requested(("never all",), 0, 2), 1.0)
    control._on_scheduler_message(Requested(("a",)), 1.0)
    assert {name for name, item in consumer.items.items() if item.requested} == {"a"}
