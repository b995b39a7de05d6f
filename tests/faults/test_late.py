"""Store calls that end long after their timeout, or never: late writes to memory, blocked
shutdowns."""

import threading

import pytest

from tests.faults.audit import check_nothing_leaked
from tests.faults.kinds import nothing
from tests.faults.rig import CHUNK, RigSpec
from tests.faults.scene import IMPATIENT, READER, SLACK_S, Library, Scene, tokens
from tests.faults.workshop import Workshop
from tests.support.faults import Fault
from vllm_kvpool.storage.guarded import CLOSE_S

END_S = 3.0
LONG_S = 10.0
OTHER = tokens(9, 6 * CHUNK + 3)
# Short timeouts for hung calls, long ones for the rest: a busy machine is slow.
HURRIED_CALLS = {
    **IMPATIENT,
    "call_timeout_s": 0.5,
    "lookup_timeout_ms": 3_000,
    "load_timeout_s": 3.0,
}


@pytest.mark.parametrize("host", [[], ["host://1MiB"]], ids=["no host tier", "host tier"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_late_answer_spoils_nobodys_cells(
    workshop: Workshop, library: Library, tp: int, host: list[str]
) -> None:
    scene = Scene(workshop, library, RigSpec(tp=tp, options=HURRIED_CALLS), nothing, nothing)
    scene.nearer = host
    rig = scene.start_engine()
    faults = scene.faults
    # Another engine puts the later prompt, so no rank has it in host memory.
    other = workshop.rig(RigSpec(), scene.url, "other")
    other.add(OTHER, 1)
    other.run(SLACK_S)
    other.settle()
    other.shutdown()
    # A load hangs; its request goes on without it.
    faults.inject(Fault.BLOCKED, "get", times=tp)
    scene.answer(READER)
    assert faults.num_blocked == tp
    # The store is back. The next load's cells are in slots when the late answers come.
    scene.wait_until_up(stuck=True)
    for executor in rig.executors:
        executor.perform.hold("scatter")
    request_id = rig.add(OTHER)
    rig.run(SLACK_S, until=lambda: all(e.perform.entered.is_set() for e in rig.executors))
    assert rig.answers[request_id].ended == "", "nothing was loaded"
    faults.release()
    scene.wait(lambda: not any(executor.engine.hung_calls for executor in rig.executors))
    for executor in rig.executors:
        executor.perform.release()
    rig.run(scene.limit_s)
    rig.expect([request_id])
    assert rig.count("kvpool_hit_tokens") > 0
    scene.close(exact=True)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_load_ends_by_its_own_time_whatever_a_call_may_take(
    workshop: Workshop, library: Library, tp: int
) -> None:
    options = {"load_timeout_s": 0.3, "call_timeout_s": LONG_S}
    scene = Scene(workshop, library, RigSpec(tp=tp, options=options), nothing, nothing)
    rig = scene.start_engine()
    scene.faults.inject(Fault.BLOCKED, "get", times=1, store="rig0.0")
    request_id = rig.add(READER)
    assert rig.run(LONG_S) < LONG_S / 2
    rig.expect([request_id])
    assert rig.count("kvpool_failures", "load_timed_out") == 1
    check_nothing_leaked(rig, stuck=True)
    scene.faults.release()
    scene.close(exact=True)


def test_a_store_that_hangs_in_its_end_does_not_hold_up_the_engines(workshop: Workshop) -> None:
    rig = workshop.rig(RigSpec(), workshop.memory())
    workshop.faults.inject(Fault.BLOCKED, "close")
    ending = threading.Thread(target=rig.shutdown, daemon=True)
    ending.start()
    ending.join(2 * CLOSE_S + SLACK_S)  # both sides have a store
    hangs = ending.is_alive()
    workshop.faults.release()
    ending.join(END_S)
    assert not hangs
