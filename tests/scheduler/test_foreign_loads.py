"""Loads of another connector: no KV is saved that such a load may have left unfilled."""

import logging
from collections.abc import Iterator

import pytest

from tests.scheduler.scheduler_bench import CHUNK, NOTHING, Bench
from vllm_kvpool.config import RequestOptions
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.scheduler.request import OwnKV

LOADED = 4 * CHUNK
COUNT = 6 * CHUNK


class Engine(Bench):
    """An engine beside whose pool another connector loads the first tokens of prompts."""

    def start(self, request_id: str = "a", own: int = 0, *, loaded: int = LOADED) -> None:
        """Admit a request: `own` tokens are in vLLM's cache, the others up to `loaded` are not."""
        if request_id not in self.views:
            self.add(request_id, COUNT)
        assert self.match(request_id, own) == NOTHING
        self.grow(request_id, COUNT)
        self.scheduler.allocated(request_id, (), 0)
        self.views[request_id].num_computed_tokens = loaded

    def load_failed(self, request_id: str, kept: int) -> None:
        """vLLM computes the request again from the first token that was not loaded."""
        self.views[request_id].num_computed_tokens = kept
        self.scheduler.step_ended()


def saved(plan: StepPlan) -> dict[str, range]:
    """Which chunks of which requests a plan saves."""
    return {
        each.request_id: range(each.first_chunk, each.first_chunk + len(each.hashes))
        for each in plan.saves
    }


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


@pytest.mark.parametrize("fails", [False, True])
def test_request_whose_load_is_within_a_step_is_never_saved(engine: Engine, fails: bool) -> None:
    engine.start()
    assert not saved(engine.step(a=CHUNK))
    if fails:
        engine.load_failed("a", CHUNK)
    for tokens in (CHUNK, 3 * CHUNK, 1):
        assert not saved(engine.step(a=tokens))
    engine.finish()
    assert not saved(engine.step())
    assert not engine.scheduler.saves.has_pending


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("when", ["the same step", "the next step", "a later step"])
def test_request_that_begins_in_the_own_cache_after_a_load_within_a_step_is_not_saved(
    engine: Engine, when: str, saves: bool
) -> None:
    """Whether or not the request that loads is one that is saved."""
    engine.add("a", COUNT, RequestOptions(load=False, save=saves))
    engine.start()
    if when == "the same step":
        engine.start("b", CHUNK, loaded=CHUNK)
        assert not saved(engine.step(a=CHUNK, b=CHUNK))
    else:
        assert not saved(engine.step(a=CHUNK))
        if when == "a later step":
            engine.load_failed("a", CHUNK)
            engine.finish()
            engine.step()
        engine.start("b", CHUNK, loaded=CHUNK)
        assert not saved(engine.step(b=CHUNK))
    assert not saved(engine.step(b=4 * CHUNK))
    engine.finish("b")
    assert not saved(engine.step())


def test_request_that_waits_beside_a_load_within_a_step_is_not_saved(engine: Engine) -> None:
    """The blocks that it has found may be those of the load."""
    engine.start()
    engine.start("b", 2 * CHUNK, loaded=3 * CHUNK)
    engine.step(a=CHUNK)
    engine.scheduler.allocated("b", (), 0)
    assert not saved(engine.step(b=3 * CHUNK))
    engine.finish("b")
    assert not saved(engine.step())


def test_request_that_shares_no_blocks_is_saved_beside_a_load_within_a_step(
    engine: Engine,
) -> None:
    engine.start()
    engine.start("b", loaded=0)
    assert saved(engine.step(a=CHUNK, b=COUNT)) == {"b": range(6)}
    engine.start("c", loaded=0)
    assert saved(engine.step(c=COUNT)) == {"c": range(6)}


def test_reset_of_the_own_cache_after_a_load_within_a_step_lets_its_hits_be_saved(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for request_id in ("a", "b"):
            engine.start(request_id)
            engine.step(**{request_id: CHUNK})
            engine.finish(request_id)
    assert caplog.text.count("until reset_prefix_cache") == 1
    engine.scheduler.own_cache_was_reset()
    engine.start("c", CHUNK, loaded=CHUNK)
    assert saved(engine.step(c=5 * CHUNK)) == {"c": range(6)}


@pytest.mark.parametrize("own", [0, LOADED])
def test_preempted_request_whose_load_was_within_a_step_is_saved_if_computed_anew(
    engine: Engine, own: int
) -> None:
    engine.start()
    engine.step(a=CHUNK)
    engine.views["a"].num_computed_tokens = 0
    engine.preempted = ["a"]
    engine.step()
    engine.preempted = []
    engine.start("a", own, loaded=own)
    assert saved(engine.step(a=COUNT - own)) == ({} if own else {"a": range(6)})


def test_request_that_has_waited_for_its_load_is_saved_at_once(engine: Engine) -> None:
    """vLLM has lowered its count before, if the load failed; nobody has seen its blocks."""
    engine.start()
    engine.step()
    engine.views["a"].num_computed_tokens = 3 * CHUNK
    engine.scheduler.allocated("a", (), 0)  # as vLLM does once the load has ended
    assert saved(engine.step(a=2 * CHUNK)) == {"a": range(5)}
    engine.start("b", CHUNK, loaded=CHUNK)
    assert saved(engine.step(b=CHUNK)) == {"b": range(2)}


def test_request_that_ends_while_it_waits_for_its_load_is_not_saved(engine: Engine) -> None:
    """vLLM counts its tokens as computed from the start."""
    engine.start()
    engine.step()
    engine.finish()
    assert not saved(engine.step())
    assert not engine.scheduler.saves.has_pending


def test_request_that_loads_within_a_step_after_it_has_waited_in_vain_is_not_saved(
    engine: Engine,
) -> None:
    """vLLM matches a request anew of whose load nothing came."""
    engine.start()
    engine.step()
    engine.views["a"].num_computed_tokens = 0
    engine.start()
    assert not saved(engine.step(a=2 * CHUNK))


def test_load_of_blocks_whose_names_are_not_trusted_is_not_saved(engine: Engine) -> None:
    """Another connector may know blocks by vLLM's hashes, as offloading does, and these by less
    than the pool.
    """
    for request_id, own in (("a", OwnKV()), ("b", OwnKV(blocks=False)), ("c", OwnKV(blocks=False))):
        engine.add(request_id, COUNT).own = own
        engine.start(request_id, loaded=LOADED if request_id != "c" else 0)
    assert saved(engine.step(c=COUNT)) == {"c": range(6)}
    for request_id in ("a", "b"):
        engine.scheduler.allocated(request_id, (), 0)
    assert saved(engine.step(a=2 * CHUNK, b=2 * CHUNK)) == {"a": range(6)}


def test_without_loads_of_another_connector_hits_of_the_own_cache_are_saved(
    engine: Engine,
) -> None:
    engine.start("a", loaded=0)
    assert saved(engine.step(a=COUNT)) == {"a": range(6)}
    engine.start("b", LOADED)
    assert saved(engine.step(b=CHUNK)) == {"b": range(5)}


def test_request_that_the_pool_has_loaded_for_is_saved(engine: Engine) -> None:
    engine.hold(range(COUNT), range(3))
    engine.add("a", COUNT)
    assert engine.match("a", CHUNK) == (2 * CHUNK, True)
    engine.allocate("a", CHUNK, 2 * CHUNK)
    engine.step()
    engine.scheduler.load_ended("a")
    engine.scheduler.allocated("a", (), 0)
    assert saved(engine.step(a=3 * CHUNK)) == {"a": range(3, 6)}
