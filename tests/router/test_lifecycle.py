"""What happens to a replica: loaded, used, flipped, drained."""

import pytest

from tests.support.router_invariants import check_controller
from tests.support.router_steps import Steps, spec
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.events import (
    ASKED_BY_ADMIN,
    Abort,
    Added,
    Decode,
    Load,
    Outcome,
    Prefill,
    Retire,
    Warm,
)
from vllm_kvpool.router.control.settings import Settings
from vllm_kvpool.router.control.states import Cause, Role, State

P, D = Role.PREFILL, Role.DECODE


@pytest.fixture
def steps() -> Steps:
    return Steps()


# Added and loaded


@pytest.mark.parametrize(("role", "state"), [(P, State.PREFILL), (D, State.DECODE)])
def test_a_replica_that_is_added_is_loaded_and_serves(
    steps: Steps, role: Role, state: State
) -> None:
    assert steps.step(Added(spec=spec("x"), role=role)) == [Load("x", role)]
    assert steps.loaded("x") == []
    assert steps.state("x") is state
    assert steps.loaded("x") == []  # told twice
    assert steps.state("x") is state


def test_a_replica_without_a_role_waits_for_one(steps: Steps) -> None:
    assert steps.step(Added(spec=spec("x"))) == []
    assert steps.state("x") is State.INACTIVE
    assert steps.set_role("x", D) == [Load("x", D)]


@pytest.mark.parametrize("again", [spec("x"), spec("y")])
def test_a_replica_is_added_once(steps: Steps, again: object) -> None:
    steps.fleet(prefill="x")
    made = spec("y")
    twin = type(made)(replica_id=made.replica_id, url="http://x") if again == made else spec("x")
    with pytest.raises(ConfigError, match="x at http://x is there already"):
        steps.step(Added(spec=twin, role=D))
    check_controller(steps.controller)
    assert steps.states() == {"x": State.PREFILL}


def test_an_event_of_a_replica_that_has_left_is_ignored(steps: Steps) -> None:
    steps.fleet(decode="x d")
    assert steps.remove("x") == [Retire("x", forget=True)]
    assert steps.loaded("x") + steps.failed("x") + steps.warmed("x") + steps.measure("x") == []
    assert steps.drain("x") + steps.remove("x") + steps.set_role("x", P) == []


# Roles


def test_a_flip_from_prefill_waits_for_its_prompts_alone(steps: Steps) -> None:
    steps.fleet(prefill="p q", decode="d")
    assert steps.ask("r") == [Prefill("r", "p")]
    assert steps.set_role("p", D) == []
    assert steps.state("p") is State.MUTATING_TO_DECODE
    steps.prefilled("r", "p")
    assert steps.state("p") is State.DECODE


def test_a_flip_from_decode_is_drained_and_warmed(steps: Steps) -> None:
    steps.fleet(decode="d e")
    [call] = steps.ask("r", 20)
    place = call.replica
    steps.set_role(place, P)
    assert steps.state(place) is State.SHUTTING_DECODE
    steps.began("r")
    assert steps.decoded("r", place) == [Warm(place)]
    assert steps.state(place) is State.AUS_PREFILL
    assert steps.ask("short", 20)[0].replica != place
    steps.warmed(place)
    assert steps.state(place) is State.PREFILL


def test_a_standby_is_warmed_before_it_serves(steps: Steps) -> None:
    steps.fleet(prefill="p q", decode="d")
    steps.drain("q")
    assert steps.set_role("q", D) == [Warm("q")]
    assert steps.state("q") is State.AUS_DECODE
    steps.warmed("q")
    assert steps.state("q") is State.DECODE


@pytest.mark.parametrize("role", [P, D])
def test_a_replica_that_shuts_is_revived(steps: Steps, role: Role) -> None:
    steps.fleet(prefill="p", decode="d")
    name = "p" if role is P else "d"
    steps.ask("r", 1000 if role is P else 20)
    before = steps.state(name)
    steps.drain(name)
    steps.set_role(name, role)
    assert steps.state(name) is before


@pytest.mark.parametrize(
    ("role", "other", "after"), [(P, D, State.AUS_DECODE), (D, P, State.AUS_PREFILL)]
)
def test_a_replica_that_shuts_takes_another_role_once_it_is_empty(
    steps: Steps, role: Role, other: Role, after: State
) -> None:
    steps.fleet(prefill="p", decode="d")
    name = "p" if role is P else "d"
    steps.ask("r", 1000 if role is P else 20)
    steps.drain(name)
    assert steps.set_role(name, other) == []
    done = steps.prefilled("r", name) if role is P else steps.decoded("r", name)
    assert Warm(name) in done
    assert steps.state(name) is after


@pytest.mark.parametrize(
    ("words", "after"),
    [
        (("drain",), State.SHUTTING_NULL),
        (("prefill",), State.AUS_PREFILL),
        (("drain", "decode"), State.DECODE),
        (("prefill", "decode"), State.DECODE),
        (("prefill", "drain"), State.SHUTTING_NULL),
        (("drain", "prefill"), State.AUS_PREFILL),
    ],
)
def test_the_last_word_counts_while_a_replica_mutates(
    steps: Steps, words: tuple[str, ...], after: State
) -> None:
    steps.fleet(prefill="p q", decode="d")
    steps.ask("r")
    steps.set_role("p", D)
    for word in words:
        if word == "drain":
            steps.drain("p")
        else:
            steps.set_role("p", Role(word))
        assert steps.state("p") is State.MUTATING_TO_DECODE
    steps.prefilled("r", "p")
    steps.decoded("r", steps.place("r"))
    steps.tick()
    assert steps.state("p") is after


