"""Loads of another connector: nothing is saved of them before they are known to be whole."""

from collections.abc import Collection, Iterator
from itertools import permutations

import pytest

from tests.scheduler.test_pool_scheduler import CHUNK, NOTHING, Bench
from vllm_kvpool.config import KVPoolConfig, RequestOptions
from vllm_kvpool.scheduler.loads import ForeignLoads
from vllm_kvpool.scheduler.messages import StepPlan, StepReport
from vllm_kvpool.scheduler.request import OwnKV

BLOCK = 16
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

    def share(self, request_id: str, num_blocks: int) -> None:
        """The request's first blocks are those of request "a", from vLLM's prefix cache."""
        self.add(request_id, COUNT)
        self.tables[request_id] = self.tables["a"][:num_blocks]

    def end(self, plan: StepPlan, invalid: Collection[int] = ()) -> None:
        """The ranks have reported a step; vLLM has lowered the counts of requests by then."""
        assert plan.confirm
        report = StepReport.merge([StepReport(), StepReport(ended=plan.confirm)])
        self.scheduler.step_ended(report.ended, set(invalid))
        self.scheduler.check()

    def saved(self, plan: StepPlan) -> list[tuple[str, range]]:
        """Which chunks of which requests a plan saves."""
        for save in plan.saves:
            first = save.first_chunk
            assert save.pages[0].block_ids == tuple(
                self.tables[save.request_id][first * 2 : (first + len(save.hashes)) * 2]
            )
        return [
            (each.request_id, range(each.first_chunk, each.first_chunk + len(each.hashes)))
            for each in plan.saves
        ]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    assert made.lookups.close()


def test_what_was_loaded_is_saved_after_the_step_that_loaded_it(engine: Engine) -> None:
    engine.start()
    plan = engine.step(a=2 * CHUNK)
    assert engine.saved(plan) == []
    engine.end(plan)
    plan = engine.step(a=1)
    assert engine.saved(plan) == [("a", range(6))]
    assert plan.confirm == 0


def test_steps_that_are_planned_meanwhile_save_nothing_of_it(engine: Engine) -> None:
    """With asynchronous scheduling vLLM plans a step before the one before has ended."""
    engine.start()
    first = engine.step(a=CHUNK)
    second = engine.step(a=CHUNK)
    assert engine.saved(first) == engine.saved(second) == []
    engine.scheduler.step_ended()  # of a step before these
    third = engine.step(a=1)
    assert engine.saved(third) == []
    engine.end(first)
    assert engine.saved(engine.step(a=1)) == [("a", range(6))]


@pytest.mark.parametrize("is_late", [False, True])
def test_what_failed_to_load_is_saved_once_it_is_computed(engine: Engine, is_late: bool) -> None:
    engine.start()
    plan = engine.step(a=CHUNK)
    if is_late:
        assert engine.saved(engine.step(a=CHUNK)) == []
    table = engine.tables["a"]
    engine.views["a"].num_computed_tokens = CHUNK
    engine.end(plan, [table[2], table[5]])
    # No other request may find blocks that are lost, or that were computed from them.
    assert sorted(engine.pins.forgotten) == table[2:]
    assert engine.saved(engine.step(a=CHUNK)) == [("a", range(2))]
    assert engine.saved(engine.step(a=4 * CHUNK)) == [("a", range(2, 6))]


def test_what_another_connector_may_take_for_the_requests_is_not_saved(engine: Engine) -> None:
    """It may know blocks by vLLM's hashes, as offloading does, and these by less than the pool."""
    for request_id, own in (("a", OwnKV()), ("b", OwnKV(blocks=False)), ("c", OwnKV(blocks=False))):
        engine.add(request_id, COUNT).own = own
        engine.start(request_id, loaded=LOADED if request_id != "c" else 0)
    plan = engine.step(a=2 * CHUNK, b=2 * CHUNK, c=COUNT)
    assert [name for name, _ in engine.saved(plan)] == ["c"]
    engine.end(plan)
    assert [name for name, _ in engine.saved(engine.step(a=1, b=1, c=1))] == ["a"]


def test_what_a_runner_computes_without_a_step_back_is_not_saved() -> None:
    """vLLM's second model runner goes on at wrong positions after a load that failed."""
    engine = Engine(takes_steps_back=False)
    engine.start()
    engine.start("b")
    plan = engine.step(a=CHUNK, b=CHUNK)
    engine.views["a"].num_computed_tokens = CHUNK
    engine.end(plan, [engine.tables["a"][2]])
    assert [name for name, _ in engine.saved(engine.step(a=CHUNK, b=1))] == ["b"]
    for tokens in (4 * CHUNK, 1):
        assert engine.saved(engine.step(a=tokens)) == []
    engine.finish("a")
    assert engine.saved(engine.step(b=1)) == []
    assert set(engine.tables["a"][2:]) <= set(engine.pins.forgotten)
    assert engine.lookups.close()


