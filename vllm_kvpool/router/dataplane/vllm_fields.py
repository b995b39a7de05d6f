"""Fields of vLLM's requests and answers that the router understands, one row each (pure).

A field of a request without a row goes to the engine as it came. A chunk with a field that has no
row cannot be assembled to a whole answer.
"""

from collections.abc import Callable, Mapping
from enum import Enum, Flag, auto


class Trait(Flag):
    """A meaning of a field to the router."""

    RESERVED = auto()
    """Only the router, or a trusted client, may send it to an engine, or is told it by one."""
    PREFIX = auto()
    """Changes how the beginning of a prompt is rendered; its value is part of the prefix's hash."""
    RENDERED = auto()
    """Rendered into the prompt beside the messages."""
    ANSWER_ONLY = auto()
    """Shapes the answer and not the prompt, so the call that computes the prompt goes without."""
    PROMPT_ONLY = auto()
    """Acts on the prompt or on the whole answer, so a request that is resumed goes without."""
    HAND_OVER = auto()
    """Decides whether the prompt can be computed on one engine and decoded on another."""
    RETURNS_PROMPT = auto()
    """Makes the answer contain data for each token of the prompt."""
    LOGPROBS = auto()
    """Makes the answer contain log-probabilities."""
    NOT_STREAMED = auto()
    """Adds something to a whole answer that a stream lacks."""
    WATCHES_ANSWER = auto()
    """The engine looks at the tokens of one answer, which a resumed request has as its prompt."""
    KEPT_RESPONSE = auto()
    """Needs a response that one engine keeps."""
    TRUTH = auto()
    """A boolean."""
    WHOLE = auto()
    """A whole number. With TRUTH: a number in one API, a boolean in another."""
    NUMBER = auto()
    """A number."""


