"""The values that pass between scheduler part, worker, engine and lanes; all immutable.

* Plans (`LoadPlan`, `SavePlan`, `PrefetchPlan`) name a request's chunks and pages; the planner
  turns each into a job of `Slab`s for this rank.
* Reports say what became of jobs: `LoadDone`, `SpanLoaded`, `SaveGathered`, `SavesStalled`,
  `SaveDone`, `SavesDropped`, `HostCacheChange`.
* A `Slab` is a named tuple because many are made: a frozen dataclass takes three times as long.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NewType, Self

from vllm_kvpool.layout.topology import LocalCell
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.storage.base import NO_RETENTION, ChunkRef, Retention

if TYPE_CHECKING:  # it imports torch, and commands that name cells do not
    from vllm_kvpool.staging.devices import Fence

JobId = NewType("JobId", int)


NULL_BLOCK = 0  # in a block table: no attention reads these tokens any more; nothing is stored


class JobPages(NamedTuple):
    """The pages of tokens [token_start, token_stop) of a request.

    `block_ids` are the blocks that cover them; the first begins with token `table_start`.
    """

    block_ids: tuple[int, ...]
    table_start: int
    token_start: int
    token_stop: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Save these chunks; their pages are final after this step.

    `pages` has one entry for each of the engine's KV cache groups, or none where host memory has
    the chunks. A cell with a null block is saved from host memory, and only for a hand-over. The
    scheduler part pins the other blocks until `SaveGathered`. With `is_state` the plan is of one
    chunk, and of the recurrent states after it alone.
    """

    job_id: JobId
    request_id: str
    first_chunk: int
    hashes: tuple[bytes, ...]
    pages: tuple[JobPages, ...]
    weights_version: str = ""
    """The version of the weights that computed the KV; empty for those of the start."""
    before: tuple[bytes, ...] = ()
    """Hashes of the chunks before the first one, at most as many as there are replicas."""
    is_state: bool = False
    retention: Retention = NO_RETENTION
    tenant: str = ""
    trace_headers: Mapping[str, str] | None = None
    """Trace headers of the request, if it is traced."""
    end_tokens: int = 0
    """Tokens of the plan's only chunk, a prompt's end; 0: all chunks are whole."""
    topic: bytes = b""
    """Names the prompt where another engine goes on with it; empty where none does."""
    found: int = 0
    """For such a prompt: chunks before this one were in the pool before the request saved any."""
    host_windows: frozenset[str] = frozenset()
    """For such a prompt: ids of the chunks of windows that the lookup found in host memory."""
    draft_stop: int | None = None
    """From this chunk on a drafter's rows are not whole, and not saved; None: all are."""


class HandOverEnd(NamedTuple):
    """A request that is handed over saves no chunk from `chunks` on.

    Chunks before `found` were in the pool; its saves have those in between, or will.
    """

    request_id: str
    topic: bytes
    found: int
    chunks: int


class HandOverProgress(NamedTuple):
    """The progress of a hand-over: a store has this rank's cells of the chunks before `stored`.

    That is what this engine knows. No chunk from `ended` on will be stored; None while more may.
    """

    topic: bytes
    stored: int
    ended: int | None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Load tokens [token_start, token_stop) of these chunks into a request's pages.

    `pages` has one entry for each of the engine's KV cache groups, with the tokens that the group
    needs.
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
    """The request is running: load in the order of its layers, and report each `SpanLoaded`."""
    before: tuple[bytes, ...] = ()
    """Hashes of the chunks before the first one, as in `SavePlan`."""
    tenant: str = ""
    landed_stop: int | None = None
    """Chunks from this index on are not stored yet: a `Landed` follows for each group of chunks
    that another engine has stored. None: every chunk is stored."""
    end_tokens: int = 0
    """Tokens of the last chunk, if it is a prompt's end; 0: all chunks are whole."""
    is_last_other: bool = False
    """The last chunk is none of the request's own: an end, or another prompt's chunk of which only
    the first rows are loaded."""

    @property
    def stop_chunk(self) -> int:
        """The index behind the last chunk."""
        return self.first_chunk + len(self.hashes)


