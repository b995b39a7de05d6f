"""What a launcher says of the engines it has started (values only)."""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Started:
    """The engine's process runs; whether it is ready is another matter."""

    replica_id: str
    pid: int
    """On the engine's host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """An engine of a former router runs on."""

    replica_id: str
    host: str
    port: int
    role: str
    pid: int


class End(Enum):
    """Why an engine's process has ended."""

    NOT_STARTED = "not_started"
    BY_ITSELF = "by_itself"
    STOPPED = "stopped"  # as it was told, having drained
    KILLED = "killed"  # it had not drained in time
    UNWATCHED = "unwatched"  # a bug of ours; the next router may find it running


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The engine's process is gone, with all it had started."""

    replica_id: str
    end: End
    code: int | None
    """As a shell gives it, 128 and more for a signal; None if nobody has seen it."""
    why: str
    log_lines: tuple[str, ...]
    """The last it has printed."""


@dataclass(frozen=True, slots=True)
class StopFailed:
    """The process is still there after SIGKILL, or its host does not answer. It is watched on."""

    replica_id: str
    why: str


LauncherEvent = Started | Exited | StopFailed
