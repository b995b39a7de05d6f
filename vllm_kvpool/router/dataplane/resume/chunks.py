"""The chunks of vLLM's streams: reading what matters of them, changing as little as can be (pure).

A chunk is decoded for a few fields, and edited as bytes: a field that only the router has asked for
becomes the `null` that vLLM writes without it. A quoted name with a bracket after it is never part
of an answer: quotes inside JSON strings are escaped, and a token's text that is a key
(`top_logprobs`) has a number as value. Where text has to be cut, the chunk is decoded whole and
written anew.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.router.dataplane.responses import (
    UNKNOWN,
    ChoiceEnd,
    Count,
    EngineLost,
    PromptDetails,
    Usage,
)

DONE = b"[DONE]"
IDS, PROMPT_IDS = b'"token_ids"', b'"prompt_token_ids"'
_CHOICES = b'"choices":'
_EMPTY_DELTA = b'"delta":{}'
_NOTHING = (b"", b"null")

Piece = tuple[str, str]
"""The name of the field that holds text, and the text."""
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Delta(msgspec.Struct):
    """The new part of a chat message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: Raw = Raw()


class Logprobs(msgspec.Struct):
    """Log-probabilities of a completion; a chat's have `content` alone."""

    text_offset: list[int] = []
    tokens: list[str] = []
    content: list[Raw] | None = None


class Choice(ChoiceEnd):
    """A choice of a chunk, of a chat or a completion."""

    index: Count = 0
    text: str | None = None
    delta: Delta | None = None
    token_ids: list[TokenId] | UnsetType | None = UNSET
    prompt_token_ids: Raw = Raw()
    logprobs: Logprobs | None = None


class Failure(msgspec.Struct):
    """An error that ends a stream."""

    message: str = ""
    code: int | None = None


class Chunk(msgspec.Struct):
    """A chunk of a stream, as far as an answer that goes on needs it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    prompt_token_ids: Raw = Raw()
    error: Failure | None = None


_decode = msgspec.json.Decoder(Chunk).decode


def read(payload: bytes) -> Chunk:
    """Read a chunk's JSON; raises EngineLost."""
    try:
        return _decode(payload)
    except UNREADABLE as error:
        raise EngineLost(f"the engine has sent what is no chunk: {error}") from None


def is_something(raw: Raw) -> bool:
    """Return True if a field was there, and not null."""
    return bytes(raw) not in _NOTHING


def prompt_ids_of(chunk: Chunk) -> Raw | None:
    """Return the prompt's ids, which a chat has beside its choices."""
    each = (chunk.prompt_token_ids, *(choice.prompt_token_ids for choice in chunk.choices))
    return next((raw for raw in each if is_something(raw)), None)


def pieces_of(choice: Choice) -> list[Piece]:
    """Return the texts of a choice, in the order of their generation."""
    if choice.text is not None:
        return [("text", choice.text)] if choice.text else []
    delta = choice.delta
    if delta is None:
        return []
    pieces: list[Piece] = []
    if delta.reasoning:
        pieces.append(("reasoning", delta.reasoning))
    if delta.content:
        pieces.append(("content", delta.content))
    return pieces


def is_only_for_ids(choice: Choice, payload: bytes) -> bool:
    """Return True if an engine sends the chunk only because token ids were asked for."""
    is_bare = choice.finish_reason is None and choice.logprobs is None
    return is_bare and _EMPTY_DELTA in payload


def text_ends(choice: Choice) -> list[int]:
    """Return the offset of each token's end in a completion's text, as `text_offset` counts."""
    if choice.logprobs is None:
        return []
    pairs = zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=False)
    return [offset + len(token) for offset, token in pairs]


def num_logprobs(choice: Choice) -> int:
    """Return the number of tokens whose log-probabilities a chunk has."""
    found = choice.logprobs
    return 0 if found is None else len(found.tokens or found.content or ())


def head_of(payload: bytes) -> bytes:
    """Return id, object, time and model: all before the choices.

    The result is empty if it is not vLLM's order.
    """
    head = payload[: max(0, payload.find(_CHOICES))]
    try:
        return head if _fields_of(head) else b""
    except msgspec.DecodeError:
        return b""


def nulled(payload: bytes, name: bytes) -> bytes:
    """Return the chunk as if no ids of that name (IDS, PROMPT_IDS) had been asked for."""
    # The last is the one: what a logprob's key may be comes before.
    at = payload.rfind(name)
    value = at + len(name)
    if at < 0 or payload[value : value + 2] != b":[":
        return payload
    end = payload.index(b"]", value)
    return b"%b:null%b" % (payload[:value], payload[end + 1 :])


