"""Plans of the scheduler -> jobs of cells for one rank (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from vllm_kvpool.cells import HEADER_BYTES
from vllm_kvpool.keys import KeyMaker, group_of
from vllm_kvpool.layout.topology import NO_CONTEXT, Context, LocalCell
from vllm_kvpool.transfer.ops import (
    NULL_BLOCK,
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
    """Knows this rank's cells. Plans count all tokens of a request, jobs those that are here.

    `block_sizes` are those of the KV cache groups on this rank, `chunk_tokens` the tokens of all
    context-parallel ranks together. With `keeps_all` this rank has a host tier, which holds its
    cells of every chunk, not only of those that it is its turn to store.
    """

    cells: tuple[LocalCell, ...]
    keys: KeyMaker
    chunk_tokens: int
    load_timeout_s: float
    keeps_all: bool = False
    block_sizes: tuple[int, ...] = ()
    context: Context = NO_CONTEXT

    @property
    def local_chunk_tokens(self) -> int:
        """How many tokens of a chunk this rank holds."""
        return self.chunk_tokens // self.context.dcp_size

    def max_cell_bytes(self) -> int:
        """Header and payload of this rank's largest cell."""
        return max(self._cell_bytes(cell) for cell in self.cells)

    def load(self, plan: LoadPlan) -> LoadJob:
        """Those of this rank's cells of the plan's chunks that its groups need."""
        pages = self._local(plan.pages)
        keys = _in_epoch(self.keys, plan.epoch)
        tasks = tuple(
            self._task(keys, cell, chunk, chunk_hash, pages)
            for chunk, chunk_hash in enumerate(plan.hashes, plan.first_chunk)
            for cell in self.cells
            if self._is_needed(chunk, pages[cell.pieces[0].group])
        )
        stop = plan.first_chunk + len(plan.hashes)
        return LoadJob(
            plan.job_id, plan.request_id, plan.first_chunk, stop, tasks, self.load_timeout_s
        )

    def save(self, plan: SavePlan) -> SaveJob:
        """This rank's cells of those chunks that it is its turn to store, or that it keeps."""
        pages = self._local(plan.pages)
        has_gaps = [NULL_BLOCK in each.block_ids for each in pages]
        keys = _in_epoch(self.keys, plan.epoch)
        tasks = []
        for chunk, chunk_hash in enumerate(plan.hashes, plan.first_chunk):
            for cell in self.cells:
                stored = cell.writes_chunk(chunk)
                if not (stored or self.keeps_all):
                    continue
                if any(
                    has_gaps[group]
                    and not self._is_whole(chunk, pages[group], self.block_sizes[group])
                    for group in {piece.group for piece in cell.pieces}
                ):
                    continue
                tasks.append(self._task(keys, cell, chunk, chunk_hash, pages, stored))
        return SaveJob(plan.job_id, plan.request_id, tuple(tasks))

    def prefetch(self, plan: PrefetchPlan) -> PrefetchJob:
        """All of this rank's cells of the plan's chunks, for no pages.

        Of a kind that reads only the last tokens, those of the chunks that hold them: a load may
        end anywhere in the last chunk.
        """
        keys = _in_epoch(self.keys, plan.epoch)
        stop = (len(plan.hashes) - 1) * self.chunk_tokens
        cells = tuple(
            CellName(
                keys.key(cell.part, cell.span, chunk_hash),
                group_of(keys.namespace, chunk_hash.hex(), cell.span.kind),
                self._cell_bytes(cell),
            )
            for chunk, chunk_hash in enumerate(plan.hashes)
            for cell in self.cells
            if (chunk + 1) * self.chunk_tokens > cell.reach.first_read(stop)
        )
        return PrefetchJob(plan.request_id, cells)

    def _local(self, pages: Sequence[JobPages]) -> tuple[JobPages, ...]:
        """The same pages, counted in the tokens that are dealt to this rank."""
        if self.context.dcp_size == 1:
            return tuple(pages)
        return tuple(
            JobPages(
                block_ids,
                table_start // self.context.dcp_size,
                self.context.held(self.keys.context, start),
                self.context.held(self.keys.context, stop),
            )
            for block_ids, table_start, start, stop in pages
        )

    def _is_needed(self, chunk: int, pages: JobPages) -> bool:
        tokens = self.local_chunk_tokens
        return chunk * tokens < pages.token_stop and (chunk + 1) * tokens > pages.token_start

    def _is_whole(self, chunk: int, pages: JobPages, block_size: int) -> bool:
        """Whether no block of the chunk is gone."""
        tokens = self.local_chunk_tokens
        first = (chunk * tokens - pages.table_start) // block_size
        stop = -(-((chunk + 1) * tokens - pages.table_start) // block_size)
        return NULL_BLOCK not in pages.block_ids[first:stop]

    def _task(
        self,
        keys: KeyMaker,
        cell: LocalCell,
        chunk: int,
        chunk_hash: bytes,
        pages: tuple[JobPages, ...],
        stored: bool = True,
    ) -> CellTask:
        key = keys.key(cell.part, cell.span, chunk_hash)
        nbytes = self._cell_bytes(cell)
        group = group_of(keys.namespace, chunk_hash.hex(), cell.span.kind)
        return CellTask(key, group, nbytes, chunk, cell, pages, stored)

    def _cell_bytes(self, cell: LocalCell) -> int:
        return HEADER_BYTES + cell.payload_bytes(self.local_chunk_tokens)
