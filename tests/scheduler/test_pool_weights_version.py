"""Weights that change while requests run: the cells that are found, loaded and saved.

The empty string names the epoch of the weights that an engine starts with. Everything runs over a
real lookup service and a memory store. `Engine` further down computes tags in place of KV, so it
knows the weights behind each cell.
"""

import logging
from collections.abc import Sequence

import pytest

import tests.support.memory_store  # noqa: F401  (its scheme)
from tests.scheduler.conftest import Make
from tests.scheduler.scheduler_bench import (
    LIMIT_S,
    NAMES,
    NOTHING,
    PENDING,
    Bench,
    hashes_of,
    put_cells,
)
from tests.scheduler.scripts import Example, examples
from tests.support.fakes import FakePins
from tests.support.faults import Fault
from tests.support.invariants import check
from vllm_kvpool.config import KVPoolConfig, KVRole, read_config
from vllm_kvpool.identity.keys import with_weights
from vllm_kvpool.layout.engine_shape import ModelShape
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.scheduler.messages import StepReport
from vllm_kvpool.scheduler.scheduler_part import SchedulerPart
from vllm_kvpool.transfer.ops import HostCacheChange, SavePlan

FIRST, NEW, NEWER = "", "sample:b", "drawn:c"


def hold(
    bench: Bench, chunks: range, weights_version: str, tokens: Sequence[int] = range(1000)
) -> None:
    """Store the cells of these chunks under that epoch."""
    names = NAMES.with_weights(weights_version)
    for chunk in chunks:
        put_cells(bench.memory, names.of_chunk(hashes_of(tokens)[chunk]))


def what(saves: Sequence[SavePlan]) -> list[tuple[str, range, str]]:
    """Return (request, chunks, epoch) of each save."""
    return [
        (s.request_id, range(s.first_chunk, s.first_chunk + len(s.hashes)), s.weights_version)
        for s in saves
    ]


def begin(bench: Bench, weights_version: str, *, is_reset: bool = True) -> None:
    """Change the weights. With `is_reset`, empty the engine's own cache, as vLLM asks for."""
    bench.scheduler.weights_changed(weights_version)
    check(bench.scheduler)
    if is_reset:
        bench.scheduler.own_cache_was_reset()


# What is found


@examples(
    """
nothing of before is found until it returns
    engine; stored 3 first; stored 1 drawn:c; weights first; add 0; match 0 -> 96
    weights sample:b; add 1; match 1 -> nothing; weights drawn:c; add 2; match 2 -> 32
    weights first; add 3; match 3 -> 96; weights sample:b; add 4; match 4 -> nothing
a lookup under way is asked again
    engine; stored 3 first; stored 1 sample:b; block exists a; weights sample:b
    poll a -> pending; release; match a -> 32; allocate a 0 32; step -> load a 0-32 as sample:b
what the new weights have is loaded and the rest saved
    engine; stored 3 first; stored 2 sample:b; add a; match a -> 96; weights sample:b
    admit a -> 64; step -> load a 0-64 as sample:b; loaded a
    step a=36 -> save a 2-3 as sample:b
a prefetch says of which weights
    engine host_tier=True; stored 3 first; stored 2 sample:b; weights sample:b; add a
    settle -> prefetch a 2 as sample:b
"""
)
def test_what_is_found(example: Example) -> None:
    example.play().close()


@pytest.mark.parametrize("is_taken", [False, True], ids=["answer waits", "answer taken"])
def test_a_prefetch_of_before_is_dropped(make: Make, is_taken: bool) -> None:
    bench = make(host_tier=True)
    hold(bench, range(3), FIRST)
    bench.add()
    bench.take_answers() if is_taken else bench.lookups.wait(LIMIT_S)
    begin(bench, NEW)
    assert bench.step().prefetches == ()


def test_what_ranks_have_of_one_epoch_is_not_found_in_another(make: Make) -> None:
    bench = make(host_tier=True, num_ranks=2)
    first, new = (
        tuple(
            NAMES.with_weights(weights_version).chunk_id(chunk_hash)
            for chunk_hash in hashes_of(range(96))
        )
        for weights_version in (FIRST, NEW)
    )
    assert not set(first) & set(new)
    for rank in (0, 1):
        bench.scheduler.apply(StepReport(host={rank: HostCacheChange(first, ())}))
    # One rank has told of the new epoch, and one of the old: nobody has all of it.
    begin(bench, NEW)
    bench.scheduler.apply(StepReport(host={0: HostCacheChange(new, ())}))
    bench.add("a")
    assert bench.match("a") == NOTHING
    bench.scheduler.apply(StepReport(host={1: HostCacheChange(new[:2], ())}))
    bench.add("b")
    assert bench.match("b") == (64, True)
    for rank in (0, 1):
        bench.scheduler.apply(StepReport(host={rank: HostCacheChange((), first)}))
    bench.add("c")
    assert bench.match("c") == (64, True)


