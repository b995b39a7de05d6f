"""A producer: what each message, report and tick changes (pure; owned by the control thread).

A transfer brings an encoded item to one rank of a consumer in session: offered when it begins,
written as rows are granted, over when the consumer has every row. The own scheduler (`push`) or a
consumer (`want`) names who gets an item. Effects wait for `take_effects`.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import pairwise

from vllm_kvpool.embeds.machines.effects import Connect, Effect, Prepare, Release, Turn, Write
from vllm_kvpool.embeds.machines.encoded_items import EncodedItem, EncodedItemCache, PendingTargets
from vllm_kvpool.embeds.protocol.messages import (
    MAX_ENDED,
    MAX_EXTENTS,
    Cancel,
    CancelAck,
    Code,
    Complete,
    Grant,
    Message,
    Offer,
    OfferAck,
    Push,
    Revoke,
    RevokeAck,
    Unknown,
    Want,
    WantAck,
    Window,
    Withdraw,
    WriteFailed,
    WriteProgress,
    Wrote,
)
from vllm_kvpool.embeds.protocol.rows import ItemShape, runs_of

MAX_PENDING = 1 << 16  # wants, and pushes, that are kept for items that are not encoded yet
MAX_WRITES = 256  # of a producer, under way at a time
START_SHARE = 0.5  # of a grant's ttl_s: its write must begin within this part
MIN_PATIENCE_S = 1.0  # a consumer of less only asks whether the item is here
MAX_PATIENCE_S = 86_400.0
MAX_RESULTS = 64  # grants of a transfer whose result is kept, to be sent again


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerLimits:
    """Bounds of a producer; seconds and bytes."""

    retain_bytes: int = 4 << 30
    """Items kept: beyond it encoding waits for consumers, and taken items are dropped."""
    waiting_timeout_s: float = 60.0
    """Seconds that an untaken item is kept, and a push of an item that is not encoded yet."""
    writers: int = 4
    small_bytes: int = 8 << 20
    """More than `writers` writes run at a time while all of them have fewer bytes than this."""
    max_writes: int = MAX_WRITES
    repeat_s: float = 1.0
    max_results: int = MAX_RESULTS


@dataclass(slots=True)
class ItemTransfer:
    """An encoded item on its way to one rank of a consumer; suspended while that is lost."""

    tid: int
    item: EncodedItem
    peer: str  # the consumer's incarnation
    since: float  # its last message
    is_ended: bool = False  # and stays until its writes have ended
    results: OrderedDict[int, Message | None] = field(default_factory=OrderedDict)
    """The answer to each grant; None while its write is due or under way."""
    due: deque[tuple[Grant, float]] = field(default_factory=deque)  # and when it expires
    writing: dict[int, int] = field(default_factory=dict)  # grant -> bytes
    offered_at: float = float("-inf")  # when the offer was last sent
    first: int = 0  # the grant that came with the want
    final_message: Message | None = None  # sent when no write is under way

    @property
    def is_idle(self) -> bool:
        """True if every granted row is written."""
        return not (self.due or self.writing)


@dataclass(slots=True)
class ConsumerPeer:
    """A consumer's rank in session with this producer."""

    window: Window | None
    ranks: tuple[str, ...]
    """Endpoints of all ranks of its engine."""


