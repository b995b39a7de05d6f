"""Cells: copied, sealed, of recurrent states, one a rank, and held by several ranks.

    python benchmarks/bench_cells.py gather|states|encryption|storage_mode|replicas [--json FILE]

Each compares two ways to make, move or keep the same bytes, which take turns.
"""

import ctypes
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import numpy as np
import torch

import tests.support.memory_store  # noqa: F401  (its scheme)
from benchmarks.common import (
    LIMITED_BY,
    Child,
    Result,
    Row,
    Target,
    children,
    interleaved,
    percentile,
    run_script,
    wait_until,
)
from benchmarks.limits import Meter
from benchmarks.sides import Geometry, Holder, OurSide
from tests.support.buffers import make_buffer
from tests.support.memory_store import MemoryStore
from tests.support.mooncake_master import MooncakeMaster
from vllm_kvpool.config import read_config
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import key_digest, make_namespace
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.page_formats import from_cpu_attention, from_state, from_token_content
from vllm_kvpool.layout.pages import LayerPages, SlabMove
from vllm_kvpool.layout.states import StateForm, WindowPart
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.scheduler.blocks import NO_PAGES, state_page
from vllm_kvpool.scheduler.lookup import Lookup
from vllm_kvpool.scheduler.lookup_service import LookupService
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.staging.copy_cpu import LINE_BYTES, CpuCopier
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome, map_buffer
from vllm_kvpool.storage.contents.cell_format import verify, write_header
from vllm_kvpool.storage.contents.encryption import CellCipher, EncryptedCells
from vllm_kvpool.storage.url import parse_store_url
from vllm_kvpool.transfer.ops import JobId, JobPages, LoadPlan, SavePlan
from vllm_kvpool.worker.worker_part import WorkerPart

# Copies between pages and cells

NUM_LAYERS, LAYER_SPAN = 32, 8
NUM_HEADS, HEAD_DIM = 8, 128
CHUNK_TOKENS = 256
MEGABYTES, QUICK_MEGABYTES = 192, 32
COPIES, QUICK_COPIES = 7, 2


@dataclass(frozen=True)
class Case:
    """Pages of one kind; `layout` is `LBNHC`, `LBHNC` or `cpu` for CPU attention's."""

    layout: str
    dtype: str
    block: int

    @property
    def row_bytes(self) -> int:
        return 2 * HEAD_DIM * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def layers(self, num_blocks: int) -> list[LayerPages]:
        heads_and_tokens = [NUM_HEADS, self.block]
        if self.layout == "LBNHC":
            heads_and_tokens.reverse()
        shape = (NUM_LAYERS, num_blocks, *heads_and_tokens, 2 * HEAD_DIM)
        pages = torch.ones(shape, dtype=self.torch_dtype)
        if self.layout == "LBNHC":
            pages = pages.transpose(2, 3)
        if self.layout == "cpu":
            return [from_cpu_attention(layer, HEAD_DIM, HEAD_DIM) for layer in pages]
        return [from_token_content(layer) for layer in pages]


CASES = (
    Case("LBNHC", "float16", 16),
    Case("LBNHC", "float16", 128),
    Case("LBHNC", "float16", 16),
    Case("LBHNC", "float16", 128),
    Case("cpu", "float32", 128),
    Case("cpu", "bfloat16", 128),
    Case("cpu", "bfloat16", 32),
)


