"""A producer's encoded items, and the consumers of those to come (pure; control thread).

An item stays while a transfer needs it, then as long as there is room; one that no consumer takes
stays for `waiting_timeout_s`.
"""

from collections import OrderedDict
from collections.abc import Callable, KeysView
from dataclasses import dataclass, field

from vllm_kvpool.embeds.protocol.rows import ItemShape

MAX_GONE = 1 << 14  # dropped items that are remembered


@dataclass(slots=True)
class EncodedItem:
    """An item's rows in this process."""

    item_id: int
    mm_hash: str
    shape: ItemShape
    since: float  # when it was encoded, reused by a request, or last taken
    digest: str = ""
    is_prepared: bool = False  # in host memory, or it cannot be brought there
    transfers: set[int] = field(default_factory=set)
    endpoints: dict[str, float] = field(default_factory=dict)
    """Consumers that are to get it once in session, and until when."""
    taken: bool = False  # by at least one consumer
    held_bytes: int = 0  # its part of the cache's `held_bytes`

    @property
    def is_spare(self) -> bool:
        """True if the item was taken and no other consumer is to get it."""
        return self.taken and not self.transfers and not self.endpoints


class EncodedItemCache:
    """The encoded items; `release(item_id)` is called when nothing of one is needed any more."""

    def __init__(self, retain_bytes: int, release: Callable[[int], None]) -> None:
        self._retain_bytes = retain_bytes
        self._release = release
        self.items: OrderedDict[str, EncodedItem] = OrderedDict()
        """By name, least recently used first."""
        self.unreleased: dict[int, EncodedItem] = {}
        """By id, dropped ones too."""
        self.dropped: OrderedDict[str, None] = OrderedDict()
        """Names of items that were dropped not long ago."""
        self._kept_bytes = 0
        self._next_item_id = 1
        self.held_bytes = 0
        """Bytes of items that a consumer has still to take."""

    def holds(self, item: EncodedItem) -> bool:
        """Return True if the item has not been dropped."""
        return self.items.get(item.mm_hash) is item

    def add(self, mm_hash: str, shape: ItemShape, now: float) -> EncodedItem:
        """Add an item that was encoded."""
        assert mm_hash not in self.items
        item = EncodedItem(self._next_item_id, mm_hash, shape, now)
        self._next_item_id += 1
        self.items[mm_hash] = self.unreleased[item.item_id] = item
        self._kept_bytes += shape.nbytes
        self.update_held_bytes(item)
        self.dropped.pop(mm_hash, None)
        return item

    def renew(self, mm_hash: str, now: float) -> None:
        """Keep an item, if it is here, as long as a new item."""
        item = self.items.get(mm_hash)
        if item is not None:
            item.since = now
            self.items.move_to_end(mm_hash)

    def begin(self, item: EncodedItem, tid: int) -> None:
        """Hold an item for a transfer that begins."""
        item.transfers.add(tid)
        self.update_held_bytes(item)
        self.items.move_to_end(item.mm_hash)

    def end(self, item: EncodedItem, tid: int, now: float) -> None:
        """Release an item from a transfer that has ended and writes nothing any more."""
        item.transfers.remove(tid)
        self.update_held_bytes(item)
        item.since = now
        if self.holds(item):
            self.make_room()
        else:
            self.release_if_unused(item)

    def expired(self, now: float, timeout_s: float) -> list[EncodedItem]:
        """Return the items that no consumer has taken for so long, nor will now."""
        return [
            each
            for each in self.items.values()
            if now - each.since > timeout_s
            and not (each.taken or each.transfers or each.endpoints)
            and each.is_prepared
        ]

    def make_room(self) -> None:
        """Drop spare items, least recently used first, while more than `retain_bytes` are kept."""
        while self._kept_bytes > self._retain_bytes:
            item = next((each for each in self.items.values() if each.is_spare), None)
            if item is None:
                return
            self.drop(item)

    def drop(self, item: EncodedItem) -> None:
        """Start no new transfer of it, and release it when nothing reads it."""
        del self.items[item.mm_hash]
        self._kept_bytes -= item.shape.nbytes
        self.update_held_bytes(item)
        self.dropped[item.mm_hash] = None
        while len(self.dropped) > MAX_GONE:
            self.dropped.popitem(last=False)
        self.release_if_unused(item)

    def release_if_unused(self, item: EncodedItem) -> None:
        """Release a dropped item that nothing reads."""
        if not item.transfers and item.is_prepared:
            del self.unreleased[item.item_id]
            self._release(item.item_id)

    def update_held_bytes(self, item: EncodedItem) -> None:
        """Count an item anew; who is to get it has changed."""
        is_held = self.holds(item) and not item.is_spare
        nbytes = item.shape.nbytes if is_held else 0
        self.held_bytes += nbytes - item.held_bytes
        item.held_bytes = nbytes


class PendingTargets:
    """Consumers of items that are not encoded yet, with deadlines. The oldest of over `most` go.

    A target is a peer's incarnation, or an endpoint.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._expires_at: OrderedDict[tuple[str, str], float] = OrderedDict()  # item and target
        self._targets: dict[str, dict[str, None]] = {}  # of an item, in order

    def __len__(self) -> int:
        return len(self._expires_at)

    @property
    def items(self) -> KeysView[str]:
        """Hashes of the items that some consumer waits for."""
        return self._targets.keys()

    def add(self, mm_hash: str, target: str, expires_at: float) -> None:
        """Add a target for an item until `expires_at`; a second call renews it."""
        self._expires_at[mm_hash, target] = expires_at
        self._targets.setdefault(mm_hash, {})[target] = None
        while len(self._expires_at) > self._most:
            self._forget(*next(iter(self._expires_at)))

    def take(self, mm_hash: str) -> list[str]:
        """Remove and return the targets of an item."""
        targets = list(self._targets.get(mm_hash, ()))
        for target in targets:
            self._forget(mm_hash, target)
        return targets

    def drop(self, lost: str) -> None:
        """Forget every item that the peer `lost` waits for."""
        for mm_hash, target in [key for key in self._expires_at if key[1] == lost]:
            self._forget(mm_hash, target)

    def drop_late(self, now: float) -> None:
        """Forget the consumers whose deadline has passed."""
        for mm_hash, target in [
            key for key, expires_at in self._expires_at.items() if expires_at < now
        ]:
            self._forget(mm_hash, target)

    def _forget(self, mm_hash: str, target: str) -> None:
        del self._expires_at[mm_hash, target]
        targets = self._targets[mm_hash]
        del targets[target]
        if not targets:
            del self._targets[mm_hash]
