"""What a producer does with the items it has encoded (pure; owned by the control thread).

A source is an item's rows in this process. A transfer brings it to one rank of a consumer: offered
when the source is there and a session is up, written as rows are granted, over when the consumer
has every row. Who is to have an item is said by the own scheduler (`push`) or by consumers
(`want`). Sources are kept while somebody still takes them, then as long as there is room.

Time is given to every method; what is to be done is left in `effects` until `take_effects`.
"""

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from itertools import pairwise

from vllm_kvpool.embeds.effects import Connect, Effect, Prepare, Release, Send, Write
from vllm_kvpool.embeds.limits import ProducerLimits
from vllm_kvpool.embeds.protocol import (
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
    Progress,
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
    Wrote,
)
from vllm_kvpool.embeds.rows import Intervals, ItemShape, runs_of
from vllm_kvpool.embeds.shelf import Shelf, Source
from vllm_kvpool.embeds.states import ENDED, PRODUCER_TABLE, SendEvent, State
from vllm_kvpool.embeds.wishes import Wishes

MIN_PATIENCE_S = 1.0  # a consumer of less only asks whether the item is here
START_SHARE = 0.5  # of the time a grant is good, the part in which its write may begin


@dataclass(slots=True)
class Transfer:
    """A source on its way to one rank of a consumer."""

    tid: int
    source: Source
    since: float  # the last news from the consumer
    endpoint: str = ""  # where the consumer is, if the own scheduler named it
    peer: str = ""  # its incarnation, while there is a session
    state: State = State.BOOTSTRAPPING
    results: OrderedDict[int, Message | None] = field(default_factory=OrderedDict)
    """What is to be said of each grant; None while it is due or under way."""
    due: deque[tuple[Grant, float]] = field(default_factory=deque)  # and until when it is good
    writing: dict[int, int] = field(default_factory=dict)  # grant -> bytes
    offered: bool = False  # and answered
    asked_at: float = float("-inf")
    first: int = 0  # the grant that came with the wish
    last_word: Message | None = None  # said when nothing is in flight any more


@dataclass(slots=True)
class Peer:
    """A consumer's rank that is there."""

    window: Window | None
    endpoints: frozenset[str]
    due: OrderedDict[int, None] = field(default_factory=OrderedDict)  # transfers, in turn


