"""What a consumer knows of an item, of a grant and of a producer (pure)."""

from dataclasses import dataclass, field

from vllm_kvpool.embeds.machines.states import GrantState, TransferState
from vllm_kvpool.embeds.protocol.messages import Offer
from vllm_kvpool.embeds.protocol.rows import Extent, Intervals, ItemShape, RowRun

NOT_REQUESTED = -1  # the order of an item that no request waits for

TransferRef = tuple[str, int]
"""A producer's incarnation and its transfer id; the id is 0 before there is an offer."""


@dataclass(slots=True)
class Item:
    """One item, from the first request or offer until the engine has it."""

    mm_hash: str
    since: float  # last progress
    state: TransferState = TransferState.BOOTSTRAPPING
    idle_since: float = 0.0  # since when rows are missing and none are granted
    order: int = NOT_REQUESTED
    patience_s: float = 0.0  # the longest of its requests'; 0: they do not say
    # Producers' endpoints that requests named; empty: any producer.
    peers: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()  # of `peers`: endpoints that are not allowed
    expected_rows: int = 0
    shape: ItemShape | None = None
    digest: str = ""
    wanted_digest: str = ""  # the encoding that all ranks must have; empty: any
    generation: int = 0  # of its memory: grants of an earlier one bring nothing
    received: Intervals = field(default_factory=Intervals)
    # The first sends, the others stand by.
    offers: dict[TransferRef, Offer] = field(default_factory=dict)
    grants: dict[int, "GrantRecord"] = field(default_factory=dict)
    admitted: bool = False
    want_sent_at: float = float("-inf")
    gone: set[str] = field(default_factory=set)  # peers that no longer have it
    retry_at: float = float("-inf")
    failures: int = 0  # since rows last arrived
    corrupt: int = 0

    @property
    def requested(self) -> bool:
        """Whether a request waits for it."""
        return self.order != NOT_REQUESTED

    @property
    def sender(self) -> TransferRef:
        """The transfer that brings the rows; the further offers stand by."""
        return next(iter(self.offers))

    def covered(self) -> Intervals:
        """Rows that are received or granted."""
        covered = self.received
        for granted in self.grants.values():
            covered = covered.with_rows(granted.row, granted.row + granted.rows)
        return covered

    @property
    def num_covered(self) -> int:
        """The number of `covered` rows, without merging spans: no row is granted twice, or once
        received.

        It may exceed the item's rows where rows were granted before the length was known.
        """
        rows = len(self.received)
        for granted in self.grants.values():
            rows += granted.rows
        return rows


@dataclass(slots=True)
class GrantRecord:
    """A part of the window that a producer may write to."""

    gid: int
    mm_hash: str
    ref: TransferRef
    row: int
    rows: int
    extents: tuple[Extent, ...]
    at: float
    sent_at: float
    generation: int = 0  # of the item's memory when it was granted
    digest: str = ""  # of the item when it was granted
    state: GrantState = GrantState.GRANTED
    runs: tuple[RowRun, ...] = ()  # where its rows go; empty before the item's shape is known
    until: float = 0.0  # the end of its quarantine


@dataclass(slots=True)
class ProducerPeer:
    """A producer in session with this consumer."""

    endpoints: frozenset[str]
    row_bytes: int = 0  # of its last item
