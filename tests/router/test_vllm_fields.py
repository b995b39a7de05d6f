"""The tables of vLLM's fields, against vLLM's own classes."""

import warnings

import pytest

from vllm_kvpool.router.dataplane.vllm_fields import (
    CHUNK_FIELDS,
    FIELDS,
    WHOLE_FIELDS,
    Trait,
    fields_with,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.generate.base.protocol import DeltaMessage, PerRequestMetrics
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionRequest,
        ChatCompletionResponse,
        ChatCompletionResponseChoice,
        ChatCompletionResponseStreamChoice,
        ChatCompletionStreamResponse,
        ChatMessage,
    )
    from vllm.entrypoints.openai.completion.protocol import (
        CompletionRequest,
        CompletionResponse,
        CompletionResponseChoice,
        CompletionResponseStreamChoice,
        CompletionStreamResponse,
    )
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo

CLASSES = (
    *(CompletionRequest, ChatCompletionRequest),
    *(ResponsesRequest, AnthropicMessagesRequest),
)
OTHER_RELEASES = {"best_of", "early_stopping", "logits_processors", "watermarking"}
"""Fields that some tested releases lack."""


def test_fields_all_are_those_of_vllm() -> None:
    known = {name for kind in CLASSES for name in kind.model_fields}
    assert FIELDS.keys() - known <= OTHER_RELEASES


@pytest.mark.parametrize("trait", list(Trait))
def test_traits_each_has_fields(trait: Trait) -> None:
    assert fields_with(trait)


CHUNK_CLASSES = {
    "chunk": (CompletionStreamResponse, ChatCompletionStreamResponse),
    "choice": (CompletionResponseStreamChoice, ChatCompletionResponseStreamChoice),
    "delta": (DeltaMessage,),
}
WHOLE_CLASSES = {
    "completion": CompletionResponse,
    "completion choice": CompletionResponseChoice,
    "chat": ChatCompletionResponse,
    "chat choice": ChatCompletionResponseChoice,
    "message": ChatMessage,
    "usage": UsageInfo,
    "prompt details": PromptTokenUsageInfo,
    "metrics": PerRequestMetrics,
}


@pytest.mark.parametrize("what", CHUNK_FIELDS)
def test_chunk_fields_all_are_those_of_vllm(what: str) -> None:
    known = {name for kind in CHUNK_CLASSES[what] for name in kind.model_fields}
    assert CHUNK_FIELDS[what].keys() <= known


@pytest.mark.parametrize("what", WHOLE_FIELDS)
def test_whole_fields_all_are_those_of_vllm(what: str) -> None:
    assert set(WHOLE_FIELDS[what]) <= WHOLE_CLASSES[what].model_fields.keys()
