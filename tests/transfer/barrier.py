"""Waiting until an executor's own thread has taken what was posted to it."""

from queue import Empty, SimpleQueue

from vllm_kvpool.transfer.executor import Demote, Executor

WAIT_S = 1.0


def has_taken_all(executor: Executor) -> bool:
    """Whether the engine's thread has taken all that was posted before this call, in `WAIT_S`.

    Asked through the same inbox, by a demotion of no cells; not so once the engine has ended.
    """
    answer: SimpleQueue[int] = SimpleQueue()
    executor.post(Demote(0, (), answer))
    try:
        return answer.get(timeout=WAIT_S) == 0
    except Empty:
        return False
