"""Bodies of clients: what is read of them, and what engines are sent."""

import json
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.bodies import CHAT, COMPLETION, request
from vllm_kvpool.router.control.prefix_index import SEGMENT_ENDS, SPAN_BYTES, spans_of
from vllm_kvpool.router.dataplane.request_body import (
    MAX_ANSWER_BYTES,
    MAX_FIELDS,
    MEDIA_TOKENS,
    READ,
    RESERVED_FIELDS,
    ApiPath,
    BadRequest,
    ClientRequest,
    most_forwarded_bytes,
    parse_forwarded,
    parse_request,
)
from vllm_kvpool.router.dataplane.resume.policy import (
    is_greedy,
    resume_body,
    why_not_continued,
    why_not_resumed,
)
from vllm_kvpool.router.dataplane.resume.stream_resumer import StreamResumer
from vllm_kvpool.router.dataplane.resume.whole_answer import is_streamable, streamed

NESTED = b"[" * 100_000 + b"]" * 100_000
NO_JSON = (b"", b"{", b"null", b'"model"', b'{"model":"m"', b'{"model":"\xff"}', b'{"a":"\\q"}')
WRONG: list[tuple[str, bytes, str]] = [
    ("model", b"7", "/v1/models"),
    ("model", b'"%b"' % (b"m" * 4097), "/v1/models"),
    ("model", b"[" * 100_000, "nested"),
    ("model", NESTED, "nested"),
    ("stop", NESTED, "nested"),
    ("prompt", NESTED, "nested"),
    ("stream_options", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested"),
    ("stream", b'"sure"', "true or false"),
    ("stream", b"2", "true or false"),
    ("stream", b"[]", "true or false"),
    ("n", b'"two"', "whole number"),
    ("n", b"[2]", "whole number"),
    ("n", b"1e999", "JSON"),
    ("n", b"9" * 5000, "JSON"),
    ("max_tokens", b"1.5", "whole number"),
    ("max_tokens", b"[]", "whole number"),
    ("temperature", b"NaN", "JSON"),
    ("kv_transfer_params", b"[]", "object"),
    ("kv_transfer_params", b'"y"', "object"),
]
"""A field's name, its JSON, and what the error says."""
NO_PROMPT = (b"", b',"prompt":null', b',"prompt":{}', b',"prompt":5')
BAD: list[tuple[ApiPath, bytes, str | None, str]] = [
    *((kind, raw, None, "JSON") for kind in READ for raw in NO_JSON),
    (ApiPath.CHAT, b"[]", None, "JSON object"),
    *(
        (kind, b'{"prompt":"x","messages":[],"%b":%b}' % (name.encode(), raw), name, says)
        for kind in READ
        for name, raw, says in WRONG
    ),
    *((ApiPath.COMPLETION, b'{"model":"m"%b}' % raw, "prompt", "token ids") for raw in NO_PROMPT),
    (ApiPath.CHAT, b'{"model":"m"}', "messages", "list"),
    (ApiPath.CHAT, b'{"model":"m","messages":"hi"}', "messages", "list"),
]
"""Bodies that no engine could be asked with, the field that is named, and what the error says."""


@pytest.mark.parametrize(("kind", "raw", "param", "says"), BAD, ids=lambda each: str(each)[:60])
def test_what_no_engine_could_be_asked(
    kind: ApiPath, raw: bytes, param: str | None, says: str
) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        parse_request(kind, raw, is_trusted=True)
    if says in ("JSON", "nested"):
        param = None  # the body cannot be read
    error = json.loads(caught.value.body(kind.value))["error"]
    kept = {"message": str(caught.value), "type": "BadRequestError"}
    assert error == kept | {"param": param, "code": 400}


def test_what_vllm_takes_without_its_type_is_taken() -> None:
    for yes in (True, 1, 1.0, "true", "Yes", "on", "1"):
        assert request(COMPLETION, stream=yes).stream
    for no in (None, False, 0, "false", "No", "off", "0"):
        assert not request(COMPLETION, stream=no).stream
    for two in (2, 2.0, "2"):
        asked = request(COMPLETION, n=two, max_tokens=two, priority=two)
        assert (asked.n, asked.max_output_tokens, asked.priority) == (2, 2, 2)
    assert request(CHAT, max_tokens=True).max_output_tokens == 1
    for nothing in (None, ""):
        assert request(COMPLETION, model=nothing).model == ""
    assert request({"prompt": "Say"}).model == ""


@given(st.sampled_from(ApiPath), st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_bad_one(kind: ApiPath, raw: bytes) -> None:
    for body in (raw, b'{"model":"m","prompt":"p","messages":[],' + raw + b"}"):
        with suppress(BadRequest):
            parse_request(kind, body, is_trusted=True)


@pytest.mark.parametrize(
    ("body", "more", "expected"),
    [
        (COMPLETION, {}, {"max_output_tokens": 16, "n": 1, "stream": False, "priority": 0}),
        (COMPLETION, {"max_tokens": None}, {"max_output_tokens": 16}),
        (COMPLETION, {"max_tokens": 0, "n": 3}, {"max_output_tokens": 0, "n": 3}),
        (CHAT, {}, {"max_output_tokens": None, "num_prompts": 1, "prompt_ids": None}),
        (CHAT, {"max_tokens": 5, "stream": True}, {"max_output_tokens": 5, "stream": True}),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, {"max_output_tokens": 6}),
        (CHAT, {"priority": -2, "n": None}, {"priority": -2, "n": 1}),
        (COMPLETION, {"prompt": ["a", "b"]}, {"num_prompts": 2, "prompt_ids": None}),
        (COMPLETION, {"prompt": [[1, 2], [3]]}, {"num_prompts": 2, "prompt_ids": None}),
        (COMPLETION, {"prompt": None, "prompt_embeds": "xx"}, {"num_prompts": 1}),
        (COMPLETION, {"prompt": None, "prompt_embeds": ["xx", "yy"]}, {"num_sequences": 2}),
        (COMPLETION, {"prompt": "a", "prompt_embeds": "xx"}, {"num_sequences": 2}),
        (COMPLETION, {"prompt": ["a"], "prompt_embeds": ["x", "y"], "n": 2}, {"num_sequences": 6}),
        (COMPLETION, {"prompt": ["a", "b"], "prompt_embeds": ["x"]}, {"num_prompts": 3}),
        (COMPLETION, {"prompt_embeds": None}, {"num_prompts": 1}),
        (COMPLETION, {"prompt": [], "prompt_embeds": "xx"}, {"num_prompts": 1}),
        (COMPLETION, {"prompt": [], "prompt_embeds": ["xx", "yy"]}, {"num_sequences": 2}),
        (COMPLETION, {"prompt": "", "prompt_embeds": "xx"}, {"num_prompts": 2}),
        (COMPLETION, {"prompt": [], "prompt_embeds": []}, {"num_prompts": 1}),
    ],
)
def test_what_is_read(body: dict[str, Any], more: dict[str, Any], expected: dict[str, Any]) -> None:
    read = request(body, **more)
    assert {name: getattr(read, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("body", "more", "expected"),
    [
        (COMPLETION, {}, 5 / 2),
        (COMPLETION, {"prompt": [7, 8, 9]}, 3),
        (COMPLETION, {"prompt": [[7, 8, 9, 10]]}, 4),
        (COMPLETION, {"prompt": []}, 0),
        (COMPLETION, {"prompt": ["a" * 398]}, 200),
        (CHAT, {"messages": ["x" * 196]}, 100),
        (CHAT, {"messages": ["x" * 196], "tools": ["y" * 196]}, 200),
        (CHAT, {"messages": ["data:image/png;base64," + "A" * 9000]}, MEDIA_TOKENS + 9),
    ],
)
def test_how_long_the_prompt_is(
    body: dict[str, Any], more: dict[str, Any], expected: float
) -> None:
    assert abs(request(body, **more).prompt_tokens(0.5) - expected) <= 1


@pytest.mark.parametrize(
    ("body", "more", "expected"),
    [
        (COMPLETION, {"prompt": [7] * 100}, 64),
        (COMPLETION, {"prompt": "a" * 1000}, 64),
        (COMPLETION, {"prompt": [[7] * 100, [8] * 100]}, 128),
        (COMPLETION, {"prompt": [7] * 60}, 60),
        (CHAT, {"messages": ["x" * 1000]}, 64),
    ],
)
def test_prompt_longer_than_the_model_counts_as_what_engines_may_compute(
    body: dict[str, Any], more: dict[str, Any], expected: int
) -> None:
    known = msgspec.structs.replace(request(body, **more), model_length=64)
    assert known.prompt_tokens(0.5) == expected


def test_prompt_of_a_model_without_a_known_length_counts_whole() -> None:
    assert request(COMPLETION, prompt="a" * 3_000_000).prompt_tokens(0.5) > 1_400_000


def test_prefix_tokens_of_a_chat_with_media_and_a_short_model_are_those_of_its_text() -> None:
    """Media were subtracted from a sum that the model's length had cut."""
    images = "data:image/png;base64,AAAA " * 8
    asked = request(CHAT, messages=[{"role": "user", "content": images + "a" * 5000}])
    short = msgspec.structs.replace(asked, model_length=4096)
    assert short.prompt_tokens(0.25) == 4096 < asked.prompt_tokens(0.25)
    assert short.prefix_tokens(0.25) == asked.prefix_tokens(0.25) == SPAN_BYTES // 4


def conversation(*texts: str, **more: Any) -> ClientRequest:
    return request(CHAT, messages=[{"role": "user", "content": each} for each in texts], **more)


def test_a_conversation_that_goes_on_has_the_prefix_of_the_one_before() -> None:
    short, longer = conversation("a" * 5000), conversation("a" * 5000, "b" * 3000)
    assert len(short.prefix) == 4
    assert longer.prefix[:4] == short.prefix
    assert len(longer.prefix) == 7
    assert len(set(longer.prefix)) == 7


def test_prompts_that_differ_late_are_told_apart_late() -> None:
    one, other = (conversation("a" * 600_000, end * 100_000).prefix for end in "bc")
    shared = sum(1 for pair in zip(one, other, strict=True) if pair[0] == pair[1])
    assert 500_000 < spans_of(shared) * SPAN_BYTES <= 600_100
    assert len(set(one) - set(other)) == len(one) - shared > 0


def test_an_inline_image_does_not_use_the_prefix_up() -> None:
    def chat(image: str, text: str) -> ClientRequest:
        url = {"url": f"data:image/png;base64,{image}"}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]
        return request(CHAT, messages=[{"role": "user", "content": content}])

    one, again, other = (chat(each * 500_000, "x" * 5000) for each in "aab")
    assert one.prefix == again.prefix
    assert len(one.prefix) == 5  # of the text alone
    assert not set(one.prefix) & set(other.prefix)


@pytest.mark.parametrize(
    "more",
    [{"model": "other"}, {"cache_salt": "x"}, {"tools": [1]}, {"chat_template_kwargs": {"a": 1}}],
)
def test_what_shapes_the_beginning_of_a_prompt_is_in_all_its_hashes(more: dict[str, Any]) -> None:
    one, other = conversation("a" * 5000), conversation("a" * 5000, **more)
    assert not set(one.prefix) & set(other.prefix)
    assert conversation("a" * 5000, temperature=1).prefix == one.prefix


def test_the_hashes_of_a_prompt_are_bounded_and_say_how_many_tokens_they_are_of() -> None:
    known = conversation("a" * 8_000_000).prefix
    assert len(known) < len(SEGMENT_ENDS) < 200
    assert spans_of(len(known)) * SPAN_BYTES > 7_000_000
    assert conversation("a" * 100).prefix == ()
    assert conversation("a" * 5000).prefix_tokens(0.25) == SPAN_BYTES // 4
    ids = request(COMPLETION, prompt=[123] * 4096)
    assert ids.prefix_tokens(0.25) == pytest.approx(SPAN_BYTES / len("123, "), abs=1)
    assert len(ids.prefix) == 4096 * 5 // SPAN_BYTES


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"kv_transfer_params": {"kvpool": {"save": True}}}, True),
        ({"kv_transfer_params": {"kvpool": {"save": False}}}, False),
        ({"kv_transfer_params": {"kvpool": {"load": False}}}, False),
        ({"kv_transfer_params": {"kvpool": "nonsense"}}, True),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, False),
        ({"kv_transfer_params": None}, True),
        ({"prompt_logprobs": 0}, False),
        ({"echo": True}, False),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": ["a"], "n": 2}, True),
        ({"use_beam_search": True}, False),
        ({"truncate_prompt_tokens": -1}, False),
        ({"truncate_prompt_tokens": 5}, True),
        ({"prompt": None, "prompt_embeds": "xx"}, False),
    ],
)
def test_whom_a_prefill_elsewhere_can_serve(more: dict[str, Any], expected: bool) -> None:
    assert request(COMPLETION, **more).wants_handoff is expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"n": 2}, False),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": ["a"]}, True),
        ({"echo": True}, False),
        ({"prompt_embeds": "x"}, False),
    ],
)
def test_whose_tokens_can_be_tracked(more: dict[str, Any], expected: bool) -> None:
    assert request(COMPLETION, **{"stream": True, **more}).trackable is expected
    if "prompt" not in more and "prompt_embeds" not in more:
        chat = request(CHAT, **{"stream": True, **more})
        assert chat.trackable is (expected or "echo" in more)


