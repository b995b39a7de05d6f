"""A bounded set of equal slots: which are free, held or quarantined (pure; the engine thread's).

A quarantined slot was given up by its holder while a transfer may still write to it. Saves leave
`reserve_for_loads` slots free, so that a slow store cannot starve loads.
"""

from enum import Enum
from typing import NewType

Slot = NewType("Slot", int)


class SlotUse(Enum):
    LOAD = "load"
    SAVE = "save"


class SlotPool:
    """Hands out slot numbers [0, count)."""

    def __init__(self, count: int, reserve_for_loads: int) -> None:
        assert 0 <= reserve_for_loads < count, (count, reserve_for_loads)
        self.count = count
        self._reserve = reserve_for_loads
        self._free = [Slot(i) for i in reversed(range(count))]
        self._held: set[Slot] = set()
        self._quarantined: set[Slot] = set()

    def has_room(self, use: SlotUse, more: int = 0) -> bool:
        """Return True if this use may take a slot; `more` held ones could be freed for it."""
        return len(self._free) + more > (self._reserve if use is SlotUse.SAVE else 0)

    def take(self, use: SlotUse, more: int = 0) -> Slot | None:
        """A free slot, or None if this use may have none now; `more` as in `has_room`."""
        if not self._free or not self.has_room(use, more):
            return None
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """The holder is done, or the transfer into a quarantined slot has ended."""
        if slot in self._quarantined:
            self._quarantined.remove(slot)
        else:
            self._held.remove(slot)
        self._free.append(slot)

    def quarantine(self, slot: Slot) -> None:
        """The holder gives up while a transfer may still write: out of use until `give_back`."""
        self._held.remove(slot)
        self._quarantined.add(slot)

    @property
    def for_saves(self) -> int:
        """The number of slots that saves may have together."""
        return self.count - self._reserve

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)
