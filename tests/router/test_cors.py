"""Web pages may send what they may send to vLLM, and read what the router itself has to say."""

from collections.abc import Mapping
from typing import Any

import pytest
from multidict import CIMultiDict

from tests.support.router_rig import CHAT, COMPLETIONS, RouterRig, run
from vllm_kvpool.router.dataplane.headers import answer_headers, preflight, shown_to

PAGE, OTHER = "https://page.example", "https://other.example"
ANYBODY = {"Access-Control-Allow-Origin": "*"}
PAGE_ONLY = {"Access-Control-Allow-Origin": PAGE, "Vary": "Origin"}


@pytest.mark.parametrize(
    ("origin", "allowed", "shown"),
    [
        (None, ("*",), {}),
        (PAGE, (), {}),
        (PAGE, ("*",), ANYBODY),
        (PAGE, (OTHER, "*"), ANYBODY),
        (PAGE, (OTHER, PAGE), PAGE_ONLY),
        (PAGE.upper(), (PAGE,), {"Vary": "Origin"}),
        (OTHER, (PAGE,), {"Vary": "Origin"}),
    ],
)
def test_who_may_read_an_answer(
    origin: str | None, allowed: tuple[str, ...], shown: Mapping[str, str]
) -> None:
    headers = CIMultiDict({"Origin": origin} if origin else {})
    assert shown_to(headers, allowed) == shown


def asked(method: str | None = "POST", origin: str = PAGE, **more: str) -> CIMultiDict[str]:
    given = {"Origin": origin, **more}
    if method is not None:
        given["Access-Control-Request-Method"] = method
    return CIMultiDict(given)


def test_a_browser_asks_first() -> None:
    wanted = "authorization, content-type"
    granted = preflight(
        asked(**{"Access-Control-Request-Headers": wanted}), (PAGE,), ("GET", "POST")
    )
    assert granted == {
        **PAGE_ONLY,
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": wanted,
        "Access-Control-Max-Age": "600",
    }
    for refused in (asked("PUT"), asked(None), asked(origin=OTHER), CIMultiDict[str]()):
        assert preflight(refused, (PAGE,), ("GET", "POST")) is None


async def test_a_page_asks_and_reads_every_answer() -> None:
    front = {"allowed_origins": ["*"], "max_body_bytes": 10_000}
    async with RouterRig(1, 1, config={"front": front}) as rig:
        ask: dict[str, Any] = {"headers": asked()}
        async with rig.session.options(rig.url + CHAT, **ask) as got:
            assert got.status == 200
            assert got.headers["Access-Control-Allow-Origin"] == "*"
            assert await got.read() == b""
        plain = {"headers": {"Origin": PAGE}}
        asks = {**rig.body({"prompt": "hello", "max_tokens": 2})}
        for is_stream in (True, False):
            body = {**asks, "stream": is_stream}
            async with rig.session.post(rig.url + COMPLETIONS, json=body, **plain) as got:
                assert got.headers["Access-Control-Allow-Origin"] == "*"
                await got.read()
        for path, status in (("/health", 200), ("/nothing", 404)):
            async with rig.session.get(rig.url + path, **plain) as got:
                assert got.status == status
                assert got.headers["Access-Control-Allow-Origin"] == "*"
        async with rig.session.post(f"{rig.url}/tokenize", json=asks, **plain) as got:
            assert got.status == 200
            assert got.headers["Access-Control-Allow-Origin"] == "*"
        for data, status in ((b"{", 400), (b"{" * 10_001, 413)):
            async with rig.session.post(rig.url + CHAT, data=data, **plain) as got:
                assert got.status == status
                assert got.headers["Access-Control-Allow-Origin"] == "*"
        for number in (0, 1):
            rig.kill(number)
        await rig.until(lambda: not rig.router.controller.state.fleet.decoders(), "noticed")
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
        async with rig.session.post(rig.url + CHAT, json=body, **plain) as got:
            assert got.status == 503
            assert got.headers["Access-Control-Allow-Origin"] == "*"


def test_no_page_may_do_anything_unless_it_is_named() -> None:
    async def main() -> None:
        async with RouterRig(1, 1) as rig:
            async with rig.session.options(rig.url + CHAT, headers=asked()) as got:
                assert got.status == 405
            async with rig.session.get(f"{rig.url}/health", headers={"Origin": PAGE}) as got:
                assert "Access-Control-Allow-Origin" not in got.headers

    run(main)
    engines = CIMultiDict({"Access-Control-Allow-Origin": "*", "X-Request-Id": "1"})
    assert dict(answer_headers(engines)) == {"X-Request-Id": "1"}, "whatever engines allow"


async def test_other_pages_are_refused() -> None:
    config = {"front": {"allowed_origins": [PAGE]}}
    async with RouterRig(1, 1, config=config) as rig:
        async with rig.session.options(rig.url + CHAT, headers=asked(origin=OTHER)) as got:
            assert got.status == 405
            assert "Access-Control-Allow-Origin" not in got.headers
        async with rig.session.options(rig.url + CHAT, headers=asked()) as got:
            assert got.headers["Access-Control-Allow-Origin"] == PAGE
