"""The end of what looks after replicas, while replicas still come and go."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.router_rig import run
from tests.support.waiting import turns
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.events import Added, Load, ReplicaSpec, Retire, Warm
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.dataplane.data_plane import upstream_of
from vllm_kvpool.router.ops import replicas as ops_replicas
from vllm_kvpool.router.ops.replicas import Replicas
from vllm_kvpool.router.ops.tasks import Tasks
from vllm_kvpool.router.run import Router

if TYPE_CHECKING:
    from vllm_kvpool.router.ops.monitor import Monitor

FIRST, SECOND, THIRD = (ReplicaId(name) for name in ("first", "second", "third"))
ACTIONS: dict[str, Load | Warm | Retire] = {
    "one goes": Retire(SECOND, forget=True),
    "one comes": Load(THIRD, Role.DECODE),
    "one is asked": Warm(FIRST),
}


SPEC = ReplicaSpec(replica_id=FIRST, url="http://127.0.0.1:2", start=("go", "1"), stop=("halt",))


class FakeMonitor:
    """A replica's monitor. It notes orders, and its engine saves until `saved` is set.

    `starts`: a load starts the engine, and a later order cancels the start.
    """

    def __init__(
        self, spec: ReplicaSpec = SPEC, saved: asyncio.Event | None = None, *, starts: bool = False
    ) -> None:
        self.spec = spec
        self.saved = saved or asyncio.Event()
        self.begun: list[str] = []
        self.start_engine: Callable[[], Awaitable[None]] | None = None
        self.is_up = self.has_failed = self.is_stopped = False
        self.on_stop: Callable[[], None] = lambda: None
        """Called just before the monitor has stopped."""
        self._starts = starts
        self._tasks = Tasks("watch")

    def start(self) -> None:
        pass

    def load(self, *, start: Callable[[], Awaitable[None]] | None = None) -> None:
        self.begun.append("load")
        self.start_engine = start
        self._tasks.cancel("load")
        if self._starts and start is not None:
            self._tasks.start("load", start)

    def warm(self) -> None:
        self.begun.append("warm")

    def rest(self, *, sleeps: bool) -> None:
        assert not self._starts or not sleeps
        self.begun.append("rest")
        self._tasks.cancel("load")

    async def await_saves(self) -> None:
        await self.saved.wait()

    async def is_healthy(self) -> bool:
        return self.is_up

    async def stop(self) -> None:
        self.is_stopped = True
        await self._tasks.stop()
        await asyncio.sleep(0)
        self.on_stop()


@pytest.mark.parametrize("what", ACTIONS)
async def test_what_is_decided_while_all_stop_begins_nothing(what: str) -> None:
    """A change of the monitors broke off the stop, which left the router's connections open."""

    router = Router(read_config({"replicas": [{"url": "http://127.0.0.1:1", "role": "decode"}]}))
    replicas = router.replicas
    spec = ReplicaSpec(replica_id=THIRD, url="http://127.0.0.1:1")
    router.controller.step(Added(spec=spec, role=Role.DECODE), 0.0)
    first, second = FakeMonitor(), FakeMonitor()
    first.on_stop = lambda: replicas.perform(ACTIONS[what])
    replicas.monitors = cast("dict[ReplicaId, Monitor]", {FIRST: first, SECOND: second})
    await router.stop()
    assert first.is_stopped
    assert second.is_stopped
    assert (first.begun, second.begun) == ([], [])
    assert len(asyncio.all_tasks()) == 1


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that were run."""
    names: list[str] = []

    async def run(replica: ReplicaId, name: str, command: Sequence[str], limit_s: float) -> None:
        names.append(" ".join(command))

    monkeypatch.setattr(ops_replicas, "run_command", run)
    return names


@asynccontextmanager
async def started() -> AsyncIterator[tuple[Router, FakeMonitor]]:
    """A router with an engine that it starts and ends, and which is saving."""
    config = {"replicas": [{"url": "http://127.0.0.1:1", "role": "decode"}]}
    router, watch = Router(read_config(config)), FakeMonitor()
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
        await router.replicas._tasks.join()
        assert ran == ["halt"]


async def test_engine_that_is_wanted_while_its_saves_end_is_not_ended(ran: list[str]) -> None:
    async with started() as (router, watch):
        router.replicas.perform(Retire(FIRST))
        await asyncio.sleep(0)
        router.replicas.perform(Load(FIRST, Role.DECODE))
        watch.saved.set()
        await router.replicas._tasks.join()
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
        assert watch.start_engine is not None
        await watch.start_engine()
        assert ran == commands


class Engines:
    """Two replicas' ids, two engines, and the commands that start and end the engines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fleet = Fleet()
        self.may_end, self.may_go = asyncio.Event(), asyncio.Event()
        self.up: set[str] = set()
        config = read_config({"replicas": [{"url": "http://127.0.0.1:1", "role": "decode"}]})
        self.upstream = upstream_of(config)
        self.replicas = Replicas(config, self.fleet, self.upstream, lambda event: None)
        monkeypatch.setattr(
            ops_replicas, "Monitor", lambda spec, *_: FakeMonitor(spec, self.may_end, starts=True)
        )
        monkeypatch.setattr(ops_replicas, "run_command", self._run_command)

    async def _run_command(self, _id: str, name: str, command: Sequence[str], _: float) -> None:
        if name == "stop":
            await self.may_go.wait()
            self.up.discard(command[0])
        else:
            self.up.add(command[0])

    def load(self, name: str, url: str) -> None:
        """A replica is wanted, and added where it is not there."""
        if ReplicaId(name) not in self.fleet:
            if url in {each.spec.url for each in self.fleet}:
                return
            spec = ReplicaSpec(replica_id=ReplicaId(name), url=url, start=(url,), stop=(url,))
            self.fleet.add(spec, 0.0)
        self.replicas.perform(Load(ReplicaId(name), Role.DECODE))

    def retire(self, name: str, *, forget: bool) -> None:
        if ReplicaId(name) in self.fleet:
            self.replicas.perform(Retire(ReplicaId(name), forget=forget))
            if forget:
                self.fleet.forget(ReplicaId(name))


