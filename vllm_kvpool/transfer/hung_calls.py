"""Store calls that do not return, and the memory that they may still read or write (pure).

A work that is stuck is over for its cells: they are asked elsewhere, or given up. But the slots
that were lent to the call stay out of use until it returns, however late. A slot that a GET may
still write is quarantined; a slot that a PUT may still read stays with its cell, which is held.
"""

from dataclasses import dataclass, field

from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.transfer.graph import Batch
from vllm_kvpool.transfer.host_cache import CacheEntry, HostCache
from vllm_kvpool.transfer.ops import OpKind, WorkId


@dataclass(slots=True)
class _Lent:
    """What one call has."""

    slots: list[Slot] = field(default_factory=list)
    entries: list[CacheEntry] = field(default_factory=list)


class HungCalls:
    """Engine thread."""

    def __init__(self, host_cache: HostCache) -> None:
        self._host_cache = host_cache
        self._lent: dict[WorkId, _Lent] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def __contains__(self, work_id: WorkId) -> bool:
        return work_id in self._lent

    def begin(self, work_id: WorkId, kind: OpKind, batch: Batch) -> None:
        """The call is given up; its ops have still to be told."""
        lent = self._lent[work_id] = _Lent()
        for op in batch.ops:
            entry = op.what.entry
            if entry is None:
                continue
            if kind is OpKind.GET:
                lent.slots.append(self._host_cache.part_with_slot(entry))
            else:
                self._host_cache.pin(entry)
                lent.entries.append(entry)

    def end(self, work_id: WorkId) -> None:
        """The call has returned after all: nothing of its memory is touched any more."""
        lent = self._lent.pop(work_id)
        for slot in lent.slots:
            self._host_cache.slots.give_back(slot)
        for entry in lent.entries:
            self._host_cache.unpin(entry)

    @property
    def slots_read(self) -> set[Slot | None]:
        """Slots that stay with their cells while a call may read them."""
        return {entry.slot for lent in self._lent.values() for entry in lent.entries}

    @property
    def num_slots_written(self) -> int:
        return sum(len(lent.slots) for lent in self._lent.values())

    def pins_of(self, entry: CacheEntry) -> int:
        """How many calls that are stuck hold the entry."""
        return sum(held is entry for lent in self._lent.values() for held in lent.entries)
