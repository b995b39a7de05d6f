"""The work of a lane on a batch of slabs.

A lane performs and reports; it never decides. `BatchRunner.perform` may be called by several lanes
at once: the gather lane and the scatter lane have a copier each, and the slots of a batch are its
own.
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, compress, count, pairwise
from operator import not_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_kvpool.errors import StoreError, StoreUnreachable
from vllm_kvpool.identity.keys import key_digest
from vllm_kvpool.layout.pages import SlabMove
from vllm_kvpool.layout.topology import LocalCell
from vllm_kvpool.metrics import MetricSeries, MetricsRegistry
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.copier import MAX_TEMPLATES, Copier
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome, Store
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, CellFault, verify, write_header
from vllm_kvpool.transfer.graph import Batch
from vllm_kvpool.transfer.ops import (
    COPIES,
    NO_STORE,
    CellOutcome,
    LaneName,
    OpKind,
    Outcome,
    Part,
    Slab,
    each_of,
    outcome_of,
    worst_of,
)
from vllm_kvpool.transfer.trace import NO_TRACE, Span, Trace

if TYPE_CHECKING:
    from vllm_kvpool.layout.pages import Int64s
    from vllm_kvpool.storage.contents.encryption import EncryptedCells

logger = logging.getLogger(__name__)

_GOT = {
    GetOutcome.OK: CellOutcome.DONE,
    GetOutcome.MISSING: CellOutcome.MISSING,
    GetOutcome.WRONG_SIZE: CellOutcome.CORRUPT,
    GetOutcome.FAILED: CellOutcome.FAILED,
}
_PUT = {
    PutOutcome.STORED: CellOutcome.DONE,
    PutOutcome.EXISTED: CellOutcome.EXISTED,
    PutOutcome.FULL: CellOutcome.FULL,
    PutOutcome.FAILED: CellOutcome.FAILED,
}
_DIRECTION = {OpKind.GET: "load", OpKind.PUT: "save", OpKind.REMOVE: "remove"}


class _Pieces(NamedTuple):
    """The pieces of a slab's cells whose layers share a block table."""

    group: int  # KV cache group
    num_rows: int
    per_row: int  # tokens
    lookahead: int
    cells: "Int64s | slice"  # of each piece: the index of its cell in the slab
    offsets: "Int64s"  # of each piece in its cell's payload
    places: "Int64s"  # as in `SlabMove`


def _pieces_of(cells: Sequence[LocalCell], tokens: int) -> list[_Pieces]:
    by_group: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
    num_rows = cells[0].rows(tokens)
    for index, cell in enumerate(cells):
        for group, *place, rows_before in cell.pieces:
            offset = rows_before * num_rows * cell.row_bytes
            by_group[group].append((index, offset, *place))
    found = []
    for group, pieces in by_group.items():
        table = np.array(pieces, np.int64)
        is_one_each = table[:, 0].tolist() == list(range(len(cells)))
        indices = slice(None) if is_one_each else table[:, 0]  # a view takes less time
        geometry = num_rows, cells[0].tokens_per_row, cells[0].lookahead
        places = np.ascontiguousarray(table[:, 2:])
        found.append(_Pieces(group, *geometry, indices, table[:, 1], places))
    return found


def _keys_of(parts: Sequence[Part]) -> list[str]:
    return [key for part in parts for key in part.cell_keys()]


def _by_part(outcomes: Sequence[CellOutcome], parts: Sequence[Part]) -> list[Outcome]:
    """Return the outcome of each part from those of all their cells."""
    stops = list(accumulate((part.num_cells for part in parts), initial=0))
    return [outcome_of(outcomes[start:stop]) for start, stop in pairwise(stops)]


