"""Faults during the transfer of one item, one fault at a time.

tests/embeds/test_small_world.py covers all orders of these faults with a smaller item.
"""

import time
from collections.abc import Callable

import msgspec
import pytest

from tests.embeds.invariants import check_consumer, describe
from tests.embeds.world import World, limits, shape_of
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.effects import Send
from vllm_kvpool.embeds.machines.producer import ProducerLimits
from vllm_kvpool.embeds.machines.states import TransferState
from vllm_kvpool.embeds.protocol import messages as p
from vllm_kvpool.embeds.protocol.messages import MAX_FRAME_BYTES
from vllm_kvpool.embeds.protocol.rows import Extent, RowRun
from vllm_kvpool.errors import ProtocolError
from vllm_kvpool.network import transport_zmq
from vllm_kvpool.network.transport_zmq import ZmqTransport


def pair(**options: object) -> World:
    """A window of two rows of which each grant takes one; an item of 6 rows is wanted."""
    senders = options.pop("senders", None) or ProducerLimits(writers=2)
    bounds = limits(**{"default_allocate_tokens": 1, **options})
    world = World(1, arena_bytes=8, bounds=bounds, sender_limits=senders)  # type: ignore[arg-type]
    world.expect(world.consumers[0], "image")
    world.push(world.producers[0], "image", "c0")
    world.produce(world.producers[0], "image", shape_of(6))
    return world


