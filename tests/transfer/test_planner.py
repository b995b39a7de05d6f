"""The planner: which cells a rank moves for a plan, and what they are called."""

from dataclasses import replace

import pytest

from tests.support.invariants import check
from vllm_kvpool.identity.keys import (
    ContextRank,
    HeadShard,
    KeyMaker,
    LayerSpan,
    chunk_id_of,
    chunk_id_of_key,
    make_namespace,
    namespace_of,
    with_weights,
)
from vllm_kvpool.layout.topology import (
    AttentionWindow,
    LayerGroup,
    ReplicaRank,
    Topology,
    cells_of_rank,
)
from vllm_kvpool.staging.slots import SlotPool, SlotUse
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES
from vllm_kvpool.storage.eviction import POLICIES
from vllm_kvpool.transfer.host_cache import HostCache
from vllm_kvpool.transfer.ops import (
    NO_PARTS,
    Cell,
    JobId,
    JobPages,
    LoadPlan,
    PrefetchJob,
    PrefetchPlan,
    SavePlan,
)
from vllm_kvpool.transfer.planner import VERSIONS_KEPT, Planner

CHUNK, ROW_BYTES, BLOCK = 32, 16, 16
PARENT = b"\0" * 8
HASHES = tuple(bytes([i]) * 8 for i in range(1, 7))
KEYS = KeyMaker(make_namespace("model", "0" * 12), ContextRank())


def planner(
    num_heads: int = 4, tp_size: int = 2, tp_rank: int = 1, *, keeps_all: bool = False
) -> Planner:
    """Of one rank; layers 0 to 3 in spans (0, 2) and (2, 3)."""
    topology = Topology(num_heads, tp_size, ((0, 3),), layer_span=2)
    cells = cells_of_rank([LayerGroup(topology, ROW_BYTES)], tp_rank, 0)
    return Planner(cells, KEYS, CHUNK, 5.0, keeps_all, block_sizes=(BLOCK,))


def load_plan(first: int = 0) -> LoadPlan:
    """Of two chunks; the first is not wanted whole."""
    start = first * CHUNK
    pages = JobPages((7, 8, 9), start + 16, start + 20, start + 64)
    return LoadPlan(JobId(1), "a", first, HASHES[:2], (pages,), start + 20, start + 64)