def calls(case: Case, address: int, num_chunks: int, num_blocks: int) -> list[list[SlabMove]]:
    """The moves of each call; the slots follow one another from `address`."""
    blocks_per_chunk = CHUNK_TOKENS // case.block
    ids = random.Random(0).sample(range(num_blocks), num_chunks * blocks_per_chunk)
    cell_bytes = LAYER_SPAN * CHUNK_TOKENS * case.row_bytes
    templates = [
        np.array([(layer, layer + LAYER_SPAN, head, head + 1) for head in range(NUM_HEADS)])
        for layer in range(0, NUM_LAYERS, LAYER_SPAN)
    ]
    result = []
    for chunk in range(num_chunks):
        table = ids[chunk * blocks_per_chunk : (chunk + 1) * blocks_per_chunk]
        start, stop = chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS
        for places in templates:
            addresses = address + cell_bytes * np.arange(NUM_HEADS)
            rows = start, start, CHUNK_TOKENS, start, stop
            result.append([SlabMove(addresses, places, table, *rows)])
            address += NUM_HEADS * cell_bytes
    return result


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure_case(case: Case, megabytes: int, repeats: int) -> Row:
    meter = Meter()
    chunk_bytes = NUM_LAYERS * NUM_HEADS * CHUNK_TOKENS * case.row_bytes
    num_chunks = max(1, megabytes * 2**20 // chunk_bytes)
    total = num_chunks * chunk_bytes
    num_blocks = 2 * num_chunks * CHUNK_TOKENS // case.block
    copier = CpuCopier(case.layers(num_blocks))
    slots = torch.zeros(total + LINE_BYTES, dtype=torch.uint8)
    aligned = -(-slots.data_ptr() // LINE_BYTES) * LINE_BYTES
    batches = calls(case, aligned, num_chunks, num_blocks)
    source, target = torch.ones(total, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)

    def gather() -> None:
        for moves in batches:
            copier.gather(moves)

    def scatter() -> None:
        for moves in batches:
            copier.scatter(moves)

    def memcpy() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), total)

    actions = (memcpy, gather, scatter)
    for action in actions:  # the first touches of fresh memory are not what is measured
        action()
    with meter.of("all"):
        times = [[seconds(action) for action in actions] for _ in range(repeats)]
    copy_s, gather_s, scatter_s = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = 2 * copy_s / (gather_s + scatter_s)
    return {
        **asdict(case),
        "moved_mib": total // 2**20,
        "memcpy_gbs": round(total / copy_s / 1e9, 2),
        "gather_gbs": round(total / gather_s / 1e9, 2),
        "scatter_gbs": round(total / scatter_s / 1e9, 2),
        "ratio": round(ratio, 2),
        LIMITED_BY: meter.limited_by("all", {"memory": ratio}),
    }


def bench_gather(quick: bool) -> Result:
    """Gather and scatter on one CPU thread, against one memcpy of the same bytes in the same run.

    `ratio` is two memcpys' time over that of a gather and a scatter. Repeats of the three are
    interleaved and medians taken. Pages hold twice the tokens that are moved, in blocks drawn at
    random; each call moves all heads of one chunk and span, as the lanes do.
    """
    torch.set_num_threads(1)
    CpuCopier([]).warm_up()  # compiling is not what is measured
    megabytes, repeats = (QUICK_MEGABYTES, QUICK_COPIES) if quick else (MEGABYTES, COPIES)
    return Result([measure_case(case, megabytes, repeats) for case in CASES])


# Recurrent states

HEADS, ROW_BYTES, ATTENTION_LAYERS = 2, 2 * 256 * 2, 12
UNITS, STATE_LAYERS, SPAN = 16, 36, 9
# Of one key head of 128 with two value heads of 128, in bfloat16: three rows, and two matrices.
FORM = StateForm(
    num_units=UNITS,
    window_rows=3,
    item_bytes=2,
    parts=(WindowPart(128), WindowPart(128), WindowPart(256)),
    recurrent_bytes=2 * 128 * 128 * 2,
)
NUM_BLOCKS = 4
STATE_REPEATS, QUICK_STATE_REPEATS = 15, 2
LIMIT_S = 30.0
GROUPS = (
    LayerGroup(
        Topology(HEADS, 1, ((0, ATTENTION_LAYERS),), 3, layer_group="full-2x1024"), ROW_BYTES
    ),
    LayerGroup(
        Topology(UNITS, 1, ((0, STATE_LAYERS),), SPAN, layer_group="state-gdn-16x68608"),
        FORM.row_bytes,
        is_state=True,
    ),
)


class Took(NamedTuple):
    """Seconds of the clock, and of this process's threads on cores."""

    wall: float
    cpu: float


