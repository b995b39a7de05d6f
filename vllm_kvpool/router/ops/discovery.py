"""Discovery of engines: by the configuration, a watched file, and DNS.

Owned by the router's loop. If a source cannot be read, its engines stay; whether they live, their
monitors find out. What an administrator has added or removed is not undone.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import ReplicaConfig, RouterConfig, read_replicas, replica_ids
from vllm_kvpool.router.control.events import Added, Event, Remove, ReplicaSpec, SetRole
from vllm_kvpool.router.control.states import MAX_REPLICAS, ReplicaId, Role

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Between two looks at the file and two questions to DNS; cluster DNS answers are valid as long."""
DNS_TIMEOUT_S = 5.0
ROLES = {
    **{"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.DECODE},
    "spare": None,  # at rest until the plan or a person wants it
}


class Discovery:
    """`start`, `reload` any number of times, `stop`."""

    def __init__(
        self, config: RouterConfig, post: Callable[[Event], None], every_s: float = EVERY_S
    ) -> None:
        self._config = config
        self._every_s = every_s
        self._post = post
        self._sources: dict[str, tuple[Added, ...]] = {}
        self._known: dict[str, Added] = {}
        """The added replicas, by URL."""
        self._refused: dict[str, str] = {}
        """Errors of replicas that could not be added, by URL. They are tried again."""
        self._file_taken: tuple[int, int] | None = None
        """Time of writing and size of the file from which the present engines are."""
        self._file_seen: tuple[int, int] | None = None
        """Time of writing and size of the file, as last read."""
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
        engines = (_engine(each.id or _address(each.url), each) for each in found)
        self._set_source("file", tuple(engines))

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
        found_here = (ReplicaConfig(url=url, role=role.value) for url in urls)
        self._set_source(name, tuple(_engine(_address(each.url), each) for each in found_here))

    def _set_source(self, source: str, engines: tuple[Added, ...]) -> None:
        if len(engines) > MAX_REPLICAS:
            log.error("%s: the first %d of %d engines are used", source, MAX_REPLICAS, len(engines))
        self._sources[source] = engines[:MAX_REPLICAS]
        self._apply()

    def _apply(self) -> None:
        """Post what has changed; what cannot be done now is tried again."""
        wanted: dict[str, Added] = {}
        for engines in self._sources.values():
            for each in engines:
                wanted.setdefault(each.spec.url, each)
        for url, known in list(self._known.items()):
            replica_id = known.spec.replica_id
            if url not in wanted:
                del self._known[url]
                self._post(Remove(replica_id))
            elif (role := wanted[url].role) is not None and role is not known.role:
                self._known[url] = replace(known, role=role)
                self._post(SetRole(replica_id, role))
        for url, each in wanted.items():  # in the order in which sources name them
            if url in self._known:
                continue
            try:
                self._post(each)
            except ConfigError as error:
                why = f"engine {each.spec.replica_id} at {url} is not added: {error}"
                self._log_once(url, why)
            else:
                self._known[url] = each
                self._refused.pop(url, None)

    def _log_once(self, key: str, why: str) -> None:
        if self._refused.get(key) != why:
            self._refused[key] = why
            log.warning("%s", why)


def configured(config: RouterConfig) -> tuple[Added, ...]:
    """The engines of `[[replicas]]`."""
    named = zip(replica_ids(config), config.replicas, strict=True)
    return tuple(_engine(name, each) for name, each in named)


def _engine(name: str, of: ReplicaConfig) -> Added:
    spec = ReplicaSpec(
        replica_id=ReplicaId(name), url=of.url.rstrip("/"), start=of.start, stop=of.stop
    )
    return Added(spec=spec, role=ROLES[of.role])


def _url(address: str, port: int) -> str:
    is_v6 = ipaddress.ip_address(address.partition("%")[0]).version == 6
    return f"http://[{address}]:{port}" if is_v6 else f"http://{address}:{port}"


def _address(url: str) -> str:
    return url.partition("://")[2].rstrip("/")
