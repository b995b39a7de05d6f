"""What a producer knows: its encoded items, who waits for them, and its transfers (pure).

Owned by the control thread. An encoded item stays while somebody takes it, then as long as there
is room; one that nobody has taken stays for `waiting_timeout_s`. A dropped item starts no
transfer and is released once nothing reads it.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass, field

from vllm_kvpool.embeds.machines.effects import Effect, Release, Send
from vllm_kvpool.embeds.machines.states import ENDED, PRODUCER_TABLE, TransferEvent, TransferState
from vllm_kvpool.embeds.protocol.messages import Code, Grant, Message, Unknown, Window, Withdraw
from vllm_kvpool.embeds.protocol.rows import ItemShape

MAX_ENDED = 1 << 16  # transfers whose final message is kept, to be sent again
MAX_WANTS = 1 << 16  # wants that are kept, for items that are not encoded yet
MAX_GONE = 1 << 14  # dropped items that are remembered
MAX_WRITES = 256  # of a producer, under way at a time
MAX_RESULTS = 64  # grants of a transfer whose result is kept, to be sent again


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerLimits:
    """Bounds of a producer; seconds and bytes."""

    retain_bytes: int = 4 << 30
    """Items kept: beyond it encoding waits for consumers, and taken items are dropped."""
    waiting_timeout_s: float = 60.0
    """How long an item that nobody takes is kept, and a push of one that is not encoded yet."""
    writers: int = 4
    small_bytes: int = 8 << 20
    """More than `writers` writes run at a time while all of them have fewer bytes than this."""
    max_writes: int = MAX_WRITES
    repeat_s: float = 1.0
    max_ended: int = MAX_ENDED
    max_wants: int = MAX_WANTS
    max_gone: int = MAX_GONE
    max_results: int = MAX_RESULTS


@dataclass(slots=True)
class EncodedItem:
    """An item's rows in this process."""

    item_id: int
    mm_hash: str
    shape: ItemShape
    aux: bytes
    since: float  # when it was encoded, or last taken
    digest: str = ""  # empty until it is in host memory
    transfers: set[int] = field(default_factory=set)
    taken: bool = False  # by at least one consumer
    readers: int = 0  # writes and the preparation under way
    held_bytes: int = 0  # its part of the cache's `held_bytes`

    @property
    def is_spare(self) -> bool:
        """Whether it was taken and no transfer needs it now."""
        return self.taken and not self.transfers


