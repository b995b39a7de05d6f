"""The planner: the slabs that a rank moves for a plan, their cells, and their names."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.invariants import check
from vllm_kvpool.identity.keys import (
    ContextRank,
    KeyMaker,
    chunk_id_of,
    chunk_id_of_key,
    layer_group_of,
    make_namespace,
    namespace_of,
    with_weights,
)
from vllm_kvpool.layout.topology import (
    AttentionWindow,
    LayerGroup,
    LocalCell,
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
    NO_SLABS,
    NULL_BLOCK,
    JobId,
    JobPages,
    LoadPlan,
    PrefetchJob,
    PrefetchPlan,
    SavePlan,
    Slab,
)
from vllm_kvpool.transfer.planner import VERSIONS_KEPT, Planner

CHUNK, ROW_BYTES, BLOCK = 32, 16, 16
PARENT = b"\0" * 8
HASHES = tuple(bytes([i]) * 8 for i in range(1, 7))
KEYS = KeyMaker(make_namespace("model", "0" * 12), ContextRank())


class CellOf(NamedTuple):
    """A cell, with its slab's properties."""

    key: str
    chunk: ChunkRef
    nbytes: int
    place: LocalCell
    pages: tuple[JobPages, ...] = ()
    stored: bool = True
    fetcher: int | None = None
    end_tokens: int = 0


def cells_in(slabs: Iterable[Slab]) -> list[CellOf]:
    """Return the cells of slabs, in order."""
    return [
        CellOf(
            *(key, slab.chunk, nbytes, place),
            *(slab.pages, slab.stored, slab.fetcher, slab.end_tokens),
        )
        for slab in slabs
        for key, nbytes, place in zip(slab.cell_keys(), slab.sizes, slab.kind.cells, strict=True)
    ]


def planner(
    num_heads: int = 4,
    tp_size: int = 2,
    tp_rank: int = 1,
    *,
    keeps_all: bool = False,
    **limits: Any,
) -> Planner:
    """Return the planner of one rank, with three layers in spans (0, 2) and (2, 3). `limits`:
    further fields of the planner."""
    topology = Topology(num_heads, tp_size, ((0, 3),), layer_span=2)
    cells = cells_of_rank([LayerGroup(topology, ROW_BYTES)], tp_rank, 0)
    return Planner(cells, KEYS, CHUNK, 5.0, keeps_all, block_sizes=(BLOCK,), **limits)


def load_plan(first: int = 0) -> LoadPlan:
    """Return a load of two chunks; the first is loaded only in part."""
    start = first * CHUNK
    pages = JobPages((7, 8, 9), start + 16, start + 20, start + 64)
    return LoadPlan(JobId(1), "a", first, HASHES[:2], (pages,), start + 20, start + 64)


