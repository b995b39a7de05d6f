"""A producer: what each message, report and tick changes (pure; owned by the control thread).

A transfer brings an encoded item to one rank of a consumer: offered when the item is prepared
and a session is up, written as rows are granted, over when the consumer has every row. The own
scheduler (`push`) or consumers (`want`) say who gets an item. Effects wait for `take_effects`.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import pairwise

from vllm_kvpool.embeds.machines.effects import Connect, Effect, Prepare, Write
from vllm_kvpool.embeds.machines.producer_state import (
    ConsumerPeer,
    EncodedItem,
    ItemTransfer,
    PendingWants,
    ProducerLimits,
    ProducerState,
)
from vllm_kvpool.embeds.machines.states import ENDED, PRODUCER_TABLE, TransferEvent, TransferState
from vllm_kvpool.embeds.protocol.messages import (
    MAX_EXTENTS,
    Cancel,
    CancelAck,
    Code,
    Complete,
    Grant,
    Message,
    NeedGrant,
    Offer,
    OfferAck,
    Push,
    Revoke,
    RevokeAck,
    RowsAck,
    Unknown,
    Verdict,
    Want,
    WantAck,
    Window,
    Withdraw,
    WriteFailed,
    WriteProgress,
    Wrote,
)
from vllm_kvpool.embeds.protocol.rows import Intervals, ItemShape, runs_of

START_SHARE = 0.5  # of a grant's ttl_s: its write must begin within this part


class WriteScheduler(ProducerState):
    """Checks grants, and starts writes: consumers in turn, of each its transfers in turn.

    A grant is due, then its write is under way, then its result is kept to be sent again.
    """

    def __init__(self, limits: ProducerLimits) -> None:
        super().__init__(limits)
        # By peer and grant: writes that failed and may still arrive.
        self._unresolved: OrderedDict[tuple[str, int], WriteFailed] = OrderedDict()
        self.num_writes = 0  # under way
        self._writing_bytes = 0  # of these

    # Grants

    def grant(self, peer: str, message: Grant, now: float) -> None:
        """A consumer grants rows."""
        transfer = self.of(peer, message.tid)
        if transfer is None:
            self.answer_ended(peer, message.tid)
            return
        transfer.since, transfer.offered = now, True
        if message.gid in transfer.results:
            said = transfer.results[message.gid]
            if said is not None:
                self.send(peer, said)
            return
        if not self.is_valid_grant(transfer, message):
            self.counts["bad_grants"] += 1
            said = WriteFailed(message.tid, message.gid, True, "the grant does not fit the item")
            self._record_result(transfer, message.gid, said)
            self.send(peer, said)
            return
        self._accept_grant(transfer, message, now)
        self.changed_at = now

    def is_valid_grant(self, transfer: ItemTransfer, message: Grant) -> bool:
        """Whether a grant is of rows of the item, in disjoint extents of the window."""
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
        if transfer.state in (TransferState.BOOTSTRAPPING, TransferState.SUSPENDED):
            transfer.state = PRODUCER_TABLE.after(transfer.state, TransferEvent.OFFER)
        transfer.state = PRODUCER_TABLE.after(transfer.state, TransferEvent.GRANTED)
        self._record_result(transfer, message.gid, None)
        transfer.due.append((message, now + message.ttl_s * START_SHARE))
        self.peers[transfer.peer].due[transfer.tid] = None

    def revoke(self, peer: str, message: Revoke, now: float) -> None:
        """A consumer revokes a grant."""
        unresolved = self._unresolved.get((peer, message.gid))
        if unresolved is not None:
            self.send(peer, unresolved)
            return
        transfer = self.of(peer, message.tid or self._tid_of_first(peer, message.gid))
        if transfer is None and not message.tid:
            self.send(peer, RevokeAck(0, message.gid, WriteProgress.NOT_STARTED))
            return
        if transfer is None:
            self.answer_ended(peer, message.tid)
            return
        if message.gid in transfer.writing:
            self.send(peer, RevokeAck(message.tid, message.gid, WriteProgress.IN_FLIGHT))
            return
        said = transfer.results.get(message.gid)
        if isinstance(said, Wrote):
            self.send(peer, RevokeAck(message.tid, message.gid, WriteProgress.WROTE))
            self.send(peer, said)
            return
        # A grant that has not arrived yet is refused when it does.
        transfer.due = deque(each for each in transfer.due if each[0].gid != message.gid)
        ack = RevokeAck(message.tid, message.gid, WriteProgress.NOT_STARTED)
        self._record_result(transfer, message.gid, ack)
        self.send(peer, ack)
        self.mark_idle(transfer)

    def _tid_of_first(self, peer: str, gid: int) -> int:
        """The transfer that uses a grant which came with a want; 0 if none does."""
        key = (peer, gid)
        transfers = self.transfers.values()
        found = (each.tid for each in transfers if (each.peer, each.first) == key)
        return next(found, 0)

    def _record_result(self, transfer: ItemTransfer, gid: int, said: Message | None) -> None:
        """Keep the answer to a grant, at most `max_results` of a transfer."""
        transfer.results[gid] = said
        while len(transfer.results) > self.limits.max_results:
            oldest = next((gid for gid, each in transfer.results.items() if each is not None), None)
            if oldest is None:
                return
            del transfer.results[oldest]

    # Writes

    def start_writes(self, now: float) -> None:
        while self._may_write:
            peer = next((name for name, each in self.peers.items() if each.due), None)
            if peer is None:
                return
            self.peers.move_to_end(peer)
            known = self.peers[peer]
            tid, _ = known.due.popitem(last=False)
            transfer = self.transfers.get(tid)
            if transfer is None or not transfer.due or transfer.state in ENDED:
                continue
            message, expires_at = transfer.due.popleft()
            if transfer.due:
                known.due[tid] = None
            if now > expires_at:
                self._decline(transfer, message)
            else:
                self._write(transfer, message, known)

    @property
    def _may_write(self) -> bool:
        limits = self.limits
        is_small = self._writing_bytes < limits.small_bytes and self.num_writes < limits.max_writes
        return is_small or self.num_writes < limits.writers

    def _decline(self, transfer: ItemTransfer, message: Grant) -> None:
        """Refuse a grant whose memory may be reused before the write ends."""
        self.counts["late_grants"] += 1
        ack = RevokeAck(message.tid or transfer.tid, message.gid, WriteProgress.NOT_STARTED)
        self._record_result(transfer, message.gid, ack)
        self.send(transfer.peer, ack)
        self.mark_idle(transfer)

    def _write(self, transfer: ItemTransfer, message: Grant, known: ConsumerPeer) -> None:
        item = transfer.item
        most = min(message.rows, item.shape.rows - message.row)
        runs, rows = runs_of(message.row, most, message.extents, item.shape.row_bytes)
        assert known.window is not None
        nbytes = rows * item.shape.row_bytes
        self.num_writes += 1
        self._writing_bytes += nbytes
        item.readers += 1
        transfer.writing[message.gid] = nbytes
        self.effects.append(Write(transfer.tid, message.gid, item.item_id, known.window, runs))

    def written(self, tid: int, gid: int, result: Wrote | WriteFailed, now: float) -> None:
        """A write has ended."""
        transfer = self.transfers[tid]
        item = transfer.item
        item.readers -= 1
        self.num_writes -= 1
        self._writing_bytes -= transfer.writing.pop(gid)
        if isinstance(result, Wrote):
            self.counts["written_rows"] += result.rows
            self.counts["written_bytes"] += result.rows * item.shape.row_bytes
        else:
            self.counts["failed_writes"] += 1
        if gid in transfer.results:
            transfer.results[gid] = result
        is_unresolved = isinstance(result, WriteFailed) and not result.quiesced
        if isinstance(result, WriteFailed) and is_unresolved:
            self._unresolved[(transfer.peer, gid)] = result
            while len(self._unresolved) > self.limits.max_ended:
                self._unresolved.popitem(last=False)
        is_up = transfer.peer in self.peers
        if transfer.state in ENDED:
            if is_unresolved and is_up:
                # Before the final message, which says that nothing is in flight.
                self.send(transfer.peer, result)
            self.finalize(transfer, now)
        else:
            if is_up:
                self.send(transfer.peer, result)
            self.mark_idle(transfer)
        self.changed_at = now

    def check(self) -> None:
        transfers = self.transfers.values()
        assert self.num_writes == sum(len(each.writing) for each in transfers)
        assert self._writing_bytes == sum(sum(each.writing.values()) for each in transfers)
        limits = self.limits
        assert self.num_writes <= max(limits.writers, limits.max_writes)


MIN_PATIENCE_S = 1.0  # a consumer of less only asks whether the item is here


class Producer(WriteScheduler):
    """The whole producer; see the module docstring. Every method takes the time as `now`."""

    def __init__(self, limits: ProducerLimits) -> None:
        super().__init__(limits)
        # Endpoint -> endpoints of all ranks of its engine.
        self._engines: dict[str, tuple[str, ...]] = {}
        self._at: dict[str, str] = {}  # endpoint -> peer
        # Item -> endpoints, and until when each is kept.
        self._pushes: dict[str, dict[str, float]] = {}
        self._wants = PendingWants(limits.max_wants)

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order; writes start here, once for all that has happened."""
        if self.changed_at is not None:
            now, self.changed_at = self.changed_at, None
            self.start_writes(now)
        effects, self.effects = self.effects, []
        return effects

    # From the own worker and scheduler

    def produced(self, mm_hash: str, shape: ItemShape, aux: bytes, now: float) -> int:
        """An item has been encoded; its id, or 0 if it is here already."""
        if mm_hash in self.cache:
            return 0
        item = self.cache.add(mm_hash, shape, aux, now)
        self.effects.append(Prepare(item.item_id))
        return item.item_id

    def prepared(self, item_id: int, digest: str, now: float) -> None:
        """An item is in host memory; an empty digest says that it could not be brought there."""
        item = self.cache.by_id(item_id)
        item.readers -= 1
        if not self.cache.holds(item):
            self.cache.release_if_unused(item)
            return
        if not digest:
            self.withdraw_item(item, now, Code.GONE, "the encoder's output could not be read")
            return
        item.digest, item.since = digest, now
        for endpoint in self._pushes.pop(item.mm_hash, {}):
            self._push_to(item, endpoint, now)
        for peer in self._wants.take(item.mm_hash):
            self._offer(self.begin(item, now, peer=peer), now)
        self.cache.make_room()

    def push(self, message: Push, now: float) -> None:
        """An item that is about to be encoded, or is here, goes to these consumers."""
        for endpoint in message.endpoints:
            self.effects.append(Connect(endpoint))
            item = self.cache.get(message.mm_hash)
            if item is not None and item.digest:
                self._push_to(item, endpoint, now)
            else:
                expires_at = now + self.limits.waiting_timeout_s
                self._pushes.setdefault(message.mm_hash, {})[endpoint] = expires_at

    def refused(self, endpoint: str, now: float) -> None:
        """An endpoint that a request or a peer named is not connected to."""
        for targets in self._pushes.values():
            targets.pop(endpoint, None)
        for transfer in list(self.transfers.values()):
            is_begun = transfer.peer or transfer.state in ENDED
            if transfer.endpoint == endpoint and not is_begun:
                self.end(transfer, TransferEvent.CANCEL, now)

    def missing(self) -> set[str]:
        """Items that somebody waits for and that are not here; the engine's own cache may have
        them.
        """
        waited_for = self._wants.items | self._pushes.keys()
        return {mm_hash for mm_hash in waited_for if mm_hash not in self.cache}

    def begin_epoch(self, now: float) -> None:
        """The weights have changed: send nothing encoded before."""
        for item in self.cache:
            self.withdraw_item(item, now, Code.STALE, "the weights have changed")
        self.cache.clear_dropped()

    # From sessions

    def peer_up(
        self,
        peer: str,
        window: Window | None,
        reached_at: frozenset[str],
        ranks: tuple[str, ...],
        now: float,
    ) -> None:
        """A consumer's rank is in session, at these endpoints; `ranks` are those of its engine."""
        known = self.peers.get(peer)
        if known is None:
            known = self.peers[peer] = ConsumerPeer(window, reached_at)
        self._forget_endpoints(known.endpoints - reached_at, peer)
        known.window, known.endpoints = window, reached_at
        for endpoint in reached_at:
            self._at[endpoint] = peer
            self._engines[endpoint] = ranks or (endpoint,)
        for transfer in list(self.transfers.values()):
            if transfer.endpoint in reached_at:
                self._redirect_to(transfer, peer, now)
            elif transfer.peer == peer and transfer.state is TransferState.SUSPENDED:
                self._offer(transfer, now)
        for transfer in list(self.transfers.values()):
            if transfer.endpoint in reached_at and transfer.state not in ENDED:
                self._push_to(transfer.item, transfer.endpoint, now)

    def peer_lost(self, peer: str, now: float) -> None:
        """The session with a consumer's rank ended; it, or another incarnation, may come back."""
        known = self.peers.pop(peer, None)
        if known is None:
            return
        self._forget_endpoints(known.endpoints, peer)
        for transfer in [each for each in self.transfers.values() if each.peer == peer]:
            transfer.due.clear()
            transfer.results = OrderedDict(
                (gid, said) for gid, said in transfer.results.items() if gid in transfer.writing
            )
            if transfer.state in (
                TransferState.WAITING,
                TransferState.TRANSFERRING,
                TransferState.PARTIAL,
            ):
                transfer.state = PRODUCER_TABLE.after(transfer.state, TransferEvent.LOST)
                transfer.since, transfer.offered = now, False
        self._wants.drop_peer(peer)

    def _forget_endpoints(self, endpoints: Iterable[str], peer: str) -> None:
        for endpoint in endpoints:
            if self._at.get(endpoint) == peer:
                del self._at[endpoint], self._engines[endpoint]

    # From consumers

    def want(self, peer: str, message: Want, now: float) -> None:
        item = self.cache.get(message.mm_hash)
        first = message.first
        if item is not None and item.digest:
            transfer = self.begin(item, now, peer=peer)
            if first is not None and self.is_valid_grant(transfer, first):
                transfer.first = first.gid
                self._accept_grant(transfer, first, now)
            self._offer(transfer, now)
            return
        is_coming = item is not None or message.mm_hash in self._pushes
        asks_only = message.patience_s < MIN_PATIENCE_S
        gone = not is_coming and (asks_only or self.cache.was_dropped(message.mm_hash))
        if not gone:
            self._wants.add(message.mm_hash, peer, now + min(message.patience_s, _DAY_S))
        self.send(peer, WantAck(message.mm_hash, gone, first.gid if first else 0))

    def offer_ack(self, peer: str, message: OfferAck, now: float) -> None:
        """The consumer answers an offer."""
        transfer = self.of(peer, message.tid)
        if transfer is None:
            return
        transfer.offered, transfer.since = True, now
        if message.verdict is Verdict.HAVE:
            self.end(transfer, TransferEvent.TAKEN, now)
        elif message.verdict is Verdict.REFUSED:
            self.counts[f"refused_{message.code.value if message.code else 'unknown'}"] += 1
            self.end(transfer, TransferEvent.FAIL, now)
        else:
            _check_rows(transfer, message.received)

    def rows_ack(self, peer: str, message: RowsAck, now: float) -> None:
        """The consumer answers for a grant's rows."""
        transfer = self.of(peer, message.tid)
        if transfer is not None:
            transfer.since = now
            _check_rows(transfer, message.received)

    def complete(self, peer: str, message: Complete, now: float) -> None:
        """The consumer has every row."""
        transfer = self.of(peer, message.tid)
        if transfer is not None:
            self.end(transfer, TransferEvent.TAKEN, now)

    def cancel(self, peer: str, message: Cancel, now: float) -> None:
        """The consumer does not want the item any more."""
        transfer = self.of(peer, message.tid)
        if transfer is None:
            self.answer_ended(peer, message.tid)
            return
        transfer.final_message = CancelAck(message.tid)
        self.counts[f"cancelled_{message.code.value}"] += 1
        self.end(transfer, TransferEvent.CANCEL, now)

    def unknown(self, peer: str, message: Unknown, now: float) -> None:
        """The consumer does not know the transfer: offer it again."""
        transfer = self.of(peer, message.tid)
        if transfer is not None:
            transfer.offered = False
            transfer.sent_at = float("-inf")

    # Time

    def tick(self, now: float) -> None:
        """Act on whatever is due. Called often."""
        for transfer in list(self.transfers.values()):
            self._check_timeouts(transfer, now)
        self._wants.drop_late(now)
        for mm_hash, targets in list(self._pushes.items()):
            for endpoint in [each for each, expires_at in targets.items() if expires_at < now]:
                del targets[endpoint]
            if not targets:
                del self._pushes[mm_hash]
        for item in self.cache.expired(now, self.limits.waiting_timeout_s):
            self.counts["never_taken"] += 1
            self.withdraw_item(item, now, Code.TIMEOUT, "nobody has taken it")
        self.cache.make_room()
        self.changed_at = now

    def _check_timeouts(self, transfer: ItemTransfer, now: float) -> None:
        if transfer.state in ENDED:
            return
        if now - transfer.since > self.limits.waiting_timeout_s and not transfer.writing:
            self.counts["timeouts"] += 1
            text = f"no news for {now - transfer.since:.1f} s (waiting_timeout_s)"
            transfer.final_message = Withdraw(transfer.tid, Code.TIMEOUT, text)
            self.end(transfer, TransferEvent.FAIL, now)
            return
        is_up = transfer.peer in self.peers
        is_idle = transfer.state in (TransferState.WAITING, TransferState.PARTIAL)
        if is_up and is_idle and now - transfer.sent_at > self.limits.repeat_s:
            if transfer.offered:
                transfer.sent_at = now
                self.send(transfer.peer, NeedGrant(transfer.tid))
            else:
                self._send_offer(transfer, now)

    # Starting transfers

    def _push_to(self, item: EncodedItem, endpoint: str, now: float) -> None:
        """Transfer an item to each rank of the engine at this endpoint."""
        for rank in self._engines.get(endpoint, (endpoint,)):
            if rank != endpoint:
                self.effects.append(Connect(rank))
            transfer = self.begin(item, now, endpoint=rank, peer=self._at.get(rank, ""))
            self._offer(transfer, now)

    def _redirect_to(self, transfer: ItemTransfer, peer: str, now: float) -> None:
        """There is a session at a transfer's endpoint, maybe with a new incarnation."""
        if transfer.state in ENDED:
            return
        goes: ItemTransfer | None = transfer
        if transfer.peer != peer:
            goes = self.redirect(transfer, peer, now)
        if goes is not None:
            self._offer(goes, now)

    def _offer(self, transfer: ItemTransfer, now: float) -> None:
        """Offer the item if it is prepared and the peer is in session."""
        is_there = bool(transfer.item.digest) and transfer.peer in self.peers
        if not is_there or transfer.state in ENDED:
            return
        if transfer.state in (TransferState.BOOTSTRAPPING, TransferState.SUSPENDED):
            transfer.state = PRODUCER_TABLE.after(transfer.state, TransferEvent.OFFER)
        self._send_offer(transfer, now)
        self.changed_at = now

    def _send_offer(self, transfer: ItemTransfer, now: float) -> None:
        item = transfer.item
        transfer.sent_at = now
        offer = Offer(transfer.tid, item.mm_hash, item.shape, item.digest, item.aux, transfer.first)
        self.send(transfer.peer, offer)

    # For metrics and tests

    @property
    def held_bytes(self) -> int:
        """Bytes of items that somebody is still to take."""
        return self.cache.held_bytes

    def gauges(self) -> dict[str, float]:
        return {
            "sources": len(self.cache),
            "held_bytes": self.held_bytes,
            "transfers": len(self.transfers),
            "writes": self.num_writes,
        }

    def check(self) -> None:
        """Assert the invariants; tests call it after each step."""
        super().check()
        for tid, transfer in self.transfers.items():
            assert tid in transfer.item.transfers
            assert transfer.writing or transfer.state not in ENDED
            if transfer.state is TransferState.TRANSFERRING:
                assert transfer.due or transfer.writing
        self.cache.check(set(self.transfers))


_DAY_S = 86_400.0


def _check_rows(transfer: ItemTransfer, spans: tuple[tuple[int, int], ...]) -> None:
    """ProtocolError if a consumer claims rows that the item does not have."""
    Intervals.checked(spans, transfer.item.shape.rows)
