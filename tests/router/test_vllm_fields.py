"""The table of vLLM's request fields, against vLLM's own classes."""

import warnings

import pytest

from vllm_kvpool.router.dataplane.vllm_fields import FIELDS, Trait, fields_with

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

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
