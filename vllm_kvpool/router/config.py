"""The router's configuration: a TOML file, read once and checked before anything starts.

Unknown names are errors that say what was probably meant. `${NAME}` in a string stands for a
variable of the environment, so that secrets need not be in the file.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from vllm_kvpool.config import MAX_EXPECT_TIMEOUT_MS
from vllm_kvpool.errors import ConfigError, nearest
from vllm_kvpool.router.ops.commands import DEFAULT_ENGINE_COMMAND, DEFAULT_PREFETCH_COMMAND

MAX_REPLICAS = 1024
MAX_TIME_S = 86_400.0
MAX_PORT = 65_535
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_URL = re.compile(r"https?://(\[[0-9a-fA-F:.%]+\]|[^\[\]:/\s]+)(:\d{1,5})?(/[^\s?#]*)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAY_BE_ZERO = ("prefill", "decode", "prefetch_bytes")
_LISTEN = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\[\]:/\s]*):(\d{1,5})")

RoleName = Literal["prefill", "decode", "both"]
Mode = Literal["manual", "dry_run", "automatic"]
WeightSource = Literal["disk", "host_memory", "preload"]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class FrontConfig(_Section, frozen=True, kw_only=True):
    """Where clients come in, and what they may send."""

    listen: str = "0.0.0.0:8000"
    max_body_bytes: int = 32 << 20
    """Larger requests are refused (413) while they are being read."""
    read_timeout_s: float = 30.0
    """A client has so long to send its request."""
    max_bodies_bytes: int = 1 << 30
    """Of all requests that are being served or read; beyond it they are refused (503)."""
    max_connections: int = 4096
    max_wait_s: float = 120.0
    """A request that no engine has begun by then is refused."""
    engine_timeout_s: float = 120.0
    """An engine that says nothing of a stream, or of a prompt, for so long counts as lost."""
    answer_timeout_s: float = 1800.0
    """So does one that has not given an answer in one piece by then."""
    client_timeout_s: float = 120.0
    """A client that takes nothing of its answer for so long is let go."""
    shutdown_timeout_s: float = 30.0
    """When the router is stopped, requests have so long to end."""
    allowed_origins: tuple[str, ...] = ("*",)
    """Whose web pages may send requests (CORS)."""
    trust_clients: bool = False
    """Take `priority`, transfer parameters and the data-parallel rank from clients."""
    connect_timeout_s: float = 3.0
    expect_timeout_ms: int = 10_000
    """How long a decode engine waits for the prompt's KV in the pool."""


class AdminConfig(_Section, frozen=True, kw_only=True):
    """The address for those who run the deployment."""

    listen: str = "127.0.0.1:8001"
    token: str = ""
    """Needed by every request but those for the page itself. Empty: one is made and logged."""
    token_file: str = ""
    hosts: tuple[str, ...] = ()
    """Names by which it is reached, beside addresses and localhost; others are refused (403)."""


class ReplicaConfig(_Section, frozen=True, kw_only=True):
    """An engine that runs already."""

    url: str
    role: RoleName
    id: str = ""
    host: str = ""


class HostConfig(_Section, frozen=True, kw_only=True):
    """A machine on which engines can be started."""

    name: str
    command: tuple[str, ...] = ()
    """How a command is run there, such as ["ssh", "{host}", "{command}"]; empty: this machine."""
    address: str = "127.0.0.1"
    """Where the engines started there are reached."""
    max_replicas: int = 1
    weight_source: WeightSource = "disk"
    first_port: int = 8100
    env: dict[str, str] = {}


class LaunchConfig(_Section, frozen=True, kw_only=True):
    """How an engine is started."""

    command: tuple[str, ...] = DEFAULT_ENGINE_COMMAND
    model: str = ""
    kv_transfer_config: str = '{"kv_connector":"KVPoolConnector","kv_role":"kv_both"}'
    args: tuple[str, ...] = ()
    prefill: int = 0
    """Engines started with the router for prefill, and below for decode."""
    decode: int = 0
    log_dir: str = "kvpool-engines"
    state_file: str = "kvpool-router.json"
    """Which engines run, so that a router that is started again finds them."""
    stop_timeout_s: float = 60.0
    load_timeout_s: float = 600.0
    prefetch_bytes: int = 4 << 30
    """Brought near for engines that load, at most; 0: nothing."""
    prefetch_command: tuple[str, ...] = DEFAULT_PREFETCH_COMMAND
    keep_on_exit: bool = False
    """Leave engines running when the router is stopped (they are, always, when it crashes)."""


