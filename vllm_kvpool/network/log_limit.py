"""Limits log lines that peers and requests can cause."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

EVERY_S = 60.0
MAX_SUBJECTS = 8  # logged of a kind within EVERY_S; all others together count as one more
OTHERS = "others"


class LogLimit:
    """A logger that logs each (kind, subject) at most once in `EVERY_S`.

    `tick` logs how many messages were suppressed. Peers and requests can cause these messages, and
    must not fill a disk. A subject is a peer's address, an endpoint or a thread. At most
    `2 * (MAX_SUBJECTS + 1)` lines of a kind appear within `EVERY_S`. Any thread.
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
