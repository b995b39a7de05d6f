"""Engines that differ from the majority, and the reports about them."""

import logging
import time

import pytest

from tests.router.scenes import Scene
from tests.support.router_rig import RouterRig
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_spec import ScriptedSpec
from vllm_kvpool.router.control.events import (
    Added,
    Drain,
    Failed,
    Measured,
    ModelsListed,
    ReplicaSpec,
    Sample,
    SetRole,
    SleepFailed,
)
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.ops.compatibility import Mismatch, problems
from vllm_kvpool.router.ops.snapshot import health_of, state_of

USUAL = Sample(namespace="m@fmt:0", chunk_tokens=256)
PLAIN = Sample(has_connector=False)
FINER = Sample(namespace="m@fmt:1", chunk_tokens=64)
OTHER = Sample(namespace="m@fmt:2", chunk_tokens=256)
SILENT = Sample()
"""A sample without a namespace: an older release, or no request yet."""


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ([(USUAL, "m"), (USUAL, "m")], {}),
        ([(USUAL, "m")], {}),
        ([], {}),
        ([(USUAL, "m"), (PLAIN, "m")], {1: Mismatch.NO_CONNECTOR}),
        ([(USUAL, "m"), (USUAL, "m"), (FINER, "m")], {2: Mismatch.CHUNK_TOKENS}),
        ([(OTHER, "m"), (USUAL, "m"), (USUAL, "m")], {0: Mismatch.NAMESPACE}),
        ([(USUAL, "m"), (OTHER, "m")], {1: Mismatch.NAMESPACE}),
        ([(USUAL, "m"), (SILENT, "m")], {}),
        ([(USUAL, "m"), (USUAL, "m"), (OTHER, "n")], {2: Mismatch.MODEL}),
        ([(USUAL, "m"), (USUAL, "m"), (OTHER, "n"), (OTHER, "n")], {}),
        ([(USUAL, "m lora"), (USUAL, "m")], {}),
        ([(USUAL, "m"), (USUAL, "")], {}),
    ],
)
def test_an_engine_that_differs(
    engines: list[tuple[Sample, str]], expected: dict[int, Mismatch]
) -> None:
    scene = Scene()
    for number, (sample, models) in enumerate(engines):
        replica = scene.serving(str(number), Role.DECODE)
        scene.step(ModelsListed(replica, frozenset(models.split())))
        scene.step(Measured(replica, sample))
    found = problems(scene.controller.state.fleet)
    assert {int(name): problem.mismatch for name, problem in found.items()} == expected
    for name in found:
        scene.step(Failed(ReplicaId(name), "gone"))
    assert not problems(scene.controller.state.fleet).keys() & found.keys(), "down, not different"


def test_engine_that_was_to_sleep_and_does_not_is_named_until_it_is_loaded() -> None:
    scene = Scene()
    scene.serving("d", Role.DECODE)
    idle = scene.serving("idle", Role.DECODE)
    scene.step(Drain(idle))
    scene.step(SleepFailed(idle, "early"))
    assert not problems(scene.controller.state.fleet), "it is a standby"
    scene.controller.lifecycle.expire(scene.controller.state.fleet[idle], "not needed")
    scene.step(SleepFailed(idle, "/sleep answers 404"))
    found = problems(scene.controller.state.fleet)
    assert {name: each.mismatch for name, each in found.items()} == {idle: Mismatch.NO_SLEEP}
    assert health_of(scene.controller.state.fleet).status == "degraded"
    scene.step(SetRole(idle, Role.DECODE))
    assert not problems(scene.controller.state.fleet)


@pytest.mark.parametrize(
    ("spec", "mismatch", "advice"),
    [
        (ScriptedSpec(has_connector=False), "no_connector", "start it with --kv-transfer-config"),
        (ScriptedSpec(namespace="n", chunk_tokens=64), "chunk_tokens", "set chunk_tokens to 256"),
        (ScriptedSpec(namespace="n"), "namespace", "namespace and weights_id"),
        (ScriptedSpec(model="n"), "model", "--served-model-name"),
    ],
)
async def test_log_health_metric_and_page_say_which_engine_differs(
    spec: ScriptedSpec, mismatch: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with RouterRig(1, 2) as rig:
        rig.engines.append(ScriptedEngine(spec, rig.pool))
        odd = ReplicaSpec(replica_id=ReplicaId("odd"), url=await rig.engines[-1].start())
        rig.router.post(Added(spec=odd, role=Role.DECODE))
        await rig.until(lambda: advice in caplog.text, "the log says what to set")
        health = await rig.ask("GET", "/health")
        assert (health.status, health.json["status"]) == (200, "degraded")
        assert health.json["mismatches"] == {"odd": mismatch}
        line = f'replica_mismatch{{replica="odd",mismatch="{mismatch}"}} 1.0'
        assert line in rig.router.telemetry.expose()[1].decode()
        view = state_of(rig.router.controller, time.monotonic())
        assert view.replicas[-1].mismatch == mismatch
        assert advice in view.replicas[-1].problem
