"""What a producer does with the items it has encoded (pure; owned by the control thread).

A source is an item's rows in this process. A transfer brings it to one rank of a consumer: offered
when the source is there and a session is up, written as rows are granted, over when the consumer
has every row. Who is to have an item is said by the own scheduler (`push`) or by consumers
(`want`). Sources are kept while somebody still takes them, then as long as there is room.

`transfers.py` has what is known, `writing.py` does what grants want. Time is given to every method;
what is to be done is left in `effects` until `take_effects`.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from vllm_kvpool.embeds.effects import Connect, Effect, Prepare
from vllm_kvpool.embeds.limits import ProducerLimits
from vllm_kvpool.embeds.protocol import (
    Cancel,
    CancelAck,
    Code,
    Complete,
    Grant,
    NeedGrant,
    Offer,
    OfferAck,
    Push,
    Revoke,
    RowsAck,
    Unknown,
    Verdict,
    Want,
    WantAck,
    Window,
    Withdraw,
    WriteFailed,
    Wrote,
)
from vllm_kvpool.embeds.rows import Intervals, ItemShape
from vllm_kvpool.embeds.shelf import Source
from vllm_kvpool.embeds.states import ENDED, PRODUCER_TABLE, SendEvent, State
from vllm_kvpool.embeds.transfers import Peer, Transfer, Transfers
from vllm_kvpool.embeds.wishes import Wishes
from vllm_kvpool.embeds.writing import Writing

MIN_PATIENCE_S = 1.0  # a consumer of less only asks whether the item is here


class Producer:
    """See the module docstring."""

    def __init__(self, limits: ProducerLimits) -> None:
        self._limits = limits
        self.transfers = Transfers(limits)
        self._writing = Writing(self.transfers)
        self._engines: dict[str, tuple[str, ...]] = {}  # endpoint -> those of all its ranks
        self._at: dict[str, str] = {}  # endpoint -> peer
        self._pushes: dict[str, dict[str, float]] = {}  # item -> endpoints, and until when
        self._wants = Wishes(limits.max_wants)

    @property
    def counts(self) -> defaultdict[str, float]:
        """Totals, by event."""
        return self.transfers.counts

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order; writes start here, after all that has been said."""
        if self.transfers.pump_at is not None:
            now, self.transfers.pump_at = self.transfers.pump_at, None
            self._writing.start(now)
        effects, self.transfers.effects = self.transfers.effects, []
        return effects

    # What the own worker and scheduler say

    def produced(self, mm_hash: str, shape: ItemShape, aux: bytes, now: float) -> int:
        """An item has been encoded; its number, or 0 for one that is here already."""
        if mm_hash in self.transfers.shelf:
            return 0
        source = self.transfers.shelf.add(mm_hash, shape, aux, now)
        self.transfers.effects.append(Prepare(source.sid))
        return source.sid

    def prepared(self, sid: int, digest: str, now: float) -> None:
        """A source is in host memory. An empty digest says that it could not be brought there."""
        source = self.transfers.shelf.numbered(sid)
        source.readers -= 1
        if not self.transfers.shelf.holds(source):
            self.transfers.shelf.let_go(source)
            return
        if not digest:
            self.transfers.drop_source(
                source, now, Code.GONE, "the encoder's output could not be read"
            )
            return
        source.digest, source.since = digest, now
        for endpoint in self._pushes.pop(source.mm_hash, {}):
            self._push_to(source, endpoint, now)
        for peer in self._wants.take(source.mm_hash):
            self._offer(self.transfers.begin(source, now, peer=peer), now)
        self.transfers.shelf.make_room()

    def push(self, told: Push, now: float) -> None:
        """An item that is about to be encoded, or here already, goes to these consumers."""
        for endpoint in told.endpoints:
            self.transfers.effects.append(Connect(endpoint))
            source = self.transfers.shelf.get(told.mm_hash)
            if source is not None and source.digest:
                self._push_to(source, endpoint, now)
            else:
                until = now + self.transfers.limits.waiting_timeout_s
                self._pushes.setdefault(told.mm_hash, {})[endpoint] = until

    def refused(self, endpoint: str, now: float) -> None:
        """An endpoint that a request or a peer has named is not connected to."""
        for targets in self._pushes.values():
            targets.pop(endpoint, None)
        for transfer in list(self.transfers.by_tid.values()):
            is_begun = transfer.peer or transfer.state in ENDED
            if transfer.endpoint == endpoint and not is_begun:
                self.transfers.end(transfer, SendEvent.CANCEL, now)

    def missing(self) -> set[str]:
        """Items that somebody waits for and that are not here: the engine may have them."""
        waited_for = self._wants.items | self._pushes.keys()
        return {mm_hash for mm_hash in waited_for if mm_hash not in self.transfers.shelf}

    def begin_epoch(self, now: float) -> None:
        """Nothing that was encoded before is sent."""
        for source in self.transfers.shelf:
            self.transfers.drop_source(source, now, Code.STALE, "the weights have changed")
        self.transfers.shelf.forget_what_was_here()

    # What sessions say

    def peer_up(
        self,
        peer: str,
        window: Window | None,
        reached_at: frozenset[str],
        ranks: tuple[str, ...],
        now: float,
    ) -> None:
        """A consumer's rank is there, at these endpoints; `ranks` are those of its engine."""
        known = self.transfers.peers.get(peer)
        if known is None:
            known = self.transfers.peers[peer] = Peer(window, reached_at)
        self._leave(known.endpoints - reached_at, peer)
        known.window, known.endpoints = window, reached_at
        for endpoint in reached_at:
            self._at[endpoint] = peer
            self._engines[endpoint] = ranks or (endpoint,)
        for transfer in list(self.transfers.by_tid.values()):
            if transfer.endpoint in reached_at:
                self._reach(transfer, peer, now)
            elif transfer.peer == peer and transfer.state is State.SUSPENDED:
                self._offer(transfer, now)
        for transfer in list(self.transfers.by_tid.values()):
            if transfer.endpoint in reached_at and transfer.state not in ENDED:
                self._push_to(transfer.source, transfer.endpoint, now)

    def peer_lost(self, peer: str, now: float) -> None:
        """A consumer's rank is gone; it may come back as the same incarnation or another."""
        known = self.transfers.peers.pop(peer, None)
        if known is None:
            return
        self._leave(known.endpoints, peer)
        for transfer in [each for each in self.transfers.by_tid.values() if each.peer == peer]:
            transfer.due.clear()
            transfer.results = OrderedDict(
                (gid, said) for gid, said in transfer.results.items() if gid in transfer.writing
            )
            if transfer.state in (State.WAITING, State.TRANSFERRING, State.PARTIAL):
                transfer.state = PRODUCER_TABLE.after(transfer.state, SendEvent.LOST)
                transfer.since, transfer.offered = now, False
        self._wants.drop_peer(peer)

    def _leave(self, endpoints: Iterable[str], peer: str) -> None:
        """It is not to be found there any more."""
        for endpoint in endpoints:
            if self._at.get(endpoint) == peer:
                del self._at[endpoint], self._engines[endpoint]

    # What consumers say

    def want(self, peer: str, told: Want, now: float) -> None:
        """A consumer waits for an item."""
        source = self.transfers.shelf.get(told.mm_hash)
        first = told.first
        if source is not None and source.digest:
            transfer = self.transfers.begin(source, now, peer=peer)
            if first is not None and self._writing.is_good(transfer, first):
                transfer.first = first.gid
                self._writing.take(transfer, first, now)
            self._offer(transfer, now)
            return
        is_coming = source is not None or told.mm_hash in self._pushes
        asks_only = told.patience_s < MIN_PATIENCE_S
        gone = not is_coming and (asks_only or self.transfers.shelf.was_here(told.mm_hash))
        if not gone:
            self._wants.add(told.mm_hash, peer, now + min(told.patience_s, _DAY_S))
        self.transfers.say(peer, WantAck(told.mm_hash, gone, first.gid if first else 0))

    def offer_ack(self, peer: str, told: OfferAck, now: float) -> None:
        """What the consumer makes of an offer, and which rows it has."""
        transfer = self.transfers.of(peer, told.tid)
        if transfer is None:
            return
        transfer.offered, transfer.since = True, now
        if told.verdict is Verdict.HAVE:
            self.transfers.end(transfer, SendEvent.TAKEN, now)
        elif told.verdict is Verdict.REFUSED:
            self.transfers.counts[f"refused_{told.code.value if told.code else 'unknown'}"] += 1
            self.transfers.end(transfer, SendEvent.FAIL, now)
        else:
            _check_rows(transfer, told.received)

    def grant(self, peer: str, told: Grant, now: float) -> None:
        """Rows may be written."""
        self._writing.grant(peer, told, now)

    def revoke(self, peer: str, told: Revoke, now: float) -> None:
        """A grant is called back."""
        self._writing.revoke(peer, told, now)

    def rows_ack(self, peer: str, told: RowsAck, now: float) -> None:
        """What became of a grant's rows."""
        transfer = self.transfers.of(peer, told.tid)
        if transfer is not None:
            transfer.since = now
            _check_rows(transfer, told.received)

    def complete(self, peer: str, told: Complete, now: float) -> None:
        """The consumer has every row."""
        transfer = self.transfers.of(peer, told.tid)
        if transfer is not None:
            self.transfers.end(transfer, SendEvent.TAKEN, now)

    def cancel(self, peer: str, told: Cancel, now: float) -> None:
        """The consumer does not want it any more."""
        transfer = self.transfers.of(peer, told.tid)
        if transfer is None:
            self.transfers.say_ended(peer, told.tid)
            return
        transfer.last_word = CancelAck(told.tid)
        self.transfers.counts[f"cancelled_{told.code.value}"] += 1
        self.transfers.end(transfer, SendEvent.CANCEL, now)

    def unknown(self, peer: str, told: Unknown, now: float) -> None:
        """The consumer does not know of the transfer: offer it again."""
        transfer = self.transfers.of(peer, told.tid)
        if transfer is not None:
            transfer.offered = False
            transfer.asked_at = float("-inf")

    # What writers say

    def written(self, tid: int, gid: int, result: Wrote | WriteFailed, now: float) -> None:
        """A write has ended, well or not."""
        self._writing.written(tid, gid, result, now)

    # Time

    def tick(self, now: float) -> None:
        """Whatever is due. Called often."""
        for transfer in list(self.transfers.by_tid.values()):
            self._look_at(transfer, now)
        self._wants.drop_late(now)
        for mm_hash, targets in list(self._pushes.items()):
            for endpoint in [each for each, until in targets.items() if until < now]:
                del targets[endpoint]
            if not targets:
                del self._pushes[mm_hash]
        for source in self.transfers.shelf.too_old(now, self.transfers.limits.waiting_timeout_s):
            self.transfers.counts["never_taken"] += 1
            self.transfers.drop_source(source, now, Code.TIMEOUT, "nobody has taken it")
        self.transfers.shelf.make_room()
        self.transfers.pump_at = now

    def _look_at(self, transfer: Transfer, now: float) -> None:
        if transfer.state in ENDED:
            return
        if now - transfer.since > self.transfers.limits.waiting_timeout_s and not transfer.writing:
            self.transfers.counts["timeouts"] += 1
            text = f"no news for {now - transfer.since:.1f} s (waiting_timeout_s)"
            transfer.last_word = Withdraw(transfer.tid, Code.TIMEOUT, text)
            self.transfers.end(transfer, SendEvent.FAIL, now)
            return
        is_up = transfer.peer in self.transfers.peers
        is_idle = transfer.state in (State.WAITING, State.PARTIAL)
        if is_up and is_idle and now - transfer.asked_at > self.transfers.limits.repeat_s:
            if transfer.offered:
                transfer.asked_at = now
                self.transfers.say(transfer.peer, NeedGrant(transfer.tid))
            else:
                self._say_offer(transfer, now)

    # Beginning

    def _push_to(self, source: Source, endpoint: str, now: float) -> None:
        """A transfer to each rank of the engine that is reached there."""
        for rank in self._engines.get(endpoint, (endpoint,)):
            if rank != endpoint:
                self.transfers.effects.append(Connect(rank))
            transfer = self.transfers.begin(source, now, endpoint=rank, peer=self._at.get(rank, ""))
            self._offer(transfer, now)

    def _reach(self, transfer: Transfer, peer: str, now: float) -> None:
        """There is a session with whom a push goes to; maybe with a new incarnation."""
        if transfer.state in ENDED:
            return
        goes: Transfer | None = transfer
        if transfer.peer != peer:
            goes = self.transfers.redirected(transfer, peer, now)
        if goes is not None:
            self._offer(goes, now)

    def _offer(self, transfer: Transfer, now: float) -> None:
        """Say that the item is there, if it can be said now."""
        is_there = bool(transfer.source.digest) and transfer.peer in self.transfers.peers
        if not is_there or transfer.state in ENDED:
            return
        if transfer.state in (State.BOOTSTRAPPING, State.SUSPENDED):
            transfer.state = PRODUCER_TABLE.after(transfer.state, SendEvent.OFFER)
        self._say_offer(transfer, now)
        self.transfers.pump_at = now

    def _say_offer(self, transfer: Transfer, now: float) -> None:
        source = transfer.source
        transfer.asked_at = now
        offer = Offer(
            transfer.tid, source.mm_hash, source.shape, source.digest, source.aux, transfer.first
        )
        self.transfers.say(transfer.peer, offer)

    # For whoever watches

    @property
    def held_bytes(self) -> int:
        """Of sources that somebody is still to take."""
        return self.transfers.shelf.held_bytes

    def gauges(self) -> dict[str, float]:
        """Levels."""
        return {
            "sources": len(self.transfers.shelf),
            "held_bytes": self.held_bytes,
            "transfers": len(self.transfers.by_tid),
            "writes": self._writing.count,
        }

    def check(self) -> None:
        """What always holds; tests call it after each step."""
        self._writing.check()
        for tid, transfer in self.transfers.by_tid.items():
            assert tid in transfer.source.transfers
            assert transfer.writing or transfer.state not in ENDED
            if transfer.state is State.TRANSFERRING:
                assert transfer.due or transfer.writing
        self.transfers.shelf.check(set(self.transfers.by_tid))


_DAY_S = 86_400.0


def _check_rows(transfer: Transfer, spans: tuple[tuple[int, int], ...]) -> None:
    """ProtocolError if a consumer says to have rows that the item has not."""
    Intervals.checked(spans, transfer.source.shape.rows)
