"""Threads that a test has started, apart from threads of earlier tests that are still ending."""

import contextlib
import threading
from collections.abc import Iterator

import pytest


class NewThreads:
    """The threads started since this object was made."""

    def __init__(self) -> None:
        self._others = frozenset(threading.enumerate())

    def alive(self, prefix: str = "") -> list[threading.Thread]:
        """Return the live new threads whose names begin with a prefix."""
        return [
            each
            for each in threading.enumerate()
            if each not in self._others and each.name.startswith(prefix)
        ]


@contextlib.contextmanager
def few_threads(left: int = 0) -> Iterator[None]:
    """Allow only this many new threads, like a control group with `pids.max`."""
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
