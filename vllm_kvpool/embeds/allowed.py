"""Who may be a peer: this machine, the hosts of `peers`, and what `allowed_peers` lists.

Used by the control thread, for endpoints that requests and peers name, for connections that are
made to us, and for hosts that rows are to be written to. Host names that are listed are trusted as
they are; any other name counts by the addresses that it resolves to (`resolver.py`), and is
connected to by the address that was checked.
"""

import re
import socket
from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from vllm_kvpool.errors import ConfigError

OPTION = "allowed_peers"
MAX_PORT = 65_535

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_ENDPOINT = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})")
_RULE = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::(\d{1,5})(?:-(\d{1,5}))?)?")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})")


class Endpoint(NamedTuple):
    """A host and a port that somebody has named."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Endpoint | None":
        """`tcp://host:port`; None for anything else that zmq would connect to."""
        found = _ENDPOINT.fullmatch(text)
        if found is None or not 0 < int(found[3]) <= MAX_PORT:
            return None
        return cls((found[1] or found[2]).lower(), int(found[3]))

    def at(self, address: Address) -> str:
        """The same port of an address, for zmq."""
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"tcp://{host}:{self.port}"


class Rule(NamedTuple):
    """One entry of `allowed_peers`: a network, or a host's name, with the ports it may use."""

    network: Network | None
    name: str
    first_port: int
    last_port: int

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """ConfigError for what is neither an address, a block of addresses nor a host name."""
        given = text.strip().removeprefix("tcp://")
        network = _network(given)
        if network is not None:
            return cls(network, "", 1, MAX_PORT)
        found = _RULE.fullmatch(given)
        if found is not None:
            first = int(found[3] or 1)
            last = int(found[4] or found[3] or MAX_PORT)
            host = found[1] or found[2]
            network = _network(host)
            is_name = found[2] is not None and _NAME.fullmatch(host) is not None
            if 0 < first <= last <= MAX_PORT and (network is not None or is_name):
                return cls(network, "" if network is not None else host.lower(), first, last)
        raise ConfigError(
            f"{OPTION}: {text[:100]!r} is no host; write a name, an address or a block of "
            "addresses, with ports or without: encoder-0, 10.42.0.0/16, 10.0.0.7:14579, "
            "[fd00::/8]:14579-14586"
        )


def _network(text: str) -> Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def address_of(text: str) -> Address | None:
    """An address as such, an IPv4 one that is written as IPv6 too; None for a name."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_own(address: Address) -> bool:
    """Whether an address is this machine's: the kernel would send to it from itself."""
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
    """It may be connected to, at this endpoint."""

    endpoint: str


class Refused(NamedTuple):
    """It may not, for this reason."""

    text: str


class LookUp(NamedTuple):
    """It is a name that is not listed: its addresses decide."""

    endpoint: Endpoint


Verdict = Allowed | Refused | LookUp


class AllowedPeers:
    """See the module docstring. ConfigError for an entry that is none."""

    def __init__(
        self,
        allowed: Iterable[str] = (),
        peers: Iterable[str] = (),
        is_own: Callable[[Address], bool] = is_own,
        own_name: str | None = None,
    ) -> None:
        rules = [Rule.parse(each) for each in allowed]
        for peer in peers:  # whose further ranks take the ports behind it
            host = peer.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            rules.append(Rule.parse(host.partition("%")[0]))
        self._rules = tuple(rules)
        self._is_own = is_own
        self._own_names = {"localhost", (own_name or socket.gethostname()).lower()}
        self._addresses: dict[str, frozenset[Address]] = {}
        self.names = frozenset(rule.name for rule in rules if rule.name)
        """Host names that are listed; `learn` is told their addresses."""

    def learn(self, name: str, addresses: Sequence[str]) -> None:
        """What a listed name resolves to now."""
        found = map(address_of, addresses)
        self._addresses[name] = frozenset(each for each in found if each is not None)

    def judge(self, text: str) -> Verdict:
        """Whether an endpoint that a request or a peer has named may be connected to."""
        named = Endpoint.parse(text)
        if named is None:
            return Refused("it is not of the form tcp://host:port")
        address = address_of(named.host)
        if address is not None:
            return self._judge(named, address)
        ports = (named.port, named.port)
        if any(rule.name == named.host and _has(rule, *ports) for rule in self._rules):
            return Allowed(text)
        return LookUp(named)

    def judge_addresses(self, named: Endpoint, addresses: Sequence[str]) -> Verdict:
        """The same of a name that has been looked up."""
        refused = Refused(f"{named.host} cannot be resolved")
        for text in addresses:
            address = address_of(text)
            if address is not None:
                verdict = self._judge(named, address)
                if isinstance(verdict, Allowed):
                    return verdict
                refused = verdict
        return refused

    def _judge(self, named: Endpoint, address: Address) -> Allowed | Refused:
        if self._is_own(address) or self._is_listed(address, named.port, named.port):
            return Allowed(named.at(address))
        return Refused(f"{address}, port {named.port}, is neither this machine's nor listed")

    def allows_address(self, text: str) -> bool:
        """Whether who connects from an address may be a peer; it has no port of its own."""
        address = address_of(text)
        return address is not None and (
            self._is_own(address) or self._is_listed(address, 1, MAX_PORT)
        )

    def allows_host(self, host: str) -> bool:
        """Whether rows may be written to a host; one that is not an address must be listed."""
        host = host.strip("[]").lower()
        if address_of(host) is not None:
            return self.allows_address(host)
        return host in self._own_names or host in self.names

    def is_own_address(self, text: str) -> bool:
        """Whether an address is this machine's."""
        address = address_of(text)
        return address is not None and self._is_own(address)

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
    """Whether a rule has any of these ports."""
    return rule.first_port <= last and first <= rule.last_port
