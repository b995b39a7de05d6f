"""Which engines the router may use: the configuration, a file that is watched, and DNS.

Owned by the router's loop. If a source cannot be read, its engines stay; whether they live, their
monitors find out. What an administrator has added or removed is not undone.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import RouterConfig, read_replicas, replica_ids
from vllm_kvpool.router.control.events import Added, Event, Remove, ReplicaSpec, SetRole
from vllm_kvpool.router.control.states import MAX_REPLICAS, ReplicaId, Role

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Between two looks at the file and two questions to DNS; cluster DNS answers are valid as long."""
DNS_TIMEOUT_S = 5.0
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.DECODE}


class FoundEngine(NamedTuple):
    """An engine as a source names it."""

    replica_id: str
    url: str
    role: Role


class Discovery:
    """`start`, `reload` any number of times, `stop`."""

    def __init__(
        self, config: RouterConfig, post: Callable[[Event], None], every_s: float = EVERY_S
    ) -> None:
        self._config = config
        self._every_s = every_s
        self._post = post
        self._sources: dict[str, tuple[FoundEngine, ...]] = {}
        self._known: dict[str, FoundEngine] = {}
        """Those that have been added, by url."""
        self._refused: dict[str, str] = {}
        """Why those of a url cannot be added; they are tried again."""
        self._file_taken: tuple[int, int] | None = None
        """When the file was written that the engines are from, and its size."""
        self._file_seen: tuple[int, int] | None = None
        """Of the last look."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Add the replicas of the configuration, then watch the other sources."""
        self._set_source("configuration", configured(self._config))
        discovery = self._config.discovery
        if discovery.file or discovery.prefill_dns or discovery.decode_dns:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def reload(self, config: RouterConfig) -> None:
        """Take the replicas of a configuration that has changed; the rest of it needs a restart."""
        self._set_source("configuration", configured(config))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        discovery = self._config.discovery
        names = {Role.PREFILL: discovery.prefill_dns, Role.DECODE: discovery.decode_dns}
        while True:
            try:
                if discovery.file:
                    self._read_file(Path(discovery.file))
                for role, name in names.items():
                    if name:
                        await self._resolve(role, name)
            except Exception:  # the top of the task: engines that are known stay so
                log.exception("discovery has failed; it is tried again in %g s", self._every_s)
            await asyncio.sleep(self._every_s)

    def _read_file(self, path: Path) -> None:
        """Take a file that has changed once two looks find it the same: it may be half-written."""
        try:
            status = path.stat()
            before, self._file_seen = self._file_seen, (status.st_mtime_ns, status.st_size)
            if self._file_seen == self._file_taken:
                self._apply()
                return
            if self._file_taken is not None and self._file_seen != before:
                return
            found = read_replicas(path)
        except (OSError, ConfigError) as error:
            self._log_once(str(path), f"discovery.file: {error}")
            return
        self._file_taken = self._file_seen
        self._refused.pop(str(path), None)
        self._set_source(
            "file",
            tuple(
                FoundEngine(each.id or _address(each.url), each.url.rstrip("/"), ROLES[each.role])
                for each in found
            ),
        )

    async def _resolve(self, role: Role, name: str) -> None:
        host, _, port = name.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DNS_TIMEOUT_S):
                found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            self._log_once(name, f"discovery.{role.value}_dns {name} cannot be resolved: {error}")
            return
        self._refused.pop(name, None)
        urls = sorted({_url(str(address[4][0]), int(port)) for address in found})
        self._set_source(name, tuple(FoundEngine(_address(url), url, role) for url in urls))

    def _set_source(self, source: str, endpoints: tuple[FoundEngine, ...]) -> None:
        if len(endpoints) > MAX_REPLICAS:
            log.error(
                "%s: the first %d of %d engines are used", source, MAX_REPLICAS, len(endpoints)
            )
        self._sources[source] = endpoints[:MAX_REPLICAS]
        self._apply()

    def _apply(self) -> None:
        """Post what has changed; what cannot be done now is tried again."""
        wanted: dict[str, FoundEngine] = {}
        for endpoints in self._sources.values():
            for each in endpoints:
                wanted.setdefault(each.url, each)
        for url, known in list(self._known.items()):
            if url not in wanted:
                del self._known[url]
                self._post(Remove(ReplicaId(known.replica_id)))
            elif wanted[url].role is not known.role:
                self._known[url] = known._replace(role=wanted[url].role)
                self._post(SetRole(ReplicaId(known.replica_id), wanted[url].role))
        for url, each in wanted.items():  # in the order in which sources name them
            if url in self._known:
                continue
            spec = ReplicaSpec(replica_id=ReplicaId(each.replica_id), url=url)
            try:
                self._post(Added(spec=spec, role=each.role))
            except ConfigError as error:
                self._log_once(url, f"engine {each.replica_id} at {url} is not added: {error}")
            else:
                self._known[url] = each
                self._refused.pop(url, None)

    def _log_once(self, key: str, why: str) -> None:
        if self._refused.get(key) != why:
            self._refused[key] = why
            log.warning("%s", why)


def configured(config: RouterConfig) -> tuple[FoundEngine, ...]:
    """The engines of `[[replicas]]`."""
    return tuple(
        FoundEngine(name, each.url.rstrip("/"), ROLES[each.role])
        for name, each in zip(replica_ids(config), config.replicas, strict=True)
    )


def _url(address: str, port: int) -> str:
    is_v6 = ipaddress.ip_address(address.partition("%")[0]).version == 6
    return f"http://[{address}]:{port}" if is_v6 else f"http://{address}:{port}"


def _address(url: str) -> str:
    return url.partition("://")[2].rstrip("/")
