"""What the planner and its means see of the deployment: rows and hosts at one moment (values).

Nothing here knows how a replica comes to stand where it stands, or how it is reached.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum

from vllm_kvpool.router.control.states import ReplicaId, Role

MAX_HOSTS = 4096  # remembered as warm at once; the one used longest ago is forgotten first


class Standing(Enum):
    """Where a replica stands, as far as means are chosen by it."""

    SERVING_PREFILL = "serving prefill"
    SERVING_DECODE = "serving decode"
    LOADING_PREFILL = "loading prefill"
    LOADING_DECODE = "loading decode"
    MUTATING = "mutating"
    SHUTTING_PREFILL = "shutting prefill"
    SHUTTING_DECODE = "shutting decode"
    STANDBY = "standby"  # drained, in memory, at once of use in either role
    SLEEPING = "sleeping"
    BROKEN = "broken"


SERVING = {Role.PREFILL: Standing.SERVING_PREFILL, Role.DECODE: Standing.SERVING_DECODE}
SHUTTING = {Role.PREFILL: Standing.SHUTTING_PREFILL, Role.DECODE: Standing.SHUTTING_DECODE}


class WeightSource(IntEnum):
    """Where an engine that starts reads its weights, fastest first."""

    MEMORY = 0  # of the host
    DISK = 1


@dataclass(frozen=True, slots=True)
class Host:
    """Where engines can be started."""

    name: str
    free_slots: int
    weights: WeightSource = WeightSource.DISK
    """Where an engine that starts there now reads them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One replica."""

    replica: ReplicaId
    standing: Standing
    load: float = 0.0  # blocks used and committed of a decode replica, queued tokens of a prefill
    warmth: float = 0.0  # what its caches are worth; only compared
    idle_since: float = 0.0


@dataclass(frozen=True, slots=True)
class Standings:
    """All replicas and hosts."""

    now: float
    rows: tuple[Row, ...]
    hosts: tuple[Host, ...] = ()

    def standing(self, standing: Standing) -> list[Row]:
        return [row for row in self.rows if row.standing is standing]


@dataclass(slots=True)
class WarmHosts:
    """Which hosts still hold the weights in memory: those used in the last `ttl_s`."""

    ttl_s: float
    _until: dict[str, float] = field(default_factory=dict)  # the one used longest ago first

    def used(self, host: str, now: float) -> None:
        """An engine on it has read the weights, or stopped with them in memory."""
        self._until.pop(host, None)
        self._until[host] = now + self.ttl_s
        if len(self._until) > MAX_HOSTS:
            del self._until[next(iter(self._until))]

    def drop(self, host: str) -> None:
        """Its memory is gone."""
        self._until.pop(host, None)

    def until(self, host: str, now: float) -> float | None:
        """When its weights count as gone; `None` if they do."""
        until = self._until.get(host)
        return until if until is not None and until > now else None