class StateSide:
    """A rank's worker side with the pages of four blocks of either kind."""

    def __init__(self, store: str, url: str) -> None:
        self.store = store
        rows = torch.ones(
            ATTENTION_LAYERS, NUM_BLOCKS, HEADS, CHUNK_TOKENS, ROW_BYTES, dtype=torch.uint8
        )
        nbytes = UNITS * FORM.row_bytes
        states = torch.ones(STATE_LAYERS, NUM_BLOCKS, 1, 1, nbytes, dtype=torch.uint8)
        pages = [from_token_content(layer) for layer in rows]
        pages += [replace(from_state(layer, FORM, UNITS), group=1) for layer in states]
        options = {"store": url, "chunk_tokens": CHUNK_TOKENS, "staging_bytes": "256MiB"}
        self._part = WorkerPart(
            read_config(options, env={}),
            ModelShape(
                namespace=make_namespace("states", "0" * 12),
                layer_groups=GROUPS,
                groups=(KVCacheGroup(CHUNK_TOKENS), KVCacheGroup(CHUNK_TOKENS, is_state=True)),
                num_blocks=NUM_BLOCKS,
                num_ranks=1,
            ),
            RankPlace(0, 0, 0),
            pages,
            CpuCopier,
            finish_in_step=True,
        )
        self._number = 0

    def round(self, *, is_state: bool) -> tuple[Took, Took]:
        """What it took to save, and then to load, one boundary's states or one chunk's cells."""
        self._number += 1
        job, request = JobId(self._number), f"r{self._number}"
        hashes = (self._number.to_bytes(16, "big"),)
        block = self._number % NUM_BLOCKS
        cells, state = JobPages((block,), 0, 0, CHUNK_TOKENS), state_page(block, CHUNK_TOKENS)
        pages = (NO_PAGES, state) if is_state else (cells, NO_PAGES)
        save = StepPlan(saves=(SavePlan(job, request, 0, hashes, pages, is_state=is_state),))
        load = StepPlan(
            loads=(LoadPlan(job, request, 0, hashes, pages, 0, CHUNK_TOKENS),), idle=True
        )
        return self._timed(save, job), self._timed(load, request)

    def _timed(self, plan: StepPlan, awaited: JobId | str) -> Took:
        worker = self._part.worker
        wall, cpu = time.perf_counter(), time.process_time()
        worker.start_loads(plan)
        worker.start_saves(plan)

        def is_over() -> bool:
            results = worker.finish_step(plan, set())
            assert not results.invalid_blocks, "a load has failed"
            report = worker.take_report()
            return awaited in results.loaded or (report is not None and awaited in report.stored)

        wait_until(is_over, LIMIT_S)
        return Took(time.perf_counter() - wall, time.process_time() - cpu)

    def close(self) -> None:
        self._part.close()


def bench_states(quick: bool) -> Result:
    """A recurrent state's save and load, beside those of the attention cells of one chunk.

    The sizes are Qwen3-Next-80B's on one rank: 36 layers with gated delta networks, whose states
    are cut into 16 units, and 12 with attention over 2 heads. The worker side saves and loads the
    states at one boundary or the cells of one chunk at a time, in turns, over memory and over files
    on this machine's disk (checksums on). A save ends when the store has it, a load when its pages
    are filled. A prompt has states at one boundary or two, and cells for every 256 tokens.
    """
    result = Result()
    with tempfile.TemporaryDirectory(prefix="bench") as directory:
        sides = [
            StateSide("memory", "memory://bench-states?size=4GiB"),
            StateSide("file", f"file://{Path(directory) / 'pool'}?size=8GiB"),
        ]
        for side in sides:
            actions = {
                "cells of a chunk": lambda side=side: side.round(is_state=False),
                "states at a boundary": lambda side=side: side.round(is_state=True),
            }
            interleaved(actions, 1)  # first touches of memory
            meter, repeats = Meter(), QUICK_STATE_REPEATS if quick else STATE_REPEATS
            for what, took in interleaved(actions, repeats, meter).items():
                group = GROUPS[what.startswith("states")]
                spans, shards = group.topology.all_spans(), group.topology.all_shards()
                nbytes = len(shards) * sum(
                    group.payload_bytes(span, CHUNK_TOKENS) for span in spans
                )
                saves, loads = zip(*took, strict=True)
                result.rows.append(
                    {
                        "store": side.store,
                        "what": what,
                        "cells": len(spans) * len(shards),
                        "MiB": nbytes / 2**20,
                        "save ms": 1e3 * median(each.wall for each in saves),
                        "save GB/s": nbytes / median(each.wall for each in saves) / 1e9,
                        "save CPU ms": 1e3 * median(each.cpu for each in saves),
                        "load ms": 1e3 * median(each.wall for each in loads),
                        "load GB/s": nbytes / median(each.wall for each in loads) / 1e9,
                        "load CPU ms": 1e3 * median(each.cpu for each in loads),
                        LIMITED_BY: meter.limited_by(what),
                    }
                )
            side.close()
    return result