class Landed(NamedTuple):
    """More chunks of a load have been stored by another engine."""

    job_id: JobId
    stop_chunk: int  # every chunk before this index is stored
    is_final: bool  # no later chunk will be stored
    is_urgent: bool = False  # the producer is gone, and cells in its memory with it


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """Fetch these chunks into the host tier: a waiting request will probably load them."""

    request_id: str
    hashes: tuple[bytes, ...]
    weights_version: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class SlabKind:
    """The common part of slabs of one kind: the same cells of each chunk, of one layer group.

    `part` tells apart the kinds that share a layer group; empty if it has one. `cells` say where a
    slab lies in this rank's pages, `sizes` how many bytes its cells have in a store (header and
    payload). `cells` is empty where no pages take part (loans).
    """

    key_prefixes: tuple[str, ...]
    """The cells' keys without the chunk's hash."""
    sizes: tuple[int, ...]
    cells: tuple[LocalCell, ...] = ()
    part: str = ""

    @property
    def is_optional(self) -> bool:
        """True if a load that cannot have a slab fills its pages with zeros and goes on."""
        return bool(self.cells) and self.cells[0].is_optional

    @property
    def first_layer(self) -> int:
        """The first of its layers on this rank."""
        return self.cells[0].layer_start


class Slab(NamedTuple):
    """A rank's cells of a chunk in one layer group, or some of them.

    Slabs are the unit of copies, slots, pins and eviction. Stores know the cells by their keys.
    `pages` is empty where no pages take part (prefetches, loans, saves of slabs that only host
    memory can have).
    """

    id: str  # in host memory
    kind: SlabKind
    chunk: ChunkRef
    chunk_hex: str  # the chunk's hash in hexadecimal
    sizes: tuple[int, ...]  # of its cells in a store
    nbytes: int  # their sum
    pages: tuple[JobPages, ...] = ()  # one for each KV cache group
    stored: bool = True  # save: this rank puts it; others keep it in host memory only
    fetcher: int | None = None  # load: who of the replica set fetches it; None: this rank
    end_tokens: int = 0  # tokens of a prompt's end, on this rank; 0: a whole chunk

    @classmethod
    def of(cls, kind: SlabKind, chunk: ChunkRef, chunk_hex: str) -> Self:
        """Return a slab of a whole chunk, without pages."""
        return cls(chunk.id + kind.part, kind, chunk, chunk_hex, kind.sizes, sum(kind.sizes))

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return len(self.sizes)

    def cell_keys(self, cells: "Cells" = None) -> list[str]:
        """Return the keys of these of its cells."""
        chunk_hex, prefixes = self.chunk_hex, self.kind.key_prefixes
        if cells is None:
            return [prefix + chunk_hex for prefix in prefixes]
        return [prefixes[cell] + chunk_hex for cell in cells]


Cells = Sequence[int] | None
"""Cells of a slab by their places in it; None: all."""


class Part(NamedTuple):
    """The cells of a slab that an op of a batch moves, each in its slot."""

    slab: Slab
    slots: "Sequence[Slot]"  # none for a REMOVE, and where pages are filled with zeros
    cells: Cells = None

    @property
    def num_cells(self) -> int:
        """Number of cells that the op moves."""
        return self.slab.num_cells if self.cells is None else len(self.cells)

    def cell_keys(self) -> list[str]:
        """Return the keys of the cells that the op moves."""
        return self.slab.cell_keys(self.cells)

    def sizes(self) -> Sequence[int]:
        """Return the bytes of each of its cells in a store."""
        sizes = self.slab.sizes
        return sizes if self.cells is None else [sizes[cell] for cell in self.cells]


NO_SLABS: Iterator[tuple[Slab, ...]] = iter(())


class LoadJob(NamedTuple):
    """A plan's first slabs, and the others as the engine asks for them."""

    plan: LoadPlan
    slabs: tuple[Slab, ...]  # in the order in which they are wanted
    timeout_s: float
    fence: "Fence | None" = None  # its pages are written after it
    rest: Iterator[tuple[Slab, ...]] = NO_SLABS


