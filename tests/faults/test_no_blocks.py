"""Requests that wait for each other's blocks in a cache that is too small for both."""

import time
from dataclasses import replace

import pytest

from tests.faults.audit import end, serve
from tests.faults.kinds import nothing
from tests.faults.model import FakeModel
from tests.faults.rig import CHUNK, RigSpec
from tests.faults.scene import COUSIN, PREFIX, READER, SLACK_S, Library, Scene
from tests.faults.workshop import Workshop
from tests.support.faults import Fault
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.vllm_adapt import compat

EXPECT_S = 0.2
WINDOWS = FakeModel(layers=6, windows=(40, 40, 0, 40, 40, 0))  # three groups
WINDOW_BLOCKS = 48  # for a request of 202 tokens, and not for its load besides
TINY_BLOCKS = 20  # for either request, and not for what the other holds while it waits


@pytest.mark.parametrize("tp", [1, 2])
def test_the_first_in_line_gives_way_to_one_that_has_loaded(
    workshop: Workshop, library: Library, tp: int
) -> None:
    """vLLM 0.27 looks no further than the first request that it has no blocks for; 0.32 has another
    line for those that have loaded, and needs no help."""
    spec = replace(RigSpec(tp=tp), num_blocks=TINY_BLOCKS)
    scene = Scene(workshop, library, spec, nothing, nothing)
    rig = scene.start_engine()
    for executor in rig.executors:
        executor.perform.hold("scatter")
    # The first one waits for what is never stored; the second one's load takes longer than that.
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


@pytest.mark.skipif(not compat.reports_failed_loads_by_request(), reason="such models load nothing")
@pytest.mark.parametrize("plans_ahead", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_request_with_most_blocks_whose_load_fails_is_computed(
    workshop: Workshop, tp: int, plans_ahead: bool
) -> None:
    """vLLM keeps as many blocks free for the request as it needs, besides those of its next load:
    more than there are."""
    store = workshop.memory()
    writer = workshop.rig(RigSpec(model=WINDOWS), store)
    serve(writer, READER)
    spec = RigSpec(model=WINDOWS, tp=tp, num_blocks=WINDOW_BLOCKS, plans_ahead=plans_ahead)
    reader = workshop.rig(spec, store)
    chain = ChunkChain(CHUNK, RequestIdentity())
    chain.extend(READER)
    workshop.faults.inject(Fault.MISSING, "get", chain.hashes[-1].hex())
    serve(reader, READER)
    workshop.faults.heal()
    end(workshop, writer, reader)
