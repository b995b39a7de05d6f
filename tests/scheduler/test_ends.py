"""Loads that end inside a chunk, and saves of ends: what the scheduler side plans for each."""

from collections.abc import Sequence

import pytest

from tests.scheduler.conftest import Make
from tests.scheduler.scheduler_bench import CHUNK, Bench, hashes_of
from tests.support.buffers import make_buffer
from vllm_kvpool.config import KVPoolConfig, RequestOptions
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.scheduler.messages import Stored
from vllm_kvpool.scheduler.save_outcomes import EndedSave
from vllm_kvpool.scheduler.save_planner import ALIASED_END_TTL_S
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.transfer.ops import JobId, SavePlan

STEP = 8


def hold(bench: Bench, tokens: Sequence[int], *, end: bool = False) -> ChunkChain:
    """Another engine has stored the whole chunks of a prompt, or all of it, with aliases."""
    chain = ChunkChain(CHUNK, RequestIdentity())
    chain.extend(tokens)
    hashes = list(chain.hashes)
    plans = [SavePlan(JobId(1), "x", 0, tuple(hashes), ())]
    if end:
        end_hash = chain.end(tokens)
        assert end_hash is not None
        hashes.append(end_hash)
        rest = len(tokens) % CHUNK
        plans.append(SavePlan(JobId(2), "x", len(chain), (end_hash,), (), end_tokens=rest))
    buffer = make_buffer(1)
    keys = [key for each in hashes for key in bench.names.of_chunk(each)]
    bench.memory.put(keys, [buffer] * len(keys), [ChunkRef("")] * len(keys))
    assert bench.aliases is not None
    (writer,) = bench.aliases._writers
    for plan in plans:  # on this thread, so that nothing is to be waited for
        writer._perform(EndedSave(plan, Stored(1, frozenset({0})), (chain, tokens)))
    return chain


def other(shared: int, count: int) -> list[int]:
    """A prompt that begins like those of `Bench.add`, and parts from them."""
    return [*range(shared), *range(5000, 5000 + count - shared)]


@pytest.mark.parametrize(
    ("shared", "block", "loaded"),
    [(90, 16, 80), (90, 8, 88), (95, 16, 80), (71, 16, 64), (80, 16, 80), (90, 32, 64)],
)
def test_load_ends_in_whole_blocks_inside_the_chunk(
    make: Make, shared: int, block: int, loaded: int
) -> None:
    bench = make(alias_step=STEP, block=block)
    chain = hold(bench, other(shared, 128))
    bench.add(num_tokens=120)
    assert bench.admit() == (loaded, True)
    (load,) = bench.step().loads
    assert (load.token_start, load.token_stop, load.end_tokens) == (0, loaded, 0)
    own = tuple(hashes_of(range(120))[:2])
    is_inside = loaded > 64
    assert load.hashes == ((*own, chain.hashes[2]) if is_inside else own)
    assert load.is_last_other is is_inside


def test_load_begins_where_the_engine_own_cache_ends_inside_the_chunk(make: Make) -> None:
    bench = make(alias_step=STEP)
    chain = hold(bench, other(90, 128))
    bench.add(num_tokens=120)
    assert bench.match(num_computed=64 + 16) == (0, False)
    assert bench.match(num_computed=64) == (16, True)
    bench.grow("a", 64)
    bench.allocate("a", 64, 16)
    (load,) = bench.step().loads
    assert (load.first_chunk, load.hashes) == (2, (chain.hashes[2],))


def test_end_is_loaded_from_its_short_cells(make: Make) -> None:
    bench = make(alias_step=STEP)
    chain = hold(bench, range(84), end=True)
    bench.add(num_tokens=84)
    assert bench.admit() == (83, True)
    (load,) = bench.step().loads
    assert (load.hashes[-1], load.end_tokens) == (chain.end(range(84)), 20)


def test_own_chunk_is_saved_where_the_rows_of_another_were_loaded(make: Make) -> None:
    bench = make(alias_step=STEP)
    hold(bench, other(90, 128))
    bench.add(num_tokens=96)
    bench.admit()
    bench.step()
    bench.scheduler.load_ended("a")
    plan = bench.step(a=16)
    (save,) = plan.saves
    assert (save.first_chunk, save.hashes) == (2, (hashes_of(range(96))[2],))
    pages = save.pages[0]
    assert (pages.token_start, pages.token_stop) == (64, 96)


def test_failed_load_inside_a_chunk_is_asked_for_once_more_without_it(make: Make) -> None:
    bench = make(alias_step=STEP)
    hold(bench, other(90, 128))
    bench.add(num_tokens=120)
    assert bench.admit() == (80, True)
    bench.step()
    bench.load_stops("a", 64)
    assert bench.match("a", 64) == (0, False)
    bench.allocate("a", 64, 0)
    saves = [save for _ in range(2) for save in bench.step(a=28).saves]
    assert [(save.first_chunk, save.hashes[0]) for save in saves if not save.end_tokens] == [
        (2, hashes_of(range(120))[2])
    ]


