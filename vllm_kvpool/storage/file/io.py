"""Moving bytes between files and memory, many transfers at a time.

`Disk.run` draws transfers from an iterator that opens files and yields them as they complete, so
that opening, publishing and the disk's work overlap. `pump` is common to both ways of moving: it
continues partial transfers, repeats interrupted ones and ends when nothing is in flight. Below it
is an `IOQueue`: an io_uring or a few threads; `choose_disk` tries which works in a directory.

Invariants: a transfer is reported once; error 0 means that every byte was moved; after `run` has
ended or was closed, no memory is accessed any more. So it takes as long as the disk does: who calls
it limits the time (`transfer/lane_pool.py`).
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.base import Buffer, map_buffer

logger = logging.getLogger(__name__)

THREAD_COUNT = 4
THREAD_DEPTH = 2 * THREAD_COUNT  # for each thread one under way and one waiting
SUBMIT_EVERY = 4  # transfers posted before they are submitted
MAX_REPEATS = 8  # of a transfer that ended with EINTR or EAGAIN

IO_CHOICES = ("auto", "uring", "threads")

_FOR_NOW = frozenset({errno.EINTR, errno.EAGAIN})


class Transfer(NamedTuple):
    """`parts`, one after the other, to or from the start of a file."""

    tag: int  # chosen by the caller, unique among those in flight
    fd: int
    parts: tuple[Buffer, ...]  # with O_DIRECT addresses and sizes must be page-aligned
    writes: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def after(self, skip_bytes: int) -> list[Buffer]:
        """Return the parts without their first `skip_bytes`."""
        if skip_bytes == 0:
            return list(self.parts)
        rest: list[Buffer] = []
        for part in self.parts:
            if skip_bytes < part.nbytes:
                rest.append(part.part(skip_bytes, part.nbytes))
            skip_bytes = max(skip_bytes - part.nbytes, 0)
        return rest


class Done(NamedTuple):
    """The end of a transfer: 0 if all was moved, or an errno; ENODATA if the file is short."""

    tag: int
    error: int


class IOQueue(Protocol):
    """Transfers in flight; one thread at a time. A completion is (tag, bytes moved or -errno)."""

    depth: int

    def post(self, transfer: Transfer, skip_bytes: int) -> None:
        """Queue a transfer without its first bytes; `wait` starts it at the latest."""

    def submit(self) -> None:
        """Start what was posted; the next `wait` reports what cannot be started."""

    def wait(self) -> list[tuple[int, int]]:
        """Wait for at least one completion."""


@dataclass(slots=True)
class _Flight:
    transfer: Transfer
    moved_bytes: int = 0
    num_repeats: int = 0

    def account(self, result: int) -> int | None:
        """Account for a completion: the errno or 0 to report, None to continue the transfer."""
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


def pump(queue: IOQueue, transfers: Iterable[Transfer]) -> Generator[Done, None, None]:
    """Keep up to `queue.depth` transfers in flight until all are done; the caller closes it."""
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
            yield from _collect(queue, flights)
    finally:
        # Once this has ended the caller may free the memory.
        while flights:
            _collect(queue, flights)


def _collect(queue: IOQueue, flights: dict[int, _Flight]) -> list[Done]:
    """Wait for completions; remove what ended from `flights` and post the rest again."""
    ended: list[Done] = []
    for tag, result in queue.wait():
        flight = flights[tag]
        error = flight.account(result)
        if error is None:
            queue.post(flight.transfer, flight.moved_bytes)
        else:
            del flights[tag]
            ended.append(Done(tag, error))
    return ended


def move(transfer: Transfer, skip_bytes: int) -> int:
    """Perform a transfer without its first bytes, maybe in part; bytes moved or -errno."""
    views = [part.view for part in transfer.after(skip_bytes)]
    call = os.pwritev if transfer.writes else os.preadv
    try:
        return call(transfer.fd, views, skip_bytes)
    except OSError as error:
        return -(error.errno or errno.EIO)


class ThreadQueue:
    """Threads that read and write for one `run`; implements `IOQueue`."""

    depth = THREAD_DEPTH

    def __init__(self) -> None:
        # Both hold at most `depth` transfers, and a None for each thread.
        self._todo: SimpleQueue[tuple[Transfer, int] | None] = SimpleQueue()
        self._completions: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def post(self, transfer: Transfer, skip_bytes: int) -> None:
        """Queue `transfer` without its first `skip_bytes` for a thread, which starts it at once."""
        self._todo.put((transfer, skip_bytes))
        if len(self._threads) < THREAD_COUNT:
            thread = threading.Thread(target=self._work, name="kvpool-disk", daemon=True)
            with contextlib.suppress(RuntimeError):  # the process may have no more threads
                thread.start()
                self._threads.append(thread)

    def submit(self) -> None:
        """Do nothing, as the threads start what `post` queues."""
        pass

    def wait(self) -> list[tuple[int, int]]:
        """Wait for at least one completion."""
        if not self._threads:  # none could be started, so the caller's moves the bytes
            item = self._todo.get()
            assert item is not None, "this thread closes the queue"
            self._perform(*item)
        completions = [self._completions.get()]
        with contextlib.suppress(Empty):
            while True:
                completions.append(self._completions.get_nowait())
        return completions

    def close(self) -> None:
        """End the threads without waiting; nothing is in flight."""
        for _ in self._threads:
            self._todo.put(None)

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            self._perform(*item)

    def _perform(self, transfer: Transfer, skip_bytes: int) -> None:
        self._completions.put((transfer.tag, move(transfer, skip_bytes)))


# io_uring through its system calls (Linux 6.1), which release the GIL; a ring for each thread that
# moves data. A ring is single-issuer with deferred completions: only its thread uses it, and the
# kernel writes completions only while that thread is in `io_uring_enter`, so no other processor
# changes what is read here. Reads have a higher I/O priority than writes, where the disk's
# scheduler has priorities.

RING_DEPTH = 32
MAX_PARTS = 4  # of one transfer
ERROR_PAUSE_S = 0.1  # after an error of a wait, such as EBUSY or ENOMEM

_SYS_SETUP, _SYS_ENTER = 425, 426  # the same on every architecture

# io_uring_setup
_SUBMIT_ALL, _SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 7, 1 << 12, 1 << 13
_FEATURES = 1 << 0 | 1 << 2  # one mapping for both rings, stable submissions
_PARAMS = struct.Struct("=30I")
_FLAGS_AT, _FEATURES_AT = 2, 5
_SQ_AT, _CQ_AT = 10, 20  # where the offsets of the two rings begin
_SQES_OFFSET = 0x1000_0000

# io_uring_enter
_GETEVENTS = 1 << 0

_WAITED = frozenset({0, -errno.EINTR})

_SQE = struct.Struct("=BBHiQQIIQ24x")
_CQE = struct.Struct("=Qii")
_IOVEC = struct.Struct("=QQ")
_READV, _WRITEV = 1, 2
_BEST_EFFORT = 2 << 13  # the priority class; within it 0 goes before 7
_READ_PRIORITY, _WRITE_PRIORITY = _BEST_EFFORT | 0, _BEST_EFFORT | 6

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _system_call(number: int, *args: int) -> int:
    """Make a system call and return the result, or -errno."""
    result: int = _libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args))
    return result if result >= 0 else -ctypes.get_errno()


class Ring:
    """The submission and completion rings of a thread; an `IOQueue`. OSError if refused."""

    depth = RING_DEPTH

    def __init__(self) -> None:
        params = bytearray(_PARAMS.size)
        flags = _SUBMIT_ALL | _SINGLE_ISSUER | _DEFER_TASKRUN
        struct.pack_into("=I", params, 4 * _FLAGS_AT, flags)
        address = ctypes.addressof(ctypes.c_char.from_buffer(params))
        fd = _system_call(_SYS_SETUP, RING_DEPTH, address)
        if fd < 0:
            raise OSError(-fd, os.strerror(-fd))
        self._fd = fd
        fields = _PARAMS.unpack(params)
        if fields[_FEATURES_AT] & _FEATURES != _FEATURES:
            self.close()
            raise OSError(errno.EOPNOTSUPP, "the kernel's io_uring is too old")
        self._map(fields)

    def _map(self, fields: tuple[int, ...]) -> None:
        num_sqes, num_cqes = fields[0], fields[1]
        sq, cq = fields[_SQ_AT:], fields[_CQ_AT:]
        array_at, self._cqes_at = sq[6], cq[5]
        nbytes = max(array_at + 4 * num_sqes, self._cqes_at + _CQE.size * num_cqes)
        # A mapping keeps the ring alive, so it ends when it is closed and both mappings are freed.
        self._rings = mmap.mmap(self._fd, nbytes, offset=0)
        self._sqes = mmap.mmap(self._fd, num_sqes * _SQE.size, offset=_SQES_OFFSET)
        self._words = memoryview(self._rings).cast("I")
        self._sq_head, self._sq_tail = sq[0] // 4, sq[1] // 4
        self._cq_head, self._cq_tail = cq[0] // 4, cq[1] // 4
        self._sq_mask, self._cq_mask = self._words[sq[2] // 4], self._words[cq[2] // 4]
        for index in range(num_sqes):
            self._words[array_at // 4 + index] = index
        # The vectors of each entry, which the kernel copies when it takes the entry.
        self._vectors = bytearray(num_sqes * MAX_PARTS * _IOVEC.size)
        self._vectors_address = ctypes.addressof(ctypes.c_char.from_buffer(self._vectors))
        self._tail = self._words[self._sq_tail]  # the kernel sees it in `_words`
        self._refused: list[tuple[int, int]] = []

    @property
    def is_usable(self) -> bool:
        """False if closed."""
        return self._fd >= 0

    def post(self, transfer: Transfer, skip_bytes: int) -> None:
        """Write `transfer`, from byte `skip_bytes` on, into the next free entry of the ring."""
        parts = transfer.after(skip_bytes)
        assert 0 < len(parts) <= MAX_PARTS, transfer
        index = self._tail & self._sq_mask
        vectors_at = index * MAX_PARTS * _IOVEC.size
        for number, part in enumerate(parts):
            at = vectors_at + number * _IOVEC.size
            _IOVEC.pack_into(self._vectors, at, part.address, part.nbytes)
        _SQE.pack_into(
            self._sqes,
            index * _SQE.size,
            _WRITEV if transfer.writes else _READV,
            0,
            _WRITE_PRIORITY if transfer.writes else _READ_PRIORITY,
            transfer.fd,
            skip_bytes,
            self._vectors_address + vectors_at,
            len(parts),
            0,
            transfer.tag,
        )
        self._tail += 1

    def submit(self) -> None:
        """Hand the posted entries to the kernel; fail those that the kernel refuses."""
        head = self._words[self._sq_head]
        count = (self._tail - head) & 0xFFFF_FFFF
        if count == 0:
            return
        self._words[self._sq_tail] = self._tail & 0xFFFF_FFFF
        result = _system_call(_SYS_ENTER, self._fd, count, 0, 0, 0, 0)
        taken = (self._words[self._sq_head] - head) & 0xFFFF_FFFF
        # The kernel has not taken these entries, so they are withdrawn.
        for number in range(head + taken, head + count):
            at = (number & self._sq_mask) * _SQE.size
            tag = _SQE.unpack_from(self._sqes, at)[-1]
            self._refused.append((tag, result if result < 0 else -errno.EAGAIN))
        self._tail = head + taken
        self._words[self._sq_tail] = self._tail & 0xFFFF_FFFF

    def wait(self) -> list[tuple[int, int]]:
        """Submit, and wait for at least one completion."""
        while True:
            self.submit()
            ready = self._reap()
            if ready:
                return ready
            if _system_call(_SYS_ENTER, self._fd, 0, 1, _GETEVENTS, 0, 0) not in _WAITED:
                time.sleep(ERROR_PAUSE_S)

    def _reap(self) -> list[tuple[int, int]]:
        ready, self._refused = self._refused, []
        head, tail = self._words[self._cq_head], self._words[self._cq_tail]
        while head != tail:
            at = self._cqes_at + (head & self._cq_mask) * _CQE.size
            tag, result, _ = _CQE.unpack_from(self._rings, at)
            ready.append((tag, result))
            head = (head + 1) & 0xFFFF_FFFF
        self._words[self._cq_head] = head
        return ready

    def close(self) -> None:
        """Close the ring; nothing may be in flight."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # For the ring of a thread that has ended.
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class Disk:
    """Moves bytes; any thread may call, each `run` stays in its thread.

    With `uring` through a ring for each thread, otherwise, and in a thread that gets no ring,
    through a few threads of the run. OSError if the constructing thread gets no ring.
    """

    def __init__(self, *, uring: bool = False) -> None:
        self.uring = uring
        self._local = threading.local()
        self._rings: weakref.WeakSet[Ring] = weakref.WeakSet()
        self._warned = False
        if uring:
            self._ring()

    def run(self, transfers: Iterable[Transfer]) -> Generator[Done, None, None]:
        """Perform transfers, drawing more as others end; the caller closes the generator."""
        if self.uring:
            try:
                ring = self._ring()
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "file store: a thread gets no io_uring (%s); it reads and writes with "
                        "threads",
                        error,
                    )
            else:
                yield from pump(ring, transfers)
                return
        threads = ThreadQueue()
        try:
            yield from pump(threads, transfers)
        finally:
            threads.close()

    def close(self) -> None:
        """Release what is kept between runs; none may be running."""
        for ring in list(self._rings):
            ring.close()

    def _ring(self) -> Ring:
        ring: Ring | None = getattr(self._local, "ring", None)
        if ring is None or not ring.is_usable:
            ring = self._local.ring = Ring()
            self._rings.add(ring)
        return ring


