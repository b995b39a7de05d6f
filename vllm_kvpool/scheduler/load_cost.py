"""How long to wait, and whether loading pays (pure).

`LoadCostModel` holds measured rates of loading and of computing, for `load_policy: auto`:
exponentially weighted means in tokens per second. Until both are known, loads are taken: a load is
how its rate becomes known.
"""

from collections.abc import Mapping

WEIGHT = 0.3
MIN_PREFILL_TOKENS = 64
MAX_STEP_S = 30.0
RETRY_EVERY = 16
IDLE_WAIT_MIN_S = 0.001
IDLE_WAIT_MAX_S = 0.01
IDLE_WAIT_SHARE = 0.1


def idle_wait_s(waited_s: float) -> float:
    """How long an engine with nothing to compute may block, once a step, on what it has waited for.

    What is waited for ends the wait at once; a request that arrives meanwhile is held up by it.
    """
    return min(IDLE_WAIT_MAX_S, max(IDLE_WAIT_MIN_S, waited_s * IDLE_WAIT_SHARE))


class LoadCostModel:
    """Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self._compute: float | None = None
        self._load: float | None = None
        self._last_step: tuple[float, int] | None = None
        self._refused = 0

    def step_planned(self, now: float, scheduled: Mapping[str, int]) -> None:
        """A step begins; the time since the one before tells that one's rate."""
        if self._last_step is not None:
            began, tokens = self._last_step
            if tokens >= MIN_PREFILL_TOKENS and 0 < now - began < MAX_STEP_S:
                self._compute = _mean(self._compute, tokens / (now - began))
        self._last_step = (now, sum(scheduled.values())) if scheduled else None

    def loaded(self, tokens: float, seconds: float) -> None:
        """A load of so many tokens has taken so long."""
        if seconds > 0 and tokens > 0:
            self._load = _mean(self._load, tokens / seconds)

    def loading_beats_computing(self, tokens: int) -> bool:
        """Whether to load; now and then yes even if not, so that the rate stays current."""
        if tokens <= 0 or self._compute is None or self._load is None:
            return True
        if self._load >= self._compute:
            return True
        self._refused += 1
        return self._refused % RETRY_EVERY == 0


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
