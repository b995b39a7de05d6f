"""Which objects of a `file://` store go first (pure).

A file's mtime says until when the object is worth keeping; the smallest goes first. It is on the
file, so all processes share it and it survives restarts without any table.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

HIT_CREDIT_NS = 300 * 10**9  # what one hit is worth under FREQUENCY: as much as being 5 min younger
MAX_CREDIT_NS = 6 * 3600 * 10**9  # and all hits together: an idle object is old after 6 h at last
MAX_SKEW_NS = 3600 * 10**9  # between the clocks of those who share a directory
MAX_CANDIDATES = 16_384  # about 5 MB; more are found by another scan


class Policy(StrEnum):
    """How a hit lengthens an object's life."""

    LRU = "lru"  # worth until its last use
    FREQUENCY = (
        "frequency"  # each hit adds credit, so what is used often outlives what is used once
    )


def worth_until(policy: Policy, worth_ns: int, now_ns: int) -> int:
    """The new mtime of an object that was hit now and was worth keeping until `worth_ns`."""
    if policy is Policy.LRU:
        return now_ns
    return min(max(worth_ns, now_ns) + HIT_CREDIT_NS, now_ns + MAX_CREDIT_NS)


def is_possible(worth_ns: int, now_ns: int) -> bool:
    """Whether the clock can have said so, or has been set back since.

    Without it, what was written while a clock was years ahead would outlive all that came later.
    """
    return worth_ns <= now_ns + MAX_CREDIT_NS + MAX_SKEW_NS


class Candidate(NamedTuple):
    """An object as a scan saw it."""

    worth_ns: int
    charge_bytes: int
    path: str


class Candidates:
    """The coldest objects of the last scan, at most `MAX_CANDIDATES`.

    They go before anything that was written since: what was worth more than the scan's time is
    not taken in. Each is to be looked at again before it is deleted. Threads may call at once.
    """

    def __init__(self) -> None:
        self._coldest_last: list[Candidate] = []

    def __len__(self) -> int:
        return len(self._coldest_last)

    def refill(self, coldest_first: Iterable[Candidate], scanned_ns: int) -> None:
        """Replace all by what a scan found that began at `scanned_ns`."""
        kept = [item for item in coldest_first if item.worth_ns < scanned_ns]
        self._coldest_last = kept[:MAX_CANDIDATES][::-1]

    def take(self) -> Candidate | None:
        """The coldest, which is then no candidate any more."""
        try:
            return self._coldest_last.pop()
        except IndexError:
            return None

    def peek(self) -> list[Candidate]:
        """All of them, coldest first."""
        return self._coldest_last[::-1]
