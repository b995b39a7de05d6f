"""What a consumer does with items: one for each of its ranks (pure; owned by the control thread).

The consumer decides which rows go where and owns the set of rows that have arrived; a producer only
proposes. An item is expected by requests, offered by producers, let in when there is memory for all
of it, then brought over window by window: granted, written, drained, granted again, from the first
missing row on. Whatever ends early leaves its rows; whoever offers the same bytes goes on there.

Time is given to every method; what is to be done is left in `effects` until `take_effects`.
"""

from collections import defaultdict

from vllm_kvpool.embeds import credit
from vllm_kvpool.embeds.admission import Admission
from vllm_kvpool.embeds.effects import (
    Allocate,
    Connect,
    Discard,
    Drain,
    Effect,
    Ready,
    Send,
    Tell,
)
from vllm_kvpool.embeds.items import Granted, Item, Peer, Source
from vllm_kvpool.embeds.lending import Lending
from vllm_kvpool.embeds.limits import ConsumerLimits
from vllm_kvpool.embeds.protocol import (
    Cancel,
    CancelAck,
    Code,
    Complete,
    Expect,
    Grant,
    ItemNews,
    Landing,
    Message,
    NeedGrant,
    Offer,
    OfferAck,
    Progress,
    Revoke,
    RevokeAck,
    RowsAck,
    Taken,
    Unknown,
    Verdict,
    Want,
    WantAck,
    Withdraw,
    WriteFailed,
    Wrote,
)
from vllm_kvpool.embeds.rows import Intervals, ItemShape, checked_shape, runs_of
from vllm_kvpool.embeds.sources import Sources
from vllm_kvpool.embeds.states import (
    CONSUMER_TABLE,
    GRANT_TABLE,
    GrantEvent,
    GrantState,
    ItemEvent,
    State,
)


