"""Requests and answers of a scripted engine, in the form of vLLM 0.32's OpenAI server.

Request fields that the engine does not use are ignored, whether vLLM knows them or not. `Refusal`
is every error answer, with vLLM's body. Answers follow vLLM's encoding: chunks omit fields that
were never set, whole answers write every field. A form makes the bodies of one request, and encodes
their common part once.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import msgspec

from tests.support.scripted_spec import ScriptedSpec
from tests.support.scripted_words import VOCAB_SIZE, encode
from vllm_kvpool.config import OPTIONS_NOT_READ, RequestOptions, read_request_options
from vllm_kvpool.errors import ConfigError

_CREATED_MAX_TOKENS = 16  # default for completions
_MAX_N = 16384  # VLLM_MAX_N_SEQUENCES
_WHERE = re.compile(r" - at `\$\.?([^`]*)`")


class Refusal(Exception):
    """An error answer."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """Return the body `{"error": {...}}`."""
        said = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": said})


def _bad_value(message: str, param: str | None = None, value: object = None) -> Refusal:
    """Return vLLM's error for an invalid value, with the parameter and the value appended."""
    said = [f"parameter={param}"] * (param is not None) + [f"value={value}"] * (value is not None)
    told = f"{message} ({', '.join(said)})" if said else message
    return Refusal(400, "BadRequestError", told, param)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Body(msgspec.Struct, kw_only=True):
    """Fields that completions and chats share."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = 1
    seed: int | None = None
    temperature: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class CompletionBody(_Body, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[int | str | list[int]] | None = None


class ChatBody(_Body, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A valid request for tokens."""

    prompts: list[list[int]]
    max_tokens: list[int]
    """Limit of output tokens for each prompt."""
    n: int = 1
    seed: int | None = None
    """None: greedy or, with `is_random`, a random seed."""
    is_random: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    is_stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    salt: str = ""
    request_id: str | None = None
    options: RequestOptions = field(default_factory=RequestOptions)


_BodyT = TypeVar("_BodyT")


def read_body(data: bytes, kind: type[_BodyT]) -> _BodyT:
    """Decode a body. Raise Refusal 400 if it does not match the type."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        where = _WHERE.search(str(error))
        param = f"body.{where[1]}" if where and where[1] else "body"
        said = {"type": "value_error", "loc": param, "msg": str(error)}
        raise _invalid(said, param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        said = {"type": "json_invalid", "loc": "body.0", "msg": "JSON decode error"}
        said["ctx"] = str(error)
        raise _invalid(said, "body.0") from error


def _invalid(said: object, param: str | None) -> Refusal:
    return Refusal(400, "Bad Request", f"1 validation error:\n  {said}", param)


def wrong_media_type() -> Refusal:
    """Return the error for a body that is not declared as JSON."""
    return _invalid("Unsupported Media Type: Only 'application/json' is allowed", None)


def check_model(model: str | None, spec: ScriptedSpec) -> None:
    """Raise Refusal 404 for a model that the engine does not serve."""
    if model and model != spec.model:
        why = f"The model `{model}` does not exist. Valid aliases: {spec.model}."
        raise Refusal(404, "NotFoundError", why, "model")


def chat_text(messages: Sequence[dict[str, Any]], generate: bool, continues: bool) -> str:
    """Return a chat's prompt: for each message `<|role|>`, a line end and the text.

    Raises:
        Refusal: 400 for content that is not text, or if both options are set.
    """
    if generate and continues:
        why = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise _invalid(why, None)
    texts = [f"<|{message.get('role', 'user')}|>\n{_content(message)}" for message in messages]
    text = "\n".join(texts) if continues else "".join(f"{each}\n" for each in texts)
    return f"{text}<|assistant|>\n" if generate else text


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _bad_value("A message's content is a text or a list of parts", "messages")
    texts = []
    for part in content:
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise _bad_value("scripted is not a multimodal model", "messages")
        texts.append(part["text"])
    return "\n".join(texts)


def read_completion(data: bytes, spec: ScriptedSpec) -> Ask:
    """Read the body of POST /v1/completions."""
    body = read_body(data, CompletionBody)
    if not body.prompt:
        raise _invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    check_model(body.model, spec)
    if body.max_tokens is None:
        body.max_tokens = _CREATED_MAX_TOKENS
    return _ask(body, _prompts(body.prompt), body.max_tokens, spec)


def read_chat(data: bytes, spec: ScriptedSpec) -> Ask:
    """Read the body of POST /v1/chat/completions."""
    body = read_body(data, ChatBody)
    check_model(body.model, spec)
    # Only one limit counts: vLLM prefers `max_completion_tokens` to the older `max_tokens`.
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    text = chat_text(body.messages, body.add_generation_prompt, body.continue_final_message)
    # The request has the token ids if another engine has rendered the chat.
    rendered = (body.kv_transfer_params or {}).get("prompt_token_ids")
    return _ask(body, [rendered or encode(text)], most, spec)


def _prompts(prompt: str | list[int | str | list[int]]) -> list[list[int]]:
    if isinstance(prompt, str):
        return [encode(prompt)]
    numbers = [each for each in prompt if isinstance(each, int)]
    if len(numbers) == len(prompt):
        return [numbers]
    if numbers:
        raise _invalid("Input should be a valid list of integers", "body.prompt")
    return [encode(each) if isinstance(each, str) else each for each in _no_int(prompt)]


def _no_int(prompt: list[int | str | list[int]]) -> list[str | list[int]]:
    return [each for each in prompt if not isinstance(each, int)]


def _ask(body: _Body, prompts: list[list[int]], most: int | None, spec: ScriptedSpec) -> Ask:
    stream = body.stream_options
    if stream is not None and not body.stream:
        raise _invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.n is not None and body.n < 1:
        raise _bad_value(f"n must be at least 1, got {body.n}.", "n", body.n)
    if body.n is not None and body.n > _MAX_N:
        raise _bad_value(f"n must be at most {_MAX_N}, got {body.n}.", "n", body.n)
    include_usage = stream is not None and bool(stream.include_usage)
    temperature = spec.default_temperature if body.temperature is None else body.temperature
    if not math.isfinite(temperature) or not 0 <= temperature <= 2:
        why = f"temperature must be in [0, 2], got {temperature}."
        raise _bad_value(why, "temperature", temperature)
    return Ask(
        prompts=prompts,
        max_tokens=[_max_tokens(prompt, most, body.min_tokens, spec) for prompt in prompts],
        n=1 if body.n is None else body.n,
        seed=body.seed,
        is_random=temperature > 0,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        include_stop=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        is_stream=bool(body.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(stream and stream.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        salt=body.cache_salt or "",
        request_id=body.request_id,
        options=_options(body.kv_transfer_params),
    )


def _options(params: dict[str, Any] | None) -> RequestOptions:
    try:
        return read_request_options(params)
    except ConfigError:
        return OPTIONS_NOT_READ  # like the connector, which only warns


def _max_tokens(
    prompt: Sequence[int], most: int | None, min_tokens: int, spec: ScriptedSpec
) -> int:
    """Return the limit of output tokens for a prompt. Raise Refusal 400 if it allows none."""
    limit, length = spec.max_model_len, len(prompt)
    if most is not None and most > limit:
        why = f"max_tokens={most} cannot be greater than max_model_len={limit}. "
        raise _bad_value(why + "Please request fewer output tokens.", "max_tokens", most)
    if not prompt:
        raise _bad_value("The decoder prompt cannot be empty")
    if length > limit:
        why = f"This model's maximum context length is {limit} tokens. However, your prompt "
        why += f"contains {length} input tokens, which exceeds this limit even without any output "
        why += "tokens. Please reduce the length of the input prompt."
        raise _bad_value(why, "input_tokens", length)
    for token_id in (min(prompt), max(prompt)):
        if not 0 <= token_id < VOCAB_SIZE:
            raise _bad_value(f"Token id {token_id} is out of vocabulary", "prompt")
    allowed = limit - length if most is None else min(most, limit - length)
    if allowed < 1:
        raise _bad_value(f"max_tokens must be at least 1, got {allowed}.", "max_tokens", allowed)
    if min_tokens > allowed:
        why = f"min_tokens must be less than or equal to max_tokens={allowed}, got {min_tokens}."
        raise _bad_value(why)
    return allowed


DONE = b"data: [DONE]\n\n"
_CACHED_TEXTS = 1 << 14


class Delta(NamedTuple):
    """New text and tokens of a choice. The last delta has a `finish_reason`."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def then(self, later: "Delta") -> "Delta":
        """Return both deltas as one, for a client that reads too slowly."""
        return later._replace(
            text=self.text + later.text, token_ids=self.token_ids + later.token_ids
        )