SAMPLING = {
    **{"n": 3, "best_of": 4, "stream": True, "stream_options": {"include_usage": True}},
    **{"logprobs": 2, "prompt_logprobs": 1, "echo": True, "min_tokens": 9, "stop": ["x"]},
    **{"stop_token_ids": [1], "seed": 1, "top_p": 0.5, "bad_words": ["y"], "max_tokens": 99},
    **{"presence_penalty": 1, "structured_outputs": {"regex": "a"}, "temperature": 1.5},
    **{"use_beam_search": True, "return_token_ids": True, "ignore_eos": True},
}
PREFILL = {"max_tokens": 1, "temperature": 0, "stream": False}


def test_a_prefill_of_a_completion_keeps_what_shapes_its_prompt() -> None:
    shapes = {
        **{"suffix": "!", "add_special_tokens": False, "truncate_prompt_tokens": 3},
        **{"cache_salt": "s", "priority": 2, "request_id": "7", "user": "u", "unknown": [1]},
        **{"kv_transfer_params": {"kvpool": {"save": True, "tokens": 5}}},
    }
    more = {**SAMPLING, **shapes, "response_format": {"type": "json_object"}}
    assert json.loads(request(COMPLETION, **more).prefill_body()) == COMPLETION | shapes | PREFILL


