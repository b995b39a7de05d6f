"""Grants: a rank grants missing rows to senders, part by part of its window.

Pure; on the control thread. A grant is written, drained and over; or it fails, expires or is
revoked, and its rows are granted again. Rows count as received once they are copied out and their
digests match.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from vllm_kvpool.embeds.machines.admission import ItemAdmission
from vllm_kvpool.embeds.machines.effects import DrainRows, Turn
from vllm_kvpool.embeds.machines.items import ConsumerLimits, Item
from vllm_kvpool.embeds.machines.offers import Offers
from vllm_kvpool.embeds.machines.states import GrantState
from vllm_kvpool.embeds.machines.window import (
    WINDOWS_IN_FLIGHT,
    GrantRecord,
    TransferRef,
    WindowLedger,
    window_bytes,
)
from vllm_kvpool.embeds.protocol.messages import (
    GRANT_TTL_S,
    Code,
    Grant,
    Revoke,
    RevokeAck,
    WriteFailed,
    WriteProgress,
    Wrote,
)
from vllm_kvpool.embeds.protocol.rows import Intervals, runs_of

MAX_CORRUPT = 3  # grants of an item that arrive damaged
MAX_BACKOFF_S = 5.0


class SenderFault(NamedTuple):
    """An item's sender has failed too often: another producer must continue."""

    item: Item
    code: Code
    text: str


