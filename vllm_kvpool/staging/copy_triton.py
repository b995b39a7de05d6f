"""Gather and scatter for pages on an NVIDIA GPU: one Triton kernel, many cells a launch.

    gather    pages ─kernel→ buffer ─copy→ slots          each buffer has a stream of its own, so
    scatter   slots ─copy→ buffer ─kernel→ pages          that rounds in different ones overlap

The GPU's copy engine does the copies, which are large and contiguous; a kernel that wrote over PCIe
itself would hold multiprocessors that the model needs. Slots should be page-locked: copies to
pageable memory are correct but slow. No thread waits for the model's stream; kernels wait for the
newest `fence`.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, cycle, product
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_kvpool.layout.pages import CellMove, LayerPages
from vllm_kvpool.staging.copier import Group, Shape, group_moves
from vllm_kvpool.staging.triton_tables import (
    NUM_COLUMNS,
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
NUM_WARPS = 4

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

    def launch(self, kernel: Any, num_programs: int, *args: Any, **constants: Any) -> None:
        """Launch a Triton kernel; `constants` are its last parameters, in their order."""


class Streams(Protocol):
    """One device."""

    def enter_thread(self) -> None:
        """Every thread calls it before it uses streams."""

    def new_stream(self) -> DeviceStream:
        """A stream of the caller's own."""

    def model_event(self) -> DeviceEvent:
        """Where the calling thread's current stream, the model's, is now."""

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 on the device, for use after the present work of the model's stream,
        which may still use that memory."""

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        """Uninitialised page-locked uint8 on the host."""


class CudaStreams:
    """An NVIDIA GPU."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda", device
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def enter_thread(self) -> None:
        # A new thread begins on device 0 and would allocate memory there.
        torch.cuda.set_device(self._device)

    def new_stream(self) -> "CudaStream":
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return CudaStream(stream)

    def model_event(self) -> DeviceEvent:
        return _record(torch.cuda.current_stream(self._device))

    def device_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class CudaStream:
    """A stream of `CudaStreams`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def record(self) -> DeviceEvent:
        return _record(self._stream)

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def copy(self, copies: Sequence[Copy]) -> None:
        stream = int(self._stream.cuda_stream)
        error = _driver_copies()(np.array(copies, np.uint64), stream)
        if error:
            raise RuntimeError(f"copies between host and GPU failed (CUDA driver error {error})")

    def launch(self, kernel: Any, num_programs: int, *args: Any, **constants: Any) -> None:
        # Triton takes 60 us to find a compiled kernel by its arguments; of ours, only the constants
        # decide.
        key = kernel, *constants.values()
        if (compiled := self._compiled.get(key)) is None:
            with torch.cuda.stream(self._stream):
                compiled = kernel[(num_programs,)](*args, num_warps=NUM_WARPS, **constants)
            self._compiled[key] = compiled
            return
        stream = int(self._stream.cuda_stream)
        compiled[num_programs, 1, 1](*args, *constants.values(), stream=stream)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: a thread that spins during a copy takes a core from the model.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@cache
def _driver_copies() -> "Callable[[np.ndarray[Any, np.dtype[np.uint64]], int], int]":
    """What starts rows of `Copy` on a stream, and returns the driver's first error, or 0.

    Compiled and without the GIL: torch takes 10 us of Python for each copy, and gives up the GIL
    each time, for which the thread then waits where the model's thread computes.
    """
    from numba import njit

    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
    copy.restype = ctypes.c_int

    @njit("int32(uint64[:, ::1], uint64)", nogil=True)  # type: ignore[untyped-decorator]
    def start_all(copies: Any, stream: int) -> int:
        for target, source, nbytes in copies:
            error = copy(target, source, nbytes, stream)
            if error:
                return error  # type: ignore[no-any-return]
        return 0

    started: Callable[[Any, int], int] = start_all
    return started


# --- The kernel ---------------------------------------------------------------------------------

# The kernel knows addresses and strides, not formats, and works on machine words whatever the
# dtype. One program moves one tile: `TILE_TOKENS` tokens by `TILE_WORDS` words of a run of one head
# and layer of one fragment. Its input is one int64 table: rows of runs, rows of fragments, block
# ids. Programs of the same tile of different fragments are neighbours, since fragments are mostly
# the heads of the same tokens, which lie side by side in token-major pages.

# Columns of a run. Strides, sizes and offsets in words, the base address in bytes.
BASE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, ELEM_STRIDE = map(tl.constexpr, range(5))
ELEM_WORDS, NUM_WORDS, ROW_OFFSET, ROW_WORDS = map(tl.constexpr, range(5, 9))
WORDS_BEFORE, BLOCK_TOKENS, BLOCKS_PER_ID = map(tl.constexpr, range(9, 12))
PAGE_TILE_TOKENS, PAGE_TILE_STRIDE = map(tl.constexpr, range(12, 14))  # tiles of a block's tokens
RUN_COLUMNS = tl.constexpr(14)

# Columns of a fragment. `FIRST_TOKEN` counts from the first token of the first block id, `IDS_AT`
# from the start of the table; `SPAN_BYTES` are those of one token in all layers of the fragment.
PAYLOAD, HEAD_START, NUM_HEADS, LAYER_START, NUM_LAYERS = map(tl.constexpr, range(5))
FIRST_TOKEN, NUM_TOKENS, IDS_AT, SPAN_BYTES = map(tl.constexpr, range(5, 9))
FRAGMENT_COLUMNS = tl.constexpr(9)

# Their values change from launch to launch; a kernel compiled for each would stall a lane.
_PLAIN = (
    "runs_at", "fragments_at", "num_fragments", "num_heads", "num_token_tiles", "num_word_tiles"
)  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN)  # type: ignore[untyped-decorator]
def move_fragments(  # type: ignore[no-untyped-def]
    table,
    runs_at,
    fragments_at,
    num_fragments,
    num_heads,
    num_token_tiles,
    num_word_tiles,
    IS_GATHER: tl.constexpr,
    RUNS_PER_LAYER: tl.constexpr,
    WORD: tl.constexpr,  # the integer type
    WORD_BYTES: tl.constexpr,
    UNIT_WORDS: tl.constexpr,  # all addresses, strides and sizes are multiples of so many words
    IS_STRIDED: tl.constexpr,  # elements of a run are not adjacent in the page
    IS_TILED: tl.constexpr,  # tokens of a block lie in tiles
    TILE_TOKENS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    fragment = table + fragments_at + program % num_fragments * FRAGMENT_COLUMNS
    tile = program // num_fragments
    first_word = tile % num_word_tiles * TILE_WORDS
    tile = tile // num_word_tiles
    first_token = tile % num_token_tiles * TILE_TOKENS
    tile = tile // num_token_tiles
    head = tile // RUNS_PER_LAYER % num_heads
    layer = tile // RUNS_PER_LAYER // num_heads
    # Fragments of different sizes share a launch, as large as the largest in each direction.
    num_tokens = tl.load(fragment + NUM_TOKENS).to(tl.int32)
    is_inside = (layer < tl.load(fragment + NUM_LAYERS)) & (head < tl.load(fragment + NUM_HEADS))
    if not (is_inside & (first_token < num_tokens)):
        return
    first_layer = tl.load(fragment + LAYER_START)
    first_run = table + runs_at + first_layer * RUNS_PER_LAYER * RUN_COLUMNS
    run = first_run + (layer * RUNS_PER_LAYER + tile % RUNS_PER_LAYER) * RUN_COLUMNS
    num_words = tl.multiple_of(tl.load(run + NUM_WORDS).to(tl.int32), UNIT_WORDS)
    if first_word >= num_words:
        return

    tokens = first_token + tl.arange(0, TILE_TOKENS)
    words = first_word + tl.arange(0, TILE_WORDS)
    is_token = tokens < num_tokens
    mask = is_token[:, None] & (words < num_words)[None, :]

    block_tokens = tl.load(run + BLOCK_TOKENS).to(tl.int32)
    blocks_per_id = tl.load(run + BLOCKS_PER_ID).to(tl.int32)
    in_table = tokens + tl.load(fragment + FIRST_TOKEN).to(tl.int32)
    index = in_table // block_tokens
    ids = table + tl.load(fragment + IDS_AT) + index // blocks_per_id
    blocks = tl.load(ids, mask=is_token, other=0) * blocks_per_id + index % blocks_per_id
    within = (in_table % block_tokens).to(tl.int64)

    # The hints let the compiler move 16 bytes at a time; `UNIT_WORDS` says that they are true.
    page = tl.load(run + BASE).to(tl.pointer_type(WORD))
    page = tl.multiple_of(page, UNIT_WORDS * WORD_BYTES)
    page += tl.multiple_of(
        (tl.load(fragment + HEAD_START) + head) * tl.load(run + HEAD_STRIDE), UNIT_WORDS
    )
    in_page = blocks * tl.multiple_of(tl.load(run + BLOCK_STRIDE), UNIT_WORDS)
    if IS_TILED:
        page_tile = tl.load(run + PAGE_TILE_TOKENS)
        page_tile_stride = tl.multiple_of(tl.load(run + PAGE_TILE_STRIDE), UNIT_WORDS)
        in_page += within // page_tile * page_tile_stride
        within = within % page_tile
    in_page += within * tl.multiple_of(tl.load(run + TOKEN_STRIDE), UNIT_WORDS)
    if IS_STRIDED:
        elem_words = tl.load(run + ELEM_WORDS).to(tl.int32)
        elems = (words // elem_words).to(tl.int64)
        in_row = elems * tl.load(run + ELEM_STRIDE) + words % elem_words
    else:
        in_row = words
    page_words = page + in_page[:, None] + in_row[None, :]

    payload = tl.load(fragment + PAYLOAD).to(tl.pointer_type(WORD))
    payload = tl.multiple_of(payload, UNIT_WORDS * WORD_BYTES)
    rows_before = head * (tl.load(fragment + SPAN_BYTES) // WORD_BYTES)
    rows_before += tl.load(run + WORDS_BEFORE) - tl.load(first_run + WORDS_BEFORE)
    payload += tl.multiple_of(rows_before * num_tokens + tl.load(run + ROW_OFFSET), UNIT_WORDS)
    in_payload = tokens.to(tl.int64) * tl.multiple_of(tl.load(run + ROW_WORDS), UNIT_WORDS)
    payload_words = payload + in_payload[:, None] + words[None, :]

    if IS_GATHER:
        tl.store(payload_words, tl.load(page_words, mask=mask), mask=mask)
    else:
        tl.store(page_words, tl.load(payload_words, mask=mask), mask=mask)


_FRAGMENT_COLUMNS: int = FRAGMENT_COLUMNS.value
_ENTRY_BYTES = np.dtype(np.int64).itemsize
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
assert RUN_COLUMNS.value == NUM_COLUMNS

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

    Make it on the model's thread, and call `warm_up` before the first move.
    """

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
        self._computed = streams.model_event()
        for buffer in self._buffers:
            buffer.stream.wait(self._computed)

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
        fragments = (
            fragment
            for group in group_moves(moves, self._layers)
            for fragment in cut(group, self._bytes_before, self._buffer_bytes, MAX_FRAGMENT_TOKENS)
        )
        self._streams.enter_thread()
        try:
            for part, buffer in zip(self._rounds(fragments), cycle(self._buffers), strict=False):
                self._start(part, buffer, is_gather=is_gather)
        finally:
            self._finish()  # also what had been started before something failed

    def _finish(self) -> None:
        """Wait for all rounds; the thread sleeps once."""
        last, *others = (buffer.stream for buffer in self._buffers)
        for stream in others:
            last.wait(stream.record())
        last.record().synchronize()

    def _rounds(self, fragments: Iterable[Fragment]) -> Iterator[_CopyRound]:
        some, nbytes, entries = _CopyRound([], []), 0, 0
        num_ids: dict[int, int] = {}  # of parts, whose ids stand in the table once
        for fragment in fragments:
            part = fragment.part
            of_part = 0 if id(part) in num_ids else len(self._ids_of(part)[1])
            wanted = _FRAGMENT_COLUMNS + of_part
            is_full = (
                nbytes + fragment.nbytes > self._buffer_bytes or entries + wanted > TABLE_ENTRIES
            )
            if some.fragments and is_full:
                yield some
                some, nbytes, entries = _CopyRound([], []), 0, 0
                of_part = num_ids.pop(id(part), of_part)
                num_ids.clear()
                wanted = _FRAGMENT_COLUMNS + of_part
            num_ids.setdefault(id(part), of_part)
            some.fragments.append(fragment)
            some.offsets.append(nbytes)
            nbytes += -(-fragment.nbytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
            entries += wanted
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
        """Launch kernels between pages and payloads at `addresses`, after the fence."""
        entries = self._describe(fragments, addresses)
        if buffer.uploaded is not None:
            buffer.uploaded.synchronize()
        stop = len(self._runs) + len(entries)
        buffer.host_table[len(self._runs) : stop] = entries
        # Runs are uploaded each time: device memory may lose its content while vLLM sleeps.
        upload = buffer.table.data_ptr(), buffer.host_table.ctypes.data, stop * _ENTRY_BYTES
        buffer.stream.copy([upload])
        buffer.uploaded = buffer.stream.record()
        buffer.stream.wait(self._computed)
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
        ids_at = len(self._runs) + len(fragments) * _FRAGMENT_COLUMNS
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
            move_fragments,
            len(fragments) * tiles,
            buffer.table,
            runs_at,
            len(self._runs),
            len(fragments),
            num_heads,
            token_tiles,
            word_tiles,
            **kernel_constants(table, is_gather=is_gather),
        )


def kernel_constants(table: RunTable, *, is_gather: bool) -> dict[str, Any]:
    """The compile-time arguments of the kernel."""
    return {
        "IS_GATHER": is_gather,
        "RUNS_PER_LAYER": table.runs_per_layer,
        "WORD": _WORDS[table.word_bytes],
        "WORD_BYTES": table.word_bytes,
        "UNIT_WORDS": table.unit_bytes // table.word_bytes,
        "IS_STRIDED": table.is_strided,
        "IS_TILED": table.is_tiled,
        "TILE_TOKENS": table.tile_tokens,
        "TILE_WORDS": table.tile_words,
    }
