"""What the engine knows of the stores behind it, nearest first, and of their health (pure).

A tier that fails `FAILURES_TO_OPEN` batches in a row is left alone for a while that doubles with
each further failure (a circuit breaker): its ops fail at once, loads go to the next tier, saves
skip it. Then it is asked again, and one more failure is enough to leave it alone for longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0

MAX_TRIES = 3  # of an op on a remote tier
RETRY_FIRST_S = 0.05
RETRY_JITTER = 0.5  # part of the pause that is drawn by chance


@dataclass(frozen=True, slots=True)
class Tier:
    """One store as the engine sees it. `durable` and `remote` as in `Capabilities`."""

    name: str  # label in metrics, unique
    durable: bool
    remote: bool


def retry_pause_s(attempts: int, chance: float) -> float:
    """How long to wait before try `attempts + 1`; `chance` is drawn from [0, 1)."""
    pause = RETRY_FIRST_S * 2 ** (attempts - 1)
    return float(pause * (1 - RETRY_JITTER * chance))


@dataclass(slots=True)
class Breaker:
    """Whether a tier is to be asked."""

    failures: int = 0  # batches in a row
    pause_s: float = 0.0
    closed_at: float = field(default=float("-inf"))  # when it may be asked again

    def is_open(self, now: float) -> bool:
        return now < self.closed_at

    @property
    def suspect(self) -> bool:
        """It was left alone, and nothing has succeeded since."""
        return self.pause_s > 0

    def succeeded(self) -> bool:
        """A batch got through; True if the tier was suspect."""
        was_suspect = self.suspect
        self.failures, self.pause_s = 0, 0.0
        return was_suspect

    def failed(self, now: float) -> bool:
        """A batch did not; True if the tier is left alone from now on."""
        self.failures += 1
        if self.is_open(now) or (self.failures < FAILURES_TO_OPEN and not self.suspect):
            return False
        self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), LONGEST_PAUSE_S)
        self.closed_at = now + self.pause_s
        return True


def tier_names(kinds: Sequence[str]) -> tuple[str, ...]:
    """Names of the tiers, by kind of store, told apart by a number where a kind comes again."""
    seen: dict[str, int] = {}
    names = []
    for kind in kinds:
        seen[kind] = seen.get(kind, 0) + 1
        names.append(kind if seen[kind] == 1 else f"{kind}{seen[kind]}")
    return tuple(names)
