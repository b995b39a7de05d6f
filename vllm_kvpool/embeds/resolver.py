"""Host names and their addresses, looked up on threads of their own: a name server may be slow.

`answer` is told on those threads. The control thread calls `look_up`.
"""

import queue
import socket
import threading
from collections.abc import Callable

from vllm_kvpool.embeds.threads import RESOLVER, Died, WorkThread

NUM_THREADS = 2
MAX_WAITING = 64
JOIN_S = 0.1  # a look-up cannot be ended

Answer = tuple[str, tuple[str, ...]]
"""A name and its addresses; none where it cannot be resolved."""


def addresses_of(name: str) -> tuple[str, ...]:
    """What a name resolves to now; blocks."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))


class Resolver:
    """See the module docstring. Its threads start with the first name."""

    def __init__(
        self,
        answer: Callable[[Answer], None],
        died: Died,
        look_up: Callable[[str], tuple[str, ...]] = addresses_of,
    ) -> None:
        self._answer = answer
        self._died = died
        self._look_up = look_up
        self._names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._waiting: set[str] = set()
        self._threads: list[WorkThread[str, Answer]] = []

    def look_up(self, name: str) -> bool:
        """Have a name looked up, once at a time; False where too many wait."""
        with self._lock:
            if name in self._waiting:
                return True
            if len(self._waiting) >= MAX_WAITING:
                return False
            self._waiting.add(name)
        if not self._threads:
            self._threads = [
                WorkThread(
                    f"{RESOLVER}-{number}",
                    take=self._names.get,
                    perform=lambda name: (name, self._look_up(name)),
                    failed=lambda name: (name, ()),
                    report=self._report,
                    died=self._died,
                )
                for number in range(NUM_THREADS)
            ]
        self._names.put(name)
        return True

    def _report(self, answer: Answer) -> None:
        with self._lock:
            self._waiting.discard(answer[0])
        self._answer(answer)

    def close(self) -> None:
        """End the threads, as far as they can be."""
        for _ in self._threads:
            self._names.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)
