"""What the two machines want done. The control thread does it and tells what came of it.

Structs rather than dataclasses: an item costs a dozen, and a frozen dataclass takes five times as
long to make.
"""

import msgspec

from vllm_kvpool.embeds.protocol import ItemNews, Message, Taken, Window
from vllm_kvpool.embeds.rows import ItemShape, Run


class Send(msgspec.Struct, frozen=True, gc=False):
    """A message to an incarnation; lost if there is no session with it now."""

    peer: str
    body: Message


class Connect(msgspec.Struct, frozen=True, gc=False):
    """Somebody at this endpoint is to be spoken to, from now on."""

    endpoint: str


class Allocate(msgspec.Struct, frozen=True, gc=False):
    """Tensors for an item, whole."""

    mm_hash: str
    shape: ItemShape


class Drain(msgspec.Struct, frozen=True, gc=False):
    """Copy rows from the window to the item's tensors, compare digests; ends in `drained`."""

    gid: int
    mm_hash: str
    runs: tuple[Run, ...]
    digests: tuple[int, ...]


class Ready(msgspec.Struct, frozen=True, gc=False):
    """Every row of an item is there."""

    mm_hash: str


class Discard(msgspec.Struct, frozen=True, gc=False):
    """An item's tensors are given up."""

    mm_hash: str


class Tell(msgspec.Struct, frozen=True, gc=False):
    """News for the own scheduler."""

    news: ItemNews | Taken


class Prepare(msgspec.Struct, frozen=True, gc=False):
    """Bring a source into host memory and digest it; ends in `prepared`."""

    sid: int


class Write(msgspec.Struct, frozen=True, gc=False):
    """Write rows of a source into a peer's window; ends in `written`."""

    tid: int
    gid: int
    sid: int
    window: Window
    runs: tuple[Run, ...]


class Release(msgspec.Struct, frozen=True, gc=False):
    """A source is not needed any more."""

    sid: int


Effect = (
    Send | Connect | Allocate | Drain | Ready | Discard | Tell | Prepare | Write | Release
)  # fmt: skip
