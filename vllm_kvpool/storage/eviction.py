"""Eviction policies: the score of a stored chunk (pure).

A policy gives each chunk one integer, its score, when the chunk is put and at every hit. Of the
leaves, chunks that no stored chunk comes after, the one with the lowest score is evicted first. So
a prompt's end is evicted before its beginning whatever the policy; the owner of the chunks ensures
it (transfer/host_cache.py, file/rows.py).

A chunk that is put again while its score is still remembered counts as hit: otherwise a store that
is overwritten faster than conversations continue would never see a second use.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum

HALF_LIFE_NS = 300 * 10**9
MAX_HALF_LIVES = 32  # that uses can add up to: those of 2**32 uses at once
MAX_SKEW_NS = 3600 * 10**9  # between the clocks of hosts that share a directory
REMEMBERED = 4  # scores of evicted chunks, for each chunk that fits


class EvictionPolicy:
    """Scores in nanoseconds of the owner's clock, never above `highest_score`."""

    remembered = 0
    """Size of the evicted chunks whose scores are remembered, in multiples of the store's size."""

    def on_put(self, now_ns: int) -> int:
        """Return the score of a new chunk."""
        return now_ns

    def on_hit(self, score: int, now_ns: int) -> int:
        """Return the score of a chunk that is read, or put again after its eviction.

        `score` is the chunk's last score; results are monotonic in it.
        """
        return now_ns


class Lru(EvictionPolicy):
    """Least recently used: evicts the chunk whose last use is longest ago."""


class Lrfu(EvictionPolicy):
    """Evicts the chunk with the least use, where a use loses half its weight in `HALF_LIFE_NS`.

    This is LRFU (Lee et al., IEEE Transactions on Computers 50, 2001). A chunk's value is the sum
    of `0.5 ** (age / HALF_LIFE_NS)` over its uses. Values fall alike, so the order of chunks
    changes at uses only. The score is the time at which the value is, or was, that of a single use.
    A first use scores `now`, a second at once one half-life more, and one long after the first
    hardly more than `now`.
    """

    remembered = REMEMBERED

    def on_hit(self, score: int, now_ns: int) -> int:
        """Return the score after a use at `now_ns`, added to the faded value of earlier uses."""
        half_lives = min((score - now_ns) / HALF_LIFE_NS, MAX_HALF_LIVES - 1)
        value = 1.0 + math.exp2(half_lives)  # of this use and, as they count now, those before
        return now_ns + round(HALF_LIFE_NS * math.log2(value))


class Shares(Enum):
    """Kinds of owners that share a store's room. The owner of most bytes loses chunks first."""

    NONE = "none"
    TENANT = "tenant"
    NAMESPACE = "namespace"


POLICIES: Mapping[str, EvictionPolicy] = {"lrfu": Lrfu(), "lru": Lru()}
DEFAULT_POLICY = "lrfu"


def highest_score(now_ns: int) -> int:
    """Return the highest score that a policy gives.

    A higher one was given by a clock that ran ahead.
    Without this bound, chunks written while a clock was years ahead would never be evicted.
    """
    return now_ns + MAX_HALF_LIVES * HALF_LIFE_NS + MAX_SKEW_NS


class EvictedScores:
    """The scores of the last `capacity` evicted chunks; calls take constant time."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._scores: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scores)

    def remember(self, chunk_id: str, score: int) -> None:
        """Remember the score of an evicted chunk."""
        self._scores[chunk_id] = score
        self._scores.move_to_end(chunk_id)
        if len(self._scores) > self._capacity:
            self._scores.popitem(last=False)

    def take(self, chunk_id: str) -> int | None:
        """Remove and return the score of a chunk that is put again; None if unknown."""
        return self._scores.pop(chunk_id, None)
