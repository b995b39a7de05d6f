"""By which means a plan is carried out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.router.control.autoscaler import (
    SERVING,
    FleetSnapshot,
    Host,
    ReplicaRow,
    ScalingAction,
    Standing,
    Step,
    choose_steps,
    expired_standby,
    spared,
)
from vllm_kvpool.router.control.planner import Plan, Wanted
from vllm_kvpool.router.control.states import ReplicaId, Role

NOW = 1000.0
P, D = Role.PREFILL, Role.DECODE


def a_plan(prefill: int, decode: int, flip_to: Role | None = None) -> Plan:
    return Plan(Wanted(4, 4 + prefill), Wanted(4, 4 + decode), flip_to, "", (), "")


def row(name: str, standing: Standing, **fields: float) -> ReplicaRow:
    return ReplicaRow(ReplicaId(name), standing, **fields)  # type: ignore[arg-type]


def a_fleet(*rows: ReplicaRow, hosts: tuple[Host, ...] = ()) -> FleetSnapshot:
    return FleetSnapshot(NOW, rows, hosts)


def short(steps: list[Step]) -> list[tuple[ScalingAction, str | None]]:
    return [(step.means, step.replica or step.host) for step in steps]


SERVE = (
    row("p1", Standing.SERVING_PREFILL, load=500.0),
    row("p2", Standing.SERVING_PREFILL, load=100.0),
    row("d1", Standing.SERVING_DECODE, load=70.0),
    row("d2", Standing.SERVING_DECODE, load=0.0),
)
ALL_MEANS = a_fleet(
    *SERVE,
    row("broken", Standing.BROKEN),
    row("asleep", Standing.SLEEPING),
    row("ready", Standing.STANDBY),
    row("leaving p", Standing.SHUTTING_PREFILL),
    row("leaving d", Standing.SHUTTING_DECODE),
    hosts=(Host("h", 1),),
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
                *((ScalingAction.WAKE, "asleep"), (ScalingAction.SPAWN, "h")),
            ],
        ),
        (
            a_plan(9, -1, flip_to=P),
            [
                *((ScalingAction.REVIVE, "leaving p"), (ScalingAction.USE_STANDBY, "ready")),
                *(
                    (ScalingAction.FLIP, "d2"),
                    (ScalingAction.WAKE, "asleep"),
                    (ScalingAction.SPAWN, "h"),
                ),
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
def test_up_takes_the_cheapest_means_first(
    plan: Plan, expected: list[tuple[ScalingAction, str | None]]
) -> None:
    assert short(choose_steps(plan, ALL_MEANS)) == expected


def test_a_flip_names_its_way() -> None:
    fleet = a_fleet(*SERVE)
    assert choose_steps(a_plan(-1, 1, flip_to=D), fleet) == [
        Step(ScalingAction.FLIP, D, ReplicaId("p2"), via=Standing.MUTATING)
    ]
    assert choose_steps(a_plan(1, -1, flip_to=P), fleet) == [
        Step(ScalingAction.FLIP, P, ReplicaId("d2"), via=Standing.SHUTTING_DECODE)
    ]


def test_the_warmest_is_used_first() -> None:
    fleet = a_fleet(
        row("cold", Standing.STANDBY, warmth=1.0, idle_since=999.0),
        row("warm", Standing.STANDBY, warmth=2.0, idle_since=1.0),
        row("late", Standing.STANDBY, warmth=2.0, idle_since=2.0),
    )
    assert [step.replica for step in choose_steps(a_plan(3, 0), fleet)] == ["late", "warm", "cold"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # A standby goes before anyone who serves.
        ((*SERVE, row("s", Standing.STANDBY)), [(ScalingAction.RETIRE, "s")]),
        (SERVE, [(ScalingAction.DRAIN, "d2")]),
        ((SERVE[2],), []),  # the last one
        ((SERVE[2], row("d3", Standing.LOADING_DECODE)), []),  # the last one that serves
        (
            (
                row("a", Standing.SERVING_DECODE, load=5.0, warmth=9.0),
                row("b", Standing.SERVING_DECODE, load=5.0, warmth=3.0),
            ),
            [(ScalingAction.DRAIN, "b")],
        ),
    ],
)
def test_down_takes_the_one_with_the_least_to_lose(
    rows: tuple[ReplicaRow, ...], expected: list[tuple[ScalingAction, str | None]]
) -> None:
    assert short(choose_steps(a_plan(0, -1), a_fleet(*rows))) == expected


def test_a_standby_that_is_used_is_not_given_back() -> None:
    fleet = a_fleet(*SERVE, row("s", Standing.STANDBY))
    assert short(choose_steps(a_plan(-1, 1), fleet)) == [
        (ScalingAction.USE_STANDBY, "s"),
        (ScalingAction.DRAIN, "p2"),
    ]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ((), []),
        ((Host("a", 0),), []),
        ((Host("a", 1), Host("b", 3)), ["b", "b"]),
        ((Host("b", 1), Host("a", 1)), ["a", "b"]),
    ],
)
def test_engines_start_where_most_room_is(hosts: tuple[Host, ...], expected: list[str]) -> None:
    steps = choose_steps(a_plan(2, 0), a_fleet(*SERVE, hosts=hosts))
    assert {step.means for step in steps} <= {ScalingAction.SPAWN}
    assert [step.host for step in steps] == expected


def test_a_standby_expires_longest_idle_first() -> None:
    fleet = a_fleet(
        row("new", Standing.STANDBY, idle_since=NOW - 1),
        row("old", Standing.STANDBY, idle_since=NOW - 30),
    )
    assert expired_standby(fleet, ttl_s=30.0) == Step(
        ScalingAction.RETIRE, replica=ReplicaId("old")
    )
    assert expired_standby(fleet, ttl_s=30.5) is None


rows = st.lists(
    st.builds(
        ReplicaRow,
        st.integers(0, 10**6).map(lambda number: ReplicaId(str(number))),
        st.sampled_from(Standing),
        load=st.floats(0, 10),
    ),
    max_size=20,
    unique_by=lambda one: one.replica,
).map(tuple)
hosts = st.lists(
    st.builds(
        Host,
        st.sampled_from("abc"),
        st.integers(0, 3),
    ),
    max_size=3,
    unique_by=lambda host: host.name,
).map(tuple)


@given(
    st.sampled_from(
        [(3, 0, None), (0, 5, None), (2, 2, None), (-1, 3, D), (2, -1, P), (-1, 0, None)]
    ),
    rows,
    hosts,
)
def test_steps_are_no_more_than_planned_and_take_nothing_twice(
    deltas: tuple[int, int, Role | None],
    rows: tuple[ReplicaRow, ...],
    hosts: tuple[Host, ...],
) -> None:
    fleet = FleetSnapshot(NOW, rows, hosts)
    plan = a_plan(*deltas)
    steps = choose_steps(plan, fleet)
    taken = [step.replica for step in steps if step.replica]
    assert len(taken) == len(set(taken))
    ups = [step for step in steps if step.means not in (ScalingAction.DRAIN, ScalingAction.RETIRE)]
    for role in Role:
        assert sum(step.role is role for step in ups) <= max(0, plan.of(role).delta)
        lost = [
            step
            for step in steps
            if (step.means is ScalingAction.FLIP and step.role is role.other)
            or (step.means is ScalingAction.DRAIN and step.role is role)
        ]
        assert len(lost) < max(2, len(fleet.standing(SERVING[role])))
        assert not lost or len(fleet.standing(SERVING[role])) > 1


def test_none_is_spared_where_none_serves() -> None:
    assert spared(P, a_fleet()) is None
