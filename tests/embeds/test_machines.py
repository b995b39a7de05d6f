"""Consumer and producer against each other: any order, and faults by chance."""

from functools import partial

import pytest

from tests.embeds.invariants import describe
from tests.embeds.world import World, content, limits, shape_of
from tests.support.seeds import seeds
from vllm_kvpool.embeds.machines.producer import ProducerLimits
from vllm_kvpool.embeds.machines.states import TRANSITIONS, TransferState
from vllm_kvpool.embeds.protocol.messages import Code


def whole(rows: int, row_bytes: int = 4, arena: int = 1 << 20, first: int = 1024) -> World:
    """Push one item through a window without faults and return the world."""
    world = World(1, arena_bytes=arena, bounds=limits(default_allocate_tokens=first))
    consumer, producer = world.consumers[0], world.producers[0]
    world.push(producer, "image", "c0")
    world.produce(producer, "image", shape_of(rows, row_bytes))
    world.expect(consumer, "image")
    world.settle()
    world.assert_item(consumer, "image")
    return world


@pytest.mark.parametrize(("rows", "rounds"), [(500, 1), (1024, 1), (2000, 2), (10_000, 10)])
def test_rounds_of_a_first_grant_of_1024_rows(rows: int, rounds: int) -> None:
    world = whole(rows)
    assert world.consumers[0].machine.counts["rounds"] == rounds


@pytest.mark.parametrize(
    ("rows", "row_bytes", "arena"),
    [(50, 4, 12), (1, 7, 7), (97, 13, 13 * 3), (64, 5, 1000), (31, 3, 17), (100, 1, 1)],
)
def test_an_item_passes_through_any_window(rows: int, row_bytes: int, arena: int) -> None:
    whole(rows, row_bytes, arena)


@pytest.mark.parametrize("seed", seeds(25, 60))
def test_misfortune_never_gives_wrong_bytes_and_always_ends(seed: int) -> None:
    world = World(seed, producers=2, consumers=2, arena_bytes=16)
    names = [f"item{number}" for number in range(4)]
    for order, name in enumerate(names):
        for consumer in world.consumers:
            world.expect(consumer, name, order)
    for name in names:
        for producer in world.producers:
            world.produce(producer, name, shape_of(5 + len(name) + seed % 3))
    for _ in range(300):
        world.step(mishaps=0.25)
        world.assert_no_wrong_bytes()
    world.settle()
    world.assert_no_wrong_bytes()
    for consumer in world.consumers:
        failed = {news.mm_hash for news in consumer.told if news.code is not None}
        for name in names:
            assert name in consumer.ready or name in failed, describe(consumer.machine, name)
        gauges = consumer.machine.gauges()
        assert gauges["granted_bytes"] == 0
    for producer in world.producers:
        assert producer.machine.gauges()["transfers"] == 0
        assert producer.machine.gauges()["writes"] == 0


@pytest.mark.parametrize("seed", seeds(10, 20))
def test_processes_die_and_start_again(seed: int) -> None:
    world = World(seed, producers=2, consumers=1, arena_bytes=16)
    shape = shape_of(12)
    world.expect(world.consumers[0], "image")
    for producer in world.producers:
        world.produce(producer, "image", shape)
    for _ in range(6):
        for _ in range(15):
            world.step(mishaps=0.1)
        if world.random.random() < 0.7:
            number = world.random.randrange(2)
            world.restart_producer(number)
            world.connect_all()
            world.produce(world.producers[number], "image", shape)
        else:
            world.restart_consumer(0)
            world.connect_all()
            world.expect(world.consumers[0], "image")
        world.assert_no_wrong_bytes()
    if not world.consumers[0].ready:
        world.expect(world.consumers[0], "image")
    world.settle()
    world.assert_item(world.consumers[0], "image")


def test_a_cut_link_goes_on_at_the_last_acknowledged_row() -> None:
    world = World(3, arena_bytes=8, bounds=limits(default_allocate_tokens=1))
    consumer, producer = world.consumers[0], world.producers[0]
    world.push(producer, "video", "c0")
    world.expect(consumer, "video")
    world.produce(producer, "video", shape_of(40))
    while consumer.machine.counts["rows"] < 20:
        world.step()
    world.cut((consumer.name, producer.name))
    world.pass_time(3.0)
    world.settle()
    world.assert_item(consumer, "video")
    assert consumer.machine.counts["rows"] == 40
    assert consumer.machine.counts["resumed_rows"] >= 20


def test_an_item_too_large_for_ever_is_refused_at_once_with_the_numbers() -> None:
    world = World(1, bounds=limits(max_item_bytes=100))
    consumer, producer = world.consumers[0], world.producers[0]
    world.expect(consumer, "film")
    world.produce(producer, "film", shape_of(26))
    for _ in range(12):
        for choice in world.choices()[:1]:
            choice()
    (news,) = consumer.told
    assert news.code is Code.TOO_LARGE
    assert "26 rows of 4 bytes are 104 bytes" in news.text
    assert "max_item_bytes is 100" in news.text


