"""Connections of the control port: the peer of each, and the messages queued for it.

Owner of all sessions and of the turn's outbox; control thread. It tells the machines which peers
are in session, at which endpoints, which are lost, and which endpoints are refused.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from vllm_kvpool.embeds.faults import Guard
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.producer import Producer
from vllm_kvpool.embeds.machines.session import (
    FIRST_GREETING_S,
    HeartbeatPolicy,
    PeerLost,
    PeerUp,
    SendMessage,
    Session,
    SessionState,
)
from vllm_kvpool.embeds.protocol.messages import (
    Code,
    Envelope,
    Goodbye,
    Heartbeat,
    HeldBytes,
    HelloReject,
    ItemNews,
    Message,
    MetricSamples,
    MooncakeWindow,
    PeerHello,
    PeerRole,
    Taken,
)
from vllm_kvpool.embeds.protocol.outbox import Outbox
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.network.allowed_peers import (
    OPTION,
    Allowed,
    AllowedPeers,
    ConnectDecision,
    NeedsLookup,
)
from vllm_kvpool.network.transport_zmq import Frame, Link, RefusedHandshake, ZmqTransport

logger = logging.getLogger(__name__)

MAX_LINKS = 16_384
IDLE_LINK_S = 300.0  # a connection without a session is dropped after so long
MAX_LOOK_UPS = 64  # names at a time
LOOK_UP_EVERY_S = 10.0  # for a listed name, or one whose host does not answer
MAX_SHOWN = 300  # characters of a peer's own text in a log


@dataclass(slots=True)
class Connection:
    """A session, and since when its connection has had no peer."""

    session: Session
    is_configured: bool
    idle_since: float
    address: str = ""  # the peer's, if it connected to us
    at: str = ""  # the address that the endpoint's name was resolved to
    looked_up_at: float = 0.0
    greeted_at: float = float("-inf")  # after a message of no session

    def place(self, link: Link) -> str:
        """Return the peer's name in a log."""
        return link.endpoint or self.address


