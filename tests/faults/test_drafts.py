"""Drafters with layers of their own, beside attention alone and beside recurrent states.

Every step checks the rows from which the drafter computes (`Rig._drafted`): a row is right or
missing, or this engine has computed it behind a missing one.
"""

from dataclasses import replace

import pytest

from tests.faults.audit import LIMIT_S, check_nothing_leaked, end, serve
from tests.faults.model import STATES, FakeModel
from tests.faults.rig import BLOCK, CHUNK, RigSpec
from tests.faults.scene import tokens
from tests.faults.workshop import WITH_STATES, Workshop
from tests.support.memory_store import MemoryStore

DRAFT = "@kind:draft-"  # in keys
PROMPT = tokens(1, 8 * CHUNK + 9)
FOUND = 8 * CHUNK

EACH = pytest.mark.parametrize(
    "model",
    [
        pytest.param(FakeModel(), id="attention"),
        pytest.param(STATES, id="states", marks=WITH_STATES),
    ],
)
METHODS = pytest.mark.parametrize("drafter", ["eagle", "draft_model"])


def spec_of(model: FakeModel, drafter: str = "eagle", tp: int = 1) -> RigSpec:
    return RigSpec(model=model, drafter=drafter, tp=tp, num_blocks=300)


def keys_of_drafts(store: MemoryStore) -> list[str]:
    return sorted(key for key in store._table.list_keys() if DRAFT in key)


def plain(workshop: Workshop, store: str) -> MemoryStore:
    opened = workshop.plain_store(store)
    assert isinstance(opened, MemoryStore)
    return opened


def holes(spec: RigSpec) -> int:
    """Return the rows that a hit leaves missing: with states, the row before the boundary."""
    return max(spec.lookaheads) if spec.model.states else 0


@EACH
@METHODS
@pytest.mark.parametrize("tp", [1, 2])
def test_drafter_after_a_hit_has_all_of_its_rows(
    model: FakeModel, drafter: str, tp: int, workshop: Workshop
) -> None:
    store, spec = workshop.memory(), spec_of(model, drafter)
    writer = workshop.rig(spec, store)
    serve(writer, PROMPT)
    writer.settle()
    reader = workshop.rig(replace(spec, tp=tp), store)
    hit = FOUND if model.states else FOUND - max(spec.lookaheads)
    assert serve(reader, PROMPT) == hit
    assert reader.draft_rows == {"right": hit - holes(spec), "missing": holes(spec), "spoiled": 0}
    end(workshop, writer, reader)


@EACH
@METHODS
def test_drafter_whose_cell_is_lost_finds_zeros_and_no_rows_of_others(
    model: FakeModel, drafter: str, workshop: Workshop
) -> None:
    """The pages hold poison before the load. Rows behind the gap are not stored."""
    store, spec = workshop.memory(), spec_of(model, drafter)
    writer = workshop.rig(spec, store)
    serve(writer, PROMPT)
    writer.settle()
    opened = plain(workshop, store)
    lost = keys_of_drafts(opened)
    opened.remove([key for key in lost if key.endswith(lost[0].rpartition("@")[2])])
    reader = workshop.rig(spec, store)
    for pages in reader.pages:
        pages.fill(float("nan"))
    turn = [*PROMPT, *tokens(2, 2 * CHUNK)]
    serve(reader, turn)
    missing = reader.draft_rows["missing"]
    assert CHUNK - 1 <= missing <= CHUNK + holes(spec), reader.draft_rows
    reader.settle()
    kept = keys_of_drafts(opened)
    assert len(kept) < len(lost)
    last = workshop.rig(replace(spec, tp=2), store)
    serve(last, turn)
    assert last.draft_rows["spoiled"] == 0
    end(workshop, writer, reader, last)


