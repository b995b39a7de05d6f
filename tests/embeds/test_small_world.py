"""A small world in all orders: every message, write and drain at every moment it can happen.

A producer or two, one consumer, rows of one byte, a window of one or two. All interleavings are
walked, once for each distinct state, with a limited number of faults at any moment.
Steps without a fault never form a cycle, so every state leads to one with nothing in progress.
From there time passes without faults. The item must then arrive whole or be reported as
unavailable, and nothing may be left behind.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.embeds.invariants import describe
from tests.embeds.world import World, limits, shape_of
from vllm_kvpool.embeds.machines.admission import AdmissionQueue, ItemAdmission
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.discovery import ItemDiscovery
from vllm_kvpool.embeds.machines.effects import Turn
from vllm_kvpool.embeds.machines.encoded_items import EncodedItemCache, PendingTargets
from vllm_kvpool.embeds.machines.grants import RowGrants
from vllm_kvpool.embeds.machines.items import ConsumerLimits
from vllm_kvpool.embeds.machines.offers import Offers
from vllm_kvpool.embeds.machines.producer import Producer, ProducerLimits
from vllm_kvpool.embeds.machines.window import ExtentAllocator, WindowLedger

MOST_STATES = 60_000
PATIENCE_S = 300


class Budget(NamedTuple):
    """Number of faults of each kind that may still happen."""

    lose: int = 0
    double: int = 0
    write: int = 0
    cut: int = 0
    forget: int = 0
    expect: int = 0
    weights: int = 0


Step = Callable[[World], None]
_LEFT_OUT = {
    "counts",
    "_on_end",
    "_release",
    "_send",
    "random",
    "log",
    "limits",
    "sender_limits",
    "_limits",
    "most_bytes",
    # Parts of a consumer that stand in it, too.
    *("_turn", "_items", "_admission", "_offers", "_grants"),
}
_KEYS_ALONE = {"_active", "_grantable", "open"}
"""Views of a consumer's items: the items themselves stand in `items`."""


_ATOMS = (type(None), str, bytes, int, float, Enum, ConsumerLimits, msgspec.Struct)
_MACHINES = (
    *(World, Consumer, Producer, ItemAdmission, AdmissionQueue, ItemDiscovery, Offers, RowGrants),
    *(Turn, WindowLedger, ExtentAllocator, EncodedItemCache, PendingTargets),
)


@cache
def _freezer(kind: type) -> Callable[[Any], Any]:
    """Return the function that freezes values of a type; cached, as it is used for every state."""
    if issubclass(kind, _ATOMS):
        return lambda value: value
    if issubclass(kind, bytearray):
        return bytes
    if issubclass(kind, Mapping):
        return lambda value: tuple([(frozen(key), frozen(each)) for key, each in value.items()])
    if issubclass(kind, set | frozenset):
        return lambda value: frozenset([frozen(each) for each in value])
    if issubclass(kind, list | tuple | deque):
        return lambda value: tuple([frozen(each) for each in value])
    if is_dataclass(kind):
        names = tuple(each.name for each in fields(kind) if each.name not in _LEFT_OUT)
        return lambda value: tuple([frozen(getattr(value, name)) for name in names])
    assert issubclass(kind, _MACHINES), kind
    return lambda value: tuple(
        [
            tuple(each) if name in _KEYS_ALONE else frozen(each)
            for name, each in sorted(vars(value).items())
            if name not in _LEFT_OUT
        ]
    )


def frozen(value: Any) -> Any:
    """Two worlds in the same state are equal."""
    return _freezer(type(value))(value)


def good_steps(world: World) -> Iterator[Step]:
    """Yield every step that can happen without a fault."""
    for key, links in world.links.items():
        if links:
            yield lambda at, key=key: at.deliver(key)  # type: ignore[misc]
    for who, producer in enumerate(world.producers):
        if producer.preparing:
            yield lambda at, who=who: at.prepare(at.producers[who])  # type: ignore[misc]
        for number in range(len(producer.writes)):
            yield lambda at, who=who, number=number: at.end_write(at.producers[who], number)  # type: ignore[misc]
    for number in range(len(world.consumers[0].drains)):
        yield lambda at, number=number: at.drain(at.consumers[0], number)  # type: ignore[misc]
    if len(world.up) < len(world.producers):
        yield World.connect_all


