"""What the parts of a producer share: transfers, who they go to, what is to be done.

Pure; owned by the control thread. `Producer` begins transfers and offers their items, `Writing`
brings their rows; here is how they are found, and how they end.
"""

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

from vllm_kvpool.embeds.effects import Effect, Release, Send
from vllm_kvpool.embeds.limits import ProducerLimits
from vllm_kvpool.embeds.protocol import Code, Grant, Message, Unknown, Window, Withdraw
from vllm_kvpool.embeds.shelf import Shelf, Source
from vllm_kvpool.embeds.states import ENDED, PRODUCER_TABLE, SendEvent, State


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


class Transfers:
    """See the module docstring."""

    def __init__(self, limits: ProducerLimits) -> None:
        self.limits = limits
        self.shelf = Shelf(limits.retain_bytes, limits.max_gone, self._release)
        self.by_tid: dict[int, Transfer] = {}
        self.peers: OrderedDict[str, Peer] = OrderedDict()  # whose turn it is first
        self._by_target: dict[tuple[str, str], int] = {}  # item, and peer or endpoint
        self._ended: OrderedDict[tuple[str, int], Message | None] = OrderedDict()
        self._next_tid = 1
        self.pump_at: float | None = None  # something has happened since writes were last started
        self.effects: list[Effect] = []
        self.counts: defaultdict[str, float] = defaultdict(float)

    def say(self, peer: str, body: Message) -> None:
        """To an incarnation."""
        self.effects.append(Send(peer, body))

    def begin(self, source: Source, now: float, *, endpoint: str = "", peer: str = "") -> Transfer:
        """The transfer of an item to a target; the one there is, if there is."""
        for target in (peer, endpoint):
            tid = self._by_target.get((source.mm_hash, target)) if target else None
            if tid is not None:
                return self.by_tid[tid]
        transfer = Transfer(self._next_tid, source, now, endpoint, peer)
        self._next_tid += 1
        self.by_tid[transfer.tid] = transfer
        self.shelf.begin(source, transfer.tid)
        for target in (peer, endpoint):
            if target:
                self._by_target[(source.mm_hash, target)] = transfer.tid
        return transfer

    def redirected(self, transfer: Transfer, peer: str, now: float) -> Transfer | None:
        """What goes to a new incarnation from now on; None if that one has asked for it before."""
        mm_hash = transfer.source.mm_hash
        other = self._by_target.get((mm_hash, peer))
        if other is not None and other != transfer.tid:
            self.end(transfer, SendEvent.CANCEL, now)
            return None
        if transfer.state is not State.BOOTSTRAPPING:
            # Grants of who was there before may have the numbers of those to come.
            del self._by_target[(mm_hash, transfer.endpoint)]
            following = self.begin(transfer.source, now, endpoint=transfer.endpoint, peer=peer)
            self.end(transfer, SendEvent.CANCEL, now)
            return following
        self._by_target.pop((mm_hash, transfer.peer), None)
        transfer.peer, transfer.offered = peer, False
        self._by_target[(mm_hash, peer)] = transfer.tid
        return transfer

    def of(self, peer: str, tid: int) -> Transfer | None:
        """A transfer that this consumer may speak of."""
        transfer = self.by_tid.get(tid)
        if transfer is None or transfer.peer != peer or transfer.state in _NOT_TOLD:
            return None
        return transfer

    def say_ended(self, peer: str, tid: int) -> None:
        """Of a transfer that is not known any more nothing is in flight."""
        if tid in self.by_tid and self.by_tid[tid].peer == peer:
            return  # it ends when its write does, and says so then
        self.say(peer, self._ended.get((peer, tid)) or Unknown(tid, yours=False))

    def rest(self, transfer: Transfer) -> None:
        """Nothing of it is to be written now."""
        if transfer.state is State.TRANSFERRING and not transfer.due and not transfer.writing:
            transfer.state = PRODUCER_TABLE.after(transfer.state, SendEvent.WRITTEN)

    # Ends

    def end(self, transfer: Transfer, event: SendEvent, now: float) -> None:
        """However; it stays until its writes have ended."""
        transfer.state = PRODUCER_TABLE.after(transfer.state, event)
        transfer.due.clear()
        if event is SendEvent.TAKEN:
            self.shelf.note_taken(transfer.source, now)
            self.counts["items"] += 1
        for target in (transfer.peer, transfer.endpoint):
            if self._by_target.get((transfer.source.mm_hash, target)) == transfer.tid:
                del self._by_target[(transfer.source.mm_hash, target)]
        if not transfer.writing:
            self.bury(transfer, now)

    def bury(self, transfer: Transfer, now: float) -> None:
        """Nothing of an ended transfer is written any more."""
        if transfer.writing:
            return
        del self.by_tid[transfer.tid]
        self._ended[(transfer.peer, transfer.tid)] = transfer.last_word
        while len(self._ended) > self.limits.max_ended:
            self._ended.popitem(last=False)
        if transfer.last_word is not None and transfer.peer in self.peers:
            self.say(transfer.peer, transfer.last_word)
        self.shelf.end(transfer.source, transfer.tid, now)

    def drop_source(self, source: Source, now: float, code: Code, text: str) -> None:
        """Withdraw an item, whoever still wants it; it goes when nothing reads it any more."""
        self.shelf.forget(source)
        for tid in list(source.transfers):
            transfer = self.by_tid[tid]
            if transfer.state not in ENDED:
                transfer.last_word = Withdraw(tid, code, text)
                self.end(transfer, SendEvent.FAIL, now)

    def _release(self, sid: int) -> None:
        self.effects.append(Release(sid))


_NOT_TOLD = ENDED | {State.BOOTSTRAPPING}  # states of which the consumer knows nothing
