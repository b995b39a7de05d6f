"""How many replicas of each role there should be (pure: inputs and memory in, plan and memory out).

`equations` says how many replicas the load asks for, `plan` what follows. Up is fast: as soon as
the demand exceeds the band, by as many as it takes, `up_cooldown_s` apart. Down is slow: one
replica at a time, after the wish has held for `down_hold_s`, and `down_cooldown_s` after the last
change of that role. Where one role wants more and the other can spare one, the plan is a flip.
Without trustworthy measurements the plan is to stay. A role below its floor is filled without
measurements, and from a role that cannot spare one.
"""

import math
from dataclasses import dataclass, field, replace

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.rates import Rates
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

    def __post_init__(self) -> None:
        if not 0.0 < self.low < self.high <= 1.0:
            raise ConfigError(f"utilisation {self.low} to {self.high}: need 0 < low < high <= 1")

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class Counts:
    """Replicas of one role."""

    serving: int
    loading: int = 0
    mutating: int = 0  # towards the role

    @property
    def all(self) -> int:
        return self.serving + self.loading + self.mutating

    @property
    def is_settled(self) -> bool:
        return self.all == self.serving


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The deployment's load at `now`. Tokens are prompt tokens."""

    now: float
    metrics_age_s: float | None  # of the oldest measurement needed; `None`: one is missing
    prefill: Counts
    decode: Counts
    used_blocks: int  # of requests on decode replicas, commitments included
    blocks_per_replica: int
    block_tokens: int
    waiting_tokens: float  # to be computed: the router's queue and that of prefill replicas
    prompt_tokens_per_s: float  # to be computed, of all that ask to be let in, refused ones too
    incoming_tokens: float  # in the pool: no decode replica taken yet, or being loaded by one
    handoff_tokens_per_s: float  # of whole prompts, as they enter the pool
    rates: Rates

    def of(self, role: Role) -> Counts:
        return self.prefill if role is Role.PREFILL else self.decode

    def missing(self) -> list[str]:
        """Names of what must be positive and is not."""
        given = {
            "blocks_per_replica": self.blocks_per_replica,
            "block_tokens": self.block_tokens,
            "prefill_tokens_per_s": self.rates.prefill_tokens_per_s,
            "transfer_tokens_per_s": self.rates.transfer_tokens_per_s,
        }
        return [name for name, value in given.items() if not value > 0]


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Bands of the equations.

    Prefill at half to full of `high`: twice the load before a step down is taken back. Memory of
    decode moves slowly and overruns badly: the narrowest band, its top well below the watermark at
    which a replica is locked. Hand-offs come and go within fractions of a second: the widest.
    """

    prefill: Band = field(default_factory=lambda: Band(0.4, 0.8))
    decode: Band = field(default_factory=lambda: Band(0.45, 0.8))
    handoff: Band = field(default_factory=lambda: Band(0.2, 0.8))


@dataclass(frozen=True, slots=True)
class Equation:
    """One demand and the numbers of replicas that follow from it."""

    name: str
    role: Role
    demand: float  # in replicas, fully used
    band: Band
    terms: str  # the numbers with their units

    @property
    def least(self) -> int:
        return _replicas(self.demand / self.band.high)

    @property
    def target(self) -> int:
        return _replicas(self.demand / self.band.middle)

    @property
    def most(self) -> int:
        return _replicas(self.demand / self.band.low)

    @property
    def why(self) -> str:
        return (
            f"{self.name}: {self.terms} = {self.demand:.2f} replicas; "
            f"{self.least} at {self.band.high:.0%}, {self.target} at {self.band.middle:.0%}, "
            f"{self.most} at {self.band.low:.0%}"
        )


def _replicas(exactly: float) -> int:
    return math.ceil(max(0.0, min(exactly, MAX_REPLICAS) - ROUNDING))


def equations(
    inputs: PlanInputs, bands: Utilisation, queue_target_s: float
) -> tuple[Equation, ...]:
    """The demands of decode, then of prefill. Needs inputs of which nothing is missing.

    Each is a demand in replicas that would be fully used, divided by the utilisation they may have:

        decode memory     D1 = (used_blocks + incoming / block_tokens) / blocks_per_replica
        hand-off          D2 = (handoff_rate + incoming / target_s) / transfer_rate     (decode)
        prefill           P3 = (prompt_rate + waiting / target_s) / prefill_rate

    Rates of replicas are those of one replica. What waits, in tokens, is to be worked off within
    `queue_target_s`, beside what keeps arriving: without the rate of arrival a deployment without a
    queue would look idle, and be taken away, at any load.
    """
    rates = inputs.rates
    memory = _memory(inputs, bands.decode)
    incoming = inputs.incoming_tokens / queue_target_s
    taking = Equation(
        "hand-off",
        Role.DECODE,
        (inputs.handoff_tokens_per_s + incoming) / rates.transfer_tokens_per_s,
        bands.handoff,
        f"({inputs.handoff_tokens_per_s:.0f} tokens/s + {inputs.incoming_tokens:.0f} tokens in "
        f"{queue_target_s:g} s) / {rates.transfer_tokens_per_s:.0f} tokens/s of a replica",
    )
    short = is_decode_short(memory, taking, inputs.decode)
    computing = _computing(inputs, bands.prefill, queue_target_s, short)
    return memory, taking, computing


def is_decode_short(memory: Equation, taking: Equation, decode: Counts) -> bool:
    """Whether decode replicas that serve now are fewer than needed."""
    return max(memory.least, taking.least) > decode.serving


def _memory(inputs: PlanInputs, band: Band) -> Equation:
    coming = inputs.incoming_tokens / inputs.block_tokens
    return Equation(
        "decode memory",
        Role.DECODE,
        (inputs.used_blocks + coming) / inputs.blocks_per_replica,
        band,
        f"({inputs.used_blocks} blocks used + {coming:.0f} blocks to come) / "
        f"{inputs.blocks_per_replica} blocks of a replica",
    )


def _computing(inputs: PlanInputs, band: Band, target_s: float, short: bool) -> Equation:
    """Prefill. What waits while decode is short waits for decode: it does not count.

    Another prefill replica would only fill the pool faster with what no decoder can take. What
    arrives is not held up by decode and keeps counting.
    """
    waiting = 0.0 if short else inputs.waiting_tokens
    terms = f"{inputs.waiting_tokens:.0f} tokens in {target_s:g} s"
    if short:
        terms = f"nothing for {inputs.waiting_tokens:.0f} tokens that wait while decode is short"
    return Equation(
        "prefill",
        Role.PREFILL,
        (inputs.prompt_tokens_per_s + waiting / target_s) / inputs.rates.prefill_tokens_per_s,
        band,
        f"({inputs.prompt_tokens_per_s:.0f} tokens/s + {terms}) / "
        f"{inputs.rates.prefill_tokens_per_s:.0f} tokens/s of a replica",
    )


LONG_AGO = float("-inf")
SOON = 10.0  # times the hold, and `longest_hold_s` at least: undone within it, a step was wrong


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """What earlier plans left behind, for one role."""

    up_at: float = LONG_AGO
    down_at: float = LONG_AGO
    too_many_since: float | None = None
    patience: int = 0  # how often hold and flip cooldown are doubled


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a plan may be. Counts are of replicas that serve or are on the way to it.

    How many engines there can be, the hosts say on which they are started.
    """

    min_prefill: int = 1
    min_decode: int = 1
    bands: Utilisation = field(default_factory=Utilisation)
    queue_target_s: float = 2.0  # what waits now is to be worked off within it
    up_cooldown_s: float = 5.0
    down_cooldown_s: float = 60.0
    down_hold_s: float = 120.0
    flip_cooldown_s: float = 20.0
    longest_hold_s: float = 1800.0  # of hold and flip cooldown, where they grow
    max_metrics_age_s: float = 10.0

    def __post_init__(self) -> None:
        if self.min_prefill < 0 or self.min_decode < 0:
            raise ConfigError(
                f"min_prefill is {self.min_prefill}, min_decode {self.min_decode}: 0 or more"
            )
        if self.queue_target_s <= 0:
            raise ConfigError(f"queue_target_s is {self.queue_target_s}, must be positive")

    def hold_s(self, memory: RoleMemory) -> float:
        return min(self.down_hold_s * 2.0**memory.patience, self.longest_hold_s)

    def flip_back_s(self, giver: RoleMemory) -> float:
        return min(self.flip_cooldown_s * 2.0**giver.patience, self.longest_hold_s)

    def floor(self, role: Role) -> int:
        """One at least: without a role nothing is split."""
        return max(1, self.min_prefill if role is Role.PREFILL else self.min_decode)


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """What earlier plans left behind."""

    prefill: RoleMemory = RoleMemory()
    decode: RoleMemory = RoleMemory()
    flipped_to: Role | None = None
    flipped_at: float = LONG_AGO

    def of(self, role: Role) -> RoleMemory:
        return self.prefill if role is Role.PREFILL else self.decode

    def changed(self, role: Role, memory: RoleMemory) -> "PlanMemory":
        if role is Role.PREFILL:
            return replace(self, prefill=memory)
        return replace(self, decode=memory)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One role's replicas, as they are and as they should be."""

    have: int
    wanted: int

    @property
    def delta(self) -> int:
        return self.wanted - self.have


