"""The threads that move rows, and the memory they move them between.

Writers bring sources into host memory and rows of them into peers' windows; drainers copy rows out
of the own window and compare digests. What is noted in one turn of the control thread begins
together, several small pieces with one thread, and each batch is reported by one call. Each piece
of work is reported once.

The control thread calls `allocate` to `begin`; the model's thread `keep` and `take`.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from vllm_kvpool.embeds.batches import batches_of
from vllm_kvpool.embeds.dataplane import LandingMemory, RowWrite, WriterPlane
from vllm_kvpool.embeds.drainers import Drainers, Landed
from vllm_kvpool.embeds.effects import Drain, Write
from vllm_kvpool.embeds.kept_memory import KeptMemory
from vllm_kvpool.embeds.log_limit import LogLimit
from vllm_kvpool.embeds.protocol import Window, WriteFailed, Wrote
from vllm_kvpool.embeds.rows import ItemShape
from vllm_kvpool.embeds.run_bytes import Bytes, check_planes, item_name, sampled_bytes
from vllm_kvpool.embeds.tensors import HostCopy, Tensor, allocate, as_bytes, tensors_of
from vllm_kvpool.embeds.threads import WRITER, WorkThread
from vllm_kvpool.embeds.two_lines import TwoLines
from vllm_kvpool.embeds.writes import WriteError

logger = logging.getLogger(__name__)

JOIN_S = 0.5
WRITE_BATCH_BYTES = 4 << 20
"""Of one transfer: a network answers each, and each answer is waited for."""

SOURCES, WRITES = 0, 1  # lines of work


class Reports(Protocol):
    """Where ends are told; any thread."""

    def drained(self, grants: Sequence[tuple[int, bool]]) -> None: ...
    def prepared(self, sources: Sequence[tuple[int, str]]) -> None: ...
    def written(self, results: Sequence[Wrote | WriteFailed]) -> None: ...
    def thread_died(self, name: str, error: BaseException) -> None: ...


@dataclass(slots=True)
class Item:
    """Memory that rows arrive in."""

    shape: ItemShape
    planes: list[Bytes]


@dataclass(slots=True)
class Source:
    """What an encoder has left, and where its rows lie once they are on the host."""

    shape: ItemShape
    copies: Sequence[HostCopy]
    planes: list[Bytes] | None = None


@dataclass(frozen=True, slots=True)
class _Preparing:
    """Sources that one writer brings into host memory."""

    sources: list[tuple[int, Source]]


@dataclass(frozen=True, slots=True)
class _Writing:
    """Writes to one window that go together."""

    window: Window
    writes: list[tuple[Write, Source]]


_Work = _Preparing | _Writing
_Told = Callable[[], None]
"""Tells what came of work."""


class MovingHands:
    """See the module docstring. `landing` is a consumer's, `plane` a producer's; else None."""

    def __init__(
        self,
        reports: Reports,
        landing: LandingMemory | None,
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
        self._memory = KeptMemory(kept_bytes)  # the control thread's, as
        self._items: dict[str, Item] = {}
        self._sources: dict[int, Source] = {}
        self._ready: dict[str, Item] = {}
        self._lock = threading.Lock()  # guards `_ready`
        self._landed: list[Landed] = []  # this turn's
        self._to_prepare: list[tuple[int, Source]] = []
        self._to_write: dict[Window, list[tuple[Write, Source]]] = {}
        self._work: TwoLines[_Work] = TwoLines()
        died = reports.thread_died
        self._drainers = (
            Drainers(landing.array, drainers, reports.drained, died, self._log) if landing else None
        )
        # One brings sources to the host while others write; else a thousand outputs of one step
        # would all have to be there before the first row leaves.
        self._writers = [
            WorkThread(
                f"{WRITER}-{n}",
                take=partial(self._work.get, WRITES if n else SOURCES),
                perform=self._perform,
                failed=self._failed,
                report=_tell,
                died=died,
            )
            for n in range(writers if plane else 0)
        ]

    # Consumer

    def allocate(self, mm_hash: str, shape: ItemShape) -> None:
        """Memory for an item; the pages are touched only when rows arrive.

        MemoryError or OSError if the host has none.
        """
        planes = allocate(shape, self._memory)
        check_planes(planes, shape)
        self._items[mm_hash] = Item(shape, planes)

    def discard(self, mm_hash: str) -> None:
        """Let go of an item's memory; who still drains into it keeps it until then."""
        self._items.pop(mm_hash, None)
        with self._lock:
            self._ready.pop(mm_hash, None)

    def ready(self, mm_hash: str) -> None:
        """Every row of an item is there."""
        with self._lock:
            self._ready[mm_hash] = self._items[mm_hash]

    def take(self, mm_hash: str) -> list[Tensor] | None:
        """The tensors of an item that is ready, one for each plane; they are the caller's."""
        with self._lock:
            item = self._ready.pop(mm_hash, None)
        return None if item is None else tensors_of(item.shape, item.planes)

    def drain(self, work: Drain) -> None:
        """Copy rows out of the window, unless there was no memory for the item."""
        item = self._items.get(work.mm_hash)
        if item is None:
            self._reports.drained(((work.gid, False),))
            return
        self._landed.append(Landed(work, item.planes, item.shape, _nbytes_of(work, item.shape)))

    # Producer

    def keep(self, sid: int, shape: ItemShape, copies: Sequence[HostCopy]) -> None:
        """What an encoder has left. Comes before the effects that name it."""
        self._sources[sid] = Source(shape, copies)

    def prepare(self, sid: int) -> None:
        """Wait until a source is on the host, and name it."""
        self._to_prepare.append((sid, self._sources[sid]))

    def write(self, work: Write) -> None:
        """Write rows into a peer's window."""
        self._to_write.setdefault(work.window, []).append((work, self._sources[work.sid]))

    def release(self, sid: int) -> None:
        """A source is not needed any more."""
        del self._sources[sid]

    def begin(self) -> None:
        """Begin with what has been asked for since the last time."""
        if self._landed:
            assert self._drainers is not None
            landed, self._landed = self._landed, []
            self._drainers.put(landed)
        if self._to_prepare:
            sources, self._to_prepare = self._to_prepare, []
            for batch in batches_of(sources, lambda each: sampled_bytes(each[1].shape)):
                self._work.put(SOURCES, _Preparing(batch))
        if self._to_write:
            windows, self._to_write = self._to_write, {}
            for window, writes in windows.items():
                for part in batches_of(writes, _written_bytes, WRITE_BATCH_BYTES):
                    self._work.put(WRITES, _Writing(window, part))

    # Writers' threads

    def _perform(self, work: _Work) -> _Told:
        if isinstance(work, _Preparing):
            named = [(sid, self._prepare(source)) for sid, source in work.sources]
            return partial(self._reports.prepared, named)
        return partial(self._reports.written, self._write_all(work))

    def _failed(self, work: _Work) -> _Told:
        """What is told of work that its thread died of."""
        if isinstance(work, _Preparing):
            return partial(self._reports.prepared, [(sid, "") for sid, _ in work.sources])
        error = WriteError("the thread that wrote it has died", quiesced=False)
        return partial(self._reports.written, [_result(each, error) for each, _ in work.writes])

    def _prepare(self, source: Source) -> str:
        try:
            planes = [as_bytes(copy.wait()) for copy in source.copies]
            check_planes(planes, source.shape)
            digest = item_name(planes)
        except Exception as error:  # costs this source alone
            text = "kvpool: an encoder's output could not be read"
            self._log.log(logging.ERROR, "prepare", "", text, error=error)
            return ""
        source.planes = planes
        return digest

    def _write_all(self, work: _Writing) -> list[Wrote | WriteFailed]:
        assert self._plane is not None
        given = []
        for write, source in work.writes:
            assert source.planes is not None
            given.append(RowWrite(source.planes, source.shape, write.runs, write.gid))
        results: Sequence[tuple[int, ...] | WriteError]
        try:
            results = self._plane.write_all(work.window, given)
        except Exception as error:
            text = "kvpool: rows could not be written"
            self._log.log(logging.ERROR, "write", "", text, error=error)
            results = [WriteError(repr(error), quiesced=False)] * len(given)
        pairs = zip(work.writes, results, strict=True)
        return [_result(write, result) for (write, _), result in pairs]

    def close(self) -> None:
        """End all threads, as far as they can be; then the window and the writers' memory."""
        if self._drainers is not None:
            self._drainers.close()
        self._work.close(len(self._writers))
        have_ended = [thread.join(JOIN_S) for thread in self._writers]
        if self._plane is not None and all(have_ended):
            self._plane.close()
        if self._landing is not None:
            self._landing.close()


def _tell(told: _Told) -> None:
    told()


def _rows_of(work: Drain | Write) -> int:
    rows = 0
    for run in work.runs:
        rows += run.rows
    return rows


def _nbytes_of(work: Drain | Write, shape: ItemShape) -> int:
    return _rows_of(work) * shape.row_bytes


def _written_bytes(each: tuple[Write, Source]) -> int:
    work, source = each
    return _nbytes_of(work, source.shape)


def _result(work: Write, result: tuple[int, ...] | WriteError) -> Wrote | WriteFailed:
    if isinstance(result, WriteError):
        return WriteFailed(work.tid, work.gid, result.quiesced, str(result))
    return Wrote(work.tid, work.gid, work.runs[0].row, _rows_of(work), result)