def test_a_prefill_of_a_chat_keeps_what_shapes_its_prompt() -> None:
    shapes = {
        **{"tools": [{"type": "function"}], "tool_choice": "required", "documents": [{}]},
        **{"chat_template": "x", "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"},
        **{"add_generation_prompt": False, "continue_final_message": True},
        **{"response_format": {"type": "json_object"}, "mm_processor_kwargs": {"b": 2}},
    }
    sampling = {**SAMPLING, "top_logprobs": 3, "parallel_tool_calls": False}
    body = request(CHAT, **sampling, **shapes, max_completion_tokens=50).prefill_body()
    assert json.loads(body) == CHAT | shapes | PREFILL | {"max_completion_tokens": 1}


def test_a_body_that_needs_no_change_is_sent_as_it_came() -> None:
    raw = b'{ "messages" : [ ],\n"model":"m", "x":1.50, "x":2, "stream":true }'
    assert parse_request(ApiPath.CHAT, raw).whole_body() is raw
    asks = b'{"messages":[],"model":"m","stream":true,"return_token_ids":true}'
    assert parse_request(ApiPath.CHAT, asks).whole_body(track=True) is asks


@pytest.mark.parametrize("base", [COMPLETION, CHAT])
def test_what_only_the_router_may_say_is_taken_out(base: dict[str, Any]) -> None:
    kind = ApiPath.CHAT if base is CHAT else ApiPath.COMPLETION
    own = {"top_p": 0.5, "vllm_xargs": {"a": 1}}
    reserved: dict[str, Any] = {
        **{"priority": -5, "kv_transfer_params": {"kvpool": {"save": False}}},
        **{"ec_transfer_params": {"peer": "tcp://elsewhere:1"}},
        "vllm_xargs": {"a": 1, "kv_transfer_params": "x", "ec_transfer_params": "y"},
    }
    raw = json.dumps(base | own | reserved).encode()
    read = parse_request(kind, raw)
    assert json.loads(read.raw) == json.loads(read.whole_body()) == base | own
    assert read.priority == 0
    assert read.wants_handoff
    assert parse_request(kind, raw, is_trusted=True).whole_body() is raw
    escaped = raw.replace(b'"priority"', b'"pr\\u0069ority"')
    assert json.loads(parse_request(kind, escaped).raw) == base | own


