"""The router asks a `kvpool serve` what the pool has: what it asks, and what an answer, or none,
changes."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.http_answers import http_server
from tests.support.router_rig import CHAT, RouterRig, run
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.requests import Ask, PoolLookupOutcome, PromptPath, RequestId
from vllm_kvpool.router.dataplane import pool_lookup
from vllm_kvpool.router.dataplane.control_client import ControlClient
from vllm_kvpool.router.dataplane.data_plane import ask_of
from vllm_kvpool.router.dataplane.messages import (
    Frames,
    FromWorker,
    RequestOpen,
    encode_frame,
)
from vllm_kvpool.router.dataplane.pool_lookup import (
    LEAST_TOKENS,
    MAX_ANSWER_BYTES,
    MAX_AT_ONCE,
    PoolLookup,
    lookup_body,
)
from vllm_kvpool.router.dataplane.request_body import ApiPath, ClientRequest, parse_request
from vllm_kvpool.router.dataplane.upstream import Upstream
from vllm_kvpool.storage.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S

LONG = 3000
PROMPT = {"model": "scripted", "prompt": list(range(LONG)), "max_tokens": 4}
COVERED, ABSENT, FAILED = (
    PoolLookupOutcome.COVERED,
    PoolLookupOutcome.ABSENT,
    PoolLookupOutcome.FAILED,
)
PATIENT_S = 20.0
ASK = Ask(request_id=RequestId("r"), prompt_tokens=LONG, max_output_tokens=4)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service on a busy machine is waited for."""
    monkeypatch.setattr(pool_lookup, "WAIT_S_PER_TOKEN", PATIENT_S)
    monkeypatch.setattr(pool_lookup, "MAX_WAIT_S", PATIENT_S)


def answer(tokens: int = LONG, covered: int = 0, namespace: str = "scripted@fmt:1") -> bytes:
    found = {"namespace": namespace, "tokens": tokens, "chunk_tokens": 256, "tiers": []}
    return msgspec.json.encode({**found, "covered_tokens": covered})


def request_of(body: Mapping[str, Any], path: ApiPath = ApiPath.COMPLETION) -> ClientRequest:
    return parse_request(path, msgspec.json.encode(body))


async def asked(lookup: PoolLookup, body: Mapping[str, Any] = PROMPT) -> Ask:
    request = request_of(body)
    return await lookup.ask(request, ask_of(RequestId("r"), request, 0.25, 1e9))


def upstream(api_key: str = "") -> Upstream:
    return Upstream(silence_timeout_s=PATIENT_S, answer_timeout_s=PATIENT_S, api_key=api_key)


def outcomes(url: str, times: int, clock: Callable[[], float] = lambda: 0.0) -> list[Ask]:
    async def main() -> list[Ask]:
        calls = upstream()
        lookup = PoolLookup(url, calls, clock)
        found = [await asked(lookup) for _ in range(times)]
        await calls.close()
        return found

    return run(main)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("status", "body", "outcome", "tokens"),
    [
        (200, answer(covered=1500), COVERED, 1500),
        (200, answer(tokens=6000, covered=1500), COVERED, 750),  # of those that are estimated here
        (200, answer(covered=1 << 62), COVERED, LONG),
        (200, answer(), ABSENT, 0),
        (200, answer(covered=-5), ABSENT, 0),
        (200, answer(tokens=0, covered=5), ABSENT, 0),
        (200, answer(tokens=-9, covered=5), ABSENT, 0),
        (200, answer(namespace="", covered=5), PoolLookupOutcome.UNKNOWN_MODEL, 0),
        (400, answer(covered=1500), FAILED, 0),
        (503, b"", FAILED, 0),
        (200, b"hello", FAILED, 0),
        (200, b"\xff", FAILED, 0),
        (200, b"{}", FAILED, 0),
        (200, b"[" * 100_000, FAILED, 0),
        (200, answer().replace(b"3000", b"1" * 5000), FAILED, 0),
        (200, answer(covered=1500).replace(b"1500", b'"all"'), FAILED, 0),
        (200, answer(namespace="x" * MAX_ANSWER_BYTES), FAILED, 0),
    ],
)
def test_an_answer_is_believed_up_to_the_prompts_length(
    status: int, body: bytes, outcome: PoolLookupOutcome, tokens: int
) -> None:
    with http_server(lambda path, _: (status if path == "/lookup" else 404, body)) as url:
        [found] = outcomes(f"{url}/", 1)
    assert (found.lookup, found.pooled_tokens) == (outcome, tokens)
    assert found.prompt_tokens == LONG


