"""Performs the controller's actions on replicas: monitors each, starts and stops those of hosts.

Owned by the router's loop. What monitors see and how processes end is posted as events.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from vllm_kvpool.router.config import RouterConfig, state_dir
from vllm_kvpool.router.control.events import (
    Added,
    Event,
    Failed,
    Load,
    Probe,
    ReplicaSpec,
    Retire,
    Spawn,
    Warm,
)
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.states import UP, ReplicaId, Role
from vllm_kvpool.router.dataplane.upstream import Upstream
from vllm_kvpool.router.ops.commands import engine_command
from vllm_kvpool.router.ops.compatibility import Problem, problems
from vllm_kvpool.router.ops.launcher import Exited, Launcher
from vllm_kvpool.router.ops.monitor import Monitor
from vllm_kvpool.router.ops.state_file import EngineRecord, StateFile

log = logging.getLogger(__name__)

COMPATIBILITY_EVERY_S = 1.0
STATE_FILE = "engines.json"


def stop_engines(config: RouterConfig) -> tuple[str, ...]:
    """Stop the engines that a router has left running; their ids.

    ConfigError while a router runs, or where what is left cannot be read.
    """
    return asyncio.run(_stop_engines(config))


async def _stop_engines(config: RouterConfig) -> tuple[str, ...]:
    stopped: list[str] = []

    def ended(replica_id: str, exited: Exited) -> None:
        stopped.append(replica_id)
        log.info("engine %s has been stopped: %s", replica_id, exited.why)

    launcher = Launcher(config.hosts, StateFile(state_dir(config) / STATE_FILE), ended)
    await launcher.adopt()
    await launcher.stop_all()
    await launcher.close()
    return tuple(stopped)


class Replicas:
    """`find`, then `perform` what the controller wants, then `stop`."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, engines: Upstream, post: Callable[[Event], None]
    ) -> None:
        self.monitors: dict[ReplicaId, Monitor] = {}
        self._config = config
        self._fleet = fleet
        self._engines = engines
        self._post = post
        self._hosts = {host.name: host for host in config.hosts}
        self._launcher: Launcher | None = None
        self._is_stopping = False
        self._compatibility: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: dict[ReplicaId, asyncio.Task[None]] = {}
        """Engines of ours that end once their saves have ended."""

    async def find(self) -> None:
        """Adopt the engines that a former router has left, and start those that are missing.

        ConfigError where what a former router has left cannot be read.
        """
        self._compatibility = asyncio.create_task(self._watch_compatibility())
        if not self._hosts:
            return
        launch = self._config.launch
        state_file = StateFile(state_dir(self._config) / STATE_FILE)
        self._launcher = Launcher(self._config.hosts, state_file, self._ended)
        missing = {Role.PREFILL: launch.prefill, Role.DECODE: launch.decode}
        room = launch.prefill + launch.decode
        for found in await self._launcher.adopt():
            role = Role(found.role)
            missing[role] -= 1
            room -= 1
            url = f"http://{self._hosts[found.host].address}:{found.port}"
            spec = ReplicaSpec(
                replica_id=ReplicaId(found.replica_id), url=url, host=found.host, is_ours=True
            )
            self._post(Added(spec=spec, role=role))
        for role, count in missing.items():
            # Roles may have changed since; an adopted engine counts whatever it serves.
            for _ in range(min(count, room)):
                room -= 1
                self._post(Spawn(role, why="asked for by the configuration"))

    def perform(self, action: Load | Warm | Probe | Retire) -> None:
        """Never waits; without effect once the router stops."""
        if self._is_stopping:
            return  # nothing would end what is begun now
        match action:
            case Load():
                self._load(action)
            case Warm(replica):
                self.monitors[replica].warm()
            case Probe(replica):
                if replica in self.monitors:
                    self.monitors[replica].ask()
            case Retire(replica, forget):
                self._rest(replica, forget=forget)

    async def stop(self) -> None:
        """Stop the monitors, and the engines of `[[hosts]]` unless `keep_on_exit`."""
        self._is_stopping = True
        if self._compatibility is not None:
            self._compatibility.cancel()
        for ending in self._endings.values():
            ending.cancel()
        await asyncio.gather(*(monitor.stop() for monitor in self.monitors.values()))
        if self._launcher is not None:
            if not self._config.launch.keep_on_exit:
                await self._launcher.stop_all()
            elif kept := self._launcher.replica_ids:
                log.warning(
                    "engines run on without the router: %s; a router with this configuration finds "
                    "them again, and --stop-engines ends them",
                    ", ".join(kept),
                )
            await self._launcher.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch_compatibility(self) -> None:
        """Log engines that have begun, or ceased, to differ from the others; until cancelled."""
        before: dict[ReplicaId, Problem] = {}
        while True:
            found = problems(self._fleet)
            for replica_id, problem in found.items():
                if before.get(replica_id) != problem:
                    log.warning("engine %s %s", replica_id, problem.why)
            for replica_id in before.keys() - found.keys():
                if replica_id in self._fleet and self._fleet[replica_id].state in UP:
                    log.info("engine %s no longer differs from the others", replica_id)
            before = found
            await asyncio.sleep(COMPATIBILITY_EVERY_S)

    def _load(self, action: Load) -> None:
        replica_id = action.replica
        if (ending := self._endings.pop(replica_id, None)) is not None:
            ending.cancel()  # it is wanted again
        spec = self._fleet[replica_id].spec
        monitor = self.monitors.get(replica_id)
        if monitor is None:
            monitor = Monitor(replica_id, spec.url, self._engines, self._config.health, self._post)
            self.monitors[replica_id] = monitor
            monitor.start()
        if spec.is_ours:
            self._launch(action, spec, is_hung=monitor.has_failed)
        monitor.load(self._config.launch.load_timeout_s, wakes=not spec.is_ours)

    def _launch(self, action: Load, spec: ReplicaSpec, *, is_hung: bool) -> None:
        assert self._launcher is not None
        replica_id = spec.replica_id
        if replica_id not in self._launcher.replica_ids:
            record = EngineRecord(
                replica_id=replica_id,
                host=spec.host,
                port=int(spec.url.rpartition(":")[2]),
                role=action.role.value,
                log_path=str(state_dir(self._config) / "logs" / f"{replica_id}.log"),
                stop_timeout_s=self._config.launch.stop_timeout_s,
            )
            host = self._hosts[spec.host]
            self._launcher.start(record, engine_command(self._config.launch, host, record))
            return
        self._launcher.set_role(replica_id, action.role.value)
        if is_hung:
            # A process that served and does not answer never will. Its end is a failure, after
            # which it is started anew.
            self._launcher.stop(replica_id, 0.0)

    def _rest(self, replica_id: ReplicaId, *, forget: bool) -> None:
        monitor = self.monitors.get(replica_id)
        is_ours = self._launcher is not None and replica_id in self._launcher.replica_ids
        if is_ours:
            self._endings[replica_id] = self._run(self._end(replica_id, monitor))
        if monitor is None:
            return  # it has never been loaded
        monitor.rest(sleeps=not is_ours and not forget)
        if forget:
            del self.monitors[replica_id]
            self._run(monitor.stop())

    async def _end(self, replica_id: ReplicaId, monitor: Monitor | None) -> None:
        """End an engine of ours; one that has saved something first ends its saves."""
        if monitor is not None:
            await monitor.await_saves()
        assert self._launcher is not None
        self._launcher.stop(replica_id)
        del self._endings[replica_id]

    def _ended(self, replica_id: str, exited: Exited) -> None:
        """An engine's process is gone."""
        if self._is_stopping:
            log.info("%s has been stopped: %s", replica_id, exited.why)
            return
        log.warning("%s has ended: %s", replica_id, exited.why)
        for line in exited.log_lines:
            log.info("%s: %s", replica_id, line)
        self._post(Failed(ReplicaId(replica_id), f"its process has ended: {exited.why}"))

    def _run(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