class SaveJob(NamedTuple):
    """A plan's first slabs, and the others as the engine asks for them, as in `LoadJob`."""

    plan: SavePlan
    slabs: tuple[Slab, ...]
    fence: "Fence | None" = None  # its pages are read after it
    rest: Iterator[tuple[Slab, ...]] = NO_SLABS


class PrefetchJob(NamedTuple):
    """A prefetch plan, expanded for a rank."""

    plan: PrefetchPlan
    slabs: tuple[Slab, ...]


class OpKind(Enum):
    """The act of a lane on the cells of a batch. FENCE waits for the model and has no cells."""

    FENCE = "fence"
    GATHER = "gather"  # pages -> slots
    SEAL = "seal"  # slots: write the header with its checksum
    PUT = "put"  # slots -> store; cells that the store has are not sent
    GET = "get"  # store -> slots
    CHECK = "check"  # slots: compare header and checksum
    SCATTER = "scatter"  # slots -> pages
    REMOVE = "remove"  # bad cells out of the store

    __hash__ = object.__hash__  # Enum's own is written in Python, and lanes are looked up often


COPIES = frozenset({OpKind.GATHER, OpKind.SCATTER})
WRITES = frozenset({OpKind.PUT, OpKind.REMOVE})  # calls that change what a store holds


class LaneName(NamedTuple):
    """Names a lane by what it does and the tier it does it with; `HOST` or `REPLICA` for none."""

    kind: OpKind
    tier: int

    def __str__(self) -> str:
        if self.tier == HOST:
            return self.kind.value
        return f"{self.kind.value}-{NO_STORE.get(self.tier, self.tier)}"


HOST = -1  # no store takes part
REPLICA = -2  # host memory of another rank on this host that holds the same KV (`replicas.py`)
NO_STORE = {HOST: "host", REPLICA: "replica"}  # their names in metrics


class CellOutcome(Enum):
    """The outcome of a cell in a batch."""

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


STORED = frozenset({CellOutcome.DONE, CellOutcome.EXISTED})  # of a put

Outcome = CellOutcome | tuple[CellOutcome, ...]
"""The outcome of a part: one of all its cells, or a tuple with one of each."""


def outcome_of(each: Sequence[CellOutcome]) -> Outcome:
    """Return the outcome of a part from those of its cells."""
    first = each[0]
    return first if each.count(first) == len(each) else tuple(each)


def each_of(outcome: Outcome, num_cells: int) -> Sequence[CellOutcome]:
    """Return the outcome of each cell of a part."""
    return outcome if isinstance(outcome, tuple) else (outcome,) * num_cells


def worst_of(outcome: Outcome) -> CellOutcome:
    """Return the first outcome that is no success, or else that of the first cell."""
    if not isinstance(outcome, tuple):
        return outcome
    return next((each for each in outcome if each not in STORED), outcome[0])


class LoadDone(NamedTuple):
    """A load has ended: chunks before `ok_stop_chunk` are in the pages, no copy is in flight."""

    job_id: JobId
    request_id: str
    ok_stop_chunk: int
    reason: CellOutcome  # DONE, or why it stopped
    cleared: frozenset[int] = frozenset()  # chunks with pages of optional cells that are zeros now


class SpanLoaded(NamedTuple):
    """A layered load writes no more into the pages of a span of layers.

    The span is complete, unless the load's `LoadDone` reports that it stopped early.
    """

    job_id: JobId
    layer_start: int  # the first of the cells' layers on this rank


class SaveGathered(NamedTuple):
    """The pages of a save may be reused."""

    job_id: JobId
    request_id: str


class SavesStalled(NamedTuple):
    """Gathers wait until stores have taken cells out of the staging arena."""


class SavesDropped(NamedTuple):
    """No save of an earlier generation is being written any more, except by calls that hang."""

    generation: int


