"""A whole answer, assembled from the stream that the engine was asked for instead (pure).

A request that `is_streamable` is streamed from the engine; every other request is sent as it came.
`WholeAnswer` joins the chunks to the body of vLLM 0.32, field by field and in vLLM's order. A field
without a rule here raises `NotAssembled`, and the engine is asked again without a stream.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.router.dataplane.request_body import ApiPath, ClientRequest
from vllm_kvpool.router.dataplane.responses import OK, SERVER_ERROR, Count
from vllm_kvpool.router.dataplane.resume.chunks import DONE
from vllm_kvpool.router.dataplane.vllm_fields import (
    CHUNK_FIELDS,
    WHOLE_FIELDS,
    MergeRule,
    Trait,
    fields_with,
)

STREAM_INTERVAL = 16
"""Tokens of a chunk after the first one: the client gets no chunk, and each costs CPU."""

_NOT_STREAMED = fields_with(Trait.NOT_STREAMED)


def is_streamable(request: ClientRequest) -> bool:
    """Return True if a stream has all that the whole answer has."""
    for name in _NOT_STREAMED & request.fields.keys():
        value = request.value(name)
        if value is not None and value is not False:
            return False
    # vLLM's parsers read tool calls otherwise in streams; of several prompts a stream does not
    # have the cached tokens.
    has_tools = request.value("tools") and request.value("tool_choice") != "none"
    return request.num_prompts <= 1 and not has_tools


def streamed(request: ClientRequest) -> ClientRequest:
    """Return the request for a stream that has all that a whole answer says.

    Its `raw` is empty: its body is written when an engine is asked.
    """
    fields = {
        "stream_interval": Raw(b"%d" % STREAM_INTERVAL),
        **request.fields,
        "stream": Raw(b"true"),
        "stream_options": Raw(b'{"include_usage":true}'),
    }
    return msgspec.structs.replace(request, stream=True, fields=fields, raw=b"")


class NotAssembled(Exception):
    """The stream has something that no rule here puts into a whole answer."""


_TEXTS = frozenset(
    name
    for rules in CHUNK_FIELDS.values()
    for name, rule in rules.items()
    if rule is MergeRule.TEXT
)
UNKNOWN_LOGPROB = -9999.0
"""vLLM's default, which a stream leaves out."""


