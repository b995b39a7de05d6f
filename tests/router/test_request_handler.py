"""Answers through the router equal the engine's answers; prompts are handed over."""

import asyncio
import re
import socket
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.support.router_invariants import check_controller
from tests.support.router_rig import CHAT, COMPLETIONS, FAST, Reply, RouterRig
from tests.support.scripted_spec import FaultKind, ScriptedSpec
from vllm_kvpool.router.control.events import EVERYTHING
from vllm_kvpool.router.control.requests import Phase
from vllm_kvpool.router.control.states import State
from vllm_kvpool.router.dataplane.resume.chunks import DONE
from vllm_kvpool.router.dataplane.resume.stream_resumer import StreamResumer

LONG = "hello world " * 400  # over a thousand tokens: worth a prefill of its own
SHORT = "hello world"
KEYED = ScriptedSpec(step_base_s=0.001, put_s=0.005, api_key="secret")

Body = dict[str, Any]


def chat(text: str) -> Body:
    return {"messages": [{"role": "user", "content": text}]}


LATE = {"prompt": LONG, "max_tokens": 200}
WISHES = {"kv_transfer_params": {"kvpool": {"save": False}, "other": 1}}
BODIES: dict[str, tuple[str, Body]] = {
    "short": (COMPLETIONS, {"prompt": SHORT}),
    "long": (COMPLETIONS, {"prompt": LONG}),
    "ids": (COMPLETIONS, {"prompt": list(range(300, 1900))}),
    "several prompts": (COMPLETIONS, {"prompt": [SHORT, LONG]}),
    "several choices": (COMPLETIONS, {"prompt": LONG, "n": 2}),
    "echo": (COMPLETIONS, {"prompt": LONG, "echo": True}),
    "token ids": (COMPLETIONS, {"prompt": LONG, "return_token_ids": True}),
    "stop": (COMPLETIONS, {**LATE, "stop": ["ba", "ke"]}),
    "stop kept": (COMPLETIONS, {**LATE, "stop": ["ba"], "include_stop_str_in_output": True}),
    "one token": (COMPLETIONS, {"prompt": LONG, "max_tokens": 1}),
    "default length": (COMPLETIONS, {"prompt": LONG, "max_tokens": None}),
    "wishes of its own": (COMPLETIONS, {"prompt": LONG, **WISHES}),
    "unknown field": (COMPLETIONS, {"prompt": LONG, "something": {"new": [1, 2]}}),
    "no model": (COMPLETIONS, {"prompt": LONG, "model": None}),
    "chat": (CHAT, chat(LONG)),
    "short chat": (CHAT, chat(SHORT)),
    "chat token ids": (CHAT, {**chat(LONG), "return_token_ids": True}),
    "chat choices": (CHAT, {**chat(LONG), "n": 2}),
    "chat stop": (CHAT, {**chat(LONG), "max_tokens": 200, "stop": "ra"}),
    "seeded": (COMPLETIONS, {"prompt": LONG, "temperature": 1.0, "seed": 7}),
}
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

TRUSTING = {"front": {"trust_clients": True}}

BAD: dict[str, tuple[str, Body, int]] = {
    "negative length": (COMPLETIONS, {"prompt": LONG, "max_tokens": -1}, 400),
    "too long": (COMPLETIONS, {"prompt": LONG * 8}, 400),
    "cold": (COMPLETIONS, {"prompt": LONG, "temperature": -2}, 400),
    "empty": (COMPLETIONS, {"prompt": ""}, 400),
    "options without stream": (COMPLETIONS, {"prompt": LONG, "stream_options": {}}, 400),
    "unknown model": (COMPLETIONS, {"prompt": LONG, "model": "other"}, 404),
    "unknown model in chat": (CHAT, {**chat(LONG), "model": "other"}, 404),
}

_INDEX = re.compile(rb'"index":(\d+)')
_TRANSFER = re.compile(rb'"kv_transfer_params":(null|\{"kvpool":\{[^}]*\}\})')


def said(reply: Reply) -> list[bytes]:
    """Return a reply's payloads by choice, without `kv_transfer_params`.

    The reference engine has no pool, and payloads of several choices interleave in any order.
    """
    plain = [_TRANSFER.sub(b"", each) for each in reply.plain()]
    return sorted(plain, key=lambda each: [int(index) for index in _INDEX.findall(each)])


