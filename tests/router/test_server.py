"""The router's HTTP server: clients of all kinds, and the answers that they get."""

import asyncio
import contextlib
import gzip
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.router.test_request_body import BAD
from tests.support.player import chunk
from tests.support.router_rig import CHAT, COMPLETIONS, RouterRig
from tests.support.scripted_spec import FaultKind
from vllm_kvpool.router.control.events import Tick
from vllm_kvpool.router.control.states import ReplicaId, State
from vllm_kvpool.router.dataplane.data_plane import _SALTED, COUNT_TOKENS
from vllm_kvpool.router.dataplane.headers import MAX_HEADER_BYTES

ASK = b'{"model":"scripted","prompt":"hello","max_tokens":2,"temperature":0}'
TEXT = {"model": "scripted", "prompt": "hello"}
HASTY = {"front": {"read_timeout_s": 0.3}}
CLOSE, CHUNKED = b"Connection: close", b"Transfer-Encoding: chunked"


def head_of(*headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = (b"POST /v1/completions HTTP/" + version, b"Host: x", b"Content-Type: application/json")
    return b"\r\n".join((*lines, *headers, b"", b""))


def post(body: bytes = ASK, *headers: bytes, version: bytes = b"1.1") -> bytes:
    return head_of(*headers, b"Content-Length: %d" % len(body), version=version) + body


def status(answer: bytes) -> int:
    assert answer, "nothing was answered"
    return int(answer.split(b" ", 2)[1])


def error(answer: bytes) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(answer.split(b"\r\n\r\n", 1)[1])["error"]
    return found


# What it answers itself


async def test_what_may_be_read() -> None:
    async with RouterRig(1, 1) as rig:
        for path in ("/health", "/v1/models", "/metrics"):
            assert (await rig.ask("GET", path)).status == 200, path
            head = await rig.ask("HEAD", path)
            assert (head.status, head.body) == (200, b""), path
            refused = await rig.ask("POST", path)
            assert (refused.status, refused.headers["Allow"]) == (405, "GET, HEAD"), path
        for at in (None, rig.reference):
            models = (await rig.ask("GET", "/v1/models", at=at)).json["data"]
            assert [each["id"] for each in models] == ["scripted"]
        for method in ("GET", "OPTIONS", "HEAD", "PUT", "DELETE", "PATCH"):
            for path in (COMPLETIONS, CHAT):
                refused = await rig.ask(method, path)
                assert (refused.status, refused.headers["Allow"]) == (405, "POST"), (method, path)
        for path in ("/", "/v1/nothing", "/admin", "//v1/completions", "/%2e%2e/etc"):
            refused = await rig.ask("POST", path, ASK)
            assert refused.status == refused.json["error"]["code"] == 404, path


async def test_clients_see_no_replica_and_no_address_in_metrics() -> None:
    async with RouterRig(1, 1) as rig:
        await rig.stream({"prompt": "hello"})
        text = (await rig.ask("GET", "/metrics")).body.decode()
        assert "kvpool_router_arrivals_total 1.0" in text
        assert "replica=" not in text
        for engine in rig.engines:
            assert engine.url.partition("//")[2] not in text
        admin = f"http://127.0.0.1:{rig.router.admin_port}/metrics"
        async with rig.session.get(admin) as got:
            assert got.status == 401


async def test_what_decodes_nothing_is_answered_by_an_engine_of_the_model() -> None:
    async with RouterRig(1, 1) as rig:
        for path, body in (("/tokenize", TEXT), ("/detokenize", {"tokens": [5, 6, 7]})):
            wanted = await rig.ask("POST", path, body, at=rig.reference)
            got = await rig.ask("POST", path, body)
            assert (got.status, got.json) == (200, wanted.json), path
        assert (await rig.ask("GET", "/version")).json["version"]
        assert (await rig.ask("GET", "/ping")).status == 200
        # The engine says what it does not serve.
        for path in (COUNT_TOKENS, *_SALTED):
            assert (await rig.ask("POST", path, TEXT)).status == 404
            assert sum(each.counts.received[path] for each in rig.engines) == 1, path
        for raw, why in ((b"{", "JSON"), (b"[]", "JSON"), (b'{"model": 7}', "model")):
            refused = await rig.ask("POST", "/tokenize", raw)
            assert refused.status == 400, raw
            assert why in refused.json["error"]["message"]
        assert not rig.router.controller.state.requests
        # One that cannot be reached is passed over; one that breaks off may have begun.
        for number, status in ((0, 200), (1, 503)):
            rig.kill(number)
            assert (await rig.ask("POST", "/tokenize", TEXT)).status == status


async def test_without_engines_it_is_not_ready() -> None:
    async with RouterRig(1, 1) as rig:
        for number in (0, 1):
            rig.kill(number)
        fleet = rig.router.controller.state.fleet
        await rig.until(lambda: not (fleet.decoders() or fleet.prefillers()), "noticed")
        for path in ("/health", "/v1/models"):
            assert (await rig.ask("GET", path)).status == 503
        reply = await rig.complete({"prompt": "hello"})
        assert reply.status == 503
        assert int(reply.headers["Retry-After"]) >= 1
        await rig.recovered(0, 1)
        assert (await rig.complete({"prompt": "hello"})).status == 200


# Bodies


async def test_bodies_that_cannot_be_served_are_bad_requests() -> None:
    async with RouterRig(1, 1, front={"trust_clients": True}) as rig:
        json = {"Content-Type": "application/json"}
        options = TEXT | {"stream": True, "stream_options": "y"}
        engines = (COMPLETIONS, msgspec.json.encode(options))  # which refuse it
        for path, body in (engines, *((kind.value, raw) for kind, raw, *_ in BAD)):
            reply = await rig.ask("POST", path, body, json)
            assert reply.status == 400, (path, body[:100], reply)
            assert reply.json["error"]["code"] == 400, (path, body[:100])
        assert (await rig.complete({"prompt": "x"})).status == 200
        assert not rig.router.controller.state.requests


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@asynccontextmanager
async def memory_stays_below(limit_bytes: int) -> AsyncIterator[None]:
    """Assert that memory grows by less than the limit in the meantime."""
    before = most = resident_bytes()

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, resident_bytes())
            await asyncio.sleep(0.005)

    looking = asyncio.ensure_future(look())
    yield
    looking.cancel()
    assert most - before < limit_bytes, f"memory has grown by {(most - before) >> 20} MiB"


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_of_100_megabytes_is_refused_and_not_kept(is_chunked: bool) -> None:
    async with (
        RouterRig(1, 1, front={"max_body_bytes": 1 << 20}) as rig,
        memory_stays_below(24 << 20),
    ):
        client = await rig.connect()
        client.send(head_of(CHUNKED if is_chunked else b"Content-Length: %d" % (100 << 20)))
        piece = b"x" * (64 << 10)

        async def send() -> None:
            for _ in range((100 << 20) // len(piece)):
                client.send(chunk(piece) if is_chunked else piece)
                await client.writer.drain()

        sending = asyncio.ensure_future(send())
        answer = await client.head()
        assert status(answer) == 413
        assert b"connection: close" in answer.lower()
        sending.cancel()
        client.close()
        await rig.until(lambda: rig.data_plane.server.held_bytes == 0, "nothing is kept")


async def test_a_body_at_the_limit_is_served_and_one_beyond_it_is_not() -> None:
    async with RouterRig(1, 1, front={"max_body_bytes": 20_000}) as rig:
        for size, expected in ((20_000, 200), (20_001, 413)):
            room = size - len(ASK) - len(b',"user":""')
            body = ASK[:-1] + b',"user":"%b"}' % (b"x" * room)
            assert len(body) == size
            assert status(await rig.raw(post(body, CLOSE))) == expected


async def test_all_bodies_together_are_bounded() -> None:
    async with RouterRig(
        1, 1, front={"max_body_bytes": 1 << 20, "max_bodies_bytes": 6 << 20}
    ) as rig:
        slow = [await rig.connect() for _ in range(3)]
        for client in slow:
            client.send(post(b"x" * (1 << 20))[:-10])
        await rig.until(lambda: rig.data_plane.server.held_bytes > 3 * ((1 << 20) - 100), "read")
        answer = await rig.raw(post(b"x" * 1000))
        assert status(answer) == 503
        assert b"Retry-After: 1" in answer
        for client in slow:
            client.close()
        await rig.until(lambda: rig.data_plane.server.held_bytes == 0, "nothing is kept")
        assert (await rig.complete({"prompt": "x"})).status == 200


async def test_packed_bodies_are_refused() -> None:
    bomb = gzip.compress(b'{"model":"scripted","prompt":"' + b" " * (100 << 20), 1)
    async with RouterRig(1, 1) as rig, memory_stays_below(24 << 20):
        for encoding in (b"gzip", b"deflate", b"br", b"zstd", b"GZIP"):
            answer = await rig.raw(post(bomb, b"Content-Encoding: " + encoding))
            assert status(answer) == 415
            assert error(answer)["code"] == 415
        assert status(await rig.raw(post(ASK, b"Content-Encoding: identity", CLOSE))) == 200


async def test_a_client_may_ask_before_it_sends() -> None:
    async with RouterRig(1, 1, front={"max_body_bytes": 1000}) as rig:
        client = await rig.connect()
        client.send(post(ASK, b"Expect: 100-continue")[: -len(ASK)])
        assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(ASK)
        assert status(await client.head()) == 200
        answer = await rig.raw(post(b"x" * 1001, b"Expect: 100-continue"))
        assert status(answer) == 413, "at once, and without the body"


# Connections


@pytest.mark.alone
async def test_clients_that_are_too_slow_are_let_go_while_others_are_served() -> None:
    """Before a whole head without an answer, then with one."""
    beginnings = {
        "nothing": (b"", 0),
        "half a head": (post()[:30], 0),
        "no body": (post()[: -len(ASK)], 408),
        "half a body": (post()[:-5], 408),
        "half a chunk": (head_of(CHUNKED) + b"8\r\nab", 408),
    }
    async with RouterRig(1, 1, **HASTY) as rig:
        slow = {name: await rig.connect() for name in beginnings}
        for name, (beginning, _) in beginnings.items():
            slow[name].send(beginning)
        assert (await rig.complete({"prompt": "x"})).status == 200
        for name, (_, expected) in beginnings.items():
            answer = await slow[name].rest()
            assert (status(answer) if answer else 0) == expected, name


DRIPPED = {
    "head": post(ASK, b"X-Long: " + b"x" * 1000).partition(b"\r\n\r\n")[0],
    "empty lines": b"\r\n" * 600,
}


@pytest.mark.alone
@pytest.mark.parametrize("name", DRIPPED)
async def test_a_head_that_drips_does_not_win_time(name: str) -> None:
    async with RouterRig(1, 1, **HASTY) as rig:
        client, head, num_sent = await rig.connect(), DRIPPED[name], 0
        with contextlib.suppress(ConnectionError, RuntimeError):  # uvloop, of a closed one
            while not client.reader.at_eof() and num_sent < len(head):
                client.send(head[num_sent : num_sent + 1])
                num_sent += 1
                await asyncio.sleep(0.01)
        assert num_sent < len(head)


@pytest.mark.alone
async def test_a_second_request_must_come_in_time_too() -> None:
    async with RouterRig(1, 1, **HASTY) as rig:
        client = await rig.connect()
        for _ in range(2):
            client.send(post())
            head = await client.head()
            assert status(head) == 200
            await client.exactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            await asyncio.sleep(0.5)  # it may rest between two
        client.send(post()[:30])
        assert await client.rest() == b""


async def test_more_connections_than_allowed_are_closed() -> None:
    async with RouterRig(1, 1, front={"max_connections": 20}) as rig:
        idle = [await rig.connect() for _ in range(20)]
        surplus = await rig.connect()
        surplus.send(post())
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await surplus.head()
        idle[0].send(post(ASK, CLOSE))
        assert status(await idle[0].rest()) == 200
        assert status(await rig.raw(post(ASK, CLOSE))) == 200


# HTTP

GET, POST = b"GET /health HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\n"
RUBBISH = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
    "words": b"hello there\r\n\r\n",
    "HTTP/9": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "long line": b"GET /" + b"x" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "long header": GET + b"Host: x\r\nX: " + b"x" * (2 * MAX_HEADER_BYTES) + b"\r\n\r\n",
    "many headers": GET + b"X: y\r\n" * 2000 + b"\r\n",
    "negative length": POST + b"Content-Length: -5\r\n\r\n",
}


