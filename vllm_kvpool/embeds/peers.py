"""Connections of a control port: who is at the other end, and what is said to whom.

Owner of all sessions and of the turn's outbox; the control thread's. Tells the machines which peers
are there, at which endpoints, which are lost, and which endpoints it does not connect to.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_kvpool.embeds.allowed import OPTION, Allowed, AllowedPeers, Endpoint, LookUp, Verdict
from vllm_kvpool.embeds.consumer import Consumer
from vllm_kvpool.embeds.guard import Guard
from vllm_kvpool.embeds.outbox import Outbox
from vllm_kvpool.embeds.producer import Producer
from vllm_kvpool.embeds.protocol import (
    MANY_SINCE,
    MAX_MESSAGES,
    Code,
    Envelope,
    Goodbye,
    Heartbeat,
    Held,
    Hello,
    HelloReject,
    ItemNews,
    Message,
    MooncakeWindow,
    Numbers,
    Role,
    Taken,
    check_hello,
)
from vllm_kvpool.embeds.session import Lost, Rhythm, Say, Session, SessionState, Up
from vllm_kvpool.embeds.sockets import Frame, Link, Sockets
from vllm_kvpool.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_LINKS = 16_384
IDLE_LINK_S = 300.0  # a connection without a session is forgotten after so long
LOOK_UP_EVERY_S = 10.0  # a name whose host does not answer, or that is listed
MAX_REMEMBERED = 1024  # endpoints that were refused, and logged
MAX_SHOWN = 300  # characters of a peer's own words in a log


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
    address: str = ""  # of who has connected to us
    at: str = ""  # what an endpoint's name was resolved to
    looked_up_at: float = 0.0


class Peers:
    """See the module docstring. `on_scheduler` is called when the own scheduler is there, or is
    again: it has heard of nothing. `look_up(name)` has `resolved` called, and is False where too
    many names wait."""

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
        guard: Guard,
        allowed: AllowedPeers,
        look_up: Callable[[str], bool],
    ) -> None:
        self.hello = hello
        self._sockets = sockets
        self._rhythm = rhythm
        self._consumer = consumer
        self._producer = producer
        self._counts = counts
        self._on_scheduler = on_scheduler
        self._clock = clock
        self._guard = guard
        self._log = guard.log
        self._allowed = allowed
        self._look_up = look_up
        self._unresolved: dict[str, dict[str, Endpoint]] = {}  # name -> endpoints, as named
        self._refused: dict[str, None] = {}  # endpoints that were logged
        self._names_at = float("-inf")  # when the listed names were last looked up
        self._places: dict[Link, Place] = {}
        self.known: dict[str, Known] = {}
        self._schedulers: set[Link] = set()
        self.outbox = Outbox(hello.incarnation)

    # Connections

    def connect(self, endpoint: str, now: float) -> None:
        """Somebody at this endpoint, which a request or a peer has named, is to be spoken to."""
        if endpoint in self.hello.endpoints:
            return
        place = self._places.get(Link(endpoint))
        if place is None:
            self._judged(endpoint, self._allowed.judge(endpoint), now)
        elif place.at and not place.session.is_up and now - place.looked_up_at > LOOK_UP_EVERY_S:
            place.looked_up_at = now
            self._judged(endpoint, self._allowed.judge(endpoint), now)

    def connect_configured(self, endpoint: str, now: float) -> None:
        """Somebody at this endpoint of `peers` is to be spoken to, from now on."""
        if Link(endpoint) not in self._places and endpoint not in self.hello.endpoints:
            self._connect(endpoint, "", now, is_configured=True)

    def _judged(self, endpoint: str, verdict: Verdict, now: float) -> None:
        match verdict:
            case Allowed(at):
                self._connect(endpoint, at if at != endpoint else "", now)
            case LookUp(named):
                if self._look_up(named.host):
                    self._unresolved.setdefault(named.host, {})[endpoint] = named
                else:
                    self._refuse(endpoint, "too many names are being looked up", now)
            case _:
                self._refuse(endpoint, verdict.text, now)

    def resolved(self, name: str, addresses: tuple[str, ...], now: float) -> None:
        """What a name is resolved to; none if it cannot be."""
        if name in self._allowed.names:
            self._allowed.learn(name, addresses)
        for endpoint, named in self._unresolved.pop(name, {}).items():
            self._judged(endpoint, self._allowed.judge_addresses(named, addresses), now)

    def _refuse(self, endpoint: str, why: str, now: float) -> None:
        """Go on without an endpoint: whoever waits for its items is told."""
        self._counts["refused_endpoints"] += 1
        shown = shown_text(endpoint)
        text = f"{shown} is not connected to: {why}; {OPTION} lists the hosts that may be peers"
        if endpoint not in self._refused:
            self._refused[endpoint] = None
            while len(self._refused) > MAX_REMEMBERED:
                del self._refused[next(iter(self._refused))]
            self._log.log(logging.WARNING, "refused endpoint", endpoint, "kvpool: %s", text)
        if self._consumer is not None:
            self._consumer.refused(endpoint, text, now)
        if self._producer is not None:
            self._producer.refused(endpoint, now)

    def _connect(self, endpoint: str, at: str, now: float, *, is_configured: bool = False) -> None:
        link = Link(endpoint)
        place = self._places.get(link)
        if place is not None:
            if place.at != at:  # its name is another host's now
                place.at = at
                self._sockets.disconnect(link)
                self._open(link, at)
            return
        if len(self._places) >= MAX_LINKS:
            self._counts["too_many_links"] += 1
            return
        if not self._open(link, at):
            return
        session = Session(self.hello, self._rhythm, active=True, now=now)
        self._places[link] = Place(session, is_configured, now, at=at, looked_up_at=now)
        session.tick(now)
        self.act(link, now)

    def _open(self, link: Link, at: str = "") -> bool:
        """Whether there is a socket for an endpoint now."""
        try:
            self._sockets.connect(link.endpoint, at)
        except ConfigError as error:
            self._counts["bad_endpoints"] += 1
            self._log.log(
                logging.WARNING, "bad endpoint", link.endpoint, "kvpool: %s", shown_text(str(error))
            )
            return False
        return True

    def _welcome(self, link: Link, address: str, now: float) -> Place | None:
        """A connection that was made to us."""
        if len(self._places) >= MAX_LINKS:
            self._counts["too_many_links"] += 1
            return None
        session = Session(self.hello, self._rhythm, active=False, now=now)
        place = self._places[link] = Place(session, False, now, address)
        return place

    def _is_stranger(self, frame: Frame, body: Message, now: float) -> bool:
        """Whether a frame comes from a host that may not be a peer; then nothing is kept of it."""
        if self._allowed.allows_address(frame.address):
            return False
        self._counts["strangers"] += 1
        self.look_up_names(now)  # it may be a listed one's new address
        self._log.log(
            logging.WARNING,
            "stranger",
            frame.address,
            "kvpool: %s speaks at the control port and is not answered: it is not in %s",
            frame.address or "somebody without an address",
            OPTION,
        )
        if isinstance(body, Hello):
            text = f"{frame.address} is not in {OPTION} of the engine that it connects to"
            self._say(frame.link, HelloReject(Code.INCOMPATIBLE, text), "", now)
        return True

    def look_up_names(self, now: float) -> None:
        """Learn the addresses of the names that are listed, now and then."""
        if now - self._names_at > LOOK_UP_EVERY_S:
            self._names_at = now
            for name in self._allowed.names:
                self._look_up(name)

    def _window_refused(self, told: Hello) -> HelloReject | None:
        """Why no rows are written where a peer says that its window is; None if they are."""
        window = told.window
        if not isinstance(window, MooncakeWindow) or self._producer is None:
            return None  # memory of this machine, of this user
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

    def tell(
        self, body: ItemNews | Taken | Held | Numbers | Heartbeat | Goodbye, now: float
    ) -> None:
        """To the own scheduler."""
        for link in self._schedulers:
            self.outbox.add(link, "", body, now)

    def flush(self, until: float) -> None:
        """Say what is due by then, in as few frames as may be."""
        for link, said in self.outbox.take(until):
            place = self._places.get(link)
            if not self._guard("flush", self._send, link, place, said):
                self._broken(link, place)

    def _send(self, link: Link, place: Place | None, said: list[tuple[str, Message]]) -> None:
        peer = place.session.peer if place is not None else None
        most = MAX_MESSAGES if peer is not None and peer.versions[1] >= MANY_SINCE else 1
        for frame in self.outbox.frames(said, most):
            if not self._sockets.send(link, frame):
                self._broken(link, place)
                return
        if place is not None:
            place.session.said(self._clock())

    def _broken(self, link: Link, place: Place | None) -> None:
        if place is not None:
            self._counts["broken_links"] += 1
            place.session.lost()
            if link.endpoint:
                # There may have been no descriptor for it when it was lost.
                self._open(link, place.at)

    def say_goodbye(self, now: float) -> None:
        """To all who are there: nothing of this process is in flight."""
        for incarnation, known in self.known.items():
            for link in known.links:
                self._say(link, Goodbye(), incarnation, now)

    # Sessions

    def hear(self, frame: Frame, envelope: Envelope, body: Message, now: float) -> Session | None:
        """The session that a message is to be taken of; None if it is for sessions alone, or of
        somebody else. ProtocolError for a greeting of what cannot be."""
        link = frame.link
        place = self._places.get(link)
        if place is None or place.address != frame.address:
            if self._is_stranger(frame, body, now):
                return None
            if place is None:
                place = self._welcome(link, frame.address, now)
            if place is None:
                return None
            place.address = frame.address
        session = place.session
        if isinstance(body, Hello):
            check_hello(body)
            self._greeted(link, place, body, now)
        elif isinstance(body, HelloReject):
            if session.rejected(body, now):
                where, text = link.endpoint or place.address, shown_text(body.text)
                kind = "refusal"
                self._log.log(
                    logging.WARNING, kind, where, "kvpool: the peer %s refuses: %s", where, text
                )
        elif not self._are_both(session, envelope):
            # Meant for who was here before, or from who has forgotten us: greet anew.
            self._counts["strays"] += 1
            self._say(link, self.hello, "", now)
        elif session.is_up:
            return session
        return None

    def _greeted(self, link: Link, place: Place, told: Hello, now: float) -> None:
        """Who is there has introduced itself."""
        if told.role is Role.SCHEDULER and not self._allowed.is_own_address(place.address):
            self._counts["strangers"] += 1
            return
        refusal = self._window_refused(told)
        if refusal is None:
            place.session.hello(told, now)
            return
        self._say(link, refusal, "", now)
        where = link.endpoint or place.address
        self._log.log(
            logging.WARNING, "window", where, "kvpool: the peer %s: %s", where, refusal.text
        )
        place.session.lost()

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
        self._log.tick()
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
            self._open(link, place.at if place is not None else "")
        else:
            self._places.pop(link, None)


def shown_text(text: str) -> str:
    """A peer's or a request's own words, for a log: one line of them."""
    line = text if text.isprintable() else repr(text)
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."
