"""Writing rows where they were granted: which grants are good, whose write is next (pure).

A grant is due, then its write is under way, then its result is kept, to be said again.
"""

from collections import OrderedDict, deque
from itertools import pairwise

from vllm_kvpool.embeds.effects import Write
from vllm_kvpool.embeds.protocol import (
    MAX_EXTENTS,
    Grant,
    Message,
    Progress,
    Revoke,
    RevokeAck,
    WriteFailed,
    Wrote,
)
from vllm_kvpool.embeds.rows import runs_of
from vllm_kvpool.embeds.states import ENDED, PRODUCER_TABLE, SendEvent, State
from vllm_kvpool.embeds.transfers import Peer, Transfer, Transfers

START_SHARE = 0.5  # of the time a grant is good, the part in which its write may begin


class Writing:
    """See the module docstring."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._unsure: OrderedDict[tuple[str, int], WriteFailed] = OrderedDict()  # peer and grant
        self.count = 0  # of writes that are under way
        self._nbytes = 0  # of these

    # Grants

    def grant(self, peer: str, told: Grant, now: float) -> None:
        """Rows may be written."""
        transfer = self._transfers.of(peer, told.tid)
        if transfer is None:
            self._transfers.say_ended(peer, told.tid)
            return
        transfer.since, transfer.offered = now, True
        if told.gid in transfer.results:
            said = transfer.results[told.gid]
            if said is not None:
                self._transfers.say(peer, said)
            return
        if not self.is_good(transfer, told):
            self._transfers.counts["bad_grants"] += 1
            said = WriteFailed(told.tid, told.gid, True, "the grant does not fit the item")
            self._note_result(transfer, told.gid, said)
            self._transfers.say(peer, said)
            return
        self.take(transfer, told, now)
        self._transfers.pump_at = now

    def is_good(self, transfer: Transfer, told: Grant) -> bool:
        """Whether a grant is of rows that the item has, in extents that the window has."""
        known = self._transfers.peers.get(transfer.peer)
        if known is None or known.window is None or told.gid in transfer.results:
            return False
        if len(transfer.due) >= self._transfers.limits.max_results:
            return False  # a consumer has a few out at a time
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

    def take(self, transfer: Transfer, told: Grant, now: float) -> None:
        """Its rows are to be written."""
        if transfer.state in (State.BOOTSTRAPPING, State.SUSPENDED):
            transfer.state = PRODUCER_TABLE.after(transfer.state, SendEvent.OFFER)
        transfer.state = PRODUCER_TABLE.after(transfer.state, SendEvent.GRANTED)
        self._note_result(transfer, told.gid, None)
        transfer.due.append((told, now + told.ttl_s * START_SHARE))
        self._transfers.peers[transfer.peer].due[transfer.tid] = None

    def revoke(self, peer: str, told: Revoke, now: float) -> None:
        """A grant is called back."""
        unsure = self._unsure.get((peer, told.gid))
        if unsure is not None:
            self._transfers.say(peer, unsure)
            return
        transfer = self._transfers.of(peer, told.tid or self._tid_of_first(peer, told.gid))
        if transfer is None and not told.tid:
            self._transfers.say(peer, RevokeAck(0, told.gid, Progress.NOT_STARTED))
            return
        if transfer is None:
            self._transfers.say_ended(peer, told.tid)
            return
        if told.gid in transfer.writing:
            self._transfers.say(peer, RevokeAck(told.tid, told.gid, Progress.IN_FLIGHT))
            return
        said = transfer.results.get(told.gid)
        if isinstance(said, Wrote):
            self._transfers.say(peer, RevokeAck(told.tid, told.gid, Progress.WROTE))
            self._transfers.say(peer, said)
            return
        # Also one that has not come yet: it will not be used when it does.
        transfer.due = deque(each for each in transfer.due if each[0].gid != told.gid)
        ack = RevokeAck(told.tid, told.gid, Progress.NOT_STARTED)
        self._note_result(transfer, told.gid, ack)
        self._transfers.say(peer, ack)
        self._transfers.rest(transfer)

    def _tid_of_first(self, peer: str, gid: int) -> int:
        """The transfer that uses a grant which came with a wish; 0 if none does."""
        key = (peer, gid)
        transfers = self._transfers.by_tid.values()
        found = (each.tid for each in transfers if (each.peer, each.first) == key)
        return next(found, 0)

    def _note_result(self, transfer: Transfer, gid: int, said: Message | None) -> None:
        """Keep what is to be said of a grant, of the last ones."""
        transfer.results[gid] = said
        while len(transfer.results) > self._transfers.limits.max_results:
            oldest = next((gid for gid, each in transfer.results.items() if each is not None), None)
            if oldest is None:
                return
            del transfer.results[oldest]

    # Writes

    def start(self, now: float) -> None:
        """Start writes: consumers in turn, of each its transfers in turn."""
        while self._may_write:
            peer = next((name for name, each in self._transfers.peers.items() if each.due), None)
            if peer is None:
                return
            self._transfers.peers.move_to_end(peer)
            known = self._transfers.peers[peer]
            tid, _ = known.due.popitem(last=False)
            transfer = self._transfers.by_tid.get(tid)
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
        limits = self._transfers.limits
        is_small = self._nbytes < limits.small_bytes and self.count < limits.max_writes
        return is_small or self.count < limits.writers

    def _decline(self, transfer: Transfer, told: Grant) -> None:
        """So late that the memory may not be kept until the write has ended."""
        self._transfers.counts["late_grants"] += 1
        ack = RevokeAck(told.tid or transfer.tid, told.gid, Progress.NOT_STARTED)
        self._note_result(transfer, told.gid, ack)
        self._transfers.say(transfer.peer, ack)
        self._transfers.rest(transfer)

    def _write(self, transfer: Transfer, told: Grant, known: Peer) -> None:
        source = transfer.source
        most = min(told.rows, source.shape.rows - told.row)
        runs, rows = runs_of(told.row, most, told.extents, source.shape.row_bytes)
        assert known.window is not None
        nbytes = rows * source.shape.row_bytes
        self.count += 1
        self._nbytes += nbytes
        source.readers += 1
        transfer.writing[told.gid] = nbytes
        self._transfers.effects.append(
            Write(transfer.tid, told.gid, source.sid, known.window, runs)
        )

    def written(self, tid: int, gid: int, result: Wrote | WriteFailed, now: float) -> None:
        """A write has ended, well or not."""
        transfers = self._transfers
        transfer = transfers.by_tid[tid]
        source = transfer.source
        source.readers -= 1
        self.count -= 1
        self._nbytes -= transfer.writing.pop(gid)
        if isinstance(result, Wrote):
            transfers.counts["written_rows"] += result.rows
            transfers.counts["written_bytes"] += result.rows * source.shape.row_bytes
        else:
            transfers.counts["failed_writes"] += 1
        if gid in transfer.results:
            transfer.results[gid] = result
        is_unsure = isinstance(result, WriteFailed) and not result.quiesced
        if isinstance(result, WriteFailed) and is_unsure:
            self._unsure[(transfer.peer, gid)] = result
            while len(self._unsure) > transfers.limits.max_ended:
                self._unsure.popitem(last=False)
        is_up = transfer.peer in transfers.peers
        if transfer.state in ENDED:
            if is_unsure and is_up:
                transfers.say(transfer.peer, result)  # before the last word, which says it is over
            transfers.bury(transfer, now)
        else:
            if is_up:
                transfers.say(transfer.peer, result)
            transfers.rest(transfer)
        transfers.pump_at = now

    def check(self) -> None:
        """What always holds."""
        transfers = self._transfers.by_tid.values()
        assert self.count == sum(len(each.writing) for each in transfers)
        assert self._nbytes == sum(sum(each.writing.values()) for each in transfers)
        limits = self._transfers.limits
        assert self.count <= max(limits.writers, limits.max_writes)
