"""The router's snapshot matches the controller's state."""

import json

import msgspec
import pytest

from tests.router.scenes import Scene, busy_scene
from vllm_kvpool.router.control.events import (
    Added,
    Drain,
    Failed,
    Measured,
    Mode,
    ReplicaLoaded,
    ReplicaSpec,
    Sample,
    SetMode,
    SetRole,
)
from vllm_kvpool.router.control.states import Cause, ReplicaId, Role, State
from vllm_kvpool.router.ops.snapshot import (
    COUNTS,
    NO_PLAN,
    SHOWN_TRANSITIONS,
    FirstTokenView,
    HealthView,
    ReplicaView,
    RouterView,
    WaitingView,
    health_of,
    plan_of,
    state_of,
)


def shown(scene: Scene) -> RouterView:
    return state_of(scene.controller, scene.now)


def replica(scene: Scene, name: str) -> ReplicaView:
    (found,) = [each for each in shown(scene).replicas if each.id == name]
    return found


def assert_shown(view: object, words: str) -> None:
    """`words`: `name=value ...` of the view, as text."""
    for name, _, value in (each.partition("=") for each in words.split()):
        found = getattr(view, name)
        assert (name, str(getattr(found, "value", found))) == (name, value)


def test_empty_router_has_something_to_show() -> None:
    view = shown(Scene())
    assert_shown(view, "replicas=() transitions=() ttft=None pool_is_up=True is_collapsed=True")
    assert (view.queue, view.migration) == (WaitingView(0, 0), WaitingView(0, 0))
    assert view.counts == dict.fromkeys(COUNTS, 0)
    assert (view.plan.at, view.plan.why, view.plan.steps) == (None, NO_PLAN, ())


def test_queues_counts_and_waits_are_shown() -> None:
    scene = busy_scene()
    view = shown(scene)
    assert (view.in_flight, view.counts["arrived"], view.counts["locks"]) == (4, 4, 1)
    assert view.ttft == FirstTokenView(pytest.approx(0.33), pytest.approx(0.33), 1)
    assert view.rates.asked_tokens_per_s > 500
    assert view.rates.learned["prefill_tokens_per_s"] is None
    scene.measure_prefill()
    learned = shown(scene).rates.learned["prefill_tokens_per_s"]
    assert learned is not None
    assert 1000 < learned < 100_000
    for number in range(60):
        scene.arrived(f"m{number}", 16_000)
    view = shown(scene)
    assert view.queue.tokens == view.queue.requests * 16_000 > 0
    assert sum(view.refusals.values()) == view.counts["shed"] > 0
    assert set(view.refusals) <= {429, 503}


def test_times_to_the_first_token_are_shown_by_rank() -> None:
    scene = Scene()
    scene.controller.state.counts.waits.extend(number / 100 for number in range(200, 0, -1))
    assert shown(scene).ttft == FirstTokenView(p50=1.0, p99=1.98, requests=200)


def test_the_last_transitions_are_shown_oldest_first() -> None:
    scene = Scene()
    scene.serving("d0", Role.DECODE)
    for _ in range(SHOWN_TRANSITIONS):
        scene.step(Drain(ReplicaId("d0")))
        scene.step(SetRole(ReplicaId("d0"), Role.DECODE))
    transitions = shown(scene).transitions
    assert len(transitions) == SHOWN_TRANSITIONS
    assert [each.at for each in transitions] == sorted(each.at for each in transitions)
    last = transitions[-1]
    assert (last.before, last.cause, last.after) == (
        *(State.SHUTTING_NULL, Cause.USE_DECODE, State.AUS_DECODE),
    )
    assert last.why == "asked for by the administrator"