class Producer:
    """See the module docstring."""

    def __init__(self, limits: ProducerLimits) -> None:
        self._limits = limits
        self._shelf = Shelf(limits.retain_bytes, limits.max_gone, self._release)
        self._transfers: dict[int, Transfer] = {}
        self._by_target: dict[tuple[str, str], int] = {}  # item, and peer or endpoint
        self._peers: OrderedDict[str, Peer] = OrderedDict()  # whose turn it is first
        self._engines: dict[str, tuple[str, ...]] = {}  # endpoint -> those of all its ranks
        self._at: dict[str, str] = {}  # endpoint -> peer
        self._pushes: dict[str, dict[str, float]] = {}  # item -> endpoints, and until when
        self._wants = Wishes(limits.max_wants)
        self._ended: OrderedDict[tuple[str, int], Message | None] = OrderedDict()
        self._unsure: OrderedDict[tuple[str, int], WriteFailed] = OrderedDict()  # peer and grant
        self._next_tid = 1
        self._writing = 0
        self._writing_bytes = 0
        self._pump_at: float | None = None  # something has happened since writes were last started
        self.effects: list[Effect] = []
        self.counts: defaultdict[str, float] = defaultdict(float)

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order; writes start here, after all that has been said."""
        if self._pump_at is not None:
            now, self._pump_at = self._pump_at, None
            self._pump(now)
        effects, self.effects = self.effects, []
        return effects

    # What the own worker and scheduler say

    def produced(self, mm_hash: str, shape: ItemShape, aux: bytes, now: float) -> int:
        """An item has been encoded; its number, or 0 for one that is here already."""
        if mm_hash in self._shelf:
            return 0
        source = self._shelf.add(mm_hash, shape, aux, now)
        self.effects.append(Prepare(source.sid))
        return source.sid

    def prepared(self, sid: int, digest: str, now: float) -> None:
        """A source is in host memory. An empty digest says that it could not be brought there."""
        source = self._shelf.numbered(sid)
        source.readers -= 1
        if not self._shelf.holds(source):
            self._shelf.let_go(source)
            return
        if not digest:
            self._drop_source(source, now, Code.GONE, "the encoder's output could not be read")
            return
        source.digest, source.since = digest, now
        for endpoint in self._pushes.pop(source.mm_hash, {}):
            self._push_to(source, endpoint, now)
        for peer in self._wants.take(source.mm_hash):
            self._offer(self._begin(source, now, peer=peer), now)
        self._shelf.make_room()

    def push(self, told: Push, now: float) -> None:
        """An item that is about to be encoded, or here already, goes to these consumers."""
        for endpoint in told.endpoints:
            self.effects.append(Connect(endpoint))
            source = self._shelf.get(told.mm_hash)
            if source is not None and source.digest:
                self._push_to(source, endpoint, now)
            else:
                until = now + self._limits.waiting_timeout_s
                self._pushes.setdefault(told.mm_hash, {})[endpoint] = until

    def missing(self) -> set[str]:
        """Items that somebody waits for and that are not here: the engine may have them."""
        waited_for = self._wants.items | self._pushes.keys()
        return {mm_hash for mm_hash in waited_for if mm_hash not in self._shelf}

    def begin_epoch(self, now: float) -> None:
        """Nothing that was encoded before is sent."""
        for source in self._shelf:
            self._drop_source(source, now, Code.STALE, "the weights have changed")
        self._shelf.forget_what_was_here()

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
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = Peer(window, reached_at)
        known.window, known.endpoints = window, reached_at
        for endpoint in reached_at:
            self._at[endpoint] = peer
            self._engines[endpoint] = ranks or (endpoint,)
        for transfer in list(self._transfers.values()):
            if transfer.endpoint in reached_at:
                self._reach(transfer, peer, now)
            elif transfer.peer == peer and transfer.state is State.SUSPENDED:
                self._offer(transfer, now)
        for transfer in list(self._transfers.values()):
            if transfer.endpoint in reached_at and transfer.state not in ENDED:
                self._push_to(transfer.source, transfer.endpoint, now)

    def peer_lost(self, peer: str, now: float) -> None:
        """A consumer's rank is gone; it may come back as the same incarnation or another."""
        known = self._peers.pop(peer, None)
        if known is None:
            return
        for endpoint in known.endpoints:
            if self._at.get(endpoint) == peer:
                del self._at[endpoint]
        for transfer in [each for each in self._transfers.values() if each.peer == peer]:
            transfer.due.clear()
            transfer.results = OrderedDict(
                (gid, said) for gid, said in transfer.results.items() if gid in transfer.writing
            )
            if transfer.state in (State.WAITING, State.TRANSFERRING, State.PARTIAL):
                transfer.state = PRODUCER_TABLE.after(transfer.state, SendEvent.LOST)
                transfer.since, transfer.offered = now, False
        self._wants.drop_peer(peer)

    # What consumers say

    def want(self, peer: str, told: Want, now: float) -> None:
        """A consumer waits for an item."""
        source = self._shelf.get(told.mm_hash)
        first = told.first
        if source is not None and source.digest:
            transfer = self._begin(source, now, peer=peer)
            if first is not None and self._is_good(transfer, first):
                transfer.first = first.gid
                self._accept(transfer, first, now)
            self._offer(transfer, now)
            return
        is_coming = source is not None or told.mm_hash in self._pushes
        asks_only = told.patience_s < MIN_PATIENCE_S
        gone = not is_coming and (asks_only or self._shelf.was_here(told.mm_hash))
        if not gone:
            self._wants.add(told.mm_hash, peer, now + min(told.patience_s, _DAY_S))
        self._say(peer, WantAck(told.mm_hash, gone, first.gid if first else 0))

    def offer_ack(self, peer: str, told: OfferAck, now: float) -> None:
        """What the consumer makes of an offer, and which rows it has."""
        transfer = self._of(peer, told.tid)
        if transfer is None:
            return
        transfer.offered, transfer.since = True, now
        if told.verdict is Verdict.HAVE:
            self._end(transfer, SendEvent.TAKEN, now)
        elif told.verdict is Verdict.REFUSED:
            self.counts[f"refused_{told.code.value if told.code else 'unknown'}"] += 1
            self._end(transfer, SendEvent.FAIL, now)
        else:
            _check_rows(transfer, told.received)

    def grant(self, peer: str, told: Grant, now: float) -> None:
        """Rows may be written."""
        transfer = self._of(peer, told.tid)
        if transfer is None:
            self._say_ended(peer, told.tid)
            return
        transfer.since, transfer.offered = now, True
        if told.gid in transfer.results:
            said = transfer.results[told.gid]
            if said is not None:
                self._say(peer, said)
            return
        if not self._is_good(transfer, told):
            self.counts["bad_grants"] += 1
            said = WriteFailed(told.tid, told.gid, True, "the grant does not fit the item")
            self._note_result(transfer, told.gid, said)
            self._say(peer, said)
            return
        self._accept(transfer, told, now)
        self._pump_at = now

    def _is_good(self, transfer: Transfer, told: Grant) -> bool:
        """Whether a grant is of rows that the item has, in extents that the window has."""
        known = self._peers.get(transfer.peer)
        if known is None or known.window is None or told.gid in transfer.results:
            return False
        if not 0 < len(told.extents) <= MAX_EXTENTS:
            return False
        inside = all(
            0 <= extent.offset < extent.end <= known.window.nbytes for extent in told.extents
        )
        ends = sorted(told.extents)
        apart = all(low.end <= high.offset for low, high in pairwise(ends))
        shape = transfer.source.shape
        _, rows = runs_of(told.row, told.rows, told.extents, shape.row_bytes)
        return inside and apart and 0 <= told.row < shape.rows and rows > 0

    def _accept(self, transfer: Transfer, told: Grant, now: float) -> None:
        if transfer.state in (State.BOOTSTRAPPING, State.SUSPENDED):
            transfer.state = PRODUCER_TABLE.after(transfer.state, SendEvent.OFFER)
        transfer.state = PRODUCER_TABLE.after(transfer.state, SendEvent.GRANTED)
        self._note_result(transfer, told.gid, None)
        transfer.due.append((told, now + told.ttl_s * START_SHARE))
        self._peers[transfer.peer].due[transfer.tid] = None

    def revoke(self, peer: str, told: Revoke, now: float) -> None:
        """A grant is called back."""
        unsure = self._unsure.get((peer, told.gid))
        if unsure is not None:
            self._say(peer, unsure)
            return
        transfer = self._of(peer, told.tid or self._tid_of_first(peer, told.gid))
        if transfer is None and not told.tid:
            self._say(peer, RevokeAck(0, told.gid, Progress.NOT_STARTED))
            return
        if transfer is None:
            self._say_ended(peer, told.tid)
            return
        if told.gid in transfer.writing:
            self._say(peer, RevokeAck(told.tid, told.gid, Progress.IN_FLIGHT))
            return
        said = transfer.results.get(told.gid)
        if isinstance(said, Wrote):
            self._say(peer, RevokeAck(told.tid, told.gid, Progress.WROTE))
            self._say(peer, said)
            return
        # Also one that has not come yet: it will not be used when it does.
        transfer.due = deque(each for each in transfer.due if each[0].gid != told.gid)
        ack = RevokeAck(told.tid, told.gid, Progress.NOT_STARTED)
        self._note_result(transfer, told.gid, ack)
        self._say(peer, ack)
        self._rest(transfer)

    def _tid_of_first(self, peer: str, gid: int) -> int:
        """The transfer that uses a grant which came with a wish; 0 if none does."""
        found = (
            each.tid for each in self._transfers.values() if (each.peer, each.first) == (peer, gid)
        )
        return next(found, 0)

    def rows_ack(self, peer: str, told: RowsAck, now: float) -> None:
        """What became of a grant's rows."""
        transfer = self._of(peer, told.tid)
        if transfer is not None:
            transfer.since = now
            _check_rows(transfer, told.received)

    def complete(self, peer: str, told: Complete, now: float) -> None:
        """The consumer has every row."""
        transfer = self._of(peer, told.tid)
        if transfer is not None:
            self._end(transfer, SendEvent.TAKEN, now)

    def cancel(self, peer: str, told: Cancel, now: float) -> None:
        """The consumer does not want it any more."""
        transfer = self._of(peer, told.tid)
        if transfer is None:
            self._say_ended(peer, told.tid)
            return
        transfer.last_word = CancelAck(told.tid)
        self.counts[f"cancelled_{told.code.value}"] += 1
        self._end(transfer, SendEvent.CANCEL, now)

    def unknown(self, peer: str, told: Unknown, now: float) -> None:
        """The consumer does not know of the transfer: offer it again."""
        transfer = self._of(peer, told.tid)
        if transfer is not None:
            transfer.offered = False
            transfer.asked_at = float("-inf")

    # What writers say

    def written(self, tid: int, gid: int, result: Wrote | WriteFailed, now: float) -> None:
        """A write has ended, well or not."""
        transfer = self._transfers[tid]
        source = transfer.source
        source.readers -= 1
        self._writing -= 1
        self._writing_bytes -= transfer.writing.pop(gid)
        if isinstance(result, Wrote):
            self.counts["written_rows"] += result.rows
            self.counts["written_bytes"] += result.rows * source.shape.row_bytes
        else:
            self.counts["failed_writes"] += 1
        if gid in transfer.results:
            transfer.results[gid] = result
        is_unsure = isinstance(result, WriteFailed) and not result.quiesced
        if isinstance(result, WriteFailed) and is_unsure:
            self._unsure[(transfer.peer, gid)] = result
            while len(self._unsure) > self._limits.max_ended:
                self._unsure.popitem(last=False)
        if transfer.state in ENDED:
            if is_unsure and transfer.peer in self._peers:
                self._say(transfer.peer, result)  # before the last word, which says that it is over
            self._bury(transfer, now)
        else:
            if transfer.peer in self._peers:
                self._say(transfer.peer, result)
            self._rest(transfer)
        self._pump_at = now

    def _rest(self, transfer: Transfer) -> None:
        if transfer.state is State.TRANSFERRING and not transfer.due and not transfer.writing:
            transfer.state = PRODUCER_TABLE.after(transfer.state, SendEvent.WRITTEN)

    # Time

    def tick(self, now: float) -> None:
        """Whatever is due. Called often."""
        for transfer in list(self._transfers.values()):
            self._look_at(transfer, now)
        self._wants.drop_late(now)
        for mm_hash, targets in list(self._pushes.items()):
            for endpoint in [each for each, until in targets.items() if until < now]:
                del targets[endpoint]
            if not targets:
                del self._pushes[mm_hash]
        for source in self._shelf.too_old(now, self._limits.waiting_timeout_s):
            self.counts["never_taken"] += 1
            self._drop_source(source, now, Code.TIMEOUT, "nobody has taken it")
        self._shelf.make_room()
        self._pump_at = now

    def _look_at(self, transfer: Transfer, now: float) -> None:
        if transfer.state in ENDED:
            return
        if now - transfer.since > self._limits.waiting_timeout_s and not transfer.writing:
            self.counts["timeouts"] += 1
            text = f"no news for {now - transfer.since:.1f} s (waiting_timeout_s)"
            transfer.last_word = Withdraw(transfer.tid, Code.TIMEOUT, text)
            self._end(transfer, SendEvent.FAIL, now)
            return
        is_up = transfer.peer in self._peers
        is_idle = transfer.state in (State.WAITING, State.PARTIAL)
        if is_up and is_idle and now - transfer.asked_at > self._limits.repeat_s:
            if transfer.offered:
                transfer.asked_at = now
                self._say(transfer.peer, NeedGrant(transfer.tid))
            else:
                self._say_offer(transfer, now)

    # Beginning

    def _push_to(self, source: Source, endpoint: str, now: float) -> None:
        """A transfer to each rank of the engine that is reached there."""
        for rank in self._engines.get(endpoint, (endpoint,)):
            if rank != endpoint:
                self.effects.append(Connect(rank))
            transfer = self._begin(source, now, endpoint=rank, peer=self._at.get(rank, ""))
            self._offer(transfer, now)

    def _begin(self, source: Source, now: float, *, endpoint: str = "", peer: str = "") -> Transfer:
        """The transfer of an item to a target; the one there is, if there is."""
        for target in (peer, endpoint):
            tid = self._by_target.get((source.mm_hash, target)) if target else None
            if tid is not None:
                return self._transfers[tid]
        transfer = Transfer(self._next_tid, source, now, endpoint, peer)
        self._next_tid += 1
        self._transfers[transfer.tid] = transfer
        self._shelf.begin(source, transfer.tid)
        for target in (peer, endpoint):
            if target:
                self._by_target[(source.mm_hash, target)] = transfer.tid
        return transfer

    def _reach(self, transfer: Transfer, peer: str, now: float) -> None:
        """There is a session with whom a push goes to; maybe with a new incarnation."""
        if transfer.state in ENDED:
            return
        if transfer.peer != peer:
            other = self._by_target.get((transfer.source.mm_hash, peer))
            if other is not None and other != transfer.tid:
                self._end(transfer, SendEvent.CANCEL, now)  # that one wanted it before
                return
            self._by_target.pop((transfer.source.mm_hash, transfer.peer), None)
            transfer.peer, transfer.offered = peer, False
            self._by_target[(transfer.source.mm_hash, peer)] = transfer.tid
        self._offer(transfer, now)

    def _offer(self, transfer: Transfer, now: float) -> None:
        """Say that the item is there, if it can be said now."""
        is_there = bool(transfer.source.digest) and transfer.peer in self._peers
        if not is_there or transfer.state in ENDED:
            return
        if transfer.state in (State.BOOTSTRAPPING, State.SUSPENDED):
            transfer.state = PRODUCER_TABLE.after(transfer.state, SendEvent.OFFER)
        self._say_offer(transfer, now)
        self._pump_at = now

    def _say_offer(self, transfer: Transfer, now: float) -> None:
        source = transfer.source
        transfer.asked_at = now
        offer = Offer(
            transfer.tid, source.mm_hash, source.shape, source.digest, source.aux, transfer.first
        )
        self._say(transfer.peer, offer)

    # Writing

    def _pump(self, now: float) -> None:
        """Start writes: consumers in turn, of each its transfers in turn."""
        while self._may_write:
            peer = next((name for name, each in self._peers.items() if each.due), None)
            if peer is None:
                return
            self._peers.move_to_end(peer)
            known = self._peers[peer]
            tid, _ = known.due.popitem(last=False)
            transfer = self._transfers.get(tid)
            if transfer is None or not transfer.due or transfer.state in ENDED:
                continue
            told, until = transfer.due.popleft()
            if transfer.due:
                known.due[tid] = None
            if now > until:
                self._decline(transfer, told)
            else:
                self._write(transfer, told, known)

    @property
    def _may_write(self) -> bool:
        limits = self._limits
        is_small = self._writing_bytes < limits.small_bytes and self._writing < limits.max_writes
        return is_small or self._writing < limits.writers

    def _decline(self, transfer: Transfer, told: Grant) -> None:
        """So late that the memory may not be kept until the write has ended."""
        self.counts["late_grants"] += 1
        ack = RevokeAck(told.tid or transfer.tid, told.gid, Progress.NOT_STARTED)
        self._note_result(transfer, told.gid, ack)
        self._say(transfer.peer, ack)
        self._rest(transfer)

    def _write(self, transfer: Transfer, told: Grant, known: Peer) -> None:
        source = transfer.source
        most = min(told.rows, source.shape.rows - told.row)
        runs, rows = runs_of(told.row, most, told.extents, source.shape.row_bytes)
        assert known.window is not None
        nbytes = rows * source.shape.row_bytes
        self._writing += 1
        self._writing_bytes += nbytes
        source.readers += 1
        transfer.writing[told.gid] = nbytes
        self.effects.append(Write(transfer.tid, told.gid, source.sid, known.window, runs))

    def _note_result(self, transfer: Transfer, gid: int, said: Message | None) -> None:
        """Keep what is to be said of a grant, of the last ones."""
        transfer.results[gid] = said
        while len(transfer.results) > self._limits.max_results:
            oldest = next((gid for gid, each in transfer.results.items() if each is not None), None)
            if oldest is None:
                return
            del transfer.results[oldest]

    # Ends

    def _end(self, transfer: Transfer, event: SendEvent, now: float) -> None:
        transfer.state = PRODUCER_TABLE.after(transfer.state, event)
        transfer.due.clear()
        if event is SendEvent.TAKEN:
            self._shelf.note_taken(transfer.source, now)
            self.counts["items"] += 1
        for target in (transfer.peer, transfer.endpoint):
            if self._by_target.get((transfer.source.mm_hash, target)) == transfer.tid:
                del self._by_target[(transfer.source.mm_hash, target)]
        if not transfer.writing:
            self._bury(transfer, now)

    def _bury(self, transfer: Transfer, now: float) -> None:
        """Nothing of an ended transfer is written any more."""
        if transfer.writing:
            return
        del self._transfers[transfer.tid]
        self._ended[(transfer.peer, transfer.tid)] = transfer.last_word
        while len(self._ended) > self._limits.max_ended:
            self._ended.popitem(last=False)
        if transfer.last_word is not None and transfer.peer in self._peers:
            self._say(transfer.peer, transfer.last_word)
        self._shelf.end(transfer.source, transfer.tid, now)

    def _drop_source(self, source: Source, now: float, code: Code, text: str) -> None:
        """Withdraw an item, whoever still wants it; it goes when nothing reads it any more."""
        self._shelf.forget(source)
        for tid in list(source.transfers):
            transfer = self._transfers[tid]
            if transfer.state not in ENDED:
                transfer.last_word = Withdraw(tid, code, text)
                self._end(transfer, SendEvent.FAIL, now)

    def _release(self, sid: int) -> None:
        self.effects.append(Release(sid))

    def _of(self, peer: str, tid: int) -> Transfer | None:
        transfer = self._transfers.get(tid)
        if transfer is None or transfer.peer != peer or transfer.state in _NOT_TOLD:
            return None
        return transfer

    def _say_ended(self, peer: str, tid: int) -> None:
        """Of a transfer that is not known any more nothing is in flight."""
        if tid in self._transfers and self._transfers[tid].peer == peer:
            return  # it ends when its write does, and says so then
        self._say(peer, self._ended.get((peer, tid)) or Unknown(tid, yours=False))

    def _say(self, peer: str, body: Message) -> None:
        self.effects.append(Send(peer, body))

    # For whoever watches

    @property
    def held_bytes(self) -> int:
        """Of sources that somebody is still to take."""
        return self._shelf.held_bytes

    def gauges(self) -> dict[str, float]:
        """Levels."""
        return {
            "sources": len(self._shelf),
            "held_bytes": self.held_bytes,
            "transfers": len(self._transfers),
            "writes": self._writing,
        }

    def check(self) -> None:
        """What always holds; tests call it after each step."""
        assert self._writing == sum(len(each.writing) for each in self._transfers.values())
        assert self._writing_bytes == sum(
            sum(each.writing.values()) for each in self._transfers.values()
        )
        assert self._writing <= max(self._limits.writers, self._limits.max_writes)
        for tid, transfer in self._transfers.items():
            assert tid in transfer.source.transfers
            assert transfer.writing or transfer.state not in ENDED
            if transfer.state is State.TRANSFERRING:
                assert transfer.due or transfer.writing
        self._shelf.check(set(self._transfers))


_DAY_S = 86_400.0
_NOT_TOLD = ENDED | {State.BOOTSTRAPPING}  # states of which the consumer knows nothing


def _check_rows(transfer: Transfer, spans: tuple[tuple[int, int], ...]) -> None:
    """ProtocolError if a consumer says to have rows that the item has not."""
    Intervals.checked(spans, transfer.source.shape.rows)
