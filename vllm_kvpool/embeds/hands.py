"""The threads that move rows, and the memory they move them between.

Writers bring sources into host memory and rows of them into peers' windows; drainers copy rows out
of the own window and compare digests. The rows of one item are always drained by the same thread,
in order, so what was sent before an item began anew is overwritten by what came after. Each piece
of work is reported once, by a call posted to the control thread.

The control thread calls `allocate` to `release`; the model's thread `keep` and `take`.
"""

import logging
import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_kvpool.embeds.dataplane import LandingMemory, WriterPlane
from vllm_kvpool.embeds.effects import Drain, Write
from vllm_kvpool.embeds.protocol import WriteFailed, Wrote
from vllm_kvpool.embeds.rows import ItemShape
from vllm_kvpool.embeds.run_bytes import Bytes, drain, item_name
from vllm_kvpool.embeds.tensors import HostCopy, Tensor, allocate, as_bytes
from vllm_kvpool.embeds.writes import WriteError

logger = logging.getLogger(__name__)

JOIN_S = 0.5

Work = Callable[[], None]


class Reports(Protocol):
    """Where ends are told; any thread."""

    def drained(self, gid: int, same: bool) -> None: ...
    def prepared(self, sid: int, digest: str) -> None: ...
    def written(self, tid: int, gid: int, result: Wrote | WriteFailed) -> None: ...


@dataclass(slots=True)
class Item:
    """Memory that rows arrive in."""

    shape: ItemShape
    tensors: list[Tensor]
    planes: list[Bytes]


@dataclass(slots=True)
class Source:
    """What an encoder has left, and where its rows lie once they are on the host."""

    shape: ItemShape
    copies: Sequence[HostCopy]
    planes: list[Bytes] | None = None


class Lane:
    """One thread and its queue."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        """Do this after all that was put before."""
        self._queue.put(work)

    def close(self) -> None:
        """End after what was put; a thread stuck in a transfer is left behind."""
        self._queue.put(None)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # it has an item, which would be kept until the next one comes


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
    ) -> None:
        self._reports = reports
        self._landing = landing
        self._plane = plane
        self._items: dict[str, Item] = {}  # the control thread's
        self._sources: dict[int, Source] = {}
        self._ready: dict[str, list[Tensor]] = {}
        self._lock = threading.Lock()  # guards `_ready`
        self._writes: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._drainers = [Lane(f"kvpool-ec-drain-{n}") for n in range(drainers if landing else 0)]
        self._writers = [
            threading.Thread(target=self._write_loop, name=f"kvpool-ec-write-{n}", daemon=True)
            for n in range(writers if plane else 0)
        ]
        for thread in self._writers:
            thread.start()

    # Consumer

    def allocate(self, mm_hash: str, shape: ItemShape) -> None:
        """Memory for an item; the pages are touched only when rows arrive."""
        tensors = allocate(shape)
        self._items[mm_hash] = Item(shape, tensors, [as_bytes(tensor) for tensor in tensors])

    def discard(self, mm_hash: str) -> None:
        """Let go of an item's memory; who still drains into it keeps it until then."""
        self._items.pop(mm_hash, None)
        with self._lock:
            self._ready.pop(mm_hash, None)

    def ready(self, mm_hash: str) -> None:
        """Every row of an item is there."""
        with self._lock:
            self._ready[mm_hash] = self._items[mm_hash].tensors

    def take(self, mm_hash: str) -> list[Tensor] | None:
        """The tensors of an item that is ready, one for each plane; they are the caller's."""
        with self._lock:
            return self._ready.pop(mm_hash, None)

    def drain(self, work: Drain) -> None:
        """Copy rows out of the window."""
        assert self._landing is not None
        item, array = self._items[work.mm_hash], self._landing.array
        lane = self._drainers[zlib.crc32(work.mm_hash.encode()) % len(self._drainers)]

        def run() -> None:
            same = False
            try:
                digests = drain(array, item.planes, item.shape, work.runs, work.gid)
                same = digests == work.digests
            except Exception:  # a lane reports whatever happens
                logger.exception("kvpool: rows could not be copied out of the window")
            self._reports.drained(work.gid, same)

        lane.put(run)

    # Producer

    def keep(self, sid: int, shape: ItemShape, copies: Sequence[HostCopy]) -> None:
        """What an encoder has left. Comes before the effects that name it."""
        self._sources[sid] = Source(shape, copies)

    def prepare(self, sid: int) -> None:
        """Wait until a source is on the host, and name it."""
        source = self._sources[sid]

        def run() -> None:
            digest = ""
            try:
                planes = [as_bytes(copy.wait()) for copy in source.copies]
                digest = item_name(planes)
                source.planes = planes
            except Exception:
                logger.exception("kvpool: an encoder's output could not be read")
            self._reports.prepared(sid, digest)

        self._writes.put(run)

    def write(self, work: Write) -> None:
        """Write rows into a peer's window."""
        source = self._sources[work.sid]
        self._writes.put(
            lambda: self._reports.written(work.tid, work.gid, self._write(source, work))
        )

    def _write(self, source: Source, work: Write) -> Wrote | WriteFailed:
        assert self._plane is not None
        assert source.planes is not None
        rows = sum(run.rows for run in work.runs)
        try:
            digests = self._plane.write(
                work.window, source.planes, source.shape, work.runs, work.gid
            )
        except WriteError as error:
            return WriteFailed(work.tid, work.gid, error.quiesced, str(error))
        except Exception as error:
            logger.exception("kvpool: rows could not be written")
            return WriteFailed(work.tid, work.gid, False, repr(error))
        return Wrote(work.tid, work.gid, work.runs[0].row, rows, digests)

    def release(self, sid: int) -> None:
        """A source is not needed any more."""
        del self._sources[sid]

    def _write_loop(self) -> None:
        while (work := self._writes.get()) is not None:
            work()
            del work  # as of a lane

    def close(self) -> None:
        """End all threads, as far as they can be; then the window and the writers' memory."""
        for lane in self._drainers:
            lane.close()
        for _ in self._writers:
            self._writes.put(None)
        for thread in self._writers:
            thread.join(JOIN_S)
        is_stuck = any(thread.is_alive() for thread in self._writers)
        if self._plane is not None and not is_stuck:
            self._plane.close()
        if self._landing is not None:
            self._landing.close()
