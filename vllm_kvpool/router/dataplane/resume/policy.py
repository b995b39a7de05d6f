"""The decision whether, and from where, an answer goes on whose engine is lost (pure).

Nothing delivered: the same request again. Greedy answers go on from the last resume point that the
stop strings allow, and what is generated again is compared. Sampled ones must not generate anything
again, so they go on after the last token, whose text an engine is asked first (`/detokenize`); if
none can say, they go on from the last resume point, and what is sampled may come out the same.
Where something looks at the answer alone (penalties, structured output), no tokens are resumed:
it is begun again, if it is greedy, and compared as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.router.dataplane.request_body import (
    MAX_STOP_BYTES,
    ApiPath,
    ClientRequest,
    kvpool_options,
)
from vllm_kvpool.router.dataplane.resume.answer import BEGINNING, Answer, ResumePoint
from vllm_kvpool.router.dataplane.vllm_fields import Trait, fields_with

GREEDY_BELOW = 1e-5
"""vLLM decodes greedily below this temperature."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_MAX_SEED = (1 << 63) - 1
_SPACE = b" \t\r\n"
_NULL, _TEXT = Raw(b"null"), Raw(b'"text"')

_PROMPT_ONLY = fields_with(Trait.PROMPT_ONLY)
_WATCHES_ANSWER = sorted(fields_with(Trait.WATCHES_ANSWER))


class ResumeMode(Enum):
    """A way in which an answer goes on at another engine."""

    REPEAT = "repeat"  # nothing of it has been delivered: the same request again
    RESUME = "resume"  # from the tokens so far
    REPLAY = "replay"  # the same request again, without what has been delivered


_decode_stop = msgspec.json.Decoder(str | list[str] | None).decode


def stop_strings(request: ClientRequest) -> list[str]:
    """Return the request's stop strings; none of those that `why_not_continued` does not accept."""
    raw = request.fields.get("stop")
    if raw is None or len(memoryview(raw)) > MAX_STOP_BYTES:
        return []
    try:
        stop = _decode_stop(raw)
    except UNREADABLE:
        return []  # for the engine to refuse
    return [stop] if isinstance(stop, str) else stop or []


def is_greedy(request: ClientRequest) -> bool:
    """Return True if the same request gives the same answer again, as far as the engine can.

    A temperature that is not given is the server's, and mostly not 0.
    """
    temperature = request.value("temperature")
    is_zero = isinstance(temperature, int | float) and temperature < GREEDY_BELOW
    return is_zero or request.value("top_k") == 1


def why_not_continued(request: ClientRequest) -> str | None:
    """Return why an answer that has begun cannot go on; None if it can."""
    if request.n > 1 or (request.value("best_of") or 1) != 1:
        return "an answer of several choices cannot be continued"
    if request.num_prompts > 1:
        return "answers to several prompts at once cannot be continued"
    if request.value("use_beam_search"):
        return "beam search cannot be continued"
    stop = request.fields.get("stop")
    if stop is not None and len(memoryview(stop)) > MAX_STOP_BYTES:
        return f"its stop strings take more than {MAX_STOP_BYTES} bytes"
    return None


def why_not_resumed(request: ClientRequest) -> str | None:
    """Return why an answer cannot be resumed from its tokens; None if it can."""
    for name in _WATCHES_ANSWER:
        if request.value(name):
            return f"`{name}` looks at the tokens of one answer"
    if request.value("thinking_token_budget") not in (None, -1):
        return "`thinking_token_budget` counts the tokens of one answer"
    format_ = request.fields.get("response_format")
    kind = request.members("response_format").get("type")
    is_text = format_ is None or format_ == _NULL or kind == _TEXT
    if request.value("structured_outputs") or not is_text:
        return "a structured output is followed from its beginning"
    if request.value("spaces_between_special_tokens") is False:
        return "spaces between special tokens depend on the token before"
    if _may_call_tools(request):
        return "tool calls are looked for from the beginning"
    if request.api_path is ApiPath.CHAT and _has_media(bytes(request.fields["messages"])):
        return "token ids do not say what media the messages have"
    return None


def goes_on_elsewhere(request: ClientRequest) -> bool:
    """Return True if another engine can go on with the answer, once the client has a part of it.

    False where that depends on the answer: it may come to have tool calls.
    """
    if not request.stream:
        return True  # the client has nothing, so it is begun again
    if request.is_passed_on or why_not_continued(request) or _may_call_tools(request):
        return False
    return is_greedy(request) or (request.trackable and why_not_resumed(request) is None)


