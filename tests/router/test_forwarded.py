"""Requests that the router forwards without admission, and engines that are to end meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.support.router_rig import RouterRig
from tests.support.scripted_spec import FaultKind
from vllm_kvpool.router.control.events import Drain, Remove, SetRole
from vllm_kvpool.router.control.states import ReplicaId, Role, State

PATH = "/tokenize"


@contextlib.asynccontextmanager
async def forwarded(rig: RouterRig) -> AsyncIterator[int]:
    """A request that an engine, whose number is given, has and does not answer."""
    for number in range(len(rig.engines)):
        rig.fail(number, FaultKind.HANG, paths=(PATH,))
    body = {"model": "scripted", "prompt": "hello"}
    asked = asyncio.ensure_future(rig.session.post(rig.url + PATH, json=body))
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


async def test_flip_of_engine_with_forwarded_request_happens_after_its_end() -> None:
    async with RouterRig(0, 2) as rig:
        async with forwarded(rig) as number:
            rig.router.post(SetRole(ReplicaId(f"r{number}"), Role.PREFILL))
            assert rig.state(number) is State.SHUTTING_DECODE
        await rig.in_state(number, State.PREFILL)


async def test_standby_with_forwarded_request_is_ended_after_its_end() -> None:
    async with RouterRig(0, 1) as rig:
        rig.router.post(Drain(ReplicaId("r0")))
        await rig.in_state(0, State.SHUTTING_NULL)
        controller = rig.router.controller
        async with forwarded(rig):
            controller.lifecycle.expire(controller.state.fleet[ReplicaId("r0")], "planned")
            assert rig.state(0) is State.SHUTTING_NULL
            rig.router.post(Remove(ReplicaId("r0")))
            assert rig.state(0) is State.SHUTTING_NULL
        await rig.until(lambda: rig.state(0) is None, "it is removed")
