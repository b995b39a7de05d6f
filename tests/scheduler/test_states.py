"""The scheduler side of models with recurrent states: saved where the engine offers one, loaded at
the largest boundary that is whole, never under the name of another prefix."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.scheduler.scheduler_bench import hashes_of
from tests.support.buffers import make_buffer
from tests.support.fakes import FakeClock, FakePins, FakeRequest, PatientLookups
from tests.support.invariants import check
from tests.support.memory_store import MemoryStore
from vllm_kvpool.config import KVPoolConfig, KVRole, RequestOptions
from vllm_kvpool.identity.chunk_hash import RequestIdentity
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.scheduler.blocks import NO_PAGES, GroupTables, state_page
from vllm_kvpool.scheduler.messages import Loaded, StepPlan, StepReport, Stored
from vllm_kvpool.scheduler.pool_scheduler import PoolScheduler
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.request import PoolShape, ScheduledStep, StateOffer
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.transfer.ops import NULL_BLOCK, JobPages, SavePlan

CHUNK = 32
LIMIT_S = 30.0
ATTENTION, STATE = 0, 1  # layer groups
PENDING, NOTHING = (None, False), (0, False)
View = FakeRequest[RequestOptions, RequestIdentity]


class Bench:
    """A scheduler of a model with attention in group 0 and states in groups 1 and 2."""

    def __init__(
        self,
        block: int = CHUNK,
        max_pinned: int = 1000,
        num_ranks: int = 1,
        state_stride: int = 0,
    ) -> None:
        self.block = block
        topology = Topology(1, 1, ((0, 2),), 1, layer_group="full")
        layer_groups = (
            LayerGroup(topology, row_bytes=16),
            LayerGroup(replace(topology, layer_group="state"), row_bytes=64, is_state=True),
        )
        self.names = CellNames(make_namespace("model", "0" * 12), layer_groups)
        self.memory = MemoryStore("", 1 << 24)
        self.lookups = PatientLookups((self.memory,), self.names, CHUNK, block=block)
        self.registry = MetricsRegistry()
        self.pins = FakePins()
        state = KVCacheGroup(block, is_state=True)
        groups = (KVCacheGroup(block), state, state)
        self.scheduler = PoolScheduler(
            KVPoolConfig(save_decode=bool(state_stride)),
            KVRole.BOTH,
            PoolShape(CHUNK, groups, num_ranks, max_pinned, state_stride=state_stride),
            self.lookups,
            self.registry,
            self.pins,
            FakeClock(time.monotonic()),
        )
        self.views: dict[str, View] = {}

    def store(self, tokens: Sequence[int], layer_group: int, *chunks: int) -> None:
        for chunk in chunks:
            keys = self.names.of_chunk(hashes_of(tokens)[chunk], layer_group)
            self.memory.put(keys, [make_buffer(1)] * len(keys), [ChunkRef("")] * len(keys))

    def drop(self, tokens: Sequence[int], layer_group: int, chunk: int) -> None:
        self.memory.remove(self.names.of_chunk(hashes_of(tokens)[chunk], layer_group))

    def add(self, num_tokens: int = 200, request_id: str = "a", **options: Any) -> View:
        view: View = FakeRequest(
            request_id, list(range(num_tokens)), RequestOptions(**options), RequestIdentity()
        )
        self.views[request_id] = view
        self.scheduler.add(view)
        return view

    def match(self, num_computed: int = 0, request_id: str = "a") -> tuple[int | None, bool]:
        while (offer := self.scheduler.match(request_id, num_computed)) == PENDING:
            self.lookups.wait(LIMIT_S)
            assert self.lookups._results, "no answer"
        check(self.scheduler)
        return offer

    def tables(self, num_tokens: int) -> list[list[int]]:
        """As vLLM allocates: of states, a block for the last token alone."""
        count = -(-num_tokens // self.block)
        attention = list(range(1, count + 1))
        return [attention, *([NULL_BLOCK] * (count - 1) + [base + count] for base in (100, 200))]

    def admit(self, num_computed: int = 0) -> int:
        """Match and allocate; how many tokens are to be loaded."""
        count, _ = self.match(num_computed)
        assert count is not None
        tables = self.tables(num_computed + count) if count else ()
        self.scheduler.allocated("a", tables, count)
        self.views["a"].num_computed_tokens = num_computed + count
        return count

    def step(
        self,
        count: int,
        *offers: tuple[int, int, int],
        request_id: str = "a",
        drafts: bool = False,
    ) -> StepPlan:
        """A step of so many tokens, with these offers of states."""
        view = self.views[request_id]
        tables = self.tables(view.num_computed_tokens + count)
        plan = self.scheduler.plan_step(
            ScheduledStep(
                {request_id: count} if count else {},
                lambda request_id: tables,
                states={request_id: [StateOffer(*offer) for offer in offers]} if offers else {},
                drafted=[request_id] if drafts else (),
            )
        )
        view.num_computed_tokens += count
        check(self.scheduler)
        self.pins.check()
        return plan

    def gather(self, plan: StepPlan, ranks: int = 1) -> None:
        self.scheduler.apply(StepReport(gathered={save.job_id: ranks for save in plan.saves}))

    def load_fails(self, tokens: int, ranks: int = 1) -> None:
        """Every rank reports in a step of its own that it has loaded only so many tokens."""
        for _ in range(ranks):
            self.scheduler.apply(StepReport(loads={"a": Loaded(tokens)}))
        self.scheduler.load_ended("a")
        self.views["a"].num_computed_tokens = 0
        check(self.scheduler)

    def finish(self) -> dict[str, Any]:
        answer = self.scheduler.finish("a", self.tables(self.views["a"].num_computed_tokens))
        assert answer is not None
        return answer["kvpool"]

    def missed(self) -> dict[str, float]:
        snapshot = self.registry.snapshot()
        return {
            name.partition("reason=")[2].strip('"}'): value
            for name, value in snapshot.items()
            if name.startswith("kvpool_miss_tokens") and value
        }


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    assert made.lookups.close()


def states(plan: StepPlan) -> list[SavePlan]:
    return [save for save in plan.saves if save.is_state]


# Hits


@pytest.mark.parametrize(
    ("attention", "stored", "hit"),
    [
        (6, (6,), 192),
        (6, (2, 4), 128),
        (3, (2, 4), 64),
        (6, (), 0),
        (0, (2,), 0),
    ],
)
def test_a_hit_ends_at_a_boundary_with_a_state(
    bench: Bench, attention: int, stored: tuple[int, ...], hit: int
) -> None:
    bench.store(range(200), ATTENTION, *range(attention))
    bench.store(range(200), STATE, *(boundary - 1 for boundary in stored))
    bench.add()
    assert bench.match() == (hit, bool(hit))


def test_a_hit_leaves_a_token_to_compute(bench: Bench) -> None:
    """The state after the whole prompt cannot give its last token's output."""
    bench.store(range(200), ATTENTION, *range(6))
    bench.store(range(200), STATE, 3, 5)
    bench.add(192)
    assert bench.match() == (128, True)
    bench.add(193, "b")
    assert bench.match(request_id="b") == (192, True)


