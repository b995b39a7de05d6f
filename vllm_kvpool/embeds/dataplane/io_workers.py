"""The threads that move rows, and the memory they move them between.

A preparer brings encoded items into host memory, and writers write rows into peers' windows.
Drainers copy rows out of the own window and compare digests. All work of one turn of the control
thread starts together, several small pieces per thread; each piece is reported once.
"""

import queue
import threading
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from vllm_kvpool.embeds.dataplane.row_bytes import (
    Bytes,
    RowCopy,
    WriteError,
    check_data,
    drain,
    item_name,
    sampled_bytes,
)
from vllm_kvpool.embeds.dataplane.tensors import (
    HostCopy,
    MemoryPool,
    Tensor,
    allocate,
    as_bytes,
    tensor_of,
)
from vllm_kvpool.embeds.dataplane.transports import LandingWindow, RowWriter
from vllm_kvpool.embeds.faults import DRAINER, PREPARER, WRITER
from vllm_kvpool.embeds.machines.effects import (
    Allocate,
    Discard,
    DrainRows,
    Effect,
    Prepare,
    Ready,
    Release,
    Write,
)
from vllm_kvpool.embeds.protocol.messages import Window, WriteFailed, Wrote, batches_of
from vllm_kvpool.embeds.protocol.rows import ItemShape
from vllm_kvpool.network.work_thread import WorkThread

BATCH_BYTES = 1 << 20  # copying them takes long compared with waking a thread
WRITE_BATCH_BYTES = 4 << 20
"""Written together: a network answers each write, and each answer is waited for."""
JOIN_S = 0.5

_Drain = tuple[DrainRows, RowCopy]
_Writes = tuple[Window, list[tuple[Write, RowCopy]]]  # to one window, at once
_Result = Wrote | WriteFailed


class Completions(Protocol):
    """Receiver of the ends of work; called by any thread."""

    def drained(self, gid: int, same: bool) -> None:
        """Take the end of a drain; `same`: the rows of grant `gid` have the sender's digest."""

    def prepared(self, item_id: int, digest: str) -> None:
        """Take the digest of an item that is now in host memory."""

    def written(self, result: Wrote | WriteFailed) -> None:
        """Take the end of a write, or its failure."""

    def work_failed(self, kind: str, error: BaseException) -> None:
        """Take an error that no worker expects, raised by work of this kind."""


@dataclass(slots=True)
class ItemBuffers:
    """An item's memory, which its rows are drained into."""

    shape: ItemShape
    data: Bytes


@dataclass(slots=True)
class EncoderOutput:
    """An encoder's output, and its rows once they are on the host."""

    shape: ItemShape
    copy: HostCopy
    data: Bytes | None = None


_Output = tuple[int, EncoderOutput]