@EACH
@METHODS
@pytest.mark.parametrize("drafts_first", [True, False])
def test_engines_with_and_without_the_drafter_share_the_models_cells(
    drafts_first: bool, model: FakeModel, drafter: str, workshop: Workshop
) -> None:
    store, spec = workshop.memory(), spec_of(model, drafter)
    specs = [spec, replace(spec, drafter="")]
    first, second = (workshop.rig(each, store) for each in (specs if drafts_first else specs[::-1]))
    serve(first, PROMPT)
    first.settle()
    hit = serve(second, PROMPT)
    assert FOUND - BLOCK <= hit <= FOUND
    second.settle()
    if not drafts_first:
        assert second.draft_rows == {"right": 0, "missing": hit, "spoiled": 0}
        assert not keys_of_drafts(plain(workshop, store))
    end(workshop, first, second)


@EACH
@METHODS
def test_prompts_that_part_at_a_chunk_have_drafts_rows_of_their_own(
    model: FakeModel, drafter: str, workshop: Workshop
) -> None:
    store, spec = workshop.memory(), spec_of(model, drafter)
    rigs = [workshop.rig(spec, store) for _ in range(3)]
    for seed, rig in enumerate(rigs):
        serve(rig, PROMPT[:FOUND] + tokens(10 + seed, 2 * CHUNK + 3))
        rig.settle()
        assert rig.draft_rows["spoiled"] == 0
    assert rigs[-1].draft_rows["right"] >= FOUND - BLOCK
    end(workshop, *rigs)


@EACH
@METHODS
def test_drafter_after_preemptions_has_rows_of_its_request(
    model: FakeModel, drafter: str, workshop: Workshop
) -> None:
    """Requests lose their blocks to one another, and load what they have saved."""
    options = {"save_decode": True}
    spec = replace(spec_of(model, drafter), num_blocks=40, options=options)
    rig = workshop.rig(spec, workshop.memory())
    preempted = list[str]()
    rig.on_scheduled.append(lambda output: preempted.extend(output.preempted_req_ids or ()))
    ids = [rig.add(tokens(20 + i, 6 * CHUNK), 60) for i in range(3)]
    rig.run(LIMIT_S)
    rig.expect(ids)
    assert preempted
    assert rig.count("kvpool_hit_tokens") > 0
    check_nothing_leaked(rig)


@EACH
@METHODS
def test_requests_that_end_early_store_only_right_rows_of_a_drafter(
    model: FakeModel, drafter: str, workshop: Workshop
) -> None:
    """A request is aborted, others are preempted, and the engine sleeps, in any step."""
    other = PROMPT[: 3 * CHUNK] + tokens(9, 3 * CHUNK)
    for stop in range(1, 9):
        store = workshop.memory()
        spec = replace(spec_of(model, drafter), max_batched_tokens=48)
        rig = workshop.rig(spec, store)
        aborted = rig.add(PROMPT)
        rig.add(other)
        for _ in range(stop):
            rig.step()
        rig.abort(aborted)
        rig.step()
        if not rig.pool.saves.has_pending:
            rig.reset(running=True)
        rig.run(LIMIT_S)
        rig.settle()
        reader = workshop.rig(spec, store)
        serve(reader, PROMPT, other)
        assert reader.draft_rows["spoiled"] == 0
        for each in (rig, reader):
            check_nothing_leaked(each)
            each.shutdown()


@EACH
def test_after_a_reset_of_the_pool_no_row_of_a_drafter_is_found(
    model: FakeModel, workshop: Workshop
) -> None:
    store = workshop.memory()
    rig = workshop.rig(replace(spec_of(model), max_batched_tokens=48), store)
    request = rig.scheduler.requests[rig.add(PROMPT)]
    rig.run(LIMIT_S, until=lambda: request.num_computed_tokens > 4 * CHUNK)
    rig.reset(connector=True)
    rig.run(LIMIT_S)
    rig.settle()
    assert not keys_of_drafts(plain(workshop, store))
    reader = workshop.rig(spec_of(model), store)
    assert serve(reader, PROMPT) == 0
    check_nothing_leaked(rig)
    rig.shutdown()
    end(workshop, reader)
