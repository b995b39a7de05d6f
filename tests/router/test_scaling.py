"""Plans carried out: what the planner is told, and what its steps become."""

import sys
from itertools import pairwise

import pytest

from tests.router.scripts import Example, examples, pass_time
from tests.support.router_steps import Steps, spec
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.events import Added, Measured, Mode, ReplicaLoaded, Sample, Tick
from vllm_kvpool.router.control.planner import equations
from vllm_kvpool.router.control.settings import OverloadConfig, PlannerConfig, Settings
from vllm_kvpool.router.control.states import Cause, ReplicaId, Role, State

P, D = Role.PREFILL, Role.DECODE
ALL_IN = OverloadConfig(ttft_target_s=1e6, max_queue=100_000)
GIVEN = "ttft_target_s=1e6 max_queue=100000 mode=automatic"


def steps_with(mode: Mode = Mode.AUTOMATIC, **more: int) -> Steps:
    return Steps(planner=PlannerConfig(mode=mode, **more), overload=ALL_IN)


@examples(
    """
first engines have no other to take over from
    start prefill; start prefill; state n-1 loading_prefill; state n-2 loading_prefill
replicas are counted by the role that they have and will have
    with spares=4
    fleet a b c / d e f; ask r; ask s 20; place r a; place s d
    # Draining towards the other role, being warmed and loading.
    set a decode; set d prefill; start prefill; start decode; drain c; set c prefill
    counted_as prefill 1 3; counted_as decode 2 2
replica that is drained, has failed or leaves is not counted
    fleet a b / d e f g; drain b; failed e; ask r 20; place r d; remove d
    counted_as prefill 1 0; counted_as decode 2 0
failed engine is expected back if the router starts it
    fleet p / d e; start decode; loaded n-1; failed e; failed n-1; tick
    assert steps.replica('e').is_retried; assert steps.replica('n-1').is_retried
    counted_as decode 1 1; loaded e; counted_as decode 2 1; drain e; expire e
    # Somebody wants it: it is expected.
    set e decode; counted_as decode 1 2
prompts that replicas are at do not wait
    with prefill_requests=2
    fleet p q / d
    each 0 1: ask r$; assert state.backlog_tokens() == 0
    each 1-4: ask s$; assert state.backlog_tokens() == 1000 * $
requests that a draining replica decodes are still needed
    fleet / d e; ask r 1000; place r d; drain d
    each 0-99: tick
    assert scaling._inputs().used_blocks == work('d').committed_blocks > 0
""",
    given=f"{GIVEN} mode=manual",
)
def test_inputs_of_the_planner(example: Example) -> None:
    example.play()


def test_block_tokens_are_those_of_engines_that_serve_now() -> None:
    steps = steps_with(Mode.MANUAL)
    steps.fleet(prefill="p", decode="d e")
    large = Sample(total_blocks=1000, block_size=256)
    steps.step(Measured(ReplicaId("e"), large))
    assert steps.controller.scaling._inputs().block_tokens == 256
    steps.remove("e")
    assert steps.controller.scaling._inputs().block_tokens == 16


def test_hand_overs_need_decoders() -> None:
    steps = Steps(Settings(max_pending_handoffs=8), overload=ALL_IN)
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


@examples(
    """
moment is not planned for
    with spares=8
    fleet p / d; pass 70
    # What was before is out of the rates. More than one replica's work waits.
    each 0-3: ask r$ 8000
    pass 1; assert state.backlog_tokens() == 24_000
    each 0-3: prefilled r$ p; decoded r$ d
    pass 10; assert len(steps.states()) == 10
load that lasts is planned for
    with spares=8 prefill_requests=1
    fleet p / d
    each 0-39: ask r$ 8000
    pass 10; assert 'loading_prefill_assigned' in [x.value for x in steps.states().values()]
    assert 'prefill' in scaling.plan.why
plan is made and shown but not carried out: {manual|dry_run}
    with mode={} spares=1
    fleet / d; tick -> nothing; assert [x.action.value for x in scaling.steps] == ['wake']
    state s-1 inactive; state d decode
dry run shows a step for as long as it is wanted
    # It is not taken, so no cooldown hides it.
    with mode=dry_run spares=1
    fleet / d
    each 0-9: tick -> nothing; assert scaling.steps
    state s-1 inactive; state d decode
nothing is planned before all replicas that there are have been added
    with spares=1
    add d decode; add p prefill; loaded p; loaded d; pass 5; state s-1 inactive
missing roles are filled
    with spares=1
    fleet / d; tick -> load s-1 prefill; loaded s-1; state s-1 prefill
of engines at rest the one that rested last is woken
    with spares=1
    fleet / d; add p; tick -> load p prefill
standby that is not needed is let go after a while
    fleet p q / d; plan_drains q; pass 59; state q standby; pass 3; state q inactive
    assert [x.replica for x in steps.history if type(x).__name__ == 'Retire'] == ['q']
standby is not used and let go at the same time
    # The other fails in the step in which its time is up.
    fleet p q / d; plan_drains q; tick 0; wait 62; failed p; state q warming_prefill
    assert [x.action.value for x in scaling.steps] == ['use standby']
plans leave alone a replica that a person has drained for {0|5} s
    fleet p q / d; drain q; pass {}; failed p; pass 10; state q standby; set q prefill; warmed q
    loaded q; state q prefill; loaded p; pass 600
    assert [x.value for x in steps.states().values()].count('prefill') == 1
replica that a person has drained is not used, but after a while it may rest
    fleet p q / d; drain q; pass 100; failed p; pass 10; state q inactive; set q prefill; warmed q
    loaded q; state q prefill; loaded p; pass 600
    assert [x.value for x in steps.states().values()].count('prefill') == 1
engine is started and ended without end
    with mode=manual spares=1
    fleet p / d
    each 0-19: set s-1 prefill -> load s-1 prefill; loaded s-1; drain s-1
        ; expire s-1 -> retire s-1; tick
    state s-1 inactive
""",
    given=GIVEN,
)
def test_plan(example: Example) -> None:
    example.play()


def test_dry_run_shows_steps_down_too() -> None:
    """The planner remembers since when replicas are too many, in a dry run as well."""
    steps = steps_with(Mode.DRY_RUN)
    steps.fleet(prefill="p p2 p3", decode="d")
    shown = 0
    for _ in range(150):
        pass_time(steps, 1)
        plan = steps.controller.scaling.plan
        shown += plan is not None and plan.prefill.delta < 0
    assert shown > 5
    assert len(steps.states()) == 4


def test_too_many_are_drained_one_by_one_down_to_the_minima() -> None:
    steps = steps_with(min_prefill=1, min_decode=2)
    steps.fleet(prefill="a b c", decode="d e f g")
    pass_time(steps, 600)
    serving = list(steps.states().values())
    assert [serving.count(each) for each in (State.PREFILL, State.DECODE, State.INACTIVE)] == [
        *(1, 2, 4)
    ]
    fleet = steps.controller.state.fleet
    assert fleet.counts[State.DECODE, Cause.DEACTIVATE] == 2
    downs = [each.at for each in fleet.transitions if each.cause is Cause.DEACTIVATE]
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(downs))


def calls_in_a_tick(replicas: int) -> int:
    """Return the Python function calls of a tick in which a plan and locks are due."""
    controller = Controller(planner=PlannerConfig(mode=Mode.DRY_RUN))
    for number in range(replicas):
        name = f"r{number}"
        controller.step(Added(spec=spec(name), role=P if number % 3 else D), 0.0)
        controller.step(ReplicaLoaded(ReplicaId(name)), 0.0)
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
