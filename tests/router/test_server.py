"""What clients can do to the router, and what they are told."""

import asyncio
import contextlib
import gzip
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.support.router_rig import CHAT, COMPLETIONS, RouterRig, run
from tests.support.scripted_spec import FaultKind
from vllm_kvpool.router.control.events import Drain
from vllm_kvpool.router.control.states import ReplicaId, State
from vllm_kvpool.router.dataplane.data_plane import _SALTED, COUNT_TOKENS
from vllm_kvpool.router.dataplane.headers import MAX_HEADER_BYTES

JSON_HEAD = b"Content-Type: application/json\r\n"
ASK = b'{"model":"scripted","prompt":"hello","max_tokens":2,"temperature":0}'
HASTY = {"front": {"read_timeout_s": 0.3}}


def post(body: bytes = ASK, *headers: bytes, version: bytes = b"1.1") -> bytes:
    head = b"POST /v1/completions HTTP/%b\r\nHost: x\r\n%b" % (version, JSON_HEAD)
    more = b"".join(each + b"\r\n" for each in headers)
    return head + more + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


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
            async with rig.session.get(rig.url + path) as got:
                assert got.status == 200, path
            async with rig.session.head(rig.url + path) as got:
                assert got.status == 200, path
                assert await got.read() == b""
            async with rig.session.post(rig.url + path) as got:
                assert got.status == 405, path
                assert got.headers["Allow"] == "GET, HEAD"
        async with rig.session.get(rig.url + "/v1/models") as got:
            models = msgspec.json.decode(await got.read())
        async with rig.session.get(rig.reference.url + "/v1/models") as got:
            assert msgspec.json.decode(await got.read())["data"][0]["id"] == "scripted"
        assert [each["id"] for each in models["data"]] == ["scripted"]
        for method in ("GET", "OPTIONS", "HEAD", "PUT", "DELETE", "PATCH"):
            for path in (COMPLETIONS, CHAT):
                async with rig.session.request(method, rig.url + path) as got:
                    assert got.status == 405, (method, path)
                    assert got.headers["Allow"] == "POST"
        for path in ("/", "/v1/nothing", "/admin", "//v1/completions", "/%2e%2e/etc"):
            async with rig.session.post(rig.url + path, data=ASK) as got:
                assert got.status == 404, path
                assert (await got.json())["error"]["code"] == 404


async def test_clients_see_no_replica_and_no_address_in_metrics() -> None:
    async with RouterRig(1, 1) as rig:
        await rig.stream({"prompt": "hello"})
        async with rig.session.get(rig.url + "/metrics") as got:
            text = await got.text()
        assert "kvpool_router_arrivals_total 1.0" in text
        assert "replica=" not in text
        for engine in rig.engines:
            assert engine.url.partition("//")[2] not in text
        admin = f"http://127.0.0.1:{rig.router.admin_port}/metrics"
        async with rig.session.get(admin) as got:
            assert got.status == 401


async def test_what_decodes_nothing_is_answered_by_an_engine_of_the_model() -> None:
    async with RouterRig(1, 1) as rig:
        text = {"model": "scripted", "prompt": "hello there"}
        for path, body in (("/tokenize", text), ("/detokenize", {"tokens": [5, 6, 7]})):
            async with rig.session.post(rig.reference.url + path, json=body) as got:
                wanted = await got.json()
            async with rig.session.post(rig.url + path, json=body) as got:
                assert (got.status, await got.json()) == (200, wanted), path
        async with rig.session.get(rig.url + "/version") as got:
            assert (await got.json())["version"]
        async with rig.session.get(rig.url + "/ping") as got:
            assert got.status == 200
        # The engine says what it does not serve.
        for path in (COUNT_TOKENS, *_SALTED):
            async with rig.session.post(rig.url + path, json=text) as got:
                assert got.status == 404
            assert sum(each.counts.received[path] for each in rig.engines) == 1, path
        for body, why in ((b"{", "JSON"), (b"[]", "JSON"), (b'{"model": 7}', "model")):
            async with rig.session.post(rig.url + "/tokenize", data=body) as got:
                assert got.status == 400, body
                assert why in (await got.json())["error"]["message"]
        assert not rig.router.controller.state.requests
        # One that cannot be reached is passed over; one that breaks off may have begun.
        rig.kill(0)
        async with rig.session.post(rig.url + "/tokenize", json=text) as got:
            assert got.status == 200
        rig.kill(1)
        async with rig.session.post(rig.url + "/tokenize", json=text) as got:
            assert got.status == 503


