"""Calls to engines: what breaks, and as what it is known."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.player import CUT, END, HEAD, Answer, chunk, player, whole
from tests.support.router_rig import FAST
from tests.support.scripted_batch import ScriptedPool
from tests.support.scripted_engine import ScriptedEngine
from tests.support.transport import FakeTransport
from tests.support.upstreams import quick_upstream
from tests.support.waiting import turns, until
from vllm_kvpool.config import MAX_ENDPOINT_CHARS, MAX_NOTICES
from vllm_kvpool.router.control.events import Sample
from vllm_kvpool.router.dataplane import upstream
from vllm_kvpool.router.dataplane.engine_metrics import read_sample, sample
from vllm_kvpool.router.dataplane.request_body import MAX_ANSWER_BYTES
from vllm_kvpool.router.dataplane.responses import EngineLost
from vllm_kvpool.router.dataplane.upstream import (
    EngineBroke,
    EngineUnreached,
    Upstream,
    UpstreamConnection,
)

OK = b"HTTP/1.1 200 OK\r\n"
FINE = whole(b"ok")


@asynccontextmanager
async def calls(**timeouts: float) -> AsyncIterator[Upstream]:
    given = {"silence_timeout_s": 0.2, "answer_timeout_s": 0.5, **timeouts}
    engines = quick_upstream(**given, api_key="key")
    try:
        yield engines
    finally:
        await engines.close()


async def take(engines: Upstream, url: str) -> None:
    """Read a stream to its end."""
    with await engines.open(url, b"{}", {}, MAX_ANSWER_BYTES) as response:
        await response.read()


BROKEN: dict[str, tuple[Answer, type[EngineLost]]] = {
    "no answer": ((CUT,), EngineBroke),
    "silence": ((), EngineBroke),
    "half a head": ((OK + b"Content-", CUT), EngineBroke),
    "half a body": ((OK + b"Content-Length: 9\r\n\r\nhalf", CUT), EngineBroke),
    "half a chunk": ((HEAD + b"9\r\nhalf", CUT), EngineBroke),
    "silence in the body": ((OK + b"Content-Length: 9\r\n\r\nhalf",), EngineBroke),
    "TLS": ((b"\x16\x03\x01\x02\x00",), EngineLost),
    "no HTTP": ((b"hello there\r\n\r\n",), EngineLost),
    "no status": (whole(b"", "099 X"), EngineLost),
    "huge head": (whole(b"", "200 OK", "X: " + "x" * 100_000), EngineLost),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("streams", [True, False])
async def test_what_breaks(name: str, streams: bool) -> None:
    answer, kind = BROKEN[name]
    async with calls() as engines, player(answer) as (url, _):
        with pytest.raises(EngineLost) as caught:
            await (take(engines, url) if streams else engines.ask(url, b"{}"))
        assert type(caught.value) is kind, caught.value


async def test_nobody_listens() -> None:
    async with calls() as engines:
        async with player() as (url, _):
            pass
        with pytest.raises(EngineUnreached) as caught:
            await engines.ask(url, b"")
        assert caught.value.is_refused
        with pytest.raises(EngineUnreached) as caught:
            await engines.ask("http://name.invalid:1", timeout_s=1.0)
        assert not caught.value.is_refused


async def test_a_post_is_sent_once() -> None:
    """The engine may have executed it, and may have ended because of it."""
    async with calls() as engines, player(FINE, (CUT,), FINE) as (url, heard):
        for _ in range(2):
            with contextlib.suppress(EngineBroke):
                assert (await engines.ask(url, b"{}")).body == b"ok"
        assert len(heard.heads) == 2
        assert (await engines.ask(url, b"{}")).body == b"ok"


async def test_who_has_had_the_request_and_is_gone_is_not_unreached() -> None:
    """The request may have been the end of the engine."""
    async with calls() as engines:
        listening: list[asyncio.Server] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            listening[0].close()
            writer.close()

        listening.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        port = listening[0].sockets[0].getsockname()[1]
        with pytest.raises(EngineBroke):
            await engines.ask(f"http://127.0.0.1:{port}", b"{}")


async def test_a_redirection_is_not_followed() -> None:
    away = whole(b"", "307 Go", "Location: http://name.invalid/")
    async with calls() as engines, player(away) as (url, _):
        assert (await engines.ask(url, b"{}")).status == 307


async def test_keys_and_bodies() -> None:
    async with calls() as engines, player(FINE) as (url, heard):
        await engines.ask(url, b"")
        await engines.ask(url, b"{}", {"X": "y"})
        await engines.ask(url, timeout_s=1.0)
    own, clients, watch = heard.heads
    for head in (own, watch):
        assert b"Authorization: Bearer key" in head
    assert b"Content-Type: application/json" in own
    for name in (b"Authorization", b"User-Agent", b"Accept-Encoding", b"Content-Type"):
        assert name not in clients, "clients bring their own"


async def test_an_answer_beyond_all_bounds() -> None:
    async with calls() as engines, player(whole(b"x" * 5000)) as (url, _):
        assert len((await engines.ask(url, timeout_s=1.0, most_bytes=5000)).body) == 5000
        with pytest.raises(EngineLost, match="more than 4999 bytes"):
            await engines.ask(url, timeout_s=1.0, most_bytes=4999)


async def test_a_large_body_is_sent() -> None:
    async with calls(answer_timeout_s=10.0) as engines, ScriptedEngine(FAST) as engine:
        body = b'{"model":"scripted","prompt":"x","user":"%b"}' % (b"x" * (3 << 20))
        headers = {"Content-Type": "application/json"}
        answer = await engines.ask(f"{engine.url}/v1/completions", body, headers)
        assert answer.status == 200


async def test_a_connection_is_used_again_after_a_stream() -> None:
    done = b"data: [DONE]\n\n"
    async with calls() as engines, player((HEAD, chunk(done), END)) as (url, heard):
        for _ in range(5):
            with await engines.open(url, b"{}", {}, MAX_ANSWER_BYTES) as response:
                await response.pump(lambda data: data.endswith(done))
                response.finish()
                while not response.is_complete:  # until the last chunk has come
                    await asyncio.sleep(0.001)
        assert (len(heard.heads), heard.num_connections) == (5, 1)


class ScriptedClock:
    """Time and timers of a loop, which a test moves on."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self._now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> SimpleNamespace:
        self._timers.append((self._now + delay_s, callback))
        return SimpleNamespace(cancel=self._timers.clear)

    def advance(self, until_s: float) -> None:
        while self._timers and (first := min(self._timers))[0] <= until_s:
            self._timers.remove(first)
            self._now = first[0]
            first[1]()
        self._now = until_s


