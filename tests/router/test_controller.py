"""The controller as a whole: time, what cannot be, and its own check."""

from collections.abc import Callable

import pytest

from tests.support.router_invariants import check_controller
from tests.support.router_steps import Steps, spec
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.controller import LOCK_EVERY_S, Controller
from vllm_kvpool.router.control.events import (
    Abort,
    Added,
    Load,
    Mode,
    Outcome,
    Prefill,
    Tick,
)
from vllm_kvpool.router.control.requests import Phase, RequestId
from vllm_kvpool.router.control.settings import OverloadConfig, PlannerConfig, Settings
from vllm_kvpool.router.control.states import Goal, Role

P, D = Role.PREFILL, Role.DECODE
NEW = "n-1"


def cluster(mode: Mode = Mode.MANUAL, **more: object) -> Steps:
    return Steps(
        Settings(prefill_requests=1, **more),  # type: ignore[arg-type]
        planner=PlannerConfig(mode=mode),
        overload=OverloadConfig(ttft_target_s=1e6, max_queue=10_000),
    )


# Time


def test_time_does_not_go_back() -> None:
    steps = cluster()
    steps.tick(5.0)
    with pytest.raises(AssertionError):
        steps.controller.step(Tick(), 4.0)


def test_a_pause_of_who_refuses_ends() -> None:
    steps = cluster()
    steps.fleet(prefill="p", decode="d")
    steps.ask("r")
    steps.prefilled("r", "p", Outcome.BUSY)
    assert steps.tick(0.9) == []
    assert steps.tick(0.1) == [Prefill("r", "p")]


def test_a_pause_of_who_failed_ends() -> None:
    steps = cluster()
    steps.serve("x", D)
    steps.failed("x")
    assert steps.tick(0.9) == []
    assert steps.tick(0.1) == [Load("x", D)]


def test_what_a_drain_takes_too_long_for_is_sent_away_once() -> None:
    steps = cluster(drain_timeout_s=10.0)
    steps.serve("x", D)
    steps.ask("r")
    steps.drain("x")
    steps.serve("y", D)
    assert steps.tick(9.9) == []
    assert steps.tick(0.1) == [Abort("r", "x")]
    assert steps.tick() == []


def test_locks_are_not_looked_at_for_each_of_many_events_but_soon() -> None:
    steps = cluster()
    steps.fleet(decode="d e")
    steps.tick(1.0)
    steps.measure("d", used=990)
    assert steps.controller.state.overload.locked == frozenset()
    steps.tick(LOCK_EVERY_S)
    assert steps.controller.state.overload.locked == {"d"}
    assert (steps.count("locks"), steps.count("releases")) == (1, 0)
    steps.drain("d")
    assert steps.controller.state.overload.locked == frozenset()
    assert (steps.count("locks"), steps.count("releases")) == (1, 1)


# What people ask for and cannot have


def test_what_cannot_be_changes_nothing() -> None:
    steps = cluster()
    steps.fleet(prefill="p", decode="d")
    steps.ask("r")
    with pytest.raises(ConfigError):
        steps.step(Added(spec=spec("p"), role=D))
    check_controller(steps.controller)
    assert steps.prefilled("r", "p") != []


def test_a_request_of_one_id_is_there_once() -> None:
    steps = cluster()
    steps.serve("d", D)
    steps.ask("r", 20)
    with pytest.raises(AssertionError):
        steps.ask("r", 20)


# The check itself


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: c.state.requests.pop(RequestId("q")),
        lambda c: c.state.queue.remove(c.state.requests[RequestId("q")]),
        lambda c: setattr(c.state.requests[RequestId("q")], "phase", Phase.HANDING),
        lambda c: c.state.migration.append(c.state.requests[RequestId("q")]),
        lambda c: setattr(c.state.overload, "locked", frozenset({"nobody"})),
        lambda c: c.state.fleet[spec("p").replica_id].work.prefills.clear(),
        lambda c: setattr(c.state.fleet[spec("d").replica_id], "goal", Goal.STANDBY),
    ],
)
def test_what_does_not_hold_is_noticed(spoil: Callable[[Controller], object]) -> None:
    steps = cluster()
    steps.fleet(prefill="p", decode="d")
    steps.ask("first")
    steps.ask("q")
    check_controller(steps.controller)
    spoil(steps.controller)
    with pytest.raises(AssertionError):
        check_controller(steps.controller)
