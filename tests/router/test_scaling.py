"""Plans carried out: what the planner is told, and what its steps become."""

import sys
from itertools import pairwise
from typing import Any

import pytest

from tests.support.router_steps import Steps, spec
from vllm_kvpool.router.control.autoscaler import ScalingAction
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import (
    Added,
    Load,
    Loaded,
    Measured,
    Mode,
    Retire,
    Sample,
    Tick,
)
from vllm_kvpool.router.control.planner import equations
from vllm_kvpool.router.control.settings import OverloadConfig, PlannerConfig, Settings
from vllm_kvpool.router.control.states import Cause, ReplicaId, Role, State

P, D = Role.PREFILL, Role.DECODE
ALL_IN = OverloadConfig(ttft_target_s=1e6, max_queue=100_000)


def steps_with(
    spares: int = 0,
    *,
    mode: Mode = Mode.AUTOMATIC,
    settings: Settings | None = None,
    **limits: Any,
) -> Steps:
    planner = PlannerConfig(mode=mode, **limits)
    return Steps(settings, planner=planner, spares=spares, overload=ALL_IN)


def pass_time(steps: Steps, seconds: int) -> None:
    """With metrics of all that serve."""
    for _ in range(seconds):
        steps.tick(1.0)
        for name, state in steps.states().items():
            if state in (State.PREFILL, State.DECODE, State.OLD_PREFILL):
                steps.measure(name, blocks=100_000)


def counts(steps: Steps, role: Role) -> tuple[int, int, int]:
    plan_inputs = steps.controller.scaling._inputs()
    made = plan_inputs.of(role)
    return made.serving, made.loading, made.mutating


# Engines that are started


def test_the_first_engines_have_nobody_to_take_over_from() -> None:
    steps = steps_with(mode=Mode.MANUAL)
    steps.start(P)
    steps.start(P)
    assert list(steps.states().values()) == [State.LOADING_PREFILL] * 2


# What the planner is told


def test_replicas_are_counted_by_what_they_do_and_will_do() -> None:
    steps = steps_with(4, mode=Mode.MANUAL)
    steps.fleet(prefill="a b c", decode="d e f")
    steps.ask("r")
    steps.ask("s", 20)
    steps.set_role(steps.place("r"), D)  # mutating
    steps.set_role(steps.place("s"), P)  # shutting, for prefill
    steps.start(P)
    steps.start(D)
    steps.drain("c")
    steps.set_role("c", P)  # being warmed
    assert counts(steps, P) == (1, 2, 1)
    assert counts(steps, D) == (2, 1, 1)


def test_what_is_drained_failed_or_leaves_is_not_counted() -> None:
    steps = steps_with(mode=Mode.MANUAL)
    steps.fleet(prefill="a b", decode="d e f g")
    steps.drain("b")
    steps.failed("e")
    steps.ask("r", 20)
    steps.remove(steps.place("r"))
    assert counts(steps, P) == (1, 0, 0)
    assert counts(steps, D) == (2, 0, 0)


def test_failed_engine_is_expected_back_if_the_router_starts_it() -> None:
    steps = steps_with(mode=Mode.MANUAL)
    steps.fleet(prefill="p", decode="d e")
    steps.start(D)
    steps.loaded("n-1")
    for name in ("e", "n-1"):
        steps.failed(name)
    steps.tick(1.0)
    assert steps.replica("e").is_retried
    assert steps.replica("n-1").is_retried
    assert counts(steps, D) == (1, 1, 0)
    steps.loaded("e")
    assert counts(steps, D) == (2, 1, 0)
    steps.drain("e")
    steps.controller.lifecycle.expire(steps.replica("e"), "not needed")
    steps.set_role("e", D)  # somebody wants it: it is expected
    assert counts(steps, D) == (1, 2, 0)


def test_the_prompts_that_replicas_are_at_do_not_wait() -> None:
    steps = steps_with(settings=Settings(prefill_requests=2))
    steps.fleet(prefill="p q", decode="d")
    backlog = []
    for number in range(6):
        steps.ask(f"r{number}")
        backlog.append(steps.controller.state.backlog_tokens())
    assert backlog == [0, 0, 1000, 2000, 3000, 4000]


