"""Views of the controller's state, for the page, the routes and the metrics (pure).

The only module that knows where the controller keeps what: the status page, the administration's
routes, `/health` and the metrics all read the values made here. Times are on the controller's
clock, in seconds: only their differences to `now` mean something.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from vllm_kvpool.router.control.autoscaler import ScalingAction, Step
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.controller_state import ControllerState
from vllm_kvpool.router.control.events import Mode
from vllm_kvpool.router.control.fleet import Fleet, Replica, Transition
from vllm_kvpool.router.control.planner import Wanted
from vllm_kvpool.router.control.requests import PromptPath
from vllm_kvpool.router.control.states import BROKEN, EDGES, LOADING, Goal, Role, State
from vllm_kvpool.router.ops.compatibility import Problem, problems

OUTCOMES = ("served", "rejected", "hopeless", "cancelled", "shed", "late", "given_up")
"""Counts of requests by their end. Each request that arrives ends in one of them."""
COUNTS = (
    "arrived",
    *OUTCOMES,
    "resumed",
    "stolen",
    "handovers_found",
    "handovers_missing",
    "locks",
    "releases",
)
SHOWN_TRANSITIONS = 50
NO_PLAN = "no plan has been made yet"
NOTHING_WANTED = Wanted(0, 0)


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as the router sees it."""

    id: str
    url: str
    state: State
    since: float
    role: Role
    goal: Goal
    problem: str
    """Reason why the engine cannot share KV or models, and what to set; empty if it can."""
    mismatch: str
    """In what it differs then: a value of `compatibility.Mismatch`."""
    retry_in_s: float | None
    """Until it is tried again after a failure; None also while it is tried."""
    locked: bool
    lock_why: str
    running: int
    """Running requests by the engine's metrics, as are `waiting` and `used_blocks`."""
    waiting: int
    used_blocks: int
    committed_blocks: int
    total_blocks: int
    """0: not known yet."""
    prefills: int
    """Prompts it has been given to compute."""
    tokens_in: int
    """Prompt tokens of those that are likely not cached there."""
    decodes: int
    """Requests it has been given to answer."""
    starting: int
    """Requests of `decodes` without a token."""
    bound: int
    """Requests that wait for it to be loaded."""
    bytes_in_per_s: float
    """From the pool into the engine."""
    bytes_out_per_s: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    sampled_at: float | None
    is_stale: bool
    """Its metrics are too old to say anything."""


class WaitingView(msgspec.Struct, frozen=True):
    """The contents of a queue."""

    requests: int
    tokens: int


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted numbers of replicas, the reasons, and the steps."""

    mode: Mode
    at: float | None = None
    prefill: Wanted = NOTHING_WANTED
    decode: Wanted = NOTHING_WANTED
    flip_to: Role | None = None
    held: str = NO_PLAN
    """Reason why nothing may change; empty if it may."""
    why: str = NO_PLAN
    """A line for each equation and each role, with its numbers."""
    steps: tuple[str, ...] = ()


class FirstTokenView(msgspec.Struct, frozen=True):
    """Seconds from arrival to first token, of the requests that began last."""

    p50: float
    p99: float
    requests: int


class RatesView(msgspec.Struct, frozen=True, kw_only=True):
    """The learned rates and the present load."""

    learned: dict[str, float | None]
    """By the names of `rates.Rates`; None: not measured yet."""
    asked_tokens_per_s: float
    """Prompt tokens that arrive, those refused too."""
    handed_tokens_per_s: float
    """Prompt tokens that are computed on one replica and decoded on another."""


class HealthView(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/health`: ids only, since clients may read it."""

    status: Literal["ok", "degraded", "unavailable"]
    serving: dict[Role, int]
    """Replicas that may be given work."""
    down: tuple[str, ...]
    loading: tuple[str, ...]
    mismatches: dict[str, str]


class RouterView(msgspec.Struct, frozen=True, kw_only=True):
    """The whole view."""

    now: float
    replicas: tuple[ReplicaView, ...]
    in_flight: int
    """Requests that have arrived and not ended."""
    queue: WaitingView
    migration: WaitingView
    rates: RatesView
    plan: PlanView
    counts: dict[str, int]
    refusals: dict[int, int]
    """By HTTP status."""
    prompts: dict[str, int]
    """By where they were computed and why (`PromptPath`)."""
    transitions: tuple[Transition, ...]
    """The last ones, oldest first."""
    ttft: FirstTokenView | None
    pool_is_up: bool
    is_collapsed: bool
    """Prompts are computed where they are decoded, as there is no other way."""


