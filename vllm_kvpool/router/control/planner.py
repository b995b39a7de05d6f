"""The wanted number of replicas of each role (pure: inputs and memory in, plan and memory out).

`equations` says how many replicas the load asks for, `plan` what follows. Up is fast: as soon as
the demand exceeds the band, by as many as it takes, UP_COOLDOWN_S apart. Down is slow: one
replica at a time, after `down_hold_s` with too many, and DOWN_COOLDOWN_S after the last
change of that role. Where one role wants more and the other can spare one, the plan is a flip.
Without trustworthy measurements the plan is to stay. A role below its floor is filled without
measurements, and from a role that cannot spare one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.control.settings import PlannerConfig
from vllm_kvpool.router.control.states import MAX_REPLICAS, Role

ROUNDING = 1e-9  # replicas: a demand of 3.0000000001 is three


@dataclass(frozen=True, slots=True)
class Band:
    """The utilisation that is left alone: more replicas above `high`, fewer below `low`.

    A step down leaves at most `low`, a step up aims at the middle: load must grow by
    `high / low` before a step down is taken back.
    """

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The utilisation that a step up aims at."""
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class Counts:
    """Replicas of one role."""

    serving: int
    coming: int = 0  # loading, or draining towards the role

    @property
    def all(self) -> int:
        """Replicas of the role, whether they serve yet or not."""
        return self.serving + self.coming


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The deployment's load at `now`. Tokens are prompt tokens."""

    now: float
    metrics_age_s: float | None  # of the oldest measurement needed; `None`: one is missing
    prefill: Counts
    decode: Counts
    used_blocks: int  # of requests on decode replicas, commitments included
    blocks_per_replica: int  # 0: not known
    block_tokens: int
    waiting_tokens: float  # to be computed: the router's queue and that of prefill replicas
    prompt_tokens_per_s: float  # to be computed, of all that ask to be let in, refused ones too
    incoming_tokens: float  # in the pool: no decode replica taken yet, or being loaded by one
    handoff_tokens_per_s: float  # of whole prompts, as they enter the pool
    rates: Rates

    def of(self, role: Role) -> Counts:
        """Return the replicas of a role."""
        return self.prefill if role is Role.PREFILL else self.decode


# Prefill at half to full of `high`: twice the load before a step down is taken back. Memory of
# decode moves slowly and overruns badly: the narrowest band, its top well below the watermark at
# which a replica is locked. Hand-offs come and go within fractions of a second: the widest.
PREFILL_BAND, DECODE_BAND, HANDOFF_BAND = Band(0.4, 0.8), Band(0.45, 0.8), Band(0.2, 0.8)


@dataclass(frozen=True, slots=True)
class Equation:
    """A demand, and the numbers of replicas that follow from it."""

    name: str
    role: Role
    demand: float  # in replicas, fully used
    band: Band
    terms: str  # the numbers with their units

    @property
    def least(self) -> int:
        """Replicas that keep the utilisation at or below the band's upper end."""
        return _replicas(self.demand / self.band.high)

    @property
    def target(self) -> int:
        """Replicas that bring the utilisation to the band's middle."""
        return _replicas(self.demand / self.band.middle)

    @property
    def most(self) -> int:
        """Replicas that keep the utilisation at or above the band's lower end."""
        return _replicas(self.demand / self.band.low)

    @property
    def why(self) -> str:
        """The terms, the demand and the three numbers, as the log and the page show them."""
        return (
            f"{self.name}: {self.terms} = {self.demand:.2f} replicas; "
            f"{self.least} at {self.band.high:.0%}, {self.target} at {self.band.middle:.0%}, "
            f"{self.most} at {self.band.low:.0%}"
        )


def _replicas(exactly: float) -> int:
    return math.ceil(max(0.0, min(exactly, MAX_REPLICAS) - ROUNDING))


