"""Gather and scatter for pages on an NVIDIA GPU: one Triton kernel, many cells a launch.

    gather    pages ─kernel→ buffer ─copy→ slots
    scatter   slots ─copy→ buffer ─kernel→ pages

Each buffer has a stream of its own, so that rounds in two buffers overlap. The GPU's copy engine
does the copies, which are large and contiguous; a kernel that wrote over PCIe itself would hold
multiprocessors that the model needs. Slots should be page-locked: copies to pageable memory are
correct but slow.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any, Protocol

import numpy as np
import torch

from vllm_kvpool.layout.pages import Int64s, LayerPages, SlabMove
from vllm_kvpool.staging.copier import MoveChecker
from vllm_kvpool.staging.triton_tables import (
    FRAGMENT_ENTRIES,
    TABLE_ENTRIES,
    UNITS,
    Fragment,
    RoundCutter,
    RunTable,
)

BUFFER_BYTES = 16 << 20  # 0.3 ms of PCIe: longer than a round takes to prepare
NUM_BUFFERS = 2
_ENTRY_BYTES = np.dtype(np.int64).itemsize

# --- Streams: what the copier needs of a device. Tests have one without a GPU -------------------


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block until it is reached, with the GIL released."""


class DeviceStream(Protocol):
    """Work that a device does in order. No method blocks."""

    def record(self) -> DeviceEvent:
        """Return the point after all work so far."""

    def wait(self, event: DeviceEvent) -> None:
        """Let later work of the stream wait for the event."""

    def copy(self, copies: Int64s) -> None:
        """Copy contiguous bytes between host and device.

        Rows are addresses of target and source, and bytes. The caller keeps their memory until the
        copies are done; the rows themselves may be changed after the call.
        """

    def launch(self, runs: RunTable, num_programs: int, *args: Any, is_gather: bool) -> None:
        """Launch the kernel that moves `runs`.

        `args` are the first parameters of the kernel (`triton_kernel.py`).
        """


class Streams(Protocol):
    """A device's streams and memory."""

    def enter_thread(self) -> None:
        """Prepare the calling thread; every thread calls it before it uses streams."""

    def new_stream(self) -> DeviceStream:
        """Return a stream of the caller's own."""

    def model_event(self) -> DeviceEvent:
        """Record the position of the calling thread's current stream, the model's."""

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised uint8 on the device.

        The present work of the model's stream may still use that memory, so use it after this work.
        """

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        """Return uninitialised page-locked uint8 on the host."""


# --- The copier ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Buffer:
    """The memory of one round and the stream that uses it.

    The host's table may be written after `uploaded`, in the order of the stream all else.
    """

    stream: DeviceStream
    payload: torch.Tensor  # uint8, on the device
    host_table: Int64s  # pinned; begins with the runs
    table: torch.Tensor  # int64, on the device
    upload: Int64s  # the copy of the table
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
        self._checker = MoveChecker(layers)
        self._cutter = RoundCutter(layers, buffer_bytes)
        self._streams = streams
        self._buffer_bytes = buffer_bytes
        self._buffers = [self._new_buffer() for _ in range(NUM_BUFFERS)]
        self._turns = cycle(self._buffers)
        self._lock = threading.Lock()
        allocated = streams.model_event()
        for buffer in self._buffers:
            buffer.stream.wait(allocated)

    def _new_buffer(self) -> _Buffer:
        runs = self._cutter.runs
        nbytes = (len(runs) + TABLE_ENTRIES) * _ENTRY_BYTES
        host_table = self._streams.pinned_memory(nbytes).view(torch.int64).numpy()
        host_table[: len(runs)] = runs
        payload = self._streams.device_memory(self._buffer_bytes)
        assert payload.data_ptr() % max(UNITS) == 0, payload.data_ptr()
        table = self._streams.device_memory(nbytes).view(torch.int64)
        upload = np.array([(table.data_ptr(), host_table.ctypes.data, nbytes)])
        return _Buffer(self._streams.new_stream(), payload, host_table, table, upload)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from Triton's cache directory."""
        nothing = np.zeros((1, FRAGMENT_ENTRIES), np.int64)
        launches = self._cutter.launches(1, Fragment(*[0] * len(Fragment._fields)))
        self._streams.enter_thread()
        for buffer, is_gather in product(self._buffers, (True, False)):
            for _ in range(2):  # the second launch is of what the first has compiled
                self._move_pages(buffer, nothing, nothing[0, :0], launches, is_gather=is_gather)
        self._last_work().synchronize()

    def gather(self, moves: Sequence[SlabMove]) -> None:
        """Copy pages into staging memory; return once the copies are done."""
        self._run(moves, is_gather=True)

    def scatter(self, moves: Sequence[SlabMove]) -> None:
        """Copy staging memory into pages; return once the copies are done."""
        self._run(moves, is_gather=False)

    def _run(self, moves: Sequence[SlabMove], *, is_gather: bool) -> None:
        slabs = self._checker.check(moves)
        if not slabs:
            return
        kinds = [(each.template, each.shape, len(each.addresses)) for each in slabs]
        rounds = self._cutter.rounds(is_gather, *kinds)
        addresses = np.concatenate([each.addresses.reshape(-1) for each in slabs])
        block_ids = np.concatenate([each.block_ids.reshape(-1) for each in slabs])
        copies = rounds.copies.copy()
        copies[:, 0 if is_gather else 1] += addresses[rounds.pieces]
        self._streams.enter_thread()
        with self._lock:
            try:
                for fragments, ids, launches in rounds.parts:
                    buffer, some = next(self._turns), copies[fragments]
                    some[:, 1 if is_gather else 0] += buffer.payload.data_ptr()
                    if not is_gather:
                        buffer.stream.copy(some)
                    rows = rounds.rows[fragments]
                    self._move_pages(buffer, rows, block_ids[ids], launches, is_gather=is_gather)
                    if is_gather:
                        buffer.stream.copy(some)
            except BaseException:
                self._last_work().synchronize()  # what had been started before
                raise
            ended = self._last_work()
        ended.synchronize()

    def _last_work(self) -> DeviceEvent:
        """Return the end of all rounds so far: one event, for which a thread sleeps once."""
        last, *others = (buffer.stream for buffer in self._buffers)
        for stream in others:
            last.wait(stream.record())
        return last.record()

    def _move_pages(
        self,
        buffer: _Buffer,
        rows: Int64s,
        block_ids: Int64s,
        launches: Sequence[tuple[RunTable, int, tuple[int, ...]]],
        *,
        is_gather: bool,
    ) -> None:
        """Launch kernels between pages and payloads in the buffer."""
        if buffer.uploaded is not None:
            buffer.uploaded.synchronize()
        table, rows_at = buffer.host_table, len(self._cutter.runs)
        ids_at = rows_at + rows.size
        stop = ids_at + len(block_ids)
        table[rows_at:ids_at] = rows.reshape(-1)
        table[rows_at:ids_at:FRAGMENT_ENTRIES] += buffer.payload.data_ptr()
        table[ids_at:stop] = block_ids
        # Runs are uploaded each time: device memory may lose its content while vLLM sleeps.
        buffer.upload[0, 2] = stop * _ENTRY_BYTES
        buffer.stream.copy(buffer.upload)
        buffer.uploaded = buffer.stream.record()
        for runs, num_programs, arguments in launches:
            buffer.stream.launch(runs, num_programs, buffer.table, *arguments, is_gather=is_gather)
