"""The router's configuration: a TOML file, read once and checked before anything starts.

All mistakes are named at once; an unknown name with the one that was probably meant. `${NAME}` in a
string stands for a variable of the environment, so that secrets need not be in the file. Relative
paths are below the file's own directory.
"""

import hashlib
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec.structs import replace

from vllm_kvpool.config import MAX_EXPECT_TIMEOUT_MS, MAX_PORT
from vllm_kvpool.errors import ConfigError, nearest
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.private_files import read_secret, secret_error
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.overload import LOCK_AT
from vllm_kvpool.router.control.settings import (
    FlowConfig,
    HealthConfig,
    OverloadConfig,
    PlannerConfig,
    Section,
    Settings,
)
from vllm_kvpool.router.control.states import MAX_REPLICAS
from vllm_kvpool.router.dataplane.origins import is_host

log = logging.getLogger(__name__)

MAX_TIME_S = 86_400.0
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_URL = re.compile(r"https?://(\[[0-9a-fA-F:.%]+\]|[^\[\]:/@\s]+)(:\d{1,5})?(/[^\s?#]*)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATHS = {
    "front": ("keys_file", "salt_file"),
    "admin": ("token_file",),
    "discovery": ("file",),
}
BODY_COPIES = 2
"""Copies of a body that max_bodies_bytes counts: the client's, and the one for the engine."""
HASHED = "sha256:"
MIN_KEY_CHARS = 16
MIN_SALT_BYTES = 32
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_DNS = re.compile(r"[A-Za-z0-9._-]+:([1-9]\d{0,4})")
_ENDPOINT = re.compile(r"https?://[^/?#\s]+\S*")
_VISIBLE = re.compile(r"[!-~]*")
_LISTEN = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\[\]:/\s]*):(\d{1,5})")

RoleName = Literal["prefill", "decode", "both", "spare"]

_S = TypeVar("_S", bound=Section)


class FrontConfig(Section, frozen=True, kw_only=True):
    """The clients' entrance, and limits of their requests."""

    listen: str = "0.0.0.0:8000"
    keys_file: str = ""
    """A TOML file of `[[tenants]]`; empty: clients' keys are passed on, and judged by engines."""
    salt_file: str = ""
    """A file with a secret from which tenants get salts of their own; empty: none."""
    max_body_bytes: int = 32 << 20
    """Larger requests are refused (413) while they are being read."""
    read_timeout_s: float = 30.0
    """A client has so long to send its request."""
    max_bodies_bytes: int = 1 << 30
    """Bytes of all bodies in memory, each counted BODY_COPIES times. Requests beyond the limit are
    refused (503)."""
    max_connections: int = 4096
    max_wait_s: float = 120.0
    """A request that no engine has begun by then is refused."""
    engine_timeout_s: float = 120.0
    """An engine that says nothing of a stream for so long counts as lost."""
    answer_timeout_s: float = 1800.0
    """So does one that has not computed a prompt, or given an answer in one piece, by then."""
    client_timeout_s: float = 120.0
    """A client that takes nothing of its answer for so long is let go."""
    shutdown_timeout_s: float = 30.0
    """When the router is stopped, requests have so long to end."""
    access_log: bool = False
    """A line for each request that engines could be asked for."""
    otlp_traces_endpoint: str = ""
    """URL of an OpenTelemetry collector (OTLP over HTTP) for a span a request; empty: none."""
    hosts: tuple[str, ...] = ()
    """Names by which it is reached, beside addresses and localhost. Without `keys_file`, web pages
    use these alone; so do programs where there are some, or where it listens on loopback."""
    trust_clients: bool = False
    """Take `priority`, transfer parameters and the data-parallel rank from clients."""
    expect_timeout_ms: int = 10_000
    """Seconds that a decode engine waits for the prompt's KV in the pool."""


