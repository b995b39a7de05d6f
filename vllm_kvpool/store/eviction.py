"""How long a stored chunk is worth keeping (pure).

A policy turns time and use into a score, an integer: of the chunks that nothing in the store comes
after, the one with the lowest score is evicted first. That a prompt's end goes before its
beginning is not a policy's to say: stores see to it (`store/file/index.py`, `store/memory.py`).
"""

from collections.abc import Mapping
from typing import Protocol

HIT_CREDIT_NS = 300 * 10**9  # what one hit is worth under FREQUENCY: as much as being 5 min younger
MAX_CREDIT_NS = 6 * 3600 * 10**9  # and all hits together: an idle chunk is old after 6 h at last
MAX_SKEW_NS = 3600 * 10**9  # between the clocks of those who share a directory


class EvictionPolicy(Protocol):
    """Scores of chunks. `position` counts the chunks of the prompt before this one."""

    def on_put(self, now_ns: int, position: int) -> int:
        """The score of a chunk that is stored now."""

    def on_hit(self, score: int, uses: int, now_ns: int, position: int) -> int:
        """The new score of a chunk that is read now, and had been read `uses` times."""


class Lru:
    """Worth until its last use."""

    def on_put(self, now_ns: int, position: int) -> int:
        return now_ns

    def on_hit(self, score: int, uses: int, now_ns: int, position: int) -> int:
        return now_ns


class Frequency:
    """Each hit adds credit, so what is used often outlives what is used once."""

    def on_put(self, now_ns: int, position: int) -> int:
        return now_ns

    def on_hit(self, score: int, uses: int, now_ns: int, position: int) -> int:
        return min(max(score, now_ns) + HIT_CREDIT_NS, now_ns + MAX_CREDIT_NS)


POLICIES: Mapping[str, EvictionPolicy] = {"lru": Lru(), "frequency": Frequency()}


def highest_score(now_ns: int) -> int:
    """No policy gives more: a higher score is of a clock that has been set back since.

    Without it, what was written while a clock was years ahead would outlive all that came later.
    """
    return now_ns + MAX_CREDIT_NS + MAX_SKEW_NS
