"""Blocks that a plan names in every KV cache group, including blocks the engine has freed."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.layout.topology import AttentionWindow, KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.scheduler.blocks import NO_PAGES, GroupTables, Place, all_blocks
from vllm_kvpool.scheduler.prefix_search import HitSearch
from vllm_kvpool.transfer.ops import NULL_BLOCK, JobPages

WINDOW, LOCAL = AttentionWindow(sliding=40), AttentionWindow(local=64)
STALE = 99  # a block that is someone else's by now


def table(num_blocks: int, first: int = 100) -> list[int]:
    return list(range(first, first + num_blocks))


# Examples


def test_hits_are_aligned_to_the_blocks_of_all_groups() -> None:
    assert (
        GroupTables(
            [KVCacheGroup(16), KVCacheGroup(48, WINDOW), KVCacheGroup(32, shared=False)]
        ).block_size
        == 96
    )


def test_only_layers_that_read_the_last_tokens_make_blocks_go() -> None:
    assert not GroupTables([KVCacheGroup(16), KVCacheGroup(16, WINDOW, shared=False)]).forgets
    assert GroupTables([KVCacheGroup(16), KVCacheGroup(16, WINDOW)]).forgets


def test_a_request_goes_on_from_a_block_only_where_nothing_before_it_is_missing() -> None:
    assert GroupTables([KVCacheGroup(16)]).resumes
    assert not GroupTables([KVCacheGroup(16), KVCacheGroup(16)]).resumes
    assert not GroupTables([KVCacheGroup(16, WINDOW)]).resumes
    assert not GroupTables([KVCacheGroup(16, LOCAL)]).resumes


@pytest.mark.parametrize(
    ("ids", "pages"),
    [
        ([1, 2, 3, 0, 5, 6, 7, 8], JobPages((5, 6, 7, 8), 64, 64, 128)),
        ([1, 2, 3, 4, 5, 0, 0, 8], JobPages((8,), 112, 112, 128)),
        ([0] * 8, NO_PAGES),
    ],
)
def test_what_the_engine_keeps_no_block_for_is_not_loaded(ids: list[int], pages: JobPages) -> None:
    [loaded] = GroupTables([KVCacheGroup(16, AttentionWindow(sliding=100))]).of_load([ids], 0, 128)
    assert loaded == pages


def test_a_save_waits_for_blocks_that_are_never_let_go() -> None:
    groups = GroupTables([KVCacheGroup(16), KVCacheGroup(16, WINDOW)])
    assert groups.of_save([table(5), table(6)], 32, 96, 0, {}) is None
    assert groups.of_save([table(6), table(5)], 32, 96, 0, {}) is None
    assert groups.of_save([[1, 2, NULL_BLOCK, 4, 5, 6], table(6)], 32, 96, 0, {}) is None
    assert groups.of_save([[NULL_BLOCK, *table(5)], table(6)], 32, 96, 0, {}) is not None


def test_what_may_be_let_go_next_is_told() -> None:
    groups = GroupTables([KVCacheGroup(16), KVCacheGroup(16, WINDOW), KVCacheGroup(32, LOCAL)])
    tables = [table(8), [0, 201, 202, 203, 204, 205], [300, 301, 302]]
    # Blocks that token 60 and later tokens read. Local pieces begin at 0.
    assert list(groups.of_incomplete(tables, 32, 96, 60)) == [
        *((Place(1, i), 200 + i) for i in range(2, 6)),
        (Place(2, 1), 301),
        (Place(2, 2), 302),
    ]
    # Token 80 reads from 41 on, and its piece begins at 64.
    assert list(groups.of_incomplete(tables, 32, 96, 80)) == [
        *((Place(1, i), 200 + i) for i in range(2, 6)),
        (Place(2, 2), 302),
    ]


def test_blocks_that_no_chunk_stores_and_gaps_are_not_told() -> None:
    """Each chunk of 32 tokens stores its last 16 tokens in group 1."""
    groups = GroupTables([KVCacheGroup(16), KVCacheGroup(16, WINDOW, tail_tokens=16)], 32)
    told = groups.of_incomplete([table(6), [0, 201, 0, 203, 204, 205]], 32, 96, 60)
    assert list(told) == [(Place(1, 3), 203), (Place(1, 5), 205)]


# Any groups and tokens


@dataclass(frozen=True)
class Case:
    groups: tuple[KVCacheGroup, ...]
    start: int
    stop: int
    computed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    window = st.one_of(
        st.just(AttentionWindow()),
        st.builds(AttentionWindow, sliding=st.integers(1, 100)),
        st.builds(AttentionWindow, local=st.integers(1, 100)),
    )
    group = st.builds(KVCacheGroup, st.sampled_from((8, 16, 24)), window, st.booleans())
    groups = tuple(draw(st.lists(group, min_size=1, max_size=4)))
    start = draw(st.integers(0, 6)) * GroupTables(groups).block_size
    stop = start + draw(st.integers(1, 200))
    return Case(groups, start, stop, draw(st.integers(0, stop)))


def engine_table(group: KVCacheGroup, index: int, computed: int, stop: int, gone: int) -> list[int]:
    """Return the engine's table after `computed` tokens; `gone` stands for freed blocks."""
    size = group.block_size
    valid = group.window.first_read(computed) // size
    count = -(-stop // size)
    return [gone] * min(valid, count) + [1000 * index + i + 1 for i in range(valid, count)]


@given(cases())
def test_a_load_goes_where_the_engine_has_blocks_and_fills_them_whole(case: Case) -> None:
    tables = [
        engine_table(group, i, case.stop, case.stop, NULL_BLOCK)
        for i, group in enumerate(case.groups)
    ]
    loaded = GroupTables(case.groups).of_load(tables, case.start, case.stop)
    for i, (group, pages) in enumerate(zip(case.groups, loaded, strict=True)):
        if not group.shared:
            assert pages == NO_PAGES
            continue
        size = group.block_size
        if pages == NO_PAGES:
            assert not any(tables[i][case.start // size : -(-case.stop // size)])
            continue
        assert pages.token_stop == case.stop
        assert pages.token_start <= max(case.start, group.window.first_read(case.stop))
        assert pages.token_start >= case.start
        assert pages.token_start in (case.start, pages.table_start)
        first = pages.table_start // size
        assert pages.table_start == first * size <= pages.token_start
        assert list(pages.block_ids) == tables[i][first : -(-case.stop // size)]
        # No token with a block in the engine is left out.
        wanted = [token for token in range(case.start, case.stop) if tables[i][token // size]]
        assert wanted == list(range(pages.token_start, case.stop))


@given(cases(), st.sampled_from((NULL_BLOCK, STALE)), st.data())
def test_a_save_names_only_blocks_that_are_the_requests(
    case: Case, gone: int, data: st.DataObject
) -> None:
    """The engine's tables may mark freed blocks, or still name them."""
    tables = [
        engine_table(group, i, case.computed, case.stop, gone)
        if not group.window.is_full
        else table(-(-case.stop // group.block_size), 1000 * i + 1)
        for i, group in enumerate(case.groups)
    ]
    places = [
        Place(i, index)
        for i, group in enumerate(case.groups)
        if not group.window.is_full
        for index in range(len(tables[i]))
    ]
    held = {place: 5000 + n for n, place in enumerate(places) if data.draw(st.booleans())}
    pages = GroupTables(case.groups).of_save(tables, case.start, case.stop, case.computed, held)
    assert pages is not None
    for i, (group, each) in enumerate(zip(case.groups, pages, strict=True)):
        if not group.shared:
            assert each == NO_PAGES
            continue
        assert (each.token_start, each.token_stop) == (case.start, case.stop)
        first = case.start // group.block_size
        assert each.table_start == first * group.block_size
        for index, block in enumerate(each.block_ids, first):
            own = 1000 * i + index + 1
            is_there = index >= group.window.first_read(case.computed) // group.block_size
            expected = own if is_there or group.window.is_full else held.get(Place(i, index), 0)
            assert block == expected
        assert len(each.block_ids) == -(-case.stop // group.block_size) - first
    assert sum(len(each.block_ids) for each in pages) == GroupTables(case.groups).num_blocks(
        case.start, case.stop
    )
    assert NULL_BLOCK not in all_blocks(pages)


CHUNK = 48  # of the blocks above


@given(cases(), st.integers(1, 8 * CHUNK), st.data())
def test_as_much_is_loadable_in_spite_of_gaps_as_a_search_finds(
    case: Case, tokens: int, data: st.DataObject
) -> None:
    groups = [KVCacheGroup(16), *(replace(each, shared=True) for each in case.groups)]
    windows = [i for i, group in enumerate(groups) if not group.window.is_full]
    num_chunks = -(-tokens // CHUNK)
    places = [(i, chunk) for i in windows for chunk in range(num_chunks)]
    gaps = data.draw(st.sets(st.sampled_from(places))) if places else set()
    topology = Topology(1, 1, ((0, 0),), 1)
    layer_groups = [LayerGroup(topology, 1, group.window) for group in groups]
    tables = GroupTables(groups, CHUNK)
    search = HitSearch(num_chunks, layer_groups, CHUNK, tables.block_size, num_tokens=tokens)
    while questions := search.questions():
        search.answer(questions, [(each.layer_group, each.chunk) not in gaps for each in questions])
    assert tables.loadable(tokens, gaps) == min(tokens, search.found * CHUNK)


@given(cases(), st.integers(1, 100))
def test_everything_that_goes_before_the_next_step_was_told(case: Case, more: int) -> None:
    """Otherwise, held blocks and remaining blocks would not cover all tokens of the save."""
    computed, stop = case.computed, case.computed + more
    start = min(case.start, computed)
    groups = GroupTables(case.groups)
    tables = [
        engine_table(group, i, computed, stop, NULL_BLOCK) for i, group in enumerate(case.groups)
    ]
    told = dict(groups.of_incomplete(tables, start, stop, computed))
    assert len(told) == len(list(groups.of_incomplete(tables, start, stop, computed)))
    assert NULL_BLOCK not in told.values()
    for i, group in enumerate(case.groups):
        later = engine_table(group, i, stop, stop, NULL_BLOCK)
        for index in range(start // group.block_size, len(later)):
            if tables[i][index] != later[index] and group.shared:
                assert told[Place(i, index)] == tables[i][index]
    assert all(not case.groups[place.group].window.is_full for place in told)
    assert all(case.groups[place.group].shared for place in told)
