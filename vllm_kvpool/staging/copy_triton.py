"""Gather and scatter for pages on an NVIDIA GPU: one Triton kernel, many cells a launch.

    gather    pages ─kernel→ buffer ─copy→ slots          each buffer has a stream of its own, so
    scatter   slots ─copy→ buffer ─kernel→ pages          that rounds in different ones overlap

The GPU's copy engine does the copies, which are large and contiguous; a kernel that wrote over PCIe
itself would hold multiprocessors that the model needs. Slots should be page-locked: copies to
pageable memory are correct but slow.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, product
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vllm_kvpool.layout.pages import CellMove, LayerPages
from vllm_kvpool.staging.copier import Group, Shape, group_moves
from vllm_kvpool.staging.triton_tables import (
    FRAGMENT_ENTRIES,
    UNITS,
    Fragment,
    Part,
    RunTable,
    cut,
    run_tables,
)

BUFFER_BYTES = 16 << 20  # 0.3 ms of PCIe: longer than a round takes to prepare
NUM_BUFFERS = 2
PAYLOAD_ALIGNMENT = 256  # of payloads in a buffer
MAX_FRAGMENT_TOKENS = 8192
TABLE_ENTRIES = 4 * MAX_FRAGMENT_TOKENS  # int64 for the fragments of a round and their block ids
_ENTRY_BYTES = np.dtype(np.int64).itemsize

# --- Streams: what the copier needs of a device. Tests have one without a GPU -------------------


Copy = tuple[int, int, int]
"""Addresses of target and source, and bytes; their owners keep the memory until it is done."""


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block until it is reached, with the GIL released."""


class DeviceStream(Protocol):
    """Work that a device does in order. No method blocks."""

    def record(self) -> DeviceEvent:
        """The point after all work so far."""

    def wait(self, event: DeviceEvent) -> None:
        """Later work waits for the event."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy contiguous bytes between host and device."""

    def launch(self, runs: RunTable, num_programs: int, *args: Any, is_gather: bool) -> None:
        """Launch the kernel that moves `runs` (`triton_kernel.py`); `args` are its first
        parameters."""


