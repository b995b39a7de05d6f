"""The lifecycle of a replica: load, use, flip, drain, failure, removal, start and end."""

from dataclasses import replace

import pytest

from tests.router.scripts import Example, examples
from tests.support.router_invariants import check_controller
from tests.support.router_steps import Steps, spec
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.events import ASKED_BY_ADMIN, Abort, Added, Outcome, ReplicaSpec
from vllm_kvpool.router.control.settings import Settings
from vllm_kvpool.router.control.states import Role, State


@examples(
    """
replica that is added for {prefill|decode} is loaded and serves
    add x {} -> load x {}; loaded x -> nothing; state x {}
    # It is told twice.
    loaded x -> nothing; state x {}
replica without a role waits for one
    add x -> nothing; state x inactive; set x decode -> load x decode
event of a replica that has left is ignored
    fleet / x d; remove x -> retire x forget; loaded x -> nothing; failed x -> nothing
    warmed x -> nothing; measure x -> nothing; drain x -> nothing; remove x -> nothing
    set x prefill -> nothing
"""
)
def test_added_replica(example: Example) -> None:
    example.play()


@pytest.mark.parametrize("twin", [spec("x"), replace(spec("y"), url="http://x")])
def test_replica_is_added_once(twin: ReplicaSpec) -> None:
    steps = Steps()
    steps.fleet(prefill="x")
    with pytest.raises(ConfigError, match="x at http://x is there already"):
        steps.step(Added(spec=twin, role=Role.DECODE))
    check_controller(steps.controller)
    assert steps.states() == {"x": State.PREFILL}


MUTATES = "fleet p q / d; ask r; set p decode; state p prefill_to_decode"
FLUSHED = "prefilled r p; decoded r d; tick"
STUCK = "fleet p q; serve d decode blocks=100; ask first 1360 16 hands_over=False; ask r"


@examples(
    f"""
flip from prefill waits for its prompts alone
    fleet p q / d; ask r -> prefill r p; set p decode -> nothing; state p prefill_to_decode
    prefilled r p; state p decode
flip from decode is drained and warmed
    fleet / d e; ask r 20 -> decode r d; set d prefill; state d draining_decode; began r
    decoded r d -> warm d; state d warming_prefill; ask short 20 -> decode short e
    warmed d; state d prefill
standby is warmed before it serves
    fleet p q / d; drain q; set q decode -> warm q; state q warming_decode; warmed q
    state q decode
replica that shuts is revived: prefill
    fleet p / d; ask r; state p prefill; drain p; set p prefill; state p prefill
replica that shuts is revived: decode
    fleet p / d; ask r 20; state d decode; drain d; set d decode; state d decode
prefill replica that shuts takes another role once it is empty
    fleet p / d; ask r; drain p; set p decode -> nothing; prefilled r p -> ... warm p
    state p warming_decode
decode replica that shuts takes another role once it is empty
    fleet p / d; ask r 20; drain d; set d prefill -> nothing; decoded r d -> ... warm d
    state d warming_prefill
the last word counts while a replica mutates: drain
    {MUTATES}; drain p; state p prefill_to_decode; {FLUSHED}; state p standby
the last word counts while a replica mutates: prefill
    {MUTATES}; set p prefill; state p prefill_to_decode; {FLUSHED}; state p warming_prefill
the last words count while a replica mutates: {{drain: drain p|prefill: set p prefill}}, decode
    {MUTATES}; {{}}; state p prefill_to_decode; set p decode; state p prefill_to_decode
    prefilled r p; decoded r p; tick; state p decode
the last words count while a replica mutates: prefill, drain
    {MUTATES}; set p prefill; state p prefill_to_decode; drain p; state p prefill_to_decode
    {FLUSHED}; state p standby
the last words count while a replica mutates: drain, prefill
    {MUTATES}; drain p; state p prefill_to_decode; set p prefill; state p prefill_to_decode
    {FLUSHED}; state p warming_prefill
loading replica can be wanted for another role
    add x prefill; set x prefill -> nothing; set x decode -> load x decode; loaded x
    state x decode
replica that is warmed can be wanted again
    fleet p q / d; drain q; set q prefill; set q prefill; state q warming_prefill; warmed q
replica that is warmed can be wanted for another role
    fleet p q / d; drain q; set q prefill; set q decode; state q decode
    assert 'mutate' in [x.value for _, x in state.fleet.counts]; warmed q
"""
)
def test_role_of_a_replica(example: Example) -> None:
    example.play()


