"""Every edge of a replica, by events alone."""

from collections.abc import Callable

import pytest

from tests.router.test_controller import cluster
from tests.support.router_steps import Steps, spec
from vllm_kvpool.router.control.events import (
    Added,
    Mode,
)
from vllm_kvpool.router.control.states import EDGES, Cause, Role, State

P, D = Role.PREFILL, Role.DECODE
NEW = "n-1"


# Each brings a replica into a state, and says which.


def inactive(steps: Steps) -> str:
    steps.step(Added(spec=spec("x")))
    return "x"


def loading(role: Role) -> Callable[[Steps], str]:
    def reach(steps: Steps) -> str:
        steps.step(Added(spec=spec("x"), role=role))
        return "x"

    return reach


def new(steps: Steps) -> str:
    steps.fleet(prefill="p", decode="d")
    steps.start(P)
    return NEW


def refractory(steps: Steps) -> str:
    new(steps)
    for name in ("first", "r", "s"):
        steps.ask(name)
    steps.loaded(NEW)
    return NEW


def serving(role: Role) -> Callable[[Steps], str]:
    def reach(steps: Steps) -> str:
        steps.serve("x", role)
        return "x"

    return reach


def old(steps: Steps) -> str:
    new(steps)
    return "p"


def standby(steps: Steps) -> str:
    steps.serve("x", P)
    steps.drain("x")
    return "x"


def warming(role: Role) -> Callable[[Steps], str]:
    def reach(steps: Steps) -> str:
        steps.set_role(standby(steps), role)
        return "x"

    return reach


def computing(steps: Steps) -> str:
    steps.fleet(prefill="x", decode="d")
    steps.ask("r")
    return "x"


def mutating(steps: Steps) -> str:
    steps.set_role(computing(steps), D)
    return "x"


def shutting_prefill(steps: Steps) -> str:
    steps.drain(computing(steps))
    return "x"


def shutting_decode(steps: Steps) -> str:
    steps.serve("x", D)
    steps.ask("r")
    steps.drain("x")
    return "x"


def failed(steps: Steps) -> str:
    steps.serve("x", D)
    steps.failed("x")
    return "x"


def quarantined(steps: Steps) -> str:
    failed(steps)
    while steps.state("x") is not State.QUARANTINED:
        steps.tick()
        steps.failed("x")
    return "x"


REACH: dict[State, Callable[[Steps], str]] = {
    State.INACTIVE: inactive,
    State.LOADING_PREFILL: loading(P),
    State.LOADING_DECODE: loading(D),
    State.NEW_PREFILL: new,
    State.REFRACTORY_PREFILL: refractory,
    State.PREFILL: serving(P),
    State.OLD_PREFILL: old,
    State.AUS_PREFILL: warming(P),
    State.DECODE: serving(D),
    State.AUS_DECODE: warming(D),
    State.MUTATING_TO_DECODE: mutating,
    State.SHUTTING_PREFILL: shutting_prefill,
    State.SHUTTING_DECODE: shutting_decode,
    State.SHUTTING_NULL: standby,
    State.FAILED: failed,
    State.QUARANTINED: quarantined,
}


def idle_decoder(steps: Steps) -> None:
    steps.controller.scaling.mode = Mode.AUTOMATIC
    steps.serve("p", P)
    steps.serve("y", D)
    for _ in range(200):
        steps.tick()
        for name in ("p", "x", "y"):
            steps.measure(name)


S, C = State, Cause
CAUSES: dict[tuple[State, Cause], Callable[[Steps], object]] = {
    (S.INACTIVE, C.LOAD_PREFILL): lambda s: s.set_role("x", P),
    (S.INACTIVE, C.LOAD_DECODE): lambda s: s.set_role("x", D),
    (S.INACTIVE, C.TAKE_OVER): lambda s: (s.serve("p", P), s.start(P)),
    (S.LOADING_PREFILL, C.LOADED): lambda s: s.loaded("x"),
    (S.LOADING_PREFILL, C.GIVE_UP): lambda s: s.drain("x"),
    (S.LOADING_DECODE, C.LOADED): lambda s: s.loaded("x"),
    (S.LOADING_DECODE, C.GIVE_UP): lambda s: s.drain("x"),
    (S.NEW_PREFILL, C.LOADED): lambda s: s.loaded(NEW),
    (S.NEW_PREFILL, C.GIVE_UP): lambda s: s.set_role(NEW, D),
    (S.REFRACTORY_PREFILL, C.RELAYED): lambda s: s.prefilled("r", NEW),
    (S.PREFILL, C.PAIR): lambda s: s.start(P),
    (S.OLD_PREFILL, C.UNPAIR): lambda s: s.drain(NEW),
    (S.PREFILL, C.MUTATE): lambda s: s.set_role("x", D),
    (S.MUTATING_TO_DECODE, C.FLUSHED): lambda s: s.prefilled("r", "x"),
    (S.PREFILL, C.DEACTIVATE): lambda s: s.drain("x"),
    (S.SHUTTING_PREFILL, C.REVIVE): lambda s: s.set_role("x", P),
    (S.SHUTTING_PREFILL, C.DRAINED): lambda s: s.prefilled("r", "x"),
    (S.DECODE, C.DEACTIVATE): lambda s: s.drain("x"),
    (S.DECODE, C.IDLE): idle_decoder,
    (S.SHUTTING_DECODE, C.REVIVE): lambda s: s.set_role("x", D),
    (S.SHUTTING_DECODE, C.DRAINED): lambda s: s.decoded("r", "x"),
    (S.SHUTTING_NULL, C.USE_PREFILL): lambda s: s.set_role("x", P),
    (S.SHUTTING_NULL, C.USE_DECODE): lambda s: s.set_role("x", D),
    (S.SHUTTING_NULL, C.EXPIRE): lambda s: s.remove("x"),
    (S.AUS_PREFILL, C.READY): lambda s: s.warmed("x"),
    (S.AUS_DECODE, C.READY): lambda s: s.warmed("x"),
    (S.FAILED, C.QUARANTINE): lambda s: quarantined_again(s),
    (S.FAILED, C.USE_PREFILL): lambda s: (s.set_role("x", P), s.tick(1.0), s.loaded("x")),
    (S.FAILED, C.USE_DECODE): lambda s: (s.tick(1.0), s.loaded("x")),
    (S.FAILED, C.RESET): lambda s: (s.drain("x"), s.tick(1.0)),
    (S.QUARANTINED, C.RETRY): lambda s: s.tick(60.0),
    (S.QUARANTINED, C.RESET): lambda s: (s.drain("x"), s.tick(60.0)),
}


def quarantined_again(steps: Steps) -> None:
    while steps.state("x") is not State.QUARANTINED:
        steps.tick()
        steps.failed("x")


@pytest.mark.parametrize("state", State)
def test_every_state_is_reached(state: State) -> None:
    steps = cluster()
    assert steps.state(REACH[state](steps)) is state


@pytest.mark.parametrize(
    ("state", "cause"), EDGES, ids=[f"{state.value}-{cause.value}" for state, cause in EDGES]
)
def test_every_edge_is_followed(state: State, cause: Cause) -> None:
    steps = cluster()
    name = REACH[state](steps)
    fleet = steps.controller.state.fleet
    before = fleet.counts[state, cause]
    if cause is Cause.FAIL:
        if state is State.FAILED:
            steps.tick()  # it is tried again
        steps.failed(name)
    else:
        CAUSES[state, cause](steps)
    assert fleet.counts[state, cause] > before
    assert set(fleet.counts) <= set(EDGES)
