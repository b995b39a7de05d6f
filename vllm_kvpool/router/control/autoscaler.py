"""Carries plans out: what the planner sees of the fleet, and the steps of a plan (pure).

Up, the cheapest first: revive a replica of the role that is shutting, use a warm standby, flip one
that the other role spares, wake a sleeping one, start an engine on the host with most room.
Down: give a standby back if there is one, else drain the one with the least to lose, never the last
one that serves a role. In `manual` mode and in a dry run the plan is made and shown all the same.
"""

import math
from dataclasses import dataclass, field, replace
from enum import Enum

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.controller_state import ControllerState
from vllm_kvpool.router.control.events import Mode, ReplicaSpec
from vllm_kvpool.router.control.fleet import Replica
from vllm_kvpool.router.control.lifecycle import Lifecycle
from vllm_kvpool.router.control.placement import DEFAULT_BLOCK_SIZE
from vllm_kvpool.router.control.planner import (
    Counts,
    Plan,
    PlanInputs,
    PlanLimits,
    PlanMemory,
    plan,
)
from vllm_kvpool.router.control.states import ReplicaId, Role, State


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


@dataclass(frozen=True, slots=True)
class Host:
    """Where engines can be started."""

    name: str
    free_slots: int


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica."""

    replica: ReplicaId
    standing: Standing
    load: float = 0.0  # blocks used and committed of a decode replica, queued tokens of a prefill
    warmth: float = 0.0  # what its caches are worth; only compared
    idle_since: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All replicas and hosts."""

    now: float
    rows: tuple[ReplicaRow, ...]
    hosts: tuple[Host, ...] = ()

    def standing(self, standing: Standing) -> list[ReplicaRow]:
        return [row for row in self.rows if row.standing is standing]


class ScalingAction(Enum):
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

    means: ScalingAction
    role: Role | None = None  # none of a standby that is given back
    replica: ReplicaId | None = None  # none of an engine to be started
    via: Standing | None = None  # of a flip: the way to the other role
    host: str | None = None  # of an engine to be started


def choose_steps(plan: Plan, fleet: FleetSnapshot) -> list[Step]:
    """Steps for the plan's deltas; fewer where the fleet has no means for more."""
    pick = _Pick(fleet)
    wanted = {role: plan.of(role).delta + (1 if plan.flip_to is role.other else 0) for role in Role}
    steps: list[Step] = []
    for role in (Role.DECODE, Role.PREFILL):
        for _ in range(wanted[role]):
            step = pick.up(role, may_flip=plan.flip_to is role)
            if step is None:
                break
            steps.append(step)
    downs = (pick.down(role) for role in Role if wanted[role] < 0)
    return steps + [step for step in downs if step is not None]


def expired_standby(fleet: FleetSnapshot, ttl_s: float) -> Step | None:
    """The standby that has been idle for longest, once that is `ttl_s` or more."""
    return _Pick(fleet).expired(ttl_s)


def _warmest(row: ReplicaRow) -> tuple[float, float, str]:
    return -row.warmth, -row.idle_since, row.replica


def _least_to_lose(row: ReplicaRow) -> tuple[float, float, str]:
    return row.load, row.warmth, row.replica


