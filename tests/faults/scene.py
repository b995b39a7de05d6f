"""A cell of the matrix: a store with a stored prefix, an engine that reads it, and what may befall.

`Library` is filled once by an engine that has saved everything; each `Scene` gets a copy of it, in
memory or in files, whose objects it can look at and change behind the engines' backs.
"""

import mmap
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.audit import check_nothing_leaked, check_threads, check_tokens
from tests.faults.model import VOCAB
from tests.faults.rig import CHUNK, Rig, RigSpec
from tests.faults.workshop import Workshop
from tests.support.memory_store import MemoryStore
from tests.support.waiting import wait_until
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.storage.base import Buffer, ChunkRef, Store

STORED_CHUNKS = 4
FULL_CHUNKS = 6
BAD_CHUNK = 1  # the one before it stays good
ANSWER_TOKENS = 2  # one of the prompt's step and one that reads the whole cache
SLACK_S = 8.0  # a few steps, on a busy machine
SHUTDOWN_S = 3.0  # join of threads besides the time that saves are given
UP_S = 60.0  # a store that was away is up again once a call has ended within the engine's limit

# Limits of an engine whose store does not answer in time.
IMPATIENT: dict[str, Any] = {
    "lookup_timeout_ms": 60,
    "load_timeout_s": 0.25,
    "call_timeout_s": 0.2,
    "shutdown_timeout_s": 0.1,
}


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


PREFIX = tokens(1, STORED_CHUNKS * CHUNK)
READER = PREFIX + tokens(2, (FULL_CHUNKS - STORED_CHUNKS) * CHUNK + 10)
COUSIN = PREFIX + tokens(3, (FULL_CHUNKS - STORED_CHUNKS) * CHUNK + 4)
BYSTANDER = tokens(4, 70)
LATER = tokens(5, CHUNK + 10)


class Library:
    """What a store holds after an engine has answered a prompt of `PREFIX` and a token: objects by
    key. Faults of some cells befall `bad`; `stranger` is another cell as large."""

    def __init__(self, workshop: Workshop, spec: RigSpec | None = None) -> None:
        url = workshop.memory()
        spec = spec or RigSpec()
        rig = workshop.rig(spec, url)
        rig.add([*PREFIX, 3], 1)
        rig.run(SLACK_S)
        rig.settle()
        rig.shutdown()
        store = workshop.plain_store(url)
        assert isinstance(store, MemoryStore)
        shelf = store._table
        self.objects = {key: shelf.take(key) or b"" for key in shelf.list_keys()}
        chain = ChunkChain(CHUNK, RequestIdentity())
        chain.extend(PREFIX)
        self.chunks = [self._keys_of(digest.hex()) for digest in chain.hashes]
        assert all(self.objects.values())
        if spec.model.states:  # one is stored, after the last chunk
            self.bad = self.chunks[-1][-1]
            size = len(self.objects[self.bad])
            self.stranger = next(
                key for key in self.chunks[-1][-2::-1] if len(self.objects[key]) == size
            )
        else:
            self.bad, self.stranger = self.chunks[BAD_CHUNK][0], self.chunks[-1][0]
            assert [len(keys) for keys in self.chunks] == [len(self.chunks[0])] * STORED_CHUNKS

    def _keys_of(self, chunk_hash: str) -> list[str]:
        return sorted(key for key in self.objects if key.endswith(chunk_hash))