def until(world: World, condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        choices = world.choices()
        choices[0]() if choices else world.pass_time(0.5)
    raise AssertionError("it does not come to that")


def ends(world: World) -> tuple[tuple[str, str], tuple[str, str]]:
    """The links from the producer to the consumer and back."""
    names = (world.producers[0].name, world.consumers[0].name)
    return names, names[::-1]


def nothing_is_left(world: World) -> None:
    for consumer in world.consumers:
        machine = consumer.machine
        assert machine.gauges()["granted_bytes"] == 0
        assert machine.gauges()["landing_bytes"] == 0
        assert not machine.items
        assert not list(machine.grants.window)
        assert not machine.offers.open
        assert machine.admission.num_active == 0
        assert machine.gauges()["waiting_items"] == 0
        assert not consumer.tensors
    for producer in world.producers:
        assert not producer.machine.transfers
        assert not producer.machine._by_target
        assert producer.machine.gauges()["writes"] == 0


def test_a_rank_that_needs_more_rounds_makes_nobody_send_again() -> None:
    world = World(
        4, consumers=2, arena_bytes=8, bounds=limits(default_allocate_tokens=2), are_connected=False
    )
    world.consumers[1].machine = Consumer(1 << 16, limits(default_allocate_tokens=1024))
    world.consumers[1].arena_bytes = 1 << 16
    world.consumers[1].window = bytearray(1 << 16)
    world.connect_all()
    for consumer in world.consumers:
        world.expect(consumer, "image")
    world.push(world.producers[0], "image", "c0", "c1")
    world.produce(world.producers[0], "image", shape_of(50))
    world.settle()
    for consumer, rounds in zip(world.consumers, (50, 1), strict=True):
        world.assert_item(consumer, "image")
        assert consumer.machine.counts["rounds"] == rounds
    assert world.producers[0].machine.counts["written_rows"] == 100


def mute_before_an_offer(world: World) -> None:
    world.cut(next(iter(world.up)))


def mute_after_the_offer(world: World) -> None:
    items = world.consumers[0].machine.items
    until(world, lambda: items["image"].state is not TransferState.BOOTSTRAPPING)
    for links in world.links.values():
        links.clear()


def mute_with_a_write_under_way(world: World) -> None:
    until(world, lambda: len(world.producers[0].writes) == 2)


def mute_after_some_rows(world: World) -> None:
    until(world, lambda: world.consumers[0].machine.counts["rows"] == 3)


@pytest.mark.parametrize("is_late", [False, True])
def test_killed_producer_that_was_lent_the_whole_window_is_replaced_within_patience(
    is_late: bool,
) -> None:
    """The window is used again before its quarantine ends, and late bytes are noticed."""
    world = pair()
    consumer = world.consumers[0]
    until(world, lambda: len(world.producers[0].writes) == 2)
    world.restart_producer(0)
    assert consumer.machine.gauges()["quarantined_bytes"] == 8
    stranded = [(*place, b"late"[: len(data)]) for *place, data in world.late]
    world.connect_all()
    world.produce(world.producers[0], "image", shape_of(6))
    if is_late:
        until(world, lambda: len(world.producers[0].writes) == 1)
        world.end_write(world.producers[0], 0)
        world.late = stranded
        world.land_late()
    world.settle()
    world.assert_item(consumer, "image")
    assert consumer.machine.gauges()["quarantined_bytes"] <= 4
    assert consumer.machine.counts["corrupt_rows"] == is_late


def test_a_producer_that_is_back_says_that_nothing_is_under_way() -> None:
    """Else a window of two rows would be out of use for longer than anybody waits."""
    world = pair(quarantine_s=1000.0)
    consumer, producer = world.consumers[0], world.producers[0]
    until(world, lambda: len(producer.writes) == 2)
    world.cut(ends(world)[1])
    assert consumer.machine.gauges()["quarantined_bytes"] == 8
    world.connect_all()
    while any(world.links.values()):
        world.deliver(next(key for key, links in world.links.items() if links))
    assert consumer.machine.gauges()["quarantined_bytes"] == 8, "they are being written"
    world.settle()
    world.assert_item(consumer, "image")
    assert consumer.machine.gauges()["quarantined_bytes"] == 0


@pytest.mark.parametrize(
    "moment",
    [
        mute_before_an_offer,
        mute_after_the_offer,
        mute_with_a_write_under_way,
        mute_after_some_rows,
    ],
)
def test_no_state_waits_for_ever_on_either_side(moment: Callable[[World], None]) -> None:
    """From some moment on every message is lost, with the session up: the worst silence there is.

    A write that goes on keeps its source, and the window it goes to is out of use; nothing else.
    """
    world = pair()
    moment(world)
    consumer, producer = world.consumers[0], world.producers[0]

    def pass_mute(seconds: int) -> None:
        for _ in range(seconds):
            while producer.preparing:
                world.prepare(producer)
            while consumer.drains:
                world.drain(consumer)
            for links in world.links.values():
                links.clear()
            world.pass_time(1.0)

    pass_mute(150)
    assert [news.code for news in consumer.told if news.code] == [p.Code.TIMEOUT]
    while producer.writes:
        world.end_write(producer, 0)
    pass_mute(150)
    nothing_is_left(world)
    assert producer.machine.cache.held_bytes == 0
    assert consumer.machine.gauges()["quarantined_bytes"] == 0


@pytest.mark.parametrize("how", ["forgotten", "failed", "withdrawn", "lost"])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_whatever_ends_early_leaves_nothing_and_may_begin_anew(how: str, rows: int) -> None:
    world = pair()
    consumer, producer = world.consumers[0], world.producers[0]
    until(world, lambda: consumer.machine.counts["rows"] == rows and bool(producer.writes))
    if how == "forgotten":
        world.forget(consumer, "image")
    elif how == "failed":
        consumer.machine.weights_changed(world.now)
    elif how == "withdrawn":
        producer.machine.weights_changed(world.now)
    else:
        world.cut(ends(world)[1])
        world.forget(consumer, "image")
    world.perform()
    while producer.writes:
        world.end_write(producer, 0)
    world.settle()
    world.pass_time(100.0)
    if how != "withdrawn":
        # What was pushed to it and then not wanted is offered, and dropped, as any other push.
        world.settle()
    if "image" in consumer.ready:
        world.pass_time(100.0)
        world.settle()
    nothing_is_left(world)
    if how != "withdrawn":
        consumer.told.clear()
    world.expect(consumer, "image")
    world.produce(producer, "image", shape_of(6))
    world.settle()
    world.assert_item(consumer, "image")


TO_PRODUCER = (
    p.Grant(99, 7, 0, 1, (Extent(0, 4),)),
    p.Revoke(99, 7),
    p.Cancel(99),
)


@pytest.mark.parametrize("body", TO_PRODUCER, ids=lambda each: type(each).__name__)
def test_who_asks_of_an_unknown_transfer_is_answered(body: p.Message) -> None:
    world = World(1)
    to_consumer, to_producer = ends(world)
    world.receive(to_producer, body)
    (answer,) = world.links[to_consumer]
    assert answer == p.Unknown(99)


def test_fewer_rows_than_granted_are_so_many() -> None:
    world = pair(default_allocate_tokens=2)
    consumer, producer = world.consumers[0], world.producers[0]
    machine = Consumer(16, limits(default_allocate_tokens=2))
    shape = shape_of(6)
    machine.expect(p.Expect("image", 0), 0.0)
    machine.peer_up("p", frozenset(("at",)), 0.0)
    machine.offer("p", p.Offer(1, "image", shape, "digest"), 0.0)
    grants = [each.body for each in machine.take_effects(0.0) if getattr(each, "peer", "") == "p"]
    grant = next(body for body in grants if isinstance(body, p.Grant))
    assert grant.rows == 2
    machine.wrote("p", p.Wrote(1, grant.gid, grant.row, 1, (0,)), 0.0)
    machine.drained(grant.gid, True, 0.0)
    check_consumer(machine)
    assert machine.items["image"].received.spans == ((grant.row, grant.row + 1),)
    later = [
        each.body.row
        for each in machine.take_effects(0.0)
        if isinstance(getattr(each, "body", None), p.Grant)
    ]
    assert later == [grant.row + 1], "it goes on behind the last row that is there"
    world.settle()
    world.assert_item(consumer, "image")
    assert producer.machine.gauges()["transfers"] == 0


@pytest.mark.parametrize(
    ("row", "rows", "digests"),
    [(0, 0, ()), (0, 3, (1,)), (1, 1, (1,)), (0, 1, ()), (0, 1, (1, 2)), (0, -1, (1,))],
)
def test_what_says_less_or_more_than_was_granted_is_no_success(
    row: int, rows: int, digests: tuple[int, ...]
) -> None:
    world = pair()
    consumer, producer = world.consumers[0], world.producers[0]
    until(world, lambda: len(producer.writes) == 2)
    write = min((write for write, _ in producer.writes), key=lambda each: each.runs[0].row)
    world.receive(ends(world)[0], p.Wrote(write.tid, write.gid, row, rows, digests))
    assert not consumer.drains
    assert "0 of 6 rows" in describe(consumer.machine, "image")
    assert consumer.machine.gauges()["quarantined_bytes"] == 4, "nobody knows what it writes"
    world.settle()
    world.assert_item(consumer, "image")


def test_what_is_known_to_be_short_gets_no_more_than_it_needs() -> None:
    world = World(1, arena_bytes=1 << 20, bounds=limits(default_allocate_tokens=8192))
    consumer = world.consumers[0]
    world.expect(consumer, "image", rows=256)
    world.push(world.producers[0], "image", "c0")
    world.produce(world.producers[0], "image", shape_of(256))
    most = 0.0
    while "image" not in consumer.ready:
        world.step()
        most = max(most, consumer.machine.gauges()["granted_bytes"])
    assert most == 256 * 4


BAD_GRANTS = {
    "behind the item": (6, 1, (Extent(0, 4),)),
    "before the item": (-1, 1, (Extent(0, 4),)),
    "no rows": (0, 0, (Extent(0, 4),)),
    "negative rows": (0, -3, (Extent(0, 4),)),
    "no extents": (0, 1, ()),
    "an empty extent": (0, 1, (Extent(0, 0),)),
    "a negative place": (0, 1, (Extent(-4, 4),)),
    "behind the window": (0, 1, (Extent(8, 4),)),
    "over its end": (0, 2, (Extent(4, 8),)),
    "over each other": (0, 2, (Extent(0, 5), Extent(4, 4))),
    "too small for a row": (0, 1, (Extent(0, 3),)),
    "too many extents": (0, 1, tuple(Extent(0, 4) for _ in range(p.MAX_EXTENTS + 1))),
}


@pytest.mark.parametrize("name", BAD_GRANTS)
def test_nothing_is_written_where_it_may_not_be(name: str) -> None:
    world = pair()
    producer = world.producers[0]
    until(world, lambda: len(producer.writes) == 2)
    writes = list(producer.writes)
    (transfer,) = producer.machine.transfers.values()
    to_consumer, to_producer = ends(world)
    world.links[to_consumer].clear()
    row, rows, extents = BAD_GRANTS[name]
    world.receive(to_producer, p.Grant(transfer.tid, 1000, row, rows, extents))
    assert producer.writes == writes
    (answer,) = world.links[to_consumer]
    assert isinstance(answer, p.WriteFailed)
    assert answer.quiesced
    world.settle()
    world.assert_item(world.consumers[0], "image")


def test_a_grant_of_more_rows_than_there_are_is_written_as_far_as_there_are() -> None:
    world = pair()
    producer = world.producers[0]
    until(world, lambda: len(producer.writes) == 2)
    while producer.writes:
        world.end_write(producer, 0)
    (transfer,) = producer.machine.transfers.values()
    grant = p.Grant(transfer.tid, 1000, 5, 2, (Extent(0, 8),))
    world.receive(ends(world)[1], grant)
    ((write, _),) = producer.writes
    assert write.runs == (RowRun(5, 1, 0),)


def test_a_stuck_consumer_does_not_pin_the_encoder() -> None:
    world = pair(senders=ProducerLimits(retain_bytes=24, writers=2))
    producer = world.producers[0]
    until(world, lambda: bool(producer.machine.transfers))
    assert producer.machine.cache.held_bytes == 24  # more of it would defer encoding
    for _ in range(130):  # the transfer is given up, then what nobody takes
        for links in world.links.values():
            links.clear()
        world.pass_time(1.0)
    assert producer.machine.cache.held_bytes == 0
    assert producer.machine.counts["timeouts"] == 1


def test_failing_writes_cost_an_item_and_not_the_peer() -> None:
    world = pair(max_failures=2)
    consumer, producer = world.consumers[0], world.producers[0]
    while not consumer.told:
        if producer.writes:
            world.end_write(producer, 0, "failed")
        elif world.choices():
            world.choices()[0]()
        else:
            world.pass_time(0.5)
    assert consumer.told[0].code is p.Code.WRITE
    world.expect(consumer, "next", 1)
    world.push(producer, "next", "c0")
    world.produce(producer, "next", shape_of(6))
    world.settle()
    world.assert_item(consumer, "next")


def test_nobody_waits_for_a_peer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_zmq, "SEND_QUEUE_FRAMES", 100)
    monkeypatch.setattr(transport_zmq, "LINGER_MS", 10)
    own = ZmqTransport(None, MAX_FRAME_BYTES)
    try:
        link = own.connect("tcp://127.0.0.1:1")
        started = time.monotonic()
        queued = [own.send(link, b"x") for _ in range(300)]
        assert queued[0]
        assert not queued[-1], "a full queue is a broken link"
    finally:
        own.close()
    assert time.monotonic() - started < 5


