"""The error families of the package.

`ConfigError` is for users and is raised before an engine starts. `StoreError` is what the world
does to a store; it never leaves the lanes except as a report. Our own bugs trip an `assert`.
"""


class ConfigError(ValueError):
    """The configuration cannot work; the message says what to change."""


class StoreError(Exception):
    """A store call failed as a whole, so nothing is known about any of its keys."""


class StoreUnreachable(StoreError):
    """The backend cannot be reached now; a later call may succeed."""
