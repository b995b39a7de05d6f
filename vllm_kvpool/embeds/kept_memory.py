"""Memory of large items, kept for the next ones once the engine has let go of a tensor.

New pages cost as much as half a copy where huge ones are free, and many times that where the kernel
has to move others together for them. What is kept is bounded; of what fits, the smallest is used.
Memory comes back on whatever thread drops the last tensor, even within a collection of garbage, so
`_returned` is a queue that takes no lock.
"""

import contextlib
import mmap
import queue
import weakref

import numpy as np

from vllm_kvpool.embeds.host_memory import ALIGNMENT, FLAGS
from vllm_kvpool.embeds.run_bytes import Bytes

MIN_HUGE_BYTES = 8 << 20
"""Smaller pieces come from the heap, whose pages are often there already."""
MOST_KEPT_BYTES = 256 << 20
MOST_SLACK = 2  # memory of more than so many times what is needed waits for a larger item


class KeptMemory:
    """See the module docstring. One thread calls `take`; at most `most_bytes` are kept."""

    def __init__(self, most_bytes: int = 0) -> None:
        self._most_bytes = min(most_bytes, MOST_KEPT_BYTES)
        self._kept: list[mmap.mmap] = []  # the longest ago first
        self._returned: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()

    @property
    def kept_bytes(self) -> int:
        """As far as `take` has noticed."""
        return sum(map(len, self._kept))

    def take(self, nbytes: int) -> Bytes:
        """So many undefined bytes; they come back when nothing refers to them any more."""
        if nbytes < MIN_HUGE_BYTES:
            return np.empty(nbytes, np.uint8)
        wanted = nbytes + ALIGNMENT
        memory = self._reused(wanted)
        is_new = memory is None
        if memory is None:
            memory = mmap.mmap(-1, wanted, FLAGS)
        start = -np.frombuffer(memory, np.uint8).ctypes.data % ALIGNMENT
        if is_new:
            # Pages come when they are touched: huge ones, of which there are few to wait for, as
            # far as they are filled.
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // ALIGNMENT * ALIGNMENT)
        # Of its own bytes alone, or they would pass for a part of something larger.
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
