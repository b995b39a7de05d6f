"""Performs the controller's actions on replicas: monitors each, runs its start and stop commands.

Owned by the router's loop. What monitors see is posted as events.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from vllm_kvpool.router.config import RouterConfig
from vllm_kvpool.router.control.events import (
    Event,
    Load,
    Probe,
    ReplicaAction,
    ReplicaSpec,
    Retire,
    Warm,
)
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.states import UP, ReplicaId
from vllm_kvpool.router.dataplane.responses import EngineLost
from vllm_kvpool.router.dataplane.upstream import Upstream
from vllm_kvpool.router.ops.commands import run_command
from vllm_kvpool.router.ops.compatibility import Problem, problems
from vllm_kvpool.router.ops.monitor import Monitor
from vllm_kvpool.router.ops.tasks import Tasks

log = logging.getLogger(__name__)

COMPATIBILITY_EVERY_S = 1.0


class Replicas:
    """`start`, then `perform` what the controller wants, then `stop`."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, engines: Upstream, post: Callable[[Event], None]
    ) -> None:
        self.monitors: dict[ReplicaId, Monitor] = {}
        self._config = config
        self._fleet = fleet
        self._engines = engines
        self._post = post
        self._is_stopping = False
        self._tasks = Tasks("replicas")
        """The compatibility watch, and the end of each engine that is ended by command."""
        self._stops = Tasks("monitors")
        """Stops of the monitors of removed replicas."""

    def start(self) -> None:
        """Watch whether engines differ from one another."""
        self._tasks.start("compatibility", self._watch_compatibility)

    def perform(self, action: ReplicaAction) -> None:
        """Perform an action. Never waits; without effect once the router stops."""
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
        """Stop the monitors; engines go on, and commands that run are killed."""
        self._is_stopping = True
        await asyncio.gather(
            self._tasks.stop(),
            self._stops.join(),
            *(monitor.stop() for monitor in self.monitors.values()),
        )

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
        spec = self._fleet[replica_id].spec
        self._tasks.cancel(_end_of(spec))  # the engine is wanted again
        monitor = self.monitors.get(replica_id)
        if monitor is None:
            monitor = Monitor(spec, self._engines, self._config.health, self._post)
            self.monitors[replica_id] = monitor
            monitor.start()
        if spec.start:
            monitor.load(start=partial(self._start, monitor, is_hung=monitor.has_failed))
        else:
            monitor.load()

    async def _start(self, monitor: Monitor, *, is_hung: bool) -> None:
        """Start an engine that does not answer; EngineLost.

        One that has served before and then failed may hang: it is stopped first.
        """
        spec = monitor.spec
        if is_hung:
            await self._stop(spec)
        elif await monitor.is_healthy():
            return
        limit_s = self._config.health.command_timeout_s
        await run_command(spec.replica_id, "start", spec.start, limit_s)

    async def _stop(self, spec: ReplicaSpec) -> None:
        limit_s = self._config.health.command_timeout_s
        try:
            await run_command(spec.replica_id, "stop", spec.stop, limit_s)
        except EngineLost as error:
            log.warning("%s: %s", spec.replica_id, error)

    def _rest(self, replica_id: ReplicaId, *, forget: bool) -> None:
        monitor = self.monitors.get(replica_id)
        if monitor is None:
            return  # it has never been loaded
        spec = monitor.spec
        if spec.stop:
            self._tasks.start(_end_of(spec), partial(self._end, monitor))
        monitor.rest(sleeps=not (spec.stop or forget))
        if forget:
            del self.monitors[replica_id]
            self._stops.start(f"{spec.url} {id(monitor)}", monitor.stop)

    async def _end(self, monitor: Monitor) -> None:
        """End an engine; one that has saved something first ends its saves."""
        await monitor.await_saves()
        await self._stop(monitor.spec)


def _end_of(spec: ReplicaSpec) -> str:
    """Return the name of the task that ends an engine.

    An engine is its URL, whatever replica has it.
    """
    return f"end of {spec.url}"
