"""A consumer: what each message, report and tick changes (pure; owned by the control thread).

There is one for each rank. It decides which rows go where and owns the set of rows received;
producers only propose. Requests expect an item, and producers offer it (`offers`). The item is
admitted when there is memory for all of it (`admission`), then transferred window by window
(`grants`). It keeps its rows when its sender is lost: `discovery` asks for another producer, which
continues there if it has the same bytes. Effects wait for `take_effects`.
"""

from collections import Counter
from collections.abc import Collection

from vllm_kvpool.embeds.machines.admission import ItemAdmission
from vllm_kvpool.embeds.machines.discovery import ItemDiscovery
from vllm_kvpool.embeds.machines.effects import (
    Allocate,
    Connect,
    Discard,
    Effect,
    NotifyScheduler,
    Ready,
    Turn,
)
from vllm_kvpool.embeds.machines.grants import RowGrants, SenderFault
from vllm_kvpool.embeds.machines.items import ConsumerLimits, Item
from vllm_kvpool.embeds.machines.offers import Offers
from vllm_kvpool.embeds.machines.states import TRANSITIONS, TransferState
from vllm_kvpool.embeds.machines.window import TransferRef
from vllm_kvpool.embeds.protocol.messages import (
    LOADING_S,
    Cancel,
    CancelAck,
    Code,
    Complete,
    Expect,
    ItemNews,
    Offer,
    OfferAck,
    RevokeAck,
    Taken,
    Unknown,
    WantAck,
    Withdraw,
    WriteFailed,
    Wrote,
)
from vllm_kvpool.embeds.protocol.rows import ItemShape, checked_shape

MAX_ITEMS = 1 << 16  # items a consumer knows of


