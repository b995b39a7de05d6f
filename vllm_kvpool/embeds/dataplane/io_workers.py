"""The threads that move rows, and the memory they move them between.

A preparer brings encoded items into host memory, writers write rows into peers' windows, and
drainers copy rows out of the own window and compare digests. All work of one turn of the control
thread starts together, several small pieces per thread, and each batch is reported by one call;
each piece is reported once.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from vllm_kvpool.embeds.dataplane.row_bytes import (
    Bytes,
    RowWrite,
    WriteError,
    check_planes,
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
    tensors_of,
)
from vllm_kvpool.embeds.dataplane.transports import LandingWindow, WriterPlane
from vllm_kvpool.embeds.faults import DRAINER, PREPARER, WRITER, Died, LogLimit, WorkThread
from vllm_kvpool.embeds.machines.effects import DrainRows, Write
from vllm_kvpool.embeds.protocol.messages import Window, WriteFailed, Wrote
from vllm_kvpool.embeds.protocol.rows import ItemShape

BATCH_BYTES = 1 << 20  # copying them takes long compared with waking a thread

W = TypeVar("W")


def batches_of(
    works: Iterable[W], nbytes_of: Callable[[W], int], most_bytes: int = BATCH_BYTES
) -> Iterator[list[W]]:
    """Batches of at most so many bytes, or of one piece, in order."""
    batch: list[W] = []
    batch_bytes = 0
    for work in works:
        nbytes = nbytes_of(work)
        if batch and batch_bytes + nbytes > most_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(work)
        batch_bytes += nbytes
    if batch:
        yield batch


BUSY_BYTES = 4 << 20  # queued for a thread before the next is woken: under a millisecond's work


class DrainJob(msgspec.Struct, frozen=True, gc=False):
    """Rows in the window, and the item's memory that they go to."""

    work: DrainRows
    planes: Sequence[Bytes]
    shape: ItemShape
    nbytes: int


class DrainLanes:
    """Which thread drains what (pure).

    Rows of an item go to the thread that has earlier ones of it, behind them: rows of an item
    that began anew overwrite older ones. All else goes to the first thread with little to do, so
    small items keep few threads busy, where waking one costs as much as a copy, and large ones
    are spread.
    """

    def __init__(self, lanes: int) -> None:
        self._nbytes = [0] * lanes  # queued for each lane
        self._items: dict[str, tuple[int, int]] = {}  # item -> its lane, and its pieces there

    def take(self, mm_hash: str, nbytes: int) -> int:
        lane, pieces = self._items.get(mm_hash, (-1, 0))
        if not pieces:
            lane = self._next(nbytes)
        self._items[mm_hash] = lane, pieces + 1
        self._nbytes[lane] += nbytes
        return lane

    def _next(self, nbytes: int) -> int:
        for lane, busy in enumerate(self._nbytes):
            if not busy or busy + nbytes <= BUSY_BYTES:
                return lane
        return self._nbytes.index(min(self._nbytes))

    def end(self, mm_hash: str, nbytes: int) -> None:
        lane, pieces = self._items.pop(mm_hash)
        self._nbytes[lane] -= nbytes
        if pieces > 1:
            self._items[mm_hash] = lane, pieces - 1


class Drainers:
    """The threads that copy rows out of the window. One thread calls; `done` is called on any."""

    def __init__(
        self,
        window: Bytes,
        threads: int,
        done: Callable[[Sequence[tuple[int, bool]]], None],
        died: Died,
        log: LogLimit,
    ) -> None:
        self._log = log
        self._window = window
        self._done = done
        self._lock = threading.Lock()  # guards `_lanes`
        self._lanes = DrainLanes(threads)
        self._queues = [queue.SimpleQueue[list[DrainJob] | None]() for _ in range(threads)]
        self._threads = [
            WorkThread(
                f"{DRAINER}-{n}",
                take=inbox.get,
                perform=self._drain_all,
                failed=_none_of,
                report=self._report,
                died=died,
            )
            for n, inbox in enumerate(self._queues)
        ]

    def put(self, pieces: Iterable[DrainJob]) -> None:
        """Drain these after what was put before."""
        batches: dict[int, list[DrainJob]] = {}
        with self._lock:
            for piece in pieces:
                lane = self._lanes.take(piece.work.mm_hash, piece.nbytes)
                batches.setdefault(lane, []).append(piece)
        for lane, batch in batches.items():
            for part in batches_of(batch, lambda piece: piece.nbytes):
                self._queues[lane].put(part)

    def close(self) -> None:
        """End after what was put before."""
        for inbox in self._queues:
            inbox.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)

    def _drain_all(self, batch: list[DrainJob]) -> "_Drained":
        return batch, [self._drain(piece) for piece in batch]

    def _report(self, drained: "_Drained") -> None:
        batch, same = drained
        with self._lock:
            for piece in batch:
                self._lanes.end(piece.work.mm_hash, piece.nbytes)
        self._done([(piece.work.gid, each) for piece, each in zip(batch, same, strict=True)])

    def _drain(self, piece: DrainJob) -> bool:
        """Whether the rows that arrived are those that were sent."""
        work = piece.work
        try:
            found = drain(self._window, piece.planes, piece.shape, work.runs, work.gid)
            return found == work.digests
        except Exception as error:  # costs only these rows
            text = (
                "kvpool: rows of %s could not be copied out of the window; they are granted again"
            )
            self._log.log(logging.ERROR, "drain", "", text, work.mm_hash, error=error)
            return False


