"""Tables of the Triton kernel (pure; imports neither torch nor Triton).

* Page formats as tables of runs. Runs that one compiled kernel can move, in units of one size, form
  one table; most models have one.
* Moves cut into rounds of fragments that are contiguous in a payload and fit a buffer. A payload is
  laid out `[heads][layers][tokens][row]`, so whole heads, whole layers of one head, and tokens of
  one layer of one head are contiguous; a clipped cell has only fragments of the last kind.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from vllm_kvpool.layout.pages import Int64s, LayerPages, Run
from vllm_kvpool.staging.copier import Shape, Template

UNITS = (16, 8, 4, 2, 1)  # bytes that a thread moves at once; 16 is the widest on a GPU
WORD_BYTES = 8  # the widest integer
TILE_BYTES = 16 << 10  # 128 threads with eight accesses each on their way
SEGMENT_BYTES = 128  # a GPU's cache line: the least that is worth an access
NUM_COLUMNS, FRAGMENT_ENTRIES = 14, 9  # of the kernel's rows of a run and of a fragment
MAX_FRAGMENT_TOKENS = 8192
TABLE_ENTRIES = 4 * MAX_FRAGMENT_TOKENS  # int64 for the fragments of a round and their block ids
PAYLOAD_ALIGNMENT = 256  # of payloads in a buffer
MAX_ROUNDS, MAX_CUTS = 64, 256  # kinds of calls and of moves that are remembered


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
        """Bytes that the kernel moves at once."""
        return min(self.unit_bytes, WORD_BYTES)


def run_tables(layers: Sequence[LayerPages]) -> list[RunTable]:
    """Return the tables for payloads that begin at multiples of the largest unit."""
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
    """Return the largest unit, up to `alignment`, that the run can be moved in."""
    sizes = [run.base, run.block_stride, run.head_stride, run.token_stride, run.row_offset]
    sizes.append(run.tile_stride)
    if is_strided(run):
        sizes += [run.elem_stride, run.elem_bytes]
    return math.gcd(alignment, max(UNITS), run.nbytes, *sizes)


def tile_words(num_words: int, word_bytes: int) -> int:
    """Return the tile size, a power of two, that covers a run with the least waste."""
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
    """Return the numbers that the kernel reads of a run, in its order (`triton_kernel.py`)."""
    in_bytes = (
        *(run.block_stride, run.head_stride, run.token_stride),
        *((run.elem_stride, run.elem_bytes) if is_strided(run) else (0, 0)),
        *(run.nbytes, run.row_offset, pages.row_bytes, bytes_before),
    )
    in_words = (nbytes // word for nbytes in in_bytes)
    in_block = pages.tokens_per_block, pages.blocks_per_id
    return [run.base, *in_words, *in_block, run.tile_tokens, run.tile_stride // word]


class Fragment(NamedTuple):
    """Bytes that are contiguous in a piece's payload, laid out `[heads][layers][tokens][row]`.

    The first `FRAGMENT_ENTRIES` fields are the kernel's columns. In the kernel's table `address` is
    one on the device, and `first_id` counts from the table's start.
    """

    address: int  # from the piece's payload
    head_start: int
    num_heads: int
    layer_start: int
    num_layers: int
    first_token: int  # from the first token of block `first_id`
    num_tokens: int
    first_id: int  # among the ids of the move
    span_bytes: int  # of one token in all layers of one head
    last_id: int  # half open
    piece: int  # of the move
    nbytes: int


_COLUMNS = Fragment(*range(len(Fragment._fields)))


class Round(NamedTuple):
    """Fragments that fit into a buffer and a table."""

    fragments: slice  # of the call's
    block_ids: slice  # of the call's
    launches: list[tuple[RunTable, int, tuple[int, ...]]]  # programs, the kernel's parameters


class Rounds(NamedTuple):
    """A call's work without addresses and block ids. Its arrays are shared and never modified."""

    rows: Int64s  # of the kernel's table; `address` counts from the buffer's start
    copies: Int64s  # target, source, bytes; addresses count from the payload's and buffer's start
    pieces: Int64s  # each fragment's piece, among those of all moves
    parts: list[Round]