@pytest.mark.parametrize("prompt_s", [0.0, 0.4, 0.9, 1.0, 1.3, 1.9, 2.0, 2.4, 3.7])
@pytest.mark.parametrize(("wait_s", "is_lost"), [(0.1, False), (0.9, False), (1.1, True)])
async def test_silence_counts_from_the_end_of_what_is_waited_for(
    prompt_s: float, wait_s: float, is_lost: bool
) -> None:
    clock = ScriptedClock()
    connection = UpstreamConnection(quick_upstream(), ("http", "e", 1))
    connection._loop = cast("asyncio.AbstractEventLoop", clock)
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    call = connection.call(b"", b"", 1.0, MAX_ANSWER_BYTES, lambda: min(clock.time(), prompt_s))
    asked = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    clock.advance(prompt_s + wait_s)
    assert transport.closed is is_lost
    if is_lost:
        with pytest.raises(EngineBroke, match="said nothing"):
            await asked
    else:
        connection.data_received(FINE[0])
        assert (await asked).status == 200
    transport.abort()


@pytest.mark.parametrize("parts", [[b"head"], [b"head", b"body"]])
async def test_request_is_written_without_an_empty_part(parts: list[bytes]) -> None:
    """From Python 3.12 on, asyncio's loop spins at 100 % of a core over an empty part."""
    connection = UpstreamConnection(quick_upstream(), ("http", "e", 1))
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    call = connection.call(b"head", b"".join(parts[1:]), 1.0, MAX_ANSWER_BYTES)
    asked = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    assert transport.parts == parts
    connection.data_received(FINE[0])
    assert (await asked).status == 200
    connection.abort()


async def test_the_callers_own_errors_are_not_the_engines() -> None:
    async with calls() as engines, player(FINE) as (url, _):
        with pytest.raises(KeyError), await engines.open(url, b"", {}, MAX_ANSWER_BYTES):
            raise KeyError


