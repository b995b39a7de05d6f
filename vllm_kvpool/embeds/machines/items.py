"""A consumer's items, from first request or offer until the engine has them (control thread)."""

from dataclasses import dataclass, field

from vllm_kvpool.embeds.machines.states import TransferState, moved
from vllm_kvpool.embeds.machines.window import GrantRecord, TransferRef
from vllm_kvpool.embeds.protocol.messages import Offer
from vllm_kvpool.embeds.protocol.rows import Intervals, ItemShape

NOT_REQUESTED = -1  # order of an item without requests; a started request's order is lower still
QUARANTINE_S = 70.0  # more than twice the time after which Mooncake gives a transfer up

_S = TransferState
_WITHOUT_SENDER = (_S.BOOTSTRAPPING, _S.SUSPENDED)
_WITH_SENDER = (_S.WAITING, _S.TRANSFERRING, _S.PARTIAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """Bounds of a consumer; seconds and bytes."""

    num_ranks: int = 1
    """Ranks of the engine; all need the same encoding of an item."""
    max_landing_bytes: int = 4 << 30
    """Memory for items that the engine has not taken yet; `admission` says when it is exceeded."""
    max_item_bytes: int = 16 << 30
    default_allocate_tokens: int = 8192
    """The most rows of one grant, also of one made before the item's length is known."""
    bootstrap_timeout_s: float = 30.0
    """Seconds that a request waits for an offer of its item."""
    waiting_timeout_s: float = 60.0
    """Seconds that the request then waits for further rows."""
    quarantine_s: float = QUARANTINE_S
    """Seconds that memory stays out of use after a write that may still arrive."""
    repeat_s: float = 1.0
    backoff_s: float = 0.05
    max_failures: int = 8  # writes of an item that fail in a row


@dataclass(slots=True)
class Item:
    """An item. Its state moves along the table of `states`."""

    mm_hash: str
    since: float  # last progress
    state: TransferState = _S.BOOTSTRAPPING
    idle_since: float = 0.0  # since when rows are missing and none are granted
    order: int = NOT_REQUESTED
    wait_id: int = 0  # of the last `Expect`
    patience_s: float = 0.0  # the longest of its requests'; 0: they do not say
    # Producers' endpoints that requests named; empty: any producer.
    peers: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()  # of `peers`: endpoints that are not allowed
    expected_rows: int = 0
    shape: ItemShape | None = None  # None until it is offered
    digest: str = ""
    wanted_digest: str = ""  # the encoding that all ranks must have; empty: any
    received: Intervals = field(default_factory=Intervals)
    # The first sends, the others stand by.
    offers: dict[TransferRef, Offer] = field(default_factory=dict)
    grants: dict[int, GrantRecord] = field(default_factory=dict)  # that bring it rows
    admitted: bool = False
    want_sent_at: float = float("-inf")
    gone: set[str] = field(default_factory=set)  # peers that no longer have it
    retry_at: float = float("-inf")
    failures: int = 0  # since rows last arrived
    corrupt: int = 0
    # When an item of earlier weights is dropped, if the step that plans to take it has not run.
    stale_until: float | None = None

    def move(self, state: TransferState) -> None:
        """Set the state; AssertionError if it may not follow the present one."""
        self.state = moved(self.state, state)

    def update_state(self) -> None:
        """Follow a change of the rows received or granted."""
        has_sender = self.state in _WITH_SENDER
        if not has_sender and self.state is not _S.SUSPENDED:
            return
        if self.shape is not None and len(self.received) == self.shape.rows:
            self.move(_S.SUCCESS)
        elif has_sender and self.grants:
            self.move(_S.TRANSFERRING)
        elif has_sender:
            self.move(_S.PARTIAL if self.received.spans else _S.WAITING)

    @property
    def is_complete(self) -> bool:
        """True if every row is received and verified."""
        return self.state is _S.SUCCESS

    @property
    def is_stale(self) -> bool:
        """True if the item is of earlier weights; only a step that is planned may take it."""
        return self.stale_until is not None

    @property
    def lacks_sender(self) -> bool:
        """True if rows are missing and no producer offers them."""
        return self.state in _WITHOUT_SENDER

    @property
    def requested(self) -> bool:
        """True if a request waits for the item."""
        return self.order != NOT_REQUESTED

    @property
    def sender(self) -> TransferRef:
        """The transfer that brings the rows; the further offers stand by."""
        return next(iter(self.offers))

    def covered(self) -> Intervals:
        """Return the rows that are received or granted."""
        covered = self.received
        for granted in self.grants.values():
            covered = covered.with_rows(granted.row, granted.row + granted.rows)
        return covered
