"""Gather and scatter between host memory and pages in host memory, compiled with numba.

One kernel call performs any number of moves with the GIL released. The kernel has no state, so
several threads may call copiers at once. It knows addresses and strides, not formats.

Heads of a slab that have the same layers form one group, so that a token-major page is read once
from end to end. Destinations are written with non-temporal stores: slots and pages are not read
again soon, and plain stores would fetch each line first.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from vllm_kvpool.layout.pages import Int64s, LayerPages, SlabMove
from vllm_kvpool.staging.copier import MoveChecker, Shape, Template

LINE_BYTES = 64  # a cache line: what one non-temporal store should fill
ELEM_BYTES = (1, 2, 4, 8)  # of elements that can be transposed
VECTOR_BYTES = 16  # the transposing tiles are this wide, which every 64-bit CPU supports
MAX_TABLES = 256  # that are remembered

# Columns of the tables that the kernel reads; those of a run are its fields.
_BASE, _BLOCK_STRIDE, _HEAD_STRIDE, _TOKEN_STRIDE, _ELEM_STRIDE = range(5)
_ELEM_BYTES, _NUM_ELEMS, _ROW_OFFSET, _TILE_TOKENS, _TILE_STRIDE, _RUN_COLUMNS = range(5, 11)
_BLOCK_TOKENS, _BLOCKS_PER_ID, _ROW_BYTES, _ROWS_BEFORE = range(4)
_RUN_START, _RUN_STOP, _LAYER_COLUMNS = range(4, 7)
# Of a group, last those of its `Shape`.
_LAYER_START, _LAYER_STOP, _ENTRY_START, _ENTRY_STOP = range(4)
_CHUNK_TOKENS, _TOKEN_START, _TOKEN_STOP, _FIRST_TOKEN, _GROUP_COLUMNS = range(4, 9)
_HEAD, _ADDRESS = range(2)  # of an entry


class CpuCopier:
    """A `Copier` for pages in host memory. Call `warm_up` before the first move."""

    num_threads = 1

    def __init__(self, layers: Sequence[LayerPages]) -> None:
        self._checker = MoveChecker(layers)
        runs = [run for pages in layers for run in pages.runs]
        for run in runs:
            if run.num_elems > 1 and run.elem_stride != run.elem_bytes:
                assert run.token_stride == run.elem_bytes in ELEM_BYTES, run
        self._runs = _table([astuple(run) for run in runs], _RUN_COLUMNS)
        run_stops = list(accumulate((len(pages.runs) for pages in layers), initial=0))
        self._rows_before = tuple(accumulate((pages.row_bytes for pages in layers), initial=0))
        starts = zip(self._rows_before, run_stops, run_stops[1:], strict=False)
        layer_rows = [
            (pages.tokens_per_block, pages.blocks_per_id, pages.row_bytes, *start)
            for pages, start in zip(layers, starts, strict=True)
        ]
        self._layer_table = _table(layer_rows, _LAYER_COLUMNS)

    def warm_up(self) -> None:
        """Compile the kernel, or load it from numba's cache directory."""
        entries = np.zeros((0, 0, 2), np.int64)
        no_groups, no_ids = _table([], _GROUP_COLUMNS), _table([], 0)
        _move_slabs(True, self._runs, self._layer_table, no_groups, entries, no_ids)

    def gather(self, moves: Sequence[SlabMove]) -> None:
        """Copy pages into staging memory, on the caller's thread."""
        self._run(moves, is_gather=True)

    def scatter(self, moves: Sequence[SlabMove]) -> None:
        """Copy staging memory into pages, on the caller's thread."""
        self._run(moves, is_gather=False)

    def _run(self, moves: Sequence[SlabMove], *, is_gather: bool) -> None:
        for template, shape, addresses, block_ids in self._checker.check(moves):
            groups, (heads, pieces, offsets) = _tables(template, shape, self._rows_before)
            entries = np.empty((len(addresses), len(heads), 2), np.int64)
            entries[:, :, _HEAD] = heads
            entries[:, :, _ADDRESS] = addresses[:, pieces] + offsets
            pages = self._runs, self._layer_table
            _move_slabs(is_gather, *pages, groups, entries, block_ids)


