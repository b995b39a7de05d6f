"""Tables of the Triton kernel (pure; imports neither torch nor Triton).

* Page formats as tables of runs. Runs that one compiled kernel can move, in units of one size, form
  one table; most models have one.
* Cells cut into fragments that are contiguous in their payload and fit a buffer. A payload is laid
  out `[heads][layers][tokens][row]`, so whole heads, whole layers of one head, and tokens of one
  layer of one head are contiguous; a clipped cell has only fragments of the last kind.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from vllm_kvpool.layout.pages import LayerPages, Run
from vllm_kvpool.staging.copier import Group

UNITS = (16, 8, 4, 2, 1)  # bytes that a thread moves at once; 16 is the widest on a GPU
WORD_BYTES = 8  # the widest integer
TILE_BYTES = 16 << 10  # 128 threads with eight accesses each on their way
SEGMENT_BYTES = 128  # a GPU's cache line: the least that is worth an access
NUM_COLUMNS, FRAGMENT_ENTRIES = 14, 9  # of the kernel's rows of a run and of a fragment


@dataclass(frozen=True, slots=True)
class RunTable:
    """Rows of `[layers][runs_per_layer][NUM_COLUMNS]`; a layer without such a run has empty ones.

    Every address, stride and size is a multiple of `unit_bytes`, a power of two.
    """

    rows: "np.ndarray[Any, np.dtype[np.int64]]"
    runs_per_layer: int
    unit_bytes: int
    is_strided: bool
    is_tiled: bool
    max_words: int
    tile_tokens: int
    tile_words: int

    @property
    def word_bytes(self) -> int:
        return min(self.unit_bytes, WORD_BYTES)


def run_tables(layers: Sequence[LayerPages]) -> list[RunTable]:
    """The tables for payloads that begin at multiples of the largest unit."""
    alignment = math.gcd(max(UNITS), *(pages.row_bytes for pages in layers))
    kinds: dict[tuple[int, bool, bool], dict[int, list[Run]]] = {}
    for index, pages in enumerate(layers):
        for run in pages.runs:
            kind = (unit_bytes(run, alignment), is_strided(run), run.tile_tokens > 0)
            kinds.setdefault(kind, {}).setdefault(index, []).append(run)
    return [_table(layers, runs, *kind) for kind, runs in kinds.items()]


def is_strided(run: Run) -> bool:
    """Return True if the elements of a row lie apart in the page."""
    return run.num_elems > 1 and run.elem_stride != run.elem_bytes


def unit_bytes(run: Run, alignment: int) -> int:
    """The largest unit, up to `alignment`, that the run can be moved in."""
    sizes = [run.base, run.block_stride, run.head_stride, run.token_stride, run.row_offset]
    sizes.append(run.tile_stride)
    if is_strided(run):
        sizes += [run.elem_stride, run.elem_bytes]
    return math.gcd(alignment, max(UNITS), run.nbytes, *sizes)


def tile_words(num_words: int, word_bytes: int) -> int:
    """The tile size, a power of two, that covers a run with the least waste."""
    widest = 1 << (num_words - 1).bit_length()
    narrowest = min(widest, SEGMENT_BYTES // word_bytes)
    sizes = [narrowest << i for i in range((widest // narrowest).bit_length())]
    return min(sizes, key=lambda size: (-(-num_words // size) * size, -size))


def _table(
    layers: Sequence[LayerPages],
    runs: dict[int, list[Run]],
    unit: int,
    strided: bool,
    tiled: bool,
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
        is_tiled=tiled,
        max_words=max_words,
        tile_tokens=TILE_BYTES // word // columns,
        tile_words=columns,
    )


def _columns(pages: LayerPages, run: Run, bytes_before: int, word: int) -> list[int]:
    """The numbers that the kernel reads of a run, in its order (`triton_kernel.py`)."""
    in_bytes = (
        *(run.block_stride, run.head_stride, run.token_stride),
        *((run.elem_stride, run.elem_bytes) if is_strided(run) else (0, 0)),
        *(run.nbytes, run.row_offset, pages.row_bytes, bytes_before),
    )
    in_words = (nbytes // word for nbytes in in_bytes)
    in_block = pages.tokens_per_block, pages.blocks_per_id
    return [run.base, *in_words, *in_block, run.tile_tokens, run.tile_stride // word]


class Part(NamedTuple):
    """Layers and tokens of a group's cells; ranges are half open."""

    group: Group
    layer_start: int
    layer_stop: int
    token_start: int
    token_stop: int
    row_bytes: int  # of a token in these layers of one head