async def test_what_is_no_http_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with RouterRig(1, 1, **HASTY) as rig:
        for name, data in RUBBISH.items():
            answer = await rig.raw(data)
            assert status(answer) == 400, (name, answer)
            assert error(answer)["code"] == 400, name
        assert (await rig.complete({"prompt": "x"})).status == 200
    assert "Traceback" not in caplog.text, "anybody could fill the log"


async def test_http_1_0_is_served() -> None:
    async with RouterRig(1, 1) as rig:
        answer = await rig.raw(post(version=b"1.0"))
        assert status(answer) == 200
        assert msgspec.json.decode(answer.split(b"\r\n\r\n", 1)[1])["choices"]
        streamed = await rig.raw(post(ASK[:-1] + b',"stream":true}', version=b"1.0"))
        assert b"Transfer-Encoding" not in streamed
        assert streamed.endswith(b"data: [DONE]\n\n")
        # One that would keep its connection: only that of a stream must be closed.
        keeping = b"Connection: keep-alive"
        both = post(ASK, keeping, version=b"1.0")
        both += post(ASK[:-1] + b',"stream":true}', keeping, version=b"1.0")
        answer = await rig.raw(both)
        assert answer.count(b"HTTP/1.0 200 OK") == 2
        assert answer.endswith(b"data: [DONE]\n\n")


