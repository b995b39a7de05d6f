"""What ranks that hold the same KV fetch and keep, each for itself and one for all.

    python benchmarks/bench_replicas.py --json replicas.json

One, two and four ranks of an MLA model (one latent of 576 float16 for each token and layer, 16
layers), each a process with a host tier before files on this machine's disk. All of them load
prompts of 4,096 tokens: new ones from files, and again out of host memory. With `each for itself`
ranks do not know of each other, as on hosts of their own. Gets, bytes fetched and bytes held are of
all ranks together, for each prompt; a prompt has been loaded when the last rank has it. CPU seconds
are of all threads of the ranks, for each GB that comes into pages. Both ways take turns.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.common import (
    LIMITED_BY,
    Child,
    Result,
    Row,
    Target,
    children,
    percentile,
    run_script,
    wait_until,
)
from benchmarks.limits import Meter
from benchmarks.sides import MODEL, REQUEST, Geometry, PageKeeper, chunk_hashes
from vllm_kvpool.config import KVPoolConfig
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology, default_layer_span
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.transfer.ops import JobId, LoadPlan, SavePlan
from vllm_kvpool.worker.worker_part import WorkerPart

GEOMETRY = Geometry(heads=1, head_dim=288, tokens=4096)  # K and V of 288: a latent of 576
RANKS, QUICK_RANKS = (1, 2, 4), (2,)
HOST_BYTES = 1 << 30
REPEATS, QUICK_REPEATS = 4, 1
AGAIN = 5  # loads of a prompt out of host memory, after that from files
LIMIT_S = 60.0


def gather_in(directory: Path, rank: int, ranks: int) -> Callable[[bytes], Sequence[bytes]]:
    """Ranks meet in a directory."""

    def gather(card: bytes) -> list[bytes]:
        (mine := directory / f"{rank}.new").write_bytes(card)
        mine.rename(directory / str(rank))
        others = [directory / str(each) for each in range(ranks)]
        wait_until(lambda: all(path.exists() for path in others), LIMIT_S)
        return [path.read_bytes() for path in others]

    return gather


class ReplicaSide(PageKeeper):
    """One of the ranks; it meets the others in `directory`, if there is one."""

    def __init__(self, url: str, rank: int, ranks: int, directory: Path | None) -> None:
        super().__init__(GEOMETRY)
        torch.set_num_threads(1)
        span = default_layer_span(GEOMETRY.layers, GEOMETRY.row_bytes, GEOMETRY.chunk)
        topology = Topology(1, ranks, ((0, GEOMETRY.layers),), span)
        model = ModelShape(
            namespace=make_namespace(MODEL, "0" * 12),
            layer_groups=(LayerGroup(topology, GEOMETRY.row_bytes),),
            groups=(KVCacheGroup(GEOMETRY.block),),
            num_blocks=GEOMETRY.num_blocks,
            num_ranks=ranks,
        )
        CpuCopier([]).warm_up()
        self._part = WorkerPart(
            KVPoolConfig(store=(f"host://{HOST_BYTES}", url), chunk_tokens=GEOMETRY.chunk),
            model,
            RankPlace(rank, 0, rank),
            [from_token_content(layer) for layer in self.pages],
            CpuCopier,
            finish_in_step=True,
            gather=None if directory is None else gather_in(directory, rank, ranks),
        )
        self._num_chunks = GEOMETRY.tokens // GEOMETRY.chunk
        self._jobs = 0

    def save(self, seeds: Sequence[int]) -> None:
        """Store prompts, and end."""
        for seed in seeds:
            self._jobs += 1
            hashes = chunk_hashes(seed, self._num_chunks)
            save = SavePlan(JobId(self._jobs), REQUEST, 0, hashes, self.all_pages())
            self._part.worker.start_saves(StepPlan(saves=(save,)))
            wait_until(lambda: self._counted("kvpool_queue_cells") == 0, LIMIT_S)
        self._part.close()

    def load(self, seed: int) -> tuple[float, float]:
        """Wall and CPU seconds."""
        self._jobs += 1
        hashes = chunk_hashes(seed, self._num_chunks)
        load = LoadPlan(
            *(JobId(self._jobs), REQUEST, 0, hashes, self.all_pages(), 0, GEOMETRY.tokens)
        )
        plan = StepPlan(loads=(load,), idle=True)
        began, cpu = time.perf_counter(), time.process_time()
        self._part.worker.start_loads(plan)
        while not (results := self._part.worker.finish_step(plan, set())).loaded:
            pass  # it sleeps while there is nothing
        if results.invalid_blocks:
            raise RuntimeError(f"{len(results.invalid_blocks)} blocks were not loaded")
        return time.perf_counter() - began, time.process_time() - cpu

    def fetched(self) -> tuple[float, float]:
        """Cells and bytes that came from files so far."""
        labels = "{direction=load,store=file"
        return self._counted("kvpool_cells" + labels), self._counted("kvpool_bytes" + labels)

    def held(self) -> float:
        """Bytes in the host tier."""
        return self._counted("kvpool_host_bytes")

    def _counted(self, start: str) -> float:
        samples = self._part.registry.snapshot().items()
        return sum(value for name, value in samples if name.startswith(start))

    def close(self) -> None:
        self._part.close()


@dataclass(frozen=True)
class Loaded:
    """A prompt in the pages of all ranks; CPU seconds, gets and bytes are of all together."""

    seconds: float
    cpu: float
    gets: float
    nbytes: float


@dataclass
class Side:
    """The ranks of one way, and what they have measured; by where the cells came from."""

    name: str
    ranks: list[Child]
    loads: dict[str, list[Loaded]] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)

    def load(self, seed: int, source: str) -> None:
        before = self.fetched()
        with self.meter.of(source):
            for rank in self.ranks:
                rank.begin("load", seed)
            took = [rank.finish(LIMIT_S) for rank in self.ranks]
        gets, nbytes = (now - then for now, then in zip(self.fetched(), before, strict=True))
        loaded = Loaded(max(wall for wall, _ in took), sum(cpu for _, cpu in took), gets, nbytes)
        self.loads.setdefault(source, []).append(loaded)

    def fetched(self) -> tuple[float, float]:
        counts = [rank.call("fetched") for rank in self.ranks]
        return sum(gets for gets, _ in counts), sum(nbytes for _, nbytes in counts)

    def held(self) -> float:
        return float(sum(rank.call("held") for rank in self.ranks))

    def row(self, source: str, prompts: int) -> Row:
        loads = self.loads[source]
        ms = [1e3 * each.seconds for each in loads]
        return {
            "ranks": len(self.ranks),
            "way": self.name,
            "from": source,
            "gets": round(median(each.gets for each in loads)),
            "MB fetched": median(each.nbytes for each in loads) / 1e6,
            "MB held": self.held() / prompts / 1e6,
            "CPU s/GB": sum(each.cpu for each in loads)
            / (len(loads) * len(self.ranks) * GEOMETRY.total_bytes)
            * 1e9,
            "mean ms": mean(ms),
            "p99 ms": percentile(ms, 0.99),
            LIMITED_BY: self.meter.limited_by(source),
        }


def compare(url: str, ranks: int, repeats: int, meeting: Path) -> list[Row]:
    """Rows of so many ranks, both ways; from files first."""
    meeting.mkdir()
    sides = [
        Side(way, [Child(ReplicaSide, url, rank, ranks, where) for rank in range(ranks)])
        for way, where in (("each for itself", None), ("one for all", meeting))
    ]
    with children(*(rank for side in sides for rank in side.ranks)):
        for seed in range(repeats + 1):
            order = sides if seed % 2 else sides[::-1]  # whoever is first pays for cold caches
            for side in order:
                side.load(seed, "files" if seed else "warm-up")
            for _ in range(AGAIN if seed else 1):
                for side in order:
                    side.load(seed, "host memory" if seed else "warm-up")
        for side in sides:
            for rank in side.ranks:
                rank.call("check")
        return [
            side.row(source, repeats + 1) for source in ("files", "host memory") for side in sides
        ]


def measure(quick: bool) -> Result:
    result = Result()
    repeats = QUICK_REPEATS if quick else REPEATS
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        directory = Path(name)
        url = f"file://{directory / 'pool'}?size=4GiB"
        writer = Child(ReplicaSide, url, 0, 1, None)
        with children(writer):
            writer.call("save", list(range(repeats + 1)), timeout_s=LIMIT_S)
        for ranks in QUICK_RANKS if quick else RANKS:
            rows = compare(url, ranks, repeats, directory / f"meeting-{ranks}")
            result.rows += rows
            if ranks == 1:
                continue
            for what, column in (("bytes fetched", "MB fetched"), ("host memory held", "MB held")):
                alone, shared = (float(str(row[column])) for row in rows[:2])
                what = f"{what} by {ranks} replicas, over each for itself"
                result.targets.append(Target(what, shared / alone, 1.04 / ranks, False))
    result.notes.append(
        "At one rank both ways are the same code: what its two rows differ by is noise, and CPU "
        "seconds and times of more ranks say no more than that."
    )
    return result


if __name__ == "__main__":
    run_script(__doc__, measure)