def _may_call_tools(request: ClientRequest) -> bool:
    is_chat = request.api_path is ApiPath.CHAT
    return is_chat and bool(request.value("tools")) and request.value("tool_choice") != "none"


def resume_body(
    request: ClientRequest,
    ids: bytes,
    num_tokens: int,
    num_resumes: int,
    max_tokens: int | None,
) -> bytes:
    """Have the answer continued after `num_tokens` of it.

    `ids` is the JSON list of the prompt and those tokens; `max_tokens` is of the whole answer, None
    for as many as fit. A chat stays a chat, so that its engine goes on parsing: vLLM takes the ids
    of a rendered prompt in `kv_transfer_params`. A seed would draw again what it has drawn for the
    first tokens, so it is moved on.
    """
    fields = {name: raw for name, raw in request.fields.items() if name not in _PROMPT_ONLY}
    params = request.transfer_params({})
    options = params.get("kvpool")
    if isinstance(options, Raw):
        options = kvpool_options(params)
    if options:
        kept = {name: each for name, each in options.items() if not name.startswith("expect_")}
        params = {**params, "kvpool": kept}
    if request.api_path is ApiPath.COMPLETION:
        fields["prompt"] = Raw(ids)
    else:
        params = {**params, "prompt_token_ids": Raw(ids)}
        fields.pop("max_completion_tokens", None)
    if params:
        fields["kv_transfer_params"] = _raw(params)
    fields.pop("max_tokens", None)
    if max_tokens is not None:
        assert max_tokens > num_tokens
        fields["max_tokens"] = _raw(max_tokens - num_tokens)
    if isinstance(min_tokens := request.value("min_tokens"), int):
        fields["min_tokens"] = _raw(max(0, min_tokens - num_tokens))
    if isinstance(seed := request.value("seed"), int):
        fields["seed"] = _raw((seed + num_resumes) & _MAX_SEED)
    fields["return_token_ids"] = _raw(True)
    return msgspec.json.encode(fields)


def joined_ids(prompt_ids: bytes, generated: Sequence[int]) -> bytes:
    """Return the JSON list of a prompt's ids and the generated ids."""
    prompt = prompt_ids.strip()[1:-1].strip()
    answer = msgspec.json.encode(list(generated))[1:-1]
    return b"[%b]" % b",".join(part for part in (prompt, answer) if part)


def same_ids(one: bytes, other: bytes) -> bool:
    """Return True if two JSON lists have the same ids."""
    return one == other or one.translate(None, _SPACE) == other.translate(None, _SPACE)


def _raw(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))


class _Part(msgspec.Struct, gc=False):
    type: str | None = None


class _ChatMessage(msgspec.Struct, gc=False):
    content: str | list[_Part | str] | None = None


_decode_messages = msgspec.json.Decoder(list[_ChatMessage]).decode
MAX_QUOTES = 1 << 17
"""Quotes and braces of messages whose parts are looked at; of others, media are presumed."""


def _has_media(messages: bytes) -> bool:
    """Return True if messages have media, or are no messages that the router can read."""
    if b'"type"' not in messages and b"\\u" not in messages:
        return False  # media are parts with a type; most chats have texts alone
    if messages.count(b'"') + messages.count(b"{") > MAX_QUOTES:
        return True
    try:
        contents = [each.content for each in _decode_messages(messages)]
    except UNREADABLE:
        return True
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, _Part) and part.type not in _TEXT_PARTS for part in parts)


MAX_TRIES = 4
"""Ends of the answer that are looked at: no character has more tokens."""
DETOKENIZED_TOKENS = 80
COMPARED_CHARS = 16
_UNFINISHED = "\ufffd"


@dataclass(frozen=True, slots=True)
class Detokenize:
    """POST `body` to `/detokenize` of any engine; give `detokenized` its `prompt`, or None."""

    body: bytes


class ResumePlan(NamedTuple):
    """The point from which another engine goes on, and how."""

    mode: ResumeMode
    resume_point: ResumePoint = BEGINNING
    pending_text: str = ""
    """Text before the resume point that no engine has given out."""


class NotResumable(NamedTuple):
    """The reason why an answer cannot go on at another engine."""

    why: str


ResumeDecision = ResumePlan | Detokenize | NotResumable


