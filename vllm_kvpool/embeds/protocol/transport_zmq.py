"""The control channel's ZeroMQ sockets, and the messages queued for them. One thread owns both;
others only call `wake`.

One ROUTER that peers connect to, one DEALER for each peer we connect to. With a directory of
CURVE keys both ends prove that they hold the cluster's key, and frames are encrypted.

zmq's own poll looks at every socket each time, which for hundreds of peers takes longer than
handling a message; here epoll says which sockets have news. A zmq descriptor reports news once,
and any call on its socket may consume the report: so sockets that were sent to, or not read to
the end, are read before waiting (zmq_getsockopt(3), ZMQ_FD).
"""

import logging
import os
import secrets
import select
import threading
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from vllm_kvpool.embeds.protocol.messages import (
    FULL_FRAME_BYTES,
    MAX_FRAME_BYTES,
    MAX_MESSAGES,
    Complete,
    Envelope,
    HeldBytes,
    Message,
    MetricSamples,
    Taken,
    encode,
    encode_body,
)
from vllm_kvpool.errors import ConfigError

if TYPE_CHECKING:
    import msgspec


logger = logging.getLogger(__name__)

SEND_QUEUE_FRAMES = 20_000  # of a connection; with more it counts as broken
FRAMES_AT_ONCE = 512  # read from one socket before others have their turn
LINGER_MS = 300  # for what a process sends as it ends
RECONNECT_MS = 100
LONGEST_RECONNECT_MS = 2_000
# Plain numbers: an enum's operators cost more than the calls they are for.
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
POLLIN = int(zmq.POLLIN)
KEY_NAME = "cluster"
CURVE_DOMAIN = "*"


class Link(NamedTuple):
    """An endpoint that we connect to, or the identity of a connection made to us."""

    endpoint: str = ""
    identity: bytes = b""


class Frame(NamedTuple):
    """A frame that has arrived."""

    link: Link
    data: bytes
    address: str = ""
    """The peer's address as the kernel knows it; '' for a connection that we made."""


class CurveKeys(NamedTuple):
    """The cluster's CURVE keys."""

    public: bytes
    secret: bytes
    directory: str


def read_keys(directory: str) -> CurveKeys | None:
    """The keys in `{directory}/cluster.key_secret`; None without a directory. ConfigError if
    there are none.
    """
    if not directory:
        return None
    path = Path(directory) / f"{KEY_NAME}.key_secret"
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"curve_dir: {path} cannot be read ({error}); make one key for the cluster with "
            f"python -c \"import zmq.auth; zmq.auth.create_certificates('{directory}', "
            f"'{KEY_NAME}')\" and copy the directory to every engine"
        ) from None
    if secret is None:
        raise ConfigError(f"curve_dir: {path} holds no secret key")
    return CurveKeys(public, secret, directory)


class _Watched(NamedTuple):
    """A socket, its endpoint ('' for the ROUTER) and its descriptor."""

    socket: "zmq.Socket[bytes]"
    endpoint: str
    descriptor: int