def test_a_store_that_hangs_across_the_change_tells_nothing_of_before(bench: Bench) -> None:
    """Cells of the first epoch do not count as stored in the new epoch."""
    hold(bench, range(3), FIRST)
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add()
    assert bench.store.entered.wait(LIMIT_S)
    begin(bench, NEW)
    assert bench.scheduler.match("a", 0) == PENDING
    bench.clock.advance(10)
    assert bench.scheduler.match("a", 0) == NOTHING
    bench.allocate("a", 0, 0)
    bench.store.release()
    bench.take_answers()
    saves = bench.step(a=100).saves
    assert what(saves) in ([], [("a", range(3), NEW)])
    assert bench.counts("kvpool_lookups")["{outcome=timed_out}"] == 1
    bench.finish()
    assert what([*saves, *bench.step().saves]) == [("a", range(3), NEW)]


# Saves, and the epoch in their names


@examples(
    """
a request that runs across the change is not saved
    engine; add a 200; admit a; step a=70 -> save a 0-2; weights sample:b
    step a=40 -> nothing; step a=40 -> nothing; step a=40 -> nothing
    finish a -> 0 tokens; step -> nothing; gather; pins 0; pending False
a request that waits is saved as of the new epoch
    engine; stored 3 first; add a; answers; weights sample:b; admit a -> nothing
    step a=100 -> only save a 0-3 as sample:b
a load across the change that brings nothing leaves a new request
    engine; stored 2 first; add a; admit a; step; weights sample:b; load_stops a 0; free a
    admit a -> nothing; step a=100 -> save a 0-3 as sample:b
a preempted request is asked and saved anew
    engine; stored 1 sample:b; add a; admit a; step a=70; gather; weights sample:b
    step a=10 -> nothing; preempt a; admit a -> 32; step -> load a 0-32 as sample:b; loaded a
    step a=68 -> save a 1-3 as sample:b
a request preempted before the change is asked and saved anew
    engine; add a; admit a; step a=70; gather; stored 2 first; preempt a; weights sample:b
    admit a -> nothing; step a=100 -> only save a 0-3 as sample:b
"""
)
def test_what_is_saved_and_as_what(example: Example) -> None:
    example.play().close()


@pytest.mark.parametrize("save_decode", [False, True])
def test_an_answer_that_comes_while_it_runs_does_not_save_it(make: Make, save_decode: bool) -> None:
    """The lookup timed out, then the weights changed, then the hashes came."""
    bench = make(config=KVPoolConfig(save_decode=save_decode))
    bench.store.inject(Fault.BLOCKED, "exists")
    view = bench.add()
    assert bench.store.entered.wait(LIMIT_S)
    bench.clock.advance(1)
    assert bench.scheduler.match("a", 0) == NOTHING
    bench.allocate("a", 0, 0)
    bench.step(a=40)
    begin(bench, NEW)
    bench.store.release()
    bench.settle()
    assert bench.step(a=60).saves == ()
    view.output += range(60)
    assert bench.step(a=50).saves == ()
    bench.finish()
    assert bench.step().saves == ()


# The engine's own cache


@examples(
    """
old blocks of the engine are not saved as new
    # Until its own cache has been emptied, what it has found there may be of other weights.
    engine; weights sample:b is_reset=False; add a; match a 32 -> nothing; allocate a 32 0
    add b; match b -> nothing; allocate b 0 0; step a=68 b=100 -> save b 0-3 as sample:b
    own_cache_reset; add c; match c 32; allocate c 32 0; step c=68 -> save c 0-3 as sample:b
    finish a -> 0 tokens; step -> nothing
a request that saw old blocks and waits on is saved after the reset
    engine; weights sample:b is_reset=False; add a; match a 32 -> nothing; own_cache_reset
    admit a -> nothing; step a=100 -> only save a 0-3 as sample:b
"""
)
def test_the_engine_s_own_cache(example: Example) -> None:
    example.play().close()


# Embeddings of media, which the engine keeps when its weights change