@examples(
    f"""
drained replica finishes the requests that it has
    fleet p / d e; ask r 20 -> decode r d; drain d; began r; tick; state d draining_decode
    ask s 20 -> decode s e; decoded r d; state d standby
prefill replica is let go when others have the prompts that it has computed
    {STUCK}; drain p; prefilled r p; state p draining_prefill
    decoded first d -> ... decode r d; state p standby
prefill replica does not wait for that for ever
    with drain_timeout_s=10
    {STUCK}; drain p; prefilled r p; tick 10; state p standby
request that a prefill replica decodes is sent away too
    with drain_timeout_s=10
    fleet p /; ask r 20; began r; serve q prefill; drain p; tick 10 -> abort r p
    decoded r p cancelled -> decode r q; state p standby
drain does not send away a request that no other replica can take
    with drain_timeout_s=10
    fleet / d; ask r 20; began r; drain d; tick 11 -> nothing; serve e decode
    assert [x.replica for x in steps.history if type(x).__name__ == 'Abort'] == ['d']
    decoded r d cancelled; state d standby
loading {{prefill|decode}} replica is given up
    add x {{}}; drain x -> retire x; state x inactive; loaded x -> nothing; state x inactive
replica that is warmed for {{prefill|decode}} is drained at once
    fleet p q / d; drain q; set q {{}}; drain q; state q standby
"""
)
def test_drained_replica(example: Example) -> None:
    example.play()


def test_drain_waits_longer_for_a_request_that_no_other_replica_can_go_on_with() -> None:
    steps = Steps(Settings(drain_timeout_s=10.0, answer_timeout_s=60.0))
    steps.fleet(decode="d")
    steps.ask("movable", 20)
    asked: list[float] = []

    def goes_on() -> bool:
        asked.append(steps.now)
        return False

    steps.ask("bound", 20, goes_on_elsewhere=goes_on)
    for request in ("movable", "bound"):
        steps.began(request)
    steps.serve("e", Role.DECODE)
    steps.drain("d")
    assert asked == []
    assert steps.tick(10.0) == [Abort("movable", "d")]
    steps.decoded("movable", "d", Outcome.CANCELLED)
    assert steps.tick(49.0) == []
    assert steps.tick(1.0) == [Abort("bound", "d")]
    assert len(asked) == 1  # looking at all its messages takes long
    steps.decoded("bound", "d", Outcome.HOPELESS)
    assert steps.state("d") is State.SHUTTING_NULL


def test_replicas_of_the_configuration_are_not_called_the_administrators() -> None:
    steps = Steps()
    steps.fleet(prefill="p", decode="d")
    whys = {each.why for each in steps.controller.state.fleet.transitions}
    assert whys
    assert not any("administrator" in each for each in whys)
    steps.set_role("p", Role.DECODE)
    assert ASKED_BY_ADMIN in {each.why for each in steps.controller.state.fleet.transitions}