def equations(inputs: PlanInputs, queue_target_s: float) -> tuple[Equation, ...]:
    """Return the demands of decode, then of prefill. `blocks_per_replica` is not 0.

    Each is a demand in replicas that would be fully used, divided by the utilisation they may have:

    - decode memory: D1 = (used_blocks + incoming / block_tokens) / blocks_per_replica.
    - hand-over (decode): D2 = (handoff_rate + incoming / target_s) / transfer_rate.
    - prefill: P3 = (prompt_rate + waiting / target_s) / prefill_rate.

    The rates are of one replica. Waiting tokens are to be worked off within `queue_target_s`,
    beside those that keep arriving. Without the rate of arrival, a deployment without a queue would
    look idle at any load.
    """
    rates, target_s = inputs.rates, queue_target_s
    incoming_blocks = inputs.incoming_tokens / inputs.block_tokens
    memory = Equation(
        "decode memory",
        Role.DECODE,
        (inputs.used_blocks + incoming_blocks) / inputs.blocks_per_replica,
        DECODE_BAND,
        f"({inputs.used_blocks} blocks used + {incoming_blocks:.0f} blocks to come) / "
        f"{inputs.blocks_per_replica} blocks of a replica",
    )
    taking = Equation(
        "hand-over",
        Role.DECODE,
        (inputs.handoff_tokens_per_s + inputs.incoming_tokens / target_s)
        / rates.transfer_tokens_per_s,
        HANDOFF_BAND,
        f"({inputs.handoff_tokens_per_s:.0f} tokens/s + {inputs.incoming_tokens:.0f} tokens in "
        f"{target_s:g} s) / {rates.transfer_tokens_per_s:.0f} tokens/s of a replica",
    )
    # What waits while decode is short waits for decode: another prefill replica would only fill the
    # pool faster with what no decoder can take. What arrives is not held up by decode and counts.
    waiting, terms = inputs.waiting_tokens, f"{inputs.waiting_tokens:.0f} tokens in {target_s:g} s"
    if max(memory.least, taking.least) > inputs.decode.serving:
        terms = f"nothing for {waiting:.0f} tokens that wait while decode is short"
        waiting = 0.0
    computing = Equation(
        "prefill",
        Role.PREFILL,
        (inputs.prompt_tokens_per_s + waiting / target_s) / rates.prefill_tokens_per_s,
        PREFILL_BAND,
        f"({inputs.prompt_tokens_per_s:.0f} tokens/s + {terms}) / "
        f"{rates.prefill_tokens_per_s:.0f} tokens/s of a replica",
    )
    return memory, taking, computing


LONG_AGO = float("-inf")
LONGEST_HOLD_S = 1800.0
"""Upper limit of hold and flip cooldown, which double with a role's patience."""
SOON = 10.0  # times the hold, and LONGEST_HOLD_S at least: undone within it, a step was wrong


QUEUE_TARGET_S = 2.0  # what waits now is to be worked off within it
UP_COOLDOWN_S, DOWN_COOLDOWN_S, FLIP_COOLDOWN_S = 5.0, 60.0, 20.0
MAX_METRICS_AGE_S = 10.0


@dataclass(slots=True)
class RoleMemory:
    """The memory of earlier plans for one role."""

    up_at: float = LONG_AGO
    down_at: float = LONG_AGO
    too_many_since: float | None = None
    patience: int = 0
    """Number of times that hold and flip cooldown have been doubled."""

    def longer(self, seconds: float) -> float:
        """Return a hold or cooldown, as patient as the role has become."""
        return min(seconds * 2.0**self.patience, LONGEST_HOLD_S)

    def went_up(self, now: float, down_hold_s: float) -> None:
        """Note a step up. Soon after a step down it makes the role more patient, else less."""
        if self.down_at > self.up_at:
            hold_s = self.longer(down_hold_s)
            if now - self.down_at >= max(SOON * hold_s, LONGEST_HOLD_S):
                self.patience = max(0, self.patience - 1)
            else:
                self.patience += hold_s < LONGEST_HOLD_S
        self.up_at = now


@dataclass(slots=True)
class PlanMemory:
    """The memory of earlier plans."""

    roles: dict[Role, RoleMemory] = field(
        default_factory=lambda: {role: RoleMemory() for role in Role}
    )
    flipped_to: Role | None = None
    flipped_at: float = LONG_AGO


@dataclass(frozen=True, slots=True)
class Wanted:
    """The replicas of a role: present and wanted."""

    have: int
    wanted: int

    @property
    def delta(self) -> int:
        """Replicas to add, or to remove if negative."""
        return self.wanted - self.have


@dataclass(frozen=True, slots=True)
class Plan:
    """The wanted replicas of each role, and the reasons."""

    prefill: Wanted
    decode: Wanted
    flip_to: Role | None  # one of each delta is meant as a flip to this role
    held: str  # why nothing may change; empty if it may
    why: str  # for people: a line for each equation and each role

    def of(self, role: Role) -> Wanted:
        """Return the wanted replicas of a role."""
        return self.prefill if role is Role.PREFILL else self.decode


class _Bounds(NamedTuple):
    """The replicas of a role, and the least and most that it should have."""

    counts: Counts
    floor: int
    least: int
    target: int
    most: int

    @property
    def up(self) -> int:
        return self.target - self.counts.all if self.counts.all < self.least else 0

    @property
    def is_urgent(self) -> bool:
        return self.counts.all < self.floor

    def can_give(self, urgently: bool) -> bool:
        """Return True if a serving replica may be removed.

        Wait while other replicas start, until their effect is measured.
        """
        if urgently:
            return self.counts.serving > self.floor
        return not self.counts.coming and not self.up and self.counts.all > self.target


