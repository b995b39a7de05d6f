"""What two workers, and a scheduler and its own workers, say to each other.

Every frame is one `Envelope` around one message or, since version 2, several, in msgpack. Messages
only grow, at the end, with defaults; an unknown message is counted and ignored. Whatever is
answered may be said again: every message may be lost, doubled or late, and whoever waits says so
again (`REPEAT_S` of the machines).

C is the consumer of an item, P its producer, S a consumer's or producer's own scheduler.
"""

from enum import Enum
from typing import Annotated, Final

import msgspec

from vllm_kvpool.config import MAX_HEARTBEAT_S
from vllm_kvpool.embeds.rows import Extent, ItemShape, Span
from vllm_kvpool.errors import ProtocolError

VERSION: Final = 2
OLDEST_VERSION: Final = 1
MANY_SINCE: Final = 2  # a version whose frames hold several messages
MAX_FRAME_BYTES = 8 << 20
FULL_FRAME_BYTES = 256 << 10  # a frame of as much takes no further message
MAX_MESSAGES = 256  # of a frame
MAX_EXTENTS = 256  # of a grant
MAX_RANKS = 1024  # of an engine
MAX_NAME = 4096  # characters of what peers call an item, a process or an encoding
MAX_AUX_BYTES = FULL_FRAME_BYTES  # of an item

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
"""What is kept of a peer's word, up to as many as a limit says."""


class Role(Enum):
    """What a process does with embeddings."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    BOTH = "both"
    SCHEDULER = "scheduler"


class Code(Enum):
    """Why something is refused or has failed; operators read these."""

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


class Verdict(Enum):
    """What a consumer makes of an offer."""

    ACCEPTED = "accepted"
    QUEUED = "queued"
    FOLLOW = "follow"
    """Another producer already sends it; keep it until this one ends."""
    HAVE = "have"
    REFUSED = "refused"


class Landing(Enum):
    """What became of a grant."""

    OK = "ok"
    CORRUPT = "corrupt"
    STALE = "stale"
    """The grant is not known any more; what it brought has not been used."""


class Progress(Enum):
    """How far a producer is with a grant that is called back."""

    NOT_STARTED = "not_started"
    IN_FLIGHT = "in_flight"
    WROTE = "wrote"


class MooncakeWindow(msgspec.Struct, frozen=True, gc=False, tag="mooncake"):
    """A landing window that Mooncake's transfer engine writes to."""

    session: str
    """`host:port` of the engine."""
    base: int
    """Address of the window in the owner's memory."""
    nbytes: int


class SharedWindow(msgspec.Struct, frozen=True, gc=False, tag="shared"):
    """A landing window in memory that processes of one host share."""

    host: str
    """Which host, such that no two are the same."""
    path: str
    nbytes: int


Window = MooncakeWindow | SharedWindow


class Hello(msgspec.Struct, frozen=True, gc=False, tag="hello"):
    """Who is there. Sent first on every connection, and again with a higher `epoch`."""

    versions: tuple[int, int]
    incarnation: Name
    """Of the process; another one after each start."""
    engine_id: str
    role: Role
    fingerprint: str
    """Digest of everything that makes two encoders' outputs the same."""
    heartbeat_s: float
    rank: int = 0
    endpoints: tuple[str, ...] = ()
    """Of all ranks of the engine that take part, by rank."""
    window: Window | None = None
    epoch: int = 0
    """Counts the fingerprints of an incarnation."""
    answer: bool = False
    """An answer to a hello; is not answered."""


def check_hello(told: Hello) -> None:
    """ProtocolError for what no process is; a peer has sent it."""
    if len(told.endpoints) > MAX_RANKS or not 0 <= told.rank < MAX_RANKS:
        raise ProtocolError(f"rank {told.rank} of {len(told.endpoints)}; at most {MAX_RANKS}")
    if not 0 <= told.heartbeat_s <= MAX_HEARTBEAT_S:
        raise ProtocolError(f"a heartbeat of {told.heartbeat_s} s; at most {MAX_HEARTBEAT_S} s")


