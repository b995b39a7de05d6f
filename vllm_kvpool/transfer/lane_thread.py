"""A thread of a lane: performs the works of its inbox, and says so if it dies.

A thread that hangs in a store call can be left behind: it ends when the call returns, after it has
answered for its work.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice, repeat, starmap
from queue import SimpleQueue
from typing import Any

from vllm_kvpool.errors import BuffersInUse
from vllm_kvpool.transfer.ops import CellOutcome, LaneName, Work, WorkDone

logger = logging.getLogger(__name__)

Perform = Callable[[Work], tuple[CellOutcome, ...]]


class LaneThread:
    """Performs the works of its inbox, one after another.

    `on_start` is called first, on the thread; if it fails the thread dies.
    """

    def __init__(
        self,
        lane: LaneName,
        name: str,
        perform: Perform,
        inbox: SimpleQueue[Work | None],
        outbox: SimpleQueue[Any],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.lane = lane
        self.ended = False  # it was told to end
        self.lost_slots = False  # a call of its was given up that may still touch them
        self._turn = threading.Lock()  # held to end a work, and to leave the thread with one
        self._left = False
        self._since: float | None = None  # set after a work is taken, unset before it is let go
        self._taken: deque[Work | None] = deque()  # the work it is doing
        self._inbox = inbox
        self._perform = perform
        self._outbox = outbox
        self._on_start = on_start
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def doing(self) -> Work | None:
        """What it had taken and not answered; for others to ask once it is dead."""
        return self._taken[0] if self._taken else None

    def busy_since(self) -> tuple[Work, float] | None:
        """The work it is doing and when it began (monotonic seconds); any thread may ask."""
        with self._turn:
            work, since = self.doing, self._since
        return None if work is None or since is None else (work, since)

    def leave(self, work: Work) -> bool:
        """It shall take no other work when it has done this one; False if it has done it before."""
        with self._turn:
            if self.doing is not work:
                return False
            self._left = True
        return True

    def _run(self) -> None:
        inbox = starmap(self._inbox.get, repeat(()))
        try:
            self._on_start()
            while True:
                # One call into C: an exception thrown into this thread comes before or after it,
                # so that no work is out of the inbox and in nobody's hands.
                self._taken.extend(islice(inbox, 1))
                work = self._taken[0]
                if work is None:
                    break
                self._since = time.monotonic()
                in_use = False
                try:
                    outcomes = self._perform(work)
                except BuffersInUse as error:
                    logger.error("kvpool: %s: %s", work.lane, error)
                    outcomes = (CellOutcome.FAILED,) * len(work.cells)
                    in_use = self.lost_slots = True
                except Exception:
                    logger.exception("kvpool: %s failed", work.lane)
                    outcomes = (CellOutcome.FAILED,) * len(work.cells)
                self._outbox.put(WorkDone(work.work_id, outcomes, in_use))
                with self._turn:
                    self._since = None
                    self._taken.clear()
                if self._left:
                    break
            self.ended = True
        finally:
            if not self.ended:
                self._outbox.put(self)
