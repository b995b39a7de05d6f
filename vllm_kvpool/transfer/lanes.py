"""The work of a lane on a batch of cells, and the lane's thread.

A lane performs and reports; it never decides. `BatchRunner.perform` may be called by several lanes
at once: the gather lane and the scatter lane have a copier each, and the slots of a batch are its
own.
"""

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice, repeat, starmap
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from vllm_kvpool.errors import StoreError, StoreUnreachable
from vllm_kvpool.identity.keys import key_digest
from vllm_kvpool.layout.pages import SlabMove
from vllm_kvpool.layout.topology import LocalCell
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.copier import MAX_TEMPLATES, Copier
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.storage.base import Buffer, GetOutcome, PutOutcome, Store
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, CellFault, verify, write_header
from vllm_kvpool.transfer.graph import Batch, BatchDone
from vllm_kvpool.transfer.ops import (
    COPIES,
    NO_STORE,
    REPLICA,
    Cell,
    CellOutcome,
    JobPages,
    LaneName,
    OpKind,
)
from vllm_kvpool.transfer.trace import NO_TRACE, Span, Trace

if TYPE_CHECKING:
    from vllm_kvpool.layout.pages import Int64s
    from vllm_kvpool.storage.base import Pinning
    from vllm_kvpool.storage.contents.encryption import EncryptedCells

logger = logging.getLogger(__name__)

Perform = Callable[[Batch], Sequence[CellOutcome]]