def end_chunk(head: bytes, is_chat: bool, text: str, ids: list[int] | None) -> bytes:
    """Return the last chunk of an answer that has all tokens it may have."""
    body: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
    reason = {"logprobs": None, "finish_reason": "length", "stop_reason": None}
    prompt = {} if is_chat else {"prompt_token_ids": None}
    choice = {"index": 0, **body, **reason, **prompt, "token_ids": ids}
    return _chunk(head, [choice], {})


def usage_chunk(
    head: bytes, prompt_tokens: int, completion_tokens: int, details: PromptDetails
) -> bytes:
    """Return the last chunk of a stream: token counts, without choices."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    if details != UNKNOWN:
        usage["prompt_tokens_details"] = details
    return _chunk(head, [], {"usage": usage})


def _chunk(head: bytes, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
    return msgspec.json.encode({**_fields_of(head), "choices": choices, **more})


def _fields_of(head: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(head.rstrip(b", ") + b"}") if head else {}
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """The changes to a chunk that goes on with the answer of another engine."""

    head: bytes
    """The head of the client's stream, which replaces the chunk's own."""
    pieces: list[Piece] | None = None
    """Texts of the chunk that the client does not have yet; None: all texts as they are."""
    skipped_tokens: int = 0
    """Tokens at its beginning that the client has."""
    earlier_tokens: int = 0
    """Tokens of the answer that are not of this engine."""
    earlier_reasoning_tokens: int = 0
    earlier_chars: int = 0
    """Characters that `text_offset` has counted before."""
    prompt_tokens: int = 0
    """Tokens of the client's prompt."""
    details: PromptDetails | None = None
    """Details of the client's prompt; None: as its engine says."""


def has_other_details(told: PromptDetails | None, details: PromptDetails) -> bool:
    """Return True if `with_details` changes a usage whose engine has told these details."""
    return told is not None and (
        told.cached_tokens not in (None, details.cached_tokens)
        or told.created_cache_tokens not in (None, details.created_cache_tokens)
    )


def with_details(payload: bytes, details: PromptDetails) -> bytes:
    """Return a chunk or whole answer whose usage has these details of the prompt.

    A count that the engine does not tell is not added. A count that is unknown becomes null.
    """
    body: dict[str, Any] = msgspec.json.decode(payload)
    _set_details(body["usage"], details)
    return msgspec.json.encode(body)


def _set_details(usage: dict[str, Any], details: PromptDetails) -> None:
    told = usage.get("prompt_tokens_details") or {}
    for name, count in msgspec.structs.asdict(details).items():
        if told.get(name) is not None:
            told[name] = count


def with_head(payload: bytes, own: bytes, head: bytes) -> bytes:
    """Return the chunk under another stream's head."""
    if own and head and payload.startswith(own):
        return head + payload[len(own) :]
    return patched(payload, Patch(head=head))


def patched(payload: bytes, patch: Patch) -> bytes:
    """Return the chunk, decoded whole and written anew."""
    chunk: dict[str, Any] = msgspec.json.decode(payload)
    chunk.update(_fields_of(patch.head))
    for choice in chunk.get("choices", ()):
        _patch_choice(choice, patch)
    usage = chunk.get("usage")
    if usage:
        _patch_usage(usage, patch)
    return msgspec.json.encode(chunk)


def _patch_choice(choice: dict[str, Any], patch: Patch) -> None:
    if patch.pieces is not None:
        left = dict(patch.pieces)
        if "text" in choice:
            choice["text"] = left.get("text", "")
        else:
            delta = choice.get("delta") or {}
            choice["delta"] = delta
            for name in ("reasoning", "content"):
                if name in delta or name in left:
                    delta[name] = left.get(name, "")
    if isinstance(choice.get("token_ids"), list):
        choice["token_ids"] = choice["token_ids"][patch.skipped_tokens :]
    logprobs = choice.get("logprobs")
    if not logprobs:
        return
    for name, values in logprobs.items():
        if isinstance(values, list):
            logprobs[name] = values[patch.skipped_tokens :]
    if "text_offset" in logprobs:
        logprobs["text_offset"] = [each + patch.earlier_chars for each in logprobs["text_offset"]]


def _patch_usage(usage: dict[str, Any], patch: Patch) -> None:
    if patch.details is not None:
        _set_details(usage, patch.details)
    if not patch.earlier_tokens:
        return
    usage["prompt_tokens"] = patch.prompt_tokens
    usage["completion_tokens"] = (usage.get("completion_tokens") or 0) + patch.earlier_tokens
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    details = usage.get("completion_tokens_details") or {}
    if "reasoning_tokens" in details:
        details["reasoning_tokens"] += patch.earlier_reasoning_tokens
