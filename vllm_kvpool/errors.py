"""The error families of the package.

`ConfigError` is for users and is raised before an engine starts. `StoreError` is what the world
does to a store; it never leaves the lanes except as a report. `ProtocolError` is for a
message that no peer may send; it costs that message. Our own bugs trip an `assert`.
"""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """The configuration cannot work; the message says what to change."""


class StoreError(Exception):
    """A store call failed as a whole, so nothing is known about any of its keys."""


class StoreUnreachable(StoreError):
    """The backend cannot be reached now; a later call may succeed."""


class BuffersInUse(StoreError):
    """A call was given up that may still read or write its buffers: they must not be used again."""


class ProtocolError(Exception):
    """A peer has sent what no peer of this protocol sends."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error sentence: the nearest known name, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known are: " + ", ".join(names)