_Drained = tuple[list[DrainJob], list[bool]]  # pieces, and whether each is what was sent


def _none_of(batch: list[DrainJob]) -> _Drained:
    return batch, [False] * len(batch)


logger = logging.getLogger(__name__)

JOIN_S = 0.5
WRITE_BATCH_BYTES = 4 << 20
"""Written together: a network answers each write, and each answer is waited for."""
DEATH = WriteError("the thread that wrote it has died", quiesced=False)


class Completions(Protocol):
    """Where ends of work are reported; any thread."""

    def drained(self, grants: Sequence[tuple[int, bool]]) -> None: ...
    def prepared(self, items: Sequence[tuple[int, str]]) -> None: ...
    def written(self, results: Sequence[Wrote | WriteFailed]) -> None: ...
    def thread_died(self, name: str, error: BaseException) -> None: ...


@dataclass(slots=True)
class ItemBuffers:
    """An item's memory, which its rows are drained into."""

    shape: ItemShape
    planes: list[Bytes]


@dataclass(slots=True)
class EncoderOutput:
    """What an encoder computed, and its rows once they are on the host."""

    shape: ItemShape
    copies: Sequence[HostCopy]
    planes: list[Bytes] | None = None


_Outputs = list[tuple[int, EncoderOutput]]
_Writes = list[tuple[Write, EncoderOutput]]


