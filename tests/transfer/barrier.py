"""A wait until an executor's thread has taken all posted messages."""

import threading
from collections.abc import Iterator

from vllm_kvpool.transfer.executor import Executor
from vllm_kvpool.transfer.ops import PrefetchPlan

WAIT_S = 1.0


class _Hashes(tuple[bytes, ...]):
    """An empty tuple of hashes that records when the planner reads it."""

    was_read: threading.Event

    def __iter__(self) -> Iterator[bytes]:
        self.was_read.set()
        return super().__iter__()


def has_taken_all(executor: Executor) -> bool:
    """Return True if the engine's thread takes all earlier posts within `WAIT_S`.

    The call posts a prefetch of no chunks to the same inbox. It returns False once the engine has
    ended.
    """
    hashes = _Hashes()
    hashes.was_read = threading.Event()
    executor.post(PrefetchPlan("", hashes))
    return hashes.was_read.wait(WAIT_S)
