"""Memory for tests: buffers of their own, and buffers cut out of one arena. Any thread may call."""

import numpy as np

from vllm_kvpool.storage.base import Buffer, map_buffer


def make_buffer(nbytes: int) -> Buffer:
    """Fresh zeroed memory that starts on a page."""
    return map_buffer(nbytes)


def random_bytes(nbytes: int, seed: int) -> bytes:
    """Bytes that differ for every seed, the same in every process."""
    return np.random.default_rng(seed).bytes(nbytes)


class BufferArena:
    """Buffers of one mapping, none handed out twice; one thread at a time."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = make_buffer(nbytes)
        self._used_bytes = 0

    def take(self, nbytes: int) -> Buffer:
        """A new buffer; its memory may hold anything."""
        start, self._used_bytes = self._used_bytes, self._used_bytes + nbytes
        assert self._used_bytes <= self.buffer.nbytes, "the arena is too small for this test"
        return self.buffer.part(start, self._used_bytes)

    def holding(self, data: bytes) -> Buffer:
        """A new buffer filled with `data`."""
        piece = self.take(len(data))
        piece.view[:] = data
        return piece
