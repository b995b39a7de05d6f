"""Which items a consumer lets in, and which of them can be granted rows (pure; control thread).

An item that is offered waits in line until there is memory for all of it (credit.py). Let in, it is
active as long as somebody offers it and rows are missing; of these, the short ones may be granted
more.
"""

import heapq
from collections.abc import Iterator, Mapping

from vllm_kvpool.embeds import credit
from vllm_kvpool.embeds.items import Item
from vllm_kvpool.embeds.states import State

SPARE_ORDERS = 64  # entries of items that have gone, besides as many as there are items


class Admission:
    """See the module docstring. `items` are the consumer's, as they come and go."""

    def __init__(self, items: Mapping[str, Item], max_landing_bytes: int, max_active: int) -> None:
        self._items = items
        self._max_active = max_active
        self._landing = credit.Landing(max_landing_bytes)
        self._line = credit.Line()
        self._active: dict[str, Item] = {}
        self._short: dict[str, Item] = {}
        self._orders: list[tuple[int, str]] = []  # heap, of all items that requests ask for
        self._generations = 0
        self._has_moved = False  # memory has come back
        self._moved_at = float("-inf")  # the last time that it had, or somebody was let in

    @property
    def num_active(self) -> int:
        return len(self._active)

    def short(self) -> list[Item]:
        """Those that may be granted rows, by whose turn it is."""
        return sorted(self._short.values(), key=_rank)

    # The line

    def wait(self, item: Item) -> None:
        """An item has been offered that has no memory."""
        self._line.add(item.mm_hash, item.sources[0][0], item.order)

    def reorder(self, item: Item, was_asked: bool) -> None:
        """A request, or an older one, has come for an item."""
        heapq.heappush(self._orders, (item.order, item.mm_hash))
        if len(self._orders) > 2 * len(self._items) + SPARE_ORDERS:
            self._orders = [(each.order, name) for name, each in self._items.items() if each.asked]
            heapq.heapify(self._orders)
        if not was_asked and item.admitted:
            self._landing.now_asked(_nbytes(item))
        if item.mm_hash in self._line:
            producer = item.sources[0][0] if item.sources else ""
            self._line.add(item.mm_hash, producer, item.order)

    def let_in(self, now: float) -> Iterator[Item]:
        """Let in whom there is memory for: each by the time that the next one is asked for."""
        if self._has_moved:
            self._has_moved, self._moved_at = False, now
        while (mm_hash := self._next(now)) is not None:
            item = self._items[mm_hash]
            self._line.remove(mm_hash)
            if not item.asked:
                self._line.took(item.sources[0][0])
            self._landing.take(_nbytes(item), item.asked)
            self._generations += 1
            self._moved_at = now
            item.admitted, item.generation = True, self._generations
            self.activate(item)
            yield item

    def _next(self, now: float) -> str | None:
        is_full = len(self._active) >= self._max_active
        asked = self._line.first_asked()
        if asked is not None:
            item = self._items[asked]
            has_room = self._landing.admits(_nbytes(item), asked=True)
            if has_room and not is_full:
                return asked
            if not self._is_oldest(item):
                return None  # it waits behind older ones, and younger ones behind it
            waited_s = now - max(item.since, self._moved_at)
            may_wait = waited_s < credit.OLDEST_WAITS_S and self._will_move(item, has_room)
            return None if may_wait else asked
        for mm_hash in self._line.unasked() if not is_full else ():
            if self._landing.admits(_nbytes(self._items[mm_hash]), asked=False):
                return mm_hash
        return None

    def _is_oldest(self, item: Item) -> bool:
        """Whether no older request asks for anything."""
        while self._orders:
            order, mm_hash = self._orders[0]
            known = self._items.get(mm_hash)
            if known is not None and known.order == order:
                return order >= item.order
            heapq.heappop(self._orders)
        return True

    def _will_move(self, item: Item, has_room: bool) -> bool:
        """Whether what an item lacks, memory or a place among the active, will soon be given up.

        Memory is when an item of another request is there. One that nobody asks for stays.
        """
        if has_room:
            return bool(self._active)
        return any(each.asked and each.order != item.order for each in self._active.values())

    def waits_for_a_request(self, item: Item) -> bool:
        """Whether an item that has been offered is too large to be let in without one."""
        if item.mm_hash not in self._line or item.asked:
            return False
        return not self._landing.ever_admits(_nbytes(item))

    # Those that are in

    def activate(self, item: Item) -> None:
        """An item that is in is offered, and rows of it are missing."""
        self._active[item.mm_hash] = self._short[item.mm_hash] = item

    def look_for_gaps(self, item: Item) -> None:
        """Rows that were granted, or here, may not be any more."""
        if item.mm_hash in self._active:
            self._short[item.mm_hash] = item

    def has_all(self, item: Item) -> None:
        """Every row of it is here or granted."""
        del self._short[item.mm_hash]

    def deactivate(self, item: Item) -> None:
        """It is whole, or nobody offers it."""
        self._active.pop(item.mm_hash, None)
        self._short.pop(item.mm_hash, None)

    def leave(self, item: Item) -> None:
        """Nobody offers it any more: it waits for nothing."""
        self._line.remove(item.mm_hash)
        self.deactivate(item)

    def give_back(self, item: Item) -> None:
        """Its memory is not its own any more."""
        self._landing.give_back(_nbytes(item), item.asked)
        self._has_moved = True
        item.admitted = False

    # For whoever watches

    def gauges(self) -> dict[str, float]:
        """Levels."""
        return {"waiting_items": len(self._line), "landing_bytes": self._landing.taken}

    def check(self) -> None:
        """What always holds."""
        asked = [item for item in self._items.values() if item.asked]
        least = min((item.order for item in asked), default=0)
        assert all(self._is_oldest(item) == (item.order == least) for item in asked)
        for mm_hash, item in self._items.items():
            assert (mm_hash in self._active) == (
                item.admitted and bool(item.sources) and item.state is not State.SUCCESS
            )
            if mm_hash in self._active and mm_hash not in self._short:
                assert item.shape is not None
                assert item.covered().holds(0, item.shape.rows), "rows that nobody will grant"
        assert self._short.keys() <= self._active.keys() <= self._items.keys()
        taken = sum(_nbytes(item) for item in self._items.values() if item.admitted)
        assert taken == self._landing.taken


def _nbytes(item: Item) -> int:
    assert item.shape is not None
    return item.shape.nbytes


def _rank(item: Item) -> tuple[bool, int]:
    return (not item.asked, item.order)
