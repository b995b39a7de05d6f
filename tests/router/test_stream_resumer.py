"""A client's stream made of several engines' streams, rule by rule.

`test_stream_resumer_vllm.py` has the tests with vLLM's own streams.
"""

import json
from typing import Any

import pytest

from tests.router.bodies import CHAT, COMPLETION, request
from vllm_kvpool.router.dataplane.responses import UNKNOWN, EngineLost, PromptDetails
from vllm_kvpool.router.dataplane.resume.policy import Detokenize
from vllm_kvpool.router.dataplane.resume.stream_resumer import (
    MAX_HELD_CHUNKS,
    MAX_RESUMES,
    Finish,
    Refusal,
    Resume,
    Step,
    StreamResumer,
)

USAGE = {"stream_options": {"include_usage": True}}
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def words(step: Step) -> str:
    """A step in words: `resume 2` from two tokens, `finish`."""
    if isinstance(step, Resume):
        return f"{step.mode.value} {step.num_tokens}"
    return type(step).__name__.lower()


def sent(step: Step) -> dict[str, Any]:
    assert isinstance(step, Resume | Detokenize)
    return json.loads(step.body)


HEAD = b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m",'
CHAT_HEAD = b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
DONE = b"[DONE]"
FINISHED = Finish((DONE,))