class PlannerConfig(_Section, frozen=True, kw_only=True):
    """When roles change and replicas come and go."""

    mode: Mode = "manual"
    every_s: float = 1.0
    min_prefill: int = 1
    max_prefill: int = MAX_REPLICAS
    min_decode: int = 1
    max_decode: int = MAX_REPLICAS
    max_total: int = MAX_REPLICAS
    queue_target_s: float = 2.0
    """Waiting prompts are to be computed within that time."""
    down_hold_s: float = 120.0
    flip_cooldown_s: float = 20.0
    standby_ttl_s: float = 60.0
    warm_ttl_s: float = 600.0
    live_takeover: bool = True


class OverloadConfig(_Section, frozen=True, kw_only=True):
    """When decoders are locked, and requests refused."""

    lock_at: float = 0.98
    """Above `headroom`: else the router locks decoders by what it has given them itself."""
    release_at: float = 0.93
    min_hold_s: float = 1.0
    ttft_target_s: float = 5.0
    """Requests that would wait longer for their first token are refused at once."""
    max_queue: int = 2048


class FlowConfig(_Section, frozen=True, kw_only=True):
    """How much a replica is given, and when prompts are computed apart."""

    prefill_tokens: int = 16_384
    prefill_requests: int = 16
    permits: int = 16
    decode_requests: int = 256
    headroom: float = 0.95
    max_attempts: int = 4
    """Replicas that may fail one request until it is given up."""
    max_lost: int = 2
    """Those that may be lost with it before its first token: a request may be what ends them."""
    resume_within_s: float = 60.0
    """A stream that has stopped is given up when no replica can go on with it for so long."""
    busy_pause_s: float = 1.0
    """How long a replica that has refused work is left alone."""
    drain_timeout_s: float = 120.0
    spills: bool = True
    """Decoders compute prompts, one at a time each, while prefill replicas are behind."""
    hands_over: bool = True


class HealthConfig(_Section, frozen=True, kw_only=True):
    """How replicas are watched."""

    metrics_every_s: float = 1.0
    health_every_s: float = 2.0
    models_every_s: float = 10.0
    """How often they are asked what they serve: adapters come and go."""
    timeout_s: float = 5.0
    failures: int = 3
    """Missed answers in a row until a replica counts as failed; a refused connection is one."""
    window_s: float = 120.0
    max_failures: int = 3
    """Failures within the window until a replica is quarantined."""
    quarantine_s: float = 30.0
    max_quarantine_s: float = 600.0
    retry_pause_s: float = 1.0
    """A replica that has failed is tried again after it."""


class RouterConfig(_Section, frozen=True, kw_only=True):
    """The whole file."""

    front: FrontConfig = FrontConfig()
    admin: AdminConfig = AdminConfig()
    planner: PlannerConfig = PlannerConfig()
    overload: OverloadConfig = OverloadConfig()
    flow: FlowConfig = FlowConfig()
    health: HealthConfig = HealthConfig()
    launch: LaunchConfig = LaunchConfig()
    replicas: tuple[ReplicaConfig, ...] = ()
    hosts: tuple[HostConfig, ...] = ()
    api_key: str = ""
    """Sent to engines by the router's own requests. Clients' keys are passed on as they are."""


def load_config(path: Path) -> RouterConfig:
    """Read a file; ConfigError says what to change in it."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    return read_config(raw, str(path))


def read_config(raw: dict[str, Any], where: str = "config") -> RouterConfig:
    """Check a file's content; ConfigError says what to change."""
    _check_names(raw, RouterConfig, where)
    try:
        config = msgspec.convert(_expand(raw, where), RouterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(str(error))}") from None
    _check(config, where)
    return config


