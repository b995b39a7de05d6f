"""The options of both connectors and of requests: read once, checked as far as needs no model.

`vllm_adapt/engine_config.py` checks the rest before anything starts.

The only reader of `kv_connector_extra_config` and of the environment. Every option may also come
from the environment as `KVPOOL_{OPTION}`; the engine's own configuration wins. Other variables are
ignored: a cluster may set its own (`KVPOOL_SERVICE_HOST`).
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from vllm_kvpool.errors import ConfigError, nearest
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.sizes import parse_size

CONNECTOR = "KVPoolConnector"
ENV_PREFIX = "KVPOOL_"
MIN_CHUNK_TOKENS = 16
MAX_CHUNK_TOKENS = 16_384
DEFAULT_STORE_SIZE = "20GiB"
MAX_EXPECT_TIMEOUT_MS = 600_000
MAX_ENGINE_CHARS = 128  # of the name by which a router knows an engine
MAX_NOTICES = 64  # endpoints in a request, one of each rank
MAX_ENDPOINT_CHARS = 300
MAX_PORT = 65_535
NO_NOTICES = "off"
MAX_RETENTION_S = 366 * 86_400.0
MAX_HEARTBEAT_S = 86_400  # peers refuse more
MAX_ITEM_NAME = 4096  # characters; embeddings with longer names are not exchanged
MAX_STAGING_BYTES = 1 << 50
MAX_SHOWN_CHARS = 200  # of a given value that an error repeats

T = TypeVar("T")
C = TypeVar("C", "KVPoolConfig", "EmbedsConfig")


class KVRole(Enum):
    """vLLM's `kv_role`."""

    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"
    BOTH = "kv_both"


class LoadPolicy(Enum):
    """Load every hit, or only hits whose load is expected to pay."""

    ALWAYS = "always"
    AUTO = "auto"


class WritePolicy(Enum):
    """Save into stores at once, or when host memory has to make room."""

    THROUGH = "through"
    BACK = "back"


