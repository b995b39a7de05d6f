"""Scenes of the fault matrix: a store with a stored prefix, an engine that reads it, and a fault.

An engine fills the `Library` once by saving everything. Each `Scene` gets a copy, in memory or in
files. A scene can read and change the objects behind the engines' backs.
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
from tests.support.worker_steps import prompt_hashes
from vllm_kvpool.storage.base import Buffer, ChunkRef, Store

STORED_CHUNKS = 4
FULL_CHUNKS = 6
BAD_CHUNK = 1  # the chunk before it stays good
ANSWER_TOKENS = 2  # one in the prompt's step, one that reads the whole cache
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
    """The objects in a store after an engine has answered `PREFIX` and one more token, by key.

    Faults that damage single cells damage `bad`. `stranger` is another cell of the same size.
    """

    def __init__(self, workshop: Workshop, spec: RigSpec | None = None) -> None:
        url = workshop.memory()
        self.spec = spec = spec or RigSpec()
        rig = workshop.rig(spec, url)
        rig.add([*PREFIX, 3], 1)
        rig.run(SLACK_S)
        rig.settle()
        rig.shutdown()
        store = workshop.plain_store(url)
        assert isinstance(store, MemoryStore)
        shelf = store._table
        self.objects = {key: shelf.take(key) or b"" for key in shelf.list_keys()}
        self.chunks = [self._keys_of(each.hex()) for each in prompt_hashes(PREFIX, CHUNK)]
        assert all(self.objects.values())
        if spec.model.states:  # a single state is stored, after the last chunk
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
    """A sequence of engines over one store, with one fault."""

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
        """An engine that runs at the same time, once the fault begins."""
        self.nearer: list[str] = []
        """URLs of the tiers before the store."""
        self.url = f"file://{directory}?size=64MiB" if directory else workshop.memory()
        self.store: Store = workshop.plain_store(self.url)
        for key, data in library.objects.items():
            self.write(key, data)

    @property
    def rig(self) -> Rig:
        """The current engine."""
        return self.rigs[-1]

    def start_engine(self) -> Rig:
        """Start a new engine over the same store. It takes over the companions of the last
        engine."""
        rig = self.workshop.rig(self.spec, [*self.nearer, self.url], f"rig{len(self.rigs)}")
        if self.rigs:
            rig.companions = self.rig.companions
        self.rigs.append(rig)
        return rig

    def begin(self) -> None:
        """Begin the fault, at the first call only."""
        if not self.begun:
            self.begun = True
            self._begin(self)

    def stop(self) -> None:
        """End the fault."""
        self._stop(self)

    def time(self, action: Callable[[], object]) -> float:
        """Return the seconds that an action takes."""
        began = time.monotonic()
        action()
        return time.monotonic() - began

    def write(self, key: str, data: bytes) -> None:
        """Put an object into the store, and replace an earlier one."""
        memory = mmap.mmap(-1, max(1, len(data)))  # stores that read past the page cache want pages
        memory[: len(data)] = data
        view = memoryview(memory)[: len(data)]
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        self.store.remove([key])
        self.store.put([key], [Buffer(address, view)], [ChunkRef(key)])

    def bad_keys(self) -> Sequence[str]:
        """Return the cells that are damaged by a fault of single cells. They have one head, so
        belong to one rank."""
        return [self.library.bad]

    # Rounds

    @property
    def limit_s(self) -> float:
        """Time limit for requests.

        By default the limit covers a few steps. With options, a store may be slow: the limit adds
        the timeouts of a lookup and a load, twice because of preemptions.
        """
        if not self.spec.options:
            return SLACK_S
        options = self.rig.pool._config
        return 2 * (options.lookup_timeout_ms / 1000 + options.load_timeout_s) + SLACK_S

    def answer(self, *prompts: Sequence[int]) -> float:
        """Run these requests to their end, and return their hit tokens.

        Assert that they answer as without a pool.
        """
        rig = self.rig
        before = rig.count("kvpool_hit_tokens")
        ids = [rig.add(prompt, ANSWER_TOKENS) for prompt in prompts]
        rig.run(self.limit_s)
        rig.expect(ids)
        return rig.count("kvpool_hit_tokens") - before

    def again(self, *prompts: Sequence[int]) -> float:
        """Answer with an empty cache of the engine itself, after its transfers have ended.

        The wait is needed because a bad cell is removed after the request that met it.
        """
        if not self.spec.options:
            self.rig.settle()
        assert self.rig.reset(), "blocks are still referenced"
        return self.answer(*prompts)

    def wait_until_up(self, *, stuck: bool = False) -> None:
        """Wait until every part of the engine asks its stores again after a fault.

        No transfer may then be in progress, except calls that are `stuck`.
        """
        if not stuck:
            self.rig.settle()
        self.wait(self._is_up)

    def _is_up(self) -> bool:
        # The next lookup also tries a tier that lookups leave alone.
        if self.workshop.may_try_tiers(self.rig):
            self.answer(LATER)
        return self.workshop.asks_stores(self.rig)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait for other threads."""
        wait_until(ready, UP_S, what=lambda: f"waited in vain: {self.rig.describe()}")

    def failures(self) -> Mapping[str, float]:
        """Failures, lookups and cells that all engines together have counted, by labels."""
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
        """Assert that no engine leaks, shut all of them down, and assert that no thread is left.

        With `exact`, also assert that each prompt token counts as a hit or a miss.
        """
        everyone = [self.rig, *self.rig.companions]
        for rig in everyone:
            check_nothing_leaked(rig)
            if exact:
                check_tokens(rig)
        for rig in everyone:
            rig.shutdown()
        check_threads(self.workshop)
