"""`kvpool prefetch`: copies cells into this host's files while an engine is still loading.

A low-priority process beside the engine, with the engine's configuration of the pool. It reads
orders (`ChunkNames`) as lines of JSON and writes a line with the result (`Brought`) of each.
By hand, `bring` does the same for one prompt.

The main thread waits at most `max_seconds`, a reader has the input, a `Mover` the stores. The input
ends when its writer wants no more or has died; then the process stops, unless it was told to finish
its orders. A store call that is under way is abandoned after `GRACE_S`.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from queue import Full, Queue
from typing import BinaryIO, NamedTuple, NoReturn

import msgspec

from vllm_kvpool.config import KVPoolConfig, read_engine_config, set_where_unset
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.identity.cell_names import Brought, ChunkNames
from vllm_kvpool.identity.keys import (
    CellKey,
    ParsedKey,
    chunk_id_of_key,
    key_digest,
    key_with_prefix,
)
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.storage.backends import capabilities_of, open_store
from vllm_kvpool.storage.base import (
    Buffer,
    ChunkRef,
    GetOutcome,
    PutOutcome,
    Store,
    map_buffer,
)
from vllm_kvpool.storage.contents.cell_format import (
    HEADER_BYTES,
    EncryptedHeader,
    is_encrypted,
    read_encrypted_header,
    verify,
)
from vllm_kvpool.storage.guarded import CallTimeouts, GuardedStore
from vllm_kvpool.storage.tiers import tier_specs
from vllm_kvpool.storage.url import FileOptions, StoreSpec, environment_for, uses_device

logger = logging.getLogger(__name__)

NEAR = "file"  # processes share it, and it outlives them
FAR = ("mooncake", "s3")  # across a network
NEAR_SHARE = 4  # at most a quarter of the near tier is filled
NICENESS = 10
GRACE_S = 2.0
OPEN_WAIT_S = 5.0
MAX_ORDERS = 64  # waiting; further ones are dropped
MAX_LINE_BYTES = 4 << 20
BATCH_BYTES = 16 << 20
BATCH_CELLS = 64
MAX_CELL_BYTES = 256 << 20
ALIGNMENT = 4096

_decode = msgspec.json.Decoder(ChunkNames).decode


def chosen(config: KVPoolConfig) -> tuple[StoreSpec, tuple[StoreSpec, ...]]:
    """The near tier and the far ones behind it; ConfigError if there is nothing to prefetch."""
    specs = tier_specs(config).stores
    near = next((i for i, spec in enumerate(specs) if spec.scheme == NEAR), len(specs))
    far = tuple(spec for spec in specs[near + 1 :] if spec.scheme in FAR and not uses_device(spec))
    if not far:
        raise ConfigError(
            "nothing to prefetch: store needs a file:// tier, and mooncake:// or s3:// behind it "
            "(not over the engine's own device)"
        )
    return specs[near], far


class BadNames(ValueError):
    """Names that no engine of this release gives."""


class _Cell(NamedTuple):
    key: CellKey
    nbytes: int
    chunk: ChunkRef


class Mover:
    """Copies named cells from far tiers into the near one and verifies them; one thread at a time.

    Cells are copied chunk by chunk from the start of a prompt, so what has arrived is always a
    prefix that lookups find. A cell that is missing, damaged or of another size is skipped: the
    engine computes it. The mover owns the memory that cells pass through; `close` frees it after
    the last call.
    """

    def __init__(self, near: Store, far: Sequence[Store], max_bytes: int) -> None:
        """`max_bytes` bounds what crosses the network, for all orders together."""
        self._near = near
        self._far = tuple(far)
        self._left_bytes = max_bytes
        self._memory: Buffer | None = None

    @property
    def is_spent(self) -> bool:
        """Whether `max_bytes` are used up."""
        return self._left_bytes <= 0

    def move(
        self,
        names: ChunkNames,
        may_go_on: Callable[[], bool],
        report: Callable[[Brought], None] = lambda done: None,
    ) -> Brought:
        """Copy the cells that are not in the near tier; `may_go_on` is asked between batches.

        `report` is told what each batch has done. Raises BadNames, and StoreError if the near tier
        is away.
        """
        done = Brought()
        for batch in _batches(_cells(names)):
            if self.is_spent or not may_go_on():
                break
            now = self._bring(batch)
            done += now
            report(now)
            if (now.missing or now.unkept) and not now.brought + now.near:
                break  # the far tiers have no more of the prompt, or the near one is full
        return done

    def close(self) -> None:
        """Free the memory; no call may follow."""
        if self._memory is not None:
            for store in (self._near, *self._far):
                store.unregister(self._memory)
            self._memory = None

    def _bring(self, batch: Sequence[_Cell]) -> Brought:
        there = self._near.exists([cell.key for cell in batch])
        wanted = [cell for cell, is_near in zip(batch, there, strict=True) if not is_near]
        places = self._places(wanted)
        done = Brought(near=len(batch) - len(wanted))
        good: list[int] = []
        left = list(range(len(wanted)))
        for store in self._far:
            if not left or self.is_spent:
                break
            outcomes = _get(store, [wanted[i].key for i in left], [places[i] for i in left])
            arrived = [i for i, out in zip(left, outcomes, strict=True) if out is GetOutcome.OK]
            nbytes = sum(wanted[i].nbytes for i in arrived)
            self._left_bytes -= nbytes
            sound = [i for i in arrived if _is_sound(wanted[i], places[i])]
            done += Brought(nbytes=nbytes, bad=len(arrived) - len(sound))
            good += sound
            left = [i for i in left if i not in sound]
        kept = self._keep([wanted[i] for i in good], [places[i] for i in good])
        return done + Brought(missing=len(left), brought=kept, unkept=len(good) - kept)

    def _keep(self, cells: Sequence[_Cell], buffers: Sequence[Buffer]) -> int:
        if not cells:
            return 0
        keys = [cell.key for cell in cells]
        outcomes = self._near.put(keys, buffers, [cell.chunk for cell in cells])
        return sum(each in (PutOutcome.STORED, PutOutcome.EXISTED) for each in outcomes)

    def _places(self, cells: Sequence[_Cell]) -> list[Buffer]:
        """A buffer for each cell of a batch."""
        sizes = [-(-cell.nbytes // ALIGNMENT) * ALIGNMENT for cell in cells]
        memory = self._memory_of(sum(sizes))
        places, start = [], 0
        for cell, size in zip(cells, sizes, strict=True):
            places.append(memory.part(start, start + cell.nbytes))
            start += size
        return places

    def _memory_of(self, nbytes: int) -> Buffer:
        if self._memory is None or self._memory.nbytes < nbytes:
            self.close()
            # No batch is larger, unless it is a single cell.
            self._memory = map_buffer(max(nbytes, BATCH_BYTES + BATCH_CELLS * ALIGNMENT))
            for store in (self._near, *self._far):
                store.register(self._memory)
        return self._memory


def _get(store: Store, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
    try:
        return store.get(keys, buffers)
    except StoreError:
        return [GetOutcome.FAILED] * len(keys)  # unavailable; another tier may have them


def _is_sound(cell: _Cell, buffer: Buffer) -> bool:
    if is_encrypted(buffer.view):  # engines authenticate it; this process has no key
        return isinstance(read_encrypted_header(buffer.view), EncryptedHeader)
    return verify(buffer.view, key_digest(cell.key), checksum=True) is None


def _cells(names: ChunkNames) -> Iterator[_Cell]:
    """Every cell, chunk by chunk; BadNames at once if a name is invalid."""
    for each in names.key_prefixes:
        if not HEADER_BYTES < each.nbytes <= MAX_CELL_BYTES:
            raise BadNames(f"a cell of {each.nbytes} bytes")
        for chunk in names.chunks[:1]:
            _check(each.key_prefix, chunk)
    for each in names.key_prefixes[:1]:
        for chunk in names.chunks[1:]:
            _check(each.key_prefix, chunk)
    return (
        _Cell(
            key_with_prefix(each.key_prefix, chunk),
            each.nbytes,
            ChunkRef(
                _chunk_id(each.key_prefix, chunk), _chunk_id(each.key_prefix, before), position
            ),
        )
        for position, (before, chunk) in enumerate(pairwise(("", *names.chunks)))
        for each in names.key_prefixes
    )


def _chunk_id(key_prefix: str, chunk: str) -> str:
    return chunk_id_of_key(key_with_prefix(key_prefix, chunk)) if chunk else ""


def _check(key_prefix: str, chunk: str) -> None:
    try:
        ParsedKey.parse(key_with_prefix(key_prefix, chunk))
    except ValueError as error:
        raise BadNames(str(error)) from None


def _batches(cells: Iterator[_Cell]) -> Iterator[list[_Cell]]:
    """Cut cells, in order, into batches that fit into the memory."""
    batch: list[_Cell] = []
    nbytes = 0
    for cell in cells:
        if batch and (len(batch) == BATCH_CELLS or nbytes + cell.nbytes > BATCH_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(cell)
        nbytes += cell.nbytes
    if batch:
        yield batch


def guarded(spec: StoreSpec, timeouts: CallTimeouts) -> GuardedStore:
    """Open a store, in the background if it cannot be reached now."""
    set_where_unset(environment_for(spec))
    known = capabilities_of(spec)
    opening = partial(open_store, spec, segment=False)
    return GuardedStore(opening, known, known.name, timeouts, OPEN_WAIT_S)


class Prefetch:
    """The mover's thread and the queue of its orders; other methods from any thread."""

    def __init__(
        self,
        config: KVPoolConfig,
        max_bytes: int,
        answer: Callable[[Brought], None],
        ended: threading.Event,
        report: Callable[[Brought], None] = lambda done: None,
    ) -> None:
        """ConfigError as in `chosen`, or if a store can never work.

        `ended` is set when the thread ends. `answer` is told on that thread what each order has
        done, and `report` what each batch of it has.
        """
        near, far = chosen(config)
        if isinstance(near.options, FileOptions):
            max_bytes = min(max_bytes, near.options.size_bytes // NEAR_SHARE)
        timeouts = CallTimeouts(call_s=config.call_timeout_s, answer_s=config.call_timeout_s)
        self._stores = [guarded(spec, timeouts) for spec in (near, *far)]
        self._mover = Mover(self._stores[0], self._stores[1:], max_bytes)
        self._orders: Queue[ChunkNames | None] = Queue(MAX_ORDERS + 1)
        self._is_over = threading.Event()
        self._answer = answer
        self._ended = ended
        self._report = report
        self._thread = threading.Thread(target=self._run, name="kvpool-prefetch", daemon=True)
        self._thread.start()

    def order(self, names: ChunkNames) -> None:
        """Queue an order; dropped if `MAX_ORDERS` wait."""
        if self._orders.qsize() < MAX_ORDERS:
            self._orders.put_nowait(names)

    def finish(self) -> None:
        """End after the orders so far."""
        self._orders.put_nowait(None)

    def end(self) -> bool:
        """Stop between two batches; whether that took less than `GRACE_S`."""
        self._is_over.set()
        with contextlib.suppress(Full):  # then it is not waiting for an order
            self._orders.put_nowait(None)
        self._thread.join(GRACE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (names := self._orders.get()) is not None:
                self._move(names)
                if self._is_over.is_set() or self._mover.is_spent:
                    break
            self._mover.close()
            _close(self._stores)
        except Exception:
            logger.exception("prefetch: the mover failed")
        finally:
            self._ended.set()

    def _move(self, names: ChunkNames) -> None:
        try:
            done = self._mover.move(names, lambda: not self._is_over.is_set(), self._report)
        except (BadNames, StoreError) as error:
            logger.warning("prefetch: order failed: %s", error)
            done = Brought()
        self._answer(done)


def _close(stores: Sequence[GuardedStore]) -> None:
    for store in stores:
        try:
            store.close()
        except StoreError as error:
            logger.info("prefetch: closing %s: %s", store.capabilities.name, error)


def _read(lines: BinaryIO, prefetch: Prefetch, at_end: Callable[[], None]) -> None:
    while line := lines.readline(MAX_LINE_BYTES):
        try:
            prefetch.order(_decode(line))
        except UNREADABLE as error:
            logger.warning("prefetch: line ignored, not an order: %s", error)
    at_end()


def _print(done: Brought) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")
    sys.stdout.buffer.flush()


def bring(
    kv_transfer_config: str,
    names: ChunkNames,
    max_bytes: int,
    max_seconds: float,
    report: Callable[[Brought], None],
) -> Brought:
    """Bring the cells of one prompt near, for at most `max_seconds`. ConfigError if it cannot.

    Threads of stores may be left: the caller ends the process by `os._exit`.
    """
    ended = threading.Event()
    done: list[Brought] = []
    work = Prefetch(read_engine_config(kv_transfer_config), max_bytes, done.append, ended, report)
    work.order(names)
    work.finish()
    if not ended.wait(max_seconds):
        logger.warning("prefetch: stopped at --max-seconds=%g", max_seconds)
    work.end()
    return done[0] if done else Brought()


def run(kv_transfer_config: str, max_bytes: int, max_seconds: float, *, finish: bool) -> NoReturn:
    """Serve orders until the input ends, or with `finish` until they are done; ends the process.

    ConfigError if it cannot serve.
    """
    config = read_engine_config(kv_transfer_config)
    os.nice(NICENESS)
    ended = threading.Event()
    work = Prefetch(config, max_bytes, _print, ended)
    reading = (sys.stdin.buffer, work, work.finish if finish else ended.set)
    threading.Thread(target=_read, args=reading, name="kvpool-orders", daemon=True).start()
    if not ended.wait(max_seconds):
        logger.info("prefetch: stopped at --max-seconds=%g", max_seconds)
    work.end()
    # Native threads of stores, and a reader blocked on its input, cannot be joined.
    os._exit(0)
