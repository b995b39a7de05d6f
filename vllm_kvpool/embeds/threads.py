"""The threads of a worker's embedding side, and what follows when one of them dies.

A death is noted once, by `died`. A work thread goes on with its next piece of work, and the piece
that it died of is reported as failed. The control thread cannot go on: `Control.run` says so to the
engine's scheduler, which also finds out by itself, by its own clock (`links.py`).
"""

import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

W = TypeVar("W")
R = TypeVar("R")

CONTROL, WRITER, DRAINER, RESOLVER = (
    "kvpool-ec-control",
    "kvpool-ec-write",
    "kvpool-ec-drain",
    "kvpool-ec-resolve",
)
THREADS: Mapping[str, str] = {
    CONTROL: "no embedding is sent or taken any more: requests encode here, or fail",
    WRITER: "what it prepared or wrote counts as failed, and is tried again",
    DRAINER: "the rows it copied count as damaged, and are granted again",
    RESOLVER: "the names it looked up count as unknown, and are refused",
}
"""Every thread that is started here, and what its death costs."""

Died = Callable[[str, BaseException], None]


class WorkThread(Generic[W, R]):
    """A daemon thread that performs work until `take` returns None.

    `perform(work)` gives what is to be reported, and `failed(work)` what is reported instead where
    that raises, whatever it raises; `report` is called once for each piece.
    """

    def __init__(
        self,
        name: str,
        *,
        take: Callable[[], W | None],
        perform: Callable[[W], R],
        failed: Callable[[W], R],
        report: Callable[[R], None],
        died: Died,
    ) -> None:
        self._take = take
        self._perform = perform
        self._failed = failed
        self._report = report
        self._died = died
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            try:
                is_over = not self._turn()
            except BaseException as error:  # of `take` or `report`
                self._died(self._thread.name, error)

    def _turn(self) -> bool:
        """Take and perform one piece of work; False at the end."""
        work = self._take()
        if work is None:
            return False
        try:
            said = self._perform(work)
        except BaseException as error:
            self._died(self._thread.name, error)
            said = self._failed(work)
        self._report(said)
        return True


def start_control(body: Callable[[], None]) -> threading.Thread:
    """The control thread, as a daemon; `body` notes its own death."""
    thread = threading.Thread(target=body, name=CONTROL, daemon=True)
    thread.start()
    return thread
