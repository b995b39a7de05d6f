"""Moving bytes between files and memory, many at a time.

`DiskIO.run` is fed by an iterator that opens files and answers in the order of completion, so that
opening, publishing and the disk's work overlap. `pump` is the part that all ways have in common:
it continues what was moved in part, repeats what was interrupted, and does not end before nothing
is in flight. Below it is an `IOQueue`: a ring (uring.py) or a few threads.

Invariants: a transfer is reported once; error 0 means every byte was moved; after `run` ended, or
was closed, the kernel touches none of its memory but that of transfers reported `in_use`. Where
nobody takes reports any more, `BuffersInUse` says that there are some.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from vllm_kvpool.errors import BuffersInUse
from vllm_kvpool.storage.base import Buffer

THREAD_COUNT = 4
THREAD_DEPTH = 2 * THREAD_COUNT  # one being moved and one waiting for each thread
SUBMIT_EVERY = 4  # files opened before the disk is told of them
MAX_REPEATS = 8  # of a transfer that was interrupted or refused for now
GIVE_UP_S = 120.0  # without any completion; the kernel's own limit for a disk is shorter

IO_CHOICES = ("auto", "uring", "threads")

_FOR_NOW = frozenset({errno.EINTR, errno.EAGAIN})


class Transfer(NamedTuple):
    """All of `parts`, in turn, to or from the start of a file."""

    tag: int  # the caller's own; no two in flight are equal
    fd: int
    parts: tuple[Buffer, ...]  # with O_DIRECT: addresses and sizes are whole pages
    writes: bool

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def after(self, skip_bytes: int) -> list[Buffer]:
        """What remains of the parts after the first bytes."""
        if skip_bytes == 0:
            return list(self.parts)
        rest: list[Buffer] = []
        for address, view in self.parts:
            if skip_bytes < view.nbytes:
                rest.append(Buffer(address + skip_bytes, view[skip_bytes:]))
            skip_bytes = max(skip_bytes - view.nbytes, 0)
        return rest


class Done(NamedTuple):
    """The end of a transfer: an errno, 0 if all was moved; ENODATA if a file ended early.

    `in_use` if the memory may still be touched, which must then never be used again; likewise the
    file, which must stay open: a thread may not have begun, and its number would be another's.
    """

    tag: int
    error: int
    in_use: bool = False


class GaveUp(Exception):
    """A queue whose completions do not come; it and what is in it are left behind."""


class IOQueue(Protocol):
    """Transfers in flight; one thread at a time. A completion is (tag, bytes moved or -errno)."""

    depth: int

    def post(self, transfer: Transfer, skip_bytes: int) -> None:
        """Take a transfer, less its first bytes; it starts at the latest with `wait`."""

    def submit(self) -> None:
        """Start what was posted. What cannot be started is a completion of the next `wait`."""

    def wait(self) -> list[tuple[int, int]]:
        """At least one completion; GaveUp if none comes within a bound."""


class DiskIO(Protocol):
    """A way to move bytes; any thread may call, each `run` stays in one."""

    name: str

    def run(self, transfers: Iterable[Transfer]) -> Generator[Done, None, None]:
        """Perform transfers; to be closed. Draws more from the iterator as others end."""

    def close(self) -> None:
        """Release what is kept between runs; none may be under way."""


@dataclass(slots=True)
class _Flight:
    transfer: Transfer
    moved_bytes: int = 0
    num_repeats: int = 0

    def account(self, result: int) -> int | None:
        """What a completion means: an errno or 0 to report, None if there is more to move."""
        if -result in _FOR_NOW and self.num_repeats < MAX_REPEATS:
            self.num_repeats += 1
            return None
        if result < 0:
            return -result
        self.moved_bytes += result
        assert self.moved_bytes <= self.transfer.nbytes, (self, result)
        if self.moved_bytes == self.transfer.nbytes:
            return 0
        if result == 0:
            return errno.EIO if self.transfer.writes else errno.ENODATA
        return None


# Memory that a queue which gave up may still write to, or read from; kept for ever.
_abandoned: list[list[Transfer]] = []


def pump(queue: IOQueue, transfers: Iterable[Transfer]) -> Generator[Done, None, None]:
    """Keep up to `queue.depth` transfers in flight until all are done; to be closed."""
    flights: dict[int, _Flight] = {}
    source = iter(transfers)
    exhausted = False
    try:
        while True:
            while not exhausted and len(flights) < queue.depth:
                transfer = next(source, None)
                if transfer is None:
                    exhausted = True
                    break
                assert transfer.tag not in flights, transfer.tag
                flights[transfer.tag] = _Flight(transfer)
                queue.post(transfer, 0)
                if len(flights) % SUBMIT_EVERY == 0:
                    queue.submit()
            if not flights:
                return
            ended = _collect(queue, flights)
            yield from ended
            if any(done.in_use for done in ended):
                break
        for transfer in source:
            yield Done(transfer.tag, errno.EIO)
    finally:
        # Whoever closes us, or failed while feeding us, may release the memory afterwards.
        while flights:
            if any(done.in_use for done in _collect(queue, flights)):
                raise BuffersInUse("the disk does not answer")


def _collect(queue: IOQueue, flights: dict[int, _Flight]) -> list[Done]:
    """Wait; take what ended out of `flights`, and post again what did not end."""
    try:
        completions = queue.wait()
    except GaveUp:
        lost = [flight.transfer for flight in flights.values()]
        _abandoned.append(lost)
        flights.clear()
        return [Done(transfer.tag, errno.EIO, in_use=True) for transfer in lost]
    ended: list[Done] = []
    for tag, result in completions:
        flight = flights[tag]
        error = flight.account(result)
        if error is None:
            queue.post(flight.transfer, flight.moved_bytes)
        else:
            del flights[tag]
            ended.append(Done(tag, error))
    return ended


def move(transfer: Transfer, skip_bytes: int) -> int:
    """Perform a transfer, or a part of it, in this thread; bytes moved or -errno."""
    views = [part.view for part in transfer.after(skip_bytes)]
    call = os.pwritev if transfer.writes else os.preadv
    try:
        return call(transfer.fd, views, skip_bytes)
    except OSError as error:
        return -(error.errno or errno.EIO)


class ThreadQueue:
    """Threads that read and write for one `run`, started as needed; ended by `close`."""

    depth = THREAD_DEPTH

    def __init__(self) -> None:
        # Both hold at most `depth` transfers, and a None for each thread.
        self._todo: SimpleQueue[tuple[Transfer, int] | None] = SimpleQueue()
        self._completions: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def post(self, transfer: Transfer, skip_bytes: int) -> None:
        self._todo.put((transfer, skip_bytes))
        if len(self._threads) < THREAD_COUNT:
            thread = threading.Thread(target=self._work, name="kvpool-disk", daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self) -> None:
        pass

    def wait(self) -> list[tuple[int, int]]:
        try:
            completions = [self._completions.get(timeout=GIVE_UP_S)]
        except Empty:
            raise GaveUp from None
        with contextlib.suppress(Empty):
            while True:
                completions.append(self._completions.get_nowait())
        return completions

    def close(self) -> None:
        """Let the threads end; nothing is in flight, or it is abandoned. Waits for none."""
        for _ in self._threads:
            self._todo.put(None)

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            transfer, skip_bytes = item
            self._completions.put((transfer.tag, move(transfer, skip_bytes)))


class ThreadDisk:
    """`preadv` and `pwritev` in a few threads; implements `DiskIO`."""

    name = "threads"

    def run(self, transfers: Iterable[Transfer]) -> Generator[Done, None, None]:
        queue = ThreadQueue()
        try:
            yield from pump(queue, transfers)
        finally:
            queue.close()

    def close(self) -> None:
        pass