def test_own_states_past_the_pools_are_kept(bench: Bench) -> None:
    bench.store(range(200), ATTENTION, *range(6))
    bench.store(range(200), STATE, 3)
    bench.add()
    assert bench.match(64) == (64, True)
    assert bench.match(128) == NOTHING
    assert bench.match(160) == NOTHING


def test_a_load_is_the_attention_before_it_and_one_state_of_each_group(bench: Bench) -> None:
    bench.store(range(200), ATTENTION, *range(6))
    bench.store(range(200), STATE, 3)
    bench.add()
    assert bench.admit(32) == 96
    [load] = bench.step(0).loads
    assert (load.token_start, load.token_stop, load.first_chunk) == (32, 128, 1)
    assert load.pages == (
        JobPages((2, 3, 4), 32, 32, 128),
        JobPages((104,), 127, 127, 128),
        JobPages((204,), 127, 127, 128),
    )


def test_the_pages_of_a_larger_block_are_at_the_boundary() -> None:
    groups = (KVCacheGroup(16), KVCacheGroup(64, is_state=True), KVCacheGroup(64, shared=False))
    tables = GroupTables(groups)
    assert (tables.block_size, tables.resumes, tables.has_states) == (64, False, True)
    blocks = [list(range(1, 13)), [0, 7, 9], [0, 0, 0]]
    assert tables.of_load(blocks, 64, 128)[1:] == (state_page(7, 128), NO_PAGES)
    assert tables.of_load(blocks, 0, 192)[1:] == (state_page(9, 192), NO_PAGES)
    assert tables.of_save(blocks, 0, 64, 0, {}) == (
        JobPages((1, 2, 3, 4), 0, 0, 64),
        NO_PAGES,
        NO_PAGES,
    )
    assert not GroupTables(groups[1:2]).resumes
    assert not GroupTables(groups[1:2]).has_attention


