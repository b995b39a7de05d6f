"""The values that travel between the connector, the engine and its lanes. All frozen.

Down: `LoadPlan` and `SavePlan` (a request's chunks and pages), expanded by the planner into a
`Job` of `CellTask`s. Across: `Op`, a batch of cells of one kind for one lane, and its `OpDone`.
Up: `LoadDone`, `SaveGathered`, `SaveDone`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NewType

from vllm_kvpool.layout.topology import LocalCell
from vllm_kvpool.staging.slots import Slot

JobId = NewType("JobId", int)
OpId = NewType("OpId", int)


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Chunks whose pages are final after this step.

    `block_ids` is the part of the block table that covers them, from the block that holds token
    `table_start` on. The scheduler holds references to those blocks until `SaveGathered`.
    """

    job_id: JobId
    request_id: str
    first_chunk: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    table_start: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Chunks to bring into a waiting request's pages; only tokens [token_start, token_stop)."""

    job_id: JobId
    request_id: str
    first_chunk: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    table_start: int
    token_start: int
    token_stop: int


@dataclass(frozen=True, slots=True)
class JobPages:
    """Where a job's tokens lie in this rank's pages (see `CellMove`)."""

    block_ids: tuple[int, ...]
    table_start: int
    token_start: int
    token_stop: int


@dataclass(frozen=True, slots=True)
class CellTask:
    """One cell of a job: its name, its place in the model and the chunk it belongs to."""

    key: str
    group: str
    chunk: int
    cell: LocalCell
    pages: JobPages
    nbytes: int  # header and payload


@dataclass(frozen=True, slots=True)
class LoadJob:
    job_id: JobId
    request_id: str
    first_chunk: int
    stop_chunk: int
    tasks: tuple[CellTask, ...]  # ordered by chunk
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SaveJob:
    job_id: JobId
    request_id: str
    tasks: tuple[CellTask, ...]


class OpKind(Enum):
    """What a lane does with a batch of cells."""

    GET = "get"  # store -> slots, verified
    SCATTER = "scatter"  # slots -> pages
    GATHER = "gather"  # pages -> slots
    PUT = "put"  # slots -> store, sealed; what is there already is not sent
    REMOVE = "remove"  # bad cells out of the store


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


@dataclass(frozen=True, slots=True)
class OpCell:
    """A cell in flight: its task, its job and the slot that holds it (None for REMOVE)."""

    task: CellTask
    job_id: JobId
    slot: Slot | None


@dataclass(frozen=True, slots=True)
class Op:
    op_id: OpId
    kind: OpKind
    cells: tuple[OpCell, ...]


@dataclass(frozen=True, slots=True)
class OpDone:
    """A lane's report: one outcome per cell of the op, in order."""

    op_id: OpId
    outcomes: tuple[CellOutcome, ...]


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A load has ended; chunks before `ok_stop_chunk` are in the pages, nothing is in flight."""

    job_id: JobId
    request_id: str
    ok_stop_chunk: int
    reason: CellOutcome  # DONE, or why it stopped


@dataclass(frozen=True, slots=True)
class SaveGathered:
    """The pages of a save may be reused."""

    job_id: JobId
    request_id: str


@dataclass(frozen=True, slots=True)
class SaveDone:
    """Every cell of a save has been stored, found stored, or given up."""

    job_id: JobId
    request_id: str
    outcomes: tuple[tuple[CellOutcome, int], ...]  # counts


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """The request has ended; its load need not go on. Its saves do."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DropSaves:
    """Give up every save that is not stored yet (a reset)."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Start:
    """Action: a lane performs the op."""

    op: Op


Report = LoadDone | SaveGathered | SaveDone


def given_up(plan: LoadPlan | SavePlan, reason: CellOutcome) -> LoadDone | SaveGathered:
    """The report of a plan for which nothing is done: a load without a cell, a save dropped."""
    if isinstance(plan, SavePlan):
        return SaveGathered(plan.job_id, plan.request_id)
    return LoadDone(plan.job_id, plan.request_id, plan.first_chunk, reason)
