"""What a lane does with an op: move its cells, and say what became of each.

A lane performs and reports; it never decides. Store calls, verification and sealing happen here,
on slots that the engine has given to the op, so no two ops touch the same memory. `perform` may be
called by several lanes at once; the gather lane and the scatter lane have a copier each.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvpool.cells import seal, verify
from vllm_kvpool.errors import StoreError, StoreUnreachable
from vllm_kvpool.keys import key_digest
from vllm_kvpool.layout.pages import CellMove
from vllm_kvpool.metrics import Tally
from vllm_kvpool.staging.arena import Arena
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.store.base import Buffer, GetOutcome, PutOutcome, Store
from vllm_kvpool.transfer.ops import CellOutcome, Op, OpCell, OpKind

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
_DIRECTION = {
    OpKind.GET: "load",
    OpKind.PUT: "save",
    OpKind.REMOVE: "remove",
    OpKind.GATHER: "gather",
    OpKind.SCATTER: "scatter",
}


@dataclass(frozen=True, slots=True)
class LaneWork:
    """The things ops act on."""

    store: Store
    arena: Arena
    gather_copier: Copier
    scatter_copier: Copier
    chunk_tokens: int
    verify_checksum: bool
    tally: Tally

    def perform(self, op: Op) -> tuple[CellOutcome, ...]:
        """Do the whole op; one outcome per cell. Only our own bugs raise."""
        start = time.perf_counter()
        try:
            match op.kind:
                case OpKind.GET:
                    outcomes = self._get(op.cells)
                case OpKind.PUT:
                    outcomes = self._put(op.cells)
                case OpKind.REMOVE:
                    self.store.remove([cell.task.key for cell in op.cells])
                    outcomes = [CellOutcome.DONE] * len(op.cells)
                case OpKind.GATHER:
                    self.gather_copier.gather(self._moves(op.cells))
                    outcomes = [CellOutcome.DONE] * len(op.cells)
                case OpKind.SCATTER:
                    self.scatter_copier.scatter(self._moves(op.cells))
                    outcomes = [CellOutcome.DONE] * len(op.cells)
        except StoreUnreachable:
            self.tally.add("kvpool_failures", kind="store_unreachable")
            outcomes = [CellOutcome.UNREACHABLE] * len(op.cells)
        except StoreError:
            self.tally.add("kvpool_failures", kind="store_error")
            outcomes = [CellOutcome.FAILED] * len(op.cells)
        self._count(op, outcomes, time.perf_counter() - start)
        return tuple(outcomes)

    def _get(self, cells: Sequence[OpCell]) -> list[CellOutcome]:
        buffers = self._buffers(cells)
        got = self.store.get([cell.task.key for cell in cells], buffers)
        outcomes = [_GOT[outcome] for outcome in got]
        for i, (cell, buffer) in enumerate(zip(cells, buffers, strict=True)):
            if outcomes[i] is CellOutcome.DONE:
                digest = key_digest(cell.task.key)
                fault = verify(buffer.view, digest, checksum=self.verify_checksum)
                if fault is not None:
                    self.tally.add("kvpool_failures", kind=f"cell_{fault.value}")
                    outcomes[i] = CellOutcome.CORRUPT
            elif got[i] is GetOutcome.WRONG_SIZE:
                self.tally.add("kvpool_failures", kind="cell_length")
        return outcomes

    def _put(self, cells: Sequence[OpCell]) -> list[CellOutcome]:
        present = self.store.exists([cell.task.key for cell in cells])
        outcomes = [CellOutcome.EXISTED] * len(cells)
        absent = [i for i, there in enumerate(present) if not there]
        if not absent:
            return outcomes
        buffers = self._buffers([cells[i] for i in absent])
        for i, buffer in zip(absent, buffers, strict=True):
            seal(buffer.view, key_digest(cells[i].task.key))
        keys = [cells[i].task.key for i in absent]
        groups = [cells[i].task.group for i in absent]
        for i, outcome in zip(absent, self.store.put(keys, buffers, groups), strict=True):
            outcomes[i] = _PUT[outcome]
        return outcomes

    def _buffers(self, cells: Sequence[OpCell]) -> list[Buffer]:
        return [self.arena.buffer(c.slot, c.task.nbytes) for c in cells if c.slot is not None]

    def _moves(self, cells: Sequence[OpCell]) -> list[CellMove]:
        return [
            CellMove(
                address=self.arena.payload_address(cell.slot),
                layer_start=cell.task.cell.layer_start,
                layer_stop=cell.task.cell.layer_stop,
                head_start=cell.task.cell.head_start,
                head_stop=cell.task.cell.head_stop,
                block_ids=cell.task.pages.block_ids,
                table_start=cell.task.pages.table_start,
                chunk_start=cell.task.chunk * self.chunk_tokens,
                chunk_tokens=self.chunk_tokens,
                token_start=max(cell.task.pages.token_start, cell.task.chunk * self.chunk_tokens),
                token_stop=min(
                    cell.task.pages.token_stop, (cell.task.chunk + 1) * self.chunk_tokens
                ),
            )
            for cell in cells
            if cell.slot is not None
        ]

    def _count(self, op: Op, outcomes: Sequence[CellOutcome], seconds: float) -> None:
        direction = _DIRECTION[op.kind]
        nbytes = sum(
            cell.task.nbytes
            for cell, outcome in zip(op.cells, outcomes, strict=True)
            if outcome is CellOutcome.DONE
        )
        if op.kind in (OpKind.GATHER, OpKind.SCATTER):
            self.tally.add("kvpool_copy_bytes", nbytes, direction=direction)
            self.tally.add("kvpool_copy_seconds", seconds, direction=direction)
            return
        store = self.store.capabilities.name
        for outcome, count in Counter(outcomes).items():
            self.tally.add(
                "kvpool_cells", count, direction=direction, store=store, outcome=outcome.value
            )
        self.tally.add("kvpool_seconds", seconds, direction=direction, store=store)
        if op.kind is not OpKind.REMOVE:
            self.tally.add("kvpool_bytes", nbytes, direction=direction, store=store)