class Consumer:
    """See the module docstring."""

    def __init__(self, arena_bytes: int, limits: ConsumerLimits) -> None:
        self._limits = limits
        self._window = Lending(
            arena_bytes,
            ttl_s=limits.grant_ttl_s,
            quarantine_s=limits.quarantine_s,
            ended=self._grant_ended,
        )
        self._recent = credit.RecentRows()
        self._items: dict[str, Item] = {}
        self._admission = Admission(self._items, limits.max_landing_bytes, limits.max_active)
        self._sources = Sources(limits.max_ended, self._say)
        self._peers: dict[str, Peer] = {}
        self._pump_at: float | None = None  # something has happened since rows were last granted
        self.effects: list[Effect] = []
        self.counts: defaultdict[str, float] = defaultdict(float)

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order; rows are granted here, once for all that has happened."""
        if self._pump_at is not None:
            now, self._pump_at = self._pump_at, None
            self._pump(now)
        effects, self.effects = self.effects, []
        return effects

    # What the own scheduler and worker say

    def expect(self, told: Expect, now: float) -> None:
        """A request waits for an item."""
        item = self._items.get(told.mm_hash)
        if item is None:
            item = self._items[told.mm_hash] = Item(told.mm_hash, now)
        was_asked = item.asked
        item.order = min(item.order, told.order) if was_asked else told.order
        self._admission.reorder(item, was_asked)
        item.patience_s = max(item.patience_s, told.patience_s)
        item.peers |= frozenset(told.peers)
        item.expected_rows = told.rows or item.expected_rows
        item.gone.clear()
        if not was_asked:
            item.since = now
        self.effects += [Connect(endpoint) for endpoint in told.peers]
        if not self._rows_match(item):
            self._fail(item, Code.CONFLICT, self._mismatch(item), now)
            return
        if item.state is State.SUCCESS:
            self._tell_ready(item)
            return
        if told.is_pushed and not told.peers:
            item.wanted_at = now
        self._want(item, now)
        self._pump_at = now

    def forget(self, mm_hash: str, now: float) -> None:
        """No request waits for it any more."""
        item = self._items.get(mm_hash)
        if item is not None and item.asked:
            self._end(item, ItemEvent.CANCEL, Code.CANCELLED, "nobody wants it any more", now)
            self._pump_at = now

    def taken(self, mm_hash: str, now: float) -> None:
        """The engine has the item's tensors now; they are not ours any more."""
        self.effects.append(Tell(Taken(mm_hash)))
        item = self._items.get(mm_hash)
        if item is not None and item.state is State.SUCCESS:
            self._drop(item)
            self._pump_at = now

    def begin_epoch(self, now: float) -> None:
        """Nothing that was encoded before is used."""
        for item in list(self._items.values()):
            if item.state is not State.BOOTSTRAPPING:
                self._end(item, ItemEvent.FAIL, Code.STALE, "the weights have changed", now)

    # What sessions say

    def peer_up(self, peer: str, endpoints: frozenset[str], now: float) -> None:
        """A producer is there, at any of these endpoints."""
        known = self._peers.get(peer)
        self._peers[peer] = Peer(endpoints, known.row_bytes if known is not None else 0)
        for granted in self._window.doubtful(now):
            granted.told_at = float("-inf")
        self._ask_of_doubtful(now)
        for item in list(self._items.values()):
            item.wanted_at = float("-inf")
            self._want(item, now, only=peer)

    def peer_lost(self, peer: str, now: float, *, quiet: bool = False) -> None:
        """It is gone; what it was to write may still arrive, unless `quiet`."""
        self._peers.pop(peer, None)
        self._window.end_all_of(peer, now, quiet=quiet)
        for source in self._sources.of_peer(peer):
            self._source_lost(source, now)
        self._sources.forget_ends_of(peer)
        self._pump_at = now

    # What producers say

    def offer(self, peer: str, told: Offer, now: float) -> None:
        """There is an item; ProtocolError if there can be no such one."""
        shape = checked_shape(told.shape)
        source = (peer, told.tid)
        if self._repeated(source):
            return
        item = self._items.get(told.mm_hash)
        refusal = self._refusal(shape, item)
        if refusal is not None:
            self._refuse(source, *refusal)
            self._unusable(item, *refusal, now)
            return
        if peer in self._peers:
            self._peers[peer].row_bytes = shape.row_bytes
        self._recent.add(shape.rows)
        if item is None:
            item = self._items[told.mm_hash] = Item(told.mm_hash, now)
        if item.state is State.SUCCESS:
            self.counts["deduplicated"] += 1
            self._sources.close(source, OfferAck(told.tid, Verdict.HAVE))
            return
        if item.sources:
            self._follow(item, source, told)
            return
        self._begin(item, source, told, shape, now)
        self._pump_at = now

    def _refusal(self, shape: ItemShape, item: Item | None) -> tuple[Code, str] | None:
        """Why an offer can never be taken."""
        most = self._limits.max_item_bytes
        if shape.nbytes > most:
            return Code.TOO_LARGE, (
                f"{shape.rows} rows of {shape.row_bytes} bytes are {shape.nbytes} bytes; the "
                f"consumer's max_item_bytes is {most}"
            )
        if shape.row_bytes > self._window.nbytes:
            return Code.ROW_TOO_LARGE, (
                f"a row has {shape.row_bytes} bytes; the consumer's arena_bytes is "
                f"{self._window.nbytes}, and a row is not cut"
            )
        if item is not None and item.expected_rows not in (0, shape.rows):
            return Code.CONFLICT, (
                f"{shape.rows} rows are offered and the request has room for {item.expected_rows}: "
                "the two engines process this item in different ways"
            )
        if item is None and len(self._items) >= self._limits.max_items:
            return Code.TOO_LARGE, f"the consumer knows of {self._limits.max_items} items already"
        return None

    def _begin(self, item: Item, source: Source, told: Offer, shape: ItemShape, now: float) -> None:
        """The first offer of an item, or the first after whoever sent it was lost."""
        same = item.shape == shape and item.digest == told.digest
        if not same:
            self._forget_rows(item)
        elif len(item.received):
            self.counts["resumed_rows"] += len(item.received)
        item.shape, item.digest, item.aux = shape, told.digest, told.aux
        item.state = CONSUMER_TABLE.after(item.state, ItemEvent.OFFERED)
        item.since = item.idle_since = now
        self._sources.add(item, source, told)
        if not item.asked:
            self.effects.append(Tell(ItemNews(item.mm_hash, rows=shape.rows, offered=True)))
        if item.admitted:
            self._admission.activate(item)
        else:
            self._admission.wait(item)
            self._let_in(now)
        verdict = Verdict.ACCEPTED if item.admitted else Verdict.QUEUED
        self._say(source[0], OfferAck(source[1], verdict, item.received.spans))
        self._adopt_first(item, told, now)

    def _adopt_first(self, item: Item, told: Offer, now: float) -> None:
        """Rows granted before the item was known."""
        assert item.shape is not None
        for granted in list(item.live.values()):
            if granted.source != (item.sources[0][0], 0):
                continue
            _, rows = runs_of(0, item.shape.rows, granted.extents, item.shape.row_bytes)
            if not item.admitted or not rows or len(item.received):
                # It would hold a part of the window while it waits for memory of its own.
                self._revoke(granted, told.tid)
                continue
            granted.source, granted.rows = item.sources[0], rows
            granted.generation, granted.digest = item.generation, item.digest
            item.state = CONSUMER_TABLE.after(item.state, ItemEvent.GRANTED)
            if told.first != granted.gid:
                self._tell_grant(granted, now)

    def _revoke(self, granted: Granted, tid: int) -> None:
        granted.source = (granted.source[0], tid)
        granted.state = GRANT_TABLE.after(granted.state, GrantEvent.REVOKE)
        item = self._items.get(granted.mm_hash)
        if item is not None:
            item.live.pop(granted.gid, None)
            self._admission.look_for_gaps(item)
        self._say(granted.source[0], Revoke(tid, granted.gid))

    def _follow(self, item: Item, source: Source, told: Offer) -> None:
        """Somebody else offers what is on its way: whoever sends it may still be lost."""
        if item.shape != told.shape:
            text = "another producer offers the same item in another shape"
            self._refuse(source, Code.CONFLICT, text)
            return
        self.counts["deduplicated"] += 1
        self._sources.add(item, source, told)
        self._say(source[0], OfferAck(source[1], Verdict.FOLLOW))

    def want_ack(self, peer: str, told: WantAck, now: float) -> None:
        """A peer does not have it now, and maybe never will again."""
        granted = self._window.of((peer, 0), told.declined)
        if granted is not None:
            self._window.end(granted, GrantEvent.QUIET, now)
            self._pump_at = now
        item = self._items.get(told.mm_hash)
        if item is None or item.state is not State.BOOTSTRAPPING or not told.gone:
            return
        item.gone.add(peer)
        if item.gone >= set(self._asked_of(item)):
            text = "nobody keeps it any more; send the request to an encoder again"
            self._fail(item, Code.GONE, text, now)

    def wrote(self, peer: str, told: Wrote, now: float) -> None:
        """The rows of a grant are in the window."""
        granted = self._window.of((peer, told.tid), told.gid)
        if granted is None:
            if self._window.cleared((peer, told.tid), told.gid):
                self._pump_at = now
            self._answer_late(peer, told)
            return
        if granted.state is GrantState.DRAINING:
            return
        item = self._items.get(granted.mm_hash)
        if item is None or granted.gid not in item.live or not item.admitted:
            self._window.end(granted, GrantEvent.QUIET, now)
            self._answer_late(peer, told)
            self._pump_at = now
            return
        assert item.shape is not None
        runs, rows = granted.runs, granted.rows
        if not runs or told.rows != rows:
            runs, rows = runs_of(granted.row, told.rows, granted.extents, item.shape.row_bytes)
        fits = told.row == granted.row and rows == told.rows <= granted.rows
        if not rows or not fits or len(runs) != len(told.digests):
            self._window.end(granted, GrantEvent.UNSURE, now)
            self._bad_rows(item, granted, now)
            self._pump_at = now
            return
        granted.rows, granted.runs = told.rows, runs
        granted.state = GRANT_TABLE.after(granted.state, GrantEvent.WROTE)
        self.effects.append(Drain(granted.gid, item.mm_hash, runs, told.digests))

    def _answer_late(self, peer: str, told: Wrote) -> None:
        """A grant that has ended: its rows may be here, or have not been used."""
        mm_hash = self._sources.item_of((peer, told.tid))
        if mm_hash is None:
            if not self._sources.repeat_end((peer, told.tid)):
                self._say(peer, Unknown(told.tid, yours=True))
            return
        received = self._items[mm_hash].received
        is_here = received.holds(told.row, told.row + told.rows)
        landing = Landing.OK if is_here else Landing.STALE
        self.counts["late_writes"] += 1
        self._say(peer, RowsAck(told.tid, told.gid, landing, received.spans))

    def drained(self, gid: int, same: bool, now: float) -> None:
        """A grant's rows have been copied; `same` if they are what was sent."""
        granted = self._window[gid]
        self._window.end(granted, GrantEvent.DRAINED if same else GrantEvent.CORRUPT, now)
        item = self._items.get(granted.mm_hash)
        # Its rows are of use if they went to the memory that the item has now, and are of what it
        # is now: its sender may be gone.
        if item is not None and self._is_current(item, granted):
            if same:
                self._add_rows(item, granted, now)
            else:
                self._bad_rows(item, granted, now)
        elif item is not None:
            self._dry(item)
        self._pump_at = now

    def _is_current(self, item: Item, granted: Granted) -> bool:
        return (
            item.state is not State.SUCCESS
            and item.admitted
            and (item.generation, item.digest) == (granted.generation, granted.digest)
        )

    def _add_rows(self, item: Item, granted: Granted, now: float) -> None:
        assert item.shape is not None
        item.received = item.received.with_rows(granted.row, granted.row + granted.rows)
        item.since, item.failures = now, 0
        self.counts["rounds"] += 1
        self.counts["rows"] += granted.rows
        self.counts["bytes"] += granted.rows * item.shape.row_bytes
        is_full = len(item.received) == item.shape.rows
        if granted.source in self._sources and not is_full:
            peer, tid = granted.source
            self._say(peer, RowsAck(tid, granted.gid, Landing.OK, item.received.spans))
        if is_full:
            self._fill(item)
        elif item.state is State.TRANSFERRING and not item.live:
            item.state = CONSUMER_TABLE.after(item.state, ItemEvent.DRY)
        elif item.state is not State.PARTIAL:
            item.state = CONSUMER_TABLE.after(item.state, ItemEvent.LANDED)

    def _fill(self, item: Item) -> None:
        item.state = CONSUMER_TABLE.after(item.state, ItemEvent.FILLED)
        self._admission.deactivate(item)
        assert not item.live, "rows are granted to one only"
        for source in list(item.sources):
            self._sources.close(source, Complete(source[1]))
        item.sources.clear()
        item.offers.clear()
        self.counts["items"] += 1
        self.effects.append(Ready(item.mm_hash))
        if item.asked:
            self._tell_ready(item)

    def _bad_rows(self, item: Item, granted: Granted, now: float) -> None:
        """What arrived is not what was sent."""
        self.counts["corrupt_rows"] += granted.rows
        peer, tid = granted.source
        if granted.source in item.sources:
            item.corrupt += 1
            self._say(peer, RowsAck(tid, granted.gid, Landing.CORRUPT, item.received.spans))
        if item.corrupt > self._limits.max_corrupt:
            self._give_up_source(item, Code.CORRUPT, "rows arrive damaged, again and again", now)
        else:
            self._dry(item)

    def write_failed(self, peer: str, told: WriteFailed, now: float) -> None:
        """A grant's rows are not in the window."""
        source = (peer, told.tid)
        granted = self._window.of(source, told.gid)
        if granted is None:
            if not told.quiesced:
                self._window.forget_doubt(source, told.gid)
            elif self._window.cleared(source, told.gid):
                self._pump_at = now
            return
        if granted.state is GrantState.DRAINING:
            return
        self.counts["failed_writes"] += 1
        self._window.end(granted, GrantEvent.QUIET if told.quiesced else GrantEvent.UNSURE, now)
        item = self._items.get(granted.mm_hash)
        if item is not None and granted.source in item.sources:
            item.failures += 1
            pause = self._limits.backoff_s * 2 ** min(item.failures, 8)
            item.retry_at = now + min(pause, self._limits.max_backoff_s)
            if item.failures > self._limits.max_failures:
                self._give_up_source(item, Code.WRITE, told.text, now)
            else:
                self._dry(item)
        self._pump_at = now

    def revoke_ack(self, peer: str, told: RevokeAck, now: float) -> None:
        """How far the producer is with a grant that was called back."""
        granted = self._window.of((peer, told.tid), told.gid)
        if granted is None and told.progress is not Progress.IN_FLIGHT:
            if self._window.cleared((peer, told.tid), told.gid):
                self._pump_at = now
            return
        is_over = told.progress is Progress.NOT_STARTED or (
            # Of a grant made before there was a transfer nothing else is told.
            told.progress is Progress.WROTE and not told.tid
        )
        if granted is None or not is_over:
            return  # else its end will be told
        if granted.state is not GrantState.DRAINING:
            self._window.end(granted, GrantEvent.QUIET, now)
            self._pump_at = now

    def cancel_ack(self, peer: str, told: CancelAck, now: float) -> None:
        """Nothing of a transfer is written from now on."""
        self._window.end_all(GrantEvent.QUIET, now, source=(peer, told.tid))
        self._pump_at = now

    def withdraw(self, peer: str, told: Withdraw, now: float) -> None:
        """The producer has given an item up; nothing of it is in flight."""
        self._window.end_all(GrantEvent.QUIET, now, source=(peer, told.tid))
        mm_hash = self._sources.drop((peer, told.tid))
        if mm_hash is not None:
            self._without_source(self._items[mm_hash], (peer, told.tid), told.code, told.text, now)
        self._pump_at = now

    def unknown(self, peer: str, told: Unknown, now: float) -> None:
        """The producer knows of no such transfer, so it writes nothing of it."""
        self._window.end_all(GrantEvent.QUIET, now, source=(peer, told.tid))
        self._source_lost((peer, told.tid), now)
        self._pump_at = now

    def need_grant(self, peer: str, told: NeedGrant, now: float) -> None:
        """The producer waits: say again what holds."""
        if not self._repeated((peer, told.tid)):
            self._say(peer, Unknown(told.tid, yours=True))

    def _repeated(self, source: Source) -> bool:
        """Answer again what was answered before; False if nothing was."""
        if self._sources.repeat_end(source):
            return True
        mm_hash = self._sources.item_of(source)
        if mm_hash is None:
            return False
        item = self._items[mm_hash]
        if item.sources[0] != source:
            self._say(source[0], OfferAck(source[1], Verdict.FOLLOW))
            return True
        verdict = Verdict.ACCEPTED if item.admitted else Verdict.QUEUED
        self._say(source[0], OfferAck(source[1], verdict, item.received.spans))
        for granted in item.live.values():
            if granted.state is GrantState.GRANTED and granted.source == source:
                self._say(source[0], self._window.message(granted))
        return True

    # Time

    def tick(self, now: float) -> None:
        """Whatever is due. Called often."""
        self._window.tick(now)
        self._ask_of_doubtful(now)
        for granted in self._window:
            self._look_at_grant(granted, now)
        for item in list(self._items.values()):
            self._look_at_item(item, now)
        self._pump_at = now

    def _look_at_grant(self, granted: Granted, now: float) -> None:
        if granted.state is GrantState.DRAINING:
            return
        if now - granted.at > self._limits.grant_ttl_s:
            self.counts["expired_grants"] += 1
            self._window.doubt(granted, now)
            item = self._items.get(granted.mm_hash)
            if item is not None:
                self._dry(item)
        elif now - granted.told_at > self._limits.repeat_s:
            granted.told_at = now
            peer, tid = granted.source
            if granted.state is GrantState.REVOKED:
                self._say(peer, Revoke(tid, granted.gid))
            elif tid:
                self._say(peer, self._window.message(granted))

    def _look_at_item(self, item: Item, now: float) -> None:
        limits, waited = self._limits, now - item.since
        if item.state is State.SUCCESS:
            if not item.asked and waited > limits.waiting_timeout_s:
                self.counts["never_asked_for"] += 1
                self._end(item, ItemEvent.CANCEL, Code.TIMEOUT, "no request came", now)
        elif item.state is State.BOOTSTRAPPING:
            if waited > (item.patience_s or limits.bootstrap_timeout_s):
                text = f"nobody has offered it within {waited:.1f} s (bootstrap_timeout_s)"
                self._fail(item, Code.TIMEOUT, text, now)
            else:
                self._want(item, now)
        elif waited > limits.waiting_timeout_s and (item.asked or item.state is State.SUSPENDED):
            text = f"{len(item.received)} rows are here, none for {waited:.1f} s "
            self._fail(item, Code.TIMEOUT, text + "(waiting_timeout_s)", now)
        elif item.state is State.SUSPENDED:
            self._want(item, now)

    # Letting in and granting

    def _pump(self, now: float) -> None:
        self._let_in(now)
        if self._window.has_room:
            for item in self._admission.short():
                if not self._grant_all(item, now):
                    break

    def _let_in(self, now: float) -> None:
        for item in self._admission.let_in(now):
            assert item.shape is not None
            self.effects.append(Allocate(item.mm_hash, item.shape))

    def _grant_all(self, item: Item, now: float) -> bool:
        """Grant what the item lacks; False if the window has no more."""
        assert item.shape is not None
        while len(item.live) < credit.WINDOWS_IN_FLIGHT and now >= item.retry_at:
            if item.num_covered == item.shape.rows:
                self._admission.has_all(item)
                return True
            gap = next(item.covered().gaps(item.shape.rows), None)
            if gap is None:
                return True
            if not self._grant(item, *gap, now):
                return False
        return True

    def _grant(self, item: Item, row: int, end: int, now: float) -> bool:
        assert item.shape is not None
        row_bytes = item.shape.row_bytes
        share = credit.window_bytes(self._window.nbytes, self._admission.num_active) // row_bytes
        rows = min(end - row, self._limits.default_allocate_tokens, max(1, share))
        extents = self._window.take(rows, row_bytes)
        if not extents:
            return False
        runs, rows = runs_of(row, rows, extents, row_bytes)
        if not item.live:
            self.counts["window_wait_s"] += now - item.idle_since
        granted = self._window.lend(item, item.sources[0], row, rows, extents, now)
        granted.runs = runs
        item.state = CONSUMER_TABLE.after(item.state, ItemEvent.GRANTED)
        self._say(item.sources[0][0], self._window.message(granted))
        return True

    def _tell_grant(self, granted: Granted, now: float) -> None:
        granted.told_at = now
        self._say(granted.source[0], self._window.message(granted))

    def _want(self, item: Item, now: float, only: str | None = None) -> None:
        """Ask for an item that nobody sends."""
        is_due = now - item.wanted_at > self._limits.repeat_s
        if not item.asked or not is_due or item.state not in _NOBODY_SENDS:
            return
        patience = item.patience_s or self._limits.bootstrap_timeout_s
        for peer in self._asked_of(item):
            if only is None or peer == only:
                self._say(peer, Want(item.mm_hash, patience, self._first_grant(item, peer, now)))
        if only is None:
            item.wanted_at = now

    def _asked_of(self, item: Item) -> list[str]:
        return [
            peer
            for peer, known in self._peers.items()
            if not item.peers or item.peers & known.endpoints
        ]

    def _first_grant(self, item: Item, peer: str, now: float) -> Grant | None:
        """Rows before the length is known, where the size of a row is."""
        row_bytes = self._peers[peer].row_bytes
        early = next(iter(item.live.values()), None)
        if early is not None and early.source == (peer, 0):
            return self._window.message(early)
        if item.state is not State.BOOTSTRAPPING or early is not None or not row_bytes:
            return None
        share = (
            credit.window_bytes(self._window.nbytes, self._admission.num_active + 1) // row_bytes
        )
        rows = min(self._recent.first_grant(self._limits.default_allocate_tokens), share)
        if item.expected_rows:
            rows = min(rows, item.expected_rows)
        extents = self._window.take(rows, row_bytes) if rows else ()
        if not extents:
            return None
        rows = sum(extent.nbytes // row_bytes for extent in extents)
        return self._window.message(self._window.lend(item, (peer, 0), 0, rows, extents, now))

    # Ends

    def _grant_ended(self, granted: Granted, now: float) -> None:
        item = self._items.get(granted.mm_hash)
        if item is not None:
            item.live.pop(granted.gid, None)
            item.idle_since = now
            self._admission.look_for_gaps(item)
        if granted.state is GrantState.QUARANTINED:
            nbytes = sum(extent.nbytes for extent in granted.extents)
            self.counts["quarantined_bytes"] += nbytes

    def _ask_of_doubtful(self, now: float) -> None:
        """What may still be written is asked of who may still write it, once it is back."""
        for granted in self._window.doubtful(now):
            peer, tid = granted.source
            if peer in self._peers and now - granted.told_at > self._limits.repeat_s:
                granted.told_at = now
                self._say(peer, Revoke(tid, granted.gid))

    def _dry(self, item: Item) -> None:
        if item.state is State.TRANSFERRING and not item.live:
            item.state = CONSUMER_TABLE.after(item.state, ItemEvent.DRY)

    def _source_lost(self, source: Source, now: float) -> None:
        mm_hash = self._sources.drop(source)
        if mm_hash is not None:
            self._without_source(self._items[mm_hash], source, None, "", now)

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
        if item.sources:
            self._go_on_with_next(item)
            return
        self._admission.leave(item)
        if code is not None:
            self._fail(item, code, text, now)
            return
        item.state = CONSUMER_TABLE.after(item.state, ItemEvent.LOST)
        item.since = now
        item.wanted_at = float("-inf")
        self._want(item, now)

    def _go_on_with_next(self, item: Item) -> None:
        """A follower goes on where the writer was lost, if it has the same bytes; else anew."""
        self._dry(item)
        peer, tid = item.sources[0]
        told = item.offers[(peer, tid)]
        if told.digest != item.digest:
            item.received = Intervals()
            item.digest = told.digest
        item.aux = told.aux
        self.counts["resumed_rows"] += len(item.received)
        verdict = Verdict.ACCEPTED if item.admitted else Verdict.QUEUED
        self._say(peer, OfferAck(tid, verdict, item.received.spans))

    def _give_up_source(self, item: Item, code: Code, text: str, now: float) -> None:
        """Another one goes on, or nobody."""
        source = item.sources[0]
        self._sources.close(source, Cancel(source[1], code, text))
        item.failures = item.corrupt = 0
        self._without_source(item, source, code, text, now)

    def _refuse(self, source: Source, code: Code, text: str) -> None:
        self.counts["refused"] += 1
        ack = OfferAck(source[1], Verdict.REFUSED, code=code, text=text)
        self._sources.close(source, ack)

    def _unusable(self, item: Item | None, code: Code, text: str, now: float) -> None:
        """An offer of what a request waits for can never be taken."""
        if item is not None and not item.sources and item.state in _NOBODY_SENDS:
            self._fail(item, code, text, now)

    def _rows_match(self, item: Item) -> bool:
        return item.shape is None or item.expected_rows in (0, item.shape.rows)

    def _mismatch(self, item: Item) -> str:
        rows = item.shape.rows if item.shape is not None else 0
        return f"{rows} rows were offered and the request has room for {item.expected_rows}"

    def _fail(self, item: Item, code: Code, text: str, now: float) -> None:
        self._end(item, ItemEvent.FAIL, code, text, now)

    def _end(self, item: Item, event: ItemEvent, code: Code, text: str, now: float) -> None:
        """An item ends without being used."""
        item.state = CONSUMER_TABLE.after(item.state, event)
        self.counts[f"ended_{code.value}"] += 1
        for source in list(item.sources):
            self._sources.close(source, Cancel(source[1], code, text))
        for granted in list(item.live.values()):
            if granted.state is GrantState.GRANTED:
                self._revoke(granted, granted.source[1])
        if event is ItemEvent.FAIL or not item.asked:
            self.effects.append(Tell(ItemNews(item.mm_hash, code=code, text=text)))
        self._drop(item)

    def _drop(self, item: Item) -> None:
        self._forget_rows(item)
        self._admission.leave(item)
        del self._items[item.mm_hash]

    def _forget_rows(self, item: Item) -> None:
        """Give the memory back."""
        item.received = Intervals()
        for granted in [each for each in item.live.values() if each.source[1]]:
            del item.live[granted.gid]
        if item.admitted:
            self._admission.give_back(item)
            self.effects.append(Discard(item.mm_hash))

    def _tell_ready(self, item: Item) -> None:
        assert item.shape is not None
        self.effects.append(Tell(ItemNews(item.mm_hash, item.digest, item.shape.rows)))

    def _say(self, peer: str, body: Message) -> None:
        self.effects.append(Send(peer, body))

    # For whoever watches

    def gauges(self) -> dict[str, float]:
        """Levels."""
        return {
            "items": len(self._items),
            **self._admission.gauges(),
            **self._window.gauges(),
        }

    def story(self, mm_hash: str) -> str:
        """One line about an item."""
        item = self._items.get(mm_hash)
        if item is None:
            return f"{mm_hash}: not known"
        rows = item.shape.rows if item.shape is not None else "?"
        return (
            f"{mm_hash}: {item.state.value}, {len(item.received)} of {rows} rows, "
            f"{len(item.live)} grants, {len(item.sources)} sources"
        )

    def check(self) -> None:
        """What always holds; tests call it after each step."""
        self._window.check()
        for mm_hash, item in self._items.items():
            shape = item.shape
            assert all(self._window[gid].mm_hash == mm_hash for gid in item.live)
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
        self._admission.check()
        self._sources.check(self._items)


_NOBODY_SENDS = frozenset((State.BOOTSTRAPPING, State.SUSPENDED))
