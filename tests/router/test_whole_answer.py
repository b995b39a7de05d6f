"""Whole answers out of streams: what passes as it came, and what is not known is not guessed."""

import json
from typing import Any

import pytest

from tests.router.bodies import CHAT, COMPLETION, request
from vllm_kvpool.router.dataplane.request_body import ApiPath
from vllm_kvpool.router.dataplane.resume.whole_answer import (
    NotAssembled,
    WholeAnswer,
    is_streamable,
    streamed,
)

TOOLS = {"tools": [{"type": "function"}]}
USAGE = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}


@pytest.mark.parametrize(
    ("fields", "is_streamed"),
    [
        (COMPLETION, True),
        (CHAT, True),
        (CHAT | {"n": 3, "logprobs": True, "return_token_ids": True, "echo": False}, True),
        (CHAT | {"tools": [], "kv_transfer_params": None}, True),
        (CHAT | TOOLS, False),
        (CHAT | TOOLS | {"tool_choice": "none"}, True),
        (CHAT | TOOLS | {"tool_choice": "auto"}, False),
        (COMPLETION | {"prompt_logprobs": 0}, False),
        (COMPLETION | {"echo": True}, False),
        (COMPLETION | {"use_beam_search": True}, False),
        (COMPLETION | {"stream_options": {}}, False),
        (COMPLETION | {"prompt": ["a", "b"]}, False),
        (COMPLETION | {"prompt": None, "prompt_embeds": "AA=="}, False),
        (COMPLETION | {"routed_experts_prompt_start": 0}, False),
        (COMPLETION | {"kv_transfer_params": {}}, False),
        (COMPLETION | {"ec_transfer_params": {"a": 1}}, False),
    ],
)
def test_what_is_streamed(fields: dict[str, Any], is_streamed: bool) -> None:
    assert is_streamable(request(fields)) is is_streamed


def test_a_stream_is_asked_for_with_all_that_an_answer_says() -> None:
    asked = streamed(request(COMPLETION | {"stream": False, "seed": 5}))
    more = {"stream": True, "stream_options": {"include_usage": True}, "stream_interval": 16}
    assert asked.stream
    assert json.loads(asked.whole_body()) == COMPLETION | {"seed": 5} | more
    own = streamed(request(COMPLETION | {"stream_interval": 2}))
    assert json.loads(own.whole_body())["stream_interval"] == 2


def chunk(**fields: Any) -> bytes:
    return json.dumps({"id": "1", "created": 5, "model": "m", "choices": [], **fields}).encode()


@pytest.mark.parametrize(
    "payload",
    [
        chunk(sources=[1]),
        chunk(choices=[{"index": 0, "text": "a", "sources": "b"}]),
        chunk(choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]),
        chunk(choices=[{"index": 0, "delta": {"reasoning_content": "b"}}]),
    ],
)
def test_what_no_rule_covers_is_not_left_out(payload: bytes) -> None:
    with pytest.raises(NotAssembled):
        WholeAnswer(ApiPath.CHAT).add(payload)


def test_fields_without_a_value_are_no_matter() -> None:
    whole = WholeAnswer(ApiPath.CHAT)
    whole.add(chunk(later=None, choices=[{"index": 0, "delta": {"tool_calls": []}, "more": None}]))
    assert not whole.is_complete
    whole.add(chunk(usage=USAGE | {"prompt_tokens_details": {"cached_tokens": 2}}))
    assert whole.is_complete
    status, body = whole.answer()
    details = {"cached_tokens": 2, "created_cache_tokens": None, "multimodal_tokens": None}
    assert status == 200
    assert json.loads(body)["usage"] == USAGE | {
        "prompt_tokens_details": details,
        "completion_tokens_details": None,
    }


@pytest.mark.parametrize(
    ("details", "content"),
    [(None, ""), ({"reasoning_tokens": 2}, None)],
    ids=["tools", "reasoning"],
)
def test_chat_without_a_text_from_an_engine_with_a_parser_has_vllms_content(
    details: dict[str, int] | None, content: str | None
) -> None:
    """An engine with a tool parser streams no empty text; a client that joins texts met null."""
    whole = WholeAnswer(ApiPath.CHAT)
    whole.add(chunk(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]))
    whole.add(chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]))
    whole.add(chunk(usage=USAGE | {"completion_tokens_details": details}))
    assert json.loads(whole.answer()[1])["choices"][0]["message"]["content"] == content


def test_an_error_in_the_stream_is_the_answer() -> None:
    whole = WholeAnswer(ApiPath.COMPLETION)
    payload = json.dumps({"error": {"message": "no", "code": 422}}).encode()
    whole.add(chunk(choices=[{"index": 0, "text": "a"}]))
    whole.add(payload)
    whole.add(b"[DONE]")
    assert whole.is_complete
    assert whole.answer() == (422, payload)


def test_choices_take_turns() -> None:
    whole = WholeAnswer(ApiPath.COMPLETION)
    for index, text, reason in ((1, "b", None), (0, "a", "stop"), (1, "c", "length")):
        whole.add(chunk(choices=[{"index": index, "text": text, "finish_reason": reason}]))
    whole.add(chunk(usage=USAGE))
    choices = json.loads(whole.answer()[1])["choices"]
    seen = [(each["index"], each["text"], each["finish_reason"]) for each in choices]
    assert seen == [(0, "a", "stop"), (1, "bc", "length")]