async def test_without_engines_it_is_not_ready() -> None:
    async with RouterRig(1, 1) as rig:
        for number in (0, 1):
            rig.kill(number)
        await rig.until(lambda: not rig.router.controller.state.fleet.decoders(), "noticed")
        await rig.until(lambda: not rig.router.controller.state.fleet.prefillers(), "noticed")
        for path in ("/health", "/v1/models"):
            async with rig.session.get(rig.url + path) as got:
                assert got.status == 503
        reply = await rig.complete({"prompt": "hello"})
        assert reply.status == 503
        assert int(reply.headers["Retry-After"]) >= 1
        for number in (0, 1):
            rig.restart(number)
        await rig.serving()
        assert (await rig.complete({"prompt": "hello"})).status == 200


# Bodies

WRONG = {
    "nothing": b"",
    "no JSON": b"{",
    "half": ASK[:-5],
    "a list": b"[]",
    "null": b"null",
    "text": b'"model"',
    "not UTF-8": b'{"model":"\xff"}',
    "another model": b'{"model":7,"prompt":"x"}',
    "model of numbers": b'{"model":5,"prompt":"x"}',
    "no prompt": b'{"model":"scripted"}',
    "prompt of an object": b'{"model":"scripted","prompt":{}}',
    "stream of text": b'{"model":"scripted","prompt":"x","stream":"sure"}',
    "n of text": b'{"model":"scripted","prompt":"x","n":"two"}',
    "n too large for a number": b'{"model":"scripted","prompt":"x","n":1e999}',
    "n of many digits": b'{"model":"scripted","prompt":"x","n":' + b"9" * 5000 + b"}",
    "max_tokens of a list": b'{"model":"scripted","prompt":"x","max_tokens":[]}',
    "transfer of text": b'{"model":"scripted","prompt":"x","kv_transfer_params":"y"}',
    "nested prompt": b'{"model":"scripted","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested stop": b'{"model":"scripted","prompt":"x","stream":true,"stop":'
    + (b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "nested options": b'{"model":"scripted","prompt":"x","stream":true,"stream_options":'
    + (b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"),
    "options of text": b'{"model":"scripted","prompt":"x","stream":true,"stream_options":"y"}',
    "NaN": b'{"model":"scripted","prompt":"x","temperature":NaN}',
}


async def test_bodies_that_cannot_be_served_are_bad_requests() -> None:
    async with RouterRig(1, 1, config={"front": {"trust_clients": True}}) as rig:
        for name, body in WRONG.items():
            for path in (COMPLETIONS, CHAT):
                headers = {"Content-Type": "application/json"}
                async with rig.session.post(rig.url + path, data=body, headers=headers) as got:
                    told = await got.read()
                    assert got.status == 400, (name, path, got.status, told[:500])
                    assert msgspec.json.decode(told)["error"]["code"] == 400, name
        assert (await rig.complete({"prompt": "x"})).status == 200
        assert not rig.router.controller.state.requests


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@asynccontextmanager
async def memory_stays_below(limit_bytes: int) -> AsyncIterator[None]:
    """More than now, at any moment that is looked at."""
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
    config = {"front": {"max_body_bytes": 1 << 20}}
    async with RouterRig(1, 1, config=config) as rig, memory_stays_below(24 << 20):
        reader, writer = await rig.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + JSON_HEAD
        if is_chunked:
            writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
        else:
            writer.write(head + b"Content-Length: %d\r\n\r\n" % (100 << 20))
        piece = b"x" * (64 << 10)
        frame = b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece

        async def send() -> None:
            for _ in range((100 << 20) // len(piece)):
                writer.write(frame)
                await writer.drain()

        sending = asyncio.ensure_future(send())
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert status(answer) == 413
        assert b"connection: close" in answer.lower()
        sending.cancel()
        writer.close()
        await rig.until(lambda: rig.data_plane.server.held_bytes == 0, "nothing is kept")


async def test_a_body_at_the_limit_is_served_and_one_beyond_it_is_not() -> None:
    config = {"front": {"max_body_bytes": 20_000}}
    async with RouterRig(1, 1, config=config) as rig:
        for size, expected in ((20_000, 200), (20_001, 413)):
            room = size - len(ASK) - len(b',"user":""')
            body = ASK[:-1] + b',"user":"%b"}' % (b"x" * room)
            assert len(body) == size
            answer = await rig.raw(post(body, b"Connection: close"))
            assert status(answer) == expected


async def test_all_bodies_together_are_bounded() -> None:
    config = {"front": {"max_body_bytes": 1 << 20, "max_bodies_bytes": 6 << 20}}
    async with RouterRig(1, 1, config=config) as rig:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (1 << 20)
        slow = [await rig.connect() for _ in range(3)]
        for _, writer in slow:
            writer.write(head + b"x" * ((1 << 20) - 10))
        await rig.until(lambda: rig.data_plane.server.held_bytes > 3 * ((1 << 20) - 100), "read")
        answer = await rig.raw(post(b"x" * 1000))
        assert status(answer) == 503
        assert b"Retry-After: 1" in answer
        for _, writer in slow:
            writer.close()
        await rig.until(lambda: rig.data_plane.server.held_bytes == 0, "nothing is kept")
        assert (await rig.complete({"prompt": "x"})).status == 200


async def test_packed_bodies_are_refused() -> None:
    bomb = gzip.compress(b'{"model":"scripted","prompt":"' + b" " * (100 << 20), 1)
    async with RouterRig(1, 1) as rig, memory_stays_below(24 << 20):
        for encoding in (b"gzip", b"deflate", b"br", b"zstd", b"GZIP"):
            answer = await rig.raw(post(bomb, b"Content-Encoding: " + encoding))
            assert status(answer) == 415
            assert error(answer)["code"] == 415
        answer = await rig.raw(post(ASK, b"Content-Encoding: identity", b"Connection: close"))
        assert status(answer) == 200


async def test_a_client_may_ask_before_it_sends() -> None:
    config = {"front": {"max_body_bytes": 1000}}
    async with RouterRig(1, 1, config=config) as rig:
        reader, writer = await rig.connect()
        whole = post(ASK, b"Expect: 100-continue")
        head, body = whole.split(b"\r\n\r\n", 1)
        writer.write(head + b"\r\n\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == (
            b"HTTP/1.1 100 Continue\r\n\r\n"
        )
        writer.write(body)
        assert status(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)) == 200
        writer.close()
        answer = await rig.raw(post(b"x" * 1001, b"Expect: 100-continue"))
        assert status(answer) == 413, "at once, and without the body"


# Connections


@pytest.mark.alone
async def test_clients_that_are_too_slow_are_let_go_while_others_are_served() -> None:
    async with RouterRig(1, 1, config=HASTY) as rig:
        whole = post(ASK)
        beginnings = {
            "nothing": b"",
            "half a head": whole[:30],
            "no body": whole[: -len(ASK)],
            "half a body": whole[:-5],
            "half a chunk": whole.split(b"Content-Length")[0]
            + b"Transfer-Encoding: chunked\r\n\r\n8\r\nab",
        }
        slow = {name: await rig.connect() for name in beginnings}
        for name, beginning in beginnings.items():
            slow[name][1].write(beginning)
        assert (await rig.complete({"prompt": "x"})).status == 200
        for name, (reader, writer) in slow.items():
            answer = await asyncio.wait_for(reader.read(), 5)
            if name in ("nothing", "half a head"):
                assert answer == b"", name
            else:
                assert status(answer) == 408, name
            writer.close()


DRIPPED = {
    "head": post(ASK, b"X-Long: " + b"x" * 1000).partition(b"\r\n\r\n")[0],
    "empty lines": b"\r\n" * 600,
}


@pytest.mark.alone
@pytest.mark.parametrize("name", DRIPPED)
async def test_a_head_that_drips_does_not_win_time(name: str) -> None:
    async with RouterRig(1, 1, config=HASTY) as rig:
        reader, writer = await rig.connect()
        head = DRIPPED[name]
        num_sent = 0
        with contextlib.suppress(ConnectionError, RuntimeError):  # uvloop, of a closed one
            while not reader.at_eof() and num_sent < len(head):
                writer.write(head[num_sent : num_sent + 1])
                num_sent += 1
                await asyncio.sleep(0.01)
        assert num_sent < len(head)
        writer.close()


@pytest.mark.alone
async def test_a_second_request_must_come_in_time_too() -> None:
    async with RouterRig(1, 1, config=HASTY) as rig:
        reader, writer = await rig.connect()
        for _ in range(2):
            writer.write(post(ASK))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert status(head) == 200
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await asyncio.wait_for(reader.readexactly(length), 5)
            await asyncio.sleep(0.5)  # it may rest between two
        writer.write(post(ASK)[:30])
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


async def test_more_connections_than_allowed_are_closed() -> None:
    config = {"front": {"max_connections": 20}}
    async with RouterRig(1, 1, config=config) as rig:
        idle = [await rig.connect() for _ in range(20)]
        reader, writer = await rig.connect()
        writer.write(post(ASK))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        idle[0][1].write(post(ASK, b"Connection: close"))
        assert status(await asyncio.wait_for(idle[0][0].read(), 5)) == 200
        reader, writer = await rig.connect()
        writer.write(post(ASK, b"Connection: close"))
        assert status(await asyncio.wait_for(reader.read(), 5)) == 200
        for _, each in (*idle, (reader, writer)):
            each.close()


async def test_idle_connections_cost_the_others_nothing() -> None:
    async with RouterRig(1, 1) as rig:
        idle = [await rig.connect() for _ in range(300)]
        for _ in range(5):
            assert (await rig.complete({"prompt": "x"})).status == 200
        for _, writer in idle:
            writer.close()


# HTTP

RUBBISH = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
    "words": b"hello there\r\n\r\n",
    "HTTP/9": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "long line": b"GET /" + b"x" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "long header": b"GET /health HTTP/1.1\r\nHost: x\r\nX: "
    + b"x" * (2 * MAX_HEADER_BYTES)
    + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 2000 + b"\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\n"
    b"Content-Length: 6\r\n\r\nhello",
    "length and chunks": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative length": b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "NUL": b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
    "bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
}


def test_what_is_no_http_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with RouterRig(1, 1, config=HASTY) as rig:
            for name, data in RUBBISH.items():
                answer = await rig.raw(data, 5)
                assert status(answer) == 400, (name, answer)
                assert error(answer)["code"] == 400, name
            assert (await rig.complete({"prompt": "x"})).status == 200

    run(main)
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
        answer = await rig.raw(both, 5)
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


async def test_a_client_that_goes_in_mid_body_leaves_nothing() -> None:
    async with RouterRig(1, 1) as rig:
        for _ in range(5):
            _, writer = await rig.connect()
            writer.write(post(ASK)[:-5])
            await rig.until(lambda: rig.data_plane.server.held_bytes > 0, "it is read")
            writer.transport.abort()
            await rig.until(lambda: rig.data_plane.server.held_bytes == 0, "nothing is kept")


async def test_an_engine_with_a_huge_head_or_body_is_no_engine() -> None:
    async with RouterRig(1, 1) as rig:
        huge = "x" * 100_000
        rig.fail(1, FaultKind.STATUS, status=200, body=huge, content_type=huge)
        reply = await rig.complete({"prompt": "x"})
        assert reply.status == 502


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
    """One request with `n` = 16384 held others up for eight seconds."""
    async with RouterRig(0, 1) as rig:
        before = rig.engines[0].counts.received[COMPLETIONS]
        reply = await rig.complete(MANY[name])
        assert reply.status == 400
        assert reply.error is not None
        assert "flow.decode_requests" in reply.error["message"]
        assert rig.engines[0].counts.received[COMPLETIONS] == before
        assert (await rig.complete({"prompt": ["x", "y"], "n": 2, "max_tokens": 1})).status == 200


@pytest.mark.parametrize(
    "target", ["/tokenize/", "/%74okenize", "/%74okenize/?a=1", "http://x/tokenize/", "/tokenize"]
)
async def test_target_that_vllm_understands_finds_its_route(target: str) -> None:
    """vLLM's server decodes paths, and redirects those that end in a slash."""
    body = b'{"model": "scripted", "prompt": "hello"}'
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    async with RouterRig(0, 1) as rig:
        assert (await rig.raw(head.encode() + body)).startswith(b"HTTP/1.1 200 ")


async def test_forwarded_answer_may_take_as_long_as_any_in_one_piece() -> None:
    """An engine that needed more than `front.engine_timeout_s` for many texts was given up."""
    front = {"engine_timeout_s": 0.2, "answer_timeout_s": 60.0}
    async with RouterRig(0, 1, config={"front": front}) as rig:
        rig.fail(0, FaultKind.SLOW, seconds=0.5, paths=("/tokenize",))
        text = {"model": "scripted", "prompt": "hello"}
        async with rig.session.post(rig.url + "/tokenize", json=text) as got:
            assert got.status == 200


async def test_forwarded_requests_are_spread_over_engines_that_are_equally_busy() -> None:
    async with RouterRig(0, 2) as rig:
        text = {"model": "scripted", "prompt": "hello"}
        for _ in range(64):
            async with rig.session.post(rig.url + "/tokenize", json=text) as got:
                assert got.status == 200
        assert all(each.counts.received["/tokenize"] for each in rig.engines)


async def test_forwarded_requests_go_to_a_standby_only_if_no_other_engine_answers() -> None:
    """A replica that drains has least to do, and got all that was forwarded until its end."""
    text = {"model": "scripted", "prompt": "hello"}
    async with RouterRig(0, 2) as rig:
        rig.router.post(Drain(ReplicaId("r0")))
        await rig.in_state(0, State.SHUTTING_NULL)
        for number, wanted in ((0, 0), (1, 1)):
            for _ in range(16):
                async with rig.session.post(rig.url + "/tokenize", json=text) as got:
                    assert got.status == 200
            assert bool(rig.engines[0].counts.received["/tokenize"]) is bool(wanted)
            if not number:
                rig.kill(1)
