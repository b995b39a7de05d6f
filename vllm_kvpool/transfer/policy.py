"""In which order cells leave a full host tier (pure).

`Lru` drops what was used longest ago. `Frequency` is a segmented LRU with a memory of what it
dropped (after "2Q", Johnson and Shasha 1994, and "SLRU", Karedla et al. 1994): a cell used once is
on probation, one used again is protected, and one that comes back soon after it was dropped is
protected at once; a flood of prompts that are never seen again passes through probation only.

A policy only ranks: which of the cells may leave now is for residency.py to know. A request's
cells are used from the last chunk to the first, so that of one prompt the end goes before the
beginning, without which the end is worth nothing.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

PROTECTED_SHARE = 0.75  # of the capacity; what overflows goes back on probation
REMEMBERED_SHARE = 1.0  # dropped keys remembered, of the capacity

PROBATION, PROTECTED = 0, 1

Rank = tuple[int, int]
"""Segment, and a number that grows with every use: the lowest rank leaves first."""


class Policy(Protocol):
    """Ranks of keys, no two the same, none given twice. Every call costs constant time.

    `add`, `use` and `refresh` return the keys that have another rank now.
    """

    def add(self, key: str) -> Sequence[str]:
        """A key that is not there has come."""

    def use(self, key: str) -> Sequence[str]:
        """A key that is there has been used again."""

    def refresh(self, key: str) -> Sequence[str]:
        """Count the key's last use as now, but not as another one."""

    def discard(self, key: str) -> None:
        """The key has left."""

    def rank(self, key: str) -> Rank:
        """The rank of a key that is there."""


class Lru:
    """See the module docstring."""

    def __init__(self, capacity: int) -> None:
        self._ranks: dict[str, Rank] = {}
        self._uses = 0

    def add(self, key: str) -> Sequence[str]:
        self._uses += 1
        self._ranks[key] = (PROBATION, self._uses)
        return (key,)

    use = refresh = add

    def discard(self, key: str) -> None:
        del self._ranks[key]

    def rank(self, key: str) -> Rank:
        return self._ranks[key]


class Frequency:
    """See the module docstring."""

    def __init__(self, capacity: int) -> None:
        self._most_protected = int(capacity * PROTECTED_SHARE)
        self._most_remembered = int(capacity * REMEMBERED_SHARE)
        self._ranks: dict[str, Rank] = {}
        self._uses = 0
        self._protected: OrderedDict[str, None] = OrderedDict()  # by rank
        self._remembered: OrderedDict[str, None] = OrderedDict()

    def add(self, key: str) -> Sequence[str]:
        if key in self._remembered:
            del self._remembered[key]
            return self.use(key)
        self._place(key, PROBATION)
        return (key,)

    def use(self, key: str) -> Sequence[str]:
        self._protected[key] = None
        self._protected.move_to_end(key)
        self._place(key, PROTECTED)
        if len(self._protected) <= self._most_protected:
            return (key,)
        back, _ = self._protected.popitem(last=False)
        self._place(back, PROBATION)
        return (key, back)

    def refresh(self, key: str) -> Sequence[str]:
        if key in self._protected:
            return self.use(key)
        self._place(key, PROBATION)
        return (key,)

    def discard(self, key: str) -> None:
        del self._ranks[key]
        self._protected.pop(key, None)
        self._remembered[key] = None
        if len(self._remembered) > self._most_remembered:
            self._remembered.popitem(last=False)

    def rank(self, key: str) -> Rank:
        return self._ranks[key]

    def _place(self, key: str, segment: int) -> None:
        self._uses += 1
        self._ranks[key] = (segment, self._uses)


POLICIES: dict[str, type[Lru] | type[Frequency]] = {"lru": Lru, "frequency": Frequency}