@lru_cache(MAX_TABLES)
def _tables(
    template: Template, shape: Shape, rows_before: tuple[int, ...]
) -> "tuple[Int64s, Int64s]":
    """Return the groups of a move, and of its entries the heads, pieces and offsets in these."""
    groups: list[tuple[int, ...]] = []
    entries: list[tuple[int, int, int]] = []
    by_layers = sorted(range(len(template.places)), key=template.places.__getitem__)
    for layers, pieces in groupby(by_layers, lambda piece: template.places[piece][:2]):
        head_bytes = (rows_before[layers[1]] - rows_before[layers[0]]) * shape.chunk_tokens
        first_entry = len(entries)
        for piece in pieces:
            heads = range(*template.places[piece][2:])
            entries += [(head, piece, i * head_bytes) for i, head in enumerate(heads)]
        groups.append((*layers, first_entry, len(entries), *shape))
    return _table(groups, _GROUP_COLUMNS), _table(entries, 3).T


def _table(rows: Sequence[tuple[int, ...]], num_columns: int) -> "np.ndarray[Any, Any]":
    return np.array(rows, dtype=np.int64).reshape(len(rows), num_columns)


# --- Intrinsics: what numba cannot say about raw addresses ---------------------------------------


def _pointer(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def _store(builder: Any, value: Any, address: Any, *, stream: bool) -> None:
    store = builder.store(value, _pointer(builder, address, value.type))
    store.align = LINE_BYTES if stream else 1
    if stream:
        flag = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        store.set_metadata("nontemporal", flag)


@intrinsic  # type: ignore[untyped-decorator]
def _copy_few(typing_context: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8)
        pointers = [_pointer(builder, address, byte) for address in args[:2]]
        cgutils.raw_memcpy(builder, *pointers, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _publish(typing_context: Any) -> Any:
    """Emit a full fence: nothing weaker orders non-temporal stores."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Emit a prefetch, which cannot fault: the address may lie outside all memory."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], ir.IntType(8))
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for_reading, keep_near, data = word(0), word(3), word(1)
        builder.call(prefetch, [pointer, for_reading, keep_near, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _line_copier(*, stream: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def copy_line(typing_context: Any, dst: Any, src: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            line = ir.VectorType(ir.IntType(8), LINE_BYTES)
            value = builder.load(_pointer(builder, args[1], line), align=1)
            _store(builder, value, args[0], stream=stream)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return copy_line


def _shuffle(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return builder.shuffle_vector(a, b, mask)


def _transposed_square(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose in log2(n) rounds, which interleave the upper half's rows with the lower's."""
    width = len(rows)
    low = [lane for i in range(width // 2) for lane in (i, i + width)]
    high = [lane + width // 2 for lane in low]
    for _ in range(width.bit_length() - 1):
        pairs = list(zip(rows[: width // 2], rows[width // 2 :], strict=True))
        rows = [_shuffle(builder, a, b, lanes) for a, b in pairs for lanes in (low, high)]
    return rows


def _joined(builder: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        lanes = range(2 * parts[0].type.count)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [_shuffle(builder, a, b, lanes) for a, b in pairs]
    return parts[0]


def _tile_transposer(elem_bytes: int, num_rows: int, *, stream: bool) -> Any:
    """Make a function that reads a vector from each of `num_rows` rows.

    It writes as many elements to each column.
    """
    width = VECTOR_BYTES // elem_bytes

    @intrinsic  # type: ignore[untyped-decorator]
    def copy_tile(typing_context: Any, dst: Any, dst_stride: Any, src: Any, src_stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            dst, dst_stride, src, src_stride = args
            vector = ir.VectorType(ir.IntType(8 * elem_bytes), width)
            rows = []
            for _ in range(num_rows):
                rows.append(builder.load(_pointer(builder, src, vector), align=1))
                src = builder.add(src, src_stride)
            squares = [
                _transposed_square(builder, rows[i : i + width]) for i in range(0, num_rows, width)
            ]
            for column in zip(*squares, strict=True):
                _store(builder, _joined(builder, list(column)), dst, stream=stream)
                dst = builder.add(dst, dst_stride)
            return context.get_dummy_value()

        int64 = types.int64
        return types.void(int64, int64, int64, int64), codegen

    return copy_tile


# --- Leaves of the kernel ------------------------------------------------------------------------

_copy_line = _line_copier(stream=False)
_stream_line = _line_copier(stream=True)


@njit  # type: ignore[untyped-decorator]
def _copy_bytes(dst: int, src: int, nbytes: int) -> None:
    if nbytes < LINE_BYTES:
        _copy_few(dst, src, nbytes)
        return
    start = -dst & (LINE_BYTES - 1)
    if start:  # the ragged ends are whole lines too, overlapping the aligned ones
        _copy_line(dst, src)
    for i in range(start, nbytes - LINE_BYTES + 1, LINE_BYTES):
        _stream_line(dst + i, src + i)
    if (nbytes - start) & (LINE_BYTES - 1):
        _copy_line(dst + nbytes - LINE_BYTES, src + nbytes - LINE_BYTES)


def _matrix_transposer(elem_bytes: int) -> Callable[..., None]:
    """Make a function for an element size: rows of `src` become columns of `dst`."""
    width = VECTOR_BYTES // elem_bytes
    line = LINE_BYTES // elem_bytes
    stream_tile = _tile_transposer(elem_bytes, line, stream=True)
    copy_tile = _tile_transposer(elem_bytes, width, stream=False)

    @njit  # type: ignore[untyped-decorator]
    def transpose(
        dst: int, dst_stride: int, src: int, src_stride: int, shape: tuple[int, int]
    ) -> None:
        is_aligned = ((dst | dst_stride) & (LINE_BYTES - 1)) == 0
        streamed_rows = shape[0] // line * line if is_aligned else 0
        rows, columns = shape[0] // width * width, shape[1] // width * width
        for row in range(0, streamed_rows, line):
            for start in range(0, columns, line):
                # Hardware does not foresee so many short rows: ask for those of the next tile.
                at = src + row * src_stride + start * elem_bytes
                for i in range(line, 2 * line):
                    _prefetch(at + i * src_stride)
                to = dst + row * elem_bytes + start * dst_stride
                for i in range(0, min(line, columns - start), width):
                    stream_tile(to + i * dst_stride, dst_stride, at + i * elem_bytes, src_stride)
        for row in range(streamed_rows, rows, width):
            for column in range(0, columns, width):
                to = dst + row * elem_bytes + column * dst_stride
                copy_tile(to, dst_stride, src + row * src_stride + column * elem_bytes, src_stride)
        for row in range(shape[0]):
            for column in range(columns if row < rows else 0, shape[1]):
                to = dst + row * elem_bytes + column * dst_stride
                _copy_few(to, src + row * src_stride + column * elem_bytes, elem_bytes)

    return transpose  # type: ignore[no-any-return]


_transpose_1, _transpose_2, _transpose_4, _transpose_8 = map(_matrix_transposer, ELEM_BYTES)


@njit  # type: ignore[untyped-decorator]
def _move_pieces(
    is_gather: bool, run: Any, page: int, entries: Any, row: int, row_bytes: int, num_rows: int
) -> None:
    """Move a run whose elements are adjacent in the page."""
    head_stride, token_stride = run[_HEAD_STRIDE], run[_TOKEN_STRIDE]
    piece = run[_ELEM_BYTES] * run[_NUM_ELEMS]
    if token_stride == row_bytes and piece == row_bytes:
        piece *= num_rows
        num_rows = 1
    # The page is visited in the order of its addresses.
    inner_rows = num_rows if token_stride < head_stride else 1
    for start in range(0, num_rows, inner_rows):
        for entry in range(len(entries)):
            slot = entries[entry, _ADDRESS] + row
            at = page + entries[entry, _HEAD] * head_stride
            for token in range(start, start + inner_rows):
                in_slot, in_page = slot + token * row_bytes, at + token * token_stride
                dst, src = (in_slot, in_page) if is_gather else (in_page, in_slot)
                _copy_bytes(dst, src, piece)


@njit  # type: ignore[untyped-decorator]
def _move_elems(
    is_gather: bool, run: Any, page: int, entries: Any, row: int, row_bytes: int, num_rows: int
) -> None:
    """Move a run whose elements lie apart, each beside the same element of the next token."""
    elem_stride, elem_bytes, num_elems = run[_ELEM_STRIDE], run[_ELEM_BYTES], run[_NUM_ELEMS]
    for entry in range(len(entries)):
        slot = entries[entry, _ADDRESS] + row
        at = page + entries[entry, _HEAD] * run[_HEAD_STRIDE]
        if is_gather:
            dst, dst_stride, src, src_stride = slot, row_bytes, at, elem_stride
            shape = num_elems, num_rows
        else:
            dst, dst_stride, src, src_stride = at, elem_stride, slot, row_bytes
            shape = num_rows, num_elems
        if elem_bytes == 1:
            _transpose_1(dst, dst_stride, src, src_stride, shape)
        elif elem_bytes == 2:
            _transpose_2(dst, dst_stride, src, src_stride, shape)
        elif elem_bytes == 4:
            _transpose_4(dst, dst_stride, src, src_stride, shape)
        else:
            _transpose_8(dst, dst_stride, src, src_stride, shape)


@njit  # type: ignore[untyped-decorator]
def _move_run(
    is_gather: bool, run: Any, page: int, entries: Any, row: int, row_bytes: int, num_rows: int
) -> None:
    if run[_NUM_ELEMS] == 1 or run[_ELEM_STRIDE] == run[_ELEM_BYTES]:
        _move_pieces(is_gather, run, page, entries, row, row_bytes, num_rows)
    else:
        _move_elems(is_gather, run, page, entries, row, row_bytes, num_rows)


@njit  # type: ignore[untyped-decorator]
def _move_tiles(
    is_gather: bool,
    run: Any,
    page: int,
    entries: Any,
    row: int,
    row_bytes: int,
    first: int,
    num_rows: int,
) -> None:
    """Move rows of a block, from its token `first` on, whose tokens lie in tiles."""
    token = first
    while token < first + num_rows:
        tile, within = divmod(token, run[_TILE_TOKENS])
        rows = min(run[_TILE_TOKENS] - within, first + num_rows - token)
        at = page + tile * run[_TILE_STRIDE] + within * run[_TOKEN_STRIDE]
        slot = row + (token - first) * row_bytes
        _move_run(is_gather, run, at, entries, slot, row_bytes, rows)
        token += rows


@njit  # type: ignore[untyped-decorator]
def _move_span(
    is_gather: bool, runs: Any, layers: Any, group: Any, entries: Any, block_ids: Any
) -> None:
    first_layer = group[_LAYER_START]
    token_stop, first_token = group[_TOKEN_STOP], group[_FIRST_TOKEN]
    for layer in range(first_layer, group[_LAYER_STOP]):
        block_tokens, blocks_per_id = layers[layer, _BLOCK_TOKENS], layers[layer, _BLOCKS_PER_ID]
        row_bytes = layers[layer, _ROW_BYTES]
        rows_before = layers[layer, _ROWS_BEFORE] - layers[first_layer, _ROWS_BEFORE]
        layer_offset = rows_before * group[_CHUNK_TOKENS]
        token = group[_TOKEN_START]
        while token < token_stop:
            index, within = divmod(token - first_token, block_tokens)
            block = block_ids[index // blocks_per_id] * blocks_per_id + index % blocks_per_id
            num_rows = min(block_tokens - within, token_stop - token)
            row = layer_offset + token * row_bytes
            for i in range(layers[layer, _RUN_START], layers[layer, _RUN_STOP]):
                page = runs[i, _BASE] + block * runs[i, _BLOCK_STRIDE]
                at = row + runs[i, _ROW_OFFSET]
                if runs[i, _TILE_TOKENS]:
                    _move_tiles(is_gather, runs[i], page, entries, at, row_bytes, within, num_rows)
                    continue
                page += within * runs[i, _TOKEN_STRIDE]
                _move_run(is_gather, runs[i], page, entries, at, row_bytes, num_rows)
            token += num_rows


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    try:
        return njit(nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba finds no directory to write to: every process compiles
        return njit(nogil=True)(function)  # type: ignore[no-any-return]


@_compiled
def _move_slabs(
    is_gather: bool, runs: Any, layers: Any, groups: Any, entries: Any, block_ids: Any
) -> None:
    for move in range(len(entries)):
        for i in range(len(groups)):
            group = groups[i]
            heads = entries[move][group[_ENTRY_START] : group[_ENTRY_STOP]]
            _move_span(is_gather, runs, layers, group, heads, block_ids[move])
    _publish()