async def test_requests_one_behind_the_other_are_answered_in_their_order() -> None:
    async with RouterRig(1, 1) as rig:
        asked = [b"X-Request-Id: number-%d" % number for number in range(20)]
        data = b"".join(post(ASK, each) for each in asked[:-1])
        answer = await rig.raw(data + post(ASK, asked[-1], b"Connection: close"))
        places = [answer.find(b'cmpl-number-%d"' % number) for number in range(20)]
        assert -1 not in places
        assert places == sorted(places)


MANY: dict[str, dict[str, object]] = {
    "n": {"prompt": "x", "n": 16_384},
    "best of": {"prompt": "x", "best_of": 300},
    "beam width": {"prompt": "x", "n": 300, "use_beam_search": True},
    "prompts": {"prompt": ["x"] * 300},
    "prompts of ids": {"prompt": [[5, 6]] * 300},
    "prompts times choices": {"prompt": ["x"] * 20, "n": 20},
}


@pytest.mark.parametrize("name", MANY)
async def test_request_of_more_sequences_than_a_decoder_takes_is_refused(name: str) -> None:
    """A request with `n` = 16384 blocked other requests for eight seconds."""
    async with RouterRig(0, 1) as rig:
        before = rig.engines[0].counts.received[COMPLETIONS]
        reply = await rig.complete(MANY[name])
        assert reply.status == 400
        assert "flow.decode_requests" in reply.error["message"]
        assert rig.engines[0].counts.received[COMPLETIONS] == before
        assert (await rig.complete({"prompt": ["x", "y"], "n": 2, "max_tokens": 1})).status == 200


