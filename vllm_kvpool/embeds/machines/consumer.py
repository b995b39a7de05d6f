"""A consumer: what each message, report and tick changes (pure; owned by the control thread).

There is one for each rank. It decides which rows go where and owns the set of rows received;
producers only propose. An item is expected by requests, offered by producers, admitted when there
is memory for all of it, then transferred window by window: granted, written, drained, granted
again, from the first missing row on. An item keeps its rows when its sender is lost, and any
producer of the same bytes continues there. Effects wait for `take_effects`.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from vllm_kvpool.embeds.machines.admission import Admission, Item
from vllm_kvpool.embeds.machines.effects import (
    Allocate,
    Connect,
    Discard,
    DrainRows,
    Effect,
    NotifyScheduler,
    Ready,
    Send,
)
from vllm_kvpool.embeds.machines.window import (
    WINDOWS_IN_FLIGHT,
    GrantRecord,
    GrantState,
    TransferRef,
    WindowLedger,
    window_bytes,
)
from vllm_kvpool.embeds.protocol.messages import (
    GRANT_TTL_S,
    MAX_ENDED,
    Cancel,
    CancelAck,
    Code,
    Complete,
    Expect,
    Grant,
    ItemNews,
    Message,
    Offer,
    OfferAck,
    Revoke,
    RevokeAck,
    Taken,
    Unknown,
    Want,
    WantAck,
    Withdraw,
    WriteFailed,
    WriteProgress,
    Wrote,
)
from vllm_kvpool.embeds.protocol.rows import Intervals, ItemShape, checked_shape, runs_of

RECENT_ITEMS = 16
FEWEST_RECENT = 8  # with fewer, the first grant is default_allocate_tokens
MAX_ITEMS = 1 << 16  # items a consumer knows of
MAX_CORRUPT = 3  # grants of an item that arrive damaged
MAX_BACKOFF_S = 5.0
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
    """Seconds that a request waits for an offer of its item."""
    waiting_timeout_s: float = 60.0
    """Seconds that the request then waits for further rows."""
    quarantine_s: float = QUARANTINE_S
    """Seconds that memory stays out of use after a write that may still arrive."""
    repeat_s: float = 1.0
    backoff_s: float = 0.05
    max_failures: int = 8  # writes of an item that fail in a row


@dataclass(slots=True)
class ProducerPeer:
    """A producer in session with this consumer."""

    endpoints: frozenset[str]
    row_bytes: int = 0  # of its last item


class Consumer:
    """The consumer of a rank. Methods that need the time take `now`; `take_effects` ends a turn."""

    def __init__(self, arena_bytes: int, limits: ConsumerLimits) -> None:
        self.limits = limits
        self.window = WindowLedger(
            arena_bytes, quarantine_s=limits.quarantine_s, ended=self._grant_ended
        )
        self.items: dict[str, Item] = {}
        self.admission = Admission(self.items, limits.max_landing_bytes)
        self._offers: dict[TransferRef, Item] = {}
        self._ended: OrderedDict[TransferRef, Message] = OrderedDict()  # their final messages
        self.peers: dict[str, ProducerPeer] = {}
        self._recent_rows: deque[int] = deque(maxlen=RECENT_ITEMS)  # of items that were offered
        self.effects: list[Effect] = []
        self.counts: defaultdict[str, float] = defaultdict(float)

    def take_effects(self, now: float) -> list[Effect]:
        """The effects since the last call, in order. Rows are granted here, once a turn."""
        self._admit(now)
        self._issue_grants(now)
        effects, self.effects = self.effects, []
        return effects

    # From the own scheduler and worker

    def expect(self, message: Expect, now: float) -> None:
        """A request waits for an item."""
        item = self.items.get(message.mm_hash)
        if item is not None and message.digest and item.digest not in ("", message.digest):
            self._end(item, Code.CONFLICT)
            item = None
        if item is None:
            item = self.items[message.mm_hash] = Item(message.mm_hash, now)
        was_requested = item.requested
        if message.digest:
            item.wanted_digest = message.digest
            self._refuse_other_encodings(item, message.digest)
        self.admission.request(item, message.order)
        item.patience_s = max(item.patience_s, self._patience_s(message.patience_s))
        item.peers |= frozenset(message.peers)
        item.expected_rows = message.rows or item.expected_rows
        item.gone.clear()
        if not was_requested:
            item.since = now
        self.effects += [Connect(endpoint) for endpoint in message.peers]
        refusal = self._refusal(item.shape, item) if item.shape is not None else None
        if refusal is not None:
            self._fail(item, *refusal)
            return
        if item.is_complete:
            self._report_ready(item)
            return
        if item.offers and not was_requested:
            self._report_offered(item)
        if message.is_pushed and not message.peers and not message.digest:
            item.want_sent_at = now
        self._want(item, now)

    def forget(self, mm_hash: str) -> None:
        """No request waits for the item any more."""
        item = self.items.get(mm_hash)
        if item is not None and item.requested:
            self._end(item, Code.CANCELLED)

    def keep_requested(self, names: Collection[str]) -> None:
        """Requests wait for these items and no others: the scheduler is in session, maybe again."""
        for item in list(self.items.values()):
            if item.mm_hash not in names:
                self.forget(item.mm_hash)

    def taken(self, mm_hash: str, now: float) -> None:
        """The engine has taken the item's tensors."""
        self.effects.append(NotifyScheduler(Taken(mm_hash)))
        item = self.items.get(mm_hash)
        if item is not None and item.is_complete:
            self._drop(item)

    def no_memory(self, mm_hash: str, text: str) -> None:
        """The host has no memory for an admitted item."""
        item = self.items.get(mm_hash)
        if item is not None and item.admitted:
            assert item.shape is not None
            text = f"the host has no memory for the item's {item.shape.nbytes} bytes: {text}"
            self._fail(item, Code.TOO_LARGE, text)

    def refused(self, endpoint: str, text: str) -> None:
        """An endpoint that a request named is not connected to."""
        for item in list(self.items.values()):
            if endpoint not in item.peers or item.shape is not None:
                continue
            item.refused |= {endpoint}
            if item.refused >= item.peers:
                self._fail(item, Code.UNREACHABLE, text)

    def weights_changed(self) -> None:
        """The weights have changed: drop everything encoded before."""
        for item in list(self.items.values()):
            if item.shape is not None:
                self._fail(item, Code.STALE, "the weights have changed")

    # From sessions

    def peer_up(self, peer: str, endpoints: frozenset[str], now: float) -> None:
        """A producer is in session, reachable at any of these endpoints."""
        known = self.peers.get(peer)
        self.peers[peer] = ProducerPeer(endpoints, known.row_bytes if known is not None else 0)
        for granted in self.window.unresolved():
            granted.sent_at = float("-inf")
        self._query_unresolved(now)
        for item in list(self.items.values()):
            item.want_sent_at = float("-inf")
            self._want(item, now, only=peer)

    def peer_lost(self, peer: str, now: float, *, quiesced: bool = False) -> None:
        """The session with a producer ended; unless `quiesced`, its writes may still arrive."""
        self.peers.pop(peer, None)
        self.window.end_all_of(peer, now, quiesced=quiesced)
        for ref in [each for each in self._offers if each[0] == peer]:
            self._drop_offer(ref, None, "", now)
        for ref in [each for each in self._ended if each[0] == peer]:
            del self._ended[ref]

    # Discovery: asking producers for items without a sender

    def _want(self, item: Item, now: float, only: str | None = None) -> None:
        """Ask producers for an item without a sender, at most every `repeat_s`."""
        is_due = now - item.want_sent_at > self.limits.repeat_s
        if not item.requested or not is_due or not item.lacks_sender:
            return
        patience = self._patience_s(item.patience_s)
        for peer, known in self.peers.items():
            may_have_it = not item.peers or item.peers & known.endpoints
            if may_have_it and only in (None, peer):
                first = self._first_grant(item, peer, now)
                self._send(peer, Want(item.mm_hash, patience, first))
        if only is None:
            item.want_sent_at = now

    def _patience_s(self, said_s: float) -> float:
        """Return the seconds to wait for an item. `said_s`: its requests' wish; 0 for none."""
        return said_s or self.limits.bootstrap_timeout_s

    def _first_grant(self, item: Item, peer: str, now: float) -> Grant | None:
        """A grant before the item's length is known, if the peer's row size is."""
        row_bytes = self.peers[peer].row_bytes
        if item.shape is not None or item.grants or not row_bytes:
            return None  # said once: a producer that has declined it might use it when told again
        active = self.admission.num_active + 1
        share = window_bytes(self.window.nbytes, active) // row_bytes
        rows = min(self.limits.default_allocate_tokens, share)
        if item.expected_rows:
            rows = min(rows, item.expected_rows)
        if len(self._recent_rows) >= FEWEST_RECENT:
            rows = min(rows, max(self._recent_rows))
        granted = self._new_grant(item, (peer, 0), 0, rows, row_bytes, now) if rows else None
        return granted.message if granted is not None else None

    def want_ack(self, peer: str, message: WantAck, now: float) -> None:
        """A peer does not have the item now, and (`gone`) will not."""
        granted = self.window.of((peer, 0), message.declined)
        if granted is not None:
            self.window.end(granted, now, quiesced=True)
        item = self.items.get(message.mm_hash)
        if item is None or item.shape is not None or not message.gone:
            return
        item.gone.add(peer)
        if self._is_gone_everywhere(item):
            text = "no encoder keeps it any more: send the request to an encoder again"
            self._fail(item, Code.GONE, text)

    def _is_gone_everywhere(self, item: Item) -> bool:
        """Return True if every producer in question has answered that it lacks the item."""
        gone = [known.endpoints for peer, known in self.peers.items() if peer in item.gone]
        if item.peers:
            return item.peers <= item.refused.union(*gone)
        return len(gone) == len(self.peers)

    # Offers: the first producer of an item sends it, the others stand by

    def offer(self, peer: str, message: Offer, now: float) -> None:
        """A producer has an item; ProtocolError if no item can have its shape."""
        shape = checked_shape(message.shape)
        ref = (peer, message.tid)
        if self._resend_answer(ref):
            return
        item = self.items.get(message.mm_hash)
        if item is not None and item.wanted_digest not in ("", message.digest):
            self._refuse_encoding(item, ref)
            return
        refusal = self._refusal(shape, item)
        if refusal is not None:
            self._refuse(ref, refusal[0])
            if item is not None and item.lacks_sender:
                self._fail(item, *refusal)
            return
        if peer in self.peers:
            self.peers[peer].row_bytes = shape.row_bytes
        self._recent_rows.append(shape.rows)
        if item is None:
            item = self.items[message.mm_hash] = Item(message.mm_hash, now)
        if item.is_complete:
            self.counts["deduplicated"] += 1
            self._finish(ref, Complete(message.tid))
            return
        self._replace_older(item, peer, now)
        if item.offers:
            self._add_standby(item, ref, message)
            return
        self._begin(item, ref, message, shape, now)

    def _resend_answer(self, ref: TransferRef) -> bool:
        """Repeat the answer to an offer, and its live grants; False if it was not answered."""
        if ref in self._ended:
            self._send(ref[0], self._ended[ref])
            return True
        item = self._offers.get(ref)
        if item is None:
            return False
        self._send(ref[0], OfferAck(ref[1]))
        for granted in item.grants.values():
            if granted.state is GrantState.GRANTED and granted.ref == ref:
                self._send(ref[0], granted.message)
        return True

    def _replace_older(self, item: Item, peer: str, now: float) -> None:
        """A producer has one transfer of an item; the end of the one before was lost."""
        for ref in [each for each in item.offers if each[0] == peer]:
            self._finish(ref, Cancel(ref[1]))
            self._drop_offer(ref, None, "", now)

    def _refusal(self, shape: ItemShape, item: Item | None) -> tuple[Code, str] | None:
        """Return the reason to refuse an offer for good; None if it can be accepted."""
        most = self.limits.max_item_bytes
        if shape.nbytes > most:
            return Code.TOO_LARGE, (
                f"{shape.rows} rows of {shape.row_bytes} bytes are {shape.nbytes} bytes; the "
                f"consumer's max_item_bytes is {most}"
            )
        if shape.row_bytes > self.window.nbytes:
            return Code.ROW_TOO_LARGE, (
                f"a row has {shape.row_bytes} bytes; the consumer's arena_bytes is "
                f"{self.window.nbytes}, and a row is not cut"
            )
        if item is not None and item.expected_rows not in (0, shape.rows):
            return Code.CONFLICT, (
                f"{shape.rows} rows are offered and the request has room for {item.expected_rows}: "
                "the two engines process this item in different ways"
            )
        if item is None and len(self.items) >= MAX_ITEMS:
            return Code.TOO_LARGE, f"the consumer knows {MAX_ITEMS} items, its limit"
        return None

    def _begin(
        self, item: Item, ref: TransferRef, message: Offer, shape: ItemShape, now: float
    ) -> None:
        """Accept the first offer of an item, or the first after its sender was lost."""
        same = item.shape == shape and item.digest == message.digest
        if not same:
            self._release_rows(item)
        elif len(item.received):
            self.counts["resumed_rows"] += len(item.received)
        item.shape, item.digest = shape, message.digest
        item.since = item.idle_since = now
        self._add_offer(item, ref, message)
        self._report_offered(item)
        if item.admitted:
            self.admission.activate(item)
        else:
            self.admission.wait(item)
            self._admit(now)
        self._send(ref[0], OfferAck(ref[1]))
        self._adopt_early_grants(item, message, now)

    def _adopt_early_grants(self, item: Item, message: Offer, now: float) -> None:
        """Use or revoke the rows that were granted before the item's length was known."""
        assert item.shape is not None
        for granted in list(item.grants.values()):
            peer, tid = granted.ref
            if tid:
                continue
            if peer != item.sender[0]:
                self._revoke(granted, 0)  # another producer sends these rows
                continue
            most = min(granted.rows, item.shape.rows)  # as the producer understands it
            runs, rows = runs_of(0, most, granted.extents, item.shape.row_bytes)
            if not item.admitted or not rows or len(item.received):
                # A queued item must not hold a part of the window.
                self._revoke(granted, message.tid)
                continue
            granted.ref, granted.runs, granted.rows = item.sender, runs, rows
            if message.first != granted.gid:
                granted.sent_at = now
                self._send(peer, granted.message)

    def _add_standby(self, item: Item, ref: TransferRef, message: Offer) -> None:
        """Keep another producer's offer in reserve."""
        if item.shape != message.shape:
            self._refuse(ref, Code.CONFLICT)
            return
        self.counts["deduplicated"] += 1
        self._add_offer(item, ref, message)
        self._send(ref[0], OfferAck(ref[1]))

    def _add_offer(self, item: Item, ref: TransferRef, message: Offer) -> None:
        item.offers[ref] = message
        self._offers[ref] = item

    def _admit(self, now: float) -> None:
        for item in self.admission.admit(now):
            assert item.shape is not None
            self.effects.append(Allocate(item.mm_hash, item.shape))

    def _refuse_other_encodings(self, item: Item, digest: str) -> None:
        """Refuse producers that stand by with another encoding."""
        for ref in [each for each in list(item.offers)[1:] if item.offers[each].digest != digest]:
            del item.offers[ref], self._offers[ref]
            self._refuse(ref, Code.CONFLICT)

    def _refuse_encoding(self, item: Item, ref: TransferRef) -> None:
        """Refuse an offer of another encoding than the engine's other ranks have."""
        self._refuse(ref, Code.CONFLICT)
        item.gone.add(ref[0])
        if item.lacks_sender and self._is_gone_everywhere(item):
            text = "no connected encoder has the encoding that the other ranks have"
            self._fail(item, Code.GONE, text)

    def _refuse(self, ref: TransferRef, code: Code) -> None:
        self.counts["refused"] += 1
        self._finish(ref, OfferAck(ref[1], code))

    # Offers that end

    def _finish(self, ref: TransferRef, final_message: Message) -> None:
        """Send the final message of an offer, which answers whatever its producer asks later."""
        self._ended[ref] = final_message
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self._send(ref[0], final_message)

    def withdraw(self, peer: str, message: Withdraw, now: float) -> None:
        """The producer gave an item up; nothing of it is in flight."""
        self.window.end_all((peer, message.tid), now)
        self._drop_offer((peer, message.tid), message.code, message.text, now)

    def cancel_ack(self, peer: str, message: CancelAck, now: float) -> None:
        """End the writes of a transfer."""
        self.window.end_all((peer, message.tid), now)

    def unknown(self, peer: str, message: Unknown, now: float) -> None:
        """The producer does not know the transfer, so it writes nothing of it."""
        self.window.end_all((peer, message.tid), now)
        self._drop_offer((peer, message.tid), None, "", now)

    def _abandon_sender(self, item: Item, code: Code, text: str, now: float) -> None:
        """Cancel the sender's transfer; another producer continues, or none."""
        ref = item.sender
        self._finish(ref, Cancel(ref[1], code))
        item.failures = item.corrupt = 0
        self._drop_offer(ref, code, text, now)

    def _drop_offer(self, ref: TransferRef, code: Code | None, text: str, now: float) -> None:
        """Remove an offer, if there is one. `code`: why its producer does not have the item; None:
        it is lost.
        """
        item = self._offers.pop(ref, None)
        if item is None:
            return
        was_sender = item.sender == ref
        del item.offers[ref]
        if not was_sender:
            return
        for granted in list(item.grants.values()):
            if granted.ref == ref and granted.state is not GrantState.DRAINING:
                self._remove_grant(item, granted)
        if item.offers:
            self._fail_over(item)
            return
        self.admission.remove(item)
        if code is not None:
            self._fail(item, code, text)
            return
        item.since = now
        item.want_sent_at = float("-inf")
        self._want(item, now)

    def _fail_over(self, item: Item) -> None:
        """The next producer continues at the first missing row if it has the same bytes, else from
        the start.
        """
        digest = item.offers[item.sender].digest
        if digest != item.digest:
            self.admission.remove(item)
            self._release_rows(item)  # what is still drained goes to its old memory
            item.digest = digest
            self._report_offered(item)
            self.admission.wait(item)
        self.counts["resumed_rows"] += len(item.received)

    # Grants: written, drained and over; or failed, expired or revoked, and granted again

    def _issue_grants(self, now: float) -> None:
        """Grant missing rows, requests' items first, as far as the window has room."""
        if self.window.has_room:
            for item in self.admission.grantable():
                if not self._grant_missing(item, now):
                    break

    def _grant_missing(self, item: Item, now: float) -> bool:
        """Grant the rows an item lacks; False if the window is full."""
        assert item.shape is not None
        while now >= item.retry_at:
            gap = None
            if len(item.grants) < WINDOWS_IN_FLIGHT:
                gap = next(item.covered().gaps(item.shape.rows), None)
            if gap is None:
                self.admission.mark_fully_granted(item)
                return True
            if not self._grant(item, *gap, now):
                return False
        return True

    def _grant(self, item: Item, row: int, end: int, now: float) -> bool:
        """Grant rows of [row, end); False if the window is full."""
        assert item.shape is not None
        row_bytes = item.shape.row_bytes
        active = self.admission.num_active
        share = window_bytes(self.window.nbytes, active) // row_bytes
        rows = min(end - row, self.limits.default_allocate_tokens, max(1, share))
        granted = self._new_grant(item, item.sender, row, rows, row_bytes, now)
        if granted is None:
            return False
        if len(item.grants) == 1:
            self.counts["window_wait_s"] += now - item.idle_since
        self._send(item.sender[0], granted.message)
        return True

    def _new_grant(
        self, item: Item, ref: TransferRef, row: int, rows: int, row_bytes: int, now: float
    ) -> GrantRecord | None:
        """Grant at most `rows` rows of this size; None if the window is full."""
        extents = self.window.take(rows, row_bytes)
        if not extents:
            return None
        runs, rows = runs_of(row, rows, extents, row_bytes)
        granted = GrantRecord(item.mm_hash, ref, row, rows, extents, runs, now, now)
        self.window.add(granted)
        item.grants[granted.gid] = granted
        return granted

    def _revoke(self, granted: GrantRecord, tid: int) -> None:
        """Revoke a grant; `tid` is the transfer that knows of it."""
        granted.ref = (granted.ref[0], tid)
        granted.state = GrantState.REVOKED
        item = self.items.get(granted.mm_hash)
        if item is not None:
            self._remove_grant(item, granted)
        self._send(granted.ref[0], Revoke(tid, granted.gid))

    def _grant_ended(self, granted: GrantRecord, now: float) -> None:
        item = self.items.get(granted.mm_hash)
        if item is not None and granted.gid in item.grants:
            item.idle_since = now
            self._remove_grant(item, granted)
        if granted.quarantined_until is not None:
            self.counts["quarantined_bytes"] += granted.nbytes

    def _remove_grant(self, item: Item, granted: GrantRecord) -> None:
        """A grant brings an item nothing any more."""
        item.grants.pop(granted.gid, None)
        self.admission.mark_grantable(item)

    def wrote(self, peer: str, message: Wrote, now: float) -> None:
        """A producer has written a grant's rows."""
        ref = (peer, message.tid)
        granted = self.window.of(ref, message.gid)
        if granted is None:
            self.window.resolve(ref, message.gid)
            self._on_late_write(ref)
            return
        if granted.state is GrantState.DRAINING:
            return
        item = self.items.get(granted.mm_hash)
        if item is None or granted.gid not in item.grants or not item.admitted:
            self.window.end(granted, now, quiesced=True)
            self._on_late_write(ref)
            return
        assert item.shape is not None
        runs, rows = granted.runs, granted.rows
        if message.rows != rows:
            runs, rows = runs_of(granted.row, message.rows, granted.extents, item.shape.row_bytes)
        fits = message.row == granted.row and rows == message.rows <= granted.rows
        if not rows or not fits or len(runs) != len(message.digests):
            self.window.end(granted, now, quiesced=False)
            self._on_corrupt_rows(item, granted, now)
            return
        if message.rows < granted.rows:
            self.admission.mark_grantable(item)
        granted.rows, granted.runs = message.rows, runs
        granted.state = GrantState.DRAINING
        self.effects.append(DrainRows(granted.gid, item.mm_hash, runs, message.digests))

    def _on_late_write(self, ref: TransferRef) -> None:
        """A grant that has ended was written: its rows were received before, or are not used."""
        if ref in self._offers:
            self.counts["late_writes"] += 1
        elif ref in self._ended:
            self._send(ref[0], self._ended[ref])

    def drained(self, gid: int, same: bool, now: float) -> None:
        """A grant's rows were copied out; `same` if their digests match."""
        granted = self.window[gid]
        item = self.items.get(granted.mm_hash)
        # Else they are not of its present encoding, or went to memory that it had before.
        is_current = item is not None and gid in item.grants
        self.window.end(granted, now, quiesced=same)
        if item is not None and is_current:
            if same:
                self._add_rows(item, granted, now)
            else:
                self._on_corrupt_rows(item, granted, now)

    def _add_rows(self, item: Item, granted: GrantRecord, now: float) -> None:
        assert item.shape is not None
        item.received = item.received.with_rows(granted.row, granted.row + granted.rows)
        item.since, item.failures = now, 0
        self.counts["rounds"] += 1
        self.counts["rows"] += granted.rows
        self.counts["bytes"] += granted.rows * item.shape.row_bytes
        if item.is_complete:
            self._complete_item(item)

    def _complete_item(self, item: Item) -> None:
        self.admission.deactivate(item)
        assert not item.grants, "rows are granted to one only"
        self._close_offers(item, Complete)
        self.counts["items"] += 1
        self.effects.append(Ready(item.mm_hash))
        if item.requested:
            self._report_ready(item)

    def _on_corrupt_rows(self, item: Item, granted: GrantRecord, now: float) -> None:
        """The digests of a grant's rows do not match."""
        self.counts["corrupt_rows"] += granted.rows
        if granted.ref in item.offers:
            item.corrupt += 1
        if item.corrupt > MAX_CORRUPT:
            text = f"rows of {item.corrupt} grants arrived damaged, more than {MAX_CORRUPT}"
            self._abandon_sender(item, Code.CORRUPT, text, now)

    def write_failed(self, peer: str, message: WriteFailed, now: float) -> None:
        """A producer could not write a grant's rows."""
        ref = (peer, message.tid)
        granted = self.window.of(ref, message.gid)
        if granted is None:
            if message.quiesced:
                self.window.resolve(ref, message.gid)
            else:
                self.window.drop_unresolved(ref, message.gid)
            return
        if granted.state is GrantState.DRAINING:
            return
        self.counts["failed_writes"] += 1
        self.window.end(granted, now, quiesced=message.quiesced)
        item = self.items.get(granted.mm_hash)
        if item is not None and granted.ref in item.offers:
            item.failures += 1
            pause = self.limits.backoff_s * 2 ** min(item.failures, 8)
            item.retry_at = now + min(pause, MAX_BACKOFF_S)
            if item.failures > self.limits.max_failures:
                self._abandon_sender(item, Code.WRITE, message.text, now)

    def revoke_ack(self, peer: str, message: RevokeAck, now: float) -> None:
        """Note the producer's progress with a revoked grant."""
        granted = self.window.of((peer, message.tid), message.gid)
        if granted is None and message.progress is not WriteProgress.IN_FLIGHT:
            self.window.resolve((peer, message.tid), message.gid)
            return
        is_over = message.progress is WriteProgress.NOT_STARTED or (
            # Of a grant made before there was a transfer nothing else is reported.
            message.progress is WriteProgress.WROTE and not message.tid
        )
        if granted is None or not is_over:
            return  # its end will be reported
        if granted.state is not GrantState.DRAINING:
            self.window.end(granted, now, quiesced=True)

    def _query_unresolved(self, now: float) -> None:
        """Ask producers that are back whether they still write to quarantined memory."""
        for granted in self.window.unresolved():
            peer, tid = granted.ref
            if peer in self.peers and now - granted.sent_at > self.limits.repeat_s:
                granted.sent_at = now
                self._send(peer, Revoke(tid, granted.gid))

    # Ends

    def _fail(self, item: Item, code: Code, text: str) -> None:
        """End an item that cannot be received, and tell the own scheduler."""
        self._end(item, code)
        self.effects.append(NotifyScheduler(ItemNews(item.mm_hash, code=code, text=text)))

    def _end(self, item: Item, code: Code) -> None:
        """End an item without handing it over: tell its producers."""
        self.counts[f"ended_{code.value}"] += 1
        self._close_offers(item, lambda tid: Cancel(tid, code))
        for granted in list(item.grants.values()):
            if granted.state is GrantState.GRANTED:
                self._revoke(granted, granted.ref[1])
        self._drop(item)

    def _close_offers(self, item: Item, final_message: Callable[[int], Message]) -> None:
        """An item has ended: tell all that offer it."""
        for ref in item.offers:
            del self._offers[ref]
            self._finish(ref, final_message(ref[1]))
        item.offers.clear()

    def _drop(self, item: Item) -> None:
        self._release_rows(item)
        self.admission.forget(item)
        del self.items[item.mm_hash]

    def _release_rows(self, item: Item) -> None:
        """Give up an item's memory, and the grants whose rows go there; early ones have none."""
        item.received = Intervals()
        for granted in [each for each in item.grants.values() if each.ref[1]]:
            self._remove_grant(item, granted)
        if item.admitted:
            self.admission.release_memory(item)
            self.effects.append(Discard(item.mm_hash))

    # Messages

    def _send(self, peer: str, body: Message) -> None:
        self.effects.append(Send(peer, body))

    def _report_ready(self, item: Item) -> None:
        """Tell the own scheduler that an item can be loaded."""
        self.effects.append(NotifyScheduler(ItemNews(item.mm_hash, item.digest)))

    def _report_offered(self, item: Item) -> None:
        """Report to the own scheduler an item that is on its way: it may be requested, and other
        ranks may be offered another encoding.
        """
        if not item.requested:
            self.effects.append(NotifyScheduler(ItemNews(item.mm_hash, offered=True)))
        elif self.limits.num_ranks > 1:
            news = ItemNews(item.mm_hash, item.digest, offered=True)
            self.effects.append(NotifyScheduler(news))

    # Time

    def tick(self, now: float) -> None:
        """Repeat messages, expire grants and items; called several times a second."""
        self.window.tick(now)
        self._query_unresolved(now)
        for granted in self.window:
            self._check_grant(granted, now)
        for item in list(self.items.values()):
            self._check_timeouts(item, now)

    def _check_grant(self, granted: GrantRecord, now: float) -> None:
        """Expire a grant, or repeat its message."""
        if granted.state is GrantState.DRAINING:
            return
        if now - granted.at > GRANT_TTL_S:
            self.counts["expired_grants"] += 1
            self.window.end_unresolved(granted, now)
        elif now - granted.sent_at > self.limits.repeat_s:
            granted.sent_at = now
            peer, tid = granted.ref
            if granted.state is GrantState.REVOKED:
                self._send(peer, Revoke(tid, granted.gid))
            elif tid:
                self._send(peer, granted.message)

    def _check_timeouts(self, item: Item, now: float) -> None:
        limits, waited = self.limits, now - item.since
        if item.is_complete or self.admission.waits_for_a_request(item):
            if not item.requested and waited > limits.waiting_timeout_s:
                self.counts["never_asked_for"] += 1
                self._fail(item, Code.TIMEOUT, "no request came")
        elif item.shape is None:
            if waited > self._patience_s(item.patience_s):
                text = f"no encoder offered it within {waited:.1f} s (bootstrap_timeout_s)"
                self._fail(item, Code.TIMEOUT, text)
            else:
                self._want(item, now)
        elif waited > limits.waiting_timeout_s and (item.requested or item.lacks_sender):
            text = f"{len(item.received)} rows were received, then none for {waited:.1f} s "
            self._fail(item, Code.TIMEOUT, text + "(waiting_timeout_s)")
        elif item.lacks_sender:
            self._want(item, now)

    # For metrics and tests

    def gauges(self) -> dict[str, float]:
        return {
            "items": len(self.items),
            **self.admission.gauges(),
            **self.window.gauges(),
        }

    def describe(self, mm_hash: str) -> str:
        """Describe an item in a line, for tests and logs."""
        item = self.items.get(mm_hash)
        if item is None:
            return f"{mm_hash}: not known"
        rows = item.shape.rows if item.shape is not None else "?"
        return (
            f"{mm_hash}: {item.state.value}, {len(item.received)} of {rows} rows, "
            f"{len(item.grants)} grants, {len(item.offers)} offers"
        )
