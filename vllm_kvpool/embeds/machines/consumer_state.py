"""What a consumer knows, and how its items and grants end (pure; owned by the control thread)."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_kvpool.embeds.machines.admission import Admission
from vllm_kvpool.embeds.machines.effects import Discard, Effect, NotifyScheduler, Send
from vllm_kvpool.embeds.machines.items import GrantRecord, Item, ProducerPeer, TransferRef
from vllm_kvpool.embeds.machines.states import (
    CONSUMER_TABLE,
    GRANT_TABLE,
    GrantEvent,
    GrantState,
    ItemEvent,
    TransferState,
)
from vllm_kvpool.embeds.machines.window import WindowLedger
from vllm_kvpool.embeds.protocol.messages import Cancel, Code, ItemNews, Message, Offer, Revoke
from vllm_kvpool.embeds.protocol.rows import Intervals

RECENT_ITEMS = 16
FEWEST_RECENT = 8  # with fewer, the first grant is default_allocate_tokens
MAX_ENDED = 1 << 16  # transfers whose final message is kept, to be sent again
MAX_ITEMS = 1 << 16  # items a consumer knows of
MAX_ACTIVE = 64  # items that are granted rows at the same time
QUARANTINE_S = 70.0  # more than twice the time after which Mooncake gives a transfer up


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """Bounds of a consumer; seconds and bytes."""

    num_ranks: int = 1
    """Ranks of the engine; all need the same encoding of an item."""
    max_landing_bytes: int = 4 << 30
    """Memory for items that the engine has not taken yet; `admission` says when it is exceeded."""
    max_item_bytes: int = 16 << 30
    default_allocate_tokens: int = 8192
    """The most rows of one grant, also of one made before the item's length is known."""
    bootstrap_timeout_s: float = 30.0
    """How long a request waits for an offer of its item."""
    waiting_timeout_s: float = 60.0
    """How long it then waits for further rows."""
    quarantine_s: float = QUARANTINE_S
    """How long memory stays out of use after a write that may still arrive."""
    grant_ttl_s: float = 60.0
    repeat_s: float = 1.0
    backoff_s: float = 0.05
    max_backoff_s: float = 5.0
    max_failures: int = 8  # writes of an item that fail in a row
    max_corrupt: int = 3  # grants of an item that arrive damaged
    max_items: int = MAX_ITEMS
    max_active: int = MAX_ACTIVE
    max_ended: int = MAX_ENDED


@dataclass(slots=True)
class RecentRows:
    """The lengths of recent items: they size a grant made before an item's length is known."""

    rows: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_ITEMS))

    def add(self, rows: int) -> None:
        self.rows.append(rows)

    def first_grant(self, most: int) -> int:
        """The longest of recent items, at most `most`; `most` while too few are known."""
        return most if len(self.rows) < FEWEST_RECENT else min(most, max(self.rows))


class OfferTable:
    """Which transfer offers which item, and the final message of each that ended.

    A transfer that has ended is answered with its final message, however often it asks.
    """

    def __init__(self, max_ended: int, send: Callable[[str, Message], None]) -> None:
        self._max_ended = max_ended
        self._send = send
        self._items: dict[TransferRef, str] = {}
        self._ended: OrderedDict[TransferRef, Message] = OrderedDict()

    def __contains__(self, ref: TransferRef) -> bool:
        return ref in self._items

    def item_of(self, ref: TransferRef) -> str | None:
        return self._items.get(ref)

    def add(self, item: Item, ref: TransferRef, message: Offer) -> None:
        """A producer offers an item, as its sender or standing by."""
        item.offers[ref] = message
        self._items[ref] = item.mm_hash

    def drop(self, ref: TransferRef) -> str | None:
        """Remove an offer; its item, if there was one."""
        return self._items.pop(ref, None)

    def close(self, ref: TransferRef, final_message: Message) -> None:
        """Remove an offer and send its final message."""
        self._items.pop(ref, None)
        self._ended[ref] = final_message
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
        self._send(ref[0], final_message)

    def resend_final(self, ref: TransferRef) -> bool:
        """Send the final message again; False if there was none."""
        message = self._ended.get(ref)
        if message is not None:
            self._send(ref[0], message)
        return message is not None

    def of_peer(self, peer: str) -> list[TransferRef]:
        return [each for each in self._items if each[0] == peer]

    def forget_finals_of(self, peer: str) -> None:
        for ref in [each for each in self._ended if each[0] == peer]:
            del self._ended[ref]

    def check(self, items: dict[str, Item]) -> None:
        for ref, mm_hash in self._items.items():
            assert ref in items[mm_hash].offers


