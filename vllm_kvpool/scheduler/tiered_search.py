"""The search for one prompt over several tiers, of which some may be slow (pure).

A tier is asked only for cells that nearer tiers lack, so the near tiers' answer is known however
long a far tier takes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise

from vllm_kvpool.identity.keys import CellKey
from vllm_kvpool.scheduler.prefix_search import HitSearch, Question, TailSearch

Search = HitSearch | TailSearch
"""Asks about some chunks at a time, and narrows by the answers how many can be loaded."""


@dataclass(slots=True, eq=False)
class _Round:
    """Questions that are asked together: their cells, and where those of each question end."""

    questions: tuple[Question, ...]
    keys: list[CellKey]
    ends: list[int]
    present: list[bool]  # whether any tier has the cell
    answered: set[int] = field(default_factory=set)  # tiers that lack what is not present
    asked: set[int] = field(default_factory=set)  # tiers that are, or will be, asked

    def answers(self) -> list[bool]:
        """Return for each question whether all of its cells are present."""
        return [all(self.present[a:b]) for a, b in pairwise((0, *self.ends))]


@dataclass(slots=True, eq=False)
class _Level:
    """A search over the first tiers of an order, and its current round."""

    search: Search
    round: _Round | None = None


class TieredSearch:
    """The search for one prompt in host memory and tiers.

    Level n searches host memory and the first n tiers of the order; levels share the answers to
    rounds. With `has_host` there is a level of host memory alone. `keys_of` gives the cells of
    questions that are not in host memory, and where those of each question end.
    """

    def __init__(
        self,
        num_chunks: int,
        make_search: Callable[[], Search],
        keys_of: Callable[[Sequence[Question]], tuple[list[CellKey], list[int]]],
        tiers: Iterable[int],
        *,
        has_host: bool = False,
    ) -> None:
        self._num_chunks = num_chunks
        self._make_search = make_search
        self._keys_of = keys_of
        self._has_host = has_host
        self._rounds: dict[tuple[Question, ...], _Round] = {}
        self._wanted: dict[int, list[_Round]] = {}  # by tier
        # With the positions of the cells that were asked for.
        self._asked: dict[int, list[tuple[_Round, Sequence[int]]]] = {}
        self._deferred: set[int] = set()
        self.answered: set[int] = set()
        """Tiers that have answered."""
        self.has_failed = False
        """True if a tier has failed."""
        self.found = 0
        """Chunks that can be loaded, by the levels that are complete."""
        self.attention = 0
        """Chunks that could be loaded if there were no recurrent states."""
        self.restart(tiers)

    def restart(self, tiers: Iterable[int]) -> None:
        """Ask again for missing cells; tiers that have not answered keep their earlier answers."""
        self._order = list(tiers)
        for tier in self._order:
            self._wanted.setdefault(tier, [])
            self._asked.setdefault(tier, [])
        slow = set(self.waits_for)
        for each in self._rounds.values():
            each.answered &= slow
        self._rounds = {
            questions: each
            for questions, each in self._rounds.items()
            if each.answered or each.asked
        }
        self.has_failed = False
        self._reorder(self._order)

    @property
    def done(self) -> bool:
        """True if no further answer would change `found`."""
        return self.found >= self._num_chunks or self._levels[len(self._order)].search.done

    @property
    def num_tiers(self) -> int:
        """The number of tiers in this search, without tiers that are left alone or have failed."""
        return len(self._order)

    @property
    def waits_for(self) -> list[int]:
        """Tiers whose answers are missing."""
        return [tier for tier in self._order if self._asked[tier] or self._wanted[tier]]

    def take_wanted(self, tier: int) -> list[CellKey]:
        """Return the cells to ask the tier for now; `take_answer` or `failed` follows."""
        if not self._wanted.get(tier):
            return []
        keys = []
        for each in self._wanted[tier]:
            places: Sequence[int] = range(len(each.keys))
            if any(each.present):
                places = [place for place in places if not each.present[place]]
            self._asked[tier].append((each, places))
            keys += [each.keys[place] for place in places]
        self._wanted[tier].clear()
        return keys

    def take_answer(self, tier: int, present: Sequence[bool]) -> None:
        """Take the tier's answer about the cells that were taken last."""
        self.answered.add(tier)
        start = 0
        for each, places in self._asked[tier]:
            answers = present[start : start + len(places)]
            start += len(places)
            for place in compress(places, answers):
                each.present[place] = True
            each.asked.remove(tier)
            each.answered.add(tier)
        self._asked[tier].clear()
        self._advance()

    def failed(self, tier: int) -> None:
        """Go on without a tier that has failed."""
        for each in [*self._wanted[tier], *(each for each, _ in self._asked[tier])]:
            each.asked.remove(tier)
        self._asked[tier].clear()
        self._wanted[tier].clear()
        self.has_failed = True
        self._reorder([each for each in self._order if each != tier])

    def defer(self) -> None:
        """Ask tiers whose answers are missing after all others from now on."""
        self._deferred.update(self.waits_for)
        self._reorder(self._order)

    def _reorder(self, tiers: Sequence[int]) -> None:
        """Ask those tiers; every level begins anew, with the answers so far."""
        self._order = sorted(tiers, key=lambda tier: (tier in self._deferred, tier))
        first = 0 if self._has_host or not self._order else 1
        self._levels = {n: _Level(self._make_search()) for n in range(first, len(self._order) + 1)}
        self._advance()

    def _advance(self) -> None:
        """Advance each level as far as is known; note the cells that it needs next."""
        for n, level in self._levels.items():
            search, tiers = level.search, self._order[:n]
            while not search.done:
                if level.round is None:
                    level.round = self._round_of(search.questions())
                if not self._is_answered(level.round, tiers):
                    break
                search.answer(level.round.questions, level.round.answers())
                level.round = None
            if search.done:
                self.attention = max(self.attention, search.attention)
                self.found = max(self.found, search.found)
                if self.found >= self._num_chunks:
                    return

    def _round_of(self, questions: tuple[Question, ...]) -> _Round:
        each = self._rounds.get(questions)
        if each is None:
            keys, ends = self._keys_of(questions)
            each = self._rounds[questions] = _Round(questions, keys, ends, [False] * len(keys))
        return each

    def _is_answered(self, each: _Round, tiers: Sequence[int]) -> bool:
        """Return True if those tiers have answered; if not, the first that has not is asked."""
        if all(each.present):
            return True
        for tier in tiers:
            if tier not in each.answered:
                if tier not in each.asked:
                    each.asked.add(tier)
                    self._wanted[tier].append(each)
                return False
        return True
