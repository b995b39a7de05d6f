"""Engine answers with values of other types: the engine counts as lost, and nothing else breaks.

Each value of valid streams and answers is replaced, one at a time, by values of other types.
"""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.support.router_rig import CHAT, COMPLETIONS, RouterRig
from tests.support.scripted_spec import Fault, FaultKind
from vllm_kvpool.router.dataplane.request_body import ApiPath, parse_request
from vllm_kvpool.router.dataplane.responses import (
    EngineLost,
    PromptDetails,
    error_event,
    is_answer,
    read_detokenized,
    read_reply,
    read_usage,
)
from vllm_kvpool.router.dataplane.resume.chunks import DONE, has_other_details, with_details
from vllm_kvpool.router.dataplane.resume.policy import Detokenize
from vllm_kvpool.router.dataplane.resume.stream_resumer import Resume, StreamResumer
from vllm_kvpool.router.dataplane.resume.whole_answer import NotAssembled, WholeAnswer, streamed

GONE = object()
OTHERS: tuple[Any, ...] = (
    *(GONE, None, True, -1, 99, 1 << 60, 0.5, "", "x", [], [[]], [{}], ["x"], {}, {"x": {}}),
)
HEAD = {"id": "1", "object": "o", "created": 5, "model": "m"}
USAGE = {
    **{"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3},
    "prompt_tokens_details": {"cached_tokens": 2, "created_cache_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
METRICS = {"time_to_first_token_ms": 1.0}


def completion(text: str, ids: list[int], end: str | None = None) -> dict[str, Any]:
    logprobs = {"text_offset": [0], "tokens": [text], "token_logprobs": [-1.0]}
    choice = {"index": 0, "text": text, "logprobs": {**logprobs, "top_logprobs": [{text: -1.0}]}}
    choice |= {"finish_reason": end, "stop_reason": None, "token_ids": ids}
    return {**HEAD, "choices": [choice | {"prompt_token_ids": [7, 8]}]}


def chat(delta: dict[str, Any], ids: list[int], end: str | None = None) -> dict[str, Any]:
    entry = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
    choice = {"index": 0, "delta": delta, "logprobs": {"content": [entry]}, "finish_reason": end}
    return {**HEAD, "choices": [choice | {"token_ids": ids}], "prompt_token_ids": [7, 8]}


END = {**HEAD, "choices": [], "usage": USAGE, "metrics": METRICS, "system_fingerprint": "f"}
FAILURE = {"error": {"message": "bad", "type": "BadRequestError", "param": None, "code": 400}}
STREAMS: dict[str, list[dict[str, Any]]] = {
    "completion": [completion("a", [1]), completion("b", [2]), completion("", [3], "stop"), END],
    "chat": [
        chat({"role": "assistant", "content": ""}, []),
        chat({"reasoning": "a"}, [1]),
        chat({"content": "b"}, [2], "stop"),
        END,
    ],
    "error": [FAILURE],
    "late error": [completion("a", [1]), FAILURE],
}
BODIES = {
    "completion": (ApiPath.COMPLETION, {"prompt": "p", "logprobs": 1, "max_tokens": 9}),
    "chat": (ApiPath.CHAT, {"messages": [], "logprobs": True}),
}
MORE: tuple[dict[str, Any], ...] = (
    *({}, {"return_token_ids": True}, {"temperature": 0, "logprobs": None}, {"n": 2}),
    {"temperature": 0, "top_k": 1, "logit_bias": {}},
)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every value within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        yield (key,)
        if isinstance(each, dict | list):
            yield from ((key, *rest) for rest in places(each))


def with_other(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    changed = copy.deepcopy(value)
    at = changed
    for key in place[:-1]:
        at = at[key]
    if other is GONE:
        del at[place[-1]]
    else:
        at[place[-1]] = other
    return changed


def variants(value: Any) -> Iterator[Any]:
    for place in places(value):
        for other in OTHERS:
            yield with_other(value, place, other)


def play(kind: ApiPath, fields: dict[str, Any], chunks: list[Any], splits: bool) -> None:
    """Feed a stream to all that reads one, lose the engine, and go on with the same stream."""
    request = streamed(parse_request(kind, json.dumps({"model": "m", **fields}).encode()))
    resumer, whole = StreamResumer(request), WholeAnswer(kind)
    resumer.prompt.details = PromptDetails(1, 1)
    payloads = [json.dumps(each).encode() for each in chunks]
    for _ in range(3):
        try:
            for payload in (*(payloads[:2] if splits else payloads), DONE):
                for told in resumer.feed(payload):
                    whole.add(told)
        except EngineLost:
            pass
        if resumer.ended:
            break
        step = resumer.lost()
        while isinstance(step, Detokenize):
            step = resumer.detokenized("ab")
        if not isinstance(step, Resume):
            break
    if whole.is_complete:
        status, body = whole.answer()
        assert is_answer(status)
        assert isinstance(json.loads(body), dict)


@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize("name", STREAMS)
def test_stream_with_a_value_of_another_type_loses_its_engine_alone(
    name: str, more: dict[str, Any]
) -> None:
    """A `usage` without `prompt_tokens` was a traceback, an error's code the answer's status."""
    kind, fields = BODIES.get(name, BODIES["completion"])
    for chunks in (STREAMS[name], *variants(STREAMS[name])):
        for splits in (False, True):
            with suppress(NotAssembled):
                play(kind, fields | more, chunks, splits)


TRANSFER = {"kvpool": {"tokens": 5}}
ANSWERS: dict[str, tuple[Callable[[bytes], object], dict[str, Any]]] = {
    "reply": (read_reply, {"choices": [{}], "usage": USAGE, "kv_transfer_params": TRANSFER}),
    "usage": (read_usage, {"usage": {"input_tokens": 1, "output_tokens": 2}}),
    "detokenized": (read_detokenized, {"prompt": "a"}),
    "error": (lambda body: error_event(400, body, "/v1/completions"), FAILURE),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answer_with_a_value_of_another_type_loses_its_engine_alone(name: str) -> None:
    read, good = ANSWERS[name]
    for answer in (good, *variants(good)):
        body = json.dumps(answer).encode()
        with suppress(EngineLost):
            counts = read(body)
            details = PromptDetails(1, 1)
            if has_other_details(getattr(counts, "details", None), details):
                with_details(body, details)


@pytest.mark.parametrize(
    ("code", "status"), [(400, 400), (499, 499), (99, None), (500, None), (0, None), (-5, None)]
)
def test_code_of_an_engines_error_is_a_status_only_if_it_is_a_clients(
    code: int, status: int | None
) -> None:
    request = parse_request(ApiPath.COMPLETION, b'{"model":"m","prompt":"p"}')
    payload = json.dumps({"error": {"message": "no", "code": code}}).encode()
    resumer, whole = StreamResumer(streamed(request)), WholeAnswer(ApiPath.COMPLETION)
    if status is None:
        with pytest.raises(EngineLost, match="no"):
            resumer.feed(payload)
        return
    for told in resumer.feed(payload):
        whole.add(told)
    assert whole.answer() == (status, payload)


@pytest.mark.parametrize("gone", ["prompt_tokens", "total_tokens", "completion_tokens"])
def test_usage_without_a_count_is_not_assembled(gone: str) -> None:
    whole = WholeAnswer(ApiPath.COMPLETION)
    with pytest.raises(NotAssembled, match="not vLLM's"):
        whole.add(json.dumps(with_other(END, ("usage", gone), GONE)).encode())


@pytest.mark.parametrize("status", [201, 204, 302, 304, 600, 999])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/version"])
async def test_status_that_is_none_of_an_answer_is_not_passed_on(path: str, status: int) -> None:
    """Behind 204 and 304 a body would be read as the next answer; 302 leads past the router."""
    async with RouterRig(0, 1, flow={"max_attempts": 1}) as rig:
        fault = Fault(kind=FaultKind.STATUS, status=status, body="{}", paths=(path,))
        rig.engines[0].board.set(fault)
        body = {"model": "scripted", "prompt": "a", "messages": []}
        method = "GET" if path == "/version" else "POST"
        async with rig.session.request(
            method, rig.url + path, json=body, allow_redirects=False
        ) as got:
            assert got.status in (502, 503)
            assert (await got.json())["error"]["code"] == got.status
