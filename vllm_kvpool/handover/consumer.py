"""Decode's connections to the engines whose prompts it waits for, on a thread of their own.

`watches.py` decides what is watched and what is told. An endpoint that may not be connected to, or
that does not answer as this channel does, tells nothing: lookups then poll. An engine whose process
is gone ends the wait at once.
"""

import logging
import time
from collections.abc import Callable, Iterable

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.handover.channel import POLL_S, Channel
from vllm_kvpool.handover.messages import MAX_FRAME_BYTES, Message, Notice, encode
from vllm_kvpool.handover.watches import Action, Lost, Progress, SendTo, Watches
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.network.allowed_peers import (
    OPTION,
    Allowed,
    AllowedPeers,
    NeedsLookup,
    Refused,
)
from vllm_kvpool.network.transport_zmq import EndedLink, Frame, Link, LinkEnd, ZmqTransport

MAX_CONNECTIONS = 256
MAX_LOOK_UPS = 64  # names at a time
IDLE_S = 300.0  # then a connection that nothing is watched at is closed
RETRY_S = 10.0  # an endpoint that has not answered
MAX_LEFT = 1_024  # endpoints
GONE = (LinkEnd.LOST, LinkEnd.REFUSED)


class NoticeClient(Channel):
    """Watches prompts at the engines that compute them.

    `on_notice(topic, stored, ended)`: all ranks have stored the chunks before `stored`, and no
    chunk from `ended` on will come (None: more may); called for every change, and for a topic that
    is watched once more if anything is known. `on_lost(topic)`: the engine is gone. Both are called
    on the client's thread and must not block. All methods are for any thread and never block.
    """

    side = "decode"

    def __init__(
        self,
        allowed: AllowedPeers,
        registry: MetricsRegistry,
        on_notice: Callable[[bytes, int, int | None], None],
        on_lost: Callable[[bytes], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ZmqTransport(None, MAX_FRAME_BYTES, watches=True), registry, clock)
        self._allowed = allowed
        self._on_notice = on_notice
        self._on_lost = on_lost
        self._watches = Watches()
        self._used_at: dict[str, float] = {}  # connections, the longest unused first
        self._retry_at: dict[str, float] = {}  # endpoints that are left alone until then
        self._names: dict[str, set[str]] = {}  # being looked up -> endpoints that wait for it
        self.start()

    def watch(self, endpoints: Iterable[str], topic: bytes) -> None:
        """Watch a prompt for a request that waits until another engine computes it.

        `endpoints` are the engine's, one of each rank. `unwatch` follows once for each call.
        """
        ranks = tuple(endpoints)
        self._post(lambda: self._perform(self._watches.watch(ranks, topic)))

    def unwatch(self, topic: bytes) -> None:
        """End a request's watch."""
        self._post(lambda: self._perform(self._watches.unwatch(topic)))

    # The client's thread

    def _pause_s(self) -> float:
        due = min(self._retry_at.values(), default=float("inf"))
        return max(0.0, min(POLL_S, due - self._clock()))

    def _on_message(self, frame: Frame, message: Message) -> None:
        told = None
        if isinstance(message, Notice):
            told = self._watches.notice(frame.link.endpoint, message)
        self._count("stray" if told is None else "received")
        self._perform(told or [])

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case SendTo(endpoint, message):
                    self._send(endpoint, encode(message))
                case Progress():
                    self._on_notice(*action)
                case Lost(topic):
                    self._on_lost(topic)

    def _send(self, endpoint: str, frame: bytes) -> None:
        """Send over the endpoint's connection, or make one, which begins with all its watches."""
        if self._used_at.pop(endpoint, None) is None:
            self._connect(endpoint)
            return
        self._used_at[endpoint] = self._clock()
        if not self._sockets.send(Link(endpoint), frame):  # it reads nothing
            self._ended(EndedLink(Link(endpoint), LinkEnd.SILENT))

    def _connect(self, endpoint: str, addresses: tuple[str, ...] | None = None) -> None:
        """Connect to an endpoint that something is watched at, if it is allowed."""
        if not self._watches.topics_at(endpoint) or endpoint in self._retry_at:
            return
        match self._allowed.judge(endpoint, addresses):
            case Allowed(at):
                self._open(endpoint, at)
            case NeedsLookup(name) if name in self._names or len(self._names) < MAX_LOOK_UPS:
                if name not in self._names:
                    self._resolver.look_up(name)
                self._names.setdefault(name, set()).add(endpoint)
            case NeedsLookup():
                self._leave(endpoint, "too many names are being looked up")
            case Refused(why):
                self._leave(endpoint, f"{why}; add its host to {OPTION} to allow it")

    def _open(self, endpoint: str, at: str) -> None:
        if len(self._used_at) >= MAX_CONNECTIONS:
            idle = (each for each in self._used_at if not self._watches.topics_at(each))
            unused = next(idle, None)
            if unused is None:
                self._leave(endpoint, f"there are {MAX_CONNECTIONS} connections in use")
                return
            self._disconnect(unused)
        try:
            link = self._sockets.connect(endpoint, at)
        except ConfigError as error:
            self._leave(endpoint, str(error))
            return
        self._used_at[endpoint] = self._clock()
        for action in self._watches.connected(endpoint):
            assert isinstance(action, SendTo)
            self._sockets.send(link, encode(action.message))

    def _disconnect(self, endpoint: str) -> None:
        del self._used_at[endpoint]
        self._sockets.disconnect(Link(endpoint))

    def _ended(self, ended: EndedLink) -> None:
        endpoint = ended.link.endpoint
        if endpoint not in self._used_at:
            return
        self._disconnect(endpoint)
        if ended.why in GONE:
            self._count("lost")
            self._perform(self._watches.lost(endpoint))
        elif self._watches.topics_at(endpoint):
            self._leave(endpoint, ended.why.value)

    def _leave(self, endpoint: str, why: str) -> None:
        """Leave an endpoint alone for `RETRY_S`: what is watched there is not told."""
        self._count("refused")
        self._retry_at[endpoint] = self._clock() + RETRY_S
        if len(self._retry_at) > MAX_LEFT:
            del self._retry_at[next(iter(self._retry_at))]
        text = "kvpool: notices: nothing is heard from %.300s, so lookups poll: %s"
        self._log.log(logging.WARNING, "refused", endpoint, text, endpoint, why)

    def _turn(self, now: float) -> None:
        for ended in self._sockets.take_ended():
            self._ended(ended)
        for endpoint in [each for each, due in self._retry_at.items() if due <= now]:
            del self._retry_at[endpoint]
            self._connect(endpoint)
        for endpoint, used_at in list(self._used_at.items()):
            if now - used_at > IDLE_S and not self._watches.topics_at(endpoint):
                self._disconnect(endpoint)

    def _resolved(self, name: str, addresses: tuple[str, ...]) -> None:
        for endpoint in self._names.pop(name, ()):
            if endpoint not in self._used_at:
                self._connect(endpoint, addresses)
