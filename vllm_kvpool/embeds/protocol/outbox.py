"""Messages queued until the end of a turn, then sent in few frames (pure).

A frame costs its sender and its receiver a wake-up or more, many times the cost of a message in
it. The messages of one link leave in the order in which they were added.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_kvpool.embeds.protocol.messages import (
    FULL_FRAME_BYTES,
    MAX_MESSAGES,
    Complete,
    Envelope,
    HeldBytes,
    Message,
    Numbers,
    Taken,
    encode,
    encode_body,
)
from vllm_kvpool.embeds.protocol.transport_zmq import Link

if TYPE_CHECKING:
    import msgspec

NOT_URGENT = frozenset((Complete, Taken, HeldBytes, Numbers))
"""Messages that nobody waits for: they go with the next frame, or after `LATEST_S`."""
LATEST_S = 0.002


class Outbox:
    """Queued messages by link. `source` is the own incarnation, `not_urgent` what may wait."""

    def __init__(self, source: str, not_urgent: frozenset[type] = NOT_URGENT) -> None:
        self._source = source
        self._not_urgent = not_urgent
        self._seq = 0
        self._waiting: dict[Link, list[tuple[str, Message]]] = {}
        self._urgent: set[Link] = set()
        self._late: dict[Link, float] = {}  # when messages that are not urgent must go

    def add(self, link: Link, target: str, body: Message, now: float) -> None:
        """Queue a message to an incarnation, or to whoever is at the other end ('')."""
        self._waiting.setdefault(link, []).append((target, body))
        if type(body) in self._not_urgent:
            self._late.setdefault(link, now + LATEST_S)
        else:
            self._urgent.add(link)

    def drop(self, link: Link) -> None:
        """Drop a link's messages."""
        self._waiting.pop(link, None)
        self._late.pop(link, None)
        self._urgent.discard(link)

    def next_at(self) -> float:
        """When a message that is not urgent must go."""
        return min(self._late.values(), default=float("inf"))

    def take(self, now: float) -> list[tuple[Link, list[tuple[str, Message]]]]:
        """Remove and return the messages that are due, by link."""
        late = {link for link, at in self._late.items() if at <= now}
        due, self._urgent = self._urgent | late, set()
        for link in due:
            self._late.pop(link, None)
        return [(link, self._waiting.pop(link)) for link in due]

    def frames(self, said: list[tuple[str, Message]], most: int = MAX_MESSAGES) -> Iterator[bytes]:
        """The messages in frames of at most `most` messages, each to one target."""
        at = 0
        while at < len(said):
            target, first = said[at]
            at += 1
            more: list[msgspec.Raw] = []
            nbytes = 0
            while at < len(said) and said[at][0] == target and len(more) + 1 < most:
                raw = encode_body(said[at][1])
                nbytes += len(memoryview(raw))
                if nbytes > FULL_FRAME_BYTES:
                    break
                more.append(raw)
                at += 1
            self._seq += 1
            yield encode(Envelope(self._source, target, self._seq, first, tuple(more)))
