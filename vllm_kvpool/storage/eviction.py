"""How long a stored chunk is worth keeping (pure).

A policy keeps one integer for each chunk, its score, which it writes when the chunk is put and at
every hit. Of the chunks that nothing in the store comes after, the one with the lowest score is
evicted first. That a prompt's end goes before its beginning is not the policy's to say: the
owner of the chunks sees to it (transfer/host_cache.py, the index of `file://`).

A chunk that comes back while its score is still remembered is hit, not put: without that memory a
store which turns over faster than conversations go on would never see a second use.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

HALF_LIFE_NS = 300 * 10**9
MAX_HALF_LIVES = 32  # that uses can add up to: the worth of four thousand million at once
MAX_SKEW_NS = 3600 * 10**9  # between the clocks of those who share a directory
REMEMBERED = 4  # scores of evicted chunks, for each chunk that there is room for


class EvictionPolicy(Protocol):
    """Scores in nanoseconds of the owner's clock, never above `highest_score`.

    `score` is what the policy gave the chunk last. A higher one never gives a lower one.
    """

    remembered: int
    """How many evicted chunks' scores to remember, for each chunk that there is room for."""

    def on_put(self, now_ns: int) -> int:
        """The score of a chunk that nothing is known of."""

    def on_hit(self, score: int, now_ns: int) -> int:
        """The score of a chunk that is used again: read, saved again, or put after its eviction."""


class Lru:
    """The chunk whose last use is longest ago goes first."""

    remembered = 0

    def on_put(self, now_ns: int) -> int:
        return now_ns

    def on_hit(self, score: int, now_ns: int) -> int:
        return now_ns


class Lrfu:
    """The chunk with the least use goes first, where uses lose half their weight in five minutes.

    This is LRFU (Lee et al., IEEE Transactions on Computers 50, 2001). Its value of a chunk, the
    sum of `0.5 ** (age / HALF_LIFE_NS)` over its uses, falls for all chunks alike, so their order
    changes at uses only: the score is the time at which the value is, or was, that of one use now.
    A first use scores `now`, a second at once one half-life more, and one long after the first
    hardly more than `now`.
    """

    remembered = REMEMBERED

    def on_put(self, now_ns: int) -> int:
        return now_ns

    def on_hit(self, score: int, now_ns: int) -> int:
        half_lives = min((score - now_ns) / HALF_LIFE_NS, MAX_HALF_LIVES - 1)
        value = 1.0 + math.exp2(half_lives)  # of this use, and of those before as they count now
        return now_ns + round(HALF_LIFE_NS * math.log2(value))


POLICIES: Mapping[str, EvictionPolicy] = {"lrfu": Lrfu(), "lru": Lru()}
DEFAULT_POLICY = "lrfu"


def highest_score(now_ns: int) -> int:
    """No policy gives more: a higher score is of a clock that has been set back since.

    Without it, what was written while a clock was years ahead would outlive all that came later.
    """
    return now_ns + MAX_HALF_LIVES * HALF_LIFE_NS + MAX_SKEW_NS


class EvictedScores:
    """Scores of the chunks evicted last, at most `capacity` of them. Calls take constant time."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._scores: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scores)

    def remember(self, chunk_id: str, score: int) -> None:
        """A chunk has been evicted."""
        self._scores[chunk_id] = score
        self._scores.move_to_end(chunk_id)
        if len(self._scores) > self._capacity:
            self._scores.popitem(last=False)

    def take(self, chunk_id: str) -> int | None:
        """The score of a chunk that comes back, which is remembered no more; None if unknown."""
        return self._scores.pop(chunk_id, None)
