"""What a scripted engine answers, byte for byte as vLLM 0.32 writes it.

Fields, their order and which of them are null follow vLLM's response models: chunks leave out what
was never set, whole answers write every field. A form makes the bodies of one request; what is the
same in all its chunks is encoded once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from tests.support.scripted_requests import Ask
from tests.support.scripted_spec import ScriptedSpec

DONE = b"data: [DONE]\n\n"
_CACHED_TEXTS = 1 << 14


class Delta(NamedTuple):
    """New text and tokens of a choice; with `finish_reason` the last ones."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def then(self, later: "Delta") -> "Delta":
        """Both in one, as a client that reads too slowly gets them."""
        return later._replace(
            text=self.text + later.text, token_ids=self.token_ids + later.token_ids
        )


class Usage(NamedTuple):
    """Tokens of a request. Only where the engine tells them: prompt tokens that did not have to be
    computed (else None), and those that are cached since.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    created_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        """In vLLM's order, without what may be left out."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }


def fingerprint(spec: ScriptedSpec) -> str:
    """What vLLM calls its version and configuration."""
    digest = blake2b(spec.model.encode(), digest_size=4).hexdigest()
    return f"vllm-{spec.version}-{digest}"


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % data


@lru_cache(_CACHED_TEXTS)
def _quoted(text: str) -> bytes:
    return msgspec.json.encode(text)


def _reason(value: str | int | None) -> bytes:
    return b"null" if value is None else _quoted(value) if isinstance(value, str) else b"%d" % value