# Encryption

BATCH_BYTES = 16 << 20
ROUNDS, QUICK_ROUNDS = 40, 5
CELL_KIB = (256, 1024)
MOST_CIPHER = 3.0  # times the processor time of a plain save and load


class CipherSide:
    """Saves a batch of cells and loads it again; encrypted or plain."""

    def __init__(self, cell_bytes: int, *, encrypts: bool) -> None:
        count = BATCH_BYTES // cell_bytes
        self.keys = [f"cell-{i}" for i in range(count)]
        self.digests = [key_digest(key) for key in self.keys]
        memory, self.copy = map_buffer(BATCH_BYTES), map_buffer(BATCH_BYTES)
        memory.view[:] = b"\x5a" * BATCH_BYTES
        self.buffers = cut(memory, cell_bytes)
        self.copies = cut(self.copy, cell_bytes)
        self.store = MemoryStore("", 4 * BATCH_BYTES)
        self.cells = EncryptedCells(CellCipher([bytes(32)]), [self.store]) if encrypts else None
        self.cipher = CellCipher([bytes(32)])
        self.chunks = [ChunkRef(key) for key in self.keys]

    def save_and_load(self) -> tuple[float, float]:
        """CPU seconds a GB of a save and of a load."""
        return cpu_s_per_gb(self._save), cpu_s_per_gb(self._load)

    def seal_and_check(self) -> tuple[float, float]:
        """CPU seconds a GB without the store."""
        return cpu_s_per_gb(self._seal), cpu_s_per_gb(self._check)

    def _save(self) -> None:
        if self.cells is not None:
            outcomes = self.cells.put(0, self.keys, self.buffers, self.chunks)
        else:
            for buffer, digest in zip(self.buffers, self.digests, strict=True):
                write_header(buffer.view, digest)
            outcomes = self.store.put(self.keys, self.buffers, self.chunks)
        assert set(outcomes) == {PutOutcome.STORED}

    def _load(self) -> None:
        assert set(self.store.get(self.keys, self.buffers)) == {GetOutcome.OK}
        for key, digest, buffer in zip(self.keys, self.digests, self.buffers, strict=True):
            fault = (
                verify(buffer.view, digest, checksum=True)
                if self.cells is None
                else self.cells.decrypt(key, buffer.view)
            )
            assert fault is None, fault
        self.store.remove(self.keys)

    def _seal(self) -> None:
        for key, digest, buffer, copy in zip(
            self.keys, self.digests, self.buffers, self.copies, strict=True
        ):
            if self.cells is None:
                write_header(buffer.view, digest)
            else:
                self.cipher.encrypt(key, buffer.view, copy.view)

    def _check(self) -> None:
        for key, digest, buffer, copy in zip(
            self.keys, self.digests, self.buffers, self.copies, strict=True
        ):
            if self.cells is None:
                fault = verify(buffer.view, digest, checksum=True)
            else:
                fault = self.cipher.decrypt(key, copy.view)
            assert fault is None, fault


def cut(memory: Buffer, cell_bytes: int) -> list[Buffer]:
    """Cells side by side."""
    return [memory.part(at, at + cell_bytes) for at in range(0, memory.nbytes, cell_bytes)]