def save_plan(first: int = 0, count: int = 4) -> SavePlan:
    start, stop = first * CHUNK, (first + count) * CHUNK
    blocks = tuple(range(7, 7 + (stop - start) // BLOCK))
    pages = JobPages(blocks, start, start, stop)
    return SavePlan(JobId(2), "b", first, HASHES[:count], (pages,))


def test_a_load_is_every_cell_of_every_chunk_in_order() -> None:
    plan = replace(load_plan(first=3), before=(PARENT,))
    job = planner().load(plan)
    assert (job.plan, job.timeout_s) == (plan, 5.0)
    assert (plan.first_chunk, plan.stop_chunk) == (3, 5)
    cells = planner().cells
    assert len(cells) == 4  # two heads, two spans
    assert job.cells == tuple(
        Cell(
            KEYS.key(cell.shard, cell.span, HASHES[i]),
            ChunkRef(
                chunk_id_of(KEYS.namespace, HASHES[i].hex()),
                chunk_id_of(KEYS.namespace, (HASHES[0] if i else PARENT).hex()),
                3 + i,
            ),
            HEADER_BYTES + len(cell.span) * CHUNK * ROW_BYTES,
            cell,
            (JobPages((7, 8, 9), 112, 116, 160),),
        )
        for i in range(2)
        for cell in cells
    )


@pytest.mark.parametrize("first", [0, 1])
def test_a_cell_is_loaded_if_any_group_of_its_layers_needs_the_chunk(first: int) -> None:
    """Block tables of one kind may begin apart, where their blocks are of different size."""
    topology = Topology(1, 1, ((0, 2),), layer_span=2)
    cells = cells_of_rank([LayerGroup(topology, ROW_BYTES)], 0, 0, groups=(0, 1))
    two = Planner(cells, KEYS, CHUNK, 5.0, False, block_sizes=(BLOCK, CHUNK))
    early, late = (JobPages((7, 8, 9, 6), 0, start, 64) for start in (0, CHUNK))
    pages = (early, late) if first == 0 else (late, early)
    job = two.load(LoadPlan(JobId(1), "a", 0, HASHES[:2], pages, 0, 64))
    assert [cell.chunk.position for cell in job.cells] == [0, 1]


def test_prompt_end_is_a_shorter_cell_in_loads_and_saves() -> None:
    pages = JobPages((7, 8, 9), 0, 0, 37)
    load = LoadPlan(JobId(1), "a", 0, HASHES[:2], (pages,), 0, 37, end_tokens=5)
    cells = planner().load(load).cells
    assert [cell.end_tokens for cell in cells] == [0] * (len(cells) // 2) + [5] * (len(cells) // 2)
    save = SavePlan(JobId(2), "a", 1, HASHES[1:2], (pages,), end_tokens=5)
    job = planner().save(save)
    ends = [cell for cell in cells if cell.end_tokens]
    assert [(cell.key, cell.nbytes) for cell in job.cells] == [
        (cell.key, cell.nbytes) for cell in ends
    ]
    assert cells[0].nbytes == HEADER_BYTES + 2 * CHUNK * ROW_BYTES
    assert job.cells[0].nbytes == HEADER_BYTES + 2 * 5 * ROW_BYTES


def test_a_rank_names_its_own_heads() -> None:
    """Rank 1 of 2 has heads 2 and 3; in its pages they are the first and the second."""
    cells = [cell.local for cell in planner().load(load_plan()).cells[:4]]
    assert [(c.shard, c.span, c.head_start, c.layer_start) for c in cells] == [
        (HeadShard(2), LayerSpan(0, 2), 0, 0),
        (HeadShard(3), LayerSpan(0, 2), 1, 0),
        (HeadShard(2), LayerSpan(2, 3), 0, 2),
        (HeadShard(3), LayerSpan(2, 3), 1, 2),
    ]


def test_a_save_has_the_pages_of_its_whole_chunks() -> None:
    job = planner().save(save_plan(first=2, count=3))
    assert {cell.pages for cell in job.cells} == {(JobPages(tuple(range(7, 13)), 64, 64, 160),)}
    assert [cell.chunk.position for cell in job.cells] == [2] * 4 + [3] * 4 + [4] * 4
    assert all(cell.stored for cell in job.cells)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize(("num_heads", "tp_size"), [(1, 2), (2, 4), (1, 4), (4, 2), (2, 2)])
def test_replicas_take_turns_and_together_store_everything_once(
    num_heads: int, tp_size: int, first: int
) -> None:
    plan = save_plan(first)
    everyone = [planner(num_heads, tp_size, rank).save(plan) for rank in range(tp_size)]
    keys = [cell.key for job in everyone for cell in job.cells]
    assert len(set(keys)) == len(keys) == num_heads * 2 * len(plan.hashes)
    assert all(cell.stored for job in everyone for cell in job.cells)


@pytest.mark.parametrize(("num_heads", "tp_size"), [(1, 2), (2, 4), (1, 4), (4, 2)])
def test_with_a_host_tier_each_keeps_all_and_stores_its_turns(num_heads: int, tp_size: int) -> None:
    plan = save_plan(first=1)
    for rank in range(tp_size):
        mine = planner(num_heads, tp_size, rank).save(plan)
        kept = planner(num_heads, tp_size, rank, keeps_all=True).save(plan)
        assert tuple(cell for cell in kept.cells if cell.stored) == mine.cells
        every = planner(num_heads, tp_size, rank).load(
            LoadPlan(JobId(1), "b", 1, plan.hashes, plan.pages, CHUNK, 5 * CHUNK)
        )
        assert tuple(cell._replace(stored=True) for cell in kept.cells) == every.cells


def test_replicas_on_one_host_fetch_and_keep_each_its_part() -> None:
    """All of a load's cells are named, with who fetches them; of the rest nothing is anybody's."""
    replicas = [ReplicaRank(rank, 0) for rank in range(4)]
    numbers = {replica: 10 + replica.tp_rank for replica in replicas[1:]}  # rank 0 is elsewhere
    plan = save_plan(first=1)
    kept, prefetched = [], []
    for rank in range(1, 4):
        siblings = {each: n for each, n in numbers.items() if each.tp_rank != rank}
        mine = replace(planner(1, 4, rank, keeps_all=True), siblings=siblings)
        load = mine.load(LoadPlan(JobId(1), "b", 1, plan.hashes, plan.pages, CHUNK, 5 * CHUNK))
        # Chunks 1 to 3 are fetched by their writers, chunk 4 by the first who is here.
        fetchers = dict(zip((1, 2, 3, 4), (11, 12, 13, 11), strict=True))
        assert [cell.fetcher for cell in load.cells] == [
            None if fetchers[cell.chunk.position] == 10 + rank else fetchers[cell.chunk.position]
            for cell in load.cells
        ]
        saves = mine.save(plan).cells
        assert [cell.stored for cell in saves] == [cell.chunk.position == rank for cell in saves]
        kept += [cell.key for cell in saves]
        prefetched += [cell.key for cell in mine.prefetch(PrefetchPlan("a", plan.hashes)).cells]
    assert len(set(kept)) == len(kept) == len(plan.hashes) * 2
    assert len(set(prefetched)) == len(prefetched) == len(plan.hashes) * 2


@pytest.mark.parametrize("count", [1, 2, 3, 18])
@pytest.mark.parametrize("here", [(0, 1), (0, 2), (1, 2, 3), (0, 1, 2, 3)])
def test_host_memory_that_keeps_some_of_a_prompts_chunks_drops_its_end_first(
    here: tuple[int, ...], count: int
) -> None:
    """Of four replicas those `here` are on one host; a prompt is saved `count` chunks at a time."""
    hashes = tuple(bytes([i]) * 8 for i in range(1, 19))
    for rank in here:
        siblings = {ReplicaRank(each, 0): each for each in here if each != rank}
        mine = replace(planner(1, 4, rank, keeps_all=True), siblings=siblings)
        host_cache = HostCache(SlotPool(64, 0), 64, POLICIES["lru"], {"": len(mine.cells)})
        kept: list[int] = []
        for first in range(0, len(hashes), count):
            plan = replace(
                save_plan(first, count),
                hashes=hashes[first : first + count],
                before=hashes[max(0, first - 4) : first],
            )
            for cell in mine.save(plan).cells:
                entry = host_cache.begin(cell.key, cell.chunk, cell.nbytes)
                assert host_cache.assign_slot(entry, SlotUse.SAVE)
                host_cache.arrived(entry, now_ns=first, dirty=True)
                host_cache.unpin(entry)
                kept.append(cell.chunk.position)
        check(host_cache)
        assert len(set(kept)) < len(hashes)
        leaving = [entry.chunk.position for entry in host_cache.coldest_dirty(len(kept))]
        assert leaving == sorted(kept, reverse=True)


def test_a_prefetch_is_the_cells_of_a_load_without_their_pages() -> None:
    for rank in range(2):
        mine = planner(tp_rank=rank)
        cells = mine.load(load_plan()).cells
        job = mine.prefetch(PrefetchPlan("a", HASHES[:2]))
        assert isinstance(job, PrefetchJob)
        assert [(c.key, c.chunk, c.nbytes) for c in job.cells] == [
            (cell.key, cell.chunk, cell.nbytes) for cell in cells
        ]


def test_a_slot_has_room_for_the_largest_cell() -> None:
    """Spans at the end are shorter; with cells per rank one holds several heads."""
    assert planner().max_cell_bytes() == HEADER_BYTES + 2 * CHUNK * ROW_BYTES
    topology = Topology(4, 2, ((0, 3),), layer_span=2, per_head=False)
    per_rank = replace(planner(), cells=cells_of_rank([LayerGroup(topology, ROW_BYTES)], 1, 0))
    assert per_rank.max_cell_bytes() == HEADER_BYTES + 2 * 2 * CHUNK * ROW_BYTES


def test_a_plan_of_no_chunks_is_a_job_of_no_cells() -> None:
    plan = LoadPlan(JobId(1), "a", 2, (), (JobPages((), 64, 64, 64),), 64, 64)
    assert planner().load(plan).cells == ()
    assert plan.stop_chunk == 2
    assert planner().save(save_plan(count=0)).cells == ()


@pytest.mark.parametrize("weights_version", ["sample:a", "drawn:b"])
def test_a_plan_of_an_epoch_is_the_same_cells_by_its_names(weights_version: str) -> None:
    """Whatever was planned before or is planned after it."""
    mine, keys = planner(), KEYS.with_weights(weights_version)
    load, save = load_plan(), save_plan()
    fetch = PrefetchPlan("a", HASHES[:2])
    first = (mine.load(load).cells, mine.save(save).cells, mine.prefetch(fetch).cells)
    for _ in range(2):
        jobs = (
            mine.load(replace(load, weights_version=weights_version)).cells,
            mine.save(replace(save, weights_version=weights_version)).cells,
            mine.prefetch(replace(fetch, weights_version=weights_version)).cells,
        )
        for cells, before in zip(jobs, first, strict=True):
            assert len(cells) == len(before)
            for cell, old in zip(cells, before, strict=True):
                name = keys.namespace + old.key.removeprefix(KEYS.namespace)
                parent = old.chunk.parent and chunk_id_of(
                    keys.namespace, old.chunk.parent.split("-", 2)[1]
                )
                chunk = old.chunk._replace(id=chunk_id_of_key(name), parent=parent)
                assert cell == old._replace(key=name, chunk=chunk)
        assert (mine.load(load).cells, mine.save(save).cells, mine.prefetch(fetch).cells) == first


def test_more_epochs_than_are_kept_are_told_apart() -> None:
    mine = planner()
    weights_versions = [f"drawn:{number}" for number in range(3 * VERSIONS_KEPT)]
    for _ in range(2):
        for weights_version in weights_versions:
            [key] = {
                cell.key
                for cell in mine.load(replace(load_plan(), weights_version=weights_version)).cells[
                    :1
                ]
            }
            assert namespace_of(key) == with_weights(KEYS.namespace, weights_version)


def test_planners_of_two_models_do_not_share_names() -> None:
    other = KeyMaker(make_namespace("other", "0" * 12), ContextRank())
    plan = replace(load_plan(), weights_version="sample:a")
    one, two = (replace(planner(), keys=keys).load(plan) for keys in (KEYS, other))
    assert not {cell.key for cell in one.cells} & {cell.key for cell in two.cells}


def test_a_layered_load_is_the_same_cells_in_the_order_in_which_layers_run() -> None:
    plain, layered = (
        planner().load(replace(load_plan(first=3), layered=layered)) for layered in (False, True)
    )
    assert set(layered.cells) == set(plain.cells)
    order = [(cell.first_layer, cell.chunk.position) for cell in layered.cells]
    assert order == sorted(order)
    assert order != [(cell.first_layer, cell.chunk.position) for cell in plain.cells]


def test_a_chunk_whose_layers_read_only_the_end_of_a_prompt_needs_no_parent() -> None:
    topology = Topology(1, 1, ((0, 2),), layer_span=2)
    sliding = replace(topology, layer_group="sliding")
    layer_groups = [
        LayerGroup(topology, ROW_BYTES),
        LayerGroup(sliding, ROW_BYTES, AttentionWindow(sliding=CHUNK)),
    ]
    two = replace(planner(), cells=cells_of_rank(layer_groups, 0, 0))
    chunks = [cell.chunk for cell in two.save(replace(save_plan(1), before=(PARENT,))).cells]
    assert {chunk.parent for chunk in chunks if chunk.id.endswith("-sliding")} == {""}
    parents = [chunk.parent for chunk in chunks if not chunk.id.endswith("-sliding")]
    assert parents == [chunk_id_of(KEYS.namespace, h.hex()) for h in (PARENT, *HASHES[:3])]


# Recurrent states


def state_planner(groups: tuple[int, ...] = (0, 1, 2)) -> Planner:
    """Of a rank with a layer of attention and two of states, which have block tables of their own;
    the chunks' states are in one cell."""
    layer_groups = [
        LayerGroup(Topology(1, 1, ((0, 1),), 1, layer_group="full"), ROW_BYTES),
        LayerGroup(Topology(1, 1, ((0, 2),), 2, layer_group="state"), 64, is_state=True),
    ]
    cells = cells_of_rank(layer_groups, 0, 0, groups=groups)
    return Planner(cells, KEYS, CHUNK, 5.0, block_sizes=(BLOCK, CHUNK, CHUNK))


STATE_PAGES = (JobPages((8,), 63, 63, 64), JobPages((9,), 63, 63, 64))
NO_PAGES = JobPages((), 0, 0, 0)


def test_a_load_has_the_state_after_its_last_chunk_alone() -> None:
    pages = (JobPages((4, 5, 6, 7), 0, 0, 64), *STATE_PAGES)
    job = state_planner().load(LoadPlan(JobId(1), "a", 0, HASHES[:2], pages, 0, 64))
    found = [(cell.chunk.position, cell.local and cell.local.is_state) for cell in job.cells]
    assert found == [(0, False), (1, False), (1, True)]
    assert job.cells[-1].nbytes == HEADER_BYTES + 2 * 64


def test_a_save_is_of_attention_or_of_states() -> None:
    attention = SavePlan(
        JobId(1), "a", 0, HASHES[:2], (JobPages((4, 5, 6, 7), 0, 0, 64), NO_PAGES, NO_PAGES)
    )
    states = SavePlan(
        JobId(2), "a", 1, HASHES[1:2], (NO_PAGES, *STATE_PAGES), before=HASHES[:1], is_state=True
    )
    planner = state_planner()
    assert [(c.chunk.position, c.chunk.parent != "") for c in planner.save(attention).cells] == [
        (0, False),
        (1, True),
    ]
    [state] = planner.save(states).cells
    assert state.local is not None
    assert state.local.is_state
    assert (state.chunk.position, state.chunk.parent) == (1, "")  # it may stand alone
    assert (
        state.key
        == planner.load(LoadPlan(JobId(3), "a", 0, HASHES[:2], (NO_PAGES, *STATE_PAGES), 0, 64))
        .cells[-1]
        .key
    )


def test_states_are_not_saved_of_a_group_without_an_offer() -> None:
    pages = (NO_PAGES, STATE_PAGES[0], NO_PAGES)
    plan = SavePlan(JobId(2), "a", 1, HASHES[1:2], pages, is_state=True)
    assert state_planner().save(plan).cells == ()
    assert len(state_planner(groups=(0, 1, 1)).save(plan).cells) == 1


def test_the_last_state_is_prefetched() -> None:
    job = state_planner().prefetch(PrefetchPlan("a", HASHES[:3]))
    assert [cell.chunk.position for cell in job.cells] == [0, 1, 2, 2]


# Cells of a drafter

AHEAD = 1


def with_drafts(*, is_optional: bool = True) -> Planner:
    """Of one head and layer, and a drafter's layer whose rows depend on the next token."""
    own = Topology(1, 1, ((0, 1),), layer_span=1)
    draft = replace(own, layer_group="draft-full-1x16")
    cells = cells_of_rank(
        [
            LayerGroup(own, ROW_BYTES),
            LayerGroup(draft, ROW_BYTES, is_draft=True, lookahead=AHEAD, is_optional=is_optional),
        ],
        0,
        0,
    )
    unnamed = Planner(cells, KEYS, CHUNK, 5.0, block_sizes=(BLOCK,))
    return unnamed.named(KEYS.namespace, "d1")


@pytest.mark.parametrize(
    ("start", "stop", "chunks"),
    [
        (0, 2 * CHUNK - 1, [0, 1]),  # the last row would be of the next chunk's cell
        (CHUNK, 2 * CHUNK - 1, [1]),
        (CHUNK - 1, 2 * CHUNK - 1, [1]),  # the first row is
    ],
)
def test_a_drafters_cell_is_loaded_where_the_load_has_its_rows(
    start: int, stop: int, chunks: list[int]
) -> None:
    pages = JobPages((7, 8, 9, 6), 0, start, stop)
    job = with_drafts().load(LoadPlan(JobId(1), "a", 0, HASHES[:2], (pages,), start, stop))
    found = [cell for cell in job.cells if cell.is_optional]
    assert [cell.chunk.position for cell in found] == chunks
    assert all("@kind:draft-full-1x16-d1@" in cell.key for cell in found)
    assert chunk_id_of_key(found[0].key) == found[0].chunk.id


@pytest.mark.parametrize("draft_stop", [None, 0, 1, 2])
def test_a_drafters_cells_are_saved_before_its_gap(draft_stop: int | None) -> None:
    plan = replace(save_plan(count=3), draft_stop=draft_stop)
    job = with_drafts().save(plan)
    drafts = [cell.chunk.position for cell in job.cells if cell.is_optional]
    assert drafts == list(range(3 if draft_stop is None else draft_stop))
    assert len(job.cells) == 3 + len(drafts)


def test_a_drafters_cell_without_the_block_before_its_chunk_is_not_saved() -> None:
    """Its first row lies there."""
    pages = JobPages((0, 7, 8, 9, 6), CHUNK - BLOCK, CHUNK - AHEAD, 3 * CHUNK)
    job = with_drafts().save(SavePlan(JobId(2), "b", 1, HASHES[:2], (pages,)))
    assert [(c.chunk.position, c.is_optional) for c in job.cells] == [
        (1, False),
        (2, False),
        (2, True),
    ]


@pytest.mark.parametrize("part_bytes", [1, 3400, 1 << 30])
@pytest.mark.parametrize("tp_size", [2, 16])
@pytest.mark.parametrize("end_tokens", [0, 5])
def test_a_plan_in_parts_has_the_same_cells(
    monkeypatch: pytest.MonkeyPatch, part_bytes: int, tp_size: int, end_tokens: int
) -> None:
    """Of ranks with the same KV too, whose chunks have a parent further back."""
    monkeypatch.setattr("vllm_kvpool.transfer.planner.PART_BYTES", part_bytes)
    made = planner(4, tp_size, keeps_all=True)
    siblings = {ReplicaRank(tp_rank, 0): tp_rank for tp_rank in (0, 2, 3)}
    made = replace(made, siblings=siblings if tp_size == 16 else {})
    for before in ((), (PARENT, HASHES[5])):
        load = replace(
            load_plan(), hashes=HASHES[:4], before=before, end_tokens=end_tokens,
            pages=(JobPages(tuple(range(7, 15)), 0, 0, 4 * CHUNK),),
        )  # fmt: skip
        save = replace(save_plan(), before=before)
        for job, whole in (
            (made.begin_load(load), made.load(load)),
            (made.begin_save(save), made.save(save)),
        ):
            parts = [job.cells, *job.rest]
            assert tuple(cell for part in parts for cell in part) == whole.cells
            assert job.plan == whole.plan
            assert len(parts) in {1: (4,), 3400: (2,), 1 << 30: (1,)}[part_bytes]


@pytest.mark.parametrize("kind", ["layered", "handed over"])
def test_a_plan_that_has_to_be_whole_is_one_part(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("vllm_kvpool.transfer.planner.PART_BYTES", 1)
    job = (
        planner().begin_load(replace(load_plan(), layered=True))
        if kind == "layered"
        else planner().begin_save(replace(save_plan(), topic=b"t"))
    )
    assert job.rest is NO_PARTS
    assert {cell.chunk.position for cell in job.cells} >= {0, 1}