class _Pick:
    """ScalingAction of one plan; nothing is picked twice."""

    def __init__(self, fleet: FleetSnapshot) -> None:
        self._fleet = fleet
        self._picked: set[ReplicaId] = set()
        self._slots = {host.name: host.free_slots for host in fleet.hosts}
        self._flipped = False

    def up(self, role: Role, *, may_flip: bool) -> Step | None:
        if row := self._take(SHUTTING[role]):
            return Step(ScalingAction.REVIVE, role, row.replica)
        if row := self._take(Standing.STANDBY):
            return Step(ScalingAction.USE_STANDBY, role, row.replica)
        if may_flip and not self._flipped and (row := spared(role.other, self._fleet)):
            self._flipped = True
            via = Standing.MUTATING if role is Role.DECODE else Standing.SHUTTING_DECODE
            return Step(ScalingAction.FLIP, role, row.replica, via=via)
        if row := self._take(Standing.SLEEPING):
            return Step(ScalingAction.WAKE, role, row.replica)
        return self._spawn(role)

    def down(self, role: Role) -> Step | None:
        if retired := self.expired(0.0):
            return retired
        if row := spared(role, self._fleet):
            return Step(ScalingAction.DRAIN, role, row.replica)
        return None

    def expired(self, ttl_s: float) -> Step | None:
        rows = self._free(Standing.STANDBY)
        longest = min(rows, key=lambda row: (row.idle_since, row.replica), default=None)
        if longest is None or self._fleet.now - longest.idle_since < ttl_s:
            return None
        self._picked.add(longest.replica)
        return Step(ScalingAction.RETIRE, replica=longest.replica)

    def _free(self, standing: Standing) -> list[ReplicaRow]:
        rows = self._fleet.standing(standing)
        return [row for row in rows if row.replica not in self._picked]

    def _take(self, standing: Standing) -> ReplicaRow | None:
        row = min(self._free(standing), key=_warmest, default=None)
        if row is not None:
            self._picked.add(row.replica)
        return row

    def _spawn(self, role: Role) -> Step | None:
        host = min(
            (host for host in self._fleet.hosts if self._slots[host.name] > 0),
            key=lambda host: (-self._slots[host.name], host.name),
            default=None,
        )
        if host is None:
            return None
        self._slots[host.name] -= 1
        return Step(ScalingAction.SPAWN, role, host=host.name)


def spared(role: Role, fleet: FleetSnapshot) -> ReplicaRow | None:
    """The serving replica with the least to lose, idle first, if it is not the last one."""
    serving = fleet.standing(SERVING[role])
    return min(serving, key=_least_to_lose) if len(serving) > 1 else None


