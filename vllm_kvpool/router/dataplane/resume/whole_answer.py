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
from vllm_kvpool.router.dataplane.vllm_fields import Trait, fields_with

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
    """The same request, asking for a stream that has all that a whole answer says.

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


_HEAD = ("id", "object", "created", "model")
_ONCE = ("system_fingerprint", "prompt_token_ids", "prompt_text", "usage", "metrics")
_ENDS = ("finish_reason", "stop_reason")
_USAGE = ("prompt_tokens", "total_tokens", "completion_tokens")
_PROMPT_DETAILS = ("cached_tokens", "created_cache_tokens", "multimodal_tokens")
_METRICS = (
    *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"),
    *("tokens_per_second", "speculative_decoding"),
)
_OF_CHUNK = frozenset({*_HEAD, *_ONCE, "choices"})
_OF_CHOICE = frozenset(
    {"index", "text", "delta", "logprobs", "token_ids", "prompt_token_ids", *_ENDS}
)
_OF_DELTA = frozenset({"role", "content", "reasoning"})
_LISTS = ("token_ids", "prompt_token_ids")
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
        self._head: dict[str, Any] = {}
        self._once: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}
        self._error: tuple[int, bytes] | None = None

    @property
    def is_complete(self) -> bool:
        """True if it can be answered; a stream may end well and lack its usage."""
        return self._error is not None or "usage" in self._once

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
        _check("chunk", chunk, _OF_CHUNK)
        if not self._head:
            self._head = {name: chunk.get(name) for name in _HEAD}
        for name in _ONCE:
            if (value := chunk.get(name)) is not None:
                self._once[name] = value
        for choice in chunk.get("choices", ()):
            index = choice["index"]
            self._choices.setdefault(index, _Choice(index)).add(choice)

    def answer(self) -> tuple[int, bytes]:
        """Status and body, once it is complete."""
        if self._error is not None:
            return self._error
        once, is_chat = self._once, self._is_chat
        choices = [self._choices[index] for index in sorted(self._choices)]
        body = {
            **self._head,
            "object": "chat.completion" if is_chat else "text_completion",
            "choices": [each.message() if is_chat else each.completion() for each in choices],
            "service_tier": None,
            "system_fingerprint": once.get("system_fingerprint"),
            "usage": _usage(once["usage"]),
        }
        if is_chat:
            body["prompt_logprobs"] = None
            body["prompt_token_ids"] = once.get("prompt_token_ids")
            body["prompt_text"] = once.get("prompt_text")
        metrics = once.get("metrics")
        body["kv_transfer_params"] = body["ec_transfer_params"] = None
        body["metrics"] = metrics and _filled(_METRICS, metrics)
        return OK, msgspec.json.encode(body)


class _Choice:
    """A choice so far."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._role = "assistant"
        self._texts: dict[str, list[str]] = {}
        self._lists: dict[str, list[Any]] = {}
        self._logprobs: dict[str, list[Any]] = {}
        self._ends: dict[str, Any] = dict.fromkeys(_ENDS)

    def add(self, choice: Mapping[str, Any]) -> None:
        """Add what one chunk says of this choice."""
        _check("choice", choice, _OF_CHOICE)
        delta = choice.get("delta") or {}
        _check("delta", delta, _OF_DELTA)
        if role := delta.get("role"):
            self._role = role
            delta = {name: each for name, each in delta.items() if each}  # "" is no content yet
        for name, text in (*delta.items(), ("text", choice.get("text"))):
            if text is not None and name != "role":
                self._texts.setdefault(name, []).append(text)
        for name in _LISTS:
            if (values := choice.get(name)) is not None:
                self._lists.setdefault(name, []).extend(values)
        for name, values in (choice.get("logprobs") or {}).items():
            self._logprobs.setdefault(name, []).extend(values or ())
        for name in _ENDS:
            if (value := choice.get(name)) is not None:
                self._ends[name] = value

    def completion(self) -> dict[str, Any]:
        """Return the choice of a completion."""
        return {
            "index": self._index,
            "text": self._text("text") or "",
            "logprobs": self._logprobs or None,
            **self._ends,
            "token_ids": self._lists.get("token_ids"),
            "prompt_logprobs": None,
            "prompt_token_ids": self._lists.get("prompt_token_ids"),
            "routed_experts": None,
        }

    def message(self) -> dict[str, Any]:
        """Return the choice of a chat."""
        message = {
            "role": self._role,
            "content": self._text("content"),
            **dict.fromkeys(("refusal", "annotations", "audio", "function_call")),
            "reasoning": self._text("reasoning"),
        }
        logprobs = self._logprobs and {
            "content": list(map(_logprob, self._logprobs.get("content", ())))
        }
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs or None,
            **self._ends,
            "token_ids": self._lists.get("token_ids"),
            "routed_experts": None,
        }

    def _text(self, name: str) -> str | None:
        parts = self._texts.get(name)
        return None if parts is None else "".join(parts)


def _check(what: str, found: Mapping[str, Any], known: frozenset[str]) -> None:
    if found.keys() <= known:
        return
    unknown = [name for name in found if name not in known and found[name] not in (None, [])]
    if unknown:
        raise NotAssembled(f"a {what} of the stream has {', '.join(unknown)}")


def _filled(names: tuple[str, ...], found: Mapping[str, Any]) -> dict[str, Any]:
    """A stream leaves out what is null; a whole answer does not."""
    return {**dict.fromkeys(names), **found}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    of_prompt, of_answer = (
        usage.get(f"{name}_tokens_details") for name in ("prompt", "completion")
    )
    return {
        **{name: usage[name] for name in _USAGE},
        "prompt_tokens_details": of_prompt and _filled(_PROMPT_DETAILS, of_prompt),
        "completion_tokens_details": of_answer,
    }


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    unset: dict[str, Any] = {
        "token": None,
        "logprob": UNKNOWN_LOGPROB,
        "bytes": None,
        "top_logprobs": [],
    }
    return {**unset, **entry}
