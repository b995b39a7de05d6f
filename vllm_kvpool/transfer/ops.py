"""The values that travel between the connector, the engine and its lanes. None ever changes.

Down: `LoadPlan`, `SavePlan` and `PrefetchPlan` (a request's chunks and pages), expanded by the
planner into a job of `Cell`s. Up: `LoadDone`, `SpanLoaded`, `SaveGathered`, `SaveDone`,
`HostCacheChange`. What is made for every cell is a named tuple: a frozen dataclass takes three
times as long to make.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType, Self

from vllm_kvpool.layout.topology import LocalCell
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.storage.base import ChunkRef

JobId = NewType("JobId", int)


NULL_BLOCK = 0  # in a block table: the block's tokens are not read any more, nothing is kept


class JobPages(NamedTuple):
    """Where tokens [token_start, token_stop) of a request lie in pages (see `CellMove`).

    `block_ids` is the part of a block table that covers them, from the block that holds token
    `table_start` on.
    """

    block_ids: tuple[int, ...]
    table_start: int
    token_start: int
    token_stop: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Chunks whose pages are final after this step.

    `pages` has one entry for each of the engine's KV cache groups; a cell one of whose blocks is
    the null block is not saved. The scheduler holds references to the others until
    `SaveGathered`.
    """

    job_id: JobId
    request_id: str
    first_chunk: int
    hashes: tuple[bytes, ...]
    pages: tuple[JobPages, ...]
    weights_version: str = ""
    """Which weights the KV is of, where they have changed since the start."""
    before: tuple[bytes, ...] = ()
    """Hashes of the last chunks before the first one, as many as there are replicas."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Chunks to bring into a waiting request's pages; only tokens [token_start, token_stop).

    `pages` has one entry for each of the engine's KV cache groups, which say what part of those
    tokens the group needs.
    """

    job_id: JobId
    request_id: str
    first_chunk: int
    hashes: tuple[bytes, ...]
    pages: tuple[JobPages, ...]
    token_start: int
    token_stop: int
    weights_version: str = ""
    layered: bool = False
    """The request runs already: span after span, each told of by `SpanLoaded`."""
    before: tuple[bytes, ...] = ()
    """Hashes of the last chunks before the first one, as many as there are replicas."""


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """Chunks that a waiting request will probably load: bring them into the host tier."""

    request_id: str
    hashes: tuple[bytes, ...]
    weights_version: str = ""


class Cell(NamedTuple):
    """One cell of a job, from the planner to the lanes.

    The first three fields are what stores know of it. `local` and `pages` say where it lies in this
    rank's pages; they are empty where no pages take part (prefetches, demotions, loans).
    """

    key: str
    chunk: ChunkRef
    nbytes: int  # header and payload
    local: LocalCell | None = None
    pages: tuple[JobPages, ...] = ()  # one for each KV cache group
    stored: bool = True  # save: this rank puts it; others keep it in host memory only
    fetcher: int | None = None  # load: the member of the replica set that fetches it; None: this

    @property
    def first_layer(self) -> int:
        """The first of its layers on this rank."""
        assert self.local is not None, self
        return self.local.layer_start


class LoadJob(NamedTuple):
    job_id: JobId
    request_id: str
    first_chunk: int
    stop_chunk: int
    cells: tuple[Cell, ...]  # in the order in which they are wanted
    timeout_s: float
    layered: bool = False


class SaveJob(NamedTuple):
    job_id: JobId
    request_id: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class PrefetchJob:
    request_id: str
    cells: tuple[Cell, ...]


class OpKind(Enum):
    """What a lane does with a batch of cells."""

    GATHER = "gather"  # pages -> slots
    SEAL = "seal"  # slots: write the header with its checksum
    PUT = "put"  # slots -> store; what is there already is not sent
    GET = "get"  # store -> slots
    CHECK = "check"  # slots: compare header and checksum
    SCATTER = "scatter"  # slots -> pages
    REMOVE = "remove"  # bad cells out of the store

    __hash__ = object.__hash__  # in every look-up of a lane; Enum's own is written in Python


WRITES = frozenset({OpKind.PUT, OpKind.REMOVE})  # calls that change what a store holds


class LaneName(NamedTuple):
    """A lane: what it does, and with which tier; `HOST` or `REPLICA` where no store takes part."""

    kind: OpKind
    tier: int

    def __str__(self) -> str:
        if self.tier == HOST:
            return self.kind.value
        return f"{self.kind.value}-{NO_STORE.get(self.tier, self.tier)}"