class LoadFailure(Enum):
    """Compute a request's tokens that failed to load, or fail the request."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class Drafts(Enum):
    """Prefer or require the cells of drafting layers, or leave these layers out."""

    PREFER = "prefer"
    REQUIRE = "require"
    OFF = "off"


class Verify(Enum):
    """Check a loaded cell's checksum, or its length alone."""

    CHECKSUM = "checksum"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolConfig:
    """Every option of the KV pool connector, with its default."""

    store: str | tuple[str, ...] = ""
    """Store URL, or a list of them, nearest tier first. Empty: files below the cache directory."""
    chunk_tokens: int = 256
    """Tokens of a cell, part of every hash: engines share only with engines of the same value."""
    layer_span: int = 0
    """Layers of a cell; 0 chooses a quarter of the model or less."""
    per_head_storage: bool = True
    """True: a cell per KV head. False: a cell per rank, for engines of one TP size."""
    namespace: str = ""
    """Engines with different namespaces never see each other's cells."""
    weights_id: str = ""
    """Engines with the same id have the same weights. Empty: weights count by a sample of files."""
    staging_bytes: int | str = "256MiB"
    """Size of each worker's staging arena."""
    write_policy: WritePolicy = WritePolicy.THROUGH
    """`through`: save to every tier at once. `back`: to the nearest, and to the next when a cell
    leaves it."""
    prefetch: bool = True
    """Fetch what a lookup found into host memory while the request still waits."""
    layerwise: bool = False
    """Let a request run while it is loaded, each layer waiting for its own cells."""
    load_policy: LoadPolicy = LoadPolicy.ALWAYS
    """`always`: load every hit. `auto`: only where it should be faster than computing."""
    load_failure: LoadFailure | None = None
    """Compute what could not be loaded (default, `recompute`), or `fail` the request."""
    lookup_timeout_ms: int = 500
    """Longest time that a new request waits for its lookup."""
    load_timeout_s: float = 30.0
    """Seconds after which a load ends; what it has not loaded is computed."""
    call_timeout_s: float = 10.0
    """A store call that takes longer counts as hung, and the store as away."""
    save_decode: bool = False
    """Save generated tokens, too, and let a `kv_consumer` save."""
    alias_tokens: int = 0
    """A hit may end inside a chunk if it has this many tokens of it; 64, for example. Each prompt's
    end is stored, and an alias for every so many tokens of a chunk. 0: hits end with chunks."""
    drafts: Drafts = Drafts.PREFER
    """KV of a drafter (EAGLE, MTP, a draft model). `prefer`: store it, load what there is of it.
    `require`: a hit ends where it is missing. `off`: neither."""
    verify: Verify = Verify.CHECKSUM
    """`checksum`: check every loaded byte. `length`: only header and length."""
    encryption_key_file: str = ""
    """File with the keys of encrypted cells: the first encrypts, all decrypt. Empty: cells are not
    encrypted. Engines that encrypt never share with engines that do not."""
    notice_listen: str = ""
    """ZMQ endpoint (`tcp://host:port`) at which the first rank tells other engines how far the
    prompts of hand-overs are stored; other ranks use the ports after it. Empty: the host's own
    address with a free port. `off`: no endpoint; other engines ask the stores instead."""
    allowed_peers: tuple[str, ...] = ()
    """Hosts that hand prompts over to this engine, or take them over, beside this machine:
    addresses, blocks of them (`10.42.0.0/16`) or names, with ports or without. No other host is
    answered or connected to."""
    shutdown_timeout_s: float = 4.0
    """Seconds that the exit waits for saves. vLLM ends worker processes after about 5 s."""
    log_requests: bool = False
    """Log of each request what was loaded and why not more, for `kvpool explain --request`."""
    stats_file: str = ""
    """Write counters as JSON to `{stats_file}.kv.{scheduler|worker}.{rank}`."""
    trace_file: str = ""
    """Write a time line for Perfetto to `{trace_file}.{rank}.json`."""

    @property
    def store_urls(self) -> tuple[str, ...]:
        """The urls of the stores, nearest first."""
        return (self.store,) if isinstance(self.store, str) else self.store

    @property
    def encrypts_cells(self) -> bool:
        """True if cells are encrypted on their way into stores."""
        return bool(self.encryption_key_file)

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory for cells in flight, on each rank."""
        return parse_size(self.staging_bytes, "staging_bytes")


class Transport(Enum):
    """Transports of embeddings' rows."""

    MOONCAKE = "mooncake"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedsConfig:
    """Every option of the embedding connector, with its default."""

    listen: str = ""
    """ZMQ endpoint of the first rank, `tcp://host:port`; the others take the ports behind it.
    Empty: vLLM's `ec_ip` and `ec_port`."""
    advertise: str = ""
    """Host at which peers reach this engine, if it differs from that of `listen` (NAT, pods)."""
    peers: tuple[str, ...] = ()
    """Endpoints to connect to from the start."""
    allowed_peers: tuple[str, ...] = ()
    """Hosts that may be peers beside this machine and those of `peers`: addresses, blocks of them
    (`10.42.0.0/16`) or names, with ports (`:14579`, `:14579-14586`) or without. Requests can name
    no other endpoint, no other host is answered, and rows are written to no other."""
    transport: Transport = Transport.MOONCAKE
    """Mooncake's transfer engine, or (`local`) memory that processes of one host share."""
    protocol: str = "tcp"
    """Mooncake's protocol: `tcp`, `rdma`, `ascend`."""
    device: str = ""
    """Network devices for Mooncake, separated by commas. Empty: it chooses."""
    arena_bytes: int | str = "256MiB"
    """Registered memory of each rank: a consumer's window, an encoder's send buffer."""
    default_allocate_tokens: int = 8192
    """The most rows of one grant, and the rows granted before an item's length is known."""
    max_item_bytes: int | str = "16GiB"
    """Larger items are refused."""
    max_landing_bytes: int | str = "4GiB"
    """Host memory for received items until the engine has taken them."""
    retain_bytes: int | str = "4GiB"
    """Items that an encoder keeps; above it encoding waits until consumers have taken some."""
    writer_threads: int = 4
    """Threads of a producer that write rows."""
    queue_shards: int = 4
    """Threads of a consumer that copy rows out of the window; all rows of an item use one."""
    heartbeat_s: float = 5.0
    """Seconds between heartbeats."""
    heartbeat_max_failures: int = 2
    """Missed heartbeats after which a peer counts as lost."""
    bootstrap_timeout_s: float = 30.0
    """Seconds that a request waits for an encoder to offer its item."""
    waiting_timeout_s: float = 60.0
    """Seconds without new rows after which the request gives up; also how long an encoder keeps an
    item that no consumer has taken."""
    weights_id: str = ""
    """Engines with the same id have the same weights. Empty: weights count by a sample of files."""
    namespace: str = ""
    """Engines with different namespaces never exchange embeddings."""
    curve_dir: str = ""
    """Directory with the cluster's CURVE key. Empty: the control channel is neither encrypted nor
    authenticated."""
    stats_file: str = ""
    """Prefix of the JSON files with counters: `{stats_file}.ec.{scheduler|worker}.{rank}`."""

    def nbytes(self, name: str) -> int:
        """Return an option that is a size, in bytes."""
        return parse_size(getattr(self, name), name)


