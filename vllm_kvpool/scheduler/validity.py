"""Validity of KV: which of the engine's blocks may be saved, and which stored cells may be loaded.

Three kinds of KV are neither saved nor loaded: KV that other weights than the engine's have
computed, blocks that another connector was to fill, and cells that a reset removes. Scheduler's
thread.
"""

import logging
from dataclasses import dataclass, field
from enum import Enum

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Reset:
    """The resets of the namespace. Scheduler's thread; the lookup thread calls `finish`.

    Saves that are under way may put cells after the namespace has been removed. So workers drop
    theirs, and after the last one has, the namespace is removed once more. Until then nothing is
    found and nothing is saved.
    """

    num_ranks: int
    generation: int = 0
    acks: int = 0
    ended: int = 0
    """The newest generation whose reset has ended."""
    weights_versions: set[str] = field(default_factory=set)
    """Versions whose cells have been removed, and will be once more."""

    def start(self, weights_version: str = "") -> None:
        """Start a reset: workers drop the saves of the generation so far."""
        self.weights_versions.add(weights_version)
        self.generation += 1
        self.acks = 0

    @property
    def pending(self) -> bool:
        """True if cells from before the newest reset may still be in the stores."""
        return self.ended < self.generation

    @property
    def needs_step(self) -> bool:
        """True until every rank has dropped its saves, which ranks report in a step."""
        return self.pending and self.acks < self.num_ranks

    def acked(self, ranks: int) -> bool:
        """Count `ranks` more ranks that have dropped their saves; return True after the last."""
        before, self.acks = self.acks, self.acks + ranks
        return before < self.num_ranks <= self.acks

    def take_weights_versions(self) -> tuple[str, ...]:
        """Return the versions to remove now that the last rank has answered."""
        weights_versions, self.weights_versions = tuple(self.weights_versions), set()
        return weights_versions

    def finish(self, generation: int, removed: bool) -> None:
        """Take the end of a generation's second removal. Lookup thread."""
        if not removed:
            logger.warning(
                "kvpool: reset: a store did not remove the cells that were saved meanwhile; call "
                "reset_prefix_cache(reset_connector=True) again"
            )
        self.ended = generation


class CachedEmbeddings(Enum):
    """The embeddings that the engine's encoder cache may hold."""

    NONE = "none"
    CURRENT = "current"
    OLD = "old"
    """Some by other weights: vLLM keeps them, by the content of the media alone."""


class Validity:
    """The version of the engine's weights, and what in the engine's caches may be of others."""

    def __init__(self, num_ranks: int) -> None:
        self.reset = Reset(num_ranks)
        self.weights_version = ""
        """"" names the weights that the engine started with."""
        self.has_doubtful_blocks = False
        """True if the engine's own prefix cache may hold KV of other weights, or that another
        connector was to load."""
        self._embeddings = CachedEmbeddings.NONE
        self._has_blocks_of_old_embeddings = False

    def finds(self, weights_version: str) -> bool:
        """Return True if cells that a lookup has found under these weights may be loaded."""
        return not self.reset.pending and weights_version == self.weights_version

    def use_embeddings(self) -> bool:
        """Return True if a request with media, to be computed now, may use old embeddings.

        KV that is computed from them is of neither weights.
        """
        if self._embeddings is CachedEmbeddings.NONE:
            self._embeddings = CachedEmbeddings.CURRENT
        is_old = self._embeddings is CachedEmbeddings.OLD
        self._has_blocks_of_old_embeddings |= is_old
        return is_old

    def weights_changed(self, weights_version: str) -> None:
        """Doubt everything in the engine's caches until it is computed anew."""
        self.weights_version = weights_version
        self.has_doubtful_blocks = True
        if self._embeddings is not CachedEmbeddings.NONE:
            self._embeddings = CachedEmbeddings.OLD

    def foreign_load_started(self) -> None:
        """Note that another connector loads blocks that vLLM's prefix cache shows at once."""
        if not self.has_doubtful_blocks:
            self.has_doubtful_blocks = True
            logger.warning(
                "kvpool: another connector loads within a step: requests that it loads for are not "
                "saved, nor, until reset_prefix_cache, those that begin in vLLM's own prefix cache"
            )

    def own_cache_was_reset(self) -> None:
        """Trust the blocks of the engine's own prefix cache again, as it is empty now."""
        self.has_doubtful_blocks = self._has_blocks_of_old_embeddings = False

    def encoder_cache_was_reset(self) -> None:
        """Note that embeddings of media are dropped, but no KV that was computed from them."""
        self._embeddings = CachedEmbeddings.NONE
        self.has_doubtful_blocks |= self._has_blocks_of_old_embeddings