class Consumer:
    """The consumer of a rank. Methods that need the time take `now`; `take_effects` ends a turn."""

    def __init__(self, arena_bytes: int, limits: ConsumerLimits) -> None:
        self.limits = limits
        self._turn = Turn()
        self.counts = self._turn.counts
        self.items: dict[str, Item] = {}
        self.admission = ItemAdmission(self.items, limits.max_landing_bytes)
        self.offers = Offers(self._turn)
        self.grants = RowGrants(
            arena_bytes, limits, self.items, self.admission, self.offers, self._turn
        )
        self.discovery = ItemDiscovery(limits, self.grants, self._turn)

    def take_effects(self, now: float) -> list[Effect]:
        """Grant rows, once a turn, and return the effects since the last call, in order."""
        self._admit(now)
        self.grants.issue(now)
        return self._turn.take()

    # From the own scheduler and worker

    def expect(self, message: Expect, now: float) -> None:
        """Seek an item for which a request waits."""
        item = self.items.get(message.mm_hash)
        if message.joins and (item is None or item.wait_id != message.wait_id):
            return  # taken or failed since: this message was on its way
        if item is not None and message.digest and item.digest not in ("", message.digest):
            self._end(item, TransferState.CANCELLED, Code.CONFLICT)
            item = None
        if item is not None and item.is_stale:
            self._end(item, TransferState.CANCELLED, Code.STALE)
            item = None
        if item is None:
            item = self.items[message.mm_hash] = Item(message.mm_hash, now)
        was_requested, item.wait_id = item.requested, message.wait_id
        if message.digest:
            item.wanted_digest = message.digest
            self._refuse_other_encodings(item, message.digest)
        self.admission.request(item, message.order)
        item.patience_s = max(item.patience_s, self.discovery.patience_s(message.patience_s))
        item.peers |= frozenset(message.peers)
        item.expected_rows = message.rows or item.expected_rows
        item.gone.clear()
        if not was_requested:
            item.since = now
        self._turn.effects += [Connect(endpoint) for endpoint in message.peers]
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
        self.discovery.want(item, now)

    def reorder(self, mm_hash: str, order: int) -> None:
        """Change the order of an item, if it is here and a request waits for it."""
        item = self.items.get(mm_hash)
        if item is not None and item.requested:
            self.admission.request(item, order)

    def forget(self, mm_hash: str) -> None:
        """Drop the requests of an item, for which none waits any more."""
        item = self.items.get(mm_hash)
        if item is not None and item.requested:
            self._end(item, TransferState.CANCELLED, Code.CANCELLED)

    def keep_requested(self, names: Collection[str]) -> None:
        """Keep requests for these items and no others: the scheduler is in session, maybe again."""
        for item in list(self.items.values()):
            if item.mm_hash not in names:
                self.forget(item.mm_hash)

    def taken(self, mm_hash: str, now: float) -> None:
        """End an item whose tensors the engine has taken."""
        self._turn.effects.append(NotifyScheduler(Taken(mm_hash)))
        item = self.items.get(mm_hash)
        if item is not None and item.is_complete:
            self._drop(item)

    def no_memory(self, mm_hash: str, text: str) -> None:
        """Fail an admitted item for which the host has no memory."""
        item = self.items.get(mm_hash)
        if item is not None and item.admitted:
            assert item.shape is not None
            text = f"the host has no memory for the item's {item.shape.nbytes} bytes: {text}"
            self._fail(item, Code.TOO_LARGE, text)

    def refused(self, endpoint: str, text: str) -> None:
        """Give up an endpoint that a request named and that is not connected to."""
        for item in list(self.items.values()):
            if endpoint not in item.peers or item.shape is not None:
                continue
            item.refused |= {endpoint}
            if item.refused >= item.peers:
                self._fail(item, Code.UNREACHABLE, text)

    def weights_changed(self, now: float, loading: Collection[str] = ()) -> None:
        """Drop everything that was encoded with the weights before.

        `loading`: items that stay for the step that is about to take them.
        """
        for item in list(self.items.values()):
            if item.is_complete and item.mm_hash in loading:
                item.stale_until = now + LOADING_S
            elif item.shape is not None:
                self._fail(item, Code.STALE, "the weights have changed")

    # From sessions

    def peer_up(self, peer: str, endpoints: frozenset[str], now: float) -> None:
        """Take in a producer that is in session, reachable at any of these endpoints."""
        self.discovery.peer_up(peer, endpoints)
        self.grants.query_unresolved(now, (peer,), at_once=True)
        for item in list(self.items.values()):
            item.want_sent_at = float("-inf")
            self.discovery.want(item, now, only=peer)

    def peer_lost(self, peer: str, now: float, *, quiesced: bool = False) -> None:
        """Drop a producer's offers; unless `quiesced`, its writes may still arrive."""
        self.discovery.peers.pop(peer, None)
        self.grants.window.end_all_of(peer, now, quiesced=quiesced)
        for ref in [each for each in self.offers.open if each[0] == peer]:
            self._drop_offer(ref, None, "", now)
        self.offers.forget_finals(peer)

    # Questions that are answered

    def want_ack(self, peer: str, message: WantAck, now: float) -> None:
        """Take a peer's answer that it does not have the item now, and (`gone`) will not."""
        self.grants.decline(peer, message.declined, now)
        item = self.items.get(message.mm_hash)
        if item is None or item.shape is not None or not message.gone:
            return
        item.gone.add(peer)
        if self.discovery.is_gone_everywhere(item):
            text = "no encoder keeps it any more: send the request to an encoder again"
            self._fail(item, Code.GONE, text)

    # Offers: the first producer of an item sends it, the others stand by

    def offer(self, peer: str, message: Offer, now: float) -> None:
        """Take a producer's offer of an item; ProtocolError if no item can have its shape."""
        shape = checked_shape(message.shape)
        ref = (peer, message.tid)
        if self._resend_answer(ref):
            return
        item = self.items.get(message.mm_hash)
        if item is not None and item.is_stale:
            return  # a step is about to take it; the producer repeats its offer
        if item is not None and item.wanted_digest not in ("", message.digest):
            self._refuse_encoding(item, ref)
            return
        refusal = self._refusal(shape, item)
        if refusal is not None:
            self._refuse(ref, refusal[0])
            if item is not None and item.lacks_sender:
                self._fail(item, *refusal)
            return
        self.discovery.note_shape(peer, shape)
        if item is None:
            item = self.items[message.mm_hash] = Item(message.mm_hash, now)
        if item.is_complete:
            self.counts["deduplicated"] += 1
            self.offers.finish(ref, Complete(message.tid))
            return
        self._replace_older(item, peer, now)
        if item.offers:
            self._add_standby(item, ref, message)
            return
        self._accept(item, ref, message, shape, now)

    def _resend_answer(self, ref: TransferRef) -> bool:
        """Repeat the answer to an offer, and its live grants; False if it was not answered."""
        if self.offers.repeat_final(ref):
            return True
        item = self.offers.open.get(ref)
        if item is None:
            return False
        self._turn.send(ref[0], OfferAck(ref[1]))
        self.grants.resend(item, ref)
        return True

    def _replace_older(self, item: Item, peer: str, now: float) -> None:
        """End an older transfer of the item by the same producer: its end was lost."""
        for ref in [each for each in item.offers if each[0] == peer]:
            self.offers.finish(ref, Cancel(ref[1]))
            self._drop_offer(ref, None, "", now)

    def _refusal(self, shape: ItemShape, item: Item | None) -> tuple[Code, str] | None:
        """Return the reason to refuse an offer for good; None if it can be accepted."""
        most = self.limits.max_item_bytes
        if shape.nbytes > most:
            return Code.TOO_LARGE, (
                f"{shape.rows} rows of {shape.row_bytes} bytes are {shape.nbytes} bytes; the "
                f"consumer's max_item_bytes is {most}"
            )
        if shape.row_bytes > self.grants.window.nbytes:
            return Code.ROW_TOO_LARGE, (
                f"a row has {shape.row_bytes} bytes; the consumer's arena_bytes is "
                f"{self.grants.window.nbytes}, and a row is not cut"
            )
        if item is not None and item.expected_rows not in (0, shape.rows):
            return Code.CONFLICT, (
                f"{shape.rows} rows are offered and the request has room for {item.expected_rows}: "
                "the two engines process this item in different ways"
            )
        if item is None and len(self.items) >= MAX_ITEMS:
            return Code.TOO_LARGE, f"the consumer knows {MAX_ITEMS} items, its limit"
        return None

    def _accept(
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
        self.offers.add(item, ref, message)
        item.move(TransferState.PARTIAL if item.received.spans else TransferState.WAITING)
        self._report_offered(item)
        if item.admitted:
            self.admission.activate(item)
        else:
            self.admission.wait(item)
            self._admit(now)
        self._turn.send(ref[0], OfferAck(ref[1]))
        self.grants.adopt_early(item, message.first, now)
        item.update_state()

    def _add_standby(self, item: Item, ref: TransferRef, message: Offer) -> None:
        """Keep another producer's offer in reserve."""
        if item.shape != message.shape:
            self._refuse(ref, Code.CONFLICT)
            return
        self.counts["deduplicated"] += 1
        self.offers.add(item, ref, message)
        self._turn.send(ref[0], OfferAck(ref[1]))

    def _admit(self, now: float) -> None:
        for item in self.admission.admit(now):
            assert item.shape is not None
            self._turn.effects.append(Allocate(item.mm_hash, item.shape))

    def _refuse_other_encodings(self, item: Item, digest: str) -> None:
        """Refuse producers that stand by with another encoding."""
        for ref in [each for each in list(item.offers)[1:] if item.offers[each].digest != digest]:
            self.offers.remove(ref)
            self._refuse(ref, Code.CONFLICT)

    def _refuse_encoding(self, item: Item, ref: TransferRef) -> None:
        """Refuse an offer of another encoding than the engine's other ranks have."""
        self._refuse(ref, Code.CONFLICT)
        item.gone.add(ref[0])
        if item.lacks_sender and self.discovery.is_gone_everywhere(item):
            text = "no connected encoder has the encoding that the other ranks have"
            self._fail(item, Code.GONE, text)

    def _refuse(self, ref: TransferRef, code: Code) -> None:
        self.counts["refused"] += 1
        self.offers.finish(ref, OfferAck(ref[1], code))

    # Offers that end

    def withdraw(self, peer: str, message: Withdraw, now: float) -> None:
        """Drop an offer that the producer gave up; nothing of it is in flight."""
        self.grants.window.end_all((peer, message.tid), now)
        self._drop_offer((peer, message.tid), message.code, message.text, now)

    def cancel_ack(self, peer: str, message: CancelAck, now: float) -> None:
        """End the writes of a transfer."""
        self.grants.window.end_all((peer, message.tid), now)

    def unknown(self, peer: str, message: Unknown, now: float) -> None:
        """Drop a transfer that its producer does not know, and so writes nothing of."""
        self.grants.window.end_all((peer, message.tid), now)
        self._drop_offer((peer, message.tid), None, "", now)

    def _abandon_sender(self, fault: SenderFault, now: float) -> None:
        """Cancel the sender's transfer; another producer continues, or none."""
        item, code, text = fault
        ref = item.sender
        self.offers.finish(ref, Cancel(ref[1], code))
        item.failures = item.corrupt = 0
        self._drop_offer(ref, code, text, now)

    def _drop_offer(self, ref: TransferRef, code: Code | None, text: str, now: float) -> None:
        """Remove an offer, if there is one.

        `code`: why its producer does not have the item; None: the producer is lost.
        """
        item = self.offers.open.get(ref)
        if item is None:
            return
        was_sender = item.sender == ref
        self.offers.remove(ref)
        if not was_sender:
            return
        self.grants.release_writes(item, ref)
        if item.offers:
            self._fail_over(item)
            return
        item.move(TransferState.SUSPENDED)
        self.admission.remove(item)
        if code is not None:
            self._fail(item, code, text)
            return
        item.since = now
        item.want_sent_at = float("-inf")
        self.discovery.want(item, now)

    def _fail_over(self, item: Item) -> None:
        """Continue with the next producer: at the first missing row if the bytes are the same.

        If they are not, the item starts again.
        """
        digest = item.offers[item.sender].digest
        if digest != item.digest:
            self.admission.remove(item)
            self._release_rows(item)  # what is still drained goes to its old memory
            item.digest = digest
            self._report_offered(item)
            self.admission.wait(item)
        self.counts["resumed_rows"] += len(item.received)

    # Messages about grants, and reports of drains

    def wrote(self, peer: str, message: Wrote, now: float) -> None:
        """Drain a grant whose rows a producer has written."""
        self._act_on(self.grants.wrote((peer, message.tid), message, now), now)

    def drained(self, gid: int, same: bool, now: float) -> None:
        """Record a grant's rows, which were copied out; `same` if their digests match."""
        self._act_on(self.grants.drained(gid, same, now), now)

    def write_failed(self, peer: str, message: WriteFailed, now: float) -> None:
        """End a grant whose rows a producer could not write."""
        self._act_on(self.grants.write_failed((peer, message.tid), message, now), now)

    def revoke_ack(self, peer: str, message: RevokeAck, now: float) -> None:
        """Note the producer's progress with a revoked grant."""
        self.grants.revoke_ack((peer, message.tid), message, now)

    def _act_on(self, outcome: Item | SenderFault | None, now: float) -> None:
        if isinstance(outcome, Item):
            self._complete_item(outcome)
        elif outcome is not None:
            self._abandon_sender(outcome, now)

    def _complete_item(self, item: Item) -> None:
        self.admission.deactivate(item)
        assert not item.grants, "rows are granted to one only"
        self.offers.close(item, Complete)
        self.counts["items"] += 1
        self._turn.effects.append(Ready(item.mm_hash))
        if item.requested:
            self._report_ready(item)

    # Ends

    def _fail(self, item: Item, code: Code, text: str) -> None:
        """End an item that cannot be received, and tell the own scheduler."""
        self._end(item, TransferState.FAILED, code)
        news = ItemNews(item.mm_hash, code=code, text=text, wait_id=item.wait_id)
        self._turn.effects.append(NotifyScheduler(news))

    def _end(self, item: Item, state: TransferState, code: Code) -> None:
        """End an item without handing it over: tell its producers."""
        item.move(state)
        self.counts[f"ended_{code.value}"] += 1
        self.offers.close(item, lambda tid: Cancel(tid, code))
        self.grants.revoke_all(item)
        self._drop(item)

    def _drop(self, item: Item) -> None:
        self._release_rows(item)
        self.admission.forget(item)
        del self.items[item.mm_hash]

    def _release_rows(self, item: Item) -> None:
        """Give up the rows received, and the item's memory."""
        self.grants.release_rows(item)
        if item.admitted:
            self.admission.release_memory(item)
            self._turn.effects.append(Discard(item.mm_hash))

    # Reports to the own scheduler

    def _report_ready(self, item: Item) -> None:
        """Tell the own scheduler that an item can be loaded."""
        news = ItemNews(item.mm_hash, item.digest, wait_id=item.wait_id)
        self._turn.effects.append(NotifyScheduler(news))

    def _report_offered(self, item: Item) -> None:
        """Report to the own scheduler an item that is on its way.

        The item may be requested, and other ranks may be offered another encoding.
        """
        if not item.requested:
            self._turn.effects.append(NotifyScheduler(ItemNews(item.mm_hash, offered=True)))
        elif self.limits.num_ranks > 1:
            news = ItemNews(item.mm_hash, item.digest, offered=True, wait_id=item.wait_id)
            self._turn.effects.append(NotifyScheduler(news))

    # Time

    def tick(self, now: float) -> None:
        """Repeat messages, expire grants and items; called several times a second."""
        self.grants.tick(now, self.discovery.peers)
        for item in list(self.items.values()):
            self._check_timeouts(item, now)

    def _check_timeouts(self, item: Item, now: float) -> None:
        limits, waited = self.limits, now - item.since
        if item.stale_until is not None:
            if now >= item.stale_until:
                self._end(item, TransferState.CANCELLED, Code.STALE)
        elif item.is_complete or self.admission.waits_for_a_request(item):
            if not item.requested and waited > limits.waiting_timeout_s:
                self.counts["never_asked_for"] += 1
                self._fail(item, Code.TIMEOUT, "no request came")
        elif item.shape is None:
            if waited > self.discovery.patience_s(item.patience_s):
                text = f"no encoder offered it within {waited:.1f} s (bootstrap_timeout_s)"
                self._fail(item, Code.TIMEOUT, text)
            else:
                self.discovery.want(item, now)
        elif waited > limits.waiting_timeout_s and (item.requested or item.lacks_sender):
            text = f"{len(item.received)} rows were received, then none for {waited:.1f} s "
            self._fail(item, Code.TIMEOUT, text + "(waiting_timeout_s)")
        elif item.lacks_sender:
            self.discovery.want(item, now)

    # For metrics

    def gauges(self) -> dict[str, float]:
        """Return the levels for the metrics, by name."""
        return {
            "items": len(self.items),
            **self.admission.gauges(),
            **self.grants.window.gauges(),
        }

    def states(self) -> dict[TransferState, int]:
        """Return the number of items in each state that an item can leave."""
        counted = Counter(item.state for item in self.items.values())
        return {state: counted[state] for state in TransferState if TRANSITIONS[state]}