@dataclass(frozen=True, slots=True)
class Plan:
    """What should be, and why."""

    prefill: Wanted
    decode: Wanted
    flip_to: Role | None  # one of each delta is meant as a flip to this role
    held: str  # why nothing may change; empty if it may
    equations: tuple[Equation, ...]
    why: str  # for people: a line for each equation and each role

    def of(self, role: Role) -> Wanted:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class _Wish:
    """What one role would like, within its own bounds."""

    role: Role
    counts: Counts
    floor: int
    least: int
    target: int
    most: int

    @property
    def up(self) -> int:
        return self.target - self.counts.all if self.counts.all < self.least else 0

    @property
    def is_too_many(self) -> bool:
        return self.counts.all > self.most

    @property
    def is_urgent(self) -> bool:
        return self.counts.all < self.floor

    def can_give(self, urgently: bool) -> bool:
        """Whether one that serves could go. While others come, what they do is to be seen first."""
        if urgently:
            return self.counts.serving > self.floor
        return self.counts.is_settled and not self.up and self.counts.all > self.target

    def note(self, delta: int, now: float, too_many_since: float | None) -> str:
        if self.up > max(0, delta):
            return f", {self.up - max(0, delta)} more after the cooldown"
        if too_many_since is not None:
            return f", too many for {now - too_many_since:.0f} s"
        return ""


