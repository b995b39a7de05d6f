"""Gather and scatter in plain torch, for pages on any device.

For devices without a copier of their own: NPUs, and GPUs without Triton. Pages are seen as strided
views of machine words, as wide as alignment permits: torch moves bytes ten times more slowly than
int64.

Pages off the host go through a buffer on the device, on a stream of the copier's own. Starting an
operation there takes longer than what it moves, so cells of other chunks and heads but of the same
layers move together. `devices.py` has what differs between devices. Slots should be page-locked:
copies to pageable memory are correct but not asynchronous.
"""

import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from vllm_kvpool.layout.pages import CellMove, LayerPages, Run
from vllm_kvpool.staging.copier import Shape, group_moves
from vllm_kvpool.staging.devices import Device, device_for

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDEST_WORD_BYTES = max(_WORDS)
BUFFER_BYTES = 16 << 20  # on the device, at a time; a cell that is larger goes alone


class _Piece(NamedTuple):
    """Kernel blocks of which the same tokens `[within_start, within_stop)` are moved."""

    first_block: int  # among those of the ids of a chunk
    num_blocks: int
    within_start: int
    within_stop: int
    row_start: int  # of the payload


class _Shape(NamedTuple):
    """The common part of moves that go together. Tokens count from the chunk's start."""

    layer_start: int
    layer_stop: int
    chunk_tokens: int
    token_start: int
    token_stop: int
    first_token: int  # of the first block that is touched; may be before the chunk

    @classmethod
    def within_chunk(cls, shape: Shape) -> "_Shape":
        start = shape.chunk_start
        tokens = (shape.token_start, shape.token_stop, shape.first_token)
        return cls(*shape[:2], shape.chunk_tokens, *(token - start for token in tokens))


class _Group(NamedTuple):
    """Cells of several chunks, and in each of the same adjacent heads."""

    shape: _Shape
    head_start: int
    head_stop: int
    chunks: list[tuple[tuple[int, ...], list[CellMove]]]  # the ids of its blocks, its cells