def default_store_url(env: Mapping[str, str] | None = None) -> str:
    """Return the url of the file store under the user's cache directory."""
    env = os.environ if env is None else env
    try:
        base = env.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:  # a user without an entry in passwd, as in some containers
        raise ConfigError(
            "store is not set, and there is no home directory for the default one; name a store, "
            "for example file:///var/cache/kvpool, or set HOME"
        ) from None
    path = _NOT_IN_URLS.sub(lambda found: f"%{ord(found[0]):02X}", str(Path(base).absolute()))
    return f"file://{path}/vllm-kvpool?size={DEFAULT_STORE_SIZE}"


_NOT_IN_URLS = re.compile(r"[%?#\t\r\n]")  # they end a path, or are lost in it


def environment() -> Mapping[str, str]:
    """Return the process's environment, for readers of other programs' variables."""
    return os.environ


class _Connector(msgspec.Struct):
    kv_connector: str = ""
    kv_role: str | None = None
    kv_connector_extra_config: dict[str, Any] = {}


def set_where_unset(variables: Mapping[str, str]) -> None:
    """Set variables of libraries that have no other options; the user's own values stay."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def set_meanwhile(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables as `set_where_unset` does, and unset them again afterwards."""
    added = variables.keys() - os.environ.keys()
    set_where_unset(variables)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def json_named_by(variable: str, env: Mapping[str, str] | None = None) -> dict[str, object] | None:
    """Return the JSON object in the file that an environment variable names.

    The result is None if it is not set.
    """
    path = (os.environ if env is None else env).get(variable)
    if not path:
        return None
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, object])
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{variable}={path} cannot be read: {error}") from None


def read_config(extra: Mapping[str, Any], env: Mapping[str, str] | None = None) -> KVPoolConfig:
    """Build the configuration from `kv_connector_extra_config` and the environment.

    Raises ConfigError naming the option and what to do.
    """
    config = _read(KVPoolConfig, extra, "kv_connector_extra_config", env)
    _check_values(config)
    if not config.store_urls:
        raise ConfigError("store is an empty list; leave it out, or name the tiers, nearest first")
    if config.notice_listen not in ("", NO_NOTICES):
        _check_endpoints("notice_listen", (config.notice_listen,), ", or off")
    return config


_NOT_JSON = '; it takes the JSON itself, of a file "$(cat FILE)"'