def test_a_service_that_is_away_counts_as_nothing() -> None:
    assert [each.lookup for each in outcomes("http://127.0.0.1:1", 1)] == [FAILED]


def test_a_service_that_is_late_is_not_waited_for() -> None:
    held = threading.Event()

    def slow(path: str, body: bytes) -> tuple[int, bytes]:
        held.wait(PATIENT_S)
        return 200, answer(covered=LONG)

    async def main() -> Ask:
        calls = upstream()
        found = await asked(PoolLookup(url, calls, lambda: 0.0))
        await calls.close()
        return found

    with http_server(slow) as url:
        found = run(main)
        held.set()
    assert (found.lookup, found.pooled_tokens) == (PoolLookupOutcome.LATE, 0)


@pytest.mark.usefixtures("patient")
def test_a_service_that_fails_is_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, pool_lookup.__name__)
    now, bad, num_asked = [0.0], [True], [0]

    def reply(path: str, body: bytes) -> tuple[int, bytes]:
        num_asked[0] += 1
        return (500, b"") if bad[0] else (200, answer(covered=LONG))

    async def main() -> None:
        calls = upstream()
        lookup = PoolLookup(url, calls, lambda: now[0])
        for _ in range(FAILURES_TO_OPEN):
            assert (await asked(lookup)).lookup is FAILED
        for _ in range(3):
            assert (await asked(lookup)).lookup is PoolLookupOutcome.SKIPPED
        assert num_asked[0] == FAILURES_TO_OPEN
        now[0] += FIRST_PAUSE_S
        assert (await asked(lookup)).lookup is FAILED
        now[0] += 3 * FIRST_PAUSE_S
        bad[0] = False
        assert (await asked(lookup)).lookup is COVERED
        assert (await asked(lookup)).lookup is COVERED
        await calls.close()

    with http_server(reply) as url:
        run(main)
    failed, back = [each.getMessage() for each in caplog.records]
    assert "/lookup fails: it answers 500" in failed
    assert "answers again" in back
    assert all("flow.lookup_url" in each for each in (failed, back))


@pytest.mark.usefixtures("patient")
def test_so_many_ask_at_once() -> None:
    held = threading.Event()

    def slow(path: str, body: bytes) -> tuple[int, bytes]:
        held.wait(PATIENT_S)
        return 200, answer(covered=LONG)

    async def main() -> list[Ask]:
        calls = upstream()
        lookup = PoolLookup(url, calls, lambda: 0.0)
        tasks = [asyncio.create_task(asked(lookup)) for _ in range(MAX_AT_ONCE)]
        await asyncio.sleep(0)
        more = await asked(lookup)
        held.set()
        found = [more, *await asyncio.gather(*tasks), await asked(lookup)]
        await calls.close()
        return found

    with http_server(slow) as url:
        found = [each.lookup for each in run(main)]
    assert found == [PoolLookupOutcome.SKIPPED] + [COVERED] * (MAX_AT_ONCE + 1)


