"""The control channel's ZeroMQ sockets, and the messages queued for them. One thread owns both;
others only call `wake`.

One ROUTER that peers connect to, one DEALER for each peer we connect to. A peer is judged by its
address, and by the cluster's CURVE key if there is one, at the handshake (ZeroMQ RFC 27, ZAP).

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
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq
import zmq.auth
import zmq.utils.z85

from vllm_kvpool.embeds.protocol.allowed_peers import OPTION, AllowedPeers
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
from vllm_kvpool.private_files import secret_error

if TYPE_CHECKING:
    import msgspec


logger = logging.getLogger(__name__)

SEND_QUEUE_FRAMES = 1_024  # of a connection; with more it counts as broken
RECEIVE_QUEUE_FRAMES = 128  # of a connection; libzmq then stops reading from it
MAX_RECEIVE_QUEUE_BYTES = RECEIVE_QUEUE_FRAMES * MAX_FRAME_BYTES
FRAMES_AT_ONCE = 512  # read from one socket before others have their turn
BYTES_AT_ONCE = 8 << 20  # read by one `poll`
HANDSHAKE_S = 10.0  # then libzmq closes a connection that is not admitted yet
LINGER_MS = 300  # for what a process sends as it ends
RECONNECT_MS = 100
LONGEST_RECONNECT_MS = 2_000
# Plain numbers: an enum's operators cost more than the calls they are for.
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
POLLIN = int(zmq.POLLIN)
KEY_NAME = "cluster"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # libzmq asks there about each handshake
ZAP_VERSION = b"1.0"
ZAP_DOMAIN = b"kvpool"
NOT_LISTED = f"the host is not in {OPTION}"
NO_KEY = "its CURVE key is not the cluster's (curve_dir)"
ADMITTED, NOT_ADMITTED = (b"200", b"OK"), (b"400", b"not admitted")


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


class RefusedHandshake(NamedTuple):
    """A connection that was closed at its handshake."""

    address: str
    why: str


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
        unfit = secret_error(path)
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"curve_dir: {path} cannot be read ({error}); make one key for the cluster with "
            f"umask 077; python -c \"import zmq.auth; zmq.auth.create_certificates('{directory}', "
            f"'{KEY_NAME}')\" and copy the directory to every engine"
        ) from None
    if unfit:
        raise ConfigError(f"curve_dir {path}: {unfit}")
    if secret is None:
        raise ConfigError(f"curve_dir: {path} holds no secret key")
    return CurveKeys(public, secret, directory)


class _Watched(NamedTuple):
    """A socket, its endpoint ('' for the ROUTER, ZAP_ENDPOINT for libzmq's questions) and its
    descriptor.
    """

    socket: "zmq.Socket[bytes]"
    endpoint: str
    descriptor: int


class ZmqTransport:
    """A process's sockets of the control channel.

    `admits(address)` decides at the handshake who may connect; by default this machine alone.
    ConfigError if `listen` cannot be bound.
    """

    def __init__(
        self,
        listen: str | None,
        keys: CurveKeys | None = None,
        admits: Callable[[str], bool] | None = None,
    ) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_536)
        self._keys = keys
        self._admits = admits or AllowedPeers().allows_address
        self._refused: list[RefusedHandshake] = []
        self._bytes_left = 0  # of this `poll`
        self._epoll = select.epoll()
        self._by_endpoint: dict[str, _Watched] = {}
        self._by_descriptor: dict[int, _Watched] = {}
        self._unsure: dict[int, _Watched] = {}  # may have news that epoll does not report
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup_lock = threading.Lock()
        self._is_closed = False
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self.endpoint = ""
        try:
            if listen is not None:
                self._listen_to_handshakes()
                self._bind(listen)
        except Exception:
            self.close()
            raise

    def _listen_to_handshakes(self) -> None:
        """Have libzmq ask about every connection; without an answer it admits none."""
        handshakes = self._context.socket(zmq.ROUTER)
        handshakes.set(zmq.LINGER, 0)
        handshakes.bind(ZAP_ENDPOINT)
        self._watch(handshakes, ZAP_ENDPOINT)

    def _bind(self, listen: str) -> None:
        router = self._context.socket(zmq.ROUTER)
        self._watch(router, "")
        self._set_common(router, listen)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.ROUTER_HANDOVER, 1)
        router.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        router.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        router.set(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
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
        socket.set(zmq.RCVHWM, RECEIVE_QUEUE_FRAMES)
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

    def disconnect(self, link: Link) -> bool:
        """Close a link that we made and drop what is queued for it; False if there was none."""
        watched = self._by_endpoint.pop(link.endpoint, None) if link.endpoint else None
        if watched is not None:
            self._epoll.unregister(watched.descriptor)
            del self._by_descriptor[watched.descriptor]
            self._unsure.pop(watched.descriptor, None)
            watched.socket.close(linger=0)
        return watched is not None

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
        """Frames that have arrived, at most BYTES_AT_ONCE and one more; waits for one, for `wake`,
        or for the timeout. Answers the handshakes that wait.
        """
        frames: list[Frame] = []
        self._bytes_left = BYTES_AT_ONCE
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
                if self._bytes_left <= 0:
                    break
                if not int(socket.get(zmq.EVENTS)) & POLLIN:
                    return
                if endpoint == ZAP_ENDPOINT:
                    self._judge(socket)
                    continue
                identity = b"" if endpoint else socket.recv(NOBLOCK)
                part = socket.recv(NOBLOCK, copy=False)
                if not part.more:
                    address = "" if endpoint else _address_of(part)
                    frames.append(Frame(Link(endpoint, identity), part.bytes, address))
                    self._bytes_left -= len(part)
                while part.more:  # our frames have one part
                    part = socket.recv(NOBLOCK, copy=False)
        except zmq.Again:
            pass  # the connection was closed meanwhile
        self._unsure[descriptor] = watched

    def _judge(self, handshakes: "zmq.Socket[bytes]") -> None:
        """Answer libzmq's question about one connection."""
        route, *question = handshakes.recv_multipart(NOBLOCK)
        _, _, request_id, _, address, _, mechanism, *credentials = question
        why = self._why_refused(address.decode(), mechanism, credentials)
        if why:
            self._refused.append(RefusedHandshake(address.decode(), why))
        status = NOT_ADMITTED if why else ADMITTED
        answer = [route, b"", ZAP_VERSION, request_id, *status, b"", b""]
        handshakes.send_multipart(answer, NOBLOCK)

    def _why_refused(self, address: str, mechanism: bytes, credentials: list[bytes]) -> str:
        if not self._admits(address):
            return NOT_LISTED
        if self._keys is None:
            return ""
        public = zmq.utils.z85.decode(self._keys.public)
        return "" if [mechanism, *credentials] == [b"CURVE", public] else NO_KEY

    def take_refused(self) -> list[RefusedHandshake]:
        """The connections refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def wake(self) -> None:
        """End a `poll`, this one or the next. Any thread; does nothing after `close`."""
        # Without the lock the descriptor could be closed and reused before the write.
        with self._wakeup_lock:
            if not self._is_closed:
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Send what is queued, for LINGER_MS at most, and close everything."""
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