class AdminConfig(Section, frozen=True, kw_only=True):
    """The address for those who run the deployment."""

    listen: str = "127.0.0.1:8001"
    token: str = ""
    """Needed by every request but those for the page itself. Empty: one is made and logged."""
    token_file: str = ""
    hosts: tuple[str, ...] = ()
    """Names by which it is reached, beside addresses and localhost; others are refused (403)."""


class ReplicaConfig(Section, frozen=True, kw_only=True):
    """An engine."""

    url: str
    role: RoleName
    id: str = ""
    start: tuple[str, ...] = ()
    """A command that starts its engine where that does not answer; empty: others start it."""
    stop: tuple[str, ...] = ()
    """A command that ends it where it is not needed."""


class TenantConfig(Section, frozen=True, kw_only=True):
    """A client with a key, in `front.keys_file`."""

    name: str
    key: str
    """The key, or `sha256:` and its digest in hexadecimal digits."""
    models: tuple[str, ...] = ()
    """Models that the key may use; empty: all."""
    requests_per_s: float = 0.0
    """0: any; so for the other limits."""
    burst: float = 10.0
    """Requests that may come at once after a pause, if `requests_per_s` is given."""
    max_running: int = 0
    """At a time. A request of several sequences counts as so many, also in the rate."""

    @property
    def key_digest(self) -> str:
        """The key's SHA-256 in hexadecimal digits."""
        if self.key.startswith(HASHED):
            return self.key.removeprefix(HASHED).lower()
        return hashlib.sha256(self.key.encode()).hexdigest()


class DiscoveryConfig(Section, frozen=True, kw_only=True):
    """Sources of running engines, beside `[[replicas]]`."""

    file: str = ""
    """A TOML file of `[[replicas]]`, which is watched."""
    prefill_dns: str = ""
    """`host:port`: each address of the name is an engine for prefill; below likewise for decode."""
    decode_dns: str = ""


class RouterConfig(Section, frozen=True, kw_only=True):
    """The whole file."""

    front: FrontConfig = FrontConfig()
    admin: AdminConfig = AdminConfig()
    planner: PlannerConfig = PlannerConfig()
    overload: OverloadConfig = OverloadConfig()
    flow: FlowConfig = FlowConfig()
    health: HealthConfig = HealthConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    replicas: tuple[ReplicaConfig, ...] = ()
    api_key: str = ""
    """Sent to engines by the router's own requests. Clients' keys are passed on as they are."""


class _ReplicasFile(Section, frozen=True, kw_only=True):
    """The content of the file that `discovery.file` names."""

    replicas: tuple[ReplicaConfig, ...] = ()


class _TenantsFile(Section, frozen=True, kw_only=True):
    """The content of the file that `front.keys_file` names."""

    tenants: tuple[TenantConfig, ...] = ()


def load_config(path: Path) -> RouterConfig:
    """Read a file, and check its keys' file; ConfigError names every mistake, a line each."""
    config = reload_config(path)
    if config.front.keys_file:
        read_tenants(Path(config.front.keys_file))
    if config.front.salt_file:
        read_salt(Path(config.front.salt_file))
    return config


def reload_config(path: Path) -> RouterConfig:
    """Read a file alone: its keys' file is read again by itself. ConfigError as `load_config`."""
    config = read_config(_read_toml(path), str(path))
    below = path.absolute().parent
    for name, options in _PATHS.items():
        section = getattr(config, name)
        given = {each: str(below / value) for each in options if (value := getattr(section, each))}
        config = replace(config, **{name: replace(section, **given)})
    return config


def read_replicas(path: Path) -> tuple[ReplicaConfig, ...]:
    """Return the engines that a file of `discovery.file` names; ConfigError."""
    found = _read(_read_toml(path), _ReplicasFile, path).replicas
    _raise([*_replica_mistakes(found)], path)
    return found