def test_two_items_of_two_requests_never_hold_what_the_other_needs() -> None:
    # Each request has two items of 40 bytes, and there is memory for two items in all.
    bounds = limits(max_landing_bytes=80, default_allocate_tokens=2)
    world = World(5, producers=2, arena_bytes=8, bounds=bounds)
    consumer = world.consumers[0]
    for name, order in (("a1", 0), ("b1", 1), ("b2", 1), ("a2", 0)):
        world.expect(consumer, name, order)
    for name in ("b1", "a1", "b2", "a2"):
        world.produce(world.producers[name[0] == "b"], name, shape_of(10))
    for _ in range(2000):
        world.step()
        if {"a1", "a2"} <= consumer.ready:
            break
    assert {"a1", "a2"} <= consumer.ready, "the oldest request does not get on"
    assert consumer.most_bytes <= 80 + 40
    for name in ("a1", "a2"):
        world.assert_item(consumer, name)
        consumer.machine.taken(name, world.now)
        world.perform()
    world.settle()
    for name in ("b1", "b2"):
        world.assert_item(consumer, name)


def test_back_pressure_keeps_everything_and_bounds_memory() -> None:
    bounds = limits(max_landing_bytes=64, default_allocate_tokens=4)
    world = World(7, producers=4, arena_bytes=16, bounds=bounds)
    consumer = world.consumers[0]
    names = [f"{producer}-{number}" for producer in range(4) for number in range(10)]
    for name in names:
        producer = world.producers[int(name[0])]
        world.push(producer, name, "c0")
        world.produce(producer, name, shape_of(8))
    seen: set[str] = set()
    for order, name in enumerate(names):
        world.expect(consumer, name, order)
        while name not in consumer.ready:
            world.step()
        assert consumer.tensors[name] == content(name, shape_of(8))
        consumer.machine.taken(name, world.now)
        world.perform()
        seen.add(name)
    assert seen == set(names)
    assert consumer.most_bytes <= 64 + 32
    assert consumer.machine.counts["refused"] == 0


@pytest.mark.parametrize(
    ("rows", "options", "most"),
    [
        (1, {"writers": 2, "small_bytes": 15}, 4),
        (1, {"writers": 2, "small_bytes": 99, "max_writes": 3}, 3),
        (5, {"writers": 2, "small_bytes": 15}, 2),
        (1, {"writers": 2, "small_bytes": 0}, 2),
    ],
)
def test_small_writes_do_not_wait_for_a_writer_each(
    rows: int, options: dict[str, int], most: int
) -> None:
    """Large ones do; a row has four bytes."""
    world = World(1, arena_bytes=500, sender_limits=ProducerLimits(**options), bounds=limits())
    (producer,), (consumer,) = world.producers, world.consumers
    for number in range(6):
        world.push(producer, f"{number}", "c0")
        world.produce(producer, f"{number}", shape_of(rows))
        world.expect(consumer, f"{number}")
    under_way = 0
    for _ in range(500):
        under_way = max(under_way, len(producer.writes))
        if producer.preparing:
            world.prepare(producer)
        elif key := next((key for key, queue in world.links.items() if queue), None):
            world.deliver(key)
        elif producer.writes:
            world.end_write(producer, 0)
        elif consumer.drains:
            world.drain(consumer)
    assert len(consumer.ready) == 6
    assert under_way == most


def test_what_is_too_large_to_come_unasked_does_not_hold_the_encoder_for_ever() -> None:
    """A request that was sent on is cancelled before its item is asked for."""
    bounds = limits(max_landing_bytes=40)
    world = World(1, bounds=bounds, sender_limits=ProducerLimits(retain_bytes=50, writers=2))
    consumer, producer = world.consumers[0], world.producers[0]
    for name, rows in (("large", 9), ("small", 3)):
        world.push(producer, name, "c0")
        world.produce(producer, name, shape_of(rows))
    world.settle()
    assert producer.machine.cache.held_bytes == 0
    assert consumer.machine.gauges()["items"] == 0
    assert consumer.machine.counts["never_asked_for"] == 2
    world.produce(producer, "large", shape_of(9))
    world.expect(consumer, "large")
    world.settle()
    world.assert_item(consumer, "large")


def test_writes_for_a_killed_consumer_are_no_answer_to_the_next() -> None:
    """Both number their grants from 1, and the first one's are still being written."""
    world = World(1, arena_bytes=8, bounds=limits(default_allocate_tokens=1))
    (producer,) = world.producers
    world.push(producer, "image", "c0")
    world.produce(producer, "image", shape_of(6))
    while len(producer.writes) < 2:
        world.choices()[0]()
    world.restart_consumer(0)
    (consumer,) = world.consumers
    world.connect_all()
    world.expect(consumer, "image")
    while any(world.links.values()):
        for key, queue in world.links.items():
            while queue:
                world.deliver(key)
    began = world.now
    while choices := world.choices():
        choices[0]()
    world.assert_item(consumer, "image")
    assert world.now == began
    assert consumer.machine.counts["corrupt_rows"] == 0
    world.settle()
    assert producer.machine.gauges()["writes"] == producer.machine.cache.held_bytes == 0


