"""Objects that benchmarks put into child processes: a segment of a cluster, our worker side.

All of them move the same prompt: pages in vLLM's head-major form, blocks in no order.
"""

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.common import wait_until
from vllm_kvpool.config import KVPoolConfig
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology, default_layer_span
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES
from vllm_kvpool.storage.mooncake import import_wheel
from vllm_kvpool.transfer.ops import JobId, JobPages, LoadPlan, SavePlan
from vllm_kvpool.worker.worker_part import WorkerPart

LOCAL_BUFFER_BYTES = 16 << 20
HASH_BYTES = 20
STEP_S = 0.002  # between two looks at a save: an engine looks once a step
REQUEST = "r"
MODEL = "bench"


@dataclass(frozen=True)
class Geometry:
    """A prompt and the model that it belongs to. Pages are float16, K and V of one width."""

    layers: int = 16
    heads: int = 8
    head_dim: int = 128
    block: int = 16
    tokens: int = 1024
    chunk: int = 256
    span: int = 0
    """Layers of a cell; 0 chooses as the pool does."""

    @property
    def row_bytes(self) -> int:
        return 2 * self.head_dim * torch.float16.itemsize

    @property
    def total_bytes(self) -> int:
        return self.layers * self.heads * self.tokens * self.row_bytes

    def topology(self, per_head: bool = True) -> Topology:
        span = self.span or default_layer_span(self.layers, self.row_bytes, self.chunk)
        return Topology(self.heads, 1, ((0, self.layers),), span, per_head)

    def cells(self, per_head: bool = True) -> tuple[int, int]:
        """Cells of the prompt, and bytes of the largest."""
        local = self.topology(per_head).local_cells(0, 0, self.row_bytes)
        nbytes = max(HEADER_BYTES + cell.payload_bytes(self.chunk) for cell in local)
        return self.tokens // self.chunk * len(local), nbytes

    @property
    def num_blocks(self) -> int:
        """Twice what the prompt takes, and vLLM's null block."""
        return 2 * self.tokens // self.block + 1

    def block_ids(self) -> list[int]:
        ids = range(1, self.num_blocks)
        return random.Random(0).sample(ids, self.tokens // self.block)

    def pages(self) -> torch.Tensor:
        """Every layer's pages in one allocation, [layer, block, head, token, K and V]."""
        shape = (self.layers, self.num_blocks, self.heads, self.block, 2 * self.head_dim)
        generator = torch.Generator().manual_seed(0)
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(
            torch.float16
        )


def chunk_hashes(seed: int, count: int) -> tuple[bytes, ...]:
    """Names of a prompt's chunks; no two seeds share one."""
    return tuple(
        hashlib.blake2b(f"{seed} {i}".encode(), digest_size=HASH_BYTES).digest()
        for i in range(count)
    )


class Holder:
    """A member of a Mooncake cluster that gives memory and moves nothing itself."""

    def __init__(self, master: str, segment_bytes: int, own_host: str = "") -> None:
        self.store: Any = native_client(master, segment_bytes, own_host)

    def remove_all(self) -> int:
        """Empty the cluster."""
        return int(self.store.remove_all(True))

    def remove_prompts(self) -> int:
        """Remove what `OurSide` has saved."""
        return int(self.store.remove_by_regex(f"^{MODEL}@", True))


def native_client(master: str, segment_bytes: int, own_host: str = "") -> Any:
    """The wheel's own client over TCP, nothing of ours around it; else on the master's host."""
    native: Any = import_wheel().MooncakeDistributedStore()
    host = own_host or master.rpartition(":")[0]
    code = native.setup(host, "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if code:
        raise RuntimeError(f"Mooncake's setup failed with {code}")
    return native


class PageKeeper:
    """Pages whose content can be wiped and compared with what it was."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.pages = geometry.pages()
        self.ids = geometry.block_ids()
        self._wanted = self._content().clone()

    def all_pages(self) -> tuple[JobPages, ...]:
        """Where the whole prompt lies."""
        return (JobPages(tuple(self.ids), 0, 0, self.geometry.tokens),)

    def _content(self) -> torch.Tensor:
        # As integers: random bits are NaN now and then, which equals nothing.
        return self.pages.view(torch.int16)[:, self.ids]

    def wipe(self) -> None:
        self.pages.zero_()

    def check(self) -> None:
        assert torch.equal(self._content(), self._wanted), "the pages hold other bytes than before"


class OurSide(PageKeeper):
    """The worker side as an engine has it, checksums on."""

    def __init__(
        self,
        url: str | tuple[str, ...],
        geometry: Geometry,
        per_head: bool = True,
        *,
        rank: int = 0,
        ranks: int = 1,
        gather: Callable[[bytes], Sequence[bytes]] | None = None,
    ) -> None:
        """One of `ranks` that hold the same KV; `gather` is how they meet."""
        super().__init__(geometry)
        torch.set_num_threads(1)
        topology = replace(geometry.topology(per_head), tp_size=ranks)
        model = ModelShape(
            namespace=make_namespace(MODEL, "0" * 12),
            layer_groups=(LayerGroup(topology, geometry.row_bytes),),
            groups=(KVCacheGroup(geometry.block),),
            num_blocks=geometry.num_blocks,
            num_ranks=ranks,
        )
        layers = [from_token_content(layer) for layer in self.pages]
        config = KVPoolConfig(
            store=url, chunk_tokens=geometry.chunk, per_head_storage=per_head, load_timeout_s=120
        )
        CpuCopier([]).warm_up()  # compiling is not what is measured
        spans = {
            str(layer): span.start
            for span in geometry.topology(per_head).all_spans()
            for layer in range(span.start, span.stop)
        }
        self._part = WorkerPart(
            config,
            model,
            RankPlace(rank, 0, rank),
            layers,
            CpuCopier,
            finish_in_step=True,
            gather=gather,
            layer_spans=spans,
        )
        self._num_chunks = geometry.tokens // geometry.chunk
        self.num_cells, self._cell_bytes = geometry.cells(per_head)
        self._jobs = 0

    def shape(self) -> tuple[int, int]:
        """Cells of the prompt, and bytes of the largest."""
        return self.num_cells, self._cell_bytes

    def save(self, seed: int, limit_s: float) -> float:
        """Seconds until every cell is in the store."""
        self._jobs += 1
        job_id = JobId(self._jobs)
        hashes = chunk_hashes(seed, self._num_chunks)
        plan = StepPlan(saves=(SavePlan(job_id, REQUEST, 0, hashes, self.all_pages()),))
        worker = self._part.worker
        ended = self._ended("save") + self.num_cells

        def run() -> bool:
            worker.start_saves(plan)
            worker.finish_step(None, set())
            report = worker.take_report()
            return report is not None and job_id in report.stored

        seconds = wait_until(run, limit_s, STEP_S)
        assert self._ended("save") == ended, "not every cell was stored"
        return seconds

    def load(self, seed: int, limit_s: float) -> float:
        """Seconds until every byte is in the pages."""
        plan = StepPlan(loads=(self._load_plan(seed),), idle=True)

        def run() -> bool:
            self._part.worker.start_loads(plan)
            results = self._part.worker.finish_step(plan, set())
            if results.invalid_blocks:
                raise RuntimeError(f"{len(results.invalid_blocks)} blocks were not loaded")
            return REQUEST in results.loaded

        return wait_until(run, limit_s)

    def load_within(self, seed: int, layer_s: float) -> float:
        """The same layer by layer, in a step each of whose layers computes for `layer_s` elsewhere:
        seconds of the step."""
        plan = StepPlan(loads=(replace(self._load_plan(seed), layered=True),))
        began = time.monotonic()
        self._part.worker.start_loads(plan)
        for layer in range(self.geometry.layers):
            self._part.worker.wait_for_layer(str(layer))
            time.sleep(layer_s)
        results = self._part.worker.finish_step(plan, set())
        if results.invalid_blocks:
            raise RuntimeError(f"{len(results.invalid_blocks)} blocks were not loaded")
        return time.monotonic() - began

    def _load_plan(self, seed: int) -> LoadPlan:
        self._jobs += 1
        return LoadPlan(
            job_id=JobId(self._jobs),
            request_id=REQUEST,
            first_chunk=0,
            hashes=chunk_hashes(seed, self._num_chunks),
            pages=self.all_pages(),
            token_start=0,
            token_stop=self.geometry.tokens,
        )

    def _ended(self, direction: str) -> float:
        """Cells that the lanes are done with so far; anything but `done` is a failure."""
        total = 0.0
        for sample, value in self._part.registry.snapshot().items():
            if sample.startswith(f"kvpool_cells{{direction={direction},"):
                if not sample.endswith("outcome=done}"):
                    raise RuntimeError(sample)
                total += value
        return total

    def close(self) -> None:
        """End its threads."""
        self._part.close()
