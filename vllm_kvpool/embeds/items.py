"""What a consumer knows of an item, of memory it has lent, and of a producer."""

from dataclasses import dataclass, field

from vllm_kvpool.embeds import credit
from vllm_kvpool.embeds.protocol import Offer
from vllm_kvpool.embeds.rows import Extent, Intervals, ItemShape, Run
from vllm_kvpool.embeds.states import GrantState, State

Source = tuple[str, int]
"""A peer's incarnation and its number of the transfer; 0 before there is one."""


@dataclass(slots=True)
class Item:
    """One item, from the first anybody has heard of it."""

    mm_hash: str
    since: float  # the last time something got on
    state: State = State.BOOTSTRAPPING
    idle_since: float = 0.0  # no grant is out and rows are missing
    order: int = credit.NOT_ASKED
    patience_s: float = 0.0  # of the requests, as far as they say
    peers: frozenset[str] = frozenset()  # endpoints that may have it; empty: any
    refused: frozenset[str] = frozenset()  # of those, the ones that are not connected to
    expected_rows: int = 0
    shape: ItemShape | None = None
    digest: str = ""
    wanted_digest: str = ""  # the encoding that all ranks are to have; empty: any
    aux: bytes = b""
    generation: int = 0  # of its memory
    received: Intervals = field(default_factory=Intervals)
    sources: list[Source] = field(default_factory=list)  # the first writes, the others stand by
    offers: dict[Source, Offer] = field(default_factory=dict)
    live: dict[int, "Granted"] = field(default_factory=dict)
    admitted: bool = False
    wanted_at: float = float("-inf")
    gone: set[str] = field(default_factory=set)  # peers that had it once
    retry_at: float = float("-inf")
    failures: int = 0  # since rows last arrived
    corrupt: int = 0

    @property
    def asked(self) -> bool:
        """Whether a request waits for it."""
        return self.order != credit.NOT_ASKED

    def covered(self) -> Intervals:
        """Rows that are here or granted."""
        covered = self.received
        for granted in self.live.values():
            covered = covered.with_rows(granted.row, granted.row + granted.rows)
        return covered

    @property
    def num_covered(self) -> int:
        """As many, without looking where they are: no row is granted twice, or once it is here.

        More than the item has where rows were granted before it was known.
        """
        rows = len(self.received)
        for granted in self.live.values():
            rows += granted.rows
        return rows


@dataclass(slots=True)
class Granted:
    """Memory lent to a producer."""

    gid: int
    mm_hash: str
    source: Source
    row: int
    rows: int
    extents: tuple[Extent, ...]
    at: float
    told_at: float
    generation: int = 0  # of the item's memory, and
    digest: str = ""  # of its content, when it was granted
    state: GrantState = GrantState.GRANTED
    runs: tuple[Run, ...] = ()  # where its rows go, as far as that has been looked at
    until: float = 0.0  # the end of its quarantine


@dataclass(slots=True)
class Peer:
    """A producer that is there."""

    endpoints: frozenset[str]
    row_bytes: int = 0  # of its last item
