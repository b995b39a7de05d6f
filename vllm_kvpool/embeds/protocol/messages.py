"""The messages between two workers, and between a scheduler and its own workers.

A frame is one `Envelope` around one or more messages, in msgpack. Messages only grow, at the end,
with defaults; an unknown message is counted and ignored. Any message may be lost, doubled or late:
a side that waits for an answer repeats its message (`repeat_s`), and repetition is harmless. C is
an item's consumer, P its producer, S the scheduler of either.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from vllm_kvpool.config import MAX_HEARTBEAT_S, MAX_ITEM_NAME
from vllm_kvpool.embeds.protocol.rows import Extent, ItemShape
from vllm_kvpool.errors import ProtocolError
from vllm_kvpool.metrics import Samples
from vllm_kvpool.parsing import UNREADABLE

VERSION: Final = 4
OLDEST_VERSION: Final = 4
FULL_FRAME_BYTES = 256 << 10  # of a frame's messages; no message is larger
MAX_FRAME_BYTES = FULL_FRAME_BYTES + (32 << 10)  # with the names of both processes
MAX_MESSAGES = 256  # of a frame
MAX_EXTENTS = 256  # of a grant
MAX_RANKS = 1024  # of an engine
MAX_ENDED = 1 << 16  # transfers of which a side keeps the final message, to send it again
GRANT_TTL_S = 60.0
MAX_NAME = MAX_ITEM_NAME  # characters; also of the name of a process or an encoding
MAX_ENDPOINT = 300  # characters
STARTED = -(1 << 40)  # added to the order of a request that holds blocks
MAX_TOKEN = 64  # bytes
MAX_VERSION = 1 << 32  # changes of the weights
LOADING_S = 30.0  # the longest from planning a load to the step that takes it
PART_BYTES = FULL_FRAME_BYTES // 2  # of the names in one `Requested`

Name = Annotated[str, Meta(max_length=MAX_NAME)]
"""A name that a peer has chosen and that this process keeps, so its length is limited."""
Text = Annotated[str, Meta(max_length=MAX_NAME)]
"""A peer's reason, which is logged or passed on."""
Endpoint = Annotated[str, Meta(max_length=MAX_ENDPOINT)]
TransferId = Annotated[int, Meta(ge=1)]
"""A number that a producer gives to a transfer; 0 stands for a grant without a transfer."""
Seconds = Annotated[float, Meta(ge=0)]
"""A time that a peer has chosen; NaN would never be over."""


T = TypeVar("T")


def batches_of(
    pieces: Iterable[T], nbytes_of: Callable[[T], int], most_bytes: int, most: int | None = None
) -> Iterator[list[T]]:
    """Yield batches of at most so many bytes and pieces, or of one piece, in order."""
    batch: list[T] = []
    batch_bytes = 0
    for piece in pieces:
        nbytes = nbytes_of(piece)
        if batch and (batch_bytes + nbytes > most_bytes or len(batch) == most):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(piece)
        batch_bytes += nbytes
    if batch:
        yield batch


class PeerRole(Enum):
    """The part of a process in transfers of embeddings."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"
    SCHEDULER = "scheduler"


class Code(Enum):
    """Reasons of refusals and failures; operators read them."""

    TOO_LARGE = "too_large"
    ROW_TOO_LARGE = "row_too_large"
    INCOMPATIBLE = "incompatible"
    CONFLICT = "conflict"
    CORRUPT = "corrupt"
    GONE = "gone"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    STALE = "stale"
    CLOSED = "closed"
    WRITE = "write"


class WriteProgress(Enum):
    """A producer's progress with a revoked grant."""

    NOT_STARTED = "not_started"
    IN_FLIGHT = "in_flight"
    WROTE = "wrote"


class MooncakeWindow(msgspec.Struct, frozen=True, gc=False, tag="mooncake"):
    """A landing window that Mooncake's transfer engine writes to."""

    session: Endpoint
    """`host:port` of the engine."""
    base: int
    """Address of the window in the owner's memory."""
    nbytes: int


class SharedWindow(msgspec.Struct, frozen=True, gc=False, tag="shared"):
    """A landing window in memory that processes of one host share."""

    host: Name
    """The host's identity, which no other host has."""
    path: Name
    nbytes: int


Window = MooncakeWindow | SharedWindow


class PeerHello(msgspec.Struct, frozen=True, gc=False, tag="hello"):
    """A process. Sent first on every connection, and again when the fingerprint changes."""

    versions: tuple[int, int]
    incarnation: Name
    """Id of the process, a new one at each start."""
    role: PeerRole
    fingerprint: Name
    """Digest of everything on which an encoder's output depends."""
    heartbeat_s: Annotated[float, Meta(ge=0, le=MAX_HEARTBEAT_S)]
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] = 0
    endpoints: Annotated[tuple[Endpoint, ...], Meta(max_length=MAX_RANKS)] = ()
    """Control endpoints of the engine's ranks, by rank."""
    window: Window | None = None
    answer: bool = False
    """True if the message answers a hello. An answer gets no answer."""
    token: Annotated[bytes, Meta(max_length=MAX_TOKEN)] = b""
    """A scheduler's proof that it belongs to the worker's engine; empty from other peers."""