def test_who_shares_the_blocks_is_not_saved_if_another_computes_them_again(
    engine: Engine,
) -> None:
    engine.start()
    engine.share("b", 6)
    engine.start("b", 3 * CHUNK, loaded=3 * CHUNK)
    engine.share("c", 2)
    engine.start("c", CHUNK, loaded=CHUNK)
    plan = engine.step(a=CHUNK, b=2 * CHUNK, c=2 * CHUNK)
    assert engine.saved(plan) == []
    table = engine.tables["a"]
    engine.views["a"].num_computed_tokens = CHUNK
    engine.views["b"].num_computed_tokens = 3 * CHUNK
    engine.end(plan, [table[2]])
    assert set(engine.pins.forgotten) == {*table[2:], *engine.tables["b"][2:]}
    plan = engine.step(a=CHUNK, b=CHUNK, c=1)
    assert sorted(engine.saved(plan)) == [("a", range(2)), ("c", range(3))]
    engine.gather(plan)
    engine.finish("b")
    assert engine.saved(engine.step(a=CHUNK)) == [("a", range(2, 3))]


def test_who_shares_only_what_was_computed_from_the_load_is_not_saved_either() -> None:
    """vLLM's prefix cache may hold two blocks of the same tokens."""
    tables = {"a": [1, 2, 3, 4], "b": [1, 9, 3, 5], "c": [1, 8, 7, 5]}
    for names in permutations(tables):
        loads = ForeignLoads()
        for name in names:
            loads.begin(name, 1, tables[name])
        assert loads.note_invalid({2}, BLOCK) == {2, 3, 4, 5}
        ended = {load.request_id: load for load in loads.take(1)}
        assert (ended["a"].kept, ended["a"].lost_blocks(BLOCK)) == (BLOCK, (2, 3, 4))
        assert (ended["b"].kept, ended["b"].lost_blocks(BLOCK)) == (2 * BLOCK, (3, 5))
        assert (ended["c"].kept, ended["c"].lost_blocks(BLOCK)) == (3 * BLOCK, (5,))
        assert not loads


def test_who_starts_in_the_next_step_may_share_the_blocks_as_well(engine: Engine) -> None:
    engine.start()
    first = engine.step(a=CHUNK)
    engine.share("b", 8)
    engine.start("b", LOADED)
    second = engine.step(a=CHUNK, b=CHUNK)
    engine.views["a"].num_computed_tokens = CHUNK
    engine.end(first, [engine.tables["a"][2]])
    assert [name for name, _ in engine.saved(engine.step(a=CHUNK, b=1))] == ["a"]
    engine.end(second)
    assert engine.saved(engine.step(b=1)) == []
    engine.finish("b")
    assert not engine.step().saves


@pytest.mark.parametrize("failed", [False, True])
def test_a_request_that_ends_meanwhile_is_saved_if_its_load_was_whole(
    engine: Engine, failed: bool
) -> None:
    engine.start()
    plan = engine.step(a=2 * CHUNK)
    engine.finish()
    assert not engine.step().saves
    assert engine.scheduler.saves.has_pending
    engine.end(plan, engine.tables["a"][3:4] if failed else ())
    plan = engine.step()
    # The last token has no KV.
    assert engine.saved(plan) == ([] if failed else [("a", range(5))])
    engine.gather(plan)
    assert not engine.scheduler.saves.has_pending


def test_a_request_that_ends_while_it_waits_for_its_load_is_not_saved(engine: Engine) -> None:
    """vLLM counts its tokens as computed from the start."""
    engine.start()
    engine.step()
    engine.finish()
    assert not engine.step().saves
    assert not engine.scheduler.saves.has_pending


def test_what_was_waited_for_is_saved_at_once(engine: Engine) -> None:
    """vLLM has lowered its count before, if the load failed."""
    engine.start(loaded=LOADED)
    engine.step()
    engine.views["a"].num_computed_tokens = 3 * CHUNK
    engine.scheduler.allocated("a", (), 0)  # as vLLM does once the load has ended
    plan = engine.step(a=2 * CHUNK)
    assert (engine.saved(plan), plan.confirm) == ([("a", range(5))], 0)


def test_a_preempted_request_starts_afresh(engine: Engine) -> None:
    engine.start()
    plan = engine.step(a=CHUNK)
    table = engine.tables["a"]
    engine.views["a"].num_computed_tokens = 0
    engine.preempted = ["a"]
    engine.step()
    engine.preempted = []
    # It finds what it had before in the prefix cache; vLLM does not know yet that it is bad.
    engine.start("a", LOADED)
    again = engine.step(a=CHUNK)
    assert again.confirm
    assert engine.saved(again) == []
    engine.end(plan, [table[2]])
    assert set(engine.pins.forgotten) >= set(table[2:])
    engine.end(again)
    assert engine.saved(engine.step(a=1)) == []


def test_requests_that_are_not_saved_are_looked_at_for_those_that_share(engine: Engine) -> None:
    engine.add("a", COUNT, RequestOptions(load=False, save=False))
    engine.start("a")
    engine.share("b", 8)
    engine.start("b", LOADED)
    assert engine.saved(engine.step(a=CHUNK, b=CHUNK)) == []


