"""Memory for tests: page-aligned arenas and buffers cut out of them.

Owns nothing: a buffer's view keeps its mapping alive. Any thread may call.
"""

import mmap

import numpy as np

from vllm_kvpool.storage.base import Buffer

ALIGNMENT_BYTES = mmap.PAGESIZE


def make_buffer(nbytes: int) -> Buffer:
    """Map `nbytes` (at least 1) of fresh zeroed memory that starts on a page."""
    assert nbytes > 0, nbytes
    view = memoryview(mmap.mmap(-1, nbytes))
    address: int = np.frombuffer(view, np.uint8).ctypes.data
    assert address % ALIGNMENT_BYTES == 0, address
    return Buffer(address, view)


def slice_buffer(arena: Buffer, offset: int, nbytes: int) -> Buffer:
    """The bytes `[offset, offset + nbytes)` of `arena` as a buffer that shares its memory."""
    assert 0 <= offset <= offset + nbytes <= arena.nbytes, (offset, nbytes, arena.nbytes)
    return Buffer(arena.address + offset, arena.view[offset : offset + nbytes])


def random_bytes(nbytes: int, seed: int) -> bytes:
    """Bytes that differ for every seed, the same in every process."""
    return np.random.default_rng(seed).bytes(nbytes)


class Arena:
    """Hands out buffers of one mapping, none twice; single-threaded."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = make_buffer(nbytes)
        self._used_bytes = 0

    def take(self, nbytes: int) -> Buffer:
        """A new buffer; its memory may hold anything."""
        piece = slice_buffer(self.buffer, self._used_bytes, nbytes)
        self._used_bytes += nbytes
        return piece

    def holding(self, data: bytes) -> Buffer:
        """A new buffer filled with `data`."""
        piece = self.take(len(data))
        piece.view[:] = data
        return piece