class EncodedItemCache:
    """The encoded items; `release(item_id)` is called when nothing of one is needed any more."""

    def __init__(self, retain_bytes: int, max_gone: int, release: Callable[[int], None]) -> None:
        self._retain_bytes = retain_bytes
        self._max_gone = max_gone
        self._release = release
        self._sources: OrderedDict[str, EncodedItem] = OrderedDict()  # least recently used first
        self._untaken: dict[str, EncodedItem] = {}  # of `_items`: those that nobody has taken
        self._read: dict[int, EncodedItem] = {}  # all that are not released, by id
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._kept_bytes = 0
        self._next_item_id = 1
        self.held_bytes = 0
        """Bytes of items that somebody is still to take."""

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._sources

    def __iter__(self) -> Iterator[EncodedItem]:
        return iter(list(self._sources.values()))

    def get(self, mm_hash: str) -> EncodedItem | None:
        return self._sources.get(mm_hash)

    def by_id(self, item_id: int) -> EncodedItem:
        """An item that is not released, dropped or not."""
        return self._read[item_id]

    def holds(self, item: EncodedItem) -> bool:
        """Whether it has not been dropped."""
        return self._sources.get(item.mm_hash) is item

    def was_dropped(self, mm_hash: str) -> bool:
        """Whether an item of this name was dropped not long ago."""
        return mm_hash in self._dropped

    def add(self, mm_hash: str, shape: ItemShape, aux: bytes, now: float) -> EncodedItem:
        """Add an item that was encoded; its preparation reads it."""
        assert mm_hash not in self._sources
        item = EncodedItem(self._next_item_id, mm_hash, shape, aux, now, readers=1)
        self._next_item_id += 1
        self._sources[mm_hash] = self._untaken[mm_hash] = self._read[item.item_id] = item
        self._kept_bytes += shape.nbytes
        self._update_held_bytes(item)
        self._dropped.pop(mm_hash, None)
        return item

    def begin(self, item: EncodedItem, tid: int) -> None:
        """A transfer of it begins."""
        item.transfers.add(tid)
        self._update_held_bytes(item)
        self._sources.move_to_end(item.mm_hash)

    def mark_taken(self, item: EncodedItem, now: float) -> None:
        """A consumer has all of it."""
        item.taken, item.since = True, now
        if self._untaken.get(item.mm_hash) is item:
            del self._untaken[item.mm_hash]

    def end(self, item: EncodedItem, tid: int, now: float) -> None:
        """A transfer of it has ended and writes nothing any more."""
        item.transfers.remove(tid)
        self._update_held_bytes(item)
        item.since = now
        if self.holds(item):
            self.make_room()
        else:
            self.release_if_unused(item)

    def expired(self, now: float, timeout_s: float) -> list[EncodedItem]:
        """Items that nobody has taken for so long and nobody reads."""
        return [
            each
            for each in self._untaken.values()
            if not each.transfers and not each.readers and now - each.since > timeout_s
        ]

    def make_room(self) -> None:
        """Drop spare items, least recently used first, while more than `retain_bytes` are kept."""
        while self._kept_bytes > self._retain_bytes:
            item = next((each for each in self._sources.values() if each.is_spare), None)
            if item is None:
                return
            self.drop(item)

    def drop(self, item: EncodedItem) -> None:
        """Start no new transfer of it, and release it when nothing reads it."""
        del self._sources[item.mm_hash]
        self._untaken.pop(item.mm_hash, None)
        self._kept_bytes -= item.shape.nbytes
        self._update_held_bytes(item)
        self._dropped[item.mm_hash] = None
        while len(self._dropped) > self._max_gone:
            self._dropped.popitem(last=False)
        self.release_if_unused(item)

    def clear_dropped(self) -> None:
        """Forget which items were dropped: they may be encoded again."""
        self._dropped.clear()

    def release_if_unused(self, item: EncodedItem) -> None:
        """Release a dropped item that nothing reads."""
        if not item.transfers and not item.readers:
            del self._read[item.item_id]
            self._release(item.item_id)

    def _update_held_bytes(self, item: EncodedItem) -> None:
        is_held = self.holds(item) and not item.is_spare
        nbytes = item.shape.nbytes if is_held else 0
        self.held_bytes += nbytes - item.held_bytes
        item.held_bytes = nbytes

    def check(self, transfers: set[int]) -> None:
        """Assert the invariants; `transfers` are the ids of all transfers."""
        for item_id, item in self._read.items():
            assert item_id == item.item_id
            assert item.transfers <= transfers
            assert item.readers >= 0
            assert item.transfers or item.readers or item.mm_hash in self._sources
        held = (each for each in self._sources.values() if not each.is_spare)
        assert self.held_bytes == sum(each.shape.nbytes for each in held)
        assert self._kept_bytes == sum(each.shape.nbytes for each in self._sources.values())
        untaken = {mm_hash: each for mm_hash, each in self._sources.items() if not each.taken}
        assert self._untaken == untaken