def read_tenants(path: Path) -> tuple[TenantConfig, ...]:
    """Read the tenants of a keys file. Raises ConfigError."""
    text = read_secret(path, "[front] keys_file", is_secret=False)
    found = _read(_parse_toml(text, path), _TenantsFile, path).tenants
    errors = [
        f"two [[tenants]] have one {name}"
        for name, values in (
            ("name", {each.name for each in found}),
            ("key", {each.key_digest for each in found}),
        )
        if len(values) < len(found)
    ]
    for each in found:
        if not _NAME.fullmatch(each.name):
            # Engines are sent it, for the pool's shares.
            errors.append(f"choose a name of letters, digits, '.', '_' and '-', not {each.name!r}")
        is_plain = not each.key.startswith(HASHED)
        if not is_plain and not _DIGEST.fullmatch(each.key.removeprefix(HASHED)):
            errors.append(f"{each.name}: key is not {HASHED} and 64 hexadecimal digits")
        if is_plain and len(each.key) < MIN_KEY_CHARS:
            errors.append(f"{each.name}: key has fewer than {MIN_KEY_CHARS} characters")
        if is_plain and (error := secret_error(path)):
            errors.append(f"{each.name}: the key is in the clear, and {error}, or write {HASHED}")
        if not (each.requests_per_s >= 0 and each.max_running >= 0 and each.burst >= 1):
            errors.append(f"{each.name}: limits are 0 (none) or more, burst 1 or more")
    _raise(errors, path)
    return found


