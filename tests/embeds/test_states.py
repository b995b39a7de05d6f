"""The states of an item, at its consumer and at its producer: every way in and out of each.

A consumer's item is in one of the states of docs/embeddings.md, and moves as its diagram says.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from tests.embeds.sessions import hello, session_with
from tests.embeds.world import ProducerNode, World, limits, shape_of
from vllm_kvpool.embeds.machines.admission import TransferState
from vllm_kvpool.embeds.machines.producer import ItemTransfer, ProducerLimits
from vllm_kvpool.embeds.machines.session import SessionState
from vllm_kvpool.embeds.protocol import messages as p

DOCUMENT = Path(__file__).parents[2] / "docs" / "embeddings.md"


def small(**options: object) -> World:
    """One producer, one consumer, a window of two rows of which each grant takes one."""
    bounds = limits(**{"default_allocate_tokens": 1, **options})
    world = World(1, arena_bytes=8, bounds=bounds, sender_limits=ProducerLimits(writers=2))
    world.connect_all()
    return world


def walk_until(world: World, condition: Callable[[], bool]) -> None:
    """The good case, until something is so."""
    for _ in range(1000):
        if condition():
            return
        choices = world.choices()
        assert choices, "nothing more happens"
        choices[0]()
    raise AssertionError("it does not come to that")


def sent(world: World, rows: int = 6, *, requested: bool = True) -> None:
    """An item is to go from the producer to the consumer."""
    if requested:
        world.expect(world.consumers[0], "image")
    world.push(world.producers[0], "image", "c0")
    world.produce(world.producers[0], "image", shape_of(rows))


def walk_to_writes(world: World, count: int) -> None:
    walk_until(world, lambda: len(world.producers[0].writes) == count)


def has_transfers(producer: ProducerNode, count: int) -> bool:
    return len(producer.machine.transfers) == count


def state_of(world: World) -> TransferState:
    return world.consumers[0].machine.items["image"].state


def transfer_of(world: World) -> ItemTransfer:
    (transfer,) = world.producers[0].machine.transfers.values()
    return transfer


def transfer_state(world: World) -> TransferState:
    transfer = transfer_of(world)
    if transfer.peer not in world.producers[0].machine.peers:
        return TransferState.SUSPENDED
    if not transfer.is_idle:
        return TransferState.TRANSFERRING
    return TransferState.PARTIAL if transfer.results else TransferState.WAITING


def in_state(state: TransferState) -> World:
    """A consumer's item in a state."""
    world = small()
    if state is TransferState.BOOTSTRAPPING:
        world.expect(world.consumers[0], "image")
    elif state is TransferState.WAITING:
        # All of the window is another's.
        world.push(world.producers[0], "other", "c0")
        world.produce(world.producers[0], "other", shape_of(9))
        walk_until(world, lambda: len(world.producers[0].writes) == 2)
        sent(world)
        walk_until(
            world,
            lambda: (
                "image" in world.consumers[0].machine.items
                and not world.producers[0].preparing
                and state_of(world) is TransferState.WAITING
            ),
        )
    elif state is TransferState.TRANSFERRING:
        sent(world)
        walk_until(world, lambda: bool(world.producers[0].writes))
    elif state is TransferState.PARTIAL:
        sent(world)
        walk_until(world, lambda: world.consumers[0].machine.counts["rows"] == 1)
        while state_of(world) is not TransferState.PARTIAL:  # all of the window is in quarantine
            if world.producers[0].writes:
                world.end_write(world.producers[0], 0, "unsure")
            else:
                world.choices()[0]()
    elif state is TransferState.SUSPENDED:
        sent(world)
        walk_until(world, lambda: bool(world.producers[0].writes))
        world.cut(next(iter(world.up)))
    elif state is TransferState.SUCCESS:
        sent(world, 2, requested=False)
        walk_until(world, lambda: "image" in world.consumers[0].ready)
    assert state_of(world) is state
    return world


LIVE = [
    TransferState.BOOTSTRAPPING,
    TransferState.WAITING,
    TransferState.TRANSFERRING,
    TransferState.PARTIAL,
    TransferState.SUSPENDED,
]


def consumers_cancels() -> None:
    for state in [*LIVE, TransferState.SUCCESS]:
        world = in_state(state)
        world.expect(world.consumers[0], "image")
        world.forget(world.consumers[0], "image")
        assert "image" not in world.consumers[0].machine.items
        world.settle()


