"""When a place that fails is asked again (pure; one thread at a time).

After `FAILURES_TO_OPEN` failures in a row it is left alone for a while that doubles with each
further failure (a circuit breaker); then one more failure is enough to leave it alone for longer.
"""

from dataclasses import dataclass, field

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class Breaker:
    """Whether a place is to be asked."""

    failures: int = 0  # in a row
    pause_s: float = 0.0
    closed_at: float = field(default=float("-inf"))  # when it may be asked again

    def is_open(self, now: float) -> bool:
        return now < self.closed_at

    def succeeded(self) -> None:
        """Something got through."""
        self.failures, self.pause_s = 0, 0.0

    def failed(self, now: float) -> bool:
        """Something did not; True if the place is left alone from now on."""
        self.failures += 1
        if self.is_open(now) or (self.failures < FAILURES_TO_OPEN and not self.pause_s):
            return False
        self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), LONGEST_PAUSE_S)
        self.closed_at = now + self.pause_s
        return True

    def tripped(self, now: float) -> bool:
        """Something failed so badly that once is enough; True as in `failed`."""
        self.failures = max(self.failures, FAILURES_TO_OPEN - 1)
        return self.failed(now)

    def hold(self) -> None:
        """Another part watches the place: leave it alone until `let_go`."""
        self.closed_at = float("inf")

    def let_go(self) -> None:
        """It may be asked again, now; one failure leaves it alone for as long as the last time."""
        self.closed_at = float("-inf")
