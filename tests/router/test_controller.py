"""The controller as a whole: time, what cannot be, and its own check."""

from collections.abc import Callable

import pytest

from tests.router.scripts import Example, examples
from tests.support.router_invariants import check_controller
from tests.support.router_steps import Steps, spec
from vllm_kvpool.router.control.controller import LOCK_EVERY_S, Controller
from vllm_kvpool.router.control.events import Tick
from vllm_kvpool.router.control.requests import Phase, RequestId
from vllm_kvpool.router.control.settings import OverloadConfig, Settings
from vllm_kvpool.router.control.states import Goal, Role

D = Role.DECODE


def cluster() -> Steps:
    overload = OverloadConfig(ttft_target_s=1e6, max_queue=10_000)
    return Steps(Settings(prefill_requests=1), overload=overload)


def test_time_does_not_go_back() -> None:
    steps = cluster()
    steps.tick(5.0)
    with pytest.raises(AssertionError):
        steps.controller.step(Tick(), 4.0)


@examples(
    f"""
locks are not looked at for each of many events, but soon
    fleet / d e; tick; measure d used=990; locked; tick {LOCK_EVERY_S}; locked d; count locks 1
    count releases 0; drain d; locked; count locks 1; count releases 1
"""
)
def test_time(example: Example) -> None:
    example.play()


def test_request_of_one_id_is_there_once() -> None:
    steps = cluster()
    steps.serve("d", D)
    steps.ask("r", 20)
    with pytest.raises(AssertionError):
        steps.ask("r", 20)


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
