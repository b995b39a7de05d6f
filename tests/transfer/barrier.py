"""Waiting until an executor's own thread has taken what was posted to it."""

from queue import Empty

from vllm_kvpool.transfer.executor import Executor
from vllm_kvpool.transfer.ops import DemotionJob

WAIT_S = 1.0


def has_taken_all(executor: Executor) -> bool:
    """Whether the engine's thread has taken all that was posted before this call, in `WAIT_S`.

    Asked through the same inbox, by a demotion of no cells; not so once the engine has ended.
    """
    job = DemotionJob(0, ())
    executor.post(job)
    try:
        return job.answer.get(timeout=WAIT_S) == 0
    except Empty:
        return False