def save_plan(first: int = 0, count: int = 4) -> SavePlan:
    start, stop = first * CHUNK, (first + count) * CHUNK
    blocks = tuple(range(7, 7 + (stop - start) // BLOCK))
    pages = JobPages(blocks, start, start, stop)
    return SavePlan(JobId(2), "b", first, HASHES[:count], (pages,))


@pytest.mark.parametrize("topic", [b"", b"t" * 20])
def test_a_chunk_with_gaps_is_named_without_pages_for_a_hand_over_alone(topic: bytes) -> None:
    plan = save_plan(count=2)
    [pages] = plan.pages
    gap = pages._replace(block_ids=(NULL_BLOCK, *pages.block_ids[1:]))
    slabs = planner().save(replace(plan, pages=(gap,), topic=topic)).slabs
    named = {slab.chunk.position: bool(slab.pages) for slab in slabs}
    assert named == ({0: False, 1: True} if topic else {1: True})
    in_host = planner().save(replace(plan, pages=(), topic=b"t" * 20)).slabs
    assert {(slab.chunk.position, slab.pages) for slab in in_host} == {(0, ()), (1, ())}


def test_a_load_is_every_cell_of_every_chunk_in_order() -> None:
    plan = replace(load_plan(first=3), before=(PARENT,))
    job = planner().load(plan)
    assert (job.plan, job.timeout_s) == (plan, 5.0)
    assert (plan.first_chunk, plan.stop_chunk) == (3, 5)
    cells = planner().cells
    assert len(cells) == 4  # two heads, two spans
    assert cells_in(job.slabs) == [
        CellOf(
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
    ]


@pytest.mark.parametrize("first", [0, 1])
def test_a_cell_is_loaded_if_any_group_of_its_layers_needs_the_chunk(first: int) -> None:
    """Block tables of one kind may begin at different tokens if their block sizes differ."""
    topology = Topology(1, 1, ((0, 2),), layer_span=2)
    cells = cells_of_rank([LayerGroup(topology, ROW_BYTES)], 0, 0, groups=(0, 1))
    two = Planner(cells, KEYS, CHUNK, 5.0, False, block_sizes=(BLOCK, CHUNK))
    early, late = (JobPages((7, 8, 9, 6), 0, start, 64) for start in (0, CHUNK))
    pages = (early, late) if first == 0 else (late, early)
    job = two.load(LoadPlan(JobId(1), "a", 0, HASHES[:2], pages, 0, 64))
    assert [slab.chunk.position for slab in job.slabs] == [0, 1]


def test_prompt_end_is_a_shorter_cell_in_loads_and_saves() -> None:
    pages = JobPages((7, 8, 9), 0, 0, 37)
    load = LoadPlan(JobId(1), "a", 0, HASHES[:2], (pages,), 0, 37, end_tokens=5)
    cells = cells_in(planner().load(load).slabs)
    assert [cell.end_tokens for cell in cells] == [0] * (len(cells) // 2) + [5] * (len(cells) // 2)
    save = SavePlan(JobId(2), "a", 1, HASHES[1:2], (pages,), end_tokens=5)
    job = planner().save(save)
    ends = [cell for cell in cells if cell.end_tokens]
    saved = cells_in(job.slabs)
    assert [(cell.key, cell.nbytes) for cell in saved] == [(cell.key, cell.nbytes) for cell in ends]
    assert cells[0].nbytes == HEADER_BYTES + 2 * CHUNK * ROW_BYTES
    assert saved[0].nbytes == HEADER_BYTES + 2 * 5 * ROW_BYTES
    [end] = job.slabs
    assert end.nbytes == sum(cell.nbytes for cell in saved)
    assert end.sizes != end.kind.sizes


def test_a_save_has_the_pages_of_its_whole_chunks() -> None:
    job = planner().save(save_plan(first=2, count=3))
    cells = cells_in(job.slabs)
    assert {cell.pages for cell in cells} == {(JobPages(tuple(range(7, 13)), 64, 64, 160),)}
    assert [cell.chunk.position for cell in cells] == [2] * 4 + [3] * 4 + [4] * 4
    assert all(cell.stored for cell in cells)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize(("num_heads", "tp_size"), [(1, 2), (2, 4), (1, 4), (4, 2), (2, 2)])
def test_replicas_take_turns_and_together_store_everything_once(
    num_heads: int, tp_size: int, first: int
) -> None:
    plan = save_plan(first)
    everyone = [planner(num_heads, tp_size, rank).save(plan) for rank in range(tp_size)]
    cells = [cell for job in everyone for cell in cells_in(job.slabs)]
    keys = {cell.key for cell in cells}
    assert len(keys) == len(cells) == num_heads * 2 * len(plan.hashes)
    assert all(cell.stored for cell in cells)


@pytest.mark.parametrize(("num_heads", "tp_size"), [(1, 2), (2, 4), (1, 4), (4, 2)])
def test_with_a_host_tier_each_keeps_all_and_stores_its_turns(num_heads: int, tp_size: int) -> None:
    plan = save_plan(first=1)
    for rank in range(tp_size):
        mine = cells_in(planner(num_heads, tp_size, rank).save(plan).slabs)
        kept = cells_in(planner(num_heads, tp_size, rank, keeps_all=True).save(plan).slabs)
        assert [cell for cell in kept if cell.stored] == mine
        every = planner(num_heads, tp_size, rank).load(
            LoadPlan(JobId(1), "b", 1, plan.hashes, plan.pages, CHUNK, 5 * CHUNK)
        )
        assert [cell._replace(stored=True) for cell in kept] == cells_in(every.slabs)


def test_replicas_on_one_host_fetch_and_keep_each_its_part() -> None:
    """A load names all of its slabs, and the rank that fetches each. Kept and prefetched cells are
    divided: each belongs to exactly one rank."""
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
        assert [slab.chunk.position for slab in load.slabs] == [1, 2, 3, 4]
        assert [slab.fetcher for slab in load.slabs] == [
            None if fetchers[slab.chunk.position] == 10 + rank else fetchers[slab.chunk.position]
            for slab in load.slabs
        ]
        saves = mine.save(plan).slabs
        assert [slab.stored for slab in saves] == [slab.chunk.position == rank for slab in saves]
        kept += [cell.key for cell in cells_in(saves)]
        prefetch = mine.prefetch(PrefetchPlan("a", plan.hashes))
        prefetched += [cell.key for cell in cells_in(prefetch.slabs)]
    assert len(set(kept)) == len(kept) == len(plan.hashes) * 2
    assert len(set(prefetched)) == len(prefetched) == len(plan.hashes) * 2


@pytest.mark.parametrize("slab_cells", [1, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 18])
@pytest.mark.parametrize("here", [(0, 1), (0, 2), (1, 2, 3), (0, 1, 2, 3)])
def test_host_memory_that_keeps_some_of_a_prompts_chunks_drops_its_end_first(
    here: tuple[int, ...], count: int, slab_cells: int
) -> None:
    """The ranks `here`, of four replicas, share a host. A prompt is saved `count` chunks at a
    time."""
    hashes = tuple(bytes([i]) * 8 for i in range(1, 19))
    for rank in here:
        siblings = {ReplicaRank(each, 0): each for each in here if each != rank}
        mine = planner(1, 4, rank, keeps_all=True, siblings=siblings, slab_cells=slab_cells)
        slots = SlotPool(64, 0)
        host_cache = HostCache(slots, 64, POLICIES["lru"], mine.slabs_per_chunk)
        kept: list[int] = []
        for first in range(0, len(hashes), count):
            plan = replace(
                save_plan(first, count),
                hashes=hashes[first : first + count],
                before=hashes[max(0, first - 4) : first],
            )
            for slab in mine.save(plan).slabs:
                entry = host_cache.add(slab)
                assert host_cache.assign_slots(entry, SlotUse.SAVE)
                host_cache.arrived(entry, now_ns=first, dirty=True)
                host_cache.unpin(entry)
                kept.append(slab.chunk.position)
        check(host_cache)
        assert slots.num_held == 2 * len(set(kept))
        assert len(set(kept)) < len(hashes)
        dirty = host_cache.coldest_dirty(slots.num_held)
        leaving = [entry.slab.chunk.position for entry in dirty]
        assert leaving == sorted(kept, reverse=True)


def test_a_prefetch_is_the_slabs_of_a_load_without_their_pages() -> None:
    for rank in range(2):
        mine = planner(tp_rank=rank)
        slabs = mine.load(load_plan()).slabs
        job = mine.prefetch(PrefetchPlan("a", HASHES[:2]))
        assert isinstance(job, PrefetchJob)
        assert job.slabs == tuple(slab._replace(pages=()) for slab in slabs)
        assert all(slab.pages for slab in slabs)


def test_a_slot_has_room_for_the_largest_cell() -> None:
    """The last span is shorter. With cells per rank, one cell holds several heads."""
    assert planner().max_cell_bytes() == HEADER_BYTES + 2 * CHUNK * ROW_BYTES
    topology = Topology(4, 2, ((0, 3),), layer_span=2, per_head=False)
    per_rank = replace(planner(), cells=cells_of_rank([LayerGroup(topology, ROW_BYTES)], 1, 0))
    assert per_rank.max_cell_bytes() == HEADER_BYTES + 2 * 2 * CHUNK * ROW_BYTES


def test_a_plan_of_no_chunks_is_a_job_of_no_slabs() -> None:
    plan = LoadPlan(JobId(1), "a", 2, (), (JobPages((), 64, 64, 64),), 64, 64)
    assert planner().load(plan).slabs == ()
    assert plan.stop_chunk == 2
    assert planner().save(save_plan(count=0)).slabs == ()


@pytest.mark.parametrize("weights_version", ["sample:a", "drawn:b"])
def test_a_plan_of_an_epoch_is_the_same_cells_by_its_names(weights_version: str) -> None:
    """Plans of other epochs, before or after, do not change a plan's slabs."""
    mine, keys = planner(slab_cells=3), KEYS.with_weights(weights_version)
    load, save = load_plan(), save_plan()
    fetch = PrefetchPlan("a", HASHES[:2])
    first = (mine.load(load).slabs, mine.save(save).slabs, mine.prefetch(fetch).slabs)
    for _ in range(2):
        jobs = (
            mine.load(replace(load, weights_version=weights_version)).slabs,
            mine.save(replace(save, weights_version=weights_version)).slabs,
            mine.prefetch(replace(fetch, weights_version=weights_version)).slabs,
        )
        for slabs, before in zip(jobs, first, strict=True):
            for slab, was in zip(slabs, before, strict=True):
                assert slab.id == slab.chunk.id + was.kind.part
                assert slab.kind.part == was.kind.part
                assert slab.kind.cells is was.kind.cells, "lanes know a slab's pages by it"
            for cell, old in zip(cells_in(slabs), cells_in(before), strict=True):
                name = keys.namespace + old.key.removeprefix(KEYS.namespace)
                parent = old.chunk.parent and chunk_id_of(
                    keys.namespace, old.chunk.parent.split("-", 2)[1]
                )
                chunk = old.chunk._replace(id=chunk_id_of_key(name), parent=parent)
                assert cell == old._replace(key=name, chunk=chunk)
        assert (mine.load(load).slabs, mine.save(save).slabs, mine.prefetch(fetch).slabs) == first


def test_more_epochs_than_are_kept_are_told_apart() -> None:
    mine = planner()
    weights_versions = [f"drawn:{number}" for number in range(3 * VERSIONS_KEPT)]
    for _ in range(2):
        for weights_version in weights_versions:
            plan = replace(load_plan(), weights_version=weights_version)
            key = mine.load(plan).slabs[0].cell_keys()[0]
            assert namespace_of(key) == with_weights(KEYS.namespace, weights_version)


def test_planners_of_two_models_do_not_share_names() -> None:
    other = KeyMaker(make_namespace("other", "0" * 12), ContextRank())
    plan = replace(load_plan(), weights_version="sample:a")
    one, two = (replace(planner(), keys=keys).load(plan) for keys in (KEYS, other))
    keys_of_one, keys_of_two = (
        {key for slab in job.slabs for key in slab.cell_keys()} for job in (one, two)
    )
    assert keys_of_one
    assert not keys_of_one & keys_of_two
    assert not {slab.id for slab in one.slabs} & {slab.id for slab in two.slabs}


def test_a_layered_load_is_the_same_slabs_in_the_order_in_which_layers_run() -> None:
    """When loads may be layered, each slab has the layers of one span."""
    mine = planner(by_span=True)
    plain, layered = (
        mine.load(replace(load_plan(first=3), layered=layered)).slabs for layered in (False, True)
    )
    assert len(set(plain)) == len(plain) == 4
    assert set(layered) == set(plain)
    order = [(slab.kind.first_layer, slab.chunk.position) for slab in layered]
    assert order == sorted(order)
    assert order != [(slab.kind.first_layer, slab.chunk.position) for slab in plain]


def test_a_chunk_whose_layers_read_only_the_end_of_a_prompt_needs_no_parent() -> None:
    topology = Topology(1, 1, ((0, 2),), layer_span=2)
    sliding = replace(topology, layer_group="sliding")
    layer_groups = [
        LayerGroup(topology, ROW_BYTES),
        LayerGroup(sliding, ROW_BYTES, AttentionWindow(sliding=CHUNK)),
    ]
    two = replace(planner(), cells=cells_of_rank(layer_groups, 0, 0))
    chunks = [slab.chunk for slab in two.save(replace(save_plan(1), before=(PARENT,))).slabs]
    assert {chunk.parent for chunk in chunks if chunk.id.endswith("-sliding")} == {""}
    parents = [chunk.parent for chunk in chunks if not chunk.id.endswith("-sliding")]
    assert parents == [chunk_id_of(KEYS.namespace, h.hex()) for h in (PARENT, *HASHES[:3])]


# Recurrent states


def state_planner(groups: tuple[int, ...] = (0, 1, 2), layer_span: int = 2) -> Planner:
    """Return the planner of a rank with one attention layer and two layers of states.

    Each layer has its own block table. The states of a chunk are in one cell, or with `layer_span`
    1 in two cells of a slab.
    """
    layer_groups = [
        LayerGroup(Topology(1, 1, ((0, 1),), 1, layer_group="full"), ROW_BYTES),
        LayerGroup(Topology(1, 1, ((0, 2),), layer_span, layer_group="state"), 64, is_state=True),
    ]
    cells = cells_of_rank(layer_groups, 0, 0, groups=groups)
    return Planner(cells, KEYS, CHUNK, 5.0, block_sizes=(BLOCK, CHUNK, CHUNK))


STATE_PAGES = (JobPages((8,), 63, 63, 64), JobPages((9,), 63, 63, 64))
NO_PAGES = JobPages((), 0, 0, 0)


def test_a_load_has_the_state_after_its_last_chunk_alone() -> None:
    pages = (JobPages((4, 5, 6, 7), 0, 0, 64), *STATE_PAGES)
    job = state_planner().load(LoadPlan(JobId(1), "a", 0, HASHES[:2], pages, 0, 64))
    found = [(cell.chunk.position, cell.place.is_state) for cell in cells_in(job.slabs)]
    assert found == [(0, False), (1, False), (1, True)]
    assert job.slabs[-1].sizes == (HEADER_BYTES + 2 * 64,)


def test_a_save_is_of_attention_or_of_states() -> None:
    attention = SavePlan(
        JobId(1), "a", 0, HASHES[:2], (JobPages((4, 5, 6, 7), 0, 0, 64), NO_PAGES, NO_PAGES)
    )
    states = SavePlan(
        JobId(2), "a", 1, HASHES[1:2], (NO_PAGES, *STATE_PAGES), before=HASHES[:1], is_state=True
    )
    planner = state_planner()
    saved = planner.save(attention).slabs
    assert [(slab.chunk.position, slab.chunk.parent != "") for slab in saved] == [
        (0, False),
        (1, True),
    ]
    [state] = cells_in(planner.save(states).slabs)
    assert state.place.is_state
    assert (state.chunk.position, state.chunk.parent) == (1, "")  # it may be a slab of its own
    load = LoadPlan(JobId(3), "a", 0, HASHES[:2], (NO_PAGES, *STATE_PAGES), 0, 64)
    assert planner.load(load).slabs[-1].cell_keys() == [state.key]


@pytest.mark.parametrize("layer_span", [1, 2])
def test_states_are_not_saved_of_a_group_without_an_offer(layer_span: int) -> None:
    """A group without an offer also blocks the other groups' states in its slab."""
    pages = (NO_PAGES, STATE_PAGES[0], NO_PAGES)
    plan = SavePlan(JobId(2), "a", 1, HASHES[1:2], pages, is_state=True)
    assert state_planner(layer_span=layer_span).save(plan).slabs == ()
    [slab] = state_planner(groups=(0, 1, 1), layer_span=layer_span).save(plan).slabs
    assert slab.num_cells == 2 // layer_span


def test_the_last_state_is_prefetched() -> None:
    job = state_planner().prefetch(PrefetchPlan("a", HASHES[:3]))
    found = [(slab.chunk.position, slab.kind.cells[0].is_state) for slab in job.slabs]
    assert found == [(0, False), (1, False), (2, False), (2, True)]


# Cells of a drafter

AHEAD = 1


def with_drafts(*, is_optional: bool = True) -> Planner:
    """Return a planner of one head and layer, and a drafter's layer whose rows depend on the next
    token."""
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
        (0, 2 * CHUNK - 1, [0, 1]),  # the last row would belong to the next chunk's cell
        (CHUNK, 2 * CHUNK - 1, [1]),
        (CHUNK - 1, 2 * CHUNK - 1, [1]),  # the first row is
    ],
)
def test_a_drafters_cell_is_loaded_where_the_load_has_its_rows(
    start: int, stop: int, chunks: list[int]
) -> None:
    pages = JobPages((7, 8, 9, 6), 0, start, stop)
    job = with_drafts().load(LoadPlan(JobId(1), "a", 0, HASHES[:2], (pages,), start, stop))
    optional = [slab for slab in job.slabs if slab.kind.is_optional]
    assert [slab.chunk.position for slab in optional] == chunks
    found = cells_in(optional)
    assert len(found) == len(optional)
    assert all("@kind:draft-full-1x16-d1@" in cell.key for cell in found)
    assert chunk_id_of_key(found[0].key) == found[0].chunk.id


@pytest.mark.parametrize("draft_stop", [None, 0, 1, 2])
def test_a_drafters_cells_are_saved_before_its_gap(draft_stop: int | None) -> None:
    plan = replace(save_plan(count=3), draft_stop=draft_stop)
    job = with_drafts().save(plan)
    drafts = [slab.chunk.position for slab in job.slabs if slab.kind.is_optional]
    assert drafts == list(range(3 if draft_stop is None else draft_stop))
    assert len(cells_in(job.slabs)) == len(job.slabs) == 3 + len(drafts)


def test_a_drafters_cell_without_the_block_before_its_chunk_is_not_saved() -> None:
    """The cell's first row lies in that block."""
    pages = JobPages((0, 7, 8, 9, 6), CHUNK - BLOCK, CHUNK - AHEAD, 3 * CHUNK)
    job = with_drafts().save(SavePlan(JobId(2), "b", 1, HASHES[:2], (pages,)))
    assert [(slab.chunk.position, slab.kind.is_optional) for slab in job.slabs] == [
        (1, False),
        (2, False),
        (2, True),
    ]


@pytest.mark.parametrize("part_bytes", [1, 3400, 1 << 30])
@pytest.mark.parametrize("tp_size", [2, 16])
@pytest.mark.parametrize("end_tokens", [0, 5])
def test_a_plan_in_parts_has_the_same_slabs(
    monkeypatch: pytest.MonkeyPatch, part_bytes: int, tp_size: int, end_tokens: int
) -> None:
    """`tp_size` 16 stands for ranks with the same KV, whose chunks have a parent further back."""
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
            parts = [job.slabs, *job.rest]
            assert tuple(slab for part in parts for slab in part) == whole.slabs
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
    assert job.rest is NO_SLABS
    assert {slab.chunk.position for slab in job.slabs} >= {0, 1}


# How cells are cut into slabs

TWO_LAYERS = HEADER_BYTES + 2 * CHUNK * ROW_BYTES  # bytes of a cell of span (0, 2)
ONE_LAYER = HEADER_BYTES + CHUNK * ROW_BYTES  # of span (2, 3)
PAYLOAD = CHUNK * ROW_BYTES  # of a cell of one layer


def sizes_of_a_chunk(mine: Planner) -> list[tuple[int, ...]]:
    """Return the sizes of the cells of each slab of a chunk."""
    return [slab.sizes for slab in mine.prefetch(PrefetchPlan("a", HASHES[:1])).slabs]


def test_a_chunk_is_one_slab_where_nothing_limits_it() -> None:
    mine = planner()
    [slab] = mine.prefetch(PrefetchPlan("a", HASHES[:1])).slabs
    assert slab.sizes == slab.kind.sizes == (TWO_LAYERS,) * 2 + (ONE_LAYER,) * 2
    assert slab.nbytes == sum(slab.sizes)
    assert slab.id == slab.chunk.id == chunk_id_of(KEYS.namespace, HASHES[0].hex())
    assert slab.chunk_hex == HASHES[0].hex()
    assert mine.slabs_per_chunk == {"": 1}


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        *(({"slab_cells": cells}, [cells, 4 - cells]) for cells in (2, 3)),
        ({"slab_cells": 1}, [1, 1, 1, 1]),
        *(({"slab_cells": cells}, [4]) for cells in (4, 5)),
        ({"slab_bytes": 1}, [1, 1, 1, 1]),  # a larger cell is a slab of its own
        ({"slab_bytes": 4 * PAYLOAD - 1}, [1, 2, 1]),
        ({"slab_bytes": 4 * PAYLOAD}, [2, 2]),  # headers do not count
        ({"slab_bytes": 5 * PAYLOAD}, [3, 1]),
        ({"slab_bytes": 6 * PAYLOAD}, [4]),
    ],
    ids=str,
)
def test_slabs_have_so_many_cells_and_bytes_at_most(
    limits: dict[str, int], counts: list[int]
) -> None:
    mine = planner(**limits)
    assert [len(sizes) for sizes in sizes_of_a_chunk(mine)] == counts
    assert mine.slabs_per_chunk == {"": len(counts)}


