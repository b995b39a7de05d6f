"""The tables of vLLM's fields, against vLLM's own classes."""

import types
import typing
import warnings
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from vllm_kvpool.router.dataplane.vllm_fields import (
    CHUNK_FIELDS,
    FIELDS,
    WHOLE_FIELDS,
    Scalar,
    Trait,
    fields_with,
    read_scalar,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.generate.base.protocol import (
        DeltaMessage,
        PerRequestMetrics,
        StreamOptions,
    )
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
    *(ResponsesRequest, AnthropicMessagesRequest, StreamOptions),
)
OTHER_RELEASES = {"best_of", "early_stopping", "logits_processors", "watermarking"}
"""Fields that some tested releases lack."""


def test_fields_all_are_those_of_vllm() -> None:
    known = {name for kind in CLASSES for name in kind.model_fields}
    assert FIELDS.keys() - known <= OTHER_RELEASES


@pytest.mark.parametrize("trait", list(Trait))
def test_traits_each_has_fields(trait: Trait) -> None:
    assert fields_with(trait)


KINDS = {bool: Trait.TRUTH, int: Trait.WHOLE, float: Trait.NUMBER}


def scalars_of(annotation: object) -> set[object]:
    """Booleans and numbers among the types of a field."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return scalars_of(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return {each for arg in typing.get_args(annotation) for each in scalars_of(arg)}
    return {annotation} & KINDS.keys()


SCALARS = [
    pytest.param(kind, name, id=f"{kind.__name__} {name}")
    for kind in CLASSES
    for name, field in kind.model_fields.items()
    if name in FIELDS and scalars_of(field.annotation)
]
FORMS: list[Scalar] = [
    *(None, True, False, 0, 1, 2, -1, 0.0, 1.0, -1.0, 0.5, 1.5, 1e-6, 1e3, 1e30),
    *(f"{word}" for word in ("true", "True", "TRUE", "t", "T", "yes", "YES", "y", "on", "On")),
    *(f"{word}" for word in ("false", "False", "FALSE", "f", "F", "no", "NO", "n", "off", "Off")),
    *("0", "1", "2", "-1", "+1", "0.0", "1.0", "2.00", "-1.0", "1.5", "1.", ".5", "1e3", "1e-6"),
    *(" 1", "1 ", " true", "1_0", "1__0", "01", "0x1", "", " ", "nan", "inf", "none", "null"),
]
"""Values that pydantic reads as booleans or numbers, and their neighbours."""


@pytest.mark.parametrize(("kind", "name"), SCALARS)
def test_booleans_and_numbers_are_read_as_vllm_reads_them(kind: type[BaseModel], name: str) -> None:
    field = kind.model_fields[name]
    wanted = {KINDS[each] for each in scalars_of(field.annotation)}
    assert all(each in FIELDS[name] for each in wanted)
    adapter: TypeAdapter[Any] = TypeAdapter(field.annotation)
    num_read = 0
    for form in FORMS:
        try:
            expected = adapter.validate_python(form)
        except ValidationError:
            continue
        num_read += 1
        found = read_scalar(name, form)
        if form is None:
            assert found is None
            continue
        assert found == expected or found != found, (name, form)
        if wanted == {Trait.TRUTH} and Trait.WHOLE not in FIELDS[name]:
            assert isinstance(found, bool), (name, form)
    assert num_read > 10


def test_a_field_without_a_row_is_not_read() -> None:
    with pytest.raises(KeyError):
        read_scalar("nothing", 1)


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
