"""Threads of the embedding side: what happens when one fails, and how failures are logged.

A work thread continues with its next piece of work whatever the last one raised, and that piece is
reported as failed. The control thread cannot continue: `Control.run` reports to the engine's
scheduler, which otherwise notices the silence (`worker_channel`).
"""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from vllm_kvpool.errors import ProtocolError

W = TypeVar("W")
R = TypeVar("R")

# Names of a worker's threads.
CONTROL = "kvpool-ec-control"
PREPARER = "kvpool-ec-prepare"
WRITER = "kvpool-ec-write"
DRAINER = "kvpool-ec-drain"
RESOLVER = "kvpool-ec-resolve"
OF_FAILED_WORK = {
    PREPARER: "an encoder's output could not be copied to the host; the item is withdrawn",
    WRITER: "rows could not be written to a peer; they are granted again",
    DRAINER: "rows could not be copied out of the window; they are granted again",
    RESOLVER: "a name could not be resolved; what it belongs to is refused",
}

Failed = Callable[[str, BaseException], None]
"""Takes the name of a work thread, without its number, and what it met."""


class WorkThread(Generic[W, R]):
    """A daemon thread that performs batches of work until `take` returns None.

    `perform(work)` gives the result of each piece, `failed(work)` the result if `perform` raises
    anything; `report` is called once for each batch.
    """

    def __init__(
        self,
        kind: str,
        number: int,
        *,
        take: Callable[[], Sequence[W] | None],
        perform: Callable[[W], R],
        failed: Callable[[W], R],
        report: Callable[[Sequence[tuple[W, R]]], None],
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
            except BaseException as error:  # raised by `take` or `report`
                self._work_failed(self._kind, error)

    def _turn(self) -> bool:
        # No longer than this call does anything here refer to the work: it has items' memory.
        batch = self._take()
        if batch is None:
            return False
        self._report([(work, self._result_of(work)) for work in batch])
        return True

    def _result_of(self, work: W) -> R:
        try:
            return self._perform(work)
        except BaseException as error:
            self._work_failed(self._kind, error)
            return self._failed(work)


def start_control(body: Callable[[], None]) -> threading.Thread:
    """Start the control thread as a daemon; `body` reports its own death."""
    thread = threading.Thread(target=body, name=CONTROL, daemon=True)
    thread.start()
    return thread


TICK, PERFORM, BEGIN = "tick", "perform", "begin"
MAX_IN_A_ROW = 20
"""Failures in a row of a phase that the loop needs, two seconds of ticks. Others are a message's,
and a peer decides how many of them there are."""


class ControlThreadError(BaseException):
    """The control thread ends: its state cannot be trusted any more."""


class Guard:
    """Runs calls that must not end the control loop: an unexpected error ends that call alone.

    Raises ControlThreadError after `MAX_IN_A_ROW` failures in a row of a phase that the loop
    needs.
    """

    def __init__(self, counts: defaultdict[str, float], log: "LogLimit") -> None:
        self._counts = counts
        self.log = log
        self.peer = ""
        """The peer whose messages are handled now."""
        self._in_a_row = dict.fromkeys((TICK, PERFORM, BEGIN), 0)

    def __call__(self, phase: str, call: Callable[..., None], *args: object) -> bool:
        """Call; whether it succeeded. A peer's mistake is logged and is no failure of ours."""
        try:
            call(*args)
        except ProtocolError as error:
            self.bad_message(error)
            return False
        except Exception as error:
            self._counts["internal_errors"] += 1
            text = "kvpool: internal error (%s): one message or item is dropped; please report it"
            self.log.log(logging.ERROR, f"bug in {phase}", "", text, phase, error=error)
            if phase in self._in_a_row:
                self._in_a_row[phase] += 1
                if self._in_a_row[phase] >= MAX_IN_A_ROW:
                    raise ControlThreadError(
                        f"{phase} failed {MAX_IN_A_ROW} times in a row"
                    ) from error
            return False
        if phase in self._in_a_row:
            self._in_a_row[phase] = 0
        return True

    def bad_message(self, error: ProtocolError) -> None:
        self._counts["bad_messages"] += 1
        text = "kvpool: the peer %s sent an invalid message, which is ignored: %.300s"
        self.log.log(logging.WARNING, "bad message", self.peer, text, self.peer, str(error))


EVERY_S = 60.0
MAX_SUBJECTS = 8  # logged of a kind within EVERY_S; all others together count as one more
OTHERS = "others"


class LogLimit:
    """Logs each (kind, subject) at most once in `EVERY_S`; `tick` logs how many messages were
    suppressed.

    Peers and requests can cause these messages, and must not fill a disk. A subject is a peer's
    address, an endpoint or a thread. At most `2 * (MAX_SUBJECTS + 1)` lines of a kind appear
    within `EVERY_S`. Any thread.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._logged_at: dict[tuple[str, str], float] = {}
        self._suppressed: Counter[tuple[str, str]] = Counter()

    def log(
        self,
        level: int,
        kind: str,
        subject: str,
        text: str,
        *args: object,
        error: BaseException | None = None,
    ) -> None:
        """Log a message unless its kind and subject had one lately; `error` adds its traceback."""
        now = self._clock()
        with self._lock:
            if (kind, subject) not in self._logged_at:
                subjects = sum(each == kind for each, _ in self._logged_at)
                subject = subject if subjects < MAX_SUBJECTS else OTHERS
            if (kind, subject) in self._logged_at:
                self._suppressed[kind, subject] += 1
                return
            self._logged_at[kind, subject] = now
        self._logger.log(level, text, *args, exc_info=error)

    def tick(self) -> None:
        """Log how many messages were suppressed, and allow them again after `EVERY_S`."""
        now = self._clock()
        with self._lock:
            over = [key for key, at in self._logged_at.items() if now >= at + EVERY_S]
            for key in over:
                del self._logged_at[key]
            ended = [(*key, self._suppressed.pop(key)) for key in over if key in self._suppressed]
        text = "kvpool: %s, %s: %d more messages were not logged in %.0f s"
        for kind, subject, suppressed in ended:
            self._logger.warning(text, kind, subject, suppressed, EVERY_S)
