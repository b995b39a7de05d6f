"""Which requests can go on whose engine fails in mid-answer, and how others are asked (pure).

An engine that is given prompt and answer as one prompt goes on as the failed one would have, except
where something looks at the answer alone: that would begin anew. Such answers can only be begun
again, and compared with what the client has already, which needs greedy decoding.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec
from msgspec import Raw

from vllm_kvpool.router.dataplane.bodies import ClientRequest, Kind, kvpool_wishes

GREEDY_BELOW = 1e-5
"""vLLM decodes greedily below this temperature."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_MAX_SEED = (1 << 63) - 1
_SPACE = b" \t\r\n"

# What would act on the first part of the answer twice, or not at all, if it became prompt.
_OF_THE_PROMPT = (
    *("truncate_prompt_tokens", "truncation_side", "suffix", "echo", "prompt_logprobs"),
    *("return_prompt_text", "n", "best_of"),
)


class Manner(Enum):
    """How an answer goes on at another engine."""

    REPEAT = "repeat"  # nothing of it has been delivered: the same request again
    RESUME = "resume"  # from the tokens so far
    REPLAY = "replay"  # the same request again, without what has been delivered


def stop_strings(request: ClientRequest) -> list[str]:
    stop = request.value("stop")
    each = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return [one for one in each if isinstance(one, str)]


def is_greedy(request: ClientRequest) -> bool:
    """Whether the same request again gives the same answer, as far as the engine can.

    A temperature that is not given is the server's, and mostly not 0.
    """
    temperature = request.value("temperature")
    is_zero = isinstance(temperature, int | float) and temperature < GREEDY_BELOW
    return is_zero or request.value("top_k") == 1


def why_hopeless(request: ClientRequest) -> str | None:
    """Why an answer that has begun cannot go on in any way."""
    if request.n > 1 or (request.value("best_of") or 1) != 1:
        return "an answer of several choices cannot be continued"
    if request.num_prompts > 1:
        return "answers to several prompts at once cannot be continued"
    if request.value("use_beam_search"):
        return "beam search cannot be continued"
    return None


def why_not_resumed(request: ClientRequest) -> str | None:
    """Why an answer cannot be resumed from its tokens, whatever these are."""
    for name in ("presence_penalty", "frequency_penalty"):
        if request.value(name):
            return f"`{name}` counts the tokens of one answer"
    for name in ("bad_words", "repetition_detection", "vllm_xargs", "logits_processors"):
        if request.value(name):
            return f"`{name}` looks at one answer alone"
    if request.value("thinking_token_budget") not in (None, -1):
        return "`thinking_token_budget` counts the tokens of one answer"
    format_ = request.value("response_format")
    is_text = format_ is None or (isinstance(format_, dict) and format_.get("type") == "text")
    if request.value("structured_outputs") or not is_text:
        return "a structured output is followed from its beginning"
    if request.value("spaces_between_special_tokens") is False:
        return "spaces between special tokens depend on the token before"
    if request.kind is Kind.CHAT:
        if request.value("tools") and request.value("tool_choice") != "none":
            return "tool calls are looked for from the beginning"
        if _has_media(request.value("messages")):
            return "token ids do not say what media the messages have"
    return None


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
    fields = {name: raw for name, raw in request.fields.items() if name not in _OF_THE_PROMPT}
    params = request.value("kv_transfer_params") or {}
    if "kvpool" in params:
        wishes = kvpool_wishes(params)
        kept = {name: each for name, each in wishes.items() if not name.startswith("expect_")}
        params = {**params, "kvpool": kept}
    if request.kind is Kind.COMPLETION:
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
    if min_tokens := _whole(request.value("min_tokens")):
        fields["min_tokens"] = _raw(max(0, min_tokens - num_tokens))
    if (seed := _whole(request.value("seed"))) is not None:
        fields["seed"] = _raw((seed + num_resumes) & _MAX_SEED)
    fields["return_token_ids"] = _raw(True)
    return msgspec.json.encode(fields)


def joined_ids(prompt_ids: bytes, generated: Sequence[int]) -> bytes:
    """One JSON list of a JSON list and what comes after it."""
    prompt = prompt_ids.strip()[1:-1].strip()
    answer = msgspec.json.encode(list(generated))[1:-1]
    return b"[%b]" % b",".join(part for part in (prompt, answer) if part)


def same_ids(one: bytes, other: bytes) -> bool:
    """Whether two JSON lists are of the same ids."""
    return one == other or one.translate(None, _SPACE) == other.translate(None, _SPACE)


def _raw(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))


def _whole(value: Any) -> int | None:
    """As leniently as the engine has read it."""
    return None if value is None else msgspec.convert(value, int, strict=False)


def _has_media(messages: Any) -> bool:
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") not in _TEXT_PARTS for part in parts)
