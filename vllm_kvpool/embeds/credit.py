"""Who is let in, in which order, and how many rows are granted at a time (pure).

Memory for an item's rows is taken whole, before its first grant, and given back when the engine has
taken the item. So nobody holds a part of what it needs while it waits for the rest. Between items
of several requests that wait for each other's memory the oldest request decides: its items are let
in even beyond the limit, so one request can always go on; but only where no other request's item is
on its way, which makes room when it is there, or where nothing has moved for `OLDEST_WAITS_S`.
Memory is bounded by the limit, plus what one request needs at once where requests wait for each
other.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

RECENT_ITEMS = 16
FEWEST_RECENT = 8  # below, the first grant is the configured one
UNASKED_SHARE = 2  # of the memory for items, 1/n for those no request has asked for yet
WINDOWS_IN_FLIGHT = 2  # of an item: one is drained while the other is written
MOST_SHARES = 8  # the window is not cut into more parts than that, however many items there are
SMALLEST_SHARE = 16  # a grant of less than 1/n of the window waits for more, if it is not the last
MOST_ENTRIES = 8  # in the line, for each item that waits

MOST_WINDOW_BYTES = 32 << 20  # longer grants only overlap less, and take more into quarantine

OLDEST_WAITS_S = 0.25  # for something to move, before it is let in beyond the limit

NOT_ASKED = -1


@dataclass(slots=True)
class RecentRows:
    """How long recent items were, to size a grant made before the length is known."""

    rows: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_ITEMS))

    def add(self, rows: int) -> None:
        """An item has been offered."""
        self.rows.append(rows)

    def first_grant(self, most: int) -> int:
        """The longest of recent items, or `most` if that is shorter or little is known."""
        return most if len(self.rows) < FEWEST_RECENT else min(most, max(self.rows))


def window_bytes(arena_bytes: int, active: int) -> int:
    """The part of the window for one grant, with so many items in transfer."""
    share = arena_bytes // (WINDOWS_IN_FLIGHT * max(1, min(active, MOST_SHARES)))
    return min(share, MOST_WINDOW_BYTES)


def is_worth_it(nbytes: int, wanted: int, arena_bytes: int, window_is_idle: bool) -> bool:
    """Whether to grant so much now, where `wanted` is not free; progress is never refused."""
    return nbytes >= wanted or window_is_idle or nbytes * SMALLEST_SHARE >= arena_bytes


@dataclass(slots=True)
class Landing:
    """Memory for items' rows: what is taken, and by whom."""

    limit: int
    taken: int = 0
    unasked: int = 0  # of it, by items no request has asked for yet

    def admits(self, nbytes: int, *, asked: bool) -> bool:
        """Whether there is memory for an item of so many bytes."""
        if asked:
            return self.taken + nbytes <= self.limit
        return (
            self.unasked + nbytes <= self.limit // UNASKED_SHARE
            and self.taken + nbytes <= self.limit
        )

    def ever_admits(self, nbytes: int) -> bool:
        """Whether an item that no request has asked for can ever be let in."""
        return nbytes <= self.limit // UNASKED_SHARE

    def take(self, nbytes: int, asked: bool) -> None:
        """An item is let in."""
        self.taken += nbytes
        self.unasked += 0 if asked else nbytes

    def give_back(self, nbytes: int, asked: bool) -> None:
        """An item has gone."""
        self.taken -= nbytes
        self.unasked -= 0 if asked else nbytes
        assert self.taken >= 0
        assert self.unasked >= 0

    def now_asked(self, nbytes: int) -> None:
        """A request has come for an item that was let in without."""
        self.unasked -= nbytes


class Line:
    """Items that wait to be let in: those asked for by request, then one of each producer in turn.

    An entry counts if it is the item's last one; older ones are dropped when they come up, or are
    most of all.
    """

    def __init__(self) -> None:
        self._asked: list[tuple[int, int, str]] = []  # heap of order, number, item
        self._by_producer: OrderedDict[str, deque[tuple[int, str]]] = OrderedDict()
        self._waiting: dict[str, tuple[int, int]] = {}  # item -> order, number of its last entry
        self._number = 0
        self._entries = 0  # since old ones were last dropped

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._waiting

    def add(self, mm_hash: str, producer: str, order: int) -> None:
        """An item waits; again with another order moves it."""
        waiting = self._waiting.get(mm_hash)
        if waiting is not None and waiting[0] == order:
            return
        self._number += 1
        self._entries += 1
        self._waiting[mm_hash] = (order, self._number)
        if order == NOT_ASKED:
            self._by_producer.setdefault(producer, deque()).append((self._number, mm_hash))
        else:
            heapq.heappush(self._asked, (order, self._number, mm_hash))

    def remove(self, mm_hash: str) -> None:
        """It waits no more."""
        self._waiting.pop(mm_hash, None)
        if self._entries > MOST_ENTRIES * len(self._waiting):
            self._drop_old()

    def _drop_old(self) -> None:
        self._asked = [each for each in self._asked if self._waiting.get(each[2]) == each[:2]]
        heapq.heapify(self._asked)
        for producer, items in tuple(self._by_producer.items()):
            last = deque(each for each in items if self._is_last(*each))
            if last:
                self._by_producer[producer] = last
            else:
                del self._by_producer[producer]
        self._entries = len(self._waiting)

    def _is_last(self, number: int, mm_hash: str) -> bool:
        return self._waiting.get(mm_hash) == (NOT_ASKED, number)

    def first_asked(self) -> str | None:
        """The item of the oldest request."""
        while self._asked:
            order, number, mm_hash = self._asked[0]
            if self._waiting.get(mm_hash) == (order, number):
                return mm_hash
            heapq.heappop(self._asked)
        return None

    def unasked(self) -> Iterator[str]:
        """The first item of each producer, beginning with whose turn it is."""
        for producer in list(self._by_producer):
            items = self._by_producer[producer]
            while items and not self._is_last(*items[0]):
                items.popleft()
            if items:
                yield items[0][1]
            else:
                del self._by_producer[producer]

    def took(self, producer: str) -> None:
        """An unasked item of this producer was let in: the others are next."""
        if producer in self._by_producer:
            self._by_producer.move_to_end(producer)