HOST = -1  # no store takes part
REPLICA = -2  # the host memory of another rank, which holds the same KV (`replicas.py`)
NO_STORE = {HOST: "host", REPLICA: "replica"}  # what these tiers are called


class CellOutcome(Enum):
    """What became of one cell of an op."""

    DONE = "done"
    EXISTED = "existed"  # put: the store had it
    MISSING = "missing"
    CORRUPT = "corrupt"  # verification failed
    FULL = "full"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__


class Owner(NamedTuple):
    """The job that an op is for; neither a request nor a job for moves between tiers."""

    request_id: str = ""
    job_id: int = -1


NO_OWNER = Owner()


class LoadDone(NamedTuple):
    """A load has ended; chunks before `ok_stop_chunk` are in the pages, nothing is in flight."""

    job_id: JobId
    request_id: str
    ok_stop_chunk: int
    reason: CellOutcome  # DONE, or why it stopped


class SpanLoaded(NamedTuple):
    """Of a layered load: nothing is to come into the pages of these layers any more.

    They are whole unless `LoadDone` says later that the load has stopped.
    """

    job_id: JobId
    layer_start: int  # the first of the cells' layers on this rank


class SaveGathered(NamedTuple):
    """The pages of a save may be reused."""

    job_id: JobId
    request_id: str


class SavesDropped(NamedTuple):
    """Nothing that was saved before that generation is on its way into a store any more.

    But for calls that are stuck.
    """

    generation: int


class SaveDone(NamedTuple):
    """Every cell of a save is in the first durable tier, or in the only one, or given up.

    Copies to tiers further away may still be on their way.
    """

    job_id: JobId
    request_id: str
    outcomes: tuple[tuple[CellOutcome, int], ...]  # counts
    tiers: tuple[int, ...] = ()  # in which cells are now by this save
    missed: tuple[int, ...] = ()  # chunks of which a cell was to be stored, and is not by this save


@dataclass(frozen=True, slots=True)
class HostCacheChange:
    """Chunks all of whose cells this rank has in host memory now, and those it has no more."""

    added: tuple[str, ...]
    removed: tuple[str, ...]

    @classmethod
    def merge(cls, changes: Iterable["HostCacheChange"]) -> Self:
        """All changes as one, in their order; linear in their size."""
        whole: dict[str, bool] = {}
        for change in changes:
            for group in change.added:
                whole[group] = True
            for group in change.removed:
                whole[group] = False
        return cls(
            tuple(group for group, here in whole.items() if here),
            tuple(group for group, here in whole.items() if not here),
        )


@dataclass(frozen=True, slots=True)
class DemotionJob:
    """Copy cells that a tier would evict next into the tier after it, and remove them there."""

    job_id: JobId
    tier: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class DemotionDone:
    """Nothing of a demotion is under way any more; so many cells have moved."""

    job_id: JobId
    moved: int


class Lend(NamedTuple):
    """A replica, `borrower` among the members of its set, asks for cells in this host memory.

    `generation` is its own: cells of before a reset are not lent to who has seen it, nor after.
    """

    loan_id: int
    borrower: int
    generation: int
    cells: tuple[Cell, ...]


class LoanOver(NamedTuple):
    """The borrower has copied the cells of a loan, or has gone."""

    loan_id: int


class Lent(NamedTuple):
    """The slots of a loan's cells, which hold them until `LoanEnded`; None: not to be had."""

    loan_id: int
    slots: tuple[Slot | None, ...]


class LoanEnded(NamedTuple):
    """Whether the loan was still held when it was over: only then what was copied is whole."""

    loan_id: int
    held: bool


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """The request has ended; its load need not go on. Its saves do."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DropSaves:
    """Give up every save that is not stored yet; with `forget`, every copy and host memory too.

    With a generation `SavesDropped` follows, as soon as nothing that was begun is put any more.
    """

    forget: bool = False
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Flush:
    """Copy down what is in host memory alone: the process is about to end."""


@dataclass(frozen=True, slots=True)
class TierHealth:
    """A store has gone away, or is there again; `is_writable` where saves may go to it."""

    tier: int
    is_up: bool
    is_writable: bool = True


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Report = (
    LoadDone | SpanLoaded | SaveGathered | SaveDone | SavesDropped | HostCacheChange | DemotionDone
)


def given_up(plan: LoadPlan | SavePlan, reason: CellOutcome) -> LoadDone | SaveGathered:
    """The report of a plan for which nothing is done: a load without a cell, a save dropped."""
    if isinstance(plan, SavePlan):
        return SaveGathered(plan.job_id, plan.request_id)
    return LoadDone(plan.job_id, plan.request_id, plan.first_chunk, reason)
