"""Plans of the scheduler -> jobs of cells for one rank (pure)."""

from dataclasses import dataclass
from functools import lru_cache

from vllm_kvpool.cells import HEADER_BYTES
from vllm_kvpool.keys import KeyMaker, group_of
from vllm_kvpool.layout.topology import LocalCell, Topology
from vllm_kvpool.transfer.ops import (
    CellName,
    CellTask,
    JobPages,
    LoadJob,
    LoadPlan,
    PrefetchJob,
    PrefetchPlan,
    SaveJob,
    SavePlan,
)

EPOCHS_KEPT = 4  # saves planned before a change still carry the epoch before


@lru_cache(maxsize=EPOCHS_KEPT)
def _in_epoch(keys: KeyMaker, epoch: str) -> KeyMaker:
    return keys.in_epoch(epoch)


@dataclass(frozen=True, slots=True)
class Planner:
    """Knows this rank's cells. `row_bytes` is one token's K and V of one head in one layer.

    With `keeps_all` this rank has a host tier, which holds its cells of every chunk, not only of
    those that it is its turn to store.
    """

    topology: Topology
    tp_rank: int
    cells: tuple[LocalCell, ...]
    keys: KeyMaker
    chunk_tokens: int
    row_bytes: int
    load_timeout_s: float
    keeps_all: bool = False

    def max_cell_bytes(self) -> int:
        """Header and payload of this rank's largest cell."""
        return max(self._cell_bytes(cell) for cell in self.cells)

    def load(self, plan: LoadPlan) -> LoadJob:
        """All of this rank's cells of the plan's chunks."""
        pages = JobPages(plan.block_ids, plan.table_start, plan.token_start, plan.token_stop)
        keys = _in_epoch(self.keys, plan.epoch)
        tasks = tuple(
            self._task(keys, cell, plan.first_chunk + i, chunk_hash, pages)
            for i, chunk_hash in enumerate(plan.hashes)
            for cell in self.cells
        )
        stop = plan.first_chunk + len(plan.hashes)
        return LoadJob(
            plan.job_id, plan.request_id, plan.first_chunk, stop, tasks, self.load_timeout_s
        )

    def save(self, plan: SavePlan) -> SaveJob:
        """This rank's cells of those chunks that it is its turn to store, or that it keeps."""
        start = plan.first_chunk * self.chunk_tokens
        stop = start + len(plan.hashes) * self.chunk_tokens
        pages = JobPages(plan.block_ids, plan.table_start, start, stop)
        keys = _in_epoch(self.keys, plan.epoch)
        tasks = []
        for chunk, chunk_hash in enumerate(plan.hashes, plan.first_chunk):
            stored = self.topology.writes_chunk(self.tp_rank, chunk)
            if stored or self.keeps_all:
                tasks += [
                    self._task(keys, cell, chunk, chunk_hash, pages, stored) for cell in self.cells
                ]
        return SaveJob(plan.job_id, plan.request_id, tuple(tasks))

    def prefetch(self, plan: PrefetchPlan) -> PrefetchJob:
        """All of this rank's cells of the plan's chunks, for no pages."""
        keys = _in_epoch(self.keys, plan.epoch)
        cells = tuple(
            CellName(
                keys.key(cell.part, cell.span, chunk_hash),
                group_of(keys.namespace, chunk_hash.hex()),
                self._cell_bytes(cell),
            )
            for chunk_hash in plan.hashes
            for cell in self.cells
        )
        return PrefetchJob(plan.request_id, cells)

    def _task(
        self,
        keys: KeyMaker,
        cell: LocalCell,
        chunk: int,
        chunk_hash: bytes,
        pages: JobPages,
        stored: bool = True,
    ) -> CellTask:
        key = keys.key(cell.part, cell.span, chunk_hash)
        nbytes = self._cell_bytes(cell)
        group = group_of(keys.namespace, chunk_hash.hex())
        return CellTask(key, group, nbytes, chunk, cell, pages, stored)

    def _cell_bytes(self, cell: LocalCell) -> int:
        return HEADER_BYTES + cell.payload_bytes(self.chunk_tokens, self.row_bytes)
