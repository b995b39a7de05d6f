"""A drafter's rows on the scheduler's side: ends of hits, saved rows, missing rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.scheduler.scheduler_bench import CHUNK, LAYER_GROUPS, Bench, layer_group
from vllm_kvpool.config import KVPoolConfig, LoadPolicy
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.topology import KVCacheGroup
from vllm_kvpool.scheduler.blocks import GroupTables
from vllm_kvpool.scheduler.draft_gaps import MAX_GAPS
from vllm_kvpool.scheduler.messages import Loaded, StepReport
from vllm_kvpool.scheduler.prefix_search import CellNames, HitSearch
from vllm_kvpool.transfer.ops import JobPages

DRAFTS = layer_group("draft-full-1x16-d1", is_draft=True, lookahead=1, is_optional=True)
NAMES = CellNames(make_namespace("model", "0" * 12), (*LAYER_GROUPS, DRAFTS))
PROMPT = 100  # three chunks and an end
MOST_DRAFTED = 120


class Drafting(Bench):
    """An engine with a drafter. The store holds the model's cells alone (`hold`)."""

    def __init__(self, **more: Any) -> None:
        super().__init__(
            names=NAMES,
            groups=(KVCacheGroup(16, lookahead=1),),
            has_drafts=True,
            lookahead=1,
            max_drafted_tokens=MOST_DRAFTED,
            **more,
        )

    def load(self, tokens: int, *cleared: int, name: str = "a") -> None:
        """Load the prompt's first tokens. The load finds no rows of the chunks `cleared`."""
        self.allocate(name, 0, tokens)
        self.step()
        report = StepReport(loads={name: Loaded(tokens, 1.0, frozenset(cleared))})
        self.scheduler.apply(report)
        self.scheduler.load_ended(name)


@pytest.fixture
def bench() -> Iterator[Drafting]:
    bench = Drafting()
    yield bench
    bench.close()


def test_a_hit_ends_before_the_row_that_depends_on_the_next_token(bench: Drafting) -> None:
    """The model's cells alone decide the length of the hit. No cell of the drafter is asked for."""
    bench.hold(range(PROMPT), range(3))
    bench.add(num_tokens=PROMPT)
    assert bench.match() == (3 * CHUNK - 1, True)


def test_a_hit_of_the_engines_own_cache_up_to_that_row_is_not_loaded(bench: Drafting) -> None:
    bench.hold(range(PROMPT), range(3))
    bench.add(num_tokens=PROMPT)
    assert bench.match(num_computed=3 * CHUNK) == (0, False)


@pytest.mark.parametrize(
    ("cleared", "missing"), [((), 0), ((0,), CHUNK - 1), ((1, 2), 2 * CHUNK), ((3,), 0)]
)
def test_loaded_tokens_count_by_whether_the_drafters_rows_were_there(
    bench: Drafting, cleared: tuple[int, ...], missing: int
) -> None:
    bench.hold(range(PROMPT), range(3))
    bench.add(num_tokens=PROMPT)
    bench.match()
    bench.load(3 * CHUNK - 1, *cleared)
    counted = bench.registry.snapshot()
    assert counted["kvpool_draft_tokens{outcome=missing}"] == missing
    assert counted["kvpool_draft_tokens{outcome=loaded}"] == 3 * CHUNK - 1 - missing


def test_rows_behind_missing_ones_are_not_saved(bench: Drafting) -> None:
    bench.hold(range(5 * CHUNK + 1), range(3))
    bench.add(num_tokens=5 * CHUNK + 1)
    bench.match()
    bench.load(3 * CHUNK - 1, 2)
    [save] = bench.step(a=2 * CHUNK + 2).saves
    assert (save.first_chunk, len(save.hashes), save.draft_stop) == (3, 2, 2)


def test_a_request_behind_gaps_of_the_own_cache_saves_no_rows_until_it_is_reset(
    bench: Drafting,
) -> None:
    bench.hold(range(4 * CHUNK), range(2))
    view = bench.add(num_tokens=4 * CHUNK)
    bench.match()
    bench.load(2 * CHUNK - 1, 1)
    bench.step(a=2 * CHUNK + 1)
    for name, cached, stop in (("b", 0, None), ("c", CHUNK, None), ("d", 2 * CHUNK, 1)):
        bench.add(name, num_tokens=4 * CHUNK, options=view.options)
        bench.match(name, cached)
        state = bench.scheduler._requests[name]
        state.next_save = cached // CHUNK
        assert bench.scheduler.saves.draft_gaps.stop_of(state, 4, 4) == stop
    bench.scheduler.own_cache_was_reset()
    bench.match("d", 2 * CHUNK)
    state = bench.scheduler._requests["d"]
    assert bench.scheduler.saves.draft_gaps.stop_of(state, 4, 4) is None


