"""Gather and scatter for pages on an NVIDIA GPU: one Triton kernel, many cells a launch.

The payloads of a call pass through buffers on the device, a round at a time:

    gather    pages ─kernel→ buffer ─copy→ slots          kernels and copies have a stream each, so
    scatter   slots ─copy→ buffer ─kernel→ pages          that those of different rounds overlap

The copies are large and contiguous and done by the GPU's copy engine; a kernel that wrote over PCIe
itself would hold multiprocessors that the model needs for as long as a copy takes.
Slots should be pinned: copies to pageable memory are correct but slow.

No stream of the model's is ever waited for by a thread; kernels wait for its newest `fence`.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
import triton.language as tl

from vllm_kvpool.layout.pages import CellMove, LayerPages
from vllm_kvpool.staging.copier import check_move
from vllm_kvpool.staging.move_kernel import PIECE_COLUMNS, RUN_COLUMNS, move_pieces
from vllm_kvpool.staging.pieces import Piece, cut
from vllm_kvpool.staging.run_tables import NUM_COLUMNS, UNITS, RunTable, run_tables
from vllm_kvpool.staging.streams import Event, Streams

BUFFER_BYTES = 8 << 20  # 0.15 ms of PCIe: longer than a round takes to prepare
NUM_BUFFERS = 2
PAYLOAD_ALIGNMENT = 256  # of payloads in a buffer
MAX_PIECE_TOKENS = 8192
TABLE_ENTRIES = 4 * MAX_PIECE_TOKENS  # int64 for the pieces of a round and their block ids
NUM_WARPS = 4

_PIECE_COLUMNS: int = PIECE_COLUMNS.value
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
assert RUN_COLUMNS.value == NUM_COLUMNS


@dataclass(frozen=True, slots=True)
class _Round:
    """Pieces that fit into a buffer and a table, and where each lies in the buffer."""

    pieces: list[Piece]
    offsets: list[int]


@dataclass(slots=True)
class _Buffer:
    """What one round uses: its payloads are free again at `busy`, its table at `uploading`."""

    payload: torch.Tensor  # uint8, on the device
    host_table: torch.Tensor  # int64, pinned
    table: torch.Tensor  # int64, on the device
    busy: Event | None = None
    uploading: Event | None = None


class TritonCopier:
    """A `Copier` for pages on a GPU; made on the model's thread. Call `warm_up` before the first
    move. Holds `NUM_BUFFERS * buffer_bytes` of the device's memory."""

    def __init__(
        self,
        layers: Sequence[LayerPages],
        streams: Streams,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._layers = tuple(layers)
        self._row_bytes = [pages.row_bytes for pages in layers]
        self._streams = streams
        self._buffer_bytes = buffer_bytes
        self._tables = run_tables(layers)
        self._buffers = [self._new_buffer() for _ in range(NUM_BUFFERS)]
        self._kernels, self._copies = streams.new_stream(), streams.new_stream()
        self._computed = streams.model_event()
        for stream in (self._kernels, self._copies):
            stream.wait(self._computed)

    def _new_buffer(self) -> _Buffer:
        nbytes = (_num_entries(self._tables) + TABLE_ENTRIES) * torch.int64.itemsize
        return _Buffer(
            self._streams.device_memory(self._buffer_bytes),
            self._streams.pinned_memory(nbytes).view(torch.int64),
            self._streams.device_memory(nbytes).view(torch.int64),
        )

    def warm_up(self) -> None:
        """Compile the kernels, or load them from Triton's cache directory."""
        nothing = Piece(0, 0, 0, 0, 0, 0, 0, 0, (), 0)
        for is_gather in (True, False):
            self._move_pages(self._buffers[0], [nothing], [0], is_gather=is_gather)
            self._finish()

    def fence(self) -> None:
        """Record where the model's stream is; kernels wait there, on their own stream."""
        # A later event stands for all earlier ones, so the newest is enough.
        self._computed = self._streams.model_event()

    def gather(self, moves: Sequence[CellMove]) -> None:
        self._run(moves, is_gather=True)

    def scatter(self, moves: Sequence[CellMove]) -> None:
        self._run(moves, is_gather=False)

    def _run(self, moves: Sequence[CellMove], *, is_gather: bool) -> None:
        for move in moves:
            check_move(move, self._layers)
        pieces = (
            piece
            for move in moves
            for piece in cut(move, self._row_bytes, self._buffer_bytes, MAX_PIECE_TOKENS)
        )
        self._streams.enter_thread()
        self._kernels.wait(self._computed)
        try:
            for part, buffer in zip(self._rounds(pieces), cycle(self._buffers), strict=False):
                self._start(part, buffer, is_gather=is_gather)
        finally:
            self._finish()  # also what had been started before something failed

    def _finish(self) -> None:
        for stream in (self._kernels, self._copies):
            stream.record().synchronize()

    def _rounds(self, pieces: Iterable[Piece]) -> Iterator[_Round]:
        part, nbytes, entries = _Round([], []), 0, 0
        for piece in pieces:
            wanted = _PIECE_COLUMNS + self._num_ids(piece)
            is_full = nbytes + piece.nbytes > self._buffer_bytes or entries + wanted > TABLE_ENTRIES
            if part.pieces and is_full:
                yield part
                part, nbytes, entries = _Round([], []), 0, 0
            part.pieces.append(piece)
            part.offsets.append(nbytes)
            nbytes += -(-piece.nbytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
            entries += wanted
        if part.pieces:
            yield part

    def _start(self, part: _Round, buffer: _Buffer, *, is_gather: bool) -> None:
        base = buffer.payload.data_ptr()
        assert base % max(UNITS) == 0, base
        addresses = [base + offset for offset in part.offsets]
        on_device = [
            buffer.payload[offset : offset + piece.nbytes]
            for piece, offset in zip(part.pieces, part.offsets, strict=True)
        ]
        slots = [_host_bytes(piece.address, piece.nbytes) for piece in part.pieces]
        first = self._kernels if is_gather else self._copies
        if buffer.busy is not None:
            first.wait(buffer.busy)
        if is_gather:
            self._move_pages(buffer, part.pieces, addresses, is_gather=True)
            self._copies.wait(self._kernels.record())
            self._copies.copy(list(zip(slots, on_device, strict=True)))
            buffer.busy = self._copies.record()
        else:
            self._copies.copy(list(zip(on_device, slots, strict=True)))
            self._kernels.wait(self._copies.record())
            self._move_pages(buffer, part.pieces, addresses, is_gather=False)
            buffer.busy = self._kernels.record()

    def _move_pages(
        self, buffer: _Buffer, pieces: list[Piece], addresses: list[int], *, is_gather: bool
    ) -> None:
        """Between pages and payloads at `addresses`, by the stream of the kernels."""
        if buffer.uploading is not None:
            buffer.uploading.synchronize()
        entries = self._describe(pieces, addresses)
        buffer.host_table.numpy()[: len(entries)] = entries
        # Runs go along each time: memory of the device may lose its content while vLLM sleeps.
        upload = slice(len(entries))
        self._kernels.copy([(buffer.table[upload], buffer.host_table[upload])])
        buffer.uploading = self._kernels.record()
        runs_at = 0
        for table in self._tables:
            self._launch(buffer.table, table, runs_at, pieces, is_gather=is_gather)
            runs_at += len(table.rows)

    def _num_ids(self, piece: Piece) -> int:
        first, last = self._ids_of(piece)
        return last - first

    def _ids_of(self, piece: Piece) -> tuple[int, int]:
        """The part of its block table that covers a piece, half open."""
        if piece.token_start == piece.token_stop:
            return 0, 0
        pages = self._layers[piece.layer_start]
        id_tokens = pages.tokens_per_block * pages.blocks_per_id
        first = (piece.token_start - piece.table_start) // id_tokens
        return first, -(-(piece.token_stop - piece.table_start) // id_tokens)

    def _describe(
        self, pieces: Sequence[Piece], addresses: Sequence[int]
    ) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """What the kernel reads: runs, pieces, block ids. Columns as in `move_kernel.py`."""
        ids_at = _num_entries(self._tables) + len(pieces) * _PIECE_COLUMNS
        rows: list[int] = []
        ids: list[int] = []
        known: dict[tuple[int, int, int], int] = {}  # heads and spans of a chunk share their ids
        for piece, address in zip(pieces, addresses, strict=True):
            first, last = self._ids_of(piece)
            key = (id(piece.block_ids), first, last)
            if key not in known:
                known[key] = ids_at + len(ids)
                ids += piece.block_ids[first:last]
            pages = self._layers[piece.layer_start]
            id_tokens = pages.tokens_per_block * pages.blocks_per_id
            rows += (
                address,
                piece.layer_start,
                piece.layer_stop - piece.layer_start,
                piece.head_start,
                piece.head_stop - piece.head_start,
                piece.token_start - piece.table_start - first * id_tokens,
                piece.token_stop - piece.token_start,
                known[key],
                sum(self._row_bytes[piece.layer_start : piece.layer_stop]),
            )
        runs = (table.rows for table in self._tables)
        return np.concatenate([*runs, np.array(rows + ids, np.int64)])

    def _launch(
        self,
        entries: torch.Tensor,
        table: RunTable,
        runs_at: int,
        pieces: Sequence[Piece],
        *,
        is_gather: bool,
    ) -> None:
        num_layers = max(1, *(p.layer_stop - p.layer_start for p in pieces))
        num_heads = max(1, *(p.head_stop - p.head_start for p in pieces))
        num_tokens = max(1, *(p.token_stop - p.token_start for p in pieces))
        token_tiles = -(-num_tokens // table.tile_tokens)
        word_tiles = -(-table.max_words // table.tile_words)
        tiles = num_layers * num_heads * table.runs_per_layer * token_tiles * word_tiles
        self._kernels.launch(
            move_pieces,
            len(pieces) * tiles,
            entries,
            runs_at,
            _num_entries(self._tables),
            len(pieces),
            num_heads,
            token_tiles,
            word_tiles,
            **kernel_constants(table, is_gather=is_gather),
            num_warps=NUM_WARPS,
        )


def kernel_constants(table: RunTable, *, is_gather: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "IS_GATHER": is_gather,
        "RUNS_PER_LAYER": table.runs_per_layer,
        "WORD": _WORDS[table.word_bytes],
        "WORD_BYTES": table.word_bytes,
        "UNIT_WORDS": table.unit_bytes // table.word_bytes,
        "IS_STRIDED": table.is_strided,
        "TILE_TOKENS": table.tile_tokens,
        "TILE_WORDS": table.tile_words,
    }


def _num_entries(tables: Iterable[RunTable]) -> int:
    return sum(len(table.rows) for table in tables)


def _host_bytes(address: int, nbytes: int) -> torch.Tensor:
    """Memory of the host as uint8; who owns it keeps it alive."""
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)
