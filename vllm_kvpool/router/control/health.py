"""Health of a replica: whether it is given work now, and when it is tried again (pure)."""

import math
from collections import deque
from dataclasses import dataclass, field

from vllm_kvpool.router.control.settings import HealthConfig

WINDOW_S = 120.0
"""In which failures must fall to be too many."""
LONGEST_QUARANTINE_S = 600.0
HALF_OPEN_S = 10.0


@dataclass(slots=True)
class ReplicaBreaker:
    """The circuit breaker of one replica: closed, open (in quarantine), half open.

    So many failures within WINDOW_S open it, for a time that doubles with each round up to
    LONGEST_QUARANTINE_S. Then it is half open: one failure is enough for the next round, and a
    success HALF_OPEN_S after the first one closes it and forgets all rounds.
    """

    config: HealthConfig
    rounds: int = 0
    """Quarantines since the breaker was last closed; 0 while it is closed."""
    until: float = 0.0
    """The end of the quarantine."""
    _proved_at: float | None = None
    """The end of the half-open time, once it has succeeded."""
    _failed_at: deque[float] = field(default_factory=deque)

    def failed(self, now: float) -> bool:
        """Count a failure of this replica alone; whether it is to be left alone `until`."""
        if now < self.until:
            return True  # what comes in from before changes nothing
        self._failed_at.append(now)
        while self._failed_at[0] <= now - WINDOW_S:
            self._failed_at.popleft()
        if not self.rounds and len(self._failed_at) < self.config.max_failures:
            return False
        first_s = self.config.quarantine_s
        longest_s = max(first_s, LONGEST_QUARANTINE_S)
        # Beyond 64 doublings the bound holds in any case.
        self.until = now + min(first_s * 2.0 ** min(self.rounds, 64), longest_s)
        self.rounds += 1
        self._proved_at = None
        self._failed_at.clear()
        return True

    def succeeded(self, now: float) -> None:
        """Count a success."""
        if not self.rounds or now < self.until:
            return
        if self._proved_at is None:
            self._proved_at = now + HALF_OPEN_S
        elif now >= self._proved_at:
            self.rounds = 0


@dataclass(slots=True, eq=False)
class Health:
    """The health of a replica, beside its state. Owned by the controller."""

    breaker: ReplicaBreaker = field(default_factory=lambda: ReplicaBreaker(HealthConfig()))
    busy_until: float = 0.0
    """End of the pause after work that the engine refused."""
    is_doubted: bool = False
    """True from a call that broke off until a probe tells whether the engine lives."""
    retry_at: float = math.inf
    """When a failed engine is tried again; infinite while it is tried."""
    sleep_error: str = ""
    """Error of the last order to sleep; empty if the engine sleeps or had no such order."""

    def is_open(self, now: float) -> bool:
        """Return True unless the engine has refused work lately or lost a call."""
        return now >= self.busy_until and not self.is_doubted
