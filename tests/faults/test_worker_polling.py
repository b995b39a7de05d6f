"""A worker's process sleeps after a step without work, and polls after others as vLLM has it."""

import time
from collections.abc import Iterator

import pytest
import vllm
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.core.sched.output import SchedulerOutput

from tests.faults.rig import CHUNK, RigSpec
from tests.faults.runners import Runner
from tests.faults.workshop import Workshop
from tests.support.releases import SLEEPING_WORKERS, since
from tests.support.step_queue import step_queue

SLEEPS = since(SLEEPING_WORKERS, vllm.__version__)
PROMPT = [3 + 7 * i % 900 for i in range(3 * CHUNK + 9)]
LIMIT_S = 60.0


@pytest.fixture
def polled(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpinCondition]:
    """Give ranks a queue of steps, as a worker's process has one; return how they wait for it."""
    with step_queue() as (_, reader):
        reader._spin_condition.busy_loop_s = LIMIT_S  # longer than any step of a busy machine
        monkeypatch.setattr(Runner, "rpc_broadcast_mq", reader, raising=False)
        yield reader._spin_condition


def test_worker_sleeps_after_a_step_without_work_alone(
    workshop: Workshop, polled: SpinCondition
) -> None:
    rig = workshop.rig(RigSpec(), workshop.memory(), "rig")
    steps: list[int] = []  # tokens
    seen: set[tuple[bool, bool]] = set()

    def begin(output: SchedulerOutput) -> None:
        if steps:
            polls = time.monotonic() <= polled.last_read + polled.busy_loop_s
            seen.add((steps[-1] > 0, polls))
        steps.append(output.total_num_scheduled_tokens)
        polled.record_read()

    rig.on_scheduled.append(begin)
    for _ in range(2):
        rig.add(PROMPT, 2)
        rig.run(LIMIT_S)
    assert seen == {(True, True), (False, not SLEEPS)}