def test_peers_are_reached_at_ipv6() -> None:
    one, other = ZmqTransport("tcp://[::1]:*", MAX_FRAME_BYTES), ZmqTransport(None, MAX_FRAME_BYTES)
    try:
        link = other.connect(one.endpoint)
        assert other.send(link, b"hello")
        frames = []
        for _ in range(100):
            frames = frames or one.poll(0.1)
        assert frames[0].data == b"hello"
        assert one.send(frames[0].link, b"welcome")
        back = []
        for _ in range(100):
            back = back or other.poll(0.1)
        assert back[0] == transport_zmq.Frame(link, b"welcome")
    finally:
        other.close()
        one.close()


def test_a_source_is_kept_until_the_consumer_has_every_row() -> None:
    world = pair(senders=ProducerLimits(retain_bytes=1, writers=2))
    consumer, producer = world.consumers[0], world.producers[0]
    while consumer.drains or "image" not in consumer.ready:
        assert producer.sources, "it is gone before the rows are there"
        world.step()
    assert producer.sources, "the word of it is still on its way"
    world.settle()
    assert not producer.sources


def test_a_producer_asks_for_a_grant_that_was_lost() -> None:
    world = pair(repeat_s=1e6)  # the consumer does not say it again by itself
    consumer, producer = world.consumers[0], world.producers[0]
    to_consumer, to_producer = ends(world)
    until(world, lambda: any(isinstance(body, p.Grant) for body in world.links[to_producer]))
    world.links[to_producer].clear()
    world.pass_time(1.5)
    assert any(isinstance(body, p.Offer) for body in world.links[to_consumer])
    until(world, lambda: bool(producer.writes))
    world.settle()
    world.assert_item(consumer, "image")