# Saves


def test_a_state_is_saved_from_the_block_that_is_offered(bench: Bench) -> None:
    bench.add()
    assert bench.admit() == 0
    plan = bench.step(96, (1, 41, 96), (2, 42, 96))
    [attention] = [save for save in plan.saves if not save.is_state]
    assert attention.pages == (JobPages((1, 2, 3), 0, 0, 96), NO_PAGES, NO_PAGES)
    [state] = states(plan)
    assert state.pages == (NO_PAGES, state_page(41, 96), state_page(42, 96))
    assert (state.first_chunk, state.hashes) == (2, (hashes_of(range(200))[2],))
    assert state.before == (hashes_of(range(200))[1],)
    assert bench.pins.references == {1: 1, 2: 1, 3: 1, 41: 1, 42: 1}
    bench.gather(plan)
    assert not bench.pins.references
    assert "kvpool_saved_states" not in bench.registry.snapshot()
    stored = Stored(1, frozenset({0}))
    bench.scheduler.apply(StepReport(stored={each.job_id: stored for each in plan.saves}))
    assert bench.registry.snapshot()["kvpool_saved_states"] == 1


def test_offers_of_several_boundaries_are_saves_of_their_own(bench: Bench) -> None:
    bench.add()
    bench.admit()
    plan = bench.step(128, (1, 41, 128), (2, 42, 64), (1, 43, 64))
    assert [(save.first_chunk, save.pages) for save in states(plan)] == [
        (1, (NO_PAGES, state_page(43, 64), state_page(42, 64))),
        (3, (NO_PAGES, state_page(41, 128), NO_PAGES)),
    ]


def test_the_same_boundary_is_saved_once(bench: Bench) -> None:
    bench.add()
    bench.admit()
    assert len(states(bench.step(96, (1, 41, 96), (2, 42, 96)))) == 1
    bench.views["a"].preempt()
    assert bench.admit() == 0
    assert not states(bench.step(96, (1, 51, 96), (2, 52, 96)))


def test_a_state_that_was_loaded_is_not_saved_again(bench: Bench) -> None:
    bench.store(range(200), ATTENTION, *range(6))
    bench.store(range(200), STATE, 3)
    bench.add()
    assert bench.admit() == 128
    bench.step(0)
    bench.scheduler.load_ended("a")
    assert not bench.step(64, (1, 104, 128), (2, 204, 128)).saves
    assert [save.first_chunk for save in states(bench.step(8, (1, 106, 192), (2, 206, 192)))] == [5]


@pytest.mark.parametrize("boundary", [16, 40, 224])
def test_a_boundary_off_the_chunk_grid_or_past_the_prompt_is_not_saved(
    bench: Bench, boundary: int
) -> None:
    bench.add()
    bench.admit()
    assert not states(bench.step(200, (1, 41, boundary), (2, 42, boundary)))


def test_without_room_an_offer_is_lost() -> None:
    small = Bench(max_pinned=3)
    small.add()
    small.admit()
    first = small.step(96, (1, 41, 96), (2, 42, 96))  # states come before attention
    assert [save.is_state for save in first.saves] == [True, False]
    second = small.step(64, (1, 43, 160), (2, 44, 160))
    assert not states(second)
    small.gather(first)
    assert states(small.step(32, (1, 45, 192), (2, 46, 192)))
    assert small.lookups.close()


def test_nothing_is_saved_of_requests_that_are_not(bench: Bench) -> None:
    bench.add(save=False)
    bench.admit()
    assert not bench.step(96, (1, 41, 96), (2, 42, 96)).saves
    bench.scheduler.plan_step(
        ScheduledStep({}, lambda request_id: (), states={"gone": [StateOffer(1, 4, 32)]})
    )


def test_after_a_reset_no_state_of_before_is_saved_or_counted(bench: Bench) -> None:
    bench.add()
    bench.admit()
    bench.step(64, (1, 41, 64), (2, 42, 64))
    bench.scheduler.reset()
    assert not bench.step(64, (1, 43, 128), (2, 44, 128)).saves
    assert bench.finish() == {"tokens": 0}


