"""Gather and scatter in plain torch, for pages on any device.

For devices without a copier of their own: NPUs, and GPUs without Triton. Pages are seen as strided
views of machine words, as wide as alignment permits: torch moves bytes ten times more slowly than
int64.

Pages off the host go through a buffer on the device, on a stream of the copier's own. Starting an
operation there takes longer than what it moves, so slabs of several chunks move together, all heads
of the same layers at once. `devices.py` has what differs between devices. Slots should be
page-locked: copies to pageable memory are correct but not asynchronous.
"""

import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_kvpool.layout.pages import Int64s, LayerPages, Run, SlabMove
from vllm_kvpool.staging.copier import MoveChecker, Shape, Slabs
from vllm_kvpool.staging.devices import Device, device_for

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDEST_WORD_BYTES = max(_WORDS)
BUFFER_BYTES = 16 << 20  # on the device, at a time; a chunk that is larger goes alone


class _Piece(NamedTuple):
    """Kernel blocks of which the same tokens `[within_start, within_stop)` are moved."""

    first_block: int  # among those of the ids of a chunk
    num_blocks: int
    within_start: int
    within_stop: int
    row_start: int  # of the payload


class _Group(NamedTuple):
    """Pieces of several chunks' slabs: in each the same layers and the same adjacent heads."""

    shape: Shape
    layers: tuple[int, int]
    heads: list[tuple[int, int]]  # of each piece
    addresses: Int64s  # [chunks, pieces]
    block_ids: Int64s  # [chunks, blocks that are touched]

    @property
    def all_heads(self) -> slice:
        return slice(self.heads[0][0], self.heads[-1][1])