def packed(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def said(
    text: str, ids: list[int] | None = None, end: str | None = None, prompt: Any = None
) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": end}
    choice |= {"stop_reason": None, "prompt_token_ids": prompt, "token_ids": ids}
    return HEAD + b'"choices":[%b]}' % packed(choice)


def first(text: str = "a", ids: list[int] | None = None) -> bytes:
    return said(text, ids or [1], prompt=[7, 8])


def chat(delta: dict[str, Any], ids: list[int] | None = None, end: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end, "token_ids": ids}
    return CHAT_HEAD + b'"choices":[%b]}' % packed(choice)


TAKEN = [7, 8, 1, 2]
"""The prompt and two tokens, as an engine says that it goes on from them."""
ROLE = (
    CHAT_HEAD + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    b'"finish_reason":null}],"prompt_token_ids":[7,8],"prompt_text":null}'
)


def splice_of(body: dict[str, Any], **more: Any) -> StreamResumer:
    return StreamResumer(request({**body, "stream": True, "temperature": 0, **more}))


def went_on(body: dict[str, Any], *payloads: bytes, **more: Any) -> StreamResumer:
    """A stream of these payloads whose engine was lost, and which goes on from its tokens."""
    resumer = splice_of(body, **more)
    feed(resumer, *payloads)
    assert words(resumer.lost()).startswith("resume ")
    return resumer


def feed(resumer: StreamResumer, *payloads: bytes) -> list[bytes]:
    return [told for payload in payloads for told in resumer.feed(payload)]


def lose(resumer: StreamResumer, payload: bytes, match: str | None = None) -> None:
    with pytest.raises(EngineLost, match=match):
        resumer.feed(payload)


def logged(payload: bytes, logprobs: dict[str, Any]) -> bytes:
    return payload.replace(b'"logprobs":null', b'"logprobs":' + packed(logprobs))


def test_a_key_of_logprobs_may_have_any_name() -> None:
    tops = [{"token_ids": -0.5, "prompt_token_ids": -1.0, '"token_ids":[1]': -2.0}]
    logprobs = {"text_offset": [0], "tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": tops}
    payload = logged(said("a", [1]), logprobs)
    told = splice_of(COMPLETION, logprobs=3).feed(payload)
    assert told == [payload.replace(b'"token_ids":[1]}', b'"token_ids":null}')]


def test_tokens_without_text_wait_for_it() -> None:
    resumer = splice_of(COMPLETION)
    assert feed(resumer, first("", [1]), said("", [2])) == []
    assert resumer.feed(said("é", [3])) == [said(""), said(""), said("é")]
    assert feed(resumer, said("", [4]), said("", [5], "stop")) == [said(""), said("", end="stop")]


def test_what_waits_is_bounded() -> None:
    resumer = splice_of(COMPLETION, max_tokens=2 * MAX_HELD_CHUNKS)
    told = [len(resumer.feed(said("", [each]))) for each in range(MAX_HELD_CHUNKS + 1)]
    assert told == [0] * MAX_HELD_CHUNKS + [MAX_HELD_CHUNKS + 1]


def test_nothing_delivered_is_asked_again() -> None:
    resumer = splice_of(COMPLETION, temperature=1)
    feed(resumer, first("", [1]))
    step = resumer.lost()
    assert words(step) == "repeat 0"
    asked = {"stream": True, "temperature": 1, "return_token_ids": True}
    assert sent(step) == COMPLETION | asked
    assert not resumer.has_begun


def test_the_role_is_told_once() -> None:
    resumer = splice_of(CHAT, temperature=1)
    feed(resumer, ROLE)
    assert resumer.has_begun
    assert words(resumer.lost()) == "repeat 0"

    def of_other(payload: bytes) -> bytes:
        return payload.replace(b"chatcmpl-1", b"chatcmpl-2").replace(b'"created":1', b'"created":2')

    told = feed(resumer, of_other(ROLE), of_other(chat({"content": "a"}, [1])))
    assert told == [chat({"content": "a"})]


def test_a_completion_goes_on_from_its_tokens() -> None:
    fields = {"max_tokens": 9, "min_tokens": 2, "seed": 4, "truncate_prompt_tokens": 3, "n": 1}
    awaits = {"expect_tokens": 5, "expect_end": True, "expect_timeout_ms": 7}
    params = {"kvpool": {**awaits, "load": True}, "other": 1}
    resumer = splice_of(COMPLETION, **fields, kv_transfer_params=params, temperature=1)
    feed(resumer, first(), said("b", [2]), said("", [3]))
    step = resumer.lost()
    assert words(step) == "resume 2"
    expected = COMPLETION | {"stream": True, "temperature": 1, "prompt": TAKEN, "max_tokens": 7}
    expected |= {"min_tokens": 0, "seed": 5, "return_token_ids": True}
    assert sent(step) == expected | {"kv_transfer_params": {"kvpool": {"load": True}, "other": 1}}
    told = feed(resumer, said("c", [3], prompt=TAKEN), said("", [0], "stop"), DONE)
    assert told == [said("c"), said("", end="stop"), DONE]
    assert resumer.ended
    assert resumer.answer.ids.tolist() == [1, 2, 3, 0]


def test_a_chat_goes_on_from_its_tokens_as_a_chat() -> None:
    resumer = splice_of(CHAT, max_completion_tokens=9)
    feed(resumer, ROLE, *(chat({"content": each}, [ord(each)]) for each in "abc"))
    step = resumer.lost()
    assert words(step) == "resume 2", "one token is generated again, to be compared"
    ids = {"prompt_token_ids": [7, 8, ord("a"), ord("b")]}
    expected = {"max_tokens": 7, "return_token_ids": True, "kv_transfer_params": ids}
    assert sent(step) == CHAT | {"stream": True, "temperature": 0} | expected
    again = ROLE.replace(b"[7,8]", b"[7,8,97,98]")
    assert feed(resumer, again, chat({"content": "cd"}, [99, 100])) == [chat({"content": "d"})]


A, B = chat({"content": "a"}, [1]), chat({"content": "b"}, [2])


def test_a_greedy_answer_that_differs_is_begun_again_and_then_given_up() -> None:
    resumer = went_on(CHAT, ROLE, A, B)
    feed(resumer, ROLE.replace(b"[7,8]", b"[7,8,1]"))
    lose(resumer, chat({"content": "x"}, [9]))
    assert words(resumer.lost()) == "replay 0"
    assert feed(resumer, ROLE, A) == []
    lose(resumer, chat({"content": ""}, [0], "stop"))
    assert words(resumer.lost()) == "refusal"


def test_an_engine_that_ignores_the_tokens_is_found_out() -> None:
    resumer = went_on(CHAT, ROLE, A, B)
    lose(resumer, ROLE, "not taken")
    assert words(resumer.lost()) == "replay 0"
    told = feed(resumer, ROLE, chat({"content": "ab"}, [3]), chat({"content": "c"}, [4]))
    assert told == [chat({"content": "c"})]


def test_an_engine_that_does_not_say_what_it_has_taken_is_not_believed() -> None:
    lose(went_on(COMPLETION, first(), said("b", [2])), said("c", [3]), "does not say")


@pytest.mark.parametrize("rejected", [True, False])
def test_an_engine_that_refuses_to_go_on_is_not_asked_again(rejected: bool) -> None:
    resumer = went_on(COMPLETION, first(), said("b", [2]))
    if not rejected:
        lose(resumer, b'{"error":{"message":"no","code":400}}', "does not go on: no")
    assert words(resumer.lost(rejected=rejected)) == "replay 0"


def resumed(resumer: StreamResumer, *texts: str | None) -> Step:
    """The step after tokens were detokenized: each time to the next text, at last always to it."""
    step, left = resumer.lost(), list(texts)
    while isinstance(step, Detokenize):
        step = resumer.detokenized(left.pop(0) if len(left) > 1 else left[0])
    return step


def test_what_is_sampled_in_a_chat_is_detokenized_before_it_goes_on() -> None:
    resumer = splice_of(CHAT, temperature=1)
    feed(resumer, ROLE, chat({"content": "ab"}, [1, 2]), chat({"content": ""}, [3]))
    assert sent(resumer.lost()) == {"model": "m", "tokens": [1, 2, 3]}
    # The last has begun a character.
    assert sent(resumer.detokenized("ab\ufffd")) == {"model": "m", "tokens": [1, 2]}
    step = resumer.detokenized("ab")
    assert sent(step)["kv_transfer_params"] == {"prompt_token_ids": [7, 8, 1, 2]}
    feed(resumer, ROLE.replace(b"[7,8]", b"[7,8,1,2]"))
    assert resumer.feed(chat({"content": "c"}, [4])) == [chat({"content": "c"})]


@pytest.mark.parametrize("text", [None, "xy", "a", "", "xxab", "ab\ufffd"])
def test_what_cannot_be_detokenized_is_refused_unless_a_token_ends_there(text: str | None) -> None:
    for ids, step in (([1, 2], "refusal"), ([1], "resume 1" if text is None else "refusal")):
        resumer = splice_of(CHAT, temperature=1)
        feed(resumer, ROLE, chat({"content": "ab"}, ids))
        assert words(resumed(resumer, text)) == step


def test_only_tokens_of_a_character_are_left_out_of_what_is_detokenized() -> None:
    """A token that is not shown, as an end that is ignored, must not pass for a missing "a"."""
    resumer = splice_of(CHAT, temperature=1)
    feed(resumer, ROLE, chat({"content": "aaa"}, [1, 1, 0, 1]))
    assert sent(resumer.lost())["tokens"] == [1, 1, 0, 1]
    assert words(resumer.detokenized("aa<end>a")) == "refusal"


def test_what_was_withheld_for_a_stop_string_is_told_by_the_router() -> None:
    resumer = splice_of(COMPLETION, temperature=1, stop=["xyz"])
    # Of "hello" two characters are withheld.
    feed(resumer, first("hel", [1, 2]))
    assert words(resumed(resumer, "hello")) == "resume 2"
    assert feed(resumer, said("!", [3], prompt=TAKEN)) == [said("lo!")]


def test_a_stop_string_that_may_have_begun_is_not_passed_over() -> None:
    for text, tokens in (("hellx", None), ("hell\ufffd", [1])):
        resumer = splice_of(COMPLETION, temperature=1, stop=["xyz"])
        feed(resumer, first("hel", [1, 2]))
        resumer.lost()
        step = resumer.detokenized(text)
        assert words(step) == "refusal" if tokens is None else sent(step)["tokens"] == tokens
    resumer = splice_of(COMPLETION, stop=["xyz"], include_stop_str_in_output=True)
    feed(resumer, first("a", [1]), said("x", [2]), said("y", [3]))
    assert words(resumer.lost()) == "resume 1"


def test_tool_calls_pass_and_are_not_continued() -> None:
    resumer = splice_of(CHAT, tools=[{"type": "function", "function": {"name": "f"}}])
    call = {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f"}}]}
    feed(resumer, ROLE)
    assert resumer.feed(chat(call, [1])) == [chat(call)]
    step = resumer.lost()
    assert isinstance(step, Refusal)
    assert "tool calls" in step.why
    failure, done = step.payloads
    error = json.loads(failure)["error"]
    assert (error["type"], error["code"], done) == ("InternalServerError", 500, DONE)


ENDED = said("", end="stop")


def test_several_choices_pass_and_are_not_continued() -> None:
    resumer = splice_of(COMPLETION, n=2, temperature=1)
    one, other = said("a"), said("b").replace(b'"index":0', b'"index":1')
    assert words(resumer.lost()) == "repeat 0"
    assert feed(resumer, one, other, ENDED) == [one, other, ENDED]
    lose(resumer, DONE)
    assert words(resumer.lost()) == "refusal"


def test_several_choices_that_have_all_ended_have_ended() -> None:
    resumer = splice_of(COMPLETION, n=2, temperature=1)
    feed(resumer, ENDED, ENDED)
    assert resumer.lost() == FINISHED


USAGE_CHUNK = HEAD + b'"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}'


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}, {"prompt_embeds": "AA=="}]
)
def test_a_usage_that_is_asked_for_and_not_known_is_an_error(more: dict[str, Any]) -> None:
    ends = [ENDED] * (1 if "echo" in more else 2)
    resumer = splice_of(COMPLETION, **USAGE, **more)
    feed(resumer, *ends)
    assert words(resumer.lost()) == "refusal"
    resumer = splice_of(COMPLETION, **USAGE, **more)
    feed(resumer, *ends, USAGE_CHUNK)
    assert resumer.lost() == FINISHED