def double(world: World, key: tuple[str, str]) -> None:
    world.links[key].append(world.links[key][0])


def bad_steps(world: World, left: Budget) -> Iterator[tuple[Step, Budget]]:
    """Yield every step that is a fault, with the budget left after it."""
    for key, links in world.links.items():
        if links and left.lose:
            yield (
                lambda at, key=key: at.links[key].popleft(),  # type: ignore[misc]
                left._replace(lose=left.lose - 1),
            )
        if links and left.double:
            yield (
                lambda at, key=key: double(at, key),  # type: ignore[misc]
                left._replace(double=left.double - 1),
            )
    for who, producer in enumerate(world.producers if left.write else ()):
        for number in range(len(producer.writes)):
            for how in ("failed", "unsure", "damaged"):
                yield (
                    lambda at, who=who, number=number, how=how: at.end_write(  # type: ignore[misc]
                        at.producers[who], number, how
                    ),
                    left._replace(write=left.write - 1),
                )
    for key in sorted(world.up) if left.cut else ():
        yield lambda at, key=key: at.cut(key), left._replace(cut=left.cut - 1)  # type: ignore[misc]
    if left.forget:
        yield (
            lambda at: at.forget(at.consumers[0], "i"),
            left._replace(forget=left.forget - 1),
        )
    if left.expect:
        yield lambda at: at.expect(at.consumers[0], "i"), left._replace(expect=left.expect - 1)
    if left.weights:
        rest = left._replace(weights=left.weights - 1)
        yield lambda at: at.change_weights(at.consumers[0]), rest
        for who in range(len(world.producers)):
            yield lambda at, who=who: at.change_weights(at.producers[who]), rest  # type: ignore[misc]
    if world.late:
        yield World.land_late, left


def after(packed: bytes, step: Step) -> World:
    world: World = pickle.loads(packed)
    step(world)
    world.assert_no_wrong_bytes()
    return world


def comes_to_its_end(world: World, is_asked: bool) -> None:
    """The good case, from a moment on at which nothing is under way."""
    (consumer,) = world.consumers
    world.land_late()
    for _ in range(PATIENCE_S):
        told = [news for news in consumer.told if news.code is not None]
        if "i" in consumer.ready:
            world.assert_item(consumer, "i")
            break
        if told or not is_asked:
            break
        while (step := next(good_steps(world), None)) is not None:
            step(world)
        world.pass_time(1.0)
    else:
        raise AssertionError(f"it does not come to an end: {describe(consumer.machine, 'i')}")
    if "i" in consumer.ready:
        consumer.machine.taken("i", world.now)
    for _ in range(PATIENCE_S):
        while (step := next(good_steps(world), None)) is not None:
            step(world)
        transfers = [tid for each in world.producers for tid in each.machine.transfers]
        if not (transfers or consumer.machine.items or list(consumer.machine.grants.window)):
            return
        world.pass_time(1.0)
    raise AssertionError(f"something is left: {describe(consumer.machine, 'i')}")


def walk(first: World, budget: Budget) -> tuple[int, int]:
    """Visit all states and return (number of states, number with nothing in progress)."""
    seen: dict[Any, bool] = {}  # whether all that follows has been walked
    path: list[tuple[Any, Iterator[tuple[Any, bytes, Budget, bool]]]] = []
    quiesced = 0

    def enter(
        key: Any, world: World, left: Budget
    ) -> tuple[Any, Iterator[tuple[Any, bytes, Budget, bool]]]:
        nonlocal quiesced
        packed = pickle.dumps(world)
        good = list(good_steps(world))
        if not good:
            quiesced += 1
            is_asked = any(item.requested for item in world.consumers[0].machine.items.values())
            comes_to_its_end(pickle.loads(packed), is_asked)
        bad = list(bad_steps(world, left))

        def following() -> Iterator[tuple[Any, bytes, Budget, bool]]:
            for step in good:
                yield after(packed, step), packed, left, True
            for step, rest in bad:
                yield after(packed, step), packed, rest, False

        seen[key] = False
        return key, following()

    path.append(enter((frozen(first), budget), first, budget))
    while path:
        key, following = path[-1]
        found = next(following, None)
        if found is None:
            seen[key] = True
            path.pop()
            continue
        world, _, left, is_good = found
        next_key = (frozen(world), left)
        if next_key in seen:
            assert seen[next_key] or not is_good, "it goes round in a circle"
            continue
        assert len(seen) < MOST_STATES, "this world is not small"
        path.append(enter(next_key, world, left))
    return len(seen), quiesced


