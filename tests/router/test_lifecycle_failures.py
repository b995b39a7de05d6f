"""What happens to a replica that fails, is removed, or is one of ours."""

import pytest

from tests.support.router_steps import Steps, spec
from vllm_kvpool.router.control.events import Added, Load, Outcome, Retire
from vllm_kvpool.router.control.states import ReplicaId, Role, State

P, D = Role.PREFILL, Role.DECODE


@pytest.fixture
def steps() -> Steps:
    return Steps()


def add_ours(steps: Steps, replica_id: str, role: Role) -> None:
    steps.step(Added(spec=spec(replica_id, is_started=True), role=role))


# Failed


def test_a_failed_replica_is_tried_again_after_a_pause(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    assert steps.failed("d") == []
    assert steps.state("d") is State.FAILED
    assert steps.tick(0.9) == []
    assert steps.tick(0.1) == [Load("d", D)]
    steps.loaded("d")
    assert steps.state("d") is State.DECODE


def test_one_end_that_is_told_twice_is_one_failure(steps: Steps) -> None:
    steps.fleet(decode="d")
    steps.failed("d", "exited with 1")
    steps.failed("d", "connection refused")
    steps.failed("d", "connection refused")
    steps.tick(1.0)
    assert steps.state("d") is State.FAILED
    assert steps.replica("d").is_retried
    steps.loaded("d")
    assert steps.state("d") is State.DECODE


def test_failed_replica_that_is_drained_while_it_is_tried_is_given_up(steps: Steps) -> None:
    steps.fleet(decode="d")
    steps.failed("d")
    steps.tick(1.0)
    assert Retire("d") in steps.drain("d")
    assert steps.state("d") is State.INACTIVE
    steps.loaded("d")
    assert steps.state("d") is State.INACTIVE


def test_failed_replica_that_gets_another_role_comes_back_with_it(steps: Steps) -> None:
    steps.fleet(decode="d")
    steps.failed("d")
    steps.tick(1.0)
    steps.set_role("d", P)
    steps.loaded("d")
    assert steps.state("d") is State.PREFILL


def test_a_failed_replica_is_not_tried_again_before_its_calls_have_ended(steps: Steps) -> None:
    steps.fleet(decode="d")
    steps.ask("r", 20)
    steps.failed("d")
    steps.tick(5.0)
    assert steps.state("d") is State.FAILED
    assert Load("d", D) in steps.decoded("r", "d", Outcome.CANCELLED)


def test_a_replica_that_keeps_failing_is_left_alone_for_longer_and_longer(steps: Steps) -> None:
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
    assert pauses[0] >= 4.0
    assert pauses[0] < pauses[1] < pauses[2]


def test_a_load_that_fails_is_a_failure(steps: Steps) -> None:
    steps.step(Added(spec=spec("x"), role=P))
    steps.failed("x", "not loaded in time")
    assert steps.state("x") is State.FAILED
    assert steps.tick(1.0) == [Load("x", P)]


def test_a_late_answer_to_a_load_that_was_given_up_does_no_harm(steps: Steps) -> None:
    """One that says that it failed costs another try; one that says that it is there is right."""
    steps.step(Added(spec=spec("x"), role=P))
    steps.set_role("x", D)
    steps.failed("x", "given up")
    assert steps.tick(1.0) == [Load("x", D)]
    steps.set_role("x", P)
    steps.loaded("x")
    assert steps.state("x") is State.PREFILL
    steps.loaded("x")
    assert steps.state("x") is State.PREFILL


def test_a_drained_replica_that_fails_does_not_come_back_by_itself(steps: Steps) -> None:
    steps.fleet(prefill="p q", decode="d")
    steps.drain("q")
    steps.failed("q")
    assert steps.tick(5.0) == [Retire("q")]
    assert steps.state("q") is State.INACTIVE
    assert steps.set_role("q", D) == [Load("q", D)]


def test_nor_does_one_that_fails_while_it_is_drained(steps: Steps) -> None:
    steps.fleet(decode="d e")
    [call] = steps.ask("r", 20)
    steps.drain(call.replica)
    steps.failed(call.replica)
    steps.decoded("r", call.replica, Outcome.CANCELLED)
    steps.tick(5.0)
    assert steps.state(call.replica) is State.INACTIVE


def test_a_failed_replica_can_be_drained_and_wanted_again(steps: Steps) -> None:
    steps.fleet(prefill="p q", decode="d")
    steps.failed("q")
    steps.drain("q")
    steps.set_role("q", P)
    assert steps.tick(5.0) == [Load("q", P)]
    steps.failed("q")
    steps.drain("q")
    assert steps.tick(5.0) == [Retire("q")]
    assert steps.state("q") is State.INACTIVE


def test_a_failed_replica_comes_back_in_the_role_that_it_is_wanted_for(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    steps.failed("d")
    steps.set_role("d", P)
    assert steps.tick(1.0) == [Load("d", P)]


def test_a_flip_that_fails_half_way_is_tried_again_towards_its_goal(steps: Steps) -> None:
    steps.fleet(decode="d e")
    [call] = steps.ask("r", 20)
    steps.set_role(call.replica, P)
    steps.failed(call.replica)
    steps.decoded("r", call.replica, Outcome.FAILED)
    assert Load(call.replica, P) in steps.tick(5.0)


def test_nor_is_its_goal_forgotten_on_the_way_through_decode(steps: Steps) -> None:
    steps.serve("p", P)
    steps.ask("whole", 20)
    steps.serve("d", D)
    steps.ask("r")
    steps.set_role("p", D)
    steps.set_role("p", P)
    steps.prefilled("r", "p")
    assert steps.state("p") is State.SHUTTING_DECODE
    steps.failed("p")
    steps.decoded("whole", "p", Outcome.CANCELLED)
    assert Load("p", P) in steps.tick(1.0)


def test_what_an_engine_said_before_it_failed_is_forgotten(steps: Steps) -> None:
    steps.serve("d", D)
    steps.measure("d", used=900)
    steps.failed("d")
    assert steps.replica("d").work.used_blocks == 0


def test_metrics_of_a_failed_engine_do_not_bring_it_back(steps: Steps) -> None:
    steps.fleet(decode="d")
    steps.failed("d")
    steps.measure("d")
    assert steps.state("d") is State.FAILED


# Removed


def test_a_replica_is_removed_once_it_has_no_work(steps: Steps) -> None:
    steps.fleet(decode="d e")
    [call] = steps.ask("r", 20)
    assert steps.remove(call.replica) == []
    assert steps.decoded("r", call.replica) == [Retire(call.replica, forget=True)]
    assert call.replica not in steps.states()


@pytest.mark.parametrize("name", ["inactive", "loading", "standby", "failed", "serving"])
def test_a_replica_can_be_removed_wherever_it_stands(steps: Steps, name: str) -> None:
    steps.fleet(decode="d")
    steps.step(Added(spec=spec("x"), role=None if name == "inactive" else P))
    if name not in ("inactive", "loading"):
        steps.loaded("x")
    if name == "standby":
        steps.drain("x")
    if name == "failed":
        steps.failed("x")
    assert steps.remove("x") == [Retire("x", forget=True)]
    assert steps.states() == {"d": State.DECODE}


def test_a_failed_replica_is_removed_once_its_calls_have_ended(steps: Steps) -> None:
    steps.fleet(decode="d e")
    [call] = steps.ask("r", 20)
    steps.failed(call.replica)
    assert steps.remove(call.replica) == []
    steps.tick(5.0)
    assert steps.state(call.replica) is State.FAILED
    done = steps.decoded("r", call.replica, Outcome.FAILED)
    assert Retire(call.replica, forget=True) in done


def test_a_mutating_replica_is_removed_after_its_last_prompt(steps: Steps) -> None:
    steps.fleet(prefill="p q", decode="d")
    steps.ask("r")
    steps.set_role("p", D)
    steps.remove("p")
    steps.prefilled("r", "p")
    steps.tick()
    assert "p" not in steps.states()


def test_a_replica_to_be_removed_gets_no_role(steps: Steps) -> None:
    steps.fleet(prefill="p q", decode="d")
    steps.ask("r")
    steps.remove("p")
    steps.set_role("p", P)
    assert steps.state("p") is State.SHUTTING_PREFILL
    steps.prefilled("r", "p")
    steps.tick()
    assert "p" not in steps.states()


# Engines that the router starts and ends


@pytest.mark.parametrize("is_loaded", [False, True])
def test_engine_that_is_let_go_is_ended_and_can_be_started_again(
    steps: Steps, is_loaded: bool
) -> None:
    steps.fleet(prefill="p", decode="d")
    add_ours(steps, "ours", P)
    if is_loaded:
        steps.loaded("ours")
        steps.drain("ours")
        assert steps.state("ours") is State.SHUTTING_NULL  # a standby
        steps.controller.lifecycle.expire(steps.replica("ours"), "not needed")
        assert steps.controller.actions[-1] == Retire(ReplicaId("ours"))
    else:
        assert steps.drain("ours") == [Retire("ours")]
    assert steps.state("ours") is State.INACTIVE
    assert steps.set_role("ours", D) == [Load("ours", D)]


def test_engine_that_fails_is_started_again(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    add_ours(steps, "ours", P)
    steps.loaded("ours")
    steps.failed("ours")
    assert steps.tick(1.0) == [Load("ours", P)]


def test_engine_that_fails_unwanted_is_ended(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    add_ours(steps, "ours", P)
    steps.loaded("ours")
    steps.drain("ours")
    steps.failed("ours")
    assert steps.tick(1.0) == [Retire("ours")]
    assert steps.state("ours") is State.INACTIVE


def test_engine_that_is_removed_is_ended_and_forgotten(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    add_ours(steps, "ours", P)
    steps.loaded("ours")
    assert Retire("ours", forget=True) in [*steps.remove("ours"), *steps.tick()]
    assert "ours" not in steps.states()