@pytest.mark.parametrize(("slab_cells", "num_slabs"), [(64, 2), (1, 4)])
def test_slabs_by_span_have_the_layers_of_one(slab_cells: int, num_slabs: int) -> None:
    mine = planner(by_span=True, slab_cells=slab_cells)
    slabs = mine.prefetch(PrefetchPlan("a", HASHES[:1])).slabs
    assert len(slabs) == num_slabs
    for slab in slabs:
        [start] = {cell.layer_start for cell in slab.kind.cells}
        assert slab.kind.first_layer == start
    assert {slab.kind.first_layer for slab in slabs} == {0, 2}
    assert mine.slabs_per_chunk == {"": num_slabs}


def two_layer_groups(**limits: Any) -> Planner:
    """Return a planner of layers with full attention and of sliding layers, whose rows are
    longer."""
    full = Topology(2, 1, ((0, 2),), layer_span=1, layer_group="full")
    sliding = replace(full, layer_group="sliding")
    layer_groups = [
        LayerGroup(full, ROW_BYTES),
        LayerGroup(sliding, 2 * ROW_BYTES, AttentionWindow(sliding=2 * CHUNK)),
    ]
    cells = cells_of_rank(layer_groups, 0, 0, groups=(0, 0, 1, 1))
    return Planner(cells, KEYS, CHUNK, 5.0, block_sizes=(BLOCK, BLOCK), **limits)


