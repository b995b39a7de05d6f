"""Threads of the embedding side: what happens when one fails, and how failures are logged.

A work thread continues with its next piece of work whatever the last one raised, and that piece is
reported as failed. The control thread cannot continue: `Control.run` reports to the engine's
scheduler, which otherwise notices the silence (`worker_channel`).
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable

from vllm_kvpool.errors import ProtocolError
from vllm_kvpool.network.log_limit import LogLimit

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

    def __init__(self, counts: defaultdict[str, float], log: LogLimit) -> None:
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
        """Count an invalid message of `peer` and log it, unless the kind was logged lately."""
        self._counts["bad_messages"] += 1
        text = "kvpool: the peer %s sent an invalid message, which is ignored: %.300s"
        self.log.log(logging.WARNING, "bad message", self.peer, text, self.peer, str(error))