def read_engine_config(kv_transfer_config: str) -> KVPoolConfig:
    """Return the configuration of the pool in an engine's `--kv-transfer-config`; ConfigError.

    The pool may be one of several connectors.
    """
    try:
        given = msgspec.json.decode(kv_transfer_config, type=_Connector)
        inside = given.kv_connector_extra_config.get("connectors", [])
        every = [given, *msgspec.convert(inside, list[_Connector])]
    except UNREADABLE as error:
        hint = "" if kv_transfer_config.lstrip().startswith("{") else _NOT_JSON
        raise ConfigError(
            f"--kv-transfer-config: no configuration of a connector: {error}{hint}"
        ) from None
    connector = next((each for each in every if each.kv_connector == CONNECTOR), None)
    if connector is None:
        raise ConfigError(
            '--kv-transfer-config names no KVPoolConnector; write {"kv_connector": '
            '"KVPoolConnector", "kv_role": "kv_both"}'
        )
    role, roles = connector.kv_role or "", [each.value for each in KVRole]
    if role not in roles:
        raise ConfigError(f"--kv-transfer-config: kv_role={role!r}; {nearest(role, roles)}")
    return read_config(connector.kv_connector_extra_config)


def read_embeds_config(
    extra: Mapping[str, Any], env: Mapping[str, str] | None = None
) -> EmbedsConfig:
    """Build the embedding connector's configuration from `ec_connector_extra_config`."""
    config = _read(EmbedsConfig, extra, "ec_connector_extra_config", env)
    _check_values(config)
    for name, endpoints in (("listen", (config.listen,)), ("peers", config.peers)):
        _check_endpoints(name, [each for each in endpoints if each])
    return config


def _read(kind: type[C], extra: Mapping[str, Any], where: str, env: Mapping[str, str] | None) -> C:
    env = os.environ if env is None else env
    known = {f.name: f for f in fields(kind)}
    for name in extra:
        if name not in known:
            given = _short(name)
            if kind is KVPoolConfig and given in _OF_OTHERS:
                raise ConfigError(
                    f"{given!r} in {where} is an option of other connectors "
                    "(vLLM-Ascend's ascend_store and Mooncake connectors, MultiConnector), and "
                    f"KVPoolConnector has none of that name: {_OF_OTHERS[given]}"
                )
            raise ConfigError(f"unknown option {given!r} in {where}; {nearest(given, known)}")
    values: dict[str, Any] = {}
    for name, field in known.items():
        from_env = env.get(ENV_PREFIX + name.upper())
        if name in extra:
            values[name] = extra[name]
            _check_choice(values[name], field.type, f"{where}: {name}")
        elif from_env is not None:
            values[name] = _from_env(name, from_env, field.type)
            _check_choice(values[name], field.type, ENV_PREFIX + name.upper())
    return _convert(values, kind, where)


def _check_choice(value: object, kind: Any, where: str) -> None:
    """Raise ConfigError, which names the choices, for a text that is none of them."""
    for choices in (kind, *get_args(kind)):
        if isinstance(choices, type) and issubclass(choices, Enum) and isinstance(value, str):
            known = [str(member.value) for member in choices]
            if value not in known:
                given = _short(value)
                raise ConfigError(f"{where}={given!r}; {nearest(given, known)}")


_NO_PEERS = "engines share without knowing of each other's parallelism; leave it out"
_NO_RPC = "lookups need no port; leave it out"
_OF_OTHERS = {
    **dict.fromkeys(("prefill", "decode", "prefill_tp_size", "decode_tp_size"), _NO_PEERS),
    **dict.fromkeys(("prefill_pp_size", "prefill_pp_layer_partition"), _NO_PEERS),
    **dict.fromkeys(("lookup_rpc_port", "mooncake_rpc_port"), _NO_RPC),
    "backend": "name the store by its url: store: mooncake://host:port?protocol=ascend",
    "consumer_is_to_put": "save_decode lets a kv_consumer save",
    "save_decode_cache": "the option is save_decode",
    "consumer_is_to_load": "a kv_consumer always loads; leave it out",
    "load_async": "loads are always asynchronous; leave it out",
    "use_layerwise": "the option is layerwise",
    "connectors": "connectors are listed where kv_connector is MultiConnector, each with a "
    "kv_connector_extra_config of its own",
}