_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_FAULT = frozenset({0, errno.ENOSPC, errno.EDQUOT})  # a full disk says nothing about io_uring


class ChosenDisk(NamedTuple):
    """The way in which a store moves bytes, and the reason."""

    disk: Disk
    direct: bool  # O_DIRECT works
    reason: str


def choose_disk(io: str, directory: str) -> ChosenDisk:
    """Try in `directory` which of `IO_CHOICES` works on its file system.

    ConfigError if `io` is `uring` and that does not work.
    """
    threads = Disk()
    direct = probe(threads, directory, os.O_DIRECT) not in _NO_DIRECT
    how = "O_DIRECT" if direct else "the page cache, as O_DIRECT is refused"
    if io == "threads":
        return ChosenDisk(threads, direct, f"threads, as configured, and {how}")
    try:
        uring = Disk(uring=True)
    except OSError as error:
        trouble = error.errno or errno.EIO
    else:
        trouble = probe(uring, directory, os.O_DIRECT if direct else 0)
        uring.close()  # this thread will move no data
        if trouble in _NO_FAULT:
            return ChosenDisk(uring, direct, f"io_uring and {how}")
    reason = os.strerror(trouble)
    if io == "uring":
        raise ConfigError(f"io=uring does not work here: {reason}; write io=auto")
    return ChosenDisk(threads, direct, f"threads, as io_uring does not work ({reason}), and {how}")


def probe(disk: Disk, directory: str, flags: int) -> int:
    """Write a page to a new file and read it back; 0 or an errno."""
    written, read = map_buffer(mmap.PAGESIZE), map_buffer(mmap.PAGESIZE)
    written.view[:] = secrets.token_bytes(mmap.PAGESIZE)
    path = os.path.join(directory, f"probe-{secrets.token_hex(8)}")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        return error.errno or errno.EIO
    try:
        os.unlink(path)
        for part, writes in ((written, True), (read, False)):
            with contextlib.closing(disk.run([Transfer(0, fd, (part,), writes)])) as run:
                for done in run:
                    if done.error:
                        return done.error
    except OSError as error:
        return error.errno or errno.EIO
    finally:
        os.close(fd)
    return 0 if written.view == read.view else errno.EIO
