"""Readers of engines' answers (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from vllm_kvpool.config import MAX_ENDPOINT_CHARS, MAX_NOTICES
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.router.control.events import Outcome
from vllm_kvpool.router.dataplane.request_body import RESERVED_FIELDS, error_body

OK, BAD_REQUEST, NOT_FOUND, SERVER_ERROR = 200, 400, 404, 500
FIRST_STATUS, LAST_STATUS = 100, 599
BUSY_STATUSES = (429, 503)
MAX_WHY_BYTES = 1024


class EngineLost(Exception):
    """An engine does not answer as an engine does, or goes on with an answer in another way."""

    outcome = Outcome.FAILED
    """Outcome of the call."""


def is_answer(status: int) -> bool:
    """Return True for a status that an engine's answer may have: 200, or one of an error."""
    return status == OK or BAD_REQUEST <= status <= LAST_STATUS


def outcome_of(status: int) -> Outcome:
    """Return the outcome by an engine's status. A status that engines do not send is a failure."""
    if status == OK:
        return Outcome.OK
    if status in BUSY_STATUSES:
        return Outcome.BUSY
    return Outcome.REJECTED if BAD_REQUEST <= status < SERVER_ERROR else Outcome.FAILED


def error_event(status: int, body: bytes, path: str) -> bytes:
    """Return the message of an engine's error for a stream: its own words, on one line."""
    try:
        reply = msgspec.json.decode(body, type=_Error)
        return msgspec.json.encode({"error": msgspec.json.decode(reply.error)})
    except UNREADABLE:
        why = body[:MAX_WHY_BYTES].decode(errors="replace")
        return error_body(status, f"The engine refuses: {why}", path)


Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""Tokens that an engine counts. Nothing else is added to what the router counts."""


class PromptDetails(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """vLLM's `prompt_tokens_details`: the two counts that depend on the engine. None: unknown."""

    cached_tokens: Count | None = None
    """Prompt tokens found in the engine's prefix cache or in the pool."""
    created_cache_tokens: Count | None = None
    """Prompt tokens computed and written to the engine's prefix cache."""


UNKNOWN = PromptDetails()


MAY_HAVE_COMPUTED = frozenset({Outcome.LOST, Outcome.FAILED})
"""Outcomes of calls whose engine may have put a part of the prompt into the pool."""


@dataclass(slots=True)
class PromptUsage:
    """Details of a request's prompt, for its client and the log.

    The client is told the details of the first engine that had the prompt: later engines find what
    that engine has computed. Where that engine was lost, the details are unknown.
    """

    details: PromptDetails | None = None
    """The details that the client is told; None: those of the engine that answers."""
    answer_details: PromptDetails = UNKNOWN
    """Details by the engine that answered last."""
    is_computing: bool = False
    """True while the call runs that has the prompt computed."""
    notices: tuple[str, ...] = ()
    """Endpoints that this call has answered."""
    _is_part_computed: bool = False
    """True once an engine may have computed a part of the prompt and has not said how much."""

    def begin(self) -> None:
        """Note that a call has begun that has the prompt computed."""
        self.details, self.is_computing = UNKNOWN, True

    def note(self, outcome: Outcome, details: PromptDetails) -> None:
        """Take in the details after a call whose engine had the prompt."""
        self._is_part_computed |= outcome in MAY_HAVE_COMPUTED
        if self._is_part_computed:
            self.details = UNKNOWN
        else:
            self.details = details if outcome is Outcome.OK else None

    @property
    def cached_tokens(self) -> int | None:
        """Cached tokens that the client was told."""
        details = self.answer_details if self.details is None else self.details
        return details.cached_tokens


class TokenCounts(msgspec.Struct, frozen=True, gc=False):
    """Token counts of an answer."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    details: PromptDetails = UNKNOWN
    saved_tokens: int = 0
    notices: tuple[str, ...] = ()
    """Endpoints at which the engine tells what it has stored of the prompt."""


class CompletionDetails(msgspec.Struct):
    """The details of an answer's output tokens."""

    reasoning_tokens: Count = 0


class Usage(msgspec.Struct):
    """The token counts of an answer."""

    prompt_tokens: Count = 0
    completion_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class _Error(msgspec.Struct):
    error: msgspec.Raw


Endpoint = Annotated[str, Meta(max_length=MAX_ENDPOINT_CHARS)]
Notices = Annotated[tuple[Endpoint, ...], Meta(max_length=MAX_NOTICES)]
"""Endpoints of an engine's ranks, passed on to another engine."""


class _Saved(msgspec.Struct):
    tokens: Count = 0
    notices: Notices = ()


class _Transfer(msgspec.Struct):
    kvpool: _Saved | None = None


class ChoiceEnd(msgspec.Struct):
    """The end of an answer's choice: its reasons, if it has ended."""

    finish_reason: str | None = None
    stop_reason: Raw = Raw()


_ABORTED = "abort"
_RECOMPUTED, _RECOMPUTED_JSON = "recomputed", b'"recomputed"'
"""The stop reason of vLLM-Ascend's `recompute_scheduler_enable`: a decoder short of blocks ends a
request where other schedulers preempt it."""


