"""Gather and scatter in plain torch, for pages on any device.

For devices without a copier of their own: NPUs, and GPUs without Triton. Pages are seen as strided
views of machine words, as wide as alignment permits: torch moves bytes ten times more slowly than
int64.

Pages off the host go through a buffer on the device, one move's payload at a time, on a stream of
the copier's own that waits for the newest `fence`. `devices.py` has what differs between devices.
Slots should be page-locked: copies to pageable memory are correct but not asynchronous.
"""

import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from vllm_kvpool.layout.pages import CellMove, LayerPages, Run
from vllm_kvpool.staging.devices import Device, device_for

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDEST_WORD_BYTES = max(_WORDS)


class _Piece(NamedTuple):
    """Kernel blocks of which the same tokens `[within_start, within_stop)` are moved."""

    blocks: list[int]
    within_start: int
    within_stop: int
    row_start: int  # of the payload


class TorchCopier:
    """A `Copier` for pages on `device`."""

    def __init__(self, layers: Sequence[LayerPages], device: torch.device | Device) -> None:
        self._layers = tuple(layers)
        self._runtime = device_for(device) if isinstance(device, torch.device) else device
        self._device = self._runtime.torch_device
        self._is_host = self._runtime.is_host
        self._stream = self._runtime.new_stream()
        self._computed: Any = None

    def fence(self) -> None:
        """Record where the model's stream is; moves wait there, on their own stream."""
        if not self._is_host:
            # A later event stands for all earlier ones, so the newest is enough.
            self._computed = self._runtime.new_event()

    def gather(self, moves: Sequence[CellMove]) -> None:
        self._run(moves, is_gather=True)

    def scatter(self, moves: Sequence[CellMove]) -> None:
        self._run(moves, is_gather=False)

    def _run(self, moves: Sequence[CellMove], *, is_gather: bool) -> None:
        if self._is_host:
            for move in moves:
                self._move_pages(move, self._host_payload(move), is_gather=is_gather)
            return
        if self._computed is not None:
            self._stream.wait_event(self._computed)
        with self._runtime.on_stream(self._stream):
            for move in moves:
                host = self._host_payload(move)
                payload = torch.empty_like(host, device=self._device)
                if is_gather:
                    self._move_pages(move, payload, is_gather=True)
                    self._copy_clipped(move, dst=host, src=payload)
                else:
                    self._copy_clipped(move, dst=payload, src=host)
                    self._move_pages(move, payload, is_gather=False)
        self._stream.synchronize()

    def _host_payload(self, move: CellMove) -> torch.Tensor:
        """The payload's memory as bytes, `[heads, bytes of a head]`."""
        layers = self._layers[move.layer_start : move.layer_stop]
        head_bytes = move.chunk_tokens * sum(pages.row_bytes for pages in layers)
        num_heads = move.head_stop - move.head_start
        memory = (ctypes.c_char * (num_heads * head_bytes)).from_address(move.address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(num_heads, head_bytes)

    def _layer_rows(
        self, move: CellMove, payload: torch.Tensor
    ) -> Iterator[tuple[LayerPages, torch.Tensor]]:
        """Each layer of the move with its part of the payload, `[heads, tokens, row]`."""
        start = 0
        for pages in self._layers[move.layer_start : move.layer_stop]:
            stop = start + move.chunk_tokens * pages.row_bytes
            yield pages, payload[:, start:stop].view(-1, move.chunk_tokens, pages.row_bytes)
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

    def _move_pages(self, move: CellMove, payload: torch.Tensor, *, is_gather: bool) -> None:
        for pages, rows in self._layer_rows(move, payload):
            pieces = [
                (torch.tensor(piece.blocks, device=self._device), piece)
                for piece in _pieces(move, pages)
            ]
            for run in pages.runs:
                word_bytes = _word_bytes(run, pages.row_bytes, move.address)
                words = run.elem_bytes // word_bytes
                for blocks, piece in pieces:
                    num_tokens = piece.within_stop - piece.within_start
                    row_stop = piece.row_start + len(piece.blocks) * num_tokens
                    cell = rows[:, piece.row_start : row_stop]
                    cell = cell[:, :, run.row_offset : run.row_offset + run.nbytes]
                    cell = cell.view(_WORDS[word_bytes])
                    cell = cell.view(-1, len(piece.blocks), num_tokens, run.num_elems, words)
                    cell = cell.transpose(0, 1)
                    for tiles in _tiles(run, piece, pages.tokens_per_block):
                        # [B, H, tiles, N, elements, words]
                        view = _strided_view(pages, run, word_bytes, tiles)
                        part = view[:, move.head_start : move.head_stop]
                        start, size = tiles.row_start, view.shape[3]
                        some = cell[:, :, start : start + tiles.num_tiles * size]
                        some = some.view(*some.shape[:2], tiles.num_tiles, size, *some.shape[3:])
                        if is_gather:
                            some.copy_(part.index_select(0, blocks))
                        elif run.head_stride == 0:  # all heads have the same bytes: one is written
                            part[:, :1].index_copy_(0, blocks, some[:, :1])
                        else:
                            part.index_copy_(0, blocks, some)


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


def _pieces(move: CellMove, pages: LayerPages) -> Iterator[_Piece]:
    """At most three pieces: a block's tail, whole blocks, a block's head."""
    size = pages.tokens_per_block
    start, stop = move.token_start - move.table_start, move.token_stop - move.table_start
    first_whole, last_whole = -(-start // size) * size, stop // size * size
    if first_whole > last_whole:  # within one block
        cuts = sorted({start, stop})
    else:
        cuts = sorted({start, first_whole, last_whole, stop})
    for begin, end in itertools.pairwise(cuts):
        indices = range(begin // size, -(-end // size))
        within_start = begin % size
        yield _Piece(
            blocks=[_kernel_block(move, pages, index) for index in indices],
            within_start=within_start,
            within_stop=within_start + (end - begin) // len(indices),
            row_start=begin + move.table_start - move.chunk_start,
        )


def _kernel_block(move: CellMove, pages: LayerPages, index: int) -> int:
    id_index, part = divmod(index, pages.blocks_per_id)
    return int(move.block_ids[id_index]) * pages.blocks_per_id + part


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
