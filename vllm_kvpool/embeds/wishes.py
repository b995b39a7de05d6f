"""Who waits for which items that are not here yet, and until when (pure)."""

from collections import OrderedDict
from collections.abc import KeysView


class Wishes:
    """At most `most` of them; beyond it the oldest are forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()  # item and peer
        self._peers: dict[str, dict[str, None]] = {}  # of an item, in order

    def __len__(self) -> int:
        return len(self._until)

    @property
    def items(self) -> KeysView[str]:
        """What is waited for."""
        return self._peers.keys()

    def add(self, mm_hash: str, peer: str, until: float) -> None:
        """A peer waits for an item; again says until when."""
        self._until[mm_hash, peer] = until
        self._peers.setdefault(mm_hash, {})[peer] = None
        while len(self._until) > self._most:
            self._forget(*next(iter(self._until)))

    def take(self, mm_hash: str) -> list[str]:
        """The item is here: who waits for it, and from now on does not."""
        peers = list(self._peers.get(mm_hash, ()))
        for peer in peers:
            self._forget(mm_hash, peer)
        return peers

    def drop_peer(self, lost: str) -> None:
        """This peer waits for nothing any more."""
        for mm_hash, peer in [key for key in self._until if key[1] == lost]:
            self._forget(mm_hash, peer)

    def drop_late(self, now: float) -> None:
        """Nobody waits any more for what was to be here before now."""
        for mm_hash, peer in [key for key, until in self._until.items() if until < now]:
            self._forget(mm_hash, peer)

    def _forget(self, mm_hash: str, peer: str) -> None:
        del self._until[mm_hash, peer]
        peers = self._peers[mm_hash]
        del peers[peer]
        if not peers:
            del self._peers[mm_hash]