RECOMPUTED = said("", [2], "stop").replace(b'"stop_reason":null', b'"stop_reason":"recomputed"')


@pytest.mark.parametrize(
    "payload",
    [
        b'{"error":{"message":"dead","type":"InternalServerError","param":null,"code":500}}',
        b'{"error":{"message":"dead"}}',
        said("b", [], "abort"),
        RECOMPUTED,
        b"[DONE]",
        b'{"choices":[',
        b"[]",
        b'{"choices":[{"index":0,"text":5}]}',
        b'{"choices":[{"index":0,"text":"b","token_ids":[-1]}]}',
        b'{"choices":[{"index":0,"text":"b","token_ids":[4294967296]}]}',
        b'"\xff"',
        b'{"choices":[{"index":0,"text":"b","token_ids":[2],"logprobs":5}]}',
        b'{"choices":[],"usage":"many"}',
        b'{"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":"x"}}}',
        b"[" * 100_000,
    ],
)
def test_what_a_dying_engine_says_is_not_passed_on(payload: bytes) -> None:
    resumer = splice_of(COMPLETION)
    feed(resumer, first())
    lose(resumer, payload)
    assert words(resumer.lost()) == "resume 1"


def test_a_stop_string_that_reads_like_a_request_given_back_ends_the_answer() -> None:
    resumer = splice_of(COMPLETION, stop=["recomputed"])
    assert len(feed(resumer, first(), RECOMPUTED, DONE)) == 3
    assert resumer.ended