def read_salt(path: Path) -> bytes:
    """Return the secret of `front.salt_file`; ConfigError."""
    secret = read_secret(path, "[front] salt_file").strip()
    if len(secret) < MIN_SALT_BYTES:
        raise ConfigError(
            f"[front] salt_file {path} has {len(secret)} bytes, fewer than {MIN_SALT_BYTES}; "
            "`openssl rand -base64 32` prints a secret"
        )
    return secret


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return _parse_toml(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _parse_toml(text: bytes, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text.decode())
    except UNREADABLE as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def _raise(errors: Sequence[str], where: Path | str) -> None:
    """Raise ConfigError with a line for each error, if there are any."""
    if errors:
        raise ConfigError("\n".join(f"{where}: {each}" for each in errors))


def _read(raw: dict[str, Any], kind: type[_S], where: Path | str) -> _S:
    """Return a whole file; ConfigError names every mistake of form."""
    errors: list[str] = []
    found = _section(_expand(raw, "", errors), kind, "", errors)
    _raise(errors, where)
    assert found is not None
    return found


def read_config(raw: dict[str, Any], where: str = "config") -> RouterConfig:
    """Check a file's content; ConfigError names every mistake, a line each."""
    errors: list[str] = []
    raw = _expand(raw, "", errors)
    all_set = not errors
    config = _section(raw, RouterConfig, "", errors)
    # What cannot be read has its default here, which is right by itself; beside others it is not
    # what was written.
    is_read = not errors
    if config is not None and all_set and None not in config.replicas:
        errors += _mistakes(config)
        errors += _contradictions(config) if is_read else ()
    _raise(errors, where)
    assert config is not None
    return config


def listen_address(listen: str) -> tuple[str, int]:
    """Return the host and port of an option `listen`."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


def _expand(value: Any, place: str, errors: list[str]) -> Any:
    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            errors.append(f"{place}: the environment has no {match[1]}; set it")
        return os.environ.get(match[1], "").strip()  # values read from files end in a newline

    if isinstance(value, str):
        return _VARIABLE.sub(variable, value)
    if isinstance(value, dict):
        return {
            name: _expand(each, f"{place}: {name}" if place else name, errors)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_expand(each, place, errors) for each in value]
    return value


_AT = re.compile(r"(?P<what>.*) - at `\$\.?(?P<name>\w*).*`")


def _section_in(hint: Any) -> type[Section] | None:
    """Return the kind of section that a type is, or is a list of."""
    for each in (hint, *get_args(hint)):
        if isinstance(each, type) and issubclass(each, Section):
            return each
    return None


def _section(raw: Any, kind: type[_S], place: str, errors: list[str]) -> _S | None:
    """Return a table as its type says; what is wrong with it is added to `errors`, by name."""
    before = f"{place}: " if place else ""
    if not isinstance(raw, dict):
        errors.append(f"{before}write names and values")
        return None
    hints, found = get_type_hints(kind), dict[str, Any]()
    for name, value in raw.items():
        if name not in hints:
            errors.append(f"{before}unknown name {name!r}; {nearest(name, hints)}")
        elif (converted := _value(value, hints[name], place, name, errors)) is not None:
            found[name] = converted
    required = [each.name for each in msgspec.structs.fields(kind) if each.required]
    errors += [f"{before}`{name}` is missing" for name in required if name not in raw]
    return kind(**found) if found.keys() >= set(required) else None


def _value(value: Any, hint: Any, place: str, name: str, errors: list[str]) -> Any:
    """Return a value as its type says; None where it is wrong, which is added to `errors`."""
    kind = _section_in(hint)
    if kind is None:
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            match = _AT.fullmatch(str(error))
            what = match["what"] if match else str(error)
            if what.startswith("Invalid enum value"):
                what += f"; choose one of {', '.join(_choices(hint))}"
            errors.append(f"{place} {name}: {what}".lstrip())
    elif hint is not kind and isinstance(value, list):
        return tuple(
            _section(each, kind, f"[[{name}]] number {number}", errors)
            for number, each in enumerate(value, 1)
        )
    elif hint is not kind:
        errors.append(f"{name}: write [[{name}]], in two brackets, once for each")
    elif isinstance(value, dict):
        return _section(value, kind, f"[{name}]", errors)
    else:
        errors.append(f"{name}: write [{name}], in one bracket, once")
    return None


def _choices(hint: Any) -> Iterable[str]:
    return get_args(hint) or (each.value for each in hint)


def _mistakes(config: RouterConfig) -> Iterator[str]:
    """Return the mistakes in single values."""
    for name in ("front", "admin", "planner", "overload", "flow", "health"):
        yield from _check_numbers(getattr(config, name), f"[{name}]")
    for name, listen in (("front", config.front.listen), ("admin", config.admin.listen)):
        match = _LISTEN.fullmatch(listen)
        if match is None or int(match[2]) > MAX_PORT:
            yield f"[{name}] listen is {listen!r}; write host:port"
        for host in getattr(config, name).hosts:
            if not is_host(host):
                yield f"[{name}] hosts has {host!r}; write a name, without scheme and port"
    for name, secret in (("api_key", config.api_key), ("[admin] token", config.admin.token)):
        if not _VISIBLE.fullmatch(secret):
            yield f"{name} has blanks or characters beyond ASCII, which no header can have"
    if config.flow.headroom >= LOCK_AT:
        yield f"[flow] headroom is {config.flow.headroom}; choose less than {LOCK_AT}"
    endpoint = config.front.otlp_traces_endpoint
    if endpoint and not _ENDPOINT.fullmatch(endpoint):
        yield f"[front] otlp_traces_endpoint is {endpoint!r}; write http://collector:4318/v1/traces"
    for name in ("prefill_dns", "decode_dns"):
        if value := getattr(config.discovery, name):
            match = _DNS.fullmatch(value)
            if match is None or int(match[1]) > MAX_PORT:
                yield f"[discovery] {name} is {value!r}; write host:port"
    yield from _replica_mistakes(config.replicas)


def _replica_mistakes(replicas: Sequence[ReplicaConfig]) -> Iterator[str]:
    for number, replica in enumerate(replicas, 1):
        if error := url_error(replica.url):
            yield f"[[replicas]] number {number}: {error}"
        if replica.id and (error := _id_error(replica.id)):
            yield f"[[replicas]] number {number}: {error}"
        if bool(replica.start) is not bool(replica.stop):
            given, missing = ("start", "stop") if replica.start else ("stop", "start")
            yield f"[[replicas]] number {number}: {given} without {missing}; write both or neither"
        if replica.role == "spare" and not replica.start:
            yield f"[[replicas]] number {number}: role is 'spare'; write how to start it (start)"


def _contradictions(config: RouterConfig) -> Iterator[str]:
    """Yield an error for each pair of values that exclude each other."""
    if config.front.listen == config.admin.listen and not config.front.listen.endswith(":0"):
        yield "[front] and [admin] listen at one address; choose another"
    if config.front.salt_file and not config.front.keys_file:
        yield "[front] salt_file needs keys_file: without it nobody's tenant is known"
    if BODY_COPIES * config.front.max_body_bytes > config.front.max_bodies_bytes:
        yield f"[front] max_bodies_bytes is below {BODY_COPIES} times max_body_bytes"
    if config.planner.min_prefill + config.planner.min_decode > MAX_REPLICAS:
        yield f"[planner] min_prefill plus min_decode is above {MAX_REPLICAS}"
    if config.admin.token and config.admin.token_file:
        yield "[admin] token and token_file; choose one"
    yield from _check_replicas(config)


def _check_numbers(section: Section, place: str) -> Iterator[str]:
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least = 1e-3 if isinstance(value, float) else 1
        if not least <= value:
            yield f"{place} {name} is {value}; choose {least} or more"
        elif name.endswith("_s") and value > MAX_TIME_S:
            yield f"{place} {name} is {value}; choose at most {MAX_TIME_S:.0f}"
        elif name == "expect_timeout_ms" and value > MAX_EXPECT_TIMEOUT_MS:
            # An engine would not take it, and so wait for nothing.
            yield f"{place} {name} is {value}; choose at most {MAX_EXPECT_TIMEOUT_MS}"


def url_error(url: str) -> str:
    """Return the fault of an engine's address; "" if it has none."""
    match = _URL.fullmatch(url)
    if match is None or not 0 < int((match[2] or ":1")[1:]) <= MAX_PORT:
        return f"url is {url!r}; write http://host:port"
    if (match[3] or "").rstrip("/").endswith("/v1"):
        return f"url is {url!r}; write it without /v1, which the router adds"
    return ""


def _id_error(name: str) -> str:
    if _NAME.fullmatch(name):
        return ""
    return f"id is {name!r}; choose up to 64 letters, digits, '.', '_' and '-'"


def _check_replicas(config: RouterConfig) -> Iterator[str]:
    discovery = config.discovery
    finds = bool(discovery.file or discovery.prefill_dns or discovery.decode_dns)
    if not config.replicas and not finds:
        yield "no engines; add [[replicas]] or [discovery]"
    if len(config.replicas) > MAX_REPLICAS:
        yield f"more than {MAX_REPLICAS} [[replicas]]"
        return
    roles = {each.role for each in config.replicas}
    if roles == {"prefill"} and not finds:
        yield 'no engine decodes; give one of them the role "decode" or "both"'
    ids: set[str] = set()
    urls: set[str] = set()
    for number, replica in enumerate(config.replicas, 1):
        place = f"[[replicas]] number {number}"
        url = replica.url.rstrip("/").lower()
        if replica.id in ids or url in urls:
            twice = replica.url if url in urls else f"id {replica.id!r}"
            yield f"{place}: {twice} is there twice; take one out"
        if replica.id:
            ids.add(replica.id)
        urls.add(url)


# What is made of it


def controller_of(config: RouterConfig) -> Controller:
    """Return a controller that does as the configuration says; ConfigError where it cannot."""
    return Controller(
        Settings(
            **msgspec.structs.asdict(config.flow), answer_timeout_s=config.front.answer_timeout_s
        ),
        planner=config.planner,
        overload=config.overload,
        health=config.health,
    )