def test_a_slab_has_cells_of_one_layer_group() -> None:
    mine = two_layer_groups(slab_cells=3)
    pages = JobPages(tuple(range(7, 11)), 0, 0, 2 * CHUNK)
    for slabs in (
        mine.save(SavePlan(JobId(1), "a", 0, HASHES[:2], (pages, pages))).slabs,
        mine.load(LoadPlan(JobId(1), "a", 0, HASHES[:2], (pages, pages), 0, 2 * CHUNK)).slabs,
        mine.prefetch(PrefetchPlan("a", HASHES[:2])).slabs,
    ):
        found = [(layer_group_of(slab.chunk.id), slab.num_cells) for slab in slabs]
        assert found == [("full", 3), ("full", 1), ("sliding", 3), ("sliding", 1)] * 2
        for slab in slabs:
            assert {chunk_id_of_key(key) for key in slab.cell_keys()} == {slab.chunk.id}
            assert layer_group_of(slab.id.removesuffix(slab.kind.part)) == layer_group_of(
                slab.chunk.id
            )
        assert len({slab.id for slab in slabs}) == len(slabs)
    assert mine.slabs_per_chunk == {"full": 2, "sliding": 2}


def test_only_the_layer_group_that_a_load_needs_is_loaded() -> None:
    """The first chunk lies before the window."""
    mine = two_layer_groups()
    pages = JobPages(tuple(range(7, 13)), 0, 0, 3 * CHUNK), JobPages((9, 8, 7, 6), 32, 32, 96)
    slabs = mine.load(LoadPlan(JobId(1), "a", 0, HASHES[:3], pages, 0, 3 * CHUNK)).slabs
    found = [(slab.chunk.position, layer_group_of(slab.chunk.id)) for slab in slabs]
    sliding = [(chunk, "sliding") for chunk in (1, 2)]
    assert sorted(found) == sorted([(chunk, "full") for chunk in range(3)] + sliding)