@pytest.mark.parametrize("no", [False, "false", "False", "0", 0, 0.0, "off", "no", "n", "f"])
def test_stop_strings_are_withheld_however_the_client_writes_false(no: object) -> None:
    """With the text "false" the resumer took them to be part of the answer, and lost text."""
    resumer = splice_of(COMPLETION, stop=["stop"], include_stop_str_in_output=no)
    assert resumer.answer.withheld_chars == 3


@pytest.mark.parametrize("zero", [0, 0.0, "0", "0.0", " 0", False])
def test_a_temperature_of_zero_is_greedy_however_the_client_writes_it(zero: object) -> None:
    resumer = splice_of(COMPLETION, temperature=zero, presence_penalty=0.5)
    feed(resumer, first())
    assert words(resumer.lost()) == "replay 0"


@pytest.mark.parametrize("no", [False, "false", 0, "0", "off"])
def test_spaces_between_special_tokens_are_seen_however_the_client_writes_it(no: object) -> None:
    resumer = splice_of(COMPLETION, temperature=1, spaces_between_special_tokens=no)
    feed(resumer, first())
    assert words(resumer.lost()) == "refusal"


def scored(*tokens: str, text: str | None = None, end: str | None = None) -> bytes:
    """A chunk without ids; `text`: what of the tokens' text it has, if not all."""
    choice: dict[str, Any] = {"index": 0, "text": "".join(tokens) if text is None else text}
    count = len(tokens)
    choice |= {"logprobs": {"text_offset": [0] * count, "tokens": list(tokens)}}
    choice["logprobs"] |= {"token_logprobs": [-1.0] * count, "top_logprobs": [None] * count}
    choice |= {"finish_reason": end, "stop_reason": None, "token_ids": None}
    return HEAD + b'"choices":[%b]}' % packed(choice)


