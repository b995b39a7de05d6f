"""Carries plans out: what the planner is told of the fleet, and the steps of a plan (pure).

A step up takes the cheapest replica: a draining one of the role, a warm standby, a replica that the
other role spares, an inactive one. A step down retires a standby, else drains the replica with the
least to lose. The last replica of a role keeps serving. In `manual` mode and in a dry run plans are
made and shown, and not carried out.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from vllm_kvpool.router.control.controller_state import ControllerState
from vllm_kvpool.router.control.events import Mode
from vllm_kvpool.router.control.fleet import Fleet, Replica
from vllm_kvpool.router.control.lifecycle import Lifecycle
from vllm_kvpool.router.control.planner import (
    Counts,
    Plan,
    PlanInputs,
    PlanMemory,
    plan,
)
from vllm_kvpool.router.control.requests import DEFAULT_BLOCK_SIZE
from vllm_kvpool.router.control.settings import PlannerConfig
from vllm_kvpool.router.control.states import (
    DRAINING,
    MAY_WORK,
    ROLE_OF,
    TAKES_DECODE,
    TAKES_PREFILL,
    ReplicaId,
    Role,
    State,
)

SERVING = {Role.PREFILL: TAKES_PREFILL, Role.DECODE: TAKES_DECODE}
_LOADING = {
    role: frozenset(state for state in State if ROLE_OF[state] is role) - serving - DRAINING
    for role, serving in SERVING.items()
}
_SHUTTING = {Role.PREFILL: State.SHUTTING_PREFILL, Role.DECODE: State.SHUTTING_DECODE}


class ScalingAction(Enum):
    """An action of the autoscaler on one replica."""

    REVIVE = "revive"  # its shutting is taken back
    USE_STANDBY = "use standby"
    FLIP = "flip"  # a prefill replica by mutating, a decode replica by shutting
    WAKE = "wake"  # or start
    RETIRE = "retire"  # a standby sleeps or stops
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Step:
    """An action on a replica. A step up names the role that the replica will serve."""

    action: ScalingAction
    replica: ReplicaId
    role: Role | None = None  # none of a standby that is given back


def choose_steps(plan: Plan, fleet: Fleet) -> list[Step]:
    """Return steps for the plan's deltas; fewer where the fleet has no replica for more."""
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


def expired_standby(fleet: Fleet, now: float, ttl_s: float) -> Step | None:
    """Return the standby that has been idle for longest, once that is `ttl_s` or more.

    One that a person has drained is not used, but it may rest.
    """
    longest = min(_idle(fleet.in_states(State.SHUTTING_NULL)), key=_idle_since, default=None)
    if longest is None or now - _idle_since(longest)[0] < ttl_s:
        return None
    return Step(ScalingAction.RETIRE, longest.replica_id)


def _idle(standbys: Iterable[Replica]) -> list[Replica]:
    """Return the standbys that answer nothing that is only forwarded."""
    return [each for each in standbys if each.is_idle]


def _idle_since(replica: Replica) -> tuple[float, str]:
    return max(replica.last_work, replica.since), replica.replica_id


def _warmest(replica: Replica) -> tuple[float, float, str]:
    """Return a sort key: the fullest cache first, then the shortest idle time."""
    return -replica.cache.num_held, -_idle_since(replica)[0], replica.replica_id


def _least_to_lose(replica: Replica) -> tuple[float, float, str]:
    load = replica.work.used_blocks + replica.work.prefill_tokens
    return load, replica.cache.num_held, replica.replica_id


class _Pick:
    """Replicas for the steps of one plan; nothing is picked twice."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._picked: set[ReplicaId] = set()
        self._flipped = False

    def up(self, role: Role, *, may_flip: bool) -> Step | None:
        if found := self._take(_SHUTTING[role]):
            return Step(ScalingAction.REVIVE, found.replica_id, role)
        if found := self._take(State.SHUTTING_NULL):
            return Step(ScalingAction.USE_STANDBY, found.replica_id, role)
        if may_flip and not self._flipped and (found := self._spared(role.other)):
            self._flipped = True
            return Step(ScalingAction.FLIP, found.replica_id, role)
        if found := self._take(State.INACTIVE):
            return Step(ScalingAction.WAKE, found.replica_id, role)
        return None

    def down(self, role: Role) -> Step | None:
        standbys = _idle(self._free(State.SHUTTING_NULL))
        if standby := min(standbys, key=_idle_since, default=None):
            self._picked.add(standby.replica_id)
            return Step(ScalingAction.RETIRE, standby.replica_id)
        if found := self._spared(role):
            return Step(ScalingAction.DRAIN, found.replica_id, role)
        return None

    def _free(self, states: frozenset[State] | State) -> list[Replica]:
        return [
            each
            for each in self._fleet.in_states(states)
            if not each.goal.is_final
            and each.replica_id not in self._picked
            and not (each.state in DRAINING and each.goal.role is not None)
        ]

    def _take(self, state: State) -> Replica | None:
        found = min(self._free(state), key=_warmest, default=None)
        if found is not None:
            self._picked.add(found.replica_id)
        return found

    def _spared(self, role: Role) -> Replica | None:
        """Return the serving replica with the least to lose, idle first; never a model's last."""
        serving = self._free(SERVING[role])
        models = Counter(model for each in serving for model in each.models)
        spared = [each for each in serving if all(models[model] > 1 for model in each.models)]
        return min(spared, key=_least_to_lose) if len(serving) > 1 and spared else None


