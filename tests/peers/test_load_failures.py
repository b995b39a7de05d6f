"""Loads that fail: invalid blocks, errors, recovery, and what is left in the prefix cache.

vLLM's `test_invalid_blocks_correctness`, `test_error_propagation`,
`test_cache_pollution_prevention` and `test_kv_load_failure_recovery`, under vLLM's scheduler.
"""

from collections.abc import Sequence

import pytest

from tests.faults.audit import check_nothing_leaked
from tests.faults.kinds import nothing
from tests.faults.rig import CHUNK, RigSpec
from tests.faults.scene import BYSTANDER, COUSIN, PREFIX, READER, SLACK_S, Library, Scene, tokens
from tests.faults.test_resume import computed_before, damage
from tests.faults.workshop import Workshop
from tests.peers.watch import PrefixCacheWatch
from vllm_kvpool.config import LoadFailure

STORED = len(PREFIX)
RECOMPUTE, FAIL = LoadFailure.RECOMPUTE.value, LoadFailure.FAIL.value
POLICIES = pytest.mark.parametrize("policy", [RECOMPUTE, FAIL])
RANKS = pytest.mark.parametrize("tp", [1, 2])


def start(
    workshop: Workshop, library: Library, tp: int, policy: str, *prompts: Sequence[int]
) -> tuple[Scene, PrefixCacheWatch]:
    spec = RigSpec(tp=tp, options={"load_failure": policy})
    scene = Scene(workshop, library, spec, nothing, nothing)
    return scene, PrefixCacheWatch(scene.start_engine(), *prompts)


@RANKS
@POLICIES
@pytest.mark.parametrize("chunk", [0, 2, 3])
def test_blocks_of_a_failed_load_are_in_the_prefix_cache_only_once_they_are_computed(
    workshop: Workshop, library: Library, tp: int, policy: str, chunk: int
) -> None:
    scene, watch = start(workshop, library, tp, policy, READER)
    damage(scene, chunk, tp - 1)
    rig = scene.rig
    failing = rig.add(READER)
    computed = computed_before(scene, failing)
    rig.run(SLACK_S)
    if policy == FAIL:
        assert rig.answers[failing].ended == "error"
        assert watch.cached_tokens(READER) <= chunk * CHUNK
    else:
        rig.expect([failing])
        assert computed == [chunk * CHUNK]
    # Later requests find only right blocks in the prefix cache and compute the rest.
    scene.answer(READER, COUSIN)
    assert watch.num_looks > 0
    scene.close(exact=policy == RECOMPUTE)


@RANKS
@POLICIES
def test_of_a_batch_only_the_request_with_the_failed_load_is_affected(
    workshop: Workshop, library: Library, tp: int, policy: str
) -> None:
    scene, _ = start(workshop, library, tp, policy, READER, COUSIN)
    damage(scene, 3, 0)
    rig = scene.rig
    ends_before = PREFIX[: 3 * CHUNK] + tokens(8, 7)
    ids = [rig.add(prompt) for prompt in (BYSTANDER, ends_before, READER)]
    rig.run(SLACK_S)
    rig.expect(ids[:2])
    assert rig.count("kvpool_hit_tokens") >= 3 * CHUNK
    if policy == FAIL:
        assert rig.answers[ids[2]].ended == "error"
        assert rig.answers[ids[2]].tokens == []
        assert rig.answers[ids[2]].params is None
    else:
        rig.expect(ids)
    scene.close(exact=policy == RECOMPUTE)


@RANKS
@POLICIES
def test_requests_that_share_a_bad_prefix_each_have_their_end(
    workshop: Workshop, library: Library, tp: int, policy: str
) -> None:
    scene, _ = start(workshop, library, tp, policy, READER, COUSIN)
    damage(scene, 1, 0)
    rig = scene.rig
    ids = [rig.add(READER), rig.add(COUSIN), rig.add(READER)]
    rig.run(SLACK_S)
    ended = {rig.answers[each].ended for each in ids}
    if policy == RECOMPUTE:
        assert ended == {"length"}
    rig.expect(each for each in ids if rig.answers[each].ended != "error")
    check_nothing_leaked(rig)
    assert scene.again(READER) >= CHUNK
    scene.close(exact=policy == RECOMPUTE)


@RANKS
def test_one_bad_cell_after_another_is_survived(
    workshop: Workshop, library: Library, tp: int
) -> None:
    """Each attempt gets further: what is bad is removed, and stored again by who computes it."""
    scene, watch = start(workshop, library, tp, RECOMPUTE, READER)
    for chunk in (3, 2, 1, 0):
        damage(scene, chunk, chunk % 2)
        assert scene.again(READER) == chunk * CHUNK
        scene.rig.settle()
    assert scene.again(READER) == len(READER) // CHUNK * CHUNK
    assert watch.num_looks > 0
    scene.close(exact=True)


@RANKS
def test_blocks_of_a_failed_load_are_not_given_away_before_they_are_computed(
    workshop: Workshop, library: Library, tp: int
) -> None:
    """In a cache that is just large enough, another request grows while the first recovers."""
    spec = RigSpec(tp=tp, num_blocks=26, options={"load_failure": RECOMPUTE})
    scene = Scene(workshop, library, spec, nothing, nothing)
    rig = scene.start_engine()
    PrefixCacheWatch(rig, READER, BYSTANDER)
    damage(scene, 1, 0)
    ids = [rig.add(BYSTANDER, 80), rig.add(READER, 40)]
    rig.run(SLACK_S)
    rig.expect(ids)
    scene.close(exact=False)
