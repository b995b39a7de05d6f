"""Pairs of engines that share no store, learned from handed-over prompts (pure).

Each engine counts the prompts that it was to expect, by the engine that has saved them: those it
found in the pool, and those it waited for in vain. A pair of engines whose decoder finds nothing
APART_AFTER times in a row is apart: nothing is handed over between them but one prompt from time to
time, which tries whether they share by now. A single prompt that is found ends it.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vllm_kvpool.router.control.states import ReplicaId

APART_AFTER = 3
"""Prompts in a row that a decoder did not find."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
"""Between two tries of a pair that is apart: doubled each time."""


class ExpectedPrompts(NamedTuple):
    """Prompts of one engine that another one was to find in the pool."""

    found: int = 0
    missing: int = 0


NONE_EXPECTED = ExpectedPrompts()


@dataclass(slots=True)
class _Pair:
    """A replica that computes prompts and one that decodes them."""

    missing_in_row: int = 0
    num_pauses: int = 0
    """0 while the pair shares, for all that is known."""
    try_at: float = 0.0
    is_tried: bool = False
    """True if a prompt was handed over since the last pause ended."""

    def missed(self, number: int, now: float) -> None:
        """Count prompts that were not found."""
        self.missing_in_row += number
        is_late = self.num_pauses > 0 and not self.is_tried
        if self.missing_in_row < APART_AFTER or is_late:
            return
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self.num_pauses, 16), LONGEST_PAUSE_S)
        self.num_pauses += 1
        self.try_at, self.is_tried = now + pause_s, False


class Handovers:
    """The pairs of all replicas. Owned by the fleet."""

    def __init__(self, on_change: Callable[[], object] = lambda: None) -> None:
        self._on_change = on_change
        """Called when a pair goes apart, is tried, or shares a store again."""
        self._pairs: dict[tuple[ReplicaId, ReplicaId], _Pair] = {}
        """By source and decoder; those alone that have missed something."""
        self._counted: dict[ReplicaId, Mapping[str, ExpectedPrompts]] = {}
        """Counts of each decoder's engine at its last sample."""
        self.is_any_apart = False

    def measured(
        self,
        decoder: ReplicaId,
        counts: Mapping[str, ExpectedPrompts],
        known: Container[ReplicaId],
        is_up: Callable[[ReplicaId], bool],
        now: float,
    ) -> ExpectedPrompts:
        """Take in what a decoder's engine has counted since its start; returns the growth.

        `counts`: by source; those that are not `known` are another router's. What was counted
        before the engine was first measured says nothing. Nor does a missing prompt whose source is
        not up: the source may have ended before it had saved the prompt.
        """
        before = self._counted.get(decoder)
        self._counted[decoder] = counts
        if before is None or before == counts:
            return NONE_EXPECTED
        found = missing = 0
        for name, each in counts.items():
            if (source := ReplicaId(name)) not in known:
                continue
            last = before.get(name, NONE_EXPECTED)
            if each.found < last.found or each.missing < last.missing:
                last = NONE_EXPECTED  # its engine has been started anew
            more = ExpectedPrompts(each.found - last.found, each.missing - last.missing)
            found, missing = found + more.found, missing + more.missing
            if more.found or is_up(source):
                self._learn((source, decoder), more, now)
        return ExpectedPrompts(found, missing)

    def _learn(self, pair: tuple[ReplicaId, ReplicaId], more: ExpectedPrompts, now: float) -> None:
        if more.found:
            if self._pairs.pop(pair, None) is not None:
                self._changed()
        elif more.missing:
            self._pairs.setdefault(pair, _Pair()).missed(more.missing, now)
            self._changed()

    def may_hand_over(self, source: ReplicaId, decoder: ReplicaId, now: float) -> bool:
        """Return True if a pair shares a store, or may be tried again after its pause."""
        pair = self._pairs.get((source, decoder))
        return pair is None or not pair.num_pauses or now >= pair.try_at

    def is_apart(self, source: ReplicaId, decoder: ReplicaId) -> bool:
        """Return True if the decoder found none of the source's last APART_AFTER prompts."""
        pair = self._pairs.get((source, decoder))
        return pair is not None and pair.num_pauses > 0

    def hand_over(self, source: ReplicaId, decoder: ReplicaId, now: float) -> None:
        """Note a prompt that is being handed over; between a pair that is apart it is the trial."""
        pair = self._pairs.get((source, decoder))
        if pair is not None and pair.num_pauses:
            pair.is_tried = True
            # Its client may go away before its decoder has looked.
            pair.try_at = now + LONGEST_PAUSE_S
            self._changed()

    def apart(self) -> Iterator[tuple[ReplicaId, ReplicaId]]:
        """Return the pairs that are apart: source and decoder."""
        return (pair for pair, each in self._pairs.items() if each.num_pauses)

    def forget(self, replica: ReplicaId) -> None:
        """Forget the pairs of a replica whose engine has ended; the next may have another store."""
        self._counted.pop(replica, None)
        for pair in [pair for pair in self._pairs if replica in pair]:
            del self._pairs[pair]
        self._changed()

    def _changed(self) -> None:
        self.is_any_apart = any(True for _ in self.apart())
        self._on_change()
