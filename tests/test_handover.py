"""benchmarks/handover_sides.py: the proxy of bench_handover.py, over scripted servers."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from benchmarks.common import DidNotFinish
from benchmarks.handover_sides import (
    WHOLE_PROMPT,
    MooncakeWay,
    NixlWay,
    NotInstalled,
    Pair,
    Way,
    hand_over,
    nixl_folder,
    ways,
)
from tests.support.server_process import HOST

ENDPOINT = "tcp://127.0.0.1:7"
IDS = [5, 6, 7]
LIMIT_S = 30.0
BLOCKS = {"remote_block_ids": [[1, 2]], "remote_engine_id": "e"}
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Scripted:
    """A server of a pair; `log` has what both were asked, and that one was killed."""

    name: str
    log: list[tuple[str, dict[str, Any]]]
    answer: Answer
    url: str = ""

    def notice_endpoints(self) -> list[str]:
        return [ENDPOINT]

    def kill(self) -> None:
        self.log.append((f"{self.name} is killed", {}))

    def send_signal(self, number: signal.Signals) -> None:
        self.log.append((f"{self.name} {number.name}", {}))


async def prefilled(request: web.Request) -> web.StreamResponse:
    return web.json_response({"kv_transfer_params": BLOCKS})


async def decoded(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(2):
        await response.write(b'data: {"choices": []}\n\n')
    return response


async def refused(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "lost"}, status=500)


async def failed_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"error": {"code": 500, "message": "lost"}}\n\n')
    return response


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@asynccontextmanager
async def pair_of(way: Way, decode: Answer) -> AsyncIterator[tuple[Pair, list[Any]]]:
    """A pair whose servers answer so, and what they were asked in order."""
    log: list[tuple[str, dict[str, Any]]] = []
    both = [Scripted("prefill", log, prefilled), Scripted("decode", log, decode)]
    runners = [await listen(each) for each in both]
    try:
        yield Pair(way, *cast("Any", both)), log
    finally:
        for runner in runners:
            await runner.cleanup()


async def listen(server: Scripted) -> web.AppRunner:
    async def handle(request: web.Request) -> web.StreamResponse:
        server.log.append((server.name, json.loads(await request.read())))
        return await server.answer(request)

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    [address] = runner.addresses
    server.url = f"http://{HOST}:{address[1]}"
    return runner


def handed(
    way: Way, decode: Answer, limit_s: float = LIMIT_S, **options: bool
) -> tuple[float, list[Any]]:
    async def run() -> tuple[float, list[Any]]:
        async with pair_of(way, decode) as (pair, log), aiohttp.ClientSession() as session:
            return await hand_over(session, pair, IDS, limit_s, **options), log

    return asyncio.run(run())


def pool_way() -> Way:
    return Way("pool", "file:///pool")


def nixl_way() -> Way:
    return NixlWay(Path("/nixl"))


@pytest.mark.parametrize("way", [pool_way, nixl_way, MooncakeWay])
def test_a_prompt_goes_to_prefill_for_one_token_and_then_to_decode(way: Callable[[], Way]) -> None:
    made = way()
    gap, asked = handed(made, decoded)
    names = [name for name, _ in asked]
    if made.asks_early:
        asked.sort(key=lambda each: each[0], reverse=True)
    else:
        assert gap > 0
        assert names == ["prefill", "decode"]
    (_, first), (_, second) = asked
    assert first["prompt"] == second["prompt"] == IDS
    assert first["max_tokens"] == 1
    assert second["stream"]


def test_decode_is_told_what_its_connector_needs() -> None:
    """The pool needs to know that the prompt comes, NIXL prefill's answer, Mooncake the name of
    the transfer."""
    told = {
        kind: [
            body["kv_transfer_params"]
            for _, body in sorted(handed(way, decoded)[1], key=lambda each: each[0], reverse=True)
        ]
        for kind, way in (("pool", pool_way()), ("nixl", nixl_way()), ("mooncake", MooncakeWay()))
    }
    assert told["pool"] == [
        {"kvpool": {"hand_over": True}},
        {"kvpool": {"expect_tokens": WHOLE_PROMPT, "notices": [ENDPOINT]}},
    ]
    assert told["nixl"] == [{"do_remote_decode": True, "do_remote_prefill": False}, BLOCKS]
    prefill, decode = told["mooncake"]
    assert prefill["do_remote_decode"]
    assert decode["do_remote_prefill"]
    assert prefill["transfer_id"] == decode["transfer_id"]
    assert decode["remote_bootstrap_addr"].startswith(f"http://{HOST}:")


def test_a_mooncake_decode_is_told_the_engine_that_prefill_is_started_as() -> None:
    way = MooncakeWay()
    assert way.to_decode("r", {})["remote_engine_id"] == way.config(is_decode=False)["engine_id"]
    assert "engine_id" not in way.config(is_decode=True)


def test_prefill_is_killed_between_its_answer_and_the_request_to_decode() -> None:
    _, asked = handed(pool_way(), decoded, kill_prefill=True)
    names = [name for name, _ in asked]
    assert sorted(names) == ["decode", "prefill", "prefill is killed"]
    assert names.index("prefill") < names.index("prefill is killed")


@pytest.mark.parametrize(
    ("decode", "limit_s", "what"),
    [
        (refused, LIMIT_S, "HTTP 500"),
        (failed_stream, LIMIT_S, "error 500 in the stream: lost"),
        (silent, 0.2, "no end in 0.2 s"),
    ],
)
def test_a_decode_that_gives_no_token_is_said_not_to_finish(
    decode: Answer, limit_s: float, what: str
) -> None:
    with pytest.raises(DidNotFinish, match=what):
        handed(pool_way(), decode, limit_s)


@pytest.mark.parametrize(
    ("way", "failure", "stands_still"),
    [(pool_way, "", False), (pool_way, "no end", True), (nixl_way, "", True)],
)
def test_servers_that_poll_or_have_failed_stand_still_outside_their_turn(
    way: Callable[[], Way], failure: str, stands_still: bool
) -> None:
    log: list[tuple[str, dict[str, Any]]] = []
    both = [Scripted(name, log, silent) for name in ("prefill", "decode")]
    pair = Pair(way(), *cast("Any", both))
    with pair.turn():
        pair.failure = failure
    last = "SIGSTOP" if stands_still else "SIGCONT"
    assert [name for name, _ in log[-2:]] == [f"prefill {last}", f"decode {last}"]


def test_a_peer_that_is_not_installed_is_named_with_the_reason() -> None:
    def nixl() -> Path:
        raise NotInstalled("no such package")

    found, missing = ways("127.0.0.1:1", Path("/somewhere"), 1 << 20, nixl)
    assert missing == {"NixlConnector": "no such package"}
    assert [way.connector for way in found] == [
        "KVPoolConnector",
        "KVPoolConnector",
        "MooncakeConnector",
    ]


def test_packages_that_cannot_be_installed_leave_nothing_behind(tmp_path: Path) -> None:
    requirements = tmp_path / "nixl.txt"
    requirements.write_text(f"{tmp_path}/nothing-1.0-py3-none-any.whl\n")
    with pytest.raises(NotInstalled, match=r"pip cannot install requirements/nixl\.txt"):
        nixl_folder(requirements, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["nixl.txt"]
