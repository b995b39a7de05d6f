"""The end of what looks after replicas, while replicas still come and go."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest

from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.events import Added, Load, ReplicaSpec, Retire, Warm
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.run import Router

if TYPE_CHECKING:
    from vllm_kvpool.router.ops.launcher import Launcher
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


class StubLauncher:
    """Engines that run, and those that were stopped."""

    def __init__(self, *replica_ids: ReplicaId) -> None:
        self.replica_ids = replica_ids
        self.stopped: list[str] = []

    def stop(self, replica_id: str) -> None:
        self.stopped.append(replica_id)

    def set_role(self, replica_id: str, role: str) -> None: ...


class SavingWatch(StubWatch):
    """Its engine has saves that end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.saved = asyncio.Event()
        self.has_failed = False

    async def await_saves(self) -> None:
        await self.saved.wait()

    def load(self, timeout_s: float, *, wakes: bool) -> None:
        self.begun.append("load")


@asynccontextmanager
async def saving() -> AsyncIterator[tuple[Router, StubLauncher, SavingWatch]]:
    """A router that has started an engine, which is saving."""
    config = {"replicas": [{"url": "http://127.0.0.1:1", "role": "decode"}]}
    router, launcher, watch = Router(read_config(config)), StubLauncher(FIRST), SavingWatch()
    spec = ReplicaSpec(replica_id=FIRST, url="http://127.0.0.1:2", host="", is_ours=True)
    router.controller.step(Added(spec=spec), 0.0)
    router.replicas._launcher = cast("Launcher", launcher)
    router.replicas.monitors = cast("dict[ReplicaId, Monitor]", {FIRST: watch})
    try:
        yield router, launcher, watch
    finally:
        router.replicas._launcher = None
        await router.stop()


async def test_engine_is_ended_once_its_saves_have_ended() -> None:
    async with saving() as (router, launcher, watch):
        router.replicas.perform(Retire(FIRST, forget=True))
        await asyncio.sleep(0)
        assert launcher.stopped == []
        watch.saved.set()
        await asyncio.gather(*router.replicas._tasks)
        assert launcher.stopped == [FIRST]


async def test_engine_that_is_wanted_while_its_saves_end_is_not_ended() -> None:
    async with saving() as (router, launcher, watch):
        router.replicas.perform(Retire(FIRST))
        await asyncio.sleep(0)
        router.replicas.perform(Load(FIRST, Role.DECODE))
        watch.saved.set()
        await asyncio.gather(*router.replicas._tasks, return_exceptions=True)
        assert launcher.stopped == []
        assert watch.begun == ["rest", "load"]