@given(st.integers(1, 9), st.integers(1, 12_000), st.booleans(), st.booleans(), st.integers(0, 5))
def test_however_chunks_are_cut_their_cells_are_the_same(
    slab_cells: int, slab_bytes: int, by_span: bool, keeps_all: bool, end_tokens: int
) -> None:
    """Each slab keeps its limits and has an id of its own."""
    made = [
        planner(8, 2, keeps_all=keeps_all, **limits)
        for limits in (
            {"slab_cells": 1},
            {"slab_cells": slab_cells, "slab_bytes": slab_bytes, "by_span": by_span},
        )
    ]
    load = replace(load_plan(), end_tokens=end_tokens)
    fetch = PrefetchPlan("a", HASHES[:3])
    singles, jobs = (
        (each.load(load).slabs, each.save(save_plan()).slabs, each.prefetch(fetch).slabs)
        for each in made
    )
    for single, slabs in zip(singles, jobs, strict=True):
        assert sorted(cells_in(slabs)) == sorted(cells_in(single))
        if not by_span:
            assert cells_in(slabs) == cells_in(single)
        assert len({slab.id for slab in slabs}) == len(slabs)
        for _, of_chunk in groupby(slabs, key=lambda slab: slab.chunk.id):
            assert len(list(of_chunk)) == made[1].slabs_per_chunk[""]
        for slab in slabs:
            assert slab.nbytes == sum(slab.sizes)
            assert slab.num_cells == len(slab.sizes) <= slab_cells
            payload = sum(slab.kind.sizes) - slab.num_cells * HEADER_BYTES
            assert payload <= slab_bytes or slab.num_cells == 1
            assert len({cell.span for cell in slab.kind.cells}) == 1 or not by_span


