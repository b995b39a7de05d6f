"""A limit for log messages that peers and requests can cause, so that none of them fills a disk.

Any thread may log. The clock is injected.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 60.0
MAX_SUBJECTS = 8  # of a kind within EVERY_S; all others together count as one more
OTHERS = "others"


@dataclass(slots=True)
class _Line:
    """What was logged of one kind about one subject, and what was not."""

    until: float
    suppressed: int = 0


class LogLimit:
    """Logs each (kind, subject) at most once in `EVERY_S`, then how often it was not logged.

    A subject is a peer's address, an endpoint or a thread. At most `2 * (MAX_SUBJECTS + 1)` lines
    of a kind appear within `EVERY_S`, whatever happens.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._lines: dict[tuple[str, str], _Line] = {}

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
            if (kind, subject) not in self._lines:
                subjects = sum(each == kind for each, _ in self._lines)
                subject = subject if subjects < MAX_SUBJECTS else OTHERS
            line = self._lines.get((kind, subject))
            if line is not None and now < line.until:
                line.suppressed += 1
                return
            suppressed = line.suppressed if line is not None else 0
            self._lines[kind, subject] = _Line(now + EVERY_S)
        more = f" ({suppressed} more like it were not logged)" if suppressed else ""
        self._logger.log(level, text + "%s", *args, more, exc_info=error)

    def tick(self) -> None:
        """Log what was suppressed and is over. Called now and then."""
        now = self._clock()
        with self._lock:
            over = [key for key, line in self._lines.items() if now >= line.until]
            ended = [(key, self._lines.pop(key).suppressed) for key in over]
        for (kind, subject), suppressed in ended:
            if suppressed:
                self._logger.warning(
                    "kvpool: %s, %s: %d more messages were not logged in %.0f s",
                    kind,
                    subject,
                    suppressed,
                    EVERY_S,
                )
