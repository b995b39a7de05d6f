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

NOW = 1000.0
P, D = Role.PREFILL, Role.DECODE


def a_plan(prefill: int, decode: int, flip_to: Role | None = None) -> Plan:
    return Plan(Wanted(4, 4 + prefill), Wanted(4, 4 + decode), flip_to, "", "")


@dataclass(frozen=True)
class Row:
    """One replica."""

    name: str
    state: State
    load: int = 0
    warmth: int = 0
    idle_since: float = 0.0


def a_fleet(*rows: Row) -> Fleet:
    fleet = Fleet()
    for row in rows:
        spec = ReplicaSpec(replica_id=ReplicaId(row.name), url=row.name)
        replica = fleet.add(spec, row.idle_since)
        replica.state, replica.work.committed_blocks = row.state, row.load
        replica.remember(range(row.warmth))
    return fleet


def short(steps: list[Step]) -> list[tuple[ScalingAction, str | None]]:
    return [(step.action, step.replica) for step in steps]


SERVE = (
    Row("p1", State.PREFILL, load=500),
    Row("p2", State.PREFILL, load=100),
    Row("d1", State.DECODE, load=70),
    Row("d2", State.DECODE, load=0),
)
ALL_MEANS = (
    *SERVE,
    Row("broken", State.FAILED),
    Row("asleep", State.INACTIVE),
    Row("ready", State.SHUTTING_NULL),
    Row("leaving p", State.SHUTTING_PREFILL),
    Row("leaving d", State.SHUTTING_DECODE),
)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (a_plan(0, 0), []),
        (a_plan(1, 0), [(ScalingAction.REVIVE, "leaving p")]),
        (a_plan(0, 1), [(ScalingAction.REVIVE, "leaving d")]),
        (a_plan(2, 0), [(ScalingAction.REVIVE, "leaving p"), (ScalingAction.USE_STANDBY, "ready")]),
        (
            a_plan(9, 0),
            [
                *((ScalingAction.REVIVE, "leaving p"), (ScalingAction.USE_STANDBY, "ready")),
                (ScalingAction.WAKE, "asleep"),
            ],
        ),
        (
            a_plan(9, -1, flip_to=P),
            [
                *((ScalingAction.REVIVE, "leaving p"), (ScalingAction.USE_STANDBY, "ready")),
                *((ScalingAction.FLIP, "d2"), (ScalingAction.WAKE, "asleep")),
            ],
        ),
        # Decode first; nothing is used twice.
        (
            a_plan(2, 2),
            [
                *((ScalingAction.REVIVE, "leaving d"), (ScalingAction.USE_STANDBY, "ready")),
                *((ScalingAction.REVIVE, "leaving p"), (ScalingAction.WAKE, "asleep")),
            ],
        ),
        # What is there already spares the flip.
        (a_plan(1, -1, flip_to=P), [(ScalingAction.REVIVE, "leaving p")]),
    ],
)
def test_up_takes_the_cheapest_action_first(
    plan: Plan, expected: list[tuple[ScalingAction, str | None]]
) -> None:
    assert short(choose_steps(plan, a_fleet(*ALL_MEANS))) == expected


def test_a_flip_takes_the_one_with_the_least_to_lose() -> None:
    fleet = a_fleet(*SERVE)
    assert choose_steps(a_plan(-1, 1, flip_to=D), fleet) == [
        Step(ScalingAction.FLIP, ReplicaId("p2"), D)
    ]
    assert choose_steps(a_plan(1, -1, flip_to=P), fleet) == [
        Step(ScalingAction.FLIP, ReplicaId("d2"), P)
    ]


def test_the_warmest_is_used_first() -> None:
    fleet = a_fleet(
        Row("cold", State.SHUTTING_NULL, warmth=1, idle_since=999.0),
        Row("warm", State.SHUTTING_NULL, warmth=2, idle_since=1.0),
        Row("late", State.SHUTTING_NULL, warmth=2, idle_since=2.0),
    )
    assert [step.replica for step in choose_steps(a_plan(3, 0), fleet)] == ["late", "warm", "cold"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # A standby goes before anyone who serves.
        ((*SERVE, Row("s", State.SHUTTING_NULL)), [(ScalingAction.RETIRE, "s")]),
        (SERVE, [(ScalingAction.DRAIN, "d2")]),
        ((SERVE[2],), []),  # the last one
        ((SERVE[2], Row("d3", State.LOADING_DECODE)), []),  # the last one that serves
        (
            (
                Row("a", State.DECODE, load=5, warmth=9),
                Row("b", State.DECODE, load=5, warmth=3),
            ),
            [(ScalingAction.DRAIN, "b")],
        ),
    ],
)
def test_down_takes_the_one_with_the_least_to_lose(
    rows: tuple[Row, ...], expected: list[tuple[ScalingAction, str | None]]
) -> None:
    assert short(choose_steps(a_plan(0, -1), a_fleet(*rows))) == expected


def test_a_standby_that_is_used_is_not_given_back() -> None:
    fleet = a_fleet(*SERVE, Row("s", State.SHUTTING_NULL))
    assert short(choose_steps(a_plan(-1, 1), fleet)) == [
        (ScalingAction.USE_STANDBY, "s"),
        (ScalingAction.DRAIN, "p2"),
    ]


def test_a_standby_expires_longest_idle_first() -> None:
    fleet = a_fleet(
        Row("new", State.SHUTTING_NULL, idle_since=NOW - 1),
        Row("old", State.SHUTTING_NULL, idle_since=NOW - 30),
    )
    assert expired_standby(fleet, NOW, ttl_s=30.0) == Step(ScalingAction.RETIRE, ReplicaId("old"))
    assert expired_standby(fleet, NOW, ttl_s=30.5) is None


rows = st.lists(
    st.builds(
        Row,
        st.integers(0, 10**6).map(str),
        st.sampled_from(State),
        load=st.integers(0, 10),
    ),
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
    deltas: tuple[int, int, Role | None],
    rows: list[Row],
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
