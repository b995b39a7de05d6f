"""Discovery: a consumer's rank asks producers for items without a sender (pure; control thread).

Every producer in session is asked that may have the item, again after `repeat_s`. A question may
grant the first rows already, if the producer's row size is known.
"""

from collections import deque
from dataclasses import dataclass

from vllm_kvpool.embeds.machines.effects import Turn
from vllm_kvpool.embeds.machines.grants import RowGrants
from vllm_kvpool.embeds.machines.items import ConsumerLimits, Item
from vllm_kvpool.embeds.protocol.messages import Grant, Want
from vllm_kvpool.embeds.protocol.rows import ItemShape

RECENT_ITEMS = 16
FEWEST_RECENT = 8  # with fewer, the first grant is default_allocate_tokens


@dataclass(slots=True)
class ProducerPeer:
    """A producer in session with this consumer."""

    endpoints: frozenset[str]
    row_bytes: int = 0  # of its last item


class ItemDiscovery:
    """The producers in session, and the questions to them."""

    def __init__(self, limits: ConsumerLimits, grants: RowGrants, turn: Turn) -> None:
        self._limits = limits
        self._grants = grants
        self._turn = turn
        self.peers: dict[str, ProducerPeer] = {}
        self._recent_rows: deque[int] = deque(maxlen=RECENT_ITEMS)  # of items that were offered

    def peer_up(self, peer: str, endpoints: frozenset[str]) -> None:
        """Note the endpoints at which a producer in session is reachable."""
        known = self.peers.get(peer)
        self.peers[peer] = ProducerPeer(endpoints, known.row_bytes if known is not None else 0)

    def note_shape(self, peer: str, shape: ItemShape) -> None:
        """Learn from an offer how large rows and items are."""
        if peer in self.peers:
            self.peers[peer].row_bytes = shape.row_bytes
        self._recent_rows.append(shape.rows)

    def want(self, item: Item, now: float, only: str | None = None) -> None:
        """Ask producers for an item without a sender, at most every `repeat_s`."""
        is_due = now - item.want_sent_at > self._limits.repeat_s
        if not item.requested or not is_due or not item.lacks_sender:
            return
        patience = self.patience_s(item.patience_s)
        for peer, known in self.peers.items():
            may_have_it = not item.peers or item.peers & known.endpoints
            if may_have_it and only in (None, peer):
                first = self._first_grant(item, peer, now)
                self._turn.send(peer, Want(item.mm_hash, patience, first))
        if only is None:
            item.want_sent_at = now

    def patience_s(self, said_s: float) -> float:
        """Return the seconds to wait for an item. `said_s`: its requests' wish; 0 for none."""
        return said_s or self._limits.bootstrap_timeout_s

    def _first_grant(self, item: Item, peer: str, now: float) -> Grant | None:
        """Return a grant before the item's length is known, if the peer's row size is."""
        row_bytes = self.peers[peer].row_bytes
        if item.shape is not None or item.grants or not row_bytes:
            return None  # said once: a producer that has declined it might use it when told again
        rows = self._limits.default_allocate_tokens
        if item.expected_rows:
            rows = min(rows, item.expected_rows)
        if len(self._recent_rows) >= FEWEST_RECENT:
            rows = min(rows, max(self._recent_rows))
        return self._grants.grant_early(item, peer, rows, row_bytes, now)

    def is_gone_everywhere(self, item: Item) -> bool:
        """Return True if every producer in question has answered that it lacks the item."""
        gone = [known.endpoints for peer, known in self.peers.items() if peer in item.gone]
        if item.peers:
            return item.peers <= item.refused.union(*gone)
        return len(gone) == len(self.peers)
