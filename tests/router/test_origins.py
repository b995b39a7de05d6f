"""Every listener refuses what a web page of another site has a browser send."""

from typing import Any

import pytest

from tests.support.router_rig import CHAT, COMPLETIONS, RouterRig
from vllm_kvpool.router.dataplane.origins import Origins

PAGE, REBOUND = "https://page.example", "evil.example:8000"
OPEN = Origins(option="hosts of [front]", listens_at="0.0.0.0")
NAMED = Origins(("router.svc",), option="hosts of [front]", listens_at="0.0.0.0")
LOOPBACK = Origins(option="hosts of [front]", listens_at="127.0.0.1")
ADMIN = Origins(option="hosts of [admin]")
PAGED = Origins((), (PAGE,), option="hosts of [front]", listens_at="0.0.0.0")


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
        ("router.svc:8000", "http://router.svc:8000", (OPEN, LOOPBACK, ADMIN, PAGED)),
        # A page of another site, and one whose name was made to point here
        ("127.0.0.1:8000", "http://evil.example", (OPEN, NAMED, LOOPBACK, ADMIN, PAGED)),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", (OPEN, NAMED, LOOPBACK, ADMIN, PAGED)),
        ("127.0.0.1:8000", "null", (OPEN, NAMED, LOOPBACK, ADMIN, PAGED)),
        ("router.svc:8000", "http://evil.example", (OPEN, NAMED, LOOPBACK, ADMIN, PAGED)),
        (REBOUND, f"http://{REBOUND}", (OPEN, NAMED, LOOPBACK, ADMIN, PAGED)),
        (REBOUND, "http://[", (OPEN, NAMED, LOOPBACK, ADMIN, PAGED)),
        # A page that is named
        ("router.svc:8000", PAGE, (OPEN, NAMED, LOOPBACK, ADMIN)),
    ],
)
def test_request_is_refused_by_host_and_origin(
    host: str | None, origin: str | None, refused_by: tuple[Origins, ...]
) -> None:
    for each in (OPEN, NAMED, LOOPBACK, ADMIN, PAGED):
        assert (each.refusal(host, origin) is not None) is (each in refused_by), (host, origin)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/v1/models"])
async def test_router_without_keys_refuses_pages_and_names_that_are_not_its_own(path: str) -> None:
    async with RouterRig(0, 1) as rig:
        method = "GET" if path == "/v1/models" else "POST"
        foreign: tuple[dict[str, str], ...] = (
            {"Host": REBOUND},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Host": REBOUND, "Origin": f"http://{REBOUND}"},
        )
        for headers in foreign:
            more: dict[str, Any] = {"headers": headers, "data": b"{}"}
            async with rig.session.request(method, rig.url + path, **more) as got:
                assert got.status == 403, headers
                assert "error" in await got.json()
        assert rig.engines[0].counts.received[path] <= 1  # models are asked for at its start


async def test_router_takes_its_own_names_and_the_pages_that_it_is_given() -> None:
    config = {"front": {"hosts": ["router.svc"], "allowed_origins": [PAGE]}}
    async with RouterRig(0, 1, config=config) as rig:
        for headers in ({"Host": "router.svc"}, {"Host": REBOUND, "Origin": PAGE}):
            async with rig.session.get(f"{rig.url}/v1/models", headers=headers) as got:
                assert got.status == 200, headers