def test_a_request_with_room_for_other_rows_does_not_get_an_item_that_is_here() -> None:
    """Pushed before anybody asked; the engine would write behind what it has reserved."""
    world = World(1, arena_bytes=1 << 10)
    consumer, producer = world.consumers[0], world.producers[0]
    world.push(producer, "image", "c0")
    world.produce(producer, "image", shape_of(9))
    until(world, lambda: "image" in consumer.ready)
    world.expect(consumer, "image", rows=5)
    news = consumer.told[-1]
    assert news.code is p.Code.CONFLICT
    assert "9 rows" in news.text
    assert not consumer.tensors


def test_messages_that_have_grown_are_understood() -> None:
    """A later release adds fields at the end, and kinds of messages."""

    class Later(msgspec.Struct, tag="complete"):
        tid: int
        urgency: int = 3

    frame = msgspec.msgpack.encode(["s", "t", [Later(5), {"type": "of_tomorrow"}]])
    known, unknown = p.decode(frame).bodies
    assert p.decode_body(known) == p.Complete(5)
    with pytest.raises(ProtocolError):
        p.decode_body(unknown)
    with pytest.raises(ProtocolError):
        p.decode(b"\xff" * 10)
    with pytest.raises(ProtocolError):
        p.decode(b"\x91" * 100_000)


