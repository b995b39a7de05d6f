"""Work of two kinds for a few threads: each takes its own kind first, and else the other."""

import queue
from collections import deque
from typing import Generic, TypeVar

W = TypeVar("W")


class TwoLines(Generic[W]):
    """See the module docstring. Any thread; bounded by whoever puts."""

    def __init__(self) -> None:
        self._lines: tuple[deque[W], deque[W]] = (deque(), deque())
        # A place for each piece of work, put after it: who has one finds work.
        self._places: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def put(self, line: int, work: W) -> None:
        """Work at the end of line 0 or 1."""
        self._lines[line].append(work)
        self._places.put(True)

    def close(self, threads: int) -> None:
        """So many threads are to end, after what was put before."""
        for _ in range(threads):
            self._places.put(False)

    def get(self, first: int) -> W | None:
        """The next piece of line `first`, or else of the other; None to end. Waits for one."""
        if not self._places.get():
            return None
        # With a place there is one: those who have places are never more than pieces of work.
        try:
            return self._lines[first].popleft()
        except IndexError:
            return self._lines[1 - first].popleft()
