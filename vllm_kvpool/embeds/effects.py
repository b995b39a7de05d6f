"""What the two machines want done. The control thread does it and tells what came of it."""

from dataclasses import dataclass

from vllm_kvpool.embeds.protocol import ItemNews, Message, Taken, Window
from vllm_kvpool.embeds.rows import ItemShape, Run


@dataclass(frozen=True, slots=True)
class Send:
    """A message to an incarnation; lost if there is no session with it now."""

    peer: str
    body: Message


@dataclass(frozen=True, slots=True)
class Connect:
    """Somebody at this endpoint is to be spoken to, from now on."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Allocate:
    """Tensors for an item, whole."""

    mm_hash: str
    shape: ItemShape


@dataclass(frozen=True, slots=True)
class Drain:
    """Copy rows from the window to the item's tensors, compare digests; ends in `drained`."""

    gid: int
    mm_hash: str
    runs: tuple[Run, ...]
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Every row of an item is there."""

    mm_hash: str


@dataclass(frozen=True, slots=True)
class Discard:
    """An item's tensors are given up."""

    mm_hash: str


@dataclass(frozen=True, slots=True)
class Tell:
    """News for the own scheduler."""

    news: ItemNews | Taken


@dataclass(frozen=True, slots=True)
class Prepare:
    """Bring a source into host memory and digest it; ends in `prepared`."""

    sid: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write rows of a source into a peer's window; ends in `written`."""

    tid: int
    gid: int
    sid: int
    window: Window
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """A source is not needed any more."""

    sid: int


Effect = (
    Send | Connect | Allocate | Drain | Ready | Discard | Tell | Prepare | Write | Release
)  # fmt: skip