class TorchCopier:
    """A `Copier` for pages on `device`."""

    num_threads = 1

    def __init__(self, layers: Sequence[LayerPages], device: torch.device | Device) -> None:
        self._layers = tuple(layers)
        self._checker = MoveChecker(layers)
        self._runtime = device_for(device) if isinstance(device, torch.device) else device
        self._device = self._runtime.torch_device
        self._is_host = self._runtime.is_host
        self._stream = self._runtime.new_stream()

    def gather(self, moves: Sequence[SlabMove]) -> None:
        """Copy pages into staging memory; return once the copies are done."""
        self._run(moves, is_gather=True)

    def scatter(self, moves: Sequence[SlabMove]) -> None:
        """Copy staging memory into pages; return once the copies are done."""
        self._run(moves, is_gather=False)

    def _run(self, moves: Sequence[SlabMove], *, is_gather: bool) -> None:
        groups = [group for slabs in self._checker.check(moves) for group in _groups(slabs)]
        if self._is_host:
            for group in groups:
                for i, j in itertools.product(*map(range, group.addresses.shape)):
                    alone = group._replace(
                        heads=group.heads[j : j + 1], block_ids=group.block_ids[i : i + 1]
                    )
                    payload = self._host_payload(alone, group.addresses[i, j], group.heads[j])
                    self._move_pages(alone, payload[None], is_gather=is_gather)
            return
        with self._runtime.on_stream(self._stream):
            for group in groups:
                heads = group.all_heads
                chunk_bytes = (heads.stop - heads.start) * self._head_bytes(group)
                at_once = max(1, BUFFER_BYTES // max(1, chunk_bytes))
                for i in range(0, len(group.addresses), at_once):
                    part = slice(i, i + at_once)
                    some = group._replace(
                        addresses=group.addresses[part], block_ids=group.block_ids[part]
                    )
                    self._move_group(some, is_gather=is_gather)
        self._stream.synchronize()

    def _head_bytes(self, group: _Group) -> int:
        layers = self._layers[slice(*group.layers)]
        return group.shape.chunk_tokens * sum(pages.row_bytes for pages in layers)

    def _move_group(self, group: _Group, *, is_gather: bool) -> None:
        heads = group.all_heads
        size = len(group.addresses), heads.stop - heads.start, self._head_bytes(group)
        payload = torch.empty(size, dtype=torch.uint8, device=self._device)
        if is_gather:
            self._move_pages(group, payload, is_gather=True)
        for addresses, part in zip(group.addresses, payload, strict=True):
            for address, piece in zip(addresses, group.heads, strict=True):
                on_device = part[piece[0] - heads.start : piece[1] - heads.start]
                host = self._host_payload(group, address, piece)
                if is_gather:
                    self._copy_clipped(group, dst=host, src=on_device)
                else:
                    self._copy_clipped(group, dst=on_device, src=host)
        if not is_gather:
            self._move_pages(group, payload, is_gather=False)

    def _host_payload(self, group: _Group, address: int, heads: tuple[int, int]) -> torch.Tensor:
        """Return a piece's payload as bytes, `[heads, bytes of a head]`."""
        size = heads[1] - heads[0], self._head_bytes(group)
        memory = (ctypes.c_char * math.prod(size)).from_address(int(address))
        return torch.frombuffer(memory, dtype=torch.uint8).view(size)

    def _layer_rows(
        self, group: _Group, payload: torch.Tensor
    ) -> Iterator[tuple[LayerPages, torch.Tensor]]:
        """Yield each layer with its part of the payload, `[..., heads, tokens, row]`."""
        start, num_tokens = 0, group.shape.chunk_tokens
        for pages in self._layers[slice(*group.layers)]:
            stop = start + num_tokens * pages.row_bytes
            rows = payload[..., start:stop]
            yield pages, rows.view(*rows.shape[:-1], num_tokens, pages.row_bytes)
            start = stop

    def _copy_clipped(self, group: _Group, *, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy between host and device in contiguous pieces.

        torch copies other pieces through pageable memory and waits for each.
        """
        clip = slice(group.shape.token_start, group.shape.token_stop)
        if clip == slice(0, group.shape.chunk_tokens):
            dst.copy_(src, non_blocking=True)
            return
        for (_, dst_rows), (_, src_rows) in zip(
            self._layer_rows(group, dst), self._layer_rows(group, src), strict=True
        ):
            for head in range(len(dst)):
                dst_rows[head, clip].copy_(src_rows[head, clip], non_blocking=True)

    def _move_pages(self, group: _Group, payload: torch.Tensor, *, is_gather: bool) -> None:
        """Copy between pages and payload, `[chunks, heads, bytes of a head]`, of one device."""
        heads = group.all_heads
        pieces_of: dict[tuple[int, int], list[tuple[torch.Tensor, _Piece]]] = {}
        for pages, rows in self._layer_rows(group, payload):
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
        """Return pieces of each chunk, with the kernel blocks of all chunks, on the device."""
        blocks = group.block_ids[:, :, None] * pages.blocks_per_id + np.arange(pages.blocks_per_id)
        on_device = torch.from_numpy(blocks.reshape(len(blocks), -1)).to(self._device)
        return [
            (on_device[:, piece.first_block :][:, : piece.num_blocks].flatten(), piece)
            for piece in _pieces(group.shape, pages.tokens_per_block)
        ]


def _groups(slabs: Slabs) -> Iterator[_Group]:
    """Join the pieces of slabs where one's heads end with the first of the next one's."""
    places = slabs.template.places
    order = sorted(range(len(places)), key=places.__getitem__)
    cuts = [
        i
        for i in range(1, len(order))
        if (*places[order[i - 1]][:2], places[order[i - 1]][3]) != places[order[i]][:3]
    ]
    for start, stop in itertools.pairwise([0, *cuts, len(order)]):
        pieces = order[start:stop]
        if pieces:
            heads = [places[piece][2:] for piece in pieces]
            addresses = slabs.addresses[:, pieces]
            layers = places[pieces[0]][:2]
            yield _Group(slabs.shape, layers, heads, addresses, slabs.block_ids)


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
    """Yield the piece's part of each tile, whole tiles together.

    A block is one tile where a run has none.
    """
    size = run.tile_tokens or block_tokens
    token, stop = piece.within_start, piece.within_stop
    while token < stop:
        first, start = divmod(token, size)
        count = max(1, (stop - token) // size) if start == 0 else 1
        end = size if stop >= (first + 1) * size else stop - first * size
        yield _Tiles(first, count, start, end, token - piece.within_start)
        token = (first + count - 1) * size + end


def _pieces(shape: Shape, block_tokens: int) -> Iterator[_Piece]:
    """Return at most three pieces: a block's tail, whole blocks, a block's head."""
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
    """Return a run's elements in these tiles as a view of the owner's storage.

    Shape: `[B, H, tiles, N, elements, words]`.
    """
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