def test_a_chunk_that_is_computed_anew_closes_its_gap(bench: Drafting) -> None:
    bench.hold(range(3 * CHUNK), range(2))
    bench.add(num_tokens=3 * CHUNK)
    bench.match()
    bench.load(2 * CHUNK - 1, 1)
    gaps, state = bench.scheduler.saves.draft_gaps, bench.scheduler._requests["a"]
    gaps.start_request(state, 0)
    assert gaps.stop_of(state, 0, 2) is None
    gaps.start_request(state, 2 * CHUNK)
    assert gaps.stop_of(state, 2, 3) is None


def test_rows_of_a_step_without_drafts_are_not_saved(bench: Drafting) -> None:
    """A request has more tokens than the drafter takes, so the whole step has no drafts."""
    bench.add("long", num_tokens=MOST_DRAFTED + 1)
    bench.add("a", num_tokens=3 * CHUNK)
    for name in ("long", "a"):
        bench.admit(name)
    first = bench.step(a=CHUNK).saves
    both = bench.step(a=2 * CHUNK, long=MOST_DRAFTED + 1).saves
    found = {(save.request_id, save.first_chunk): save.draft_stop for save in (*first, *both)}
    assert found == {("a", 0): None, ("a", 1): 1, ("long", 0): 0}


def test_answers_behind_missing_rows_count_against_loading() -> None:
    """With `load_policy: auto`, an answer takes 1 s a token, or 3 s behind a load without rows."""
    bench = Drafting(config=KVPoolConfig(load_policy=LoadPolicy.AUTO))
    costs = bench.scheduler._load_costs
    for name, cleared, token_s in (("b", (), 1.0), ("a", (0, 1, 2), 3.0)):
        bench.hold(range(PROMPT), range(3))
        view = bench.add(name, num_tokens=PROMPT)
        bench.match(name)
        bench.load(3 * CHUNK - 1, *cleared, name=name)
        bench.step(**{name: PROMPT - 3 * CHUNK + 1})
        for token in range(3):
            view.output.append(token)
            bench.step(**{name: 1})
            bench.clock.advance(token_s)
        bench.scheduler.finish(name, (bench.tables[name],))
    assert costs._token_s == {True: pytest.approx(1.5), False: pytest.approx(4.5)}
    bench.close()


def test_gaps_are_bounded(bench: Drafting) -> None:
    gaps = bench.scheduler.saves.draft_gaps
    for i in range(MAX_GAPS + 5):
        gaps._add(i.to_bytes(4, "little"))
    assert len(gaps._hashes) == MAX_GAPS


# The chunks of a save and of a search


def test_a_save_takes_the_block_with_the_row_before_its_first_chunk() -> None:
    tables = GroupTables([KVCacheGroup(16, lookahead=1)])
    table = list(range(10, 20))
    assert tables.of_save([table], 32, 64, 0, {}) == (JobPages((11, 12, 13), 16, 31, 64),)
    assert tables.of_save([table], 0, 32, 0, {}) == (JobPages((10, 11), 0, 0, 32),)
    assert (tables.num_blocks(32, 64), tables.num_blocks(0, 32)) == (3, 2)


@pytest.mark.parametrize("is_optional", [False, True])
def test_a_search_asks_for_a_drafters_cells_only_where_they_are_required(is_optional: bool) -> None:
    groups = (*LAYER_GROUPS, replace(DRAFTS, is_optional=is_optional))
    search = HitSearch(4, groups, CHUNK, 16)
    asked: set[int] = set()
    while not search.done:
        questions = search.questions()
        asked |= {question.layer_group for question in questions}
        search.answer(questions, [q.layer_group == 0 or q.chunk < 2 for q in questions])
    assert asked == ({0} if is_optional else {0, 1})
    assert search.found == (4 if is_optional else 2)