def cpu_s_per_gb(action: Callable[[], None]) -> float:
    """Processor time of an action on a batch."""
    began = time.process_time()
    action()
    return (time.process_time() - began) / BATCH_BYTES * 1e9


def bench_encryption(quick: bool) -> Result:
    """Encrypted cells beside plain ones: processor time of a save and a load, seconds a GB.

    Through a rank's real lanes (SEAL and PUT, then GET and CHECK) over a store in memory, so a GB
    is also copied once in the put and once in the get. The first two columns are sealing and
    checking alone, without store. Cells are 256 KiB or 1 MiB, 16 MiB a batch, and change between
    rounds.
    """
    result = Result()
    for kib in CELL_KIB:
        sides = {
            name: CipherSide(kib << 10, encrypts=name == "encrypted")
            for name in ("plain", "encrypted")
        }
        rounds = QUICK_ROUNDS if quick else ROUNDS
        alone = interleaved({name: side.seal_and_check for name, side in sides.items()}, rounds)
        whole = interleaved({name: side.save_and_load for name, side in sides.items()}, rounds)
        for name in sides:
            row: Row = {"cell": f"{kib} KiB", "cells are": name}
            for what, times in (("alone", alone), ("with store", whole)):
                for i, call in enumerate(("save", "load")):
                    row[f"{call} {what}, CPU s/GB"] = round(median(t[i] for t in times[name]), 3)
            result.rows.append(row)
        for i, call in enumerate(("save", "load")):
            pairs = zip(whole["encrypted"], whole["plain"], strict=True)
            ratio = median(mine[i] / plain[i] for mine, plain in pairs)
            what = f"{kib} KiB, {call} with encryption over plain: processor time"
            result.targets.append(Target(what, ratio, MOST_CIPHER, at_least=False))
    return result


# One cell a rank

GEOMETRY = Geometry(block=16)
LOOKUP_TOKENS = 16_384
ASKED_BYTES = 64
SEGMENT_BYTES = 1 << 30
MODE_REPEATS, QUICK_MODE_REPEATS = 5, 1
LOOKUPS_PER_REPEAT = 5


class Asker:
    """Stores the keys of a prompt but its last chunk's, and looks the prompt up."""

    def __init__(self, url: str, per_head: bool) -> None:
        self._store = open_store(parse_store_url(url), segment=True)
        namespace = make_namespace("lookup", "0" * 12)
        names = CellNames(namespace, [LayerGroup(GEOMETRY.topology(per_head), GEOMETRY.row_bytes)])
        self._tokens = list(range(LOOKUP_TOKENS))
        chain = ChunkChain(GEOMETRY.chunk, RequestIdentity())
        chain.extend(self._tokens)
        self._stored = len(chain) - 1
        keys = [key for chunk in chain.hashes[: self._stored] for key in names.of_chunk(chunk)]
        self._put([str(key) for key in keys])
        self._lookups = LookupService((self._store,), names, GEOMETRY.chunk)

    def _put(self, keys: Sequence[str]) -> None:
        buffer = make_buffer(ASKED_BYTES)
        self._store.register(buffer)
        self._store.put(keys, [buffer] * len(keys), [ChunkRef(key) for key in keys])
        assert all(self._store.exists(keys))

    def lookup(self) -> list[float]:
        """Milliseconds from the question to the answer."""
        times = []
        for lookup_id in range(LOOKUPS_PER_REPEAT):
            deadline = time.monotonic() + LIMIT_S
            start = time.perf_counter()
            self._lookups.submit(
                Lookup(lookup_id, RequestIdentity, self._tokens, True, 0, deadline, deadline)
            )
            self._lookups.wait(LIMIT_S)
            times.append(1e3 * (time.perf_counter() - start))
            (answer,) = self._lookups.take_results()
            assert answer.found_chunks == self._stored, answer
        return times


