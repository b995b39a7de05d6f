"""/v1/responses and /v1/messages: admitted and placed as chats are, answered as they come."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from tests.support.router_rig import FAST, RouterRig
from vllm_kvpool.router.control.events import Drain
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.dataplane.data_plane import METHODS
from vllm_kvpool.router.dataplane.headers import RESERVED_HEADERS
from vllm_kvpool.router.dataplane.request_body import (
    RESERVED_FIELDS,
    RESERVED_XARGS,
    ApiPath,
    BadRequest,
    parse_request,
)

TALK = [{"role": "user", "content": "tell me of the sea " * 20}]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"model": "scripted", "input": TALK, "max_output_tokens": 40},
    MESSAGES: {"model": "scripted", "messages": TALK, "max_tokens": 40},
}
paths = pytest.mark.parametrize("path", BODIES)


@paths
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_the_engines_own(path: str, stream: bool) -> None:
    async with RouterRig(1, 1) as rig:
        body = {**BODIES[path], "stream": stream}
        answers = []
        for url in (rig.reference.url, rig.url):
            async with rig.session.post(url + path, json=body) as got:
                answers.append((got.status, got.headers["Content-Type"], await got.read()))
        (status, _, told), direct = answers
        assert (status, (status, _, told)) == (200, direct)
        assert (b"event: end" in told) is stream
        await rig.until(lambda: not rig.router.controller.state.requests, "it is over")
        assert rig.router.controller.state.counts.events["served"] == 1
        # The prompt is computed by the replica that answers.
        assert rig.engines[0].counts.received[path] == 0


@paths
async def test_an_engine_that_has_not_begun_is_replaced(path: str) -> None:
    async with RouterRig(0, 2) as rig:
        rig.kill(0)
        for _ in range(2):
            assert (await rig.ask("POST", path, BODIES[path])).status == 200


@paths
async def test_an_answer_in_one_piece_may_take_longer_than_a_stream_is_silent(path: str) -> None:
    front = {"engine_timeout_s": 0.3, "answer_timeout_s": 60.0}
    spec = replace(FAST, step_base_s=0.05)
    async with RouterRig(0, 1, spec=spec, front=front) as rig:
        assert (await rig.ask("POST", path, BODIES[path])).status == 200
        assert rig.engines[0].counts.received[path] == 1


@paths
async def test_a_stream_that_breaks_off_breaks_off(path: str) -> None:
    async with RouterRig(0, 2, spec=replace(FAST, step_base_s=0.02)) as rig:
        body = {**BODIES[path], "stream": True}
        async with rig.session.post(rig.url + path, json=body) as got:
            assert got.status == 200
            await got.content.readany()
            rig.kill(next(n for n in (0, 1) if rig.engines[n].counts.received[path]))
            with pytest.raises(aiohttp.ClientError):
                await asyncio.wait_for(got.content.read(), 5.0)
        await rig.until(lambda: not rig.router.controller.state.requests, "it is over")
        assert rig.router.controller.state.counts.events["served"] == 0


@paths
async def test_a_stream_that_a_drain_takes_too_long_for_breaks_off(path: str) -> None:
    spec = replace(FAST, step_base_s=0.02)
    async with RouterRig(
        0, 2, spec=spec, flow={"drain_timeout_s": 0.1}, front={"answer_timeout_s": 0.2}
    ) as rig:
        body = {**BODIES[path], "stream": True}
        async with rig.session.post(rig.url + path, json=body) as got:
            assert got.status == 200
            await got.content.readany()
            at = next(n for n in (0, 1) if rig.engines[n].counts.received[path])
            rig.router.post(Drain(ReplicaId(f"r{at}")))
            with pytest.raises(aiohttp.ClientError):
                await asyncio.wait_for(got.content.read(), 5.0)
        await rig.until(lambda: not rig.router.controller.state.requests, "it is over")
        assert rig.engines[1 - at].counts.received[path] == 0


@paths
async def test_what_an_engine_refuses_is_refused(path: str) -> None:
    async with RouterRig(0, 1) as rig:
        assert (await rig.ask("POST", path, {**BODIES[path], "model": "another"})).status == 404


BATCHES = f"{MESSAGES}/batches"
OWN_ERRORS: dict[str, tuple[int, str, str, Any, dict[str, str]]] = {
    "no such path": (404, "POST", BATCHES, {}, {}),
    "method": (405, "GET", MESSAGES, None, {}),
    "coding": (415, "POST", MESSAGES, b"x", {"Content-Encoding": "gzip"}),
    "no JSON": (400, "POST", MESSAGES, b"{", {}),
    "no prompt": (400, "POST", MESSAGES, {}, {}),
    "too large": (413, "POST", MESSAGES, b" " * 2000, {}),
    "bad header": (400, "POST", MESSAGES, b"{}", {"Transfer-Encoding": "x"}),
    "no engine": (503, "POST", MESSAGES, BODIES[MESSAGES], {}),
}
"""The router's own refusals of Anthropic's API: status, and the request."""


@pytest.mark.parametrize("case", OWN_ERRORS)
async def test_own_errors_of_anthropics_api_have_its_form(case: str) -> None:
    status, *request = OWN_ERRORS[case]
    async with RouterRig(0, 1, front={"max_body_bytes": 1000}) as rig:
        if status == 503:
            rig.kill(0)
            await rig.start_router(waits=False)
        reply = await rig.ask(*request)
        assert reply.status == status
        answer = reply.json
        assert set(answer) == {"type", "error"}
        assert answer["type"] == "error"
        assert set(answer["error"]) == {"type", "message"}
        assert all(answer["error"].values())


@pytest.mark.parametrize("name", ["previous_response_id", "background"])
def test_responses_that_one_engine_would_keep_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        parse_request(ApiPath.RESPONSES, b'{"input": "hello", "%b": "r1"}' % name.encode())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ApiPath.RESPONSES, b"{}"),
        (ApiPath.RESPONSES, b'{"input": 5}'),
        (ApiPath.MESSAGES, b'{"messages": "hello"}'),
        (ApiPath.MESSAGES, b'{"input": []}'),
    ],
)
def test_without_a_prompt_they_are_refused(kind: ApiPath, body: bytes) -> None:
    with pytest.raises(BadRequest, match="must be a list"):
        parse_request(kind, body)


def test_what_shapes_the_prompt_counts() -> None:
    text = "word " * 3000
    body = '{"messages": ["%s"], "system": "%s"}'
    made = {parse_request(ApiPath.MESSAGES, (body % (text, each)).encode()).prefix for each in "ab"}
    assert len(made) == 2
    assert all(made)
    request = parse_request(ApiPath.RESPONSES, f'{{"input": "{text}"}}'.encode())
    assert not request.wants_handoff
    assert request.prompt_bytes > 15_000


POSTED = sorted(path for path, methods in METHODS.items() if "POST" in methods and path != "/ping")


@pytest.mark.parametrize("path", POSTED)
async def test_reserved_fields_and_headers_reach_engines_on_no_route(path: str) -> None:
    """`/v1/embeddings` and `/tokenize` passed `priority` and `kv_transfer_params` on."""
    mark = "of-the-client"
    fields: dict[str, Any] = {each: {"mark": mark} for each in RESERVED_FIELDS}
    xargs = {"vllm_xargs": dict.fromkeys(RESERVED_XARGS, mark) | {"own": 1}}
    own = {"model": "scripted", "prompt": "hello", "input": "hello", "tokens": [5]}
    own |= {"messages": [{"role": "user", "content": "hello"}]}
    sent_headers = dict.fromkeys(RESERVED_HEADERS, mark)
    async with RouterRig(0, 1) as rig:
        reply = await rig.ask("POST", path, own | fields | xargs, sent_headers)
        assert reply.status in (200, 404)
        counts = rig.engines[0].counts
        assert mark.encode() not in counts.body_of[path]
        assert json.loads(counts.body_of[path])["vllm_xargs"] == {"own": 1}
        assert mark not in counts.headers_of[path].values()
