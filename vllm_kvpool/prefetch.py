"""`kvpool prefetch`: copies the cells of a prompt into this host's files before engines need them.

Cells come chunk by chunk from the start of the prompt, so what has arrived is always a prefix that
lookups find. A cell that is missing, damaged or of another size is skipped: the engine computes it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple

import msgspec

from vllm_kvpool.config import KVPoolConfig
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.identity.keys import CellKey, chunk_id_of_key, key_digest, key_with_prefix
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
from vllm_kvpool.storage.tiers import tier_specs
from vllm_kvpool.storage.url import FileOptions, StoreSpec, uses_device

logger = logging.getLogger(__name__)

NEAR = "file"  # processes share it, and it outlives them
FAR = ("mooncake", "s3")  # across a network
NEAR_SHARE = 4  # at most a quarter of the near tier is filled
GRACE_S = 2.0  # for the batch that is under way when the time is over
BATCH_BYTES = 16 << 20
BATCH_CELLS = 64
MAX_CELL_BYTES = 256 << 20
ALIGNMENT = 4096


class Brought(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a prefetch, in cells."""

    brought: int = 0
    nbytes: int = 0
    """Bytes that crossed the network, damaged cells included."""
    near: int = 0
    """Were in the near tier already."""
    missing: int = 0
    """No far tier that was asked has them. At `--max-bytes` no further tier is asked."""
    failed: int = 0
    """A far tier failed to answer for them or send them, and no other far tier delivered them."""
    bad: int = 0
    """Were damaged, and dropped."""
    unkept: int = 0
    """The near tier had no room for them."""
    unwritten: int = 0
    """The near tier failed to write them."""

    @property
    def num_cells(self) -> int:
        """Number of cells, each with one outcome; `bad` counts copies."""
        kept = self.brought + self.near
        return kept + self.missing + self.failed + self.unkept + self.unwritten

    def __add__(self, other: "Brought") -> "Brought":
        names = self.__struct_fields__
        return Brought(**{name: getattr(self, name) + getattr(other, name) for name in names})


class _Cell(NamedTuple):
    key: CellKey
    nbytes: int
    chunk: ChunkRef


class PromptCells(NamedTuple):
    """The cells of a prompt: each key prefix, with the bytes of its cells, with each chunk."""

    key_prefixes: Sequence[tuple[str, int]]
    chunks: Sequence[str]
    """Their hashes in hexadecimal, from the start of the prompt on."""
    has_gaps: bool = False
    """True if some chunks have no cells where later ones do, as recurrent states alone."""

    def batches(self) -> Iterator[list[_Cell]]:
        """Yield every cell, chunk by chunk, in batches that fit into the memory."""
        batch: list[_Cell] = []
        nbytes = 0
        for cell in self._cells():
            if batch and (len(batch) == BATCH_CELLS or nbytes + cell.nbytes > BATCH_BYTES):
                yield batch
                batch, nbytes = [], 0
            batch.append(cell)
            nbytes += cell.nbytes
        if batch:
            yield batch

    def _cells(self) -> Iterator[_Cell]:
        for position, (before, chunk) in enumerate(pairwise(("", *self.chunks))):
            for prefix, nbytes in self.key_prefixes:
                key = key_with_prefix(prefix, chunk)
                parent = chunk_id_of_key(key_with_prefix(prefix, before)) if before else ""
                yield _Cell(key, nbytes, ChunkRef(chunk_id_of_key(key), parent, position))


def chosen(config: KVPoolConfig) -> tuple[StoreSpec, tuple[StoreSpec, ...]]:
    """Return the near tier and the far ones behind it.

    Raises ConfigError if there is nothing to prefetch.
    """
    specs = tier_specs(config).stores
    near = next((i for i, spec in enumerate(specs) if spec.scheme == NEAR), len(specs))
    far = tuple(spec for spec in specs[near + 1 :] if spec.scheme in FAR and not uses_device(spec))
    if not far:
        raise ConfigError(
            "nothing to prefetch: store needs a file:// tier, and mooncake:// or s3:// behind it "
            "(not over the engine's own device)"
        )
    return specs[near], far


def near_share(near: StoreSpec, max_bytes: int) -> int:
    """Return the bytes that may cross the network for a near tier."""
    assert isinstance(near.options, FileOptions), near
    return min(max_bytes, near.options.size_bytes // NEAR_SHARE)


def bring(
    near: Store,
    far: Sequence[Store],
    cells: PromptCells,
    max_bytes: int,
    max_seconds: float,
    report: Callable[[Brought], None],
) -> tuple[Brought, bool]:
    """Bring the cells of a prompt near, for at most `max_seconds` and about `max_bytes`.

    Returns what was done, and whether all calls have returned: if not, end the process by
    `os._exit`. `report` is told on another thread what each batch has done. Raises what that thread
    has met: StoreError if the near tier cannot be asked.
    """
    mover = Mover(near, far, cells, max_bytes)
    deadline = time.monotonic() + max_seconds
    done = [Brought()]
    outcome = Future[None]()

    def work() -> None:
        try:
            with closing(mover):
                for now in mover.batches(lambda: time.monotonic() < deadline):
                    done[0] += now
                    report(now)
        except BaseException as error:  # the top of the thread
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=work, name="kvpool-prefetch", daemon=True).start()
    wait([outcome], max_seconds + GRACE_S)
    if time.monotonic() >= deadline:
        logger.warning("prefetch: stopped at --max-seconds=%g", max_seconds)
    has_ended = outcome.done()
    if has_ended:
        outcome.result()  # raises the thread's error
    return done[0], has_ended