class RowGrants:
    """The grants of one rank; owner of its window. `items` are the consumer's own."""

    def __init__(
        self,
        arena_bytes: int,
        limits: ConsumerLimits,
        items: Mapping[str, Item],
        admission: ItemAdmission,
        offers: Offers,
        turn: Turn,
    ) -> None:
        self._limits = limits
        self._items = items
        self._admission = admission
        self._offers = offers
        self._turn = turn
        self.window = WindowLedger(
            arena_bytes, quarantine_s=limits.quarantine_s, ended=self._on_end
        )

    # New grants

    def issue(self, now: float) -> None:
        """Grant missing rows, requests' items first, as far as the window has room."""
        if self.window.may_grant:
            while not all(self._grant_missing(item, now) for item in self._admission.grantable()):
                if not self.window.end_early(now):
                    break

    def _grant_missing(self, item: Item, now: float) -> bool:
        """Grant the rows an item lacks; False if the window is full."""
        assert item.shape is not None
        while now >= item.retry_at:
            gap = None
            if len(item.grants) < WINDOWS_IN_FLIGHT:
                gap = next(item.covered().gaps(item.shape.rows), None)
            if gap is None:
                self._admission.mark_fully_granted(item)
                return True
            if not self._grant(item, *gap, now):
                return False
        return True

    def _grant(self, item: Item, row: int, end: int, now: float) -> bool:
        """Grant rows of [row, end); False if the window is full."""
        assert item.shape is not None
        row_bytes = item.shape.row_bytes
        share = self._share(self._admission.num_active) // row_bytes
        rows = min(end - row, self._limits.default_allocate_tokens, max(1, share))
        granted = self._new_grant(item, item.sender, row, rows, row_bytes, now)
        if granted is None:
            return False
        if len(item.grants) == 1:
            self._turn.counts["window_wait_s"] += now - item.idle_since
        self._turn.send(item.sender[0], granted.message)
        return True

    def grant_early(
        self, item: Item, peer: str, rows: int, row_bytes: int, now: float
    ) -> Grant | None:
        """Grant a peer at most `rows` rows of an item that it has not offered yet."""
        rows = min(rows, self._share(self._admission.num_active + 1) // row_bytes)
        granted = self._new_grant(item, (peer, 0), 0, rows, row_bytes, now) if rows else None
        return granted.message if granted is not None else None

    def _share(self, active: int) -> int:
        return window_bytes(self.window.nbytes, active)

    def _new_grant(
        self, item: Item, ref: TransferRef, row: int, rows: int, row_bytes: int, now: float
    ) -> GrantRecord | None:
        """Grant at most `rows` rows of this size; None if the window is full."""
        extents = self.window.take(rows, row_bytes)
        if not extents:
            return None
        runs, rows = runs_of(row, rows, extents, row_bytes)
        granted = GrantRecord(item.mm_hash, ref, row, rows, extents, runs, now, now)
        self.window.add(granted)
        item.grants[granted.gid] = granted
        item.update_state()
        return granted

    def adopt_early(self, item: Item, first: int, now: float) -> None:
        """Use or revoke the rows that were granted before the item's length was known.

        `first` is the grant that the offer mentions.
        """
        assert item.shape is not None
        for granted in list(item.grants.values()):
            peer, tid = granted.ref
            if tid:
                continue
            if peer != item.sender[0]:
                self._revoke(granted, 0)  # another producer sends these rows
                continue
            most = min(granted.rows, item.shape.rows)  # as the producer understands it
            runs, rows = runs_of(0, most, granted.extents, item.shape.row_bytes)
            if not item.admitted or not rows or len(item.received):
                # A queued item must not hold a part of the window.
                self._revoke(granted, item.sender[1])
                continue
            granted.ref, granted.runs, granted.rows = item.sender, runs, rows
            if first != granted.gid:
                granted.sent_at = now
                self._turn.send(peer, granted.message)

    def resend(self, item: Item, ref: TransferRef) -> None:
        """Repeat the messages of a transfer's live grants."""
        for granted in item.grants.values():
            if granted.state is GrantState.GRANTED and granted.ref == ref:
                self._turn.send(ref[0], granted.message)

    # The end of a grant

    def release_rows(self, item: Item) -> None:
        """Give up an item's rows, and the grants that write to its memory.

        Early grants have no memory of the item, and go on.
        """
        item.received = Intervals()
        for granted in [each for each in item.grants.values() if each.ref[1]]:
            self._remove(item, granted)
        item.update_state()

    def release_writes(self, item: Item, ref: TransferRef) -> None:
        """Expect no further writes of a transfer; rows that are being drained still count."""
        for granted in list(item.grants.values()):
            if granted.ref == ref and granted.state is not GrantState.DRAINING:
                self._remove(item, granted)

    def revoke_all(self, item: Item) -> None:
        """Revoke an item's live grants."""
        for granted in list(item.grants.values()):
            if granted.state is GrantState.GRANTED:
                self._revoke(granted, granted.ref[1])

    def _revoke(self, granted: GrantRecord, tid: int) -> None:
        """Revoke a grant; `tid` is the transfer that knows of it."""
        granted.ref = (granted.ref[0], tid)
        granted.move(GrantState.REVOKED)
        item = self._items.get(granted.mm_hash)
        if item is not None:
            self._remove(item, granted)
        self._turn.send(granted.ref[0], Revoke(tid, granted.gid))

    def _on_end(self, granted: GrantRecord, now: float) -> None:
        item = self._items.get(granted.mm_hash)
        if item is not None and granted.gid in item.grants:
            item.idle_since = now
            self._remove(item, granted)
        if granted.state is not GrantState.FREE:
            self._turn.counts["quarantined_bytes"] += granted.nbytes

    def _remove(self, item: Item, granted: GrantRecord) -> None:
        """Remove a grant that brings its item nothing any more."""
        item.grants.pop(granted.gid, None)
        item.update_state()
        self._admission.mark_grantable(item)

    def decline(self, peer: str, gid: int, now: float) -> None:
        """End a grant that came with a question and that the peer does not use."""
        granted = self.window.of((peer, 0), gid)
        if granted is not None:
            self.window.end(granted, now, quiesced=True)

    # Messages of producers, and reports of drains

    def wrote(self, ref: TransferRef, message: Wrote, now: float) -> SenderFault | None:
        """Drain a grant whose rows a producer has written."""
        granted = self.window.of(ref, message.gid)
        if granted is None:
            self.window.resolve(ref, message.gid)
            self._on_late_write(ref)
            return None
        if granted.state is GrantState.DRAINING:
            return None
        item = self._items.get(granted.mm_hash)
        if item is None or granted.gid not in item.grants or not item.admitted:
            self.window.end(granted, now, quiesced=True)
            self._on_late_write(ref)
            return None
        assert item.shape is not None
        runs, rows = granted.runs, granted.rows
        if message.rows != rows:
            runs, rows = runs_of(granted.row, message.rows, granted.extents, item.shape.row_bytes)
        fits = message.row == granted.row and rows == message.rows <= granted.rows
        if not rows or not fits or len(runs) != len(message.digests):
            self.window.end(granted, now, quiesced=False)
            return self._on_corrupt_rows(item, granted)
        if message.rows < granted.rows:
            self._admission.mark_grantable(item)
        granted.rows, granted.runs = message.rows, runs
        granted.move(GrantState.DRAINING)
        self._turn.effects.append(DrainRows(granted.gid, item.mm_hash, runs, message.digests))
        return None

    def _on_late_write(self, ref: TransferRef) -> None:
        """Free an ended grant that was written: its rows were received before, or are not used."""
        if ref in self._offers.open:
            self._turn.counts["late_writes"] += 1
        else:
            self._offers.repeat_final(ref)

    def drained(self, gid: int, same: bool, now: float) -> Item | SenderFault | None:
        """Record a grant's rows, which were copied out, and return the item if it is complete.

        `same`: the digests of the rows match.
        """
        granted = self.window[gid]
        item = self._items.get(granted.mm_hash)
        if item is None or gid not in item.grants:
            # The rows are of an earlier encoding, or went to memory that the item had before.
            self.window.end(granted, now, quiesced=same)
            return None
        if same:
            self._add_rows(item, granted, now)
        self.window.end(granted, now, quiesced=same)
        if not same:
            return self._on_corrupt_rows(item, granted)
        return item if item.is_complete else None

    def _add_rows(self, item: Item, granted: GrantRecord, now: float) -> None:
        assert item.shape is not None
        item.received = item.received.with_rows(granted.row, granted.row + granted.rows)
        item.since, item.failures = now, 0
        counts = self._turn.counts
        counts["rounds"] += 1
        counts["rows"] += granted.rows
        counts["bytes"] += granted.rows * item.shape.row_bytes

    def _on_corrupt_rows(self, item: Item, granted: GrantRecord) -> SenderFault | None:
        """Count rows whose digests do not match; return the sender's fault after too many."""
        self._turn.counts["corrupt_rows"] += granted.rows
        if granted.ref in item.offers:
            item.corrupt += 1
        if item.corrupt <= MAX_CORRUPT:
            return None
        text = f"rows of {item.corrupt} grants arrived damaged, more than {MAX_CORRUPT}"
        return SenderFault(item, Code.CORRUPT, text)

    def write_failed(
        self, ref: TransferRef, message: WriteFailed, now: float
    ) -> SenderFault | None:
        """End a grant whose rows a producer could not write."""
        granted = self.window.of(ref, message.gid)
        if granted is None:
            if message.quiesced:
                self.window.resolve(ref, message.gid)
            else:
                self.window.drop_unresolved(ref, message.gid)
            return None
        if granted.state is GrantState.DRAINING:
            return None
        self._turn.counts["failed_writes"] += 1
        self.window.end(granted, now, quiesced=message.quiesced)
        item = self._items.get(granted.mm_hash)
        if item is None or granted.ref not in item.offers:
            return None
        item.failures += 1
        pause = self._limits.backoff_s * 2 ** min(item.failures, 8)
        item.retry_at = now + min(pause, MAX_BACKOFF_S)
        if item.failures <= self._limits.max_failures:
            return None
        return SenderFault(item, Code.WRITE, message.text)

    def revoke_ack(self, ref: TransferRef, message: RevokeAck, now: float) -> None:
        """Note the producer's progress with a revoked grant."""
        granted = self.window.of(ref, message.gid)
        if granted is None and message.progress is not WriteProgress.IN_FLIGHT:
            self.window.resolve(ref, message.gid)
            return
        is_over = message.progress is WriteProgress.NOT_STARTED or (
            # Of a grant made before there was a transfer nothing else is reported.
            message.progress is WriteProgress.WROTE and not message.tid
        )
        if granted is None or not is_over:
            return  # its end will be reported
        if granted.state is not GrantState.DRAINING:
            self.window.end(granted, now, quiesced=True)

    # Time

    def query_unresolved(self, now: float, peers: Collection[str], *, at_once: bool) -> None:
        """Ask `peers` whether they still write to quarantined memory.

        Asks at most every `repeat_s`, unless `at_once`.
        """
        for granted in self.window.unresolved():
            peer, tid = granted.ref
            is_due = at_once or now - granted.sent_at > self._limits.repeat_s
            if is_due and peer in peers:
                granted.sent_at = now
                self._turn.send(peer, Revoke(tid, granted.gid))

    def tick(self, now: float, peers: Collection[str]) -> None:
        """Expire grants and quarantines, and repeat messages. `peers` are in session."""
        self.window.tick(now)
        self.query_unresolved(now, peers, at_once=False)
        for granted in self.window:
            self._check(granted, now)

    def _check(self, granted: GrantRecord, now: float) -> None:
        """Expire a grant, or repeat its message."""
        if granted.state is GrantState.DRAINING:
            return
        if now - granted.at > GRANT_TTL_S:
            self._turn.counts["expired_grants"] += 1
            self.window.end_unresolved(granted, now)
        elif now - granted.sent_at > self._limits.repeat_s:
            granted.sent_at = now
            peer, tid = granted.ref
            if granted.state is GrantState.REVOKED:
                self._turn.send(peer, Revoke(tid, granted.gid))
            elif tid:
                self._turn.send(peer, granted.message)
