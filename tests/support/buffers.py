"""Buffers for tests: separate mappings, and parts of an arena. Any thread may call."""

import numpy as np

from vllm_kvpool.storage.base import Buffer, map_buffer


def make_buffer(nbytes: int) -> Buffer:
    """Return new zeroed memory that starts on a page."""
    return map_buffer(nbytes)


def random_bytes(nbytes: int, seed: int) -> bytes:
    """Return bytes that differ for every seed and are the same in every process."""
    return np.random.default_rng(seed).bytes(nbytes)


class BufferArena:
    """Buffers cut out of one mapping; no part is handed out twice. Not thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = make_buffer(nbytes)
        self._used_bytes = 0

    def take(self, nbytes: int) -> Buffer:
        """Return an unused buffer; its content is undefined."""
        start, self._used_bytes = self._used_bytes, self._used_bytes + nbytes
        assert self._used_bytes <= self.buffer.nbytes, "the arena is too small for this test"
        return self.buffer.part(start, self._used_bytes)

    def holding(self, data: bytes) -> Buffer:
        """Return an unused buffer filled with `data`."""
        piece = self.take(len(data))
        piece.view[:] = data
        return piece