UNFINISHED = [("p", "a"), ("x", ""), ("y", ""), ("b", "xyb"), ("c", "c")]
"""Tokens with the text that comes with each: two of them have begun a character."""
WHOLE_TOKENS = [token for token, _ in UNFINISHED]


@pytest.mark.parametrize("num_told", range(1, 5))
@pytest.mark.parametrize("step", [1, 2, 3])
def test_tokens_without_ids_have_each_logprob_once(num_told: int, step: int) -> None:
    """Begun again, a chunk of known text was dropped with the entries of tokens without text."""

    def chunks(size: int) -> list[bytes]:
        parts = [UNFINISHED[at : at + size] for at in range(0, len(UNFINISHED), size)]
        return [
            scored(*(token for token, _ in part), text="".join(text for _, text in part))
            for part in parts
        ]

    resumer = splice_of(COMPLETION, echo=True, logprobs=0, temperature=0)
    told = feed(resumer, *chunks(1)[:num_told])
    assert words(resumer.lost()) == "replay 0"
    told += feed(resumer, *chunks(step), scored(end="stop"))
    choices = [json.loads(each)["choices"][0] for each in told]
    assert [token for each in choices for token in each["logprobs"]["tokens"]] == WHOLE_TOKENS
    assert "".join(each["text"] for each in choices) == "axybc"


def test_an_error_of_the_clients_own_is_passed_on() -> None:
    error = b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}'
    assert feed(splice_of(COMPLETION), error, DONE) == [error, DONE]
    for usage in ({}, USAGE):  # which an error has none of
        resumer = splice_of(COMPLETION, **usage)
        feed(resumer, error)
        assert resumer.lost() == FINISHED


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": {"cached_tokens": 1}}])
def test_an_end_that_was_lost_is_made_up(details: dict[str, Any]) -> None:
    resumer = splice_of(COMPLETION, **USAGE)
    resumer.prompt.details = PromptDetails(1) if details else None
    feed(resumer, first(), said("b", [2, 3], "stop"))
    step = resumer.lost()
    assert isinstance(step, Finish)
    usage, done = step.payloads
    counts = {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3, **details}
    assert json.loads(usage) == json.loads(HEAD[:-1] + b"}") | {"choices": [], "usage": counts}
    assert done == DONE
    resumer = splice_of(COMPLETION)
    feed(resumer, first(), said("b", [2, 3], "stop"))
    assert resumer.lost() == FINISHED


@pytest.mark.parametrize(
    ("asks", "more"),
    [(True, {}), (False, {}), (False, {"temperature": 1, "presence_penalty": 0.5})],
)
def test_an_answer_of_all_its_tokens_is_ended_without_an_engine(
    asks: bool, more: dict[str, Any]
) -> None:
    """The router ends answers that no engine could resume, too."""
    resumer = splice_of(COMPLETION, max_tokens=2, return_token_ids=asks, **more)
    feed(resumer, first(), said("b", [2]))
    step = resumer.lost()
    assert isinstance(step, Finish)
    assert json.loads(step.payloads[0]) == json.loads(said("", [] if asks else None, "length"))
    assert resumer.ended


def test_it_is_not_tried_for_ever() -> None:
    resumer = splice_of(COMPLETION)
    feed(resumer, first())
    steps = [words(resumer.lost()) for _ in range(MAX_RESUMES + 1)]
    assert steps == ["resume 1"] * MAX_RESUMES + ["refusal"]


