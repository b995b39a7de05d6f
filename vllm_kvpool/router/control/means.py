"""By which means a plan is carried out (pure): the cheapest first.

Up: revive a replica of the role that is shutting, use a warm standby, flip one that the other role
spares, wake a sleeping one, start an engine where its weights are read fastest. A flip of the plan
is not needed where the first two do and there is room: the other role then keeps what it has.
Down: give a standby back if there is one, else drain the one with the least to lose.

No step takes the last serving replica of a role.
"""

from dataclasses import dataclass
from enum import Enum

from vllm_kvpool.router.control.planner import Plan
from vllm_kvpool.router.control.standings import (
    SERVING,
    SHUTTING,
    Row,
    Standing,
    Standings,
    WeightSource,
)
from vllm_kvpool.router.control.states import ReplicaId, Role


class Means(Enum):
    """What is done with a replica or host."""

    REVIVE = "revive"  # its shutting is taken back
    USE_STANDBY = "use standby"
    FLIP = "flip"  # a prefill replica by mutating, a decode replica by shutting
    WAKE = "wake"
    SPAWN = "spawn"
    RETIRE = "retire"  # a standby sleeps or stops
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do. Steps up name the role that is served afterwards."""

    means: Means
    role: Role | None = None  # none of a standby that is given back
    replica: ReplicaId | None = None  # none of an engine to be started
    via: Standing | None = None  # of a flip: the way to the other role
    host: str | None = None  # of an engine to be started
    weights: WeightSource | None = None


def choose_means(plan: Plan, fleet: Standings) -> list[Step]:
    """Steps for the plan's deltas; fewer where the fleet has no means for more."""
    pick, room = _Pick(fleet), plan.room
    wanted = {role: plan.of(role).delta + (1 if plan.flip_to is role.other else 0) for role in Role}
    steps: list[Step] = []
    for role in (Role.DECODE, Role.PREFILL):
        for _ in range(wanted[role]):
            step = pick.up(role, room > 0, plan.flip_to is role)
            if step is None:
                break
            room -= step.means is not Means.FLIP
            steps.append(step)
    downs = (pick.down(role) for role in Role if wanted[role] < 0)
    return steps + [step for step in downs if step is not None]


def expired_standby(fleet: Standings, ttl_s: float) -> Step | None:
    """The standby that has been idle for longest, once that is `ttl_s` or more."""
    return _Pick(fleet).expired(ttl_s)


def _warmest(row: Row) -> tuple[float, float, str]:
    return -row.warmth, -row.idle_since, row.replica


def _least_to_lose(row: Row) -> tuple[float, float, str]:
    return row.load, row.warmth, row.replica


class _Pick:
    """Means of one plan; nothing is picked twice."""

    def __init__(self, fleet: Standings) -> None:
        self._fleet = fleet
        self._picked: set[ReplicaId] = set()
        self._slots = {host.name: host.free_slots for host in fleet.hosts}
        self._flipped = False

    def up(self, role: Role, has_room: bool, may_flip: bool) -> Step | None:
        if has_room and (row := self._take(SHUTTING[role])):
            return Step(Means.REVIVE, role, row.replica)
        if has_room and (row := self._take(Standing.STANDBY)):
            return Step(Means.USE_STANDBY, role, row.replica)
        if may_flip and not self._flipped and (row := spared(role.other, self._fleet)):
            self._flipped = True
            via = Standing.MUTATING if role is Role.DECODE else Standing.SHUTTING_DECODE
            return Step(Means.FLIP, role, row.replica, via=via)
        if has_room and (row := self._take(Standing.SLEEPING)):
            return Step(Means.WAKE, role, row.replica)
        return self._spawn(role) if has_room else None

    def down(self, role: Role) -> Step | None:
        if retired := self.expired(0.0):
            return retired
        if row := spared(role, self._fleet):
            return Step(Means.DRAIN, role, row.replica)
        return None

    def expired(self, ttl_s: float) -> Step | None:
        rows = self._free(Standing.STANDBY)
        longest = min(rows, key=lambda row: (row.idle_since, row.replica), default=None)
        if longest is None or self._fleet.now - longest.idle_since < ttl_s:
            return None
        self._picked.add(longest.replica)
        return Step(Means.RETIRE, replica=longest.replica)

    def _free(self, standing: Standing) -> list[Row]:
        rows = self._fleet.standing(standing)
        return [row for row in rows if row.replica not in self._picked]

    def _take(self, standing: Standing) -> Row | None:
        row = min(self._free(standing), key=_warmest, default=None)
        if row is not None:
            self._picked.add(row.replica)
        return row

    def _spawn(self, role: Role) -> Step | None:
        host = min(
            (host for host in self._fleet.hosts if self._slots[host.name] > 0),
            key=lambda host: (host.weights, -self._slots[host.name], host.name),
            default=None,
        )
        if host is None:
            return None
        self._slots[host.name] -= 1
        return Step(Means.SPAWN, role, host=host.name, weights=host.weights)


def spared(role: Role, fleet: Standings) -> Row | None:
    """The serving replica with the least to lose, idle first, if it is not the last one."""
    serving = fleet.standing(SERVING[role])
    return min(serving, key=_least_to_lose) if len(serving) > 1 else None