class Mode:
    """The processes of one store and mode, and what they have measured."""

    def __init__(self, store: str, mover_url: str, asker_url: str, per_head: bool) -> None:
        self.store, self.per_head = store, per_head
        self.mover = Child(OurSide, mover_url, GEOMETRY, per_head)
        self.asker = Child(Asker, asker_url, per_head)
        self.saves: list[float] = []
        self.loads: list[float] = []
        self.lookups: list[float] = []
        self.meter = Meter()

    def round(self, number: int) -> None:
        """The first one warms up and compares bytes."""
        seed = 2 * number + self.per_head
        with self.meter.of("moves" if number else "warm-up"):
            saved = self.mover.call("save", seed, LIMIT_S)
            if number == 0:
                self.mover.call("wipe")
            loaded = self.mover.call("load", seed, LIMIT_S)
        looked_up = self.asker.call("lookup")
        if number == 0:
            self.mover.call("check")
            return
        self.saves.append(saved)
        self.loads.append(loaded)
        self.lookups += looked_up

    def row(self) -> Row:
        cells, cell_bytes = GEOMETRY.cells(self.per_head)
        save, load = median(self.saves), median(self.loads)
        return {
            "store": self.store,
            "cells": "per head" if self.per_head else "per rank",
            "number": cells,
            "KiB each": cell_bytes / 1024,
            "save ms": 1e3 * save,
            "save GB/s": GEOMETRY.total_bytes / save / 1e9,
            "load ms": 1e3 * load,
            "load GB/s": GEOMETRY.total_bytes / load / 1e9,
            "lookup ms": median(self.lookups),
            LIMITED_BY: self.meter.limited_by("moves"),
        }


def bench_storage_mode(quick: bool) -> Result:
    """What `per_head_storage: false` costs or saves: one cell per rank beside one per head.

    Without tensor parallelism, so that a rank's cell holds all 8 heads: the modes move the same
    bytes in as many or an eighth as many cells. Save and load of a 64 MiB prompt through the worker
    side (checksums on; over Mooncake's TCP between two processes, and over files on this machine's
    disk), and the lookup of a 16,384-token prompt of which all but the last chunk are stored, as
    the probe does it: from the question to its answer, hashing included. Repeats of all four take
    turns; `limited by` is about saves and loads.
    """
    result = Result()
    repeats = QUICK_MODE_REPEATS if quick else MODE_REPEATS
    with MooncakeMaster() as master, tempfile.TemporaryDirectory(prefix="bench") as directory:
        cluster = f"mooncake://{master.address}?segment="
        holder = Child(Holder, master.address, SEGMENT_BYTES).wait_ready()
        modes = []
        for per_head in (True, False):
            # Else a put could land in the asker's own memory, which is no part of this.
            modes.append(Mode("mooncake", f"{cluster}0", f"{cluster}0", per_head))
            files = f"file://{Path(directory) / str(per_head)}?size=4GiB"
            modes.append(Mode("file", files, files, per_head))
        with children(holder, *(child for m in modes for child in (m.mover, m.asker))):
            for number in range(repeats + 1):
                for mode in modes:
                    mode.round(number)
                    # Memory that no prompt has been in would cost the next save more.
                    holder.call("remove_prompts")
    result.rows = [mode.row() for mode in sorted(modes, key=lambda mode: mode.store)]
    add_ratios(result.rows)
    return result


def add_ratios(rows: list[Row]) -> None:
    """In the rows of cells per rank: their time over that of cells per head."""
    for per_head, per_rank in zip(rows[::2], rows[1::2], strict=True):
        for what in ("save ms", "load ms", "lookup ms"):
            per_rank[f"{what} ratio"] = float(str(per_rank[what])) / float(str(per_head[what]))


# Ranks that hold the same KV

LATENT = Geometry(heads=1, head_dim=288, tokens=4096)  # K and V of 288: a latent of 576
RANK_COUNTS, QUICK_RANK_COUNTS = (2, 4), (2,)
HOST_BYTES = 1 << 30
PROMPTS, QUICK_PROMPTS = 4, 1
AGAIN = 5  # loads of a prompt out of host memory, after that from files
REPLICA_LIMIT_S = 60.0