@examples(
    """
failed replica is tried again after a pause
    fleet p / d; failed d -> nothing; state d failed; tick 0.9 -> nothing
    tick 0.1 -> load d decode; loaded d; state d decode
end that is told twice is one failure
    fleet / d; failed d exited; failed d refused; failed d refused; tick; state d failed
    assert steps.replica('d').is_retried; loaded d; state d decode
failed replica that is drained while it is tried is given up
    fleet / d; failed d; tick; drain d -> ... retire d; state d inactive; loaded d
    state d inactive
failed replica that gets another role while it is tried comes back with it
    fleet / d; failed d; tick; set d prefill; loaded d; state d prefill
failed replica that gets another role comes back with it
    fleet p / d; failed d; set d prefill; tick -> load d prefill
failed replica is not tried again before its calls have ended
    fleet / d; ask r 20; failed d; tick 5; state d failed
    decoded r d cancelled -> ... load d decode
load that fails is a failure
    add x prefill; failed x late; state x failed; tick -> load x prefill
late answer to a load that was given up does no harm
    # One that says that it failed costs another try; one that says that it is there is right.
    add x prefill; set x decode; failed x late; tick -> load x decode; set x prefill; loaded x
    state x prefill; loaded x; state x prefill
drained replica that fails does not come back by itself
    fleet p q / d; drain q; failed q; tick 5 -> retire q; state q inactive
    set q decode -> load q decode
replica that fails while it is drained does not come back by itself
    fleet / d e; ask r 20 -> decode r d; drain d; failed d; decoded r d cancelled; tick 5
    state d inactive
failed replica can be drained and wanted again
    fleet p q / d; failed q; drain q; set q prefill; tick 5 -> load q prefill; failed q; drain q
    tick 5 -> retire q; state q inactive
flip that fails half way is tried again towards its goal
    fleet / d e; ask r 20 -> decode r d; set d prefill; failed d; decoded r d failed
    tick 5 -> ... load d prefill
goal of a flip is not forgotten on the way through decode
    serve p prefill; ask whole 20; serve d decode; ask r; set p decode; set p prefill
    prefilled r p; state p draining_decode; failed p; decoded whole p cancelled
    tick -> ... load p prefill
sample of an engine that has failed is forgotten, and a later one does not bring it back
    serve d decode; measure d used=900; failed d; assert work('d').used_blocks == 0
    measure d; state d failed
"""
)
def test_failed_replica(example: Example) -> None:
    example.play()


def test_replica_that_keeps_failing_is_left_alone_for_longer_and_longer() -> None:
    steps = Steps()
    steps.fleet(decode="d")
    pauses = []
    for _ in range(3):
        while steps.state("d") is not State.QUARANTINED:
            steps.failed("d")
            if steps.state("d") is State.FAILED:
                steps.tick(1.0)
        since = steps.now
        while steps.state("d") is State.QUARANTINED:
            assert steps.failed("d") == []
            steps.tick(0.5)
        pauses.append(steps.now - since)
    assert 4.0 <= pauses[0] < pauses[1] < pauses[2]


@examples(
    """
replica is removed once it has no work
    fleet / d e; ask r 20 -> decode r d; remove d -> nothing
    decoded r d -> retire d forget; state d gone
inactive replica is removed
    fleet / d; add x; remove x -> retire x forget; state x gone; state d decode
{loading: state x loading_prefill|serving: loaded x|standby: loaded x; drain x} replica is removed
    fleet / d; add x prefill; {}; remove x -> retire x forget; state x gone; state d decode
failed replica is removed
    fleet / d; add x prefill; loaded x; failed x; remove x -> retire x forget; state x gone
failed replica is removed once its calls have ended
    fleet / d e; ask r 20 -> decode r d; failed d; remove d -> nothing; tick 5; state d failed
    decoded r d failed -> ... retire d forget
mutating replica is removed after its last prompt
    fleet p q / d; ask r; set p decode; remove p; prefilled r p; tick; state p gone
replica to be removed gets no role
    fleet p q / d; ask r; remove p; set p prefill; state p draining_prefill; prefilled r p; tick
    state p gone
"""
)
def test_removed_replica(example: Example) -> None:
    example.play()


OURS = "fleet p / d; add ours prefill is_started=True"


@examples(
    f"""
engine that is let go while it loads is ended and can be started again
    {OURS}; drain ours -> retire ours; state ours inactive; set ours decode -> load ours decode
engine that is let go is ended as its time as a standby is up, and can be started again
    {OURS}; loaded ours; drain ours; state ours standby; expire ours -> retire ours
    state ours inactive; set ours decode -> load ours decode
engine that fails is started again
    {OURS}; loaded ours; failed ours; tick -> load ours prefill
engine that fails unwanted is ended
    {OURS}; loaded ours; drain ours; failed ours; tick -> retire ours; state ours inactive
engine that is removed is ended and forgotten
    {OURS}; loaded ours; remove ours -> retire ours forget; tick; state ours gone
"""
)
def test_engine_that_the_router_starts(example: Example) -> None:
    example.play()