_T = Trait
FIELDS: Mapping[str, Trait] = {
    # The prompt
    "add_special_tokens": _T.PREFIX | _T.TRUTH,
    "cache_salt": _T.PREFIX,
    "chat_template": _T.PREFIX,
    "chat_template_kwargs": _T.PREFIX,
    "documents": _T.PREFIX | _T.RENDERED,
    "instructions": _T.PREFIX | _T.RENDERED,
    "mm_processor_kwargs": _T.PREFIX,
    "model": _T.PREFIX,
    "prompt_embeds": _T.HAND_OVER | _T.NOT_STREAMED,  # the prompt's length
    "reasoning_effort": _T.PREFIX,
    "suffix": _T.PROMPT_ONLY,
    "system": _T.PREFIX | _T.RENDERED,
    "tool_choice": _T.PREFIX,
    "tools": _T.PREFIX | _T.RENDERED,
    "truncate_prompt_tokens": _T.PROMPT_ONLY | _T.HAND_OVER | _T.WHOLE,
    "truncation_side": _T.PROMPT_ONLY,
    # Sampling
    "allowed_token_ids": _T.ANSWER_ONLY,
    "bad_words": _T.ANSWER_ONLY | _T.WATCHES_ANSWER,
    "best_of": _T.ANSWER_ONLY | _T.PROMPT_ONLY | _T.WHOLE,
    "early_stopping": _T.ANSWER_ONLY,
    "frequency_penalty": _T.ANSWER_ONLY | _T.WATCHES_ANSWER | _T.NUMBER,
    "ignore_eos": _T.ANSWER_ONLY | _T.TRUTH,
    "include_stop_str_in_output": _T.ANSWER_ONLY | _T.TRUTH,
    "length_penalty": _T.ANSWER_ONLY | _T.NUMBER,
    "logit_bias": _T.ANSWER_ONLY,
    "logits_processors": _T.WATCHES_ANSWER,
    "min_p": _T.ANSWER_ONLY | _T.NUMBER,
    "min_tokens": _T.ANSWER_ONLY | _T.WHOLE,
    "n": _T.ANSWER_ONLY | _T.PROMPT_ONLY | _T.WHOLE,
    "parallel_tool_calls": _T.ANSWER_ONLY | _T.TRUTH,
    "presence_penalty": _T.ANSWER_ONLY | _T.WATCHES_ANSWER | _T.NUMBER,
    "repetition_detection": _T.ANSWER_ONLY | _T.WATCHES_ANSWER,
    "repetition_penalty": _T.ANSWER_ONLY | _T.NUMBER,
    "seed": _T.ANSWER_ONLY | _T.WHOLE,
    "stop": _T.ANSWER_ONLY,
    "stop_token_ids": _T.ANSWER_ONLY,
    "structured_outputs": _T.ANSWER_ONLY,
    "thinking_token_budget": _T.ANSWER_ONLY | _T.WHOLE,
    "top_k": _T.ANSWER_ONLY | _T.WHOLE,
    "top_p": _T.ANSWER_ONLY | _T.NUMBER,
    "use_beam_search": _T.ANSWER_ONLY | _T.HAND_OVER | _T.NOT_STREAMED | _T.TRUTH,
    "vllm_xargs": _T.WATCHES_ANSWER,
    "watermarking": _T.ANSWER_ONLY | _T.TRUTH,
    "max_completion_tokens": _T.WHOLE,
    "max_output_tokens": _T.WHOLE,
    "max_tokens": _T.WHOLE,
    "temperature": _T.NUMBER,
    # The answer's form
    "echo": (
        _T.TRUTH
        | _T.ANSWER_ONLY
        | _T.PROMPT_ONLY
        | _T.HAND_OVER
        | _T.RETURNS_PROMPT
        # Log-probabilities of the prompt
        | _T.NOT_STREAMED
    ),
    "include_usage": _T.TRUTH,  # within `stream_options`
    "logprob_token_ids": _T.ANSWER_ONLY | _T.LOGPROBS,
    "logprobs": _T.ANSWER_ONLY | _T.LOGPROBS | _T.WHOLE | _T.TRUTH,
    "prompt_logprobs": (
        _T.WHOLE
        | _T.ANSWER_ONLY
        | _T.PROMPT_ONLY
        | _T.HAND_OVER
        | _T.RETURNS_PROMPT
        | _T.LOGPROBS
        | _T.NOT_STREAMED
    ),
    "return_prompt_text": _T.ANSWER_ONLY | _T.PROMPT_ONLY | _T.TRUTH,
    "return_token_ids": _T.ANSWER_ONLY | _T.TRUTH,
    "return_tokens_as_token_ids": _T.ANSWER_ONLY | _T.TRUTH,
    "routed_experts_prompt_start": _T.ANSWER_ONLY | _T.RETURNS_PROMPT | _T.NOT_STREAMED | _T.WHOLE,
    "spaces_between_special_tokens": _T.TRUTH,
    "stream": _T.TRUTH,
    "stream_interval": _T.ANSWER_ONLY | _T.WHOLE,
    "stream_options": _T.ANSWER_ONLY | _T.NOT_STREAMED,  # engines refuse them without a stream
    "top_logprobs": _T.ANSWER_ONLY | _T.LOGPROBS | _T.WHOLE,
    # Engines' orders
    "background": _T.KEPT_RESPONSE | _T.TRUTH,
    "ec_transfer_params": _T.RESERVED | _T.NOT_STREAMED,
    "kv_transfer_params": _T.RESERVED | _T.HAND_OVER | _T.NOT_STREAMED,
    "previous_response_id": _T.KEPT_RESPONSE,
    "priority": _T.RESERVED | _T.WHOLE,
    "request_id": _T(0),
}


def fields_with(trait: Trait) -> frozenset[str]:
    """Return the names of the fields that have a trait."""
    return frozenset(name for name, traits in FIELDS.items() if trait in traits)


Scalar = bool | int | float | str | None
_TRUTHS = {
    **dict.fromkeys(("true", "1", "yes", "y", "on", "t"), True),
    **dict.fromkeys(("false", "0", "no", "n", "off", "f"), False),
}