def assert_same(through: Reply, direct: Reply, what: str) -> None:
    assert through.status == direct.status, what
    assert said(through) == said(direct), what
    headers, own = (
        {name.lower(): each for name, each in reply.headers.items() if name != "Date"}
        for reply in (through, direct)
    )
    own |= {name: headers[name] for name in ("content-length",) if name in headers}
    assert headers == own, what
    assert len(through.headers.getall("Date")) == 1, what


async def compared(rig: RouterRig, body: Body, path: str, headers: Any = None) -> Reply:
    """Assert that router and engine give the same reply, and return the engine's."""
    through = await rig.complete(body, path, headers)
    direct = await rig.complete(body, path, headers, rig.reference)
    assert_same(through, direct, f"{path} {headers} {str(body)[-200:]}")
    return direct


async def test_answers_and_streams_are_those_of_the_engine() -> None:
    stream = {"stream": True}
    async with RouterRig(1, 2) as rig:
        for name, (path, body) in BODIES.items():
            for more in ({}, stream, {**stream, **USAGE}):
                direct = await compared(rig, {**body, **more}, path)
                assert direct.status == 200, (name, direct.body)
        for path, body in (BODIES["long"], BODIES["chat"]):
            await compared(rig, {**body, **stream, **CONTINUOUS}, path)


async def test_errors_are_those_of_the_engine() -> None:
    async with RouterRig(1, 1) as rig:
        for name, (path, body, status) in BAD.items():
            for more in ({}, {"stream": True}):
                if not ("stream_options" in body and more):
                    direct = await compared(rig, {**body, **more}, path)
                    assert direct.status == status, (name, direct.body)
        assert not rig.counts.keys() & {"given_up", "resumed"}


@pytest.mark.parametrize("n", [10**9, 10**30, 10**400], ids=["9", "30", "400"])
async def test_more_choices_than_any_engine_gives_are_refused_at_once(n: int) -> None:
    """Such a request does not wait for room, which would block others, and reaches no engine."""
    async with RouterRig(1, 1) as rig:
        long = asyncio.create_task(rig.stream({"prompt": SHORT, "max_tokens": 3000}))
        await rig.until(lambda: rig.holders() == [1], "it is decoded")
        through = await rig.complete({"prompt": SHORT, "n": n})
        assert rig.holders() == [1], "the other has ended meanwhile"
        direct = await rig.complete({"prompt": SHORT, "n": n}, at=rig.reference)
        for reply in (through, direct):
            assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "n", 400)
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


async def test_a_model_that_no_engine_lists_costs_no_prefill() -> None:
    async with RouterRig(1, 1) as rig:
        before = rig.engines[0].counts.received[COMPLETIONS]
        reply = await rig.complete({"prompt": LONG, "model": "other"})
        assert reply.status == 404
        assert rig.engines[0].counts.received[COMPLETIONS] == before
        assert rig.engines[1].counts.received[COMPLETIONS] == before + 1


async def test_keys_are_passed_on_and_judged_by_the_engine() -> None:
    async with RouterRig(1, 1, spec=KEYED, api_key="secret") as rig:
        good = {"Authorization": "Bearer secret"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, good):
            direct = await compared(rig, {"prompt": LONG}, COMPLETIONS, headers)
            assert direct.status == (200 if headers is good else 401)
            models = await rig.ask("GET", "/v1/models", headers=headers)
            assert models.status == direct.status
        assert rig.engines[0].counts.asked["max_tokens"] == 1, "it has computed a prompt"


async def test_headers_go_on_but_for_those_of_the_connection() -> None:
    async with RouterRig(1, 1) as rig:
        headers = {
            **{"X-Request-Id": "mine", "X-Tenant": "blue", "User-Agent": "it"},
            **{"Connection": "X-Secret", "X-Secret": "1", "Accept-Encoding": "gzip"},
        }
        for more in ({}, {"stream": True}):
            reply = await rig.complete({"prompt": LONG, **more}, headers=headers)
            assert reply.chunks[0]["id"] == "cmpl-mine"
            assert reply.headers["Server"] == "uvicorn"
            got = rig.engines[1].counts.last_headers
            wanted = {"x-request-id": "mine", "x-tenant": "blue", "user-agent": "it"}
            assert got.items() >= wanted.items()
            assert not got.keys() & {"accept-encoding", "x-secret"}
            assert got["host"] in rig.engines[1].url