LASTING_S = 20.0
"""Plans follow what lasts: a moment's queue is gone long before an engine is there."""


EVERY_S = 1.0
"""Between two plans."""


@dataclass(slots=True)
class _Lasting:
    """An exponential mean of a quantity, over `LASTING_S`."""

    value: float = 0.0
    _at: float = 0.0

    def read(self, now: float, value: float) -> float:
        """Take in the value at `now` and return the mean."""
        share = 1.0 - math.exp((self._at - now) / LASTING_S)
        self.value, self._at = self.value + share * (value - self.value), now
        return self.value


class Autoscaler:
    """Owned by the controller."""

    def __init__(
        self,
        state: ControllerState,
        lifecycle: Lifecycle,
        config: PlannerConfig,
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self.mode = config.mode
        self._config = config
        self._memory = PlanMemory()
        self._due: float | None = None
        self._backlog = _Lasting()
        self._incoming = _Lasting()
        self._used = _Lasting()
        self.plan: Plan | None = None
        """The last one."""
        self.steps: list[Step] = []
        """Steps of the last plan, carried out or not."""
        self.planned_at: float | None = None

    def tick(self) -> None:
        """Plan anew if it is time to, and in automatic mode carry it out."""
        state = self._state
        if self._due is not None and state.now < self._due:
            return
        is_first, self._due = self._due is None, state.now + EVERY_S
        state.rates.asked_tokens.add(state.now, 0.0)
        state.rates.handed_tokens.add(state.now, 0.0)
        if is_first:
            return  # the router adds its first replicas before the next plan
        self.plan, memory = plan(self._inputs(), self._config, self._memory)
        self.steps, self.planned_at = self._choose_steps(self.plan), state.now
        if self.mode is Mode.AUTOMATIC:
            self._memory = memory
            for step in self.steps:
                self._take(step)
            return
        # What is not carried out leaves one trace: since when roles have too many.
        for role in Role:
            if self.plan.of(role).delta >= 0:
                self._memory.roles[role].too_many_since = memory.roles[role].too_many_since

    def _choose_steps(self, made: Plan) -> list[Step]:
        state = self._state
        steps = choose_steps(made, state.fleet)
        idle = expired_standby(state.fleet, state.now, self._config.standby_ttl_s)
        if idle is not None and all(each.replica != idle.replica for each in steps):
            steps.append(idle)
        return steps

    def _take(self, step: Step) -> None:
        replica, why = self._state.fleet[step.replica], f"planned: {step.action.value}"
        if step.action is ScalingAction.RETIRE:
            self._lifecycle.expire(replica, why)
        elif step.action is ScalingAction.DRAIN:
            self._lifecycle.drain(replica, why)
        else:
            assert step.role is not None
            self._lifecycle.give(replica, step.role, why)

    def _inputs(self) -> PlanInputs:
        state = self._state
        fleet, now = state.fleet, state.now
        # One look at each replica: there may be hundreds.
        oldest, is_complete, largest, block_tokens = now, True, 0, 0
        for replica in (*fleet.prefillers(), *fleet.decoders()):
            if replica.sampled_at is None:
                is_complete = False
            elif replica.sampled_at < oldest:
                oldest = replica.sampled_at
            largest = max(largest, replica.sample.total_blocks)
            block_tokens = max(block_tokens, replica.sample.block_size)
        is_known = is_complete and bool(fleet.prefillers() or fleet.decoders())
        # What a replica still decodes that is drained will be another one's.
        used = handed = 0
        for replica in fleet.in_states(MAY_WORK):
            if replica.work.active or replica.state is State.DECODE:
                used += replica.work.used_blocks
            if replica.work.num_ready > replica.work.num_computing:
                handed += self._tokens_in_handover(replica)
        return PlanInputs(
            now=now,
            metrics_age_s=now - oldest if is_known else None,
            prefill=self._counts(Role.PREFILL),
            decode=self._counts(Role.DECODE),
            used_blocks=round(self._used.read(now, used)),
            blocks_per_replica=largest,
            block_tokens=block_tokens or DEFAULT_BLOCK_SIZE,
            waiting_tokens=self._backlog.read(now, state.backlog_tokens()),
            prompt_tokens_per_s=state.rates.asked_tokens.per_second(now),
            incoming_tokens=self._incoming.read(now, state.migration.tokens + handed),
            handoff_tokens_per_s=state.rates.handed_tokens.per_second(now),
            rates=state.rates.current(state.now),
        )

    def _tokens_in_handover(self, replica: Replica) -> int:
        """Return the prompt tokens that a replica is being handed over, of computed prompts."""
        requests = self._state.requests
        return sum(
            requests[request_id].ask.prompt_tokens
            for request_id, active in replica.work.active.items()
            if request_id in requests
            and active.is_handed
            and not (active.has_first_token or active.awaits_prompt)
        )

    def _counts(self, role: Role) -> Counts:
        fleet = self._state.fleet
        # A failed engine that others start may never be back.
        restarted = [
            each
            for each in fleet.in_states(State.FAILED)
            if each.is_retried and each.spec.start and each.goal.role is role
        ]
        loading = len(fleet.in_states(_LOADING[role])) + len(restarted)
        draining = sum(each.goal.role is role for each in fleet.in_states(DRAINING))
        return Counts(len(fleet.in_states(SERVING[role])), loading + draining)
