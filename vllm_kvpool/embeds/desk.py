"""What the parts of a consumer share: items, the window, who offers what, what is to be done.

Pure; owned by the control thread. `Asking` asks for items, `Offers` lets those who have them in,
`Grants` lends them the window; here is what each of them may do to an item or a grant.
"""

from collections import defaultdict

from vllm_kvpool.embeds.admission import Admission
from vllm_kvpool.embeds.effects import Discard, Effect, Send, Tell
from vllm_kvpool.embeds.items import Granted, Item
from vllm_kvpool.embeds.lending import Lending
from vllm_kvpool.embeds.limits import ConsumerLimits
from vllm_kvpool.embeds.protocol import Cancel, Code, ItemNews, Message, Revoke
from vllm_kvpool.embeds.rows import Intervals
from vllm_kvpool.embeds.sources import Sources
from vllm_kvpool.embeds.states import (
    CONSUMER_TABLE,
    GRANT_TABLE,
    GrantEvent,
    GrantState,
    ItemEvent,
    State,
)


class Desk:
    """See the module docstring."""

    def __init__(self, arena_bytes: int, limits: ConsumerLimits) -> None:
        self.limits = limits
        self.window = Lending(
            arena_bytes,
            ttl_s=limits.grant_ttl_s,
            quarantine_s=limits.quarantine_s,
            ended=self._grant_ended,
        )
        self.items: dict[str, Item] = {}
        self.admission = Admission(self.items, limits.max_landing_bytes, limits.max_active)
        self.sources = Sources(limits.max_ended, self.say)
        self.pump_at: float | None = None  # something has happened since rows were last granted
        self.effects: list[Effect] = []
        self.counts: defaultdict[str, float] = defaultdict(float)

    # What is said

    def say(self, peer: str, body: Message) -> None:
        """To an incarnation."""
        self.effects.append(Send(peer, body))

    def tell_ready(self, item: Item) -> None:
        """The own scheduler hears that an item is there."""
        assert item.shape is not None
        self.effects.append(Tell(ItemNews(item.mm_hash, item.digest, item.shape.rows)))

    def tell_encoding(self, item: Item) -> None:
        """The own scheduler hears which encoding comes here, where other ranks may get another."""
        if self.limits.num_ranks > 1 and item.asked:
            assert item.shape is not None
            news = ItemNews(item.mm_hash, item.digest, item.shape.rows, offered=True)
            self.effects.append(Tell(news))

    def tell_grant(self, granted: Granted, now: float) -> None:
        """Its producer may write."""
        granted.told_at = now
        self.say(granted.source[0], self.window.message(granted))

    # Grants

    def revoke(self, granted: Granted, tid: int) -> None:
        """Call a grant back; `tid` is the transfer that knows of it."""
        granted.source = (granted.source[0], tid)
        granted.state = GRANT_TABLE.after(granted.state, GrantEvent.REVOKE)
        item = self.items.get(granted.mm_hash)
        if item is not None:
            item.live.pop(granted.gid, None)
            self.admission.look_for_gaps(item)
        self.say(granted.source[0], Revoke(tid, granted.gid))

    def _grant_ended(self, granted: Granted, now: float) -> None:
        item = self.items.get(granted.mm_hash)
        if item is not None:
            item.live.pop(granted.gid, None)
            item.idle_since = now
            self.admission.look_for_gaps(item)
        if granted.state is GrantState.QUARANTINED:
            nbytes = sum(extent.nbytes for extent in granted.extents)
            self.counts["quarantined_bytes"] += nbytes

    def dry(self, item: Item) -> None:
        """A grant of an item has ended, maybe its last one."""
        if item.state is State.TRANSFERRING and not item.live:
            item.state = CONSUMER_TABLE.after(item.state, ItemEvent.DRY)

    # Ends

    def fail(self, item: Item, code: Code, text: str, now: float) -> None:
        """An item cannot be had."""
        self.end(item, ItemEvent.FAIL, code, text, now)

    def end(self, item: Item, event: ItemEvent, code: Code, text: str, now: float) -> None:
        """An item ends without being used."""
        item.state = CONSUMER_TABLE.after(item.state, event)
        self.counts[f"ended_{code.value}"] += 1
        for source in list(item.sources):
            self.sources.close(source, Cancel(source[1], code, text))
        for granted in list(item.live.values()):
            if granted.state is GrantState.GRANTED:
                self.revoke(granted, granted.source[1])
        if event is ItemEvent.FAIL or not item.asked:
            self.effects.append(Tell(ItemNews(item.mm_hash, code=code, text=text)))
        self.drop(item)

    def drop(self, item: Item) -> None:
        """Nothing is known of it any more."""
        self.forget_rows(item)
        self.admission.leave(item)
        del self.items[item.mm_hash]

    def forget_rows(self, item: Item) -> None:
        """Give the memory back."""
        item.received = Intervals()
        for granted in [each for each in item.live.values() if each.source[1]]:
            del item.live[granted.gid]
        if item.admitted:
            self.admission.give_back(item)
            self.effects.append(Discard(item.mm_hash))