class ZmqTransport:
    """A process's sockets of the control channel. ConfigError if `listen` cannot be bound."""

    def __init__(self, listen: str | None, keys: CurveKeys | None = None) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_536)
        self._keys = keys
        self._epoll = select.epoll()
        self._by_endpoint: dict[str, _Watched] = {}
        self._by_descriptor: dict[int, _Watched] = {}
        self._unsure: dict[int, _Watched] = {}  # may have news that epoll does not report
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup_lock = threading.Lock()
        self._is_closed = False
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._authenticator: ThreadAuthenticator | None = None
        self.endpoint = ""
        try:
            if keys is not None and listen:
                self._authenticate(keys)
            if listen is not None:
                self._bind(listen)
        except Exception:
            self.close()
            raise

    def _authenticate(self, keys: CurveKeys) -> None:
        """Check CURVE keys of connections; libzmq asks on a socket that pyzmq's own thread owns."""
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()  # raises if the machine is too busy to start a thread
        self._authenticator.configure_curve(domain=CURVE_DOMAIN, location=keys.directory)

    def _bind(self, listen: str) -> None:
        router = self._context.socket(zmq.ROUTER)
        self._watch(router, "")
        self._set_common(router, listen)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.ROUTER_HANDOVER, 1)
        if self._keys is not None:
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = self._keys[:2]
        try:
            router.bind(listen)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"listen: {listen} cannot be bound ({error}); every rank of every engine of a host "
                "needs a port of its own: set listen, or ec_port, to a free range"
            ) from None
        self.endpoint = router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _watch(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        descriptor = int(socket.FD)
        watched = _Watched(socket, endpoint, descriptor)
        self._by_endpoint[endpoint] = self._by_descriptor[descriptor] = watched
        self._epoll.register(descriptor, select.EPOLLIN)
        self._unsure[descriptor] = watched

    def _set_common(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        socket.set(zmq.LINGER, LINGER_MS)
        socket.set(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        socket.set(zmq.RCVHWM, SEND_QUEUE_FRAMES)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if "[" in endpoint:
            socket.set(zmq.IPV6, 1)

    def connect(self, endpoint: str, at: str = "") -> Link:
        """The link to an endpoint, connected `at` another address if its name was resolved.

        ConfigError if it is no endpoint, or if there is no file descriptor for it.
        """
        if endpoint not in self._by_endpoint:
            dealer = self._new_dealer(at or endpoint)
            try:
                dealer.connect(at or endpoint)
            except zmq.ZMQError as error:
                dealer.close(linger=0)
                raise ConfigError(f"{endpoint!r} cannot be connected to: {error}") from None
            self._watch(dealer, endpoint)
        return Link(endpoint=endpoint)

    def _new_dealer(self, endpoint: str) -> "zmq.Socket[bytes]":
        try:
            dealer = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise ConfigError(f"no socket for {endpoint!r}: {error}; see ulimit -n") from None
        self._set_common(dealer, endpoint)
        dealer.set(zmq.ROUTING_ID, b"k" + secrets.token_bytes(8))
        dealer.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.set(zmq.RECONNECT_IVL_MAX, LONGEST_RECONNECT_MS)
        if self._keys is not None:
            dealer.curve_publickey, dealer.curve_secretkey = self._keys[:2]
            dealer.curve_serverkey = self._keys.public
        return dealer

    def disconnect(self, link: Link) -> None:
        """Close a link that we made and drop what is queued for it."""
        watched = self._by_endpoint.pop(link.endpoint, None) if link.endpoint else None
        if watched is not None:
            self._epoll.unregister(watched.descriptor)
            del self._by_descriptor[watched.descriptor]
            self._unsure.pop(watched.descriptor, None)
            watched.socket.close(linger=0)

    def send(self, link: Link, data: bytes) -> bool:
        """Queue a frame; False if the connection is broken. Does not block."""
        watched = self._by_endpoint.get(link.endpoint)
        if watched is None:
            return False
        self._unsure[watched.descriptor] = watched
        try:
            if not link.endpoint:
                watched.socket.send(link.identity, NOBLOCK_MORE)
            watched.socket.send(data, NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def poll(self, timeout_s: float) -> list[Frame]:
        """Frames that have arrived; waits for one, for `wake`, or for the timeout."""
        frames: list[Frame] = []
        unsure, self._unsure = self._unsure, {}
        for watched in unsure.values():
            self._read(watched, frames)
        is_busy = bool(frames or self._unsure)
        for descriptor, _ in self._epoll.poll(0.0 if is_busy else max(0.0, timeout_s)):
            if descriptor == self._wakeup:
                os.eventfd_read(self._wakeup)
            else:
                self._read(self._by_descriptor[descriptor], frames)
        return frames

    def _read(self, watched: _Watched, frames: list[Frame]) -> None:
        """Read at most FRAMES_AT_ONCE frames of a socket, so that others have their turn."""
        socket, endpoint, descriptor = watched
        try:
            for _ in range(FRAMES_AT_ONCE):
                if not int(socket.get(zmq.EVENTS)) & POLLIN:
                    return
                identity = b"" if endpoint else socket.recv(NOBLOCK)
                part = socket.recv(NOBLOCK, copy=False)
                if not part.more:
                    address = "" if endpoint else _address_of(part)
                    frames.append(Frame(Link(endpoint, identity), part.bytes, address))
                while part.more:  # our frames have one part
                    part = socket.recv(NOBLOCK, copy=False)
        except zmq.Again:
            pass  # the connection was closed meanwhile
        self._unsure[descriptor] = watched

    def wake(self) -> None:
        """End a `poll`, this one or the next. Any thread; does nothing after `close`."""
        # Without the lock the descriptor could be closed and reused before the write.
        with self._wakeup_lock:
            if not self._is_closed:
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Send what is queued, for LINGER_MS at most, and close everything."""
        if self._authenticator is not None:
            self._authenticator.stop()
        for watched in self._by_endpoint.values():
            watched.socket.close()
        self._context.term()
        self._epoll.close()
        with self._wakeup_lock:
            self._is_closed = True
            os.close(self._wakeup)


def _address_of(part: zmq.Frame) -> str:
    try:
        return str(part.get("Peer-Address"))
    except zmq.ZMQError:  # a transport without addresses
        return ""


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
        """When the next messages must go."""
        return min(self._due_at.values(), default=float("inf"))

    def take(self, now: float) -> list[tuple[Link, list[tuple[str, Message]]]]:
        """Remove and return the messages that are due, by link."""
        due = [link for link, at in self._due_at.items() if at <= now]
        for link in due:
            del self._due_at[link]
        return [(link, self._waiting.pop(link)) for link in due]

    def frames(self, queued: list[tuple[str, Message]]) -> Iterator[bytes]:
        """The messages in as few frames as possible, each to one target."""
        for target, messages in groupby(queued, key=itemgetter(0)):
            bodies: list[msgspec.Raw] = []
            nbytes = 0
            for _, body in messages:
                raw = encode_body(body)
                nbytes += len(memoryview(raw))
                if bodies and (nbytes > FULL_FRAME_BYTES or len(bodies) == MAX_MESSAGES):
                    yield encode(Envelope(self._source, target, tuple(bodies)))
                    bodies, nbytes = [], len(memoryview(raw))
                bodies.append(raw)
            yield encode(Envelope(self._source, target, tuple(bodies)))
