"""Fields of vLLM's requests and answers that the router understands, one row each (pure).

A field of a request without a row goes to the engine as it came. A chunk with a field that has no
row cannot be assembled to a whole answer.
"""

from collections.abc import Mapping
from enum import Enum, Flag, auto


class Trait(Flag):
    """A meaning of a field to the router."""

    RESERVED = auto()
    """Only the router, or a client that is trusted, may send it to an engine."""
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


_T = Trait
FIELDS: Mapping[str, Trait] = {
    # The prompt
    "add_special_tokens": _T.PREFIX,
    "cache_salt": _T.PREFIX,
    "chat_template": _T.PREFIX,
    "chat_template_kwargs": _T.PREFIX,
    "documents": _T.PREFIX | _T.RENDERED,
    "instructions": _T.PREFIX | _T.RENDERED,
    "mm_processor_kwargs": _T.PREFIX,
    "model": _T.PREFIX,
    "prompt_embeds": _T.NOT_STREAMED,  # the prompt's length
    "reasoning_effort": _T.PREFIX,
    "suffix": _T.PROMPT_ONLY,
    "system": _T.PREFIX | _T.RENDERED,
    "tool_choice": _T.PREFIX,
    "tools": _T.PREFIX | _T.RENDERED,
    "truncate_prompt_tokens": _T.PROMPT_ONLY | _T.HAND_OVER,
    "truncation_side": _T.PROMPT_ONLY,
    # Sampling
    "allowed_token_ids": _T.ANSWER_ONLY,
    "bad_words": _T.ANSWER_ONLY | _T.WATCHES_ANSWER,
    "best_of": _T.ANSWER_ONLY | _T.PROMPT_ONLY,
    "early_stopping": _T.ANSWER_ONLY,
    "frequency_penalty": _T.ANSWER_ONLY | _T.WATCHES_ANSWER,
    "ignore_eos": _T.ANSWER_ONLY,
    "include_stop_str_in_output": _T.ANSWER_ONLY,
    "length_penalty": _T.ANSWER_ONLY,
    "logit_bias": _T.ANSWER_ONLY,
    "logits_processors": _T.WATCHES_ANSWER,
    "min_p": _T.ANSWER_ONLY,
    "min_tokens": _T.ANSWER_ONLY,
    "n": _T.ANSWER_ONLY | _T.PROMPT_ONLY,
    "parallel_tool_calls": _T.ANSWER_ONLY,
    "presence_penalty": _T.ANSWER_ONLY | _T.WATCHES_ANSWER,
    "repetition_detection": _T.ANSWER_ONLY | _T.WATCHES_ANSWER,
    "repetition_penalty": _T.ANSWER_ONLY,
    "seed": _T.ANSWER_ONLY,
    "stop": _T.ANSWER_ONLY,
    "stop_token_ids": _T.ANSWER_ONLY,
    "structured_outputs": _T.ANSWER_ONLY,
    "thinking_token_budget": _T.ANSWER_ONLY,
    "top_k": _T.ANSWER_ONLY,
    "top_p": _T.ANSWER_ONLY,
    "use_beam_search": _T.ANSWER_ONLY | _T.HAND_OVER | _T.NOT_STREAMED,
    "vllm_xargs": _T.WATCHES_ANSWER,
    "watermarking": _T.ANSWER_ONLY,
    # The answer's form
    "echo": (
        _T.ANSWER_ONLY
        | _T.PROMPT_ONLY
        | _T.HAND_OVER
        | _T.RETURNS_PROMPT
        # Log-probabilities of the prompt
        | _T.NOT_STREAMED
    ),
    "logprob_token_ids": _T.ANSWER_ONLY | _T.LOGPROBS,
    "logprobs": _T.ANSWER_ONLY | _T.LOGPROBS,
    "prompt_logprobs": (
        _T.ANSWER_ONLY
        | _T.PROMPT_ONLY
        | _T.HAND_OVER
        | _T.RETURNS_PROMPT
        | _T.LOGPROBS
        | _T.NOT_STREAMED
    ),
    "return_prompt_text": _T.ANSWER_ONLY | _T.PROMPT_ONLY,
    "return_token_ids": _T.ANSWER_ONLY,
    "return_tokens_as_token_ids": _T.ANSWER_ONLY,
    "routed_experts_prompt_start": _T.ANSWER_ONLY | _T.RETURNS_PROMPT | _T.NOT_STREAMED,
    "stream_interval": _T.ANSWER_ONLY,
    "stream_options": _T.ANSWER_ONLY | _T.NOT_STREAMED,  # engines refuse them without a stream
    "top_logprobs": _T.ANSWER_ONLY | _T.LOGPROBS,
    # Engines' orders
    "background": _T.KEPT_RESPONSE,
    "ec_transfer_params": _T.RESERVED | _T.NOT_STREAMED,
    "kv_transfer_params": _T.RESERVED | _T.HAND_OVER | _T.NOT_STREAMED,
    "previous_response_id": _T.KEPT_RESPONSE,
    "priority": _T.RESERVED,
}


def fields_with(trait: Trait) -> frozenset[str]:
    """Return the names of the fields that have a trait."""
    return frozenset(name for name, traits in FIELDS.items() if trait in traits)


class Rule(Enum):
    """How a field of a stream's chunks goes into the whole answer."""

    FIRST = "first"
    """The value of the first chunk that has one."""
    LAST = "last"
    """The value of the last chunk that has one."""
    TEXT = "text"
    """The texts of all chunks, one after the other."""
    LIST = "list"
    """The items of all chunks."""
    OBJECT = "object"
    """By rules of its own."""


CHUNK_FIELDS: Mapping[str, Mapping[str, Rule]] = {
    "chunk": {
        **dict.fromkeys(("id", "object", "created", "model"), Rule.FIRST),
        "choices": Rule.OBJECT,
        "system_fingerprint": Rule.LAST,
        "prompt_token_ids": Rule.LAST,
        "prompt_text": Rule.LAST,
        "usage": Rule.LAST,
        "metrics": Rule.LAST,
    },
    "choice": {
        "index": Rule.LAST,
        "text": Rule.TEXT,
        "delta": Rule.OBJECT,
        "logprobs": Rule.OBJECT,
        "token_ids": Rule.LIST,
        "prompt_token_ids": Rule.LIST,
        "finish_reason": Rule.LAST,
        "stop_reason": Rule.LAST,
    },
    "delta": {"role": Rule.LAST, "content": Rule.TEXT, "reasoning": Rule.TEXT},
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
