"""Host memory: registered memory that a network writes to, and memory of large items for reuse."""

import contextlib
import mmap
import queue
import weakref
from collections.abc import Callable

import numpy as np

from vllm_kvpool.embeds.dataplane.row_bytes import Bytes
from vllm_kvpool.storage.base import Buffer

FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
ALIGNMENT = 2 << 20  # of huge pages; devices that want any ask for no more

MemorySource = Callable[[int], memoryview | None]
"""Returns so many writable bytes that a device can transfer, or None for ordinary host memory. A
device's `host_memory` is one."""

_retired: list["RegisteredMemory"] = []


def from_host(nbytes: int) -> None:
    """The `MemorySource` of ordinary host memory."""


class RegisteredMemory:
    """`nbytes` aligned to `ALIGNMENT` that a network reads and writes; committed, never
    unmapped.

    A transfer that was given up may still run when the owner is done: at an unmapped address it
    would end the process or hit other data. So `retire` frees the pages and keeps the addresses.
    Any thread.
    """

    def __init__(self, nbytes: int, memory_from: MemorySource = from_host) -> None:
        given = memory_from(nbytes + ALIGNMENT)
        self._own = mmap.mmap(-1, nbytes + ALIGNMENT, FLAGS) if given is None else None
        if self._own is not None:
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                self._own.madvise(mmap.MADV_HUGEPAGE)
        memory = self._own if given is None else given
        whole: Bytes = np.frombuffer(memory, np.uint8)  # type: ignore[arg-type]
        start = -_address(whole) % ALIGNMENT
        self.array = whole[start : start + nbytes]
        self.array[:: mmap.PAGESIZE] = (
            0  # commits the pages, or the first transfers would wait for them
        )

    @property
    def buffer(self) -> Buffer:
        """The memory as stores and engines take it."""
        return Buffer(_address(self.array), self.array.data)

    def retire(self) -> None:
        """Free the pages; transfers that still run may end."""
        _retired.append(self)
        if self._own is not None:
            self._own.madvise(mmap.MADV_DONTNEED)


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])


MIN_HUGE_BYTES = 8 << 20
"""Smaller items use the heap, whose pages are often committed already."""
MOST_KEPT_BYTES = 256 << 20
MOST_SLACK = 2  # kept memory larger than n times the need waits for a larger item


class MemoryPool:
    """Memory of large items, kept for the next ones once the engine has freed a tensor.

    Committing pages costs from half a copy to many times that. At most `most_bytes` are kept; of
    what fits, the smallest is used. One thread calls `take`; memory returns on any thread that
    drops the last tensor, even during garbage collection, so `_returned` is a queue without a
    lock.
    """

    def __init__(self, most_bytes: int = 0) -> None:
        self._most_bytes = min(most_bytes, MOST_KEPT_BYTES)
        self._kept: list[mmap.mmap] = []  # oldest first
        self._returned: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()

    @property
    def kept_bytes(self) -> int:
        """Kept bytes, as far as `take` has noticed."""
        return sum(map(len, self._kept))

    def take(self, nbytes: int) -> Bytes:
        """So many undefined bytes; they return to the pool when nothing refers to them."""
        if nbytes < MIN_HUGE_BYTES:
            return np.empty(nbytes, np.uint8)
        wanted = nbytes + ALIGNMENT
        memory = self._reused(wanted)
        is_new = memory is None
        if memory is None:
            memory = mmap.mmap(-1, wanted, FLAGS)
        start = -np.frombuffer(memory, np.uint8).ctypes.data % ALIGNMENT
        if is_new:
            # Pages are committed when touched; huge ones are few.
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // ALIGNMENT * ALIGNMENT)
        # An array of its own, so that it does not count as a part of something larger.
        array: Bytes = np.frombuffer(memory, np.uint8, nbytes, start)
        if len(memory) <= self._most_bytes:
            weakref.finalize(array, self._returned.put, memory).atexit = False
        return array

    def _reused(self, nbytes: int) -> mmap.mmap | None:
        while not self._returned.empty():
            self._kept.append(self._returned.get_nowait())
        fitting = [each for each in self._kept if nbytes <= len(each) <= MOST_SLACK * nbytes]
        found = min(fitting, key=len, default=None)
        if found is not None:
            self._kept.remove(found)
        while self.kept_bytes > self._most_bytes:
            del self._kept[0]
        return found