def _convert(value: Any, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except UNREADABLE as error:
        raise ConfigError(f"{where}: {_short(error)}") from None


def _short(given: object) -> str:
    """Return a given value as text, cut to `MAX_SHOWN_CHARS`, for errors."""
    try:
        text = str(given)
    except UNREADABLE:  # thousands of digits, or too many levels
        return f"a very large {type(given).__name__}"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _from_env(name: str, text: str, kind: Any) -> Any:
    """Return a value of the option's type.

    Blanks around the text are stripped: variables that are read from files end in a newline.
    """
    text = text.strip()
    if name in _LISTS and text.startswith("["):
        try:
            return msgspec.json.decode(text)
        except UNREADABLE as error:
            raise ConfigError(f"{ENV_PREFIX}{name.upper()}: not a JSON list: {error}") from None
    if _LISTS.get(name):
        return [each.strip() for each in text.split(",") if each.strip()]
    if kind not in _IN_WORDS:
        return text
    try:
        return msgspec.convert(text, kind, strict=False)
    except UNREADABLE:
        raise ConfigError(
            f"{ENV_PREFIX}{name.upper()}={_short(text)!r}: write {_IN_WORDS[kind]}, or unset it"
        ) from None


_IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}
# Options that may be lists -> whether they always are.
_LISTS = {"store": False, "peers": True, "allowed_peers": True}


_TIME = "choose a positive time of at most {most:g}"
_COUNT = "choose 1 to {most}"
# Numbers -> what they are above, the highest, and what an error says.
_LIMITS = {
    "chunk_tokens": (
        MIN_CHUNK_TOKENS - 1,
        MAX_CHUNK_TOKENS,
        f"choose {MIN_CHUNK_TOKENS} to {{most}}",
    ),
    "layer_span": (-1, math.inf, "choose 1 or more, or 0 for the default"),
    "alias_tokens": (-1, math.inf, "choose 1 or more, or 0 for no aliases"),
    **dict.fromkeys(
        (
            *("lookup_timeout_ms", "load_timeout_s", "call_timeout_s", "shutdown_timeout_s"),
            *("bootstrap_timeout_s", "waiting_timeout_s"),
        ),
        (0, MAX_EXPECT_TIMEOUT_MS, _TIME),
    ),
    "heartbeat_s": (0, MAX_HEARTBEAT_S, _TIME),
    "default_allocate_tokens": (0, 1 << 30, _COUNT),
    "writer_threads": (0, 256, _COUNT),
    "queue_shards": (0, 256, _COUNT),
    "heartbeat_max_failures": (0, 1000, _COUNT),
}
_FILES = ("stats_file", "trace_file", "encryption_key_file", "curve_dir")
_SIZES = ("staging_bytes", "arena_bytes", "max_item_bytes", "max_landing_bytes", "retain_bytes")


def _check_values(config: KVPoolConfig | EmbedsConfig) -> None:
    """Raise ConfigError for a value that is outside its limits."""
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if name in _LIMITS:
            above, most, choose = _LIMITS[name]
            if not above < value <= most:
                raise ConfigError(f"{name} is {_short(value)}; {choose.format(most=most)}")
        if name in _FILES and not _can_name_a_file(value):
            raise ConfigError(f"{name} cannot be the name of a file")
        if name in _SIZES:
            # Integers of thousands of digits are compared, not converted.
            is_small = not isinstance(value, int) or abs(value) <= MAX_STAGING_BYTES
            if not is_small or parse_size(value, name) > MAX_STAGING_BYTES:
                raise ConfigError(
                    f"{name} is {_short(value)}; choose 1 to {MAX_STAGING_BYTES} bytes"
                )


def _check_endpoints(name: str, endpoints: Sequence[str], other: str = "") -> None:
    """Raise ConfigError for a text that is not the endpoint of a socket."""
    for endpoint in endpoints:
        match = _ENDPOINT.fullmatch(endpoint) if len(endpoint) <= MAX_ENDPOINT_CHARS else None
        if match is None or not 0 < int(match[2]) <= MAX_PORT:
            given = _short(endpoint)
            raise ConfigError(f"{name}: {given!r} is no endpoint; tcp://host:port{other}")


