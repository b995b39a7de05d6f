"""Virtual time, and how the world around a simulated router behaves."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Of networks, clients and those who watch engines."""

    scrape_s: float = 1.0
    quiet_scrape_s: float = 60.0
    """While there is nothing to do, nor was there for `quiet_after_s`."""
    quiet_after_s: float = 20.0
    lag_s: float = 0.3
    """Metrics are up to so old when they come."""
    lost_share: float = 0.02
    """Of all metrics."""
    load_timeout_s: float = 120.0
    load_fails_share: float = 0.0
    """Of engines that are started."""
    warm_timeout_s: float = 60.0
    silence_s: float = 60.0
    """A call to an engine that has hung ends after so long."""
    failed_share: float = 0.0
    """Of all calls, though the engine lives."""
    rejected_share: float = 0.0
    hopeless_share: float = 0.0
    late_answer_share: float = 0.3
    """Of loads that are given up, those whose answer was under way already."""
    holds_for_new: bool = False
    """The way of those who scale without taking over: each loading prefill replica is given its
    share of what arrives, which waits until it is loaded."""


class Timeline:
    """What is going to happen, and chance. Everything in a world shares one."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do something later."""
        self._entries += 1
        heapq.heappush(self._agenda, (max(when, self.now), self._entries, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def due(self) -> float:
        """When something happens next."""
        return self._agenda[0][0] if self._agenda else float("inf")

    def pop(self) -> Callable[[], None]:
        return heapq.heappop(self._agenda)[2]

    def moment(self) -> float:
        """Seconds; a network's."""
        return 0.0005 + self.chance.random() * 0.01