def begun(
    rows: int,
    window: int,
    *,
    pushed: bool = True,
    requested: bool = True,
    known: bool = False,
    producers: int = 1,
) -> World:
    """An item on its way; if the size of a row is `known`, rows are granted with the wish."""
    bounds = limits(default_allocate_tokens=1, repeat_s=0.5, backoff_s=0.1)
    senders = ProducerLimits(writers=1, small_bytes=0, repeat_s=0.5)
    world = World(0, producers=producers, arena_bytes=window, bounds=bounds, sender_limits=senders)
    del world.random  # nothing is left to chance, and its state is large
    if known:
        for number, producer in enumerate(world.producers):
            world.expect(world.consumers[0], f"known{number}")
            world.produce(producer, f"known{number}", shape_of(1, 1))
            while (step := next(good_steps(world), None)) is not None:
                step(world)
            world.consumers[0].machine.taken(f"known{number}", world.now)
            world.perform()
    if requested:
        world.expect(world.consumers[0], "i")
    for producer in world.producers:
        if pushed:
            world.push(producer, "i", "c0")
        world.produce(producer, "i", shape_of(rows, 1))
    return world


WANTED = {"pushed": False}
EARLY = {"pushed": False, "known": True}
CASES = {
    "no mishap": (begun(3, 2), Budget()),
    "lost": (begun(2, 1), Budget(lose=1)),
    "lost, wanted and not pushed": (begun(2, 2, **WANTED), Budget(lose=1)),
    "doubled": (begun(2, 2, **WANTED), Budget(double=1)),
    "lost and doubled": (begun(2, 1, **WANTED), Budget(lose=1, double=1)),
    "a write fails": (begun(3, 2, **WANTED), Budget(write=1)),
    "a write fails and a word is lost": (begun(2, 1, **WANTED), Budget(lose=1, write=1)),
    "cut": (begun(3, 1, **WANTED), Budget(cut=1)),
    "cut with a write that fails": (begun(2, 1), Budget(cut=1, write=1)),
    "forgotten": (begun(2, 2), Budget(forget=1)),
    "forgotten and wanted again": (begun(2, 1, **WANTED), Budget(forget=1, expect=1)),
    "forgotten and a word is lost": (begun(2, 1, **WANTED), Budget(forget=1, lose=1)),
    "granted early and a word is lost": (begun(2, 2, **EARLY), Budget(lose=1)),
    "granted early and doubled": (begun(2, 2, **EARLY), Budget(double=1)),
    "granted early and cut": (begun(1, 2, **EARLY), Budget(cut=1)),
    "granted early and forgotten": (begun(1, 2, **EARLY), Budget(forget=1, expect=1)),
    "granted early and a write fails": (begun(2, 2, **EARLY), Budget(write=1)),
    "new weights": (begun(2, 2, **WANTED), Budget(weights=1)),
    "new weights in a push": (begun(2, 1), Budget(weights=1)),
    "new weights of one of two": (begun(1, 1, producers=2, **WANTED), Budget(weights=1)),
    "two producers and a word is lost": (begun(2, 1, producers=2, **WANTED), Budget(lose=1)),
    "two producers, granted early": (begun(1, 1, producers=2, **EARLY), Budget(lose=1)),
    "pushed before it is asked for": (begun(2, 1, requested=False), Budget(expect=1, double=1)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_order_ends_well(name: str) -> None:
    world, budget = CASES[name]
    states, quiesced = walk(world, budget)
    assert states > 20
    assert quiesced
