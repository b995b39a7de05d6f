"""Replicas by how much they have to do, and sums over them, kept up to date."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.router_steps import Steps, spec
from vllm_kvpool.router.control.events import Measured, Sample
from vllm_kvpool.router.control.fleet import Replica
from vllm_kvpool.router.control.placement import MAX_TRIED, Ranking
from vllm_kvpool.router.control.request_flow import RETRY_EVERY_S, Retry
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.control.work import ActiveRequest

REPLICAS = [Replica(spec(f"r{number}")) for number in range(6)]


@given(
    st.lists(st.tuples(st.sampled_from(REPLICAS), st.none() | st.integers(0, 5)), max_size=200),
    st.integers(1, 7),
    st.sets(st.sampled_from(REPLICAS)),
)
def test_the_first_are_those_with_the_smallest_keys(
    changes: list[tuple[Replica, int | None]], number: int, refused: set[Replica]
) -> None:
    ranking, keys = Ranking(), dict.fromkeys(REPLICAS, None) | {}
    for replica, load in changes:
        key = None if load is None else (float(load), 0, replica.replica_id)
        ranking.set(replica, key)
        keys[replica] = key
    expected = sorted((key, r) for r, key in keys.items() if key is not None and r not in refused)
    for _ in range(2):  # asking changes nothing
        found = ranking.first(number, lambda each: each not in refused, "")
        assert found == [replica for _, replica in expected[:number]]
    assert len(ranking) == sum(key is not None for key in keys.values())


def test_of_many_that_are_not_accepted_only_some_are_tried() -> None:
    ranking, tried = Ranking(), []
    for number in range(2 * MAX_TRIED):
        replica = Replica(spec(f"r{number}"))
        ranking.set(replica, (0.0, number, replica.replica_id))
    assert ranking.first(1, lambda each: bool(tried.append(each)), "") == []
    assert len(tried) == MAX_TRIED


def test_room_is_that_of_all_blocks_of_a_model_whatever_their_sizes() -> None:
    steps = Steps()
    steps.fleet(prefill="p", decode="d e f")
    steps.controller.state.fleet.list_models(steps.replica("f"), frozenset({"other"}))
    for replica, block_size, blocks in (("d", 16, 16_000), ("e", 256, 1_000), ("f", 1024, 500)):
        sample = Sample(total_blocks=blocks, block_size=block_size)
        steps.step(Measured(ReplicaId(replica), sample))
    pressure = steps.controller.admission.pressure("m")
    headroom = steps.controller.state.settings.headroom
    capacity = headroom * (16 * 16_000 + 256 * 1_000)
    assert pressure.room_tokens == pytest.approx(capacity, rel=0.01)


DONE, DECODED = RequestId("done"), RequestId("decoded")
CHANGES: dict[str, tuple[Callable[[Steps, Replica, Replica], object], bool, bool]] = {
    # The change; whether prompts are retried; whether requests to be decoded are.
    "nothing": (lambda *_: None, False, False),
    "more work": (
        lambda _, prefill, __: prefill.work.begin_prefill(RequestId("more"), 5, 0.0),
        False,
        False,
    ),
    "a prompt ends": (lambda _, prefill, __: prefill.work.end_prefill(DONE), True, False),
    "an answer ends": (lambda _, __, decode: decode.work.end_decode(DECODED, 0.0), False, True),
    "a replica comes": (lambda steps, *_: steps.serve("new", Role.DECODE), True, True),
    "models": (
        lambda steps, prefill, _: steps.controller.state.fleet.list_models(
            prefill, frozenset({"m"})
        ),
        True,
        True,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_retry_change_retries_the_queue_whose_replicas_gain_room(name: str) -> None:
    change, retries_prompts, retries_decodes = CHANGES[name]
    steps = Steps()
    state = steps.controller.state
    steps.serve("p", Role.PREFILL)
    steps.serve("d", Role.DECODE)
    prefill, decode = state.fleet
    prefill.work.begin_prefill(DONE, 10, 0.0)
    active = ActiveRequest(1, is_handed=False)
    decode.work.begin_decode(DECODED, active, 0.0)
    state.refresh()
    retries = [Retry(state.fleet, each) for each in (state.table.prefillers, state.table.decoders)]
    assert [each.take_due(0.0) for each in retries] == [True, True]
    change(steps, prefill, decode)
    state.refresh()
    assert [each.take_due(0.0) for each in retries] == [retries_prompts, retries_decodes]
    assert [each.take_due(0.0) for each in retries] == [False, False]
    assert [each.take_due(RETRY_EVERY_S) for each in retries] == [True, True]


def test_an_event_looks_at_the_replicas_that_it_changes_alone() -> None:
    steps = Steps()
    for number in range(50):
        steps.serve(f"d{number}", Role.DECODE)
    state = steps.controller.state
    seen: list[str] = []
    take_in = state.table._take_in
    state.table._take_in = lambda each: (seen.append(each.replica_id), take_in(each))[1]  # type: ignore[method-assign]
    [call] = steps.ask("r", 20)
    steps.began("r")
    steps.decoded("r", call.replica)
    assert set(seen) == {call.replica}
    assert len(seen) == 3


def test_replicas_are_ranked_by_model_however_idle_others_are() -> None:
    ranking = Ranking()
    for number in range(100):
        replica = Replica(spec(f"r{number}"), models=frozenset({"b" if number == 99 else "a"}))
        ranking.set(replica, (float(number), 0, replica.replica_id))
    [only] = ranking.first(2, lambda each: True, "b")
    assert only.replica_id == "r99"
    assert [each.replica_id for each in ranking.first(2, lambda each: True, "")] == ["r0", "r1"]
    only.models = frozenset({"a"})
    ranking.set(only, (-1.0, 0, only.replica_id))
    assert ranking.first(2, lambda each: True, "b") == []
    assert ranking.first(1, lambda each: True, "a") == [only]
    assert len(ranking) == 100