class IoWorkers:
    """The data plane of a worker. `landing` is a consumer's, `writer` a producer's; else None.

    The control thread calls `perform` and `begin`, the model's thread `keep` and `take`.
    """

    def __init__(
        self, landing: LandingWindow | None, writer: RowWriter | None, *, kept_bytes: int = 0
    ) -> None:
        self._landing = landing
        self._writer = writer
        self._lock = threading.Lock()  # guards `_ready`
        self._ready: dict[str, ItemBuffers] = {}
        # The control thread's.
        self._memory = MemoryPool(kept_bytes)
        self._items: dict[str, ItemBuffers] = {}
        self._outputs: dict[int, EncoderOutput] = {}
        self._landed: list[_Drain] = []  # this turn's
        self._to_prepare: list[_Output] = []
        self._to_write: dict[Window, list[tuple[Write, RowCopy]]] = {}
        self._draining: list[queue.SimpleQueue[list[_Drain] | None]] = []  # of each drainer
        self._preparing = queue.SimpleQueue[list[_Output] | None]()
        self._writing = queue.SimpleQueue[list[_Writes] | None]()
        # From `start` on.
        self._drainers: list[WorkThread[_Drain, bool]] = []
        self._preparers: list[WorkThread[_Output, str]] = []
        self._writers: list[WorkThread[_Writes, list[_Result]]] = []

    def start(self, reports: Completions, *, writers: int, drainers: int) -> None:
        """Start the threads, before any other call."""
        self._reports = reports
        if self._landing is not None:
            window = self._landing.array
            self._draining = [queue.SimpleQueue() for _ in range(drainers)]
            self._drainers = [
                WorkThread(
                    DRAINER,
                    number,
                    take=inbox.get,
                    perform=lambda piece: drain(window, piece[1]) == piece[0].digests,
                    failed=lambda _: False,
                    report=lambda piece, same: reports.drained(piece[0].gid, same),
                    work_failed=reports.work_failed,
                )
                for number, inbox in enumerate(self._draining)
            ]
        if self._writer is not None:
            # One thread brings a step's outputs to the host, one after another; meanwhile the
            # writers send those that are there.
            preparer = WorkThread(
                PREPARER,
                0,
                take=self._preparing.get,
                perform=lambda output: _prepare(output[1]),
                failed=lambda _: "",
                report=lambda output, digest: reports.prepared(output[0], digest),
                work_failed=reports.work_failed,
            )
            self._preparers = [preparer]
            self._writers = [
                WorkThread(
                    WRITER,
                    number,
                    take=self._writing.get,
                    perform=partial(_write_all, self._writer),
                    failed=_as_failed,
                    report=self._report_written,
                    work_failed=reports.work_failed,
                )
                for number in range(writers)
            ]

    def perform(self, effect: Effect) -> None:
        """Perform an effect; what ends in a report is only queued, until `begin`.

        MemoryError or OSError if the host has no memory for an item.
        """
        # In the order of their frequency.
        match effect:
            case DrainRows(gid, mm_hash, runs):
                item = self._items.get(mm_hash)
                if item is None:  # the host had no memory for it
                    self._reports.drained(gid, False)
                else:
                    rows = RowCopy(item.data, item.shape, runs, gid)
                    self._landed.append((effect, rows))
            case Write(_, gid, item_id, window, runs):
                output = self._outputs[item_id]
                assert output.data is not None
                rows = RowCopy(output.data, output.shape, runs, gid)
                self._to_write.setdefault(window, []).append((effect, rows))
            case Allocate(mm_hash, shape):
                data = allocate(shape, self._memory)
                check_data(data, shape)
                self._items[mm_hash] = ItemBuffers(shape, data)
            case Ready(mm_hash):
                with self._lock:
                    self._ready[mm_hash] = self._items[mm_hash]
            case Discard(mm_hash):  # a drain under way keeps the memory until then
                self._items.pop(mm_hash, None)
                with self._lock:
                    self._ready.pop(mm_hash, None)
            case Prepare(item_id):
                self._to_prepare.append((item_id, self._outputs[item_id]))
            case Release(item_id):
                del self._outputs[item_id]

    def begin(self) -> None:
        """Start the work asked for since the last call."""
        if self._landed:
            landed, self._landed = self._landed, []
            shards: dict[int, list[_Drain]] = {}
            for piece in landed:
                shard = hash(piece[0].mm_hash) % len(self._draining)
                shards.setdefault(shard, []).append(piece)
            for shard, pieces in shards.items():
                for drains in batches_of(pieces, _nbytes_of, BATCH_BYTES):
                    self._draining[shard].put(drains)
        if self._to_prepare:
            outputs, self._to_prepare = self._to_prepare, []
            for batch in batches_of(
                outputs, lambda each: sampled_bytes(each[1].shape), BATCH_BYTES
            ):
                self._preparing.put(batch)
        if self._to_write:
            windows, self._to_write = self._to_write, {}
            for window, writes in windows.items():
                for part in batches_of(writes, _nbytes_of, WRITE_BATCH_BYTES):
                    self._writing.put([(window, part)])

    def keep(self, item_id: int, shape: ItemShape, copy: HostCopy) -> None:
        """Keep an encoder's output, before any effect that names it."""
        self._outputs[item_id] = EncoderOutput(shape, copy)

    def take(self, mm_hash: str) -> Tensor | None:
        """Return the tensor of a complete item; it is the caller's."""
        with self._lock:
            item = self._ready.pop(mm_hash, None)
        return None if item is None else tensor_of(item.shape, item.data)

    def _report_written(self, _: _Writes, results: list[_Result]) -> None:
        for each in results:
            self._reports.written(each)

    def close(self) -> None:
        """End all threads as far as possible, then close the window and the writers' memory."""
        for inbox in self._draining:
            inbox.put(None)
        for _ in self._preparers:
            self._preparing.put(None)
        for _ in self._writers:
            self._writing.put(None)
        for drainer in self._drainers:
            drainer.join(JOIN_S)
        for preparer in self._preparers:
            preparer.join(JOIN_S)
        have_ended = [thread.join(JOIN_S) for thread in self._writers]
        if self._writer is not None and all(have_ended):
            self._writer.close()
        if self._landing is not None:
            self._landing.close()


def _nbytes_of(each: tuple[DrainRows | Write, RowCopy]) -> int:
    return each[1].nbytes


def _prepare(output: EncoderOutput) -> str:
    """Wait until an output is on the host, and name its encoding."""
    data = as_bytes(output.copy.wait())
    check_data(data, output.shape)
    output.data = data
    return item_name(data)


def _write_all(writer: RowWriter, work: _Writes) -> list[_Result]:
    window, writes = work
    try:
        digests = writer.write(window, [rows for _, rows in writes])
    except WriteError as error:
        return [WriteFailed(each.tid, each.gid, error.quiesced, str(error)) for each, _ in writes]
    return [
        Wrote(each.tid, each.gid, rows.runs[0].row, sum(run.rows for run in rows.runs), found)
        for (each, rows), found in zip(writes, digests, strict=True)
    ]


def _as_failed(work: _Writes) -> list[_Result]:
    """Return failures for work whose writer met an error of ours. Its rows may still arrive."""
    text = "the thread that wrote it has failed"
    return [WriteFailed(each.tid, each.gid, False, text) for each, _ in work[1]]
