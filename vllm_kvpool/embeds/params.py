"""What a request says of where its embeddings come from or go to (pure).

`ec_transfer_params` as proxies for vLLM's own connectors send them are understood: a list
`ec_items` of `{mm_hash, transfer_id, peer}` in the order of the prompt's items, with `consumer_zmq`
for the encoder; or what an encoder has answered, `{mm_hash: {peer, ...}}`. All of it is optional.
What is of no use is left alone: another connector may understand it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_TARGETS = 256


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where a request's items are."""

    consumers: tuple[str, ...] = ()
    """Endpoints that an encoder sends them to."""
    is_sent: bool = False
    """Whether somebody has said that the items come from elsewhere."""
    peers: tuple[str, ...] = ()
    """Endpoints of encoders, of all items."""
    names: Mapping[str, str] | None = None
    """The encoder's name of an item, where it is another than this engine's."""
    peers_by_item: Mapping[str, tuple[str, ...]] | None = None
    transfer_ids: Mapping[str, str] = field(default_factory=dict)
    """What a proxy calls the transfer of an item; it is only handed on."""

    @property
    def is_pushed(self) -> bool:
        """Whether it names the consumers, so that encoders send without being asked."""
        return bool(self.consumers)

    def name_of(self, mm_hash: str) -> str:
        """How the encoder calls an item."""
        return (self.names or {}).get(mm_hash, mm_hash)

    def peers_of(self, mm_hash: str) -> tuple[str, ...]:
        """Endpoints of encoders that have, or will have, an item."""
        return (*(self.peers_by_item or {}).get(mm_hash, ()), *self.peers)


NOWHERE = Delivery()


def read_delivery(params: Mapping[str, Any] | None, identifiers: Sequence[str]) -> Delivery:
    """Read one request's parameters; `identifiers` are the engine's names of its items."""
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
            # A name that is another item's of this request belongs to that one.
            if isinstance(theirs, str) and identifier not in known and theirs not in identifiers:
                names[identifier] = theirs
        if entry is not None:
            peers[identifier] = _endpoints(entry.get("peer"))
            if isinstance(entry.get("transfer_id"), str):
                transfer_ids[identifier] = entry["transfer_id"]
    return Delivery(
        consumers=_endpoints(params.get("consumer_zmq")),
        is_sent=True,
        peers=_endpoints(params.get("peer")) or _endpoints(params.get("peers")),
        names=names or None,
        peers_by_item=peers or None,
        transfer_ids=transfer_ids,
    )


def _list(value: Any) -> Sequence[Any]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return value if is_list else ()


def _endpoints(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(each.strip() for each in value.split(",") if each.strip())[:MAX_TARGETS]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return tuple(each for each in value if isinstance(each, str))[:MAX_TARGETS]
    return ()