class Producer:
    """An engine's producer. What needs the time takes it as `now`; `take_effects` ends a turn."""

    def __init__(self, limits: ProducerLimits) -> None:
        self.limits = limits
        self.cache = EncodedItemCache(limits.retain_bytes, self._release)
        self.transfers: dict[int, ItemTransfer] = {}
        self.peers: dict[str, ConsumerPeer] = {}
        # Peers, and of each its transfers, with due writes, in turn.
        self._due: OrderedDict[str, OrderedDict[int, None]] = OrderedDict()
        self.num_writes = 0  # under way
        self._turn = Turn()
        self.counts = self._turn.counts
        self._writing_bytes = 0  # of the writes under way
        self._by_target: dict[tuple[str, str], ItemTransfer] = {}  # by item and peer; not ended
        self._ended: OrderedDict[tuple[str, int], Message | None] = OrderedDict()
        # By peer and grant: writes that failed and may still arrive.
        self._unresolved: OrderedDict[tuple[str, int], WriteFailed] = OrderedDict()
        self._at: dict[str, str] = {}  # endpoint -> peer
        self._wants = PendingTargets(MAX_PENDING)  # to peers that asked
        self._pushes = PendingTargets(MAX_PENDING)  # to endpoints that requests name
        self._next_tid = 1

    def take_effects(self, now: float) -> list[Effect]:
        """Start writes, once a turn, and return the effects since the last call, in order."""
        self._start_writes(now)
        return self._turn.take()

    # From the own worker and scheduler

    def produced(self, mm_hash: str, shape: ItemShape, now: float) -> int:
        """Keep an encoded item, and return its id, or 0 if it is here already."""
        if mm_hash in self.cache.items:
            self.cache.renew(mm_hash, now)
            return 0
        item = self.cache.add(mm_hash, shape, now)
        self._turn.effects.append(Prepare(item.item_id))
        return item.item_id

    def keeps(self, mm_hash: str) -> bool:
        """Return True if an encoded item is here. Called by any thread."""
        return mm_hash in self.cache.items

    def reused(self, mm_hash: str, now: float) -> None:
        """Keep an item as long as a new item."""
        self.cache.renew(mm_hash, now)

    def prepared(self, item_id: int, digest: str, now: float) -> None:
        """Offer an item that is in host memory.

        An empty digest says that it could not be brought there.
        """
        item = self.cache.unreleased[item_id]
        item.is_prepared = True
        if not self.cache.holds(item):
            self.cache.release_if_unused(item)
            return
        if not digest:
            self._withdraw(item, now, Code.GONE, "the encoder's output could not be read")
            return
        item.digest, item.since = digest, now
        for endpoint in self._pushes.take(item.mm_hash):
            self._push_to(item, endpoint, now)
        for peer in self._wants.take(item.mm_hash):
            self._offer(self._transfer_to(item, peer, now), now)
        self.cache.make_room()

    def push(self, message: Push, now: float) -> None:
        """Send an item that is here, or about to be encoded, to these consumers."""
        for endpoint in message.endpoints:
            self._turn.effects.append(Connect(endpoint))
            item = self.cache.items.get(message.mm_hash)
            if item is not None and item.digest:
                self._push_to(item, endpoint, now)
            else:
                expires_at = now + self.limits.waiting_timeout_s
                self._pushes.add(message.mm_hash, endpoint, expires_at)

    def refused(self, endpoint: str) -> None:
        """Give up an endpoint that a request or a peer named and that is not connected to."""
        self._pushes.drop(endpoint)
        for item in self.cache.items.values():
            if item.endpoints.pop(endpoint, None) is not None:
                self.cache.update_held_bytes(item)

    def missing(self) -> set[str]:
        """Return the items that consumers wait for and that are not here.

        The engine's cache may have them.
        """
        waited_for = self._wants.items | self._pushes.items
        return {mm_hash for mm_hash in waited_for if mm_hash not in self.cache.items}

    def weights_changed(self, now: float) -> None:
        """Send nothing any more that was encoded with the weights before."""
        for item in list(self.cache.items.values()):
            self._withdraw(item, now, Code.STALE, "the weights have changed")
        self.cache.dropped.clear()

    # From sessions

    def peer_up(
        self,
        peer: str,
        window: Window | None,
        reached_at: frozenset[str],
        ranks: tuple[str, ...],
        now: float,
    ) -> None:
        """Transfer waiting items to a consumer's rank that is in session, at these endpoints.

        `ranks` are those of its engine.
        """
        was_lost = peer not in self.peers
        # Its window stays: the grants that are due lie in it.
        self.peers.setdefault(peer, ConsumerPeer(window, ranks)).ranks = ranks
        self._forget_endpoints(peer)
        self._at |= dict.fromkeys(reached_at, peer)
        for transfer in self.transfers.values() if was_lost else ():
            if transfer.peer == peer and not transfer.is_ended:
                self._offer(transfer, now)
        for item in list(self.cache.items.values()):
            for endpoint in item.endpoints.keys() & reached_at:
                self._push_to(item, endpoint, now)

    def peer_lost(self, peer: str, now: float) -> None:
        """Suspend the transfers to a consumer's rank; it, or another incarnation, may come back."""
        if self.peers.pop(peer, None) is None:
            return
        self._due.pop(peer, None)
        self._forget_endpoints(peer)
        for transfer in [each for each in self.transfers.values() if each.peer == peer]:
            transfer.due.clear()
            transfer.results = OrderedDict(
                (gid, result) for gid, result in transfer.results.items() if gid in transfer.writing
            )
            transfer.since = now
        self._wants.drop(peer)

    def _forget_endpoints(self, peer: str) -> None:
        self._at = {endpoint: each for endpoint, each in self._at.items() if each != peer}

    # From consumers

    def want(self, peer: str, message: Want, now: float) -> None:
        """Answer a consumer's rank that asks for an item; any other peer gets no answer."""
        if peer not in self.peers:
            return  # nothing would end what it asks for
        item = self.cache.items.get(message.mm_hash)
        first = message.first
        if item is not None and item.digest:
            transfer = self._transfer_to(item, peer, now)
            if first is not None and self.is_valid_grant(transfer, first):
                transfer.first = first.gid
                self._accept_grant(transfer, first, now)
            self._offer(transfer, now)
            return
        is_coming = item is not None or message.mm_hash in self._pushes.items
        asks_only = message.patience_s < MIN_PATIENCE_S
        gone = not is_coming and (asks_only or message.mm_hash in self.cache.dropped)
        if not gone:
            self._wants.add(message.mm_hash, peer, now + min(message.patience_s, MAX_PATIENCE_S))
        self._turn.send(peer, WantAck(message.mm_hash, gone, first.gid if first else 0))

    def offer_ack(self, peer: str, message: OfferAck, now: float) -> None:
        """Take the consumer's answer to an offer."""
        transfer = self._of(peer, message.tid)
        if transfer is None:
            return
        transfer.since = now
        if message.refused is not None:
            self.counts[f"refused_{message.refused.value}"] += 1
            self._end(transfer, now)

    def complete(self, peer: str, message: Complete, now: float) -> None:
        """End a transfer of which the consumer has every row."""
        transfer = self._of(peer, message.tid)
        if transfer is not None:
            self.counts["items"] += 1
            transfer.item.taken = True
            self._end(transfer, now)

    def cancel(self, peer: str, message: Cancel, now: float) -> None:
        """End a transfer that the consumer does not want any more."""
        transfer = self._of_or_answer(peer, message.tid)
        if transfer is None:
            return
        transfer.final_message = CancelAck(message.tid)
        self.counts[f"cancelled_{message.code.value}"] += 1
        self._end(transfer, now)

    def grant(self, peer: str, message: Grant, now: float) -> None:
        """Write the rows that a consumer grants."""
        transfer = self._of_or_answer(peer, message.tid)
        if transfer is None:
            return
        transfer.since = now
        if message.gid in transfer.results:
            result = transfer.results[message.gid]
            if result is not None:
                self._turn.send(peer, result)
            return
        if not self.is_valid_grant(transfer, message):
            self.counts["bad_grants"] += 1
            failed = WriteFailed(message.tid, message.gid, True, "the grant does not fit the item")
            self._record_result(transfer, message.gid, failed)
            self._turn.send(peer, failed)
            return
        self._accept_grant(transfer, message, now)

    def revoke(self, peer: str, message: Revoke, now: float) -> None:
        """Give up a grant that a consumer revokes."""
        unresolved = self._unresolved.get((peer, message.gid))
        if unresolved is not None:
            self._turn.send(peer, unresolved)
            return
        tid = message.tid or self._tid_of_first(peer, message.gid)
        if not tid:
            self._turn.send(peer, RevokeAck(0, message.gid, WriteProgress.NOT_STARTED))
            return
        transfer = self._of_or_answer(peer, tid)
        if transfer is None:
            return
        if message.gid in transfer.writing:
            self._turn.send(peer, RevokeAck(message.tid, message.gid, WriteProgress.IN_FLIGHT))
            return
        result = transfer.results.get(message.gid)
        if isinstance(result, Wrote):
            self._turn.send(peer, RevokeAck(message.tid, message.gid, WriteProgress.WROTE))
            self._turn.send(peer, result)
            return
        # A grant that has not arrived yet is refused when it does.
        transfer.due = deque(each for each in transfer.due if each[0].gid != message.gid)
        self._decline(transfer, message.tid, message.gid)

    def _tid_of_first(self, peer: str, gid: int) -> int:
        """Return the transfer that uses a grant which came with a want; 0 if none does."""
        key = (peer, gid)
        transfers = self.transfers.values()
        found = (each.tid for each in transfers if (each.peer, each.first) == key)
        return next(found, 0)

    def _of(self, peer: str, tid: int) -> ItemTransfer | None:
        """Return a transfer that this consumer knows, if it is in session as one."""
        transfer = self.transfers.get(tid) if peer in self.peers else None
        if transfer is None or transfer.peer != peer or transfer.is_ended:
            return None
        return transfer

    def _of_or_answer(self, peer: str, tid: int) -> ItemTransfer | None:
        """Return the peer's transfer; if it has none, tell the peer how the transfer ended."""
        transfer = self._of(peer, tid)
        # One that ends with its write is answered then.
        if transfer is None and (tid not in self.transfers or self.transfers[tid].peer != peer):
            self._turn.send(peer, self._ended.get((peer, tid)) or Unknown(tid))
        return transfer

    # Grants: due, then written, then their results are kept to be sent again

    def is_valid_grant(self, transfer: ItemTransfer, message: Grant) -> bool:
        """Return True if a grant is of rows of the item, in disjoint extents of the window."""
        known = self.peers.get(transfer.peer)
        if known is None or known.window is None or message.gid in transfer.results:
            return False
        if len(transfer.due) >= self.limits.max_results:
            return False  # a consumer grants a few at a time
        if not 0 < len(message.extents) <= MAX_EXTENTS:
            return False
        inside = all(
            0 <= extent.offset < extent.end <= known.window.nbytes for extent in message.extents
        )
        ends = sorted(message.extents)
        apart = all(low.end <= high.offset for low, high in pairwise(ends))
        shape = transfer.item.shape
        _, rows = runs_of(message.row, message.rows, message.extents, shape.row_bytes)
        return inside and apart and 0 <= message.row < shape.rows and rows > 0

    def _accept_grant(self, transfer: ItemTransfer, message: Grant, now: float) -> None:
        """Queue a grant's write."""
        self._record_result(transfer, message.gid, None)
        transfer.due.append((message, now + message.ttl_s * START_SHARE))
        self._due.setdefault(transfer.peer, OrderedDict())[transfer.tid] = None

    def _record_result(self, transfer: ItemTransfer, gid: int, result: Message | None) -> None:
        """Keep the answer to a grant, at most `max_results` of a transfer."""
        transfer.results[gid] = result
        while len(transfer.results) > self.limits.max_results:
            oldest = next((gid for gid, each in transfer.results.items() if each is not None), None)
            if oldest is None:
                return
            del transfer.results[oldest]

    def _start_writes(self, now: float) -> None:
        """Start due writes: consumers in turn, of each its transfers in turn."""
        while self._due and self._may_write:
            peer, due = self._due.popitem(last=False)
            tid, _ = due.popitem(last=False)
            transfer = self.transfers.get(tid)
            if transfer is not None and transfer.due:
                message, expires_at = transfer.due.popleft()
                if transfer.due:
                    due[tid] = None
                if now > expires_at:
                    # Its memory may be reused before the write ends.
                    self.counts["late_grants"] += 1
                    self._decline(transfer, message.tid or tid, message.gid)
                else:
                    self._write(transfer, message, self.peers[peer])
            if due:
                self._due[peer] = due

    @property
    def _may_write(self) -> bool:
        limits = self.limits
        is_small = self._writing_bytes < limits.small_bytes and self.num_writes < limits.max_writes
        return is_small or self.num_writes < limits.writers

    def _decline(self, transfer: ItemTransfer, tid: int, gid: int) -> None:
        """Say that a grant is not used; `tid` is the transfer that the consumer knows it by."""
        ack = RevokeAck(tid, gid, WriteProgress.NOT_STARTED)
        self._record_result(transfer, gid, ack)
        self._turn.send(transfer.peer, ack)

    def _write(self, transfer: ItemTransfer, message: Grant, known: ConsumerPeer) -> None:
        item = transfer.item
        most = min(message.rows, item.shape.rows - message.row)
        runs, rows = runs_of(message.row, most, message.extents, item.shape.row_bytes)
        assert known.window is not None
        nbytes = rows * item.shape.row_bytes
        self.num_writes += 1
        self._writing_bytes += nbytes
        transfer.writing[message.gid] = nbytes
        self._turn.effects.append(
            Write(transfer.tid, message.gid, item.item_id, known.window, runs)
        )

    def written(self, result: Wrote | WriteFailed, now: float) -> None:
        """Take the end of a write, and report it to the consumer."""
        transfer, gid = self.transfers[result.tid], result.gid
        self.num_writes -= 1
        self._writing_bytes -= transfer.writing.pop(gid)
        if gid in transfer.results:
            transfer.results[gid] = result
        is_unresolved = False
        if isinstance(result, Wrote):
            self.counts["written_rows"] += result.rows
            self.counts["written_bytes"] += result.rows * transfer.item.shape.row_bytes
        else:
            self.counts["failed_writes"] += 1
            is_unresolved = not result.quiesced
            if is_unresolved:
                self._unresolved[(transfer.peer, gid)] = result
                while len(self._unresolved) > MAX_ENDED:
                    self._unresolved.popitem(last=False)
        if transfer.peer in self.peers and (is_unresolved or not transfer.is_ended):
            # Before the final message, after which nothing is in flight.
            self._turn.send(transfer.peer, result)
        if transfer.is_ended:
            self._finalize(transfer, now)

    # Starting transfers

    def _transfer_to(self, item: EncodedItem, peer: str, now: float) -> ItemTransfer:
        """Return the transfer of an item to a peer in session: the existing one, or a new one."""
        target = (item.mm_hash, peer)
        transfer = self._by_target.get(target)
        if transfer is None:
            transfer = self._by_target[target] = ItemTransfer(self._next_tid, item, peer, now)
            self._next_tid += 1
            self.transfers[transfer.tid] = transfer
            self.cache.begin(item, transfer.tid)
        return transfer

    def _push_to(self, item: EncodedItem, endpoint: str, now: float) -> None:
        """Transfer an item to each rank of the engine at this endpoint.

        Ranks without a session get the item when theirs begins.
        """
        item.endpoints.pop(endpoint, None)
        peer = self._at.get(endpoint)
        ranks = self.peers[peer].ranks if peer is not None else ()
        for rank in ranks or (endpoint,):
            if rank != endpoint:
                self._turn.effects.append(Connect(rank))
            if rank in self._at:
                item.endpoints.pop(rank, None)
                self._offer(self._transfer_to(item, self._at[rank], now), now)
            else:
                item.endpoints[rank] = now + self.limits.waiting_timeout_s
        self.cache.update_held_bytes(item)

    def _offer(self, transfer: ItemTransfer, now: float) -> None:
        """Offer the item, maybe again, to a peer in session."""
        item = transfer.item
        transfer.offered_at = now
        offer = Offer(transfer.tid, item.mm_hash, item.shape, item.digest, transfer.first)
        self._turn.send(transfer.peer, offer)

    # Ends

    def _end(self, transfer: ItemTransfer, now: float) -> None:
        """End a transfer; it stays until its writes have ended."""
        transfer.is_ended = True
        transfer.due.clear()
        del self._by_target[(transfer.item.mm_hash, transfer.peer)]
        self._finalize(transfer, now)

    def _finalize(self, transfer: ItemTransfer, now: float) -> None:
        """Forget an ended transfer once nothing of it is written."""
        if transfer.writing:
            return
        del self.transfers[transfer.tid]
        self._ended[(transfer.peer, transfer.tid)] = transfer.final_message
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if transfer.final_message is not None and transfer.peer in self.peers:
            self._turn.send(transfer.peer, transfer.final_message)
        self.cache.end(transfer.item, transfer.tid, now)

    def _withdraw(self, item: EncodedItem, now: float, code: Code, text: str) -> None:
        """Drop an item and withdraw it from its consumers."""
        self.cache.drop(item)
        for tid in list(item.transfers):
            transfer = self.transfers[tid]
            if not transfer.is_ended:
                transfer.final_message = Withdraw(tid, code, text)
                self._end(transfer, now)

    def _release(self, item_id: int) -> None:
        self._turn.effects.append(Release(item_id))

    # Time

    def tick(self, now: float) -> None:
        """Repeat offers, expire items and pushes; called several times a second."""
        for transfer in list(self.transfers.values()):
            self._check_timeouts(transfer, now)
        self._wants.drop_late(now)
        self._pushes.drop_late(now)
        for item in self.cache.items.values():
            for endpoint in [each for each, until in item.endpoints.items() if until < now]:
                self.counts["timeouts"] += 1
                del item.endpoints[endpoint]
                self.cache.update_held_bytes(item)
        for item in self.cache.expired(now, self.limits.waiting_timeout_s):
            self.counts["never_taken"] += 1
            self._withdraw(
                item, now, Code.TIMEOUT, "no consumer has taken it within waiting_timeout_s"
            )
        self.cache.make_room()

    def _check_timeouts(self, transfer: ItemTransfer, now: float) -> None:
        if transfer.is_ended:
            return
        if now - transfer.since > self.limits.waiting_timeout_s and not transfer.writing:
            self.counts["timeouts"] += 1
            text = f"no message for {now - transfer.since:.1f} s (waiting_timeout_s)"
            transfer.final_message = Withdraw(transfer.tid, Code.TIMEOUT, text)
            self._end(transfer, now)
            return
        is_due = now - max(transfer.offered_at, transfer.since) > self.limits.repeat_s
        if transfer.is_idle and is_due and transfer.peer in self.peers:
            self._offer(transfer, now)  # the consumer repeats its answer and its grants

    # For metrics

    def gauges(self) -> dict[str, float]:
        """Return the levels for the metrics, by name."""
        return {
            "encoded_items": len(self.cache.items),
            "held_bytes": self.cache.held_bytes,
            "transfers": len(self.transfers),
            "writes": self.num_writes,
        }
