"""A pool that is emptied stays empty of what was on its way into it."""

import pytest

from tests.faults.kinds import nothing
from tests.faults.rig import RigSpec
from tests.faults.scene import BYSTANDER, READER, SLACK_S, Library, Scene
from tests.faults.workshop import Workshop
from vllm_kvpool.store.memory import MemoryStore


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
    rig.step()  # the workers are told
    for executor in rig.executors:
        executor.perform.release()
    # They say when nothing is on its way any more, and it is removed once more.
    scene.wait(lambda: rig.step() or not rig.pool._reset.pending)
    rig.settle()
    assert isinstance(scene.store, MemoryStore)
    assert scene.store._shelf.list_keys() == []
    scene.close(exact=True)