class HelloReject(msgspec.Struct, frozen=True, gc=False, tag="hello_reject"):
    """Refuses a session with this incarnation, for `code`."""

    code: Code
    text: Text


class Heartbeat(msgspec.Struct, frozen=True, gc=False, tag="heartbeat"):
    """The process is alive, and so are the threads that move data."""

    answer: bool = False


class Goodbye(msgspec.Struct, frozen=True, gc=False, tag="goodbye"):
    """The process ends in order: nothing of it is in flight any more."""


class Grant(msgspec.Struct, frozen=True, gc=False, tag="grant"):
    """C→P: write at most `rows` rows, from `row` on, into these extents.

    The first grant of a transfer and every later one are alike, so there is no resume message.
    `gid` is never used twice by an incarnation and seeds the digests.
    """

    tid: int
    gid: int
    row: int
    rows: int
    extents: tuple[Extent, ...]
    ttl_s: Seconds = GRANT_TTL_S
    """Seconds that the memory is kept at least."""


class Want(msgspec.Struct, frozen=True, gc=False, tag="want"):
    """C→P: send this item as soon as it is encoded.

    `first` is a grant made before the length is known: the offer uses it, or it is declined at
    once, so an item that does not exist yet holds no memory.
    """

    mm_hash: Name
    patience_s: Seconds
    first: Grant | None = None


class WantAck(msgspec.Struct, frozen=True, gc=False, tag="want_ack"):
    """P→C: the item is not encoded yet or, if `gone`, not kept any more.

    `declined` is the unused grant.
    """

    mm_hash: Name
    gone: bool
    declined: int = 0


class Offer(msgspec.Struct, frozen=True, gc=False, tag="offer"):
    """P→C: the producer has the whole item, of this length.

    Repeated while no rows are granted; the consumer then repeats its answer and its live grants.
    """

    tid: TransferId
    mm_hash: Name
    shape: ItemShape
    digest: Name
    """Names the encoding: rows of two producers with the same digest can be mixed."""
    first: int = 0
    """The grant of a `Want` that is used, or 0."""


class OfferAck(msgspec.Struct, frozen=True, gc=False, tag="offer_ack"):
    """C→P: the offer has arrived; the item may still wait for memory, or for its sender to end."""

    tid: int
    refused: Code | None = None
    """The reason to refuse the item for good."""


class Wrote(msgspec.Struct, frozen=True, gc=False, tag="wrote"):
    """P→C: the rows of a grant are in its extents; a digest for each run."""

    tid: int
    gid: int
    row: int
    rows: int
    digests: tuple[int, ...]


class WriteFailed(msgspec.Struct, frozen=True, gc=False, tag="write_failed"):
    """P→C: the write of a grant has failed. Unless `quiesced`, some rows may still arrive."""

    tid: int
    gid: int
    quiesced: bool
    text: Text = ""


class Revoke(msgspec.Struct, frozen=True, gc=False, tag="revoke"):
    """C→P: do not use this grant unless its write has begun."""

    tid: int
    gid: int


class RevokeAck(msgspec.Struct, frozen=True, gc=False, tag="revoke_ack"):
    """P→C: how far the write of a revoked grant has got."""

    tid: int
    gid: int
    progress: WriteProgress


class Complete(msgspec.Struct, frozen=True, gc=False, tag="complete"):
    """C→P: every row is received and verified."""

    tid: int


class Cancel(msgspec.Struct, frozen=True, gc=False, tag="cancel"):
    """C→P: the item is not wanted any more, for this reason."""

    tid: int
    code: Code = Code.CANCELLED


class CancelAck(msgspec.Struct, frozen=True, gc=False, tag="cancel_ack"):
    """P→C: nothing of this transfer is written from now on."""

    tid: int


class Withdraw(msgspec.Struct, frozen=True, gc=False, tag="withdraw"):
    """P→C: this producer does not have the item any more."""

    tid: int
    code: Code
    text: Text = ""


class Unknown(msgspec.Struct, frozen=True, gc=False, tag="unknown"):
    """P→C: the producer knows no such transfer, so nothing of it is in flight."""

    tid: int


