"""A failed load keeps the chunks before the failure, on every rank, or ends the request if so
configured."""

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from tests.faults.audit import check_nothing_leaked
from tests.faults.kinds import flip, nothing
from tests.faults.rig import CHUNK, RigSpec
from tests.faults.scene import BYSTANDER, READER, SLACK_S, STORED_CHUNKS, Library, Scene
from tests.faults.workshop import Workshop
from vllm_kvpool.identity.keys import HeadShard

OFFERED = STORED_CHUNKS * CHUNK


def damage(scene: Scene, chunk: int, head: int) -> None:
    """Damage the cell of one head of a chunk; with two ranks each head is on another rank."""
    key = next(key for key in scene.library.chunks[chunk] if f"@{HeadShard(head)}@" in key)
    scene.write(key, flip(scene, scene.library.objects[key]))


def start(workshop: Workshop, library: Library, spec: RigSpec) -> Scene:
    scene = Scene(workshop, library, spec, nothing, nothing)
    scene.start_engine()
    return scene


def computed_before(scene: Scene, request_id: str) -> list[int]:
    """Return a list that will hold the number of tokens already computed when the request is first
    scheduled."""
    found: list[int] = []

    def look(output: SchedulerOutput) -> None:
        if request_id in output.num_scheduled_tokens and not found:
            computed = scene.rig.scheduler.requests[request_id].num_computed_tokens
            found.append(computed - output.num_scheduled_tokens[request_id])

    scene.rig.on_scheduled.append(look)
    return found


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("bad", "kept"),
    [
        ([(0, 0)], 0),
        ([(1, 0)], 1),
        ([(2, 1)], 2),
        ([(3, 1)], 3),
        ([(3, 0), (1, 1)], 1),
        ([(0, 1), (2, 0)], 0),
    ],
)
def test_what_came_before_a_bad_cell_is_kept_in_every_rank(
    workshop: Workshop, library: Library, tp: int, bad: list[tuple[int, int]], kept: int
) -> None:
    scene = start(workshop, library, RigSpec(tp=tp))
    for chunk, head in bad:
        damage(scene, chunk, head)
    rig = scene.rig
    request_id = rig.add(READER)
    computed = computed_before(scene, request_id)
    rig.run(SLACK_S)
    rig.expect([request_id])
    assert computed == [kept * CHUNK]
    assert rig.count("kvpool_hit_tokens") == kept * CHUNK
    assert rig.count("kvpool_miss_tokens", "load_failed") == OFFERED - kept * CHUNK
    scene.close(exact=True)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("chunk", [0, 2])
def test_a_request_may_fail_with_its_load(
    workshop: Workshop, library: Library, tp: int, chunk: int
) -> None:
    scene = start(workshop, library, RigSpec(tp=tp, options={"load_failure": "fail"}))
    damage(scene, chunk, 0)
    rig = scene.rig
    failing, bystander = rig.add(READER), rig.add(BYSTANDER)
    rig.run(SLACK_S)
    assert rig.answers[failing].ended == "error"
    assert not rig.answers[failing].tokens
    rig.expect([bystander])
    check_nothing_leaked(rig)
    # The bad cell is gone: the same request succeeds with what is left.
    assert scene.again(READER) == chunk * CHUNK
    scene.close(exact=False)
