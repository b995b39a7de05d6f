"""A reset pool also drops the chunks that were on their way into it."""

import pytest

from tests.faults.kinds import nothing
from tests.faults.rig import RigSpec
from tests.faults.scene import BYSTANDER, READER, SLACK_S, Library, Scene
from tests.faults.workshop import Workshop
from tests.support.memory_store import MemoryStore
from vllm_kvpool.scheduler import save_outcomes


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("lane", ["seal", "put-0"])
def test_what_was_being_saved_does_not_come_back(
    workshop: Workshop, library: Library, tp: int, lane: str
) -> None:
    scene = Scene(workshop, library, RigSpec(tp=tp), nothing, nothing)
    rig = scene.start_engine()
    for executor in rig.executors:
        executor.perform.hold(lane)
    ids = [rig.add(READER), rig.add(BYSTANDER)]
    rig.run(SLACK_S)
    rig.expect(ids)
    assert rig.reset(connector=True)
    rig.step()  # informs the workers
    for executor in rig.executors:
        executor.perform.release()
    # The workers report that no put is in flight; then the pool is removed once more.
    rig.settle()
    assert isinstance(scene.store, MemoryStore)
    assert scene.store._table.list_keys() == []
    scene.close(exact=True)


@pytest.mark.parametrize("tp", [1, 2])
def test_idle_engine_after_a_reset_makes_steps_until_no_earlier_put_is_in_flight(
    workshop: Workshop, library: Library, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """The put lands after the reset has removed the namespace. No request and no save asks for a
    step any more, and other engines would find the cells."""
    monkeypatch.setattr(save_outcomes, "END_WAIT_S", 0.0)
    scene = Scene(workshop, library, RigSpec(tp=tp), nothing, nothing)
    rig = scene.start_engine()
    for executor in rig.executors:
        executor.perform.hold("put-0")
    ids = [rig.add(READER), rig.add(BYSTANDER)]
    rig.run(SLACK_S)
    rig.expect(ids)
    scene.wait(lambda: all(executor.perform.entered.is_set() for executor in rig.executors))
    assert rig.reset(connector=True)
    assert rig.busy
    rig.step()
    assert rig.busy
    for executor in rig.executors:
        executor.perform.release()
    rig.run(SLACK_S)
    scene.wait(lambda: not rig.pool._validity.reset.pending)
    assert isinstance(scene.store, MemoryStore)
    assert scene.store._table.list_keys() == []
    scene.close(exact=True)


def test_a_reset_of_running_requests_while_one_loads_is_refused_and_the_engine_goes_on(
    workshop: Workshop, library: Library
) -> None:
    """vLLM frees no blocks that a load still writes, of any connector.

    A refused reset loses and leaks nothing, and the connector's own cache is not reset. The same
    call succeeds once the request runs.
    """
    scene = Scene(workshop, library, RigSpec(), nothing, nothing)
    rig = scene.start_engine()
    for executor in rig.executors:
        executor.perform.hold("get-0")
    ids = [rig.add(BYSTANDER), rig.add(READER)]
    rig.run(SLACK_S, until=lambda: any(each.perform.entered.is_set() for each in rig.executors))
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        rig.reset(connector=True, running=True)
    assert not rig.pool._validity.reset.pending
    rig.step()
    for executor in rig.executors:
        executor.perform.release()
    running = rig.scheduler.running
    scene.wait(lambda: rig.step() or len(running) == len(rig.scheduler.requests) > 0)
    assert rig.reset(connector=True, running=True)
    rig.run(SLACK_S)
    rig.expect(ids)
    scene.close(exact=True)