def test_preempted_request_looks_anew(make: Make) -> None:
    bench = make(alias_step=STEP)
    hold(bench, other(90, 128))
    view = bench.add(num_tokens=120)
    assert bench.admit() == (80, True)
    bench.step()
    bench.scheduler.load_ended("a")
    bench.step(a=8)
    bench.tables["a"].clear()
    view.num_preemptions += 1
    view.num_computed_tokens = 0
    bench.memory.remove(bench.names.of_chunk(hashes_of(other(90, 128))[2]))
    assert bench.admit() == (64, True)
    (load,) = bench.step().loads
    assert (load.token_stop, load.is_last_other) == (64, False)


def ends_of(bench: Bench, **steps: int) -> list[SavePlan]:
    return [save for save in bench.step(**steps).saves if save.end_tokens]


@pytest.mark.parametrize(("num_tokens", "rest"), [(84, 20), (72, 8), (71, 0), (64, 0), (20, 20)])
def test_prompt_end_is_saved_once_if_an_alias_can_lead_to_it(
    make: Make, num_tokens: int, rest: int
) -> None:
    bench = make(alias_step=STEP)
    bench.add(num_tokens=num_tokens)
    bench.admit()
    ends = [*ends_of(bench, a=num_tokens), *ends_of(bench, a=1)]
    assert [save.end_tokens for save in ends] == ([rest] if rest else [])
    if ends:
        chain = ChunkChain(CHUNK, RequestIdentity())
        chain.extend(range(num_tokens))
        assert ends[0].hashes == (chain.end(range(num_tokens)),)
        until = bench.scheduler._wall_ns() + ALIASED_END_TTL_S * 1e9
        assert until - 60e9 < ends[0].retention.expires_ns <= until


@pytest.mark.parametrize(("shared", "is_saved"), [(84, False), (80, False), (79, True), (70, True)])
def test_end_is_not_saved_where_an_alias_leads_to_its_tokens(
    make: Make, shared: int, is_saved: bool
) -> None:
    bench = make(alias_step=STEP)
    hold(bench, other(shared, 128))
    bench.add(num_tokens=84)
    found, _ = bench.admit()
    assert found is not None
    bench.step()
    bench.scheduler.load_ended("a")
    assert bool(ends_of(bench, a=84 - found)) is is_saved


@pytest.mark.parametrize("is_end", [True, False])
def test_prompt_that_is_handed_over_gets_an_end_unless_that_very_end_is_stored(
    make: Make, is_end: bool
) -> None:
    """The next engine asks for the end by its own hash, and follows no alias."""
    bench = make(alias_step=STEP)
    hold(bench, range(84) if is_end else other(84, 128), end=is_end)
    bench.add(num_tokens=84, options=RequestOptions(hand_over=True))
    bench.admit()
    bench.step()
    bench.scheduler.load_ended("a")
    (state,) = bench.scheduler._requests.values()
    assert state.has_saved_end is is_end
    assert len(ends_of(bench, a=1)) == (not is_end)


@pytest.mark.parametrize(("answer", "rest"), [(5, 24), (13, 0), (20, 0), (30, 17)])
def test_answer_end_is_saved_with_the_request_s_last_save(
    make: Make, answer: int, rest: int
) -> None:
    """The last token sampled has no KV."""
    bench = make(alias_step=STEP, config=KVPoolConfig(save_decode=True))
    view = bench.add(num_tokens=84)
    bench.admit()
    assert not ends_of(bench, a=84)
    for token in range(answer):
        view.output.append(token)
        assert token == answer - 1 or not ends_of(bench, a=1)
    bench.finish()
    ends = ends_of(bench)
    assert [save.end_tokens for save in ends] == ([rest] if rest else [])


def test_without_aliases_no_end_is_saved(make: Make) -> None:
    bench = make(has_ends=True)
    bench.add(num_tokens=84)
    bench.admit()
    assert not ends_of(bench, a=84)


def test_saved_chunks_get_aliases_that_another_prompt_follows(make: Make) -> None:
    bench = make(alias_step=STEP)
    bench.add(num_tokens=96)
    bench.admit()
    plan = bench.step(a=96)
    buffer = make_buffer(1)
    keys = [
        key for save in plan.saves for each in save.hashes for key in bench.names.of_chunk(each)
    ]
    bench.memory.put(keys, [buffer] * len(keys), [ChunkRef("")] * len(keys))
    bench.stored(*plan.saves)
    bench.add("b", num_tokens=75)
    assert bench.admit("b") == (74, True)
