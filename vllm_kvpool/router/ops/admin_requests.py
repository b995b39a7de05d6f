"""What administrators ask for, from bodies of requests to events (pure).

An order that cannot be meant is refused before the controller hears of it, with an `AdminError`
that says what to change. Those under `/instances` are those of vLLM-Ascend's proxy.
"""

import re
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from vllm_kvpool.router.config import MAX_REPLICAS, url_error
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
from vllm_kvpool.router.control.states import DRAINING, LOADING, UP, ReplicaId, Role, State
from vllm_kvpool.router.ops.snapshot import ReplicaView, RouterView, roles_left_empty, serves

MAX_INSTANCES = 256
"""Of one order."""
_ID = re.compile(r"[!-~]{1,128}")
_INSTANCE = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@?#\s]+):\d{1,5}")


class AdminError(Exception):
    """An order that is not carried out: an HTTP status, and what to change."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


class _OrderBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an order says."""


class AddBody(_OrderBody, frozen=True, kw_only=True):
    url: str
    role: str
    id: str = ""
    host: str = ""


class SpawnBody(_OrderBody, frozen=True, kw_only=True):
    role: str
    host: str = ""


class RoleBody(_OrderBody, frozen=True, kw_only=True):
    role: str


class ModeBody(_OrderBody, frozen=True, kw_only=True):
    mode: str


class InstancesBody(_OrderBody, frozen=True, kw_only=True):
    type: str
    instances: str | tuple[str, ...]


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an order for one replica."""

    id: str
    state: State | None
    """None: the replica has been removed."""
    role: Role | None
    follows: str


class InstancesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an order under `/instances`."""

    message: str
    current_prefill_instances: tuple[str, ...]
    current_decode_instances: tuple[str, ...]


# Of one replica


def add(view: RouterView, body: bytes) -> Added:
    asked = _read(body, AddBody, '{"url": "http://host:8000", "role": "prefill"}')
    return _added(view, asked.url, _role(asked.role), asked.id, asked.host)


def spawn(body: bytes) -> Spawn:
    asked = _read(body, SpawnBody, '{"role": "prefill"}')
    return Spawn(_role(asked.role), asked.host)


def remove(view: RouterView, replica_id: str, *, force: bool) -> Remove:
    find(view, replica_id)
    _keep_roles(view, [replica_id], force)
    return Remove(ReplicaId(replica_id))


def drain(view: RouterView, replica_id: str, *, force: bool) -> Drain:
    find(view, replica_id)
    _keep_roles(view, [replica_id], force)
    return Drain(ReplicaId(replica_id))


def set_role(view: RouterView, replica_id: str, body: bytes, *, force: bool) -> SetRole:
    role = _role(_read(body, RoleBody, '{"role": "decode"}').role)
    if not serves(find(view, replica_id), role):
        _keep_roles(view, [replica_id], force)
    return SetRole(ReplicaId(replica_id), role)


def set_mode(body: bytes) -> SetMode:
    asked = _read(body, ModeBody, '{"mode": "automatic"}')
    try:
        return SetMode(Mode(asked.mode))
    except ValueError:
        raise AdminError(400, f"mode is {asked.mode!r}; choose {_either(Mode)}") from None


def find(view: RouterView, replica_id: str) -> ReplicaView:
    """AdminError where there is no such replica."""
    for each in view.replicas:
        if each.id == replica_id:
            return each
    known = ", ".join(each.id for each in view.replicas) or "none"
    raise AdminError(404, f"no replica {replica_id!r}; known are: {known}")


# Of several, as of vLLM-Ascend's proxy


def add_instances(view: RouterView, body: bytes) -> list[Added]:
    """Those that are not there yet."""
    asked = _instances(body)
    role, urls = _role(asked.type), {each.url for each in view.replicas}
    new = [each for each in _names(asked) if f"http://{each}" not in urls]
    if len(view.replicas) + len(new) > MAX_REPLICAS:
        raise AdminError(409, f"there are {MAX_REPLICAS} replicas already; remove some first")
    return [_added(view, f"http://{each}", role, each, "") for each in new]


def remove_instances(view: RouterView, body: bytes, *, force: bool) -> list[Remove]:
    """Whatever their role is by now."""
    asked = _instances(body)
    _role(asked.type)
    by_url = {each.url: each.id for each in view.replicas}
    ids: list[str] = []
    for name in _names(asked):
        if f"http://{name}" not in by_url:
            known = ", ".join(sorted(_address(url) for url in by_url)) or "none"
            raise AdminError(404, f"no instance {name!r}; known are: {known}")
        ids.append(by_url[f"http://{name}"])
    _keep_roles(view, ids, force)
    return [Remove(ReplicaId(each)) for each in ids]


