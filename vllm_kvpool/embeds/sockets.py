"""Every socket of a process's control channel. Owned by one thread; others may only call `wake`.

One ROUTER that peers connect to, one DEALER for each peer we connect to. A link names where a frame
came from or goes to: an endpoint of ours, or the identity of a connection made to us. With a
directory of CURVE keys both ends prove that they hold the cluster's key, and frames are encrypted.
"""

import logging
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from vllm_kvpool.embeds.protocol import MAX_FRAME_BYTES
from vllm_kvpool.errors import ConfigError

logger = logging.getLogger(__name__)

SEND_QUEUE_FRAMES = 20_000  # of a connection; beyond it counts as broken
FRAMES_AT_ONCE = 512  # read from one socket before others have their turn
LINGER_MS = 300  # for the last words of a process
RECONNECT_MS = 100
LONGEST_RECONNECT_MS = 2_000
# Plain numbers: an enum's operators take longer than what they are for.
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
POLLIN = int(zmq.POLLIN)
KEY_NAME = "cluster"
CURVE_DOMAIN = "*"


class Link(NamedTuple):
    """An endpoint that we connect to, or the identity of a connection to us."""

    endpoint: str = ""
    identity: bytes = b""


class Frame(NamedTuple):
    """What has arrived."""

    link: Link
    data: bytes


class Keys(NamedTuple):
    """The cluster's CURVE keys."""

    public: bytes
    secret: bytes
    directory: str


def read_keys(directory: str) -> Keys | None:
    """The keys in `{directory}/cluster.key_secret`; None for no directory.

    ConfigError if there are none, with how to make them.
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
    return Keys(public, secret, directory)


class Sockets:
    """See the module docstring. ConfigError if `listen` cannot be bound."""

    def __init__(self, listen: str | None, keys: Keys | None = None) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_536)
        self._keys = keys
        self._poller = zmq.Poller()
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._by_socket: dict[zmq.Socket[bytes], str] = {}
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup_lock = threading.Lock()
        self._is_closed = False
        self._poller.register(self._wakeup, zmq.POLLIN)
        self._authenticator: ThreadAuthenticator | None = None
        self._router: zmq.Socket[bytes] | None = None
        self.endpoint = ""
        try:
            if keys is not None and listen:
                self._authenticate(keys)
            if listen is not None:
                self._bind(listen)
        except Exception:
            self.close()
            raise

    def _authenticate(self, keys: Keys) -> None:
        """Answer who may connect; libzmq asks on a socket that the library's own thread owns."""
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()  # fails on a machine that is too busy to start a thread
        self._authenticator.configure_curve(domain=CURVE_DOMAIN, location=keys.directory)

    def _bind(self, listen: str) -> None:
        router = self._context.socket(zmq.ROUTER)
        self._router = router
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
        self._poller.register(router, zmq.POLLIN)

    def _set_common(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        socket.set(zmq.LINGER, LINGER_MS)
        socket.set(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        socket.set(zmq.RCVHWM, SEND_QUEUE_FRAMES)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if "[" in endpoint:
            socket.set(zmq.IPV6, 1)

    def connect(self, endpoint: str) -> Link:
        """A link to an endpoint; the same if there is one.

        ConfigError if it is no endpoint, or if there is no file descriptor for it.
        """
        if endpoint not in self._dealers:
            dealer = self._new_dealer(endpoint)
            try:
                dealer.connect(endpoint)
            except zmq.ZMQError as error:
                dealer.close(linger=0)
                raise ConfigError(f"{endpoint!r} cannot be connected to: {error}") from None
            self._dealers[endpoint] = dealer
            self._by_socket[dealer] = endpoint
            self._poller.register(dealer, zmq.POLLIN)
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
        """Forget a link of ours and everything queued for it."""
        dealer = self._dealers.pop(link.endpoint, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            del self._by_socket[dealer]
            dealer.close(linger=0)

    def send(self, link: Link, data: bytes) -> bool:
        """Queue a frame; False if the connection is broken. Does not block."""
        try:
            if link.endpoint:
                dealer = self._dealers.get(link.endpoint)
                if dealer is None:
                    return False
                dealer.send(data, NOBLOCK)
            else:
                assert self._router is not None
                self._router.send(link.identity, NOBLOCK_MORE)
                self._router.send(data, NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def poll(self, timeout_s: float) -> list[Frame]:
        """What has arrived; waits until something has, `wake` is called or the time is over."""
        frames: list[Frame] = []
        for socket, _ in self._poller.poll(max(0, int(timeout_s * 1000))):
            if self._router is not None and socket is self._router:
                came = _messages(self._router, are_named=True)
                frames += [Frame(Link(identity=name), data) for name, data in came]
            elif socket == self._wakeup:
                os.eventfd_read(self._wakeup)
            else:
                link = Link(endpoint=self._by_socket[socket])
                frames += [Frame(link, data) for _, data in _messages(socket, are_named=False)]
        return frames

    def wake(self) -> None:
        """End a `poll`, now or the next one. Any thread; after `close` there is nothing to end."""
        # Without the lock the number could be another file's by the time that it is written to.
        with self._wakeup_lock:
            if not self._is_closed:
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Send what is queued, for a bounded time, and end."""
        if self._authenticator is not None:
            self._authenticator.stop()
        for dealer in self._dealers.values():
            dealer.close()
        if self._router is not None:
            self._router.close()
        self._context.term()
        with self._wakeup_lock:
            self._is_closed = True
            os.close(self._wakeup)


def _messages(socket: "zmq.Socket[bytes]", *, are_named: bool) -> Iterator[tuple[bytes, bytes]]:
    """Those that have arrived at a socket that has one; not all, so that others have their turn.

    With the name of who sent each, where the socket gives it. Messages of several parts are none of
    ours.
    """
    this = [(socket, POLLIN)]
    try:
        for _ in range(FRAMES_AT_ONCE):
            name = socket.recv(NOBLOCK) if are_named else b""
            part = socket.recv(NOBLOCK, copy=False)
            if not part.more:
                yield name, part.bytes
            while part.more:
                part = socket.recv(NOBLOCK, copy=False)
            if not zmq.zmq_poll(this, 0):  # to ask costs less than to be refused
                return
    except zmq.Again:
        return  # a connection has gone since