class Mover:
    """Copies cells from far tiers into the near one and verifies them; used by one thread.

    Owns the memory that cells pass through; `close` frees it after the last call. `max_bytes`
    bounds what crosses the network, up to a batch. ConfigError if a cell has an impossible size.
    """

    def __init__(
        self, near: Store, far: Sequence[Store], cells: PromptCells, max_bytes: int
    ) -> None:
        for _, nbytes in cells.key_prefixes:
            if not HEADER_BYTES < nbytes <= MAX_CELL_BYTES:
                raise ConfigError(
                    f"the manifest names cells of {nbytes} bytes; at most {MAX_CELL_BYTES} are "
                    "brought"
                )
        largest = max((nbytes for _, nbytes in cells.key_prefixes), default=0)
        self._near = near
        self._far = far
        self._cells = cells
        self._left_bytes = max_bytes
        self._memory = map_buffer(max(largest, BATCH_BYTES) + BATCH_CELLS * ALIGNMENT)
        for store in (near, *far):
            store.register(self._memory)

    def batches(self, may_go_on: Callable[[], bool]) -> Iterator[Brought]:
        """Bring batch after batch, and yield what each has done. `may_go_on` is asked before each.

        Raises StoreError if the near tier is away.
        """
        for batch in self._cells.batches():
            if self._left_bytes <= 0 or not may_go_on():
                return
            now = self._bring(batch)
            yield now
            is_stuck = now.failed or now.unkept or now.unwritten
            is_last = is_stuck or (now.missing and not self._cells.has_gaps)
            if is_last and not now.brought + now.near:
                return  # a store fails, the near one is full, or the far ones have no more

    def close(self) -> None:
        """Give the memory back; no call may follow."""
        for store in (self._near, *self._far):
            store.unregister(self._memory)

    def _bring(self, batch: Sequence[_Cell]) -> Brought:
        there = self._near.exists([cell.key for cell in batch])
        wanted = [cell for cell, is_near in zip(batch, there, strict=True) if not is_near]
        places = self._places(wanted)
        done = Brought(near=len(batch) - len(wanted))
        good: list[int] = []
        failed: set[int] = set()
        left = list(range(len(wanted)))
        for store in self._far:
            if not left or self._left_bytes <= 0:
                break
            outcomes = _get(store, [wanted[i].key for i in left], [places[i] for i in left])
            failed |= {i for i, out in zip(left, outcomes, strict=True) if out is GetOutcome.FAILED}
            arrived = [i for i, out in zip(left, outcomes, strict=True) if out is GetOutcome.OK]
            nbytes = sum(wanted[i].nbytes for i in arrived)
            self._left_bytes -= nbytes
            sound = [i for i in arrived if _is_sound(wanted[i], places[i])]
            done += Brought(nbytes=nbytes, bad=len(arrived) - len(sound))
            good += sound
            left = [i for i in left if i not in sound]
        num_failed = len(failed.intersection(left))
        done += Brought(missing=len(left) - num_failed, failed=num_failed)
        return done + self._keep([wanted[i] for i in good], [places[i] for i in good])

    def _keep(self, cells: Sequence[_Cell], buffers: Sequence[Buffer]) -> Brought:
        if not cells:
            return Brought()
        keys = [cell.key for cell in cells]
        outcomes = self._near.put(keys, buffers, [cell.chunk for cell in cells])
        unkept, unwritten = map(outcomes.count, (PutOutcome.FULL, PutOutcome.FAILED))
        kept = len(cells) - unkept - unwritten
        return Brought(brought=kept, unkept=unkept, unwritten=unwritten)

    def _places(self, cells: Sequence[_Cell]) -> list[Buffer]:
        """Return a buffer for each cell of a batch."""
        places, start = [], 0
        for cell in cells:
            places.append(self._memory.part(start, start + cell.nbytes))
            start += -(-cell.nbytes // ALIGNMENT) * ALIGNMENT
        return places


def _get(store: Store, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
    try:
        return store.get(keys, buffers)
    except StoreError as error:
        logger.warning("prefetch: %s", error)
        return [GetOutcome.FAILED] * len(keys)  # unavailable; another tier may have them


def _is_sound(cell: _Cell, buffer: Buffer) -> bool:
    if is_encrypted(buffer.view):  # engines authenticate it; this process has no key
        return isinstance(read_encrypted_header(buffer.view), EncryptedHeader)
    return verify(buffer.view, key_digest(cell.key), checksum=True) is None