class PendingWants:
    """Which peers wait for items that are not encoded yet, and until when; at most `most`,
    oldest out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._expires_at: OrderedDict[tuple[str, str], float] = OrderedDict()  # item and peer
        self._peers: dict[str, dict[str, None]] = {}  # of an item, in order

    def __len__(self) -> int:
        return len(self._expires_at)

    @property
    def items(self) -> KeysView[str]:
        return self._peers.keys()

    def add(self, mm_hash: str, peer: str, expires_at: float) -> None:
        """A peer waits for an item; again renews it."""
        self._expires_at[mm_hash, peer] = expires_at
        self._peers.setdefault(mm_hash, {})[peer] = None
        while len(self._expires_at) > self._most:
            self._forget(*next(iter(self._expires_at)))

    def take(self, mm_hash: str) -> list[str]:
        """Remove and return the peers that wait for an item."""
        peers = list(self._peers.get(mm_hash, ()))
        for peer in peers:
            self._forget(mm_hash, peer)
        return peers

    def drop_peer(self, lost: str) -> None:
        for mm_hash, peer in [key for key in self._expires_at if key[1] == lost]:
            self._forget(mm_hash, peer)

    def drop_late(self, now: float) -> None:
        for mm_hash, peer in [
            key for key, expires_at in self._expires_at.items() if expires_at < now
        ]:
            self._forget(mm_hash, peer)

    def _forget(self, mm_hash: str, peer: str) -> None:
        del self._expires_at[mm_hash, peer]
        peers = self._peers[mm_hash]
        del peers[peer]
        if not peers:
            del self._peers[mm_hash]


@dataclass(slots=True)
class ItemTransfer:
    """An encoded item on its way to one rank of a consumer."""

    tid: int
    item: EncodedItem
    since: float  # the consumer's last message
    endpoint: str = ""  # the consumer's, if the own scheduler named it
    peer: str = ""  # its incarnation, while there is a session
    state: TransferState = TransferState.BOOTSTRAPPING
    results: OrderedDict[int, Message | None] = field(default_factory=OrderedDict)
    """The answer to each grant; None while its write is due or under way."""
    due: deque[tuple[Grant, float]] = field(default_factory=deque)  # and when it expires
    writing: dict[int, int] = field(default_factory=dict)  # grant -> bytes
    offered: bool = False  # and the offer was answered
    sent_at: float = float("-inf")
    first: int = 0  # the grant that came with the want
    final_message: Message | None = None  # sent when no write is under way


@dataclass(slots=True)
class ConsumerPeer:
    """A consumer's rank in session with this producer."""

    window: Window | None
    endpoints: frozenset[str]
    # Transfers with due writes, in turn.
    due: OrderedDict[int, None] = field(default_factory=OrderedDict)


