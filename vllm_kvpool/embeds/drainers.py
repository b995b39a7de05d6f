"""The threads that copy rows out of the window, and who of them does what.

What of an item is to be drained while other rows of it are goes to the same thread, behind them:
what was sent before an item began anew is overwritten by what came after. Everything else goes to
the first thread that has little to do: small items keep few threads busy, each with several of
them at a time, where to wake one takes as long as to copy; large ones are spread.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from vllm_kvpool.embeds.batches import batches_of
from vllm_kvpool.embeds.effects import Drain
from vllm_kvpool.embeds.log_limit import LogLimit
from vllm_kvpool.embeds.rows import ItemShape
from vllm_kvpool.embeds.run_bytes import Bytes, drain
from vllm_kvpool.embeds.threads import DRAINER, Died, WorkThread

JOIN_S = 0.5
BUSY_BYTES = 4 << 20  # what a thread has before the next one is woken: under a millisecond's work


class Landed(msgspec.Struct, frozen=True, gc=False):
    """Rows that lie in the window, and the item's memory that they go to."""

    work: Drain
    planes: Sequence[Bytes]
    shape: ItemShape
    nbytes: int


class Turns:
    """Which thread drains what (pure). `lanes` is their number."""

    def __init__(self, lanes: int) -> None:
        self._nbytes = [0] * lanes  # that each is still to copy
        self._items: dict[str, tuple[int, int]] = {}  # item -> its lane, and pieces it has there

    def take(self, mm_hash: str, nbytes: int) -> int:
        """The lane of a piece of an item."""
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
        """A piece has been copied."""
        lane, pieces = self._items.pop(mm_hash)
        self._nbytes[lane] -= nbytes
        if pieces > 1:
            self._items[mm_hash] = lane, pieces - 1


class Drainers:
    """See the module docstring. One thread calls; `done` is told on any."""

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
        self._lock = threading.Lock()  # guards `_turns`
        self._turns = Turns(threads)
        self._queues = [queue.SimpleQueue[list[Landed] | None]() for _ in range(threads)]
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

    def put(self, pieces: Iterable[Landed]) -> None:
        """Drain these, as soon as what came before is done."""
        batches: dict[int, list[Landed]] = {}
        with self._lock:
            for piece in pieces:
                lane = self._turns.take(piece.work.mm_hash, piece.nbytes)
                batches.setdefault(lane, []).append(piece)
        for lane, batch in batches.items():
            for part in batches_of(batch, lambda piece: piece.nbytes):
                self._queues[lane].put(part)

    def close(self) -> None:
        """End after what was put."""
        for inbox in self._queues:
            inbox.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)

    def _drain_all(self, batch: list[Landed]) -> "_Drained":
        return batch, [self._drain(piece) for piece in batch]

    def _report(self, drained: "_Drained") -> None:
        batch, same = drained
        with self._lock:
            for piece in batch:
                self._turns.end(piece.work.mm_hash, piece.nbytes)
        self._done([(piece.work.gid, each) for piece, each in zip(batch, same, strict=True)])

    def _drain(self, piece: Landed) -> bool:
        """Whether what has arrived is what was sent."""
        work = piece.work
        try:
            found = drain(self._window, piece.planes, piece.shape, work.runs, work.gid)
            return found == work.digests
        except Exception as error:  # costs these rows alone
            text = "kvpool: rows of %s could not be copied out of the window"
            self._log.log(logging.ERROR, "drain", "", text, work.mm_hash, error=error)
            return False


_Drained = tuple[list[Landed], list[bool]]  # pieces, and whether each is what was sent


def _none_of(batch: list[Landed]) -> _Drained:
    return batch, [False] * len(batch)
