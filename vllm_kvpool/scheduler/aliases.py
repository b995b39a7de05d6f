"""Reads and writes aliases in the stores of the scheduler's process (`contents/alias.py`).

A thread for each store writes the aliases of chunks that a save has stored, so no save, lookup or
step waits for them. Aliases are hints: a full queue drops them. Lookups read aliases on their own
threads, and have those removed that lead nowhere, as the first writer of a key wins.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvpool.errors import StoreError
from vllm_kvpool.identity.keys import alias_prefix, chunk_id_of_key, key_digest
from vllm_kvpool.scheduler.lookup_core import MAX_READ_ALIASES
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.save_outcomes import EndedSave
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, Store, map_buffer
from vllm_kvpool.storage.contents.alias import Alias, alias_bytes, write_alias
from vllm_kvpool.storage.contents.cell_format import CellFault, verify
from vllm_kvpool.storage.guarded import BoundedCalls, CallLeftBehind

if TYPE_CHECKING:
    from vllm_kvpool.storage.contents.encryption import EncryptedCells

logger = logging.getLogger(__name__)

MAX_QUEUED = 256  # saves and removals of a store that are not performed yet
JOIN_S = 0.5
ALIGNMENT = 64  # of objects in a buffer

_Task = EndedSave | tuple[str, ...]  # a save whose aliases to write, or aliases to remove


class _NewAlias(NamedTuple):
    key: str
    alias: Alias
    ref: ChunkRef


class Aliases:
    """The aliases of one namespace, every `step` tokens of a chunk, in the stores of `tiers`.

    `encrypted`: what encrypts cells, if they are encrypted. It is closed with the aliases.
    `answer_s`: how long a read may take. `on_hung` is called with the tier of a read that takes
    longer; the memory of that read is used again once it has returned.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        tiers: Sequence[int],
        names: CellNames,
        chunk_tokens: int,
        step: int,
        encrypted: "EncryptedCells | None" = None,
        *,
        answer_s: float,
        on_hung: Callable[[int], None] = lambda tier: None,
    ) -> None:
        self.step = step
        self.tiers = tuple(tiers)
        self._stores = stores
        self._names = names
        self._chunk_tokens = chunk_tokens
        self._encrypted = encrypted
        self._nbytes = alias_bytes(chunk_tokens)
        self._memory: list[tuple[int, Buffer]] = []  # with its tier
        self._answer_s = answer_s
        self._on_hung = on_hung
        # Memory of each tier that no read uses.
        self._free = {tier: [self._registered(tier)] for tier in self.tiers}
        self._reads = {tier: BoundedCalls(f"kvpool-alias-reads-{tier}") for tier in self.tiers}
        self._writers = [
            _StoreThread(partial(self._perform, tier, self._registered(tier)), str(tier))
            for tier in self.tiers
        ]

    def _registered(self, tier: int) -> list[Buffer]:
        """Return memory for `MAX_READ_ALIASES` aliases, registered with a tier's store."""
        stride = -(-self._nbytes // ALIGNMENT) * ALIGNMENT
        whole = map_buffer(MAX_READ_ALIASES * stride)
        self._stores[tier].register(whole)
        self._memory.append((tier, whole))
        return [whole.part(start, start + self._nbytes) for start in range(0, whole.nbytes, stride)]

    def read(self, tier: int, keys: Sequence[str]) -> list[bytes | None]:
        """Return the aliases of up to `MAX_READ_ALIASES` keys, on the tier's lookup thread.

        None stands for an alias that is missing or damaged. Raises StoreError, at the latest after
        `answer_s`.
        """
        try:
            buffers, outcomes = self._reads[tier].run(
                partial(self._get, tier, keys), self._answer_s
            )
        except CallLeftBehind:
            self._on_hung(tier)
            raise
        found: list[bytes | None] = [None] * len(keys)
        damaged: list[str] = []
        for place, (key, buffer, outcome) in enumerate(zip(keys, buffers, outcomes, strict=True)):
            if outcome is GetOutcome.OK:
                fault = self._fault(key, buffer)
                if fault is None:
                    found[place] = bytes(buffer.view)
                elif fault is not CellFault.UNKNOWN_KEY:
                    damaged.append(key)
            elif outcome is GetOutcome.WRONG_SIZE:
                damaged.append(key)
        self.remove(damaged)
        return found

    def _get(self, tier: int, keys: Sequence[str]) -> tuple[list[Buffer], list[GetOutcome]]:
        """Read into memory that no other read uses, until the store's call returns."""
        free = self._free[tier]
        memory = free.pop() if free else self._registered(tier)
        try:
            buffers = memory[: len(keys)]
            return buffers, self._stores[tier].get(keys, buffers)
        finally:
            free.append(memory)

    def _fault(self, key: str, buffer: Buffer) -> CellFault | None:
        if self._encrypted is not None:
            return self._encrypted.decrypt(key, buffer.view)
        return verify(buffer.view, key_digest(key), checksum=True)

    def write(self, save: EndedSave) -> None:
        """Have the aliases of a save's stored chunks written to every store. Never blocks."""
        for writer in self._writers:
            writer.post(save)

    def remove(self, keys: Sequence[str]) -> None:
        """Have aliases removed from every store. Never blocks; any thread."""
        if keys:
            for writer in self._writers:
                writer.post(tuple(keys))

    def drop(self) -> None:
        """Write nothing of what was posted so far: its chunks are being removed."""
        for writer in self._writers:
            writer.drop()

    def close(self) -> bool:
        """End the threads. Returns True if all have ended, so that the stores may be closed."""
        deadline = time.monotonic() + JOIN_S
        for writer in self._writers:
            writer.drop()
            writer.inbox.put(None)
        for writer in self._writers:
            writer.join(max(0.0, deadline - time.monotonic()))
        reads = [each.close(max(0.0, deadline - time.monotonic())) for each in self._reads.values()]
        if not all(reads) or any(writer.is_alive() for writer in self._writers):
            return False
        for tier, memory in self._memory:
            self._stores[tier].unregister(memory)
        if self._encrypted is not None:
            self._encrypted.close()
        return True

    # A store's thread

    def _perform(self, tier: int, buffers: Sequence[Buffer], task: _Task) -> None:
        """Write the aliases of a save, or remove aliases. Raises StoreError."""
        store = self._stores[tier]
        if not isinstance(task, EndedSave):
            store.remove(task)
            return
        put = store.put if self._encrypted is None else partial(self._encrypted.put, tier)
        aliases = self._aliases_of(task)
        while part := list(islice(aliases, len(buffers))):
            used = buffers[: len(part)]
            for new, buffer in zip(part, used, strict=True):
                write_alias(buffer.view, new.key, new.alias)
            put([new.key for new in part], used, [new.ref for new in part])

    def _aliases_of(self, save: EndedSave) -> Iterator[_NewAlias]:
        plan, size = save.plan, self._chunk_tokens
        assert save.prompt is not None
        chain, known = save.prompt
        names = self._names.with_weights(plan.weights_version)
        prefix = alias_prefix(names.namespace)
        for index, chunk_hash in enumerate(plan.hashes, plan.first_chunk):
            if index in save.how.missed or chain.has_extras(index):
                continue
            start = index * size
            tokens = known[start : start + (plan.end_tokens or size)]
            # A child of its chunk: a store that knows of parents evicts the alias first.
            chunk_id = names.chunk_id(chunk_hash, names.anchor)
            alias = Alias(chunk_hash, tokens)
            for stop in range(self.step, min(len(tokens), size - 1) + 1, self.step):
                key = prefix + chain.hash_of_part(index, tokens[:stop]).hex()
                place = (chunk_id_of_key(key), chunk_id, index + 1)
                ref = ChunkRef(*place, retention=plan.retention, tenant=plan.tenant)
                yield _NewAlias(key, alias, ref)


class _StoreThread(threading.Thread):
    """The thread of one store; `perform` raises StoreError."""

    def __init__(self, perform: Callable[[_Task], None], name: str) -> None:
        super().__init__(name=f"kvpool-aliases-{name}", daemon=True)
        self._perform = perform
        self._generation = 0
        self.inbox: SimpleQueue[tuple[int, _Task] | None] = SimpleQueue()
        self.start()

    def post(self, task: _Task) -> None:
        """Have a task performed, unless too many wait."""
        if self.inbox.qsize() < MAX_QUEUED:
            self.inbox.put((self._generation, task))

    def drop(self) -> None:
        """Perform none of the tasks that wait."""
        self._generation += 1

    def run(self) -> None:
        while (item := self.inbox.get()) is not None:
            generation, task = item
            if generation != self._generation:
                continue
            try:
                self._perform(task)
            except StoreError as error:
                logger.debug("kvpool: aliases were not written: %s", error)
            except Exception:
                logger.exception("kvpool: aliases were not written: internal error")