class Peers:
    """The control port's connections and their sessions.

    `on_scheduler` is called whenever a session with the own scheduler begins. `resolve(name)` has
    `resolved` called later.
    """

    def __init__(
        self,
        hello: PeerHello,
        sockets: ZmqTransport,
        heartbeats: HeartbeatPolicy,
        consumer: Consumer | None,
        producer: Producer | None,
        *,
        counts: defaultdict[str, float],
        on_scheduler: Callable[[], None],
        clock: Callable[[], float],
        guard: Guard,
        allowed: AllowedPeers,
        scheduler_token: bytes,
        resolve: Callable[[str], None],
    ) -> None:
        self.hello = hello
        self._sockets = sockets
        self._heartbeats = heartbeats
        self._consumer = consumer
        self._producer = producer
        self._counts = counts
        self._on_scheduler = on_scheduler
        self._clock = clock
        self._guard = guard
        self._log = guard.log
        self._allowed = allowed
        self._scheduler_token = scheduler_token
        self._resolve = resolve
        # Names that are being looked up, and the endpoints that wait for each.
        self._pending_names: dict[str, dict[str, None]] = {}
        self._names_at = float("-inf")  # when the listed names were last looked up
        self._connections: dict[Link, Connection] = {}
        self.known: dict[str, dict[Link, None]] = {}
        """Incarnations in session, and over which links."""
        self._schedulers: set[Link] = set()
        self.outbox = Outbox(hello.incarnation)

    def _warn(self, kind: str, subject: str, text: str, *values: object) -> None:
        self._log.log(logging.WARNING, kind, subject, text, *values)

    # Connections

    def connect(self, endpoint: str, now: float) -> None:
        """Keep a connection to an endpoint that a request or a peer named."""
        if endpoint in self.hello.endpoints:
            return
        connection = self._connections.get(Link(endpoint))
        if connection is not None:
            is_away = bool(connection.at) and not connection.session.is_up
            if not is_away or now - connection.looked_up_at <= LOOK_UP_EVERY_S:
                return
            connection.looked_up_at = now
        self._apply_decision(endpoint, self._allowed.judge(endpoint), now)

    def connect_configured(self, endpoint: str, now: float) -> None:
        """Keep a connection to an endpoint of `peers`."""
        if Link(endpoint) not in self._connections and endpoint not in self.hello.endpoints:
            self._connect(endpoint, "", now, is_configured=True)

    def _apply_decision(self, endpoint: str, verdict: ConnectDecision, now: float) -> None:
        match verdict:
            case Allowed(at):
                self._connect(endpoint, at if at != endpoint else "", now)
            case NeedsLookup(name):
                if self._look_up(name):
                    self._pending_names[name][endpoint] = None
                else:
                    self._refuse(endpoint, "too many names are being looked up", now)
            case _:
                self._refuse(endpoint, verdict.text, now)

    def _look_up(self, name: str) -> bool:
        """Have a name resolved, unless it is being; False if too many are."""
        if name not in self._pending_names:
            if len(self._pending_names) >= MAX_LOOK_UPS:
                return False
            self._resolve(name)  # may raise: then the name is not awaited
            self._pending_names[name] = {}
        return True

    def resolved(self, name: str, addresses: tuple[str, ...], now: float) -> None:
        """Take the addresses of a name; none if it cannot be resolved."""
        if name in self._allowed.names:
            self._allowed.learn(name, addresses)
        for endpoint in self._pending_names.pop(name, {}):
            self._apply_decision(endpoint, self._allowed.judge(endpoint, addresses), now)

    def _refuse(self, endpoint: str, why: str, now: float) -> None:
        """Do not connect to an endpoint: both machines end what waits for it."""
        self._counts["refused_endpoints"] += 1
        shown = shown_text(endpoint)
        text = f"{shown} is not connected to: {why}; add its host to {OPTION} to allow it"
        self._warn("refused endpoint", endpoint, "kvpool: %s", text)
        if self._consumer is not None:
            self._consumer.refused(endpoint, text)
        if self._producer is not None:
            self._producer.refused(endpoint)

    def _connect(self, endpoint: str, at: str, now: float, *, is_configured: bool = False) -> None:
        link = Link(endpoint)
        connection = self._connections.get(link)
        if connection is not None:
            if connection.at != at:  # its name resolves to another host now
                connection.at = at
                self._sockets.disconnect(link)
                self._open(link, at)
            return
        if len(self._connections) >= MAX_LINKS:
            self._counts["too_many_links"] += 1
            return
        if not self._open(link, at):
            return
        session = Session(self.hello, self._heartbeats, active=True, now=now)
        self._connections[link] = Connection(session, is_configured, now, at=at, looked_up_at=now)
        session.tick(now)
        self.act(link, now)

    def _open(self, link: Link, at: str = "") -> bool:
        """Open a socket to an endpoint; whether that worked."""
        try:
            self._sockets.connect(link.endpoint, at)
        except ConfigError as error:
            self._counts["bad_endpoints"] += 1
            self._warn("bad endpoint", link.endpoint, "kvpool: %s", shown_text(str(error)))
            return False
        return True

    def _accept(self, link: Link, address: str, now: float) -> Connection | None:
        """Open a session for a peer that has connected to this process."""
        if len(self._connections) >= MAX_LINKS:
            self._counts["too_many_links"] += 1
            return None
        token = self._scheduler_token
        session = Session(
            self.hello, self._heartbeats, active=False, now=now, scheduler_token=token
        )
        return self._connections.setdefault(link, Connection(session, False, now, address))

    def refused_handshake(self, refused: RefusedHandshake, now: float) -> None:
        """Log a host that may not connect, or lacks the cluster's key: nothing of it was read."""
        self._counts["strangers"] += 1
        self.resolve_listed_names(now)  # it may be a listed one's new address
        where = refused.address or "a host without an address"
        text = "kvpool: a connection from %s to the control port was refused: %s"
        self._warn("stranger", refused.address, text, where, refused.why)

    def resolve_listed_names(self, now: float) -> None:
        """Resolve the listed names, at most every LOOK_UP_EVERY_S."""
        if now - self._names_at > LOOK_UP_EVERY_S:
            self._names_at = now
            for name in self._allowed.names:
                self._look_up(name)

    def _window_refused(self, message: PeerHello) -> HelloReject | None:
        """Return the reason not to write rows to a peer's window; None if rows are written."""
        window = message.window
        if not isinstance(window, MooncakeWindow) or self._producer is None:
            return None  # shared memory of this machine and this user
        host = window.session.rpartition(":")[0]
        if self._allowed.allows_host(host):
            return None
        self._counts["refused_windows"] += 1
        return HelloReject(
            Code.INCOMPATIBLE,
            f"rows are not written to the host {shown_text(host)}: it is not in {OPTION} of the "
            "engine that sends them",
        )

    def _forget_link(self, link: Link) -> None:
        del self._connections[link]
        self.outbox.drop(link)
        self._schedulers.discard(link)
        if link.endpoint:
            self._sockets.disconnect(link)

    # Sending

    def send_to(self, incarnation: str, body: Message, now: float) -> None:
        """Send to an incarnation; dropped if it is not in session."""
        links = self.known.get(incarnation)
        if links is not None:
            self.outbox.add(next(iter(links)), incarnation, body, now)

    def notify_scheduler(
        self, body: ItemNews | Taken | HeldBytes | MetricSamples | Heartbeat | Goodbye, now: float
    ) -> None:
        """Queue a message to each scheduler that has proved to be the own one."""
        for link in self._schedulers:
            self.outbox.add(link, "", body, now)

    def flush(self, until: float) -> None:
        """Send what is due by then, in as few frames as possible."""
        for link, queued in self.outbox.take(until):
            connection = self._connections.get(link)
            if not self._guard("flush", self._send_frames, link, connection, queued):
                self._on_broken_link(link, connection)

    def _send_frames(
        self, link: Link, connection: Connection | None, queued: list[tuple[str, Message]]
    ) -> None:
        for frame in self.outbox.frames(queued):
            if not self._sockets.send(link, frame):
                self._on_broken_link(link, connection)
                return
        if connection is not None:
            connection.session.sent(self._clock())

    def _on_broken_link(self, link: Link, connection: Connection | None) -> None:
        if connection is not None:
            self._counts["broken_links"] += 1
            if connection.session.is_up:
                connection.session.lost()
            elif link.endpoint:
                self._reopen(link, connection)

    def _reopen(self, link: Link, connection: Connection) -> None:
        """Connect anew and greet.

        libzmq does not try again after a refused handshake; or a socket had no descriptor.
        """
        if self._sockets.disconnect(link):
            self._warn(
                "closed",
                link.endpoint,
                "kvpool: %s refuses connections of this engine, or reads nothing: add this host to "
                "its %s, and give both the same curve_dir",
                link.endpoint,
                OPTION,
            )
        if self._open(link, connection.at):
            self.outbox.add(link, "", self.hello, self._clock())

    def say_goodbye(self, now: float) -> None:
        """Tell all peers that nothing of this process is in flight any more."""
        for incarnation, links in self.known.items():
            for link in links:
                self.outbox.add(link, incarnation, Goodbye(), now)

    # Sessions

    def on_message(
        self, frame: Frame, envelope: Envelope, body: Message, now: float
    ) -> Session | None:
        """Return the session that a message belongs to.

        The result is None if it is handled here or belongs to none.
        """
        link = frame.link
        connection = self._connections.get(link)
        if connection is None:
            connection = self._accept(link, frame.address, now)
            if connection is None:
                return None
        connection.address = frame.address
        session = connection.session
        if isinstance(body, PeerHello):
            self._on_hello(link, connection, body, now)
        elif isinstance(body, HelloReject):
            if session.rejected(body, now):
                where, said = connection.place(link), "kvpool: the peer %s refuses a session: %s"
                self._warn("refusal", where, said, where, shown_text(body.text))
        elif not self._matches_session(session, envelope):
            # For an earlier incarnation here, or from a peer that lost its session: greet again.
            # Once for many: each greeting makes the peer ask for every item again.
            self._counts["strays"] += 1
            if now - connection.greeted_at > FIRST_GREETING_S:
                connection.greeted_at = now
                self.outbox.add(link, "", self.hello, now)
        elif session.is_up:
            return session
        return None

    def _on_hello(self, link: Link, connection: Connection, message: PeerHello, now: float) -> None:
        refusal, where = self._window_refused(message), connection.place(link)
        if refusal is not None:
            self.outbox.add(link, "", refusal, now)
            self._warn("window", where, "kvpool: the peer %s: %s", where, refusal.text)
            connection.session.lost()
            return
        connection.session.hello(message, now)
        if message.role is PeerRole.SCHEDULER and not connection.session.is_up:
            self._counts["false_schedulers"] += 1
            text = "kvpool: %s is not heard as this engine's scheduler: it has no proof of that"
            self._warn("scheduler", where, text, where)

    def _matches_session(self, session: Session, envelope: Envelope) -> bool:
        """Return True if a frame is for this incarnation and from the session's."""
        peer = session.peer
        return (
            envelope.target in ("", self.hello.incarnation)
            and peer is not None
            and peer.incarnation == envelope.source
        )

    def update_hello(self, hello: PeerHello, now: float) -> None:
        """Send the own hello anew, which has changed with the weights."""
        self.hello = hello
        for link, connection in list(self._connections.items()):
            connection.session.update_hello(hello)
            self.act(link, now)

    def tick(self, now: float) -> None:
        """Run the sessions' timers and drop unused connections; called several times a second."""
        self._log.tick()
        for link, connection in list(self._connections.items()):
            connection.session.tick(now)
            self.act(link, now)
            if connection.session.is_up:
                connection.idle_since = now
            elif not connection.is_configured and now - connection.idle_since > IDLE_LINK_S:
                self._forget_link(link)

    def states(self) -> Counter[SessionState]:
        """Return the number of connections in each session state."""
        return Counter(connection.session.state for connection in self._connections.values())

    def act(self, link: Link, now: float) -> None:
        """Perform the actions of a connection's session; a closed connection has none."""
        connection = self._connections.get(link)
        if connection is None:
            return
        for action in connection.session.take_actions():
            match action:
                case SendMessage(body):
                    peer = connection.session.peer
                    self.outbox.add(link, peer.incarnation if peer is not None else "", body, now)
                case PeerUp(hello):
                    self._up(link, hello, now)
                case PeerLost(incarnation, quiesced):
                    self._lost(link, incarnation, now, quiesced=quiesced)

    def _up(self, link: Link, hello: PeerHello, now: float) -> None:
        if hello.role is PeerRole.SCHEDULER:
            self._schedulers.add(link)
            self._on_scheduler()
            return
        links = self.known.setdefault(hello.incarnation, {})
        links[link] = None
        reached = frozenset(each.endpoint for each in links if each.endpoint)
        reached |= frozenset(hello.endpoints[hello.rank : hello.rank + 1])
        if self._consumer is not None and hello.role in (PeerRole.PRODUCER, PeerRole.BOTH):
            self._consumer.peer_up(hello.incarnation, reached, now)
        if self._producer is not None and hello.role in (PeerRole.CONSUMER, PeerRole.BOTH):
            self._producer.peer_up(hello.incarnation, hello.window, reached, hello.endpoints, now)

    def _lost(self, link: Link, incarnation: str, now: float, *, quiesced: bool) -> None:
        self._schedulers.discard(link)
        links = self.known.get(incarnation)
        if links is not None:
            links.pop(link, None)
            if not links:
                del self.known[incarnation]
                self._counts["lost_peers"] += 1
                if self._consumer is not None:
                    self._consumer.peer_lost(incarnation, now, quiesced=quiesced)
                if self._producer is not None:
                    self._producer.peer_lost(incarnation, now)
        connection = self._connections.get(link)
        if connection is not None and connection.session.state is SessionState.INCOMPATIBLE:
            return  # keep the connection: the peer reports when it has changed
        self.outbox.drop(link)
        if link.endpoint:
            # Frames queued for this incarnation must not reach the next one.
            self._sockets.disconnect(link)
            self._open(link, connection.at if connection is not None else "")
        else:
            self._connections.pop(link, None)


def shown_text(text: str) -> str:
    """Return another's text as one line of a log, at most MAX_SHOWN characters.

    The text is a peer's or a request's own.
    """
    line = text if text.isprintable() else repr(text)
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."