@pytest.mark.parametrize("trusts", [False, True])
async def test_clients_steer_engines_where_they_are_trusted(trusts: bool) -> None:
    steering = {"priority": 0, "ec_transfer_params": {"peer": "tcp://10.9.9.9:1"}}
    headers = {"X-data-parallel-rank": "7", "X-Vllm-Priority": "-9", "X-Tenant": "blue"}

    async with RouterRig(1, 1, **(TRUSTING if trusts else {})) as rig:
        for path, body in (BODIES["long"], BODIES["chat"], BODIES["short"]):
            for stream in (True, False):
                asked = {**body, **steering, **WISHES, "stream": stream, "stop": ["zz"]}
                assert (await rig.complete(asked, path, headers)).status == 200
                got = rig.engines[1].counts
                told = [name in got.last_headers for name in map(str.lower, headers)]
                assert told == [trusts, trusts, True]
                for name in steering:
                    assert (name in got.asked) is trusts
                said = (got.asked.get("kv_transfer_params") or {}).get("kvpool", {})
                assert ("save" in said) is trusts
                assert got.asked["stop"] == ["zz"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "headers", "expected"),
    [
        ("mine", {}, "cmpl-mine"),
        ("mine", {"X-Request-Id": "header"}, "cmpl-header"),
        ("no\nheader", {}, "cmpl-[0-9a-f]{32}"),
    ],
)
async def test_answer_is_named_after_request_id_of_its_client(
    given: str, headers: dict[str, str], expected: str, stream: bool
) -> None:
    """The router's own `X-Request-Id` replaced the client's `request_id`."""
    async with RouterRig(1, 1) as rig:
        body = {"model": "scripted", "prompt": "hello", "stream": stream, "request_id": given}
        async with rig.session.post(rig.url + COMPLETIONS, json=body, headers=headers) as got:
            assert re.search(f'"id": ?"{expected}"', await got.text())


async def test_every_request_has_an_id() -> None:
    async with RouterRig(1, 1) as rig:
        ids = [(await rig.complete({"prompt": SHORT})).chunks[0]["id"] for _ in range(3)]
        assert len(set(ids)) == 3
        assert rig.engines[1].counts.last_headers["x-request-id"] == ids[-1].removeprefix("cmpl-")


# Answers in one piece


@pytest.mark.alone
@pytest.mark.parametrize("more", [{}, {"prompt_logprobs": 0}], ids=["assembled", "unstreamed"])
async def test_answers_in_one_piece_count_as_begun_when_they_are(more: Body) -> None:
    """Such answers counted as starting until their end.

    Only 16 ran at a time, and the time of decoding was learned as the time of prefill.
    """
    spec = ScriptedSpec(step_base_s=0.004, decode_sequence_s=0)
    async with RouterRig(0, 1, spec=spec) as rig:
        rates = rig.router.controller.state.rates
        prior = rates.snapshot(0.0).local_prefill_s_per_token
        for number in range(4):
            body = {"prompt": f"{number} {SHORT}", "max_tokens": 40, **more}
            await rig.complete(body)
        bodies = [{"prompt": f"hello {n}", "max_tokens": 150, **more} for n in range(40)]
        began = time.monotonic()
        replies = await asyncio.gather(*map(rig.complete, bodies))
        took_s = time.monotonic() - began
        assert {each.status for each in replies} == {200}
        engine = rig.engines[0]
        assert engine.counts.max_running > 16, "no more than may be starting at a time"
        assert engine.counts.asked.get("stream", False) is not bool(more)
        learned = rates.snapshot(0.0).local_prefill_s_per_token
        assert learned == prior if more else True, "what is not seen is not learned"
        waits = rig.router.controller.state.counts.waits
        assert bool(waits) is not bool(more)
        # However busy the machine is: all of them begin before the first 150 tokens are there.
        assert max(waits, default=0.0) < took_s / 2, "counted from their ends"


# Hand-over