class SaveDone(NamedTuple):
    """Every cell of a save is in the nearest durable tier that took it, or was given up.

    Copies to tiers further away may still be in flight.
    """

    job_id: JobId
    request_id: str
    outcomes: tuple[tuple[CellOutcome, int], ...]  # counts
    tiers: tuple[int, ...] = ()  # that this save put cells into
    missed: tuple[int, ...] = ()  # chunks with a cell that this save should have put and did not
    lost: tuple[tuple[int, CellOutcome], ...] = ()
    """Chunks of `missed` with a cell that host memory has not either, each with the reason."""


@dataclass(frozen=True, slots=True)
class HostCacheChange:
    """Chunks that have become complete in this rank's host memory, and those that no longer are."""

    added: tuple[str, ...]
    removed: tuple[str, ...]

    @classmethod
    def merge(cls, changes: Iterable["HostCacheChange"]) -> Self:
        """Merge changes into one, in their order; linear in their size."""
        complete: dict[str, bool] = {}
        for change in changes:
            complete.update(dict.fromkeys(change.added, True))
            complete.update(dict.fromkeys(change.removed, False))
        return cls.of(complete)

    @classmethod
    def of(cls, complete: Mapping[str, bool]) -> Self:
        """Return the change from a table of chunk ids to whether the chunk is complete now."""
        return cls(
            tuple(chunk_id for chunk_id, is_complete in complete.items() if is_complete),
            tuple(chunk_id for chunk_id, is_complete in complete.items() if not is_complete),
        )


class Loan(NamedTuple):
    """A slab in the slots of another rank on this host: what was read before `until` is valid."""

    lender: int
    loan_id: int
    until: float


class Ask(NamedTuple):
    """A borrower asks a lender for slabs of its host memory, each under an id of the loan.

    `member` is the other end of a message: its receiver before it is sent, then its sender.
    `generation` is the borrower's: a lender that has seen other resets lends it nothing.
    """

    member: int
    loans: tuple[tuple[int, Slab], ...]
    generation: int


class Lent(NamedTuple):
    """The slots of lent slabs, by loan; none where the lender has not got the slab."""

    member: int
    loans: tuple[tuple[int, Sequence[Slot]], ...]


class Returned(NamedTuple):
    """The borrower does not read the slots of these loans any more."""

    member: int
    loans: tuple[int, ...]


class LenderGone(NamedTuple):
    """A member lends nothing any more. The bytes of its loans stay as they are."""

    member: int


class BorrowerGone(NamedTuple):
    """A member reads none of its loans any more."""

    member: int


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """The request has ended: stop its load. Its saves go on."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DropSaves:
    """Give up every save that is not stored yet; with `forget`, also all copies and host memory.

    With a generation, `SavesDropped` follows when no put from before is in flight.
    """

    forget: bool = False
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Flush:
    """Put what only host memory holds into every tier: the process is about to end."""


@dataclass(frozen=True, slots=True)
class TierHealth:
    """News of a tier's store; `is_writable`: saves may go to it while it is up."""

    tier: int
    is_up: bool
    is_writable: bool = True


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The time has changed: check deadlines."""


Report = (
    LoadDone | SpanLoaded | SaveGathered | SavesStalled | SaveDone | SavesDropped
    | HostCacheChange
)  # fmt: skip


def given_up(plan: LoadPlan | SavePlan, reason: CellOutcome) -> tuple[Report, ...]:
    """Return the reports of a plan that is not carried out."""
    if isinstance(plan, SavePlan):
        return SaveGathered(plan.job_id, plan.request_id), lost_save(plan, reason)
    return (LoadDone(plan.job_id, plan.request_id, plan.first_chunk, reason),)


def lost_save(plan: SavePlan, reason: CellOutcome) -> SaveDone:
    """Return the end of a save of which nothing was stored."""
    chunks = tuple(range(plan.first_chunk, plan.first_chunk + len(plan.hashes)))
    lost = tuple((chunk, reason) for chunk in chunks)
    return SaveDone(plan.job_id, plan.request_id, ((reason, len(chunks)),), (), chunks, lost)
