"""Rules for all forms of answers: an abort is no end, and engines' addresses stay private."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.support.router_rig import Reply, RouterRig
from tests.support.scripted_spec import FaultKind
from vllm_kvpool.router.dataplane.data_plane import METHODS
from vllm_kvpool.router.dataplane.request_body import READ, RESERVED_FIELDS, ApiPath, parse_request
from vllm_kvpool.router.dataplane.resume.whole_answer import is_streamable

TALK = [{"role": "user", "content": "hello"}]
MOST = 600
"""Tokens of an answer: at a millisecond each there is time to put its engine to sleep."""
REQUESTS: dict[ApiPath, dict[str, dict[str, Any]]] = {
    ApiPath.COMPLETION: {
        "plain": {"prompt": "a"},
        "echo": {"prompt": "a", "echo": True},
        "prompt log-probabilities": {"prompt": "a", "prompt_logprobs": 0},
        "several prompts": {"prompt": ["a", "b"]},
        "several choices": {"prompt": "a", "n": 2},
        "beam search": {"prompt": "a", "use_beam_search": True},
    },
    ApiPath.CHAT: {
        "plain": {"messages": TALK},
        "tools": {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}]},
    },
    ApiPath.RESPONSES: {"plain": {"input": TALK, "max_output_tokens": MOST}},
    ApiPath.MESSAGES: {"plain": {"messages": TALK}},
}
CASES = [
    pytest.param(path, body, stream, id=f"{path.name.lower()}, {name}, {stream=}")
    for path in ApiPath
    for name, body in REQUESTS[path].items()
    for stream in (False, True)
]


async def ask_and_put_to_sleep(rig: RouterRig, body: dict[str, Any], path: str) -> Reply:
    """Ask the router, and put the engine that has the request to sleep in mid-answer."""
    asked = asyncio.create_task(rig.complete(body, path))
    try:
        await rig.until(rig.holders, "an engine has the request")
        (holder,) = rig.holders()
        core = rig.engines[holder].running
        await rig.until(lambda: core.batch.free_blocks < rig.spec.kv_blocks, "it is computed")
        core.sleep(1, "abort")
        return await asked
    finally:
        asked.cancel()


@pytest.mark.parametrize(("path", "body", "stream"), CASES)
async def test_an_aborted_answer_is_not_passed_on_as_its_end(
    path: ApiPath, body: dict[str, Any], stream: bool
) -> None:
    body = {"max_tokens": MOST, "ignore_eos": True, "stream": stream, **body}
    async with RouterRig(0, 2) as rig:
        direct = await rig.direct(body, path.value)
        if path in READ:
            reply = await ask_and_put_to_sleep(rig, body, path.value)
            assert reply.status == 200
            choices = [each for chunk in reply.chunks for each in chunk.get("choices", ())]
            assert all(each["finish_reason"] != "abort" for each in choices)
            assert reply.error is not None or reply.text == direct.text
        elif stream:
            # The client has a part of it already.
            with pytest.raises(aiohttp.ClientError):
                await ask_and_put_to_sleep(rig, body, path.value)
        else:
            reply = await ask_and_put_to_sleep(rig, body, path.value)
            ((answer,), (expected,)) = (reply.chunks, direct.chunks)
            assert answer == {**expected, "kv_transfer_params": None}


async def test_an_aborted_prompt_is_not_computed() -> None:
    async with RouterRig(1, 1) as rig:
        prompt = "hello world " * 400
        direct = await rig.direct({"prompt": prompt})
        asked = asyncio.create_task(rig.complete({"prompt": prompt}))
        prefill = rig.engines[0].running
        await rig.until(lambda: not prefill.batch.is_empty, "its prompt is being computed")
        prefill.sleep(1, "abort")
        reply = await asked
        assert reply.text == direct.text
        assert rig.router.controller.state.rates.handed_tokens._total == 0


ADDRESS = "tcp://engine-of-the-cluster"
STREAMED = [path.value for path in ApiPath]
POSTED = sorted(path for path, methods in METHODS.items() if "POST" in methods and path != "/ping")
_TOLD: dict[str, Any] = {name: {"at": ADDRESS} for name in RESERVED_FIELDS}
_PLAIN = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
_CHUNKS = [
    {"choices": [{"index": 0, "text": "x", "delta": {"content": "x"}, "finish_reason": "stop"}]},
    {"type": "response.completed", "response": {"status": "completed", **_TOLD}},
    {"type": "message_start", "message": {"usage": {"input_tokens": 1}, **_TOLD}},
    _PLAIN,
]
_EVENTS = "".join(f"event: e\ndata: {json.dumps({**each, **_TOLD})}\n\n" for each in _CHUNKS)
FORMS = {
    "whole": (200, "application/json", json.dumps({**_PLAIN, "status": "completed", **_TOLD})),
    "stream": (200, "text/event-stream", f"{_EVENTS}data: [DONE]\n\n"),
    "cut stream": (200, "text/event-stream", _EVENTS.rstrip()),
    "refusal": (400, "application/json", json.dumps({"error": {"message": "no"}, **_TOLD})),
    "failure": (500, "application/json", json.dumps({"error": {"message": "no"}, **_TOLD})),
}
"""Every form in which an engine answers: status, type, body."""


@pytest.mark.parametrize("trusts", [False, True])
@pytest.mark.parametrize(
    ("path", "form"),
    [(path, form) for path in POSTED for form in FORMS if path in STREAMED or "stream" not in form],
)
async def test_no_form_of_answer_tells_what_is_the_clusters(
    path: str, form: str, trusts: bool
) -> None:
    """Streams of /v1/responses told `kv_transfer_params`."""
    status, content_type, body = FORMS[form]
    asked = {"prompt": "a", "messages": TALK, "input": "a", "tokens": [5], "echo": True}
    asked |= {"stream": "stream" in form, "tools": [{"type": "function"}]}
    async with RouterRig(0, 1, front={"trust_clients": trusts}) as rig:
        fault = {"status": status, "body": body, "content_type": content_type, "paths": (path,)}
        rig.fail(0, FaultKind.STATUS, **fault)
        told = await rig.told(path, asked)
        assert rig.engines[0].counts.received[path]
        assert (ADDRESS.encode() in told) is trusts


@pytest.mark.parametrize("trusts", [False, True])
@pytest.mark.parametrize(("path", "body", "stream"), [each for each in CASES if "False" in each.id])
async def test_engines_addresses_are_told_to_trusted_clients_alone(
    path: ApiPath, body: dict[str, Any], stream: bool, trusts: bool
) -> None:
    async with RouterRig(0, 1, front={"trust_clients": trusts}) as rig:
        reply = await rig.complete({**body, "max_tokens": 4, "stream": stream}, path.value)
        assert reply.status == 200
        (answer,) = reply.chunks
        is_told = answer["kv_transfer_params"] is not None
        assert is_told is (trusts and not is_assembled(path, body))


def is_assembled(path: ApiPath, body: dict[str, Any]) -> bool:
    """Return True if the router makes the answer of a stream, which has no parameters."""
    asked = parse_request(path, json.dumps({"model": "scripted", **body}).encode())
    return path in READ and is_streamable(asked)
