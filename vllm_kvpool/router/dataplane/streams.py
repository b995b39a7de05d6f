"""What a `Splice` keeps of its client's request, of the present engine and of the client."""

from array import array
from dataclasses import dataclass, field

from vllm_kvpool.router.dataplane.answer import BEGINNING, Mark, Overlap
from vllm_kvpool.router.dataplane.bodies import ClientRequest, Kind
from vllm_kvpool.router.dataplane.recovery import Manner


@dataclass(frozen=True, slots=True)
class Terms:
    """What follows from the request for its stream."""

    tracked: bool
    is_plain: bool
    """Of one choice, of which the client is told its text alone."""
    hides_ids: bool
    """Only the router has asked for token ids."""
    tells_tokens: bool
    """The client sees which tokens there are."""
    counts_chars: bool
    """Its chunks have a `text_offset`."""
    num_choices: int
    max_tokens: int | None
    text_kind: str
    """The field that holds plain text."""


def terms_of(request: ClientRequest, tracked: bool, default_max_tokens: int | None) -> Terms:
    """`default_max_tokens` is for chats that do not say how many they want."""
    asks_ids, asked = request.asks_token_ids, request.max_output_tokens
    is_chat = request.kind is Kind.CHAT
    logprobs = request.value("logprobs")
    # A completion that asks for none of the others, 0, still gets those of its own tokens.
    has_logprobs = bool(logprobs) if is_chat else logprobs is not None
    tells_tokens, num_choices = asks_ids or has_logprobs, request.n * max(1, request.num_prompts)
    return Terms(
        tracked=tracked,
        is_plain=tracked and not tells_tokens and num_choices == 1,
        hides_ids=tracked and not asks_ids,
        tells_tokens=tells_tokens,
        counts_chars=has_logprobs and not is_chat,
        num_choices=num_choices,
        max_tokens=default_max_tokens if asked is None else asked,
        text_kind="content" if is_chat else "text",
    )


@dataclass(slots=True)
class Stream:
    """The present engine's."""

    manner: Manner = Manner.REPEAT
    goes_on: bool = False
    """Whether the client has something already; else it is as the first."""
    start: Mark = BEGINNING
    """Where in the answer it begins."""
    sent_ids: bytes = b""
    """Prompt ids that its engine is to take; empty once it has said that it has."""
    overlap: Overlap = field(default_factory=lambda: Overlap(()))
    kind: str | None = None
    """What its first text has to be, where nothing is compared."""
    owed: str = ""
    """Text that comes before its first."""
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    """Its tokens, as long as it is behind what the client has."""
    ends: "array[int]" = field(default_factory=lambda: array("q"))
    is_behind: bool = False
    num_tokens: int = 0
    """Of the answer, up to here."""
    earlier_chars: int = 0
    earlier_reasoning_tokens: int = 0
    head: bytes = b""


@dataclass(slots=True)
class Told:
    """What the client has been sent, besides text and tokens."""

    anything: bool = False
    role: bool = False
    num_finished: int = 0
    """Choices that have ended."""
    error: bool = False
    usage: bool = False
