"""Orders of a machine. The control thread performs them and reports results to the machine.

They are msgspec Structs, since an item takes a dozen of them and a frozen dataclass takes five
times as long to make.
"""

from collections import defaultdict

import msgspec

from vllm_kvpool.embeds.protocol.messages import ItemNews, Message, Taken, Window
from vllm_kvpool.embeds.protocol.rows import ItemShape, RowRun


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a message to a peer's incarnation; dropped if there is no session with it."""

    peer: str
    body: Message


class Connect(msgspec.Struct, frozen=True, gc=False):
    """Keep a connection to this endpoint from now on."""

    endpoint: str


class Allocate(msgspec.Struct, frozen=True, gc=False):
    """Allocate host memory for a whole item."""

    mm_hash: str
    shape: ItemShape


class DrainRows(msgspec.Struct, frozen=True, gc=False):
    """Copy rows from the window to the item's memory and compare digests; ends in `drained`."""

    gid: int
    mm_hash: str
    runs: tuple[RowRun, ...]
    digests: tuple[int, ...]


class Ready(msgspec.Struct, frozen=True, gc=False):
    """Every row of an item is received."""

    mm_hash: str


class Discard(msgspec.Struct, frozen=True, gc=False):
    """Free an item's memory."""

    mm_hash: str


class NotifyScheduler(msgspec.Struct, frozen=True, gc=False):
    """Report to the own scheduler."""

    news: ItemNews | Taken


class Prepare(msgspec.Struct, frozen=True, gc=False):
    """Bring an encoder's output into host memory and digest it; ends in `prepared`."""

    item_id: int


class Write(msgspec.Struct, frozen=True, gc=False):
    """Write rows of an item into a peer's window; ends in `written`."""

    tid: int
    gid: int
    item_id: int
    window: Window
    runs: tuple[RowRun, ...]


class Release(msgspec.Struct, frozen=True, gc=False):
    """Free an encoded item."""

    item_id: int


Effect = (
    Send | Connect | Allocate | DrainRows | Ready | Discard | NotifyScheduler | Prepare | Write
    | Release
)  # fmt: skip


class Turn:
    """The effects of a machine's turn, and its counts of events since the start."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.counts: defaultdict[str, float] = defaultdict(float)

    def send(self, peer: str, body: Message) -> None:
        """Send a message to a peer's incarnation."""
        self.effects.append(Send(peer, body))

    def take(self) -> list[Effect]:
        """Remove and return the effects, in order."""
        effects, self.effects = self.effects, []
        return effects
