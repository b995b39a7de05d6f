"""Peers that are allowed: this machine, the hosts of `peers`, and entries of `allowed_peers`.

It decides on endpoints that requests and peers name, on connections made to us, and on hosts
that rows are written to. Listed host names are trusted; any other name counts by its addresses,
and the address that was checked is the one connected to. Names are resolved on threads of their
own, since a name server may be slow.
"""

import queue
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.network.work_thread import Failed, WorkThread

OPTION = "allowed_peers"
MAX_PORT = 65_535
ANY_HOSTS = ("*", "0.0.0.0", "[::]")  # all addresses of a machine, to listen at

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_ENDPOINT = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")
_RULE = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::([0-9]{1,5})(?:-([0-9]{1,5}))?)?")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_MASK = re.compile(r"[^/%]+/[0-9]{1,3}|[^/%]+")
MAPPED_BITS = 96  # of an IPv6 address before the IPv4 address that it stands for


class PeerEndpoint(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "PeerEndpoint | None":
        """Parse `tcp://host:port`; None for any other form that zmq would accept."""
        found = _ENDPOINT.fullmatch(text)
        if found is None or not 0 < int(found[3]) <= MAX_PORT:
            return None
        host = found[1] or found[2]
        if address_of(host) is None and not is_name(host):
            return None
        return cls(host.lower(), int(found[3]))

    def at(self, address: Address) -> str:
        """Return the same port at an address, for zmq."""
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"tcp://{host}:{self.port}"


def check_advertised(endpoint: str) -> None:
    """Raise ConfigError if peers would not connect to the endpoint that an engine tells them."""
    if PeerEndpoint.parse(endpoint) is None:
        raise ConfigError(
            f"peers cannot reach this engine at {endpoint}: its host is neither an address (four "
            "numbers without leading zeros, or [IPv6] without a zone) nor a name; set advertise, "
            "listen or ec_ip"
        )


class Rule(NamedTuple):
    """An entry of `allowed_peers`: a network or a host name, with the ports that it may use."""

    network: Network | None
    name: str
    first_port: int
    last_port: int

    @classmethod
    def parse(cls, text: str, option: str = OPTION) -> "Rule":
        """Raise ConfigError unless the text is an address, a block of addresses or a host name."""
        given = text.strip().removeprefix("tcp://")
        found = _RULE.fullmatch(given)
        host, first, last = given, 1, MAX_PORT
        if found is not None:
            host = found[1] or found[2]
            first = int(found[3] or 1)
            last = int(found[4] or found[3] or MAX_PORT)
        if 0 < first <= last <= MAX_PORT:
            network = _network(host, option)
            if network is not None:
                return cls(network, "", first, last)
            if found is not None and found[2] is not None and is_name(host):
                return cls(None, host.lower(), first, last)
        raise ConfigError(
            f"{option}: {text[:100]!r} is not a host: write a name, an address (four numbers "
            "without leading zeros) or a block of addresses, with ports or without: encoder-0, "
            "10.42.0.0/16, 10.0.0.7:14579, [fd00::/8]:14579-14586"
        )


def is_name(host: str) -> bool:
    """Return True if a text is a host name and cannot be read as an address.

    Some programs read `010.0.0.1`, `10.1`, `0x0a000001` and `167772161` as addresses.
    """
    return bool(_NAME.fullmatch(host)) and not _NUMBER.fullmatch(
        host.rstrip(".").rpartition(".")[2]
    )


def _network(text: str, option: str) -> Network | None:
    """Return a block of addresses, of IPv4 also if written as IPv6; None if the text is none.

    ConfigError for an address within a block.
    """
    if _MASK.fullmatch(text) is None:
        return None
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        return None
    address = text.partition("/")[0]
    if network.network_address != ip_address(address):
        raise ConfigError(
            f"{option}: {text} is an address within the block {network}: write {address} for this "
            f"host alone, or {network} for the whole block"
        )
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    if mapped is not None and network.prefixlen >= MAPPED_BITS:
        return IPv4Network((mapped, network.prefixlen - MAPPED_BITS))
    return network


def address_of(text: str) -> Address | None:
    """Return the address that a text is, IPv4 also if written as IPv6; None for a name."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_own(address: Address) -> bool:
    """Return True if an address is this machine's: the kernel would use it as the source."""
    if address.is_loopback:
        return True
    if address.is_unspecified or address.is_multicast:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # sends nothing
            return address_of(probe.getsockname()[0]) == address
    except OSError:
        return False


class Allowed(NamedTuple):
    """The peer may be connected to, at this endpoint."""

    endpoint: str


class Refused(NamedTuple):
    """The peer may not be connected to, for this reason."""

    text: str


class NeedsLookup(NamedTuple):
    """The host is a name that is not listed: its addresses decide."""

    name: str


ConnectDecision = Allowed | Refused | NeedsLookup


class AllowedPeers:
    """The hosts that may be peers. ConfigError for an entry that is not valid."""

    def __init__(
        self,
        allowed: Iterable[str] = (),
        peers: Iterable[str] = (),
        is_own: Callable[[Address], bool] = is_own,
        own_name: str | None = None,
    ) -> None:
        rules = [Rule.parse(each) for each in allowed]
        for peer in peers:  # the ports that follow are its further ranks'
            host = peer.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            rules.append(Rule.parse(host.partition("%")[0], "peers"))
        self._rules = tuple(rules)
        self._is_own = is_own
        self._own_names = {"localhost", (own_name or socket.gethostname()).lower()}
        self._addresses: dict[str, frozenset[Address]] = {}
        self.names = frozenset(rule.name for rule in rules if rule.name)
        """Listed host names; `learn` takes their addresses."""

    def learn(self, name: str, addresses: Sequence[str]) -> None:
        """Learn the addresses of a listed name."""
        found = map(address_of, addresses)
        self._addresses[name] = frozenset(each for each in found if each is not None)

    def judge(self, text: str, addresses: Sequence[str] | None = None) -> ConnectDecision:
        """Decide on a connection to an endpoint that a request or a peer has named.

        `addresses`: those of its host, if the host was looked up.
        """
        named = PeerEndpoint.parse(text)
        if named is None:
            return Refused("it is not of the form tcp://host:port")
        host, port = named
        if addresses is None and address_of(host) is None:
            if any(rule.name == host and _has(rule, port, port) for rule in self._rules):
                return Allowed(text)
            return NeedsLookup(host)
        refused = f"{host} cannot be resolved"
        for address in map(address_of, (host,) if addresses is None else addresses):
            if address is None:
                continue
            if self._is_own(address) or self._is_listed(address, port, port):
                return Allowed(named.at(address))
            refused = f"{address}, port {port}, is neither this machine's nor listed"
        return Refused(refused)

    def allows_address(self, text: str) -> bool:
        """Return True if a peer may connect from an address, whatever its port."""
        address = address_of(text)
        return address is not None and (
            self._is_own(address) or self._is_listed(address, 1, MAX_PORT)
        )

    def allows_host(self, host: str) -> bool:
        """Return True if rows may be written to a host; a name must be listed."""
        host = host.strip("[]").lower()
        if address_of(host) is not None:
            return self.allows_address(host)
        return host in self._own_names or host in self.names

    def _is_listed(self, address: Address, first: int, last: int) -> bool:
        return any(
            _has(rule, first, last)
            and (
                address in rule.network
                if rule.network is not None
                else address in self._addresses.get(rule.name, ())
            )
            for rule in self._rules
        )


def _has(rule: Rule, first: int, last: int) -> bool:
    return rule.first_port <= last and first <= rule.last_port


NUM_THREADS = 2
JOIN_S = 0.1  # a look-up cannot be ended


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the addresses of a name; none if it cannot be resolved. Blocks."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))


class Resolver:
    """Resolves host names; `answer` is called on its threads, which start with the first name.

    `thread` is the name of its threads, without their number.
    """

    def __init__(
        self,
        thread: str,
        answer: Callable[[str, tuple[str, ...]], object],
        work_failed: Failed,
    ) -> None:
        self._thread = thread
        self._answer = answer
        self._work_failed = work_failed
        self._names: queue.SimpleQueue[tuple[str] | None] = queue.SimpleQueue()
        self._threads: list[WorkThread[str, tuple[str, ...]]] = []

    def look_up(self, name: str) -> None:
        """Have a name resolved. Called by the control thread."""
        while len(self._threads) < NUM_THREADS:
            thread = WorkThread(
                self._thread,
                len(self._threads),
                take=self._names.get,
                perform=addresses_of,
                failed=lambda _: (),
                report=self._answer,
                work_failed=self._work_failed,
            )
            self._threads.append(thread)
        self._names.put((name,))

    def close(self) -> None:
        """Stop the threads; one that waits for a name server is left behind."""
        for _ in self._threads:
            self._names.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)
