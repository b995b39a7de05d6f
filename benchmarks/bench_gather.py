"""Gather and scatter on one CPU thread, against one memcpy of the same bytes in the same run.

    python benchmarks/bench_gather.py --json gather.json

`ratio` is two memcpys' time over that of a gather and a scatter. Repeats of the three are
interleaved and medians taken. Pages hold twice the tokens that are moved, in blocks drawn at
random; each call moves all heads of one chunk and span, as the lanes do.

`us_a_move` is the processor time of a move of one head, layer and chunk whose block table is that
of `table_tokens` tokens: it should not depend on them.
"""

import ctypes
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from benchmarks.common import LIMITED_BY, Result, Row, run_script
from benchmarks.limits import Meter
from vllm_kvpool.layout.page_formats import from_cpu_attention, from_token_content
from vllm_kvpool.layout.pages import LayerPages, SlabMove
from vllm_kvpool.staging.copy_cpu import LINE_BYTES, CpuCopier

NUM_LAYERS, LAYER_SPAN = 32, 8
NUM_HEADS, HEAD_DIM = 8, 128
CHUNK_TOKENS = 256
MOVES_A_CALL = 64
MEGABYTES, QUICK_MEGABYTES = 192, 32
REPEATS, QUICK_REPEATS = 7, 2
TABLE_TOKENS = (MOVES_A_CALL * CHUNK_TOKENS, 131_072)


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


def measure_tables(repeats: int) -> list[Row]:
    """One call moves a cell of each of the last 64 chunks of a request, for each length of it."""
    case = Case("LBHNC", "float16", 16)
    num_blocks = max(TABLE_TOKENS) // case.block
    pages = torch.ones((num_blocks, 1, case.block, 2 * HEAD_DIM), dtype=case.torch_dtype)
    copier = CpuCopier([from_token_content(pages)])
    cell_bytes = CHUNK_TOKENS * case.row_bytes
    slots = torch.zeros(MOVES_A_CALL * cell_bytes, dtype=torch.uint8)

    places = np.array([(0, 1, 0, 1)])

    def moves(num_tokens: int) -> list[SlabMove]:
        table = tuple(range(num_tokens // case.block))
        first = num_tokens - MOVES_A_CALL * CHUNK_TOKENS
        return [
            SlabMove(
                addresses=np.array([slots.data_ptr() + i * cell_bytes]),
                places=places,
                block_ids=table,
                table_start=0,
                chunk_start=start,
                chunk_tokens=CHUNK_TOKENS,
                token_start=start,
                token_stop=start + CHUNK_TOKENS,
            )
            for i, start in enumerate(range(first, num_tokens, CHUNK_TOKENS))
        ]

    def cpu_us(batch: list[SlabMove]) -> float:
        start = time.thread_time()
        copier.gather(batch)
        return (time.thread_time() - start) * 1e6 / MOVES_A_CALL

    batches = [moves(num_tokens) for num_tokens in TABLE_TOKENS]
    times = [[cpu_us(batch) for batch in batches] for _ in range(5 * repeats)]
    return [
        {"layout": case.layout, "dtype": case.dtype, "block": case.block}
        | {"table_tokens": num_tokens, "us_a_move": round(statistics.median(column), 1)}
        for num_tokens, column in zip(TABLE_TOKENS, zip(*times, strict=True), strict=True)
    ]


def measure(quick: bool) -> Result:
    torch.set_num_threads(1)
    CpuCopier([]).warm_up()  # compiling is not what is measured
    megabytes, repeats = (QUICK_MEGABYTES, QUICK_REPEATS) if quick else (MEGABYTES, REPEATS)
    rows = [measure_case(case, megabytes, repeats) for case in CASES]
    return Result(rows + measure_tables(repeats))


if __name__ == "__main__":
    run_script(__doc__, measure)
