"""The tables of states: every edge, every pair that is none, and that the machines take them all.

An edge that no machine ever takes is a promise that nothing keeps; so chance and the scenarios
below together have to take every one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial

import pytest

from tests.embeds.sessions import hello, session_with
from tests.embeds.world import ProducerNode, World, limits, shape_of
from vllm_kvpool.embeds.machines.producer import ProducerLimits
from vllm_kvpool.embeds.machines.session import SESSION_TABLE, SessionEvent, SessionState
from vllm_kvpool.embeds.machines.states import (
    CONSUMER_TABLE,
    ENDED,
    GRANT_TABLE,
    PRODUCER_TABLE,
    GrantEvent,
    GrantState,
    IllegalEvent,
    ItemEvent,
    TransferEvent,
    TransferState,
    TransitionTable,
)
from vllm_kvpool.embeds.protocol import messages as p

TABLES = (
    (CONSUMER_TABLE, TransferState, ItemEvent),
    (PRODUCER_TABLE, TransferState, TransferEvent),
    (GRANT_TABLE, GrantState, GrantEvent),
    (SESSION_TABLE, SessionState, SessionEvent),
)
EDGES = [
    (table, state, event, after)
    for table, _, _ in TABLES
    for state, edges in table.edges.items()
    for event, after in edges.items()
]
OTHERS = [
    (table, state, event)
    for table, states, events in TABLES
    for state in states
    for event in events
    if event not in table.edges[state]
]
Edge = tuple[str, Enum, Enum]


def name_of(value: object) -> str:
    return value.name if isinstance(value, TransitionTable) else str(getattr(value, "value", value))


@pytest.mark.parametrize(("table", "state", "event", "after"), EDGES, ids=name_of)
def test_an_edge_leads_where_the_table_says(
    table: TransitionTable[Enum, Enum], state: Enum, event: Enum, after: Enum
) -> None:
    assert table.after(state, event) is after
    assert after in table.edges


@pytest.mark.parametrize(("table", "state", "event"), OTHERS, ids=name_of)
def test_any_other_event_raises_and_changes_nothing(
    table: TransitionTable[Enum, Enum], state: Enum, event: Enum
) -> None:
    before = {each: dict(edges) for each, edges in table.edges.items()}
    with pytest.raises(IllegalEvent, match=f"{table.name}: {event.value} while {state.value}"):
        table.after(state, event)
    assert table.edges == before


@pytest.mark.parametrize(("table", "states"), [each[:2] for each in TABLES], ids=name_of)
def test_every_state_has_its_line_and_can_be_reached(
    table: TransitionTable[Enum, Enum], states: type[Enum]
) -> None:
    assert set(table.edges) == set(states)
    first = next(iter(table.edges))
    reached, ahead = {first}, [first]
    while ahead:
        for after in table.edges[ahead.pop()].values():
            if after not in reached:
                reached.add(after)
                ahead.append(after)
    assert reached == set(states)


def test_what_has_ended_stays_so() -> None:
    # Success of a consumer's item is not the end: the engine has yet to take it.
    assert {state for state, edges in PRODUCER_TABLE.edges.items() if not edges} == ENDED
    ended = {state for state, edges in CONSUMER_TABLE.edges.items() if not edges}
    assert ended == ENDED - {TransferState.SUCCESS}


def test_an_illegal_event_leaves_a_machine_as_it_was() -> None:
    world = World(1, arena_bytes=8, bounds=limits(default_allocate_tokens=1))
    world.connect_all()
    consumer, producer = world.consumers[0], world.producers[0]
    sent(world, 9)
    while consumer.machine.counts["rows"] < 3:
        world.step()
    item = next(iter(consumer.machine.items.values()))
    transfer = next(iter(producer.machine.transfers.values()))
    for table, holder in ((CONSUMER_TABLE, item), (PRODUCER_TABLE, transfer)):
        before = holder.state
        for event in (event for _, state, event in OTHERS if (_, state) == (table, before)):
            with pytest.raises(IllegalEvent):
                holder.state = table.after(holder.state, event)  # as every change is made
            assert holder.state is before
    world.perform()
    world.settle()
    world.assert_item(consumer, "image")


# That the machines take every edge


@contextmanager
def watched() -> Iterator[set[Edge]]:
    """The edges that are taken meanwhile."""
    taken: set[Edge] = set()
    original = TransitionTable.after

    def after(self: TransitionTable[Enum, Enum], state: Enum, event: Enum) -> Enum:
        following = original(self, state, event)
        taken.add((self.name, state, event))
        return following

    TransitionTable.after = after  # type: ignore[method-assign,assignment]
    try:
        yield taken
    finally:
        TransitionTable.after = original  # type: ignore[method-assign]


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


def transfer_state(world: World) -> TransferState:
    (transfer,) = world.producers[0].machine.transfers.values()
    return transfer.state


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
        walk_until(world, lambda: len(world.producers[0].writes) == 2)
        for _ in range(2):  # and all of the window is in quarantine
            world.end_write(world.producers[0], 0, "unsure")
        walk_until(world, lambda: state_of(world) is TransferState.PARTIAL)
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
            world.consumers[0].machine.weights_changed(world.now)
            world.perform()
        assert [news.code for news in world.consumers[0].told if news.code]
        world.settle()
    world = in_state(TransferState.SUCCESS)
    world.consumers[0].machine.weights_changed(world.now)
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
            while state_of(world) is not TransferState.PARTIAL:
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
    elif state is TransferState.SUSPENDED:
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
        assert transfer.state is TransferState.CANCELLED


def the_consumer_has_it_already() -> None:
    """In each state; in the middle of a write too: another producer was faster."""
    for state in (TransferState.WAITING, TransferState.TRANSFERRING, TransferState.PARTIAL):
        world = producers_in(state)
        (transfer,) = world.producers[0].machine.transfers.values()
        key = (world.consumers[0].name, world.producers[0].name)
        world.receive(key, p.Complete(transfer.tid))
        assert transfer.state is TransferState.SUCCESS
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
        walk_until(world, partial(has_transfers, producer, 2))
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


def test_the_machines_take_every_edge() -> None:
    with watched() as taken:
        for scenario in SCENARIOS.values():
            scenario()
        for seed in range(4):
            world = World(seed, producers=2, consumers=2, arena_bytes=16)
            world.connect_all()
            for number in range(3):
                for consumer in world.consumers:
                    world.expect(consumer, f"item{number}", number)
                for producer in world.producers:
                    world.produce(producer, f"item{number}", shape_of(9))
            for _ in range(150):
                world.step(mishaps=0.2)
            world.settle()
    everything = {(table.name, state, event) for table, state, event, _ in EDGES}
    untaken = sorted(
        f"{name}: {state.value} {event.value}" for name, state, event in everything - taken
    )
    assert not untaken
