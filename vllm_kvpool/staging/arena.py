"""The staging memory of one worker: one allocation, cut into equal slots, registered once.

Slots begin at multiples of `SLOT_ALIGNMENT`. The arena owns the memory, which is committed at
once; buffers handed out are views that keep it alive.
"""

import mmap

import numpy as np

from vllm_kvpool.cells import HEADER_BYTES
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.store.base import Buffer

SLOT_ALIGNMENT = 4096
MIN_SLOTS = 8
MAX_SLOTS = 8192


class Arena:
    """`nbytes` of anonymous memory in slots that hold one cell of `cell_bytes` each."""

    def __init__(self, nbytes: int, cell_bytes: int) -> None:
        self.slot_bytes = -(-cell_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        count = min(nbytes // self.slot_bytes, MAX_SLOTS)
        if count < MIN_SLOTS:
            raise ConfigError(
                f"staging_bytes holds {count} cells of {cell_bytes} bytes, {MIN_SLOTS} are needed; "
                f"set staging_bytes to {MIN_SLOTS * self.slot_bytes} or more, or lower layer_span "
                "or chunk_tokens"
            )
        self.num_slots = count
        nbytes = count * self.slot_bytes
        self._memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Touched now, in large pages where the system has them: the first touch of a page costs
        # more than all later copies through it, and would fall into the first requests.
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        touched = np.frombuffer(self._memory, np.uint8)
        touched[:: mmap.PAGESIZE] = 0
        self.whole = Buffer(int(touched.__array_interface__["data"][0]), memoryview(self._memory))

    def buffer(self, slot: Slot, nbytes: int) -> Buffer:
        """The first `nbytes` of a slot."""
        start = slot * self.slot_bytes
        return Buffer(self.whole.address + start, self.whole.view[start : start + nbytes])

    def payload_address(self, slot: Slot) -> int:
        """Where the payload of the cell in a slot begins."""
        return self.whole.address + slot * self.slot_bytes + HEADER_BYTES