_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.%]+\]|[^\[\]:/\s]+):([0-9]{1,5})")


def _can_name_a_file(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


_Retention = Annotated[float, Meta(ge=0, le=MAX_RETENTION_S)]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """`kv_transfer_params: {"kvpool": {...}}` of one request."""

    save: bool = True
    load: bool = True
    hand_over: bool = False
    """Another engine goes on with this prompt: save the prompt's end, a partial chunk, as well, and
    tell that engine how far the prompt is stored."""
    expect_tokens: Annotated[int, Meta(ge=0)] = 0
    """Wait, bounded, until this many tokens (rounded down to chunks) are in the pool.

    A number beyond the prompt means the whole prompt with its end.

    Where it is left out, the `tokens` of an earlier answer, passed on as they are, mean the same.
    """
    expect_end: bool = False
    """Wait for the prompt's end as well if the prompt has `expect_tokens` tokens. True for the
    `tokens` of an earlier answer."""
    expect_timeout_ms: Annotated[int, Meta(ge=0, le=MAX_EXPECT_TIMEOUT_MS)] = 10_000
    expect_from: Annotated[str, Meta(max_length=MAX_ENGINE_CHARS)] = ""
    """The engine that computed these tokens, as a router names it; for
    `kvpool_expected_prompts`."""
    notices: Annotated[tuple[str, ...], Meta(max_length=MAX_NOTICES)] = ()
    """Endpoints, one of each rank, at which the engine that computes the expected tokens tells how
    far they are stored."""
    pin_s: _Retention = 0.0
    """Do not evict the prompt for so many seconds."""
    ttl_s: _Retention = 0.0
    """Remove after so many seconds what this request is the first to save; 0: keep it while there
    is room."""
    tenant: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}\Z")] = ""
    """The tenant whose share of the room the prompt takes. Empty: a digest of its `cache_salt`."""


def read_request_options(params: Mapping[str, Any] | None) -> RequestOptions:
    """Read a request's options. Raises ConfigError; the caller then uses `OPTIONS_NOT_READ`."""
    if params is not None and not isinstance(params, Mapping):
        raise ConfigError(f"kv_transfer_params: expected an object, got {type(params).__name__}")
    ours = (params or {}).get("kvpool")
    # Proxies of other connectors say so.
    is_handed_over = (params or {}).get("do_remote_decode") is True
    if ours is None:
        return RequestOptions(hand_over=is_handed_over)
    if not isinstance(ours, Mapping):
        raise ConfigError(
            f"kv_transfer_params.kvpool: expected an object, got {type(ours).__name__}"
        )
    known = [field.name for field in fields(RequestOptions)]
    for name in ours:
        if name not in (*known, "tokens"):
            given = _short(name)
            raise ConfigError(
                f"kv_transfer_params.kvpool: unknown option {given!r}; {nearest(given, known)}"
            )
    # The answer to an earlier request, which proxies pass on.
    told = ours.get("tokens")
    tokens = 0 if told is None else _convert(told, int, "kv_transfer_params.kvpool.tokens")
    is_answer = bool(tokens) and "expect_tokens" not in ours
    asked: dict[str, Any] = {
        "expect_tokens": tokens,
        "expect_end": is_answer,
        "hand_over": is_handed_over,
    }
    asked |= {name: value for name, value in ours.items() if name != "tokens"}
    options = _convert(asked, RequestOptions, "kv_transfer_params.kvpool")
    _check_endpoints("kv_transfer_params.kvpool: notices", options.notices)
    if 0 < options.ttl_s < options.pin_s:
        raise ConfigError("kv_transfer_params.kvpool: ttl_s must not be less than pin_s")
    return options


OPTIONS_NOT_READ = RequestOptions(save=False)
"""For a request with options that cannot be read: it may have asked not to be saved."""
