"""Asking for items that nobody sends: of whom, how often, and with rows granted ahead (pure).

Owns what is known of producers.
"""

from vllm_kvpool.embeds import credit
from vllm_kvpool.embeds.desk import Desk
from vllm_kvpool.embeds.items import Item, Peer
from vllm_kvpool.embeds.protocol import Code, Grant, Want, WantAck
from vllm_kvpool.embeds.states import GrantEvent, State

NOBODY_SENDS = frozenset((State.BOOTSTRAPPING, State.SUSPENDED))


class Asking:
    """See the module docstring."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._window = desk.window
        self.peers: dict[str, Peer] = {}
        self.recent = credit.RecentRows()

    def want(self, item: Item, now: float, only: str | None = None) -> None:
        """Ask for an item that nobody sends."""
        is_due = now - item.wanted_at > self._desk.limits.repeat_s
        if not item.asked or not is_due or item.state not in NOBODY_SENDS:
            return
        patience = self.patience_s(item.patience_s)
        for peer in self._asked_of(item):
            if only is None or peer == only:
                first = self._first_grant(item, peer, now)
                self._desk.say(peer, Want(item.mm_hash, patience, first))
        if only is None:
            item.wanted_at = now

    def patience_s(self, said_s: float) -> float:
        """How long an item is waited for that a request waits for so long, or does not say."""
        return said_s or self._desk.limits.bootstrap_timeout_s

    def want_ack(self, peer: str, told: WantAck, now: float) -> None:
        """A peer does not have it now, and maybe never will again."""
        granted = self._window.of((peer, 0), told.declined)
        if granted is not None:
            self._window.end(granted, GrantEvent.QUIET, now)
            self._desk.pump_at = now
        item = self._desk.items.get(told.mm_hash)
        if item is None or item.state is not State.BOOTSTRAPPING or not told.gone:
            return
        item.gone.add(peer)
        if self.is_gone(item):
            text = "nobody keeps it any more; send the request to an encoder again"
            self._desk.fail(item, Code.GONE, text, now)

    def is_gone(self, item: Item) -> bool:
        """Whether all who may have it have said so; who is named may not be there yet."""
        gone = [known.endpoints for peer, known in self.peers.items() if peer in item.gone]
        if item.peers:
            return item.peers <= item.refused.union(*gone)
        return len(gone) == len(self.peers)

    def _asked_of(self, item: Item) -> list[str]:
        return [
            peer
            for peer, known in self.peers.items()
            if not item.peers or item.peers & known.endpoints
        ]

    def _first_grant(self, item: Item, peer: str, now: float) -> Grant | None:
        """Rows before the length is known, where the size of a row is."""
        row_bytes = self.peers[peer].row_bytes
        early = next(iter(item.live.values()), None)
        if early is not None and early.source == (peer, 0):
            return self._window.message(early)
        if item.state is not State.BOOTSTRAPPING or early is not None or not row_bytes:
            return None
        active = self._desk.admission.num_active + 1
        share = credit.window_bytes(self._window.nbytes, active) // row_bytes
        rows = min(self.recent.first_grant(self._desk.limits.default_allocate_tokens), share)
        if item.expected_rows:
            rows = min(rows, item.expected_rows)
        extents = self._window.take(rows, row_bytes) if rows else ()
        if not extents:
            return None
        rows = sum(extent.nbytes // row_bytes for extent in extents)
        return self._window.message(self._window.lend(item, (peer, 0), 0, rows, extents, now))
