"""Prefill's side of hand-overs: what this rank has stored of each prompt, and who waits for it.

`HandOvers` decides (pure); `NoticeServer` owns the socket and the thread. Everything that peers can
make it keep is bounded: what is over a bound is dropped and counted, and decode polls instead.
"""

import logging
from typing import NamedTuple

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.handover.channel import Channel
from vllm_kvpool.handover.messages import (
    MAX_FRAME_BYTES,
    Message,
    Notice,
    Unwatch,
    Watch,
    encode,
)
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.network.allowed_peers import AllowedPeers
from vllm_kvpool.network.transport_zmq import Frame, Link, ZmqTransport

logger = logging.getLogger(__name__)

MAX_TOPICS = 4_096
MAX_PEERS = 1_024  # with watches
MAX_WATCHES_OF_PEER = 4_096
MAX_WATCHES = 65_536  # of all peers together
RESOLVE_EVERY_S = 10.0  # listed names, when a host was refused


class NoticePlace(NamedTuple):
    """The address at which a rank listens."""

    listen: str
    """ZMQ endpoint; of the port `*` the system chooses one."""
    host: str
    """At which others reach it."""
    is_required: bool
    """The user has named it."""


class Told(NamedTuple):
    """A notice for a peer."""

    peer: bytes
    notice: Notice


class HandOvers:
    """The state of each hand-over, and the peers that watch it (pure; the server's thread).

    The oldest topics leave first, ended ones before others. A watch of an unknown topic is answered
    with no chunk stored. The peer that has been silent longest loses its watches first.
    """

    def __init__(self) -> None:
        self._topics: dict[bytes, Notice] = {}  # the oldest first
        self._watchers: dict[bytes, dict[bytes, None]] = {}  # topic -> peers
        self._watches: dict[bytes, dict[bytes, None]] = {}  # peer -> topics; the most silent first
        self.num_watches = 0
        self.num_dropped = 0
        """Watches that a bound has ended."""

    def tell(self, notice: Notice) -> list[Told]:
        """Note how far a prompt is stored; returns what its watchers are told."""
        topic = notice.topic
        known = self._topics.pop(topic, None)
        self._topics[topic] = notice
        if len(self._topics) > MAX_TOPICS:
            ended = (each for each, state in self._topics.items() if state.ended is not None)
            del self._topics[next(ended, next(iter(self._topics)))]
        if notice == known:
            return []
        return [Told(peer, notice) for peer in self._watchers.get(topic, ())]

    def watch(self, peer: bytes, topic: bytes) -> list[Told]:
        """Note that a peer waits for a prompt, and return the answer."""
        mine = self._watches.pop(peer, {})
        self._watches[peer] = mine
        if topic not in mine:
            if len(mine) >= MAX_WATCHES_OF_PEER:
                self.unwatch(peer, next(iter(mine)))
                self.num_dropped += 1
            self._watches[peer] = mine  # `unwatch` forgets a peer without watches
            mine[topic] = None
            self._watchers.setdefault(topic, {})[peer] = None
            self.num_watches += 1
        while len(self._watches) > MAX_PEERS or self.num_watches > MAX_WATCHES:
            self.num_dropped += self.lost(next(iter(self._watches)))
        if topic not in self._watches.get(peer, ()):
            return []  # a bound has ended it
        return [Told(peer, self._topics.get(topic, Notice(topic, 0, None)))]

    def unwatch(self, peer: bytes, topic: bytes) -> None:
        """Forget that a peer waits for a prompt."""
        mine = self._watches.get(peer, {})
        if topic not in mine:
            return
        del mine[topic], self._watchers[topic][peer]
        self.num_watches -= 1
        if not self._watchers[topic]:
            del self._watchers[topic]
        if not mine:
            del self._watches[peer]

    def lost(self, peer: bytes) -> int:
        """Forget a peer that cannot be told any more, and return the number of its watches."""
        topics = list(self._watches.get(peer, ()))
        for topic in topics:
            self.unwatch(peer, topic)
        return len(topics)


class NoticeServer(Channel):
    """Tells decode engines how far this rank has stored the prompts that are handed over.

    Listens on a thread of its own; ConfigError if it cannot. `endpoint` is where others reach it.
    `tell` and `close` are for any thread, and `tell` never blocks.
    """

    side = "prefill"

    def __init__(
        self, place: NoticePlace, allowed: AllowedPeers, registry: MetricsRegistry
    ) -> None:
        sockets = ZmqTransport(
            place.listen,
            MAX_FRAME_BYTES,
            admits=allowed.allows_address,
            watches=True,
            option="notice_listen",
        )
        super().__init__(sockets, registry)
        self._allowed = allowed
        self._state = HandOvers()
        self._resolved_at = self._clock()
        self._resolve_names()
        port = sockets.endpoint.rpartition(":")[2]
        self.endpoint = f"tcp://{place.host}:{port}"
        self.start()

    def tell(self, topic: bytes, stored: int, ended: int | None = None) -> None:
        """Tell watchers that chunks before `stored` are in a store.

        No chunk from `ended` on will come (None: more may). Called anew with every change.
        """
        self._post(lambda: self._send(self._state.tell(Notice(topic, stored, ended))))

    # The server's thread

    def _on_message(self, frame: Frame, message: Message) -> None:
        peer, dropped = frame.link.identity, self._state.num_dropped
        match message:
            case Watch(topic):
                self._count("watched")
                self._send(self._state.watch(peer, topic))
            case Unwatch(topic):
                self._state.unwatch(peer, topic)
            case Notice():
                self._count("invalid")
        self._count("dropped", self._state.num_dropped - dropped)

    def _send(self, told: list[Told]) -> None:
        for peer, notice in told:
            if self._sockets.send(Link(identity=peer), encode(notice)):
                self._count("sent")
            else:  # it is gone, or reads nothing
                self._state.lost(peer)

    def _turn(self, now: float) -> None:
        refused = self._sockets.take_refused()
        for address, why in refused:
            text = "kvpool: notices: a connection from %s was refused: %s"
            self._log.log(logging.WARNING, "refused", address, text, address, why)
        self._count("refused", len(refused))
        if refused and now - self._resolved_at > RESOLVE_EVERY_S:
            self._resolved_at = now
            self._resolve_names()  # the address may be a listed name's new one

    def _resolve_names(self) -> None:
        for name in self._allowed.names:
            self._resolver.look_up(name)

    def _resolved(self, name: str, addresses: tuple[str, ...]) -> None:
        self._allowed.learn(name, addresses)


def open_server(
    place: NoticePlace, allowed: AllowedPeers, registry: MetricsRegistry
) -> NoticeServer | None:
    """Return a rank's server; None, with a warning, if the default place is not free.

    Raises ConfigError where the user has named it.
    """
    try:
        return NoticeServer(place, allowed, registry)
    except ConfigError as error:
        if place.is_required:
            raise
        logger.warning("kvpool: notices: %s; engines that take over prompts poll stores", error)
        return None
