"""Weights that change while requests run: what is found, loaded and saved, and as what.

"" is the epoch of the weights that an engine starts with. Everything runs over a real lookup
service and a memory store; `Engine` further down computes tags in place of KV and so knows what a
cell is of.
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
)
from tests.support.buffers import make_buffer
from tests.support.fakes import FakePins
from tests.support.faults import Fault
from tests.support.invariants import check
from vllm_kvpool.config import KVPoolConfig, KVRole, read_config
from vllm_kvpool.identity.keys import with_weights
from vllm_kvpool.layout.engine_shape import ModelShape
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.scheduler.messages import StepReport
from vllm_kvpool.scheduler.scheduler_part import SchedulerPart
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.transfer.ops import HostCacheChange, SavePlan

FIRST, NEW, NEWER = "", "sample:b", "drawn:c"


def hold(
    bench: Bench, chunks: range, weights_version: str, tokens: Sequence[int] = range(1000)
) -> None:
    """The cells of those chunks are in the store, of that epoch."""
    names, buffer = NAMES.with_weights(weights_version), make_buffer(1)
    for chunk in chunks:
        keys = names.of_chunk(hashes_of(tokens)[chunk])
        bench.memory.put(keys, [buffer] * len(keys), [ChunkRef("")] * len(keys))


def num_cells(bench: Bench, weights_version: str) -> int:
    start = f"{NAMES.with_weights(weights_version).namespace}@"
    return sum(key.startswith(start) for key in bench.memory._table.list_keys())


def what(saves: Sequence[SavePlan]) -> list[tuple[str, range, str]]:
    """Of each: the request, its chunks, the epoch."""
    return [
        (s.request_id, range(s.first_chunk, s.first_chunk + len(s.hashes)), s.weights_version)
        for s in saves
    ]


def begin(bench: Bench, weights_version: str, *, is_reset: bool = True) -> None:
    """The weights change; `is_reset`: then the engine's own cache is emptied, as vLLM asks for."""
    bench.scheduler.weights_changed(weights_version)
    check(bench.scheduler)
    if is_reset:
        bench.scheduler.own_cache_was_reset()


# What is found


def test_nothing_of_before_is_found_until_it_returns(bench: Bench) -> None:
    hold(bench, range(3), FIRST)
    hold(bench, range(1), NEWER)
    for number, (weights_version, offer) in enumerate(
        [
            (FIRST, (96, True)),
            (NEW, NOTHING),
            (NEWER, (32, True)),
            (FIRST, (96, True)),
            (NEW, NOTHING),
        ]
    ):
        begin(bench, weights_version)
        bench.add(str(number))
        assert bench.match(str(number)) == offer


def test_a_lookup_under_way_is_asked_again(bench: Bench) -> None:
    hold(bench, range(3), FIRST)
    hold(bench, range(1), NEW)
    bench.store.inject(Fault.BLOCKED, "exists")
    bench.add()
    assert bench.store.entered.wait(LIMIT_S)
    begin(bench, NEW)
    assert bench.scheduler.match("a", 0) == PENDING
    bench.store.release()
    assert bench.match() == (32, True)
    bench.allocate("a", 0, 32)
    [load] = bench.step().loads
    assert (load.weights_version, len(load.hashes)) == (NEW, 1)


def test_what_the_new_epoch_has_is_loaded_and_the_rest_saved(bench: Bench) -> None:
    hold(bench, range(3), FIRST)
    hold(bench, range(2), NEW)
    bench.add()
    assert bench.match() == (96, True)
    begin(bench, NEW)
    assert bench.admit() == (64, True)
    [load] = bench.step().loads
    assert load.weights_version == NEW
    bench.scheduler.load_ended("a")
    assert what(bench.step(a=36).saves) == [("a", range(2, 3), NEW)]


@pytest.mark.parametrize("is_taken", [False, True], ids=["answer waits", "answer taken"])
def test_a_prefetch_of_before_is_dropped(make: Make, is_taken: bool) -> None:
    bench = make(host_tier=True)
    hold(bench, range(3), FIRST)
    bench.add()
    bench.take_answers() if is_taken else bench.lookups.wait(LIMIT_S)
    begin(bench, NEW)
    assert bench.step().prefetches == ()


def test_a_prefetch_says_of_which_epoch(make: Make) -> None:
    bench = make(host_tier=True)
    hold(bench, range(3), FIRST)
    hold(bench, range(2), NEW)
    begin(bench, NEW)
    bench.add()
    [prefetch] = bench.settle().prefetches
    assert (prefetch.weights_version, len(prefetch.hashes)) == (NEW, 2)


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
    """What the first epoch has stored is not taken for stored in the new one."""
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


