"""Carries plans out: what the planner sees of the fleet, and its steps as causes (pure).

In `manual` mode and in a dry run the plan is made and shown all the same, and nothing follows.
"""

import math
from dataclasses import dataclass, field, replace

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.capacity import Counts, PlanInputs
from vllm_kvpool.router.control.desk import Desk
from vllm_kvpool.router.control.events import Mode, ReplicaSpec
from vllm_kvpool.router.control.fleet import Replica
from vllm_kvpool.router.control.lifecycle import Lifecycle
from vllm_kvpool.router.control.means import Means, Step, choose_means, expired_standby
from vllm_kvpool.router.control.placement import DEFAULT_BLOCK_SIZE
from vllm_kvpool.router.control.planner import Plan, PlanLimits, PlanMemory, plan
from vllm_kvpool.router.control.standings import (
    Host,
    Row,
    Standing,
    Standings,
    WarmHosts,
    WeightSource,
)
from vllm_kvpool.router.control.states import ReplicaId, Role, State

LASTING_S = 20.0
"""Plans follow what lasts: a moment's queue is gone long before an engine is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """A machine on which engines can be started, each at a port of its own."""

    name: str
    address: str
    first_port: int
    slots: int
    source: WeightSource = WeightSource.DISK


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    mode: Mode = Mode.MANUAL
    every_s: float = 1.0
    standby_ttl_s: float = 60.0
    warm_ttl_s: float = 600.0
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


class Scaling:
    """Owned by the controller."""

    def __init__(self, desk: Desk, lifecycle: Lifecycle, settings: ScalingSettings) -> None:
        self._desk = desk
        self._lifecycle = lifecycle
        self.settings = settings
        self._memory = PlanMemory()
        self._warm = WarmHosts(settings.warm_ttl_s)
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
        desk = self._desk
        if self._due == math.inf:
            self._due = desk.now + self.settings.every_s  # until then all that there is is added
            desk.asked.read(desk.now, 0.0)
            desk.handed.read(desk.now, 0.0)
        if desk.now < self._due:
            return
        self._due = desk.now + self.settings.every_s
        desk.asked.read(desk.now, desk.asked_tokens)
        desk.handed.read(desk.now, desk.handed_tokens)
        self.plan, self.steps, memory = self._make()
        self.planned_at = desk.now
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
        """What to remember of a plan that nobody carries out: since when there are too many."""
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
        steps = choose_means(made, standings)
        # One that a person has drained is not used, but it may rest.
        idle = expired_standby(self._standings(held=True), settings.standby_ttl_s)
        if idle is not None and all(each.replica != idle.replica for each in steps):
            steps.append(idle)
        return made, steps, memory

    def loaded(self, replica: Replica) -> None:
        """An engine has read its weights."""
        if replica.spec.host:
            self._warm.used(replica.spec.host, self._desk.now)

    def spawn(self, role: Role, host: str, why: str) -> None:
        """Start an engine, where its weights are read fastest if no host is named.

        ConfigError where no host has room, or that one has none; nothing is changed then.
        """
        desk = self._desk
        spec, source = self._best_place(host)
        port = self._free_ports(spec)[0]
        made = ReplicaSpec(
            replica_id=_name(spec, port), url=_url(spec, port), host=spec.name, is_ours=True
        )
        replica = desk.fleet.add(made, desk.now)
        # The first engines of all have nobody to take over from.
        live = bool(desk.fleet.prefillers())
        self._lifecycle.load(replica, role, why, live=live, weights=source.name.lower())

    def _best_place(self, host: str) -> tuple[HostSpec, WeightSource]:
        """Where one more engine is started, and reads its weights."""
        ways = [
            (seen.weights, -seen.free_slots, number)
            for number, seen in enumerate(map(self._host, self.settings.hosts))
            if host in ("", seen.name) and seen.free_slots > 0
        ]
        if not ways:
            raise ConfigError(f"no room on {host or 'any host'}; see [[hosts]] max_replicas")
        weights, _, number = min(ways)
        return self.settings.hosts[number], weights

    def _take(self, step: Step) -> None:
        fleet, why = self._desk.fleet, f"planned: {step.means.value}"
        if step.means is Means.SPAWN:
            assert step.role is not None
            self.spawn(step.role, step.host or "", why)
            return
        assert step.replica is not None
        replica = fleet[step.replica]
        if step.means is Means.RETIRE:
            self._lifecycle.expire(replica, why)
        elif step.means is Means.DRAIN:
            if replica.state is State.DECODE and not replica.has_work:
                self._lifecycle.idle(replica, why)
            else:
                self._lifecycle.drain(replica, why)
        elif step.means is Means.WAKE:
            assert step.role is not None
            live = bool(fleet.prefillers())
            self._lifecycle.load(replica, step.role, why, live=live)
        else:
            assert step.role is not None
            self._lifecycle.give(replica, step.role, why)

    def _inputs(self) -> PlanInputs:
        desk = self._desk
        fleet, now = desk.fleet, desk.now
        serving = [*fleet.prefillers(), *fleet.decoders()]
        ages = [None if each.sampled_at is None else now - each.sampled_at for each in serving]
        known = [age for age in ages if age is not None]
        sized = [each.sample for each in serving if each.sample.total_blocks]
        # What a replica still decodes that is drained will be another one's.
        used = sum(each.used_blocks for each in fleet if each.stays or each.state is State.DECODE)
        handed = sum(
            desk.requests[request_id].ask.prompt_tokens
            for each in fleet
            if each.num_starting
            for request_id, stay in each.stays.items()
            if stay.is_handed and not stay.is_flowing and request_id in desk.requests
        )
        return PlanInputs(
            now=now,
            metrics_age_s=max(known) if known and len(known) == len(ages) else None,
            prefill=self._counts(Role.PREFILL),
            decode=self._counts(Role.DECODE),
            used_blocks=round(self._used.read(now, used)),
            blocks_per_replica=max((each.total_blocks for each in sized), default=0),
            block_tokens=max((each.block_size for each in sized), default=DEFAULT_BLOCK_SIZE),
            waiting_tokens=self._backlog.read(now, desk.backlog_tokens()),
            prompt_tokens_per_s=desk.asked.per_second(now),
            incoming_tokens=self._incoming.read(now, desk.migration.tokens + handed),
            handoff_tokens_per_s=desk.handed.per_second(now),
            rates=desk.snapshot(),
        )

    def _counts(self, role: Role) -> Counts:
        counts = dict.fromkeys(Standing, 0)
        mutating = 0
        for replica in self._desk.fleet:
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

    def _standings(self, *, held: bool = False) -> Standings:
        """`held`: also what people have drained."""
        now = self._desk.now
        theirs = (each for each in self._desk.fleet if held or not each.is_held)
        rows = tuple(self._row(each) for each in theirs if not each.is_leaving)
        return Standings(now, rows, tuple(self._host(spec) for spec in self.settings.hosts))

    def _row(self, replica: Replica) -> Row:
        is_flipping = self._towards(replica) is not None
        return Row(
            replica.replica_id,
            Standing.MUTATING if is_flipping else self._standing(replica),
            load=replica.used_blocks + replica.prefill_tokens,
            warmth=replica.num_prefixes,
            idle_since=max(replica.last_work, replica.since),
        )

    def _host(self, spec: HostSpec) -> Host:
        is_warm = self._warm.until(spec.name, self._desk.now) is not None
        weights = spec.source if is_warm else WeightSource.DISK
        return Host(spec.name, len(self._free_ports(spec)), weights)

    def _free_ports(self, spec: HostSpec) -> list[int]:
        """Those that no engine has, nor one that could be taken for it."""
        taken = {each.spec.url for each in self._desk.fleet}
        return [
            port
            for port in range(spec.first_port, spec.first_port + spec.slots)
            if _url(spec, port) not in taken and _name(spec, port) not in self._desk.fleet
        ]


def _url(spec: HostSpec, port: int) -> str:
    return f"http://{spec.address}:{port}"


def _name(spec: HostSpec, port: int) -> ReplicaId:
    return ReplicaId(f"{spec.name}-{port}")