def test_an_engine_may_write_its_json_another_way() -> None:
    """The fields of a chunk in another order, and with spaces."""

    def other(payload: bytes) -> bytes:
        chunk = json.loads(payload)
        return json.dumps({"choices": chunk.pop("choices"), **chunk, "id": "other"}).encode()

    # Or the first engine is the odd one: the others' chunks stay as they are.
    for ours, theirs in ((bytes, other), (other, bytes)):
        resumer = went_on(COMPLETION, ours(first()), ours(said("b", [2])))
        (told,) = resumer.feed(theirs(said("c", [3], prompt=TAKEN)))
        assert json.loads(told) == json.loads(said("c"))


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize(
    ("own", "details", "told"),
    [
        ({"cached_tokens": 9}, None, {"cached_tokens": 9}),
        ({"cached_tokens": 9}, PromptDetails(4, 6), {"cached_tokens": 4}),
        ({"cached_tokens": 3}, PromptDetails(9, 1), {"cached_tokens": 9}),
        ({"cached_tokens": 9}, UNKNOWN, {"cached_tokens": None}),
        (None, PromptDetails(4, 6), None),
        (
            {"cached_tokens": 4, "created_cache_tokens": 0},
            PromptDetails(4, 6),
            {"cached_tokens": 4, "created_cache_tokens": 6},
        ),
        (
            {"cached_tokens": 9, "created_cache_tokens": 0, "multimodal_tokens": {"image": 3}},
            PromptDetails(0, 8),
            {"cached_tokens": 0, "created_cache_tokens": 8, "multimodal_tokens": {"image": 3}},
        ),
    ],
)
def test_stream_tells_details_of_the_engine_that_computed_the_prompt(
    choices: int, own: Any, details: PromptDetails | None, told: Any
) -> None:
    """A count that the answering engine does not tell is not added."""

    def usage(of_prompt: Any) -> bytes:
        counts = {"prompt_tokens": 10, "total_tokens": 12, "completion_tokens": 2}
        counts |= {"prompt_tokens_details": of_prompt}
        return packed({"choices": [], "usage": counts})

    resumer = splice_of(COMPLETION, n=choices, **COUNTED)
    resumer.prompt.details = details
    feed(resumer, first("a", [1]))
    (chunk,) = feed(resumer, usage(own))
    assert json.loads(chunk)["usage"] == json.loads(usage(told))["usage"]


def test_tokens_that_the_client_sees_are_not_drawn_anew() -> None:
    resumer = splice_of(COMPLETION, temperature=1, return_token_ids=True)
    # The last has begun a character, and the client knows of it.
    feed(resumer, first("a", [1]), said("b", [2, 3]))
    assert words(resumed(resumer, "ab\ufffd", "ab")) == "resume 2"
    lose(resumer, said("c", [9], prompt=TAKEN), "other tokens")
    resumed(resumer, "ab\ufffd", "ab")
    assert resumer.feed(said("e", [3, 4], prompt=TAKEN)) == [said("e", [4])]


@pytest.mark.parametrize(
    ("body", "fields", "expected"),
    [
        (CHAT, {}, None),
        (CHAT, {"max_tokens": 9}, 7),
        (CHAT, {"max_tokens": 20, "max_completion_tokens": 9}, 7),
        (COMPLETION, {}, 14),
        (COMPLETION, {"max_tokens": None}, 14),
    ],
)
def test_as_many_tokens_are_left_as_were(
    body: dict[str, Any], fields: dict[str, Any], expected: int | None
) -> None:
    resumer = splice_of(body, **fields)
    chats = (ROLE, A, B, chat({"content": "c"}, [3]))
    feed(resumer, *(chats if body is CHAT else (first(), said("b", [2]))))
    asked = sent(resumer.lost())
    assert asked.get("max_tokens") == expected
    assert "max_completion_tokens" not in asked


def test_what_goes_on_is_of_the_kind_that_it_was() -> None:
    resumer = splice_of(CHAT, temperature=1)
    thought = chat({"reasoning": "I think that"}, [1])
    told = [ROLE.replace(b"[7,8]", b"null"), chat({"reasoning": "I think that"})]
    assert feed(resumer, ROLE, thought) == told
    assert words(resumed(resumer, "<think>I think that")) == "resume 1"
    feed(resumer, ROLE.replace(b"[7,8]", b"[7,8,1]"))
    lose(resumer, chat({"content": "so"}, [2]), "as content what was reasoning")
    assert words(resumer.lost()) == "refusal"