async def test_a_long_prompt_is_computed_by_one_engine_and_decoded_by_another() -> None:
    async with RouterRig(1, 1, **TRUSTING) as rig:
        prefill, decode = rig.engines
        before = prefill.counts.received[COMPLETIONS]
        wish = {"kv_transfer_params": {"kvpool": {"expect_timeout_ms": 7777}}}
        reply = await rig.stream({"prompt": LONG, "stop": ["zzz"], "seed": 3, **USAGE, **wish})
        assert reply.is_done
        assert prefill.counts.received[COMPLETIONS] == before + 1
        asked = prefill.counts.asked
        assert (asked["max_tokens"], asked["stream"], asked["prompt"]) == (1, False, LONG)
        told = {"hand_over": True, "expect_timeout_ms": 7777}
        assert asked["kv_transfer_params"] == {"kvpool": told}
        assert "stop" not in asked
        assert prefill.counts.last_headers["x-request-id"].endswith("-prefill")
        chunks = reply.usage["prompt_tokens"] // rig.spec.chunk_tokens
        assert chunks > 3
        options = decode.counts.asked["kv_transfer_params"]["kvpool"]
        assert options["expect_tokens"] == EVERYTHING
        assert tuple(options["notices"]) == rig.spec.notices
        assert options["expect_timeout_ms"] == 7777, "the client's own wish stays"
        core = decode.running
        assert core.batch.counts.pool_hit_tokens == chunks * rig.spec.chunk_tokens


async def test_a_prompt_takes_longer_than_an_engine_may_be_silent_in_a_stream() -> None:
    """A prefill says nothing until it is done; it was lost after `engine_timeout_s`."""
    spec = ScriptedSpec(prefill_tokens_per_s=300)
    async with RouterRig(
        1, 1, spec=spec, front={"engine_timeout_s": 1.0, "answer_timeout_s": 60.0}
    ) as rig:
        before = rig.engines[0].counts.received[COMPLETIONS]
        began = time.monotonic()
        reply = await rig.complete({"prompt": LONG, "max_tokens": 4, "stream": True})
        assert time.monotonic() - began > 1.5
        assert reply.is_done
        assert rig.engines[0].counts.received[COMPLETIONS] == before + 1
        assert rig.counts["served"] == 1
        assert not rig.counts.keys() & {"resumed", "given_up"}


async def test_a_short_prompt_and_one_that_the_pool_has_are_not_handed_over() -> None:
    async with RouterRig(1, 1) as rig:
        before = rig.engines[0].counts.received[COMPLETIONS]
        await rig.complete({"prompt": SHORT})
        assert rig.engines[0].counts.received[COMPLETIONS] == before
        assert "kv_transfer_params" not in rig.engines[1].counts.asked
        for _ in range(3):
            await rig.complete({"prompt": LONG})
        assert rig.engines[0].counts.received[COMPLETIONS] == before + 1


async def test_what_is_learned_makes_estimates_exact() -> None:
    async with RouterRig(1, 1, flow={"hands_over": False}) as rig:
        rates = rig.router.controller.state.rates
        for number in range(12):
            body = {"prompt": f"{number} {LONG}", "stream": number % 2 == 0}
            reply = await rig.complete({**body, **({**USAGE} if number % 2 == 0 else {})})
        exact = reply.usage["prompt_tokens"] / (len(LONG) + 3)
        assert abs(rates.snapshot(0.0).tokens_per_byte - exact) < 0.02 * exact


# Clients that go


async def _gone(rig: RouterRig, body: Body, phase: Phase, at: int | None) -> None:
    """Send a request, and disconnect in this phase, when engine `at` has the request."""
    state = rig.router.controller.state
    known = set(state.requests)
    aborted = rig.engines[at].counts.aborted if at is not None else 0
    task = asyncio.ensure_future(rig.complete(body))
    await rig.until(lambda: set(state.requests) - known, "it has arrived")
    (name,) = set(state.requests) - known
    await rig.until(lambda: state.requests[name].phase is phase, f"it is {phase}")
    if at is not None:
        await rig.until(lambda: rig.engines[at].board.faults() == [], "its engine has it")
    task.cancel()
    await rig.until(lambda: name not in state.requests, "the controller has forgotten it")
    await rig.until(lambda: len(rig.router._open) == len(known), "no exchange is left")
    if at is not None:
        await rig.until(lambda: rig.engines[at].counts.aborted == aborted + 1, "it is aborted")
    check_controller(rig.router.controller)


