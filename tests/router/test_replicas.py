"""The end of what looks after replicas, while replicas still come and go."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest

from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.events import Added, Load, ReplicaSpec, Retire, Warm
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.ops import replicas as ops_replicas
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
    spec = ReplicaSpec(replica_id=THIRD, url="http://127.0.0.1:1")
    router.controller.step(Added(spec=spec, role=Role.DECODE), 0.0)
    second = StubWatch()
    first = StubWatch(lambda: replicas.perform(ACTIONS[what]))
    replicas.monitors = cast("dict[ReplicaId, Monitor]", {FIRST: first, SECOND: second})
    await router.stop()
    assert first.is_stopped
    assert second.is_stopped
    assert (first.begun, second.begun) == ([], [])
    assert len(asyncio.all_tasks()) == 1


class SavingWatch(StubWatch):
    """Its engine has saves that end when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.saved = asyncio.Event()
        self.has_failed = False
        self.is_up = False
        self.start: Callable[[], Awaitable[None]] | None = None

    async def await_saves(self) -> None:
        await self.saved.wait()

    async def is_healthy(self) -> bool:
        return self.is_up

    def load(self, *, start: Callable[[], Awaitable[None]] | None = None) -> None:
        self.begun.append("load")
        self.start = start


SPEC = ReplicaSpec(replica_id=FIRST, url="http://127.0.0.1:2", start=("go", "1"), stop=("halt",))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that were run."""
    names: list[str] = []

    async def run(replica: ReplicaId, name: str, command: Sequence[str], limit_s: float) -> None:
        names.append(" ".join(command))

    monkeypatch.setattr(ops_replicas, "run_command", run)
    return names


@asynccontextmanager
async def started() -> AsyncIterator[tuple[Router, SavingWatch]]:
    """A router with an engine that it starts and ends, and which is saving."""
    config = {"replicas": [{"url": "http://127.0.0.1:1", "role": "decode"}]}
    router, watch = Router(read_config(config)), SavingWatch()
    router.controller.step(Added(spec=SPEC), 0.0)
    router.replicas.monitors = cast("dict[ReplicaId, Monitor]", {FIRST: watch})
    router.replicas.perform(Load(FIRST, Role.DECODE))
    try:
        yield router, watch
    finally:
        await router.stop()


async def test_engine_is_ended_once_its_saves_have_ended(ran: list[str]) -> None:
    async with started() as (router, watch):
        router.controller.state.fleet.forget(FIRST)
        router.replicas.perform(Retire(FIRST, forget=True))
        await asyncio.sleep(0)
        assert ran == []
        watch.saved.set()
        await asyncio.gather(*router.replicas._tasks)
        assert ran == ["halt"]


async def test_engine_that_is_wanted_while_its_saves_end_is_not_ended(ran: list[str]) -> None:
    async with started() as (router, watch):
        router.replicas.perform(Retire(FIRST))
        await asyncio.sleep(0)
        router.replicas.perform(Load(FIRST, Role.DECODE))
        watch.saved.set()
        await asyncio.gather(*router.replicas._tasks, return_exceptions=True)
        assert ran == []
        assert watch.begun == ["load", "rest", "load"]


@pytest.mark.parametrize(
    ("is_up", "has_failed", "commands"),
    [
        (False, False, ["go 1"]),
        (True, False, []),  # it runs already
        (False, True, ["halt", "go 1"]),
        (True, True, ["halt", "go 1"]),  # it may hang
    ],
)
async def test_engine_that_does_not_answer_is_started(
    ran: list[str], is_up: bool, has_failed: bool, commands: list[str]
) -> None:
    async with started() as (router, watch):
        watch.is_up, watch.has_failed = is_up, has_failed
        router.replicas.perform(Load(FIRST, Role.DECODE))
        assert watch.start is not None
        await watch.start()
        assert ran == commands