def test_calling_back_a_grant_without_a_transfer_frees_no_other() -> None:
    world = pair()
    producer = world.producers[0]
    producer.machine.revoke(world.consumers[0].name, p.Revoke(0, 77), world.now)
    said = [
        each.body for each in producer.machine.take_effects(world.now) if isinstance(each, Send)
    ]
    assert said == [p.RevokeAck(0, 77, p.WriteProgress.NOT_STARTED)], (
        "`Unknown` would speak for all"
    )


@pytest.mark.parametrize("lost_before", [False, True])
def test_two_names_of_one_consumer_are_one_transfer(lost_before: bool) -> None:
    """A consumer wants an item that is also pushed to its alias, which may be known or unknown."""
    bounds = limits(default_allocate_tokens=1)
    world = World(1, arena_bytes=8, bounds=bounds, sender_limits=ProducerLimits(writers=2))
    consumer, producer = world.consumers[0], world.producers[0]
    world.produce(producer, "image", shape_of(6))
    world.prepare(producer)
    if lost_before:
        machine = producer.machine
        window = p.SharedWindow("host", "before", 8)
        alias = frozenset(("alias",))
        machine.peer_up("before", window, alias, ("alias",), world.now)
    world.push(producer, "image", "alias")
    if lost_before:
        machine.peer_lost("before", world.now)
    world.expect(consumer, "image")
    until(world, lambda: len(producer.machine.transfers) == 1)
    window = p.SharedWindow("host", consumer.name, 8)
    names = frozenset(("c0", "alias"))
    producer.machine.peer_up(consumer.name, window, names, ("c0",), world.now)
    world.perform()
    assert len(producer.machine.transfers) == 1
    world.settle()
    world.assert_item(consumer, "image")