@pytest.mark.parametrize(
    ("spec", "phase"), [(FAST, Phase.DECODING), (replace(FAST, notices=None), Phase.PREFILLING)]
)
async def test_a_client_that_goes_while_its_prompt_is_computed(
    spec: ScriptedSpec, phase: Phase
) -> None:
    async with RouterRig(1, 1, spec=spec) as rig:
        for stream in (True, False):
            rig.fail(0, FaultKind.STALL, after_tokens=0, times=1)
            await _gone(rig, {"prompt": LONG, "stream": stream}, phase, 0)
            await rig.until(lambda: not rig.holders(), "neither engine has it")
        assert rig.counts["cancelled"] == 2
        assert (await rig.complete({"prompt": LONG})).status == 200


async def test_a_client_that_goes_before_its_first_token() -> None:
    async with RouterRig(1, 1) as rig:
        for kind in (FaultKind.STALL, FaultKind.HANG):
            for stream in (True, False):
                rig.fail(1, kind, times=1)
                await _gone(rig, {"prompt": LONG, "stream": stream}, Phase.DECODING, 1)
        assert rig.counts["cancelled"] == 4


async def test_a_client_that_goes_while_it_waits() -> None:
    async with RouterRig(1, 1, flow={"prefill_tokens": 1, "decode_requests": 1}) as rig:
        rig.fail(0, FaultKind.STALL, after_tokens=0, times=1)
        first = asyncio.ensure_future(rig.complete({"prompt": LONG}))
        await rig.until(lambda: not rig.engines[0].board.faults(), "the first is computed")
        await _gone(rig, {"prompt": "two" + LONG, "stream": True}, Phase.QUEUED, None)
        first.cancel()
        await rig.check_idle()
        rig.fail(1, FaultKind.STALL, after_tokens=0, times=1)
        first = asyncio.ensure_future(rig.complete({"prompt": LONG}))
        await rig.until(lambda: not rig.engines[1].board.faults(), "the first is decoded")
        await _gone(rig, {"prompt": "two" + LONG, "stream": True}, Phase.HANDING, None)
        first.cancel()


async def test_a_client_that_goes_in_mid_stream() -> None:
    async with RouterRig(1, 1) as rig:
        for path, body in ((COMPLETIONS, {"prompt": LONG}), (CHAT, chat(LONG))):
            asked = rig.body({**body, "stream": True, "max_tokens": 4000})
            aborted = rig.engines[1].counts.aborted
            got = await rig.session.post(rig.url + path, json=asked)
            await got.content.readany()
            assert rig.holders() == [1]
            got.close()
            await rig.until(lambda: rig.engines[1].counts.aborted == aborted + 1, "aborted")  # noqa: B023
            await rig.until(lambda: not rig.holders(), "its engine is idle")
            assert rig.engines[1].counts.tokens < 3000
        assert rig.counts["cancelled"] == 2
        assert "resumed" not in rig.counts


async def test_a_client_that_reads_nothing_is_let_go_and_its_engine_is_not_blamed() -> None:
    spec = ScriptedSpec(step_base_s=0.0005, max_model_len=60_000)
    async with RouterRig(1, 1, spec=spec, front={"client_timeout_s": 0.3}) as rig:
        asked = {"prompt": SHORT, "stream": True, "max_tokens": 50_000, "n": 32}
        data = msgspec.json.encode(rig.body(asked))
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", rig.router.front_port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        client.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data))
        client.sendall(data)
        await rig.until(rig.holders, "its engine has it")
        await rig.until(lambda: not rig.holders(), "it is let go")
        assert rig.counts["cancelled"] == 1
        assert "resumed" not in rig.counts
        assert rig.state(1) is State.DECODE
        client.close()


async def test_a_stream_that_ends_as_its_replica_is_given_up_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order to give it up comes when its last event has been read."""
    feed = StreamResumer.feed

    async with RouterRig(0, 2) as rig:
        body = {"prompt": SHORT, "stream": True, "max_tokens": 4}
        direct = await rig.direct(body)

        def give_up(resumer: StreamResumer, payload: bytes) -> list[bytes]:
            fed = feed(resumer, payload)
            if payload == DONE:
                (found,) = rig.router._open.values()
                (request,) = rig.router.controller.state.requests.values()
                assert request.replica is not None
                found.abort(request.replica)
            return fed

        monkeypatch.setattr(StreamResumer, "feed", give_up)
        assert_same(await rig.complete(body), direct, "given up at its end")