class _DeltaShape(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None


class _ChoiceShape(msgspec.Struct):
    index: Count
    text: str | None = None
    delta: _DeltaShape | None = None
    token_ids: list[Any] | None = None
    prompt_token_ids: list[Any] | None = None
    logprobs: dict[str, list[Any] | None] | None = None


class _ChatChoiceShape(_ChoiceShape):
    logprobs: dict[str, list[dict[str, Any]] | None] | None = None


class _UsageShape(msgspec.Struct):
    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None


class _ChunkShape(msgspec.Struct):
    choices: list[_ChoiceShape] = []
    usage: _UsageShape | None = None
    metrics: dict[str, Any] | None = None


class _ChatChunkShape(_ChunkShape):
    choices: list[_ChatChoiceShape] = []  # type: ignore[assignment]


class _ErrorShape(msgspec.Struct):
    code: Count = SERVER_ERROR


class WholeAnswer:
    """Owned by the task of its request. `add` takes what a client of the stream would get."""

    def __init__(self, kind: ApiPath) -> None:
        self._is_chat = kind is ApiPath.CHAT
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._error: tuple[int, bytes] | None = None

    @property
    def is_complete(self) -> bool:
        """True if it can be answered; a stream may end well and lack its usage."""
        return self._error is not None or "usage" in self._fields

    def add(self, payload: bytes) -> None:
        """Add a payload of the stream. Raises NotAssembled."""
        if payload == DONE:
            return
        try:
            chunk: dict[str, Any] = msgspec.json.decode(payload)
            if error := chunk.get("error"):
                self._error = (msgspec.convert(error, _ErrorShape).code, payload)
                return
            msgspec.convert(chunk, _ChatChunkShape if self._is_chat else _ChunkShape)
        except UNREADABLE as error:
            raise NotAssembled(f"a chunk of the stream is not vLLM's: {error}") from None
        _join(self._fields, chunk, "chunk")
        for choice in chunk.get("choices", ()):
            joined = self._choices.setdefault(choice["index"], {"role": "assistant"})
            _join(joined, choice, "choice")
            delta = choice.get("delta") or {}
            if delta.get("role"):
                delta = {name: each for name, each in delta.items() if each}  # "" is no content yet
            _join(joined, delta, "delta")
            logprobs = joined.setdefault("logprobs", {})
            for name, values in (choice.get("logprobs") or {}).items():
                logprobs.setdefault(name, []).extend(values or ())

    def answer(self) -> tuple[int, bytes]:
        """Return the status and body, once it is complete."""
        if self._error is not None:
            return self._error
        joined, is_chat = self._fields, self._is_chat
        choices = [self._choices[index] for index in sorted(self._choices)]
        if is_chat and joined["usage"].get("completion_tokens_details") is None:
            for each in choices:
                # No reasoning is parsed. With a tool parser a stream has no empty content, where
                # vLLM's answer in one piece has "".
                each.setdefault("content", ())
        joined["object"] = "chat.completion" if is_chat else "text_completion"
        joined["choices"] = list(map(_chat_choice if is_chat else _completion_choice, choices))
        joined["usage"] = _usage(joined["usage"])
        joined["metrics"] = _with_nulls("metrics", joined.get("metrics"))
        return OK, msgspec.json.encode(_whole("chat" if is_chat else "completion", joined))


def _join(joined: dict[str, Any], found: Mapping[str, Any], what: str) -> None:
    """Add an object of a chunk to what came before, by the rules of its fields."""
    rules = CHUNK_FIELDS[what]
    if not found.keys() <= rules.keys():
        unknown = [name for name in found if name not in rules and found[name] not in (None, [])]
        if unknown:
            raise NotAssembled(f"a {what} of the stream has {', '.join(unknown)}")
    for name, value in found.items():
        if value is None:
            continue
        match rules.get(name):
            case MergeRule.FIRST:
                joined.setdefault(name, value)
            case MergeRule.LAST:
                joined[name] = value
            case MergeRule.TEXT:
                joined.setdefault(name, []).append(value)
            case MergeRule.LIST:
                joined.setdefault(name, []).extend(value)


def _whole(what: str, joined: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object of the whole answer with all its fields, in vLLM's order."""
    texts = {name: "".join(parts) for name, parts in joined.items() if name in _TEXTS}
    return {name: texts.get(name, joined.get(name)) for name in WHOLE_FIELDS[what]}


def _with_nulls(what: str, found: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return an object with the null fields that a stream leaves out; other fields stay."""
    return found and {**dict.fromkeys(WHOLE_FIELDS[what]), **found}


def _completion_choice(joined: dict[str, Any]) -> dict[str, Any]:
    logprobs = joined["logprobs"] or None
    return _whole("completion choice", {"text": (), **joined, "logprobs": logprobs})


def _chat_choice(joined: dict[str, Any]) -> dict[str, Any]:
    logprobs = joined["logprobs"] and {
        "content": [{**_NO_LOGPROB, **each} for each in joined["logprobs"].get("content", ())]
    }
    message = _whole("message", joined)
    return _whole("chat choice", {**joined, "message": message, "logprobs": logprobs or None})


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    details = _with_nulls("prompt details", usage.get("prompt_tokens_details"))
    return _whole("usage", {**usage, "prompt_tokens_details": details})


_NO_LOGPROB: Mapping[str, Any] = {
    "token": None,
    "logprob": UNKNOWN_LOGPROB,
    "bytes": None,
    "top_logprobs": [],
}
