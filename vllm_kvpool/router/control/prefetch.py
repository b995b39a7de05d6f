"""Which cells are brought near for whom, and for how long (pure).

While replicas of a host load, the cells of the prompts they are bound to are brought into the files
of that host, by one process there. It is begun with the first prompt of which the cells are known,
is told of each chunk once, and ended when none of those replicas loads any more. One that has ended
before, for whatever reason, is not begun again until then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_kvpool.identity.cell_names import ChunkNames
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.known_cells import KnownCells
from vllm_kvpool.router.control.states import NEW

MAX_HOSTS = 16
"""At a time: as many processes at most."""
MAX_TOLD_CHUNKS = 1 << 16
"""To one process."""

Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Start a process on a host."""

    host: str


@dataclass(frozen=True, slots=True)
class Bring:
    """Tell it of cells."""

    host: str
    names: ChunkNames


@dataclass(frozen=True, slots=True)
class End:
    """It is not wanted any more."""

    host: str


Wish = Begin | Bring | End


@dataclass(slots=True)
class _Host:
    told: set[str] = field(default_factory=set)
    """Chunks, by their hashes."""
    has_ended: bool = False


class PrefetchPlan:
    """Owned by the router's loop. `hosts`: those on which there is anything to be brought."""

    def __init__(self, hosts: Iterable[str], known: KnownCells) -> None:
        self._hosts = frozenset(hosts)
        self._known = known
        self._begun: dict[str, _Host] = {}

    def look(self, fleet: Fleet) -> list[Wish]:
        """What is to be done by now, in this order."""
        new = fleet.in_states(NEW)
        if not new and not self._begun:
            return []
        bound: dict[str, list[Prefix]] = {}
        for replica in new:
            if replica.spec.is_ours and replica.spec.host in self._hosts:
                prefixes = [request.ask.prefix for request in replica.bound]
                bound.setdefault(replica.spec.host, []).extend(prefixes)
        return self.step(bound)

    def step(self, bound: Mapping[str, Sequence[Prefix]]) -> list[Wish]:
        """`bound`: the prompts that wait for replicas, by the host on which those load."""
        over = sorted(self._begun.keys() - bound.keys())
        wishes: list[Wish] = [End(name) for name in over if not self._begun.pop(name).has_ended]
        for name, prefixes in bound.items():
            for prefix in prefixes:
                wishes += self._of_prompt(name, prefix)
        return wishes

    def ended(self, host: str) -> None:
        """Its process is gone, by itself."""
        if host in self._begun:
            self._begun[host].has_ended = True

    def _of_prompt(self, name: str, prefix: Prefix) -> list[Wish]:
        host = self._begun.get(name)
        if (host is None and len(self._begun) >= MAX_HOSTS) or (host and host.has_ended):
            return []
        names = self._known.find(prefix)
        told: set[str] = host.told if host is not None else set()
        # A chunk's hash is of all tokens up to its end: it says enough.
        new = tuple(each for each in names.chunks if each not in told) if names else ()
        if names is None or not new or len(told) + len(new) > MAX_TOLD_CHUNKS:
            return []
        wishes: list[Wish] = [Bring(name, ChunkNames(names.key_prefixes, new))]
        if host is None:
            host = self._begun[name] = _Host()
            wishes.insert(0, Begin(name))
        host.told.update(new)
        return wishes