class Expect(msgspec.Struct, frozen=True, gc=False, tag="expect"):
    """S→C: a request waits for an item.

    `order` belongs to the oldest request that waits now; older requests have lower orders.
    `STARTED` is added to the order of a request that holds blocks.
    """

    mm_hash: str
    order: int
    peers: tuple[str, ...] = ()
    rows: int = 0
    """Rows that the request has room for; 0: unknown."""
    patience_s: float = 0.0
    is_pushed: bool = False
    """The encoder was given the consumers and sends unasked: ask only after `repeat_s`."""
    digest: str = ""
    """The encoding that all ranks must have; empty: any."""
    wait_id: int = 0
    """Number of the wait. News of an item name the wait that they answer."""
    joins: bool = False
    """True if the wait has begun before. If the item has gone since, it is not brought again."""


class Reorder(msgspec.Struct, frozen=True, gc=False, tag="reorder"):
    """S→C: the oldest request that waits for an item now has this order."""

    mm_hash: str
    order: int


class Forget(msgspec.Struct, frozen=True, gc=False, tag="forget"):
    """S→C: no request waits for the item any more."""

    mm_hash: str


class ItemNews(msgspec.Struct, frozen=True, gc=False, tag="item_news"):
    """C→S: an item is complete (`digest`), or cannot be received (`code`)."""

    mm_hash: str
    digest: str = ""
    code: Code | None = None
    text: str = ""
    weights_version: int = 0
    """The version of the weights that encoded the item."""
    offered: bool = False
    """The item is in transfer and no request waits for it yet; with `digest`: other ranks may have
    been offered another encoding."""
    wait_id: int = 0
    """The wait of the last `Expect`; 0: no request waits."""


class Taken(msgspec.Struct, frozen=True, gc=False, tag="taken"):
    """C→S: the engine has this rank's tensors of an item, which can be requested anew."""

    mm_hash: str


class HeldBytes(msgspec.Struct, frozen=True, gc=False, tag="held"):
    """P→S: bytes of items that consumers have not taken yet."""

    nbytes: int


class MetricSamples(msgspec.Struct, frozen=True, gc=False, tag="metrics"):
    """C→S, P→S: metric samples counted since the last time."""

    samples: Samples


class Requested(msgspec.Struct, frozen=True, gc=False, tag="requested"):
    """S→C: items that requests wait for. A session begins with all of them, in `parts` messages."""

    names: tuple[str, ...]
    part: int = 0
    parts: int = 1

    @classmethod
    def all(cls, names: Iterable[str]) -> "list[Requested]":
        """Return the messages that name all items, none of them larger than a frame."""
        pieces = [*batches_of(names, lambda name: len(name.encode()), PART_BYTES)] or [[]]
        return [cls(tuple(piece), part, len(pieces)) for part, piece in enumerate(pieces)]


class Push(msgspec.Struct, frozen=True, gc=False, tag="push"):
    """S→P: send an item that is about to be encoded to these consumers."""

    mm_hash: str
    endpoints: tuple[str, ...] = ()


class WeightsChanged(msgspec.Struct, frozen=True, gc=False, tag="weights_changed"):
    """S→C, S→P: the weights have changed; nothing encoded before is sent or used."""

    version: Annotated[int, Meta(ge=0, le=MAX_VERSION)]
    """Counts the changes."""
    fingerprint: str
    loading: tuple[str, ...] = ()
    """Items that a step is about to take: they stay until then. vLLM's encoder cache has them until
    it evicts them or is reset."""


Message = (
    PeerHello | HelloReject | Heartbeat | Goodbye
    | Want | WantAck | Offer | OfferAck | Grant | Wrote | WriteFailed | Revoke | RevokeAck
    | Complete | Cancel | CancelAck | Withdraw | Unknown
    | Requested | Expect | Reorder | Forget | Push | WeightsChanged
    | ItemNews | Taken | HeldBytes | MetricSamples
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Messages between incarnations, in order; `target` is empty until it is known."""

    source: str
    target: str
    bodies: tuple[msgspec.Raw, ...]
    """Each is decoded on its own (`decode_body`): an unknown one costs no other."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_body_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(envelope: Envelope) -> bytes:
    """Return the envelope as one frame."""
    return _encoder.encode(envelope)


def encode_body(body: Message) -> msgspec.Raw:
    """Return a message of an envelope."""
    return msgspec.Raw(_encoder.encode(body))


def decode(frame: bytes) -> Envelope:
    """Return the envelope of a frame; ProtocolError if it is none of this version."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    try:
        return _decoder.decode(frame)
    except UNREADABLE as error:
        raise ProtocolError(f"not a frame of version {VERSION}: {error}") from None


def decode_body(raw: msgspec.Raw) -> Message:
    """Return a message of an envelope; ProtocolError if this release does not understand it."""
    try:
        return _body_decoder.decode(raw)
    except UNREADABLE as error:
        raise ProtocolError(f"not a message of version {VERSION}: {error}") from None
