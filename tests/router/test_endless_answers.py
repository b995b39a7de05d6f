"""An engine that never ends an answer: the router takes what was asked for, and no more."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from tests.router.test_passed_on import MESSAGES, RESPONSES
from tests.support.router_rig import CHAT, COMPLETIONS, RouterRig
from tests.support.scripted_spec import FaultKind, ScriptedSpec
from vllm_kvpool.router.dataplane.request_body import (
    ANSWER_BYTES,
    MAX_ANSWER_BYTES,
    MAX_OUTPUT_TOKENS,
    ApiPath,
    ClientRequest,
    parse_request,
)
from vllm_kvpool.router.dataplane.responses import EngineLost
from vllm_kvpool.router.dataplane.resume.stream_resumer import MORE_PAYLOADS, StreamResumer

TALK = [{"role": "user", "content": "hello"}]
OWN = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 4},
    CHAT: {"messages": TALK, "max_tokens": 4},
    RESPONSES: {"input": TALK, "max_output_tokens": 4},
    MESSAGES: {"messages": TALK, "max_tokens": 4},
}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{path} stream={on}": (path, OWN[path] | {"stream": on}) for path in OWN for on in (0, 1)},
    "choices": (COMPLETIONS, OWN[COMPLETIONS] | {"n": 2, "stream": True}),
    "echo": (COMPLETIONS, OWN[COMPLETIONS] | {"echo": True, "stream": True}),
    "logprobs of the prompt": (CHAT, OWN[CHAT] | {"prompt_logprobs": 0}),
    "sampled": (CHAT, OWN[CHAT] | {"temperature": 1.0, "stream": True}),
}
BUFFERS = 32 << 20
"""Bytes that an engine can write into sockets while nobody reads."""


@pytest.mark.parametrize("name", ASKED)
async def test_endless_answer_is_cut_at_what_was_asked_for(name: str) -> None:
    """4 tokens were 54 to 1,099 MiB of memory after 6 s."""
    path, body = ASKED[name]
    async with RouterRig(0, 1) as rig:
        engine = rig.engines[0]
        rig.fail(0, FaultKind.ENDLESS)
        async with asyncio.timeout(20):
            told = await rig.told(path, body)
        await rig.until(lambda: not rig.router.controller.state.requests, "it is over")
        calls = engine.counts.received[path]
        assert engine.counts.endless_bytes <= calls * (ANSWER_BYTES + BUFFERS)
        if path in (COMPLETIONS, CHAT) and body.get("stream"):
            most = 2 * (4 + MORE_PAYLOADS) if name in ("choices", "echo") else 4
            assert told.count(b'"a "') <= most
            assert told.endswith(b"[DONE]\n\n")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_tokens_beyond_those_asked_for_end_the_answer_with_its_length(path: str) -> None:
    async with RouterRig(0, 1) as rig:
        rig.fail(0, FaultKind.ENDLESS)
        reply = await rig.stream(OWN[path] | {"temperature": 0}, path)
        assert reply.text == "a " * 4
        assert reply.finish_reason == "length"
        assert reply.is_done
        whole = await rig.complete(OWN[path] | {"temperature": 0, "stream": False}, path)
        assert whole.status == 200
        assert whole.text == "a " * 4


@pytest.mark.parametrize("stream", [True, False])
async def test_answer_without_a_length_is_cut_at_the_models(stream: bool) -> None:
    spec = ScriptedSpec(max_model_len=64)
    async with RouterRig(0, 1, spec=spec) as rig:
        assert rig.router.model_length("scripted") == rig.router.model_length("") == 64
        assert rig.router.model_length("another") is None
        rig.fail(0, FaultKind.ENDLESS)
        asked = {"messages": TALK, "temperature": 0, "stream": stream, "max_tokens": None}
        reply = await (rig.stream if stream else rig.complete)(asked, CHAT)
        assert reply.text == "a " * 64


async def test_length_of_a_model_beyond_the_output_limit_is_known() -> None:
    length = 10 * MAX_OUTPUT_TOKENS
    spec = ScriptedSpec(max_model_len=length, kv_blocks=length // 16)
    async with RouterRig(0, 1, spec=spec) as rig:
        assert rig.router.model_length("scripted") == length
    chat = parse_request(ApiPath.CHAT, b'{"messages":[]}')
    known = msgspec.structs.replace(chat, model_length=length)
    assert known.most_tokens == chat.most_tokens == MAX_OUTPUT_TOKENS


async def test_prompt_longer_than_the_model_waits_as_one_of_its_length() -> None:
    """Clients were told to come back later (429, 503) with a prompt that no engine takes."""
    async with RouterRig(0, 1, spec=ScriptedSpec(max_model_len=64)) as rig:
        rig.fail(0, FaultKind.HANG)
        requests = rig.router.controller.state.requests
        task = asyncio.create_task(rig.told(COMPLETIONS, {"prompt": [7] * 9000, "max_tokens": 4}))
        await rig.until(lambda: bool(requests), "it has arrived")
        (asked,) = requests.values()
        task.cancel()
        await asyncio.wait({task})
        assert asked.ask.prompt_tokens == 64


def request(**fields: Any) -> ClientRequest:
    return parse_request(ApiPath.COMPLETION, json.dumps({"prompt": "x" * 100, **fields}).encode())


def chunk(**choice: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": "", **choice}]}).encode()


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"n": 2}])
def test_payloads_without_tokens_are_bounded(more: dict[str, Any]) -> None:
    asked = request(max_tokens=3, stream=True, **more)
    resumer = StreamResumer(asked)
    most = asked.num_sequences * (3 + MORE_PAYLOADS)
    for _ in range(most):
        resumer.feed(chunk())
    with pytest.raises(EngineLost, match="more than the 3 tokens asked for"):
        resumer.feed(chunk())


def test_choice_that_was_not_asked_for_loses_the_engine() -> None:
    with pytest.raises(EngineLost, match="choice 2 of 2"):
        StreamResumer(request(n=2)).feed(chunk(index=2))


def test_bytes_of_an_answer_follow_what_was_asked_for() -> None:
    few = request(max_tokens=4).most_answer_bytes("id")
    assert ANSWER_BYTES < few < ANSWER_BYTES + (1 << 20)
    tokens = request(max_tokens=1004).most_answer_bytes("id") - few
    assert tokens >= 1000 * 4096
    assert request(max_tokens=1004, n=3).most_answer_bytes("id") - few > 2 * tokens
    assert request(max_tokens=4, logprobs=20).most_answer_bytes("id") - few == 4 * 20 * 512
    for every in ({"logprobs": -1}, {"logprob_token_ids": [1]}):
        assert request(max_tokens=4, **every).most_answer_bytes("id") > MAX_ANSWER_BYTES
    assert request(max_tokens=4, echo=True).most_answer_bytes("id") - few > 100 * 4096
    assert request(max_tokens=1 << 40).most_tokens == MAX_OUTPUT_TOKENS
    assert request(max_tokens=-5).most_tokens == 1
