"""The registered memory that rows go out through: pieces, a fixed number of equal ones.

FREE -> (take) TAKEN -> (give) FREE, or -> (quarantine) QUARANTINED -> FREE, when the network is
known to be done with a piece, or `quarantine_s` later. Who holds a piece may take another one only
without waiting: otherwise writers that hold one each would wait for one another.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from vllm_kvpool.embeds.run_bytes import Bytes
from vllm_kvpool.storage.base import Buffer

WAIT_STEP_S = 0.02  # nobody says when a piece leaves quarantine


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Part of the staging memory."""

    address: int
    array: Bytes


@dataclass(slots=True)
class _Held:
    piece: Piece
    numbers: list[int]  # transfers that may still read it
    until: float


class Staging:
    """See the module docstring. `has_ended(number)` does not block, and is not asked about a
    number that has ended."""

    def __init__(
        self,
        buffer: Buffer,
        array: Bytes,
        piece_bytes: int,
        has_ended: Callable[[int], bool],
        clock: Callable[[], float],
    ) -> None:
        self.piece_bytes = piece_bytes
        self.num_pieces = array.nbytes // piece_bytes
        self._has_ended = has_ended
        self._clock = clock
        self._changed = threading.Condition()  # guards what follows
        self._free = [
            Piece(buffer.address + start, array[start : start + piece_bytes])
            for start in range(0, self.num_pieces * piece_bytes, piece_bytes)
        ]
        self._held: list[_Held] = []
        self._is_closed = False

    def try_take(self) -> Piece | None:
        """A piece, if one is free."""
        with self._changed:
            self._end_quarantines()
            return self._free.pop() if self._free and not self._is_closed else None

    def take(self, timeout_s: float) -> Piece | None:
        """A piece; None if none gets free in time, or before `close`. The caller must hold none."""
        deadline = self._clock() + timeout_s
        with self._changed:
            while True:
                self._end_quarantines()
                if self._free and not self._is_closed:
                    return self._free.pop()
                if self._is_closed or self._clock() >= deadline:
                    return None
                self._changed.wait(WAIT_STEP_S)

    def give(self, piece: Piece) -> None:
        """Nothing reads it any more."""
        with self._changed:
            self._free.append(piece)
            self._changed.notify()

    def quarantine(self, piece: Piece, numbers: list[int], quarantine_s: float) -> None:
        """Transfers that were given up on may still read it."""
        with self._changed:
            self._held.append(_Held(piece, numbers, self._clock() + quarantine_s))

    def close(self) -> None:
        """Nothing is taken any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def is_quiet(self) -> bool:
        """Whether every piece is free."""
        with self._changed:
            self._end_quarantines()
            return len(self._free) == self.num_pieces

    def quarantined_bytes(self) -> int:
        """Bytes that cannot be used for now."""
        with self._changed:
            self._end_quarantines()
            return len(self._held) * self.piece_bytes

    def _end_quarantines(self) -> None:
        # Under the lock, so that no two threads ask about the same transfer.
        now = self._clock()
        for held in tuple(self._held):
            while held.numbers and self._has_ended(held.numbers[-1]):
                held.numbers.pop()
            if not held.numbers or now >= held.until:
                self._held.remove(held)
                self._free.append(held.piece)