class TorchCopier:
    """A `Copier` for pages on `device`."""

    num_threads = 1

    def __init__(self, layers: Sequence[LayerPages], device: torch.device | Device) -> None:
        self._layers = tuple(layers)
        self._runtime = device_for(device) if isinstance(device, torch.device) else device
        self._device = self._runtime.torch_device
        self._is_host = self._runtime.is_host
        self._stream = self._runtime.new_stream()

    def gather(self, moves: Sequence[CellMove]) -> None:
        self._run(moves, is_gather=True)

    def scatter(self, moves: Sequence[CellMove]) -> None:
        self._run(moves, is_gather=False)

    def _run(self, moves: Sequence[CellMove], *, is_gather: bool) -> None:
        if self._is_host:
            for move in moves:
                for group in self._groups([move]):
                    self._move_pages(group, self._host_payload(move)[None], is_gather=is_gather)
            return
        with self._runtime.on_stream(self._stream):
            for group in self._groups(moves):
                self._move_group(group, is_gather=is_gather)
        self._stream.synchronize()

    def _groups(self, moves: Sequence[CellMove]) -> Iterator[_Group]:
        """Return the moves in as few groups as the size of the buffer permits."""
        groups: dict[tuple[_Shape, int, int], _Group] = {}
        for of_chunk in group_moves(moves, self._layers):
            shape = _Shape.within_chunk(of_chunk.shape)
            block_ids = tuple(map(int, of_chunk.block_ids))
            for adjacent in _adjacent(of_chunk.moves):
                heads = adjacent[0].head_start, adjacent[-1].head_stop
                group = groups.setdefault((shape, *heads), _Group(shape, *heads, []))
                group.chunks.append((block_ids, adjacent))
        for group in groups.values():
            chunk_bytes = (group.head_stop - group.head_start) * self._head_bytes(group.shape)
            at_once = max(1, BUFFER_BYTES // max(1, chunk_bytes))
            for i in range(0, len(group.chunks), at_once):
                yield group._replace(chunks=group.chunks[i : i + at_once])

    def _head_bytes(self, cell: _Shape | CellMove) -> int:
        layers = self._layers[cell.layer_start : cell.layer_stop]
        return cell.chunk_tokens * sum(pages.row_bytes for pages in layers)

    def _move_group(self, group: _Group, *, is_gather: bool) -> None:
        num_heads = group.head_stop - group.head_start
        size = len(group.chunks), num_heads, self._head_bytes(group.shape)
        payload = torch.empty(size, dtype=torch.uint8, device=self._device)
        if is_gather:
            self._move_pages(group, payload, is_gather=True)
        for (_, cells), part in zip(group.chunks, payload, strict=True):
            for move in cells:
                first = move.head_start - group.head_start
                on_device = part[first : first + move.head_stop - move.head_start]
                host = self._host_payload(move)
                if is_gather:
                    self._copy_clipped(move, dst=host, src=on_device)
                else:
                    self._copy_clipped(move, dst=on_device, src=host)
        if not is_gather:
            self._move_pages(group, payload, is_gather=False)

    def _host_payload(self, move: CellMove) -> torch.Tensor:
        """The payload's memory as bytes, `[heads, bytes of a head]`."""
        head_bytes = self._head_bytes(move)
        num_heads = move.head_stop - move.head_start
        memory = (ctypes.c_char * (num_heads * head_bytes)).from_address(move.address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(num_heads, head_bytes)

    def _layer_rows(
        self, cell: _Shape | CellMove, payload: torch.Tensor
    ) -> Iterator[tuple[LayerPages, torch.Tensor]]:
        """Each layer with its part of the payload, `[..., heads, tokens, row]`."""
        start = 0
        for pages in self._layers[cell.layer_start : cell.layer_stop]:
            stop = start + cell.chunk_tokens * pages.row_bytes
            rows = payload[..., start:stop]
            yield pages, rows.view(*rows.shape[:-1], cell.chunk_tokens, pages.row_bytes)
            start = stop

    def _copy_clipped(self, move: CellMove, *, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy between host and device in contiguous pieces: torch copies others through pageable
        memory and waits for each."""
        if (move.token_start, move.token_stop) == (
            move.chunk_start,
            move.chunk_start + move.chunk_tokens,
        ):
            dst.copy_(src, non_blocking=True)
            return
        clip = slice(move.token_start - move.chunk_start, move.token_stop - move.chunk_start)
        for (_, dst_rows), (_, src_rows) in zip(
            self._layer_rows(move, dst), self._layer_rows(move, src), strict=True
        ):
            for head in range(len(dst)):
                dst_rows[head, clip].copy_(src_rows[head, clip], non_blocking=True)

    def _move_pages(self, group: _Group, payload: torch.Tensor, *, is_gather: bool) -> None:
        """Between pages and the payload, `[chunks, heads, bytes of a head]`, both of one device."""
        heads = slice(group.head_start, group.head_stop)
        pieces_of: dict[tuple[int, int], list[tuple[torch.Tensor, _Piece]]] = {}
        for pages, rows in self._layer_rows(group.shape, payload):
            form = pages.tokens_per_block, pages.blocks_per_id
            if form not in pieces_of:
                pieces_of[form] = self._pieces(group, pages)
            for run in pages.runs:
                word_bytes = _word_bytes(run, pages.row_bytes, payload.data_ptr())
                words = run.elem_bytes // word_bytes
                of_run = rows[..., run.row_offset : run.row_offset + run.nbytes]
                of_run = of_run.view(_WORDS[word_bytes])
                of_run = of_run.view(*of_run.shape[:-1], run.num_elems, words)
                for blocks, piece in pieces_of[form]:
                    num_tokens = piece.within_stop - piece.within_start
                    row_stop = piece.row_start + piece.num_blocks * num_tokens
                    cell = of_run[:, :, piece.row_start : row_stop]
                    # [chunks, B, H, tokens, elements, words]
                    by_block = piece.num_blocks, num_tokens
                    cell = cell.view(*cell.shape[:2], *by_block, *cell.shape[3:]).transpose(1, 2)
                    for tiles in _tiles(run, piece, pages.tokens_per_block):
                        # [B, H, tiles, N, elements, words]
                        part = _strided_view(pages, run, word_bytes, tiles)[:, heads]
                        start, size = tiles.row_start, part.shape[3]
                        some = cell[:, :, :, start : start + tiles.num_tiles * size]
                        by_tile = tiles.num_tiles, size
                        some = some.view(*some.shape[:3], *by_tile, *some.shape[4:])
                        if is_gather:
                            found = part.index_select(0, blocks)
                            some.copy_(found.view(some.shape))
                        elif run.head_stride == 0:  # all heads have the same bytes: one is written
                            part[:, :1].index_copy_(0, blocks, some[:, :, :1].flatten(0, 1))
                        else:
                            part.index_copy_(0, blocks, some.flatten(0, 1))

    def _pieces(self, group: _Group, pages: LayerPages) -> list[tuple[torch.Tensor, _Piece]]:
        """Pieces of each chunk, with the kernel blocks of all chunks, on the device."""
        parts = range(pages.blocks_per_id)
        blocks = [[i * len(parts) + part for i in ids for part in parts] for ids, _ in group.chunks]
        on_device = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        return [
            (on_device[:, piece.first_block :][:, : piece.num_blocks].flatten(), piece)
            for piece in _pieces(group.shape, pages.tokens_per_block)
        ]


def _adjacent(cells: list[CellMove]) -> Iterator[list[CellMove]]:
    """Cells of a chunk in lists, of each of which one's heads end where the next one's begin."""
    cells = sorted(cells, key=lambda move: move.head_start)
    cuts = [i for i in range(1, len(cells)) if cells[i - 1].head_stop != cells[i].head_start]
    for start, stop in itertools.pairwise([0, *cuts, len(cells)]):
        yield cells[start:stop]


class _Tiles(NamedTuple):
    """Tiles of a block, from the `first` on, of which tokens `[start, stop)` each are moved.

    `row_start` counts the piece's tokens before them.
    """

    first: int
    num_tiles: int
    start: int
    stop: int
    row_start: int


def _tiles(run: Run, piece: _Piece, block_tokens: int) -> Iterator[_Tiles]:
    """The piece's part of each tile, whole ones together; a block is one where a run has none."""
    size = run.tile_tokens or block_tokens
    token, stop = piece.within_start, piece.within_stop
    while token < stop:
        first, start = divmod(token, size)
        count = max(1, (stop - token) // size) if start == 0 else 1
        end = size if stop >= (first + 1) * size else stop - first * size
        yield _Tiles(first, count, start, end, token - piece.within_start)
        token = (first + count - 1) * size + end


def _pieces(shape: _Shape, block_tokens: int) -> Iterator[_Piece]:
    """At most three pieces: a block's tail, whole blocks, a block's head."""
    start, stop = shape.token_start - shape.first_token, shape.token_stop - shape.first_token
    first_whole, last_whole = (
        -(-start // block_tokens) * block_tokens,
        stop // block_tokens * block_tokens,
    )
    if first_whole > last_whole:  # within one block
        cuts = sorted({start, stop})
    else:
        cuts = sorted({start, first_whole, last_whole, stop})
    for begin, end in itertools.pairwise(cuts):
        first = begin // block_tokens
        num_blocks = -(-end // block_tokens) - first
        within_start = begin % block_tokens
        yield _Piece(
            first_block=first,
            num_blocks=num_blocks,
            within_start=within_start,
            within_stop=within_start + (end - begin) // num_blocks,
            row_start=begin + shape.first_token,
        )


def _word_bytes(run: Run, row_bytes: int, address: int) -> int:
    strides = (run.block_stride, run.head_stride, run.token_stride, run.tile_stride)
    elem = (run.elem_bytes, run.elem_stride if run.num_elems > 1 else 0)
    return math.gcd(
        _WIDEST_WORD_BYTES, run.base, *strides, *elem, run.row_offset, row_bytes, address
    )


def _strided_view(pages: LayerPages, run: Run, word_bytes: int, tiles: _Tiles) -> torch.Tensor:
    """Those elements of the run, `[B, H, tiles, N, elements, words]`, over the owner's storage."""
    owner, storage = _owner_of(pages, run)
    size = (
        owner.shape[0],
        pages.num_heads,
        tiles.num_tiles,
        tiles.stop - tiles.start,
        run.num_elems,
        run.elem_bytes // word_bytes,
    )
    base = run.base + tiles.first * run.tile_stride + tiles.start * run.token_stride
    strides = (
        *(run.block_stride, run.head_stride, run.tile_stride),
        *(run.token_stride, run.elem_stride),
    )
    empty = torch.empty(0, dtype=_WORDS[word_bytes], device=owner.device)
    return empty.set_(
        storage,
        (base - storage.data_ptr()) // word_bytes,
        size,
        (*(stride // word_bytes for stride in strides), 1),
    )


def _owner_of(pages: LayerPages, run: Run) -> tuple[torch.Tensor, Any]:
    for owner in pages.owner:
        storage = owner.untyped_storage()
        if storage.data_ptr() <= run.base < storage.data_ptr() + storage.nbytes():
            return owner, storage
    raise AssertionError("a run begins outside the memory of its pages")