class _LaneMetrics:
    """The metrics of a lane's batches. All threads of the lane count."""

    def __init__(self, registry: MetricsRegistry, kind: OpKind, tier: str) -> None:
        self._registry = registry
        self._lane = {"lane": kind.value, "tier": tier}
        self._op_seconds = registry.series("kvpool_op_seconds", **self._lane)
        self._wait_seconds = registry.series("kvpool_op_wait_seconds", **self._lane)
        self._store: dict[str, str] = {}
        self._cells: dict[CellOutcome, MetricSeries] = {}
        self._seconds: MetricSeries | None = None
        self._bytes: MetricSeries | None = None
        if kind in COPIES:
            self._seconds = registry.series("kvpool_copy_seconds", direction=kind.value)
            self._bytes = registry.series("kvpool_copy_bytes", direction=kind.value)
        elif kind in _DIRECTION:
            self._store = {"direction": _DIRECTION[kind], "store": tier}
            self._seconds = registry.series("kvpool_seconds", **self._store)
            if kind is not OpKind.REMOVE:
                self._bytes = registry.series("kvpool_bytes", **self._store)

    def count(
        self,
        batch: Batch,
        counts: Mapping[CellOutcome, int],
        nbytes: int,
        start: float,
        end: float,
    ) -> None:
        """Count a batch: its cells by outcome, their bytes, and its time."""
        self._op_seconds.observe(end - start)
        self._wait_seconds.observe(max(0.0, start - batch.ready_at))
        if batch.attempt > 1:
            self._registry.add("kvpool_retries", 1, **self._lane)
        if self._seconds is not None:
            self._seconds.add(end - start)
        if self._bytes is not None:
            self._bytes.add(nbytes)
        if self._store:
            for outcome, number in counts.items():
                self._series_of(outcome).add(number)

    def _series_of(self, outcome: CellOutcome) -> MetricSeries:
        series = self._cells.get(outcome)
        if series is None:
            labels = {**self._store, "outcome": outcome.value}
            series = self._cells[outcome] = self._registry.series("kvpool_cells", **labels)
        return series


