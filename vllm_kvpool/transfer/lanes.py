"""The work of a lane on a batch of slabs, and the lane's thread.

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
from itertools import accumulate, islice, pairwise, repeat, starmap
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
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome, Store
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, CellFault, verify, write_header
from vllm_kvpool.transfer.graph import Batch, BatchDone
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
    from vllm_kvpool.storage.base import Pinning
    from vllm_kvpool.storage.contents.encryption import EncryptedCells

logger = logging.getLogger(__name__)

Perform = Callable[[Batch], Sequence[Outcome]]


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
                self._end(batch, [CellOutcome.FAILED] * len(batch.ops))

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

    def _end(self, batch: Batch, outcomes: Sequence[Outcome]) -> None:
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
    """The outcome of each part from those of all their cells."""
    stops = list(accumulate((part.num_cells for part in parts), initial=0))
    return [outcome_of(outcomes[start:stop]) for start, stop in pairwise(stops)]


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
                    for key, buffer in zip(part.cell_keys(), self._buffers(part), strict=True):
                        write_header(buffer.view, key_digest(key))
            case OpKind.CHECK:
                return [
                    outcome_of(list(map(self._check, part.cell_keys(), self._buffers(part))))
                    for part in parts
                ]
            case OpKind.GATHER:
                self._clear_heads(parts)
                self.gather_copier.gather(self._moves(parts))
            case OpKind.SCATTER:
                self.scatter_copier.scatter(self._moves(parts))
        return [CellOutcome.DONE] * len(batch.ops)

    def _get(self, store: Store, parts: Sequence[Part]) -> list[Outcome]:
        got = store.get(_keys_of(parts), [each for part in parts for each in self._buffers(part)])
        if got.count(GetOutcome.OK) == len(got):
            return [CellOutcome.DONE] * len(parts)
        wrong_size = got.count(GetOutcome.WRONG_SIZE)
        if wrong_size:
            self.registry.add("kvpool_failures", wrong_size, kind="cell_length")
        return _by_part([_GOT[outcome] for outcome in got], parts)

    def _put(self, tier: int, parts: Sequence[Part]) -> list[Outcome]:
        store, keys = self.stores[tier], _keys_of(parts)
        buffers = [each for part in parts for each in self._buffers(part)]
        chunks = [part.slab.chunk for part in parts for _ in range(part.num_cells)]
        present = store.exists(keys)
        outcomes = [CellOutcome.EXISTED] * len(keys)
        absent = [i for i, there in enumerate(present) if not there]
        if len(absent) < len(keys):
            there = [i for i, each in enumerate(present) if each]
            self._pin(store, [keys[i] for i in there], [chunks[i] for i in there])
        if absent:
            put = store.put if self.encrypted is None else partial(self.encrypted.put, tier)
            stored = put(
                [keys[i] for i in absent],
                [buffers[i] for i in absent],
                [chunks[i] for i in absent],
            )
            for i, outcome in zip(absent, stored, strict=True):
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
                cast("Pinning", store).pin(keys, until_ns)

    def _check(self, key: str, buffer: Buffer) -> CellOutcome:
        if self.encrypted is None:
            fault = verify(buffer.view, key_digest(key), checksum=self.verify_checksum)
        else:
            fault = self.encrypted.decrypt(key, buffer.view)
        if fault is None:
            return CellOutcome.DONE
        self.registry.add("kvpool_failures", kind=f"cell_{fault.value}")
        # A cell of a key that this engine lacks is no damage: others may read it.
        return CellOutcome.MISSING if fault is CellFault.UNKNOWN_KEY else CellOutcome.CORRUPT

    def _buffers(self, part: Part) -> Sequence[Buffer]:
        return self.arena.buffers(part.slots, part.sizes())

    def _clear_heads(self, parts: Sequence[Part]) -> None:
        """Fill slots with zeros whose first rows are of tokens before the prompt, which has none:
        a slot holds what was in it before."""
        for part in parts:
            if part.slab.kind.cells[0].lookahead and not part.slab.chunk.position:
                for buffer in self._buffers(part):
                    view = buffer.view[HEADER_BYTES:]
                    view[:] = bytes(len(view))

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
        """The last fields of a `SlabMove`; None if there is nothing to move."""
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
        nbytes, counts = batch.nbytes, Counter({CellOutcome.DONE: batch.num_cells})
        if kind is OpKind.FENCE:  # it has no cells
            counts = Counter(map(worst_of, outcomes))
        elif outcomes.count(CellOutcome.DONE) < len(batch.parts):
            nbytes, counts = 0, Counter()
            for part, outcome in zip(batch.parts, outcomes, strict=True):
                each = each_of(outcome, part.num_cells)
                counts.update(each)
                done = zip(part.sizes(), each, strict=True)
                nbytes += sum(size for size, one in done if one is CellOutcome.DONE)
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
                    batch.num_cells,
                    nbytes,
                    counts,
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
        for outcome, count in counts.items():
            self.registry.add(
                "kvpool_cells", count, direction=direction, store=tier_name, outcome=outcome.value
            )
        self.registry.add("kvpool_seconds", end - start, direction=direction, store=tier_name)
        if kind is not OpKind.REMOVE:
            self.registry.add("kvpool_bytes", nbytes, direction=direction, store=tier_name)
