"""What a bug costs the control thread: one call, as long as it is not the same one again and again.

Owned by the control thread.
"""

import logging
from collections import defaultdict
from collections.abc import Callable

from vllm_kvpool.embeds.log_limit import LogLimit
from vllm_kvpool.errors import ProtocolError

TICK, PERFORM, BEGIN = "tick", "perform", "begin"
MAX_IN_A_ROW = 20
"""Failures of one of these phases, without which nothing ends in time: two seconds of ticks. Others
are a message's, and a peer chooses how many of them there are."""


class CannotGoOn(BaseException):
    """The control thread ends: what it knows cannot be trusted any more."""


class Guard:
    """Calls that must not end the loop.

    CannotGoOn after `MAX_IN_A_ROW` failures in a row of a phase that the loop needs.
    """

    def __init__(self, counts: defaultdict[str, float], log: LogLimit) -> None:
        self._counts = counts
        self.log = log
        self.peer = ""
        """Whose messages are heard now."""
        self._in_a_row = dict.fromkeys((TICK, PERFORM, BEGIN), 0)

    def __call__(self, phase: str, call: Callable[..., None], *args: object) -> bool:
        """Call; whether it has succeeded. What a peer got wrong is no failure of ours."""
        try:
            call(*args)
        except ProtocolError as error:
            self.bad_message(error)
            return False
        except Exception as error:
            self._counts["internal_errors"] += 1
            text = "kvpool: a bug in the embeddings' control thread (%s)"
            self.log.log(logging.ERROR, f"bug in {phase}", "", text, phase, error=error)
            if phase in self._in_a_row:
                self._in_a_row[phase] += 1
                if self._in_a_row[phase] >= MAX_IN_A_ROW:
                    raise CannotGoOn(f"{phase} fails again and again") from error
            return False
        if phase in self._in_a_row:
            self._in_a_row[phase] = 0
        return True

    def bad_message(self, error: ProtocolError) -> None:
        """The peer that is heard has sent what cannot be."""
        self._counts["bad_messages"] += 1
        text = "kvpool: the peer %s has sent what cannot be: %.300s"
        self.log.log(logging.WARNING, "bad message", self.peer, text, self.peer, str(error))
