"""Who may use the admin address (pure: header values in, a denial or nothing out).

Without the token nothing is answered but the page's files. Beside it, a request must be meant for
this address: a page of somebody else's, whose name was made to point here (DNS rebinding), sends
its own name as `Host`; one that posts here from elsewhere sends its own `Origin`.
"""

import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@\s]+)(?::\d{1,5})?")
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Denial:
    """An HTTP status, and what to do about it."""

    status: int
    error: str


class Access:
    """The rules of one admin address."""

    def __init__(self, token: str, hosts: Iterable[str] = ()) -> None:
        """`hosts`: names that it goes by. Addresses and localhost always are."""
        assert token, "an empty token would let everybody in"
        self._token = token.encode()
        self._hosts = frozenset(host.lower() for host in hosts)

    def check_place(self, host: str | None, origin: str | None) -> Denial | None:
        """Whether a request is meant for this address, and comes from its own page, if from any."""
        if host is None or not self._is_ours(host):
            return Denial(403, f"not known as {host!r}; add the name to hosts of [admin]")
        if origin is None or origin.lower().partition("://")[2] == host.lower():
            return None
        name = urlsplit(origin).hostname
        if name is not None and name in self._hosts:
            return None
        return Denial(403, f"requests of pages from {origin!r} are refused")

    def check_token(self, authorization: str | None) -> Denial | None:
        """Whether the token has come with it."""
        if authorization is None:
            return Denial(401, "the token is missing; send 'Authorization: Bearer TOKEN'")
        is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
        given = authorization[len(_SCHEME) :].strip() if is_bearer else ""
        # Whatever bytes a client has sent: they are only compared.
        if hmac.compare_digest(given.encode(errors="surrogateescape"), self._token):
            return None
        return Denial(401, "the token is wrong; it is token of [admin], or in the router's log")

    def _is_ours(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].strip("[]").lower()
        return name == "localhost" or name in self._hosts or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