def plan(inputs: PlanInputs, config: PlannerConfig, memory: PlanMemory) -> tuple[Plan, PlanMemory]:
    """Return the next plan and what to remember of it; `memory` is left as it is."""
    memory = replace(memory, roles={role: replace(each) for role, each in memory.roles.items()})
    now = inputs.now
    held = _not_trusted(inputs)
    terms = () if held else equations(inputs, QUEUE_TARGET_S)
    bounds_of = {role: _bounds(role, inputs, floor_of(role, config), terms) for role in Role}
    for role, bounds in bounds_of.items():
        mine = memory.roles[role]
        if bounds.counts.all <= bounds.most:
            mine.too_many_since = None
        elif mine.too_many_since is None:
            mine.too_many_since = now
    # Additions, those by a flip among them.
    deltas = {
        role: bounds.up if now - memory.roles[role].up_at >= UP_COOLDOWN_S else 0
        for role, bounds in bounds_of.items()
    }
    flip_to = _flip(bounds_of, deltas, memory, now)
    hold_s = config.down_hold_s
    down = flip_to.other if flip_to is not None else _down(bounds_of, deltas, memory, now, hold_s)
    if down is not None:
        deltas[down] -= 1
    lines = [held] if held else [term.why for term in terms]
    for role, bounds in bounds_of.items():
        have, delta = bounds.counts.all, deltas[role]
        words = f"{role.value}: {have} replicas, wanted {have + delta}"
        words += ", one by a flip" if flip_to is not None else ""
        mine, later = memory.roles[role], bounds.up - max(0, delta)
        if later > 0:
            words += f", {later} more after the cooldown"
        elif mine.too_many_since is not None:
            words += f", too many for {now - mine.too_many_since:.0f} s"
        lines.append(words)
        if delta > 0:
            mine.went_up(now, hold_s)
        elif delta < 0:
            mine.down_at, mine.too_many_since = now, None
    if flip_to is not None:
        memory.flipped_to, memory.flipped_at = flip_to, now
    wanted = {
        role: Wanted(bounds.counts.all, bounds.counts.all + deltas[role])
        for role, bounds in bounds_of.items()
    }
    why = "\n".join(lines)
    return Plan(wanted[Role.PREFILL], wanted[Role.DECODE], flip_to, held, why), memory


def _not_trusted(inputs: PlanInputs) -> str:
    if not inputs.blocks_per_replica:
        return "hold: no engine has reported its KV blocks"
    if inputs.metrics_age_s is None:
        return "hold: measurements are missing"
    if inputs.metrics_age_s > MAX_METRICS_AGE_S:
        age, most = inputs.metrics_age_s, MAX_METRICS_AGE_S
        return f"hold: measurements are {age:.1f} s old, {most:g} s at most count"
    return ""


def floor_of(role: Role, config: PlannerConfig) -> int:
    """Return the least number of replicas of a role, at least 1."""
    return max(1, config.min_prefill if role is Role.PREFILL else config.min_decode)


def _bounds(role: Role, inputs: PlanInputs, floor: int, terms: Sequence[Equation]) -> _Bounds:
    counts = inputs.of(role)
    own = [term for term in terms if term.role is role]
    if not own:  # no demand is known: nothing but the floor
        return _Bounds(counts, floor, floor, max(floor, counts.all), max(floor, counts.all))
    return _Bounds(
        counts,
        floor,
        least=max(floor, *(term.least for term in own)),
        target=max(floor, *(term.target for term in own)),
        most=max(floor, *(term.most for term in own)),
    )


def _flip(
    bounds_of: Mapping[Role, _Bounds], deltas: Mapping[Role, int], memory: PlanMemory, now: float
) -> Role | None:
    """Return the role that is to get a replica from the other."""
    for role in (Role.DECODE, Role.PREFILL):
        urgent = bounds_of[role].is_urgent
        back_s = memory.roles[role.other].longer(FLIP_COOLDOWN_S)
        is_back_soon = memory.flipped_to is role.other and now - memory.flipped_at < back_s
        if is_back_soon and not urgent:
            continue
        if deltas[role] > 0 and bounds_of[role.other].can_give(urgent):
            return role
    return None


def _down(
    bounds_of: Mapping[Role, _Bounds],
    deltas: Mapping[Role, int],
    memory: PlanMemory,
    now: float,
    down_hold_s: float,
) -> Role | None:
    """Return the role that has had too many for longest, if any may go down now."""
    ready: list[tuple[float, Role]] = []
    for role, bounds in bounds_of.items():
        mine = memory.roles[role]
        since, last = mine.too_many_since, max(mine.up_at, mine.down_at)
        if since is None or deltas[role] or bounds.counts.coming:
            continue
        is_held = now - since < mine.longer(down_hold_s)
        if not is_held and now - last >= DOWN_COOLDOWN_S:
            ready.append((since, role))
    return min(ready, key=lambda pair: pair[0])[1] if ready else None