def test_a_moment_is_not_planned_for() -> None:
    steps = steps_with(8)
    steps.fleet(prefill="p", decode="d")
    pass_time(steps, 70)  # what was before is out of the rates
    before = len(steps.states())
    for number in range(4):
        steps.ask(f"r{number}", 8000)
    pass_time(steps, 1)
    assert steps.controller.state.backlog_tokens() == 24_000  # more than one replica's
    for number in range(4):
        steps.prefilled(f"r{number}", "p")
        steps.decoded(f"r{number}", "d")
    pass_time(steps, 10)
    assert len(steps.states()) == before


def test_what_lasts_is_planned_for() -> None:
    steps = steps_with(8, settings=Settings(prefill_requests=1))
    steps.fleet(prefill="p", decode="d")
    for number in range(40):
        steps.ask(f"r{number}", 8000)
    pass_time(steps, 10)
    assert State.NEW_PREFILL in steps.states().values()
    assert steps.controller.scaling.plan is not None
    assert "prefill" in steps.controller.scaling.plan.why


def test_what_is_handed_over_needs_decoders() -> None:
    steps = steps_with(mode=Mode.MANUAL, settings=Settings(max_pending_handoffs=8))
    steps.fleet(prefill="p", decode="d")
    assert steps.controller.scaling._inputs().handoff_tokens_per_s == 0
    for number in range(60):
        steps.ask(f"r{number}", 1000)
        steps.tick(0.99)
        steps.prefilled(f"r{number}", "p")
        steps.tick(0.01)
        steps.began(f"r{number}")
        steps.decoded(f"r{number}", "d")
    inputs = steps.controller.scaling._inputs()
    assert inputs.handoff_tokens_per_s == pytest.approx(1000, rel=0.1)
    (hand_over,) = [each for each in equations(inputs, 1.0) if each.name == "hand-over"]
    assert hand_over.demand >= 1000 / inputs.rates.transfer_tokens_per_s


def test_what_a_draining_replica_decodes_is_still_needed() -> None:
    steps = steps_with(mode=Mode.MANUAL)
    steps.fleet(decode="d e")
    steps.ask("r", 1000)
    blocks = steps.replica(steps.place("r")).work.committed_blocks
    steps.drain(steps.place("r"))
    for _ in range(100):
        steps.tick(1.0)
    assert steps.controller.scaling._inputs().used_blocks == blocks > 0


# Modes and means


@pytest.mark.parametrize("mode", [Mode.MANUAL, Mode.DRY_RUN])
def test_a_plan_is_made_and_shown_but_not_carried_out(mode: Mode) -> None:
    steps = steps_with(1, mode=mode)
    steps.fleet(decode="d")
    assert steps.tick() == []
    assert [each.action for each in steps.controller.scaling.steps] == [ScalingAction.WAKE]
    assert steps.states() == {"s-1": State.INACTIVE, "d": State.DECODE}


def test_a_dry_run_shows_a_step_for_as_long_as_it_is_wanted() -> None:
    """Nobody takes it, so no cooldown hides it."""
    steps = steps_with(1, mode=Mode.DRY_RUN)
    steps.fleet(decode="d")
    assert all(bool(steps.tick() or steps.controller.scaling.steps) for _ in range(10))
    assert steps.states() == {"s-1": State.INACTIVE, "d": State.DECODE}


def test_a_dry_run_shows_steps_down_too() -> None:
    """It remembers since when there are too many."""
    steps = steps_with(mode=Mode.DRY_RUN)
    for name in ("p", "p2", "p3"):
        steps.serve(name, P)
    steps.serve("d", D)
    shown = 0
    for _ in range(150):
        pass_time(steps, 1)
        plan = steps.controller.scaling.plan
        shown += plan is not None and plan.prefill.delta < 0
    assert shown > 5
    assert len(steps.states()) == 4


def test_nothing_is_planned_before_all_that_there_is_has_been_added() -> None:
    steps = steps_with(1)
    for name, role in (("d", D), ("p", P)):
        steps.step(Added(spec=spec(name), role=role))
    steps.loaded("p")
    steps.loaded("d")
    pass_time(steps, 5)
    assert steps.state("s-1") is State.INACTIVE


def test_missing_roles_are_filled() -> None:
    steps = steps_with(1)
    steps.fleet(decode="d")
    assert steps.tick() == [Load("s-1", P)]
    steps.loaded("s-1")
    assert steps.state("s-1") is State.PREFILL