@dataclass(frozen=True, slots=True)
class BatchRunner:
    """Performs batches; `names` are the labels of `stores` in metrics."""

    stores: tuple[Store, ...]
    names: tuple[str, ...]
    arena: Arena
    gather_copier: Copier
    scatter_copier: Copier
    chunk_tokens: int
    verify_checksum: bool
    registry: MetricsRegistry
    trace: Trace = NO_TRACE
    clock: Callable[[], float] = time.monotonic  # also the engine's and the trace's
    encrypted: "EncryptedCells | None" = None  # if cells are encrypted
    zeros: Buffer | None = None  # as many bytes of zeros as the largest optional cell has
    _slabs: dict[tuple[int, int], tuple[list[_Pieces], tuple[LocalCell, ...]]] = field(
        default_factory=dict, init=False
    )
    """By the id of a slab's cells, which are kept here, and a prompt's end."""
    _metrics: dict[LaneName, _LaneMetrics] = field(default_factory=dict, init=False)

    def perform(self, batch: Batch) -> Sequence[Outcome]:
        """Perform a batch; one outcome per op."""
        start = self.clock()
        outcomes: Sequence[Outcome]
        try:
            outcomes = self._perform(batch)
        except StoreUnreachable:
            self.registry.add("kvpool_failures", kind="store_unreachable")
            outcomes = [CellOutcome.UNREACHABLE] * len(batch.ops)
        except StoreError:
            self.registry.add("kvpool_failures", kind="store_error")
            outcomes = [CellOutcome.FAILED] * len(batch.ops)
        except Exception:
            logger.exception("kvpool: lane %s: a batch failed", batch.lane)
            self.registry.add("kvpool_failures", kind="bug")
            outcomes = [CellOutcome.FAILED] * len(batch.ops)
        self._count(batch, outcomes, start, self.clock())
        return outcomes

    def _perform(self, batch: Batch) -> Sequence[Outcome]:
        kind, tier = batch.lane
        parts = batch.parts
        match kind:
            case OpKind.FENCE:
                for fence in batch.fences:
                    fence.synchronize()
            case OpKind.GET:
                return self._get(self.stores[tier], parts)
            case OpKind.PUT:
                return self._put(tier, parts)
            case OpKind.REMOVE:
                self.stores[tier].remove(_keys_of(parts))
            case OpKind.SEAL if self.encrypted is not None:
                pass  # a put writes the header of its encrypted copy
            case OpKind.SEAL:
                for part in parts:
                    for key, cell in zip(part.cell_keys(), self._views(part), strict=True):
                        write_header(cell, key_digest(key))
            case OpKind.CHECK:
                return [
                    outcome_of(list(map(self._check, part.cell_keys(), self._views(part))))
                    for part in parts
                ]
            case OpKind.GATHER:
                self._clear_heads(parts)
                self.gather_copier.gather(self._moves(parts))
            case OpKind.SCATTER:
                self.scatter_copier.scatter(self._moves(parts))
        return [CellOutcome.DONE] * len(batch.ops)

    def _get(self, store: Store, parts: Sequence[Part]) -> list[Outcome]:
        got = store.get(_keys_of(parts), self._buffers(parts))
        if got.count(GetOutcome.OK) == len(got):
            return [CellOutcome.DONE] * len(parts)
        wrong_size = got.count(GetOutcome.WRONG_SIZE)
        if wrong_size:
            self.registry.add("kvpool_failures", wrong_size, kind="cell_length")
        return _by_part([_GOT[outcome] for outcome in got], parts)

    def _put(self, tier: int, parts: Sequence[Part]) -> list[Outcome]:
        store, keys = self.stores[tier], _keys_of(parts)
        chunks = [chunk for part in parts for chunk in [part.slab.chunk] * part.num_cells]
        present = store.exists(keys)
        if any(present):
            self._pin(store, list(compress(keys, present)), list(compress(chunks, present)))
        outcomes = [CellOutcome.EXISTED] * len(keys)
        if not all(present):
            put = store.put if self.encrypted is None else partial(self.encrypted.put, tier)
            absent, buffers = list(map(not_, present)), self._buffers(parts)
            stored = put(
                list(compress(keys, absent)),
                list(compress(buffers, absent)),
                list(compress(chunks, absent)),
            )
            for i, outcome in zip(compress(count(), absent), stored, strict=True):
                outcomes[i] = _PUT[outcome]
        return _by_part(outcomes, parts)

    def _pin(self, store: Store, keys: Sequence[str], chunks: Sequence[ChunkRef]) -> None:
        """Pin cells that are stored already, where requests want it and the store can."""
        pinned: defaultdict[int, list[str]] = defaultdict(list)
        for key, chunk in zip(keys, chunks, strict=True):
            if until_ns := chunk.retention.pinned_until_ns:
                pinned[until_ns].append(key)
        if pinned and store.capabilities.pins:
            for until_ns, keys in pinned.items():
                store.pin(keys, until_ns)

    def _check(self, key: str, cell: memoryview) -> CellOutcome:
        if self.encrypted is None:
            fault = verify(cell, key_digest(key), checksum=self.verify_checksum)
        else:
            fault = self.encrypted.decrypt(key, cell)
        if fault is None:
            return CellOutcome.DONE
        self.registry.add("kvpool_failures", kind=f"cell_{fault.value}")
        # A cell of a key that this engine lacks is no damage: others may read it.
        return CellOutcome.MISSING if fault is CellFault.UNKNOWN_KEY else CellOutcome.CORRUPT

    def _buffers(self, parts: Sequence[Part]) -> list[Buffer]:
        buffers = self.arena.buffers
        return [each for part in parts for each in buffers(part.slots, part.sizes())]

    def _views(self, part: Part) -> list[memoryview]:
        return self.arena.views(part.slots, part.sizes())

    def _clear_heads(self, parts: Sequence[Part]) -> None:
        """Fill slots with zeros whose first rows are of tokens before the prompt.

        The prompt has no such tokens, and a slot holds its former content.
        """
        for part in parts:
            if part.slab.kind.cells[0].lookahead and not part.slab.chunk.position:
                for cell in self._views(part):
                    cell[HEADER_BYTES:] = bytes(len(cell) - HEADER_BYTES)

    def _moves(self, parts: Sequence[Part]) -> list[SlabMove]:
        moves: list[SlabMove] = []
        for slab, slots, _ in parts:
            if slots:
                payloads = self.arena.payload_addresses(slots)
            else:  # optional, and it cannot be had
                assert self.zeros is not None, slab
                payloads = np.full(slab.num_cells, self.zeros.address, np.int64)
            for pieces in self._known_pieces(slab.kind.cells, slab.end_tokens):
                rows = self._rows(slab, pieces)
                if rows is not None:  # this group needs the chunk
                    addresses = payloads[pieces.cells] + pieces.offsets
                    moves.append(SlabMove(addresses, pieces.places, *rows))
        return moves

    def _known_pieces(self, cells: tuple[LocalCell, ...], end_tokens: int) -> list[_Pieces]:
        known = self._slabs.get((id(cells), end_tokens))
        if known is None:
            if len(self._slabs) >= MAX_TEMPLATES:
                self._slabs.clear()
            known = _pieces_of(cells, end_tokens or self.chunk_tokens), cells
            self._slabs[id(cells), end_tokens] = known
        return known[0]

    def _rows(
        self, slab: Slab, pieces: _Pieces
    ) -> tuple[Sequence[int], int, int, int, int, int] | None:
        """Return the last fields of a `SlabMove`; None if there is nothing to move."""
        # A state has one row, in the place of the last token before its boundary.
        num_rows, per_row, pages = pieces.num_rows, pieces.per_row, slab.pages[pieces.group]
        start = slab.chunk.position * self.chunk_tokens - pieces.lookahead
        if not slab.end_tokens:
            start += self.chunk_tokens - num_rows * per_row
        token_start = max(pages.token_start, start)
        token_stop = min(pages.token_stop, start + num_rows * per_row)
        if token_start >= token_stop:
            return None
        return (
            *(pages.block_ids, pages.table_start // per_row, start // per_row, num_rows),
            *(token_start // per_row, token_stop // per_row),
        )

    def _count(self, batch: Batch, outcomes: Sequence[Outcome], start: float, end: float) -> None:
        kind, tier = batch.lane
        tier_name = NO_STORE.get(tier) or self.names[tier]
        nbytes = batch.nbytes
        counts: Mapping[CellOutcome, int] = {CellOutcome.DONE: batch.num_cells}
        if kind is OpKind.FENCE:  # it has no cells
            counts = Counter(map(worst_of, outcomes))
        elif outcomes.count(CellOutcome.DONE) < len(batch.parts):
            found: Counter[CellOutcome] = Counter()
            nbytes, counts = 0, found
            for part, outcome in zip(batch.parts, outcomes, strict=True):
                each = each_of(outcome, part.num_cells)
                found.update(each)
                done = zip(part.sizes(), each, strict=True)
                nbytes += sum(size for size, one in done if one is CellOutcome.DONE)
        metrics = self._metrics.get(batch.lane)
        if metrics is None:
            metrics = self._metrics[batch.lane] = _LaneMetrics(self.registry, kind, tier_name)
        metrics.count(batch, counts, nbytes, start, end)
        if self.trace.on:
            self.trace.add(
                Span(
                    threading.current_thread(),
                    kind.value,
                    start,
                    end,
                    tier_name,
                    batch.num_cells,
                    nbytes,
                    counts,
                    [owner.request_id for owner in batch.owners],
                    [owner.job_id for owner in batch.owners],
                    batch.attempt,
                )
            )