EXPIRED_REMOVED_ADDED = (
    ("load", "x", "a"),
    ("turn",),
    ("retire", "x"),
    ("turn",),
    ("saved",),
    ("turn",),
    ("forget", "x"),
    ("turn",),
    ("load", "x", "a"),
    ("turn",),
)
MOVED = (("load", "x", "a"), ("turn",), ("forget", "x"), ("load", "x", "b"))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.sampled_from("xy"), st.sampled_from("ab")),
        st.tuples(st.sampled_from(["retire", "forget"]), st.sampled_from("xy")),
        st.tuples(st.sampled_from(["turn", "turn", "saved", "saving", "stopped", "stopping"])),
    ),
    max_size=30,
)


@given(STEPS)
@example(EXPIRED_REMOVED_ADDED)
@example(MOVED)
def test_engine_runs_in_the_end_if_and_only_if_its_last_order_was_to_load(
    steps: Sequence[tuple[str, ...]],
) -> None:
    """Orders come during saves and earlier commands, and while another replica has the engine."""

    async def main() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            engines = Engines(monkeypatch)
            wanted: dict[str, str] = {}
            orders: dict[str, Callable[..., None]] = {
                "load": engines.load,
                "retire": partial(engines.retire, forget=False),
                "forget": partial(engines.retire, forget=True),
                "saved": engines.may_end.set,
                "saving": engines.may_end.clear,
                "stopped": engines.may_go.set,
                "stopping": engines.may_go.clear,
            }
            for what, *arguments in steps:
                if what == "turn":
                    await turns(3)
                    continue
                orders[what](*arguments)
                if what == "load":
                    found = engines.fleet.get(ReplicaId(arguments[0]))
                    if found is not None:
                        wanted[arguments[0]] = found.spec.url
                elif what in ("retire", "forget"):
                    wanted.pop(arguments[0], None)
            engines.may_end.set()
            engines.may_go.set()
            await turns(20)
            assert engines.up == set(wanted.values())
            await engines.replicas.stop()
            await engines.upstream.close()
            assert len(asyncio.all_tasks()) == 1

    run(main)


async def test_task_that_fails_is_logged_and_its_name_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise KeyError("x")

    tasks = Tasks("owner")
    for count in (1, 2):
        tasks.start("one", fail)
        await tasks.join()
        assert caplog.text.count("owner: the task 'one' has failed") == count
        assert caplog.text.count("KeyError: 'x'") == count


async def test_running_task_keeps_its_name_until_it_is_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran: list[str] = []
    may_end = asyncio.Event()

    async def work(name: str) -> None:
        ran.append(f"{name} begins")
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()  # as a command that is killed and waited for
            ran.append(f"{name} ends")

    caplog.set_level(logging.INFO)
    tasks = Tasks("owner")
    for name in ("first", "not at all"):
        tasks.start("one", partial(work, name))
        await asyncio.sleep(0)
    tasks.cancel("one")
    tasks.cancel("one")
    tasks.start("one", partial(work, "second"))
    await asyncio.sleep(0)
    begun = list(ran)
    may_end.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks.start("one", partial(work, "not at all"))
    await tasks.stop()
    assert begun == ["first begins", "second begins"]
    assert ran == [*begun, "first ends", "second ends"]
    assert len(asyncio.all_tasks()) == 1
    assert not caplog.messages