def test_a_byte_order_mark_is_read_over_as_vllm_does() -> None:
    raw = b'\xef\xbb\xbf{"messages":[],"model":"m","stream":true}'
    read = parse_request(ApiPath.CHAT, raw)
    assert read.model == "m"
    assert read.whole_body() is raw
    assert read.whole_body(track=True) == raw[3:-1] + b',"return_token_ids":true}'


def test_values_are_not_written_anew() -> None:
    raw = b'{"messages":[ {"content":"\\u00e9 \xc3\xa9","n":1.50} ],"model":"m","stream":true}'
    body = parse_request(ApiPath.CHAT, raw).whole_body(track=True)
    assert body == raw[:-1] + b',"return_token_ids":true}'


AWAITS = {"expect_tokens": 512, "expect_end": True, "expect_timeout_ms": 900}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, {"kvpool": AWAITS}),
        ({}, {"kvpool": AWAITS}),
        ({"kvpool": {"save": True}, "other": 1}, {"kvpool": {**AWAITS, "save": True}, "other": 1}),
        ({"kvpool": {"expect_tokens": 7}}, {"kvpool": {**AWAITS, "expect_tokens": 7}}),
    ],
)
def test_what_is_awaited_is_added_to_the_clients_own_parameters(params: Any, expected: Any) -> None:
    asked = request(CHAT, kv_transfer_params=params)
    body = json.loads(asked.whole_body(512, 900, notices=()))
    assert body == CHAT | {"kv_transfer_params": expected}