def replica_ids(config: RouterConfig) -> list[str]:
    """What the configured replicas are called, in their order."""
    return [each.id or f"replica-{number}" for number, each in enumerate(config.replicas, 1)]


def _expand(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _variable(match[1], where), value)
    if isinstance(value, dict):
        return {name: _expand(each, f"{where}: {name}") for name, each in value.items()}
    if isinstance(value, list):
        return [_expand(each, where) for each in value]
    return value


def _variable(name: str, where: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise ConfigError(f"{where}: the environment has no {name}; set it") from None


SECTIONS: dict[str, type[_Section]] = {
    **{"front": FrontConfig, "admin": AdminConfig, "planner": PlannerConfig},
    **{"overload": OverloadConfig, "flow": FlowConfig, "health": HealthConfig},
    **{"launch": LaunchConfig, "replicas": ReplicaConfig, "hosts": HostConfig},
}


def _check_names(raw: dict[str, Any], struct: type[_Section], where: str) -> None:
    """msgspec names the unknown field; the nearest known one is said here."""
    for name, value in raw.items():
        if name not in struct.__struct_fields__:
            near = nearest(name, struct.__struct_fields__)
            raise ConfigError(f"{where}: unknown name {name!r}; {near}")
        table = SECTIONS.get(name) if struct is RouterConfig else None
        if table is None:
            continue
        for number, entry in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(entry, dict):
                place = (
                    f"[[{name}]] number {number + 1}" if isinstance(value, list) else f"[{name}]"
                )
                _check_names(entry, table, f"{where}: {place}")


_AT = re.compile(r"(?P<what>.*) - at `\$\.(?P<table>\w+)(\[(?P<index>\d+)\])?(\.(?P<name>\w+))?.*`")


def _explain(error: str) -> str:
    """msgspec's error, in the words of the file."""
    match = _AT.fullmatch(error)
    if match is None:
        return error
    what, table, name = match["what"], match["table"], match["name"]
    if not name and match["index"] is None:
        if table in ("replicas", "hosts"):
            return f"{table}: write [[{table}]], in two brackets, once for each"
        return f"{table}: write [{table}], in one bracket, once"
    place = (
        f"[{table}]" if match["index"] is None else f"[[{table}]] number {int(match['index']) + 1}"
    )
    choices = get_args(get_type_hints(SECTIONS[table])[name]) if name else ()
    if what.startswith("Invalid enum value"):
        return f"{place} {name}: {what}; choose one of {', '.join(choices)}"
    return f"{place} {name}: {what}" if name else f"{place}: {what}"


def _check(config: RouterConfig, where: str) -> None:
    for name in ("front", "admin", "planner", "overload", "flow", "health", "launch"):
        _check_numbers(getattr(config, name), f"{where}: [{name}]")
    for name, listen in (("front", config.front.listen), ("admin", config.admin.listen)):
        match = _LISTEN.fullmatch(listen)
        if match is None or int(match[2]) > MAX_PORT:
            raise ConfigError(f"{where}: [{name}] listen is {listen!r}; write host:port")
    if config.front.listen == config.admin.listen and not config.front.listen.endswith(":0"):
        raise ConfigError(f"{where}: [front] and [admin] listen at one address; choose another")
    if config.front.max_body_bytes > config.front.max_bodies_bytes:
        raise ConfigError(f"{where}: [front] max_bodies_bytes is below max_body_bytes")
    if config.health.quarantine_s > config.health.max_quarantine_s:
        raise ConfigError(f"{where}: [health] max_quarantine_s is below quarantine_s")
    if config.admin.token and config.admin.token_file:
        raise ConfigError(f"{where}: [admin] token and token_file; choose one")
    _check_hosts(config, where)  # first: it bounds the ports, each of which is a name
    _check_replicas(config, where)
    _check_planner(config, where)
    if config.overload.release_at >= config.overload.lock_at:
        raise ConfigError(f"{where}: [overload] release_at must be below lock_at")


def _check_numbers(section: _Section, where: str) -> None:
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least = 0 if name in _MAY_BE_ZERO else 1e-3 if isinstance(value, float) else 1
        if not least <= value:
            raise ConfigError(f"{where} {name} is {value}; choose {least} or more")
        if name.endswith("_s") and value > MAX_TIME_S:
            raise ConfigError(f"{where} {name} is {value}; choose at most {MAX_TIME_S:.0f}")
        if name == "expect_timeout_ms" and value > MAX_EXPECT_TIMEOUT_MS:
            # An engine would not take it, and so wait for nothing.
            raise ConfigError(f"{where} {name} is {value}; choose at most {MAX_EXPECT_TIMEOUT_MS}")
        if name in ("lock_at", "release_at", "headroom") and value > 1:
            raise ConfigError(f"{where} {name} is {value}; it is a share, at most 1")


def url_error(url: str) -> str:
    """What is wrong with an engine's address; "" if it can be one."""
    match = _URL.fullmatch(url)
    if match is None or not 0 < int((match[2] or ":1")[1:]) <= MAX_PORT:
        return f"url is {url!r}; write http://host:port"
    if (match[3] or "").rstrip("/").endswith("/v1"):
        return f"url is {url!r}; write it without /v1, which the router adds"
    return ""


def _check_replicas(config: RouterConfig, where: str) -> None:
    if not config.replicas and not config.hosts:
        raise ConfigError(f"{where}: no engines; add [[replicas]], or [[hosts]] to start some on")
    if len(config.replicas) > MAX_REPLICAS:
        raise ConfigError(f"{where}: more than {MAX_REPLICAS} [[replicas]]")
    ids = {f"{each.name}-{port}" for each in config.hosts for port in _ports(each)}
    urls: set[str] = set()
    for number, (name, replica) in enumerate(
        zip(replica_ids(config), config.replicas, strict=True), 1
    ):
        place = f"{where}: [[replicas]] number {number}"
        url = replica.url.rstrip("/").lower()
        if error := url_error(replica.url):
            raise ConfigError(f"{place}: {error}")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{place}: id is {name!r}; choose letters, digits, '.', '_' and '-'")
        if name in ids or url in urls:
            said = replica.url if url in urls else f"id {name!r}"
            raise ConfigError(f"{place}: {said} is there twice; take one out")
        ids.add(name)
        urls.add(url)


def _ports(host: HostConfig) -> range:
    return range(host.first_port, host.first_port + host.max_replicas)


def _check_hosts(config: RouterConfig, where: str) -> None:
    taken: dict[tuple[str, int], str] = {}
    for host in config.hosts:
        place = f"{where}: [[hosts]] {host.name!r}"
        if not _NAME.fullmatch(host.name):
            raise ConfigError(f"{place}: choose a name of letters, digits, '.', '_' and '-'")
        if [each.name for each in config.hosts].count(host.name) > 1:
            raise ConfigError(f"{place} is there twice; take one out")
        if not 0 < host.max_replicas <= MAX_REPLICAS:
            raise ConfigError(f"{place}: max_replicas must be 1 to {MAX_REPLICAS}")
        if not 0 < host.first_port <= MAX_PORT - host.max_replicas + 1:
            raise ConfigError(
                f"{place}: max_replicas and first_port must leave ports below {MAX_PORT + 1}"
            )
        for port in _ports(host):
            other = taken.setdefault((host.address, port), host.name)
            if other != host.name:
                raise ConfigError(f"{place}: port {port} is also one of {other!r}; move first_port")
    wanted = config.launch.prefill + config.launch.decode
    room = sum(host.max_replicas for host in config.hosts)
    if wanted > room:
        raise ConfigError(
            f"{where}: [launch] wants {wanted} engines, [[hosts]] have room for {room}"
        )
    if (wanted or config.hosts) and not config.launch.model:
        raise ConfigError(f"{where}: [launch] model is missing; name the model to serve")


def _check_planner(config: RouterConfig, where: str) -> None:
    planner = config.planner
    for side in ("prefill", "decode"):
        if getattr(planner, f"min_{side}") > getattr(planner, f"max_{side}"):
            raise ConfigError(f"{where}: [planner] min_{side} is above max_{side}")
    if planner.min_prefill + planner.min_decode > planner.max_total:
        raise ConfigError(f"{where}: [planner] max_total is below min_prefill plus min_decode")
