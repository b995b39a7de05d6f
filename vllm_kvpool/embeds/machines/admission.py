"""Which items get host memory, and which of them may be granted rows (pure; control thread).

Memory for an item is taken whole, before its first grant, and freed when the engine has taken the
item, so no item holds a part of what it needs while it waits for the rest. Offered items queue: by
request first, then one of each producer in turn. The oldest request's items are admitted beyond
`max_landing_bytes` if no other request's item is in transfer and so about to free memory, or if
nothing has changed for `OLDEST_WAITS_S`: requests that wait for each other's memory cannot
deadlock, and the excess is bounded by what one request needs.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_kvpool.embeds.machines.items import NOT_REQUESTED, Item
from vllm_kvpool.embeds.machines.states import TransferState

UNREQUESTED_SHARE = 2  # 1/n of max_landing_bytes is for items that no request waits for
MOST_ENTRIES = 8  # entries of the queue per waiting item, before stale ones are removed


OLDEST_WAITS_S = 0.25  # without progress, before the oldest request exceeds the limit


@dataclass(slots=True)
class LandingBudget:
    """Bytes of host memory taken by admitted items, against `max_landing_bytes`."""

    limit: int
    taken: int = 0
    unrequested: int = 0  # of `taken`: by items that no request waits for

    def admits(self, nbytes: int, *, requested: bool) -> bool:
        """Whether an item of so many bytes fits."""
        if requested:
            return self.taken + nbytes <= self.limit
        return (
            self.unrequested + nbytes <= self.limit // UNREQUESTED_SHARE
            and self.taken + nbytes <= self.limit
        )

    def ever_admits(self, nbytes: int) -> bool:
        """Whether an item that no request waits for can fit at all."""
        return nbytes <= self.limit // UNREQUESTED_SHARE

    def take(self, nbytes: int, requested: bool) -> None:
        self.taken += nbytes
        self.unrequested += 0 if requested else nbytes

    def release_memory(self, nbytes: int, requested: bool) -> None:
        self.taken -= nbytes
        self.unrequested -= 0 if requested else nbytes
        assert self.taken >= 0
        assert self.unrequested >= 0

    def mark_requested(self, nbytes: int) -> None:
        """A request now waits for an item that was admitted without one."""
        self.unrequested -= nbytes


class AdmissionQueue:
    """Items that wait for memory: by request, then one of each producer in turn.

    Only an item's newest entry counts; stale entries are removed when they come up, or when they
    are most of all.
    """

    def __init__(self) -> None:
        self._requested: list[tuple[int, int, str]] = []  # heap of order, number, item
        self._by_producer: OrderedDict[str, deque[tuple[int, str]]] = OrderedDict()
        self._waiting: dict[str, tuple[int, int]] = {}  # item -> order, number of its last entry
        self._number = 0
        self._entries = 0  # added since stale ones were last removed

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._waiting

    def add(self, mm_hash: str, producer: str, order: int) -> None:
        """Queue an item; again with another order moves it."""
        waiting = self._waiting.get(mm_hash)
        if waiting is not None and waiting[0] == order:
            return
        self._number += 1
        self._entries += 1
        self._waiting[mm_hash] = (order, self._number)
        if order == NOT_REQUESTED:
            self._by_producer.setdefault(producer, deque()).append((self._number, mm_hash))
        else:
            heapq.heappush(self._requested, (order, self._number, mm_hash))

    def remove(self, mm_hash: str) -> None:
        self._waiting.pop(mm_hash, None)
        if self._entries > MOST_ENTRIES * len(self._waiting):
            self._drop_old()

    def _drop_old(self) -> None:
        self._requested = [
            each for each in self._requested if self._waiting.get(each[2]) == each[:2]
        ]
        heapq.heapify(self._requested)
        for producer, items in tuple(self._by_producer.items()):
            last = deque(each for each in items if self._is_last(*each))
            if last:
                self._by_producer[producer] = last
            else:
                del self._by_producer[producer]
        self._entries = len(self._waiting)

    def _is_last(self, number: int, mm_hash: str) -> bool:
        return self._waiting.get(mm_hash) == (NOT_REQUESTED, number)

    def first_requested(self) -> str | None:
        while self._requested:
            order, number, mm_hash = self._requested[0]
            if self._waiting.get(mm_hash) == (order, number):
                return mm_hash
            heapq.heappop(self._requested)
        return None

    def unrequested(self) -> Iterator[str]:
        """The first item of each producer, in the order of their turns."""
        for producer in list(self._by_producer):
            items = self._by_producer[producer]
            while items and not self._is_last(*items[0]):
                items.popleft()
            if items:
                yield items[0][1]
            else:
                del self._by_producer[producer]

    def took(self, producer: str) -> None:
        """An unrequested item of this producer was admitted: its next turn is last."""
        if producer in self._by_producer:
            self._by_producer.move_to_end(producer)


SPARE_ORDERS = 64  # stale entries of `_orders`, beside one per item, before it is rebuilt


class Admission:
    """Admits queued items and knows which admitted ones lack rows; `items` are the consumer's
    own.
    """

    def __init__(self, items: Mapping[str, Item], max_landing_bytes: int, max_active: int) -> None:
        self._items = items
        self._max_active = max_active
        self._landing = LandingBudget(max_landing_bytes)
        self._queue = AdmissionQueue()
        self._active: dict[str, Item] = {}
        self._grantable: dict[str, Item] = {}
        self._orders: list[tuple[int, str]] = []  # heap, of all items that requests wait for
        self._generations = 0
        self._memory_released = False  # since the last `admit`
        self._progress_at = float("-inf")  # when memory was last freed, or an item admitted

    @property
    def num_active(self) -> int:
        return len(self._active)

    def grantable(self) -> list[Item]:
        """Items with rows that are neither received nor granted: requests' items first, the oldest
        request first.
        """
        return sorted(self._grantable.values(), key=_rank)

    # The queue

    def wait(self, item: Item) -> None:
        self._queue.add(item.mm_hash, item.sender[0], item.order)

    def reorder(self, item: Item, was_requested: bool) -> None:
        """A request, or an older one, now waits for an item."""
        heapq.heappush(self._orders, (item.order, item.mm_hash))
        if len(self._orders) > 2 * len(self._items) + SPARE_ORDERS:
            self._orders = [
                (each.order, name) for name, each in self._items.items() if each.requested
            ]
            heapq.heapify(self._orders)
        if not was_requested and item.admitted:
            self._landing.mark_requested(_nbytes(item))
        if item.mm_hash in self._queue:
            producer = item.sender[0] if item.offers else ""
            self._queue.add(item.mm_hash, producer, item.order)

    def admit(self, now: float) -> Iterator[Item]:
        """Admit what fits; each is admitted by the time that the next one is asked for."""
        if self._memory_released:
            self._memory_released, self._progress_at = False, now
        while (mm_hash := self._next(now)) is not None:
            item = self._items[mm_hash]
            self._queue.remove(mm_hash)
            if not item.requested:
                self._queue.took(item.sender[0])
            self._landing.take(_nbytes(item), item.requested)
            self._generations += 1
            self._progress_at = now
            item.admitted, item.generation = True, self._generations
            self.activate(item)
            yield item

    def _next(self, now: float) -> str | None:
        is_full = len(self._active) >= self._max_active
        requested = self._queue.first_requested()
        if requested is not None:
            item = self._items[requested]
            has_room = self._landing.admits(_nbytes(item), requested=True)
            if has_room and not is_full:
                return requested
            if not self._is_oldest(item):
                return None  # older requests go first, and younger ones wait for it
            waited_s = now - max(item.since, self._progress_at)
            may_wait = waited_s < OLDEST_WAITS_S and self._others_progress(item, has_room)
            return None if may_wait else requested
        for mm_hash in self._queue.unrequested() if not is_full else ():
            if self._landing.admits(_nbytes(self._items[mm_hash]), requested=False):
                return mm_hash
        return None

    def _is_oldest(self, item: Item) -> bool:
        """Whether no older request waits for any item."""
        while self._orders:
            order, mm_hash = self._orders[0]
            known = self._items.get(mm_hash)
            if known is not None and known.order == order:
                return order >= item.order
            heapq.heappop(self._orders)
        return True

    def _others_progress(self, item: Item, has_room: bool) -> bool:
        """Whether another request's item is about to free the memory, or the place among the
        active, that this item lacks. An item that no request waits for is not taken, so it frees
        nothing.
        """
        if has_room:
            return bool(self._active)
        return any(each.requested and each.order != item.order for each in self._active.values())

    def waits_for_a_request(self, item: Item) -> bool:
        """Whether an offered item is too large to be admitted before a request waits for it."""
        if item.mm_hash not in self._queue or item.requested:
            return False
        return not self._landing.ever_admits(_nbytes(item))

    # Admitted items

    def activate(self, item: Item) -> None:
        """An admitted item has an offer and lacks rows."""
        self._active[item.mm_hash] = self._grantable[item.mm_hash] = item

    def mark_grantable(self, item: Item) -> None:
        """Rows of an item may be neither received nor granted any more."""
        if item.mm_hash in self._active:
            self._grantable[item.mm_hash] = item

    def mark_fully_granted(self, item: Item) -> None:
        del self._grantable[item.mm_hash]

    def deactivate(self, item: Item) -> None:
        self._active.pop(item.mm_hash, None)
        self._grantable.pop(item.mm_hash, None)

    def remove(self, item: Item) -> None:
        self._queue.remove(item.mm_hash)
        self.deactivate(item)

    def release_memory(self, item: Item) -> None:
        self._landing.release_memory(_nbytes(item), item.requested)
        self._memory_released = True
        item.admitted = False

    def gauges(self) -> dict[str, float]:
        return {"waiting_items": len(self._queue), "landing_bytes": self._landing.taken}

    def check(self) -> None:
        """Assert the invariants; tests call it."""
        requested = [item for item in self._items.values() if item.requested]
        least = min((item.order for item in requested), default=0)
        assert all(self._is_oldest(item) == (item.order == least) for item in requested)
        for mm_hash, item in self._items.items():
            assert (mm_hash in self._active) == (
                item.admitted and bool(item.offers) and item.state is not TransferState.SUCCESS
            )
            if mm_hash in self._active and mm_hash not in self._grantable:
                assert item.shape is not None
                assert item.covered().holds(0, item.shape.rows), "rows that are never granted"
        assert self._grantable.keys() <= self._active.keys() <= self._items.keys()
        taken = sum(_nbytes(item) for item in self._items.values() if item.admitted)
        assert taken == self._landing.taken


def _nbytes(item: Item) -> int:
    assert item.shape is not None
    return item.shape.nbytes


def _rank(item: Item) -> tuple[bool, int]:
    return (not item.requested, item.order)