def test_a_reset_leaves_out_what_has_not_been_planned(engine: Engine) -> None:
    engine.start()
    plan = engine.step(a=2 * CHUNK)
    engine.finish()
    engine.scheduler.reset()
    engine.end(plan)
    assert not engine.step().saves
    assert not engine.scheduler.saves.has_pending


def test_without_another_connector_nothing_waits(engine: Engine) -> None:
    """Neither for tokens of vLLM's own cache nor for the pool's own loads."""
    engine.start("a", loaded=0)
    assert engine.saved(engine.step(a=COUNT)) == [("a", range(6))]
    engine.share("b", 8)
    engine.start("b", LOADED)
    plan = engine.step(b=CHUNK)
    assert (engine.saved(plan), plan.confirm) == ([("b", range(5))], 0)

    other = Engine()
    other.hold(range(COUNT), range(3))
    other.add("a", COUNT)
    assert other.match("a", CHUNK) == (2 * CHUNK, True)
    other.allocate("a", CHUNK, 2 * CHUNK)
    other.step()
    other.scheduler.load_ended("a")
    other.scheduler.allocated("a", (), 0)
    plan = other.step(a=3 * CHUNK)
    assert (other.saved(plan), plan.confirm) == ([("a", range(3, 6))], 0)
    assert other.lookups.close()


def lost(engine: Engine) -> None:
    """Request "b" goes on from blocks of "a" that were not filled, and that "a" is to compute."""
    engine.start()
    engine.share("b", 6)
    engine.start("b", 3 * CHUNK, loaded=3 * CHUNK)
    plan = engine.step(a=CHUNK, b=CHUNK)
    engine.views["a"].num_computed_tokens = CHUNK
    engine.end(plan, [engine.tables["a"][2]])


@pytest.mark.parametrize("how", ["ends", "is preempted"])
def test_who_finds_blocks_of_lost_requests_is_not_saved(engine: Engine, how: str) -> None:
    lost(engine)
    engine.finish("a")  # nobody computes them again
    engine.step(b=CHUNK)
    engine.add("c", COUNT)
    engine.tables["c"] = engine.tables["b"][:10]
    engine.start("c", 5 * CHUNK, loaded=5 * CHUNK)
    engine.pins.forgotten.clear()
    if how == "ends":
        engine.finish("b")
    else:
        engine.preempted = ["b"]
        engine.views["b"].num_computed_tokens = 0
    plan = engine.step(c=CHUNK)
    engine.preempted = []
    # vLLM shows the blocks to nobody else.
    assert set(engine.pins.forgotten) >= set(engine.tables["b"][2:10])
    assert engine.saved(plan) == []
    engine.end(plan)
    engine.finish("c")
    plan = engine.step()
    assert "c" not in dict(engine.saved(plan))
    if plan.confirm:
        engine.end(plan)
    assert not engine.scheduler._foreign


def test_who_has_waited_beside_lost_requests_is_not_saved(engine: Engine) -> None:
    """Its first blocks may be theirs: vLLM has lowered no count since."""
    lost(engine)
    engine.add("c", COUNT)
    engine.tables["c"] = engine.tables["b"][:8]
    engine.start("c", 4 * CHUNK, loaded=5 * CHUNK)
    engine.step(b=1)
    assert "c" not in dict(engine.saved(engine.step(c=CHUNK)))
    engine.finish("c")
    assert "c" not in dict(engine.saved(engine.step()))


def test_who_waits_while_the_load_fails_is_not_saved(engine: Engine) -> None:
    """Of several that wait, and share the blocks, vLLM has one compute them again."""
    engine.start()
    engine.share("b", 4)
    engine.start("b", 2 * CHUNK, loaded=3 * CHUNK)
    plan = engine.step(a=CHUNK)
    engine.views["a"].num_computed_tokens = CHUNK
    engine.end(plan, [engine.tables["a"][2]])
    assert "b" not in dict(engine.saved(engine.step(b=CHUNK)))
    engine.finish("b")
    assert "b" not in dict(engine.saved(engine.step()))


def test_an_own_load_that_is_whole_does_not_make_lost_blocks_before_it_whole() -> None:
    engine = Engine(config=KVPoolConfig(layerwise=True))
    engine.hold(range(COUNT), range(3))
    engine.add("a", COUNT, RequestOptions(load=False))
    engine.start()
    engine.share("b", 4)
    assert engine.match("b", 2 * CHUNK) == (CHUNK, False)
    engine.allocate("b", 2 * CHUNK, CHUNK)
    plan = engine.step(a=2 * CHUNK, b=3 * CHUNK)
    engine.finish("b")
    engine.views["a"].num_computed_tokens = CHUNK
    engine.end(plan, [engine.tables["a"][2]])
    assert "b" not in dict(engine.saved(engine.step(a=CHUNK)))
    assert engine.lookups.close()
