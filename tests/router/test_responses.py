"""The router's reading of engines' answers."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vllm_kvpool.router.control.events import Outcome
from vllm_kvpool.router.dataplane.responses import (
    EngineLost,
    PromptDetails,
    TokenCounts,
    outcome_of,
    read_detokenized,
    read_reply,
    read_usage,
    without_reserved,
)


@pytest.mark.parametrize(
    ("outcome", "statuses"),
    [
        (Outcome.OK, (200,)),
        (Outcome.FAILED, (201, 204, 307, 399, 500, 502, 504)),
        (Outcome.REJECTED, (400, 401, 404, 422)),
        (Outcome.BUSY, (429, 503)),
    ],
)
def test_what_a_status_means(outcome: Outcome, statuses: Sequence[int]) -> None:
    assert {outcome_of(each) for each in statuses} == {outcome}


USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, TokenCounts()),
        ({"usage": None, "kv_transfer_params": None}, TokenCounts()),
        ({"usage": {"prompt_tokens": 7}}, TokenCounts(7)),
        ({"usage": dict.fromkeys(USAGE) | {"prompt_tokens": 7}}, TokenCounts(7)),
        (
            {"usage": USAGE, "kv_transfer_params": {"kvpool": {"tokens": 6}}},
            TokenCounts(7, 2, PromptDetails(4), saved_tokens=6),
        ),
        ({"kv_transfer_params": {"other": 1}}, TokenCounts()),
        ({"kv_transfer_params": {"kvpool": None}}, TokenCounts()),
    ],
)
def test_counts_of_an_answer(body: dict[str, Any], said: TokenCounts) -> None:
    for choices in ([], [{"text": "x"}]):
        assert read_reply(json.dumps({"choices": choices, **body}).encode()) == said


READ = {"cache_read_input_tokens": 256, "cache_creation_input_tokens": 32}
CACHED = {"input_tokens_details": {"cached_tokens": 288, "cache_write_tokens": 0}}
IN, OUT = {"input_tokens": 302}, {"output_tokens": 4}


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        ({"usage": IN | OUT}, TokenCounts(302, 4)),
        ({"usage": {"input_tokens": 14} | OUT | READ}, TokenCounts(302, 4, PromptDetails(256))),
        ({"usage": IN | OUT | CACHED}, TokenCounts(302, 4, PromptDetails(288))),
        (
            {"type": "response.completed", "response": {"usage": IN | OUT | CACHED}},
            TokenCounts(302, 4, PromptDetails(288)),
        ),
        (
            {"type": "message_start", "message": {"usage": IN | {"output_tokens": 0}}},
            TokenCounts(302),
        ),
        ({"type": "response.created", "response": {"usage": None}}, TokenCounts()),
        ({"usage": {"input_tokens": -1}}, TokenCounts()),
    ],
)
def test_counts_of_responses_and_messages(body: dict[str, Any], counts: TokenCounts) -> None:
    """`input_tokens` of a message are those that were neither found nor created."""
    assert read_usage(json.dumps(body).encode()) == counts


def test_what_is_no_json_has_no_counts() -> None:
    assert read_usage(b"no JSON") == TokenCounts()


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"<html>", b"[]", b"null", b"{}", b'{"choices":1}', b'{"choices":[]', b"\xff"),
        *(b'{"choices":[],"usage":1}', b"[" * 100_000, b'{"choices":' + b"[" * 100_000),
        b'{"choices":[],"kv_transfer_params":{"kvpool":{"tokens":"many"}}}',
    ],
)
def test_rubbish_is_no_answer(body: bytes) -> None:
    with pytest.raises(EngineLost, match="JSON"):
        read_reply(body)


RECOMPUTED = b'{"choices":[{"text":"x","finish_reason":"stop","stop_reason":"recomputed"}]}'


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (read_reply, b'{"choices":[{"finish_reason":"length"},{"finish_reason":"abort"}]}'),
        (read_reply, RECOMPUTED),
        (read_usage, b'{"type":"message","usage":{"input_tokens":3,"output_tokens":1}}'),
        (read_usage, b'{"type":"message_delta","delta":{"stop_reason":null},"usage":{}}'),
        (read_usage, b'{"status":"cancelled"}'),
        (read_usage, b'{"type":"response.completed","response":{"status":"cancelled"}}'),
    ],
)
def test_an_answer_that_was_given_up_is_none(
    read: Callable[[bytes], TokenCounts], body: bytes
) -> None:
    with pytest.raises(EngineLost, match=r"aborted|given the request back"):
        read(body)


def test_a_stop_string_that_reads_like_a_request_given_back_ends_the_answer() -> None:
    assert read_reply(RECOMPUTED, ["recomputed"]) == TokenCounts()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"a": 1.50,"kv_transfer_params":{"x":["y"]}}', b'{"a":1.50,"kv_transfer_params":null}'),
        (b'{"ec_transfer_params": 5,"a":[{}]}', b'{"ec_transfer_params":null,"a":[{}]}'),
        (b'{"a": 1, "kv_transfer_params":null}', b'{"a": 1, "kv_transfer_params":null}'),
        (b'{"a":{"kv_transfer_params":1}}', b'{"a":{"kv_transfer_params":1}}'),
        (b'{ "a":"kv_transfer_params" }', b'{ "a":"kv_transfer_params" }'),
        (b'"kv_transfer_params": oops', b'"kv_transfer_params": oops'),
    ],
)
def test_what_engines_tell_each_other_is_no_clients(body: bytes, told: bytes) -> None:
    assert without_reserved(body) == told


def test_the_text_of_tokens() -> None:
    assert read_detokenized(b'{"prompt":"hello"}') == "hello"
    for body in (b"{}", b'{"prompt":null}', b"oops"):
        with pytest.raises(EngineLost):
            read_detokenized(body)
