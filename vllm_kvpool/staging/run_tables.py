"""Page formats as the tables and tile sizes that the Triton kernel works by (pure).

Runs that can be moved by the same compiled kernel, in units of the same size, form one table; most
models have one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from vllm_kvpool.layout.pages import LayerPages, Run

UNITS = (16, 8, 4, 2, 1)  # bytes that a thread moves at a time; 16 is the widest on a GPU
WORD_BYTES = 8  # the widest integer
TILE_BYTES = 16 << 10  # 128 threads with eight accesses each on their way
SEGMENT_BYTES = 128  # of a row that are worth an access of their own: a GPU's cache line
NUM_COLUMNS = 12


@dataclass(frozen=True, slots=True)
class RunTable:
    """Rows of `[layers][runs_per_layer][NUM_COLUMNS]`; a layer without such a run has empty ones.

    Every address, stride and size is a multiple of `unit_bytes`, a power of two.
    """

    rows: "np.ndarray[Any, np.dtype[np.int64]]"
    runs_per_layer: int
    unit_bytes: int
    is_strided: bool
    max_words: int
    tile_tokens: int
    tile_words: int

    @property
    def word_bytes(self) -> int:
        return min(self.unit_bytes, WORD_BYTES)


def run_tables(layers: Sequence[LayerPages], alignment: int = max(UNITS)) -> list[RunTable]:
    """The tables for payloads that begin at multiples of `alignment`, a power of two."""
    alignment = math.gcd(alignment, *(pages.row_bytes for pages in layers))
    kinds: dict[tuple[int, bool], dict[int, list[Run]]] = {}
    for index, pages in enumerate(layers):
        for run in pages.runs:
            kind = (unit_bytes(run, alignment), is_strided(run))
            kinds.setdefault(kind, {}).setdefault(index, []).append(run)
    return [_table(layers, runs, *kind) for kind, runs in kinds.items()]


def is_strided(run: Run) -> bool:
    """Whether the elements of a row lie apart in the page."""
    return run.num_elems > 1 and run.elem_stride != run.elem_bytes


def unit_bytes(run: Run, alignment: int) -> int:
    """The largest unit, up to `alignment`, that the run can be moved in."""
    sizes = [run.base, run.block_stride, run.head_stride, run.token_stride, run.row_offset]
    if is_strided(run):
        sizes += [run.elem_stride, run.elem_bytes]
    return math.gcd(alignment, max(UNITS), run.nbytes, *sizes)


def tile_words(num_words: int, word_bytes: int) -> int:
    """A power of two of which few are needed for a run, and little of the last one is wasted."""
    widest = 1 << (num_words - 1).bit_length()
    narrowest = min(widest, SEGMENT_BYTES // word_bytes)
    sizes = [narrowest << i for i in range((widest // narrowest).bit_length())]
    return min(sizes, key=lambda size: (-(-num_words // size) * size, -size))


def _table(
    layers: Sequence[LayerPages], runs: dict[int, list[Run]], unit: int, strided: bool
) -> RunTable:
    word = min(unit, WORD_BYTES)
    runs_per_layer = max(map(len, runs.values()))
    max_words = max(run.nbytes for some in runs.values() for run in some) // word
    columns = min(tile_words(max_words, word), TILE_BYTES // word)
    rows = np.zeros((len(layers), runs_per_layer, NUM_COLUMNS), np.int64)
    before = accumulate((pages.row_bytes for pages in layers), initial=0)
    for index, (pages, bytes_before) in enumerate(zip(layers, before, strict=False)):
        empty = Run(0, 0, 0, 0, 0, 0, 0, 0)
        own = runs.get(index, [])
        padded = [*own, *[empty] * (runs_per_layer - len(own))]
        for row, run in enumerate(padded):
            rows[index, row] = _columns(pages, run, bytes_before, word)
    return RunTable(
        rows=rows.reshape(-1),
        runs_per_layer=runs_per_layer,
        unit_bytes=unit,
        is_strided=strided,
        max_words=max_words,
        tile_tokens=TILE_BYTES // word // columns,
        tile_words=columns,
    )


def _columns(pages: LayerPages, run: Run, bytes_before: int, word: int) -> list[int]:
    """In the order of `move_kernel.py`."""
    in_bytes = (
        *(run.block_stride, run.head_stride, run.token_stride),
        *((run.elem_stride, run.elem_bytes) if is_strided(run) else (0, 0)),
        *(run.nbytes, run.row_offset, pages.row_bytes, bytes_before),
    )
    in_words = (nbytes // word for nbytes in in_bytes)
    return [run.base, *in_words, pages.tokens_per_block, pages.blocks_per_id]