class RoundCutter:
    """Cuts moves into rounds, for pages of one rank and buffers of one size.

    It sees only what calls have in common (see `Slabs`), and so remembers what it has found. Any
    number of threads may call it at once.
    """

    def __init__(self, layers: Sequence[LayerPages], buffer_bytes: int) -> None:
        self._tables = run_tables(layers)
        self.runs = np.concatenate([table.rows for table in self._tables])
        rows = (pages.row_bytes for pages in layers)
        self._bytes_before = tuple(accumulate(rows, initial=0))  # each layer, of one token
        self._buffer_bytes = buffer_bytes
        self.rounds = lru_cache(MAX_ROUNDS)(self._rounds)

    def launches(self, num_fragments: int, largest: Fragment) -> list[Any]:
        """Return the launches for fragments that are no larger in any direction."""
        found, runs_at = [], 0
        num_layers, num_heads = max(1, largest.num_layers), max(1, largest.num_heads)
        for table in self._tables:
            token_tiles = max(1, -(-largest.num_tokens // table.tile_tokens))
            word_tiles = -(-table.max_words // table.tile_words)
            tiles = num_layers * num_heads * table.runs_per_layer * token_tiles * word_tiles
            sizes = num_fragments, num_heads, token_tiles, word_tiles
            found.append((table, num_fragments * tiles, (runs_at, len(self.runs), *sizes)))
            runs_at += len(table.rows)
        return found

    def _rounds(self, is_gather: bool, *slabs: tuple[Template, Shape, int]) -> Rounds:
        """Return the rounds of a call with so many moves of each template and shape."""
        tables, num_pieces, num_ids = [], 0, 0
        for template, shape, count in slabs:
            fragments = cut(template, shape, self._bytes_before, self._buffer_bytes)
            table = np.repeat(fragments[None], count, axis=0)  # [moves, fragments, columns]
            numbers = np.arange(count)[:, None]
            ids_of_move = -((shape.first_token - shape.token_stop) // template.id_tokens)
            table[:, :, _COLUMNS.piece] += num_pieces + len(template.places) * numbers
            table[:, :, _COLUMNS.first_id] += num_ids + ids_of_move * numbers
            table[:, :, _COLUMNS.last_id] += num_ids + ids_of_move * numbers
            tables.append(table.reshape(-1, len(_COLUMNS)))
            num_pieces += count * len(template.places)
            num_ids += count * ids_of_move
        rows = np.concatenate(tables)
        addresses, first_ids = rows[:, _COLUMNS.address], rows[:, _COLUMNS.first_id]
        nbytes, last_ids = rows[:, _COLUMNS.nbytes], rows[:, _COLUMNS.last_id]
        sizes = -(-nbytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
        offsets = np.cumsum(sizes) - sizes
        # Where a round would end that begins with a fragment.
        entries = FRAGMENT_ENTRIES * np.arange(len(rows))
        entry_stops = entries + FRAGMENT_ENTRIES + np.maximum.accumulate(last_ids)
        byte_stops = offsets + nbytes
        stops = np.minimum(
            np.searchsorted(byte_stops, offsets + self._buffer_bytes, "right"),
            np.searchsorted(entry_stops, entries + first_ids + TABLE_ENTRIES, "right"),
        ).tolist()
        parts, first = [], 0
        while first < len(rows):
            stop = max(stops[first], first + 1)
            part = slice(first, stop)
            largest = Fragment(*rows[part].max(axis=0).tolist())
            ids = slice(int(first_ids[first]), largest.last_id)
            first_ids[part] += len(self.runs) + (stop - first) * FRAGMENT_ENTRIES - ids.start
            offsets[part] -= offsets[first]
            parts.append(Round(part, ids, self.launches(stop - first, largest)))
            first = stop
        ends = (addresses, offsets) if is_gather else (offsets, addresses)
        copies = np.stack((*ends, nbytes), axis=1)
        addresses[:] = offsets
        in_table = np.ascontiguousarray(rows[:, :FRAGMENT_ENTRIES])
        return Rounds(in_table, copies, rows[:, _COLUMNS.piece].copy(), parts)


@lru_cache(MAX_CUTS)
def cut(template: Template, shape: Shape, bytes_before: tuple[int, ...], max_bytes: int) -> Int64s:
    """Return each `Fragment` of a move of such `Slabs` in a row, ordered by `first_id`.

    `bytes_before`: of one token's row of one head in all layers before each, and in all.
    """
    fragments: list[Fragment] = []
    for piece, (first_layer, last_layer, first_head, _) in enumerate(template.places):
        before = bytes_before[first_layer]
        head_bytes = (bytes_before[last_layer] - before) * shape.chunk_tokens
        boxes = _boxes(template.places[piece], shape, bytes_before, max_bytes)
        for heads, layers, tokens in boxes:
            span_bytes = bytes_before[layers.stop] - bytes_before[layers.start]
            in_head = (bytes_before[layers.start] - before) * shape.chunk_tokens
            first_id, first_token = divmod(tokens.start - shape.first_token, template.id_tokens)
            fragment = Fragment(
                # Where tokens are left out before the first, there is one layer.
                address=(heads.start - first_head) * head_bytes
                + in_head
                + tokens.start * span_bytes,
                head_start=heads.start,
                num_heads=len(heads),
                layer_start=layers.start,
                num_layers=len(layers),
                first_token=first_token,
                num_tokens=len(tokens),
                first_id=first_id,
                span_bytes=span_bytes,
                last_id=-((shape.first_token - tokens.stop) // template.id_tokens),
                piece=piece,
                nbytes=len(heads) * len(tokens) * span_bytes,
            )
            fragments.append(fragment)
    fragments.sort(key=attrgetter("first_id"))
    return np.array(fragments, np.int64).reshape(-1, len(_COLUMNS))


def _boxes(
    place: tuple[int, int, int, int], shape: Shape, bytes_before: Sequence[int], max_bytes: int
) -> Iterator[tuple[range, range, range]]:
    """Yield contiguous heads, layers and tokens of a piece, each at most `max_bytes`.

    A box is as many whole heads as fit, else whole layers of one head, else tokens of one layer of
    one head.
    """
    layers, heads = range(*place[:2]), range(*place[2:])
    tokens = range(shape.token_start, shape.token_stop)
    head_bytes = shape.chunk_tokens * (bytes_before[layers.stop] - bytes_before[layers.start])
    if not tokens or not head_bytes:
        return
    is_whole = len(tokens) == shape.chunk_tokens <= MAX_FRAGMENT_TOKENS
    if is_whole and head_bytes <= max_bytes:
        step = max_bytes // head_bytes
        for head in heads[::step]:
            yield range(head, min(head + step, heads.stop)), layers, tokens
        return
    parts: list[tuple[range, range]] = []
    layer = layers.start
    while layer < layers.stop:
        row, stop = bytes_before[layer + 1] - bytes_before[layer], layer + 1
        if is_whole and row * shape.chunk_tokens <= max_bytes:
            limit = bytes_before[layer] + max_bytes // shape.chunk_tokens
            while stop < layers.stop and bytes_before[stop + 1] <= limit:
                stop += 1
            step = len(tokens)
        else:
            step = min(max_bytes // row, MAX_FRAGMENT_TOKENS)
            assert step > 0, (row, max_bytes)
        cuts = [range(token, min(token + step, tokens.stop)) for token in tokens[::step]]
        parts += product([range(layer, stop)], cuts)
        layer = stop
    for head in heads:
        for part in parts:
            yield range(head, head + 1), *part