class ResumePolicy:
    """Decides for one answer, as often as it loses its engine. Owned by its `StreamResumer`."""

    def __init__(self, request: ClientRequest, answer: Answer) -> None:
        self._request = request
        self._answer = answer
        self._num_detokenized = 0  # tokens whose text has been asked for
        self._tries_left = 0
        self._failed: set[ResumeMode] = set()

    def failed(self, mode: ResumeMode) -> None:
        """Note that an engine has generated other text than the client has."""
        # What is sampled may well come out another way the next time.
        if mode is ResumeMode.REPLAY or is_greedy(self._request):
            self._failed.add(mode)

    def unable(self) -> None:
        """Note that engines refuse to go on from tokens."""
        self._failed.add(ResumeMode.RESUME)

    def begin(self) -> ResumeDecision:
        """Return how the answer goes on after the loss of its engine."""
        answer, request = self._answer, self._request
        if answer.num_chars == answer.num_echoed and not answer.has_tool_calls:
            return ResumePlan(ResumeMode.REPEAT)
        if why := why_not_continued(request):
            return NotResumable(why)
        if answer.has_tool_calls:
            return NotResumable("an answer with tool calls cannot be continued")
        if why := self._why_not_resumed():
            return self._replay(why)
        if is_greedy(request):
            return self._from_resume_point(compares=True)
        exact = answer.exact_resume_point()
        if exact and request.api_path is ApiPath.COMPLETION and not answer.open_chars():
            return ResumePlan(ResumeMode.RESUME, exact)
        self._num_detokenized, self._tries_left = len(answer.ids), MAX_TRIES
        return self._detokenize()

    def detokenized(self, text: str | None) -> ResumeDecision:
        """Continue with the text of `Detokenize`'s tokens; None if no engine knows the text."""
        answer = self._answer
        if text is None:
            return self._from_resume_point(compares=False)
        if text.endswith(_UNFINISHED):
            # The last token has begun a character, of which nothing has been given out.
            self._num_detokenized -= 1
            self._tries_left -= 1
            if self._tries_left and self._num_detokenized:
                return self._detokenize()
            return self._from_resume_point(compares=True)
        num_known = len(text) - answer.withheld_chars
        pending_text = text[max(0, num_known) :]
        if num_known <= 0 or not self._is_end(text[:num_known]) or answer.open_chars(pending_text):
            return self._from_resume_point(compares=True)
        point = ResumePoint(self._num_detokenized, answer.num_chars + len(pending_text))
        return ResumePlan(ResumeMode.RESUME, point, pending_text)

    def _why_not_resumed(self) -> str | None:
        if ResumeMode.RESUME in self._failed:
            return "no engine has gone on from its tokens"
        if not self._answer.has_ids or not self._answer.prompt_ids:
            return "its token ids are not known"
        if self._answer.is_parsed and self._answer.withheld_chars:
            return "with stop strings its text lags behind the tokens that are looked for in it"
        return why_not_resumed(self._request)

    def _replay(self, why: str) -> ResumeDecision:
        if not is_greedy(self._request):
            return NotResumable(f"{why}, and what is sampled cannot be begun again")
        if ResumeMode.REPLAY in self._failed:
            return NotResumable(f"{why}, and begun again it came out another way")
        return ResumePlan(ResumeMode.REPLAY)

    def _from_resume_point(self, *, compares: bool) -> ResumeDecision:
        """Go on from a resume point.

        `compares`: a chat has to generate something again, that it can be compared.
        """
        answer = self._answer
        max_chars = answer.num_chars - answer.open_chars()
        if compares and self._request.api_path is ApiPath.CHAT:
            max_chars = min(max_chars, answer.num_chars - 1)
        point = answer.last_resume_point(max_chars)
        if point is None:
            return self._replay("it cannot be told which of its tokens have been delivered")
        return ResumePlan(ResumeMode.RESUME, point)

    def _detokenize(self) -> Detokenize:
        tokens = self._answer.ids[self._first_detokenized : self._num_detokenized].tolist()
        body = {"model": self._request.model, "tokens": tokens}
        return Detokenize(msgspec.json.encode(body))

    @property
    def _first_detokenized(self) -> int:
        num_tokens = DETOKENIZED_TOKENS + 4 * self._answer.withheld_chars
        return max(0, len(self._answer.ids) - num_tokens)

    def _is_end(self, text: str) -> bool:
        """Return True if the delivered text ends so, or equals it where all tokens were named."""
        answer = self._answer
        if not self._first_detokenized and not answer.is_parsed:
            told = answer.tail(answer.num_chars - answer.num_echoed)
            # Some tokenizers leave out a space at the beginning.
            return told in (text, f" {text}")
        told = answer.tail(COMPARED_CHARS)
        compared = min(len(told), len(text))
        is_enough = compared >= COMPARED_CHARS // 2
        return is_enough and text[-compared:] == told[-compared:]
