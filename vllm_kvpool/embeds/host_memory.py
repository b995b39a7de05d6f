"""Host memory that a network writes to and reads from: aligned, committed, never unmapped.

A transfer that was given up on may still be on its way when the memory's owner is done, and a write
to an address that is gone ends the process, or hits what lies there by then. So `retire` gives
the memory back and keeps the addresses.
"""

import contextlib
import mmap
from collections.abc import Callable

import numpy as np

from vllm_kvpool.embeds.run_bytes import Bytes
from vllm_kvpool.storage.base import Buffer

FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
ALIGNMENT = 2 << 20  # of huge pages; devices that want any ask for no more

MemorySource = Callable[[int], memoryview | None]
"""May give so many bytes, writable, that a device's transfers are content with; None leaves it to
the host. A device's `host_memory` is one."""

_retired: list["HostMemory"] = []


def from_host(nbytes: int) -> None:
    """The `MemorySource` of transfers that are content with any memory."""


class HostMemory:
    """`nbytes` that begin at a multiple of `ALIGNMENT`. Used by any thread."""

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
        self.array[:: mmap.PAGESIZE] = 0  # or the first transfers would wait for every page

    @property
    def buffer(self) -> Buffer:
        """The memory as stores and engines take it."""
        return Buffer(_address(self.array), self.array.data)

    def retire(self) -> None:
        """Nobody here uses it any more; what is still on its way may arrive."""
        _retired.append(self)
        if self._own is not None:
            self._own.madvise(mmap.MADV_DONTNEED)


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
