"""Ranks that two encoders offer different bytes end with the same ones."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from tests.embeds.engines import Engine, embeddings, wait_for
from tests.embeds.invariants import describe
from tests.embeds.world import World, content, limits, shape_of
from tests.support.seeds import seeds
from vllm_kvpool.embeds.availability import EmbedsRequest, Feature
from vllm_kvpool.embeds.params import Delivery
from vllm_kvpool.embeds.protocol import messages as p
from vllm_kvpool.embeds.protocol.messages import Offer, PeerRole
from vllm_kvpool.embeds.scheduler import EmbedsScheduler, EngineRole

RANKS, ROWS = 2, 7
MM_HASH = "image"


class Said(NamedTuple):
    rank: int
    body: p.Message | None


class RankChannel:
    """The consumers of a world as the ranks of one engine."""

    num_ranks, are_up, silent_s = RANKS, True, 0.0

    def __init__(self, world: World) -> None:
        self._world = world

    def send(self, body: p.Message, rank: int | None = None) -> None:
        for number, node in enumerate(self._world.consumers):
            if rank not in (None, number):
                continue
            if isinstance(body, p.Expect):
                node.machine.expect(body, self._world.now)
            elif isinstance(body, p.Reorder):
                node.machine.reorder(body.mm_hash, body.order)
            elif isinstance(body, p.Forget):
                node.machine.forget(body.mm_hash)
        self._world.perform()

    def flush(self) -> None: ...

    def poll(self, timeout_s: float = 0.0) -> list[Said]:
        said = []
        for rank, node in enumerate(self._world.consumers):
            said += [Said(rank, news) for news in node.told]
            node.told.clear()
        return said

    def close(self) -> None: ...


def engine_in(world: World) -> EmbedsScheduler:
    return EmbedsScheduler(
        RankChannel(world),
        EngineRole(
            is_producer=False,
            is_consumer=True,
            has_peers=True,
            retain_bytes=1,
            max_step_tokens=1 << 20,
        ),
        str,
        clock=lambda: world.now,
    )


@pytest.mark.parametrize("seed", seeds(50, 150))
def test_ranks_end_with_the_same_bytes_whatever_happens(seed: int) -> None:
    """Messages are lost, encoders die in mid-transfer and come back, offers come in any order."""
    bounds = limits(default_allocate_tokens=3, num_ranks=RANKS, bootstrap_timeout_s=500.0)
    world = World(seed, producers=2, consumers=RANKS, bounds=bounds)
    chance = random.Random(seed)
    world.salt = {node.name: f"encoder {n}" for n, node in enumerate(world.producers)}
    scheduler, shape = engine_in(world), shape_of(ROWS)
    view = EmbedsRequest("r", (Feature(MM_HASH, 0, ROWS, ROWS, False),), Delivery(is_sent=True))
    scheduler.ensure(view, 0)
    for node in world.producers:
        world.produce(node, MM_HASH, shape)
    for _ in range(chance.randrange(120)):
        world.step(0.15)
        if chance.random() < 0.02:
            number = chance.randrange(2)
            world.restart_producer(number)
            again = world.producers[number]
            world.salt[again.name] = f"encoder {number}"
            world.produce(again, MM_HASH, shape)
        scheduler.ensure(view, 0)
    for _ in range(20):
        world.settle()
        if scheduler.ensure(view, 0):
            break
    if scheduler.take_unavailable():
        assert seed, "the first one must not fail"
        return
    assert scheduler.has(MM_HASH), (
        scheduler._items,
        [describe(node.machine, MM_HASH) for node in world.consumers],
    )
    got = [node.tensors[MM_HASH] for node in world.consumers]
    assert got[0] == got[1]
    assert got[0] in [content(MM_HASH, shape, f"encoder {number}") for number in range(2)]


# Real sockets


@contextmanager
def silent_to(producer: Engine, rank: Engine, number: int) -> Iterator[None]:
    """An encoder whose offers do not reach one rank of an engine, meanwhile."""
    peers = producer.workers[0]._control._peers
    lost, usual = rank.workers[number]._control._peers.hello.incarnation, peers.send_to

    def send_to(incarnation: str, body: p.Message, now: float) -> None:
        if not (isinstance(body, Offer) and incarnation == lost):
            usual(incarnation, body, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "send_to", send_to)
        yield


@pytest.mark.parametrize("dies", [False, True])
def test_two_encoders_whose_bytes_differ(dies: bool) -> None:
    """Each rank hears of one first; one encoder may be gone before the ranks agree."""
    first, second = embeddings(30), embeddings(30) + 1e-6
    producers = [Engine(PeerRole.PRODUCER, heartbeat_s=0.2) for _ in range(2)]
    try:
        options = {"heartbeat_s": 0.2, "bootstrap_timeout_s": 3.0}
        with Engine(PeerRole.CONSUMER, ranks=RANKS, **options) as engine:
            ends = tuple(each.endpoint for each in producers)
            for producer, sent in zip(producers, (first, second), strict=True):
                producer.encode(MM_HASH, sent)
            with silent_to(producers[0], engine, 1), silent_to(producers[1], engine, 0):
                view = engine.request("r", (MM_HASH, 30), peers=ends)
                engine.awaits(view)
                wait_for(
                    lambda: all(MM_HASH in worker._io_workers._ready for worker in engine.workers),
                    lambda: engine.describe(MM_HASH),
                )
                if dies:
                    producers[0].close()
            wait_for(lambda: engine.may_go(view), lambda: engine.describe(MM_HASH))
            assert not engine.scheduler.take_unavailable(), "the request has failed"
            one, other = engine.get(MM_HASH)
            assert torch.equal(one, other)
            kept = [second] if dies else [first, second]
            assert any(torch.equal(one, each) for each in kept)
    finally:
        for producer in producers:
            if not producer.workers[0]._closed:
                producer.close()
