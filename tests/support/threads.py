"""Threads that a test has started: a process has others, of earlier tests, that may be ending."""

import threading


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
