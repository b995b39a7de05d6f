"""By which means a plan is carried out."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.router.control.autoscaler import (
    SERVING,
    ScalingAction,
    Step,
    choose_steps,
    expired_standby,
)
from vllm_kvpool.router.control.events import ReplicaSpec
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.planner import Plan, Wanted
from vllm_kvpool.router.control.states import ReplicaId, Role, State

NOW = 1000
P, D = Role.PREFILL, Role.DECODE
D1 = ReplicaId("d1")


def a_plan(prefill: int, decode: int, flip_to: Role | None = None) -> Plan:
    return Plan(Wanted(4, 4 + prefill), Wanted(4, 4 + decode), flip_to, "", "")


@dataclass(frozen=True)
class Row:
    """A replica of a test's fleet."""

    name: str
    state: State
    load: int = 0
    warmth: int = 0
    idle_since: int = 0


def a_fleet(*rows: Row) -> Fleet:
    fleet = Fleet()
    for row in rows:
        spec = ReplicaSpec(replica_id=ReplicaId(row.name), url=row.name)
        replica = fleet.add(spec, row.idle_since)
        replica.state, replica.work.committed_blocks = row.state, row.load
        replica.remember(range(row.warmth))
    return fleet


def fleet_of(text: str) -> Fleet:
    """Replicas `name state load=1 warmth=2`, `;` between them."""
    rows = []
    for each in text.split(";"):
        name, state, *more = each.split()
        fields = {key: int(value) for key, _, value in (x.partition("=") for x in more)}
        rows.append(Row(name, State(state), **fields))
    return a_fleet(*rows)


SERVE = "p1 prefill load=500; p2 prefill load=100; d1 decode load=70; d2 decode"
ALL = f"""{SERVE}; broken failed; asleep inactive; ready standby
    ; leaving-p draining_prefill; leaving-d draining_decode"""
STANDBYS = "cold standby warmth=1 idle_since=999; warm standby warmth=2 idle_since=1"

STEPS: dict[str, tuple[str, tuple[int, int, Role | None], str]] = {
    # Up by the cheapest action first, for decode before prefill; nothing is used twice.
    "nothing": (ALL, (0, 0, None), ""),
    "prefill": (ALL, (1, 0, None), "revive leaving-p"),
    "decode": (ALL, (0, 1, None), "revive leaving-d"),
    "two": (ALL, (2, 0, None), "revive leaving-p, use standby ready"),
    "many": (ALL, (9, 0, None), "revive leaving-p, use standby ready, wake asleep"),
    "flip": (ALL, (9, -1, P), "revive leaving-p, use standby ready, flip d2, wake asleep"),
    "both": (
        *(ALL, (2, 2, None)),
        "revive leaving-d, use standby ready, revive leaving-p, wake asleep",
    ),
    "a replica that is there spares the flip": (ALL, (1, -1, P), "revive leaving-p"),
    "the flip with the least to lose, to decode": (SERVE, (-1, 1, D), "flip p2"),
    "the flip with the least to lose, to prefill": (SERVE, (1, -1, P), "flip d2"),
    "the warmest first": (
        *(f"{STANDBYS}; late standby warmth=2 idle_since=2", (3, 0, None)),
        "use standby late, use standby warm, use standby cold",
    ),
    # Down by the one with the least to lose.
    "a standby before any that serves": (f"{SERVE}; s standby", (0, -1, None), "retire s"),
    "the emptiest": (SERVE, (0, -1, None), "drain d2"),
    "not the last one": ("d1 decode load=70", (0, -1, None), ""),
    "not the last one that serves": ("d1 decode; d3 loading_decode", (0, -1, None), ""),
    "the coldest": ("a decode load=5 warmth=9; b decode load=5 warmth=3", (0, -1, None), "drain b"),
    "a standby that is used is not given back": (
        *(f"{SERVE}; s standby", (-1, 1, None)),
        "use standby s, drain p2",
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_take_what_costs_least(name: str) -> None:
    fleet, deltas, expected = STEPS[name]
    steps = choose_steps(a_plan(*deltas), fleet_of(fleet))
    assert ", ".join(f"{each.action.value} {each.replica}" for each in steps) == expected
    if name.startswith("the flip"):
        assert [each.role for each in steps] == [deltas[2]]


@pytest.mark.parametrize(
    ("delta", "flip_to", "step"),
    [(-1, None, Step(ScalingAction.DRAIN, D1, D)), (-1, P, Step(ScalingAction.FLIP, D1, P))],
)
def test_last_engine_of_a_model_is_spared(delta: int, flip_to: Role | None, step: Step) -> None:
    fleet = fleet_of("p1 prefill; d1 decode load=70; d2 decode load=90; embed decode")
    for replica in fleet:
        is_other = replica.replica_id == "embed"
        fleet.list_models(replica, frozenset({"embedder" if is_other else "model"}))
    assert choose_steps(a_plan(int(flip_to is P), delta, flip_to), fleet) == [step]


def test_standby_that_answers_something_is_not_retired() -> None:
    fleet = fleet_of("busy standby idle_since=1; s standby idle_since=2; d1 decode; d2 decode")
    fleet[ReplicaId("busy")].num_forwarded = 1
    retired = Step(ScalingAction.RETIRE, ReplicaId("s"))
    assert choose_steps(a_plan(0, -1), fleet) == [retired]
    assert expired_standby(fleet, NOW, ttl_s=30.0) == retired


def test_standby_that_is_idle_for_longest_expires_first() -> None:
    fleet = fleet_of(f"new standby idle_since={NOW - 1}; old standby idle_since={NOW - 30}")
    assert expired_standby(fleet, NOW, ttl_s=30.0) == Step(ScalingAction.RETIRE, ReplicaId("old"))
    assert expired_standby(fleet, NOW, ttl_s=30.5) is None


rows = st.lists(
    st.builds(Row, st.integers(0, 10**6).map(str), st.sampled_from(State), load=st.integers(0, 10)),
    max_size=20,
    unique_by=lambda one: one.name,
)


@given(
    st.sampled_from(
        [(3, 0, None), (0, 5, None), (2, 2, None), (-1, 3, D), (2, -1, P), (-1, 0, None)]
    ),
    rows,
)
def test_steps_are_no_more_than_planned_and_take_nothing_twice(
    deltas: tuple[int, int, Role | None], rows: list[Row]
) -> None:
    fleet = a_fleet(*rows)
    plan = a_plan(*deltas)
    steps = choose_steps(plan, fleet)
    taken = [step.replica for step in steps]
    assert len(taken) == len(set(taken))
    ups = [step for step in steps if step.action not in (ScalingAction.DRAIN, ScalingAction.RETIRE)]
    for role in Role:
        assert sum(step.role is role for step in ups) <= max(0, plan.of(role).delta)
        lost = [
            step
            for step in steps
            if (step.action is ScalingAction.FLIP and step.role is role.other)
            or (step.action is ScalingAction.DRAIN and step.role is role)
        ]
        assert len(lost) < max(2, len(fleet.in_states(SERVING[role])))
        assert not lost or len(fleet.in_states(SERVING[role])) > 1
