"""A thread that goes on with its next piece of work whatever the last one raised."""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

W = TypeVar("W")
R = TypeVar("R")

Failed = Callable[[str, BaseException], None]
"""Takes the name of a work thread, without its number, and what it met."""


class WorkThread(Generic[W, R]):
    """A daemon thread that performs batches of work until `take` returns None.

    `perform(work)` gives the result of each piece, `failed(work)` the result if `perform` raises
    anything; `report(work, result)` is called for each piece once its batch is done.
    """

    def __init__(
        self,
        kind: str,
        number: int,
        *,
        take: Callable[[], Sequence[W] | None],
        perform: Callable[[W], R],
        failed: Callable[[W], R],
        report: Callable[[W, R], object],
        work_failed: Failed,
    ) -> None:
        self._kind = kind
        self._take = take
        self._perform = perform
        self._failed = failed
        self._report = report
        self._work_failed = work_failed
        self._thread = threading.Thread(target=self._run, name=f"{kind}-{number}", daemon=True)
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
            except BaseException as error:  # raised by `take`
                self._work_failed(self._kind, error)

    def _turn(self) -> bool:
        # No longer than this call does anything here refer to the work: it has items' memory.
        batch = self._take()
        if batch is None:
            return False
        for done in [(work, self._result_of(work)) for work in batch]:
            try:
                self._report(*done)
            except BaseException as error:  # the others are reported all the same
                self._work_failed(self._kind, error)
        return True

    def _result_of(self, work: W) -> R:
        try:
            return self._perform(work)
        except BaseException as error:
            self._work_failed(self._kind, error)
            return self._failed(work)
