"""Every listener refuses what a web page of another site has a browser send."""

import pytest
from multidict import CIMultiDict

from tests.support.router_rig import CHAT, COMPLETIONS, RouterRig
from vllm_kvpool.router.dataplane.headers import answer_headers
from vllm_kvpool.router.dataplane.origins import Origins

PAGE, REBOUND = "https://page.example", "evil.example:8000"
OPEN = Origins(option="hosts of [front]", listens_at="0.0.0.0")
NAMED = Origins(("router.svc",), option="hosts of [front]", listens_at="0.0.0.0")
LOOPBACK = Origins(option="hosts of [front]", listens_at="127.0.0.1")
ADMIN = Origins(option="hosts of [admin]")


@pytest.mark.parametrize(
    ("host", "origin", "refused_by"),
    [
        # Programs
        ("127.0.0.1:8000", None, ()),
        ("[::1]:8000", None, ()),
        ("localhost:8000", None, ()),
        ("router.svc:8000", None, (LOOPBACK, ADMIN)),
        ("other.svc:8000", None, (NAMED, LOOPBACK, ADMIN)),
        (None, None, (ADMIN,)),
        # A page of the listener's own
        ("127.0.0.1:8000", "http://127.0.0.1:8000", ()),
        ("localhost:8000", "http://localhost:8000", ()),
        ("router.svc:8000", "http://router.svc:8000", (OPEN, LOOPBACK, ADMIN)),
        # A page of another site, and one whose name was made to point here
        ("127.0.0.1:8000", "http://evil.example", (OPEN, NAMED, LOOPBACK, ADMIN)),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", (OPEN, NAMED, LOOPBACK, ADMIN)),
        ("127.0.0.1:8000", "null", (OPEN, NAMED, LOOPBACK, ADMIN)),
        ("router.svc:8000", "http://evil.example", (OPEN, NAMED, LOOPBACK, ADMIN)),
        (REBOUND, f"http://{REBOUND}", (OPEN, NAMED, LOOPBACK, ADMIN)),
        (REBOUND, "http://[", (OPEN, NAMED, LOOPBACK, ADMIN)),
        ("router.svc:8000", PAGE, (OPEN, NAMED, LOOPBACK, ADMIN)),
    ],
)
def test_request_is_refused_by_host_and_origin(
    host: str | None, origin: str | None, refused_by: tuple[Origins, ...]
) -> None:
    for each in (OPEN, NAMED, LOOPBACK, ADMIN):
        assert (each.refusal(host, origin) is not None) is (each in refused_by), (host, origin)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/v1/models"])
async def test_router_without_keys_refuses_pages_and_names_that_are_not_its_own(path: str) -> None:
    async with RouterRig(0, 1) as rig:
        method = "GET" if path == "/v1/models" else "POST"
        for headers in (
            *({"Host": REBOUND}, {"Origin": "http://evil.example"}, {"Origin": "null"}),
            {"Host": REBOUND, "Origin": f"http://{REBOUND}"},
        ):
            reply = await rig.ask(method, path, b"{}", headers)
            assert reply.status == 403, headers
            assert "error" in reply.json


async def test_router_takes_its_own_names() -> None:
    async with RouterRig(0, 1, front={"hosts": ["router.svc"]}) as rig:
        reply = await rig.ask("GET", "/v1/models", headers={"Host": "router.svc"})
        assert reply.status == 200


async def test_router_lets_no_page_of_another_site_read_or_ask_first() -> None:
    """A proxy in front may; engines, which allow all pages by default, may not."""
    async with RouterRig(0, 1) as rig:
        ask = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        for method, path, status in (("OPTIONS", CHAT, 405), ("GET", "/v1/models", 403)):
            reply = await rig.ask(method, path, headers=ask)
            assert reply.status == status
            assert "Access-Control-Allow-Origin" not in reply.headers
    engines = CIMultiDict({"Access-Control-Allow-Origin": "*", "X-Request-Id": "1"})
    assert dict(answer_headers(engines)) == {"X-Request-Id": "1"}