class ConsumerState:
    """Items, offers, grants and producers, and what is to be done about them."""

    def __init__(self, arena_bytes: int, limits: ConsumerLimits) -> None:
        self.limits = limits
        self.window = WindowLedger(
            arena_bytes,
            ttl_s=limits.grant_ttl_s,
            quarantine_s=limits.quarantine_s,
            ended=self._grant_ended,
        )
        self.items: dict[str, Item] = {}
        self.admission = Admission(self.items, limits.max_landing_bytes, limits.max_active)
        self.offer_table = OfferTable(limits.max_ended, self.send)
        self.peers: dict[str, ProducerPeer] = {}
        self.recent = RecentRows()
        self.changed_at: float | None = None  # last change since rows were granted; None: none
        self.effects: list[Effect] = []
        self.counts: defaultdict[str, float] = defaultdict(float)

    # Messages

    def send(self, peer: str, body: Message) -> None:
        """Send a message to a peer's incarnation."""
        self.effects.append(Send(peer, body))

    def report_ready(self, item: Item) -> None:
        """Tell the own scheduler that an item can be loaded."""
        assert item.shape is not None
        self.effects.append(NotifyScheduler(ItemNews(item.mm_hash, item.digest, item.shape.rows)))

    def report_encoding(self, item: Item) -> None:
        """Tell the own scheduler which encoding is coming; other ranks may be offered another."""
        if self.limits.num_ranks > 1 and item.requested:
            assert item.shape is not None
            news = ItemNews(item.mm_hash, item.digest, item.shape.rows, offered=True)
            self.effects.append(NotifyScheduler(news))

    def send_grant(self, granted: GrantRecord, now: float) -> None:
        granted.sent_at = now
        self.send(granted.ref[0], self.window.message(granted))

    # Grants

    def revoke(self, granted: GrantRecord, tid: int) -> None:
        """Revoke a grant; `tid` is the transfer that knows of it."""
        granted.ref = (granted.ref[0], tid)
        granted.state = GRANT_TABLE.after(granted.state, GrantEvent.REVOKE)
        item = self.items.get(granted.mm_hash)
        if item is not None:
            item.grants.pop(granted.gid, None)
            self.admission.mark_grantable(item)
        self.send(granted.ref[0], Revoke(tid, granted.gid))

    def _grant_ended(self, granted: GrantRecord, now: float) -> None:
        item = self.items.get(granted.mm_hash)
        if item is not None:
            item.grants.pop(granted.gid, None)
            item.idle_since = now
            self.admission.mark_grantable(item)
        if granted.state is GrantState.QUARANTINED:
            nbytes = sum(extent.nbytes for extent in granted.extents)
            self.counts["quarantined_bytes"] += nbytes

    def mark_idle_if_no_grants(self, item: Item) -> None:
        """A grant has ended: an item without another one is PARTIAL."""
        if item.state is TransferState.TRANSFERRING and not item.grants:
            item.state = CONSUMER_TABLE.after(item.state, ItemEvent.IDLE)

    # Ends

    def fail(self, item: Item, code: Code, text: str, now: float) -> None:
        """End an item that cannot be received."""
        self.end(item, ItemEvent.FAIL, code, text, now)

    def end(self, item: Item, event: ItemEvent, code: Code, text: str, now: float) -> None:
        """End an item without handing it over: tell its producers and the own scheduler."""
        item.state = CONSUMER_TABLE.after(item.state, event)
        self.counts[f"ended_{code.value}"] += 1
        for ref in list(item.offers):
            self.offer_table.close(ref, Cancel(ref[1], code, text))
        for granted in list(item.grants.values()):
            if granted.state is GrantState.GRANTED:
                self.revoke(granted, granted.ref[1])
        if event is ItemEvent.FAIL or not item.requested:
            self.effects.append(NotifyScheduler(ItemNews(item.mm_hash, code=code, text=text)))
        self.drop(item)

    def drop(self, item: Item) -> None:
        """Forget an item."""
        self.release_rows(item)
        self.admission.remove(item)
        del self.items[item.mm_hash]

    def release_rows(self, item: Item) -> None:
        """Free an item's memory."""
        item.received = Intervals()
        for granted in [each for each in item.grants.values() if each.ref[1]]:
            del item.grants[granted.gid]
        if item.admitted:
            self.admission.release_memory(item)
            self.effects.append(Discard(item.mm_hash))
