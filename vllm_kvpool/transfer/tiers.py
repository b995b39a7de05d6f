"""What the engine knows of the stores behind it, nearest first (pure).

A tier that fails a few batches in a row is left alone for a while (`storage/breaker.py`): its ops
fail at once, loads go to the next tier, saves skip it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


def tier_names(kinds: Sequence[str]) -> tuple[str, ...]:
    """Names of the tiers, by kind of store, told apart by a number where a kind comes again."""
    seen: dict[str, int] = {}
    names = []
    for kind in kinds:
        seen[kind] = seen.get(kind, 0) + 1
        names.append(kind if seen[kind] == 1 else f"{kind}{seen[kind]}")
    return tuple(names)