@pytest.mark.parametrize(
    "target", ["/tokenize/", "/%74okenize", "/%74okenize/?a=1", "http://x/tokenize/", "/tokenize"]
)
async def test_target_that_vllm_understands_finds_its_route(target: str) -> None:
    """vLLM's server decodes paths, and redirects those that end in a slash."""
    async with RouterRig(0, 1) as rig:
        answer = await rig.raw(post(ASK, CLOSE).replace(b"/v1/completions", target.encode(), 1))
        assert status(answer) == 200


async def test_forwarded_answer_may_take_as_long_as_any_in_one_piece() -> None:
    """An engine that needed more than `front.engine_timeout_s` for many texts was given up."""
    front = {"engine_timeout_s": 0.2, "answer_timeout_s": 60.0}
    async with RouterRig(0, 1, front=front) as rig:
        rig.fail(0, FaultKind.SLOW, seconds=0.5, paths=("/tokenize",))
        assert (await rig.ask("POST", "/tokenize", TEXT)).status == 200


async def test_forwarded_requests_are_spread_over_engines_that_are_equally_busy() -> None:
    async with RouterRig(0, 2) as rig:
        for _ in range(64):
            assert (await rig.ask("POST", "/tokenize", TEXT)).status == 200
        assert all(each.counts.received["/tokenize"] for each in rig.engines)


async def test_forwarded_requests_go_to_a_standby_only_if_no_other_engine_answers() -> None:
    """A replica that drains has least to do, and got all that was forwarded until its end."""
    async with RouterRig(0, 2) as rig:
        controller = rig.router.controller
        controller.lifecycle.drain(controller.state.fleet[ReplicaId("r0")], "planned")
        rig.router.post(Tick())
        assert rig.state(0) is State.SHUTTING_NULL
        for number, wanted in ((0, 0), (1, 1)):
            for _ in range(16):
                assert (await rig.ask("POST", "/tokenize", TEXT)).status == 200
            assert bool(rig.engines[0].counts.received["/tokenize"]) is bool(wanted)
            if not number:
                rig.kill(1)
