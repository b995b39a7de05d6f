"""What is shown of the router, to people and programs (values only).

Times are on the controller's clock, in seconds: only their differences to `now` mean something.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from vllm_kvpool.router.control.events import Mode
from vllm_kvpool.router.control.means import Means
from vllm_kvpool.router.control.states import TAKES_DECODE, TAKES_PREFILL, Cause, Role, State

OUTCOMES = ("served", "rejected", "hopeless", "cancelled", "shed", "late", "given_up")
"""Of `counts`: how a request can have ended; each that has arrived is in one in the end."""
COUNTS = ("arrived", *OUTCOMES, "resumed", "stolen", "spilled", "locks", "releases")


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as the router sees it."""

    id: str
    url: str
    host: str
    is_ours: bool
    state: State
    """`failed` also while it is asked whether it is back."""
    since: float
    role: Role
    waits_for: Role | None
    """The role it takes once it has been drained."""
    is_leaving: bool
    is_down: bool
    """It has failed and has not answered since, whether it waits or is asked again now."""
    problem: str
    """Why it cannot share KV or models with the others, and what to set; empty if it can."""
    mismatch: str
    """In what it differs then: a value of `compatibility.Mismatch`."""
    retry_in_s: float | None
    """Until it is tried again after a failure."""
    locked: bool
    lock_why: str
    running: int
    """As the engine says, like `waiting` and `used_blocks`."""
    waiting: int
    used_blocks: int
    committed_blocks: int
    total_blocks: int
    """0: it has not said yet."""
    prefills: int
    """Prompts it has been given to compute."""
    tokens_in: int
    """Prompt tokens of those that are likely not cached there."""
    decodes: int
    """Requests it has been given to answer."""
    starting: int
    """Of those, the ones that have not brought a token yet."""
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
    """What a queue holds."""

    requests: int
    tokens: int


class WantedView(msgspec.Struct, frozen=True):
    """Replicas of one role."""

    have: int
    wanted: int


class EquationView(msgspec.Struct, frozen=True, kw_only=True):
    """One demand, in replicas that would be fully used, and what follows from it."""

    name: str
    role: Role
    terms: str
    demand: float
    low: float
    high: float
    least: int
    target: int
    most: int


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the plan takes."""

    means: Means
    what: str
    replica: str | None
    role: Role | None
    host: str | None
    weights: str | None


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas there should be, why, and by which means."""

    mode: Mode
    at: float | None
    prefill: WantedView
    decode: WantedView
    flip_to: Role | None
    held: str
    """Why nothing may change; empty if it may."""
    why: str
    equations: tuple[EquationView, ...]
    steps: tuple[StepView, ...]


class TransitionView(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    replica: str
    before: State
    cause: Cause
    after: State
    why: str


class FirstTokenView(msgspec.Struct, frozen=True):
    """Seconds from arrival to first token, of the requests that began last."""

    p50: float
    p99: float
    requests: int


class RatesView(msgspec.Struct, frozen=True, kw_only=True):
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
    """All of it."""

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
    transitions: tuple[TransitionView, ...]
    """The last ones, oldest first."""
    ttft: FirstTokenView | None
    pool_is_up: bool
    is_collapsed: bool
    """Prompts are computed where they are decoded, as there is no other way."""


def serves(replica: ReplicaView, role: Role) -> bool:
    """Whether it may be given work of a role now."""
    return replica.state in (TAKES_PREFILL if role is Role.PREFILL else TAKES_DECODE)


def bereft(view: RouterView, taken: Iterable[str]) -> list[Role]:
    """Roles that replicas serve now, and none would without those taken away."""
    gone = frozenset(taken)
    return [
        role
        for role in Role
        if (serving := {each.id for each in view.replicas if serves(each, role)})
        and serving <= gone
    ]