class ProducerState:
    """Encoded items, transfers and consumers, and what is to be done about them."""

    def __init__(self, limits: ProducerLimits) -> None:
        self.limits = limits
        self.cache = EncodedItemCache(limits.retain_bytes, limits.max_gone, self._release)
        self.transfers: dict[int, ItemTransfer] = {}
        # In the order of their turns to write.
        self.peers: OrderedDict[str, ConsumerPeer] = OrderedDict()
        self._by_target: dict[tuple[str, str], int] = {}  # item, and peer or endpoint
        self._ended: OrderedDict[tuple[str, int], Message | None] = OrderedDict()
        self._next_tid = 1
        self.changed_at: float | None = None  # last change since writes were started; None: none
        self.effects: list[Effect] = []
        self.counts: defaultdict[str, float] = defaultdict(float)

    def send(self, peer: str, body: Message) -> None:
        self.effects.append(Send(peer, body))

    def begin(
        self, item: EncodedItem, now: float, *, endpoint: str = "", peer: str = ""
    ) -> ItemTransfer:
        """The transfer of an item to a target: the existing one, or a new one."""
        for target in (peer, endpoint):
            tid = self._by_target.get((item.mm_hash, target)) if target else None
            if tid is not None:
                return self.transfers[tid]
        transfer = ItemTransfer(self._next_tid, item, now, endpoint, peer)
        self._next_tid += 1
        self.transfers[transfer.tid] = transfer
        self.cache.begin(item, transfer.tid)
        for target in (peer, endpoint):
            if target:
                self._by_target[(item.mm_hash, target)] = transfer.tid
        return transfer

    def redirect(self, transfer: ItemTransfer, peer: str, now: float) -> ItemTransfer | None:
        """The transfer that goes to a new incarnation; None if that one has already asked for
        the item.
        """
        mm_hash = transfer.item.mm_hash
        other = self._by_target.get((mm_hash, peer))
        if other is not None and other != transfer.tid:
            self.end(transfer, TransferEvent.CANCEL, now)
            return None
        if transfer.state is not TransferState.BOOTSTRAPPING:
            # Grants of the old incarnation may have the same ids as those of the new one.
            del self._by_target[(mm_hash, transfer.endpoint)]
            following = self.begin(transfer.item, now, endpoint=transfer.endpoint, peer=peer)
            self.end(transfer, TransferEvent.CANCEL, now)
            return following
        self._by_target.pop((mm_hash, transfer.peer), None)
        transfer.peer, transfer.offered = peer, False
        self._by_target[(mm_hash, peer)] = transfer.tid
        return transfer

    def of(self, peer: str, tid: int) -> ItemTransfer | None:
        """A transfer that this consumer knows."""
        transfer = self.transfers.get(tid)
        if transfer is None or transfer.peer != peer or transfer.state in _NOT_OFFERED:
            return None
        return transfer

    def answer_ended(self, peer: str, tid: int) -> None:
        """Answer for a transfer that is not known any more: nothing of it is in flight."""
        if tid in self.transfers and self.transfers[tid].peer == peer:
            return  # it ends with its write and is answered then
        self.send(peer, self._ended.get((peer, tid)) or Unknown(tid, yours=False))

    def mark_idle(self, transfer: ItemTransfer) -> None:
        """A transfer with nothing to write is PARTIAL."""
        if (
            transfer.state is TransferState.TRANSFERRING
            and not transfer.due
            and not transfer.writing
        ):
            transfer.state = PRODUCER_TABLE.after(transfer.state, TransferEvent.WRITTEN)

    # Ends

    def end(self, transfer: ItemTransfer, event: TransferEvent, now: float) -> None:
        """End a transfer; it stays until its writes have ended."""
        transfer.state = PRODUCER_TABLE.after(transfer.state, event)
        transfer.due.clear()
        if event is TransferEvent.TAKEN:
            self.cache.mark_taken(transfer.item, now)
            self.counts["items"] += 1
        for target in (transfer.peer, transfer.endpoint):
            if self._by_target.get((transfer.item.mm_hash, target)) == transfer.tid:
                del self._by_target[(transfer.item.mm_hash, target)]
        if not transfer.writing:
            self.finalize(transfer, now)

    def finalize(self, transfer: ItemTransfer, now: float) -> None:
        """Forget an ended transfer once nothing of it is written."""
        if transfer.writing:
            return
        del self.transfers[transfer.tid]
        self._ended[(transfer.peer, transfer.tid)] = transfer.final_message
        while len(self._ended) > self.limits.max_ended:
            self._ended.popitem(last=False)
        if transfer.final_message is not None and transfer.peer in self.peers:
            self.send(transfer.peer, transfer.final_message)
        self.cache.end(transfer.item, transfer.tid, now)

    def withdraw_item(self, item: EncodedItem, now: float, code: Code, text: str) -> None:
        """Drop an item and withdraw it from all who still want it."""
        self.cache.drop(item)
        for tid in list(item.transfers):
            transfer = self.transfers[tid]
            if transfer.state not in ENDED:
                transfer.final_message = Withdraw(tid, code, text)
                self.end(transfer, TransferEvent.FAIL, now)

    def _release(self, item_id: int) -> None:
        self.effects.append(Release(item_id))


_NOT_OFFERED = ENDED | {TransferState.BOOTSTRAPPING}  # the consumer knows of no such transfer
