"""vLLM's OffloadingConnector over pages in host memory, which by itself wants a GPU.

Its scheduler side, manager and eviction are vLLM's; a thread that copies pages stands in for the
device's streams. vLLM imports this module by `spec_module_path`.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class SpecOnCpu(CPUOffloadingSpec):  # type: ignore[misc]
    """Host memory for pages that are in host memory too."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CopyingWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks of one group of layers, job after job, on a thread of its own."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        assert len(kv_caches.group_data_refs) == 1
        self._blocks_per_chunk = blocks_per_chunk
        self._pages = [each.tensor for each in kv_caches.tensors]
        self._kept = [
            torch.zeros((chunks, blocks_per_chunk, page.shape[1]), dtype=page.dtype)
            for page in self._pages
        ]
        self._thread = ThreadPoolExecutor(1, "offloading-copies")
        self._jobs: dict[int, Future[None]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = self._thread.submit(self._copy, src_spec, dst_spec, to_pages=False)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = self._thread.submit(self._copy, dst_spec, src_spec, to_pages=True)
        return True

    def _copy(self, in_pages: Any, in_chunks: Any, *, to_pages: bool) -> None:
        blocks = torch.from_numpy(in_pages.block_ids).long()
        first = in_pages.block_indices[0] % self._blocks_per_chunk
        place = torch.arange(first, first + len(blocks))
        chunks = torch.from_numpy(in_chunks.block_ids).long()[place // self._blocks_per_chunk]
        within = place % self._blocks_per_chunk
        for pages, kept in zip(self._pages, self._kept, strict=True):
            if to_pages:
                pages[blocks] = kept[chunks, within]
            else:
                kept[chunks, within] = pages[blocks]

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, job in self._jobs.items() if job.done()]
        for job_id in done:
            self._jobs.pop(job_id).result()
        return [TransferResult(job_id, success=True) for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].result()

    def shutdown(self) -> None:
        self._thread.shutdown()
