"""The rig itself: it runs like an engine, and detects a single wrong byte."""

import random

import pytest

from tests.faults.rig import CHUNK, NUM_DRAFTS, RigSpec
from tests.faults.scene import READER, STORED_CHUNKS, Library, Scene
from tests.faults.workshop import Workshop
from tests.support.faults import Fault

PROMPT = random.Random(1).choices(range(3, 1000), k=200)
LIMIT_S = 20.0


def test_an_engine_waits_for_a_store_that_opens_slowly(
    workshop: Workshop, library: Library
) -> None:
    """A directory on a busy disk opens slowly, and the engine waits. It does not wait after a
    failed attempt."""
    workshop.slow_s = 0.5
    scene = Scene(workshop, library, RigSpec(), lambda _: None, lambda _: None)
    workshop.faults.inject(Fault.SLOW, "open")
    scene.start_engine()
    assert workshop.faults.struck[Fault.SLOW] == 2, "of the scheduler's side and of the rank"
    assert scene.answer(READER) == STORED_CHUNKS * CHUNK


@pytest.mark.parametrize("tp", [1, 2])
def test_one_wrong_element_of_a_page_is_seen(workshop: Workshop, tp: int) -> None:
    rig = workshop.rig(RigSpec(tp=tp), workshop.memory())
    rig.add(PROMPT, 4)
    rig.run(LIMIT_S, until=lambda: bool(rig.answers["r0"].tokens))
    block = rig.scheduler.kv_cache_manager.get_block_ids("r0")[0][3]
    (*_, tensor_bhnc) = rig.pages[-1].by_layer().values()
    tensor_bhnc[block, -1, 5, 7] += 2.0**-11
    with pytest.raises(AssertionError, match=r"reads 1 wrong rows .* layer 1, head 1"):
        rig.step()


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_drafts_are_accepted_in_part(workshop: Workshop, plans_ahead: bool) -> None:
    """Without drafts a step makes one token; with right drafts only, it makes `NUM_DRAFTS + 1`."""
    spec = RigSpec(drafter="eagle", plans_ahead=plans_ahead)
    rig, num_tokens = workshop.rig(spec, workshop.memory()), 80
    request_id, scheduled = rig.add(PROMPT[:10], num_tokens), list[int]()
    rig.on_scheduled.append(lambda output: scheduled.extend(output.num_scheduled_tokens.values()))
    rig.run(LIMIT_S)
    rig.expect([request_id])
    assert num_tokens / (NUM_DRAFTS + 1) + 1 < len(scheduled) < num_tokens
    assert sum(scheduled) > 10 + num_tokens, "no draft was rejected"


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_engine_that_sleeps_loses_its_pages_and_goes_on_from_the_pool(
    workshop: Workshop, plans_ahead: bool
) -> None:
    rig = workshop.rig(RigSpec(plans_ahead=plans_ahead), workshop.memory())
    request_id = rig.add(PROMPT, 20)
    rig.run(LIMIT_S, until=lambda: bool(rig.answers[request_id].tokens))
    rig.sleep()
    rig.step()
    assert not rig.busy, "it is paused"
    rig.wake_up()
    rig.run(LIMIT_S)
    rig.expect([request_id])
    assert rig.count("kvpool_hit_tokens") == len(PROMPT) // CHUNK * CHUNK
