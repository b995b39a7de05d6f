"""Copies named cells from far tiers into the near one and verifies them; one thread at a time.

Cells are copied chunk by chunk from the start of a prompt, so what has arrived is always a prefix
that lookups find. A cell that is missing, damaged or of another size is skipped: the engine
computes it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from vllm_kvpool.errors import BuffersInUse, StoreError
from vllm_kvpool.identity.cell_names import Brought, ChunkNames
from vllm_kvpool.identity.keys import (
    CellKey,
    ParsedKey,
    chunk_id_of_key,
    key_digest,
    key_with_prefix,
)
from vllm_kvpool.storage.base import (
    Buffer,
    ChunkRef,
    GetOutcome,
    PutOutcome,
    Store,
    map_buffer,
)
from vllm_kvpool.storage.cell_format import (
    HEADER_BYTES,
    EncryptedHeader,
    is_encrypted,
    read_encrypted_header,
    verify,
)

BATCH_BYTES = 16 << 20
BATCH_CELLS = 64
MAX_CELL_BYTES = 256 << 20
ALIGNMENT = 4096


class BadNames(ValueError):
    """Names that no engine of this release gives."""


class _Cell(NamedTuple):
    key: CellKey
    nbytes: int
    chunk: ChunkRef


class Mover:
    """Owns the memory that cells pass through; `close` frees it after the last call."""

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
        is away or a call was given up.
        """
        done = Brought()
        for batch in _batches(_cells(names)):
            if self.is_spent or not may_go_on():
                break
            try:
                now = self._bring(batch)
            except BuffersInUse:
                _in_use.append(self._memory)
                self._memory = None  # the next order has its own
                raise
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


_in_use: list[Buffer | None] = []  # buffers that abandoned calls may still write to


def _get(store: Store, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
    try:
        return store.get(keys, buffers)
    except BuffersInUse:
        raise
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
