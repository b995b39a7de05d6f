"""A circuit breaker: when something that fails may be tried again (pure; one thread at a time).

It opens after `FAILURES_TO_OPEN` failures in a row, for a pause that doubles with each further
failure; after a pause one failure opens it again.
"""

from dataclasses import dataclass, field

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class Breaker:
    """Closed while calls succeed, open while they are pointless."""

    failures: int = 0  # in a row
    pause_s: float = 0.0
    closed_at: float = field(default=float("-inf"))  # when the pause ends

    def is_open(self, now: float) -> bool:
        """Return True if calls are refused at `now` (monotonic seconds)."""
        return now < self.closed_at

    def succeeded(self) -> None:
        """Count a success: close, and forget the failures."""
        self.failures, self.pause_s = 0, 0.0

    def failed(self, now: float, jitter: float = 0.0) -> bool:
        """Count a failure; True if it opens the breaker, for `1 + jitter` times its pause."""
        self.failures += 1
        if self.is_open(now) or (self.failures < FAILURES_TO_OPEN and not self.pause_s):
            return False
        self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), LONGEST_PAUSE_S)
        self.closed_at = now + self.pause_s * (1 + jitter)
        return True

    def half_open(self) -> None:
        """Close now; one failure opens it again, for longer than the last time."""
        self.closed_at = float("-inf")

    def tripped(self, now: float, jitter: float = 0.0) -> bool:
        """Count a failure that suffices to open it; True as in `failed`."""
        self.failures = max(self.failures, FAILURES_TO_OPEN - 1)
        return self.failed(now, jitter)

    def hold_open(self) -> None:
        """Open for good, as what failed has ended."""
        self.closed_at = float("inf")