class IoWorkers:
    """The data plane of a worker. `landing` is a consumer's, `plane` a producer's; else None.

    The control thread calls `allocate` to `begin`, the model's thread `keep` and `take`.
    """

    def __init__(
        self,
        reports: Completions,
        landing: LandingWindow | None,
        plane: WriterPlane | None,
        *,
        writers: int,
        drainers: int,
        kept_bytes: int = 0,
        log: LogLimit | None = None,
    ) -> None:
        self._reports = reports
        self._log = log or LogLimit(logger)
        self._landing = landing
        self._plane = plane
        self._memory = MemoryPool(kept_bytes)  # the control thread's, as
        self._items: dict[str, ItemBuffers] = {}
        self._outputs: dict[int, EncoderOutput] = {}
        self._ready: dict[str, ItemBuffers] = {}
        self._lock = threading.Lock()  # guards `_ready`
        self._landed: list[DrainJob] = []  # this turn's
        self._to_prepare: _Outputs = []
        self._to_write: dict[Window, _Writes] = {}
        self._preparing = queue.SimpleQueue[_Outputs | None]()
        self._writing = queue.SimpleQueue[tuple[Window, _Writes] | None]()
        died = reports.thread_died
        self._drainers = (
            Drainers(landing.array, drainers, reports.drained, died, self._log) if landing else None
        )
        self._senders: list[WorkThread[Any, Any]] = []
        if plane is not None:
            # One thread brings a step's outputs to the host, one after another; meanwhile the
            # writers send those that are there.
            preparer = WorkThread(
                PREPARER,
                take=self._preparing.get,
                perform=self._prepare_all,
                failed=lambda outputs: [(item_id, "") for item_id, _ in outputs],
                report=reports.prepared,
                died=died,
            )
            self._senders = [preparer, *(self._writer(n) for n in range(writers))]

    def _writer(self, n: int) -> WorkThread[Any, Any]:
        return WorkThread(
            f"{WRITER}-{n}",
            take=self._writing.get,
            perform=lambda work: self._write_all(*work),
            failed=lambda work: [_result(write, DEATH) for write, _ in work[1]],
            report=self._reports.written,
            died=self._reports.thread_died,
        )

    # Consumer

    def allocate(self, mm_hash: str, shape: ItemShape) -> None:
        """Allocate an item's memory; MemoryError or OSError. Pages are committed when rows
        arrive.
        """
        planes = allocate(shape, self._memory)
        check_planes(planes, shape)
        self._items[mm_hash] = ItemBuffers(shape, planes)

    def discard(self, mm_hash: str) -> None:
        """Free an item's memory; a drain under way keeps it until then."""
        self._items.pop(mm_hash, None)
        with self._lock:
            self._ready.pop(mm_hash, None)

    def ready(self, mm_hash: str) -> None:
        with self._lock:
            self._ready[mm_hash] = self._items[mm_hash]

    def take(self, mm_hash: str) -> list[Tensor] | None:
        """The tensors of a complete item, one for each plane; they are the caller's."""
        with self._lock:
            item = self._ready.pop(mm_hash, None)
        return None if item is None else tensors_of(item.shape, item.planes)

    def drain(self, work: DrainRows) -> None:
        """Copy rows out of the window; reports failure if the item has no memory."""
        item = self._items.get(work.mm_hash)
        if item is None:
            self._reports.drained(((work.gid, False),))
            return
        self._landed.append(DrainJob(work, item.planes, item.shape, _nbytes_of(work, item.shape)))

    # Producer

    def keep(self, item_id: int, shape: ItemShape, copies: Sequence[HostCopy]) -> None:
        """Keep an encoder's output, before any effect that names it."""
        self._outputs[item_id] = EncoderOutput(shape, copies)

    def prepare(self, item_id: int) -> None:
        """Wait until an output is on the host, and name its encoding."""
        self._to_prepare.append((item_id, self._outputs[item_id]))

    def write(self, work: Write) -> None:
        self._to_write.setdefault(work.window, []).append((work, self._outputs[work.item_id]))

    def release(self, item_id: int) -> None:
        del self._outputs[item_id]

    def begin(self) -> None:
        """Start the work asked for since the last call."""
        if self._landed:
            assert self._drainers is not None
            landed, self._landed = self._landed, []
            self._drainers.put(landed)
        if self._to_prepare:
            outputs, self._to_prepare = self._to_prepare, []
            for batch in batches_of(outputs, lambda each: sampled_bytes(each[1].shape)):
                self._preparing.put(batch)
        if self._to_write:
            windows, self._to_write = self._to_write, {}
            for window, writes in windows.items():
                for part in batches_of(writes, _written_bytes, WRITE_BATCH_BYTES):
                    self._writing.put((window, part))

    # The preparer's and the writers' threads

    def _prepare_all(self, outputs: _Outputs) -> list[tuple[int, str]]:
        return [(item_id, self._prepare(output)) for item_id, output in outputs]

    def _prepare(self, output: EncoderOutput) -> str:
        try:
            planes = [as_bytes(copy.wait()) for copy in output.copies]
            check_planes(planes, output.shape)
            digest = item_name(planes)
        except Exception as error:  # costs only this output
            text = (
                "kvpool: an encoder's output could not be copied to the host; the item is withdrawn"
            )
            self._log.log(logging.ERROR, "prepare", "", text, error=error)
            return ""
        output.planes = planes
        return digest

    def _write_all(self, window: Window, writes: _Writes) -> list[Wrote | WriteFailed]:
        assert self._plane is not None
        given = []
        for write, output in writes:
            assert output.planes is not None
            given.append(RowWrite(output.planes, output.shape, write.runs, write.gid))
        results: Sequence[tuple[int, ...] | WriteError]
        try:
            results = self._plane.write(window, given)
        except Exception as error:
            text = "kvpool: rows could not be written to a peer; they are granted again"
            self._log.log(logging.ERROR, "write", "", text, error=error)
            results = [WriteError(repr(error), quiesced=False)] * len(given)
        return [_result(write, result) for (write, _), result in zip(writes, results, strict=True)]

    def close(self) -> None:
        """End all threads as far as possible, then close the window and the writers' memory."""
        if self._drainers is not None:
            self._drainers.close()
        self._preparing.put(None)
        for _ in self._senders:
            self._writing.put(None)
        have_ended = [thread.join(JOIN_S) for thread in self._senders]
        if self._plane is not None and all(have_ended):
            self._plane.close()
        if self._landing is not None:
            self._landing.close()


def _rows_of(work: DrainRows | Write) -> int:
    rows = 0
    for run in work.runs:
        rows += run.rows
    return rows


def _nbytes_of(work: DrainRows | Write, shape: ItemShape) -> int:
    return _rows_of(work) * shape.row_bytes


def _written_bytes(each: tuple[Write, EncoderOutput]) -> int:
    work, output = each
    return _nbytes_of(work, output.shape)


def _result(work: Write, result: tuple[int, ...] | WriteError) -> Wrote | WriteFailed:
    if isinstance(result, WriteError):
        return WriteFailed(work.tid, work.gid, result.quiesced, str(result))
    return Wrote(work.tid, work.gid, work.runs[0].row, _rows_of(work), result)