def plan(inputs: PlanInputs, limits: PlanLimits, memory: PlanMemory) -> tuple[Plan, PlanMemory]:
    """The next plan and what to remember of it."""
    held = _not_trusted(inputs, limits)
    terms = () if held else equations(inputs, limits.bands, limits.queue_target_s)
    if held:
        wishes = {role: _blind_wish(role, inputs, limits) for role in Role}
    else:
        wishes = {role: _wish(role, inputs, limits, terms) for role in Role}
    before = _watched(memory, wishes, inputs.now)
    return _Planning(inputs, limits, before, wishes, terms, held).decide()


@dataclass(frozen=True, slots=True)
class _Planning:
    """One call of `plan`."""

    inputs: PlanInputs
    limits: PlanLimits
    memory: PlanMemory
    wishes: dict[Role, _Wish]
    terms: tuple[Equation, ...]
    held: str

    def decide(self) -> tuple[Plan, PlanMemory]:
        flip_to = self._flip()
        deltas = self._ups()
        if flip_to is not None:
            deltas[flip_to.other] -= 1
        elif (down := self._down(deltas)) is not None:
            deltas[down] -= 1
        return self._plan(deltas, flip_to), self._remembered(deltas, flip_to)

    def _may_go_up(self, role: Role) -> bool:
        since_s = self.inputs.now - self.memory.of(role).up_at
        return self.wishes[role].up > 0 and since_s >= self.limits.up_cooldown_s

    def _flip(self) -> Role | None:
        since_s = self.inputs.now - self.memory.flipped_at
        for role in (Role.DECODE, Role.PREFILL):
            urgent = self.wishes[role].is_urgent
            is_back = self.memory.flipped_to is role.other
            back_s = self.limits.flip_back_s(self.memory.of(role.other))
            if is_back and since_s < back_s and not urgent:
                continue
            if self._may_go_up(role) and self.wishes[role.other].can_give(urgent):
                return role
        return None

    def _ups(self) -> dict[Role, int]:
        """Additions, those by a flip among them."""
        return {role: self.wishes[role].up if self._may_go_up(role) else 0 for role in Role}

    def _down(self, deltas: dict[Role, int]) -> Role | None:
        """The role that has had too many for longest, if any may go down now."""
        ready: list[tuple[float, Role]] = []
        for role, wish in self.wishes.items():
            mine, now = self.memory.of(role), self.inputs.now
            since, last = mine.too_many_since, max(mine.up_at, mine.down_at)
            if since is None or deltas[role] or not wish.counts.is_settled:
                continue
            if (
                now - since >= self.limits.hold_s(mine)
                and now - last >= self.limits.down_cooldown_s
            ):
                ready.append((since, role))
        return min(ready, key=lambda pair: pair[0])[1] if ready else None

    def _remembered(self, deltas: dict[Role, int], flip_to: Role | None) -> PlanMemory:
        memory, now = self.memory, self.inputs.now
        for role, delta in deltas.items():
            mine = memory.of(role)
            if delta > 0:
                patience = self._patience(mine)
                memory = memory.changed(role, replace(mine, up_at=now, patience=patience))
            elif delta < 0:
                memory = memory.changed(role, replace(mine, down_at=now, too_many_since=None))
        if flip_to is not None:
            memory = replace(memory, flipped_to=flip_to, flipped_at=now)
        return memory

    def _patience(self, mine: RoleMemory) -> int:
        """After this step up."""
        if mine.down_at <= mine.up_at:
            return mine.patience  # nothing was taken away since
        hold_s = self.limits.hold_s(mine)
        soon_s = max(SOON * hold_s, self.limits.longest_hold_s)
        if self.inputs.now - mine.down_at >= soon_s:
            return max(0, mine.patience - 1)
        return mine.patience + (hold_s < self.limits.longest_hold_s)

    def _plan(self, deltas: dict[Role, int], flip_to: Role | None) -> Plan:
        lines = [self.held] if self.held else [term.why for term in self.terms]
        wanted: dict[Role, Wanted] = {}
        for role, wish in self.wishes.items():
            have, delta = wish.counts.all, deltas[role]
            wanted[role] = Wanted(have, have + delta)
            flip = ", one by a flip" if flip_to is not None else ""
            note = wish.note(delta, self.inputs.now, self.memory.of(role).too_many_since)
            lines.append(f"{role.value}: {have} replicas, wanted {have + delta}{flip}{note}")
        return Plan(
            wanted[Role.PREFILL],
            wanted[Role.DECODE],
            flip_to=flip_to,
            held=self.held,
            equations=self.terms,
            why="\n".join(lines),
        )