class Usage(NamedTuple):
    """Token counts of a request.

    `cached_tokens` is None unless the engine reports cached prompt tokens. `created_tokens` counts
    the prompt tokens that this request added to the cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    created_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the fields in vLLM's order, without the optional ones."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }


def fingerprint(spec: ScriptedSpec) -> str:
    """Return vLLM's fingerprint of its version and configuration."""
    digest = blake2b(spec.model.encode(), digest_size=4).hexdigest()
    return f"vllm-{spec.version}-{digest}"


def event(data: bytes) -> bytes:
    """Return a server-sent event."""
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
    """The data common to all bodies of a request; `request_id` includes its prefix."""

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
        """Return the events before a choice's first token."""
        return b""

    def chunk(self, index: int, delta: Delta, usage: Usage, prompt: Sequence[int] | None) -> bytes:
        """Return the event of new tokens; `prompt` is set in the first event of a choice."""
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
        """Return the usage event that follows the last token, if it was requested."""
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
        """Return the answer in one piece: each choice's prompt and all its tokens."""
        fields = {
            "id": self.head.request_id,
            "object": self._answer_object,
            "created": self.head.created,
            "model": self.head.spec.model,
            "choices": [
                self._whole(at, list(ids), delta) for at, (ids, delta) in enumerate(choices)
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


_UNSET = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_ALLOWED = {"allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True}
_ALLOWED |= {"allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False}


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
        ) % (self._start, index, continuous, _ids(prompt if self._ask.return_token_ids else None))

    def _choice(self, index: int, delta: Delta, prompt: Sequence[int] | None, ids: bool) -> bytes:
        # Only the last chunk has the field `stop_reason`, even if it is null.
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
        return {"cached_tokens": usage.cached_tokens, "created_cache_tokens": usage.created_tokens}

    def _whole(self, index: int, prompt: list[int], delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": delta.text, **_UNSET},
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
    """Return the body of GET /v1/models."""
    permission = {
        "id": "modelperm-" + fingerprint(spec),
        "object": "model_permission",
        "created": started,
        **_ALLOWED,
        **{"organization": "*", "group": None, "is_blocking": False},
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
