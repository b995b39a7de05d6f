"""How many replicas the load asks for: three equations (pure).

Each is a demand, in replicas that would be fully used, divided by the utilisation they may have:

    decode memory     D1 = (used_blocks + incoming / block_tokens) / blocks_per_replica
                           [blocks / (blocks / replica)]                                = replicas
    hand-off          D2 = (handoff_rate + incoming / target_s) / transfer_rate         (decode)
    prefill           P3 = (prompt_rate + waiting / target_s) / prefill_rate
                           [(tokens / s + tokens / s) / (tokens / s / replica)]         = replicas

Rates of replicas are those of one replica. What waits, in tokens, is to be worked off within
`queue_target_s`, beside what keeps arriving: tokens by seconds, like a rate. Without the rate of
arrival a deployment without a queue would look idle, and be taken away, at any load.
"""

import math
from dataclasses import dataclass, field

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.control.states import Role

MANY = 1_000_000  # replicas; no demand is taken for more
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
    return math.ceil(max(0.0, min(exactly, MANY) - ROUNDING))


def equations(
    inputs: PlanInputs, bands: Utilisation, queue_target_s: float
) -> tuple[Equation, ...]:
    """The demands of decode, then of prefill. Needs inputs of which nothing is missing."""
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

    Another prefill replica would only fill the pool faster with what nobody can take. What
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
