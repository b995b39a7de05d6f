"""When a replica that keeps failing is left alone, and when it is trusted again (pure).

So many failures within a window put it in quarantine, for a time that doubles with each round up
to a bound. Then it is on probation: one failure is enough for the next round, and a success at
the probation's end forgets all rounds.

                 failed        failed too often  succeeded    proved  time is up
    WELL         WELL          QUARANTINED       WELL         -       -
    QUARANTINED  QUARANTINED   -                 QUARANTINED  -       PROBATION
    PROBATION    QUARANTINED   -                 PROBATION    WELL    -

What comes in from before the quarantine says nothing new and changes nothing. All belongs to one
thread; time comes in as `now`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from vllm_kvpool.errors import ConfigError


class Trust(Enum):
    """Whether a replica may be given work."""

    WELL = "well"
    QUARANTINED = "quarantined"
    PROBATION = "probation"  # it may: that is how it is tried


class Event(Enum):
    """What happens to a replica."""

    FAILED = "failed"
    FAILED_TOO_OFTEN = "failed too often"
    SUCCEEDED = "succeeded"
    PROVED = "succeeded at the end of its probation"
    TIME_UP = "time is up"


TABLE = {
    (Trust.WELL, Event.FAILED): Trust.WELL,
    (Trust.WELL, Event.FAILED_TOO_OFTEN): Trust.QUARANTINED,
    (Trust.WELL, Event.SUCCEEDED): Trust.WELL,
    (Trust.QUARANTINED, Event.FAILED): Trust.QUARANTINED,
    (Trust.QUARANTINED, Event.SUCCEEDED): Trust.QUARANTINED,
    (Trust.QUARANTINED, Event.TIME_UP): Trust.PROBATION,
    (Trust.PROBATION, Event.FAILED): Trust.QUARANTINED,
    (Trust.PROBATION, Event.SUCCEEDED): Trust.PROBATION,
    (Trust.PROBATION, Event.PROVED): Trust.WELL,
}


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When and for how long a replica is left alone."""

    failures: int = 3
    window_s: float = 30.0  # in which they must fall
    first_quarantine_s: float = 5.0
    longest_quarantine_s: float = 300.0
    jitter: float = 0.1  # of the time, taken off at most
    probation_s: float = 10.0

    def __post_init__(self) -> None:
        if self.failures < 1 or not 0 < self.first_quarantine_s <= self.longest_quarantine_s:
            raise ConfigError(
                f"failures={self.failures}, first_quarantine_s={self.first_quarantine_s}, "
                f"longest_quarantine_s={self.longest_quarantine_s}: quarantines must grow"
            )


def no_jitter(_round: int) -> float:
    return 0.0


@dataclass(slots=True)
class Breaker:
    """One replica's trust. `jitter` gives a share of 0 to 1 for each round of quarantine."""

    limits: BreakerLimits = field(default_factory=BreakerLimits)
    jitter: Callable[[int], float] = no_jitter
    rounds: int = 0  # of quarantine, since all was well
    until: float = 0.0  # the end of the quarantine or probation
    _trust: Trust = Trust.WELL
    _failed_at: deque[float] = field(default_factory=deque)

    def trust(self, now: float) -> Trust:
        """Where the replica stands; its quarantine ends here."""
        if self._trust is Trust.QUARANTINED and now >= self.until:
            self._go(Event.TIME_UP)
            self.until = now + self.limits.probation_s
        return self._trust

    def failed(self, now: float) -> Trust:
        """It failed, alone: what fails everywhere is not to be told here."""
        before = self.trust(now)
        self._failed_at.append(now)
        while self._failed_at[0] <= now - self.limits.window_s:
            self._failed_at.popleft()
        too_often = before is Trust.WELL and len(self._failed_at) >= self.limits.failures
        self._go(Event.FAILED_TOO_OFTEN if too_often else Event.FAILED)
        if before is not Trust.QUARANTINED and self._trust is Trust.QUARANTINED:
            self.until = now + self._quarantine_s()
            self.rounds += 1
        if self._trust is Trust.QUARANTINED:
            self._failed_at.clear()
        return self._trust

    def succeeded(self, now: float) -> Trust:
        """It did what it was asked to."""
        proved = self.trust(now) is Trust.PROBATION and now >= self.until
        self._go(Event.PROVED if proved else Event.SUCCEEDED)
        if proved:
            self.rounds = 0
        return self._trust

    def _quarantine_s(self) -> float:
        limits = self.limits
        doublings = min(self.rounds, 64)  # beyond it the bound holds in any case
        exact_s = min(limits.first_quarantine_s * 2.0**doublings, limits.longest_quarantine_s)
        return exact_s * (1.0 - limits.jitter * self.jitter(self.rounds))

    def _go(self, event: Event) -> None:
        self._trust = TABLE[self._trust, event]