class Streams(Protocol):
    """One device."""

    def enter_thread(self) -> None:
        """Every thread calls it before it uses streams."""

    def new_stream(self) -> DeviceStream:
        """A stream of the caller's own."""

    def model_event(self) -> DeviceEvent:
        """Record the position of the calling thread's current stream, the model's."""

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 on the device, for use after the present work of the model's stream,
        which may still use that memory."""

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        """Uninitialised page-locked uint8 on the host."""


# --- The copier ---------------------------------------------------------------------------------


class _CopyRound(NamedTuple):
    """Fragments that fit into a buffer and a table, and where each lies in the buffer."""

    fragments: list[Fragment]
    offsets: list[int]


@dataclass(slots=True)
class _Buffer:
    """The memory of one round and the stream that uses it.

    The host's table may be written after `uploaded`, in the order of the stream all else.
    """

    stream: DeviceStream
    payload: torch.Tensor  # uint8, on the device
    host_table: "np.ndarray[Any, np.dtype[np.int64]]"  # pinned; begins with the runs
    table: torch.Tensor  # int64, on the device
    uploaded: DeviceEvent | None = None


class TritonCopier:
    """A `Copier` for pages on a GPU. Holds `NUM_BUFFERS * buffer_bytes` of the device's memory.

    Make it on the model's thread, and call `warm_up` before the first move. A lock is held while a
    call starts its rounds, and not while it waits for them: the rounds of two calls follow one
    another on the device without a pause.
    """

    num_threads = 2

    def __init__(
        self,
        layers: Sequence[LayerPages],
        streams: Streams,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._layers = tuple(layers)
        rows = (pages.row_bytes for pages in layers)
        self._bytes_before = list(accumulate(rows, initial=0))  # each layer, of one token
        self._streams = streams
        self._buffer_bytes = buffer_bytes
        self._tables = run_tables(layers)
        self._runs = np.concatenate([table.rows for table in self._tables])
        self._buffers = [self._new_buffer() for _ in range(NUM_BUFFERS)]
        self._turns = cycle(self._buffers)
        self._lock = threading.Lock()
        allocated = streams.model_event()
        for buffer in self._buffers:
            buffer.stream.wait(allocated)

    def _new_buffer(self) -> _Buffer:
        nbytes = (len(self._runs) + TABLE_ENTRIES) * _ENTRY_BYTES
        host_table = self._streams.pinned_memory(nbytes).view(torch.int64).numpy()
        host_table[: len(self._runs)] = self._runs
        return _Buffer(
            self._streams.new_stream(),
            self._streams.device_memory(self._buffer_bytes),
            host_table,
            self._streams.device_memory(nbytes).view(torch.int64),
        )

    def warm_up(self) -> None:
        """Compile the kernels, or load them from Triton's cache directory."""
        nothing = Fragment(
            0, 0, 0, 0, Part(Group(Shape(0, 0, 0, 0, 0, 0, 0), (), []), 0, 0, 0, 0, 0)
        )
        self._streams.enter_thread()
        for buffer, is_gather in product(self._buffers, (True, False)):
            for _ in range(2):  # the second launch is of what the first has compiled
                self._move_pages(buffer, [nothing], [0], is_gather=is_gather)
        self._last_work().synchronize()

    def gather(self, moves: Sequence[CellMove]) -> None:
        self._run(moves, is_gather=True)

    def scatter(self, moves: Sequence[CellMove]) -> None:
        self._run(moves, is_gather=False)

    def _run(self, moves: Sequence[CellMove], *, is_gather: bool) -> None:
        fragments = (
            fragment
            for group in group_moves(moves, self._layers)
            for fragment in cut(group, self._bytes_before, self._buffer_bytes, MAX_FRAGMENT_TOKENS)
        )
        self._streams.enter_thread()
        with self._lock:
            try:
                for part in self._rounds(fragments):
                    self._start(part, next(self._turns), is_gather=is_gather)
            except BaseException:
                self._last_work().synchronize()  # what had been started before
                raise
            ended = self._last_work()
        ended.synchronize()

    def _last_work(self) -> DeviceEvent:
        """The end of all rounds so far: one event, for which a thread sleeps once."""
        last, *others = (buffer.stream for buffer in self._buffers)
        for stream in others:
            last.wait(stream.record())
        return last.record()

    def _rounds(self, fragments: Iterable[Fragment]) -> Iterator[_CopyRound]:
        some, nbytes, entries = _CopyRound([], []), 0, 0
        present: set[int] = set()  # parts, whose ids stand in the table once
        part: Part | None = None
        num_ids = wanted = 0
        for fragment in fragments:
            if fragment.part is not part:
                part = fragment.part
                num_ids = len(self._ids_of(part)[1])
                wanted = FRAGMENT_ENTRIES + (0 if id(part) in present else num_ids)
                present.add(id(part))
            size = fragment.nbytes
            is_full = nbytes + size > self._buffer_bytes or entries + wanted > TABLE_ENTRIES
            if is_full and some.fragments:
                yield some
                some, nbytes, entries = _CopyRound([], []), 0, 0
                present = {id(part)}
                wanted = FRAGMENT_ENTRIES + num_ids
            some.fragments.append(fragment)
            some.offsets.append(nbytes)
            nbytes += -(-size // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
            entries += wanted
            wanted = FRAGMENT_ENTRIES
        if some.fragments:
            yield some

    def _start(self, part: _CopyRound, buffer: _Buffer, *, is_gather: bool) -> None:
        base = buffer.payload.data_ptr()
        assert base % max(UNITS) == 0, base
        addresses = [base + offset for offset in part.offsets]
        pairs = zip(part.fragments, addresses, strict=True)
        if is_gather:
            self._move_pages(buffer, part.fragments, addresses, is_gather=True)
            buffer.stream.copy([(f.address, at, f.nbytes) for f, at in pairs])
        else:
            buffer.stream.copy([(at, f.address, f.nbytes) for f, at in pairs])
            self._move_pages(buffer, part.fragments, addresses, is_gather=False)

    def _move_pages(
        self, buffer: _Buffer, fragments: list[Fragment], addresses: list[int], *, is_gather: bool
    ) -> None:
        """Launch kernels between pages and payloads at `addresses`."""
        entries = self._describe(fragments, addresses)
        if buffer.uploaded is not None:
            buffer.uploaded.synchronize()
        stop = len(self._runs) + len(entries)
        buffer.host_table[len(self._runs) : stop] = entries
        # Runs are uploaded each time: device memory may lose its content while vLLM sleeps.
        upload = buffer.table.data_ptr(), buffer.host_table.ctypes.data, stop * _ENTRY_BYTES
        buffer.stream.copy([upload])
        buffer.uploaded = buffer.stream.record()
        runs_at = 0
        for table in self._tables:
            self._launch(buffer, table, runs_at, fragments, is_gather=is_gather)
            runs_at += len(table.rows)

    def _ids_of(self, part: Part) -> tuple[int, Sequence[int]]:
        """The first token of the first block that holds tokens of a part, and the blocks' ids."""
        shape, block_ids, _ = part.group
        pages = self._layers[part.layer_start]
        id_tokens = pages.tokens_per_block * pages.blocks_per_id
        first = (part.token_start - shape.first_token) // id_tokens
        last = -(-(part.token_stop - shape.first_token) // id_tokens)
        return shape.first_token + first * id_tokens, block_ids[first:last]

    def _describe(self, fragments: Sequence[Fragment], addresses: Sequence[int]) -> list[int]:
        """What follows the runs in the kernel's table: fragments, block ids."""
        ids_at = len(self._runs) + len(fragments) * FRAGMENT_ENTRIES
        ids: list[int] = []
        columns: dict[int, tuple[int, ...]] = {}  # of parts: cells of other heads have the same
        rows: list[int] = []
        for fragment, address in zip(fragments, addresses, strict=True):
            part = fragment.part
            if (of_part := columns.get(id(part))) is None:
                first_token, block_ids = self._ids_of(part)
                of_part = columns[id(part)] = (
                    part.layer_start,
                    part.layer_stop - part.layer_start,
                    part.token_start - first_token,
                    part.token_stop - part.token_start,
                    ids_at + len(ids),
                    part.row_bytes,
                )
                ids += block_ids
            rows += (address, fragment.head_start, fragment.head_stop - fragment.head_start)
            rows += of_part
        return rows + ids

    def _launch(
        self,
        buffer: _Buffer,
        table: RunTable,
        runs_at: int,
        fragments: Sequence[Fragment],
        *,
        is_gather: bool,
    ) -> None:
        parts = {id(fragment.part): fragment.part for fragment in fragments}.values()
        num_layers = max(1, *(p.layer_stop - p.layer_start for p in parts))
        num_heads = max(1, *(f.head_stop - f.head_start for f in fragments))
        num_tokens = max(1, *(p.token_stop - p.token_start for p in parts))
        token_tiles = -(-num_tokens // table.tile_tokens)
        word_tiles = -(-table.max_words // table.tile_words)
        tiles = num_layers * num_heads * table.runs_per_layer * token_tiles * word_tiles
        buffer.stream.launch(
            table,
            len(fragments) * tiles,
            buffer.table,
            runs_at,
            len(self._runs),
            len(fragments),
            num_heads,
            token_tiles,
            word_tiles,
            is_gather=is_gather,
        )