@pytest.mark.parametrize(
    ("notices", "more"),
    [
        # It would save nothing of a request with options that it does not know.
        (None, {}),
        ((), {"expect_end": True}),
        (("tcp://a:1",), {"expect_end": True, "notices": ["tcp://a:1"]}),
    ],
)
def test_engine_is_told_of_notices_if_it_knows_them(notices: Any, more: dict[str, Any]) -> None:
    """Without a timeout from the router, the engine uses its own."""
    body = json.loads(request(CHAT).whole_body(512, notices=notices))
    assert body["kv_transfer_params"] == {"kvpool": {"expect_tokens": 512, **more}}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, {"kvpool": {"tenant": "a"}}),
        ({"other": 1}, {"kvpool": {"tenant": "a"}, "other": 1}),
        ({"kvpool": {"save": False}}, {"kvpool": {"tenant": "a", "save": False}}),
        ({"kvpool": {"tenant": "own"}}, {"kvpool": {"tenant": "own"}}),
        # For the engine to refuse.
        ({"kvpool": "nonsense"}, {"kvpool": "nonsense"}),
    ],
)
@pytest.mark.parametrize("kind", ApiPath)
def test_every_body_has_the_tenant_beside_a_trusted_clients_own_parameters(
    kind: ApiPath, params: Any, expected: Any
) -> None:
    body = {"model": "m", "prompt": "Say", "input": "Say", "messages": CHAT["messages"]}
    raw = json.dumps({**body, "kv_transfer_params": params}).encode()
    asked = parse_request(kind, raw, is_trusted=True, tenant="a")
    for sent in (asked.whole_body(), asked.whole_body(track=True), asked.prefill_body()):
        assert json.loads(sent)["kv_transfer_params"] == expected
    awaits = json.loads(asked.whole_body(512))["kv_transfer_params"]["kvpool"]
    assert awaits == "nonsense" or awaits["expect_tokens"] == 512
    if kind in READ:
        resumed = json.loads(resume_body(asked, b"[7,8]", 1, 1, 9))["kv_transfer_params"]
        assert resumed["kvpool"] == expected["kvpool"]


def test_what_is_no_object_is_left_for_the_engine_to_refuse() -> None:
    raw = b'{"model":"m","messages":[],"kv_transfer_params":"y"}'
    asked = parse_request(ApiPath.MESSAGES, raw, is_trusted=True, tenant="a")
    assert json.loads(asked.whole_body())["kv_transfer_params"] == "y"


def test_a_tenant_of_the_routers_leaves_an_answer_in_one_piece_to_be_assembled() -> None:
    raw = json.dumps(CHAT).encode()
    assert is_streamable(parse_request(ApiPath.CHAT, raw, tenant="a"))


