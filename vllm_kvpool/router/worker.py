"""A worker's process: a data plane, and a connection to the controller's process."""

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import RouterConfig, read_tenants
from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.dataplane.control_client import ControlClient
from vllm_kvpool.router.dataplane.data_plane import DataPlane, upstream_of
from vllm_kvpool.router.dataplane.message_connection import MessageConnection
from vllm_kvpool.router.dataplane.messages import ToWorker
from vllm_kvpool.router.ops.tenants import Tenants

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
        self._config = config = replace(config, front=share)
        self._control_path = control_path
        self._sockets = sockets
        self._upstream = upstream_of(config)
        keys = front.keys_file
        self._tenants = Tenants(read_tenants(Path(keys))) if keys else None
        rate = Rates().tokens_per_byte
        self.control = ControlClient(name, front.max_wait_s, rate, time.monotonic)
        self.data_plane = DataPlane(
            config,
            self.control,
            self._upstream,
            self._tenants,
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

    def reload(self) -> None:
        """Read keys and the certificate again; ConfigError, and nothing has changed."""
        if self._tenants is not None:
            self._tenants.replace(read_tenants(Path(self._config.front.keys_file)))
        self.data_plane.load_certificate()

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
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the supervisor says when
    loop.add_reader(life, stopped.set)
    worker = Worker(config, name, control_path, sockets)

    def hang_up() -> None:
        try:
            worker.reload()
        except ConfigError as error:
            log.error("SIGHUP: what could not be read stays as it was: %s", error)

    loop.add_signal_handler(signal.SIGHUP, hang_up)
    await worker.start()
    await stopped.wait()
    loop.remove_reader(life)
    await worker.stop()
