"""What a lane does with a batch of cells: move or check them, and say what became of each.

A lane performs and reports; it never decides. Store calls, sealing and checking happen here, on
slots that the engine has given to the cells, so nothing else writes that memory meanwhile.
`perform` may be called by several lanes at once; the gather lane and the scatter lane have a copier
each, and a lane that works with a store uses that store alone.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_kvpool.errors import BuffersInUse, StoreError, StoreUnreachable
from vllm_kvpool.identity.keys import key_digest
from vllm_kvpool.layout.pages import CellMove
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.storage.base import Buffer, GetOutcome, PutOutcome, Store
from vllm_kvpool.storage.cell_format import verify, write_header
from vllm_kvpool.transfer.ops import (
    NO_STORE,
    REPLICA,
    CellOutcome,
    CellTask,
    NamedCell,
    OpKind,
    Work,
    WorkCell,
)
from vllm_kvpool.transfer.trace import NO_TRACE, Trace

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
_COPIES = frozenset({OpKind.GATHER, OpKind.SCATTER})

Borrow = Callable[[Sequence[WorkCell], Sequence[Buffer], int], list[CellOutcome]]
"""Copies cells out of replicas' host memory (`ReplicaExchange.borrow`)."""


@dataclass(frozen=True, slots=True)
class LaneWork:
    """The things that lanes act on. `names` are the tiers' labels, in the order of `stores`."""

    stores: tuple[Store, ...]
    names: tuple[str, ...]
    arena: Arena
    gather_copier: Copier
    scatter_copier: Copier
    chunk_tokens: int
    verify_checksum: bool
    registry: MetricsRegistry
    trace: Trace = NO_TRACE
    clock: Callable[[], float] = time.monotonic  # the trace's and the executor's
    borrow: Borrow | None = None  # where replicas are on this host

    def perform(self, work: Work) -> tuple[CellOutcome, ...]:
        """Do the whole batch; one outcome per cell. What is a bug is logged.

        Raises BuffersInUse alone: the slots must not be used again.
        """
        start = self.clock()
        try:
            outcomes = self._perform(work)
        except StoreUnreachable:
            self.registry.add("kvpool_failures", kind="store_unreachable")
            outcomes = [CellOutcome.UNREACHABLE] * len(work.cells)
        except BuffersInUse:
            self.registry.add("kvpool_failures", kind="store_error")
            self._count(work, [CellOutcome.FAILED] * len(work.cells), start, self.clock())
            raise
        except StoreError:
            self.registry.add("kvpool_failures", kind="store_error")
            outcomes = [CellOutcome.FAILED] * len(work.cells)
        except Exception:
            logger.exception("kvpool: %s failed", work.lane)
            self.registry.add("kvpool_failures", kind="bug")
            outcomes = [CellOutcome.FAILED] * len(work.cells)
        self._count(work, outcomes, start, self.clock())
        return tuple(outcomes)

    def _perform(self, work: Work) -> list[CellOutcome]:
        lane, cells = work.lane, work.cells
        match lane.kind:
            case OpKind.GET if lane.tier == REPLICA:
                assert self.borrow is not None
                return self.borrow(cells, self._buffers(cells), work.generation)
            case OpKind.GET:
                return self._get(self.stores[lane.tier], cells)
            case OpKind.PUT:
                return self._put(self.stores[lane.tier], cells)
            case OpKind.REMOVE:
                self.stores[lane.tier].remove([cell.cell.key for cell in cells])
            case OpKind.SEAL:
                for cell, buffer in zip(cells, self._buffers(cells), strict=True):
                    write_header(buffer.view, key_digest(cell.cell.key))
            case OpKind.CHECK:
                return [
                    self._check(cell.cell, buffer)
                    for cell, buffer in zip(cells, self._buffers(cells), strict=True)
                ]
            case OpKind.GATHER:
                self.gather_copier.gather(self._moves(cells))
            case OpKind.SCATTER:
                self.scatter_copier.scatter(self._moves(cells))
        return [CellOutcome.DONE] * len(cells)

    def _get(self, store: Store, cells: Sequence[WorkCell]) -> list[CellOutcome]:
        got = store.get([cell.cell.key for cell in cells], self._buffers(cells))
        wrong_size = got.count(GetOutcome.WRONG_SIZE)
        if wrong_size:
            self.registry.add("kvpool_failures", wrong_size, kind="cell_length")
        return [_GOT[outcome] for outcome in got]

    def _put(self, store: Store, cells: Sequence[WorkCell]) -> list[CellOutcome]:
        present = store.exists([cell.cell.key for cell in cells])
        outcomes = [CellOutcome.EXISTED] * len(cells)
        absent = [i for i, there in enumerate(present) if not there]
        if not absent:
            return outcomes
        keys = [cells[i].cell.key for i in absent]
        chunks = [cells[i].cell.chunk for i in absent]
        buffers = self._buffers([cells[i] for i in absent])
        for i, outcome in zip(absent, store.put(keys, buffers, chunks), strict=True):
            outcomes[i] = _PUT[outcome]
        return outcomes

    def _check(self, cell: NamedCell, buffer: Buffer) -> CellOutcome:
        fault = verify(buffer.view, key_digest(cell.key), checksum=self.verify_checksum)
        if fault is None:
            return CellOutcome.DONE
        self.registry.add("kvpool_failures", kind=f"cell_{fault.value}")
        return CellOutcome.CORRUPT

    def _buffers(self, cells: Sequence[WorkCell]) -> list[Buffer]:
        return [self.arena.buffer(c.slot, c.cell.nbytes) for c in cells if c.slot is not None]

    def _moves(self, cells: Sequence[WorkCell]) -> list[CellMove]:
        moves = []
        chunk_tokens = self.chunk_tokens
        for cell in cells:
            task = cell.cell
            assert isinstance(task, CellTask), cell
            assert cell.slot is not None, cell
            start = task.chunk.position * chunk_tokens
            payload = self.arena.payload_address(cell.slot)
            row_bytes = task.cell.row_bytes
            for piece in task.cell.pieces:
                pages = task.pages[piece.group]
                token_start = max(pages.token_start, start)
                token_stop = min(pages.token_stop, start + chunk_tokens)
                if token_start >= token_stop:
                    continue  # another group of the cell's layers needs the chunk, not this one
                moves.append(
                    CellMove(
                        address=payload + piece.rows_before * chunk_tokens * row_bytes,
                        layer_start=piece.layer_start,
                        layer_stop=piece.layer_stop,
                        head_start=piece.head_start,
                        head_stop=piece.head_stop,
                        block_ids=pages.block_ids,
                        table_start=pages.table_start,
                        chunk_start=start,
                        chunk_tokens=chunk_tokens,
                        token_start=token_start,
                        token_stop=token_stop,
                    )
                )
        return moves

    def _count(self, work: Work, outcomes: Sequence[CellOutcome], start: float, end: float) -> None:
        kind, tier = work.lane
        tier_name = NO_STORE.get(tier) or self.names[tier]
        ends = Counter(outcomes)
        nbytes = sum(
            cell.cell.nbytes
            for cell, outcome in zip(work.cells, outcomes, strict=True)
            if outcome is CellOutcome.DONE
        )
        waited = max(0.0, start - work.ready_at)
        self.registry.observe("kvpool_op_seconds", end - start, lane=kind.value, tier=tier_name)
        self.registry.observe("kvpool_op_wait_seconds", waited, lane=kind.value, tier=tier_name)
        if work.attempt > 1:
            self.registry.add("kvpool_retries", lane=kind.value, tier=tier_name)
        self.trace.batch(
            kind.value,
            kind.value,
            start,
            end,
            tier=tier_name,
            cells=len(work.cells),
            nbytes=nbytes,
            outcomes=outcomes,
            requests=[owner.request_id for owner in work.owners],
            jobs=[owner.job_id for owner in work.owners],
            attempt=work.attempt,
        )
        if kind in _COPIES:
            self.registry.add("kvpool_copy_bytes", nbytes, direction=kind.value)
            self.registry.add("kvpool_copy_seconds", end - start, direction=kind.value)
            return
        direction = _DIRECTION.get(kind)
        if direction is None:
            return
        for outcome, count in ends.items():
            self.registry.add(
                "kvpool_cells", count, direction=direction, store=tier_name, outcome=outcome.value
            )
        self.registry.add("kvpool_seconds", end - start, direction=direction, store=tier_name)
        if kind is not OpKind.REMOVE:
            self.registry.add("kvpool_bytes", nbytes, direction=direction, store=tier_name)