def state_of(controller: Controller, now: float) -> RouterView:
    """Return everything that is shown."""
    state = controller.state
    found = problems(state.fleet)
    return RouterView(
        now=now,
        replicas=tuple(
            _replica(state, each, now, found.get(each.replica_id)) for each in state.fleet
        ),
        in_flight=len(state.requests),
        queue=WaitingView(len(state.queue), state.queue.tokens),
        migration=WaitingView(len(state.migration), state.migration.tokens),
        rates=RatesView(
            learned=state.rates.snapshot(state.now).measured(),
            asked_tokens_per_s=state.rates.asked_tokens.per_second(now),
            handed_tokens_per_s=state.rates.handed_tokens.per_second(now),
        ),
        plan=plan_of(controller),
        counts=dict.fromkeys(COUNTS, 0) | state.counts.events,
        refusals=dict(state.counts.refusals),
        prompts={each.value: state.counts.prompts[each] for each in PromptPath},
        transitions=tuple(list(state.fleet.transitions)[-SHOWN_TRANSITIONS:]),
        ttft=_first_token(state.counts.waits),
        pool_is_up=state.pool.is_up,
        is_collapsed=controller.state.collapse() is not None,
    )


def health_of(fleet: Fleet) -> HealthView:
    """Return whether requests can be served, and the replicas that do not serve."""
    serving = {Role.PREFILL: len(fleet.prefillers()), Role.DECODE: len(fleet.decoders())}
    down = tuple(each.replica_id for each in fleet if each.state in BROKEN)
    loading = tuple(each.replica_id for each in fleet if each.state in LOADING)
    mismatches = {str(name): each.mismatch.value for name, each in problems(fleet).items()}
    is_whole = not down and not mismatches
    return HealthView(
        status="unavailable" if not any(serving.values()) else "ok" if is_whole else "degraded",
        serving=serving,
        down=down,
        loading=loading,
        mismatches=mismatches,
    )


def plan_of(controller: Controller) -> PlanView:
    """Return the last plan that has been made."""
    scaling = controller.scaling
    if (plan := scaling.plan) is None:
        return PlanView(mode=scaling.mode)
    return PlanView(
        mode=scaling.mode,
        at=scaling.planned_at,
        prefill=plan.prefill,
        decode=plan.decode,
        flip_to=plan.flip_to,
        held=plan.held,
        why=plan.why,
        steps=tuple(_step(each) for each in scaling.steps),
    )


def transition_counts(controller: Controller) -> Iterator[tuple[tuple[str, str, str], int]]:
    """Yield each edge (from, cause, to) that has been followed, and how often."""
    for (before, cause), count in controller.state.fleet.counts.items():
        yield (before.value, cause.value, EDGES[before, cause].value), count


def _replica(
    state: ControllerState, replica: Replica, now: float, problem: Problem | None
) -> ReplicaView:
    sample, meters = replica.sample, replica.meters
    lock = state.overload.why(replica.replica_id)
    is_paused = replica.state in BROKEN and not replica.is_retried
    return ReplicaView(
        id=replica.replica_id,
        url=replica.spec.url,
        state=replica.state,
        since=replica.since,
        role=replica.role,
        goal=replica.goal,
        problem=problem.why if problem else "",
        mismatch=problem.mismatch.value if problem else "",
        retry_in_s=max(0.0, replica.health.retry_at - now) if is_paused else None,
        locked=replica.replica_id in state.overload.locked,
        lock_why=lock.value if lock is not None else "",
        running=sample.running,
        waiting=sample.waiting,
        used_blocks=sample.used_blocks,
        committed_blocks=replica.work.committed_blocks,
        total_blocks=sample.total_blocks,
        prefills=len(replica.work.prefills),
        tokens_in=replica.work.prefill_tokens,
        decodes=len(replica.work.active),
        starting=replica.work.num_starting,
        bound=len(replica.work.bound),
        bytes_in_per_s=meters["bytes_in"].per_second(now),
        bytes_out_per_s=meters["bytes_out"].per_second(now),
        prompt_tokens_per_s=meters["prompt_tokens"].per_second(now),
        generated_tokens_per_s=meters["generated_tokens"].per_second(now),
        sampled_at=replica.sampled_at,
        is_stale=state.is_stale(replica),
    )


def _step(step: Step) -> str:
    """Return a step in words."""
    role = step.role.value if step.role is not None else ""
    return {
        ScalingAction.REVIVE: f"end the draining of {step.replica}, for {role}",
        ScalingAction.USE_STANDBY: f"use the standby {step.replica} for {role}",
        ScalingAction.FLIP: f"flip {step.replica} to {role}",
        ScalingAction.WAKE: f"wake or start {step.replica} for {role}",
        ScalingAction.RETIRE: f"let the standby {step.replica} sleep or stop",
        ScalingAction.DRAIN: f"drain {step.replica}",
    }[step.action]


def _first_token(waits: Iterable[float]) -> FirstTokenView | None:
    ordered = sorted(waits)
    if not ordered:
        return None
    return FirstTokenView(_quantile(ordered, 0.5), _quantile(ordered, 0.99), len(ordered))


def _quantile(ordered: list[float], share: float) -> float:
    """Return the least of the values that at least such a share of all do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]
