"""Placement: the choice of the replicas that prefill and decode a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.router_steps import ask, spec
from vllm_kvpool.router.control.events import Sample
from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.health import Health
from vllm_kvpool.router.control.placement import (
    blocks_for,
    choose_decode,
    choose_new,
    choose_prefill,
    choose_to_clear,
    limit,
    next_bound,
    pair,
    room_of,
)
from vllm_kvpool.router.control.requests import Request, RequestId
from vllm_kvpool.router.control.settings import Settings
from vllm_kvpool.router.control.states import Cause, ReplicaId, State
from vllm_kvpool.router.control.work import ActiveRequest


def prefiller(name: str, *loads: int, cached: tuple[int, ...] = (), busy: float = 0.0) -> Replica:
    replica = Replica(spec(name), state=State.PREFILL, health=Health(busy_until=busy))
    for number, tokens in enumerate(loads):
        replica.work.begin_prefill(RequestId(f"{name}{number}"), tokens, 0.0)
    replica.remember(cached)
    return replica


def decoder(name: str, *stays: int, total: int = 100, flowing: bool = True) -> Replica:
    replica = Replica(spec(name), state=State.DECODE)
    replica.sample = Sample(total_blocks=total, block_size=16)
    for number, blocks in enumerate(stays):
        request_id = RequestId(f"{name}{number}")
        replica.work.begin_decode(request_id, ActiveRequest(blocks, is_handed=True), 0.0)
        if flowing:
            replica.work.note_first_token(request_id, 0.0)
    return replica


def request(prompt_tokens: int = 1000, tokens: int = 1100, *, avoid: str = "") -> Request:
    made = Request(ask("r", prompt_tokens, prefix=(1, 2, 3), prefix_tokens=256), 0.0, 1, tokens)
    made.avoid = frozenset(ReplicaId(each) for each in avoid.split())
    return made


def held_by(replicas: list[Replica]) -> dict[Replica, int]:
    ask = request().ask
    depths = {each: each.prefixes.depth(ask.prefix) for each in replicas}
    return {each: depth * ask.prefix_tokens for each, depth in depths.items()}


@pytest.mark.parametrize(
    ("replicas", "avoid", "chosen"),
    [
        ([prefiller("a"), prefiller("b")], "", ("a", 1000)),
        ([prefiller("a", 500), prefiller("b")], "", ("b", 1000)),
        ([prefiller("a", 500, cached=(1, 2, 3)), prefiller("b")], "", ("a", 232)),
        ([prefiller("a", 900, cached=(1, 2, 3)), prefiller("b")], "", ("b", 1000)),
        ([prefiller("a"), prefiller("b", 900)], "a", ("b", 1000)),
        ([prefiller("a"), prefiller("b", 3500)], "a", ("a", 1000)),
        ([prefiller("a")], "a", ("a", 1000)),
        ([prefiller("a", busy=11.0), prefiller("b", 900)], "", ("b", 1000)),
        ([prefiller("a", busy=10.0), prefiller("b", 900)], "", ("a", 1000)),
        ([prefiller("a", 3500)], "", None),
        ([prefiller("a", 1, 1)], "", None),
        ([], "", None),
    ],
)
def test_a_prompt_goes_where_it_is_computed_soonest(
    replicas: list[Replica], avoid: str, chosen: tuple[str, int] | None
) -> None:
    budgets = Settings(prefill_tokens=4000, prefill_requests=2)
    choice = choose_prefill(request(avoid=avoid), replicas, budgets, 10.0, held_by(replicas))
    assert (choice and (choice.replica.replica_id, choice.uncached_tokens)) == chosen


def test_a_prompt_larger_than_the_budget_goes_to_who_has_nothing() -> None:
    budgets = Settings(prefill_tokens=400)
    assert choose_prefill(request(), [prefiller("a", 1)], budgets, 0.0) is None
    choice = choose_prefill(request(), [prefiller("a", 1), prefiller("b")], budgets, 0.0)
    assert choice.replica.replica_id == "b"


@pytest.mark.parametrize(
    ("replica", "tokens"),
    [
        (decoder("d"), float("inf")),  # for the engine to refuse
        (decoder("d", 45), 50 * 16),
        (decoder("d", 95), 0),
        (decoder("d", 45, total=0), float("inf")),  # nothing is known of its size
    ],
)
def test_room_is_what_is_left_below_the_headroom(replica: Replica, tokens: float) -> None:
    assert room_of(replica, Settings(headroom=0.95)) == tokens


@pytest.mark.parametrize(
    ("decoders", "avoid", "chosen"),
    [
        ([decoder("a", 20), decoder("b", 10)], "", "b"),
        ([decoder("a", 20, total=400), decoder("b", 10)], "", "a"),
        ([decoder("a"), decoder("b", 10)], "a", "b"),
        ([decoder("a"), decoder("b", 80)], "a", "a"),
        ([decoder("a", 5, 5), decoder("b", 10)], "", "b"),
        ([decoder("b"), decoder("a")], "", "a"),
        ([decoder("a", 80), decoder("b", 80)], "", None),
        ([], "", None),
    ],
)
def test_a_request_goes_where_most_is_left(
    decoders: list[Replica], avoid: str, chosen: str | None
) -> None:
    asks = request(tokens=16 * 20, avoid=avoid)
    replica = choose_decode(asks, [each for each in decoders if room_of(each, Settings()) >= 320])
    assert (replica and replica.replica_id) == chosen


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 100)), min_size=1, max_size=8),
    st.integers(1, 100),
)
def test_who_is_chosen_has_room_and_nobody_has_more(
    loads: list[tuple[int, int]], blocks: int
) -> None:
    decoders = [decoder(f"d{n}", used, total=total) for n, (used, total) in enumerate(loads)]
    able = [each for each in decoders if blocks * 16 <= room_of(each, Settings())]
    chosen = choose_decode(request(tokens=blocks * 16), able)
    if chosen is None:
        assert not able
        return
    assert chosen in able
    shares = {e.replica_id: (e.work.used_blocks + blocks) / e.sample.total_blocks for e in able}
    assert shares[chosen.replica_id] == min(shares.values())


def test_the_first_that_is_large_enough_is_cleared() -> None:
    small, full, half = decoder("small", 1, total=10), decoder("full", 90), decoder("half", 50)
    assert choose_to_clear(16 * 80, [small, half, full], Settings()) is half
    assert choose_to_clear(16 * 800, [small, half, full], Settings()) is small


@pytest.mark.parametrize(("tokens", "size", "blocks"), [(1, 16, 1), (17, 16, 2), (17, 0, 2)])
def test_blocks_are_whole(tokens: int, size: int, blocks: int) -> None:
    replica = Replica(spec("d"), sample=Sample(block_size=size))
    assert blocks_for(tokens, replica) == blocks


@pytest.mark.parametrize(
    ("seconds", "most"), [(0.0, 4), (0.19, 4), (0.2, 3), (0.4, 2), (0.6, 2), (3600.0, 2)]
)
def test_the_longer_it_loads_the_fewer_it_is_bound_to(seconds: float, most: int) -> None:
    loading = Replica(spec("n"), state=State.NEW_PREFILL, since=100.0)
    assert limit(loading, 100.0 + seconds + 1e-9) == most


def fleet_of(**states: State) -> Fleet:
    fleet = Fleet()
    for name, state in states.items():
        fleet.add(spec(name), 0.0).state = state
    return fleet


def asked(number: int, priority: int = 0) -> Request:
    return Request(ask(f"r{number}", priority=priority), 0.0, number, 9)


def replica(fleet: Fleet, name: str) -> Replica:
    return next(each for each in fleet if each.replica_id == name)


def test_the_emptiest_that_loads_is_given_one_more() -> None:
    fleet = fleet_of(a=State.NEW_PREFILL, b=State.NEW_PREFILL, c=State.REFRACTORY_PREFILL)
    replica(fleet, "a").work.assign(asked(1))
    assert choose_new(fleet, 0.0) is replica(fleet, "b")
    replica(fleet, "b").work.assign(asked(2))
    assert choose_new(fleet, 0.0) is replica(fleet, "a")
    for number in range(3, 6):
        replica(fleet, "a").work.assign(asked(number))
        replica(fleet, "b").work.assign(asked(10 + number))
    assert choose_new(fleet, 0.0) is None


def test_who_would_go_first_in_the_queue_is_stolen_first() -> None:
    fleet = fleet_of(a=State.NEW_PREFILL, b=State.REFRACTORY_PREFILL, c=State.NEW_PREFILL)
    assert next_bound(fleet) is None
    first, urgent = asked(1), asked(9, priority=-1)
    replica(fleet, "a").work.assign(asked(2))
    replica(fleet, "b").work.assign(first)
    assert next_bound(fleet) == (replica(fleet, "b"), first)
    replica(fleet, "a").work.assign(urgent)
    assert next_bound(fleet) == (replica(fleet, "a"), urgent)


P, O, N, R = State.PREFILL, State.OLD_PREFILL, State.NEW_PREFILL, State.REFRACTORY_PREFILL  # noqa: E741


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((P, P), (P, P)),
        ((P, P, N), (O, P, N)),
        ((P, P, N, R), (O, O, N, R)),
        ((P, N, N), (O, N, N)),
        ((P, O, N), (P, O, N)),
        ((O, O, R), (O, P, R)),
        ((O, P), (P, P)),
        ((N,), (N,)),
    ],
)
def test_there_are_as_many_old_ones_as_new_ones(
    before: tuple[State, ...], after: tuple[State, ...]
) -> None:
    fleet = fleet_of(**{f"x{number}": state for number, state in enumerate(before)})
    pair(fleet, 1.0)
    assert tuple(each.state for each in fleet) == after
    moves = len(fleet.transitions)
    pair(fleet, 2.0)
    assert len(fleet.transitions) == moves
    assert {each.cause for each in fleet.transitions} <= {Cause.PAIR, Cause.UNPAIR}
