"""Threads that a test has started: a process has others, of earlier tests, that may be ending."""

import contextlib
import threading
from collections.abc import Iterator

import pytest


class NewThreads:
    """Threads started since this was made."""

    def __init__(self) -> None:
        self._others = frozenset(threading.enumerate())

    def alive(self, prefix: str = "") -> list[threading.Thread]:
        """Those that live and whose names begin so."""
        return [
            each
            for each in threading.enumerate()
            if each not in self._others and each.name.startswith(prefix)
        ]


@contextlib.contextmanager
def few_threads(left: int = 0) -> Iterator[None]:
    """Let the process start so many more threads, as a control group with `pids.max` does."""
    start = threading.Thread.start

    def start_or_refuse(thread: threading.Thread) -> None:
        nonlocal left
        if left == 0:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_refuse)
        yield
