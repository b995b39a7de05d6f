"""What a consumer does with items: one for each of its ranks (pure; owned by the control thread).

The consumer decides which rows go where and owns the set of rows that have arrived; a producer only
proposes. An item is expected by requests, offered by producers, let in when there is memory for all
of it, then brought over window by window: granted, written, drained, granted again, from the first
missing row on. Whatever ends early leaves its rows; whoever offers the same bytes goes on there.

`desk.py` has what is known, `asking.py`, `offers.py` and `grants.py` do what messages want. Time is
given to every method; what is to be done is left in `effects` until `take_effects`.
"""

from collections import defaultdict

from vllm_kvpool.embeds.asking import Asking
from vllm_kvpool.embeds.desk import Desk
from vllm_kvpool.embeds.effects import Connect, Effect, Tell
from vllm_kvpool.embeds.grants import Grants
from vllm_kvpool.embeds.items import Item, Peer
from vllm_kvpool.embeds.limits import ConsumerLimits
from vllm_kvpool.embeds.offers import OTHER_ENCODING, Offers
from vllm_kvpool.embeds.protocol import (
    CancelAck,
    Code,
    Expect,
    ItemNews,
    NeedGrant,
    Offer,
    RevokeAck,
    Taken,
    Unknown,
    WantAck,
    Withdraw,
    WriteFailed,
    Wrote,
)
from vllm_kvpool.embeds.states import CONSUMER_TABLE, GrantEvent, ItemEvent, State


