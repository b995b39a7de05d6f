"""The bounds of both machines, by name; seconds and bytes."""

from dataclasses import dataclass

MAX_ENDED = 1 << 16  # transfers whose last word is kept, to be said again
MAX_ITEMS = 1 << 16  # items a consumer knows of
MAX_ACTIVE = 64  # items that get windows at the same time
MAX_WANTS = 1 << 16  # wishes a producer keeps, for items it does not have yet
MAX_GONE = 1 << 14  # items a producer remembers to have had
QUARANTINE_S = 70.0  # twice the time after which Mooncake gives a transfer up, and some
MAX_WRITES = 256  # of a producer, under way at a time
MAX_RESULTS = 64  # grants of a transfer whose result is kept, to be said again


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """What a consumer allows."""

    num_ranks: int = 1
    """Of the engine, which all need the same encoding of an item."""
    max_landing_bytes: int = 4 << 30
    """Memory for items that the engine has not taken yet, but for what the oldest request needs."""
    max_item_bytes: int = 16 << 30
    default_allocate_tokens: int = 8192
    """The most rows of one grant, and of one that is made before the length is known."""
    bootstrap_timeout_s: float = 30.0
    """How long a request waits for somebody to offer an item."""
    waiting_timeout_s: float = 60.0
    """How long it then waits for further rows."""
    quarantine_s: float = QUARANTINE_S
    """How long memory stays out of use after a write that may still arrive."""
    grant_ttl_s: float = 60.0
    repeat_s: float = 1.0
    backoff_s: float = 0.05
    max_backoff_s: float = 5.0
    max_failures: int = 8  # writes of an item that fail in a row
    max_corrupt: int = 3  # grants of an item that arrive damaged
    max_items: int = MAX_ITEMS
    max_active: int = MAX_ACTIVE
    max_ended: int = MAX_ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerLimits:
    """What a producer allows."""

    retain_bytes: int = 4 << 30
    """Items kept: beyond it encoding waits for consumers, and what all have taken is dropped."""
    waiting_timeout_s: float = 60.0
    """How long an item is kept that nobody takes, or a wish for one that is not there."""
    writers: int = 4
    small_bytes: int = 8 << 20
    """Beyond `writers` at a time, writes begin while those under way have fewer bytes."""
    max_writes: int = MAX_WRITES
    repeat_s: float = 1.0
    max_ended: int = MAX_ENDED
    max_wants: int = MAX_WANTS
    max_gone: int = MAX_GONE
    max_results: int = MAX_RESULTS
