"""The states of a replica and the edges between them."""

from vllm_kvpool.router.control.states import (
    BROKEN,
    DRAINING,
    EDGES,
    HAS_BOUND,
    LOADING,
    ROLE_OF,
    TAKES_DECODE,
    TAKES_PREFILL,
    UP,
    Cause,
    Role,
    State,
)


def reachable(start: State) -> set[State]:
    found, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (before, _), after in EDGES.items():
            if before is state and after not in found:
                found.add(after)
                todo.append(after)
    return found


def test_every_state_can_be_reached_from_every_other() -> None:
    for state in State:
        assert reachable(state) == set(State), state


def test_every_cause_is_used() -> None:
    assert {cause for _, cause in EDGES} == set(Cause)


def test_there_is_no_way_from_decode_to_prefill_without_a_standby() -> None:
    """A replica is emptied and answers a test request before it computes prompts again."""
    before = {state for (state, _), after in EDGES.items() if after is State.AUS_PREFILL}
    assert before == {State.SHUTTING_NULL, State.FAILED}
    into_prefill = {state for (state, _), after in EDGES.items() if after is State.PREFILL}
    assert all(ROLE_OF[state] is Role.PREFILL for state in into_prefill)


def test_requests_are_decoded_only_where_a_request_was_answered_or_prompts_were_computed() -> None:
    before = {state for (state, _), after in EDGES.items() if after is State.DECODE}
    assert before == {State.AUS_DECODE, State.MUTATING_TO_DECODE}


def test_whatever_runs_can_fail_and_nothing_else() -> None:
    can = {state for state, cause in EDGES if cause is Cause.FAIL}
    assert can == UP | LOADING | {State.FAILED}


def test_groups_of_states_do_not_overlap() -> None:
    groups = (UP, LOADING, BROKEN, frozenset({State.INACTIVE}))
    assert sum(len(group) for group in groups) == len(State) == len(frozenset().union(*groups))
    assert TAKES_PREFILL | TAKES_DECODE | DRAINING <= UP
    assert not (TAKES_PREFILL | TAKES_DECODE) & DRAINING
    assert {ROLE_OF[state] for state in TAKES_PREFILL | HAS_BOUND} == {Role.PREFILL}
    assert {ROLE_OF[state] for state in TAKES_DECODE} == {Role.DECODE}


def test_the_other_role() -> None:
    assert (Role.PREFILL.other, Role.DECODE.other) == (Role.DECODE, Role.PREFILL)
