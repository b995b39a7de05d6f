"""What ranks that hold the same KV fetch and keep, each for itself and one for all.

    python benchmarks/bench_replicas.py --json replicas.json

Four ranks of an MLA model (one latent of 576 float16 for each token and layer, 16 layers), each a
process with a host tier before files on this machine's disk. All of them load prompts of 4,096
tokens: new ones from files, and again out of host memory. With `each for itself` ranks do not know
of each other, as on four hosts. Fetched and held are of all ranks together, in prompts; CPU seconds
are of all threads of the ranks, for each GB that comes into pages. Both sides take turns.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from benchmarks.common import Child, Result, Row, Target, children, run_script, wait_until
from benchmarks.sides import MODEL, REQUEST, Geometry, PageKeeper, chunk_hashes
from vllm_kvpool.config import KVPoolConfig
from vllm_kvpool.keys import make_namespace
from vllm_kvpool.layout.formats import from_token_content
from vllm_kvpool.layout.topology import Topology, default_layer_span
from vllm_kvpool.pool.metadata import StepPlan
from vllm_kvpool.pool.sides import ModelShape, RankPlace, WorkerSide
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.transfer.ops import JobId, LoadPlan, SavePlan

GEOMETRY = Geometry(heads=1, head_dim=288, tokens=4096)  # K and V of 288: a latent of 576
RANKS = 4
HOST_BYTES = 768 << 20
REPEATS, QUICK_REPEATS = 5, 1
LIMIT_S = 60.0


def gather_in(directory: Path, rank: int) -> Callable[[bytes], Sequence[bytes]]:
    """Ranks meet in a directory."""

    def gather(card: bytes) -> list[bytes]:
        (mine := directory / f"{rank}.new").write_bytes(card)
        mine.rename(directory / str(rank))
        others = [directory / str(each) for each in range(RANKS)]
        wait_until(lambda: all(path.exists() for path in others), LIMIT_S)
        return [path.read_bytes() for path in others]

    return gather


class ReplicaSide(PageKeeper):
    """One of the ranks; it meets the others in `directory`, if there is one."""

    def __init__(self, url: str, rank: int, ranks: int, directory: Path | None) -> None:
        super().__init__(GEOMETRY)
        torch.set_num_threads(1)
        span = default_layer_span(GEOMETRY.layers, GEOMETRY.row_bytes, GEOMETRY.chunk)
        model = ModelShape.of_one_kind(
            namespace=make_namespace(MODEL, "0" * 12),
            topology=Topology(1, ranks, ((0, GEOMETRY.layers),), span),
            block_size=GEOMETRY.block,
            num_blocks=GEOMETRY.num_blocks,
            num_ranks=ranks,
            row_bytes=GEOMETRY.row_bytes,
        )
        CpuCopier([]).warm_up()
        self._side = WorkerSide(
            KVPoolConfig(store=[f"host://{HOST_BYTES}", url], chunk_tokens=GEOMETRY.chunk),
            model,
            RankPlace(rank, 0, rank),
            [from_token_content(layer) for layer in self.pages],
            CpuCopier,
            finish_in_step=True,
            gather=None if directory is None else gather_in(directory, rank),
        )
        self._num_chunks = GEOMETRY.tokens // GEOMETRY.chunk
        self._jobs = 0

    def save(self, seeds: Sequence[int]) -> None:
        """Store prompts, and end."""
        for seed in seeds:
            self._jobs += 1
            hashes = chunk_hashes(seed, self._num_chunks)
            save = SavePlan(JobId(self._jobs), REQUEST, 0, hashes, self.all_pages())
            self._side.worker.start_saves(StepPlan(saves=(save,)))
            wait_until(lambda: self._counted("kvpool_queue_cells") == 0, LIMIT_S)
        self._side.close()

    def load(self, seed: int) -> tuple[float, float]:
        """Wall and CPU seconds."""
        self._jobs += 1
        hashes = chunk_hashes(seed, self._num_chunks)
        load = LoadPlan(
            *(JobId(self._jobs), REQUEST, 0, hashes, self.all_pages(), 0, GEOMETRY.tokens)
        )
        plan = StepPlan(loads=(load,), idle=True)
        began, cpu = time.perf_counter(), time.process_time()
        self._side.worker.start_loads(plan)
        while not (results := self._side.worker.finish_step(plan, set())).loaded:
            pass  # it sleeps while there is nothing
        if results.invalid_blocks:
            raise RuntimeError(f"{len(results.invalid_blocks)} blocks were not loaded")
        return time.perf_counter() - began, time.process_time() - cpu

    def fetched(self) -> float:
        """Bytes that came from files so far."""
        return self._counted("kvpool_bytes{direction=load,store=file")

    def held(self) -> float:
        """Bytes in the host tier."""
        return self._counted("kvpool_host_bytes")

    def _counted(self, start: str) -> float:
        samples = self._side.tally.snapshot().items()
        return sum(value for name, value in samples if name.startswith(start))

    def close(self) -> None:
        self._side.close()


@dataclass
class Side:
    """The ranks of one way, and what they have measured; by where the cells came from."""

    name: str
    ranks: list[Child]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    fetched: dict[str, list[float]] = field(default_factory=dict)

    def load(self, seed: int, source: str) -> None:
        before = self.total("fetched")
        for rank in self.ranks:
            rank.begin("load", seed)
        took = [rank.finish(LIMIT_S) for rank in self.ranks]
        self.seconds.setdefault(source, []).append(max(wall for wall, _ in took))
        self.cpu.setdefault(source, []).append(sum(cpu for _, cpu in took))
        self.fetched.setdefault(source, []).append(self.total("fetched") - before)

    def total(self, what: str) -> float:
        return float(sum(rank.call(what) for rank in self.ranks))

    def row(self, source: str, prompts: int) -> Row:
        moved = RANKS * GEOMETRY.total_bytes
        return {
            "ranks": self.name,
            "from": source,
            "fetched prompts": median(self.fetched[source]) / GEOMETRY.total_bytes,
            "held prompts": self.total("held") / prompts / GEOMETRY.total_bytes,
            "CPU s/GB": median(self.cpu[source]) / moved * 1e9,
            "ms": 1e3 * median(self.seconds[source]),
        }


def measure(quick: bool) -> Result:
    result = Result()
    repeats = QUICK_REPEATS if quick else REPEATS
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        directory = Path(name)
        url = f"file://{directory / 'pool'}?size=4GiB"
        writer = Child(ReplicaSide, url, 0, 1, None)
        with children(writer):
            writer.call("save", list(range(repeats + 1)), timeout_s=LIMIT_S)
        (meeting := directory / "meeting").mkdir()
        sides = [
            Side(what, [Child(ReplicaSide, url, rank, RANKS, where) for rank in range(RANKS)])
            for what, where in (("each for itself", None), ("one for all", meeting))
        ]
        with children(*(rank for side in sides for rank in side.ranks)):
            for seed in range(repeats + 1):
                for side in sides:
                    for source in ("files", "host memory"):
                        side.load(seed, source if seed else "warm-up")
            for side in sides:
                for rank in side.ranks:
                    rank.call("check")
            result.rows = [
                side.row(source, repeats + 1)
                for source in ("files", "host memory")
                for side in sides
            ]
    alone, shared = (float(str(row["fetched prompts"])) for row in result.rows[:2])
    result.targets.append(Target("bytes fetched by four replicas", shared / alone, 0.26, False))
    alone, shared = (float(str(row["held prompts"])) for row in result.rows[:2])
    result.targets.append(Target("host memory held by them", shared / alone, 0.26, False))
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