def test_after_the_weights_have_changed_no_state_of_before_is_saved(bench: Bench) -> None:
    bench.add()
    bench.admit()
    bench.step(64)
    bench.scheduler.weights_changed("2")
    assert not bench.step(64, (1, 43, 128), (2, 44, 128)).saves


def test_a_client_is_told_the_largest_boundary_that_is_whole(bench: Bench) -> None:
    """Which is what `expect_tokens` of a decoding engine should ask for."""
    bench.add()
    bench.admit()
    bench.step(128, (1, 41, 128), (2, 42, 128))
    bench.step(72)
    assert bench.finish() == {"tokens": 128}


def test_a_lookup_waits_for_no_more_than_a_boundary(bench: Bench) -> None:
    """Of a prompt that ends on the grid the last boundary cannot be used."""
    bench.store(range(192), ATTENTION, *range(6))
    bench.store(range(192), STATE, 4)
    bench.add(192, expect_tokens=192, expect_timeout_ms=60_000)
    assert bench.match() == (160, True)


def test_a_lookup_does_not_wait_for_a_state_that_this_engine_could_not_use() -> None:
    """An engine with smaller blocks has a state after 160 tokens and may have none before it."""
    bench = Bench(block=2 * CHUNK)
    bench.store(range(200), STATE, 1, 4)
    bench.store(range(200), ATTENTION, *range(4))
    bench.add(expect_tokens=160, expect_timeout_ms=60_000)
    assert bench.scheduler.match("a", 0) == PENDING
    bench.lookups.wait(0.2)
    assert bench.scheduler.match("a", 0) == PENDING  # the other engine is still writing
    bench.store(range(200), ATTENTION, 4)
    assert bench.match() == (64, True)
    assert bench.lookups.close()


# Failed loads