class Fragment(NamedTuple):
    """`nbytes` at `address`, laid out `[heads][layers][tokens][row]`."""

    address: int
    nbytes: int
    head_start: int
    head_stop: int
    part: Part


def cut(
    group: Group, bytes_before: Sequence[int], max_bytes: int, max_tokens: int
) -> Iterator[Fragment]:
    """The fragments of a group's cells, of each in the order of its payload.

    `bytes_before`: of one token's row of one head in all layers before each, and in all.
    """
    shape = group.shape
    row_bytes = bytes_before[shape.layer_stop] - bytes_before[shape.layer_start]
    head_bytes = shape.chunk_tokens * row_bytes
    if shape.token_start == shape.token_stop or not head_bytes:
        return
    chunk = (shape.chunk_start, shape.chunk_start + shape.chunk_tokens)
    is_whole = (shape.token_start, shape.token_stop) == chunk and shape.chunk_tokens <= max_tokens
    if is_whole and head_bytes <= max_bytes:
        part = Part(group, shape.layer_start, shape.layer_stop, *chunk, row_bytes)
        most_heads = max_bytes // head_bytes
        for move in group.moves:
            address, num_heads = move.address, move.head_stop - move.head_start
            if 0 < num_heads <= most_heads:
                yield Fragment(
                    address, num_heads * head_bytes, move.head_start, move.head_stop, part
                )
                continue
            for head in range(move.head_start, move.head_stop, most_heads):
                stop = min(head + most_heads, move.head_stop)
                nbytes = (stop - head) * head_bytes
                yield Fragment(address, nbytes, head, stop, part)
                address += nbytes
        return
    parts = list(_parts_of_a_head(group, bytes_before, is_whole, max_bytes, max_tokens))
    for move in group.moves:
        for head in range(move.head_start, move.head_stop):
            address = move.address + (head - move.head_start) * head_bytes
            for offset, part in parts:
                nbytes = (part.token_stop - part.token_start) * part.row_bytes
                yield Fragment(address + offset, nbytes, head, head + 1, part)


def _parts_of_a_head(
    group: Group, bytes_before: Sequence[int], is_whole: bool, max_bytes: int, max_tokens: int
) -> Iterator[tuple[int, Part]]:
    """Contiguous parts and their offsets: as many whole layers as fit, or tokens of one layer."""
    shape = group.shape
    layer, last = shape.layer_start, shape.layer_stop
    while layer < last:
        before, stop = bytes_before[layer], layer
        if is_whole:
            limit = before + max_bytes // shape.chunk_tokens
            while stop < last and bytes_before[stop + 1] <= limit:
                stop += 1
        offset = (before - bytes_before[shape.layer_start]) * shape.chunk_tokens
        if stop > layer:
            row_bytes = bytes_before[stop] - before
            yield offset, Part(group, layer, stop, shape.token_start, shape.token_stop, row_bytes)
            layer = stop
            continue
        row = bytes_before[layer + 1] - before
        step = min(max_bytes // row, max_tokens)
        assert step > 0, (row, max_bytes)
        for token in range(shape.token_start, shape.token_stop, step):
            stop = min(token + step, shape.token_stop)
            first = offset + (token - shape.chunk_start) * row
            yield first, Part(group, layer, layer + 1, token, stop, row)
        layer += 1
