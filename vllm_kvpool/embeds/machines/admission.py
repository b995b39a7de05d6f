"""A consumer's items: which get host memory, and which may be granted rows.

Pure; on the control thread. Memory for an item is taken whole, before its first grant, and freed
when the engine has taken the item. So no item holds a part of its memory while it waits for the
rest. Offered items queue: by request first, then one of each producer in turn. The items of the
oldest request, and of requests that have started, may exceed `max_landing_bytes` in two cases: no
other request's item is in transfer and so about to free memory, or nothing has changed for
`OLDEST_WAITS_S`. No request waits longer than that for another request's memory. A started request
may hold the blocks that an older request needs before the engine takes the older request's items.
So started requests may exceed the limit, too. The excess is bounded by the needs of these requests.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from vllm_kvpool.embeds.machines.items import NOT_REQUESTED, Item

MAX_ACTIVE = 64  # items that are granted rows at the same time
UNREQUESTED_SHARE = 2  # 1/n of max_landing_bytes is for items that no request waits for
OLDEST_WAITS_S = 0.25  # without progress, before the oldest request exceeds the limit


class AdmissionQueue:
    """Items that wait for memory: by request, then one of each producer in turn."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, int, str]] = {}  # item -> order, number, producer
        self._requested: list[tuple[int, int, str]] = []  # sorted: order, number, item
        self._by_producer: OrderedDict[str, dict[str, None]] = OrderedDict()  # in turn
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._entries

    def add(self, mm_hash: str, producer: str, order: int) -> None:
        """Queue an item; one that is queued moves if its order has changed."""
        entry = self._entries.get(mm_hash)
        if entry is not None and entry[0] == order:
            return
        self.remove(mm_hash)
        self._number += 1
        self._entries[mm_hash] = (order, self._number, producer)
        if order == NOT_REQUESTED:
            self._by_producer.setdefault(producer, {})[mm_hash] = None
        else:
            insort(self._requested, (order, self._number, mm_hash))

    def remove(self, mm_hash: str) -> None:
        """Remove an item; an item that does not wait is left alone."""
        entry = self._entries.pop(mm_hash, None)
        if entry is None:
            return
        order, number, producer = entry
        if order != NOT_REQUESTED:
            del self._requested[bisect_left(self._requested, (order, number))]
            return
        items = self._by_producer[producer]
        del items[mm_hash]
        if not items:
            del self._by_producer[producer]

    def first_requested(self) -> str | None:
        """Return the first item that a request waits for, by the requests' order."""
        return self._requested[0][2] if self._requested else None

    def unrequested(self) -> Iterator[str]:
        """Return the first item of each producer, in the order of their turns."""
        return (next(iter(items)) for items in self._by_producer.values())

    def move_to_end(self, producer: str) -> None:
        """Put this producer's turn last, as an unrequested item of it was admitted."""
        if producer in self._by_producer:
            self._by_producer.move_to_end(producer)