def test_too_many_are_drained_one_by_one_down_to_the_minima() -> None:
    steps = steps_with(min_prefill=1, min_decode=2)
    steps.fleet(prefill="a b c", decode="d e f g")
    pass_time(steps, 600)
    serving = list(steps.states().values())
    assert serving.count(State.PREFILL) == 1
    assert serving.count(State.DECODE) == 2
    assert serving.count(State.INACTIVE) == 4
    fleet = steps.controller.state.fleet
    assert fleet.counts[State.DECODE, Cause.IDLE] == 2
    downs = [
        each.at
        for each in fleet.transitions
        if each.cause in (Cause.IDLE, Cause.DEACTIVATE) and each.after is not State.INACTIVE
    ]
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(downs))


def test_of_engines_at_rest_the_one_that_rested_last_is_woken() -> None:
    steps = steps_with(1)
    steps.fleet(decode="d")
    steps.step(Added(spec=spec("p")))
    assert steps.tick() == [Load("p", P)]


def test_a_standby_that_nobody_needs_is_let_go_after_a_while() -> None:
    steps = steps_with()
    steps.fleet(prefill="p q", decode="d")
    steps.controller.lifecycle.drain(steps.replica("q"), "planned")
    pass_time(steps, 59)
    assert steps.state("q") is State.SHUTTING_NULL
    pass_time(steps, 3)
    assert steps.state("q") is State.INACTIVE
    assert Retire("q") in steps.history


def test_a_standby_is_not_used_and_let_go_at_the_same_time() -> None:
    steps = steps_with()
    steps.fleet(prefill="p q", decode="d")
    steps.controller.lifecycle.drain(steps.replica("q"), "planned")
    steps.tick(0.0)
    steps.now += 62.0
    steps.failed("p")  # in the step in which its time is up
    assert steps.state("q") is State.AUS_PREFILL
    assert [each.action for each in steps.controller.scaling.steps] == [ScalingAction.USE_STANDBY]


@pytest.mark.parametrize("after", [0, 5, 100])
def test_plans_leave_alone_what_a_person_has_drained(after: int) -> None:
    steps = steps_with()
    steps.fleet(prefill="p q", decode="d")
    steps.drain("q")
    pass_time(steps, after)
    steps.failed("p")  # now there is none
    pass_time(steps, 10)
    # It is not used, but after a while it may rest.
    assert steps.state("q") is (State.INACTIVE if after == 100 else State.SHUTTING_NULL)
    steps.set_role("q", P)
    steps.warmed("q")
    steps.loaded("q")
    assert steps.state("q") is State.PREFILL
    steps.loaded("p")
    pass_time(steps, 600)
    assert list(steps.states().values()).count(State.PREFILL) == 1


def test_an_engine_is_started_and_ended_without_end() -> None:
    steps = steps_with(1, mode=Mode.MANUAL)
    steps.fleet(prefill="p", decode="d")
    for _ in range(20):
        assert steps.set_role("s-1", P) == [Load("s-1", P)]
        steps.loaded("s-1")
        steps.drain("s-1")
        steps.controller.lifecycle.expire(steps.replica("s-1"), "not needed")
        assert steps.controller.actions[-1] == Retire(ReplicaId("s-1"))
        steps.tick()
    assert steps.state("s-1") is State.INACTIVE


def calls_in_a_tick(replicas: int) -> int:
    """Of Python functions, while so many replicas serve and a plan and locks are due."""
    controller = Controller(planner=PlannerConfig(mode=Mode.DRY_RUN))
    for number in range(replicas):
        name = f"r{number}"
        controller.step(Added(spec=spec(name), role=P if number % 3 else D), 0.0)
        controller.step(Loaded(ReplicaId(name)), 0.0)
    sample = Sample(total_blocks=1000, used_blocks=900, block_size=16)
    for number in range(replicas):
        controller.step(Measured(ReplicaId(f"r{number}"), sample), 1.0)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    controller.step(Tick(), 2.0)
    sys.setprofile(count)
    try:
        controller.step(Tick(), 3.0)
    finally:
        sys.setprofile(None)
    assert controller.scaling.planned_at == 3.0
    return calls


def test_a_plan_takes_one_short_look_at_each_replica() -> None:
    fewer, more = 64, 512
    assert calls_in_a_tick(more) - calls_in_a_tick(fewer) < 3 * (more - fewer)