@examples(
    """
nothing is saved that may be of embeddings of before
    engine; compute first has_media=True -> save first 0-3; weights sample:b
    compute media has_media=True -> nothing; compute text -> save text 0-3 as sample:b
    weights drawn:c; compute later has_media=True -> nothing; encoder_cache_reset
    own_cache_reset; compute again has_media=True -> save again 0-3 as drawn:c
an engine that has encoded nothing has nothing of before
    # vLLM empties its encoder cache when it pauses.
    engine; compute text; weights sample:b
    compute media has_media=True -> save media 0-3 as sample:b; encoder_cache_reset
    weights drawn:c; compute again has_media=True -> save again 0-3 as drawn:c
media that are not shared are encoded all the same
    engine; compute other has_media=True shareable=False; weights sample:b
    compute media has_media=True -> nothing
blocks of embeddings of before outlive them
    # The engine's own prefix cache has them until it is reset, too.
    engine; compute first has_media=True; weights sample:b; compute media has_media=True
    encoder_cache_reset; compute again 32 has_media=True -> nothing; own_cache_reset
    compute more has_media=True -> save more 0-3 as sample:b
blocks of embeddings of before end with the engine's own prefix cache
    engine; compute first has_media=True; weights sample:b; compute media has_media=True
    own_cache_reset; encoder_cache_reset
    compute again 32 has_media=True -> save again 0-3 as sample:b; own_cache_reset
    compute more has_media=True -> save more 0-3 as sample:b
"""
)
def test_embeddings_of_media_which_the_engine_keeps_when_its_weights_change(
    example: Example,
) -> None:
    example.play().close()


# Resets


@examples(
    """
a reset after a change removes what is of the new weights alone
    engine; stored 3 first; stored 3 sample:b; stored 3 drawn:c; weights sample:b; reset
    end_reset; in_store 3 first; in_store 0 sample:b; in_store 3 drawn:c; weights first; reset
    end_reset; in_store 0 first; in_store 0 sample:b; in_store 3 drawn:c
a reset that ends after a change removes what it was for
    # A put was under way when the reset began; another engine has stored what is of new weights.
    engine; stored 3 first; reset; stored 1 first; weights sample:b; stored 3 sample:b
    end_reset; in_store 0 first; in_store 3 sample:b
two resets around a change remove both
    # Puts that were under way have stored what is there when the resets end.
    engine; reset; weights sample:b; reset; stored 2 first; stored 2 sample:b; stored 2 drawn:c
    end_reset; in_store 0 first; in_store 0 sample:b; in_store 2 drawn:c; add a
    match a -> nothing; allocate a 0 0; step a=100 -> save a 0-3 as sample:b
nothing is found or saved while a reset runs across a change
    engine; stored 3 sample:b; reset; weights sample:b; add a; match a -> nothing; allocate a 0 0
    step a=50 -> no save
"""
)
def test_resets(example: Example) -> None:
    example.play().close()


def test_a_reset_that_fails_across_a_change_ends_all_the_same(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL, "vllm_kvpool.scheduler"):
        bench.store.inject(Fault.ERROR, "remove_namespace", times=3)
        assert not bench.scheduler.reset()
        begin(bench, NEW)
        assert not bench.scheduler.reset()
        bench.end_reset()
    assert not bench.scheduler._validity.reset.pending


@pytest.mark.parametrize("first_weights_version", [NEW, ""])
def test_the_epoch_that_an_engine_starts_with_is_the_first(first_weights_version: str) -> None:
    """Cells of this epoch have no version in their names: engines saved before they heard any."""
    topology = Topology(1, 1, ((0, 1),), 1)
    shape = ModelShape(NAMES.namespace, (LayerGroup(topology, 16),), (KVCacheGroup(16),), 100, 1)
    config = read_config({"store": "memory://epochs"}, env={})
    part = SchedulerPart(
        config, KVRole.BOTH, shape, FakePins(), first_weights_version=first_weights_version
    )
    heard = []
    for weights_version in (NEW, NEWER, NEW):
        part.weights_changed(weights_version)
        heard.append(part.scheduler.weights_version)
        infos = part.registry.samples()["kvpool_info"]
        own = with_weights(NAMES.namespace, part.scheduler.weights_version)
        assert [name for name, shown in infos.items() if shown] == [(own, str(config.chunk_tokens))]
    part.close()
    assert heard == ([FIRST, NEWER, FIRST] if first_weights_version else [NEW, NEWER, NEW])