def test_failed_replica_says_when_it_is_tried_again_and_is_down_until_it_answers() -> None:
    scene = busy_scene()
    fleet = scene.controller.state.fleet
    assert_shown(replica(scene, "d2"), "state=quarantined")
    assert replica(scene, "d2").retry_in_s == pytest.approx(30.0, abs=0.1)
    assert replica(scene, "d1").retry_in_s is None
    scene.tick(31.0)
    assert fleet[ReplicaId("d2")].is_retried
    assert_shown(replica(scene, "d2"), "state=failed retry_in_s=None")
    assert (health_of(fleet).down, health_of(fleet).loading) == (("d2",), ())
    scene.step(ReplicaLoaded(ReplicaId("d2")))
    assert health_of(fleet).down == ()


def test_health_says_who_serves_and_who_does_not() -> None:
    scene = Scene()
    fleet = scene.controller.state.fleet
    assert health_of(fleet).status == "unavailable"
    scene.serving("p0", Role.PREFILL)
    scene.serving("d0", Role.DECODE)
    assert health_of(fleet) == HealthView(
        status="ok", serving={Role.PREFILL: 1, Role.DECODE: 1}, down=(), loading=(), mismatches={}
    )
    scene.step(Added(spec=ReplicaSpec(replica_id=ReplicaId("d1"), url="u"), role=Role.DECODE))
    assert (health_of(fleet).status, health_of(fleet).loading) == ("ok", ("d1",))
    scene.step(Measured(ReplicaId("d0"), Sample(has_connector=False)))
    health = health_of(fleet)
    assert (health.status, health.mismatches) == ("degraded", {"d0": "no_connector"})
    assert "KVPoolConnector" in replica(scene, "d0").problem
    scene.step(Failed(ReplicaId("d0"), "gone"))
    health = health_of(fleet)
    assert (health.status, health.down, health.mismatches) == ("degraded", ("d0",), {})


def test_metrics_that_are_too_old_are_marked() -> None:
    scene = busy_scene()
    assert not replica(scene, "d1").is_stale
    scene.tick(20.0)
    assert replica(scene, "d1").is_stale
    assert replica(scene, "d1").bytes_in_per_s == 0.0


def test_a_plan_is_shown_with_its_equations_and_its_steps_in_words() -> None:
    scene = Scene()
    scene.spare("s0")
    scene.serving("d0", Role.DECODE)
    scene.tick()
    plan = plan_of(scene.controller)
    assert (plan.prefill.have, plan.prefill.wanted) == (0, 1)
    assert plan.at == scene.now
    assert plan.steps == ("wake or start s0 for prefill",)
    names = {line.partition(":")[0] for line in plan.why.splitlines()}
    assert {"decode memory", "hand-over", "prefill"} <= names
    assert plan.held == ""


def test_a_plan_without_measurements_says_why_it_holds() -> None:
    scene = Scene()
    spec = ReplicaSpec(replica_id=ReplicaId("d0"), url="http://x:1")
    scene.step(Added(spec=spec, role=Role.DECODE))
    scene.step(ReplicaLoaded(ReplicaId("d0")), 1.1)
    plan = plan_of(scene.controller)
    assert plan.held.startswith("hold: ")
    assert plan.why.startswith(plan.held)


def test_the_mode_can_be_changed_while_it_serves() -> None:
    scene = Scene(mode=Mode.MANUAL)
    scene.spare("s0")
    scene.serving("d0", Role.DECODE)
    scene.tick()
    assert replica(scene, "s0").state is State.INACTIVE
    scene.step(SetMode(Mode.AUTOMATIC))
    scene.tick()
    assert plan_of(scene.controller).mode is Mode.AUTOMATIC
    assert replica(scene, "s0").state is State.LOADING_PREFILL


def test_all_of_it_can_be_written_as_json_and_read_again() -> None:
    view = shown(busy_scene())
    text = msgspec.json.encode(view)
    assert msgspec.json.decode(text, type=RouterView) == view
    keys = json.loads(text).keys()
    assert {"now", "replicas", "queue", "migration", "rates", "plan", "counts"} <= keys
