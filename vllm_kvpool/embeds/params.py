"""The source and target of a request's embeddings, from its `ec_transfer_params` (pure).

Understood are the parameters that proxies send for vLLM's own connectors: a list `ec_items` of
`{mm_hash, transfer_id, peer}` in the order of the prompt's items, with `consumer_zmq` for the
encoder; or an encoder's answer `{mm_hash: {peer, ...}}`. All are optional, and unknown ones are
ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvpool.embeds.protocol.messages import MAX_ENDPOINT, MAX_NAME

MAX_TARGETS = 256
_OF_ANSWERS = frozenset(("peer", "metadata", "item_indices"))


@dataclass(frozen=True, slots=True)
class Delivery:
    """The source or target of a request's items."""

    consumers: tuple[str, ...] = ()
    """Endpoints that an encoder sends the items to."""
    is_sent: bool = False
    """True if the request says that its items come from elsewhere."""
    peers: tuple[str, ...] = ()
    """Endpoints of encoders, for all items."""
    names: Mapping[str, str] | None = None
    """The encoder's name of an item, where it differs from this engine's."""
    peers_by_item: Mapping[str, tuple[str, ...]] | None = None
    transfer_ids: Mapping[str, str] = field(default_factory=dict)
    """The proxy's ids of the items' transfers, which are only passed on."""
    is_of_others: bool = False
    """True if all of the encoders' answers in the request are about items of other requests."""

    @property
    def is_pushed(self) -> bool:
        """True if the request names the consumers, so that encoders send without being asked."""
        return bool(self.consumers)

    @property
    def brings_items(self) -> bool:
        """True if the request's items may come from elsewhere."""
        return self.is_sent and not self.is_of_others

    def name_of(self, mm_hash: str) -> str:
        """Return the encoder's name of an item."""
        return (self.names or {}).get(mm_hash, mm_hash)

    def peers_of(self, mm_hash: str) -> tuple[str, ...]:
        """Return the endpoints of encoders that have, or will have, an item."""
        return (*(self.peers_by_item or {}).get(mm_hash, ()), *self.peers)


NOWHERE = Delivery()


def read_delivery(params: Mapping[str, Any] | None, identifiers: Sequence[str]) -> Delivery:
    """Read a request's parameters; `identifiers` are the engine's names of its items."""
    if not isinstance(params, Mapping) or not params:
        return NOWHERE
    listed = [each for each in _list(params.get("ec_items")) if isinstance(each, Mapping)]
    names: dict[str, str] = {}
    transfer_ids: dict[str, str] = {}
    peers: dict[str, tuple[str, ...]] = {}
    known = {str(each.get("mm_hash")) for each in listed}
    for number, identifier in enumerate(identifiers):
        entry = params.get(identifier)
        if not isinstance(entry, Mapping):
            entry = next((each for each in listed if each.get("mm_hash") == identifier), None)
        if entry is None and number < len(listed):
            entry = listed[number]
            theirs = entry.get("mm_hash")
            # A name of another item of this request belongs to that item.
            is_new = identifier not in known and theirs not in identifiers
            if isinstance(theirs, str) and len(theirs) <= MAX_NAME and is_new:
                names[identifier] = theirs
        if entry is not None:
            peers[identifier] = _endpoints(entry.get("peer"))
            if isinstance(entry.get("transfer_id"), str):
                transfer_ids[identifier] = entry["transfer_id"]
    consumers = _endpoints(params.get("consumer_zmq"))
    all_peers = _endpoints(params.get("peer")) or _endpoints(params.get("peers"))
    says_where = bool(peers or listed or consumers or all_peers)
    return Delivery(
        consumers=consumers,
        is_sent=True,
        peers=all_peers,
        names=names or None,
        peers_by_item=peers or None,
        transfer_ids=transfer_ids,
        is_of_others=not says_where and any(_is_answer(each) for each in params.values()),
    )


def _is_answer(value: object) -> bool:
    """Return True for an encoder's answer about an item; proxies send other mappings, too."""
    return isinstance(value, Mapping) and not _OF_ANSWERS.isdisjoint(value)


def _list(value: Any) -> Sequence[Any]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return value if is_list else ()


def _endpoints(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [each.strip() for each in value.split(",")]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        return ()
    named = (each for each in value if isinstance(each, str) and each and each.isascii())
    return tuple(each for each in named if len(each) <= MAX_ENDPOINT)[:MAX_TARGETS]
