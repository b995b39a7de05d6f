"""Models with sliding windows, over vLLM's real scheduler and its real KV cache groups."""

import random

import pytest

from tests.faults.audit import check_nothing_leaked, serve
from tests.faults.model import WINDOWS, FakeModel
from tests.faults.rig import BLOCK, CHUNK, RigSpec
from tests.faults.workshop import Workshop

CHANCE = random.Random(2)
PROMPT = CHANCE.choices(range(3, 1000), k=300)
OTHERS = [CHANCE.choices(range(3, 1000), k=250) for _ in range(6)]
LIMIT_S = 60.0

WINDOWS_ALONE = FakeModel(layers=2, windows=(40, 40))  # one group
MODELS = pytest.mark.parametrize("model", [WINDOWS, WINDOWS_ALONE], ids=["hybrid", "windows"])
HIT = len(PROMPT) // CHUNK * CHUNK


def test_the_engine_has_groups_as_expected(workshop: Workshop) -> None:
    for model, count in ((WINDOWS, 3), (WINDOWS_ALONE, 1)):
        rig = workshop.rig(RigSpec(model=model), workshop.memory())
        assert len(rig.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups) == count
        rig.shutdown()


def test_of_a_prompt_with_too_many_blocks_to_be_pinned_more_is_found_each_time(
    workshop: Workshop,
) -> None:
    """While the save waits for room, windows free blocks that are not saved yet. Later requests
    save them."""
    store, hits = workshop.memory(), []
    for _ in range(4):
        rig = workshop.rig(RigSpec(model=WINDOWS, max_batched_tokens=512, num_blocks=96), store)
        serve(rig, PROMPT)
        check_nothing_leaked(rig)
        hits.append(rig.count("kvpool_hit_tokens"))
        rig.shutdown()
    assert hits == sorted(hits)
    assert hits[1] > 0
    assert hits[-1] == HIT


@MODELS
def test_what_was_evicted_here_is_loaded_again(workshop: Workshop, model: FakeModel) -> None:
    rig = workshop.rig(RigSpec(model=model, num_blocks=120), workshop.memory())
    serve(rig, PROMPT)
    serve(rig, *OTHERS)
    before = rig.count("kvpool_hit_tokens")
    assert rig.reset()
    serve(rig, PROMPT, *OTHERS[:2], PROMPT[:200])
    assert rig.count("kvpool_hit_tokens") - before >= HIT + 2 * (250 // CHUNK * CHUNK)
    check_nothing_leaked(rig)


@MODELS
def test_a_prompt_that_begins_alike_is_loaded_as_far_as_its_windows_are_there(
    workshop: Workshop, model: FakeModel
) -> None:
    store = workshop.memory()
    writer = workshop.rig(RigSpec(model=model), store)
    serve(writer, PROMPT)
    reader = workshop.rig(RigSpec(model=model), store)
    serve(reader, PROMPT[:200] + OTHERS[0])
    assert reader.count("kvpool_hit_tokens") == 200 // CHUNK * CHUNK
    check_nothing_leaked(reader)


@MODELS
@pytest.mark.parametrize("save_decode", [False, True])
def test_answers_that_go_on_are_saved_and_loaded(
    workshop: Workshop, model: FakeModel, save_decode: bool
) -> None:
    store = workshop.memory()
    spec = RigSpec(model=model, options={"save_decode": save_decode})
    writer = workshop.rig(spec, store)
    request = writer.add(PROMPT, 90)
    writer.run(LIMIT_S)
    writer.expect([request])
    check_nothing_leaked(writer)
    longer = PROMPT + writer.answers[request].tokens
    reader = workshop.rig(spec, store)
    serve(reader, [*longer, 5])
    known = len(longer) - 1 if save_decode else len(PROMPT)
    assert reader.count("kvpool_hit_tokens") == known // CHUNK * CHUNK
    check_nothing_leaked(reader)


def test_blocks_are_let_go_while_a_request_runs(workshop: Workshop) -> None:
    """The tests above need windows that free blocks."""
    rig = workshop.rig(RigSpec(model=WINDOWS, max_batched_tokens=24), workshop.memory())
    request_id = rig.add(PROMPT)
    most = [0, 0]

    def look(_: object) -> None:
        if request_id in rig.scheduler.requests:
            tables = rig.scheduler.kv_cache_manager.get_block_ids(request_id)
            gone = sum(table.count(0) for table in tables)
            most[:] = max(most[0], gone), max(most[1], rig.pool.saves.ledger.num_held)

    rig.on_stepped.append(look)
    rig.run(LIMIT_S)
    assert most[0] >= 2 * (HIT - 40) // BLOCK - 2
    assert most[1] > 0