# Metrics

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="m"} 1e+06
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="a \\"b\\" {c}"} 5.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100"} 1.0
vllm:kvpool_bytes_total{direction="save",store="s"} 7.0
vllm:kvpool_bytes_total{direction="load",store="s"} 9.0
vllm:kvpool_bytes_total{direction="sideways",store="s"} 1.0
vllm:kvpool_tier_up{tier="host"} 0.0
vllm:kvpool_tier_up{tier="remote"} 1.0
# HELP vllm:kvpool_hit_tokens_total Prompt tokens taken from the pool.
vllm:kvpool_info{chunk_tokens="256",engine="0",model_name="m",namespace="before"} 0.0
vllm:kvpool_info{chunk_tokens="256",engine="0",model_name="m",namespace="now"} 1.0
python_gc_objects_collected_total{generation="0"} 1.0
"""


def test_what_metrics_say() -> None:
    assert read_sample(TEXT) == Sample(
        **{"running": 7, "waiting": 2, "used_blocks": 100, "total_blocks": 200, "block_size": 16},
        **{"prompt_tokens": 1e6, "generated_tokens": 5.0, "bytes_in": 9.0, "bytes_out": 7.0},
        pool_is_up=True,
        has_connector=True,
        namespace="now",
        chunk_tokens=256,
    )


@pytest.mark.parametrize(
    ("tiers", "is_up"),
    [
        ({}, True),
        ({"host": 0}, True),
        ({"host": 1, "remote": 0}, False),
        ({"one": 0, "two": 1}, True),
        ({"one": 0, "two": 0}, False),
    ],
)
def test_whether_the_pool_is_up(tiers: dict[str, int], is_up: bool) -> None:
    lines = [f'vllm:kvpool_tier_up{{tier="{name}"}} {up}' for name, up in tiers.items()]
    assert read_sample("\n".join(lines)).pool_is_up is is_up


@pytest.mark.parametrize(
    "text",
    [
        "<html><body>no</body></html>",
        "vllm:num_requests_running{ 3",
        "vllm:num_requests_running three",
        "vllm:num_requests_running NaN",
        "vllm:num_requests_running +Inf",
        'vllm:kv_cache_usage_perc NaN\nvllm:cache_config_info{num_gpu_blocks="5"} 1',
        "vllm:prompt_tokens_total NaN",
        '{"json": true}',
    ],
)
def test_metrics_that_cannot_be_read(text: str) -> None:
    with pytest.raises(EngineLost, match="/metrics"):
        read_sample(text)


def test_metrics_of_something_else_say_nothing() -> None:
    assert read_sample("python_info 1.0\n") == Sample(has_connector=False)
    assert read_sample("") == Sample(has_connector=False)


async def test_metrics_of_a_scripted_engine() -> None:
    pool = ScriptedPool()
    async with calls() as engines:
        async with ScriptedEngine(FAST, pool) as engine:
            found = await sample(engines, engine.url, 1.0)
            assert found.total_blocks == FAST.kv_blocks
            assert found.block_size == FAST.block_size
            assert found.pool_is_up
            pool.up = False
            assert not (await sample(engines, engine.url, 1.0)).pool_is_up
        with pytest.raises(EngineUnreached):
            await sample(engines, engine.url, 1.0)


NOTICES = "# HELP vllm:kvpool_notices_info 1: an endpoint.\n"


def _notices(*of: str, value: int = 1) -> str:
    """Lines of the metric: of each, the engine and its endpoint."""
    lines = []
    for rank, (engine, _, endpoint) in enumerate(each.partition(" ") for each in of):
        labels = f'endpoint="{endpoint}",engine="{engine}",rank="{rank}"'
        lines.append(f"vllm:kvpool_notices_info{{{labels}}} {value}\n")
    return NOTICES + "".join(lines)


@pytest.mark.parametrize(
    ("text", "notices"),
    [
        ("", None),
        (NOTICES, ()),
        (_notices("0 tcp://10.0.0.1:7000"), ("tcp://10.0.0.1:7000",)),
        (_notices("0 tcp://a:1", "0 tcp://a:2"), ("tcp://a:1", "tcp://a:2")),
        (_notices("0 tcp://a:1", value=0), ()),
        (_notices("0 "), ()),
        (_notices("0 " + "t" * (MAX_ENDPOINT_CHARS + 1)), ()),
        (_notices(*(f"0 tcp://a:{port}" for port in range(MAX_NOTICES + 1))), ()),
        # Any of several engines at one address may get a request.
        (_notices("0 tcp://a:1", "1 tcp://a:2"), ()),
    ],
    ids=["old", "none", "one", "two ranks", "ended", "empty", "long", "many", "two engines"],
)
def test_endpoints_at_which_an_engine_tells_what_it_has_stored(
    text: str, notices: tuple[str, ...] | None
) -> None:
    assert read_sample(TEXT + text).notices == notices


def test_lines_that_are_not_asked_for_are_not_even_parsed() -> None:
    assert read_sample('vllm:e2e_seconds_bucket{le="0.1 1.0\n' + TEXT) == read_sample(TEXT)


@pytest.mark.parametrize("num_turns", range(8))
async def test_it_closes_whatever_is_being_connected(num_turns: int) -> None:
    async with player(FINE) as (url, _):
        engines = quick_upstream(silence_timeout_s=5.0, answer_timeout_s=5.0)
        assert (await engines.ask(url, b"")).status == 200
        calls = [asyncio.ensure_future(engines.ask(url, b"")) for _ in range(4)]
        await turns(num_turns)
        async with asyncio.timeout(2.0):
            await engines.close()
            ended = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(EngineUnreached, match="the router ends"):
            await engines.ask(url, b"")
    assert all(isinstance(each, EngineLost) or each.status == 200 for each in ended)


@pytest.mark.parametrize("num_turns", range(12))
async def test_it_closes_after_calls_that_were_cancelled_as_they_connected(num_turns: int) -> None:
    async with player(FINE) as (url, _):
        engines = quick_upstream(silence_timeout_s=5.0, answer_timeout_s=5.0)
        calls = [asyncio.ensure_future(take(engines, url)) for _ in range(4)]
        await turns(num_turns)
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        async with asyncio.timeout(2.0):
            await engines.close()


async def test_a_connection_that_nobody_uses_is_closed_though_its_engine_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines that are gone with their machine end none, and are never called again."""
    monkeypatch.setattr(upstream, "KEEP_ALIVE_S", 0.05)
    async with player(FINE) as (url, _), calls() as engines:
        for _ in range(2):  # the second time as the first
            assert (await engines.ask(url, b"")).status == 200
            await until(lambda: not (engines._connections or engines._idle), 5.0)


