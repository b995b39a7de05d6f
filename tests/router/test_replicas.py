"""The end of what looks after replicas, while replicas still come and go."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import pytest

from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.events import Added, Load, ReplicaSpec, Retire, Warm
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.run import Router

if TYPE_CHECKING:
    from vllm_kvpool.router.ops.monitor import Monitor

FIRST, SECOND, THIRD = (ReplicaId(name) for name in ("first", "second", "third"))
ACTIONS: dict[str, Load | Warm | Retire] = {
    "one goes": Retire(SECOND, forget=True),
    "one comes": Load(THIRD, Role.DECODE),
    "one is asked": Warm(FIRST),
}


class StubWatch:
    """Tells of what it has seen just before it was stopped."""

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self._tell = tell
        self.is_stopped = False
        self.begun: list[str] = []

    async def stop(self) -> None:
        self.is_stopped = True
        await asyncio.sleep(0)
        self._tell()

    def warm(self) -> None:
        self.begun.append("warm")

    def rest(self, *, sleeps: bool) -> None:
        self.begun.append("rest")


@pytest.mark.parametrize("what", ACTIONS)
async def test_what_is_decided_while_all_stop_begins_nothing(what: str) -> None:
    """A change of the monitors broke off the stop, which left the router's connections open."""

    router = Router(read_config({"replicas": [{"url": "http://127.0.0.1:1", "role": "decode"}]}))
    replicas = router.replicas
    spec = ReplicaSpec(replica_id=THIRD, url="http://127.0.0.1:1", host="")
    router.controller.step(Added(spec=spec, role=Role.DECODE), 0.0)
    second = StubWatch()
    first = StubWatch(lambda: replicas.perform(ACTIONS[what]))
    replicas.monitors = cast("dict[ReplicaId, Monitor]", {FIRST: first, SECOND: second})
    await router.stop()
    assert first.is_stopped
    assert second.is_stopped
    assert (first.begun, second.begun) == ([], [])
    assert len(asyncio.all_tasks()) == 1
