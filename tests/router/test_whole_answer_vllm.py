"""Whole answers out of streams are those of vLLM: its front half writes both, without an engine."""

import json
import warnings
from typing import Any

import pytest

from vllm_kvpool.router.dataplane.request_body import READ, ApiPath, parse_request
from vllm_kvpool.router.dataplane.resume.stream_resumer import StreamResumer
from vllm_kvpool.router.dataplane.resume.whole_answer import WholeAnswer, is_streamable, streamed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tests.router.test_stream_resumer_vllm import FIELDS, LOGPROBS, STEPS, TEXTS, THOUGHTS, Case

ASKED = [
    (kind, {**fields, "stream": False})
    for kind in READ
    for fields in (*FIELDS, *LOGPROBS[kind])
    if not ({"stream_options", "echo"} & fields.keys())
]


def assembled(case: Case) -> dict[str, Any]:
    """Return the answer that the router assembles from the engine's stream."""
    request = parse_request(case.kind, case.body())
    assert is_streamable(request)
    asked = streamed(request)
    resumer, whole = StreamResumer(asked), WholeAnswer(case.kind)
    body = asked.whole_body(track=asked.trackable)
    for payload in case.engine().stream(case.kind.value, body):
        for told in resumer.feed(payload):
            whole.add(told)
    assert resumer.ended
    assert whole.is_complete
    status, answer = whole.answer()
    assert status == 200
    return dict(json.loads(answer))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(("kind", "fields"), ASKED)
def test_an_assembled_answer_is_vllms_own(
    kind: ApiPath, fields: dict[str, Any], steps: tuple[int, ...]
) -> None:
    for text in TEXTS:
        case = Case(kind, text, steps, fields)
        expected = case.engine().whole(kind.value, case.body())
        seen = assembled(case)
        assert seen == expected
        assert list(seen) == list(expected), "also in the order of vLLM's fields"
        assert list(seen["choices"][0]) == list(expected["choices"][0])


@pytest.mark.parametrize("parser", ["deepseek_r1", "deepseek_v3", "qwen3"])
def test_reasoning_is_told_from_content(parser: str) -> None:
    for text in THOUGHTS:
        for fields in ({}, {"return_token_ids": True}, {"include_reasoning": False}):
            case = Case(ApiPath.CHAT, text, STEPS[0], {**fields, "stream": False}, parser)
            expected = case.engine().whole(case.kind.value, case.body())
            seen = assembled(case)
            if parser == "qwen3":
                # vLLM itself counts them otherwise in a stream whose reasoning has no end.
                for usage in (seen["usage"], expected["usage"]):
                    del usage["completion_tokens_details"]
            assert seen == expected, (text, fields)