async def test_engine_that_is_gone_leaves_no_list_of_idle_connections() -> None:
    async with calls() as engines:
        async with player(FINE, (CUT,)) as (url, _):
            assert (await engines.ask(url, b"")).status == 200
            assert len(engines._idle) == 1
            with pytest.raises(EngineBroke):
                await engines.ask(url, b"")
            assert not engines._idle, "its last connection ended during a call"
        with pytest.raises(EngineUnreached):
            await engines.ask(url, b"")
        assert not engines._idle, "its host refuses connections"


async def test_timer_of_an_idle_connection_ends_with_the_connection() -> None:
    async with calls() as engines, player(FINE) as (url, _):
        assert (await engines.ask(url, b"")).status == 200
        [connection] = engines._connections
        timer = connection._unused
        assert timer is not None
        connection.abort()
        await until(lambda: not engines._connections)
        assert timer.cancelled()


async def test_answer_that_nobody_reads_stops_its_engine() -> None:
    """All of it comes once it is read."""
    connection = UpstreamConnection(quick_upstream(), ("http", "e", 1))
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    asked = asyncio.ensure_future(connection.call(b"", b"", 1.0, MAX_ANSWER_BYTES))
    await turns(1)
    connection.data_received(HEAD)
    response = await asked
    piece = b"x" * (upstream.MAX_UNREAD_BYTES // 4)
    for _ in range(4):
        connection.data_received(chunk(piece))
        assert transport.is_reading()
    connection.data_received(chunk(piece))
    assert not transport.is_reading()
    reading = asyncio.ensure_future(response.read())
    await turns(2)
    assert transport.is_reading()
    connection.data_received(END)
    assert (await reading).body == 5 * piece
    connection.abort()
