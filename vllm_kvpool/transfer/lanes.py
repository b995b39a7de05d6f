"""What a lane does with a batch of cells: move or check them, and say what became of each.

A lane performs and reports; it never decides. Store calls, sealing and checking happen here, on
slots that the engine has given to the cells, so nothing else writes that memory meanwhile.
`perform` may be called by several lanes at once; the gather lane and the scatter lane have a copier
each, and a lane that works with a store uses that store alone.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat, starmap
from queue import SimpleQueue
from typing import Any

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
    Cell,
    CellOutcome,
    LaneName,
    OpKind,
    Work,
    WorkCell,
    WorkDone,
)
from vllm_kvpool.transfer.trace import NO_TRACE, Trace

logger = logging.getLogger(__name__)

Perform = Callable[[Work], tuple[CellOutcome, ...]]


class LaneThread:
    """Performs the works of its inbox, one after another, and reports it if it dies.

    A thread that hangs in a store call can be left behind: it ends when the call returns, after it
    has reported its work.

    `on_start` is called first, on the thread; if it fails the thread dies.
    """

    def __init__(
        self,
        lane: LaneName,
        name: str,
        perform: Perform,
        inbox: SimpleQueue[Work | None],
        outbox: SimpleQueue[Any],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.lane = lane
        self.ended = False  # it was told to end
        self.lost_slots = False  # a call of its was given up that may still touch them
        self._turn = threading.Lock()  # held to end a work, and to leave the thread with one
        self._left = False
        self._since: float | None = None  # set after a work is taken, unset before it is let go
        self._taken: deque[Work | None] = deque()  # the work it is doing
        self._inbox = inbox
        self._perform = perform
        self._outbox = outbox
        self._on_start = on_start
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def doing(self) -> Work | None:
        """What it had taken and not answered; for others to ask once it is dead."""
        return self._taken[0] if self._taken else None

    def busy_since(self) -> tuple[Work, float] | None:
        """The work it is doing and when it began (monotonic seconds); any thread may ask."""
        with self._turn:
            work, since = self.doing, self._since
        return None if work is None or since is None else (work, since)

    def leave(self, work: Work) -> bool:
        """It shall take no other work when it has done this one; False if it has done it before."""
        with self._turn:
            if self.doing is not work:
                return False
            self._left = True
        return True

    def _run(self) -> None:
        inbox = starmap(self._inbox.get, repeat(()))
        try:
            self._on_start()
            while True:
                # One call into C: an exception thrown into this thread comes before or after it,
                # so that no work is out of the inbox and in nobody's hands.
                self._taken.extend(islice(inbox, 1))
                work = self._taken[0]
                if work is None:
                    break
                self._since = time.monotonic()
                in_use = False
                try:
                    outcomes = self._perform(work)
                except BuffersInUse as error:
                    logger.error("kvpool: %s: %s", work.lane, error)
                    outcomes = (CellOutcome.FAILED,) * len(work.cells)
                    in_use = self.lost_slots = True
                except Exception:
                    logger.exception("kvpool: %s failed", work.lane)
                    outcomes = (CellOutcome.FAILED,) * len(work.cells)
                self._outbox.put(WorkDone(work.work_id, outcomes, in_use))
                with self._turn:
                    self._since = None
                    self._taken.clear()
                if self._left:
                    break
            self.ended = True
        finally:
            if not self.ended:
                self._outbox.put(self)


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

    def _check(self, cell: Cell, buffer: Buffer) -> CellOutcome:
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
        for each in cells:
            cell, local, slot = each.cell, each.cell.local, each.slot
            assert local is not None, each
            assert slot is not None, each
            start = cell.chunk.position * chunk_tokens
            payload = self.arena.payload_address(slot)
            row_bytes = local.row_bytes
            for piece in local.pieces:
                pages = cell.pages[piece.group]
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
