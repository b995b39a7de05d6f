"""Events of random steps: a listener's view of the tiers must equal their content.

vLLM's own scheduler publishes, real workers save, load and evict; nothing is computed. The view of
a store is compared with the store's keys. The view of host memory is compared with the reports of
all ranks.
"""

import random
from collections import defaultdict
from typing import Any

import pytest

from tests.faults.rig import BLOCK, CHUNK, Rig, RigSpec
from tests.faults.scene import tokens
from tests.faults.test_random_steps import Prompts
from tests.faults.workshop import Workshop
from tests.support.faults import Fault
from tests.support.invariants import check
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import chunk_id_of
from vllm_kvpool.storage.base import Store
from vllm_kvpool.vllm_adapt import kv_events

STEPS = 150
MOST_STEPS = 1500  # a busy machine brings less into host memory per step
END_S = 30.0
STORE, HOST, OWN = ("CPU", None), ("CPU", "LOCAL"), ("GPU", None)
Medium = tuple[str, str | None]
kv_events.MEDIA["memory"] = kv_events.Medium("CPU")


class Listener:
    """A subscriber to the events of a rig's scheduler."""

    def __init__(self, rig: Rig) -> None:
        self.blocks: dict[Medium, set[Any]] = defaultdict(set)
        self.known: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        self.num_told = 0
        rig.scheduler.kv_event_publisher.publish = self.hear

    def hear(self, batch: Any) -> None:
        for event in batch.events:
            match type(event).__name__:
                case "BlockStored":
                    self.stored(event)
                case "BlockRemoved":
                    medium = (event.medium, event.locality)
                    assert medium == OWN or set(event.block_hashes) <= self.blocks[medium]
                    self.blocks[medium] -= set(event.block_hashes)
                case "AllBlocksCleared":
                    self.blocks.clear()

    def stored(self, event: Any) -> None:
        """Record a stored event. All events of a block must name the same parent and tokens."""
        medium, parent = (event.medium, event.locality), event.parent_block_hash
        for i, name in enumerate(event.block_hashes):
            about = parent, tuple(event.token_ids[i * BLOCK : (i + 1) * BLOCK])
            assert self.known.setdefault(name, about) == about
            assert medium == OWN or name not in self.blocks[medium], "told twice"
            parent = name
        self.blocks[medium].update(event.block_hashes)
        self.num_told += medium != OWN

    def tokens_to(self, name: Any) -> list[int]:
        """Return all tokens up to the end of a block."""
        tokens: list[int] = []
        while name is not None:
            name, own = self.known[name]
            tokens[:0] = own
        return tokens


def chunk_hash(tokens: list[int]) -> bytes:
    """Return the hash of the chunk that ends with these tokens."""
    chain = ChunkChain(CHUNK, RequestIdentity(b"", "", (), None))
    chain.extend(tokens)
    return chain.hashes[-1]


def what_is_so(rig: Rig, listener: Listener, store: Store) -> tuple[set[Any], set[Any]]:
    """Return the blocks that the store has whole, and those that host memory has."""
    connector: Any = rig.scheduler.connector
    check(connector._events._tracker)
    names = connector._scheduler_part._lookups.core._names
    stored, in_host = set(), set()
    for name, (parent, _) in listener.known.items():
        path = listener.tokens_to(name)
        if len(path) % CHUNK == 0:  # the block ends a chunk, and its parent begins it
            chunk = chunk_hash(path)
            if all(store.exists(names.of_chunk(chunk))):
                stored |= {name, parent}
            if connector._scheduler.host.has(chunk_id_of(names.namespace, chunk.hex())):
                in_host |= {name, parent}
    return stored, in_host


@pytest.mark.parametrize("policy", ["through", "back"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("faulty", [False, True])
def test_a_listener_believes_what_is_so(
    workshop: Workshop, policy: str, tp: int, faulty: bool
) -> None:
    rng = random.Random(f"{policy} {tp} {faulty}")
    url = workshop.memory()
    spec = RigSpec(tp=tp, num_blocks=40, events=True, options={"write_policy": policy})
    rig = workshop.rig(spec, ["host://1MiB", url])
    listener, prompts, store = Listener(rig), Prompts(rng), workshop.plain_store(url)
    for number in range(MOST_STEPS):
        if number >= STEPS and rig.count("kvpool_evicted_cells"):
            break
        live = [r for r, answer in rig.answers.items() if not answer.ended]
        if len(live) < 4 and rng.random() < 0.4:
            alone = tokens(rng.randrange(10**6), 4 * CHUNK)
            rig.add(rng.choice([prompts.draw(), alone]), rng.choice([1, 2, 8]))
        if live and rng.random() < 0.02:
            rig.abort(rng.choice(live))
        if rng.random() < 0.03:
            rig.reset(connector=rng.random() < 0.3)
        if faulty and rng.random() < 0.05:
            workshop.faults.inject(Fault.FAILED, "put", rng.choice("0123456789abcdef"), 1)
        rig.step()
        check(rig.pool)
    rig.add(tokens(10**6, 4 * CHUNK), 1)  # a reset may just have emptied the pool
    rig.run(END_S)
    rig.settle()
    rig.step()
    assert listener.num_told > 0
    assert rig.count("kvpool_evicted_cells") > 0
    stored, in_host = what_is_so(rig, listener, store)
    assert listener.blocks[HOST] == in_host
    assert listener.blocks[STORE] <= stored
    if policy == "through" and not faulty:
        assert listener.blocks[STORE] == stored
        assert stored