def failing(bench: Bench) -> None:
    """A request whose load up to 192 tokens has begun; 64 is a boundary, too."""
    bench.store(range(200), ATTENTION, *range(6))
    bench.store(range(200), STATE, 1, 5)
    bench.add()
    assert bench.admit() == 192
    bench.step(0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_failed_load_an_earlier_boundary_is_loaded(bench: Bench, ranks: int) -> None:
    failing(bench)
    bench.load_fails(160, ranks)
    assert bench.admit() == 64
    [load] = bench.step(0).loads
    assert load.token_stop == 64
    bench.scheduler.load_ended("a")
    bench.step(136, (1, 41, 192), (2, 42, 192))
    assert bench.finish() == {"tokens": 192}  # what was lost is saved again
    assert bench.registry.snapshot()["kvpool_hit_tokens"] == 64
    assert bench.missed() == {"load_failed": 128, "short": 8}


def test_what_is_lost_meanwhile_is_not_loaded(bench: Bench) -> None:
    failing(bench)
    bench.drop(range(200), ATTENTION, 0)
    bench.load_fails(0)
    assert bench.admit() == 0
    assert bench.missed() == {"load_failed": 192, "short": 8}
    plan = bench.step(200, (1, 41, 192), (2, 42, 192))
    assert [save.first_chunk for save in plan.saves] == [5, 0]


def test_after_a_second_failed_load_the_prompt_is_computed(bench: Bench) -> None:
    failing(bench)
    bench.load_fails(160)
    assert bench.admit() == 64
    bench.step(0)
    bench.load_fails(32)
    assert bench.admit() == 0
    assert bench.missed() == {"load_failed": 192, "short": 8}


# Boundaries that the engine would not keep


@pytest.mark.parametrize(
    ("attention", "stored", "prefix"),
    [(4, (), 128), (4, (2,), 128), (4, (4,), 0), (0, (), 0), (5, (1,), 160)],
)
def test_a_prefix_without_a_state_is_told(
    bench: Bench, attention: int, stored: tuple[int, ...], prefix: int
) -> None:
    bench.store(range(200), ATTENTION, *range(attention))
    bench.store(range(200), STATE, *(boundary - 1 for boundary in stored))
    bench.add()
    bench.match()
    assert bench.scheduler.wanted_boundary("a") == prefix
    assert bench.scheduler.wanted_boundary("nobody") == 0


def test_a_prefix_is_told_in_whole_blocks() -> None:
    bench = Bench(block=2 * CHUNK)
    bench.store(range(200), ATTENTION, *range(5))
    bench.add()
    bench.match()
    assert bench.scheduler.wanted_boundary("a") == 128
    bench.add(request_id="b", save=False)
    bench.match(request_id="b")
    assert bench.scheduler.wanted_boundary("b") == 0  # its state would not be saved
    assert bench.lookups.close()


@pytest.mark.parametrize(
    ("attention", "stored", "own", "wanted"),
    [(1, (), 128, 128), (4, (), 96, 128), (0, (), 150, 128), (4, (4,), 128, 0), (1, (), 0, 32)],
)
def test_a_prefix_that_the_engine_itself_has_seen_is_not_forgotten(
    bench: Bench, attention: int, stored: tuple[int, ...], own: int, wanted: int
) -> None:
    """Requests with a common prefix come before its cells are in the pool."""
    bench.store(range(200), ATTENTION, *range(attention))
    bench.store(range(200), STATE, *(boundary - 1 for boundary in stored))
    bench.add()
    bench.match()
    assert bench.scheduler.wanted_boundary("a", own) == wanted


@pytest.mark.parametrize(
    ("num_tokens", "common", "stored", "wanted"),
    [
        (200, 0, (), 192),
        (192, 0, (), 160),  # a token is left to compute
        (200, 3, (), 96),  # what is in common goes first
        (200, 3, (3,), 192),
        (200, 6, (6,), 0),
        (20, 0, (), 0),
    ],
)
def test_with_blocks_smaller_than_chunks_the_last_boundary_of_the_grid_is_wanted(
    num_tokens: int, common: int, stored: tuple[int, ...], wanted: int
) -> None:
    bench = Bench(block=CHUNK // 2)
    bench.store(range(200), ATTENTION, *range(common))
    bench.store(range(200), STATE, *(boundary - 1 for boundary in stored))
    bench.add(num_tokens)
    bench.match()
    assert bench.scheduler.wanted_boundary("a") == wanted
    assert bench.lookups.close()


# States of answers


def test_the_next_state_of_an_answer_is_asked_for_while_it_is_computed() -> None:
    bench = Bench(state_stride=64)
    view = bench.add(100)
    bench.admit()
    bench.step(64)
    assert view.kept_state == 0, "the prompt's own states are the engine's choice"
    bench.step(36)
    assert view.kept_state == 128
    for token in range(28):
        view.output.append(1000 + token)
        plan = bench.step(1, *([(1, 41, 128), (2, 42, 128)] if token == 27 else []))
    assert [save.first_chunk for save in states(plan)] == [3]
    assert view.kept_state == 192
    assert bench.lookups.close()


def test_drafts_do_not_move_the_next_state_past_what_is_known() -> None:
    bench = Bench(state_stride=32)
    view = bench.add(100)
    bench.admit()
    bench.step(100)
    view.output += range(1000, 1020)
    view.num_computed_tokens = 119
    bench.step(1 + 8)  # eight drafts
    assert view.kept_state == 128
    assert bench.lookups.close()


@pytest.mark.parametrize("save", [False, True])
def test_states_of_a_request_that_is_not_saved_are_not_asked_for(save: bool) -> None:
    bench = Bench(state_stride=32)
    view = bench.add(100, save=save)
    bench.admit()
    bench.step(100)
    assert bool(view.kept_state) is save
    assert bench.lookups.close()


def test_state_of_a_step_with_drafts_is_saved_by_the_next_step() -> None:
    """vLLM copies it into its block once it has accepted drafts. Until then the block is held."""
    bench = Bench(state_stride=64)
    view = bench.add(100)
    bench.admit()
    bench.step(100)
    view.output += range(1000, 1028)
    view.num_computed_tokens = 127
    plan = bench.step(1 + 3, (1, 41, 128), (2, 42, 128), drafts=True)
    assert states(plan) == []
    assert bench.pins.references[41] == bench.pins.references[42] == 1
    assert bench.scheduler.has_pending
    view.num_computed_tokens = 129
    plan = bench.step(1 + 3, drafts=True)
    (save,) = states(plan)
    assert save.first_chunk == 3
    assert [pages.block_ids for pages in save.pages] == [(), (41,), (42,)]
    bench.gather(plan)
    assert bench.lookups.close()


def test_state_of_a_draft_is_not_saved() -> None:
    """No release offers one."""
    bench = Bench(state_stride=64)
    view = bench.add(100)
    bench.admit()
    bench.step(100)
    view.output += range(1000, 1027)
    view.num_computed_tokens = 126
    bench.step(1 + 3, (1, 41, 128), (2, 42, 128), drafts=True)
    assert states(bench.step(0)) == []
    assert bench.lookups.close()
