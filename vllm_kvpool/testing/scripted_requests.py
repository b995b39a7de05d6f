"""What a client may ask a scripted engine, read and checked as vLLM's OpenAI server does it.

Of vLLM's fields those that the engine honours are read, the others are ignored as unknown ones
are. `Refusal` is every answer that is an error; its body is vLLM's.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from vllm_kvpool.config import OPTIONS_NOT_READ, RequestOptions, read_request_options
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.testing.scripted_spec import ScriptedSpec
from vllm_kvpool.testing.scripted_words import VOCAB_SIZE, encode

_CREATED_MAX_TOKENS = 16  # of completions that do not say
_MAX_N = 16384  # VLLM_MAX_N_SEQUENCES
_WHERE = re.compile(r" - at `\$\.?([^`]*)`")


class Refusal(Exception):
    """An error as the client gets it."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """`{"error": {...}}`"""
        return msgspec.json.encode(
            {
                "error": {
                    "message": str(self),
                    "type": self.kind,
                    "param": self.param,
                    "code": self.status,
                }
            }
        )


def _bad_value(message: str, param: str | None = None, value: object = None) -> Refusal:
    """What vLLM says of values that it cannot take; it appends which."""
    said = [f"parameter={param}"] * (param is not None) + [f"value={value}"] * (value is not None)
    return Refusal(
        400, "BadRequestError", f"{message} ({', '.join(said)})" if said else message, param
    )


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Body(msgspec.Struct, kw_only=True):
    """What completions and chats have in common."""

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
    """POST /v1/completions"""

    prompt: str | list[int | str | list[int]] | None = None


class ChatBody(_Body, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize"""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for tokens that can be honoured."""

    prompts: list[list[int]]
    max_tokens: list[int]
    """One for each prompt."""
    n: int = 1
    seed: int | None = None
    """None: greedy or, with `is_random`, any."""
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
    """Decode a body; Refusal 400 for what does not fit."""
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
    """The body is not declared to be JSON."""
    return _invalid("Unsupported Media Type: Only 'application/json' is allowed", None)


def check_model(model: str | None, spec: ScriptedSpec) -> None:
    """Refusal 404 for a model that is not served."""
    if model and model != spec.model:
        raise Refusal(
            404,
            "NotFoundError",
            f"The model `{model}` does not exist. Valid aliases: {spec.model}.",
            "model",
        )


def chat_text(messages: Sequence[dict[str, Any]], generate: bool, continues: bool) -> str:
    """The prompt of a chat: `<|role|>`, a line end, the text; Refusal 400 if there is none."""
    if generate and continues:
        raise _invalid(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", None
        )
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
    """POST /v1/completions"""
    body = read_body(data, CompletionBody)
    if not body.prompt:
        raise _invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    check_model(body.model, spec)
    if body.max_tokens is None:
        body.max_tokens = _CREATED_MAX_TOKENS
    return _ask(body, _prompts(body.prompt), body.max_tokens, spec)


def read_chat(data: bytes, spec: ScriptedSpec) -> Ask:
    """POST /v1/chat/completions"""
    body = read_body(data, ChatBody)
    check_model(body.model, spec)
    # Only one of the two is looked at, which the serving side prefers to the older one.
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    text = chat_text(body.messages, body.add_generation_prompt, body.continue_final_message)
    # A chat that another engine has rendered brings the ids.
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
        raise _bad_value(
            f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature
        )
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
        return OPTIONS_NOT_READ  # as the connector does, which only warns


def _max_tokens(
    prompt: Sequence[int], most: int | None, min_tokens: int, spec: ScriptedSpec
) -> int:
    """How many tokens may follow a prompt; Refusal 400 if none can."""
    limit, length = spec.max_model_len, len(prompt)
    if most is not None and most > limit:
        raise _bad_value(
            f"max_tokens={most} cannot be greater than max_model_len={limit}. Please request "
            "fewer output tokens.",
            "max_tokens",
            most,
        )
    if not prompt:
        raise _bad_value("The decoder prompt cannot be empty")
    if length > limit:
        raise _bad_value(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains "
            f"{length} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            length,
        )
    for token_id in (min(prompt), max(prompt)):
        if not 0 <= token_id < VOCAB_SIZE:
            raise _bad_value(f"Token id {token_id} is out of vocabulary", "prompt")
    allowed = limit - length if most is None else min(most, limit - length)
    if allowed < 1:
        raise _bad_value(f"max_tokens must be at least 1, got {allowed}.", "max_tokens", allowed)
    if min_tokens > allowed:
        raise _bad_value(
            f"min_tokens must be less than or equal to max_tokens={allowed}, got {min_tokens}."
        )
    return allowed