class Consumer:
    """See the module docstring."""

    def __init__(self, arena_bytes: int, limits: ConsumerLimits) -> None:
        self.desk = Desk(arena_bytes, limits)
        self._asking = Asking(self.desk)
        self._offers = Offers(self.desk, self._asking)
        self._grants = Grants(self.desk, self._asking, self._offers)

    @property
    def counts(self) -> defaultdict[str, float]:
        """Totals, by event."""
        return self.desk.counts

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order; rows are granted here, once for all that has happened."""
        if self.desk.pump_at is not None:
            now, self.desk.pump_at = self.desk.pump_at, None
            self._pump(now)
        effects, self.desk.effects = self.desk.effects, []
        return effects

    def _pump(self, now: float) -> None:
        self._offers.let_in(now)
        self._grants.grant(now)

    # What the own scheduler and worker say

    def expect(self, told: Expect, now: float) -> None:
        """A request waits for an item."""
        item = self.desk.items.get(told.mm_hash)
        if item is not None and told.digest and item.digest not in ("", told.digest):
            self.desk.end(item, ItemEvent.CANCEL, Code.CONFLICT, OTHER_ENCODING, now)
            item = None
        if item is None:
            item = self.desk.items[told.mm_hash] = Item(told.mm_hash, now)
        was_asked = item.asked
        if told.digest:
            item.wanted_digest = told.digest
            self._offers.keep_only(item, told.digest)
        item.order = min(item.order, told.order) if was_asked else told.order
        self.desk.admission.reorder(item, was_asked)
        item.patience_s = max(item.patience_s, self._asking.patience_s(told.patience_s))
        item.peers |= frozenset(told.peers)
        item.expected_rows = told.rows or item.expected_rows
        item.gone.clear()
        if not was_asked:
            item.since = now
        self.desk.effects += [Connect(endpoint) for endpoint in told.peers]
        if not self._rows_match(item):
            self.desk.fail(item, Code.CONFLICT, self._mismatch(item), now)
            return
        if item.state is State.SUCCESS:
            self.desk.tell_ready(item)
            return
        if item.sources and not was_asked:
            self.desk.tell_encoding(item)
        if told.is_pushed and not told.peers and not told.digest:
            item.wanted_at = now
        self._asking.want(item, now)
        self.desk.pump_at = now

    def _rows_match(self, item: Item) -> bool:
        return item.shape is None or item.expected_rows in (0, item.shape.rows)

    def _mismatch(self, item: Item) -> str:
        rows = item.shape.rows if item.shape is not None else 0
        return f"{rows} rows were offered and the request has room for {item.expected_rows}"

    def forget(self, mm_hash: str, now: float) -> None:
        """No request waits for it any more."""
        item = self.desk.items.get(mm_hash)
        if item is not None and item.asked:
            self.desk.end(item, ItemEvent.CANCEL, Code.CANCELLED, "nobody wants it any more", now)
            self.desk.pump_at = now

    def taken(self, mm_hash: str, now: float) -> None:
        """The engine has the item's tensors now; they are not ours any more."""
        self.desk.effects.append(Tell(Taken(mm_hash)))
        item = self.desk.items.get(mm_hash)
        if item is not None and item.state is State.SUCCESS:
            self.desk.drop(item)
            self.desk.pump_at = now

    def no_memory(self, mm_hash: str, text: str, now: float) -> None:
        """The host has none for an item that has been let in."""
        item = self.desk.items.get(mm_hash)
        if item is not None and item.admitted:
            assert item.shape is not None
            text = f"the host has no memory for the item's {item.shape.nbytes} bytes: {text}"
            self.desk.fail(item, Code.TOO_LARGE, text, now)
            self.desk.pump_at = now

    def not_ready(self, mm_hash: str, text: str, now: float) -> None:
        """An item whose rows are all here cannot be handed over."""
        item = self.desk.items.get(mm_hash)
        if item is not None and item.state is State.SUCCESS:
            self.desk.effects.append(Tell(ItemNews(mm_hash, code=Code.CLOSED, text=text)))
            self.desk.drop(item)
            self.desk.pump_at = now

    def refused(self, endpoint: str, text: str, now: float) -> None:
        """A request has named an endpoint that is not connected to."""
        for item in list(self.desk.items.values()):
            if endpoint not in item.peers or item.state is not State.BOOTSTRAPPING:
                continue
            item.refused |= {endpoint}
            if item.refused >= item.peers:
                self.desk.fail(item, Code.UNREACHABLE, text, now)
                self.desk.pump_at = now

    def begin_epoch(self, now: float) -> None:
        """Nothing that was encoded before is used."""
        for item in list(self.desk.items.values()):
            if item.state is not State.BOOTSTRAPPING:
                self.desk.end(item, ItemEvent.FAIL, Code.STALE, "the weights have changed", now)

    # What sessions say

    def peer_up(self, peer: str, endpoints: frozenset[str], now: float) -> None:
        """A producer is there, at any of these endpoints."""
        known = self._asking.peers.get(peer)
        self._asking.peers[peer] = Peer(endpoints, known.row_bytes if known is not None else 0)
        for granted in self.desk.window.doubtful(now):
            granted.told_at = float("-inf")
        self._grants.ask_of_doubtful(now)
        for item in list(self.desk.items.values()):
            item.wanted_at = float("-inf")
            self._asking.want(item, now, only=peer)

    def peer_lost(self, peer: str, now: float, *, quiet: bool = False) -> None:
        """It is gone; what it was to write may still arrive, unless `quiet`."""
        self._asking.peers.pop(peer, None)
        self.desk.window.end_all_of(peer, now, quiet=quiet)
        for source in self.desk.sources.of_peer(peer):
            self._offers.lost(source, now)
        self.desk.sources.forget_ends_of(peer)
        self.desk.pump_at = now

    # What producers say

    def offer(self, peer: str, told: Offer, now: float) -> None:
        """There is an item; ProtocolError if there can be no such one."""
        self._offers.offer(peer, told, now)

    def want_ack(self, peer: str, told: WantAck, now: float) -> None:
        """A peer does not have it now, and maybe never will again."""
        self._asking.want_ack(peer, told, now)

    def wrote(self, peer: str, told: Wrote, now: float) -> None:
        """The rows of a grant are in the window."""
        self._grants.wrote(peer, told, now)

    def drained(self, gid: int, same: bool, now: float) -> None:
        """A grant's rows have been copied; `same` if they are what was sent."""
        self._grants.drained(gid, same, now)

    def write_failed(self, peer: str, told: WriteFailed, now: float) -> None:
        """A grant's rows are not in the window."""
        self._grants.write_failed(peer, told, now)

    def revoke_ack(self, peer: str, told: RevokeAck, now: float) -> None:
        """How far the producer is with a grant that was called back."""
        self._grants.revoke_ack(peer, told, now)

    def withdraw(self, peer: str, told: Withdraw, now: float) -> None:
        """The producer has given an item up; nothing of it is in flight."""
        self._offers.withdraw(peer, told, now)

    def need_grant(self, peer: str, told: NeedGrant, now: float) -> None:
        """The producer waits: say again what holds."""
        self._offers.need_grant(peer, told, now)

    def cancel_ack(self, peer: str, told: CancelAck, now: float) -> None:
        """Nothing of a transfer is written from now on."""
        self.desk.window.end_all(GrantEvent.QUIET, now, source=(peer, told.tid))
        self.desk.pump_at = now

    def unknown(self, peer: str, told: Unknown, now: float) -> None:
        """The producer knows of no such transfer, so it writes nothing of it."""
        self.desk.window.end_all(GrantEvent.QUIET, now, source=(peer, told.tid))
        self._offers.lost((peer, told.tid), now)
        self.desk.pump_at = now

    # Time

    def tick(self, now: float) -> None:
        """Whatever is due. Called often."""
        self._grants.tick(now)
        for item in list(self.desk.items.values()):
            self._look_at(item, now)
        self.desk.pump_at = now

    def _look_at(self, item: Item, now: float) -> None:
        limits, waited = self.desk.limits, now - item.since
        if item.state is State.SUCCESS or self.desk.admission.waits_for_a_request(item):
            if not item.asked and waited > limits.waiting_timeout_s:
                self.desk.counts["never_asked_for"] += 1
                self.desk.end(item, ItemEvent.CANCEL, Code.TIMEOUT, "no request came", now)
        elif item.state is State.BOOTSTRAPPING:
            if waited > self._asking.patience_s(item.patience_s):
                text = f"nobody has offered it within {waited:.1f} s (bootstrap_timeout_s)"
                self.desk.fail(item, Code.TIMEOUT, text, now)
            else:
                self._asking.want(item, now)
        elif waited > limits.waiting_timeout_s and (item.asked or item.state is State.SUSPENDED):
            text = f"{len(item.received)} rows are here, none for {waited:.1f} s "
            self.desk.fail(item, Code.TIMEOUT, text + "(waiting_timeout_s)", now)
        elif item.state is State.SUSPENDED:
            self._asking.want(item, now)

    # For whoever watches

    def gauges(self) -> dict[str, float]:
        """Levels."""
        return {
            "items": len(self.desk.items),
            **self.desk.admission.gauges(),
            **self.desk.window.gauges(),
        }

    def story(self, mm_hash: str) -> str:
        """One line about an item."""
        item = self.desk.items.get(mm_hash)
        if item is None:
            return f"{mm_hash}: not known"
        rows = item.shape.rows if item.shape is not None else "?"
        return (
            f"{mm_hash}: {item.state.value}, {len(item.received)} of {rows} rows, "
            f"{len(item.live)} grants, {len(item.sources)} sources"
        )

    def check(self) -> None:
        """What always holds; tests call it after each step."""
        self.desk.window.check()
        for mm_hash, item in self.desk.items.items():
            shape = item.shape
            assert all(self.desk.window[gid].mm_hash == mm_hash for gid in item.live)
            assert item.state in CONSUMER_TABLE.edges
            if item.state is State.TRANSFERRING:
                assert item.live
            if item.state in (State.WAITING, State.PARTIAL, State.TRANSFERRING):
                assert item.sources
            if item.state is State.SUCCESS:
                assert shape is not None
                assert item.received.holds(0, shape.rows)
            covered = item.received
            for granted in item.live.values():
                if granted.source[1]:
                    assert shape is not None
                    assert granted.row + granted.rows <= shape.rows
                    covered = covered.with_rows(granted.row, granted.row + granted.rows)
            assert len(item.covered()) == item.num_covered, "rows are granted twice"
        self.desk.admission.check()
        self.desk.sources.check(self.desk.items)