def consumers_failures() -> None:
    for state in LIVE:
        world = in_state(state)
        if state is TransferState.BOOTSTRAPPING:
            world.pass_time(world.limits.bootstrap_timeout_s + 1)
        else:
            world.consumers[0].machine.weights_changed()
            world.perform()
        assert [news.code for news in world.consumers[0].told if news.code]
        world.settle()
    world = in_state(TransferState.SUCCESS)
    world.consumers[0].machine.weights_changed()
    world.perform()
    assert not world.consumers[0].tensors


def consumers_losses() -> None:
    for state in (TransferState.WAITING, TransferState.TRANSFERRING, TransferState.PARTIAL):
        world = in_state(state)
        world.cut(next(iter(world.up)))
        assert state_of(world) is TransferState.SUSPENDED
        world.settle()
        world.assert_item(world.consumers[0], "image")


def drains_outlive_their_sender() -> None:
    """The sender is lost while rows lie in the window: they count, whatever comes first."""
    for rows, back in ((6, False), (2, False), (2, True)):
        world = small()
        sent(world, rows)
        consumer, producer = world.consumers[0], world.producers[0]
        walk_to_writes(world, 2)
        world.end_write(producer, 0)
        world.end_write(producer, 0)
        key = (producer.name, consumer.name)
        while len(consumer.drains) < 2:
            world.deliver(key)
        if rows == 2 and not back:
            world.drain(consumer)
        world.cut(key[::-1])
        if back:
            world.connect_all()
            while state_of(world) is TransferState.SUSPENDED:
                world.deliver(key)
        while consumer.drains:
            world.drain(consumer)
        world.settle()
        world.assert_item(consumer, "image")


def producers_in(state: TransferState) -> World:
    """A producer's transfer in a state."""
    world = small()
    producer = world.producers[0]
    if state is TransferState.BOOTSTRAPPING:
        world.produce(producer, "image", shape_of(6))
        world.prepare(producer)
        world.push(producer, "image", "elsewhere")
        assert not producer.machine.transfers
        return world
    if state is TransferState.SUSPENDED:
        sent(world)
        walk_until(world, lambda: bool(producer.writes))
        world.cut(next(iter(world.up)))
    else:
        sent(world)
        wanted = {
            TransferState.WAITING: lambda: bool(producer.machine.transfers),
            TransferState.TRANSFERRING: lambda: bool(producer.writes),
            TransferState.PARTIAL: lambda: (
                bool(producer.machine.transfers) and transfer_state(world) is TransferState.PARTIAL
            ),
        }
        walk_until(world, wanted[state])
    assert transfer_state(world) is state
    return world


def producers_failures() -> None:
    for state in LIVE:
        world = producers_in(state)
        world.producers[0].machine.weights_changed(world.now)
        world.perform()
        world.settle()
        assert not world.producers[0].machine.transfers


def producers_losses_and_cancels() -> None:
    for state in (TransferState.WAITING, TransferState.TRANSFERRING, TransferState.PARTIAL):
        world = producers_in(state)
        world.cut(next(iter(world.up)))
        assert transfer_state(world) is TransferState.SUSPENDED
        world.settle()
        world.assert_item(world.consumers[0], "image")
        world = producers_in(state)
        (transfer,) = world.producers[0].machine.transfers.values()
        key = (world.consumers[0].name, world.producers[0].name)
        world.receive(key, p.Cancel(transfer.tid))
        assert transfer.is_ended


def the_consumer_has_it_already() -> None:
    """In each state; in the middle of a write too: another producer was faster."""
    for state in (TransferState.WAITING, TransferState.TRANSFERRING, TransferState.PARTIAL):
        world = producers_in(state)
        (transfer,) = world.producers[0].machine.transfers.values()
        key = (world.consumers[0].name, world.producers[0].name)
        world.receive(key, p.Complete(transfer.tid))
        assert transfer.is_ended
        assert transfer.item.taken
        assert bool(world.producers[0].writes) == (
            transfer.tid in world.producers[0].machine.transfers
        )


