"""io_uring by its system calls: a ring for each thread that moves data.

The kernel's structures are spelt out here and nowhere else. A ring is single-issuer with deferred
completions: it is used by the thread that made it, and the kernel writes completions only while
that thread is in `io_uring_enter`, so no other processor changes what we read. Needs Linux 6.1.
A call releases the interpreter's lock while it waits.

Reads carry a higher I/O priority than writes; whether that matters is up to the disk's scheduler.
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable

from vllm_kvpool.errors import BuffersInUse
from vllm_kvpool.storage.file.io import GIVE_UP_S, Done, GaveUp, ThreadDisk, Transfer, pump

logger = logging.getLogger(__name__)

RING_DEPTH = 32
MAX_PARTS = 4  # of one transfer
WAIT_SLICE_S = 1  # how often a wait looks at the clock
MAX_WAIT_ERRORS = 100  # of one wait, such as EBUSY or ENOMEM

_SYS_SETUP, _SYS_ENTER = 425, 426  # the same on every architecture

# io_uring_setup
_SUBMIT_ALL, _SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 7, 1 << 12, 1 << 13
_FEATURES = 1 << 0 | 1 << 2 | 1 << 8  # one mapping for both rings, stable submissions, timed waits
_PARAMS = struct.Struct("=30I")
_FLAGS_AT, _FEATURES_AT = 2, 5
_SQ_AT, _CQ_AT = 10, 20  # where the offsets of the two rings begin
_SQES_OFFSET = 0x1000_0000

# io_uring_enter
_GETEVENTS, _EXT_ARG = 1 << 0, 1 << 3
_WAIT_ARG = struct.Struct("=QIIQ")
_TIMESPEC = struct.Struct("=qq")

_SQE = struct.Struct("=BBHiQQIIQ24x")
_CQE = struct.Struct("=Qii")
_IOVEC = struct.Struct("=QQ")
_READV, _WRITEV = 1, 2
_BEST_EFFORT = 2 << 13  # the priority class; within it 0 goes before 7
_READ_PRIORITY, _WRITE_PRIORITY = _BEST_EFFORT | 0, _BEST_EFFORT | 6

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _system_call(number: int, *args: int) -> int:
    """The result, or -errno."""
    result: int = _libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args))
    return result if result >= 0 else -ctypes.get_errno()


class Ring:
    """One thread's submission and completion rings; implements `IOQueue`. OSError if refused."""

    depth = RING_DEPTH

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
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
        self._pid = os.getpid()
        self._map(fields)

    def _map(self, fields: tuple[int, ...]) -> None:
        num_sqes, num_cqes = fields[0], fields[1]
        sq, cq = fields[_SQ_AT:], fields[_CQ_AT:]
        array_at, self._cqes_at = sq[6], cq[5]
        nbytes = max(array_at + 4 * num_sqes, self._cqes_at + _CQE.size * num_cqes)
        # A mapping holds the ring too, so a ring ends when it is closed and both are forgotten.
        self._rings = mmap.mmap(self._fd, nbytes, offset=0)
        self._sqes = mmap.mmap(self._fd, num_sqes * _SQE.size, offset=_SQES_OFFSET)
        self._words = memoryview(self._rings).cast("I")
        self._sq_head, self._sq_tail = sq[0] // 4, sq[1] // 4
        self._cq_head, self._cq_tail = cq[0] // 4, cq[1] // 4
        self._sq_mask, self._cq_mask = self._words[sq[2] // 4], self._words[cq[2] // 4]
        for index in range(num_sqes):
            self._words[array_at // 4 + index] = index
        # The vectors of each entry; the kernel copies them when it takes the entry.
        self._vectors = bytearray(num_sqes * MAX_PARTS * _IOVEC.size)
        self._vectors_address = ctypes.addressof(ctypes.c_char.from_buffer(self._vectors))
        self._wait_arg = bytearray(_WAIT_ARG.size + _TIMESPEC.size)
        self._wait_address = ctypes.addressof(ctypes.c_char.from_buffer(self._wait_arg))
        _TIMESPEC.pack_into(self._wait_arg, _WAIT_ARG.size, WAIT_SLICE_S, 0)
        _WAIT_ARG.pack_into(self._wait_arg, 0, 0, 0, 0, self._wait_address + _WAIT_ARG.size)
        self._tail = self._words[self._sq_tail]  # ours; the kernel's view of it is `_words`
        self._refused: list[tuple[int, int]] = []

    @property
    def is_usable(self) -> bool:
        """False if closed, or in a forked child, whose parent goes on using the shared memory."""
        return self._fd >= 0 and self._pid == os.getpid()

    def post(self, transfer: Transfer, skip_bytes: int) -> None:
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
        head = self._words[self._sq_head]
        count = (self._tail - head) & 0xFFFF_FFFF
        if count == 0:
            return
        self._words[self._sq_tail] = self._tail & 0xFFFF_FFFF
        result = _system_call(_SYS_ENTER, self._fd, count, 0, 0, 0, 0)
        taken = (self._words[self._sq_head] - head) & 0xFFFF_FFFF
        # What the kernel did not take it will not touch: the entries are taken back.
        for number in range(head + taken, head + count):
            at = (number & self._sq_mask) * _SQE.size
            tag = _SQE.unpack_from(self._sqes, at)[-1]
            self._refused.append((tag, result if result < 0 else -errno.EAGAIN))
        self._tail = head + taken
        self._words[self._sq_tail] = self._tail & 0xFFFF_FFFF

    def wait(self) -> list[tuple[int, int]]:
        deadline = self._clock() + GIVE_UP_S
        num_errors = 0
        while True:
            self.submit()
            ready = self._reap()
            if ready:
                return ready
            error = self._wait_slice()
            if error not in (0, errno.ETIME, errno.EINTR):
                num_errors += 1
            if num_errors > MAX_WAIT_ERRORS or self._clock() > deadline:
                raise GaveUp

    def _wait_slice(self) -> int:
        """Let the kernel complete what it can; 0 or an errno."""
        flags = _GETEVENTS | _EXT_ARG
        args = (0, 1, flags, self._wait_address, _WAIT_ARG.size)
        return -min(_system_call(_SYS_ENTER, self._fd, *args), 0)

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
        """Give the ring back; nothing may be in flight."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # A thread that ended leaves its ring; one that gave up is never forgotten, see UringDisk.
        if getattr(self, "_fd", -1) >= 0:
            self.close()


# Rings that gave up: closing one could end transfers that the kernel has not ended.
_abandoned: list[Ring] = []


class UringDisk:
    """Transfers through this thread's ring, in threads if it can have none; implements `DiskIO`.

    OSError if the thread that makes it can have none.
    """

    name = "io_uring"

    def __init__(self) -> None:
        self._local = threading.local()
        self._rings: weakref.WeakSet[Ring] = weakref.WeakSet()
        self._without = ThreadDisk()
        self._warned = False
        self._ring()

    def run(self, transfers: Iterable[Transfer]) -> Generator[Done, None, None]:
        try:
            ring = self._ring()
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("no ring for a thread: %s; it reads and writes without", error)
            yield from self._without.run(transfers)
            return
        given_up = False
        try:
            with contextlib.closing(pump(ring, transfers)) as run:
                for done in run:
                    given_up |= done.in_use
                    yield done
        except BuffersInUse:
            given_up = True
            raise
        finally:
            if given_up:
                logger.error(
                    "file store: io_uring gave no completion for %g s; its buffers stay reserved",
                    GIVE_UP_S,
                )
                _abandoned.append(ring)
                self._rings.discard(ring)  # nor does `close` close it
                del self._local.ring

    def close(self) -> None:
        for ring in list(self._rings):
            ring.close()

    def _ring(self) -> Ring:
        ring: Ring | None = getattr(self._local, "ring", None)
        if ring is None or not ring.is_usable:
            ring = self._local.ring = Ring()
            self._rings.add(ring)
        return ring