class ItemAdmission:
    """The queue of items for memory, and the admitted items that lack rows.

    `items` are the consumer's own.
    """

    def __init__(self, items: Mapping[str, Item], max_landing_bytes: int) -> None:
        self._items = items
        self._max_landing_bytes = max_landing_bytes
        self._landing_bytes = 0  # of admitted items
        self._unrequested_bytes = 0  # of them: of items that no request waits for
        self._queue = AdmissionQueue()
        self._unrequested_may_fit = False  # since none did, the queue or the room has changed
        self._active: dict[str, Item] = {}
        self._grantable: dict[str, Item] = {}
        self._orders: list[int] = []  # sorted, of all items that requests wait for
        self._memory_released = False  # since the last `admit`
        self._progress_at = float("-inf")  # when memory was last freed, or an item admitted

    @property
    def num_active(self) -> int:
        """Number of admitted items whose rows are not all here."""
        return len(self._active)

    def grantable(self) -> list[Item]:
        """Return the items with rows that are neither received nor granted.

        Items of requests come first, those of the oldest request at the front.
        """
        return sorted(self._grantable.values(), key=_grant_order)

    # The queue

    def wait(self, item: Item) -> None:
        """Queue an item for memory."""
        self._unrequested_may_fit = True
        self._queue.add(item.mm_hash, item.sender[0], item.order)

    def request(self, item: Item, order: int) -> None:
        """Note that requests wait for an item. `order`: the oldest request's."""
        if item.order == order:
            return
        if item.requested:
            self._forget_order(item)
        elif item.admitted:
            self._unrequested_bytes -= _nbytes(item)
        item.order = order
        insort(self._orders, order)
        self._unrequested_may_fit = True
        if item.mm_hash in self._queue:
            self._queue.add(item.mm_hash, item.sender[0], order)

    def _forget_order(self, item: Item) -> None:
        del self._orders[bisect_left(self._orders, item.order)]

    def admit(self, now: float) -> Iterator[Item]:
        """Admit what fits; each is admitted by the time that the next one is asked for."""
        if self._memory_released:
            self._memory_released, self._progress_at = False, now
        while (mm_hash := self._next(now)) is not None:
            item = self._items[mm_hash]
            self._queue.remove(mm_hash)
            if not item.requested:
                self._queue.move_to_end(item.sender[0])
            self._count_bytes(item, _nbytes(item))
            self._progress_at = now
            item.admitted = True
            self.activate(item)
            yield item

    def _next(self, now: float) -> str | None:
        is_full = len(self._active) >= MAX_ACTIVE
        requested = self._queue.first_requested()
        if requested is not None:
            item = self._items[requested]
            has_room = self._fits(item)
            if has_room and not is_full:
                return requested
            if not (self._is_oldest(item) or item.order < NOT_REQUESTED):
                return None  # started and older requests go first, younger ones wait for it
            waited_s = now - max(item.since, self._progress_at)
            may_wait = waited_s < OLDEST_WAITS_S and self._others_progress(item, has_room)
            return None if may_wait else requested
        if self._unrequested_may_fit and not is_full:
            for mm_hash in self._queue.unrequested():
                if self._fits(self._items[mm_hash]):
                    return mm_hash
            self._unrequested_may_fit = False
        return None

    def _fits(self, item: Item) -> bool:
        """Return True if memory for an item is within its limits.

        The limits are `max_landing_bytes`, and its part for items that no request waits for.
        """
        nbytes = _nbytes(item)
        if not item.requested and self._unrequested_bytes + nbytes > self._max_unrequested_bytes:
            return False
        return self._landing_bytes + nbytes <= self._max_landing_bytes

    @property
    def _max_unrequested_bytes(self) -> int:
        return self._max_landing_bytes // UNREQUESTED_SHARE

    def _count_bytes(self, item: Item, nbytes: int) -> None:
        self._landing_bytes += nbytes
        self._unrequested_bytes += 0 if item.requested else nbytes

    def _is_oldest(self, item: Item) -> bool:
        """Return True if no older request waits for any item."""
        return self._orders[0] == item.order

    def _others_progress(self, item: Item, has_room: bool) -> bool:
        """Return True if an item of another request will free the memory or place that is missing.

        The engine does not take items that no request waits for, so such items free nothing.
        """
        if has_room:
            return bool(self._active)
        return any(each.requested and each.order != item.order for each in self._active.values())

    def waits_for_a_request(self, item: Item) -> bool:
        """Return True if an offered item is admitted only once a request waits for it."""
        if item.mm_hash not in self._queue or item.requested:
            return False
        return _nbytes(item) > self._max_unrequested_bytes

    # Admitted items

    def activate(self, item: Item) -> None:
        """Start granting rows to an admitted item, which has an offer and lacks rows."""
        self._active[item.mm_hash] = self._grantable[item.mm_hash] = item

    def mark_grantable(self, item: Item) -> None:
        """Grant rows to an item again: some may be neither received nor granted any more."""
        if item.mm_hash in self._active:
            self._grantable[item.mm_hash] = item

    def mark_fully_granted(self, item: Item) -> None:
        """Grant an item nothing more until one of its grants ends."""
        del self._grantable[item.mm_hash]

    def deactivate(self, item: Item) -> None:
        """Stop granting rows to an item; its memory stays."""
        self._active.pop(item.mm_hash, None)
        self._grantable.pop(item.mm_hash, None)

    def remove(self, item: Item) -> None:
        """Remove an item that has no sender any more."""
        self._queue.remove(item.mm_hash)
        self._unrequested_may_fit = True
        self.deactivate(item)

    def forget(self, item: Item) -> None:
        """Forget an item that has ended."""
        self.remove(item)
        if item.requested:
            self._forget_order(item)

    def release_memory(self, item: Item) -> None:
        """Return an admitted item's memory to the limit."""
        self._count_bytes(item, -_nbytes(item))
        self._memory_released = self._unrequested_may_fit = True
        item.admitted = False

    def gauges(self) -> dict[str, float]:
        """Return the levels for the metrics, by name."""
        return {"waiting_items": len(self._queue), "landing_bytes": self._landing_bytes}


def _nbytes(item: Item) -> int:
    assert item.shape is not None
    return item.shape.nbytes


def _grant_order(item: Item) -> tuple[bool, int]:
    return (not item.requested, item.order)