TEXT = "tell me of the sea " * 1000
MESSAGES = [{"role": "user", "content": TEXT}]
TOOLS = [{"type": "function", "function": {"name": "tide"}}]
PART = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (ApiPath.COMPLETION, {"prompt": TEXT, "stop": "x", "user": "u"}, {"text": TEXT}),
        (ApiPath.COMPLETION, {"prompt": [1, 2]}, {"tokens": [1, 2]}),
        (
            ApiPath.COMPLETION,
            {"prompt": TEXT, "cache_salt": "s"},
            {"text": TEXT, "cache_salt": "s"},
        ),
        (ApiPath.COMPLETION, {"prompt": [TEXT]}, None),
        (ApiPath.COMPLETION, {"prompt": [TEXT, TEXT]}, None),
        (ApiPath.COMPLETION, {"prompt": TEXT, "echo": True}, None),
        (ApiPath.COMPLETION, {"prompt": TEXT, "add_special_tokens": False}, None),
        (ApiPath.COMPLETION, {"prompt": TEXT, "model": None}, None),
        (ApiPath.CHAT, {"messages": MESSAGES, "top_p": 0.5}, {"messages": MESSAGES}),
        (
            ApiPath.CHAT,
            {"messages": MESSAGES, "tools": TOOLS, "chat_template_kwargs": {"a": 1}},
            {"messages": MESSAGES, "tools": TOOLS, "chat_template_kwargs": {"a": 1}},
        ),
        (ApiPath.CHAT, {"messages": MESSAGES, "chat_template": "x"}, None),
        (ApiPath.CHAT, {"messages": [{"role": "user", "content": [PART]}]}, None),
        (ApiPath.RESPONSES, {"input": TEXT}, None),
    ],
)
def test_what_is_asked(
    path: ApiPath, body: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    """What the client gave, as it is; nothing where the prompt's tokens would be others."""
    made = lookup_body(request_of({"model": "m", **body}, path))
    assert (None if made is None else msgspec.json.decode(made)) == (
        None if expected is None else {"model": "m", **expected}
    )


@pytest.mark.usefixtures("patient")
def test_the_service_gets_no_key() -> None:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        calls = upstream("secret-of-engines")
        port = server.sockets[0].getsockname()[1]
        await asked(PoolLookup(f"http://127.0.0.1:{port}", calls, lambda: 0.0))
        await calls.close()
        server.close()

    run(main)
    assert heads[0].startswith(b"POST /lookup HTTP/1.1\r\n")
    assert b"secret" not in heads[0]
    assert b"authorization" not in heads[0].lower()


@pytest.mark.usefixtures("patient")
def test_a_prompt_that_the_pool_has_is_not_handed_over() -> None:
    """Neither a short one nor one that the router knows is asked about."""
    seen: list[dict[str, Any]] = []

    def reply(path: str, body: bytes) -> tuple[int, bytes]:
        seen.append(msgspec.json.decode(body))
        return 200, answer(covered=LONG if len(seen) == 1 else 0)

    async def main() -> None:
        async with RouterRig(1, 1, config={"flow": {"lookup_url": url}}) as rig:
            state = rig.router.controller.state
            assert (await rig.stream(PROMPT)).is_done
            assert state.prompts == {PromptPath.IN_POOL: 1}
            assert len(seen) == 1
            others = {**PROMPT, "prompt": list(range(9, 9 + LONG))}
            assert (await rig.stream(others)).is_done
            assert state.prompts == {PromptPath.IN_POOL: 1, PromptPath.HANDED_OVER: 1}
            assert len(seen) == 2
            for body in (
                others,
                {**PROMPT, "prompt": list(range(LEAST_TOKENS - 1))},
                {**PROMPT, "prompt": "short"},
            ):
                assert (await rig.stream(body)).is_done
            assert len(seen) == 2
            assert state.lookups == {COVERED: 1, ABSENT: 1}
            text = rig.router.telemetry.expose()[1].decode()
            assert 'kvpool_router_lookups_total{outcome="covered"} 1.0' in text
            assert f"kvpool_router_pooled_tokens_total {float(LONG)}" in text

    with http_server(reply) as url:
        run(main)
    assert seen[0] == {"model": "scripted", "tokens": PROMPT["prompt"]}


@pytest.mark.usefixtures("patient")
def test_a_client_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    asking, held = threading.Event(), threading.Event()

    def slow(path: str, body: bytes) -> tuple[int, bytes]:
        asking.set()
        held.wait(PATIENT_S)
        return 200, answer(covered=LONG)

    async def main() -> None:
        async with RouterRig(0, 1, config={"flow": {"lookup_url": url}}) as rig:
            chat = {"model": "scripted", "messages": MESSAGES, "max_tokens": 4}
            task = asyncio.create_task(rig.stream(chat, path=CHAT))
            await rig.until(asking.is_set, "it asks")
            task.cancel()
            await asyncio.wait([task])
            held.set()
            assert (await rig.stream(PROMPT)).is_done
            assert rig.counts["arrived"] == 1

    with http_server(slow) as url:
        run(main)


@pytest.mark.parametrize("url", ["lookup:8200", "http://", "ftp://x", "http://x:99999"])
def test_a_url_that_is_none_is_named(url: str) -> None:
    replicas = [{"url": "http://10.0.0.1:8000", "role": "both"}]
    with pytest.raises(ConfigError, match=r"\[flow\] lookup_url is"):
        read_config({"replicas": replicas, "flow": {"lookup_url": url}}, "test")


def test_a_workers_controller_is_told() -> None:
    opened = RequestOpen(replace(ASK, lookup=COVERED, pooled_tokens=7), "")
    assert Frames(FromWorker).feed(encode_frame([opened])) == [opened]
    worker = ControlClient("w", 1.0, 0.25, lambda: 0.0)
    assert worker.unknown_tokens(opened.ask) == ASK.prompt_tokens
