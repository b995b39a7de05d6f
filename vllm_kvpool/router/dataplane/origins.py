"""Check of `Host` and `Origin`: the requests that a listener accepts (pure).

A browser sends requests for whatever page its user has open, from inside the user's network. Two
headers tell. `Origin` names the page: browsers send it with each POST and each request to another
site, programs send none. `Host` is the name that was resolved: a page whose own name is made to
point at the listener (DNS rebinding) can choose neither an address nor `localhost`.
"""

import ipaddress
import re
from collections.abc import Collection

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@\s]+)(?::\d{1,5})?")


class Origins:
    """The rules of one listener."""

    def __init__(
        self,
        hosts: Collection[str] = (),
        *,
        option: str,
        listens_at: str | None = None,
    ) -> None:
        """Set the names by which browsers may reach the listener.

        Args:
            hosts: names that the listener goes by; addresses and localhost always are.
            option: what names further hosts, for messages.
            listens_at: the address. Programs may reach it by any name, unless it is on loopback or
                `hosts` are given. None: by the names above only, and not without one.
        """
        self._hosts = frozenset(map(str.lower, hosts))
        self._option = option
        self._needs_host = listens_at is None
        self._checks_programs = listens_at is None or bool(hosts) or _is_loopback(listens_at)

    def refusal(self, host: str | None, origin: str | None) -> str | None:
        """Return the reason to refuse a request with these headers; None to accept it."""
        if host is None and origin is None and not self._needs_host:
            return None  # HTTP/1.0, which no browser speaks
        if (origin is not None or self._checks_programs) and not self._is_ours(host):
            return f"not known as {host!r}; add the name to {self._option}"
        if origin is None or host is None:
            return None
        place = origin.lower().partition("://")[2]
        if place == host.lower() or _name_of(place) in self._hosts:
            return None
        return f"requests of pages from {origin!r} are refused"

    def _is_ours(self, host: str | None) -> bool:
        name = _name_of(host or "")
        return name == "localhost" or name in self._hosts or _is_address(name)


def is_host(text: str) -> bool:
    """Return True if a text can be one of `hosts`: a name or an address, without a port."""
    name = text.strip("[]").lower()
    return bool(name) and (_is_address(name) or _name_of(text) == name)


def _name_of(host: str) -> str:
    """Return the name in `name:port`, in lower case; empty if it is none."""
    match = _HOST.fullmatch(host)
    return match[1].strip("[]").lower() if match is not None else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)