def addresses(view: RouterView, ids: Iterable[str]) -> list[str]:
    """As they are called in `/instances`."""
    urls = {each.id: each.url for each in view.replicas}
    return [_address(urls[each]) for each in ids]


def instances_answer(view: RouterView, message: str) -> InstancesAnswer:
    """Prefill and decode instances that are up, by the role they are wanted for."""

    def current(role: Role) -> tuple[str, ...]:
        return tuple(
            _address(each.url) for each in view.replicas if each.state in UP and each.role is role
        )

    return InstancesAnswer(
        message=message,
        current_prefill_instances=current(Role.PREFILL),
        current_decode_instances=current(Role.DECODE),
    )


# What follows

_FOLLOWS = {
    State.INACTIVE: "inactive",
    State.AUS_PREFILL: "being warmed, then prefill",
    State.AUS_DECODE: "being warmed, then decode",
    State.SHUTTING_NULL: "without work",
    State.FAILED: "failed",
    State.QUARANTINED: "has failed too often",
}


def follows(replica_id: str, replica: ReplicaView | None) -> Following:
    """What becomes of a replica after an order."""
    if replica is None:
        return Following(id=replica_id, state=None, role=None, follows="removed")
    state = replica.state
    if state in DRAINING:
        what = f"draining: {_work(replica)} to end first"
        if state is State.MUTATING_TO_DECODE and replica.waits_for is None:
            what += ", then decode"
    elif state in LOADING:
        what = f"loading, then {replica.role.value}"
    else:
        what = _FOLLOWS.get(state, f"serving {replica.role.value}")
    if replica.waits_for is not None:
        what += f", then {replica.waits_for.value}"
    if replica.retry_in_s is not None:
        what += f"; tried again in {replica.retry_in_s:.0f} s as {replica.role.value}"
    if replica.is_leaving:
        what += ", then removed"
    return Following(id=replica.id, state=state, role=replica.role, follows=what)


def _work(replica: ReplicaView) -> str:
    given = {"prompt": replica.prefills, "answer": replica.decodes}
    parts = [f"{count} {what}{'s' * (count > 1)}" for what, count in given.items() if count]
    return " and ".join(parts) or "nothing"


# Checks

_T = TypeVar("_T", bound=_OrderBody)


def _read(body: bytes, kind: type[_T], example: str) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AdminError(400, f"{error}; send {example}") from None


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        raise AdminError(400, f"role is {name!r}; choose {_either(Role)}") from None


def _either(kind: type[Role] | type[Mode]) -> str:
    return " or ".join(repr(each.value) for each in kind)


def _added(view: RouterView, url: str, role: Role, replica_id: str, host: str) -> Added:
    url = url.rstrip("/")
    if error := url_error(url):
        raise AdminError(400, error)
    name = replica_id or _address(url)
    if _ID.fullmatch(name) is None:
        raise AdminError(400, f"id is {name!r}; choose up to 128 characters without spaces")
    for each in view.replicas:
        if name == each.id or url == each.url:
            raise AdminError(409, f"{each.id!r} at {each.url} is there already")
    if len(view.replicas) >= MAX_REPLICAS:
        raise AdminError(409, f"there are {MAX_REPLICAS} replicas already; remove some first")
    return Added(spec=ReplicaSpec(replica_id=ReplicaId(name), url=url, host=host), role=role)


def _keep_roles(view: RouterView, taken: Iterable[str], force: bool) -> None:
    if not force and (roles := roles_left_empty(view, taken)):
        names = " and ".join(each.value for each in roles)
        raise AdminError(
            409, f"no other replica serves {names}; add one first, or repeat with ?force=true"
        )


def _instances(body: bytes) -> InstancesBody:
    example = '{"type": "prefill", "instances": ["10.0.0.1:8000"]}'
    return _read(body, InstancesBody, example)


def _names(asked: InstancesBody) -> list[str]:
    given = (asked.instances,) if isinstance(asked.instances, str) else asked.instances
    if not 1 <= len(given) <= MAX_INSTANCES:
        raise AdminError(400, f"{len(given)} instances; name 1 to {MAX_INSTANCES}")
    for each in given:
        if _INSTANCE.fullmatch(each) is None:
            raise AdminError(400, f"instance is {each!r}; write host:port")
    return list(dict.fromkeys(given))


def _address(url: str) -> str:
    return url.partition("://")[2]