def two_names_of_one_consumer() -> None:
    """It is wanted by the consumer and pushed to another name of it, once known, once not."""
    for lost_before in (False, True):
        world = small()
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
        walk_until(world, partial(has_transfers, producer, 1))
        window = p.SharedWindow("host", consumer.name, 8)
        names = frozenset(("c0", "alias"))
        producer.machine.peer_up(consumer.name, window, names, ("c0",), world.now)
        world.perform()
        assert len(producer.machine.transfers) == 1
        world.settle()
        world.assert_item(consumer, "image")


def revoked_grants() -> None:
    """A grant is called back and its writer has not begun, has ended, is lost."""
    for how in ("written", "cut", "answered"):
        world = small()
        sent(world)
        producer = world.producers[0]
        walk_to_writes(world, 1)
        world.forget(world.consumers[0], "image")
        if how == "written":
            world.end_write(producer, 0)
        elif how == "cut":
            world.cut(next(iter(world.up)))
            assert world.consumers[0].machine.gauges()["quarantined_bytes"]
        world.settle()
        assert not world.consumers[0].machine.gauges()["granted_bytes"]


def damaged_rows() -> None:
    world = in_state(TransferState.TRANSFERRING)
    world.end_write(world.producers[0], 0, "damaged")
    world.settle()
    world.assert_item(world.consumers[0], "image")
    assert world.consumers[0].machine.counts["corrupt_rows"] == 1


def sessions() -> None:
    other = hello("peer", fingerprint="another")
    later = hello("later", fingerprint="another")
    up, degraded = SessionState.UP, SessionState.DEGRADED
    incompatible = SessionState.INCOMPATIBLE
    reject = p.HelloReject(p.Code.INCOMPATIBLE, "no")
    for steps, state in (
        (lambda session: session.rejected(reject, 1.0), incompatible),
        (lambda session: session.hello(hello("peer"), 1.0), up),
        (lambda session: session.hello(other, 1.0), incompatible),
    ):  # fmt: skip
        for first in SessionState:
            session = session_with(first)
            steps(session)
            assert session.state is state
    for first in (up, degraded):
        session = session_with(first)
        session.lost()
        assert session.state is SessionState.CONNECTING
    session = session_with(degraded)
    session.received(100.0)
    assert session.state is up
    session = session_with(incompatible)
    session.hello(other, 1.0)
    session.hello(later, 2.0)
    assert session.state is incompatible


SCENARIOS: Mapping[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        consumers_cancels,
        consumers_failures,
        consumers_losses,
        drains_outlive_their_sender,
        producers_failures,
        producers_losses_and_cancels,
        the_consumer_has_it_already,
        two_names_of_one_consumer,
        revoked_grants,
        damaged_rows,
        sessions,
    )
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_comes_to_its_end(name: str) -> None:
    SCENARIOS[name]()


def documented_edges() -> set[tuple[str, str]]:
    """Of the diagram; `[*]` is before the first request or offer, and after the end."""
    (diagram,) = re.findall(r"stateDiagram-v2\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return set(re.findall(r"^ *(\S+) --> (\w+|\[\*\])", diagram, re.MULTILINE))


def reachable(edges: set[tuple[str, str]], first: str) -> set[str]:
    reached, ahead = {first}, [first]
    while ahead:
        state = ahead.pop()
        following = {after for before, after in edges if before == state} - {"[*]"}
        ahead += following - reached
        reached |= following
    return reached


def test_items_move_as_the_document_says() -> None:
    """A turn may take several steps, so each state has to be reachable from the one before."""
    edges = documented_edges()
    ways = {state.value: reachable(edges, state.value) for state in TransferState}
    ways["[*]"] = reachable(edges, "[*]")
    assert ways["[*]"] == {"[*]", *(state.value for state in TransferState)}
    seen: set[str] = set()
    for seed in range(4):
        world = World(seed, producers=2, consumers=2, arena_bytes=16)
        world.connect_all()
        for number in range(3):
            for consumer in world.consumers:
                world.expect(consumer, f"item{number}", number)
            for producer in world.producers:
                world.produce(producer, f"item{number}", shape_of(9))
        before: dict[int, str] = {}
        for step in (*[partial(world.step, mishaps=0.2)] * 250, world.settle):
            step()
            items = [each for node in world.consumers for each in node.machine.items.values()]
            for item in items:
                assert item.state.value in ways[before.get(id(item), "[*]")]
            before = {id(item): item.state.value for item in items}
            seen.update(before.values())
    assert seen == {state.value for state in TransferState}