class Scene:
    """One engine after another over one store, and the fault that is in it."""

    def __init__(
        self,
        workshop: Workshop,
        library: Library,
        spec: RigSpec,
        begin: "Callable[[Scene], None]",
        stop: "Callable[[Scene], None]",
        directory: Path | None = None,
    ) -> None:
        self.workshop = workshop
        self.faults = workshop.faults
        self.library = library
        self.spec = spec
        self._begin = begin
        self._stop = stop
        self.begun = False
        self.rigs: list[Rig] = []
        self.rival: Rig | None = None
        """An engine that stands beside, once the fault begins."""
        self.nearer: list[str] = []
        """Urls of the tiers before the store."""
        self.url = f"file://{directory}?size=64MiB" if directory else workshop.memory()
        self.store: Store = workshop.plain_store(self.url)
        for key, data in library.objects.items():
            self.write(key, data)

    @property
    def rig(self) -> Rig:
        """The engine of now."""
        return self.rigs[-1]

    def start_engine(self) -> Rig:
        """A new engine over the same store; what stood beside the last one stands beside it."""
        rig = self.workshop.rig(self.spec, [*self.nearer, self.url], f"rig{len(self.rigs)}")
        if self.rigs:
            rig.companions = self.rig.companions
        self.rigs.append(rig)
        return rig

    def begin(self) -> None:
        """The fault begins, once."""
        if not self.begun:
            self.begun = True
            self._begin(self)

    def stop(self) -> None:
        """The fault is over."""
        self._stop(self)

    def time(self, action: Callable[[], object]) -> float:
        """The seconds that something takes."""
        began = time.monotonic()
        action()
        return time.monotonic() - began

    def write(self, key: str, data: bytes) -> None:
        """Put an object there, whatever was there before."""
        memory = mmap.mmap(-1, max(1, len(data)))  # stores that read past the page cache want pages
        memory[: len(data)] = data
        view = memoryview(memory)[: len(data)]
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        self.store.remove([key])
        self.store.put([key], [Buffer(address, view)], [ChunkRef(key)])

    def bad_keys(self) -> Sequence[str]:
        """The cells that a fault of some cells befalls: of one head only, so of one rank."""
        return [self.library.bad]

    # Rounds

    @property
    def limit_s(self) -> float:
        """A few steps; where a store may take its time, also what a request may wait for it: a
        lookup and a load that end by their timeouts, and once more after a preemption."""
        if not self.spec.options:
            return SLACK_S
        options = self.rig.pool._config
        return 2 * (options.lookup_timeout_ms / 1000 + options.load_timeout_s) + SLACK_S

    def answer(self, *prompts: Sequence[int]) -> float:
        """Run these requests to their end; they answer as without a pool. The hit tokens."""
        rig = self.rig
        before = rig.count("kvpool_hit_tokens")
        ids = [rig.add(prompt, ANSWER_TOKENS) for prompt in prompts]
        rig.run(self.limit_s)
        rig.expect(ids)
        return rig.count("kvpool_hit_tokens") - before

    def again(self, *prompts: Sequence[int]) -> float:
        """The same, for an engine that has nothing in its own cache, when it has done its work:
        a bad cell is removed beside the request that has met it."""
        if not self.spec.options:
            self.rig.settle()
        assert self.rig.reset(), "blocks are still referenced"
        return self.answer(*prompts)

    def wait_until_up(self, *, stuck: bool = False) -> None:
        """After a fault: until every part of the engine asks its stores again, and nothing is
        under way but, perhaps, calls that are `stuck`."""
        if not stuck:
            self.rig.settle()
        self.wait(self._is_up)

    def _is_up(self) -> bool:
        # A tier that lookups leave alone is tried beside the next one.
        if self.workshop.may_try_tiers(self.rig):
            self.answer(LATER)
        return self.workshop.asks_stores(self.rig)

    def wait(self, ready: Callable[[], bool]) -> None:
        """For what other threads do."""
        wait_until(ready, UP_S, what=lambda: f"waited in vain: {self.rig.describe()}")

    def failures(self) -> Mapping[str, float]:
        """What the engines have counted as gone wrong, over all of them."""
        told: dict[str, float] = {}
        for rig in self.rigs:
            for name in ("kvpool_failures", "kvpool_lookups", "kvpool_cells"):
                for labels, value in rig.counted(name).items():
                    told[labels] = told.get(labels, 0) + value
        return told

    def num_failures(self, *labels: str) -> float:
        failures = self.failures()
        return sum(failures[key] for key in failures if any(label in key for label in labels))

    def close(self, *, exact: bool) -> None:
        """Nothing is held by anybody, then nothing is left."""
        everyone = [self.rig, *self.rig.companions]
        for rig in everyone:
            check_nothing_leaked(rig)
            if exact:
                check_tokens(rig)
        for rig in everyone:
            rig.shutdown()
        check_threads(self.workshop)