def test_one_transfer_for_many_offers() -> None:
    world = World(9, producers=3, arena_bytes=16)
    consumer = world.consumers[0]
    for producer in world.producers:
        world.push(producer, "logo", "c0")
        world.produce(producer, "logo", shape_of(9))
    world.expect(consumer, "logo")
    world.settle()
    world.assert_item(consumer, "logo")
    assert consumer.machine.counts["rows"] == 9
    assert consumer.machine.counts["deduplicated"] == 2
    assert all(each.machine.gauges()["transfers"] == 0 for each in world.producers)


def test_rows_granted_to_one_before_another_offers_them_are_not_waited_for() -> None:
    """Both have the item; the one that had a grant before it offered anything is slower."""
    world = World(seed=1, producers=2, arena_bytes=400, bounds=limits())
    consumer, (slow, fast) = world.consumers[0], world.producers
    world.produce(slow, "known", shape_of(10))
    world.expect(consumer, "known")
    world.settle()
    for producer in (slow, fast):
        world.produce(producer, "image", shape_of(30))
        world.prepare(producer)
    began = world.now
    world.expect(consumer, "image")
    for link in (fast, slow):
        for key in ((consumer.name, link.name), (link.name, consumer.name)):
            while world.links[key]:
                world.deliver(key)
    while choices := world.choices():
        choices[0]()
    world.assert_item(consumer, "image")
    assert world.now == began
    world.settle()
    assert consumer.machine.gauges()["granted_bytes"] == 0


def test_rows_that_a_producer_has_declined_are_not_written_when_it_is_asked_again() -> None:
    """The consumer asks twice before an answer. Only the second question finds the item ready."""
    world = World(seed=1, arena_bytes=400, bounds=limits())
    (consumer,), (producer,) = world.consumers, world.producers
    world.produce(producer, "known", shape_of(10))
    world.expect(consumer, "known")
    world.settle()
    asked = consumer.name, producer.name
    world.expect(consumer, "image")
    world.pass_time(1.5)
    assert len(world.links[asked]) == 2
    world.deliver(asked)
    world.deliver(asked[::-1])
    assert consumer.machine.gauges()["granted_bytes"] == 0
    world.produce(producer, "image", shape_of(10))
    world.prepare(producer)
    world.deliver(asked)
    assert not producer.writes
    world.settle()
    world.assert_item(consumer, "image")


def test_another_producer_with_other_bytes_starts_anew() -> None:
    world = World(11, producers=2, arena_bytes=8, bounds=limits(default_allocate_tokens=1))
    world.salt = {world.producers[1].name: "other"}
    consumer = world.consumers[0]
    world.expect(consumer, "image")
    world.push(world.producers[0], "image", "c0")
    world.produce(world.producers[0], "image", shape_of(20))
    while consumer.machine.counts["rows"] < 5:
        world.step()
    world.push(world.producers[1], "image", "c0")
    world.produce(world.producers[1], "image", shape_of(20))
    for _ in range(6):
        world.step()
    first = world.producers[0]
    world.restart_producer(0)
    world.settle()
    assert first.name not in {key[1] for key in world.up}
    world.assert_item(consumer, "image", "other")


def test_new_weights_make_old_items_stale() -> None:
    world = World(13, arena_bytes=16, sender_limits=ProducerLimits())
    consumer, producer = world.consumers[0], world.producers[0]
    world.produce(producer, "image", shape_of(9))
    while producer.preparing:
        world.step()
    producer.machine.weights_changed(world.now)
    consumer.machine.weights_changed(world.now)
    world.perform()
    assert not producer.sources
    world.expect(consumer, "image")
    world.salt[producer.name] = "new"
    world.produce(producer, "image", shape_of(9))
    world.settle()
    world.assert_item(consumer, "image", "new")


def test_items_of_unlucky_worlds_pass_every_state() -> None:
    """Each move is checked by the machine itself."""
    seen: set[TransferState] = set()
    for seed in range(4):
        world = World(seed, producers=2, consumers=2, arena_bytes=16)
        for number in range(3):
            for consumer in world.consumers:
                world.expect(consumer, f"item{number}", number)
            for producer in world.producers:
                world.produce(producer, f"item{number}", shape_of(9))
        for step in (*[partial(world.step, mishaps=0.2)] * 250, world.settle):
            step()
            for node in world.consumers:
                counted = node.machine.states()
                assert sum(counted.values()) == len(node.machine.items)
                seen.update(state for state, count in counted.items() if count)
    assert seen == {state for state in TransferState if TRANSITIONS[state]}