class HelloReject(msgspec.Struct, frozen=True, gc=False, tag="hello_reject"):
    """No session with this incarnation."""

    code: Code
    text: str


class Heartbeat(msgspec.Struct, frozen=True, gc=False, tag="heartbeat"):
    """Still there, and so are the threads that move data."""

    answer: bool = False


class Goodbye(msgspec.Struct, frozen=True, gc=False, tag="goodbye"):
    """The process ends in order: nothing of it is in flight any more."""


class Grant(msgspec.Struct, frozen=True, gc=False, tag="grant"):
    """C→P: write rows from `row` on, at most `rows`, into these extents.

    The first grant of a transfer and every later one are the same; the latter is what other
    designs call resume. `gid` is never used twice by an incarnation and seeds the digests.
    """

    tid: int
    gid: int
    row: int
    rows: int
    extents: tuple[Extent, ...]
    ttl_s: float = 60.0
    """How long the memory is certainly kept."""


class Want(msgspec.Struct, frozen=True, gc=False, tag="want"):
    """C→P: send this item as soon as there is one.

    `first` is a grant made before the length is known: it is used with the offer or at once
    declined, so an item that does not exist yet holds no memory.
    """

    mm_hash: Name
    patience_s: float
    first: Grant | None = None


class WantAck(msgspec.Struct, frozen=True, gc=False, tag="want_ack"):
    """P→C: there is no such item yet, or (`gone`) no more. `declined` is the grant not used."""

    mm_hash: Name
    gone: bool
    declined: int = 0


class Offer(msgspec.Struct, frozen=True, gc=False, tag="offer"):
    """P→C: an item, whole: the true length, and everything that is not rows."""

    tid: int
    mm_hash: Name
    shape: ItemShape
    digest: Name
    """Tells encodings apart: of two of the same item with the same one, rows can be mixed."""
    aux: Annotated[bytes, msgspec.Meta(max_length=MAX_AUX_BYTES)] = b""
    first: int = 0
    """The grant of a `Want` that is used, or 0."""


class OfferAck(msgspec.Struct, frozen=True, gc=False, tag="offer_ack"):
    """C→P: what becomes of the offer, and which rows are there already."""

    tid: int
    verdict: Verdict
    received: tuple[Span, ...] = ()
    code: Code | None = None
    text: str = ""


class NeedGrant(msgspec.Struct, frozen=True, gc=False, tag="need_grant"):
    """P→C: still here, still waiting. Answered by `OfferAck`, live grants are said again."""

    tid: int


class Wrote(msgspec.Struct, frozen=True, gc=False, tag="wrote"):
    """P→C: the rows of a grant lie in its extents; a digest for each run."""

    tid: int
    gid: int
    row: int
    rows: int
    digests: tuple[int, ...]


class WriteFailed(msgspec.Struct, frozen=True, gc=False, tag="write_failed"):
    """P→C: they do not. Unless `quiesced`, some may still arrive."""

    tid: int
    gid: int
    quiesced: bool
    text: str = ""


class RowsAck(msgspec.Struct, frozen=True, gc=False, tag="rows_ack"):
    """C→P: what became of a grant, and all rows that are there."""

    tid: int
    gid: int
    landing: Landing
    received: tuple[Span, ...] = ()


class Revoke(msgspec.Struct, frozen=True, gc=False, tag="revoke"):
    """C→P: do not use this grant if you have not begun."""

    tid: int
    gid: int


class RevokeAck(msgspec.Struct, frozen=True, gc=False, tag="revoke_ack"):
    """P→C."""

    tid: int
    gid: int
    progress: Progress


class Complete(msgspec.Struct, frozen=True, gc=False, tag="complete"):
    """C→P: every row is there and checked; the source need not be kept."""

    tid: int


class Cancel(msgspec.Struct, frozen=True, gc=False, tag="cancel"):
    """C→P: nobody wants it any more, or (`code`) it cannot be had."""

    tid: int
    code: Code = Code.CANCELLED
    text: str = ""


