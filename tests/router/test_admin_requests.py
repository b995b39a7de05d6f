"""Orders become events, or say what to change."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.router.scenes import Scene, busy_scene
from vllm_kvpool.router.config import MAX_REPLICAS
from vllm_kvpool.router.control.events import (
    Added,
    Drain,
    Mode,
    Remove,
    ReplicaSpec,
    SetMode,
    SetRole,
    Spawn,
)
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.ops import admin_requests
from vllm_kvpool.router.ops.admin_requests import AdminError
from vllm_kvpool.router.ops.snapshot import RouterView, state_of


@pytest.fixture(scope="module")
def view() -> RouterView:
    return shown(busy_scene())


def shown(scene: Scene) -> RouterView:
    return state_of(scene.controller, scene.now)


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def added(name: str, url: str, role: Role, host: str = "") -> Added:
    return Added(spec=ReplicaSpec(replica_id=ReplicaId(name), url=url, host=host), role=role)


# One replica


def test_an_engine_is_added_under_its_address_or_the_id_given(view: RouterView) -> None:
    plain = admin_requests.add(view, body(url="http://10.0.0.5:8000/", role="prefill"))
    assert plain == added("10.0.0.5:8000", "http://10.0.0.5:8000", Role.PREFILL)
    named = admin_requests.add(view, body(url="https://x:1", role="decode", id="d9", host="h2"))
    assert named == added("d9", "https://x:1", Role.DECODE, "h2")


ADD = {"url": "http://new:1", "role": "prefill"}


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        (ADD | {"role": "both"}, 400, "role is 'both'; choose 'prefill' or 'decode'"),
        (ADD | {"url": "new:1"}, 400, "url is 'new:1'; write http://host:port"),
        (ADD | {"url": "ftp://new:1"}, 400, "write http://host:port"),
        (ADD | {"url": "http://new:1?x"}, 400, "write http://host:port"),
        (ADD | {"url": "http://new:1/v1"}, 400, "without /v1"),
        (ADD | {"url": "http://new:0"}, 400, "write http://host:port"),
        (ADD | {"url": "http://new:65536"}, 400, "write http://host:port"),
        (ADD | {"id": "a b"}, 400, "id is 'a b'"),
        (ADD | {"id": "x" * 129}, 400, "up to 128 characters"),
        (ADD | {"id": "new\n"}, 400, "without spaces"),
        (ADD | {"id": "p0"}, 409, "'p0' at http://10.0.0.1:8000 is there already"),
        (ADD | {"url": "http://10.0.0.1:8002/"}, 409, "'d0' at http://10.0.0.1:8002 is there"),
        ({"role": "prefill"}, 400, "missing required field `url`; send {"),
        (ADD | {"weight": 3}, 400, "unknown field `weight`"),
        (ADD | {"url": 3}, 400, "Expected `str`, got `int` - at `$.url`"),
    ],
)
def test_what_cannot_be_added_says_why(
    view: RouterView, fields: dict[str, Any], status: int, said: str
) -> None:
    with pytest.raises(AdminError) as refused:
        admin_requests.add(view, body(**fields))
    assert refused.value.status == status
    assert said in str(refused.value)


@pytest.mark.parametrize("sent", [b"", b"{", b"[]", b"null", b"\xff", b'"x"'])
def test_a_body_that_is_no_order_is_answered_with_an_example(view: RouterView, sent: bytes) -> None:
    for order in (
        lambda: admin_requests.add(view, sent),
        lambda: admin_requests.spawn(sent),
        lambda: admin_requests.set_mode(sent),
        lambda: admin_requests.set_role(view, "p0", sent, force=False),
        lambda: admin_requests.add_instances(view, sent),
        lambda: admin_requests.remove_instances(view, sent, force=False),
    ):
        with pytest.raises(AdminError, match=r"; send \{") as refused:
            order()
        assert refused.value.status == 400


def test_a_text_that_is_not_utf8_is_no_order(view: RouterView) -> None:
    with pytest.raises(AdminError, match=r"can't decode byte 0xff.*; send \{") as refused:
        admin_requests.add(view, b'{"url":"http://\xff:1","role":"prefill"}')
    assert refused.value.status == 400


def test_there_is_a_bound_on_replicas() -> None:
    scene = Scene()
    for number in range(MAX_REPLICAS):
        spec = ReplicaSpec(replica_id=ReplicaId(f"r{number}"), url=f"http://h{number}:1")
        scene.controller.state.fleet.add(spec, 0.0)
    full = shown(scene)
    with pytest.raises(AdminError, match="1024 replicas already") as refused:
        admin_requests.add(full, body(**ADD))
    assert refused.value.status == 409
    with pytest.raises(AdminError, match="1024 replicas already"):
        admin_requests.add_instances(full, body(type="prefill", instances="new:1"))


def test_spawn_and_mode() -> None:
    assert admin_requests.spawn(body(role="decode")) == Spawn(Role.DECODE, "")
    assert admin_requests.spawn(body(role="prefill", host="h1")) == Spawn(Role.PREFILL, "h1")
    assert admin_requests.set_mode(body(mode="dry_run")) == SetMode(Mode.DRY_RUN)
    with pytest.raises(AdminError, match="choose 'manual' or 'dry_run' or 'automatic'"):
        admin_requests.set_mode(body(mode="auto"))
    with pytest.raises(AdminError, match="role is ''"):
        admin_requests.spawn(body(role=""))


Order = Callable[[RouterView, str, bool], object]
ORDERS: dict[str, Order] = {
    "remove": lambda view, name, force: admin_requests.remove(view, name, force=force),
    "drain": lambda view, name, force: admin_requests.drain(view, name, force=force),
    "flip": lambda view, name, force: admin_requests.set_role(
        view, name, body(role="decode" if name.startswith("p") else "prefill"), force=force
    ),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_replica_that_is_not_there_is_answered_with_those_that_are(
    view: RouterView, order: Order
) -> None:
    with pytest.raises(AdminError, match="no replica 'px'; known are: p0, p1, d0, d1") as refused:
        order(view, "px", True)
    assert refused.value.status == 404
    with pytest.raises(AdminError, match="known are: none"):
        order(shown(Scene()), "px", False)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_the_last_one_of_a_role_stays_unless_forced(order: Order) -> None:
    scene = Scene()
    scene.serving("p0", Role.PREFILL)
    for name in ("d0", "d1"):
        scene.serving(name, Role.DECODE)
    view = shown(scene)
    assert order(view, "d0", False) is not None
    with pytest.raises(
        AdminError, match=r"no other replica serves prefill; .*force=true"
    ) as refused:
        order(view, "p0", False)
    assert refused.value.status == 409
    assert order(view, "p0", True) is not None


def test_a_role_that_it_has_already_is_no_loss() -> None:
    scene = Scene()
    scene.serving("p0", Role.PREFILL)
    asked = admin_requests.set_role(shown(scene), "p0", body(role="prefill"), force=False)
    assert asked == SetRole(ReplicaId("p0"), Role.PREFILL)


def test_what_does_not_serve_may_always_go(view: RouterView) -> None:
    assert admin_requests.remove(view, "d2", force=False) == Remove(ReplicaId("d2"))
    assert admin_requests.drain(view, "d2", force=False) == Drain(ReplicaId("d2"))


# As of vLLM-Ascend's proxy


def test_instances_are_added_one_or_many_and_never_twice(view: RouterView) -> None:
    one = admin_requests.add_instances(view, body(type="decode", instances="10.0.0.7:9000"))
    assert one == [added("10.0.0.7:9000", "http://10.0.0.7:9000", Role.DECODE)]
    names = ["a:1", "10.0.0.1:8000", "[::1]:2", "a:1"]
    many = admin_requests.add_instances(view, body(type="prefill", instances=names))
    assert [each.spec.url for each in many] == ["http://a:1", "http://[::1]:2"]


def test_instances_are_removed_whatever_they_do_by_now(view: RouterView) -> None:
    asked = body(type="prefill", instances=["10.0.0.1:8000", "10.0.0.1:8002"])
    removed = admin_requests.remove_instances(view, asked, force=False)
    assert removed == [Remove(ReplicaId("p0")), Remove(ReplicaId("d0"))]


def test_the_last_ones_of_a_role_are_not_removed_together_unless_forced(view: RouterView) -> None:
    asked = body(type="prefill", instances=["10.0.0.1:8000", "10.0.0.1:8001"])
    with pytest.raises(AdminError, match="no other replica serves prefill"):
        admin_requests.remove_instances(view, asked, force=False)
    assert len(admin_requests.remove_instances(view, asked, force=True)) == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"type": "both", "instances": "a:1"}, "role is 'both'; choose 'prefill' or 'decode'"),
        ({"type": "prefill", "instances": []}, "0 instances; name 1 to 256"),
        ({"type": "prefill", "instances": ["a:1"] * 257}, "257 instances; name 1 to 256"),
        ({"type": "prefill", "instances": "a"}, "instance is 'a'; write host:port"),
        ({"type": "prefill", "instances": ["http://a:1"]}, "write host:port"),
        ({"type": "prefill", "instances": "a:1/x"}, "write host:port"),
        ({"type": "prefill", "instances": "user@a:1"}, "write host:port"),
        ({"instances": "a:1"}, "missing required field `type`"),
    ],
)
def test_what_cannot_be_instances_says_why(
    view: RouterView, fields: dict[str, Any], said: str
) -> None:
    for order in (
        lambda: admin_requests.add_instances(view, body(**fields)),
        lambda: admin_requests.remove_instances(view, body(**fields), force=True),
    ):
        with pytest.raises(AdminError) as refused:
            order()
        assert refused.value.status == 400
        assert said in str(refused.value)


def test_an_instance_that_is_not_there_cannot_be_removed(view: RouterView) -> None:
    with pytest.raises(AdminError, match=r"no instance 'a:1'; known are: 10.0.0.1:8000, 10") as no:
        admin_requests.remove_instances(view, body(type="prefill", instances="a:1"), force=False)
    assert no.value.status == 404


def test_the_answer_names_instances_by_the_role_they_have_now(view: RouterView) -> None:
    answer = admin_requests.instances_answer(view, "done")
    assert answer.message == "done"
    assert answer.current_prefill_instances == ("10.0.0.1:8000", "10.0.0.1:8001")
    assert answer.current_decode_instances == ("10.0.0.1:8002", "10.0.0.1:8003")


# What follows


def following(scene: Scene, name: str) -> str:
    found = [each for each in shown(scene).replicas if each.id == name]
    answer = admin_requests.follows(name, found[0] if found else None)
    assert answer.id == name
    assert (answer.state is None) == (not found)
    return answer.follows


def test_what_follows_is_said_in_words() -> None:
    scene = busy_scene()
    spec = ReplicaSpec(replica_id=ReplicaId("n"), url="http://n:1")
    scene.step(Added(spec=spec))
    said = [following(scene, "n")]
    scene.step(SetRole(ReplicaId("n"), Role.PREFILL))
    said.append(following(scene, "n"))
    scene.step(Drain(ReplicaId("d0")))
    said.append(following(scene, "d0"))
    scene.step(SetRole(ReplicaId("d0"), Role.PREFILL))
    said.append(following(scene, "d0"))
    scene.step(Remove(ReplicaId("p1")))
    said.append(following(scene, "p1"))
    scene.step(SetRole(ReplicaId("p0"), Role.DECODE))
    said.append(following(scene, "p0"))
    scene.step(Drain(ReplicaId("d1")))
    said.append(following(scene, "d1"))
    scene.step(SetRole(ReplicaId("d1"), Role.DECODE))
    said += [following(scene, "d1"), following(scene, "d2"), following(scene, "none")]
    assert said == [
        "inactive",
        "loading, then prefill",
        "draining: 1 answer to end first",
        "draining: 1 answer to end first, then prefill",
        "draining: 2 prompts to end first, then removed",
        "draining: 1 prompt to end first, then decode",
        "without work",
        "being warmed, then decode",
        "has failed too often; tried again in 5 s as decode",
        "removed",
    ]
    assert following(busy_scene(), "p0") == "serving prefill"
