"""Every edge of a replica and every change of a request, by events alone."""

from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.router_steps import Steps, spec
from vllm_kvpool.router.control.controller_state import ControllerState
from vllm_kvpool.router.control.events import (
    Added,
    Mode,
    Outcome,
    Spawn,
)
from vllm_kvpool.router.control.fleet import Replica
from vllm_kvpool.router.control.requests import Phase, Request
from vllm_kvpool.router.control.settings import HostConfig, OverloadConfig, PlannerConfig, Settings
from vllm_kvpool.router.control.states import EDGES, Cause, Role, State

P, D = Role.PREFILL, Role.DECODE
NEW = "n-1"


def cluster(mode: Mode = Mode.MANUAL, **more: object) -> Steps:
    return Steps(
        Settings(prefill_requests=1, **more),  # type: ignore[arg-type]
        planner=PlannerConfig(mode=mode),
        hosts=(HostConfig(name="n", address="n", first_port=1, max_replicas=4),),
        overload=OverloadConfig(ttft_target_s=1e6, max_queue=10_000),
    )


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
    steps.step(Spawn(P))
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
    (S.INACTIVE, C.TAKE_OVER): lambda s: (s.serve("p", P), s.step(Spawn(P))),
    (S.LOADING_PREFILL, C.LOADED): lambda s: s.loaded("x"),
    (S.LOADING_PREFILL, C.GIVE_UP): lambda s: s.drain("x"),
    (S.LOADING_DECODE, C.LOADED): lambda s: s.loaded("x"),
    (S.LOADING_DECODE, C.GIVE_UP): lambda s: s.drain("x"),
    (S.NEW_PREFILL, C.LOADED): lambda s: s.loaded(NEW),
    (S.NEW_PREFILL, C.GIVE_UP): lambda s: s.set_role(NEW, D),
    (S.REFRACTORY_PREFILL, C.RELAYED): lambda s: s.prefilled("r", NEW),
    (S.PREFILL, C.PAIR): lambda s: s.step(Spawn(P)),
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
    (S.FAILED, C.RESET): lambda s: s.tick(1.0),
    (S.QUARANTINED, C.RESET): lambda s: s.tick(60.0),
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
        steps.failed(name)
    else:
        CAUSES[state, cause](steps)
    assert fleet.counts[state, cause] > before
    assert set(fleet.counts) <= set(EDGES)


# Requests


def record_changes(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Phase, Phase]]:
    seen: Counter[tuple[Phase, Phase]] = Counter()
    enter = ControllerState.enter

    def change(
        state: ControllerState, request: Request, phase: Phase, replica: Replica | None = None
    ) -> None:
        seen[request.phase, phase] += 1
        enter(state, request, phase, replica)

    monkeypatch.setattr(ControllerState, "enter", change)
    return seen


def bound(steps: Steps) -> None:
    new(steps)
    steps.ask("first")
    steps.ask("r", deadline=5.0)
    assert steps.phase("r") is Phase.BOUND


def queued(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    steps.ask("first")
    steps.ask("r", deadline=5.0)
    assert steps.phase("r") is Phase.QUEUED


def prefilling(steps: Steps) -> None:
    steps.fleet(prefill="p", decode="d")
    steps.ask("r", deadline=5.0)
    assert steps.phase("r") is Phase.PREFILLING


def handing(steps: Steps) -> None:
    steps.serve("p", P)
    steps.serve("d", D, blocks=100)
    steps.ask("first", 16 * 80, hands_over=False)
    steps.ask("r", deadline=5.0)
    steps.prefilled("r", "p")
    assert steps.phase("r") is Phase.HANDING


def decoding(steps: Steps) -> None:
    prefilling(steps)
    steps.prefilled("r", "p")
    assert steps.phase("r") is Phase.DECODING


H = Phase
CHANGES: dict[tuple[Phase, Phase], tuple[Callable[[Steps], None], Callable[[Steps], object]]] = {
    (H.QUEUED, H.BOUND): (queued, lambda s: s.step(Spawn(P))),
    (H.QUEUED, H.PREFILLING): (queued, lambda s: s.prefilled("first", "p")),
    (H.QUEUED, H.HANDING): (queued, lambda s: s.failed("p")),
    (H.QUEUED, H.REFUSED): (queued, lambda s: s.tick(5.0)),
    (H.QUEUED, H.CANCELLED): (queued, lambda s: s.cancel("r")),
    (H.BOUND, H.PREFILLING): (bound, lambda s: s.loaded(NEW)),
    (H.BOUND, H.QUEUED): (bound, lambda s: s.failed(NEW)),
    (H.BOUND, H.REFUSED): (bound, lambda s: s.tick(5.0)),
    (H.BOUND, H.CANCELLED): (bound, lambda s: s.cancel("r")),
    (H.PREFILLING, H.HANDING): (prefilling, lambda s: s.prefilled("r", "p")),
    (H.PREFILLING, H.QUEUED): (prefilling, lambda s: s.prefilled("r", "p", Outcome.BUSY)),
    (H.PREFILLING, H.REFUSED): (prefilling, lambda s: fail_all(s)),
    (H.PREFILLING, H.CANCELLED): (prefilling, lambda s: s.cancel("r")),
    (H.HANDING, H.DECODING): (handing, lambda s: s.decoded("first", "d")),
    (H.HANDING, H.REFUSED): (handing, lambda s: s.tick(5.0)),
    (H.HANDING, H.CANCELLED): (handing, lambda s: s.cancel("r")),
    (H.DECODING, H.HANDING): (decoding, lambda s: s.decoded("r", "d", Outcome.FAILED)),
    (H.DECODING, H.DONE): (decoding, lambda s: s.decoded("r", "d")),
    (H.DECODING, H.REFUSED): (decoding, lambda s: fail_all(s)),
    (H.DECODING, H.CANCELLED): (decoding, lambda s: s.cancel("r")),
}


def fail_all(steps: Steps) -> None:
    while (phase := steps.phase("r")) is not None:
        if phase is Phase.PREFILLING:
            steps.prefilled("r", steps.place("r"), Outcome.FAILED)
        else:
            steps.decoded("r", steps.place("r"), Outcome.FAILED)


ARRIVALS = {(H.ARRIVED, H.QUEUED), (H.ARRIVED, H.HANDING), (H.ARRIVED, H.REFUSED)}


@pytest.mark.parametrize(
    ("phase", "after"),
    CHANGES,
    ids=[f"{phase.value}-{after.value}" for phase, after in CHANGES],
)
def test_every_change_of_phase_happens(
    phase: Phase, after: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_changes(monkeypatch)
    steps = cluster()
    reach, cause = CHANGES[phase, after]
    reach(steps)
    before = seen[phase, after]
    cause(steps)
    assert seen[phase, after] > before
    assert set(seen) <= CHANGES.keys() | ARRIVALS
