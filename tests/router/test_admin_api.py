"""The admin address as clients see it: real requests to the real application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from aiohttp import ClientSession
from yarl import URL

from tests.router.scenes import Scene, busy_scene
from vllm_kvpool.router.control.events import (
    Added,
    DecodeBegan,
    DecodeEnded,
    Drain,
    Mode,
    Outcome,
    Remove,
    ReplicaSpec,
    SetMode,
    SetRole,
)
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.control.states import MAX_REPLICAS, ReplicaId, Role
from vllm_kvpool.router.ops.admin_api import HEADERS, LIMITS, MAX_BODY_BYTES, PAGE, ROUTES, Admin
from vllm_kvpool.router.ops.metrics import Telemetry

TOKEN = "s3cret"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def served(scene: Scene, **limits: Any) -> AsyncIterator[ClientSession]:
    """A client of the admin address of a scene."""
    telemetry = Telemetry(scene.controller, clock=scene.clock)
    admin = Admin(
        *(scene.controller, scene.post, telemetry, TOKEN),
        hosts=["router.test"],
        clock=scene.clock,
        limits=replace(LIMITS, **limits),
    )
    port = await admin.start("127.0.0.1", 0)
    async with ClientSession(f"http://127.0.0.1:{port}") as client:
        try:
            yield client
        finally:
            await admin.stop()


async def ask(client: ClientSession, method: str, path: str, **given: Any) -> tuple[int, Any]:
    """Status and answer of a request with the token."""
    async with client.request(method, path, headers=BEARER, **given) as response:
        assert response.content_type == "application/json"
        return response.status, await response.json()


async def talk(client: ClientSession, script: str) -> Any:
    """Requests in turn, `METHOD path {body} -> status name=value ...`; the last one's answer.

    Words behind the status without a `=` are in the error.
    """
    answer = None
    for line in script.strip().splitlines():
        asked, _, expected = line.strip().partition(" -> ")
        method, path, *body = asked.split(maxsplit=2)
        given = {"json": msgspec.json.decode(body[0])} if body else {}
        status, answer = await ask(client, method, path, **given)
        wanted, *words = expected.split()
        assert status == int(wanted), (line, answer)
        for name, _, value in (each.partition("=") for each in words if "=" in each):
            assert str(answer[name]) == value, (line, answer)
        said = " ".join(each for each in words if "=" not in each)
        assert not said or said in answer["error"], (line, answer)
    return answer


async def test_nothing_but_the_page_is_answered_without_the_token() -> None:
    scene = busy_scene()
    before = len(scene.events)
    paths = [(method, path.replace("{id}", "d1")) for method, path in ROUTES if path != "/"]

    async with served(scene) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            for method, path in [*paths, ("GET", "/nothing"), ("HEAD", "/"), ("POST", "/")]:
                async with client.request(method, path, headers=headers) as response:
                    assert (response.status, path) == (401, path)
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    assert method == "HEAD" or "token" in (await response.json())["error"]
        for path in PAGE:
            async with client.get(path) as response:
                assert response.status == 200
    assert len(scene.events) == before, "nothing has been posted"


async def test_every_answer_forbids_scripts_and_frames_of_others() -> None:
    async with served(Scene()) as client:
        for path, headers in (("/", {}), ("/state", BEARER), ("/state", {}), ("/no", BEARER)):
            async with client.get(path, headers=headers) as response:
                assert HEADERS.items() <= dict(response.headers).items()
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "router.test:8001"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "router.test", "Origin": "http://router.test"}, 200),
    ],
)
async def test_requests_meant_for_another_host_or_of_another_page_are_refused(
    headers: dict[str, str], status: int
) -> None:
    async with served(Scene()) as client:
        for path in ("/", "/state"):
            async with client.get(path, headers=BEARER | headers) as response:
                assert response.status == status


async def test_state_replicas_and_metrics_can_be_read() -> None:
    async with served(busy_scene()) as client:
        status, state = await ask(client, "GET", "/state")
        assert status == 200
        assert [each["id"] for each in state["replicas"]] == ["p0", "p1", "d0", "d1", "d2"]
        assert state["replicas"][2]["state"] == "decode"
        assert await ask(client, "GET", "/replicas") == (200, {"replicas": state["replicas"]})
        async with client.get("/metrics", headers=BEARER) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert 'kvpool_router_replicas{state="prefill"} 2.0' in await response.text()


async def test_plan_route_shows_the_last_plan_and_posts_nothing() -> None:
    scene = Scene(mode=Mode.AUTOMATIC)
    scene.serving("p0", Role.PREFILL)
    scene.serving("p1", Role.PREFILL)
    scene.serving("d0", Role.DECODE)
    scene.tick()
    planned_at = scene.now
    scene.step(Remove(ReplicaId("p1")))
    before = len(scene.events)

    async with served(scene) as client:
        plan = await talk(client, f"GET /plan -> 200 mode=automatic at={planned_at}")
        assert plan["prefill"] == {"have": 2, "wanted": 2}
        assert "prefill: 2 replicas, wanted 2" in plan["why"]
    assert len(scene.events) == before


async def test_engine_is_added_and_loaded() -> None:
    scene = busy_scene()
    add = 'POST /replicas {"url": "http://10.0.0.8:8000", "role": "prefill"} ->'

    async with served(scene) as client:
        loading = "202 id=10.0.0.8:8000 state=loading_prefill role=prefill"
        answer = await talk(client, f"{add} {loading}")
        assert answer in (await talk(client, "GET /replicas -> 200"))["replicas"]
        await talk(
            client,
            f"""POST /replicas {{"url": "https://x:1/", "role": "decode", "id": "d9"}} -> 202 id=d9 url=https://x:1
            {add} 409 is there already""",
        )
    assert isinstance(scene.events[-1], Added)


async def test_replica_is_drained_given_a_role_and_removed() -> None:
    scene = busy_scene()

    async with served(scene) as client:
        await talk(
            client,
            """POST /replicas/p1/drain -> 202 state=draining_prefill prefills=2 goal=hold
            POST /replicas/p1/role {"role": "prefill"} -> 202 state=prefill
            DELETE /replicas/d0 -> 202 decodes=1 goal=remove""",
        )
        ids = {"request_id": RequestId("r0"), "replica": ReplicaId("d0")}
        scene.step(DecodeEnded(**ids, outcome=Outcome.OK, output_tokens=3))
        answer = await talk(client, "DELETE /replicas/d0 -> 404")
        assert answer == {"error": "no replica 'd0'; known are: p0, p1, d1, d2"}
    assert [each for each in scene.events if isinstance(each, Drain | SetRole | Remove)] == [
        Drain(ReplicaId("p1")),
        SetRole(ReplicaId("p1"), Role.PREFILL),
        Remove(ReplicaId("d0")),
    ]


async def test_idle_replica_is_gone_at_once_when_it_is_removed() -> None:
    async with served(busy_scene()) as client:
        answer = await talk(client, "DELETE /replicas/d1 -> 202")
        assert answer == {"id": "d1", "state": None}


async def test_last_replica_of_a_role_needs_force() -> None:
    scene = Scene()
    scene.serving("p0", Role.PREFILL)
    scene.serving("d0", Role.DECODE)
    spec = ReplicaSpec(replica_id=ReplicaId("new"), url="u")

    async with served(scene) as client:
        await talk(
            client,
            """DELETE /replicas/d0 -> 409 no other replica serves decode
            POST /replicas/d0/drain -> 409 no other replica serves decode
            POST /replicas/d0/role {"role": "prefill"} -> 409 no other replica serves decode
            DELETE /replicas/d0?force=0 -> 409 no other replica serves decode
            POST /replicas/p0/role {"role": "prefill"} -> 202
            POST /replicas/d0/role {"role": "decode"} -> 202""",
        )
        scene.step(Added(spec=spec, role=Role.DECODE))
        await talk(
            client,
            """POST /replicas/new/drain -> 202
            DELETE /replicas/new -> 202
            DELETE /replicas/d0?force=true -> 202 state=None""",
        )


@pytest.mark.parametrize("name", ["http://10.0.0.1:8000", "a/b", "[::1]:8000", "50%", "a+b", "ü?#"])
async def test_an_id_may_have_any_signs(name: str) -> None:
    scene = Scene()
    for each in (name, "other"):
        scene.serving(each, Role.DECODE)

    async with served(scene) as client:
        path = URL(f"/replicas/{quote(name, safe='')}", encoded=True)
        status, answer = await ask(client, "DELETE", path)
        assert (status, answer["id"]) == (202, name)


async def test_mode_of_the_planner_is_changed() -> None:
    scene = Scene()

    async with served(scene) as client:
        mode = {"mode": "automatic"}
        assert await talk(client, 'POST /planner/mode {"mode": "automatic"} -> 200') == mode
        answer = await talk(
            client, 'POST /planner/mode {"mode": "on"} -> 400 Invalid enum value \'on\''
        )
        assert 'send {"mode": "manual"}, "dry_run" or "automatic"' in answer["error"]
    assert scene.events == [SetMode(Mode.AUTOMATIC)]


ADD = {"url": "http://new:1", "role": "prefill"}
REFUSED: list[tuple[str, object, int, str]] = [
    ("/replicas", ADD | {"role": "both"}, 400, "Invalid enum value 'both' - at `$.role`; send {"),
    ("/replicas", ADD | {"url": "new:1"}, 400, "url is 'new:1'; write http://host:port"),
    ("/replicas", ADD | {"url": "ftp://new:1"}, 400, "write http://host:port"),
    ("/replicas", ADD | {"url": "http://new:1?x"}, 400, "write http://host:port"),
    ("/replicas", ADD | {"url": "http://new:1/v1"}, 400, "without /v1"),
    ("/replicas", ADD | {"url": "http://new:0"}, 400, "write http://host:port"),
    ("/replicas", ADD | {"url": "http://new:65536"}, 400, "write http://host:port"),
    ("/replicas", ADD | {"id": "a b"}, 400, "id is 'a b'"),
    ("/replicas", ADD | {"id": "x" * 129}, 400, "up to 128 characters"),
    ("/replicas", ADD | {"id": "new\n"}, 400, "without spaces"),
    ("/replicas", ADD | {"id": "p0"}, 409, "'p0' at http://10.0.0.1:8000 is there already"),
    ("/replicas", ADD | {"url": "http://10.0.0.1:8002/"}, 409, "'d0' at http://10.0.0.1:8002 is"),
    ("/replicas", {"role": "prefill"}, 400, "missing required field `url`; send {"),
    ("/replicas", ADD | {"weight": 3}, 400, "unknown field `weight`"),
    ("/replicas", ADD | {"url": 3}, 400, "Expected `str`, got `int` - at `$.url`"),
    ("/replicas", b'{"url":"http://\xff:1","role":"prefill"}', 400, "can't decode byte 0xff"),
    ("/replicas/px/drain", {}, 404, "no replica 'px'; known are: p0, p1, d0, d1"),
    ("/replicas/px/role", {"role": "decode"}, 404, "no replica 'px'"),
    *(
        (path, sent, 400, "; send {")
        for path in ("/replicas", "/planner/mode", "/replicas/p0/role")
        for sent in (b"", b"{", b"[]", b"null", b"\xff", b'"x"')
    ),
]


async def test_what_cannot_be_carried_out_says_why_and_posts_nothing() -> None:
    scene = busy_scene()
    before = len(scene.events)

    async with served(scene) as client:
        for path, body, status, said in REFUSED:
            given = {"data": body} if isinstance(body, bytes) else {"json": body}
            answer = await ask(client, "POST", path, **given)
            assert answer[0] == status, (path, body)
            assert said in answer[1]["error"], (path, body)
    assert len(scene.events) == before


async def test_there_is_a_bound_on_replicas() -> None:
    scene = Scene()
    for number in range(MAX_REPLICAS):
        spec = ReplicaSpec(replica_id=ReplicaId(f"r{number}"), url=f"http://h{number}:1")
        scene.controller.state.fleet.add(spec, 0.0)

    async with served(scene) as client:
        status, answer = await ask(client, "POST", "/replicas", json=ADD)
        assert (status, "1024 replicas already" in answer["error"]) == (409, True)


async def test_path_that_is_not_there_says_what_is() -> None:
    async with served(Scene()) as client:
        await talk(
            client,
            """GET /nothing -> 404 no '/nothing' here; there are /, /metrics, /plan,
            GET /replicas/p0/drain -> 405 GET is not for /replicas/p0/drain; use POST""",
        )


async def test_a_body_that_is_too_large_is_not_read() -> None:
    async with served(Scene()) as client:
        status, answer = await ask(client, "POST", "/replicas", data=b" " * (MAX_BODY_BYTES + 1))
        assert status == 413
        assert str(MAX_BODY_BYTES) in answer["error"]


async def connected(client: ClientSession) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = client._base_url
    return await asyncio.open_connection(url.host, url.port)


async def test_a_body_that_does_not_come_whole_is_not_waited_for() -> None:
    async with served(Scene(), read_timeout_s=0.05) as client:
        reader, writer = await connected(client)
        writer.write(
            b"POST /replicas HTTP/1.1\r\nHost: localhost\r\n"
            b"Authorization: Bearer %b\r\nContent-Length: 10\r\n\r\n{" % TOKEN.encode()
        )
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_connections_are_bounded() -> None:
    async with served(Scene(), max_connections=2) as client:
        held = [await connected(client) for _ in range(3)]
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(held[2][0].read(), 5) == b"", "one too many is closed"
        for reader, writer in held[:2]:
            writer.write(b"GET /state HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 401 " in await reader.readline()
        for _, writer in held:
            writer.close()


async def test_an_order_is_logged_with_what_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vllm_kvpool.router.ops.admin_api")
    async with served(busy_scene()) as client:
        await ask(client, "POST", "/replicas/d1/drain")
    assert "an administrator asks: Drain(replica='d1')" in caplog.text
    assert TOKEN not in caplog.text


async def test_first_tokens_show_up_in_the_state_at_once() -> None:
    scene = busy_scene()

    async with served(scene) as client:
        _, before = await ask(client, "GET", "/state")
        scene.prefilled("r1")
        scene.step(DecodeBegan(RequestId("r1")))
        _, after = await ask(client, "GET", "/state")
        assert after["ttft"]["requests"] == before["ttft"]["requests"] + 1


async def test_a_body_is_read_as_json_whatever_type_curl_gives_it() -> None:
    async with served(busy_scene()) as client:
        headers = BEARER | {"Content-Type": "application/x-www-form-urlencoded"}
        path, sent = "/replicas/p0/role", b'{"role": "decode"}'
        async with client.post(path, headers=headers, data=sent) as response:
            answer = await response.json()
        assert (answer["state"], answer["prefills"]) == ("prefill_to_decode", 1)
