"""Plans of the scheduler -> jobs of cells for one rank (pure)."""

from dataclasses import dataclass

from vllm_kvpool.cells import HEADER_BYTES
from vllm_kvpool.keys import KeyMaker
from vllm_kvpool.layout.topology import LocalCell, Topology
from vllm_kvpool.transfer.ops import (
    CellTask,
    JobPages,
    LoadJob,
    LoadPlan,
    SaveJob,
    SavePlan,
)


@dataclass(frozen=True, slots=True)
class Planner:
    """Knows this rank's cells. `row_bytes` is one token's K and V of one head in one layer."""

    topology: Topology
    tp_rank: int
    cells: tuple[LocalCell, ...]
    keys: KeyMaker
    chunk_tokens: int
    row_bytes: int
    load_timeout_s: float

    def max_cell_bytes(self) -> int:
        """Header and payload of this rank's largest cell."""
        return max(self._cell_bytes(cell) for cell in self.cells)

    def load(self, plan: LoadPlan) -> LoadJob:
        """All of this rank's cells of the plan's chunks."""
        pages = JobPages(plan.block_ids, plan.table_start, plan.token_start, plan.token_stop)
        tasks = tuple(
            self._task(cell, plan.first_chunk + i, chunk_hash, pages)
            for i, chunk_hash in enumerate(plan.hashes)
            for cell in self.cells
        )
        stop = plan.first_chunk + len(plan.hashes)
        return LoadJob(
            plan.job_id, plan.request_id, plan.first_chunk, stop, tasks, self.load_timeout_s
        )

    def save(self, plan: SavePlan) -> SaveJob:
        """This rank's cells of those chunks that it is its turn to write."""
        start = plan.first_chunk * self.chunk_tokens
        stop = start + len(plan.hashes) * self.chunk_tokens
        pages = JobPages(plan.block_ids, plan.table_start, start, stop)
        tasks = tuple(
            self._task(cell, plan.first_chunk + i, chunk_hash, pages)
            for i, chunk_hash in enumerate(plan.hashes)
            if self.topology.writes_chunk(self.tp_rank, plan.first_chunk + i)
            for cell in self.cells
        )
        return SaveJob(plan.job_id, plan.request_id, tasks)

    def _task(self, cell: LocalCell, chunk: int, chunk_hash: bytes, pages: JobPages) -> CellTask:
        key = self.keys.key(cell.part, cell.span, chunk_hash)
        return CellTask(key, chunk_hash.hex(), chunk, cell, pages, self._cell_bytes(cell))

    def _cell_bytes(self, cell: LocalCell) -> int:
        return HEADER_BYTES + cell.payload_bytes(self.chunk_tokens, self.row_bytes)
