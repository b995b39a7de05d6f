"""Requests that wait for each other's blocks in a cache that is too small for both."""

import time
from dataclasses import replace

import pytest
import vllm

from tests.faults.audit import end, serve
from tests.faults.kinds import nothing
from tests.faults.model import WINDOWS
from tests.faults.rig import CHUNK, RigSpec
from tests.faults.scene import COUSIN, PREFIX, READER, SLACK_S, Library, Scene, tokens
from tests.faults.workshop import WITH_WINDOWS, Workshop
from tests.support.faults import Fault
from tests.support.releases import NEWEST
from tests.support.worker_steps import prompt_hashes

EXPECT_S = 0.2
WINDOW_BLOCKS = 48  # enough for a request of 202 tokens, too few with its load
ALIASED = {"alias_tokens": 8}
FULL_TOKENS, FULL_BLOCKS = 125, 9  # tokens that, with drafts, fill all blocks but vLLM's own
TINY_BLOCKS = 20  # enough for one request, too few while the other holds blocks


@pytest.mark.parametrize("tp", [1, 2])
def test_the_first_in_line_gives_way_to_one_that_has_loaded(
    workshop: Workshop, library: Library, tp: int
) -> None:
    """vLLM 0.27 stops at the first request that it has no blocks for. vLLM 0.32 queues loaded
    requests apart, and needs no help."""
    spec = replace(RigSpec(tp=tp), num_blocks=TINY_BLOCKS)
    scene = Scene(workshop, library, spec, nothing, nothing)
    rig = scene.start_engine()
    for executor in rig.executors:
        executor.perform.hold("scatter")
    # The first request waits for chunks that never come. The second one's load lasts longer.
    expect = {"expect_tokens": 6 * CHUNK, "expect_timeout_ms": int(1000 * EXPECT_S)}
    first = rig.add(READER, **expect)
    second = rig.add(COUSIN)
    rig.run(SLACK_S, until=lambda: all(e.perform.entered.is_set() for e in rig.executors))
    assert not rig.answers[second].ended
    deadline = time.monotonic() + 2 * EXPECT_S
    rig.run(SLACK_S, until=lambda: time.monotonic() > deadline)
    for executor in rig.executors:
        executor.perform.release()
    rig.run(SLACK_S)
    rig.expect([first, second])
    assert rig.count("kvpool_hit_tokens") >= len(PREFIX)
    scene.close(exact=True)


@WITH_WINDOWS
@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_request_with_most_blocks_whose_load_fails_is_computed(
    workshop: Workshop, tp: int, plans_ahead: bool
) -> None:
    """Besides the blocks of the request's next load, vLLM keeps free as many as the request needs.
    The cache is too small for both."""
    store = workshop.memory()
    writer = workshop.rig(RigSpec(model=WINDOWS), store)
    serve(writer, READER)
    spec = RigSpec(model=WINDOWS, tp=tp, num_blocks=WINDOW_BLOCKS, plans_ahead=plans_ahead)
    reader = workshop.rig(spec, store)
    workshop.faults.inject(Fault.MISSING, "get", prompt_hashes(READER, CHUNK)[-1].hex())
    serve(reader, READER)
    workshop.faults.heal()
    end(workshop, writer, reader)


@pytest.mark.skipif(vllm.__version__ != NEWEST, reason="older vLLM keeps no block for drafts")
@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize("drafter", ["eagle", "draft_model"])
def test_a_request_that_fills_all_blocks_is_computed_where_drafts_leave_its_load_none(
    workshop: Workshop, drafter: str, plans_ahead: bool
) -> None:
    """vLLM keeps a block free for drafts when it allocates a load, but not when it computes the
    request."""
    store = workshop.memory()
    writer = workshop.rig(RigSpec(options=ALIASED), store)
    serve(writer, READER[:FULL_TOKENS])
    spec = RigSpec(drafter=drafter, plans_ahead=plans_ahead, options=ALIASED)
    readers = [workshop.rig(replace(spec, num_blocks=FULL_BLOCKS + i), store) for i in range(2)]
    hits = [serve(reader, READER[:FULL_TOKENS], max_tokens=1) for reader in readers]
    assert hits == [0, FULL_TOKENS - 1]
    end(workshop, writer, *readers)


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_request_without_blocks_for_its_load_is_loaded_once_another_has_ended(
    workshop: Workshop, plans_ahead: bool
) -> None:
    store = workshop.memory()
    writer = workshop.rig(RigSpec(), store)
    serve(writer, READER)
    reader = workshop.rig(RigSpec(num_blocks=TINY_BLOCKS, plans_ahead=plans_ahead), store)
    first = reader.add(tokens(9, len(READER)), max_tokens=20)
    reader.run(SLACK_S, until=lambda: bool(reader.answers[first].tokens))
    assert serve(reader, READER) == len(READER) // CHUNK * CHUNK
    reader.expect([first])
    end(workshop, writer, reader)