def check_end(choice: ChoiceEnd, stops: Sequence[str] = ()) -> None:
    """Raise EngineLost if the engine has given up a choice. `stops`: the request's stop strings."""
    if choice.finish_reason == _ABORTED:
        raise _aborted()
    if bytes(choice.stop_reason) == _RECOMPUTED_JSON and _RECOMPUTED not in stops:
        raise EngineLost("the engine has given the request back for want of blocks")


def _aborted() -> EngineLost:
    # An answer ends so only where an operator or the router stops the engine.
    return EngineLost("the engine has aborted the request")


class _Body(msgspec.Struct):
    choices: list[ChoiceEnd]
    usage: Usage | None = None
    kv_transfer_params: _Transfer | None = None


class _InputDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class _OtherUsage(msgspec.Struct):
    """A usage of /v1/responses, or of /v1/messages: only the latter's cache counts are apart."""

    input_tokens: Count = 0
    output_tokens: Count = 0
    input_tokens_details: _InputDetails | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None


class _OtherEnd(msgspec.Struct):
    stop_reason: str | None = None
    status: str | None = None


class _OtherBody(_OtherEnd):
    type: str | None = None
    usage: _OtherUsage | None = None
    delta: _OtherEnd | None = None

    def check_end(self) -> None:
        """Raise EngineLost if the engine has aborted a response, or a message."""
        ends = {"message": self, "message_delta": self.delta or self}
        end = ends.get(self.type or "")
        # vLLM leaves the reason out where its own is "abort".
        if self.status == "cancelled" or (end is not None and end.stop_reason is None):
            raise _aborted()


class _OtherEvent(_OtherBody):
    response: _OtherBody | None = None
    message: _OtherBody | None = None


class _Detokenized(msgspec.Struct):
    prompt: str


_NULL = Raw(b"null")
_decode = msgspec.json.Decoder(_Body).decode
_decode_detokenized = msgspec.json.Decoder(_Detokenized).decode


def read_reply(body: bytes, stops: Sequence[str] = ()) -> TokenCounts:
    """Return the counts of an answer in one piece.

    Raises EngineLost. `stops` is as in `check_end`.
    """
    try:
        reply = _decode(body)
    except UNREADABLE as error:
        raise EngineLost(f"answers what is not its JSON: {error}") from None
    for choice in reply.choices:
        check_end(choice, stops)
    usage, transfer = reply.usage or Usage(), reply.kv_transfer_params
    saved = (transfer.kvpool if transfer else None) or _Saved()
    return TokenCounts(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens or 0,
        details=usage.prompt_tokens_details or UNKNOWN,
        saved_tokens=saved.tokens,
        notices=saved.notices,
    )


def read_usage(body: bytes) -> TokenCounts:
    """Return the counts of /v1/responses or /v1/messages; zero where there are none.

    `body` is an answer in one piece, or an event of a stream. Raises EngineLost if the engine has
    aborted the answer.
    """
    try:
        event = msgspec.json.decode(body, type=_OtherEvent)
    except UNREADABLE:
        return TokenCounts()
    for each in (event, event.response):
        if each is not None:
            each.check_end()
    told = (each.usage for each in (event, event.response, event.message) if each is not None)
    usage = next((each for each in told if each is not None), _OtherUsage())
    details, cached = usage.input_tokens_details, usage.cache_read_input_tokens
    if details is not None:
        cached = details.cached_tokens
    # In /v1/messages, `input_tokens` are those that were neither found nor created.
    apart = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return TokenCounts(
        prompt_tokens=usage.input_tokens + apart,
        output_tokens=usage.output_tokens,
        details=PromptDetails(cached_tokens=cached),
    )


_RESERVED_KEYS = tuple(b'"%b":' % name.encode() for name in RESERVED_FIELDS)
_ENVELOPES = frozenset({"response", "message"})
"""Fields of an event of /v1/responses, or of /v1/messages, that hold the answer so far."""


def without_reserved(body: bytes) -> bytes:
    """Return an answer, or an event of a stream, without RESERVED_FIELDS.

    These may hold engines' addresses. A body that has none of them is returned itself.
    """
    for key in _RESERVED_KEYS:  # `any` takes four times as long, of each token
        if key in body:
            break
    else:
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except UNREADABLE:
        return body
    told = {name: _NULL for name in RESERVED_FIELDS & fields.keys() if fields[name] != _NULL}
    for name in _ENVELOPES & fields.keys():
        answer = bytes(fields[name])
        if (kept := without_reserved(answer)) is not answer:
            told[name] = Raw(kept)
    return msgspec.json.encode({**fields, **told}) if told else body


def read_detokenized(body: bytes) -> str:
    """Return the text of an answer of `/detokenize`; raises EngineLost."""
    try:
        return _decode_detokenized(body).prompt
    except UNREADABLE as error:
        raise EngineLost(f"answers what is not its JSON: {error}") from None
