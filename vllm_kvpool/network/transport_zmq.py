"""ZeroMQ sockets between processes. One thread owns them; others only call `wake`.

One ROUTER that peers connect to, one DEALER for each peer we connect to. A peer is judged by its
address, and by the cluster's CURVE key if there is one, at the handshake (ZeroMQ RFC 27, ZAP).

zmq's own poll looks at every socket each time, which for hundreds of peers takes longer than
handling a message; here epoll says which sockets have news. A zmq descriptor reports news once,
and any call on its socket may consume the report: so sockets that were sent to, or not read to
the end, are read before waiting (zmq_getsockopt(3), ZMQ_FD).
"""

import os
import secrets
import select
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth
import zmq.utils.z85

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.network.allowed_peers import OPTION, AllowedPeers
from vllm_kvpool.private_files import secret_error

SEND_QUEUE_FRAMES = 1_024  # of a connection; with more it counts as broken
RECEIVE_QUEUE_FRAMES = 128  # of a connection; libzmq then stops reading from it
FRAMES_AT_ONCE = 512  # read from one socket before others have their turn
BYTES_AT_ONCE = 8 << 20  # read by one `poll`
HANDSHAKE_S = 10.0  # then libzmq closes a connection that is not admitted yet
LINGER_MS = 300  # for what a process sends as it ends
HEARTBEAT_MS = 1_000  # where connections are watched
SILENT_MS = 3_000  # without an answer to a heartbeat, or to a connection, a host is away
CUT_SHARE = 0.9
"""Handshakes that end within this share of SILENT_MS were cut by the peer. They are repeated for at
most that time."""
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
WATCHED_EVENTS = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
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


class LinkEnd(Enum):
    """The reason why an outgoing connection has ended or could not be made."""

    LOST = "its process or host is gone"
    REFUSED = "no process listens there"
    DENIED = f"it does not list this host in its {OPTION}"
    SILENT = "nothing answers as this channel does: a firewall or proxy may stand before it"


class EndedLink(NamedTuple):
    """A link that we made whose connection has ended."""

    link: Link
    why: LinkEnd


class CurveKeys(NamedTuple):
    """The cluster's CURVE keys."""

    public: bytes
    secret: bytes


