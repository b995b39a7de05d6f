"""Requests that the router forwards without admission, and engines that are to end meanwhile."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from tests.support.router_rig import RouterRig
from tests.support.scripted_spec import FaultKind
from vllm_kvpool.router.control.autoscaler import expired_standby
from vllm_kvpool.router.control.events import Drain, Remove, SetRole, Tick
from vllm_kvpool.router.control.states import ReplicaId, Role, State

PATH = "/tokenize"
BODY = {"model": "scripted", "prompt": "hello"}


@contextlib.asynccontextmanager
async def forwarded(rig: RouterRig) -> AsyncIterator[int]:
    """A request that an engine, whose number is given, has and does not answer."""
    for number in range(len(rig.engines)):
        rig.fail(number, FaultKind.HANG, paths=(PATH,))
    asked = asyncio.ensure_future(rig.session.post(rig.url + PATH, json=BODY))
    try:
        await rig.until(lambda: any(_counts(rig)), "an engine has it")
        yield _counts(rig).index(1)
    finally:
        asked.cancel()


def _counts(rig: RouterRig) -> list[int]:
    return [each.counts.received[PATH] for each in rig.engines]


async def test_drain_of_engine_with_forwarded_request_ends_after_its_end() -> None:
    """An operator stops an engine once its replica is a standby."""
    async with RouterRig(0, 2) as rig:
        async with forwarded(rig) as number:
            rig.router.post(Drain(ReplicaId(f"r{number}")))
            assert rig.state(number) is State.SHUTTING_DECODE
        await rig.in_state(number, State.SHUTTING_NULL)


async def test_engine_that_is_drained_is_forwarded_nothing() -> None:
    """Under steady requests the drain would never end."""
    async with RouterRig(0, 1) as rig:
        async with forwarded(rig):
            rig.router.post(Drain(ReplicaId("r0")))
            assert (await rig.ask("POST", PATH, BODY)).status == 503
        await rig.in_state(0, State.SHUTTING_NULL)


async def test_engine_with_forwarded_request_changes_its_role_at_once() -> None:
    """The engine finishes the forwarded request in any role."""
    async with RouterRig(0, 2) as rig, forwarded(rig) as number:
        rig.router.post(SetRole(ReplicaId(f"r{number}"), Role.PREFILL))
        await rig.in_state(number, State.PREFILL)


async def test_standby_with_forwarded_request_is_ended_after_its_end() -> None:
    async with RouterRig(0, 1) as rig:
        controller = rig.router.controller
        async with forwarded(rig):
            controller.lifecycle.drain(controller.state.fleet[ReplicaId("r0")], "planned")
            rig.router.post(Tick())
            assert rig.state(0) is State.SHUTTING_NULL
            assert expired_standby(controller.state.fleet, math.inf, 0.0) is None
            rig.router.post(Remove(ReplicaId("r0")))
            assert rig.state(0) is State.SHUTTING_NULL
        await rig.until(lambda: rig.state(0) is None, "it is removed")