def gather_in(directory: Path, rank: int, ranks: int) -> Callable[[bytes], Sequence[bytes]]:
    """Ranks meet in a directory."""

    def gather(card: bytes) -> list[bytes]:
        (mine := directory / f"{rank}.new").write_bytes(card)
        mine.rename(directory / str(rank))
        others = [directory / str(each) for each in range(ranks)]
        wait_until(lambda: all(path.exists() for path in others), REPLICA_LIMIT_S)
        return [path.read_bytes() for path in others]

    return gather


class ReplicaSide(OurSide):
    """One of the ranks; it meets the others in `directory`, if there is one."""

    def __init__(self, url: str, rank: int, ranks: int, directory: Path | None) -> None:
        super().__init__(
            (f"host://{HOST_BYTES}", url),
            LATENT,
            rank=rank,
            ranks=ranks,
            gather=None if directory is None else gather_in(directory, rank, ranks),
        )

    def store(self, seeds: Sequence[int]) -> None:
        """Store prompts, and end."""
        for seed in seeds:
            self.save(seed, REPLICA_LIMIT_S)
        self.close()

    def load_and_count(self, seed: int) -> tuple[float, float]:
        """Wall and CPU seconds."""
        cpu = time.process_time()
        took = self.load(seed, REPLICA_LIMIT_S)
        return took, time.process_time() - cpu

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


@dataclass(frozen=True)
class Loaded:
    """A prompt in the pages of all ranks; CPU seconds, gets and bytes are of all together."""

    seconds: float
    cpu: float
    gets: float
    nbytes: float


@dataclass
class Ranks:
    """The ranks of one way, and what they have measured; by where the cells came from."""

    name: str
    ranks: list[Child]
    loads: dict[str, list[Loaded]] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)

    def load(self, seed: int, source: str) -> None:
        before = self.fetched()
        with self.meter.of(source):
            for rank in self.ranks:
                rank.begin("load_and_count", seed)
            took = [rank.finish(REPLICA_LIMIT_S) for rank in self.ranks]
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
            / (len(loads) * len(self.ranks) * LATENT.total_bytes)
            * 1e9,
            "mean ms": mean(ms),
            "p99 ms": percentile(ms, 0.99),
            LIMITED_BY: self.meter.limited_by(source),
        }


def ranks_rows(url: str, ranks: int, repeats: int, meeting: Path) -> list[Row]:
    """Rows of so many ranks, both ways; from files first."""
    meeting.mkdir()
    sides = [
        Ranks(way, [Child(ReplicaSide, url, rank, ranks, where) for rank in range(ranks)])
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


def bench_replicas(quick: bool) -> Result:
    """What ranks that hold the same KV fetch and keep, each for itself and one for all.

    Two and four ranks of an MLA model (one latent of 576 float16 for each token and layer, 16
    layers), each a process with a host tier before files on this machine's disk. All of them load
    prompts of 4,096 tokens: new ones from files, and again out of host memory. With `each for
    itself` ranks do not know of each other, as on hosts of their own. Gets, bytes fetched and bytes
    held are of all ranks together, for each prompt; a prompt has been loaded when the last rank has
    it. CPU seconds are of all threads of the ranks, for each GB that comes into pages. Both ways
    take turns.
    """
    result = Result()
    repeats = QUICK_PROMPTS if quick else PROMPTS
    with tempfile.TemporaryDirectory(prefix="bench") as name:
        directory = Path(name)
        url = f"file://{directory / 'pool'}?size=4GiB"
        writer = Child(ReplicaSide, url, 0, 1, None)
        with children(writer):
            writer.call("store", list(range(repeats + 1)), timeout_s=REPLICA_LIMIT_S)
        for ranks in QUICK_RANK_COUNTS if quick else RANK_COUNTS:
            rows = ranks_rows(url, ranks, repeats, directory / f"meeting-{ranks}")
            result.rows += rows
            for what, column in (("bytes fetched", "MB fetched"), ("host memory held", "MB held")):
                alone, shared = (float(str(row[column])) for row in rows[:2])
                what = f"{what} by {ranks} replicas, over each for itself"
                result.targets.append(Target(what, shared / alone, 1.04 / ranks, False))
    return result


if __name__ == "__main__":
    run_script(__doc__)
