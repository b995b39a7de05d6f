"""A worker's process: a data plane, and a connection to the controller's process."""

import asyncio
import logging
import math
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from vllm_kvpool.router.config import RouterConfig
from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.dataplane.control_client import ControlClient
from vllm_kvpool.router.dataplane.data_plane import DataPlane, upstream_of
from vllm_kvpool.router.dataplane.message_connection import MessageConnection
from vllm_kvpool.router.dataplane.messages import ToWorker
from vllm_kvpool.router.ops.tenants import Tenants
from vllm_kvpool.router.run import until_stopped

log = logging.getLogger(__name__)

RECONNECT_S = 0.02


class Worker:
    """Owned by its loop; `start`, then `stop`. Listens at `sockets`; `name` is its life's own."""

    def __init__(
        self, config: RouterConfig, name: str, control_path: Path, sockets: Sequence[socket.socket]
    ) -> None:
        front = config.front
        share = replace(
            front,
            max_connections=math.ceil(front.max_connections / front.workers),
            max_bodies_bytes=max(front.max_body_bytes, front.max_bodies_bytes // front.workers),
        )
        config = replace(config, front=share)
        self._control_path = control_path
        self._sockets = sockets
        self._upstream = upstream_of(config)
        rate = Rates().tokens_per_byte
        self.control = ControlClient(name, front.max_wait_s, rate, time.monotonic)
        self.data_plane = DataPlane(
            config,
            self.control,
            self._upstream,
            Tenants.of_file(front.keys_file),
            name=f"{name}-",
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, and look for the controller. OSError, ConfigError."""
        await self.data_plane.start(self._sockets)
        self._task = asyncio.create_task(self._stay_connected())

    async def stop(self) -> None:
        """Refuse what comes, let end what runs, for a while."""
        await self.data_plane.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._upstream.close()

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, connection = await loop.create_unix_connection(
                    lambda: MessageConnection(ToWorker, self.control.receive),
                    str(self._control_path),
                )
            except OSError:
                await asyncio.sleep(RECONNECT_S)
                continue
            self.control.connected(connection.send)
            try:
                await connection.ended
                log.warning("the controller is away: requests wait, answers go on")
            finally:
                self.control.lost()
                connection.close()


async def serve_worker(
    config: RouterConfig, name: str, control_path: Path, sockets: Sequence[socket.socket], life: int
) -> None:
    """Until SIGTERM, or until the descriptor `life` ends, as when the supervisor does."""
    worker = Worker(config, name, control_path, sockets)
    await until_stopped(worker.start, worker.stop, worker.data_plane.reload, life)
