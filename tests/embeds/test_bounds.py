"""Everything that a peer can make a process keep is bounded."""

import pytest

from tests.embeds.invariants import check_consumer
from tests.embeds.sessions import hello
from tests.embeds.world import World, limits, shape_of
from vllm_kvpool.embeds.machines.admission import AdmissionQueue
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.effects import Send
from vllm_kvpool.embeds.machines.items import NOT_REQUESTED
from vllm_kvpool.embeds.machines.producer import Producer, ProducerLimits
from vllm_kvpool.embeds.params import read_delivery
from vllm_kvpool.embeds.protocol import messages as p
from vllm_kvpool.embeds.protocol.rows import Extent
from vllm_kvpool.errors import ProtocolError

MANY = 200
FEW = 8


def grants_in(machine: Consumer) -> list[p.Grant]:
    """Return the grants among the consumer's new messages."""
    said = [each.body for each in machine.take_effects(0.0) if type(each) is Send]
    return [body for body in said if type(body) is p.Grant]


LONG = "x" * (p.MAX_NAME + 1)
TOO_LONG: dict[str, p.Message] = {
    "a wish": p.Want(LONG, 1.0),
    "its answer": p.WantAck(LONG, gone=True),
    "an item": p.Offer(1, LONG, shape_of(1), "digest"),
    "an encoding": p.Offer(1, "image", shape_of(1), LONG),
    "a process": hello(LONG),
}
NO_TIME: dict[str, p.Message] = {
    "a wish for ever": p.Want("image", float("nan")),
    "a wish of before": p.Want("image", -1.0),
    "memory for ever": p.Want("image", 1.0, p.Grant(0, 1, 0, 1, (), float("nan"))),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_names(name: str) -> None:
    """Long names are refused, since a process keeps thousands of wants, items and last messages."""
    with pytest.raises(ProtocolError):
        p.decode_body(p.encode_body(TOO_LONG[name]))


def test_an_offer_whose_transfer_has_the_number_of_none_is_refused() -> None:
    """A grant without a transfer would count as one of it, and end its item's offers."""
    with pytest.raises(ProtocolError):
        p.decode_body(p.encode_body(p.Offer(0, "image", shape_of(1), "digest")))


FULLEST: dict[str, list[p.Message]] = {
    "all items of requests": [*p.Requested.all("é" * p.MAX_NAME for _ in range(100))],
    "a request's item": [
        p.Expect("é" * p.MAX_NAME, 1, read_delivery({"peers": ["x" * 300] * 999}, ()).peers)
    ],
    "a process": [hello("é" * p.MAX_NAME, endpoints=(f"tcp://{'h' * 200}:1",) * p.MAX_RANKS)],
    "a grant": [p.Grant(1, 2, 3, 4, tuple(Extent(1 << 60, 1 << 60) for _ in range(p.MAX_EXTENTS)))],
    "a refusal": [p.HelloReject(p.Code.INCOMPATIBLE, "é" * p.MAX_NAME)],
}


@pytest.mark.parametrize("name", FULLEST)
def test_a_message_never_exceeds_what_a_frame_holds(name: str) -> None:
    """libzmq closes the connection of a larger one, and its sender would not know why."""
    for body in FULLEST[name]:
        raw = p.encode_body(body)
        assert len(memoryview(raw)) <= p.FULL_FRAME_BYTES
        names = "é" * p.MAX_NAME, "é" * p.MAX_NAME
        assert len(p.encode(p.Envelope(*names, (raw,)))) <= p.MAX_FRAME_BYTES


def test_a_request_names_no_endpoint_or_item_that_does_not_fit_into_a_message() -> None:
    long, good = "tcp://" + "x" * p.MAX_ENDPOINT + ":1", "tcp://enc:1"
    items = [{"mm_hash": LONG, "peer": [long, good, "tcp://é:1"]}]
    read = read_delivery({"ec_items": items, "peer": f"{long}, {good}"}, ("image",))
    assert read.peers_of("image") == (good, good)
    assert read.name_of("image") == "image"


@pytest.mark.parametrize("name", NO_TIME)
def test_times(name: str) -> None:
    with pytest.raises(ProtocolError):
        p.decode_body(p.encode_body(NO_TIME[name]))


def test_grants_that_wait_for_their_write() -> None:
    world = World(1, sender_limits=ProducerLimits(writers=1, small_bytes=1, max_results=FEW))
    (consumer,), (producer,) = world.consumers, world.producers
    world.produce(producer, "image", shape_of(6))
    world.prepare(producer)
    to_producer = (consumer.name, producer.name)
    world.receive(to_producer, p.Want("image", 1.0))
    (transfer,) = producer.machine.transfers.values()
    for gid in range(1, MANY):
        grant = p.Grant(transfer.tid, gid, 0, 1, (Extent(0, 4),))
        world.receive(to_producer, grant)
    assert len(transfer.due) == FEW
    refused = {body for body in world.links[to_producer[::-1]] if type(body) is p.WriteFailed}
    assert len(refused) == MANY - 1 - FEW - 1, "but for those that wait and the one under way"
    assert all(body.quiesced for body in refused)


def test_offers_of_one_item_by_one_producer() -> None:
    """The last one counts: those before have ended, or their producer is wrong."""
    machine = Consumer(1 << 12, limits())
    for peer in "ab":
        machine.peer_up(peer, frozenset(), 0.0)
    machine.expect(p.Expect("image", 0), 0.0)
    machine.offer("a", p.Offer(1, "image", shape_of(6), "digest"), 0.0)
    for tid in range(1, MANY):
        for peer in "ba":
            machine.offer(peer, p.Offer(tid, "image", shape_of(6), "digest"), 0.0)
            machine.take_effects(0.0)
            check_consumer(machine)
    (item,) = machine.items.values()
    assert sorted(item.offers) == [("a", MANY - 1), ("b", MANY - 1)]
    assert item.offers.keys() == machine.offers.open.keys()


def test_a_producer_whose_withdrawal_was_lost_goes_on_under_another_number() -> None:
    machine = Consumer(1 << 12, limits(default_allocate_tokens=3))
    machine.peer_up("a", frozenset(), 0.0)
    machine.expect(p.Expect("image", 0), 0.0)
    machine.offer("a", p.Offer(1, "image", shape_of(6), "digest"), 0.0)
    (first, _) = grants_in(machine)
    machine.wrote("a", p.Wrote(1, first.gid, first.row, first.rows, (7,)), 0.0)
    machine.drained(first.gid, True, 0.0)
    machine.offer("a", p.Offer(2, "image", shape_of(6), "digest"), 0.0)
    (rest,) = grants_in(machine)
    assert (rest.tid, rest.row, rest.rows) == (2, 3, 3)
    check_consumer(machine)


@pytest.mark.parametrize("order", [NOT_REQUESTED, 7])
def test_items_that_come_and_go_behind_one_that_waits(order: int) -> None:
    line = AdmissionQueue()
    line.add("first", "a", order)
    for number in range(MANY):
        line.add(f"item{number}", f"producer{number % 3}", order)
        line.remove(f"item{number}")
    assert len(line._requested) + len(line._by_producer) == 1
    line.add("last", "a", order)
    assert [line.first_requested(), *line.unrequested()] == [
        "first" if order == 7 else None,
        *(["first"] if order == NOT_REQUESTED else []),
    ]
    line.remove("first")
    assert (line.first_requested() or next(line.unrequested())) == "last"


def test_where_a_consumer_says_that_it_is() -> None:
    machine = Producer(ProducerLimits())
    window = p.SharedWindow("host", "path", 8)
    for number in range(MANY):
        at = f"tcp://c:{number}"
        machine.peer_up("consumer", window, frozenset((at,)), (at,), 0.0)
        assert list(machine._at) == [at]
    machine.peer_up("next", window, frozenset((at,)), (at,), 0.0)
    machine.peer_lost("consumer", 0.0)
    assert machine._at == {at: "next"}
    machine.peer_lost("next", 0.0)
    assert not machine._at
