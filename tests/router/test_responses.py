"""What is read of engines' answers."""

from collections.abc import Callable

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
    ("status", "outcome"),
    [
        (200, Outcome.OK),
        (201, Outcome.FAILED),
        (204, Outcome.FAILED),
        (307, Outcome.FAILED),
        (399, Outcome.FAILED),
        (400, Outcome.REJECTED),
        (401, Outcome.REJECTED),
        (404, Outcome.REJECTED),
        (422, Outcome.REJECTED),
        (429, Outcome.BUSY),
        (500, Outcome.FAILED),
        (502, Outcome.FAILED),
        (503, Outcome.BUSY),
        (504, Outcome.FAILED),
    ],
)
def test_what_a_status_means(status: int, outcome: Outcome) -> None:
    assert outcome_of(status) is outcome


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"choices":[]}', TokenCounts()),
        (b'{"choices":[],"usage":null,"kv_transfer_params":null}', TokenCounts()),
        (b'{"choices":[],"usage":{"prompt_tokens":7}}', TokenCounts(prompt_tokens=7)),
        (
            b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":null,'
            b'"prompt_tokens_details":null}}',
            TokenCounts(prompt_tokens=7),
        ),
        (
            b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":7,"completion_tokens":2,'
            b'"prompt_tokens_details":{"cached_tokens":4}},'
            b'"kv_transfer_params":{"kvpool":{"tokens":6}}}',
            TokenCounts(prompt_tokens=7, output_tokens=2, details=PromptDetails(4), saved_tokens=6),
        ),
        (b'{"choices":[],"kv_transfer_params":{"other":1}}', TokenCounts()),
        (b'{"choices":[],"kv_transfer_params":{"kvpool":null}}', TokenCounts()),
    ],
)
def test_counts_of_an_answer(body: bytes, said: TokenCounts) -> None:
    assert read_reply(body) == said


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        (b'{"usage":{"input_tokens":302,"output_tokens":4}}', TokenCounts(302, 4)),
        (
            b'{"usage":{"input_tokens":14,"output_tokens":4,"cache_read_input_tokens":256,'
            b'"cache_creation_input_tokens":32}}',
            TokenCounts(302, 4, PromptDetails(256)),
        ),
        (
            b'{"usage":{"input_tokens":302,"output_tokens":4,'
            b'"input_tokens_details":{"cached_tokens":288,"cache_write_tokens":0}}}',
            TokenCounts(302, 4, PromptDetails(288)),
        ),
        (
            b'{"type":"response.completed","response":{"usage":{"input_tokens":302,'
            b'"output_tokens":4,"input_tokens_details":{"cached_tokens":288}}}}',
            TokenCounts(302, 4, PromptDetails(288)),
        ),
        (
            b'{"type":"message_start","message":{"usage":{"input_tokens":302,"output_tokens":0}}}',
            TokenCounts(302, 0),
        ),
        (b'{"type":"response.created","response":{"usage":null}}', TokenCounts()),
        (b'{"usage":{"input_tokens":-1}}', TokenCounts()),
        (b"no JSON", TokenCounts()),
    ],
)
def test_counts_of_responses_and_messages(body: bytes, counts: TokenCounts) -> None:
    """`input_tokens` of a message are those that were neither found nor created."""
    assert read_usage(body) == counts


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
