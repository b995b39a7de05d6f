"""Who offers an item, and who of them sends it (pure).

The first who offers an item writes it, the others stand by. Where the first is lost, or gives up,
the next goes on with what has arrived; where there is none the item is asked for again.
"""

from vllm_kvpool.embeds.asking import NOBODY_SENDS, Asking
from vllm_kvpool.embeds.desk import Desk
from vllm_kvpool.embeds.effects import Allocate, Tell
from vllm_kvpool.embeds.items import Item, Source
from vllm_kvpool.embeds.protocol import (
    Cancel,
    Code,
    ItemNews,
    NeedGrant,
    Offer,
    OfferAck,
    Unknown,
    Verdict,
    Withdraw,
)
from vllm_kvpool.embeds.rows import Intervals, ItemShape, checked_shape, runs_of
from vllm_kvpool.embeds.states import CONSUMER_TABLE, GrantEvent, GrantState, ItemEvent, State

OTHER_ENCODING = "the engine's other ranks have another encoding of this item"


class Offers:
    """See the module docstring."""

    def __init__(self, desk: Desk, asking: Asking) -> None:
        self._desk = desk
        self._sources = desk.sources
        self._asking = asking

    def offer(self, peer: str, told: Offer, now: float) -> None:
        """There is an item; ProtocolError if there can be no such one."""
        shape = checked_shape(told.shape)
        source = (peer, told.tid)
        if self._repeated(source):
            return
        item = self._desk.items.get(told.mm_hash)
        if item is not None and item.wanted_digest not in ("", told.digest):
            self._other_encoding(item, source, now)
            return
        refusal = self._refusal(shape, item)
        if refusal is not None:
            self._refuse(source, *refusal)
            self._unusable(item, *refusal, now)
            return
        if peer in self._asking.peers:
            self._asking.peers[peer].row_bytes = shape.row_bytes
        self._asking.recent.add(shape.rows)
        if item is None:
            item = self._desk.items[told.mm_hash] = Item(told.mm_hash, now)
        if item.state is State.SUCCESS:
            self._desk.counts["deduplicated"] += 1
            self._sources.close(source, OfferAck(told.tid, Verdict.HAVE))
            return
        self._replace_older(item, peer, now)
        if item.sources:
            self._follow(item, source, told)
            return
        self._begin(item, source, told, shape, now)
        self._desk.pump_at = now

    def _replace_older(self, item: Item, peer: str, now: float) -> None:
        """A producer has one transfer of an item: the one before has ended, and that was lost."""
        for source in [each for each in item.sources if each[0] == peer]:
            self._sources.close(source, Cancel(source[1], text="it is offered anew"))
            self._without_source(item, source, None, "", now)

    def _refusal(self, shape: ItemShape, item: Item | None) -> tuple[Code, str] | None:
        """Why an offer can never be taken."""
        most = self._desk.limits.max_item_bytes
        if shape.nbytes > most:
            return Code.TOO_LARGE, (
                f"{shape.rows} rows of {shape.row_bytes} bytes are {shape.nbytes} bytes; the "
                f"consumer's max_item_bytes is {most}"
            )
        if shape.row_bytes > self._desk.window.nbytes:
            return Code.ROW_TOO_LARGE, (
                f"a row has {shape.row_bytes} bytes; the consumer's arena_bytes is "
                f"{self._desk.window.nbytes}, and a row is not cut"
            )
        if item is not None and item.expected_rows not in (0, shape.rows):
            return Code.CONFLICT, (
                f"{shape.rows} rows are offered and the request has room for {item.expected_rows}: "
                "the two engines process this item in different ways"
            )
        if item is None and len(self._desk.items) >= self._desk.limits.max_items:
            count = self._desk.limits.max_items
            return Code.TOO_LARGE, f"the consumer knows of {count} items already"
        return None

    def _begin(self, item: Item, source: Source, told: Offer, shape: ItemShape, now: float) -> None:
        """The first offer of an item, or the first after whoever sent it was lost."""
        same = item.shape == shape and item.digest == told.digest
        if not same:
            self._desk.forget_rows(item)
        elif len(item.received):
            self._desk.counts["resumed_rows"] += len(item.received)
        item.shape, item.digest, item.aux = shape, told.digest, told.aux
        item.state = CONSUMER_TABLE.after(item.state, ItemEvent.OFFERED)
        item.since = item.idle_since = now
        self._sources.add(item, source, told)
        if not item.asked:
            self._desk.effects.append(Tell(ItemNews(item.mm_hash, rows=shape.rows, offered=True)))
        self._desk.tell_encoding(item)
        if item.admitted:
            self._desk.admission.activate(item)
        else:
            self._desk.admission.wait(item)
            self.let_in(now)
        verdict = Verdict.ACCEPTED if item.admitted else Verdict.QUEUED
        self._desk.say(source[0], OfferAck(source[1], verdict, item.received.spans))
        self._adopt_first(item, told, now)

    def _adopt_first(self, item: Item, told: Offer, now: float) -> None:
        """Rows granted before the item was known."""
        assert item.shape is not None
        for granted in list(item.live.values()):
            peer, tid = granted.source
            if tid:
                continue
            if peer != item.sources[0][0]:
                self._desk.revoke(granted, 0)  # its rows are the other one's now
                continue
            most = min(granted.rows, item.shape.rows)  # as the producer understands it
            _, rows = runs_of(0, most, granted.extents, item.shape.row_bytes)
            if not item.admitted or not rows or len(item.received):
                # It would hold a part of the window while it waits for memory of its own.
                self._desk.revoke(granted, told.tid)
                continue
            granted.source, granted.rows = item.sources[0], rows
            granted.generation, granted.digest = item.generation, item.digest
            item.state = CONSUMER_TABLE.after(item.state, ItemEvent.GRANTED)
            if told.first != granted.gid:
                self._desk.tell_grant(granted, now)

    def _follow(self, item: Item, source: Source, told: Offer) -> None:
        """Somebody else offers what is on its way: whoever sends it may still be lost."""
        if item.shape != told.shape:
            text = "another producer offers the same item in another shape"
            self._refuse(source, Code.CONFLICT, text)
            return
        self._desk.counts["deduplicated"] += 1
        self._sources.add(item, source, told)
        self._desk.say(source[0], OfferAck(source[1], Verdict.FOLLOW))

    def let_in(self, now: float) -> None:
        """Take memory for items, as far as there is any."""
        for item in self._desk.admission.let_in(now):
            assert item.shape is not None
            self._desk.effects.append(Allocate(item.mm_hash, item.shape))

    def keep_only(self, item: Item, digest: str) -> None:
        """Nobody who stands by with another encoding of an item is to send it."""
        for source in [each for each in item.sources[1:] if item.offers[each].digest != digest]:
            item.sources.remove(source)
            del item.offers[source]
            self._refuse(source, Code.CONFLICT, OTHER_ENCODING)

    def _other_encoding(self, item: Item, source: Source, now: float) -> None:
        """An offer of other bytes than the engine's other ranks have: of no use here."""
        self._refuse(source, Code.CONFLICT, OTHER_ENCODING)
        item.gone.add(source[0])
        if item.state in NOBODY_SENDS and self._asking.is_gone(item):
            text = "no encoder that is there has the encoding that the other ranks have"
            self._desk.fail(item, Code.GONE, text, now)

    def _refuse(self, source: Source, code: Code, text: str) -> None:
        self._desk.counts["refused"] += 1
        ack = OfferAck(source[1], Verdict.REFUSED, code=code, text=text)
        self._sources.close(source, ack)

    def _unusable(self, item: Item | None, code: Code, text: str, now: float) -> None:
        """An offer of what a request waits for can never be taken."""
        if item is not None and not item.sources and item.state in NOBODY_SENDS:
            self._desk.fail(item, code, text, now)

    def need_grant(self, peer: str, told: NeedGrant, now: float) -> None:
        """The producer waits: say again what holds."""
        if not self._repeated((peer, told.tid)):
            self._desk.say(peer, Unknown(told.tid, yours=True))

    def _repeated(self, source: Source) -> bool:
        """Answer again what was answered before; False if nothing was."""
        if self._sources.repeat_end(source):
            return True
        mm_hash = self._sources.item_of(source)
        if mm_hash is None:
            return False
        item = self._desk.items[mm_hash]
        if item.sources[0] != source:
            self._desk.say(source[0], OfferAck(source[1], Verdict.FOLLOW))
            return True
        verdict = Verdict.ACCEPTED if item.admitted else Verdict.QUEUED
        self._desk.say(source[0], OfferAck(source[1], verdict, item.received.spans))
        for granted in item.live.values():
            if granted.state is GrantState.GRANTED and granted.source == source:
                self._desk.say(source[0], self._desk.window.message(granted))
        return True

    # Those who offer no more

    def withdraw(self, peer: str, told: Withdraw, now: float) -> None:
        """The producer has given an item up; nothing of it is in flight."""
        self._desk.window.end_all(GrantEvent.QUIET, now, source=(peer, told.tid))
        mm_hash = self._sources.drop((peer, told.tid))
        if mm_hash is not None:
            self._without_source(
                self._desk.items[mm_hash], (peer, told.tid), told.code, told.text, now
            )
        self._desk.pump_at = now

    def lost(self, source: Source, now: float) -> None:
        mm_hash = self._sources.drop(source)
        if mm_hash is not None:
            self._without_source(self._desk.items[mm_hash], source, None, "", now)

    def give_up_first(self, item: Item, code: Code, text: str, now: float) -> None:
        """Another one goes on, or nobody."""
        source = item.sources[0]
        self._sources.close(source, Cancel(source[1], code, text))
        item.failures = item.corrupt = 0
        self._without_source(item, source, code, text, now)

    def _without_source(
        self, item: Item, source: Source, code: Code | None, text: str, now: float
    ) -> None:
        """One who offered the item is gone; `code` if it said that there is none."""
        was_writer = item.sources[0] == source
        item.sources.remove(source)
        del item.offers[source]
        if not was_writer:
            return
        for granted in [each for each in item.live.values() if each.source == source]:
            if granted.state is not GrantState.DRAINING:
                del item.live[granted.gid]
                self._desk.admission.look_for_gaps(item)
        if item.sources:
            self._go_on_with_next(item)
            return
        self._desk.admission.leave(item)
        if code is not None:
            self._desk.fail(item, code, text, now)
            return
        item.state = CONSUMER_TABLE.after(item.state, ItemEvent.LOST)
        item.since = now
        item.wanted_at = float("-inf")
        self._asking.want(item, now)

    def _go_on_with_next(self, item: Item) -> None:
        """A follower goes on where the writer was lost, if it has the same bytes; else anew."""
        self._desk.dry(item)
        peer, tid = item.sources[0]
        told = item.offers[(peer, tid)]
        if told.digest != item.digest:
            item.received = Intervals()
            item.digest = told.digest
            self._desk.tell_encoding(item)
        item.aux = told.aux
        self._desk.counts["resumed_rows"] += len(item.received)
        verdict = Verdict.ACCEPTED if item.admitted else Verdict.QUEUED
        self._desk.say(peer, OfferAck(tid, verdict, item.received.spans))