# Slabs whose layers have several block tables


def two_tables(slab_cells: int = 64) -> Planner:
    """Return a planner of two layers with a cell each and separate block tables."""
    topology = Topology(1, 1, ((0, 2),), layer_span=1)
    cells = cells_of_rank([LayerGroup(topology, ROW_BYTES)], 0, 0, groups=(0, 1))
    return Planner(cells, KEYS, CHUNK, 5.0, block_sizes=(BLOCK, BLOCK), slab_cells=slab_cells)


@pytest.mark.parametrize("gap", [0, 1])
def test_a_slab_with_a_gap_in_any_of_its_groups_is_not_saved(gap: int) -> None:
    """The gap is in the second of three chunks. Cells in slabs of their own are saved without
    it."""
    whole = JobPages((4, 5, 6, 7, 8, 9), 0, 0, 3 * CHUNK)
    pages = [whole, whole]
    pages[gap] = whole._replace(block_ids=(4, 5, 6, 0, 8, 9))
    plan = SavePlan(JobId(1), "a", 0, HASHES[:3], tuple(pages))
    slabs = two_tables().save(plan).slabs
    assert [(slab.chunk.position, slab.num_cells) for slab in slabs] == [(0, 2), (2, 2)]
    cells = cells_in(two_tables(slab_cells=1).save(plan).slabs)
    assert [(cell.chunk.position, cell.place.layer_start) for cell in cells] == [
        *((0, 0), (0, 1)),
        (1, 1 - gap),
        *((2, 0), (2, 1)),
    ]