# What is saved, and as what


def test_a_request_that_runs_across_the_change_is_not_saved(bench: Bench) -> None:
    bench.add(num_tokens=200)
    bench.admit()
    before = bench.step(a=70)
    assert what(before.saves) == [("a", range(2), FIRST)]
    begin(bench, NEW)
    for _ in range(3):
        assert bench.step(a=40).saves == ()
    assert bench.finish() == {"kvpool": {"tokens": 0}}
    assert bench.step().saves == ()
    bench.gather(before)
    assert bench.pins.references == {}
    assert not bench.scheduler.saves.has_pending


def test_a_request_that_waits_is_saved_as_of_the_new_epoch(bench: Bench) -> None:
    hold(bench, range(3), FIRST)  # which says nothing of the new one
    bench.add()
    bench.take_answers()
    begin(bench, NEW)
    assert bench.admit() == NOTHING
    assert what(bench.step(a=100).saves) == [("a", range(3), NEW)]


def test_a_load_across_the_change_that_brings_nothing_leaves_a_new_request(bench: Bench) -> None:
    hold(bench, range(2), FIRST)
    bench.add()
    bench.admit()
    bench.step()
    begin(bench, NEW)
    bench.load_stops("a", 0)
    bench.tables["a"] = []
    assert bench.admit() == NOTHING
    assert what(bench.step(a=100).saves) == [("a", range(3), NEW)]


def test_a_preempted_request_is_asked_and_saved_anew(bench: Bench) -> None:
    hold(bench, range(1), NEW)
    view = bench.add()
    bench.admit()
    bench.gather(bench.step(a=70))
    begin(bench, NEW)
    assert bench.step(a=10).saves == ()
    view.preempt()
    bench.tables["a"] = []
    assert bench.admit() == (32, True)
    assert [load.weights_version for load in bench.step().loads] == [NEW]
    bench.scheduler.load_ended("a")
    assert what(bench.step(a=68).saves) == [("a", range(1, 3), NEW)]


def test_a_request_preempted_before_the_change_is_asked_and_saved_anew(bench: Bench) -> None:
    view = bench.add()
    bench.admit()
    bench.gather(bench.step(a=70))
    hold(bench, range(2), FIRST)
    view.preempt()
    bench.tables["a"] = []
    begin(bench, NEW)
    assert bench.admit() == NOTHING
    assert what(bench.step(a=100).saves) == [("a", range(3), NEW)]


@pytest.mark.parametrize("save_decode", [False, True])
def test_an_answer_that_comes_while_it_runs_does_not_save_it(make: Make, save_decode: bool) -> None:
    """The lookup was too late; then the weights changed; then its hashes came."""
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


def test_old_blocks_of_the_engine_are_not_saved_as_new(bench: Bench) -> None:
    """Until its own cache has been emptied, what it has found there may be of other weights."""
    begin(bench, NEW, is_reset=False)
    for name, local in (("a", 32), ("b", 0)):
        bench.add(name)
        assert bench.match(name, local) == NOTHING
        bench.allocate(name, local, 0)
    assert what(bench.step(a=68, b=100).saves) == [("b", range(3), NEW)]
    bench.scheduler.own_cache_was_reset()
    bench.add("c")
    bench.match("c", 32)
    bench.allocate("c", 32, 0)
    assert what(bench.step(c=68).saves) == [("c", range(3), NEW)]
    assert bench.finish("a") == {"kvpool": {"tokens": 0}}
    assert bench.step().saves == ()


def test_a_request_that_saw_old_blocks_and_waits_on_is_saved_after_the_reset(
    bench: Bench,
) -> None:
    begin(bench, NEW, is_reset=False)
    bench.add()
    assert bench.match("a", 32) == NOTHING  # and there was no room for it
    bench.scheduler.own_cache_was_reset()
    assert bench.admit() == NOTHING
    assert what(bench.step(a=100).saves) == [("a", range(3), NEW)]


# Embeddings of media, which the engine keeps when its weights change


def computed(bench: Bench, request_id: str, num_computed: int = 0, **traits: bool) -> list[range]:
    """The chunks that are saved of a request that runs from there on."""
    bench.add(request_id, **traits)
    bench.match(request_id, num_computed)
    bench.allocate(request_id, num_computed, 0)
    plan = bench.step(**{request_id: 100 - num_computed})
    bench.gather(plan)
    bench.finish(request_id)
    return [chunks for _, chunks, _ in what(plan.saves)]


