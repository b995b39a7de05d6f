"""Waiting until an executor's own thread has taken what was posted to it."""

import threading
from collections.abc import Iterator

from vllm_kvpool.transfer.executor import Executor
from vllm_kvpool.transfer.ops import PrefetchPlan

WAIT_S = 1.0


class _Hashes(tuple[bytes, ...]):
    """No hashes; says when the planner reads them."""

    was_read: threading.Event

    def __iter__(self) -> Iterator[bytes]:
        self.was_read.set()
        return super().__iter__()


def has_taken_all(executor: Executor) -> bool:
    """Return True if the engine's thread takes all that was posted before this call in `WAIT_S`.

    Asked through the same inbox, by a prefetch of no chunks. False once the engine has ended.
    """
    hashes = _Hashes()
    hashes.was_read = threading.Event()
    executor.post(PrefetchPlan("", hashes))
    return hashes.was_read.wait(WAIT_S)