def test_a_loading_replica_can_be_wanted_for_something_else(steps: Steps) -> None:
    steps.step(Added(spec=spec("x"), role=P))
    assert steps.set_role("x", P) == []
    assert steps.set_role("x", D) == [Load("x", D)]
    steps.loaded("x")
    assert steps.state("x") is State.DECODE


@pytest.mark.parametrize(("role", "after"), [(P, State.AUS_PREFILL), (D, State.MUTATING_TO_DECODE)])
def test_a_replica_that_is_warmed_can_be_wanted_for_something_else(
    steps: Steps, role: Role, after: State
) -> None:
    steps.fleet(prefill="p q", decode="d")
    steps.drain("q")
    steps.set_role("q", P)
    steps.set_role("q", role)
    if role is P:
        assert steps.state("q") is State.AUS_PREFILL
    else:
        assert steps.state("q") is State.DECODE
        assert (State.PREFILL, Cause.MUTATE) in steps.controller.state.fleet.counts
    steps.warmed("q")


# Drained


def test_a_drained_replica_finishes_what_it_has(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d e")
    [call] = steps.ask("r", 20)
    steps.drain(call.replica)
    steps.began("r")
    steps.tick(1.0)
    assert steps.state(call.replica) is State.SHUTTING_DECODE
    assert steps.ask("s", 20)[0].replica != call.replica
    steps.decoded("r", call.replica)
    assert steps.state(call.replica) is State.SHUTTING_NULL


def test_a_prefill_replica_is_let_go_when_others_have_what_it_has_computed(steps: Steps) -> None:
    steps.fleet(prefill="p q")
    steps.serve("d", D, blocks=100)
    steps.ask("first", 16 * 85, 16, hands_over=False)
    steps.ask("r")
    steps.drain("p")
    steps.prefilled("r", "p")
    assert steps.state("p") is State.SHUTTING_PREFILL
    assert Decode("r", "d", 0) in steps.decoded("first", "d")
    assert steps.state("p") is State.SHUTTING_NULL


def test_but_it_does_not_wait_for_ever() -> None:
    steps = Steps(Settings(drain_timeout_s=10.0))
    steps.fleet(prefill="p q")
    steps.serve("d", D, blocks=100)
    steps.ask("first", 16 * 85, 16, hands_over=False)
    steps.ask("r")
    steps.drain("p")
    steps.prefilled("r", "p")
    steps.tick(10.0)
    assert steps.state("p") is State.SHUTTING_NULL


def test_what_a_prefill_replica_decodes_is_sent_away_too() -> None:
    steps = Steps(Settings(drain_timeout_s=10.0))
    steps.fleet(prefill="p")
    steps.ask("r", 20)
    steps.began("r")
    steps.serve("q", P)
    steps.drain("p")
    assert steps.tick(10.0) == [Abort("r", "p")]
    assert steps.decoded("r", "p", Outcome.CANCELLED) == [Decode("r", "q", 0)]
    assert steps.state("p") is State.SHUTTING_NULL


def test_a_drain_does_not_send_away_what_nobody_else_can_take() -> None:
    steps = Steps(Settings(drain_timeout_s=10.0))
    steps.fleet(decode="d")
    steps.ask("r", 20)
    steps.began("r")
    steps.drain("d")
    assert steps.tick(11.0) == []
    steps.serve("e", D)
    assert Abort("r", "d") in steps.history
    steps.decoded("r", "d", Outcome.CANCELLED)
    assert steps.state("d") is State.SHUTTING_NULL


def test_a_drain_waits_longer_for_what_nobody_else_can_go_on_with() -> None:
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
    steps.serve("e", D)
    steps.drain("d")
    assert asked == []
    assert steps.tick(10.0) == [Abort("movable", "d")]
    steps.decoded("movable", "d", Outcome.CANCELLED)
    assert steps.tick(49.0) == []
    assert steps.tick(1.0) == [Abort("bound", "d")]
    assert len(asked) == 1  # looking at all its messages takes long
    steps.decoded("bound", "d", Outcome.HOPELESS)
    assert steps.state("d") is State.SHUTTING_NULL


@pytest.mark.parametrize("role", [P, D])
def test_a_loading_replica_is_given_up(steps: Steps, role: Role) -> None:
    steps.step(Added(spec=spec("x"), role=role))
    assert steps.drain("x") == [Retire("x")]
    assert steps.state("x") is State.INACTIVE
    assert steps.loaded("x") == []
    assert steps.state("x") is State.INACTIVE


@pytest.mark.parametrize("role", [P, D])
def test_a_replica_that_is_warmed_is_drained_at_once(steps: Steps, role: Role) -> None:
    steps.fleet(prefill="p q", decode="d")
    steps.drain("q")
    steps.set_role("q", role)
    steps.drain("q")
    assert steps.state("q") is State.SHUTTING_NULL


def test_replicas_of_the_configuration_are_not_called_the_administrators(steps: Steps) -> None:
    steps.serve("p", Role.PREFILL)
    steps.serve("d", Role.DECODE)
    whys = {each.why for each in steps.controller.state.fleet.transitions}
    assert whys
    assert not any("administrator" in each for each in whys)
    steps.set_role("p", Role.DECODE)
    assert ASKED_BY_ADMIN in {each.why for each in steps.controller.state.fleet.transitions}