@pytest.mark.parametrize("needed", [0, 1])
def test_a_slab_is_loaded_whole_if_any_of_its_groups_needs_the_chunk(needed: int) -> None:
    pages = [JobPages((6, 7), CHUNK, CHUNK, 2 * CHUNK)] * 2
    pages[needed] = JobPages((4, 5, 6, 7), 0, 0, 2 * CHUNK)
    load = LoadPlan(JobId(1), "a", 0, HASHES[:2], tuple(pages), 0, 2 * CHUNK)
    slabs = two_tables().load(load).slabs
    assert [(slab.chunk.position, slab.num_cells) for slab in slabs] == [(0, 2), (1, 2)]
    cells = cells_in(two_tables(slab_cells=1).load(load).slabs)
    assert [(cell.chunk.position, cell.place.layer_start) for cell in cells] == [
        (0, needed),
        *((1, 0), (1, 1)),
    ]


class CountedTable(tuple[int, ...]):
    """A block table that counts how often it is searched."""

    searches = 0

    def __contains__(self, block: object) -> bool:
        self.searches += 1
        return super().__contains__(block)


def test_save_of_many_parts_searches_its_block_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes as long as the table, and a long prompt has as many parts as chunks."""
    monkeypatch.setattr("vllm_kvpool.transfer.planner.PART_BYTES", 1)
    plan = save_plan()
    [pages] = plan.pages
    table = CountedTable(pages.block_ids)
    job = planner().begin_save(replace(plan, pages=(pages._replace(block_ids=table),)))
    assert len(list(job.rest)) == len(plan.hashes) - 1 > 0
    assert table.searches == 1