class CancelAck(msgspec.Struct, frozen=True, gc=False, tag="cancel_ack"):
    """P→C: nothing of this transfer is written from now on."""

    tid: int


class Withdraw(msgspec.Struct, frozen=True, gc=False, tag="withdraw"):
    """P→C: the item is not to be had from here any more."""

    tid: int
    code: Code
    text: str = ""


class Unknown(msgspec.Struct, frozen=True, gc=False, tag="unknown"):
    """Either: no such transfer here. Instead of silence."""

    tid: int
    yours: bool
    """Whether it is one that the receiver sends."""


class Expect(msgspec.Struct, frozen=True, gc=False, tag="expect"):
    """S→C: a request waits for an item. `order` is the request's place in line."""

    mm_hash: str
    order: int
    peers: tuple[str, ...] = ()
    rows: int = 0
    """As far as the request tells; 0: it does not."""
    patience_s: float = 0.0
    is_pushed: bool = False
    """Somebody has been told to send it: nobody is asked before `repeat_s` has gone by."""
    digest: str = ""
    """Of the encoding that all ranks are to have; empty: any, as long as nobody has another."""


class Forget(msgspec.Struct, frozen=True, gc=False, tag="forget"):
    """S→C: no request waits for it any more."""

    mm_hash: str


class ItemNews(msgspec.Struct, frozen=True, gc=False, tag="item_news"):
    """C→S: an item is there (`digest`), or cannot be had (`code`)."""

    mm_hash: str
    digest: str = ""
    rows: int = 0
    code: Code | None = None
    text: str = ""
    epoch: int = 0
    """Of the weights under which it was encoded."""
    offered: bool = False
    """It is on its way: no request has asked for it yet, or (`digest`) other ranks may have been
    offered another encoding."""


class Taken(msgspec.Struct, frozen=True, gc=False, tag="taken"):
    """C→S: the engine has this rank's tensors of an item now; it may be asked for anew."""

    mm_hash: str


class Held(msgspec.Struct, frozen=True, gc=False, tag="held"):
    """P→S: bytes of items that consumers have not taken yet."""

    nbytes: int


class Numbers(msgspec.Struct, frozen=True, gc=False, tag="numbers"):
    """C→S, P→S: what was counted since the last time."""

    samples: dict[str, float]


class Push(msgspec.Struct, frozen=True, gc=False, tag="push"):
    """S→P: an item that a request is about to have encoded goes to these consumers."""

    mm_hash: str
    endpoints: tuple[str, ...] = ()


class Epoch(msgspec.Struct, frozen=True, gc=False, tag="epoch"):
    """S→C, S→P: weights have changed; nothing from before is sent or used."""

    number: int
    fingerprint: str


Message = (
    Hello | HelloReject | Heartbeat | Goodbye | Grant | Want | WantAck | Offer | OfferAck
    | NeedGrant | Wrote | WriteFailed | RowsAck | Revoke | RevokeAck | Complete | Cancel
    | CancelAck | Withdraw | Unknown | Expect | Forget | ItemNews | Taken | Held | Numbers | Push
    | Epoch
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Messages between incarnations; `target` is empty until it is known."""

    source: str
    target: str
    seq: int
    body: Message
    more: tuple[msgspec.Raw, ...] = ()
    """Further messages, in order. Each is decoded on its own: one that a release does not know
    costs no other."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_body_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(envelope: Envelope) -> bytes:
    """One frame."""
    return _encoder.encode(envelope)


def encode_body(body: Message) -> msgspec.Raw:
    """A further message of an envelope."""
    return msgspec.Raw(_encoder.encode(body))


def decode(frame: bytes) -> Envelope:
    """The frame's envelope; ProtocolError for what is none that this release knows."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes")
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a frame of version {VERSION}: {error}") from None


def decode_body(raw: msgspec.Raw) -> Message:
    """A further message of an envelope; ProtocolError as of `decode`."""
    try:
        return _body_decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message of version {VERSION}: {error}") from None
