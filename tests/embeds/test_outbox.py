"""The frames of a turn's messages."""

from collections.abc import Iterable

import pytest

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
from vllm_kvpool.embeds.protocol.outbox import LATEST_S, Outbox
from vllm_kvpool.network.transport_zmq import Link

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
