"""A reset of the own namespace under way (pure).

Saves that were under way may put cells after the namespace has been removed. So the workers are
told to drop theirs, and when all of them have, the namespace is removed once more; until then
nothing is found and nothing is saved.
"""

import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Reset:
    """Owned by the scheduler's thread; the lookup thread calls `end`."""

    num_ranks: int
    generation: int = 0
    acks: int = 0
    ended: int = 0
    """The newest generation whose reset has ended. A newer one is another reset's."""
    weights_versions: set[str] = field(default_factory=set)
    """Whose cells have been removed, and are to be once more."""

    def begin(self, weights_version: str = "") -> None:
        """Saves of the generation so far are to be dropped, cells of those weights removed."""
        self.weights_versions.add(weights_version)
        self.generation += 1
        self.acks = 0

    @property
    def pending(self) -> bool:
        """Whether what was put before the newest reset may still be in the stores."""
        return self.ended < self.generation

    def acked(self, ranks: int) -> bool:
        """So many more ranks have dropped their saves; whether that makes it all of them."""
        before, self.acks = self.acks, self.acks + ranks
        return before < self.num_ranks <= self.acks

    def take_weights_versions(self) -> tuple[str, ...]:
        """What to remove when the last rank has answered."""
        weights_versions, self.weights_versions = tuple(self.weights_versions), set()
        return weights_versions

    def end(self, generation: int, removed: bool) -> None:
        """What was put until that generation has been removed, or could not be. Lookup thread."""
        if not removed:
            logger.warning(
                "kvpool: a reset could not remove cells that were put while it ran; reset again"
            )
        self.ended = generation