LASTING_S = 20.0
"""Plans follow what lasts: a moment's queue is gone long before an engine is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """A machine on which engines can be started, each at a port of its own."""

    name: str
    address: str
    first_port: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    mode: Mode = Mode.MANUAL
    every_s: float = 1.0
    standby_ttl_s: float = 60.0
    hosts: tuple[HostSpec, ...] = ()
    limits: PlanLimits = field(default_factory=PlanLimits)


_STANDING = {
    **dict.fromkeys((State.PREFILL, State.OLD_PREFILL), Standing.SERVING_PREFILL),
    **dict.fromkeys(
        (State.LOADING_PREFILL, State.NEW_PREFILL, State.REFRACTORY_PREFILL, State.AUS_PREFILL),
        Standing.LOADING_PREFILL,
    ),
    **dict.fromkeys((State.LOADING_DECODE, State.AUS_DECODE), Standing.LOADING_DECODE),
    State.DECODE: Standing.SERVING_DECODE,
    State.MUTATING_TO_DECODE: Standing.MUTATING,
    State.SHUTTING_PREFILL: Standing.SHUTTING_PREFILL,
    State.SHUTTING_DECODE: Standing.SHUTTING_DECODE,
    State.SHUTTING_NULL: Standing.STANDBY,
    State.INACTIVE: Standing.SLEEPING,
    **dict.fromkeys((State.FAILED, State.QUARANTINED), Standing.BROKEN),
}


@dataclass(slots=True)
class _Lasting:
    """What of a quantity that comes and goes has lasted."""

    value: float = 0.0
    _at: float = 0.0

    def read(self, now: float, value: float) -> float:
        """It is so much now; what it was fades with `LASTING_S`."""
        share = 1.0 - math.exp((self._at - now) / LASTING_S)
        self.value, self._at = self.value + share * (value - self.value), now
        return self.value


class Autoscaler:
    """Owned by the controller."""

    def __init__(
        self, state: ControllerState, lifecycle: Lifecycle, settings: ScalingSettings
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self.settings = settings
        self._memory = PlanMemory()
        self._due = math.inf
        self._backlog = _Lasting()
        self._incoming = _Lasting()
        self._used = _Lasting()
        self.plan: Plan | None = None
        """The last one."""
        self.steps: list[Step] = []
        """What it takes, or would take."""
        self.planned_at: float | None = None

    def set_mode(self, mode: Mode) -> None:
        self.settings = replace(self.settings, mode=mode)

    def preview(self) -> tuple[Plan, list[Step]]:
        """What the plan would be now, and what it would take; nothing follows of it."""
        made, steps, _ = self._make()
        return made, steps

    def tick(self) -> None:
        """Plan anew if it is time to, and in automatic mode carry it out."""
        state = self._state
        if self._due == math.inf:
            self._due = state.now + self.settings.every_s  # until then all that there is is added
            state.asked.read(state.now, 0.0)
            state.handed.read(state.now, 0.0)
        if state.now < self._due:
            return
        self._due = state.now + self.settings.every_s
        state.asked.read(state.now, state.asked_tokens)
        state.handed.read(state.now, state.handed_tokens)
        self.plan, self.steps, memory = self._make()
        self.planned_at = state.now
        if self.settings.mode is not Mode.AUTOMATIC:
            self._memory = self._watched(self.plan, memory)
            return
        self._memory = memory
        for step in self.steps:
            self._take(step)

    def next_due(self) -> float:
        """When the next plan is made."""
        return self._due

    def _watched(self, made: Plan, memory: PlanMemory) -> PlanMemory:
        """The memory after a plan that is not carried out: since when roles have too many."""
        kept = self._memory
        for role in Role:
            mine = kept.of(role)
            since = memory.of(role).too_many_since
            if made.of(role).delta < 0:
                since = mine.too_many_since
            kept = kept.changed(role, replace(mine, too_many_since=since))
        return kept

    def _make(self) -> tuple[Plan, list[Step], PlanMemory]:
        settings, standings = self.settings, self._standings()
        made, memory = plan(self._inputs(), settings.limits, self._memory)
        steps = choose_steps(made, standings)
        # One that a person has drained is not used, but it may rest.
        idle = expired_standby(self._standings(held=True), settings.standby_ttl_s)
        if idle is not None and all(each.replica != idle.replica for each in steps):
            steps.append(idle)
        return made, steps, memory

    def spawn(self, role: Role, host: str, why: str) -> None:
        """Start an engine, on the host with most room if none is named.

        ConfigError where no host has room, or that one has none; nothing is changed then.
        """
        state = self._state
        spec = self._best_host(host)
        port = self._free_ports(spec)[0]
        made = ReplicaSpec(
            replica_id=_name(spec, port), url=_url(spec, port), host=spec.name, is_ours=True
        )
        replica = state.fleet.add(made, state.now)
        # The first engines are bound to nothing: no replica could steal it.
        live = bool(state.fleet.prefillers())
        self._lifecycle.load(replica, role, why, live=live)

    def _best_host(self, name: str) -> HostSpec:
        """Where one more engine is started."""
        free = {each.name: len(self._free_ports(each)) for each in self.settings.hosts}
        hosts = [
            each for each in self.settings.hosts if name in ("", each.name) and free[each.name]
        ]
        if not hosts:
            raise ConfigError(f"no room on {name or 'any host'}; see [[hosts]] max_replicas")
        return max(hosts, key=lambda each: free[each.name])

    def _take(self, step: Step) -> None:
        fleet, why = self._state.fleet, f"planned: {step.means.value}"
        if step.means is ScalingAction.SPAWN:
            assert step.role is not None
            self.spawn(step.role, step.host or "", why)
            return
        assert step.replica is not None
        replica = fleet[step.replica]
        if step.means is ScalingAction.RETIRE:
            self._lifecycle.expire(replica, why)
        elif step.means is ScalingAction.DRAIN:
            if replica.state is State.DECODE and not replica.has_work:
                self._lifecycle.idle(replica, why)
            else:
                self._lifecycle.drain(replica, why)
        elif step.means is ScalingAction.WAKE:
            assert step.role is not None
            live = bool(fleet.prefillers())
            self._lifecycle.load(replica, step.role, why, live=live)
        else:
            assert step.role is not None
            self._lifecycle.give(replica, step.role, why)

    def _inputs(self) -> PlanInputs:
        state = self._state
        fleet, now = state.fleet, state.now
        serving = [*fleet.prefillers(), *fleet.decoders()]
        ages = [None if each.sampled_at is None else now - each.sampled_at for each in serving]
        known = [age for age in ages if age is not None]
        sized = [each.sample for each in serving if each.sample.total_blocks]
        # What a replica still decodes that is drained will be another one's.
        used = sum(each.used_blocks for each in fleet if each.active or each.state is State.DECODE)
        handed = sum(
            state.requests[request_id].ask.prompt_tokens
            for each in fleet
            if each.num_starting
            for request_id, stay in each.active.items()
            if stay.is_handed and not stay.has_first_token and request_id in state.requests
        )
        return PlanInputs(
            now=now,
            metrics_age_s=max(known) if known and len(known) == len(ages) else None,
            prefill=self._counts(Role.PREFILL),
            decode=self._counts(Role.DECODE),
            used_blocks=round(self._used.read(now, used)),
            blocks_per_replica=max((each.total_blocks for each in sized), default=0),
            block_tokens=max((each.block_size for each in sized), default=DEFAULT_BLOCK_SIZE),
            waiting_tokens=self._backlog.read(now, state.backlog_tokens()),
            prompt_tokens_per_s=state.asked.per_second(now),
            incoming_tokens=self._incoming.read(now, state.migration.tokens + handed),
            handoff_tokens_per_s=state.handed.per_second(now),
            rates=state.snapshot(),
        )

    def _counts(self, role: Role) -> Counts:
        counts = dict.fromkeys(Standing, 0)
        mutating = 0
        for replica in self._state.fleet:
            towards = self._towards(replica)
            if towards is not None:
                mutating += towards is role
            else:
                counts[self._standing(replica)] += 1
        if role is Role.PREFILL:
            serving, loading = Standing.SERVING_PREFILL, Standing.LOADING_PREFILL
        else:
            serving, loading = Standing.SERVING_DECODE, Standing.LOADING_DECODE
        return Counts(counts[serving], counts[loading], mutating)

    def _towards(self, replica: Replica) -> Role | None:
        """The role that a replica is on its way to from the other one."""
        if replica.state is State.MUTATING_TO_DECODE and replica.waits_for is None:
            return None if replica.is_parked else Role.DECODE
        return replica.waits_for

    def _standing(self, replica: Replica) -> Standing:
        """Its state's, but nothing is expected of a failed engine that others start, or not."""
        if replica.is_retried and not replica.spec.is_ours:
            return Standing.BROKEN
        return _STANDING[replica.state]

    def _standings(self, *, held: bool = False) -> FleetSnapshot:
        """`held`: also what people have drained."""
        now = self._state.now
        theirs = (each for each in self._state.fleet if held or not each.is_held)
        rows = tuple(self._row(each) for each in theirs if not each.is_leaving)
        hosts = (Host(each.name, len(self._free_ports(each))) for each in self.settings.hosts)
        return FleetSnapshot(now, rows, tuple(hosts))

    def _row(self, replica: Replica) -> ReplicaRow:
        is_flipping = self._towards(replica) is not None
        return ReplicaRow(
            replica.replica_id,
            Standing.MUTATING if is_flipping else self._standing(replica),
            load=replica.used_blocks + replica.prefill_tokens,
            warmth=replica.num_prefixes,
            idle_since=max(replica.last_work, replica.since),
        )

    def _free_ports(self, spec: HostSpec) -> list[int]:
        """Those that no engine has, nor one that could be taken for it."""
        taken = {each.spec.url for each in self._state.fleet}
        return [
            port
            for port in range(spec.first_port, spec.first_port + spec.slots)
            if _url(spec, port) not in taken and _name(spec, port) not in self._state.fleet
        ]


def _url(spec: HostSpec, port: int) -> str:
    return f"http://{spec.address}:{port}"


def _name(spec: HostSpec, port: int) -> ReplicaId:
    return ReplicaId(f"{spec.name}-{port}")