SIZE = 2 << 20
MAX_GROWTH = 8
"""Limit of memory for a body, as a multiple of its size."""
MAX_SLOWDOWN = 12
"""Limit of CPU time for a body, as a multiple of the time for one text of the same size."""


def repeated(begin: bytes, item: bytes, end: bytes) -> bytes:
    return begin + b",".join([item] * (SIZE // (len(item) + 1))) + end


def many_fields() -> bytes:
    return b",".join(b'"%x":1' % number for number in range(SIZE // 10))


LARGE: dict[str, bytes] = {
    "text": b'{"model":"m","prompt":"%b"}' % (b"x" * SIZE),
    "fields": b'{"model":"m","prompt":"p",%b}' % many_fields(),
    "xargs": b'{"model":"m","prompt":"p","vllm_xargs":{%b}}' % many_fields(),
    "params": b'{"model":"m","prompt":"p","kv_transfer_params":{%b}}' % many_fields(),
    **{
        name: repeated(b'{"model":"m","prompt":"p","%b":[' % name.encode(), b"{}", b"]}")
        for name in (
            *("model", "stream", "n", "echo", "max_tokens", "priority", "return_token_ids"),
            *("stop", "stream_options", "logprobs", "temperature", "tools", "tool_choice"),
            *("best_of", "prompt_logprobs", "truncate_prompt_tokens", "response_format"),
            *("use_beam_search", "bad_words", "seed", "min_tokens", "vllm_xargs"),
        )
    },
    "stop strings": repeated(b'{"model":"m","prompt":"p","stop":[', b'"ab"', b"]}"),
    "token ids": repeated(b'{"model":"m","prompt":[', b"1", b"]}"),
    "prompts of ids": repeated(b'{"model":"m","prompt":[', b"[]", b"]}"),
    "prompts": repeated(b'{"model":"m","prompt":[', b'""', b"]}"),
    "a text and ids": repeated(b'{"model":"m","prompt":["a",', b"1", b"]}"),
    "escapes": b'{"model":"m","prompt":["%b"]}' % (b'\\"' * (SIZE // 2)),
    "messages": repeated(b'{"model":"m","messages":[', b"{}", b"]}"),
    "media": repeated(b'{"model":"m","messages":[', b'";base64,A"', b"]}"),
    "inputs": repeated(b'{"model":"m","inputs":[', b"{}", b"]}"),
    "tool": repeated(b'{"model":"m","messages":[],"tools":[', b"{}", b"]}"),
}
"""Large bodies, each of the most values that one field can have."""


def handle(raw: bytes, *, is_trusted: bool) -> None:
    """Take all steps of the router on a request's body, also those after the loss of an engine."""
    kind = ApiPath.CHAT if b'"messages"' in raw[:40] else ApiPath.COMPLETION
    with suppress(BadRequest):
        read = parse_request(kind, raw, is_trusted=is_trusted, tenant="a")
        is_streamable(read)
        StreamResumer(streamed(read))
        read.whole_body(512)
        read.prefill_body()
        why_not_continued(read)
        why_not_resumed(read)
        is_greedy(read)
    with suppress(BadRequest):
        parse_forwarded(raw, is_trusted=is_trusted)


def cpu_s(raw: bytes, *, is_trusted: bool) -> float:
    times = []
    for _ in range(3):
        begin = time.process_time()
        handle(raw, is_trusted=is_trusted)
        times.append(time.process_time() - begin)
    return min(times)


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_body_of_many_values_takes_memory_and_time_of_its_size(name: str, is_trusted: bool) -> None:
    """A request of 32 MiB blocked the event loop for 5.5 s, took 770 MiB and stopped the router."""
    raw = LARGE[name]
    tracemalloc.start()
    try:
        handle(raw, is_trusted=is_trusted)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= MAX_GROWTH * SIZE
    usual_s = cpu_s(LARGE["text"], is_trusted=is_trusted)
    assert cpu_s(raw, is_trusted=is_trusted) <= MAX_SLOWDOWN * usual_s


@pytest.mark.parametrize("path", [each.value for each in ApiPath])
def test_body_of_too_many_fields_is_refused(path: str) -> None:
    with pytest.raises(BadRequest, match=f"more than {MAX_FIELDS} fields"):
        parse_request(ApiPath(path), LARGE["fields"])
    with pytest.raises(BadRequest, match=f"more than {MAX_FIELDS} fields"):
        parse_forwarded(LARGE["fields"])
    most = {f"f{number}": ":" for number in range(MAX_FIELDS - 2)}
    assert parse_request(ApiPath.COMPLETION, json.dumps(COMPLETION | most).encode()).model == "m"


@pytest.mark.parametrize(
    ("prompt", "number"),
    [
        (["a", "b"], 2),
        (['a"', "\\", '\\"', "[", ",", "\\\\"], 6),
        (['"a", "b"'], 1),
        ([[1, 2], [3], []], 3),
        ([[1, 2]], 1),
        ([1, 2, 3], 1),
        ('["a","b"]', 1),
        ([], 1),
    ],
)
def test_prompts_are_counted_without_being_decoded(prompt: Any, number: int) -> None:
    for indent in (None, 2):
        raw = json.dumps(COMPLETION | {"prompt": prompt, "n": 3}, indent=indent).encode()
        read = parse_request(ApiPath.COMPLETION, raw)
        assert (read.num_prompts, read.num_sequences) == (number, 3 * number)


@pytest.mark.parametrize("field", sorted({*RESERVED_FIELDS, "vllm_xargs"}))
def test_reserved_field_is_taken_out_of_forwarded_body(field: str) -> None:
    own = {"model": "m", "input": "x", "vllm_xargs": {"a": 1}}
    value: Any = 5 if field == "priority" else {"do_remote_prefill": True}
    if field == "vllm_xargs":
        value = {"a": 1, "kv_transfer_params": {}}
    raw = json.dumps(own | {field: value}).encode()
    body, model, _ = parse_forwarded(raw)
    assert (json.loads(body), model) == (own, "m")
    assert parse_forwarded(raw, is_trusted=True) == (raw, "m", 1)
    plain = json.dumps(own).encode()
    assert parse_forwarded(plain)[0] is plain


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ("a text", 1),
        ([1, 2, 3], 1),
        (["a", 'with "quotes"', "b\\"], 3),
        ([[1, 2], [3]], 2),
        ([], 1),
        (None, 1),
        ([{"content": [{"text": "a"}]}, {"content": []}], 2),
    ],
)
def test_forwarded_request_counts_each_text_of_its_longest_list(given: object, number: int) -> None:
    for name in ("input", "inputs", "texts", "documents", "items", "queries", "text_2", "data_1"):
        body = {"model": "m", "query": "q", "text_1": ["t"], name: given}
        assert parse_forwarded(json.dumps(body).encode())[2] == number


def test_forwarded_answer_is_bounded_by_its_request() -> None:
    """An endless answer to a request of one text takes 5 MB, not 256 MiB."""
    assert most_forwarded_bytes(b"x" * 1000, 1) < 5_000_000
    one_embedding = len(json.dumps([-0.0123456789012345] * 8192))
    assert most_forwarded_bytes(b"x" * 20_000, 1000) > 1000 * one_embedding
    assert most_forwarded_bytes(b"x" * (32 << 20), 1 << 20) == MAX_ANSWER_BYTES


def test_salt_of_a_tenant_takes_the_place_of_the_clients_own() -> None:
    def salt(given: str) -> str:
        return f"made of {given!r}"

    for own in ({}, {"cache_salt": None}, {"cache_salt": "x"}):
        raw = json.dumps({"model": "m", "input": "text", "prompt": "text", **own}).encode()
        made = f"made of {own.get('cache_salt') or ''!r}"
        body, _, _ = parse_forwarded(raw, salt=salt)
        assert json.loads(body)["cache_salt"] == made
        request = parse_request(ApiPath.COMPLETION, raw, salt=salt)
        for each in (request.prefill_body(), request.whole_body(), request.whole_body(64, 100)):
            assert json.loads(each)["cache_salt"] == made


def test_prompts_of_tenants_are_apart_in_the_routers_index() -> None:
    raw = json.dumps({"model": "m", "prompt": "text " * 4000}).encode()
    one, other = (
        parse_request(ApiPath.COMPLETION, raw, salt=lambda _, name=name: name).prefix
        for name in "ab"
    )
    assert one
    assert not set(one) & set(other)
