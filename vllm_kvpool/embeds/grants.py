"""Lending the window: what is granted next, and what becomes of each grant (pure).

A grant is written, drained, and over; or it fails, runs out, is called back, and its rows are
granted again.
"""

from vllm_kvpool.embeds import credit
from vllm_kvpool.embeds.asking import Asking
from vllm_kvpool.embeds.desk import Desk
from vllm_kvpool.embeds.effects import Drain, Ready
from vllm_kvpool.embeds.items import Granted, Item
from vllm_kvpool.embeds.offers import Offers
from vllm_kvpool.embeds.protocol import (
    Code,
    Complete,
    Landing,
    Progress,
    Revoke,
    RevokeAck,
    RowsAck,
    Unknown,
    WriteFailed,
    Wrote,
)
from vllm_kvpool.embeds.rows import runs_of
from vllm_kvpool.embeds.states import (
    CONSUMER_TABLE,
    GRANT_TABLE,
    GrantEvent,
    GrantState,
    ItemEvent,
    State,
)


class Grants:
    """See the module docstring."""

    def __init__(self, desk: Desk, asking: Asking, offers: Offers) -> None:
        self._desk = desk
        self._window = desk.window
        self._asking = asking
        self._offers = offers

    def grant(self, now: float) -> None:
        """Grant what items lack, by whose turn it is."""
        if self._window.has_room:
            for item in self._desk.admission.short():
                if not self._grant_all(item, now):
                    break

    def _grant_all(self, item: Item, now: float) -> bool:
        """Grant what the item lacks; False if the window has no more."""
        assert item.shape is not None
        while len(item.live) < credit.WINDOWS_IN_FLIGHT and now >= item.retry_at:
            if item.num_covered == item.shape.rows:
                self._desk.admission.has_all(item)
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
        active = self._desk.admission.num_active
        share = credit.window_bytes(self._window.nbytes, active) // row_bytes
        rows = min(end - row, self._desk.limits.default_allocate_tokens, max(1, share))
        extents = self._window.take(rows, row_bytes)
        if not extents:
            return False
        runs, rows = runs_of(row, rows, extents, row_bytes)
        if not item.live:
            self._desk.counts["window_wait_s"] += now - item.idle_since
        granted = self._window.lend(item, item.sources[0], row, rows, extents, now)
        granted.runs = runs
        item.state = CONSUMER_TABLE.after(item.state, ItemEvent.GRANTED)
        self._desk.say(item.sources[0][0], self._window.message(granted))
        return True

    # What becomes of them

    def wrote(self, peer: str, told: Wrote, now: float) -> None:
        """The rows of a grant are in the window."""
        granted = self._window.of((peer, told.tid), told.gid)
        if granted is None:
            if self._window.cleared((peer, told.tid), told.gid):
                self._desk.pump_at = now
            self._answer_late(peer, told)
            return
        if granted.state is GrantState.DRAINING:
            return
        item = self._desk.items.get(granted.mm_hash)
        if item is None or granted.gid not in item.live or not item.admitted:
            self._window.end(granted, GrantEvent.QUIET, now)
            self._answer_late(peer, told)
            self._desk.pump_at = now
            return
        assert item.shape is not None
        runs, rows = granted.runs, granted.rows
        if not runs or told.rows != rows:
            runs, rows = runs_of(granted.row, told.rows, granted.extents, item.shape.row_bytes)
        fits = told.row == granted.row and rows == told.rows <= granted.rows
        if not rows or not fits or len(runs) != len(told.digests):
            self._window.end(granted, GrantEvent.UNSURE, now)
            self._bad_rows(item, granted, now)
            self._desk.pump_at = now
            return
        if told.rows < granted.rows:
            self._desk.admission.look_for_gaps(item)
        granted.rows, granted.runs = told.rows, runs
        granted.state = GRANT_TABLE.after(granted.state, GrantEvent.WROTE)
        self._desk.effects.append(Drain(granted.gid, item.mm_hash, runs, told.digests))

    def _answer_late(self, peer: str, told: Wrote) -> None:
        """A grant that has ended: its rows may be here, or have not been used."""
        mm_hash = self._desk.sources.item_of((peer, told.tid))
        if mm_hash is None:
            if not self._desk.sources.repeat_end((peer, told.tid)):
                self._desk.say(peer, Unknown(told.tid, yours=True))
            return
        received = self._desk.items[mm_hash].received
        is_here = received.holds(told.row, told.row + told.rows)
        landing = Landing.OK if is_here else Landing.STALE
        self._desk.counts["late_writes"] += 1
        self._desk.say(peer, RowsAck(told.tid, told.gid, landing, received.spans))

    def drained(self, gid: int, same: bool, now: float) -> None:
        """A grant's rows have been copied; `same` if they are what was sent."""
        granted = self._window[gid]
        self._window.end(granted, GrantEvent.DRAINED if same else GrantEvent.CORRUPT, now)
        item = self._desk.items.get(granted.mm_hash)
        # Its rows are of use if they went to the memory that the item has now, and are of what it
        # is now: its sender may be gone.
        if item is not None and self._is_current(item, granted):
            if same:
                self._add_rows(item, granted, now)
            else:
                self._bad_rows(item, granted, now)
        elif item is not None:
            self._desk.dry(item)
        self._desk.pump_at = now

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
        self._desk.counts["rounds"] += 1
        self._desk.counts["rows"] += granted.rows
        self._desk.counts["bytes"] += granted.rows * item.shape.row_bytes
        is_full = len(item.received) == item.shape.rows
        if granted.source in self._desk.sources and not is_full:
            peer, tid = granted.source
            self._desk.say(peer, RowsAck(tid, granted.gid, Landing.OK, item.received.spans))
        if is_full:
            self._fill(item)
        elif item.state is State.TRANSFERRING and not item.live:
            item.state = CONSUMER_TABLE.after(item.state, ItemEvent.DRY)
        elif item.state is not State.PARTIAL:
            item.state = CONSUMER_TABLE.after(item.state, ItemEvent.LANDED)

    def _fill(self, item: Item) -> None:
        item.state = CONSUMER_TABLE.after(item.state, ItemEvent.FILLED)
        self._desk.admission.deactivate(item)
        assert not item.live, "rows are granted to one only"
        for source in list(item.sources):
            self._desk.sources.close(source, Complete(source[1]))
        item.sources.clear()
        item.offers.clear()
        self._desk.counts["items"] += 1
        self._desk.effects.append(Ready(item.mm_hash))
        if item.asked:
            self._desk.tell_ready(item)

    def _bad_rows(self, item: Item, granted: Granted, now: float) -> None:
        """What arrived is not what was sent."""
        self._desk.counts["corrupt_rows"] += granted.rows
        peer, tid = granted.source
        if granted.source in item.sources:
            item.corrupt += 1
            self._desk.say(peer, RowsAck(tid, granted.gid, Landing.CORRUPT, item.received.spans))
        if item.corrupt > self._desk.limits.max_corrupt:
            text = "rows arrive damaged, again and again"
            self._offers.give_up_first(item, Code.CORRUPT, text, now)
        else:
            self._desk.dry(item)

    def write_failed(self, peer: str, told: WriteFailed, now: float) -> None:
        """A grant's rows are not in the window."""
        source = (peer, told.tid)
        granted = self._window.of(source, told.gid)
        if granted is None:
            if not told.quiesced:
                self._window.forget_doubt(source, told.gid)
            elif self._window.cleared(source, told.gid):
                self._desk.pump_at = now
            return
        if granted.state is GrantState.DRAINING:
            return
        self._desk.counts["failed_writes"] += 1
        self._window.end(granted, GrantEvent.QUIET if told.quiesced else GrantEvent.UNSURE, now)
        item = self._desk.items.get(granted.mm_hash)
        if item is not None and granted.source in item.sources:
            item.failures += 1
            pause = self._desk.limits.backoff_s * 2 ** min(item.failures, 8)
            item.retry_at = now + min(pause, self._desk.limits.max_backoff_s)
            if item.failures > self._desk.limits.max_failures:
                self._offers.give_up_first(item, Code.WRITE, told.text, now)
            else:
                self._desk.dry(item)
        self._desk.pump_at = now

    def revoke_ack(self, peer: str, told: RevokeAck, now: float) -> None:
        """How far the producer is with a grant that was called back."""
        granted = self._window.of((peer, told.tid), told.gid)
        if granted is None and told.progress is not Progress.IN_FLIGHT:
            if self._window.cleared((peer, told.tid), told.gid):
                self._desk.pump_at = now
            return
        is_over = told.progress is Progress.NOT_STARTED or (
            # Of a grant made before there was a transfer nothing else is told.
            told.progress is Progress.WROTE and not told.tid
        )
        if granted is None or not is_over:
            return  # else its end will be told
        if granted.state is not GrantState.DRAINING:
            self._window.end(granted, GrantEvent.QUIET, now)
            item = self._desk.items.get(granted.mm_hash)
            if item is not None:
                self._desk.dry(item)
            self._desk.pump_at = now

    # Time

    def tick(self, now: float) -> None:
        """Whatever is due."""
        self._window.tick(now)
        self.ask_of_doubtful(now)
        for granted in self._window:
            self._look_at(granted, now)

    def _look_at(self, granted: Granted, now: float) -> None:
        if granted.state is GrantState.DRAINING:
            return
        if now - granted.at > self._desk.limits.grant_ttl_s:
            self._desk.counts["expired_grants"] += 1
            self._window.doubt(granted, now)
            item = self._desk.items.get(granted.mm_hash)
            if item is not None:
                self._desk.dry(item)
        elif now - granted.told_at > self._desk.limits.repeat_s:
            granted.told_at = now
            peer, tid = granted.source
            if granted.state is GrantState.REVOKED:
                self._desk.say(peer, Revoke(tid, granted.gid))
            elif tid:
                self._desk.say(peer, self._window.message(granted))

    def ask_of_doubtful(self, now: float) -> None:
        """What may still be written is asked of who may still write it, once it is back."""
        for granted in self._window.doubtful(now):
            peer, tid = granted.source
            if peer in self._asking.peers and now - granted.told_at > self._desk.limits.repeat_s:
                granted.told_at = now
                self._desk.say(peer, Revoke(tid, granted.gid))