def _truth(value: int | float | str) -> bool:
    if isinstance(value, str):
        return _TRUTHS[value.lower()]
    if value not in (0, 1):
        raise ValueError(value)
    return bool(value)


def _whole(value: int | float | str) -> int:
    if isinstance(value, str):
        digits, _, zeros = value.strip().partition(".")
        return int(digits if not zeros.strip("0") else value)
    if value != int(value):
        raise ValueError(value)
    return int(value)


_READERS: Mapping[str, tuple[Callable[[int | float | str], Scalar], ...]] = {
    name: tuple(
        reader
        for trait, reader in ((_T.WHOLE, _whole), (_T.TRUTH, _truth), (_T.NUMBER, float))
        if trait in traits
    )
    for name, traits in FIELDS.items()
}


def read_scalar(name: str, value: Scalar) -> Scalar:
    """Return a field's value as vLLM's pydantic reads it: forms and scripts send texts.

    What pydantic refuses comes back as it is. KeyError for a field without a row.
    """
    readers = _READERS[name]
    if value is not None:
        for reader in readers:
            try:
                return reader(value)
            except (ValueError, KeyError, OverflowError):
                continue
    return value


class MergeRule(Enum):
    """The way of a field from a stream's chunks into the whole answer."""

    FIRST = "first"
    """The value of the first chunk that has one."""
    LAST = "last"
    """The value of the last chunk that has one."""
    TEXT = "text"
    """The texts of all chunks, one after the other."""
    LIST = "list"
    """The items of all chunks."""
    OBJECT = "object"
    """Merged by code for that field (`WholeAnswer`)."""


CHUNK_FIELDS: Mapping[str, Mapping[str, MergeRule]] = {
    "chunk": {
        **dict.fromkeys(("id", "object", "created", "model"), MergeRule.FIRST),
        "choices": MergeRule.OBJECT,
        "system_fingerprint": MergeRule.LAST,
        "prompt_token_ids": MergeRule.LAST,
        "prompt_text": MergeRule.LAST,
        "usage": MergeRule.LAST,
        "metrics": MergeRule.LAST,
    },
    "choice": {
        "index": MergeRule.LAST,
        "text": MergeRule.TEXT,
        "delta": MergeRule.OBJECT,
        "logprobs": MergeRule.OBJECT,
        "token_ids": MergeRule.LIST,
        "prompt_token_ids": MergeRule.LIST,
        "finish_reason": MergeRule.LAST,
        "stop_reason": MergeRule.LAST,
    },
    "delta": {"role": MergeRule.LAST, "content": MergeRule.TEXT, "reasoning": MergeRule.TEXT},
}
"""Fields of the objects of a stream's chunks."""

_HEAD = ("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint")
_TAIL = ("kv_transfer_params", "ec_transfer_params", "metrics")
_END = ("logprobs", "finish_reason", "stop_reason", "token_ids")
WHOLE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "completion": (*_HEAD, "usage", *_TAIL),
    "chat": (*_HEAD, "usage", "prompt_logprobs", "prompt_token_ids", "prompt_text", *_TAIL),
    "completion choice": (
        *("index", "text", *_END),
        *("prompt_logprobs", "prompt_token_ids", "routed_experts"),
    ),
    "chat choice": ("index", "message", *_END, "routed_experts"),
    "message": (
        *("role", "content", "refusal", "annotations", "audio", "function_call"),
        "reasoning",
    ),
    "usage": (
        *("prompt_tokens", "total_tokens", "completion_tokens"),
        *("prompt_tokens_details", "completion_tokens_details"),
    ),
    "prompt details": ("cached_tokens", "created_cache_tokens", "multimodal_tokens"),
    "metrics": (
        *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"),
        *("tokens_per_second", "speculative_decoding"),
    ),
}
"""Fields of the objects of a whole answer, in vLLM's order; a field that is not known is null."""
