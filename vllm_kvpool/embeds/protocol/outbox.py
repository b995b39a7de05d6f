"""The messages queued for each connection, in as few frames as possible. Control thread."""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from vllm_kvpool.embeds.protocol.messages import (
    FULL_FRAME_BYTES,
    MAX_MESSAGES,
    Complete,
    Envelope,
    HeldBytes,
    Message,
    MetricSamples,
    Taken,
    batches_of,
    encode,
    encode_body,
)
from vllm_kvpool.network.transport_zmq import Link

NOT_URGENT = frozenset((Complete, Taken, HeldBytes, MetricSamples))
"""Messages that wait for the next frame to the same peer, at most `LATEST_S`."""
LATEST_S = 0.002


class Outbox:
    """Queued messages by link. `source` is the own incarnation, `not_urgent` what may wait."""

    def __init__(self, source: str, not_urgent: frozenset[type] = NOT_URGENT) -> None:
        self._source = source
        self._not_urgent = not_urgent
        self._waiting: dict[Link, list[tuple[str, Message]]] = {}
        self._due_at: dict[Link, float] = {}

    def add(self, link: Link, target: str, body: Message, now: float) -> None:
        """Queue a message to an incarnation, or ('') to the one at the other end."""
        self._waiting.setdefault(link, []).append((target, body))
        at = now + LATEST_S if type(body) in self._not_urgent else now
        self._due_at[link] = min(at, self._due_at.get(link, at))

    def drop(self, link: Link) -> None:
        """Drop a link's messages."""
        self._waiting.pop(link, None)
        self._due_at.pop(link, None)

    def next_at(self) -> float:
        """Return the time at which the next messages must go."""
        return min(self._due_at.values(), default=float("inf"))

    def take(self, now: float) -> list[tuple[Link, list[tuple[str, Message]]]]:
        """Remove and return the messages that are due, by link."""
        due = [link for link, at in self._due_at.items() if at <= now]
        for link in due:
            del self._due_at[link]
        return [(link, self._waiting.pop(link)) for link in due]

    def frames(self, queued: list[tuple[str, Message]]) -> Iterator[bytes]:
        """Yield the messages in as few frames as possible, each to one target."""
        for target, messages in groupby(queued, key=itemgetter(0)):
            raws = (encode_body(body) for _, body in messages)
            for bodies in batches_of(
                raws, lambda raw: len(memoryview(raw)), FULL_FRAME_BYTES, MAX_MESSAGES
            ):
                yield encode(Envelope(self._source, target, tuple(bodies)))