def read_keys(directory: str) -> CurveKeys | None:
    """Return the keys in `{directory}/cluster.key_secret`; None without a directory.

    Raises ConfigError if the file has none.
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
    return CurveKeys(public, secret)


class _Watched(NamedTuple):
    """A socket, its endpoint and its descriptor.

    The endpoint is '' for the ROUTER and ZAP_ENDPOINT for libzmq's questions; a monitor's is that
    of the socket it watches.
    """

    socket: "zmq.Socket[bytes]"
    endpoint: str
    descriptor: int
    is_monitor: bool = False


class ZmqTransport:
    """A process's sockets of one channel.

    A frame has at most `frame_bytes`; a larger one ends its connection. `admits(address)` decides
    at the handshake who may connect; by default this machine alone. `watches`: report each
    connection of ours that ends (`take_ended`), and find the silent ones by heartbeats.
    ConfigError, which names `option`, if `listen` cannot be bound.
    """

    def __init__(
        self,
        listen: str | None,
        frame_bytes: int,
        keys: CurveKeys | None = None,
        admits: Callable[[str], bool] | None = None,
        *,
        watches: bool = False,
        option: str = "listen, or ec_port",
    ) -> None:
        self._option = option
        self._watches = watches
        self._monitors: dict[str, _Watched] = {}  # by the endpoint that we connect to
        self._began: dict[str, float] = {}  # connections that are not up yet, since when
        # Endpoints whose handshake was cut, by the time of the first cut.
        self._cut: dict[str, float] = {}
        self._ended: dict[Link, LinkEnd] = {}
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_536)
        self._frame_bytes = frame_bytes
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
            router.curve_publickey, router.curve_secretkey = self._keys
        try:
            router.bind(listen)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{listen} cannot be bound ({error}); every rank of every engine of a host needs a "
                f"port of its own: set {self._option} to a free range"
            ) from None
        self.endpoint = router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _watch(self, socket: "zmq.Socket[bytes]", endpoint: str, *, monitor: bool = False) -> None:
        descriptor = int(socket.FD)
        watched = _Watched(socket, endpoint, descriptor, monitor)
        (self._monitors if monitor else self._by_endpoint)[endpoint] = watched
        self._by_descriptor[descriptor] = watched
        self._epoll.register(descriptor, select.EPOLLIN)
        self._unsure[descriptor] = watched

    def _unwatch(self, watched: _Watched) -> None:
        self._epoll.unregister(watched.descriptor)
        del self._by_descriptor[watched.descriptor]
        self._unsure.pop(watched.descriptor, None)

    def _set_common(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        socket.set(zmq.LINGER, LINGER_MS)
        socket.set(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        socket.set(zmq.RCVHWM, RECEIVE_QUEUE_FRAMES)
        socket.set(zmq.MAXMSGSIZE, self._frame_bytes)
        if "[" in endpoint:
            socket.set(zmq.IPV6, 1)
        if self._watches:
            socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.set(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)

    def connect(self, endpoint: str, at: str = "") -> Link:
        """Connect to an endpoint, `at` another address if its name was resolved; return the link.

        ConfigError if it is no endpoint, or if there is no file descriptor for it.
        """
        if endpoint not in self._by_endpoint:
            dealer = self._new_dealer(at or endpoint)
            try:
                if self._watches:
                    self._watch(dealer.get_monitor_socket(WATCHED_EVENTS), endpoint, monitor=True)
                    self._began[endpoint] = time.monotonic()
                dealer.connect(at or endpoint)
            except zmq.ZMQError as error:
                self._unmonitor(dealer, endpoint)
                dealer.close(linger=0)
                raise ConfigError(f"{endpoint!r} cannot be connected to: {error}") from None
            self._watch(dealer, endpoint)
        return Link(endpoint=endpoint)

    def _unmonitor(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        self._end_attempts(endpoint)
        monitor = self._monitors.pop(endpoint, None)
        if monitor is not None:
            self._unwatch(monitor)
            socket.disable_monitor()
            monitor.socket.close(linger=0)

    def _new_dealer(self, endpoint: str) -> "zmq.Socket[bytes]":
        try:
            dealer = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise ConfigError(f"no socket for {endpoint!r}: {error}; see ulimit -n") from None
        self._set_common(dealer, endpoint)
        dealer.set(zmq.ROUTING_ID, b"k" + secrets.token_bytes(8))
        dealer.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.set(zmq.RECONNECT_IVL_MAX, LONGEST_RECONNECT_MS)
        if self._watches:
            dealer.set(zmq.CONNECT_TIMEOUT, SILENT_MS)
            dealer.set(zmq.HANDSHAKE_IVL, SILENT_MS)
        if self._keys is not None:
            dealer.curve_publickey, dealer.curve_secretkey = self._keys
            dealer.curve_serverkey = self._keys.public
        return dealer

    def disconnect(self, link: Link) -> bool:
        """Close a link that we made and drop what is queued for it; False if there was none."""
        watched = self._by_endpoint.pop(link.endpoint, None) if link.endpoint else None
        if watched is not None:
            self._unmonitor(watched.socket, link.endpoint)
            self._unwatch(watched)
            self._ended.pop(link, None)
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
        """Wait for a frame, for `wake` or for the timeout, and return the frames that have arrived.

        Returns at most BYTES_AT_ONCE and one frame more. Answers the handshakes that wait.
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
        for link in self._ended:  # what came before the end
            self._read(self._by_endpoint[link.endpoint], frames)
        return frames

    def _read(self, watched: _Watched, frames: list[Frame]) -> None:
        """Read at most FRAMES_AT_ONCE frames of a socket, so that others have their turn."""
        socket, endpoint, descriptor, is_monitor = watched
        try:
            for _ in range(FRAMES_AT_ONCE):
                if self._bytes_left <= 0:
                    break
                if not int(socket.get(zmq.EVENTS)) & POLLIN:
                    return
                if endpoint == ZAP_ENDPOINT:
                    self._judge(socket)
                    continue
                if is_monitor:
                    self._note_event(endpoint, socket.recv_multipart(NOBLOCK)[0])
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
        """Return the connections refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def _note_event(self, endpoint: str, event: bytes) -> None:
        """Note what libzmq says of a connection that we made (zmq_socket_monitor(3))."""
        match int.from_bytes(event[:2], sys.byteorder):
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._end_attempts(endpoint)
                return
            case zmq.EVENT_DISCONNECTED if endpoint not in self._began:
                why = LinkEnd.LOST
            case zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                if self._is_tried_again(endpoint):
                    return
                why = LinkEnd.SILENT
            case zmq.EVENT_CLOSED:
                waited_s = time.monotonic() - self._began.get(endpoint, 0.0)
                is_slow = endpoint in self._began and waited_s > SILENT_MS / 1000
                why = LinkEnd.SILENT if is_slow else LinkEnd.REFUSED
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                why = LinkEnd.DENIED
            case _:
                why = LinkEnd.SILENT
        self._ended.setdefault(Link(endpoint), why)

    def _end_attempts(self, endpoint: str) -> None:
        self._began.pop(endpoint, None)
        self._cut.pop(endpoint, None)

    def _is_tried_again(self, endpoint: str) -> bool:
        """Return True if a connection that was cut in its handshake may still come up.

        The peer may be a proxy, or a process that has ended at that moment. libzmq connects again
        `RECONNECT_MS` later, and a process that has ended refuses the second attempt.
        """
        now, longest_s = time.monotonic(), CUT_SHARE * SILENT_MS / 1000
        lasted_s = now - self._began.get(endpoint, now)
        cut_s = now - self._cut.setdefault(endpoint, now)
        self._began[endpoint] = now
        return max(lasted_s, cut_s) < longest_s

    def take_ended(self) -> list[EndedLink]:
        """Return the links that we made whose connection ended since the last call, with `watches`.

        libzmq connects again unless the link is disconnected. Frames that came before the end are
        read before it is reported.
        """
        ended, self._ended = self._ended, {}
        return [EndedLink(*each) for each in ended.items()]

    def wake(self) -> None:
        """End a `poll`, this one or the next. Any thread; does nothing after `close`."""
        # Without the lock the descriptor could be closed and reused before the write.
        with self._wakeup_lock:
            if not self._is_closed:
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Send what is queued, for LINGER_MS at most, and close everything."""
        for endpoint in list(self._monitors):
            self._unmonitor(self._by_endpoint[endpoint].socket, endpoint)
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