def _ids(token_ids: Sequence[int] | None) -> bytes:
    return b"null" if token_ids is None else msgspec.json.encode(token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all bodies of a request say of it; `request_id` with its prefix."""

    request_id: str
    created: int
    spec: ScriptedSpec
    ask: Ask


class CompletionForm:
    """Bodies of `/v1/completions`."""

    id_prefix = "cmpl-"
    _object = "text_completion"
    _answer_object = "text_completion"

    def __init__(self, head: Head) -> None:
        self.head = head
        self._ask = head.ask
        self._start = b'{"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            _quoted(head.request_id),
            _quoted(self._object),
            head.created,
            _quoted(head.spec.model),
        )
        self._end = b"}"
        if not self._ask.include_usage:
            self._end = b',"system_fingerprint":%b}' % _quoted(fingerprint(head.spec))

    def opening(self, index: int, prompt: Sequence[int], usage: Usage) -> bytes:
        """The events before a choice's first token."""
        return b""

    def chunk(self, index: int, delta: Delta, usage: Usage, prompt: Sequence[int] | None) -> bytes:
        """The event of new tokens; `prompt` in the first one of a choice."""
        ids = self._ask.return_token_ids
        choice = self._choice(index, delta, prompt if ids else None, ids)
        return b"data: %b%b]%b%b\n\n" % (
            self._start,
            choice,
            b',"usage":' + self._continuous(usage) if self._ask.continuous_usage else b"",
            b"}" if delta.finish_reason is None else self._end,
        )

    def _choice(self, index: int, delta: Delta, prompt: Sequence[int] | None, ids: bool) -> bytes:
        return (
            b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b,'
            b'"prompt_token_ids":%b,"token_ids":%b}'
        ) % (
            index,
            _quoted(delta.text),
            _reason(delta.finish_reason),
            _reason(delta.stop_reason),
            _ids(prompt),
            _ids(delta.token_ids) if ids else b"null",
        )

    def _continuous(self, usage: Usage) -> bytes:
        return msgspec.json.encode(usage.fields())

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event after the last token, if it was asked for."""
        fields = usage.fields()
        if usage.cached_tokens is not None:
            fields["prompt_tokens_details"] = self._cached(usage)
        return b'data: %b],"usage":%b,"system_fingerprint":%b}\n\n' % (
            self._start,
            msgspec.json.encode(fields),
            _quoted(fingerprint(self.head.spec)),
        )

    def _cached(self, usage: Usage) -> dict[str, int | None]:
        return {"cached_tokens": usage.cached_tokens}

    def answer(
        self, choices: Sequence[tuple[Sequence[int], Delta]], usage: Usage, params: Any
    ) -> bytes:
        """The body of an answer in one piece: each choice's prompt and all its tokens."""
        fields = {
            "id": self.head.request_id,
            "object": self._answer_object,
            "created": self.head.created,
            "model": self.head.spec.model,
            "choices": [
                self._whole(index, list(prompt), delta)
                for index, (prompt, delta) in enumerate(choices)
            ],
            "service_tier": None,
            "system_fingerprint": fingerprint(self.head.spec),
            "usage": {
                **usage.fields(),
                "prompt_tokens_details": self._details(usage),
                "completion_tokens_details": None,
            },
            **self._of_prompt(choices),
            "kv_transfer_params": params,
            "ec_transfer_params": None,
            "metrics": None,
        }
        return msgspec.json.encode(fields)

    def _whole(self, index: int, prompt: list[int], delta: Delta) -> dict[str, Any]:
        ids = self._ask.return_token_ids
        return {
            "index": index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt if ids else None,
            "routed_experts": None,
        }

    def _of_prompt(self, choices: Sequence[tuple[Sequence[int], Delta]]) -> dict[str, Any]:
        return {}

    def _details(self, usage: Usage) -> dict[str, int | None] | None:
        if usage.cached_tokens is None:
            return None
        unknown = {"cached_tokens": None, "created_cache_tokens": None, "multimodal_tokens": None}
        return {**unknown, **self._cached(usage)}


class ChatForm(CompletionForm):
    """Bodies of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    _object = "chat.completion.chunk"
    _answer_object = "chat.completion"

    def opening(self, index: int, prompt: Sequence[int], usage: Usage) -> bytes:
        continuous = b',"usage":' + self._continuous(usage) if self._ask.continuous_usage else b""
        return (
            b'data: %b{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}]%b,"prompt_token_ids":%b,"prompt_text":null}\n\n'
        ) % (
            self._start,
            index,
            continuous,
            _ids(prompt if self._ask.return_token_ids else None),
        )

    def _choice(self, index: int, delta: Delta, prompt: Sequence[int] | None, ids: bool) -> bytes:
        # Only the last chunk has a reason to stop, be it null.
        reason = b"" if delta.finish_reason is None else b'"stop_reason":%b,'
        if reason:
            reason %= _reason(delta.stop_reason)
        return (
            b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":%b,%b'
            b'"token_ids":%b}'
        ) % (
            index,
            _quoted(delta.text),
            _reason(delta.finish_reason),
            reason,
            _ids(delta.token_ids) if ids else b"null",
        )

    def _continuous(self, usage: Usage) -> bytes:
        return msgspec.json.encode({**usage.fields(), "completion_tokens_details": None})

    def _cached(self, usage: Usage) -> dict[str, int | None]:
        return {
            "cached_tokens": usage.cached_tokens,
            "created_cache_tokens": usage.created_tokens,
        }

    def _whole(self, index: int, prompt: list[int], delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": delta.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self._ask.return_token_ids else None,
            "routed_experts": None,
        }

    def _of_prompt(self, choices: Sequence[tuple[Sequence[int], Delta]]) -> dict[str, Any]:
        prompt = list(choices[0][0]) if self._ask.return_token_ids else None
        return {"prompt_logprobs": None, "prompt_token_ids": prompt, "prompt_text": None}


def models_body(spec: ScriptedSpec, started: int) -> bytes:
    """GET /v1/models"""
    permission = {
        "id": "modelperm-" + fingerprint(spec),
        "object": "model_permission",
        "created": started,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": spec.model,
        "object": "model",
        "created": started,
        "owned_by": "vllm",
        "root": spec.model,
        "parent": None,
        "max_model_len": spec.max_model_len,
        "permission": [permission],
    }
    return msgspec.json.encode({"object": "list", "data": [card]})