class LaneThread:
    """Performs the batches of its inbox one by one.

    Whatever ends a batch, a SystemExit or what was thrown into the thread from outside as well, its
    cells have failed and the thread goes on. It calls `on_start` first; if that fails, so does each
    batch until it succeeds. A thread that is abandoned ends after it has reported its batch.
    """

    def __init__(
        self,
        lane: LaneName,
        name: str,
        perform: Perform,
        inbox: SimpleQueue[Batch | None],
        outbox: SimpleQueue[Any],
        registry: MetricsRegistry,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.lane = lane
        self._lock = threading.Lock()  # held to end a batch and to abandon the thread
        self._abandoned = False
        self._since: float | None = None  # when the present batch began
        self._taken: deque[Batch | None] = deque()  # the present batch
        self._inbox = starmap(inbox.get, repeat(()))
        self._perform = perform
        self._outbox = outbox
        self._registry = registry
        self._on_start: Callable[[], None] | None = on_start
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def busy_since(self) -> tuple[Batch, float] | None:
        """The present batch and when it began (monotonic seconds); any thread may call."""
        with self._lock:
            batch, since = self._taken[0] if self._taken else None, self._since
        return None if batch is None or since is None else (batch, since)

    def abandon(self, batch: Batch) -> bool:
        """End the thread after this batch; False if it has already done it."""
        with self._lock:
            if not self._taken or self._taken[0] is not batch:
                return False
            self._abandoned = True
        return True

    def _run(self) -> None:
        while True:
            try:
                self._serve()
                return
            except BaseException:
                self._registry.add("kvpool_failures", kind="lane")
                logger.exception("kvpool: lane %s: a batch failed; the lane goes on", self.lane)
                if (batch := self._take()) is None:
                    return
                self._end(batch, [CellOutcome.FAILED] * batch.size)

    def _serve(self) -> None:
        if self._on_start is not None:
            self._on_start()
            self._on_start = None
        while not self._abandoned and (batch := self._take()) is not None:
            self._since = time.monotonic()
            self._end(batch, self._perform(batch))

    def _take(self) -> Batch | None:
        """The present batch, or else the next one; None to end."""
        if not self._taken:
            # One call into C: an exception thrown into this thread comes before or after it, so a
            # batch is in the inbox or in `_taken`.
            self._taken.extend(islice(self._inbox, 1))
        return self._taken[0]

    def _end(self, batch: Batch, outcomes: Sequence[CellOutcome]) -> None:
        self._outbox.put(BatchDone(batch, outcomes))
        with self._lock:
            self._since = None
            self._taken.clear()


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

Borrow = Callable[[Sequence[Cell], Sequence[Buffer], int], list[CellOutcome]]
"""`ReplicaExchange.borrow`."""


class _Pieces(NamedTuple):
    """Pieces of a slab's cells that share a block table and the geometry of rows."""

    group: int  # KV cache group
    num_rows: int
    per_row: int  # tokens
    lookahead: int
    cells: "Int64s | slice"  # of each piece: the index of its cell in the slab
    offsets: "Int64s"  # of each piece in its cell's payload
    places: "Int64s"  # as in `SlabMove`


def _pieces_of(locals_: Sequence[LocalCell], tokens: int) -> list[_Pieces]:
    found: defaultdict[tuple[int, int, int, int], list[tuple[int, ...]]] = defaultdict(list)
    for index, local in enumerate(locals_):
        rows = local.rows(tokens)
        for group, *place, rows_before in local.pieces:
            offset = rows_before * rows * local.row_bytes
            key = group, rows, local.tokens_per_row, local.lookahead
            found[key].append((index, offset, *place))
    result = []
    for key, pieces in found.items():
        table = np.array(pieces, np.int64)
        is_one_each = table[:, 0].tolist() == list(range(len(locals_)))
        cells = slice(None) if is_one_each else table[:, 0]  # a view takes less time
        result.append(_Pieces(*key, cells, table[:, 1], np.ascontiguousarray(table[:, 2:])))
    return result


def _chunk_of(cell: Cell) -> tuple[int, int, int]:
    return id(cell.pages), cell.chunk.position, cell.end_tokens


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
    borrow: Borrow | None = None  # where replicas are on this host
    encrypted: "EncryptedCells | None" = None  # if cells are encrypted
    zeros: Buffer | None = None  # as many bytes of zeros as the largest optional cell has
    _slabs: dict[tuple[int, ...], tuple[list[_Pieces], list[LocalCell]]] = field(
        default_factory=dict, init=False
    )
    """By a prompt's end and the ids of `LocalCell`s, whose hashes take as long as all the rest."""

    def perform(self, batch: Batch) -> list[CellOutcome]:
        """Perform a batch; one outcome per cell."""
        start = self.clock()
        try:
            outcomes = self._perform(batch)
        except StoreUnreachable:
            self.registry.add("kvpool_failures", kind="store_unreachable")
            outcomes = [CellOutcome.UNREACHABLE] * batch.size
        except StoreError:
            self.registry.add("kvpool_failures", kind="store_error")
            outcomes = [CellOutcome.FAILED] * batch.size
        except Exception:
            logger.exception("kvpool: lane %s: a batch failed", batch.lane)
            self.registry.add("kvpool_failures", kind="bug")
            outcomes = [CellOutcome.FAILED] * batch.size
        self._count(batch, outcomes, start, self.clock())
        return outcomes

    def _perform(self, batch: Batch) -> list[CellOutcome]:
        kind, tier = batch.lane
        cells = batch.cells
        match kind:
            case OpKind.FENCE:
                for fence in batch.fences:
                    fence.synchronize()
            case OpKind.GET if tier == REPLICA:
                assert self.borrow is not None
                return self.borrow(cells, self._buffers(batch), batch.generation)
            case OpKind.GET:
                return self._get(self.stores[tier], batch)
            case OpKind.PUT:
                return self._put(tier, batch)
            case OpKind.REMOVE:
                self.stores[tier].remove([cell.key for cell in cells])
            case OpKind.SEAL if self.encrypted is not None:
                pass  # a put writes the header of its encrypted copy
            case OpKind.SEAL:
                for cell, buffer in zip(cells, self._buffers(batch), strict=True):
                    write_header(buffer.view, key_digest(cell.key))
            case OpKind.CHECK:
                buffers = self._buffers(batch)
                return [self._check(*each) for each in zip(cells, buffers, strict=True)]
            case OpKind.GATHER:
                self._clear_heads(batch)
                self.gather_copier.gather(self._moves(batch))
            case OpKind.SCATTER:
                self.scatter_copier.scatter(self._moves(batch))
        return [CellOutcome.DONE] * batch.size

    def _get(self, store: Store, batch: Batch) -> list[CellOutcome]:
        got = store.get([cell.key for cell in batch.cells], self._buffers(batch))
        wrong_size = got.count(GetOutcome.WRONG_SIZE)
        if wrong_size:
            self.registry.add("kvpool_failures", wrong_size, kind="cell_length")
        return [_GOT[outcome] for outcome in got]

    def _put(self, tier: int, batch: Batch) -> list[CellOutcome]:
        store, cells, buffers = self.stores[tier], batch.cells, self._buffers(batch)
        present = store.exists([cell.key for cell in cells])
        outcomes = [CellOutcome.EXISTED] * len(cells)
        absent = [i for i, there in enumerate(present) if not there]
        self._pin(store, [cell for cell, there in zip(cells, present, strict=True) if there])
        if not absent:
            return outcomes
        put = store.put if self.encrypted is None else partial(self.encrypted.put, tier)
        stored = put(
            [cells[i].key for i in absent],
            [buffers[i] for i in absent],
            [cells[i].chunk for i in absent],
        )
        for i, outcome in zip(absent, stored, strict=True):
            outcomes[i] = _PUT[outcome]
        return outcomes

    def _pin(self, store: Store, cells: Sequence[Cell]) -> None:
        """Pin cells that are stored already, where requests want it and the store can."""
        pinned: defaultdict[int, list[str]] = defaultdict(list)
        for cell in cells:
            if until_ns := cell.chunk.retention.pinned_until_ns:
                pinned[until_ns].append(cell.key)
        if pinned and store.capabilities.pins:
            for until_ns, keys in pinned.items():
                cast("Pinning", store).pin(keys, until_ns)

    def _check(self, cell: Cell, buffer: Buffer) -> CellOutcome:
        if self.encrypted is None:
            fault = verify(buffer.view, key_digest(cell.key), checksum=self.verify_checksum)
        else:
            fault = self.encrypted.decrypt(cell.key, buffer.view)
        if fault is None:
            return CellOutcome.DONE
        self.registry.add("kvpool_failures", kind=f"cell_{fault.value}")
        # A cell of a key that this engine lacks is no damage: others may read it.
        return CellOutcome.MISSING if fault is CellFault.UNKNOWN_KEY else CellOutcome.CORRUPT

    def _buffers(self, batch: Batch) -> list[Buffer]:
        return [
            self.arena.buffer(slot, cell.nbytes)
            for cell, slot in zip(batch.cells, batch.slots, strict=True)
            if slot is not None
        ]

    def _clear_heads(self, batch: Batch) -> None:
        """Fill slots with zeros whose first rows are of tokens before the prompt, which has none:
        a slot holds what was in it before."""
        for cell, slot in zip(batch.cells, batch.slots, strict=True):
            assert slot is not None, cell
            assert cell.local is not None, cell
            if cell.local.lookahead and not cell.chunk.position:
                view = self.arena.buffer(slot, cell.nbytes).view[HEADER_BYTES:]
                view[:] = bytes(len(view))

    def _moves(self, batch: Batch) -> list[SlabMove]:
        moves: list[SlabMove] = []
        payloads, stop = np.array(list(map(self._payload, batch.slots)), np.int64), 0
        for (_, position, end_tokens), chunk in groupby(batch.cells, _chunk_of):
            cells = list(chunk)
            key = end_tokens, *[id(cell.local) for cell in cells]
            if (slab := self._slabs.get(key)) is None:
                locals_ = [cell.local for cell in cells if cell.local is not None]
                assert len(locals_) == len(cells), cells
                if len(self._slabs) >= MAX_TEMPLATES:
                    self._slabs.clear()
                slab = _pieces_of(locals_, end_tokens or self.chunk_tokens), locals_
                self._slabs[key] = slab
            start, stop = stop, stop + len(cells)
            for pieces in slab[0]:
                pages = cells[0].pages[pieces.group]
                rows = self._rows(pages, position, end_tokens, pieces)
                if rows is not None:  # this group needs the chunk
                    addresses = payloads[start:stop][pieces.cells] + pieces.offsets
                    moves.append(SlabMove(addresses, pieces.places, *rows))
        return moves

    def _payload(self, slot: Slot | None) -> int:
        if slot is None:  # an optional cell that cannot be had
            assert self.zeros is not None
            return self.zeros.address
        return self.arena.payload_address(slot)

    def _rows(
        self, pages: JobPages, position: int, end_tokens: int, pieces: _Pieces
    ) -> tuple[Sequence[int], int, int, int, int, int] | None:
        """The last fields of a `SlabMove`; None if there is nothing to move."""
        # A state has one row, in the place of the last token before its boundary.
        num_rows, per_row = pieces.num_rows, pieces.per_row
        start = position * self.chunk_tokens - pieces.lookahead
        if not end_tokens:
            start += self.chunk_tokens - num_rows * per_row
        token_start = max(pages.token_start, start)
        token_stop = min(pages.token_stop, start + num_rows * per_row)
        if token_start >= token_stop:
            return None
        return (
            *(pages.block_ids, pages.table_start // per_row, start // per_row, num_rows),
            *(token_start // per_row, token_stop // per_row),
        )

    def _count(
        self, batch: Batch, outcomes: Sequence[CellOutcome], start: float, end: float
    ) -> None:
        kind, tier = batch.lane
        tier_name = NO_STORE.get(tier) or self.names[tier]
        nbytes = batch.nbytes
        if outcomes.count(CellOutcome.DONE) < len(batch.cells):
            cells = zip(batch.cells, outcomes, strict=True)
            nbytes = sum(cell.nbytes for cell, outcome in cells if outcome is CellOutcome.DONE)
        waited = max(0.0, start - batch.ready_at)
        self.registry.observe("kvpool_op_seconds", end - start, lane=kind.value, tier=tier_name)
        self.registry.observe("kvpool_op_wait_seconds", waited, lane=kind.value, tier=tier_name)
        if batch.attempt > 1:
            self.registry.add("kvpool_retries", lane=kind.value, tier=tier_name)
        if self.trace.on:
            self.trace.add(
                Span(
                    threading.current_thread(),
                    kind.value,
                    start,
                    end,
                    tier_name,
                    len(batch.cells),
                    nbytes,
                    outcomes,
                    [owner.request_id for owner in batch.owners],
                    [owner.job_id for owner in batch.owners],
                    batch.attempt,
                )
            )
        if kind in COPIES:
            self.registry.add("kvpool_copy_bytes", nbytes, direction=kind.value)
            self.registry.add("kvpool_copy_seconds", end - start, direction=kind.value)
            return
        direction = _DIRECTION.get(kind)
        if direction is None:
            return
        for outcome, count in Counter(outcomes).items():
            self.registry.add(
                "kvpool_cells", count, direction=direction, store=tier_name, outcome=outcome.value
            )
        self.registry.add("kvpool_seconds", end - start, direction=direction, store=tier_name)
        if kind is not OpKind.REMOVE:
            self.registry.add("kvpool_bytes", nbytes, direction=direction, store=tier_name)
