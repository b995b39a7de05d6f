"""The errors that the package raises; its own bugs trip an `assert`."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """The configuration cannot work; the message says what to change. Raised before the start."""


class StoreError(Exception):
    """A store call failed as a whole, so nothing is known of its keys. Lanes make it a report."""


class StoreUnreachable(StoreError):
    """The backend cannot be reached now; a later call may succeed."""


class ProtocolError(Exception):
    """A peer has sent a message that the protocol does not allow; the message is dropped."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return for the end of an error the nearest known name, or else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known are: " + ", ".join(names)
