"""Connections of a control port: who is at the other end, and what is said to whom.

Owner of all sessions and of the turn's outbox; the control thread's. Tells the machines which peers
are there, at which endpoints, and which are lost.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_kvpool.embeds.consumer import Consumer
from vllm_kvpool.embeds.outbox import Outbox
from vllm_kvpool.embeds.producer import Producer
from vllm_kvpool.embeds.protocol import (
    MANY_SINCE,
    MAX_MESSAGES,
    Envelope,
    Goodbye,
    Held,
    Hello,
    HelloReject,
    ItemNews,
    Message,
    Numbers,
    Role,
    Taken,
    check_hello,
)
from vllm_kvpool.embeds.session import Lost, Rhythm, Say, Session, SessionState, Up
from vllm_kvpool.embeds.sockets import Link, Sockets
from vllm_kvpool.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_LINKS = 16_384
IDLE_LINK_S = 300.0  # a connection without a session is forgotten after so long


@dataclass(slots=True)
class Known:
    """An incarnation that is there, by any of these links."""

    hello: Hello
    links: dict[Link, None] = field(default_factory=dict)
    endpoints: frozenset[str] = frozenset()


@dataclass(slots=True)
class Place:
    """A session and since when its connection is of no use."""

    session: Session
    is_configured: bool
    idle_since: float


class Peers:
    """See the module docstring. `on_scheduler` is called when the own scheduler is there, or is
    again: it has heard of nothing."""

    def __init__(
        self,
        hello: Hello,
        sockets: Sockets,
        rhythm: Rhythm,
        consumer: Consumer | None,
        producer: Producer | None,
        counts: defaultdict[str, float],
        on_scheduler: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.hello = hello
        self._sockets = sockets
        self._rhythm = rhythm
        self._consumer = consumer
        self._producer = producer
        self._counts = counts
        self._on_scheduler = on_scheduler
        self._clock = clock
        self._places: dict[Link, Place] = {}
        self.known: dict[str, Known] = {}
        self._schedulers: set[Link] = set()
        self.outbox = Outbox(hello.incarnation)

    # Connections

    def connect(self, endpoint: str, now: float, *, is_configured: bool = False) -> None:
        """Somebody at this endpoint is to be spoken to, from now on."""
        if Link(endpoint) in self._places or endpoint in self.hello.endpoints:
            return
        if len(self._places) >= MAX_LINKS:
            self._counts["too_many_links"] += 1
            return
        link = Link(endpoint)
        if not self._open(link):
            return
        session = Session(self.hello, self._rhythm, active=True, now=now)
        self._places[link] = Place(session, is_configured, now)
        session.tick(now)
        self.act(link, now)

    def _open(self, link: Link) -> bool:
        """Whether there is a socket for an endpoint now."""
        try:
            self._sockets.connect(link.endpoint)
        except ConfigError as error:
            self._counts["bad_endpoints"] += 1
            logger.warning("kvpool: %s", error)
            return False
        return True

    def _welcome(self, link: Link, now: float) -> Place | None:
        """A connection that was made to us."""
        if len(self._places) >= MAX_LINKS:
            self._counts["too_many_links"] += 1
            return None
        session = Session(self.hello, self._rhythm, active=False, now=now)
        place = self._places[link] = Place(session, is_configured=False, idle_since=now)
        return place

    def _forget_link(self, link: Link) -> None:
        del self._places[link]
        self.outbox.drop(link)
        self._schedulers.discard(link)
        if link.endpoint:
            self._sockets.disconnect(link)

    # What is said

    def send_to(self, incarnation: str, body: Message, now: float) -> None:
        """To an incarnation; nothing if it is not there."""
        known = self.known.get(incarnation)
        if known is not None:
            self.outbox.add(next(iter(known.links)), incarnation, body, now)

    def _say(self, link: Link, body: Message, target: str, now: float) -> None:
        """With what else the turn has for this link."""
        self.outbox.add(link, target, body, now)

    def tell(self, body: ItemNews | Taken | Held | Numbers, now: float) -> None:
        """To the own scheduler."""
        for link in self._schedulers:
            self.outbox.add(link, "", body, now)

    def flush(self, until: float) -> None:
        """Say what is due by then, in as few frames as may be."""
        for link, said in self.outbox.take(until):
            place = self._places.get(link)
            peer = place.session.peer if place is not None else None
            most = MAX_MESSAGES if peer is not None and peer.versions[1] >= MANY_SINCE else 1
            for frame in self.outbox.frames(said, most):
                if not self._sockets.send(link, frame):
                    self._broken(link, place)
                    break
            else:
                if place is not None:
                    place.session.said(self._clock())

    def _broken(self, link: Link, place: Place | None) -> None:
        if place is not None:
            self._counts["broken_links"] += 1
            place.session.lost()
            if link.endpoint:
                self._open(link)  # there may have been no descriptor for it when it was lost

    def say_goodbye(self, now: float) -> None:
        """To all who are there: nothing of this process is in flight."""
        for incarnation, known in self.known.items():
            for link in known.links:
                self._say(link, Goodbye(), incarnation, now)

    # Sessions

    def hear(self, link: Link, envelope: Envelope, body: Message, now: float) -> Session | None:
        """The session that a message is to be taken of; None if it is for sessions alone, or of
        somebody else. ProtocolError for a greeting of what cannot be."""
        place = self._places.get(link)
        if place is None:
            place = self._welcome(link, now)
            if place is None:
                return None
        session = place.session
        if isinstance(body, Hello):
            check_hello(body)
            session.hello(body, now)
        elif isinstance(body, HelloReject):
            if session.rejected(body, now):
                where = link.endpoint or "of another process"
                logger.warning("kvpool: the peer %s refuses: %s", where, body.text)
        elif not self._are_both(session, envelope):
            # Meant for who was here before, or from who has forgotten us: greet anew.
            self._counts["strays"] += 1
            self._say(link, self.hello, "", now)
        elif session.is_up:
            return session
        return None

    def _are_both(self, session: Session, envelope: Envelope) -> bool:
        """Whether a frame is to us and from who the session is with."""
        peer = session.peer
        return (
            envelope.target in ("", self.hello.incarnation)
            and peer is not None
            and peer.incarnation == envelope.source
        )

    def is_told_by_peer(self, link: Link, envelope: Envelope) -> bool:
        """Whether a further message of an envelope is a peer's that is up, to us."""
        place = self._places.get(link)
        session = place.session if place is not None and place.session.is_up else None
        return (
            session is not None
            and not session.is_of_scheduler
            and self._are_both(session, envelope)
        )

    def introduce(self, hello: Hello, now: float) -> None:
        """We have changed: the weights are others now."""
        self.hello = hello
        for link, place in list(self._places.items()):
            place.session.introduce(hello)
            self.act(link, now)

    def tick(self, now: float) -> None:
        """Whatever is due. Called often."""
        for link, place in list(self._places.items()):
            place.session.tick(now)
            self.act(link, now)
            if place.session.is_up:
                place.idle_since = now
            elif not place.is_configured and now - place.idle_since > IDLE_LINK_S:
                self._forget_link(link)

    def states(self) -> Counter[SessionState]:
        """How many sessions there are of each."""
        return Counter(place.session.state for place in self._places.values())

    def act(self, link: Link, now: float) -> None:
        """What the session of a link wants done."""
        place = self._places.get(link)
        if place is None:
            return
        for action in place.session.take_actions():
            match action:
                case Say(body):
                    peer = place.session.peer
                    self._say(link, body, peer.incarnation if peer is not None else "", now)
                case Up(hello):
                    self._up(link, hello, now)
                case Lost(incarnation, quiet):
                    self._lost(link, incarnation, now, quiet=quiet)

    def _up(self, link: Link, hello: Hello, now: float) -> None:
        if hello.role is Role.SCHEDULER:
            self._schedulers.add(link)
            self._on_scheduler()
            return
        known = self.known.setdefault(hello.incarnation, Known(hello))
        known.hello = hello
        known.links[link] = None
        reached = {each.endpoint for each in known.links if each.endpoint}
        if hello.rank < len(hello.endpoints):
            reached.add(hello.endpoints[hello.rank])
        known.endpoints = frozenset(reached)
        if self._consumer is not None and hello.role in (Role.PRODUCER, Role.BOTH):
            self._consumer.peer_up(hello.incarnation, known.endpoints, now)
        if self._producer is not None and hello.role in (Role.CONSUMER, Role.BOTH):
            self._producer.peer_up(
                hello.incarnation, hello.window, known.endpoints, hello.endpoints, now
            )

    def _lost(self, link: Link, incarnation: str, now: float, *, quiet: bool) -> None:
        self._schedulers.discard(link)
        known = self.known.get(incarnation)
        if known is not None:
            known.links.pop(link, None)
            if not known.links:
                del self.known[incarnation]
                self._counts["lost_peers"] += 1
                if self._consumer is not None:
                    self._consumer.peer_lost(incarnation, now, quiet=quiet)
                if self._producer is not None:
                    self._producer.peer_lost(incarnation, now)
        place = self._places.get(link)
        if place is not None and place.session.state is SessionState.INCOMPATIBLE:
            return  # the connection stands: whoever changes says so
        self.outbox.drop(link)
        if link.endpoint:
            # What is queued for who was there is not for who comes next.
            self._sockets.disconnect(link)
            self._open(link)
        else:
            self._places.pop(link, None)