def test_nothing_is_saved_that_may_be_of_embeddings_of_before(bench: Bench) -> None:
    assert computed(bench, "first", has_media=True) == [range(3)]
    begin(bench, NEW)
    assert computed(bench, "media", has_media=True) == []
    assert computed(bench, "text") == [range(3)]
    begin(bench, NEWER)
    assert computed(bench, "later", has_media=True) == []
    bench.scheduler.encoder_cache_was_reset()
    bench.scheduler.own_cache_was_reset()
    assert computed(bench, "again", has_media=True) == [range(3)]


def test_an_engine_that_has_encoded_nothing_has_nothing_of_before(bench: Bench) -> None:
    computed(bench, "text")
    begin(bench, NEW)
    assert computed(bench, "media", has_media=True) == [range(3)]
    bench.scheduler.encoder_cache_was_reset()  # as vLLM does when it pauses
    begin(bench, NEWER)
    assert computed(bench, "again", has_media=True) == [range(3)]


def test_media_that_are_not_shared_are_encoded_all_the_same(bench: Bench) -> None:
    computed(bench, "other", has_media=True, shareable=False)
    begin(bench, NEW)
    assert computed(bench, "media", has_media=True) == []


@pytest.mark.parametrize("is_emptied", [False, True], ids=["kept", "emptied"])
def test_blocks_of_embeddings_of_before_outlive_them(bench: Bench, is_emptied: bool) -> None:
    """The engine's own prefix cache has them until it is reset, too."""
    computed(bench, "first", has_media=True)
    begin(bench, NEW)
    computed(bench, "media", has_media=True)
    if is_emptied:
        bench.scheduler.own_cache_was_reset()
    bench.scheduler.encoder_cache_was_reset()
    found = computed(bench, "again", 32, has_media=True)
    assert found == ([range(3)] if is_emptied else [])
    bench.scheduler.own_cache_was_reset()
    assert computed(bench, "once more", has_media=True) == [range(3)]


# Resets


def test_a_reset_after_a_change_removes_the_new_epoch_alone(bench: Bench) -> None:
    for weights_version in (FIRST, NEW, NEWER):
        hold(bench, range(3), weights_version)
    begin(bench, NEW)
    assert bench.scheduler.reset()
    bench.end_reset()
    assert [num_cells(bench, weights_version) for weights_version in (FIRST, NEW, NEWER)] == [
        3,
        0,
        3,
    ]
    begin(bench, FIRST)
    assert bench.scheduler.reset()
    bench.end_reset()
    assert [num_cells(bench, weights_version) for weights_version in (FIRST, NEW, NEWER)] == [
        0,
        0,
        3,
    ]


def test_a_reset_that_ends_after_a_change_removes_what_it_was_for(bench: Bench) -> None:
    """What was put while it ran is of the old epoch; the new one's cells are not its business."""
    hold(bench, range(3), FIRST)
    assert bench.scheduler.reset()
    hold(bench, range(1), FIRST)  # a put that was under way
    begin(bench, NEW)
    hold(bench, range(3), NEW)  # of another engine
    bench.end_reset()
    assert [num_cells(bench, weights_version) for weights_version in (FIRST, NEW)] == [0, 3]


def test_two_resets_around_a_change_remove_both(bench: Bench) -> None:
    assert bench.scheduler.reset()
    begin(bench, NEW)
    assert bench.scheduler.reset()
    for weights_version in (FIRST, NEW, NEWER):
        hold(bench, range(2), weights_version)  # puts that were under way
    bench.end_reset()
    assert [num_cells(bench, weights_version) for weights_version in (FIRST, NEW, NEWER)] == [
        0,
        0,
        2,
    ]
    bench.add()
    assert bench.match() == NOTHING
    bench.allocate("a", 0, 0)
    assert what(bench.step(a=100).saves) == [("a", range(3), NEW)]


def test_nothing_is_found_or_saved_while_a_reset_runs_across_a_change(bench: Bench) -> None:
    hold(bench, range(3), NEW)
    assert bench.scheduler.reset()
    begin(bench, NEW)
    bench.add()
    assert bench.match() == NOTHING
    bench.allocate("a", 0, 0)
    assert bench.step(a=50).saves == ()


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
    """Whatever it is called: other engines have saved under it without having heard a name."""
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
