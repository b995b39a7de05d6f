"""Discovery of engines: by the configuration, a watched file, and DNS.

Owned by the router's loop. If a source cannot be read, its engines stay; whether they live, their
monitors find out. What an administrator has added or removed is not undone. A replica keeps its id
as long as it is there; an engine that is refused, of whatever source, is tried again.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import msgspec

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import ReplicaConfig, RouterConfig, read_replicas
from vllm_kvpool.router.control.events import Added, Event, Remove, ReplicaSpec, SetRole
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.states import MAX_REPLICAS, ReplicaId, Role
from vllm_kvpool.router.ops.tasks import Tasks

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Between two looks at the file, questions to DNS, and tries of refused engines; cluster DNS
answers are valid as long."""
DNS_TIMEOUT_S = 5.0
COMMANDS = ("start", "stop")
ROLES = {
    **{"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.DECODE},
    "spare": None,  # at rest until the plan or a person wants it
}


class Discovery:
    """`start`, `reload` any number of times, `stop`."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        post: Callable[[Event], None],
        every_s: float = EVERY_S,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._every_s = every_s
        self._post = post
        self._sources: dict[str, Sequence[ReplicaConfig]] = {}
        self._known: dict[str, Added] = {}
        """The added replicas, by URL."""
        self._warned: dict[str, str] = {}
        """The last warning of each engine's URL, file or name whose trouble lasts."""
        self._file_taken: tuple[int, int] | None = None
        """Time of writing and size of the file from which the present engines are."""
        self._file_seen: tuple[int, int] | None = None
        """Time of writing and size of the file, as last read."""
        self._tasks = Tasks("discovery")

    def start(self) -> None:
        """Add the replicas of the configuration, then watch the other sources."""
        self.reload(self._config)
        self._tasks.start("watch", self._run)

    def reload(self, config: RouterConfig) -> None:
        """Take the replicas of a configuration that has changed; the rest of it needs a restart."""
        self._set_source("configuration", config.replicas)

    async def stop(self) -> None:
        """Stop watching the file and the DNS names."""
        await self._tasks.stop()

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
                self._apply()
            except Exception:  # the top of the task: engines that are known stay so
                log.exception("discovery has failed; it is tried again in %g s", self._every_s)
            await asyncio.sleep(self._every_s)

    def _read_file(self, path: Path) -> None:
        """Take a file that has changed once two looks find it the same: it may be half-written."""
        try:
            status = path.stat()
            before, self._file_seen = self._file_seen, (status.st_mtime_ns, status.st_size)
            is_half_written = self._file_taken is not None and self._file_seen != before
            if self._file_seen == self._file_taken or is_half_written:
                return
            found = read_replicas(path)
        except (OSError, ConfigError) as error:
            self._warn_once(str(path), f"discovery.file: {error}")
            return
        self._file_taken = self._file_seen
        self._warned.pop(str(path), None)
        self._set_source("file", [_named_by_address(each) for each in found])

    async def _resolve(self, role: Role, name: str) -> None:
        host, _, port = name.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DNS_TIMEOUT_S):
                found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            self._warn_once(name, f"discovery.{role.value}_dns {name} cannot be resolved: {error}")
            return
        self._warned.pop(name, None)
        urls = sorted({_url(str(address[4][0]), int(port)) for address in found})
        found_here = (ReplicaConfig(url=url, role=role.value) for url in urls)
        self._set_source(name, [_named_by_address(each) for each in found_here])

    def _set_source(self, source: str, engines: Sequence[ReplicaConfig]) -> None:
        if len(engines) > MAX_REPLICAS:
            log.error("%s: the first %d of %d engines are used", source, MAX_REPLICAS, len(engines))
        self._sources[source] = engines[:MAX_REPLICAS]
        self._apply()

    def _apply(self) -> None:
        """Post the differences between sources and known replicas; a refusal is logged once."""
        wanted: dict[str, tuple[int, ReplicaConfig]] = {}
        for engines in self._sources.values():
            for number, each in enumerate(engines, 1):
                wanted.setdefault(each.url.rstrip("/"), (number, each))
        for url, known in list(self._known.items()):
            if url not in wanted:
                del self._known[url]
                self._warned.pop(url, None)
                if self._is_present(known):
                    self._post(Remove(known.spec.replica_id))
            elif self._is_present(known):
                self._change(url, known, wanted[url][1])
        ids = {each.id for _, each in wanted.values() if each.id}
        for url, (number, each) in wanted.items():  # in the order in which sources name them
            if url not in self._known:
                self._add(url, each.id or self._default_id(number, ids), each)

    def _change(self, url: str, known: Added, of: ReplicaConfig) -> None:
        """Give a replica another role; a warning names what cannot change while it is there."""
        role, spec = ROLES[of.role], known.spec
        if role is not None and role is not known.role:
            self._known[url] = replace(known, role=role)
            self._post(SetRole(spec.replica_id, role))
        changed = [each for each in COMMANDS if getattr(of, each) != getattr(spec, each)]
        if of.id not in ("", spec.replica_id):
            changed.append("id")
        if changed:
            why = (
                f"engine {spec.replica_id} at {url} keeps its {' and '.join(changed)}: take it "
                "out of its source and put it in again, or restart the router"
            )
            self._warn_once(url, why)
        else:
            self._warned.pop(url, None)

    def _add(self, url: str, replica_id: str, of: ReplicaConfig) -> None:
        spec = ReplicaSpec(replica_id=ReplicaId(replica_id), url=url, start=of.start, stop=of.stop)
        added = Added(spec=spec, role=ROLES[of.role])
        try:
            self._post(added)
        except ConfigError as error:
            why = f"engine {replica_id} at {url} is not added, and is tried again: {error}"
            self._warn_once(url, why)
        else:
            self._known[url] = added
            self._warned.pop(url, None)

    def _default_id(self, number: int, ids: Collection[str]) -> str:
        """Return `replica-NUMBER`, or the lowest number that neither a replica nor `ids` has."""
        taken = {*ids, *(each.replica_id for each in self._fleet)}
        names = (f"replica-{each}" for each in chain((number,), count(1)))
        return next(name for name in names if name not in taken)

    def _is_present(self, known: Added) -> bool:
        """Return True if a replica is in the fleet: the added one, not another of its id."""
        replica = self._fleet.get(known.spec.replica_id)
        return replica is not None and replica.spec is known.spec

    def _warn_once(self, key: str, why: str) -> None:
        if self._warned.get(key) != why:
            self._warned[key] = why
            log.warning("%s", why)


def _named_by_address(of: ReplicaConfig) -> ReplicaConfig:
    return msgspec.structs.replace(of, id=of.id or of.url.partition("://")[2].rstrip("/"))


def _url(address: str, port: int) -> str:
    is_v6 = ipaddress.ip_address(address.partition("%")[0]).version == 6
    return f"http://[{address}]:{port}" if is_v6 else f"http://{address}:{port}"