def _not_trusted(inputs: PlanInputs, limits: PlanLimits) -> str:
    if missing := inputs.missing():
        return f"hold: no {', '.join(missing)} known"
    if inputs.metrics_age_s is None:
        return "hold: measurements are missing"
    if inputs.metrics_age_s > limits.max_metrics_age_s:
        age, most = inputs.metrics_age_s, limits.max_metrics_age_s
        return f"hold: measurements are {age:.1f} s old, {most:g} s at most count"
    return ""


def _wish(role: Role, inputs: PlanInputs, limits: PlanLimits, terms: tuple[Equation, ...]) -> _Wish:
    floor, own = limits.floor(role), [term for term in terms if term.role is role]
    return _Wish(
        role,
        inputs.of(role),
        floor,
        least=max(floor, *(term.least for term in own)),
        target=max(floor, *(term.target for term in own)),
        most=max(floor, *(term.most for term in own)),
    )


def _blind_wish(role: Role, inputs: PlanInputs, limits: PlanLimits) -> _Wish:
    """Nothing but the floor: no demand is known."""
    counts, floor = inputs.of(role), limits.floor(role)
    return _Wish(role, counts, floor, floor, max(floor, counts.all), max(floor, counts.all))


def _watched(memory: PlanMemory, wishes: dict[Role, _Wish], now: float) -> PlanMemory:
    """Since when each role has had too many."""
    for role, wish in wishes.items():
        mine = memory.of(role)
        since = mine.too_many_since
        since = (now if since is None else since) if wish.is_too_many else None
        memory = memory.changed(role, replace(mine, too_many_since=since))
    return memory
