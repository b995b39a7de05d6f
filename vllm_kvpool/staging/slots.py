"""A bounded set of equal slots: which are free, held or quarantined (pure; the engine thread's).

A quarantined slot was given up by its holder while a transfer may still write to it. Saves leave
`reserve_for_loads` slots free, so that a slow store cannot starve loads.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NewType

Slot = NewType("Slot", int)


class SlotUse(Enum):
    """The transfer that a slot of staging memory is for."""

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

    def has_room(self, use: SlotUse, num_slots: int = 1, more: int = 0) -> bool:
        """Return True if this use may take slots; `more` held ones could be freed for it."""
        reserve = self._reserve if use is SlotUse.SAVE else 0
        return len(self._free) + more >= num_slots + reserve

    def take(self, num_slots: int) -> list[Slot]:
        """Take free slots, of which there are enough."""
        assert 0 < num_slots <= len(self._free), (num_slots, len(self._free))
        slots = self._free[-num_slots:]
        del self._free[-num_slots:]
        self._held.update(slots)
        return slots

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Free slots whose holder is done, or whose transfer in quarantine has ended.

        KeyError if not all of them are held, or not all in quarantine.
        """
        _take_out(self._held if self._quarantined.isdisjoint(slots) else self._quarantined, slots)
        self._free += slots

    def quarantine(self, slots: Sequence[Slot]) -> None:
        """Keep slots out of use until `give_back`: their holder gives up during a transfer.

        KeyError if not all of them are held.
        """
        _take_out(self._held, slots)
        self._quarantined.update(slots)

    @property
    def num_free(self) -> int:
        """Slots that may be taken."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Slots that were taken and not given back."""
        return len(self._held)

    @property
    def num_quarantined(self) -> int:
        """Slots that a call in progress may still read or write."""
        return len(self._quarantined)


def _take_out(place: set[Slot], slots: Sequence[Slot]) -> None:
    """Take slots out of a set, which must have all of them.

    A slot that is free twice would have two holders.
    """
    if not place.issuperset(slots):
        raise KeyError(slots)
    place.difference_update(slots)
