"""A request's life where its KV comes from elsewhere, or goes there.

vLLM's `test_remote_prefill_lifecycle`, `test_remote_decode_lifecycle` and
`test_kv_connector_lifecyle`: under its own scheduler, with loads and saves held where they are to
be looked at.
"""

from collections.abc import Callable, Sequence

import pytest
from vllm.v1.request import RequestStatus

from tests.faults.audit import check_nothing_leaked
from tests.faults.kinds import nothing
from tests.faults.rig import BLOCK, CHUNK, Rig, RigSpec
from tests.faults.scene import BYSTANDER, COUSIN, PREFIX, READER, SLACK_S, Library, Scene, tokens
from tests.faults.workshop import Workshop
from tests.peers.watch import PrefixCacheWatch
from tests.support.memory_store import MemoryStore

SMALL_BLOCKS = 24


@pytest.fixture(params=[1, 2])
def tp(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def scene(workshop: Workshop, library: Library, tp: int) -> Scene:
    """Start a scene whose store has `PREFIX`."""
    scene = Scene(workshop, library, RigSpec(tp=tp), nothing, nothing)
    scene.start_engine()
    return scene


def hold(rig: Rig, lane: str) -> Callable[[], bool]:
    """Hold a lane of every rank; the function returned is true once all ranks have entered it."""
    for executor in rig.executors:
        executor.perform.hold(lane)
    return lambda: all(executor.perform.entered.is_set() for executor in rig.executors)


def release(rig: Rig) -> None:
    for executor in rig.executors:
        executor.perform.release()


def held_blocks(rig: Rig) -> int:
    return sum(block.ref_cnt > 0 and not block.is_null for block in rig.block_pool.blocks)


# What is computed elsewhere


def test_a_request_waits_without_being_scheduled_while_others_run(scene: Scene) -> None:
    rig = scene.rig
    watch = PrefixCacheWatch(rig, READER)
    is_loading = hold(rig, "scatter")
    reader = rig.add(READER)
    rig.run(SLACK_S, until=is_loading)
    scheduled: set[str] = set()
    rig.on_scheduled.append(lambda output: scheduled.update(output.num_scheduled_tokens))
    others = [rig.add(BYSTANDER), rig.add(tokens(6, 40), 12)]
    rig.run(SLACK_S, until=lambda: all(rig.answers[other].ended for other in others))
    assert scheduled == set(others)
    assert rig.scheduler.requests[reader].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert watch.cached_tokens(READER) == 0, "a block is in the prefix cache before its load ends"
    release(rig)
    rig.run(SLACK_S)
    rig.expect([reader, *others])
    assert rig.count("kvpool_hit_tokens") == len(PREFIX)
    scene.close(exact=True)


@pytest.mark.parametrize(
    ("length", "hit"),
    [
        (len(PREFIX), len(PREFIX) - 1),  # one token is computed: without it there is no answer
        (len(PREFIX) + 1, len(PREFIX)),
        (len(PREFIX) - 1, len(PREFIX) - CHUNK),
        (CHUNK, CHUNK - 1),
        (CHUNK - 1, 0),
        (BLOCK, 0),
        (1, 0),
    ],
)
def test_prompts_that_end_at_boundaries(scene: Scene, length: int, hit: int) -> None:
    prompt = [*PREFIX, 3][:length]
    assert scene.answer(prompt) == hit
    # Again, now beside what the engine has in its own cache.
    scene.answer(prompt)
    scene.close(exact=True)


def test_two_requests_load_the_same_prefix_at_once(scene: Scene) -> None:
    rig = scene.rig
    watch = PrefixCacheWatch(rig, READER, COUSIN)
    is_loading = hold(rig, "get-0")
    ids = [rig.add(READER), rig.add(COUSIN), rig.add(READER)]
    rig.run(SLACK_S, until=is_loading)
    release(rig)
    rig.run(SLACK_S)
    rig.expect(ids)
    assert rig.count("kvpool_hit_tokens") + rig.count("kvpool_miss_tokens") > 0
    assert watch.num_looks > 0
    scene.close(exact=False)


def test_a_load_waits_for_room(workshop: Workshop, library: Library, tp: int) -> None:
    """Another request has the blocks; what is found is loaded once it has ended."""
    spec = RigSpec(tp=tp, num_blocks=SMALL_BLOCKS)
    scene = Scene(workshop, library, spec, nothing, nothing)
    rig = scene.start_engine()
    large = rig.add(tokens(7, 14 * BLOCK), 40)
    rig.run(SLACK_S, until=lambda: bool(rig.answers[large].tokens))
    reader = rig.add(READER)
    rig.run(SLACK_S)
    rig.expect([large, reader])
    assert rig.count("kvpool_hit_tokens") == len(PREFIX)
    scene.close(exact=False)


def test_a_request_that_has_loaded_waits_for_room_to_go_on(
    workshop: Workshop, library: Library, tp: int
) -> None:
    """Its load takes the last blocks: it is scheduled when others have given theirs back."""
    spec = RigSpec(tp=tp, num_blocks=SMALL_BLOCKS)
    scene = Scene(workshop, library, spec, nothing, nothing)
    rig = scene.start_engine()
    is_loading = hold(rig, "scatter")
    reader = rig.add(READER, 30)
    rig.run(SLACK_S, until=is_loading)
    growing = rig.add(BYSTANDER, 100)
    rig.run(SLACK_S, until=lambda: len(rig.answers[growing].tokens) > 60)
    release(rig)
    rig.run(SLACK_S)
    rig.expect([reader, growing])
    scene.close(exact=False)


# What is sent elsewhere


@pytest.mark.parametrize("lane", ["seal", "put-0"])
def test_a_request_ends_while_it_is_saved(scene: Scene, lane: str) -> None:
    """The client is answered at once. The request's blocks are held only until the gather ends."""
    rig = scene.rig
    prompt = tokens(21, 5 * CHUNK + 3)
    is_there = hold(rig, lane)
    request_id = rig.add(prompt, 1)
    rig.run(SLACK_S)
    rig.expect([request_id])
    assert rig.answers[request_id].params == {"kvpool": {"tokens": 5 * CHUNK}}
    scene.wait(is_there)
    assert held_blocks(rig) == 0
    release(rig)
    check_nothing_leaked(rig)
    assert scene.again(prompt) == 5 * CHUNK
    scene.close(exact=True)


def test_of_a_short_prompt_nothing_is_sent(scene: Scene) -> None:
    rig = scene.rig
    request_id = rig.add(tokens(22, CHUNK - 1), 1)
    rig.run(SLACK_S)
    rig.expect([request_id])
    assert rig.answers[request_id].params == {"kvpool": {"tokens": 0}}
    rig.settle()
    assert isinstance(scene.store, MemoryStore)
    assert set(scene.store._table.list_keys()) <= set(scene.library.objects)
    scene.close(exact=True)


def test_what_the_own_cache_has_is_sent_too(scene: Scene) -> None:
    """A prompt that is computed from the prefix cache is whole in the pool all the same."""
    shared = tokens(23, 3 * CHUNK)
    scene.answer(shared + tokens(24, CHUNK))
    prompt = shared + tokens(25, 2 * CHUNK + 1)
    scene.answer(prompt)
    assert scene.again(prompt) == 5 * CHUNK
    scene.close(exact=True)


# Requests that end early, and ranks that keep nothing


@pytest.mark.parametrize("lane", ["get-0", "check", "scatter", "seal", "put-0"])
def test_a_request_is_aborted_with_a_lane_at_work(scene: Scene, lane: str) -> None:
    rig = scene.rig
    PrefixCacheWatch(rig, READER, COUSIN)
    is_there = hold(rig, lane)
    gone, stays = rig.add(READER, 20), rig.add(BYSTANDER)
    rig.run(SLACK_S, until=is_there)
    if not rig.answers[gone].ended:
        rig.abort(gone)
    release(rig)
    rig.run(SLACK_S)
    rig.expect([stays])
    check_nothing_leaked(rig)
    scene.again(READER, COUSIN)
    scene.close(exact=False)


def test_a_request_is_aborted_while_it_waits_for_the_pool(scene: Scene) -> None:
    rig = scene.rig
    gone = rig.add(READER, expect_tokens=6 * CHUNK, expect_timeout_ms=60_000)
    stays = rig.add(BYSTANDER)
    rig.run(SLACK_S, until=lambda: bool(rig.answers[stays].ended))
    assert not rig.answers[gone].ended
    rig.abort(gone)
    rig.run(SLACK_S)
    check_nothing_leaked(rig)
    assert scene.again(READER) == len(PREFIX)
    scene.close(exact=False)


def test_no_step_leaves_a_plan_behind(workshop: Workshop, library: Library, tp: int) -> None:
    """After a step no rank has its plan any more, whether or not requests were preempted in it."""
    spec = RigSpec(tp=tp, num_blocks=SMALL_BLOCKS - 4)
    scene = Scene(workshop, library, spec, nothing, nothing)
    rig = scene.start_engine()
    preempted: set[str] = set()
    rig.on_scheduled.append(lambda output: preempted.update(output.preempted_req_ids or ()))

    def look(_: object) -> None:
        assert not any(rank.connector.has_connector_metadata() for rank in rig.ranks)

    rig.on_stepped.append(look)
    prompts: list[Sequence[int]] = [READER[: 5 * CHUNK], BYSTANDER, tokens(26, 60)]
    ids = [rig.add(prompt, 50) for prompt in prompts]
    rig.run(SLACK_S)
    rig.expect(ids)
    assert preempted
    scene.close(exact=False)
