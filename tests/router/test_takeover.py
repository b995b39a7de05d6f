"""Requests bound to replicas that load."""

import pytest

from tests.support.router_invariants import check_fleet
from tests.support.router_steps import ask, spec
from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.placement import choose_new, limit, next_bound, pair
from vllm_kvpool.router.control.requests import Request
from vllm_kvpool.router.control.states import Cause, State


def fleet_of(**states: State) -> Fleet:
    fleet = Fleet()
    for name, state in states.items():
        fleet.add(spec(name), 0.0).state = state
    check_fleet(fleet)
    return fleet


def request(number: int, priority: int = 0) -> Request:
    return Request(ask(f"r{number}", priority=priority), 0.0, number, 9)


def replica(fleet: Fleet, name: str) -> Replica:
    return next(each for each in fleet if each.replica_id == name)


@pytest.mark.parametrize(
    ("seconds", "most"), [(0.0, 4), (0.19, 4), (0.2, 3), (0.4, 2), (0.6, 2), (3600.0, 2)]
)
def test_the_longer_it_loads_the_fewer_it_is_bound_to(seconds: float, most: int) -> None:
    loading = Replica(spec("n"), state=State.NEW_PREFILL, since=100.0)
    assert limit(loading, 100.0 + seconds + 1e-9) == most


def test_the_emptiest_that_loads_is_given_one_more() -> None:
    fleet = fleet_of(a=State.NEW_PREFILL, b=State.NEW_PREFILL, c=State.REFRACTORY_PREFILL)
    replica(fleet, "a").assign(request(1))
    assert choose_new(fleet, 0.0) is replica(fleet, "b")
    replica(fleet, "b").assign(request(2))
    assert choose_new(fleet, 0.0) is replica(fleet, "a")
    for number in range(3, 6):
        replica(fleet, "a").assign(request(number))
        replica(fleet, "b").assign(request(10 + number))
    assert choose_new(fleet, 0.0) is None


def test_who_would_go_first_in_the_queue_is_stolen_first() -> None:
    fleet = fleet_of(a=State.NEW_PREFILL, b=State.REFRACTORY_PREFILL, c=State.NEW_PREFILL)
    assert next_bound(fleet) is None
    first, urgent = request(1), request(9, priority=-1)
    replica(fleet, "a").assign(request(2))
    replica(fleet, "b").assign(first)
    assert next_bound(fleet) == (replica(fleet, "b"), first)
    replica(fleet, "a").assign(urgent)
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
